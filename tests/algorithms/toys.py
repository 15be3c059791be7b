"""Environments for tests of the algorithms, with all kinds of observations and actions that the
scripts accept.

Their ids are ``tests.algorithms.toys:NAME-KIND-v0``. KIND is `vector`, `box` (continuous actions),
`minatar` or `atari`.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
from gymnasium import spaces

EVALUATION = 100_000  # seeds from this one on are those of a script's evaluation
ATARI_SCREEN = 210, 160
# The pixels that show each number in MinAtar, if the number is large.
PIXELS = np.random.default_rng(1).random((4, 4, 8)) < 0.6


def spaces_of(env):
    """Return an object with the attributes of environments that the scripts' networks read."""
    return SimpleNamespace(
        single_observation_space=env.observation_space, single_action_space=env.action_space
    )


class Toy(gym.Env):
    """An environment that shows numbers in [0, 1] and takes one of two actions, 0 or 1.

    A box takes actions from ``low`` to ``high``. Actions above the middle count as 1.
    """

    num_features = 0  # how many numbers the environment shows
    kind = "vector"

    def __init__(self, render_mode=None, frameskip=1, low=-1, high=1):
        self._frameskip, self.ale = frameskip, self  # the interface of Atari's games
        self.action_space = (
            spaces.Box(low, high, (2,), np.float32) if self.kind == "box" else spaces.Discrete(2)
        )
        self._middle = (low + high) / 2
        self.observation_space = {
            "vector": spaces.Box(0, 1, (self.num_features,), np.float32),
            "box": spaces.Box(0, 1, (self.num_features,), np.float32),
            "minatar": spaces.Box(0, 1, (4, 4, self.num_features), bool),
            "atari": spaces.Box(0, 255, (*ATARI_SCREEN, 3), np.uint8),
        }[self.kind]

    def features(self):
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        # Atari's wrappers begin with the number of no-ops that this generator draws, and step four
        # frames at once.
        self.np_random = np.random.default_rng(1)
        self.frames = -int(np.random.default_rng(1).integers(1, 31))
        self.begin(seed)
        return self._observation(), {}

    def step(self, action):
        self.frames += 1
        if self.kind == "atari" and (self.frames <= 0 or self.frames % 4):
            return self._observation(), 0.0, False, False, {}
        is_other = action[0] > self._middle if self.kind == "box" else action == 1
        reward, terminated, truncated = self.act(bool(is_other))
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self):
        features = np.array(self.features(), np.float32)
        if self.kind == "minatar":
            return PIXELS[..., : self.num_features] & (features > 0.5)
        if self.kind == "atari":
            # Unused: the wrappers call getScreenGrayscale.
            return np.broadcast_to(np.uint8(0), self.observation_space.shape)
        return features

    # The methods of a game that Atari's wrappers call.

    def get_action_meanings(self):
        return ["NOOP", "UP"]

    def lives(self):
        return 1

    def getScreenGrayscale(self, screen):  # noqa: N802
        """Draw columns as bright as the numbers."""
        for columns, feature in zip(
            np.array_split(screen, self.num_features, axis=1), self.features(), strict=True
        ):
            columns[:] = 255 * feature


class Clockwork(Toy):
    """An environment whose observations and rewards depend only on the actions since its reset.

    Episodes last four steps. In turn, they are truncated or terminate.
    """

    num_features = 3
    episodes = 0

    def begin(self, seed):
        self.steps, self.phase = 0, 0.3

    def act(self, is_other):
        self.steps += 1
        self.phase = (3.7 * self.phase * (1 - self.phase) + 0.11 * is_other) % 1
        has_ended = self.steps == 4
        self.episodes += has_ended
        reward = 2 * self.phase - is_other
        return reward, has_ended and self.episodes % 2 == 0, has_ended and self.episodes % 2 == 1

    def features(self):
        return self.phase, (7 * self.phase) % 1, self.steps / 5


class Corridor(Toy):
    """A corridor to walk through or to leave. The last three steps are worth 1 each. Leaving before
    them is worth 1, too.

    Leaving within the last three steps is worth nothing, so a learner with the wrong sign leaves
    there at the latest. The action that walks changes from place to place, so no policy gets
    through with a single action. (With pixels, which take long to learn from, one action does.)
    Episodes are cut off after two steps, so a learner that takes the cut for the end leaves at
    once. In an evaluation, each walk begins where the way is longest, and none is cut off: it
    returns up to 3.
    """

    length, limit = 5, 2
    num_features = length

    def begin(self, seed):
        self.steps = 0
        if seed is not None:
            self.is_evaluation = seed >= EVALUATION
        self.place = 0 if self.is_evaluation else int(self.rng.integers(self.length))

    def act(self, is_other):
        self.steps += 1
        walks, is_early = self.walks(is_other), self.place < self.length - 3
        self.place += walks
        reward = float(walks != is_early)
        ends = self.place == self.length or not walks
        return reward, ends, not ends and not self.is_evaluation and self.steps >= self.limit

    def walks(self, is_other):
        return is_other == (self.place % 2 == 0 or self.kind == "atari")

    def features(self):
        return [float(place == self.place) for place in range(self.length)]


class Cells(Corridor):
    """A corridor whose episodes are cut off after each step.

    In a replay buffer that takes these cuts for ends, no step leads to the value of another step.
    """

    limit = 1


class Recall(Corridor):
    """A corridor in which only every second observation shows the episode's action that walks."""

    num_features = Corridor.length + 2

    def begin(self, seed):
        super().begin(seed)
        self.sign = bool(self.rng.integers(2))

    def walks(self, is_other):
        return is_other == self.sign

    def features(self):
        hints = [float(self.steps % 2 == 0 and self.sign == sign) for sign in (False, True)]
        return [*super().features(), *hints]


class Lives(Toy):
    """A game of two lives, each of which begins with a shot. A life's third step is worth 5, and
    its fourth step ends it.
    """

    num_features = 2

    def get_action_meanings(self):
        return ["NOOP", "FIRE"]

    def begin(self, seed):
        self.left, self.steps, self.has_begun = 2, 0, False

    def act(self, is_other):
        self.has_begun |= is_other
        self.steps += self.has_begun
        reward = 5.0 if self.steps == 3 else -0.5 * self.has_begun
        if self.steps == 4:
            self.left, self.steps, self.has_begun = self.left - 1, 0, False
        return reward, self.left == 0, False

    def lives(self):
        return self.left

    def features(self):
        return self.has_begun, self.steps / 4


for base in (Clockwork, Corridor, Cells, Recall, Lives):
    for kind in ("vector", "box", "minatar", "atari"):
        toy = type(f"{base.__name__}{kind.title()}", (base,), {"kind": kind})
        gym.register(f"{base.__name__}-{kind}-v0", toy)

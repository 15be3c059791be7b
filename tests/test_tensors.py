"""The structure of a policy: what counts as a change, what does not, and what workers get."""

import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from clusterenv_runtime import CategoricalPolicy
from clusterenv_runtime.policy import tensors
from clusterenv_runtime.policy.tensors import flat_weights, pickled
from clusterenv_runtime.policy.versions import PolicyCopy

from .envs import CountingEnv
from .nets import change, copy_on_worker, linear, store_in


@pytest.fixture
def store():
    return store_in([PolicyCopy()], CountingEnv.observation_space, CountingEnv.action_space)


class Aside(nn.Module):
    """Has a network that it does not register."""

    def __init__(self, network):
        super().__init__()
        self.network, self.bias = network, nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (self.network[0] if isinstance(self.network, list) else self.network)(x) + self.bias


class Nothing(nn.Module):
    def forward(self, x):
        return torch.zeros(len(x), 2)


def with_attribute(name, value):
    policy = CategoricalPolicy(linear(1, 2))
    setattr(policy, name, value)
    return policy


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


REFUSED = [
    (lambda: CategoricalPolicy(Nothing()), "the policy has no parameters"),
    (lambda: CategoricalPolicy(nn.LazyLinear(2)), "uninitialized parameter .* Call `forward` to"),
    (lambda: with_attribute("numbers", ("heat",)), "'heat' is among the policy's numbers .* but"),
    (
        lambda: with_attribute("numbers", "temperature"),
        "'t' is among the policy's numbers 'temperature', but is None",
    ),
    (
        lambda: with_attribute("lock", threading.Lock()),
        "cannot be sent to workers: TypeError: cannot pickle",
    ),
    (lambda: with_attribute("deep", nested(10_000)), "cannot be sent to workers: .* recursion"),
    (
        lambda: CategoricalPolicy(Aside([linear(1, 2)])),
        r"parameter \(8, 1\) that no module registers, as in a list",
    ),
    (
        lambda: CategoricalPolicy(Aside(lambda x, net=linear(1, 2): net(x))),
        "no module registers, .* Use nn.ModuleList",
    ),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_a_policy_that_cannot_travel_is_a_one_line_error_and_changes_nothing(store, make, says):
    policy = CategoricalPolicy(linear(1, 2))
    store.publish(policy)
    structure, since, state = store.structure, store.since, store.state_dict()
    wrong = make()
    with pytest.raises(ValueError, match=says) as caught:
        store.publish(wrong)
    assert "\n" not in str(caught.value)
    assert all(module.training for module in wrong.modules())
    assert (store.structure, store.since, store.state_dict()) == (structure, since, state)
    assert not store.publish(policy)  # as if the other policy had never been published
    assert (store.version, store.since) == (state["policy_version"] + 1, since)


def take_last(policy):
    last = policy.last
    del policy.last
    policy.last = last


CHANGES = {
    "a number": lambda policy: setattr(policy, "extra", np.float32(2)),
    "an array": lambda policy: policy.array.__iadd__(1),
    "a tensor": lambda policy: policy.tensor.add_(1),
    "a view of every other number": lambda policy: policy.view.add_(1),
    "a list": lambda policy: policy.items.append(1),
    "a dict": lambda policy: policy.names.update(a=2),
    "a private attribute": lambda policy: setattr(policy, "_private", 1),
    "an activation": lambda policy: policy.actor.__setitem__(1, nn.Sigmoid()),
    "an attribute of a module": lambda policy: setattr(policy.actor[2], "negative_slope", 0.5),
    "an option": lambda policy: setattr(policy.options, "gain", 2),
    "a function": lambda policy: setattr(policy, "act", lambda params, noise: params.argmin(-1)),
    "a hook": lambda policy: policy.actor.register_forward_hook(lambda *_: None),
    "a pre-hook": lambda policy: policy.actor.register_forward_pre_hook(lambda *_: None),
    "the order of parameters": lambda policy: take_last(policy),
    "a shape": lambda policy: setattr(policy, "last", nn.Parameter(torch.zeros(3))),
    "a dtype": lambda policy: policy.actor.double(),
    "its numbers": lambda policy: setattr(policy, "numbers", ("extra",)),
}


class Options:
    gain = 1


def changeable():
    policy = CategoricalPolicy(nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.LeakyReLU()))
    policy.last, policy.later = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    policy.extra, policy.array, policy.tensor = np.float32(1), np.zeros(2), torch.zeros(2)
    policy.items, policy.names, policy.options = [], {"a": 1}, Options()
    policy.view = torch.zeros(4)[::2]
    return policy


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_any_part_of_a_policy_changes_its_structure(store, name):
    policy = changeable()
    store.publish(policy)
    assert not store.publish(policy)
    CHANGES[name](policy)
    assert store.publish(policy)
    assert not store.publish(policy)


class Hot(CategoricalPolicy):
    """Has a number that is a property."""

    numbers = ("temperature",)
    _temperature = 1

    @property
    def temperature(self):
        return self._temperature

    @temperature.setter
    def temperature(self, value):
        self._temperature = value


class Recalling(nn.Module):
    """Keeps tensors of its last forward pass."""

    def __init__(self):
        super().__init__()
        self.layers, self.seen = linear(1, 2), {}

    def forward(self, x):
        self.features = self.layers[:2](x)
        self.seen["logits"] = self.layers[2](self.features)
        return self.seen["logits"]


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.head = nn.LSTM(1, 4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.memory(x[None])[0][0])


class Pickling(nn.Module):
    """Has its own form of pickle."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)

    def __reduce__(self):
        return Pickling, (self.layers,)


class Stateful(Pickling):
    __reduce__ = object.__reduce__

    def __getstate__(self):
        return (self.__dict__,)

    def __setstate__(self, state):
        self.__dict__.update(state[0])


def tied():
    net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    net[2].weight = net[1].weight
    return net


def hooked():
    net = linear(1, 2)
    net.register_forward_hook(lambda module, inputs, output: output * 2)
    net.register_forward_pre_hook(lambda module, inputs, kwargs: None, with_kwargs=True)
    return net


def local(actor):
    class Local(CategoricalPolicy):  # travels by value, as all classes of a script do
        def forward(self, observations):
            return torch.mul(super().forward(observations), 2)

    return Local(actor)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    STEADY = {
        "a plain network": CategoricalPolicy(linear(1, 2)),
        "a class that travels by value": local(linear(1, 2)),
        "two modes": CategoricalPolicy(
            nn.Sequential(nn.BatchNorm1d(1).eval(), nn.Dropout(), linear(1, 2))
        ),
        "an LSTM": CategoricalPolicy(Memory()),
        "tied weights": CategoricalPolicy(tied()),
        "hooks": CategoricalPolicy(hooked()),
        "a compiled module": CategoricalPolicy(torch.compile(linear(1, 2), backend="eager")),
        "a module with weight_norm": CategoricalPolicy(nn.utils.weight_norm(nn.Linear(1, 2))),
        "tensors of the last forward pass": CategoricalPolicy(Recalling()),
        "a number that is a property": Hot(linear(1, 2)),
        "its own reduce": CategoricalPolicy(Pickling(linear(1, 2))),
        "its own state": CategoricalPolicy(Stateful(linear(1, 2))),
        "a dict that contains itself": with_attribute("settings", {}),
        "a tensor without gradients": with_attribute("scale", torch.arange(3)),
    }
STEADY["a dict that contains itself"].settings["parent"] = STEADY[
    "a dict that contains itself"
].settings


@pytest.mark.parametrize("name", STEADY)
def test_learning_does_not_change_the_structure_and_workers_act_alike(store, name):
    policy = STEADY[name].train()
    modes = [module.training for module in policy.modules()]

    def learn():
        policy(torch.randn(8, 1)).sum().backward()
        change(policy, 0.1)
        policy.zero_grad(set_to_none=False)
        if policy.numbers:
            policy.temperature += 1

    learn()  # torch.compile and a first forward pass add attributes
    assert store.publish(policy)
    learn()
    assert not store.publish(policy)
    assert [module.training for module in policy.modules()] == modes
    assert not store.publish(policy.eval())
    assert pickled(policy) == store.structure
    acting = copy_on_worker(policy).policy
    observations = torch.randn(5, 1)
    assert not any(module.training for module in acting.modules())
    assert not any(each.requires_grad for each in acting.parameters())
    assert all(map(torch.equal, flat_weights(policy), flat_weights(acting)))
    assert torch.equal(policy(observations), acting(observations))


def test_classes_of_a_script_are_pickled_only_once(store, monkeypatch):
    """`cloudpickle` takes milliseconds for a class, and a learner may publish often."""
    whole = []

    def counted(policy, code=None):
        whole.append(code is None)
        return pickled(policy, code)

    monkeypatch.setattr(tensors, "pickled", counted)
    policy = local(linear(1, 2))
    for _ in range(4):
        store.publish(policy)
    assert sum(whole) == 1
    assert not store.publish(type(policy)(policy.actor))  # another policy of the same class
    assert sum(whole) == 2
    assert store.publish(local(policy.actor))  # of another class of this name


def test_a_structure_that_changes_every_time_is_warned_of_once(store, caplog):
    policy = changeable()
    for policy.extra in range(15):
        store.publish(policy)
    warned = [text for text in caplog.messages if "structure changed 10 times" in text]
    assert len(warned) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_of_a_policy_on_a_gpu_is_on_a_gpu_at_a_worker(store):
    policy = with_attribute("scale", torch.arange(3)).cuda()
    policy.scale = policy.scale.cuda()
    policy.register_buffer("mean", torch.ones(2, device="cuda"))
    store.publish(policy)
    acting = pickle.loads(store.structure)
    assert {each.device.type for each in (acting.scale, acting.mean, *acting.parameters())} == {
        "cpu"
    }

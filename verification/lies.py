"""The wrong messages of a faulty worker."""

from __future__ import annotations

from random import Random

from clusterenv_runtime import messages
from clusterenv_runtime.pickling import to_frames


def lie_instead_of(
    random: Random,
    seq: int | None,
    message: messages.Message,
    frames: list[bytes],
    of_others: set[int | None],
    has_policy: bool,
) -> tuple[str, list[list[bytes]]]:
    """Return the kind of a lie, and the messages that replace a message, each a list of frames.

    No worker may send these messages: the head must refuse the process, or pay no attention.
    ``of_others`` are requests to other workers. Only a worker without a policy pulls unasked.
    """
    # No lie leaves a worker silent for good: the head cannot tell that from a long step.
    kinds = ["garbage", "stranger", "short", "more"] + ["twice", "others"] * bool(seq)
    kinds += ["pull"] * (not has_policy)
    if isinstance(message, messages.Part):
        kinds += ["empty", "shape"]
    match kind := random.choice(kinds):
        case "garbage":
            return kind, [[frames[0], b"\xc1" + frames[1][1:], *frames[2:]]]
        case "stranger":  # a message that only the head sends
            return kind, [to_frames((seq, "Step", {"actions": None}))]
        case "short":
            return kind, [[*frames[:-1], frames[-1][: len(frames[-1]) // 2]]]
        case "more":
            return kind, [[*frames, b"more"]]
        case "pull":
            return kind, [messages.worker_frames(seq, messages.Pull(0), ()), frames]
        case "twice":
            return kind, [frames, frames]
        case "others":  # responses to other workers' requests, besides its own
            others = sorted({seq + 1, seq - 1} & of_others)
            return kind, [messages.worker_frames(each, message, ()) for each in others] + [frames]
        case "empty":
            message = messages.Reply(None)
    if kind == "shape":
        message.rewards = message.rewards[1:]
    return kind, [messages.worker_frames(seq, message, ())]

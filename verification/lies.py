"""The wrong messages of a faulty worker."""

from __future__ import annotations

from random import Random

from clusterenv_runtime.wire import protocol


def lie_instead_of(
    random: Random,
    seq: int | None,
    message: protocol.Message,
    frames: list[bytes],
    asked: set[int | None],
) -> tuple[str, list[list[bytes]]]:
    """Return the kind of a lie, and the messages that replace a message, each a list of frames.

    No worker may send these messages. No lie answers the requests in ``asked``, because an honest
    response to them could be the same.
    """
    # No lie leaves a worker silent for good: the head cannot tell that from a long step.
    kinds = ["garbage", "pulls"] + ["twice", "others"] * (seq is not None)
    kinds += ["empty"] * (not isinstance(message, protocol.Pull))
    kinds += ["short", "fewer"] * (len(frames) > 1)
    kind = random.choice(kinds + ["future", "past"] * isinstance(message, protocol.Part))
    match kind:
        case "garbage":
            return kind, [[b"\xc1", *frames[1:]]]
        case "twice":
            return kind, [frames, frames]
        case "others":  # responses to other requests, besides its own
            others = {seq + 1, seq - 1} - asked
            return kind, [
                *([protocol.encode((other, message)), *frames[1:]] for other in sorted(others)),
                frames,
            ]
        case "pulls":
            return kind, [protocol.frames(seq, protocol.Pull(0)) for _ in range(5)]
        case "empty":
            return kind, [protocol.frames(seq, protocol.Reply([1, 2]))]
        case "short":
            return kind, [[*frames[:-1], frames[-1][: len(frames[-1]) // 2]]]
        case "fewer":
            return kind, [frames[:-1]]
    message.version = 10**6 if kind == "future" else 0
    return kind, [[protocol.encode((seq, message)), *frames[1:]]]

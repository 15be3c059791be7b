"""How a worker's process handles the head's messages: the rules of the model's other half."""

from __future__ import annotations

from .state import Process, Request, Violation


def reads(process: Process, message: tuple) -> Process:
    """Take a message from the head: handle it now, or later, if the process waits for weights."""
    if process.stage != "pulling":
        return does(process._replace(stage="idle"), message)
    if message[0] == "structure":  # the weights to come belong to it
        return does(process, message)
    if message[0] != "weights":
        return process._replace(later=(*process.later, message))
    _, version, base, structure = message
    if base not in ((), process.chain) or structure != process.structure:
        raise Violation(f"{message} came to {process}")
    process = process._replace(stage="idle", held=version, chain=(*base, version))
    return acts(process, process.request)


def does(process: Process, message: tuple) -> Process:
    """Handle a message from the head."""
    if message[0] in ("collect", "step", "cut"):
        if message[1].seq <= process.last:
            raise Violation(f"{message} came to {process}, which has done it")
        process = process._replace(last=message[1].seq)
    match message:
        case ("setup",):
            return process.says("built")
        case ("structure", structure):
            return process._replace(structure=structure, held=0, chain=())
        case ("collect", request):
            lags = process.held < request.version
            if process.held and not (
                lags and request.diverged and process.held == request.behavior
            ):
                return acts(process, request)
            return process._replace(stage="pulling", request=request).says("pull", process.held)
        case ("step" | "cut" as kind, request):
            return process.says("stepped", request, kind == "cut")
    raise Violation(f"{message} came to {process}")


def acts(process: Process, request: Request) -> Process:
    """Collect a rollout with the weights that the process holds."""
    return process._replace(request=None).says("part", request, process.held, process.structure)

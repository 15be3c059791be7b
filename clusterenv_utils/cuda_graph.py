"""A training step that a GPU runs as one CUDA graph, modeled on LeanRL's CudaGraphModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .errors import check

WARM_UP = 3  # eager steps before the capture, as in torch's `make_graphed_callables`
TOLERANCE = 0.01  # of the losses; cudnn may choose other kernels in a graph
Tensors = dict[str, torch.Tensor]


class CudaGraph:
    """A training step on named tensors of constant shapes, which a GPU runs as one CUDA graph.

        update_once = CudaGraph(update, optimizer, agent, args)
        losses = update_once({"obs": obs, "actions": actions})

    The step is ``update(optimizer, agent, args, minibatch)``, and returns a dict of tensors. On a
    CPU each call calls it. On a GPU the first three calls do so, too, on a separate stream. The
    fourth call captures a graph, and compares it once with the step. That call and all later calls
    replay the graph on the tensors that they get.

    The step must not wait for the GPU, as `.item()` does. After the capture its Python code no
    longer runs. The tensors that it returns belong to the graph, and the next call overwrites them.
    Each call uses the learning rate that is in the optimizer's ``param_groups`` at that time.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(
        self, step: Callable[..., Tensors], optimizer: torch.optim.Optimizer, *fixed: Any
    ) -> None:
        self._step = partial(step, optimizer, *fixed)
        self._name = getattr(step, "__name__", "the step")
        self._optimizer = optimizer
        self._graph: Any = None
        self._inputs: Tensors = {}  # the tensors that the graph reads
        self._outputs: Tensors = {}
        self._calls = 0

    def __call__(self, minibatch: Tensors) -> Tensors:
        """Take a step on these tensors, all of which are on one device.

        Raises:
            ValueError: on a GPU, a name, shape or dtype differs from the first call's.
            ScriptError: the graph does not compute what the step does.
        """
        if not next(iter(minibatch.values())).is_cuda:
            return self._step(minibatch)
        if self._calls == 0:
            self._allocate(minibatch)
        expected, got = ({name: (value.shape, value.dtype) for name, value in each.items()}
                         for each in (self._inputs, minibatch))  # fmt: skip
        if got != expected:
            raise ValueError(f"got a minibatch of {got}, expected {expected}")
        for name, value in minibatch.items():
            self._inputs[name].copy_(value)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._run_eagerly()
        if self._graph is None:
            expected_losses = self._try_out()
            self._graph = self._capture()
            self._graph.replay()
            self._compare(expected_losses)
        else:
            self._graph.replay()
        return self._outputs

    def _allocate(self, minibatch: Tensors) -> None:
        device = next(iter(minibatch.values())).device
        self._inputs = {name: torch.empty_like(value) for name, value in minibatch.items()}
        self._rates = [torch.empty((), device=device) for _ in self._optimizer.param_groups]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _run_eagerly(self) -> Tensors:
        """Run the step on the graph's stream, and let the current stream wait for it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._rates_as_tensors(capturable=False):
            outputs = self._step(self._inputs)
        current.wait_stream(self._stream)
        return outputs

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return a graph of the step. The capture does not run the step."""
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, stream=self._stream)
        with capture, self._rates_as_tensors(capturable=True):
            self._outputs = self._step(self._inputs)
        return graph

    @torch.no_grad()
    def _try_out(self) -> Tensors:
        """Return what the step returns, and take back what it has changed."""
        held = [each for group in self._optimizer.param_groups for each in group["params"]]
        state = [each for own in self._optimizer.state.values() for each in own.values()]
        held += [each for each in state if isinstance(each, torch.Tensor)]
        copies = [each.clone() for each in held]
        numbers = [torch.get_rng_state(), torch.cuda.get_rng_state()]
        with torch.enable_grad():
            outputs = self._run_eagerly()
        outputs = {name: value.clone() for name, value in outputs.items()}
        for each, copy in zip(held, copies, strict=True):
            each.copy_(copy)
        torch.set_rng_state(numbers[0])
        torch.cuda.set_rng_state(numbers[1])
        return outputs

    def _compare(self, expected: Tensors) -> None:
        # A value near 0 may be the difference of larger ones, which are rounded.
        largest = max(value.abs().max().item() for value in expected.values())
        for name, value in expected.items():
            got = self._outputs[name]
            alike = torch.allclose(got, value, TOLERANCE, 1e-3 * min(largest, 1), equal_nan=True)
            text = f"{name} of {self._name} is {got.mean().item():.4g} by its CUDA graph and"
            hint = "does its code depend on more than its minibatch?"
            check(alike, f"{text} {value.mean().item():.4g} without one: {hint}")

    @contextmanager
    def _rates_as_tensors(self, capturable: bool) -> Iterator[None]:
        """Have the optimizer read its learning rates from the GPU, as its graph will.

        Outside this block the rates are numbers, so that the optimizer's checkpoints load on any
        device.
        """
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group.update(lr=rate, capturable=capturable)
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group.update(lr=rate, capturable=False)

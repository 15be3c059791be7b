"""A training step that a GPU runs as one CUDA graph, modeled on LeanRL's CudaGraphModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

WARM_UP = 3  # eager steps before the capture, as in torch's `make_graphed_callables`


class CudaGraph:
    """A training step with tensors of constant shapes, which a GPU runs as one CUDA graph.

        update_once = CudaGraph(update, optimizer, agent, args)
        losses = update_once(obs, actions)  # update(optimizer, agent, args, obs, actions)

    On a CPU each call calls the function. On a GPU the first three calls do so, too, on a separate
    stream. The fourth call captures a graph. That call and all later calls replay the graph on the
    tensors that they get.

    The function must not wait for the GPU, as `.item()` does. After the capture its Python code no
    longer runs. The tensors that it returns belong to the graph, and the next call overwrites them.
    Each call uses the learning rate that is in the optimizer's ``param_groups`` at that time.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(
        self, step: Callable[..., Any], optimizer: torch.optim.Optimizer, *fixed: Any
    ) -> None:
        self._step = partial(step, optimizer, *fixed)
        self._optimizer = optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []  # the tensors that the graph reads
        self._outputs: Any = None
        self._calls = 0

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Take a step on these tensors, all of which are on one device.

        Raises:
            ValueError: on a GPU, a tensor has a different shape or dtype than in the first call.
        """
        if not inputs[0].is_cuda:
            return self._step(*inputs)
        if self._calls == 0:
            self._allocate(inputs)
        for place, value in zip(self._inputs, inputs, strict=True):
            if (place.shape, place.dtype) != (value.shape, value.dtype):
                expected = f"{tuple(place.shape)} {place.dtype}"
                raise ValueError(f"got {tuple(value.shape)} {value.dtype}, expected {expected}")
            place.copy_(value)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._run_eagerly()
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        return self._outputs

    def _allocate(self, inputs: tuple[torch.Tensor, ...]) -> None:
        device = inputs[0].device
        self._inputs = [torch.empty_like(value) for value in inputs]
        self._rates = [torch.empty((), device=device) for _ in self._optimizer.param_groups]
        self._stream = torch.cuda.Stream(device)

    def _run_eagerly(self) -> Any:
        """Run the step on the graph's stream, and let the current stream wait for it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._rates_as_tensors(capturable=False):
            outputs = self._step(*self._inputs)
        current.wait_stream(self._stream)
        return outputs

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return a graph of the step. The capture does not run the step."""
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, stream=self._stream)
        with capture, self._rates_as_tensors(capturable=True):
            self._outputs = self._step(*self._inputs)
        return graph

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
        yield
        for group, rate in zip(groups, rates, strict=True):
            group.update(lr=rate, capturable=False)

"""Weights as rounded differences: a pull moves a worker's weights toward the published weights.

In each tensor, the weights that are furthest off move, a quarter of them or fewer, all by the same
amount, up or down. This takes at most about 1.1 bits per weight, or up to 1.6 where many weights
are equally far off, because these move together. The remaining distance is part of the next
difference, so errors do not add up. Workers report the distribution that they really acted on, so
the learner corrects for the remaining distance. A worker that holds nothing gets all weights
in 8 bits each: a difference from zeros, in 127 steps up or down instead of one. A worker whose
weights are far from the published weights, for example after a checkpoint was loaded, gets the
same: ten differences would also get there, but each of them takes a rollout.

Head and worker add the same float32 numbers in the same way, so both know the sum to the last bit.
This module imports torch, like `base`.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SHARE = 0.25  # the share of a tensor's weights that moves, at most
FAR = 0.5  # norms of the published weights: a worker further off than this gets all weights
TINY = torch.finfo(torch.float32).tiny
SAMPLE = 2**16  # weights of a tensor, at most, that are sorted to find which weights move
# How a message encodes weights, by the number of steps that a weight can go up or down. Exact
# weights have no steps.
WHOLE, FROM_ZEROS, FROM_HELD = 0, 127, 1
_POWERS = 3 ** np.arange(5, dtype=np.uint8)  # a byte holds five numbers that are -1, 0 or 1
# The five numbers in each byte, (243, 5).
_TRITS = (np.arange(3**5)[:, None] // _POWERS % 3 - 1).astype(np.int8)


@dataclass
class Difference:
    """A difference, ``steps`` times ``scales``, to add to the float32 weights of a worker."""

    levels: int  # how many steps up or down a weight can go
    steps: torch.Tensor  # (weights,) int8
    scales: torch.Tensor  # (tensors,) float32

    @classmethod
    def between(
        cls, held: torch.Tensor | None, weights: torch.Tensor, sizes: Sequence[int]
    ) -> "Difference | None":
        """Return the rounded difference from ``held`` to ``weights``; None if it is not finite.

        If ``weights`` are far from ``held``, the difference is from zeros.

        Args:
            held: ``(weights,)`` float32; None for zeros.
            weights: ``(weights,)`` float32, on the same device.
            sizes: the number of weights in each tensor.
        """
        rest = weights if held is None else weights - held
        if not (length := rest.norm()).isfinite():
            return None
        quantize, levels = _furthest, FROM_HELD
        if held is None or length > FAR * weights.norm():
            rest, quantize, levels = weights, _to_bytes, FROM_ZEROS
        parts = [quantize(part) for part in rest.split(list(sizes))]
        steps = torch.cat([steps for steps, _ in parts])
        return cls(
            levels,
            steps,
            torch.tensor([scale for _, scale in parts], dtype=torch.float32, device="cpu"),
        )

    def added_to(self, held: torch.Tensor | None, sizes: Sequence[int]) -> torch.Tensor:
        """Return the sum of ``held`` and this difference, ``(weights,)`` float32.

        A difference from zeros is the sum itself. The sum takes only a multiplication and an
        addition, which are the same on all devices.
        """
        total = self.steps.float()
        for part, scale in zip(total.split(list(sizes)), self.scales.tolist(), strict=True):
            part *= scale
        return total if self.levels == FROM_ZEROS else total.add_(held)

    def pack(self) -> list[bytes]:
        """Return the buffers that carry this difference: the scales, and the compressed steps."""
        steps = self.steps
        if self.levels == FROM_HELD:
            padded = torch.nn.functional.pad(steps + 1, (0, -len(steps) % 5))
            trits = padded.to(torch.uint8).view(-1, 5)
            steps = (trits * torch.from_numpy(_POWERS).to(trits.device)).sum(1, dtype=torch.uint8)
        # Huffman codes alone, because the bytes have no other regularity, and searching for one
        # takes time.
        deflate = zlib.compressobj(wbits=-15, strategy=zlib.Z_HUFFMAN_ONLY)
        packed = deflate.compress(steps.cpu().numpy().tobytes()) + deflate.flush()
        return [self.scales.numpy().tobytes(), packed]

    @classmethod
    def unpack(cls, levels: int, scales: Any, packed: Any, num_weights: int) -> "Difference":
        """Return the difference whose buffers `pack` returned."""
        unpacked = zlib.decompress(packed, wbits=-15)
        if levels == FROM_ZEROS:
            steps = np.frombuffer(unpacked, np.int8)
        else:
            steps = _TRITS.take(np.frombuffer(unpacked, np.uint8), axis=0)
        steps = torch.tensor(steps.reshape(-1)[:num_weights])
        return cls(levels, steps, torch.tensor(np.frombuffer(scales, np.float32)))


def checksum(weights: torch.Tensor, others: torch.Tensor) -> int:
    """Return the checksum of float32 weights and the bytes of a policy's other tensors."""
    return zlib.crc32(others.cpu().numpy(), zlib.crc32(weights.cpu().numpy()))


def _to_bytes(weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a tensor's weights in steps, and the length of a step: 1/127 of the largest weight."""
    largest = weights.abs().max().item() if len(weights) else 0.0
    scale = max(float(np.float32(largest) / np.float32(FROM_ZEROS)), TINY)
    steps = (weights / scale).round().clamp(-FROM_ZEROS, FROM_ZEROS)
    return steps.to(torch.int8), scale


def _furthest(rest: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return which of a tensor's weights move up (1) or down (-1), and how far.

    The weights that are furthest off move by their mean distance: up to a quarter of all weights,
    as many as leave the smallest distance. If only a few weights are far off, they move alone,
    because the mean distance of a quarter would be too far for the others and too short for them.
    """
    if not len(rest):
        return rest.to(torch.int8), 0.0
    sample = rest[:: -(-len(rest) // SAMPLE)].abs().sort(descending=True).values
    furthest = sample[: max(int(SHARE * len(sample)), 1)].double()
    # Moving k weights by their mean distance reduces the squared distance of all weights by the
    # square of these k distances' sum, divided by k.
    gains = furthest.cumsum(0).square() / torch.arange(1, len(furthest) + 1, device=rest.device)
    least = sample[gains.argmax()].clamp(min=TINY)
    steps = (rest >= least).view(torch.int8) - (rest <= -least).view(torch.int8)
    moved = (rest * steps).sum(dtype=torch.float64).item()
    return steps, moved / max(steps.count_nonzero().item(), 1)

"""Staged statistics of one step, and the running averages they go into.

``X <- X + (x - X) / W`` with ``W <- beta W + 1`` is the exponential moving average divided by
1 - beta^t: the first update equals the first statistic and a constant stays constant.
Everything is decided on the device, so that no update waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from second_order.kronecker.layers import FactorShape, PairStatistics
from second_order.kronecker.triangles import (
    pack_upper_triangular,
    packed_length,
    packed_trace,
    unpack_upper_triangular,
)

__all__ = ["KroneckerFactors", "StagedStatistics"]


class StagedStatistics:
    """Sums over the pairs of one step, waiting for the step to be taken.

    A pair with a non-finite statistic counts nothing and is counted in :attr:`dropped`.
    """

    def __init__(self, shape: FactorShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget every pair since the last step."""
        self._a: Tensor | None = None
        self._g: Tensor | None = None
        self._examples = torch.zeros((), dtype=torch.float32, device=self.device)
        self._calls = 0
        self._passes: set[int] = set()

    @property
    def empty(self) -> bool:
        """True if no pair arrived since the last :meth:`clear`."""
        return self._a is None

    def add(self, pair: PairStatistics, gradient_scale: Tensor | float, pass_id: int) -> None:
        """Add one pair.

        Args:
            pair: Sums over the pair's examples.
            gradient_scale: What the captured gradient is to be multiplied by to give the gradient
                of one example's loss; G takes its square.
            pass_id: The backward pass the pair came from.
        """
        a = pair.a
        g = pair.g.mul_(torch.as_tensor(gradient_scale, dtype=pair.g.dtype) ** 2)
        trace = _trace(a, self.shape.diagonal_a).sum() + _trace(g).sum()
        finite = torch.isfinite(trace)
        a.masked_fill_(~finite, 0.0)
        g.masked_fill_(~finite, 0.0)
        self._examples += finite * float(pair.examples)
        self.dropped += ~finite
        self._a = a if self._a is None else self._a.add_(a)
        self._g = g if self._g is None else self._g.add_(g)
        self._calls += 1
        self._passes.add(pass_id)

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(sum of A, sum of G, examples)``: add them over ranks, then divide.

        A module used U times in a pass gives A averaged over its uses and G summed over them
        (the lumped statistics of Ba et al. 2017, appendix C).
        """
        groups, inner, outer = self.shape.groups, self.shape.in_dim, self.shape.out_dim
        if self._a is None or self._g is None:
            size = (groups, inner) if self.shape.diagonal_a else (groups, inner, inner)
            a = torch.zeros(size, dtype=self.dtype, device=self.device)
            g = torch.zeros(groups, outer, outer, dtype=self.dtype, device=self.device)
            return a, g, self._examples
        uses = self._calls / len(self._passes)
        return self._a, self._g.mul(uses) if uses != 1.0 else self._g, self._examples


@dataclass
class KroneckerFactors:
    """Running averages of one layer's A and G.

    Attributes:
        shape: Sizes of the factors.
        a: A, shape ``(groups, in (in + 1) / 2)`` as upper triangles, or ``(groups, in, in)``, or
            ``(groups, in)`` where A is diagonal.
        g: G, ``(groups, out (out + 1) / 2)`` or ``(groups, out, out)``.
        weight: W, a scalar; 0 until the first statistic.
    """

    shape: FactorShape
    a: Tensor
    g: Tensor
    weight: Tensor

    @classmethod
    def zeros(
        cls, shape: FactorShape, device: torch.device, dtype: torch.dtype, triangular: bool
    ) -> KroneckerFactors:
        """Factors before their first statistic."""

        def storage(dim: int) -> Tensor:
            size = (packed_length(dim),) if triangular else (dim, dim)
            return torch.zeros(shape.groups, *size, dtype=dtype, device=device)

        weight = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=device)
        a = storage(shape.in_dim)
        if shape.diagonal_a:
            a = torch.zeros(shape.groups, shape.in_dim, dtype=dtype, device=device)
        return cls(shape, a, storage(shape.out_dim), weight)

    @property
    def triangular(self) -> bool:
        """Whether only the upper triangles are stored."""
        return self.g.dim() == 2

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.a.nbytes + self.g.nbytes

    def store(self, matrix: Tensor) -> Tensor:
        """A symmetric matrix, or a diagonal, in the form in which this layer keeps and sends it."""
        packed = pack_upper_triangular(matrix) if self.triangular and matrix.dim() == 3 else matrix
        return packed.to(self.a.dtype)

    def update(self, a_sum: Tensor, g_sum: Tensor, examples: Tensor, decay: float) -> None:
        """Take in one step's statistics, in stored form; nothing changes when ``examples`` is 0."""
        present = examples > 0
        self.weight.copy_(torch.where(present, self.weight * decay + 1.0, self.weight))
        step = torch.where(present, 1.0 / self.weight.clamp_min(1.0), 0.0)
        for average, total in ((self.a, a_sum), (self.g, g_sum)):
            mean = total / examples.to(total.dtype).clamp_min(1.0)
            # X + step (x - X), where a step of 0 leaves X bit for bit.
            average.lerp_(mean.to(average.dtype), step.to(average.dtype))

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A ``(groups, in, in)``, a diagonal one ``(groups, in)``, and G ``(groups, out, out)``."""
        a, g = self.a.to(dtype), self.g.to(dtype)
        if not self.triangular:
            return a, g
        if not self.shape.diagonal_a:
            a = unpack_upper_triangular(a, self.shape.in_dim)
        return a, unpack_upper_triangular(g, self.shape.out_dim)

    def mean_curvature(self) -> Tensor:
        """Mean eigenvalue of A ⊗ G, tr A tr G / (dim A dim G), over the groups; a scalar.

        In float32 at least, whatever the factors are kept in.
        """
        shape = self.shape
        dtype = torch.promote_types(self.a.dtype, torch.float32)
        a, g = self.a.to(dtype), self.g.to(dtype)
        trace_g = packed_trace(g, shape.out_dim) if self.triangular else _trace(g)
        if self.triangular and not shape.diagonal_a:
            trace_a = packed_trace(a, shape.in_dim)
        else:
            trace_a = _trace(a, shape.diagonal_a)
        return (trace_a / shape.in_dim * (trace_g / shape.out_dim)).mean()

    def to_dense(self) -> Tensor:
        """The curvature block G ⊗ A of the row-major gradient matrix.

        Returns:
            Shape ``(groups, out in, out in)``; multiply it with ``gradient.flatten(1)``.
        """
        a, g = self.matrices(self.a.dtype)
        a = torch.diag_embed(a) if self.shape.diagonal_a else a
        return torch.stack([torch.kron(gi, ai) for ai, gi in zip(a, g, strict=True)])


def _trace(matrix: Tensor, diagonal: bool = False) -> Tensor:
    entries = matrix if diagonal else matrix.diagonal(dim1=-2, dim2=-1)
    return entries.sum(-1)

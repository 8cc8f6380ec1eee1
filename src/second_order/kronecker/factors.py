"""Staged statistics of one step, and the running averages they go into.

``X <- X + (x - X) / W`` with ``W <- beta W + 1`` is the exponential moving average divided by
1 - beta^t: the first update equals the first statistic and a constant stays constant.
Everything is decided on the device, so that no update waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from second_order.kronecker.layers import FactorShape, PairStatistics
from second_order.kronecker.triangles import (
    pack_upper_triangular,
    packed_length,
    packed_trace,
    unpack_upper_triangular,
)

__all__ = ["KroneckerFactors", "StagedStatistics", "StatisticsSums", "mean_eigenvalue"]


@dataclass
class StatisticsSums:
    """One step's statistics of a layer: what the ranks add up.

    Attributes:
        a: Sum of A's examples, as the running average is stored.
        g: Sum of G's.
        head: ``(1 + 2 groups,)``: the number of examples, and the sums of the mean eigenvalues of
            A's groups and of G's.
    """

    a: Tensor
    g: Tensor
    head: Tensor

    def to(self, dtype: torch.dtype) -> StatisticsSums:
        """With the factors' sums in a dtype."""
        return StatisticsSums(self.a.to(dtype), self.g.to(dtype), self.head)


class StagedStatistics:
    """Sums over the pairs of one step, waiting for the step to be taken.

    They are kept as the running averages are, so that no more than one layer's full matrices exist
    at a time. A pair with a non-finite statistic counts nothing and is counted in :attr:`dropped`.
    """

    def __init__(
        self, shape: FactorShape, device: torch.device, dtype: torch.dtype, triangular: bool
    ) -> None:
        self.shape = shape
        self.device = device
        self.triangular = triangular
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget every pair since the last step."""
        self._a: Tensor | None = None
        self._g: Tensor | None = None
        head = 1 + 2 * self.shape.groups
        self._head = torch.zeros(head, dtype=self.dtype, device=self.device)
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
        scale = torch.as_tensor(gradient_scale, dtype=pair.g.dtype) ** 2
        a, g = _stored(pair.a, self.triangular), _stored(pair.g, self.triangular).mul_(scale)
        means = [mean_eigenvalue(a, self.shape.in_dim), mean_eigenvalue(g, self.shape.out_dim)]
        examples = torch.full_like(means[0][:1], pair.examples)
        head = torch.cat([examples, *means])
        finite = torch.isfinite(head.sum())
        head.masked_fill_(~finite, 0.0)
        # On the CPU nobody waits for an answer, and a mask costs more than the sums.
        if finite.device.type != "cpu" or not bool(finite):
            a.masked_fill_(~finite, 0.0)
            g.masked_fill_(~finite, 0.0)
        self._head += head.to(self.dtype)
        self.dropped += ~finite
        self._a = a if self._a is None else self._a.add_(a)
        self._g = g if self._g is None else self._g.add_(g)
        self._calls += 1
        self._passes.add(pass_id)

    def sums(self) -> StatisticsSums:
        """What is to be added over ranks, and then divided by the number of examples.

        A module used U times in a pass gives A averaged over its uses and G summed over them
        (the lumped statistics of Ba et al. 2017, appendix C).
        """
        if self._a is None or self._g is None:
            a, g = _blanks(self.shape, self.device, self.dtype, self.triangular)
            return StatisticsSums(a(), g(), self._head)
        uses = self._calls / len(self._passes)
        if uses == 1.0:
            return StatisticsSums(self._a, self._g, self._head)
        head = self._head.clone()
        head[1 + self.shape.groups :] *= uses
        return StatisticsSums(self._a, self._g * uses, head)


class KroneckerFactors:
    """Running averages of A and G, each on the ranks that keep it, and their traces, on all.

    Attributes:
        shape: Sizes of the factors.
        dtype: The factors are stored in it.
        triangular: Whether only upper triangles are stored.
        weight: How much has gone in: the sum of the decays' powers.
        means: ``(2, groups)``: the mean eigenvalue of A and of G, averaged as they are.
        a: A as stored; None where it is not kept, or is lost.
        g: G as stored; None where it is not kept, or is lost.
    """

    def __init__(
        self,
        shape: FactorShape,
        device: torch.device,
        dtype: torch.dtype,
        triangular: bool,
        held: tuple[bool, bool] = (True, True),
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.shape = shape
        self.dtype = dtype
        self.triangular = triangular
        self.weight = torch.zeros((), dtype=wide, device=device)
        self.means = torch.zeros(2, shape.groups, dtype=wide, device=device)
        blanks = _blanks(shape, device, dtype, triangular)
        self.a, self.g = (make() if keep else None for make, keep in zip(blanks, held, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the factors that are kept here."""
        return sum(0 if factor is None else factor.nbytes for factor in (self.a, self.g))

    def store(self, matrix: Tensor) -> Tensor:
        """A symmetric matrix, or a diagonal, in the form in which this layer keeps and sends it."""
        return _stored(matrix, self.triangular).to(self.dtype)

    def update(self, sums: StatisticsSums, decay: float) -> None:
        """Take in one step's sums, which are used up; nothing changes where nobody had an example.

        Args:
            sums: Over all ranks; of factors that are not kept here, anything.
            decay: Weight of the past.
        """
        examples, means = sums.head[0], sums.head[1:].view(2, -1)
        present = examples > 0
        self.weight.copy_(torch.where(present, self.weight * decay + 1.0, self.weight))
        step = torch.where(present, 1.0 / self.weight.clamp_min(1.0), 0.0)
        examples = examples.clamp_min(1.0)
        # X + step (x - X), where a step of 0 leaves X bit for bit.
        self.means.lerp_((means / examples).to(self.means.dtype), step.to(self.means.dtype))
        for average, total in ((self.a, sums.a), (self.g, sums.g)):
            if average is not None:
                # The number is not rounded to what the factors are kept in.
                narrow = total.dtype != examples.dtype
                mean = total.to(examples.dtype) / examples if narrow else total.div_(examples)
                average.lerp_(mean.to(average.dtype), step.to(average.dtype))

    def matrix(self, which: str, dtype: torch.dtype) -> Tensor:
        """A new ``(groups, n, n)``, or ``(groups, n)`` if it is diagonal, of a factor kept here.

        Args:
            which: "A" or "G".
            dtype: What it is wanted in.
        """
        stored, dim = (self.a, self.shape.in_dim) if which == "A" else (self.g, self.shape.out_dim)
        assert stored is not None, f"factor {which} is kept elsewhere"
        if not self.triangular or (which == "A" and self.shape.diagonal_a):
            return stored.to(dtype, copy=True)
        return unpack_upper_triangular(stored.to(dtype), dim)

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and G by :meth:`matrix`."""
        return self.matrix("A", dtype), self.matrix("G", dtype)

    def mean_curvature(self) -> Tensor:
        """Mean eigenvalue of A ⊗ G, tr A tr G / (dim A dim G), over the groups; a scalar."""
        return self.means.prod(0).mean()

    def to_dense(self) -> Tensor:
        """The curvature block G ⊗ A of the row-major gradient matrix.

        Returns:
            Shape ``(groups, out in, out in)``; multiply it with ``gradient.flatten(1)``.
        """
        a, g = self.matrices(self.dtype)
        a = torch.diag_embed(a) if self.shape.diagonal_a else a
        return torch.stack([torch.kron(gi, ai) for ai, gi in zip(a, g, strict=True)])


def mean_eigenvalue(factor: Tensor, dim: int) -> Tensor:
    """Trace over size, ``(groups,)``, of matrices, triangles, or diagonals of the size ``dim``."""
    if factor.dim() == 3:
        return factor.diagonal(dim1=-2, dim2=-1).mean(-1)
    return factor.mean(-1) if factor.shape[-1] == dim else packed_trace(factor, dim) / dim


def _stored(matrix: Tensor, triangular: bool) -> Tensor:
    return pack_upper_triangular(matrix) if triangular and matrix.dim() == 3 else matrix


def _blanks(
    shape: FactorShape, device: torch.device, dtype: torch.dtype, triangular: bool
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """What makes an A and a G of zeros, as they are stored."""

    def size(dim: int) -> tuple[int, ...]:
        return (packed_length(dim),) if triangular else (dim, dim)

    a = (shape.in_dim,) if shape.diagonal_a else size(shape.in_dim)
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    return partial(zeros, (shape.groups, *a)), partial(zeros, (shape.groups, *size(shape.out_dim)))

"""Staged statistics of one step, and the running averages they go into.

``X <- X + (x - X) / W`` with ``W <- beta W + 1`` is the exponential moving average divided by
1 - beta^t: the first update equals the first statistic and a constant stays constant.
Everything is decided on the device, so that no update waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.layers import Explanation, FactorShape, PairStatistics
from second_order.kronecker.triangles import (
    pack_upper_triangular,
    packed_trace,
    unpack_upper_triangular,
)

__all__ = [
    "KroneckerFactors",
    "Reduction",
    "StagedStatistics",
    "StatisticsSums",
    "drop_overflow",
    "mean_eigenvalue",
]

Reduction: TypeAlias = Literal["mean", "sum", "step_mean"]
"""What a loss is: a mean over its pass's examples, a sum over them, or that over the step's."""


@dataclass
class StatisticsSums:
    """One step's statistics of a layer, as the ranks add them up."""

    # By letter, the sum over examples of a factor, stored as the running average is.
    factors: dict[str, Tensor]
    # The number of examples, then the sums of the mean eigenvalues of A's groups, G's, and L's.
    head: Tensor

    def times(self, scale: float | Tensor, groups: int) -> StatisticsSums:
        """The same sums, with those of a layer's G times a number."""
        head = self.head.clone()
        head[1 + groups : 1 + 2 * groups] *= scale
        return StatisticsSums({**self.factors, "G": self.factors["G"] * scale}, head)


class StagedStatistics:
    """Sums over the pairs of one step, waiting for the step to be taken.

    They are kept as the running averages are, so that no more than one layer's full matrices exist
    at a time. A pair with a non-finite statistic counts nothing and is counted in :attr:`dropped`.

    Attributes:
        dtype: Dtype of the sums; they leave in ``factor_dtype``.
        pairs: Number of pairs since the last :meth:`clear`.
        micro_batches: Number of backward passes that were the first through some forward.
        work: Operations of their passes.
        revision: A number that changes whenever the sums may have.
        explanation: The gradient in these passes beside the pairs, where they are compared.
    """

    explanation: Explanation | None = None

    def __init__(
        self, shape: FactorShape, device: torch.device, factor_dtype: torch.dtype, triangular: bool
    ) -> None:
        self.shape, self.device = shape, device
        self.factor_dtype, self.triangular = factor_dtype, triangular
        self.dtype = torch.promote_types(factor_dtype, torch.float32)
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.revision = 0
        self._head_size = 1 + len(shape.letters) * shape.groups
        self.clear()

    def clear(self) -> None:
        """Drop every pair since the last step."""
        self.explanation = None
        self.pairs = self.micro_batches = self.work = 0
        self.revision += 1
        self._sums: dict[str, Tensor] = {}
        self._head = torch.zeros(self._head_size, dtype=self.dtype, device=self.device)
        # By pass, each call's rows and its part of the head.
        self._passes: dict[int, list[tuple[float | Tensor, Tensor]]] = {}
        self._reduction: Reduction = "sum"
        self._first_passes: set[int] = set()
        self._terms: dict[int, int | Tensor] = {}  # by pass

    def knows(self, pass_id: int) -> bool:
        """Whether a backward pass has brought a pair."""
        return pass_id in self._passes or pass_id in self._terms

    @property
    def empty(self) -> bool:
        """Whether no pair has arrived, be it one to be counted alone."""
        return not (self._sums or self._terms)

    def count(self, terms: int | Tensor, pass_id: int) -> None:
        """Count the terms of a pair, apart from its statistics."""
        self._terms[pass_id] = self._terms.get(pass_id, 0) + terms

    @property
    def terms(self) -> Tensor:
        """The terms that were counted, and 1 if any pair's were, ``(2,)``."""
        found = torch.as_tensor(sum(self._terms.values()), dtype=self.dtype, device=self.device)
        return torch.stack([found, torch.full_like(found, bool(self._terms))])

    def add(
        self,
        pair: PairStatistics,
        gradient_scale: Tensor | float,
        pass_id: int,
        *,
        again: bool = False,
        reduction: Reduction = "sum",
    ) -> None:
        """Add a pair of a backward pass: sums over its examples.

        ``gradient_scale`` turns the captured gradient into that of the pass's loss; ``again``: an
        earlier pass has come through the same forward.
        """
        self.pairs += 1
        self.revision += 1
        if reduction == "mean":
            # Over the rows, at first: the whole step tells what share of them counts, so that
            # it does not matter how a batch was cut.
            gradient_scale = gradient_scale * pair.rows
        found = {k: _stored(factor, self.triangular) for k, factor in pair.factors.items()}
        if isinstance(gradient_scale, Tensor) or gradient_scale != 1.0:
            square = torch.as_tensor(gradient_scale, dtype=found["G"].dtype) ** 2
            found["G"].mul_(square)
            if self.shape.marginal:  # both are of gradients
                found["A"].mul_(square)
        means = [mean_eigenvalue(factor, self.shape.dims[k]) for k, factor in found.items()]
        examples = torch.as_tensor(pair.examples, dtype=means[0].dtype, device=self.device)
        head = torch.cat([examples.view(1), *means])
        finite = torch.isfinite(head.sum())
        rows: float | Tensor = float(pair.rows)
        # On the CPU nobody waits for an answer, and masks cost more than the sums.
        if finite.device.type != "cpu" or not bool(finite):
            rows = rows * finite
            head.masked_fill_(~finite, 0.0)
            # Not in place: another layer may have been given the same A.
            found = {k: factor.masked_fill(~finite, 0.0) for k, factor in found.items()}
            self.dropped += ~finite
        self._head += head.to(self.dtype)
        self._reduction = reduction
        if self._sums:
            torch._foreach_add_(list(self._sums.values()), list(found.values()))
        else:
            self._sums = found
        self._passes.setdefault(pass_id, []).append((rows, head))
        if not again:
            self._first_passes.add(pass_id)
            self.micro_batches = len(self._first_passes)

    def sums(self, micro_batches: int = 1) -> StatisticsSums:
        """The sums of the step, to be added over ranks and divided by the number of examples.

        A module used U times in a pass gives A averaged over its uses and G summed over them
        (the lumped statistics of Ba et al. 2017, appendix C). A use without an example is none,
        unless the whole pass has none. Each pass's loss was divided by ``micro_batches``. Of losses
        divided by the examples of the whole step nobody knows the number here: G is to be
        multiplied by its square.
        """
        if not self._sums:
            blank = partial(torch.zeros, dtype=self.factor_dtype, device=self.device)
            shapes = {k: self.shape.stored_shape(k, self.triangular) for k in self.shape.letters}
            return StatisticsSums({k: blank(shape) for k, shape in shapes.items()}, self._head)
        uses: float | Tensor = 0.0
        rows: float | Tensor = 0.0
        for calls in self._passes.values():
            in_pass = (1.0, calls[0][0]) if len(calls) == 1 else _uses_and_rows(calls)
            uses, rows = uses + in_pass[0], rows + in_pass[1]
        uses = uses / len(self._passes)
        scale: float | Tensor = uses * micro_batches**2
        if self._reduction == "mean":
            if isinstance(rows, Tensor):  # a number where that costs no waiting
                share: float | Tensor = self._head[0] / rows.clamp_min(1.0)
            else:
                share = float(self._head[0]) / max(rows, 1.0)
            scale = scale * share**2
        elif self._reduction == "step_mean":
            # An example is counted at each use, and in each pass that comes through its forward.
            counted_again = uses * len(self._passes) / max(self.micro_batches, 1)
            scale = scale / counted_again**2
        found = StatisticsSums(dict(self._sums), self._head)
        if not (isinstance(scale, float) and scale == 1.0):
            found = found.times(scale, self.shape.groups)
        for letter, factor in found.factors.items():
            found.factors[letter] = factor.to(self.factor_dtype)
        return found


def _uses_and_rows(
    calls: Sequence[tuple[float | Tensor, Tensor]],
) -> tuple[float | Tensor, float | Tensor]:
    """Uses of a module called again in a pass, and its rows; numbers where that costs no waiting.

    A call without an example (one beyond the end of every sequence, or one whose output's gradient
    a derivative of ReLU has zeroed) counts only where all calls are like it.
    """
    present = torch.stack([head[0] for _, head in calls]) > 0
    counts = present | ~present.any()
    if counts.device.type == "cpu":  # nobody waits for an answer
        kept = [rows for (rows, _), count in zip(calls, counts.tolist(), strict=True) if count]
        return float(len(kept)), sum(kept)
    rows = torch.stack([torch.as_tensor(r, device=counts.device) for r, _ in calls])
    return counts.sum(), (rows * counts).sum()


class KroneckerFactors:
    """Running averages of the factors, each on the ranks that keep it, and their traces, on all.

    Attributes:
        shape: Sizes of the layer's factors.
        dtype: Dtype in which the factors are stored.
        triangular: Whether only upper triangles are stored.
        weight: W of the top of this file, a scalar; 0 before the first statistic.
        means: ``(2, groups)``: the mean eigenvalues of A and of G, averaged as they are; ``(3, 1)``
            with that of L.
        examples: Number of examples in an update, averaged as the factors are; 0 before the first.
        stored: By letter, the factors as stored; None where one is not kept, or is lost.
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
        self.dtype, self.triangular = dtype, triangular
        self.weight = torch.zeros((), dtype=wide, device=device)
        self.examples = torch.zeros((), dtype=wide, device=device)
        self.means = torch.zeros(len(shape.letters), shape.groups, dtype=wide, device=device)
        self.stored: dict[str, Tensor | None] = dict.fromkeys(shape.letters)
        for k in shape.letters:
            if held[k == "G"]:
                size = shape.stored_shape(k, triangular)
                self.stored[k] = torch.zeros(size, dtype=dtype, device=device)

    def store(self, matrix: Tensor) -> Tensor:
        """A symmetric matrix, or a diagonal, in the form in which this layer keeps and sends it."""
        return _stored(matrix, self.triangular).to(self.dtype)

    def update(self, sums: StatisticsSums, decay: float) -> None:
        """Take in one step's sums over all ranks, which are used up; ``decay`` is β."""
        sums = _with_unit_trace(sums, self.shape) if self.shape.marginal else sums
        examples, means = sums.head[0], sums.head[1:].view(len(self.stored), -1)
        present = examples > 0
        self.weight.copy_(torch.where(present, self.weight * decay + 1.0, self.weight))
        step = torch.where(present, 1.0 / self.weight.clamp_min(1.0), 0.0)
        self.examples.lerp_(examples.to(self.examples.dtype), step.to(self.examples.dtype))
        examples = examples.clamp_min(1.0)
        # X + step (x - X), where a step of 0 leaves X bit for bit.
        self.means.lerp_((means / examples).to(self.means.dtype), step.to(self.means.dtype))
        for letter, total in sums.factors.items():
            average = self.stored[letter]
            if average is not None:
                # The number of examples is not rounded to the factors' dtype.
                narrow = total.dtype != examples.dtype
                mean = total.to(examples.dtype) / examples if narrow else total.div_(examples)
                average.lerp_(mean.to(average.dtype), step.to(average.dtype))

    def matrix(self, which: str, dtype: torch.dtype) -> Tensor:
        """A factor kept here as a new ``(groups, n, n)``, or ``(groups, n)`` if it is diagonal."""
        stored = self.stored[which]
        assert stored is not None, f"factor {which} is kept elsewhere"
        if not self.triangular or (which == "A" and self.shape.diagonal_a):
            return stored.to(dtype, copy=True)
        return unpack_upper_triangular(stored.to(dtype), self.shape.dims[which])

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and G, each as :meth:`matrix` gives it."""
        return self.matrix("A", dtype), self.matrix("G", dtype)

    def mean_curvature(self) -> Tensor:
        """Mean eigenvalue of A ⊗ G, or A ⊗ L ⊗ G, over the groups; a scalar."""
        return self.means.prod(0).mean()

    def to_dense(self) -> Tensor:
        """G ⊗ A, ``(groups, out in, out in)``, which multiplies ``gradient.flatten(1)``."""
        a, g = self.matrices(self.dtype)
        a = torch.diag_embed(a) if self.shape.diagonal_a else a
        if self.shape.locations:
            a = torch.kron(a[0], self.matrix("L", self.dtype)[0]).unsqueeze(0)
        return torch.stack([torch.kron(gi, ai) for ai, gi in zip(a, g, strict=True)])


def _with_unit_trace(sums: StatisticsSums, shape: FactorShape) -> StatisticsSums:
    """The sums of gradients' factors with A's trace the number of examples: that of its mean is 1.

    Both factors of gradients have the trace of the curvature, which their product is to have once.
    """
    head, size = sums.head.clone(), shape.dims["A"]
    trace = head[1] * size
    scale = torch.where(trace > 0, head[0] / trace.where(trace > 0, 1.0), 0.0)
    head[1] *= scale
    return StatisticsSums({**sums.factors, "A": sums.factors["A"] * scale}, head)


def mean_eigenvalue(factor: Tensor, dim: int) -> Tensor:
    """Trace over size, ``(groups,)``, of matrices, triangles, or diagonals of the size ``dim``."""
    if factor.dim() == 3:
        return factor.diagonal(dim1=-2, dim2=-1).mean(-1)
    return factor.mean(-1) if factor.shape[-1] == dim else packed_trace(factor, dim) / dim


def _stored(matrix: Tensor, triangular: bool) -> Tensor:
    return pack_upper_triangular(matrix) if triangular and matrix.dim() == 3 else matrix


def drop_overflow(sums: StatisticsSums, shape: FactorShape) -> Tensor:
    """Zero sums whose entries may not fit their dtype; returns whether, a scalar tensor.

    No entry of a positive semi-definite matrix exceeds its trace, which the head of the sums over
    all ranks knows: on all ranks, whoever keeps the factors, so that all come to the same verdict.
    """
    bound = torch.finfo(sums.factors["A"].dtype).max / max(shape.dims.values())
    over = ~(sums.head[1:].amax() <= bound)  # NaN is no sound sum either
    # On the CPU nobody waits for an answer.
    if over.device.type != "cpu" or bool(over):
        for each in (sums.head, *sums.factors.values()):
            each.masked_fill_(over, 0.0)
    return over

"""Staged statistics of one step, and the running averages they go into.

``X <- X + (x - X) / W`` with ``W <- beta W + 1`` is the exponential moving average divided by
1 - beta^t: the first update equals the first statistic and a constant stays constant.
Everything is decided on the device, so that no update waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from second_order.kronecker.explanation import Explanation
from second_order.kronecker.layers import FactorShape, PairStatistics
from second_order.kronecker.rows import next_serial
from second_order.kronecker.storage import (
    as_stack,
    in_groups,
    most_elements,
    own_stack,
    pack_upper_triangular,
    packed_trace,
    unpack_upper_triangular,
)

__all__ = [
    "KroneckerFactors",
    "Reduction",
    "StagedStatistics",
    "StatisticsSums",
    "count_dropped",
    "end_pass",
    "mean_eigenvalue",
    "of_examples",
    "put",
    "sums_of",
    "update_averages",
]

Reduction: TypeAlias = Literal["mean", "sum", "step_mean"]
"""What a loss is: a mean over its pass's terms, a sum over them, or that over the step's."""


@dataclass
class StatisticsSums:
    """One step's statistics of a layer, as the ranks add them up."""

    # By letter, the sum over examples of a factor, stored as the running average is.
    factors: dict[str, Tensor]
    # N, the number of loss terms, and the number of rows of A; then the sums of the mean
    # eigenvalues of A's groups, G's, and L's; then the rows of each group, if these have their own.
    head: Tensor


class StagedStatistics:
    """Sums over the pairs of one step, waiting for the step to be taken.

    Those of a pass are kept apart until it is over, when the number of its loss's terms is known.

    They are kept as the running averages are, so that no more than one layer's full matrices exist
    at a time. A pair with a non-finite statistic counts nothing and is counted in :attr:`dropped`.

    Attributes:
        dtype: Dtype of the sums; they leave in ``factor_dtype``.
        pairs: Number of pairs since the last :meth:`clear`.
        micro_batches: Number of backward passes that were the first through some forward.
        work: Operations of their passes.
        revision: A number that changes whenever the sums may have.
        cleared: The revision of the last :meth:`clear`.
        explanation: The gradient in these passes beside the pairs, where they are compared.
        since: A number that is larger than those of all passes before the last :meth:`clear`.
        keeps: Whether pairs may be kept until their pass ends.
    """

    explanation: Explanation | None = None
    keeps = True

    def __init__(self, shape: FactorShape, device: torch.device, factor_dtype: torch.dtype) -> None:
        self.shape, self.device = shape, device
        self.factor_dtype = factor_dtype
        self.dtype = torch.promote_types(factor_dtype, torch.float32)
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.revision = 0
        self.clear()

    def clear(self) -> None:
        """Drop every pair since the last step."""
        self.explanation = None
        self.pairs = self.micro_batches = self.work = 0
        self.revision += 1
        self.cleared = self.revision
        self.since = next_serial()
        self._total: PassSums | None = None  # of passes that have ended
        self._open: dict[int, PassSums] = {}  # of passes that are not over
        self._first_passes: set[int] = set()
        self._passes: set[int] = set()

    def explain(self) -> Explanation:
        """The comparison of these passes' pairs with the gradient, made on first use."""
        if self.explanation is None:
            self.explanation = Explanation()
        return self.explanation

    def knows(self, pass_id: int) -> bool:
        """Whether a backward pass has brought a pair."""
        return pass_id in self._passes

    def knows_others(self, pass_id: int) -> bool:
        """Whether another backward pass has brought a pair."""
        return bool(self._passes - {pass_id})

    @property
    def empty(self) -> bool:
        """Whether no pair has arrived, be it one whose rows alone were looked at."""
        return not self._passes

    def note(self, pass_id: int) -> None:
        """Note a backward pass that brings a pair."""
        self._passes.add(pass_id)

    def expect(self, pass_id: int, *, again: bool = False, work: int = 0) -> None:
        """Count a pair of a backward pass, which :func:`put` brings.

        ``again``: an earlier pass has come through the same forward. ``work``: operations of its
        layer.
        """
        self.note(pass_id)
        self.work += work
        self.pairs += 1
        self.revision += 1
        if not again:
            self._first_passes.add(pass_id)
            self.micro_batches = len(self._first_passes)

    def bring(self, pair: PairStatistics, gradient_scale: Tensor | float, pass_id: int) -> None:
        """Add a pair that is expected, on the CPU.

        ``gradient_scale`` turns the captured gradient into that of the pass's loss.
        """
        found = {k: _stored(factor) for k, factor in pair.factors.items()}
        if isinstance(gradient_scale, Tensor) or gradient_scale != 1:
            for letter in _letters_of_gradients(self.shape):
                found[letter].mul_(gradient_scale**2)
        means = [mean_eigenvalue(factor, self.shape.dims[k]) for k, factor in found.items()]
        routed = [] if pair.routed is None else [pair.routed]
        record = torch.cat([_number(pair.examples, means[0]), *means, *routed]).to(self.dtype)
        if not math.isfinite(record.sum()):
            record.zero_()
            found = {k: torch.zeros_like(factor) for k, factor in found.items()}
            self.dropped.add_(1)
        put([(self, pass_id, found, record)])

    def drop_changed(self) -> None:
        """Drop a pair that was changed while it was kept; none is to be kept again."""
        self.keeps = False
        self.dropped.add_(1)

    def opened(self, pass_id: int, sums: PassSums) -> list[SumsAndMore]:
        """Take a pair's sums of a pass that is not over; returns what is to be added to others."""
        before = self._open.setdefault(pass_id, sums)
        return [] if before is sums else [(before, sums)]

    def ended(self, pass_id: int) -> PassSums | None:
        """The sums of a pass that is over, if it has brought any; they are no longer kept."""
        return self._open.pop(pass_id, None)

    def counted(self, sums: PassSums) -> list[SumsAndMore]:
        """Take the sums of a pass into the step's; returns what is to be added to others."""
        if self._total is None:
            self._total = sums
            return []
        return [(self._total, sums)]

    def total(self) -> PassSums | None:
        """The sums of the step, of passes that have ended, or that nothing ends; None of none."""
        for pass_id in [*self._open]:  # losses that are sums
            end_pass([self], pass_id, None)
        return self._total

    def _blank(self, terms: float | Tensor) -> StatisticsSums:
        blank = partial(torch.zeros, dtype=self.factor_dtype, device=self.device)
        shapes = {k: self.shape.stored_shape(k) for k in self.shape.letters}
        head = blank(2 + self.shape.numbers * self.shape.groups, dtype=self.dtype)
        head[0] = terms
        return StatisticsSums({k: blank(shape) for k, shape in shapes.items()}, head)


@dataclass
class PassSums:
    """A layer's sums of a pass, by factor, and their record.

    The record has the number of A's rows and the mean eigenvalues of the sums.
    """

    factors: dict[str, Tensor]
    record: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The sums and the record."""
        return [*self.factors.values(), self.record]


SumsAndMore: TypeAlias = tuple[PassSums, PassSums]


def _letters_of_gradients(shape: FactorShape) -> str:
    """The factors that are sums of products of gradients."""
    return "AG" if shape.marginal else "G"


def _number(number: int | Tensor, like: Tensor) -> Tensor:
    """A number as a tensor ``(1,)`` like others."""
    if isinstance(number, Tensor):
        return number.view(1).to(like.dtype)
    return like.new_full((1,), float(number))


def count_dropped(staged: Sequence[StagedStatistics], dropped: Tensor) -> None:
    """Count pairs or sums that layers have dropped, ``(n,)``, without waiting for a device."""
    counts = dropped.to(torch.int64).unbind()
    torch._foreach_add_([each.dropped for each in staged], counts)


def put(pairs: Iterable[tuple[StagedStatistics, int, dict[str, Tensor], Tensor]]) -> None:
    """Add expected pairs of different layers: each one's pass, sums by letter, and record."""
    added: list[SumsAndMore] = []
    for staged, pass_id, factors, record in pairs:
        added += staged.opened(pass_id, PassSums(factors, record))
    _add(added)


def _add(sums: Sequence[SumsAndMore]) -> None:
    """Add sums to others, of all layers at once."""
    if sums:
        totals = [tensor for total, _ in sums for tensor in total.tensors]
        torch._foreach_add_(totals, [tensor for _, more in sums for tensor in more.tensors])


def end_pass(
    layers: Iterable[StagedStatistics], pass_id: int, terms: Tensor | float | None
) -> None:
    """Add what a pass has brought to the sums of the step.

    ``terms``: N, if the pass's loss is a mean over so many, so that G is N² times that of the
    captured gradients, as it would be for one term's.
    """
    by_device: dict[torch.device, list[SumsAndMore]] = {}
    scaled: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for staged in layers:
        sums = staged.ended(pass_id)
        if sums is None:
            continue
        by_device.setdefault(staged.device, []).extend(staged.counted(sums))
        groups = staged.shape.groups
        for letter in _letters_of_gradients(staged.shape):
            start = 1 + groups * staged.shape.letters.index(letter)
            for part in (sums.factors[letter], sums.record[start : start + groups]):
                scaled.setdefault((staged.device, part.dtype), []).append(part)
    if isinstance(terms, Tensor) or (terms is not None and terms != 1):
        for (device, dtype), parts in scaled.items():
            square = terms.to(device, dtype) ** 2 if isinstance(terms, Tensor) else terms**2
            torch._foreach_mul_(parts, square)
    for added in by_device.values():
        _add(added)


def sums_of(
    staged: Sequence[StagedStatistics],
    micro_batches: int = 1,
    terms: Sequence[Tensor | float] | None = None,
) -> list[StatisticsSums]:
    """The sums of a step by layer, to be added over ranks and divided by the numbers in the head.

    ``terms`` are N of the step by layer; None: the rows that A is a sum over. Each pass's loss was
    divided by ``micro_batches``. A module used several times in a pass has as many more rows: A is
    the mean over its uses, and G their sum (the lumped statistics of Ba et al. 2017, appendix C).
    """
    totals = [each.total() for each in staged]
    found: dict[int, StatisticsSums] = {}
    keys = [
        (each.device, each.factor_dtype, each.shape.groups, each.shape.numbers, total is None)
        for each, total in zip(staged, totals, strict=True)
    ]
    for group in in_groups(keys):
        sums = [totals[i] for i in group]
        if None in sums:
            found |= {i: staged[i]._blank(0.0 if terms is None else terms[i]) for i in group}
            continue
        known = cast("list[PassSums]", sums)
        records = as_stack([each.record for each in known])
        column = records[:, :1]
        if terms is not None:
            column = _column([terms[i] for i in group], records)
        heads = torch.cat([column, records], 1)
        factors = [dict(each.factors) for each in known]
        if micro_batches > 1:
            square = float(micro_batches**2)
            heads[:, _gradients_of(staged[group[0]].shape)].mul_(square)
            scaled = torch._foreach_mul([each["G"] for each in factors], square)
            for each, g in zip(factors, scaled, strict=True):
                each["G"] = g
        for i, each, head in zip(group, factors, heads.unbind(), strict=True):
            narrow = {k: total.to(staged[i].factor_dtype) for k, total in each.items()}
            found[i] = StatisticsSums(narrow, head)
    return [found[i] for i in range(len(staged))]


def _gradients_of(shape: FactorShape) -> slice:
    """The places of G's mean eigenvalues in a head."""
    return slice(2 + shape.groups, 2 + 2 * shape.groups)


def _column(numbers: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """One number for each row, ``(n, 1)``; a device gets a number once that all rows have."""
    first = numbers[0]
    if isinstance(first, Tensor):
        if all(number is first for number in numbers):
            return first.to(like).expand(len(numbers), 1)
    elif all(not isinstance(number, Tensor) and number == first for number in numbers):
        return like.new_full((len(numbers), 1), first)
    each = [n.to(like) if isinstance(n, Tensor) else like.new_full((), n) for n in numbers]
    return torch.stack(each).unsqueeze(1)


def of_examples(
    sums: Sequence[StatisticsSums], shapes: Sequence[FactorShape], share: Tensor | float
) -> list[StatisticsSums]:
    """The sums over all processes with G that of one term, of losses divided by their number N.

    ``share`` of N are the terms in the sums.
    """
    found: list[StatisticsSums] = []
    for each, shape in zip(sums, shapes, strict=True):
        square = (each.head[0] * share) ** 2
        head = each.head.clone()
        head[_gradients_of(shape)] *= square
        g = each.factors["G"]
        found.append(StatisticsSums({**each.factors, "G": g * square.to(g.dtype)}, head))
    return found


def _rows(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each slice of a stack, or for each of its groups, in its dimensions."""
    return numbers.reshape(*numbers.shape, *[1] * (like.dim() - numbers.dim()))


class KroneckerFactors:
    """Running averages of the factors, each on the ranks that keep it, and their traces, on all.

    Attributes:
        shape: Sizes of the layer's factors.
        dtype: Dtype in which the factors are stored.
        numbers: By their names in a checkpoint, :attr:`weight`, :attr:`means`, :attr:`examples`.
        stored: By letter, the factors as stored; None where one is not kept, or is lost.
    """

    def __init__(
        self,
        shape: FactorShape,
        device: torch.device,
        dtype: torch.dtype,
        held: tuple[bool, bool] = (True, True),
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        zeros = partial(torch.zeros, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.numbers = {
            "average_weight": zeros(()),
            "mean_eigenvalues": zeros((shape.numbers, shape.groups)),
            "examples": zeros(()),
        }
        self.stored: dict[str, Tensor | None] = dict.fromkeys(shape.letters)
        for k in shape.letters:
            if held[k == "G"]:
                size = shape.stored_shape(k)
                self.stored[k] = torch.zeros(size, dtype=dtype, device=device)

    @property
    def weight(self) -> Tensor:
        """W of the top of this file, a scalar; 0 before the first statistic."""
        return self.numbers["average_weight"]

    @property
    def examples(self) -> Tensor:
        """Number of rows of A in an update, averaged as the factors are; 0 before the first."""
        return self.numbers["examples"]

    @property
    def means(self) -> Tensor:
        """The mean eigenvalues of A and of G, averaged as they are, ``(2, groups)``.

        Or ``(3, 1)`` with that of L; or ``(3, groups)`` with each expert's share of the examples.
        """
        return self.numbers["mean_eigenvalues"]

    def matrix(self, which: str, dtype: torch.dtype) -> Tensor:
        """A factor kept here as a new ``(groups, n, n)``, or ``(groups, n)`` if it is diagonal."""
        stored = self.stored[which]
        assert stored is not None, f"factor {which} is kept elsewhere"
        if which in self.shape.diagonals:
            return stored.to(dtype, copy=True)
        return unpack_upper_triangular(stored.to(dtype), self.shape.dims[which])

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and G, each as :meth:`matrix` gives it."""
        return self.matrix("A", dtype), self.matrix("G", dtype)

    def mean_curvature(self) -> Tensor:
        """Mean eigenvalue of A ⊗ G, or A ⊗ L ⊗ G, over the groups; a scalar."""
        return self.of_letters.prod(0).mean()

    @property
    def of_letters(self) -> Tensor:
        """The mean eigenvalues of the factors alone, ``(2 or 3, groups)``."""
        return self.means[: len(self.shape.letters)]


def update_averages(
    averages: Sequence[KroneckerFactors], sums: Sequence[StatisticsSums], decay: float
) -> list[tuple[list[int], Tensor]]:
    """Take in one step's sums over all ranks, which are used up; ``decay`` is β.

    Sums whose entries may not fit their dtype count as no example. Returns whether they did not,
    ``(n,)``, with the positions of n layers, for all layers, or those where any did not.
    """
    keys: list[object] = []
    for each in averages:
        shape = each.shape
        held = tuple(factor is not None for factor in each.stored.values())
        size = shape.groups, shape.numbers, shape.letters
        keys.append((each.weight.device, each.dtype, shape.marginal, held, size))
    dropped: list[tuple[list[int], Tensor]] = []
    for group in in_groups(keys):
        # Layers of equal shape next to each other: their factors are one tensor.
        shapes = [averages[i].shape for i in group]
        most = most_elements(averages[group[0]].weight.device)
        equal = in_groups(shapes, [shape.elements for shape in shapes], most)
        order = [group[k] for part in equal for k in part]
        ends = list(accumulate(map(len, equal)))
        slices = [slice(end - len(part), end) for end, part in zip(ends, equal, strict=True)]
        over = _take_in([averages[i] for i in order], [sums[i] for i in order], slices, decay)
        if over is not None:
            dropped.append((order, over))
    return dropped


def _take_in(
    averages: Sequence[KroneckerFactors],
    sums: Sequence[StatisticsSums],
    slices: Sequence[slice],
    decay: float,
) -> Tensor | None:
    """Update averages of one kind, equal ones next to each other; returns which sums overflow."""
    shape = averages[0].shape
    heads = as_stack([each.head for each in sums])

    # Drop sums that overflow. No entry of a positive semi-definite matrix exceeds its trace, which
    # the head of the sums over all ranks has: all ranks agree, whichever keep the factors.
    most = torch.finfo(sums[0].factors["A"].dtype).max
    bounds = tuple(most / max(each.shape.dims.values()) for each in averages)
    over = ~(heads[:, 2:].amax(1) <= _constants(bounds, heads.dtype, heads.device))  # or NaN
    dropping = over.device.type != "cpu" or bool(over.any())
    if dropping:
        heads.masked_fill_(over.unsqueeze(1), 0.0)
    terms = heads[:, 0]
    examples = heads[:, 1]
    means = heads[:, 2:].unflatten(1, (shape.numbers, -1))

    # Both factors of gradients have the trace of the curvature, which their product is to have
    # once: A's is made the number of examples, and that of its mean 1.
    unit_trace = None
    if shape.marginal:
        sizes = tuple(float(each.shape.dims["A"]) for each in averages)
        trace = means[:, 0, 0] * _constants(sizes, heads.dtype, heads.device)
        unit_trace = torch.where(trace > 0, examples / trace.where(trace > 0, 1.0), 0.0)
        means[:, 0, 0] *= unit_trace

    # The weight W. A layer of which no row has ever had a gradient has no curvature to average.
    numbers = [each.numbers for each in averages]
    weight = own_stack(numbers, "average_weight")
    present = (examples > 0) & ((means[:, 1] != 0).any(1) | (weight > 0))
    torch.where(present, weight * decay + 1.0, weight, out=weight)

    # X + step (x - X), where a step of 0 leaves X bit for bit.
    step = weight.clamp_min(1.0).reciprocal_() * present
    own_stack(numbers, "examples").lerp_(examples.to(weight.dtype), step)

    # The mean eigenvalues. A, and L, are means over rows, G is one over terms.
    counts = torch.stack([terms if k == "G" else examples for k in shape.letters], 1)
    if shape.routed:
        counts = torch.cat([counts, examples.unsqueeze(1)], 1)
    counts = counts.clamp_min(1.0)
    average = own_stack(numbers, "mean_eigenvalues")
    news = (means / _rows(counts, means)).to(average.dtype)
    steps = _rows(step, average)
    if shape.routed:
        own, step_a = _own_means(average[:, -1], news[:, -1], step.unsqueeze(1))
        news[:, 0].mul_(own)
        steps = steps.repeat(1, *news.shape[1:])
        steps[:, 0] = step_a
    average.lerp_(news, steps)

    # The factors.
    for equal in slices:
        for column, letter in enumerate(shape.letters):
            if averages[equal.start].stored[letter] is None:
                continue
            average = own_stack([each.stored for each in averages[equal]], letter)
            total = as_stack([each.factors[letter] for each in sums[equal]])
            if dropping:
                total.masked_fill_(_rows(over[equal], total), 0.0)
            if unit_trace is not None and letter == "A":
                total = total * _rows(unit_trace[equal], total)
            count = _rows(counts[equal, column], total)
            if total.dtype == counts.dtype:
                mean = total.div_(count)
            else:  # numbers are not rounded to the factors' dtype
                mean = total.to(step.dtype) / count
            steps = step[equal]
            if shape.routed and letter == "A":
                mean = mean * _rows(own[equal].to(mean.dtype), mean)
                steps = step_a[equal]
            average.lerp_(mean.to(average.dtype), _rows(steps.to(average.dtype), average))
    return over if dropping else None


def _own_means(shares: Tensor, news: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """What makes an expert's A a mean over its own examples, and the step that it then takes.

    Of ``(layers, groups)``: its share of all examples so far, and of this step's. An average of
    sums, over that of shares, moves by the step times the new share over the share thereafter.
    """
    after = torch.lerp(shares, news, step)
    seen = news > 0
    own = torch.where(seen, 1.0 / news.where(seen, 1.0), 0.0)
    return own, torch.where(seen, step * news / after.where(seen, 1.0), 0.0)


@lru_cache(maxsize=256)
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def mean_eigenvalue(factor: Tensor, dim: int) -> Tensor:
    """Trace over size, ``(groups,)``, of matrices, triangles, or diagonals of the size ``dim``."""
    if factor.dim() == 3:
        return factor.diagonal(dim1=-2, dim2=-1).mean(-1)
    return factor.mean(-1) if factor.shape[-1] == dim else packed_trace(factor, dim) / dim


def _stored(matrix: Tensor) -> Tensor:
    """Symmetric matrices as triangles; triangles and diagonals as they are."""
    return pack_upper_triangular(matrix) if matrix.dim() == 3 else matrix

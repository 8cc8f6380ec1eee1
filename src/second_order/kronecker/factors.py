"""Staged statistics of one step, and the running averages they go into.

``X <- X + (x - X) / W`` with ``W <- beta W + 1`` is the exponential moving average divided by
1 - beta^t: the first update equals the first statistic and a constant stays constant.
Everything is decided on the device, so that no update waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from second_order.kronecker.explanation import Explanation
from second_order.kronecker.layers import FactorShape, PairStatistics
from second_order.kronecker.rows import next_serial
from second_order.kronecker.stacks import as_stack, in_groups, most_elements, own_stack
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

    def __init__(
        self, shape: FactorShape, device: torch.device, factor_dtype: torch.dtype, triangular: bool
    ) -> None:
        self.shape, self.device = shape, device
        self.factor_dtype, self.triangular = factor_dtype, triangular
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
        # For passes that have ended: the sums by factor, and the record. The record has the number
        # of A's rows and the mean eigenvalues of the sums.
        self._sums: dict[str, Tensor] = {}
        self._record: Tensor | None = None
        self._open: dict[int, PassSums] = {}  # of passes that are not over
        self._first_passes: set[int] = set()
        self._passes: set[int] = set()

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
        """Count a pair of a backward pass, which :func:`put` brings; arguments as :meth:`add`'s.

        ``work``: operations of its layer.
        """
        self.note(pass_id)
        self.work += work
        self.pairs += 1
        self.revision += 1
        if not again:
            self._first_passes.add(pass_id)
            self.micro_batches = len(self._first_passes)

    def add(
        self,
        pair: PairStatistics,
        gradient_scale: Tensor | float,
        pass_id: int,
        *,
        again: bool = False,
    ) -> None:
        """Add a pair of a backward pass on the CPU.

        ``gradient_scale`` turns the captured gradient into that of the pass's loss; ``again``: an
        earlier pass has come through the same forward.
        """
        self.expect(pass_id, again=again)
        self.bring(pair, gradient_scale, pass_id)

    def bring(self, pair: PairStatistics, gradient_scale: Tensor | float, pass_id: int) -> None:
        """Add a pair that is expected."""
        square = None if _is_one(gradient_scale) else gradient_scale**2
        found = {k: _stored(factor, self.triangular) for k, factor in pair.factors.items()}
        if square is not None:
            found["G"].mul_(square)
            if self.shape.marginal:  # both are of gradients
                found["A"].mul_(square)
        means = [mean_eigenvalue(factor, self.shape.dims[k]) for k, factor in found.items()]
        routed = [] if pair.routed is None else [pair.routed]
        record = torch.cat([_number(pair.examples, means[0]), *means, *routed]).to(self.dtype)
        if not math.isfinite(record.sum()):  # nobody waits for an answer
            record.zero_()
            found = {k: torch.zeros_like(factor) for k, factor in found.items()}
            self.dropped += 1
        put([(self, pass_id, found, record)])

    def drop_changed(self) -> None:
        """Drop a pair that was changed while it was kept; none is to be kept again."""
        self.keeps = False
        self.dropped.add_(1)

    def sums(self, micro_batches: int = 1) -> StatisticsSums:
        """The sums of the step, as :func:`sums_of` gives them."""
        return sums_of([self], micro_batches)[0]

    def _blank(self, terms: float | Tensor) -> StatisticsSums:
        blank = partial(torch.zeros, dtype=self.factor_dtype, device=self.device)
        shapes = {k: self.shape.stored_shape(k, self.triangular) for k in self.shape.letters}
        head = blank(2 + self.shape.numbers * self.shape.groups, dtype=self.dtype)
        head[0] = terms
        return StatisticsSums({k: blank(shape) for k, shape in shapes.items()}, head)


@dataclass
class PassSums:
    """A layer's sums of a pass that is not over, and their record."""

    factors: dict[str, Tensor]
    record: Tensor


def _is_one(scale: Tensor | float) -> bool:
    return not isinstance(scale, Tensor) and scale == 1


def _number(number: int | Tensor, like: Tensor) -> Tensor:
    """A number as a tensor ``(1,)`` like others."""
    if isinstance(number, Tensor):
        return number.view(1).to(like.dtype)
    return like.new_full((1,), float(number))


def put(pairs: Iterable[tuple[StagedStatistics, int, dict[str, Tensor], Tensor]]) -> None:
    """Add expected pairs of different layers: each one's pass, sums by letter, and record."""
    totals: list[Tensor] = []
    more: list[Tensor] = []
    for staged, pass_id, factors, record in pairs:
        opened = staged._open.get(pass_id)
        if opened is None:
            staged._open[pass_id] = PassSums(factors, record)
            continue
        totals += [*opened.factors.values(), opened.record]
        more += [*factors.values(), record]
    if totals:
        torch._foreach_add_(totals, more)


def end_pass(
    layers: Iterable[StagedStatistics], pass_id: int, terms: Tensor | float | None
) -> None:
    """Add what a pass has brought to the sums of the step.

    ``terms``: N, if the pass's loss is a mean over so many, so that G is N² times that of the
    captured gradients, as it would be for one term's.
    """
    opened: dict[torch.device, list[tuple[StagedStatistics, PassSums]]] = {}
    for staged in layers:
        sums = staged._open.pop(pass_id, None)
        if sums is not None:
            opened.setdefault(staged.device, []).append((staged, sums))
    for device, ended in opened.items():
        if terms is not None:
            _scale_gradients(ended, terms, device)
        totals: list[Tensor] = []
        more: list[Tensor] = []
        for staged, sums in ended:
            if staged._record is None:
                staged._sums, staged._record = sums.factors, sums.record
                continue
            totals += [*staged._sums.values(), staged._record]
            more += [*sums.factors.values(), sums.record]
        if totals:
            torch._foreach_add_(totals, more)


def _scale_gradients(
    ended: Sequence[tuple[StagedStatistics, PassSums]],
    terms: Tensor | float,
    device: torch.device,
) -> None:
    """Multiply sums of products of gradients by N²."""
    if not isinstance(terms, Tensor) and terms == 1:
        return
    scaled: dict[torch.dtype, list[Tensor]] = {}
    for staged, sums in ended:
        groups = staged.shape.groups
        parts = [sums.factors["G"], sums.record[1 + groups : 1 + 2 * groups]]
        if staged.shape.marginal:  # both are of gradients
            parts += [sums.factors["A"], sums.record[1 : 1 + groups]]
        for part in parts:
            scaled.setdefault(part.dtype, []).append(part)
    for dtype, parts in scaled.items():
        square = terms.to(device, dtype) ** 2 if isinstance(terms, Tensor) else terms**2
        torch._foreach_mul_(parts, square)


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
    for each in staged:
        for pass_id in [*each._open]:  # passes that nothing has ended, as with losses that are sums
            end_pass([each], pass_id, None)
    keys = [(each.device, each.factor_dtype, each._record is None) for each in staged]
    found: dict[int, StatisticsSums] = {}
    for order, slices in _alike(keys, [each.shape for each in staged]):
        ours = [staged[i] for i in order]
        numbers = None if terms is None else [terms[i] for i in order]
        if ours[0]._record is None:
            found |= {i: staged[i]._blank(0.0 if terms is None else terms[i]) for i in order}
        else:
            sums = _sums_of_alike(ours, slices, numbers, micro_batches)
            found |= zip(order, sums, strict=True)
    return [found[i] for i in range(len(staged))]


def _alike(
    keys: Sequence[tuple[Any, ...]], shapes: Sequence[FactorShape]
) -> Iterator[tuple[list[int], list[slice]]]:
    """Positions of layers that scalars are computed of together, and slices of equal factors.

    ``keys`` begin with a device.
    """
    sizes_of = ((s.groups, len(s.letters), s.numbers) for s in shapes)
    heads = [(*key, *sizes) for key, sizes in zip(keys, sizes_of, strict=True)]
    for group in in_groups(heads):
        ours = [shapes[i] for i in group]
        sizes = [shape.elements for shape in ours]
        parts = in_groups(ours, sizes, most_elements(keys[group[0]][0]))
        ends = list(accumulate(map(len, parts)))
        slices = [slice(end - len(part), end) for end, part in zip(ends, parts, strict=True)]
        yield [group[i] for part in parts for i in part], slices


def _sums_of_alike(
    staged: Sequence[StagedStatistics],
    slices: Sequence[slice],
    terms: Sequence[Tensor | float] | None,
    micro_batches: int,
) -> list[StatisticsSums]:
    """The sums of layers that have any, equal ones next to each other."""
    records = as_stack([cast(Tensor, each._record) for each in staged])
    numbers = records[:, :1] if terms is None else _column(terms, records)
    heads, factors = torch.cat([numbers, records], 1), [each._sums for each in staged]
    if micro_batches == 1:
        pairs = zip(factors, heads.unbind(), strict=True)
        sums = [StatisticsSums(dict(parts), head) for parts, head in pairs]
    else:
        scale = heads.new_full((len(staged),), micro_batches**2)
        sums = _times(heads, factors, slices, scale, staged[0].shape.groups)
    for each, of in zip(sums, staged, strict=True):
        if of.factor_dtype != of.dtype:
            each.factors = {k: total.to(of.factor_dtype) for k, total in each.factors.items()}
    return sums


def _column(numbers: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """One number for each row, ``(n, 1)``; a device gets no more numbers than are different."""
    first = numbers[0]
    if all(number is first for number in numbers) or not any(
        isinstance(number, Tensor) or number != first for number in numbers
    ):
        if isinstance(first, Tensor):
            return first.to(like).expand(len(numbers), 1)
        return like.new_full((len(numbers), 1), first)
    each = [n.to(like) if isinstance(n, Tensor) else like.new_full((), n) for n in numbers]
    return torch.stack(each).unsqueeze(1)


def _times(
    heads: Tensor,
    factors: Sequence[Mapping[str, Tensor]],
    slices: Sequence[slice],
    scale: Tensor,
    groups: int,
) -> list[StatisticsSums]:
    """Sums, with those of each layer's G times a number of ``scale``."""
    heads = heads.clone()
    heads[:, 2 + groups : 2 + 2 * groups].mul_(scale.to(heads.dtype).unsqueeze(1))
    found: list[Tensor] = []
    for alike in slices:
        whole = as_stack([each["G"] for each in factors[alike]])
        found += (whole * _rows(scale[alike].to(whole.dtype), whole)).unbind()
    return [
        StatisticsSums({**each, "G": g}, head)
        for each, g, head in zip(factors, found, heads.unbind(), strict=True)
    ]


def of_examples(
    sums: Sequence[StatisticsSums], shapes: Sequence[FactorShape], share: Tensor | float
) -> list[StatisticsSums]:
    """The sums over all processes with G that of one term, of losses divided by their number N.

    ``share`` of N are the terms in the sums.
    """
    keys = [(each.head.device, each.head.dtype, each.factors["G"].shape) for each in sums]
    found: dict[int, StatisticsSums] = {}
    for order, slices in _alike(keys, shapes):
        heads, factors = as_stack([sums[i].head for i in order]), [sums[i].factors for i in order]
        scale, groups = (heads[:, 0] * share) ** 2, shapes[order[0]].groups
        found |= zip(order, _times(heads, factors, slices, scale, groups), strict=True)
    return [found[i] for i in range(len(sums))]


def _rows(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each slice of a stack, or for each of its groups, in its dimensions."""
    return numbers.reshape(*numbers.shape, *[1] * (like.dim() - numbers.dim()))


class KroneckerFactors:
    """Running averages of the factors, each on the ranks that keep it, and their traces, on all.

    Attributes:
        shape: Sizes of the layer's factors.
        dtype: Dtype in which the factors are stored.
        triangular: Whether only upper triangles are stored.
        weight: W of the top of this file, a scalar; 0 before the first statistic.
        means: ``(2, groups)``: the mean eigenvalues of A and of G, averaged as they are; ``(3, 1)``
            with that of L; ``(3, groups)`` with each group's share of the examples, of experts.
        examples: Number of rows of A in an update, averaged as the factors are; 0 before the first.
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
        self.means = torch.zeros(shape.numbers, shape.groups, dtype=wide, device=device)
        self.stored: dict[str, Tensor | None] = dict.fromkeys(shape.letters)
        for k in shape.letters:
            if held[k == "G"]:
                size = shape.stored_shape(k, triangular)
                self.stored[k] = torch.zeros(size, dtype=dtype, device=device)

    def store(self, matrix: Tensor) -> Tensor:
        """A symmetric matrix, or a diagonal, in the form in which this layer keeps and sends it."""
        return _stored(matrix, self.triangular).to(self.dtype)

    def update(self, sums: StatisticsSums, decay: float) -> None:
        """Take in one step's sums, as :func:`update_averages` does."""
        update_averages([self], [sums], decay)

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
        return self.of_letters.prod(0).mean()

    @property
    def of_letters(self) -> Tensor:
        """The mean eigenvalues of the factors alone, ``(2 or 3, groups)``."""
        return self.means[: len(self.shape.letters)]

    def to_dense(self) -> Tensor:
        """G ⊗ A, ``(groups, out in, out in)``, which multiplies ``gradient.flatten(1)``."""
        a, g = self.matrices(self.dtype)
        a = torch.diag_embed(a) if self.shape.diagonal_a else a
        if self.shape.locations:
            a = torch.kron(a[0], self.matrix("L", self.dtype)[0]).unsqueeze(0)
        return torch.stack([torch.kron(gi, ai) for ai, gi in zip(a, g, strict=True)])


def update_averages(
    averages: Sequence[KroneckerFactors], sums: Sequence[StatisticsSums], decay: float
) -> list[tuple[list[int], Tensor]]:
    """Take in one step's sums over all ranks, which are used up; ``decay`` is β.

    Sums whose entries may not fit their dtype count as no example. Returns whether they did not,
    ``(n,)``, beside the positions of n layers, for all layers, or those where any did not.
    """
    keys = [
        (
            each.weight.device,
            each.dtype,
            each.shape.marginal,
            *(v is None for v in each.stored.values()),
        )
        for each in averages
    ]
    dropped: list[tuple[list[int], Tensor]] = []
    for order, slices in _alike(keys, [each.shape for each in averages]):
        ours, theirs = [averages[i] for i in order], [sums[i] for i in order]
        over = _take_in(ours, theirs, slices, decay)
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
    shape, heads = averages[0].shape, as_stack([each.head for each in sums])
    # No entry of a positive semi-definite matrix exceeds its trace, which the head of the sums over
    # all ranks knows: so that all come to the same verdict, whoever keeps the factors.
    most = torch.finfo(sums[0].factors["A"].dtype).max
    bounds = tuple(most / max(each.shape.dims.values()) for each in averages)
    over = ~(heads[:, 2:].amax(1) <= _constants(bounds, heads.dtype, heads.device))  # or NaN
    # On the CPU nobody waits for an answer.
    dropping = over.device.type != "cpu" or bool(over.any())
    if dropping:
        heads.masked_fill_(over.unsqueeze(1), 0.0)
    terms, examples = heads[:, 0], heads[:, 1]
    means = heads[:, 2:].unflatten(1, (shape.numbers, -1))
    unit_trace = None
    if shape.marginal:
        # Both factors of gradients have the trace of the curvature, which their product is to have
        # once: A's is made the number of examples, and that of its mean 1.
        sizes = tuple(float(each.shape.dims["A"]) for each in averages)
        trace = means[:, 0, 0] * _constants(sizes, heads.dtype, heads.device)
        unit_trace = torch.where(trace > 0, examples / trace.where(trace > 0, 1.0), 0.0)
        means[:, 0, 0] *= unit_trace
    owned = [vars(each) for each in averages]
    # A layer of which no row has ever had a gradient has no curvature to average yet.
    weight = own_stack(owned, "weight")
    present = (examples > 0) & ((means[:, 1] != 0).any(1) | (weight > 0))
    torch.where(present, weight * decay + 1.0, weight, out=weight)
    # X + step (x - X), where a step of 0 leaves X bit for bit.
    step = weight.clamp_min(1.0).reciprocal_() * present
    own_stack(owned, "examples").lerp_(examples.to(weight.dtype), step)
    # A, and L, are means over rows, G is one over terms.
    numbers = torch.stack([terms if k == "G" else examples for k in shape.letters], 1)
    if shape.routed:
        numbers = torch.cat([numbers, examples.unsqueeze(1)], 1)
    numbers = numbers.clamp_min(1.0)
    average = own_stack(owned, "means")
    news, steps = (means / _rows(numbers, means)).to(average.dtype), _rows(step, average)
    if shape.routed:
        own, step_a = _own_means(average[:, -1], news[:, -1], step.unsqueeze(1))
        news[:, 0].mul_(own)
        steps = steps.repeat(1, *news.shape[1:])
        steps[:, 0] = step_a
    average.lerp_(news, steps)
    for alike in slices:
        for letter in shape.letters:
            if averages[alike.start].stored[letter] is None:
                continue
            average = own_stack([each.stored for each in averages[alike]], letter)
            total = as_stack([each.factors[letter] for each in sums[alike]])
            if dropping:
                total.masked_fill_(_rows(over[alike], total), 0.0)
            if unit_trace is not None and letter == "A":
                total = total * _rows(unit_trace[alike], total)
            # Numbers are not rounded to the factors' dtype.
            number = _rows(numbers[alike, shape.letters.index(letter)], total)
            narrow = total.dtype != numbers.dtype
            mean = total.to(examples.dtype) / number if narrow else total.div_(number)
            steps = step
            if shape.routed and letter == "A":
                mean, steps = mean * _rows(own[alike].to(mean.dtype), mean), step_a
            average.lerp_(mean.to(average.dtype), _rows(steps[alike].to(average.dtype), average))
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


def _stored(matrix: Tensor, triangular: bool) -> Tensor:
    return pack_upper_triangular(matrix) if triangular and matrix.dim() == 3 else matrix

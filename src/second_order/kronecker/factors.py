"""Staged statistics of one step, and the running averages they go into.

``X <- X + (x - X) / W`` with ``W <- beta W + 1`` is the exponential moving average divided by
1 - beta^t: the first update equals the first statistic and a constant stays constant.
Everything is decided on the device, so that no update waits for the host.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.explanation import Explanation
from second_order.kronecker.layers import FactorShape, PairStatistics
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
    "mean_eigenvalue",
    "of_examples",
    "put",
    "scale_squared",
    "sums_of",
    "update_averages",
]

Reduction: TypeAlias = Literal["mean", "sum", "step_mean"]
"""What a loss is: a mean over its pass's examples, a sum over them, or that over the step's."""


@dataclass
class StatisticsSums:
    """One step's statistics of a layer, as the ranks add them up."""

    # By letter, the sum over examples of a factor, stored as the running average is.
    factors: dict[str, Tensor]
    # The number of examples, then the sums of the mean eigenvalues of A's groups, G's, and L's;
    # then the examples of each group, if these have their own.
    head: Tensor


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
        cleared: The revision of the last :meth:`clear`.
        explanation: The gradient in these passes beside the pairs, where they are compared.
        settle: Brings pairs that are expected and have not been put in, if there may be any.
        keeps: Whether pairs may be kept until their pass ends.
    """

    explanation: Explanation | None = None
    settle: Callable[[], None] | None = None
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
        self._sums: dict[str, Tensor] = {}
        # By pass, each call's record: its rows, its examples, and the mean eigenvalues of its sums.
        self._calls: dict[int, list[Tensor]] = {}
        self._reduction: Reduction = "sum"
        self._first_passes: set[int] = set()
        self._terms: dict[int, int | Tensor] = {}  # by pass

    def knows(self, pass_id: int) -> bool:
        """Whether a backward pass has brought a pair."""
        return pass_id in self._calls or pass_id in self._terms

    @property
    def empty(self) -> bool:
        """Whether no pair has arrived, be it one to be counted alone."""
        return not (self.pairs or self._terms)

    def count(self, terms: int | Tensor, pass_id: int) -> None:
        """Count the terms of a pair, apart from its statistics."""
        self._terms[pass_id] = self._terms.get(pass_id, 0) + terms

    @property
    def terms(self) -> Tensor:
        """The terms that were counted, and 1 if any pair's were, ``(2,)``."""
        found = torch.as_tensor(sum(self._terms.values()), dtype=self.dtype, device=self.device)
        return torch.stack([found, torch.full_like(found, bool(self._terms))])

    def expect(self, pass_id: int, *, again: bool = False, reduction: Reduction = "sum") -> None:
        """Count a pair of a backward pass, which :func:`put` brings; arguments as :meth:`add`'s."""
        self.pairs += 1
        self.revision += 1
        self._reduction = reduction
        self._calls.setdefault(pass_id, [])
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
        reduction: Reduction = "sum",
    ) -> None:
        """Add a pair of a backward pass on the CPU: sums over its examples.

        ``gradient_scale`` turns the captured gradient into that of the pass's loss; ``again``: an
        earlier pass has come through the same forward.
        """
        self.expect(pass_id, again=again, reduction=reduction)
        square = scale_squared(gradient_scale, pair.rows, reduction)
        found = {k: _stored(factor, self.triangular) for k, factor in pair.factors.items()}
        if square is not None:
            found["G"].mul_(square)
            if self.shape.marginal:  # both are of gradients
                found["A"].mul_(square)
        means = [mean_eigenvalue(factor, self.shape.dims[k]) for k, factor in found.items()]
        like = means[0]
        counts = [
            n.view(1) if isinstance(n, Tensor) else like.new_full((1,), float(n))
            for n in (pair.rows, pair.examples)
        ]
        routed = [] if pair.routed is None else [pair.routed]
        record = torch.cat([*counts, *means, *routed]).to(self.dtype)
        if not math.isfinite(record.sum()):  # nobody waits for an answer
            record.zero_()
            # Not in place: another layer may have been given the same A.
            found = {k: torch.zeros_like(factor) for k, factor in found.items()}
            self.dropped += 1
        put([(self, pass_id, found, record)])

    def sums(self, micro_batches: int = 1) -> StatisticsSums:
        """The sums of the step, as :func:`sums_of` gives them."""
        return sums_of([self], micro_batches)[0]

    def _blank(self) -> StatisticsSums:
        blank = partial(torch.zeros, dtype=self.factor_dtype, device=self.device)
        shapes = {k: self.shape.stored_shape(k, self.triangular) for k in self.shape.letters}
        head = blank(1 + self.shape.numbers * self.shape.groups, dtype=self.dtype)
        return StatisticsSums({k: blank(shape) for k, shape in shapes.items()}, head)


def scale_squared(
    gradient_scale: Tensor | float, rows: int, reduction: Reduction
) -> Tensor | float | None:
    """The factor of a pair's G by that of its gradients; None if it is 1."""
    if reduction == "mean":
        # Over the rows, at first: the whole step tells what share of them counts, so that
        # it does not matter how a batch was cut.
        gradient_scale = gradient_scale * rows
    return gradient_scale**2 if isinstance(gradient_scale, Tensor) or gradient_scale != 1 else None


def put(pairs: Iterable[tuple[StagedStatistics, int, dict[str, Tensor], Tensor]]) -> None:
    """Add expected pairs of different layers: each one's pass, sums by letter, and record."""
    totals: list[Tensor] = []
    more: list[Tensor] = []
    for staged, pass_id, factors, record in pairs:
        staged._calls[pass_id].append(record)
        if not staged._sums:
            staged._sums = factors
            continue
        totals += staged._sums.values()
        more += factors.values()
    if totals:
        torch._foreach_add_(totals, more)


def sums_of(staged: Sequence[StagedStatistics], micro_batches: int = 1) -> list[StatisticsSums]:
    """The sums of a step by layer, to be added over ranks and divided by the number of examples.

    A module used U times in a pass gives A averaged over its uses and G summed over them
    (the lumped statistics of Ba et al. 2017, appendix C). A use without an example is none,
    unless the whole pass has none. Each pass's loss was divided by ``micro_batches``. Of losses
    divided by the examples of the whole step nobody knows the number here: G is to be
    multiplied by its square.
    """
    for each in staged:
        if each.settle is not None:
            each.settle()
    passes = [[calls for calls in each._calls.values() if calls] for each in staged]
    # Layers whose pairs came in the same way.
    keys = [
        (each.device, each.factor_dtype, each._reduction, each.micro_batches, *map(len, calls))
        for each, calls in zip(staged, passes, strict=True)
    ]
    found: dict[int, StatisticsSums] = {}
    for order, slices in _alike(keys, [each.shape for each in staged]):
        if passes[order[0]]:
            records = _records([passes[i] for i in order])
            ours = [staged[i] for i in order]
            found |= zip(order, _sums_of_alike(ours, slices, records, micro_batches), strict=True)
        else:
            found |= {i: staged[i]._blank() for i in order}
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


class _Records(NamedTuple):
    """The records of layers whose pairs came in the same way, one row each."""

    total: Tensor
    uses: Tensor | float  # in a pass; 1.0 where none is counted
    rows: Tensor  # of the uses that count
    passes: int


def _records(passes: Sequence[Sequence[Sequence[Tensor]]]) -> _Records:
    """Add up the records of layers, by layer, pass and call.

    A call without an example (one beyond the end of every sequence, or one whose output's gradient
    a derivative of ReLU has zeroed) counts only where all calls are like it.
    """
    like = passes[0][0][0]
    wide = torch.float64 if like.device.type == "cpu" else like.dtype
    totals, uses, rows = list[Tensor](), list[Any](), list[Tensor]()
    for i, first in enumerate(passes[0]):
        calls = [as_stack([layer[i][call] for layer in passes]) for call in range(len(first))]
        totals += calls
        if len(calls) == 1:
            uses.append(1.0)
            rows.append(calls[0][:, 0])
        else:
            whole = torch.stack(calls)
            present = whole[..., 1] > 0
            counts = (present | ~present.any(0)).to(wide)
            uses.append(counts.sum(0))
            rows.append((whole[..., 0] * counts).sum(0))
    total, used, all_rows = (reduce(operator.add, each) for each in (totals, uses, rows))
    return _Records(total, used / len(passes[0]), all_rows, len(passes[0]))


def _sums_of_alike(
    staged: Sequence[StagedStatistics],
    slices: Sequence[slice],
    records: _Records,
    micro_batches: int,
) -> list[StatisticsSums]:
    """The sums of layers whose pairs came in the same way, equal ones next to each other."""
    first = staged[0]
    scale: Tensor | float = records.uses * micro_batches**2
    if first._reduction == "mean":
        examples, rows = records.total[:, 1], records.rows
        if rows.device.type == "cpu":
            examples, rows = examples.double(), rows.double()
        share = (examples / rows.clamp_min(1.0)) ** 2
        scale = share if isinstance(scale, float) and scale == 1.0 else share * scale
    elif first._reduction == "step_mean":
        # An example is counted at each use, and in each pass that comes through its forward.
        counted_again = records.uses * records.passes / max(first.micro_batches, 1)
        scale = scale / counted_again**2
    heads, factors = records.total[:, 1:], [each._sums for each in staged]
    scale = scale if isinstance(scale, Tensor) else heads.new_full((len(staged),), scale)
    if scale.device.type == "cpu" and bool((scale == 1.0).all()):  # nobody waits for an answer
        pairs = zip(factors, heads.unbind(), strict=True)
        sums = [StatisticsSums(dict(parts), head) for parts, head in pairs]
    else:
        sums = _times(heads, factors, slices, scale, first.shape.groups)
    for each, of in zip(sums, staged, strict=True):
        if of.factor_dtype != of.dtype:
            each.factors = {k: total.to(of.factor_dtype) for k, total in each.factors.items()}
    return sums


def _times(
    heads: Tensor,
    factors: Sequence[Mapping[str, Tensor]],
    slices: Sequence[slice],
    scale: Tensor,
    groups: int,
) -> list[StatisticsSums]:
    """Sums, with those of each layer's G times a number of ``scale``."""
    heads = heads.clone()
    heads[:, 1 + groups : 1 + 2 * groups].mul_(scale.to(heads.dtype).unsqueeze(1))
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
    """The sums over all processes with G that of examples, of losses divided by their number N.

    ``share`` of N are the examples in the sums.
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
    over = ~(heads[:, 1:].amax(1) <= _constants(bounds, heads.dtype, heads.device))  # or NaN
    # On the CPU nobody waits for an answer.
    dropping = over.device.type != "cpu" or bool(over.any())
    if dropping:
        heads.masked_fill_(over.unsqueeze(1), 0.0)
    examples, means = heads[:, 0], heads[:, 1:].unflatten(1, (shape.numbers, -1))
    unit_trace = None
    if shape.marginal:
        # Both factors of gradients have the trace of the curvature, which their product is to have
        # once: A's is made the number of examples, and that of its mean 1.
        sizes = tuple(float(each.shape.dims["A"]) for each in averages)
        trace = means[:, 0, 0] * _constants(sizes, heads.dtype, heads.device)
        unit_trace = torch.where(trace > 0, examples / trace.where(trace > 0, 1.0), 0.0)
        means[:, 0, 0] *= unit_trace
    owned = [vars(each) for each in averages]
    weight, present = own_stack(owned, "weight"), examples > 0
    torch.where(present, weight * decay + 1.0, weight, out=weight)
    # X + step (x - X), where a step of 0 leaves X bit for bit.
    step = weight.clamp_min(1.0).reciprocal_() * present
    own_stack(owned, "examples").lerp_(examples.to(weight.dtype), step)
    examples = examples.clamp_min(1.0)
    average = own_stack(owned, "means")
    news, steps = (means / _rows(examples, means)).to(average.dtype), _rows(step, average)
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
            # The number of examples is not rounded to the factors' dtype.
            number, narrow = _rows(examples[alike], total), total.dtype != examples.dtype
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

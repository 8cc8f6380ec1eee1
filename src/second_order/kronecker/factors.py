"""Staged statistics of one step, and the running averages they go into.

``X <- X + (x - X) / W`` with ``W <- beta W + 1`` is the exponential moving average divided by
1 - beta^t: the first update equals the first statistic and a constant stays constant.
Everything is decided on the device, so that no update waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.layers import FactorShape
from second_order.kronecker.rows import next_serial
from second_order.kronecker.storage import (
    as_stack,
    group_equal,
    max_stacked_elements,
    merge_numbers,
    stack_in_place,
)
from second_order.kronecker.verification import Verification

__all__ = [
    "KroneckerFactors",
    "Reduction",
    "StagedStatistics",
    "StatisticsSums",
    "add_pairs",
    "close_pass",
    "collect_sums",
    "count_dropped",
    "scale_to_one_term",
    "update_running_averages",
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


RECORD = "record"

PassSums: TypeAlias = dict[str, Tensor]
"""A layer's sums of a pass, by factor, and their "record".

The record has the number of A's rows, the mean eigenvalues of the sums, and the rows of each group.
"""


class StagedStatistics:
    """Sums over the pairs of one step, waiting for the step to be taken.

    Those of a pass are kept apart until it is over, when the number of its loss's terms is known.

    They are kept as the running averages are, so that no more than one layer's full matrices exist
    at a time. A pair with a non-finite statistic counts nothing and is counted in :attr:`dropped`.

    Attributes:
        dtype: Dtype of the sums; they leave in ``factor_dtype``.
        pairs: Number of pairs cleared_at the last :meth:`clear`.
        work: Operations of their passes.
        verification: The gradient in these passes beside the pairs, where they are compared.
        cleared_at: A number that is larger than those of all passes before the last :meth:`clear`.
    """

    verification: Verification | None = None

    def __init__(self, shape: FactorShape, device: torch.device, factor_dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.factor_dtype = factor_dtype
        self.dtype = torch.promote_types(factor_dtype, torch.float32)
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Drop every pair cleared_at the last step."""
        self.verification = None
        self.pairs = 0
        self.work = 0
        self.cleared_at = next_serial()
        self._total: PassSums | None = None  # of passes that have ended
        self._open: dict[int, PassSums] = {}  # of passes that are not over
        self._passes: dict[int, bool] = {}  # whether each was the first through some forward

    def ensure_verification(self) -> Verification:
        """The comparison of these passes' pairs with the gradient, made on first use."""
        if self.verification is None:
            self.verification = Verification()
        return self.verification

    def has_pass(self, pass_id: int) -> bool:
        """Whether a backward pass has brought a pair."""
        return pass_id in self._passes

    def has_other_pass(self, pass_id: int) -> bool:
        """Whether another backward pass has brought a pair."""
        return bool(self._passes.keys() - {pass_id})

    @property
    def micro_batches(self) -> int:
        """Number of backward passes that were the first through some forward."""
        return sum(self._passes.values())

    @property
    def empty(self) -> bool:
        """Whether no pair has arrived."""
        return not self.pairs

    @property
    def revision(self) -> tuple[int, int]:
        """A value that changes whenever the sums may have."""
        return self.cleared_at, self.pairs

    def record_pair(self, pass_id: int, *, again: bool = False, work: int = 0) -> None:
        """Count a pair of a backward pass, which :func:`add_pairs` brings.

        ``again``: an earlier pass has come through the same forward. ``work``: operations of its
        layer.
        """
        self._passes[pass_id] = self._passes.get(pass_id, False) or not again
        self.work += work
        self.pairs += 1

    def open_sums(self, pass_id: int, sums: PassSums) -> PassSums:
        """The sums of a pass that is not over: those given, if they are its first."""
        return self._open.setdefault(pass_id, sums)

    def end_sums(self, pass_id: int) -> tuple[PassSums | None, PassSums | None]:
        """The sums of a pass that is over, and those of the step, to which they are to be added.

        The first pass's become those of the step.
        """
        sums = self._open.pop(pass_id, None)
        if self._total is None:
            self._total = sums
            return sums, None
        return sums, self._total

    def total(self) -> PassSums:
        """The sums of the step, of passes that have ended, or that nothing ends; zeros of none."""
        for pass_id in [*self._open]:  # losses that are sums
            close_pass([self], pass_id, None)
        if self._total is not None:
            return self._total
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        sums = {
            letter: zeros(self.shape.stored_shape(letter)) for letter in self.shape.factor_names
        }
        return {**sums, RECORD: zeros(1 + self.shape.numbers * self.shape.groups)}


def _letters_of_gradients(shape: FactorShape) -> str:
    """The factors that are sums of products of gradients."""
    return "AG" if shape.marginal else "G"


def count_dropped(staged: Sequence[StagedStatistics], dropped: Tensor) -> None:
    """Count pairs or sums that layers have dropped, ``(n,)``, without waiting for a device."""
    counts = dropped.to(torch.int64).unbind()
    torch._foreach_add_([each.dropped for each in staged], counts)


class PairSums(NamedTuple):
    """The sums of one pair."""

    staged: StagedStatistics
    pass_id: int
    factors: dict[str, Tensor]
    record: Tensor


def add_pairs(pairs: Iterable[PairSums]) -> None:
    """Add expected pairs of different layers."""
    totals: list[Tensor] = []
    added: list[Tensor] = []
    for staged, pass_id, factors, record in pairs:
        sums = {**factors, RECORD: record}
        total = staged.open_sums(pass_id, sums)
        if total is not sums:
            totals += total.values()
            added += sums.values()
    if totals:
        torch._foreach_add_(totals, added)


def close_pass(
    layers: Iterable[StagedStatistics], pass_id: int, terms: Tensor | float | None
) -> None:
    """Add what a pass has brought to the sums of the step.

    ``terms``: N, if the pass's loss is a mean over so many, so that G is N² times that of the
    captured gradients, as it would be for one term's.
    """
    by_device: dict[torch.device, list[StagedStatistics]] = {}
    for staged in layers:
        by_device.setdefault(staged.device, []).append(staged)
    for device, together in by_device.items():
        gradients: list[Tensor] = []
        totals: list[Tensor] = []
        added: list[Tensor] = []
        for staged in together:
            sums, total = staged.end_sums(pass_id)
            if sums is None:
                continue
            groups = staged.shape.groups
            for letter in _letters_of_gradients(staged.shape):
                start = 1 + groups * staged.shape.factor_names.index(letter)
                gradients += (sums[letter], sums[RECORD][start : start + groups])
            if total is not None:
                totals += total.values()
                added += sums.values()
        if gradients and terms is not None:
            number = terms.to(device, gradients[0].dtype) if isinstance(terms, Tensor) else terms
            torch._foreach_mul_(gradients, number**2)
        if totals:
            torch._foreach_add_(totals, added)


def collect_sums(
    staged: Sequence[StagedStatistics],
    micro_batches: int = 1,
    terms: Sequence[Tensor | float] | None = None,
) -> list[StatisticsSums]:
    """The sums of a step by layer, to be added over ranks and divided by the numbers in the head.

    ``terms`` are N of the step by layer; None: the rows that A is a sum over. Each pass's loss was
    divided by ``micro_batches``. A module used several times in a pass has as many more rows: A is
    the mean over its uses, and G their sum (the lumped statistics of Ba et al. 2017, appendix C).
    """
    totals = [{**each.total()} for each in staged]
    records = [total.pop(RECORD) for total in totals]
    keys = [(each.device, each.shape.groups, each.shape.numbers) for each in staged]
    found: dict[int, StatisticsSums] = {}
    for group in group_equal(keys):
        # Heads: the records, behind N.
        stack = as_stack([records[i] for i in group])
        heads = stack.new_empty(len(group), 1 + stack.shape[1])
        heads[:, 1:] = stack
        rows = stack[:, 0]
        heads[:, 0] = rows if terms is None else merge_numbers([terms[i] for i in group], stack)

        if micro_batches > 1:
            square = float(micro_batches**2)
            heads[:, _gradients_of(staged[group[0]].shape)].mul_(square)
            scaled = torch._foreach_mul([totals[i]["G"] for i in group], square)
            for i, g in zip(group, scaled, strict=True):
                totals[i]["G"] = g
        for i, head in zip(group, heads.unbind(), strict=True):
            narrow = {k: total.to(staged[i].factor_dtype) for k, total in totals[i].items()}
            found[i] = StatisticsSums(narrow, head)
    return [found[i] for i in range(len(staged))]


def _gradients_of(shape: FactorShape) -> slice:
    """The places of G's mean eigenvalues in a head."""
    return slice(2 + shape.groups, 2 + 2 * shape.groups)


def scale_to_one_term(
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


class KroneckerFactors:
    """Running averages of the factors, each on the ranks that keep it, and their traces, on all.

    Attributes:
        shape: Sizes of the layer's factors.
        dtype: Dtype in which the factors are stored.
        entries: By their names in a checkpoint, the factors that are kept here, by letter, and
            :attr:`weight`, :attr:`means` and :attr:`examples`. A factor that is lost is missing.
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
        self.entries = {
            "average_weight": zeros(()),
            "mean_eigenvalues": zeros((shape.numbers, shape.groups)),
            "examples": zeros(()),
        }
        for k in shape.factor_names:
            if held[k == "G"]:
                self.entries[k] = zeros(shape.stored_shape(k), dtype=dtype)

    @property
    def stored(self) -> dict[str, Tensor]:
        """The factors that are kept here, by letter."""
        return {k: self.entries[k] for k in self.shape.factor_names if k in self.entries}

    @property
    def weight(self) -> Tensor:
        """W of the top of this file, a scalar; 0 before the first statistic."""
        return self.entries["average_weight"]

    @property
    def examples(self) -> Tensor:
        """Number of rows of A in an update, averaged as the factors are; 0 before the first."""
        return self.entries["examples"]

    @property
    def means(self) -> Tensor:
        """The mean eigenvalues of A and of G, averaged as they are, ``(2, groups)``.

        Or ``(3, 1)`` with that of L; or ``(3, groups)`` with each expert's share of the examples.
        """
        return self.entries["mean_eigenvalues"]

    @property
    def factor_means(self) -> Tensor:
        """The mean eigenvalues of the factors alone, ``(2 or 3, groups)``."""
        return self.means[: len(self.shape.factor_names)]

    def mean_curvature(self) -> Tensor:
        """Mean eigenvalue of A ⊗ G, or A ⊗ L ⊗ G, over the groups; a scalar."""
        return self.factor_means.prod(0).mean()


def update_running_averages(
    averages: Sequence[KroneckerFactors], sums: Sequence[StatisticsSums], decay: float
) -> None:
    """Take in one step's sums over all ranks, which are used up; ``decay`` is β."""
    keys: list[object] = []
    for each in averages:
        shape = each.shape
        size = shape.groups, shape.numbers, shape.factor_names
        columns = shape.in_dim if shape.marginal else 0
        keys.append((each.weight.device, each.dtype, columns, frozenset(each.entries), size))
    for group in group_equal(keys):
        # Layers of equal shape next to each other: their factors are one tensor.
        shapes = [averages[i].shape for i in group]
        most = max_stacked_elements(averages[group[0]].weight.device)
        runs = group_equal(shapes, [shape.elements for shape in shapes], most)
        order = [group[k] for run in runs for k in run]
        lengths = [len(run) for run in runs]
        _update([averages[i] for i in order], [sums[i] for i in order], lengths, decay)


def _update(
    averages: Sequence[KroneckerFactors],
    sums: Sequence[StatisticsSums],
    lengths: Sequence[int],
    decay: float,
) -> None:
    """Update averages of one kind; equal ones are next to each other, in runs of these lengths."""
    shape = averages[0].shape
    entries = [each.entries for each in averages]
    heads = as_stack([each.head for each in sums])
    terms = heads[:, 0]
    examples = heads[:, 1]
    means = heads[:, 2:].unflatten(1, (shape.numbers, -1))

    # Both factors of gradients have the trace of the curvature, which their product is to have
    # once: A's is made the number of examples, and that of its mean 1.
    unit_trace: Tensor | None = None
    if shape.marginal:
        trace = means[:, 0, 0] * shape.dims["A"]
        unit_trace = torch.where(trace > 0, examples / trace.where(trace > 0, 1.0), 0.0)
        means[:, 0, 0] *= unit_trace

    # The weight W. A layer of which no row has ever had a gradient has no curvature to average.
    weight = stack_in_place(entries, "average_weight")
    present = (examples > 0) & ((means[:, 1] != 0).any(1) | (weight > 0))
    torch.where(present, weight * decay + 1.0, weight, out=weight)

    # X + step (x - X), where a step of 0 leaves X bit for bit.
    step = weight.clamp_min(1.0).reciprocal_() * present
    stack_in_place(entries, "examples").lerp_(examples.to(weight.dtype), step)

    # The mean eigenvalues. A, and L, are means over rows, G is one over terms.
    counts = torch.stack([terms if k == "G" else examples for k in shape.factor_names], 1)
    if shape.routed:
        counts = torch.cat([counts, examples.unsqueeze(1)], 1)
    counts = counts.clamp_min(1.0)
    average = stack_in_place(entries, "mean_eigenvalues")
    news = (means / _rows(counts, means)).to(average.dtype)
    steps = _rows(step, average)
    if shape.routed:
        own, step_a = _own_means(average[:, -1], news[:, -1], step.unsqueeze(1))
        news[:, 0].mul_(own)
        steps = steps.repeat(1, *news.shape[1:])
        steps[:, 0] = step_a
    average.lerp_(news, steps)

    # The factors.
    start = 0
    for length in lengths:
        equal = slice(start, start + length)
        start += length
        for column, letter in enumerate(shape.factor_names):
            if letter not in entries[0]:
                continue
            average = stack_in_place(entries[equal], letter)
            total = as_stack([each.factors[letter] for each in sums[equal]])
            mean = total.to(counts.dtype)  # numbers are not rounded to the factors' dtype
            steps = step[equal]
            if unit_trace is not None and letter == "A":
                mean.mul_(_rows(unit_trace[equal], mean))
            mean.div_(_rows(counts[equal, column], mean))
            if shape.routed and letter == "A":
                mean.mul_(_rows(own[equal], mean))
                steps = step_a[equal]
            average.lerp_(mean.to(average.dtype), _rows(steps.to(average.dtype), average))


def _rows(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each slice of a stack, or for each of its groups, in its dimensions."""
    return numbers.reshape(*numbers.shape, *[1] * (like.dim() - numbers.dim()))


def _own_means(shares: Tensor, news: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """What makes an expert's A a mean over its own examples, and the step that it then takes.

    Of ``(layers, groups)``: its share of all examples so far, and of this step's. An average of
    sums, over that of shares, moves by the step times the new share over the share thereafter.
    """
    after = torch.lerp(shares, news, step)
    seen = news > 0
    own = torch.where(seen, 1.0 / news.where(seen, 1.0), 0.0)
    return own, torch.where(seen, step * news / after.where(seen, 1.0), 0.0)

"""Sum a layer's statistics over one step, and average them over the steps.

    pair    A pair is a layer's input and output gradient. ``add_pairs`` adds the sums of
            each captured pair to those of its pass.
    pass    ``close_pass`` adds the sums of a pass to those of the step, when the pass
            is over and the number of its loss terms is known.
    step    ``collect_sums`` returns the sums of the step, which the ranks all-reduce.
            ``update_running_averages`` adds them to the running averages.

W starts at 0. A statistic x updates its average X by ``W <- β W + 1`` and then
``X <- X + (x - X) / W``. X is the exponential moving average divided by 1 - βᵗ, as in
Adam. All conditions are tensor operations, so that the host does not synchronize with
the device.

A sums over data rows, for example one per position of a sequence. The entry
``examples`` of a checkpoint counts them. N counts loss terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.layers import FactorShape
from second_order.kronecker.rows import serials
from second_order.kronecker.storage import (
    as_stack,
    group_equal,
    max_stacked_elements,
    merge_numbers,
    stack_in_place,
)
from second_order.kronecker.verification import Verification

__all__ = [
    "ALL_FACTORS",
    "KroneckerFactors",
    "PairSums",
    "PassSums",
    "Reduction",
    "StagedStatistics",
    "StatisticsSums",
    "add_pairs",
    "close_pass",
    "collect_sums",
    "count_dropped",
    "is_far_from_overflow",
    "layer_mean_curvature",
    "scale_to_one_term",
    "update_running_averages",
]

# Bound on the growth of statistics before they are averaged, N² · 16 · n: N = 2 ** 20
# loss terms, 16 passes or ranks, and n = 2 ** 20 columns of a factor. The check reads
# the mean eigenvalue of the factor, whose largest element is at most n times larger.
MAX_GROWTH = 2.0**64

Reduction: TypeAlias = Literal["mean", "sum", "step_mean"]
"""How a loss is reduced: mean or sum over the terms of its pass. "step_mean": the sum,
divided by the number of terms of the whole step."""


@dataclass
class StatisticsSums:
    """One step's statistics of a layer, in the form that the ranks add.

    With two groups, the head of a layer without L is

        [N | data rows | A: group 0, group 1 | G: group 0, group 1]

    Attributes:
        factors: By factor name, the sum over examples, as a packed triangle or a
            diagonal.
        head: N, the number of loss terms. Then the number of data rows that A sums
            over. Then, for each group of A, of G and of L, the mean eigenvalue of the
            sum. Then, if the groups have examples of their own, the number of data
            rows of each group.
    """

    factors: dict[str, Tensor]
    head: Tensor


@dataclass
class PassSums:
    """A layer's sums over a pair, over a pass, or over the passes of a step.

    Attributes:
        factors: As in :class:`StatisticsSums`.
        record: The head of :class:`StatisticsSums` without N, which is known later.
    """

    factors: dict[str, Tensor]
    record: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The factors and the record, in one order for all sums of a layer."""
        return [*self.factors.values(), self.record]


# --------------------------------------------------------------------- sums of one step


class StagedStatistics:
    """A layer's sums over the pairs of a step, until the next step averages them.

    The sums of a pass stay separate until it is over, when the number of its loss terms
    is known. All sums are packed, as the running averages are. Full matrices exist only
    while they are computed.

    Attributes:
        shape: Sizes of the layer's factors.
        device: The device of the sums.
        factor_dtype: The dtype in which :func:`collect_sums` returns the factors.
        dtype: The dtype of the sums: float32 at least.
        dropped: Number of pairs dropped so far, because a statistic was non-finite or
            close to overflow.
        pairs: Number of pairs since the last :meth:`clear`.
        work: Number of operations of the layer in the passes of these pairs.
        verification: The comparison of the pairs with the weight's gradient, if any.
        cleared_at: The serial number of the last :meth:`clear`. Later passes have
            larger ones.
    """

    def __init__(
        self, shape: FactorShape, device: torch.device, factor_dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.device = device
        self.factor_dtype = factor_dtype
        self.dtype = torch.promote_types(factor_dtype, torch.float32)
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Drop every pair since the last step."""
        self.verification: Verification | None = None
        self.pairs = 0
        self.work = 0
        self.cleared_at = next(serials)
        self._total: PassSums | None = None  # of the passes that are over
        self._open: dict[int, PassSums] = {}  # of the running passes, by number
        # By pass number: whether the pass was the first through some forward.
        self._is_first: dict[int, bool] = {}

    def ensure_verification(self) -> Verification:
        """Return :attr:`verification`, and create it on first use."""
        if self.verification is None:
            self.verification = Verification()
        return self.verification

    def has_pass(self, pass_id: int) -> bool:
        """Whether the backward pass with this number has delivered a pair."""
        return pass_id in self._is_first

    def has_other_pass(self, pass_id: int) -> bool:
        """Whether a backward pass other than this one has delivered a pair."""
        return bool(self._is_first.keys() - {pass_id})

    @property
    def micro_batches(self) -> int:
        """Number of backward passes that were the first through some forward."""
        return sum(self._is_first.values())

    @property
    def empty(self) -> bool:
        """Whether no pair has arrived."""
        return not self.pairs

    @property
    def revision(self) -> tuple[int, int]:
        """A value that changes whenever the sums may have changed."""
        return self.cleared_at, self.pairs

    def record_pair(self, pass_id: int, *, again: bool = False, work: int = 0) -> None:
        """Count a pair of a backward pass, whose sums :func:`add_pairs` will add.

        Args:
            pass_id: The number of the pass.
            again: Whether an earlier pass went through the same forward.
            work: Number of operations of the layer in this pass.
        """
        self._is_first[pass_id] = self._is_first.get(pass_id, False) or not again
        self.work += work
        self.pairs += 1

    def open_sums(self, pass_id: int, new: PassSums) -> PassSums:
        """Return the sums of a running pass. If it has none yet, ``new`` become them."""
        return self._open.setdefault(pass_id, new)

    def end_sums(self, pass_id: int) -> tuple[PassSums | None, PassSums | None]:
        """End a pass. The caller then adds its sums to those of the step.

        Returns:
            The sums of the pass, and the sums of the step to add them to. The former
            are None if the pass has none. The latter are None at the first pass,
            because its sums have then become those of the step.
        """
        sums = self._open.pop(pass_id, None)
        if self._total is None:
            self._total = sums
            return sums, None
        return sums, self._total

    def total(self) -> PassSums:
        """Close all passes, and return the sums of the step; zeros if it has none."""
        # If a pass is still open, its loss counts as a sum: G is not scaled.
        for pass_id in list(self._open):
            close_pass([self], pass_id, terms=None)
        if self._total is not None:
            return self._total
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        names = self.shape.factor_names
        factors = {name: zeros(self.shape.stored_shape(name)) for name in names}
        record = zeros(sum(self.shape.record_parts))
        return PassSums(factors, record)


class PairSums(NamedTuple):
    """The sums of one pair, for :func:`add_pairs`."""

    staged: StagedStatistics
    pass_id: int
    sums: PassSums


def is_far_from_overflow(numbers: Tensor) -> Tensor:
    """Return which numbers of new statistics are finite, with room to grow.

    The numbers are mean eigenvalues and numbers of data rows, or their sums. Later they
    are multiplied by up to N² and n, and added over passes and ranks.
    """
    return numbers < torch.finfo(numbers.dtype).max / MAX_GROWTH  # False for NaN


def count_dropped(layers: Sequence[StagedStatistics], dropped: Tensor) -> None:
    """Add ``dropped``, ``(layers,)``, to the layers' counts, without a device read."""
    counts = dropped.to(torch.int64).unbind()
    torch._foreach_add_([staged.dropped for staged in layers], counts)


def add_pairs(pairs: Iterable[PairSums]) -> None:
    """Add the sums of pairs to those of their passes.

    Each layer has at most one pair, because one fused operation adds all of them.
    """
    totals: list[Tensor] = []
    added: list[Tensor] = []
    for staged, pass_id, sums in pairs:
        total = staged.open_sums(pass_id, sums)
        if total is not sums:  # otherwise, `sums` became the total
            totals += total.tensors
            added += sums.tensors
    if totals:
        torch._foreach_add_(totals, added)


def close_pass(
    layers: Iterable[StagedStatistics], pass_id: int, terms: Tensor | float | None
) -> None:
    """Add the sums of a pass to those of the step.

    Args:
        layers: The layers that have pairs of the pass.
        pass_id: The number of the pass.
        terms: N, if the loss of the pass is a mean over N terms. The captured gradients
            are then 1/N of one term's gradients, and G is multiplied by N². None
            leaves G as it is.
    """
    # One fused operation per device adds the sums of all its layers.
    by_device: dict[torch.device, list[StagedStatistics]] = {}
    for staged in layers:
        by_device.setdefault(staged.device, []).append(staged)

    for device, device_layers in by_device.items():
        # List the sums to scale, which are computed from gradients, and the totals.
        gradient_sums: list[Tensor] = []
        totals: list[Tensor] = []
        added: list[Tensor] = []
        for staged in device_layers:
            sums, total = staged.end_sums(pass_id)
            if sums is None:
                continue
            _, *means = sums.record.split_with_sizes(staged.shape.record_parts)
            for name in staged.shape.gradient_factors:
                mean_eigenvalues = means[staged.shape.factor_names.index(name)]
                gradient_sums += (sums.factors[name], mean_eigenvalues)
            if total is not None:
                totals += total.tensors
                added += sums.tensors

        # Scale G and its mean eigenvalues by N², and add. The sums of the first pass are
        # the total already, so they are scaled in place.
        if gradient_sums and terms is not None:
            square: Tensor | float
            like = gradient_sums[0]
            if isinstance(terms, Tensor):
                square = terms.to(like) ** 2
            elif device.type == "cpu":
                # A tensor of the same dtype takes a third of the time on a CPU.
                square = like.new_full((), float(terms) ** 2)
            else:
                square = float(terms) ** 2
            torch._foreach_mul_(gradient_sums, square)
        if totals:
            torch._foreach_add_(totals, added)


# --------------------------------------------------------- from sums to what ranks send


def collect_sums(
    layers: Sequence[StagedStatistics],
    micro_batches: int = 1,
    terms: Sequence[Tensor | float] | None = None,
) -> list[StatisticsSums]:
    """Return the sums of a step by layer, which the caller adds over ranks.

    If a module is used k times in a pass, it has k times as many data rows, but the
    same number of loss terms. Its A is then the mean over its uses, and its G their sum
    (the lumped statistics of Ba et al. 2017, appendix C).

    Args:
        layers: The layers' staged statistics.
        micro_batches: The number that each pass's loss was divided by.
        terms: N of the step by layer. None: the number of data rows.
    """
    totals: list[PassSums] = []
    keys: list[object] = []
    for staged in layers:
        totals.append(staged.total())
        keys.append((staged.device, staged.shape.groups, staged.shape.record_size))
    # By the index of a layer.
    heads: dict[int, Tensor] = {}
    scaled_g: dict[int, Tensor] = {}

    # Layers with records of one length share a stack of heads.
    for group in group_equal(keys):
        # A head is N and then the record.
        stack = as_stack([totals[i].record for i in group])
        stacked_heads = stack.new_empty(len(group), 1 + stack.shape[1])
        stacked_heads[:, 1:] = stack
        if terms is None:
            stacked_heads[:, 0] = stack[:, 0]
        else:
            stacked_heads[:, 0] = merge_numbers([terms[i] for i in group], stack)

        # If a loss was divided by k, so were its gradients. If a layer is
        # gradient-factored, its A is not scaled here, because its average is scaled to
        # the trace 1.
        if micro_batches > 1:
            square = float(micro_batches**2)
            places = _places_of_means(layers[group[0]].shape, "G")
            stacked_heads[:, places].mul_(square)
            scaled = torch._foreach_mul([totals[i].factors["G"] for i in group], square)
            scaled_g.update(zip(group, scaled, strict=True))
        heads.update(zip(group, stacked_heads.unbind(), strict=True))

    sums: list[StatisticsSums] = []
    for i, staged in enumerate(layers):
        factors: dict[str, Tensor] = {}
        for name, total in totals[i].factors.items():
            is_scaled = name == "G" and i in scaled_g
            factor = scaled_g[i] if is_scaled else total
            factors[name] = factor.to(staged.factor_dtype)
        sums.append(StatisticsSums(factors, heads[i]))
    return sums


def _places_of_means(shape: FactorShape, factor_name: str) -> slice:
    """The places of a factor's mean eigenvalues in a head."""
    start = 2 + shape.groups * shape.factor_names.index(factor_name)
    return slice(start, start + shape.groups)


def scale_to_one_term(
    sums: Sequence[StatisticsSums], shapes: Sequence[FactorShape], share: Tensor | float
) -> list[StatisticsSums]:
    """Scale G to single loss terms, if losses were divided by N of the whole step.

    Args:
        sums: The sums over all ranks.
        shapes: The layers' factor shapes.
        share: N / (P n). N is the number of terms of the step, P the number of ranks
            over which gradients are averaged, and n the number of terms in the sums
            (``head[0]``). Captured gradients are P / N times one term's gradients, so G
            is multiplied by (N / P)², which is (n ``share``)².
    """
    scaled: list[StatisticsSums] = []
    for layer_sums, shape in zip(sums, shapes, strict=True):
        square = (layer_sums.head[0] * share) ** 2
        head = layer_sums.head.clone()
        head[_places_of_means(shape, "G")] *= square
        g = layer_sums.factors["G"]
        factors = {**layer_sums.factors, "G": g * square.to(g.dtype)}
        scaled.append(StatisticsSums(factors, head))
    return scaled


# --------------------------------------------------------------------- running averages


ALL_FACTORS = ("A", "G", "L")
"""The names of all factors that a layer may have."""


class KroneckerFactors:
    """Running averages of a layer's factors, and of their mean eigenvalues.

    A rank stores the factors that it owns. Every rank stores the mean eigenvalues.

    Attributes:
        shape: Sizes of the layer's factors.
        dtype: The dtype in which the factors are stored.
        kind: A key. The averages of layers with equal keys are updated together if
            their entries also have equal names.
        entries: By their names in a checkpoint: the factors that this rank owns, and
            :attr:`weight`, :attr:`means` and :attr:`examples`. If a checkpoint lacked a
            factor that this rank owns, the factor is lost and its entry is missing.
    """

    def __init__(
        self,
        shape: FactorShape,
        device: torch.device,
        dtype: torch.dtype,
        owned: Collection[str] = ALL_FACTORS,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        sizes = (shape.groups, shape.record_size, shape.factor_names)
        # Gradient-factored layers are updated together only if their A has one size,
        # because the update computes the trace of A from its mean eigenvalue.
        columns = shape.in_dim if shape.gradient_factored else 0
        self.kind = (device, dtype, columns, sizes)
        small_dtype = torch.promote_types(dtype, torch.float32)
        zeros = partial(torch.zeros, dtype=small_dtype, device=device)
        self.entries = {
            "average_weight": zeros(()),
            "mean_eigenvalues": zeros((shape.record_size, shape.groups)),
            "examples": zeros(()),
        }
        for name in shape.factor_names:
            if name in owned:
                self.entries[name] = zeros(shape.stored_shape(name), dtype=dtype)

    @property
    def stored(self) -> dict[str, Tensor]:
        """The factors that this rank stores, by name."""
        names = self.shape.factor_names
        return {name: self.entries[name] for name in names if name in self.entries}

    @property
    def weight(self) -> Tensor:
        """W, the weight of the average (top of this file), a scalar; initially 0."""
        return self.entries["average_weight"]

    @property
    def examples(self) -> Tensor:
        """Average number of data rows per update, a scalar; initially 0."""
        return self.entries["examples"]

    @property
    def means(self) -> Tensor:
        """The averages of the mean eigenvalues of A and G, ``(2, groups)``.

        ``(3, 1)`` if the layer also has L. ``(3, groups)`` if the groups have examples
        of their own; the last row is then each group's share of the examples.
        """
        return self.entries["mean_eigenvalues"]


def layer_mean_curvature(factor_means: Tensor) -> Tensor:
    """The mean curvature of layers: the mean eigenvalue of A ⊗ G, or of A ⊗ L ⊗ G.

    The eigenvalues of a Kronecker product are the products of those of its factors, so
    the mean is the product of the factors' means. A grouped convolution has one product
    per group, and this is their average.

    Args:
        factor_means: The mean eigenvalues of each factor, ``(factors, ..., groups)``.

    Returns:
        The mean curvature of each layer, ``(...)``.
    """
    return factor_means.prod(0).mean(-1)


def update_running_averages(
    averages: Sequence[KroneckerFactors], sums: Sequence[StatisticsSums], decay: float
) -> bool:
    """Update running averages with the sums of one step.

    Args:
        averages: The averages of each layer.
        sums: The sums of each layer over all ranks. Their tensors may be overwritten.
        decay: β, which multiplies the weight W of all earlier updates. This update has
            weight 1.

    Returns:
        Whether factors were replaced by slices of a new stack. Other references to the
        old factors, as in the optimizer's ``state``, are then out of date.
    """
    # Layers whose small tensors have one shape are updated together.
    keys = [(layer.kind, frozenset(layer.entries)) for layer in averages]
    has_new_stack = False
    for group in group_equal(keys):
        # Among these, the factors of layers of equal shape are updated as one stack. A
        # run lists positions in `group`.
        shapes = [averages[i].shape for i in group]
        max_size = max_stacked_elements(sums[group[0]].head.device)
        runs = group_equal(shapes, [shape.elements for shape in shapes], max_size)
        order = [group[position] for run in runs for position in run]
        has_new_stack |= _update_group(
            [averages[i] for i in order],
            [sums[i] for i in order],
            run_lengths=[len(run) for run in runs],
            decay=decay,
        )
    return has_new_stack


def _update_group(
    averages: Sequence[KroneckerFactors],
    sums: Sequence[StatisticsSums],
    run_lengths: Sequence[int],
    decay: float,
) -> bool:
    """Update the averages of layers with equal keys.

    Layers of equal shape are consecutive: they form a run. Returns whether factors were
    replaced by slices of a new stack.
    """
    shape = averages[0].shape
    entries = [layer.entries for layer in averages]
    heads = as_stack([layer_sums.head for layer_sums in sums])
    num_terms = heads[:, 0]
    num_rows = heads[:, 1]
    summed_means = heads[:, 2:].unflatten(1, (shape.record_size, -1))

    # If a layer is gradient-factored, A and G both have the trace of the curvature, but
    # A ⊗ G must have it only once. So A's sum is scaled to the trace `num_rows`, and
    # its mean to the trace 1.
    unit_trace: Tensor | None = None
    if shape.gradient_factored:
        trace = summed_means[:, 0, 0] * shape.dims["A"]
        is_positive = trace > 0
        safe_trace = trace.where(is_positive, 1.0)
        unit_trace = torch.where(is_positive, num_rows / safe_trace, 0.0)
        summed_means[:, 0, 0] *= unit_trace

    # Update W, unless the step has no data rows or every G so far is zero. If W is not
    # 0, an earlier G was not zero.
    weight = stack_in_place(entries, "average_weight")
    has_new_g = summed_means[:, 1].any(1)
    is_updated = torch.logical_or(has_new_g, weight).logical_and_(num_rows)
    torch.where(is_updated, weight * decay + 1.0, weight, out=weight)

    # X <- X + step (x - X), with the step size 1 / W, or 0 without an update. If it is
    # 0, X does not change in any bit.
    step = is_updated / weight.clamp_min(1.0)
    stack_in_place(entries, "examples").lerp_(num_rows.to(weight.dtype), step)

    # The mean eigenvalues. A and L are means over data rows, G is a mean over terms. If
    # a layer is routed, a group's number of data rows becomes its share of them.
    names = shape.factor_names
    counts = torch.stack([num_terms if name == "G" else num_rows for name in names], 1)
    if shape.routed:
        counts = torch.cat([counts, num_rows.unsqueeze(1)], 1)
    counts = counts.clamp_min(1.0)
    means = stack_in_place(entries, "mean_eigenvalues")
    new_means = (summed_means / counts.unsqueeze(-1)).to(means.dtype)
    steps = step.view(-1, 1, 1)
    steps_of_means = steps
    if shape.routed:
        routed = _average_routed(means[:, -1], new_means[:, -1], step.unsqueeze(1))
        new_means[:, 0].mul_(routed.scale)
        # Each expert's A has its own step size.
        steps_of_means = steps_of_means.repeat(1, *new_means.shape[1:])
        steps_of_means[:, 0] = routed.step
    means.lerp_(new_means, steps_of_means)

    # The factors, (layers, groups, elements) each.
    has_new_stack = False
    for column, name in enumerate(names):
        if name not in entries[0]:
            continue
        counts_of_factor = counts[:, column].view(-1, 1, 1)
        steps_of_factor = steps
        if shape.routed and name == "A":
            steps_of_factor = routed.step.unsqueeze(-1)
        steps_of_factor = steps_of_factor.to(averages[0].dtype)
        counts_by_run = counts_of_factor.split_with_sizes(run_lengths)
        steps_by_run = steps_of_factor.split_with_sizes(run_lengths)

        start = 0
        for i, length in enumerate(run_lengths):
            run = slice(start, start + length)
            start += length
            average = stack_in_place(entries[run], name)
            has_new_stack |= average._base is None  # a view has a base, a copy has none
            total = as_stack([layer_sums.factors[name] for layer_sums in sums[run]])
            # Compute the mean in a wide dtype, and round it once, in `lerp_` below.
            mean = total.to(counts.dtype)
            if unit_trace is not None and name == "A":
                mean.mul_(unit_trace[run].view(-1, 1, 1))
            mean.div_(counts_by_run[i])
            if shape.routed and name == "A":
                mean.mul_(routed.scale[run].unsqueeze(-1))
            average.lerp_(mean.to(average.dtype), steps_by_run[i])
    return has_new_stack


class _Routed(NamedTuple):
    """How A of fused experts is averaged, by layer and expert: ``(layers, groups)``."""

    scale: Tensor  # makes A a mean over the expert's own examples
    step: Tensor


def _average_routed(shares: Tensor, new_shares: Tensor, step: Tensor) -> _Routed:
    """Return the scale and the step of the average of each expert's A.

    A = U / S: U is the running average of the sums of an expert's examples, and S that
    of its share of all examples. If both take a step t, then A becomes
    A + (t s / S_after) (a - A), where s is the expert's share of the new examples, and
    a their mean.

    Args:
        shares: Average of each expert's share of the examples, ``(layers, groups)``.
        new_shares: Its share of this step's examples.
        step: The step of the average of shares, ``(layers, 1)``.
    """
    # If every G so far is zero, the step is 0. `shares_after` can then be 0 even if the
    # expert has new examples.
    shares_after = torch.lerp(shares, new_shares, step)
    is_updated = (new_shares > 0) & (shares_after > 0)
    scale = torch.where(is_updated, 1.0 / new_shares.where(is_updated, 1.0), 0.0)
    safe_shares_after = shares_after.where(is_updated, 1.0)
    step_of_a = torch.where(is_updated, step * new_shares / safe_shares_after, 0.0)
    return _Routed(scale, step_of_a)

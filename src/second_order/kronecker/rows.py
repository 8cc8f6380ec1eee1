"""Decide which rows of a backward pass are terms of its loss, and which count in A.

A pair is the input x of a layer's call and the gradient d of its output. A row of it is
one token or one example. The loss is a mean over N terms, so each d has the factor 1/N,
and G = N Σ d dᵀ. N is one number for all layers of a pass. A is the mean of x xᵀ over
the rows that *take part*: those that the loss depends on. A gradient may happen to
vanish at one layer: dead units, dropped paths, a hinge, tokens that went to another
expert. This must change neither N nor A. A leaves out only rows that have no gradient
at any layer, such as padding. A prompt's tokens have no label, so they are not terms,
but later tokens attend to them, so they have gradients and take part.

Layers whose inputs have the same leading dimensions see the same rows. A layer that
sees these rows flattened sees the same rows too. The pairs of an
``nn.MultiheadAttention`` may have the batch in another dimension than the rest of the
model, so their rows are compared with no other layer's. Rows are of one of three types.
The leading dimensions of the layers decide the type:

    positions   Shape (B, T, ...), or B T rows where another layer has (B, T), or tokens
                of fused experts. A row takes part if it has a gradient at any layer
                that sees it.
    examples    Shape (B, ...) at a convolution, or B rows otherwise. All take part,
                even without a gradient: the loss may be flat for an example (hinge,
                clipped ratios) and is still a mean over the batch.
    selected    n rows, where other pairs have positions and none of B, T and B T is n.
                These are tokens that were picked, for example for an expert. A row
                takes part if it has a gradient in its group. Once positions have been
                seen, each such pair is a group of its own.

If a pair has the shape (8, 128), then 1,024 rows are positions, 8 are examples, and 37
are selected.

The layer called last receives its gradient first. It shows the terms: its examples, or
those of its positions that have a gradient. It may be called several times in one pass.
The terms are those of all its calls if the calls have different numbers of rows, or if
they add up to the rows of another layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from second_order.kronecker.layers import (
    ATTENTION,
    ROUTED,
    PairRows,
    RowMask,
    full_row_mask,
    nonzero_row_mask,
    to_row_mask,
)

__all__ = [
    "BackwardPass",
    "RowGroup",
    "StepPasses",
    "Terms",
    "serials",
]


@dataclass
class RowGroup:
    """Rows that several layers see.

    Attributes:
        family: ATTENTION, ROUTED (fused experts), or "" for all other layers.
        shape: Leading dimensions of the layers' inputs.
        are_examples: Whether a layer showed that the rows are the batch's examples.
        are_selected: Whether the rows were selected for one call and no other.
        has_gradient: ``(rows,)``, True for rows with a gradient at any layer so far.
            None before the first layer, and if all rows have one.
        all_have_gradient: Whether every row is known to have a gradient at some layer.
    """

    family: str
    shape: tuple[int, ...]
    are_examples: bool = False
    are_selected: bool = False
    has_gradient: Tensor | None = None
    all_have_gradient: bool = False

    @cached_property
    def num_rows(self) -> int:
        """The number of rows."""
        return math.prod(self.shape)

    @property
    def all_take_part(self) -> bool:
        """Whether all rows are known to take part."""
        return self.are_examples or self.all_have_gradient

    def add(self, row_mask: RowMask) -> None:
        """Add the rows that have a gradient at one more layer."""
        if self.all_have_gradient:
            return
        if row_mask.mask is None:
            self.all_have_gradient = True
            self.has_gradient = None
            return
        self.has_gradient = _union(self.has_gradient, row_mask.mask)
        # To read a mask from a GPU would synchronize with it.
        if self.has_gradient.device.type == "cpu" and bool(self.has_gradient.all()):
            self.all_have_gradient = True
            self.has_gradient = None


def _union(first: Tensor | None, second: Tensor) -> Tensor:
    """The rows in either mask."""
    if first is None:
        return second
    return first | second.to(first.device)


class _Call(NamedTuple):
    """A call of the layer called last."""

    group: RowGroup
    row_mask: RowMask  # its rows with a gradient
    all_terms: bool  # whether a label was sampled for each of its rows


serials = itertools.count(1)
"""Increasing numbers, which order backward passes and clears of statistics in time."""


class BackwardPass:
    """The rows that the layers of one backward pass see.

    While the pass runs, :meth:`record_rows` is called for each of its pairs. When it is
    over, :meth:`find_row_mask` decides which rows of a group take part, and
    :meth:`count_terms` counts the terms of the loss.

    Args:
        number: The number of the pass, which all its pairs share.
        reduce: Whether all positions of an example make one term.

    Attributes:
        serial: Larger than that of all passes that began earlier, and than
            ``cleared_at`` of statistics that were cleared earlier.
        again: Whether an earlier pass went through the same calls of layers.
        end_is_scheduled: Whether autograd will call the collector at the end of the
            pass.
        layers: Staged statistics of the layers with pairs of this pass, by ``id()``.
    """

    def __init__(self, number: int, reduce: bool = False) -> None:
        self.number = number
        self.serial = next(serials)
        self.again = False
        self.layers: dict[int, Any] = {}
        self.end_is_scheduled = False
        self._reduce = reduce
        self._terms: float | Tensor | None = None  # once counted
        self._groups: dict[Hashable, RowGroup] = {}

        # The numbers of rows that are known to be positions, or may be examples.
        self._position_counts: set[int] = set()
        self._example_counts: set[int] = set()

        # The layer called last, which receives its gradient first.
        self._last_called: nn.Module | None = None
        self._calls: list[_Call] = []

    # -------------------------------------------------------------- while the pass runs

    def record_rows(
        self,
        rows: PairRows,
        module: nn.Module,
        *,
        has_label_per_row: bool,
        read_gradient: bool,
    ) -> RowGroup:
        """Record the rows of a module's pair, and return their group.

        Args:
            rows: The rows.
            module: The module.
            has_label_per_row: Whether a label was sampled for each row of the layer
                called last.
            read_gradient: Whether the host reads now which rows have a gradient. To
                avoid a synchronization, it does not on a GPU. The collector then adds
                the rows to their group when it sums the pairs.
        """
        key = (rows.family, rows.shape, rows.examples)
        group = self._groups.get(key)
        if group is None:
            group = self._add_group(key, rows)
        if self._last_called is None:
            self._last_called = module
        is_last_called = module is self._last_called

        # The rows of this pair that have a gradient, if anything depends on them.
        is_undecided = read_gradient and not group.all_take_part
        if not is_last_called and not is_undecided:
            return group
        if group.are_examples:
            row_mask = full_row_mask(group.num_rows)
        else:
            row_mask = nonzero_row_mask(rows.gradient)

        if is_undecided:
            group.add(row_mask)
        if is_last_called:
            self._calls.append(_Call(group, row_mask, all_terms=has_label_per_row))
        return group

    def _add_group(self, key: Hashable, rows: PairRows) -> RowGroup:
        """Add a group for a pair's rows. Selected rows get a key that no pair has."""
        group = RowGroup(rows.family, rows.shape, are_examples=rows.examples)
        if self._type_of(group) == "selected":
            group = RowGroup(rows.family, rows.shape, are_selected=True)
            key = len(self._groups)
        self._groups[key] = group

        # Numbers of rows that show the types of other groups.
        has_positions = len(rows.shape) > 1
        if has_positions or rows.family == ROUTED:
            self._position_counts.add(group.num_rows)
        if has_positions:
            # (batch, positions), or the reverse.
            self._example_counts.update(rows.shape[:2])
        if rows.examples:
            self._example_counts.add(group.num_rows)
        return group

    def rows_with_gradient(self, group: RowGroup) -> RowMask:
        """The rows of a group that are known to take part so far."""
        if group.all_take_part or group.has_gradient is None:
            return full_row_mask(group.num_rows)
        return to_row_mask(group.has_gradient)

    def mark_end_scheduled(self) -> None:
        """Record that autograd will call the collector at the end of the pass."""
        self.end_is_scheduled = True

    def mark_repeated(self) -> bool:
        """Note an earlier pass through the same calls; return whether that is new."""
        is_new = not self.again
        self.again = True
        return is_new

    @property
    def is_open(self) -> bool:
        """Whether pairs have arrived since the pass was last closed."""
        return bool(self._groups)

    @property
    def all_take_part(self) -> bool:
        """Whether all rows that were recorded are known to take part.

        The layers that are still to come can then, as a rule, change nothing.
        """
        known = all(group.all_take_part for group in self._groups.values())
        return bool(self._calls) and known

    # -------------------------------------------------------------------- types of rows

    def _type_of(self, group: RowGroup) -> str:
        """The type of a group's rows, as far as the pairs so far show it.

        A later pair can still show that 8 rows, say, are positions.
        """
        if group.are_examples:
            return "examples"
        if len(group.shape) > 1 or group.family == ROUTED:
            return "positions"
        if group.num_rows in self._position_counts:
            return "positions"
        if not self._position_counts:
            return "examples"
        if group.are_selected or group.num_rows not in self._example_counts:
            return "selected"
        return "examples"

    # ------------------------------------------------------------ when the pass is over

    def may_leave_out_rows(self, group: RowGroup) -> bool:
        """Whether some rows of a group may not take part."""
        return not group.all_have_gradient and self._type_of(group) != "examples"

    def find_mask(self, group: RowGroup) -> Tensor | None:
        """The mask ``(rows,)`` of a group's rows that take part, or None if all do."""
        if not self.may_leave_out_rows(group):
            return None
        groups = [group]
        if self._type_of(group) == "positions" and group.family != ATTENTION:
            groups = self._groups_with_same_rows(group)
        if any(same.all_have_gradient for same in groups):
            return None
        mask: Tensor | None = None
        for same in groups:
            if same.has_gradient is not None:
                mask = _union(mask, same.has_gradient)
        return mask

    def find_row_mask(self, group: RowGroup) -> RowMask:
        """The rows of a group that take part."""
        mask = self.find_mask(group)
        return full_row_mask(group.num_rows) if mask is None else to_row_mask(mask)

    def _groups_with_same_rows(self, group: RowGroup) -> list[RowGroup]:
        """The groups whose rows are those of a group, flattened or not."""
        groups = []
        for other in self._groups.values():
            is_flattened = len(other.shape) == 1 or len(group.shape) == 1
            same_number = is_flattened and other.num_rows == group.num_rows
            same_rows = other.shape == group.shape or same_number
            if same_rows and other.family != ATTENTION and not other.are_examples:
                groups.append(other)
        return groups

    def count_terms(self) -> float | Tensor:
        """N, the number of terms of the loss. On a GPU it may be a scalar tensor."""
        if self._terms is None:
            self._terms = self._count_terms()
        return self._terms

    def _count_terms(self) -> float | Tensor:
        calls = self._calls if self._calls_are_parts() else self._calls[:1]
        terms = _sum(self._count(call, call.row_mask, call.all_terms) for call in calls)
        if not isinstance(terms, Tensor) and terms != 0.0:
            return terms

        # If the layer called last has no gradient, its terms are the rows that take
        # part.
        rows = _sum(self._count(call, self.find_row_mask(call.group)) for call in calls)
        if not isinstance(terms, Tensor):
            return rows
        return torch.where(terms > 0, terms, torch.as_tensor(rows, device=terms.device))

    def _calls_are_parts(self) -> bool:
        """Whether each call of the layer called last has its own part of the terms.

        This holds if the calls' numbers of rows differ (sequences one by one), or add
        up to the rows of another layer (logits in chunks). Otherwise the same rows may
        go through the layer several times, as in a recurrent network. The last call,
        whose gradient comes first, then shows the terms alone.
        """
        numbers = [call.group.num_rows for call in self._calls]
        if len(numbers) < 2:
            return False
        if len(set(numbers)) > 1:
            return True
        total = sum(numbers)
        return any(group.num_rows == total for group in self._groups.values())

    def _count(
        self, call: _Call, row_mask: RowMask, all_terms: bool = False
    ) -> float | Tensor:
        """The number of terms in some rows of a call."""
        group = call.group
        if all_terms or self._type_of(group) == "examples":
            row_mask = full_row_mask(group.num_rows)
        if self._reduce and len(group.shape) > 1:
            row_mask = row_mask.to_examples(group.shape[0])
        return row_mask.count

    def close(self) -> None:
        """Count the terms, and free what is not needed once the pass is over."""
        self.count_terms()
        self.end_is_scheduled = False
        self._groups.clear()
        self._position_counts.clear()
        self._example_counts.clear()
        self._calls.clear()


def _sum(numbers: Iterable[float | Tensor]) -> float | Tensor:
    """The sum of numbers and scalar tensors, on the device of the first tensor."""
    total: float | Tensor = 0.0
    for number in numbers:
        if not isinstance(total, Tensor) and total == 0.0:
            total = number
        elif isinstance(total, Tensor) and isinstance(number, Tensor):
            total = total + number.to(total.device)
        else:
            total = total + number
    return total


# --------------------------------------------------------------------- passes of a step


class Terms(NamedTuple):
    """The number of loss terms of some passes."""

    number: float | Tensor
    passes: tuple[int, ...]  # their serial numbers


class LayerStatistics(Protocol):
    """What :class:`StepPasses` needs of a layer's staged statistics."""

    cleared_at: int  # from `serials`, when the statistics were last cleared

    def has_pass(self, pass_id: int) -> bool:
        """Whether the pass with this number has delivered a pair."""


@dataclass
class StepPasses:
    """The backward passes since the last step, by number."""

    passes: dict[int, BackwardPass] = field(default_factory=dict)

    def count_terms(self, layers: Iterable[LayerStatistics]) -> list[Terms]:
        """N of the step's passes, for each layer's staged statistics."""
        # Layers with the same candidate passes have the same terms.
        by_passes: dict[tuple[tuple[BackwardPass, ...], ...], Terms] = {}
        terms: list[Terms] = []
        for staged in layers:
            reaching: list[BackwardPass] = []
            candidates: list[BackwardPass] = []
            for number, each in self.passes.items():
                reaches_layer = staged.has_pass(number)
                if reaches_layer:
                    reaching.append(each)
                if reaches_layer or each.serial > staged.cleared_at:
                    candidates.append(each)
            key = (tuple(reaching), tuple(candidates))
            if key not in by_passes:
                passes = self._select_passes(reaching, candidates)
                total = _sum([each.count_terms() for each in passes])
                by_passes[key] = Terms(total, tuple([each.serial for each in passes]))
            terms.append(by_passes[key])
        return terms

    def _select_passes(
        self, reaching: Sequence[BackwardPass], candidates: Sequence[BackwardPass]
    ) -> Sequence[BackwardPass]:
        """The passes whose terms count for a layer, even if they do not reach it.

        Passes that have a layer in common have parts of one loss. A pass that goes
        through the same calls again has terms that were counted before. It is left out
        unless there is no other pass.

        Args:
            reaching: The passes that reach the layer.
            candidates: These passes, and those that began after its statistics were
                cleared.
        """
        layers: set[int] = set()
        for each in reaching:
            layers |= each.layers.keys()

        # Among these, the passes of the same loss.
        if layers:
            candidates = [p for p in candidates if not layers.isdisjoint(p.layers)]
        first_passes = [p for p in candidates if not p.again]
        return first_passes or candidates[:1]

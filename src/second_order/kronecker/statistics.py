"""Form the statistics of a step from the pairs that the hooks capture.

A pair is the input of a module's call and the gradient of the call's output. For each
pair of a backward pass, ``StatisticsCollector.consume``:

1. drops the layer's statistics if the user has dropped the gradients that belong to
   them;
2. adds the pair to the comparison with the weight's gradient, if that is due;
3. records the pair's rows among those of the whole pass, and queues the pair.

At the end of the pass, or when the queued pairs exceed a number of bytes,
``StatisticsCollector.sum_pairs``:

4. decides which rows take part, that is, count in A. Padding tokens do not count. They
   are recognized by gradients of zero at every layer
   (:mod:`second_order.kronecker.rows`). While the pass is running, a row without a
   gradient may still get one at another layer. Such rows stay queued until the pass
   ends;
5. sums the outer products of the pairs' rows. A GPU spends more time on kernel launches
   than on a small layer's products, so the pairs of equal Linears are multiplied in one
   batch;
6. adds the sums to the staged statistics of all layers with one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import FSDPParams
from second_order.errors import warn
from second_order.kronecker import autograd
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.experts import Routed
from second_order.kronecker.factors import (
    PairSums,
    PassSums,
    Reduction,
    StagedStatistics,
    add_pairs,
    close_pass,
    count_dropped,
    is_far_from_overflow,
)
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    Approximation,
    FactorShape,
    PairOptions,
    PairStatistics,
    RowMask,
    full_row_mask,
    reduce_positions,
    to_row_mask,
)
from second_order.kronecker.rows import BackwardPass, RowGroup, StepPasses, Terms
from second_order.kronecker.solvers import ieee_matmul
from second_order.kronecker.storage import (
    as_stack,
    group_equal,
    max_stacked_elements,
    merge_numbers,
    pack_upper_triangular,
)
from second_order.utils.stages import stage

__all__ = ["GradientScale", "StatisticsCollector"]

# Warnings.
SEVERAL_LOSSES = (
    "several backward passes of this step go through one forward pass: the curvature is the sum of "
    "each loss's own curvature, and lacks the products of their gradients; add the losses, and "
    "call backward() on their sum"
)
CHANGED_IN_PLACE = (
    "an operation of the backward pass changes the input of layer {!r}, or the gradient of its "
    "output, in place: the layer's statistics lack this pass; let the operation work on a copy, or "
    "name the layer in skip_layers"
)


def max_queued_bytes(device: torch.device) -> int:
    """Bytes of pairs to queue before they are summed: enough to keep a device busy."""
    return 2**22 if device.type == "cpu" else 2**26


@dataclass(frozen=True)
class GradientScale:
    """The factor for captured gradients that undoes a GradScaler."""

    scaler: Any

    def __call__(self, gradient: Tensor) -> Tensor | float:
        """Return the factor, as a number or as a scalar on the gradient's device."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        # scale(1) is the scale as a tensor. get_scale() would synchronize.
        one = torch.ones((), dtype=torch.float32, device=gradient.device)
        scale: Tensor = self.scaler.scale(one)
        return 1.0 / scale


# ------------------------------------------------------------------------- queued pairs


@dataclass(eq=False)
class Pair:
    """A captured pair of a layer, queued until it is summed.

    Attributes:
        block: The layer.
        module: The module of the layer that was called.
        x: The input of the call.
        d: The gradient of the call's output.
        backward_pass: The pass that delivered the pair.
        group: The group of the pair's rows in that pass.
        unrecorded_gradient: ``d`` as a matrix, ``(rows, out)``. None once the group has
            recorded which of its rows are nonzero.
        index: Indices of the group's rows that the pair has. None for all.
        staged: The statistics that the pair belongs to.
        tensors: The pair's tensors.
        size: Number of elements of the pair and of its sums.
        nbytes: Bytes that the pair holds in memory, but at least 4 per element in
            ``size``. A slice holds the memory of its whole tensor.
        cleared_at: ``staged.cleared_at`` when this object was made. ``replace`` reads
            it again.
        version: Sum of the version counters of ``tensors`` when this object was made.
            In-place operations increase them.
    """

    block: KroneckerBlock
    module: nn.Module
    x: Any
    d: Tensor
    backward_pass: BackwardPass
    group: RowGroup
    unrecorded_gradient: Tensor | None
    index: Tensor | None = None
    staged: StagedStatistics = field(init=False)
    tensors: tuple[Tensor, ...] = field(init=False)
    size: int = field(init=False)
    nbytes: int = field(init=False)
    cleared_at: int = field(init=False)
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.staged = self.block.staged
        self.cleared_at = self.staged.cleared_at
        self.tensors = (self.x, self.d)
        if isinstance(self.x, Routed):
            self.tensors = (self.x.hidden, self.x.index, self.x.weights, self.d)
        self.size = self.staged.shape.elements
        self.version = 0
        storage_bytes = 0
        for tensor in self.tensors:
            self.size += tensor.numel()
            self.version += tensor._version
            storage_bytes += tensor.untyped_storage().nbytes()
        self.nbytes = max(4 * self.size, storage_bytes)

    @property
    def is_valid(self) -> bool:
        """Whether the layer's statistics have not been cleared in the meantime."""
        return self.cleared_at == self.block.staged.cleared_at

    @property
    def is_unchanged(self) -> bool:
        """Whether no tensor of the pair has been changed in place."""
        version = 0
        for tensor in self.tensors:
            version += tensor._version
        return version == self.version


class ReadyPair(NamedTuple):
    """A pair that can be summed, and the mask of its rows that take part."""

    pair: Pair
    row_mask: RowMask


# ---------------------------------------------------------------------------- collector


@dataclass
class StatisticsCollector:
    """Turns captured pairs into staged statistics.

    Attributes:
        approximation: "expand" or "reduce", for dimensions that share a weight.
        reduction: Returns how the loss of a pass is reduced.
        gradient_scale: Returns a factor for captured gradients.
        comparisons_due: Returns how many times each layer should have been compared
            with its weight's gradient by the current step.
        conv_approximation: Replaces ``approximation`` for convolutions, if not None.
        fsdp: The parameters of a model that FSDP2 shards.
        on_new_statistics: Called when statistics of layers have grown. If it is set,
            the host reads during the pass which rows have a gradient, and so
            synchronizes with the device.
        sampled: Whether labels are sampled. The pairs then do not give the gradient.
        label_per_row: Whether a label is sampled for each row of the layer called last.
        step_passes: The passes since the last step.
    """

    approximation: Approximation
    reduction: Callable[[], Reduction]
    gradient_scale: Callable[[Tensor], Tensor | float]
    comparisons_due: Callable[[], float]
    conv_approximation: Approximation | None = None
    fsdp: FSDPParams | None = None
    on_new_statistics: Callable[[], None] | None = None
    sampled: bool = False
    label_per_row: bool = False
    step_passes: StepPasses = field(default_factory=StepPasses)

    # The layers, and their positions in the model.
    _blocks: dict[nn.Module, list[KroneckerBlock]] = field(default_factory=dict)
    _positions: dict[KroneckerBlock, int] = field(default_factory=dict)
    _rows_only: KroneckerBlock | None = None

    # The queued pairs. Autograd has a thread for each device, hence the lock.
    _queued_pairs: list[Pair] = field(default_factory=list)
    _queued_bytes: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _warned_of_losses: bool = False

    def set_blocks(
        self, blocks: Iterable[KroneckerBlock], rows_only: KroneckerBlock | None = None
    ) -> None:
        """Set the blocks that receive the pairs of their modules from now on.

        Args:
            blocks: The blocks, in the order of the model.
            rows_only: The one among them, if any, whose statistics another process
                computes. This process records only its rows, because they show the
                terms of the loss.
        """
        self._rows_only = rows_only
        self._blocks.clear()
        self._positions.clear()
        for position, block in enumerate(blocks):
            self._positions[block] = position
            for module in block.hooked_modules:
                self._blocks.setdefault(module, []).append(block)

    def expect_unscaled_losses(self) -> None:
        """Use captured gradients as they are, because no GradScaler scales the loss."""
        self.gradient_scale = GradientScale(None)

    # --------------------------------------------------------------------- pair by pair

    def wants(self, module: nn.Module) -> bool:
        """Whether any block of a module is trainable now."""
        return any(block.trainable for block in self._blocks.get(module, ()))

    def verify(self, module: nn.Module, x: Tensor, d: Tensor) -> None:
        """Compare a pair of the user's own loss with the gradient, if that is due."""
        for block in self._blocks.get(module, ()):
            if block.trainable and block.fits_pair(module, x, d):
                self._verify(block, module, x, d)

    def _verify(
        self, block: KroneckerBlock, module: nn.Module, x: Tensor, d: Tensor
    ) -> None:
        if block is self._rows_only:
            return  # the process that computes its statistics verifies it
        # A layer that failed its last comparison is compared until it passes one.
        if block.unverified or block.comparisons < self.comparisons_due():
            with ieee_matmul(d.device):
                block.verify_pair(module, x, d, self.fsdp)

    def consume(
        self,
        module: nn.Module,
        x: Any,
        d: Tensor,
        pass_id: int,
        again: bool = False,
    ) -> None:
        """Queue one pair for the statistics of its module's blocks.

        Args:
            module: The module that was called.
            x: Its input.
            d: The gradient of its output.
            pass_id: A number that all pairs of one backward pass share. With sampled
                labels, all pairs of one call of the model share it, because the user's
                backward pass may go through several calls.
            again: Whether an earlier backward pass went through this call.
        """
        blocks = self._select_blocks(module, x, d, pass_id)
        if not blocks:
            return
        backward_pass = self._find_pass(pass_id)
        if again:
            self._mark_repeated(backward_pass, blocks)

        # Record the pair's rows. On a CPU, reading the gradient needs no
        # synchronization.
        rows = blocks[0].gradient_rows(module, x, d)
        read_gradient = d.device.type == "cpu" or self.on_new_statistics is not None
        group = backward_pass.record_rows(
            rows,
            module,
            has_label_per_row=self.label_per_row,
            read_gradient=read_gradient,
        )

        # Queue the pair for each block.
        for block in blocks:
            if block.unverified:  # its last comparison failed
                continue
            pair = Pair(
                block=block,
                module=module,
                x=x,
                d=d,
                backward_pass=backward_pass,
                group=group,
                unrecorded_gradient=None if read_gradient else rows.gradient,
            )
            self._queue(pair, again)

        # Sum experts now: this needs the weights, which FSDP2 will shard again.
        if self._queued_bytes > max_queued_bytes(d.device) or isinstance(x, Routed):
            self.sum_pairs(pass_is_over=False)
        if self.on_new_statistics is not None and backward_pass.all_take_part:
            self.on_new_statistics()

    def _queue(self, pair: Pair, again: bool) -> None:
        """Count a pair in its layer's statistics, and queue it to be summed."""
        block = pair.block
        pair.backward_pass.layers[id(block.staged)] = block.staged
        inputs = 1 if block.shape.diagonal_a else block.shape.in_dim
        # Two operations for each of the three products of forward and backward.
        work = 6 * pair.d.numel() * inputs
        block.staged.record_pair(pair.backward_pass.number, again=again, work=work)
        if block is self._rows_only:
            return
        # `staged.work` is the work of all pairs since the last step.
        block.record_capture(block.staged.work)
        with self._lock:
            self._queued_pairs.append(pair)
            self._queued_bytes += pair.nbytes

    def _select_blocks(
        self, module: nn.Module, x: Any, d: Tensor, pass_id: int
    ) -> list[KroneckerBlock]:
        """Select a module's trainable blocks whose sizes a pair fits.

        This also clears outdated statistics, and compares the pair with the gradient,
        if that is due. A block whose sizes the pair does not fit fails the comparison.
        """
        # With sampled labels, one backward pass delivers the pairs of several calls.
        running_pass = autograd.current_pass() if self.sampled else pass_id
        fitting: list[KroneckerBlock] = []
        for block in self._blocks.get(module, ()):
            if not block.trainable:
                continue
            # The user may have dropped the gradients that the statistics belong to.
            lacks_gradient = block.begin_pass(running_pass, pass_id)
            if lacks_gradient and not self._has_unreduced_gradients(module):
                block.staged.clear()
            if not block.fits_pair(module, x, d):
                block.record_residual(1.0)  # the pair does not reproduce the gradient
                continue
            if not self.sampled:
                self._verify(block, module, x, d)
            fitting.append(block)
        return fitting

    def _has_unreduced_gradients(self, module: nn.Module) -> bool:
        """Whether FSDP2 has not averaged the gradients of earlier passes yet."""
        return self.fsdp is not None and self.fsdp.has_unreduced_gradients(module)

    def _mark_repeated(
        self, backward_pass: BackwardPass, blocks: Iterable[KroneckerBlock]
    ) -> None:
        """Mark a pass through the same forward as an earlier pass, and warn once."""
        number = backward_pass.number
        if not any(block.staged.has_other_pass(number) for block in blocks):
            return
        is_new = backward_pass.mark_repeated()
        if is_new and not self._warned_of_losses:
            self._warned_of_losses = True
            warn(SEVERAL_LOSSES)

    # ------------------------------------------------------------- passes begin and end

    def _find_pass(self, pass_id: int) -> BackwardPass:
        """Return the pass with this number. If it is new, schedule its end."""
        passes = self.step_passes.passes
        if pass_id not in passes:
            is_reduced = self.approximation == "reduce"
            passes[pass_id] = BackwardPass(pass_id, reduce=is_reduced)
        backward_pass = passes[pass_id]
        if backward_pass.end_is_scheduled:
            return backward_pass
        # Inside a reentrant checkpoint, autograd runs an inner pass within this one.
        if self.sampled or autograd.current_pass() == pass_id:
            backward_pass.mark_end_scheduled()
            autograd.call_after_pass(partial(self._end_pass, backward_pass))
        return backward_pass

    def _end_pass(self, backward_pass: BackwardPass) -> None:
        """Finish a pass. Autograd calls this after the last pair of the pass."""
        self._finish_pass(backward_pass)
        if self.on_new_statistics is not None:
            self.on_new_statistics()

    def _finish_pass(self, backward_pass: BackwardPass) -> None:
        """Sum the queued pairs, and add the sums of a pass to those of the step."""
        with torch.no_grad(), stage("statistics"):
            self.sum_pairs()
            terms: Tensor | float | None = backward_pass.count_terms()
            if self.reduction() != "mean":
                terms = None  # only a mean over the pass's terms divides the gradients
            layers = backward_pass.layers.values()
            close_pass(layers, backward_pass.number, terms)
        backward_pass.close()

    def count_terms(self, layers: Iterable[StagedStatistics]) -> list[Terms]:
        """Return N, the number of loss terms since the last step, for each layer.

        This finishes the passes that are still running, or that autograd did not end.
        """
        for backward_pass in list(self.step_passes.passes.values()):
            if backward_pass.is_open:
                self._finish_pass(backward_pass)
        return self.step_passes.count_terms(layers)

    # -------------------------------------------------------------- rows that take part

    def sum_pairs(self, pass_is_over: bool = True) -> None:
        """Add the queued pairs to the statistics of their layers.

        Args:
            pass_is_over: Whether the backward passes of the pairs are over. If not,
                rows without a gradient may still get one at another layer, and stay
                queued.
        """
        with self._lock:
            pairs = self._take_pairs()
            find_rows_with_gradient(pairs, pass_is_over)
            row_masks: dict[int, RowMask] = {}  # by the id of a group
            ready: list[ReadyPair] = []
            for pair in pairs:
                group = pair.group
                if pass_is_over or group.all_take_part:
                    if id(group) not in row_masks:
                        row_masks[id(group)] = pair.backward_pass.find_row_mask(group)
                    row_mask = row_masks[id(group)]
                    if pair.index is not None:
                        row_mask = select_rows(row_mask, pair.index)
                    ready.append(ReadyPair(pair, row_mask))
                elif self._can_split(pair):
                    first, rest = split_pair(pair)
                    ready.append(first)
                    self._queued_pairs += rest
                else:
                    # Do not count its bytes. Otherwise, the queue would stay full, and
                    # each new pair would try to sum this one again.
                    self._queued_pairs.append(replace(pair, unrecorded_gradient=None))
            self._add_sums(ready)

    def _take_pairs(self) -> list[Pair]:
        """Take the queued pairs that are still valid, and drop the others."""
        pairs = [pair for pair in self._queued_pairs if pair.is_valid]
        self._queued_pairs = []
        self._queued_bytes = 0
        unchanged: list[Pair] = []
        for pair in pairs:
            if pair.is_unchanged:
                unchanged.append(pair)
            else:
                warn(CHANGED_IN_PLACE.format(pair.block.name))
        return unchanged

    def _can_split(self, pair: Pair) -> bool:
        """Whether the layer can sum some rows of a pair now and the others later."""
        # Selected rows take part if they have a gradient at this layer. No other call
        # has these rows, so those without a gradient need not stay queued.
        if pair.group.are_selected:
            return True
        kind = pair.block.kinds.get(pair.module)
        if pair.index is not None or kind is None or not kind.multiplies_rows:
            return False
        shape = pair.group.shape
        if self.approximation == "reduce" and len(shape) > 1:
            return False
        return bool(pair.x.shape[: len(shape)] == pair.d.shape[: len(shape)] == shape)

    # -------------------------------------------------------------------- sums of pairs

    def _add_sums(self, ready: Sequence[ReadyPair]) -> None:
        """Add pairs to the statistics of their layers, in the order of the model."""
        # Pairs of one layer are added one after the other: round k has the k-th pair of
        # each layer.
        rounds: list[list[ReadyPair]] = []
        num_pairs: dict[int, int] = {}  # by the id of a layer's statistics
        for ready_pair in ready:
            staged_id = id(ready_pair.pair.staged)
            index = num_pairs.get(staged_id, 0)
            num_pairs[staged_id] = index + 1
            if index == len(rounds):
                rounds.append([])
            rounds[index].append(ready_pair)

        # In each round, add those pairs together whose records can be stacked.
        for pairs in rounds:
            pairs.sort(key=lambda member: self._positions.get(member.pair.block, 0))
            keys: list[tuple[torch.device, tuple[int, ...]]] = []
            for ready_pair in pairs:
                staged = ready_pair.pair.staged
                keys.append((staged.device, staged.shape.record_parts))
            for group in group_equal(keys):
                device, _ = keys[group[0]]
                with autograd.without_modes(device):
                    self._add_group([pairs[i] for i in group])

    def _add_group(self, ready: Sequence[ReadyPair]) -> None:
        """Add pairs of different layers on one device, with records of equal parts."""
        first = ready[0].pair.staged
        max_size = max_stacked_elements(first.device)
        keys: list[_BatchKey] = []
        sizes: list[int] = []
        for ready_pair in ready:
            size = ready_pair.pair.size
            is_small = size <= max_size or first.device.type != "cpu"
            keys.append(_batch_key(ready_pair, is_small))
            sizes.append(size)
        batches = group_equal(keys, sizes, max_size)
        lengths = [len(batch) for batch in batches]

        # Compute the sums of equal layers together. A record has the numbers that
        # belong to the sums of one pair: `FactorShape.record_parts` lists them.
        records_shape = (len(ready), sum(first.shape.record_parts))
        records = torch.empty(records_shape, dtype=first.dtype, device=first.device)
        records_by_batch = records.split_with_sizes(lengths)
        scale = self.gradient_scale(records)
        in_order: list[ReadyPair] = []
        sums: list[dict[str, Tensor]] = []  # by batch, stacked by factor
        for batch, batch_records in zip(batches, records_by_batch, strict=True):
            members = [ready[i] for i in batch]
            in_order += members
            sums.append(self._sum_batch(keys[batch[0]], members, batch_records, scale))

        # Non-finite sums and sums close to overflow are dropped: they count as zeros.
        # If a sum of outer products has a non-finite element, its mean eigenvalue is
        # not finite either. On a CPU, reading `is_safe` costs less than a pass over the
        # sums. Devices are not read.
        is_safe = is_far_from_overflow(records.sum(1))
        if is_safe.device.type != "cpu" or not is_safe.all():
            dropped = ~is_safe
            records.masked_fill_(dropped.unsqueeze(1), 0.0)
            count_dropped([member.pair.staged for member in in_order], dropped)
            for stacks, mask in zip(sums, dropped.split(lengths), strict=True):
                for stack in stacks.values():
                    stack.masked_fill_(mask.view(-1, *[1] * (stack.dim() - 1)), 0.0)

        # Add the sums of each pair, which are slices of the stacks.
        factors: list[dict[str, Tensor]] = []
        for stacks in sums:
            by_pair = zip(*map(torch.unbind, stacks.values()), strict=True)
            factors += [dict(zip(stacks, parts, strict=True)) for parts in by_pair]
        added: list[PairSums] = []
        rows = records.unbind()
        for (pair, _), own, record in zip(in_order, factors, rows, strict=True):
            pass_id = pair.backward_pass.number
            added.append(PairSums(pair.staged, pass_id, PassSums(own, record)))
        add_pairs(added)

    def _sum_batch(
        self,
        key: _BatchKey,
        ready: Sequence[ReadyPair],
        records: Tensor,
        scale: Tensor | float,
    ) -> dict[str, Tensor]:
        """Compute the sums of pairs with one key. ``scale`` multiplies their gradients.

        This also fills in ``records``, which has a row for each pair.

        Returns the stacked sums by factor, as they are stored.
        """
        shape = key.shape
        count, *means = records.split_with_sizes(shape.record_parts, 1)

        # Sums of outer products, and the number of examples of each pair.
        if key.linear_key is not None:
            factors, num_examples = self._multiply_linears(ready)
        else:
            with ieee_matmul(records.device):
                formed = [self._form_statistics(pair, mask) for pair, mask in ready]
            factors = {}
            for name in formed[0].factors:
                factors[name] = as_stack([single.factors[name] for single in formed])
            counts = [single.num_examples for single in formed]
            num_examples = merge_numbers(counts, records)
            if shape.routed:
                # The last part has the numbers of the groups' examples, not means.
                counts_by_group = means.pop()
                by_pair = [cast(Tensor, single.examples_per_group) for single in formed]
                counts_by_group.copy_(torch.stack(by_pair))
        if isinstance(num_examples, Tensor):
            count.copy_(num_examples.view(-1, 1))
        else:
            count.fill_(num_examples)

        # Undo the scale of the gradients. A of gradient-factored layers has it as well.
        if isinstance(scale, Tensor) or scale != 1:
            factors["G"].mul_(scale**2)
            if shape.gradient_factored:
                factors["A"].mul_(scale**2)

        # Mean eigenvalues, which are the means of the diagonals, and triangles.
        for (name, factor), mean in zip(factors.items(), means, strict=True):
            is_matrix = name not in shape.diagonals
            diagonal = factor.diagonal(dim1=-2, dim2=-1) if is_matrix else factor
            torch.mean(diagonal, -1, out=mean)
            if is_matrix:
                factors[name] = pack_upper_triangular(factor)
        return factors

    def _form_statistics(self, pair: Pair, row_mask: RowMask) -> PairStatistics:
        """Form the statistics of one pair, from the rows that take part."""
        approximation = self.approximation
        is_convolution = isinstance(pair.module, CONVOLUTIONS)
        if is_convolution and self.conv_approximation is not None:
            approximation = self.conv_approximation
        dtype = pair.staged.dtype
        x = pair.x
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(dtype)
        options = PairOptions(pair.block.trains_bias, approximation, row_mask=row_mask)
        return pair.block.statistics(pair.module, x, pair.d.to(dtype), options)

    def _multiply_linears(
        self, ready: Sequence[ReadyPair]
    ) -> tuple[dict[str, Tensor], float | Tensor]:
        """Compute A and G of the equal pairs of n Linears, with batched products.

        They equal the statistics of
        :class:`~second_order.kronecker.layers.Linear` for each pair.

        Returns:
            A and G, ``(n, 1, size, size)`` each, and the number of examples of a pair,
            which all pairs share.
        """
        first, row_mask = ready[0]
        dtype = first.staged.dtype
        is_reduced = self.approximation == "reduce" and first.x.dim() > 2
        x = as_stack([pair.x for pair, _ in ready]).to(dtype)
        d = as_stack([pair.d for pair, _ in ready]).to(dtype)

        # With "reduce", a row is an example's mean input and the sum of its gradients.
        if is_reduced:
            num_examples = len(first.d)
            num_positions = first.d.shape[1:-1].numel()
            leading = (len(ready) * num_examples, num_positions)
            repeated_mask = row_mask
            if row_mask.mask is not None:
                mask = row_mask.mask.repeat(len(ready))
                repeated_mask = RowMask(mask, count=0)  # the count is not read
            x = x.reshape(*leading, x.shape[-1])
            d = d.reshape(*leading, d.shape[-1])
            x, d = reduce_positions(x, d, repeated_mask)
            row_mask = row_mask.to_examples(num_examples)
            num_rows = num_examples
        else:
            num_rows = first.d.shape[:-1].numel()
        x = x.reshape(len(ready), num_rows, x.shape[-1])
        d = d.reshape(len(ready), num_rows, d.shape[-1])

        # Rows that do not take part are zero in A. In G they are zero already.
        if first.block.trains_bias:
            x = torch.constant_pad_nd(x, (0, 1), 1.0)
        if row_mask.mask is not None:
            x = x * row_mask.mask.to(x.device).unsqueeze(-1)

        # TF32 is exact for captured 16-bit numbers, but not for the means and sums of
        # "reduce".
        has_16_bits = first.x.dtype.itemsize == first.d.dtype.itemsize == 2
        is_narrow = has_16_bits and not is_reduced
        with ieee_matmul(x.device, dtype, narrow=is_narrow):
            a = torch.bmm(x.mT, x)  # `@` would add views
            g = torch.bmm(d.mT, d)
        return {"A": a.unsqueeze(1), "G": g.unsqueeze(1)}, row_mask.count


class _BatchKey(NamedTuple):
    """A key that is equal for pairs whose sums are computed together."""

    shape: FactorShape
    mask_id: int  # of the mask of the rows that take part
    linear_key: Hashable  # not None if the pairs are multiplied in one batch


def _batch_key(ready: ReadyPair, is_small: bool) -> _BatchKey:
    """Return the key of a pair.

    Equal pairs of Linears are multiplied in one batch if they are small. For a large
    pair, a CPU is faster if it computes only the upper triangles, in strips. On a GPU,
    all pairs count as small.
    """
    pair = ready.pair
    linear_key: Hashable = None
    kind = pair.block.kinds.get(pair.module)
    multiplies_rows = kind is not None and kind.multiplies_rows
    if type(pair.block) is KroneckerBlock and multiplies_rows and is_small:
        dtypes = (pair.x.dtype, pair.d.dtype)
        linear_key = (pair.x.shape, pair.d.shape, dtypes, pair.block.trains_bias)
    return _BatchKey(pair.staged.shape, id(ready.row_mask.mask), linear_key)


# ----------------------------------------------------------------- which rows take part


def find_rows_with_gradient(pairs: Sequence[Pair], pass_is_over: bool) -> None:
    """Record in the pairs' groups which rows have a gradient, where this may matter."""
    groups: list[RowGroup] = []
    gradients: list[Tensor] = []
    for pair in pairs:
        if pair.unrecorded_gradient is None or pair.group.all_take_part:
            continue
        if not pass_is_over or pair.backward_pass.may_leave_out_rows(pair.group):
            groups.append(pair.group)
            gradients.append(pair.unrecorded_gradient)

    # The gradients of layers that see the same rows are compared with 0 in one stack.
    if groups:
        keys: list[Hashable] = []
        for group, d in zip(groups, gradients, strict=True):
            keys.append((id(group), d.shape, d.dtype, d.device))
        sizes = [d.numel() for d in gradients]
        max_size = max_stacked_elements(gradients[0].device)
        for members in group_equal(keys, sizes, max_size):
            by_layer = as_stack([gradients[i] for i in members]).any(-1)
            has_gradient = by_layer[0] if len(members) == 1 else by_layer.any(0)
            groups[members[0]].add(RowMask(has_gradient, 0))  # the count is not read
    if not pass_is_over:
        distinct_groups = {id(pair.group): pair.group for pair in pairs}
        _mark_complete_groups(distinct_groups.values())


def _mark_complete_groups(groups: Iterable[RowGroup]) -> None:
    """Mark, after one device read, the groups whose rows all have a gradient by now."""
    candidates: list[RowGroup] = []
    masks: list[Tensor] = []
    for group in groups:
        if group.has_gradient is not None:
            candidates.append(group)
            masks.append(group.has_gradient)
    if not candidates:
        return
    device = masks[0].device
    flags = torch.stack([mask.all().to(device) for mask in masks])
    for group, is_complete in zip(candidates, flags.tolist(), strict=True):
        if is_complete:
            group.add(full_row_mask(group.num_rows))


def select_rows(row_mask: RowMask, index: Tensor) -> RowMask:
    """Return the mask of the rows in ``index`` from a group's mask."""
    if row_mask.mask is None:
        return full_row_mask(len(index))
    return to_row_mask(row_mask.mask[index])


def split_pair(pair: Pair) -> tuple[ReadyPair, list[Pair]]:
    """Split a pair into its rows with a gradient so far, and a pair of the others."""
    group = pair.group
    row_mask = pair.backward_pass.rows_with_gradient(group)
    ready = ReadyPair(pair, row_mask)
    if row_mask.mask is None or group.are_selected:
        return ready, []
    index = (~row_mask.mask).nonzero().squeeze(1)
    num_leading = len(group.shape)  # dimensions
    x = pair.x.reshape(group.num_rows, *pair.x.shape[num_leading:])[index]
    # So far, the gradient of these rows is zero at all layers, including this one.
    d = pair.d.new_zeros(()).expand(len(index), *pair.d.shape[num_leading:])
    return ready, [replace(pair, x=x, d=d, index=index, unrecorded_gradient=None)]

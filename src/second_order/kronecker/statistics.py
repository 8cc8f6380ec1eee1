"""From captured pairs to the staged statistics of a step.

For each pair of a backward pass:

1. Drop statistics whose gradients the user has dropped, and compare the pair with the gradient.
2. Note its rows among those of the whole pass.
3. Keep it.

At the end of the pass, or when many bytes are kept:

4. Decide which rows take part. If the pass is still running, a row without a gradient so far may
   get one at another layer. Such rows are kept until the end.
5. Form the sums of the pairs. A device spends more time on launches than on a small layer's
   products, so equal Linears are multiplied together.
6. Add the sums to the staged statistics of their layers, of all layers at once.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import FSDPParams
from second_order.kronecker import autograd
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.experts import Routed
from second_order.kronecker.factors import (
    Reduction,
    StagedStatistics,
    add_pairs,
    close_pass,
    count_dropped,
)
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    Approximation,
    Form,
    LiveRows,
    PairStatistics,
    all_rows,
    reduced,
    rows_in,
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

SEVERAL_LOSSES = (
    "several backward passes of a step come through one forward pass: curvature is that of each "
    "loss alone, without what the losses have in common; add the losses up, and call backward() "
    "on their sum"
)


CHANGED_IN_PLACE = (
    "an operation of the backward pass changes the input of layer {!r}, or the gradient of its "
    "output, in place: its statistics lack this pass; let the operation work on a copy, or name "
    "the layer in skip_layers"
)


def kept_bytes(device: torch.device) -> int:
    """Bytes up to which pairs are kept. Larger pairs are enough work for a device one by one."""
    return 2**22 if device.type == "cpu" else 2**26


@dataclass(frozen=True)
class GradientScale:
    """The factor for captured gradients that undoes a GradScaler."""

    scaler: Any

    def __call__(self, gradient: Tensor) -> Tensor | float:
        """The factor, as a number or as a scalar on the gradient's device."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        # scale(1) is the scale as a tensor: get_scale() would wait for the device.
        one = torch.ones((), dtype=torch.float32, device=gradient.device)
        scale: Tensor = self.scaler.scale(one)
        return 1.0 / scale


@dataclass(frozen=True, eq=False)
class Pair:
    """A captured pair of a layer that is kept.

    Attributes:
        pass_rows: The rows of its backward pass.
        group: Its own among them.
        gradient: ``(rows, out)``, which tells what rows have a gradient; None once that is known.
        index: The rows of the group that it has; None for all.
        cleared_at: The value of the layer's ``staged.cleared_at`` when the pair came.
        versions: Those of its tensors when it came.
    """

    block: KroneckerBlock
    module: nn.Module
    x: Any
    d: Tensor
    pass_rows: BackwardPass
    group: RowGroup
    gradient: Tensor | None
    cleared_at: int
    versions: tuple[int, ...]
    index: Tensor | None = None

    @property
    def staged(self) -> StagedStatistics:
        """The statistics that it belongs to."""
        return self.block.staged

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is kept."""
        return _tensors(self.x, self.d)

    @property
    def size(self) -> int:
        """Elements of the pair and of its sums."""
        sums = sum(n**2 for n in self.staged.shape.dims.values())
        return sum(tensor.numel() for tensor in self.tensors) + sums

    @property
    def nbytes(self) -> int:
        """Bytes of the pair and of its sums. A slice keeps the memory of the whole tensor."""
        held = sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)
        return max(4 * self.size, held)


class ReadyPair(NamedTuple):
    """A pair of which it is decided which rows take part."""

    pair: Pair
    live: LiveRows


@dataclass
class StatisticsCollector:
    """Turns captured pairs into staged statistics.

    Attributes:
        approximation: Of dimensions that share a weight.
        factor_dtype: In which statistics are formed, or float32 if that is wider.
        reduction: What the loss of a pass is.
        gradient_scale: A further factor of captured gradients.
        conv_approximation: For convolutions; None for the same.
        on_new_statistics: Called when statistics of layers have grown. If it is set, the host reads
            from the device during the pass which rows count.
        sampled: The pairs are of drawn labels, and say nothing of the gradient.
        labels_per_row: A label is drawn for each row of the layer called last.
        step_passes: The passes since the last step.
    """

    approximation: Approximation
    factor_dtype: torch.dtype
    reduction: Callable[[], Reduction]
    gradient_scale: Callable[[Tensor], Tensor | float]
    conv_approximation: Approximation | None = None
    warn: Callable[[str], None] = warnings.warn
    fsdp: FSDPParams | None = None
    on_new_statistics: Callable[[], None] | None = None
    always_verify: bool = False  # compares the pairs of all steps with the gradient
    sampled: bool = False
    labels_per_row: bool = False
    step_passes: StepPasses = field(default_factory=StepPasses)
    _blocks: dict[nn.Module, list[KroneckerBlock]] = field(default_factory=dict)
    _rows_only: KroneckerBlock | None = None  # whose rows are seen, and no statistics taken
    _places: dict[KroneckerBlock, int] = field(default_factory=dict)  # in the model
    _told: bool = False  # of losses that go back apart
    _pairs: list[Pair] = field(default_factory=list)
    _bytes: int = 0
    # Autograd has a thread for each device.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def set_blocks(
        self, blocks: Iterable[KroneckerBlock], rows_only: KroneckerBlock | None = None
    ) -> None:
        """Set the blocks that get the pairs of their modules from now on.

        ``rows_only`` is one of them whose statistics another process takes.
        """
        self._rows_only = rows_only
        self._blocks.clear()
        self._places.clear()
        for place, block in enumerate(blocks):
            self._places[block] = place
            for module in block.hooked_modules:
                self._blocks.setdefault(module, []).append(block)

    def _training(self, module: nn.Module) -> list[KroneckerBlock]:
        return [block for block in self._blocks.get(module, ()) if block.trainable]

    def wants(self, module: nn.Module) -> bool:
        """Whether any block of a module trains now."""
        return bool(self._training(module))

    def verify(self, module: nn.Module, x: Tensor, d: Tensor) -> None:
        """Compare a pair of the user's own loss with the gradient, if that is due."""
        for block in self._training(module):
            if (self.always_verify or block.needs_verification) and block.fits_pair(module, x, d):
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
        """Add one pair to the statistics of its blocks.

        ``pass_id`` is one number for all pairs of a backward pass. ``again``: a backward pass has
        come through this call of the layer before.
        """
        blocks = self._training(module)

        # Statistics go where gradients have been set to zero.
        # With drawn labels one backward pass brings pairs of several calls of the model.
        backward = autograd.current_pass() if self.sampled else pass_id
        unreduced = self.fsdp is not None and self.fsdp.has_unreduced_gradients(module)
        for block in blocks:
            block.begin_pass(backward, pass_id, unreduced)

        # Whether the pair can be the layer's.
        if not self.sampled:
            self.verify(module, x, d)
        fitting = []
        for block in blocks:
            if block.fits_pair(module, x, d):
                fitting.append(block)
            else:
                block.record_residual(1.0)
        if not fitting:
            return

        # The rows of the pair, among those of the whole pass.
        current = self._pass_of(pass_id)
        repeats = again and any(block.staged.has_other_pass(pass_id) for block in fitting)
        if repeats and current.repeat() and not self._told:
            self._told = True
            self.warn(SEVERAL_LOSSES)
        rows = fitting[0].rows_of(module, x, d)
        group = current.group_of(rows)
        reads = d.device.type == "cpu" or self.on_new_statistics is not None
        current.see(rows, group, module, drawn=self.labels_per_row, reads=reads)

        # Keep it.
        for block in fitting:
            if block.unverified:
                continue
            current.layers[id(block.staged)] = block.staged
            inputs = 1 if block.shape.diagonal_a else block.shape.in_dim
            block.staged.record_pair(current.number, again=again, work=6 * d.numel() * inputs)
            if block is self._rows_only:
                continue
            block.record_capture(block.staged.work)
            pair = Pair(
                block=block,
                module=module,
                x=x,
                d=d,
                pass_rows=current,
                group=group,
                gradient=None if reads else rows.gradient,
                cleared_at=block.staged.cleared_at,
                versions=_versions(x, d),
            )
            with self._lock:
                self._pairs.append(pair)
                self._bytes += pair.nbytes
        # Experts' products need their weights, which FSDP2 will shard again.
        if self._bytes > kept_bytes(d.device) or isinstance(x, Routed):
            self.sum_pairs(ended=False)
        if self.on_new_statistics is not None and current.decided:
            self.on_new_statistics()

    # ------------------------------------------------------------------- passes begin and end

    def _pass_of(self, pass_id: int) -> BackwardPass:
        """The pass of a number, which is settled as it ends."""
        passes = self.step_passes.passes
        found = passes.get(pass_id)
        if found is None:
            found = passes[pass_id] = BackwardPass(pass_id, self.approximation == "reduce")
        # Within a reentrant checkpoint another pass runs.
        runs = self.sampled or autograd.current_pass() == pass_id
        if runs and found.will_end():
            autograd.call_after_pass(partial(self._end, found))
        return found

    def _end(self, ended: BackwardPass) -> None:
        """Settle a pass as autograd ends it: all its layers have been seen."""
        self._finish(ended)
        if self.on_new_statistics is not None:
            self.on_new_statistics()

    def _finish(self, ended: BackwardPass) -> None:
        with torch.no_grad(), stage("statistics"):
            self.sum_pairs()
            terms = ended.terms()
            mean = self.reduction() == "mean"
            close_pass(ended.layers.values(), ended.number, terms if mean else None)
        ended.end()

    def finish_passes(self) -> None:
        """Add the pairs of passes that are still running or that nothing has ended."""
        for each in [*self.step_passes.passes.values()]:
            if each.unsettled:
                self._finish(each)

    def terms(self, layers: Iterable[StagedStatistics]) -> list[Terms]:
        """N of the passes since the last step, by layer."""
        self.finish_passes()
        return self.step_passes.terms(layers)

    # ------------------------------------------------------------------------ from pairs to sums

    def sum_pairs(self, ended: bool = True) -> None:
        """Add the pairs to the statistics of their layers; have their passes ``ended``?

        If not, rows that have had no gradient so far may have one yet, and are kept.
        """
        with self._lock, torch.no_grad():
            pairs, self._pairs, self._bytes = self._pairs, [], 0
            # Those of a layer whose statistics have been cleared meanwhile are dropped.
            pairs = [pair for pair in pairs if pair.cleared_at == pair.staged.cleared_at]
            pairs = self._unchanged(pairs)
            look_at_rows(pairs, ended)
            known: dict[int, LiveRows] = {}  # by group
            ready: list[ReadyPair] = []
            for pair in pairs:
                group = pair.group
                if ended or group.certain:
                    if id(group) not in known:
                        known[id(group)] = pair.pass_rows.live(group)
                    live = part_of(known[id(group)], pair.index)
                    ready.append(ReadyPair(pair, live))
                elif not self._can_split(pair):
                    self._pairs.append(replace(pair, gradient=None))
                else:
                    whole, rest = split(pair)
                    ready.append(whole)
                    self._pairs += rest
            self._add(ready)

    def _unchanged(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs that the backward pass has not changed in place while they were kept."""
        unchanged: list[Pair] = []
        for pair in pairs:
            if pair.versions == _versions(pair.x, pair.d):
                unchanged.append(pair)
            else:
                self.warn(CHANGED_IN_PLACE.format(pair.block.name))
        return unchanged

    def _can_split(self, pair: Pair) -> bool:
        """Whether some rows of a pair are a pair of the layer."""
        if pair.group.selected:  # the rows without a gradient do not take part
            return True
        kind = pair.block.kinds.get(pair.module)
        rows = pair.group.shape
        if pair.index is not None or kind is None or not kind.multiplies_rows:
            return False
        if self.approximation == "reduce" and len(rows) > 1:
            return False
        return bool(pair.x.shape[: len(rows)] == pair.d.shape[: len(rows)] == rows)

    def _add(self, ready: Sequence[ReadyPair]) -> None:
        """Add pairs to the statistics of their layers, in the order of the model."""
        turns: Counter[int] = Counter()  # pairs of one layer come one after the other
        ordered: list[tuple[int, int, ReadyPair]] = []
        for each in ready:
            staged = each.pair.staged
            turns[id(staged)] += 1
            ordered.append((turns[id(staged)], self._places.get(each.pair.block, 0), each))
        ordered.sort(key=lambda entry: entry[:2])
        keys = []
        for turn, _, each in ordered:
            staged = each.pair.staged
            keys.append((staged.device, turn, _columns(staged)))
        for group in group_equal(keys):
            device = keys[group[0]][0]
            plain = torch.autocast(device.type, enabled=False)
            with plain, ieee_matmul(device):
                self._add_together([ordered[i][2] for i in group])

    def _add_together(self, ready: Sequence[ReadyPair]) -> None:
        """Add pairs of different layers, with records of one length, to their statistics."""
        first = ready[0].pair.staged
        sizes = [each.pair.size for each in ready]
        most = max_stacked_elements(first.device)
        groups = group_equal([self._key(each) for each in ready], sizes, most)
        ready = [ready[i] for group in groups for i in group]

        # The sums of equal layers by the same operations.
        size = (len(ready), _columns(first))
        records = torch.empty(size, dtype=first.dtype, device=first.device)
        sums: list[dict[str, Tensor]] = []
        start = 0
        for group in groups:
            end = start + len(group)
            sums.append(self._sums(ready[start:end], records[start:end]))
            start = end

        # Those that are not finite count nothing.
        bad = records.sum(1) * 0.0 != 0.0
        records.masked_fill_(bad.unsqueeze(1), 0.0)
        count_dropped([each.pair.staged for each in ready], bad)
        start = 0
        news = []
        for group, stacks in zip(groups, sums, strict=True):
            dropped = bad[start : start + len(group)]
            # Reading a CPU costs less than a pass over the sums. A device is not read.
            if dropped.device.type != "cpu" or dropped.any():
                for stack in stacks.values():
                    stack.masked_fill_(dropped.view(-1, *[1] * (stack.dim() - 1)), 0.0)
            parts = {letter: stack.unbind() for letter, stack in stacks.items()}
            for i in range(len(group)):
                pair = ready[start + i].pair
                factors = {letter: part[i] for letter, part in parts.items()}
                news.append((pair.staged, pair.pass_rows.number, factors, records[start + i]))
            start += len(group)
        add_pairs(news)

    def _key(self, ready: ReadyPair) -> Hashable:
        """What pairs have in common that are added up together."""
        pair = ready.pair
        together: Hashable = None
        if self._is_product(pair):
            ends = (pair.x.shape[-1], pair.d.shape[-1], pair.x.dtype, pair.d.dtype)
            together = (self._sizes(pair), *ends, pair.block.trains_bias)
        return together, pair.staged.shape, id(ready.live.mask)

    def _is_product(self, pair: Pair) -> bool:
        """Whether the pair of a Linear is multiplied together with others.

        A CPU multiplies a large pair faster by strips of a triangle.
        """
        kind = pair.block.kinds.get(pair.module)
        if type(pair.block) is not KroneckerBlock or kind is None:
            return False
        small = pair.d.device.type != "cpu" or pair.size <= max_stacked_elements(pair.d.device)
        return small and kind.multiplies_rows

    def _sizes(self, pair: Pair) -> tuple[int, ...]:
        """Number of rows; or of examples, and of the positions of each that are to be reduced."""
        if self.approximation == "reduce" and pair.x.dim() > 2:
            return len(pair.d), pair.d.shape[1:-1].numel()
        return (pair.d.shape[:-1].numel(),)

    def _sums(self, ready: Sequence[ReadyPair], records: Tensor) -> dict[str, Tensor]:
        """The sums of pairs that are alike, new and as they are stored; fills in records."""
        pairs = [each.pair for each in ready]
        live = ready[0].live
        shape = pairs[0].staged.shape
        if self._is_product(pairs[0]):
            factors, examples = self._products(pairs, live)
            records[:, 0] = examples
        else:
            formed = [self._statistics(*each) for each in ready]
            factors = {}
            for letter in formed[0].factors:
                factors[letter] = as_stack([each.factors[letter] for each in formed])
            records[:, 0] = merge_numbers([each.examples for each in formed], records)
            routed = [each.routed for each in formed if each.routed is not None]
            if routed:
                records[:, -shape.groups :] = torch.stack(routed)
        scale = self.gradient_scale(factors["G"])
        if isinstance(scale, Tensor) or scale != 1:
            factors["G"].mul_(scale**2)
            if shape.marginal:  # both are of gradients
                factors["A"].mul_(scale**2)
        column = 1
        for letter, factor in factors.items():
            full = letter not in shape.diagonals
            diagonal = factor.diagonal(dim1=-2, dim2=-1) if full else factor
            torch.mean(diagonal, -1, out=records[:, column : column + shape.groups])
            column += shape.groups
            if full:
                factors[letter] = pack_upper_triangular(factor)
        return factors

    def _statistics(self, pair: Pair, live: LiveRows) -> PairStatistics:
        """The sums of a pair, of the rows that take part."""
        approximation = self.approximation
        if self.conv_approximation is not None and isinstance(pair.module, CONVOLUTIONS):
            approximation = self.conv_approximation
        wide = pair.staged.dtype
        x = pair.x
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(wide)
        form = Form(pair.block.trains_bias, approximation, rows=live)
        return pair.block.statistics(pair.module, x, pair.d.to(wide), form)

    def _products(
        self, pairs: Sequence[Pair], live: LiveRows
    ) -> tuple[dict[str, Tensor], int | Tensor]:
        """A and G, ``(n, 1, size, size)``, of n Linears' equal pairs, and their number of examples.

        As :func:`~second_order.kronecker.layers.linear_statistics` makes them of each.
        """
        first = pairs[0]
        wide = first.staged.dtype
        sizes = self._sizes(first)
        narrow_x = first.x.dtype.itemsize == 2 and len(sizes) == 1
        narrow_d = first.d.dtype.itemsize == 2 and len(sizes) == 1
        x = as_stack([pair.x.reshape(*sizes, pair.x.shape[-1]) for pair in pairs]).to(wide)
        d = as_stack([pair.d.reshape(*sizes, pair.d.shape[-1]) for pair in pairs]).to(wide)
        if len(sizes) > 1:
            mask = live.mask
            each = live if mask is None else LiveRows(mask.repeat(len(pairs)), 0)
            x, d = reduced(x.flatten(0, 1), d.flatten(0, 1), each)
            x = x.unflatten(0, (len(pairs), -1))
            d = d.unflatten(0, (len(pairs), -1))
            live = live.parts(sizes[0])
        if first.block.trains_bias:
            x = nn.functional.pad(x, (0, 1), value=1.0)
        if live.mask is not None:
            x = x * live.mask.to(x.device).unsqueeze(-1)
        with ieee_matmul(x.device, wide, narrow=narrow_x):
            a = x.mT @ x
        with ieee_matmul(d.device, wide, narrow=narrow_d):
            g = d.mT @ d
        return {"A": a.unsqueeze(1), "G": g.unsqueeze(1)}, live.count


# ------------------------------------------------------------------------ which rows take part


def look_at_rows(pairs: Sequence[Pair], ended: bool) -> None:
    """Find the rows with a gradient, if it is not known that all of them take part."""
    groups: list[RowGroup] = []
    gradients: list[Tensor] = []
    for pair in pairs:
        if pair.gradient is None or pair.group.certain:
            continue
        if not ended or pair.pass_rows.masked(pair.group):
            groups.append(pair.group)
            gradients.append(pair.gradient)
    if groups:
        equal = zip(groups, gradients, strict=True)
        keys = [(id(group), d.shape, d.dtype, d.device) for group, d in equal]
        sizes = [d.numel() for d in gradients]
        for together in group_equal(keys, sizes, max_stacked_elements(gradients[0].device)):
            mask = as_stack([gradients[i] for i in together]).any(-1)
            alive = mask[0] if len(together) == 1 else mask.any(0)
            groups[together[0]].add(LiveRows(alive, 0))
    if not ended:
        _read_rows({id(pair.group): pair.group for pair in pairs}.values())


def _read_rows(groups: Iterable[RowGroup]) -> None:
    """Read which groups' rows have all had a gradient; a device is read once."""
    unknown = [(group, group.alive) for group in groups if group.alive is not None]
    if unknown:
        device = unknown[0][1].device
        flags = torch.stack([alive.all().to(device) for _, alive in unknown])
        for (group, _), everything in zip(unknown, flags.tolist(), strict=True):
            if everything:
                group.add(all_rows(group.number))


def part_of(live: LiveRows, index: Tensor | None) -> LiveRows:
    """Those among the rows of an index; None for all."""
    if index is None:
        return live
    return all_rows(len(index)) if live.mask is None else rows_in(live.mask[index])


def split(pair: Pair) -> tuple[ReadyPair, list[Pair]]:
    """The rows of a pair with a gradient so far, and the others, which are kept."""
    group = pair.group
    live = pair.pass_rows.alive(group)
    ready = ReadyPair(pair, live)
    if live.mask is None or group.selected:
        return ready, []
    index = (~live.mask).nonzero().squeeze(1)
    leading = len(group.shape)
    x = pair.x.reshape(group.number, *pair.x.shape[leading:])[index]
    d = pair.d.new_zeros(()).expand(len(index), *pair.d.shape[leading:])
    rest = replace(pair, x=x, d=d, index=index, gradient=None, versions=_versions(x, d))
    return ready, [rest]


def _columns(staged: StagedStatistics) -> int:
    """Numbers in a record."""
    return 1 + staged.shape.numbers * staged.shape.groups


def _tensors(x: Any, d: Tensor) -> tuple[Tensor, ...]:
    if isinstance(x, Routed):
        return x.hidden, x.index, x.weights, d
    return x, d


def _versions(x: Any, d: Tensor) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _tensors(x, d))

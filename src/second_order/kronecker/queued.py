"""Pairs on a device, kept until their pass ends and then added up together.

A device has next to nothing to do for a small layer but to be told of it. So the sums of all layers
with pairs of equal shape are made by the same few operations, however many there are: those of
Linears from their rows, of others from each pair's own sums. Pairs are kept up to a number of
bytes: large ones give a device work enough one by one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.factors import StagedStatistics, count_dropped, put
from second_order.kronecker.layers import (
    Approximation,
    LiveRows,
    PairStatistics,
    all_rows,
    reduced,
    rows_in,
)
from second_order.kronecker.rows import BackwardPass, RowGroup
from second_order.kronecker.solvers import ieee_matmul
from second_order.kronecker.storage import as_stack, in_groups, most_elements, pack_upper_triangular

__all__ = ["LinearPair", "PairQueue", "QueuedPair", "SeenRows"]

QUEUED_BYTES = 2**26
"""Bytes up to which pairs are kept."""


@dataclass(frozen=True)
class LinearPair:
    """A pair of a Linear, ``(..., in)`` and ``(..., out)``, whose sums are to be made."""

    x: Tensor
    d: Tensor
    bias: bool  # the homogeneous coordinate belongs to A
    approximation: Approximation

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows; or of examples, and of the positions of each that are to be reduced."""
        if self.approximation == "reduce" and self.x.dim() > 2:
            return len(self.d), self.d.shape[1:-1].numel()
        return (self.d.shape[:-1].numel(),)

    @property
    def key(self) -> Hashable:
        """What pairs have in common that are multiplied together."""
        ends = self.x.shape[-1], self.d.shape[-1], self.x.dtype, self.d.dtype
        return (*self.sizes, *ends, self.bias, self.approximation)


class SeenRows(NamedTuple):
    """The rows of a pair, and their gradients, ``(rows, out)``."""

    of: BackwardPass
    group: RowGroup
    gradient: Tensor


@dataclass(eq=False)
class QueuedPair:
    """A pair, which its layer expects.

    Attributes:
        what: A Linear's pair; the sums of another layer's; or what makes these, of the rows that
            take part.
        tensors: What is kept.
        rows: None if all of them count.
        partly: Adds the pair while its pass goes on, and leaves some rows to the end.
        place: Of the layer in the model.
    """

    what: LinearPair | PairStatistics | Callable[[LiveRows], PairStatistics]
    tensors: Sequence[Tensor]
    staged: StagedStatistics
    pass_id: int
    scale: Callable[[Tensor], Tensor | float]  # of gradients
    place: int
    rows: SeenRows | None = None
    partly: Callable[[LiveRows], None] | None = None
    _cleared: int = field(init=False)
    _versions: list[int] = field(init=False)  # of the tensors

    def __post_init__(self) -> None:
        self._cleared = self.staged.since
        self._versions = [tensor._version for tensor in self.tensors]

    @property
    def wanted(self) -> bool:
        """Whether the layer still expects the pair as it was; a changed one is noted as dropped."""
        if self._cleared != self.staged.since:
            return False
        if [tensor._version for tensor in self.tensors] != self._versions:
            # In the very pass that brought it: this layer's are not to be kept again.
            self.staged.drop_changed()
            return False
        return True

    @property
    def size(self) -> int:
        """Elements of the pair and of its sums."""
        to_make = self.staged.shape.dims.values() if isinstance(self.what, LinearPair) else ()
        return sum(map(Tensor.numel, self.tensors)) + sum(n**2 for n in to_make)


class PairQueue:
    """Pairs of one pass, or of the beginning of one."""

    def __init__(self) -> None:
        self._pairs: list[QueuedPair] = []
        self._bytes = 0
        self._lock = threading.RLock()  # autograd has a thread for each device

    def add(self, pair: QueuedPair, keep: bool = True) -> None:
        """Keep a pair until the running pass ends, or many have come."""
        with self._lock:
            self._pairs.append(pair)
            # A slice keeps the memory of what it is of.
            held = sum(tensor.untyped_storage().nbytes() for tensor in pair.tensors)
            self._bytes += max(4 * pair.size, held)
            if not keep or self._bytes > QUEUED_BYTES:
                self.flush(ended=False)

    def flush(self, ended: bool = True) -> None:
        """Bring all pairs to the statistics of their layers; have their passes ``ended``?

        If not, rows that have had no gradient so far may have one yet: the host reads whether there
        are any.
        """
        with self._lock:
            taken, self._pairs, self._bytes = self._pairs, [], 0
            with torch.no_grad():
                ready = _ready([pair for pair in taken if pair.wanted], ended)
            _bring_all(ready)


# ------------------------------------------------------------------------ which rows take part


class _Ready(NamedTuple):
    """A pair whose sums can be made."""

    pair: QueuedPair
    what: LinearPair | PairStatistics
    live: LiveRows | None  # the rows that take part; None for all

    @property
    def key(self) -> Hashable:
        """What pairs have in common that are added up together."""
        own = self.what.key if isinstance(self.what, LinearPair) else None
        mask = None if self.live is None else self.live.mask
        return own, self.pair.staged.shape, id(mask)


def _ready(pairs: Sequence[QueuedPair], ended: bool) -> list[_Ready]:
    """Look at which rows take part; returns the pairs whose sums can be made."""
    _look_at_rows(pairs, ended)
    if not ended:
        _read_rows(pairs)
    masks: dict[int, LiveRows] = {}
    ready: list[_Ready] = []
    for pair in pairs:
        what, live = pair.what, None
        if pair.rows is not None:
            group = pair.rows.group
            if not ended and not group.certain:
                assert pair.partly is not None
                pair.partly(pair.rows.of.alive(group))
                continue
            if id(group) not in masks:
                masks[id(group)] = pair.rows.of.live(group)
            live = masks[id(group)]
        if callable(what):
            what = what(all_rows(0) if live is None else live)
        ready.append(_Ready(pair, what, live))
    return ready


def _look_at_rows(pairs: Sequence[QueuedPair], ended: bool) -> None:
    """Find the rows with a gradient, where it is not known that all of them count."""
    todo: list[SeenRows] = []
    for pair in pairs:
        rows = pair.rows
        if rows is None or rows.group.certain or (ended and not rows.of.masked(rows.group)):
            continue
        todo.append(rows)
    if not todo:
        return
    keys = [(id(r.group), r.gradient.shape, r.gradient.dtype, r.gradient.device) for r in todo]
    sizes = [rows.gradient.numel() for rows in todo]
    for together in in_groups(keys, sizes, most_elements(todo[0].gradient.device)):
        mask = as_stack([todo[i].gradient for i in together]).any(-1)
        alive = mask[0] if len(together) == 1 else mask.any(0)
        todo[together[0]].group.add(LiveRows(alive, 0))


def _read_rows(pairs: Sequence[QueuedPair]) -> None:
    """Read which groups' rows have all had a gradient."""
    groups = {id(pair.rows.group): pair.rows.group for pair in pairs if pair.rows}
    unknown = {key: group.alive for key, group in groups.items() if group.alive is not None}
    if unknown:
        device = next(iter(unknown.values())).device
        flags = torch.stack([alive.all().to(device) for alive in unknown.values()])
        for key, everything in zip(unknown, flags.tolist(), strict=True):
            if everything:
                groups[key].add(all_rows(groups[key].number))


# ----------------------------------------------------------------------------- from pairs to sums


def _bring_all(ready: Iterable[_Ready]) -> None:
    """Bring pairs to their layers, the first of each layer before the second ones."""
    turns: Counter[int] = Counter()  # pairs of one layer come one after the other
    ordered: list[tuple[int, int, _Ready]] = []
    for each in ready:
        turns[id(each.pair.staged)] += 1
        ordered.append((turns[id(each.pair.staged)], each.pair.place, each))
    ordered.sort(key=lambda entry: entry[:2])
    keys = []
    for turn, _, each in ordered:
        staged = each.pair.staged
        keys.append((staged.device, turn, _columns(staged)))
    for group in in_groups(keys):
        device = keys[group[0]][0]
        plain = torch.autocast(device.type, enabled=False)
        with torch.no_grad(), plain, ieee_matmul(device):
            _bring([ordered[i][2] for i in group])


def _columns(staged: StagedStatistics) -> int:
    """Numbers in a record."""
    return 1 + staged.shape.numbers * staged.shape.groups


def _bring(ready: Sequence[_Ready]) -> None:
    """Bring pairs of different layers, with records of one length, to their statistics."""
    first = ready[0].pair.staged
    sizes = [each.pair.size for each in ready]
    groups = in_groups([each.key for each in ready], sizes, most_elements(first.device))
    ready = [ready[i] for group in groups for i in group]

    # The sums of equal layers by the same operations.
    size = (len(ready), _columns(first))
    records = torch.empty(size, dtype=first.dtype, device=first.device)
    found: list[dict[str, Tensor]] = []
    start = 0
    for group in groups:
        end = start + len(group)
        found.append(_sums(ready[start:end], records[start:end]))
        start = end

    # Those that are not finite count nothing.
    bad = records.sum(1) * 0.0 != 0.0
    records.masked_fill_(bad.unsqueeze(1), 0.0)
    count_dropped([each.pair.staged for each in ready], bad)
    start = 0
    news = []
    for group, stacks in zip(groups, found, strict=True):
        unsound = bad[start : start + len(group)]
        for stack in stacks.values():
            stack.masked_fill_(unsound.view(-1, *[1] * (stack.dim() - 1)), 0.0)
        parts = {letter: stack.unbind() for letter, stack in stacks.items()}
        for i in range(len(group)):
            pair = ready[start + i].pair
            factors = {letter: part[i] for letter, part in parts.items()}
            news.append((pair.staged, pair.pass_id, factors, records[start + i]))
        start += len(group)
    put(news)


def _sums(ready: Sequence[_Ready], records: Tensor) -> dict[str, Tensor]:
    """The sums of pairs that are alike, new and as they are stored; fills in records."""
    first = ready[0].pair
    shape = first.staged.shape
    if isinstance(ready[0].what, LinearPair):
        pairs = [cast(LinearPair, each.what) for each in ready]
        factors = _products(pairs, ready[0].live, records[:, 0], first.staged.dtype)
    else:
        formed = [cast(PairStatistics, each.what) for each in ready]
        factors = {}
        for letter in formed[0].factors:
            factors[letter] = torch.stack([each.factors[letter] for each in formed])
        numbers = [each.examples for each in formed]
        if any(isinstance(number, Tensor) for number in numbers) or len({*numbers}) > 1:
            here = records.device
            records[:, 0] = torch.stack([torch.as_tensor(n, device=here) for n in numbers])
        else:
            records[:, 0] = numbers[0]
        if shape.routed:
            counts = [cast(Tensor, each.routed) for each in formed]
            records[:, -shape.groups :] = torch.stack(counts)
    scale = first.scale(factors["G"])
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


def _products(
    pairs: Sequence[LinearPair], live: LiveRows | None, examples: Tensor, wide: torch.dtype
) -> dict[str, Tensor]:
    """A and G, ``(n, 1, size, size)``, of n Linears' pairs of equal shape; fills in examples.

    As :func:`~second_order.kronecker.layers.linear_statistics` makes them of each. ``live``: the
    rows that A is a sum over; None for all.
    """
    first = pairs[0]
    sizes = first.sizes
    narrow_x = first.x.dtype.itemsize == 2 and len(sizes) == 1
    narrow_d = first.d.dtype.itemsize == 2 and len(sizes) == 1
    x = as_stack([pair.x.reshape(*sizes, pair.x.shape[-1]) for pair in pairs]).to(wide)
    d = as_stack([pair.d.reshape(*sizes, pair.d.shape[-1]) for pair in pairs]).to(wide)
    mask = None if live is None else live.mask
    number: int | Tensor = sizes[0] if live is None or mask is None else live.count
    if len(sizes) > 1:
        each = all_rows(0) if mask is None else LiveRows(mask.repeat(len(pairs)), 0)
        x, d = reduced(x.flatten(0, 1), d.flatten(0, 1), each)
        x = x.unflatten(0, (len(pairs), -1))
        d = d.unflatten(0, (len(pairs), -1))
        if mask is not None:
            part = rows_in(mask).parts(sizes[0])
            mask, number = part.mask, part.count
    if isinstance(number, Tensor):
        examples.copy_(number)
    else:
        examples.fill_(number)
    x = nn.functional.pad(x, (0, 1), value=1.0) if first.bias else x
    if mask is not None:
        x = x * mask.to(x.device).unsqueeze(-1)
    with ieee_matmul(x.device, wide, narrow=narrow_x):
        a = x.mT @ x
    with ieee_matmul(d.device, wide, narrow=narrow_d):
        g = d.mT @ d
    return {"A": a.unsqueeze(1), "G": g.unsqueeze(1)}

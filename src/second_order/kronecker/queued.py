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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.factors import StagedStatistics, put
from second_order.kronecker.layers import (
    Approximation,
    LiveRows,
    PairStatistics,
    all_rows,
    reduced,
    rows_in,
)
from second_order.kronecker.rows import BackwardPass, RowGroup
from second_order.kronecker.stacks import as_stack, in_groups, most_elements, own_stack
from second_order.kronecker.triangles import pack_upper_triangular
from second_order.stages import span

__all__ = ["PairQueue", "QueuedPair", "Rows", "WaitingPair"]

QUEUED_BYTES = 2**26
"""Bytes up to which pairs are kept."""


@dataclass(frozen=True)
class Rows:
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


@dataclass(frozen=True)
class WaitingPair:
    """A pair of another layer, whose sums are to be made when it is known which rows take part."""

    held: Sequence[Tensor]  # what is kept
    gradient: Tensor
    form: Callable[[LiveRows], PairStatistics]


class SeenRows(NamedTuple):
    """The rows of a pair, and their gradients, ``(parts rows, out)``."""

    of: BackwardPass
    groups: Sequence[RowGroup]
    gradient: Tensor


@dataclass(eq=False)
class QueuedPair:
    """A pair, which its layer expects.

    ``rows`` are None where all of them count; ``partly`` adds the pair while its pass goes on, and
    leaves some rows to the end.
    """

    what: Rows | PairStatistics | WaitingPair
    staged: StagedStatistics
    pass_id: int
    scale: Callable[[Tensor], Tensor | float]  # of gradients
    place: int  # of the layer in the model
    rows: SeenRows | None = None
    partly: Callable[[LiveRows], None] | None = None
    live: LiveRows | None = field(default=None, init=False)  # the rows that take part
    _cleared: int = field(init=False)
    _versions: list[int] = field(init=False)  # of the tensors
    _stream: Any = field(init=False)  # on which the pair comes into being; None but for CUDA

    def __post_init__(self) -> None:
        self._cleared, self._stream = self.staged.cleared, _stream_of(self.staged.device)
        self._versions = [tensor._version for tensor in self.tensors]

    @property
    def wanted(self) -> bool:
        """Whether the layer still expects the pair as it was; a changed one is noted as dropped."""
        if self._cleared != self.staged.cleared:
            return False
        if [tensor._version for tensor in self.tensors] != self._versions:
            # In the very pass that brought it: this layer's are not to be kept again.
            self.staged.keeps = False
            self.staged.dropped += 1
            return False
        return True

    @property
    def key(self) -> Hashable:
        """What pairs have in common that are added up together."""
        own = self.what.key if isinstance(self.what, Rows) else None
        mask = None if self.live is None else self.live.mask
        return own, self.staged.shape, self.staged.triangular, id(mask)

    @property
    def size(self) -> int:
        """Elements of the pair and of its sums."""
        to_make = self.staged.shape.dims.values() if isinstance(self.what, Rows) else ()
        return sum(map(Tensor.numel, self.tensors)) + sum(n**2 for n in to_make)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What is kept."""
        what = self.what
        if isinstance(what, Rows):
            return what.x, what.d
        if isinstance(what, WaitingPair):
            return what.held
        return list(what.factors.values())

    def wait(self) -> None:
        """Let the running stream come after the pair's, and its memory stay until it has."""
        now = _stream_of(self.staged.device)
        if now != self._stream:
            now.wait_stream(self._stream)
            for tensor in self.tensors:
                tensor.record_stream(now)


def _stream_of(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class PairQueue:
    """Pairs of one pass, or of the beginning of one; ``timed`` measures what comes at its end."""

    def __init__(self, timed: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.timed = timed
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
            for pair in taken:
                pair.wait()
            _bring_all(taken, ended)


def _look_at_rows(pairs: Sequence[QueuedPair], ended: bool) -> None:
    """Find the rows with a gradient, where it is not known that all of them count."""
    todo: list[tuple[SeenRows, int, Tensor]] = []
    for pair in pairs:
        if pair.rows is None:
            continue
        passed, groups, gradient = pair.rows
        for part, group in enumerate(groups):
            if group.everything or group.examples or (ended and not passed.masked(group)):
                continue
            todo.append((pair.rows, part, gradient.chunk(len(groups))[part]))
    keys = [(id(seen.groups[part]), d.shape, d.dtype, d.device) for seen, part, d in todo]
    sizes = [d.numel() for _, _, d in todo]
    most = most_elements(todo[0][2].device) if todo else 0
    for together in in_groups(keys, sizes, most):
        seen, part, _ = todo[together[0]]
        whole = as_stack([todo[i][2] for i in together])
        mask = whole.any(-1)
        seen.groups[part].add(LiveRows(mask[0] if len(together) == 1 else mask.any(0), 0))


def _read_rows(pairs: Sequence[QueuedPair]) -> None:
    """Read which groups' rows have all had a gradient."""
    groups = {id(g): g for pair in pairs if pair.rows for g in pair.rows.groups}
    unknown = [g for g in groups.values() if g.alive is not None]
    if unknown:
        flags = [cast(Tensor, g.alive).all().to(unknown[0].alive.device) for g in unknown]  # type: ignore[union-attr]
        for group, everything in zip(unknown, torch.stack(flags).tolist(), strict=True):
            if everything:
                group.add(all_rows(group.number))


def _decide_rows(pairs: Sequence[QueuedPair], ended: bool) -> list[QueuedPair]:
    """Look at which rows take part; returns the pairs whose sums can be made."""
    _look_at_rows(pairs, ended)
    if not ended:
        _read_rows(pairs)
    masks: dict[Hashable, LiveRows | None] = {}
    ready: list[QueuedPair] = []
    for pair in pairs:
        if pair.rows is not None:
            passed, groups, _ = pair.rows
            if not ended and not all(g.everything or g.examples for g in groups):
                assert pair.partly is not None
                pair.partly(passed.alive_in(groups))
                continue
            key = tuple(map(id, groups))
            if key not in masks:
                masks[key] = passed.rows_in(groups)
            pair.live = masks[key]
        if isinstance(pair.what, WaitingPair):
            with span("capture"), ieee_matmul(pair.what.gradient.device):
                live = all_rows(0) if pair.live is None else pair.live
                pair.what = pair.what.form(live)
        ready.append(pair)
    return ready


def _bring_all(taken: Iterable[QueuedPair], ended: bool) -> None:
    """Bring pairs that are still wanted, the first of each layer before the second ones."""
    wanted = [pair for pair in taken if pair.wanted]
    with torch.no_grad():
        wanted = _decide_rows(wanted, ended)
    turns: Counter[int] = Counter()  # pairs of one layer come one after the other
    kept: list[tuple[int, int, QueuedPair]] = []
    for pair in wanted:
        turn = turns[id(pair.staged)] = turns[id(pair.staged)] + 1
        kept.append((turn, pair.place, pair))
    kept.sort(key=lambda each: each[:2])
    keys = [(p.staged.device, turn, _columns(p.staged)) for turn, _, p in kept]
    for group in in_groups(keys):
        device = keys[group[0]][0]
        plain = torch.autocast(device.type, enabled=False)
        with torch.no_grad(), plain, span("capture"), ieee_matmul(device):
            _bring([kept[i][2] for i in group])


def _columns(staged: StagedStatistics) -> int:
    """Numbers in a record."""
    return 1 + staged.shape.numbers * staged.shape.groups


def _bring(pairs: Sequence[QueuedPair]) -> None:
    """Bring pairs of different layers, with records of one length, to their statistics."""
    sizes, most = [pair.size for pair in pairs], most_elements(pairs[0].staged.device)
    groups = in_groups([pair.key for pair in pairs], sizes, most)
    pairs = [pairs[i] for group in groups for i in group]
    staged = [pair.staged for pair in pairs]
    size = len(pairs), _columns(staged[0])
    records = torch.empty(size, dtype=staged[0].dtype, device=staged[0].device)
    found: list[dict[str, Tensor]] = []
    start = 0
    for group in groups:
        alike, here = pairs[start : start + len(group)], records[start : start + len(group)]
        found.append(_sums(alike, here))
        start += len(group)
    bad = records.sum(1) * 0.0 != 0.0
    records.masked_fill_(bad.unsqueeze(1), 0.0)
    own_stack([vars(each) for each in staged], "dropped").add_(bad)
    parts: list[dict[str, Tensor]] = []
    for group, stacks in zip(groups, found, strict=True):
        unsound = bad[len(parts) : len(parts) + len(group)]
        for each in stacks.values():
            each.masked_fill_(unsound.view(-1, *[1] * (each.dim() - 1)), 0.0)
        columns = (each.unbind() for each in stacks.values())
        parts += [dict(zip(stacks, each, strict=True)) for each in zip(*columns, strict=True)]
    ready = zip(pairs, parts, records.unbind(), strict=True)
    put([(pair.staged, pair.pass_id, factors, record) for pair, factors, record in ready])


def _sums(pairs: Sequence[QueuedPair], records: Tensor) -> dict[str, Tensor]:
    """The sums of pairs that are alike, new and as they are stored; fills in records."""
    first, shape = pairs[0], pairs[0].staged.shape
    if isinstance(first.what, Rows):
        whats = [cast(Rows, pair.what) for pair in pairs]
        factors = _products(whats, first.live, records[:, 0], first.staged.dtype)
    else:
        formed = [cast(PairStatistics, pair.what) for pair in pairs]
        letters = formed[0].factors
        factors = {k: torch.stack([each.factors[k] for each in formed]) for k in letters}
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
        if full and first.staged.triangular:
            factors[letter] = pack_upper_triangular(factor)
    return factors


def _products(
    pairs: Sequence[Rows], live: LiveRows | None, examples: Tensor, wide: torch.dtype
) -> dict[str, Tensor]:
    """A and G, ``(n, 1, size, size)``, of n Linears' pairs of equal shape; fills in examples.

    As :func:`~second_order.kronecker.layers.linear_statistics` makes them of each. ``live``: the
    rows that A is a sum over; None for all.
    """
    first = pairs[0]
    sizes = first.sizes
    narrow_x, narrow_d = (
        part.dtype.itemsize == 2 and len(sizes) == 1 for part in (first.x, first.d)
    )
    x = as_stack([pair.x.reshape(*sizes, pair.x.shape[-1]) for pair in pairs]).to(wide)
    d = as_stack([pair.d.reshape(*sizes, pair.d.shape[-1]) for pair in pairs]).to(wide)
    mask = None if live is None else live.mask
    number: int | Tensor = sizes[0] if live is None or mask is None else live.count
    if len(sizes) > 1:
        each = all_rows(0) if mask is None else LiveRows(mask.repeat(len(pairs)), 0)
        means = reduced(x.flatten(0, 1), d.flatten(0, 1), each)
        x, d = (part.unflatten(0, (len(pairs), -1)) for part in means)
        if mask is not None:
            part = rows_in(mask).parts(sizes[0])
            mask, number = part.mask, part.count
    examples.copy_(number) if isinstance(number, Tensor) else examples.fill_(number)
    x = nn.functional.pad(x, (0, 1), value=1.0) if pairs[0].bias else x
    if mask is not None:
        x = x * mask.to(x.device).unsqueeze(-1)
    with ieee_matmul(x.device, wide, narrow=narrow_x):
        a = x.mT @ x
    with ieee_matmul(d.device, wide, narrow=narrow_d):
        g = d.mT @ d
    return {"A": a.unsqueeze(1), "G": g.unsqueeze(1)}

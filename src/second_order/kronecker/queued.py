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
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.kronecker import autograd
from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.factors import Reduction, StagedStatistics, put, scale_squared
from second_order.kronecker.layers import Approximation, PairStatistics, reduced
from second_order.kronecker.stacks import as_stack, in_groups, most_elements, own_stack
from second_order.kronecker.triangles import pack_upper_triangular
from second_order.stages import span

__all__ = ["PairQueue", "QueuedPair", "Rows"]

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
    def rows(self) -> int:
        """Rows, those without a gradient included."""
        return self.sizes[0]

    @property
    def key(self) -> Hashable:
        """What pairs have in common that are multiplied together."""
        ends = self.x.shape[-1], self.d.shape[-1], self.x.dtype, self.d.dtype
        return (*self.sizes, *ends, self.bias, self.approximation)


@dataclass(eq=False)
class QueuedPair:
    """A pair, which its layer expects."""

    what: Rows | PairStatistics
    staged: StagedStatistics
    pass_id: int
    reduction: Reduction
    scale: Callable[[Tensor], Tensor | float]  # of gradients
    place: int  # of the layer in the model
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
        return own, self.staged.shape, self.staged.triangular, self.what.rows, self.reduction

    @property
    def size(self) -> int:
        """Elements of the pair and of its sums."""
        to_make = self.staged.shape.dims.values() if isinstance(self.what, Rows) else ()
        return sum(map(Tensor.numel, self.tensors)) + sum(n**2 for n in to_make)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What is kept."""
        what = self.what
        return (what.x, what.d) if isinstance(what, Rows) else list(what.factors.values())

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
        self._timed = timed
        self._pairs: list[QueuedPair] = []
        self._bytes = 0
        self._ending = autograd.NO_PASS  # the pass at whose end they are added up
        self._lock = threading.RLock()  # autograd has a thread for each device

    def add(self, pair: QueuedPair, keep: bool = True) -> None:
        """Keep a pair until the running pass ends, or many have come."""
        with self._lock:
            self._pairs.append(pair)
            # A slice keeps the memory of what it is of.
            held = sum(tensor.untyped_storage().nbytes() for tensor in pair.tensors)
            self._bytes += max(4 * pair.size, held)
            pair.staged.settle = self.flush
            now = autograd.current_pass()
            if not keep or self._bytes > QUEUED_BYTES or now == autograd.NO_PASS:
                self.flush()
            elif now != self._ending:
                self._ending = now
                autograd.after_pass(self._end)

    def _end(self) -> None:
        with self._timed():
            self.flush()

    def flush(self) -> None:
        """Bring all pairs to the statistics of their layers."""
        with self._lock:
            taken, self._pairs, self._bytes = self._pairs, [], 0
            for pair in taken:
                pair.staged.settle = None
                pair.wait()
            _bring_all(taken)


def _bring_all(taken: Iterable[QueuedPair]) -> None:
    """Bring pairs that are still wanted, the first of each layer before the second ones."""
    turns: Counter[int] = Counter()  # pairs of one layer come one after the other
    kept: list[tuple[int, int, QueuedPair]] = []
    for pair in filter(lambda pair: pair.wanted, taken):
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
    return 2 + staged.shape.numbers * staged.shape.groups


def _bring(pairs: Sequence[QueuedPair]) -> None:
    """Bring pairs of different layers, with records of one length, to their statistics."""
    sizes, most = [pair.size for pair in pairs], most_elements(pairs[0].staged.device)
    groups = in_groups([pair.key for pair in pairs], sizes, most)
    pairs = [pairs[i] for group in groups for i in group]
    staged, rows = [pair.staged for pair in pairs], pairs[0].what.rows
    size = len(pairs), _columns(staged[0])
    records = torch.full(size, float(rows), dtype=staged[0].dtype, device=staged[0].device)
    found: list[dict[str, Tensor]] = []
    start = 0
    for group in groups:
        alike, here = pairs[start : start + len(group)], records[start : start + len(group)]
        if alike[0].what.rows != rows:
            here[:, 0] = alike[0].what.rows
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
    """The sums of pairs that are alike, new and as they are stored; fills in records but rows."""
    first, shape = pairs[0], pairs[0].staged.shape
    if isinstance(first.what, Rows):
        whats = [cast(Rows, pair.what) for pair in pairs]
        factors = _products(whats, records[:, 1], first.staged.dtype)
    else:
        formed = [cast(PairStatistics, pair.what) for pair in pairs]
        letters = first.what.factors
        factors = {k: torch.stack([each.factors[k] for each in formed]) for k in letters}
        examples = [each.examples for each in formed]
        device = examples[0].device if isinstance(examples[0], Tensor) else torch.device("cpu")
        records[:, 1] = torch.stack([torch.as_tensor(n, device=device) for n in examples])
        if shape.routed:
            counts = [cast(Tensor, each.routed) for each in formed]
            records[:, -shape.groups :] = torch.stack(counts)
    square = scale_squared(first.scale(factors["G"]), first.what.rows, first.reduction)
    if square is not None:
        factors["G"].mul_(square)
        if shape.marginal:  # both are of gradients
            factors["A"].mul_(square)
    column = 2
    for letter, factor in factors.items():
        full = letter not in shape.diagonals
        diagonal = factor.diagonal(dim1=-2, dim2=-1) if full else factor
        torch.mean(diagonal, -1, out=records[:, column : column + shape.groups])
        column += shape.groups
        if full and first.staged.triangular:
            factors[letter] = pack_upper_triangular(factor)
    return factors


def _products(pairs: Sequence[Rows], examples: Tensor, wide: torch.dtype) -> dict[str, Tensor]:
    """A and G, ``(n, 1, size, size)``, of n Linears' pairs of equal shape; fills in examples.

    As :func:`~second_order.kronecker.layers.linear_statistics` makes them of each.
    """
    sizes = pairs[0].sizes
    x = as_stack([pair.x.reshape(*sizes, pair.x.shape[-1]) for pair in pairs]).to(wide)
    d = as_stack([pair.d.reshape(*sizes, pair.d.shape[-1]) for pair in pairs]).to(wide)
    if len(sizes) > 1:
        means = reduced(x.flatten(0, 1), d.flatten(0, 1))
        x, d = (each.unflatten(0, (len(pairs), -1)) for each in means)
    live = d.any(-1, keepdim=True)
    torch.sum(live.squeeze(-1), 1, dtype=wide, out=examples)
    x = nn.functional.pad(x, (0, 1), value=1.0).mul_(live) if pairs[0].bias else x * live
    return {"A": (x.mT @ x).unsqueeze(1), "G": (d.mT @ d).unsqueeze(1)}

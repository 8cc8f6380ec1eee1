"""Pairs of Linears on a device, kept until their pass ends and then multiplied together.

A device has next to nothing to do for a small layer but to be told of it. So the sums of all layers
with pairs of equal shape are made by the same few operations, however many there are. Pairs are
kept up to a number of bytes: large ones give a device work enough one by one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from second_order.kronecker import autograd
from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.factors import Reduction, StagedStatistics, put, scale_squared
from second_order.kronecker.layers import Form, reduced
from second_order.kronecker.stacks import in_groups, most_elements, own_stack
from second_order.kronecker.triangles import pack_upper_triangular
from second_order.stages import span

__all__ = ["PairQueue", "QueuedPair"]

QUEUED_BYTES = 2**26
"""Bytes of inputs and gradients up to which pairs are kept."""


@dataclass(frozen=True)
class QueuedPair:
    """A pair of a Linear, ``(..., in)`` and ``(..., out)``, that is expected by its layer."""

    x: Tensor
    d: Tensor
    staged: StagedStatistics
    pass_id: int
    form: Form
    reduction: Reduction
    scale: Callable[[Tensor], Tensor | float]  # of gradients
    place: int  # of the layer in the model

    def __post_init__(self) -> None:
        state = self.staged.cleared, self.x._version, self.d._version
        object.__setattr__(self, "before", state)

    @property
    def wanted(self) -> bool:
        """Whether the layer has not been cleared since; notes where a tensor has been changed."""
        cleared, *versions = vars(self)["before"]
        if cleared != self.staged.cleared:
            return False
        if versions != [self.x._version, self.d._version]:
            # By the backward that made it, or by the user within the pass: not to be kept again.
            self.staged.keeps = False
            self.staged.dropped += 1
            return False
        return True

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the pair, or examples and positions of each where these are to be reduced."""
        if self.form.approximation == "reduce" and self.x.dim() > 2:
            return len(self.d), self.d.shape[1:-1].numel()
        return (self.d.shape[:-1].numel(),)


class PairQueue:
    """Pairs of one pass, or of the beginning of one."""

    def __init__(self, timed: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._timed = timed
        self._pairs: deque[QueuedPair] = deque()
        self._bytes = 0
        self._ending = autograd.NO_PASS  # the pass at whose end they are multiplied

    def add(self, pair: QueuedPair) -> None:
        """Keep a pair until the running pass ends, or many have come."""
        self._pairs.append(pair)
        self._bytes += pair.x.nbytes + pair.d.nbytes
        pair.staged.settle = self.flush
        now = autograd.current_pass()
        if self._bytes > QUEUED_BYTES or now == autograd.NO_PASS:
            self.flush()
        elif now != self._ending:
            self._ending = now
            autograd.after_pass(self._end)

    def _end(self) -> None:
        with self._timed():
            self.flush()

    def flush(self) -> None:
        """Bring all pairs to the statistics of their layers."""
        taken: list[QueuedPair] = []
        while self._pairs:
            taken.append(self._pairs.popleft())
            taken[-1].staged.settle = None
        self._bytes = 0
        nth: Counter[int] = Counter()  # pairs of one layer come one after the other
        rounds: list[tuple[int, int, int]] = []
        for i, pair in enumerate(taken):
            if pair.wanted:
                rounds.append((nth[id(pair.staged)], pair.place, i))
                nth[id(pair.staged)] += 1
        keys = [(pair.d.device, turn) for turn, _, i in sorted(rounds) for pair in [taken[i]]]
        pairs = [taken[i] for *_, i in sorted(rounds)]
        for group in in_groups(keys):
            device = keys[group[0]][0]
            plain = torch.autocast(device.type, enabled=False)
            with torch.no_grad(), plain, span("capture"), ieee_matmul(device):
                _bring([pairs[i] for i in group])


def _bring(pairs: Sequence[QueuedPair]) -> None:
    """Bring pairs of different layers on one device to their statistics."""
    keys = [
        (*p.sizes, p.x.shape[-1], p.d.shape[-1], p.x.dtype, p.d.dtype, p.form, p.reduction)
        for p in pairs
    ]
    sizes = [p.x.numel() + p.d.numel() + p.x.shape[-1] ** 2 + p.d.shape[-1] ** 2 for p in pairs]
    groups = in_groups(keys, sizes, most_elements(pairs[0].d.device))
    pairs = [pairs[i] for group in groups for i in group]
    first = pairs[0]
    rows = first.sizes[0]
    records = first.d.new_full((len(pairs), 4), rows, dtype=first.staged.dtype)
    found: list[tuple[Tensor, Tensor]] = []
    start = 0
    for group in groups:
        stop = start + len(group)
        if pairs[start].sizes[0] != rows:
            records[start:stop, 0] = pairs[start].sizes[0]
        found.append(_factors(pairs[start:stop], records[start:stop]))
        start = stop
    bad = records.sum(1) * 0.0 != 0.0
    records.masked_fill_(bad.unsqueeze(1), 0.0)
    own_stack([vars(pair.staged) for pair in pairs], "dropped").add_(bad)
    parts: list[dict[str, Tensor]] = []
    for stacks in found:
        here = bad[len(parts) : len(parts) + len(stacks[0])]
        a, g = (each.masked_fill_(here.view(-1, *[1] * (each.dim() - 1)), 0.0) for each in stacks)
        parts += [{"A": x, "G": y} for x, y in zip(a.unbind(), g.unbind(), strict=True)]
    each = zip(pairs, parts, records.unbind(), strict=True)
    put([(pair.staged, pair.pass_id, factors, record) for pair, factors, record in each])


def _factors(pairs: Sequence[QueuedPair], records: Tensor) -> tuple[Tensor, Tensor]:
    """A and G of pairs of equal shape, as stored, and their records but the rows.

    As :func:`~second_order.kronecker.layers.linear_statistics` makes them of each.
    """
    first = pairs[0]
    sizes, form, wide = first.sizes, first.form, first.staged.dtype
    x = _stacked([p.x.reshape(*sizes, p.x.shape[-1]) for p in pairs]).to(wide)
    d = _stacked([p.d.reshape(*sizes, p.d.shape[-1]) for p in pairs]).to(wide)
    if len(sizes) > 1:
        means = reduced(x.flatten(0, 1), d.flatten(0, 1))
        x, d = (each.unflatten(0, (len(pairs), -1)) for each in means)
    live = d.any(-1, keepdim=True)
    x = nn.functional.pad(x, (0, 1), value=1.0).mul_(live) if form.bias else x * live
    factors = x.mT @ x, d.mT @ d
    square = scale_squared(first.scale(d), sizes[0], first.reduction)
    if square is not None:
        factors[1].mul_(square)
    torch.sum(live.squeeze(-1), 1, dtype=wide, out=records[:, 1])
    for i, factor in enumerate(factors):
        torch.mean(factor.diagonal(dim1=-2, dim2=-1), -1, out=records[:, 2 + i])
    a, g = (factor.unsqueeze(1) for factor in factors)
    if form.triangular:
        return pack_upper_triangular(a), pack_upper_triangular(g)
    return a, g


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)) if len(parts) > 1 else parts[0].unsqueeze(0)

"""How often each layer is refreshed, by what its refreshes change.

at a refresh    P₀ = old inverse ∇, P = new inverse ∇         of the step's own mean gradient
                c = cos(P₀, P), r = |P₀| / |P|                all ranks hear them
interval        halved where c < 0.9, doubled where c > 0.97; 1 at first, 32 steps at most
due             every interval-th step, and no oftener than three layers of four want to be

Intervals are powers of two and due steps their multiples, so that layers come due together and the
ranks that solve are busy at the same steps. A layer's solves cost, on average, no more than the
passes through the model: with cost c of a solve and work W of a step's passes, the least interval
of a layer is sqrt(c) Σ sqrt(c) / W, by which Σ c / interval is W, and the sum of intervals least.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.distributed.collectives import World
from second_order.kronecker.block import KroneckerBlock

__all__ = ["DRIFT_INTERVAL", "LONGEST", "Change", "Drift", "least_intervals", "next_interval"]

DRIFT_INTERVAL = "drift_interval"
"""The entry of a checkpoint, in the part of every layer."""

APART, ALIKE = 0.9, 0.97  # cosines below and above which an interval changes
LONGEST = 32
WANTED_BY = 0.25  # of the layers, at least, for a refresh to come oftener
NOTHING = (-1.0, -1.0)  # said of a layer by a rank that knows nothing of it
SMALL = 1e8  # operations that take as long as what a step costs besides its products


@dataclass(frozen=True)
class Change:
    """What the last refresh of a layer changed.

    Attributes:
        interval: Steps from a refresh to the next.
        cosine: Between the gradient as the old inverse preconditions it, and as the new one does.
        length: The length of the former over that of the latter.
    """

    interval: int = 1
    cosine: float = math.nan
    length: float = math.nan


def next_interval(interval: int, cosine: float) -> int:
    """The interval that follows a refresh, by the cosine; NaN leaves it as it is."""
    if cosine < APART:
        return max(interval // 2, 1)
    return min(2 * interval, LONGEST) if cosine > ALIKE else interval


def least_intervals(costs: Sequence[float], work: float) -> list[int]:
    """Least intervals, powers of two, by which solves cost no more than the passes of a step.

    Args:
        costs: Operations of the solves of each layer, on the rank that does most.
        work: Operations of a step's passes on a rank; 0 where they are not known: no bound.
    """
    if not work:
        return [1] * len(costs)
    total = sum(map(math.sqrt, costs))
    wanted = [math.sqrt(cost) * total / (work + SMALL) for cost in costs]
    return [2 ** min(max(round(math.log2(w)), 0), 10) if w > 0 else 1 for w in wanted]


class Drift:
    """The intervals of layers that are refreshed as they drift; the same on every rank.

    Attributes:
        changes: What the last refresh of each layer changed.
        least: Steps that the budget leaves between refreshes, at least.
        held: Number of layers that want to be refreshed oftener than that.
    """

    def __init__(self) -> None:
        self.changes: dict[KroneckerBlock, Change] = {}
        self.least = 1
        self.held = 0
        self._affordable: dict[KroneckerBlock, int] = {}

    def interval(self, block: KroneckerBlock) -> int:
        """Steps from a layer's refresh to the next, as drift, budget and work allow."""
        wanted = self.changes.get(block, Change()).interval
        return max(wanted, self._affordable.get(block, 1), self.least)

    def due(self, blocks: Iterable[KroneckerBlock], step: int) -> list[KroneckerBlock]:
        """The layers that are due at a step; those without an inverse are whenever any could be."""
        blocks = list(blocks)
        intervals = {block: self.interval(block) for block in blocks}
        known = sorted(every for block, every in intervals.items() if block.solved)
        tick = known[int(len(known) * WANTED_BY)] if known else 1
        if step % tick:
            return []
        return [b for b, every in intervals.items() if not b.solved or step % max(every, tick) == 0]

    def late(self, block: KroneckerBlock, age: int) -> bool:
        """Whether a solve of factors of so many steps ago is to be waited for."""
        return age >= self.interval(block) - 1

    def take(self, world: World, blocks: Sequence[KroneckerBlock], costs: Sequence[float]) -> None:
        """Follow what the refresh of this step has changed; a collective.

        Args:
            world: The ranks.
            blocks: All layers that train.
            costs: Operations of the solves of each layer, on the rank that does most.
        """
        products = [block.take_change() for block in blocks]
        known = [p for p in products if p is not None]
        known = [p.to(known[0].device, known[0].dtype) for p in known]
        told = iter(torch.stack(known).tolist() if known else [])  # a device is waited for once
        message = [_change(*next(told)) if p is not None else NOTHING for p in products]
        work = float(sum(block.state.work for block in blocks))
        heard = torch.tensor([work, *(x for pair in message for x in pair)], dtype=torch.float64)
        if world.size > 1:
            world.on_cpu().all_reduce_max([heard]).wait()
        work, *numbers = heard.tolist()
        for block, apart, length in zip(blocks, numbers[::2], numbers[1::2], strict=True):
            if apart >= 0:
                every = next_interval(self.interval(block), 1 - apart)
                self.changes[block] = Change(every, 1 - apart, length)
        self.held = sum(change.interval < self.least for change in self.changes.values())
        self._affordable = dict(zip(blocks, least_intervals(costs, work), strict=True))

    def follow(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Keep what is known of these layers, and of no others."""
        kept = set(blocks)
        for known in (self.changes, self._affordable):
            for block in known.keys() - kept:
                del known[block]

    # ------------------------------------------------------------------------ state and summary

    def facts(self, blocks: Iterable[KroneckerBlock]) -> tuple[int, ...]:
        """The intervals, which must be equal on all ranks."""
        return tuple(map(self.interval, blocks))

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """What a checkpoint keeps of a layer."""
        return {DRIFT_INTERVAL: self.interval(block)}

    def load(self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]) -> None:
        """Take over the intervals of a checkpoint."""
        self.changes.clear()
        for block in blocks:
            part = saved.get(block.weight)
            if part is not None and DRIFT_INTERVAL in part:
                self.changes[block] = Change(part.whole(DRIFT_INTERVAL, 1))

    @property
    def metrics(self) -> dict[str, float]:
        """Cosines, lengths and intervals at the layers' last refreshes, to log."""
        changes = list(self.changes.values())
        known = [change for change in changes if not math.isnan(change.cosine)]
        found = {"drift/interval": _median(map(self.interval, self.changes))}
        found["drift/cosine"] = _median(change.cosine for change in known)
        found["drift/cosine/min"] = min((c.cosine for c in known), default=math.nan)
        found["drift/length"] = _median(change.length for change in known)
        return found


def _change(product: float, before: float, now: float) -> tuple[float, float]:
    """1 - c and r, of P₀ · P, |P₀|² and |P|²; NOTHING where one of the two vanishes."""
    both = math.sqrt(before) * math.sqrt(now)
    if not 0 < both < math.inf:
        return NOTHING
    return 1 - max(min(product / both, 1.0), -1.0), math.sqrt(before / now)


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return float(statistics.median(listed)) if listed else math.nan

"""Which layers a refresh solves, by the traces of their curvature (Chen et al., AAAI 2021: THOR).

C = A ⊗ G + γ at a refresh, C₀ at the layer's last solve, and Δ = |tr C - tr C₀| / tr C₀:

Δ > upper            solved
lower <= Δ <= upper  spared: its inverse is kept until the next refresh
Δ < lower            settled: its inverse is kept, and its trace is looked at no more

The ranks that solve a layer know its traces, whoever keeps its factors, and say what they find in
the verdicts on which all ranks agree before inverses are sent: nothing more is sent. Sparing counts
for more than solving there, so that two solvers of one layer that differ spare it alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.kfac.solve import Verdict
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.solvers import Damping

__all__ = ["SETTLED", "Mark", "TraceRefresh", "judge", "moved"]

SETTLED = "settled"
"""The entry of a checkpoint, in the part of every layer."""


class Mark(NamedTuple):
    """The scale of what a layer's inverse is made from, by which a later refresh is judged.

    Attributes:
        trace: Mean eigenvalue of the damped curvature: its trace over its size.
        damping: γ as the option has it.
    """

    trace: float
    damping: float


def moved(now: float, before: float) -> float:
    """The distance from a number to another as a share of that; infinite from 0, or to NaN."""
    if now == before:
        return 0.0
    share = abs(now - before) / abs(before) if before else math.inf
    return math.inf if math.isnan(share) else share


def judge(now: Mark, before: Mark, bounds: tuple[float, float], settled: bool) -> Verdict | None:
    """A verdict on a layer that need not be solved; None for one that must be.

    The trace of a settled layer does not count, but a schedule of the damping does: what it adds is
    in no trace of the statistics.
    """
    upper, lower = bounds
    distance = 0.0 if settled else moved(now.trace, before.trace)
    if moved(now.damping, before.damping) > upper or distance > upper:
        return None
    return Verdict.SETTLED if settled or distance < lower else Verdict.SPARED


class TraceRefresh:
    """The layers' traces at their last solves, and which layers have settled.

    Attributes:
        settled: The layers whose traces are looked at no more; the same on every rank.
        judged: Number of layers of all refreshes so far.
        spared: Number of these that kept their inverse.
    """

    def __init__(self, bounds: tuple[float, float]) -> None:
        self._bounds = bounds
        self._marks: dict[KroneckerBlock, Mark] = {}  # of the inverses in use
        self._coming: dict[KroneckerBlock, Mark] = {}  # of those that are being solved
        self.settled: set[KroneckerBlock] = set()
        self.judged, self.spared = 0, 0

    def forget(self) -> None:
        """Watch every layer from its next solve on: a plan has changed, or a checkpoint came."""
        self._marks.clear()
        self._coming.clear()
        self.settled.clear()

    def keeping(
        self, dampings: Mapping[KroneckerBlock, Damping], damping: float
    ) -> dict[KroneckerBlock, Verdict]:
        """This rank's verdicts on layers that keep their inverses; a device is waited for once.

        A layer without an inverse is solved, and one whose last solve failed.
        """
        traces: list[Tensor] = [
            block.ensure_factors().mean_curvature() + of for block, of in dampings.items()
        ]
        if not traces:
            return {}
        device = traces[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        listed = torch.stack([trace.to(device, wide) for trace in traces]).tolist()
        found: dict[KroneckerBlock, Verdict | None] = {}
        for block, trace in zip(dampings, listed, strict=True):
            mark = self._coming[block] = Mark(trace, float(damping))
            before = self._marks.get(block)
            if before is not None and block.solved and not block.state.failures:
                found[block] = judge(mark, before, self._bounds, block in self.settled)
        return {block: verdict for block, verdict in found.items() if verdict is not None}

    def installed(self, block: KroneckerBlock, verdict: Verdict) -> None:
        """Take note of what all ranks have agreed on for a layer."""
        self.judged += 1
        mark = self._coming.pop(block, None)
        if verdict in (Verdict.SPARED, Verdict.SETTLED):
            self.spared += 1
            if verdict is Verdict.SETTLED:
                self.settled.add(block)
        elif verdict is Verdict.SOUND:
            if mark is not None:
                self._marks[block] = mark
        elif verdict is not Verdict.FAILED:  # the inverse is gone
            self._marks.pop(block, None)
            self.settled.discard(block)

    @property
    def share(self) -> float:
        """The share of the layers of all refreshes that were spared; NaN before the first."""
        return self.spared / self.judged if self.judged else math.nan

    @property
    def said(self) -> str:
        """A part of a line of the summary."""
        return (
            f"refresh by trace: {self.spared} of {self.judged} solves spared, "
            f"{len(self.settled)} layer{'' if len(self.settled) == 1 else 's'} settled"
        )

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """What a checkpoint keeps of a layer.

        Traces are not among it: inverses are made anew after it is loaded, and traces with them.
        """
        return {SETTLED: int(block in self.settled)}

    def load(self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]) -> None:
        """Take over which layers have settled; they are solved once, as all are after loading."""
        self.forget()
        parts = {block: saved[block.weight] for block in blocks if block.weight in saved}
        self.settled |= {b for b, p in parts.items() if SETTLED in p and p.whole(SETTLED, 0, 1)}

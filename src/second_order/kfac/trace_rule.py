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

from second_order.checkpoint.saved import SavedPart
from second_order.kfac.solve import Verdict
from second_order.kronecker.block import KroneckerBlock
from second_order.utils.checks import Scalar

__all__ = ["SETTLED", "TRACE", "Mark", "TraceRefresh", "judge", "moved"]

SETTLED = "settled"
TRACE = "trace"
"""The entries of a checkpoint, in the part of every layer: 1 if it has settled, and the two numbers
of its :class:`Mark`, -1 for a trace that is not known."""


class Mark(NamedTuple):
    """What a later refresh is judged by: the mean eigenvalue of A ⊗ G + γ, and γ as the option."""

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
    """The layers' traces at their last solves, and which layers have settled."""

    def __init__(self, bounds: tuple[float, float]) -> None:
        self._bounds = bounds
        self.judged = self.spared = 0  # layers of all refreshes, and those that kept their inverse
        self.forget()

    def forget(self) -> None:
        """Watch every layer from its next solve on: a plan has changed, or a checkpoint came."""
        self._marks: dict[KroneckerBlock, Mark] = {}  # of the inverses in use
        self._coming: dict[KroneckerBlock, Mark] = {}  # of those that are being solved
        self.settled: set[KroneckerBlock] = set()  # looked at no more; the same on every rank

    def forget_layer(self, block: KroneckerBlock) -> None:
        """Forget a layer whose inverse was dropped; its next solve starts again."""
        self._marks.pop(block, None)
        self.settled.discard(block)

    def keeping(
        self,
        traces: Mapping[KroneckerBlock, Tensor],
        damping: Scalar,
        own: Mapping[KroneckerBlock, float],
        judged: Iterable[KroneckerBlock],
    ) -> dict[KroneckerBlock, Verdict]:
        """This rank's verdicts on layers that keep their inverses; a device is waited for once.

        The ``traces`` are scalars: the mean eigenvalues of A ⊗ G + γ, of the layers that are
        ``judged`` here, and of others, which other ranks judge. ``own`` are the dampings of layers
        whose groups have one.
        A layer without an inverse is solved, and one whose last solve failed.
        """
        here = set(judged)
        if not traces:
            return {}
        device = next(iter(traces.values())).device
        wide = torch.float32 if device.type == "mps" else torch.float64
        option = [damping] if isinstance(damping, Tensor) else []
        asked = [each.to(device) for each in (*traces.values(), *option)]
        listed = torch.stack(asked).to(wide).tolist()
        damping = listed.pop() if option else damping
        found: dict[KroneckerBlock, Verdict] = {}
        for block, trace in zip(traces, listed, strict=True):
            mark = self._coming[block] = Mark(trace, float(own.get(block, damping)))
            before = self._marks.get(block)
            if block not in here:
                continue
            if before is not None and block.solved and not block.state.failures:
                verdict = judge(mark, before, self._bounds, block in self.settled)
                found |= {} if verdict is None else {block: verdict}
        return found

    def installed(self, block: KroneckerBlock, verdict: Verdict) -> None:
        """Take note of what all ranks have agreed on for a layer."""
        self.judged += 1
        mark = self._coming.pop(block, None)
        if verdict in (Verdict.SPARED, Verdict.SETTLED):
            self.spared += 1
            self.settled |= {block} if verdict is Verdict.SETTLED else set()
        elif verdict is Verdict.SOUND:
            if mark is not None:
                self._marks[block] = mark
        elif verdict is not Verdict.FAILED:  # the inverse is gone
            self.forget_layer(block)

    @property
    def said(self) -> str:
        """A part of a line of the summary."""
        layers = "1 layer" if len(self.settled) == 1 else f"{len(self.settled)} layers"
        return f"refresh by trace: {self.spared} of {self.judged} solves spared, {layers} settled"

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """What a checkpoint keeps of a layer."""
        return {SETTLED: int(block in self.settled)}

    def mark(self, block: KroneckerBlock) -> Mark:
        """What a checkpoint keeps of a layer next to its inverse."""
        return self._marks.get(block, Mark(-1.0, -1.0))

    def load(self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]) -> None:
        """Take over which layers have settled, and the traces of inverses in the checkpoint.

        Without its trace a layer is solved at the next refresh.
        """
        self.forget()
        for block in blocks:
            part = saved.get(block.weight)
            if part is None:
                continue
            if SETTLED in part and part.whole(SETTLED, 0, 1):
                self.settled.add(block)
            if TRACE in part:
                mark = Mark(*part[TRACE].tolist())
                if mark.trace >= 0:
                    self._marks[block] = mark

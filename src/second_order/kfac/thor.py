"""Choose the layers that a refresh computes by the trace of their curvature (THOR).

C = A ⊗ G + γ at this refresh, C₀ at the layer's last computed one, and
Δ = |tr C - tr C₀| / tr C₀ (Chen et al., AAAI 2021):

    Δ > upper             compute the inverse
    lower <= Δ <= upper   skip this refresh: keep the inverse until the next one
    Δ < lower             stop: keep the inverse, and do not compare traces any more

A stopped layer is computed again only if the option γ changes by more than ``upper``.

Only the inverse ranks of a layer know its traces. One all-reduce per refresh gives all
ranks their decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.kfac.inversion import Inverses, PendingInverse
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.storage import read_numbers

__all__ = ["STOPPED", "TraceRefresh", "relative_change"]

STOPPED = "stopped"
"""The entry of a checkpoint, in the part of every layer: 1 if the layer is stopped."""

# Decisions. Ranks without a layer's traces send COMPUTE. The largest decides.
COMPUTE = 0.0
STOP = 1.0
SKIP = 2.0


def relative_change(now: float, before: float) -> float:
    """Return |now - before| / |before|; infinite if that is undefined."""
    if now == before:
        return 0.0
    if before == 0.0:
        return math.inf
    change = abs(now - before) / abs(before)
    return math.inf if math.isnan(change) else change


class TraceRefresh:
    """THOR's rule: which layers a refresh computes.

    Args:
        upper: Change of the trace above which an inverse is computed.
        lower: Change of the trace below which a layer stops.

    Attributes:
        num_due: Number of layers at all refreshes together.
        num_skipped: Number of these that kept their inverse.
        stopped: The layers that have stopped, the same on every rank.
    """

    def __init__(self, upper: float, lower: float) -> None:
        self._upper = upper
        self._lower = lower
        self.num_due = 0
        self.num_skipped = 0
        self.stopped: set[KroneckerBlock] = set()

    def choose(
        self, inverses: Inverses, due: Mapping[KroneckerBlock, PendingInverse]
    ) -> list[KroneckerBlock]:
        """Return the layers to compute, of those that are due. Collective.

        Layers without an inverse or with a failed last refresh are always computed.
        """
        # Only layers with a valid inverse can skip a refresh.
        self.stopped -= {block for block in due if not block.solved}
        candidates = {
            block: pending
            for block, pending in due.items()
            if block.solved and not block.failures
        }

        # The largest number counts, because ranks without the traces send COMPUTE.
        decisions = self._decide(inverses, candidates)
        if candidates and inverses.training.world.size > 1:
            message = torch.tensor(decisions, dtype=torch.float32, device="cpu")
            inverses.training.world.on_cpu().all_reduce_max([message]).wait()
            decisions = message.tolist()

        skipped = set()
        for block, decision in zip(candidates, decisions, strict=True):
            if decision > COMPUTE:
                skipped.add(block)
            if decision == STOP:
                self.stopped.add(block)
        self.num_due += len(due)
        self.num_skipped += len(skipped)
        return [block for block in due if block not in skipped]

    def _decide(
        self, inverses: Inverses, candidates: Mapping[KroneckerBlock, PendingInverse]
    ) -> list[float]:
        """Return this rank's decisions; COMPUTE for layers that other ranks invert."""
        # Damp the factors that this rank inverts, to get their mean eigenvalues.
        to_invert = inverses.step_plan.to_invert
        local = {b: pending for b, pending in candidates.items() if b in to_invert}
        factors = {block: block.ensure_factors() for block in local}
        dampings = inverses.compute_dampings(factors, local)

        # Read four numbers per layer from the device in one transfer.
        numbers: list[Tensor] = []
        for block, damping in dampings.items():
            like = damping.mean_eigenvalue
            prev = inverses.states[block]
            layer_numbers = (
                damping.mean_eigenvalue,
                prev.mean_eigenvalue,
                local[block].damping_option,
                prev.damping_option,
            )
            numbers += [
                torch.as_tensor(number, dtype=like.dtype, device=like.device)
                for number in layer_numbers
            ]
        values = read_numbers(numbers)

        # Compare the traces with those of the last refresh, by THOR's two thresholds.
        decisions = dict.fromkeys(candidates, COMPUTE)
        for i, block in enumerate(dampings):
            trace, prev_trace, option, prev_option = values[4 * i : 4 * i + 4]
            is_stopped = block in self.stopped
            trace_change = 0.0 if is_stopped else relative_change(trace, prev_trace)
            if max(trace_change, relative_change(option, prev_option)) <= self._upper:
                stops = is_stopped or trace_change < self._lower
                decisions[block] = STOP if stops else SKIP
        return list(decisions.values())

    @property
    def summary_line(self) -> str:
        """The rule's part of a line of the summary."""
        layers = "1 layer" if len(self.stopped) == 1 else f"{len(self.stopped)} layers"
        skipped = f"{self.num_skipped} of {self.num_due} refreshes of layers skipped"
        return f"refresh by trace: {skipped}, {layers} stopped"

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """Return a layer's entries of a checkpoint."""
        return {STOPPED: int(block in self.stopped)}

    def load(
        self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]
    ) -> None:
        """Load from a checkpoint which layers have stopped."""
        self.stopped.clear()
        for block in blocks:
            part = saved.get(block.weight)
            if part is not None and STOPPED in part and part.whole(STOPPED, 0, 1):
                self.stopped.add(block)

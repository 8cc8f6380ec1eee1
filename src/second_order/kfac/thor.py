"""Which layers a refresh computes, by the traces of their curvature (Chen et al., AAAI 2021: THOR).

C = A ⊗ G + γ at a refresh, C₀ at the layer's last one, and Δ = |tr C - tr C₀| / tr C₀:

Δ > upper            computed
lower <= Δ <= upper  spared: its inverse is kept until the next refresh
Δ < lower            settled: its inverse is kept, and its trace is not compared any more

A layer's inverse ranks know its traces. All ranks agree on what these find, by one message at each
refresh: the largest number below decides if the two inverse ranks of a layer differ.
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

__all__ = ["SETTLED", "TraceRefresh", "relative_change"]

SETTLED = "settled"
"""The entry of a checkpoint, in the part of every layer: 1 if it has settled."""

COMPUTED = 0.0
NOW_SETTLED = 1.0
SPARED = 2.0


def relative_change(now: float, before: float) -> float:
    """The distance from a number to another as a share of that; infinite from 0, or to NaN."""
    if now == before:
        return 0.0
    share = abs(now - before) / abs(before) if before else math.inf
    return math.inf if math.isnan(share) else share


class TraceRefresh:
    """Which layers have settled, and how many refreshes of layers have been spared."""

    def __init__(self, upper: float, lower: float) -> None:
        self._upper = upper
        self._lower = lower
        self.num_due = 0  # layers of all refreshes
        self.num_skipped = 0  # those that kept their inverse
        self.stopped: set[KroneckerBlock] = set()  # the same on every rank

    def choose(
        self, inverses: Inverses, due: Mapping[KroneckerBlock, PendingInverse]
    ) -> list[KroneckerBlock]:
        """The layers whose curvature has moved, of those that are due; a collective.

        A layer without an inverse is computed, and one whose last refresh failed.
        """
        self.stopped -= {block for block in due if not block.solved}
        judged = [block for block in due if block.solved and not block.failures]
        flags = self._flags(inverses, {block: due[block] for block in judged})
        if judged and inverses.training.world.size > 1:
            message = torch.tensor(flags, dtype=torch.float32, device="cpu")
            inverses.training.world.on_cpu().all_reduce_max([message]).wait()
            flags = message.tolist()
        kept = {block: flag for block, flag in zip(judged, flags, strict=True) if flag > COMPUTED}
        self.stopped |= {block for block, flag in kept.items() if flag == NOW_SETTLED}
        self.num_due += len(due)
        self.num_skipped += len(kept)
        return [block for block in due if block not in kept]

    def _flags(
        self, inverses: Inverses, judged: Mapping[KroneckerBlock, PendingInverse]
    ) -> list[float]:
        """What this rank finds for layers; COMPUTED for those that other ranks invert."""
        local = {b: each for b, each in judged.items() if b in inverses.step_plan.to_invert}
        damped = inverses.compute_dampings(
            {block: block.ensure_factors() for block in local}, local
        )
        numbers: list[Tensor] = []
        for block, each in damped.items():
            before = inverses.states[block]
            like = each.mean_eigenvalue
            options = local[block].damping_option, before.damping_option
            four = like, before.mean_eigenvalue, *options
            numbers += [torch.as_tensor(n, dtype=like.dtype, device=like.device) for n in four]
        (listed,) = read_numbers(numbers)

        flags = dict.fromkeys(judged, COMPUTED)
        for i, block in enumerate(damped):
            trace, last_trace, option, last_option = listed[4 * i : 4 * i + 4]
            settled = block in self.stopped  # then only a schedule of the damping counts
            distance = 0.0 if settled else relative_change(trace, last_trace)
            if max(distance, relative_change(option, last_option)) <= self._upper:
                flags[block] = NOW_SETTLED if settled or distance < self._lower else SPARED
        return list(flags.values())

    @property
    def summary_line(self) -> str:
        """A part of a line of the summary."""
        layers = "1 layer" if len(self.stopped) == 1 else f"{len(self.stopped)} layers"
        skipped = f"{self.num_skipped} of {self.num_due} solves spared"
        return f"refresh by trace: {skipped}, {layers} settled"

    def saved(self, block: KroneckerBlock) -> dict[str, Any]:
        """What a checkpoint keeps of a layer."""
        return {SETTLED: int(block in self.stopped)}

    def load(self, saved: Mapping[Tensor, SavedPart], blocks: Iterable[KroneckerBlock]) -> None:
        """Take over which layers have settled."""
        self.stopped.clear()
        for block in blocks:
            part = saved.get(block.weight)
            if part is not None and SETTLED in part and part.whole(SETTLED, 0, 1):
                self.stopped.add(block)

"""The norm constraint on a step, at the learning rates and the bound of that step.

A bound that follows the batch is each layer's own, made of the number of examples in its last
statistics, on the device. What the ranks add up is then the change over the bound, and κ is 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.kfac.options import AUTO, KFACOptions, check_clip
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.clip import kl_change
from second_order.options import PEAK_LR, value_at

__all__ = ["Clip", "bound_for"]

USUAL_BATCH, USUAL_BOUND = 64.0, 1e-4  # examples, bound: digits of docs/tuning.md


def bound_for(examples: Tensor) -> Tensor:
    """κ for a batch: 1e-4 (N / 64)^1.5, N its examples, 64 where their number is unknown.

    The noise of a mean gradient falls with the batch, and with it the need to be careful. The power
    is measured: benchmarks/progress/batch_scaling.py.

    Args:
        examples: N, a scalar.
    """
    known = torch.where(examples > 0, examples, USUAL_BATCH)
    return USUAL_BOUND * (known / USUAL_BATCH) ** 1.5


class Clip:
    """The parts of ν = min(1, sqrt(κ / Σ lr² |P·∇|)) at a step: κ, and the change.

    Args:
        training: The training whose steps are clipped.
        options: The options, ``kl_clip`` among them.
        from_one: Whether a layer's statistics are of one rank's batch, and not of all ranks'.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        from_one: bool = False,
    ) -> None:
        self._training, self._options, self._from_one = training, options, from_one

    def bound(self) -> float | None:
        """κ, the bound on the change at this step; None for no clip."""
        if self._options.kl_clip == AUTO:
            return 1.0
        kl_clip: float | None = value_at(self._options.kl_clip, self._training.steps)
        if kl_clip is not None:
            check_clip(kl_clip)
        return kl_clip

    def parts(self, ranks: int, device: torch.device) -> list[Tensor]:
        """Zero scalars, one for each rank's part of the sum."""
        wide = torch.promote_types(self._options.inv_dtype, torch.float32)
        return list(torch.zeros(ranks, dtype=wide, device=device).unbind())

    def change(
        self, results: Mapping[KroneckerBlock, Tensor], gradients: Mapping[KroneckerBlock, Tensor]
    ) -> Tensor:
        """Σ lr² |P·∇| over layers, each over its κ where that follows the batch; 0 for none.

        Args:
            results: P, the preconditioned gradient, of each layer.
            gradients: ∇, the mean gradient, of each layer.
        """
        if not results:
            return torch.zeros(())
        # A constant bound is the bound at the schedule's largest lr and shrinks with lr² below it:
        # ν lr P would otherwise not depend on lr at all while the clip is active.
        which = "lr" if callable(self._options.kl_clip) else PEAK_LR
        groups = {id(p): group for group in self._training.groups for p in group["params"]}
        rates = [groups[id(block.weight)][which] for block in results]
        if self._options.kl_clip == AUTO:
            batches = self._training.world.size if self._from_one else 1
            rates = [
                rate / bound_for(block.ensure_factors().examples * batches).sqrt()
                for rate, block in zip(rates, results, strict=True)
            ]
        return kl_change(list(results.values()), [gradients[b] for b in results], rates)

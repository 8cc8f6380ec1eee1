"""The norm constraint on a step, at the learning rates and the bound of that step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.kfac.options import KFACOptions, check_clip
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.clip import kl_change
from second_order.options import PEAK_LR, value_at

__all__ = ["Clip"]


class Clip:
    """What ν = min(1, sqrt(κ / Σ lr² |P·∇|)) is made of at a step."""

    def __init__(self, training: Training, options: KFACOptions) -> None:
        self._training, self._options = training, options

    def bound(self) -> float | None:
        """κ at this step; None for no clip."""
        kl_clip: float | None = value_at(self._options.kl_clip, self._training.steps)
        if kl_clip is not None:
            check_clip(kl_clip)
        return kl_clip

    def parts(self, ranks: int, device: torch.device) -> list[Tensor]:
        """A zero for each rank's part of the sum."""
        wide = torch.promote_types(self._options.inv_dtype, torch.float32)
        return list(torch.zeros(ranks, dtype=wide, device=device).unbind())

    def change(
        self, results: Mapping[KroneckerBlock, Tensor], gradients: Mapping[KroneckerBlock, Tensor]
    ) -> Tensor:
        """Σ lr² |P·∇| over layers; a scalar, 0 for none.

        Args:
            results: P of each layer.
            gradients: ∇ of each.
        """
        if not results:
            return torch.zeros(())
        # A constant bound is the bound at the schedule's largest lr and shrinks with lr² below it:
        # ν lr P would otherwise not depend on lr at all while the clip is active.
        which = "lr" if callable(self._options.kl_clip) else PEAK_LR
        groups = {id(p): group for group in self._training.groups for p in group["params"]}
        rates = [groups[id(block.weight)][which] for block in results]
        return kl_change(list(results.values()), [gradients[b] for b in results], rates)

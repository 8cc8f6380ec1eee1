"""The norm constraint on a step, at the learning rates and the bound of that step.

A bound that follows the batch is made of the number of examples in an update of the factors, on the
device. What the ranks add up is then the change over the bound, and κ is 1.

Sources: Pauloski et al. 2022, section 5.1; Ba et al. 2017, eq. 14.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.kfac.options import AUTO, KFACOptions, check_clip
from second_order.kronecker.block import KroneckerBlock
from second_order.options import PEAK_LR, value_at

__all__ = ["USUAL_BATCH", "Clip", "bound_for", "kl_change", "kl_clip_coefficient"]

USUAL_BATCH, USUAL_BOUND = 64.0, 1e-4  # what serves the digits best: docs/defaults.md, "The clip"
USUAL_LR = 0.1  # at a lower rate steps are shorter, by the root of the rate: lowering it helps


def kl_change(
    preconditioned: Sequence[Tensor],
    gradients: Sequence[Tensor],
    learning_rates: Sequence[float | Tensor],
) -> Tensor:
    """Σ lr² |P·∇| over layers, which estimates how far a step moves the model's predictions.

    lr² Σ P·∇ estimates twice the KL divergence between the model before and after the step. A layer
    whose product is not finite does not count, so that it spoils no other.

    Args:
        preconditioned: P of each layer, any shapes; at least one.
        gradients: ∇ of each layer, shapes as in ``preconditioned``.
        learning_rates: lr of each layer's parameter group, at this step.

    Returns:
        A scalar on the layers' device; nothing waits for it.
    """
    terms = [
        torch.linalg.vecdot(p.flatten(), g.flatten()).abs() * lr**2
        for p, g, lr in zip(preconditioned, gradients, learning_rates, strict=True)
    ]
    products = torch.stack([term.to(terms[0].device, terms[0].dtype) for term in terms])
    return torch.where(torch.isfinite(products), products, 0.0).sum()


def kl_clip_coefficient(change: Tensor, kl_clip: float) -> Tensor:
    """ν = min(1, sqrt(κ / Σ lr² |P·∇|)), which bounds the change by κ.

    Args:
        change: Σ lr² |P·∇|, from :func:`kl_change`.
        kl_clip: κ, the bound.
    """
    return torch.sqrt(kl_clip / change).clamp(max=1.0)


def bound_for(examples: Tensor) -> Tensor:
    """κ for a batch: 1e-4 (N / 64)^1.5, N its examples, 64 where their number is unknown.

    The noise of a mean gradient falls with the batch, and with it the need to be careful. The power
    is measured: benchmarks/progress/batch_scaling.py.

    Args:
        examples: N, of any shape.
    """
    known = torch.where(examples > 0, examples, USUAL_BATCH)
    return USUAL_BOUND * (known / USUAL_BATCH) ** 1.5


class Clip:
    """The parts of ν = min(1, sqrt(κ / Σ lr² |P·∇|)) at a step: κ, and the change.

    Args:
        training: The training whose steps are clipped.
        options: The options, ``kl_clip`` among them.
        counted: Whose batches go into a layer's statistics: those of "all" processes that train, of
            "one" of them, or those of "helpers", which say nothing of the training's own.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        counted: Literal["all", "one", "helpers"] = "all",
    ) -> None:
        self._training, self._options, self._counted = training, options, counted

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
        self,
        results: Mapping[KroneckerBlock, Tensor],
        gradients: Mapping[KroneckerBlock, Tensor],
        among: Sequence[KroneckerBlock] = (),
    ) -> Tensor:
        """Σ lr² |P·∇| over layers, over κ where that follows the batch; 0 for none.

        Args:
            results: P, the preconditioned gradient, of each layer.
            gradients: ∇, the mean gradient, of each layer.
            among: The layers whose batches κ follows; none for those of ``results``.
        """
        if not results:
            return torch.zeros(())
        # A constant bound is the bound at the schedule's largest lr and shrinks with lr² below it:
        # ν lr P would otherwise not depend on lr at all while the clip is active.
        which = "lr" if callable(self._options.kl_clip) else PEAK_LR
        groups = {id(p): group for group in self._training.groups for p in group["params"]}
        rates = [groups[id(block.weight)][which] for block in results]
        if self._options.kl_clip == AUTO:
            rates = list(map(_raised, rates))
        before = [gradients[block] for block in results]
        change = kl_change(list(results.values()), before, rates)
        if self._options.kl_clip != AUTO:
            return change
        return change / self._bound_for_batch(among or list(results)).to(change)

    def _bound_for_batch(self, blocks: Iterable[KroneckerBlock]) -> Tensor:
        """κ for the batches of a step: for the layer that sees most, as others see a few rows."""
        if self._counted == "helpers":
            return torch.tensor(USUAL_BOUND)
        counts = [block.ensure_factors().examples for block in blocks]
        examples = torch.stack([count.to(counts[0].device) for count in counts]).max()
        return bound_for(examples * (self._training.world.size if self._counted == "one" else 1))


def _raised(lr: float | Tensor) -> float | Tensor:
    """The rate by which "auto" reckons: below 0.1 the geometric mean of the two."""
    if isinstance(lr, Tensor):
        return torch.where(lr < USUAL_LR, (lr * USUAL_LR).sqrt(), lr)
    return math.sqrt(lr * USUAL_LR) if lr < USUAL_LR else lr

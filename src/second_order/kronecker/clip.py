"""The norm constraint on a preconditioned step.

Sources: Pauloski et al. 2022, section 5.1; Ba et al. 2017, eq. 14.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["kl_change", "kl_clip_coefficient"]


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

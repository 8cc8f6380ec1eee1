"""Doubly factored Linears, which are fed by flattened feature maps (Ba et al. 2017, section 4).

An example's input is a matrix, channels by locations. Its best approximation of rank one is ψ κᵀ,
by the first singular triple, with √σ on each side: F ≈ E[ψψᵀ] ⊗ E[κκᵀ] ⊗ E[ddᵀ], kept as A, L and
G. It does not reduce to plain K-FAC where there is one location, as inputs are not averaged over
examples before they are squared but after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from second_order.kronecker.layers import FactorShape, Linear, PairOptions, PairStatistics, gram

__all__ = ["DoublyFactored", "rank_one"]


def rank_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """ψ and κ of the best approximations ψ κᵀ, by eigenvectors of the smaller second moment.

    Of ``(N, channels, locations)`` they are ``(N, channels)`` and ``(N, locations)``, each of norm
    √σ, σ the largest singular value.
    """
    _, channels, locations = x.shape
    if channels < locations:
        kappa, psi = rank_one(x.mT)
        return psi, kappa
    # Divided by its size, so that squares stay in range.
    size = x.abs().amax((1, 2), keepdim=True)
    scaled = x / torch.where(size > 0, size, 1.0)
    _, vectors = torch.linalg.eigh(scaled.mT @ scaled)
    right = vectors[..., -1:]
    left = scaled @ right
    sigma = torch.linalg.vector_norm(left, dim=1, keepdim=True)
    left = left / torch.where(sigma > 0, sigma, 1.0)
    root = (sigma * size).sqrt()
    return (left * root).squeeze(-1), (right * root).squeeze(-1)


@dataclass(frozen=True)
class DoublyFactored(Linear):
    """A Linear's weight, of so many locations; its bias has a block of its own.

    ``nn.Flatten`` makes the input of (channels, locations).
    """

    locations: int = 0
    separate_bias_reason = "doubly factored"
    multiplies_rows = False

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        """Sizes of the factors, those of A and L by the channels and the locations."""
        return replace(super().shape(module, False), locations=self.locations)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Sums of ψψᵀ, ddᵀ and κκᵀ over the rows of a pair."""
        maps = options.row_mask.apply(x.reshape(-1, x.shape[-1] // self.locations, self.locations))
        # Inputs that are not finite fail in eigh; the statistics drop them.
        finite = torch.isfinite(maps).flatten(1).all(1)
        psi, kappa = rank_one(torch.where(finite[:, None, None], maps, 0.0))
        psi = torch.where(finite[:, None], psi, torch.nan)
        parts = {"A": psi, "G": d.reshape(-1, d.shape[-1]), "L": kappa}
        factors = {letter: gram(part.unsqueeze(0)) for letter, part in parts.items()}
        return PairStatistics(factors, options.row_mask.count)

"""Doubly factored Linears, whose input is a flattened feature map.

The input of an example is a matrix of channels by locations. Its best rank-one
approximation is ψ κᵀ, which splits the largest singular value σ evenly: ψ and κ have
the norm √σ. The block is

    F ≈ E[ψ ψᵀ] ⊗ E[κ κᵀ] ⊗ E[d dᵀ], stored as A, L and G.

With one location the block is not that of K-FAC: ‖κ‖² = σ is averaged separately from
ψ ψᵀ.

Source: Ba et al. 2017, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from second_order.kronecker.layers import (
    FactorShape,
    Linear,
    PairOptions,
    PairStatistics,
    gram,
    linear_rows,
)

__all__ = ["DoublyFactored", "rank_one"]


def rank_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the best rank-one approximations ψ κᵀ of a batch of matrices.

    Args:
        x: ``(N, channels, locations)``, all finite.

    Returns:
        ψ ``(N, channels)`` and κ ``(N, locations)``, both of norm √σ, where σ is the
        largest singular value.
    """
    _, channels, locations = x.shape
    if channels < locations:
        kappa, psi = rank_one(x.mT)
        return psi, kappa

    # Scale each matrix to the size 1, so that its squares do not overflow or underflow.
    size = x.abs().amax((1, 2), keepdim=True)
    scaled = x / torch.where(size > 0, size, 1.0)

    # The right singular vector is an eigenvector of the smaller second moment.
    _, vectors = torch.linalg.eigh(scaled.mT @ scaled)
    right = vectors[..., -1:]
    left = scaled @ right
    sigma = torch.linalg.vector_norm(left, dim=1, keepdim=True)
    left = left / torch.where(sigma > 0, sigma, 1.0)
    root = (sigma * size).sqrt()
    return (left * root).squeeze(-1), (right * root).squeeze(-1)


@dataclass(frozen=True)
class DoublyFactored(Linear):
    """A Linear whose input was flattened from ``(channels, locations)``.

    Its bias has its own block.
    """

    locations: int = 0
    separate_bias_reason = "doubly factored"
    multiplies_rows = False

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        """Sizes of the factors: A has one row per channel, L one per location."""
        return replace(super().shape(module, False), locations=self.locations)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Sum ψ ψᵀ, d dᵀ and κ κᵀ over the rows of a pair."""
        x, d, row_mask = linear_rows(x, d, options)
        channels = x.shape[-1] // self.locations
        maps = x.reshape(-1, channels, self.locations)

        # eigh raises for non-finite inputs. Pass zeros, and restore NaN for the
        # statistics to drop.
        is_finite = torch.isfinite(maps).flatten(1).all(1)
        psi, kappa = rank_one(torch.where(is_finite[:, None, None], maps, 0.0))
        psi = torch.where(is_finite[:, None], psi, torch.nan)

        factors = {
            "A": gram(psi.unsqueeze(0)),
            "G": gram(d.unsqueeze(0)),
            "L": gram(kappa.unsqueeze(0)),
        }
        return PairStatistics(factors, row_mask.count)

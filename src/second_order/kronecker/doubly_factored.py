"""Linears fed by flattened feature maps, with two small factors in place of A (Ba et al. 2017, 4).

An example's input is a matrix, channels by locations. Its best approximation of rank one is ψ κᵀ,
by the first singular triple, with √σ on each side: F ≈ E[ψψᵀ] ⊗ E[κκᵀ] ⊗ E[ddᵀ], kept as A, L and
G. It does not reduce to plain K-FAC where there is one location, as inputs are not averaged over
examples before they are squared but after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.layers import (
    Approximation,
    FactorShape,
    PairStatistics,
    gram,
    live_rows,
)

__all__ = ["DoublyFactoredBlock", "rank_one"]


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


class DoublyFactoredBlock(KroneckerBlock):
    """A Linear's weight; its bias has a block of its own.

    ``locations`` is their number T; ``nn.Flatten`` makes the input of (channels, locations).
    """

    def __init__(
        self,
        names: Sequence[str],
        modules: Sequence[nn.Module],
        locations: int,
        factor_dtype: torch.dtype,
        triangular: bool,
    ) -> None:
        self.locations = locations
        super().__init__(names, modules, None, factor_dtype, triangular)

    def _current_shape(self) -> FactorShape:
        out_dim, in_dim = self.weight.shape
        return FactorShape(1, in_dim, out_dim, locations=self.locations)

    def statistics(
        self,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        approximation: Approximation,
        dtype: torch.dtype,
        known: PairStatistics | None = None,
    ) -> PairStatistics:
        """Sums of ψψᵀ, ddᵀ and κκᵀ over the rows of a pair."""
        dtype = torch.promote_types(dtype, torch.float32)
        rows = d.to(dtype).reshape(-1, d.shape[-1])
        live = live_rows(rows)
        maps = live.pick(x.to(dtype).reshape(-1, self.shape.dims["A"], self.locations))
        # Inputs that are not finite fail in eigh; the statistics drop them.
        finite = torch.isfinite(maps).flatten(1).all(1)
        psi, kappa = rank_one(torch.where(finite[:, None, None], maps, 0.0))
        psi = torch.where(finite[:, None], psi, torch.nan)
        packed = self.staged.triangular
        parts = {"A": psi, "G": live.pick(rows), "L": kappa}
        factors = {letter: gram(part[None], False, packed) for letter, part in parts.items()}
        return PairStatistics(factors, live.count, len(rows))

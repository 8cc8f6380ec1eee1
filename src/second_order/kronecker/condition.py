"""How well conditioned a layer's damped curvature block is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.solvers import EigenInverse, FactoredInverse
from second_order.kronecker.triangles import unpack_upper_triangular

__all__ = ["condition_estimate", "largest_eigenvalue"]

ITERATIONS = 12  # of the power method: within some per cent where the spectrum decays


def largest_eigenvalue(matrices: Tensor) -> Tensor:
    """The largest eigenvalue of each positive semi-definite ``(groups, n, n)``, from below.

    These are Rayleigh quotients after a few iterations of the power method.
    """
    x = matrices.diagonal(dim1=-2, dim2=-1).abs().unsqueeze(-1) + 1e-6  # large where they are
    for _ in range(ITERATIONS):
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        y = matrices @ x
        quotients: Tensor = (x.mT @ y).flatten()
        x = y
    return quotients


def condition_estimate(block: KroneckerBlock) -> Tensor | None:
    """The condition number of the damped block that the inverse in use inverts; a scalar.

    Of eigenvalues it is exact. Of inverses it is the product over factors of the largest eigenvalue
    of the factor, as it is now, and that of its inverse, by the power method; where the factor is
    kept elsewhere, its trace stands for the largest eigenvalue. None without an inverse here.
    """
    inverse = block.inverse
    if isinstance(inverse, EigenInverse):
        scale = inverse.scale.flatten(1)
        least = torch.where(scale > 0, scale, math.inf).amin(1)  # 0: without curvature or damping
        return (scale.amax(1) / least).max()
    if not isinstance(inverse, FactoredInverse):
        return None
    product: Tensor | float = 1.0
    for letter, stored in inverse.inverses.items():
        kept = stored
        if letter == "G" and inverse.times is not None:
            kept = stored / inverse.times
        if block.shape.is_diagonal(letter):
            product = product * (kept.amax(1) / kept.amin(1))
        else:
            product = product * _factor_condition(block, letter, kept)
    assert isinstance(product, Tensor)
    return product.max()


def _factor_condition(block: KroneckerBlock, letter: str, kept: Tensor) -> Tensor:
    dim, factors = block.shape.dim(letter), block.ensure_factors()
    whole = kept if kept.dim() == 3 else unpack_upper_triangular(kept, dim)
    if factors.stored[letter] is None:
        largest = factors.means[block.shape.letters.index(letter)] * dim
    else:
        largest = largest_eigenvalue(factors.matrix(letter, whole.dtype))
    return (largest * largest_eigenvalue(whole)).clamp_min(1.0)

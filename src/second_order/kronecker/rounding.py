"""Positive definite matrices in a narrow dtype."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["round_definite", "round_to"]


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round each number to one that a narrower dtype has; the result has the dtype of ``x``."""
    return x.to(dtype).to(x.dtype)


def round_definite(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Round symmetric matrices to ones that are at least as large, M̂ ⪰ M.

    Numbers off the diagonal are rounded to the nearest. That changes M by E. The diagonal grows by
    Σ_j |E_ij|, and is rounded up: M̂ - M is then diagonally dominant, and so without negative
    eigenvalues (Golub & Van Loan 2013, section 4.1.1). Rounding alone would leave a matrix whose
    condition number is above some 2⁸ with negative ones.

    Args:
        matrix: M, shape ``(groups, n, n)``.
        dtype: A narrower dtype.

    Returns:
        M̂, in the dtype of ``matrix``.
    """
    rounded = round_to(matrix, dtype)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    error = (rounded - matrix).abs_()
    error.diagonal(dim1=-2, dim2=-1).zero_()
    raised = diagonal + error.sum(-1)
    narrow = raised.to(dtype)
    infinity = torch.full_like(narrow, torch.inf)
    above = torch.where(narrow.to(raised.dtype) < raised, narrow.nextafter(infinity), narrow)
    rounded.diagonal(dim1=-2, dim2=-1).copy_(above)
    return rounded

"""Definite matrices stay definite in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from second_order.kronecker.solvers import round_definite, round_to

BF16 = torch.bfloat16


def ill_conditioned(n: int, groups: int = 2) -> Tensor:
    """Inverses of matrices with eigenvalues 1 to 10^6."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(groups, n, n, generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(x).Q
    return q @ torch.diag_embed(torch.logspace(-6, 0, n, dtype=torch.float64)) @ q.mT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [1, 2, 17, 60])
def test_a_rounded_matrix_is_at_least_the_matrix(n: int, dtype: torch.dtype) -> None:
    matrix = ill_conditioned(n).to(dtype)
    matrix = (matrix + matrix.mT) / 2
    rounded = round_definite(matrix, BF16)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, round_to(rounded, BF16)), "numbers that bfloat16 has"
    assert torch.equal(rounded, rounded.mT)
    excess = rounded.double() - matrix.double()
    assert float(torch.linalg.eigvalsh(excess).min()) > -1e-12
    off = excess - torch.diag_embed(excess.diagonal(dim1=-2, dim2=-1))
    assert bool((off.abs() <= 2.0**-8 * matrix.double().abs()).all())
    if n >= 17:  # the negative control
        assert float(torch.linalg.eigvalsh(round_to(matrix, BF16).double()).min()) < 0
        assert float(torch.linalg.eigvalsh(rounded.double()).min()) > 0

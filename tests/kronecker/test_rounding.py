"""Definite matrices stay definite in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from second_order.kronecker.solvers import SOLVERS, round_definite, round_to
from second_order.kronecker.triangles import pack_upper_triangular

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


def test_every_solver_rounds_what_it_sends_in_every_form() -> None:
    matrix = ill_conditioned(12)
    matrix = (matrix + matrix.mT) / 2
    expected = round_definite(matrix, BF16)
    inverse, eigen = SOLVERS["inverse"], SOLVERS["eigen"]
    assert torch.equal(inverse.rounded((matrix,), False, BF16)[0], expected)
    (packed,) = inverse.rounded((pack_upper_triangular(matrix),), False, BF16)
    assert torch.equal(packed, pack_upper_triangular(expected))
    # A diagonal of 78 = 12 · 13 / 2 entries is no triangle.
    diagonal = torch.rand(1, 78, dtype=torch.float64)
    assert torch.equal(inverse.rounded((diagonal,), True, BF16)[0], round_to(diagonal, BF16))
    values, vectors = torch.linalg.eigh(matrix)
    for part, rounded in zip(
        (vectors, values), eigen.rounded((vectors, values), False, BF16), strict=True
    ):
        assert torch.equal(rounded, round_to(part, BF16))
        assert not torch.equal(rounded, part)

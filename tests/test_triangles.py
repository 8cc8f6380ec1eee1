"""Symmetric matrices as triangles: nothing is lost, and half is saved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from second_order.kronecker.triangles import (
    pack_upper_triangular,
    packed_length,
    packed_trace,
    unpack_upper_triangular,
)

BATCHES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])


def symmetric(batch: tuple[int, ...], n: int, dtype: torch.dtype) -> torch.Tensor:
    matrix = torch.randint(-8, 8, (*batch, n, n)).to(dtype)
    return matrix + matrix.mT


@given(BATCHES, st.integers(1, 17), DTYPES)
def test_packing_and_back_is_the_identity(
    batch: tuple[int, ...], n: int, dtype: torch.dtype
) -> None:
    matrix = symmetric(batch, n, dtype)
    packed = pack_upper_triangular(matrix)
    assert packed.shape == (*batch, n * (n + 1) // 2)
    assert packed.dtype == dtype
    assert packed.is_contiguous()
    assert torch.equal(unpack_upper_triangular(packed, n), matrix)


@given(BATCHES, st.integers(1, 17), DTYPES)
def test_unpacking_and_back_is_the_identity(
    batch: tuple[int, ...], n: int, dtype: torch.dtype
) -> None:
    """Any vector of the right length is some symmetric matrix: no element is stored twice."""
    packed = torch.randint(-8, 8, (*batch, packed_length(n))).to(dtype)
    matrix = unpack_upper_triangular(packed, n)
    assert torch.equal(matrix, matrix.mT)
    assert torch.equal(pack_upper_triangular(matrix), packed)


@given(BATCHES, st.integers(1, 17))
def test_the_triangle_holds_each_element_once(batch: tuple[int, ...], n: int) -> None:
    rows, columns = torch.triu_indices(n, n)
    matrix = symmetric(batch, n, torch.float64)
    expected = matrix[..., rows, columns].sort(-1).values
    assert torch.equal(pack_upper_triangular(matrix).sort(-1).values, expected)


@given(BATCHES, st.integers(1, 17), DTYPES)
def test_the_trace_needs_no_unpacking(batch: tuple[int, ...], n: int, dtype: torch.dtype) -> None:
    matrix = symmetric(batch, n, dtype)
    expected = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert torch.equal(packed_trace(pack_upper_triangular(matrix), n), expected)


@given(BATCHES, st.integers(1, 17))
def test_memory_layout_of_the_matrix_does_not_matter(batch: tuple[int, ...], n: int) -> None:
    matrix = symmetric(batch, n, torch.float64)
    strided = torch.zeros(*batch, 2 * n, 3 * n, dtype=torch.float64)[..., ::2, ::3]
    strided.copy_(matrix)
    assert torch.equal(pack_upper_triangular(strided), pack_upper_triangular(matrix))


@pytest.mark.parametrize(("dim", "length"), [(0, 0), (1, 1), (2, 3), (3, 6), (10, 55)])
def test_lengths(dim: int, length: int) -> None:
    assert packed_length(dim) == length


@pytest.mark.parametrize("length", [5, 7])
def test_a_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"dimension 3 has 6 elements, got {length}"):
        unpack_upper_triangular(torch.zeros(2, length), 3)

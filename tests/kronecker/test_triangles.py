"""Symmetric matrices as triangles: nothing is lost, and half is saved."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from second_order.kronecker import triangles
from second_order.kronecker.triangles import (
    empty_symmetric,
    pack_from_upper,
    pack_upper_triangular,
    packed_trace,
    times_packed,
    unpack_upper_triangular,
    write_band,
    write_last_row,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCHES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])


@pytest.fixture(scope="module", params=["gathered", "by blocks"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """How small matrices are packed and unpacked; the layout is the same."""
    limit = 320 if request.param == "gathered" else 0
    with patch.object(triangles, "GATHERED_UP_TO", limit):
        yield


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


@given(BATCHES, st.integers(1, 17))
def test_the_upper_triangle_is_all_that_is_read(batch: tuple[int, ...], n: int) -> None:
    matrix = symmetric(batch, n, torch.float64)
    torn = matrix.masked_fill(torch.ones(n, n, dtype=torch.bool).tril(-1), float("nan"))
    assert torch.equal(pack_from_upper(torn), pack_upper_triangular(matrix))


@given(BATCHES, st.integers(1, 17), DTYPES)
def test_the_trace_needs_no_unpacking(batch: tuple[int, ...], n: int, dtype: torch.dtype) -> None:
    matrix = symmetric(batch, n, dtype)
    expected = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert torch.equal(packed_trace(pack_upper_triangular(matrix), n), expected)


@given(
    data=st.data(),
    groups=st.integers(1, 3),
    n=st.integers(1, 17),
    triangular=st.booleans(),
    last_apart=st.booleans(),
)
def test_bands_of_rows_make_the_matrix(
    data: st.DataObject, groups: int, n: int, triangular: bool, last_apart: bool
) -> None:
    """Of any heights and in any order, into memory that holds anything; each element is written."""
    matrix = symmetric((groups,), n, torch.float64)
    target = empty_symmetric(matrix, groups, n, triangular).fill_(float("nan"))
    size = n - 1 if last_apart else n
    cuts = data.draw(st.sets(st.integers(1, size - 1) if size > 1 else st.nothing()), "cuts")
    edges = [0, *sorted(cuts), size] if size else [0]
    for start, stop in data.draw(st.permutations(list(itertools.pairwise(edges))), "order"):
        write_band(target, n, start, matrix[:, start:stop, start:size])
    if last_apart:
        write_last_row(target, n, matrix[:, -1])
    assert torch.equal(target, pack_upper_triangular(matrix) if triangular else matrix)


@given(
    groups=st.integers(0, 3),
    m=st.integers(1, 6),
    n=st.integers(1, 17),
    mirror_block=st.sampled_from([1, 3, 100]),
)
def test_a_packed_matrix_multiplies(groups: int, m: int, n: int, mirror_block: int) -> None:
    """By halves; exact, as the elements are small integers."""
    matrix = symmetric((groups,), n, torch.float64)
    packed = pack_upper_triangular(matrix)
    before = packed.clone()
    left = symmetric((groups,), max(m, n), torch.float64)[:, :m, :n]
    with patch.object(triangles, "MIRROR_BLOCK", mirror_block):
        assert torch.equal(times_packed(left, packed), left @ matrix)
        assert torch.equal(unpack_upper_triangular(packed, n), matrix)
    assert torch.equal(packed, before)

"""Symmetric matrices as triangles: nothing is lost, and half is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from second_order.kronecker import storage
from second_order.kronecker.storage import (
    pack_upper_triangular,
    unpack_upper_triangular,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCHES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])


@pytest.fixture(scope="module", params=["gathered", "by blocks"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """How small matrices are packed and unpacked; the layout is the same."""
    limit = 320 if request.param == "gathered" else 0
    with patch.object(storage, "GATHERED_UP_TO", limit):
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

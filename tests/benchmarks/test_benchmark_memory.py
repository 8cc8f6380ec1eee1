"""The bytes that the benchmark of memory counts are those that an optimizer allocates."""

from __future__ import annotations

import pytest

import memory

FLOAT = 4


@pytest.mark.parametrize("name", memory.OPTIMIZERS)
def test_all_tensors_that_remain_are_counted(name: str) -> None:
    row = memory.measure("language", name, rank=0)
    lookup_tables = 0.7 * row.parameters
    counted = row.state + row.last_step
    assert counted - 1000 <= row.allocated <= counted + lookup_tables


def test_momentum_is_one_number_per_parameter_and_adam_has_two() -> None:
    sgd, adamw = (memory.measure("language", name, rank=0) for name in ("SGD", "AdamW"))
    assert sgd.per_parameter() == FLOAT
    assert adamw.per_parameter() == pytest.approx(2 * FLOAT, abs=0.01)
    assert (adamw.factors, adamw.inverses, adamw.last_step) == (0, 0, 0)


def test_half_the_bytes_of_a_factor_are_in_its_triangle_or_in_bfloat16() -> None:
    soap, kaisa, narrow = (
        memory.measure("language", name, rank=0)
        for name in ("SOAP", "KAISA over AdamW", "KAISA over AdamW, bfloat16 factors")
    )
    assert kaisa.factors == pytest.approx(soap.factors / 2, rel=0.05)
    assert narrow.factors == pytest.approx(kaisa.factors / 2, rel=0.01)
    assert narrow.inverses == kaisa.inverses


def test_each_of_four_ranks_has_a_part_of_the_matrices() -> None:
    whole = memory.measure("language", "KAISA over AdamW", rank=0)
    parts = [memory.measure("language", "KAISA over AdamW, 4 ranks", rank) for rank in range(4)]
    assert sum(part.factors for part in parts) == whole.factors
    assert sum(part.inverses for part in parts) == pytest.approx(whole.inverses, rel=0.1)
    assert {part.elementwise for part in parts} == {whole.elementwise}

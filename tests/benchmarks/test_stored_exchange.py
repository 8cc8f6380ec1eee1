"""The stored runs of exchanges in the backward pass and in bfloat16, and the page about them."""

from __future__ import annotations

import pytest
from stored import stored

import exchange_tables


@pytest.mark.parametrize("name", exchange_tables.TABLES)
def test_the_page_has_the_table_of_the_stored_run(name: str) -> None:
    table = exchange_tables.stored(name)
    page = exchange_tables.PAGE.read_text()
    assert "\n".join(table) in page
    assert exchange_tables.replaced(page, table) == page
    changed = [*table[:-1], "| other |"]
    assert exchange_tables.replaced(exchange_tables.replaced(page, changed), table) == page


def test_what_leaves_in_the_backward_pass_is_not_waited_for() -> None:
    rows = stored("pipelined")["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["apart"] < 0.01
        if row["dtype"] == "float32" and row["network"] != "fast":
            assert row["pipelined"]["waited"] < row["all_reduce"]["waited"]
            assert row["ratio"] < 1


def test_bfloat16_takes_half_the_bytes_and_little_of_the_accuracy() -> None:
    rows = stored("exchange_dtype")["rows"]
    assert len(rows) == 3 * 2 * 2 * 3
    for row in rows:
        assert row["failed"] == 0
        exact, narrow = row["bytes"]["sums"]
        assert exact / 2 <= narrow < 0.51 * exact
        if row["kind"] == "both":
            exact, narrow = row["bytes"]["decompositions"]
            assert exact / 2 <= narrow < 0.51 * exact
            assert row["last"]["median"] < 0.05
            if row["damping"] == 0.5:
                assert row["last"]["worst"] < 0.06

"""The page of sharded models says what the stored run has measured, which is what formulas say."""

from __future__ import annotations

import math

import pytest
from stored import number, rows, stored

PAGE, MIB = "docs/fsdp.md", 2**20
KEPT = ("parameters", "base", "factors", "inverses", "sent")
PAIRS = ("parameters", "base", "eigenvectors", "sums", "sent")


def run() -> dict[str, dict[str, float]]:
    return {f"{row['system']}, {row['how']}": row for row in stored("sharded")["rows"]}


def test_tables_are_of_the_stored_run() -> None:
    found = run()
    shown = (rows(PAGE, "", "parameters"), KEPT), (rows(PAGE, "eigenpairs"), PAIRS)
    seen = 0
    for table, keys in shown:
        for name, cells in table.items():
            key = name.replace('`factor_exchange="reduce"`', "reduce")
            for column, cell in zip(keys, cells, strict=True):
                assert number(cell) == pytest.approx(found[key][column] / MIB, abs=0.006), name
            seen += 1
    assert seen == len(found)


def test_a_process_keeps_and_sends_a_part_of_what_is_sharded() -> None:
    """Up to rows, which are not cut, on four processes."""
    found = run()
    whole, part = found["DHO2, DDP"], found["DHO2, FSDP2"]
    assert part["parameters"] == pytest.approx(whole["parameters"] / 4, rel=0.01)
    assert part["base"] == pytest.approx(2 * part["parameters"], rel=0.001)
    for name, row in found.items():
        assert all(math.isfinite(row[key]) for key in ("parameters", "base", "sent")), name

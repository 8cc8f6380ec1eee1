"""The measurements on the pages of DHO2, MRDHO2 and Lanczos are those of the stored runs."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

import pytest
from stored_runs import median, number, numbers, only, rows, steps_of, stored, text_of

GOALS = {
    "frozen body, linear head": "linear head",
    "frozen body, two-layer head": "two-layer head",
    "Poisson PINN": "PINN",
    "deep autoencoder": "autoencoder",
    "GRU": "GRU",
    "linear head, cached features": "cached features",
}


def test_the_trust_region_prevents_diverged_runs() -> None:
    table = rows("docs/concepts/dho2.md", "task, eigenpairs", "training runs")
    assert sum(int(cells[0]) for cells in table.values()) == 50
    for label, cells in table.items():
        of = only(stored("bounded")["runs"], task=label.partition(",")[0])
        bounded, free = (
            [(run["worst"] or math.inf) / run["first"] for run in only(of, trust_region=on)]
            for on in (True, False)
        )
        counts = [len(bounded), *(sum(share > 10 for share in each) for each in (bounded, free))]
        assert [int(cell) for cell in cells[:3]] == counts
        assert float(cells[3]) == pytest.approx(max(bounded), abs=0.051)


def test_seconds_that_dho2_gains_by_task() -> None:
    runs = stored("fosi_gain")["runs"]
    table = rows("docs/concepts/dho2.md", "task, target", "seeds")
    assert {GOALS[label.partition(":")[0]] for label in table} == {run["name"] for run in runs}
    for label, (seeds, *cells) in table.items():
        of = only(runs, name=GOALS[label.partition(":")[0]])
        adam, dho2 = pairs = [only(of, optimizer=name) for name in ("Adam", "DHO2")]
        assert [run["seed"] for run in adam] == [run["seed"] for run in dho2]
        assert len(adam) == int(seeds)
        for cell, pair in zip(cells, pairs, strict=False):
            assert steps_of(cell) == median(run["steps"] for run in pair)
            seconds = statistics.median(run["seconds"] for run in pair)
            assert float(cell.split()[-2]) == pytest.approx(seconds, abs=0.0051)
        for cell, key in zip(cells[2:], ("total_steps", "seconds"), strict=True):
            ratios = [dho2_run[key] / base[key] for base, dho2_run in zip(adam, dho2, strict=True)]
            expected = [statistics.median(ratios), min(ratios), max(ratios)]
            assert numbers(cell) == pytest.approx(expected, abs=0.0051), label
    adam = only(runs, name="PINN", optimizer="Adam")
    met = sum(run["steps"] is not None for run in adam)
    sentence = f"Adam reaches the target on {met} of {len(adam)} seeds"
    assert sentence in text_of("docs/concepts/dho2.md")


def test_curvature_agrees_with_curvlinops() -> None:
    records = {record["task"]: record for record in stored("curvature_rivals")["records"]}
    table = rows("docs/concepts/spectra.md", "estimate", "products", "ms", "error")
    assert table.keys() == records.keys()
    for label, cells in table.items():
        record: dict[str, Any] = records[label]
        for who, (products, ms, error) in (("ours", cells[:3]), ("theirs", cells[3:6])):
            assert number(products) == record[who]["products"], label
            milliseconds = 1000 * statistics.median(record[who]["seconds"])
            assert float(ms) == pytest.approx(milliseconds, abs=0.51), label
            assert error == format_error(record[who].get("error")), label
        assert cells[6] == format_error(record.get("difference")), label


def format_error(error: float | None) -> str:
    """0.0123 -> '0.012', 1.23e-9 -> '1e-9'."""
    if error is None:
        return ""
    return f"{error:.2g}" if error >= 1e-4 else re.sub(r"e-0?", "e-", f"{error:.0e}")

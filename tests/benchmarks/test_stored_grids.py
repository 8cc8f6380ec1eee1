"""The tables of refreshes by trace and of the papers' grids are those of the stored runs."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from stored import Runs, median, only, rows, stored, text_of

PAGE = "docs/defaults.md"


def median_steps(runs: Runs, **entries: Any) -> float:
    """Of the three seeds with these entries."""
    of = only(runs, **entries)
    assert len({run["seed"] for run in of}) == len(of) == 3, entries
    return median(run["steps"] for run in of)


def test_what_refreshes_by_trace_spare() -> None:
    runs = stored("trace_refresh")["runs"]
    assert "spares seven solves of ten" in text_of(PAGE)
    for name in ("digits MLP", "digits conv", "language, width 64"):
        of = only(runs, task=name, setting="trace 0.1, 0")
        middle = statistics.median(run["solves"] for run in of)
        assert 0.65 < 1 - middle / of[0]["due"] < 0.75
        assert median_steps(of) <= median_steps(runs, task=name, setting="every 10")


def test_processes_and_local_batches() -> None:
    runs = stored("grids")["processes"]
    kaisa = {(r["global batch"], r["seed"]): r["steps"] for r in only(runs, optimizer="KAISA")}
    means = []
    for processes in (2, 4, 8):
        pairs = [
            (run["steps"], kaisa[run["global batch"], run["seed"]])
            for run in only(runs, optimizer="DPKFAC", processes=processes)
        ]
        means.append(math.exp(statistics.fmean(math.log(a / b) for a, b in pairs if a and b)))
    assert "{:.2f}, {:.2f} and {:.2f} times".format(*means) in text_of(PAGE)


def test_solvers_by_batch_and_their_costs() -> None:
    for label, cells in rows(PAGE, "best test accuracy", "batch 64").items():
        for cell, batch in zip(cells, (64, 256, 718), strict=True):
            of = only(stored("grids")["solver"], optimizer=label, batch=batch)
            best = statistics.fmean(max(run["accuracies"]) for run in of)
            assert float(cell.removesuffix(" %")) == pytest.approx(100 * best, abs=0.051)
    times = {(run["solver"], run["rows"]): run["seconds"] for run in stored("grids")["cost"]}
    shares = [times["eigen", size] / times["inverse", size] for _, size in times]
    assert f"cost {min(shares):.1f} to {max(shares):.1f} times the inverse" in text_of(PAGE)


def test_a_doubly_factored_layer() -> None:
    steps, kept = {}, {}
    for layer in ("doubly factored", "A and G"):
        of = only(stored("grids")["doubly"], layer=layer)
        met = [next((i for i, x in enumerate(r["losses"], 1) if x <= 0.05), None) for r in of]
        steps[layer], kept[layer] = 5 * median(met), of[0]["bytes"] / 1024
    (a, b), (c, d) = steps.values(), kept.values()
    assert f"{a:g} steps in place of {b:g}" in text_of(PAGE)
    assert f"{c:.0f} KiB kept in place of {d:,.0f}" in text_of(PAGE)

"""The tables of refreshes by trace and of the papers' grids are those of the stored runs."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from stored import Runs, rows, stored

TASKS = ("digits MLP", "digits conv", "language, width 64")


def median_steps(runs: Runs) -> float:
    return statistics.median(math.inf if r["steps"] is None else r["steps"] for r in runs)


def of(runs: Runs, **entries: Any) -> Runs:
    """The runs with these entries, those of three seeds."""
    found = [run for run in runs if all(run[key] == value for key, value in entries.items())]
    assert len({run["seed"] for run in found}) == len(found) == 3, entries
    return found


def steps_of(cell: str) -> float:
    return math.inf if cell == "never" else float(cell)


def traced() -> dict[tuple[str, str], Runs]:
    runs = stored("trace_refresh")["runs"]
    keys = dict.fromkeys((run["task"], run["setting"]) for run in runs)
    return {key: of(runs, task=key[0], setting=key[1]) for key in keys}


def test_what_refreshes_by_trace_spare() -> None:
    table, runs = rows("docs/kfac.md", "refresh", "MLP", "conv net", "transformer"), traced()
    assert {(task, label) for task in TASKS for label in table} == {
        (task, name.replace("trace ", "trace, (") + ")" * name.startswith("trace"))
        for task, name in runs
    }
    for label, cells in table.items():
        name = label.replace("trace, (", "trace ").removesuffix(")")
        for cell, task in zip(cells, TASKS, strict=True):
            solves, steps = cell.split(" / ")
            mine = runs[task, name]
            middle = statistics.median(run["solves"] for run in mine)
            assert float(solves) == pytest.approx(middle, abs=0.051)
            assert steps_of(steps) == median_steps(mine)


def test_what_is_said_of_refreshes_by_trace() -> None:
    runs = traced()
    spared = {
        key: 1 - statistics.median(r["solves"] for r in of) / of[0]["due"]
        for key, of in runs.items()
    }
    for task in TASKS:
        assert 0.65 < spared[task, "trace 0.1, 0"] < 0.75
        assert 0.145 < spared[task, "trace 0.01, 0.001"] < 0.285
        assert median_steps(runs[task, "trace 0.1, 0"]) <= median_steps(runs[task, "every 10"])

"""The tables of refreshes by trace and of the papers' grids are those of the stored runs."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from stored import ROOT, Runs, number, rows, stored

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
    table, runs = rows("docs/defaults.md", "refresh", "MLP", "conv net", "transformer"), traced()
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


# The papers' grids.

BATCHES = (16, 32, 64, 128, 256, 512)


def by_label(label: str) -> dict[str, Any]:
    """'DPKFAC, 8 processes' -> the entries of its runs."""
    name, _, more = label.partition(", ")
    return {"optimizer": name, **({"processes": int(more.split()[0])} if more else {})}


def ratio(runs: Runs, of: Runs, *keys: str) -> tuple[float, int]:
    """Geometric mean of steps over those of others with the same entries, and how many pairs."""
    others = {tuple(run[key] for key in keys): run["steps"] for run in of}
    pairs = [(run["steps"], others[tuple(run[key] for key in keys)]) for run in runs]
    both = [math.log(mine / other) for mine, other in pairs if mine and other]
    return math.exp(statistics.fmean(both)), len(both)


def page() -> str:
    return " ".join((ROOT / "docs" / "grids.md").read_text().split())


def test_damping_and_interval() -> None:
    runs = stored("grids")["damping"]
    table = rows("docs/grids.md", "optimizer, damping", "every 1")
    assert len(table) == 8
    for label, cells in table.items():
        name, _, damping = label.partition(", ")
        for cell, interval in zip(cells, (1, 10, 50, 100), strict=True):
            mine = of(runs, optimizer=name, damping=float(damping), interval=interval)
            assert steps_of(cell) == median_steps(mine), (label, interval)
    systems = ([r for r in runs if r["optimizer"] == name] for name in ("DPKFAC", "KAISA"))
    mean, pairs = ratio(*systems, "damping", "interval", "seed")
    assert (
        f"over the {pairs} pairs of runs in which both arrive, it takes {mean:.2f} times" in page()
    )


def test_processes_and_local_batches() -> None:
    runs = stored("grids")["processes"]
    table = rows("docs/grids.md", "steps to a loss of 0.05, batch", "16")
    assert len(table) == 5
    for label, cells in table.items():
        for cell, batch in zip(cells, BATCHES, strict=True):
            entries = {**by_label(label), "global batch": batch}
            if not cell:
                assert not any(all(r[k] == v for k, v in entries.items()) for r in runs)
                continue
            assert steps_of(cell) == median_steps(of(runs, **entries)), (label, batch)
    kaisa = [run for run in runs if run["optimizer"] == "KAISA"]
    found = [
        ratio([r for r in runs if r["optimizer"] == "DPKFAC" and r["processes"] == n], kaisa, *KEYS)
        for n in (2, 4, 8)
    ]
    said = "{:.2f}, {:.2f} and {:.2f} times".format(*(mean for mean, _ in found))
    assert said in page()


KEYS = ("global batch", "seed")


def test_solvers_by_batch() -> None:
    runs = stored("grids")["solver"]
    table = rows("docs/grids.md", "best test accuracy", "batch 64")
    assert len(table) == 3
    for label, cells in table.items():
        for cell, batch in zip(cells, (64, 256, 718), strict=True):
            mine = of(runs, optimizer=label, batch=batch)
            best = statistics.fmean(max(run["accuracies"]) for run in mine)
            assert float(cell.removesuffix(" %")) == pytest.approx(100 * best, abs=0.051)


def test_costs_of_a_factor() -> None:
    runs = stored("grids")["cost"]
    sizes = (64, 128, 256, 512, 1024)
    for label, cells in rows("docs/grids.md", "solver, ms", "64 rows").items():
        for cell, size in zip(cells, sizes, strict=True):
            (run,) = (r for r in runs if (f'"{r["solver"]}"', r["rows"]) == (label, size))
            assert float(cell) == pytest.approx(1000 * run["seconds"], rel=0.06)
    times = {(run["solver"], run["rows"]): run["seconds"] for run in runs}
    shares = [times["eigen", size] / times["inverse", size] for size in sizes]
    assert f"cost {min(shares):.1f} to {max(shares):.1f} times the inverse" in page()


def test_with_batch_norm_and_without() -> None:
    runs = stored("grids")["norm"]
    table = rows("docs/grids.md", "optimizer, network", "lr 0.03")
    assert len(table) == 4
    for label, cells in table.items():
        name, _, network = label.partition(", ")
        for cell, lr in zip(cells, (0.03, 0.1, 0.3), strict=True):
            mine = of(runs, optimizer=name, network=network, lr=lr)
            assert steps_of(cell) == median_steps(mine), (label, lr)


def test_a_doubly_factored_layer() -> None:
    runs = stored("grids")["doubly"]
    table = rows("docs/grids.md", "the wide Linear", "loss 0.05")
    assert table.keys() == {run["layer"] for run in runs}
    for label, (*cells, kept) in table.items():
        mine = of(runs, layer=label)
        for cell, target in zip(cells, (0.05, 0.01), strict=True):
            met = [
                next((5 * i for i, loss in enumerate(run["losses"], 1) if loss <= target), math.inf)
                for run in mine
            ]
            assert steps_of(cell) == statistics.median(met), (label, target)
        if kept:
            assert number(kept) == pytest.approx(mine[0]["bytes"] / 1024, abs=0.51)

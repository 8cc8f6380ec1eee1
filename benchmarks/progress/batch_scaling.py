"""Steps that a larger batch saves, with SGD, and with K-FAC as it is and at its best.

The digits MLP to a training loss of 0.05, looked at after every step, at most 150 steps, one
process. SGD with momentum is tuned over five rates. K-FAC has SGD's 0.1 and momentum; "defaults"
sets nothing else, "best" is the best of six pairs of clip and damping. The choice is made on two
seeds, by the median, and five others are reported. With one process DPKFAC is KAISA.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import reporting
from tasks import Job, Run, run_all, steps_to

BATCHES = (32, 128, 512, 1437)
TARGET = 0.05
TUNED_ON, REPORTED = (100, 101), range(5)
SYSTEMS = "KAISA", "DPKFAC", "DistKFAC"
Setting = tuple[float, dict[str, Any]]
RATES: list[Setting] = [(lr, {}) for lr in (0.03, 0.1, 0.2, 0.3, 0.5)]
DEFAULTS: list[Setting] = [(0.1, {})]
PAIRS: list[Setting] = [
    (0.1, {"kl_clip": clip, "damping": damping})
    for clip in (1e-4, 1e-3, 1e-2)
    for damping in (0.5, 2.0)
]
ROWS: dict[str, tuple[str, list[Setting]]] = {
    "SGD, best of 5 rates": ("SGD", RATES),
    **{f"{system}, defaults": (f"{system}, SGD", DEFAULTS) for system in SYSTEMS},
    **{f"{system}, best of 6": (f"{system}, SGD", PAIRS) for system in SYSTEMS},
}


def task(batch: int) -> str:
    """The name of the task with batches of a size."""
    return f"digits MLP, {batch:,} at a time"


def median(runs: Sequence[Run]) -> float:
    """Of the steps to the target."""
    return statistics.median(steps_to(run, TARGET) for run in runs)


def main() -> None:
    """Tune, train, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time")
    parser.add_argument("--json", type=Path, help="write the runs there")
    arguments = parser.parse_args()
    cells = [(row, batch) for row in ROWS for batch in BATCHES]
    places, jobs = [], []
    for row, batch in cells:
        optimizer, grid = ROWS[row]
        if len(grid) > 1:
            for setting in grid:
                for seed in TUNED_ON:
                    places.append((row, batch, grid.index(setting)))
                    jobs.append(Job(task(batch), optimizer, setting[0], seed, setting[1]))
    tuning = run_all(jobs, arguments.processes)
    chosen: dict[tuple[str, int], Setting] = {}
    for row, batch in cells:
        grid, found = ROWS[row][1], {}
        for i in range(len(grid)):
            of = [r for p, r in zip(places, tuning, strict=True) if p == (row, batch, i)]
            last = sum(run.losses[-1] for run in of)  # tells where none has arrived
            found[i] = (median(of), last) if of else (0.0, 0.0)
        chosen[row, batch] = grid[min(found, key=lambda i: found[i])]
    jobs = [
        Job(task(batch), ROWS[row][0], chosen[row, batch][0], seed, chosen[row, batch][1])
        for row, batch in cells
        for seed in REPORTED
    ]
    runs = run_all(jobs, arguments.processes)
    rows, stored = [], []
    each = len(REPORTED)
    for start, row in zip(range(0, len(runs), each * len(BATCHES)), ROWS, strict=True):
        shown = []
        for i, batch in enumerate(BATCHES):
            of = runs[start + i * each : start + (i + 1) * each]
            steps = median(of)
            shown.append(f"{steps:.0f}" if math.isfinite(steps) else "not in 150")
            stored += [{"row": row, "batch": batch, **asdict(run)} for run in of]
        rows.append([row, *shown])
    title = f"digits MLP, median steps to a training loss of {TARGET}"
    reporting.show(reporting.table(title, ["batch", *map(str, BATCHES)], rows))
    reporting.store(arguments.json, None, runs=stored, tuning=[asdict(run) for run in tuning])


if __name__ == "__main__":
    main()

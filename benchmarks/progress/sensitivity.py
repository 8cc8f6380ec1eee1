"""How often KAISA with nothing set ends above its base, by learning rate and warm-up, 20 seeds.

    make sensitivity
    make sensitivity ARGS='--tasks "digits MLP" --seeds 5'

Three small tasks at a constant rate, or one that rises linearly in the first tenth of the steps and
is constant then. The base is tuned for each of the two on six rates, on five seeds that are not
reported. KAISA over it has nothing set but the rate: 0.5, 1, 2 and 4 times the base's best. A run
is above if its loss is greater than that of the base at its best rate, of the same seed and with
the same warm-up; as single judgements at a constant rate are noisy, a loss is the mean of a run's
last five. Every run is stored; of a file that is there already, tasks that are not asked for stay.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

import reporting
from second_order import SecondOrderWarning
from tasks import TASKS, Job, Run, Setting, run_all, stored_tasks, tuned

TUNED_ON = range(100, 105)
LAST = 5  # judgements, over which a loss is averaged
RATES = 0.5, 1.0, 2.0, 4.0  # times the base's best
BASES: dict[str, tuple[str, tuple[float, ...]]] = {
    "digits MLP": ("SGD", (0.01, 0.03, 0.06, 0.1, 0.2, 0.3)),
    "digits conv": ("Adam", (0.001, 0.002, 0.004, 0.008, 0.012, 0.02)),
    "unseen friedman": ("AdamW", (0.002, 0.004, 0.008, 0.012, 0.02, 0.03)),
}


def level(run: Run) -> float:
    """The mean of the last losses; infinite for a run that broke off."""
    found = statistics.mean(run.losses[-LAST:])
    return found if math.isfinite(found) else math.inf


def warmups(task: str) -> dict[str, int]:
    """Steps in which the rate rises, by what the table says."""
    return {"none": 0, "10 % of steps": TASKS[task]().steps // 10}


def measured(task: str, seeds: int, processes: int) -> dict[str, Any]:
    """Tune the base, train, and compare: the base's rates, rows, and all runs."""
    base, rates = BASES[task]
    steps = warmups(task)

    def tuning_job(warmup: str, setting: Setting, seed: int) -> Job:
        return Job(task, base, setting[0], seed, warmup=steps[warmup])

    grid: list[Setting] = [(lr, {}) for lr in rates]
    best, tuning = tuned(dict.fromkeys(steps, grid), tuning_job, TUNED_ON, processes, level)
    cells = [
        (warmup, optimizer, share)
        for warmup in steps
        for optimizer, share in ((base, 1.0), *((f"KAISA, {base}", share) for share in RATES))
    ]
    done = run_all(
        (
            Job(task, optimizer, share * best[warmup][0], seed, warmup=steps[warmup])
            for warmup, optimizer, share in cells
            for seed in range(seeds)
        ),
        processes,
    )
    runs = {cell: done[i * seeds : (i + 1) * seeds] for i, cell in enumerate(cells)}
    rows = []
    for (warmup, optimizer, share), of in runs.items():
        if optimizer != base:
            beside = compared(of, runs[warmup, base, 1.0])
            rows.append({"task": task, "warm-up": warmup, "rate": share, **beside})
    return {
        "base": base,
        "rates": {warmup: lr for warmup, (lr, _) in best.items()},
        "rows": rows,
        "runs": list(map(asdict, done)),
        "tuning": [asdict(run) for _, run in tuning],
    }


def compared(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, float]:
    """Runs that end above those of the same seed, of how many, and the worst ratio of losses."""
    ratios = [level(a) / level(b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "above": sum(ratio > 1 for ratio in ratios),
        "of": len(ratios),
        "worst ratio": max(ratios),
    }


def table(record: dict[str, Any]) -> Table:
    """By task and warm-up, a column for each rate: the share above, and the worst ratio."""
    lines = []
    for task, found in record.items():
        for warmup, lr in found["rates"].items():
            rows = [row for row in found["rows"] if row["warm-up"] == warmup]
            cells = (f"{row['above'] / row['of']:.0%}, {row['worst ratio']:.2f}" for row in rows)
            grid = BASES[task][1]
            edge = ", edge" if lr in (grid[0], grid[-1]) else ""
            lines.append([f"{task}, {found['base']}", warmup, f"{lr:g}{edge}", *cells])
    title = "runs that end above the base at its best rate, and the worst ratio to it"
    columns = "task, base", "warm-up", "base's rate", *(f"rate × {share:g}" for share in RATES)
    return reporting.table(title, columns, lines)


def above(record: dict[str, Any]) -> tuple[int, int]:
    """Of all runs at or below twice the base's rate, those above, and how many there are."""
    rows = [row for found in record.values() for row in found["rows"] if row["rate"] <= 2]
    return sum(row["above"] for row in rows), sum(row["of"] for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train, print, and store what is done after each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(BASES), default=list(BASES))
    parser.add_argument("--seeds", type=int, default=20, help="reported ones: 0, 1 and so on")
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time")
    parser.add_argument("--json", type=Path, help="write the runs there")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SecondOrderWarning)
    record = stored_tasks(options.json, BASES)
    for task in options.tasks:
        record[task] = measured(task, options.seeds, options.processes)
        reporting.store(options.json, None, tasks=record)
    many, of = above(record)
    said = f"at or below twice the base's rate: {many} of {of} end above it, {many / of:.1%}"
    reporting.show(table(record), said)


if __name__ == "__main__":
    main()

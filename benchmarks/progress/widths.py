"""The best learning rate and damping by the width of a model, from 64 to 512.

At each width, we train a transformer of one block on the text of `language_model`, for 150 steps of
8 windows. AdamW and KAISA over AdamW with default settings run on the same grid of learning rates.
KAISA then runs on a grid of dampings at its best rate. We compare the final held-out loss of one
seed, which is the seed that settings are chosen on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

import reporting
from second_order import SecondOrderWarning
from second_order.optimizers.config import DAMPING
from tasks import Job, Run, run_all

WIDTHS = 64, 128, 256, 512
RATES = 0.0015, 0.003, 0.006, 0.012, 0.024
DAMPINGS = tuple(DAMPING * share for share in (0.25, 0.5, 1.0, 2.0, 4.0))
SEEDS = (100,)
OPTIMIZERS = "AdamW", "KAISA, AdamW"


def task(width: int) -> str:
    """The name of the task with a model of a width."""
    return f"language, width {width}"


def last(runs: Sequence[Run]) -> float:
    """Mean of the final losses, or infinity if a run diverged."""
    loss = statistics.mean(run.losses[-1] for run in runs)
    return loss if math.isfinite(loss) else math.inf


def losses(jobs: Sequence[Job], runs: Sequence[Run]) -> dict[tuple[str, str, float, str], float]:
    """Final loss by task, optimizer, rate and options."""
    grouped: dict[tuple[str, str, float, str], list[Run]] = {}
    for job, run in zip(jobs, runs, strict=True):
        key = job.task, job.optimizer, job.lr, json.dumps(job.options)
        grouped.setdefault(key, []).append(run)
    return {key: last(of) for key, of in grouped.items()}


def table(title: str, columns: Sequence[float], rows: dict[str, list[float]]) -> Table:
    """Losses. "*" marks the smallest loss of a row, and "~" losses within 0.01 of it."""
    lines = []
    for name, row in rows.items():
        cells = []
        for loss in row:
            mark = ""
            if loss == min(row):
                mark = "*"
            elif loss < min(row) + 0.01:
                mark = "~"
            cells.append(f"{loss:.3f} {mark}")
        lines.append([name, *cells])
    return reporting.table(title, ["", *(f"{column:g}" for column in columns)], lines)


def main() -> None:
    """Train on both grids, print the tables, and store the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, default=WIDTHS)
    parser.add_argument("--processes", type=int, default=2, help="training runs at a time")
    parser.add_argument("--json", type=Path, help="write the runs to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SecondOrderWarning)
    by_rate = [
        Job(task(width), optimizer, lr, seed)
        for width in reversed(arguments.widths)
        for optimizer in OPTIMIZERS
        for lr in RATES
        for seed in SEEDS
    ]
    runs = run_all(by_rate, arguments.processes)
    found = losses(by_rate, runs)
    best: dict[int, float] = {}
    for optimizer in OPTIMIZERS:
        rows = {}
        for width in arguments.widths:
            of = {lr: found[task(width), optimizer, lr, "{}"] for lr in RATES}
            rows[f"width {width}"] = list(of.values())
            best[width] = min(of, key=lambda lr: of[lr])
        reporting.show(table(f"{optimizer}: loss by learning rate", RATES, rows))
    by_damping = [
        Job(task(width), "KAISA, AdamW", best[width], seed, {"damping": damping})
        for width in reversed(arguments.widths)
        for damping in DAMPINGS
        for seed in SEEDS
    ]
    more = run_all(by_damping, arguments.processes)
    found = losses(by_damping, more)
    rows = {
        f"width {width}, lr {best[width]}": [
            found[task(width), "KAISA, AdamW", best[width], json.dumps({"damping": damping})]
            for damping in DAMPINGS
        ]
        for width in arguments.widths
    }
    reporting.show(table("KAISA, AdamW: loss by damping", DAMPINGS, rows))
    reporting.store(arguments.json, None, runs=[asdict(run) for run in (*runs, *more)])


if __name__ == "__main__":
    main()

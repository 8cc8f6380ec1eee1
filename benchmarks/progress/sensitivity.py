"""How often KAISA with default settings ends above its base, by learning rate and warm-up.

    make sensitivity
    make sensitivity ARGS='--tasks "digits MLP" --seeds 5'
    make sensitivity ARGS=--keep-rivals                      reuse the bases' runs if valid

Each small task has one base or two. The learning rate is constant, or rises linearly in the first
tenth of the steps. For both schedules, the base is tuned on six rates and on five seeds that are
not reported. KAISA has default settings, and 0.5, 1, 2 and 4 times the base's best rate.

A run ends above its base if its loss is larger than that of the base at its best rate, with the
same seed and the same warm-up. A loss is the mean of a run's last five evaluations, because single
evaluations at a constant rate are noisy. We report 20 seeds, and six of Fashion-MNIST. Every run is
stored. If there is a stored file, only the tasks that you name are replaced. Tasks without data
are skipped.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

import reporting
from second_order import SecondOrderWarning
from tasks import (
    TASKS,
    Job,
    Run,
    Setting,
    basis,
    has_data,
    restore_run,
    run_all,
    stored_tasks,
    tune,
)

TUNED_ON = range(100, 105)
LAST = 5  # evaluations over which a loss is averaged
RATES = 0.5, 1.0, 2.0, 4.0  # multiples of the base's best rate


@dataclass(frozen=True)
class Cell:
    """A task and a base optimizer.

    Attributes:
        task: Name of the task.
        base: The base optimizer, alone and of KAISA.
        rates: The learning rates that the base is tuned on.
        seeds: Number of reported seeds.
    """

    task: str
    base: str
    rates: tuple[float, ...]
    seeds: int = 20

    @property
    def name(self) -> str:
        """Name in the table and in the stored file."""
        return f"{self.task}, {self.base}"


CELLS = {
    cell.name: cell
    for cell in (
        Cell("digits MLP", "SGD", (0.01, 0.03, 0.06, 0.1, 0.2, 0.3)),
        Cell("digits conv", "Adam", (0.001, 0.002, 0.004, 0.008, 0.012, 0.02)),
        Cell("unseen friedman", "AdamW", (0.002, 0.004, 0.008, 0.012, 0.02, 0.03)),
        Cell("unseen friedman", "SGD", (0.003, 0.01, 0.03, 0.06, 0.12, 0.2)),
        Cell("fashion resnet, short", "SGD", (0.02, 0.05, 0.1, 0.2, 0.4, 0.8), seeds=6),
        Cell("fashion resnet, short", "AdamW", (0.002, 0.004, 0.007, 0.012, 0.02, 0.04), seeds=6),
    )
}


def mean_last_loss(run: Run) -> float:
    """Mean of the last losses, or infinity if the run diverged."""
    loss = statistics.mean(run.losses[-LAST:])
    return loss if math.isfinite(loss) else math.inf


def warmups(task: str) -> dict[str, int]:
    """Numbers of warm-up steps, by their label in the table."""
    return {"none": 0, "10 % of steps": TASKS[task]().steps // 10}


@dataclass
class Base:
    """The runs of a cell's base optimizer.

    Attributes:
        rates: The best learning rates by warm-up.
        tuning: The runs on tuning seeds.
        runs: The reported runs by warm-up, one for each seed.
    """

    rates: dict[str, float]
    tuning: list[Run]
    runs: dict[str, list[Run]]


def tune_base(cell: Cell, seeds: int, processes: int) -> Base:
    """Tune the base of a cell for each warm-up, and train it at the best rates."""
    steps = warmups(cell.task)

    def tuning_job(warmup: str, setting: Setting, seed: int) -> Job:
        return Job(cell.task, cell.base, setting[0], seed, warmup=steps[warmup])

    grid: list[Setting] = [(lr, {}) for lr in cell.rates]
    best, tuning = tune(dict.fromkeys(steps, grid), tuning_job, TUNED_ON, processes, mean_last_loss)
    rates = {warmup: lr for warmup, (lr, _) in best.items()}

    labels = []
    jobs = []
    for warmup in steps:
        for seed in range(seeds):
            labels.append(warmup)
            jobs.append(Job(cell.task, cell.base, rates[warmup], seed, warmup=steps[warmup]))
    runs: dict[str, list[Run]] = {warmup: [] for warmup in steps}
    for warmup, run in zip(labels, run_all(jobs, processes), strict=True):
        runs[warmup].append(run)
    return Base(rates, [run for _, run in tuning], runs)


def read_base(cell: Cell, record: Mapping[str, Any]) -> Base:
    """The base of a cell from its stored record."""
    base_runs = [restore_run(run) for run in record["runs"] if run["job"]["optimizer"] == cell.base]
    runs = {}
    for warmup, steps in warmups(cell.task).items():
        runs[warmup] = [run for run in base_runs if run.job.warmup == steps]
    tuning = [restore_run(run) for run in record["tuning"]]
    return Base(record["rates"], tuning, runs)


def measure(
    cell: Cell, seeds: int, processes: int, record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Tune the base, train, and return the base's rates, the rows of the table, and all runs.

    Args:
        cell: The task and the base.
        seeds: Number of reported seeds.
        processes: Number of training runs at a time.
        record: The stored record, to reuse the base's runs. The base is still trained again if
            its basis differs: other settings, another processor or another version of torch.
    """
    current = basis(cell.task, {cell.base: cell.rates}, TUNED_ON, seeds)
    if record is not None and record.get("basis") == current:
        base = read_base(cell, record)
    else:
        base = tune_base(cell, seeds, processes)

    # Train KAISA at all rates.
    steps = warmups(cell.task)
    optimizer = f"KAISA, {cell.base}"
    settings = []
    jobs = []
    for warmup, base_rate in base.rates.items():
        for multiple in RATES:
            settings.append((warmup, multiple))
            lr = multiple * base_rate
            for seed in range(seeds):
                job = Job(cell.task, optimizer, lr, seed, warmup=steps[warmup])
                jobs.append(job)
    kaisa_runs = run_all(jobs, processes)

    # Compare each setting with the base, seed by seed.
    rows = []
    for i, (warmup, multiple) in enumerate(settings):
        comparison = compare(kaisa_runs[i * seeds : (i + 1) * seeds], base.runs[warmup])
        rows.append({"task": cell.task, "warm-up": warmup, "rate": multiple, **comparison})

    all_runs = []
    for base_runs in base.runs.values():
        all_runs += base_runs
    all_runs += kaisa_runs
    return {
        "basis": current,
        "task": cell.task,
        "base": cell.base,
        "rates": base.rates,
        "rows": rows,
        "runs": [asdict(run) for run in all_runs],
        "tuning": [asdict(run) for run in base.tuning],
    }


def compare(runs: Sequence[Run], base_runs: Sequence[Run]) -> dict[str, float]:
    """Number of runs that end above the base with the same seed, and the worst ratio of losses."""
    ratios = []
    for run, base_run in zip(runs, base_runs, strict=True):
        ratios.append(mean_last_loss(run) / mean_last_loss(base_run))
    return {
        "above": sum(ratio > 1 for ratio in ratios),
        "of": len(ratios),
        "worst ratio": max(ratios),
    }


def table(record: dict[str, Any]) -> Table:
    """The share of runs above the base and the worst ratio, by cell, warm-up and rate."""
    lines = []
    for name, cell_record in record.items():
        grid = CELLS[name].rates
        for warmup, lr in cell_record["rates"].items():
            rows = [row for row in cell_record["rows"] if row["warm-up"] == warmup]
            cells = [f"{row['above'] / row['of']:.0%}, {row['worst ratio']:.2f}" for row in rows]
            rate = f"{lr:g}"
            if lr in (grid[0], grid[-1]):
                rate += ", edge"
            lines.append([name, f"{rows[0]['of']}", warmup, rate, *cells])
    title = "runs that end above the base at its best rate, and the worst ratio to it"
    columns = "task, base", "seeds", "warm-up", "base's rate", *(f"rate × {r:g}" for r in RATES)
    return reporting.table(title, columns, lines)


def count_above(record: dict[str, Any]) -> tuple[int, int]:
    """Count the runs above the base, and all runs, at twice the base's rate or less."""
    above = 0
    total = 0
    for cell_record in record.values():
        for row in cell_record["rows"]:
            if row["rate"] <= 2:
                above += row["above"]
                total += row["of"]
    return above, total


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune and train on each cell, store its runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(dict.fromkeys(cell.task for cell in CELLS.values()))
    parser.add_argument("--tasks", nargs="+", choices=names, help="default: all")
    parser.add_argument("--seeds", type=int, help="number of reported seeds")
    parser.add_argument("--processes", type=int, default=2, help="training runs at a time")
    parser.add_argument("--json", type=Path, help="write the runs to this file")
    parser.add_argument(
        "--keep-rivals", action="store_true", help="reuse the bases' runs in the file if valid"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SecondOrderWarning)
    record = stored_tasks(options.json, CELLS)
    tasks = list(filter(has_data, options.tasks or names))
    for name, cell in CELLS.items():
        if cell.task in tasks:
            stored = record.get(name) if options.keep_rivals else None
            seeds = options.seeds or cell.seeds
            record[name] = measure(cell, seeds, options.processes, stored)
            reporting.store(options.json, None, tasks=record)
    above, total = count_above(record)
    share = f"{above / total:.1%}" if total else "none"
    summary = f"at or below twice the base's rate: {above} of {total} end above it, {share}"
    reporting.show(table(record), summary)
    if options.tasks and len(tasks) < len(options.tasks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""How often KAISA with default settings ends above its base, by learning rate and warm-up.

    make sensitivity
    make sensitivity ARGS='--tasks "digits MLP" --seeds 5'
    make sensitivity ARGS=--keep-rivals                      train KAISA only, if that is valid

Small tasks, each over one base or two, at a constant rate, or one that rises linearly in the first
tenth of the steps and is constant then. The base is tuned for each of the two on six rates, on five
seeds that are not reported. KAISA over it has nothing set but the rate: 0.5, 1, 2 and 4 times the
base's best. A run is above if its loss is greater than that of the base at its best rate, of the
same seed and with the same warm-up; because single judgements at a constant rate are noisy, a loss
is the mean of a run's last five. 20 seeds are reported, of Fashion-MNIST six. Every run is stored.
If there is a stored file, the tasks that you do not ask for stay in it. Tasks whose data are
missing are left out.
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
    restored,
    run_all,
    stored_tasks,
    tuned,
)

TUNED_ON = range(100, 105)
LAST = 5  # judgements, over which a loss is averaged
RATES = 0.5, 1.0, 2.0, 4.0  # times the base's best


@dataclass(frozen=True)
class Cell:
    """A task and a base.

    Attributes:
        task: Its name.
        base: The optimizer that is tuned, and that KAISA is over.
        rates: On which it is tuned.
        seeds: How many are reported.
    """

    task: str
    base: str
    rates: tuple[float, ...]
    seeds: int = 20

    @property
    def name(self) -> str:
        """In the table and the stored file."""
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


def level(run: Run) -> float:
    """The mean of the last losses; infinite for a run that broke off."""
    found = statistics.mean(run.losses[-LAST:])
    return found if math.isfinite(found) else math.inf


def warmups(task: str) -> dict[str, int]:
    """Steps in which the rate rises, by what the table says."""
    return {"none": 0, "10 % of steps": TASKS[task]().steps // 10}


@dataclass
class Base:
    """The base of a cell.

    Attributes:
        rates: Its best, by warm-up.
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
    best, tuning = tuned(dict.fromkeys(steps, grid), tuning_job, TUNED_ON, processes, level)
    rates = {warmup: lr for warmup, (lr, _) in best.items()}
    jobs = [
        Job(cell.task, cell.base, rates[warmup], seed, warmup=steps[warmup])
        for warmup in steps
        for seed in range(seeds)
    ]
    done = run_all(jobs, processes)
    runs = {warmup: done[i * seeds : (i + 1) * seeds] for i, warmup in enumerate(steps)}
    return Base(rates, [run for _, run in tuning], runs)


def read_base(cell: Cell, record: Mapping[str, Any]) -> Base:
    """The base of a cell from its stored record."""
    stored = [restored(run) for run in record["runs"] if run["job"]["optimizer"] == cell.base]
    runs = {
        warmup: [run for run in stored if run.job.warmup == steps]
        for warmup, steps in warmups(cell.task).items()
    }
    return Base(record["rates"], list(map(restored, record["tuning"])), runs)


def measured(
    cell: Cell, seeds: int, processes: int, record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Tune the base, train, and compare: the base's rates, rows, and all runs.

    Args:
        cell: The task and the base.
        seeds: How many are reported.
        processes: Trainings at a time.
        record: The stored record, if its runs of the base are to be kept. The base is trained all
            the same if it was trained in another way, on another machine or with another torch.
    """
    current = basis(cell.task, {cell.base: cell.rates}, TUNED_ON, seeds)
    if record is not None and record.get("basis") == current:
        base = read_base(cell, record)
    else:
        base = tune_base(cell, seeds, processes)

    kaisa = [(warmup, share) for warmup in base.rates for share in RATES]
    steps = warmups(cell.task)
    jobs = [
        Job(
            cell.task,
            f"KAISA, {cell.base}",
            share * base.rates[warmup],
            seed,
            warmup=steps[warmup],
        )
        for warmup, share in kaisa
        for seed in range(seeds)
    ]
    done = run_all(jobs, processes)

    rows = []
    for i, (warmup, share) in enumerate(kaisa):
        found = compared(done[i * seeds : (i + 1) * seeds], base.runs[warmup])
        rows.append({"task": cell.task, "warm-up": warmup, "rate": share, **found})
    of_base = [run for runs in base.runs.values() for run in runs]
    return {
        "basis": current,
        "task": cell.task,
        "base": cell.base,
        "rates": base.rates,
        "rows": rows,
        "runs": list(map(asdict, of_base + done)),
        "tuning": list(map(asdict, base.tuning)),
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
    """By cell and warm-up, a column for each rate: the share above, and the worst ratio."""
    lines = []
    for name, found in record.items():
        for warmup, lr in found["rates"].items():
            rows = [row for row in found["rows"] if row["warm-up"] == warmup]
            cells = (f"{row['above'] / row['of']:.0%}, {row['worst ratio']:.2f}" for row in rows)
            grid = CELLS[name].rates
            edge = ", edge" if lr in (grid[0], grid[-1]) else ""
            lines.append([name, f"{rows[0]['of']}", warmup, f"{lr:g}{edge}", *cells])
    title = "runs that end above the base at its best rate, and the worst ratio to it"
    columns = "task, base", "seeds", "warm-up", "base's rate", *(f"rate × {r:g}" for r in RATES)
    return reporting.table(title, columns, lines)


def above(record: dict[str, Any]) -> tuple[int, int]:
    """Of all runs at or below twice the base's rate, those above, and how many there are."""
    rows = [row for found in record.values() for row in found["rows"] if row["rate"] <= 2]
    return sum(row["above"] for row in rows), sum(row["of"] for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train, print, and store what is done after each cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(dict.fromkeys(cell.task for cell in CELLS.values()))
    parser.add_argument("--tasks", nargs="+", choices=names, help="default: all")
    parser.add_argument("--seeds", type=int, help="reported ones: 0, 1 and so on")
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time")
    parser.add_argument("--json", type=Path, help="write the runs there")
    parser.add_argument(
        "--keep-rivals", action="store_true", help="use the file's runs of bases if they are valid"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SecondOrderWarning)
    record = stored_tasks(options.json, CELLS)
    tasks = list(filter(has_data, options.tasks or names))
    for name, cell in CELLS.items():
        if cell.task in tasks:
            kept = record.get(name) if options.keep_rivals else None
            seeds = options.seeds or cell.seeds
            record[name] = measured(cell, seeds, options.processes, kept)
            reporting.store(options.json, None, tasks=record)
    many, of = above(record)
    share = f"{many / of:.1%}" if of else "none"
    said = f"at or below twice the base's rate: {many} of {of} end above it, {share}"
    reporting.show(table(record), said)
    if options.tasks and len(tasks) < len(options.tasks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

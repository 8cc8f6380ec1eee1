"""KAISA with default settings next to tuned rivals, on nine small tasks.

    make tasks                                                 the tasks whose runs are stored
    make tasks ARGS='--tasks "unseen lstm" "cifar resnet" --seeds 3'
    make tasks ARGS=--keep-rivals                              reuse the rivals' runs if valid
    make tasks ARGS=--markdown                                 tables of the stored runs, as in docs

We tune AdamW, Muon and SOAP, and on some tasks SGD. Each is tuned on six learning rates and two
seeds that are not reported, by the mean loss at the end. KAISA is not tuned. It runs at the best
rate of its base and at twice that rate, and over SGD also at a third of it. On images it also runs
over Muon at Muon's best rate, with AdamW for the parameters that Muon does not train.

Five other seeds are reported. The best rival has the smallest mean of the reported losses.
Differences to it are paired by seed, with their standard error. On images, losses are test losses,
and curves are of training images. Steps and seconds are medians over the seeds until a curve
reaches the last point of the base's curve with the same seed. The base is SGD for SGD and KAISA
over SGD, Muon for KAISA over Muon, and AdamW for all others.

A second table has the time of each part of KAISA's steps. Every run is stored. If there is a stored
file, only the tasks that you name are replaced. Tasks without data are skipped.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

import reporting
from images import IMAGES
from second_order import SecondOrderWarning
from tasks import (
    TASKS,
    Job,
    Run,
    Setting,
    basis,
    final_loss,
    has_data,
    mean_difference,
    restore_run,
    run_all,
    seconds_to,
    steps_to,
    stored_tasks,
    tune,
)

TUNED_ON = 100, 101
TWICE = ", twice the rate"
THIRD = ", a third of the rate"
RATES = {"": 1.0, TWICE: 2.0, THIRD: 1 / 3}  # multiples of the base's best rate
Rates = dict[str, tuple[float, ...]]
TRANSFORMERS: Rates = {
    "AdamW": (0.001, 0.002, 0.003, 0.006, 0.012, 0.02),
    "Muon": (0.003, 0.005, 0.01, 0.015, 0.025, 0.04),
    "SOAP": (0.002, 0.003, 0.005, 0.008, 0.012, 0.02),
}
RECURRENT: Rates = {
    "AdamW": (0.006, 0.012, 0.02, 0.03, 0.045, 0.07),
    "Muon": (0.01, 0.02, 0.03, 0.045, 0.07, 0.1),
    "SOAP": (0.008, 0.015, 0.03, 0.05, 0.08, 0.12),
}
SMALL: Rates = {
    "AdamW": (0.002, 0.004, 0.008, 0.012, 0.02, 0.03),
    "Muon": (0.003, 0.005, 0.01, 0.015, 0.025, 0.04),
    "SOAP": (0.003, 0.006, 0.012, 0.025, 0.05, 0.1),
}
WITH_SGD: Rates = {**SMALL, "SGD": (0.003, 0.01, 0.03, 0.06, 0.12, 0.2)}
RESNETS: Rates = {
    "AdamW": (0.002, 0.004, 0.007, 0.012, 0.02, 0.04),
    "Muon": (0.005, 0.01, 0.02, 0.03, 0.05, 0.08),
    "SOAP": (0.002, 0.004, 0.008, 0.015, 0.03, 0.06),
    "SGD": (0.02, 0.05, 0.1, 0.2, 0.4, 0.8),
}
# At a constant rate, Muon is best at lower rates than with a schedule.
RESNETS_CONSTANT: Rates = {**RESNETS, "Muon": (0.001, 0.002, 0.003, 0.005, 0.01, 0.02)}
VITS: Rates = {
    "AdamW": (0.0007, 0.0015, 0.003, 0.005, 0.009, 0.015),
    "Muon": (0.003, 0.006, 0.01, 0.02, 0.03, 0.05),
    "SOAP": (0.0015, 0.003, 0.005, 0.008, 0.015, 0.03),
    "SGD": (0.01, 0.03, 0.06, 0.12, 0.25, 0.5),
}
INTERACTIONS: Rates = {
    "AdamW": (0.001, 0.003, 0.006, 0.01, 0.02, 0.04),
    "Muon": (0.001, 0.003, 0.006, 0.01, 0.02, 0.04),
    "SOAP": (0.0006, 0.002, 0.004, 0.006, 0.012, 0.025),
    "SGD": (0.003, 0.01, 0.02, 0.04, 0.08, 0.15),
}
GRIDS: dict[str, Rates] = {
    "unseen transformer": TRANSFORMERS,
    "unseen llama": TRANSFORMERS,
    "unseen lstm": RECURRENT,
    "unseen vit": SMALL,
    "unseen friedman": WITH_SGD,
    "unseen diabetes": WITH_SGD,
    "unseen interactions": INTERACTIONS,
    "unseen head": WITH_SGD,
    "fashion resnet": RESNETS,
    "fashion vit": VITS,
    "fashion resnet, constant rate": RESNETS_CONSTANT,
    "cifar resnet": RESNETS,
}
NOT_STORED = ("unseen transformer", "unseen lstm", "cifar resnet")
STORED = [task for task in GRIDS if task not in NOT_STORED]


def job(task: str, name: str, setting: Setting, seed: int) -> Job:
    """A training run of the benchmark."""
    lr, options = setting
    optimizer = name.removesuffix(TWICE).removesuffix(THIRD)
    return Job(task, optimizer, lr, seed, options)


def base_of(name: str) -> str:
    """The optimizer whose last loss is the target of a row."""
    if name.startswith("KAISA, Muon"):
        return "Muon"
    return "SGD" if "SGD" in name else "AdamW"


def kaisa_settings(task: str, best: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings of KAISA over each tuned base, at the base's best rate and at multiples of it."""
    rows = [("AdamW", ""), ("AdamW", TWICE), ("SGD", ""), ("SGD", TWICE), ("SGD", THIRD)]
    if task in IMAGES:
        rows.append(("Muon", ""))
    settings: dict[str, Setting] = {}
    for base, multiple in rows:
        if base in best:
            best_lr, _ = best[base]
            settings[f"KAISA, {base}{multiple}"] = (RATES[multiple] * best_lr, {})
    return settings


def figures(runs: Mapping[str, Sequence[Run]], rivals: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of the tables for each optimizer.

    Args:
        runs: The runs by name, one for each seed, in the same order.
        rivals: Names of the tuned optimizers.
    """
    losses = {}
    for name, runs_by_seed in runs.items():
        losses[name] = [final_loss(run) for run in runs_by_seed]
    best = min(rivals, key=lambda name: statistics.mean(losses[name]))

    result: dict[str, dict[str, Any]] = {}
    for name, runs_by_seed in runs.items():
        # Compare the losses with those of the base and of the best rival.
        base_runs = runs[base_of(name)]
        base_losses = losses[base_of(name)]
        ratios = [loss / base for loss, base in zip(losses[name], base_losses, strict=True)]
        above_best_rival = None
        if name != best:
            above_best_rival = mean_difference(losses[name], losses[best])

        # The targets are the last points of the base's curves.
        targets = [run.losses[-1] for run in base_runs]
        pairs = list(zip(runs_by_seed, targets, strict=True))
        steps = [steps_to(run, target) for run, target in pairs]
        seconds = [seconds_to(run, target) for run, target in pairs]
        base_seconds = [run.seconds[-1] for run in base_runs]
        shares = [spent / base for spent, base in zip(seconds, base_seconds, strict=True)]

        accuracies = [run.end["accuracy"] for run in runs_by_seed if "accuracy" in run.end]
        result[name] = {
            "loss": statistics.mean(losses[name]),
            "worst": max(losses[name]),
            "worst over base": max(ratios),
            "accuracy": statistics.mean(accuracies) if accuracies else None,
            "best rival": best,
            "above best rival": above_best_rival,
            "steps": statistics.median(steps),
            "seconds": statistics.median(seconds),
            "share of seconds": statistics.median(shares),
            "seconds in all": statistics.median(run.seconds[-1] for run in runs_by_seed),
            **breakdown(runs_by_seed),
        }
    return result


def breakdown(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean milliseconds per step by timer region, and the mean final refresh interval, if known."""
    milliseconds: dict[str, float] = {}
    for run in runs:
        steps = len(run.losses) * TASKS[run.job.task]().every
        for region, seconds in run.accounts.items():
            mean = 1000 * seconds / steps / len(runs)
            milliseconds[region] = milliseconds.get(region, 0.0) + mean
    intervals = [run.refresh_interval for run in runs if run.refresh_interval is not None]
    return {
        "milliseconds": milliseconds,
        "refresh interval": statistics.mean(intervals) if intervals else None,
    }


def format_rate(lr: float, grid: Sequence[float] | None) -> str:
    """A learning rate, with a note if it is the smallest or the largest of its grid."""
    if grid and lr in (grid[0], grid[-1]):
        return f"{lr:.3g}, edge"
    return f"{lr:.3g}"


def table(task: str, rows: Mapping[str, dict[str, Any]], best: Mapping[str, Setting]) -> Table:
    """A table of losses and times from :func:`figures`."""
    cells = []
    for name, row in rows.items():
        accuracy = ""
        if row["accuracy"] is not None:
            accuracy = f"{row['accuracy']:.2%}"
        above_best_rival = ""
        if name == row["best rival"]:
            above_best_rival = "best"
        elif row["above best rival"]:
            mean, error = row["above best rival"]
            above_best_rival = f"{mean:+.4f} ± {error:.4f}"
        cells.append(
            [
                name,
                format_rate(best[name][0], GRIDS[task].get(name)),
                f"{row['loss']:.4g}",
                f"{row['worst']:.4g}",
                f"{row['worst over base']:.3f}",
                accuracy,
                above_best_rival,
                f"{row['steps']:g}",
                f"{row['seconds']:.2f} ({row['share of seconds']:.2f} ×)",
                f"{row['seconds in all']:.2f}",
            ]
        )
    columns = "optimizer", "rate", "loss", "worst", "worst / base", "accuracy", "above best rival"
    title = f"{task}: losses at the end, steps and seconds to the last point of the base's curve"
    return reporting.table(title, (*columns, "steps", "seconds", "in all"), cells)


def time_table(task: str, rows: Mapping[str, dict[str, Any]], processes: int) -> Table:
    """A table of the time of each part of KAISA's steps, from :func:`figures`."""
    # Show only timer regions with at least 5 µs.
    timed_rows = {name: row for name, row in rows.items() if row["milliseconds"]}
    largest: dict[str, float] = {}
    for row in timed_rows.values():
        for region, milliseconds in row["milliseconds"].items():
            largest[region] = max(milliseconds, largest.get(region, 0.0))
    regions = [region for region, milliseconds in largest.items() if milliseconds >= 0.005]

    cells = []
    for name, row in timed_rows.items():
        times = row["milliseconds"]
        time_cells = [f"{times.get(region, 0.0):.2f}" for region in regions]
        interval = ""
        if row["refresh interval"] is not None:
            interval = f"{row['refresh interval']:.1f}"
        cells.append([name, *time_cells, f"{sum(times.values()):.2f}", interval])
    title = (
        f"{task}: wall-clock milliseconds per step by timer region, with {processes} processes at "
        f"a time; elsewhere: forward and backward passes"
    )
    return reporting.table(title, ("optimizer", *regions, "sum", "refresh interval"), cells)


def train_all(
    task: str, settings: Mapping[str, Setting], seeds: int, processes: int
) -> dict[str, list[Run]]:
    """Train with each setting on each seed, and return the runs by name."""
    names = []
    jobs = []
    for name, setting in settings.items():
        for seed in range(seeds):
            names.append(name)
            jobs.append(job(task, name, setting, seed))
    runs: dict[str, list[Run]] = {name: [] for name in settings}
    for name, run in zip(names, run_all(jobs, processes), strict=True):
        runs[name].append(run)
    return runs


@dataclass
class Rivals:
    """The rivals of a task.

    Attributes:
        settings: The best of each grid, by name.
        tuning: Pairs of a name and a run on a tuning seed.
        runs: The reported runs, by name.
    """

    settings: dict[str, Setting]
    tuning: list[tuple[str, Run]]
    runs: dict[str, list[Run]]


def tune_rivals(task: str, seeds: int, processes: int) -> Rivals:
    """Tune the rivals of a task, and train each at its best rate."""
    grids: dict[str, list[Setting]] = {}
    for name, rates in GRIDS[task].items():
        grids[name] = [(lr, {}) for lr in rates]
    best, tuning = tune(grids, partial(job, task), TUNED_ON, processes)
    return Rivals(best, tuning, train_all(task, best, seeds, processes))


def read_rivals(record: Mapping[str, Any]) -> Rivals:
    """The rivals of a task from its stored record."""
    names = list(record["basis"]["grids"])
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for run in record["runs"]:
        if run["name"] in runs:
            runs[run["name"]].append(restore_run(run))
    settings: dict[str, Setting] = {}
    for name in names:
        lr, options = record["settings"][name]
        settings[name] = (lr, options)
    tuning = [(run["name"], restore_run(run)) for run in record["tuning"]]
    return Rivals(settings, tuning, runs)


def measure(
    task: str, seeds: int, processes: int, record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Tune and train on a task, and return the settings, the figures, and all runs.

    Args:
        task: Name of the task.
        seeds: Number of reported seeds.
        processes: Number of training runs at a time.
        record: The task's stored record, to reuse the rivals' runs. None tunes the rivals. If the
            record is from another processor, the rivals keep their rates and are trained again,
            because seconds depend on the processor. If anything else in :func:`tasks.basis`
            differs, they are tuned again. KAISA is always trained again.
    """
    # Reuse as much of the stored rivals as is valid.
    current = basis(task, GRIDS[task], TUNED_ON, seeds)
    stored = {} if record is None else record.get("basis", {})
    if record is not None and stored == current:
        rivals = read_rivals(record)
    elif record is not None and {**stored, "cpu": current["cpu"]} == current:
        read = read_rivals(record)
        runs = train_all(task, read.settings, seeds, processes)
        rivals = Rivals(read.settings, read.tuning, runs)
    else:
        rivals = tune_rivals(task, seeds, processes)

    settings = kaisa_settings(task, rivals.settings)
    runs = {**rivals.runs, **train_all(task, settings, seeds, processes)}
    stored_runs = []
    for name, runs_by_seed in runs.items():
        stored_runs += [{"name": name, **asdict(run)} for run in runs_by_seed]
    return {
        "basis": current,
        "settings": {**rivals.settings, **settings},
        "figures": figures(runs, list(rivals.settings)),
        "runs": stored_runs,
        "tuning": [{"name": name, **asdict(run)} for name, run in rivals.tuning],
    }


# ----------------------------------------------------------------------------- tables of the pages

ROWS = {
    **{name: name for name in ("AdamW", "Muon", "SOAP", "SGD")},
    "KAISA, AdamW": "KAISA over AdamW",
    f"KAISA, AdamW{TWICE}": "at twice the rate",
    "KAISA, SGD": "KAISA over SGD",
    f"KAISA, SGD{TWICE}": "at twice that rate",
    f"KAISA, SGD{THIRD}": "at a third of that rate",
    "KAISA, Muon": "KAISA over Muon",
}
"""Labels of the page's rows, by the name of the optimizer."""

REFERENCE = "AdamW"
"""The optimizer whose last loss is the target in the page's table of seconds."""


class Cell(NamedTuple):
    """A cell of a table in Markdown. The smallest value of a column is in bold."""

    value: float
    text: str


Columns = dict[str, dict[str, Cell]]
"""The cells of a table by column and by optimizer."""


def markdown(record: Mapping[str, Any]) -> str:
    """Tables with a row for each optimizer and a column for each task: losses, then seconds.

    The tasks on Fashion-MNIST have separate tables. Losses are means over the seeds, with the worst
    seed in parentheses. Accuracies have separate columns. Seconds are the share of AdamW's seconds
    until AdamW's last loss is reached, and the seconds of the whole run in parentheses. The
    smallest loss and share of a column are in bold.
    """
    of_fashion = [task for task in record if task.startswith("fashion")]
    others = [task for task in record if task not in of_fashion]
    tables: list[str] = []
    for heading, columns_of in (("loss", loss_columns), ("seconds", second_columns)):
        for tasks in (others, of_fashion):
            columns: Columns = {}
            for task in tasks:
                columns |= columns_of(task.removeprefix("unseen "), record[task])
            if columns:
                tables.append(markdown_table(heading, columns))
    return "\n\n".join(tables)


def loss_columns(label: str, task_record: Mapping[str, Any]) -> Columns:
    """The column of a task's losses, and that of its accuracies if they were measured."""
    losses: dict[str, Cell] = {}
    accuracies: dict[str, Cell] = {}
    for name, row in task_record["figures"].items():
        losses[name] = Cell(row["loss"], f"{row['loss']:#.3g} ({row['worst']:#.3g})")
        if row.get("accuracy") is not None:
            # The largest accuracy is in bold.
            accuracies[name] = Cell(-row["accuracy"], f"{row['accuracy']:.2%}")
    columns = {label: losses}
    if accuracies:
        columns[f"{label}, accuracy"] = accuracies
    return columns


def second_columns(label: str, task_record: Mapping[str, Any]) -> Columns:
    """The column of a task's seconds."""
    runs: dict[str, list[Run]] = {}
    for run in task_record["runs"]:
        runs.setdefault(run["name"], []).append(restore_run(run))
    cells: dict[str, Cell] = {}
    for name, row in task_record["figures"].items():
        share = share_of_seconds(runs[name], runs[REFERENCE])
        share_text = f"{share:.2f} ×" if math.isfinite(share) else "never"
        cells[name] = Cell(share, f"{share_text} ({row['seconds in all']:.2g} s)")
    return {label: cells}


def share_of_seconds(runs: Sequence[Run], references: Sequence[Run]) -> float:
    """Median over seeds of the seconds to the reference's last loss, as a share of its seconds."""
    return statistics.median(
        seconds_to(run, reference.losses[-1]) / reference.seconds[-1]
        for run, reference in zip(runs, references, strict=True)
    )


def markdown_table(heading: str, columns: Columns) -> str:
    """A table in Markdown with a row for each optimizer."""
    lines = ["| " + " | ".join([heading, *columns]) + " |", "|---|" + "---|" * len(columns)]
    smallest = {}
    for label, column in columns.items():
        smallest[label] = min(cell.value for cell in column.values())
    for name, row_label in ROWS.items():
        cells = []
        for label, column in columns.items():
            cell = column.get(name, Cell(math.nan, ""))
            is_smallest = cell.value == smallest[label]
            cells.append(f"**{cell.text}**" if is_smallest else cell.text)
        if any(cells):
            lines.append("| " + " | ".join([row_label, *cells]) + " |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------- the benchmark


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune and train on each task, print its tables, and store its runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(GRIDS), help="default: the stored tasks")
    parser.add_argument("--seeds", type=int, default=5, help="number of reported seeds")
    parser.add_argument("--processes", type=int, default=2, help="training runs at a time")
    parser.add_argument("--json", type=Path, help="write the runs to this file")
    parser.add_argument(
        "--keep-rivals", action="store_true", help="reuse the rivals' runs in the file if valid"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="only print tables of the stored runs for the docs"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SecondOrderWarning)
    record = stored_tasks(options.json, GRIDS)
    if options.markdown:
        print(markdown(record))
        return
    tasks = list(filter(has_data, options.tasks or STORED))
    for task in tasks:
        stored = record.get(task) if options.keep_rivals else None
        record[task] = measure(task, options.seeds, options.processes, stored)
        rows = record[task]["figures"]
        reporting.show(table(task, rows, record[task]["settings"]))
        reporting.show(time_table(task, rows, options.processes))
        reporting.store(options.json, None, tasks=record)
    if options.tasks and len(tasks) < len(options.tasks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

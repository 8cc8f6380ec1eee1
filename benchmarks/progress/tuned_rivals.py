"""KAISA with default settings next to tuned rivals, on seven small tasks.

    make tasks                                                 the tasks whose runs are stored
    make tasks ARGS='--tasks "unseen lstm" "cifar resnet" --seeds 3'
    make tasks ARGS=--keep-rivals                              do not tune again, if that is valid
    make tasks ARGS=--markdown                                 tables of the stored runs, as in docs

AdamW, Muon and SOAP, and SGD where a task is also trained with it, are each tuned on six learning
rates, on two seeds that are not reported, by the mean loss at the end. KAISA is not tuned: it runs
at the best rate of its base and at twice that, over SGD also at a third of it. On images it also
runs over Muon at Muon's best rate, with AdamW for all that Muon does not train.

Five other seeds are reported. Differences to the best rival, the one with the least mean of the
reported losses, are paired by seed, with their standard error. A loss is the one at the end; on
images it is the test loss, and the curves are of training images. Steps and seconds are counted
until a curve reaches the last point of the base's curve of the same seed, and are medians over the
seeds. The base is SGD for SGD and KAISA over SGD, Muon for KAISA over Muon, and AdamW for the rest.

A second table says on what KAISA spends its time. Every run is stored. If there is a stored file,
the tasks that you do not ask for stay in it. Tasks whose data are missing are left out.
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
from typing import Any

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
    final,
    has_data,
    paired,
    restored,
    run_all,
    seconds_to,
    steps_to,
    stored_tasks,
    tuned,
)

TUNED_ON = 100, 101
TWICE = ", twice the rate"
THIRD = ", a third of the rate"
RATES = {"": 1.0, TWICE: 2.0, THIRD: 1 / 3}  # times the base's best
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
    "fashion resnet, constant rate": RESNETS,
    "fashion vit": VITS,
    "cifar resnet": RESNETS,
}
NOT_STORED = (
    *("unseen transformer", "unseen lstm", "cifar resnet"),
    *("fashion resnet, constant rate", "fashion vit"),
)
STORED = [task for task in GRIDS if task not in NOT_STORED]


def job(task: str, name: str, setting: Setting, seed: int) -> Job:
    """One training of the benchmark."""
    lr, options = setting
    return Job(task, name.removesuffix(TWICE).removesuffix(THIRD), lr, seed, options)


def base_of(name: str) -> str:
    """The optimizer whose last loss is the goal of a row."""
    if name.startswith("KAISA, Muon"):
        return "Muon"
    return "SGD" if "SGD" in name else "AdamW"


def ours(task: str, best: Mapping[str, Setting]) -> dict[str, Setting]:
    """KAISA over each base that was tuned: at the base's best rate, and at shares of that."""
    rows = [("AdamW", ""), ("AdamW", TWICE), ("SGD", ""), ("SGD", TWICE), ("SGD", THIRD)]
    if task in IMAGES:
        rows.append(("Muon", ""))
    return {
        f"KAISA, {base}{share}": (RATES[share] * best[base][0], {})
        for base, share in rows
        if base in best
    }


def figures(runs: Mapping[str, Sequence[Run]], rivals: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the tables say of each optimizer.

    Args:
        runs: By name, one for each seed, in the same order.
        rivals: Names of the tuned ones.
    """
    losses = {name: [final(run) for run in of] for name, of in runs.items()}
    best = min(rivals, key=lambda name: statistics.mean(losses[name]))
    result: dict[str, dict[str, Any]] = {}
    for name, of in runs.items():
        theirs = runs[base_of(name)]
        their_losses = losses[base_of(name)]
        goals = [run.losses[-1] for run in theirs]  # of the curves
        seconds = list(map(seconds_to, of, goals))
        accuracies = [run.end["accuracy"] for run in of if "accuracy" in run.end]
        result[name] = {
            "loss": statistics.mean(losses[name]),
            "worst": max(losses[name]),
            "worst over base": max(a / b for a, b in zip(losses[name], their_losses, strict=True)),
            "accuracy": statistics.mean(accuracies) if accuracies else None,
            "best rival": best,
            "above best rival": None if name == best else paired(losses[name], losses[best]),
            "steps": statistics.median(map(steps_to, of, goals)),
            "seconds": statistics.median(seconds),
            "share of seconds": statistics.median(
                found / run.seconds[-1] for found, run in zip(seconds, theirs, strict=True)
            ),
            "seconds in all": statistics.median(run.seconds[-1] for run in of),
            **breakdown(of),
        }
    return result


def breakdown(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean milliseconds per step by account, and the mean refresh interval at the end, if known."""
    milliseconds: dict[str, float] = {}
    for run in runs:
        steps = len(run.losses) * TASKS[run.job.task]().every
        for account, seconds in run.accounts.items():
            mean = 1000 * seconds / steps / len(runs)
            milliseconds[account] = milliseconds.get(account, 0.0) + mean
    intervals = [run.refresh_interval for run in runs if run.refresh_interval is not None]
    return {
        "milliseconds": milliseconds,
        "refresh interval": statistics.mean(intervals) if intervals else None,
    }


def table(task: str, found: Mapping[str, dict[str, Any]], best: Mapping[str, Setting]) -> Table:
    """Losses and times of :func:`figures`.

    "edge" says that the best rate is the least or the greatest of its grid.
    """
    rows = []
    for name, row in found.items():
        grid = GRIDS[task].get(name)
        lr = best[name][0]
        difference = row["above best rival"]
        above = f"{difference[0]:+.4f} ± {difference[1]:.4f}" if difference else ""
        rows.append(
            [
                name,
                f"{lr:.3g}" + (", edge" if grid and lr in (grid[0], grid[-1]) else ""),
                *(f"{row[key]:.4g}" for key in ("loss", "worst")),
                f"{row['worst over base']:.3f}",
                "" if row["accuracy"] is None else f"{row['accuracy']:.2%}",
                "best" if name == row["best rival"] else above,
                f"{row['steps']:g}",
                f"{row['seconds']:.2f} ({row['share of seconds']:.2f} ×)",
                f"{row['seconds in all']:.2f}",
            ]
        )
    columns = "optimizer", "rate", "loss", "worst", "worst / base", "accuracy", "above best rival"
    title = f"{task}: losses at the end, steps and seconds to the last point of the base's curve"
    return reporting.table(title, (*columns, "steps", "seconds", "in all"), rows)


def time_table(task: str, found: Mapping[str, dict[str, Any]], processes: int) -> Table:
    """Where the time of KAISA's steps goes, from :func:`figures`."""
    with_accounts = {name: row for name, row in found.items() if row["milliseconds"]}
    greatest: dict[str, float] = {}
    for row in with_accounts.values():
        for account, spent in row["milliseconds"].items():
            greatest[account] = max(spent, greatest.get(account, 0.0))
    accounts = [account for account, spent in greatest.items() if spent >= 0.005]
    rows = []
    for name, row in with_accounts.items():
        spent = row["milliseconds"]
        interval = row["refresh interval"]
        rows.append(
            [
                name,
                *(f"{spent.get(account, 0.0):.2f}" for account in accounts),
                f"{sum(spent.values()):.2f}",
                "" if interval is None else f"{interval:.1f}",
            ]
        )
    title = (
        f"{task}: milliseconds per step by account, wall-clock time with {processes} processes at "
        f"a time; elsewhere: passes"
    )
    return reporting.table(title, ("optimizer", *accounts, "sum", "refresh interval"), rows)


def trained(
    task: str, settings: Mapping[str, Setting], seeds: int, processes: int
) -> dict[str, list[Run]]:
    """Runs by name, one for each seed."""
    jobs = [job(task, name, settings[name], seed) for name in settings for seed in range(seeds)]
    done = run_all(jobs, processes)
    return {name: done[i * seeds : (i + 1) * seeds] for i, name in enumerate(settings)}


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
    grids: dict[str, list[Setting]] = {
        name: [(lr, {}) for lr in rates] for name, rates in GRIDS[task].items()
    }
    best, tuning = tuned(grids, partial(job, task), TUNED_ON, processes)
    return Rivals(best, tuning, trained(task, best, seeds, processes))


def read_rivals(record: Mapping[str, Any]) -> Rivals:
    """The rivals of a task from its stored record."""
    names = list(record["basis"]["grids"])
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for run in record["runs"]:
        if run["name"] in runs:
            runs[run["name"]].append(restored(run))
    settings: dict[str, Setting] = {}
    for name in names:
        lr, options = record["settings"][name]
        settings[name] = (lr, options)
    return Rivals(settings, [(run["name"], restored(run)) for run in record["tuning"]], runs)


def measured(
    task: str, seeds: int, processes: int, record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Tune and train on a task: settings, figures, and all runs.

    Args:
        task: Its name.
        seeds: How many are reported.
        processes: Trainings at a time.
        record: The task's stored record, to reuse its rivals; None tunes them. Only if they ran on
            another processor, they keep their rates but are trained again, because seconds depend
            on the processor. If anything else in :func:`tasks.basis` differs, they are tuned again.
            KAISA is always trained again.
    """
    current = basis(task, GRIDS[task], TUNED_ON, seeds)
    before = {} if record is None else record.get("basis", {})
    if record is not None and before == current:
        rivals = read_rivals(record)
    elif record is not None and {**before, "cpu": current["cpu"]} == current:
        rivals = read_rivals(record)
        rivals.runs = trained(task, rivals.settings, seeds, processes)
    else:
        rivals = tune_rivals(task, seeds, processes)
    settings = ours(task, rivals.settings)
    runs = {**rivals.runs, **trained(task, settings, seeds, processes)}
    return {
        "basis": current,
        "settings": {**rivals.settings, **settings},
        "figures": figures(runs, list(rivals.settings)),
        "runs": [{"name": name, **asdict(run)} for name, of in runs.items() for run in of],
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

GOAL_OF = "AdamW"
"""The optimizer whose last loss is the goal in the page's table of seconds."""


def markdown(record: Mapping[str, Any]) -> str:
    """Two tables with a row for each optimizer and a column for each task: losses, then seconds.

    Losses are means over the seeds, with the worst seed in parentheses. Accuracies have columns of
    their own. Seconds are those of the whole run, and those until AdamW's last loss as a share of
    AdamW's. The least loss and the least share of a column are in bold.
    """
    losses: dict[str, dict[str, tuple[float, str]]] = {}
    seconds: dict[str, dict[str, tuple[float, str]]] = {}
    for task, of in record.items():
        label = task.removeprefix("unseen ")
        loss_column = losses.setdefault(label, {})
        second_column = seconds.setdefault(label, {})
        runs: dict[str, list[Run]] = {}
        for run in of["runs"]:
            runs.setdefault(run["name"], []).append(restored(run))
        for name, row in of["figures"].items():
            loss_column[name] = row["loss"], f"{row['loss']:#.3g} ({row['worst']:#.3g})"
            if row.get("accuracy") is not None:
                accuracies = losses.setdefault(f"{label}, accuracy", {})
                accuracies[name] = -row["accuracy"], f"{row['accuracy']:.2%}"
            share = share_of_seconds(runs[name], runs[GOAL_OF])
            reached = f"{share:.2f} ×" if math.isfinite(share) else "never"
            second_column[name] = share, f"{reached} ({row['seconds in all']:.2g} s)"
    return f"{by_optimizer('loss', losses)}\n\n{by_optimizer('seconds', seconds)}"


def share_of_seconds(runs: Sequence[Run], references: Sequence[Run]) -> float:
    """The median over seeds of the seconds to the reference's last loss, over the reference's."""
    return statistics.median(
        seconds_to(run, reference.losses[-1]) / reference.seconds[-1]
        for run, reference in zip(runs, references, strict=True)
    )


def by_optimizer(heading: str, columns: Mapping[str, Mapping[str, tuple[float, str]]]) -> str:
    """A table in Markdown from pairs of a value and a cell, by column and by optimizer."""
    lines = ["| " + " | ".join([heading, *columns]) + " |", "|---|" + "---|" * len(columns)]
    least = {label: min(value for value, _ in of.values()) for label, of in columns.items()}
    for name, row_label in ROWS.items():
        cells = []
        for label, of in columns.items():
            value, cell = of.get(name, (math.nan, ""))
            cells.append(f"**{cell}**" if value == least[label] else cell)
        if any(cells):
            lines.append("| " + " | ".join([row_label, *cells]) + " |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------- the benchmark


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train, print, and store what is done after each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(GRIDS), help="default: those stored")
    parser.add_argument("--seeds", type=int, default=5, help="reported ones: 0, 1 and so on")
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time")
    parser.add_argument("--json", type=Path, help="write the runs there")
    parser.add_argument(
        "--keep-rivals", action="store_true", help="use the file's runs of rivals if they are valid"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print tables of the file for docs; train nothing"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SecondOrderWarning)
    record = stored_tasks(options.json, GRIDS)
    if options.markdown:
        print(markdown(record))
        return
    tasks = list(filter(has_data, options.tasks or STORED))
    for task in tasks:
        kept = record.get(task) if options.keep_rivals else None
        record[task] = measured(task, options.seeds, options.processes, kept)
        found = record[task]["figures"]
        reporting.show(table(task, found, record[task]["settings"]))
        reporting.show(time_table(task, found, options.processes))
        reporting.store(options.json, None, tasks=record)
    if options.tasks and len(tasks) < len(options.tasks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

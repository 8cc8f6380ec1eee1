"""KAISA with default settings next to tuned rivals, on four held-out tasks.

    make tasks                                                 the four whose runs are stored
    make tasks ARGS='--tasks "unseen lstm" "unseen vit" --seeds 3'

AdamW, Muon and SOAP, and SGD where a task is trained with it as well, are each tuned on six
learning rates, on two seeds that are not reported, by the mean loss at the end. KAISA is not tuned:
it runs at the best rate of the base that it is over, and at twice that. Five other seeds are
reported. Differences to the best rival, the one with the least mean of the reported losses, are
paired by seed, with their standard error; steps and seconds are those to the last loss of the same
seed of AdamW, or of SGD for it and what is over it: medians, as is the time of a whole run. Every
run is stored; of a file that is there already, tasks that are not asked for stay.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

import reporting
from second_order import SecondOrderWarning
from tasks import (
    Job,
    Run,
    Setting,
    final,
    paired,
    run_all,
    seconds_to,
    steps_to,
    stored_tasks,
    tuned,
)

TUNED_ON = 100, 101
TWICE = ", twice the rate"
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
STORED = ("unseen llama", "unseen friedman", "unseen diabetes", "unseen head")
GRIDS: dict[str, Rates] = {
    "unseen transformer": TRANSFORMERS,
    "unseen llama": TRANSFORMERS,
    "unseen lstm": RECURRENT,
    "unseen vit": SMALL,
    "unseen friedman": WITH_SGD,
    "unseen diabetes": WITH_SGD,
    "unseen head": WITH_SGD,
}


def job(task: str, name: str, setting: Setting, seed: int) -> Job:
    """One training of the benchmark."""
    lr, options = setting
    return Job(task, name.removesuffix(TWICE), lr, seed, options)


def base_of(name: str) -> str:
    """Whose last loss a row is held against."""
    return "SGD" if "SGD" in name else "AdamW"


def ours(best: Mapping[str, Setting]) -> dict[str, Setting]:
    """KAISA over each base that was tuned, at its best rate and at twice that."""
    return {
        f"KAISA, {base}{more}": (times * best[base][0], {})
        for base in ("AdamW", "SGD")
        if base in best
        for more, times in (("", 1), (TWICE, 2))
    }


def figures(runs: Mapping[str, Sequence[Run]], rivals: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the table says of each optimizer.

    Args:
        runs: By name, one for each seed, in the same order.
        rivals: Names of the tuned ones.
    """
    losses = {name: [final(run) for run in of] for name, of in runs.items()}
    best = min(rivals, key=lambda name: statistics.mean(losses[name]))
    result: dict[str, dict[str, Any]] = {}
    for name, of in runs.items():
        theirs = runs[base_of(name)]
        goals = losses[base_of(name)]
        seconds = list(map(seconds_to, of, goals))
        result[name] = {
            "loss": statistics.mean(losses[name]),
            "worst": max(losses[name]),
            "worst over base": max(a / b for a, b in zip(losses[name], goals, strict=True)),
            "best rival": best,
            "above best rival": None if name == best else paired(losses[name], losses[best]),
            "steps": statistics.median(map(steps_to, of, goals)),
            "seconds": statistics.median(seconds),
            "share of seconds": statistics.median(
                found / run.seconds[-1] for found, run in zip(seconds, theirs, strict=True)
            ),
            "seconds in all": statistics.median(run.seconds[-1] for run in of),
        }
    return result


def table(task: str, found: Mapping[str, dict[str, Any]], best: Mapping[str, Setting]) -> Table:
    """Of :func:`figures`; "edge": the best rate is the least or the greatest of its grid."""
    rows = []
    for name, row in found.items():
        grid, lr, told = GRIDS[task].get(name), best[name][0], row["above best rival"]
        above = f"{told[0]:+.4f} ± {told[1]:.4f}" if told else ""
        rows.append(
            [
                name,
                f"{lr:g}" + (", edge" if grid and lr in (grid[0], grid[-1]) else ""),
                *(f"{row[key]:.4g}" for key in ("loss", "worst")),
                f"{row['worst over base']:.3f}",
                "best" if name == row["best rival"] else above,
                f"{row['steps']:g}",
                f"{row['seconds']:.2f} ({row['share of seconds']:.2f} ×)",
                f"{row['seconds in all']:.2f}",
            ]
        )
    columns = "optimizer", "rate", "loss", "worst", "worst / base", "above best rival"
    title = f"{task}: losses at the end, steps and seconds to the base's last"
    return reporting.table(title, (*columns, "steps", "seconds", "in all"), rows)


def measured(task: str, seeds: int, processes: int) -> dict[str, Any]:
    """Tune and train on a task: settings, figures, and all runs."""
    grids: dict[str, list[Setting]] = {
        name: [(lr, {}) for lr in rates] for name, rates in GRIDS[task].items()
    }
    trained = partial(job, task)
    best, tuning = tuned(grids, trained, TUNED_ON, processes)
    settings = {**best, **ours(best)}
    named = [(name, seed) for name in settings for seed in range(seeds)]
    done = run_all((trained(name, settings[name], seed) for name, seed in named), processes)
    runs = {name: done[i * seeds : (i + 1) * seeds] for i, name in enumerate(settings)}
    return {
        "settings": settings,
        "figures": figures(runs, list(best)),
        "runs": [{"name": name, **asdict(r)} for (name, _), r in zip(named, done, strict=True)],
        "tuning": [{"name": name, **asdict(run)} for name, run in tuning],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train, print, and store what is done after each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(GRIDS), default=list(STORED))
    parser.add_argument("--seeds", type=int, default=5, help="reported ones: 0, 1 and so on")
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time")
    parser.add_argument("--json", type=Path, help="write the runs there")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SecondOrderWarning)
    record = stored_tasks(options.json, GRIDS)
    for task in options.tasks:
        record[task] = measured(task, options.seeds, options.processes)
        reporting.show(table(task, record[task]["figures"], record[task]["settings"]))
        reporting.store(options.json, None, tasks=record)


if __name__ == "__main__":
    main()

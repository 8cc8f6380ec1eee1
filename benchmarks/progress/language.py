"""A language model trained by AdamW, Muon, SOAP, SGD and KAISA: loss, steps and seconds.

    make language-model                                   the small model: about an hour
    make language-model ARGS="--size full --seeds 2"      four layers, contexts of 128: hours

Each optimizer is tuned on a grid of the same size, on a seed that is not reported, by its final
loss on held-out text. We report five other seeds with the best setting of each grid. Differences
are paired by seed, with their standard error. "KAISA, defaults" is not tuned. It has default
settings, and the learning rate that is best for AdamW. The last row doubles that rate. Every run is
stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
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
    final_loss,
    mean_difference,
    run_all,
    seconds_to,
    steps_to,
    tune,
)

TUNED_ON = 100
KAISA = "KAISA"
DEFAULTS = "KAISA, defaults"
REFERENCE = "AdamW"
TWICE = "KAISA, twice AdamW's rate"
OWN_SCALE = "KAISA, its default scale"
GRIDS: dict[str, list[Setting]] = {
    "AdamW": [(lr, {}) for lr in (0.002, 0.003, 0.005, 0.007, 0.01, 0.014)],
    "Muon": [(lr, {}) for lr in (0.005, 0.007, 0.01, 0.014, 0.02, 0.03)],
    "SOAP": [(lr, {}) for lr in (0.003, 0.005, 0.007, 0.01, 0.014, 0.02)],
    "SGD": [(lr, {}) for lr in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)],
    KAISA: [
        *[(lr, {}) for lr in (0.007, 0.01, 0.014)],
        *[(0.01, {"damping": damping}) for damping in (0.03, 0.2)],
        (0.01, {"damping": 0.05, "grafting": "none"}),
    ],
}


def job(task: str, name: str, setting: Setting, seed: int) -> Job:
    """A training run of the benchmark."""
    lr, options = setting
    optimizer = "KAISA, AdamW" if name.startswith(KAISA) else name
    return Job(task, optimizer, lr, seed, options)


def best_setting(stored_runs: Iterable[dict[str, Any]]) -> Setting:
    """The setting of the stored run with the smallest final loss."""
    job = min(stored_runs, key=lambda run: float(run["losses"][-1]))["job"]
    return job["lr"], job["options"]


def figures(runs: dict[str, list[Run]]) -> dict[str, dict[str, Any]]:
    """The figures of the table for each optimizer."""
    references = runs[REFERENCE]
    default_losses = [final_loss(run) for run in runs[DEFAULTS]]
    num_steps = TASKS[references[0].job.task]().steps
    result: dict[str, dict[str, Any]] = {}
    for name, runs_by_seed in runs.items():
        # The target of each seed is the reference's final loss.
        step_shares = []
        second_shares = []
        for run, reference in zip(runs_by_seed, references, strict=True):
            target = final_loss(reference)
            step_shares.append(steps_to(run, target) / num_steps)
            second_shares.append(seconds_to(run, target) / reference.seconds[-1])

        losses = [final_loss(run) for run in runs_by_seed]
        result[name] = {
            "loss": statistics.mean(losses),
            "share of steps": statistics.median(step_shares),
            "share of seconds": statistics.median(second_shares),
            "seconds": statistics.median(run.seconds[-1] for run in runs_by_seed),
            "beside defaults": mean_difference(losses, default_losses),
        }
    return result


def table(rows: dict[str, dict[str, Any]], best: dict[str, Setting]) -> Table:
    """A table of :func:`figures`."""
    columns = "optimizer", "setting", "loss", "above defaults", "steps", "seconds", "seconds in all"
    cells = []
    for name, row in rows.items():
        lr, options = best[name]
        setting = ", ".join([f"lr {lr}", *(f"{key} {value}" for key, value in options.items())])
        above_defaults = ""
        if name != DEFAULTS and row["beside defaults"] is not None:
            mean, error = row["beside defaults"]
            above_defaults = f"{mean:+.3f} ± {error:.3f}"
        cells.append(
            [
                name,
                setting,
                f"{row['loss']:.3f}",
                above_defaults,
                f"{row['share of steps']:.2f} ×",
                f"{row['share of seconds']:.2f} ×",
                f"{row['seconds']:.0f}",
            ]
        )
    title = "held-out loss, and steps and seconds to AdamW's final loss"
    return reporting.table(title, columns, cells)


def main() -> None:
    """Tune, train, print the table, and store the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--seeds", type=int, default=5, help="number of reported seeds")
    parser.add_argument("--processes", type=int, default=2, help="training runs at a time")
    parser.add_argument("--settings", type=Path, help="use the settings of a stored run")
    parser.add_argument("--json", type=Path, help="write the runs to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SecondOrderWarning)
    task = "language" if arguments.size == "small" else "language, 4 layers"

    # Tune all optimizers, or read their settings.
    best: dict[str, Setting]
    tuning: list[dict[str, Any]]
    if arguments.settings:
        stored = json.loads(arguments.settings.read_text("utf-8"))
        best = {name: (lr, options) for name, (lr, options) in stored["settings"].items()}
        tuning = stored["tuning"]
    else:
        best, tuning_runs = tune(GRIDS, partial(job, task), (TUNED_ON,), arguments.processes)
        tuning = [{"name": name, **asdict(run)} for name, run in tuning_runs]
        best[DEFAULTS] = best[REFERENCE]
        best[TWICE] = (2 * best[REFERENCE][0], {})
        kaisa_runs = [run for run in tuning if run["name"] == KAISA]
        best[OWN_SCALE] = best_setting(
            run for run in kaisa_runs if "grafting" not in run["job"]["options"]
        )

    # Train with each setting on each seed.
    names = []
    jobs = []
    for name, setting in best.items():
        for seed in range(arguments.seeds):
            names.append(name)
            jobs.append(job(task, name, setting, seed))
    runs: dict[str, list[Run]] = {name: [] for name in best}
    stored_runs = []
    for name, run in zip(names, run_all(jobs, arguments.processes), strict=True):
        runs[name].append(run)
        stored_runs.append({"name": name, **asdict(run)})

    rows = figures(runs)
    reporting.show(table(rows, best))
    reporting.store(arguments.json, settings=best, figures=rows, runs=stored_runs, tuning=tuning)


if __name__ == "__main__":
    main()

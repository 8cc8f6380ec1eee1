"""A language model trained by AdamW, Muon, SOAP, SGD and KAISA: loss, steps and seconds.

    make language-model                                   the small model: about an hour
    make language-model ARGS="--size full --seeds 2"      four layers, contexts of 128: hours

Each optimizer is tuned on a grid of the same size on a seed that is not reported, by its loss on
held-out text at the end. Reported are five other seeds, at the best of each grid; differences are
paired by seed, with their standard error. "KAISA, defaults" is not tuned at all: nothing is set but
what AdamW has, at the learning rate that is best for AdamW; the last row doubles that rate. Every
run is stored.
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
    final,
    paired,
    run_all,
    seconds_to,
    steps_to,
    tuned,
)

TUNED_ON = 100
OURS = "KAISA"
DEFAULTS = "KAISA, defaults"
REFERENCE = "AdamW"
TWICE = "KAISA, twice AdamW's rate"
OWN_SCALE = "KAISA, its default scale"
GRIDS: dict[str, list[Setting]] = {
    "AdamW": [(lr, {}) for lr in (0.002, 0.003, 0.005, 0.007, 0.01, 0.014)],
    "Muon": [(lr, {}) for lr in (0.005, 0.007, 0.01, 0.014, 0.02, 0.03)],
    "SOAP": [(lr, {}) for lr in (0.003, 0.005, 0.007, 0.01, 0.014, 0.02)],
    "SGD": [(lr, {}) for lr in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)],
    OURS: [
        *[(lr, {}) for lr in (0.007, 0.01, 0.014)],
        *[(0.01, {"damping": damping}) for damping in (0.03, 0.2)],
        (0.01, {"damping": 0.05, "grafting": "none"}),
    ],
}


def job(task: str, name: str, setting: Setting, seed: int) -> Job:
    """One training of the benchmark."""
    lr, options = setting
    optimizer = "KAISA, AdamW" if name.startswith(OURS) else name
    return Job(task, optimizer, lr, seed, options)


def best_of(stored: Iterable[dict[str, Any]]) -> Setting:
    """The setting with the least loss at the end."""
    job = min(stored, key=lambda run: float(run["losses"][-1]))["job"]
    return job["lr"], job["options"]


def figures(runs: dict[str, list[Run]]) -> dict[str, dict[str, Any]]:
    """What the table says of each optimizer."""
    reference = runs[REFERENCE]
    total = TASKS[reference[0].job.task]().steps
    result: dict[str, dict[str, Any]] = {}
    for name, of in runs.items():
        losses = [final(run) for run in of]
        shares = []
        paces = []
        for run, theirs in zip(of, reference, strict=True):
            shares.append(steps_to(run, final(theirs)) / total)
            paces.append(seconds_to(run, final(theirs)) / theirs.seconds[-1])
        result[name] = {
            "loss": statistics.mean(losses),
            "share of steps": statistics.median(shares),
            "share of seconds": statistics.median(paces),
            "seconds": statistics.median(run.seconds[-1] for run in of),
            "beside defaults": paired(losses, [final(run) for run in runs[DEFAULTS]]),
        }
    return result


def table(found: dict[str, dict[str, Any]], best: dict[str, Setting]) -> Table:
    """Of :func:`figures`."""
    columns = "optimizer", "setting", "loss", "above defaults", "steps", "seconds", "seconds in all"
    rows = []
    for name, row in found.items():
        lr, options = best[name]
        more = "".join(f", {key} {value}" for key, value in options.items())
        told = row["beside defaults"]
        rows.append(
            [
                name,
                f"lr {lr}{more}",
                f"{row['loss']:.3f}",
                "" if name == DEFAULTS or told is None else f"{told[0]:+.3f} ± {told[1]:.3f}",
                *(f"{row[f'share of {key}']:.2f} ×" for key in ("steps", "seconds")),
                f"{row['seconds']:.0f}",
            ]
        )
    title = "held-out loss, and what it takes to reach AdamW's last"
    return reporting.table(title, columns, rows)


def main() -> None:
    """Tune, train, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--seeds", type=int, default=5, help="reported ones: 0, 1 and so on")
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time")
    parser.add_argument("--settings", type=Path, help="take those of a stored run, and do not tune")
    parser.add_argument("--json", type=Path, help="write the runs there")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SecondOrderWarning)
    task = "language" if arguments.size == "small" else "language, 4 layers"
    best: dict[str, Setting]
    grids: list[dict[str, Any]] = []
    if arguments.settings:
        stored = json.loads(arguments.settings.read_text("utf-8"))
        best = {name: (lr, options) for name, (lr, options) in stored["settings"].items()}
        grids = stored["tuning"]
    else:
        best, tried = tuned(GRIDS, partial(job, task), (TUNED_ON,), arguments.processes)
        grids = [{"name": name, **asdict(run)} for name, run in tried]
        best[DEFAULTS] = best[REFERENCE]
        best[TWICE] = 2 * best[REFERENCE][0], {}
        best[OWN_SCALE] = best_of(
            run for run in grids if run["name"] == OURS and "grafting" not in run["job"]["options"]
        )
    named = [(name, seed) for name in best for seed in range(arguments.seeds)]
    done = run_all((job(task, n, best[n], seed) for n, seed in named), arguments.processes)
    runs: dict[str, list[Run]] = {name: [] for name in best}
    for (name, _), run in zip(named, done, strict=True):
        runs[name].append(run)
    found = figures(runs)
    reporting.show(table(found, best))
    reporting.store(
        arguments.json,
        settings=best,
        figures=found,
        runs=[{"name": n, **asdict(r)} for (n, _), r in zip(named, done, strict=True)],
        tuning=grids,
    )


if __name__ == "__main__":
    main()

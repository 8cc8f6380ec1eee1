"""What DistKFAC's threads and stats workers buy, each figure beside what was asked and its floor.

    PYTHONPATH=examples python benchmarks/asynchronous.py                 all of it, most of an hour
    PYTHONPATH=examples python benchmarks/asynchronous.py --only progress --models conv --seeds 3

progress   digits: steps to the targets of `progress.py`, async against sync at equal intervals, and
           all intervals against every step
pace       digits: the time of those steps, beside SGD's and a step that only preconditions
resnet     ResNet-20: the time of a step over SGD's, over a grid of intervals; the intervals that
           lose no progress are those of `progress`, since random pictures teach nothing
stats      ResNet-20: the same on two processes, of which one computes statistics
long       20,000 steps of a small network: resident memory, delays, equality of the processes

A process trains with one thread and solves with another, which has a core of its own if the machine
has two and nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import asynchronous_cost as cost
import progress
from asynchronous_cost import CHEAP, EQUAL, GRID, Intervals, Record
from curvature import rounded
from curvature_cost import table
from progress import Run, Setting
from progress_distributed import geometric_mean, steps
from second_order import DistKFAC
from speed import machine, write

MODELS = ("conv", "autoencoder")
SECTIONS = ("progress", "pace", "resnet", "stats", "long")
TARGETS = {"conv": progress.CLASSIFIER_TARGETS, "autoencoder": progress.AUTOENCODER_TARGETS}
OPTIONS: dict[str, dict[str, Any]] = {
    "conv": {"lr": 0.1},
    "autoencoder": {"lr": 0.1, "kl_clip": 1e-3},  # its default is too tight here for a comparison
}
LENGTH = {"conv": 200, "autoencoder": 400}
LEVELS = {"conv": (0.2, 0.1, 0.05, 0.02, 0.01), "autoencoder": (20.0, 19.0, 18.0, 17.5, 17.0)}
"""Losses whose steps are compared, seed by seed: more of them say more than medians."""
AFTER = {"conv": (50,), "autoencoder": (100, 400)}
"""Steps after which the loss is shown: before any run has met all its targets and ends."""

# --------------------------------------------------------------------------------------- progress


@dataclass
class Way:
    """One way to train: when statistics and solves come, and whether they are waited for."""

    kind: str
    intervals: Intervals
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return "{} / {}".format(*self.intervals)

    def setting(self, model: str, made: list[DistKFAC]) -> Setting:
        """Leaves its optimizers in a list."""

        def build(network: torch.nn.Module) -> DistKFAC:
            factors, inverses = self.intervals
            optimizer = DistKFAC(
                network,
                momentum=0.9,
                inverse_threads=1,
                factor_update_steps=factors,
                inv_update_steps=inverses,
                **OPTIONS[model],
                **self.options,
            )
            made.append(optimizer)
            return optimizer

        return Setting(self.kind, self.label, build, LENGTH[model])


def ways() -> list[Way]:
    return [
        *(Way("sync", each, {"async_inverse": False}) for each in EQUAL),
        *(Way("async", each) for each in dict.fromkeys((*EQUAL, *GRID))),
        *(Way("cheap", each, {"conv_factors": "cheap"}) for each in CHEAP),
    ]


def train(model: str, way: Way, seed: int) -> Record:
    """One training, with the steps that its last solves were under way."""
    made: list[DistKFAC] = []
    setting = way.setting(model, made)
    if model == "autoencoder":
        run = progress.run_autoencoder(setting, seed, time.process_time)
    else:
        run = progress.run_classifier(model, setting, seed, clock=time.process_time)
    (optimizer,) = made
    delay = cost.staleness(optimizer)
    optimizer.close()
    return {"run": run, "delay": delay}


def reached(run: Run, level: float) -> float:
    """The step at which a loss was met, between evaluations as if its logarithm fell evenly."""
    before = math.inf
    for i, loss in enumerate(run.losses, start=1):
        if loss <= level:
            if math.isinf(before):
                return progress.EVERY * i
            part = math.log(before / level) / math.log(before / loss)
            return progress.EVERY * (i - 1 + part)
        before = loss
    return math.inf


def ratios(ours: Sequence[Run], theirs: Sequence[Run], levels: Sequence[float]) -> list[float]:
    """Steps of ours over those of theirs, seed by seed and loss by loss, where both arrive."""
    pairs = {run.seed: run for run in theirs}
    found = [
        (reached(run, level), reached(pairs[run.seed], level)) for run in ours for level in levels
    ]
    return [a / b for a, b in found if math.isfinite(a + b)]


def after(run: Run, count: int) -> float:
    """The loss after some steps, or the last one."""
    return run.losses[min(count // progress.EVERY, len(run.losses)) - 1]


def progress_table(
    model: str, found: Sequence[tuple[Way, list[Record]]]
) -> tuple[Table, list[Record]]:
    """Medians over the seeds, and the mean ratios to sync and to every step."""
    targets, levels = TARGETS[model], LEVELS[model]
    named = {(way.kind, way.intervals): [r["run"] for r in records] for way, records in found}
    result = table(
        f"{model}: median steps; ratios of steps to a loss, asked: within 5 %",
        (
            "statistics / solves every",
            *targets,
            *(f"loss after {count}" for count in AFTER[model]),
            "to sync",
            "to every step",
            "delay",
        ),
    )
    rows = []
    for way, records in found:
        ours = named[way.kind, way.intervals]
        medians = [progress.median_steps(ours, target) for target in targets]
        final = [statistics.median(after(run, count) for run in ours) for count in AFTER[model]]
        row: Record = {
            "model": model,
            "kind": way.kind,
            "intervals": way.intervals,
            "steps": dict(zip(targets, medians, strict=True)),
            "loss after": dict(zip(map(str, AFTER[model]), final, strict=True)),
            "delay": statistics.median(record["delay"] for record in records),
        }
        cells = []
        for name, other in (("to sync", ("sync", way.intervals)), ("to every step", EVERY_STEP)):
            theirs = named.get(other, [])
            pairs = ratios(ours, theirs, levels) if theirs is not ours else []
            cells.append("")
            if pairs and (name == "to every step" or way.kind == "async"):
                logs = [math.log(ratio) for ratio in pairs]
                error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
                row[name] = {"ratio": geometric_mean(pairs), "error": error, "pairs": len(pairs)}
                cells[-1] = f"{row[name]['ratio']:.3f} ± {error:.3f}"
        rows.append(row)
        result.add_row(
            f"{way.kind} {way.label}",
            *map(steps, medians),
            *(f"{loss:.3g}" for loss in final),
            *cells,
            f"{row['delay']:.1f}",
        )
    return result, rows


EVERY_STEP = ("sync", (1, 1))


def measure_progress(model: str, seeds: int, console: Console) -> Record:
    """Each way with every seed; the table, and its rows."""
    plan = [way for way in ways() if way.kind != "cheap" or model == "conv"]
    found: list[list[Record]] = [[] for _ in plan]
    work = [(i, seed) for seed in range(seeds) for i in range(len(plan))]
    for i, seed in tqdm(work, desc=model, leave=False):
        found[i].append(train(model, plan[i], seed))
    results, rows = progress_table(model, list(zip(plan, found, strict=True)))
    console.print(results)
    return {"seeds": seeds, "options": OPTIONS[model], "rows": rows}


# ------------------------------------------------------------------------------------- all of them


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections, print their tables, and write what they found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", type=int, default=5, help="of every training")
    parser.add_argument("--rounds", type=int, default=7, help="of what is timed in turn")
    parser.add_argument("--steps", type=int, default=20_000, help="of the long training")
    parser.add_argument("--json", type=Path, help="put the sections into this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 150)
    record: Record = {}
    if options.json and options.json.exists():
        record = json.loads(options.json.read_text())
    record["machine"] = machine()

    def trained() -> Record:
        found = {model: measure_progress(model, options.seeds, console) for model in options.models}
        return {**record.get("progress", {}), **found}

    def paced() -> list[Record]:
        found = [r for model in options.models for r in cost.pace(model, 60, options.rounds)]
        console.print(cost.pace_table(found))
        return found

    def residual() -> Record:
        found = cost.resnet(20, options.rounds)
        console.print(cost.resnet_table(found))
        return found

    def helped() -> Record:
        found = cost.spawned("stats", 2, 20, options.rounds)
        console.print(cost.stats_worker_table(found))
        return found

    def long() -> list[Record]:
        found = [cost.spawned("long", count, options.steps, 0) for count in (1, 2)]
        console.print(cost.long_table(found))
        return found

    sections: dict[str, Callable[[], Any]] = {
        "progress": trained,
        "pace": paced,
        "resnet": residual,
        "stats": helped,
        "long": long,
    }
    for section in options.only:
        record[section] = rounded(sections[section]())
        write(record, options.json)


if __name__ == "__main__":
    main()

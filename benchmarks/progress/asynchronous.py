"""What DistKFAC's threads and stats workers buy, each figure beside what was asked and its floor.

    export PYTHONPATH=examples:benchmarks/speed
    python benchmarks/progress/asynchronous.py                 all of it, most of an hour
    python benchmarks/progress/asynchronous.py --only progress --models conv --seeds 3

progress   digits: steps to the targets of `progress.py`, async against sync at equal intervals, and
           all intervals against every step; "even" keeps the memory of the factors the same in
           steps (factor_decay 0.95ᵏ where they are updated every k steps)
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import asynchronous_cost as cost
import progress
from asynchronous_cost import CHEAP, EIGEN, EQUAL, GRID, Intervals, Record
from curvature import rounded
from curvature_cost import table
from progress import Run, Setting, fresh_first
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
DECAY = 0.95
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
                factor_update_steps=fresh_first(factors),
                inv_update_steps=fresh_first(inverses),
                **OPTIONS[model],
                **self.options,
            )
            made.append(optimizer)
            return optimizer

        return Setting(self.kind, self.label, build, LENGTH[model])


def ways() -> list[Way]:
    """All with one decay an update, but "even": its decay over so many steps is that of 1 / 1."""
    same = {"factor_decay": DECAY}
    return [
        *(Way("sync", each, {**same, "async_inverse": False}) for each in EQUAL),
        *(
            Way(f"sync, decay {decay}", (1, 1), {"factor_decay": decay, "async_inverse": False})
            for decay in (0.6, 0.8)
        ),
        *(Way("async", each, same) for each in dict.fromkeys((*EQUAL, *GRID))),
        *(
            Way(kind, each, {**same, "solver": "eigen", "async_inverse": "async" in kind})
            for each in EIGEN
            for kind in ("eigen sync", "eigen async")
        ),
        *(Way("even", each, {"factor_decay": DECAY ** each[0]}) for each in GRID if each[0] > 1),
        *(Way("cheap", each, {**same, "conv_factors": "cheap"}) for each in CHEAP),
    ]


@dataclass
class Trained:
    """A training, and the steps that its last solves were under way."""

    kind: str
    intervals: Intervals
    delay: float
    run: Run

    @property
    def key(self) -> tuple[str, Intervals]:
        return self.kind, self.intervals

    @classmethod
    def of(cls, record: Record) -> Trained:
        """From JSON."""
        factors, inverses = record["intervals"]
        run = Run(**record["run"])
        return cls(record["kind"], (factors, inverses), record["delay"], run)


def train(model: str, way: Way, seed: int) -> Trained:
    made: list[DistKFAC] = []
    setting = way.setting(model, made)
    if model == "autoencoder":
        run = progress.run_autoencoder(setting, seed, time.process_time)
    else:
        run = progress.run_classifier(model, setting, seed, clock=time.process_time)
    (optimizer,) = made
    delay = cost.staleness(optimizer)
    optimizer.close()
    return Trained(way.kind, way.intervals, delay, run)


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
    """For each seed, steps of ours over those of theirs: the mean over the losses that both met."""
    others, found = {run.seed: run for run in theirs}, []
    for run in ours:
        if run.seed in others:
            pairs = [(reached(run, level), reached(others[run.seed], level)) for level in levels]
            met = [mine / its for mine, its in pairs if math.isfinite(mine + its)]
            found += [geometric_mean(met)] if met else []
    return found


def mean_ratio(found: Sequence[float]) -> Record:
    """The mean over seeds, and its standard error."""
    logs = [math.log(ratio) for ratio in found]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return {"ratio": geometric_mean(list(found)), "error": error, "seeds": len(logs)}


def after(run: Run, count: int) -> float:
    """The loss after some steps, or the last one."""
    return run.losses[min(count // progress.EVERY, len(run.losses)) - 1]


EVERY_STEP = ("sync", (1, 1))


def progress_rows(model: str, trained: Sequence[Trained]) -> list[Record]:
    """Medians over the seeds, and the mean ratios to sync and to every step."""
    runs: dict[tuple[str, Intervals], list[Run]] = {}
    for each in trained:
        runs.setdefault(each.key, []).append(each.run)
    rows = []
    for (kind, intervals), ours in runs.items():
        row: Record = {
            "kind": kind,
            "intervals": intervals,
            "steps": {target: progress.median_steps(ours, target) for target in TARGETS[model]},
            "loss after": {
                str(count): statistics.median(after(run, count) for run in ours)
                for count in AFTER[model]
            },
            "delay": statistics.median(t.delay for t in trained if t.key == (kind, intervals)),
        }
        others = {"to every step": EVERY_STEP}
        if "async" in kind:
            others["to sync"] = kind.replace("async", "sync"), intervals
        for name, other in others.items():
            found = ratios(ours, runs.get(other, []), LEVELS[model])
            if found and other != (kind, intervals):
                row[name] = mean_ratio(found)
        rows.append(row)
    return rows


def progress_table(model: str, rows: Sequence[Record]) -> Table:
    counts = [f"loss after {count}" for count in AFTER[model]]
    result = table(
        f"{model}: median steps; ratios of steps to a loss, asked: within 5 %",
        ("every", *TARGETS[model], *counts, "to sync", "to every step", "delay"),
    )
    for row in rows:
        means = [row.get(name) for name in ("to sync", "to every step")]
        result.add_row(
            "{} {} / {}".format(row["kind"], *row["intervals"]),
            *(steps(count) for count in row["steps"].values()),
            *(f"{loss:.3g}" for loss in row["loss after"].values()),
            *(
                "" if mean is None else f"{mean['ratio']:.3f} ± {mean['error']:.3f}"
                for mean in means
            ),
            f"{row['delay']:.1f}",
        )
    return result


def measure_progress(
    model: str, seeds: int, known: Sequence[Record], keep: Callable[[Record], None]
) -> list[Record]:
    """Train each way with every seed but what is known already; the rows of the table."""
    plan = [way for way in ways() if way.kind != "cheap" or model == "conv"]
    trained = [Trained.of(record) for record in known]
    there = {(*each.key, each.run.seed) for each in trained}
    work = [(way, seed) for seed in range(seeds) for way in plan]
    rows: list[Record] = []
    for way, seed in tqdm(work, desc=model, leave=False):
        if (way.kind, way.intervals, seed) not in there:
            trained.append(train(model, way, seed))
        rows = progress_rows(model, trained)
        runs = [asdict(each) for each in trained]
        keep({"options": OPTIONS[model], "rows": rows, "trainings": runs})
    return rows


# ------------------------------------------------------------------------------------- all of them


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections, print their tables, and write what they found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", type=int, default=5, help="of every training")
    parser.add_argument("--resume", action="store_true", help="keep the trainings of the file")
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
        found: Record = dict(record.get("progress", {}))
        for model in options.models:
            known = found.get(model, {}).get("trainings", []) if options.resume else []

            def keep(section: Record, model: str = model) -> None:
                found[model] = rounded(section)
                record["progress"] = found
                write(record, options.json)

            rows = measure_progress(model, options.seeds, known, keep)
            console.print(progress_table(model, rows))
        return found

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

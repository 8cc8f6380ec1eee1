"""Candidates for the default settings on six tasks, chosen on some seeds and reported on others.

We first tune the learning rate of each base. We then train KAISA over it at the base's best rate,
with each candidate. Candidates vary one option at a time, or damping and solver together. We
measure the steps to the task's target loss, divided by those of the fastest candidate, as a
geometric mean over tasks and as the worst task.

On other seeds, we report the base, the default settings, the best candidate for the task, and the
default settings at other learning rates. The bases are SGD and Adam. The language model is only
trained over AdamW, with one seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import reporting
from second_order.optimizers.config import DAMPING
from tasks import TASKS, Job, Run, run_all, steps_to

CHOSEN_ON = (100, 101)
REPORTED = range(5)
TARGETS = {
    "language": 1.7,
    "autoencoder": 15.8,
    "digits conv": 0.01,
    "digits MLP": 0.01,
    "residual network": 0.01,
    "tabular": 0.15,
}
BASES: dict[str, tuple[float, ...]] = {
    "SGD": (0.01, 0.03, 0.1, 0.3),
    "Adam": (0.001, 0.003, 0.01, 0.03),
}
DAMPINGS = (0.03, 0.1, 0.3, 1.0)
OTHERS: dict[str, list[dict[str, Any]]] = {
    "interval": [{"inv_update_steps": steps} for steps in (1, 10, 20, 50, 100)],  # not by drift
    "memory": [
        {"factor_decay": {"decay": decay, "share": share}}
        for decay in (0.95, 0.978, 0.995)
        for share in (None, 1 / 3)
    ],
}
RATES = (0.5, 2.0)  # multiples of the base's best rate
PENALTY = 2.0  # multiple of the run's steps, if the target is not reached


def bases_of(task: str) -> dict[str, tuple[float, ...]]:
    """The bases of a task, and their rates."""
    return {"AdamW": (0.003, 0.005, 0.01)} if task == "language" else BASES


def seeds(task: str, chosen_on: bool) -> Sequence[int]:
    """The seeds that settings are chosen on, or those that are reported."""
    few = 1 if task == "language" else None
    return (CHOSEN_ON if chosen_on else REPORTED)[:few]


def candidates() -> list[dict[str, Any]]:
    """The candidates. The first one is the default settings."""
    result: list[dict[str, Any]] = [{}]
    for solver in ("inverse", "eigen"):
        for damping in DAMPINGS:
            if (damping, solver) != (DAMPING, "inverse"):
                result.append({"damping": damping, "solver": solver})  # noqa: PERF401
    for options in OTHERS.values():
        result += options
    return result


def steps(run: Run) -> float:
    """Steps to the task's target, with a penalty if the run does not reach it."""
    steps_to_target = steps_to(run, TARGETS[run.job.task])
    if math.isfinite(steps_to_target):
        return steps_to_target
    return PENALTY * TASKS[run.job.task]().steps


def by_setting(runs: Iterable[Run]) -> dict[tuple[str, str, float, str], float]:
    """Median steps, by task, optimizer, rate and options."""
    grouped: dict[tuple[str, str, float, str], list[float]] = {}
    for run in runs:
        key = run.job.task, run.job.optimizer, run.job.lr, json.dumps(run.job.options)
        grouped.setdefault(key, []).append(steps(run))
    return {key: statistics.median(found) for key, found in grouped.items()}


def best_rates(
    tasks: Iterable[str], processes: int
) -> tuple[dict[tuple[str, str], float], list[Run]]:
    """The rate with the fewest steps by task and base. The last loss decides between equals."""
    jobs = [
        Job(task, base, lr, seed)
        for task in tasks
        for base, rates in bases_of(task).items()
        for lr in rates
        for seed in seeds(task, True)
    ]
    runs = run_all(jobs, processes)
    best: dict[tuple[str, str], tuple[float, float, float]] = {}
    for task, base in dict.fromkeys((job.task, job.optimizer) for job in jobs):
        for lr in bases_of(task)[base]:
            of = [r for r in runs if (r.job.task, r.job.optimizer, r.job.lr) == (task, base, lr)]
            last = sum(r.losses[-1] if math.isfinite(r.losses[-1]) else math.inf for r in of)
            found = statistics.median(map(steps, of)), last, lr
            best[task, base] = min(best.get((task, base), found), found)
    return {key: found[-1] for key, found in best.items()}, runs


def regrets(found: dict[tuple[str, str, float, str], float], base: str) -> dict[str, list[float]]:
    """Steps on each task divided by those of the fastest candidate, by options."""
    kaisa = {key: value for key, value in found.items() if key[1] == f"KAISA, {base}"}
    fewest: dict[str, float] = {}
    for (task, *_), value in kaisa.items():
        fewest[task] = min(fewest.get(task, math.inf), value)
    result: dict[str, list[float]] = {}
    for (task, _, _, options), value in kaisa.items():
        result.setdefault(options, []).append(value / fewest[task])
    return result


def main() -> None:
    """Tune the bases, choose candidates, report them on other seeds, and store all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--processes", type=int, default=2, help="training runs at a time")
    parser.add_argument("--json", type=Path, help="write the runs to this file")
    arguments = parser.parse_args()
    rates, alone = best_rates(arguments.tasks, arguments.processes)
    tried = run_all(
        (
            Job(task, f"KAISA, {base}", rates[task, base], seed, options)
            for task in arguments.tasks
            for base in bases_of(task)
            for options in candidates()
            for seed in seeds(task, True)
        ),
        arguments.processes,
    )
    found = by_setting(tried)
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for base in (*BASES, "AdamW"):
        tasks = [task for task in arguments.tasks if base in bases_of(task)]
        if not tasks:
            continue
        rows = []
        for options, shares in regrets(found, base).items():
            mean = statistics.geometric_mean(shares)
            cells = [f"{share:.2f}" for share in (mean, max(shares), *shares)]
            rows.append([options if options != "{}" else "the defaults", *cells])
        title = f"KAISA over {base}: steps over those of the best candidate"
        columns = ("options", "geometric mean", "worst", *tasks)
        reporting.show(reporting.table(title, columns, rows))
        for task in tasks:
            of = {o: v for (t, n, _, o), v in found.items() if (t, n) == (task, f"KAISA, {base}")}
            best[task, base] = json.loads(min(of, key=lambda options: of[options]))
    reported = run_all(
        (
            Job(task, optimizer, rate, seed, options)
            for task in arguments.tasks
            for base in bases_of(task)
            for seed in seeds(task, False)
            for optimizer, rate, options in (
                (base, rates[task, base], {}),
                (f"KAISA, {base}", rates[task, base], {}),
                (f"KAISA, {base}", rates[task, base], best[task, base]),
                *((f"KAISA, {base}", rates[task, base] * share, {}) for share in RATES),
            )
        ),
        arguments.processes,
    )
    final = by_setting(reported)
    rows = []
    for task in arguments.tasks:
        limit = TASKS[task]().steps
        for base in bases_of(task):
            lr = rates[task, base]
            kaisa = f"KAISA, {base}"
            keys = (
                (task, base, lr, "{}"),
                (task, kaisa, lr, "{}"),
                (task, kaisa, lr, json.dumps(best[task, base])),
                *((task, kaisa, lr * share, "{}") for share in RATES),
            )
            shown = [f"{final[k]:.0f}" if final[k] <= limit else f"not in {limit}" for k in keys]
            rows.append([f"{task}, {base}, {lr}", *shown])
    columns = "task, base, rate", "alone", "defaults", "best candidate", "rate / 2", "rate × 2"
    title = "median steps on other seeds, at the base's best rate"
    reporting.show(reporting.table(title, columns, rows))
    parts = {"alone": alone, "tried": tried, "reported": reported}
    found_runs = {name: [asdict(run) for run in runs] for name, runs in parts.items()}
    reporting.store(arguments.json, None, **found_runs)


if __name__ == "__main__":
    main()

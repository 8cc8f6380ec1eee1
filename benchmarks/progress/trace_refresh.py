"""What a refresh by trace spares, and what that costs in steps, beside fixed intervals and drift.

    PYTHONPATH=examples python benchmarks/progress/trace_refresh.py --json trace_refresh.json

KAISA with nothing set but the learning rate that is best for the base alone, and how its inverses
are refreshed. At each of the first 20 steps, and then every 10, layers are looked at, and some of
them solved. A fixed interval that solves as often as the rule does, after the first steps, is what
the rule has to beat; "drift" is the default.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from progress import fresh_first
from second_order.kfac.solve import Solves
from tasks import Job, steps_to, train

__all__ = ["SETTINGS", "TARGETS", "main", "measured"]

Row = dict[str, Any]

TASKS: dict[str, tuple[str, float]] = {
    "digits MLP": ("SGD", 0.1),
    "digits conv": ("SGD", 0.1),
    "language, width 64": ("AdamW", 0.006),
}
TARGETS = {"digits MLP": 0.01, "digits conv": 0.01, "language, width 64": 2.35}


def every(steps: int) -> Row:
    """The options of fixed intervals after the first steps."""
    return {"factor_update_steps": fresh_first(10), "inv_update_steps": fresh_first(steps)}


def traced(upper: float, lower: float) -> Row:
    """The options of a refresh by trace."""
    return {**every(10), "refresh": "trace", "trace_bounds": (upper, lower)}


SETTINGS: dict[str, Row] = {
    "drift": {},
    "every 10": every(10),
    "every 20": every(20),
    "every 50": every(50),
    "every 100": every(100),
    "trace 0.01, 0.001": traced(0.01, 0.001),
    "trace 0.1, 0": traced(0.1, 0.0),
    "trace 0.1, 0.01": traced(0.1, 0.01),
    "trace 0.3, 0": traced(0.3, 0.0),
    "trace 1, 0": traced(1.0, 0.0),
}
"""How inverses are refreshed, by name; "trace" with its two bounds."""


def measured(task: str, label: str, seed: int) -> Row:
    """One training: solves of a layer, due and done, and steps to a loss."""
    base, lr = TASKS[task]
    job = Job(task, f"KAISA, {base}", lr, seed, SETTINGS[label])
    found: Row = {"task": task, "setting": label, "seed": seed}

    counts, ready = Counter[str](), Solves.ready

    def counted(self: Solves, blocks: Sequence[Any]) -> Any:
        to_solve = ready(self, blocks)
        counts.update(due=len(blocks), solves=len(to_solve))
        return to_solve

    def ended(optimizer: Any) -> None:
        rule, layers = optimizer._curvature.solves.traces, optimizer.statistics()["layers"]
        found.update({name: count / layers for name, count in counts.items()})
        found["settled"] = 0 if rule is None else len(rule.settled) / layers

    with patch.object(Solves, "ready", counted):
        run = train(job, ended)
    steps = steps_to(run, TARGETS[task])
    return {
        **found,
        "steps": steps if math.isfinite(steps) else None,
        "loss": run.losses[-1],
        "lowest": min(run.losses),
    }


def table(rows: Sequence[Row]) -> Table:
    """Medians of the seeds."""
    result = Table(title="Refreshes by trace beside fixed intervals: medians of the seeds")
    numbers = "solves", "spared", "settled", "steps", "lowest loss"
    for name in ("task", "refresh", *numbers):
        result.add_column(name, justify="right" if name in numbers else "left")
    for task, label in dict.fromkeys((row["task"], row["setting"]) for row in rows):
        mine = [row for row in rows if (row["task"], row["setting"]) == (task, label)]
        due, solves, settled, lowest = (
            statistics.median(row[name] for row in mine)
            for name in ("due", "solves", "settled", "lowest")
        )
        steps = statistics.median(math.inf if r["steps"] is None else r["steps"] for r in mine)
        said = f"{steps:g}" if math.isfinite(steps) else "never"
        share = 1 - solves / due
        result.add_row(
            task, label, f"{solves:.1f}", f"{share:.0%}", f"{settled:.0%}", said, f"{lowest:.3g}"
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the table, and write the runs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--json", type=Path, help="write the runs into this file")
    options = parser.parse_args(arguments)
    work = [
        (task, label, seed)
        for task in options.tasks
        for label in options.settings
        for seed in range(options.seeds)
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = list(tqdm(pool.map(measured, *zip(*work, strict=True)), total=len(work)))
    Console(width=None if sys.stdout.isatty() else 120).print(table(found))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"torch": torch.__version__, "targets": TARGETS, "runs": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

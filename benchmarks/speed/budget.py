"""Intervals by budget: what statistics and refreshes cost, beside what was asked.

    python benchmarks/speed/budget.py --workloads mlp --overheads 0.15

KAISA with both intervals "auto", one process and one thread. Measured is the time of two periods,
as many steps as two refreshes take and 60 at least, beyond what they would have taken if neither
had come due, which the steps around each tell; as a share of a step of SGD alone, which takes turns
with it. A second run without statistics and refreshes would be too rough a measure: preconditioning
is dearer than the budget here, and two runs of it differ by more than that.

Where two periods would take longer than ``--longest`` seconds, (S/f + R/i) / SGD must do, from an
update S and a refresh R that are timed after the calibration by steps with and without them at
short intervals. Asked: at most 3 points above or below the overhead.

All times are the processor's (``time.process_time``), since others may load the machine; the budget
is given the same clock, where it reads ``time.perf_counter`` by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.optim import SGD, Optimizer

from instruments import store_rows
from second_order import KAISA
from second_order.kfac.curvature import KFAC
from workloads import WORKLOADS, Workload

ASKED = 0.03  # by which what is measured may differ
BLOCK, OTHERS = 12, 2  # steps of KAISA and of SGD before it is the other's turn
LEAST = 60  # steps that are measured
AROUND = 4  # steps on each side of one that is compared with them
TRIED = (2, 4)  # intervals at which an update and a refresh are timed

Record = dict[str, Any]


class Runner:
    """A model in training, and the milliseconds of its steps."""

    def __init__(self, workload: Workload, **options: Any) -> None:
        self._workload, self._model = workload, workload.model()
        self._batch = workload.batch()
        params = self._model.parameters()
        self.optimizer: Optimizer = (
            KAISA(self._model, lr=1e-3, momentum=0.9, **options)
            if options
            else SGD(params, lr=1e-3, momentum=0.9)
        )
        self.times: list[float] = []

    @property
    def curvature(self) -> KFAC:
        """That of KAISA."""
        assert isinstance(self.optimizer, KAISA)
        found = self.optimizer._curvature
        assert isinstance(found, KFAC)
        return found

    def step(self) -> float:
        """Take a step; its milliseconds."""
        start = time.process_time()
        self.optimizer.zero_grad()
        self._workload.loss(self._model, self._batch).backward()
        self.optimizer.step()
        return 1000 * (time.process_time() - start)

    def go(self, steps: int) -> None:
        """Take steps that count."""
        self.times += [self.step() for _ in range(steps)]


def calibrated(workload: Workload, overhead: float) -> Runner:
    """KAISA with its intervals chosen."""
    runner = Runner(
        workload,
        factor_update_steps="auto",
        inv_update_steps="auto",
        overhead=overhead,
    )
    budget = runner.curvature.budget
    runner.curvature.training.meter.now = time.process_time
    budget.begin()
    while budget.measuring:
        runner.step()
    return runner


def timed_parts(runner: Runner, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of steps with neither, with statistics, and with both, at short intervals."""
    budget, training = runner.curvature.budget, runner.curvature.training
    chosen = dict(budget.chosen)
    budget.chosen = dict(zip(chosen, TRIED, strict=True))
    found: dict[str, list[float]] = {"neither": [], "statistics": [], "both": []}
    f, i = TRIED
    runner.step()  # whose passes were captured by the other intervals
    while training.steps % i:
        runner.step()
    for _ in range(repeats * i):
        kind = "both" if training.steps % i == 0 else "neither"
        if training.steps % f == 0 and kind != "both":
            kind = "statistics"
        found[kind].append(runner.step())
    budget.chosen = chosen
    runner.step()
    return found


def take_turns(auto: Runner, plain: Runner, steps: int) -> list[str]:
    """Steps of KAISA and, between them, some of SGD; what came due at each of KAISA's."""
    budget, training = auto.curvature.budget, auto.curvature.training
    f, i = budget.chosen.values()
    kinds = []
    for done in range(steps):
        due = (training.steps % f == 0, training.steps % i == 0)
        kinds.append("refresh" if due[1] else "statistics" if due[0] else "neither")
        auto.go(1)
        if done % BLOCK == 0:
            plain.go(OTHERS)
    return kinds


def beyond(times: list[float], kinds: list[str]) -> float:
    """Milliseconds of steps with something due, beyond those of the steps around each."""
    total = 0.0
    for at, kind in enumerate(kinds):
        if kind != "neither":
            first, last = max(at - AROUND, 0), at + AROUND + 1
            near = zip(kinds[first:last], times[first:last], strict=True)
            total += times[at] - statistics.median(t for k, t in near if k == "neither")
    return total


def measure(workload: Workload, overheads: list[float], longest: float) -> Iterator[Record]:
    """A row for each overhead."""
    parts: dict[str, list[float]] = {}
    for overhead in overheads:
        auto, plain = calibrated(workload, overhead), Runner(workload)
        plain.step()
        budget = auto.curvature.budget
        parts = parts or timed_parts(auto, repeats=3)
        medians = {kind: statistics.median(times) for kind, times in parts.items()}
        S = medians["statistics"] - medians["neither"]
        R = medians["both"] - medians["statistics"]
        f, i = budget.chosen.values()
        assert budget.measured is not None
        calibration = [1000 * seconds for seconds in budget.measured]
        steps = max(2, -(-LEAST // i)) * i
        whole = steps * medians["neither"] / 1000 <= longest
        kinds: list[str] = []
        if whole:
            kinds = take_turns(auto, plain, steps)
        else:
            plain.go(10)
        base = statistics.median(plain.times)
        yield {
            "workload": workload.name,
            "overhead": overhead,
            "intervals": [f, i],
            "calibration": dict(zip("SRT", calibration, strict=True)),
            "afterwards": {"S": S, "R": R, "T": base},
            "measured": beyond(auto.times, kinds) / (steps * base) if whole else None,
            "extrapolated": (S / f + R / i) / base,
            "steps": len(kinds),
            "due": {which: kinds.count(which) for which in ("statistics", "refresh")},
            "milliseconds": {
                "auto": rounded(auto.times),
                "SGD": rounded(plain.times),
                **{kind: rounded(times) for kind, times in parts.items()},
            },
        }


def rounded(times: list[float]) -> list[float]:
    return [round(t, 3) for t in times]


def found(row: Record) -> float:
    """What statistics and refreshes cost, as a share of a step of SGD."""
    share: float = row["extrapolated"] if row["measured"] is None else row["measured"]
    return share


def table(rows: list[Record]) -> Table:
    result = Table(title=f"Overhead, % of a step of SGD; asked: within {100 * ASKED:g} points")
    headers = ["workload", "asked", "f", "i", "measured", "from S, R", "steps", "within"]
    for header in [*headers, "S ms", "R ms", "T ms", "S then", "R then", "SGD"]:
        result.add_column(header, justify="left" if header == "workload" else "right")
    for row in rows:
        measured = "" if row["measured"] is None else f"{100 * row['measured']:.1f}"
        within = abs(found(row) - row["overhead"]) <= ASKED
        result.add_row(
            row["workload"],
            f"{100 * row['overhead']:g}",
            *map(str, row["intervals"]),
            measured,
            f"{100 * row['extrapolated']:.1f}",
            str(row["steps"] or ""),
            "yes" if within else "no",
            *(f"{row['calibration'][which]:.1f}" for which in "SRT"),
            *(f"{row['afterwards'][which]:.1f}" for which in "SRT"),
        )
    return result


def main() -> None:
    """Measure, print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name for name, workload in WORKLOADS.items() if workload.device == "cpu"]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--overheads", nargs="+", type=float, default=[0.15, 0.05])
    parser.add_argument("--longest", type=float, default=100, help="seconds of one measurement")
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Record] = []
    for name in arguments.workloads:
        for row in measure(WORKLOADS[name], arguments.overheads, arguments.longest):
            rows.append(row)
            print(name, *(row[k] for k in ("overhead", "intervals", "measured", "extrapolated")))
    Console(width=140).print(table(rows))
    if arguments.json:
        store_rows(arguments.json, rows)


if __name__ == "__main__":
    main()

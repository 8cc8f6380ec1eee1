"""What the hooks cost a compiled model: passes with and without them, in turns of one process.

    make compiled

A pass is zero_grad, forward and backward, the same work in each case:

    plain        the compiled model, without an optimizer of this package
    idle         with KAISA's hooks, at steps that take no statistics
    statistics   with KAISA's hooks, at steps that do
    broken       with a hook on each layer that breaks the graph there, and does nothing
    eager        not compiled, without hooks

Times are the processor's, of one thread, so that what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import reporting
from second_order import KAISA
from workloads import WORKLOADS, Workload

CASES = ("plain", "idle", "statistics", "broken", "eager")
NEVER = 10**9  # an interval longer than any run: only the first step takes statistics


def _nothing(*_: Any) -> None:
    pass


def passes(workload: Workload, case: str, backend: str) -> Callable[[], None]:
    """Make a function that takes one pass of a case; it has run, and is compiled, already.

    Args:
        workload: The model and its batch.
        case: One of :data:`CASES`.
        backend: The compiler's name, as ``torch.compile`` takes it.
    """
    model = workload.model()
    batch = workload.batch()
    model.__class__ = type(case, (type(model),), {})  # models of one class would share graphs
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if case in ("idle", "statistics"):
        every = 1 if case == "statistics" else NEVER
        optimizer = KAISA(
            model,
            lr=0.01,
            factor_update_steps=every,
            inv_update_steps=NEVER,
        )
    if case == "broken":
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_hook(torch.compiler.disable(_nothing))
    called = model
    if case != "eager":
        called = torch.compile(model, backend=backend, fullgraph=case != "broken")  # type: ignore[assignment]

    def one() -> None:
        optimizer.zero_grad()
        workload.loss(called, batch).backward()

    one()
    if case in ("idle", "statistics"):
        optimizer.step()  # the first one takes statistics in either case
    for _ in range(2):
        one()
    return one


def measure(workload: Workload, backend: str, turns: int, repeats: int) -> dict[str, list[float]]:
    """The milliseconds of a pass in each turn, the median of some in a row, by case."""
    functions = {case: passes(workload, case, backend) for case in CASES}
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(turns):
        for case, one in functions.items():
            times = []
            for _ in range(repeats):
                start = time.process_time()
                one()
                times.append(1e3 * (time.process_time() - start))
            found[case].append(statistics.median(times))
    return found


def ratio(turns: dict[str, list[float]], case: str) -> float:
    """The time of a case over that of the plain model: the median over turns of their ratio."""
    pairs = zip(turns[case], turns["plain"], strict=True)
    return statistics.median(mine / plain for mine, plain in pairs)


def main() -> None:
    """Measure, print a line for each workload and case, and keep the turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5, help="passes of a case in a turn")
    parser.add_argument("--json", type=Path, help="write the turns there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for name in arguments.workloads:
        torch.compiler.reset()
        workload = WORKLOADS[name]
        turns = measure(workload, arguments.backend, arguments.turns, arguments.repeats)
        records.append({"workload": name, "backend": arguments.backend, "turns": turns})
        for case in CASES:
            median = statistics.median(turns[case])
            print(f"{name:12} {case:11} {median:8.2f} ms  x {ratio(turns, case):.3f}", flush=True)
    reporting.store(arguments.json, records=records)


if __name__ == "__main__":
    main()

"""The cost of hooks under `torch.compile`: passes with and without hooks take turns.

    make compiled

A pass is `zero_grad` and a forward and backward pass. It does the same work in each case:

    plain        the compiled model, without an optimizer of this package
    idle         with KAISA's hooks, at steps that do not update the statistics
    statistics   with KAISA's hooks, at steps that update the statistics
    broken       with an empty hook on each layer that breaks the graph
    eager        the model without compilation and without hooks

Times are CPU times of one thread, because other processes on the machine hardly change them.
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
NEVER = 10**9  # an interval longer than any run: only the first step updates statistics


def _empty_hook(*_: Any) -> None:
    pass


def make_pass(workload: Workload, case: str, backend: str) -> Callable[[], None]:
    """Make a function that runs one pass of a case. The model is compiled on return.

    Args:
        workload: The model and its batch.
        case: One of :data:`CASES`.
        backend: The ``backend`` of ``torch.compile``.
    """
    # Each case gets its own class, because models of one class share compiled graphs.
    model = workload.model()
    batch = workload.batch()
    model.__class__ = type(case, (type(model),), {})

    # Register the hooks before compilation.
    has_kaisa_hooks = case in ("idle", "statistics")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if has_kaisa_hooks:
        optimizer = KAISA(
            model,
            lr=0.01,
            factor_update_steps=1 if case == "statistics" else NEVER,
            inv_update_steps=NEVER,
        )
    if case == "broken":
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_hook(torch.compiler.disable(_empty_hook))

    compiled_model = model
    if case != "eager":
        compiled_model = torch.compile(model, backend=backend, fullgraph=case != "broken")  # type: ignore[assignment]

    def run_pass() -> None:
        optimizer.zero_grad()
        workload.loss(compiled_model, batch).backward()

    # Compile. The first step updates the statistics in both cases with KAISA's hooks.
    run_pass()
    if has_kaisa_hooks:
        optimizer.step()
    for _ in range(2):
        run_pass()
    return run_pass


def measure(workload: Workload, backend: str, turns: int, repeats: int) -> dict[str, list[float]]:
    """Median milliseconds of a pass in each turn, by case."""
    passes = {case: make_pass(workload, case, backend) for case in CASES}
    medians: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(turns):
        for case, run_pass in passes.items():
            times = []
            for _ in range(repeats):
                start = time.process_time()
                run_pass()
                times.append(1e3 * (time.process_time() - start))
            medians[case].append(statistics.median(times))
    return medians


def ratio(turns: dict[str, list[float]], case: str) -> float:
    """Median over turns of the time of a case divided by that of the plain model."""
    pairs = zip(turns[case], turns["plain"], strict=True)
    return statistics.median(case_time / plain_time for case_time, plain_time in pairs)


def main() -> None:
    """Measure, print a line for each workload and case, and store the turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5, help="passes per case and turn")
    parser.add_argument("--json", type=Path, help="write the turns to this file")
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

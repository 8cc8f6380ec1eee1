"""Whether accelerators hide the curvature: a worker's time for a step, beside its base alone.

    export PYTHONPATH=examples
    torchrun --standalone --nproc-per-node=2 benchmarks/speed/hidden.py

One worker and one accelerator, a thread each. The worker takes turns, an epoch each:

    alone    SGD, and nobody else works
    beside   SGD, and a process that never talks to the worker finds the same eigenpairs: the floor,
             what the machine's memory and caches cost that two processes share
    helped   MRDHO2, with its final update and all that it waits for

Asked: at most 1.05 times SGD alone. What is above the floor is what this package costs. CPU time is
that of the worker's process, the mailbox's thread included, without what it waits for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import digits
from instruments import store_rows
from second_order import MRDHO2
from second_order.lanczos import eigenpairs
from workloads import WORKLOADS

ASKED = 1.05
LARGEST, TOL = 10, 1e-2  # of the optimizer and of the neighbour: its defaults


def digits_conv() -> tuple[nn.Module, Tensor, Tensor]:
    data = digits.load_split()
    return digits.conv_net(), data.train_images[:256], data.train_labels[:256]


def workload(name: str) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        chosen = WORKLOADS[name]
        x, y = chosen.batch()
        return chosen.model(), x, y

    return make


TASKS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor, Tensor]], int]] = {
    "digits conv, batch 256": (digits_conv, 100),
    "mlp, 2.1 M parameters, batch 128": (workload("mlp"), 200),
    "resnet20, batch 64": (workload("resnet20"), 120),
}


Times = tuple[float, float]
"""Milliseconds a step, by the clock and of CPU time."""


def epoch(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, steps: int) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return 1000 * wall / steps, 1000 * cpu / steps


def neighbour(name: str, largest: int, tol: float, begin: Any, ready: Any) -> None:
    """A process that finds eigenpairs once whenever it is told to."""
    torch.set_num_threads(1)
    make, _ = TASKS[name]
    torch.manual_seed(0)
    model, x, y = make()

    def find() -> None:
        eigenpairs(lambda: cross_entropy(model(x), y), model, largest=largest, tol=tol)

    while True:
        find()
        ready.set()
        begin.wait()
        begin.clear()


@contextmanager
def beside(name: str) -> Iterator[tuple[Any, Any]]:
    """The events that let the neighbour begin, and say that it is ready for the next time."""
    context = multiprocessing.get_context("spawn")
    begin, ready = context.Event(), context.Event()
    arguments = (name, LARGEST, TOL, begin, ready)
    process = context.Process(target=neighbour, args=arguments, daemon=True)
    process.start()
    try:
        assert ready.wait(600.0), "the neighbour has not begun"
        yield begin, ready
    finally:
        process.kill()
        process.join()


def measure(name: str, update: str, epochs: int) -> dict[str, Any] | None:
    """On the worker its times; None on the accelerator."""
    make, steps = TASKS[name]
    torch.manual_seed(0)
    model, x, y = make()
    options: dict[str, Any] = {"final_update": update, "epoch_steps": steps, "lr": 1e-3}
    options |= {"largest": LARGEST, "lanczos_tol": TOL, "helper_timeout": 600.0}
    optimizer = MRDHO2(model, momentum=0.9, gradient_averaging=False, **options)
    with optimizer:
        if optimizer.role == "accelerator":
            optimizer.serve([None], lambda _: cross_entropy(model(x), y))
            return None
        with beside(name) as (begin, ready):
            other, _, _ = make()
            base = SGD(other.parameters(), lr=1e-3, momentum=0.9)
            epoch(other, base, x, y, min(steps, 10))
            times: dict[str, list[Times]] = {"alone": [], "beside": [], "helped": []}
            for _ in range(epochs):
                times["alone"].append(epoch(other, base, x, y, steps))
                ready.clear()
                begin.set()
                times["beside"].append(epoch(other, base, x, y, steps))
                ready.wait()  # or it would share the cores with what comes next
                times["helped"].append(epoch(model, optimizer, x, y, steps))
        reports = optimizer.epochs
        return {
            "task": name,
            "update": update,
            "epoch_steps": steps,
            "epochs": epochs,
            **{kind: statistics.median(wall for wall, _ in times[kind]) for kind in times},
            "to alone": ratio(times, "helped", "alone", 0),
            "to floor": ratio(times, "helped", "beside", 0),
            "cpu to alone": ratio(times, "helped", "alone", 1),
            "cpu to floor": ratio(times, "helped", "beside", 1),
            "waited": statistics.median(report.waited for report in reports),
            "products": statistics.median(report.products for report in reports),
            "applied": sum(report.applied for report in reports),
        }


def ratio(times: dict[str, list[Times]], of: str, to: str, which: int) -> float:
    """Median of the ratios of epochs that were neighbours in time."""
    pairs = zip(times[of], times[to], strict=True)
    return statistics.median(a[which] / b[which] for a, b in pairs)


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title=f"A worker's step, ms; asked: at most {ASKED} to SGD alone")
    headers = ["task", "update", "E", "alone", "beside", "MRDHO2"]
    headers += ["to alone", "to floor", "CPU to alone", "CPU to floor", "waited s"]
    for header in headers:
        result.add_column(header, justify="left" if header in ("task", "update") else "right")
    for row in rows:
        result.add_row(
            row["task"],
            row["update"],
            str(row["epoch_steps"]),
            *(f"{row[kind]:.2f}" for kind in ("alone", "beside", "helped")),
            *(f"{row[f'{cpu}to {to}']:.3f}" for cpu in ("", "cpu ") for to in ("alone", "floor")),
            f"{row['waited']:.3f}",
        )
    return result


def report(rows: list[dict[str, Any]], path: Path | None) -> None:
    """The table so far: all of it takes many minutes."""
    Console(width=140).print(table(rows))
    if path:
        store_rows(path, rows, indent=1)


def main() -> None:
    """Measure, print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--updates", nargs="+", default=["guarded", "paper"])
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name in arguments.only:
        for update in arguments.updates:
            row = measure(name, update, arguments.epochs)
            dist.barrier()
            if row is not None:
                rows.append(row)
                report(rows, arguments.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

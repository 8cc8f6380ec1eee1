"""DHO2's refreshes by budget: the share of the time that they take, beside what was asked.

    python benchmarks/speed/refresh_budget.py --tasks mlp --overheads 0.2

DHO2 with its default interval, "auto", on five small trainings of `examples/`, one process and one
thread, until so many refreshes have followed the first. Measured is the time of all refreshes and
of the probe, beyond that of the steps around each, as a share of as many steps of the base alone;
the base takes turns with DHO2. Asked: it is at most 3 points above or below the overhead.

All times are the processor's (``time.process_time``), since others may load the machine; the budget
is given the same clock, where it reads ``time.perf_counter`` by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

import digits
import fine_tuning
import pinn
from instruments import store_rows
from second_order import DHO2

ASKED = 0.03  # by which what is measured may differ
BLOCK, OTHERS = 12, 2  # steps of DHO2 and of its base before it is the other's turn
AROUND = 5  # steps on each side of a refresh that are compared with it

Record = dict[str, Any]
LossFn = Callable[[], Tensor]


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        make: The model, the loss of a training batch, and that of the curvature batch.
        base: The class of the base.
        options: Those of the base and of DHO2 that are not default.
    """

    make: Callable[[], tuple[nn.Module, LossFn, LossFn]]
    base: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)


def classifier(make: Callable[[], nn.Module], size: int = 64) -> Any:
    """A network of the digits; the curvature batch is of 256."""
    data, model = digits.load_split(), make()
    images, labels = data.train_images, data.train_labels
    x, y = images[:256], labels[:256]
    order = digits.batches(len(images), size, seed=0)

    def loss() -> Tensor:
        indices = next(order)
        return cross_entropy(model(images[indices]), labels[indices])

    return model, loss, lambda: cross_entropy(model(x), y)


def autoencoder() -> Any:
    """The deep autoencoder, batches of 256; the curvature batch is of 600."""
    images, model = digits.autoencoder_images(), digits.autoencoder()
    order = digits.batches(len(images), 256, seed=0)

    def loss_of(x: Tensor) -> Tensor:
        return digits.autoencoder_loss(model(x), x)

    return model, lambda: loss_of(images[next(order)]), lambda: loss_of(images[:600])


def head() -> Any:
    """A linear head on a frozen body, batches of 256; the curvature batch is of 512."""
    data, model = digits.load_split(), fine_tuning.fine_tuned("linear", body_steps=20)
    images, labels = data.train_images, data.train_labels
    noise = torch.Generator().manual_seed(0)
    orders = [digits.batches(len(images), size, seed=size) for size in (256, 512)]

    def loss(which: int) -> Tensor:
        indices = next(orders[which])
        return cross_entropy(model(fine_tuning.noisy(images[indices], noise)), labels[indices])

    return model, lambda: loss(0), lambda: loss(1)


def poisson() -> Any:
    """Poisson's equation; all points are one batch."""
    model, points = pinn.network(), pinn.Points()

    def loss() -> Tensor:
        return pinn.loss_of(model, points)

    return model, loss, loss


MOMENTUM = {"lr": 0.05, "momentum": 0.9}
TASKS = {
    "mlp": Task(lambda: classifier(digits.mlp), SGD, MOMENTUM),
    "conv net": Task(lambda: classifier(digits.conv_net), SGD, MOMENTUM),
    "autoencoder": Task(autoencoder, SGD, {"lr": 0.03, "momentum": 0.9}),
    "frozen body": Task(head, Adam, {"lr": 0.01}),
    "pinn": Task(poisson, Adam, {"lr": 0.005}),
}


class Runner:
    """A model in training, and the milliseconds of its steps."""

    def __init__(self, task: Task, overhead: float | None) -> None:
        torch.manual_seed(0)
        model, self._loss, curved = task.make()
        params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer: Optimizer
        if overhead is None:
            own = {k: v for k, v in task.options.items() if k in ("lr", "momentum")}
            self.optimizer = task.base(params, **own)
        else:
            self.optimizer = DHO2(
                model, base=task.base, overhead=overhead, curvature_closure=curved, **task.options
            )
            self.optimizer._training.meter.now = time.process_time
        self.times: list[float] = []

    @property
    def budget(self) -> Any:
        """That of DHO2."""
        assert isinstance(self.optimizer, DHO2)
        return self.optimizer._curvature.pairs.budget

    def step(self) -> None:
        """Take a step that counts."""
        start = time.process_time()
        self.optimizer.zero_grad()
        self._loss().backward()
        self.optimizer.step()
        self.times.append(1000 * (time.process_time() - start))


def beyond(times: list[float], at: int, apart: set[int]) -> float:
    """Milliseconds of a step, beyond those of the steps around it."""
    first, last = max(at - AROUND, 0), at + AROUND + 1
    near = [t for i, t in enumerate(times[first:last], first) if i not in apart]
    return times[at] - statistics.median(near)


def measure(name: str, overhead: float, refreshes: int, longest: float) -> Record:
    """A row: one training."""
    task = TASKS[name]
    ours, alone = Runner(task, overhead), Runner(task, None)
    assert isinstance(ours.optimizer, DHO2)
    found: list[int] = []
    products: list[int] = []
    probe, start = -1, time.process_time()
    while len(found) <= refreshes and time.process_time() - start < longest:
        step, known = len(ours.times), ours.budget.cost > 0
        ours.step()
        if len(found) < ours.optimizer.curvature.refreshes:
            found.append(step)
            products.append(ours.optimizer.curvature.products)
        elif not known and ours.budget.cost > 0:
            probe = step
        if step % BLOCK == 0:
            for _ in range(OTHERS):
                alone.step()
    base = statistics.median(alone.times)
    apart = {probe, *found}
    costs = [beyond(ours.times, at, apart) for at in found]
    once = beyond(ours.times, probe, apart) if probe >= 0 else 0.0
    return {
        "task": name,
        "overhead": overhead,
        "price": ours.budget.price,
        "refreshes": found,
        "products": products,
        "costs": [round(cost / base, 2) for cost in costs],
        "probe": round(once / base, 2),
        "measured": (once + sum(costs)) / (base * len(ours.times)),
        "steps": len(ours.times),
        "milliseconds": {"base": base, "DHO2": statistics.median(ours.times)},
    }


def table(rows: list[Record]) -> Table:
    """What was asked and what was found."""
    result = Table(title=f"Refreshes, % of the base's time; asked: within {100 * ASKED:g} points")
    headers = ["task", "asked", "measured", "within", "refreshes at", "products", "cost"]
    for header in [*headers, "price", "base ms", "DHO2 ms"]:
        result.add_column(header, justify="left" if header == "task" else "right")
    for row in rows:
        within = abs(row["measured"] - row["overhead"]) <= ASKED
        result.add_row(
            row["task"],
            f"{100 * row['overhead']:g}",
            f"{100 * row['measured']:.1f}",
            "yes" if within else "no",
            *(", ".join(map(str, row[key])) for key in ("refreshes", "products")),
            ", ".join(f"{cost:.0f}" for cost in row["costs"]),
            f"{row['price']:.2g}",
            *(f"{row['milliseconds'][which]:.2f}" for which in ("base", "DHO2")),
        )
    return result


def main() -> None:
    """Measure, print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--overheads", nargs="+", type=float, default=[0.2])
    parser.add_argument("--refreshes", type=int, default=5, help="after the first")
    parser.add_argument("--longest", type=float, default=120, help="seconds of one training")
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Record] = []
    for name in arguments.tasks:
        for overhead in arguments.overheads:
            rows.append(measure(name, overhead, arguments.refreshes, arguments.longest))
            print(name, overhead, rows[-1]["measured"])
    Console(width=140).print(table(rows))
    if arguments.json:
        store_rows(arguments.json, rows)


if __name__ == "__main__":
    main()

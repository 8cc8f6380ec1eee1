"""The three final updates of MRDHO2 beside its base alone: training loss after the same steps.

    export PYTHONPATH=examples
    torchrun --standalone --nproc-per-node=2 benchmarks/progress/final_updates.py

One worker and one accelerator. On a quadratic of 100 unknowns, the digits with an MLP, and the deep
autoencoder; each at the learning rate that suits the base alone. Prints the final loss, its ratio
to that of the base with the same seed, how many of the epochs' updates were made, and how long the
worker stood still for the accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

import digits
from second_order import MRDHO2

UPDATES = ("base alone", "guarded", "paper", "additive")


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        name: In the table.
        make: The model.
        loss: (model, indices of examples) -> loss.
        whole: model -> training loss, of all examples.
        examples: How many there are.
        batch: How many to a step.
        curvature: How many to the accelerator's batch.
        steps: How many.
        epoch_steps: E.
        base: The base optimizer, with its options.
        newton_scale: α.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    whole: Callable[[nn.Module], Tensor]
    examples: int
    batch: int
    curvature: int
    steps: int
    epoch_steps: int
    base: tuple[type[Optimizer], dict[str, Any]]
    newton_scale: float = 0.1


@dataclass
class Run:
    """One training."""

    task: str
    update: str
    seed: int
    loss: float
    milliseconds_per_step: float
    applied: int = 0
    epochs: int = 0
    waited: float = 0.0


class Point(nn.Module):
    """The unknowns of a quadratic, ½ xᵀHx, and its Hessian."""

    def __init__(self, low: tuple[float, float], high: tuple[float, float]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        Q, _ = torch.linalg.qr(torch.randn(100, 100, generator=generator))
        values = torch.cat([torch.linspace(*low, 90), torch.linspace(*high, 10)])
        self.x = nn.Parameter(torch.randn(100, generator=generator))
        self.register_buffer("H", Q @ torch.diag(values) @ Q.t())

    def forward(self) -> Tensor:
        H: Tensor = self.get_buffer("H")
        return 0.5 * self.x @ H @ self.x


def tasks() -> list[Task]:
    data, images = digits.load_split(), digits.autoencoder_images()

    def classify(model: nn.Module, indices: Tensor) -> Tensor:
        return cross_entropy(model(data.train_images[indices]), data.train_labels[indices])

    def reconstruct(model: nn.Module, indices: Tensor) -> Tensor:
        return digits.autoencoder_loss(model(images[indices]), images[indices])

    def whole(
        loss: Callable[[nn.Module, Tensor], Tensor], count: int
    ) -> Callable[[nn.Module], Tensor]:
        return lambda model: loss(model, torch.arange(count))

    def value(model: nn.Module, _: Tensor | None = None) -> Tensor:
        result: Tensor = model()
        return result

    count = len(data.train_images)
    autoencoder = Task(
        "autoencoder, SGD",
        digits.autoencoder,
        reconstruct,
        whole(reconstruct, len(images)),
        examples=len(images),
        batch=256,
        curvature=600,
        steps=1000,
        epoch_steps=50,
        base=(SGD, {"lr": 0.03, "momentum": 0.9}),
    )
    return [
        Task(
            "quadratic",
            lambda: Point((0.1, 1.0), (10.0, 100.0)),
            value,
            value,
            100,
            100,
            100,
            200,
            20,
            (SGD, {"lr": 0.016}),
        ),
        Task(
            "digits, MLP",
            digits.mlp,
            classify,
            whole(classify, count),
            count,
            64,
            1024,
            300,
            22,
            (SGD, {"lr": 0.1, "momentum": 0.9}),
        ),
        autoencoder,
        replace(autoencoder, name="autoencoder, Adam", base=(Adam, {"lr": 0.01})),
    ]


def train(task: Task, update: str, seed: int) -> Run | None:
    """On the worker its run; None on the accelerator."""
    torch.manual_seed(seed)
    model = task.make()
    base, options = task.base
    if update == "base alone":
        if dist.get_rank() != 0:
            return None
        plain = cast(Callable[..., Optimizer], base)(model.parameters(), **options)
        return loop(task, update, seed, model, plain)
    optimizer = MRDHO2(
        model,
        base=base,
        epoch_steps=task.epoch_steps,
        final_update=update,  # type: ignore[arg-type]
        newton_scale=task.newton_scale,
        gradient_averaging=False,
        **options,
    )
    with optimizer:
        if optimizer.role == "accelerator":
            batch = torch.arange(task.examples)[: task.curvature]
            optimizer.serve([batch], lambda indices: task.loss(model, indices))
            return None
        run = loop(task, update, seed, model, optimizer)
    run.epochs = len(optimizer.epochs)
    run.applied = sum(epoch.applied for epoch in optimizer.epochs)
    run.waited = sum(epoch.waited for epoch in optimizer.epochs)
    return run


def loop(task: Task, update: str, seed: int, model: nn.Module, optimizer: Optimizer) -> Run:
    parts = digits.batches(task.examples, task.batch, seed=seed, rank=0, world_size=1)
    start = time.perf_counter()
    for _ in range(task.steps):
        optimizer.zero_grad()
        task.loss(model, next(parts)).backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    loss = float(task.whole(model).detach())
    return Run(task.name, update, seed, loss, 1000 * seconds / task.steps)


def table(runs: list[Run]) -> Table:
    """A row a task and update: medians over the seeds, and the worst seed.

    "to base" is the median of each seed's ratio to the base alone with that seed.
    """
    result = Table(title="Final training loss, medians over the seeds")
    headers = ("task", "update", "loss", "to base", "worst", "made", "waited, s", "ms a step")
    for header in headers:
        result.add_column(header, justify="left" if header in headers[:2] else "right")
    for name in dict.fromkeys(run.task for run in runs):
        ours = [run for run in runs if run.task == name]
        floor = {r.seed: r.loss for r in ours if r.update == UPDATES[0]}
        for update in dict.fromkeys(run.update for run in ours):
            of = [run for run in ours if run.update == update]
            ratios = [run.loss / floor[run.seed] for run in of]
            result.add_row(
                name,
                update,
                f"{statistics.median(run.loss for run in of):.4g}",
                f"{statistics.median(ratios):.3f}",
                f"{max(ratios):.3f}",
                f"{sum(r.applied for r in of)} of {sum(r.epochs for r in of)}",
                f"{statistics.median(r.waited for r in of):.2f}",
                f"{statistics.median(r.milliseconds_per_step for r in of):.2f}",
            )
    return result


def main() -> None:
    """Run everything, print the table and write the runs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [task.name for task in tasks()]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the runs as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = []
    for task in tasks():
        if task.name not in arguments.only:
            continue
        for update in UPDATES:
            for seed in range(arguments.seeds):
                run = train(task, update, seed)
                dist.barrier()
                if run is not None:
                    runs.append(run)
    if dist.get_rank() == 0:
        Console().print(table(runs))
        if arguments.output:
            machine = f"{platform.machine()}, torch {torch.__version__}, {os.cpu_count()} cores"
            record = {"machine": machine, "runs": [asdict(run) for run in runs]}
            path = arguments.output
            others = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**others, **record}, indent=1))  # final_updates_timed.py's
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

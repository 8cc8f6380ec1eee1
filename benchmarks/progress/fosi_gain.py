"""What DHO2 gains over its base, where it may and where it may not.

    python benchmarks/progress/fosi_gain.py                                  all of it, some minutes
    python benchmarks/progress/fosi_gain.py --only "linear head" PINN --seeds 3

linear head      new on a frozen convolutional body, images with new noise in every batch
two-layer head   the same, with 32 units between
PINN             Poisson's equation on a square; judged by the relative error of the solution
autoencoder      the deep autoencoder on the digits
GRU              the digits, a row of pixels at a time
cached features  the linear head on features that were computed once, without noise

Both train to a target. The base is Adam, with the best of some learning rates on seeds that are not
reported; DHO2 over Adam has the best of the same rates, and no option that is not named in
:data:`SETTINGS`. Seconds are processor time of the whole training in one thread, with refreshes and
without judging; DHO2's budget reads the same clock. Each seed's runs follow each other, so that
what else the machine does counts for both. A ratio is DHO2's over the base's on the same seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import digits
import fine_tuning
import pinn
import reporting
from second_order import DHO2
from task import Task
from tasks import TASKS

__all__ = ["SETTINGS", "Gained", "Goal", "goal", "ratios", "reach"]

TUNED_ON = (100, 101)
RATES = {
    "linear head": (0.01, 0.03, 0.06, 0.1),
    "two-layer head": (0.003, 0.01, 0.03, 0.06),
    "PINN": (0.003, 0.005, 0.01, 0.02, 0.03),
    "autoencoder": (0.002, 0.005, 0.01, 0.02),
    "GRU": (0.003, 0.01, 0.03, 0.06),
    "cached features": (0.01, 0.03, 0.06, 0.1),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "linear head": fine_tuning.HEAD_ON_FROZEN_BODY,
    "two-layer head": fine_tuning.HEAD_ON_FROZEN_BODY,
    "PINN": {"warmup_steps": 100, "newton_scale": 0.5, "subspace_momentum": 0.0},
}
"""Options of DHO2 where the defaults are not those for the task."""


@dataclass(frozen=True)
class Goal:
    """A task and its target.

    Attributes:
        task: The task. ``task.steps`` is the largest number of steps.
        target: The loss, or error, that a run must reach.
        curved: Makes the curvature closure, from the model and a seed.
    """

    task: Task
    target: float
    curved: Callable[[nn.Module, int], Callable[[], Tensor]]


@dataclass
class Gained:
    """The result of a training run.

    Attributes:
        name: Name of the goal.
        optimizer: "Adam" or "DHO2".
        lr: The learning rate.
        seed: Seed of the model and of the order of the batches.
        options: The options of DHO2.
        steps: Steps to the target. None if the run does not reach it.
        total_steps: All steps.
        seconds: CPU seconds to the target or to the end.
        best: The smallest loss, or error.
        diverged: Whether a loss was not finite, or more than ten times the first.
        products: Hessian products of all refreshes.
        refreshes: Number of refreshes.
    """

    name: str
    optimizer: str
    lr: float
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    total_steps: int = 0
    seconds: float = 0.0
    best: float = math.inf
    diverged: bool = False
    products: int = 0
    refreshes: int = 0


def reach(name: str, optimizer: str, lr: float, seed: int, **options: Any) -> Gained:
    """Train to the target, to the first non-finite loss, or for all steps."""
    torch.set_num_threads(1)
    aim = goal(name)
    task = aim.task
    run = Gained(name, optimizer, lr, seed, options)
    torch.manual_seed(seed)
    model = task.make()
    model_optimizer: torch.optim.Optimizer
    if optimizer == "DHO2":
        closure = aim.curved(model, seed)
        model_optimizer = DHO2(
            model, lr=lr, base=torch.optim.Adam, curvature_closure=closure, **options
        )
        throttle = model_optimizer._curvature.throttle
        if throttle is not None:
            throttle.clock = lambda device: time.process_time()
    else:
        model_optimizer = torch.optim.Adam(
            [p for p in model.parameters() if p.requires_grad], lr=lr
        )
    first = math.inf
    for step, batch in zip(range(1, task.steps + 1), task.batches(seed), strict=False):
        start = time.process_time()
        model_optimizer.zero_grad()
        task.loss_of(model, batch).backward()
        model_optimizer.step()
        run.seconds += time.process_time() - start
        run.total_steps = step
        if step % task.every:
            continue
        with torch.no_grad():
            found = task.judge(model)
        first = min(first, found) if step == task.every else first
        run.best = min(run.best, found)
        run.diverged |= not math.isfinite(found) or found > 10 * first
        if found <= aim.target:
            run.steps = step
        if run.steps is not None or not math.isfinite(found):
            break
    run.seconds = round(run.seconds, 3)
    if isinstance(model_optimizer, DHO2):
        run.products = model_optimizer.curvature.total_products
        run.refreshes = model_optimizer.curvature.refreshes
    return run


# ---------------------------------------------------------------------------------------- the goals


def of_batches(task: Task, examples: int, size: int) -> Callable[..., Callable[[], Tensor]]:
    """The curvature closure that takes a new batch of a size at each refresh."""

    def curved(model: nn.Module, seed: int) -> Callable[[], Tensor]:
        drawn = digits.batches(examples, size, seed=seed + 1)
        return lambda: task.loss_of(model, next(drawn))

    return curved


@cache
def goal(name: str) -> Goal:
    """A goal by its name."""
    return GOALS[name]()


def head(kind: str, target: float) -> Goal:
    """A head on the frozen body of the example, in batches of 256."""
    data = digits.load_split()
    x = data.train_images
    y = data.train_labels

    def noisy(indices: Tensor) -> Tensor:
        return fine_tuning.add_noise(x[indices], torch.default_generator)

    task = Task(
        lambda: fine_tuning.make_model(kind),
        lambda seed: digits.batches(len(x), 256, seed=seed),
        lambda model, i: cross_entropy(model(noisy(i)), y[i]),
        lambda model: cross_entropy(model(x), y).item(),
        600,
        5,
    )
    return Goal(task, target, of_batches(task, len(x), 512))


def cached_features(target: float) -> Goal:
    """The linear head alone: what it sees never changes."""
    data = digits.load_split()
    body = fine_tuning.trained_body(fine_tuning.BODY_STEPS)
    x = body(data.train_images).detach()
    y = data.train_labels
    task = Task(
        lambda: fine_tuning.make_head("linear"),
        lambda seed: digits.batches(len(x), 256, seed=seed),
        lambda model, i: cross_entropy(model(x[i]), y[i]),
        lambda model: cross_entropy(model(x), y).item(),
        600,
        5,
    )
    return Goal(task, target, of_batches(task, len(x), 512))


def poisson() -> Goal:
    """The network of the example `pinn.py`. All points are one batch and the curvature batch."""
    points = pinn.Points()

    def endless(_: int) -> Iterator[int]:
        return count()

    task = Task(
        pinn.network,
        endless,
        lambda model, _: pinn.loss_of(model, points),
        lambda model: pinn.relative_error(model, points),
        4000,
        20,
    )
    return Goal(task, 1e-3, lambda model, _: lambda: pinn.loss_of(model, points))


def deep_autoencoder() -> Goal:
    """That of `tasks.py`, with more steps."""
    usual = TASKS["autoencoder"]()
    task = Task(usual.make, usual.batches, usual.loss_of, usual.judge, 1500, 5)
    return Goal(task, 17.0, of_batches(task, len(digits.autoencoder_images()), 512))


class Rows(nn.Module):
    """A GRU over the eight rows of an image, and a linear layer on what it ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Of (N, 64), the logits (N, 10)."""
        outputs, _ = self.gru(images.unflatten(1, (8, 8)))
        result: Tensor = self.head(outputs[:, -1])
        return result


def rows() -> Goal:
    """The digits by a GRU, in batches of 128."""
    data = digits.load_split()
    x = data.train_images
    y = data.train_labels
    task = Task(
        Rows,
        lambda seed: digits.batches(len(x), 128, seed=seed),
        lambda model, i: cross_entropy(model(x[i]), y[i]),
        lambda model: cross_entropy(model(x), y).item(),
        600,
        5,
    )
    return Goal(task, 0.1, of_batches(task, len(x), 256))


GOALS: dict[str, Callable[[], Goal]] = {
    "linear head": lambda: head("linear", 0.03),
    "two-layer head": lambda: head("two-layer", 0.01),
    "PINN": poisson,
    "autoencoder": deep_autoencoder,
    "GRU": rows,
    "cached features": lambda: cached_features(0.03),
}


# ---------------------------------------------------------------------------------------- the table


def ratios(runs: Sequence[Gained], key: str) -> list[float]:
    """DHO2's steps or seconds divided by Adam's, per seed. Infinite if DHO2 misses the target.

    If Adam misses the target, all its steps and seconds count, so the true ratio is smaller.

    Args:
        runs: The runs of one goal.
        key: "total_steps" or "seconds".
    """
    adam_runs = {run.seed: run for run in runs if run.optimizer == "Adam"}
    result = []
    for run in runs:
        if run.optimizer == "DHO2":
            ratio = math.inf
            if run.steps is not None:
                ratio = getattr(run, key) / getattr(adam_runs[run.seed], key)
            result.append(ratio)
    return result


def best_rate(runs: Sequence[Gained]) -> float:
    """The rate with the fewest steps over the tuning seeds.

    A run that misses the target counts all its steps. Steps decide rather than seconds, because a
    step takes the same time at each rate and seconds of single runs are noisy.
    """
    sums: dict[float, int] = {}
    for run in runs:
        steps = run.steps
        if steps is None:
            steps = goal(run.name).task.steps
        sums[run.lr] = sums.get(run.lr, 0) + steps
    return min(sums, key=lambda lr: sums[lr])


def middle(runs: Sequence[Gained]) -> str:
    """Median steps and seconds."""
    steps = statistics.median(math.inf if run.steps is None else run.steps for run in runs)
    seconds = statistics.median(run.seconds for run in runs)
    if not math.isfinite(steps):
        return "not met"
    return f"{steps:,.0f}, {seconds:.2f} s"


def spread(values: Sequence[float]) -> str:
    """Median, smallest and largest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Tune and train on each task, print the table, and store the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the runs to this file after each task")
    arguments = parser.parse_args()
    tuning: list[Gained] = []
    reported: list[Gained] = []
    rows = []
    for name in arguments.only:
        # Tune both optimizers.
        optimizers: dict[str, dict[str, Any]] = {"Adam": {}, "DHO2": SETTINGS.get(name, {})}
        rates = {}
        for optimizer, options in optimizers.items():
            tuning_runs = [
                reach(name, optimizer, lr, seed, **options)
                for lr in RATES[name]
                for seed in TUNED_ON
            ]
            rates[optimizer] = best_rate(tuning_runs)
            tuning += tuning_runs

        # Train at the best rates, in turns.
        runs: dict[str, list[Gained]] = {optimizer: [] for optimizer in optimizers}
        for seed in range(arguments.seeds):
            for optimizer, options in optimizers.items():
                run = reach(name, optimizer, rates[optimizer], seed, **options)
                runs[optimizer].append(run)
                reported.append(run)

        both = [*runs["Adam"], *runs["DHO2"]]
        diverged = sum(run.diverged for run in runs["DHO2"])
        rows.append(
            [
                name,
                f"{goal(name).target:g}",
                *(f"{middle(runs[o])} (lr {rates[o]:g})" for o in optimizers),
                *(spread(ratios(both, key)) for key in ("total_steps", "seconds")),
                f"{diverged} of {len(runs['DHO2'])}",
            ]
        )
        stored_tuning = [asdict(run) for run in tuning]
        stored_runs = [asdict(run) for run in reported]
        reporting.store(arguments.json, None, tuning=stored_tuning, runs=stored_runs)
    columns = "task", "target", "Adam", "DHO2", "steps, ratio", "seconds, ratio", "diverged"
    title = "steps and CPU seconds to the target, medians"
    reporting.show(reporting.table(title, columns, rows))


if __name__ == "__main__":
    main()

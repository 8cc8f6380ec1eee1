"""Steps and seconds to a target: SGD with momentum and every optimizer, on the digits.

    export PYTHONPATH=examples
    python benchmarks/progress/progress.py              all models, five seeds, a few minutes
    python benchmarks/progress/progress.py --models mlp --seeds 2

On the classifiers SGD has five learning rates, and KAISA has five dampings at learning rate 0.1. On
the autoencoder SGD and Adam have the rates that a search found best, and KAISA over each has two
settings. For each target the setting with the best median over the seeds counts, and the table
names it. "defaults" is KAISA with default settings at learning rate 0.1, or, over Adam, at Adam's.
A run is evaluated every five steps; seconds are processor time of training alone, with one thread,
so that a machine that does other things changes them little.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from tqdm import tqdm

import digits
import reporting
from second_order import KAISA

EVERY = 5
CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {"mlp": digits.mlp, "conv": digits.conv_net}
CLASSIFIER_TARGETS = ("97 % test accuracy", "98 % test accuracy", "loss 0.05", "loss 0.01")
AUTOENCODER_TARGETS = ("loss 20", "loss 16.5", "loss 15.8")


@dataclass(frozen=True)
class Setting:
    """One way to make an optimizer."""

    optimizer: str
    label: str
    build: Callable[[nn.Module], Optimizer]
    steps: int = 300


@dataclass
class Run:
    """One training: when each target was first met, in steps and in seconds."""

    optimizer: str
    setting: str
    seed: int
    steps_to: dict[str, int] = field(default_factory=dict)
    seconds_to: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    milliseconds_per_step: float = 0.0


def sgd(lr: float, steps: int = 300) -> Setting:
    return Setting(
        "SGD", f"lr {lr}", lambda model: SGD(model.parameters(), lr=lr, momentum=0.9), steps
    )


def adam(lr: float, steps: int = 300) -> Setting:
    return Setting("Adam", f"lr {lr}", lambda model: Adam(model.parameters(), lr=lr), steps)


def kaisa(name: str = "KAISA", steps: int = 300, **options: Any) -> Setting:
    shown = {key: getattr(value, "__name__", value) for key, value in options.items()}
    label = ", ".join(f"{key} {value}" for key, value in shown.items())

    def build(model: nn.Module) -> Optimizer:
        usual = {} if "base" in options else {"lr": 0.1, "momentum": 0.9}
        return KAISA(model, **{**usual, **options})

    return Setting(name, label or "lr 0.1", build, steps)


def classifier_settings() -> list[Setting]:
    rates = (0.01, 0.03, 0.1, 0.2, 0.3)
    tuned = [kaisa(lr=0.1, damping=damping) for damping in DAMPINGS]
    return [*map(sgd, rates), *tuned, kaisa("KAISA, defaults")]


def autoencoder_settings() -> list[Setting]:
    return [
        sgd(0.03, 2000),
        adam(0.01, 2000),
        kaisa("KAISA, defaults", steps=400),
        kaisa("KAISA over Adam, defaults", steps=500, base=Adam, lr=0.01),
        *[kaisa("KAISA over Adam", steps=500, base=Adam, **o) for o in OVER_ADAM],
        *[kaisa(steps=500, lr=lr) for lr in AUTOENCODER_RATES],
    ]


DAMPINGS = (0.03, 0.05, 0.1, 0.2, 0.5)
AUTOENCODER_RATES = (0.03, 0.1)
OVER_ADAM: tuple[dict[str, object], ...] = (
    {"lr": 0.014},
    {"lr": 0.014, "solver": "eigen"},
)


def train(
    setting: Setting,
    seed: int,
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    reached: Callable[[nn.Module], tuple[float, Iterable[str]]],
    batch_size: int,
    examples: int,
    targets: tuple[str, ...],
    rank: int = 0,
    processes: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    every: int = EVERY,
) -> Run:
    """Train until the last target or the last step, whichever comes first.

    What is reached is looked at after each ``every`` steps. With several processes each takes its
    part of every batch; what is reached is the same on all.
    """
    torch.manual_seed(seed)
    model = make()
    optimizer = setting.build(model)
    run = Run(setting.optimizer, setting.label, seed)
    parts = digits.batches(examples, batch_size, seed=seed, rank=rank, world_size=processes)
    for step, indices in zip(range(1, setting.steps + 1), parts, strict=False):
        start = clock()
        optimizer.zero_grad()
        loss_of(model, indices).backward()
        optimizer.step()
        run.seconds += clock() - start
        if step % every == 0:
            loss, met = reached(model)
            run.losses.append(loss)
            for target in met:
                run.steps_to.setdefault(target, step)
                run.seconds_to.setdefault(target, run.seconds)
            if not math.isfinite(loss) or len(run.steps_to) == len(targets):
                break
    run.milliseconds_per_step = 1000 * run.seconds / step
    return run


def run_classifier(
    name: str,
    setting: Setting,
    seed: int,
    rank: int = 0,
    processes: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    data = digits.load_split()

    def loss_of(model: nn.Module, indices: Tensor) -> Tensor:
        return cross_entropy(model(data.train_images[indices]), data.train_labels[indices])

    @torch.no_grad()
    def reached(model: nn.Module) -> tuple[float, Iterable[str]]:
        loss = cross_entropy(model(data.train_images), data.train_labels).item()
        accuracy = (model(data.test_images).argmax(1) == data.test_labels).float().mean().item()
        met = (accuracy >= 0.97, accuracy >= 0.98, loss <= 0.05, loss <= 0.01)
        return loss, [t for t, ok in zip(CLASSIFIER_TARGETS, met, strict=True) if ok]

    examples = len(data.train_images)
    return train(
        setting,
        seed,
        CLASSIFIERS[name],
        loss_of,
        reached,
        64,
        examples,
        CLASSIFIER_TARGETS,
        rank,
        processes,
        clock,
    )


def run_autoencoder(
    setting: Setting, seed: int, clock: Callable[[], float] = time.perf_counter
) -> Run:
    images = digits.autoencoder_images()

    def loss_of(model: nn.Module, indices: Tensor) -> Tensor:
        return digits.autoencoder_loss(model(images[indices]), images[indices])

    @torch.no_grad()
    def reached(model: nn.Module) -> tuple[float, Iterable[str]]:
        loss = digits.autoencoder_loss(model(images), images).item()
        return loss, [t for t in AUTOENCODER_TARGETS if loss <= float(t.split()[1])]

    return train(
        setting,
        seed,
        digits.autoencoder,
        loss_of,
        reached,
        256,
        len(images),
        AUTOENCODER_TARGETS,
        clock=clock,
    )


def median_steps(runs: list[Run], target: str) -> float:
    return statistics.median(run.steps_to.get(target, math.inf) for run in runs)


def table(model: str, runs: list[Run], targets: tuple[str, ...]) -> Table:
    """Per optimizer and target: the best setting's median steps, and its median seconds."""
    rows = []
    for optimizer in dict.fromkeys(run.optimizer for run in runs):
        optimizer_runs = [run for run in runs if run.optimizer == optimizer]
        by_setting: dict[str, list[Run]] = {}
        for run in optimizer_runs:
            by_setting.setdefault(run.setting, []).append(run)
        cells = []
        for target in targets:
            best = min(by_setting, key=lambda s: median_steps(by_setting[s], target))
            best_runs = by_setting[best]
            steps = median_steps(best_runs, target)
            if math.isinf(steps):
                cells.append("never")
                continue
            seconds = statistics.median(r.seconds_to.get(target, math.inf) for r in best_runs)
            cells.append(f"{steps:.0f} ({seconds:.2f} s)\n[dim]{best}[/dim]")
        step_time = statistics.median(run.milliseconds_per_step for run in optimizer_runs)
        rows.append([optimizer, *cells, f"{step_time:.1f}"])
    title = f"{model}: median steps (seconds) to a target, best setting of each"
    return reporting.table(title, ["optimizer", *targets, "ms per step"], rows)


def main() -> None:
    """Run the benchmark, print the tables and write the runs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = [*CLASSIFIERS, "autoencoder"]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the runs there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    everything: dict[str, list[dict[str, object]]] = {}
    for model in arguments.models:
        is_autoencoder = model == "autoencoder"
        settings = autoencoder_settings() if is_autoencoder else classifier_settings()
        work = [(setting, seed) for setting in settings for seed in range(arguments.seeds)]
        runs = [
            run_autoencoder(setting, seed, time.process_time)
            if is_autoencoder
            else run_classifier(model, setting, seed, clock=time.process_time)
            for setting, seed in tqdm(work, desc=model, leave=False)
        ]
        targets = AUTOENCODER_TARGETS if is_autoencoder else CLASSIFIER_TARGETS
        reporting.show(table(model, runs, targets))
        everything[model] = [asdict(run) for run in runs]
    reporting.store(arguments.json, runs=everything)


if __name__ == "__main__":
    main()

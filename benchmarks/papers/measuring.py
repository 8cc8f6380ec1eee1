"""What the claims share: a pool of processes, training runs on the digits, and timed steps."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import digits
import second_order
from measure import KINDS, Training
from workloads import ResNet, Workload

__all__ = [
    "CONV",
    "IMAGES",
    "MLP",
    "NORM",
    "PLAIN",
    "Make",
    "Processes",
    "Result",
    "Trial",
    "block_times",
    "digits_conv",
    "finite",
    "median_of",
    "network",
    "resnet",
    "run",
    "seconds_to",
    "split",
    "step_times",
    "steps_to",
    "train",
    "train_by_name",
]

T = TypeVar("T")
Name = TypeVar("Name")
IMAGES = 1437  # training images of the digits
CURVATURE_BATCH = 256


# ------------------------------------------------------------------------------------ processes


def _as_rank(place: str, rank: int, ranks: int, function: Callable[..., T], *args: Any) -> T:
    """Call a function inside a gloo group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", second_order.SecondOrderWarning)
    dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=ranks)
    try:
        result = function(*args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result


def _alone(function: Callable[[Any], T], argument: Any) -> T:
    """Call a function on one thread, without a process group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", second_order.SecondOrderWarning)
    return function(argument)


class Processes:
    """A pool of processes on this machine, each with one thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context)
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()

    def together(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call a function on every process, inside a gloo group; the results by rank."""
        place = str(Path(self._folder.name) / f"store{next(self._numbers)}")
        calls = [
            self._pool.submit(_as_rank, place, rank, self.count, function, *args)
            for rank in range(self.count)
        ]
        return [call.result() for call in calls]

    def each(self, function: Callable[[Any], T], arguments: Sequence[Any]) -> list[T]:
        """Call a function for every argument, as many at a time as there are processes."""
        return list(self._pool.map(partial(_alone, function), arguments))

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()
        self._folder.cleanup()


# -------------------------------------------------------------------------------- training runs


def plain_network(norm: bool) -> nn.Module:
    """Six convolutions in sequence with 8 to 32 channels, with or without batch norm."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    widths = (1, 8, 8, 16, 16, 32, 32)
    for i, (width_in, width) in enumerate(pairwise(widths)):
        stride = 2 if i in (2, 4) else 1
        conv = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=not norm)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers.append(conv)
        if norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


CONV = "conv"
PLAIN = "plain"
NORM = "plain, batch norm"
MLP = "MLP"
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    CONV: digits.conv_net,
    PLAIN: partial(plain_network, norm=False),
    NORM: partial(plain_network, norm=True),
    MLP: digits.mlp,
}


@dataclass(frozen=True)
class Trial:
    """One training run on the digits, with a constant learning rate.

    Attributes:
        network: A name in NETWORKS.
        optimizer: A class of torch.optim, or of the package.
        lr: The learning rate.
        batch: Images per step, over all processes.
        seed: Seed of the network and of the order of the images.
        steps: Largest number of steps.
        options: The optimizer's other keywords.
        every: Steps between two evaluations.
        target: Training loss at which the run ends.
        accuracy: Test accuracy at which the run ends.
    """

    network: str
    optimizer: str
    lr: float
    batch: int
    seed: int
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    every: int = 5
    target: float = 0.0
    accuracy: float = 2.0


@dataclass
class Result:
    """What a run measured at each evaluation, and the bytes of second-order state at the end."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    state_bytes: int = 0

    @property
    def best_accuracy(self) -> float:
        """In percent."""
        return 100 * max(self.accuracies)


def build(trial: Trial, model: nn.Module, data: digits.Digits) -> Any:
    """The optimizer of a run."""
    if not hasattr(second_order, trial.optimizer):
        kind = getattr(torch.optim, trial.optimizer)
        return kind(model.parameters(), lr=trial.lr, **trial.options)
    options = dict(trial.options)
    if "base" in options:
        options["base"] = getattr(torch.optim, options["base"])
    optimizer = getattr(second_order, trial.optimizer)(model, lr=trial.lr, **options)
    if trial.optimizer == "DHO2":
        images = data.train_images[:CURVATURE_BATCH]
        labels = data.train_labels[:CURVATURE_BATCH]
        optimizer.curvature_closure = lambda: cross_entropy(model(images), labels)
    return optimizer


@cache
def split() -> digits.Digits:
    """The digits, loaded once per process."""
    return digits.load_split()


def network(trial: Trial) -> nn.Module:
    """The network of a run, with the parameters of its seed."""
    torch.manual_seed(trial.seed)
    return NETWORKS[trial.network]()


def train(trial: Trial) -> Result:
    """Make the network and its optimizer, and train; on several ranks, all of them together."""
    grouped = dist.is_initialized()
    model = network(trial)
    if grouped and not hasattr(second_order, trial.optimizer):
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = build(trial, model, split())
    rank = dist.get_rank() if grouped else 0
    ranks = dist.get_world_size() if grouped else 1
    result = run(trial, model, optimizer, rank, ranks)
    if isinstance(optimizer, second_order.SecondOrderOptimizer):
        result.state_bytes = optimizer.summary().total_bytes
        optimizer.close()
    return result


def run(trial: Trial, model: nn.Module, optimizer: Any, rank: int = 0, ranks: int = 1) -> Result:
    """Train, and evaluate every few steps. Seconds are CPU time of training alone."""
    data = split()
    batches = digits.batches(
        len(data.train_images), trial.batch, seed=trial.seed, rank=rank, world_size=ranks
    )
    result = Result()
    seconds = 0.0
    for step, indices in zip(range(1, trial.steps + 1), batches, strict=False):
        start = time.process_time()
        optimizer.zero_grad()
        cross_entropy(model(data.train_images[indices]), data.train_labels[indices]).backward()
        optimizer.step()
        seconds += time.process_time() - start
        if step % trial.every:
            continue

        model.eval()
        with torch.no_grad():
            loss = cross_entropy(model(data.train_images), data.train_labels).item()
            correct = model(data.test_images).argmax(1) == data.test_labels
        model.train()
        result.steps.append(step)
        result.losses.append(loss)
        result.accuracies.append(correct.float().mean().item())
        result.seconds.append(seconds)
        reached = loss <= trial.target or result.accuracies[-1] >= trial.accuracy
        if reached or not math.isfinite(loss):
            break
    return result


def steps_to(result: Result, *, loss: float = -1.0, accuracy: float = 2.0) -> float:
    """Steps until a training loss, or a test accuracy, was first met; infinite if it never was."""
    for i, step in enumerate(result.steps):
        if result.losses[i] <= loss or result.accuracies[i] >= accuracy:
            return step
    return math.inf


def seconds_to(result: Result, accuracy: float) -> float:
    """CPU seconds until a test accuracy was first met; infinite if it never was."""
    pairs = zip(result.accuracies, result.seconds, strict=True)
    return next((seconds for found, seconds in pairs if found >= accuracy), math.inf)


def median_of(results: Sequence[Result], measure: Callable[[Result], float]) -> float:
    """The median of a number over runs."""
    return statistics.median(map(measure, results))


def train_by_name(
    processes: Processes, trials: Mapping[Name, Sequence[Trial]]
) -> dict[Name, list[Result]]:
    """Train all, and sort the results by name."""
    results = iter(processes.each(train, [trial for of in trials.values() for trial in of]))
    return {name: [next(results) for _ in of] for name, of in trials.items()}


def finite(value: float) -> float | None:
    """The value for JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


# ---------------------------------------------------------------------------------- timed steps


def resnet(tiny: bool) -> Workload:
    """ResNet-20 with 32 images, or a tiny one."""
    if tiny:
        return Workload("resnet", partial(ResNet, (4, 8), (1, 1)), (2, 3, 8, 8))
    return Workload("resnet20", partial(ResNet, (16, 32, 64), (3, 3, 3)), (32, 3, 32, 32))


def digits_conv() -> Workload:
    """The digits' convolutional network with 64 images."""
    return Workload("digits conv net", digits.conv_net, (64, digits.PIXELS))


Make = Callable[[nn.Module], Any]
"""Makes an optimizer."""


def step_times(
    workload: Workload, makers: Mapping[str, Make], repeats: int
) -> dict[str, dict[str, float]]:
    """Median milliseconds of each optimizer's steps, by kind; all optimizers take turns.

    The kinds are those of ``measure.KINDS``: steps with statistics and a refresh, with statistics,
    and with neither. Optimizers whose intervals do not follow that cycle have one kind in effect.
    Collective, if there is a process group: the times are the slowest rank's.
    """
    trainings = {name: Training(workload, make) for name, make in makers.items()}
    times: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in KINDS} for name in makers
    }
    for cycle in range(repeats + 1):
        for kind in KINDS:
            for name, training in trainings.items():
                milliseconds = training.time_step()
                if cycle:  # the first cycle warms up
                    times[name][kind].append(milliseconds)
    for training in trainings.values():
        training.require_finite()
        if isinstance(training.optimizer, second_order.SecondOrderOptimizer):
            training.optimizer.close()
    return {
        name: {kind: statistics.median(of) for kind, of in kinds.items()}
        for name, kinds in times.items()
    }


def block_times(
    workload: Workload, makers: Mapping[str, Make], length: int, blocks: int
) -> dict[str, float]:
    """Milliseconds per step of each optimizer: medians over blocks of steps that take turns."""
    trainings = {name: Training(workload, make) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for block in range(blocks + 1):
        for name, training in trainings.items():
            start = time.perf_counter()
            for _ in range(length):
                training.step()
            if block:  # the first block warms up
                times[name].append(1000 * (time.perf_counter() - start) / length)
    for training in trainings.values():
        training.require_finite()
        if isinstance(training.optimizer, second_order.SecondOrderOptimizer):
            training.optimizer.close()
    return {name: statistics.median(of) for name, of in times.items()}

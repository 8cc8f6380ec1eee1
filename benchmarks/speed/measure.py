"""The work of one process of the speed benchmark: measure step times or the peak memory.

SGD and the optimizer train copies of the same model and take turns. The optimizer's steps follow a
cycle of three kinds, so that each kind is timed separately:

    full         updates statistics and inverses, then takes the preconditioned step
    statistics   updates statistics, then takes the preconditioned step
    plain        only takes the preconditioned step
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instruments import CATEGORIES, peak_bytes, profiled, sent_bytes, stage_milliseconds
from variants import MeasuredOptimizer, Variant
from workloads import Workload

__all__ = ["KINDS", "Training", "amortized", "measure_memory", "measure_steps", "process_group"]

KINDS = ("full", "statistics", "plain")
WARM_UP_CYCLES = {"cpu": 1, "cuda": 3}


def interval(*kinds: str) -> Callable[[int], int]:
    """A refresh interval that makes refreshes due at every step of some kinds, and no other."""

    def interval_at(step: int) -> int:
        if KINDS[step % len(KINDS)] in kinds:
            return 1
        return step + 1

    return interval_at


def amortized(milliseconds: dict[str, float]) -> float:
    """Mean step time if statistics are updated every 10 steps and inverses every 100.

    In a hundred steps, ten update the statistics, and one of these ten updates the inverses.
    """
    sum_plain = 90 * milliseconds["plain"]
    sum_statistics = 9 * milliseconds["statistics"]
    return (sum_plain + sum_statistics + milliseconds["full"]) / 100


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer that all others are compared with."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def second_order(variant: Variant) -> Callable[[nn.Module], MeasuredOptimizer]:
    """A function that makes a variant's optimizer, with refreshes in the cycle of three kinds."""
    return lambda model: variant.build(model, interval("full", "statistics"), interval("full"))


@contextmanager
def process_group(device: str) -> Iterator[int]:
    """Join the group of processes that torchrun started, if any, and yield this process's rank."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def gather_values(value: Any) -> list[Any]:
    """The values of all processes."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Training:
    """A model with its optimizer and one batch. Takes and times steps."""

    def __init__(
        self,
        workload: Workload,
        make: Callable[[nn.Module], Any],
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        self.workload = workload
        self.model = wrap(workload.model())
        self.optimizer = make(self.model)
        self.batch = workload.batch(dist.get_rank() if dist.is_initialized() else 0)
        self.steps = 0
        self.loss = torch.zeros(())

    def step(self) -> None:
        """Run the forward and the backward pass and the optimizer's step."""
        self.optimizer.zero_grad()
        self.loss = self.workload.loss(self.model, self.batch)
        self.loss.backward()
        self.optimizer.step()
        self.steps += 1

    @property
    def kind(self) -> str:
        """Kind of the next step, for an optimizer in the cycle of three kinds."""
        return KINDS[self.steps % len(KINDS)]

    def synchronize(self) -> None:
        """Synchronize with the device and with the other processes."""
        if self.workload.device == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def time_step(self) -> float:
        """Take a step and return its milliseconds on the slowest process."""
        self.synchronize()
        start = time.perf_counter()
        self.step()
        if self.workload.device == "cuda":
            torch.cuda.synchronize()
        elapsed = 1000 * (time.perf_counter() - start)
        if not dist.is_initialized():
            return elapsed
        slowest: Tensor = torch.tensor(elapsed, device=self.workload.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def require_finite(self) -> None:
        """Raise if the last loss is not finite, because steps on NaN take a different time."""
        if not torch.isfinite(self.loss):
            raise RuntimeError(f"{self.workload.name}: the loss is {self.loss.item()}")


def measure_steps(workload: Workload, variant: Variant, repeats: int) -> dict[str, Any]:
    """Measure step times, bytes sent, timer regions and state of a variant on a workload.

    Args:
        workload: The model and its batch.
        variant: The optimizer.
        repeats: How many steps of each kind are timed after warm-up.
    """
    baselines = {"sgd": Training(workload, sgd)}
    if dist.is_initialized():
        # This is the cost of averaging the gradients with a first-order optimizer.
        baselines["ddp"] = Training(workload, sgd, DistributedDataParallel)
    training = Training(workload, second_order(variant))
    _step_in_turn(baselines, training, WARM_UP_CYCLES[workload.device])
    samples = _step_in_turn(baselines, training, repeats)
    milliseconds = {name: statistics.median(times) for name, times in samples.items()}
    result = {
        "milliseconds": milliseconds,
        "range": {name: [min(times), max(times)] for name, times in samples.items()},
        "every_step": milliseconds["full"] / milliseconds["sgd"],
        "every_10_and_100": amortized(milliseconds) / milliseconds["sgd"],
        "sent": _sent(training) if dist.is_initialized() else {},
        "stages": _stages(training),
    }
    # With some placements, processes store different amounts. Report the largest.
    summary = training.optimizer.summary()
    sizes = gather_values((summary.factor_bytes, summary.inverse_bytes))
    result["factor_bytes"], result["inverse_bytes"] = max(sizes, key=sum)
    return result


def _step_in_turn(
    baselines: dict[str, Training], training: Training, cycles: int
) -> dict[str, list[float]]:
    """Milliseconds of the steps of each baseline, and of the optimizer's steps by kind."""
    samples: dict[str, list[float]] = {name: [] for name in (*baselines, *KINDS)}
    for kind in KINDS * cycles:
        for name, baseline in baselines.items():
            samples[name].append(baseline.time_step())
        samples[kind].append(training.time_step())
    for measured in (*baselines.values(), training):
        measured.require_finite()
    return samples


def _sent(training: Training) -> dict[str, dict[str, int]]:
    """Bytes that the busiest process sends in a step of each kind, by category."""
    sent = {}
    for kind in KINDS:
        assert training.kind == kind
        with sent_bytes() as counter:
            training.step()
        busiest = max(gather_values(dict(counter)), key=lambda counts: sum(counts.values()))
        sent[kind] = {category: busiest.get(category, 0) for category in CATEGORIES}
    return sent


def _stages(training: Training) -> dict[str, dict[str, float]]:
    """Milliseconds of a full step in each of the package's timer regions, and in all."""
    assert training.kind == "full"
    total = 0.0

    def step() -> None:
        nonlocal total
        total = training.time_step()

    spans = profiled(step)
    stages = {"host": {"step": total, **stage_milliseconds(spans)}}
    if training.workload.device == "cuda":
        stages["device"] = stage_milliseconds(spans, device=True)
    return stages


def measure_memory(workload: Workload, variant: Variant | None) -> dict[str, Any]:
    """Peak memory of three full steps of a variant, or of SGD if the variant is None."""
    after_import = peak_bytes(workload.device)

    def every_step(_: int) -> int:
        return 1

    def make(model: nn.Module) -> Any:
        if variant is None:
            return sgd(model)
        return variant.build(model, every_step, every_step)

    training = Training(workload, make)
    for _ in range(3):
        training.step()
    training.require_finite()
    peak, before = max(gather_values((peak_bytes(workload.device), after_import)))
    return {"peak_bytes": peak, "bytes_after_import": before}

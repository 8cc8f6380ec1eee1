"""What one process of the speed benchmark does: time, or take the peak memory of, one workload.

SGD and the optimizer train copies of the same model in turn. The optimizer's steps come in a fixed
cycle of three kinds, so that each can be timed by itself:

    full         statistics and inverses, then the preconditioned step
    statistics   statistics, then the preconditioned step
    plain        the preconditioned step alone
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
from variants import Measured, Variant
from workloads import Workload

__all__ = ["KINDS", "Training", "amortised", "measure_memory", "measure_steps", "process_group"]

KINDS = ("full", "statistics", "plain")
WARM_UP = {"cpu": 1, "cuda": 3}  # cycles


def interval(*kinds: str) -> Callable[[int], int]:
    """An interval that has a refresh fall due on every step of some kinds, and on no other."""
    return lambda step: 1 if KINDS[step % len(KINDS)] in kinds else step + 1


def amortised(milliseconds: dict[str, float]) -> float:
    """The mean step when statistics are taken every 10 steps and inverses every 100.

    Ten of a hundred steps take statistics, and one of those ten solves as well.
    """
    full, factors, plain = (milliseconds[kind] for kind in KINDS)
    return (90 * plain + 9 * factors + full) / 100


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer that everything is compared with."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def second_order(variant: Variant) -> Callable[[nn.Module], Measured]:
    """Makes a variant's optimizer, with refreshes in the cycle of the three kinds."""
    return lambda model: variant.build(model, interval("full", "statistics"), interval("full"))


@contextmanager
def process_group(device: str) -> Iterator[int]:
    """Join the group of the processes that torchrun started, if it did; this process's rank."""
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


def of_all(value: Any) -> list[Any]:
    """Every process's value."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Training:
    """A model, its optimizer and one batch, to be stepped and timed."""

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
        """Forward, backward and the optimizer's step."""
        self.optimizer.zero_grad()
        self.loss = self.workload.loss(self.model, self.batch)
        self.loss.backward()
        self.optimizer.step()
        self.steps += 1

    @property
    def kind(self) -> str:
        """What the coming step is, for an optimizer in the cycle of three kinds."""
        return KINDS[self.steps % len(KINDS)]

    def synchronise(self) -> None:
        """Wait for the device, and for the other processes."""
        if self.workload.device == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def timed(self) -> float:
        """Take a step; its milliseconds, on the slowest process."""
        self.synchronise()
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
        """Raise unless the last loss is finite: time spent on NaN measures something else."""
        if not torch.isfinite(self.loss):
            raise RuntimeError(f"{self.workload.name}: the loss is {self.loss.item()}")


def measure_steps(workload: Workload, variant: Variant, repeats: int) -> dict[str, Any]:
    """Everything about a workload and a variant but its peak memory.

    Args:
        workload: The model and its batch.
        variant: The optimizer.
        repeats: Times that each kind of step is timed, after warm-up.
    """
    baselines = {"sgd": Training(workload, sgd)}
    if dist.is_initialized():
        # What averaging the gradients costs without second order.
        baselines["ddp"] = Training(workload, sgd, DistributedDataParallel)
    ours = Training(workload, second_order(variant))
    _step_in_turn(baselines, ours, WARM_UP[workload.device])
    samples = _step_in_turn(baselines, ours, repeats)
    milliseconds = {name: statistics.median(times) for name, times in samples.items()}
    result = {
        "milliseconds": milliseconds,
        "range": {name: [min(times), max(times)] for name, times in samples.items()},
        "every_step": milliseconds["full"] / milliseconds["sgd"],
        "every_10_and_100": amortised(milliseconds) / milliseconds["sgd"],
        "sent": _sent(ours) if dist.is_initialized() else {},
        "stages": _stages(ours),
    }
    # On some placements the processes differ; the fullest one decides what fits.
    summary = ours.optimizer.summary()
    sizes = of_all((summary.factor_bytes, summary.inverse_bytes))
    result["factor_bytes"], result["inverse_bytes"] = max(sizes, key=sum)
    return result


def _step_in_turn(
    baselines: dict[str, Training], ours: Training, cycles: int
) -> dict[str, list[float]]:
    """Milliseconds of every baseline's steps and of our steps by kind."""
    samples: dict[str, list[float]] = {name: [] for name in (*baselines, *KINDS)}
    for kind in KINDS * cycles:
        for name, baseline in baselines.items():
            samples[name].append(baseline.timed())
        samples[kind].append(ours.timed())
    for training in (*baselines.values(), ours):
        training.require_finite()
    return samples


def _sent(training: Training) -> dict[str, dict[str, int]]:
    """Bytes handed over in a step of each kind, by category, by the process with most of them."""
    sent = {}
    for kind in KINDS:
        assert training.kind == kind
        with sent_bytes() as counter:
            training.step()
        busiest = max(of_all(dict(counter)), key=lambda counts: sum(counts.values()))
        sent[kind] = {category: busiest.get(category, 0) for category in CATEGORIES}
    return sent


def _stages(training: Training) -> dict[str, dict[str, float]]:
    """Milliseconds of a full step in each of the package's ranges, and of the whole step."""
    assert training.kind == "full"
    total = 0.0

    def step() -> None:
        nonlocal total
        total = training.timed()

    spans = profiled(step)
    stages = {"host": {"step": total, **stage_milliseconds(spans)}}
    if training.workload.device == "cuda":
        stages["device"] = stage_milliseconds(spans, device=True)
    return stages


def measure_memory(workload: Workload, variant: Variant | None) -> dict[str, Any]:
    """Peak memory of a few full steps, with SGD alone if there is no variant."""
    after_import = peak_bytes(workload.device)

    def always(_: int) -> int:
        return 1

    def make(model: nn.Module) -> Any:
        return sgd(model) if variant is None else variant.build(model, always, always)

    training = Training(workload, make)
    for _ in range(3):
        training.step()
    training.require_finite()
    peak, before = max(of_all((peak_bytes(workload.device), after_import)))
    return {"peak_bytes": peak, "bytes_after_import": before}

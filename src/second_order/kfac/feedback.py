"""What all ranks receive after a refresh, so that they adapt to it equally.

report    each rank adds its numbers to a read of the device: the slope of the loss along the last
          step, the mean curvatures of layers, and the learning rates
share     the ranks sum them, with the cosines between P by the last and by the new inverse, and
          the work of the passes

The step scale follows from the slope, the refresh intervals from cosines and work, and the floor of
γ from the mean curvature of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from second_order.kfac.inversion import stack_means
from second_order.kfac.plan import StepPlan
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.storage import DeviceRead, Numbers
from second_order.training.context import Training
from second_order.utils.checks import as_scalar

__all__ = ["Feedback", "Report", "report_refresh", "share_feedback"]


@dataclass(frozen=True)
class Report:
    """What this rank reports of a refresh. The numbers may still be on the device.

    Attributes:
        slopes: The slope s along the last step; no number if the step was not kept.
        layers: The layers whose mean curvature this rank reports.
        curvatures: The mean curvature of each of these layers.
        rates: The learning rate of each parameter group that has layers.
        read: The device read that returns these numbers.
    """

    slopes: Numbers
    layers: Sequence[KroneckerBlock]
    curvatures: Numbers
    rates: Numbers
    read: DeviceRead


@dataclass(frozen=True)
class Feedback:
    """What all ranks know after a refresh.

    Attributes:
        slope: The slope s along the last step; NaN if the step was not kept.
        learning_rate: The largest learning rate of the parameter groups that have layers.
        mean_curvature: The mean curvature of all layers; None if there is none.
        work: Operations of the passes since the last step, of all ranks.
        cosines: The cosine of P by the last and by the new inverse, of each layer; NaN if the layer
            has no last inverse, or no gradient.
    """

    slope: float
    learning_rate: float
    mean_curvature: float | None
    work: float
    cosines: Sequence[float]


class _Sums(NamedTuple):
    """The numbers that ranks add up, without the cosines."""

    num_slopes: float
    num_curvatures: float
    slope: float
    curvature_roots: float
    work: float


def report_refresh(
    training: Training,
    step: StepPlan,
    layers: Sequence[KroneckerBlock],
    slopes: Sequence[Tensor],
    read: DeviceRead,
) -> Report:
    """Add what this rank reports of a refresh to a read of the device.

    Args:
        training: The parameter groups.
        step: The layers of all ranks.
        layers: The layers whose mean curvature this rank reports.
        slopes: The slope s along the last step, if the step was kept.
        read: The read of the device.
    """
    factors = {block: block.factors for block in layers if block.factors is not None}
    blocks: list[KroneckerBlock] = []
    curvatures: list[Tensor] = []
    for same_shape, means in stack_means(factors):
        blocks += same_shape
        curvatures.append(means.prod(0).mean(-1))
    return Report(
        slopes=read.add(slopes),
        layers=blocks,
        curvatures=read.add(curvatures),
        rates=_learning_rates(training, step.layers, read),
        read=read,
    )


def _learning_rates(
    training: Training, layers: Iterable[KroneckerBlock], read: DeviceRead
) -> Numbers:
    """The learning rate of each parameter group that has layers."""
    params: set[Tensor] = set()
    for block in layers:
        params.update(block.params)
    on_host: list[float] = []
    on_device: list[Tensor] = []
    for group in training.groups:
        if params.isdisjoint(group["params"]):
            continue
        rate = as_scalar(group["lr"])
        if isinstance(rate, Tensor):
            on_device.append(rate)
        else:
            on_host.append(rate)
    read_rates = read.add(on_device)
    return lambda: on_host + read_rates()


def share_feedback(
    training: Training,
    step: StepPlan,
    report: Report,
    known: Mapping[KroneckerBlock, float],
    cosines: Mapping[KroneckerBlock, Tensor],
) -> Feedback:
    """Sum over the ranks what each of them reports after a refresh. Collective.

    Args:
        training: The ranks.
        step: The layers of all ranks, and those that this rank reports.
        report: What this rank reports.
        known: The cosine of P by the last and by the new inverse, of layers whose cosine is on the
            host.
        cosines: The cosines of other layers, on the device.
    """
    # Read all values that are still on the device in one transfer.
    reporting = [block for block in step.reporting if block.solved]
    compared = [block for block in reporting if block in cosines]
    read_cosines = report.read.add([cosines[block] for block in compared])
    local_cosines = dict(known)
    local_cosines.update(zip(compared, read_cosines(), strict=True))
    slopes = report.slopes()
    roots: list[float] = []
    for block, curvature in zip(report.layers, report.curvatures(), strict=True):
        if block.solved:
            roots.append(math.sqrt(max(curvature, 0.0)))

    # Sum over the ranks. Only one rank reports each layer; the others add 0 to its cosine.
    local = _Sums(
        num_slopes=float(len(slopes)),
        num_curvatures=float(len(roots)),
        slope=sum(slopes),
        curvature_roots=sum(roots),
        work=float(sum(block.work for block in reporting)),
    )
    numbers: list[float] = list(local)
    reported = set(step.reporting)
    for block in step.layers:
        is_reported = block in reported
        numbers.append(local_cosines.get(block, math.nan) if is_reported else 0.0)
    message = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    training.world.on_cpu().all_reduce([message]).wait()
    summed: list[float] = message.tolist()
    total = _Sums(*summed[: len(local)])

    # The mean is that of square roots, so that one layer of huge curvature raises the floor of the
    # others less.
    mean_curvature: float | None = None
    if total.num_curvatures > 0 and math.isfinite(total.curvature_roots):
        mean_curvature = (total.curvature_roots / total.num_curvatures) ** 2
    return Feedback(
        slope=total.slope if total.num_slopes > 0 else math.nan,
        learning_rate=max(report.rates(), default=0.0),
        mean_curvature=mean_curvature,
        work=total.work,
        cosines=summed[len(local) :],
    )

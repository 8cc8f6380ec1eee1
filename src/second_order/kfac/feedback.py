"""What all ranks receive after a refresh, so that they adapt to it equally.

report    each rank adds its numbers to a read of the device: its part of the slope of
          the loss along the last step, the mean curvatures of its layers, and the
          learning rates
share     the ranks sum slopes and curvatures, the cosines between P_old and P_new, and
          the work of the passes. Learning rates are equal on all ranks.

P_old and P_new are a layer's gradient ∇, preconditioned by the previous and by the new
inverse: P = (A ⊗ G + γ)⁻¹ ∇. The step scale follows from the slope, the refresh
intervals from cosines and work, and the floor of γ from the mean curvature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from second_order.kfac.inversion import stack_means
from second_order.kfac.plan import StepPlan
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import KroneckerFactors, layer_mean_curvature
from second_order.kronecker.storage import DeviceRead
from second_order.training.context import Training
from second_order.training.groups import as_scalar

__all__ = ["Feedback", "Report", "report_refresh", "share_feedback"]


class Report(NamedTuple):
    """What this rank reports of a refresh.

    Attributes:
        read: The device read to which the numbers below were added. Each slice below is
            the place of its numbers in this read.
        slopes: This rank's part of the slope, one number; none if the step scale has
            kept no copy of the last step.
        layers: The layers whose mean curvature this rank reports.
        curvatures: The mean curvature of each of these layers.
        host_rates: The learning rates on the host, of parameter groups with layers.
        device_rates: The learning rates on the device.
    """

    read: DeviceRead
    slopes: slice
    layers: Sequence[KroneckerBlock]
    curvatures: slice
    host_rates: Sequence[float]
    device_rates: slice


class Feedback(NamedTuple):
    """What all ranks know after a refresh.

    Attributes:
        slope: The slope s along the last step; NaN if no rank has kept the step.
        learning_rate: The largest learning rate of parameter groups with layers; 0 if
            there is none.
        mean_curvature: The squared mean of the square roots of layers' mean curvatures;
            None if no layer has an inverse, or if it is not finite.
        work: Operations of all layers with an inverse, each in the passes of one rank.
        cosines: For each layer of the step plan, in order, the cosine between P_old and
            P_new; NaN if the layer has no previous inverse, or no gradient.
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
    sum_of_roots: float  # of the square roots of the layers' curvatures
    work: float


def report_refresh(
    training: Training,
    step_plan: StepPlan,
    slopes: Sequence[Tensor],
    read: DeviceRead,
) -> Report:
    """Add what this rank reports of a refresh to a read of the device.

    Args:
        training: The parameter groups.
        step_plan: The layers of all ranks, and those whose mean curvature this rank
            reports (``measured``).
        slopes: This rank's part of the slope s, from its layers: one scalar, or none.
        read: The read of the device.
    """
    # The mean curvatures. The device read flattens them, in the order of the blocks.
    factors: dict[KroneckerBlock, KroneckerFactors] = {}
    for block in step_plan.measured:
        if block.factors is not None:
            factors[block] = block.factors
    blocks: list[KroneckerBlock] = []
    curvatures: list[Tensor] = []
    for same_shape, means in stack_means(factors):
        blocks += same_shape
        curvatures.append(layer_mean_curvature(means))

    # The learning rates of parameter groups with layers.
    host_rates: list[float] = []
    device_rates: list[Tensor] = []
    for group in training.groups:
        if step_plan.params.isdisjoint(group["params"]):
            continue
        rate = as_scalar(group["lr"])
        if isinstance(rate, Tensor):
            device_rates.append(rate)
        else:
            host_rates.append(rate)
    return Report(
        read=read,
        slopes=read.add(slopes),
        layers=blocks,
        curvatures=read.add(curvatures),
        host_rates=host_rates,
        device_rates=read.add(device_rates),
    )


def share_feedback(
    training: Training,
    step_plan: StepPlan,
    report: Report,
    host_cosines: Mapping[KroneckerBlock, float],
    device_cosines: Mapping[KroneckerBlock, Tensor],
) -> Feedback:
    """Sum over the ranks what each of them reports after a refresh. Collective.

    Args:
        training: The ranks.
        step_plan: The layers of all ranks, and those whose cosines and work this rank
            reports (``reporting``).
        report: What this rank reports.
        host_cosines: The cosine between P_old and P_new, of layers whose cosine is on
            the host.
        device_cosines: The cosines of other layers, on the device.
    """
    # Read the cosines, with one copy to the host. If the refresh has not used
    # `report.read` before, the same copy includes the numbers of the report.
    read = report.read
    compared: list[KroneckerBlock] = []
    cosine_tensors: list[Tensor] = []
    for block in step_plan.reporting:
        if block in device_cosines:
            compared.append(block)
            cosine_tensors.append(device_cosines[block])
    place = read.add(cosine_tensors)
    cosines = dict(host_cosines)
    cosines.update(zip(compared, read.numbers(place), strict=True))

    # Sum up what this rank reports, of layers that have an inverse.
    slopes = read.numbers(report.slopes)
    curvatures = read.numbers(report.curvatures)
    device_rates = read.numbers(report.device_rates)
    num_curvatures = 0
    sum_of_roots = 0.0
    for block, curvature in zip(report.layers, curvatures, strict=True):
        if block.solved:
            num_curvatures += 1
            sum_of_roots += math.sqrt(max(curvature, 0.0))
    work = 0.0
    for block in step_plan.reporting:
        if block.solved:
            work += block.work
    local = _Sums(
        num_slopes=float(len(slopes)),
        num_curvatures=float(num_curvatures),
        slope=sum(slopes),
        sum_of_roots=sum_of_roots,
        work=work,
    )

    # Sum over the ranks. One rank reports each layer; the others add 0 to its cosine.
    numbers: list[float] = list(local)
    reporting = set(step_plan.reporting)
    for block in step_plan.layers:
        is_reported = block in reporting
        numbers.append(cosines.get(block, math.nan) if is_reported else 0.0)
    if training.world.size > 1:
        message = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        training.world.on_cpu().all_reduce([message]).wait()
        numbers = message.tolist()
    total = _Sums(*numbers[: len(local)])

    # The mean is that of square roots, in which a layer of huge curvature counts less.
    # That mean sets the floor of γ of all layers.
    mean_curvature: float | None = None
    if total.num_curvatures > 0 and math.isfinite(total.sum_of_roots):
        mean_curvature = (total.sum_of_roots / total.num_curvatures) ** 2
    return Feedback(
        slope=total.slope if total.num_slopes > 0 else math.nan,
        learning_rate=max([*report.host_rates, *device_rates], default=0.0),
        mean_curvature=mean_curvature,
        work=total.work,
        cosines=numbers[len(local) :],
    )

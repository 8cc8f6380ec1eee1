"""Metrics of the layers, and a copy of their factors as a :class:`KroneckerCurvature`.

Metrics are those of this process, of the factors and inverses that it stores. Nothing
is sent. A metric that this process does not know is NaN, so that all processes report
the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError
from second_order.kfac.inversion import Inverses
from second_order.kfac.layers import NO_STATISTICS, Layers, values_by_layer
from second_order.kfac.plan import LayerPlan
from second_order.kfac.state import (
    EXAMPLES,
    MEANS,
    WEIGHT,
    factor_entries,
    send_entries,
)
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.exact import ExactBlock
from second_order.kronecker.factors import layer_mean_curvature
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.optimizers.config import KFACOptions
from second_order.training.context import Training
from second_order.training.groups import group_params
from second_order.utils.modules import plain_type

__all__ = ["METRIC_NAMES", "build_curvature", "layer_metrics"]

METRIC_NAMES = (
    "clip",
    "damping",
    "damping/min",
    "damping/max",
    "step_scale",
    "age/inverses",
    "age/statistics",
    "drift/cosine",
    "drift/cosine/min",
    "drift/interval",
    "layers",
    "layers/solved",
    "layers/failing",
    "layers/pending",
    "failed",
    "dropped",
)
"""The names of all metrics of a K-FAC optimizer."""

UNNAMED = "(not in the model)"
ROOT_NAME = "(model)"  # of the model itself, in Layers.left_to_base


def layer_metrics(
    layers: Layers,
    plan: Mapping[KroneckerBlock, LayerPlan],
    inverses: Inverses,
    step: int,
) -> dict[str, float]:
    """Return the metrics of layers and inverses at a step; the others are NaN.

    Synchronizes with the device.
    """
    metrics = dict.fromkeys(METRIC_NAMES, math.nan)

    # Damping: the option, and γ of the layers that this process preconditions.
    dampings: list[float] = []
    inverse_steps: list[int] = []
    for block in plan:
        if block.solved:
            inverse_steps.append(inverses.states[block].step)
            if block.inverse is not None:
                dampings.append(float(inverses.states[block].damping))
    metrics["damping"] = float(inverses.damping_option)
    if dampings:
        metrics["damping/min"] = min(dampings)
        metrics["damping/max"] = max(dampings)

    # Inverses: the age of the oldest, and the numbers of layers in each condition.
    if inverse_steps:
        metrics["age/inverses"] = step - min(inverse_steps)
    metrics["layers"] = float(len(plan))
    metrics["layers/solved"] = float(len(inverse_steps))
    metrics["layers/failing"] = float(sum(block.failures > 0 for block in plan))
    metrics["layers/pending"] = float(len(inverses.pending))
    metrics["failed"] = float(inverses.num_failures)
    num_dropped = sum(int(block.staged.dropped) for block in layers.blocks)
    metrics["dropped"] = float(num_dropped)
    return metrics


def build_curvature(
    training: Training,
    options: KFACOptions,
    layers: Layers,
    plan: Mapping[KroneckerBlock, LayerPlan],
    damping: float,
    dtype: torch.dtype,
    gather: bool,
) -> KroneckerCurvature:
    """Copy the running averages into a :class:`KroneckerCurvature`.

    Collective if ranks own different factors.

    Args:
        training: The model, the parameter groups and the ranks.
        options: The options of the optimizer.
        layers: The layers.
        plan: The owners of the factors, of all layers that have ever trained.
        damping: The option γ at the last refresh; NaN before it.
        dtype: Dtype of the copies.
        gather: Whether all ranks get the copies; if not, the inverse rank of A does.

    Raises:
        SecondOrderError: If no layer has statistics.
    """
    world = training.world
    names = training.param_names()
    own_dampings = values_by_layer(training.groups, layers.blocks, "damping")
    uncovered = _reasons_of_base(training, layers)
    covered: dict[str, LayerCurvature] = {}
    owners: dict[str, int] = {}
    blocks = layers.blocks
    if training.steps == 0:  # there are no averages yet
        blocks = []
    for block in blocks:
        layer = plan.get(block)
        owner = 0
        if layer is not None:
            owner = layer.inverse_rank("A")
        receivers: Sequence[int] = [owner]
        if gather:
            receivers = range(world.size)
        averages = _send_averages(training, block, layer, receivers)

        # Leave out layers whose factors do not describe their parameters.
        params = _params_of_factors(block)
        shapes = {names.get(id(p), UNNAMED): p.shape for p in params}
        reason = _reason_without_curvature(block, params, averages)
        if reason:
            uncovered |= dict.fromkeys(uncovered.keys() & shapes.keys(), reason)
            continue
        for name in shapes:
            uncovered.pop(name, None)

        # Copy the factors on the ranks that get them.
        if world.size > 1 and not gather:
            owners[block.name] = owner
        stored: dict[str, Tensor] = {}
        if owners.get(block.name, world.rank) == world.rank:
            for factor in block.shape.factor_names:
                stored[factor] = averages[factor].to(dtype, copy=True)
        gamma = own_dampings.get(block, damping)
        if options.relative_damping:
            gamma *= _positive_mean_curvature(block, averages)
        covered[block.name] = LayerCurvature(
            name=block.name,
            modules=tuple(block.names),
            kind=plain_type(block.modules[0]),
            shapes=shapes,
            shape=block.shape,
            stored=stored,
            examples=float(averages[EXAMPLES]),
            updates=float(averages[WEIGHT]),
            damping=None if math.isnan(gamma) else gamma,
        )
    if not covered:
        raise SecondOrderError(
            f"{training.name} has no factors yet; call curvature() after the first step, and "
            f"before close()"
        )
    param_names = [names.get(id(p), UNNAMED) for p in group_params(training.groups)]
    return KroneckerCurvature(
        covered, param_names, uncovered, owners=owners, world=world
    )


def _send_averages(
    training: Training,
    block: KroneckerBlock,
    layer: LayerPlan | None,
    ranks: Sequence[int],
) -> dict[str, Tensor]:
    """Send a layer's factors to some ranks, and its other averages to all ranks.

    Collective.
    """
    world = training.world
    saved: dict[str, Tensor] = {}
    if block.factors is not None and not block.has_lost_factor:
        saved = block.saved_factors()
    averages: dict[str, Tensor] = {}
    for entry in factor_entries(block, layer):
        receivers: Sequence[int] = range(world.size)
        if entry.name in block.shape.factor_names:
            receivers = ranks
        averages |= send_entries(world, block, [entry], saved, receivers)
    return averages


def _positive_mean_curvature(
    block: KroneckerBlock, averages: Mapping[str, Tensor]
) -> float:
    """Return the mean curvature of a layer, in whose units γ is given; 1 if it is 0."""
    num_factors = len(block.shape.factor_names)
    curvature = float(layer_mean_curvature(averages[MEANS][:num_factors]))
    return curvature if curvature > 0 else 1.0


def _reasons_of_base(training: Training, layers: Layers) -> dict[str, str]:
    """Return for every parameter, by name, why only the base would train it."""
    names = training.param_names()
    reasons = {row.name: row.reason for row in layers.left_to_base}
    uncovered: dict[str, str] = {}
    for p in group_params(training.groups):
        name = names.get(id(p), UNNAMED)
        module_name = name.rpartition(".")[0] or ROOT_NAME
        reason = reasons.get(name, reasons.get(module_name, "it is in no layer"))
        uncovered[name] = f"{training.base_name} alone trains it ({reason})"
    return uncovered


def _params_of_factors(block: KroneckerBlock) -> list[nn.Parameter]:
    """Return the parameters that a layer's factors describe, including frozen ones."""
    size = math.prod(block.shape.gradient_shape)
    if sum(p.numel() for p in block.all_params) == size:
        return block.all_params
    if isinstance(block, ExactBlock):
        return block.params
    return [block.weight]


def _reason_without_curvature(
    block: KroneckerBlock, params: list[nn.Parameter], averages: Mapping[str, Tensor]
) -> str:
    """Return why a layer has no curvature; "" if it has."""
    if block.shape.gradient_factored:
        return (
            "its factors are computed from the gradient and are no Fisher information"
        )
    if sum(p.numel() for p in params) != math.prod(block.shape.gradient_shape):
        return "its bias was frozen or unfrozen after its factors were computed"
    if WEIGHT not in averages or not float(averages[WEIGHT]) > 0:
        return NO_STATISTICS
    return ""

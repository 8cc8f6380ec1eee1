"""What can be seen of the factors: numbers to log, and a copy of them as an object of its own.

Numbers are of this process and of the inverses and factors that are here; nothing is sent. One that
is not known here is NaN, so that every process has the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError
from second_order.kfac.inversion import Inverses
from second_order.kfac.layers import SILENT, Layers, values_by_layer
from second_order.kfac.plan import LayerPlan
from second_order.kfac.state import EXAMPLES, MEANS, WEIGHT, factor_entries, send_entries
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.exact import ExactBlock
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.optimizers.config import KFACOptions
from second_order.training.context import Training
from second_order.training.groups import group_params

__all__ = ["NAMES", "build_curvature", "metrics_of"]

UNNAMED = "(not in the model)"

NAMES = (
    *("clip", "damping", "damping/min", "damping/max", "step_length"),
    *("age/inverses", "age/statistics"),
    *("drift/cosine", "drift/cosine/min", "drift/interval"),
    *("layers", "layers/solved", "layers/failing", "layers/under_way", "failed", "dropped"),
)
"""The names of the numbers."""


def metrics_of(
    layers: Layers, plan: Mapping[KroneckerBlock, LayerPlan], inverses: Inverses, step: int
) -> dict[str, float]:
    """Numbers on layers and inverses. Synchronizes with the device."""
    solved = [block for block in plan if block.solved]
    states = [inverses.states[block] for block in solved]
    dampings = [float(inverses.states[b].damping) for b in solved if b.inverse is not None]
    return {
        **dict.fromkeys(NAMES, math.nan),
        "damping": float(inverses.damping_option),
        "damping/min": min(dampings, default=math.nan),
        "damping/max": max(dampings, default=math.nan),
        "age/inverses": step - min((state.step for state in states), default=math.nan),
        "layers": float(len(plan)),
        "layers/solved": float(len(solved)),
        "layers/failing": float(sum(block.failures > 0 for block in plan)),
        "layers/under_way": float(len(inverses.pending)),
        "failed": float(inverses.num_failures),
        "dropped": float(sum(int(block.staged.dropped) for block in layers.blocks)),
    }


def build_curvature(
    training: Training,
    options: KFACOptions,
    layers: Layers,
    plan: Mapping[KroneckerBlock, LayerPlan],
    damping: float,
    dtype: torch.dtype,
    gather: bool,
) -> KroneckerCurvature:
    """Copy the running averages into an object of their own; raise if no layer has any.

    A layer's copies are on the rank that keeps its A, or on all ranks to ``gather``. If ranks keep
    different factors, this is a collective.
    """
    world = training.world
    names = training.param_names()
    own_dampings = values_by_layer(training.groups, layers.blocks, "damping")
    uncovered = _left_to_the_base(training, layers)
    found: dict[str, LayerCurvature] = {}
    owners: dict[str, int] = {}
    for block in layers.blocks if training.steps > 0 else ():
        # The numbers go to all ranks, the factors to the layer's owner.
        layer = plan.get(block)
        owner = 0 if layer is None else layer.inverse_rank("A")
        saved = {} if block.factors is None or block.has_lost_factor else block.saved_factors()
        averages: dict[str, Tensor] = {}
        for entry in factor_entries(block, layer):
            to_all = gather or entry.name not in block.shape.factor_names
            ranks = range(world.size) if to_all else [owner]
            averages |= send_entries(world, block, [entry], saved, ranks)

        params = _params_of(block)
        shapes = {names.get(id(p), UNNAMED): p.shape for p in params}
        reason = _why_not(block, params, averages)
        if reason:
            uncovered |= dict.fromkeys(uncovered.keys() & shapes.keys(), reason)
            continue
        for name in shapes:
            uncovered.pop(name, None)
        if world.size > 1 and not gather:
            owners[block.name] = owner
        stored: dict[str, Tensor] = {}
        if owners.get(block.name, world.rank) == world.rank:
            stored = {k: averages[k].to(dtype, copy=True) for k in block.shape.factor_names}
        curvature = 1.0
        if options.relative_damping:
            curvature = float(averages[MEANS][: len(block.shape.factor_names)].prod(0).mean())
        gamma = own_dampings.get(block, damping) * (curvature if curvature > 0 else 1.0)
        found[block.name] = LayerCurvature(
            name=block.name,
            modules=tuple(block.names),
            kind=type(block.modules[0]),
            shapes=shapes,
            shape=block.shape,
            stored=stored,
            examples=float(averages[EXAMPLES]),
            updates=float(averages[WEIGHT]),
            damping=None if math.isnan(gamma) else gamma,
        )
    if not found:
        raise SecondOrderError(
            f"{training.name} has no factors yet: curvature() is for after the first step, and "
            f"before close()"
        )
    listed = [names.get(id(p), UNNAMED) for p in group_params(training.groups)]
    return KroneckerCurvature(found, listed, uncovered, owners=owners, world=world)


def _left_to_the_base(training: Training, layers: Layers) -> dict[str, str]:
    """Why a parameter is in no layer, by name, for all of them."""
    names, uncovered = training.param_names(), {}
    reasons = {row.name: row.reason for row in layers.left}
    for p in group_params(training.groups):
        name = names.get(id(p), UNNAMED)
        reason = reasons.get(name, reasons.get(name.rpartition(".")[0], "it is in no layer"))
        uncovered[name] = f"{training.base_name} alone trains it ({reason})"
    return uncovered


def _params_of(block: KroneckerBlock) -> list[nn.Parameter]:
    """The parameters that a block's factors are of, be they frozen now."""
    size = math.prod(block.shape.gradient_shape)
    if sum(p.numel() for p in block.owned) == size:
        return block.owned
    return block.params if isinstance(block, ExactBlock) else [block.weight]


def _why_not(
    block: KroneckerBlock, params: list[nn.Parameter], averages: Mapping[str, Tensor]
) -> str:
    """Why a block has no curvature; "" if it has."""
    if block.shape.gradient_factored:
        return "its factors are those of the gradient, which make no Fisher information"
    if sum(p.numel() for p in params) != math.prod(block.shape.gradient_shape):
        return "its bias has been frozen or unfrozen since its factors were taken"
    return "" if WEIGHT in averages and float(averages[WEIGHT]) > 0 else SILENT

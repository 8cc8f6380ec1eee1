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
from second_order.kfac.checkpoint import Entry, deliver_entries, factor_routes
from second_order.kfac.group_options import values_by_layer
from second_order.kfac.layers import SILENT, Layers
from second_order.kfac.plan import LayerPlan
from second_order.kfac.solve import Solves
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.exact import ExactBlock
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.optimizers.config import KFACOptions
from second_order.training.context import Training
from second_order.training.groups import members_of

__all__ = ["NAMES", "fitted_curvature", "metrics_of"]

UNNAMED = "(not in the model)"

NAMES = (
    *("clip", "damping", "damping/min", "damping/max", "step_length"),
    *("age/inverses", "age/statistics", "factor_update_steps", "inv_update_steps"),
    *("drift/cosine", "drift/cosine/min", "drift/interval", "drift/length"),
    *("layers", "layers/solved", "layers/failing", "layers/under_way", "failed", "dropped"),
)
"""The names of the numbers."""


def metrics_of(
    layers: Layers, plan: Mapping[KroneckerBlock, LayerPlan], solves: Solves, step: int
) -> dict[str, float]:
    """Numbers on layers and inverses. Synchronizes with the device."""
    solved = [block for block in plan if block.solved]
    found = dict.fromkeys(NAMES, math.nan)
    found["damping"] = float(solves.damping)
    found["layers"] = float(len(plan))
    found["layers/solved"] = float(len(solved))
    found["layers/failing"] = float(sum(block.state.failures > 0 for block in plan))
    found["layers/under_way"] = float(len(solves.under_way))
    found["failed"] = float(solves.failed)
    found["dropped"] = float(sum(int(block.staged.dropped) for block in layers.blocks))
    states = {block: solves.inverses[block] for block in solved}
    if states:
        found["age/inverses"] = float(step - min(state.step for state in states.values()))
    numbers = [float(x.damping) for block, x in states.items() if block.inverse is not None]
    if numbers:
        found["damping/min"] = min(numbers)
        found["damping/max"] = max(numbers)
    return found


def fitted_curvature(
    training: Training,
    options: KFACOptions,
    layers: Layers,
    plan: Mapping[KroneckerBlock, LayerPlan],
    damping: float,
    dtype: torch.dtype,
    gather: bool,
    spread: bool,
) -> KroneckerCurvature:
    """Copy the running averages into an object of their own; raise if no layer has any.

    Copies are the owner's, or everybody's to ``gather``. Where factors are ``spread``, as some are
    kept by other ranks alone, it is a collective.
    """
    world, names = training.world, training.names()
    everybody = range(world.size)
    routes = factor_routes(plan, lambda layer: everybody if gather else [_owner(layer)])
    stored: dict[Entry, Tensor] = {}
    for block in plan:
        if block.factors is not None:
            stored |= {(block, name): x for name, x in block.saved_factors().items()}
    away = deliver_entries(world, routes, stored)
    averages = {block: _averages_of(block, away.get(block, {})) for block in layers.blocks}
    own_dampings = values_by_layer(training.groups, layers.blocks, "damping")
    reasons, known = {}, {}
    for block, each in averages.items():
        reasons[block.name] = _why_not(block, _params_of(block), each)
        if not reasons[block.name]:
            gamma = _damping_of(each, own_dampings.get(block, damping), options.relative_damping)
            known[block.name] = float(each.examples), float(each.weight), gamma
    owners: dict[str, int] = {}
    if world.size > 1 and not gather:
        owners = {block.name: _owner(plan.get(block)) for block in layers.blocks}
        for rank, told in reversed([*enumerate(world.all_gather_object(known) if spread else ())]):
            known |= told
            owners |= dict.fromkeys(told, rank)
    uncovered = _left_to_the_base(training, layers)
    found: dict[str, LayerCurvature] = {}
    for block, each in averages.items():
        name, kept = block.name, each.stored
        shapes = {names.get(id(p), UNNAMED): p.shape for p in _params_of(block)}
        if name not in known:
            uncovered |= dict.fromkeys(uncovered.keys() & shapes.keys(), reasons[name])
            continue
        here = owners.get(name, world.rank) == world.rank
        uncovered = {param: why for param, why in uncovered.items() if param not in shapes}
        examples, updates, gamma = known[name]
        found[name] = LayerCurvature(
            name=name,
            modules=tuple(block.names),
            kind=type(block.modules[0]),
            shapes=shapes,
            shape=block.shape,
            stored={k: t.to(dtype, copy=True) for k, t in kept.items()} if here else {},
            examples=examples,
            updates=updates,
            damping=gamma,
        )
    if not found:
        raise SecondOrderError(
            f"{training.name} has no factors yet: curvature() is for after the first step, and "
            f"before close()"
        )
    listed = [names.get(id(p), UNNAMED) for p in members_of(training.groups)]
    owners = {name: owners[name] for name in found if name in owners}
    return KroneckerCurvature(found, listed, uncovered, owners=owners, world=world)


def _owner(layer: LayerPlan | None) -> int:
    """The rank that keeps A, or decomposes it if all do."""
    if layer is None:  # it does not train
        return 0
    return layer.solver("A") if layer.keepers is None else layer.keepers[0]


def _damping_of(averages: KroneckerFactors, damping: float, relative: bool) -> float | None:
    """γ of the training for a layer; None if it is not known."""
    if math.isnan(damping):
        return None
    curvature = float(averages.mean_curvature()) if relative else 1.0
    return damping * (curvature if curvature > 0 else 1.0)


def _left_to_the_base(training: Training, layers: Layers) -> dict[str, str]:
    """Why a parameter is in no layer, by name, for all of them."""
    names, uncovered = training.names(), {}
    reasons = {row.name: row.reason for row in layers.left}
    for p in members_of(training.groups):
        name = names.get(id(p), UNNAMED)
        reason = reasons.get(name, reasons.get(name.rpartition(".")[0], "it is in no layer"))
        uncovered[name] = f"{training.base_name} alone trains it ({reason})"
    return uncovered


def _params_of(block: KroneckerBlock) -> list[nn.Parameter]:
    """The parameters that a block's factors are of, be they frozen now."""
    size = math.prod(block.shape.gradient_size)
    if isinstance(block, ExactBlock):
        whole = sum(p.numel() for p in block.owned) == size
        return block.owned if whole else block.params
    if block.bias is not None and block.weight.numel() + block.bias.numel() == size:
        return [block.weight, block.bias]
    return [block.weight]


def _averages_of(block: KroneckerBlock, away: Mapping[str, Tensor]) -> KroneckerFactors:
    """The averages that are here, with those that have been gathered."""
    kept = block.factor_dtype, (False, False)
    averages = KroneckerFactors(block.shape, block.weight.device, *kept)
    averages.entries |= {} if block.factors is None else block.factors.entries
    averages.entries |= away
    return averages


def _why_not(block: KroneckerBlock, params: list[nn.Parameter], averages: KroneckerFactors) -> str:
    """Why a block has no curvature here; "" if it has."""
    if block.shape.marginal:
        return "its factors are those of the gradient, which make no Fisher information"
    if sum(p.numel() for p in params) != math.prod(block.shape.gradient_size):
        return "its bias has been frozen or unfrozen since its factors were taken"
    missing = len(averages.stored) < len(block.shape.letters)
    return SILENT if missing or not float(averages.weight) > 0 else ""

"""The factors of a training as an object of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from second_order.contract.groups import members_of
from second_order.contract.training import Training
from second_order.errors import SecondOrderError
from second_order.kfac.factor_moves import gather_factors
from second_order.kfac.layers import Layers
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import LayerPlan
from second_order.kfac.summary import SILENT
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.doubly_factored import DoublyFactoredBlock
from second_order.kronecker.exact import ExactBlock
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature

__all__ = ["fitted_curvature"]

ELSEWHERE = "another process keeps its factors: call curvature(gather=True) on every process"


def fitted_curvature(
    training: Training,
    options: KFACOptions,
    layers: Layers,
    plan: Mapping[KroneckerBlock, LayerPlan],
    damping: float,
    dtype: torch.dtype,
    gather: bool,
) -> KroneckerCurvature:
    """Copy the running averages into an object of their own.

    Args:
        training: The training.
        options: The options of the training.
        layers: The layers of the model.
        plan: The plan of every layer that has trained, in the same order on every rank.
        damping: γ of the last refresh, as the option has it; NaN before one.
        dtype: Dtype of the copies.
        gather: Whether to get factors that other processes keep: a collective.

    Raises:
        SecondOrderError: If no layer has had statistics.
    """
    ranks = range(training.world.size)
    away = gather_factors(training.world, plan, ranks) if gather else {}
    found: dict[str, LayerCurvature] = {}
    uncovered = _left_out(training, layers)
    for block in layers.blocks:
        params = _params_of(block)
        names = [training.names().get(id(p), "(not in the model)") for p in params]
        averages = _averages_of(block, away.get(block, {}))
        layer = plan.get(block)
        here = layer is None or gather or all(layer.keeps(training.world.rank))
        why = _why_not(block, params, averages) if here else ELSEWHERE
        if why:
            uncovered.update(dict.fromkeys(names, why))
            continue
        letters = block.shape.letters
        gamma = damping if not math.isnan(damping) else None
        if gamma is not None and options.relative_damping:
            curvature = float(averages.mean_curvature())
            gamma *= curvature if curvature > 0 else 1.0
        found[block.name] = LayerCurvature(
            name=block.name,
            modules=tuple(block.names),
            kind=type(block.modules[0]),
            shapes=dict(zip(names, (p.shape for p in params), strict=True)),
            shape=block.shape,
            factors={letter: averages.matrix(letter, dtype) for letter in letters},
            examples=float(averages.examples),
            updates=float(averages.weight),
            damping=gamma,
        )
    if not found and ELSEWHERE not in uncovered.values():
        raise SecondOrderError(
            f"{training.name} has no factors yet: curvature() is for after the first step, and "
            f"before close()"
        )
    names = _names(training)
    uncovered = {name: why for name, why in uncovered.items() if name in names}
    return KroneckerCurvature(found, names, uncovered)


def _names(training: Training) -> list[str]:
    """The names of the optimizer's parameters, in the order of its groups."""
    names = training.names()
    return [names.get(id(p), "(not in the model)") for p in members_of(training.groups)]


def _left_out(training: Training, layers: Layers) -> dict[str, str]:
    """Why the parameters of no layer have no curvature, by their names."""
    reasons = {row.name: row.reason for row in layers.left}
    known = {id(p) for block in layers.blocks for p in _params_of(block)}
    names, found = training.names(), {}
    for p in members_of(training.groups):
        if id(p) not in known:
            name = names.get(id(p), "(not in the model)")
            reason = reasons.get(name, reasons.get(name.rpartition(".")[0], "it is in no layer"))
            found[name] = f"{training.base_name} alone trains it ({reason})"
    return found


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
    here = block.factors
    averages = KroneckerFactors(
        block.shape,
        block.weight.device,
        block.factor_dtype,
        block.staged.triangular,
        (False, False),
    )
    averages.stored.update({k: away.get(k, block.stored(k)) for k in block.shape.letters})
    if away:
        averages.weight, averages.means = away["average_weight"], away["mean_eigenvalues"]
        averages.examples = away["examples"]
    elif here is not None:
        averages.weight, averages.means, averages.examples = here.weight, here.means, here.examples
    return averages


def _why_not(block: KroneckerBlock, params: list[nn.Parameter], averages: KroneckerFactors) -> str:
    """Why a block has no curvature here; "" if it has."""
    if block.shape.marginal:
        return "its factors are those of the gradient, which make no Fisher information"
    if type(block) not in (KroneckerBlock, ExactBlock, DoublyFactoredBlock):
        return f"{type(block).__name__} is a kind of layer that curvature() does not know"
    if sum(p.numel() for p in params) != math.prod(block.shape.gradient_size):
        return "its bias has been frozen or unfrozen since its factors were taken"
    missing = any(averages.stored[letter] is None for letter in block.shape.letters)
    return SILENT if missing or not float(averages.weight) > 0 else ""

"""Reads and checks an optimizer's arguments: parameters or a model, its wrappers, a GradScaler."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.fsdp import check_sharding, reshard
from second_order.training.context import Training
from second_order.training.groups import copy_group, group_params, named_trainable_params
from second_order.utils.checks import brief, check_params

__all__ = [
    "Arguments",
    "FoundModel",
    "Gathered",
    "check_scaler",
    "look_through",
    "read_arguments",
    "refuse_foreign_model",
    "refuse_meta",
    "warn_about_unowned",
    "warn_of_single_launch",
]


class Gathered(nn.ModuleList):
    """A list of modules or parameters that no module of the user contains together."""


@dataclass(frozen=True)
class FoundModel:
    """The model that parameters belong to.

    Attributes:
        module: The module that contains them.
        under_ddp: Whether DistributedDataParallel averages the gradients of all of them.
        inside: The class of a module around it that may change its outputs; "" if there is none.
    """

    module: nn.Module
    under_ddp: bool = False
    inside: str = ""


@dataclass(frozen=True)
class Arguments:
    """The model and the parameters that an optimizer trains.

    Attributes:
        model: The user's module without its wrappers. If no module was found: an empty module, or
            one that contains the parameters.
        known: Whether it is the user's module.
        under_ddp: Whether it is in DistributedDataParallel.
        inside: As in :class:`FoundModel`; "" for a model that the user has given.
        groups: Parameter groups, or parameters.
    """

    model: nn.Module
    known: bool
    under_ddp: bool
    inside: str
    groups: list[Any]


def look_through(model: nn.Module) -> tuple[nn.Module, bool]:
    """Unwrap the user's module. Also returns whether a wrapper averages gradients.

    Raises:
        TypeError: If FSDP1 has flattened the module's parameters.
        ValueError: If a parameter is not initialized.
    """
    under_ddp = False
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
            under_ddp = True
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = cast(nn.Module, model._orig_mod)
        else:
            break
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    flat = any(getattr(p, "_is_flat_param", False) for p in model.parameters())
    if flat or "FullyShardedDataParallel" in kinds:
        raise TypeError(
            "the model is in FullyShardedDataParallel (FSDP1), which flattens its parameters, so "
            "the gradient of a single layer is not available; shard it with "
            "torch.distributed.fsdp.fully_shard (FSDP2), or use DistributedDataParallel"
        )
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is not initialized yet; run one batch through the model "
                f"before you make the optimizer"
            )
    return model, under_ddp


def read_arguments(
    name: str,
    params_or_model: Any,
    model: Any,
    find_model: Callable[[Sequence[Tensor]], FoundModel | None],
    needs_model: bool,
) -> Arguments:
    """Read the first argument and the keyword ``model`` of the optimizer ``name``.

    If neither is a model, ``find_model`` finds the model of the parameters.

    Raises:
        TypeError: For two models, an argument of another type, or parameters that something other
            than FSDP2 has sharded.
        ValueError: If no parameter trains, or if one that trains is on the meta device.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model={brief(model)} is not a torch.nn.Module; pass one, or several in an "
            f"nn.ModuleList"
        )

    found: FoundModel | None
    if isinstance(params_or_model, nn.Module):
        if model is not None and model is not params_or_model:
            raise TypeError(f"{name} got two models; pass the model once")
        found = unwrapped(params_or_model)
        reshard(found.module)
        groups: list[Any] = named_trainable_params(found.module)
    else:
        check_params(name, params_or_model)
        groups = [copy_group(g) for g in params_or_model]
        if any(isinstance(group, nn.Module) for group in groups):
            raise TypeError(f"{name} got a list of models; write nn.ModuleList(models)")
        found = find_model(group_params(groups)) if model is None else unwrapped(model)
    params = group_params(groups)
    if not groups or (params and not any(p.requires_grad for p in params)):
        raise ValueError(
            f"{name} got no parameters that train: either there are none, or requires_grad is "
            f"False for all of them; call requires_grad_(True) on the parts that you want to "
            f"train before you make the optimizer"
        )

    known = found is not None
    if found is None:
        found = FoundModel(Gathered())
        members: dict[str, Any] = {str(i): p for i, p in enumerate(params)}
        found.module._parameters.update({} if needs_model else members)
    elif model is None and not isinstance(params_or_model, nn.Module):
        look_through(found.module)  # for its errors
    refuse_meta(name, params, found.module)
    if known:
        check_sharding(found.module)
    return Arguments(found.module, known, found.under_ddp, found.inside, groups)


def unwrapped(model: nn.Module) -> FoundModel:
    """A model without its wrappers."""
    inner, under_ddp = look_through(model)
    return FoundModel(inner, under_ddp)


def refuse_meta(name: str, params: Iterable[Tensor], model: nn.Module) -> None:
    """Raise ValueError if a parameter that trains is on the meta device.

    ``to_empty`` replaces the model's parameters by other tensors. An optimizer that was made
    before would still hold the tensors on the meta device, which have no data.
    """
    unmade = next((p for p in params if p.device.type == "meta" and p.requires_grad), None)
    if unmade is not None:
        names = {id(p): known for known, p in model.named_parameters()}
        which = f"parameter {names.get(id(unmade), '(not in the model)')!r}"
        raise ValueError(
            f"{which} is on the meta device and has no data: first call "
            f"model.to_empty(device=...) and initialize it, then make {name}; with FSDP2: "
            f"fully_shard(model), model.to_empty(device=...), then {name}"
        )


def warn_of_single_launch(training: Training) -> None:
    """Warn if a launcher has started several processes without a process group."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1 and training.world.group is None:
        training.warn(
            f"WORLD_SIZE is {launched}, but no process group is initialized: each process "
            f"trains alone; call torch.distributed.init_process_group() before making the "
            f"optimizer"
        )


def refuse_foreign_model(training: Training, params: Sequence[Tensor]) -> None:
    """Raise ValueError if the user's model has none of the parameters."""
    owned = {id(p) for p in training.model.parameters()}
    if training.owns_params and params and owned.isdisjoint(map(id, params)):
        raise ValueError(
            f"none of the {len(params)} parameters belongs to "
            f"model={type(training.model).__name__}, so {training.name} would be no more than "
            f"{training.base_name}; pass the model itself, not a copy of it or another one"
        )


def warn_about_unowned(training: Training, groups: Sequence[Any]) -> None:
    """Warn about parameters that are not in the model."""
    owned = {id(p) for p in training.model.parameters()}
    params = group_params(groups)
    unowned = []
    for group in groups:
        for p in group["params"] if isinstance(group, dict) else [group]:
            name, member = p if isinstance(p, tuple) else ("unnamed", p)
            if isinstance(member, Tensor) and id(member) not in owned:
                unowned.append(f"{name!r} of shape {tuple(member.shape)}")
    if not unowned:
        return
    if training.owns_params:
        where = f"are not in the model, a {type(training.model).__name__}"
        remedy = "if a module has them, make the optimizer with model= one that contains all"
    else:
        where = "belong to no module that is alive"
        remedy = "keep a reference to the module that has them, or pass it as model="
    if gc.get_freeze_count():
        remedy += "; gc.freeze() hides modules, so pass the model as model="
    more = f", and {len(unowned) - 10} more" if len(unowned) > 10 else ""
    training.warn(
        f"{len(unowned)} of {len(params)} parameters {where}, so {training.base_name} alone trains "
        f"them, without curvature: {', '.join(unowned[:10])}{more}; {remedy}"
    )


def check_scaler(scaler: Any, averages: bool, processes: int) -> None:
    """Raise unless ``scaler`` is a GradScaler that skips steps on all processes or on none."""
    if scaler is None:
        return
    for method in ("scale", "is_enabled"):
        if isinstance(scaler, type) or not callable(getattr(scaler, method, None)):
            raise TypeError(
                f"grad_scaler={scaler!r} has no {method}(); pass a torch.amp.GradScaler"
            )
    synchronized = type(scaler).__name__ == "ShardedGradScaler"
    if averages and processes > 1 and scaler.is_enabled() and not synchronized:
        raise ValueError(
            f"grad_scaler={type(scaler).__name__} with gradients averaged by the optimizer over "
            f"{processes} processes: an overflow on one process would skip step() there alone and "
            f"leave the others waiting; wrap the model in DistributedDataParallel, or use "
            f"torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )

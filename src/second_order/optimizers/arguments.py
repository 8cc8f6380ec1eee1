"""Read and check an optimizer's arguments: parameters or model, and a GradScaler.

unwrap_model       the user's module without DistributedDataParallel or torch.compile
read_arguments     the model and the parameter groups, whichever of the two was passed
check_*, warn_*    errors and warnings about them
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.fsdp import check_sharding, reshard
from second_order.training.context import Training
from second_order.training.groups import (
    copy_group,
    group_params,
    named_trainable_params,
)
from second_order.utils.checks import brief, check_params, list_names
from second_order.utils.modules import unwrapping_chain

__all__ = [
    "Arguments",
    "FoundModel",
    "FrozenParams",
    "UnenclosedModules",
    "check_listed_once",
    "check_model_owns_params",
    "check_not_on_meta",
    "check_scaler",
    "read_arguments",
    "unwrap_model",
    "warn_about_unowned",
    "warn_if_no_process_group",
]


class UnenclosedModules(nn.ModuleList):
    """Modules or parameters that no single module of the user contains."""


@dataclass(frozen=True)
class FoundModel:
    """The model that parameters belong to.

    Attributes:
        module: The module that contains the parameters.
        under_ddp: Whether DistributedDataParallel averages all of their gradients.
        outer_class: Class of a module around it that may change its outputs, or "".
    """

    module: nn.Module
    under_ddp: bool = False
    outer_class: str = ""


@dataclass(frozen=True)
class Arguments:
    """The model and the parameters that an optimizer trains.

    Attributes:
        model: The user's module without its wrappers. If the parameters belong to no
            module: an empty module, or one that contains the parameters.
        owns_params: Whether ``model`` is the user's module.
        under_ddp: Whether it is in DistributedDataParallel.
        outer_class: As in :class:`FoundModel`; "" for a model that the user passed.
        groups: Parameter groups, or parameters.
    """

    model: nn.Module
    owns_params: bool
    under_ddp: bool
    outer_class: str
    groups: list[Any]


def unwrap_model(model: nn.Module) -> FoundModel:
    """Remove the wrappers of a module: DistributedDataParallel and ``torch.compile``.

    Raises:
        TypeError: If FSDP1 has flattened the module's parameters.
        ValueError: If a parameter is not initialized.
    """
    chain = unwrapping_chain(model)
    model = chain[-1]

    # Refuse parameters that FSDP1 has flattened, or that have no shape yet.
    class_names: set[str] = set()
    for module in model.modules():
        class_names.update(kind.__name__ for kind in type(module).__mro__)
    has_flat_params = any(
        getattr(p, "_is_flat_param", False) for p in model.parameters()
    )
    if has_flat_params or "FullyShardedDataParallel" in class_names:
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
    under_ddp = any(isinstance(module, DistributedDataParallel) for module in chain)
    return FoundModel(model, under_ddp)


def read_arguments(
    name: str,
    params_or_model: Any,
    model: Any,
    find_model: Callable[[Sequence[Tensor]], FoundModel | None],
    needs_model: bool,
) -> Arguments:
    """Read the first argument and the keyword ``model`` of an optimizer.

    Args:
        name: Name of the optimizer's class, for messages.
        params_or_model: The first argument.
        model: The keyword ``model``.
        find_model: Finds the model of parameters, if the user passed none.
        needs_model: Whether parameters that belong to no module get no curvature.

    Raises:
        TypeError: For two models, an argument of another type, or parameters that
            something other than FSDP2 has sharded.
        ValueError: If no parameter trains, if one that trains is on the meta device, or
            if one is listed twice.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model={brief(model)} is not a torch.nn.Module; pass one, or several in an "
            f"nn.ModuleList"
        )

    # Read the groups, and the model if the user passed it.
    found: FoundModel | None = None
    groups: list[Any]
    if isinstance(params_or_model, nn.Module):
        if model is not None and model is not params_or_model:
            raise TypeError(f"{name} got two models; pass the model once")
        found = unwrap_model(params_or_model)
        reshard(found.module)
        groups = named_trainable_params(found.module)
    else:
        check_params(name, params_or_model)
        groups = [copy_group(group) for group in params_or_model]
        if any(isinstance(group, nn.Module) for group in groups):
            raise TypeError(f"{name} got a list of models; write nn.ModuleList(models)")
        if model is not None:
            found = unwrap_model(model)

    params = group_params(groups)
    if found is None:
        found = find_model(params)
        if found is not None:
            unwrap_model(found.module)  # raises for unsupported models
    if not groups or (params and not any(p.requires_grad for p in params)):
        raise ValueError(
            f"{name} got no parameters that train: either there are none, or requires_grad is "
            f"False for all of them; call requires_grad_(True) on the parts that you want to "
            f"train before you make the optimizer"
        )

    # Without a model, parameters that need no curvature of layers form one.
    owns_params = found is not None
    if found is None:
        found = FoundModel(UnenclosedModules())
        if not needs_model:
            for i, p in enumerate(params):
                found.module._parameters[str(i)] = cast(nn.Parameter, p)
    check_listed_once(params, found.module)
    check_not_on_meta(name, params, found.module)
    if owns_params:
        check_sharding(found.module)
    return Arguments(
        model=found.module,
        owns_params=owns_params,
        under_ddp=found.under_ddp,
        outer_class=found.outer_class,
        groups=groups,
    )


def check_listed_once(params: Iterable[Tensor], model: nn.Module) -> None:
    """Raise ValueError if a parameter is listed twice.

    A weight that two layers share is listed twice if you pass the parameters of both
    layers. torch only warns if a group has it twice, and then steps it twice.
    """
    listed: set[int] = set()
    for p in params:
        if id(p) in listed:
            names = {id(member): key for key, member in model.named_parameters()}
            raise ValueError(
                f"parameter {names.get(id(p), '(not in the model)')!r} of shape {tuple(p.shape)} "
                f"is listed twice, so the base would step it twice; list it once, as in "
                f"dict.fromkeys([*encoder.parameters(), *decoder.parameters()])"
            )
        listed.add(id(p))


def check_not_on_meta(name: str, params: Iterable[Tensor], model: nn.Module) -> None:
    """Raise ValueError if a parameter that trains is on the meta device.

    ``to_empty`` replaces the parameters of the model by other tensors. An optimizer
    that was made before would still hold the tensors on the meta device, which have no
    data.
    """
    for p in params:
        if p.device.type != "meta" or not p.requires_grad:
            continue
        names = {id(member): key for key, member in model.named_parameters()}
        raise ValueError(
            f"parameter {names.get(id(p), '(not in the model)')!r} is on the meta device and has "
            f"no data: first call model.to_empty(device=...) and initialize it, then make {name}; "
            f"with FSDP2: fully_shard(model), model.to_empty(device=...), then {name}"
        )


def warn_if_no_process_group(training: Training) -> None:
    """Warn if a launcher started several processes, but there is no process group."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1 and training.world.group is None:
        training.warn(
            f"WORLD_SIZE is {world_size}, but no process group is initialized: each process "
            f"trains alone; call torch.distributed.init_process_group() before making the "
            f"optimizer"
        )


def check_model_owns_params(training: Training, params: Sequence[Tensor]) -> None:
    """Raise ValueError if the user's model contains none of the parameters."""
    owned = {id(p) for p in training.model.parameters()}
    if training.owns_params and params and owned.isdisjoint(id(p) for p in params):
        raise ValueError(
            f"none of the {len(params)} parameters belongs to "
            f"model={type(training.model).__name__}, so {training.name} would be no more than "
            f"{training.base_name}; pass the model itself, not a copy of it or another one"
        )


def warn_about_unowned(training: Training, groups: Sequence[Any]) -> None:
    """Warn about parameters that are not in the model."""
    owned = {id(p) for p in training.model.parameters()}
    # List the parameters that no module has, with their names if the group gives them.
    unowned = []
    for group in groups:
        for p in group["params"] if isinstance(group, dict) else [group]:
            name, member = p if isinstance(p, tuple) else ("unnamed", p)
            if isinstance(member, Tensor) and id(member) not in owned:
                unowned.append(f"{name!r} of shape {tuple(member.shape)}")
    if not unowned:
        return

    if training.owns_params:
        # The remedy depends on whether there is a model.
        where = f"are not in the model, a {type(training.model).__name__}"
        remedy = (
            "if a module has them, make the optimizer with model= one that contains all"
        )
    else:
        where = "belong to no module that is alive"
        remedy = "keep a reference to the module that has them, or pass it as model="
    if gc.get_freeze_count():
        remedy += "; gc.freeze() hides modules, so pass the model as model="
    training.warn(
        f"{len(unowned)} of {len(group_params(groups))} parameters {where}, so "
        f"{training.base_name} alone trains them, without curvature: "
        f"{list_names(unowned)}; {remedy}"
    )


class FrozenParams:
    """The parameters that an optimizer of a model leaves out, because they are frozen.

    Args:
        params: All parameters of the model.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        # Weak references, because ``fully_shard`` may replace and free the parameters.
        self._references = [weakref.ref(p) for p in params if not p.requires_grad]

    def warn_if_trained(self, training: Training) -> None:
        """Warn once if some of them have gradients now, but are in no group."""
        unfrozen = []
        for reference in self._references:
            p = reference()
            if p is not None and p.requires_grad and p.grad is not None:
                unfrozen.append(p)
        if not unfrozen:
            return

        # The user may have added a group for them.
        in_groups = {id(p) for p in group_params(training.groups)}
        self._references = [r for r in self._references if id(r()) not in in_groups]
        names = training.param_names()
        left_out = [
            repr(names.get(id(p), "")) for p in unfrozen if id(p) not in in_groups
        ]
        if left_out:
            self._references = []
            training.warn(
                f"{training.name} does not train parameters that were frozen when it was created, "
                f"but they have gradients now: {list_names(left_out)}; add them by "
                f"add_param_group(), or pass {training.name}(model.parameters(), model=model)"
            )


def check_scaler(scaler: Any, averages_gradients: bool, num_ranks: int) -> None:
    """Raise unless ``scaler`` is a GradScaler that skips steps on all ranks or none."""
    if scaler is None:
        return
    for method in ("scale", "is_enabled"):
        if isinstance(scaler, type) or not callable(getattr(scaler, method, None)):
            raise TypeError(
                f"grad_scaler={scaler!r} has no {method}(); pass a torch.amp.GradScaler"
            )

    # A ShardedGradScaler shares overflows between ranks, others do not.
    is_synchronized = type(scaler).__name__ == "ShardedGradScaler"
    may_differ = averages_gradients and num_ranks > 1 and not is_synchronized
    if may_differ and scaler.is_enabled():
        raise ValueError(
            f"grad_scaler={type(scaler).__name__} with gradients averaged by the optimizer over "
            f"{num_ranks} processes: after an overflow on one process, only that process would "
            f"skip step(), and the others would wait for it; wrap the model in "
            f"DistributedDataParallel, or use "
            f"torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )

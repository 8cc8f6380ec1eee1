"""Checks of an optimizer's arguments: parameters or a model, what wraps it, a GradScaler."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order.contract.groups import (
    check_ownership,
    loose,
    materialised,
    members_of,
    refuse_meta,
    trainable,
)
from second_order.contract.sharding import check_sharding
from second_order.contract.training import Training
from second_order.distributed.roles import Roles, option_of
from second_order.distributed.world import World
from second_order.options import check_params
from second_order.sharded import ddp_under_way, reshard

__all__ = [
    "Arguments",
    "LateDDP",
    "check_scaler",
    "look_through",
    "refuse_ddp_over_helpers",
    "what_is_given",
]


def look_through(model: nn.Module) -> tuple[nn.Module, bool]:
    """The user's own module inside wrappers, and whether one of them averages gradients.

    Raises:
        TypeError: If FSDP1 has flattened the module's parameters.
        ValueError: If a parameter is not initialised.
    """
    under_ddp = False
    while True:
        if isinstance(model, DistributedDataParallel):
            model, under_ddp = model.module, True
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            break
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    flat = any(getattr(p, "_is_flat_param", False) for p in model.parameters())
    if flat or "FullyShardedDataParallel" in kinds:
        raise TypeError(
            "the model is in FullyShardedDataParallel (FSDP1), which flattens its parameters and "
            "shards them: layers and whole gradients cannot be told apart; shard it by "
            "torch.distributed.fsdp.fully_shard (FSDP2), or use DistributedDataParallel"
        )
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is not initialised yet; run one batch through the model "
                f"before making the optimizer"
            )
    return model, under_ddp


class Arguments(NamedTuple):
    """The model and the parameters that are to be optimized.

    Attributes:
        model: The user's module, without wrappers; an empty one that has the parameters if there is
            none.
        known: Whether the user gave a module.
        under_ddp: Whether the module was wrapped in DistributedDataParallel.
        groups: The parameter groups, or parameters.
        params: The parameters of all groups.
        named: Whether the groups have pairs of names and parameters, as of a model.
        strange: The shapes of parameters that are not the model's.
    """

    model: nn.Module
    known: bool
    under_ddp: bool
    groups: list[Any]
    params: list[Tensor]
    named: bool
    strange: list[str]


def what_is_given(
    name: str, base: str, params_or_model: Any, model: Any, needs_model: bool
) -> Arguments:
    """Find model and parameters in an optimizer's first argument and ``model``.

    ``name`` and ``base`` are those of the optimizer and its base, for messages.

    Raises:
        TypeError: For two models, a missing model, an argument of another type, or parameters that
            are sharded otherwise than by FSDP2.
        ValueError: If none of the parameters is the model's, or one that trains is on the meta
            device.
    """
    named = isinstance(params_or_model, nn.Module)
    known = model is not None or named
    if named:
        if model is not None and model is not params_or_model:
            raise TypeError(f"{name} got two models; pass the model once")
        model = params_or_model
        reshard(model)
        groups: list[Any] = trainable(look_through(model)[0])
    elif model is None and needs_model:
        raise TypeError(
            f"{name} needs the model to see its layers; write "
            f"{name}(params, model=model, lr=...) or {name}(model, lr=...)"
        )
    else:
        check_params(name, params_or_model)
        groups = [materialised(g) for g in params_or_model]
        model = loose(groups) if model is None else model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not a torch.nn.Module")
    inner, under_ddp = look_through(model)
    params = members_of(groups)
    refuse_meta(name, params, inner)
    if known:
        check_sharding(inner)
    strange = check_ownership(name, base, params, inner)
    return Arguments(inner, known, under_ddp, groups, params, named, strange)


def refuse_ddp_over_helpers(training: Training, roles: Roles, everybody: World) -> None:
    """Make the model's first pass with gradients raise, if it is in a DDP over helpers' ranks.

    A model that is wrapped before its optimizer is made is refused then. Frameworks wrap it
    afterwards, over all ranks, and a helper's gradients would be averaged into the workers'. The
    hook on the model goes by itself with the first such pass, which a helper need not have, or with
    the training.
    """
    places, role = everybody.global_ranks, roles.helper_role
    training.late_ddp = hook = LateDDP(
        {places[r] for r in roles.workers},
        {places[r] for r in roles.helpers},
        f"role {role!r} ({option_of(role)}={len(roles.helpers)})",
    )
    hook.handle = training.model.register_forward_pre_hook(hook)
    weakref.finalize(training, hook.remove).atexit = False


class LateDDP:
    """A hook that looks once who runs the model; copies, pickled ones too, never look."""

    def __init__(
        self, workers: Collection[int] = (), helpers: Collection[int] = (), said: str = ""
    ) -> None:
        self._workers, self._helpers, self._said = set(workers), set(helpers), said
        self.handle: Any = None

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Raise ValueError if helpers' gradients would be averaged in; of no use afterwards."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        ddp = ddp_under_way()
        ranks = [] if ddp is None else dist.get_process_group_ranks(ddp.process_group)
        helpers = sorted(self._helpers.intersection(ranks))
        if helpers and self._workers.intersection(ranks):
            raise ValueError(
                f"the model has been wrapped in DistributedDataParallel over ranks {ranks}, of "
                f"which {helpers} have {self._said}: their gradients would be averaged into those "
                f"of the workers. Wrap it with DistributedDataParallel(model, "
                f"process_group=optimizer.worker_group); under a framework that wraps models "
                f"itself, leave helpers out, or take another optimizer"
            )
        self.remove()

    def remove(self) -> None:
        """Look no more."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def __reduce__(self) -> Any:
        return LateDDP, ()


def check_scaler(scaler: Any, averages: bool, processes: int) -> None:
    """Raise unless ``scaler`` is a GradScaler that skips steps on all processes or on none."""
    if scaler is None:
        return
    for method in ("scale", "is_enabled"):
        if isinstance(scaler, type) or not callable(getattr(scaler, method, None)):
            raise TypeError(
                f"grad_scaler={scaler!r} has no {method}(); pass a torch.amp.GradScaler"
            )
    synchronised = type(scaler).__name__ == "ShardedGradScaler"
    if averages and processes > 1 and scaler.is_enabled() and not synchronised:
        raise ValueError(
            f"grad_scaler={type(scaler).__name__} with gradients averaged by the optimizer over "
            f"{processes} processes: an overflow on one process would skip step() there alone and "
            f"leave the others waiting; wrap the model in DistributedDataParallel, or use "
            f"torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )

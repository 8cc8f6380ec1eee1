"""Checks of an optimizer's arguments: parameters or a model, a GradScaler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from second_order.options import check_params
from second_order.sharded import reshard

__all__ = ["Given", "check_scaler", "look_through", "what_is_given"]


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
    for module in model.modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise TypeError(
                "the model is in FullyShardedDataParallel (FSDP1), which flattens its parameters "
                "and shards them: layers and whole gradients cannot be told apart; shard it by "
                "torch.distributed.fsdp.fully_shard (FSDP2), or use DistributedDataParallel"
            )
    for name, p in model.named_parameters():
        if getattr(p, "_is_flat_param", False):
            raise TypeError(
                f"parameter {name!r} is flattened by FullyShardedDataParallel (FSDP1), and has no "
                f"layers any more; shard the model by torch.distributed.fsdp.fully_shard (FSDP2), "
                f"or use DistributedDataParallel"
            )
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is not initialised yet; run one batch through the model "
                f"before making the optimizer"
            )
    return model, under_ddp


@dataclass(frozen=True)
class Given:
    """The model and the parameters that are to be optimized.

    Attributes:
        model: The user's module, without wrappers; an empty one that has the parameters if there is
            none.
        known: Whether the user gave a module.
        under_ddp: Whether the module was wrapped in DistributedDataParallel.
        groups: The parameter groups, or parameters.
        named: Whether the groups have pairs of names and parameters, as of a model.
        strange: The shapes of parameters that are not the model's.
    """

    model: nn.Module
    known: bool
    under_ddp: bool
    groups: list[Any]
    named: bool
    strange: list[str]

    @property
    def params(self) -> list[Tensor]:
        """The parameters of all groups."""
        return members_of(self.groups)


def what_is_given(
    name: str, base: str, params_or_model: Any, model: Any, needs_model: bool
) -> Given:
    """Find model and parameters in an optimizer's first argument and ``model``.

    Args:
        name: Name of the optimizer, for messages.
        base: Name of its base, for messages.
        params_or_model: A module, or parameters or groups.
        model: The module, where the first argument is none.
        needs_model: Whether a model is required.

    Raises:
        TypeError: For two models, a missing model, an argument of another type, or parameters that
            are sharded otherwise than by FSDP2.
        ValueError: If none of the parameters is the model's, or one that trains is on the meta
            device.
    """
    known = model is not None or isinstance(params_or_model, nn.Module)
    named = isinstance(params_or_model, nn.Module)
    if isinstance(params_or_model, nn.Module):
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
    refuse_meta(name, members_of(groups), inner)
    if known:
        check_sharding(inner)
    strange = check_ownership(name, base, members_of(groups), inner)
    return Given(inner, known, under_ddp, groups, named, strange)


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

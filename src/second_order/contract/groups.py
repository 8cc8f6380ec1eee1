"""Parameter groups: made of what the user gives, named by the model, and given anew in mid-run."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = [
    "NAMES",
    "check_ownership",
    "loose",
    "materialised",
    "members_of",
    "named_like",
    "outline_of",
    "refuse_meta",
    "shallow",
    "trainable",
]

NAMES = "param_names"


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a model that train, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def shallow(group: Any) -> Any:
    """A copy of a group that can be added to; its parameters are the same."""
    return copy.copy(group) if isinstance(group, dict) else group


def materialised(group: Any) -> Any:
    """A group that can be walked through twice, be its parameters a generator or one tensor."""
    if not isinstance(group, dict) or "params" not in group:
        return group
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def outline_of(group: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Outline a group that is to be added, for ranks to compare before it is checked.

    Args:
        group: The group, materialised if it is a mapping.
        defaults: Entries that the group gets where it lacks them.
    """
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(params, list):
        return {"params": [], "no group": f"of type {type(group).__name__}"}
    members = members_of([group])
    return {**defaults, **group, "params": members, "no tensors": len(params) - len(members)}


def members_of(groups: Iterable[Any]) -> list[Tensor]:
    """The parameters of groups, or of a list of parameters, named or not."""
    parts = [group["params"] if isinstance(group, dict) else [group] for group in groups]
    members = (p[1] if isinstance(p, tuple) else p for part in parts for p in part)
    return [p for p in members if isinstance(p, Tensor)]


def loose(groups: Iterable[Any]) -> nn.Module:
    """A module that only holds the parameters, which were given without a model."""
    module = nn.Module()
    tensors: dict[str, Any] = {str(i): p for i, p in enumerate(members_of(groups))}
    module._parameters.update(tensors)
    return module


def check_ownership(name: str, base: str, params: Sequence[Tensor], model: nn.Module) -> list[str]:
    """Raise unless the model has any of the parameters; returns the shapes of the others.

    Args:
        name: Name of the optimizer.
        base: Name of its base.
        params: The parameters to be optimized.
        model: The model that should have them.

    Raises:
        ValueError: If there are parameters, and none is the model's.
    """
    owned = {id(p) for p in model.parameters()}
    strange = [p for p in params if id(p) not in owned]
    if params and len(strange) == len(params):
        raise ValueError(
            f"none of the {len(params)} parameters belongs to model={type(model).__name__}, so "
            f"{name} would be no more than {base}; pass the model itself, not a copy of it or "
            f"another one"
        )
    return [str(tuple(p.shape)) for p in strange]


def refuse_meta(name: str, params: Iterable[Tensor], model: nn.Module) -> None:
    """Raise ValueError if a parameter that trains is on the meta device.

    Materialising puts other tensors in the place of a model's parameters: an optimizer that has
    been made before would go on with those that have no numbers.

    Args:
        name: Name of the optimizer.
        params: The parameters to be optimized.
        model: The model that names them.
    """
    unmade = [p for p in params if p.device.type == "meta" and p.requires_grad]
    if unmade:
        names = {id(p): known for known, p in model.named_parameters()}
        which = f"parameter {names.get(id(unmade[0]), '(not in the model)')!r}"
        raise ValueError(
            f"{which} is on the meta device, and has no numbers: materialise first, by "
            f"model.to_empty(device=...) and what fills it, then make {name}; with FSDP2: "
            f"fully_shard(model), model.to_empty(device=...), then {name}"
        )


def named_like(
    others: Sequence[Mapping[str, Any]], group: dict[str, Any], model: nn.Module
) -> dict[str, Any]:
    """A group with names where the other groups have them, as torch asks: all or none.

    Args:
        others: The present groups.
        group: The group to be added, with or without names.
        model: The model that gives names; other parameters are called by their place.
    """
    group = materialised(group)
    known = any(isinstance(p, tuple) for p in group["params"]) or NAMES in group
    if known or not any(NAMES in other for other in others):
        return group
    start = sum(len(other["params"]) for other in others)
    names = {id(p): name for name, p in model.named_parameters()}
    return {**group, NAMES: _called(group["params"], names, start)}


def _called(params: Sequence[Tensor], names: Mapping[int, str], start: int) -> list[str]:
    return [names.get(id(p), f"parameter {start + i}") for i, p in enumerate(params)]

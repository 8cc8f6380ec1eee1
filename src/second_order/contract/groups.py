"""Parameter groups: made of what the user gives, named by the model, and given anew in mid-run."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = [
    "NAMES",
    "check_assigned",
    "check_ownership",
    "loose",
    "materialised",
    "members_of",
    "named_like",
    "outline_of",
    "refuse_meta",
    "rename_assigned",
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


def rename_assigned(
    groups: Sequence[dict[str, Any]], model: nn.Module, before: Sequence[Mapping[str, Any]]
) -> None:
    """Name a group's parameters anew where its names are of others, too many or too few.

    Names are so where a group has been copied with other members. A parameter keeps its name, or
    gets that of the model. Names that no other parameter has are left as they are.

    Args:
        groups: The groups to be assigned.
        model: The model that has the parameters.
        before: The groups until now.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[str, set[int]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        owners.setdefault(name, set()).add(id(p))
    for group in before:
        if len(group.get(NAMES, ())) == len(group["params"]):
            for name, p in zip(group.get(NAMES, ()), group["params"], strict=True):
                names[id(p)] = name
                owners.setdefault(name, set()).add(id(p))
    start = 0
    for group in groups:
        called, params = group.get(NAMES), group["params"]
        if called is not None and (
            len(called) != len(params)
            or any(id(p) not in owners.get(n, {id(p)}) for n, p in zip(called, params, strict=True))
        ):
            group[NAMES] = _called(params, names, start)
        start += len(params)


def check_assigned(groups: Any) -> None:
    """Raise unless a list can take the place of ``param_groups``.

    Args:
        groups: The list that is assigned.

    Raises:
        TypeError: If ``groups`` is no list of groups of tensors.
        ValueError: If a parameter occurs twice.
    """
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise TypeError(
            f"param_groups={type(groups).__name__} is not a list of groups; assign a list of "
            f"dictionaries with 'params', as optimizer.param_groups is"
        )
    for i, group in enumerate(groups):
        members = group.get("params")
        if not isinstance(members, list) or not all(isinstance(p, Tensor) for p in members):
            raise TypeError(
                f"param_groups[{i}]['params'] is not a list of tensors; take those of the old "
                f"groups, or use add_param_group"
            )
    params = members_of(groups)
    if len({id(p) for p in params}) < len(params):
        raise ValueError("param_groups has a parameter twice; each belongs to one group")

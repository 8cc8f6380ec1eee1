"""Parameter groups: made of what the user gives, named by the model, stepped by the base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "NAMES",
    "members_of",
    "named_like",
    "outline_of",
    "settings_of",
    "trainable",
    "unhooked_step",
    "whole_group",
]

NAMES = "param_names"


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a model that train, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def whole_group(group: Any) -> Any:
    """A copy of a group that can be walked through twice; its parameters are the same."""
    if not isinstance(group, dict) or "params" not in group:
        return group
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def outline_of(group: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Outline a group that is to be added, for ranks to compare before it is checked."""
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(params, list):
        return {"params": [], "no group": f"of type {type(group).__name__}"}
    members = members_of([group])
    return {**defaults, **group, "params": members, "no tensors": len(params) - len(members)}


def settings_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A group's entries but its parameters, with tensors as numbers."""
    return {
        k: v.tolist() if isinstance(v, Tensor) else v for k, v in entries.items() if k != "params"
    }


def members_of(groups: Iterable[Any]) -> list[Tensor]:
    """The parameters of groups, or of a list of parameters, named or not."""
    parts: Iterator[Any] = (g["params"] if isinstance(g, dict) else [g] for g in groups)
    members = (p[1] if isinstance(p, tuple) else p for part in parts for p in part)
    return [p for p in members if isinstance(p, Tensor)]


def named_like(
    others: Sequence[Mapping[str, Any]], group: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """A group with names where the other groups have them, as torch asks: all or none.

    Args:
        others: The present groups.
        group: The group to be added, with or without names.
        names: The names of the model's parameters by id; others are called by their place.
    """
    known = any(isinstance(p, tuple) for p in group["params"]) or NAMES in group
    if known or not any(NAMES in other for other in others):
        return group
    start = sum(len(other["params"]) for other in others)
    called = [names.get(id(p), f"parameter {i}") for i, p in enumerate(group["params"], start)]
    return {**group, NAMES: called}


def unhooked_step(base: torch.optim.Optimizer) -> None:
    """Step a base without the hooks that the wrapper's own step already runs."""
    step = type(base).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(base)

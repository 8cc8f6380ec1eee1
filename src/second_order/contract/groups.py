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
    "nameless",
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
    """A copy of a group that can be walked through twice, with names beside its parameters.

    Raises:
        ValueError: If there are not as many names as parameters.
    """
    if not isinstance(group, dict) or "params" not in group:
        return group
    whole, params = dict(group), group["params"]
    whole["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    names = whole.pop(NAMES, None)
    if names is not None:
        if len(names) != len(params):
            raise ValueError(
                f"a group has {len(params)} parameters and {len(names)} {NAMES!r}; give each its "
                f"name, or leave {NAMES!r} out"
            )
        whole["params"] = list(zip(names, params, strict=True))
    return whole


def nameless(groups: Iterable[Any]) -> list[Any]:
    """Copies of groups for a base, which may not know of names; or a list of parameters."""
    plain = (g[1] if isinstance(g, tuple) else g for g in groups)
    return [{**g, "params": members_of([g])} if isinstance(g, dict) else g for g in plain]


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
    known = any(isinstance(p, tuple) for p in group["params"])
    if known or not any(NAMES in other for other in others):
        return group
    if not group["params"]:
        return {**group, NAMES: []}
    members = enumerate(group["params"], start=sum(len(other["params"]) for other in others))
    return {**group, "params": [(names.get(id(p), f"parameter {i}"), p) for i, p in members]}


def unhooked_step(base: torch.optim.Optimizer) -> None:
    """Step a base without the hooks that the wrapper's own step already runs."""
    step = type(base).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(base)

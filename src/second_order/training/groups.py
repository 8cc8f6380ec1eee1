"""Parameter groups: their members, names and settings, and the peaks of their learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from second_order.utils.checks import PEAK_LR

__all__ = [
    "NAMES",
    "copy_group",
    "group_params",
    "group_settings",
    "match_names",
    "named_trainable_params",
    "update_peak_rates",
    "without_names",
]

NAMES = "param_names"
RATES = "lr", "initial_lr", "max_lr"


def named_trainable_params(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a model that train, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def copy_group(group: Any) -> Any:
    """A copy of a group that can be walked through twice, with names beside its parameters.

    Raises:
        ValueError: If it has no parameters, or not as many names as parameters.
    """
    if not isinstance(group, dict):
        return group
    if "params" not in group:
        raise ValueError(f"a parameter group has no 'params', only {[*group]}")
    whole, params = dict(group), group["params"]
    whole["params"] = params = [params] if isinstance(params, Tensor) else list(params)
    names = whole.get(NAMES)
    if names is not None and (names or params):
        if len(names) != len(params):
            raise ValueError(
                f"a group has {len(params)} parameters and {len(names)} {NAMES!r}; give each its "
                f"name, or leave {NAMES!r} out"
            )
        whole["params"] = list(zip(whole.pop(NAMES), params, strict=True))
    return whole


def without_names(groups: Iterable[Any]) -> list[Any]:
    """Copies of groups for a base, which may not know of names; or a list of parameters."""
    plain = [{**g, "params": group_params([g])} if isinstance(g, dict) else g for g in groups]
    for group in plain:
        if isinstance(group, dict):
            group.pop(NAMES, None)
    return [g[1] if isinstance(g, tuple) else g for g in plain]


def group_settings(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A group's entries but its parameters, with tensors as numbers."""
    return {
        k: v.tolist() if isinstance(v, Tensor) else v for k, v in entries.items() if k != "params"
    }


def group_params(groups: Iterable[Any]) -> list[Tensor]:
    """The parameters of groups, or of a list of parameters, named or not."""
    members: list[Tensor] = []
    for group in groups:
        for p in group["params"] if isinstance(group, dict) else [group]:
            member = p[1] if isinstance(p, tuple) else p
            if isinstance(member, Tensor):
                members.append(member)
    return members


def match_names(
    others: Sequence[Mapping[str, Any]], group: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """A group with names where the ``others`` have them, as torch asks: all or none.

    ``names`` are of the model's parameters, by id; others are called by their place.
    """
    known = any(isinstance(p, tuple) for p in group["params"])
    if known or not any(NAMES in other for other in others):
        return group
    if not group["params"]:
        return {**group, NAMES: []}
    members = enumerate(group["params"], start=sum(len(other["params"]) for other in others))
    return {**group, "params": [(names.get(id(p), f"parameter {i}"), p) for i, p in members]}


def update_peak_rates(groups: Iterable[dict[str, Any]]) -> None:
    """Keep the largest learning rate of each group, that of the schedule to come included.

    Rates may be tensors on a device, which schedules fill in place: the host does not read them.
    """
    for group in groups:
        peak = group[PEAK_LR]
        for name in RATES:
            if name in group:
                peak = _larger(peak, group[name])
        group[PEAK_LR] = peak


def _larger(peak: Any, rate: Any) -> Any:
    if isinstance(peak, Tensor) and isinstance(rate, Tensor):
        return torch.maximum(peak, rate.detach().reshape(()))
    if isinstance(rate, Tensor):
        return rate.detach().reshape(()).clamp(min=peak)
    return peak.clamp(min=rate) if isinstance(peak, Tensor) else max(peak, rate)

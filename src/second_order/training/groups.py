"""Parameter groups: their parameters, names, settings and learning rates.

A group is a dictionary, as in ``torch.optim``. Its parameters may be tensors or
``(name, tensor)`` pairs. The functions here also accept bare parameters instead of
groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from second_order.utils.checks import PEAK_LR, Scalar, check_ordered, python_number

__all__ = [
    "NAMES",
    "as_scalar",
    "copy_group",
    "group_params",
    "group_settings",
    "match_names",
    "named_trainable_params",
    "update_peak_rates",
    "without_names",
]

NAMES = "param_names"
# The last two are set by learning-rate schedulers.
RATES = ("lr", "initial_lr", "max_lr")


def named_trainable_params(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List the model's trainable parameters as ``(name, parameter)`` pairs."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def copy_group(group: Any) -> Any:
    """Copy a group, with its parameters in a list and each name next to its parameter.

    NumPy numbers become Python numbers. Anything that is not a dictionary is returned
    unchanged.

    Raises:
        TypeError: If the parameters are in a set.
        ValueError: If the group has no parameters, or not one name for each of them.
    """
    if not isinstance(group, dict):
        return group
    if "params" not in group:
        raise ValueError(f"a parameter group has no 'params', only {[*group]}")
    copied = {key: python_number(value) for key, value in group.items()}
    params = copied["params"]
    check_ordered(params)
    params = [params] if isinstance(params, Tensor) else list(params)
    copied["params"] = params

    # Put each name next to its parameter.
    names = copied.get(NAMES)
    if names is not None and (names or params):
        if len(names) != len(params):
            raise ValueError(
                f"a group has {len(params)} parameters and {len(names)} {NAMES!r}; name every "
                f"parameter, or leave {NAMES!r} out"
            )
        del copied[NAMES]
        copied["params"] = list(zip(names, params, strict=True))
    return copied


def without_names(groups: Iterable[Any]) -> list[Any]:
    """Copy groups without names, because base optimizers may not accept them."""
    unnamed: list[Any] = []
    for group in groups:
        if isinstance(group, dict):
            copied = {**group, "params": group_params([group])}
            copied.pop(NAMES, None)
            unnamed.append(copied)
        elif isinstance(group, tuple):
            unnamed.append(group[1])
        else:
            unnamed.append(group)
    return unnamed


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, without its parameters and with tensors as numbers."""
    settings = {}
    for key, value in group.items():
        if key != "params":
            settings[key] = value.tolist() if isinstance(value, Tensor) else value
    return settings


def group_params(groups: Iterable[Any]) -> list[Tensor]:
    """List the parameters of groups, or of bare parameters, without their names."""
    params: list[Tensor] = []
    for group in groups:
        for p in group["params"] if isinstance(group, dict) else [group]:
            param = p[1] if isinstance(p, tuple) else p
            if isinstance(param, Tensor):
                params.append(param)
    return params


def match_names(
    others: Sequence[Mapping[str, Any]], group: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Name a group's parameters if other groups have names, as torch requires.

    Args:
        others: The groups that the optimizer has.
        group: The group that joins them.
        names: Names of the model's parameters, keyed by the parameters' ids. Other
            parameters are named by their position in the optimizer.
    """
    is_named = any(isinstance(p, tuple) for p in group["params"])
    if is_named or not any(NAMES in other for other in others):
        return group
    if not group["params"]:
        return {**group, NAMES: []}
    position = sum(len(other["params"]) for other in others)
    named = []
    for i, p in enumerate(group["params"], start=position):
        named.append((names.get(id(p), f"parameter {i}"), p))
    return {**group, "params": named}


def update_peak_rates(groups: Iterable[dict[str, Any]]) -> None:
    """Raise each group's peak learning rate to its current or scheduled one.

    Learning rates may be device tensors, which schedulers fill in place. The host does
    not read them.
    """
    for group in groups:
        peak = group[PEAK_LR]
        for name in RATES:
            if name in group:
                peak = _larger(peak, group[name])
        group[PEAK_LR] = peak


def as_scalar(value: Scalar) -> Scalar:
    """Return a Python number, or a scalar tensor if the value is on a GPU."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().reshape(())
    return float(value)


def _larger(peak: Any, rate: Any) -> Any:
    """The larger one of two numbers, each of which may be a tensor."""
    if isinstance(rate, Tensor):
        rate = rate.detach().reshape(())
        if isinstance(peak, Tensor):
            return torch.maximum(peak, rate)
        return rate.clamp(min=peak)
    if isinstance(peak, Tensor):
        return peak.clamp(min=rate)
    return max(peak, rate)

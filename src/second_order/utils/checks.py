"""Checks of arguments. Each error gives the value, the bound and the remedy."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = [
    "AUTO",
    "LAYER_OPTIONS",
    "PEAK_LR",
    "Interval",
    "Scalar",
    "Schedule",
    "brief",
    "check_choice",
    "check_count",
    "check_debug",
    "check_flag",
    "check_group_options",
    "check_interval",
    "check_learning_rate",
    "check_number",
    "check_ordered",
    "check_params",
    "check_patterns",
    "check_rank",
    "check_scalar",
    "check_seed",
    "check_timeout",
    "check_whole",
    "closest",
    "is_adaptive",
    "list_names",
    "python_number",
    "rate_of_groups",
    "scheduled",
    "value_at",
]

T = TypeVar("T")

Scalar: TypeAlias = float | Tensor
Schedule: TypeAlias = float | Callable[[int], float]
Interval: TypeAlias = int | Callable[[int], int]

AUTO: Literal["auto"] = "auto"

# Seconds (11 days); threads and process groups do not accept infinity.
LONGEST_WAIT = 1e6

DEBUG_STEPS = 100

MAX_NAMES = 10  # in a warning or an error

PEAK_LR = "peak_lr"
"""The entry of a parameter group with the largest learning rate of its schedule so far.

If the schedule is known, as with ``OneCycleLR``, it is the schedule's largest rate.
"""


def is_adaptive(base: Any) -> bool:
    """Return whether a base normalizes its steps, as all do except SGD and ASGD."""
    if not isinstance(base, type):
        return False
    return not issubclass(base, (torch.optim.SGD, torch.optim.ASGD))


def closest(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the most similar known name, or ""."""
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    if not matches:
        return ""
    return f"; did you mean {matches[0]!r}?"


def list_names(names: Sequence[str]) -> str:
    """List at most ten names, and the number of those left out."""
    listed = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        listed += f" and {len(names) - MAX_NAMES} more"
    return listed


def check_number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = float("inf"),
    open_low: bool = False,
    open_high: bool = False,
    remedy: str,
) -> None:
    """Raise TypeError unless a value is a number, ValueError unless it is in bounds."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"{name}={value!r} is not a number; {remedy}")
    above = value > low or (value == low and not open_low)
    below = value < high or (value == high and not open_high)
    if not (above and below):
        left = "(" if open_low else "["
        right = ")" if open_high else "]"
        raise ValueError(
            f"{name}={value} is outside {left}{low:g}, {high:g}{right}; {remedy}"
        )


def check_scalar(name: str, value: Any, **bounds: Any) -> None:
    """Check a number or a tensor with one element.

    The value of a tensor on a GPU is not read.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise TypeError(
                f"{name} is a tensor of shape {tuple(value.shape)} and {value.dtype}; "
                f"use one floating-point number, as in torch.tensor(0.1)"
            )
        if value.device.type != "cpu":
            return
        value = value.item()
    check_number(name, value, **bounds)


def check_interval(name: str, value: Any) -> None:
    """Raise unless a number of steps is a positive integer or a callable."""
    if not callable(value):
        check_whole(name, value, 1, "1 for every step, 10 for every tenth")


def check_count(name: str, value: Any, meaning: str) -> None:
    """Raise unless ``value`` is a positive integer."""
    check_whole(name, value, 1, f"1 or more: it is the number of {meaning}")


def check_whole(name: str, value: Any, low: int, remedy: str) -> None:
    """Raise unless ``value`` is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} is not an integer; use {remedy}")
    if value < low:
        raise ValueError(f"{name}={value} is below {low}; use {remedy}")


def check_debug(value: Any) -> int:
    """Check ``debug``, and return the steps between two comparisons; 0 for none."""
    if isinstance(value, bool):
        return DEBUG_STEPS if value else 0
    remedy = f"True for every {DEBUG_STEPS} steps, False for never"
    check_whole("debug", value, 1, remedy)
    return int(value)


LARGEST_SEED = 2**63 - 1
"""Torch's generators accept 64 bits. One is left for the step, which is added."""


def check_seed(name: str, value: Any) -> None:
    """Raise unless ``value`` is an integer that torch's generators accept as a seed."""
    check_whole(name, value, 0, "0")
    if value > LARGEST_SEED:
        raise ValueError(
            f"{name}={value} is above {LARGEST_SEED}, 2^63 - 1; use a smaller one, 0"
        )


def check_timeout(name: str, value: Any) -> None:
    """Raise unless ``value`` is a valid timeout of threads and process groups."""
    check_number(name, value, low=0.1, high=LONGEST_WAIT, remedy="60.0 is the default")


def check_learning_rate(value: Any) -> None:
    """Raise unless ``value`` is a finite number or a tensor.

    The base checks its bounds.
    """
    if not isinstance(value, Tensor):  # a tensor can be on a GPU, and is not read
        remedy = "pass a finite number or a tensor, such as 0.1"
        check_number(
            "lr", value, low=-math.inf, open_low=True, open_high=True, remedy=remedy
        )


def check_ordered(params: Any) -> None:
    """Raise TypeError if parameters are in a set. Checkpoints match them by order."""
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            "the parameters are in a set, whose order changes between runs and ranks; use a list"
        )


def check_params(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is an iterable of parameters or groups."""
    check_ordered(value)
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} got a tensor; put it into a list, as in {name}([tensor], lr=...)"
        )
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise TypeError(
            f"{name} got {brief(value)}, which is neither a torch.nn.Module nor an iterable of "
            f"parameters or groups; write {name}(model, lr=...), or {name}(nn.ModuleList(models), "
            f"lr=...) for several models"
        )


def brief(value: Any) -> str:
    """Return a value as text for a message, or only its class if the text is long."""
    text = repr(value)
    if len(text) <= 80 and "\n" not in text:
        return text
    kind = type(value).__name__
    article = "an" if kind[0] in "AEIOUaeiou" else "a"
    return f"{article} {kind}"


def check_rank(method: str, to: int | None, world_size: int) -> None:
    """Raise unless ``to`` is a rank or None."""
    if to is not None:
        check_whole(f"{method}: to", to, 0, "the number of a rank, or None for all")
    if to is not None and to >= world_size:
        raise ValueError(
            f"{method}(to={to}): there are ranks 0 to {world_size - 1}; use None for all of them"
        )


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    choices = list(choices)
    for choice in choices:
        # Check the type first: 1 == True, and a comparison with a tensor is not a bool.
        if isinstance(value, type(choice)) and value == choice:
            return
    listed = ", ".join(map(repr, choices))
    hint = closest(str(value), map(str, choices))
    raise ValueError(f"{name}={value!r} is not one of {listed}{hint}")


def check_patterns(value: Any, option: str = "skip_layers") -> None:
    """Raise TypeError unless the value is a sequence of strings.

    The order of a set differs between ranks, which compare the patterns.
    """
    usable = isinstance(value, Sequence) and not isinstance(value, str)
    patterns = tuple(value) if usable else ()
    if not usable or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"{option}={value!r} is not a sequence of patterns; "
            f"write {option}=['head', 'decoder.*']"
        )


def check_flag(name: str, value: Any) -> bool:
    """Return ``value``, or raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a flag; use True or False")
    return value


LAYER_OPTIONS: dict[str, Callable[[str, Any], object]] = {
    "damping": partial(
        check_number,
        low=0.0,
        open_high=True,
        remedy="give a number, or leave it out to use the optimizer's",
    ),
    "factor_decay": partial(
        check_number,
        low=0.0,
        high=1.0,
        open_high=True,
        remedy="give a number, or leave it out to use the optimizer's",
    ),
    "precondition": check_flag,
}
"""The options that a parameter group can set for its layers, with their checks."""


def check_group_options(
    name: str,
    groups: Iterable[Any],
    own_options: Collection[str],
    by_layer: bool,
    first: int = 0,
) -> None:
    """Raise ValueError if a group sets an option that cannot differ between groups.

    Args:
        name: The name of the optimizer's class.
        groups: Parameter groups or parameters.
        own_options: The optimizer's own keywords, which a group cannot set.
        by_layer: Whether groups can set ``LAYER_OPTIONS``.
        first: The index of the first group.
    """
    for i, group in enumerate(groups, start=first):
        if not isinstance(group, dict):
            continue
        for option, value in group.items():
            if by_layer and option in LAYER_OPTIONS:
                place = f"{option!r} of parameter group {i}: {option}"
                LAYER_OPTIONS[option](place, value)
            elif option in own_options or option in LAYER_OPTIONS:
                remedy = f"{name} has no such option, so leave it out"
                if option in own_options:
                    remedy = f"set it for all of them, as in {name}(..., {option}={brief(value)})"
                raise ValueError(
                    f"parameter group {i} has {option}={brief(value)}, which cannot differ between "
                    f"groups; {remedy}"
                )


def rate_of_groups(name: str, groups: Sequence[Any]) -> Scalar:
    """Return the first group's learning rate; raise TypeError if a group has none."""
    for i, group in enumerate(groups):
        if not isinstance(group, dict) or "lr" not in group:
            absent = f"; group {i} has none" if isinstance(group, dict) else ""
            raise TypeError(
                f"{name} needs a learning rate: write {name}(..., lr=0.1), or give every parameter "
                f"group its own 'lr'{absent}"
            )
        check_learning_rate(group["lr"])
    rate: Scalar = groups[0]["lr"]
    return rate


def value_at(option: Any, step: int) -> Any:
    """Return the value of an option at a step.

    The option is a constant or a callable.
    """
    if callable(option):
        return option(step)
    return option


def python_number(value: Any) -> Any:
    """Convert a NumPy number to a Python number, which every checkpoint can contain.

    A NumPy bool and the entries of a tuple, such as ``betas``, are converted as well.
    Any other value is returned as it is.
    """
    if type(value) is tuple:
        return tuple(map(python_number, value))
    is_bool = type(value).__name__ in ("bool", "bool_")  # NumPy's bool is not a Number
    if (is_bool or isinstance(value, numbers.Number)) and hasattr(value, "item"):
        return value.item()
    return value


def scheduled(options: Any, names: Iterable[str], step: int) -> list[tuple[str, Any]]:
    """Return the values of options that are callables, by name, to compare ranks.

    If a callable raises an exception, its text is the value. The exception is raised
    again when the option is used.
    """
    values: list[tuple[str, Any]] = []
    for name in names:
        option = getattr(options, name)
        if not callable(option):
            continue
        # Call it, and convert the value to a primitive.
        try:
            value = option(step)
        except Exception as error:
            value = f"{type(error).__name__}: {error}"
        if isinstance(value, Tensor):
            value = value.tolist() if value.device.type == "cpu" else "a tensor"
        if not isinstance(value, int | float):
            value = str(value)
        values.append((name, value))
    return values

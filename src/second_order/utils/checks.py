"""Checks of arguments. Each error gives the value, the bound and the remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = [
    "AUTO",
    "LAYER_OPTIONS",
    "PEAK_LR",
    "AutoInterval",
    "Interval",
    "Scalar",
    "Schedule",
    "as_scalar",
    "brief",
    "check_choice",
    "check_count",
    "check_debug",
    "check_flag",
    "check_group_options",
    "check_interval",
    "check_learning_rate",
    "check_number",
    "check_params",
    "check_patterns",
    "check_rank",
    "check_scalar",
    "check_seed",
    "check_timeout",
    "check_whole",
    "closest",
    "is_adaptive",
    "rate_of_groups",
    "scheduled",
    "value_at",
]

T = TypeVar("T")

Scalar: TypeAlias = float | Tensor
Schedule: TypeAlias = float | Callable[[int], float]
Interval: TypeAlias = int | Callable[[int], int]
AutoInterval: TypeAlias = Interval | Literal["auto"]

AUTO: Literal["auto"] = "auto"

LONGEST_WAIT = 1e6  # seconds, 11 days: clocks of threads and of process groups take no endless wait

DEBUG_STEPS = 100

PEAK_LR = "peak_lr"
"""The entry of a group with the largest learning rate so far, or to come by its schedule."""


def is_adaptive(base: Any) -> bool:
    """Whether an optimizer scales its steps itself: each that is not made from SGD."""
    return isinstance(base, type) and not issubclass(base, (torch.optim.SGD, torch.optim.ASGD))


def closest(name: str, known: Iterable[str]) -> str:
    """A question about the known name that is most like this one; "" if none is."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


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
    """Raise ValueError unless a number lies between its bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is not a number; {remedy}")
    above = value > low if open_low else value >= low
    if not above or not (value < high if open_high else value <= high):
        left = "(" if open_low else "["
        right = ")" if open_high else "]"
        raise ValueError(f"{name}={value} is outside {left}{low:g}, {high:g}{right}; {remedy}")


def check_scalar(name: str, value: Any, **bounds: Any) -> None:
    """Check a number, or a tensor with one element, which is not read if it is on a device."""
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
    """Raise unless a number of steps is a whole number of at least 1, or a callable."""
    if not callable(value):
        check_whole(name, value, 1, "1 for every step, 10 for every tenth")


def check_count(name: str, value: Any, meaning: str) -> None:
    """Raise unless ``value`` is a whole number of at least 1."""
    check_whole(name, value, 1, f"1 or more: it is the number of {meaning}")


def check_whole(name: str, value: Any, low: int, remedy: str) -> None:
    """Raise unless ``value`` is a whole number of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not a whole number; use {remedy}")
    if value < low:
        raise ValueError(f"{name}={value} is below {low}; use {remedy}")


def check_debug(value: Any) -> int:
    """Check the option ``debug``; returns the steps between comparisons, 0 for none."""
    if isinstance(value, bool):
        return DEBUG_STEPS if value else 0
    check_whole("debug", value, 1, f"True for every {DEBUG_STEPS} steps, False for never")
    return int(value)


LARGEST_SEED = 2**63 - 1
"""Torch's generators take 64 bits; what is added to a seed, such as a step, has one of them."""


def check_seed(name: str, value: Any) -> None:
    """Raise unless ``value`` is a whole number that torch's generators take, steps added."""
    check_whole(name, value, 0, "0")
    if value > LARGEST_SEED:
        raise ValueError(f"{name}={value} is above {LARGEST_SEED}, 2^63 - 1; use a smaller one, 0")


def check_timeout(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number of seconds that threads and process groups can wait."""
    check_number(name, value, low=0.1, high=LONGEST_WAIT, remedy="60.0 is the default")


def check_learning_rate(value: Any) -> None:
    """Raise unless ``value`` is a finite number or a tensor; the rest is the base's to check."""
    if not isinstance(value, Tensor):  # a tensor may be on a device, which is not read
        remedy = "a finite number or a tensor is needed, 0.1 perhaps"
        check_number("lr", value, low=-math.inf, open_low=True, open_high=True, remedy=remedy)


def check_params(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` can be walked through for parameters or groups."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name} got a tensor; put it into a list, as in {name}([tensor], lr=...)")
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise TypeError(
            f"{name} got {brief(value)}, which is neither a torch.nn.Module nor an iterable of "
            f"parameters or groups; write {name}(model, lr=...), or {name}(nn.ModuleList(models), "
            f"lr=...) for several models"
        )


def brief(value: Any) -> str:
    """A value as messages show it; only its class if the value takes more than a line."""
    text = repr(value)
    fits = len(text) <= 80 and "\n" not in text
    kind = type(value).__name__
    article = "an" if kind[0] in "AEIOUaeiou" else "a"
    return text if fits else f"{article} {kind}"


def check_rank(method: str, to: int | None, world_size: int) -> None:
    """Raise unless ``to`` is a rank, or None."""
    if to is not None:
        check_whole(f"{method}: to", to, 0, "the number of a rank, or None for all")
    if to is not None and to >= world_size:
        raise ValueError(
            f"{method}(to={to}): there are ranks 0 to {world_size - 1}; use None for all of them"
        )


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    choices = list(choices)
    # The type is compared as well, because 1 == True, and tensors cannot be compared in an `if`.
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        listed = ", ".join(map(repr, choices))
        hint = closest(str(value), map(str, choices))
        raise ValueError(f"{name}={value!r} is not one of {listed}{hint}")


def check_patterns(value: Any, option: str = "skip_layers") -> tuple[str, ...]:
    """Patterns of modules as a tuple; TypeError unless they are a sequence of strings."""
    usable = isinstance(value, Collection) and not isinstance(value, str)
    patterns = tuple(value) if usable else ()
    if not usable or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"{option}={value!r} is not a sequence of patterns; "
            f"write {option}=['head', 'decoder.*']"
        )
    return patterns


def check_flag(name: str, value: Any) -> bool:
    """Raise TypeError unless ``value`` is True or False."""
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
"""The options that a parameter group may set for its own layers, with their checks."""


def check_group_options(
    name: str, groups: Iterable[Any], ours: Collection[str], by_layer: bool, first: int = 0
) -> None:
    """Raise ValueError if a group sets an option of the optimizer ``name`` that cannot differ.

    Args:
        name: The optimizer's class.
        groups: Groups, or parameters.
        ours: The optimizer's own keywords, which no group may have.
        by_layer: Whether groups may set ``LAYER_OPTIONS``.
        first: The number of the first group.
    """
    for i, group in enumerate(groups, start=first):
        for option, value in group.items() if isinstance(group, dict) else ():
            if by_layer and option in LAYER_OPTIONS:
                LAYER_OPTIONS[option](f"{option!r} of parameter group {i}: {option}", value)
            elif option in ours or option in LAYER_OPTIONS:
                remedy = f"{name} has no such option, so leave it out"
                if option in ours:
                    remedy = f"set it for all of them, as in {name}(..., {option}={brief(value)})"
                raise ValueError(
                    f"parameter group {i} has {option}={brief(value)}, which cannot differ between "
                    f"groups; {remedy}"
                )


def rate_of_groups(name: str, groups: Sequence[Any]) -> Scalar:
    """The learning rate of the first group; raise TypeError unless every group has its own."""
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
    """An option's value at a step, be it a constant or a callable of the step."""
    return option(step) if callable(option) else option


def as_scalar(value: Scalar) -> Scalar:
    """A Python number; or a scalar tensor if it is on a device, which is not read."""
    on_device = isinstance(value, Tensor) and value.device.type != "cpu"
    return value.detach().reshape(()) if on_device else float(value)  # type: ignore[union-attr]


def scheduled(options: Any, names: Iterable[str], step: int) -> list[tuple[str, Any]]:
    """The values at a step of the options that are callables, by name, to compare ranks.

    If a callable raises an error, the error's text is the value. The use of the option raises it.
    """
    found: list[tuple[str, Any]] = []
    for name in names:
        if callable(option := getattr(options, name)):
            try:
                value = option(step)
            except Exception as error:
                value = f"{type(error).__name__}: {error}"
            if isinstance(value, Tensor):  # a device is not read
                value = value.tolist() if value.device.type == "cpu" else "a tensor"
            found.append((name, value if isinstance(value, int | float) else str(value)))
    return found

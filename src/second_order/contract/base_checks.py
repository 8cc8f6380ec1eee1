"""Checks that a saved state is sound, and of the base that is to load it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from second_order.contract.saved import (
    COUNTABLE,
    SavedPart,
    is_real,
    kind_of,
    out_of_bounds,
    unusual,
)
from second_order.options import PEAK_LR

__all__ = ["check_base_part", "check_base_settings", "check_settings", "check_written_by"]

# What torch's optimizers keep of a parameter: always, or where a setting says so, or perhaps.
KEPT: dict[str, dict[str, bool | str]] = {
    "ASGD": {"step": True, "eta": True, "mu": True, "ax": True},
    "Adadelta": {"step": True, "square_avg": True, "acc_delta": True},
    "Adafactor": {"step": True, "row_var": False, "col_var": False, "variance": False},
    "Adagrad": {"step": True, "sum": True},
    "Adam": {"step": True, "exp_avg": True, "exp_avg_sq": True, "max_exp_avg_sq": "amsgrad"},
    "AdamW": {"step": True, "exp_avg": True, "exp_avg_sq": True, "max_exp_avg_sq": "amsgrad"},
    "Adamax": {"step": True, "exp_avg": True, "exp_inf": True},
    "Muon": {"momentum_buffer": True},
    "NAdam": {"step": True, "mu_product": True, "exp_avg": True, "exp_avg_sq": True},
    "RAdam": {"step": True, "exp_avg": True, "exp_avg_sq": True},
    "RMSprop": {
        "step": True,
        "square_avg": True,
        "momentum_buffer": "momentum",
        "grad_avg": "centered",
    },
    "Rprop": {"step": True, "prev": True, "step_size": True},
    "SGD": {"momentum_buffer": False},
}
ANY = (-math.inf, math.inf)
NUMBERS = {"step": (0.0, COUNTABLE), "eta": ANY, "mu": ANY, "mu_product": ANY}  # and their bounds
SQUARES = {
    *("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum"),
    *("row_var", "col_var", "variance"),
}
FACTORED = {"row_var": -1, "col_var": -2}  # Adafactor's entries, and the dimension averaged

# Settings that many optimizers have: they do not tell which optimizer a group is of.
COMMON = {
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "lr",
    "maximize",
    "params",
    "weight_decay",
}
# Schedulers round learning rates to a little below zero.
LEAST = {
    "lr": -1e-8,
    **dict.fromkeys((PEAK_LR, "weight_decay", "eps", "momentum", "betas", "alpha", "rho"), 0.0),
}
SCHEDULED = {"initial_lr": 0.0, "max_lr": 0.0}  # settings that peak_lr follows
MOST = {"betas": math.nextafter(1.0, 0.0), "rho": 1.0}


@cache
def _settings() -> dict[str, frozenset[str]]:
    """The settings of torch's optimizers that tell them apart."""
    found = {}
    for name in KEPT:
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            found[name] = frozenset(inspect.signature(kind).parameters) - COMMON
    return found


def _is_torchs(kind: type[torch.optim.Optimizer]) -> bool:
    return kind.__name__ in KEPT and getattr(torch.optim, kind.__name__, None) is kind


def check_written_by(base: torch.optim.Optimizer, written_by: str) -> None:
    """Raise ValueError if a group's state names another class than that of its base."""
    name = type(base).__name__
    if written_by != name:
        raise _other(written_by, name)


def check_base_settings(
    base: torch.optim.Optimizer,
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    kept: Sequence[set[str]],
) -> None:
    """Raise ValueError if a group's state shows that it is another optimizer's.

    Args:
        base: The optimizer that is to load the state.
        theirs: The saved group.
        ours: The group as it is.
        kept: The names of the entries saved for each of the group's parameters.
    """
    mine = type(base)
    name = mine.__name__
    every = frozenset().union(*_settings().values())
    known = set(theirs) & every
    alike = [name for name, settings in _settings().items() if settings == frozenset(known)]
    likely = [k for k in alike if _keeps(k, kept)]
    foreign = known - set(base.defaults) - set(ours)
    if foreign or (_is_torchs(mine) and likely and name not in likely):
        raise _other(_named(likely, known, theirs, kept), name)
    if name in ("Adam", "AdamW") and _is_torchs(mine) and "decoupled_weight_decay" in theirs:
        decoupled = bool(theirs["decoupled_weight_decay"])
        if decoupled != bool(ours.get("decoupled_weight_decay", decoupled)):
            raise _other("AdamW" if decoupled else "Adam", name)


def _keeps(name: str, kept: Sequence[set[str]]) -> bool:
    """Whether torch's optimizer of this name keeps exactly such entries."""
    needed = {k for k, when in KEPT[name].items() if when is True}
    return all(needed <= keys <= set(KEPT[name]) for keys in kept)


def _named(
    likely: Sequence[str], known: set[str], group: Mapping[str, Any], kept: Sequence[set[str]]
) -> str:
    """A name, for messages, of the optimizer of a saved group."""
    if "Adam" in likely or "AdamW" in likely:
        return "AdamW" if group.get("decoupled_weight_decay") else "Adam"
    if likely:
        return " or ".join(likely)
    kinds = [name for name in _settings() if _keeps(name, kept)] or list(_settings())
    shared = {k: len(_settings()[k] & known) / max(1, len(_settings()[k] | known)) for k in kinds}
    closest = max(shared, key=lambda k: shared[k])
    if shared[closest] >= 0.5:
        return closest
    return f"an optimizer with {', '.join(sorted(known))}"


def _other(theirs: str, ours: str) -> ValueError:
    return ValueError(
        f"the checkpoint was saved by {theirs}, and the base here is {ours}: their states mean "
        f"different things; load it with base={theirs}, or start {ours} without it. Nothing has "
        f"been loaded"
    )


def check_settings(where: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise ValueError if a saved hyperparameter is of another kind, or outside its bounds.

    Args:
        where: Name of the group, for messages.
        saved: The saved group.
        ours: The group as it is, defaults included.
    """
    if "lr" not in saved:
        raise ValueError(f"the checkpoint's {where}['lr'] is missing; nothing has been loaded")
    switches = {key: False for key in COMMON if key in ours and ours[key] is None}
    expected = {**SCHEDULED, **ours, **switches}
    for key, value in saved.items():
        if key in ("params", "param_names") or key not in expected:
            continue
        problem = _problem(value, expected[key], LEAST.get(key, -math.inf), MOST.get(key, math.inf))
        if problem:
            raise ValueError(
                f"the checkpoint's {where}[{key!r}] {problem}; nothing has been loaded"
            )


def _problem(value: Any, ours: Any, low: float, high: float) -> str:
    """The fault of a saved hyperparameter, compared with ours; "" if it has none."""
    if isinstance(value, Tensor):
        problem = unusual(value)
        if problem:
            return problem
        if value.numel() == 1 and not value.is_complex():
            value = value.item()
    if isinstance(ours, Tensor) and ours.numel() == 1:
        ours = ours.item()
    if ours is None or isinstance(ours, bool):
        if value is None or isinstance(value, bool):
            return ""
        if ours is None and isinstance(value, str):
            return ""
        if ours is None and is_real(value):
            return out_of_bounds(value, low, high)
        return f"is {kind_of(value)}, where {ours!r} or the like is expected"
    if is_real(ours):
        if not is_real(value):
            return f"is {kind_of(value)}, not a number"
        return out_of_bounds(value, low, high)
    if isinstance(ours, (tuple, list)):
        if not isinstance(value, (tuple, list)) or len(value) != len(ours):
            return f"is {kind_of(value)}, not {len(ours)} values"
        found = (_problem(v, o, low, high) for v, o in zip(value, ours, strict=True))
        return next((problem for problem in found if problem), "")
    if isinstance(ours, str) and not isinstance(value, str):
        return f"is {kind_of(value)}, not a text"
    return ""


def check_base_part(
    part: SavedPart,
    base: torch.optim.Optimizer,
    p: Tensor,
    group: Mapping[str, Any],
    shared: set[str],
) -> None:
    """Raise ValueError unless the base's entries for a parameter fit it, and are finite.

    Of bases that are not torch's, only vectors of the parameter's shape are known.

    Args:
        part: The base's saved entries for the parameter.
        base: The base that is to load them.
        p: The parameter.
        group: The parameter's saved group.
        shared: Entries that all parameters have: a newer torch may keep more than is known here.
    """
    kind = type(base)
    if not part:
        return
    if not _is_torchs(kind):
        for key, value in part.items():
            if not isinstance(value, Tensor) or (unusual(value) and not value.is_meta):
                continue
            if value.is_meta or (value.shape == p.shape and value.is_floating_point()):
                part.tensor(key)
        return
    kept = KEPT[kind.__name__]
    part.check_known(set(kept) | shared, f"{kind.__name__} keeps {', '.join(kept)}")
    part.require(k for k, when in kept.items() if when is True or (when and group.get(str(when))))
    for key in part:
        if key not in kept:
            continue
        if kept[key] is False and key == "momentum_buffer" and part[key] is None:  # at SGD's first
            continue
        if key in NUMBERS:
            part.number(key, *NUMBERS[key])
            continue
        shape = list(p.shape)
        if key in FACTORED and len(shape) > 1:
            shape[FACTORED[key]] = 1
        value = part.tensor(key, tuple(shape), complex_too=True)
        if value.is_complex() != p.is_complex():
            raise part.wrong(key, f"is of {value.dtype}, and the parameter of {p.dtype}")
        if key in SQUARES:
            part.not_below(key, 0.0, value)

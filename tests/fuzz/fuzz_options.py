"""Random options of an optimizer, read from its signature, so that new options are fuzzed.

An option's values come from its annotation, or from the error message that lists its strings.
`USUAL` has the options of a run of ten steps. `RANGES` bounds those that could make it diverge.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable as CallableType
from collections.abc import Mapping as MappingType
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union

import torch
from torch import nn

from second_order import (
    DHO2,
    DPKFAC,
    KAISA,
    MRDHO2,
    AuxBase,
    DecayingClip,
    DistKFAC,
    PerStep,
    TraceRule,
)

if TYPE_CHECKING:
    from random import Random

SYSTEMS: dict[str, Any] = {s.__name__: s for s in (KAISA, DPKFAC, DistKFAC, DHO2, MRDHO2)}

# What a script gives, and not chance; `grad_scaler` and `gradient_averaging` go with the script.
VALUES = {
    *("params", "model", "process_group", "grad_scaler", "curvature_closure"),
    *("inverse_device", "stats_workers", "helper_ranks", "helper_timeout", "lr", "base"),
    *("self", "base_kwargs"),
}

KRONECKER_STEPS = {"factor_update_steps": 1, "inv_update_steps": 2}
PAIR_STEPS = {"num_largest": 3, "curvature_interval": 3, "warmup_steps": 1, "epoch_steps": 3}
USUAL = {**KRONECKER_STEPS, **PAIR_STEPS, "helper_timeout": 10.0}

# Numbers: neither so small that ten steps leave for infinity nor so large that they take long.
RANGES: dict[str, tuple[Any, ...]] = {
    "lr": (0.0, 0.003, 0.01, 0.05),
    "damping": ("auto", 0.03, 0.3, 1.0, 10.0),
    "factor_decay": ("auto", 0.0, 0.5, 0.95, PerStep(0.9)),
    "kl_clip": (1e-4, 1e-2, None, DecayingClip()),
    "damping_floor": ("auto", 0.0, 0.5),
    "step_scale": ("auto", True, False),
    "factor_update_steps": (1, 2, 3, "auto"),
    "inv_update_steps": (1, 2, 3, "auto", TraceRule(), TraceRule(0.5, 0.01), TraceRule(1.0, 1.0)),
    "max_factor_dim": (1, 3, 6, 8192),
    "exchange_dtype": (None, None, torch.bfloat16, torch.float32),
    "debug": (False, True, 1, 3),
    "max_staleness": (None, 0, 1, 3),
    "inverse_threads": (None, 1, 2),
    "overhead": (None, 0.01, 0.2, 5.0),
    "num_largest": (0, 1, 2, 5, 50),
    "num_smallest": (0, 1, 2),
    "curvature_interval": (1, 2, 4, "auto"),
    "epoch_steps": (1, 2, 4, 20),
    "warmup_steps": (None, 0, 1, 4),
    "lanczos_iterations": (None, 3, 8, 60),
    "lanczos_tol": (0.0, 1e-6, 1e-2, 0.5),
    "lr_scale_clip": (None, 1.0, 1.5, 3.0),
    "eigenvalue_floor": (0.0, 1e-2, 1.0),
    "newton_scale": (0.0, 0.1, 0.5, 1.0),
    "subspace_momentum": ("average", "base", 0.0, 0.5, None),
    "doubly_factored": ("auto", None, {}, {"head": (2, 2)}),
    "skip_layers": ((), ("head",), ("*",), ("Linear",), ("parts.0", "LayerNorm"), ("no module",)),
    "fisher": ("empirical", "categorical", "bernoulli", "gaussian"),
    "seed": (0, 7, 2**40),
    "grad_worker_fraction": (0.0, 0.34, 0.5, 1.0),
    "lanczos_dtype": (None, torch.float32, torch.float64),
}
NONSENSE: tuple[Any, ...] = (
    *(-1, 0, 1.5, "nonsense", None, True, float("nan"), float("inf"), -0.1, 10**400, (), "auto"),
    *({}, int, torch.tensor(1.0), 1e-30, b"auto", (1, 2)),
)


@dataclass(frozen=True)
class Falls:
    """A schedule that begins with a number and falls; of whole numbers, it stays one."""

    start: Any

    def __call__(self, step: int) -> Any:
        return self.start if isinstance(self.start, int) else self.start * 0.9**step


def signature(system: type[Any]) -> dict[str, inspect.Parameter]:
    """The options of an optimizer that chance may give."""
    found = inspect.signature(system).parameters
    return {name: p for name, p in found.items() if name not in VALUES}


@functools.cache
def hints(system: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(system.__init__)


@functools.cache
def choices(system: type[Any], name: str) -> tuple[str, ...]:
    """The strings that an option accepts, read from its error message."""
    try:
        system(nn.Linear(2, 2), lr=0.1, **{name: "nothing of the kind"})
    except ValueError as error:
        listed = str(error).partition(" is not one of ")[2].partition(";")[0]
        return tuple(re.findall(r"'([^']*)'", listed))
    except TypeError:
        return ()
    return ()


def leaves(hint: Any) -> list[Any]:
    """What a union is made of."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [leaf for inner in typing.get_args(hint) for leaf in leaves(inner)]
    return [hint]


def values(system: type[Any], name: str, hint: Any, default: Any) -> tuple[Any, ...]:
    """Some of a type; none of a type of which nothing is known."""
    number = default if isinstance(default, (int, float)) else 1.0
    kind = typing.get_origin(hint) or hint
    if kind is Literal:
        return typing.get_args(hint)
    if kind is str:
        return choices(system, name)
    return {
        bool: (False, True),
        int: (0, 1, 2, 3, default if isinstance(default, int) else 5),
        float: (0.1 * number, 0.5 * number, number, 2.0 * number),
        torch.dtype: (torch.float32, torch.float64, torch.bfloat16),
        type(None): (None,),
        CallableType: (Falls(number),),
        type: (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop),
        SequenceType: ((),),
        MappingType: ({},),
    }.get(kind, ())


def draw_value(random: Random, system: type[Any], name: str, hint: Any, default: Any) -> Any:
    """A value that an option may have; LookupError if nothing is known of its type."""
    if name in RANGES:
        value = random.choice(RANGES[name])
        kinds = [typing.get_origin(leaf) for leaf in leaves(hint)]
        callable_too = CallableType in kinds and isinstance(value, (int, float))
        return Falls(value) if callable_too and random.random() < 0.2 else value
    known = [found for leaf in leaves(hint) if (found := values(system, name, leaf, default))]
    if not known:
        raise LookupError(f"{name}: {hint} has no values here; give it some in RANGES")
    return random.choice(random.choice(known))


def draw_options(random: Random, system: type[Any]) -> dict[str, Any]:
    """Those of a short training, with some drawn; now and then nonsense."""
    known = signature(system)
    found = {name: value for name, value in USUAL.items() if name in known}
    for name in random.sample(sorted(known), random.choice((0, 1, 2, 3, 4, 6))):
        found[name] = draw_value(random, system, name, hints(system)[name], known[name].default)
    if random.random() < 0.08:
        found[random.choice(sorted(known))] = random.choice(NONSENSE)
    base, keywords = draw_base(random)
    if "base" in known or "base" in inspect.signature(system).parameters:
        found["base"] = base
    if found.get("aux_base") is not None:
        # Keywords go to whichever of the two bases has them.
        layers = random.choice(((), ("head",), ("*",)))
        special = random.choice(({}, {"lr": 0.01}))
        found["aux_base"] = AuxBase(found["aux_base"], layers=layers, kwargs=special)
    found = {"lr": random.choice(RANGES["lr"][1:]), **found, **keywords}
    return found if random.random() < 0.05 else agreeable(found)


def agreeable(options: dict[str, Any]) -> dict[str, Any]:
    """Options without those pairs that are refused by design; most examples are to train."""
    found = dict(options)
    if found.get("relative_damping") is False and found.get("damping", "auto") == "auto":
        found["damping"] = 0.1
    if found.get("inv_update_steps", "auto") != "auto":
        found.pop("overhead", None)
    if found.get("async_inverse") is False:
        found.pop("max_staleness", None)
    if found.get("deterministic") is True and found.get("max_staleness") is None:
        found["max_staleness"] = 2
    if found.get("curvature", "hessian") != "hessian":
        found.pop("num_smallest", None)
    if found.get("lanczos_iterations"):
        found["num_largest"] = 2
        found["num_smallest"] = 0
    if found.get("fused") and found.get("foreach"):
        found.pop("fused")
    return found


MOST = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
ALL = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if kind is not torch.optim.Optimizer
]
NUMBERS = {
    "momentum": (0.0, 0.5, 0.9),
    "weight_decay": (0.0, 0.01),
    "betas": ((0.9, 0.99), (0.5, 0.9)),
    "eps": (1e-8, 1e-3),
    "dampening": (0.0,),
    "alpha": (0.9, 0.99),
}


def draw_base(random: Random) -> tuple[type[Any], dict[str, Any]]:
    """The class of a base, and some of its keywords."""
    kind = random.choice(MOST) if random.random() < 0.85 else random.choice(ALL)
    known = inspect.signature(kind).parameters
    found: dict[str, Any] = {}
    for name, parameter in known.items():
        fits = not isinstance(parameter.default, tuple) or name == "betas"
        if name in NUMBERS and fits and random.random() < 0.5:
            found[name] = random.choice(NUMBERS[name])
        elif isinstance(parameter.default, bool) and random.random() < 0.12:
            # These two are for other devices, and refused.
            if name not in ("differentiable", "capturable") or random.random() < 0.1:
                found[name] = not parameter.default
        elif name in ("foreach", "fused") and random.random() < 0.1:
            found[name] = True
    if found.get("nesterov") and "momentum" in known:
        found["momentum"] = 0.9
    return kind, found

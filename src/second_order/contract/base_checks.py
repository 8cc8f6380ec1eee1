"""Checks of a saved group, and of the base's part of a state, before the base loads them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart

__all__ = ["check_base_part", "check_group"]

SWITCHES = {
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
    "decoupled_weight_decay",
}
"""Settings that versions of torch add and take away."""
LEAST_RATE = -1e-8  # schedulers round learning rates to a little below zero


@cache
def _settings_of_all() -> frozenset[str]:
    """The settings of torch's optimizers, of all together."""
    kinds = (k for k in vars(torch.optim).values() if inspect.isclass(k))
    found = (inspect.signature(k).parameters for k in kinds if issubclass(k, torch.optim.Optimizer))
    return frozenset().union(*found) - SWITCHES - {"params", "defaults"}


def check_group(
    where: str,
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    base: torch.optim.Optimizer,
    written_by: str | None,
) -> None:
    """Raise ValueError if a saved group is of another base, or its learning rate no number.

    Args:
        where: Name of the group, for messages.
        theirs: The saved group.
        ours: The group as it is.
        base: The base that is to load it.
        written_by: The class of the base that saved it. None where the checkpoint does not tell:
            then it is told by the group's settings.
    """
    mine = type(base).__name__
    if written_by is None:
        foreign = (theirs.keys() & _settings_of_all()) - base.defaults.keys() - ours.keys()
        lacking = base.defaults.keys() - theirs.keys() - SWITCHES
        way = "decoupled_weight_decay"
        if not foreign | lacking and theirs.get(way, ours.get(way)) != ours.get(way):
            foreign = {f"{way}={theirs[way]}"}
        if foreign or lacking:
            what = f"with {sorted(foreign)}" if foreign else f"without {sorted(lacking)}"
            written_by = f"an optimizer {what}"
    if written_by not in (None, mine):
        raise ValueError(
            f"the checkpoint was saved by {written_by}, and the base here is {mine}: their states "
            f"mean different things; make the optimizer with the base that saved it, or start "
            f"{mine} without it. Nothing has been loaded"
        )
    rate = theirs.get("lr")
    if not isinstance(rate, (int, float, Tensor)) or not LEAST_RATE <= float(rate) < math.inf:
        raise ValueError(
            f"the checkpoint's {where}['lr'] is {rate!r}, and no finite number of at least 0; "
            f"nothing has been loaded"
        )


def check_base_part(part: SavedPart, base: torch.optim.Optimizer, p: Tensor) -> None:
    """Raise ValueError unless the base's tensors for a parameter are finite, and of its shape.

    What torch's optimizers keep has the parameter's shape, or 1 in the place of some dimensions, as
    Adafactor's factors, or is one number. Other bases keep what they like.
    """
    torchs = getattr(torch.optim, type(base).__name__, None) is type(base)
    for key, value in part.items():
        if not torchs:
            if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point():
                part.tensor(key)
        elif isinstance(value, Tensor):
            part.tensor(key)
            alike = value.dim() == p.dim() and all(
                n in (1, m) for n, m in zip(value.shape, p.shape, strict=True)
            )
            if value.dim() and not alike:
                raise part.wrong(
                    key, f"has the shape {tuple(value.shape)}, where {tuple(p.shape)} is needed"
                )
        elif isinstance(value, float):
            part.number(key)

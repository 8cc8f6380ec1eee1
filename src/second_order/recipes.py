"""Parameter groups as recipes have them: who decays, who learns at another rate.

groups = parameter_groups(model, weight_decay=0.1, rules={"^head": {"lr": 2e-3}})
optimizer = KAISA(groups, lr=1e-3, base=torch.optim.AdamW)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from second_order.contract.arguments import look_through
from second_order.contract.training import NAMES, trainable
from second_order.errors import SecondOrderWarning
from second_order.options import check_number

__all__ = ["parameter_groups"]

NORMS = (nn.LayerNorm, nn.RMSNorm)  # those of others are vectors


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float | None = None,
    rules: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Divide the parameters of a model that train into groups for any ``torch.optim`` optimizer.

    Parameters with the same settings share a group. A group has ``"params"``, their names in
    ``"param_names"``, and the settings that are its own; what it lacks the optimizer fills in.

    Args:
        model: The model, wrapped in DistributedDataParallel or compiled or neither.
        weight_decay: Of all parameters but vectors and those of norm layers, which get 0. None
            leaves weight decay to the optimizer, the same for all.
        rules: Settings by regular expressions, which are searched in the parameters' names. The
            first that matches counts, and overrides ``weight_decay``.

    Returns:
        The groups, in the order of their first parameters.

    Raises:
        TypeError: If the model is no module.
        ValueError: If a value is out of bounds.

    Warns:
        SecondOrderWarning: If a rule matches no parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} is not a torch.nn.Module; pass the model")
    if weight_decay is not None:
        remedy = "leave it out for the optimizer's own"
        check_number("weight_decay", weight_decay, low=0.0, remedy=remedy)
    rules, inner = rules or {}, look_through(model)[0]
    norms = [m for m in inner.modules() if isinstance(m, NORMS)]
    still = {id(p) for module in norms for p in module.parameters(recurse=False)}
    still |= {id(p) for p in inner.parameters() if p.ndim <= 1}
    found: dict[Any, dict[str, Any]] = {}
    unused = set(rules)
    for name, p in trainable(inner):
        settings: dict[str, Any] = {}
        if weight_decay is not None:
            settings["weight_decay"] = 0.0 if id(p) in still else weight_decay
        matching = [pattern for pattern in rules if re.search(pattern, name)]
        settings |= rules[matching[0]] if matching else {}
        unused -= set(matching)
        key = tuple(sorted((k, repr(v)) for k, v in settings.items()))
        group = found.setdefault(key, {**settings, "params": [], NAMES: []})
        group["params"].append(p)
        group[NAMES].append(name)
    for pattern in unused:
        warnings.warn(
            f"parameter_groups: rules: {pattern!r} is in no parameter's name",
            SecondOrderWarning,
            stacklevel=2,
        )
    return list(found.values())

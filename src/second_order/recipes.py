"""Parameter groups as recipes have them: who decays, who learns at another rate.

    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, layer_decay=0.75)
    optimizer = KAISA(groups, model=model, lr=1e-3, base=torch.optim.AdamW)

Each overrides those before it: weight decay, but 0 for vectors (biases and gains) and norm layers;
lr × layer_decay^(blocks behind); what the caller gives for names, the first rule that matches.
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
    lr: float | None = None,
    weight_decay: float | None = None,
    layer_decay: float = 1.0,
    rules: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Divide the parameters of a model that train into groups for any ``torch.optim`` optimizer.

    Parameters with the same settings share a group. A group has ``"params"``, their names in
    ``"param_names"``, and the settings that are its own; what it lacks the optimizer fills in.

    Args:
        model: The model, wrapped in DistributedDataParallel or compiled or neither.
        lr: Learning rate of the deepest layers; needed for ``layer_decay``.
        weight_decay: Of all parameters but vectors and those of norm layers, which get 0. None
            leaves weight decay to the optimizer, the same for all.
        layer_decay: Factor of the learning rate from one block to the one before it. Blocks are
            the children of the outermost ``nn.ModuleList``, or ``nn.Sequential``, or the model's
            own; what is before the first, or behind the last, is one block more.
        rules: Settings by regular expressions, which are searched in the parameters' names. The
            first that matches counts.

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
    for option, value in (("lr", lr), ("weight_decay", weight_decay)):
        if value is not None:
            check_number(option, value, low=0.0, remedy="leave it out for the optimizer's own")
    remedy = "1.0 is the same rate for all"
    check_number("layer_decay", layer_decay, low=0.0, high=1.0, remedy=remedy)
    if layer_decay != 1.0 and lr is None:
        raise ValueError(
            f"layer_decay={layer_decay} needs the learning rate that it multiplies; give "
            f"parameter_groups(model, lr=..., layer_decay={layer_decay})"
        )
    rules, inner = rules or {}, look_through(model)[0]
    norms = [m for m in inner.modules() if isinstance(m, NORMS)]
    still = {id(p) for module in norms for p in module.parameters(recurse=False)}
    still |= {id(p) for p in inner.parameters() if p.ndim <= 1}
    depth_of = _depths(inner)
    deepest = max(depth_of.values(), default=0)
    found: dict[Any, dict[str, Any]] = {}
    unused = set(rules)
    for name, p in trainable(inner):
        settings: dict[str, Any] = {}
        if lr is not None:
            settings["lr"] = lr * layer_decay ** (deepest - depth_of[name])
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


def _depths(model: nn.Module) -> dict[str, int]:
    """The number of blocks up to each parameter, by its name: 0 before the first."""
    blocks: list[str] = []
    for kind in (nn.ModuleList, nn.Sequential, type(model)):
        outer: list[str] = []
        for name, module in model.named_modules(prefix="."):  # so that the model's own is "."
            if isinstance(module, kind) and not any(name.startswith(o) for o in outer):
                outer.append(f"{name}." if name != "." else ".")
                blocks += [
                    f"{outer[-1]}{child}.".lstrip(".")
                    for child, part in module.named_children()
                    if next(part.parameters(), None) is not None
                ]
        if blocks:
            break
    found, depth = {}, 0
    for name, _ in model.named_parameters():
        inside = next((i for i, b in enumerate(blocks, 1) if name.startswith(b)), None)
        depth = inside or depth
        found[name] = depth + int(inside is None and depth == len(blocks) > 0)
    return found

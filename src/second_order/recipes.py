"""Parameter groups as recipes have them: who decays, who learns at another rate.

    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, layer_decay=0.75, head={"lr": 1e-2})
    optimizer = KAISA(groups, model=model, lr=1e-3, base=torch.optim.AdamW)

Settings come from four places. Each overrides those before it:

decay       weight_decay; 0 for vectors, which are biases and gains, and for norm layers
depth       lr × layer_decay^(blocks behind): the deeper, the nearer to lr
kind        what the caller gives for the embeddings, and for the head
rules       what the caller gives for names, by regular expressions; the first that matches
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from second_order.contract.arguments import look_through
from second_order.contract.groups import NAMES, trainable
from second_order.errors import SecondOrderWarning
from second_order.options import check_number

__all__ = ["depths", "parameter_groups"]

Settings = Mapping[str, Any]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm)  # those of others are vectors


def parameter_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    layer_decay: float = 1.0,
    embeddings: Settings | None = None,
    head: Settings | None = None,
    rules: Mapping[str, Settings] | None = None,
) -> list[dict[str, Any]]:
    """Divide the parameters of a model that train into groups for any ``torch.optim`` optimizer.

    Parameters with the same settings share a group. A group has ``"params"``, their names in
    ``"param_names"``, and the settings that are its own; what it lacks the optimizer fills in.

    Args:
        model: The model, wrapped in DistributedDataParallel or compiled or neither.
        lr: Learning rate of the deepest layers; needed for ``layer_decay``.
        weight_decay: Of all parameters but vectors and those of norm layers, which get 0. None
            leaves weight decay to the optimizer, the same for all.
        layer_decay: Factor of the learning rate from one block to the one before it; embeddings and
            whatever else is before the first block are one block more. See :func:`depths`.
        embeddings: Settings of the embeddings' group, of its own then; what is tied to an
            embedding is in it.
        head: Settings of the group of the last Linear of the model, its bias included.
        rules: Settings by regular expressions, which are searched in the parameters' names. The
            first that matches counts.

    Returns:
        The groups, in the order of their first parameters.

    Raises:
        TypeError: If the model is no module, or settings are no mapping.
        ValueError: If a value is out of bounds, a pattern is no regular expression, or settings
            name parameters.

    Warns:
        SecondOrderWarning: If a rule matches no parameter, or there are no embeddings or no head to
            apply settings to.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} is not a torch.nn.Module; pass the model")
    inner = look_through(model)[0]
    _check(lr, weight_decay, layer_decay)
    kinds = {"embeddings": embeddings, "head": head}
    for what, told in [*kinds.items(), *(rules or {}).items()]:
        if told is not None:
            _check_settings(what, told)
    patterns = {_compiled(pattern): told for pattern, told in (rules or {}).items()}
    kind_of = _kinds(inner)
    still = _undecayed(inner) if weight_decay is not None else set()
    depth_of = depths(inner) if layer_decay != 1.0 else {}
    deepest = max(depth_of.values(), default=0)
    found: dict[Any, dict[str, Any]] = {}
    used: set[Any] = set()
    for name, p in trainable(inner):
        settings: dict[str, Any] = {} if lr is None else {"lr": lr}
        if weight_decay is not None:
            settings["weight_decay"] = 0.0 if id(p) in still else weight_decay
        if lr is not None and layer_decay != 1.0:
            settings["lr"] = lr * layer_decay ** (deepest - depth_of[name])
        kind = kind_of.get(id(p), "")
        own = kinds.get(kind)
        if own is not None:
            settings |= own
            used.add(kind)
        rule = next((pattern for pattern in patterns if pattern.search(name)), None)
        if rule is not None:
            settings |= patterns[rule]
        used |= {pattern for pattern in patterns if pattern.search(name)}
        key = ("" if own is None else kind, *sorted((k, repr(v)) for k, v in settings.items()))
        group = found.setdefault(key, {"params": [], NAMES: [], **settings})
        group["params"].append(p)
        group[NAMES].append(name)
    _tell_of_unused(kinds, patterns, used)
    return list(found.values())


def depths(model: nn.Module) -> dict[str, int]:
    """Count the blocks of a model up to each parameter: 0 before the first block.

    Blocks are the children of the outermost ``nn.ModuleList``; in a model without any, those of the
    outermost ``nn.Sequential``, and else the model's own children. Parameters that are registered
    behind the last block are one deeper than it.

    Args:
        model: A model of any kind.

    Returns:
        Depths by the parameters' names.
    """
    blocks = _blocks(model)
    found, depth = {}, 0
    for name, _ in model.named_parameters():
        inside = next((i for i, b in enumerate(blocks, 1) if name.startswith(f"{b}.")), None)
        depth = inside or depth
        behind = inside is None and depth == len(blocks) > 0
        found[name] = depth + int(behind)
    return found


def _blocks(model: nn.Module) -> list[str]:
    """The names of the blocks, in order; of those that have parameters."""
    for kind in (nn.ModuleList, nn.Sequential):
        outermost = list(_outermost(model, kind))
        names = [
            f"{name}.{child}" if name else child
            for name, module in outermost
            for child, part in module.named_children()
            if next(part.parameters(), None) is not None
        ]
        if names:
            return names
    return [n for n, part in model.named_children() if next(part.parameters(), None) is not None]


def _outermost(
    module: nn.Module, kind: type[nn.Module], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, kind):
        yield name, module
        return
    for child, part in module.named_children():
        yield from _outermost(part, kind, f"{name}.{child}" if name else child)


def _kinds(model: nn.Module) -> dict[int, str]:
    """Which parameters are embeddings and which are the head's, by their ids."""
    found: dict[int, str] = {}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if linears:
        found |= {id(p): "head" for p in linears[-1].parameters(recurse=False)}
    for module in model.modules():
        if isinstance(module, EMBEDDINGS):
            found |= {id(p): "embeddings" for p in module.parameters(recurse=False)}
    return found


def _undecayed(model: nn.Module) -> set[int]:
    """The ids of vectors, and of whatever norm layers have."""
    norms = [m for m in model.modules() if isinstance(m, NORMS)]
    found = {id(p) for module in norms for p in module.parameters(recurse=False)}
    return found | {id(p) for p in model.parameters() if p.ndim <= 1}


def _check(lr: float | None, weight_decay: float | None, layer_decay: float) -> None:
    if lr is not None:
        check_number("lr", lr, low=0.0, remedy="1e-3 is a start for AdamW")
    if weight_decay is not None:
        check_number("weight_decay", weight_decay, low=0.0, remedy="0.1 is common")
    check_number(
        "layer_decay", layer_decay, low=0.0, high=1.0, remedy="1.0 is the same rate for all"
    )
    if layer_decay != 1.0 and lr is None:
        raise ValueError(
            f"layer_decay={layer_decay} needs the learning rate that it multiplies; give "
            f"parameter_groups(model, lr=..., layer_decay={layer_decay})"
        )


def _check_settings(name: str, settings: Any) -> None:
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"the settings of {name!r} are {settings!r}, not a mapping; write "
            f'{{"lr": 1e-3}} or {{"weight_decay": 0.0}}'
        )
    taken = {"params", NAMES} & set(settings)
    if taken:
        raise ValueError(
            f"the settings of {name!r} have {sorted(taken)}, which are the model's to give; leave "
            f"them out"
        )


def _compiled(pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"rules: {pattern!r} is no regular expression ({error}); write one that is found in "
            f"the names of model.named_parameters(), such as r'\\.norm\\.'"
        ) from error


def _tell_of_unused(
    kinds: Mapping[str, Settings | None],
    patterns: Mapping[re.Pattern[str], Settings],
    used: set[Any],
) -> None:
    lines = [
        f"{kind}={dict(settings)}: the model has none that trains"
        for kind, settings in kinds.items()
        if settings is not None and kind not in used
    ]
    lines += [
        f"rules: {pattern.pattern!r} is in no parameter's name"
        for pattern in patterns
        if pattern not in used
    ]
    for line in lines:
        warnings.warn(f"parameter_groups: {line}", SecondOrderWarning, stacklevel=3)

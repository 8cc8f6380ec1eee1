"""Unwrap modules, match them by patterns of names and classes, and remove hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

__all__ = [
    "first_match",
    "plain_type",
    "remove_handles",
    "unmatched_patterns",
    "unwrapping_chain",
]


def first_match(
    patterns: Iterable[str], everything: Mapping[str, nn.Module], name: str
) -> str | None:
    """Return the first pattern that matches a module or a module that contains it.

    Args:
        patterns: Such as "blocks.*.mlp" (names) or "Conv*" (classes).
        everything: All modules of the model by name. A shared module has several names.
        name: The name of the module. Fused experts have names but no modules.
    """
    # The module and those around it, from the outside in.
    parts = name.split(".") if name else []
    names = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    ancestors = {each: everything[each] for each in names if each in everything}
    for pattern in patterns:
        if any(_matches(pattern, each, module) for each, module in ancestors.items()):
            return pattern
    return None


def unmatched_patterns(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match no module of a model."""
    modules = list(model.named_modules())
    return [
        p
        for p in patterns
        if not any(_matches(p, name, module) for name, module in modules)
    ]


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    class_name = plain_type(module).__name__
    return fnmatchcase(name, pattern) or fnmatchcase(class_name, pattern)


def unwrapping_chain(model: nn.Module) -> list[nn.Module]:
    """Return a model and what its wrappers contain, from the outside in.

    The wrappers are DistributedDataParallel and ``torch.compile``.
    """
    chain = [model]
    while True:
        inner = getattr(chain[-1], "_orig_mod", None)  # of torch.compile
        if isinstance(chain[-1], DistributedDataParallel):
            inner = chain[-1].module
        if not isinstance(inner, nn.Module):
            return chain
        chain.append(inner)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before ``fully_shard``: Linear, not FSDPLinear."""
    fsdp_module = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    ancestors = type(module).__mro__
    if fsdp_module is None or fsdp_module not in ancestors[1:]:
        return type(module)
    # fully_shard derives a class from FSDPModule and the original class, in this order.
    return cast(type[nn.Module], ancestors[ancestors.index(fsdp_module) + 1])


def remove_handles(handles: list[RemovableHandle]) -> None:
    """Remove the hooks of all handles, and clear the list.

    Finalizers can call it without a reference to the object that registered the hooks.
    """
    for handle in handles:
        handle.remove()
    handles.clear()

"""Unwrap modules, match them by patterns of names and classes, and remove hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

__all__ = [
    "modules_inside",
    "plain_type",
    "remove_handles",
    "unmatched_patterns",
    "unwrapping_chain",
]


def modules_inside(model: nn.Module, patterns: Iterable[str]) -> dict[nn.Module, str]:
    """Return the modules that match a pattern and all modules inside them.

    Args:
        model: The model. Each name of a shared module counts.
        patterns: Such as "blocks.*.mlp" (names) or "Conv*" (classes).

    Returns:
        By module, the first pattern that matches it or a module that contains it.
    """
    first_patterns: dict[nn.Module, str] = {}
    for pattern in patterns:
        for module in _matching(model, pattern):
            for inner in module.modules():
                first_patterns.setdefault(inner, pattern)
    return first_patterns


def unmatched_patterns(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match no module of a model."""
    return [p for p in patterns if next(_matching(model, p), None) is None]


def _matching(model: nn.Module, pattern: str) -> Iterator[nn.Module]:
    """Yield the modules whose name or class matches a pattern."""
    for name, module in model.named_modules(remove_duplicate=False):
        class_name = plain_type(module).__name__
        if fnmatchcase(name, pattern) or fnmatchcase(class_name, pattern):
            yield module


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

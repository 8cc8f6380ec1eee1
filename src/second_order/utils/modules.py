"""Modules of a model: their classes, and shell-style patterns of their names and classes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

__all__ = ["first_match", "plain_type", "unmatched_patterns"]


def first_match(
    patterns: Iterable[str], everything: Mapping[str, nn.Module], name: str
) -> str | None:
    """The first pattern, as "blocks.*.mlp" or "Conv*", of a module or of one that it is inside of.

    ``everything``: the modules of a model by all of their names, shared ones by each.
    """
    parts = name.split(".") if name else []
    chain = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    # Each parameter of fused experts is a layer without a module of its own.
    lineage = [(each, everything[each]) for each in chain if each in everything]
    return next((p for p in patterns if any(_matches(p, *member) for member in lineage)), None)


def unmatched_patterns(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The patterns that match no module at all."""
    modules = list(model.named_modules())
    return [p for p in patterns if not any(_matches(p, name, module) for name, module in modules)]


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(plain_type(module).__name__, pattern)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of a module before ``fully_shard`` gave it another: Linear, not FSDPLinear."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    kind = type(module)
    if fsdp is None or fsdp not in kind.__mro__[1:]:
        return kind
    return cast(type[nn.Module], kind.__mro__[kind.__mro__.index(fsdp) + 1])

"""Parameter groups as recipes of transformers have them: what decays, and other rates by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn


def decayed_groups(
    model: nn.Module,
    weight_decay: float,
    rules: Mapping[str, dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """A group for each setting: matrices decay, and biases, gains and other vectors do not.

    ``rules`` has further settings by regular expressions over names. The first that matches counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        settings: dict[str, Any] = {"weight_decay": weight_decay if p.ndim > 1 else 0.0}
        for pattern, special in (rules or {}).items():
            if re.search(pattern, name):
                settings |= special
                break
        group = found.setdefault(repr(settings), {**settings, "params": [], "param_names": []})
        group["params"].append(p)
        group["param_names"].append(name)
    return list(found.values())

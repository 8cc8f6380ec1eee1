"""Partition of parameters into hidden weights, for ``base``, and others, for ``rest``.

hidden    weights of at least two dimensions; of two exactly, where the base takes no others
rest      embeddings, and whatever is tied to one; the output head, which is the last Linear in
          the model's order; gains, biases, other vectors; parameters that are no module's
          weight, as position embeddings; and modules that are named
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from second_order.contract.groups import NAMES, members_of
from second_order.options import check_flag
from second_order.patterns import first_match, unmatched_patterns

__all__ = ["REST", "Partition"]

REST = "rest"
"""The entry of a group that says whether ``rest`` trains it; absent where there is one base."""


@dataclass(frozen=True)
class Partition:
    """Rules that divide parameters between two bases.

    Attributes:
        base: The class that trains hidden weights.
        rest: The class that trains the others.
        layers: Patterns of modules that go to ``rest`` besides, with all that is inside them.
    """

    base: type[torch.optim.Optimizer]
    rest: type[torch.optim.Optimizer]
    layers: tuple[str, ...] = ()

    def divided(self, group: Any, model: nn.Module) -> list[Any]:
        """Divide a group into one or two, each with its mark and all other entries.

        A group that has a mark stays whole. Other values stay as they are, for torch to refuse.

        Args:
            group: The group, materialised.
            model: The model whose modules tell which weights are hidden.

        Raises:
            TypeError: If the group's mark is neither True nor False.
            ValueError: If the group is marked for a base that does not take its parameters.
        """
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return [group]
        if REST in group:
            self.check_mark(group)
            return [group]
        params, names, hidden = group["params"], group.get(NAMES), self._hidden(model)
        if names is not None and len(names) != len(params):
            raise ValueError(
                f"a group has {len(params)} parameters and {len(names)} {NAMES!r}; give "
                f"each its name, or leave {NAMES!r} out"
            )
        marks = [id(p[1] if isinstance(p, tuple) else p) not in hidden for p in params]
        parts = []
        for mark in (False, True):
            mine = [i for i, each in enumerate(marks) if each is mark]
            part = {**group, "params": [params[i] for i in mine], REST: mark}
            if names is not None:
                part[NAMES] = [names[i] for i in mine]
            if mine or not (params or mark):
                parts.append(part)
        return parts

    def divided_all(self, groups: Sequence[Any], model: nn.Module) -> list[dict[str, Any]]:
        """Divide all that the user gives, groups or parameters, into groups with marks.

        Raises:
            TypeError: If an element is neither.
            ValueError: If all parameters are for ``rest``, or nothing was given.
        """
        whole = groups if groups and isinstance(groups[0], dict) else [{"params": list(groups)}]
        parts = [part for group in whole for part in self.divided(group, model)]
        for part in parts:
            if not isinstance(part, dict) or REST not in part:
                raise TypeError(f"{part!r} is no parameter group; give dictionaries with 'params'")
        if not members_of(part for part in parts if not part[REST]):
            base, rest, count = self.base.__name__, self.rest.__name__, len(members_of(parts))
            raise ValueError(
                f"base={base} with rest={rest}: none of the {count} parameters is a hidden weight, "
                f"so {base} would train nothing; use base={rest} without rest, or name fewer "
                f"modules in rest_layers={list(self.layers)}"
            )
        return parts

    def check_mark(self, group: Mapping[str, Any]) -> None:
        """Raise unless a group's mark is True or False, and its base takes the parameters."""
        if check_flag(f"group[{REST!r}]", group[REST]) or not self._matrices:
            return
        for p in members_of([group]):
            if p.ndim != 2:
                raise ValueError(
                    f"a group with {REST!r}: False has a parameter of shape {tuple(p.shape)}, and "
                    f"{self.base.__name__} takes matrices alone; leave {REST!r} out, or set it True"
                )

    def description(self, parts: Sequence[torch.optim.Optimizer]) -> list[str]:
        """Both bases, with their defaults, and the patterns, in lines that ranks compare."""
        lines = [f"rest_layers: {list(self.layers)}"]
        for part in parts:
            shown = {
                k: v.tolist() if isinstance(v, Tensor) else v for k, v in part.defaults.items()
            }
            lines.append(f"{type(part).__name__} begins with {shown}")
        return lines

    def unmatched(self, model: nn.Module) -> list[str]:
        """The patterns that match no module."""
        return unmatched_patterns(model, self.layers)

    @property
    def _matrices(self) -> bool:
        """Whether the base takes matrices alone, as Muon does."""
        muon = getattr(torch.optim, "Muon", None)
        return muon is not None and issubclass(self.base, muon)

    def _hidden(self, model: nn.Module) -> set[int]:
        """The hidden weights of a model, by id."""
        everything = dict(model.named_modules(remove_duplicate=False))
        head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
        weights: set[int] = set()
        apart: set[int] = set()
        for name, module in everything.items():
            kind, own = type(module).__name__, dict(module.named_parameters(recurse=False))
            embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in kind
            normalises = "norm" in kind.lower()  # its gain may have two dimensions
            named = first_match(self.layers, everything, name)
            if module in head or embeds or normalises or named:
                apart.update(map(id, own.values()))
            for key, p in own.items():
                if "weight" in key and (p.ndim == 2 if self._matrices else p.ndim >= 2):
                    weights.add(id(p))
        return weights - apart

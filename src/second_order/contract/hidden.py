"""Division of parameters into hidden weights, for ``base``, and others, for ``rest``.

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

__all__ = ["REST", "Division"]

REST = "rest"
"""The entry of a group that says whether ``rest`` trains it; absent where there is one base."""


@dataclass(frozen=True)
class Division:
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
        params, hidden = group["params"], self._hidden(model)
        if NAMES in group and len(group[NAMES]) != len(params):
            raise ValueError(
                f"a group has {len(params)} parameters and {len(group[NAMES])} {NAMES!r}; give "
                f"each its name, or leave {NAMES!r} out"
            )
        marks = [id(p[1] if isinstance(p, tuple) else p) not in hidden for p in params]
        parts = []
        for mark in (False, True):
            part = {**group, "params": _chosen(params, marks, mark), REST: mark}
            if NAMES in group:
                part[NAMES] = _chosen(group[NAMES], marks, mark)
            if part["params"] or not (params or mark):
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

    def description(self, defaults: Sequence[Mapping[str, Any]]) -> list[str]:
        """The bases and their defaults in lines that ranks compare.

        Args:
            defaults: The defaults of ``base`` and of ``rest``.
        """
        shown = (
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in each.items()}
            for each in defaults
        )
        kinds = zip((self.base, self.rest), shown, strict=True)
        said = [f"{kind.__name__} begins with {settings}" for kind, settings in kinds]
        return [*said, f"rest_layers: {list(self.layers)}"]

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
            own = dict(module.named_parameters(recurse=False))
            other = _normalises(module) or first_match(self.layers, everything, name)
            if module in head or _embeds(module) or other:
                apart.update(map(id, own.values()))
            weights.update(id(p) for key, p in own.items() if "weight" in key and self._fits(p))
        return weights - apart

    def _fits(self, p: Tensor) -> bool:
        return p.ndim == 2 if self._matrices else p.ndim >= 2


def _normalises(module: nn.Module) -> bool:
    """Whether a module normalises, by the name of its class; its gain may have two dimensions."""
    return "norm" in type(module).__name__.lower()


def _embeds(module: nn.Module) -> bool:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return isinstance(module, kinds) or "Embedding" in type(module).__name__


def _chosen(values: Sequence[Any], marks: Sequence[bool], mark: bool) -> list[Any]:
    return [value for value, m in zip(values, marks, strict=True) if m is mark]

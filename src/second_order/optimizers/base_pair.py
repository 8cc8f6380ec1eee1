"""Two first-order optimizers in one: the first trains hidden weights, the second all others.

hidden    weights with at least two dimensions; with exactly two if the base is Muon
aux_base  embeddings and weights tied to them; the output head, which is the last Linear of the
          model; gains, biases and other vectors; parameters outside of modules' weights, such as
          position embeddings; and the modules that the user names

Both share the groups and the state of the whole optimizer, so schedulers and checkpoints see one
optimizer. An entry of each group says which of the two trains it. Each of the two sees only its own
groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from second_order.training.context import Training, base_class_names, step_without_hooks
from second_order.training.groups import NAMES, group_params, group_settings, without_names
from second_order.utils.checks import check_flag
from second_order.utils.modules import first_match, unmatched_patterns

__all__ = ["AUX_BASE", "BasePair", "base_of", "group_lines", "switch_of"]

AUX_BASE = "aux_base"
"""The entry of a group that says whether ``aux_base`` trains it; absent where there is one base."""


class BasePair(torch.optim.Optimizer):
    """An optimizer made of two, each of which steps its own groups.

    Its ``defaults`` are the settings that both have, with the first one's values: a scheduler that
    cycles momentum finds it there if it can cycle that of both. The first of ``kinds`` trains
    hidden weights, with the first of ``keywords``; modules that match a pattern of ``layers`` go to
    the second, with all that is inside them; those that match none are ``unmatched``.

    Raises:
        TypeError: If an element of ``groups`` is neither group nor parameter.
        ValueError: If all parameters are for ``aux_base``, or nothing was given.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        model: nn.Module,
        kinds: tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer]],
        keywords: Sequence[Mapping[str, Any]],
        layers: Sequence[str],
    ) -> None:
        self._kinds = kinds
        self._layers = layers
        self._matrices = issubclass(kinds[0], torch.optim.Muon)  # which only trains matrices
        self.unmatched = unmatched_patterns(model, layers)
        given = groups if groups and isinstance(groups[0], dict) else [{"params": list(groups)}]
        whole = [part for group in given for part in self.divided(group, model)]
        for part in whole:
            if not isinstance(part, dict) or AUX_BASE not in part:
                raise TypeError(f"{part!r} is no parameter group; give dictionaries with 'params'")
        if not group_params(part for part in whole if not part[AUX_BASE]):
            base = kinds[0].__name__
            aux = kinds[1].__name__
            count = len(group_params(whole))
            raise ValueError(
                f"base={base} with aux_base={aux}: none of the {count} parameters is a hidden "
                f"weight, so {base} would train nothing; use base={aux} without aux_base, or name "
                f"fewer modules in layers={list(layers)}"
            )
        parts: list[torch.optim.Optimizer] = []
        for mark in (False, True):
            mine = [group for group in whole if group[AUX_BASE] is mark]
            # None takes an empty list.
            parts.append(kinds[mark](without_names(mine) or [{"params": []}], **keywords[mark]))
            for group, filled in zip(mine, parts[-1].param_groups, strict=False):
                group.update({k: v for k, v in filled.items() if k != "params"})
        self.parts = (parts[0], parts[1])
        first, second = (part.defaults for part in parts)
        super().__init__(whole, {k: v for k, v in first.items() if k in second})
        for part in self.parts:
            self.state.update(part.state)

    def divided(self, group: Any, model: nn.Module) -> list[Any]:
        """Divide a group into one or two, each with its mark and all other entries.

        A group that has a mark stays whole. Other values stay as they are, for torch to refuse.

        Raises:
            TypeError: If the group's mark is neither True nor False.
            ValueError: If the group is marked for a base that does not take its parameters.
        """
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return [group]
        if AUX_BASE in group:
            self._check_mark(group)
            return [group]
        params = group["params"]
        hidden = self._hidden(model)
        parts = []
        for mark in (False, True):
            plain = ((p, p[1] if isinstance(p, tuple) else p) for p in params)
            mine = [p for p, tensor in plain if (id(tensor) in hidden) is not mark]
            if mine or not (params or mark):
                parts.append({**group, "params": mine, AUX_BASE: mark})
        return parts

    def _check_mark(self, group: Mapping[str, Any]) -> None:
        if check_flag(f"group[{AUX_BASE!r}]", group[AUX_BASE]) or not self._matrices:
            return
        for p in group_params([group]):
            if p.ndim != 2:
                raise ValueError(
                    f"a group with {AUX_BASE!r}: False has a parameter of shape {tuple(p.shape)}, "
                    f"but {self._kinds[0].__name__} only trains matrices; leave {AUX_BASE!r} out, "
                    f"or set it to True"
                )

    def _hidden(self, model: nn.Module) -> set[int]:
        """The hidden weights of a model, by id."""
        everything = dict(model.named_modules(remove_duplicate=False))
        head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
        weights: set[int] = set()
        apart: set[int] = set()
        for name, module in everything.items():
            kind = type(module).__name__
            own = dict(module.named_parameters(recurse=False))
            embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in kind
            normalises = "norm" in kind.lower()  # its gain may have two dimensions
            named = first_match(self._layers, everything, name)
            if module in head or embeds or normalises or named:
                apart.update(map(id, own.values()))
            for key, p in own.items():
                if "weight" in key and (p.ndim == 2 if self._matrices else p.ndim >= 2):
                    weights.add(id(p))
        return weights - apart

    def description(self) -> list[str]:
        """Both bases, with their defaults, and the patterns, in lines that ranks compare."""
        begins = [
            f"{type(p).__name__} begins with {group_settings(p.defaults)}" for p in self.parts
        ]
        return [f"layers of aux_base: {list(self._layers)}", *begins]

    def step(self, closure: Any = None) -> Any:
        """Let both step, each on its own groups; the closure is not called."""
        for part in self.following():
            if part.param_groups:
                step_without_hooks(part)()
                self.state.update(part.state)

    def following(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Both optimizers, with their groups as they are now, and the state of these."""
        for mark, part in enumerate(self.parts):
            part.param_groups = [g for g in self.param_groups if g[AUX_BASE] is bool(mark)]
            mine = [p for group in part.param_groups for p in group["params"] if p in self.state]
            part.state = defaultdict(dict, {p: self.state[p] for p in mine})
        return self.parts

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for part in self.following():
            if len(part.state):
                part.__setstate__({"state": part.state, "param_groups": part.param_groups})
                self.state.update(part.state)


def base_of(base: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The base that trains a group: one of two, or the only one."""
    return base.parts[bool(group[AUX_BASE])] if isinstance(base, BasePair) else base


def group_lines(training: Training) -> list[str]:
    """What trains each parameter group, and with which settings; nothing for a single group."""
    if len(training.groups) == 1:
        return []
    lines = []
    names = training.param_names()
    for i, group in enumerate(training.groups):
        members = group.get(NAMES) or [
            names.get(id(p), "(not in the model)") for p in group["params"]
        ]
        settings = [f"lr {float(group['lr']):g}"]
        if "weight_decay" in group:
            settings.append(f"weight_decay {float(group['weight_decay']):g}")
        base = base_class_names(base_of(training.base, group))
        lines.append(f"group {i}: {base}, {', '.join(settings)}: {', '.join(members)}")
    return lines


def switch_of(
    base: torch.optim.Optimizer, method: str, owner: str, state: dict[Tensor, Any]
) -> Callable[[], None]:
    """A base's "train" or "eval", or those of two bases, as one function.

    Raises:
        AttributeError: If no base has such a method.
    """
    parts = base.following() if isinstance(base, BasePair) else (base,)
    methods = [found for part in parts if callable(found := getattr(part, method, None))]
    if not methods:
        raise AttributeError(
            f"{owner} has no {method}(): its base, {base_class_names(base)}, has none; only "
            f"schedule-free bases have"
        )

    def switch() -> None:
        for each in methods:
            each()
        for p in [p for p, parts in state.items() if not any(parts.values())]:
            del state[p]  # what the method has made and left empty: empty state counts as none

    return switch

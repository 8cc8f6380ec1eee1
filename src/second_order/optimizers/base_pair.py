"""Two bases as one: ``base`` trains hidden weights, ``aux_base`` everything else.

base       weights with at least two dimensions; with exactly two if the base is Muon
aux_base   embeddings and weights tied to them; the output head, which is the last
           Linear of the model; gains, biases and other vectors; parameters that are not
           the weight of a module, such as position embeddings; and the modules that the
           user names in ``layers``

The two share the groups and the state of the whole optimizer, so that schedulers and
checkpoints see one optimizer. The entry ``AUX_BASE`` of each group says which of the
two trains it. Before each step, each of the two receives its own groups and their
state. If a base stores state that belongs to no parameter, under a key such as "k", the
shared state has it under ("base", "k") or ("aux_base", "k").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from second_order.checkpoint.saved import BASE
from second_order.optimizers.consistency import to_primitive
from second_order.training.context import Training, base_class_names, step_without_hooks
from second_order.training.groups import (
    NAMES,
    group_params,
    without_names,
)
from second_order.utils.checks import check_flag
from second_order.utils.modules import modules_inside, unmatched_patterns

__all__ = [
    "AUX_BASE",
    "BasePair",
    "base_of",
    "describe_groups",
    "mode_switch",
    "own_entries",
]

AUX_BASE = "aux_base"
"""The group entry that says whether ``aux_base`` trains it; absent with one base."""

OptimizerClass: TypeAlias = type[torch.optim.Optimizer]


class BasePair(torch.optim.Optimizer):
    """Two optimizers that step their own groups, as one optimizer.

    Its ``defaults`` are the settings that both have, with the values of ``base``. A
    scheduler that cycles momentum therefore finds it there only if both have momentum.

    Args:
        groups: Parameter groups, or parameters.
        model: The model, which shows which parameters are hidden weights.
        optimizer_classes: The classes of ``base`` and ``aux_base``.
        kwargs: The arguments of the two classes.
        layers: Patterns of modules that ``aux_base`` trains, with all that is inside.

    Attributes:
        parts: ``base`` and ``aux_base``.
        unmatched: The patterns in ``layers`` that match no module.

    Raises:
        TypeError: If an element of ``groups`` is neither a group nor a parameter.
        ValueError: If ``base`` would train no parameter.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        model: nn.Module,
        optimizer_classes: tuple[OptimizerClass, OptimizerClass],
        kwargs: Sequence[Mapping[str, Any]],
        layers: Sequence[str],
    ) -> None:
        base_class, aux_class = optimizer_classes
        self._base_class = base_class
        self._layers = layers
        self._only_matrices = issubclass(base_class, torch.optim.Muon)
        self.unmatched = unmatched_patterns(model, layers)

        # Divide the groups between the two.
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": list(groups)}]
        split_groups = []
        for group in groups:
            split_groups += self.split_group(group, model)
        for group in split_groups:
            if not isinstance(group, dict) or AUX_BASE not in group:
                raise TypeError(
                    f"{group!r} is not a parameter group; pass dictionaries with 'params'"
                )
        base_groups = [group for group in split_groups if not group[AUX_BASE]]
        aux_groups = [group for group in split_groups if group[AUX_BASE]]
        if not group_params(base_groups):
            base = base_class.__name__
            aux = aux_class.__name__
            count = len(group_params(split_groups))
            raise ValueError(
                f"base={base} with aux_base={aux}: none of the {count} parameters is a hidden "
                f"weight, so {base} would train nothing; use base={aux} without aux_base, or name "
                f"fewer modules in layers={list(layers)}"
            )

        # Build the two, and adopt the defaults that they set in their groups.
        base_part = _build(base_class, base_groups, kwargs[0])
        aux_part = _build(aux_class, aux_groups, kwargs[1])
        self.parts = (base_part, aux_part)
        common = base_part.defaults.keys() & aux_part.defaults.keys()
        common_defaults = {k: v for k, v in base_part.defaults.items() if k in common}
        super().__init__(split_groups, common_defaults)
        self._collect_state()

    def split_group(self, group: Any, model: nn.Module) -> list[Any]:
        """Split a group into one group per base, each with the entry ``AUX_BASE``.

        A group that has this entry is not split. A value that is not a group is
        returned as it is, so that torch refuses it.

        Raises:
            TypeError: If the group's entry is neither True nor False.
            ValueError: If the entry is False, but ``base`` does not take a parameter.
        """
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return [group]
        if AUX_BASE in group:
            self._check_marked_group(group)
            return [group]

        hidden = self._hidden_weights(model)
        base_params = []
        aux_params = []
        for p in group["params"]:
            tensor = p[1] if isinstance(p, tuple) else p  # (name, parameter)
            if id(tensor) in hidden:
                base_params.append(p)
            else:
                aux_params.append(p)
        parts = []
        if base_params or not aux_params:  # an empty group belongs to the base
            parts.append({**group, "params": base_params, AUX_BASE: False})
        if aux_params:
            parts.append({**group, "params": aux_params, AUX_BASE: True})
        return parts

    def _check_marked_group(self, group: Mapping[str, Any]) -> None:
        is_aux = check_flag(f"group[{AUX_BASE!r}]", group[AUX_BASE])
        if is_aux or not self._only_matrices:
            return
        for p in group_params([group]):
            if p.ndim != 2:
                raise ValueError(
                    f"a group with {AUX_BASE!r}: False has a parameter of shape {tuple(p.shape)}, "
                    f"but {self._base_class.__name__} only trains matrices; leave {AUX_BASE!r} "
                    f"out, or set it to True"
                )

    def _hidden_weights(self, model: nn.Module) -> set[int]:
        """Return the ids of the weights that ``base`` trains."""
        aux_modules = modules_inside(model, self._layers)
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        head = linears[-1] if linears else None
        weights: set[int] = set()
        excluded: set[int] = set()
        for module in model.modules():
            class_name = type(module).__name__
            params = _original_params(module)

            is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            if (
                module is head
                or is_embedding
                or "Embedding" in class_name
                or "norm" in class_name.lower()  # whose gain may have two dimensions
                or module in aux_modules
            ):
                excluded.update(id(p) for p in params.values())

            for key, p in params.items():
                has_shape = p.ndim == 2 if self._only_matrices else p.ndim >= 2
                # Weight norm has a gain with one element per row.
                may_be_gain = key.endswith(("_g", ".original0"))
                is_gain = may_be_gain and p.numel() == max(p.shape, default=1)
                if "weight" in key and has_shape and not is_gain:
                    weights.add(id(p))
        return weights - excluded  # a weight tied to an embedding is excluded

    def description(self) -> list[str]:
        """Describe the classes, defaults and patterns, which all ranks must share."""
        lines = [f"layers of aux_base: {list(self._layers)}"]
        for part in self.parts:
            settings = {name: to_primitive(x) for name, x in part.defaults.items()}
            lines.append(f"{type(part).__name__} begins with {settings}")
        return lines

    def step(self, closure: Any = None) -> Any:
        """Let each of the two step its own groups. The closure is not called."""
        for part in self.update_parts():
            if part.param_groups:
                step_without_hooks(part)()
        self._collect_state()

    def update_parts(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Give each of the two its current groups and its state, and return both."""
        for is_aux, part in zip((False, True), self.parts, strict=True):
            part.param_groups = [g for g in self.param_groups if g[AUX_BASE] is is_aux]
            params = group_params(part.param_groups)
            state = {p: self.state[p] for p in params if p in self.state}
            part.state = defaultdict(dict, {**state, **own_entries(self.state, is_aux)})
        return self.parts

    def _collect_state(self) -> None:
        """Write the states of the two to the shared one."""
        for name, part in zip((BASE, AUX_BASE), self.parts, strict=True):
            part_state: dict[Any, Any] = part.state  # keys may be of any type
            for key, entries in part_state.items():
                shared_key: Any = (name, key)
                if isinstance(key, Tensor):
                    shared_key = key
                self.state[shared_key] = entries

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for part in self.update_parts():
            if len(part.state):
                part.__setstate__(
                    {"state": part.state, "param_groups": part.param_groups}
                )
        self._collect_state()


def _build(
    optimizer_class: OptimizerClass,
    groups: Sequence[dict[str, Any]],
    kwargs: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Build an optimizer, and copy the settings of its groups to ``groups``."""
    # No optimizer accepts an empty list.
    optimizer = optimizer_class(without_names(groups) or [{"params": []}], **kwargs)
    for group, complete in zip(groups, optimizer.param_groups, strict=False):
        for key, value in complete.items():
            if key != "params":
                group[key] = value
    return optimizer


def _original_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters, and those that its parametrizations replaced.

    The parametrizations' own parameters are left out.
    """
    params = dict(module.named_parameters(recurse=False))
    if is_parametrized(module):
        parametrizations = cast(nn.ModuleDict, module.parametrizations)
        for name, parametrization in parametrizations.items():
            # The keys are such as "original".
            for key, p in parametrization.named_parameters(recurse=False):
                params[f"{name}.{key}"] = p
    return params


def own_entries(state: Mapping[Any, Any], is_aux: bool) -> dict[Any, Any]:
    """Return one base's entries of a shared state that belong to no parameter."""
    name = AUX_BASE if is_aux else BASE
    entries = {}
    for key, value in state.items():
        if isinstance(key, tuple) and key[0] == name:
            entries[key[1]] = value
    return entries


def base_of(
    base: torch.optim.Optimizer, group: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the base that trains a group."""
    if not isinstance(base, BasePair):
        return base
    base_part, aux_part = base.parts
    return aux_part if group[AUX_BASE] else base_part


def describe_groups(training: Training) -> list[str]:
    """Return a line per group with base, settings and members; none for one group."""
    if len(training.groups) == 1:
        return []
    lines = []
    names = training.param_names()
    for i, group in enumerate(training.groups):
        members = group.get(NAMES)
        if not members:
            members = [names.get(id(p), "(not in the model)") for p in group["params"]]
        settings = f"lr {float(group['lr']):g}"
        if "weight_decay" in group:
            settings += f", weight_decay {float(group['weight_decay']):g}"
        base = base_class_names(base_of(training.base, group))
        lines.append(f"group {i}: {base}, {settings}: {', '.join(members)}")
    return lines


def mode_switch(
    base: torch.optim.Optimizer, method: str, owner: str, state: dict[Any, Any]
) -> Callable[[], None]:
    """Return a function that calls ``train()`` or ``eval()`` of the base, or of both.

    Args:
        base: The base, or both.
        method: "train" or "eval".
        owner: Name of the optimizer's class, for the error.
        state: The state of the optimizer.

    Raises:
        AttributeError: If no base has such a method.
    """
    parts = base.update_parts() if isinstance(base, BasePair) else (base,)
    methods = []
    for part in parts:
        function = getattr(part, method, None)
        if callable(function):
            methods.append(function)
    if not methods:
        raise AttributeError(
            f"{owner} has no {method}(): its base, {base_class_names(base)}, has none; only "
            f"schedule-free bases have it"
        )

    def switch() -> None:
        for function in methods:
            function()
        # The methods may create empty entries, which would count as state.
        for p, entry in list(state.items()):
            if isinstance(p, Tensor) and not any(entry.values()):
                del state[p]

    return switch

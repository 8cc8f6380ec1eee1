"""Find the model that parameters belong to, among all modules that are alive.

    optimizer = KAISA(model.parameters(), lr=0.1)

1. Find all modules: one pass over the objects that Python's garbage collector tracks.
   It takes a fraction of a second. ``gc.get_referrers`` for each parameter would take
   minutes.
2. Find the owners of the parameters: modules that have one of them in ``_parameters``.
3. Choose the smallest module that contains all owners. If no module does, choose the
   largest modules that do not overlap, and put them in a list.
4. Widen the choice to the whole network if all other parts of it are frozen.

Deep copies have other parameters, so they are never candidates.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.fsdp import is_dtensor
from second_order.optimizers.arguments import FoundModel, UnenclosedModules

__all__ = ["find_model"]

# These often repeat the parameters of other modules, so they count as owners only of
# parameters that no other module has.
WEAK_OWNERS = (
    torch.jit.ScriptModule,
    torch.fx.GraphModule,
    nn.ParameterList,
    nn.ParameterDict,
)

# These have no forward, so hooks on their outputs would never run.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

FSDP_CLASSES = {"FSDPModule", "FullyShardedDataParallel"}


@dataclass(frozen=True)
class Owner:
    """A module that has some of the parameters in its own ``_parameters``."""

    module: nn.Module
    positions: frozenset[int]  # of its parameters in the list of parameters


@dataclass
class Candidate:
    """A module that contains owners."""

    module: nn.Module
    owners: list[Owner] = field(default_factory=list)
    # Positions of the parameters that it contains, as in Owner.
    positions: set[int] = field(default_factory=set)

    def add(self, owner: Owner) -> None:
        """Add an owner that the module contains."""
        self.owners.append(owner)
        self.positions |= owner.positions

    @cached_property
    def sort_key(self) -> tuple[bool, int, int, str, list[int]]:
        """Orders candidates with the same parameters: the first is the smallest.

        It has no ids and addresses, so every rank chooses the same candidate.
        """
        named_params = self.module.named_parameters(remove_duplicate=False)
        names = [name for name, _ in named_params]
        return (
            _is_instance(self.module, CONTAINERS),
            len(_submodules(self.module)),
            -len(names),
            f"{type(self.module).__name__}: {names}",
            sorted(self.positions),
        )


def find_model(params: Sequence[Tensor]) -> FoundModel | None:
    """Find the module that parameters belong to.

    Returns None if no module owns any of them. Parameters that belong to no module are
    ignored.
    """
    search = _Search(params)
    if search.is_enclosed():
        # The enclosing modules may be garbage in reference cycles, which each rank
        # collects at another time. A garbage DistributedDataParallel averages nothing.
        del search
        gc.collect()
        search = _Search(params)
    return search.found_model()


class _Search:
    """The owners of parameters among all live modules, and the modules around them."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.positions = {id(p): i for i, p in enumerate(params)}
        modules = _live_modules()
        if any(is_dtensor(p) for p in params):
            # After a forward without a backward, FSDP2's root has unsharded parameters.
            for module in modules:
                if "FSDPModule" in _class_names(module):
                    cast(Any, module).reshard()

        # Find the owners of the parameters, and the parents of all modules.
        self.parents: dict[int, list[nn.Module]] = {}
        self.owners: list[Owner] = []
        weak_owners: list[Owner] = []
        for module in modules:
            for child in _children(module):
                self.parents.setdefault(id(child), []).append(module)
            positions = set()
            for p in _own_params(module):
                if id(p) in self.positions:
                    positions.add(self.positions[id(p)])
            if not positions:
                continue
            owner = Owner(module, frozenset(positions))
            if type(module) is nn.Module or _is_instance(module, WEAK_OWNERS):
                weak_owners.append(owner)
            else:
                self.owners.append(owner)

        # A weak owner counts if it has a parameter that no other module has.
        owned = {position for owner in self.owners for position in owner.positions}
        self.owners += [owner for owner in weak_owners if not owner.positions <= owned]
        self.roots = self._find_roots()

    def _find_roots(self) -> list[Candidate]:
        """Return the smallest module around all owners, or several if there is none."""
        by_module: dict[int, Candidate] = {}
        for owner in self.owners:
            for module in self._enclosing_modules(owner.module):
                by_module.setdefault(id(module), Candidate(module)).add(owner)

        roots: list[Candidate] = []
        candidates = list(by_module.values())
        remaining = {position for owner in self.owners for position in owner.positions}
        while remaining:
            best = _best_candidates(candidates, remaining)
            roots += best
            remaining -= best[0].positions
            candidates = [c for c in candidates if c.positions & remaining]
        return sorted(roots, key=lambda root: sorted(root.positions))

    def is_enclosed(self) -> bool:
        """Whether other modules contain a root, or there are several roots."""
        if len(self.roots) > 1:
            return True
        return any(self.parents.get(id(root.module)) for root in self.roots)

    def found_model(self) -> FoundModel | None:
        """Return the widened root, or a list of several.

        Returns None if there is none.
        """
        if not self.roots:
            return None
        modules = [self._widen(root.module) for root in self.roots]

        # Does DistributedDataParallel average the gradients of all parameters?
        owned: set[int] = set()
        averaged_by_ddp: set[int] = set()
        for root in self.roots:
            for owner in root.owners:
                owned |= owner.positions
                if self._is_in_ddp(owner.module):
                    averaged_by_ddp |= owner.positions
        return FoundModel(
            module=modules[0] if len(modules) == 1 else UnenclosedModules(modules),
            under_ddp=owned == averaged_by_ddp,
            outer_class=self._outer_class(modules[0]),
        )

    def _enclosing_modules(self, module: nn.Module) -> list[nn.Module]:
        """Return a module and all modules that contain it, each once."""
        modules = {id(module): module}
        queue = [module]
        while queue:
            for parent in self.parents.get(id(queue.pop()), ()):
                if id(parent) not in modules:
                    modules[id(parent)] = parent
                    queue.append(parent)
        return list(modules.values())

    def _widen(self, root: nn.Module) -> nn.Module:
        """Return the network around a root, if all other parts of it are frozen.

        A new head, or LoRA's adapters, are a small part of their model. The loss
        depends on the outputs of the whole model, and all ranks start from the same
        parameters, including the frozen ones.
        """
        enclosing = self._enclosing_modules(root)
        # FSDP keeps the state of all its parameters in its outermost module.
        sharded = [m for m in enclosing if _class_names(m) & FSDP_CLASSES]
        if sharded:
            return max(sharded, key=lambda module: len(_submodules(module)))

        root_submodules = _submodules(root)
        widest = root
        most_added = 0
        for module in sorted(enclosing, key=lambda module: len(_submodules(module))):
            if _is_instance(module, CONTAINERS):
                continue
            added: list[Tensor] = []
            for key, submodule in _submodules(module).items():
                if key not in root_submodules:
                    added += _own_params(submodule)
            trains = any(p.requires_grad and id(p) not in self.positions for p in added)
            if len(added) > most_added and not trains:
                widest = module
                most_added = len(added)
        return widest

    def _is_in_ddp(self, module: nn.Module) -> bool:
        """Whether DistributedDataParallel averages a module's gradients."""
        enclosing = self._enclosing_modules(module)
        return any(_is_instance(outer, DistributedDataParallel) for outer in enclosing)

    def _outer_class(self, root: nn.Module) -> str:
        """Return the class of a module around a root that may change outputs, or ""."""
        for module in self._enclosing_modules(root)[1:]:
            is_compiled = "_orig_mod" in (vars(module).get("_modules") or {})
            is_wrapper = _is_instance(module, (DistributedDataParallel, *CONTAINERS))
            if not is_compiled and not is_wrapper:
                return type(module).__name__
        return ""


def _best_candidates(
    candidates: Sequence[Candidate], remaining: set[int]
) -> list[Candidate]:
    """Return the smallest candidate that contains most of the remaining parameters.

    A tied weight has several owners, and the model contains all of them. So the
    candidate with the most owners comes first, then the smallest one.

    Two modules can still be equal. If they share their submodules, as a module and its
    ``copy.copy`` do, hooks serve both, and one of them is returned. If they only share
    parameters, all of them are returned, because any of them may be the one that runs.
    """
    most_params = max(len(c.positions & remaining) for c in candidates)
    widest = [c for c in candidates if len(c.positions & remaining) == most_params]
    most_owners = max(len(c.owners) for c in widest)
    complete = [c for c in widest if len(c.owners) == most_owners]
    smallest_key = min(c.sort_key for c in complete)

    by_owners: dict[frozenset[int], Candidate] = {}
    for candidate in complete:
        if candidate.sort_key == smallest_key:
            owner_ids = frozenset(id(owner.module) for owner in candidate.owners)
            by_owners[owner_ids] = candidate
    return list(by_owners.values())


def _live_modules() -> list[nn.Module]:
    """Return every module that is alive, except the lists that optimizers have made."""
    # Only the types of objects are read, because reading an attribute of a proxy may
    # import a module or raise. Types are compared by id, because not every type can be
    # hashed.
    objects = gc.get_objects()
    classes = {id(type(each)): type(each) for each in objects}
    module_classes = {
        key for key, kind in classes.items() if issubclass(kind, nn.Module)
    }
    module_classes.discard(id(UnenclosedModules))
    return [each for each in objects if id(type(each)) in module_classes]


def _is_instance(module: nn.Module, classes: Any) -> bool:
    """Like ``isinstance``, without reading ``__class__``, which modules may define."""
    return issubclass(type(module), classes)


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Return a module's own submodules; none before ``nn.Module.__init__`` has run."""
    children = vars(module).get("_modules") or {}
    return (child for child in children.values() if child is not None)


def _own_params(module: nn.Module) -> Iterator[Tensor]:
    """Return a module's own parameters, without those of its submodules."""
    params = vars(module).get("_parameters") or {}
    return (p for p in params.values() if p is not None)


def _submodules(module: nn.Module) -> dict[int, nn.Module]:
    """Return a module and all modules that it contains, by id."""
    modules = {id(module): module}
    queue: list[nn.Module] = [module]
    while queue:
        for child in _children(queue.pop()):
            if id(child) not in modules:
                modules[id(child)] = child
                queue.append(child)
    return modules

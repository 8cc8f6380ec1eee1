"""The module that parameters belong to, found among all modules that are alive.

    optimizer = KAISA(model.parameters(), lr=0.1)

1. One pass over the objects that Python's garbage collector tracks gives every ``nn.Module``. It
   takes a fraction of a second. ``gc.get_referrers`` for each parameter would take minutes.
2. A parameter's owners are the modules that have it in ``_parameters``. An owner is contained in
   itself and in every module that has it further down.
3. The model is the smallest module that contains all owners, widened by frozen parts of the same
   network. If no module contains all, the largest ones that do not overlap form a list.

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

from second_order.contract.arguments import FoundModel, Gathered
from second_order.sharded import is_dtensor

__all__ = ["find_model"]

# These hold parameters for others: they own only what no other module owns.
HOLDERS = (torch.jit.ScriptModule, torch.fx.GraphModule, nn.ParameterList, nn.ParameterDict)

# These have no forward of their own, so hooks on their outputs would never run.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

SHARDED = {"FSDPModule", "FullyShardedDataParallel"}


@dataclass(frozen=True)
class Owner:
    """A module that has some of the given parameters itself."""

    module: nn.Module
    places: frozenset[int]  # of these in the list that was given


@dataclass
class Candidate:
    """A module that contains owners."""

    module: nn.Module
    owners: list[Owner] = field(default_factory=list)
    places: set[int] = field(default_factory=set)  # of the parameters that it contains

    def add(self, owner: Owner) -> None:
        """Add a module that it contains."""
        self.owners.append(owner)
        self.places |= owner.places

    @cached_property
    def rank(self) -> tuple[bool, int, int, str, list[int]]:
        """What decides between candidates with the same parameters: the smallest is the model."""
        names = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
        text = f"{type(self.module).__name__}: {names}"
        size = len(_tree(self.module))
        return _is(self.module, CONTAINERS), size, -len(names), text, sorted(self.places)


def find_model(params: Sequence[Tensor]) -> FoundModel | None:
    """Find the module that parameters belong to; None if none of them belongs to a live module.

    A parameter that belongs to no module is not in the result.
    """
    search = _Search(params)
    if search.is_enclosed():
        # The modules around the model may be garbage that waits for the collector, in cycles. Such
        # a DistributedDataParallel averages no gradients, and ranks collect at different times.
        del search
        gc.collect()
        search = _Search(params)
    return search.model()


class _Search:
    """The live modules, and which of them own some parameters."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.places = {id(p): i for i, p in enumerate(params)}
        modules = _live_modules()
        if any(map(is_dtensor, params)):
            for module in modules:  # a root keeps whole parameters after a lone forward
                if "FSDPModule" in _class_names(module):
                    cast(Any, module).reshard()

        self.parents: dict[int, list[nn.Module]] = {}
        self.owners: list[Owner] = []
        holders: list[Owner] = []
        for module in modules:
            for child in _children(module):
                self.parents.setdefault(id(child), []).append(module)
            own = [self.places[id(p)] for p in _own_params(module) if id(p) in self.places]
            if own:
                holds = type(module) is nn.Module or _is(module, HOLDERS)
                (holders if holds else self.owners).append(Owner(module, frozenset(own)))

        owned = {place for owner in self.owners for place in owner.places}
        self.owners += [holder for holder in holders if not holder.places <= owned]
        self.roots = self.find_roots()

    def find_roots(self) -> list[Candidate]:
        """The smallest module around all owners; several if no module contains all of them."""
        by_module: dict[int, Candidate] = {}
        for owner in self.owners:
            for module in self.around(owner.module):
                by_module.setdefault(id(module), Candidate(module)).add(owner)

        roots: list[Candidate] = []
        candidates = list(by_module.values())
        wanted = {place for owner in self.owners for place in owner.places}
        while wanted:
            root = _best(candidates, wanted)
            roots.append(root)
            wanted -= root.places
            candidates = [each for each in candidates if not wanted.isdisjoint(each.places)]
        return sorted(roots, key=lambda root: sorted(root.places))

    def is_enclosed(self) -> bool:
        """Whether other modules contain what was found."""
        return any(self.parents.get(id(root.module)) for root in self.roots)

    def model(self) -> FoundModel | None:
        """The root, or several in a list, widened; None if there is none."""
        if not self.roots:
            return None
        modules = [self.widened(root.module) for root in self.roots]
        averaged = [self.is_in_ddp(owner.module) for root in self.roots for owner in root.owners]
        return FoundModel(
            module=modules[0] if len(modules) == 1 else Gathered(modules),
            under_ddp=all(averaged),
            inside=next(map(self.enclosing, modules)),
        )

    def around(self, module: nn.Module) -> list[nn.Module]:
        """A module and all modules that contain it, each once."""
        found = {id(module): module}
        queue = [module]
        while queue:
            for parent in self.parents.get(id(queue.pop()), ()):
                if id(parent) not in found:
                    found[id(parent)] = parent
                    queue.append(parent)
        return list(found.values())

    def widened(self, root: nn.Module) -> nn.Module:
        """The network that a root is part of, where all the rest of it is frozen.

        The parameters of a new head or of LoRA's adapters are in a corner of their model. Losses
        are of the whole model's outputs, and processes start from all of its parameters.
        """
        around = self.around(root)
        sharded = [module for module in around if _class_names(module) & SHARDED]
        if sharded:  # FSDP keeps what it knows of all parameters at its outermost module
            return max(sharded, key=lambda module: len(_tree(module)))

        inside = _tree(root)
        best, most = root, 0
        for module in sorted(around, key=lambda module: len(_tree(module))):
            if _is(module, CONTAINERS):
                continue
            others = [each for key, each in _tree(module).items() if key not in inside]
            added = [p for each in others for p in _own_params(each)]
            trains = any(p.requires_grad and id(p) not in self.places for p in added)
            if len(added) > most and not trains:
                best, most = module, len(added)
        return best

    def is_in_ddp(self, module: nn.Module) -> bool:
        """Whether DistributedDataParallel averages a module's gradients."""
        return any(_is(each, DistributedDataParallel) for each in self.around(module))

    def enclosing(self, root: nn.Module) -> str:
        """The class of a module around a root that may change its outputs; "" if there is none."""
        for module in self.around(root)[1:]:
            is_compiled = "_orig_mod" in (vars(module).get("_modules") or {})
            same_outputs = is_compiled or _is(module, (DistributedDataParallel, *CONTAINERS))
            if not same_outputs:
                return type(module).__name__
        return ""


def _best(candidates: Sequence[Candidate], wanted: set[int]) -> Candidate:
    """The candidate with most of the wanted parameters, and among such the smallest.

    A tied weight has several owners, and the model has all of them. So more owners go before fewer
    modules. Names and places, which are the same on every rank, decide between equal ones: most
    names, or the first in the alphabet. If these are equal as well, they are a module and its
    ``copy.copy``. The two share their submodules, so hooks serve either.
    """
    counts = [len(candidate.places & wanted) for candidate in candidates]
    most = max(counts)
    widest = [c for c, count in zip(candidates, counts, strict=True) if count == most]
    owners = max(len(c.owners) for c in widest)
    return min((c for c in widest if len(c.owners) == owners), key=lambda c: c.rank)


def _live_modules() -> list[nn.Module]:
    """Every module that is alive, but for those that an optimizer has made.

    Types are looked at, not objects: an object that stands for another one may import or raise.
    Types are compared by ``id``, because not every type can be hashed.
    """
    objects = gc.get_objects()
    kinds = {id(kind): kind for kind in map(type, objects)}
    modules = {key for key, kind in kinds.items() if issubclass(kind, nn.Module)}
    modules.discard(id(Gathered))
    return [each for each in objects if id(type(each)) in modules]


def _is(module: nn.Module, kinds: Any) -> bool:
    return issubclass(type(module), kinds)


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """A module's own submodules; none of one that has not run ``nn.Module.__init__`` yet."""
    children = vars(module).get("_modules") or {}
    return (child for _, child in children.items() if child is not None)


def _own_params(module: nn.Module) -> Iterator[Tensor]:
    """A module's own parameters, without its submodules'."""
    params = vars(module).get("_parameters") or {}
    return (p for _, p in params.items() if p is not None)


def _tree(module: nn.Module) -> dict[int, nn.Module]:
    """A module and everything in it, by id."""
    found = {id(module): module}
    queue: list[nn.Module] = [module]
    while queue:
        for child in _children(queue.pop()):
            if id(child) not in found:
                found[id(child)] = child
                queue.append(child)
    return found

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

from second_order.distributed.fsdp import is_dtensor
from second_order.optimizers.arguments import FoundModel, Gathered

__all__ = ["find_model"]

# These often repeat the parameters of other modules. They count as owners only of parameters that
# no other module has.
HOLDERS = (torch.jit.ScriptModule, torch.fx.GraphModule, nn.ParameterList, nn.ParameterDict)

# These have no forward, so hooks on their outputs would never run.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

SHARDED = {"FSDPModule", "FullyShardedDataParallel"}


@dataclass(frozen=True)
class Owner:
    """A module that has some of the given parameters itself."""

    module: nn.Module
    positions: frozenset[int]  # of these parameters in the given list


@dataclass
class Candidate:
    """A module that contains owners."""

    module: nn.Module
    owners: list[Owner] = field(default_factory=list)
    positions: set[int] = field(default_factory=set)  # of the parameters that it contains

    def add(self, owner: Owner) -> None:
        """Add a module that it contains."""
        self.owners.append(owner)
        self.positions |= owner.positions

    @cached_property
    def order(self) -> tuple[bool, int, int, str, list[int]]:
        """What decides between candidates with the same parameters: the smallest is the model."""
        names = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
        text = f"{type(self.module).__name__}: {names}"
        size = len(_tree(self.module))
        return _is(self.module, CONTAINERS), size, -len(names), text, sorted(self.positions)


def find_model(params: Sequence[Tensor]) -> FoundModel | None:
    """Find the module that parameters belong to; None if none of them belongs to a live module.

    A parameter that belongs to no module is not in the result.
    """
    search = _Search(params)
    if search.is_enclosed():
        # Some of these modules may be garbage in reference cycles, which every rank collects at
        # another time. A DistributedDataParallel that is garbage averages no gradients.
        del search
        gc.collect()
        search = _Search(params)
    return search.model()


class _Search:
    """The live modules, and which of them own some parameters."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.positions = {id(p): i for i, p in enumerate(params)}
        modules = _live_modules()
        if any(map(is_dtensor, params)):
            # After a forward without a backward, a root still has its whole parameters.
            for module in modules:
                if "FSDPModule" in _class_names(module):
                    cast(Any, module).reshard()

        self.parents: dict[int, list[nn.Module]] = {}
        self.owners: list[Owner] = []
        holders: list[Owner] = []
        for module in modules:
            for child in _children(module):
                self.parents.setdefault(id(child), []).append(module)
            own = [self.positions[id(p)] for p in _own_params(module) if id(p) in self.positions]
            if own:
                holds = type(module) is nn.Module or _is(module, HOLDERS)
                (holders if holds else self.owners).append(Owner(module, frozenset(own)))

        owned = {position for owner in self.owners for position in owner.positions}
        self.owners += [holder for holder in holders if not holder.positions <= owned]
        self.roots = self.find_roots()

    def find_roots(self) -> list[Candidate]:
        """The smallest module around all owners; several if no module contains all of them."""
        by_module: dict[int, Candidate] = {}
        for owner in self.owners:
            for module in self.around(owner.module):
                by_module.setdefault(id(module), Candidate(module)).add(owner)

        roots: list[Candidate] = []
        candidates = list(by_module.values())
        wanted = {position for owner in self.owners for position in owner.positions}
        while wanted:
            found = _best(candidates, wanted)
            roots += found
            wanted -= found[0].positions
            candidates = [each for each in candidates if not wanted.isdisjoint(each.positions)]
        return sorted(roots, key=lambda root: sorted(root.positions))

    def is_enclosed(self) -> bool:
        """Whether other modules contain a root, or there are several."""
        return len(self.roots) > 1 or any(self.parents.get(id(root.module)) for root in self.roots)

    def model(self) -> FoundModel | None:
        """The root, or several in a list, widened; None if there is none."""
        if not self.roots:
            return None
        modules = [self.widened(root.module) for root in self.roots]
        owners = [owner for root in self.roots for owner in root.owners]
        averaged = [owner.positions for owner in owners if self.is_in_ddp(owner.module)]
        owned = {position for owner in owners for position in owner.positions}
        return FoundModel(
            module=modules[0] if len(modules) == 1 else Gathered(modules),
            under_ddp=owned == set().union(*averaged),
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
        """The network that a root is part of, if all the rest of it is frozen.

        A new head, or LoRA's adapters, are a small part of their model. The loss depends on the
        whole model's outputs, and all ranks start from the same parameters, frozen ones included.
        """
        around = self.around(root)
        sharded = [module for module in around if _class_names(module) & SHARDED]
        if sharded:  # FSDP keeps the state of all its parameters in its outermost module
            return max(sharded, key=lambda module: len(_tree(module)))

        inside = _tree(root)
        best = root
        most = 0
        for module in sorted(around, key=lambda module: len(_tree(module))):
            if _is(module, CONTAINERS):
                continue
            others = [each for key, each in _tree(module).items() if key not in inside]
            added = [p for each in others for p in _own_params(each)]
            trains = any(p.requires_grad and id(p) not in self.positions for p in added)
            if len(added) > most and not trains:
                best = module
                most = len(added)
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


def _best(candidates: Sequence[Candidate], wanted: set[int]) -> list[Candidate]:
    """The candidate with most of the wanted parameters, and among such the smallest.

    A tied weight has several owners, and the model contains all of them. So the candidate with the
    most owners comes first, then the smallest one. Names and positions decide between equal ones,
    because they are the same on every rank.

    Two modules can still be equal. If they share their submodules, as a module and its
    ``copy.copy`` do, hooks serve both, and one of them is returned. If they only share parameters,
    all of them are returned, because any of them may be the one that runs.
    """
    counts = [len(candidate.positions & wanted) for candidate in candidates]
    most = max(counts)
    widest = [c for c, count in zip(candidates, counts, strict=True) if count == most]
    owners = max(len(c.owners) for c in widest)
    largest = [c for c in widest if len(c.owners) == owners]
    first = min(c.order for c in largest)
    equal = [c for c in largest if c.order == first]
    return list({frozenset(id(owner.module) for owner in c.owners): c for c in equal}.values())


def _live_modules() -> list[nn.Module]:
    """Every module that is alive, except the lists that optimizers have made.

    Only the types of objects are read, because reading an attribute of a proxy may import a module
    or raise. Types are compared by ``id``, because not every type can be hashed.
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
    """A module's own submodules; none if it has not run ``nn.Module.__init__`` yet."""
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

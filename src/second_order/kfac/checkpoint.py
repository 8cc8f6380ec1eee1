"""What a checkpoint has of the layers, its checks, and the transfer of entries between ranks.

The entries of a layer, in the checkpoint part of its weight:

A, G, L                          the running averages that this process stores
average_weight, mean_eigenvalues, examples
                                 the weight of the averages, their mean eigenvalues, and the number
                                 of examples; on every rank
inverse_step                     the step of the factors that the inverse was computed from; -1 if
                                 the layer has no inverse
inverse_delay                    the number of steps from inverse_step until the inverse was
                                 installed
inverse_wanted                   1 if the layer is refreshed at the next step even if it is not due
inverse_A, inverse_G, ...        the tensors of the inverse, named by the solver; only gradient
                                 workers save them
inverse_damping                  four numbers, saved with these tensors: γ, the mean eigenvalue of
                                 A ⊗ G + γ, the option γ, and 1 if the inverse is scaled by the
                                 second; all are 0 if there is no inverse
snapshot_step                    the step of an inverse that is computed on a thread; -1 if none is
snapshot_A, snapshot_G, ...      the factors that it is computed from

Moving and gathering are collectives. Every rank calls them with the same layers, and their messages
depend only on what all ranks know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.checkpoint.saved import HEADER, SavedPart
from second_order.distributed.fsdp import is_dtensor, local
from second_order.distributed.world import World, deliver_parts
from second_order.kfac.feedback import LAST_STEP, LAST_STEP_KNOWN, STEP_LENGTH
from second_order.kfac.plan import LayerPlan
from second_order.kfac.precondition import USUAL_CHANGE
from second_order.kfac.schedule import DRIFT, UPDATED_AT
from second_order.kfac.solve import InverseState, LoadedInverse, Solve, Solver, Solves
from second_order.kfac.thor import SETTLED
from second_order.kronecker.block import AGREED_STATE, PASS_HISTORY, KroneckerBlock
from second_order.kronecker.solvers import INVERSE_ENTRIES
from second_order.training.context import Training
from second_order.training.throttle import THROTTLE

__all__ = [
    "CHOSEN",
    "DAMPING",
    "MEAN_CURVATURE",
    "NEWLY_TRAINABLE_AT",
    "Entry",
    "Route",
    "check_saved",
    "deliver_entries",
    "factor_routes",
    "inverse_routes",
    "load_factors",
    "loaded_inverse",
    "loaded_snapshot",
    "loaded_workers",
    "move_factors",
    "saved_inverse",
    "saved_snapshot",
    "shared_number",
    "was_trained",
]

LETTERS = ("A", "G", "L")
WEIGHT, MEANS, EXAMPLES = HEADS = ("average_weight", "mean_eigenvalues", "examples")
STEP, DELAY, WANTED = "inverse_step", "inverse_delay", "inverse_wanted"
INVERSE_DAMPING = "inverse_damping"
SNAPSHOT_STEP, SNAPSHOT_MEANS = "snapshot_step", "snapshot_mean_eigenvalues"
SNAPSHOT_NUMBERS = ("snapshot_damping", "snapshot_mean_curvature")
SNAPSHOT_TENSORS = ("snapshot_A", "snapshot_G", "snapshot_L", SNAPSHOT_MEANS)

CHOSEN = ("gradient_workers", "gradient_workers_of")
MEAN_CURVATURE = "mean_curvature"
NEWLY_TRAINABLE_AT = "newly_trainable_at"
DAMPING = "damping"
"""The option γ at the last refresh, or -1 before the first; the same for all layers."""

SHARED = (
    *(MEAN_CURVATURE, *STEP_LENGTH, *USUAL_CHANGE, *THROTTLE),
    *(UPDATED_AT, NEWLY_TRAINABLE_AT, DAMPING, *CHOSEN),
)
"""Entries that are the same in the parts of all layers."""

WHOLE = (*DRIFT, *THROTTLE[:2])
"""Whole numbers of at least 0."""

SIZES: dict[str, tuple[int, ...]] = {
    PASS_HISTORY: (4,),
    INVERSE_DAMPING: (4,),
    **dict.fromkeys((WEIGHT, EXAMPLES), ()),
}
"""Tensors of one shape for all layers."""

KNOWN = (
    *(*LETTERS, *HEADS, *INVERSE_ENTRIES, STEP, DELAY, WANTED, SNAPSHOT_STEP, *SNAPSHOT_NUMBERS),
    *(*SNAPSHOT_TENSORS, *SHARED, *SIZES, SETTLED, *DRIFT, *AGREED_STATE),
    *(LAST_STEP, LAST_STEP_KNOWN, *HEADER),
)
"""All entries."""

Entry: TypeAlias = tuple[KroneckerBlock, str]
"""A layer, and the name of an entry."""


# --------------------------------------------------------------------------------------- saving


def saved_inverse(block: KroneckerBlock, solves: Solves, works: bool, room: bool) -> dict[str, Any]:
    """The entries of a layer's inverse. The tensors are shared, not copied.

    Gradient workers (``works``) have all entries. Other ranks have only the whole numbers. If
    ``room`` is true, a gradient worker without an inverse has tensors of zeros.
    torch.distributed.checkpoint needs them because it reads into existing tensors.
    """
    state = solves.inverses[block] if block.solved else InverseState(step=-1, installed_at=-1)
    delay = state.installed_at - state.step
    found: dict[str, Any] = {STEP: state.step, DELAY: delay, WANTED: int(block in solves.wanted)}
    if works and block.inverse is not None:
        numbers = state.damping, state.trace, state.option, solves.scaled
        found |= block.inverse.entries
        found[INVERSE_DAMPING] = block.numbers([float(number) for number in numbers])
    elif works and room:
        for name, shape in solves.solver.saved_shapes(block.shape).items():
            found[name] = torch.zeros(
                shape, dtype=solves.options.inv_dtype, device=block.weight.device
            )
        found[INVERSE_DAMPING] = block.numbers([0.0] * 4)
    return found


def saved_snapshot(block: KroneckerBlock, solves: Solves, room: bool) -> dict[str, Any]:
    """The entries of an inverse that is being computed; for ``room`` see :func:`saved_inverse`."""
    solve = solves.under_way.get(block, Solve(step=-1, option=0.0, mean_curvature=0.0))
    if solve.step < 0 and not room:
        return {SNAPSHOT_STEP: -1}
    factors = solve.factors or block.ensure_factors()
    if room and solve.factors is None:  # what is read must not go into the running averages
        factors = block.read_factors(block.saved_factors())
    numbers = float(solve.option), solve.mean_curvature
    found: dict[str, Any] = {SNAPSHOT_STEP: solve.step, SNAPSHOT_MEANS: factors.means}
    found |= zip(SNAPSHOT_NUMBERS, numbers, strict=True)
    for letter, factor in factors.stored.items():
        found[f"snapshot_{letter}"] = factor
    return found


# ------------------------------------------------------------------------------ transfer of entries


@dataclass(frozen=True)
class Route:
    """The way of an entry between ranks, known to all of them."""

    source: int
    destinations: Sequence[int]
    shape: tuple[int, ...]
    dtype: torch.dtype


def deliver_entries(
    world: World, routes: Mapping[Entry, Route], saved: Mapping[Entry, Tensor]
) -> dict[KroneckerBlock, dict[str, Tensor]]:
    """Send entries along routes; returns copies of those that this rank has received, by layer.

    Entries that their source lacks are missing.
    """
    received: dict[KroneckerBlock, dict[str, Tensor]] = {}
    kinds = {(route.dtype, block.weight.device) for (block, _), route in routes.items()}
    for dtype, device in sorted(kinds, key=str):
        chosen = {
            entry: route
            for entry, route in routes.items()
            if (route.dtype, entry[0].weight.device) == (dtype, device)
        }
        # A flag says whether the source has the entry: of missing ones zeros arrive.
        parts: dict[Entry, tuple[Tensor, Tensor]] = {}
        for entry, route in chosen.items():
            if route.source == world.rank and entry in saved:
                parts[entry] = saved[entry].new_ones(()), saved[entry]
        arrived = deliver_parts(
            world,
            shapes={entry: ((), route.shape) for entry, route in chosen.items()},
            routes={entry: (route.source, route.destinations) for entry, route in chosen.items()},
            mine=parts,
            dtype=dtype,
            device=device,
        )
        for entry, route in chosen.items():
            if route.source != world.rank and world.rank in route.destinations:
                present, value = arrived[entry]
                if bool(present):
                    block, name = entry
                    received.setdefault(block, {})[name] = value.clone()
    return received


def _heads_of(block: KroneckerBlock) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of what goes with a layer's factors."""
    yield WEIGHT, ()
    yield MEANS, (block.shape.numbers, block.shape.groups)
    yield EXAMPLES, ()


def _factor_route(
    block: KroneckerBlock, letter: str, source: int, destinations: Sequence[int]
) -> dict[Entry, Route]:
    """The routes of a factor, and of what goes with it.

    Weights, means and numbers of examples travel in float32 at least.
    """
    wide = torch.promote_types(block.factor_dtype, torch.float32)
    shape = block.stored_shapes[letter]
    routes = {(block, letter): Route(source, destinations, shape, block.factor_dtype)}
    for name, shape in _heads_of(block):
        routes[block, name] = Route(source, destinations, shape, wide)
    return routes


def factor_routes(
    plan: Mapping[KroneckerBlock, LayerPlan], to: Callable[[LayerPlan], Sequence[int]]
) -> dict[Entry, Route]:
    """The routes of factors that some ranks alone store, to other ranks."""
    routes: dict[Entry, Route] = {}
    for block, layer in plan.items():
        for letter in block.shape.letters:
            keeper, destinations = layer.keeper(letter), to(layer)
            if keeper is not None and {*destinations} != {keeper}:
                routes |= _factor_route(block, letter, keeper, destinations)
    return routes


def inverse_routes(
    plan: Mapping[KroneckerBlock, LayerPlan], solves: Solves, ranks: Sequence[int]
) -> dict[Entry, Route]:
    """The routes of inverses, and of the history of passes, to ranks that lack them."""
    routes: dict[Entry, Route] = {}
    for block, layer in plan.items():
        numbers = block.numbers(()).dtype
        if block.solved and not {*ranks} <= {*layer.workers}:
            source = layer.workers[0]
            shapes = solves.solver.saved_shapes(block.shape)
            for name, shape in shapes.items():
                routes[block, name] = Route(source, ranks, shape, solves.options.inv_dtype)
            routes[block, INVERSE_DAMPING] = Route(source, ranks, SIZES[INVERSE_DAMPING], numbers)
        if layer.source is not None:
            shape = SIZES[PASS_HISTORY]
            routes[block, PASS_HISTORY] = Route(layer.source, ranks, shape, numbers)
    return routes


def move_factors(
    world: World,
    plan: Mapping[KroneckerBlock, LayerPlan],
    before: Mapping[KroneckerBlock, LayerPlan],
) -> None:
    """Send the factors of layers whose owners have changed to the new owners."""
    received: dict[KroneckerBlock, dict[str, Tensor | None]] = {}
    for letter in LETTERS:
        routes: dict[Entry, Route] = {}
        saved: dict[Entry, Tensor] = {}
        for block, layer in plan.items():
            if letter not in block.shape.letters or block not in before:
                continue
            old, new = before[block].keeper(letter), layer.keeper(letter)
            if old is not None and new is not None and old != new:
                routes |= _factor_route(block, letter, old, [new])
                if old == world.rank:
                    saved |= {(block, name): x for name, x in block.saved_factors().items()}
        for block, entries in deliver_entries(world, routes, saved).items():
            received[block] = {**received.get(block, {}), letter: None, **entries}
    for block in before.keys() - plan.keys():  # they do not train
        block.keep(block.held)
    for block, layer in plan.items():
        block.keep(layer.keeps(world.rank))
        if block in received:
            block.take_factors(received[block])


# -------------------------------------------------------------------------------------- loading


def shared_number(saved: Mapping[Tensor, SavedPart], key: str, otherwise: float) -> float:
    """A number that all layers have; ``otherwise`` if the checkpoint lacks it."""
    for part in saved.values():
        if key in part:
            return part.number(key)
    return otherwise


def loaded_workers(saved: Mapping[Tensor, SavedPart], ranks: int) -> int:
    """The number of gradient workers that was chosen for so many ranks, or 0."""
    workers, of = (int(shared_number(saved, name, 0.0)) for name in CHOSEN)
    return workers if of == ranks and workers and ranks % workers == 0 else 0


def load_factors(
    saved: Mapping[Tensor, SavedPart], blocks: Sequence[KroneckerBlock], training: Training
) -> None:
    """Take over the factors of layers, in the dtypes they were saved in."""
    for block in blocks:
        part: Mapping[str, Any] = saved.get(block.weight, {})
        block.staged.clear()
        block.forget()
        if WEIGHT in part and (block.trainable or not block.misfit(part)):
            block.load_factors(part)
        elif WEIGHT in part:
            training.warn(
                f"the factors of layer {block.name!r} are not taken over: it is frozen, and "
                f"saved with another size, with its bias perhaps; once it trains they are "
                f"taken anew"
            )


def was_trained(part: Mapping[str, Any]) -> bool:
    """Whether a layer trained when the checkpoint was written: then it has inverse entries."""
    return STEP in part and WANTED in part


def loaded_inverse(
    part: Mapping[str, Any], block: KroneckerBlock, solves: Solves, works: bool
) -> LoadedInverse | None:
    """A layer's inverse from a checkpoint, or None if the layer had no inverse.

    The field ``inverse`` is set only on gradient workers (``works``). It is None if the checkpoint
    lacks tensors of this solver, or if its inverse has another ``preconditioner_scale``.
    """
    step = int(part.get(STEP, -1))
    if step < 0:
        return None
    state = InverseState(step, step + int(part.get(DELAY, 0)))
    without = LoadedInverse(state)
    if not works or INVERSE_DAMPING not in part:
        return without
    entries: dict[str, Tensor] = {}
    for name in solves.solver.saved_shapes(block.shape):
        if name not in part or not bool(part[name].any()):  # all zeros: no inverse was read
            return without
        entries[name] = part[name].to(block.weight.device, solves.options.inv_dtype, copy=True)
    damping, trace, option, scaled = part[INVERSE_DAMPING].tolist()
    if scaled != solves.scaled:
        return without
    state = replace(state, damping=damping, trace=trace, option=option)
    return LoadedInverse(state, solves.solver.inverse(entries))


def loaded_snapshot(part: Mapping[str, Any], block: KroneckerBlock) -> Solve | None:
    """The inverse that was being computed for a layer, or None if there was none.

    Its factors are None if the checkpoint lacks them.
    """
    step = int(part.get(SNAPSHOT_STEP, -1))
    if step < 0:
        return None
    entries = {n.removeprefix("snapshot_"): part[n] for n in SNAPSHOT_TENSORS if n in part}
    factors = None
    needed = (*block.shape.letters, MEANS)
    if WEIGHT in part and all(name in entries for name in needed):
        factors = block.read_factors({**entries, WEIGHT: part[WEIGHT]})
    damping, mean_curvature = (float(part.get(name, 0.0)) for name in SNAPSHOT_NUMBERS)
    return Solve(step, damping, mean_curvature, factors=factors)


def check_saved(
    saved: Mapping[Tensor, SavedPart], blocks: Sequence[KroneckerBlock], solver: Solver
) -> None:
    """Raise ValueError unless all entries are known and finite, and tensors fit their layers.

    A layer that is frozen may have been saved with its bias, and one that has no block here with
    any sizes: of such layers, factors that do not fit are not loaded.
    """
    block_of: dict[Tensor, KroneckerBlock] = {block.weight: block for block in blocks}
    shared: dict[str, float] = {}
    for p, part in saved.items():
        part.check_known(KNOWN)
        for key, value in part.items():
            if key in HEADER:
                continue
            if key == LAST_STEP:
                _check_last_step(part, p)
            elif isinstance(value, Tensor) and value.dim():
                part.tensor(key, SIZES.get(key))
            else:
                number = part.whole(key, 0) if key in WHOLE else part.number(key)
                if key in SHARED and shared.setdefault(key, number) != number:
                    raise part.wrong(
                        key, f"is {number:g}, and {shared[key]:g} for another parameter"
                    )
        block = block_of.get(p)
        if block is not None and (block.trainable or not block.misfit(part)):
            _check_shapes(part, block, solver)


def _check_shapes(part: SavedPart, block: KroneckerBlock, solver: Solver) -> None:
    """Raise ValueError unless factors, inverse and snapshot have the layer's shapes."""
    if part.keys() & {*LETTERS, MEANS, EXAMPLES}:
        part.require([WEIGHT, MEANS])
    snapshot = {n.removeprefix("snapshot_"): part[n] for n in SNAPSHOT_TENSORS if n in part}
    misfit = block.misfit(part) or block.misfit(snapshot)
    if misfit:
        raise ValueError(misfit)
    shapes: dict[str, tuple[int, ...]] = {MEANS: (block.shape.numbers, block.shape.groups)}
    shapes[SNAPSHOT_MEANS] = shapes[MEANS]
    if block.trainable:
        shapes |= solver.saved_shapes(block.shape)
    for name in part.keys() & shapes.keys():
        part.tensor(name, tuple(shapes[name]))


def _check_last_step(part: SavedPart, p: Tensor) -> None:
    """Raise CheckpointError unless the last step of a parameter, or its rows here, fit it."""
    value = part[LAST_STEP]
    if is_dtensor(value) and value.shape == p.shape:
        part.with_entry(LAST_STEP, local(value)).tensor(LAST_STEP)
    else:
        part.tensor(LAST_STEP, tuple(p.shape))

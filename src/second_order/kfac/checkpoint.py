"""Factors in checkpoints, and the transfer of factors between ranks.

Moving and gathering are collectives. Every rank calls them with the same layers, and their messages
depend only on what all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from second_order.contract.checkpoint import HEADER
from second_order.contract.saved import SavedPart
from second_order.contract.throttle import THROTTLE
from second_order.contract.training import Training
from second_order.distributed.world import Parts, Shapes, World, deliver_parts
from second_order.kfac.feedback import LAST_STEP, LAST_STEP_KNOWN, STEP_LENGTH, STEP_SIGN
from second_order.kfac.layers import Layers
from second_order.kfac.plan import Item, LayerPlan
from second_order.kfac.precondition import USUAL_CHANGE
from second_order.kfac.saved_inverses import (
    DAMPING,
    INVERSE_DAMPING,
    INVERSE_NUMBERS,
    SNAPSHOT_TENSORS,
    WHOLE_NUMBERS,
    check_saved_inverse,
)
from second_order.kfac.schedule import DRIFT, DRIFT_LEAST, UPDATED_AT
from second_order.kfac.trace_rule import SETTLED, TRACE
from second_order.kronecker.block import AGREED_STATE, PASS_HISTORY, KroneckerBlock
from second_order.kronecker.solvers import INVERSE_ENTRIES
from second_order.sharded import is_dtensor, local

__all__ = [
    "CHOSEN",
    "FACTORS_AND_STEPS",
    "MEAN_CURVATURE",
    "NEWLY_TRAINABLE_AT",
    "READ_BY_ALL",
    "check_saved_factors",
    "gather_factors",
    "load_factors",
    "loaded_workers",
    "move_factors",
    "saved_factors",
    "shared_number",
]

LETTERS = ("A", "G", "L")
WEIGHT, MEANS, EXAMPLES = "average_weight", "mean_eigenvalues", "examples"
CHOSEN = ("gradient_workers", "gradient_workers_of")
MEAN_CURVATURE = "mean_curvature"
NEWLY_TRAINABLE_AT = "newly_trainable_at"
ALIKE = (
    *(MEAN_CURVATURE, *STEP_LENGTH, *USUAL_CHANGE, *THROTTLE),
    *(UPDATED_AT, NEWLY_TRAINABLE_AT, DAMPING),
)
"""Entries that are the same in the parts of all layers."""

WHOLE: dict[str, tuple[int, ...]] = {
    SETTLED: (0, 1),
    **dict.fromkeys((*DRIFT, DRIFT_LEAST, UPDATED_AT), (0,)),
    **dict.fromkeys((*THROTTLE[:2], *CHOSEN), (0,)),
    **dict.fromkeys((*AGREED_STATE[:2], LAST_STEP_KNOWN), (0, 1)),
    AGREED_STATE[2]: (0,),
    NEWLY_TRAINABLE_AT: (-1,),
    **WHOLE_NUMBERS,
}
"""Entries that are whole numbers, and their bounds."""

LEAST = {STEP_SIGN: -math.inf, DAMPING: -1.0}
"""Bounds of other numbers, where they are not 0."""

READ_BY_ALL = (
    *(WEIGHT, MEANS, EXAMPLES, SETTLED, *DRIFT, DRIFT_LEAST, *ALIKE, *CHOSEN, *AGREED_STATE),
    *(*INVERSE_NUMBERS, LAST_STEP_KNOWN),
)
"""The entries that every rank reads, including ranks that do not keep the layer's factors."""

SIZES = {PASS_HISTORY: (4,), TRACE: (2,), INVERSE_DAMPING: (2,)}
"""Tensors of a few numbers, and their shapes."""

NOT_NEGATIVE = (PASS_HISTORY, INVERSE_DAMPING)
"""Those of them without negative numbers; an unknown trace is -1."""

FACTORS_AND_STEPS = (*LETTERS, LAST_STEP)
"""Large tensors that loading copies, so that the checkpoint's own can be freed."""

TENSORS = (*LETTERS, MEANS, *INVERSE_ENTRIES, *SNAPSHOT_TENSORS, LAST_STEP, *SIZES)


def saved_factors(
    layers: Layers,
    taken: Callable[[KroneckerBlock], bool],
    common: Mapping[str, Any],
    of_layers: Sequence[Any],
) -> dict[Tensor, dict[str, Any]]:
    """The factors that this process keeps, by the layers' weights; shared, not copied."""
    active = set(layers.active)
    found: dict[Tensor, dict[str, Any]] = {}
    for block in layers.blocks:
        if block in active or block.factors is not None:
            part = found[block.weight] = {**common}
            part |= block.state.agreed()
            if taken(block):
                part |= block.saved_factors()
            for each in of_layers:
                part |= each.saved(block)
    return found


def shared_number(saved: Mapping[Tensor, SavedPart], key: str, otherwise: float) -> float:
    """A number that all layers have; ``otherwise`` if the checkpoint lacks it."""
    for part in saved.values():
        if key in part:
            return part.number(key)
    return otherwise


def loaded_workers(saved: Mapping[Tensor, SavedPart], ranks: int) -> int:
    """The number of gradient workers that was chosen for so many ranks, or 0."""
    found = next((part for part in saved.values() if part.keys() >= set(CHOSEN)), None)
    if found is None or found.whole(CHOSEN[1], 0) != ranks:
        return 0
    workers = found.whole(CHOSEN[0], 0)
    return workers if workers and ranks % workers == 0 else 0


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


def check_saved_factors(
    saved: Mapping[Tensor, SavedPart], blocks: Sequence[KroneckerBlock]
) -> None:
    """Raise ValueError unless every part is sound, and those of layers that train fit them.

    A layer that is frozen may have been saved with its bias, and one that has no block here with
    any sizes: of such layers, factors that do not fit are not loaded.
    """
    of: dict[Tensor, KroneckerBlock] = {block.weight: block for block in blocks}
    tensors, alike = {*TENSORS}, {*ALIKE, *CHOSEN}
    known: dict[str, float] = {}
    for p, part in saved.items():
        part.check_known((*HEADER, *TENSORS, *READ_BY_ALL))
        if part.keys() & {*LETTERS, MEANS, EXAMPLES}:
            part.require([WEIGHT, MEANS])
        if LAST_STEP in part:
            _check_last_step(part, p)
        for key in part.keys() - {*HEADER, LAST_STEP}:
            if key in tensors:
                numbers = part.tensor(key, SIZES.get(key))
                if key in NOT_NEGATIVE and float(numbers.min()) < 0:
                    raise part.wrong(key, f"is {numbers.tolist()}, where no number may be below 0")
                continue
            if key in WHOLE:
                value = float(part.whole(key, *WHOLE[key]))
            else:
                value = part.number(key, LEAST.get(key, 0.0))
            if key in alike and known.setdefault(key, value) != value:
                raise part.wrong(key, f"is {value:g}, and {known[key]:g} for another parameter")
        block = of.get(p)
        # A frozen layer's bias is not in its A yet: factors that do not fit are not loaded.
        if block is not None and (block.trainable or not block.misfit(part)):
            if misfit := block.misfit(part):
                raise ValueError(misfit)
            if MEANS in part:
                part.tensor(MEANS, (block.shape.numbers, block.shape.groups))
            if block.trainable:
                check_saved_inverse(part, block)


def _check_last_step(part: SavedPart, p: Tensor) -> None:
    """Raise CheckpointError unless the last step of a parameter, or its rows here, fit it."""
    value = part[LAST_STEP]
    if is_dtensor(value) and value.shape == p.shape:
        part = part.with_entry(LAST_STEP, local(value))
        part.tensor(LAST_STEP)
    else:
        part.tensor(LAST_STEP, tuple(p.shape))


def move_factors(
    world: World,
    plan: Mapping[KroneckerBlock, LayerPlan],
    before: Mapping[KroneckerBlock, LayerPlan],
) -> None:
    """Send the factors of layers whose keepers have changed to the new keepers."""
    routes: dict[Item, tuple[int, Sequence[int]]] = {}
    for block, layer in plan.items():
        for letter in block.shape.letters:
            old = before[block].keeper(letter) if block in before else None
            new = layer.keeper(letter)
            if old is not None and new is not None and old != new:
                routes[block, letter] = old, [new]
    received = _deliver_factors(world, routes)
    for block in before.keys() - plan.keys():  # they do not train
        block.keep(block.held)
    for block, layer in plan.items():
        block.keep(layer.keeps(world.rank))
        for letter in block.shape.letters:
            if (block, letter) in received:
                factors, parts = block.ensure_factors(), received[block, letter]
                factors.stored[letter] = parts.get(letter)
                factors.weight.copy_(parts[WEIGHT])
                factors.means.copy_(parts[MEANS])
                factors.examples.copy_(parts[EXAMPLES])


def gather_factors(
    world: World,
    plan: Mapping[KroneckerBlock, LayerPlan],
    to: Callable[[LayerPlan], Sequence[int]],
) -> dict[KroneckerBlock, dict[str, Tensor]]:
    """Collect copies of the factors that other ranks keep, by layer and letter, on a layer's ranks.

    A factor that its keeper has lost is missing.
    """
    routes = {
        (block, letter): (keeper, to(layer))
        for block, layer in plan.items()
        for letter in block.shape.letters
        if (keeper := layer.keeper(letter)) is not None and {*to(layer)} != {keeper}
    }
    found: dict[KroneckerBlock, dict[str, Tensor]] = {}
    for (block, _), parts in _deliver_factors(world, routes).items():
        found[block] = parts | found.get(block, {})
    return found


def _deliver_factors(
    world: World, routes: Mapping[Item, tuple[int, Sequence[int]]]
) -> dict[Item, dict[str, Tensor]]:
    """Send factors along routes; returns the entries of those arrived here, without lost factors.

    Weights, means and numbers of examples travel in float32 at least, and so not with the factors.
    """
    places = sorted({(b.factor_dtype, b.weight.device) for b, _ in routes}, key=str)
    received: dict[Item, dict[str, Tensor]] = {}
    for dtype, device in places:
        chosen = {
            (block, which): route
            for (block, which), route in routes.items()
            if (block.factor_dtype, block.weight.device) == (dtype, device)
        }
        wide = torch.promote_types(dtype, torch.float32)
        head_shapes: dict[Item, Shapes] = {}
        shapes: dict[Item, Shapes] = {}
        my_heads: dict[Item, Parts] = {}
        mine: dict[Item, Parts] = {}
        for (block, which), (source, _) in chosen.items():
            head_shapes[block, which] = (), (), (block.shape.numbers, block.shape.groups), ()
            shapes[block, which] = (block.stored_shapes[which],)
            if source != world.rank:
                continue
            factors, stored = block.ensure_factors(), block.stored(which)
            kept = torch.tensor(float(stored is not None), dtype=wide, device=device)
            my_heads[block, which] = kept, factors.weight, factors.means, factors.examples
            if stored is not None:  # otherwise zeros are sent
                mine[block, which] = (stored,)
        heads = deliver_parts(world, head_shapes, chosen, my_heads, wide, device)
        arrived = deliver_parts(world, shapes, chosen, mine, dtype, device)
        for key, (source, destinations) in chosen.items():
            if source != world.rank and world.rank in destinations:
                kept, *others = (head.clone() for head in heads[key])
                received[key] = dict(zip((WEIGHT, MEANS, EXAMPLES), others, strict=True))
                if bool(kept):
                    received[key][key[1]] = arrived[key][0].clone()
    return received

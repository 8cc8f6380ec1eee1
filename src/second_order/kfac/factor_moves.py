"""Factors that only one process keeps: who has them, how they move, how they come together.

Moving and gathering are collectives: every rank calls them with the same layers, and what is sent
depends on nothing that a rank alone knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.distributed.collectives import World
from second_order.distributed.parcels import Parts, Shapes, deliver_parts
from second_order.kronecker.block import KroneckerBlock

__all__ = [
    "Keepers",
    "gather_factors",
    "move_factors",
]

Keepers: TypeAlias = tuple[int, int] | None
"""The ranks that keep A and G of a layer; None if every rank keeps both."""


def move_factors(
    world: World,
    blocks: Sequence[KroneckerBlock],
    before: Mapping[KroneckerBlock, Keepers],
    after: Mapping[KroneckerBlock, Keepers],
) -> None:
    """Take the factors of layers whose keepers have changed to the new ones.

    Args:
        world: The processes.
        blocks: The layers, in the same order on every rank.
        before: The keepers that a layer has had, if it had any.
        after: Those that it has from now on.
    """
    routes: dict[tuple[KroneckerBlock, str], tuple[int, Sequence[int]]] = {}
    for block in blocks:
        old, new = before.get(block), after[block]
        if old is None or new is None:
            continue
        for which in block.shape.letters:
            source, destination = old[which == "G"], new[which == "G"]
            if source != destination:
                routes[block, which] = source, [destination]
    received = _deliver_factors(world, routes)
    for block in blocks:
        keepers = after[block]
        held = (True, True) if keepers is None else tuple(rank == world.rank for rank in keepers)
        block.keep((held[0], held[1]))
        for which in block.shape.letters:
            if (block, which) in received:
                factors, (factor, weight, means) = block.ensure_factors(), received[block, which]
                factors.stored[which] = factor
                factors.weight.copy_(weight)
                factors.means.copy_(means)


def gather_factors(
    world: World, keepers: Mapping[KroneckerBlock, Keepers], to: int | None
) -> dict[KroneckerBlock, dict[str, Tensor]]:
    """Copies of the factors that other ranks keep.

    Args:
        world: The processes.
        keepers: Of every layer, in the same order on every rank.
        to: The rank that wants them; None if all do.

    Returns:
        By layer, what this rank does not keep itself, under "A" and "G"; nothing where ``to`` is
        another rank. A factor that its keeper has lost is missing.
    """
    destinations = range(world.size) if to is None else [to]
    routes = {
        (block, which): (ranks[which == "G"], destinations)
        for block, ranks in keepers.items()
        if ranks is not None
        for which in block.shape.letters
    }
    found: dict[KroneckerBlock, dict[str, Tensor]] = {}
    for (block, which), (factor, weight, means) in _deliver_factors(world, routes).items():
        parts = found.setdefault(block, {"average_weight": weight, "mean_eigenvalues": means})
        if factor is not None:
            parts[which] = factor
    return found


_Item: TypeAlias = tuple[KroneckerBlock, str]


def _deliver_factors(
    world: World, routes: Mapping[_Item, tuple[int, Sequence[int]]]
) -> dict[_Item, tuple[Tensor | None, Tensor, Tensor]]:
    """What has arrived here, by layer and factor: it, or None if it is lost, its weight and means.

    Weights and means travel in float32 at least, and so not with the factors.
    """
    places = sorted({(b.factor_dtype, b.weight.device) for b, _ in routes}, key=str)
    received: dict[_Item, tuple[Tensor | None, Tensor, Tensor]] = {}
    for dtype, device in places:
        chosen = {
            (block, which): route
            for (block, which), route in routes.items()
            if (block.factor_dtype, block.weight.device) == (dtype, device)
        }
        wide = torch.promote_types(dtype, torch.float32)
        head_shapes: dict[_Item, Shapes] = {}
        shapes: dict[_Item, Shapes] = {}
        my_heads: dict[_Item, Parts] = {}
        mine: dict[_Item, Parts] = {}
        for (block, which), (source, _) in chosen.items():
            head_shapes[block, which] = (), (), (len(block.shape.letters), block.shape.groups)
            shapes[block, which] = (block.stored_shape(which),)
            if source != world.rank:
                continue
            factors, stored = block.ensure_factors(), block.stored(which)
            kept = torch.tensor(float(stored is not None), dtype=wide, device=device)
            my_heads[block, which] = kept, factors.weight, factors.means
            if stored is not None:  # otherwise zeros are sent
                mine[block, which] = (stored,)
        heads = deliver_parts(world, head_shapes, chosen, my_heads, wide, device)
        arrived = deliver_parts(world, shapes, chosen, mine, dtype, device)
        for key, (source, destinations) in chosen.items():
            if source != world.rank and world.rank in destinations:
                kept, weight, means = heads[key]
                factor = arrived[key][0].clone() if bool(kept) else None
                received[key] = factor, weight.clone(), means.clone()
    return received

"""Factors that only one process keeps: how they move, and how they are gathered.

Moving and gathering are collectives: every rank calls them with the same layers, and what is sent
depends on nothing that a rank alone knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.distributed.world import Parts, Shapes, World, deliver_parts
from second_order.kfac.plan import LayerPlan
from second_order.kronecker.block import KroneckerBlock

__all__ = ["gather_factors", "move_factors"]


def move_factors(
    world: World,
    plan: Mapping[KroneckerBlock, LayerPlan],
    before: Mapping[KroneckerBlock, LayerPlan],
) -> None:
    """Send the factors of layers whose keepers have changed to the new keepers.

    Args:
        world: The processes.
        plan: The plan of the layers, in the same order on every rank.
        before: The plan before this one, of the layers that had one.
    """
    routes: dict[_Item, tuple[int, Sequence[int]]] = {}
    for block, layer in plan.items():
        for letter in block.shape.letters:
            old = before[block].keeper(letter) if block in before else None
            new = layer.keeper(letter)
            if old is not None and new is not None and old != new:
                routes[block, letter] = old, [new]
    received = _deliver_factors(world, routes)
    for block, layer in plan.items():
        block.keep(layer.keeps(world.rank))
        for which in block.shape.letters:
            if (block, which) in received:
                factors = block.ensure_factors()
                factor, weight, means, examples = received[block, which]
                factors.stored[which] = factor
                factors.weight.copy_(weight)
                factors.means.copy_(means)
                factors.examples.copy_(examples)


def gather_factors(
    world: World, plan: Mapping[KroneckerBlock, LayerPlan], ranks: Sequence[int]
) -> dict[KroneckerBlock, dict[str, Tensor]]:
    """Collect copies of the factors that other ranks keep.

    Args:
        world: The processes.
        plan: The plan of every layer, in the same order on every rank.
        ranks: The ranks that want the factors.

    Returns:
        By layer, the factors that this rank does not keep, under "A" and "G"; empty on ranks not
        in ``ranks``. A factor that its keeper has lost is missing.
    """
    routes = {
        (block, letter): (keeper, ranks)
        for block, layer in plan.items()
        for letter in block.shape.letters
        if (keeper := layer.keeper(letter)) is not None
    }
    found: dict[KroneckerBlock, dict[str, Tensor]] = {}
    arrived = _deliver_factors(world, routes)
    for (block, letter), (factor, weight, means, examples) in arrived.items():
        heads = {"average_weight": weight, "mean_eigenvalues": means, "examples": examples}
        parts = found.setdefault(block, heads)
        if factor is not None:
            parts[letter] = factor
    return found


_Item: TypeAlias = tuple[KroneckerBlock, str]
_Arrived: TypeAlias = tuple[Tensor | None, Tensor, Tensor, Tensor]


def _deliver_factors(
    world: World, routes: Mapping[_Item, tuple[int, Sequence[int]]]
) -> dict[_Item, _Arrived]:
    """Send factors along routes; returns those arrived here, None if lost, each with three heads.

    Weights, means and numbers of examples travel in float32 at least, and so not with the factors.
    """
    places = sorted({(b.factor_dtype, b.weight.device) for b, _ in routes}, key=str)
    received: dict[_Item, _Arrived] = {}
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
            head_shapes[block, which] = (), (), (len(block.shape.letters), block.shape.groups), ()
            shapes[block, which] = (block.stored_shape(which),)
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
                kept, *others = heads[key]
                factor = arrived[key][0].clone() if bool(kept) else None
                weight, means, examples = (head.clone() for head in others)
                received[key] = factor, weight, means, examples
    return received

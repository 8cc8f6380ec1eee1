"""Factors that only one process keeps: who has them, how they move, how they come together.

With few exceptions every function here is a collective: every rank calls it with the same layers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.distributed.collectives import World
from second_order.distributed.parcels import Parts, Shapes, deliver_parts
from second_order.kronecker.block import KroneckerBlock

__all__ = ["Keepers", "gather_factors", "is_sharded_checkpoint", "move_factors"]

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
        if block.factors is None or old is None or new is None:
            continue
        for which, source, destination in zip("AG", old, new, strict=True):
            if source != destination:
                routes[block, which] = source, [destination]
    received = _deliver_factors(world, routes)
    for block in blocks:
        keepers = after[block]
        held = (True, True) if keepers is None else tuple(rank == world.rank for rank in keepers)
        block.keep((held[0], held[1]))
        for which in "AG":
            if (block, which) in received and block.factors is not None:
                setattr(block.factors, which.lower(), received[block, which])


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
        (block, which): (source, destinations)
        for block, ranks in keepers.items()
        if ranks is not None and block.factors is not None
        for which, source in zip("AG", ranks, strict=True)
    }
    found: dict[KroneckerBlock, dict[str, Tensor]] = {}
    for (block, which), factor in _deliver_factors(world, routes).items():
        if factor is not None:
            found.setdefault(block, {})[which] = factor
    return found


def _deliver_factors(
    world: World, routes: Mapping[tuple[KroneckerBlock, str], tuple[int, Sequence[int]]]
) -> dict[tuple[KroneckerBlock, str], Tensor | None]:
    """What has arrived here, by layer and factor; None for what its keeper has lost."""
    kinds = {(block.factor_dtype, block.weight.device) for block, _ in routes}
    received: dict[tuple[KroneckerBlock, str], Tensor | None] = {}
    for dtype, device in sorted(kinds, key=str):
        chosen = {
            key: route
            for key, route in routes.items()
            if (key[0].factor_dtype, key[0].weight.device) == (dtype, device)
        }
        shapes: dict[tuple[KroneckerBlock, str], Shapes] = {}
        mine: dict[tuple[KroneckerBlock, str], Parts] = {}
        for (block, which), (source, _) in chosen.items():
            shapes[block, which] = ((), block.stored_shape(which))
            stored = block.stored(which) if source == world.rank else None
            if stored is not None:  # a factor that is lost arrives as zeros, its mark among them
                mine[block, which] = torch.ones((), dtype=dtype, device=device), stored
        everything = deliver_parts(world, shapes, chosen, mine, dtype, device)
        for key, (mark, factor) in everything.items():
            if key not in mine:
                received[key] = factor.clone() if bool(mark) else None
    return received


def is_sharded_checkpoint() -> bool:
    """Whether ``state_dict`` is being asked by torch.distributed.checkpoint for this rank's part.

    It is not where the caller has asked for the full state on one rank.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            return not getattr(frame.f_locals.get("info"), "full_state_dict", False)
        frame = frame.f_back
    return False

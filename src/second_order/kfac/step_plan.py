"""What this rank does at a step, as data: compiled where layers change, looped over by steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.distributed.assignment import Grid
from second_order.distributed.world import (
    Parts,
    PendingReduction,
    Shapes,
    World,
    deliver_parts,
)
from second_order.kfac.plan import LayerPlan
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.gradient import GradientBlock

__all__ = ["Item", "StepPlan", "compile_step", "sum_statistics"]

Item: TypeAlias = tuple[KroneckerBlock, str]
"""A factor of a layer, by its letter."""


@dataclass(frozen=True)
class StepPlan:
    """What this rank does at a step.

    Attributes:
        layers: The plan of each layer that trains.
        row: The ranks that precondition the same layers as this one.
        column: The ranks that this one exchanges preconditioned gradients with, one of each row.
        wire: Dtype in which decompositions travel; None for their own.
        taken: The layers into whose factors the passes of this rank go.
        of_gradients: The layers whose factors are made of gradients.
        to_send: Of the layers that this row preconditions, by factor, the position in the row of
            the rank that solves it.
        results: Of all layers, by the dtype of their gradients, the row that preconditions each.
    """

    layers: Mapping[KroneckerBlock, LayerPlan]
    row: World
    column: World
    wire: torch.dtype | None = None
    taken: Sequence[KroneckerBlock] = ()
    of_gradients: Sequence[GradientBlock] = ()
    to_send: Mapping[Item, int] = field(default_factory=dict)
    results: Mapping[torch.dtype, Mapping[KroneckerBlock, int]] = field(default_factory=dict)

    @property
    def rounding(self) -> torch.dtype | None:
        """The dtype to which solvers round decompositions, as they are by travelling.

        None where they do not travel, or in their own dtype.
        """
        return self.wire if self.row.size > 1 else None

    def give_decompositions(
        self,
        mine: Mapping[Item, Parts],
        shapes: Mapping[Item, Shapes],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[Item, Parts]:
        """Give every gradient worker the decompositions of its layers.

        Args:
            mine: The decompositions that this rank has computed.
            shapes: Shapes of the parts of all factors solved, the same on every rank.
            dtype: Dtype of decompositions.
            device: The device that is to have the decompositions.
        """
        if self.row.size == 1:
            return dict(mine)
        everybody = range(self.row.size)
        routes = {item: (self.to_send[item], everybody) for item in shapes if item in self.to_send}
        return deliver_parts(self.row.wired(self.wire), shapes, routes, mine, dtype, device)


def compile_step(
    world: World,
    grid: Grid,
    layers: Mapping[KroneckerBlock, LayerPlan],
    wire: torch.dtype | None,
    takes: Callable[[KroneckerBlock], bool],
) -> StepPlan:
    """List what this rank does; a collective, for the groups of its row and its column.

    Args:
        world: The ranks.
        grid: The grid of ranks; a row of it preconditions a layer.
        layers: The plan of each layer that trains.
        wire: Dtype in which decompositions travel; None for their own.
        takes: Tells whether this rank's batches go into a layer's factors.
    """
    here = grid.row(grid.row_of(world.rank))
    results: dict[torch.dtype, dict[KroneckerBlock, int]] = {}
    for block, layer in layers.items():
        row = layer.workers[0] // len(layer.workers)
        results.setdefault(block.work_dtype, {})[block] = row
    return StepPlan(
        layers,
        world.subgroup(here),
        world.subgroup(grid.column(grid.column_of(world.rank))),
        wire,
        [block for block in layers if block.watched and takes(block)],
        [block for block in layers if isinstance(block, GradientBlock)],
        {
            (block, letter): here.index(layer.solver(letter))
            for block, layer in layers.items()
            if layer.workers == here
            for letter in block.shape.letters
        },
        results,
    )


def sum_statistics(
    world: World,
    layers: Mapping[KroneckerBlock, LayerPlan],
    sums: Mapping[KroneckerBlock, StatisticsSums],
    wire: torch.dtype | None = None,
) -> None:
    """Add statistics over the ranks that contribute, in place.

    Args:
        world: The ranks.
        layers: The plan of each layer.
        sums: Sums of the layers whose statistics this rank takes.
        wire: Dtype in which factors' sums travel; None for their own.
    """
    alike = [(layers[b], each) for b, each in sums.items() if layers[b].source is None]
    heads = [[(each.head, None)] for _, each in alike]
    factors = [[(t, layer.keeper(k)) for k, t in each.factors.items()] for layer, each in alike]
    if wire is None:
        pairs = zip(heads, factors, strict=True)
        _start(world, [one for head, rest in pairs for one in (*head, *rest)]).wait()
        return
    both = (  # numbers of examples are not rounded
        _start(world, [one for head in heads for one in head]),
        _start(world.wired(wire), [one for rest in factors for one in rest]),
    )
    for pending in both:
        pending.wait()


def _start(world: World, sums: Sequence[tuple[Tensor, int | None]]) -> PendingReduction:
    """Start to add tensors for the rank that keeps each, or for all ranks."""
    tensors, keepers = [tensor for tensor, _ in sums], [keeper for _, keeper in sums]
    if any(keeper is not None for keeper in keepers):
        return world.reduce(tensors, keepers)
    return world.all_reduce(tensors)

"""A plan carried out between ranks: statistics, decompositions, preconditioned gradients.

statistics       heads for all ranks, factors for those that keep them, summed
decompositions   from a factor's solver to the layer's gradient workers: along a row of the grid
gradients        from a gradient worker to the receivers of its own column; or, where layers have
                 owners, in ``p.grad`` itself, with each rank's part of the clip's sum
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.averaging import Routed
from second_order.contract.training import Training
from second_order.distributed.assignment import Grid
from second_order.distributed.collectives import PendingReduction, World
from second_order.distributed.parcels import Parts, Shapes, deliver_parts
from second_order.kfac.clip import Clip, kl_clip_coefficient
from second_order.kfac.plan import LayerPlan, gradient_owners
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums

__all__ = ["Exchange", "Item", "OwnerGradients", "ResultGradients"]

Item: TypeAlias = tuple[KroneckerBlock, str]
"""A factor of a layer, by its letter."""


class Exchange:
    """Collectives between ranks for statistics and decompositions, and the ranks of a column.

    Args:
        world: The ranks. Every rank asks for the groups of its row and its column here.
        grid: The grid of ranks; a row of it preconditions a layer.
        layers: The plan of each layer that trains.
        wire: Dtype in which decompositions travel; None for their own.

    Attributes:
        column: The ranks of this rank's column.
        rounding: The dtype to which decompositions are rounded on their solvers, as they are by
            travelling; None where they do not travel, or in their own dtype.
    """

    def __init__(
        self,
        world: World,
        grid: Grid,
        layers: Mapping[KroneckerBlock, LayerPlan],
        wire: torch.dtype | None = None,
    ) -> None:
        self._world, self._grid, self._layers, self._wire = world, grid, layers, wire
        self._row = world.subgroup(grid.row(grid.row_of(world.rank)))
        self.rounding = wire if self._row.size > 1 else None
        self.column = world.subgroup(grid.column(grid.column_of(world.rank)))

    def statistics(
        self, sums: Mapping[KroneckerBlock, StatisticsSums], wire: torch.dtype | None = None
    ) -> None:
        """Add statistics over the ranks that contribute, in place.

        Args:
            sums: Sums of the layers whose statistics this rank takes.
            wire: Dtype in which factors' sums travel; None for their own.
        """
        if wire is None:
            self._summed(self._world, sums, heads=True, factors=True).wait()
            return
        both = (  # numbers of examples are not rounded
            self._summed(self._world, sums, heads=True, factors=False),
            self._summed(self._world.wired(wire), sums, heads=False, factors=True),
        )
        for pending in both:
            pending.wait()

    def _summed(
        self,
        world: World,
        sums: Mapping[KroneckerBlock, StatisticsSums],
        *,
        heads: bool,
        factors: bool,
    ) -> PendingReduction:
        """Start to sum heads for all ranks, or factors for those that keep them, or both."""
        tensors: list[Tensor] = []
        keepers: list[int | None] = []
        for block, each in sums.items():
            layer = self._layers[block]
            if layer.source is not None:
                continue
            if heads:
                tensors.append(each.head)
                keepers.append(None)
            if factors:
                tensors += each.factors.values()
                keepers += map(layer.keeper, each.factors)
        if any(keeper is not None for keeper in keepers):
            return world.reduce(tensors, keepers)
        return world.all_reduce(tensors)

    def decompositions(
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
            dtype: Dtype in which decompositions are sent.
            device: The device that is to have the decompositions.
        """
        if self._row.size == 1:
            return dict(mine)
        here = self._grid.row(self._grid.row_of(self._world.rank))
        routes = {
            (block, letter): (here.index(self._layers[block].solver(letter)), range(len(here)))
            for block, letter in shapes
            if self._layers[block].workers == here
        }
        row = self._row.wired(self._wire)
        return deliver_parts(row, shapes, routes, mine, dtype, device)


def preconditioned(
    layers: Iterable[KroneckerBlock], dtype: torch.dtype, *, wants_all: bool
) -> tuple[dict[KroneckerBlock, Tensor], dict[KroneckerBlock, Tensor]]:
    """P of the layers that this rank preconditions, and ∇ of those that have a gradient here.

    Args:
        layers: The layers; those that are not solved do not count.
        dtype: The dtype of the inverses.
        wants_all: Whether a layer without a gradient has a P, too: others expect it.
    """
    found = {block: block.gradient(block.work_dtype) for block in layers if block.solved}
    mine = {
        block: block.precondition(gradient, dtype)
        for block, gradient in found.items()
        if block.inverse is not None and (wants_all or gradient is not None)
    }
    return mine, {block: g for block, g in found.items() if g is not None}


class ResultGradients:
    """Preconditioned gradients that gradient workers send to the other ranks.

    Every rank has the mean gradients, gets all results, and clips by itself.

    Attributes:
        coefficient: ν of the last step, a scalar; None where nothing was clipped.
    """

    def __init__(self, training: Training, clip: Clip) -> None:
        self._training, self._clip = training, clip
        self.coefficient: Tensor | None = None

    def route(
        self,
        layers: Mapping[KroneckerBlock, LayerPlan],
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> Routed:
        """None: all ranks get the mean of all gradients."""
        return None

    def follow_moved(self, layers: Mapping[KroneckerBlock, LayerPlan]) -> None:
        """Do nothing: no gradient is at one rank alone."""

    def precondition(
        self,
        layers: Mapping[KroneckerBlock, LayerPlan],
        exchange: Exchange,
        dtype: torch.dtype,
    ) -> None:
        """Precondition, exchange the results, clip them, and write them to the gradients.

        Args:
            layers: The plan of each layer.
            exchange: The collectives between the ranks.
            dtype: The dtype of the inverses.
        """
        self.coefficient = None
        mine, gradients = preconditioned(layers, dtype, wants_all=True)
        with self._training.meter.stage("exchange"):
            results = self._exchanged(layers, exchange.column, mine)
        if not gradients:
            return
        with self._training.meter.stage("clip"):
            chosen = {block: results[block] for block in gradients}
            if (bound := self._clip.bound()) is not None:
                self.coefficient = kl_clip_coefficient(self._clip.change(chosen, gradients), bound)
            for block, result in chosen.items():
                block.write_gradient(result, _on(self.coefficient, result))

    def _exchanged(
        self,
        layers: Mapping[KroneckerBlock, LayerPlan],
        column: World,
        mine: Mapping[KroneckerBlock, Tensor],
    ) -> dict[KroneckerBlock, Tensor]:
        if column.size == 1:
            return dict(mine)
        results: dict[KroneckerBlock, Tensor] = {}
        solved = [block for block in layers if block.solved]
        for dtype in dict.fromkeys(block.work_dtype for block in solved):
            alike = [block for block in solved if block.work_dtype == dtype]
            # A column has one rank of each row: the one that is among the layer's workers.
            routes = {b: (_row_of(layers[b]), range(column.size)) for b in alike}
            shapes = {b: _flat(b) for b in alike}
            ours = {b: (mine[b],) for b in alike if b in mine}
            device = self._training.device
            received = deliver_parts(column, shapes, routes, ours, dtype, device)
            results.update({block: parts[0] for block, parts in received.items()})
        return results


def _flat(block: KroneckerBlock) -> Shapes:
    return (block.shape.gradient_size,)


def _row_of(layer: LayerPlan) -> int:
    return layer.workers[0] // len(layer.workers)


def _on(coefficient: Tensor | None, result: Tensor) -> Tensor | float:
    return 1.0 if coefficient is None else coefficient.to(result.device, result.dtype)


class OwnerGradients:
    """Gradients that go to their owners, and come back preconditioned.

    Args:
        training: The training that the gradients are of.
        clip: The clip of the steps.
        only_to_owners: Whether a mean gradient goes to its owner alone; to all ranks otherwise.

    Attributes:
        hooked: Whether DistributedDataParallel sends gradients to their owners.
        coefficient: ν of the last step, a scalar; None where nothing was clipped.
    """

    def __init__(self, training: Training, clip: Clip, *, only_to_owners: bool) -> None:
        self._training, self._clip = training, clip
        self.only_to_owners = only_to_owners
        self.hooked = False
        self.coefficient: Tensor | None = None
        self._summed_to: dict[Tensor, int] = {}  # since the last step
        self._open: PendingReduction | None = None  # of the last bucket of this backward pass

    def route(
        self,
        layers: Mapping[KroneckerBlock, LayerPlan],
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> Routed:
        """Each mean gradient's rows and owner; None where all ranks get all gradients."""
        return (gradients, self._owners(layers, params)) if self.only_to_owners else None

    def _owners(
        self, layers: Mapping[KroneckerBlock, LayerPlan], params: Sequence[Tensor]
    ) -> list[int]:
        """The owner of each gradient, in a layer or not."""
        owner_of = {id(p): layer.workers[0] for b, layer in layers.items() for p in b.params}
        owners = [owner_of.get(id(p)) for p in params]
        return gradient_owners([p.numel() for p in params], owners, self._training.world.size)

    def start_bucket(
        self, layers: Mapping[KroneckerBlock, LayerPlan], bucket: Any
    ) -> torch.futures.Future[Tensor]:
        """Let the means of a bucket of DistributedDataParallel come together on their owners."""
        averaged = self._training.averaged_params()
        owner_of = dict(zip(map(id, averaged), self._owners(layers, averaged), strict=True))
        gradients, params = bucket.gradients(), bucket.parameters()
        torch._foreach_div_(gradients, float(self._training.world.size))
        owners = [owner_of.get(id(p), 0) for p in params]  # 0: frozen since DDP was made
        self._summed_to |= zip(params, owners, strict=True)
        # Buckets come in the same order on every rank, and second messages with the next of them.
        if self._open is not None and bucket.index() > 0:
            self._open.go_on()
        summed = self._training.world.reduce(gradients, owners)
        if self._training.world.size == 1:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        done = summed.future().then(lambda _: bucket.buffer())
        self._open = None if bucket.is_last() else summed
        if bucket.is_last():
            summed.go_on()
        return done

    def follow_moved(self, layers: Mapping[KroneckerBlock, LayerPlan]) -> None:
        """Give all ranks the means that the hook took to ranks that own them no more."""
        if not self.hooked:
            return
        params = self._training.averaged_params()
        owners = dict(zip(params, self._owners(layers, params), strict=True))
        summed, self._summed_to = self._summed_to, {}
        moved = [(p.grad, rank) for p, rank in summed.items() if owners.get(p, rank) != rank]
        self._share([(grad, rank) for grad, rank in moved if grad is not None])

    def precondition(
        self,
        layers: Mapping[KroneckerBlock, LayerPlan],
        exchange: Exchange,
        dtype: torch.dtype,
    ) -> None:
        """Write the owners' results, send them to all with the clip's sums, and clip them.

        Args:
            layers: The plan of each layer.
            exchange: The collectives between the ranks.
            dtype: The dtype of the inverses.
        """
        mine, gradients = preconditioned(layers, dtype, wants_all=False)
        world, solved = self._training.world, [block for block in layers if block.solved]
        ranks = range(world.size)
        changes: list[Tensor] = []
        bound, self.coefficient = self._clip.bound(), None
        with self._training.meter.stage("clip"):
            if bound is not None:
                changes = self._clip.parts(world.size, self._training.device)
                here = {block: gradients[block] for block in mine}
                changes[world.rank].copy_(self._clip.change(mine, here))
            for block, result in mine.items():  # not yet clipped: the whole sum comes with it
                block.write_gradient(result, 1.0)
        with self._training.meter.stage("exchange"):
            self._share([*self._sent(layers, solved), *zip(changes, ranks, strict=False)])
        if bound is not None:
            with self._training.meter.stage("clip"):
                coefficient = kl_clip_coefficient(torch.stack(changes).sum(), bound)
                self.coefficient = coefficient
                for gradient in (p.grad for block in solved for p in block.params):
                    if gradient is not None:
                        gradient.mul_(_on(coefficient, gradient))

    def _sent(
        self, layers: Mapping[KroneckerBlock, LayerPlan], solved: Sequence[KroneckerBlock]
    ) -> list[tuple[Tensor, int]]:
        """The gradients to be sent back to all ranks, and the rank that sends each."""
        if self.hooked or (self._training.averages and self.only_to_owners):
            params = self._training.averaged_params()
            pairs = zip(params, self._owners(layers, params), strict=True)
            return [(p.grad, rank) for p, rank in pairs if p.grad is not None]
        # Gradients are means already, wherever nobody has preconditioned them.
        return [
            (torch.zeros_like(p) if p.grad is None else p.grad, layers[block].workers[0])
            for block in solved
            for p in block.params
        ]

    def _share(self, owned: Sequence[tuple[Tensor, int]]) -> None:
        if owned and self._training.world.size > 1:
            tensors, owners = zip(*owned, strict=True)
            self._training.world.broadcast(tensors, owners)

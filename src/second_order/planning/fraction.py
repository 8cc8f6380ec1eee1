"""KAISA's ``grad_worker_fraction="auto"``: the share of gradient workers that is fastest.

Only four stages depend on it: solves, their exchange, preconditioning and its exchange. The links
between the ranks are measured at construction, by all of them together; one rank measures its
machine for a fraction of a second, chooses, and tells the others. There is no batch yet that a step
could be recorded with: the four stages are estimated from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from second_order.contract.training import Training
from second_order.distributed.assignment import AssignmentCost
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import Planner, dims_of, kaisa_plan
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.model_blocks import find_blocks
from second_order.options import AUTO, value_at
from second_order.planning.calibration import DEFAULT_NETWORKS, measure_machine, measure_network
from second_order.planning.machine import Interconnect, Machine

__all__ = ["SIMILAR", "AutoFraction", "workers_of"]

SIMILAR = 0.03
"""Settings whose steps differ by less than this share count as equally fast: the model of time is
no better than that."""

USUAL = 10
"""Steps between refreshes where a budget is to choose them, later."""

FLOAT = torch.float32.itemsize


def workers_of(world_size: int, most: int = 8) -> list[int]:
    """Numbers of gradient workers that are compared: divisors of the number of ranks.

    All of them if they are few; else the largest and the smallest, and some evenly between.
    """
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if len(divisors) <= most:
        return divisors[::-1]
    last = len(divisors) - 1
    return [divisors[round(k * last / (most - 1))] for k in range(most)][::-1]


@dataclass(frozen=True)
class AutoFraction:
    """Chooses the number of gradient workers of KAISA, and plans with it.

    Attributes:
        options: The options that all systems share.
        cost: The cost that is balanced over the ranks.
        colocate: Whether one rank decomposes both factors of a layer.
        keeps_all: Whether every rank keeps every factor.
    """

    options: KFACOptions
    cost: AssignmentCost
    colocate: bool
    keeps_all: bool

    def planner(self, workers: int, ranks: int) -> Planner:
        """The planner with so many gradient workers for each layer."""
        return partial(
            kaisa_plan,
            fraction=workers / ranks,
            cost=self.cost,
            colocate=self.colocate,
            keeps_all=self.keeps_all,
        )

    def choose(self, training: Training) -> int:
        """Measure, and choose the number of gradient workers; a collective, the same on all ranks.

        A rank that cannot measure has all ranks precondition everything, and says so.
        """
        world, device = training.world, training.device
        if world.size == 1:
            return 1
        # Of pretended ranks there is nothing to measure, and nobody to ask.
        pretended = world.backend == "fake"
        kind = device.type if device.type in DEFAULT_NETWORKS else "cuda"
        links = DEFAULT_NETWORKS[kind] if pretended else measure_network(world, device)
        workers, error = world.size, ""
        if world.rank == 0 or pretended:
            try:
                machine = measure_machine(device, seconds=0.4, sizes=(8, 32, 128, 512))
                workers = self.best(training, machine, links)
            except Exception as raised:  # the others wait for an answer
                error = f"{type(raised).__name__}: {raised}"
        if not pretended:
            workers, error = world.all_gather_object((workers, error))[0]
        if error:
            training.warn(
                f"grad_worker_fraction='auto': nothing could be chosen ({error}), so that all "
                f"ranks precondition every layer, as with 1.0"
            )
        return workers

    def best(self, training: Training, machine: Machine, links: Interconnect) -> int:
        """The best number of gradient workers on a machine, with these links between the ranks."""
        options, model = self.options, training.model
        sizes = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        how = options.factor_dtype, options.symmetry_aware, options.block_rules
        blocks, _ = find_blocks(model, sizes, options.skip_layers, {}, *how)
        return self.fastest(blocks, training.world.size, machine, links)

    def fastest(
        self, blocks: Sequence[KroneckerBlock], ranks: int, machine: Machine, links: Interconnect
    ) -> int:
        """The number of gradient workers whose stages take least; of similar ones the smallest."""
        seconds = {n: self.seconds(blocks, n, ranks, machine, links) for n in workers_of(ranks)}
        least = min(seconds.values())
        return min(n for n, s in seconds.items() if s <= (1 + SIMILAR) * least)

    def seconds(
        self,
        blocks: Sequence[KroneckerBlock],
        workers: int,
        ranks: int,
        machine: Machine,
        links: Interconnect,
    ) -> float:
        """Seconds a step of the four stages on the busiest rank, with so many gradient workers."""
        options, eigen = self.options, self.options.solver == "eigen"
        every = options.inv_update_steps
        steps = USUAL if every in (None, AUTO) else max(int(value_at(every, 0)), 1)
        plan = self.planner(workers, ranks)([dims_of(block) for block in blocks], ranks)
        # Seconds of solves and bytes of inverses by solver; of gradients by the row's first rank.
        solving, products = [0.0] * ranks, [0.0] * ranks
        inverses, results = [0] * ranks, [0] * ranks
        for block, layer in zip(blocks, plan.layers, strict=True):
            shape, first = block.shape, layer.workers[0]
            for letter in shape.letters:
                if letter in shape.diagonals:
                    continue
                n, solver = shape.dims[letter], layer.solver(letter)
                solving[solver] += shape.groups * machine.decomposition(options.solver, n)
                whole = eigen or not options.symmetry_aware
                inverses[solver] += shape.groups * (n * n if whole else n * (n + 1) // 2) * FLOAT
                # A gradient has as many elements as both sizes multiplied.
                flops = 2 * n * shape.groups * shape.dims["A"] * shape.dims["G"]
                products[first] += (2 if eigen else 1) * machine.dense(flops)
            results[first] += sum(p.numel() * FLOAT for p in block.params)
        rows, others = ranks // workers, workers - 1
        solved, found = max(solving), max(products)
        if others:
            sent, arriving = max(inverses) * others, sum(inverses) / rows
            solved += links.all_to_all(sent, max(arriving, sent / ranks), range(workers))
        if rows > 1:
            column, arriving = range(0, ranks, workers), sum(results) - min(results[::workers])
            found += links.all_to_all(max(results) * (rows - 1), arriving, column)
        return found + solved / steps

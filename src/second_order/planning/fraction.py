"""KAISA's ``grad_worker_fraction="auto"``: the share of gradient workers that is fastest.

Only four stages depend on it: solves, their exchange, preconditioning and its exchange. The links
between the ranks are measured at construction, by all of them together; one rank measures its
machine for a fraction of a second, chooses, and tells the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from second_order.contract.training import Training
from second_order.distributed.assignment import AssignmentCost
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import Planner, kaisa_plan
from second_order.options import AUTO, value_at
from second_order.planning.calibration import DEFAULT_NETWORKS, measure_network, quick_machine
from second_order.planning.choices import SIMILAR
from second_order.planning.counts import Case
from second_order.planning.interconnect import Interconnect
from second_order.planning.machine import Machine
from second_order.planning.network import Network, network_of
from second_order.planning.systems import Planned, workers_of
from second_order.planning.times import rank_costs, step_times

__all__ = ["AutoFraction", "fastest_workers"]

STAGES = ("solve", "solve_exchange", "precondition", "precondition_exchange")
USUAL = 10
"""Steps between refreshes where a budget is to choose them, later."""


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
        world = training.world
        if world.size == 1:
            return 1
        device, error = training.device, ""
        # Of pretended ranks there is nothing to measure, and nobody to ask.
        pretended = world.backend == "fake"
        kind = device.type if device.type in DEFAULT_NETWORKS else "cuda"
        links = DEFAULT_NETWORKS[kind] if pretended else measure_network(world, device)
        workers = world.size
        if world.rank == 0 or pretended:
            try:
                workers = self.best(training, quick_machine(device), links)
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
        network = network_of(training.model, self.options)
        return fastest_workers(network, self, training.world.size, machine, links)


def fastest_workers(
    network: Network, auto: AutoFraction, ranks: int, machine: Machine, links: Interconnect
) -> int:
    """The number of gradient workers whose stages take least; of similar ones the smallest.

    Args:
        network: The layers and parameters.
        auto: The options, and the planner by number of workers.
        ranks: Number of ranks.
        machine: The machine of every rank.
        links: The links between the ranks.
    """
    options, seconds = auto.options, {}
    every = options.inv_update_steps
    steps = USUAL if every in (None, AUTO) else int(value_at(every, 0))
    for workers in workers_of(ranks):
        planner = auto.planner(workers, ranks)
        planned = Planned("KAISA", planner, options, options.block_rules, torch.optim.SGD)
        times = step_times(rank_costs(Case(network, planned, ranks), machine, links))
        stages = times.amortised(1, max(steps, 1))
        seconds[workers] = sum(stages.get(stage, 0.0) for stage in STAGES)
    least = min(seconds.values())
    return min(n for n, s in seconds.items() if s <= (1 + SIMILAR) * least)

"""The curvature of a rank by its role: one of those that train, or one that helps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from second_order.contract.curvature import Curvature
from second_order.contract.training import Training
from second_order.kfac.curvature import KFAC
from second_order.kfac.layers import Layers
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import System, dims_of, distkfac_plan
from second_order.kfac.stats_workers import StatsWorker, StatsWorkers
from second_order.kronecker.block import KroneckerBlock

__all__ = ["with_stats_workers"]


def with_stats_workers(
    training: Training,
    options: KFACOptions,
    system: System,
    *,
    count: int,
    patience: float,
    on_device: bool,
) -> Curvature:
    """Make this rank's curvature where the last ranks compute statistics for the others.

    Args:
        training: The training of the other ranks.
        options: The options of the K-FAC step.
        system: The choices of the system.
        count: Number of ranks that compute statistics.
        patience: Seconds without a sign of life after which a rank is given up.
        on_device: Whether factors are solved on the training's device, alike on all ranks.
    """
    if on_device:
        system = replace(system, said=f"{system.said} {training.device.type}")
    if count and training.world.size == 1:
        training.warn(
            f"{training.name}(stats_workers={count}) with one process: nobody computes "
            f"statistics on the side, so they are taken from this process's own passes"
        )
        count = 0
    if not count:
        return KFAC(training, options, system)
    system = replace(system, plan=partial(distkfac_plan, keeps_all=False))
    if training.world.rank < training.world.size - count:
        return KFAC(training, options, system, StatsWorkers(count, patience))

    layers = Layers(training, options, system.rules, system.conv_approximation)
    description = partial(Layers.description, said=system.said)
    return StatsWorker(training, layers, description, partial(_owners, system), count, patience)


def _owners(system: System, blocks: Sequence[KroneckerBlock], workers: int) -> list[int]:
    plan = system.plan(list(map(dims_of, blocks)), workers)
    return [layer.solver("A") for layer in plan.layers]

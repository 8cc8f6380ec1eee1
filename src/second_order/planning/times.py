"""Seconds of a step, stage by stage, from counts of work, a machine and the links between ranks.

kernels    dense linear algebra by its size, and what is linear in factors and gradients
overhead   what a stage and its layers cost besides
messages   collectives by formula, and the copies to and from their buffers

On a CPU a stage takes all three. On a device kernels run while Python goes on, and the longer one
counts. A stage ends with an exchange, so that the slowest rank decides on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from second_order.planning.counts import Case
from second_order.planning.interconnect import Interconnect
from second_order.planning.machine import Machine
from second_order.planning.network import Layer
from second_order.planning.work import Compute, RankWork, Transfer

__all__ = [
    "PASSES",
    "RankCost",
    "StepTimes",
    "exchange_seconds",
    "kernel_seconds",
    "rank_costs",
    "rank_seconds",
    "step_times",
]

PASSES = "passes"
"""The account of forward and backward."""

EVERY_STATISTICS = ("statistics", "statistics_exchange")
EVERY_REFRESH = ("solve", "solve_exchange")

# Reads and writes of work that is linear in the sizes of tensors, counted from the code.
UPDATE = 6  # of factors: G scaled, sums divided by examples, averages moved
COMBINE = 4  # of eigenvalues' products, gradient-sized: product, damping, reciprocal, NaN
GATHER = 3  # of a gradient as a matrix, and its product with what the eigenvalues make
CLIP_AND_WRITE = 6  # of every layer's result: dot product, times the coefficient, written
BASE = 8  # of parameters: momentum times a number, plus the gradient, parameter plus momentum


@dataclass(frozen=True)
class StepTimes:
    """Seconds by stage.

    Attributes:
        due: Seconds of each stage at a step that has it.
        hidden: Seconds of solves on threads, beside training.
    """

    due: Mapping[str, float]
    hidden: float = 0.0

    def amortised(self, factor_update_steps: int, inv_update_steps: int) -> dict[str, float]:
        """Seconds a step of each stage, at intervals of so many steps."""
        every = dict.fromkeys(EVERY_STATISTICS, factor_update_steps)
        every |= dict.fromkeys(EVERY_REFRESH, inv_update_steps)
        return {stage: seconds / every.get(stage, 1) for stage, seconds in self.due.items()}

    def step(self, factor_update_steps: int, inv_update_steps: int) -> float:
        """Seconds of a step, at intervals of so many; threads that take longer are waited for."""
        found = sum(self.amortised(factor_update_steps, inv_update_steps).values())
        return max(found, self.hidden / inv_update_steps)

    @property
    def costs(self) -> tuple[float, float, float]:
        """S, R and T as :func:`second_order.kfac.budget.intervals` has them."""
        S, R = (
            sum(self.due.get(stage, 0.0) for stage in stages)
            for stages in (EVERY_STATISTICS, EVERY_REFRESH)
        )
        alone = (PASSES, "average_gradients", "base")
        return S, R, sum(self.due.get(stage, 0.0) for stage in alone)


def kernel_seconds(compute: Compute, machine: Machine) -> float:
    """Seconds of equal pieces of dense linear algebra; float64 takes twice as long as float32.

    QR with its Q counts as as many products of its size as have its operations.
    """
    sizes = compute.sizes
    if compute.kind == "gram":
        each = machine.statistics(*sizes)
    elif compute.kind == "matmul":
        each = machine.product(*sizes)
    elif compute.kind == "qr":
        each = machine.product(*sizes * 3) * 4 / 3
    else:
        solver = {"eigh": "eigen", "cholesky_inverse": "inverse"}[compute.kind]
        each = machine.decomposition(solver, sizes[0])
    wide = 2.0 if compute.dtype == torch.float64 else 1.0
    return wide * compute.count * each


def exchange_seconds(
    transfer: Transfer, machine: Machine, links: Interconnect, *, tensors: int = 0
) -> float:
    """Seconds of messages: collectives by formula, and copies to and from their buffers.

    Args:
        transfer: The messages.
        machine: The machine that copies.
        links: The links between the ranks.
        tensors: Number of tensors that are packed and unpacked.
    """
    among, count = transfer.among, max(transfer.messages, 1)
    ranks = range(0, among.size * among.stride, among.stride)
    if transfer.collective == "all_reduce":
        each = links.all_reduce(transfer.handed / count, ranks)
    elif transfer.collective == "all_gather":
        each = links.all_gather(transfer.handed / count, ranks)
    else:
        each = links.all_to_all(transfer.moved / count, transfer.received / count, ranks)
    copies = machine.copied(transfer.handed) + machine.touched(2 * transfer.received)
    overhead = machine.overhead("exchange")
    return count * (each + overhead.step) + copies + tensors * overhead.layer


def rank_seconds(
    case: Case,
    work: RankWork,
    machine: Machine,
    links: Interconnect,
    captured: Mapping[str, float] | None = None,
) -> StepTimes:
    """Seconds by stage of one rank, forward and backward left out.

    Args:
        case: The network, the system and the ranks.
        work: The rank's work at a step with statistics and a refresh.
        machine: The machine of the rank.
        links: The links between the ranks.
        captured: Measured seconds of the statistics of layers, by name, instead of those of
            matrix products.
    """
    captured = captured or {}
    kernels = dict.fromkeys(("statistics", "solve", "precondition"), 0.0)
    taken, mine = case.taken(work.rank), case.preconditioned(work.rank)
    measured = all(layer.name in captured for layer in taken)
    for compute in work.computes:
        if compute.stage != "statistics" or not measured:
            kernels[compute.stage] += kernel_seconds(compute, machine)
    if measured:
        kernels["statistics"] = sum(captured[layer.name] for layer in taken)

    eigen = case.options.solver == "eigen"
    kernels["statistics"] += machine.touched(UPDATE * work.nbytes("factors"))
    own = sum(map(_gradient_bytes, mine))
    kernels["solve"] += machine.touched(COMBINE * own) if eigen else 0.0
    kernels["precondition"] += machine.touched(GATHER * own)
    everything = sum(map(_gradient_bytes, case.network.layers))
    kernels["precondition"] += machine.touched(CLIP_AND_WRITE * everything)

    layers = {
        "statistics": len(taken),
        "solve": max(case.solving(work.rank), len(mine)),
        "precondition": len(mine),
    }
    due = {
        stage: _together(machine, seconds, _overhead_name(stage, case), layers[stage])
        for stage, seconds in kernels.items()
    }
    due["base"] = _together(
        machine, machine.touched(BASE * work.nbytes("parameters")), "base", len(case.network.params)
    )
    for transfer in work.transfers:
        tensors = {
            "average_gradients": len(case.network.params),
            "statistics_exchange": sum(len(x.shape.letters) + 1 for x in taken),
            "precondition_exchange": len(case.network.layers),
            "solve_exchange": len(mine),
        }.get(transfer.stage, 0)
        seconds = exchange_seconds(transfer, machine, links, tensors=tensors)
        due[transfer.stage] = due.get(transfer.stage, 0.0) + seconds
    hidden = due.pop("solve") if case.planned.background else 0.0
    return StepTimes(due, hidden)


@dataclass(frozen=True)
class RankCost:
    """What a step with statistics and a refresh costs some ranks that do the same.

    Attributes:
        ranks: Their number.
        work: The work of one of them, the one with the lowest rank.
        times: Its seconds by stage.
    """

    ranks: int
    work: RankWork
    times: StepTimes


def rank_costs(
    case: Case,
    machine: Machine,
    links: Interconnect,
    *,
    passes: float = 0.0,
    captured: Mapping[str, float] | None = None,
) -> list[RankCost]:
    """What each rank's step costs; ranks that do the same stand together.

    Args:
        case: The network, the system and the ranks.
        machine: The machine of every rank.
        links: The links between the ranks.
        passes: Seconds of forward and backward on a rank's batch.
        captured: As for :func:`rank_seconds`.
    """
    found = []
    for share in case.everybody(statistics=True, refresh=True):
        times = rank_seconds(case, share.work, machine, links, captured)
        due = {PASSES: passes, **times.due}
        found.append(RankCost(share.ranks, share.work, StepTimes(due, times.hidden)))
    return found


def step_times(costs: Iterable[RankCost]) -> StepTimes:
    """Seconds by stage of a step of all ranks: of each stage those of the slowest rank."""
    due: dict[str, float] = {}
    hidden = 0.0
    for cost in costs:
        hidden = max(hidden, cost.times.hidden)
        for stage, seconds in cost.times.due.items():
            due[stage] = max(due.get(stage, 0.0), seconds)
    return StepTimes(due, hidden)


def _together(machine: Machine, kernels: float, stage: str, layers: int) -> float:
    """Seconds of kernels and of Python: in turn on a CPU, side by side with a device."""
    overhead = machine.overhead(stage)
    python = overhead.step + layers * overhead.layer
    return kernels + python if machine.device == "cpu" else max(kernels, python)


def _overhead_name(stage: str, case: Case) -> str:
    return case.options.solver if stage == "solve" else stage


def _gradient_bytes(layer: Layer) -> int:
    return math.prod(layer.shape.gradient_size) * torch.float32.itemsize

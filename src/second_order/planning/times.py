"""Seconds of a step, stage by stage, from counts of work, a machine and the links between ranks.

kernels    dense linear algebra by its size, and what is linear in factors and gradients
overhead   what a stage and its layers cost besides
messages   collectives by formula, and the copies to and from their buffers

On a CPU a stage takes all three. On a device kernels run while Python goes on, and the longer one
counts. A stage ends with an exchange, so that the slowest rank decides on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from second_order.planning.counts import Case
from second_order.planning.interconnect import Interconnect
from second_order.planning.machine import Machine
from second_order.planning.network import Layer
from second_order.planning.work import Compute, RankWork, StageWork, Transfer

__all__ = [
    "PASSES",
    "RankCost",
    "StepTimes",
    "base_step_seconds",
    "every_steps",
    "exchange_seconds",
    "kernel_seconds",
    "rank_costs",
    "step_times",
]

PASSES = "passes"
"""The account of forward and backward."""

EVERY_STATISTICS = ("statistics", "statistics_exchange")
EVERY_REFRESH = (
    *("solve", "solve_exchange"),
    *("lanczos", "lanczos_exchange", "final_update", "pairs"),
)

# Reads and writes of work that is linear in the sizes of tensors, counted from the code.
UPDATE = 6  # of factors: G scaled, sums divided by examples, averages moved
COMBINE = 4  # of eigenvalues' products, gradient-sized: product, damping, reciprocal, NaN
GATHER = 3  # of a gradient as a matrix, and its product with what the eigenvalues make
CLIP_AND_WRITE = 6  # of every layer's result: dot product, times the coefficient, written
BASE = 8  # of parameters: momentum times a number, plus the gradient, parameter plus momentum


def every_steps(factor_update_steps: int, inv_update_steps: int) -> dict[str, int]:
    """By stage that is not due at each step, the steps from one time to the next."""
    every = dict.fromkeys(EVERY_STATISTICS, factor_update_steps)
    return every | dict.fromkeys(EVERY_REFRESH, inv_update_steps)


@dataclass(frozen=True)
class StepTimes:
    """Seconds by stage.

    Attributes:
        due: Seconds of each stage at a step that has it.
        hidden: Seconds of solves on threads, beside training.
        beside: Whether the threads have cores of their own; if not, training gives them its time.
    """

    due: Mapping[str, float]
    hidden: float = 0.0
    beside: bool = True

    def amortised(self, factor_update_steps: int, inv_update_steps: int) -> dict[str, float]:
        """Seconds a step of each stage, at intervals of so many steps."""
        every = every_steps(factor_update_steps, inv_update_steps)
        due = self.due if self.beside or not self.hidden else {**self.due, "solve": self.hidden}
        return {stage: seconds / every.get(stage, 1) for stage, seconds in due.items()}

    def step(self, factor_update_steps: int, inv_update_steps: int) -> float:
        """Seconds of a step, at intervals of so many; threads that take longer are waited for."""
        found = sum(self.amortised(factor_update_steps, inv_update_steps).values())
        return max(found, self.hidden / inv_update_steps)

    @property
    def costs(self) -> tuple[float, float, float]:
        """S, R and T as :func:`second_order.budget.intervals` has them."""
        due = self.amortised(1, 1)
        S, R = (
            sum(due.get(stage, 0.0) for stage in stages)
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


class _Once:
    """Values of what ranks share, each computed once."""

    def __init__(self) -> None:
        self._found: dict[tuple[Callable[..., float], int], tuple[Any, float]] = {}

    def __call__(self, function: Callable[..., float], shared: Any, *arguments: Any) -> float:
        """The value of a function for an object, told by what it is, not by what it holds."""
        key = function, id(shared)
        if key not in self._found:  # kept together, so that no other object gets its id
            self._found[key] = shared, function(shared, *arguments)
        return self._found[key][1]


def _rank_seconds(
    case: Case,
    work: RankWork,
    machine: Machine,
    links: Interconnect,
    captured: Mapping[str, float],
    once: _Once,
) -> StepTimes:
    """Seconds by stage of one rank, forward and backward left out."""
    kernels = dict.fromkeys(("statistics", "solve", "precondition"), 0.0)
    taken, mine = case.taken(work.rank), case.preconditioned(work.rank)
    for stage in work.stages:
        kernels[stage.stage] = once(_stage_seconds, stage, machine)
    if once(_unknown, taken, captured) == 0:
        kernels["statistics"] = once(_known_seconds, taken, captured)

    eigen = case.options.solver == "eigen"
    kernels["statistics"] += machine.touched(UPDATE * work.nbytes("factors"))
    own = once(_gradient_bytes, mine)
    kernels["solve"] += machine.touched(COMBINE * own) if eigen else 0.0
    kernels["precondition"] += machine.touched(GATHER * own)
    everything = once(_gradient_bytes, case.network.layers)
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
    params = case.network.params
    due["base"] = base_step_seconds(work.nbytes("parameters"), len(params), machine)
    tensors = {
        "average_gradients": len(params),
        "statistics_exchange": int(once(_sums, taken)),
        "precondition_exchange": len(case.network.layers),
        "solve_exchange": len(mine),
    }
    for transfer in work.transfers:
        number = tensors.get(transfer.stage, 0)
        seconds = exchange_seconds(transfer, machine, links, tensors=number)
        due[transfer.stage] = due.get(transfer.stage, 0.0) + seconds
    hidden = due.pop("solve") if case.planned.background else 0.0
    return StepTimes(due, hidden, machine.solves_beside)


def _stage_seconds(stage: StageWork, machine: Machine) -> float:
    return sum(kernel_seconds(compute, machine) for compute in stage.computes)


def _unknown(layers: Sequence[Layer], captured: Mapping[str, float]) -> int:
    """The number of layers whose statistics nobody has measured."""
    return sum(layer.name not in captured for layer in layers)


def _known_seconds(layers: Sequence[Layer], captured: Mapping[str, float]) -> float:
    return sum(captured[layer.name] for layer in layers)


def _sums(layers: Sequence[Layer]) -> int:
    """The number of sums of layers' statistics: of each factor, and the head."""
    return sum(len(layer.shape.letters) + 1 for layer in layers)


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
        captured: Measured seconds of the statistics of layers, by name, instead of those of
            matrix products, on ranks all of whose layers' are known.
    """
    found, once = [], _Once()
    for share in case.everybody(statistics=True, refresh=True):
        times = _rank_seconds(case, share.work, machine, links, captured or {}, once)
        times = replace(times, due={PASSES: passes, **times.due})
        found.append(RankCost(share.ranks, share.work, times))
    return found


def step_times(costs: Iterable[RankCost]) -> StepTimes:
    """Seconds by stage of a step of all ranks: of each stage those of the slowest rank."""
    due: dict[str, float] = {}
    hidden, beside = 0.0, True
    for cost in costs:
        hidden, beside = max(hidden, cost.times.hidden), beside and cost.times.beside
        for stage, seconds in cost.times.due.items():
            due[stage] = max(due.get(stage, 0.0), seconds)
    return StepTimes(due, hidden, beside)


def _together(machine: Machine, kernels: float, stage: str, layers: int) -> float:
    """Seconds of kernels and of Python: in turn on a CPU, side by side with a device."""
    overhead = machine.overhead(stage)
    python = overhead.step + layers * overhead.layer
    return kernels + python if machine.device == "cpu" else max(kernels, python)


def base_step_seconds(nbytes: float, params: int, machine: Machine) -> float:
    """Seconds of a step of the base alone, on so many bytes of so many parameters."""
    return _together(machine, machine.touched(BASE * nbytes), "base", params)


def _overhead_name(stage: str, case: Case) -> str:
    return case.options.solver if stage == "solve" else stage


def _gradient_bytes(layers: Sequence[Layer]) -> int:
    elements = sum(math.prod(layer.shape.gradient_size) for layer in layers)
    return elements * torch.float32.itemsize

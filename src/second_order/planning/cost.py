"""The cost model: the time, traffic and memory of a step, from the layers' sizes.

Statistics, every ``factor_update_steps``: R n² multiplications for a factor of size n
with R rows in a rank's batch. KAISA and DistKFAC then sum all factors over the ranks.

Inverses, every ``inv_update_steps``: one decomposition of each factor on its inverse
rank. The layer's gradient workers then gather them.

Preconditioning, every step: n · in · out multiplications for each factor of a layer,
and twice as many with eigenvectors. Ranks with different layers then gather the
preconditioned gradients.

The busiest rank counts for each part. Packing, averaging and clipping are not counted,
and inverses count with the bytes that they have in memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from second_order.distributed.assignment import (
    AssignmentCost,
    Grid,
    LayerAssignment,
    LayerDims,
    assign_layers,
)
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.solvers import SOLVERS
from second_order.planning.machine import Interconnect, Machine, bytes_sent

__all__ = ["Costs", "Layer", "Setting", "cheapest_workers", "predict", "worker_counts"]

SIMILAR = 0.03
"""Settings whose steps differ by less than this share count as equally fast, because
the cost model is no more accurate."""

ITEMSIZE = 4
"""Bytes of an element: factors, inverses and gradients are in float32."""


@dataclass(frozen=True)
class Layer:
    """A layer to plan for.

    Attributes:
        shape: The sizes of its factors.
        rows: Number of rows of its input in one rank's batch, examples times positions.
    """

    shape: FactorShape
    rows: int = 0


@dataclass(frozen=True)
class Setting:
    """An optimizer, and those of its keywords that decide its costs.

    Attributes:
        system: "KAISA", "DPKFAC" or "DistKFAC".
        solver: "inverse" or "eigen".
        ranks: Number of ranks.
        workers: Number of gradient workers of each layer.
        factor_update_steps: Steps between two updates of the factors.
        inv_update_steps: Steps between two refreshes.
        owned_factors: Whether only a factor's inverse rank keeps it:
            ``factor_exchange="reduce"``.
    """

    system: str
    solver: str
    ranks: int
    workers: int
    factor_update_steps: int
    inv_update_steps: int
    owned_factors: bool = False

    @property
    def name(self) -> str:
        """The system, the mode and the solver in words."""
        if not self.mode:
            return f"{self.system}, {self.solver}"
        return f"{self.system} {self.mode}, {self.solver}"

    @property
    def mode(self) -> str:
        """KAISA's name for the number of gradient workers; "" for the other systems."""
        if self.system != "KAISA" or self.ranks == 1:
            return ""
        mode = f"HYBRID {self.workers}/{self.ranks}"
        if self.workers == self.ranks:
            mode = "COMM-OPT"
        elif self.workers == 1:
            mode = "MEM-OPT"
        if self.owned_factors:
            mode += ", reduce"
        return mode

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the optimizer that select this setting."""
        keywords: dict[str, Any] = {
            "solver": self.solver,
            "factor_update_steps": self.factor_update_steps,
            "inv_update_steps": self.inv_update_steps,
        }
        if self.system == "KAISA":
            keywords["grad_worker_fraction"] = self.workers / self.ranks
        if self.owned_factors:
            keywords["factor_exchange"] = "reduce"
        return keywords


@dataclass(frozen=True)
class Costs:
    """What a setting costs on the busiest rank.

    Attributes:
        parts: Seconds per step by the part of the step.
        sent: Bytes per step that one rank sends.
        curvature_bytes: Bytes of factors, inverses, and the last step of preconditioned
            parameters, from which the step scale follows.
        pending_bytes: Bytes of statistics that wait for the next update of the factors.
    """

    parts: Mapping[str, float]
    sent: float
    curvature_bytes: int
    pending_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one layer: seconds each time that the work is due, and bytes."""

    statistics: float
    inverses: float
    precondition: float
    factor_bytes: int
    inverse_bytes: int
    gradient_bytes: int


def layer_costs(layer: Layer, solver: str, machine: Machine) -> LayerCosts:
    """The costs of one layer."""
    shape = layer.shape
    gradient_size = shape.groups * shape.in_dim * shape.out_dim
    factor_sizes = [math.prod(shape.stored_shape(name)) for name in shape.factor_names]
    inverse_shapes = SOLVERS[solver].saved_shapes(shape).values()
    inverse_sizes = [math.prod(inverse_shape) for inverse_shape in inverse_shapes]

    # A factor costs a product of its rows, a decomposition, and a product per step.
    statistics = 0.0
    inverses = 0.0
    precondition = 0.0
    for name, n in shape.dims.items():
        if name in shape.diagonals:
            continue
        statistics += machine.product_seconds(layer.rows * n**2 * shape.groups)
        inverses += shape.groups * machine.decomposition_seconds(solver, n)
        product = machine.product_seconds(2 * n * gradient_size)
        if solver == "eigen":
            product *= 2  # into the eigenbasis, and back
        precondition += product
    return LayerCosts(
        statistics=statistics,
        inverses=inverses,
        precondition=precondition,
        factor_bytes=ITEMSIZE * sum(factor_sizes),
        inverse_bytes=ITEMSIZE * sum(inverse_sizes),
        gradient_bytes=ITEMSIZE * gradient_size,
    )


def predict(
    layers: Sequence[Layer], setting: Setting, machine: Machine, network: Interconnect
) -> Costs:
    """Predict the costs of the curvature, without the model's passes and the base."""
    is_dpkfac = setting.system == "DPKFAC"
    is_distkfac = setting.system == "DistKFAC"

    # Add up what each rank owns, and what each row of ranks preconditions.
    statistics: dict[int, float] = defaultdict(float)
    inverses: dict[int, float] = defaultdict(float)
    factor_bytes: dict[int, int] = defaultdict(int)
    precondition: dict[int, float] = defaultdict(float)
    inverse_bytes: dict[int, int] = defaultdict(int)
    gradient_bytes = 0
    places = assign(layers, setting)
    # By default, one rank inverts both factors of a layer.
    for layer, place in zip(layers, places, strict=True):
        costs = layer_costs(layer, setting.solver, machine)
        statistics[place.a_inverse_rank] += costs.statistics
        inverses[place.a_inverse_rank] += costs.inverses
        factor_bytes[place.a_inverse_rank] += costs.factor_bytes
        precondition[place.row] += costs.precondition
        inverse_bytes[place.row] += costs.inverse_bytes
        gradient_bytes += costs.gradient_bytes
    all_factors = sum(factor_bytes.values())

    # DPKFAC's owners compute the statistics of their own layers. DistKFAC computes
    # inverses on threads. They cost nothing if training leaves the host idle.
    updates = setting.factor_update_steps
    refreshes = setting.inv_update_steps
    summed = sum(statistics.values())
    if is_dpkfac:
        summed = max(statistics.values())
    slowest = max(inverses.values())
    if is_distkfac and machine.device != "cpu":
        slowest = 0.0
    parts = {
        "statistics": summed / updates,
        "inverses": slowest / refreshes,
        "precondition": max(precondition.values()),
    }

    # An all-reduce is a reduce-scatter and an all-gather. DPKFAC sends no factors.
    gathers = 1 if setting.owned_factors else 2
    if is_dpkfac:
        gathers = 0
    workers = setting.workers
    sent = 0.0
    for name, nbytes, ranks, times in (
        ("statistics exchange", all_factors, setting.ranks, gathers / updates),
        ("inverse exchange", max(inverse_bytes.values()), workers, 1 / refreshes),
        ("gradient exchange", gradient_bytes, setting.ranks // workers, 1.0),
    ):
        parts[name] = times * network.gather_seconds(nbytes, ranks)
        sent += times * bytes_sent(nbytes, ranks)

    # DistKFAC holds the inverses in use and the next ones.
    copies = 2 if is_distkfac else 1
    bytes_per_rank: list[int] = []
    for place in places:
        stored_factors = all_factors
        if is_dpkfac or setting.owned_factors:
            stored_factors = factor_bytes[place.a_inverse_rank]
        bytes_per_rank.append(stored_factors + copies * inverse_bytes[place.row])
    pending = all_factors
    if is_dpkfac:
        pending = max(factor_bytes.values())
    return Costs(parts, sent, max(bytes_per_rank) + gradient_bytes, pending)


def assign(layers: Sequence[Layer], setting: Setting) -> list[LayerAssignment]:
    """The ranks of each layer, as the systems assign them with default settings.

    A row of the grid has a layer's gradient workers: one with DPKFAC, all with
    DistKFAC.
    """
    dims = []
    for layer in layers:
        shape = layer.shape
        sizes = LayerDims(shape.groups, shape.in_dim, shape.out_dim, shape.diagonal_a)
        dims.append(sizes)
    grid = Grid(setting.ranks // setting.workers, setting.workers)
    cost: AssignmentCost = "compute"
    if setting.system == "DPKFAC":
        cost = "memory"
    return assign_layers(dims, grid, cost=cost)


def worker_counts(ranks: int) -> list[int]:
    """The possible numbers of gradient workers, the largest first."""
    return [workers for workers in range(ranks, 0, -1) if ranks % workers == 0]


def cheapest_workers(
    shapes: Sequence[FactorShape],
    ranks: int,
    machine: Machine,
    network: Interconnect,
    *,
    solver: str,
    inv_update_steps: int,
) -> int:
    """Return KAISA's fastest number of workers; of similar ones, the smallest."""
    layers = [Layer(shape) for shape in shapes]
    seconds: dict[int, float] = {}
    for workers in worker_counts(ranks):
        setting = Setting(
            "KAISA", solver, ranks, workers, inv_update_steps, inv_update_steps
        )
        seconds[workers] = predict(layers, setting, machine, network).seconds
    bound = (1 + SIMILAR) * min(seconds.values())
    return min(workers for workers in seconds if seconds[workers] <= bound)

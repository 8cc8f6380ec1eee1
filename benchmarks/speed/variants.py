"""The variants that the speed benchmark times: an optimizer, a solver and a placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import nn

from second_order import DPKFAC, KAISA
from second_order.reporting.summary import Summary

__all__ = ["VARIANTS", "Interval", "MeasuredOptimizer", "Variant"]

Interval: TypeAlias = Callable[[int], int]


class MeasuredOptimizer(Protocol):
    """The methods that the benchmark calls."""

    def step(self) -> Any: ...

    def zero_grad(self) -> None: ...

    def summary(self) -> Summary: ...


@dataclass(frozen=True)
class Variant:
    """One row of the table for a workload.

    Attributes:
        name: Name on the command line.
        solver: "eigen" or "inverse".
        placement: The placement as the table prints it.
        processes: Number of processes, each with one thread and its own batch.
        optimizer: The class, or a function with the same keywords.
        options: Further options of the optimizer.
    """

    name: str
    solver: str
    placement: str
    processes: int
    optimizer: Callable[..., MeasuredOptimizer]
    options: dict[str, Any]

    def build(self, model: nn.Module, statistics: Interval, solve: Interval) -> MeasuredOptimizer:
        """Make the optimizer, whose refreshes follow the two intervals from the first step."""
        return self.optimizer(
            model,
            lr=0.01,
            momentum=0.9,
            solver=self.solver,
            factor_update_steps=statistics,
            inv_update_steps=solve,
            **self.options,
        )


_COMM_OPT = {"grad_worker_fraction": 1.0}
_MEM_OPT = {"grad_worker_fraction": 0.0, "factor_exchange": "reduce"}
_BALANCED = {"assignment": "balanced"}

_ALL = (
    Variant("eigen", "eigen", "one process", 1, KAISA, {}),
    Variant("inverse", "inverse", "one process", 1, KAISA, {}),
    Variant("comm-opt-eigen", "eigen", "COMM-OPT", 2, KAISA, _COMM_OPT),
    Variant("comm-opt-inverse", "inverse", "COMM-OPT", 2, KAISA, _COMM_OPT),
    Variant("mem-opt-eigen", "eigen", "MEM-OPT", 2, KAISA, _MEM_OPT),
    Variant("mem-opt-inverse", "inverse", "MEM-OPT", 2, KAISA, _MEM_OPT),
    Variant("dpkfac-eigen", "eigen", "DPKFAC", 2, DPKFAC, _BALANCED),
    Variant("dpkfac-inverse", "inverse", "DPKFAC", 2, DPKFAC, _BALANCED),
)
VARIANTS = {variant.name: variant for variant in _ALL}

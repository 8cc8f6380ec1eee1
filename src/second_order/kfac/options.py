"""The options that every system with Kronecker factors shares, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from second_order.kronecker.fisher import LIKELIHOODS, Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.solvers import SOLVERS, SolverName
from second_order.options import (
    Interval,
    Schedule,
    check_choice,
    check_count,
    check_flag,
    check_interval,
    check_number,
    check_patterns,
    check_whole,
    scheduled,
)

__all__ = ["KFACOptions", "check_clip", "check_damping", "check_decay"]

SCHEDULES = "damping", "factor_decay", "kl_clip", "factor_update_steps", "inv_update_steps"
FACTOR_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class KFACOptions:
    """The options of :class:`KFACOptimizer`, checked; meanings as in the optimizers' docstrings."""

    damping: Schedule
    relative_damping: bool
    factor_decay: Schedule
    kl_clip: Schedule | None
    solver: SolverName
    factor_update_steps: Interval
    inv_update_steps: Interval
    refresh_warmup_steps: int
    fisher: str
    likelihood: Likelihood
    kfac_approx: Approximation
    eigen_refresh: str
    symmetry_aware: bool
    skip_layers: tuple[str, ...]
    accumulation_steps: int | Literal["auto"]
    loss_reduction: str
    factor_dtype: torch.dtype
    inv_dtype: torch.dtype
    max_consecutive_failures: int
    max_factor_dim: int

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> KFACOptions:
        """Those of an optimizer's keywords that belong here.

        Raises:
            TypeError: For a value of the wrong type.
            ValueError: For a value outside its bounds, with the bound and the remedy.
        """
        ours = {field.name: keywords[field.name] for field in fields(cls)}
        for name in ("relative_damping", "symmetry_aware"):
            check_flag(name, ours[name])
        return cls(**{**ours, "skip_layers": check_patterns(ours["skip_layers"])})

    def scheduled(self, step: int) -> list[tuple[str, Any]]:
        """The values at a step of what is given as callables, by name; for comparison."""
        return scheduled(self, SCHEDULES, step)

    @property
    def solve_dtype(self) -> torch.dtype:
        """Factors are decomposed in it."""
        dtype = torch.promote_types(self.factor_dtype, self.inv_dtype)
        return torch.promote_types(dtype, torch.float32)

    def __post_init__(self) -> None:
        if not callable(self.damping):
            check_damping(self.damping)
        if not callable(self.factor_decay):
            check_decay(self.factor_decay)
        if self.kl_clip is not None and not callable(self.kl_clip):
            check_clip(self.kl_clip)
        check_choice("solver", self.solver, SOLVERS)
        check_interval("factor_update_steps", self.factor_update_steps)
        check_interval("inv_update_steps", self.inv_update_steps)
        remedy = "0 to keep to the intervals from the first step"
        check_whole("refresh_warmup_steps", self.refresh_warmup_steps, 0, remedy)
        check_choice("fisher", self.fisher, ("empirical", "sampled"))
        if not callable(self.likelihood):
            check_choice("likelihood", self.likelihood, LIKELIHOODS)
        check_choice("kfac_approx", self.kfac_approx, ("expand", "reduce"))
        check_choice("eigen_refresh", self.eigen_refresh, ("full", "warm"))
        if self.eigen_refresh == "warm" and self.solver != "eigen":
            raise ValueError(
                f"eigen_refresh='warm' starts from eigenvectors, and solver={self.solver!r} has "
                f"none; use solver='eigen', or leave eigen_refresh at 'full'"
            )
        if self.accumulation_steps != "auto":
            meaning = "micro-batches to a step, or 'auto'"
            check_count("accumulation_steps", self.accumulation_steps, meaning)
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        for name in ("factor_dtype", "inv_dtype"):
            if getattr(self, name) not in FACTOR_DTYPES:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not one of float32, float64 and bfloat16 "
                    f"(float16 overflows at 65504); use torch.float32"
                )
        check_count("max_factor_dim", self.max_factor_dim, "rows")
        check_count(
            "max_consecutive_failures", self.max_consecutive_failures, "refreshes that may fail"
        )


def check_damping(value: float) -> None:
    """Raise ValueError unless a damping is at least 0 and finite."""
    check_number("damping", value, low=0.0, open_high=True, remedy="1.0 is a cautious value")


def check_decay(value: float) -> None:
    """Raise ValueError unless a factor_decay lies in 0..1, 1 excluded."""
    check_number(
        "factor_decay", value, low=0.0, high=1.0, open_high=True, remedy="0.95 is the usual value"
    )


def check_clip(value: float) -> None:
    """Raise ValueError unless a kl_clip is positive."""
    remedy = "use a positive number, or None for no clip"
    check_number("kl_clip", value, low=0.0, open_low=True, remedy=remedy)

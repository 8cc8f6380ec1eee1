"""An optimizer container for torchtitan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer

from second_order.optimizers.distkfac import DistKFAC
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.kaisa import KAISA

__all__ = ["SecondOrderOptimizersContainer"]

SYSTEMS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "KAISA": KAISA,
    "DPKFAC": DPKFAC,
    "DistKFAC": DistKFAC,
}


class SecondOrderOptimizersContainer(OptimizersContainer):
    """torchtitan's container, which also knows KAISA, DPKFAC and DistKFAC.

        optimizer = SecondOrderOptimizersContainer.Config(
            implementation="for-loop",
            param_groups=[ParamGroupConfig(
                pattern=".*", optimizer_name="KAISA", optimizer_kwargs={"lr": 1e-3},
            )],
            optimizer_factory_kwargs_by_name={"KAISA": {"base": torch.optim.AdamW}},
        )

    The optimizer's own options are given by name in ``optimizer_factory_kwargs_by_name``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's own."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
        if name in SYSTEMS:
            return SYSTEMS[name]
        factory: Callable[..., Any] = OptimizersContainer._resolve_optimizer_factory(name)
        return factory

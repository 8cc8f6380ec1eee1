"""The choices in which KAISA, DPKFAC and DistKFAC differ, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from second_order.contract.training import Training
from second_order.kfac.layers import Layers
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import Planner
from second_order.kfac.threads import Background
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import BlockRules

__all__ = ["Chooser", "System", "described"]


class Chooser(Protocol):
    """A choice of the number of gradient workers, made once all ranks agree on the model."""

    def choose(self, training: Training) -> int:
        """The number of gradient workers; a collective, the same on all ranks."""

    def planner(self, workers: int, ranks: int) -> Planner:
        """The planner with so many gradient workers."""


@dataclass(frozen=True)
class System:
    """The choices in which the systems with Kronecker factors differ.

    Attributes:
        plan: Makes the plan of the layers: which rank does what.
        rules: Rules for which modules become blocks.
        said: The system's own options, for comparison between ranks.
        owners: Where mean gradients go: "owner", to the layers' owners alone; "all_reduce", to
            all ranks although layers have owners; None without owners.
        conv_approximation: Approximation for convolutions; None for that of other layers.
        background: How inverses are computed on threads; None to compute them at once.
        pipelined: Whether statistics leave for the other ranks while backward still runs.
        exchange_dtype: Dtype in which factors' sums and decompositions travel; None for their own.
        chooser: Chooses the number of gradient workers; None where it is given.
    """

    plan: Planner
    rules: BlockRules
    said: str = ""
    owners: str | None = None
    conv_approximation: Approximation | None = None
    background: Background | None = None
    pipelined: bool = False
    exchange_dtype: torch.dtype | None = None
    chooser: Chooser | None = None


def described(
    training: Training, options: KFACOptions, system: System, layers: Layers
) -> list[str]:
    """The lines that must be equal on all ranks: options and layers."""
    shown = {k: v for k, v in vars(options).items() if not callable(v)}
    said = f"options: {training.base_name} {shown} {system.rules} {system.said}"
    return [said, *layers.description()]

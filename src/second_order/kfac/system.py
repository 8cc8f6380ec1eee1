"""The choices in which KAISA, DPKFAC and DistKFAC differ, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from second_order.contract.training import Training
from second_order.kfac.layers import Layers
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import Planner
from second_order.kfac.solves import Solves
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import BlockRules

__all__ = ["System", "described"]


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
        solves: Makes the inverses of the layers: solved at once, or on threads.
        waits: Whether all solves are waited for: then that is of a refresh's cost.
        pipelined: Whether statistics leave for the other ranks while backward still runs.
        exchange_dtype: Dtype in which factors' sums and decompositions travel; None for their own.
        chooser: Chooses the number of gradient workers of a training, by ``choose``, and makes the
            plan with so many, by ``planner``; None where it is given.
    """

    plan: Planner
    rules: BlockRules
    said: str = ""
    owners: str | None = None
    conv_approximation: Approximation | None = None
    solves: Callable[..., Solves] = Solves
    waits: bool = True
    pipelined: bool = False
    exchange_dtype: torch.dtype | None = None
    chooser: Any = None


def described(
    training: Training, options: KFACOptions, system: System, layers: Layers
) -> list[str]:
    """The lines that must be equal on all ranks: options and layers."""
    shown = {k: v for k, v in vars(options).items() if not callable(v)}
    said = f"options: {training.base_name} {shown} {system.rules} {system.said}"
    return [said, *layers.description()]

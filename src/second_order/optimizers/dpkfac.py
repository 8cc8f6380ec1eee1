"""DPKFAC: K-FAC that sends no factors (Zhang et al., 2023).

at construction:            each layer is assigned to a rank, its owner
every factor_update_steps:  the owner updates its running averages of A and G from its
                            own batch
every inv_update_steps:     the owner computes the layer's damped inverse
every step:                 a layer's gradients are summed over the ranks at its owner
                            the owner preconditions the mean, and sends it to all ranks,
                            with its part of the sum for the clip
                            all ranks clip, and step the base
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from second_order.kfac.curvature import KFAC
from second_order.kfac.plan import System, block_rules, dpkfac_plan
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.config import (
    AutoScalar,
    AuxBase,
    CommonOptions,
    DPKFACOptions,
    Fisher,
    KFACOptions,
    PerStep,
    TraceRule,
    options_from,
)
from second_order.optimizers.kaisa import KroneckerOptimizer
from second_order.optimizers.keywords import Rate, documented
from second_order.utils.checks import Interval, Schedule

__all__ = ["DPKFAC"]


@documented(DPKFACOptions, KFACOptions, CommonOptions)
class DPKFAC(KroneckerOptimizer):
    """K-FAC that sends no factors: each layer has one owner (Zhang et al., 2023).

    Replace ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` by

        optimizer = DPKFAC(model.parameters(), lr=0.1, momentum=0.9)

    The rest of the script does not change. Each layer has an owner, the only rank that
    stores its factors and its inverse. The owner computes the factors from its own
    share of the data. It averages over more steps instead of over more ranks. On one
    rank, DPKFAC is :class:`KAISA`.

    Every "number or callable" is a constant or a function of the step (0, 1, ...).
    """

    _curvature: KFAC

    def __init__(
        self,
        params: ParamsOrModel,
        lr: Rate | None = None,
        *,
        assignment: Literal["balanced", "round_robin"] = "balanced",
        gradient_exchange: str = "owner",
        damping: AutoScalar = "auto",
        damping_floor: float | Literal["auto"] = "auto",
        relative_damping: bool = True,
        grafting: Literal["gradient", "none"] = "gradient",
        kl_clip: AutoScalar | None = "auto",
        step_scale: bool | Literal["auto"] = "auto",
        factor_decay: Schedule | PerStep | Literal["auto"] = "auto",
        solver: Literal["inverse", "eigen"] = "inverse",
        inv_update_steps: Interval | TraceRule | Literal["auto"] = "auto",
        factor_update_steps: Interval | Literal["auto"] = "auto",
        overhead: float | None = None,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        aux_base: type[torch.optim.Optimizer] | AuxBase | None = None,
        model: nn.Module | None = None,
        fisher: Fisher = "empirical",
        kfac_approx: Literal["expand", "reduce"] = "expand",
        loss_reduction: str = "auto",
        grad_scaler: Any = None,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        precondition_norms: bool = False,
        unsupported_layers: str = "auto",
        skip_layers: Sequence[str] = (),
        max_factor_dim: int = 8192,
        factor_dtype: torch.dtype = torch.float32,
        debug: bool | int = False,
        **base_kwargs: Any,
    ) -> None:
        # Check the options, and replace "auto" by the defaults of this base.
        arguments = locals()
        options = options_from(KFACOptions, arguments).resolve(base)
        common = options_from(CommonOptions, arguments)
        dpkfac_options = options_from(DPKFACOptions, arguments)

        # Describe how ranks share the work.
        system = System(
            partial(dpkfac_plan, assignment=assignment),
            block_rules(options),
            str(dpkfac_options),
            from_owner=True,
            means_to_owners=gradient_exchange == "owner",
        )
        super().__init__(
            params,
            lr,
            common=common,
            base_kwargs=base_kwargs,
            make_curvature=lambda training: KFAC(training, options, system),
        )

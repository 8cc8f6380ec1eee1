"""KAISA: K-FAC with an adaptable split of memory and communication (Pauloski et al., 2022).

every factor_update_steps:  A, G of this rank's batch, summed over all ranks, into running averages
every inv_update_steps:     decompositions, one rank a factor, longest processing time first;
                            gathered among the layer's gradient workers, max(1, fP) of P ranks
every step:                 the layer's gradient workers precondition its gradient;
                            receivers get it from the worker in their own column of the grid;
                            all clip, and step the base
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from second_order.errors import SecondOrderError
from second_order.kfac.curvature import KFAC
from second_order.kfac.plan import System, block_rules, kaisa_plan
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.optimizers.base import ParamsOrModel, SecondOrderOptimizer
from second_order.optimizers.config import (
    AutoScalar,
    AuxBase,
    CommonOptions,
    Fisher,
    KAISAOptions,
    KFACOptions,
    PerStep,
    TraceRule,
    is_auto,
    options_from,
)
from second_order.optimizers.keywords import Rate, documented
from second_order.training.curvature import Curvature
from second_order.utils.checks import Interval, Schedule

__all__ = ["KAISA", "KroneckerOptimizer"]


class KroneckerOptimizer(SecondOrderOptimizer):
    """A base optimizer and the Kronecker factors of a model's layers."""

    options_by_layer = True
    _curvature: Curvature

    def curvature(
        self, *, dtype: torch.dtype = torch.float32, gather: bool = False
    ) -> KroneckerCurvature:
        """Return the curvature as a matrix that you can apply, invert and sample from.

        The factors are copied, so you can continue to train. With several processes, each process
        stores the copies of some layers and sends them when another process needs them; see
        :class:`~second_order.KroneckerCurvature`. Collective if other processes store some
        factors, as with DPKFAC and ``factor_exchange="reduce"``. DPKFAC's factors come from the
        batches of the layer's owner.

        Args:
            dtype: Dtype of the copies and of all results, at least float32.
            gather: True to copy all factors to every process, so that none depends on the others.

        Raises:
            SecondOrderError: Before the first statistics, and on a process that does not train.
        """
        curvature = self._curvature
        if not isinstance(curvature, KFAC):
            raise SecondOrderError(
                f"rank {self.training.world.rank} computes statistics for others, and keeps no "
                f"factors: call curvature() on the ranks whose optimizer.role is 'worker'"
            )
        if curvature.factors_elsewhere:
            self.check_ranks("curvature()")
        return curvature.build_curvature(dtype, gather)


@documented(KAISAOptions, KFACOptions, CommonOptions)
class KAISA(KroneckerOptimizer):
    """K-FAC on one process or many, around any first-order optimizer.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = KAISA(model.parameters(), lr=0.1, momentum=0.9)``; the rest of the script stays as
    it is.

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.
    """

    def __init__(
        self,
        params: ParamsOrModel,
        lr: Rate | None = None,
        *,
        grad_worker_fraction: float | Literal["auto"] = 1.0,
        factor_exchange: str = "all_reduce",
        exchange_dtype: torch.dtype | None = None,
        colocate_factors: bool = True,
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
        model: nn.Module | Sequence[nn.Module] | None = None,
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
        arguments = locals()
        options = options_from(KFACOptions, arguments).resolved(base)
        common = options_from(CommonOptions, arguments)
        own = options_from(KAISAOptions, arguments)
        own.check_with(options)
        chooses = is_auto(grad_worker_fraction)
        plan = partial(
            kaisa_plan,
            fraction=1.0 if chooses else float(grad_worker_fraction),
            cost="compute",
            colocate=colocate_factors,
            factors_everywhere=factor_exchange != "reduce",
        )
        system = System(
            plan,
            block_rules(options),
            str(own),
            pipelined=factor_exchange == "pipelined",
            exchange_dtype=exchange_dtype,
            auto_workers=chooses,
        )
        super().__init__(
            params,
            lr,
            common=common,
            base_kwargs=base_kwargs,
            curvature=lambda training: KFAC(training, options, system),
        )

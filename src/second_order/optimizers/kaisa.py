"""KAISA: K-FAC that trades memory for communication (Pauloski et al., 2022).

statistics are due:   each rank sums A and G over its batch; the ranks all-reduce the
                      sums, and each updates its running averages
inverses are due:     one rank decomposes each factor (assigned by longest processing
                      time), and sends the result to the layer's gradient workers,
                      max(1, f P) of the P ranks, where f is ``grad_worker_fraction``
every step:           gradient workers precondition and clip the layer's mean gradient
                      each receiver gets the result from the worker in its grid column
                      all ranks step the base

By default, each layer's inverse has an interval of its own, which is adapted at each
refresh to how far the inverse has drifted. Statistics of all layers are due whenever a
layer is. Numbers for ``factor_update_steps`` and ``inv_update_steps`` replace this by
fixed intervals.
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
    """The base class of KAISA, DPKFAC and DistKFAC, with Kronecker factors."""

    options_by_layer = True
    _curvature: Curvature

    def curvature(
        self, *, dtype: torch.dtype = torch.float32, gather: bool = False
    ) -> KroneckerCurvature:
        """Return the curvature as a matrix that you can apply, invert and sample from.

            curvature = optimizer.curvature()

        The factors are copied, so you can continue to train. With several ranks, each
        rank stores the copies of some layers and sends them when another rank needs
        them; see :class:`~second_order.KroneckerCurvature`. Collective if other ranks
        store some factors, as with DPKFAC and ``factor_exchange="reduce"``. DPKFAC's
        factors come from the batches of the layer's owner.

        Args:
            dtype: Dtype of the copies and of all results, at least float32.
            gather: True to copy all factors to every rank; no rank then needs another.

        Raises:
            SecondOrderError: Without statistics, or on a rank that does not train.
        """
        curvature = self._curvature
        if not isinstance(curvature, KFAC):
            raise SecondOrderError(
                f"rank {self.training.world.rank} only computes statistics, and stores "
                f"no factors: call curvature() on the ranks whose optimizer.role is 'worker'"
            )
        if curvature.factors_elsewhere:
            self.check_ranks("curvature()")
        return curvature.build_curvature(dtype, gather)


@documented(KAISAOptions, KFACOptions, CommonOptions)
class KAISA(KroneckerOptimizer):
    """K-FAC on any number of ranks, with any base optimizer (Pauloski et al., 2022).

    Replace ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` by

        optimizer = KAISA(model.parameters(), lr=0.1, momentum=0.9)

    The rest of the script does not change. ``base=torch.optim.AdamW`` preconditions
    AdamW instead of SGD.

    Every "number or callable" is a constant or a function of the step (0, 1, ...).
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
        kaisa_options = options_from(KAISAOptions, arguments)
        kaisa_options.check_with(options)

        # Describe how ranks share the work. An automatic fraction starts at 1.
        selects_fraction = is_auto(grad_worker_fraction)
        plan = partial(
            kaisa_plan,
            fraction=1.0 if selects_fraction else float(grad_worker_fraction),
            cost="compute",
            colocate=colocate_factors,
            factors_everywhere=factor_exchange != "reduce",
        )
        system = System(
            plan,
            block_rules(options),
            str(kaisa_options),
            pipelined=factor_exchange == "pipelined",
            exchange_dtype=exchange_dtype,
            auto_workers=selects_fraction,
        )
        super().__init__(
            params,
            lr,
            common=common,
            base_kwargs=base_kwargs,
            make_curvature=lambda training: KFAC(training, options, system),
        )

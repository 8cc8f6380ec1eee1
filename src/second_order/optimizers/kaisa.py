"""KAISA: K-FAC with an adaptable split of memory and communication (Pauloski et al., 2022).

every factor_update_steps:  A, G of this rank's batch, summed over all ranks, into running averages
every inv_update_steps:     decompositions, one rank a factor, longest processing time first;
                            gathered among the layer's gradient workers, max(1, fP) of P ranks
every step:                 the layer's gradient workers precondition its gradient;
                            receivers get it from the worker in their own column of the grid;
                            all clip, and step the base
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from second_order.distributed.assignment import AssignmentCost
from second_order.kfac.curvature import KFACCurvature
from second_order.kfac.options import (
    AUTO,
    AutoSchedule,
    KFACOptions,
    PerStep,
    PreconditionerScale,
    check_exchange_dtype,
    documented,
)
from second_order.kfac.plan import kaisa_plan
from second_order.kfac.system import System
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.solvers import SolverName
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.kronecker_optimizer import KroneckerOptimizer
from second_order.options import (
    AutoInterval,
    check_choice,
    check_flag,
    check_number,
    own_keywords,
)
from second_order.planning.fraction import AutoFraction

__all__ = ["KAISA"]


@documented
class KAISA(KroneckerOptimizer):
    """K-FAC on one process or many, around any first-order optimizer.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = KAISA(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.

    Args:
        {params_or_model}
        {model}
        {lr}
        {base}
        {rest}
        {rest_layers}
        {rest_kwargs}
        {damping}
        {relative_damping}
        {preconditioner_scale}
        {factor_decay}
        {kl_clip}
        {solver}
        {factor_update_steps}
        {inv_update_steps}
        {overhead}
        {fisher}
        {likelihood}
        {kfac_approx}
        {eigen_refresh}
        {refresh}
        {trace_bounds}
        grad_worker_fraction: Share of the processes that precondition a layer. 1.0: all, least
            communication in a step (COMM-OPT). 1 / processes, or 0: one, least memory (MEM-OPT).
            "auto" measures the network and a few matrix products at construction, and takes what
            :func:`second_order.plan` would predict to be fastest; a checkpoint remembers it.
            Where FSDP2 has sharded the model it is always one: a gradient's rows meet there.
        factor_exchange: "all_reduce" gives every process every factor's running average. "reduce"
            sends statistics to the process that decomposes the factor, and nobody else keeps it:
            half the traffic, and memory that falls with the number of processes; a checkpoint then
            needs :meth:`consolidate`, or ``torch.distributed.checkpoint``. "pipelined" is
            "all_reduce" in buckets that leave while the backward pass still runs, and decomposes
            factors in the order in which they arrive (Shi et al. 2021): the same training.
        exchange_dtype: Dtype in which statistics and decompositions travel, where they do; None:
            that in which they are kept. ``torch.bfloat16`` halves the bytes of float32, and rounds
            to 8 bits; all processes get the same numbers. Statistics of the first 20
            steps, and gradients, travel as they are.
        assignment: Balance the "compute" (n³) or the "memory" (n²) of factors over processes.
        colocate_factors: One process decomposes both factors of a layer; False spreads them.
        {symmetry_aware}
        {max_factor_dim}
        {exact_blocks}
        {max_exact_dim}
        {other_matrices}
        {skip_layers}
        {accumulation_steps}
        {loss_reduction}
        {grad_scaler}
        {factor_dtype}
        {inv_dtype}
        {max_consecutive_failures}
        {gradient_averaging}
        {process_group}
        {debug}
        {**base_kwargs}

    Raises:
        TypeError: For an unknown keyword (naming the closest known one) or a missing model.
        ValueError: For a value outside its bounds, with the bound and the remedy.
        RankMismatchError: If the processes built different models or options.
    """

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None = None,
        lr: float | Tensor,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        rest: type[torch.optim.Optimizer] | None = None,
        rest_layers: Sequence[str] = (),
        rest_kwargs: Mapping[str, Any] | None = None,
        damping: AutoSchedule = KFACOptions.damping,
        relative_damping: bool = KFACOptions.relative_damping,
        preconditioner_scale: PreconditionerScale = KFACOptions.preconditioner_scale,
        factor_decay: AutoSchedule | PerStep = AUTO,
        kl_clip: AutoSchedule | None = KFACOptions.kl_clip,
        solver: SolverName = KFACOptions.solver,
        factor_update_steps: AutoInterval | None = KFACOptions.factor_update_steps,
        inv_update_steps: AutoInterval | None = KFACOptions.inv_update_steps,
        overhead: float | None = KFACOptions.overhead,
        fisher: str = KFACOptions.fisher,
        likelihood: Likelihood = KFACOptions.likelihood,
        kfac_approx: Approximation = KFACOptions.kfac_approx,
        eigen_refresh: str = KFACOptions.eigen_refresh,
        refresh: str = KFACOptions.refresh,
        trace_bounds: tuple[float, float] = KFACOptions.trace_bounds,
        grad_worker_fraction: float | Literal["auto"] = 1.0,
        factor_exchange: str = "all_reduce",
        exchange_dtype: torch.dtype | None = None,
        assignment: AssignmentCost = "compute",
        colocate_factors: bool = True,
        symmetry_aware: bool = KFACOptions.symmetry_aware,
        max_factor_dim: int = KFACOptions.max_factor_dim,
        exact_blocks: bool = KFACOptions.exact_blocks,
        max_exact_dim: int = KFACOptions.max_exact_dim,
        other_matrices: str = KFACOptions.other_matrices,
        skip_layers: Sequence[str] = KFACOptions.skip_layers,
        accumulation_steps: int | Literal["auto"] = KFACOptions.accumulation_steps,
        loss_reduction: str = KFACOptions.loss_reduction,
        grad_scaler: Any = None,
        factor_dtype: torch.dtype = KFACOptions.factor_dtype,
        inv_dtype: torch.dtype = KFACOptions.inv_dtype,
        max_consecutive_failures: int = KFACOptions.max_consecutive_failures,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        debug: bool | int = False,
        **base_kwargs: Any,
    ) -> None:
        options = KFACOptions.of(locals())
        if grad_worker_fraction != AUTO:
            check_number(
                "grad_worker_fraction",
                grad_worker_fraction,
                low=0.0,
                high=1.0,
                remedy="1.0 is the default, and 'auto' measures",
            )
        check_choice("assignment", assignment, ("compute", "memory"))
        check_choice("factor_exchange", factor_exchange, ("all_reduce", "reduce", "pipelined"))
        check_exchange_dtype(exchange_dtype, options)
        check_flag("colocate_factors", colocate_factors)
        keeps_all = factor_exchange != "reduce"
        automatic = grad_worker_fraction == AUTO
        system = System(
            partial(
                kaisa_plan,
                fraction=1.0 if grad_worker_fraction == AUTO else float(grad_worker_fraction),
                cost=assignment,
                colocate=colocate_factors,
                keeps_all=keeps_all,
            ),
            options.block_rules,
            f"{grad_worker_fraction} {assignment} {colocate_factors} {factor_exchange} "
            f"{exchange_dtype}",
            pipelined=factor_exchange == "pipelined",
            exchange_dtype=exchange_dtype,
            chooser=AutoFraction(options, assignment, colocate_factors, keeps_all)
            if automatic
            else None,
        )
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=own_keywords(KAISA),
            curvature=lambda training: KFACCurvature(training, options, system),
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
            debug=debug,
            rest=rest,
            rest_layers=rest_layers,
            rest_kwargs=rest_kwargs,
        )

"""DPKFAC: K-FAC that sends no factor (Zhang et al., 2023).

at construction:            each layer gets an owner
every step:                 gradients summed over the processes, a layer's at its owner alone
every factor_update_steps:  the owner's running averages of A, G, from its own batches
every inv_update_steps:     the owner's damped inverse
every step:                 the owner preconditions its layers' mean gradients; all get them, with
                            the owner's part of the clip's sum; all clip, and step the base
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.assignment import OwnerAssignment
from second_order.kfac.curvature import KFACCurvature
from second_order.kfac.options import (
    AUTO,
    AutoSchedule,
    KFACOptions,
    PerStep,
    PreconditionerScale,
    documented,
)
from second_order.kfac.owner_hook import OwnerHook
from second_order.kfac.plan import dpkfac_plan
from second_order.kfac.system import System
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.solvers import SolverName
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.kronecker_optimizer import KroneckerOptimizer
from second_order.options import AutoInterval, check_choice, own_keywords

__all__ = ["DPKFAC"]


@documented
class DPKFAC(KroneckerOptimizer):
    """K-FAC whose layers' owners build the factors from their own batches.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = DPKFAC(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.

    Each layer belongs to one process, which alone keeps its factors and its inverse. Its factors
    see that process's share of the data only: an average over more steps instead of over more
    processes. With one process it is :class:`KAISA`.

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.

    Args:
        {params_or_model}
        {model}
        {lr}
        {base}
        {rest}
        {rest_layers}
        {rest_kwargs}
        assignment: Who owns which layer: "balanced" gives the next largest layer to the process
            with the least memory taken, "round_robin" layer i to process i mod P, as the paper.
        gradient_exchange: "owner" sums a layer's gradients at its owner alone and sends them back
            preconditioned: the volume of an all-reduce in all. "all_reduce" averages all gradients
            everywhere first, half as much again; it is what happens under
            DistributedDataParallel, which has averaged them already (but see
            :meth:`register_owner_hook`).
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

    _curvature: KFACCurvature

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
        assignment: OwnerAssignment = "balanced",
        gradient_exchange: str = "owner",
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
        check_choice("assignment", assignment, ("balanced", "round_robin"))
        check_choice("gradient_exchange", gradient_exchange, ("owner", "all_reduce"))
        system = System(
            partial(dpkfac_plan, assignment=assignment),
            options.block_rules,
            f"{assignment} {gradient_exchange}",
            owners=gradient_exchange,
        )
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=own_keywords(DPKFAC),
            curvature=lambda training: KFACCurvature(training, options, system),
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
            debug=debug,
            rest=rest,
            rest_layers=rest_layers,
            rest_kwargs=rest_kwargs,
        )

    def register_owner_hook(self, ddp: DistributedDataParallel) -> None:
        """Let DistributedDataParallel send each gradient to its owner alone, during backward.

        This takes the place of an average on every process: the volume is that of
        ``gradient_exchange="owner"``, and hidden behind the backward pass. Until :meth:`step`, a
        gradient is the mean on its owner and this process's own elsewhere, so that
        ``clip_grad_norm_`` before it sees other gradients on each process.

        Args:
            ddp: The wrapper of this optimizer's model, before its first backward.

        Raises:
            TypeError: If ``ddp`` is no DistributedDataParallel.
            ValueError: If ``ddp`` has another model, with a GradScaler, whose verdict on overflows
                would differ between processes, or with ``gradient_exchange="all_reduce"``.
        """
        scaler, curvature = self._training.scaler, self._curvature
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"{type(ddp).__name__} is not a DistributedDataParallel model")
        if ddp.module is not self._training.model:
            raise ValueError("the DistributedDataParallel model wraps another model than this")
        if scaler is not None and scaler.is_enabled():
            raise ValueError(
                "with the owner hook a GradScaler would find an overflow on one process and not on "
                "another, and one would skip step() alone; train in bfloat16, or without the hook"
            )
        if not curvature.only_to_owners:
            raise ValueError(
                "gradient_exchange='all_reduce' averages gradients everywhere, as "
                "the model does without a hook; use gradient_exchange='owner' with it"
            )
        curvature.hook = OwnerHook(self._training.world, curvature.owners, ddp)

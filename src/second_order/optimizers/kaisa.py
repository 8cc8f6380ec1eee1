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
from torch import Tensor, nn

from second_order.distributed.assignment import AssignmentCost
from second_order.kfac.curvature import KFACCurvature, System
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import kaisa_plan
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import BlockRules
from second_order.kronecker.solvers import SolverName
from second_order.optimizers.base import ParamsOrModel, SecondOrderOptimizer
from second_order.options import (
    Interval,
    Schedule,
    check_choice,
    check_flag,
    check_number,
    own_keywords,
)

__all__ = ["KAISA"]


class KAISA(SecondOrderOptimizer):
    """K-FAC on one process or many, around any first-order optimizer.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = KAISA(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.

    Args:
        params_or_model: The model, whose trainable parameters are optimized; or parameters, or
            parameter groups as for any ``torch.optim`` optimizer, with ``model=``.
        model: The model, where the first argument is not one. Wrappers (DistributedDataParallel,
            ``torch.compile``) are looked through.
        lr: The base's learning rate, a float or a tensor; schedulers reach it as always.
        base: Class of the optimizer that takes the preconditioned gradients.
        damping: γ, added to the curvature before it is inverted; number or callable, at least 0.
            Larger is more cautious: the step turns from the natural to the plain gradient.
        relative_damping: γ of a layer is ``damping`` times the layer's mean curvature,
            tr A tr G / (dim A dim G), which frees it of the scale of the loss. False: γ is
            ``damping`` itself, as in the papers. KAISA's published code has smaller factors, and
            so another γ for the same step: see "Where it differs from the paper" in its docs.
        factor_decay: Weight of the past in the running averages of A and G, in [0, 1); number or
            callable.
        kl_clip: κ, the bound on the change lr² Σ P·∇ that one step makes to the model's
            predictions (Pauloski et al. 2022, 5.1); number, callable or None for no bound. A number
            is the bound at the learning rate's peak and shrinks with lr² when a schedule lowers it;
            a callable is taken as it is. The best bound grows with the batch: 1e-4 at 64 examples
            and 1e-3 at 512 on the digits MLP.
        solver: "eigen" applies (A ⊗ G + γ I)⁻¹ exactly; "inverse" damps A and G apart and takes
            their Cholesky inverses: cheaper, and about as good on the digits.
        factor_update_steps: Statistics are taken every so many steps; number or callable.
        inv_update_steps: Inverses are refreshed every so many steps; number or callable.
        refresh_warmup_steps: During the first steps, so many, both are refreshed at every step:
            a first inverse from a single batch is no guide for the next hundred steps.
        fisher: "empirical" takes the gradients of your own backward; "sampled" draws labels from
            the model's predictions and takes the gradients of those, at the price of a further
            backward pass to the layers' outputs whenever statistics are due.
        likelihood: For the sampled Fisher, what the outputs mean: "categorical" (logits, classes on
            the last dimension), "bernoulli" (logits), "gaussian" (means), or a callable
            ``output -> summed negative log-likelihood of labels it has drawn``.
        kfac_approx: For layers applied at many positions: "expand" if each position has a loss
            term (language models), "reduce" if positions are pooled (Eschenhagen et al. 2023).
        eigen_refresh: "full" computes eigenvectors anew at each refresh. "warm" takes one step of
            orthogonal iteration from the last ones where that is accurate.
        grad_worker_fraction: Share of the processes that precondition a layer. 1.0: all, least
            communication in a step (COMM-OPT). 1 / processes, or 0: one, least memory (MEM-OPT).
        factor_exchange: "all_reduce" gives every process every factor's running average. "reduce"
            sends statistics to the process that decomposes the factor, and nobody else keeps it:
            half the traffic, and memory that falls with the number of processes; a checkpoint then
            needs :meth:`consolidate`, or ``torch.distributed.checkpoint``.
        assignment: Balance the "compute" (n³) or the "memory" (n²) of factors over processes.
        colocate_factors: One process decomposes both factors of a layer; False spreads them.
        symmetry_aware: Keep and send the upper triangles of symmetric matrices.
        max_factor_dim: Layers with a larger factor, A of the inputs or G of the outputs, are left
            to the base, and named: memory grows with its square, a solve with its cube. The A of
            an embedding is diagonal, of any size.
        skip_layers: Patterns of module names or class names, such as ``["head", "blocks.*.mlp"]``,
            that the base trains alone, with all that is inside them.
        accumulation_steps: Micro-batches to a step, if the loss is divided by their number; 1 if
            the losses of several passes are added up. "auto": the passes of each step are counted,
            and their losses taken to be divided by their number.
        loss_reduction: "mean" if the loss is a mean over its terms, "sum" if it is a sum.
        grad_scaler: The ``GradScaler`` that scales the loss, if there is one.
        factor_dtype: Factors are kept and sent in it: float32, float64 or bfloat16.
        inv_dtype: Inverses are kept, sent and applied in it; decompositions use float32 or more.
        max_consecutive_failures: So many refreshes in a row without a sound decomposition of a
            layer raise :class:`~second_order.DecompositionError` on every process.
        gradient_averaging: "auto" averages gradients over the processes, after giving all of them
            the first one's parameters, unless DistributedDataParallel does; True or False: always
            or never.
        process_group: The processes to work with; None for the default group, if there is one.
        **base_kwargs: Arguments of ``base``: ``momentum``, ``weight_decay``, ``betas`` and so on.

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
        damping: Schedule = 2.0,
        relative_damping: bool = True,
        factor_decay: Schedule = 0.95,
        kl_clip: Schedule | None = 1e-4,
        solver: SolverName = "eigen",
        factor_update_steps: Interval = 10,
        inv_update_steps: Interval = 100,
        refresh_warmup_steps: int = 20,
        fisher: str = "empirical",
        likelihood: Likelihood = "categorical",
        kfac_approx: Approximation = "expand",
        eigen_refresh: str = "full",
        grad_worker_fraction: float = 1.0,
        factor_exchange: str = "all_reduce",
        assignment: AssignmentCost = "compute",
        colocate_factors: bool = True,
        symmetry_aware: bool = True,
        max_factor_dim: int = 8192,
        skip_layers: Sequence[str] = (),
        accumulation_steps: int | Literal["auto"] = "auto",
        loss_reduction: str = "mean",
        grad_scaler: Any = None,
        factor_dtype: torch.dtype = torch.float32,
        inv_dtype: torch.dtype = torch.float32,
        max_consecutive_failures: int = 3,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        **base_kwargs: Any,
    ) -> None:
        options = KFACOptions.of(locals())
        check_number(
            "grad_worker_fraction",
            grad_worker_fraction,
            low=0.0,
            high=1.0,
            remedy="1.0 is the default",
        )
        check_choice("assignment", assignment, ("compute", "memory"))
        check_choice("factor_exchange", factor_exchange, ("all_reduce", "reduce"))
        check_flag("colocate_factors", colocate_factors)
        system = System(
            partial(
                kaisa_plan,
                fraction=float(grad_worker_fraction),
                cost=assignment,
                colocate=colocate_factors,
                keeps_all=factor_exchange == "all_reduce",
            ),
            BlockRules(max_factor_dim),
            f"{grad_worker_fraction} {assignment} {colocate_factors} {factor_exchange}",
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
        )

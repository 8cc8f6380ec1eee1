"""DHO2: FOSI over many processes.

Sivan et al., FOSI, ICLR 2024; algorithms 2 and 3 of "Accelerating Deep Neural Network Training via
Distributed Hybrid Order Optimization", arXiv 2505.00982, first version.

for the first warmup_steps:      w <- w + Base(g)
every curvature_interval steps:  û, V̂ <- Lanczos on the Hessian of the curvature batch, its rows
                                 spread over the processes; k largest and l smallest
every step:                      g₁ = V̂V̂ᵀg,  g₂ = g − g₁
                                 d₁ = −α V̂ diag(|û|⁻¹) V̂ᵀ mom(g₁),  d₂ = Base(g₂)
                                 w <- w + d₁ + s (d₂ − V̂V̂ᵀd₂)

Steep directions get Newton steps of their own, so that the learning rate of the base is no longer
held down by them. With one process this is FOSI. With P processes V̂ is kept in parts:

layout    V̂ here    base's state here   elements moved a step
row       n/P × r   n/P                 the gradient's all-reduce, in two halves, and 2r
column    n × r/P   n                   all-reduces of n: the gradient, g₁, and the step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from second_order.contract.training import Training
from second_order.fosi.curvature import FOSICurvature
from second_order.fosi.options import Layout
from second_order.fosi.presets import PresetName, check_given, suited
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import ProductMode
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.eigenpair_optimizer import EigenpairOptimizer
from second_order.options import AutoInterval, Schedule, own_keywords

__all__ = ["DHO2"]


class DHO2(EigenpairOptimizer):
    """Newton steps along the Hessian's extreme eigenvectors, a first-order optimizer for the rest.

        optimizer = DHO2(model, lr=0.1, momentum=0.9)
        optimizer.curvature_closure = lambda: criterion(model(x_curv), y_curv)

    The curvature closure evaluates the loss on the curvature batch: some hundred examples, on each
    process its own. It does not call ``backward``. It is asked when eigenpairs are due, and leaves
    no trace in the model: buffers, random state and gradients are as before.

    Args:
        params_or_model: A module, whose trainable parameters are optimized, or parameters or
            groups. Any architecture will do that can be differentiated twice.
        model: The module, where ``params_or_model`` is not one. Needed only to keep its train/eval
            mode, should the curvature closure change it, and for names in ``summary()``.
        lr: Learning rate of the base.
        base: Class of the first-order optimizer.
        preset: What the training is like, for the options that are None by default: "general";
            "fine-tuning", where a small part trains behind a frozen body; "full-batch", where every
            gradient is of all examples, and the curvature batch is these; "auto": fine-tuning if
            three quarters of the model's parameters are frozen and come before the first that
            trains, else general. Options that are given go before it.
        largest: k, how many of the largest eigenpairs get Newton steps; 10, or 70 for fine-tuning.
        smallest: l, how many of the smallest (most negative) eigenpairs; steps lead away from them.
        curvature_interval: T, steps from one computation of the eigenpairs to the next, or a
            callable of the step; "auto": as often as ``overhead`` allows.
        overhead: With "auto": the share of the time of the base alone that all computations of
            eigenpairs may take together, above 0 and up to 10. A product is timed at step 10 /
            ``overhead``, the first computation comes once it is paid for, and each that follows
            when it is; the first three are timed, and the costs, in steps of the base, are kept
            from then on, in checkpoints, too. Not used without "auto".
        warmup_steps: W, steps of the base before the first pairs; None for ``curvature_interval``,
            or with "auto" until they are paid for; or 0 for fine-tuning, and 100 for full batches:
            then they are paid for before the second ones.
        newton_scale: α, the length of a Newton step; 1.0 is a full one. 0.1, or 0.5 for fine-tuning
            and full batches. A number is α at the largest learning rate of the schedule and follows
            it from there; a callable of the step is taken as it is.
        lr_scale_clip: Bound on s = |λ₁| / |λ_k|, by which the base's steps are stretched once the
            k steepest directions are out of their way. None for the published values: 3 for SGD,
            1 for other bases, which scale their steps themselves.
        lr_scale_guard: Begin with s = 1, and let it grow by half at each further refresh while the
            loss of the curvature batch does not rise; halve it where that has risen. A learning
            rate that the base bears alone may be too long times 3. False for s as published.
        lanczos_iterations: m, Hessian-vector products of a refresh at most; None for
            max(4(k + l), 2 ln n), or 100 with the 70 pairs of fine-tuning. Where none is set, and l
            is 0, a warm start takes max(2k, 20) of these at most.
        lanczos_tol: A refresh ends once every eigenpair has ‖Hv − θv‖ <= tol |θ|.
        lanczos_dtype: Dtype of eigenvectors; None for float64 where a parameter is, else float32.
        eigenvalue_floor: Eigenvalues count as at least this share of the largest in size when
            steps are divided by them.
        subspace_momentum: Momentum inside the eigenvectors' span. "average": the base's β, as a
            running average, so that α means the same whatever the base's momentum. "base": just as
            the base does it, which for SGD with β sums up 1 / (1 − β) as much (FOSI with α = 0.01
            and β = 0.9 is "average" with α = 0.1). A number: a running average with that β. None
            for "average", or 0.0 for fine-tuning and full batches.
        warm_start: Start a refresh from the last eigenvectors.
        trust_region: Shorten Newton steps where the eigenpairs are wrong about them: one is at most
            ten times as long as usual, in units of the loss; where V̂ᵀg changes along the steps
            faster than û tells, they are cut to half of what could be borne, and grow again; one
            after which the gradient is not finite is taken back. Where the model holds, steps are
            those of False bit for bit.
        hvp: How Hessian-vector products are made: "retained" keeps the graph of the curvature
            batch for a refresh; "recomputed" evaluates the closure again for each product, one
            graph at a time in memory; "differences" takes finite differences of gradients, for what
            cannot be differentiated twice. "auto": retained, or recomputed for several closures,
            or differences where FSDP2 has sharded the model.
            The last two need a closure that takes the same batch each time within a refresh.
        curvature: Whose eigenpairs: "hessian"; "gauss-newton", the Hessian of the loss with the
            model's outputs linear in the weights, which has no negative eigenvalues where the loss
            is convex in the outputs; "empirical-fisher", the mean of ggᵀ over examples' gradients.
            For the last two the closure returns :class:`second_order.lanczos.Outputs`.
        layout: "row" keeps n/P rows of the eigenvectors and of the base's state on each process,
            and suits bases that work element by element: SGD, Adam, AdamW, RMSprop. "column" keeps
            r/P of the eigenvectors and all of the base's state, and suits every base.
        seed: Seed of the first start vector.
        curvature_closure: Returns the loss of the curvature batch, or (loss, number of examples) if
            processes have unequal batches; or a sequence of such functions, one a micro-batch. May
            be assigned later, or given to :meth:`step`.
        grad_scaler: The ``GradScaler`` that scales the loss, where the optimizer averages the
            gradients of several processes itself.
        gradient_averaging: "auto" averages gradients over the processes, after giving all of them
            the first one's parameters, unless DistributedDataParallel does; True or False: always
            or never.
        process_group: The processes to work with; None for the default group, if there is one.
        debug: Compare the processes' parameters bit for bit, and the base's state where each has
            all of it: before the first step and every 100 steps for True, or every so many steps.
            Where they have parted, every process raises :class:`~second_order.RankMismatchError`
            with the name of the tensor and the ranks. Not saved in checkpoints.
        **base_kwargs: Arguments of ``base``: ``momentum``, ``weight_decay``, ``betas`` and so on.

    Attributes:
        curvature_closure: The closure in use; not saved.

    Raises:
        TypeError: For an unknown keyword (naming the closest known one).
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
        preset: PresetName = "auto",
        largest: int | None = None,
        smallest: int = 0,
        curvature_interval: AutoInterval = "auto",
        overhead: float = 0.2,
        warmup_steps: int | None = None,
        newton_scale: Schedule | None = None,
        lr_scale_clip: float | None = None,
        lr_scale_guard: bool = True,
        lanczos_iterations: int | None = None,
        lanczos_tol: float = 1e-2,
        lanczos_dtype: torch.dtype | None = None,
        eigenvalue_floor: float = 1e-2,
        subspace_momentum: float | Literal["average", "base"] | None = None,
        warm_start: bool = True,
        trust_region: bool = True,
        hvp: ProductMode = "auto",
        curvature: CurvatureKind = "hessian",
        layout: Layout = "row",
        seed: int = 0,
        curvature_closure: LossFn | Sequence[LossFn] | None = None,
        grad_scaler: Any = None,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        debug: bool | int = False,
        **base_kwargs: Any,
    ) -> None:
        values = dict(locals())
        check_given(values)

        def steps_of(training: Training) -> FOSICurvature:
            options, settings = suited(values, training)
            return FOSICurvature(training, options, curvature_closure, settings)

        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=own_keywords(DHO2),
            curvature=steps_of,
            needs_model=False,
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
            debug=debug,
        )

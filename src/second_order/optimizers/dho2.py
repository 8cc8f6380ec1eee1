"""DHO2: FOSI on many ranks.

Sivan et al., FOSI, ICLR 2024; algorithms 2 and 3 of "Accelerating Deep Neural Network
Training via Distributed Hybrid Order Optimization", arXiv 2505.00982, first version.

for the first warmup_steps:      w <- w + Base(g)
every curvature_interval steps:  û, V̂ <- Lanczos on the Hessian of the curvature batch,
                                 whose rows are distributed over the ranks; k largest
                                 and l smallest eigenpairs
every step:                      g₁ = V̂V̂ᵀg,  g₂ = g − g₁
                                 d₁ = −α V̂ diag(|û|⁻¹) V̂ᵀ mom(g₁),  d₂ = Base(g₂)
                                 w <- w + d₁ + s (d₂ − V̂V̂ᵀd₂)

Steep directions get their own Newton steps, so they no longer limit the learning rate
of the base. On one rank this is FOSI. On P ranks, each rank stores a part of V̂:

layout    part of V̂   base's state   elements sent per step
row       n/P × r     n/P            the gradient's all-reduce, in two halves, and 2r
column    n × r/P     n              all-reduces of n: the gradient, g₁, and the step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from second_order.fosi.update import FOSICurvature
from second_order.lanczos.closure import Closures, check_closure, check_curvature
from second_order.optimizers.base import ParamsOrModel, SecondOrderOptimizer
from second_order.optimizers.config import CommonOptions, FOSIOptions, options_from
from second_order.optimizers.keywords import Rate, documented
from second_order.reporting.summary import CurvatureReport
from second_order.utils.checks import Interval, Schedule

__all__ = ["DHO2", "EigenpairOptimizer"]


class EigenpairOptimizer(SecondOrderOptimizer):
    """The base class of DHO2 and MRDHO2, with eigenpairs of the Hessian."""

    _curvature: FOSICurvature

    @property
    def curvature_closure(self) -> Closures | None:
        """The function that returns the loss of the curvature batch.

        You can assign another one.
        """
        return self._curvature.closure

    @curvature_closure.setter
    def curvature_closure(self, closure: Closures | None) -> None:
        """Replace the curvature closure by one or several other functions."""
        self._curvature.set_closure(closure)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature_closure: Closures | None = None,
    ) -> Any:
        """Take one step: refresh eigenpairs if due, split the gradient, step the base.

        On an accelerator, serve the workers until they have taken theirs.

        Args:
            closure: Calls ``backward`` and returns the loss. It is called once.
            curvature_closure: Returns the loss of the curvature batch, without calling
                ``backward``. If this step refreshes the eigenpairs, it replaces the
                optimizer's own closure for this step.

        Returns:
            The result of the closure, or None.

        Raises:
            CurvatureError: On every rank, if a refresh is due and there is no curvature
                closure, or its loss cannot be evaluated or differentiated twice.
                Nothing has changed then, except that eigenpairs are dropped if other
                parameters train now.
        """
        if curvature_closure is None:
            return super().step(closure)
        if self.training.world.size == 1:
            # Several ranks check it together, when it is due.
            check_closure(curvature_closure)
        with self._curvature.replaced_closure(curvature_closure):
            return super().step(closure)

    @property
    def curvature(self) -> CurvatureReport:
        """A report of the last refresh, and the cost of all.

        Synchronizes with the device.
        """
        return self._curvature.report()


@documented(FOSIOptions, CommonOptions)
class DHO2(EigenpairOptimizer):
    """Newton steps along the Hessian's extreme eigenvectors, base steps along others.

        optimizer = DHO2(model, lr=0.1, momentum=0.9)
        optimizer.curvature_closure = lambda: criterion(model(x_curv), y_curv)

    The curvature closure returns the loss of the curvature batch: a few hundred
    examples, different ones on each rank. It does not call ``backward``. Each refresh
    of the eigenpairs calls it, and then restores the buffers, the random state and the
    gradients of the model. Every model that can be differentiated twice works.
    """

    def __init__(
        self,
        params: ParamsOrModel,
        lr: Rate | None = None,
        *,
        curvature_closure: Closures | None = None,
        num_largest: int = 10,
        num_smallest: int = 0,
        curvature_interval: Interval | Literal["auto"] = "auto",
        overhead: float = 0.2,
        warmup_steps: int | None = None,
        newton_scale: Schedule = 0.1,
        lr_scale_clip: float | None = None,
        lr_scale_guard: bool = True,
        subspace_momentum: float | Literal["average", "base"] = "average",
        trust_region: bool = True,
        lanczos_iterations: int | None = None,
        lanczos_tol: float = 1e-2,
        lanczos_dtype: torch.dtype | None = None,
        eigenvalue_floor: float = 1e-2,
        warm_start: bool = True,
        hvp: Literal["auto", "retained", "recomputed", "differences"] = "auto",
        curvature: Literal["hessian", "gauss-newton", "empirical-fisher"] = "hessian",
        layout: Literal["row", "column"] = "row",
        seed: int = 0,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        model: nn.Module | None = None,
        grad_scaler: Any = None,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        debug: bool | int = False,
        **base_kwargs: Any,
    ) -> None:
        arguments = locals()
        check_curvature(curvature, hvp)
        options = options_from(FOSIOptions, arguments)
        common = options_from(CommonOptions, arguments)

        # Without K-FAC layers, parameters need no module.
        super().__init__(
            params,
            lr,
            common=common,
            base_kwargs=base_kwargs,
            make_curvature=lambda training: FOSICurvature(
                training, options, curvature_closure
            ),
            needs_model=False,
        )

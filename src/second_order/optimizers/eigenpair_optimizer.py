"""The public side of an optimizer that steps along eigenvectors: keywords, closure and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from second_order.fosi.curvature import FOSICurvature
from second_order.fosi.eigenpairs import Closures
from second_order.lanczos.closure import CurvatureKind, LossFn, check_closure
from second_order.lanczos.hvp import ProductMode
from second_order.optimizers.base import SecondOrderOptimizer
from second_order.optimizers.keywords import CommonKeywords
from second_order.options import Schedule
from second_order.report import CurvatureReport

__all__ = ["EigenpairOptimizer", "PairKeywords"]


class PairKeywords(CommonKeywords, total=False):
    """The types of the options of eigenpairs that DHO2 and MRDHO2 both have."""

    largest: int | None
    smallest: int
    warmup_steps: int | None
    newton_scale: Schedule | None
    lr_scale_clip: float | None
    lanczos_iterations: int | None
    lanczos_tol: float
    lanczos_dtype: torch.dtype | None
    eigenvalue_floor: float
    hvp: ProductMode
    curvature: CurvatureKind
    seed: int
    curvature_closure: LossFn | Sequence[LossFn] | None


class EigenpairOptimizer(SecondOrderOptimizer):
    """A base optimizer and eigenpairs of the Hessian of a loss that is given as a closure."""

    _curvature: FOSICurvature

    @property
    def curvature_closure(self) -> Closures | None:
        """The function that evaluates the loss on the curvature batch; may be assigned."""
        return self._curvature.closure.own

    @curvature_closure.setter
    def curvature_closure(self, closure: Closures | None) -> None:
        """Replace the curvature closure by another function, or a sequence of functions."""
        if closure is not None:
            check_closure(closure)
        self._curvature.closure.own = closure

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature_closure: Closures | None = None,
    ) -> Any:
        """Take one step: refresh the eigenpairs if they are due, split the gradient, step the base.

        On an accelerator, serve the workers until they have taken theirs.

        Args:
            closure: Evaluates the model, calls ``backward`` and returns the loss. Called once.
            curvature_closure: Evaluates the loss on the curvature batch, and does not call
                ``backward``; called if this step refreshes, or measures the cost of that, in place
                of the optimizer's own.

        Returns:
            What the closure returned, or None.

        Raises:
            CurvatureError: On every process, if a refresh is due and there is no curvature
                closure, or its loss cannot be evaluated or differentiated twice. Nothing has
                changed then, but that eigenpairs of other parameters than train now are dropped.
        """
        if curvature_closure is not None and self._training.world.size == 1:
            check_closure(curvature_closure)  # several processes hear of it together, once due
        self._curvature.closure.given = curvature_closure
        try:
            return super().step(closure)
        finally:
            self._curvature.closure.given = None

    @property
    def curvature(self) -> CurvatureReport:
        """A report of the last refresh and of all refreshes' cost. Waits for the device."""
        return self._curvature.report()

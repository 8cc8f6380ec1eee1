"""The public side of an optimizer with Kronecker factors: the factors as an object."""

from __future__ import annotations

import torch

from second_order.errors import SecondOrderError
from second_order.kfac.curvature import KFACCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.optimizers.base import SecondOrderOptimizer

__all__ = ["KroneckerOptimizer"]


class KroneckerOptimizer(SecondOrderOptimizer):
    """A base optimizer and the Kronecker factors of a model's layers."""

    def curvature(
        self, *, dtype: torch.dtype = torch.float64, gather: bool = True
    ) -> KroneckerCurvature:
        """The factors as a matrix to apply, solve with and sample from, once the model has trained.

        They are copied, and training may go on. A collective where other processes keep some of
        them, as with DPKFAC and ``factor_exchange="reduce"``: every process calls it, and each gets
        all of them. DPKFAC's factors are of the batches of their owner.

        Args:
            dtype: Dtype of the copies, and of everything computed with them.
            gather: False to take only what this process keeps, without a message; the other layers
                are then in :attr:`~second_order.KroneckerCurvature.uncovered`.

        Raises:
            SecondOrderError: Before the first statistics, and on a process that does not train.
        """
        curvature = self._curvature
        if not isinstance(curvature, KFACCurvature):
            raise SecondOrderError(
                f"rank {self._training.world.rank} computes statistics for others, and keeps no "
                f"factors: call curvature() on the ranks whose optimizer.role is 'worker'"
            )
        if gather and curvature.kept_elsewhere:
            self._agree("curvature()")
        return curvature.fitted(dtype, gather)

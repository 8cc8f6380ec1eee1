"""The public side of an optimizer with Kronecker factors: keywords, the factors as an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from second_order.errors import SecondOrderError
from second_order.kfac.curvature import KFAC
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.optimizers.base import SecondOrderOptimizer
from second_order.optimizers.keywords import CommonOptions
from second_order.options import keyword

__all__ = ["KroneckerOptimizer", "RestOptions"]


@dataclass(frozen=True, kw_only=True)
class RestOptions(CommonOptions):
    """The keywords of every optimizer with Kronecker factors, who may have a second base.

    Attributes:
        rest: Class of a second base. ``base`` then trains hidden weights alone: weights of modules,
            of two dimensions or more (of two exactly with ``torch.optim.Muon``). ``rest`` trains
            embeddings, the output head (the last Linear), norms, biases and lone parameters. None:
            one base for all.
        rest_layers: Patterns of modules, as for ``skip_layers``, that ``rest`` trains besides, with
            all that is inside them.
        rest_kwargs: Arguments of ``rest`` where the two are to differ, as ``{"lr": 1e-3}``.
    """

    rest: type[torch.optim.Optimizer] | None = keyword(None)
    rest_layers: Sequence[str] = keyword(())
    rest_kwargs: Mapping[str, Any] | None = keyword(None)


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
        if not isinstance(curvature, KFAC):
            raise SecondOrderError(
                f"rank {self._training.world.rank} computes statistics for others, and keeps no "
                f"factors: call curvature() on the ranks whose optimizer.role is 'worker'"
            )
        if gather and curvature.kept_elsewhere:
            self._agree("curvature()")
        return curvature.fitted(dtype, gather)

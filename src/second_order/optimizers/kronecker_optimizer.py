"""The public side of an optimizer with Kronecker factors: keywords, the factors as an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from second_order.errors import SecondOrderError
from second_order.kfac.curvature import KFAC
from second_order.kfac.options import AutoSchedule, PerStep, PreconditionerScale
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.kronecker.solvers import SolverName
from second_order.optimizers.base import SecondOrderOptimizer
from second_order.optimizers.keywords import CommonKeywords
from second_order.options import AutoInterval, keyword

__all__ = ["KFACKeywords", "KroneckerOptimizer", "RestOptions"]


@dataclass(frozen=True)
class RestOptions:
    """The keywords of a second base.

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


class KFACKeywords(CommonKeywords, total=False):
    """The types of ``RestOptions`` and of ``KFACOptions``, for callers."""

    rest: type[torch.optim.Optimizer] | None
    rest_layers: Sequence[str]
    rest_kwargs: Mapping[str, Any] | None
    damping: AutoSchedule
    relative_damping: bool
    preconditioner_scale: PreconditionerScale
    factor_decay: AutoSchedule | PerStep
    kl_clip: AutoSchedule | None
    solver: SolverName
    inv_update_steps: AutoInterval | None
    factor_update_steps: AutoInterval | None
    overhead: float | None
    fisher: str
    likelihood: Likelihood
    kfac_approx: Approximation
    eigen_refresh: str
    refresh: str
    trace_bounds: tuple[float, float]
    symmetry_aware: bool
    max_factor_dim: int
    exact_blocks: bool
    max_exact_dim: int
    other_matrices: str
    skip_layers: Sequence[str]
    accumulation_steps: int | Literal["auto"]
    loss_reduction: str
    factor_dtype: torch.dtype
    inv_dtype: torch.dtype
    max_consecutive_failures: int


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

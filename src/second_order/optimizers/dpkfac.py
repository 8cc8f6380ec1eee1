"""DPKFAC: K-FAC that sends no factor (Zhang et al., 2023).

at construction:            each layer gets an owner
every step:                 gradients summed over the processes, a layer's at its owner alone
every factor_update_steps:  the owner's running averages of A, G, from its own batches
every inv_update_steps:     the owner's damped inverse
every step:                 the owner preconditions its layers' mean gradients; all get them, with
                            the owner's part of the clip's sum; all clip, and step the base
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.assignment import OwnerAssignment
from second_order.kfac.curvature import KFAC
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import System, dpkfac_plan
from second_order.kfac.precondition import OwnerHook
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.kaisa import KroneckerOptimizer
from second_order.optimizers.keywords import RestOptions, settled, signed, typed
from second_order.options import check_keywords, keyword, one_of, picked

__all__ = ["DPKFAC"]


@dataclass(frozen=True, kw_only=True)
class DPKFACOptions:
    """The keywords that DPKFAC alone has.

    Attributes:
        assignment: Who owns which layer: "balanced" gives the next largest layer to the process
            with the least memory taken, "round_robin" layer i to process i mod P, as the paper.
        gradient_exchange: "owner" sums a layer's gradients at its owner alone and sends them back
            preconditioned: the volume of an all-reduce in all. "all_reduce" averages all gradients
            everywhere first, half as much again; it is what happens under DistributedDataParallel,
            which has averaged them already (but see :meth:`register_owner_hook`).
    """

    assignment: OwnerAssignment = keyword("balanced", one_of("balanced", "round_robin"))
    gradient_exchange: str = keyword("owner", one_of("owner", "all_reduce"))

    def __post_init__(self) -> None:
        check_keywords(self)


@dataclass(frozen=True, kw_only=True)
class DPKFACKeywords(KFACOptions, DPKFACOptions, RestOptions):
    """The keywords of DPKFAC."""


@signed(DPKFACKeywords)
class DPKFAC(KroneckerOptimizer):
    """K-FAC whose layers' owners build the factors from their own batches.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = DPKFAC(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.

    Each layer belongs to one process, which alone keeps its factors and its inverse. Its factors
    see that process's share of the data only: an average over more steps instead of over more
    processes. With one process it is :class:`KAISA`.

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.
    """

    _curvature: KFAC

    @typed(DPKFACKeywords)
    def __init__(self, params: ParamsOrModel, lr: Any = None, **keywords: Any) -> None:
        values, common = settled(DPKFAC, lr, keywords)
        options, own = KFACOptions.of(values), picked(DPKFACOptions, values)
        system = System(
            partial(dpkfac_plan, assignment=own.assignment),
            options.block_rules,
            str(own),
            owners=own.gradient_exchange,
        )
        super().__init__(
            params,
            curvature=lambda training: KFAC(training, options, system),
            **common,
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
        scaler, curvature = self.training.scaler, self._curvature
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"{type(ddp).__name__} is not a DistributedDataParallel model")
        if ddp.module is not self.training.model:
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
        curvature.hook = OwnerHook(self.training.world, curvature.owners, ddp)

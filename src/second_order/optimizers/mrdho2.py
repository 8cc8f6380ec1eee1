"""MRDHO2: some processes compute eigenpairs while the others train.

MR-DHO2 of "Accelerating Deep Neural Network Training via Distributed Hybrid Order Optimization",
arXiv 2505.00982, first version.

workers                                        accelerators, meanwhile
at the start of an epoch:  c = w, sent    ->   w = c; û, V̂ <- Lanczos on their own batches
E steps:  w <- w + Base(g),  p <- p + g   <-   worker j gets its vectors V̂ⱼ, and ûⱼ
at the end:  w <- w_E − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w_E − c)]      one all-reduce of n

The last line is the paper's equation 17. It replaces what the base has done in the span of V̂ by one
Newton step on the summed gradient, which is stable only while α (1 − (1 − ηu)^E) / (ηu) < 2 for
each eigenvalue u at a learning rate η. So "guarded", the default, asks the accelerators for the
loss without and with it, and makes it where that falls by half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from second_order.distributed.roles import Role
from second_order.errors import SecondOrderError
from second_order.fosi.accelerator import Accelerating, divided_curvature
from second_order.fosi.epochs import Divided
from second_order.fosi.options import EpochOptions, FinalUpdate, PairOptions
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.dho2 import EigenpairOptimizer
from second_order.optimizers.keywords import CommonOptions, settled, signed, typed
from second_order.options import picked
from second_order.report import EpochReport

__all__ = ["MRDHO2", "FinalUpdate"]


@dataclass(frozen=True, kw_only=True)
class MRDHO2Keywords(PairOptions, EpochOptions, CommonOptions):
    """The keywords of MRDHO2."""


WITHOUT = "curvature_interval overhead lr_scale_guard subspace_momentum warm_start"


@signed(MRDHO2Keywords, without=f"{WITHOUT} trust_region layout".split())
class MRDHO2(EigenpairOptimizer):
    """DHO2 whose eigenpairs are computed by processes of their own, while the others train.

        optimizer = MRDHO2(model, lr=0.1, momentum=0.9, epoch_steps=len(loader))
        with optimizer:
            if optimizer.role == "accelerator":
                optimizer.serve(loader, lambda batch: criterion(model(batch[0]), batch[1]))
            else:
                ...  # the usual loop

    The last ``accelerators`` ranks help; the others average gradients among themselves. A worker
    waits for accelerators at the end of an epoch only, if they are late. If one dies, hangs or
    sends numbers that are not finite, workers go on with the base alone. A rank that runs the usual
    loop and is an accelerator computes eigenpairs in :meth:`step`, by ``curvature_closure``. For
    DistributedDataParallel, make the optimizer of the plain model with
    ``gradient_averaging=False``, then wrap it with ``process_group=optimizer.worker_group``.

    With one process, or ``accelerators=0``, it is :class:`~second_order.DHO2` with an interval of
    ``epoch_steps``.
    """

    _curvature: Divided

    @typed(MRDHO2Keywords)
    def __init__(self, params: ParamsOrModel, lr: Any = None, **keywords: Any) -> None:
        values, common = settled(MRDHO2, lr, keywords)
        values["curvature_interval"], closure = values["epoch_steps"], values["curvature_closure"]
        options = picked(EpochOptions, values)
        super().__init__(
            params,
            curvature=lambda training: divided_curvature(training, options, closure),
            needs_model=False,
            helper_role="accelerator" if options.accelerators and options.wanted else None,
            helpers=options.accelerators,
            **common,
        )

    @property
    def role(self) -> Role:
        """The role of this process, "worker" or "accelerator"."""
        return self._curvature.role

    @property
    def worker_group(self) -> Any:
        """The process group of the workers; of the accelerators, on one of them."""
        return self.training.world.group

    @property
    def epochs(self) -> Sequence[EpochReport]:
        """Reports of the last 1,000 epochs, on a worker."""
        return self._curvature.reports

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close; an accelerator calls this, not ``step``.

        Args:
            batches: Batches, one for an epoch's eigenpairs, from the start again when they end; if
                they have a length, an epoch's is its number modulo that, after a resume too.
            loss_fn: The loss of a batch, or (loss, number of examples); no ``backward``.

        Returns:
            Number of epochs whose eigenpairs have been computed.

        Raises:
            SecondOrderError: On a worker; and if another accelerator has failed.
            CurvatureError: If the loss cannot be evaluated or differentiated twice.
            ValueError: If there is no batch.
        """
        self.take_shards()
        if not isinstance(self._curvature, Accelerating):
            raise SecondOrderError(
                f"rank {self.training.world.rank} is a worker: it trains, and serve() is for the "
                f"ranks whose optimizer.role is 'accelerator'"
            )
        return self._curvature.serve(batches, loss_fn)

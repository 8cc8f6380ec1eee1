"""MRDHO2: some processes compute eigenpairs while the others train.

MR-DHO2 of "Accelerating Deep Neural Network Training via Distributed Hybrid Order Optimization",
arXiv 2505.00982, first version.

workers                                        accelerators, meanwhile
at the start of an epoch:  c = w, sent    ->   w = c; û, V̂ <- Lanczos on their own batches
E steps:  w <- w + Base(g),  p <- p + g   <-   worker j gets its vectors V̂ⱼ, and ûⱼ
at the end:  w <- w_E − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w_E − c)]      one all-reduce of n

The last line is the paper's equation 17. It replaces what the base has done in the span of V̂ by one
Newton step on the summed gradient, which is stable only while α (1 − (1 − ηu)^E) / (ηu) < 2 for
each eigenvalue u at a learning rate η. So "guarded" asks the accelerators for the loss without and
with it, and makes it where that falls by half; "additive" keeps w_E and adds a Newton step on the
mean of the last gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from second_order.distributed.roles import Role
from second_order.errors import SecondOrderError
from second_order.fosi.divided import Divided, Helper, divided_curvature
from second_order.fosi.options import EpochOptions, FinalUpdate
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import ProductMode
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.eigenpair_optimizer import EigenpairOptimizer
from second_order.options import Schedule, own_keywords
from second_order.report import EpochReport

__all__ = ["MRDHO2", "FinalUpdate"]


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
    loop and is an accelerator computes eigenpairs in :meth:`step`, by ``curvature_closure``.

    With one process, or ``accelerators=0``, it is :class:`~second_order.DHO2` with an interval of
    ``epoch_steps``.

    Args:
        params_or_model: Module, parameters or groups, as for DHO2.
        model: The module, as for DHO2.
        lr: Learning rate of the base.
        base: Class of the first-order optimizer.
        accelerators: A, how many ranks compute eigenpairs.
        epoch_steps: E, steps between two final updates.
        final_update: "paper" is equation 17. "guarded" does it where the loss on the accelerators'
            batches falls by at least half with it. "additive" adds a Newton step on the mean of
            the last gradients to what the base has done. "within" makes no update at the end: each
            step of the next epoch is DHO2's, with these eigenpairs.
        warmup_steps: W, steps of the base alone before the first epoch that accelerators help in;
            None for 0. Without accelerators as for DHO2.
        helper_timeout: Seconds without a sign of life, or of waiting at the end of an epoch (for
            eigenpairs, and again for the verdict of "guarded"), after which accelerators are given
            up.
        largest: k, how many of the largest eigenpairs.
        smallest: l, how many of the smallest eigenpairs.
        newton_scale: α, as for DHO2.
        lr_scale_clip: Bound on s, by which "within" stretches the base's steps outside the
            eigenvectors' span, as for DHO2.
        lanczos_iterations: m, Hessian-vector products at most, as for DHO2.
        lanczos_tol: Relative residual at which Lanczos ends, as for DHO2.
        lanczos_dtype: Dtype of the eigenvectors, as for DHO2.
        eigenvalue_floor: Least relative size that eigenvalues count with, as for DHO2.
        hvp: How Hessian-vector products are made, as for DHO2.
        curvature: Whose eigenpairs, as for DHO2; the loss function may return Outputs there, too.
        seed: Seed of the start vectors.
        curvature_closure: The closure, as for DHO2, if accelerators run the usual loop or are none.
        grad_scaler: The ``GradScaler``, as for DHO2.
        gradient_averaging: Whether to average gradients among the workers, as for DHO2. For
            DistributedDataParallel, make the optimizer of the plain model with False, then wrap it
            with ``process_group=optimizer.worker_group``.
        process_group: All the processes; None for the default group, if there is one.
        debug: Compare the workers' parameters and the base's state bit for bit, as for DHO2.
        **base_kwargs: Arguments of ``base``.

    Attributes:
        role: "worker" or "accelerator".
        worker_group: The process group of the workers, be it of one; of the accelerators, on one of
            them; without accelerators, the optimizer's own.
        epochs: An :class:`EpochReport` for each of the last 1,000 epochs.

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
        accelerators: int = 1,
        epoch_steps: int = 100,
        final_update: FinalUpdate = "guarded",
        warmup_steps: int | None = None,
        helper_timeout: float = 60.0,
        largest: int = 10,
        smallest: int = 0,
        newton_scale: Schedule = 0.1,
        lr_scale_clip: float | None = None,
        lanczos_iterations: int | None = None,
        lanczos_tol: float = 1e-2,
        lanczos_dtype: torch.dtype | None = None,
        eigenvalue_floor: float = 1e-2,
        hvp: ProductMode = "auto",
        curvature: CurvatureKind = "hessian",
        seed: int = 0,
        curvature_closure: LossFn | Sequence[LossFn] | None = None,
        grad_scaler: Any = None,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        debug: bool | int = False,
        **base_kwargs: Any,
    ) -> None:
        options = EpochOptions.of({**locals(), "curvature_interval": epoch_steps})
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=own_keywords(MRDHO2),
            curvature=lambda training: divided_curvature(training, options, curvature_closure),
            needs_model=False,
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
            debug=debug,
            helper_role="accelerator" if accelerators and options.wanted else None,
        )

    _curvature: Divided

    @property
    def role(self) -> Role:
        """The role of this process, "worker" or "accelerator"."""
        return self._curvature.role

    @property
    def worker_group(self) -> Any:
        """The process group of the workers; of the accelerators, on one of them."""
        return self._training.world.group

    @property
    def epochs(self) -> Sequence[EpochReport]:
        """Reports of the last 1,000 epochs, on a worker."""
        return self._curvature.epochs.reports

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
        self._take_shards()
        if not isinstance(self._curvature, Helper):
            raise SecondOrderError(
                f"rank {self._training.world.rank} is a worker: it trains, and serve() is for the "
                f"ranks whose optimizer.role is 'accelerator'"
            )
        return self._curvature.serve(batches, loss_fn)

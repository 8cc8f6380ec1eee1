"""MRDHO2: some ranks compute eigenpairs while the others train.

MR-DHO2 of "Accelerating Deep Neural Network Training via Distributed Hybrid Order
Optimization", arXiv 2505.00982, first version.

workers                                      accelerators, at the same time
at the start of an epoch:  send c = w    ->  w = c; û, V̂ <- Lanczos on own batches
E steps:  w <- w + Base(g),  p <- p + g  <-  send V̂ⱼ and ûⱼ to worker j
at the end:  w <- w_E − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w_E − c)]  all-reduce of n

The last line is the paper's equation 17. It replaces the steps of the base in the span
of V̂ by one Newton step on the summed gradient. At a learning rate η, this is stable
only while α (1 − (1 − ηu)^E) / (ηu) < 2 for each eigenvalue u. Therefore "guarded", the
default, lets the accelerators compute the loss with and without this update, and
applies it only if the loss falls by half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from second_order.distributed.roles import Role
from second_order.errors import SecondOrderError
from second_order.fosi.accelerator import AcceleratorCurvature, make_curvature
from second_order.fosi.epochs import EpochCurvature
from second_order.lanczos.closure import Closures, check_curvature
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.config import CommonOptions, EpochOptions, options_from
from second_order.optimizers.dho2 import EigenpairOptimizer
from second_order.optimizers.keywords import Rate, documented
from second_order.reporting.summary import EpochReport
from second_order.utils.checks import Schedule

__all__ = ["MRDHO2", "FinalUpdate"]

FinalUpdate: TypeAlias = Literal["guarded", "paper"]


@documented(EpochOptions, CommonOptions)
class MRDHO2(EigenpairOptimizer):
    """DHO2 with helper ranks that compute the eigenpairs while the others train.

        optimizer = MRDHO2(model, lr=0.1, momentum=0.9, epoch_steps=len(loader))
        with optimizer:
            if optimizer.role == "accelerator":
                optimizer.serve(loader, lambda b: criterion(model(b[0]), b[1]))
            else:
                ...  # the usual loop

    The last ``helper_ranks`` ranks are accelerators: they compute eigenpairs. The other
    ranks, the workers, average their gradients among themselves. They wait for late
    accelerators only at the end of an epoch. If an accelerator exits, hangs or sends
    numbers that are not finite, workers continue with the base alone. An accelerator
    that runs the usual loop computes eigenpairs in :meth:`step`, with
    ``curvature_closure``. If you use DistributedDataParallel, make the optimizer first,
    with ``gradient_averaging=False``, and then wrap the model with
    ``process_group=optimizer.worker_group``.

    With one rank, or ``helper_ranks=0``, it is :class:`~second_order.DHO2` with an
    interval of ``epoch_steps`` and ``layout="column"``.
    """

    _curvature: EpochCurvature

    def __init__(
        self,
        params: ParamsOrModel,
        lr: Rate | None = None,
        *,
        curvature_closure: Closures | None = None,
        helper_ranks: int = 1,
        epoch_steps: int = 100,
        final_update: FinalUpdate = "guarded",
        helper_timeout: float = 60.0,
        num_largest: int = 10,
        num_smallest: int = 0,
        warmup_steps: int | None = None,
        newton_scale: Schedule = 0.1,
        lr_scale_clip: float | None = None,
        lanczos_iterations: int | None = None,
        lanczos_tol: float = 1e-2,
        lanczos_dtype: torch.dtype | None = None,
        eigenvalue_floor: float = 1e-2,
        hvp: Literal["auto", "retained", "recomputed", "differences"] = "auto",
        curvature: Literal["hessian", "gauss-newton", "empirical-fisher"] = "hessian",
        seed: int = 0,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        model: nn.Module | None = None,
        grad_scaler: Any = None,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        debug: bool | int = False,
        **base_kwargs: Any,
    ) -> None:
        arguments = {**locals(), "curvature_interval": epoch_steps}
        check_curvature(curvature, hvp)
        options = options_from(EpochOptions, arguments)
        common = options_from(CommonOptions, arguments)

        # Without eigenpairs there is nothing that a helper rank could compute.
        has_helpers = helper_ranks > 0 and options.num_pairs > 0
        super().__init__(
            params,
            lr,
            common=common,
            base_kwargs=base_kwargs,
            make_curvature=lambda training: make_curvature(
                training, options, curvature_closure
            ),
            needs_model=False,
            helper_role="accelerator" if has_helpers else None,
            num_helpers=helper_ranks,
        )

    @property
    def role(self) -> Role:
        """The role of this process, "worker" or "accelerator"."""
        return self._curvature.role

    @property
    def worker_group(self) -> Any:
        """The process group of the workers. On an accelerator: of the accelerators."""
        return self.training.world.group

    @property
    def epochs(self) -> Sequence[EpochReport]:
        """Reports of the last 1,000 epochs. Only workers have them."""
        return self._curvature.reports

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close.

        Accelerators call this instead of ``step``.

        Args:
            batches: One batch per epoch. When they end, they start again. If they have
                a length, epoch i uses batch i modulo the length, also after a resume.
                For the same batches as without the resume, they need the same order in
                every pass.
            loss_fn: Returns the loss of a batch, or (loss, number of examples), without
                calling ``backward``.

        Returns:
            Number of epochs whose eigenpairs were computed.

        Raises:
            SecondOrderError: On a worker, or if another accelerator failed.
            CurvatureError: If the loss cannot be evaluated or differentiated twice.
            ValueError: If there is no batch.
        """
        self.adopt_shards()
        if not isinstance(self._curvature, AcceleratorCurvature):
            raise SecondOrderError(
                f"rank {self.training.world.rank} is a worker, which trains; call serve() on "
                f"the ranks whose optimizer.role is 'accelerator'"
            )
        return self._curvature.serve(batches, loss_fn)

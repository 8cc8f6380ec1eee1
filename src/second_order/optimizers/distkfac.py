"""DistKFAC: K-FAC with nothing on the training path that can wait (Ba, Grosse, Martens, 2017).

stats workers, all the time:      A, G of their own batches at the newest parameters they got,
                                  sent to the layers' owners, who do not wait for them
without, every factor_update_steps:  A, G of the training batches, summed over the gradient workers
every inv_update_steps:           snapshots of the factors to the owners' threads
every step:                       inverses that are solved are sent to all gradient workers;
                                  each preconditions all layers' mean gradients:
                                  P = F̃⁻¹ ∇,  ν = min(1, sqrt(c₀ ζᵏ / Σ η² |P·∇|)),  ∇ <- ν P
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from second_order.distributed.roles import Role
from second_order.errors import SecondOrderError
from second_order.kfac.curvature import KFACCurvature
from second_order.kfac.distkfac_options import (
    FORGETFUL,
    DoublyFactored,
    check_distkfac_options,
    checked_doubly_factored,
    checked_staleness,
    half_the_cores,
)
from second_order.kfac.options import (
    AUTO,
    AutoSchedule,
    KFACOptions,
    PerStep,
    PreconditionerScale,
    documented,
)
from second_order.kfac.plan import distkfac_plan
from second_order.kfac.stats_workers import StatsWorker
from second_order.kfac.system import System
from second_order.kfac.threads import Background
from second_order.kfac.with_helpers import with_stats_workers
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.solvers import SolverName
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.kronecker_optimizer import KroneckerOptimizer
from second_order.options import AutoInterval, own_keywords
from second_order.report import Summary

__all__ = ["DistKFAC"]


@documented
class DistKFAC(KroneckerOptimizer):
    """K-FAC whose inverses, and whose statistics if there are ranks to spare, cost no waiting.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = DistKFAC(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.
    Inverses are solved on threads while training goes on, and put to use by all processes at the
    same step. When they come depends on the machine, so two runs differ as two batches' order
    would: see ``deterministic``.

    With ``stats_workers`` the last ranks do not train; they compute statistics for the others:

        optimizer = DistKFAC(model, lr=0.1, momentum=0.9, stats_workers=1)
        with optimizer:
            if optimizer.role == "stats":
                optimizer.serve(loader, lambda batch: criterion(model(batch[0]), batch[1]))
            else:
                ...  # the usual loop

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.

    Args:
        {params_or_model}
        {model}
        {lr}
        {base}
        {rest}
        {rest_layers}
        {rest_kwargs}
        stats_workers: How many ranks compute statistics instead of training. If all of them are
            gone, the others take statistics from their own passes again.
        helper_timeout: Seconds without a sign of life after which a stats worker is given up.
        inverse_threads: Threads of this process that solve; None for half the cores that it has for
            itself, at least 1 and at most 4.
        inverse_device: Device of the solves: "cpu", or "cuda" on a stream of their own.
        async_inverse: False waits for every solve, as ``max_staleness=0`` does.
        max_staleness: Steps after which a solve is waited for; None: never, but by drift, as
            ``inv_update_steps`` says. 0 is the synchronous algorithm.
        deterministic: Put inverses to use exactly ``max_staleness`` steps, by drift at most the
            layer's interval less one, after the snapshot that they are solved from, be they ready
            sooner or not: runs can be repeated bit for bit.
        conv_factors: "kfc", or "cheap": the inputs of a convolution are averaged over locations,
            and its gradients summed, before they are squared (Ba et al. 2017, appendix A).
        doubly_factored: (locations, channels) of the inputs of wide Linears that are fed by a
            flattened feature map, by the layers' names. Three small factors take the place of A and
            G (Ba et al. 2017, section 4). "auto": layers with more than ``max_factor_dim`` inputs,
            with the channels of the convolution before them. None: no layer.
        {max_factor_dim}
        {exact_blocks}
        {max_exact_dim}
        {other_matrices}
        {damping}
        {relative_damping}
        {preconditioner_scale}
        {factor_decay}
            None: 0.95 to the power of the steps since the last update, under any base.
        {kl_clip}
        solver: "inverse" damps the factors apart, by generalised π where there are three; "eigen"
            applies (A ⊗ G + γ I)⁻¹ exactly.
        factor_update_steps: Without stats workers, statistics are taken every so many steps; number
            or callable, or "auto" or None: as in :class:`KAISA`.
        inv_update_steps: Solves are launched every so many steps; number or callable, or "auto": as
            often as ``overhead`` allows. None: as ``refresh`` says; by drift, a solve that is not
            done at the step before the layer's next is waited for.
        overhead: As in :class:`KAISA`. Of solves that are not waited for, only what the training
            thread spends on them counts, launching them and
            putting them to use; where threads have no cores of their own, give a number.
        {fisher}
        {likelihood}
        {kfac_approx}
        {refresh}
        {trace_bounds}
        {symmetry_aware}
        {skip_layers}
        {accumulation_steps}
        {loss_reduction}
        {grad_scaler}
        {factor_dtype}
        {inv_dtype}
        max_consecutive_failures: So many solves in a row without a sound decomposition of a layer
            raise :class:`~second_order.DecompositionError` on every process.
        gradient_averaging: "auto" averages gradients over the gradient workers unless
            DistributedDataParallel does; True or False: always or never. With stats workers, wrap
            the model after the optimizer is made, with ``process_group=optimizer.worker_group``.
        {process_group}
        {debug}
        {**base_kwargs}

    Attributes:
        role: "worker" or "stats".
        worker_group: The process group of those that train; of the stats workers, on one of them.
        staleness: By layer, the age in steps of the factors of the inverse in use.
        delays: By layer, the number of steps for which its last solve was under way.

    Raises:
        TypeError: For an unknown keyword (naming the closest known one) or a missing model.
        ValueError: For a value outside its bounds, with the bound and the remedy.
        RankMismatchError: If the processes built different models or options.
    """

    _curvature: KFACCurvature | StatsWorker

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None = None,
        lr: float | Tensor,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        rest: type[torch.optim.Optimizer] | None = None,
        rest_layers: Sequence[str] = (),
        rest_kwargs: Mapping[str, Any] | None = None,
        stats_workers: int = 0,
        helper_timeout: float = 60.0,
        inverse_threads: int | None = None,
        inverse_device: str = "cpu",
        async_inverse: bool = True,
        max_staleness: int | None = None,
        deterministic: bool = False,
        conv_factors: str = "kfc",
        doubly_factored: DoublyFactored = "auto",
        max_factor_dim: int = KFACOptions.max_factor_dim,
        exact_blocks: bool = True,
        max_exact_dim: int = KFACOptions.max_exact_dim,
        other_matrices: str = KFACOptions.other_matrices,
        damping: AutoSchedule = KFACOptions.damping,
        relative_damping: bool = KFACOptions.relative_damping,
        preconditioner_scale: PreconditionerScale = KFACOptions.preconditioner_scale,
        factor_decay: AutoSchedule | PerStep | None = AUTO,
        kl_clip: AutoSchedule | None = KFACOptions.kl_clip,
        solver: SolverName = KFACOptions.solver,
        factor_update_steps: AutoInterval | None = KFACOptions.factor_update_steps,
        inv_update_steps: AutoInterval | None = KFACOptions.inv_update_steps,
        overhead: float | None = KFACOptions.overhead,
        fisher: str = KFACOptions.fisher,
        likelihood: Likelihood = KFACOptions.likelihood,
        kfac_approx: Approximation = KFACOptions.kfac_approx,
        refresh: str = KFACOptions.refresh,
        trace_bounds: tuple[float, float] = KFACOptions.trace_bounds,
        symmetry_aware: bool = KFACOptions.symmetry_aware,
        skip_layers: Sequence[str] = KFACOptions.skip_layers,
        accumulation_steps: int | Literal["auto"] = KFACOptions.accumulation_steps,
        loss_reduction: str = KFACOptions.loss_reduction,
        grad_scaler: Any = None,
        factor_dtype: torch.dtype = KFACOptions.factor_dtype,
        inv_dtype: torch.dtype = KFACOptions.inv_dtype,
        max_consecutive_failures: int = KFACOptions.max_consecutive_failures,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        debug: bool | int = False,
        **base_kwargs: Any,
    ) -> None:
        decay = FORGETFUL if factor_decay is None else factor_decay
        options = KFACOptions.of({**locals(), "eigen_refresh": "full", "factor_decay": decay})
        check_distkfac_options(locals())
        staleness = checked_staleness(async_inverse, max_staleness, deterministic, stats_workers)
        rules = replace(
            options.block_rules, doubly_factored=checked_doubly_factored(doubly_factored)
        )
        background = Background(
            threads=half_the_cores() if inverse_threads is None else inverse_threads,
            device=inverse_device,
            max_staleness=staleness,
            deterministic=deterministic,
        )
        system = System(
            partial(distkfac_plan, keeps_all=True),
            rules,
            f"{conv_factors} {inverse_device} {staleness} {deterministic} {stats_workers} "
            f"{helper_timeout}",
            conv_approximation="reduce" if conv_factors == "cheap" else None,
            background=background,
        )
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=own_keywords(DistKFAC),
            curvature=partial(
                with_stats_workers,
                options=options,
                system=system,
                count=stats_workers,
                patience=float(helper_timeout),
            ),
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
            debug=debug,
            rest=rest,
            rest_layers=rest_layers,
            rest_kwargs=rest_kwargs,
            helper_role="stats" if stats_workers else None,
        )

    @property
    def role(self) -> Role:
        """The role of this process, "worker" or "stats"."""
        return "stats" if isinstance(self._curvature, StatsWorker) else "worker"

    @property
    def worker_group(self) -> Any:
        """The process group of the gradient workers; of the stats workers, on one of them."""
        return self._training.world.group

    @property
    def staleness(self) -> dict[str, int]:
        """By layer, the age in steps of the factors of the inverse in use at the next step."""
        if isinstance(self._curvature, StatsWorker):
            return {}
        taken, steps = self._curvature.solves.taken_at, self._training.steps
        return {block.name: steps - step for block, step in taken.items()}

    @property
    def delays(self) -> dict[str, int]:
        """By layer, the number of steps for which its last solve was under way."""
        if isinstance(self._curvature, StatsWorker):
            return {}
        solves = self._curvature.solves
        landed = solves.landed_at.items()
        return {block.name: step - solves.taken_at[block] for block, step in landed}

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute statistics until the workers close; a stats worker calls this, not ``step``.

        Args:
            batches: One for each statistic, from the start again when they end.
            loss_fn: The loss of a batch, neither scaled nor divided, without ``backward``; other
                values that it returns are ignored.

        Returns:
            Number of batches whose statistics have been sent.

        Raises:
            SecondOrderError: On a rank that trains.
            ValueError: If there is no batch.
        """
        if not isinstance(self._curvature, StatsWorker):
            raise SecondOrderError(
                f"rank {self._training.world.rank} is a worker: it trains, and serve() is for the "
                f"ranks whose optimizer.role is 'stats'"
            )
        self._take_shards()
        return self._curvature.serve(batches, loss_fn)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; stats workers follow by themselves.

        Raises:
            SecondOrderError: If the model has grown, and there are stats workers.
        """
        if self.__dict__.get("_constructed"):
            self._curvature.require_no_growth()
        super().add_param_group(param_group)

    def summary(self) -> Summary:
        """A table of every layer, with how old the inverses in use are.

        Bytes are those of this process. Reading it waits for the device.
        """
        ages, delays = sorted(self.staleness.values()), sorted(self.delays.values())
        note = "no inverses yet"
        if ages and isinstance(self._curvature, KFACCurvature):
            note = (
                f"inverses are {ages[0]} to {ages[-1]} steps old; the last solves took "
                f"{delays[0]} to {delays[-1]} steps; {len(self._curvature.solves.flights)} under "
                f"way"
            )
        return replace(super().summary(), age=note)

"""DistKFAC: K-FAC with asynchronous statistics and inverses (Ba et al., 2017).

stats workers, all the time:  compute A and G of their own batches at the last
                              parameters that they received, and send them to the
                              layers' owners
without stats workers, every factor_update_steps:
                              A and G of the training batches, summed over the gradient
                              workers
every inv_update_steps:       the owners' threads receive snapshots of the factors
every step:                   the owners send finished inverses to all gradient workers
                              each worker preconditions the mean gradients of all
                              layers: P = F̃⁻¹ ∇, and ∇ <- ν P, with the clip
                              ν = min(1, sqrt(c₀ ζᵏ / Σ η² |P·∇|))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from second_order.distributed.roles import Role
from second_order.errors import SecondOrderError
from second_order.kfac.async_inversion import ThreadedInverter
from second_order.kfac.curvature import KFAC
from second_order.kfac.plan import System, block_rules, distkfac_plan
from second_order.kfac.stats_workers import StatsWorker, with_stats_workers
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.config import (
    AutoScalar,
    AuxBase,
    CommonOptions,
    DistKFACOptions,
    DoublyFactored,
    Fisher,
    KFACOptions,
    PerStep,
    TraceRule,
    options_from,
)
from second_order.optimizers.kaisa import KroneckerOptimizer
from second_order.optimizers.keywords import Rate, documented
from second_order.utils.checks import Interval, Schedule

__all__ = ["DistKFAC"]


@documented(DistKFACOptions, KFACOptions, CommonOptions)
class DistKFAC(KroneckerOptimizer):
    """K-FAC with inverses on threads, and statistics on helper ranks (Ba et al., 2017).

    Replace ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` by

        optimizer = DistKFAC(model, lr=0.1, momentum=0.9)

    The rest of the script does not change. Threads compute the inverses while training
    continues, and all ranks start to use a new inverse at the same step. This step
    depends on the speed of the machine, so two runs differ slightly, unless you set
    ``deterministic=True``.

    With ``stats_workers``, the last ranks only compute statistics for the others:

        optimizer = DistKFAC(model, lr=0.1, momentum=0.9, stats_workers=1)
        with optimizer:
            if optimizer.role == "stats":
                optimizer.serve(loader, lambda b: criterion(model(b[0]), b[1]))
            else:
                ...  # the usual loop

    If you use DistributedDataParallel, then make the optimizer first, and pass
    ``process_group=optimizer.worker_group`` to DistributedDataParallel. ``overhead``
    limits the time that the training thread spends on refreshes, without the time of
    the inverse threads.

    Every "number or callable" is a constant or a function of the step (0, 1, ...).
    """

    _curvature: KFAC | StatsWorker

    def __init__(
        self,
        params: ParamsOrModel,
        lr: Rate | None = None,
        *,
        stats_workers: int = 0,
        helper_timeout: float = 60.0,
        inverse_threads: int | None = None,
        inverse_device: str = "cpu",
        async_inverse: bool = True,
        max_staleness: int | None = None,
        deterministic: bool = False,
        conv_factors: str = "kfc",
        doubly_factored: DoublyFactored = "auto",
        damping: AutoScalar = "auto",
        damping_floor: float | Literal["auto"] = "auto",
        relative_damping: bool = True,
        grafting: Literal["gradient", "none"] = "gradient",
        kl_clip: AutoScalar | None = "auto",
        step_scale: bool | Literal["auto"] = "auto",
        factor_decay: Schedule | PerStep | Literal["auto"] = "auto",
        solver: Literal["inverse", "eigen"] = "inverse",
        inv_update_steps: Interval | TraceRule | Literal["auto"] = "auto",
        factor_update_steps: Interval | Literal["auto"] = "auto",
        overhead: float | None = None,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        aux_base: type[torch.optim.Optimizer] | AuxBase | None = None,
        model: nn.Module | None = None,
        fisher: Fisher = "empirical",
        kfac_approx: Literal["expand", "reduce"] = "expand",
        loss_reduction: str = "auto",
        grad_scaler: Any = None,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        precondition_norms: bool = True,
        unsupported_layers: str = "auto",
        skip_layers: Sequence[str] = (),
        max_factor_dim: int = 8192,
        factor_dtype: torch.dtype = torch.float32,
        debug: bool | int = False,
        **base_kwargs: Any,
    ) -> None:
        # Check the options, and replace "auto" by the defaults of this base.
        arguments = locals()
        options = options_from(KFACOptions, arguments).resolve(base)
        common = options_from(CommonOptions, arguments)
        distkfac_options = options_from(DistKFACOptions, arguments)

        # Describe how ranks share the work.
        system = System(
            partial(distkfac_plan, factors_everywhere=True),
            block_rules(options, distkfac_options.wide_layers),
            # Ranks may have different numbers of cores.
            str(replace(distkfac_options, inverse_threads=None)),
            conv_approximation="reduce" if conv_factors == "cheap" else None,
            inverter=partial(ThreadedInverter, own=distkfac_options),
        )
        super().__init__(
            params,
            lr,
            common=common,
            base_kwargs=base_kwargs,
            make_curvature=partial(
                with_stats_workers, options=options, system=system, own=distkfac_options
            ),
            helper_role="stats" if stats_workers else None,
            num_helpers=stats_workers,
        )

    @property
    def role(self) -> Role:
        """The role of this process, "worker" or "stats"."""
        return "stats" if isinstance(self._curvature, StatsWorker) else "worker"

    @property
    def worker_group(self) -> Any:
        """The process group of the gradient workers.

        On a stats worker: of the stats workers.
        """
        return self.training.world.group

    @property
    def staleness(self) -> dict[str, int]:
        """The age in steps of the factors of each layer's inverse, at the next step."""
        if isinstance(self._curvature, StatsWorker):
            return {}
        steps = self.training.steps
        inverses = self._curvature.inverses.states
        return {block.name: steps - state.step for block, state in inverses.items()}

    @property
    def delays(self) -> dict[str, int]:
        """The steps between the snapshot and the first use of each layer's inverse."""
        if isinstance(self._curvature, StatsWorker):
            return {}
        inverses = self._curvature.inverses.states
        return {
            block.name: state.installed_at - state.step
            for block, state in inverses.items()
        }

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute statistics until the workers close.

        Stats workers call this instead of ``step``.

        Args:
            batches: The batches. When they end, they start again.
            loss_fn: Returns the loss of a batch, neither scaled nor divided, without
                calling ``backward``. Other values that it returns are ignored.

        Returns:
            Number of batches whose statistics were sent.

        Raises:
            SecondOrderError: On a rank that trains.
            ValueError: If ``batches`` is empty.
        """
        if not isinstance(self._curvature, StatsWorker):
            raise SecondOrderError(
                f"rank {self.training.world.rank} is a worker, which trains; call serve() on "
                f"the ranks whose optimizer.role is 'stats'"
            )
        self.adopt_shards()
        return self._curvature.serve(batches, loss_fn)

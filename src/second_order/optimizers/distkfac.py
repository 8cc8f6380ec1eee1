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
    """K-FAC that computes inverses on threads, and statistics on helper ranks if you have some.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = DistKFAC(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.
    Threads compute the inverses while training continues, and all processes start to use a new
    inverse at the same step. That step depends on the machine's speed, so two runs differ slightly,
    unless you set ``deterministic``.

    With ``stats_workers`` the last ranks do not train; they compute statistics for the others:

        optimizer = DistKFAC(model, lr=0.1, momentum=0.9, stats_workers=1)
        with optimizer:
            if optimizer.role == "stats":
                optimizer.serve(loader, lambda batch: criterion(model(batch[0]), batch[1]))
            else:
                ...  # the usual loop

    DistributedDataParallel is then made after the optimizer, with
    ``process_group=optimizer.worker_group``. ``overhead`` limits the time that the training thread
    spends on refreshes, without the time of the inverse threads.

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.
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
        doubly_factored: Mapping[str, tuple[int, int]] | Literal["auto"] | None = "auto",
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
        model: nn.Module | Sequence[nn.Module] | None = None,
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
        arguments = locals()
        options = options_from(KFACOptions, arguments).resolved(base)
        common = options_from(CommonOptions, arguments)
        own = options_from(DistKFACOptions, arguments)
        system = System(
            partial(distkfac_plan, factors_everywhere=True),
            block_rules(options, own.wide_layers),
            str(replace(own, inverse_threads=None)),  # ranks may have other numbers of cores
            conv_approximation="reduce" if conv_factors == "cheap" else None,
            inverter=partial(ThreadedInverter, own=own),
        )
        super().__init__(
            params,
            lr,
            common=common,
            base_kwargs=base_kwargs,
            curvature=partial(with_stats_workers, options=options, system=system, own=own),
            helper_role="stats" if stats_workers else None,
            num_helpers=stats_workers,
        )

    @property
    def role(self) -> Role:
        """The role of this process, "worker" or "stats"."""
        return "stats" if isinstance(self._curvature, StatsWorker) else "worker"

    @property
    def worker_group(self) -> Any:
        """The process group of the gradient workers; of the stats workers, on one of them."""
        return self.training.world.group

    @property
    def staleness(self) -> dict[str, int]:
        """By layer, the age in steps of the factors of the inverse in use at the next step."""
        if isinstance(self._curvature, StatsWorker):
            return {}
        steps, inverses = self.training.steps, self._curvature.inverses.states
        return {block.name: steps - state.step for block, state in inverses.items()}

    @property
    def delays(self) -> dict[str, int]:
        """By layer, the number of steps for which its last solve was under way."""
        if isinstance(self._curvature, StatsWorker):
            return {}
        inverses = self._curvature.inverses.states
        return {block.name: each.installed_at - each.step for block, each in inverses.items()}

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
            ValueError: If ``batches`` is empty.
        """
        if not isinstance(self._curvature, StatsWorker):
            raise SecondOrderError(
                f"rank {self.training.world.rank} is a worker: it trains, and serve() is for the "
                f"ranks whose optimizer.role is 'stats'"
            )
        self.adopt_shards()
        return self._curvature.serve(batches, loss_fn)

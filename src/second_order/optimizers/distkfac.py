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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from second_order.contract.notices import warns_at_its_end
from second_order.distributed.assignment import spread_costs
from second_order.distributed.roles import Role, assign_roles
from second_order.errors import SecondOrderError
from second_order.kfac.distkfac_options import (
    DoublyFactored,
    check_distkfac_options,
    checked_doubly_factored,
    checked_staleness,
    half_the_cores,
)
from second_order.kfac.options import KFACOptions
from second_order.kfac.stats_workers import Helpers, divide, endless
from second_order.kronecker.background import take_snapshot
from second_order.kronecker.block import GradientScale, KroneckerBlock
from second_order.kronecker.equal_inputs import link_equal_inputs
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import BlockRules
from second_order.kronecker.solvers import SolverName
from second_order.optimizers.background_refresh import (
    BackgroundOptions,
    BackgroundRefresh,
    solve_cost_of,
)
from second_order.optimizers.base import ParamsOrModel
from second_order.options import (
    Interval,
    Schedule,
    own_keywords,
    value_at,
)
from second_order.report import Summary

__all__ = ["DistKFAC"]

STEP_DECAY = 0.95  # of the factors in a step, unless factor_decay says otherwise


class DistKFAC(BackgroundRefresh):
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
        params_or_model: As for :class:`KAISA`, like everything that is not described here.
        model: The model, where the first argument is not one.
        lr: The base's learning rate, a float or a tensor; schedulers reach it as always.
        base: Class of the optimizer that takes the preconditioned gradients.
        stats_workers: How many ranks compute statistics instead of training. If all of them are
            gone, the others take statistics from their own passes again.
        helper_timeout: Seconds without a sign of life after which a stats worker is given up.
        inverse_threads: Threads of this process that solve; None for half the cores that it has for
            itself, at least 1 and at most 4.
        inverse_device: Where they solve: "cpu", or "cuda" on a stream of their own.
        async_inverse: False waits for every solve, as ``max_staleness=0`` does.
        max_staleness: Steps after which a solve is waited for; None: never. 0 is the synchronous
            algorithm.
        deterministic: Put inverses to use exactly ``max_staleness`` steps after the snapshot that
            they are solved from, be they ready sooner or not: runs can be repeated bit for bit.
        conv_factors: "kfc", or "cheap": the inputs of a convolution are averaged over locations,
            and its gradients summed, before they are squared (Ba et al. 2017, appendix A).
        doubly_factored: (locations, channels) of the inputs of wide Linears that are fed by a
            flattened feature map, by the layers' names. Three small factors take the place of A and
            G (Ba et al. 2017, section 4). "auto": those with more than ``max_factor_dim`` inputs,
            with the channels of the convolution before them. None: no layer.
        max_factor_dim: Layers with a larger factor, A of the inputs or G of the outputs, are left
            to the base, and named: memory grows with its square, a solve with its cube. The A of
            an embedding is diagonal, of any size.
        exact_blocks: Gains and biases of normalisations have exact blocks, and biases that train
            alone; False leaves them to the base.
        max_exact_dim: Entries up to which such a block is a full matrix; above, its diagonal.
        damping: γ, added to the curvature before it is inverted; number or callable, at least 0.
        relative_damping: γ of a layer is ``damping`` times the layer's mean curvature.
        factor_decay: Weight of the past in the running averages at an update, in [0, 1); number or
            callable. None: 0.95 to the power of the steps since the last update, so that factors
            remember as many steps whatever the interval: few updates, where these are rare.
        kl_clip: κ, the bound on lr² Σ P·∇ of one step; number, callable or None. The paper's
            schedule is :class:`DecayingClip`. The best bound grows with the batch, see
            :class:`KAISA`.
        solver: "inverse" damps the factors apart, by generalised π where there are three; "eigen"
            applies (A ⊗ G + γ I)⁻¹ exactly.
        factor_update_steps: Without stats workers, statistics are taken every so many steps; number
            or callable.
        inv_update_steps: Solves are launched every so many steps; number or callable.
        refresh_warmup_steps: During the first steps, so many, statistics and solves come at every
            step, and are waited for.
        fisher: "empirical" or "sampled".
        likelihood: For the sampled Fisher, what the outputs mean.
        kfac_approx: "expand" or "reduce".
        symmetry_aware: Keep and send the upper triangles of symmetric matrices.
        skip_layers: Patterns of module names or class names that the base trains alone.
        accumulation_steps: Micro-batches to a step, if the loss is divided by their number; 1 if
            the losses of several passes are added up. "auto": the passes of each step are counted,
            and their losses taken to be divided by their number.
        loss_reduction: "mean" if the loss is a mean over its terms, "sum" if it is a sum.
        grad_scaler: The ``GradScaler`` that scales the loss, if there is one.
        factor_dtype: Factors are kept in it: float32, float64 or bfloat16.
        inv_dtype: Inverses are kept and applied in it; decompositions use float32 or more.
        max_consecutive_failures: So many solves in a row without a sound decomposition of a layer
            raise :class:`~second_order.DecompositionError` on every process.
        gradient_averaging: "auto" averages gradients over the gradient workers unless
            DistributedDataParallel does; True or False: always or never. With stats workers, wrap
            the model after the optimizer is made, with ``process_group=optimizer.worker_group``.
        process_group: The processes to work with; None for the default group, if there is one.
        **base_kwargs: Arguments of ``base``: ``momentum``, ``weight_decay``, ``betas`` and so on.

    Attributes:
        role: "worker" or "stats".
        worker_group: The process group of those that train; of the stats workers, on one of them.
        staleness: By layer, how many steps old the factors of the inverse in use are.
        delays: By layer, how many steps its last solve was under way.

    Raises:
        TypeError: For an unknown keyword (naming the closest known one) or a missing model.
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
        stats_workers: int = 0,
        helper_timeout: float = 60.0,
        inverse_threads: int | None = None,
        inverse_device: str = "cpu",
        async_inverse: bool = True,
        max_staleness: int | None = None,
        deterministic: bool = False,
        conv_factors: str = "kfc",
        doubly_factored: DoublyFactored = "auto",
        max_factor_dim: int = 8192,
        exact_blocks: bool = True,
        max_exact_dim: int = 256,
        damping: Schedule = 2.0,
        relative_damping: bool = True,
        factor_decay: Schedule | None = 0.9,
        kl_clip: Schedule | None = 1e-4,
        solver: SolverName = "inverse",
        factor_update_steps: Interval = 20,
        inv_update_steps: Interval = 20,
        refresh_warmup_steps: int = 20,
        fisher: str = "empirical",
        likelihood: Likelihood = "categorical",
        kfac_approx: Approximation = "expand",
        symmetry_aware: bool = True,
        skip_layers: Sequence[str] = (),
        accumulation_steps: int | Literal["auto"] = "auto",
        loss_reduction: str = "mean",
        grad_scaler: Any = None,
        factor_dtype: torch.dtype = torch.float32,
        inv_dtype: torch.dtype = torch.float32,
        max_consecutive_failures: int = 3,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        **base_kwargs: Any,
    ) -> None:
        self._forgets_evenly = factor_decay is None
        decay = STEP_DECAY if factor_decay is None else factor_decay
        options = KFACOptions.of({**locals(), "eigen_refresh": "full", "factor_decay": decay})
        check_distkfac_options(locals())
        staleness = checked_staleness(async_inverse, max_staleness, deterministic, stats_workers)
        self._conv_approximation = "reduce" if conv_factors == "cheap" else None
        self._rules = BlockRules(
            max_factor_dim=max_factor_dim,
            doubly_factored=checked_doubly_factored(doubly_factored),
            max_exact_dim=max_exact_dim if exact_blocks else None,
        )
        self._stats_workers, self._patience = stats_workers, float(helper_timeout)
        self._helpers = Helpers()
        self._heard_at = 0  # the step of the last message from a stats worker
        self._posting: Any = None  # parameters on their way to stats workers
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=own_keywords(DistKFAC),
            options=options,
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
            background=BackgroundOptions(
                threads=half_the_cores() if inverse_threads is None else inverse_threads,
                device=inverse_device,
                max_staleness=staleness,
                deterministic=deterministic,
            ),
        )

    def _described_options(self) -> str:
        background = vars(self._background) | {"threads": "its own"}
        if self._background.device == "cuda":
            background["parameters"] = self._device().type  # which _check_processes asks
        mine = f"{self._rules} {self._conv_approximation} {background} {self._stats_workers}"
        return f"{super()._described_options()} {mine} {self._patience} {self._forgets_evenly}"

    def _averaging_processes(self) -> int:
        return self._world.size - self._stats_workers  # before roles are given

    def _check_processes(self) -> None:
        super()._check_processes()
        if self._background.device == "cuda" and self._device().type != "cuda":
            raise ValueError(
                f"inverse_device='cuda', but the parameters are on {self._device()}; move the "
                f"model there first, or use inverse_device='cpu'"
            )
        assign_roles(self._world.size, self._stats_workers, "stats", self._under_ddp)

    def _divide(self) -> None:
        if not self._stats_workers:
            return
        self._helpers, world = divide(
            self._world, self._stats_workers, self._patience, self._under_ddp
        )
        self._world = world
        self._averages = self._averages and world.size > 1
        self._outline.compared = self._helpers.role == "worker"
        self._helpers.begin_with(self._whole_model(), self.param_groups)
        if not self._helpers.any:
            self._warn(
                f"DistKFAC(stats_workers={self._stats_workers}) with one process: nobody computes "
                f"statistics on the side, so they are taken from this process's own passes"
            )

    @property
    def role(self) -> Role:
        """What this process does."""
        return self._helpers.role

    @property
    def worker_group(self) -> Any:
        """The process group of those that train; of the stats workers, on one of them."""
        return self._world.group

    # -------------------------------------------------------------------------------- placement

    def _place(self, blocks: Sequence[KroneckerBlock]) -> None:
        workers = self._helpers.workers or self._world.size
        self._owners = spread_costs([solve_cost_of(block) for block in blocks], workers)

    def _keeper(self, index: int) -> tuple[int, int] | None:
        if not self._helpers.any or self._helpers.role == "stats":  # which keeps none
            return None
        return self._owners[index], self._owners[index]

    def _computed_by(self, index: int) -> str:
        return f"solve {self._owners[index]}, precondition all"

    # ------------------------------------------------------------------------------- statistics

    def _gate_capture(self) -> None:
        super()._gate_capture()
        if self._helpers.role == "stats":
            self._capture.enabled = True
        elif not self._helpers.own_passes:
            self._capture.enabled = False

    def _take_statistics(self) -> None:
        fed = [block for block in self._active if not block.staged.empty]
        if self._helpers.own_passes and self._capture.enabled:  # while they ran
            super()._take_statistics()
        mine = {b.name: b for b, o in self._owned() if o == self._world.rank}
        self._helpers.known.update(b.name for b in mine.values() if b in fed)
        for sums, sharing in self._helpers.statistics(mine):
            decay = self._decay_after(self._steps - self._heard_at)
            self._heard_at = self._steps
            taken = {mine[name]: each for name, each in sums.items()}
            found = {mine[k]: mine[v] for k, v in sharing.items() if k in mine and v in mine}
            linked = link_equal_inputs(self._active, found, taken)
            for block, each in taken.items():
                block.ensure_factors().update(each, decay, "A" if block in linked else "")
                block.asked = True
        self._tell_of_helpers()

    def _decay(self) -> float:
        """So that the factors forget as much in a step, however often they are updated."""
        every, warmup = 1, self._options.refresh_warmup_steps
        if warmup <= self._steps != self._newcomers_at:
            every = int(value_at(self._options.factor_update_steps, self._steps))
            every = min(every, self._steps - warmup + 1)
        return self._decay_after(every)

    def _decay_after(self, steps: int) -> float:
        """Weight of the past at an update, so many steps after the last."""
        return STEP_DECAY ** max(steps, 1) if self._forgets_evenly else super()._decay()

    def _owned(self) -> Iterable[tuple[KroneckerBlock, int]]:
        return zip(self._active, self._owners, strict=True)

    def _exchange_statistics(self, sums: list[StatisticsSums]) -> None:
        tensors = [t for each in sums for t in (each.head, *each.factors)]
        if not self._helpers.any:
            self._world.start_sum(tensors).wait()
            return
        owners: list[int | None] = []
        for each, owner in zip(sums, self._owners, strict=True):
            owners += [None, *[owner] * len(each.factors)]
        self._world.start_sum_to(tensors, owners).wait()

    def _follow_requires_grad(self) -> None:
        before, helpers = self._signature, self._helpers
        super()._follow_requires_grad()
        if self._signature != before and helpers.active and helpers.role == "worker":
            helpers.begin_anew()

    def _news(self) -> list[float]:
        return self._helpers.news()

    def _hear(self, news: Sequence[float]) -> None:
        for warning in self._helpers.hear(news):
            self._warn(warning)

    # ----------------------------------------------------------------------------- stats workers

    @warns_at_its_end
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; on a stats worker, send the statistics of its last passes.

        Args:
            closure: Evaluates the model, calls ``backward`` and returns the loss. Called once.

        Returns:
            What the closure returned, or None.

        Raises:
            DecompositionError: On every rank, if a thread has raised, or a layer's factors could
                not be decomposed ``max_consecutive_failures`` times in a row.
        """
        if self._helpers.role == "worker":
            loss = super().step(closure)
            self._helpers.offer(self._whole_model, self._to_cpu, self.param_groups)
            return loss
        if self._initialises_state():  # by checkpointing code, which waits for nobody
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._deliver()
            self._fetch()
        return loss

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute statistics until the workers close; what a stats worker does instead of training.

        Args:
            batches: One for each statistic, from the start again when they end.
            loss_fn: The loss of a batch, neither scaled nor divided, without ``backward``; what
                else it returns is ignored.

        Returns:
            How many batches' statistics have been sent.

        Raises:
            SecondOrderError: On a rank that trains.
            ValueError: If there is no batch.
        """
        if self._helpers.role == "worker":
            raise SecondOrderError(
                f"rank {self._world.rank} is a worker: it trains, and serve() is for the ranks "
                f"whose optimizer.role is 'stats'"
            )
        sent = 0
        try:
            for batch in endless(batches):
                if not self._fetch():
                    break
                # Of a loss that is neither scaled nor divided.
                self._collector.gradient_scale = GradientScale(1, None)
                with torch.enable_grad():
                    found = loss_fn(batch)
                    loss = found[0] if isinstance(found, tuple) else found
                    loss.backward()
                self._deliver()
                self.zero_grad()
                sent += 1
        except BaseException:
            self._helpers.close(1.0)
            raise
        if not (self._closed or self._helpers.dismissed):
            self._warn("the workers have not been heard of any more: serve() returns")
        return sent

    def _fetch(self) -> bool:
        """Load the newest parameters, of the workers' groups; False once the workers have left."""
        before = self._helpers.optimized
        there = not self._closed and self._helpers.fetch(self._whole_model())
        self._tell_of_helpers()
        if there and before != self._helpers.optimized:
            self._replan()
        return there

    def _optimized(self) -> list[Tensor]:
        """On a stats worker, what the workers optimize: they may have added a group."""
        return self._helpers.optimized_there(self._whole_model()) or super()._optimized()

    @warns_at_its_end
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; stats workers follow by themselves.

        Raises:
            SecondOrderError: If the model has grown, and there are stats workers.
        """
        self._helpers.require_no_growth(self._whole_model())
        super().add_param_group(param_group)
        if self._constructed:
            self._gate_capture()  # for the passes to come, as it has begun anew

    @warns_at_its_end
    def _deliver(self) -> None:
        """Send what has been captured since to the layers' owners."""
        if self._closed:
            return
        self._follow_requires_grad()
        parts: list[dict[str, StatisticsSums]] = [{} for _ in range(self._helpers.workers)]
        for block, owner in self._owned():
            if not block.staged.empty:
                parts[owner][block.name] = block.staged.sums().to(self._options.factor_dtype)
            block.staged.clear()
        sharing = {k.name: v.name for k, v in self._collector.settle().items()}
        self._helpers.deliver(parts, sharing)

    def _to_cpu(self, copies: list[Tensor], post: Callable[[list[Tensor]], None]) -> None:
        """Post copies; from a device by a thread, so that nobody waits for it."""
        if self._streams() is None:
            post(copies)
            return
        fetch = take_snapshot(copies, torch.device("cpu"), self._streams())
        self._posting = self._pool.submit(lambda: post(fetch()))

    def _whole_model(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    def _tell_of_helpers(self) -> None:
        for key, warning in self._helpers.warnings().items():
            if self._first_time(key):
                self._warn(warning)

    @property
    def refused_messages(self) -> int:
        """Messages of this process's that were malformed, and connections without the key."""
        return self._helpers.refused

    # --------------------------------------------------------------------------------- the rest

    def close(self) -> None:
        """End threads and hooks, and say goodbye: stats workers return from serve()."""
        self._helpers.close(self._patience)
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state | {"_helpers": self._helpers.without_messages(), "_posting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._world.unpickled:  # among other processes, which all train
            self._helpers = Helpers()

    def summary(self) -> Summary:
        """A table of every layer, with how old the inverses in use are.

        Bytes are those of this process. Reading it waits for the device.
        """
        ages, delays = sorted(self.staleness.values()), sorted(self.delays.values())
        note = "no inverses yet"
        if ages:
            note = (
                f"inverses are {ages[0]} to {ages[-1]} steps old; the last solves took "
                f"{delays[0]} to {delays[-1]} steps; {len(self._flights)} under way"
            )
        return replace(super().summary(), age=note, refused=self.refused_messages)

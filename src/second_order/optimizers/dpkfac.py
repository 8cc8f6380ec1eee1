"""DPKFAC: K-FAC that sends no factor (Zhang et al., 2023).

at construction:            each layer gets an owner
every step:                 gradients summed over the processes, a layer's at its owner alone
every factor_update_steps:  the owner's running averages of A, G, from its own batches
every inv_update_steps:     the owner's damped inverse
every step:                 the owner preconditions its layers' mean gradients; all get them, with
                            the owner's part of the clip's sum; all clip, and step the base
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from second_order.contract.averaging import Routed
from second_order.contract.saved import SavedPart
from second_order.distributed.assignment import OwnerAssignment, assign_owners
from second_order.kfac.options import KFACOptions
from second_order.kfac.placement import layer_dims
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.clip import kl_change, kl_clip_coefficient
from second_order.kronecker.decompositions import Decomposition
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.solvers import SolverName
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.kfac import KFACOptimizer
from second_order.options import Interval, Schedule, check_choice, own_keywords

__all__ = ["DPKFAC"]


class DPKFAC(KFACOptimizer):
    """K-FAC whose layers' owners build the factors from their own batches.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = DPKFAC(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.

    Each layer belongs to one process, which alone keeps its factors and its inverse. Its factors
    see that process's share of the data only: an average over more steps instead of over more
    processes. With one process it is :class:`KAISA`.

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.

    Args:
        params_or_model: As for :class:`KAISA`, like everything that is not described here.
        model: The model, where the first argument is not one.
        lr: The base's learning rate, a float or a tensor; schedulers reach it as always.
        base: Class of the optimizer that takes the preconditioned gradients.
        assignment: Who owns which layer: "balanced" gives the next largest layer to the process
            with the least memory taken, "round_robin" layer i to process i mod P, as the paper.
        gradient_exchange: "owner" sums a layer's gradients at its owner alone and sends them back
            preconditioned: the volume of an all-reduce in all. "all_reduce" averages all gradients
            everywhere first, half as much again; it is what happens under
            DistributedDataParallel, which has averaged them already (but see
            :meth:`register_owner_hook`).
        damping: γ, added to the curvature before it is inverted; number or callable, at least 0.
        relative_damping: γ of a layer is ``damping`` times the layer's mean curvature.
        factor_decay: Weight of the past in the running averages, in [0, 1); number or callable.
        kl_clip: κ, the bound on the change that one step makes to the model's predictions; number,
            callable or None. The best bound grows with the batch, see :class:`KAISA`.
        solver: "eigen" or "inverse".
        factor_update_steps: Statistics are taken every so many steps; number or callable.
        inv_update_steps: Inverses are refreshed every so many steps; number or callable.
        refresh_warmup_steps: During the first steps, so many, both are refreshed at every step.
        fisher: "empirical" or "sampled".
        likelihood: For the sampled Fisher, what the outputs mean.
        kfac_approx: "expand" or "reduce".
        eigen_refresh: "full" or "warm".
        symmetry_aware: Keep the upper triangles of symmetric matrices.
        max_factor_dim: Layers with a larger factor, A of the inputs or G of the outputs, are left
            to the base, and named: memory grows with its square, a solve with its cube. The A of
            an embedding is diagonal, of any size.
        skip_layers: Patterns of module names or class names that the base trains alone.
        accumulation_steps: Micro-batches to a step, if the loss is divided by their number; 1 if
            the losses of several passes are added up. "auto": the passes of each step are counted,
            and their losses taken to be divided by their number.
        loss_reduction: "mean" if the loss is a mean over its terms, "sum" if it is a sum.
        grad_scaler: The ``GradScaler`` that scales the loss, if there is one.
        factor_dtype: Factors are kept in it: float32, float64 or bfloat16.
        inv_dtype: Inverses are kept and applied in it; decompositions use float32 or more.
        max_consecutive_failures: So many refreshes in a row without a sound decomposition of a
            layer raise :class:`~second_order.DecompositionError` on every process.
        gradient_averaging: "auto" averages gradients over the processes unless
            DistributedDataParallel does; True or False: always or never.
        process_group: The processes to work with; None for the default group, if there is one.
        **base_kwargs: Arguments of ``base``: ``momentum``, ``weight_decay``, ``betas`` and so on.

    Raises:
        TypeError: For an unknown keyword (naming the closest known one) or a missing model.
        ValueError: For a value outside its bounds, with the bound and the remedy.
        RankMismatchError: If the processes built different models or options.
    """

    _read_by_all = ()  # its own layers' from a distributed checkpoint

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None = None,
        lr: float | Tensor,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        assignment: OwnerAssignment = "balanced",
        gradient_exchange: str = "owner",
        damping: Schedule = 2.0,
        relative_damping: bool = True,
        factor_decay: Schedule = 0.95,
        kl_clip: Schedule | None = 1e-4,
        solver: SolverName = "eigen",
        factor_update_steps: Interval = 10,
        inv_update_steps: Interval = 100,
        refresh_warmup_steps: int = 20,
        fisher: str = "empirical",
        likelihood: Likelihood = "categorical",
        kfac_approx: Approximation = "expand",
        eigen_refresh: str = "full",
        symmetry_aware: bool = True,
        max_factor_dim: int = 8192,
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
        options = KFACOptions.of(locals())
        check_choice("assignment", assignment, ("balanced", "round_robin"))
        check_choice("gradient_exchange", gradient_exchange, ("owner", "all_reduce"))
        self._assignment: OwnerAssignment = assignment
        self._gradient_exchange = gradient_exchange
        self._hooked = False
        self._summed_to: dict[Tensor, int] = {}
        self._owners: dict[KroneckerBlock, int] = {}
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=own_keywords(DPKFAC),
            options=options,
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
        )

    def register_owner_hook(self, ddp: DistributedDataParallel) -> None:
        """Let DistributedDataParallel send each gradient to its owner alone, during backward.

        Instead of an average on every process, from which owners take what is theirs: the volume of
        ``gradient_exchange="owner"``, and hidden behind the backward pass. Until :meth:`step`, a
        gradient is the mean on its owner and this process's own elsewhere, so that
        ``clip_grad_norm_`` before it sees other gradients on each process.

        Args:
            ddp: The wrapper of this optimizer's model, before its first backward.

        Raises:
            TypeError: If it is none.
            ValueError: If it wraps another model, with a GradScaler, whose verdict on overflows
                would differ between processes, or with ``gradient_exchange="all_reduce"``.
        """
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"{type(ddp).__name__} is not a DistributedDataParallel model")
        if ddp.module is not self._model:
            raise ValueError("the DistributedDataParallel model wraps another model than this")
        if self._grad_scaler is not None and self._grad_scaler.is_enabled():
            raise ValueError(
                "with the owner hook a GradScaler would find an overflow on one process and not on "
                "another, and one would skip step() alone; train in bfloat16, or without the hook"
            )
        if self._gradient_exchange != "owner":
            raise ValueError(
                f"gradient_exchange={self._gradient_exchange!r} averages gradients everywhere, as "
                f"the model does without a hook; use gradient_exchange='owner' with it"
            )
        ddp.register_comm_hook(None, _owner_hook(weakref.ref(self)))
        self._hooked = True

    def _start_owner_sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """What the hook does with a bucket of gradients: means on their owners, in place."""
        owner_of = dict(zip(map(id, self._averaged_params()), self._all_owners(), strict=True))
        gradients, params = bucket.gradients(), bucket.parameters()
        torch._foreach_div_(gradients, float(self._world.size))
        owners = [owner_of.get(id(p), 0) for p in params]  # 0: frozen since DDP was made
        self._summed_to |= zip(params, owners, strict=True)
        summed = self._world.start_sum_to(gradients, owners)
        if self._world.size == 1:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        return summed.future().then(lambda _: bucket.buffer())

    def _described_options(self) -> str:
        exchange = f"{self._assignment} {self._gradient_exchange}"
        return f"{super()._described_options()} {exchange}"

    # -------------------------------------------------------------------------------- placement

    def _place(self, blocks: Sequence[KroneckerBlock]) -> None:
        dims = layer_dims(blocks)
        owners = assign_owners(dims, self._world.size, self._assignment)
        before = self._owners
        if any(before.get(b, rank) != rank for b, rank in zip(blocks, owners, strict=True)):
            self._newcomers_at = self._steps + 1  # a new owner has no statistics of this step
        kept = {block: before[block] for block in self._blocks if block in before}
        self._owners = kept | dict(zip(blocks, owners, strict=True))

    def _owns(self, index: int) -> bool:
        return self._owners[self._active[index]] == self._world.rank

    def _solves(self, index: int) -> tuple[bool, bool]:
        return self._owns(index), self._owns(index)

    def _ready(self, seen: list[int]) -> list[int]:
        return list(range(len(self._active)))  # only an owner knows whether its layer is

    def _preconditions(self, index: int) -> bool:
        return self._owns(index)

    def _computed_by(self, index: int) -> str:
        return f"owner {self._owners[self._active[index]]}"

    def _keeper(self, index: int) -> tuple[int, int] | None:
        owner = self._owners[self._active[index]]
        return owner, owner

    def _takes_statistics(self, block: KroneckerBlock) -> bool:
        # A layer that was frozen from the start is watched by all: whoever gets it has its passes.
        return self._owners.get(block, self._world.rank) == self._world.rank

    def _adopt_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        super()._adopt_curvature(saved)
        # A process may have got its own layers' factors alone, but moves and collects with others.
        for block in self._keepers:
            if block.factors is None:
                factors = block.ensure_factors()
                if self._steps > 0 and self._takes_statistics(block):
                    factors.stored.update(A=None, G=None)  # lost: the next refresh finds and tells

    # --------------------------------------------------------------------------------- exchange

    def _exchange_statistics(self, sums: list[StatisticsSums]) -> None:
        """Nothing is sent: an owner's batches are all that its layers see."""

    def _exchange_decompositions(
        self, mine: dict[tuple[int, str], Decomposition], ready: Sequence[int]
    ) -> dict[tuple[int, str], Decomposition]:
        return mine

    def _start_averaging(self) -> Callable[[], None]:
        average = super()._start_averaging()
        if self._hooked:
            self._follow_moved_owners()
        return average

    def _follow_moved_owners(self) -> None:
        """Give all ranks the means that the hook took to ranks that own them no more."""
        owners = dict(zip(self._averaged_params(), self._all_owners(), strict=True))
        summed, self._summed_to = self._summed_to, {}
        moved = [p for p, rank in summed.items() if owners.get(p, rank) != rank]
        moved = [p for p in moved if p.grad is not None]
        if moved:
            self._world.share([cast(Tensor, p.grad) for p in moved], [summed[p] for p in moved])

    def _route_gradients(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        whole = self._gradient_exchange == "all_reduce"
        return None if whole else (gradients, self._all_owners())

    def _all_owners(self) -> list[int]:
        """Whose each gradient is; parameters of no layer go where the least is to be sent."""
        params = self._averaged_params()
        owner_of = {id(p): self._owners[b] for b in self._active for p in b.params}
        load = [0] * self._world.size
        for p in params:
            if id(p) in owner_of:
                load[owner_of[id(p)]] += p.numel()
        for p in sorted(params, key=Tensor.numel, reverse=True):
            if id(p) not in owner_of:
                rank = min(range(len(load)), key=load.__getitem__)
                owner_of[id(p)] = rank
                load[rank] += p.numel()
        return [owner_of[id(p)] for p in params]

    def _precondition_gradients(self) -> None:
        """P of this rank's layers, then everybody's, clipped, into ``p.grad``."""
        mine = [(i, block) for i, block in enumerate(self._active) if block.inverse is not None]
        found = [(i, block.gradient(block.work_dtype)) for i, block in mine]
        gradients = {i: gradient for i, gradient in found if gradient is not None}
        results = {i: self._apply_inverse(self._active[i], g) for i, g in gradients.items()}
        bound, device = self._kl_bound(), self._device()
        wide = torch.promote_types(self._options.inv_dtype, torch.float32)
        changes = list(torch.zeros(self._world.size, dtype=wide, device=device).unbind())
        with record_function("second_order.clip"):
            if results and bound is not None:
                pairs = list(results.values()), list(gradients.values())
                changes[self._world.rank].copy_(kl_change(*pairs, self._clip_rates(results)))
            # Not yet clipped: the sum over all layers comes with the exchange.
            for i, result in results.items():
                self._active[i].write_gradient(result, 1.0)
        with record_function("second_order.exchange"):
            self._share_gradients(changes if bound is not None else [])
        if bound is not None:
            with record_function("second_order.clip"):
                coefficient = kl_clip_coefficient(torch.stack(changes).sum(), bound)
                for gradient in self._solved_gradients():
                    gradient.mul_(coefficient.to(gradient.device, gradient.dtype))

    def _share_gradients(self, changes: list[Tensor]) -> None:
        """Owners' gradients to all ranks, and with them each rank's part of the clip's sum."""
        if self._world.size == 1:
            return
        params = self._averaged_params()
        spread = self._averages and self._gradient_exchange == "owner"
        if spread or self._hooked:
            owners = self._all_owners()
            pairs = zip(params, owners, strict=True)
            sent = [(p.grad, rank) for p, rank in pairs if p.grad is not None]
        else:  # gradients are means already, wherever nobody has preconditioned them
            sent = [
                (torch.zeros_like(p) if p.grad is None else p.grad, self._owners[block])
                for block in self._active
                if block.solved
                for p in block.params
            ]
        sent += zip(changes, range(len(changes)), strict=True)
        if sent:
            self._world.share(*zip(*sent, strict=True))

    def _solved_gradients(self) -> list[Tensor]:
        params = [p for block in self._active if block.solved for p in block.params]
        return [p.grad for p in params if p.grad is not None]


def _owner_hook(optimizer: weakref.ref[DPKFAC]) -> Callable[[Any, Any], Any]:
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants true classes, or nothing
        alive = optimizer()
        if alive is None:
            raise RuntimeError("the DPKFAC optimizer of this model's owner hook is gone")
        return alive._start_owner_sum(bucket)

    return hook

"""The K-FAC step that every system with Kronecker factors takes.

    every factor_update_steps   A, G <- running averages of the statistics of this step's passes
    every inv_update_steps      damped inverse of A ⊗ G, layer by layer
    every step                  P = (A ⊗ G + γ)⁻¹ ∇,  ν = min(1, sqrt(κ / Σ lr² |P·∇|)),  ∇ <- ν P

Which rank does which part, and how results travel, is for the subclass to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from second_order.contract.groups import members_of
from second_order.contract.notices import warns_at_its_end
from second_order.contract.saved import SavedPart
from second_order.distributed.checkpointing import is_sharded_checkpoint
from second_order.errors import SecondOrderError
from second_order.kfac.checkpoint import READ_BY_ALL, check_saved_factors
from second_order.kfac.factor_moves import (
    Keepers,
    gather_factors,
    move_factors,
)
from second_order.kfac.options import KFACOptions, check_clip, check_decay
from second_order.kfac.summary import layer_rows
from second_order.kronecker.block import GradientScale, KroneckerBlock, StatisticsCollector
from second_order.kronecker.capture import Capture
from second_order.kronecker.clip import kl_change, kl_clip_coefficient
from second_order.kronecker.equal_inputs import link_equal_inputs
from second_order.kronecker.fisher import LabelSampler
from second_order.kronecker.layers import Approximation, FactorShape
from second_order.kronecker.model_blocks import (
    BlockRules,
    LeftToBase,
    find_blocks,
    unmatched_patterns,
)
from second_order.kronecker.solvers import SOLVERS
from second_order.optimizers.base import ParamsOrModel, SecondOrderOptimizer
from second_order.optimizers.refresh import Refresh
from second_order.options import (
    PEAK_LR,
    check_interval,
    check_rank,
    follow_learning_rates,
    value_at,
)
from second_order.report import Summary

__all__ = ["KFACOptimizer"]


class KFACOptimizer(Refresh, SecondOrderOptimizer):
    """What KAISA and its relatives share: layers, statistics, refreshes, the preconditioned step.

    A subclass places the work, by the methods of :class:`Placement`.
    """

    _rules: BlockRules | None = None  # for layers that are not plain Kronecker blocks
    _conv_approximation: Approximation | None = None
    _read_by_all: tuple[str, ...] = READ_BY_ALL

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None,
        base: type[torch.optim.Optimizer],
        base_kwargs: dict[str, Any],
        own_keywords: Iterable[str],
        options: KFACOptions,
        gradient_averaging: str | bool,
        grad_scaler: Any,
        process_group: Any,
    ) -> None:
        self._options = options
        self._solver = SOLVERS[options.solver]
        if self._rules is None:
            self._rules = BlockRules(options.max_factor_dim)
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs=base_kwargs,
            own_keywords=own_keywords,
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
            group_defaults={PEAK_LR: 0.0},
        )
        self._blocks: list[KroneckerBlock] = []
        self._left: list[LeftToBase] = []
        self._shapes: dict[KroneckerBlock, FactorShape] = {}  # of layers that have ever trained
        self._keepers: dict[KroneckerBlock, Keepers] = {}
        self._elsewhere: dict[KroneckerBlock, dict[str, Tensor]] | None = None
        self._gathered_to: int | None = None
        self._overflown: dict[KroneckerBlock, Tensor] = {}
        self._solve_needed = False
        self._closed = False
        self._newcomers_at = -1
        self._find_blocks()
        # Before any group of processes is made: ranks that differ would wait there for ever.
        self._finish_construction([f"options: {self._described_options()}", *self._layer_lines()])
        self._divide()
        self._start_watching()

    def _divide(self) -> None:
        """Give the processes their roles, where they have different ones."""

    def _described_options(self) -> str:
        shown = {k: v for k, v in vars(self._options).items() if not callable(v)}
        return f"{type(self._base).__name__} {shown}"

    # ------------------------------------------------------------------------------- the layers

    def _find_blocks(self) -> None:
        owned = {id(p): p.numel() for p in self._optimized()}
        known = {id(block.weight): block for block in self._blocks}
        self._blocks, self._left = find_blocks(
            self._model,
            owned,
            self._options.skip_layers,
            known,
            self._options.factor_dtype,
            self._options.symmetry_aware,
            self._rules,
        )
        self._group_index = {
            id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]
        }

    def _optimized(self) -> list[Tensor]:
        """The parameters whose layers are looked for."""
        return members_of(self.param_groups)

    def _layer_lines(self) -> list[str]:
        """The layers as the ranks compare them: equal parameters can belong to unlike layers."""
        left = [f"left to the base: {row.name} ({row.kind}): {row.reason}" for row in self._left]
        kinds = [type(block.modules[0]).__name__ for block in self._blocks]
        pairs = zip(self._blocks, kinds, strict=True)
        return [*(f"layer {b.name}: {kind} {b.shape}" for b, kind in pairs), *left]

    def _start_watching(self) -> None:
        self._signature: tuple[Any, ...] | None = None
        self._active: list[KroneckerBlock] = []
        self._connect_capture()
        self._follow_requires_grad()
        self._list_left_to_base()

    def _list_left_to_base(self) -> None:
        """Name, once each, the modules that are trained without curvature."""
        for pattern in unmatched_patterns(self._model, self._options.skip_layers):
            if self._first_time(f"pattern:{pattern}"):
                self._warn(f"skip_layers: the pattern {pattern!r} matches no module of the model")
        new = [row for row in self._left if self._first_time(f"left:{row.name}")]
        if new:
            names = ", ".join(map(str, new[:20]))
            more = f" and {len(new) - 20} more" if len(new) > 20 else ""
            self._warn(
                f"trained by {type(self._base).__name__} alone, without curvature: {names}{more}; "
                f"summary() tells why"
            )

    def _connect_capture(self) -> None:
        options = self._options
        sampled, divided_by = options.fisher == "sampled", options.accumulation_steps
        collector = StatisticsCollector(
            options.kfac_approx,
            options.factor_dtype,
            mean_reduction=not sampled and options.loss_reduction == "mean",
            gradient_scale=GradientScale(
                1 if sampled or divided_by == "auto" else divided_by,
                None if sampled else self._grad_scaler,
            ),
            conv_approximation=self._conv_approximation,
            warn=self._notices.keep,
        )
        collector.watch(self._blocks)
        sampler = LabelSampler(options.likelihood, self._world.rank) if sampled else None
        self._collector = collector
        self._capture = Capture(collector, sampler, collector.wants)
        self._sampler = sampler
        self._watch()
        self._gate_capture()

    def _watch(self) -> None:
        """Hook the layers whose statistics this process takes."""
        modules = [m for b in self._blocks if self._takes_statistics(b) for m in b.modules]
        self._capture.attach(self._model, modules)

    def _gate_capture(self) -> None:
        """Capture during the coming passes only if the coming step wants statistics."""
        self._capture.enabled = self._due("factor_update_steps")
        if self._sampler is not None:
            self._sampler.step = self._steps

    def _follow_requires_grad(self) -> None:
        """Plan anew when layers were frozen or unfrozen since the last step."""
        for block in self._blocks:
            block.follow_requires_grad()
        signature = tuple((block.training, block.shape) for block in self._blocks)
        if signature == self._signature:
            return
        self._signature = signature
        self._active = [block for block in self._blocks if block.trainable]
        shapes = {block: block.shape for block in self._active}
        if self._steps > 0 and any(self._shapes.get(b) != shape for b, shape in shapes.items()):
            self._newcomers_at = self._steps + 1  # the first passes that are sure to be captured
        self._shapes |= shapes
        moved = self._somebody_moved()
        if moved:
            self._keepers = {}  # somebody keeps the factors of another place
        self._place(self._active)
        self._place_factors()
        if self._world.unpickled and not moved:
            self._world.unpickled = False  # its groups are new, its inverses are where they were
            return
        self._world.unpickled = self._world.moved = False
        for block in self._blocks:
            block.drop_inverse()
        self._solve_needed = True

    def _place_factors(self) -> None:
        """Factors go to those that keep them now."""
        keepers = {block: self._keeper(i) for i, block in enumerate(self._active)}
        move_factors(self._world, self._active, self._keepers, keepers)
        known = self._keepers | keepers
        self._keepers = {block: known[block] for block in self._blocks if block in known}
        self._watch()
        if self._steps > 0:
            self._share_state()  # which lets go of what is kept elsewhere now

    def _somebody_moved(self) -> bool:
        """Whether any process came out of a pickle at another place than it went in."""
        if not self._world.unpickled:
            return False
        moved = torch.tensor([float(self._world.moved)], device=self._device())
        self._world.start_sum([moved]).wait()
        return bool(moved)

    def _replan(self) -> None:
        if not self._closed:
            self._find_blocks()
            self._start_watching()

    def close(self) -> None:
        """Remove every hook from the model; the optimizer goes on as its base alone."""
        self._capture.detach()
        self._closed = True
        self._blocks, self._active, self._left, self._signature = [], [], [], ()
        self._collector.blocks.clear()
        self._keepers, self._shapes, self._overflown, self._elsewhere = {}, {}, {}, None
        self._place([])
        for parts in self.state.values():
            parts["curvature"] = {"steps": self._steps}

    # --------------------------------------------------------------------------------- the step

    def _due(self, option: str) -> bool:
        """Whether an interval's turn has come; ``option`` is its name."""
        if self._steps < self._options.refresh_warmup_steps or self._steps == self._newcomers_at:
            return True
        every = value_at(getattr(self._options, option), self._steps)
        check_interval(f"{option} at step {self._steps}: {option}", every)
        return self._steps % int(every) == 0

    def _nothing_captured(self) -> bool:
        return all(block.staged.empty for block in self._blocks)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and drop the statistics of backward passes already completed."""
        super().zero_grad(set_to_none)
        for block in self.__dict__.get("_blocks", ()):
            if not block.staged.empty:
                block.staged.clear()

    def _start_averaging(self) -> Callable[[], None]:
        self._follow_requires_grad()  # first: gradients go to those that are to precondition them
        return super()._start_averaging()

    def _transform_gradients(self, average: Callable[[], None]) -> None:
        follow_learning_rates(self.param_groups)
        if self._due("factor_update_steps"):
            with record_function("second_order.statistics"):
                self._update_factors()
        if self._solve_needed or self._due("inv_update_steps"):
            with record_function("second_order.solve"):
                self._refresh_inverses(average)
        with record_function("second_order.average_gradients"):
            average()
        with record_function("second_order.precondition"):
            self._precondition_gradients()

    @warns_at_its_end
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step: refresh what is due, precondition, step the base.

        Args:
            closure: Evaluates the model, calls ``backward`` and returns the loss. Called once.

        Returns:
            What the closure returned, or None.

        Raises:
            DecompositionError: On every rank, if a layer's factors could not be decomposed
                ``max_consecutive_failures`` refreshes in a row.
        """
        collected, self._elsewhere = self._elsewhere, None
        if collected:  # it goes from `state` as well
            self._share_state()
        loss = super().step(closure)
        self._gate_capture()
        return loss

    def _decay(self) -> float:
        """Weight of the past at an update."""
        decay: float = value_at(self._options.factor_decay, self._steps)
        check_decay(decay)
        return decay

    def _update_factors(self) -> None:
        """Running averages take in the statistics of all ranks, weighted by their examples."""
        decay = self._decay()
        dtype = self._options.factor_dtype
        taken = [block for block in self._active if self._takes_statistics(block)]
        parts = self._micro_batches(taken)
        sums = [block.staged.sums(parts).to(dtype) for block in taken]
        for block in self._active:
            block.staged.clear()
            block.ensure_factors()
            block.asked = True
        with record_function("second_order.exchange"):
            self._exchange_statistics(sums)
        self._drop_overflow(taken, sums)
        found = self._collector.settle()
        linked = link_equal_inputs(self._blocks, found, dict(zip(taken, sums, strict=True)))
        for block in reversed(taken):  # the last one's go first
            skip = "A" if block in linked else ""
            block.ensure_factors().update(sums.pop(), decay, skip)

    def _micro_batches(self, blocks: Sequence[KroneckerBlock]) -> int:
        """What the loss of each pass has been divided by, where that is to be found out."""
        options = self._options
        told = options.accumulation_steps != "auto" or options.loss_reduction == "sum"
        if told or options.fisher == "sampled":
            return 1
        found = max((block.staged.micro_batches for block in blocks), default=1)
        if found > 1 and self._first_time("micro-batches"):
            self._warn(
                f"{found} backward passes in a step: the loss of each is taken to have been "
                f"divided by their number, as Trainer, Lightning and Accelerate do; where losses "
                f"are added up as they are, write accumulation_steps=1"
            )
        return max(found, 1)

    def _precondition_gradients(self) -> None:
        """P where this rank is a gradient worker, then everybody's P, clipped, into ``p.grad``."""
        solved = [i for i, block in enumerate(self._active) if block.solved]
        gradients: dict[int, Tensor] = {}
        mine: dict[int, Tensor] = {}
        for i in solved:
            block = self._active[i]
            gradient = block.gradient(block.work_dtype)
            if gradient is not None:
                gradients[i] = gradient
            if self._preconditions(i):
                mine[i] = self._apply_inverse(block, gradient)
        with record_function("second_order.exchange"):
            results = self._exchange_gradients(mine, solved)
        if not gradients:
            return
        indices = list(gradients)
        with record_function("second_order.clip"):
            chosen = [results[i] for i in indices]
            coefficient = self._clip(chosen, list(gradients.values()), indices)
            for i in indices:
                result, factor = results[i], 1.0 if coefficient is None else coefficient
                if isinstance(factor, Tensor):
                    factor = factor.to(result.device, result.dtype)
                self._active[i].write_gradient(result, factor)

    def _apply_inverse(self, block: KroneckerBlock, gradient: Tensor | None) -> Tensor:
        shape = block.shape
        if gradient is None:  # nobody has one, but the others expect a message of this size
            size = (shape.groups, shape.out_dim, shape.in_dim)
            return torch.zeros(size, dtype=block.work_dtype, device=block.weight.device)
        assert block.inverse is not None
        return block.inverse.precondition(gradient.to(self._options.inv_dtype)).to(gradient.dtype)

    def _clip(
        self, results: list[Tensor], gradients: list[Tensor], indices: list[int]
    ) -> Tensor | None:
        kl_clip = self._kl_bound()
        if kl_clip is None:
            return None
        change = kl_change(results, gradients, self._clip_rates(indices))
        return kl_clip_coefficient(change, kl_clip)

    def _kl_bound(self) -> float | None:
        """κ at this step."""
        kl_clip: float | None = value_at(self._options.kl_clip, self._steps)
        if kl_clip is not None:
            check_clip(kl_clip)
        return kl_clip

    def _clip_rates(self, indices: Iterable[int]) -> list[float | Tensor]:
        """The learning rate by which each layer's step counts in the clip."""
        # A constant bound is the bound at the schedule's largest lr and shrinks with lr² below it:
        # ν lr P would otherwise not depend on lr at all while the clip is active.
        which = "lr" if callable(self._options.kl_clip) else PEAK_LR
        groups = [self.param_groups[self._group_index[id(self._active[i].weight)]] for i in indices]
        return [group[which] for group in groups]

    # ------------------------------------------------------------------------ state and summary

    @warns_at_its_end
    def consolidate(self, to: int | None = 0) -> None:
        """Collect the factors that other processes keep, for the next :meth:`state_dict`.

        A collective: every process calls it. What is collected is let go at the next step. Nothing
        happens where every process keeps everything.

        Args:
            to: The rank that is going to save; None if all are.

        Raises:
            ValueError: If there is no such rank.
        """
        check_rank("consolidate", to, self._world.size)
        if any(keepers is not None for keepers in self._keepers.values()):
            self._agree(f"consolidate(to={to})")
        if not self._closed:
            self._follow_requires_grad()
        self._elsewhere = gather_factors(self._world, self._keepers, to)
        self._gathered_to = to

    def state_dict(self) -> dict[str, Any]:
        """The state as primitives and tensors, as ``torch.load`` accepts with its defaults.

        Raises:
            SecondOrderError: If other processes keep some of the factors, they have not been
                collected by :meth:`consolidate` since the last step, and it is not
                ``torch.distributed.checkpoint`` that asks for this process's part.
        """
        spread = self._world.size > 1 and any(k is not None for k in self._keepers.values())
        if spread and self._elsewhere is None and not is_sharded_checkpoint():
            raise SecondOrderError(
                f"{type(self).__name__}.state_dict() would lack the factors that other processes "
                f"keep; call optimizer.consolidate(to=0) on every process first, or save with "
                f"torch.distributed.checkpoint"
            )
        elsewhere = self._elsewhere is not None and self._gathered_to not in (
            None,
            self._world.rank,
        )
        if spread and elsewhere and self._first_time("partial"):
            self._warn(
                f"state_dict() on rank {self._world.rank} has no more than this process's part: "
                f"consolidate(to={self._gathered_to}) collected the rest elsewhere; save it there, "
                f"or use to=None"
            )
        return super().state_dict()

    def _curvature_state(self) -> dict[Tensor, dict[str, Any]]:
        active, elsewhere = set(self._active), self._elsewhere or {}
        return {
            block.weight: (block.saved_factors() if self._takes_statistics(block) else {})
            | elsewhere.get(block, {})
            for block in self._blocks
            if block in active or block.factors is not None
        }

    def _check_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        check_saved_factors(saved, self._blocks)

    def _adopt_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        self._elsewhere = None
        for block in self._blocks:
            part: Mapping[str, Any] = saved.get(block.weight, {})
            block.staged.clear()
            block.forget()
            block.failures = 0
            if "average_weight" in part and (block.trainable or block.fits(part)):
                block.load_factors(part)
            elif "average_weight" in part:
                self._warn(
                    f"the factors of layer {block.name!r} are not taken over: it is frozen, and "
                    f"saved with another size, with its bias perhaps; once it trains they are "
                    f"taken anew"
                )
        self._solve_needed = True
        self._gate_capture()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_capture")
        state.pop("_collector")
        state.pop("_sampler")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_options" in state:
            self._group_index = {
                id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]
            }
            if self._world.unpickled:
                self._signature = None
            self._connect_capture()

    def summary(self) -> Summary:
        """A table of every layer: its factors, who computes what, what is left to the base.

        Bytes are those of this process. Reading it waits for the device.
        """
        owners = {b.name: self._computed_by(i) for i, b in enumerate(self._active)}
        rows = layer_rows(self._blocks, self._left, owners)
        group = self.param_groups[0]
        title = (
            f"{type(self).__name__} over {type(self._base).__name__}, lr {group['lr']}, "
            f"{self._options.solver}, {self._world.size} process"
            f"{'es' if self._world.size > 1 else ''}, step {self._steps}"
        )
        return Summary(
            title,
            rows,
            dropped=sum(int(block.staged.dropped) for block in self._blocks),
            failed=sum(block.failures > 0 for block in self._blocks),
        )

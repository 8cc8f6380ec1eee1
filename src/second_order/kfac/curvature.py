"""The K-FAC step, whoever does which part of it.

plan          who does what, compiled anew where layers were frozen, unfrozen or added
statistics    A, G of the step's passes, summed over the ranks that contribute
averages      A, G <- running averages, every factor_update_steps
solve         damped inverse of A ⊗ G, layer by layer, every inv_update_steps
precondition  P = (A ⊗ G + γ)⁻¹ ∇, by the layer's gradient workers
clip          ν = min(1, sqrt(κ / Σ lr² |P·∇|))
p.grad        <- ν P, everywhere
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.contract.training import ARRIVED, Curvature, PendingAverage, Routed, Training
from second_order.distributed.roles import whole_models
from second_order.distributed.world import World
from second_order.kfac.checkpoint import (
    CHOSEN,
    FACTORS_AND_STEPS,
    MEAN_CURVATURE,
    NEWLY_TRAINABLE_AT,
    check_saved_factors,
    gather_factors,
    load_factors,
    loaded_workers,
    move_factors,
    saved_factors,
    shared_number,
)
from second_order.kfac.feedback import (
    ADAPTIVE,
    PLAIN,
    StepLength,
    ascending_params,
    before_refresh,
    follow_refresh,
)
from second_order.kfac.group_options import describe_group_options
from second_order.kfac.layers import Layers, gradient_blocks, gradient_statistics
from second_order.kfac.metrics import fitted_curvature, metrics_of
from second_order.kfac.pipelined import Pipeline, Sums
from second_order.kfac.plan import (
    LayerPlan,
    Plan,
    StepPlan,
    System,
    compile_step,
    dims_of,
    sum_statistics,
    with_one_worker,
)
from second_order.kfac.precondition import (
    Clip,
    OwnerHook,
    owners_of,
    precondition_by_owners,
    precondition_by_workers,
)
from second_order.kfac.saved_inverses import (
    DAMPING,
    gather_inverses,
    has_inverse_entries,
    inverse_bytes,
    loaded_inverse,
    loaded_snapshot,
    saved_inverse,
    saved_snapshot,
)
from second_order.kfac.schedule import UPDATED_AT, Cadence
from second_order.kfac.sharded_gradients import Bucket, buckets_of, precondition_rows
from second_order.kfac.solve import LoadedInverse, Snapshot, Solves
from second_order.kfac.trace_rule import TRACE, TraceRefresh
from second_order.kronecker.block import PASS_HISTORY, KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.optimizers.config import SCHEDULES, KFACOptions
from second_order.options import AUTO, Scalar, scheduled
from second_order.report import Summary
from second_order.sharded import is_checkpointing
from second_order.stages import stage

__all__ = ["KFAC", "OfLayers"]

EXACT = 20  # first steps whose statistics travel unrounded


class OfLayers(Curvature):
    """What is alike on workers and on stats workers: both have the layers of a training."""

    scaler_matters = "the gradients it has captured carry the scale"
    parts_suffice = True
    layers: Layers
    _system: System

    def description(self) -> list[str]:
        """The options, and the layers."""
        return self.layers.description(self._system.said)

    def drop_pending(self) -> None:
        """Drop the statistics of backward passes already completed."""
        self.layers.drop_pending()

    def unwatched(self) -> AbstractContextManager[None]:
        """Make a context manager that takes all hooks off the model and puts them back."""
        return self.layers.unwatched()


class KFAC(OfLayers):
    """The layers of a training, their factors and inverses; ``helpers`` are the stats workers."""

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        system: System,
        helpers: Any = None,
    ) -> None:
        super().__init__(training)
        self._options, self._system, self.helpers = options, system, helpers
        self.layers = Layers(training, options, system.rules, system.conv_approximation)
        self.plan: Mapping[KroneckerBlock, LayerPlan] = {}  # of each layer that trains
        self.known: dict[KroneckerBlock, LayerPlan] = {}  # of layers that have ever trained
        self._shapes: dict[KroneckerBlock, Any] = {}  # shapes of these layers
        self._cadence = Cadence(training, options, self.layers)
        self.throttle, self.drift = self._cadence.throttle, self._cadence.drift
        rule = options.trace_rule
        traces = None if rule is None else TraceRefresh((rule.upper, rule.lower))
        parts = (training, options, self.layers, self.drift, traces)
        self.solves: Any = (system.solves or Solves)(*parts)
        self._step = StepPlan({}, World.alone(), World.alone())
        self._buckets: tuple[Any, list[Bucket]] = (None, [])  # and what they are made of
        self._owners: tuple[Any, dict[Tensor, int]] = (None, {})
        self.hook: OwnerHook | None = None  # DPKFAC's of DistributedDataParallel
        self._pipeline: Pipeline | None = None
        if system.pipelined and training.world.size > 1:
            self._pipeline = Pipeline(training, self.layers, options.factor_dtype)
            self.layers.heard = self._pipeline.heard
        lengths = ADAPTIVE if options.adaptive else PLAIN
        self.step_length = StepLength(lengths if options.follows_steps else None)
        self._closed, self._coming = False, False
        self._refreshes = False  # whether a refresh is due at this step
        # Between loading a checkpoint and the first step after it: that one was loaded, the layers
        # that this rank lacks a part of, and the entries from which a new plan takes inverses.
        self._just_loaded = False
        self._missing: set[KroneckerBlock] = set()
        self._loaded: Mapping[Tensor, SavedPart] = {}
        self.workers = 0  # number of gradient workers that has been chosen; 0 where it is given
        self.coefficient: Scalar | None = None  # ν of the last step; None where nothing was clipped
        self.clip = Clip(training, options, self.layers)
        self.layers.find()
        self._look_at_shards()

    def _look_at_shards(self) -> None:
        self.sharded = self.layers.sharded
        if self.sharded and self._options.other_matrices == "gradient":
            raise ValueError(
                f"{self.training.name}: other_matrices='gradient' makes factors of whole "
                f"gradients, and FSDP2 leaves each rank some of their rows; use 'base'"
            )

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Go on with FSDP2's shards of parameters; beside stats workers raise ValueError."""
        if self.helpers is not None:
            raise ValueError(whole_models(self.training.name, "stats"))
        self.layers.replace_params(others)
        self._look_at_shards()
        if self._options.other_matrices == AUTO and gradient_blocks(self.layers.blocks):
            self.replan()  # no rank has their whole gradients: they are left to the base

    def begin(self) -> None:
        """Give the processes their roles, plan, and watch the model.

        Raises:
            ValueError: If these processes and devices cannot do what is asked.
        """
        self._system.plan([], self.training.world.size)
        if self.helpers is not None:
            self.helpers.begin(self.training)
        if self._system.chooser is not None and not self.layers.sharded:
            # Sharded gradients come together on one rank, whatever would be chosen.
            self._take_workers(self._system.chooser.choose(self.training))
        self._look()

    def _take_workers(self, workers: int) -> None:
        """Plan with so many gradient workers, at the next look at the layers."""
        chooser, ranks = self._system.chooser, self.training.world.size
        self.workers = workers
        self._system = replace(self._system, plan=chooser.planner(workers, ranks))
        self.layers.forget_plan()

    def _look(self) -> None:
        self.layers.forget_plan()
        self.layers.connect()
        if self.layers.follow():
            self._compile()
        self.layers.name_those_left()
        self.watch()

    def replan(self) -> None:
        """Look for the model's layers again."""
        if not self._closed:
            self.layers.find()
            self._look_at_shards()
            self._look()

    # --------------------------------------------------------------------------------- the step

    def prepare(self) -> None:
        """Plan anew where layers have changed: gradients go to those that precondition them."""
        if self.throttle is not None:
            self.throttle.begin_step()
        if self.layers.follow():
            self._compile()
        if self._just_loaded:
            self._agree_on_loaded()
        if self.hook is not None:
            self.hook.share_moved(self.owners())

    def precondition(self, pending: PendingAverage) -> None:
        """Set ``p.grad`` to ν P; see the top of this file."""
        cadence, step = self._cadence, self._step
        helpers, solves, length = self.helpers, self.solves, self.step_length
        solves.refreshed = False
        takes = cadence.takes_statistics()
        if takes or helpers is not None or self._pipeline is not None:
            with stage("statistics"):
                age = self.training.steps - cadence.updated_at
                terms = self._take_statistics(takes)
                if takes and step.of_gradients:
                    self._take_gradients(pending, age, terms)
        due = cadence.due()
        self._refreshes = bool(due)
        solves.asked = None
        alone = self.training.world.size == 1 and pending is ARRIVED and solves.solves_at_once
        if alone and (due or solves.wanted):
            length.measure(step, True, self.sharded, ascending_params(self.training))
            solves.asked = before_refresh(self.training, self._options, length, step)
        if due or solves.wanted or solves.under_way or helpers is not None:
            with stage("solve"):
                news = [] if helpers is None else helpers.news()
                heard = solves.refresh(due, pending, news)
                if helpers is not None:
                    helpers.hear(heard, self.training)
        if pending is not ARRIVED:
            with stage("average_gradients"):
                pending.wait()
        if solves.asked is None and (solves.refreshed or length.kept):
            climbing = ascending_params(self.training)
            length.measure(step, solves.refreshed, self.sharded, climbing)
        with stage("precondition"):
            what = step, self.training, self.clip, self._options.inv_dtype
            if self.sharded:
                key = [id(p) for b in self.plan if b.solved for p in (b, *b.params)]
                if self._buckets[0] != key:
                    self._buckets = key, buckets_of(step, self.training.world)
                self.coefficient = precondition_rows(self._buckets[1], *what)
            elif self._system.owners is None:
                self.coefficient = precondition_by_workers(*what)
            else:
                back = self.training.averages or self.hook is not None
                sent = self.owners() if back and self.only_to_owners else None
                self.coefficient = precondition_by_owners(*what, sent)
        self._coming = bool(solves.under_way) or cadence.may_come()
        if (asked := solves.refreshed or self._coming) or length.factor != 1.0:
            length.keep(step.layers, asked)

    def correct(self) -> None:
        """Scale the step, and offer the parameters to stats workers; the step is over."""
        solves, cadence, drift = self.solves, self._cadence, self.drift
        if solves.refreshed:
            told = solves, drift, self.step_length, self._step
            follow_refresh(self.training, self._options, *told)
            self._coming = bool(solves.under_way) or cadence.may_come()
        if self.step_length.kept:
            self.step_length.scale(asked=self._coming)
        if self.helpers is not None:
            self.helpers.offer(self.training, solves.post)
        if solves.refreshed:
            cadence.warn_if_held()
        if self.throttle is not None:
            self.throttle.end_step(refreshed=self._refreshes)

    def watch(self) -> None:
        """Capture during the coming passes only if the coming step wants statistics."""
        own = self.helpers is None or self.helpers.own_passes
        due = own and self._cadence.takes_statistics()
        if due or self.layers.expecting:
            self.layers.expect(due)
        owned = self._system.owners is not None
        if owned and self.layers.collector.counted is not self._counted:  # it has been silent
            self.layers.watch(self._takes, self._counted)
        if self._pipeline is not None and due:
            self._pipeline.expect(self._wire)

    def _take_statistics(self, due: bool) -> Tensor | None:
        """Update the averages by statistics of the step's passes, if ``due``, and of helpers.

        Returns the loss terms of the step, if any layer has counted them.
        """
        terms: Tensor | None = None
        helpers, layers, cadence, step = self.helpers, self.layers, self._cadence, self._step
        world, steps, pipeline = self.training.world, self.training.steps, self._pipeline
        if helpers is not None:
            due = due and helpers.own_passes and layers.capture.gate.open  # during the passes
        if due:
            reduction, more = layers.reduction, cast("Tensor | float", 1.0)
            if reduction == "step_mean":  # before pairs that explain nothing are dropped
                more = self._more_terms()
            layers.look(step.taken)
            for block in step.layers:
                block.ensure_factors(asked=True)
            decay = cadence.decay()
            exchange = partial(sum_statistics, world, step.layers)
            if pipeline is not None:
                pipeline.expect(self._wire)
                sums = pipeline.sums(layers, exchange)
            else:
                sums = layers.sums(step.taken)
                if world.size > 1:
                    with stage("statistics_exchange"):
                        exchange(sums, self._wire)
            if reduction == "step_mean":
                sums = layers.whole_steps(sums, world.size, more)
            if step.of_gradients and helpers is None:  # helpers have batches of their own
                terms = _most_terms(sums.values(), self.training.device)
            self._take_in(sums, decay)
            cadence.updated_at = steps
        elif pipeline is not None:
            pipeline.drain()
        if helpers is not None:
            mine = {b.name: b for b, layer in self.plan.items() if layer.solver("A") == world.rank}
            for found in helpers.statistics(mine, self.training):
                decay = cadence.decay()
                cadence.updated_at = steps
                for block in found:
                    block.ensure_factors(asked=True)
                self._take_in(found, decay)
        return terms

    def _take_in(self, sums: Sums, decay: float) -> None:
        """Update the running averages; solves under way keep the factors that they started from."""
        if self.solves.under_way:
            self.solves.keep_snapshots(sums)
        self.layers.take_in(sums, decay)

    def _more_terms(self) -> Tensor | float:
        """The terms of a step on all ranks over those in sums of examples: 1, or of one rank's.

        Shares are taken for equal where a rank has not counted, or has none of the counted layer's.
        """
        counted = self._counted
        if counted is None:
            return 1.0
        ranks, like = self.training.world.size, counted.staged
        (terms,) = self.layers.collector.terms([like])
        number = torch.as_tensor(terms.number, dtype=like.dtype, device=like.device)
        here = torch.stack([number, torch.full_like(number, float(not like.empty))])
        everywhere = here.clone()
        with stage("statistics_exchange"):
            self.training.world.all_reduce([everywhere]).wait()
        known = (everywhere[1] == ranks) & (here[0] > 0)
        return torch.where(known, everywhere[0] / here[0].clamp_min(1.0), ranks)

    @property
    def _wire(self) -> torch.dtype | None:
        """The dtype in which factors' sums travel at this step; None for their own.

        The averages' first entries are exact: a later one's rounding is divided by the number of
        those before it, where alone it may be larger than a small damping.
        """
        exact = self.training.steps < EXACT
        return None if exact else self._system.exchange_dtype

    def _take_gradients(self, pending: PendingAverage, age: int, terms: Tensor | None) -> None:
        """Update the averages of matrices that no rule knows, ``age`` steps after the last time."""
        blocks = self._step.of_gradients
        with stage("average_gradients"):
            pending.wait()
        sums = gradient_statistics(
            self.training,
            terms,
            [block for block in blocks if self._takes(block)],
            counts_own=self._system.owners is not None,
            mean_loss=self._options.loss_reduction != "sum",
        )
        for block in blocks:
            block.ensure_factors(asked=True)
        self._take_in(sums, self._cadence.decay(age))

    # ------------------------------------------------------------------------------ who does what

    def owners(self) -> dict[Tensor, int]:
        """The rank that owns each gradient that is averaged, in a layer or not."""
        params = self.training.averaged_params()
        if self._owners[0] != (key := list(map(id, params))):
            self._owners = key, owners_of(self.plan, params, self.training.world.size)
        return self._owners[1]

    @property
    def only_to_owners(self) -> bool:
        """Whether each mean gradient goes to its owner alone."""
        return self._system.owners == "owner" and not self.sharded

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """The rank that each mean gradient goes to."""
        return (gradients, list(self.owners().values())) if self.only_to_owners else None

    def _takes(self, block: KroneckerBlock) -> bool:
        """Whether this rank's batches go into a layer's factors."""
        # A layer that was frozen from the start is watched by all: whoever gets it has its passes.
        layer = self.known.get(block)
        return layer is None or layer.source in (None, self.training.world.rank)

    @property
    def _counted(self) -> KroneckerBlock | None:
        """The layer whose terms all ranks count; None where statistics are of all ranks' terms."""
        alone = self._system.owners is None or self.training.world.size == 1
        return None if alone else self.layers.counting

    def _compile(self) -> None:
        """Compile the step anew, as layers were frozen or unfrozen since the last one."""
        layers, steps, world = self.layers, self.training.steps, self.training.world
        shapes = {block: block.shape for block in layers.active}
        changed = any(self._shapes.get(block) != shape for block, shape in shapes.items())
        self._shapes |= shapes
        plan: Plan = self._system.plan(list(map(dims_of, layers.active)), world.size)
        plan = with_one_worker(plan) if self.sharded else plan
        before, wire = self.known, self._system.exchange_dtype
        self.plan = dict(zip(layers.active, plan.layers, strict=True))
        pairs = [(before.get(block, layer), layer) for block, layer in self.plan.items()]
        moved = any(old.source != new.source for old, new in pairs)
        resumes = bool(self._loaded) and not self._trained_others(self._loaded)
        if not resumes and ((steps > 0 and changed) or moved):
            layers.newcomers_at = steps + 1  # the first passes that are sure to be captured
        known = {**before, **self.plan}
        self.known = {block: known[block] for block in layers.blocks if block in known}
        self._step = compile_step(world, plan.grid, self.plan, wire, self._takes)
        self._buckets, self._owners = (None, []), (None, {})
        if self._pipeline is not None:
            self._pipeline.follow(self._step.taken)
        move_factors(world, self.plan, before)
        layers.watch(self._takes, self._counted)
        for block in layers.blocks:
            block.drop_inverse()
        self.solves.restart(self._step)
        self.clip.follow()
        if self.drift is not None:
            self.drift.follow(layers.blocks)
        if self.helpers is not None:
            self.helpers.begin_anew()
        if self._loaded:  # by the layers or the workers before
            self._take_over(self._loaded)
        if steps > 0:
            self.training.publish()  # frees factors that other ranks keep now

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        return [
            *(("closed", self._closed), ("sharded by FSDP2", self.sharded)),
            ("inverses wanted at once", [b.name for b in self.plan if b in self.solves.wanted]),
            ("anew at", self.layers.newcomers_at),
            *scheduled(self._options, SCHEDULES, self.training.steps),
            ("losses", self.layers.reduction),
            ("length of steps", self.step_length.factor),
            *([("intervals", self.drift.intervals(self.layers.active))] if self.drift else []),
            *([("gradient workers", self.workers)] if self.workers else []),
            *([("least interval", self.throttle.interval)] if self.throttle else []),
        ]

    # ------------------------------------------------------------------------ state and summary

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The factors that this process keeps, by the layers' weights."""
        kept = {**self.step_length.saved()}
        if self.throttle is not None:
            kept |= self.throttle.saved()
        if self.clip.usual is not None:
            kept |= self.clip.usual.saved()
        kept[MEAN_CURVATURE] = self.solves.mean_curvature
        kept[UPDATED_AT] = self._cadence.updated_at
        kept[NEWLY_TRAINABLE_AT] = self.layers.newcomers_at
        if self._system.chooser is not None:
            kept |= zip(CHOSEN, (self.workers, self.training.world.size), strict=True)
        of_layers = [each for each in (self.solves.traces, self.drift) if each is not None]
        # Before the first step, every rank has the same entries, because
        # set_optimizer_state_dict(full_state_dict=True) fails for 0-d tensors that a rank lacks.
        fresh = self.training.steps == 0
        return saved_factors(self.layers, lambda b: fresh or self._takes(b), kept, of_layers)

    def state_to_save(self) -> dict[Tensor, dict[str, Any]]:
        """What decides the steps between two refreshes: inverses, running solves, the last step.

        The tensors are shared, not copied. This waits for solves on threads.
        """
        if self._closed:
            return {}
        solves, rank, traces = self.solves, self.training.world.rank, self.solves.traces
        solves.finish()
        room = is_checkpointing(part=True)  # torch.distributed.checkpoint reads into what is there
        damping = float(solves.damping)
        common = {DAMPING: -1.0 if math.isnan(damping) else damping}
        found: dict[Tensor, dict[str, Any]] = {}
        for block, layer in self.plan.items():
            for p in block.params:
                found[p] = self.step_length.saved_step(p, room)
            part = found.setdefault(block.weight, {})
            part |= {**common, **saved_inverse(block, solves, rank in layer.workers, room)}
            if self._on_threads and layer.keepers is None:
                part |= saved_snapshot(block, solves, room)
            elif block in solves.under_way:
                part["inverse_wanted"] = 1  # its owner alone has what it is computed from
            if self._takes(block):
                part[PASS_HISTORY] = block.numbers(self._history(block))
                part |= {} if traces is None else {TRACE: block.numbers(traces.mark(block))}
        return found

    def _ranks_of(self, block: KroneckerBlock) -> int:
        """Number of ranks whose passes make a layer's statistics."""
        return self.training.world.size if self.plan[block].source is None else 1

    def _history(self, block: KroneckerBlock) -> list[float]:
        return block.state.history(self._ranks_of(block))

    @property
    def _on_threads(self) -> bool:
        """Whether solves can be under way between two steps."""
        return self._system.solves is not None and not self._system.waits

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if saved factors do not fit the layers."""
        check_saved_factors(saved, self.layers.blocks)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over saved factors and inverses; missing inverses are computed at the next step."""
        load_factors(saved, self.layers.blocks, self.training)
        # A process may have got its own layers' factors alone, but moves and collects with others.
        for block, layer in self.known.items():
            if block.factors is None and layer.source is not None:
                factors = block.ensure_factors()
                if self.training.steps > 0 and self._takes(block):
                    factors.stored.update(A=None, G=None)  # lost: the next refresh tells
        self.solves.restart(self._step)
        workers = loaded_workers(saved, self.training.world.size)
        if self.workers and workers not in (0, self.workers):
            self._take_workers(workers)
        if self.drift is not None:
            self.drift.load(saved, self.layers.blocks)
        if self.throttle is not None:
            self.throttle.load(saved)
        self.step_length.load(saved)
        if self.clip.usual is not None:
            self.clip.usual.load(saved)
        self.solves.mean_curvature = shared_number(saved, MEAN_CURVATURE, 0.0)
        steps = self.training.steps
        self._cadence.updated_at = int(shared_number(saved, UPDATED_AT, steps))
        self.layers.newcomers_at = int(shared_number(saved, NEWLY_TRAINABLE_AT, -1))
        self._just_loaded = True
        self._take_over(saved)
        self._loaded = self._to_take_over_again(saved)
        self.watch()

    def _to_take_over_again(self, saved: Mapping[Tensor, SavedPart]) -> dict[Tensor, SavedPart]:
        """The entries that :meth:`_take_over` reads, with the installed inverses, not copied.

        Scripts may freeze layers after loading. Then the first step makes a new plan, which needs
        the inverses again.
        """
        found: dict[Tensor, SavedPart] = {}
        for p, part in saved.items():
            found[p] = part.without(FACTORS_AND_STEPS)
        for block in self.plan:
            if block.inverse is not None and block.weight in found:
                found[block.weight].update(block.inverse.entries)
        return found

    def _trained_others(self, saved: Mapping[Tensor, SavedPart]) -> bool:
        """Whether other layers trained when a checkpoint was written than train now."""
        for block in self.layers.blocks:
            part = saved.get(block.weight)
            trained = part is not None and has_inverse_entries(part)
            if part is not None and trained != (block in self.plan):
                return True
        return False

    def _take_over(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Install the inverses of a checkpoint, and restart the solves that were in progress.

        Requires that the factors are loaded, and that the plan matches the layers that train.
        """
        solves, rank, options = self.solves, self.training.world.rank, self._options
        inverses: dict[KroneckerBlock, LoadedInverse] = {}
        snapshots: dict[KroneckerBlock, Snapshot] = {}
        missing: set[KroneckerBlock] = set()
        for block, layer in self.plan.items():
            part = saved.get(block.weight)
            if part is None or not has_inverse_entries(part):
                continue  # it is refreshed at the next step
            works = rank in layer.workers
            if not part["inverse_wanted"]:
                solves.wanted.discard(block)
            inverse = loaded_inverse(
                part,
                block,
                solves.solver,
                options.inv_dtype,
                works,
                scaled=options.preconditioner_scale == "gradient",
            )
            if inverse is not None:
                inverses[block] = inverse
                if works and inverse.inverse is None:
                    missing.add(block)
            snapshot = loaded_snapshot(part, block)
            if snapshot is not None and self._on_threads and layer.keepers is None:
                snapshots[block] = snapshot
                if snapshot.factors is None:
                    missing.add(block)
        solves.take_over(inverses)
        damping = shared_number(saved, DAMPING, -1.0)
        solves.damping = damping if damping >= 0 else math.nan
        if solves.traces is not None:
            solves.traces.load(saved, self.layers.blocks)
        solves.resubmit({b: s for b, s in snapshots.items() if b not in missing})
        for block in self.plan:
            block.state.load(saved.get(block.weight, {}), self._ranks_of(block))
        self._missing = missing
        if self.training.world.size == 1:
            solves.drop_missing(missing)

    def _agree_on_loaded(self) -> None:
        """Refresh layers if any rank lacks their part of the checkpoint; a collective.

        If other layers train now than when the checkpoint was written, refresh all layers. A run
        that freezes or unfreezes layers at this step does the same.
        """
        world, blocks = self.training.world, list(self.plan)
        missing = set(blocks) if self._trained_others(self._loaded) else self._missing
        self._just_loaded = False
        self._loaded = {}
        if world.size > 1:
            flags = torch.tensor([float(block in missing) for block in blocks], device="cpu")
            world.on_cpu().all_reduce_max([flags]).wait()
            missing = {b for b, flag in zip(blocks, flags.tolist(), strict=True) if flag}
        self.solves.drop_missing(missing)
        if missing and self.drift is not None:
            self.drift.follow(self.layers.blocks)  # layers without an inverse have other intervals

    @property
    def factors_elsewhere(self) -> bool:
        """Whether some factors are kept by other ranks alone.

        Before the first step there are none: Accelerate asks for the state of each new optimizer.
        """
        spread = any(layer.keepers is not None for layer in self.known.values())
        return self.training.world.size > 1 and self.training.steps > 0 and spread

    @property
    def kept_elsewhere(self) -> str:
        """A name for what other ranks alone keep, factors or inverses; "" if there is nothing."""
        if self.factors_elsewhere:
            return "the factors that other processes keep"
        size = self.training.world.size
        for block, layer in self.plan.items():
            if block.solved and len(layer.workers) < size:
                return "the inverses that other processes keep"
        return ""

    @property
    def dispensable(self) -> bool:
        """Whether other ranks keep inverses alone, which the next step can refresh."""
        return not self.factors_elsewhere

    def kept_by_all(self) -> Iterable[tuple[str, Tensor]]:
        """The factors and the inverses of layers of which every rank has them."""
        for block, layer in self.plan.items():
            if layer.keepers is None:
                for letter in block.shape.letters:
                    factor = block.stored(letter)
                    if factor is not None:
                        yield f"factor {letter} of layer {block.name!r}", factor
            if block.inverse is not None and len(layer.workers) == self.training.world.size:
                for i, tensor in enumerate(block.inverse.tensors):
                    yield f"tensor {i} of the inverse of layer {block.name!r}", tensor

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Collect copies of what other ranks keep, factors and inverses; a collective."""
        if not self._closed and self.layers.follow():
            self._compile()
        world, solves, rank = self.training.world, self.solves, self.training.world.rank
        found: dict[KroneckerBlock, dict[str, Any]] = {}
        found |= gather_factors(world, self.known, lambda _: ranks)
        for block, entries in gather_inverses(world, self.plan, solves, ranks).items():
            found[block] = {**found.get(block, {}), **entries}
        # Numbers that only the rank has whose batches make the layer's statistics.
        numbers: dict[str, dict[str, Sequence[float]]] = {}
        for block, layer in self.plan.items():
            if layer.source == rank:
                numbers[block.name] = {PASS_HISTORY: self._history(block)}
                if solves.traces is not None:
                    numbers[block.name][TRACE] = solves.traces.mark(block)
        known: dict[str, dict[str, Sequence[float]]] = {}
        for each in world.all_gather_object(numbers):
            known |= each
        for block in self.plan:
            more = {name: block.numbers(n) for name, n in known.get(block.name, {}).items()}
            if more:
                found[block] = {**found.get(block, {}), **more}
        return {block.weight: {"curvature": parts} for block, parts in found.items()}

    def close(self) -> None:
        """End threads and hooks; the optimizer goes on as its base alone."""
        if self.helpers is not None:
            self.helpers.close()
        self.solves.close()
        self.layers.close()
        self.clip.follow()
        if self.drift is not None:
            self.drift.follow(())
        if self._pipeline is not None:
            self._pipeline.close()
        self._closed = True
        self.plan, self.known, self._shapes = {}, {}, {}
        self._step = self.solves.step = StepPlan({}, self._step.row, self._step.column)
        self._owners = None, {}

    def fitted(self, dtype: torch.dtype, gather: bool) -> KroneckerCurvature:
        """The factors as an object of their own; a collective if some are kept elsewhere."""
        spread = self.factors_elsewhere
        if spread and self.layers.follow():
            self._compile()
        damping, layers = float(self.solves.damping), self.layers
        return fitted_curvature(
            self.training, self._options, layers, self.known, damping, dtype, gather, spread
        )

    def metrics(self) -> dict[str, float]:
        """Numbers to log: clip, damping, traces, condition, ages and failures."""
        last, nu = self.training.steps - 1, self.coefficient
        found = metrics_of(self.layers, self.plan, self.solves, last)
        found["clip"] = 1.0 if nu is None else float(nu)
        found["step_length"] = self.step_length.factor
        if last >= 0 and not self._closed:
            found["age/statistics"] = float(max(last - self._cadence.updated_at, 0))  # 0: loaded
            found |= {} if self.drift is None else self.drift.metrics
            found |= self._cadence.intervals(last)
        return found

    def summary(self) -> Summary:
        """A table of every layer: its factors, who computes what, what is left to the base."""
        said = {block.name: layer.said for block, layer in self.plan.items()}
        of_layers = (each.said for each in (self.solves.traces, self.drift) if each is not None)
        settings = [
            self._options.describe(),
            describe_group_options(self.training.groups),
            *of_layers,
        ]
        solver, dtype = self.solves.solver, self._options.inv_dtype
        added = inverse_bytes(list(self.plan), solver, dtype) / 2**20
        settings.append(f"inverses add {added:.2f} MiB to a checkpoint")
        if self.workers:
            ranks = self.training.world.size
            settings.append(f"gradient workers chosen: {self.workers} of {ranks} for each layer")
        intervals = "" if self.throttle is None else self.throttle.said
        settled, age = "; ".join(filter(None, settings)), ""
        if self._system.solves is not None:
            solves, steps, age = self.solves, self.training.steps, "no inverses yet"
            ages = sorted(steps - step for step in solves.taken_at.values())
            delays = sorted(n - solves.taken_at[b] for b, n in solves.installed_at.items())
            if ages:
                age = (
                    f"inverses are {ages[0]} to {ages[-1]} steps old; the last solves took "
                    f"{delays[0]} to {delays[-1]} steps; {len(solves.under_way)} under way"
                )
        table = self.layers.summary(said)
        return replace(table, intervals=intervals, settings=settled, age=age)


def _most_terms(sums: Iterable[StatisticsSums], device: torch.device) -> Tensor | None:
    """The largest number of loss terms of a step's layers."""
    numbers = [each.head[0].to(device) for each in sums]
    return torch.stack(numbers).max() if numbers else None

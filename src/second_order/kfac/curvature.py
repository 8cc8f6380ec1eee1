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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.caller import is_checkpointing
from second_order.checkpoint.saved import SavedPart
from second_order.distributed.roles import sharding_error
from second_order.distributed.world import World
from second_order.kfac.feedback import (
    ADAPTIVE,
    PLAIN,
    Report,
    StepLength,
    report_refresh,
    share_feedback,
)
from second_order.kfac.inversion import Inverses, Refresh
from second_order.kfac.layers import (
    Layers,
    describe_group_options,
    gradient_blocks,
    gradient_statistics,
)
from second_order.kfac.metrics import build_curvature, metrics_of
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
    Preconditioning,
    owners_of,
    precondition_gradients,
)
from second_order.kfac.schedule import UPDATED_AT, Cadence
from second_order.kfac.sharded_gradients import Bucket, make_buckets, precondition_rows
from second_order.kfac.spd_kfac import Pipeline, Sums
from second_order.kfac.state import (
    CHOSEN,
    DAMPING,
    MEAN_CURVATURE,
    NEWLY_TRAINABLE_AT,
    check_saved,
    factor_entries,
    inverse_entries,
    inverse_state,
    load_factors,
    load_inverses,
    move_factors,
    read_num_gradient_workers,
    read_shared_number,
    send_entries,
    trainable_layers_changed,
)
from second_order.kfac.thor import TraceRefresh
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.kronecker.solvers import Inverse
from second_order.kronecker.storage import DeviceRead
from second_order.optimizers.config import SCHEDULES, KFACOptions
from second_order.planning.cost import cheapest_workers
from second_order.planning.machine import calibrate
from second_order.reporting.summary import Summary
from second_order.training.context import Training
from second_order.training.curvature import NO_AVERAGE, Curvature, PendingAverage, Routed
from second_order.utils.checks import AUTO, Scalar, scheduled, value_at
from second_order.utils.stages import stage

__all__ = ["KFAC", "OfLayers", "StepInfo"]

PRICE = {"inverse": 4.0, "eigen": 15.0}  # operations of a solve over n³ of its factors

NO_REFRESH = Refresh()

EXACT = 20  # first steps whose statistics travel unrounded


class OfLayers(Curvature):
    """What is alike on workers and on stats workers: both have the layers of a training."""

    scaler_reason = "the gradients it has captured carry the scale"
    saves_by_rank = True
    layers: Layers
    _system: System

    def description(self) -> list[str]:
        """The options, and the layers."""
        return self.layers.description(self._system.said)

    def drop_pending(self) -> None:
        """Drop the statistics of backward passes already completed."""
        self.layers.drop_pending()

    def hooks_removed(self) -> AbstractContextManager[None]:
        """Make a context manager that takes all hooks off the model and puts them back."""
        return self.layers.hooks_removed()


@dataclass(frozen=True)
class StepInfo:
    """What a step has done.

    Attributes:
        refreshed: The layers that have a new inverse; the same on every rank.
        clip: ν, a scalar; None where nothing was clipped.
        refresh_due: Whether the schedule had a refresh at this step.
        refresh_coming: Whether layers may be refreshed at the next step.
    """

    refreshed: Sequence[KroneckerBlock] = ()
    clip: Scalar | None = None
    refresh_due: bool = False
    refresh_coming: bool = False


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
        self._cadence = Cadence(training, options, self.layers)
        self.throttle, self.drift = self._cadence.throttle, self._cadence.drift
        rule = options.trace_rule
        self.traces = None if rule is None else TraceRefresh(rule.upper, rule.lower)
        self.inverses = Inverses(
            training,
            options,
            self.layers,
            drift=self.drift,
            rule=None if self.traces is None else self.traces.choose,
            inverter=system.inverter,
        )
        self.mean_curvature = 0.0  # of all layers, at the last refresh
        self._step = StepPlan({}, World.alone(), World.alone())
        self._buckets: list[Bucket] = []  # of layers whose gradients are sharded
        self._owners: tuple[Any, dict[Tensor, int]] = (None, {})
        self._pipeline: Pipeline | None = None
        if system.pipelined and training.world.size > 1:
            self._pipeline = Pipeline(training, self.layers, options.factor_dtype)
        lengths = ADAPTIVE if options.adaptive else PLAIN
        self.step_length = StepLength(lengths) if options.follows_steps else None
        self._closed = False
        self._last = StepInfo()
        # Between loading a checkpoint and the first step after it: the checkpoint, and the layers
        # that this rank lacks a part of.
        self._loaded: Mapping[Tensor, SavedPart] | None = None
        self._missing: set[KroneckerBlock] = set()
        self.workers = 0  # number of gradient workers that has been chosen; 0 where it is given
        self.clip = None if options.kl_clip is None else Clip(training, options)
        # What a checkpoint has with every layer.
        usual = None if self.clip is None else self.clip.usual
        parts = (self.throttle, self.step_length, usual)
        self._parts: list[Any] = [part for part in parts if part is not None]
        self.layers.find()
        self._look_at_shards()

    def _look_at_shards(self) -> None:
        self.sharded = self.layers.sharded
        if self.sharded and self._options.unsupported_layers == "gradient_factors":
            raise ValueError(
                f"{self.training.name}: unsupported_layers='gradient_factors' computes factors "
                f"from whole gradients, but FSDP2 gives each rank only some of their rows; use "
                f"unsupported_layers='base_optimizer'"
            )

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Go on with FSDP2's shards of parameters; beside stats workers raise ValueError."""
        if self._closed:
            return
        if self.helpers is not None:
            raise ValueError(sharding_error(self.training.name, "stats"))
        self.layers.replace_params(others)
        self._look_at_shards()
        if self._options.unsupported_layers == AUTO and gradient_blocks(self.layers.blocks):
            self.replan()  # no rank has their whole gradients: they are left to the base

    def begin(self) -> None:
        """Give the processes their roles, plan, and watch the model.

        Raises:
            ValueError: If these processes and devices cannot do what is asked.
        """
        self._system.plan([], self.training.world.size)
        if self.helpers is not None:
            self.helpers.begin(self.training)
        if self._system.auto_workers and not self.layers.sharded:
            # Sharded gradients come together on one rank, whatever would be chosen.
            self._take_workers(self._cheapest_workers())
        self._look()

    def _cheapest_workers(self) -> int:
        """The number of gradient workers with the fastest predicted step; a collective."""
        world = self.training.world
        shapes = [block.shape for block in self.layers.blocks if block.trainable]
        if world.size == 1 or not shapes:
            return 1
        machine, network = calibrate(self.training.device, world.group)
        interval = self._options.refresh_interval
        if interval is None:
            interval = 10  # drift chooses it later
        workers = cheapest_workers(
            shapes,
            world.size,
            machine,
            network,
            solver=self._options.solver,
            inv_update_steps=max(int(value_at(interval, 0)), 1),
        )
        # Ranks on different hosts may round differently.
        return int(world.all_gather_object(workers)[0])

    def _take_workers(self, workers: int) -> None:
        """Plan with so many gradient workers, at the next look at the layers."""
        self.workers = workers
        fraction = workers / self.training.world.size
        self._system = replace(self._system, plan=partial(self._system.plan, fraction=fraction))
        self.layers.forget_plan()

    def _look(self) -> None:
        self.layers.forget_plan()
        self.layers.connect(None if self._pipeline is None else self._pipeline.send_complete)
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
        if self._loaded is not None:
            self._agree_on_loaded(self._loaded)
            self._loaded = None

    def precondition(self, pending: PendingAverage) -> StepInfo:  # type: ignore[override]
        """Replace every covered ``p.grad`` by ν P, as at the top of this file; a collective."""
        inverses, length = self.inverses, self.step_length

        # Update A and G from this step's batches.
        due = self._cadence.takes_statistics()
        if due or self.helpers is not None or self._pipeline is not None:
            with stage("statistics"):
                self._update_factors(due, pending)

        # Recompute the inverses that are due, each on its inverse rank.
        layers = self._cadence.due()
        refresh = NO_REFRESH
        report: Report | None = None
        read = DeviceRead()
        if layers or inverses.requested or inverses.pending:
            with stage("solve"):
                if inverses.reads_once and pending is NO_AVERAGE:
                    report = self._report(read, self._measured_layers())
                refresh = inverses.refresh(layers, pending, self.mean_curvature, read)
        if pending is not NO_AVERAGE:
            with stage("average_gradients"):
                pending.wait()
        if self.helpers is not None:
            self.helpers.agree(self.training)

        # Measure the effect of the last step, before gradients are preconditioned.
        if refresh.installed and report is None:
            solved = [block for block in self._measured_layers() if block.solved]
            report = self._report(read, solved)

        # Precondition on the gradient workers, exchange P, clip, and write p.grad.
        with stage("precondition"):
            result = self._precondition(refresh.previous)

        # Adapt the refresh intervals and the step scale to what the refresh has changed.
        if refresh.installed and report is not None:
            self._adapt(report, refresh.cosines, result.cosines, read)
        coming = bool(inverses.pending) or self._cadence.may_come()
        if length is not None:
            length.keep(self._step.layers, wanted=coming)
        self._last = StepInfo(refresh.installed, result.clip, bool(layers), coming)
        return self._last

    def finish_step(self) -> None:
        """Scale the base's step, and offer the parameters to stats workers."""
        if self.step_length is not None:
            self.step_length.scale(wanted=self._last.refresh_coming)
        if self.helpers is not None:
            self.helpers.offer(self.training, self.inverses.inverter.post)
        if self.throttle is not None:
            self.throttle.end_step(refreshed=self._last.refresh_due)

    def _precondition(self, previous: Mapping[KroneckerBlock, Inverse]) -> Preconditioning:
        """Precondition the mean gradients, by rows if FSDP2 has sharded them."""
        training, step, dtype = self.training, self._step, self._options.inv_dtype
        if self.sharded:
            return precondition_rows(self._buckets, step, training, self.clip, dtype, previous)
        owners = self.owners() if training.averages_gradients and self.only_to_owners else None
        return precondition_gradients(step, self.clip, dtype, previous, owners)

    def _measured_layers(self) -> Sequence[KroneckerBlock]:
        """The layers whose mean curvature this rank reports, because it has their statistics."""
        if self.helpers is None:
            return self._step.reporting
        rank = self.training.world.rank
        return [block for block, layer in self._step.layers.items() if layer.solver("A") == rank]

    def _report(self, read: DeviceRead, layers: Sequence[KroneckerBlock]) -> Report | None:
        """What this rank reports of a refresh; None if nothing adapts to refreshes."""
        length = self.step_length
        if self.drift is None and length is None and self._options.floor == 0:
            return None
        slopes: list[Tensor] = []
        if length is not None:
            slopes = length.measure(self._step, self.sharded, self.training.groups)
        return report_refresh(self.training, self._step, layers, slopes, read)

    def _adapt(
        self,
        report: Report,
        known: Mapping[KroneckerBlock, float],
        cosines: Mapping[KroneckerBlock, Tensor],
        read: DeviceRead,
    ) -> None:
        """Let γ, the step scale and the refresh intervals follow a refresh, on all ranks alike."""
        training, options, step = self.training, self._options, self._step
        with stage("solve_exchange"):
            found = share_feedback(training, step, report, known, cosines, read)
        if self.step_length is not None:
            self.step_length.follow(found.slope, found.learning_rate, training.steps)
        if found.mean_curvature is not None:
            self.mean_curvature = found.mean_curvature
        if self.drift is not None:
            price = PRICE[options.solver] / training.world.size
            costs = [price * step.costs[block] for block in step.layers]
            self.drift.hear(list(step.layers), found.cosines, found.work, costs)

    def watch(self) -> None:
        """Capture during the coming passes only if the coming step wants statistics."""
        own = self.helpers is None or self.helpers.own_passes
        due = own and self._cadence.takes_statistics()
        if due or self.layers.expecting:
            self.layers.expect(due)
        if self._pipeline is not None and due:
            self._pipeline.expect(self._wire)

    def _update_factors(self, due: bool, pending: PendingAverage) -> None:
        """Update the running averages by the step's passes, if ``due``, and by stats workers."""
        helpers, layers, cadence, step = self.helpers, self.layers, self._cadence, self._step
        age = self.training.steps - cadence.updated_at
        terms: Tensor | None = None  # of the step's loss, if any layer has counted them
        # With stats workers, statistics of passes are taken if they were due during the passes.
        if due and (helpers is None or (helpers.own_passes and layers.capture.gate.open)):
            decay = cadence.decay()
            sums = self._sum_statistics()
            if step.of_gradients and sums and helpers is None:  # helpers have their own batches
                numbers = [each.head[0].to(self.training.device) for each in sums.values()]
                terms = torch.stack(numbers).max()
            self._take_in(sums, decay)
        elif self._pipeline is not None:
            self._pipeline.drain()
        if helpers is not None:
            rank = self.training.world.rank
            own = {b.name: b for b, layer in self.plan.items() if layer.solver("A") == rank}
            for sums in helpers.statistics(own, self.training):
                self._take_in(sums, cadence.decay())
        if due and step.of_gradients:
            self._update_from_gradients(pending, age, terms)

    def _sum_statistics(self) -> Sums:
        """The statistics of the step's passes, summed over the ranks; a collective."""
        layers, step, world = self.layers, self._step, self.training.world
        layers.look(step.taken)
        for block in step.layers:
            block.ensure_factors(statistics_due=True)
        exchange = partial(sum_statistics, world, step.layers)
        if self._pipeline is not None:
            self._pipeline.expect(self._wire)
            sums = self._pipeline.sums(layers, exchange)
        else:
            sums = layers.sums(step.taken)
            if world.size > 1:
                with stage("statistics_exchange"):
                    exchange(sums, self._wire)
        if layers.reduction != "step_mean":
            return sums
        # Owners have the terms of their own batches alone: other ranks are taken to have as many.
        share = 1.0 / world.size if self._system.owners is None else 1.0
        return layers.whole_steps(sums, share)

    def _take_in(self, sums: Sums, decay: float) -> None:
        """Update the running averages; layers under way keep the factors that they started from."""
        if self.inverses.pending:
            self.inverses.snapshot_factors(sums)
        self.layers.take_in(sums, decay)
        self._cadence.note_update()

    @property
    def _wire(self) -> torch.dtype | None:
        """The dtype in which factors' sums travel at this step; None for their own.

        The averages' first entries are exact: a later one's rounding is divided by the number of
        those before it, where alone it may be larger than a small damping.
        """
        exact = self.training.steps < EXACT
        return None if exact else self._system.exchange_dtype

    def _update_from_gradients(
        self, pending: PendingAverage, age: int, terms: Tensor | None
    ) -> None:
        """Update the averages of gradient-factored matrices, ``age`` steps after the last time."""
        with stage("average_gradients"):
            pending.wait()
        sums = gradient_statistics(
            self.training,
            terms,
            [block for block in self._step.of_gradients if self._takes(block)],
            counts_own=self._system.owners is not None,
            mean_loss=self._options.loss_reduction != "sum",
        )
        for block in self._step.of_gradients:
            block.ensure_factors(statistics_due=True)
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

    def _compile(self) -> None:
        """Assign the layers that train now to ranks, and move factors to where they belong."""
        layers, steps, world = self.layers, self.training.steps, self.training.world
        plan: Plan = self._system.plan([dims_of(block) for block in layers.active], world.size)
        if self.sharded:
            plan = with_one_worker(plan)
        before = self.known
        self.plan = dict(zip(layers.active, plan.layers, strict=True))
        known = {**before, **self.plan}
        self.known = {block: known[block] for block in layers.blocks if block in known}

        # Newly trainable layers, and those of other sources, need the passes before the next step.
        new = steps > 0 and any(block.factors is None for block in layers.active)
        pairs = [(before.get(block, layer), layer) for block, layer in self.plan.items()]
        moved = any(old.source != layer.source for old, layer in pairs)
        resumes = self._loaded is not None and not trainable_layers_changed(self._loaded, self.plan)
        if (new or moved) and not resumes:
            layers.take_all_at(steps + 1)

        # Hooks, factors and inverses follow.
        self._step = compile_step(world, plan.grid, self.plan, self._system.exchange_dtype)
        self._buckets = make_buckets(self._step, world) if self.sharded else []
        self._owners = None, {}
        if self._pipeline is not None:
            self._pipeline.follow(self._step.taken)
        move_factors(world, self.plan, before)
        layers.watch(self._takes)
        for block in layers.blocks:
            block.drop_inverse()
        self.inverses.restart(self._step)
        if self.drift is not None:
            self.drift.follow(layers.blocks)
        if self.helpers is not None:
            self.helpers.restart()
        if self._loaded is not None:  # by the layers or the workers before
            self._take_over(self._loaded)
        if steps > 0:
            self.training.publish()  # frees factors that other ranks keep now

    @property
    def _step_scale(self) -> float:
        """τ."""
        return 1.0 if self.step_length is None else self.step_length.factor

    def fingerprint_values(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        return [
            *(("closed", self._closed), ("sharded by FSDP2", self.sharded)),
            (
                "inverses wanted at once",
                [b.name for b in self.plan if b in self.inverses.requested],
            ),
            ("anew at", self.layers.newcomers_at),
            *scheduled(self._options, SCHEDULES, self.training.steps),
            ("losses", self.layers.reduction),
            ("length of steps", self._step_scale),
            *([("intervals", self.drift.intervals(self.layers.active))] if self.drift else []),
            *([("gradient workers", self.workers)] if self.workers else []),
            *([("least interval", self.throttle.interval)] if self.throttle else []),
        ]

    # ------------------------------------------------------------------------ state and summary

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The factors that this process stores, by the layers' weights; shared, not copied."""
        common: dict[str, Any] = {}
        for part in self._parts:
            common |= part.saved()
        common[MEAN_CURVATURE] = self.mean_curvature
        common[UPDATED_AT] = self._cadence.updated_at
        common[NEWLY_TRAINABLE_AT] = self.layers.newcomers_at
        if self._system.auto_workers:
            common |= zip(CHOSEN, (self.workers, self.training.world.size), strict=True)
        # Before the first step, every rank has the same entries, because
        # set_optimizer_state_dict(full_state_dict=True) fails for 0-d tensors that a rank lacks.
        fresh = self.training.steps == 0
        found: dict[Tensor, dict[str, Any]] = {}
        for block in self.layers.blocks:
            if block not in self.plan and block.factors is None:
                continue
            entries = found[block.weight] = {**common, **block.agreed_entries()}
            if fresh or (block.factors is not None and self._takes(block)):
                entries |= block.saved_factors()
            for each in (self.traces, self.drift):
                entries |= {} if each is None else each.saved(block)
        return found

    def state_to_save(self) -> dict[Tensor, dict[str, Any]]:
        """What decides the steps between two refreshes: inverses, and the last step.

        The tensors are shared, not copied. This waits for inverses on threads.
        """
        if self._closed:
            return {}
        inverses = self.inverses
        inverses.inverter.finish()
        room = is_checkpointing(part=True)  # torch.distributed.checkpoint reads into what is there
        damping = float(inverses.damping_option)
        found: dict[Tensor, dict[str, Any]] = {}
        for block, layer in self.plan.items():
            for p in block.params:
                if self.step_length is not None:
                    found[p] = self.step_length.saved_step(p, room)
            part = inverse_state(block, layer, inverses, room)
            part[DAMPING] = -1.0 if math.isnan(damping) else damping
            found.setdefault(block.weight, {}).update(part)
        return found

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if a checkpoint does not fit the layers."""
        check_saved(saved, self.layers.blocks, self.inverses)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over a checkpoint; missing inverses are computed at the next step."""
        load_factors(saved, self.layers.blocks, self.training)
        self.inverses.restart(self._step)
        workers = read_num_gradient_workers(saved, self.training.world.size)
        if self.workers and workers not in (0, self.workers):
            self._take_workers(workers)
        if self.drift is not None:
            self.drift.load(saved, self.layers.blocks)
        for part in self._parts:
            part.load(saved)
        self.mean_curvature = read_shared_number(saved, MEAN_CURVATURE, 0.0)
        self._cadence.note_update(int(read_shared_number(saved, UPDATED_AT, self.training.steps)))
        self.layers.take_all_at(int(read_shared_number(saved, NEWLY_TRAINABLE_AT, -1)))
        self._loaded = saved
        self._take_over(saved)
        self.watch()

    def _take_over(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Install the inverses of a checkpoint, and begin again what was being computed.

        Requires that the factors are loaded, and that the plan matches the layers that train.
        Scripts may freeze layers after loading: then the first step does this again.
        """
        inverses = self.inverses
        loaded = load_inverses(saved, self.plan, inverses)
        inverses.requested.intersection_update(loaded.wanted)
        damping = read_shared_number(saved, DAMPING, -1.0)
        inverses.load(loaded.inverses, damping if damping >= 0 else math.nan)
        for block, layer in self.plan.items():
            part: Mapping[str, Any] = saved.get(block.weight, {})
            block.load_history(part, layer.contributors(self.training.world.size))
        if self.traces is not None:
            self.traces.load(saved, self.layers.blocks)
        inverses.resubmit(loaded.snapshots)
        self._missing = loaded.missing
        if self.training.world.size == 1:
            inverses.drop(self._missing)

    def _agree_on_loaded(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Refresh layers if any rank lacks their part of the checkpoint; a collective.

        If other layers train now than when the checkpoint was written, refresh all layers. A run
        that freezes or unfreezes layers at this step does the same. A layer that lacks a factor
        starts again.
        """
        training, world, blocks = self.training, self.training.world, self.layers.blocks
        missing = set(self.plan) if trainable_layers_changed(saved, self.plan) else self._missing
        found: list[float] = []
        for block in blocks:
            found.append(float(block in missing))
            found.append(float(block.has_lost_factor))
        flags = torch.tensor(found, dtype=torch.float32, device="cpu")
        world.on_cpu().all_reduce_max([flags]).wait()
        listed = flags.tolist()
        missing = {block for i, block in enumerate(blocks) if listed[2 * i]}
        lost = [block for i, block in enumerate(blocks) if listed[2 * i + 1]]
        self.inverses.drop([*missing, *lost])
        self._missing = set()
        for block in lost:
            training.warn(
                f"a factor of layer {block.name!r} is lost: the process that should keep it has "
                f"not got it, from a checkpoint written without consolidate(), perhaps; the base "
                f"optimizer trains the layer alone until its statistics have been taken again"
            )
            block.restart_averages()
        if lost:
            self.layers.take_all_at(training.steps + 1)
            training.publish()  # without the lost factors
        if missing and self.drift is not None:
            self.drift.follow(self.layers.blocks)  # layers without an inverse have other intervals

    @property
    def factors_elsewhere(self) -> bool:
        """Whether some factors are stored by other ranks alone.

        Before the first step there are none: Accelerate asks for the state of each new optimizer.
        """
        spread = not all(layer.keeps_all for layer in self.known.values())
        return self.training.world.size > 1 and self.training.steps > 0 and spread

    @property
    def remote_state(self) -> str:
        """A name for what other ranks alone store, factors or inverses; "" if there is nothing."""
        if self.factors_elsewhere:
            return "the factors that other processes keep"
        size = self.training.world.size
        spread = any(b.solved and len(layer.workers) < size for b, layer in self.plan.items())
        return "the inverses that other processes keep" if spread else ""

    @property
    def resumes_without_remote_state(self) -> bool:
        """Whether other ranks store inverses alone, which the next step can refresh."""
        return not self.factors_elsewhere

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Collect copies of what other ranks store, factors and inverses; a collective."""
        if not self._closed and self.layers.follow():
            self._compile()
        state, more = self.state(), self.state_to_save()
        found: dict[Tensor, dict[str, dict[str, Any]]] = {}
        for block, layer in self.known.items():
            entries = factor_entries(block, layer)
            if block in self.plan:
                entries += inverse_entries(block, layer, self.inverses)
            here = {**state.get(block.weight, {}), **more.get(block.weight, {})}
            received = send_entries(self.training.world, block, entries, here, ranks)
            found[block.weight] = {"curvature": received}
        return found

    def close(self) -> None:
        """End threads and hooks; the optimizer goes on as its base alone."""
        if self.helpers is not None:
            self.helpers.close()
        self.inverses.close()
        self.layers.close()
        if self.drift is not None:
            self.drift.follow(())
        if self.traces is not None:
            self.traces.stopped.clear()
        if self._pipeline is not None:
            self._pipeline.close()
        self._closed = True
        self.plan, self.known = {}, {}
        self._step = StepPlan({}, self._step.row, self._step.column)
        self._buckets = []
        self._owners = None, {}
        self._last = StepInfo()
        self._loaded = None
        self._missing = set()

    def build_curvature(self, dtype: torch.dtype, gather: bool) -> KroneckerCurvature:
        """The factors as an object of their own; a collective if some are kept elsewhere."""
        if self.factors_elsewhere and self.layers.follow():
            self._compile()
        return build_curvature(
            training=self.training,
            options=self._options,
            layers=self.layers,
            plan=self.known,
            damping=float(self.inverses.damping_option),
            dtype=dtype,
            gather=gather,
        )

    def metrics(self) -> dict[str, float]:
        """Numbers to log: clip, damping, step scale, ages, intervals, drift and failures."""
        last, nu = self.training.steps - 1, self._last.clip
        found = metrics_of(self.layers, self.plan, self.inverses, last)
        found["clip"] = 1.0 if nu is None else float(nu)
        found["step_length"] = self._step_scale
        if last >= 0 and not self._closed:
            found["age/statistics"] = float(max(last - self._cadence.updated_at, 0))  # 0: loaded
            found |= {} if self.drift is None else self.drift.metrics
        return found

    def summary(self) -> Summary:
        """A table of every layer: its factors, who computes what, what is left to the base."""
        said = {block.name: str(layer) for block, layer in self.plan.items()}
        of_layers = (each.said for each in (self.traces, self.drift) if each is not None)
        settings = [
            self._options.describe(),
            describe_group_options(self.training.groups),
            *of_layers,
        ]
        if self.workers:
            ranks = self.training.world.size
            settings.append(f"gradient workers chosen: {self.workers} of {ranks} for each layer")
        table = self.layers.summary(said)
        lines = [
            f"statistics dropped: {table.dropped}; layers failing to decompose: {table.failed}",
            "; ".join(filter(None, settings)),
        ]
        if self.throttle is not None:
            lines.append(self.throttle.summary_line)
        if not self.inverses.is_synchronous:
            lines.append(self._ages())
        return replace(table, lines=lines)

    def _ages(self) -> str:
        """A line on the ages of inverses that are computed while training continues."""
        ages = sorted(self.training.steps - each.step for each in self.inverses.states.values())
        if not ages:
            return "no inverses yet"
        return (
            f"inverses are {ages[0]} to {ages[-1]} steps old; "
            f"{len(self.inverses.pending)} under way"
        )

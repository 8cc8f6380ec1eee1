"""The K-FAC step of KAISA, DPKFAC and DistKFAC.

    assign         layers to ranks, if layers were frozen, unfrozen or added
    statistics     A and G of this step's batches, summed over the ranks that contribute
    averages       A, G <- running averages
    inverses       damped inverses of A ⊗ G, for each layer that is due
    precondition   P = c (A ⊗ G + γ)⁻¹ ∇, on the layer's gradient workers
    clip           a factor ν <= 1 bounds the change of the model's predictions
    p.grad         <- ν P, on all ranks
    feedback       after a refresh, intervals, the step scale τ and the floor of γ adapt

∇ is the mean gradient and γ the damping. By default (``grafting="gradient"``), c is the
mean eigenvalue of A ⊗ G + γ; with ``grafting="none"`` it is 1. Inverses are stored
multiplied by c. By default, a layer's refresh interval follows the drift of its inverse
(:mod:`second_order.kfac.schedule`), and statistics of all layers are due whenever a
layer is. A number for ``inv_update_steps`` or ``factor_update_steps`` overrides
this. :mod:`second_order.kfac.precondition` describes ν.

At each step, the optimizer calls :meth:`KFAC.prepare`, which assigns layers, and
:meth:`KFAC.precondition`, which does the rest. :meth:`KFAC.step_base` then runs the
base optimizer, which uses ``p.grad`` as its gradient, and applies the step scale τ.
:meth:`KFAC.finish_step` follows. Then ``training.steps`` is incremented, and
:meth:`KFAC.watch` decides whether to capture the next passes.

If KAISA averages the gradients, a step with a refresh sends these messages, in order:

    content                         collective            sent by
    values equal on all ranks       all-reduce, maximum   ``consistency.py``
    gradients                       all-reduce, sum       ``start_average``
    sums of A and G                 all-reduce, sum       ``_sum_statistics``
    outcomes of the inversions      all-reduce, maximum   ``Inverses.refresh``
    inverses, to gradient workers   all-to-all            ``Inverses.refresh``
    change of all layers, for ν     all-reduce, sum       ``Clip``
    ν P, to the other ranks         all-to-all            ``precondition_gradients``
    slope, curvatures, cosines      all-reduce, sum       ``share_feedback``

The step waits for the mean gradients before it computes P. With
``grad_worker_fraction=1``, every rank preconditions every layer, so the change and ν P
are not sent. A step without a refresh sends only four of these messages: the first two,
the change, and ν P. If ``factor_update_steps`` is a number, sums of A and G are also
sent between refreshes. With stats workers, DistKFAC also all-reduces their state at
each step.

See :mod:`second_order.kfac.checkpoints` for how a run is saved and resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.roles import sharding_error
from second_order.distributed.world import World
from second_order.kfac.checkpoints import Checkpoints, Resumption
from second_order.kfac.coverage import summarize_layers, warn_of_uncovered
from second_order.kfac.feedback import Report, report_refresh, share_feedback
from second_order.kfac.inversion import Inverses, Refresh, SelectionRule
from second_order.kfac.layers import (
    Layers,
    describe_group_options,
    gradient_statistics,
)
from second_order.kfac.metrics import build_curvature, layer_metrics
from second_order.kfac.plan import (
    LayerPlan,
    Plan,
    StepPlan,
    System,
    compile_step,
    contributes,
    layer_dims,
    sum_statistics,
    with_one_worker,
)
from second_order.kfac.precondition import (
    Clip,
    assign_param_owners,
    precondition_gradients,
)
from second_order.kfac.schedule import Schedule
from second_order.kfac.sharded_gradients import Bucket, make_buckets, precondition_rows
from second_order.kfac.spd_kfac import Pipeline, Sums
from second_order.kfac.state import SharedNumbers, move_factors
from second_order.kfac.step_scale import ADAPTIVE_BOUNDS, PLAIN_BOUNDS, StepScale
from second_order.kfac.thor import TraceRefresh
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.gradient import GradientBlock
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.kronecker.storage import DeviceRead
from second_order.optimizers.config import SCHEDULES, KFACOptions
from second_order.planning.cost import cheapest_workers
from second_order.planning.machine import calibrate
from second_order.reporting.summary import Summary
from second_order.training.context import Training
from second_order.training.curvature import (
    NO_AVERAGE,
    Curvature,
    PendingAverage,
    Routed,
)
from second_order.utils.checks import AUTO, Scalar, scheduled, value_at
from second_order.utils.stages import stage

__all__ = ["KFAC", "LayeredCurvature"]

# Operations to invert an n × n factor, divided by n³.
INVERSION_COST = {"inverse": 4.0, "eigen": 15.0}

# During the first steps, statistics are sent in their own dtype. The running average
# then covers few steps, so the rounding error of one step may exceed a small damping.
FULL_PRECISION_STEPS = 20

# The refresh interval that the cost model assumes if drift sets the intervals.
ASSUMED_INTERVAL = 10


class StatsWorkersInterface(Protocol):
    """The stats workers, as a gradient worker sees them.

    Stats workers are helper ranks, which only compute statistics and do not train.
    ``second_order.kfac.stats_workers.StatsWorkers`` implements this interface. That
    module imports this one, so this one cannot import it.
    """

    @property
    def own_passes(self) -> bool:
        """Whether statistics come from this rank's own training passes."""

    def begin(self, training: Training, /) -> None:
        """Assign the roles. Collective."""

    def send_snapshots(self, training: Training, send: Callable[..., None], /) -> None:
        """Send the parameters to the stats workers that wait for them."""

    def receive_statistics(
        self, layers: Mapping[str, KroneckerBlock], training: Training, /
    ) -> Iterable[Sums]:
        """Return the sums in each message that has arrived since the last step."""

    def update_verification(self, blocks: Iterable[KroneckerBlock], /) -> None:
        """Update which layers are unverified, after the messages of a step."""

    def restart(self) -> None:
        """Use this rank's own passes until statistics of later snapshots arrive."""

    def agree(self, training: Training, /) -> None:
        """Agree with the other workers on :attr:`own_passes` and lost links.

        Collective.
        """

    def close(self) -> None:
        """Shut down the links."""


class LayeredCurvature(Curvature):
    """Base class of the curvatures that have K-FAC layers.

    They are :class:`KFAC` on ranks that train, and ``StatsWorker`` on stats workers.
    """

    scaler_reason = (
        "the gradients that it has captured are multiplied by the loss scale"
    )
    saves_by_rank = True
    layers: Layers
    _system: System

    def description(self) -> list[str]:
        """Describe the options and the layers, which must be equal on all ranks."""
        return self.layers.description(self._system.description)

    def drop_pending(self) -> None:
        """Drop the statistics of all backward passes since the last step."""
        self.layers.drop_pending()

    def hooks_removed(self) -> AbstractContextManager[None]:
        """Return a context manager that removes all hooks and restores them on exit."""
        return self.layers.hooks_removed()


def choose_num_workers(
    training: Training, options: KFACOptions, blocks: Sequence[KroneckerBlock]
) -> int:
    """Return the number of gradient workers per layer that makes steps fastest.

    Collective. The cost model predicts the time per step from measurements of this
    machine and network.
    """
    world = training.world
    shapes = [block.shape for block in blocks if block.trainable]
    if world.size == 1 or not shapes:
        return 1
    machine, network = calibrate(training.device, world.group)
    interval = options.refresh_interval
    if interval is None:
        interval = ASSUMED_INTERVAL
    workers = cheapest_workers(
        shapes,
        world.size,
        machine,
        network,
        solver=options.solver,
        inv_update_steps=max(int(value_at(interval, 0)), 1),
    )
    # All ranks use rank 0's number, because hosts may round differently.
    return int(world.all_gather_object(workers)[0])


def _largest_number_of_terms(
    sums: Iterable[StatisticsSums], device: torch.device
) -> Tensor | None:
    """Return the number of loss terms of the step, or None without statistics.

    This is the largest number of loss terms that reached any layer. The factors of
    gradient-factored layers depend on it.
    """
    # The first element of a head is the number of terms.
    numbers = [layer_sums.head[0].to(device) for layer_sums in sums]
    if not numbers:
        return None
    return torch.stack(numbers).max()


class KFAC(LayeredCurvature):
    """The K-FAC curvature of a model: its layers, their factors and their inverses.

    Args:
        training: The model, the parameter groups and the ranks.
        options: The options of all K-FAC optimizers.
        system: The settings that distinguish KAISA, DPKFAC and DistKFAC.
        stats_workers: The helper ranks that only compute statistics, if there are any.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        system: System,
        stats_workers: StatsWorkersInterface | None = None,
    ) -> None:
        super().__init__(training)
        self._options = options
        self._system = system
        self.stats_workers = stats_workers
        self._dtype = options.inv_dtype

        # Layers, and the ranks that work on them.
        self.layers = Layers(training, options, system.rules, system.conv_approximation)
        self.plan: Mapping[KroneckerBlock, LayerPlan] = {}  # layers that train now
        # The last plans of all layers that ever trained. They say which ranks store the
        # factors of layers that are frozen now.
        self.all_plans: dict[KroneckerBlock, LayerPlan] = {}
        self._step_plan = StepPlan({}, World.alone(), World.alone())
        self._buckets: list[Bucket] = []  # for FSDP2-sharded gradients
        # The rank that owns each gradient: only that rank receives its mean. None if
        # all ranks receive it.
        self._gradient_owners: dict[Tensor, int] | None = None
        # Gradient workers per layer that the cost model chose; 0 if it is not used.
        self.num_workers = 0

        # Schedules and inverses.
        self._schedule = Schedule(training, options, self.layers)
        # Bounds the time spent on refreshes (overhead=).
        self.throttle = self._schedule.throttle
        # Sets the intervals if inv_update_steps is "auto".
        self.drift = self._schedule.drift
        # THOR's rule, which chooses the due layers to refresh.
        self.traces: TraceRefresh | None = None
        rule: SelectionRule | None = None
        trace_rule = options.trace_rule
        if trace_rule is not None:
            self.traces = TraceRefresh(trace_rule.upper, trace_rule.lower)
            rule = self.traces.choose
        self.inverses = Inverses(
            training,
            options,
            self.layers,
            drift=self.drift,
            rule=rule,
            make_inverter=system.inverter,
        )
        self._averaged_at = 0  # the step of the last update of the running averages
        # The mean curvature of all layers at the last refresh, for the floor of γ.
        self.mean_curvature = 0.0

        # Exchange, clip and step scale.
        self._pipeline: Pipeline | None = None
        if system.pipelined and training.world.size > 1:
            self._pipeline = Pipeline(training, self.layers, options.factor_dtype)
        self.clip: Clip | None = None
        if options.kl_clip is not None:
            self.clip = Clip(training, options)
        self.step_scale: StepScale | None = None
        if options.follows_steps:
            bounds = ADAPTIVE_BOUNDS if options.adaptive else PLAIN_BOUNDS
            self.step_scale = StepScale(bounds)
        adapts = self.drift is not None or self.step_scale is not None
        self._uses_reports = adapts or options.floor != 0
        # The layers that were due for a refresh at the last step, and the KL clip ν of
        # that step. ν is None if nothing was clipped.
        self._due: Sequence[KroneckerBlock] = ()
        self._clip_factor: Scalar | None = None
        self._closed = False

        # A checkpoint that has been loaded since the last step, and the object that
        # saves and loads the state above.
        self._resumption: Resumption | None = None
        self._checkpoints = Checkpoints(
            training=training,
            layers=self.layers,
            inverses=self.inverses,
            schedule=self._schedule,
            traces=self.traces,
            step_scale=self.step_scale,
            clip=self.clip,
        )

        self.layers.find()

    # --------------------------------------------------------- construction and changes

    def begin(self) -> None:
        """Assign roles and layers to the ranks, and add hooks to the model. Collective.

        Raises:
            ValueError: If the processes or devices do not support the options.
        """
        # This raises for an unsupported world size.
        self._system.plan([], self.training.world.size)
        if self.stats_workers is not None:
            self.stats_workers.begin(self.training)
        # If gradients are sharded, each layer has one worker, which collects them.
        # There is then nothing to choose.
        if self._system.auto_workers and not self.layers.sharded:
            workers = choose_num_workers(
                self.training, self._options, self.layers.blocks
            )
            self._set_num_workers(workers)
        self._start_capture()

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Adopt the sharded parameters that FSDP2 has created in place of the old ones.

        Raises:
            ValueError: If there are stats workers.
        """
        if self._closed:
            return
        if self.stats_workers is not None:
            raise ValueError(sharding_error(self.training.name, "stats"))
        self.layers.replace_params(others)
        # Gradient-factored layers compute their factors from whole weight gradients,
        # which no rank has now.
        has_any = any(isinstance(block, GradientBlock) for block in self.layers.blocks)
        if self._options.unsupported_layers == AUTO and has_any:
            self.replan()

    def replan(self) -> None:
        """Search the model for layers again, and assign them. Collective."""
        if not self._closed:
            self.layers.find()
            self._start_capture()

    def _start_capture(self) -> None:
        """Assign the layers to ranks, and start to capture their statistics.

        Collective.
        """
        self.layers.mark_changed()
        if self._pipeline is None:
            self.layers.start_capture()
        else:
            self.layers.start_capture(on_new_statistics=self._pipeline.send_complete)
        if self.layers.update_active():
            self._assign_layers()
        warn_of_uncovered(self.training, self._options, self.layers)
        self.watch()

    def _set_num_workers(self, workers: int) -> None:
        """Set the number of gradient workers per layer from the next assignment on."""
        self.num_workers = workers
        fraction = workers / self.training.world.size
        plan = partial(self._system.plan, fraction=fraction)
        self._system = replace(self._system, plan=plan)
        self.layers.mark_changed()

    # ------------------------------------------------------------------------- the step

    def prepare(self) -> None:
        """Reassign layers to ranks if the layers that train have changed. Collective.

        At the first step, the ranks also agree on the reduction of the losses. Call
        this before gradients are averaged, so that new owners receive the averaged
        gradients.
        """
        if self.training.world.size > 1:
            has_passes = bool(self.layers.collector.step_passes.passes)
            self.layers.losses.agree(self.training.world, has_passes)
        if self.throttle is not None:
            self.throttle.begin_step()
        if self.layers.update_active():
            self._assign_layers()
        if self._resumption is not None:
            self._checkpoints.agree(self._resumption, self.plan)
            self._resumption = None
        averages_here = self.training.averages_gradients and not self.layers.sharded
        if self._system.means_to_owners and averages_here:
            self._update_gradient_owners()

    def precondition(self, pending: PendingAverage) -> None:
        """Replace each layer's ``p.grad`` by ν P. Collective.

        This does all work from the statistics to ``p.grad``, in the order of the module
        docstring. After a refresh, it also adapts the refresh intervals, the step scale
        and the floor of γ.

        Args:
            pending: The average of the gradients, which may still be in progress.
        """
        step = self.training.steps
        inverses = self.inverses
        due = self._schedule.layers_due(step)

        # Update A and G from this step's batches, and from stats workers' statistics.
        statistics_due = self._schedule.statistics_due(step, due)
        may_have_messages = self.stats_workers is not None or self._pipeline is not None
        if statistics_due or may_have_messages:
            with stage("statistics"):
                self._update_factors(statistics_due, pending)

        # Recompute the inverses that are due, each on its inverse rank.
        refresh = Refresh()
        report: Report | None = None
        if due or inverses.requested or inverses.pending:
            with stage("solve"):
                # Collects tensors, and copies all to the host when one is needed.
                read = DeviceRead()
                if inverses.measures_early:
                    # There is one process, so its gradients are the mean. Report before
                    # the refresh, so that one device read serves both.
                    report = self._report_refresh(read)
                refresh = inverses.refresh(due, pending, self.mean_curvature, read)
                if self.drift is not None:
                    self.drift.count_without_inverse(due)

        # Wait for the mean gradients.
        if pending is not NO_AVERAGE:
            with stage("average_gradients"):
                pending.wait()
        if self.stats_workers is not None:
            self.stats_workers.agree(self.training)

        # Measure the loss's slope along the last step. This needs the plain mean
        # gradients, which are now complete.
        if refresh.installed and report is None:
            report = self._report_refresh(DeviceRead())

        # Precondition on the gradient workers, clip, exchange ν P, and write p.grad. If
        # FSDP2 shards gradients, each rank has some of the rows.
        with stage("precondition"):
            if self.layers.sharded:
                result = precondition_rows(
                    buckets=self._buckets,
                    step=self._step_plan,
                    training=self.training,
                    clip=self.clip,
                    dtype=self._dtype,
                    previous=refresh.previous,
                )
            else:
                result = precondition_gradients(
                    step_plan=self._step_plan,
                    clip=self.clip,
                    dtype=self._dtype,
                    previous=refresh.previous,
                    owners=self._gradient_owners,
                )

        # After a refresh, adapt the intervals, the step scale and the floor of γ.
        if refresh.installed and report is not None:
            self._adapt(report, refresh.cosines, result.cosines)

        self._due = due
        self._clip_factor = result.clip_factor

    def step_base(self, step: Callable[[], None]) -> None:
        """Run ``step``, the base optimizer's step, and scale it by τ."""
        step_scale = self.step_scale
        if step_scale is None:
            step()
            return
        # Keep this step if the next step may refresh, because the refresh measures the
        # slope along it. A change of layers or a loaded checkpoint may cause a refresh
        # that cannot be predicted here. Such a refresh does not measure the slope.
        refresh_may_follow = self._schedule.refresh_may_be_due(self.training.steps + 1)
        keep_step = refresh_may_follow or bool(self.inverses.pending)
        step_scale.take_step(step, self._step_plan.layers, keep_step)

    def finish_step(self) -> None:
        """Send snapshots, time the step, and warn of dropped statistics."""
        if self.stats_workers is not None:
            self.stats_workers.send_snapshots(
                self.training, self.inverses.inverter.post
            )
        if self.throttle is not None:
            # All ranks know which of the due layers have an inverse. If none does, the
            # throttle counts this step as one without a refresh.
            refreshed = any(block.solved for block in self._due)
            self.throttle.end_step(refreshed=refreshed)
        if self._due:
            self.layers.warn_of_dropped_statistics()

    def watch(self) -> None:
        """Turn capture on if statistics may be due at the next step, and off if not."""
        # ``steps`` has already been incremented, so it is the next step.
        due = self._schedule.statistics_may_be_due(self.training.steps)
        if self.stats_workers is not None and not self.stats_workers.own_passes:
            due = False
        if due or self.layers.capture.gate.open:
            self.layers.begin_passes(capture=due)
        if due and self._pipeline is not None:
            self._pipeline.expect(self._statistics_dtype)

    # ---------------------------------------------------------- statistics and averages

    def _update_factors(self, due: bool, pending: PendingAverage) -> None:
        """Update A and G from this step's passes if ``due``, and from stats workers."""
        stats_workers = self.stats_workers
        gradient_factored = self._step_plan.gradient_factored
        step = self.training.steps
        # Passes and gradients update different layers, each once per step. Both use the
        # same age, so compute it before the first update makes it 0.
        age = step - self._averaged_at

        # This step's passes. If there are stats workers, also check that the passes
        # were captured: the gate is open only if statistics were due when they ran.
        from_passes = due
        if stats_workers is not None:
            is_captured = stats_workers.own_passes and self.layers.capture.gate.open
            from_passes = due and is_captured
        num_terms: Tensor | None = None
        if from_passes:
            decay = self._schedule.factor_decay(age)
            sums = self._sum_statistics()
            if gradient_factored and stats_workers is None:
                num_terms = _largest_number_of_terms(
                    sums.values(), self.training.device
                )
            self._update_averages(sums, decay)
        elif self._pipeline is not None:
            self._pipeline.drain()

        # Messages of stats workers. Each has statistics of different batches.
        if stats_workers is not None:
            measured = {block.name: block for block in self._step_plan.measured}
            for sums in stats_workers.receive_statistics(measured, self.training):
                # An age of 0, after another update at this step, counts as 1.
                decay = self._schedule.factor_decay(step - self._averaged_at)
                self._update_averages(sums, decay)
            stats_workers.update_verification(self._step_plan.layers)

        # Gradient-factored layers, whose factors come from the mean weight gradient.
        if due and gradient_factored:
            self._update_from_gradients(pending, age, num_terms)

    def _sum_statistics(self) -> Sums:
        """Return the statistics of this step's passes, summed over the ranks.

        Collective.
        """
        layers = self.layers
        step_plan = self._step_plan
        world = self.training.world
        layers.verify_pairs(step_plan.contributing)
        for block in step_plan.layers:
            block.ensure_factors(statistics_due=True)

        exchange = partial(sum_statistics, world, step_plan.layers)
        if self._pipeline is not None:
            self._pipeline.expect(self._statistics_dtype)
            sums = self._pipeline.pop_sums(exchange)
        else:
            sums = layers.pop_sums(step_plan.contributing)
            if world.size > 1:
                with stage("statistics_exchange"):
                    exchange(sums, self._statistics_dtype)

        if layers.losses.current() != "step_mean":
            return sums
        # The sums of KAISA and DistKFAC contain the loss terms of all ranks; those of
        # DPKFAC, only the owner's. We assume that all ranks have equally many terms.
        num_counted = 1 if self._system.from_owner else world.size
        return layers.undo_step_mean(sums, share=1.0 / num_counted)

    def _update_averages(self, sums: Sums, decay: float) -> None:
        """Update the running averages.

        Checkpoints need the factors of pending inverses, so copy these factors first.
        """
        if self.inverses.pending:
            self.inverses.snapshot_factors(sums)
        self.layers.update_averages(sums, decay)
        self._averaged_at = self.training.steps

    def _update_from_gradients(
        self, pending: PendingAverage, age: int, num_terms: Tensor | None
    ) -> None:
        """Update the factors of gradient-factored layers.

        Args:
            pending: The average of the gradients. This method waits for it.
            age: Steps since the last update before this step.
            num_terms: The number of loss terms of the step; None if unknown.
        """
        with stage("average_gradients"):
            pending.wait()
        gradient_factored = self._step_plan.gradient_factored
        sums = gradient_statistics(
            self.training,
            num_terms,
            [block for block in gradient_factored if self._contributes(block)],
            counts_own=self._system.from_owner,
            mean_loss=self._options.loss_reduction != "sum",
        )
        for block in gradient_factored:
            block.ensure_factors(statistics_due=True)
        self._update_averages(sums, self._schedule.factor_decay(age))

    @property
    def _statistics_dtype(self) -> torch.dtype | None:
        """The communication dtype of this step's statistics; None for their own."""
        if self.training.steps < FULL_PRECISION_STEPS:
            return None
        return self._system.exchange_dtype

    # ----------------------------------------------------- preconditioning and feedback

    def _report_refresh(self, read: DeviceRead) -> Report | None:
        """Return this rank's report on a refresh; None if no option uses reports.

        If the step scale is on, measure the slope of the last step, then drop the step.
        """
        if not self._uses_reports:
            return None
        slopes: list[Tensor] = []
        if self.step_scale is not None:
            slopes = self.step_scale.measure_slope(
                self._step_plan, self.training.groups
            )
        return report_refresh(self.training, self._step_plan, slopes, read)

    def _adapt(
        self,
        report: Report,
        host_cosines: Mapping[KroneckerBlock, float],
        device_cosines: Mapping[KroneckerBlock, Tensor],
    ) -> None:
        """Adapt the floor of γ, the step scale and the refresh intervals. Collective.

        The new values are equal on all ranks.

        Args:
            report: The numbers that this rank measured.
            host_cosines: By layer, the cosine between P of the old and P of the new
                inverse, if it is already on the host.
            device_cosines: The cosines of the other layers, which are on the device.
        """
        step_plan = self._step_plan
        with stage("solve_exchange"):
            feedback = share_feedback(
                self.training, step_plan, report, host_cosines, device_cosines
            )
        if self.step_scale is not None:
            self.step_scale.update(
                feedback.slope, feedback.learning_rate, self.training.steps
            )
        if feedback.mean_curvature is not None:
            # The floor of γ at the next refresh.
            self.mean_curvature = feedback.mean_curvature
        if self.drift is not None:
            # The work counts the passes of one rank. All ranks run equally many.
            work = feedback.work * self.training.world.size
            self.drift.record(step_plan.costs, feedback.cosines, work)

    @property
    def _step_scale(self) -> float:
        """The step scale τ; 1 if it is off, or after close()."""
        if self.step_scale is None or self._closed:
            return 1.0
        return self.step_scale.state.scale

    # ----------------------------------------------------------------------- assignment

    def _update_gradient_owners(self) -> None:
        """If parameters have changed, choose the owner of each gradient.

        The gradient worker of a layer owns its gradients. Gradients of parameters
        outside of layers are spread over the ranks.
        """
        params = self.training.averaged_params()
        owners = self._gradient_owners
        if owners is None or [id(p) for p in owners] != [id(p) for p in params]:
            self._gradient_owners = assign_param_owners(
                self.plan, params, self.training.world.size
            )

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Return the gradients and each mean's receiver; None if all ranks get it."""
        owners = self._gradient_owners
        if owners is None:
            return None
        return gradients, [owners[p] for p in params]

    def _contributes(self, block: KroneckerBlock) -> bool:
        """Return whether this rank's batches contribute to a layer's factors."""
        return contributes(self.all_plans.get(block), self.training.world.rank)

    def _assign_layers(self) -> None:
        """Assign the layers that train now to ranks, and move their factors.

        Collective.
        """
        layers = self.layers
        steps = self.training.steps
        world = self.training.world

        # Assign the layers to ranks.
        dims = [layer_dims(block) for block in layers.active]
        plan: Plan = self._system.plan(dims, world.size)
        if layers.sharded:
            plan = with_one_worker(plan)
        prev_plans = self.all_plans
        self.plan = dict(zip(layers.active, plan.layers, strict=True))
        merged = {**prev_plans, **self.plan}
        self.all_plans = {
            block: merged[block] for block in layers.blocks if block in merged
        }

        # At this step, all layers lose their inverses below, and are refreshed. A layer
        # that is newly trainable, or whose statistics now come from another rank's
        # batches, was not captured in the last passes, so its statistics come one step
        # later. All layers are then due again. A checkpoint of the same layers stores
        # the step at which all layers are due.
        is_new = steps > 0 and any(block.factors is None for block in layers.active)
        is_moved = False
        for block, layer in self.plan.items():
            prev = prev_plans.get(block)
            if prev is not None and prev.batch_rank != layer.batch_rank:
                is_moved = True
        resumption = self._resumption
        resumes = resumption is not None and resumption.has_same_layers(self.plan)
        if (is_new or is_moved) and not resumes:
            layers.schedule_all_at(steps + 1)

        # Compile this rank's work per step.
        self._step_plan = compile_step(
            world=world,
            grid=plan.grid,
            layers=self.plan,
            exchange_dtype=self._system.exchange_dtype,
            inversion_cost=INVERSION_COST[self._options.solver],
            has_stats_workers=self.stats_workers is not None,
        )
        self._buckets = []
        if layers.sharded:
            self._buckets = make_buckets(self._step_plan, world)
        self._gradient_owners = None
        if self._pipeline is not None:
            self._pipeline.follow(self._step_plan.contributing)

        # Move the factors, and start without inverses.
        move_factors(world, self.plan, prev_plans)
        layers.attach_hooks(self._contributes)
        for block in layers.blocks:
            block.drop_inverse()
        self.inverses.restart(self._step_plan)
        if self.drift is not None:
            self.drift.keep_only(layers.blocks)
        if self.stats_workers is not None:
            self.stats_workers.restart()
        if resumption is not None:
            # load() installed inverses for the old plan, which were dropped above.
            self._resumption = self._checkpoints.install(resumption, self.plan)
        if steps > 0:
            self.training.publish()  # without the factors that other ranks store now

    def fingerprint_values(self) -> list[tuple[str, Any]]:
        """Return the named values that must be equal on all ranks at every step."""
        # Values that do not depend on the options.
        requested = [
            block.name for block in self.plan if block in self.inverses.requested
        ]
        facts: list[tuple[str, Any]] = [
            ("closed", self._closed),
            ("sharded by FSDP2", self.layers.sharded),
            ("layers with a requested refresh", requested),
            ("step at which all layers are due", self.layers.newly_trainable_at),
            *scheduled(self._options, SCHEDULES, self.training.steps),
            ("loss reduction", self.layers.losses.compared),
            ("step scale", self._step_scale),
        ]

        # Values that depend on the options.
        if self.drift is not None:
            intervals = self.drift.intervals(self.layers.active)
            facts.append(("refresh intervals", intervals.by_layer))
        if self.num_workers:
            facts.append(("gradient workers", self.num_workers))
        if self.throttle is not None:
            facts.append(("least refresh interval", self.throttle.interval))
        return facts

    # ---------------------------------------------------------------------- checkpoints

    def _shared_numbers(self) -> SharedNumbers:
        """Return the :class:`SharedNumbers` that checkpoints contain."""
        num_workers: int | None = None
        if self._system.auto_workers:
            num_workers = self.num_workers
        return SharedNumbers(
            mean_curvature=self.mean_curvature,
            averaged_at=self._averaged_at,
            newly_trainable_at=self.layers.newly_trainable_at,
            num_workers=num_workers,
        )

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Return the factors that this rank stores, by weight, and the shared numbers.

        These entries are in ``optimizer.state`` all the time. Tensors are not copied.
        """
        return self._checkpoints.state(
            self.plan, self.all_plans, self._shared_numbers()
        )

    def state_to_save(self) -> dict[Tensor, dict[str, Any]]:
        """Return what only checkpoints have: inverses and the parameters' last step."""
        return self._checkpoints.state_to_save(self.plan)

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if a checkpoint does not fit the layers."""
        self._checkpoints.check(saved)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load a checkpoint.

        The next step computes the inverses that the checkpoint lacks.
        """
        self._resumption = self._checkpoints.load(saved, self._step_plan)
        numbers = self._resumption.numbers
        if self.num_workers and numbers.num_workers not in (None, self.num_workers):
            self._set_num_workers(numbers.num_workers)
        self.mean_curvature = numbers.mean_curvature
        self._averaged_at = numbers.averaged_at
        self.layers.schedule_all_at(numbers.newly_trainable_at)
        if self.stats_workers is not None:
            # Statistics in transit were computed with other parameters.
            self.stats_workers.restart()
        self.watch()

    @property
    def factors_elsewhere(self) -> bool:
        """Whether there are factors that only other ranks store."""
        return self._checkpoints.has_remote_factors(self.all_plans)

    @property
    def remote_state(self) -> str:
        """The state that only other ranks store, as a phrase for messages; or ""."""
        if self.factors_elsewhere:
            return "the factors that other processes store"
        if self._checkpoints.has_remote_inverses(self.plan):
            return "the inverses that other processes store"
        return ""

    @property
    def resumes_without_remote_state(self) -> bool:
        """Whether the next step can recompute all that only other ranks store."""
        return not self.factors_elsewhere

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Send each of ``ranks`` the factors and inverses that it lacks. Collective."""
        if not self._closed and self.layers.update_active():
            self._assign_layers()
        numbers = self._shared_numbers()
        return self._checkpoints.gather(ranks, self.plan, self.all_plans, numbers)

    # ---------------------------------------------------------------------------- close

    def close(self) -> None:
        """Stop threads and remove all hooks.

        All layers then fall back to the base optimizer.
        """
        if self.stats_workers is not None:
            self.stats_workers.close()
        self.inverses.close()
        self.layers.close()
        if self.drift is not None:
            self.drift.keep_only(())
        if self.traces is not None:
            self.traces.stopped.clear()
        if self._pipeline is not None:
            self._pipeline.close()
        self._closed = True

        # Release the layers, which refer to the model.
        self.plan = {}
        self.all_plans = {}
        self._step_plan = StepPlan({}, self._step_plan.row, self._step_plan.column)
        self._buckets = []
        self._gradient_owners = None
        self._due = ()
        self._clip_factor = None
        self._resumption = None

    # ------------------------------------------------------------------------ reporting

    def build_curvature(self, dtype: torch.dtype, gather: bool) -> KroneckerCurvature:
        """Return a copy of the running averages.

        Collective if other ranks store some of them.
        """
        if self.factors_elsewhere and self.layers.update_active():
            self._assign_layers()
        return build_curvature(
            training=self.training,
            options=self._options,
            layers=self.layers,
            plan=self.all_plans,
            damping=float(self.inverses.damping_option),
            dtype=dtype,
            gather=gather,
        )

    def metrics(self) -> dict[str, float]:
        """Return metrics to log, such as the clip, the damping, ages and failures."""
        last_step = self.training.steps - 1
        metrics = layer_metrics(self.layers, self.plan, self.inverses, last_step)
        metrics["clip"] = 1.0
        if self._clip_factor is not None:
            metrics["clip"] = float(self._clip_factor)
        metrics["step_scale"] = self._step_scale
        if last_step >= 0 and not self._closed:
            # A loaded checkpoint may have averages that are newer than its last step.
            age = max(last_step - self._averaged_at, 0)
            metrics["age/statistics"] = float(age)
            if self.drift is not None:
                metrics |= self.drift.metrics
        return metrics

    def summary(self) -> Summary:
        """Return a table of layers, their factors, and the ranks that work on them."""
        assignment = {block.name: str(layer) for block, layer in self.plan.items()}
        table = summarize_layers(self.training, self._options, self.layers, assignment)
        lines = [
            f"non-finite statistics dropped: {table.dropped}; "
            f"layers whose last refresh failed: {table.failed}"
        ]

        # The settings on one line.
        settings = [
            self._options.describe(),
            describe_group_options(self.training.groups),
        ]
        if self.traces is not None:
            settings.append(self.traces.summary_line)
        if self.drift is not None:
            settings.append(self.drift.summary_line)
        # Sharded layers have one worker.
        if self.num_workers and not self.layers.sharded:
            ranks = self.training.world.size
            settings.append(
                f"gradient workers chosen: {self.num_workers} of {ranks} for each layer"
            )
        lines.append("; ".join(setting for setting in settings if setting))

        # Limits, and ages of the inverses.
        if self.throttle is not None:
            lines.append(self.throttle.summary_line)
        if not self.inverses.is_synchronous:
            lines.append(self._describe_ages())
        return replace(table, lines=lines)

    def _describe_ages(self) -> str:
        """Return a line with the ages of the inverses that threads compute."""
        steps = self.training.steps
        ages = sorted(steps - inverse.step for inverse in self.inverses.states.values())
        if not ages:
            return "no inverses yet"
        num_pending = len(self.inverses.pending)
        return f"inverses are {ages[0]} to {ages[-1]} steps old; {num_pending} pending"

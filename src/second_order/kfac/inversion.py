"""The damped inverses of the layers' factors, and the refresh that recomputes them.

damp       gradient workers compute γ of each due layer, and what it adds to the
           diagonal of each factor
submit     each inverse rank submits its damped factors to its inverter
collect    each inverse rank collects the decompositions that its inverter has finished
agree      all ranks all-reduce (max) the outcome of each layer
exchange   inverse ranks send the decompositions of valid layers to the gradient workers
install    gradient workers combine them into inverses, which they use from this step on

The inverse ranks of a layer decompose its factors. Its gradient workers, which are one
row of the grid of ranks (:class:`second_order.distributed.assignment.Grid`),
precondition its gradient. P = (A ⊗ G + γ)⁻¹ ∇ is the preconditioned gradient.

If a layer's factors cannot be decomposed, the layer keeps its last inverse. If it has
none, it falls back to the base optimizer. If this happens to a layer at three refreshes
in a row, every rank raises an error. If a layer has no statistics, or unverified ones,
it loses its inverse and falls back to the base optimizer.

A layer has an inverse in use, a pending inverse, both or neither:

    pending            the submitted inverse, until all ranks know its outcome
    block.inverse      the inverse in use, on the layer's gradient workers
    block.solved       whether those workers have one; equal on all ranks
    states             when it was computed; all ranks have an entry per solved layer

See :mod:`second_order.kfac.inverter` for the inverters, and
:mod:`second_order.kfac.async_inversion` for the one with threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from second_order.distributed.world import Route, Shapes, send_tensors
from second_order.errors import DecompositionError
from second_order.kfac.inverter import (
    Inverter,
    Job,
    Result,
    SynchronousInverter,
    describe_error,
)
from second_order.kfac.layers import Layers, values_by_layer
from second_order.kfac.plan import FactorKey, StepPlan
from second_order.kfac.precondition import compare_inverses, precondition_batches
from second_order.kfac.schedule import Drift
from second_order.kronecker.block import (
    KroneckerBlock,
    LayerBatch,
    LayerStatus,
    per_group,
)
from second_order.kronecker.factors import KroneckerFactors, layer_mean_curvature
from second_order.kronecker.solvers import (
    SOLVERS,
    Damping,
    Decomposition,
    Inverse,
    Problem,
)
from second_order.kronecker.storage import DeviceRead, join_groups, merge_numbers
from second_order.optimizers.config import KFACOptions, check_damping
from second_order.training.context import Training
from second_order.training.curvature import PendingAverage
from second_order.training.groups import as_scalar
from second_order.utils.stages import stage

__all__ = [
    "InverseState",
    "Inverses",
    "LoadedInverse",
    "LoadedInverses",
    "Outcome",
    "PendingInverse",
    "Refresh",
    "SelectionRule",
    "stack_means",
]

MAX_CONSECUTIVE_FAILURES = 3  # failed refreshes of a layer in a row, then an error

DAMPING_ENTRY = "damping"
"""Key of γ and the mean eigenvalue in the exchange, whose other keys name factors."""


class Outcome(IntEnum):
    """The outcome of computing a layer's inverse. Ranks agree on the largest number.

    A rank that decomposes factors of the layer reports the outcome of these factors. A
    rank that decomposes none reports PENDING. Either rank reports UNVERIFIED if it
    found the layer unverified, and FAILED if it could not compute γ. If the reports
    differ, the ranks agree on:

        VALID and PENDING       VALID. The PENDING rank decomposes no factor: without
                                threads, all factors are finished within the step. With
                                threads, one rank decomposes all factors of a layer.
        VALID and FAILED        FAILED, because all factors must be valid.
        UNVERIFIED and any      UNVERIFIED.

    NO_STATISTICS and VALID do not occur together, because all ranks read the same
    weight of the averages.
    """

    PENDING = 0  # not finished yet, or not computed on this rank
    NO_STATISTICS = 1  # no example has reached the layer yet
    VALID = 2  # every factor that this rank had to decompose was decomposed
    FAILED = 3  # a factor could not be decomposed
    UNVERIFIED = 4  # a rank's captured pairs do not reproduce the layer's gradient


class InverseState(NamedTuple):
    """When and with which damping a layer's installed inverse was computed.

    All ranks have the steps. The other numbers are valid only on the layer's gradient
    workers.
    """

    step: int  # the step at which its factors were submitted
    installed_at: int  # the first step that used the inverse
    damping_option: Damping = 0.0  # the value of ``damping=`` at ``step``
    damping: Damping = 0.0  # γ of the layer
    mean_eigenvalue: Damping = 0.0  # of A ⊗ G + γ


@dataclass(frozen=True)
class LoadedInverse:
    """A layer's inverse from a checkpoint.

    Only its gradient workers have ``inverse``.
    """

    state: InverseState
    inverse: Inverse | None = None


@dataclass(frozen=True)
class LoadedInverses:
    """The inverses in a checkpoint, as far as this rank needs them.

    Attributes:
        damping_option: ``damping=`` at the last refresh; NaN before the first.
        inverses: The inverses of layers that had one.
        pending: The inverses that were pending.
        missing: Layers for which the checkpoint lacks an entry that this rank needs.
        requested: Layers to refresh at the next step even if they are not due.
    """

    damping_option: float
    inverses: dict[KroneckerBlock, LoadedInverse] = field(default_factory=dict)
    pending: dict[KroneckerBlock, PendingInverse] = field(default_factory=dict)
    missing: set[KroneckerBlock] = field(default_factory=set)
    requested: set[KroneckerBlock] = field(default_factory=set)


class LayerDamping(NamedTuple):
    """The damping of a layer.

    Attributes:
        damping: γ.
        mean_eigenvalue: The mean eigenvalue of A ⊗ G + γ, a scalar.
        added: What is added to the diagonal of each factor, ``(groups,)``, by factor
            name. Empty if the solver adds γ to the products of eigenvalues instead.
    """

    damping: Damping
    mean_eigenvalue: Tensor
    added: Mapping[str, Tensor]


class PendingInverse(NamedTuple):
    """An inverse that was submitted and is not installed yet."""

    step: int  # the step at which its factors were submitted
    damping_option: Damping  # the value of ``damping=`` at that step
    mean_curvature: float  # of all layers, known at that step
    factors: KroneckerFactors | None = None  # copied if a checkpoint may need them


@dataclass(frozen=True)
class Refresh:
    """The result of a refresh.

    Attributes:
        installed: The layers that have a new inverse; the same on every rank.
        cosines: The cosine between P with the previous inverse and P with the new one,
            for the layers of this rank whose cosine the refresh measured.
        previous: The previous inverses of this rank's other refreshed layers. The
            caller measures their cosines. Empty unless refresh intervals follow drift.
    """

    installed: Sequence[KroneckerBlock] = ()
    cosines: Mapping[KroneckerBlock, float] = field(default_factory=dict)
    previous: Mapping[KroneckerBlock, Inverse] = field(default_factory=dict)


class SelectionRule(Protocol):
    """Selects which of the due layers get a new inverse.

    All ranks select the same layers.
    """

    def __call__(
        self, inverses: Inverses, due: Mapping[KroneckerBlock, PendingInverse]
    ) -> Sequence[KroneckerBlock]:
        """Return the selected layers. Collective.

        Args:
            inverses: The inverses of all layers.
            due: The due layers, with the pending inverse that each gets if selected.
        """


def stack_means(
    factors: Mapping[KroneckerBlock, KroneckerFactors],
) -> list[tuple[list[KroneckerBlock], Tensor]]:
    """Stack the mean eigenvalues of the factors of same-shape layers.

    Returns:
        For each shape, its layers and a tensor ``(factors, layers, groups)``.
    """
    same_shape: dict[object, dict[KroneckerBlock, Tensor]] = {}
    for block, layer_factors in factors.items():
        means = layer_factors.means
        shape = block.shape
        key = (means.shape, means.dtype, means.device, shape.factor_names, shape.exact)
        same_shape.setdefault(key, {})[block] = means
    stacks: list[tuple[list[KroneckerBlock], Tensor]] = []
    for by_layer in same_shape.values():
        blocks = list(by_layer)
        stack = torch.stack(list(by_layer.values()), dim=1)
        # The last entry of a routed layer is not a mean eigenvalue, but its groups'
        # shares of the examples. Drop it.
        stacks.append((blocks, stack[: len(blocks[0].shape.factor_names)]))
    return stacks


class Inverses:
    """The inverses of all layers, those in use and those that are being computed.

    Attributes:
        step_plan: Which layers this rank inverts, preconditions and exchanges.
        is_synchronous: Whether the step itself decomposes, without threads.
        waits_for_all: Whether each refresh finishes all layers that it submits. This
            also holds with threads if their staleness is 0.
        measures_early: Whether the slope of the loss and the cosines are measured
            before the host reads the device. One read then serves both the refresh and
            its report. If a decomposition turns out to be inaccurate, its cosine is
            discarded. This is off with several processes, because most gradient workers
            lack the decompositions before the exchange. It is off on a CPU, because
            reads are free there and the measurement would precondition twice.
        scaled: Whether inverses are multiplied by the mean eigenvalue of A ⊗ G + γ, so
            that P is about as long as the gradient.
        requested: Layers to refresh at the next step, whether or not they are due.
        states: Origin of each installed inverse. All ranks have an entry.
        pending: The submitted inverses that are not installed. All ranks have them.
        damping_option: ``damping=`` at the last refresh; NaN before the first.
        num_failures: Number of failed decompositions so far, one per layer and refresh.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        layers: Layers,
        drift: Drift | None = None,
        rule: SelectionRule | None = None,
        make_inverter: Callable[..., Inverter] | None = None,
    ) -> None:
        self.training = training
        self.options = options
        self.layers = layers
        self.solver = SOLVERS[options.solver]
        self._dtype = options.inv_dtype
        # The floor of γ, as a share of the mean curvature of all layers.
        self._damping_floor = options.floor
        self._drift = drift
        self._rule = rule
        self.is_synchronous = make_inverter is None
        if make_inverter is None:
            make_inverter = SynchronousInverter
        self.inverter = make_inverter(training, options, self.solver)
        self.waits_for_all = self.inverter.staleness == 0
        self.scaled = options.grafting == "gradient"
        self.damping_option: Damping = math.nan
        self.num_failures = 0
        self.restart(StepPlan(layers={}, row=training.world, column=training.world))

    def restart(self, step_plan: StepPlan) -> None:
        """Adopt a plan: drop all records of inverses, and request all of its layers."""
        self.step_plan = step_plan
        is_single_process = self.training.world.size == 1
        is_on_gpu = self.training.device.type != "cpu"
        self.measures_early = self.is_synchronous and is_single_process and is_on_gpu
        self.requested: set[KroneckerBlock] = set(step_plan.layers)
        self.states: dict[KroneckerBlock, InverseState] = {}
        self._drop_pending()

    def _drop_pending(self) -> None:
        """Drop the inverses that were submitted and are not installed yet."""
        self.pending: dict[KroneckerBlock, PendingInverse] = {}
        # The damping of pending layers, on their gradient workers.
        self._dampings: dict[KroneckerBlock, LayerDamping] = {}
        # The results of pending layers that are finished on this rank.
        self._results: dict[KroneckerBlock, Result] = {}
        self.inverter.clear()

    def close(self) -> None:
        """End the inverter's threads, and drop all layers."""
        self.inverter.close()
        world = self.training.world
        self.restart(StepPlan(layers={}, row=world, column=world))

    # ---------------------------------------------------------------------- one refresh

    def refresh(
        self,
        due: Sequence[KroneckerBlock],
        gradients: PendingAverage,
        mean_curvature: float,
        read: DeviceRead,
    ) -> Refresh:
        """Compute the inverses that are due, and install those that are finished.

        Collective.

        This waits for the average of the gradients before subgroups of ranks
        communicate, because two NCCL communicators must not be in use at the same time.

        Args:
            due: The layers that are due.
            gradients: The average of the gradients, which may still be in progress.
            mean_curvature: The mean curvature of all layers, at their last refresh. It
                sets the floor of relative damping.
            read: The device read to which this adds the tensors that it needs.

        Raises:
            DecompositionError: On every rank, if a layer has failed too often in a row.
        """
        if self.requested:
            due = [b for b in self.step_plan.layers if b in self.requested or b in due]
        due_while_pending = [block for block in due if block in self.pending]
        try:
            # Damp the factors of the due layers, and submit them to the inverter.
            if due:
                self.damping_option = self._evaluate_damping_option()
                self._submit(due, mean_curvature)

            # Collect the decompositions that are finished. Measure cosines before the
            # device read shows which attempts to decompose were accurate.
            cosine_tensors: dict[KroneckerBlock, Tensor] = {}
            if self.measures_early and self._drift is not None:
                cosine_tensors = self._compare_attempts()
            cosine_place = read.add(cosine_tensors.values())
            retried = self._collect(read)

            # Agree with all ranks on the outcomes.
            outcomes = self._agree_on_outcomes(gradients)

            # Exchange the decompositions of valid layers, and install their inverses.
            valid = [
                block for block, outcome in outcomes.items() if outcome is Outcome.VALID
            ]
            decompositions = self._exchange(valid)
            previous = self._install(valid, decompositions)
            for block, outcome in outcomes.items():
                if outcome is not Outcome.VALID:
                    self._record_no_inverse(block, outcome)

            # Some due layers were still pending above. Submit those that now have an
            # inverse. The others wait until they are due again.
            resubmitted = [block for block in due_while_pending if block.solved]
            if resubmitted:
                self._submit(resubmitted, mean_curvature)
        except BaseException:
            # The results of pending layers may be lost, so compute everything again.
            self._drop_pending()
            self.requested = set(self.step_plan.layers)
            raise
        self.requested.clear()

        # Warn of layers without valid statistics. Raise if a layer failed repeatedly.
        is_unverified: dict[KroneckerBlock, bool] = {}
        for block, outcome in outcomes.items():
            is_unverified[block] = outcome is Outcome.UNVERIFIED
        self.layers.warn_of_no_statistics(is_unverified)
        self._raise_on_repeated_failures(outcomes)

        # A cosine is valid only if the attempt itself was installed, without a retry.
        # The caller measures the cosines of the layers that remain in `previous`.
        cosines: dict[KroneckerBlock, float] = {}
        if cosine_tensors:
            values = read.numbers(cosine_place)
            for block, cosine in zip(cosine_tensors, values, strict=True):
                if block in previous and block not in retried:
                    cosines[block] = cosine
                    del previous[block]
        return Refresh(installed=valid, cosines=cosines, previous=previous)

    def _raise_on_repeated_failures(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Raise DecompositionError if a layer has failed too many times in a row."""
        limit = MAX_CONSECUTIVE_FAILURES
        names = [repr(block.name) for block in blocks if block.failures >= limit]
        if names:
            raise DecompositionError(
                f"the factors of {', '.join(names)} could not be decomposed {limit} refreshes in "
                f"a row, not even in float64; raise damping, lower lr, or name them in "
                f"skip_layers"
            )

    # ------------------------------------------------------------------ damp and submit

    def _evaluate_damping_option(self) -> Damping:
        """Return the value of ``damping=`` at this step.

        If it is invalid, every rank raises.
        """
        damping: Any = self.options.damping
        if callable(damping):
            damping = damping(self.training.steps)
            check_damping(damping)
        return as_scalar(damping)

    def _submit(self, blocks: Sequence[KroneckerBlock], mean_curvature: float) -> None:
        """Start to invert the factors of layers that are not pending.

        If there is a rule, it selects some of them.
        """
        # A parameter group may override ``damping=``.
        group_values = values_by_layer(self.training.groups, blocks, "damping")
        due: dict[KroneckerBlock, PendingInverse] = {}
        for block in blocks:
            if block not in self.pending:
                value = group_values.get(block, self.damping_option)
                due[block] = PendingInverse(self.training.steps, value, mean_curvature)
        if not due:
            return
        selected: Iterable[KroneckerBlock] = due
        if self._rule is not None:
            selected = self._rule(self, due)
        factors: dict[KroneckerBlock, KroneckerFactors] = {}
        for block in selected:
            self.pending[block] = due[block]
            factors[block] = block.ensure_factors()
        self._damp_and_submit(factors)

    def _damp_and_submit(
        self, factors: Mapping[KroneckerBlock, KroneckerFactors]
    ) -> None:
        """Compute γ of layers, and submit the factors that this rank decomposes."""
        # A rank decomposes factors only of layers that it preconditions, and needs γ
        # only of these.
        step_plan = self.step_plan
        preconditioned = {
            block: layer_factors
            for block, layer_factors in factors.items()
            if block in step_plan.preconditioned
        }
        try:
            self._dampings |= self.compute_dampings(preconditioned, self.pending)
            self.inverter.submit(self._make_jobs(preconditioned))
        except Exception as error:
            # All ranks must reach the all-reduce of outcomes, so record the error. A
            # layer that this rank has damped, and does not invert, has not failed.
            for block in preconditioned:
                if block in step_plan.to_invert or block not in self._dampings:
                    self._results[block] = Result(block, error=describe_error(error))

    def compute_dampings(
        self,
        factors: Mapping[KroneckerBlock, KroneckerFactors],
        pending: Mapping[KroneckerBlock, PendingInverse],
    ) -> dict[KroneckerBlock, LayerDamping]:
        """Compute the damping of layers, with one computation for each shape.

        Args:
            factors: The factors of the layers.
            pending: Has the value of ``damping=`` for each of these layers, and
                possibly for others.
        """
        dampings: dict[KroneckerBlock, LayerDamping] = {}
        for blocks, means in stack_means(factors):
            curvature = layer_mean_curvature(means)  # (layers,)

            # The layers' ``damping=``: a number or a scalar if all layers have the same,
            # otherwise a tensor (layers,).
            damping_options = [pending[b].damping_option for b in blocks]
            damping_option: Any = merge_numbers(damping_options, curvature)
            if isinstance(damping_option, Tensor):
                damping_option = damping_option.to(curvature)

            # γ has the same type and shape, or is (layers,) if damping is relative.
            damping = damping_option
            if self.options.relative_damping:
                # All of these layers were submitted at one step, so they share a floor.
                # load() submits pending inverses one by one, as their steps may differ.
                floor = self._damping_floor * pending[blocks[0]].mean_curvature
                # If a layer's gradients vanish, its curvature is 0. Use 1 instead,
                # because the floor may be 0 as well.
                positive = curvature.masked_fill(curvature <= 0, 1.0)
                damping = damping_option * positive.clamp_min(floor)

            # Split γ and the mean eigenvalues by layer.
            mean_eigenvalues = (curvature + damping).unbind()
            layer_dampings: Sequence[Damping] = [damping] * len(blocks)
            group_damping = damping
            if isinstance(damping, Tensor):
                layer_dampings = damping.expand_as(curvature).unbind()
                group_damping = damping.unsqueeze(-1)  # the groups of a layer share it

            # Compute what is added to each factor's diagonal, and split it by layer.
            shape = blocks[0].shape
            added: list[dict[str, Tensor]] = [{} for _ in blocks]
            split = self.solver.split_damping(means, group_damping, shape.exact)
            for factor_name, numbers in zip(shape.factor_names, split, strict=True):
                if numbers is not None:
                    for layer_added, number in zip(added, numbers, strict=True):
                        layer_added[factor_name] = number
            for i, block in enumerate(blocks):
                dampings[block] = LayerDamping(
                    damping=layer_dampings[i],
                    mean_eigenvalue=mean_eigenvalues[i],
                    added=added[i],
                )
        return dampings

    def _make_jobs(
        self, factors: Mapping[KroneckerBlock, KroneckerFactors]
    ) -> list[Job]:
        """Return the factors that this rank decomposes, with their damping."""
        step_plan = self.step_plan
        jobs: list[Job] = []
        for block, layer_factors in factors.items():
            if block not in step_plan.to_invert:
                continue
            added = self._dampings[block].added
            shape = block.shape
            problems: dict[str, Problem] = {}
            for factor_name in step_plan.to_invert[block]:
                problems[factor_name] = Problem(
                    stored=layer_factors.entries[factor_name],
                    dim=shape.dims[factor_name],
                    dtype=self._dtype,
                    added=added.get(factor_name),
                    is_diagonal=factor_name in shape.diagonals,
                )
            # If a layer has an inverse, it has had statistics. Otherwise, the inverter
            # reads the weight of the averages, which is 0 without statistics.
            weight = None if block.solved else layer_factors.weight
            cost = step_plan.costs[block]
            jobs.append(Job(block, problems=problems, cost=cost, weight=weight))
        return jobs

    # -------------------------------------------------------------------------- collect

    def _compare_attempts(self) -> dict[KroneckerBlock, Tensor]:
        """Compare P with the previous inverse and P with the attempted new inverse.

        Returns the cosine of each layer that has both inverses and a gradient. Empty if
        parameters are sharded: ``precondition_rows`` then measures the cosines.
        """
        cosines: dict[KroneckerBlock, Tensor] = {}
        if self.layers.sharded:
            return cosines
        attempts = self.inverter.unchecked_decompositions()
        dtype = self._dtype
        for batch in self.step_plan.batches:
            previous: dict[KroneckerBlock, Inverse] = {}
            for block in batch.blocks:
                inverse = block.inverse
                if block in attempts and block.has_gradient and inverse is not None:
                    previous[block] = inverse
            # Precondition by the attempted inverses, and compare.
            if previous:
                decompositions = {block: dict(attempts[block]) for block in previous}
                attempt = LayerBatch(list(previous), self._combine(decompositions))
                results = precondition_batches([attempt], dtype)
                cosines |= compare_inverses(results, previous, dtype)
        return cosines

    def _collect(self, read: DeviceRead) -> set[KroneckerBlock]:
        """Record the results that the inverter has finished.

        Returns the layers that it retried.
        """
        retried: set[KroneckerBlock] = set()
        for result in self.inverter.collect(self._must_wait_for, read):
            self._results[result.block] = result
            if result.was_retried:
                retried.add(result.block)
        return retried

    def _must_wait_for(self, block: KroneckerBlock) -> bool:
        """Whether this step waits for a pending layer.

        All ranks get the same answer.
        """
        if not block.solved:
            return True
        # If refresh intervals follow drift, finish the inverse one step before the next
        # refresh of the layer, so that the layer is not pending when it is due.
        age = self.training.steps - self.pending[block].step
        if self._drift is not None and age >= self._drift.interval(block) - 1:
            return True
        staleness = self.inverter.staleness
        return staleness is not None and age >= staleness

    # ---------------------------------------------------------------------------- agree

    def _agree_on_outcomes(
        self, gradients: PendingAverage
    ) -> dict[KroneckerBlock, Outcome]:
        """Agree with all ranks on the outcomes of pending layers. Collective.

        Returns:
            The outcomes of the layers for which any rank has one.
        """
        blocks = [block for block in self.step_plan.layers if block in self.pending]
        has_fixed_delay = self.inverter.deterministic and not self.waits_for_all
        if has_fixed_delay and not any(map(self._must_wait_for, blocks)):
            # The inverter only returns layers that a step must wait for, so no rank has
            # an outcome at this step.
            blocks = []
        outcomes = [self._local_outcome(block) for block in blocks]
        if self.training.world.size > 1:
            outcomes = self._max_over_ranks(outcomes, gradients)

        return {
            block: outcome
            for block, outcome in zip(blocks, outcomes, strict=True)
            if outcome is not Outcome.PENDING
        }

    def _max_over_ranks(
        self, local: Sequence[Outcome], gradients: PendingAverage
    ) -> list[Outcome]:
        """Return the largest outcome of each layer over all ranks.

        The ranks send a CPU tensor, so the host does not synchronize with the device.
        The all-reduce overlaps with the average of the gradients. Both are complete
        when this returns.
        """
        message = torch.tensor(local, dtype=torch.float32, device="cpu")
        messages = [message] if local else []

        # The all-reduce replaces the numbers in the message.
        stage_name = "solve_exchange" if self.waits_for_all else "wait"
        with stage(stage_name):
            agreement = self.training.world.on_cpu().all_reduce_max(messages)
        with stage("average_gradients"):
            gradients.wait()
        with stage(stage_name):
            agreement.wait()
        return [Outcome(int(number)) for number in message.tolist()]

    def _local_outcome(self, block: KroneckerBlock) -> Outcome:
        """Return the outcome of a pending layer on this rank."""
        if block.unverified:
            return Outcome.UNVERIFIED
        inverts_layer = block in self.step_plan.to_invert
        if not inverts_layer and self.training.world.backend == "fake":
            # torch's fake backend has only this rank, so assume that the inverse rank
            # would succeed.
            return Outcome.VALID
        result = self._results.get(block)
        if result is None:
            return Outcome.PENDING
        if not result.has_statistics:
            return Outcome.NO_STATISTICS
        # A rank that does not decompose the layer may have failed to damp it.
        num_expected = len(self.step_plan.to_invert.get(block, ()))
        if result.error or len(result.decompositions) < num_expected:
            return Outcome.FAILED
        return Outcome.VALID

    # ------------------------------------------------------------------------- exchange

    def _exchange(
        self, valid: Sequence[KroneckerBlock]
    ) -> dict[KroneckerBlock, dict[str, Decomposition]]:
        """Send the decompositions of valid layers to their gradient workers.

        Collective.

        Returns the decompositions of layers that this rank preconditions, by factor.
        """
        preconditioned = self.step_plan.preconditioned
        decompositions: dict[KroneckerBlock, dict[str, Decomposition]] = {}
        if self.step_plan.row.size == 1 or not valid:
            for block in valid:
                if block in preconditioned:
                    # Drop the result, so that its decompositions are freed as soon as
                    # they are combined.
                    result = self._results.pop(block)
                    decompositions[block] = dict(result.decompositions)
            return decompositions

        blocks = [block for block in valid if block in preconditioned]
        with stage("solve_exchange"):
            received = self._send_decompositions(blocks)
        for block in blocks:
            decompositions[block] = {}
            for factor_name in block.shape.factor_names:
                message = received.pop((block, factor_name))
                dim = block.shape.dims[factor_name]
                decomposition = self.solver.unpack_message(message, dim)
                decompositions[block][factor_name] = decomposition
            if not self.is_synchronous:
                # Copy the numbers, because a view keeps the whole message in memory.
                (numbers,) = received.pop((block, DAMPING_ENTRY))
                damping, mean_eigenvalue = numbers.clone().unbind()
                self._dampings[block] = LayerDamping(damping, mean_eigenvalue, {})
            self._results.pop(block, None)
        return decompositions

    def _send_decompositions(
        self, blocks: Sequence[KroneckerBlock]
    ) -> dict[FactorKey, tuple[Tensor, ...]]:
        """Exchange decompositions with the other gradient workers of this rank's row.

        If the inverter uses threads, γ and the mean eigenvalue are sent as well. The
        other ranks may be unable to compute these two numbers, because stats workers
        send the statistics of a layer only to its inverse rank.

        If the communication dtype is narrower, ``pack_message`` also rounds the
        decompositions that inverse ranks keep, so that all ranks use the same numbers.
        """
        # The inverse rank of a factor sends its decomposition to the whole row.
        plan = self.step_plan
        dtype = self._dtype
        device = self.training.device
        destinations = range(plan.row.size)
        shapes: dict[FactorKey, Shapes] = {}
        routes: dict[FactorKey, Route] = {}
        local: dict[FactorKey, tuple[Tensor, ...]] = {}
        for block in blocks:
            result = self._results.get(block)
            own = {} if result is None else result.decompositions
            for factor_name in block.shape.factor_names:
                key = (block, factor_name)
                shapes[key] = self.solver.message_shapes(block.shape, factor_name)
                routes[key] = Route(plan.sources[key], destinations)
                if factor_name in own:
                    local[key] = self.solver.pack_message(
                        own[factor_name], plan.exchange_dtype
                    )

            # The inverse rank of A also sends the damping.
            if not self.is_synchronous:
                key = (block, DAMPING_ENTRY)
                shapes[key] = ((2,),)  # γ and the mean eigenvalue
                routes[key] = routes[block, "A"]
                if "A" in own and block in self._dampings:
                    layer_damping = self._dampings[block]
                    numbers = [layer_damping.damping, layer_damping.mean_eigenvalue]
                    scalars = [
                        torch.as_tensor(n, dtype=dtype, device=device) for n in numbers
                    ]
                    local[key] = (torch.stack(scalars),)
        return send_tensors(
            world=plan.row,
            shapes=shapes,
            routes=routes,
            local=local,
            dtype=dtype,
            device=device,
            communication_dtype=plan.exchange_dtype,
        )

    # -------------------------------------------------------------------------- install

    def _install(
        self,
        valid: Sequence[KroneckerBlock],
        decompositions: dict[KroneckerBlock, dict[str, Decomposition]],
    ) -> dict[KroneckerBlock, Inverse]:
        """Install the inverses of valid layers.

        This empties ``decompositions`` as it goes, to free memory.

        Returns the inverses that it replaced, if refresh intervals follow drift.
        """
        # Gradient workers compute the inverses of same-shape layers as one stack, and
        # split it by layer.
        previous: dict[KroneckerBlock, Inverse] = {}
        for batch in self.step_plan.batches:
            in_batch: dict[KroneckerBlock, dict[str, Decomposition]] = {}
            for block in batch.blocks:
                if block in decompositions:
                    in_batch[block] = decompositions.pop(block)
            if not in_batch:
                continue
            groups = batch.blocks[0].shape.groups
            inverses = self._combine(in_batch).split_layers(groups)
            for block, inverse in zip(in_batch, inverses, strict=True):
                if self._drift is not None and block.inverse is not None:
                    previous[block] = block.inverse
                block.install_inverse(inverse)

        # All ranks record that the layers' gradient workers have an inverse.
        for block in valid:
            pending = self.pending.pop(block)
            layer_damping = self._dampings.pop(block, None)
            damping: Damping = 0.0
            mean_eigenvalue: Damping = 0.0
            if layer_damping is not None:
                damping = layer_damping.damping
                mean_eigenvalue = layer_damping.mean_eigenvalue
            self.states[block] = InverseState(
                step=pending.step,
                installed_at=self.training.steps,
                damping_option=pending.damping_option,
                damping=damping,
                mean_eigenvalue=mean_eigenvalue,
            )
            block.mark_solved()
        return previous

    def _drop_pending_layer(self, block: KroneckerBlock) -> None:
        """Drop a layer's pending inverse, its job and its results."""
        # If another rank failed, a thread of this rank may still decompose its factors.
        self.inverter.forget(block)
        self._dampings.pop(block, None)
        self._results.pop(block, None)
        del self.pending[block]

    def _combine(
        self, decompositions: dict[KroneckerBlock, dict[str, Decomposition]]
    ) -> Inverse:
        """Combine decompositions of layers of the same shape into a stacked inverse.

        This empties the dictionaries of the layers, to free memory.
        """
        shape = next(iter(decompositions)).shape
        stacked: dict[str, Decomposition] = {}
        for factor_name in shape.factor_names:
            by_layer = [by_name.pop(factor_name) for by_name in decompositions.values()]
            # A decomposition is a tuple, such as eigenvectors and eigenvalues. Join
            # the eigenvectors of all layers to (layers x groups, ...), then the
            # eigenvalues.
            by_part = zip(*by_layer, strict=True)
            stacked[factor_name] = tuple(map(join_groups, by_part))

        # Stack γ and the mean eigenvalues in the same order, with the dtype and device
        # that all tensors of the decompositions have.
        dampings: list[Damping] = []
        mean_eigenvalues: list[Damping] = []
        for block in decompositions:
            layer_damping = self._dampings[block]
            dampings.append(layer_damping.damping)
            mean_eigenvalues.append(layer_damping.mean_eigenvalue)
        like = stacked["G"][-1]
        damping = per_group(dampings, shape.groups, like)
        scale: Tensor | None = None
        if self.scaled:
            scale = per_group(mean_eigenvalues, shape.groups, like)
        return self.solver.combine(stacked, damping, scale)

    def _record_no_inverse(self, block: KroneckerBlock, outcome: Outcome) -> None:
        """Record that a layer has no new inverse.

        If its factors could not be decomposed (FAILED), it keeps its last inverse. If
        it has no statistics, or unverified ones, it loses its last inverse.
        """
        result = self._results.get(block)
        error = "" if result is None else result.error
        self._drop_pending_layer(block)
        if outcome is Outcome.FAILED:
            block.count_failed_refresh()
            self.num_failures += 1
            self._warn_of_failure(block, error)
            return

        # The layer has no valid statistics, so its last inverse is dropped.
        self.states.pop(block, None)
        if self._drift is not None:
            # The refresh intervals depend on which layers have inverses.
            self._drift.invalidate()
        if outcome is Outcome.NO_STATISTICS:
            # If the layer's hooks captured no pair, the optimizer warns. If they
            # captured pairs without examples, it does not, because the layer is in use.
            block.drop_inverse_at_refresh(
                no_statistics=block.status is LayerStatus.NOT_CAPTURED
            )
            return

        # Its statistics do not belong to its gradient, so drop them as well.
        had_inverse = block.solved
        block.restart_averages()
        block.drop_inverse_at_refresh(no_statistics=True)
        if had_inverse:
            # Remove the dropped factors from the optimizer's state.
            self.training.publish()

    def _warn_of_failure(self, block: KroneckerBlock, error: str) -> None:
        """Warn that a layer's factors could not be decomposed, once per layer."""
        training = self.training
        if not training.is_first_warning(f"failed:{block.name}"):
            return
        consequence = "the layer falls back to the base optimizer"
        if block.solved:
            consequence = "its last inverse is kept"
        reason = f" ({error})" if error else ""
        training.warn(
            f"the factors of layer {block.name!r} could not be decomposed at step "
            f"{training.steps}{reason}; {consequence} until a refresh succeeds"
        )

    # ---------------------------------------------------------------------- checkpoints

    def snapshot_factors(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Copy the factors of pending inverses.

        Call this before the running averages change. Checkpoints contain the copies, so
        that :meth:`load` can compute the same inverses. Every rank copies them, because
        any rank may write a checkpoint.
        """
        for block in blocks:
            pending = self.pending.get(block)
            if pending is None or pending.factors is not None:
                continue
            if block.factors is not None:
                copies = block.read_factors(block.saved_factors())
                self.pending[block] = pending._replace(factors=copies)

    def load(self, loaded: LoadedInverses) -> None:
        """Install a checkpoint's inverses, and recompute those that were pending.

        Call :meth:`restart` first. Only an inverter with threads has pending inverses
        between two steps. They are finished when this returns.
        """
        self.damping_option = loaded.damping_option
        self.requested = set(loaded.requested)
        for block, loaded_inverse in loaded.inverses.items():
            block.mark_solved()
            self.states[block] = loaded_inverse.state
            if loaded_inverse.inverse is not None:
                block.install_inverse(loaded_inverse.inverse)

        assert not loaded.pending or not self.is_synchronous
        for block, pending in loaded.pending.items():
            assert pending.factors is not None
            self.pending[block] = pending
            self._damp_and_submit({block: pending.factors})
        self.inverter.finish()

    def drop(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Drop the inverses of layers, and request new ones at the next step."""
        for block in blocks:
            block.drop_inverse()
            if block in self.pending:
                self._drop_pending_layer(block)
            self.states.pop(block, None)
            self.requested.add(block)

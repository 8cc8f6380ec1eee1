"""LayerDamping inverses of the layers' factors: computed, agreed on, exchanged, installed.

submit    each inverse rank hands its factors of the layers that are due to its inverter
collect   it takes what the inverter has finished: at once, or from threads
agree     all ranks find the largest outcome of each layer
exchange  the decompositions of valid layers go to the layers' gradient workers
install   all gradient workers use the new inverses from this step on; the other layers keep what
          they have, or nothing

The inverter is :class:`SynchronousInverter`, or the threads of :mod:`async_inversion`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.world import Route, Shapes, send_tensors
from second_order.errors import DecompositionError
from second_order.kfac.layers import Layers, values_by_layer
from second_order.kfac.plan import Item, StepPlan
from second_order.kfac.precondition import compare, precondition
from second_order.kfac.schedule import Drift
from second_order.kronecker.block import KroneckerBlock, LayerBatch, LayerStatus, per_group
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.solvers import (
    SOLVERS,
    Attempts,
    Damping,
    Decomposition,
    Inverse,
    Problem,
    Solver,
)
from second_order.kronecker.storage import DeviceRead, as_stack, merge_numbers
from second_order.optimizers.config import KFACOptions, check_damping
from second_order.training.context import Training
from second_order.training.curvature import PendingAverage
from second_order.utils.checks import as_scalar
from second_order.utils.stages import stage

__all__ = [
    "InverseState",
    "Inverses",
    "Job",
    "LoadedInverse",
    "Outcome",
    "PendingInverse",
    "Refresh",
    "Result",
    "SynchronousInverter",
    "stacked_means",
]

MAX_CONSECUTIVE_FAILURES = 3  # refreshes in a row without an inverse of a layer

NUMBERS = "numbers"  # γ and the trace of a layer, sent next to its decompositions


class Outcome(IntEnum):
    """The outcome of computing a layer's inverse. Ranks agree on the largest."""

    PENDING = 0  # not finished yet, or not on this rank
    NO_STATISTICS = 1  # no example has reached the layer yet
    VALID = 2  # a decomposition of every factor
    FAILED = 3  # a factor could not be decomposed
    UNVERIFIED = 4  # the captured pairs do not reproduce the layer's gradient


@dataclass(frozen=True)
class InverseState:
    """Where the inverse in use of a layer comes from.

    All ranks know the steps. The layer's gradient workers know the other numbers.
    """

    step: int  # of the factors that it was computed from
    installed_at: int  # the step since which it is used
    option: Damping = 0.0  # γ as the option had it at ``step``
    damping: Damping = 0.0  # γ of the layer
    trace: Damping = 0.0  # the mean eigenvalue of A ⊗ G + γ


@dataclass(frozen=True)
class LoadedInverse:
    """A checkpoint's inverse; ``inverse`` is None on ranks that do not precondition with it."""

    state: InverseState
    inverse: Inverse | None = None


@dataclass(frozen=True)
class LayerDamping:
    """The damping of a layer."""

    damping: Damping  # γ
    trace: Tensor  # the mean eigenvalue of A ⊗ G + γ
    added: Sequence[Tensor | None] = ()  # to the factors' diagonals


@dataclass(frozen=True)
class PendingInverse:
    """A layer whose inverse is being computed, from the factors of a step."""

    step: int
    option: Damping  # γ as the option had it at that step
    mean_curvature: float  # of all layers, then
    damped: LayerDamping | None = None  # on the layer's gradient workers
    outcome: Outcome = Outcome.PENDING  # on this rank
    parts: Mapping[str, Decomposition] = field(default_factory=dict)  # by letter, on this rank
    error: str = ""  # what was raised on this rank
    factors: KroneckerFactors | None = None  # of that step, once the running averages have changed


@dataclass(frozen=True)
class Job:
    """The factors of a layer that this rank decomposes, by letter."""

    block: KroneckerBlock
    problems: Mapping[str, Problem]
    cost: float
    # The weight of the running averages, 0 if there are no statistics; None if it is known that
    # there are some.
    weight: Tensor | None = None


@dataclass(frozen=True)
class Result:
    """The result of a job: decompositions by letter, without those that failed."""

    block: KroneckerBlock
    parts: Mapping[str, Decomposition] = field(default_factory=dict)
    error: str = ""
    has_statistics: bool = True
    was_retried: bool = False  # whether the first attempt at a factor failed


@dataclass(frozen=True)
class Refresh:
    """What a refresh has changed.

    Attributes:
        installed: The layers that have a new inverse; the same on every rank.
        cosines: Of P by the last and by the new inverse, of layers for which they are known.
        previous: The last inverses of the other layers that this rank preconditions, if refresh
            intervals follow drift.
    """

    installed: Sequence[KroneckerBlock] = ()
    cosines: Mapping[KroneckerBlock, float] = field(default_factory=dict)
    previous: Mapping[KroneckerBlock, Inverse] = field(default_factory=dict)


class Inverter(Protocol):
    """Decomposes factors: :class:`SynchronousInverter`, or the threads of :mod:`async_inversion`.

    ``staleness`` is the number of steps after which a layer is waited for, None for no bound. If
    the inverter is ``deterministic``, layers are installed then, and never before.
    """

    staleness: int | None
    deterministic: bool

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start to decompose the factors of some layers."""

    def attempted(self) -> dict[KroneckerBlock, Mapping[str, Decomposition]]:
        """Decompositions of submitted layers, before it is known whether they are accurate."""

    def collect(self, waits: Callable[[KroneckerBlock], bool], read: DeviceRead) -> list[Result]:
        """Return finished layers, and wait for those that ``waits`` names."""

    def forget(self, block: KroneckerBlock) -> None:
        """Drop what has been submitted of a layer."""

    def clear(self) -> None:
        """Drop all that has been submitted."""

    def finish(self) -> None:
        """Wait for all that has been submitted."""

    def close(self) -> None:
        """End threads."""

    def post(self, copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Send tensors from the CPU once the device has computed them."""


class SynchronousInverter:
    """Decomposes at once: factors of one size together, and with one read of the device."""

    staleness: int | None = 0
    deterministic = True

    def __init__(self, training: Training, options: KFACOptions, solver: Solver) -> None:
        self._solver = solver
        self._dtype = options.inv_dtype
        self.clear()

    def clear(self) -> None:
        """Drop all that has been submitted."""
        self._jobs: Sequence[Job] = ()
        self._items: list[Item] = []
        self._attempts: Attempts | None = None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Attempt to decompose the factors of some layers."""
        self.clear()
        if not jobs:
            return
        # Factors of equal layers lie next to each other, so that they are equal in their batches.
        shapes = list(dict.fromkeys(job.block.shape for job in jobs))
        problems = {(job.block, k): each for job in jobs for k, each in job.problems.items()}
        items = sorted(problems, key=lambda item: (shapes.index(item[0].shape), item[1]))
        self._attempts = self._solver.attempt([problems[item] for item in items], self._dtype)
        self._items = items
        self._jobs = jobs

    def attempted(self) -> dict[KroneckerBlock, Mapping[str, Decomposition]]:
        """Decompositions of submitted layers, before it is known whether they are accurate."""
        if self._attempts is None:
            return {}
        parts = _by_layer(self._items, self._attempts.parts)
        found: dict[KroneckerBlock, Mapping[str, Decomposition]] = {}
        for job in self._jobs:
            if len(parts[job.block]) == len(job.problems):
                found[job.block] = parts[job.block]
        return found

    def collect(self, waits: Callable[[KroneckerBlock], bool], read: DeviceRead) -> list[Result]:
        """Return all that has been submitted, after a read of the device.

        Factors whose first attempt has failed are decomposed in other ways.
        """
        attempts = self._attempts
        if attempts is None:
            return []
        items = self._items
        jobs = self._jobs
        unknown = [job for job in jobs if job.weight is not None]
        weights = read.add([job.weight for job in unknown if job.weight is not None])
        errors = read.add(attempts.errors)
        self.clear()
        try:
            weighed = zip(unknown, weights(), strict=True)
            empty = {job.block for job, weight in weighed if not weight > 0}
            failed = [i for i in attempts.inaccurate(errors()) if items[i][0] not in empty]
            found = attempts.retry(failed)
        except Exception as error:  # an exception must not separate this rank from the others
            return [Result(job.block, error=describe_error(error)) for job in jobs]

        parts = _by_layer(items, found)
        retried = {items[i][0] for i in failed}
        return [
            Result(
                job.block,
                parts[job.block],
                has_statistics=job.block not in empty,
                was_retried=job.block in retried,
            )
            for job in jobs
        ]

    def forget(self, block: KroneckerBlock) -> None:
        """Do nothing: all is collected at the step at which it is submitted."""

    def finish(self) -> None:
        """Do nothing: all is collected at the step at which it is submitted."""

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def post(self, copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Send tensors from the CPU; wait for those on a device."""
        send([copy.cpu() for copy in copies])


def _by_layer(
    items: Sequence[Item], parts: Sequence[Decomposition | None]
) -> dict[KroneckerBlock, dict[str, Decomposition]]:
    """Decompositions of factors by layer and letter, without those that are None."""
    found: dict[KroneckerBlock, dict[str, Decomposition]] = {block: {} for block, _ in items}
    for (block, letter), decomposition in zip(items, parts, strict=True):
        if decomposition is not None:
            found[block][letter] = decomposition
    return found


def describe_error(error: BaseException) -> str:
    """The class and the text of an error."""
    return f"{type(error).__name__}: {error}"


def stacked_means(
    factors: Mapping[KroneckerBlock, KroneckerFactors],
) -> list[tuple[list[KroneckerBlock], Tensor]]:
    """Layers of equal shape, and their factors' mean eigenvalues, ``(factors, layers, groups)``."""
    same_shape: dict[object, list[KroneckerBlock]] = {}
    for block, each in factors.items():
        means = each.factor_means
        key = means.shape, means.dtype, means.device, block.shape.exact
        same_shape.setdefault(key, []).append(block)
    return [(b, torch.stack([factors[x].factor_means for x in b], 1)) for b in same_shape.values()]


class Inverses:
    """The inverses of a training's layers, and the layers whose inverses are being computed."""

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        layers: Layers,
        drift: Drift | None = None,
        rule: Rule | None = None,
        inverter: Callable[..., Any] | None = None,
    ) -> None:
        self.training = training
        self.options = options
        self.layers = layers
        self.drift = drift
        self.rule = rule
        self.solver = SOLVERS[options.solver]
        make: Callable[..., Inverter] = inverter or SynchronousInverter
        self.inverter = make(training, options, self.solver)
        self.waits_for_all = self.inverter.staleness == 0
        self.is_synchronous = inverter is None
        self.damping_option: Damping = math.nan  # γ as the option has it
        self.num_failures = (
            0  # number of inverses without a valid decomposition, of all layers so far
        )
        self.restart(StepPlan({}, training.world, training.world))

    def restart(self, step: StepPlan) -> None:
        """Compute all inverses of a plan again, from other factors or on other ranks."""
        self.step_plan = step
        self.plan = step.layers
        self.requested: set[KroneckerBlock] = set(self.plan)  # layers that are due out of turn
        self.states: dict[KroneckerBlock, InverseState] = {}  # of the inverses in use
        self.pending: dict[KroneckerBlock, PendingInverse] = {}
        self.inverter.clear()

    def close(self) -> None:
        """End threads, and forget all layers."""
        self.inverter.close()
        self.restart(StepPlan({}, self.training.world, self.training.world))

    @property
    def reads_once(self) -> bool:
        """Whether a refresh needs no more than one read of the device for all that it reports.

        What a refresh changes is then measured with the attempts, before they are known to be
        accurate. With several processes, the inverses have to be exchanged first. On a CPU nothing
        waits, and the comparison would precondition twice.
        """
        training = self.training
        has_device = training.device.type != "cpu"
        return self.is_synchronous and training.world.size == 1 and has_device

    @property
    def scaled(self) -> bool:
        """Whether inverses are multiplied by the mean eigenvalue of the damped curvature."""
        return self.options.grafting == "gradient"

    # ------------------------------------------------------------------------------- one refresh

    def refresh(
        self,
        due: Sequence[KroneckerBlock],
        pending: PendingAverage,
        mean_curvature: float,
        read: DeviceRead,
    ) -> Refresh:
        """Compute the inverses that are due, and install what the ranks agree is finished.

        Gradients have arrived before a part of the world communicates: NCCL's communicators are not
        to be used at the same time.

        Args:
            due: The layers that are due.
            pending: The average of the gradients.
            mean_curvature: Of all layers, at their last refresh.
            read: What else is read if the device is read.

        Raises:
            DecompositionError: On every rank, if a layer could not be decomposed too often.
        """
        if self.requested:
            due = [block for block in self.plan if block in self.requested or block in due]
        try:
            if due:
                self._read_damping()
            landing = set(self.pending)
            self._submit([block for block in due if block not in landing], mean_curvature)
            attempted = self._compare_attempts()
            cosines = read.add(list(attempted.values()))
            retried = self._collect(read)
            outcomes = self._agree_on_outcomes(pending)
            installed, previous = self._install(outcomes)
            again = [b for b in due if b in landing and b not in self.pending and b.solved]
            self._submit(again, mean_curvature)
        except BaseException:  # layers under way may have lost their results
            self.pending.clear()
            self.inverter.clear()
            self.requested = set(self.plan)
            raise
        self.requested.clear()

        self.layers.tell_of_silence(list(outcomes))
        most = MAX_CONSECUTIVE_FAILURES
        hopeless = [repr(block.name) for block in outcomes if block.failures >= most]
        if hopeless:
            raise DecompositionError(
                f"the factors of {', '.join(hopeless)} could not be decomposed {most} refreshes in "
                f"a row, in float32 or in float64; raise damping, lower lr, or name them in "
                f"skip_layers"
            )

        known: dict[KroneckerBlock, float] = {}
        for block, cosine in zip(attempted, cosines(), strict=True):
            if block not in retried and block in previous:
                known[block] = cosine
                del previous[block]
        return Refresh(installed, known, previous)

    def _read_damping(self) -> None:
        """Read the option γ of this step, on every rank before anything is computed."""
        damping: Any = self.options.damping
        if callable(damping):
            damping = damping(self.training.steps)
            check_damping(damping)
        self.damping_option = as_scalar(damping)

    # ----------------------------------------------------------------------- submit and collect

    def _submit(self, blocks: Sequence[KroneckerBlock], mean_curvature: float) -> None:
        """Begin to compute the inverses of some layers, from their running averages."""
        if not blocks:
            return
        own_dampings = values_by_layer(self.training.groups, blocks, "damping")
        solves: dict[KroneckerBlock, PendingInverse] = {}
        for block in blocks:
            option = own_dampings.get(block, self.damping_option)
            solves[block] = PendingInverse(self.training.steps, option, mean_curvature)
        if self.rule is not None:
            moved = self.rule(self, solves)
            solves = {block: solves[block] for block in moved}
        self.pending |= solves
        self._begin({block: block.ensure_factors() for block in solves})

    def _begin(self, factors: Mapping[KroneckerBlock, KroneckerFactors]) -> None:
        """Find γ of the layers of this rank, and hand its factors to the inverter."""
        local = [block for block in factors if block in self.step_plan.to_solve]
        solves = {block: self.pending[block] for block in factors if self._works_on(block)}
        try:
            for block, damped in self.layer_dampings(factors, solves).items():
                self._update(block, damped=damped)
            self.inverter.submit([self._job(block, factors[block]) for block in local])
        except Exception as error:  # an exception must not separate this rank from the others
            for block in solves:
                if self.pending[block].damped is None or block in local:
                    self._update(block, outcome=Outcome.FAILED, error=describe_error(error))

    def _works_on(self, block: KroneckerBlock) -> bool:
        """Whether this rank preconditions a layer; inverse ranks do."""
        return self.training.world.rank in self.plan[block].workers

    def _update(self, block: KroneckerBlock, **changed: Any) -> None:
        self.pending[block] = replace(self.pending[block], **changed)

    def layer_dampings(
        self,
        factors: Mapping[KroneckerBlock, KroneckerFactors],
        solves: Mapping[KroneckerBlock, PendingInverse],
    ) -> dict[KroneckerBlock, LayerDamping]:
        """γ of layers, and what their factors get of it; of layers of equal shape at once."""
        options = self.options
        found: dict[KroneckerBlock, LayerDamping] = {}
        for blocks, means in stacked_means({block: factors[block] for block in solves}):
            curvature = means.prod(0).mean(-1, keepdim=True)
            damping: Any = merge_numbers([solves[block].option for block in blocks], curvature)
            if isinstance(damping, Tensor):
                damping = damping.to(curvature).view(-1, 1)
            if options.relative_damping:  # where gradients vanish there is no curvature
                floor = options.floor * solves[blocks[0]].mean_curvature
                positive = curvature.masked_fill(~(curvature > 0), 1.0)
                damping = damping * positive.clamp_min(floor)
            traces = (curvature + damping).squeeze(-1)
            added = self.solver.dampings(means, damping, blocks[0].shape.exact)
            for i, block in enumerate(blocks):
                each = damping
                if isinstance(damping, Tensor):
                    each = damping.expand(len(blocks), 1)[i, 0]
                own = [None if x is None else x[i] for x in added]
                found[block] = LayerDamping(each, traces[i], own)
        return found

    def _job(self, block: KroneckerBlock, factors: KroneckerFactors) -> Job:
        """The factors of a layer that this rank decomposes, with their damping."""
        shape, damped = block.shape, self.pending[block].damped
        assert damped is not None
        problems: dict[str, Problem] = {}
        for letter in self.step_plan.to_solve[block]:
            problems[letter] = Problem(
                factors.entries[letter],
                shape.dims[letter],
                self.options.inv_dtype,
                added=damped.added[shape.factor_names.index(letter)],
                is_diagonal=letter in shape.diagonals,
            )
        weight = None if block.solved else factors.weight
        return Job(block, problems, self.step_plan.costs[block], weight)

    def _compare_attempts(self) -> dict[KroneckerBlock, Tensor]:
        """Compare P by the last inverse and by the attempt at a new one.

        Returns the cosines of the layers that have both, if this saves a read of the device.
        """
        cosines: dict[KroneckerBlock, Tensor] = {}
        if self.drift is None or not self.reads_once or self.layers.sharded:
            return cosines
        attempts = self.inverter.attempted()
        dtype = self.options.inv_dtype
        for bank in self.step_plan.banks:
            previous: dict[KroneckerBlock, Inverse] = {}
            for block in bank.blocks:
                if block in attempts and block.inverse is not None and block.has_gradient:
                    previous[block] = block.inverse
            if previous:
                new = {block: dict(attempts[block]) for block in previous}
                dampings = {block: self.pending[block].damped for block in previous}
                attempt = LayerBatch(list(previous), self._combined(new, dampings))
                cosines |= compare(precondition([attempt], dtype), previous, dtype)
        return cosines

    def _collect(self, read: DeviceRead) -> set[KroneckerBlock]:
        """Take what is finished. Returns the layers whose first attempt has failed."""
        retried: set[KroneckerBlock] = set()
        for result in self.inverter.collect(self._must_wait_for, read):
            block = result.block
            whole = len(result.parts) == len(self.step_plan.to_solve[block])
            outcome = Outcome.VALID if whole else Outcome.FAILED
            if not result.has_statistics:
                outcome = Outcome.NO_STATISTICS
            self._update(block, outcome=outcome, parts=result.parts, error=result.error)
            if result.was_retried:
                retried.add(block)
        return retried

    def _must_wait_for(self, block: KroneckerBlock) -> bool:
        """Whether a layer under way is waited for at this step; the same on every rank."""
        if not block.solved:
            return True
        age = self.training.steps - self.pending[block].step
        most = self.inverter.staleness
        late = self.drift is not None and age >= self.drift.interval(block) - 1
        return late or (most is not None and age >= most)

    # ------------------------------------------------------------------------------------ agree

    def _agree_on_outcomes(self, pending: PendingAverage) -> dict[KroneckerBlock, Outcome]:
        """Agree with all ranks on finished layers, on the CPU: a device need not be read.

        Gradients have arrived then.
        """
        world = self.training.world
        name = "solve_exchange" if self.waits_for_all else "wait"
        layers = [block for block in self.plan if block in self.pending]
        if self.inverter.deterministic and not any(map(self._must_wait_for, layers)):
            layers = []  # exactly so many steps later: before, there is nothing to agree on
        outcomes = [float(self._outcome(block)) for block in layers]
        message = torch.tensor(outcomes, dtype=torch.float32, device="cpu")
        with stage(name):
            agreement = world.on_cpu().all_reduce_max([message] if layers else [])
        with stage("average_gradients"):
            pending.wait()
        with stage(name):
            agreement.wait()
        agreed = zip(layers, message.tolist(), strict=True)
        return {block: Outcome(int(number)) for block, number in agreed if number > Outcome.PENDING}

    def _outcome(self, block: KroneckerBlock) -> Outcome:
        """What this rank knows of a layer under way."""
        if block.unverified:
            return Outcome.UNVERIFIED
        elsewhere = block not in self.step_plan.to_solve
        if elsewhere and self.training.world.backend == "fake":  # no other rank sends its result
            return Outcome.VALID
        return self.pending[block].outcome

    # --------------------------------------------------------------------- exchange and install

    def _install(
        self, outcomes: Mapping[KroneckerBlock, Outcome]
    ) -> tuple[list[KroneckerBlock], dict[KroneckerBlock, Inverse]]:
        """Use valid inverses from now on.

        Returns the layers that have a new one, and the last ones, if refreshes follow drift.
        """
        installed = [block for block, each in outcomes.items() if each is Outcome.VALID]
        received = self._exchange(installed)
        dampings: dict[KroneckerBlock, LayerDamping | None] = {}
        for block, outcome in outcomes.items():
            solve = self.pending.pop(block)
            self.inverter.forget(block)  # a thread may still work on it, if another rank has failed
            dampings[block] = solve.damped
            if outcome is Outcome.VALID:
                block.mark_solved()
                state = InverseState(solve.step, self.training.steps, solve.option)
                if solve.damped is not None:
                    damped = solve.damped
                    state = replace(state, damping=damped.damping, trace=damped.trace)
                self.states[block] = state
            else:
                self._note_failure(block, outcome, solve.error)

        previous: dict[KroneckerBlock, Inverse] = {}
        for bank in self.step_plan.banks if received else ():
            new = [block for block in bank.blocks if block in received]
            if new:
                for block in new if self.drift is not None else ():
                    if block.inverse is not None:
                        previous[block] = block.inverse
                inverse = self._combined({block: received.pop(block) for block in new}, dampings)
                for block, own in zip(new, inverse.split_layers(new[0].shape.groups), strict=True):
                    block.install_inverse(own)
        return installed, previous

    def _combined(
        self,
        received: dict[KroneckerBlock, dict[str, Decomposition]],
        dampings: Mapping[KroneckerBlock, LayerDamping | None],
    ) -> Inverse:
        """The stacked inverse of layers of a shape, of their decompositions, which are used up."""
        blocks = list(received)
        shape = blocks[0].shape
        parts: dict[str, Decomposition] = {}
        for letter in shape.factor_names:
            columns = zip(*(each.pop(letter) for each in received.values()), strict=True)
            parts[letter] = tuple(as_stack(column).flatten(0, 1) for column in columns)
        like = parts["G"][-1]
        known = [damped for block in blocks if (damped := dampings[block]) is not None]
        gammas = per_group([damped.damping for damped in known], shape.groups, like)
        times = None
        if self.scaled:
            times = per_group([damped.trace for damped in known], shape.groups, like)
        return self.solver.combine(parts, gammas, times)

    def _exchange(
        self, valid: Sequence[KroneckerBlock]
    ) -> dict[KroneckerBlock, dict[str, Decomposition]]:
        """Send decompositions to the layers' gradient workers; returns those of this rank's layers.

        If inverses are computed while training continues, the factors have changed meanwhile. Then
        γ and the trace travel as well. If the communication dtype is narrower, inverse ranks round
        their own, so that all have the same.
        """
        preconditioned = [block for block in valid if self._works_on(block)]
        if self.step_plan.row.size == 1 or not valid:
            return {block: dict(self.pending[block].parts) for block in preconditioned}
        with stage("solve_exchange"):
            return self._delivered(preconditioned)

    def _delivered(
        self, blocks: Sequence[KroneckerBlock]
    ) -> dict[KroneckerBlock, dict[str, Decomposition]]:
        """Send the decompositions of this rank to the ranks of its row, and receive theirs."""
        plan, solver = self.step_plan, self.solver
        dtype, device = self.options.inv_dtype, self.training.device
        ranks = range(plan.row.size)
        shapes: dict[Item, Shapes] = {}
        routes: dict[Item, Route] = {}
        local: dict[Item, Decomposition] = {}
        for block in blocks:
            solve = self.pending[block]
            for letter in block.shape.factor_names:
                item = block, letter
                shapes[item] = solver.sent_shapes(block.shape, letter)
                routes[item] = Route(plan.to_send[item], ranks)
                if letter in solve.parts:
                    local[item] = solver.to_send(solve.parts[letter], plan.wire)
            if not self.is_synchronous:
                item = block, NUMBERS
                shapes[item] = ((2,),)
                routes[item] = routes[block, "A"]
                if "A" in solve.parts and solve.damped is not None:
                    numbers = [solve.damped.damping, solve.damped.trace]
                    each = [torch.as_tensor(n, dtype=dtype, device=device) for n in numbers]
                    local[item] = (torch.stack(each),)

        found = send_tensors(plan.row, shapes, routes, local, dtype, device, plan.wire)
        received: dict[KroneckerBlock, dict[str, Decomposition]] = {}
        for block in blocks:
            parts = received[block] = {}
            for letter in block.shape.factor_names:
                sent = found.pop((block, letter))
                parts[letter] = solver.received(sent, block.shape.dims[letter])
            if not self.is_synchronous:
                # A copy: a view would keep the whole message as long as the inverse.
                damping, trace = found.pop((block, NUMBERS))[0].clone().unbind()
                self._update(block, damped=LayerDamping(damping, trace))
        return received

    def _note_failure(self, block: KroneckerBlock, outcome: Outcome, error: str) -> None:
        """Treat a layer that has no new inverse."""
        training = self.training
        if outcome is Outcome.FAILED:
            block.count_failed_refresh()
            self.num_failures += 1
            if training.is_first_warning(f"failed:{block.name}"):
                kept = "the base optimizer trains it alone"
                if block.solved:
                    kept = "its last inverse is kept"
                reason = f" ({error})" if error else ""
                training.warn(
                    f"the factors of layer {block.name!r} could not be decomposed at step "
                    f"{training.steps}{reason}; {kept} until a refresh succeeds"
                )
            return
        self.states.pop(block, None)
        if outcome is Outcome.NO_STATISTICS:
            block.drop_inverse_at_refresh(no_statistics=block.status is LayerStatus.NOT_CAPTURED)
            return
        self.layers.unexplained_elsewhere(block)
        had_inverse = block.solved
        block.restart_averages()
        block.drop_inverse_at_refresh(no_statistics=True)
        if had_inverse:
            training.publish()  # without the factors

    # ------------------------------------------------------------------------------ checkpoints

    def snapshot_factors(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Copy the factors that layers under way started from; the running averages will change.

        They go into checkpoints, which any rank can write.
        """
        for block in blocks:
            solve = self.pending.get(block)
            if solve is not None and solve.factors is None and block.factors is not None:
                self._update(block, factors=block.read_factors(block.saved_factors()))

    def load(self, found: Mapping[KroneckerBlock, LoadedInverse], damping: Damping) -> None:
        """Install the inverses of a checkpoint; their layers are refreshed when they are due.

        ``damping`` is the option γ at the last refresh.
        """
        self.damping_option = damping
        for block, loaded in found.items():
            block.mark_solved()
            self.states[block] = loaded.state
            if loaded.inverse is not None:
                block.install_inverse(loaded.inverse)

    def resubmit(self, found: Mapping[KroneckerBlock, PendingInverse]) -> None:
        """Begin again what was being computed when a checkpoint was written."""
        for block, solve in found.items():
            assert solve.factors is not None
            self.pending[block] = solve
            self._begin({block: solve.factors})
        self.inverter.finish()

    def drop(self, missing: Iterable[KroneckerBlock]) -> None:
        """Refresh layers at the next step, because some rank lacks part of a checkpoint."""
        for block in missing:
            block.drop_inverse()
            self.inverter.forget(block)
            self.pending.pop(block, None)
            self.states.pop(block, None)
            self.requested.add(block)


Rule: TypeAlias = Callable[
    [Inverses, Mapping[KroneckerBlock, PendingInverse]], Sequence[KroneckerBlock]
]
"""Chooses among the layers that are due those that are computed; the same on every rank."""

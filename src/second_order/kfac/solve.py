"""Damped inverses of the layers' factors: computed, agreed on, exchanged, put to use.

submit    each inverse rank hands its factors of the layers that are due to its inverter
collect   it takes what the inverter has finished: at once, or from threads
agree     all ranks find the largest verdict on each layer
exchange  the decompositions of valid layers go to the layers' gradient workers
install   all gradient workers use the new inverses from this step on; the other layers keep what
          they have, or nothing

The inverter is :class:`SynchronousInverter`, or the threads of :mod:`solve_async`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.fsdp import is_dtensor
from second_order.distributed.world import Shapes, deliver_parts
from second_order.errors import DecompositionError
from second_order.kfac.group_options import values_by_layer
from second_order.kfac.layers import Layers
from second_order.kfac.plan import Item, StepPlan
from second_order.kfac.precondition import compare, last_results, precondition
from second_order.kfac.schedule import Drift
from second_order.kronecker.block import Bank, KroneckerBlock, LayerStatus, of_groups
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.solvers import (
    RESIDUAL_TOLERANCE,
    SOLVERS,
    Attempts,
    Damping,
    Decomposition,
    EigenSolver,
    Inverse,
    InverseSolver,
    Problem,
)
from second_order.kronecker.storage import as_stack, numbers_of
from second_order.optimizers.config import KFACOptions, check_damping
from second_order.training.averaging import PendingAverage
from second_order.training.context import Training
from second_order.utils.checks import as_scalar
from second_order.utils.stages import stage

__all__ = [
    "Collected",
    "Job",
    "LoadedInverse",
    "Refresh",
    "Result",
    "Solve",
    "Solves",
    "SynchronousInverter",
    "Verdict",
    "stacked_means",
]

MAX_CONSECUTIVE_FAILURES = 3  # refreshes in a row without an inverse of a layer

Solver: TypeAlias = EigenSolver | InverseSolver


class Verdict(IntEnum):
    """A rank's verdict on a layer whose inverse is computed; the largest of all ranks' counts.

    The layer's inverse ranks know whether there are statistics; any rank may know whether pairs
    without an example have ever been captured.
    """

    OPEN = 0  # not finished yet, or not on this rank
    SILENT = 1  # no pair of statistics has ever been captured
    UNSEEN = 2  # pairs have been captured, but none with an example
    SOUND = 3  # a valid decomposition
    SPARED = 4  # keeps its inverse: its trace has hardly moved
    SETTLED = 5  # and its trace is not looked at from now on
    FAILED = 6  # no valid decomposition
    LOST = 7  # a factor is missing where it should be stored
    UNEXPLAINED = 8  # its pairs do not reproduce its gradient
    RAISED = 9  # an exception on a thread


@dataclass(frozen=True)
class LoadedInverse:
    """A checkpoint's inverse; ``inverse`` is None on ranks that do not precondition with it."""

    step: int  # of the factors that it was computed from
    delay: int  # steps until it was installed
    damping: float = 0.0
    scale: float = 0.0
    inverse: Inverse | None = None


@dataclass(frozen=True)
class Damped:
    """The damping of a layer."""

    damping: Damping  # γ
    trace: Tensor  # the mean eigenvalue of A ⊗ G + γ
    added: Sequence[Tensor | None] = ()  # to the factors' diagonals


@dataclass(frozen=True)
class Solve:
    """A layer whose inverse is being computed, from the factors of a step."""

    step: int
    option: Damping  # γ as the option had it at that step
    mean_curvature: float  # of all layers, then
    damped: Damped | None = None  # on ranks that know it
    verdict: Verdict = Verdict.OPEN
    factors: KroneckerFactors | None = None  # of that step, once the running averages have changed


@dataclass(frozen=True)
class Job:
    """The factors of a layer that this rank decomposes, by letter."""

    block: KroneckerBlock
    problems: Mapping[str, Problem]
    cost: float


@dataclass(frozen=True)
class Result:
    """What has come of a job: decompositions by letter, without those that failed."""

    block: KroneckerBlock
    parts: Mapping[str, Decomposition]
    error: BaseException | None = None  # on a thread


@dataclass(frozen=True)
class Collected:
    """Finished jobs, and the numbers that were read from the device with them, if any were."""

    results: Sequence[Result]
    numbers: Sequence[Sequence[float]] | None = None
    retried: bool = False  # whether a first attempt at any of them was not valid


@dataclass(frozen=True)
class Refresh:
    """What a refresh has changed.

    Attributes:
        installed: The layers that have a new inverse; the same on every rank.
        previous: P by the last inverse, of layers that this rank preconditions; or the last
            inverse, where the gradient is sharded.
        changes: P₀ · P, |P₀|² and |P|² of layers of which they are known already.
        numbers: The numbers that were to be read, if a device has been read.
        news: The largest of all ranks' news.
    """

    installed: Sequence[KroneckerBlock] = ()
    previous: Mapping[KroneckerBlock, Tensor | Inverse] = field(default_factory=dict)
    changes: Mapping[KroneckerBlock, Sequence[float]] = field(default_factory=dict)
    numbers: Sequence[Sequence[float]] | None = None
    news: Sequence[float] = ()


class SynchronousInverter:
    """Decomposes at once: factors of one size together, and with one read of the device.

    ``staleness`` is the number of steps after which a layer is waited for, None for no bound; if
    the inverter is ``deterministic``, layers are installed then, and never before.
    """

    staleness: int | None = 0
    deterministic = True

    def __init__(self, training: Training, options: KFACOptions, solver: Solver) -> None:
        self._solver = solver
        self._options = options
        self.clear()

    def clear(self) -> None:
        """Forget what has been submitted."""
        self._jobs: Sequence[Job] = ()
        self._items: list[Item] = []
        self._attempts: Attempts | None = None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue one attempt at each factor on the device."""
        options = self._options
        # Factors of equal layers lie next to each other, so that they are equal in their batches.
        kinds = {shape: i for i, shape in enumerate(dict.fromkeys(j.block.shape for j in jobs))}
        found = [(job, letter) for job in jobs for letter in job.problems]
        found.sort(key=lambda each: (kinds[each[0].block.shape], each[1]))
        self._jobs = jobs
        self._items = [(job.block, letter) for job, letter in found]
        problems = [job.problems[letter] for job, letter in found]
        self._attempts = None
        if jobs:
            self._attempts = self._solver.decompose(problems, options.inv_dtype)

    @property
    def attempted(self) -> Mapping[Item, Decomposition]:
        """The attempts, before they are known to be valid."""
        parts = [] if self._attempts is None else self._attempts.parts
        return dict(zip(self._items, parts, strict=True))

    def collect(
        self, waits: Callable[[KroneckerBlock], bool], reads: Sequence[Sequence[Tensor]]
    ) -> Collected:
        """Read the errors, and ``reads``, and decompose what failed in another way."""
        attempts, jobs = self._attempts, self._jobs
        if attempts is None:
            return Collected(())
        errors, *numbers = numbers_of([attempts.errors], *reads)
        found = attempts.finish(errors)
        parts: dict[KroneckerBlock, dict[str, Decomposition]] = {job.block: {} for job in jobs}
        for (block, letter), decomposition in zip(self._items, found, strict=True):
            if decomposition is not None:
                parts[block][letter] = decomposition
        retried = not all(error < RESIDUAL_TOLERANCE for error in errors)
        self.clear()
        results = [Result(block, each) for block, each in parts.items()]
        return Collected(results, numbers, retried)

    def finish(self) -> None:
        """Do nothing: all is collected at the step at which it is submitted."""

    def close(self) -> None:
        """Do nothing: there are no threads."""


def stacked_means(
    factors: Mapping[KroneckerBlock, KroneckerFactors],
) -> list[tuple[list[KroneckerBlock], Tensor]]:
    """Layers of equal shape, and their factors' mean eigenvalues, ``(factors, layers, groups)``."""
    same_shape: dict[object, list[KroneckerBlock]] = {}
    for block, each in factors.items():
        means = each.of_letters
        key = means.shape, means.dtype, means.device, block.shape.exact
        same_shape.setdefault(key, []).append(block)
    return [(b, torch.stack([factors[x].of_letters for x in b], 1)) for b in same_shape.values()]


class Solves:
    """The inverses of a training's layers, and the layers whose inverses are being computed."""

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        layers: Layers,
        drift: Drift | None = None,
        traces: Any = None,
        inverter: Callable[..., Any] | None = None,
    ) -> None:
        self.training = training
        self.options = options
        self.layers = layers
        self.drift = drift
        self.traces = traces
        self.solver = SOLVERS[options.solver]
        make: Callable[..., Any] = inverter or SynchronousInverter
        self.inverter = make(training, options, self.solver)
        self.waits = self.inverter.staleness == 0
        self.solves_at_once = inverter is None
        self.damping: Damping = math.nan  # γ as the option has it
        self.own_dampings: dict[KroneckerBlock, float] = {}  # of layers whose groups have one
        self.failed = 0  # number of inverses without a valid decomposition, of all layers so far
        self.restart(StepPlan({}, training.world, training.world))

    def restart(self, step: StepPlan) -> None:
        """Compute all inverses of a plan again, from other factors or on other ranks."""
        self.step = step
        self.plan = step.layers
        self.wanted: set[KroneckerBlock] = set(self.plan)  # layers that are due out of turn
        self.under_way: dict[KroneckerBlock, Solve] = {}
        self._results: dict[KroneckerBlock, Result] = {}  # of these, on this rank
        self._errors: dict[KroneckerBlock, str] = {}  # on this rank, of those that failed
        self.inverter.clear()
        # Of the inverses in use: when they were put to use, the step of their factors, and γ and
        # what they are multiplied by on the layer's gradient workers.
        self.installed_at: dict[KroneckerBlock, int] = {}
        self.taken_at: dict[KroneckerBlock, int] = {}
        self.dampings: dict[KroneckerBlock, Damping] = {}
        self.scales: dict[KroneckerBlock, Damping] = {}
        if self.traces is not None:
            self.traces.forget()

    def _forget_under_way(self) -> None:
        self.under_way.clear()
        self._results.clear()
        self.inverter.clear()

    def note_damping(self, damping: Damping) -> None:
        """Take over the damping of the last refresh, of a checkpoint."""
        self.damping = damping

    def close(self) -> None:
        """End threads, and forget all layers."""
        self.inverter.close()
        self.restart(StepPlan({}, self.training.world, self.training.world))

    @property
    def scaled(self) -> bool:
        """Whether inverses are multiplied by the mean eigenvalue of the damped curvature."""
        return self.options.preconditioner_scale == "gradient"

    @property
    def heads(self) -> int:
        """Numbers that travel before a layer's A, γ and its scale.

        None where all workers know them: of inverses computed beside training, the factors have
        changed since.
        """
        if self.solves_at_once or self.training.world.size == 1:
            return 0
        return 1 + self.scaled

    # ------------------------------------------------------------------------------- one refresh

    def refresh(
        self,
        due: Sequence[KroneckerBlock],
        pending: PendingAverage,
        mean_curvature: float,
        news: Sequence[float] = (),
        reads: Sequence[Sequence[Tensor]] = (),
    ) -> Refresh:
        """Compute the inverses that are due, and install what the ranks agree is finished.

        Gradients have arrived before a part of the world communicates: NCCL's communicators are not
        to be used at the same time.

        Args:
            due: The layers that are due.
            pending: The average of the gradients.
            mean_curvature: Of all layers, at their last refresh.
            news: Numbers of which all ranks get the largest, as many on every rank.
            reads: Groups of numbers on the device, to read if the device is read anyway.

        Raises:
            DecompositionError: On every rank, if a thread has raised, or a layer could not be
                decomposed too often.
        """
        if self.wanted:
            due = [block for block in self.plan if block in self.wanted or block in due]
        try:
            if due:
                damping: Any = self.options.damping
                if callable(damping):
                    damping = damping(self.training.steps)
                    check_damping(damping)  # everywhere, before anything is computed
                self.damping = as_scalar(damping)
                self.own_dampings = values_by_layer(self.training.groups, self.plan, "damping")
            landing = set(self.under_way)
            with stage("solve"):
                new = [block for block in due if block not in landing]
                self._submit(new, mean_curvature)
                known, numbers = self._collect(reads)
            verdicts, news = self._agree(pending, news)
            with stage("solve"):
                installed, previous = self._install(verdicts, known)
            if due:
                self.wanted = set()
                again = [b for b in due if b in landing and b not in self.under_way and b.solved]
                with stage("solve"):
                    self._submit(again, mean_curvature)
        except DecompositionError:
            raise
        except BaseException:  # layers under way may have lost their results
            self._forget_under_way()
            self.wanted = set(self.plan)
            raise

        self.layers.tell_of_silence(list(verdicts))
        most = MAX_CONSECUTIVE_FAILURES
        hopeless = [repr(block.name) for block in verdicts if block.state.failures >= most]
        if hopeless:
            raise DecompositionError(
                f"the factors of {', '.join(hopeless)} could not be decomposed {most} refreshes in "
                f"a row, in float32 or in float64; raise damping, lower lr, or name them in "
                f"skip_layers"
            )
        return Refresh(installed, previous, known, numbers, news)

    # ----------------------------------------------------------------------- submit and collect

    def _submit(self, blocks: Sequence[KroneckerBlock], mean_curvature: float) -> None:
        """Begin to compute the inverses of some layers, from their running averages."""
        factors = {block: block.ensure_factors() for block in blocks}
        for block in blocks:
            self._results.pop(block, None)
            option = self.own_dampings.get(block, self.damping)
            self.under_way[block] = Solve(self.training.steps, option, mean_curvature)
        self._begin(factors, mean_curvature)

    def _begin(
        self, factors: Mapping[KroneckerBlock, KroneckerFactors], mean_curvature: float
    ) -> None:
        """Hand this rank's factors to the inverter; find γ of its layers, and of some others."""
        local = [block for block in factors if block in self.step.to_solve]
        others = [b for b in factors if b not in self.step.to_solve and self._knows_damping(b)]
        try:
            ready = self._with_statistics(local)
            damped = self._damped({b: factors[b] for b in (*ready, *others)}, mean_curvature)
            for block, each in damped.items():
                self._update(block, damped=each)
            if self.traces is not None:
                traces = {block: each.trace for block, each in damped.items()}
                options = {block: self.under_way[block].option for block in traces}
                own = {b: x for b, x in options.items() if not isinstance(x, Tensor)}
                spared = self.traces.keeping(traces, self.damping, own, ready)
                for block, verdict in spared.items():
                    self._update(block, verdict=verdict)
                ready = [block for block in ready if block not in spared]
            self.inverter.submit([self._job(block, factors[block]) for block in ready])
        except Exception as error:  # an exception must not part this rank from the others
            unknown = [block for block in others if self.under_way[block].damped is None]
            self._fail([*local, *unknown], error)

    def _fail(self, blocks: Iterable[KroneckerBlock], error: Exception) -> None:
        for block in blocks:
            if self.under_way[block].verdict is Verdict.OPEN:
                self._update(block, verdict=Verdict.FAILED)
                self._errors[block] = f" ({type(error).__name__}: {error})"

    def _update(self, block: KroneckerBlock, **changed: Any) -> None:
        self.under_way[block] = replace(self.under_way[block], **changed)

    def _knows_damping(self, block: KroneckerBlock) -> bool:
        """Whether this rank finds γ of a layer that others decompose.

        With a refresh by trace every rank knows the traces, as any of them can write a checkpoint.
        """
        works = self.training.world.rank in self.plan[block].workers
        return self.traces is not None or (works and not self.heads)

    def _with_statistics(self, local: Sequence[KroneckerBlock]) -> list[KroneckerBlock]:
        """The layers of this rank that have statistics, most likely where that costs no read."""
        ready: list[KroneckerBlock] = []
        unknown: list[KroneckerBlock] = []
        for block in local:
            if block.lost:
                self._update(block, verdict=Verdict.LOST)
            elif block.solved or (self.solves_at_once and captured(block)):
                ready.append(block)
            else:
                unknown.append(block)
        if unknown:
            device = self.training.device
            weights = [block.ensure_factors().weight.to(device) for block in unknown]
            for block, weight in zip(unknown, torch.stack(weights).tolist(), strict=True):
                if weight > 0:
                    ready.append(block)
                else:
                    self._update(block, verdict=_without_statistics(block))
        return ready

    def _damped(
        self, factors: Mapping[KroneckerBlock, KroneckerFactors], mean_curvature: float
    ) -> dict[KroneckerBlock, Damped]:
        """γ of layers, and what their factors get of it; of layers of equal shape at once."""
        options = self.options
        found: dict[KroneckerBlock, Damped] = {}
        for blocks, means in stacked_means(factors):
            curvature = means.prod(0).mean(-1, keepdim=True)
            damping: Any = self._option(blocks, curvature)
            if options.relative_damping:  # where gradients vanish there is no curvature
                positive = curvature.masked_fill(~(curvature > 0), 1.0)
                damping = damping * positive.clamp_min(options.floor * mean_curvature)
            each: Iterable[Damping] = repeat(damping)
            if isinstance(damping, Tensor) and damping.dim():
                each = damping.squeeze(-1).unbind()
            on_factors = self.solver.dampings(means, damping, blocks[0].shape.exact)
            columns = [repeat(None) if x is None else x.unbind() for x in on_factors]
            traces = (curvature + damping).squeeze(-1).unbind()
            for block, gamma, trace, *added in zip(blocks, each, traces, *columns, strict=False):
                found[block] = Damped(gamma, trace, added)
        return found

    def _option(self, blocks: Sequence[KroneckerBlock], like: Tensor) -> Damping:
        """The option γ at the step of these layers' factors, ``(layers, 1)`` where they differ."""
        options = [self.under_way[block].option for block in blocks]
        first = options[0]
        numbers = not any(isinstance(option, Tensor) for option in options)
        if all(option is first or (numbers and option == first) for option in options):
            return first.to(like) if isinstance(first, Tensor) else first
        return torch.stack(
            [torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in options]
        ).unsqueeze(-1)

    def _job(self, block: KroneckerBlock, factors: KroneckerFactors) -> Job:
        """The factors of a layer that this rank decomposes, with their damping."""
        shape, damped = block.shape, self.under_way[block].damped
        assert damped is not None
        problems: dict[str, Problem] = {}
        for letter in self.step.to_solve[block]:
            problems[letter] = Problem(
                shape.groups,
                shape.dims[letter],
                self.options.inv_dtype,
                block.weight.device,
                factors.entries[letter],
                added=damped.added[shape.letters.index(letter)],
                is_diagonal=letter in shape.diagonals,
            )
        return Job(block, problems, self.step.costs[block])

    def _collect(
        self, reads: Sequence[Sequence[Tensor]]
    ) -> tuple[dict[KroneckerBlock, Sequence[float]], Sequence[Sequence[float]] | None]:
        """Take what is finished; returns what it changes, and the numbers, if these were read."""
        unsure = [
            block
            for block in self.under_way
            if self.solves_at_once and not block.solved and block in self.step.to_solve
        ]
        try:
            changes = self._changes()
            weights = [block.ensure_factors().weight for block in unsure]
            collected = self.inverter.collect(
                self._must_land, [weights, list(changes.values()), *reads]
            )
        except Exception as error:
            self._fail([b for b in self.under_way if b in self.step.to_solve], error)
            self.inverter.clear()
            return {}, None
        for result in collected.results:
            if result.block in self.under_way:  # else it has been agreed on without it
                self._results[result.block] = result
        if collected.numbers is None:
            return {}, None

        known, changed, *numbers = collected.numbers
        for block, weight in zip(unsure, known, strict=True):
            if not weight > 0 and self.under_way[block].verdict is Verdict.OPEN:
                self._update(block, verdict=_without_statistics(block))
        triples = zip(changed[0::3], changed[1::3], changed[2::3], strict=True)
        if collected.retried:  # the attempts that were compared are not what is installed
            return {}, numbers or None
        return dict(zip(changes, triples, strict=True)), numbers or None

    def _changes(self) -> dict[KroneckerBlock, Tensor]:
        """What the attempted inverses would change, to be read with the errors on a device.

        Nothing where several processes have the parts, or a look costs more than to wait later.
        """
        alone = self.training.world.size == 1 and self.training.device.type != "cpu"
        parts = self.inverter.attempted if alone and self.drift is not None else {}
        changes: dict[KroneckerBlock, Tensor] = {}
        if () in parts.values():
            return changes
        dtype = self.options.inv_dtype
        solved = {block for block, _ in parts}
        for bank in self.step.banks:
            new = [b for b in bank.blocks if b in solved and b.inverse is not None]
            new = [b for b in new if b.has_gradient and not any(map(is_dtensor, b.params))]
            if new:
                attempts = []
                for block in new:
                    found = {letter: parts[block, letter] for letter in block.shape.letters}
                    attempts.append(self._unpacked(block, found))
                candidate = Bank(new, self._combined(new[0].shape, attempts))
                previous = last_results(bank, new, dtype)
                changes |= compare(precondition([candidate], dtype), previous, dtype)
        return changes

    def _must_land(self, block: KroneckerBlock) -> bool:
        """Whether a layer under way is waited for at this step; the same on every rank."""
        if self.solves_at_once or not block.solved:
            return True
        age, most = self.training.steps - self.under_way[block].step, self.inverter.staleness
        late = self.drift is not None and age >= self.drift.interval(block) - 1
        return late or (most is not None and age >= most)

    # ------------------------------------------------------------------------------------ agree

    def _agree(
        self, pending: PendingAverage, news: Sequence[float]
    ) -> tuple[dict[KroneckerBlock, Verdict], Sequence[float]]:
        """Agree with all ranks, on the CPU: a device need not be read.

        Returns the verdicts, and the largest news. Gradients have arrived then.
        """
        world = self.training.world
        name = "solve_exchange" if self.waits else "wait"
        # Exactly so many steps later: before, there is nothing to agree on.
        possible = not self.inverter.deterministic or any(map(self._must_land, self.under_way))
        agrees = bool(news) or (possible and bool(self.under_way))
        numbers: list[float] = []
        if agrees:
            for block in self.plan:
                solve = self.under_way.get(block)
                numbers.append(0.0 if solve is None else float(self._verdict(block, solve)))
            numbers += news
        if agrees and world.size > 1:
            with stage(name):
                message = torch.tensor(numbers, dtype=torch.float32, device="cpu")
                agreement = world.on_cpu().all_reduce_max([message])
        with stage("average_gradients"):
            pending.wait()
        if not agrees:
            return {}, news
        if world.size > 1:
            with stage(name):
                agreement.wait()
                numbers = message.tolist()
        verdicts: dict[KroneckerBlock, Verdict] = {}
        for block, number in zip(self.plan, numbers, strict=False):
            if number > Verdict.OPEN:
                verdicts[block] = Verdict(int(number))
        return verdicts, numbers[len(self.plan) :]

    def _verdict(self, block: KroneckerBlock, solve: Solve) -> Verdict:
        """This rank's verdict on a layer under way."""
        if block.state.unverified:
            return Verdict.UNEXPLAINED
        if solve.verdict is not Verdict.OPEN:
            return solve.verdict
        result = self._results.get(block)
        if result is not None:
            if result.error is not None:
                return Verdict.RAISED
            whole = len(result.parts) == len(self.step.to_solve[block])
            return Verdict.SOUND if whole else Verdict.FAILED
        if block in self.step.to_solve or not self._must_land(block):
            return Verdict.OPEN
        if self.training.world.backend == "fake":  # no other rank sends its result
            return Verdict.SOUND
        return Verdict.UNSEEN if captured(block) else Verdict.OPEN

    def _raise_errors(self, raised: Sequence[KroneckerBlock]) -> None:
        """Raise DecompositionError on every rank, for an error on a thread of any."""
        if not raised:
            return
        results = [self._results[block] for block in raised if block in self._results]
        error = next((each.error for each in results if each.error is not None), None)
        self._forget_under_way()  # other layers', too: one error is raised once
        where = "a thread of another process" if error is None else "a thread"
        said = "" if error is None else f": {type(error).__name__}: {error}"
        names = ", ".join(repr(block.name) for block in raised)
        raise DecompositionError(f"{where} that solves for {names} has raised{said}") from error

    # --------------------------------------------------------------------- exchange and install

    def _install(
        self,
        verdicts: Mapping[KroneckerBlock, Verdict],
        changes: Mapping[KroneckerBlock, Sequence[float]],
    ) -> tuple[list[KroneckerBlock], dict[KroneckerBlock, Tensor | Inverse]]:
        """Put valid inverses to use.

        Returns the layers that have a new one, and what the last ones make of the gradients here,
        unless the ``changes`` are known.
        """
        self._raise_errors([b for b, each in verdicts.items() if each is Verdict.RAISED])
        installed = [block for block, each in verdicts.items() if each is Verdict.SOUND]
        received = self._exchanged(installed)
        solves = {block: self.under_way.pop(block) for block in verdicts}
        for block, verdict in verdicts.items():
            self._results.pop(block, None)
            if self.traces is not None:
                self.traces.installed(block, verdict)
            if verdict is Verdict.SOUND:
                block.installed()
                self.installed_at[block] = self.training.steps
                self.taken_at[block] = solves[block].step
            elif verdict not in (Verdict.SPARED, Verdict.SETTLED):
                self._note_failure(block, verdict)
            self._errors.pop(block, None)

        previous: dict[KroneckerBlock, Tensor | Inverse] = {}
        for bank in self.step.banks if received else ():
            new = [block for block in bank.blocks if block in received]
            if not new:
                continue
            if self.drift is not None:
                unknown = [block for block in new if block not in changes]
                previous |= last_results(bank, unknown, self.options.inv_dtype)
            for block in new:
                self.dampings[block] = received[block].damping
                scale = received[block].scale
                if scale is not None:
                    self.scales[block] = scale
            inverse = self._combined(new[0].shape, [received.pop(block) for block in new])
            for block, own in zip(new, inverse.by_layer(new[0].shape.groups), strict=True):
                block.use(own)
        return installed, previous

    def _combined(self, shape: FactorShape, received: Sequence[_Received]) -> Inverse:
        """The stacked inverses of layers of a shape, of their decompositions, which are used up."""
        parts: dict[str, Decomposition] = {}
        for letter in shape.letters:
            columns = zip(*(each.parts.pop(letter) for each in received), strict=True)
            parts[letter] = tuple(as_stack(column).flatten(0, 1) for column in columns)
        like = parts["G"][-1]
        dampings = of_groups([each.damping for each in received], shape.groups, like)
        scales = [each.scale for each in received if each.scale is not None]
        times = of_groups(scales, shape.groups, like) if scales else None
        return self.solver.combine(parts, dampings, times)

    def _exchanged(self, valid: Sequence[KroneckerBlock]) -> dict[KroneckerBlock, _Received]:
        """Decompositions of the layers that this rank preconditions, and their γ and scale.

        Where they travel in another dtype, inverse ranks round theirs: all have the same.
        """
        options, device, plan = self.options, self.training.device, self.step
        dtype, alone = options.inv_dtype, plan.row.size == 1
        local: dict[Item, tuple[Tensor, ...]] = {}
        shapes: dict[Item, Shapes] = {}
        for block in valid:
            shape, result = block.shape, self._results.get(block)
            for letter in shape.letters:
                heads, diagonal = self.heads if letter == "A" else 0, letter in shape.diagonals
                if not alone:
                    sizes = shape.groups, shape.dims[letter], diagonal
                    shapes[block, letter] = ((),) * heads + tuple(self.solver.sent_shapes(*sizes))
                if result is None or letter not in result.parts:
                    continue
                parts = result.parts[letter]
                if not alone:
                    parts = self.solver.to_send(parts, plan.wire)
                damped = self.under_way[block].damped
                if heads and damped is not None:
                    numbers = [damped.damping, damped.trace][:heads]
                    parts = (
                        *(torch.as_tensor(n, dtype=dtype, device=device) for n in numbers),
                        *parts,
                    )
                local[block, letter] = parts
        if not alone and valid:
            with stage("solve_exchange"):
                ranks = range(plan.row.size)
                known = [item for item in shapes if item in plan.to_send]
                routes = {item: (plan.to_send[item], ranks) for item in known}
                local = deliver_parts(plan.row, shapes, routes, local, dtype, device, plan.wire)
        received: dict[KroneckerBlock, _Received] = {}
        for block in valid:
            if self.training.world.rank in self.plan[block].workers:
                found = {letter: local.pop((block, letter)) for letter in block.shape.letters}
                received[block] = self._unpacked(block, found)
        return received

    def _unpacked(self, block: KroneckerBlock, parts: dict[str, Decomposition]) -> _Received:
        """The decompositions of a layer, with γ and the scale, as sent or as known here."""
        numbers: list[Damping] = []
        if self.heads:
            # Copies: a view would keep the whole message as long as the inverse.
            numbers += [x.to(self.options.inv_dtype, copy=True) for x in parts["A"][: self.heads]]
            parts["A"] = parts["A"][self.heads :]
        else:
            damped = self.under_way[block].damped
            assert damped is not None
            numbers += [damped.damping, damped.trace]
        if self.step.row.size > 1:
            dims = block.shape.dims
            parts = {k: self.solver.received(found, dims[k]) for k, found in parts.items()}
        return _Received(parts, numbers[0], numbers[1] if self.scaled else None)

    def _note_failure(self, block: KroneckerBlock, verdict: Verdict) -> None:
        """Treat a layer that has no new inverse."""
        training = self.training
        absent = verdict in (Verdict.SILENT, Verdict.UNEXPLAINED)
        if verdict is Verdict.UNEXPLAINED:
            self.layers.unexplained_elsewhere(block)
            had = block.solved
            block.forget()
            block.lost_inverse(absent)
            if had:
                training.publish()  # without the factors
        elif verdict is Verdict.LOST:
            training.warn(
                f"a factor of layer {block.name!r} is lost: the process that should keep it has "
                f"not got it, from a checkpoint written without consolidate(), perhaps; the base "
                f"optimizer trains the layer alone until its statistics have been taken anew"
            )
            block.forget()
            block.lost_inverse(absent)
            self.layers.take_all_at(training.steps + 1)
            training.publish()  # without the lost factors
        elif verdict is not Verdict.FAILED:
            block.lost_inverse(absent)
        else:
            block.refresh_failed()
            self.failed += 1
            if training.first_time(f"failed:{block.name}"):
                kept = "its last inverse is kept"
                kept = kept if block.solved else "the base optimizer trains it alone"
                training.warn(
                    f"the factors of layer {block.name!r} could not be decomposed at step "
                    f"{training.steps}{self._errors.get(block, '')}; {kept} until a refresh "
                    f"succeeds"
                )

    # ------------------------------------------------------------------------------ checkpoints

    def keep_snapshots(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Copy the factors that layers under way started from; the running averages will change.

        They go into checkpoints, which any rank can write.
        """
        for block in blocks:
            solve = self.under_way.get(block)
            if solve is not None and solve.factors is None and block.factors is not None:
                self._update(block, factors=block.read_factors(block.saved_factors()))

    def take_over(self, found: Mapping[KroneckerBlock, LoadedInverse]) -> None:
        """Install the inverses of a checkpoint; their layers are refreshed when they are due."""
        for block, loaded in found.items():
            block.installed()
            self.taken_at[block] = loaded.step
            self.installed_at[block] = loaded.step + loaded.delay
            if loaded.inverse is not None:
                self.dampings[block] = loaded.damping
                block.use(loaded.inverse)
                if self.scaled:
                    self.scales[block] = block.ensure_factors().weight.new_tensor(loaded.scale)

    def resubmit(self, found: Mapping[KroneckerBlock, Solve]) -> None:
        """Begin again what was being computed when a checkpoint was written."""
        for block, solve in found.items():
            assert solve.factors is not None
            self.under_way[block] = solve
            self._begin({block: solve.factors}, solve.mean_curvature)
        self.inverter.finish()

    def drop_missing(self, missing: Iterable[KroneckerBlock]) -> None:
        """Refresh layers at the next step, because some rank lacks part of a checkpoint."""
        for block in missing:
            block.drop_inverse()
            self.under_way.pop(block, None)
            self.taken_at.pop(block, None)
            self.installed_at.pop(block, None)
            self.wanted.add(block)
            if self.traces is not None:
                self.traces.forget_layer(block)


@dataclass(frozen=True)
class _Received:
    """The decompositions of a layer that this rank preconditions, its γ, and its scale."""

    parts: dict[str, Decomposition]
    damping: Damping
    scale: Damping | None


def _without_statistics(block: KroneckerBlock) -> Verdict:
    """The verdict on a layer without statistics; the pairs of a dead layer have been captured."""
    absent = block.state.status in (LayerStatus.NOT_CAPTURED, LayerStatus.UNVERIFIED)
    return Verdict.SILENT if absent else Verdict.UNSEEN


def captured(block: KroneckerBlock) -> bool:
    """Whether this process has captured a pair of a layer that is of use."""
    return block.state.status is LayerStatus.CAPTURED

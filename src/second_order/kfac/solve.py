"""Damped inverses of the layers' factors: solved, agreed on, installed.

solve     each solver decomposes its factors; refreshed by trace, it spares layers that have hardly
          moved
agree     all ranks hear the greatest verdict on each layer
install   decompositions go to the gradient workers of the layers that are solved, and are put to
          use by all of them at this step; the others keep what they have, or nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.training import PendingAverage, Training
from second_order.distributed.world import Shapes, deliver_parts
from second_order.errors import DecompositionError
from second_order.kfac.group_options import values_by_layer
from second_order.kfac.layers import Layers
from second_order.kfac.plan import Item, StepPlan
from second_order.kfac.schedule import Drift
from second_order.kronecker.bank import of_groups
from second_order.kronecker.block import KroneckerBlock, LayerStatus
from second_order.kronecker.decompositions import (
    RESIDUAL_TOLERANCE,
    Attempts,
    Decomposition,
    Problem,
)
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.solvers import SOLVERS, Damping, Inverse
from second_order.kronecker.stacks import as_stack, in_groups, numbers_of
from second_order.optimizers.config import KFACOptions, check_damping
from second_order.options import as_scalar
from second_order.sharded import is_dtensor
from second_order.stages import stage

__all__ = [
    "Asked",
    "FactorCopies",
    "LoadedInverse",
    "Refreshed",
    "Snapshot",
    "Solve",
    "Solved",
    "Solves",
    "Verdict",
    "stacked_means",
]

MAX_CONSECUTIVE_FAILURES = 3  # refreshes in a row without an inverse of a layer
PART_BYTES = 64 * 2**20  # bytes of full matrices that are refreshed together on one process

Solved: TypeAlias = dict[str, Decomposition]
"""A layer's decompositions, by the factors' letters; without those that failed."""

Refreshed: TypeAlias = tuple[Sequence[float], list[KroneckerBlock]]
"""All ranks' news, and the layers that have been agreed on."""


class Verdict(IntEnum):
    """A rank's verdict on a layer that is to be solved; the greatest of all ranks' counts.

    The layer's solvers know whether there are statistics; any rank may know whether pairs without
    an example have ever been captured.
    """

    OPEN = 0  # not solved yet, or not by this rank
    SILENT = 1  # no pair of statistics has ever come
    UNSEEN = 2  # pairs have come, but none with an example
    SOUND = 3
    SPARED = 4  # not to be solved: its trace has hardly moved
    SETTLED = 5  # nor to be watched from now on
    FAILED = 6
    LOST = 7  # a factor is missing where it should be kept
    UNEXPLAINED = 8  # its pairs do not explain its gradient
    RAISED = 9  # an exception on a thread


@dataclass(frozen=True)
class FactorCopies:
    """A layer's factors as they were at a step, by letter, and their mean eigenvalues."""

    stored: Mapping[str, Tensor | None]
    means: Tensor


@dataclass(frozen=True)
class LoadedInverse:
    """A checkpoint's inverse; ``inverse`` is None on ranks that do not precondition with it."""

    step: int  # of the factors that it was computed from
    delay: int  # steps until it was installed
    damping: float = 0.0
    scale: float = 0.0
    inverse: Inverse | None = None


@dataclass(frozen=True)
class Snapshot:
    """The factors of a solve that was in progress when a checkpoint was written."""

    step: int
    damping: float  # γ as the option had it then
    mean_curvature: float  # of all layers, then
    factors: KroneckerFactors | None  # None if the checkpoint does not have them


@dataclass(eq=False)
class Solve:
    """A layer's solve under way, of factors taken at a step."""

    step: int
    damping: Damping | None = None  # γ at that step, on ranks that know it
    scale: Tensor | None = None  # what the inverse is multiplied by, on these; None for nothing
    added: Sequence[Tensor | None] = ()  # to the factors' diagonals, on these
    verdict: Verdict = Verdict.OPEN
    error: str = ""  # of this rank, for a message
    solved: Solved = field(default_factory=dict)  # what this rank has decomposed
    ticket: Any = None  # of the thread that solves it, if one does
    option: Damping = math.nan  # γ as the option had it at that step
    mean_curvature: float = 0.0  # of all layers, then
    # The factors of that step: on the rank that solves, copies by letter; on the other ranks, and
    # of the means, once they have changed.
    copies: Callable[[], Mapping[str, Tensor]] | None = None
    snapshot: FactorCopies | None = None


def stacked_means(
    blocks: Iterable[KroneckerBlock],
) -> list[tuple[list[KroneckerBlock], Tensor]]:
    """Layers that are alike, and their factors' mean eigenvalues, ``(factors, layers, groups)``."""
    alike: dict[object, list[KroneckerBlock]] = {}
    for block in blocks:
        means = block.ensure_factors().of_letters
        key = means.shape, means.dtype, means.device, block.shape.exact
        alike.setdefault(key, []).append(block)
    return [(b, torch.stack([x.ensure_factors().of_letters for x in b], 1)) for b in alike.values()]


@dataclass
class Asked:
    """Groups of numbers on a device, and what they are once it has been waited for."""

    groups: Sequence[list[Tensor]]
    blocks: list[KroneckerBlock] = field(default_factory=list)  # that the last ones are about
    told: Sequence[Sequence[float]] | None = None


class Solves:
    """The inverses of a training's layers, solved at the step at which they are due."""

    heads = 0
    """Numbers that travel before a layer's A, γ and its scale; none where all workers know them."""

    solves_at_once = True
    """Whether layers are solved in the step in which they are due, and a device is waited for."""

    agreeing = "solve_exchange"
    """The stage of the agreement; "wait" where it may wait for what is solved beside training."""

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        layers: Layers,
        drift: Drift | None = None,
        traces: Any = None,
    ) -> None:
        self.training, self.options, self.layers = training, options, layers
        self.drift, self.traces = drift, traces
        self.solver, self.solve_dtype = SOLVERS[options.solver], options.inv_dtype
        self.damping: Damping = math.nan  # γ as the option has it
        self.own_dampings: dict[KroneckerBlock, float] = {}  # of layers whose groups have one
        self.mean_curvature = 0.0  # of all layers
        self.failed = 0  # number of solves without a sound decomposition, of all layers so far
        self.restart(StepPlan({}, training.world, training.world))
        self.changes: dict[KroneckerBlock, Sequence[float]] = {}  # by this refresh, if told with it
        self._unsure: dict[KroneckerBlock, Tensor] = {}  # weights of layers that may have none

    def restart(self, step: StepPlan) -> None:
        """Solve all layers of a plan anew, from other factors or on other ranks."""
        self.step, self.plan = step, step.layers
        self.wanted: set[KroneckerBlock] = set(self.plan)  # layers that are due out of turn
        self.under_way: dict[KroneckerBlock, Solve] = {}  # verdicts on others are void
        # Of the inverses in use: when they were put to use, the step of their factors, and γ on the
        # layer's gradient workers.
        self.installed_at: dict[KroneckerBlock, int] = {}
        self.taken_at: dict[KroneckerBlock, int] = {}
        self.dampings: dict[KroneckerBlock, Damping] = {}
        self.scales: dict[KroneckerBlock, Tensor] = {}  # what inverses are multiplied by besides
        self.asked: Asked | None = None  # by others, to be told when a device is waited for
        self.refreshed = False  # layers have been put to use at this step, alike on every rank
        if self.traces is not None:
            self.traces.forget()

    def close(self) -> None:
        """Forget all layers."""
        self.restart(StepPlan({}, self.training.world, self.training.world))

    def refresh(
        self,
        due: Sequence[KroneckerBlock],
        pending: PendingAverage,
        news: Sequence[float] = (),
    ) -> Sequence[float]:
        """Solve the layers that are due, and install what the ranks agree is solved.

        Gradients have arrived before a part of the world communicates: NCCL's communicators are not
        to be used at the same time. Returns the largest of all ranks' ``news``, numbers of which
        every rank has as many.

        Raises:
            DecompositionError: On every rank, if a thread has raised, or a layer could not be
                solved too often.
        """
        if self.wanted:
            due = [block for block in self.plan if block in self.wanted or block in due]
        self.changes = {}
        try:
            if due:
                damping: Any = self.options.damping
                if callable(damping):
                    damping = damping(self.training.steps)
                    check_damping(damping)  # everywhere, before it begins
                self.damping = as_scalar(damping)
                self.own_dampings = values_by_layer(self.training.groups, self.plan, "damping")
            heard, agreed = self.run(due, pending, news)
        except DecompositionError:
            raise
        except BaseException:  # solves under way may have lost their results
            self.under_way.clear()
            self.wanted = set(self.plan)
            raise
        self.layers.tell_of_silence(agreed)
        most = MAX_CONSECUTIVE_FAILURES
        hopeless = [repr(block.name) for block in agreed if block.state.failures >= most]
        if hopeless:
            raise DecompositionError(
                f"the factors of {', '.join(hopeless)} could not be decomposed {most} refreshes in "
                f"a row, in float32 or in float64; raise damping, lower lr, or name them in "
                f"skip_layers"
            )
        return heard

    def run(
        self, due: Sequence[KroneckerBlock], pending: PendingAverage, news: Sequence[float]
    ) -> Refreshed:
        """Do the refresh.

        One process takes a few layers at a time, so that old inverses are freed before the next new
        ones are made; several take all, in few messages.
        """
        agreed, itemsize = list[KroneckerBlock](), self.options.inv_dtype.itemsize
        sizes = [2 * itemsize * sum(map(math.prod, b.stored_shapes.values())) for b in due]
        most = PART_BYTES if self.training.world.size == 1 else math.inf
        for part in in_groups([None] * len(due), sizes, most):
            with stage("solve"):
                over = self.submit([due[i] for i in part])
            self.layers.tell_of_sums(over)
            news, came = self.agree(pending, news)
            agreed += came
        if due:
            self.wanted = set()
        return news, agreed

    # -------------------------------------------------------------------------------- checkpoints

    def finish(self) -> None:
        """Wait for this rank's running solves; they are installed when they are due."""

    def keep_snapshots(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Keep the factors that running solves started from; the running averages will change."""

    def take_over(self, found: Mapping[KroneckerBlock, LoadedInverse]) -> None:
        """Install the inverses of a checkpoint; their layers are refreshed when they are due."""
        for block, loaded in found.items():
            block.installed()
            self.taken_at[block] = loaded.step
            self.installed_at[block] = loaded.step + loaded.delay
            if loaded.inverse is not None:
                self.dampings[block] = loaded.damping
                if self.options.preconditioner_scale == "gradient":
                    self.scales[block] = block.ensure_factors().weight.new_tensor(loaded.scale)
        for bank in self.step.banks:
            here: dict[KroneckerBlock, Inverse] = {}
            for block in bank.blocks:
                inverse = found[block].inverse if block in found else None
                if inverse is not None:
                    here[block] = inverse
            if here:
                columns = zip(*(inverse.tensors for inverse in here.values()), strict=True)
                first = next(iter(here.values()))
                bank.install(list(here), first.of([torch.cat(c) for c in columns]), keeps=False)

    def resubmit(self, found: Mapping[KroneckerBlock, Snapshot]) -> None:
        """Restart the solves that were in progress when a checkpoint was written."""
        damping, mean_curvature = self.damping, self.mean_curvature
        own_dampings, self.own_dampings = self.own_dampings, {}  # the snapshots have theirs
        for block, snapshot in found.items():
            self.damping, self.mean_curvature = snapshot.damping, snapshot.mean_curvature
            current, block.factors = block.factors, snapshot.factors
            self.submit([block])
            block.factors = current
            solve = self.under_way[block]
            solve.step = snapshot.step
            if snapshot.factors is not None:
                solve.snapshot = FactorCopies(snapshot.factors.stored, snapshot.factors.means)
                solve.copies = None
        self.damping, self.mean_curvature = damping, mean_curvature
        self.own_dampings = own_dampings
        self.finish()

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

    # ------------------------------------------------------------------------------------ solve

    def submit(self, blocks: Sequence[KroneckerBlock]) -> Sequence[float] | None:
        """Decompose this rank's factors of some layers; the others get their verdicts.

        Returns which layers' sums have overflown, if a device has been waited for.
        """
        mine, others = [], []  # others know γ by themselves, unless it is sent
        for block in blocks:
            option = self.own_dampings.get(block, self.damping)
            self.under_way[block] = Solve(
                self.training.steps, option=option, mean_curvature=self.mean_curvature
            )
            block.ensure_factors()  # on every rank: checkpoints have the same entries on all
            if block in self.step.to_solve:
                mine.append(block)
            elif self._knows_damping(block):
                others.append(block)
        try:
            return self.solve(self.ready(mine, others))
        except Exception as error:  # an exception must not part this rank from the others
            unknown = [b for b in others if self.under_way[b].damping is None]
            for block in (*mine, *unknown):
                if self.under_way[block].verdict is Verdict.OPEN:
                    self.under_way[block].verdict = Verdict.FAILED
                    self.under_way[block].error = f" ({type(error).__name__}: {error})"
            return None

    def _knows_damping(self, block: KroneckerBlock) -> bool:
        """Whether this rank finds out γ of a layer that others solve.

        With a refresh by trace every rank knows the traces, as any of them can write a checkpoint.
        """
        works = self.training.world.rank in self.plan[block].workers
        return self.traces is not None or (works and not self.heads)

    def solve(self, ready: Sequence[KroneckerBlock]) -> Sequence[float] | None:
        """Decompose this rank's factors of layers that can be solved; a device is waited for once.

        Factors of layers that are alike come one after the other, to be alike in their batches.
        """
        if not ready:
            return None
        options, asked = self.options, self.asked or Asked(())
        unsure, self._unsure = self._unsure, {}
        like = {shape: i for i, shape in enumerate(dict.fromkeys(b.shape for b in ready))}
        mine = [(block, letter) for block in ready for letter in self.step.to_solve[block]]
        mine.sort(key=lambda item: (like[item[0].shape], item[1]))
        problems = [self.problem(block, letter, block.weight.device) for block, letter in mine]
        attempts = self.solver.decompose(problems, options.inv_dtype)
        compared, changes = self._changes(ready, mine, attempts)
        reads = [attempts.errors], self.layers.overflown, [*unsure.values()], changes
        errors, over, weights, changed, *asked.told = numbers_of(*reads, *asked.groups)
        found = attempts.finish(errors)
        if all(error < attempts.tolerance for error in errors):  # none has climbed the ladder
            each = iter(changed)
            self.changes |= dict(zip(compared, zip(each, each, each, strict=True), strict=True))
        for block in ready:
            self.under_way[block].verdict = Verdict.SOUND
        for (block, letter), parts in zip(mine, found, strict=True):
            if parts is None:
                self.under_way[block].verdict = Verdict.FAILED
            else:
                self.under_way[block].solved[letter] = parts
        for block, weight in zip(unsure, weights, strict=True):
            if not weight > 0:
                self.under_way[block].verdict, self.under_way[block].solved = _unseen(block), {}
        return over

    def _changes(
        self, ready: Sequence[KroneckerBlock], mine: Sequence[Item], attempts: Attempts
    ) -> tuple[list[KroneckerBlock], list[Tensor]]:
        """What inverses of these parts would change, to be read with the verdicts on a device.

        Nothing where several processes have the parts, or a look costs more than to wait later.
        """
        alone = self.training.world.size == 1 and self.training.device.type != "cpu"
        if self.drift is None or not alone or () in attempts.parts:
            return [], []
        parts, renewed = dict(zip(mine, attempts.parts, strict=True)), set(ready)
        compared, changes = list[KroneckerBlock](), list[Tensor]()
        for bank in self.step.banks:
            new = [b for b in bank.blocks if b in renewed and b.inverse is not None]
            new = [b for b in new if b.has_gradient and not any(map(is_dtensor, b.params))]
            if new:
                solved = [{k: parts[b, k] for k in b.shape.letters} for b in new]
                inverse = self._combined(new[0].shape, solved, [self.under_way[b] for b in new])
                changes.append(bank.changes_by(new, inverse, self.options.inv_dtype))
                compared += new
        return compared, changes

    def ready(
        self, mine: Sequence[KroneckerBlock], others: Sequence[KroneckerBlock]
    ) -> list[KroneckerBlock]:
        """This rank's layers that it can solve now; their γ, and that of the others."""
        ready: list[KroneckerBlock] = []
        weights: dict[KroneckerBlock, Tensor] = {}
        for block in mine:
            if block.lost:
                self.under_way[block].verdict = Verdict.LOST
            elif block.solved:  # it has statistics: the device need not be read
                ready.append(block)
            else:
                weights[block] = block.ensure_factors().weight.to(self.training.device)
        if self.solves_at_once and self.training.device.type != "cpu":
            # These have, most likely: they are solved before that is read, with all the rest.
            self._unsure = {block: w for block, w in weights.items() if captured(block)}
            ready += self._unsure
            weights = {block: w for block, w in weights.items() if block not in self._unsure}
        if weights:
            counts = torch.stack(list(weights.values())).tolist()
            for block, weight in zip(weights, counts, strict=True):
                if weight > 0:
                    ready.append(block)
                else:
                    self.under_way[block].verdict = _unseen(block)
        traces = self.damp((*ready, *others))
        if self.traces is not None:
            spared = self.traces.keeping(traces, self.damping, self.own_dampings, ready)
            ready = [block for block in ready if block not in spared]
            for block, verdict in spared.items():
                self.under_way[block].verdict = verdict
        return ready

    def damp(self, blocks: Sequence[KroneckerBlock]) -> dict[KroneckerBlock, Tensor]:
        """Tell γ and the scale of layers, of those that are alike at once; their damped means."""
        options, traces = self.options, dict[KroneckerBlock, Tensor]()
        least = options.floor * self.mean_curvature
        own = self.own_dampings
        for alike, means in stacked_means(blocks):
            of_layers = means.prod(0).mean(-1, keepdim=True)
            option = self.damping
            option = dampings = option.to(means) if isinstance(option, Tensor) else option
            each: Iterable[Damping] = repeat(option)
            if not own.keys().isdisjoint(alike):
                of_groups = [own.get(block, option) for block in alike]
                dtype, device = of_layers.dtype, of_layers.device
                numbers = [torch.as_tensor(x, dtype=dtype, device=device) for x in of_groups]
                option = dampings = torch.stack(numbers).unsqueeze(-1)
                each = dampings.squeeze(-1).unbind()
            if options.relative_damping:  # where gradients vanish there is no curvature
                positive = of_layers.masked_fill(~(of_layers > 0), 1.0)
                dampings = option * positive.clamp_min(least)
                each = dampings.squeeze(-1).unbind()
            on_factors = self.solver.dampings(means, dampings, alike[0].shape.exact)
            columns = (repeat(None) if x is None else x.unbind() for x in on_factors)
            damped = (of_layers + dampings).squeeze(-1).unbind()
            for block, damping, trace, *added in zip(alike, each, damped, *columns, strict=False):
                solve, traces[block] = self.under_way[block], trace
                solve.damping, solve.added = damping, added
                solve.scale = trace if options.preconditioner_scale == "gradient" else None
        return traces

    def problem(self, block: KroneckerBlock, letter: str, device: torch.device) -> Problem:
        """Describe a factor to decompose on a device, with its damping."""
        shape = block.shape
        stored, added = block.stored(letter), self.under_way[block].added
        assert stored is not None, f"factor {letter} is kept elsewhere"
        return Problem(
            shape.groups,
            shape.dims[letter],
            self.solve_dtype,
            device,
            stored,
            added=added[shape.letters.index(letter)],
            is_diagonal=letter in shape.diagonals,
            # A plan's matrices have no meaning, and every decomposition of them is valid.
            tolerance=math.inf if self.training.world.planned else RESIDUAL_TOLERANCE,
        )

    # ------------------------------------------------------------------------------------ agree

    def agree(self, pending: PendingAverage, news: Sequence[float]) -> Refreshed:
        """Agree with all ranks, on the CPU, and install: a device need not be waited for."""
        solves, world = self.under_way, self.training.world
        heard: list[float] = []
        asked = bool(solves or news)
        with stage(self.agreeing):
            if asked:
                for block in self.plan:
                    mine = self.verdict(block, solves[block]) if block in solves else 0
                    heard.append(float(mine))
                heard += news
                if world.size > 1:
                    message = torch.tensor(heard, dtype=torch.float32, device="cpu")
                    agreement = world.on_cpu().all_reduce_max([message])
        with stage("average_gradients"):
            pending.wait()
        if not asked:
            return news, []
        if world.size > 1:
            with stage(self.agreeing):
                agreement.wait()
                heard = message.tolist()
        agreed = {}
        for block, number in zip(self.plan, heard, strict=False):
            if number > Verdict.OPEN:
                agreed[block] = Verdict(int(number))
        with stage("solve"):
            self.install(agreed)
        return heard[len(self.plan) :], list(agreed)

    def verdict(self, block: KroneckerBlock, solve: Solve) -> Verdict:
        """This rank's verdict on a layer that is to be installed."""
        if block.state.unverified:
            return Verdict.UNEXPLAINED
        if solve.verdict is not Verdict.OPEN:
            return solve.verdict
        if self.training.world.backend == "fake":  # no other rank sends its result
            return Verdict.SOUND
        return Verdict.UNSEEN if captured(block) else Verdict.OPEN

    # ---------------------------------------------------------------------------------- install

    def install(self, verdicts: Mapping[KroneckerBlock, Verdict]) -> None:
        """Put solved layers to use."""
        received, solves = self._exchanged(verdicts), dict[KroneckerBlock, Solve]()
        for block, verdict in verdicts.items():
            solve = self.under_way.pop(block)
            if self.traces is not None:
                self.traces.installed(block, verdict)
            if verdict in (Verdict.SPARED, Verdict.SETTLED):
                continue
            if verdict is not Verdict.SOUND:
                self._note_failure(block, verdict, solve.error)
                continue
            if block in received:
                assert solve.damping is not None
                self.dampings[block], solves[block] = solve.damping, solve
                if solve.scale is not None:
                    self.scales[block] = solve.scale
            block.installed()
            self.refreshed, self.installed_at[block] = True, self.training.steps
            self.taken_at[block] = solve.step
        compared = self.drift is not None
        for bank in self.step.banks if received else ():
            new = [block for block in bank.blocks if block in received]
            if not new:
                continue
            if compared:
                told = [block for block in new if block not in self.changes]
                bank.keep_before(told, self.options.inv_dtype)
            solved = [received.pop(block) for block in new]
            inverse = self._combined(new[0].shape, solved, [solves[block] for block in new])
            bank.install(new, inverse, keeps=compared and any(map(is_dtensor, bank.params)))

    def _combined(
        self, shape: FactorShape, solved: Sequence[Solved], solves: Sequence[Solve]
    ) -> Inverse:
        """The stacked inverses of layers of a shape, of their decompositions, which are used up."""
        parts: dict[str, Decomposition] = {}
        for letter in shape.letters:
            columns = zip(*(each.pop(letter) for each in solved), strict=True)
            parts[letter] = tuple(as_stack(column).flatten(0, 1) for column in columns)
        dampings = [solve.damping for solve in solves if solve.damping is not None]
        scales = [solve.scale for solve in solves if solve.scale is not None]
        each = shape.groups, parts["G"][-1]
        times = of_groups(scales, *each) if scales else None
        return self.solver.combine(parts, of_groups(dampings, *each), times)

    def _exchanged(
        self, verdicts: Mapping[KroneckerBlock, Verdict]
    ) -> dict[KroneckerBlock, Solved]:
        """Decompositions of the layers that this rank preconditions, and their γ and scale.

        Where they travel in another dtype, solvers round theirs as it would: all have the same.
        """
        options, device, plan = self.options, self.training.device, self.step
        dtype, rounding = options.inv_dtype, plan.wire if plan.row.size > 1 else None
        mine: dict[Item, tuple[Tensor, ...]] = {}
        shapes: dict[Item, Shapes] = {}
        sound = []
        for block, verdict in verdicts.items():
            if verdict is not Verdict.SOUND:
                continue
            sound.append(block)
            shape, solve = block.shape, self.under_way[block]
            for k in shape.letters:
                heads, diagonal = self.heads if k == "A" else 0, k in shape.diagonals
                if plan.row.size > 1:
                    sizes = shape.groups, shape.dims[k], diagonal
                    shapes[block, k] = ((),) * heads + tuple(self.solver.sent_shapes(*sizes))
                if k in solve.solved:
                    parts = solve.solved.pop(k)
                    if plan.row.size > 1:
                        parts = self.solver.to_send(parts, rounding)
                    for number in (solve.scale, solve.damping)[2 - heads :]:
                        head = torch.as_tensor(number, dtype=rounding or dtype, device=device)
                        parts = head.to(device, dtype), *parts
                    mine[block, k] = parts
        if plan.row.size > 1 and sound:
            with stage("solve_exchange"):
                everybody, to_send = range(plan.row.size), plan.to_send
                routes = {item: (to_send[item], everybody) for item in shapes if item in to_send}
                mine = deliver_parts(plan.row, shapes, routes, mine, dtype, device, plan.wire)
        received: dict[KroneckerBlock, Solved] = {}
        for block in sound:
            if self.training.world.rank in self.plan[block].workers:
                found = received[block] = {}
                for letter in block.shape.letters:
                    found[letter] = mine.pop((block, letter))
                if self.heads:
                    # Copies: a view would keep the whole message as long as the inverse.
                    told = [x.to(dtype, copy=True) for x in found["A"][: self.heads]]
                    found["A"] = found["A"][self.heads :]
                    solve = self.under_way[block]
                    solve.damping, solve.scale = told[0], told[1] if self.heads > 1 else None
                for letter in block.shape.letters:
                    found[letter] = self.solver.received(found[letter], block.shape.dims[letter])
        return received

    def _note_failure(self, block: KroneckerBlock, verdict: Verdict, error: str) -> None:
        """Treat a layer that was not solved."""
        training = self.training
        silent = verdict in (Verdict.SILENT, Verdict.UNEXPLAINED)
        if verdict is Verdict.UNEXPLAINED:
            self.layers.unexplained_elsewhere(block)
            had = block.solved
            block.lost_inverse(silent)
            block.forget()
            if had:
                training.publish()  # without the factors
        elif verdict is Verdict.LOST:
            training.warn(
                f"a factor of layer {block.name!r} is lost: the process that should keep it has "
                f"not got it, from a checkpoint written without consolidate(), perhaps; the base "
                f"optimizer trains the layer alone until its statistics have been taken anew"
            )
            block.lost_inverse(silent)
            block.forget()
            self.layers.newcomers_at = training.steps + 1
            training.publish()  # without the lost factors
        elif verdict is not Verdict.FAILED:
            block.lost_inverse(silent)
        else:
            block.refresh_failed()
            self.failed += 1
            if training.first_time(f"failed:{block.name}"):
                kept = "its last inverse is kept"
                kept = kept if block.solved else "the base optimizer trains it alone"
                training.warn(
                    f"the factors of layer {block.name!r} could not be decomposed at step "
                    f"{training.steps}{error}; {kept} until a refresh succeeds"
                )


_NONE_CAME = (LayerStatus.NOT_CAPTURED, LayerStatus.UNVERIFIED)


def captured(block: KroneckerBlock) -> bool:
    """Whether this process has captured a pair of a layer that is of use."""
    return block.state.status is LayerStatus.CAPTURED


def _unseen(block: KroneckerBlock) -> Verdict:
    """The verdict on a layer without statistics; a dead layer's pairs have been heard."""
    return Verdict.SILENT if block.state.status in _NONE_CAME else Verdict.UNSEEN

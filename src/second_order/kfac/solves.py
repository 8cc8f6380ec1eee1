"""Damped inverses of the layers' factors: solved, agreed on, installed.

solve     each solver decomposes its factors; refreshed by trace, it spares layers that have hardly
          moved
agree     all ranks hear the greatest verdict on each layer
install   decompositions go to the gradient workers of the layers that are solved, and are put to
          use by all of them at this step; the others keep what they have, or nothing
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.budget import IntervalBudget
from second_order.contract.averaging import PendingAverage
from second_order.contract.training import Training
from second_order.distributed.world import Shapes
from second_order.errors import DecompositionError
from second_order.kfac.drift import Drift
from second_order.kfac.flights import Flight, Solved, Verdict
from second_order.kfac.layers import Layers
from second_order.kfac.options import KFACOptions, check_damping
from second_order.kfac.plan import LayerPlan
from second_order.kfac.step_plan import Item, StepPlan
from second_order.kfac.trace_refresh import TraceRefresh
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import Problem
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.solvers import SOLVERS, Damping, EigenInverse, factored_damping
from second_order.options import value_at

__all__ = ["Arriving", "Solves"]

PART_BYTES = 64 * 2**20  # bytes of full matrices that are refreshed together on one process

Arriving: TypeAlias = Callable[[list[KroneckerBlock]], Iterable[list[KroneckerBlock]]]
"""Gives all layers of a list in parts, as they become ready."""


class Solves:
    """The inverses of a training's layers, solved at the step at which they are due.

    Args:
        training: The training to serve.
        options: The options, those of solves among them.
        layers: The layers of the model.
        budget: The budget of intervals; nothing is spared while it measures.
        drift: The layers' intervals by drift, or None.

    Attributes:
        wanted: Whether a refresh is due out of turn.
        flights: The solves under way, by layer.
        taken_at: By layer, the step whose factors the inverse in use was made from.
        landed_at: By layer, the step at which that inverse was put to use.
        damping: γ of the last refresh, as the option has it; NaN before.
        mean_curvature: Of all layers, at the last refresh; 0 before.
        dampings: By layer, γ of the inverse in use, on the layer's gradient workers.
        failed: Number of solves that gave no sound decomposition, of all layers so far.
        traces: Tells which layers a refresh need not solve; None if it solves all.
        step: What this rank does.
    """

    step: StepPlan

    heads = 0
    """Numbers that travel before a layer's A, γ and its scale; none where all workers know them."""

    agreeing = "agree"
    """The stage of the agreement; "wait" where it may wait for what is solved beside training."""

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        layers: Layers,
        budget: IntervalBudget,
        drift: Drift | None = None,
    ) -> None:
        self.training, self.options, self.layers = training, options, layers
        self.budget, self.drift = budget, drift
        self.solver = SOLVERS[options.solver]
        self.damping, self.failed, self.mean_curvature = math.nan, 0, 0.0
        self.traces = TraceRefresh(options.trace_bounds) if options.refresh == "trace" else None
        self._seen: weakref.WeakSet[KroneckerFactors] = weakref.WeakSet()
        self.restart({})
        self.wanted = False

    def restart(self, plan: Mapping[KroneckerBlock, LayerPlan]) -> None:
        """Solve all layers of a plan anew, from other factors or on other ranks."""
        self.plan, self.wanted = plan, True
        self.flights: dict[KroneckerBlock, Flight] = {}  # verdicts on others are void
        self.landed_at: dict[KroneckerBlock, int] = {}
        self.taken_at: dict[KroneckerBlock, int] = {}
        self.dampings: dict[KroneckerBlock, Damping] = {}
        if self.traces is not None:
            self.traces.forget()

    def check_device(self) -> None:
        """Raise ValueError if layers are to be solved on a device that does not exist."""

    def post(self, copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Send copies of tensors from the CPU."""
        send(copies)

    def refresh(
        self,
        due: Sequence[KroneckerBlock],
        pending: PendingAverage,
        news: Sequence[float] = (),
        arriving: Arriving | None = None,
    ) -> Sequence[float]:
        """Solve the layers that are due, and install what the ranks agree is solved.

        Args:
            due: The layers that are due at this step; all are if a refresh is wanted out of turn.
            pending: The gradients: nothing may be under way in the world while a part of it
                communicates, since NCCL's communicators are not to be used at the same time.
            news: Further numbers for the ranks to agree on; of the same length on every rank.
            arriving: Gives layers of a list in parts, each once its running averages are those of
                this step; None if all are.

        Returns:
            The news of all ranks, the largest of each.

        Raises:
            DecompositionError: On every rank, if a thread has raised, or a layer could not be
                solved too often.
        """
        due = list(self.plan) if self.wanted else due
        damping = 0.0
        try:
            if due:
                damping = value_at(self.options.damping, self.training.steps)
                check_damping(damping)  # everywhere, before it begins
                self.damping = float(damping)
            heard, landed, hopeless = self.run(due, damping, pending, news, arriving)
        except DecompositionError:
            raise
        except BaseException:  # solves under way may have lost their results
            self.flights.clear()
            self.wanted = True
            raise
        self.layers.tell_of_silence([block for block in landed if block.state.silent])
        if hopeless:
            raise DecompositionError(
                f"the factors of {', '.join(map(repr, hopeless))} could not be decomposed "
                f"{self.options.max_consecutive_failures} refreshes in a row, in float32 or in "
                f"float64; raise damping, lower lr, or name them in skip_layers"
            )
        return heard

    def run(
        self,
        due: Sequence[KroneckerBlock],
        damping: float,
        pending: PendingAverage,
        news: Sequence[float],
        arriving: Arriving | None,
    ) -> tuple[Sequence[float], list[KroneckerBlock], list[str]]:
        """Do the refresh; returns all ranks' news, what has landed, and what has failed too often.

        One process takes a few layers at a time, so that old inverses are freed before the next new
        ones are made; several take all, in few messages.
        """
        landed: list[KroneckerBlock] = []
        hopeless: list[str] = []
        for part in self._parts(due):
            for arrived in [part] if arriving is None else arriving(part):
                with self.training.meter.stage("launch"):
                    self.submit(arrived, damping)
            self.layers.tell_of_sums()
            news, came, failing = self.land(pending, news)
            landed += came
            hopeless += failing
        if due:
            self.wanted = False
        return news, landed, hopeless

    def _parts(self, due: Sequence[KroneckerBlock]) -> list[list[KroneckerBlock]]:
        parts: list[list[KroneckerBlock]] = []
        filled = 0.0
        for block in due:
            stored = (block.stored_shape(letter) for letter in block.shape.letters)
            size = self.options.inv_dtype.itemsize * 2 * sum(map(math.prod, stored))
            alone = self.training.world.size == 1 and filled + size > PART_BYTES
            if alone or not parts:
                parts.append([])
                filled = 0.0
            parts[-1].append(block)
            filled += size
        return parts

    # ------------------------------------------------------------------------------------ solve

    def submit(self, blocks: Sequence[KroneckerBlock], damping: float) -> None:
        """Decompose this rank's factors of some layers."""
        options, rank = self.options, self.training.world.rank
        ready = self.ready(blocks, damping)
        if not ready:
            return
        mine = [(b, k) for b in ready for k in b.shape.letters if self.plan[b].solver(k) == rank]
        try:
            problems = [self.problem(b, k, b.weight.device) for b, k in mine]
            found = self.solver.decompose(problems, options.inv_dtype, options.symmetry_aware)
        except Exception as error:  # an exception must not part this rank from the others
            self._tell_of_error(ready, error)
            return
        for block in ready:
            self.flights[block].verdict = Verdict.SOUND
        for (block, letter), parts in zip(mine, found, strict=True):
            if parts is None:
                self.flights[block].verdict = Verdict.FAILED
            else:
                self.flights[block].solved[letter] = parts

    def ready(self, blocks: Sequence[KroneckerBlock], damping: float) -> list[KroneckerBlock]:
        """The layers that this rank is to solve now, with γ; the others get their verdicts."""
        rank, step = self.training.world.rank, self.training.steps
        self.flights |= {block: Flight(step) for block in blocks}
        mine = [b for b in blocks if rank in self.plan[b].solvers]
        others = [b for b in blocks if b not in mine and rank in self.plan[b].workers]
        others = [] if self.heads else others  # who will be told γ
        try:
            for block in blocks:
                block.ensure_factors()  # on every rank: checkpoints have the same entries on all
            ready = self._with_factors(mine)
            dampings = self._dampings([*ready, *others], damping)
            scales = self._scales(dampings)
            if self.traces is not None:
                known = {block: dampings[block] for block in ready}
                spared = self.traces.verdicts(known, damping, judged=not self.budget.measuring)
                ready = [block for block in ready if block not in spared]
                for block, verdict in spared.items():
                    self.flights[block].verdict = verdict
        except Exception as error:
            self._tell_of_error([*mine, *others], error)
            return []
        for block, of_layer in dampings.items():
            self.flights[block].damping = of_layer
            self.flights[block].scale = scales.get(block)
        return ready

    def _with_factors(self, blocks: Sequence[KroneckerBlock]) -> list[KroneckerBlock]:
        """The layers that this rank can solve; the others get their verdicts."""
        device = self.training.device
        factors = {b: b.ensure_factors() for b in blocks}
        news = [b for b in blocks if factors[b] not in self._seen]
        weights = [factors[b].weight.to(device) for b in news]
        counts = torch.stack(weights).tolist() if weights else []
        unseen = {block for block, count in zip(news, counts, strict=True) if not count > 0}
        ready = []
        for block in blocks:
            if block.lost:
                self.flights[block].verdict = Verdict.LOST
            elif block in unseen:
                # The pairs of a dead layer have been heard: they have no example.
                silent = block.state.asked and not block.state.heard
                self.flights[block].verdict = Verdict.SILENT if silent else Verdict.UNSEEN
            else:
                self._seen.add(factors[block])  # known to be so: the device need not be read again
                ready.append(block)
        return ready

    def _dampings(
        self, blocks: Sequence[KroneckerBlock], damping: float
    ) -> dict[KroneckerBlock, Damping]:
        """γ of each layer: ``damping``, or ``damping`` times the layer's mean curvature."""
        if not self.options.relative_damping:
            return dict.fromkeys(blocks, float(damping))
        least = self.options.damping_floor * self.mean_curvature
        return {b: damping * _curvature_of(b).clamp_min(least) for b in blocks}

    def _scales(self, dampings: Mapping[KroneckerBlock, Damping]) -> dict[KroneckerBlock, Tensor]:
        """What each layer's inverse is multiplied by: its mean damped curvature, or nothing."""
        if self.options.preconditioner_scale != "gradient":
            return {}
        return {b: b.ensure_factors().mean_curvature() + of for b, of in dampings.items()}

    def _tell_of_error(self, blocks: Iterable[KroneckerBlock], error: Exception) -> None:
        for block in blocks:
            self.flights[block].verdict = Verdict.FAILED
            block.complain(f" ({type(error).__name__}: {error})")

    def problem(self, block: KroneckerBlock, letter: str, device: torch.device) -> Problem:
        """Describe a factor to decompose on a device, with its damping and guess."""
        options, shape, inverse = self.options, block.shape, block.inverse
        factors, damping = block.ensure_factors(), self.flights[block].damping
        assert damping is not None
        position = shape.letters.index(letter)
        added = self.solver.dampings(factors.means, damping, shape.exact)[position]
        guess, scale = None, None
        if options.eigen_refresh == "warm" and isinstance(inverse, EigenInverse):
            guess = inverse.vectors.get(letter)
            scale = factored_damping(*factors.means.unbind(), damping=damping)[position]
        return Problem(
            shape.groups,
            shape.dim(letter),
            options.solve_dtype,
            device,
            partial(factors.matrix, letter, options.solve_dtype),
            added=added,
            guess=guess,
            scale=scale,
            is_diagonal=shape.is_diagonal(letter),
        )

    # ------------------------------------------------------------------------------------ agree

    def land(
        self, pending: PendingAverage, news: Sequence[float]
    ) -> tuple[Sequence[float], list[KroneckerBlock], list[str]]:
        """Agree with all ranks, and install; returns news, what has landed, what failed too often.

        On the CPU: a device need not be waited for to read it.
        """
        meter = self.training.meter
        agrees, blocks = bool(news) or self.agrees(), list(self.plan)
        with meter.stage(self.agreeing):
            if agrees:
                flights = self.flights
                mine = [self.verdict(b, flights[b]) if b in flights else 0 for b in blocks]
                message = torch.tensor([*map(float, mine), *news], device="cpu")
                agreement = self.training.world.on_cpu().all_reduce_max([message])
        with meter.stage("average_gradients"):
            pending.wait()
        if not agrees:
            return news, [], []
        with meter.stage(self.agreeing):
            agreement.wait()
            heard = message.tolist()
        verdicts = zip(
            blocks, (Verdict(int(number)) for number in heard[: len(blocks)]), strict=True
        )
        with meter.stage("land"):
            landing = {b: verdict for b, verdict in verdicts if verdict > Verdict.FLYING}
            return heard[len(blocks) :], list(landing), self.install(landing)

    def agrees(self) -> bool:
        """Whether there are layers to agree on; the same on every rank."""
        return bool(self.flights)

    def verdict(self, block: KroneckerBlock, flight: Flight) -> Verdict:
        """This rank's verdict on a layer that is to land."""
        if block.state.unexplained:
            return Verdict.UNEXPLAINED
        if flight.verdict is not Verdict.FLYING:
            return flight.verdict
        if self.training.world.backend == "fake":  # solvers' verdicts never come
            return Verdict.SOUND
        return Verdict.UNSEEN if block.state.heard else Verdict.FLYING

    # ---------------------------------------------------------------------------------- install

    def install(self, verdicts: Mapping[KroneckerBlock, Verdict]) -> list[str]:
        """Put solved layers to use; returns the names of those that have failed too often."""
        received = self._exchanged([b for b, v in verdicts.items() if v is Verdict.SOUND])
        failing = []
        for block, verdict in verdicts.items():
            flight = self.flights.pop(block)
            if self.traces is not None:
                self.traces.land(block, verdict)
            if verdict in (Verdict.SPARED, Verdict.SETTLED):
                continue
            if verdict is not Verdict.SOUND:
                failing += self._note_failure(block, verdict)
                continue
            inverse = None
            if block in received:
                assert flight.damping is not None
                inverse = self.solver.combine(received.pop(block), flight.damping, flight.scale)
                self.dampings[block] = flight.damping
            block.install(inverse, None if self.drift is None else self.options.inv_dtype)
            self.landed_at[block], self.taken_at[block] = self.training.steps, flight.step
        return failing

    def _exchanged(self, sound: Sequence[KroneckerBlock]) -> dict[KroneckerBlock, Solved]:
        """Decompositions of the layers that this rank preconditions, and their γ and scale."""
        options, device = self.options, self.training.device
        dtype, rounding = options.inv_dtype, self.step.rounding
        mine: dict[Item, tuple[Tensor, ...]] = {}
        shapes: dict[Item, Shapes] = {}
        for block in sound:
            shape, flight = block.shape, self.flights[block]
            solved = self.retrieved(flight)
            for k in shape.letters:
                heads = self.heads if k == "A" else 0
                kept = self.solver.kept_shapes(
                    shape.groups, shape.dim(k), shape.is_diagonal(k), options.symmetry_aware
                )
                shapes[block, k] = ((),) * heads + tuple(kept)
                if k in solved:
                    parts = solved[k]
                    if rounding is not None:  # on the solver as by travelling: all have the same
                        parts = self.solver.rounded(parts, shape.is_diagonal(k), rounding)
                    numbers = (flight.damping, flight.scale)[:heads]
                    sent = (torch.as_tensor(x, dtype=rounding or dtype) for x in numbers)
                    mine[block, k] = (*(x.to(device, dtype) for x in sent), *parts)
        if sound:
            with self.training.meter.stage("exchange"):
                mine = self.step.give_decompositions(mine, shapes, dtype, device)
        received: dict[KroneckerBlock, Solved] = {}
        for block in sound:
            if self.training.world.rank in self.plan[block].workers:
                found = {letter: mine.pop((block, letter)) for letter in block.shape.letters}
                if self.heads:
                    # Copies: a view would keep the whole message as long as the inverse.
                    told = [x.to(dtype, copy=True) for x in found["A"][: self.heads]]
                    found["A"] = found["A"][self.heads :]
                    flight = self.flights[block]
                    flight.damping, flight.scale = told[0], told[1] if self.heads > 1 else None
                received[block] = found
        return received

    def retrieved(self, flight: Flight) -> Solved:
        """The decompositions of this rank, which are kept no longer."""
        solved, flight.solved = flight.solved, {}
        return solved

    def _note_failure(self, block: KroneckerBlock, verdict: Verdict) -> list[str]:
        """Treat a layer that was not solved; returns its name if it has failed too often."""
        training = self.training
        block.find_silent(verdict in (Verdict.SILENT, Verdict.UNEXPLAINED))
        if verdict is Verdict.UNEXPLAINED:
            self.layers.unexplained_elsewhere(block)
            had = block.solved
            block.forget()
            if had:
                training.publish()  # without the factors
        elif verdict is Verdict.LOST:
            training.warn(
                f"a factor of layer {block.name!r} is lost: the process that should keep it has "
                f"not got it, from a checkpoint written without consolidate(), perhaps; the base "
                f"optimizer trains the layer alone until its statistics have been taken anew"
            )
            block.forget()
            self.layers.newcomers_at = training.steps + 1
            training.publish()  # without the lost factors
        elif verdict is not Verdict.FAILED:
            block.drop_inverse()
        else:
            block.fail()
            self.failed += 1
            kept = (
                "its last inverse is kept" if block.solved else "the base optimizer trains it alone"
            )
            if training.first_time(f"failed:{block.name}"):
                training.warn(
                    f"the factors of layer {block.name!r} could not be decomposed at step "
                    f"{training.steps}{block.state.complaint}; {kept} until a refresh succeeds"
                )
            if block.state.failures >= self.options.max_consecutive_failures:
                return [block.name]
        return []

    # --------------------------------------------------------------------------------- the rest

    def close(self) -> None:
        """Forget all layers."""
        self.restart({})


def _curvature_of(block: KroneckerBlock) -> Tensor:
    """The layer's mean curvature, a scalar; 1 where the gradients vanish and there is none."""
    curvature = block.ensure_factors().mean_curvature()
    return torch.where(curvature > 0, curvature, 1.0)

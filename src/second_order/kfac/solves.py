"""Damped inverses of the layers' factors: submitted, agreed on, installed.

submit    each solver decomposes its factors, at once or on threads, from a snapshot; refreshed by
          trace, it spares layers that have hardly moved
agree     all ranks hear the greatest verdict on each layer
install   decompositions go to the gradient workers of the layers that are solved, and are put to
          use by all of them at this step; the others keep what they have, or nothing

At once, a layer lands at the step that submits it. On threads it is under way from then on, and is
not submitted again until it has landed: at that step if it is due; one without an inverse is waited
for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.parcels import Shapes
from second_order.errors import DecompositionError
from second_order.kfac.budget import Budget
from second_order.kfac.drift import Drift
from second_order.kfac.exchange import Exchange, Item
from second_order.kfac.flights import Flight, Solved, Verdict
from second_order.kfac.layers import Layers
from second_order.kfac.options import KFACOptions, check_damping
from second_order.kfac.plan import LayerPlan, solve_cost_of
from second_order.kfac.threads import Background, Threads
from second_order.kfac.trace_refresh import TraceRefresh
from second_order.kronecker.background import Ticket
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import Problem
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.solvers import SOLVERS, Damping, EigenInverse, factored_damping
from second_order.options import value_at
from second_order.stopwatch import Account

__all__ = ["Solves"]

PART_BYTES = 64 * 2**20  # bytes of full matrices that are refreshed together on one process

Arriving: TypeAlias = Callable[[list[KroneckerBlock]], Iterable[list[KroneckerBlock]]]
"""Gives all layers of a list in parts, as they become ready."""


class Solves:
    """The inverses of a training's layers.

    Args:
        training: The training to serve.
        options: The options, those of solves among them.
        layers: The layers of the model.
        background: Settings to solve on threads; None to solve at once.
        budget: The budget of intervals; every solve is waited for while it measures.
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
        traces: Which layers a refresh need not solve.
        threads: The threads that solve beside training; None where layers are solved at once.
        exchange: The collectives between the ranks.
    """

    exchange: Exchange

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        layers: Layers,
        background: Background | None,
        budget: Budget,
        drift: Drift | None = None,
    ) -> None:
        self._training, self._options, self._layers = training, options, layers
        self._background, self._budget, self.drift = background, budget, drift
        waits = background is None or background.max_staleness == 0
        self._waiting = Account.REFRESH if waits else Account.APART
        self._solver = SOLVERS[options.solver]
        self._plan: Mapping[KroneckerBlock, LayerPlan] = {}
        self.wanted = False
        self.flights: dict[KroneckerBlock, Flight] = {}
        self.taken_at: dict[KroneckerBlock, int] = {}
        self.landed_at: dict[KroneckerBlock, int] = {}
        self.damping, self.failed = math.nan, 0
        self.mean_curvature = 0.0
        self.dampings: dict[KroneckerBlock, Damping] = {}
        self.traces = TraceRefresh(options.trace_bounds if options.refresh == "trace" else None)
        self.threads = None if background is None else Threads(training, background)
        self._seen: weakref.WeakSet[KroneckerFactors] = weakref.WeakSet()

    def follow(self, plan: Mapping[KroneckerBlock, LayerPlan]) -> None:
        """Go on by another plan, with everything to be solved anew."""
        self._plan = plan
        self.flights.clear()  # verdicts on other factors or layers
        self.traces.forget()
        self.wanted = True
        known = set(self._layers.blocks)
        by_layer: tuple[dict[KroneckerBlock, Any], ...] = (
            self.landed_at,
            self.taken_at,
            self.dampings,
        )
        for each in by_layer:
            for block in [b for b in each if b not in known or not b.solved]:
                del each[block]

    def restart(self) -> None:
        """Solve all layers anew, from other factors."""
        self.flights.clear()
        self.traces.forget()
        self.landed_at, self.taken_at, self.wanted = {}, {}, True
        self.dampings = {}

    def refresh(
        self,
        due: Sequence[KroneckerBlock],
        average: Callable[[], None],
        news: Sequence[float] = (),
        arriving: Arriving | None = None,
    ) -> Sequence[float]:
        """Submit the layers that are due, and install what the ranks agree is solved.

        Args:
            due: The layers that are due at this step; all are if a refresh is wanted out of turn.
            average: Waits for the gradients: nothing may be under way in the world while a part of
                it communicates, since NCCL's communicators are not to be used at the same time.
            news: Further numbers for the ranks to agree on; of the same length on every rank.
            arriving: Gives layers of a list in parts, each once its running averages are those of
                this step; None if all are.

        Returns:
            The news of all ranks, the largest of each.

        Raises:
            DecompositionError: On every rank, if a thread has raised, or a layer could not be
                solved too often.
        """
        due = list(self._plan) if self.wanted else due
        try:
            heard, hopeless, silent = self._refresh(due, average, news, arriving or _at_once)
        except DecompositionError:
            raise
        except BaseException:  # solves under way may have lost their results
            self.flights.clear()
            self.wanted = True
            raise
        self._layers.tell_of_silence(silent)
        if hopeless:
            raise DecompositionError(
                f"the factors of {', '.join(map(repr, hopeless))} could not be decomposed "
                f"{self._options.max_consecutive_failures} refreshes in a row, in float32 or in "
                f"float64; raise damping, lower lr, or name them in skip_layers"
            )
        return heard

    def _refresh(
        self,
        due: Sequence[KroneckerBlock],
        average: Callable[[], None],
        news: Sequence[float],
        arriving: Arriving,
    ) -> tuple[Sequence[float], list[str], list[KroneckerBlock]]:
        """Do the refresh; returns all ranks' news, layers failed too often, and silent layers."""
        damping = 0.0
        if due:
            damping = value_at(self._options.damping, self._training.steps)
            check_damping(damping)  # everywhere, before it begins
            self.damping = float(damping)
        heard: Sequence[float] = news
        hopeless: list[str] = []
        silent: list[KroneckerBlock] = []
        under_way = list(self.flights)
        for part in self._parts(due):
            for arrived in arriving(part):
                with self._training.meter.stage("launch"):
                    self._submit(arrived, damping)
            if due:
                self._layers.tell_of_sums()
            with self._training.meter.stage("agree"), self._budget.on(self._waiting):
                agreed = self._start_agreement(news)
            with self._training.meter.stage("average_gradients"):
                average()
            with self._budget.on(self._waiting):
                verdicts, heard = agreed()
            with self._training.meter.stage("land"):
                landed, failing = self._install(verdicts)
            hopeless += failing
            silent += [block for block in landed if block.state.silent]
        if due:
            self.wanted = False
            with self._training.meter.stage("launch"):
                came = [b for b in under_way if b not in self.flights and b.solved]
                again = [b for b in came if b in set(due)]
                self._submit(again, damping)
        return heard, hopeless, silent

    def _parts(self, due: Sequence[KroneckerBlock]) -> Iterable[list[KroneckerBlock]]:
        """The layers that are due, in parts that are refreshed together: one, with several ranks.

        That takes few messages. One process takes a few layers at a time, so that old inverses are
        freed before the next new ones are made.
        """
        if self._background is not None:
            yield [block for block in due if block not in self.flights]
            return
        if not due:
            return
        part: list[KroneckerBlock] = []
        filled = 0.0
        for block in due:
            stored = (block.stored_shape(letter) for letter in block.shape.letters)
            size = self._options.inv_dtype.itemsize * 2 * sum(map(math.prod, stored))
            if part and self._training.world.size == 1 and filled + size > PART_BYTES:
                yield part
                part, filled = [], 0.0
            part.append(block)
            filled += size
        yield part

    # ----------------------------------------------------------------------------------- submit

    def _submit(self, blocks: Sequence[KroneckerBlock], damping: float) -> None:
        if not blocks:
            return
        rank, step = self._training.world.rank, self._training.steps
        self.flights |= {block: Flight(step) for block in blocks}
        mine = [b for b in blocks if rank in self._plan[b].solvers]
        others = [b for b in blocks if b not in mine and rank in self._plan[b].workers]
        try:
            for block in blocks:
                block.ensure_factors()  # on every rank: checkpoints have the same entries on all
            ready = self._with_factors(mine)
            known = [*ready, *(others if self._background is None else [])]
            dampings = self._dampings(known, damping)
            scales = self._scales(dampings)
            ready = self._to_solve({block: dampings[block] for block in ready}, damping)
        except Exception as error:  # an exception must not part this rank from the others
            self._tell_of_error([*mine, *(others if self._background is None else [])], error)
            return
        for block, of_layer in dampings.items():
            self.flights[block].damping = of_layer
            self.flights[block].scale = scales.get(block)
        if self._background is None:
            self._solve_at_once(ready)
            return
        # The largest first, so that the threads end together.
        for block in sorted(ready, key=lambda b: -solve_cost_of(b)):
            self.flights[block].ticket = self._launched(block)

    def _with_factors(self, blocks: Sequence[KroneckerBlock]) -> list[KroneckerBlock]:
        """The layers that this rank can solve; the others get their verdicts."""
        device = self._training.device
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

    def _to_solve(
        self, dampings: Mapping[KroneckerBlock, Damping], damping: float
    ) -> list[KroneckerBlock]:
        """The layers, of those with γ, that are not spared by their traces; those get verdicts."""
        judged = not self._budget.measuring
        marks = self.traces.marks(dampings, damping)
        for block, mark in marks.items():
            self.flights[block].mark = mark
            kept = self.traces.verdict(block, mark) if judged else None
            self.flights[block].verdict = Verdict.FLYING if kept is None else kept
        return [block for block in dampings if self.flights[block].verdict is Verdict.FLYING]

    def _dampings(
        self, blocks: Sequence[KroneckerBlock], damping: float
    ) -> dict[KroneckerBlock, Damping]:
        """γ of each layer: ``damping``, or ``damping`` times the layer's mean curvature."""
        if not self._options.relative_damping:
            return dict.fromkeys(blocks, float(damping))
        least = self._options.damping_floor * self.mean_curvature
        return {b: damping * _curvature_of(b).clamp_min(least) for b in blocks}

    def _scales(self, dampings: Mapping[KroneckerBlock, Damping]) -> dict[KroneckerBlock, Tensor]:
        """What each layer's inverse is multiplied by: its mean damped curvature, or nothing."""
        if self._options.preconditioner_scale != "gradient":
            return {}
        return {b: b.ensure_factors().mean_curvature() + of for b, of in dampings.items()}

    def _solve_at_once(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Decompose this rank's factors; an exception here must not part it from the others."""
        options, rank = self._options, self._training.world.rank
        dtype = options.solve_dtype
        mine = [(b, k) for b in blocks for k in b.shape.letters if self._plan[b].solver(k) == rank]
        try:
            problems = [
                self._problem(b, k, partial(b.ensure_factors().matrix, k, dtype), b.weight.device)
                for b, k in mine
            ]
            found = self._solver.decompose(problems, options.inv_dtype, options.symmetry_aware)
        except Exception as error:
            self._tell_of_error(blocks, error)
            return
        for block in blocks:
            self.flights[block].verdict = Verdict.SOUND
        for (block, letter), parts in zip(mine, found, strict=True):
            if parts is None:
                self.flights[block].verdict = Verdict.FAILED
            else:
                self.flights[block].solved[letter] = parts

    def _tell_of_error(self, blocks: Iterable[KroneckerBlock], error: Exception) -> None:
        for block in blocks:
            self.flights[block].verdict = Verdict.FAILED
            block.complain(f" ({type(error).__name__}: {error})")

    def _problem(
        self,
        block: KroneckerBlock,
        letter: str,
        build: Callable[[], Tensor],
        device: torch.device,
    ) -> Problem:
        """Describe a factor to decompose, with its damping and guess.

        Args:
            block: The layer of the factor.
            letter: The factor's letter.
            build: Makes the factor, in the solves' dtype.
            device: The device on which it is decomposed.
        """
        options, shape, inverse = self._options, block.shape, block.inverse
        damping = self.flights[block].damping
        assert damping is not None
        means, position = block.ensure_factors().means, shape.letters.index(letter)
        added = self._solver.dampings(means, damping, shape.exact)[position]
        guess, scale = None, None
        if options.eigen_refresh == "warm" and isinstance(inverse, EigenInverse):
            guess = inverse.vectors.get(letter)
            scale = factored_damping(*means.unbind(), damping=damping)[position]
        return Problem(
            shape.groups,
            shape.dim(letter),
            options.solve_dtype,
            device,
            build,
            added=added,
            guess=guess,
            scale=scale,
            is_diagonal=shape.is_diagonal(letter),
        )

    def _launched(self, block: KroneckerBlock) -> Ticket[Solved]:
        """Submit a layer; an error here becomes a failed ticket, as if it came from a thread."""
        options, threads = self._options, self.threads
        assert threads is not None
        try:
            device = threads.device_for(block.weight.device)
            problems = {k: self._problem(block, k, _never, device) for k in block.shape.letters}
            decompose = partial(
                self._solver.decompose, dtype=options.inv_dtype, triangular=options.symmetry_aware
            )
            return threads.submit(block.ensure_factors(), problems, decompose)
        except Exception as error:
            return Ticket.failed(error)

    # ------------------------------------------------------------------------------------ agree

    def _waits(self, block: KroneckerBlock) -> bool:
        """Whether a layer under way must land at this step; the same on every rank."""
        if self._background is None or not block.solved:
            return True
        age, most = self._training.steps - self.flights[block].step, self._background.max_staleness
        if most is not None and age >= most:
            return True
        return self._budget.measuring or (self.drift is not None and self.drift.late(block, age))

    def _start_agreement(
        self, news: Sequence[float]
    ) -> Callable[[], tuple[dict[KroneckerBlock, Verdict], Sequence[float]]]:
        """Start the collective on verdicts and news; returns a function that waits for them."""
        blocks, background, world = list(self._plan), self._background, self._training.world
        exactly = background is not None and background.deterministic
        if not news and (not self.flights or (exactly and not any(map(self._waits, self.flights)))):
            return lambda: ({}, news)
        if self.threads is not None:
            self.threads.pool.require_own_process()
        said = [
            float(self._verdict(block, self.flights[block]) if block in self.flights else 0)
            for block in blocks
        ]
        # On the CPU: a device need not be waited for to read it.
        message = torch.tensor([*said, *news], device="cpu")
        pending = world.on_cpu().all_reduce_max([message])

        def agreed() -> tuple[dict[KroneckerBlock, Verdict], Sequence[float]]:
            pending.wait()
            heard = message.tolist()
            verdicts = map(Verdict, map(int, heard[: len(blocks)]))
            landing = {b: v for b, v in zip(blocks, verdicts, strict=True) if v > Verdict.FLYING}
            return landing, heard[len(blocks) :]

        return agreed

    def _verdict(self, block: KroneckerBlock, flight: Flight) -> Verdict:
        """This rank's verdict on a layer."""
        if block.state.unexplained:
            return Verdict.UNEXPLAINED
        ticket = flight.ticket
        if ticket is None and flight.verdict is Verdict.FLYING and self._waits(block):
            if self._training.world.backend == "fake":  # solvers' verdicts never come
                return Verdict.SOUND
            return Verdict.UNSEEN if block.state.heard else Verdict.FLYING
        if ticket is None:
            return flight.verdict
        if self._waits(block):
            with self._training.meter.stage("wait"):
                ticket.wait()
        elif (self._background and self._background.deterministic) or not ticket.done:
            return Verdict.FLYING
        # Also SystemExit and the like: they would end this process, or a step of it, alone.
        if ticket.error is not None:
            return Verdict.RAISED
        return Verdict.SOUND if len(ticket.result()) == len(block.shape.letters) else Verdict.FAILED

    # ---------------------------------------------------------------------------------- install

    def _install(
        self, verdicts: Mapping[KroneckerBlock, Verdict]
    ) -> tuple[list[KroneckerBlock], list[str]]:
        """Install solved layers; returns layers that land, and names of those failing too often."""
        options = self._options
        raised = [block for block, verdict in verdicts.items() if verdict is Verdict.RAISED]
        if raised:
            self._raise(raised)
        received = self._exchanged([b for b, v in verdicts.items() if v is Verdict.SOUND])
        failing = []
        for block, verdict in verdicts.items():
            flight = self.flights.pop(block)
            self.traces.land(block, verdict, flight.mark)
            if verdict in (Verdict.SPARED, Verdict.SETTLED):
                continue
            if verdict is not Verdict.SOUND:
                failing += self._note_failure(block, verdict)
                continue
            inverse = None
            if block in received:
                damping, scale, parts = received.pop(block)
                inverse = self._solver.combine(parts, damping, scale)
                self.dampings[block] = damping
            block.install(inverse, None if self.drift is None else options.inv_dtype)
            self.landed_at[block], self.taken_at[block] = self._training.steps, flight.step
        return list(verdicts), failing

    def _exchanged(
        self, sound: Sequence[KroneckerBlock]
    ) -> dict[KroneckerBlock, tuple[Damping, Tensor | None, Solved]]:
        """γ, scale and decompositions of the layers that this rank preconditions."""
        options, device = self._options, self._training.device
        rounding = self.exchange.rounding
        # γ and scale of the flight.
        travels = self._background is not None and self._training.world.size > 1
        scaled = options.preconditioner_scale == "gradient"
        mine: dict[Item, tuple[Tensor, ...]] = {}
        shapes: dict[Item, Shapes] = {}
        for block in sound:
            shape, flight = block.shape, self.flights[block]
            solved = flight.solved
            if flight.ticket is not None:
                assert self.threads is not None
                solved = self.threads.retrieve(flight.ticket)
            if rounding is not None:  # on the solver as by travelling: all workers have the same
                solved = {
                    k: self._solver.rounded(parts, shape.is_diagonal(k), rounding)
                    for k, parts in solved.items()
                }
            for letter in shape.letters:
                kept = self._solver.kept_shapes(
                    shape.groups,
                    shape.dim(letter),
                    shape.is_diagonal(letter),
                    options.symmetry_aware,
                )
                head: tuple[tuple[int, ...], ...] = ()
                if travels and letter == "A":
                    head = ((),) * (2 if scaled else 1)
                shapes[block, letter] = (*head, *kept)
                if letter in solved:
                    mine[block, letter] = solved[letter]
                    if head:
                        numbers = (flight.damping, flight.scale)[: len(head)]
                        dtype = options.inv_dtype
                        sent = (torch.as_tensor(x, dtype=rounding or dtype) for x in numbers)
                        sent = (x.to(dtype) for x in sent)
                        mine[block, letter] = (*(x.to(device) for x in sent), *solved[letter])
            flight.solved, flight.ticket = {}, None
        if sound:
            with self._training.meter.stage("exchange"):
                mine = self.exchange.decompositions(mine, shapes, options.inv_dtype, device)
        received: dict[KroneckerBlock, tuple[Damping, Tensor | None, Solved]] = {}
        for block in sound:
            if self._training.world.rank in self._plan[block].workers:
                parts = {letter: mine.pop((block, letter)) for letter in block.shape.letters}
                known, scale = self.flights[block].damping, self.flights[block].scale
                if travels:  # decompositions are rounded on their solver as they are by being sent
                    heads = parts["A"][: 2 if scaled else 1]
                    # Copies: a view would keep the whole message as long as the inverse.
                    told = [x.to(options.inv_dtype, copy=True) for x in heads]
                    parts["A"] = parts["A"][len(told) :]
                    known, scale = told[0], told[1] if scaled else None
                assert known is not None
                received[block] = known, scale, parts
        return received

    def _note_failure(self, block: KroneckerBlock, verdict: Verdict) -> list[str]:
        """Treat a layer that was not solved; returns its name if it has failed too often."""
        training = self._training
        block.find_silent(verdict in (Verdict.SILENT, Verdict.UNEXPLAINED))
        if verdict is Verdict.UNEXPLAINED:
            self._layers.unexplained_elsewhere(block)
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
            self._layers.newcomers_at = training.steps + 1
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
            if block.state.failures >= self._options.max_consecutive_failures:
                return [block.name]
        return []

    def _raise(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Raise DecompositionError on every rank for an error on some rank's thread."""
        names = ", ".join(repr(block.name) for block in blocks)
        tickets = [self.flights[block].ticket for block in blocks]
        errors = [ticket.error for ticket in tickets if ticket is not None and ticket.done]
        error = next(filter(None, errors), None)
        self.flights.clear()  # other layers' flights, too: one error is raised once
        where = "a thread of another process" if error is None else "a thread"
        said = "" if error is None else f": {type(error).__name__}: {error}"
        raise DecompositionError(f"{where} that solves for {names} has raised{said}") from error

    # --------------------------------------------------------------------------------- the rest

    def close(self) -> None:
        """End the pool of threads."""
        if self.threads is not None:
            self.threads.close()
        self.flights.clear()
        self.traces.forget()
        self._plan, self.landed_at, self.taken_at, self.dampings = {}, {}, {}, {}


def _curvature_of(block: KroneckerBlock) -> Tensor:
    """The layer's mean curvature, a scalar; 1 where the gradients vanish and there is none."""
    curvature = block.ensure_factors().mean_curvature()
    return torch.where(curvature > 0, curvature, 1.0)


def _at_once(blocks: list[KroneckerBlock]) -> Iterable[list[KroneckerBlock]]:
    return [blocks]


def _never() -> Tensor:
    raise AssertionError("a problem is built from its snapshot")

"""A K-FAC step whose inverses are solved on threads while training goes on.

    every inv_update_steps   a snapshot of each layer's factors to the threads of the layer's owner
    every step               all processes hear which layers are solved; owners send their inverses,
                             and all put them to use at this step

A layer is under way from its snapshot to the step at which it lands, and not launched again until
then. A layer without an inverse is waited for, and so are all during ``refresh_warmup_steps``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from second_order.contract.saved import SavedPart
from second_order.distributed.parcels import Shapes, deliver_parts
from second_order.errors import DecompositionError
from second_order.kfac.options import check_damping
from second_order.kronecker.background import (
    Streams,
    Ticket,
    WorkerPool,
    retrieve,
    take_snapshot,
)
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import Decomposition, Problem
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.solvers import Damping
from second_order.kronecker.triangles import unpack_upper_triangular
from second_order.optimizers.kfac import KFACOptimizer
from second_order.optimizers.refresh import FAILED, LOST, UNSEEN
from second_order.options import follow_learning_rates, value_at

__all__ = ["BackgroundOptions", "BackgroundRefresh"]

Solved = list[Decomposition | None]

# What a layer's owner says of it: not yet, sound, or which of those of a refresh on the spot.
FLYING, SOUND, RAISED = 0.0, 0.5, 2.0**30


@dataclass(frozen=True)
class BackgroundOptions:
    """How inverses are solved beside training.

    Attributes:
        threads: Of this process.
        device: Where they are solved: "cpu" or "cuda".
        max_staleness: Steps after which a layer that is under way is waited for; None: never.
        deterministic: Layers land exactly then, not before.
    """

    threads: int
    device: str
    max_staleness: int | None
    deterministic: bool


@dataclass
class Flight:
    """A layer's solve under way.

    Attributes:
        step: Of the snapshot.
        damping: γ of then, on the layer's owner.
        ticket: On the layer's owner; None elsewhere, and if there was nothing to solve.
        verdict: What is known without a solve.
    """

    step: int
    damping: Damping | None = None
    ticket: Ticket[Solved] | None = None
    verdict: float = FLYING


class BackgroundRefresh(KFACOptimizer):
    """What DistKFAC does with inverses. Every layer has an owner, and all precondition it."""

    def __init__(self, *args: Any, background: BackgroundOptions, **keywords: Any) -> None:
        self._background = background
        self._pool = WorkerPool(background.threads)
        self._flights: dict[int, Flight] = {}  # by the index of an active layer
        self._landed_at: dict[KroneckerBlock, int] = {}
        self._taken_at: dict[KroneckerBlock, int] = {}
        self._owners: list[int] = []
        self._made_streams: Streams | None = None
        self._seen: weakref.WeakSet[KroneckerFactors] = weakref.WeakSet()
        super().__init__(*args, **keywords)

    @property
    def staleness(self) -> dict[str, int]:
        """By layer, how old the factors are, in steps, whose inverse is in use at the next step."""
        return {block.name: self._steps - taken for block, taken in self._taken_at.items()}

    @property
    def delays(self) -> dict[str, int]:
        """By layer, how many steps its last solve was under way."""
        landed = self._landed_at.items()
        return {block.name: step - self._taken_at[block] for block, step in landed}

    # --------------------------------------------------------------------------------- the step

    def _transform_gradients(self, average: Callable[[], None]) -> None:
        follow_learning_rates(self.param_groups)
        with record_function("second_order.statistics"):
            self._take_statistics()
        with record_function("second_order.launch"):
            self._launch()
        with record_function("second_order.agree"):
            agreed = self._start_agreement()
        with record_function("second_order.average_gradients"):
            average()
        with record_function("second_order.land"):
            self._land(agreed())
        with record_function("second_order.precondition"):
            self._precondition_gradients()

    def _take_statistics(self) -> None:
        """The factors take in what is due."""
        if self._due("factor_update_steps"):
            self._update_factors()

    # ---------------------------------------------------------------------------------- launch

    def _launch(self) -> None:
        """Snapshots of the layers that are due and not under way."""
        if self._solve_needed:
            self._flights.clear()  # of other factors, or other layers
        if not (self._solve_needed or self._due("inv_update_steps")):
            return
        check_damping(value_at(self._options.damping, self._steps))  # everywhere, before it begins
        self._solve_needed = False
        self._tell_of_overflow()
        todo = [i for i in range(len(self._active)) if i not in self._flights]
        self._flights |= {i: Flight(self._steps) for i in todo}
        mine = [i for i in todo if self._owners[i] == self._world.rank]
        # The largest first, so that the threads end together.
        for i in sorted(mine, key=lambda i: -solve_cost_of(self._active[i])):
            self._launch_one(i, self._flights[i])

    def _launch_one(self, index: int, flight: Flight) -> None:
        try:
            self._prepare(index, flight)
        except Exception as error:  # all are told of it as of one on a thread
            flight.ticket = Ticket.failed(error)

    def _prepare(self, index: int, flight: Flight) -> None:
        block = self._active[index]
        factors = block.ensure_factors()
        if block.lost:
            flight.verdict = LOST
        elif factors not in self._seen and not bool(factors.weight > 0):
            flight.verdict = UNSEEN
        else:
            self._seen.add(factors)  # which needs no second look at the device
            flight.damping = self._damping([index])[index]
            flight.ticket = self._submit(block, flight.damping)

    def _submit(self, block: KroneckerBlock, damping: Damping) -> Ticket[Solved]:
        """A layer's factors, as they are now, to the threads."""
        factors, letters = block.ensure_factors(), block.shape.letters
        device = block.weight.device if self._background.device == "cuda" else torch.device("cpu")
        problems = [self._problem_of(block, letter, damping, _never, device) for letter in letters]
        if device.type == "cuda":  # where float32 products obey a setting of the whole process
            problems = [replace(problem, dtype=torch.float64) for problem in problems]
        added = [p.added for p in problems if p.added is not None]
        stored = [factors.stored[letter] for letter in letters]
        streams, options = self._streams(), self._options
        fetch = take_snapshot([*(t for t in stored if t is not None), *added], device, streams)
        dtype, triangular = options.inv_dtype, options.symmetry_aware
        decompose = partial(self._solver.decompose, dtype=dtype, triangular=triangular)
        work = partial(_solve, fetch, problems, factors.triangular, decompose, streams)
        return self._pool.submit(work)

    def _streams(self) -> Streams | None:
        """What copies and solves beside training; None without CUDA."""
        if self._made_streams is None and self._device().type == "cuda":
            self._made_streams = Streams(*(torch.cuda.Stream(self._device()) for _ in range(3)))
        return self._made_streams

    # ------------------------------------------------------------------------------------- land

    def _waits(self, index: int) -> bool:
        """Whether a layer under way must land at this step; the same on every rank."""
        most, flown = self._background.max_staleness, self._steps - self._flights[index].step
        return (
            not self._active[index].solved
            or self._steps < self._options.refresh_warmup_steps
            or (most is not None and flown >= most)
        )

    def _start_agreement(self) -> Callable[[], list[float]]:
        """What is to be known of each active layer, and what else all have to hear."""
        if self._background.deterministic and not any(map(self._waits, self._flights)):
            news: list[float] = self._news()
            if not news:
                return lambda: [FLYING] * len(self._active)
        self._pool.revive()
        said = [FLYING] * len(self._active)
        for i, flight in self._flights.items():
            if self._owners[i] == self._world.rank:
                said[i] = self._verdict(i, flight)
        said += self._news()
        if self._world.size == 1 or not (self._flights or len(said) > len(self._active)):
            return lambda: said
        # On the CPU: a device need not be waited for to read it.
        message = torch.tensor(said, dtype=torch.float64, device="cpu")
        world = self._world.on_cpu()
        pending = world.start_sum([message])

        def agreed() -> list[float]:
            pending.wait()
            heard: list[float] = message.tolist()
            return heard

        return agreed

    def _news(self) -> list[float]:
        """What else this rank has to say; of the same length everywhere."""
        return []

    def _hear(self, news: Sequence[float]) -> None:
        """What the ranks have said, added up."""

    def _verdict(self, index: int, flight: Flight) -> float:
        """What this rank has to say of a layer it owns."""
        if flight.ticket is None:
            return flight.verdict
        if self._waits(index):
            with record_function("second_order.wait"):
                flight.ticket.wait()
        elif self._background.deterministic or not flight.ticket.done:
            return FLYING
        # Also SystemExit and the like: they would end this process, or a step of it, alone.
        if flight.ticket.error is not None:
            return RAISED
        return FAILED if any(part is None for part in flight.ticket.result()) else SOUND

    def _land(self, said: list[float]) -> None:
        """Put the layers to use that are solved; the same ones on every rank."""
        verdicts, news = said[: len(self._active)], said[len(self._active) :]
        landing = [i for i, verdict in enumerate(verdicts) if verdict != FLYING]
        raised = [i for i in landing if verdicts[i] == RAISED]
        if raised:
            self._raise(raised)
        received = self._send([i for i in landing if verdicts[i] == SOUND])
        hopeless = []
        for i in landing:
            block, flight = self._active[i], self._flights.pop(i)
            if verdicts[i] != SOUND:
                hopeless += self._note_failure(block, verdicts[i], "")
                continue
            block.failures, block.silent, block.solved = 0, False, True
            damping, parts = received[i]
            a, g, *rest = (parts[letter] for letter in block.shape.letters)
            block.inverse = self._solver.combine(a, g, damping, *rest)
            self._landed_at[block], self._taken_at[block] = self._steps, flight.step
        silent = [self._active[i] for i in landing if self._active[i].silent]
        if silent and len(silent) == len(self._active):
            self._warn_of_silence()
        else:
            self._warn_of_absence(silent)
        self._hear(news)
        self._raise_if_hopeless(hopeless)

    def _raise(self, indices: Sequence[int]) -> None:
        """Tell the caller of step() of an error on a thread, on every rank."""
        names = ", ".join(repr(self._active[i].name) for i in indices)
        error = None
        for i in indices:
            ticket = self._flights.pop(i).ticket
            if ticket is not None and ticket.error is not None:
                error = ticket.error
        self._flights.clear()  # the others', too: one error is told once
        where = "a thread of another process" if error is None else "a thread"
        said = "" if error is None else f": {type(error).__name__}: {error}"
        raise DecompositionError(f"{where} that solves for {names} has raised{said}") from error

    def _send(self, sound: Sequence[int]) -> dict[int, tuple[Damping, dict[str, Decomposition]]]:
        """γ and the decompositions of solved layers, from their owners to all ranks."""
        options, device = self._options, self._device()
        mine: dict[int, tuple[Tensor, ...]] = {}
        shapes: dict[int, Shapes] = {}
        counts: dict[int, list[int]] = {}
        here: dict[int, tuple[Damping, dict[str, Decomposition]]] = {}
        for i in sound:
            shape, flight = self._active[i].shape, self._flights[i]
            kept = [
                self._solver.kept_shapes(
                    shape.groups, shape.dim(k), shape.is_diagonal(k), options.symmetry_aware
                )
                for k in shape.letters
            ]
            counts[i] = [len(each) for each in kept]
            shapes[i] = ((), *(part for each in kept for part in each))
            if flight.ticket is None:
                continue
            solved = [parts for parts in flight.ticket.result() if parts is not None]
            flat = retrieve([part for parts in solved for part in parts], device, self._streams())
            assert flight.damping is not None
            here[i] = flight.damping, _by_letter(shape.letters, flat, counts[i])
            if self._world.size > 1:
                damping = torch.as_tensor(flight.damping, dtype=options.inv_dtype, device=device)
                mine[i] = damping, *flat
        if self._world.size == 1 or not sound:
            return here
        everybody = range(self._world.size)
        routes = {i: (self._owners[i], everybody) for i in sound}
        with record_function("second_order.exchange"):
            arrived = deliver_parts(self._world, shapes, routes, mine, options.inv_dtype, device)
        # What is rounded on its way is rounded on its owner, too.
        return {
            i: (
                arrived[i][0].to(options.inv_dtype),
                _by_letter(self._active[i].shape.letters, arrived[i][1:], counts[i]),
            )
            for i in sound
        }

    # -------------------------------------------------------------------------- placement, state

    def _preconditions(self, index: int) -> bool:
        return True

    def _exchange_gradients(
        self, mine: dict[int, Tensor], solved: Sequence[int]
    ) -> dict[int, Tensor]:
        return mine

    def _follow_requires_grad(self) -> None:
        before = self._signature
        super()._follow_requires_grad()
        if self._signature != before:
            self._flights.clear()  # their indices are another plan's
            known = set(self._blocks)
            for steps in (self._landed_at, self._taken_at):
                for block in [b for b in steps if b not in known or not b.solved]:
                    del steps[block]

    def _adopt_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        super()._adopt_curvature(saved)
        self._flights.clear()
        self._landed_at, self._taken_at = {}, {}

    def close(self) -> None:
        """End the threads and remove every hook; the optimizer goes on as its base alone."""
        self._pool.close()
        self._flights.clear()
        self._landed_at, self._taken_at, self._owners = {}, {}, []
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Threads stay here; what is under way on them is launched anew in the copy.
        state |= {"_pool": None, "_made_streams": None, "_flights": {}, "_seen": None}
        state["_solve_needed"] = state["_solve_needed"] or bool(self._flights)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_background" in state:
            self._pool, self._seen = WorkerPool(self._background.threads), weakref.WeakSet()


def solve_cost_of(block: KroneckerBlock) -> float:
    """Of a layer's factors together: the sum of n³."""
    shape = block.shape
    return float(
        sum(
            shape.groups * shape.dim(k) ** (1 if shape.is_diagonal(k) else 3) for k in shape.letters
        )
    )


def _by_letter(
    letters: str, flat: Sequence[Tensor], counts: Sequence[int]
) -> dict[str, Decomposition]:
    remaining = iter(flat)
    return {
        letter: tuple(next(remaining) for _ in range(count))
        for letter, count in zip(letters, counts, strict=True)
    }


def _never() -> Tensor:
    raise AssertionError("a problem is built from its snapshot")


def _solve(
    fetch: Callable[[], list[Tensor]],
    problems: Sequence[Problem],
    triangular: bool,
    decompose: Callable[[Sequence[Problem]], Solved],
    streams: Streams | None,
) -> Solved:
    """On a thread: decompose a layer's factors, from the snapshot of them."""
    snapshot = fetch()
    added = iter(snapshot[len(problems) :])
    built = [
        problem.on(
            partial(_matrix, stored, problem, triangular),
            None if problem.added is None else next(added),
        )
        for stored, problem in zip(snapshot, problems, strict=False)
    ]
    with torch.no_grad():
        if streams is None:
            return decompose(built)
        if problems[0].device.type == "cpu":  # pinned, to be fetched without waiting
            found = decompose(built)
            return [None if p is None else tuple(t.pin_memory() for t in p) for p in found]
        with torch.cuda.stream(streams.solves):
            found = decompose(built)
        streams.solves.record_event().synchronize()
        return found


def _matrix(stored: Tensor, problem: Problem, triangular: bool) -> Tensor:
    """A factor of a snapshot, in full."""
    if not triangular or problem.is_diagonal:
        return stored.to(problem.dtype, copy=True)
    return unpack_upper_triangular(stored.to(problem.dtype), problem.dim)

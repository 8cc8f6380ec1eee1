"""DistKFAC's inverses: solved on threads beside training, put to use when all ranks have them.

A layer is under way from the step that submits a snapshot of its factors until it lands, and is not
submitted again before: at that step if it is due. One without an inverse is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from second_order.budget import IntervalBudget
from second_order.contract.averaging import PendingAverage
from second_order.contract.training import Training
from second_order.errors import DecompositionError
from second_order.kfac.drift import Drift
from second_order.kfac.flights import Flight, Solved, Verdict
from second_order.kfac.layers import Layers
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import solve_cost_of
from second_order.kfac.solves import Arriving, Solves
from second_order.kfac.threads import Background, Threads
from second_order.kronecker.background import Ticket
from second_order.kronecker.block import KroneckerBlock

__all__ = ["SolvesOnThreads"]


class SolvesOnThreads(Solves):
    """The inverses of a training's layers, solved on threads.

    Attributes:
        threads: The threads that solve beside training.
        tickets: By flight, the ticket of a thread's work.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        layers: Layers,
        budget: IntervalBudget,
        drift: Drift | None,
        *,
        background: Background,
    ) -> None:
        super().__init__(training, options, layers, budget, drift)
        self._background, self.threads = background, Threads(training, background)
        self.tickets: weakref.WeakKeyDictionary[Flight, Ticket[Solved]]
        self.tickets = weakref.WeakKeyDictionary()
        if background.max_staleness != 0:
            self.agreeing = "wait"

    @property
    def heads(self) -> int:  # type: ignore[override]
        """γ, and the scale, if there are others to tell: their factors have moved on."""
        scaled = self.options.preconditioner_scale == "gradient"
        return 0 if self.training.world.size == 1 else 1 + scaled

    def check_device(self) -> None:
        """Raise ValueError if layers are to be solved on a device that does not exist."""
        self.threads.check_device()

    def post(self, copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Send copies of tensors from the CPU, by a thread where they are on a device."""
        self.threads.post(copies, send)

    def run(
        self,
        due: Sequence[KroneckerBlock],
        damping: float,
        pending: PendingAverage,
        news: Sequence[float],
        arriving: Arriving | None,
    ) -> tuple[Sequence[float], list[KroneckerBlock], list[str]]:
        """Submit what is due, install what has come, and submit what is due of that again."""
        under_way = list(self.flights)
        stage = self.training.meter.stage
        with stage("launch"):
            self.submit([block for block in due if block not in self.flights], damping)
        if due:
            self.layers.tell_of_sums()
        news, landed, hopeless = self.land(pending, news)
        if due:
            self.wanted = False
            came = {b for b in under_way if b not in self.flights and b.solved}
            with stage("launch"):
                self.submit([block for block in due if block in came], damping)
        return news, landed, hopeless

    def submit(self, blocks: Sequence[KroneckerBlock], damping: float) -> None:
        """Hand this rank's layers to threads, the largest first, so that they end together."""
        for block in sorted(self.ready(blocks, damping), key=lambda b: -solve_cost_of(b)):
            self.tickets[self.flights[block]] = self._launched(block)

    def _launched(self, block: KroneckerBlock) -> Ticket[Solved]:
        """Submit a layer; an error here becomes a failed ticket, as if it came from a thread."""
        options, threads = self.options, self.threads
        try:
            device = threads.device_for(block.weight.device)
            problems = {k: self.problem(block, k, device) for k in block.shape.letters}
            decompose = partial(
                self.solver.decompose, dtype=options.inv_dtype, triangular=options.symmetry_aware
            )
            return threads.submit(block.ensure_factors(), problems, decompose)
        except Exception as error:
            return Ticket.failed(error)

    def _waits(self, block: KroneckerBlock) -> bool:
        """Whether a layer under way must land at this step; the same on every rank."""
        if not block.solved or self.budget.measuring:
            return True
        age, most = self.training.steps - self.flights[block].step, self._background.max_staleness
        late = self.drift is not None and self.drift.late(block, age)
        return late or (most is not None and age >= most)

    def agrees(self) -> bool:
        """Whether any layer may land now; the same on every rank."""
        exactly = self._background.deterministic
        return any(map(self._waits, self.flights)) if exactly else bool(self.flights)

    def verdict(self, block: KroneckerBlock, flight: Flight) -> Verdict:
        """This rank's verdict on a layer that is under way."""
        self.threads.pool.require_own_process()
        ticket, waits = self.tickets.get(flight), self._waits(block)
        if block.state.unexplained or (ticket is None and waits):
            return super().verdict(block, flight)
        if ticket is None:
            return flight.verdict
        if waits:
            with self.training.meter.stage("wait"):
                ticket.wait()
        elif self._background.deterministic or not ticket.done:
            return Verdict.FLYING
        # Also SystemExit and the like: they would end this process, or a step of it, alone.
        if ticket.error is not None:
            return Verdict.RAISED
        return Verdict.SOUND if len(ticket.result()) == len(block.shape.letters) else Verdict.FAILED

    def retrieved(self, flight: Flight) -> Solved:
        """The decompositions of this rank, on the training's device."""
        ticket = self.tickets.pop(flight, None)
        return {} if ticket is None else self.threads.retrieve(ticket)

    def install(self, verdicts: Mapping[KroneckerBlock, Verdict]) -> list[str]:
        """Put solved layers to use.

        Raises:
            DecompositionError: On every rank, for an error on some rank's thread.
        """
        raised = [block for block, verdict in verdicts.items() if verdict is Verdict.RAISED]
        if not raised:
            return super().install(verdicts)
        tickets = [self.tickets.get(self.flights[block]) for block in raised]
        errors = [ticket.error for ticket in tickets if ticket is not None and ticket.done]
        error = next(filter(None, errors), None)
        self.flights.clear()  # other layers' flights, too: one error is raised once
        where = "a thread of another process" if error is None else "a thread"
        said = "" if error is None else f": {type(error).__name__}: {error}"
        names = ", ".join(repr(block.name) for block in raised)
        raise DecompositionError(f"{where} that solves for {names} has raised{said}") from error

    def close(self) -> None:
        """End the threads, and forget all layers."""
        self.threads.close()
        super().close()

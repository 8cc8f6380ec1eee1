"""MRDHO2: what a rank does, by its role, and a worker's epochs.

    accelerators=0, or one process   Alone: DHO2 with an interval of an epoch
    the first P - A ranks            Worker: the base, and a final update at the end of each epoch
    the last A ranks                 Accelerating: eigenpairs for the workers, and nothing else

    begin   c <- w, p <- 0; worker 0 sends c and what does not train; all listen for the pairs at c
    add     p <- p + g, every step
    end     w <- w − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w − c)]; "guarded" asks for a verdict first

With "within" there is no p, and no update at the end: the next epoch's steps use û and V̂, those of
:class:`~second_order.fosi.curvature.FOSICurvature`. The first `warmup_steps` are of no epoch. The
workers agree on each of these, so that their weights stay equal. All ranks keep the counts of a
checkpoint about the epoch under way.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from second_order.contract.arguments import refuse_ddp_over_helpers
from second_order.contract.saved import SavedPart
from second_order.contract.training import PendingAverage, Training
from second_order.distributed.buckets import pack_by_dtype
from second_order.distributed.mailbox import (
    Mailbox,
    Message,
    Patience,
    await_goodbyes,
    connected,
    open_store,
)
from second_order.distributed.roles import Role, assign_roles, whole_models
from second_order.fosi.accelerator import Accelerator, Batches
from second_order.fosi.checkpoint import START, SUM, counts_of, load_vector, vector_parts
from second_order.fosi.curvature import FOSICurvature
from second_order.fosi.eigenpairs import Closures, publish
from second_order.fosi.metrics import epoch_metrics
from second_order.fosi.options import EpochOptions
from second_order.fosi.pieces import Chunk
from second_order.fosi.subspace import Basis, ColumnBasis, newton_rates
from second_order.fosi.trust import Flag
from second_order.fosi.vector import ParameterVector
from second_order.report import EpochReport
from second_order.sharded import is_checkpointing, is_dtensor

__all__ = [
    "LEAST_FALL",
    "Accelerating",
    "Alone",
    "Divided",
    "Epochs",
    "Worker",
    "correction",
    "divided_curvature",
    "refusal",
]

ADDED_STEPS = 10  # how many of an epoch's last gradients "additive" averages
# Share by which the loss of the accelerators' batch must fall for "guarded". Smaller
# falls on one batch at one moment tell little of where training ends.
LEAST_FALL = 0.5
REMEMBERED = 1000  # number of reports kept
GONE, UNSOUND = "the accelerators are gone", "the eigenpairs are not finite"


class Epochs:
    """The epochs of one worker.

    Attributes:
        number: Number of the epoch under way.
        step: Number of the epoch's steps that have been taken.
        start: c, the epoch's first point, flat; None if there is to be no final update.
        total: p, the sum of gradients, as ``start``; None if there is to be no final update.
        helped: Whether accelerators are at work for this worker.
        found: û and the residuals of the last eigenpairs that came.
        fresh: The eigenpairs for the next epoch's steps, as :meth:`RefreshedPairs.take` takes them;
            None but at the end of an epoch that has found some, with "within".
        reports: Reports of the last epochs. Workers wait until they agree on what has come, so
            ``waited`` is long on all where one waits.
    """

    def __init__(self, training: Training, vector: ParameterVector, options: EpochOptions) -> None:
        self._training, self._vector, self._options = training, vector, options
        self._mailbox: Mailbox | None = None
        self._patience = options.helper_timeout
        self._added = min(ADDED_STEPS, options.epoch_steps)
        self.number = self.step = 0
        self.start: Tensor | None = None
        self.total: Tensor | None = None
        self._parts: list[Tensor] = []  # views of p with the shapes of parameters
        self.helped = False
        self.found: tuple[Tensor, Tensor] | None = None
        self.fresh: tuple[Tensor, Tensor, Tensor, float] | None = None
        self.reports: deque[EpochReport] = deque(maxlen=REMEMBERED)
        self._asked = -1  # the epoch whose eigenpairs are under way
        self._request = -1  # number of the message with these
        self._taken = 0  # steps taken with this object
        self._unsound = False  # whether eigenpairs ever were unsound

    def connect(self, mailbox: Mailbox) -> None:
        """Begin to work with accelerators, over a mailbox."""
        self._mailbox, self.helped = mailbox, True

    @property
    def _warming_up(self) -> bool:
        """Whether the base steps alone, before the first epoch."""
        begun = self.number or self.step
        return not begun and self._training.steps < self._options.first_epoch

    def add(self) -> None:
        """Take in a step's gradients, and begin an epoch with its first."""
        if not self.helped or self._warming_up:
            return
        if self._asked != self.number:
            self._begin()
        adds = self._options.final_update == "additive"
        last = self._options.epoch_steps - self._added
        if self.total is None or (adds and self.step < last):
            return
        params = self._vector.params
        if not self._parts:  # views: packing small gradients first would cost more than adding them
            pieces = self.total.split([p.numel() for p in params])
            self._parts = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
        pairs = zip(self._parts, params, strict=True)
        here = [(total, p.grad) for total, p in pairs if p.grad is not None]
        if here:  # a step may have been without backward
            torch._foreach_add_([t for t, _ in here], [gradient for _, gradient in here])

    def _begin(self) -> None:
        """Send c to the accelerators; an epoch from a checkpoint has c and p already."""
        assert self._mailbox is not None
        vector, elsewhere = self._vector, []
        if self.start is None or self.step == 0:
            self.start, self._parts = vector.flat(), []
            if not self._options.within:
                self.total = torch.zeros_like(self.start, dtype=vector.dtype)
        else:
            elsewhere = [self.start]
        self._asked, self._request = self.number, self._request + 1
        self._post(self._mailbox, f"point/{self._request}", elsewhere, epoch=self.number)
        for name in self._expected():
            self._mailbox.expect(name)

    def _post(self, mailbox: Mailbox, name: str, elsewhere: Sequence[Tensor], **note: int) -> None:
        """Send the model, as worker 0, and another point than where it is."""
        if self._training.world.rank == 0:
            whole = self._training.whole_model()
            model, train = pack_by_dtype(whole), [t.requires_grad for t in whole]
            said = {"train": train, "size": self._vector.layout.size, "model": len(model), **note}
            mailbox.post(name, [*model, *elsewhere], **said)

    def _expected(self) -> list[str]:
        helpers = range(self._options.accelerators)
        return [f"pairs/{self._request}/{self._training.world.rank}/{a}" for a in helpers]

    def stepped(self, scales: Callable[[], Sequence[float | Tensor]]) -> EpochReport | None:
        """Count a step of the base; after the epoch's last, end it and return its report.

        The update takes α of each group from ``scales``, which is called once an epoch.
        """
        if not self.helped:
            return None
        assert self._mailbox is not None
        self.fresh = None
        self.step, self._taken, report = self.step + (not self._warming_up), self._taken + 1, None
        if self.step >= self._options.epoch_steps:
            with self._training.meter.stage("final_update"), self._vector.plain():
                report = self._end(self._mailbox, scales())
            self.reports.append(report)
            self.let_go()
            self.number, self.step = self.number + 1, 0
        self._mailbox.tell("steps", self._taken)
        return report

    def _end(self, mailbox: Mailbox, scales: Sequence[float | Tensor]) -> EpochReport:
        """End the epoch, and use its eigenpairs if every worker has sound ones."""
        found, waited = self._await(mailbox, self._expected())
        if not found:
            return EpochReport(self.number, waited, False, GONE)
        if self.start is None or (self.total is None and not self._options.within):
            return EpochReport(self.number, waited, False, "other parameters train now")
        sound = all(note["finite"] for _, note in found)  # all workers are told the same
        if not sound or (self._options.within and not math.isfinite(found[0][1]["loss"])):
            if not self._unsound:
                self._training.warn(
                    f"the accelerators' eigenpairs of epoch {self.number} are not finite; the base "
                    f"goes on alone until sound ones come"
                )
            self._unsound = True
            return EpochReport(self.number, waited, False, UNSOUND)
        (values, residuals, _), note = found[0]
        self.found, products = (values, residuals), int(note["products"])
        vector, adds = self._vector, self._options.final_update == "additive"
        rows = torch.cat([tensors[2].to(vector.device, vector.dtype) for tensors, _ in found], -1)
        if self.total is None:
            self.fresh = values.double(), residuals.double(), rows, note["loss"]
            return EpochReport(self.number, waited, True, products=products)
        before = vector.flat()
        change, sound_step = correction(
            None if adds else before - self.start,
            self.total / self._added if adds else self.total,
            ColumnBasis(rows, vector.chunks, self._training.world, len(values)),
            newton_rates(values, self._options.eigenvalue_floor),
            vector.chunks,
            scales,
        )
        if not bool(sound_step):  # the same on all workers, as its sums are
            what = f"the final update of epoch {self.number}"
            self._training.warn(f"{what} is not finite: it is left out")
            return EpochReport(self.number, waited, False, UNSOUND, products=products)
        after = before + change
        if self._options.final_update != "guarded":
            vector.overwrite(after)
            return EpochReport(self.number, waited, True, products=products)
        return self._ask(mailbox, after, waited, products)

    def _ask(self, mailbox: Mailbox, after: Tensor, waited: float, products: int) -> EpochReport:
        """Make the update if the loss of the accelerators' batches halves with it."""
        name = f"verdict/{self._request}/{self._training.world.rank}"
        mailbox.expect(name)
        self._post(mailbox, f"try/{self._request}", [after])
        found, more = self._await(mailbox, [name])
        waited += more
        if not found:
            return EpochReport(self.number, waited, False, GONE)
        old, new = found[0][1]["losses"]
        reason = refusal(old, new)
        if not reason:
            self._vector.overwrite(after)
        return EpochReport(self.number, waited, not reason, reason, old, new, products)

    def _await(self, mailbox: Mailbox, names: Sequence[str]) -> tuple[list[Message], float]:
        """The messages if every worker has all of its own, and the seconds waited.

        None otherwise: the accelerators are lost, are given up, and the base goes on alone.
        """
        begun, patience, training = time.monotonic(), Patience(self._patience), self._training
        with training.meter.stage("wait"):
            messages = [mailbox.wait(name, patience.ended) for name in names]
        found = [message for message in messages if message is not None]
        agreed = training.world.all_agree(len(found) == len(messages), self._vector.device)
        waited = time.monotonic() - begun
        if not agreed:
            why = f" ({mailbox.failure})" if mailbox.failure else ""
            training.warn(
                f"the accelerators have left, died, or not answered in {self._patience:g} s{why}: "
                f"{training.base_name} goes on alone"
            )
            self._patience = 0.1  # no accelerator is left to say goodbye to
            self.close()
        return found if agreed else [], waited

    def close(self) -> None:
        """Say goodbye to the accelerators, and go on as the base alone."""
        if self._mailbox is not None:
            self._mailbox.close(self._patience)
        self.helped = False
        self.let_go()

    def let_go(self) -> None:
        """Drop c and p: this epoch gets no final update."""
        self.start = self.total = None
        self._parts = []

    def counts(self) -> dict[str, float]:
        """The counts for a checkpoint: epoch, its steps taken, whether c and p are saved."""
        sums = float(self.start is not None)
        return {"epoch": self.number, "epoch_step": self.step, "epoch_sums": sums}

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Go on where a checkpoint was made, with its c and p if it has them.

        Eigenpairs that are under way are not used.
        """
        counts, vector = counts_of(saved), self._vector
        if self._asked == self.number and self.helped and self._mailbox is not None:
            for name in self._expected():
                self._mailbox.forget(name, coming=True)
        self.fresh, self._asked = None, -1
        self.number, self.step = counts.get("epoch", 0), counts.get("epoch_step", 0)
        self.let_go()
        if self.step and counts.get("epoch_sums", 1.0) and self.helped:
            self.start = load_vector(saved, START, vector.params, vector.layout.dtype)
            if not self._options.within:
                self.total = load_vector(saved, SUM, vector.params, vector.dtype)
                self.start = None if self.total is None else self.start  # of "within"


def refusal(before: float, after: float) -> str:
    """Why "guarded" does not make an update between these losses of batches; "" if it does."""
    what = "the loss of the accelerators' batches"
    if not math.isfinite(before):
        return f"{what} is not finite"
    if not math.isfinite(after):
        return f"{what} would not have been finite"
    if after > before:
        return f"{what} would have risen"
    enough = after < before and after <= before - LEAST_FALL * abs(before)
    return "" if enough else f"{what} would have fallen by less than {LEAST_FALL:.0%}"


def correction(
    moved: Tensor | None,
    gradient: Tensor,
    basis: Basis,
    rates: Tensor,
    chunks: Sequence[Chunk],
    scales: Sequence[float | Tensor],
) -> tuple[Tensor, Flag]:
    """−V̂ [α |û|⁻¹ ∘ V̂ᵀp + V̂ᵀ(w_E − c)], equation 17 of MR-DHO2: the final update.

    Of V̂, this worker's vectors are in the basis; p is ``gradient``, ``(n,)``, w_E − c is ``moved``,
    or None to leave out the last term; α of each group is in ``scales``. Returns the update, zeros
    if it is not finite, and whether it is.
    """

    def coefficients(x: Tensor) -> Tensor:
        return basis.coefficients([x[chunk.columns] for chunk in chunks])

    newton = coefficients(gradient) * rates[basis.mine].to(gradient)
    undone = torch.zeros_like(newton) if moved is None else coefficients(moved.to(gradient))
    steps = [-(scale * newton + undone) for scale in scales]
    result = torch.zeros_like(gradient)
    parts = [result[chunk.columns] for chunk in chunks]
    return result, basis.add(parts, steps, [chunk.group for chunk in chunks])


def divided_curvature(
    training: Training, options: EpochOptions, closure: Closures | None
) -> Divided:
    """Make the curvature for this rank's role."""
    world = training.world
    if not (options.wanted and options.accelerators and world.size > 1):
        return Alone(training, options, closure)
    helps = world.rank >= world.size - options.accelerators
    return (Accelerating if helps else Worker)(training, options, closure)


class Divided(FOSICurvature):
    """The base class of the roles, which keeps the place in the epochs.

    Attributes:
        epochs: The place in the epochs; only a worker runs them.
    """

    options: EpochOptions
    role: Role = "worker"

    def __init__(self, training: Training, options: EpochOptions, closure: Closures | None) -> None:
        super().__init__(training, options, closure)
        self.epochs = Epochs(training, self.vector, options)

    def begin(self) -> None:
        """Raise ValueError if no process would be left to train, TypeError for others' shards."""
        world, under_ddp = self.training.world, self.training.under_ddp
        self._roles = assign_roles(world.size, self.options.accelerators, "accelerator", under_ddp)
        super().begin()

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        epochs = self.epochs
        place = epochs.number, epochs.step, epochs.helped
        return [*super().facts(), ("epoch, its steps, accelerators at work", place)]

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        return {**super().counts(), **self.epochs.counts()}

    def metrics(self) -> dict[str, float]:
        """Numbers to log, those of the epochs among them."""
        return super().metrics() | epoch_metrics(self.epochs.number, self.epochs.reports)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over counts, eigenpairs, and the place in the epochs."""
        super().load(saved)
        self.epochs.load(saved)


class Alone(Divided):
    """MRDHO2 without accelerators: each process computes eigenpairs once an epoch."""

    def begin(self) -> None:
        """Warn that no accelerators are at work."""
        super().begin()
        training, options = self.training, self.options
        size = training.world.size
        if options.wanted:
            training.warn(
                f"MRDHO2 with {size} process{'es' * (size > 1)} and "
                f"accelerators={options.accelerators}: nobody computes eigenpairs on the side, so "
                f"each process stops for them every {options.epoch_steps} steps, as DHO2 does"
            )
        elif self._roles.helpers:
            training.warn(
                f"largest=0 and smallest=0: the {options.accelerators} accelerators have nothing "
                f"to do, so all {size} processes train"
            )


class _Team(Divided):
    """One of two kinds of processes, which talk to each other."""

    computes_pairs = False
    mailbox: Mailbox | None = None
    _store: TCPStore | None = None
    _names: Sequence[str] = ()  # of all processes

    def check_shards(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if FSDP2 has sharded parameters."""
        if any(map(is_dtensor, params)):
            raise ValueError(whole_models(self.training.name, "accelerator"))

    def begin(self) -> None:
        """Give every process its role, and workers and accelerators a way to talk."""
        super().begin()
        training, patience = self.training, self.options.helper_timeout
        everybody, first = training.world, self._roles.helpers[0]
        self._store, address = open_store(everybody, first)
        names = [f"{self._roles.of(rank)} {rank}" for rank in range(everybody.size)]
        peer = names[0 if everybody.rank == first else first]
        self._names = names
        make = partial(Mailbox, address, names[everybody.rank], peer, patience, training)
        (self.mailbox,) = connected(everybody, [make])
        training.world = self._roles.team(everybody, patience)
        training.averages = training.averages and training.world.size > 1
        if training.known:
            refuse_ddp_over_helpers(training, self._roles, everybody)
        self.join(self.mailbox)

    def join(self, mailbox: Mailbox) -> None:
        """Take up the role of this process, with the mailbox to the other kind."""
        raise NotImplementedError

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and its part of c and p, or zeros in their place."""
        parts, here = super().state(), {START: self.epochs.start, SUM: self.epochs.total}
        kept = {name: vector for name, vector in here.items() if vector is not None}
        if parts and len(kept) < len(here) and is_checkpointing(part=True):  # read in place
            size, dtype, device = self.vector.layout.size, self.vector.dtype, self.vector.device
            room = {name: torch.zeros(size, dtype=dtype, device=device) for name in here}
            kept = room | kept
        vectors = vector_parts(kept, self.vector.params)
        return {p: {**part, **vectors[p]} for p, part in parts.items()}


class Worker(_Team):
    """Trains by the base, and updates by others' eigenpairs at the end of each epoch."""

    def join(self, mailbox: Mailbox) -> None:
        """Begin the first epoch."""
        self.epochs.connect(mailbox)

    @property
    def steps_by_pairs(self) -> bool:
        """Whether the steps of an epoch use the last one's eigenpairs."""
        return self.options.within and self.epochs.helped

    def parameters_changed(self) -> None:
        """Drop the final update: other parameters train now than at the epoch's start."""
        if self.epochs.start is not None:
            what = "eigenpairs" if self.options.within else "final update"
            self.training.warn(f"the parameters that train have changed: this epoch has no {what}")
            self.epochs.let_go()
            publish(self.training)
        super().parameters_changed()

    def precondition(self, pending: PendingAverage) -> None:
        """Add the step's gradients to p, or split them by the last epoch's eigenpairs."""
        super().precondition(pending)
        self.epochs.add()

    def correct(self) -> None:
        """End the epoch, if this was its last step."""
        super().correct()
        report = self.epochs.stepped(self.newton_scales)
        if report is None:
            return
        tally = self.pairs.tally
        tally.failures += report.reason == UNSOUND
        if report.products:
            tally.add(self.training.steps + 1 - self.options.epoch_steps, report.products)
        if self.epochs.fresh is not None:
            with self.training.meter.stage("final_update"):
                self.pairs.take(*self.epochs.fresh)
            self.epochs.fresh = None
        elif self.subspace is not None:
            self.pairs.drop()  # those before are two epochs old by now
        publish(self.training)  # frees c and p

    def found(self) -> tuple[Tensor, Tensor]:
        """û and the residuals of the last eigenpairs that came."""
        return super().found() if self.epochs.found is None else self.epochs.found

    def close(self) -> None:
        """Say goodbye to the accelerators, and go on as the base alone."""
        self.epochs.close()
        super().close()


class Accelerating(_Team):
    """Computes eigenpairs for the workers."""

    role: Role = "accelerator"
    scaler_matters, helps = "", True
    accelerator: Accelerator | None

    def join(self, mailbox: Mailbox) -> None:
        """Listen to the workers."""
        workers = len(self._roles.workers)
        self.accelerator = Accelerator(self.training, self.vector, self.options, mailbox, workers)

    def prepare(self) -> None:
        """Help until the workers have taken a step, in place of a step."""
        self.training.steps += 1
        chosen = self.closure_now()
        if self.accelerator is not None:
            self.accelerator.help_for_a_step(lambda epoch: chosen)

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close; returns the number of epochs served."""
        if self.accelerator is None:
            return 0
        before, closure_at = self.accelerator.answered, Batches(batches, loss_fn).closure
        self.accelerator.help(closure_at)
        return self.accelerator.answered - before

    def close(self) -> None:
        """Say goodbye, and keep the store until the others have said theirs."""
        patience = self.options.helper_timeout
        if self.accelerator is not None:
            self.accelerator.close(patience)
            if self._store is not None and self.mailbox is not None and self.mailbox.closed_there:
                await_goodbyes(self._store, self._names, patience)
                self._store = None
        super().close()

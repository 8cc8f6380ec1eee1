"""The work of MRDHO2's accelerators: eigenpairs for workers, verdicts on their updates.

workers          first accelerator         the others
point/i, c   ->  order/k: compute     ->   c, too; then Lanczos, all together
                 order/k: skip        ->   where the point was malformed: no pairs, instead
                 pairs/i/j/a: û, residuals, and worker j's vectors, accelerator a's rows of them;
                              in the note, the loss of all batches at c
try/i        ->  order/k: judge       ->   w_E without and with V̂'s, too; then the loss of each
                 verdict/i/j: the losses of all batches
goodbye      ->  order/k: leave       ->

Worker 0 sends points; where FSDP2 has sharded the model, every other worker j sends point/i/j and
try/i/j, too, with its rows, and an order has all of them. Accelerators may be sharded themselves:
`pair_routes.py` tells which elements go where.

With each point goes the rest of the model, frozen parameters and buffers, and which of them train.
i counts the requests, from 0 on, whatever epochs a checkpoint takes the workers to. An idle
accelerator waits for a message, never in a collective; before a collective all agree on whether one
of them has failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from second_order.distributed.mailbox import Mailbox
from second_order.distributed.messages import MalformedError, Message, require_form
from second_order.errors import SecondOrderError
from second_order.fosi.eigenpairs import Closures, wanted_pairs
from second_order.fosi.options import EpochOptions
from second_order.fosi.pair_routes import PairRoutes
from second_order.fosi.subject import Subject
from second_order.lanczos.spectrum import Pairs, mean_loss

__all__ = ["Accelerator", "Batches"]

T = TypeVar("T")
ClosureAt: TypeAlias = Callable[[int], Closures]
Order: TypeAlias = tuple[str, Sequence[Tensor], dict[str, Any]]

# Entries of each order's note, and its number of vectors.
ORDERS: dict[str, tuple[dict[str, Any], int]] = {
    "compute": ({"epoch": int, "train": [bool], "sharded": [bool]}, 1),
    "judge": ({"train": [bool], "sharded": [bool]}, 2),
    "skip": ({}, 0),
    "leave": ({"lost": str}, 0),
}
PARTING_SECONDS = 1.0  # seconds for a failing accelerator's goodbye


class Accelerator:
    """Answers the workers' messages.

    Args:
        subject: The model and the parameters that train, among the accelerators.
        options: The options of the eigenpairs.
        mailbox: The mailbox to worker 0 on the first accelerator; to the first on the others.
        workers: Number of workers.

    Attributes:
        answered: Number of points whose eigenpairs have been computed.
        lost: Name of the process that is no longer heard of, or "".
    """

    def __init__(
        self, subject: Subject, options: EpochOptions, mailbox: Mailbox, workers: int
    ) -> None:
        self._subject, self._options, self._mailbox = subject, options, mailbox
        self._team, self._workers = subject.training.world, workers
        self._loss_fn: Closures | None = None
        self._orders = self._calls = 0
        self._over = self._in_parts = False
        self.answered = 0
        self.lost = ""

    @property
    def dismissed(self) -> bool:
        """Whether the other side has said goodbye."""
        return self._mailbox.closed_there

    def close(self, patience: float) -> None:
        """Say goodbye to the other side."""
        self._over = True
        self._mailbox.close(patience)

    def help_for_a_step(self, closure_at: ClosureAt) -> None:
        """Help until the workers have taken as many steps as there were calls of this method."""
        self._calls += 1
        mailbox, calls = self._mailbox, self._calls
        self.help(closure_at, lambda: (mailbox.heard("steps") or 0) >= calls)
        mailbox.tell("steps", calls)  # for the other accelerators

    def help(self, closure_at: ClosureAt, enough: Callable[[], bool] = lambda: False) -> None:
        """Answer messages until the workers close or are lost, or it is enough.

        Args:
            closure_at: The curvature closure of an epoch.
            enough: Tells whether to return; called while no message is there.

        Raises:
            CurvatureError: If the loss cannot be evaluated or differentiated twice.
            SecondOrderError: If another accelerator has failed.
        """
        while not self._over:
            order = self._lead(enough) if self._team.rank == 0 else self._follow(enough)
            if order is None:
                if enough():
                    return
                continue  # unless the workers have closed
            what, tensors, note = order
            try:
                if what == "fail":  # seen by all in the next collective
                    self._together(partial(_raise, SecondOrderError(note["why"])))
                elif what == "skip":
                    self._answer_nothing()
                elif what == "compute":
                    self._compute(closure_at, tensors, note)
                else:
                    self._judge(tensors, note)
            except Exception:
                self.close(PARTING_SECONDS)
                raise

    def _lead(self, enough: Callable[[], bool]) -> Order | None:
        """The next order, from the workers' messages; sent to the other accelerators."""
        mailbox, point, left = self._mailbox, f"point/{self.answered}", False
        judges = self._options.final_update == "guarded" and self._loss_fn is not None
        trial = f"try/{self.answered - 1}" if judges else ""
        for name in filter(None, (point, trial)):
            mailbox.expect(name)
        what, message = "compute", mailbox.wait(point, lambda: mailbox.holds(trial) or enough())
        if message is not None:
            try:
                message = self._completed(what, point, message)
                left = message is None
            except MalformedError:
                what, message = "skip", ([], {})
        elif (message := mailbox.arrived(trial)) is not None:
            what = "judge"
            try:
                message = self._completed(what, trial, message)
                left = message is None
            except MalformedError:
                self._say_verdict([None, None])
                return None
        if message is None:
            if not (left or mailbox.closed_there or mailbox.lost):
                return None
            what, self._over = "leave", True
            if not mailbox.closed_there:
                self.lost = f"the workers have not been heard of any more{self._why()}"
        mailbox.forget(trial)
        tensors, note = message or ([], {"lost": self.lost})
        known = {name: note[name] for name in ORDERS[what][0]}  # whatever else it says
        for a in range(1, self._team.size):
            mailbox.post(f"order/{self._orders}/{a}", tensors, do=what, **known)
        self._orders += 1
        return None if self._over else (what, tensors, note)

    def _completed(self, what: str, name: str, message: Message) -> Message | None:
        """The first worker's message with what the others have sent; None if they have left.

        Raises:
            MalformedError: If one of them is no such order; it has been refused.
        """
        mailbox, parts = self._mailbox, {name: message}
        others = [f"{name}/{worker}" for worker in range(1, self._workers)]
        try:
            self._require(name, partial(_require_order, what, message))
        except MalformedError:
            for other in others if self._in_parts else ():
                mailbox.decline(other)
            raise
        self._in_parts = any(message[1]["sharded"])
        if self._in_parts:
            rest = mailbox.wait_all(others)
            if rest is None:
                return None
            parts |= zip(others, rest, strict=True)
        for other in others if self._in_parts else ():
            self._require(other, partial(_require_part, what, parts[other][0], len(message[0])))
        return [t for tensors, _ in parts.values() for t in tensors], message[1]

    def _require(self, name: str, check: Callable[[], None]) -> None:
        """Check a message, and refuse it if it is malformed; raises MalformedError then."""
        try:
            check()
        except MalformedError as why:
            self._mailbox.refuse(name, why)
            raise

    def _why(self) -> str:
        return f" ({self._mailbox.failure})" if self._mailbox.failure else ""

    def _follow(self, enough: Callable[[], bool]) -> Order | None:
        """The next order, as the first accelerator sends it."""
        mailbox, name = self._mailbox, f"order/{self._orders}/{self._team.rank}"
        mailbox.expect(name)
        message = mailbox.wait(name, enough)
        if message is None:
            self._over = mailbox.closed_there or mailbox.lost
            if self._over and not mailbox.closed_there:
                self.lost = f"the first accelerator has not been heard of any more{self._why()}"
            return None
        self._orders += 1
        tensors, note = message
        try:
            require_form(note, do=str)
            _require_order(note["do"], message)
        except MalformedError as why:
            mailbox.refuse(name, why)
            return "fail", [], {"why": f"the first accelerator's {name} was refused: {why}"}
        if note["do"] == "leave":
            self._over, self.lost = True, note["lost"]
            return None
        return note["do"], tensors, note

    def _together(self, work: Callable[[], T]) -> T:
        """Do local work, and raise on all accelerators if it has failed on one; a collective."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        try:
            agreed = self._team.all_agree(error is None, self._subject.vector.device)
        except Exception as caught:
            if error is not None:
                raise error from None
            raise SecondOrderError("another accelerator has died, or stands still") from caught
        if error is not None:
            raise error
        if not agreed:
            raise SecondOrderError("another accelerator has failed; its own error tells why")
        return result

    def _compute(
        self, closure_at: ClosureAt, tensors: Sequence[Tensor], note: dict[str, Any]
    ) -> None:
        """Compute û, V̂ at c, and send them to the workers."""

        def prepare() -> Closures:
            self._take_over("compute", 0, tensors, note)
            return closure_at(note["epoch"])

        self._loss_fn = self._together(prepare)
        pairs, loss = self._pairs(self._loss_fn, note["epoch"])
        to_shards = self._sharded_vector(note)
        self._together(partial(self._deliver, pairs, loss, to_shards=to_shards))
        self.answered += 1

    def _take_over(
        self, what: str, which: int, tensors: Sequence[Tensor], note: dict[str, Any]
    ) -> None:
        """Set the model to a point of the workers', frozen parameters and buffers included.

        Args:
            what: The order.
            which: Index of the vector among those of the order.
            tensors: Each worker's part of the vectors and of the rest, one worker after the other.
            note: The order's note.
        """
        subject, vectors = self._subject, ORDERS[what][1]
        workers = self._workers if any(note["sharded"]) else 1
        each = len(tensors) // workers
        parts = [tensors[j * each : (j + 1) * each] for j in range(workers)]
        subject.follow(note["train"])
        there = subject.sharded_there(note["sharded"])
        subject.write([part[which] for part in parts], there)
        subject.write_rest([part[vectors:] for part in parts], there)

    def _sharded_vector(self, note: dict[str, Any]) -> bool:
        """Whether the workers' parameters that train are sharded."""
        there = self._subject.sharded_there(note["sharded"])
        return any(there[id(p)] for p in self._subject.vector.params)

    def _answer_nothing(self) -> None:
        """Answer a malformed point by no pairs, so that workers do not wait for them."""
        self._loss_fn = None
        for j in range(self._workers):
            name = f"pairs/{self.answered}/{j}/{self._team.rank}"
            self._mailbox.post(name, [], finite=False, products=0, loss=None, sharded=False)
        self.answered += 1

    def _deliver(self, pairs: Pairs, loss: float, *, to_shards: bool) -> None:
        vector, teams = self._subject.vector, (self._workers, self._team.size)
        shapes, sharded = [p.shape for p in vector.params], vector.sharded
        routes = PairRoutes(shapes, len(pairs.values), *teams, to_shards, sharded)
        said = loss if math.isfinite(loss) else None
        rows = None
        if not pairs.trouble:
            with vector.plain():
                rows = pairs.vectors()
        finite = rows is not None and bool(rows.isfinite().all())
        for j in range(self._workers):
            tensors = []
            if finite and rows is not None:
                part = routes.part(rows, self._team.rank, j)
                tensors = [pairs.values, pairs.bounds(), part]
            name = f"pairs/{self.answered}/{j}/{self._team.rank}"
            note = {"finite": finite, "products": pairs.iterations, "loss": said}
            self._mailbox.post(name, tensors, **note, sharded=sharded)

    def _pairs(self, loss_fn: Closures, epoch: int) -> tuple[Pairs, float]:
        """The eigenpairs of the accelerators' batches, and the loss of these."""
        options = self._options
        measured = self._subject.vector.hessian(loss_fn, options.hvp, options.curvature)
        with self._subject.training.meter.stage("lanczos"), measured as space:
            pairs = wanted_pairs(space, space.random(options.seed + epoch, 1.0), options)
            return pairs, space.loss()

    def _judge(self, tensors: Sequence[Tensor], note: dict[str, Any]) -> None:
        """Send the losses of the accelerators' batches without and with the update."""
        assert self._loss_fn is not None
        vector, losses = self._subject.vector, []
        for which in range(2):
            with self._subject.training.meter.stage("judge"):
                self._together(partial(self._take_over, "judge", which, tensors, note))
                loss = mean_loss(self._loss_fn, vector.params, self._team, vector.model)
            losses.append(vector.sign * loss if math.isfinite(loss) else None)
        if self._team.rank == 0:
            self._say_verdict(losses)

    def _say_verdict(self, losses: list[float | None]) -> None:
        for j in range(self._workers):
            self._mailbox.post(f"verdict/{self.answered - 1}/{j}", [], losses=losses)


def _require_order(what: str, message: Message) -> None:
    """Check the form of an order.

    Raises:
        MalformedError: If an entry is missing, or its first tensors are not as many real vectors
            of equal length as the order takes.
    """
    if what not in ORDERS:
        raise MalformedError(f"it asks for {what[:40]!r}")
    note = message[1]
    require_form(note, **ORDERS[what][0])
    if len(note.get("train", ())) != len(note.get("sharded", ())):
        raise MalformedError(
            f"{len(note['train'])} tensors train or not, {len(note['sharded'])} are sharded or not"
        )
    _require_part(what, message[0], len(message[0]))


def _require_part(what: str, tensors: Sequence[Tensor], number: int) -> None:
    """Check the tensors of an order, or of a worker's part of it.

    Raises:
        MalformedError: If they are not as many as ``number``, or the first ones not as many real
            vectors of equal length as the order takes.
    """
    vectors = ORDERS[what][1]
    chosen = [(t.dim(), t.is_floating_point(), t.numel()) for t in tensors[:vectors]]
    if len(chosen) < vectors or len(set(chosen)) > 1 or any(c[:2] != (1, True) for c in chosen):
        found = [f"{t.dtype} {list(t.shape)}" for t in tensors]
        raise MalformedError(
            f"it does not begin with {vectors} equally long vectors, but has {found}"
        )
    if len(tensors) != number:
        raise MalformedError(f"it has {len(tensors)} tensors, and the first worker's {number}")
    if any(t.dim() != 1 for t in tensors):
        raise MalformedError(f"its tensors are of shapes {[list(t.shape) for t in tensors]}")


def _raise(error: Exception) -> None:
    raise error


class Batches:
    """The loss of each epoch's batch: of as many as there are, number epoch mod len.

    Where ``batches`` has no length, an epoch takes the next batch. A run that is resumed meets the
    batches of one that was not interrupted, if it can.

    Args:
        batches: The batches, gone through over and over.
        loss_fn: The loss of a batch.
    """

    def __init__(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> None:
        self._batches, self._loss_fn = batches, loss_fn
        self._iterator: Iterator[Any] = iter(())
        self._next = 0

    def closure(self, epoch: int) -> Callable[[], Any]:
        """The loss of an epoch's batch.

        Raises:
            ValueError: If there is no batch.
        """
        count = self._count()
        for _ in range((epoch - self._next) % count if count else 0):
            self._take()
        self._next = epoch + 1
        return partial(self._loss_fn, self._take())

    def _count(self) -> int:
        try:
            return len(self._batches) if isinstance(self._batches, Sized) else 0
        except TypeError:  # a DataLoader of a dataset without a length
            return 0

    def _take(self) -> Any:
        for batch in self._iterator:
            return batch
        self._iterator = iter(self._batches)
        for batch in self._iterator:
            return batch
        raise ValueError("batches is empty, or an iterator that has ended; give a loader")

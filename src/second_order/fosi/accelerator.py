"""The work of MRDHO2's accelerators: eigenpairs for workers, verdicts on their updates.

workers          first accelerator         the others
point/i, c   ->  order/k: compute     ->   c, too; then Lanczos, all together
                 pairs/i/j/a: û, residuals, and worker j's vectors, accelerator a's rows of them;
                              in the note, the loss of all batches at c
try/i        ->  order/k: judge       ->   w_E without and with V̂'s, too; then the loss of each
                 verdict/i/j: the losses of all batches
goodbye      ->  order/k: leave       ->

Worker 0 sends points. With each goes the rest of the model, frozen parameters and buffers, and
which of them train. i counts the requests, from 0 on, whatever epochs a checkpoint takes the
workers to. An idle accelerator waits for a message, never in a collective; before a collective all
agree on whether one of them has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from second_order.distributed.mailbox import Mailbox
from second_order.errors import SecondOrderError
from second_order.fosi.eigenpairs import Closures, wanted_pairs
from second_order.fosi.options import EpochOptions
from second_order.fosi.subject import Subject
from second_order.lanczos.spectrum import mean_loss
from second_order.lanczos.vector_space import row_bounds

__all__ = ["Accelerator", "Batches"]

T = TypeVar("T")
ClosureAt: TypeAlias = Callable[[int], Closures]
Order: TypeAlias = tuple[str, Sequence[Tensor], dict[str, Any]]

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
        self._over = False
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
                if what == "compute":
                    self._compute(closure_at, tensors, note)
                else:
                    self._judge(tensors, note)
            except Exception:
                self.close(PARTING_SECONDS)
                raise

    def _lead(self, enough: Callable[[], bool]) -> Order | None:
        """The next order, from the workers' messages; sent to the other accelerators."""
        mailbox, point = self._mailbox, f"point/{self.answered}"
        judges = self._options.final_update == "guarded" and self._loss_fn is not None
        trial = f"try/{self.answered - 1}" if judges else ""
        for name in filter(None, (point, trial)):
            mailbox.expect(name)
        what, message = "compute", mailbox.wait(point, lambda: mailbox.holds(trial) or enough())
        if message is None and (message := mailbox.arrived(trial)) is not None:
            what = "judge"
        if message is None:
            if not (mailbox.closed_there or mailbox.lost):
                return None
            what, self._over = "leave", True
            if not mailbox.closed_there:
                self.lost = f"the workers have not been heard of any more{self._why()}"
        mailbox.forget(trial)
        tensors, note = message or ([], {"lost": self.lost})
        for a in range(1, self._team.size):
            mailbox.post(f"order/{self._orders}/{a}", tensors, do=what, **note)
        self._orders += 1
        return None if self._over else (what, tensors, note)

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
        options, vector, epoch = self._options, self._subject.vector, note["epoch"]

        def prepare() -> Closures:
            self._subject.follow(note["train"])
            self._subject.write(tensors[0], tensors[1:])
            return closure_at(epoch)

        self._loss_fn = self._together(prepare)
        measured = vector.hessian(self._loss_fn, options.hvp, options.curvature)
        with self._subject.training.meter.stage("lanczos"), closing(measured), measured as space:
            pairs = wanted_pairs(space, space.random(options.seed + epoch, 1.0), options)
            loss = space.loss()

        def deliver() -> None:
            """Worker j gets its vectors: of each accelerator the rows that this one has."""
            found: list[Tensor] = []
            if pairs.finite:
                with vector.plain():
                    found = [pairs.values, pairs.bounds(), pairs.vectors()]
            finite = bool(found) and all(bool(t.isfinite().all()) for t in found)
            cuts = row_bounds(len(pairs.values), self._workers)
            for j in range(self._workers):
                tensors = [*found[:2], found[2][cuts[j] : cuts[j + 1]]] if finite else []
                name = f"pairs/{self.answered}/{j}/{self._team.rank}"
                said = {"finite": finite, "products": pairs.iterations, "loss": loss}
                self._mailbox.post(name, tensors, **said)

        self._together(deliver)
        self.answered += 1

    def _judge(self, tensors: Sequence[Tensor], note: dict[str, Any]) -> None:
        """Send the losses of the accelerators' batches without and with the update."""
        assert self._loss_fn is not None
        subject, vector, losses = self._subject, self._subject.vector, []
        for which in range(2):

            def take_over(flat: Tensor = tensors[which]) -> None:
                subject.follow(note["train"])
                subject.write(flat, tensors[2:])

            with subject.training.meter.stage("judge"):
                self._together(take_over)
                loss = mean_loss(self._loss_fn, vector.params, self._team, vector.model)
            losses.append(vector.sign * loss)
        for j in range(self._workers if self._team.rank == 0 else 0):
            self._mailbox.post(f"verdict/{self.answered - 1}/{j}", [], losses=losses)


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

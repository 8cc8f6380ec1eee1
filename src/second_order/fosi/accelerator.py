"""The work of MRDHO2's accelerators: eigenpairs for workers, verdicts on their updates.

workers          first accelerator         the others
point/i      ->  order/k: compute     ->   the same; then Lanczos, all together
                 pairs/i/j/a: û, residuals, and worker j's vectors, accelerator a's rows of them;
                              in the note, the loss of all batches at c
try/i        ->  order/k: judge       ->   the same; then the loss without and with the update
                 verdict/i/j: the losses of all batches
goodbye      ->  order/k: leave       ->

Worker 0 sends points: the whole model, its frozen parameters and buffers too, and which of them
train; besides, with a try the updated parameters, and c where an epoch goes on from a checkpoint. i
counts the requests, from 0 on, whatever epochs a checkpoint takes the workers to. An idle
accelerator waits for a message, never in a collective; before a collective all agree on whether one
of them has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.buckets import take_model
from second_order.distributed.mailbox import Mailbox
from second_order.distributed.roles import endless
from second_order.errors import SecondOrderError
from second_order.fosi.eigenpairs import Closures, wanted_pairs
from second_order.fosi.options import EpochOptions
from second_order.fosi.vector import ParameterVector
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
        training: The training of the accelerators.
        vector: The parameters that train.
        options: The options of the eigenpairs.
        mailbox: The mailbox to worker 0 on the first accelerator; to the first on the others.
        workers: Number of workers.

    Attributes:
        answered: Number of points whose eigenpairs have been computed.
        lost: Name of the process that is no longer heard of, or "".
    """

    def __init__(
        self,
        training: Training,
        vector: ParameterVector,
        options: EpochOptions,
        mailbox: Mailbox,
        workers: int,
    ) -> None:
        self._training, self._vector, self._options = training, vector, options
        self._mailbox, self._workers = mailbox, workers
        self._loss_fn: Closures | None = None
        self._orders = self._calls = self.answered = 0
        self._over = False
        self.lost = ""

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

    @torch.no_grad()
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
            order = (self._follow if self._training.world.rank else self._lead)(enough)
            if order is None:
                if enough():
                    break
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
        if self.lost and self._training.first_time("lost"):
            self._training.warn(f"{self.lost}: this accelerator has nothing more to do")

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
            if not self._left("the workers have"):
                return None
            what = "leave"
        mailbox.forget(trial)
        tensors, note = message or ([], {"lost": self.lost})
        for a in range(1, self._training.world.size):
            mailbox.post(f"order/{self._orders}/{a}", tensors, do=what, **note)
        self._orders += 1
        return None if what == "leave" else (what, tensors, note)

    def _follow(self, enough: Callable[[], bool]) -> Order | None:
        """The next order, as the first accelerator sends it."""
        name = f"order/{self._orders}/{self._training.world.rank}"
        self._mailbox.expect(name)
        message = self._mailbox.wait(name, enough)
        if message is None:
            self._left("the first accelerator has")
            return None
        self._orders += 1
        tensors, note = message
        if note["do"] == "leave":
            self._over, self.lost = True, note["lost"]
            return None
        return note["do"], tensors, note

    def _left(self, who: str) -> bool:
        """Whether the other side has said goodbye, or is lost: there is nothing more to do then."""
        mailbox = self._mailbox
        if not mailbox.closed_there and mailbox.lost:
            why = f" ({mailbox.failure})" if mailbox.failure else ""
            self.lost = f"{who} not been heard of any more{why}"
        self._over = mailbox.closed_there or bool(self.lost)
        return self._over

    def _together(self, work: Callable[[], T]) -> T:
        """Do local work, and raise on all accelerators if it has failed on one; a collective."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        try:
            agreed = self._training.world.all_agree(error is None, self._vector.device)
        except Exception as caught:
            if error is not None:
                raise error from None
            raise SecondOrderError("another accelerator has died, or stands still") from caught
        if error is not None:
            raise error
        if not agreed:
            raise SecondOrderError("another accelerator has failed; its own error tells why")
        return result

    def _take(self, tensors: Sequence[Tensor], note: dict[str, Any]) -> None:
        """Be the model that worker 0 has sent.

        Raises:
            SecondOrderError: If it is another model, or other parameters of it train there.
        """
        take_model(tensors[: note["model"]], note["train"], self._training.whole_model())
        self._vector.follow()
        if note["size"] != self._vector.layout.size:
            raise SecondOrderError(
                f"the workers train {note['size']} numbers, this accelerator "
                f"{self._vector.layout.size}: add the same groups of parameters on every rank"
            )

    def _move(self, tensors: Sequence[Tensor], note: dict[str, Any]) -> None:
        """Go to the point that worker 0 has sent besides, if it has."""
        for flat in tensors[note["model"] :]:
            self._vector.overwrite(flat.to(self._vector.device))

    def _compute(
        self, closure_at: ClosureAt, tensors: Sequence[Tensor], note: dict[str, Any]
    ) -> None:
        """Compute û, V̂ at c, and send them to the workers."""
        options, vector, epoch = self._options, self._vector, note["epoch"]

        def prepare() -> Closures:
            self._take(tensors, note)
            self._move(tensors, note)
            return closure_at(epoch)

        self._loss_fn = self._together(prepare)
        measured = vector.hessian(self._loss_fn, options.hvp, options.curvature)
        with self._training.meter.stage("lanczos"), measured as space:
            pairs = wanted_pairs(space, space.random(options.seed + epoch, 1.0), options)
            loss = space.loss()

        def deliver() -> None:
            """Worker j gets its vectors: of each accelerator the rows that this one has."""
            found: list[Tensor] = []
            if not pairs.trouble:
                with vector.plain():
                    found = [pairs.values, pairs.bounds(), pairs.vectors()]
            finite = bool(found) and all(bool(t.isfinite().all()) for t in found)
            cuts, me = row_bounds(len(pairs.values), self._workers), self._training.world.rank
            for j in range(self._workers):
                tensors = [*found[:2], found[2][cuts[j] : cuts[j + 1]]] if finite else []
                said = {"finite": finite, "products": pairs.iterations, "loss": loss}
                self._mailbox.post(f"pairs/{self.answered}/{j}/{me}", tensors, **said)

        self._together(deliver)
        self.answered += 1

    def _judge(self, tensors: Sequence[Tensor], note: dict[str, Any]) -> None:
        """Send the losses of the accelerators' batches without and with the update."""
        assert self._loss_fn is not None
        vector, world, losses = self._vector, self._training.world, []
        for go in (self._take, self._move):
            with self._training.meter.stage("judge"):
                self._together(partial(go, tensors, note))
                loss = mean_loss(self._loss_fn, vector.params, world, vector.model)
            losses.append(vector.sign * loss)
        for j in range(0 if world.rank else self._workers):
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
        self._batches, self._loss_fn = endless(batches), loss_fn
        self._count = self._next = 0
        with suppress(TypeError):  # a DataLoader of a dataset without a length
            self._count = len(batches) if isinstance(batches, Sized) else 0

    def closure(self, epoch: int) -> Callable[[], Any]:
        """The loss of an epoch's batch.

        Raises:
            ValueError: If there is no batch.
        """
        for _ in range((epoch - self._next) % self._count if self._count else 0):
            next(self._batches)
        self._next = epoch + 1
        return partial(self._loss_fn, next(self._batches))

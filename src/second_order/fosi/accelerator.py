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
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.buckets import take_model
from second_order.distributed.mailbox import await_goodbyes
from second_order.distributed.roles import Role, endless
from second_order.errors import SecondOrderError
from second_order.fosi.eigenpairs import Closures, wanted_pairs
from second_order.fosi.epochs import Divided, Team, Worker
from second_order.lanczos.spectrum import mean_loss
from second_order.lanczos.vector_space import row_bounds
from second_order.optimizers.config import EpochOptions
from second_order.stages import stage

__all__ = ["Accelerating", "divided_curvature", "loss_by_epoch"]

T = TypeVar("T")
ClosureAt: TypeAlias = Callable[[int], Closures]
Order: TypeAlias = tuple[str, Sequence[Tensor], dict[str, Any]]

PARTING_SECONDS = 1.0  # seconds for a failing accelerator's goodbye


def divided_curvature(
    training: Training, options: EpochOptions, closure: Closures | None
) -> Divided:
    """Make the curvature for this rank's role."""
    world = training.world
    if not (options.wanted and options.accelerators and world.size > 1):
        return Divided(training, options, closure)
    helps = world.rank >= world.size - options.accelerators
    return (Accelerating if helps else Worker)(training, options, closure)


class Accelerating(Team):
    """Answers the workers' messages: computes eigenpairs, and judges updates.

    The mailbox is to worker 0 on the first accelerator; to the first on the others.
    """

    role: Role = "accelerator"
    scaler_matters, helps = "", True
    _loss_fn: Closures | None = None
    _orders = _calls = 0
    answered = 0  # points whose eigenpairs have been computed
    _over = False
    lost = ""  # who is no longer heard of

    def prepare(self) -> None:
        """Help until the workers have taken a step, in place of a step."""
        self.training.steps += 1
        self._calls += 1
        chosen, mailbox, calls = self.closure_now(), self.mailbox, self._calls
        self._help(lambda epoch: chosen, lambda: (mailbox.heard("steps") or 0) >= calls)
        mailbox.tell("steps", calls)  # for the other accelerators

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close; returns the number of epochs served."""
        before = self.answered
        self._help(loss_by_epoch(batches, loss_fn))
        return self.answered - before

    def close(self) -> None:
        """Say goodbye, and keep the store until the others have said theirs."""
        patience, self._over = self.options.helper_timeout, True
        self.mailbox.close(patience)
        if self.store is not None and self.mailbox.closed_there:
            await_goodbyes(self.store, self.names, patience)
            self.store = None
        super().close()

    @torch.no_grad()
    def _help(self, closure_at: ClosureAt, enough: Callable[[], bool] = lambda: False) -> None:
        """Answer messages until the workers close or are lost, or it is ``enough``.

        That is asked while no message is there. Raises SecondOrderError if another has failed.
        """
        while not self._over:
            order = (self._follow if self.training.world.rank else self._lead)(enough)
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
                self._over = True
                self.mailbox.close(PARTING_SECONDS)
                raise
        if self.lost and self.training.first_time("lost"):
            self.training.warn(f"{self.lost}: this accelerator has nothing more to do")

    def _lead(self, enough: Callable[[], bool]) -> Order | None:
        """The next order, from the workers' messages; sent to the other accelerators."""
        mailbox, point = self.mailbox, f"point/{self.answered}"
        judges = self.options.final_update == "guarded" and self._loss_fn is not None
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
        for a in range(1, self.training.world.size):
            mailbox.post(f"order/{self._orders}/{a}", tensors, do=what, **note)
        self._orders += 1
        return None if what == "leave" else (what, tensors, note)

    def _follow(self, enough: Callable[[], bool]) -> Order | None:
        """The next order, as the first accelerator sends it."""
        name = f"order/{self._orders}/{self.training.world.rank}"
        self.mailbox.expect(name)
        message = self.mailbox.wait(name, enough)
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
        mailbox = self.mailbox
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
            agreed = self.training.world.all_agree(error is None, self.training.device)
        except Exception as caught:
            if error is not None:
                raise error from None
            raise SecondOrderError("another accelerator has died, or stands still") from caught
        if error is not None:
            raise error
        if not agreed:
            raise SecondOrderError("another accelerator has failed; its own error tells why")
        return result

    def _take(self, tensors: Sequence[Tensor], note: dict[str, Any], *, moved: bool) -> None:
        """Be the model that worker 0 has sent; ``moved`` to the point sent besides, if one is."""
        take_model(tensors[: note["model"]], note["train"], self.training.whole_model())
        self.vector.follow()
        if note["size"] != self.vector.size:
            raise SecondOrderError(
                f"the workers train {note['size']} numbers, this accelerator "
                f"{self.vector.size}: add the same groups of parameters on every rank"
            )
        for flat in tensors[note["model"] :] if moved else ():
            self.vector.overwrite(flat.to(self.training.device))

    def _compute(
        self, closure_at: ClosureAt, tensors: Sequence[Tensor], note: dict[str, Any]
    ) -> None:
        """Compute û, V̂ at c, and send them to the workers."""
        options, vector, epoch = self.options, self.vector, note["epoch"]

        def prepare() -> Closures:
            self._take(tensors, note, moved=True)
            return closure_at(epoch)

        self._loss_fn = self._together(prepare)
        measured = vector.hessian(self._loss_fn, options.hvp, options.curvature)
        with stage("lanczos"), closing(measured), measured as space:
            pairs = wanted_pairs(space, space.random(options.seed + epoch, 1.0), options)
            loss = space.loss()

        def deliver() -> None:
            """Worker j gets its vectors: of each accelerator the rows that this one has."""
            found: list[Tensor] = []
            if not pairs.trouble:
                with vector.plain():
                    found = [pairs.values, pairs.bounds(), pairs.vectors()]
            finite = bool(found) and all(bool(t.isfinite().all()) for t in found)
            workers, me = len(self.roles.workers), self.training.world.rank
            cuts = row_bounds(len(pairs.values), workers)
            for j in range(workers):
                tensors = [*found[:2], found[2][cuts[j] : cuts[j + 1]]] if finite else []
                said = {"finite": finite, "products": pairs.iterations, "loss": loss}
                self.mailbox.post(f"pairs/{self.answered}/{j}/{me}", tensors, **said)

        self._together(deliver)
        self.answered += 1

    def _judge(self, tensors: Sequence[Tensor], note: dict[str, Any]) -> None:
        """Send the losses of the accelerators' batches without and with the update."""
        assert self._loss_fn is not None
        vector, world, losses = self.vector, self.training.world, []
        for moved in (False, True):
            with stage("judge"):
                self._together(partial(self._take, tensors, note, moved=moved))
                loss = mean_loss(self._loss_fn, vector.params, world, vector.model)
            losses.append(vector.sign * loss)
        for j in range(0 if world.rank else len(self.roles.workers)):
            self.mailbox.post(f"verdict/{self.answered - 1}/{j}", [], losses=losses)


def loss_by_epoch(batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> ClosureAt:
    """The loss of each epoch's batch: of as many as there are, number epoch mod len.

    Where ``batches`` has no length, an epoch takes the next batch. A run that is resumed meets the
    batches of one that was not interrupted, if it can. Raises ValueError if there is no batch.
    """
    source, count, coming = endless(batches), 0, 0
    with suppress(TypeError):  # a DataLoader of a dataset without a length
        count = len(batches) if isinstance(batches, Sized) else 0

    def closure_at(epoch: int) -> Callable[[], Any]:
        nonlocal coming
        for _ in range((epoch - coming) % count if count else 0):
            next(source)
        coming = epoch + 1
        return partial(loss_fn, next(source))

    return closure_at

"""The work of MRDHO2's accelerators: eigenpairs for workers, decisions on their updates.

    worker 0     ->  every accelerator    compute: the model at c
    accelerators                          Lanczos, all together
    accelerator  ->  every worker         û, residuals, and the accelerator's rows of that worker's
                                          vectors
    worker 0     ->  every accelerator    judge: the model, and its parameters with the update
    accelerator  ->  every worker         the losses of all batches without and with the update
    worker 0     ->  every accelerator    step: the number of steps taken

The model is whole, with frozen parameters and buffers, and with a note of what trains. If an epoch
continues from a checkpoint, c follows the model. Requests are numbered from 0 on, whatever epochs
a checkpoint takes the workers to. An idle accelerator waits for a message, never in a collective.
Before a collective, all accelerators agree on whether one of them has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.distributed.helper_link import Message, close_links, load_model
from second_order.distributed.roles import Role, cycle_batches
from second_order.errors import SecondOrderError
from second_order.fosi.eigenpairs import Closures, compute_pairs
from second_order.fosi.epochs import Divided, Worker, overwrite
from second_order.lanczos.spectrum import Pairs, mean_loss
from second_order.lanczos.vector_space import row_bounds
from second_order.optimizers.config import EpochOptions
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["Accelerating", "divided_curvature", "loss_by_epoch"]

T = TypeVar("T")
ClosureAt: TypeAlias = Callable[[int], Closures]

CLOSE_AFTER_FAILURE_SECONDS = 1.0


def divided_curvature(
    training: Training, options: EpochOptions, closure: Closures | None
) -> Divided:
    """Make the curvature for this rank's role."""
    world = training.world
    if not (options.wanted and options.helper_ranks and world.size > 1):
        return Divided(training, options, closure)
    is_helper = world.rank >= world.size - options.helper_ranks
    return (Accelerating if is_helper else Worker)(training, options, closure)


class Accelerating(Divided):
    """Answers the workers' requests: computes eigenpairs, and judges updates."""

    role: Role = "accelerator"
    scaler_reason = ""
    is_helper = True
    refreshes = False
    _loss_fn: Closures | None = None
    _calls = 0  # of prepare()
    _worker_steps = 0
    answered = 0  # points whose eigenpairs have been computed
    _over = False

    def prepare(self) -> None:
        """Help until the workers have taken a step, instead of taking one."""
        self.training.steps += 1
        self._calls += 1
        closure = self.required_closure()
        self._help(lambda epoch: closure, lambda: self._worker_steps >= self._calls)

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close; returns the number of epochs served."""
        before = self.answered
        self._help(loss_by_epoch(batches, loss_fn), lambda: False)
        return self.answered - before

    def close(self) -> None:
        """Shut down the link to the workers."""
        self._over = True
        close_links(self.links, self.options.helper_timeout)

    @torch.no_grad()
    def _help(self, closure_at: ClosureAt, enough: Callable[[], bool]) -> None:
        """Answer requests until the workers close or are lost, or it is ``enough``.

        Raises SecondOrderError if another accelerator has failed.
        """
        (link,) = self.links
        while not (self._over or enough()):
            message = link.wait()
            if message is None:
                self._over = True
                if not link.peer_closed and self.training.is_first_warning("lost"):
                    self.training.warn(
                        f"the workers have not been heard of any more{link.reason}: this "
                        f"accelerator has nothing more to do"
                    )
            elif message.note["do"] == "step":
                self._worker_steps = message.note["steps"]
            else:
                self._answer(message, closure_at)

    def _answer(self, message: Message, closure_at: ClosureAt) -> None:
        """Compute eigenpairs or judge an update; after a failure, shut down and raise."""
        try:
            if message.note["do"] == "compute":
                self._compute(closure_at, message)
            else:
                self._judge(message)
        except Exception:
            self._over = True
            close_links(self.links, CLOSE_AFTER_FAILURE_SECONDS)
            raise

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

    def _take(self, message: Message, *, moved: bool) -> None:
        """Be the model that worker 0 sent, ``moved`` to the point that follows it, if one does."""
        note = message.note
        load_model(message.tensors[: note["model"]], note["train"], self.training.model_tensors())
        self.flat_params.update_layout()
        if note["size"] != self.flat_params.size:
            raise SecondOrderError(
                f"the workers train {note['size']} numbers, this accelerator "
                f"{self.flat_params.size}: add the same groups of parameters on every rank"
            )
        for flat in message.tensors[note["model"] :] if moved else ():
            overwrite(self.flat_params.params, flat.to(self.training.device))

    def _compute(self, closure_at: ClosureAt, message: Message) -> None:
        """Compute û, V̂ at c, and send them to the workers."""
        options = self.options
        epoch = message.note["epoch"]

        def prepare() -> Closures:
            self._take(message, moved=True)
            return closure_at(epoch)

        self._loss_fn = self._together(prepare)
        with stage("lanczos"), self.flat_params.hessian(self._loss_fn) as space:
            pairs = compute_pairs(space, space.random(options.seed + epoch, 1.0), options)
        self._together(partial(self._deliver, message, pairs))
        self.answered += 1

    def _deliver(self, message: Message, pairs: Pairs) -> None:
        """Send each worker its vectors: of each accelerator the rows that this one has."""
        found: list[Tensor] = []
        if not pairs.trouble:
            with self.flat_params.without_autocast():
                found = [pairs.values, pairs.bounds(), pairs.vectors()]
        cuts = row_bounds(len(pairs.values), len(self.roles.workers))
        note = {
            "request": message.note["request"],
            "finite": bool(found),
            "products": pairs.iterations,
        }
        for worker in self.roles.workers:
            rows = slice(cuts[worker], cuts[worker + 1])
            tensors = [*found[:2], *[vectors[rows] for vectors in found[2:]]]
            self.links[0].send(tensors, worker, **note)

    def _judge(self, message: Message) -> None:
        """Send the losses of the accelerators' batches without and with the update."""
        assert self._loss_fn is not None
        vector = self.flat_params
        losses = []
        for moved in (False, True):
            with stage("judge"):
                self._together(partial(self._take, message, moved=moved))
                loss = mean_loss(self._loss_fn, vector.params, self.training.world, vector.model)
            losses.append(vector.sign * loss)
        for worker in self.roles.workers:
            self.links[0].send([], worker, request=message.note["request"], losses=losses)


def loss_by_epoch(batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> ClosureAt:
    """The loss of each epoch's batch: of as many as there are, number epoch mod len.

    Where ``batches`` has no length, an epoch takes the next batch. A run that is resumed meets the
    batches of one that was not interrupted, if it can. Raises ValueError if there is no batch.
    """
    source, count, coming = cycle_batches(batches), 0, 0
    with suppress(TypeError):  # a DataLoader of a dataset without a length
        count = len(batches) if isinstance(batches, Sized) else 0

    def closure_at(epoch: int) -> Callable[[], Any]:
        nonlocal coming
        for _ in range((epoch - coming) % count if count else 0):
            next(source)
        coming = epoch + 1
        return partial(loss_fn, next(source))

    return closure_at

"""The accelerators of MRDHO2 compute eigenpairs for the workers, and judge updates.

    worker 0     ->  every accelerator    compute: the model at c
    accelerators                          Lanczos, all together
    accelerator  ->  every worker         û, residuals, its rows of the worker's vectors
    worker 0     ->  every accelerator    judge: the model, and the updated parameters
    accelerator  ->  every worker         the mean loss, without and with the update
    worker 0     ->  every accelerator    step: the number of steps taken

The model is complete, with frozen parameters and buffers, and with a note of what
trains. If an epoch continues from a checkpoint, c follows the model. Requests are
numbered from 0, independently of the epochs that checkpoints load. An idle accelerator
waits for a message, never in a collective. Before a collective, the accelerators agree
on whether one of them has failed.
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
from second_order.distributed.world import unflatten_into
from second_order.errors import SecondOrderError
from second_order.fosi.epochs import EpochCurvature, WorkerCurvature
from second_order.fosi.update import compute_pairs
from second_order.lanczos.closure import Closures
from second_order.lanczos.hvp import row_slice
from second_order.lanczos.lanczos import Pairs
from second_order.lanczos.spectrum import weighted_loss
from second_order.optimizers.config import EpochOptions
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["AcceleratorCurvature", "closures_by_epoch", "make_curvature"]

T = TypeVar("T")
ClosureOfEpoch: TypeAlias = Callable[[int], Closures]

CLOSE_AFTER_FAILURE_SECONDS = 1.0


def make_curvature(
    training: Training, options: EpochOptions, closure: Closures | None
) -> EpochCurvature:
    """Make the curvature for this rank's role."""
    world = training.world
    if options.num_pairs == 0 or options.helper_ranks == 0 or world.size == 1:
        return EpochCurvature(training, options, closure)
    if world.rank < world.size - options.helper_ranks:
        return WorkerCurvature(training, options, closure)
    return AcceleratorCurvature(training, options, closure)


class AcceleratorCurvature(EpochCurvature):
    """An accelerator: it answers the workers' requests."""

    role: Role = "accelerator"
    scaler_reason = ""
    is_helper = True
    computes_pairs = False

    def __init__(
        self, training: Training, options: EpochOptions, closure: Closures | None
    ) -> None:
        super().__init__(training, options, closure)
        self._answered = 0  # number of epochs whose eigenpairs have been computed
        self._loss_fn: Closures | None = None  # of the last epoch
        self._prepare_calls = 0
        self._worker_steps = 0  # steps that the workers have taken
        self._closed = False

    def prepare(self) -> None:
        """Answer requests until the workers have taken a step."""
        self.training.count_step()
        self._prepare_calls += 1
        closure = self.required_closure()
        self._answer_requests(
            closure_of_epoch=lambda epoch: closure,
            until=lambda: self._worker_steps >= self._prepare_calls,
        )

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Answer requests until the workers close.

        Returns the number of epochs served.
        """
        answered_before = self._answered
        self._answer_requests(
            closure_of_epoch=closures_by_epoch(batches, loss_fn), until=lambda: False
        )
        return self._answered - answered_before

    def close(self) -> None:
        """Shut down the link to the workers."""
        self._closed = True
        close_links(self.links, self.options.helper_timeout)

    @torch.no_grad()
    def _answer_requests(
        self, *, closure_of_epoch: ClosureOfEpoch, until: Callable[[], bool]
    ) -> None:
        """Answer requests until the link closes or ``until`` returns True.

        Raises:
            SecondOrderError: If another accelerator has failed.
        """
        (link,) = self.links
        while not self._closed and not until():
            message = link.wait()
            if message is None:
                self._closed = True
                if not link.peer_closed and self.training.is_first_warning("lost"):
                    self.training.warn(
                        f"Lost contact with the workers{link.reason}: one of them exited, raised, "
                        f"or exceeded helper_timeout. See their logs. This accelerator has no "
                        f"more requests to answer"
                    )
            elif message.note["do"] == "step":
                self._worker_steps = message.note["steps"]
            else:
                self._answer(message, closure_of_epoch)

    def _answer(self, message: Message, closure_of_epoch: ClosureOfEpoch) -> None:
        """Compute eigenpairs or judge an update.

        After a failure, shut down and raise.
        """
        try:
            if message.note["do"] == "compute":
                self._compute_pairs(message, closure_of_epoch)
            else:
                self._judge_update(message)
        except Exception:
            self._closed = True
            close_links(self.links, CLOSE_AFTER_FAILURE_SECONDS)
            raise

    def _run_together(self, work: Callable[[], T]) -> T:
        """Do local work; if it fails on one accelerator, raise on all. Collective."""
        training = self.training
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:  # raised below, once the other accelerators know
            error = caught
        try:
            all_succeeded = training.world.all_agree(error is None, training.device)
        except Exception:
            if error is None:
                raise
        if error is not None:  # the cause, also of a lost contact
            raise error
        if not all_succeeded:
            raise SecondOrderError(
                "another accelerator has failed; see its log for the error"
            )
        return result

    def _load_model(self, message: Message, *, load_following: bool) -> None:
        """Load the model that worker 0 sent.

        With ``load_following``, then load the parameters that follow: c, or updated ones.
        """
        note = message.note
        num_model_tensors = note["model"]
        model_tensors = self.training.model_tensors()
        load_model(message.tensors[:num_model_tensors], note["train"], model_tensors)
        self.flat_params.update_layout()
        if note["size"] != self.flat_params.size:
            raise SecondOrderError(
                f"the workers train {note['size']} parameters, but this accelerator has "
                f"{self.flat_params.size}; add the same parameter groups on every rank"
            )
        if load_following:
            for flat in message.tensors[num_model_tensors:]:
                unflatten_into(flat.to(self.training.device), self.flat_params.params)

    def _compute_pairs(
        self, message: Message, closure_of_epoch: ClosureOfEpoch
    ) -> None:
        """Compute û, V̂ at c, and send them to the workers. Collective."""
        options = self.options
        epoch = message.note["epoch"]

        def prepare() -> Closures:
            self._load_model(message, load_following=True)
            return closure_of_epoch(epoch)

        self._loss_fn = self._run_together(prepare)
        with stage("lanczos"), self.flat_params.hessian(self._loss_fn) as space:
            start = space.random(options.seed + epoch, 1.0)
            pairs = compute_pairs(space, start, options)
        self._run_together(partial(self._send_pairs, message, pairs))
        self._answered += 1

    def _send_pairs(self, message: Message, pairs: Pairs) -> None:
        """Send each worker the eigenvalues, and the local rows of its vectors."""
        (link,) = self.links
        workers = self.roles.workers
        vectors = pairs.vectors()
        for worker in workers:
            worker_vectors = vectors[row_slice(len(vectors), len(workers), worker)]
            # The tensors are empty if they would not be finite.
            link.send(
                [pairs.values, pairs.bounds, worker_vectors],
                worker,
                request=message.note["request"],
                finite=not pairs.trouble,
                products=pairs.products,
            )

    def _judge_update(self, message: Message) -> None:
        """Send the accelerators' mean loss without and with the update. Collective."""
        loss_fn = self._loss_fn
        assert loss_fn is not None
        (link,) = self.links
        flat_params = self.flat_params
        losses = []

        def evaluate(*, load_following: bool) -> Tensor:
            self._load_model(message, load_following=load_following)
            return weighted_loss(loss_fn, flat_params.params, flat_params.model)

        for load_following in (False, True):
            with stage("judge"):
                sums = self._run_together(
                    partial(evaluate, load_following=load_following)
                )
                self.training.world.all_reduce([sums]).wait()
                total, examples = sums.tolist()
            loss = total / examples
            losses.append(flat_params.sign * loss)
        for worker in self.roles.workers:
            link.send([], worker, request=message.note["request"], losses=losses)


def closures_by_epoch(
    batches: Iterable[Any], loss_fn: Callable[[Any], Any]
) -> ClosureOfEpoch:
    """Return a function from an epoch to the loss of its batch.

    If ``batches`` has a length, epoch e gets batch e mod length. If every pass has the
    same order, a resumed run then sees the batches of a run without interruption.
    Without a length, an epoch gets the next batch.

    Raises:
        ValueError: By the function, if ``batches`` is empty.
    """
    source = cycle_batches(batches)
    next_epoch = 0
    num_batches = 0
    # len() of a DataLoader raises if its dataset has no length.
    with suppress(TypeError):
        num_batches = len(batches) if isinstance(batches, Sized) else 0

    def closure_of_epoch(epoch: int) -> Callable[[], Any]:
        nonlocal next_epoch
        if num_batches:
            for _ in range((epoch - next_epoch) % num_batches):
                next(source)
        next_epoch = epoch + 1
        return partial(loss_fn, next(source))

    return closure_of_epoch

"""The curvature of MRDHO2: what a rank does, by its role.

    accelerators=0, or one process   Alone: DHO2 with an interval of an epoch
    the first P - A ranks            Worker: the base, and a final update at the end of each epoch
    the last A ranks                 Helper: eigenpairs for the workers, and nothing else

All of them keep the counts of a checkpoint about the epoch under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from second_order.contract.arguments import refuse_ddp_over_helpers
from second_order.contract.averaging import PendingAverage
from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.distributed.mailbox import Mailbox, await_goodbyes, open_store
from second_order.distributed.roles import (
    Role,
    assign_roles,
    whole_models,
)
from second_order.distributed.world import World
from second_order.fosi.accelerator import Accelerator, Batches
from second_order.fosi.checkpoint import START, SUM, vector_parts
from second_order.fosi.curvature import FOSICurvature
from second_order.fosi.eigenpairs import Closures, publish
from second_order.fosi.metrics import epoch_metrics
from second_order.fosi.options import EpochOptions, check_differences, check_shards
from second_order.fosi.worker_epochs import UNSOUND, Epochs
from second_order.sharded import is_dtensor, is_sharded_checkpoint

__all__ = ["Alone", "Divided", "Helper", "Worker", "divided_curvature"]


def divided_curvature(
    training: Training, options: EpochOptions, closure: Closures | None
) -> Divided:
    """Make the curvature for this rank's role."""
    world = training.world
    if not _divides(options, world):
        return Alone(training, options, closure)
    helps = world.rank >= world.size - options.accelerators
    return (Helper if helps else Worker)(training, options, closure)


def _divides(options: EpochOptions, world: World) -> bool:
    """Whether some of the processes help the others."""
    return bool(options.wanted and options.accelerators and world.size > 1)


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

    def check_processes(self) -> None:
        """Raise ValueError if no process would be left to train, TypeError for others' shards."""
        world, under_ddp = self.training.world, self.training.under_ddp
        self._roles = assign_roles(world.size, self.options.accelerators, "accelerator", under_ddp)
        super().check_processes()

    def check_shards(self, params: Sequence[Tensor]) -> None:
        """Raise TypeError unless parameters that FSDP2 has sharded can be worked with.

        Rows of a chosen layout are no matter: they are as FSDP2 leaves them.
        """
        check_shards(self.training.name, params)
        check_differences(self.training.name, params, self.options)

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        epochs = self.epochs
        place = epochs.number, epochs.step, epochs.helped
        return [*super().facts(), ("epoch, its steps, accelerators at work", place)]

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        return {**super().counts(), **self.epochs.counts()}

    def statistics(self) -> dict[str, float]:
        """Numbers to log, those of the epochs among them."""
        return super().statistics() | epoch_metrics(self.epochs.number, self.epochs.reports)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over counts, eigenpairs, and the place in the epochs."""
        super().load(saved)
        self.epochs.load(saved)


class Alone(Divided):
    """MRDHO2 without accelerators: each process computes eigenpairs once an epoch."""

    def begin(self) -> None:
        """Warn that no accelerators are at work."""
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
        training, patience = self.training, self.options.helper_timeout
        everybody, first = training.world, self._roles.helpers[0]
        self._store, address = open_store(everybody, first)
        names = [f"{self._roles.of(rank)} {rank}" for rank in range(everybody.size)]
        peer = names[0 if everybody.rank == first else first]
        self._names = names
        self.mailbox = Mailbox(address, names[everybody.rank], peer, patience, training)
        training.world = self._roles.team(everybody, patience)
        training.averages = training.averages and training.world.size > 1
        if training.known:
            refuse_ddp_over_helpers(training, self._roles, everybody)
        everybody.all_gather_object(None)  # all are connected
        self.join(self.mailbox)

    def join(self, mailbox: Mailbox) -> None:
        """Take up the role of this process, with the mailbox to the other kind."""
        raise NotImplementedError

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and its part of c and p, or zeros in their place."""
        parts, here = super().state(), {START: self.epochs.start, SUM: self.epochs.total}
        kept = {name: vector for name, vector in here.items() if vector is not None}
        if parts and len(kept) < len(here) and is_sharded_checkpoint():  # read in place
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
                self.pairs.take(self.epochs.fresh)
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


class Helper(_Team):
    """Computes eigenpairs for the workers."""

    role: Role = "accelerator"
    scaler_matters = ""
    accelerator: Accelerator | None

    def join(self, mailbox: Mailbox) -> None:
        """Listen to the workers."""
        workers = len(self._roles.workers)
        self.accelerator = Accelerator(self.training, self.vector, self.options, mailbox, workers)

    @property
    def instead(self) -> Callable[[], None]:
        """A function that helps until the workers have taken a step, in place of a step."""
        return self._help_for_a_step

    def _help_for_a_step(self) -> None:
        self.training.steps += 1
        chosen = self.closure.chosen(self.training)
        if self.accelerator is not None:
            self.accelerator.help_for_a_step(lambda epoch: chosen)

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close; returns the number of epochs served.

        Args:
            batches: The batches, one for each epoch.
            loss_fn: The loss of a batch.
        """
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

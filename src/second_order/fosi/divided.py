"""The curvature of MRDHO2: what a rank does, by its role.

    accelerators=0, or one process   Alone: DHO2 with an interval of an epoch
    the first P - A ranks            Worker: the base, and a final update at the end of each epoch
    the last A ranks                 Helper: eigenpairs for the workers, and nothing else

All of them keep the counts of a checkpoint about the epoch under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from second_order.contract.arguments import refuse_ddp_over_helpers
from second_order.contract.averaging import PendingAverage
from second_order.contract.base_state import CURVATURE
from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.distributed.checkpointing import is_sharded_checkpoint
from second_order.distributed.mailbox import Mailbox, await_connections, await_goodbyes
from second_order.distributed.messages import refused_line
from second_order.distributed.roles import Role, Roles, assign_roles, ranks_alike
from second_order.distributed.store import Store, open_store
from second_order.distributed.world import World
from second_order.fosi.accelerator import Accelerator, Batches
from second_order.fosi.checkpoint import START, SUM, vector_parts
from second_order.fosi.curvature import FOSICurvature
from second_order.fosi.eigenpairs import Closures, publish
from second_order.fosi.metrics import epoch_metrics
from second_order.fosi.options import EpochOptions, check_differences, check_shards
from second_order.fosi.sharded_base import gather_parts
from second_order.fosi.subject import Subject
from second_order.fosi.worker_epochs import UNSOUND, Epochs
from second_order.sharded import is_dtensor, mesh_ranks

__all__ = ["Alone", "Divided", "Helper", "Worker", "divided_curvature", "team_of"]

FAREWELL_SECONDS = 5.0  # seconds for which the store outlives its host's own goodbye at most


def divided_curvature(
    training: Training, options: EpochOptions, closure: Closures | None
) -> Divided:
    """Make the curvature for this rank's role."""
    world = training.world
    if not _divides(options, world):
        return Alone(training, options, closure)
    helps = world.rank >= world.size - options.accelerators
    return (Helper if helps else Worker)(training, options, closure)


def team_of(options: EpochOptions, world: World) -> list[int]:
    """The ranks, as torch numbers them, that do what this one does."""
    return ranks_alike(world, options.accelerators if _divides(options, world) else 0)


def _divides(options: EpochOptions, world: World) -> bool:
    """Whether some of the processes help the others."""
    return bool(options.wanted and options.accelerators and world.size > 1)


@dataclass
class Line:
    """The messages between this process and those of the other kind.

    Attributes:
        mailbox: Sends and receives the messages.
        store: The store of messages on the process that hosts it; None elsewhere.
        everybody: Names of the processes, by rank.
    """

    mailbox: Mailbox
    store: Store | None
    everybody: Sequence[str]

    @classmethod
    def of(cls, everybody: World, roles: Roles, patience: float) -> Line:
        """Connect workers and accelerators; a collective of all processes."""
        first = roles.helpers[0]
        store, address = open_store(everybody, first)
        names = [f"{roles.of(rank)} {rank}" for rank in range(everybody.size)]
        peer = names[0 if everybody.rank == first else first]
        mailbox = Mailbox(address, names[everybody.rank], peer, patience)
        return cls(mailbox, store, names)

    @property
    def refused(self) -> int:
        """Number of malformed messages, and of connections without the key."""
        return self.mailbox.refused + (0 if self.store is None else self.store.refused)

    def tell(self, training: Training) -> None:
        """Warn once that a message or a connection has been refused."""
        if self.refused and training.first_time("refused"):
            training.warn(refused_line(self.mailbox.complaint))


class Divided(FOSICurvature):
    """The base class of the roles, which keeps the place in the epochs.

    Attributes:
        epochs: The place in the epochs; only a worker runs them.
    """

    options: EpochOptions
    role: Role = "worker"
    multiplies = True  # by the Hessian of a loss

    def __init__(self, training: Training, options: EpochOptions, closure: Closures | None) -> None:
        super().__init__(training, options, closure)
        self.epochs = Epochs(Subject(training, self.vector), options)

    def check_processes(self) -> None:
        """Raise ValueError if no process would be left to train, TypeError for others' shards."""
        world, under_ddp = self.training.world, self.training.under_ddp
        self._roles = assign_roles(world.size, self.options.accelerators, "accelerator", under_ddp)
        trouble = ""
        try:
            super().check_processes()
        except TypeError as error:
            trouble = str(error)
        # Workers and accelerators may be sharded differently, and all raise or none.
        troubles = list(filter(None, world.all_gather_object(trouble)))
        if troubles:
            raise TypeError(troubles[0])

    def check_shards(self, params: Sequence[Tensor]) -> None:
        """Raise TypeError unless the rows that are here of parameters are known elsewhere.

        Rows of a chosen layout are no matter: they are as FSDP2 leaves them.
        """
        check_shards(self.training.name, params)
        if any(map(is_dtensor, params)) and not self.training.known:
            raise TypeError(
                f"{self.training.name}: the parameters are sharded, and FSDP2 shows whole ones "
                f"after an evaluation until the model is resharded; give model="
            )
        if self.multiplies:
            check_differences(self.training.name, params, self.options)
        places = {rank: i for i, rank in enumerate(self.training.world.global_ranks)}
        for p in filter(is_dtensor, params):
            order = [places[rank] for rank in mesh_ranks(p)]
            if order != sorted(order):
                raise TypeError(
                    f"{self.training.name}: the parameters are sharded over a mesh whose ranks "
                    f"{mesh_ranks(p)} are not in the order of the process group; shard over "
                    f"DeviceMesh.from_group(optimizer.worker_group, device_type)"
                )

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
    line: Line | None = None

    def begin(self) -> None:
        """Give every process its role, and workers and accelerators a way to talk."""
        training, patience = self.training, self.options.helper_timeout
        everybody = training.world
        line = Line.of(everybody, self._roles, patience)
        training.world = self._roles.team(everybody, patience)
        training.averages = training.averages and training.world.size > 1
        if self.vector.sharded:
            self.vector.restart()  # whose rows are those of this kind of processes
        if training.known:
            refuse_ddp_over_helpers(training, self._roles, everybody)
        await_connections(everybody, [line.mailbox], [line.store])
        self.line = line
        line.tell(training)
        self.join(line.mailbox)

    def join(self, mailbox: Mailbox) -> None:
        """Take up the role of this process, with the mailbox to the other kind."""
        raise NotImplementedError

    @property
    def refused(self) -> int:  # type: ignore[override]
        """Number of messages and connections that this process has refused."""
        return 0 if self.line is None else self.line.refused

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and its part of c and p, or zeros in their place."""
        parts, here = super().state(), {START: self.epochs.start, SUM: self.epochs.total}
        whole = not self.vector.spread
        kept = {name: vector for name, vector in here.items() if vector is not None and whole}
        if parts and len(kept) < len(here) and is_sharded_checkpoint():  # read in place
            kept = {name: self._room() for name in here} | kept
        vectors = vector_parts(kept, self.vector.params)
        return {p: {**part, **vectors[p]} for p, part in parts.items()}

    def _room(self) -> Tensor:
        """Zeros in the place of a vector, to be read into."""
        vector = self.vector
        return torch.zeros(vector.layout.size, dtype=vector.dtype, device=vector.device)

    @property
    def kept_elsewhere(self) -> str:
        """A name for state that only other processes keep; "" if there is none."""
        sums = self.vector.spread and self.epochs.start is not None
        what = "what other processes keep of the epoch's gradients"
        return super().kept_elsewhere or what * sums

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """The state that is in parts, whole, on the ranks that want it; a collective."""
        found, layout = super().gather(ranks), self.vector.layout
        if not self.vector.spread:
            return found
        kept: dict[str, Tensor] = {}
        for name, part in ((START, self.epochs.start), (SUM, self.epochs.total)):
            if part is not None:
                parts = gather_parts(self.training.world, part, layout.bounds, 0, ranks)
                kept[name] = layout.in_order(parts) if len(parts) else parts
            elif len(ranks) == self.training.world.size:  # read in place
                kept[name] = self._room()
        if self.training.world.rank in ranks:
            for p, entries in vector_parts(kept, layout.params).items():
                found[p][CURVATURE] = {**found[p][CURVATURE], **entries}
        return found


class Worker(_Team):
    """Trains by the base, and updates by others' eigenpairs at the end of each epoch."""

    multiplies = False

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
        if self.line is not None:
            self.line.tell(self.training)

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
        subject, workers = Subject(self.training, self.vector), len(self._roles.workers)
        self.accelerator = Accelerator(subject, self.options, mailbox, workers)

    @property
    def instead(self) -> Callable[[], None]:
        """A function that helps until the workers have taken a step, in place of a step."""
        return self._help_for_a_step

    def _help_for_a_step(self) -> None:
        self.training.steps += 1
        chosen = self.closure.chosen(self.training)
        self._help(lambda accelerator: accelerator.help_for_a_step(lambda epoch: chosen))

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close; returns the number of epochs served.

        Args:
            batches: The batches, one for each epoch.
            loss_fn: The loss of a batch.
        """
        if self.accelerator is None:
            return 0
        before, closure_at = self.accelerator.answered, Batches(batches, loss_fn).closure
        self._help(lambda accelerator: accelerator.help(closure_at))
        return self.accelerator.answered - before

    def _help(self, how: Callable[[Accelerator], None]) -> None:
        if self.accelerator is None or self.line is None:
            return
        with torch.no_grad():
            how(self.accelerator)
        self.line.tell(self.training)
        if self.accelerator.lost and self.training.first_time("lost"):
            self.training.warn(f"{self.accelerator.lost}: this accelerator has nothing more to do")

    def close(self) -> None:
        """Say goodbye, and keep the store until the others have said theirs."""
        patience, line = self.options.helper_timeout, self.line
        if self.accelerator is not None and line is not None:
            self.accelerator.close(patience)
            if line.store is not None and self.accelerator.dismissed:
                await_goodbyes(line.store, line.everybody, min(patience, FAREWELL_SECONDS))
        super().close()

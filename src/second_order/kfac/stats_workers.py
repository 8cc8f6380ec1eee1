"""Gradient workers and stats workers: who of them says what when, and which are alive.

Both ends of the conversation, a class each: :class:`StatsWorkers` sends points and takes in
statistics, :class:`StatsWorker` answers points by statistics. Each stats worker hosts a store of
its own, so that none takes another along when it dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.arguments import refuse_ddp_over_helpers
from second_order.contract.curvature import Curvature
from second_order.contract.training import Training
from second_order.distributed.buckets import unpack_by_dtype
from second_order.distributed.mailbox import Mailbox, await_connections, await_goodbyes
from second_order.distributed.messages import (
    MalformedError,
    refused_line,
)
from second_order.distributed.roles import Roles, assign_roles
from second_order.distributed.store import Address, Store, open_store
from second_order.errors import SecondOrderError
from second_order.kfac.layers import Layers
from second_order.kfac.statistics import ACCOUNTS, NAMES
from second_order.kfac.stats_messages import (
    in_groups,
    model_tensors,
    parts_of,
    point_in,
    point_of,
    statistics_in,
    statistics_of,
    unpack_statistics,
)
from second_order.kfac.system import no_copies
from second_order.kronecker.block import GradientScale, KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.report import Summary
from second_order.sharded import is_dtensor

__all__ = ["ENOUGH_MESSAGES", "StatsWorker", "StatsWorkers"]

Sender: TypeAlias = Callable[[list[Tensor], Callable[[list[Tensor]], None]], None]
Sums: TypeAlias = dict[KroneckerBlock, StatisticsSums]

REMEDY = (
    "a model cannot grow beside stats workers: make the optimizer of a model that has all its "
    "layers, and add their groups when they are to train"
)
ENOUGH_MESSAGES = 5  # without sound statistics of a layer, after which it is hungry
FAREWELL_SECONDS = 5.0  # seconds for which a store outlives its host's own goodbye at most


def _divide(training: Training, count: int) -> tuple[Roles, list[tuple[Store | None, Address]]]:
    """Give every process its role, and stores to talk by; a collective.

    Raises:
        ValueError: If no process would train, or the model is in DistributedDataParallel.
    """
    world = training.world
    roles = assign_roles(world.size, count, "stats", training.under_ddp)
    stores = [open_store(world, host) for host in roles.helpers]
    training.world = roles.team(world)
    training.averages = training.averages and training.world.size > 1
    refuse_ddp_over_helpers(training, roles, world)
    return roles, stores


def _check_processes(training: Training, count: int) -> None:
    assign_roles(training.world.size, count, "stats", training.under_ddp)
    sharded = any(map(is_dtensor, training.model.parameters()))
    if any(training.world.all_gather_object(sharded)):  # all raise, whoever has shards
        raise ValueError(no_copies(training))


@dataclass
class Helper:
    """One stats worker, as a gradient worker sees it.

    Attributes:
        name: Name of the stats worker.
        mailbox: The mailbox to the stats worker.
        asked: Number of points sent to the stats worker.
        due: Number of the point that it is to get after this step, plus one; 0 for none.
        heard: Number of statistics that have come from the stats worker.
        expected: Name of the message that is listened for.
    """

    name: str
    mailbox: Mailbox
    asked: int = 0
    due: int = 0
    heard: int = 0
    expected: str = ""


class StatsWorkers:
    """The stats workers, as a gradient worker knows them.

    Args:
        count: Number of stats workers.
        patience: Seconds without a sign of life after which a stats worker is given up.

    Attributes:
        active: The stats workers that are alive.
        mailboxes: The mailboxes to all stats workers, those that are gone included.
        shapes: Shapes of the model's parameters and buffers, as all processes have them.
        own_passes: Whether statistics come from the training passes.
        hungry: Whether there are layers of this process without statistics.
        messages: Number of messages that have come.
        last: By layer of this process, the number of the last message with its sound statistics.
        known: Layers that have ever had statistics, from whatever passes.
        foreign: Messages in a row that spoke of layers that this process does not own.
        edition: Number of changes of the layers. Messages on their way at a change are dropped.
        nonfinite: Number of statistics that were dropped because they were not finite.
    """

    def __init__(self, count: int, patience: float) -> None:
        self.count, self._patience = count, patience
        self.mailboxes: list[Mailbox] = []
        self._rank = 0
        self.shapes: list[torch.Size] = []
        self.active: list[Helper] = []
        self.own_passes = self.hungry = True
        self.messages = self.foreign = self.edition = self.nonfinite = 0
        self.last: dict[str, int] = {}
        self.known: set[str] = set()

    def check_processes(self, training: Training) -> None:
        """Raise ValueError if no process would be left to train, or the model is in shards."""
        _check_processes(training, self.count)

    def begin(self, training: Training) -> None:
        """Be one of the gradient workers from now on; a collective of all processes."""
        everybody = training.world
        roles, stores = _divide(training, self.count)
        self._rank = training.world.rank
        for host, (_, address) in zip(roles.helpers, stores, strict=True):
            name = f"stats worker {host}"
            mailbox = Mailbox(address, f"worker {self._rank}", name, self._patience)
            self.active.append(Helper(name, mailbox))
        self.mailboxes = [helper.mailbox for helper in self.active]
        await_connections(everybody, self.mailboxes, [store for store, _ in stores])
        self.shapes = [t.shape for t in model_tensors(training.model)]

    @property
    def refused(self) -> int:
        """Number of malformed messages that were refused."""
        return sum(mailbox.refused for mailbox in self.mailboxes)

    def tell(self, training: Training) -> None:
        """Warn, once each, of faults in the messages that have come."""
        found = {}
        if self.foreign >= ENOUGH_MESSAGES:
            found["foreign"] = (
                "a stats worker speaks of layers that this rank does not own: freeze, unfreeze and "
                "add the same parameters on every rank; its statistics are dropped until then"
            )
        if self.nonfinite:
            found["nonfinite"] = (
                "a stats worker has sent statistics that are not finite: they are dropped"
            )
        if self.refused:
            complaints = (mailbox.complaint for mailbox in self.mailboxes)
            found["refused"] = refused_line(next(filter(None, complaints), ""))
        for key, warning in found.items():
            if training.first_time(key):
                training.warn(warning)

    def require_no_growth(self, training: Training) -> None:
        """Raise SecondOrderError if the model has changed, and stats workers lack the new one."""
        if self.active and self.shapes != [t.shape for t in model_tensors(training.model)]:
            raise SecondOrderError(f"the model has changed; {REMEDY}")

    def offer(self, training: Training, send: Sender) -> None:
        """Send the newest parameters to the stats workers that want them, as has been agreed on.

        Worker 0 does, and the others where FSDP2 has left it some of the rows.

        Args:
            training: The training that has the parameters.
            send: Takes copies of tensors, and a function to call with them on the CPU.
        """
        first = self._rank == 0
        for helper in self.active:
            if helper.due == 0:
                continue
            name = f"point/{helper.due - 1}"
            helper.asked, helper.due = helper.due, 0
            if first or any(map(is_dtensor, training.model.parameters())):
                point, note = point_of(training.model, training.groups, self.edition, self._rank)
                post = helper.mailbox.post
                mine = partial(post, f"{name}/{self._rank}")
                send(point, partial(post, name, **note) if first else mine)

    def _wanted(self, helper: Helper) -> float:
        """The number of the point that a stats worker is to get next, plus one; 0 for none yet.

        Worker 0 tells: the others may not have heard of it. Statistics that are still on their way
        hold the next point back: none queue up.
        """
        wanted = helper.mailbox.heard("want") if self._rank == 0 else None
        if wanted is not None and helper.asked <= wanted <= helper.heard + 1:
            return float(wanted + 1)
        return 0.0

    def statistics(
        self, mine: Mapping[str, KroneckerBlock], fed: Iterable[str] = ()
    ) -> Iterator[Sums]:
        """The sums of each message that has come since the last step.

        Args:
            mine: The layers that this process owns, by name.
            fed: Layers that had statistics from the training passes.
        """
        self.known.update(name for name in fed if name in mine)
        for helper in self.active:
            name = self._expected_from(helper)
            message = helper.mailbox.arrived(name)
            if message is None:
                continue
            helper.heard += 1
            self._expected_from(helper)  # now, to keep up with it
            try:
                tensors, note = statistics_in(message)
            except MalformedError as why:
                helper.mailbox.refuse(name, why)
                self.messages += 1  # of nothing, so that hunger grows
                continue
            if note["edition"] < self.edition:  # statistics from before the layers changed
                continue
            self.messages += 1
            found = unpack_statistics(tensors, note["layers"], mine)
            self.foreign = self.foreign + 1 if note["layers"] and not found else 0
            self.nonfinite += sum(sums is None for sums in found.values())
            sound = {layer: sums for layer, sums in found.items() if sums is not None}
            self.last |= dict.fromkeys(sound, self.messages)
            self.known.update(sound)
            yield {mine[layer]: sums for layer, sums in sound.items()}
        due = self.messages - ENOUGH_MESSAGES
        wanting = [layer for layer in mine if layer in self.known]
        self.hungry = self.messages == 0 or any(self.last.get(k, -1) <= due for k in wanting)

    def begin_anew(self) -> None:
        """After a change of layers or owners, take statistics here until all layers have some."""
        if self.active:
            self.last, self.messages, self.hungry = {}, 0, True
            self.own_passes = True
            self.edition, self.foreign = self.edition + 1, 0

    def _expected_from(self, helper: Helper) -> str:
        """The name of the next statistics for this worker, which is listened for from now on."""
        name = f"stats/{helper.heard}/{self._rank}"
        if helper.expected != name:  # listen once to each name
            helper.expected = name
            helper.mailbox.expect(name)
        return name

    def news(self) -> list[float]:
        """Numbers to agree on with all workers: whether hungry, which helpers are gone, or want."""
        if not self.active:
            return []
        mailboxes = [helper.mailbox for helper in self.active]
        gone = [float(c.lost or c.closed_there) for c in mailboxes]
        return [float(self.hungry), *gone, *map(self._wanted, self.active)]

    def hear(self, news: Sequence[float], training: Training) -> None:
        """Act on the numbers agreed on, alike on every worker."""
        if not news:
            return
        hungry, helpers = news[0], len(self.active)
        gone, wants = news[1 : 1 + helpers], news[1 + helpers :]
        for helper, want in zip(self.active, wants, strict=True):
            helper.due = int(want)
        left = [h for h, g in zip(self.active, gone, strict=True) if g]
        if left:
            names = ", ".join(helper.name for helper in left)
            for helper in left:
                helper.mailbox.leave()
            for helper in left:
                helper.mailbox.close(0.1)
            self.active = [helper for helper in self.active if helper not in left]
            rest = (
                "the others go on"
                if self.active
                else "statistics are taken from the training passes again"
            )
            training.warn(f"{names} has left, died, or not been heard of: {rest}")
        self.own_passes = not self.active or bool(hungry)

    def close(self) -> None:
        """Say goodbye to the stats workers that are alive, and wait for all of them together."""
        for helper in self.active:
            helper.mailbox.leave()
        for helper in self.active:
            helper.mailbox.close(self._patience)
        self.active = []
        self.own_passes = True


class StatsWorker(Curvature):
    """A process that computes statistics for the others' training, and does not train.

    Args:
        training: The workers' training, with this process's copy of the model.
        layers: The layers of that model.
        description: The lines that must be equal on all processes.
        owners: Gives the rank that owns each layer, for a number of workers.
        count: Number of stats workers.
        patience: Seconds without a sign of life after which the workers are given up.

    Attributes:
        mailbox: The mailbox to the workers; None before roles are given, and after a goodbye.
        optimized: Which parameters and buffers the workers optimize.
    """

    scaler_matters = "the gradients it has captured carry the scale"
    parts_suffice = True
    accounts = ACCOUNTS

    def __init__(
        self,
        training: Training,
        layers: Layers,
        description: Callable[[Layers], list[str]],
        owners: Callable[[Sequence[KroneckerBlock], int], Sequence[int]],
        count: int,
        patience: float,
    ) -> None:
        super().__init__(training)
        self.layers = layers
        self._description, self._owners = description, owners
        self._count, self._patience = count, patience
        self._workers = training.world.size - count
        self.mailbox: Mailbox | None = None
        self._store: Store | None = None
        self._name = ""
        self._everybody: tuple[str, ...] = ()
        self._asked = self._sent = self._edition = 0
        self.optimized: list[bool] = []
        layers.find()

    def description(self) -> list[str]:
        """The workers' options, and the layers."""
        return self._description(self.layers)

    def averaging_processes(self) -> int:
        """The processes that train, whose gradients are averaged."""
        return self._workers

    def check_processes(self) -> None:
        """Raise ValueError if no process would be left to train, or the model is in shards."""
        _check_processes(self.training, self._count)

    def begin(self) -> None:
        """Be one of the stats workers from now on; a collective of all processes."""
        everybody = self.training.world
        roles, stores = _divide(self.training, self._count)
        me = self.training.world.rank
        self._name = f"stats worker {roles.helpers[me]}"
        self._everybody = (self._name, *(f"worker {rank}" for rank in roles.workers))
        self._store, address = stores[me]
        self.mailbox = Mailbox(address, self._name, "worker 0", self._patience)
        await_connections(everybody, [self.mailbox], [store for store, _ in stores])
        whole = model_tensors(self.training.model)
        self.optimized = in_groups(whole, self.training.groups)
        self._look()
        self.layers.name_those_left()

    def _look(self) -> None:
        self.layers.forget_plan()
        self.layers.connect()
        self.layers.follow()
        self.layers.watch(lambda block: True)
        self.layers.expect(True)

    def replan(self) -> None:
        """Look for the layers that the workers optimize: they may have added a group."""
        if self.mailbox is None:
            return
        whole = model_tensors(self.training.model)
        theirs = [t for t, optimized in zip(whole, self.optimized, strict=False) if optimized]
        self.layers.find(theirs or None)
        self._look()

    def require_no_growth(self) -> None:
        """Follow the workers, which refuse to grow."""

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Raise ValueError: a stats worker's model stays whole."""
        raise ValueError(no_copies(self.training))

    @property
    def instead(self) -> Callable[[], None]:
        """Send the statistics of the last passes, and get the newest parameters."""
        return self._take_part

    def _take_part(self) -> None:
        self._deliver()
        self._fetch()

    def nothing_captured(self) -> bool:
        """Whether no statistic has arrived since the last step."""
        return self.layers.nothing_captured

    def drop_pending(self) -> None:
        """Drop the statistics of backward passes already completed."""
        self.layers.drop_pending()

    @property
    def dismissed(self) -> bool:
        """Whether the workers have said goodbye."""
        return self.mailbox is not None and self.mailbox.closed_there

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute statistics until the workers close.

        Args:
            batches: One for each statistic, from the start again when they end.
            loss_fn: The loss of a batch, neither scaled nor divided.

        Returns:
            Number of batches whose statistics have been sent.

        Raises:
            ValueError: If there is no batch.
        """
        sent = 0
        try:
            for batch in endless(batches):
                if not self._fetch():
                    break
                # The loss is neither scaled nor divided.
                self.layers.collector.gradient_scale = GradientScale(1, None)
                with torch.enable_grad():
                    found = loss_fn(batch)
                    loss = found[0] if isinstance(found, tuple) else found
                    loss.backward()
                self._deliver()
                for p in self.training.model.parameters():
                    p.grad = None
                self.drop_pending()
                sent += 1
        except BaseException:
            self._leave(1.0)
            raise
        if self.mailbox is not None and not self.dismissed:
            self.training.warn("the workers have not been heard of any more: serve() returns")
        return sent

    def _fetch(self) -> bool:
        """Ask for the newest parameters, wait for them, and load them; False if none will come.

        Parameters frozen there are frozen here. A malformed point is refused, and answered by
        statistics of no layer.

        Raises:
            SecondOrderError: If the parameters are of another model.
        """
        mailbox, into = self.mailbox, model_tensors(self.training.model)
        message = None
        while mailbox is not None:
            name = f"point/{self._asked}"
            mailbox.expect(name)
            mailbox.tell("want", self._asked)
            message = mailbox.wait(name)
            if message is None:
                break
            self._asked += 1
            try:
                parts = mailbox.wait_all(parts_of(message, name, self._workers))
                message = None if parts is None else point_in([message, *parts], into)
                break
            except MalformedError as why:
                mailbox.refuse(name, why)
                self._post([{}] * self._workers)
        if self.refused_messages and self.training.first_time("refused"):
            self.training.warn(refused_line("" if mailbox is None else mailbox.complaint))
        if message is None:
            return False
        flats, note = message
        theirs, ours = ([t.numel() for t in each] for each in (flats, into))
        if len(note["train"]) != len(ours) or sum(theirs) != sum(ours):
            raise SecondOrderError(
                f"the workers' model has {len(note['train'])} parameters and buffers of "
                f"{sum(theirs)} numbers, that of {self._name} {len(ours)} of {sum(ours)}; {REMEDY}"
            )
        self._edition = note["edition"]
        unpack_by_dtype(flats, into)
        for tensor, trains in zip(into, note["train"], strict=True):
            tensor.requires_grad_(trains)  # statistics of other layers would be of no use
        if self.optimized != note["optimized"]:
            self.optimized = note["optimized"]
            self.replan()
        return True

    def _deliver(self) -> None:
        """Send the statistics captured since the last message to the layers' owners."""
        self.layers.follow()
        active = self.layers.active
        self.layers.look(active)
        sums = self.layers.sums([block for block in active if not block.staged.empty])
        sums = self.layers.whole_steps(sums, 1)
        parts: list[dict[str, StatisticsSums]] = [{} for _ in range(self._workers)]
        owners = self._owners(active, self._workers)
        for block, owner in zip(active, owners, strict=True):
            if block in sums:
                parts[owner][block.name] = sums[block]
        self.layers.collector.settle()
        self._post(parts)

    def _post(self, parts: Sequence[Mapping[str, StatisticsSums]]) -> None:
        """Send statistics to the owners of the layers; ``parts`` are by worker."""
        if self.mailbox is None:
            return
        for rank, sums in enumerate(parts):
            flat, note = statistics_of(sums, self._edition)
            self.mailbox.post(f"stats/{self._sent}/{rank}", flat, **note)
        self._sent += 1

    @property
    def refused_messages(self) -> int:
        """Number of malformed messages, and of connections without the key."""
        strangers = 0 if self._store is None else self._store.refused
        return strangers + (0 if self.mailbox is None else self.mailbox.refused)

    def preconditioned(self) -> list[Tensor]:
        """The parameters of the layers whose statistics this process takes."""
        return self.layers.preconditioned()

    def statistics(self) -> dict[str, float]:
        """The workers' names, with NaN: this process preconditions nothing."""
        return dict.fromkeys(NAMES, math.nan)

    def summary(self) -> Summary:
        """A table of every layer that this process watches."""
        return self.layers.summary({})

    def unwatched(self) -> AbstractContextManager[None]:
        """Make a context manager that takes all hooks off the model and puts them back."""
        return self.layers.unwatched()

    def close(self) -> None:
        """Say goodbye to the workers, and release the model."""
        self._leave(self._patience)
        self.layers.close()

    def _leave(self, patience: float) -> None:
        mailbox, self.mailbox = self.mailbox, None
        if mailbox is None:
            return
        mailbox.leave()
        mailbox.close(patience)
        if self._store is not None and mailbox.closed_there:  # other workers still listen
            await_goodbyes(self._store, self._everybody, min(patience, FAREWELL_SECONDS))


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, over and over.

    Raises:
        ValueError: If there is no batch.
    """
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError("batches is empty, or an iterator that has ended; give a loader")

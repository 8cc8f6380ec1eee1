"""Gradient workers and stats workers: who of them says what when, and which are alive.

    want        k, by a stats worker: the number of the point that it wants next
    point/k     the newest parameters and buffers, by worker 0,
                which of them train, and which are optimized        ->  to that stats worker
    stats/k/r   the statistics at point k of the layers of worker r ->  to worker r

Points are sent on demand: nobody waits, and no more than one message of a kind is under way. Both
ends are a class each: :class:`StatsWorkers` sends points and takes in statistics,
:class:`StatsWorker` answers points by statistics. Each stats worker hosts a store of its own, so
that none takes another along when it dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from second_order.contract.arguments import refuse_ddp_over_helpers
from second_order.contract.training import Curvature, Training
from second_order.distributed.buckets import pack_by_dtype, take_model
from second_order.distributed.mailbox import (
    Address,
    Mailbox,
    Message,
    await_goodbyes,
    connected,
    open_store,
)
from second_order.distributed.roles import Roles, assign_roles, endless, whole_models
from second_order.kfac.curvature import KFAC, OfLayers
from second_order.kfac.layers import Layers
from second_order.kfac.metrics import NAMES
from second_order.kfac.plan import System, dims_of, distkfac_plan
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.capture import GradientScale
from second_order.kronecker.factors import StatisticsSums
from second_order.optimizers.config import DistKFACOptions, KFACOptions
from second_order.report import Summary

__all__ = ["StatsWorker", "StatsWorkers", "with_stats_workers"]

Groups: TypeAlias = Sequence[Mapping[str, Any]]
Sender: TypeAlias = Callable[[list[Tensor], Callable[[list[Tensor]], None]], None]
Sums: TypeAlias = dict[KroneckerBlock, StatisticsSums]


def _divide(training: Training, count: int) -> tuple[Roles, list[tuple[TCPStore | None, Address]]]:
    """Give every process its role, and stores to talk by, or raise ValueError; a collective."""
    world = training.world
    roles = assign_roles(world.size, count, "stats", training.under_ddp)
    stores = [open_store(world, host) for host in roles.helpers]
    training.world = roles.team(world)
    training.averages = training.averages and training.world.size > 1
    refuse_ddp_over_helpers(training, roles, world)
    return roles, stores


def _model_tensors(model: nn.Module) -> list[Tensor]:
    """A model's parameters and buffers, which points hold."""
    return [*model.parameters(), *model.buffers()]


def _in_groups(tensors: Sequence[Tensor], groups: Groups) -> list[bool]:
    """Which of the tensors the groups have."""
    ours = {id(p) for group in groups for p in group["params"]}
    return [id(t) in ours for t in tensors]


def statistics_of(sums: Mapping[str, StatisticsSums], edition: int) -> Message:
    """Make a message of statistics: all heads and all factors in a flat tensor each."""
    heads = [each.head for each in sums.values()]
    factors = [t for each in sums.values() for t in each.factors.values()]
    flat = [torch.cat([t.reshape(-1) for t in part]) for part in (heads, factors) if part]
    return flat, {"layers": list(sums), "edition": edition}


def unpack_statistics(
    message: Message, mine: Mapping[str, KroneckerBlock]
) -> dict[str, StatisticsSums | None]:
    """The sums of a message by layer, None where not finite or of no example.

    It is empty if the message's layers are not this process's.
    """
    tensors, note = message
    if not note["layers"] or any(layer not in mine for layer in note["layers"]):
        return {}
    heads, factors = tensors
    found: dict[str, StatisticsSums | None] = {}
    for name in note["layers"]:
        block, parts = mine[name], {}
        head, heads = heads.tensor_split([2 + block.shape.numbers * block.shape.groups])
        for letter, shape in block.stored_shapes.items():
            part, factors = factors.tensor_split([math.prod(shape)])
            parts[letter] = part.view(shape).clone()
        sound = bool(head[1] > 0) and all(bool(t.isfinite().all()) for t in (head, *parts.values()))
        device = block.weight.device
        moved = {k: part.to(device, non_blocking=True) for k, part in parts.items()}
        sums = StatisticsSums(moved, head.to(device, non_blocking=True))
        found[name] = sums if sound else None
    return found


@dataclass
class Helper:
    """One stats worker, as a gradient worker sees it."""

    name: str
    mailbox: Mailbox
    asked: int = 0  # number of points sent to it
    heard: int = 0  # number of statistics that have come from it


class StatsWorkers:
    """The stats workers, as a gradient worker knows them."""

    def __init__(self, count: int, patience: float) -> None:
        self.count, self._patience = count, patience
        self._rank = 0
        self.active: list[Helper] = []  # those that are alive
        self.own_passes = True  # statistics come from the training passes
        self.hungry = True  # no sound statistics have come last, or since a change of the layers
        self.edition = 0  # number of such changes: messages on their way at one are dropped

    def begin(self, training: Training) -> None:
        """Be one of the gradient workers from now on; a collective of all processes."""
        everybody = training.world
        roles, stores = _divide(training, self.count)
        self._rank = training.world.rank
        me = f"worker {self._rank}"
        names = [f"stats worker {host}" for host in roles.helpers]
        to = [(address, me, name) for (_, address), name in zip(stores, names, strict=True)]
        made = [partial(Mailbox, *each, self._patience, training) for each in to]
        self.active += map(Helper, names, connected(everybody, made))

    def offer(self, training: Training, send: Sender) -> None:
        """Send the newest parameters to the stats workers that want them; worker 0 does.

        Statistics that are still on their way hold the next point back: none queue up.
        """
        for helper in self.active if self._rank == 0 else ():
            wanted = helper.mailbox.heard("want")
            if wanted is not None and helper.asked <= wanted <= helper.heard + 1:
                helper.asked = wanted + 1
                newest = _model_tensors(training.model)
                note: dict[str, Any] = {
                    "edition": self.edition,
                    "train": [t.requires_grad for t in newest],
                    "optimized": _in_groups(newest, training.groups),
                }
                post = partial(helper.mailbox.post, f"point/{wanted}", **note)
                send(pack_by_dtype(newest), post)

    def statistics(self, mine: Mapping[str, KroneckerBlock], training: Training) -> Iterator[Sums]:
        """The sums of each message that has come since the last step."""
        for helper in self.active:
            message = helper.mailbox.arrived(f"stats/{helper.heard}/{self._rank}")
            helper.heard += message is not None
            helper.mailbox.expect(f"stats/{helper.heard}/{self._rank}")
            if message is None or message[1]["edition"] < self.edition:  # before layers changed
                continue
            found = unpack_statistics(message, mine)
            self.hungry = bool(found) and not any(found.values())
            if None in found.values() and training.first_time("nonfinite"):
                training.warn(
                    "a stats worker has sent statistics that are not finite: they are dropped"
                )
            yield {mine[layer]: sums for layer, sums in found.items() if sums is not None}

    def begin_anew(self) -> None:
        """After a change of layers or owners, take statistics here until others come."""
        if self.active:
            self.own_passes = self.hungry = True
            self.edition += 1

    def news(self) -> list[float]:
        """Numbers to agree on with all workers: is one hungry, and which helpers are gone."""
        gone = [float(h.mailbox.lost or h.mailbox.closed_there) for h in self.active]
        return [float(self.hungry), *gone] if self.active else []

    def hear(self, news: Sequence[float], training: Training) -> None:
        """Act on the numbers agreed on, alike on every worker."""
        if not news:
            return
        hungry, *gone = news
        left = [h for h, g in zip(self.active, gone, strict=True) if g]
        if left:
            names = ", ".join(helper.name for helper in left)
            self._part(left, 0.1)
            rest = "statistics are taken from the training passes again"
            rest = "the others go on" if self.active else rest
            training.warn(f"{names} has left, died, or not been heard of: {rest}")
        self.own_passes = not self.active or bool(hungry)

    def close(self) -> None:
        """Say goodbye to the stats workers that are alive, and wait for all of them together."""
        self._part(self.active, self._patience)
        self.own_passes = True

    def _part(self, helpers: Sequence[Helper], patience: float) -> None:
        for helper in helpers:
            helper.mailbox.leave()
        for helper in helpers:
            helper.mailbox.close(patience)
        self.active = [helper for helper in self.active if helper not in helpers]


class StatsWorker(OfLayers):
    """A process that computes statistics for the others' training, and does not train."""

    helps = True

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        system: System,
        count: int,
        patience: float,
    ) -> None:
        super().__init__(training)
        self.layers = Layers(training, options, system.rules, system.conv_approximation)
        self._system = system
        self._count, self._patience = count, patience
        self._workers = training.world.size - count
        self.mailbox: Mailbox | None = None  # to the workers, from the roles to the goodbye
        self._store: TCPStore | None = None
        self._everybody: tuple[str, ...] = ()
        self._asked = self._sent = self._edition = 0
        self.optimized: list[bool] = []  # which parameters and buffers the workers optimize
        self.layers.find()

    def begin(self) -> None:
        """Be one of the stats workers from now on; a collective of all processes."""
        everybody = self.training.world
        roles, stores = _divide(self.training, self._count)
        me = self.training.world.rank
        name = f"stats worker {roles.helpers[me]}"
        self._everybody = (name, *(f"worker {rank}" for rank in roles.workers))
        self._store, address = stores[me]
        make = partial(Mailbox, address, name, "worker 0", self._patience, self.training)
        (self.mailbox,) = connected(everybody, [make])
        self.optimized = _in_groups(_model_tensors(self.training.model), self.training.groups)
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
        whole = _model_tensors(self.training.model)
        theirs = [t for t, optimized in zip(whole, self.optimized, strict=False) if optimized]
        self.layers.find(theirs or None)
        self._look()

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Raise ValueError: a stats worker's model stays whole."""
        raise ValueError(whole_models(self.training.name, "stats"))

    def prepare(self) -> None:
        """Send the statistics of the last passes, and get the newest parameters."""
        self._deliver()
        self._fetch()

    @property
    def dismissed(self) -> bool:
        """Whether the workers have said goodbye."""
        return self.mailbox is not None and self.mailbox.closed_there

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute statistics until the workers close; see :meth:`DistKFAC.serve`."""
        sent = 0
        try:
            for batch in endless(batches):
                if not self._fetch():
                    break
                self.layers.collector.gradient_scale = GradientScale(None)
                # While everything is frozen, messages without statistics keep both sides in step.
                if any(p.requires_grad for p in self.training.model.parameters()):
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

        Parameters frozen there are frozen here: statistics of their layers would be of no use.
        """
        if self.mailbox is None:
            return False
        name = f"point/{self._asked}"
        self.mailbox.expect(name)
        self.mailbox.tell("want", self._asked)
        message = self.mailbox.wait(name)
        if message is None:
            return False
        self._asked += 1
        flats, note = message
        self._edition = note["edition"]
        take_model(flats, note["train"], _model_tensors(self.training.model))
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
        if self.layers.reduction == "step_mean":
            sums = self.layers.whole_steps(sums, 1)
        parts: list[dict[str, StatisticsSums]] = [{} for _ in range(self._workers)]
        plan = self._system.plan(list(map(dims_of, active)), self._workers)
        for block, layer in zip(active, plan.layers, strict=True):
            if block in sums:
                parts[layer.solver("A")][block.name] = sums[block]
        if self.mailbox is not None:
            for rank, each in enumerate(parts):
                flat, note = statistics_of(each, self._edition)
                self.mailbox.post(f"stats/{self._sent}/{rank}", flat, **note)
            self._sent += 1

    def metrics(self) -> dict[str, float]:
        """The workers' names, with NaN: this process preconditions nothing."""
        return dict.fromkeys(NAMES, math.nan)

    def summary(self) -> Summary:
        """A table of every layer that this process watches."""
        return replace(self.layers.summary({}), age="no inverses yet")

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
            await_goodbyes(self._store, self._everybody, patience)
            self._store = None


def with_stats_workers(
    training: Training, options: KFACOptions, system: System, own: DistKFACOptions
) -> Curvature:
    """Make this rank's curvature where the last ranks compute statistics for the others."""
    count, patience = own.stats_workers, float(own.helper_timeout)
    if own.inverse_device == "cuda":
        system = replace(system, said=f"{system.said} {training.device.type}")
    if count and training.world.size == 1:
        training.warn(
            f"{training.name}(stats_workers={count}) with one process: nobody computes "
            f"statistics on the side, so they are taken from this process's own passes"
        )
        count = 0
    if not count:
        return KFAC(training, options, system)
    system = replace(system, plan=partial(distkfac_plan, keeps_all=False))
    if training.world.rank < training.world.size - count:
        return KFAC(training, options, system, StatsWorkers(count, patience))
    return StatsWorker(training, options, system, count, patience)

"""Gradient workers and stats workers: what they say to each other, and who is still there.

    want        k, by a stats worker: the number of the point that it wants next
    point/k     the newest parameters and buffers, by worker 0,
                which of them train, and which are optimized        ->  to that stats worker
    stats/k/r   the statistics at point k of the layers of worker r ->  to worker r

Each stats worker hosts a store of its own, so that none takes another along when it dies. Points
are sent on demand: nobody waits, and no more than one message of a kind is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.collectives import World
from second_order.distributed.mailbox import Courier, await_connections, await_goodbyes
from second_order.distributed.messages import MalformedError, Message, refused_line, require_form
from second_order.distributed.parcels import pack_by_dtype, unpack_by_dtype
from second_order.distributed.roles import Role, assign_roles
from second_order.distributed.store import Store, open_store
from second_order.errors import SecondOrderError
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums

__all__ = ["ENOUGH_MESSAGES", "Helpers", "divide", "endless"]

Groups: TypeAlias = Sequence[Mapping[str, Any]]
Sender: TypeAlias = Callable[[list[Tensor], Callable[[list[Tensor]], None]], None]

REMEDY = (
    "a model cannot grow beside stats workers: make the optimizer of a model that has all its "
    "layers, and add their groups when they are to train"
)
ENOUGH_MESSAGES = 5  # without sound statistics of a layer, after which it is hungry
FAREWELL_SECONDS = 5.0  # that a store outlives its host's own goodbye at most


@dataclass
class Helper:
    """One stats worker, as the others see it, or one of the others, as it sees itself.

    Attributes:
        name: Of the stats worker.
        courier: To it; on itself, to the workers.
        asked: Points that it has been sent, on worker 0; on itself, points it has asked for.
        heard: Statistics that have come from it; on itself, those that it has sent.
        expected: The message from it that is listened for.
    """

    name: str
    courier: Courier
    asked: int = 0
    heard: int = 0
    expected: str = ""


@dataclass
class Helpers:
    """What this process has to do with stats workers; by default there are none.

    Attributes:
        role: Of this process.
        rank: Of this process, among those of its role.
        workers: How many processes train; 0 if there have never been stats workers.
        active: Those that are there; on a stats worker, itself.
        own_passes: Whether statistics come from the training passes.
        messages: How many have come from stats workers.
        last: By layer of this process, which message was the last with sound statistics of it.
        known: Layers that have ever had statistics, from whatever passes.
        foreign: Messages in a row that spoke of layers that this process does not own.
        shapes: Of the model's parameters and buffers, as all have them.
        optimized: On a stats worker, which of them are in the workers' groups.
        edition: How often the layers have changed; on a stats worker, at its point. What was on its
            way at a change is dropped.
        nonfinite: Statistics that were dropped.
        couriers: To stats workers, those that are gone included; on one of them, its own.
        store: On a stats worker, the one it hosts.
    """

    role: Role = "worker"
    rank: int = 0
    workers: int = 0
    active: list[Helper] = field(default_factory=list)
    own_passes: bool = True
    hungry: bool = True
    messages: int = 0
    last: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    foreign: int = 0
    shapes: list[torch.Size] = field(default_factory=list)
    optimized: list[bool] = field(default_factory=list)
    edition: int = 0
    nonfinite: int = 0
    couriers: list[Courier] = field(default_factory=list)
    store: Store | None = None
    everybody: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there are stats workers, or have been."""
        return self.workers > 0

    @property
    def dismissed(self) -> bool:
        """On a stats worker: whether the workers have said goodbye."""
        return all(helper.courier.closed_there for helper in self.active)

    @property
    def refused(self) -> int:
        """Messages that were not as they have to be, and connections without the key."""
        strangers = 0 if self.store is None else self.store.refused
        return strangers + sum(courier.refused for courier in self.couriers)

    def warnings(self) -> dict[str, str]:
        """What is wrong with the messages that have come, by kind."""
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
            complaints = (courier.complaint for courier in self.couriers)
            found["refused"] = refused_line(next(filter(None, complaints), ""))
        return found

    def begin_with(self, tensors: Sequence[Tensor], groups: Groups) -> None:
        """What all have: parameters and buffers, and the optimizer's groups."""
        self.shapes = [t.shape for t in tensors]
        if self.role == "stats":
            self.optimized = _in_groups(tensors, groups)

    def require_no_growth(self, tensors: Sequence[Tensor]) -> None:
        """Raise SecondOrderError if the model is another, and there is somebody who lacks it."""
        if self.active and self.shapes != [t.shape for t in tensors]:
            raise SecondOrderError(f"the model has changed; {REMEDY}")

    # ----------------------------------------------------------------------------------- workers

    def offer(self, tensors: Callable[[], list[Tensor]], send: Sender, groups: Groups) -> None:
        """Send the newest parameters to the stats workers that want them; worker 0 does.

        Args:
            tensors: The parameters and buffers.
            groups: The optimizer's.
            send: Takes copies of tensors, and what is to be done with them on the CPU.
        """
        if self.rank != 0:
            return
        for helper in self.active:
            wanted = helper.courier.heard("want")
            # Statistics that are still on their way hold the next point back: none queue up.
            if wanted is not None and helper.asked <= wanted <= helper.heard + 1:
                newest = tensors()
                note: dict[str, Any] = {
                    "edition": self.edition,
                    "train": [t.requires_grad for t in newest],
                    "optimized": _in_groups(newest, groups),
                }
                post = partial(helper.courier.post, f"point/{wanted}", **note)
                send(pack_by_dtype(newest), post)
                helper.asked = wanted + 1

    def statistics(
        self, mine: Mapping[str, KroneckerBlock]
    ) -> Iterator[tuple[dict[str, StatisticsSums], dict[str, str]]]:
        """What has come since the last step, for each message sums, and who shares whose input.

        Args:
            mine: The layers that this process owns, by name.
        """
        for helper in self.active:
            name = self._expected_from(helper)
            message = helper.courier.arrived(name)
            if message is None:
                continue
            helper.heard += 1
            self._expected_from(helper)  # now, to keep up with it
            try:
                tensors, note = _statistics_in(message)
            except MalformedError as why:
                helper.courier.refuse(name, why)
                self.messages += 1  # of nothing: who gets nothing else is to be hungry
                continue
            if note["edition"] < self.edition:  # of layers as they were
                continue
            self.messages += 1
            found = _unpack_statistics(tensors, note["layers"], mine)
            self.foreign = self.foreign + 1 if note["layers"] and not found else 0
            self.nonfinite += sum(sums is None for sums in found.values())
            sound = {layer: sums for layer, sums in found.items() if sums is not None}
            self.last |= dict.fromkeys(sound, self.messages)
            self.known.update(sound)
            yield sound, note["sharing"]
        due = self.messages - ENOUGH_MESSAGES
        wanting = [layer for layer in mine if layer in self.known]
        self.hungry = self.messages == 0 or any(self.last.get(k, -1) <= due for k in wanting)

    def begin_anew(self) -> None:
        """Other layers train, or others own them: take statistics oneself until all are fed."""
        self.last, self.messages, self.hungry = {}, 0, True
        self.own_passes = True
        self.edition, self.foreign = self.edition + 1, 0

    def _expected_from(self, helper: Helper) -> str:
        """The name of the next statistics for this worker, which is listened for from now on."""
        name = f"stats/{helper.heard}/{self.rank}"
        if helper.expected != name:  # once: what has come is not to be listened for again
            helper.expected = name
            helper.courier.expect(name)
        return name

    def news(self) -> list[float]:
        """What all workers have to agree on: whether all are fed, and which helpers are gone."""
        if not self.active:
            return []
        couriers = [helper.courier for helper in self.active]
        return [float(self.hungry), *(float(c.lost or c.closed_there) for c in couriers)]

    def hear(self, news: Sequence[float]) -> list[str]:
        """Draw the consequences, the same ones on every worker; warnings that are due."""
        if not news:
            return []
        hungry, *gone = news
        warnings = []
        left = [h for h, g in zip(self.active, gone, strict=True) if g]
        if left:
            names = ", ".join(helper.name for helper in left)
            for helper in left:
                helper.courier.leave()
            for helper in left:
                helper.courier.close(0.1)
            self.active = [helper for helper in self.active if helper not in left]
            rest = (
                "the others go on"
                if self.active
                else ("statistics are taken from the training passes again")
            )
            warnings.append(f"{names} has left, died, or not been heard of: {rest}")
        self.own_passes = not self.active or bool(hungry)
        return warnings

    # ----------------------------------------------------------------------------- stats workers

    def fetch(self, into: Sequence[Tensor]) -> bool:
        """Ask for the newest parameters, wait for them, and load them; False if none will come.

        Those that are frozen there are frozen here. What is malformed is refused, and answered by
        statistics of no layer.

        Raises:
            SecondOrderError: If they are of another model.
        """
        if not self.active:  # a copy of the optimizer
            return False
        (helper,) = self.active
        while True:
            name = f"point/{helper.asked}"
            helper.courier.expect(name)
            helper.courier.tell("want", helper.asked)
            message = helper.courier.wait(name)
            if message is None:
                return False
            helper.asked += 1
            try:
                flats, note = _point_in(message, into)
                break
            except MalformedError as why:
                helper.courier.refuse(name, why)
                self.deliver([{}] * self.workers, {})
        theirs, ours = ([t.numel() for t in each] for each in (flats, into))
        if len(note["train"]) != len(ours) or sum(theirs) != sum(ours):
            raise SecondOrderError(
                f"the workers' model has {len(note['train'])} parameters and buffers of "
                f"{sum(theirs)} numbers, that of {helper.name} {len(ours)} of {sum(ours)}; {REMEDY}"
            )
        self.edition, self.optimized = note["edition"], note["optimized"]
        unpack_by_dtype(flats, into)
        for tensor, trains in zip(into, note["train"], strict=True):
            tensor.requires_grad_(trains)  # statistics of other layers would be of no use
        return True

    def optimized_there(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the workers optimize, of this process's model; nothing on a worker."""
        return [t for t, theirs in zip(tensors, self.optimized, strict=False) if theirs]

    def deliver(
        self, parts: Sequence[Mapping[str, StatisticsSums]], sharing: Mapping[str, str]
    ) -> None:
        """Send statistics to the owners of the layers.

        Args:
            parts: By worker, the sums of its layers.
            sharing: By layer, another one that has had the same input.
        """
        if not self.active:
            return
        (helper,) = self.active
        for rank, sums in enumerate(parts):
            heads = [each.head for each in sums.values()]
            factors = [t for each in sums.values() for t in each.factors]
            flat = [torch.cat([t.reshape(-1) for t in part]) for part in (heads, factors) if part]
            note = {"layers": list(sums), "sharing": sharing, "edition": self.edition}
            helper.courier.post(f"stats/{helper.heard}/{rank}", flat, **note)
        helper.heard += 1

    # --------------------------------------------------------------------------------- the rest

    def close(self, patience: float) -> None:
        """Say goodbye to those that are there, and wait for all of them together."""
        for helper in self.active:
            helper.courier.leave()
        for helper in self.active:
            helper.courier.close(patience)
            if self.store is not None and helper.courier.closed_there:  # others still listen
                await_goodbyes(self.store, self.everybody, min(patience, FAREWELL_SECONDS))
        if self.role == "worker":
            self.active = []
            self.own_passes = True

    def without_messages(self) -> Helpers:
        """For a copy of the optimizer, which talks to nobody."""
        return replace(self, active=[], own_passes=True, couriers=[], store=None)


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, over and over.

    Raises:
        ValueError: If there is none.
    """
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError("batches is empty, or an iterator that has ended; give a loader")


def divide(everybody: World, count: int, patience: float, under_ddp: bool) -> tuple[Helpers, World]:
    """Give every process its role, and a way to talk; a collective.

    Args:
        everybody: The processes.
        count: How many are to be stats workers.
        patience: Seconds without a sign of life after which one is given up.
        under_ddp: Whether the model is in DistributedDataParallel already.

    Returns:
        What this process has to do with the others, and those of its own role.

    Raises:
        ValueError: If none would be left to train, or the model is in DistributedDataParallel.
    """
    roles = assign_roles(everybody.size, count, "stats", under_ddp)
    if not roles.helpers:
        return Helpers(), everybody
    stores = [open_store(everybody, host, patience) for host in roles.helpers]
    team = roles.team(everybody)
    role = roles.of(everybody.rank)
    helpers = Helpers(role, team.rank, len(roles.workers))
    workers = [f"worker {rank}" for rank in roles.workers]
    for j, (store, address) in enumerate(stores):
        name = f"stats worker {roles.helpers[j]}"
        if role == "worker":
            courier = Courier(address, f"worker {team.rank}", name, patience)
            helpers.active.append(Helper(name, courier))
        elif j == team.rank:
            courier = Courier(address, name, "worker 0", patience)
            helpers.active.append(Helper(name, courier))
            helpers.store, helpers.everybody = store, (name, *workers)
    helpers.couriers = [helper.courier for helper in helpers.active]
    await_connections(everybody, helpers.couriers, [store for store, _ in stores])
    return helpers, team


def _in_groups(tensors: Sequence[Tensor], groups: Groups) -> list[bool]:
    ours = {id(p) for group in groups for p in group["params"]}
    return [id(t) in ours for t in tensors]


def _point_in(message: Message, into: Sequence[Tensor]) -> Message:
    """A point, whose tensors fit the model, or are of another one.

    Raises:
        MalformedError: If it is none.
    """
    tensors, note = message
    require_form(note, edition=int, train=[bool], optimized=[bool])
    tensors_there = len(note["train"])
    if len(note["optimized"]) != tensors_there:
        raise MalformedError(
            f"{tensors_there} tensors train or not, {len(note['optimized'])} are known"
        )
    sizes = dict.fromkeys((t.dtype for t in into), 0)
    for t in into:
        sizes[t.dtype] += t.numel()
    found, total = [(t.dtype, t.numel()) for t in tensors], sum(sizes.values())
    same_model = tensors_there == len(into) and sum(size for _, size in found) == total
    if same_model and (any(t.dim() != 1 for t in tensors) or found != list(sizes.items())):
        raise MalformedError(f"its tensors are {found}, the model's {list(sizes.items())}")
    return message


def _statistics_in(message: Message) -> Message:
    """Statistics, of whatever layers.

    Raises:
        MalformedError: If they are none.
    """
    tensors, note = message
    require_form(note, edition=int, layers=[str], sharing={str: str})
    if len(tensors) != (2 if note["layers"] else 0):
        raise MalformedError(f"{len(note['layers'])} layers have {len(tensors)} tensors, not 2")
    strange = [t for t in tensors if t.dim() != 1 or not t.is_floating_point()]
    if strange:
        raise MalformedError(f"a tensor is {strange[0].dtype} of shape {list(strange[0].shape)}")
    if len(set(note["layers"])) < len(note["layers"]):
        raise MalformedError("it names a layer twice")
    return message


def _unpack_statistics(
    tensors: Sequence[Tensor], layers: Sequence[str], mine: Mapping[str, KroneckerBlock]
) -> dict[str, StatisticsSums | None]:
    """The sums of a message; nothing if it speaks of other layers, or of other sizes, than ours.

    None where they are not finite, or of no example: those that are not finite count none.
    """
    if not layers or any(layer not in mine for layer in layers):
        return {}
    blocks = [mine[layer] for layer in layers]
    head_sizes = [1 + len(b.shape.letters) * b.shape.groups for b in blocks]
    shapes = [[b.stored_shape(letter) for letter in b.shape.letters] for b in blocks]
    sizes = [torch.Size(shape).numel() for each in shapes for shape in each]
    heads, factors = tensors
    if heads.numel() != sum(head_sizes) or factors.numel() != sum(sizes):
        return {}
    device = blocks[0].weight.device
    flat = iter(factors.split(sizes))
    found: dict[str, StatisticsSums | None] = {}
    for block, head, each in zip(blocks, heads.split(head_sizes), shapes, strict=True):
        parts = [next(flat).view(shape).clone() for shape in each]
        sound = bool(head[0] > 0) and all(bool(t.isfinite().all()) for t in (head, *parts))
        a, g, *rest = (part.to(device, non_blocking=True) for part in parts)
        sums = StatisticsSums(a, g, head.to(device, non_blocking=True), *rest)
        found[block.name] = sums if sound else None
    return found

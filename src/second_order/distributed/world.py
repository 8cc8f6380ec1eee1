"""The processes that an optimizer works with, and torch's own verbs on buckets of tensors.

The tensors of all layers travel together in flat buffers, so that the number of collectives does
not grow with the number of layers. With one process all verbs return at once.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.distributed.buckets import (
    PendingReduction,
    Run,
    elements,
    flatten,
    goes_by_shares,
    goes_by_sum,
    in_buckets,
    overlaps,
    runs_of,
    scatter,
    sum_in_order,
    wide,
)
from second_order.distributed.groups import (
    explained,
    group_like,
    shared_group_like,
    wait_for_gloo_at_exit,
)
from second_order.sharded import chunk

__all__ = [
    "BUCKET_BYTES",
    "Delivery",
    "Loan",
    "Parts",
    "PendingReduction",
    "Shapes",
    "World",
    "borrow_group",
    "deliver_parts",
]

BUCKET_BYTES = 64 * 2**20

RING_RANKS, ROUNDS_TAG = 8, 7077
"""Number of ranks up to which gloo's ring finds maxima; the tag of the rounds in its place, which
are not to be taken for the user's own messages between two ranks."""

Parts: TypeAlias = tuple[Tensor, ...]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Delivery:
    """One flat tensor that travels from a rank to others."""

    source: int
    destinations: Sequence[int]  # the source may be among them
    size: int  # number of elements, known to all ranks
    content: Tensor | None = None  # on its source alone


class World:
    """The processes an optimizer works with: a process group, or this process alone.

    Without a ``group`` it is the default one if that is initialised, else none.
    """

    wire: torch.dtype | None = None  # in which floating-point messages travel; None for their own

    planned = False
    """Whether the other ranks do not exist, and results are numbers without a meaning."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._subgroups: dict[tuple[Any, ...], World] = {}
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        there, given = dist.is_available(), cast(Any, group)
        outside = there and given is dist.GroupMember.NON_GROUP_MEMBER
        if not (group is None or outside or (there and isinstance(group, dist.ProcessGroup))):
            raise TypeError(
                f"process_group={group!r} is not a torch.distributed.ProcessGroup; pass what "
                f"torch.distributed.new_group() returns, or None for the default group"
            )
        if there and dist.is_initialized():
            self.group = group if group is not None else dist.group.WORLD
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group=; pass one it is in")
        if self.group is not None and self.backend == "gloo":
            wait_for_gloo_at_exit()

    @classmethod
    def alone(cls, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> World:
        """Make a world of a group that is known, or without one, for this process alone."""
        world = cls.__new__(cls)
        world._subgroups, world.group = {}, group
        world.rank, world.size = rank, size
        return world

    # ---------------------------------------------------------------------------------- groups

    @property
    def global_ranks(self) -> list[int]:
        """The ranks as torch numbers them in the default group."""
        if self.group is None:
            return [dist.get_rank()] if dist.is_available() and dist.is_initialized() else [0]
        return list(dist.get_process_group_ranks(self.group))

    @property
    def is_destroyed(self) -> bool:
        """Whether the process group has been destroyed since this world was made."""
        if self.group is None:
            return False
        try:
            dist.get_backend(self.group)
        except ValueError:
            return True
        return False

    @property
    def backend(self) -> str:
        """Name of the backend in use, "none" with one process alone."""
        return "none" if self.group is None else str(dist.get_backend(self.group))

    @explained()
    def subgroup(
        self, ranks: Sequence[int], *, grouped: bool = False, timeout: timedelta | None = None
    ) -> World:
        """The world of some of these ranks, made once; every member must ask in the same order.

        Call :meth:`level` before, where the user may have made groups meanwhile. ``grouped`` makes
        a process group even for one rank; a ``timeout`` of None is that of this world.
        """
        if len(ranks) == self.size:
            return self
        key = (*ranks, timeout)
        if key not in self._subgroups:
            group = None
            if len(ranks) > 1 or grouped:
                assert self.group is not None
                everybody = self.global_ranks  # torch would look for each rank among all
                members = tuple(everybody[rank] for rank in ranks)
                group = shared_group_like(self.group, members, timeout=timeout)
            self._subgroups[key] = World.alone(ranks.index(self.rank), len(ranks), group)
        return self._subgroups[key]

    @explained()
    def aside(self) -> World:
        """The same ranks in a gloo group of their own, made once; as with :meth:`subgroup`.

        It serves small messages that no device waits for and that meet no other collectives.
        """
        if self.group is None:
            return self
        if self.backend == "fake":  # there is no other process
            return World.alone()
        key = ("aside",)
        if key not in self._subgroups:
            wait_for_gloo_at_exit()
            group = shared_group_like(self.group, tuple(self.global_ranks), "gloo")
            self._subgroups[key] = World.alone(self.rank, self.size, group)
        return self._subgroups[key]

    def level(self) -> None:
        """Let all ranks be in equally many groups; a collective before some of them make one.

        Torch names a group that its members make alone by how many each is in. Ranks in unlike
        numbers of groups, as of the user's, would look for each other under other names.
        """
        here = len(dist.distributed_c10d._world.pg_names)
        for _ in range(max(self.all_gather_object(here)) - here):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    def on_cpu(self) -> World:
        """The world of the same ranks for CPU tensors."""
        return self.aside() if self.backend == "nccl" else self

    def wired(self, dtype: torch.dtype | None) -> World:
        """These ranks, whose floating-point messages travel in a dtype; None for their own."""
        if dtype is None:
            return self
        world = copy.copy(self)
        world.wire = dtype
        return world

    # ------------------------------------------------------------------------------------ sums

    def _stage(self, flat: Tensor) -> Tensor:
        """A buffer in a form that the backend can send."""
        if self.wire is not None:
            return flat.to("cpu" if self.backend == "gloo" else flat.device, self.wire)
        if self.backend == "gloo":
            dtype = torch.float32 if flat.dtype in (torch.bfloat16, torch.float16) else flat.dtype
            return flat.to("cpu", dtype)
        return flat

    @explained()
    def all_reduce(
        self, tensors: Iterable[Tensor], op: Any = dist.ReduceOp.SUM
    ) -> PendingReduction:
        """Start to all-reduce tensors in buckets; sums are in place once they are waited for.

        Every rank must pass the same shapes and dtypes in the same order.
        """
        pending = PendingReduction()
        for bucket in _buckets(tensors) if self.size > 1 else ():
            flat = self._stage(flatten(bucket))
            pending.works.append((self._all_reduced(flat, op), partial(scatter, flat, bucket)))
        return pending

    @explained()
    def all_reduce_max(self, tensors: Iterable[Tensor]) -> PendingReduction:
        """Start to take each element's maximum over ranks; otherwise as :meth:`all_reduce`.

        Among many ranks gloo's ring would take 2 (P - 1) messages, one after the other. In its
        place come ⌈log₂ P⌉ rounds, in which each rank hears of twice as many others.
        """
        if self.backend != "gloo" or self.size <= RING_RANKS:
            return self.all_reduce(tensors, dist.ReduceOp.MAX)
        for bucket in _buckets(tensors):
            flat, distance = self._stage(flatten(bucket)), 1
            other = torch.empty_like(flat)
            while distance < self.size:
                there, here = ((self.rank + d) % self.size for d in (distance, -distance))
                going: Any = dist.isend(flat, group=self.group, group_dst=there, tag=ROUNDS_TAG)
                dist.recv(other, group=self.group, group_src=here, tag=ROUNDS_TAG)
                going.wait()
                torch.maximum(flat, other, out=flat)
                distance *= 2
            scatter(flat, bucket)
        return PendingReduction()

    @explained()
    def reduce(
        self, tensors: Sequence[Tensor], owners: Sequence[int | None], *, once: bool = False
    ) -> PendingReduction:
        """Sum tensors over the ranks, each for its owner alone: half the traffic of an all-reduce.

        An owner of None is everybody. Once that is waited for, sums are in place on their owners;
        the others' tensors stay as they were. Addends are taken in the order of ranks, so that all
        owners of a sum agree bit for bit; but among so many ranks that messages count for more than
        bytes, an all-reduce takes them. ``once``: each bucket is one message, an all-reduce in the
        place of shares.
        """
        pending = PendingReduction()
        routed = zip(tensors, owners, strict=True) if self.size > 1 else ()
        for bucket in in_buckets(
            routed, lambda r: (r[0].dtype, r[0].device), lambda r: r[0].nbytes, BUCKET_BYTES
        ):
            pending.works.append(self._summed(bucket, once))
        return pending

    def _summed(
        self, bucket: Sequence[tuple[Tensor, int | None]], once: bool
    ) -> tuple[Any, Callable[[], Any]]:
        """Start to sum a bucket; returns the message, and what is to be done after it."""
        owned: dict[int, list[Tensor]] = {rank: [] for _, rank in bucket if rank is not None}
        for_all = [tensor for tensor, rank in bucket if rank is None]
        for tensor, rank in bucket:
            if rank is not None:
                owned[rank].append(tensor)
        sizes = {rank: elements(owned[rank]) for rank in sorted(owned)}
        targets, common = [*owned.get(self.rank, []), *for_all], elements(for_all)
        total, largest = sum(sizes.values()) + common, max(sizes.values(), default=0) + common
        nbytes, itemsize = total * bucket[0][0].itemsize, bucket[0][0].itemsize
        by_sum = goes_by_sum(self.size, nbytes, self.backend)
        if by_sum or goes_by_shares(self.size, largest * itemsize, nbytes):
            flat = self._stage(flatten([t for rank in sizes for t in owned[rank]] + for_all))
            runs, rest = runs_of(sizes), (total - common, total)
            if not (by_sum or once):
                return self._summed_by_shares(flat, runs, rest, targets)
            whole = flat.to(wide(flat.dtype))
            own = whole[slice(*runs.get(self.rank, (0, 0)))]
            return self._all_reduced(whole), lambda: scatter(
                torch.cat([own, whole[slice(*rest)]]), targets
            )
        parts = [sizes.get(rank, 0) + common for rank in range(self.size)]
        flat = flatten([t for rank in range(self.size) for t in (*owned.get(rank, ()), *for_all)])
        shape = self.size, parts[self.rank]
        rows, work = self._exchange(self._stage(flat), parts, [shape[1]] * self.size)
        return work, lambda: scatter(sum_in_order(rows.view(shape)), targets)

    def _summed_by_shares(
        self, flat: Tensor, runs: Mapping[int, Run], rest: Run, targets: Sequence[Tensor]
    ) -> tuple[Any, Callable[[], Any]]:
        """Start to sum a message of a run for each of some ranks, and of a rest for all."""
        total = len(flat)
        start, stop = chunk(total, self.size, self.rank)
        rows, work = self._exchange(
            flat, overlaps(total, self.size, (0, total)), [stop - start] * self.size
        )

        def inside(run: Run, share: Tensor) -> Tensor:
            first, last = max(run[0], start), min(run[1], stop)
            return share[first - start : max(first, last) - start]

        def onward() -> None:
            # As wide as they have been added: an owner's sums are not rounded on any way.
            share = sum_in_order(rows.view(self.size, stop - start))
            leaving = [
                torch.cat([inside(runs.get(rank, (0, 0)), share), inside(rest, share)])
                for rank in range(self.size)
            ]
            mine = overlaps(total, self.size, runs.get(self.rank, (0, 0)))
            arriving = list(zip(mine, overlaps(total, self.size, rest), strict=True))
            received, work = self._exchange(
                torch.cat(leaving), list(map(len, leaving)), list(map(sum, arriving))
            )
            work.wait()
            pieces = received.split([n for both in arriving for n in both])
            scatter(torch.cat([*pieces[0::2], *pieces[1::2]]), targets)

        return work, onward

    def _all_reduced(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start to all-reduce a flat tensor in place."""
        return dist.all_reduce(flat, op, group=self.group, async_op=True)

    # ------------------------------------------------------------------------------ deliveries

    def broadcast(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Give every rank the value that each tensor has on its owner, in place, in buckets.

        Tensors have the same shapes and dtypes in the same order on every rank.
        """
        if self.size == 1:
            return
        everybody = range(self.size)
        owner_of = {id(tensor): owner for tensor, owner in zip(tensors, owners, strict=True)}
        for bucket in _buckets(tensors):
            parts: dict[int, list[Tensor]] = {}
            for tensor in bucket:
                parts.setdefault(owner_of[id(tensor)], []).append(tensor)
            items = [
                Delivery(i, everybody, elements(p), flatten(p) if i == self.rank else None)
                for i, p in sorted(parts.items(), key=itemgetter(0))
            ]
            received = self.all_to_all(items, bucket[0].dtype, bucket[0].device)
            for item, flat in zip(items, received, strict=True):
                if flat is not None and item.source != self.rank:
                    scatter(flat, parts[item.source])

    @explained()
    def all_to_all(
        self, items: Sequence[Delivery], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor | None]:
        """Send flat tensors from where they are to where they are wanted, in one collective.

        What a few ranks send to all goes by shares, in two more, or by an all-reduce. Items are the
        same list on every rank but for the contents, all of one dtype and device.

        Returns:
            For each item its content, on its source and its destinations; None elsewhere. Received
            contents are views of the whole message; so are those of the source that went to all.
        """
        contents = [item.content for item in items]
        empty = torch.empty(0, dtype=dtype, device=device)
        for i, item in enumerate(items):
            if contents[i] is None and item.size == 0 and self.rank in item.destinations:
                contents[i] = empty
        moving = [
            i
            for i, item in enumerate(items)
            if item.size and any(rank != item.source for rank in item.destinations)
        ]
        for_all = [i for i in moving if items[i].destinations == range(self.size)]
        for_all.sort(key=lambda i: items[i].source)
        sizes: dict[int, int] = {}
        for i in for_all:
            sizes[items[i].source] = sizes.get(items[i].source, 0) + items[i].size
        largest, whole = (f(sizes.values() or [0]) * dtype.itemsize for f in (max, sum))
        by_sum = goes_by_sum(self.size, whole, self.backend)
        if by_sum or goes_by_shares(self.size, largest, whole):
            parts = [c.reshape(-1) for i in for_all if (c := contents[i]) is not None]
            mine, runs = self._stage(torch.cat(parts) if parts else empty), runs_of(sizes)
            if by_sum:  # -0.0 + x is x bit for bit; 0.0 + -0.0 would be 0.0
                flat = mine.new_full((whole // dtype.itemsize,), -0.0)
                flat[slice(*runs.get(self.rank, (0, 0)))] = mine
                self._all_reduced(flat).wait()
            else:
                flat = self._copied_by_shares(mine, runs, whole // dtype.itemsize)
            flat = flat.to(device, dtype)
            for i, piece in zip(for_all, flat.split([items[i].size for i in for_all]), strict=True):
                contents[i] = piece
            moving = sorted(set(moving) - set(for_all))
        if moving:
            self._deliver(items, moving, contents, empty)
        return contents

    def _copied_by_shares(self, mine: Tensor, runs: Mapping[int, Run], total: int) -> Tensor:
        """The whole message of a run of each source: a share to each rank, and then all shares."""
        size, rank = self.size, self.rank
        start, stop = chunk(total, size, rank)
        parts = [0] * size
        for source, run in runs.items():
            parts[source] = overlaps(total, size, run)[rank]
        share = mine.new_zeros(-(-total // size))
        leaving = overlaps(total, size, runs.get(rank, (0, 0)))
        self._exchange(mine, leaving, parts, share[: stop - start])[1].wait()
        return self._all_gathered(share)[:total]

    def _all_gathered(self, share: Tensor) -> Tensor:
        """All ranks' shares of one size, by rank, in a flat tensor."""
        whole = share.new_empty(len(share) * self.size)
        new, old = "all_gather_single", "all_gather_into_tensor"  # its name before torch 2.13
        getattr(dist, new if hasattr(dist, new) else old)(whole, share, group=self.group)
        return whole

    def _deliver(
        self,
        items: Sequence[Delivery],
        moving: Sequence[int],
        contents: list[Tensor | None],
        empty: Tensor,
    ) -> None:
        """Send items straight to their destinations, and put what arrives among the contents."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.size)]
        incoming: list[list[int]] = [[] for _ in range(self.size)]
        for i in moving:
            item, content = items[i], contents[i]
            if item.source == self.rank:
                assert content is not None
                for rank in item.destinations:
                    if rank != self.rank:
                        outgoing[rank].append(content.reshape(-1))
            elif self.rank in item.destinations:
                incoming[item.source].append(i)
        leaving = [content for part in outgoing for content in part]
        received, work = self._exchange(
            self._stage(torch.cat(leaving) if leaving else empty),
            list(map(elements, outgoing)),
            [sum(items[i].size for i in part) for part in incoming],
        )
        work.wait()
        arrived = [i for part in incoming for i in part]
        flat = received.to(empty.device, empty.dtype)
        for i, piece in zip(arrived, flat.split([items[i].size for i in arrived]), strict=True):
            contents[i] = piece

    def _exchange(
        self, flat: Tensor, parts: list[int], received: list[int], buffer: Tensor | None = None
    ) -> tuple[Tensor, dist.Work]:
        """Start to send ``parts`` elements to each rank, and to receive ``received`` from each."""
        if buffer is None:
            buffer = flat.new_empty(sum(received))
        return buffer, self._all_to_all_single(buffer, flat, received, parts)

    def _all_to_all_single(
        self, buffer: Tensor, flat: Tensor, received: list[int], parts: list[int]
    ) -> Any:
        """Start torch's verb of this name."""
        return dist.all_to_all_single(
            buffer, flat, received, parts, group=self.group, async_op=True
        )

    @explained()
    def swap(self, parts: Sequence[Tensor], sizes: Iterable[int]) -> list[Tensor]:
        """Send each rank its flat part, and get one of so many elements from each, by rank."""
        if self.size == 1:
            return list(parts)
        flat, sizes = torch.cat(list(parts)), list(sizes)
        received, work = self._exchange(self._stage(flat), [len(part) for part in parts], sizes)
        work.wait()
        return list(received.to(flat.device, flat.dtype).split(sizes))

    @explained()
    def broadcast_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values, in place, in buckets."""
        for bucket in _buckets(tensors) if self.size > 1 else ():
            flat = self._stage(flatten(bucket))
            self._broadcast_from_first(flat)
            scatter(flat, bucket)

    def _broadcast_from_first(self, flat: Tensor) -> None:
        """Give every rank the first rank's values of a flat tensor, in place."""
        dist.broadcast(flat, group=self.group, group_src=0)

    # --------------------------------------------------------------------------------- answers

    def all_agree(self, mine: bool, device: torch.device) -> bool:
        """Whether ``mine`` is True on all ranks; a collective."""
        noes = torch.tensor([float(not mine)], dtype=torch.float32, device=device)
        self.all_reduce([noes]).wait()
        return not bool(noes)

    @explained()
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value of a small object that can be pickled, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    @explained()
    def same(self, word: int) -> bool:
        """Whether ranks have the same word of 64 bits; an all-reduce of 16 bytes."""
        if self.size == 1:
            return True
        # The greatest word, and the greatest complement, which is that of the least word.
        both = torch.tensor([word, ~word], dtype=torch.int64, device="cpu")
        self.all_reduce_max([both]).wait()
        return int(both[0]) == ~int(both[1])

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """The mean of each number over the ranks, equal on all of them; a collective."""
        total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self.on_cpu().all_reduce([total]).wait()
        means: list[float] = (total / self.size).tolist()
        return means


def deliver_parts(
    world: World,
    shapes: Mapping[Key, Shapes],
    routes: Mapping[Key, tuple[int, Sequence[int]]],
    mine: Mapping[Key, Parts],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[Key, Parts]:
    """Send tuples of tensors from their sources to their destinations, in one collective.

    ``routes`` have each item's source and destinations; they and the shapes of an item's parts are
    the same on every rank. Of ``mine``, the items that this rank has, those missing on their source
    arrive as zeros. Returns all that this rank has or has received, as views of the message.
    """
    items = []
    for key, (source, destinations) in routes.items():
        size, content = sum(map(math.prod, shapes[key])), None
        if source == world.rank and any(rank != source for rank in destinations):
            if key in mine:
                content = flatten([part.to(dtype) for part in mine[key]])
            else:
                content = torch.zeros(size, dtype=dtype, device=device)
        items.append(Delivery(source, destinations, size, content))
    received = world.all_to_all(items, dtype, device)
    everything = dict(mine)
    for key, item, flat in zip(routes, items, received, strict=True):
        if flat is None or world.rank not in item.destinations:
            continue
        # What has gone by shares is in the message on its source, too: one of the two is enough.
        twice = key in mine and item.content is not None and flat is not item.content
        if item.source != world.rank or twice:
            pieces = flat.split([math.prod(shape) for shape in shapes[key]])
            everything[key] = tuple(p.view(s) for p, s in zip(pieces, shapes[key], strict=True))
    return everything


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors in runs of one dtype and device."""
    return in_buckets(tensors, lambda t: (t.dtype, t.device), lambda t: t.nbytes, BUCKET_BYTES)


# Groups that one borrower has to itself.

_lent: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[list[Any], set[int]]]
_lent = weakref.WeakKeyDictionary()  # by lender, the groups made of it, and which of them are back


@dataclass
class Loan:
    """A group on loan: ``world``, of the lender's ranks; what is sent there meets nothing else.

    ``settled`` says whether all that this rank has begun to send has been waited for. Else the
    group never comes back: what other ranks have begun there may have no counterpart here.
    """

    world: World
    number: int = 0
    spare: set[int] | None = None  # the numbers of the lender's groups that are back
    settled: bool = True

    def give_back(self) -> None:
        """Let the group be lent again."""
        if self.spare is not None and self.settled:
            self.spare.add(self.number)
            self.spare = None


@explained()
def borrow_group(world: World) -> Loan:
    """Lend a group of the same ranks and backend; a collective.

    Collectives of one group must come in the same order on every rank. Two senders that set out in
    the middle of passes cannot promise that to each other. It is the oldest group that has come
    back on every rank, or a new one, which costs a connection to each.
    """
    if world.group is None or world.size == 1:
        return Loan(world)
    made, spare = _lent.setdefault(world.group, ([], set()))
    common = set.intersection(*world.all_gather_object(spare))
    if not common:
        world.level()
        made.append(group_like(world.group, world.global_ranks))
    number = min(common, default=len(made) - 1)
    spare.discard(number)
    return Loan(World.alone(world.rank, world.size, made[number]), number, spare)

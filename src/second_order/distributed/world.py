"""The processes that an optimizer works with, and torch's own verbs on buckets of tensors.

The tensors of all layers travel together in flat buffers, so that the number of collectives does
not grow with the number of layers. With one process all verbs return at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.distributed.buckets import (
    Finished,
    PendingReduction,
    Run,
    elements,
    flatten,
    goes_by_shares,
    goes_by_sum,
    goes_in_rounds,
    in_buckets,
    overlaps,
    runs_of,
    scatter,
    sum_in_order,
    wide,
)
from second_order.distributed.groups import check_group, shared_group_like
from second_order.distributed.lost import explained
from second_order.sharded import chunk
from second_order.stages import sent

__all__ = [
    "BUCKET_BYTES",
    "Delivery",
    "Parts",
    "PendingReduction",
    "Shapes",
    "World",
    "deliver_parts",
]

BUCKET_BYTES = 64 * 2**20

ROUNDS_TAG = 7077
"""Tag of messages in rounds, which are not to be taken for the user's own between two ranks."""

Parts: TypeAlias = tuple[Tensor, ...]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Delivery:
    """One flat tensor that travels from a rank to others.

    Attributes:
        source: The rank that has it.
        destinations: The ranks that want it; the source may be among them.
        size: Number of elements, known to all ranks.
        content: The tensor, on its source; None elsewhere.
    """

    source: int
    destinations: Sequence[int]
    size: int
    content: Tensor | None = None


class World:
    """The processes an optimizer works with: a process group, or this process alone.

    Args:
        group: A process group; None for the default one if it is initialised.

    Attributes:
        group: The process group; None for one process alone.
        rank: Rank of this process in the group.
        size: Number of processes.
        whole: Rank and size in the world of which this is a team; None for no team.
        wire: Dtype in which floating-point messages travel; None for their own.
    """

    whole: tuple[int, int] | None = None
    wire: torch.dtype | None = None

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._subgroups: dict[tuple[Any, ...], World] = {}
        check_group(group)
        if not (dist.is_available() and dist.is_initialized()):
            self.group: dist.ProcessGroup | None = None
            self.rank, self.size = 0, 1
            return
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group=; pass one it is in")

    @classmethod
    def alone(cls, rank: int = 0, size: int = 1) -> World:
        """Make a world without a process group, for this process alone."""
        world = cls.__new__(cls)
        world._subgroups, world.group = {}, None
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
        key = (*ranks, timeout)
        if len(ranks) == self.size:
            return self
        if key not in self._subgroups:
            world = World.alone(ranks.index(self.rank), len(ranks))
            if len(ranks) > 1 or grouped:
                assert self.group is not None
                everybody = self.global_ranks  # torch would look for each rank among all
                members = tuple(everybody[rank] for rank in ranks)
                world.group = shared_group_like(self.group, members, timeout=timeout)
            self._subgroups[key] = world
        return self._subgroups[key]

    @explained()
    def aside(self) -> World:
        """The same ranks in a gloo group of their own, made once; as with :meth:`subgroup`.

        It serves small messages that no device waits for and that meet no other collectives.
        """
        key = ("aside",)
        if self.group is None:
            return self
        if self.backend == "fake":  # there is no other process
            return World.alone()
        if key not in self._subgroups:
            world = World.alone(self.rank, self.size)
            world.group = shared_group_like(self.group, tuple(self.global_ranks), "gloo")
            self._subgroups[key] = world
        return self._subgroups[key]

    def level(self) -> None:
        """Let all ranks be in equally many groups; a collective before some of them make one.

        Torch names a group that its members make alone by how many each is in. Ranks in
        unlike numbers of groups, as where some are in a group of the user's, would look for each
        other under other names until the timeout.
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
        world = World.alone(self.rank, self.size)
        world.group, world.wire = self.group, dtype
        return world

    # ------------------------------------------------------------------------------------ sums

    def _stage(self, flat: Tensor) -> Tensor:
        """The buffer in a form that the backend can send."""
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
            pending.add(self._all_reduced(flat, op), partial(scatter, flat, bucket))
        return pending

    def all_reduce_max(self, tensors: Iterable[Tensor]) -> PendingReduction:
        """Start to take each element's maximum over ranks; otherwise as :meth:`all_reduce`."""
        return self.all_reduce(tensors, dist.ReduceOp.MAX)

    @explained()
    def reduce(
        self, tensors: Sequence[Tensor], owners: Sequence[int | None], *, once: bool = False
    ) -> PendingReduction:
        """Sum tensors over the ranks, each for its owner alone: half the traffic of an all-reduce.

        Addends are taken in the order of ranks, so that all owners of a sum agree bit for bit; but
        among so many ranks that messages count for more than bytes, an all-reduce takes them.

        Args:
            tensors: The same shapes and dtypes in the same order on every rank. Once the result is
                waited for, sums are in place on their owners; the others' stay as they were.
            owners: The rank that gets each tensor's sum; None if all do.
            once: Whether each bucket is to be one message: an all-reduce in the place of shares.
        """
        pending = PendingReduction()
        routed = zip(tensors, owners, strict=True) if self.size > 1 else ()
        for bucket in in_buckets(
            routed, lambda r: (r[0].dtype, r[0].device), lambda r: r[0].nbytes, BUCKET_BYTES
        ):
            pending.add(*self._summed(bucket, once))
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
        by_sum = goes_by_sum(self.size, nbytes, self.backend == "gloo")
        if by_sum or goes_by_shares(self.size, largest * itemsize, nbytes):
            flat = self._stage(flatten([t for rank in sizes for t in owned[rank]] + for_all))
            runs, rest = runs_of(sizes), (total - common, total)
            if not (by_sum or once):
                return self._summed_by_shares(flat, runs, rest, targets)
            whole, own = flat.to(wide(flat.dtype)), runs.get(self.rank, (0, 0))
            return self._all_reduced(whole), lambda: scatter(
                torch.cat([whole[slice(*own)], whole[slice(*rest)]]), targets
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
        ranks, total = range(self.size), len(flat)
        start, stop = chunk(total, self.size, self.rank)
        rows, work = self._exchange(
            flat, overlaps(total, self.size, (0, total)), [stop - start] * self.size
        )

        def onward() -> tuple[Any, Callable[[], Any]]:
            # As wide as they have been added: an owner's sums are not rounded on any way.
            share = sum_in_order(rows.view(self.size, stop - start))

            def inside(run: Run) -> Tensor:
                first, last = max(run[0], start), min(run[1], stop)
                return share[first - start : max(first, last) - start]

            leaving = [[inside(runs.get(rank, (0, 0))), inside(rest)] for rank in ranks]
            mine = overlaps(total, self.size, runs.get(self.rank, (0, 0)))
            arriving = list(zip(mine, overlaps(total, self.size, rest), strict=True))
            received, work = self._exchange(
                flatten([part for both in leaving for part in both]),
                [elements(both) for both in leaving],
                [sum(both) for both in arriving],
            )
            pieces = received.split([n for both in arriving for n in both])
            return work, lambda: scatter(torch.cat([*pieces[0::2], *pieces[1::2]]), targets)

        return work, onward

    def _all_reduced(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start to all-reduce a flat tensor in place; what goes in rounds is done on return."""
        if self.backend == "gloo" and goes_in_rounds(self.size, flat.nbytes):
            self._reduce_in_rounds(flat, torch.maximum if op == dist.ReduceOp.MAX else torch.add)
            return Finished()
        sent(flat.nbytes)
        return dist.all_reduce(flat, op, group=self.group, async_op=True)

    def _reduce_in_rounds(self, flat: Tensor, add: Callable[..., Tensor]) -> None:
        """All-reduce a flat tensor in place, to the same bits on every rank.

        Ranks beyond the greatest power of two give theirs to one of the others, and get the sum
        from it. All add in one tree, and a + b is b + a to the bit.
        """
        other, core = torch.empty_like(flat), 2 ** (self.size.bit_length() - 1)
        if self.rank >= core:
            self._send(flat, self.rank - core).wait()
            self._receive(flat, self.rank - core)
            return
        beyond = self.rank + core
        if beyond < self.size:
            self._receive(other, beyond)
            add(flat, other, out=flat)
        distance = 1
        while distance < core:
            going = self._send(flat, self.rank ^ distance)
            self._receive(other, self.rank ^ distance)
            going.wait()
            add(flat, other, out=flat)
            distance *= 2
        if beyond < self.size:
            self._send(flat, beyond).wait()

    def _send(self, flat: Tensor, rank: int) -> Any:
        """Start to send a flat tensor, which must stay as it is until that is waited for."""
        sent(flat.nbytes)
        return dist.isend(flat, group=self.group, group_dst=rank, tag=ROUNDS_TAG)

    def _receive(self, flat: Tensor, rank: int) -> None:
        dist.recv(flat, group=self.group, group_src=rank, tag=ROUNDS_TAG)

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

        What a few ranks send to all goes by shares, in two more, or by an all-reduce.

        Args:
            items: The deliveries, the same list on every rank but for the contents.
            dtype: Dtype of the contents.
            device: Device of the contents.

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
        by_sum = goes_by_sum(self.size, whole, self.backend == "gloo")
        if by_sum or goes_by_shares(self.size, largest, whole):
            mine = [c.reshape(-1) for i in for_all if (c := contents[i]) is not None]
            copy = self._copied_by_sum if by_sum else self._copied_by_shares
            flat = copy(runs_of(sizes), torch.cat(mine) if mine else empty).to(device, dtype)
            for i, piece in zip(for_all, flat.split([items[i].size for i in for_all]), strict=True):
                contents[i] = piece
            moving = sorted(set(moving) - set(for_all))
        if moving:
            self._deliver(items, moving, contents, empty)
        return contents

    def _copied_by_sum(self, runs: Mapping[int, Run], mine: Tensor) -> Tensor:
        """The whole message of a run of each source, by adding nothing to each."""
        # -0.0 + x is x bit for bit; 0.0 + -0.0 would be 0.0.
        flat = mine.new_full((max(stop for _, stop in runs.values()),), -0.0)
        flat[slice(*runs.get(self.rank, (0, 0)))] = mine
        flat = self._stage(flat)
        self._all_reduced(flat).wait()
        return flat

    def _copied_by_shares(self, runs: Mapping[int, Run], mine: Tensor) -> Tensor:
        """The whole message of a run of each source: a share to each rank, and then all shares."""
        flat, total = self._stage(mine), max(stop for _, stop in runs.values())
        start, stop = chunk(total, self.size, self.rank)
        parts = [0] * self.size
        for source, (first, last) in runs.items():
            parts[source] = max(0, min(last, stop) - max(first, start))
        share = flat.new_zeros(-(-total // self.size))
        _, work = self._exchange(
            flat,
            overlaps(total, self.size, runs.get(self.rank, (0, 0))),
            parts,
            share[: stop - start],
        )
        work.wait()
        sent(share.nbytes)
        whole = flat.new_empty(len(share) * self.size)
        new, old = "all_gather_single", "all_gather_into_tensor"  # its name before torch 2.13
        getattr(dist, new if hasattr(dist, new) else old)(whole, share, group=self.group)
        return whole[:total]

    def _deliver(
        self,
        items: Sequence[Delivery],
        moving: Sequence[int],
        contents: list[Tensor | None],
        empty: Tensor,
    ) -> None:
        """Send items straight to their destinations, and put what arrives among the contents."""
        outgoing: list[list[Delivery]] = [[] for _ in range(self.size)]
        incoming: dict[int, list[int]] = {}
        for i in moving:
            item = items[i]
            if item.source == self.rank:
                for rank in item.destinations:
                    if rank != self.rank:
                        outgoing[rank].append(item)
            elif self.rank in item.destinations:
                incoming.setdefault(item.source, []).append(i)
        leaving = [item.content.reshape(-1) for part in outgoing for item in part]  # type: ignore[union-attr]
        received, work = self._exchange(
            self._stage(torch.cat(leaving) if leaving else empty),
            [sum(item.size for item in part) for part in outgoing],
            [sum(items[i].size for i in incoming.get(rank, ())) for rank in range(self.size)],
        )
        work.wait()
        arrived = [i for rank in sorted(incoming) for i in incoming[rank]]
        flat = received.to(empty.device, empty.dtype)
        for i, piece in zip(arrived, flat.split([items[i].size for i in arrived]), strict=True):
            contents[i] = piece

    def _exchange(
        self, flat: Tensor, parts: list[int], received: list[int], buffer: Tensor | None = None
    ) -> tuple[Tensor, dist.Work]:
        """Start to send ``parts`` elements to each rank, and to receive ``received`` from each."""
        sent(flat.nbytes)
        if buffer is None:
            buffer = flat.new_empty(sum(received))
        work = dist.all_to_all_single(
            buffer, flat, received, parts, group=self.group, async_op=True
        )
        return buffer, work

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
            sent(flat.nbytes if self.rank == 0 else 0)
            dist.broadcast(flat, group=self.group, group_src=0)
            scatter(flat, bucket)

    # --------------------------------------------------------------------------------- answers

    def all_agree(self, mine: bool, device: torch.device) -> bool:
        """Whether ``mine`` is True on all ranks; a collective."""
        noes = torch.tensor([float(not mine)], device=device)
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
    def same(self, words: Sequence[int | None]) -> bool:
        """Whether ranks have the same words of 64 bits; an all-reduce of 16 bytes for each.

        There are as many on every rank, None where this rank has none, and some other has.
        """
        if self.size == 1:
            return True
        # The greatest word, and the greatest complement, which is that of the least word.
        least = -(2**63)
        both = [(least, least) if word is None else (word, ~word) for word in words]
        greatest = torch.tensor(both, dtype=torch.int64, device="cpu")
        self.all_reduce_max([greatest]).wait()
        return all(most == ~of_least for most, of_least in greatest.tolist())


def deliver_parts(
    world: World,
    shapes: Mapping[Key, Shapes],
    routes: Mapping[Key, tuple[int, Sequence[int]]],
    mine: Mapping[Key, Parts],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[Key, Parts]:
    """Send tuples of tensors from their sources to their destinations, in one collective.

    Args:
        world: The processes that the ranks below belong to.
        shapes: Shapes of the parts of each item; the same on every rank.
        routes: The source and the destinations of each item, in one order on every rank.
        mine: The items that this rank has. Items missing on their source arrive as zeros.
        dtype: Dtype of all parts, as they travel.
        device: Device of all parts.

    Returns:
        All items that this rank has or has received; received parts are views of the message.
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

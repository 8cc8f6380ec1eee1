"""A handful of bucketed collectives; with one process they return at once.

The tensors of all layers travel together in flat buffers, so that the number of
collectives does not grow with the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.distributed.groups import check_group, shared_group_like
from second_order.distributed.lost import explained
from second_order.distributed.reductions import (
    Finished,
    PendingReduction,
    PendingSums,
    Started,
    in_runs,
    scatter,
    sum_in_order,
    wide,
)
from second_order.distributed.shares import (
    Segments,
    Shares,
    goes_by_shares,
    goes_by_sum,
    goes_in_rounds,
    in_buckets,
    sizes_of,
)
from second_order.stages import sent

__all__ = ["BUCKET_BYTES", "Delivery", "PendingReduction", "World"]

BUCKET_BYTES = 64 * 2**20

ROUNDS_TAG = 7077
"""Tag of messages in rounds, which are not to be taken for the user's own between two ranks."""


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

    @property
    def leaves(self) -> bool:
        """Whether another rank than the source wants the tensor."""
        return any(rank != self.source for rank in self.destinations)


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

        Call :meth:`level` before, where the user may have made groups meanwhile.

        Args:
            ranks: Ranks in this world.
            grouped: Whether to make a process group even for one rank.
            timeout: Timeout of its collectives; None for that of this world.
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

        It serves small messages that no device waits for and that meet no other collectives. With
        torch's fake backend there is no other process.
        """
        key = ("aside",)
        if self.group is None:
            return self
        if self.backend == "fake":
            return World.alone()
        if key not in self._subgroups:
            world = World.alone(self.rank, self.size)
            members = tuple(dist.get_process_group_ranks(self.group))
            world.group = shared_group_like(self.group, members, "gloo")
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

    def _stage(self, flat: Tensor) -> Tensor:
        """The buffer in a form that the backend can send."""
        if self.wire is not None:
            return flat.to("cpu" if self.backend == "gloo" else flat.device, self.wire)
        if self.backend == "gloo":
            dtype = torch.float32 if flat.dtype in (torch.bfloat16, torch.float16) else flat.dtype
            return flat.to("cpu", dtype)
        return flat

    def all_reduce(self, tensors: Iterable[Tensor]) -> PendingReduction:
        """Start to all-reduce tensors in buckets; sums are in place once they are waited for.

        Every rank must pass the same shapes and dtypes in the same order.
        """
        return self._start_reduction(tensors, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensors: Iterable[Tensor]) -> PendingReduction:
        """Start to take each element's maximum over ranks; otherwise as :meth:`all_reduce`."""
        return self._start_reduction(tensors, dist.ReduceOp.MAX)

    @explained()
    def _start_reduction(self, tensors: Iterable[Tensor], op: Any) -> PendingReduction:
        pending = PendingReduction()
        if self.size == 1:
            return pending
        for bucket in _buckets(tensors):
            flat = self._stage(_flatten(bucket))
            pending.add(self._all_reduced(flat, op), flat.detach, bucket)
        return pending

    @explained()
    def start_sums(self, tensors: Sequence[Tensor]) -> PendingSums:
        """Start to sum tensors over ranks as :meth:`all_reduce` does, but leave them as they are.

        They may change or go as soon as this returns.
        """
        pending = PendingSums(len(tensors))
        places: dict[int, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(id(tensor), []).append(place)
        for bucket in _buckets(tensors):
            flat = self._stage(_flatten(bucket))
            work = self._all_reduced(flat)
            pending.add(work, flat, [places[id(t)].pop(0) for t in bucket], bucket)
        return pending

    @explained()
    def reduce(self, tensors: Sequence[Tensor], owners: Sequence[int | None]) -> PendingReduction:
        """Sum tensors over the ranks, each for its owner alone: half the traffic of an all-reduce.

        Addends are taken in the order of ranks, so that all owners of a sum agree bit for bit; but
        among so many ranks that messages count for more than bytes, an all-reduce takes them.

        Args:
            tensors: Addends of any shapes; the same shapes and dtypes in the same order on every
                rank. Once the result is waited for, sums are in place on their owners; the others'
                tensors stay as they were.
            owners: The rank that gets each tensor's sum; None if all do.
        """
        pending = PendingReduction()
        if self.size == 1:
            return pending
        owner_of = {id(tensor): owner for tensor, owner in zip(tensors, owners, strict=True)}
        for bucket in _buckets(tensors):
            owned: dict[int | None, list[Tensor]] = {}
            for tensor in bucket:
                owned.setdefault(owner_of[id(tensor)], []).append(tensor)
            for_all = owned.pop(None, [])
            own = {rank: owned[rank] for rank in sorted(rank for rank in owned if rank is not None)}
            sizes = {rank: _elements(part) for rank, part in own.items()}
            common, itemsize = _elements(for_all), bucket[0].itemsize
            largest = max(sizes.values(), default=0) + common
            whole = sum(sizes.values()) + common
            targets = [*own.get(self.rank, []), *for_all]
            by_sum = self._goes_by_sum(whole * itemsize)
            if by_sum or goes_by_shares(self.size, largest * itemsize, whole * itemsize):
                segments = Segments.of_sizes(sizes, common, self.size)
                flat = self._stage(_flatten([t for part in own.values() for t in part] + for_all))
                if by_sum:
                    flat = flat.to(wide(flat.dtype))
                    wanted_here = partial(_parts, flat, segments.wanted(self.rank))
                    pending.add(self._all_reduced(flat), wanted_here, targets)
                    continue
                onward = partial(self._to_owners, segments)
                pending.add_half(self._sum_of_shares(flat, segments.shares), onward, targets)
                continue
            parts = [sizes.get(rank, 0) + common for rank in range(self.size)]
            wanted = [t for rank in range(self.size) for t in (*own.get(rank, ()), *for_all)]
            flat = self._stage(_flatten(wanted))
            received, work = self._exchange(flat, parts, [parts[self.rank]] * self.size)
            rows = received.view(self.size, parts[self.rank])
            pending.add(work, partial(sum_in_order, rows, flat), targets)
        return pending

    def _goes_by_sum(self, nbytes: int) -> bool:
        return goes_by_sum(self.size, nbytes, self.backend == "gloo")

    def _all_reduced(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start to all-reduce a flat tensor in place; what goes in rounds is done on return."""
        if self.backend == "gloo" and goes_in_rounds(self.size, flat.nbytes):
            add = torch.maximum if op == dist.ReduceOp.MAX else torch.add
            self._reduce_in_rounds(flat, partial(add, flat, out=flat))
            return Finished()
        sent(flat.nbytes)
        return dist.all_reduce(flat, op, group=self.group, async_op=True)

    def _reduce_in_rounds(self, flat: Tensor, add: Callable[[Tensor], Any]) -> None:
        """All-reduce a flat tensor in place, to the same bits on every rank.

        Ranks beyond the greatest power of two give theirs to one of the others, and get the sum
        from it. All add in one tree, and a + b is b + a to the bit.

        Args:
            flat: The tensor.
            add: Adds another one of its size to it.
        """
        other, core = torch.empty_like(flat), 2 ** (self.size.bit_length() - 1)
        if self.rank >= core:
            self._send(flat, self.rank - core).wait()
            self._receive(flat, self.rank - core)
            return
        beyond = self.rank + core
        if beyond < self.size:
            self._receive(other, beyond)
            add(other)
        distance = 1
        while distance < core:
            going = self._send(flat, self.rank ^ distance)
            self._receive(other, self.rank ^ distance)
            going.wait()
            add(other)
            distance *= 2
        if beyond < self.size:
            self._send(flat, beyond).wait()

    def _send(self, flat: Tensor, rank: int) -> Any:
        """Start to send a flat tensor, which must stay as it is until that is waited for."""
        assert self.group is not None
        sent(flat.nbytes)
        to = dist.get_global_rank(self.group, rank)
        return dist.isend(flat, to, group=self.group, tag=ROUNDS_TAG)

    def _receive(self, flat: Tensor, rank: int) -> None:
        assert self.group is not None
        source = dist.get_global_rank(self.group, rank)
        dist.recv(flat, source, group=self.group, tag=ROUNDS_TAG)

    def _sum_of_shares(self, flat: Tensor, shares: Shares) -> Started:
        """Start to sum this rank's share of a flat tensor over the ranks."""
        start, stop = shares.bounds(self.rank)
        received, work = self._exchange(
            flat, shares.overlaps(0, shares.total), [stop - start] * self.size
        )
        return work, partial(sum_in_order, received.view(self.size, stop - start), flat)

    def _to_owners(self, segments: Segments, share: Tensor) -> Started:
        """Start to send this rank's share of sums to those that want it, and to get one's own."""
        leaving, (own, common) = segments.leaving(self.rank), segments.arriving(self.rank)
        # As wide as they have been added: an owner's sums are not rounded on any way.
        flat = torch.cat([share[part] for parts in leaving for part in parts] or [share[:0]])
        received, work = self._exchange(
            flat, sizes_of(leaving), [a + b for a, b in zip(own, common, strict=True)]
        )
        return work, partial(in_runs, received, own, common, flat)

    def broadcast(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Give every rank the value that each tensor has on its owner, in place, in buckets.

        Args:
            tensors: Values, with the same shapes and dtypes in the same order on every rank.
            owners: The rank whose value each tensor gets.
        """
        if self.size == 1:
            return
        owner_of = {id(tensor): owner for tensor, owner in zip(tensors, owners, strict=True)}
        for bucket in _buckets(tensors):
            parts: dict[int, list[Tensor]] = {}
            for tensor in bucket:
                parts.setdefault(owner_of[id(tensor)], []).append(tensor)
            items = [
                Delivery(
                    rank,
                    range(self.size),
                    _elements(part),
                    _flatten(part) if rank == self.rank else None,
                )
                for rank, part in sorted(parts.items(), key=itemgetter(0))
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
        moving = [i for i, item in enumerate(items) if item.size and item.leaves]
        shared = self._for_all(items, moving, dtype.itemsize)
        if shared:
            flat = self._spread(items, shared, empty)
            for i, piece in zip(shared, flat.split([items[i].size for i in shared]), strict=True):
                contents[i] = piece
            known = set(shared)
            moving = [i for i in moving if i not in known]
        if moving:
            self._deliver(items, moving, contents, empty)
        return contents

    def _for_all(
        self, items: Sequence[Delivery], moving: Sequence[int], itemsize: int
    ) -> list[int]:
        """Those of the items that go to all ranks together, by source; none if all go directly."""
        for_all = [i for i in moving if items[i].destinations == range(self.size)]
        of_source: dict[int, int] = {}
        for i in for_all:
            source = items[i].source
            of_source[source] = of_source.get(source, 0) + items[i].size * itemsize
        largest, whole = max(of_source.values(), default=0), sum(of_source.values())
        if not (self._goes_by_sum(whole) or goes_by_shares(self.size, largest, whole)):
            return []
        return sorted(for_all, key=lambda i: items[i].source)

    def _added(self, items: Sequence[Delivery], which: Sequence[int], empty: Tensor) -> Tensor:
        """Give all ranks some items in one flat tensor: the sum of them and of nothing."""
        contents = [items[i].content for i in which]
        parts = [
            # -0.0 + x is x bit for bit; 0.0 + -0.0 would be 0.0.
            empty.new_full((items[i].size,), -0.0) if content is None else content.reshape(-1)
            for i, content in zip(which, contents, strict=True)
        ]
        flat = self._stage(torch.cat(parts))
        self._all_reduced(flat).wait()
        return flat.to(empty.device, empty.dtype)

    def _spread(self, items: Sequence[Delivery], which: Sequence[int], empty: Tensor) -> Tensor:
        """Give all ranks some items in one flat tensor: a share to each, and then all shares."""
        if self._goes_by_sum(sum(items[i].size for i in which) * empty.itemsize):
            return self._added(items, which, empty)
        sizes: dict[int, int] = {}
        for i in which:
            sizes[items[i].source] = sizes.get(items[i].source, 0) + items[i].size
        segments = Segments.of_sizes(sizes, 0, self.size)
        shares = segments.shares
        mine = [
            content.reshape(-1)
            for i in which
            if items[i].source == self.rank and (content := items[i].content) is not None
        ]
        flat = self._stage(torch.cat(mine) if mine else empty)
        start, stop = shares.bounds(self.rank)
        parts = [0] * self.size
        for source, (first, last) in segments.of.items():
            parts[source] = max(0, min(last, stop) - max(first, start))
        share = flat.new_zeros(shares.size)
        _, work = self._exchange(
            flat, shares.overlaps(*segments.of.get(self.rank, (0, 0))), parts, share[: stop - start]
        )
        work.wait()
        sent(share.nbytes)
        whole = flat.new_empty(shares.size * self.size)
        new, old = "all_gather_single", "all_gather_into_tensor"  # its name before torch 2.13
        getattr(dist, new if hasattr(dist, new) else old)(whole, share, group=self.group)
        return whole[: shares.total].to(empty.device, empty.dtype)

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
        self,
        flat: Tensor,
        parts: list[int],
        received: list[int],
        buffer: Tensor | None = None,
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
        """Send each rank its flat part, and get one from each, in one collective.

        Args:
            parts: By rank, what goes there; all of one dtype, on one device.
            sizes: By rank, the number of elements that come from there.

        Returns:
            By rank, what has come from there.
        """
        if self.size == 1:
            return list(parts)
        sizes = list(sizes)
        flat = torch.cat(list(parts))
        sent = self._stage(flat)
        received, work = self._exchange(sent, [part.numel() for part in parts], sizes)
        work.wait()
        return list(received.to(flat.device, flat.dtype).split(sizes))

    @explained()
    def broadcast_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values, in place, in buckets."""
        if self.size == 1:
            return
        assert self.group is not None
        source = dist.get_global_rank(self.group, 0)
        for bucket in _buckets(tensors):
            flat = self._stage(_flatten(bucket))
            sent(flat.nbytes if self.rank == 0 else 0)
            dist.broadcast(flat, source, group=self.group)
            scatter(flat, bucket)

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

        Args:
            words: As many on every rank; None where this rank has none, and some other has.
        """
        if self.size == 1:
            return True
        # The greatest word, and the greatest complement, which is that of the least word.
        least = -(2**63)
        both = [(least, least) if word is None else (word, ~word) for word in words]
        greatest = torch.tensor(both, dtype=torch.int64, device="cpu")
        self.all_reduce_max([greatest]).wait()
        return all(most == ~of_least for most, of_least in greatest.tolist())


def _parts(flat: Tensor, parts: Iterable[slice]) -> Tensor:
    return torch.cat([flat[part] for part in parts])


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors in runs of one dtype and device."""
    kind, nbytes = attrgetter("dtype", "device"), attrgetter("nbytes")
    return in_buckets(tensors, kind, nbytes, BUCKET_BYTES)

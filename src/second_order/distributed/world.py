"""The ranks that an optimizer works with, and the collectives that it uses.

Tensors of all layers travel in flat buffers, so the number of collectives does not grow with the
number of layers. There are three kinds of messages for tensors:

    all_reduce           sums and maxima for every rank
    all_to_all_single    sums for one owner each, and tensors that a rank sends to others
    broadcast            the first rank's tensors

If most of a buffer belongs to a few ranks, a direct exchange would make these send or receive P
times their part. Such buffers are all-reduced. With one rank, all methods return immediately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.distributed.buckets import (
    PendingReduction,
    elements,
    flatten,
    in_buckets,
    scatter,
    sum_in_order,
    wide,
)
from second_order.distributed.groups import (
    control_group,
    explained,
    group_like,
    shared_group_like,
    wait_for_gloo_at_exit,
)

__all__ = ["BUCKET_BYTES", "Parts", "PendingReduction", "Shapes", "World", "deliver_parts"]

BUCKET_BYTES = 64 * 2**20

Parts: TypeAlias = tuple[Tensor, ...]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Key = TypeVar("Key", bound=Hashable)
Owned: TypeAlias = tuple[Tensor, int | None]
"""A tensor and the rank that owns it, or None if every rank does."""


class World:
    """The ranks of a process group, or this process alone.

    Without a ``group`` it is the default group if that is initialized, otherwise this process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank = 0
        self.size = 1
        if alone or not dist.is_available():
            return
        outside = cast(Any, group) is dist.GroupMember.NON_GROUP_MEMBER
        if not (group is None or outside or isinstance(group, dist.ProcessGroup)):
            raise TypeError(
                f"process_group={group!r} is not a torch.distributed.ProcessGroup; pass what "
                f"torch.distributed.new_group() returns, or None for the default group"
            )
        if not dist.is_initialized():
            return
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group=; pass one it is in")
        if self.backend == "gloo":
            wait_for_gloo_at_exit()

    @classmethod
    def alone(cls) -> World:
        """Make the world of this process alone."""
        return World(alone=True)

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
        """Name of the backend, or "none" for one process alone."""
        return "none" if self.group is None else str(dist.get_backend(self.group))

    @explained()
    def subgroup(
        self, ranks: Sequence[int], *, grouped: bool = False, timeout: timedelta | None = None
    ) -> World:
        """The world of some of these ranks. Its members call this in the same order.

        Groups are made once and reused. With ``grouped``, one rank gets a process group as well.
        """
        if len(ranks) == self.size:
            return self
        if len(ranks) == 1 and not grouped:
            return World.alone()
        assert self.group is not None
        global_ranks = self.global_ranks
        members = tuple(global_ranks[rank] for rank in ranks)
        return World(shared_group_like(self.group, members, timeout))

    @explained()
    def aside(self) -> World:
        """The same ranks in a gloo group of their own, for small control messages.

        The device is not synchronized for them, and no other collective comes between them.
        """
        if self.group is None:
            return self
        if self.backend == "fake":  # there is no other process
            return World.alone()
        return World(control_group(self.group))

    @explained()
    def separate(self) -> World:
        """The same ranks in a new group, for collectives whose order no other sender knows."""
        if self.group is None:
            return self
        return World(group_like(self.group, self.global_ranks))

    def on_cpu(self) -> World:
        """The world of the same ranks for CPU tensors."""
        return self.aside() if self.backend == "nccl" else self

    # ------------------------------------------------------------------------------------ sums

    @explained()
    def all_reduce(
        self,
        tensors: Iterable[Tensor],
        op: Any = dist.ReduceOp.SUM,
        dtype: torch.dtype | None = None,
    ) -> PendingReduction:
        """Start to all-reduce tensors in place, in buckets.

        Every rank passes the same shapes and dtypes in the same order. ``dtype`` is the
        communication dtype, if it is not that of the tensors.
        """
        pending = PendingReduction()
        if self.size > 1:
            for bucket in _buckets(tensors):
                flat = self._stage(flatten(bucket), dtype)
                pending.works.append((self._all_reduced(flat, op), partial(scatter, flat, bucket)))
        return pending

    def all_reduce_max(self, tensors: Iterable[Tensor]) -> PendingReduction:
        """Start to take each element's maximum over the ranks, as :meth:`all_reduce`."""
        return self.all_reduce(tensors, dist.ReduceOp.MAX)

    @explained()
    def reduce(
        self,
        tensors: Sequence[Tensor],
        owners: Sequence[int | None],
        dtype: torch.dtype | None = None,
    ) -> PendingReduction:
        """Start to sum tensors over the ranks, each for its owner: half of an all-reduce's traffic.

        If an owner is None, every rank gets the sum. Tensors of other owners stay as they are.
        Ranks are added in their order, unless the sum is an all-reduce.
        """
        pending = PendingReduction()
        if self.size > 1:
            items: Iterable[Owned] = zip(tensors, owners, strict=True)
            for bucket in _owned_buckets(items):
                pending.works.append(self._reduce_bucket(bucket, dtype))
        return pending

    def _reduce_bucket(
        self, bucket: Sequence[Owned], dtype: torch.dtype | None
    ) -> tuple[Any, Callable[[], Any]]:
        """Start to sum a bucket. Returns the message, and what to call after it."""
        sizes: dict[int | None, int] = {None: 0}
        for tensor, owner in bucket:
            sizes[owner] = sizes.get(owner, 0) + tensor.numel()
        total = sum(sizes.values())
        common = sizes.pop(None)
        largest = common + max(sizes.values(), default=0)

        if self._is_uneven(largest, total):
            staged = self._stage(flatten([tensor for tensor, _ in bucket]), dtype)
            whole = staged.to(wide(staged.dtype))

            def take_own_sums() -> None:
                pieces = whole.split([tensor.numel() for tensor, _ in bucket])
                for (tensor, owner), piece in zip(bucket, pieces, strict=True):
                    if owner is None or owner == self.rank:
                        tensor.copy_(piece.view(tensor.shape))

            return self._all_reduced(whole), take_own_sums

        parts: list[list[Tensor]] = [[] for _ in range(self.size)]
        for tensor, owner in bucket:
            for rank in range(self.size) if owner is None else [owner]:
                parts[rank].append(tensor)
        flat = self._stage(flatten([tensor for part in parts for tensor in part]), dtype)
        leaving = [elements(part) for part in parts]
        own = leaving[self.rank]
        rows = flat.new_empty(self.size, own)
        work = self._all_to_all_single(rows.view(-1), flat, [own] * self.size, leaving)
        return work, lambda: scatter(sum_in_order(rows), parts[self.rank])

    # ------------------------------------------------------------------------------ deliveries

    @explained()
    def swap(
        self, parts: Sequence[Tensor], sizes: Iterable[int], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Send each rank its flat part, and receive one of so many elements from each, by rank."""
        if self.size == 1:
            return list(parts)
        arriving = list(sizes)
        flat = torch.cat(list(parts))
        staged = self._stage(flat, dtype)
        received = staged.new_empty(sum(arriving))
        leaving = [len(part) for part in parts]
        self._all_to_all_single(received, staged, arriving, leaving).wait()
        return list(received.to(flat.device, flat.dtype).split(arriving))

    @explained()
    def all_gather(
        self, mine: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Every rank's flat tensor, by rank. ``sizes`` are the same list on every rank."""
        total = sum(sizes)
        if self.size == 1 or total == 0:
            return [mine] * self.size
        if not self._is_uneven(max(sizes), total):
            nothing = mine[:0]
            parts = [nothing if rank == self.rank else mine for rank in range(self.size)]
            arriving = list(sizes)
            arriving[self.rank] = 0
            found = self.swap(parts, arriving, dtype)
            found[self.rank] = mine
            return found
        # -0.0 + x is x bit for bit, whereas 0.0 + -0.0 would be 0.0.
        staged = self._stage(mine, dtype)
        whole = staged.new_full((total,), -0.0)
        whole.split(list(sizes))[self.rank].copy_(staged)
        self._all_reduced(whole).wait()
        return list(whole.to(mine.device, mine.dtype).split(list(sizes)))

    def broadcast(
        self,
        tensors: Sequence[Tensor],
        owners: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Give every rank the value that each tensor has on its owner, in place, in buckets.

        Tensors have the same shapes and dtypes in the same order on every rank. ``dtype`` is the
        communication dtype, if it is not theirs.
        """
        for bucket in _owned_buckets(zip(tensors, owners, strict=True)) if self.size > 1 else ():
            owned: dict[int | None, list[Tensor]] = {}
            for tensor, owner in bucket:
                owned.setdefault(owner, []).append(tensor)
            sizes = [elements(owned.get(rank, [])) for rank in range(self.size)]
            mine = flatten([bucket[0][0].new_empty(0), *owned.get(self.rank, [])])
            for rank, flat in enumerate(self.all_gather(mine, sizes, dtype)):
                if rank in owned and rank != self.rank:
                    scatter(flat, owned[rank])

    @explained()
    def broadcast_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values, in place, in buckets."""
        for bucket in _buckets(tensors) if self.size > 1 else ():
            flat = self._stage(flatten(bucket))
            self._broadcast_from_first(flat)
            scatter(flat, bucket)

    # ---------------------------------------------------------------------------- torch's verbs

    def _stage(self, flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer in a form that the backend can send."""
        if self.backend != "gloo":
            return flat if dtype is None else flat.to(dtype)
        if dtype is None:
            half = flat.dtype in (torch.bfloat16, torch.float16)
            dtype = torch.float32 if half else flat.dtype
        return flat.to("cpu", dtype)

    def _is_uneven(self, largest: int, total: int) -> bool:
        """Whether a rank would send or receive much more than the whole message."""
        return self.size * largest > 2 * total

    def _all_reduced(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start to all-reduce a flat tensor in place."""
        return dist.all_reduce(flat, op, group=self.group, async_op=True)

    def _all_to_all_single(
        self, buffer: Tensor, flat: Tensor, arriving: list[int], leaving: list[int]
    ) -> Any:
        """Start to send consecutive parts of a flat tensor to the ranks, and to receive others."""
        return dist.all_to_all_single(
            buffer, flat, arriving, leaving, group=self.group, async_op=True
        )

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

    def same(self, word: int) -> bool:
        """Whether all ranks have the same 64-bit integer; an all-reduce of 16 bytes."""
        if self.size == 1:
            return True
        # The greatest word, and the greatest complement, which is that of the least word.
        both = torch.tensor([word, ~word], dtype=torch.int64, device="cpu")
        self.all_reduce_max([both]).wait()
        return int(both[0]) == ~int(both[1])


def deliver_parts(
    world: World,
    shapes: Mapping[Key, Shapes],
    routes: Mapping[Key, tuple[int, Sequence[int]]],
    mine: Mapping[Key, Parts],
    dtype: torch.dtype,
    device: torch.device,
    wire: torch.dtype | None = None,
) -> dict[Key, Parts]:
    """Send tuples of tensors from their sources to their destinations, in buckets; a collective.

    ``routes`` have each item's source and destinations. Routes, and the ``shapes`` of an item's
    parts, are the same on every rank. ``mine`` are the items of this rank; an item that its source
    lacks arrives as zeros. ``wire`` is the communication dtype, if it is not ``dtype``. Messages go
    to all ranks, which drop what is not theirs.

    Returns:
        All items that this rank has or received.
    """
    everything = dict(mine)

    def parts_of(key: Key) -> Parts:
        """What this rank sends, or the memory for what it receives."""
        if routes[key][0] == world.rank and key in mine:
            return tuple(part.to(dtype) for part in mine[key])
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes[key])

    moving = [key for key, (source, to) in routes.items() if any(rank != source for rank in to)]
    for bucket in in_buckets(
        moving,
        kind=lambda _: None,
        nbytes=lambda key: dtype.itemsize * sum(map(math.prod, shapes[key])),
        most=BUCKET_BYTES,
    ):
        parts = {key: parts_of(key) for key in bucket}
        owners = [routes[key][0] for key in bucket for _ in shapes[key]]
        world.broadcast([part for key in bucket for part in parts[key]], owners, wire)
        for key in bucket:
            source, to = routes[key]
            if source != world.rank and world.rank in to:
                everything[key] = parts[key]
    return everything


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors in buckets of one dtype and device."""
    return in_buckets(tensors, lambda t: (t.dtype, t.device), lambda t: t.nbytes, BUCKET_BYTES)


def _owned_buckets(items: Iterable[Owned]) -> list[list[Owned]]:
    """Tensors with their owners in buckets of one dtype and device."""
    return in_buckets(
        items, lambda o: (o[0].dtype, o[0].device), lambda o: o[0].nbytes, BUCKET_BYTES
    )

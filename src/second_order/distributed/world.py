"""The ranks that an optimizer works with, their process groups and collectives.

The methods of :class:`World` pack the tensors of all layers into flat buffers of up to
64 MiB, so the number of collectives depends on bytes and not on the number of layers.
One torch collective sends each buffer:

    all_reduce           sums and maxima that every rank receives
    all_to_all_single    sums that one rank receives (``World.reduce``), and tensors
                         that a rank sends to others (``World.broadcast``, in which each
                         tensor has an owner)
    broadcast            tensors of the first rank (``World.broadcast_from_first``)

In an all-to-all of P ranks, the owner of a tensor receives P - 1 addends of its sum, or
sends the tensor to P - 1 ranks. If one of 8 ranks owns the whole buffer, it receives or
sends 7 buffers. An all-reduce costs each rank about 2 buffers, so an uneven buffer is
all-reduced instead. With one rank, all methods return immediately.

Collectives of one group must start in the same order on all of its ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.errors import SecondOrderError

__all__ = [
    "BUCKET_BYTES",
    "Parts",
    "PendingReduction",
    "Route",
    "Shapes",
    "World",
    "count_elements",
    "flatten",
    "send_tensors",
    "split_into_buckets",
    "sum_in_order",
    "translate_backend_errors",
    "unflatten_into",
]

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
Parts: TypeAlias = tuple[Tensor, ...]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]

BUCKET_BYTES = 64 * 2**20
EXIT_SECONDS = 0.1
CONTROL = ("control",)  # key of the control group among the shared groups

# All optimizers share these groups: an NCCL group takes hundreds of megabytes.
_shared: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[Any, ...], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


# ------------------------------------------------------------------------------- errors

# If a connection fails, gloo or NCCL may raise a RuntimeError with one of these words.
BACKEND_WORDS = ("gloo", "nccl", "pair closure")


@contextlib.contextmanager
def translate_backend_errors() -> Iterator[None]:
    """Translate errors of a communication backend, and name the likely cause.

    Raises:
        SecondOrderError: Instead of the backend's error.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error).strip().split("\n", maxsplit=1)[0]
        is_backend_error = any(word in message.lower() for word in BACKEND_WORDS)
        if dist.is_available() and isinstance(error, dist.DistError):
            is_backend_error = True
        # Raise other errors as they are.
        if not is_backend_error or isinstance(error, SecondOrderError):
            raise
        raise SecondOrderError(
            f"Lost contact with the other ranks: one of them exited, raised, or exceeded the "
            f"process-group timeout. See their logs. ({message})"
        ) from error


@cache
def _wait_for_gloo_at_exit() -> None:
    """Let gloo's threads release their tensors before the interpreter exits.

    A gloo thread releases the tensors of a collective after the collective has
    returned, and it needs the GIL to do so. If the interpreter is already finalizing,
    torch aborts the process with "terminate called without an active exception". The
    collectives of FSDP2, which this file does not start, need this too.
    """
    atexit.register(time.sleep, EXIT_SECONDS)


# ------------------------------------------------------------------------------ buckets


class OwnedTensor(NamedTuple):
    """A tensor, and the rank that receives its sum or broadcasts it.

    The owner is None if every rank receives the sum.
    """

    tensor: Tensor
    owner: int | None


def split_into_buckets(
    items: Iterable[T],
    kind: Callable[[T], Hashable],
    nbytes: Callable[[T], int],
    max_bytes: int,
) -> list[list[T]]:
    """Split items into buckets, in the order of the items.

    Args:
        items: What to split.
        kind: Returns the kind of an item. All items of a bucket are of one kind.
        nbytes: Returns the size of an item in bytes.
        max_bytes: Largest size of a bucket. A larger item gets its own bucket.

    Returns:
        The buckets, in the order of their first items.
    """
    # A kind's last bucket stays open until an item would exceed ``max_bytes``.
    buckets: list[list[T]] = []
    open_buckets: dict[Hashable, list[T]] = {}
    filled: dict[Hashable, int] = {}
    for item in items:
        key = kind(item)
        size = nbytes(item)
        if key not in open_buckets or filled[key] + size > max_bytes:
            open_buckets[key] = []
            filled[key] = 0
            buckets.append(open_buckets[key])
        open_buckets[key].append(item)
        filled[key] += size
    return buckets


def count_elements(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements of all tensors together."""
    return sum(tensor.numel() for tensor in tensors)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors into one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def sum_in_order(addends: Tensor) -> Tensor:
    """Sum ``addends``, ``(ranks, n)``, in the order of ranks, at least in float32.

    The first row is overwritten, unless the dtype has a lower precision.
    """
    total = addends[0].to(accumulation_dtype(addends.dtype))
    for row in addends[1:]:
        total += row
    return total


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: for floating-point dtypes, at least float32."""
    if not dtype.is_floating_point:
        return dtype
    return torch.promote_types(dtype, torch.float32)


def unflatten_into(flat: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a flat buffer's segments into tensors: the inverse of :func:`flatten`."""
    segments = flat.split([target.numel() for target in targets])
    for target, segment in zip(targets, segments, strict=True):
        target.copy_(segment.view(target.shape))


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split tensors into buckets of one dtype and device."""
    return split_into_buckets(
        tensors,
        kind=lambda tensor: (tensor.dtype, tensor.device),
        nbytes=lambda tensor: tensor.nbytes,
        max_bytes=BUCKET_BYTES,
    )


def _owned_buckets(
    tensors: Iterable[Tensor], owners: Iterable[int | None]
) -> list[list[OwnedTensor]]:
    """Split tensors with their owners into buckets of one dtype and device.

    Raises:
        ValueError: If tensors and owners differ in number.
    """
    owned_tensors = []
    for tensor, owner in zip(tensors, owners, strict=True):
        owned_tensors.append(OwnedTensor(tensor, owner))
    return split_into_buckets(
        owned_tensors,
        kind=lambda owned: (owned.tensor.dtype, owned.tensor.device),
        nbytes=lambda owned: owned.tensor.nbytes,
        max_bytes=BUCKET_BYTES,
    )


class PendingCollective(NamedTuple):
    """A collective in progress, and the function that copies its result to tensors."""

    work: dist.Work
    finish: Callable[[], None]


@dataclass
class PendingReduction:
    """The collectives of a reduction, in the order in which they were started."""

    collectives: list[PendingCollective] = field(default_factory=list)

    @translate_backend_errors()
    def wait(self) -> None:
        """Wait for all collectives, and write the results into the tensors."""
        while self.collectives:
            work, finish = self.collectives.pop(0)
            work.wait()
            finish()


# ---------------------------------------------------------------------------- the ranks


class World:
    """The ranks of a process group, or this process alone.

    Args:
        group: The process group; None for the default group, or for this process if no
            group is initialized.
        alone: Whether to ignore process groups, so that this process is the only rank.

    Attributes:
        group: The process group, or None for one process.
        rank: Rank of this process in the group.
        size: Number of ranks.
        backends: The backend that sends the tensors of each type of device, for example
            ``{"cpu": "gloo", "cuda": "nccl"}``; empty without a process group.

    Raises:
        TypeError: If ``group`` is not a process group.
        ValueError: If this process is not a member of ``group``.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, alone: bool = False
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        # Without a process group, this process is alone.
        self.rank = 0
        self.size = 1
        self.backends: dict[str, str] = {}
        if alone or not dist.is_available():
            return
        # A rank outside of a group has a placeholder for it, in which its rank is -1.
        is_outside = cast(Any, group) is dist.GroupMember.NON_GROUP_MEMBER
        if not (group is None or is_outside or isinstance(group, dist.ProcessGroup)):
            raise TypeError(
                f"process_group={group!r} is not a torch.distributed.ProcessGroup; pass what "
                f"torch.distributed.new_group() returns, or None for the default group"
            )

        # Take the rank and the size from the group, which must include this process.
        if not dist.is_initialized():
            return
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(
                "this process is not a member of process_group=; pass a group that includes it"
            )
        for part in str(dist.get_backend_config(self.group)).split(","):
            device_type, _, backend = part.partition(":")
            self.backends[device_type] = backend
        if "gloo" in self.backends.values():
            _wait_for_gloo_at_exit()

    @classmethod
    def alone(cls) -> World:
        """Return the world of this process alone."""
        return World(alone=True)

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of this world, as the default group numbers them."""
        if self.group is None:
            has_default_group = dist.is_available() and dist.is_initialized()
            return [dist.get_rank()] if has_default_group else [0]
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
        """Name of the backend, or "none" without a process group.

        It is "undefined" if ``init_process_group()`` chose one for each type of device.
        """
        return "none" if self.group is None else str(dist.get_backend(self.group))

    # --------------------------------------------------------------------------- groups

    @property
    def timeout(self) -> timedelta | None:
        """The timeout of the group's collectives, or None if it is unknown."""
        # torch lacks a public function for timeouts. Backends may have different ones.
        group: Any = self.group
        timeouts: list[timedelta] = []
        with contextlib.suppress(AttributeError, RuntimeError):
            for device_type in self.backends:
                device = torch.device(device_type)
                timeouts.append(group._get_backend(device).options._timeout)
            return min(timeouts, default=None)
        return None

    @translate_backend_errors()
    def equalize_group_counts(self) -> None:
        """Make unused groups until all ranks are in equally many groups. Collective.

        With ``use_local_synchronization``, only the members of a new group call
        ``new_group``. torch then derives the group's name from the number of groups
        that the rank is in. After you have made a group of ranks 0 and 1, these are in
        two groups and rank 2 is in one. For a new group of all three, ranks 0 and 2
        would wait for groups of different names until the timeout.
        """
        local_count = len(dist.distributed_c10d._world.pg_names)
        counts = self.all_gather_object(local_count)
        for _ in range(max(counts) - local_count):
            dist.new_group(
                [dist.get_rank()], backend="gloo", use_local_synchronization=True
            )

    @translate_backend_errors()
    def subgroup(
        self,
        ranks: Sequence[int],
        *,
        needs_group: bool = False,
        timeout: timedelta | None = None,
    ) -> World:
        """Return the world of some of these ranks. All of its members must call this.

        Members of several subgroups must make these calls in the same order. Groups are
        made once and reused. If ``ranks`` are all ranks, this world is returned.

        Args:
            ranks: The ranks of the subgroup, as this world numbers them.
            needs_group: Whether a single rank gets a process group too, for example if
                it is the only rank that trains, next to helper ranks.
            timeout: Timeout of the collectives of the subgroup; None for that of this
                world. It does not apply if this world itself is returned.
        """
        if self.group is None:
            return self
        if len(ranks) == self.size:
            return self
        if len(ranks) == 1 and not needs_group:
            return World.alone()
        members = tuple(self.global_ranks[rank] for rank in ranks)

        # All optimizers share the group of these members with this timeout.
        groups = self._shared_groups
        key = (members, timeout)
        if key not in groups:
            groups[key] = self._new_group(members, timeout=timeout)
        return World(groups[key])

    @translate_backend_errors()
    def control_world(self) -> World:
        """Return the same ranks in the control group, a gloo group for small messages.

        Its messages do not synchronize with the device, and are not queued behind the
        collectives of this group. All control messages share one control group. The
        first call is a collective. With torch's fake backend, this process is alone.
        """
        if self.group is None:
            return self
        if self.backend == "fake":  # torch's test backend, which has no other processes
            return World.alone()
        groups = self._shared_groups
        if CONTROL not in groups:
            self.equalize_group_counts()
            groups[CONTROL] = self._new_group(self.global_ranks, backend="gloo")
        return World(groups[CONTROL])

    @translate_backend_errors()
    def with_new_group(self) -> World:
        """Return the same ranks in a new group.

        Its collectives and those of this group may start in any order, for example
        while backward runs.
        """
        return self if self.group is None else World(self._new_group(self.global_ranks))

    def on_cpu(self) -> World:
        """Return the same ranks in a group that sends CPU tensors.

        This is this group, or the control group if this group cannot send them.
        """
        if self.group is None or "cpu" in self.backends:
            return self
        return self.control_world()

    @property
    def _shared_groups(self) -> dict[tuple[Any, ...], dist.ProcessGroup]:
        """The groups of these ranks, by members and timeouts or by ``CONTROL``."""
        assert self.group is not None
        return _shared.setdefault(self.group, {})

    def _new_group(
        self,
        members: Sequence[int],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> dist.ProcessGroup:
        """Make a group of some global ranks. Only these ranks call this.

        They must be in equally many groups, so each optimizer calls
        :meth:`equalize_group_counts` when it is made. The default backend and timeout
        are those of this world.
        """
        group = dist.new_group(
            list(members),
            timeout=timeout or self.timeout,
            backend=backend or dist.get_backend_config(self.group),
            use_local_synchronization=True,
        )
        return cast(dist.ProcessGroup, group)

    # ---------------------------------------------------------------------- collectives

    @translate_backend_errors()
    def all_reduce(
        self,
        tensors: Iterable[Tensor],
        op: Any = dist.ReduceOp.SUM,
        dtype: torch.dtype | None = None,
    ) -> PendingReduction:
        """Start to all-reduce tensors in place, in buckets.

        Args:
            tensors: The tensors, with the same shapes, dtypes and order on every rank.
            op: The reduction; the sum by default.
            dtype: The communication dtype, if it is not that of the tensors.
        """
        pending = PendingReduction()
        if self.size == 1:
            return pending
        for bucket in _buckets(tensors):
            flat = self._stage(flatten(bucket), dtype)
            work = self._all_reduce(flat, op)
            finish = partial(unflatten_into, flat, bucket)
            pending.collectives.append(PendingCollective(work, finish))
        return pending

    def all_reduce_max(self, tensors: Iterable[Tensor]) -> PendingReduction:
        """Start to replace each element by its maximum over the ranks."""
        return self.all_reduce(tensors, dist.ReduceOp.MAX)

    @translate_backend_errors()
    def reduce(
        self,
        tensors: Iterable[Tensor],
        owners: Iterable[int | None],
        dtype: torch.dtype | None = None,
    ) -> PendingReduction:
        """Start to sum tensors over the ranks in place, each on its owner only.

        This sends half as much as an all-reduce. Owners add in the order of ranks,
        except in buckets that are all-reduced.

        Args:
            tensors: The tensors, with the same shapes, dtypes and order on every rank.
            owners: For each tensor, the rank that receives the sum, or None if every
                rank does. On the other ranks, the tensor keeps its values.
            dtype: The communication dtype, if it is not that of the tensors.

        Raises:
            ValueError: If tensors and owners differ in number, on several ranks.
        """
        pending = PendingReduction()
        if self.size > 1:
            for bucket in _owned_buckets(tensors, owners):
                pending.collectives.append(self._reduce_bucket(bucket, dtype))
        return pending

    def _reduce_bucket(
        self, bucket: Sequence[OwnedTensor], dtype: torch.dtype | None
    ) -> PendingCollective:
        """Start to sum a bucket, with the collective that sends less."""
        # The tensors whose sums each rank receives.
        by_receiver: list[list[Tensor]] = [[] for _ in range(self.size)]
        for tensor, owner in bucket:
            if owner is None:
                for part in by_receiver:
                    part.append(tensor)
            else:
                by_receiver[owner].append(tensor)

        # If one rank would receive too much, an all-reduce sends less.
        sizes = [count_elements(part) for part in by_receiver]
        total = count_elements(tensor for tensor, _ in bucket)
        if self._is_uneven(sizes, total):
            return self._reduce_by_all_reduce(bucket, dtype)
        return self._reduce_by_all_to_all(by_receiver, sizes, dtype)

    def _reduce_by_all_reduce(
        self, bucket: Sequence[OwnedTensor], dtype: torch.dtype | None
    ) -> PendingCollective:
        """Start to all-reduce a bucket; copy this rank's own sums at the end."""
        # As in an all-to-all, addends are rounded to the communication dtype, and added
        # at least in float32.
        staged = self._stage(flatten([tensor for tensor, _ in bucket]), dtype)
        whole = staged.to(accumulation_dtype(staged.dtype))

        def copy_own_sums() -> None:
            segments = whole.split([tensor.numel() for tensor, _ in bucket])
            for (tensor, owner), segment in zip(bucket, segments, strict=True):
                if owner is None or owner == self.rank:
                    tensor.copy_(segment.view(tensor.shape))

        return PendingCollective(self._all_reduce(whole), copy_own_sums)

    def _reduce_by_all_to_all(
        self,
        by_receiver: Sequence[Sequence[Tensor]],
        sizes: list[int],
        dtype: torch.dtype | None,
    ) -> PendingCollective:
        """Start to send each rank its addends; add the received ones at the end.

        Args:
            by_receiver: The tensors whose sums each rank receives.
            sizes: The number of elements of each receiver's tensors.
            dtype: The communication dtype, if it is not that of the tensors.
        """
        tensors = [tensor for part in by_receiver for tensor in part]
        flat = self._stage(flatten(tensors), dtype)
        own_size = sizes[self.rank]
        addends = flat.new_empty(self.size, own_size)
        work = self._all_to_all(
            received=addends.view(-1),
            sent=flat,
            received_sizes=[own_size] * self.size,
            sent_sizes=sizes,
        )

        def add() -> None:
            unflatten_into(sum_in_order(addends), by_receiver[self.rank])

        return PendingCollective(work, add)

    @translate_backend_errors()
    def broadcast(
        self,
        tensors: Iterable[Tensor],
        owners: Iterable[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Broadcast each tensor from its owner to every rank, in place, in buckets.

        Args:
            tensors: The tensors, with the same shapes, dtypes and order on every rank.
            owners: The rank that sends each tensor. ``dist.broadcast`` has only one
                sender per call.
            dtype: The communication dtype, if it is not that of the tensors. If it has
                a lower precision, the owner keeps the unrounded values.

        Raises:
            ValueError: If tensors and owners differ in number, on several ranks.
        """
        if self.size == 1:
            return
        for bucket in _owned_buckets(tensors, owners):
            by_sender: list[list[Tensor]] = [[] for _ in range(self.size)]
            for tensor, owner in bucket:
                assert owner is not None
                by_sender[owner].append(tensor)
            sizes = [count_elements(part) for part in by_sender]

            # Send the local tensors, and copy what arrives into the others.
            own = bucket[0].tensor.new_empty(0)
            if by_sender[self.rank]:
                own = flatten(by_sender[self.rank])
            for rank, flat in enumerate(self._gather(own, sizes, dtype)):
                if rank != self.rank:
                    unflatten_into(flat, by_sender[rank])

    def _gather(
        self, own: Tensor, sizes: Sequence[int], dtype: torch.dtype | None
    ) -> Sequence[Tensor]:
        """All-gather flat tensors: send ``own`` to all other ranks, and receive theirs.

        ``sizes`` are their lengths by rank. Do not use this rank's entry of the result.
        ``dist.all_gather`` would need equal lengths.
        """
        total = sum(sizes)
        if total == 0:
            return [own] * self.size
        if not self._is_uneven(sizes, total):
            sent = [own] * self.size
            sent[self.rank] = own[:0]
            received_sizes = list(sizes)
            received_sizes[self.rank] = 0
            return self.all_to_all(sent, received_sizes, dtype)

        # All-reduce the whole buffer. Each rank contributes its own segment, and zeros
        # elsewhere. The zeros are negative, because -0.0 + x is x bit for bit, whereas
        # 0.0 + -0.0 is 0.0.
        staged = self._stage(own, dtype)
        whole = staged.new_full((total,), -0.0)
        whole.split(list(sizes))[self.rank].copy_(staged)
        self._all_reduce(whole).wait()
        return list(whole.to(own.device, own.dtype).split(list(sizes)))

    @translate_backend_errors()
    def broadcast_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors of any dtypes from the first rank, in place, in buckets."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            # Send bytes, because gloo has no float8 and no 16-bit integers.
            flat = self._stage(flatten(bucket).view(torch.uint8))
            dist.broadcast(flat, group=self.group, group_src=0)
            unflatten_into(flat.view(bucket[0].dtype), bucket)

    @translate_backend_errors()
    def all_to_all(
        self,
        sent: Sequence[Tensor],
        received_sizes: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Send a flat tensor to each rank, and receive one from each.

        Args:
            sent: The tensor for each rank, of one dtype and device.
            received_sizes: The number of elements that each rank sends to this one.
            dtype: The communication dtype, if it is not that of the tensors.

        Returns:
            The received tensors, by rank.
        """
        if self.size == 1:
            return list(sent)

        # Send all tensors in one buffer.
        flat = torch.cat(list(sent))
        staged = self._stage(flat, dtype)
        received = staged.new_empty(sum(received_sizes))
        work = self._all_to_all(
            received=received,
            sent=staged,
            received_sizes=list(received_sizes),
            sent_sizes=[len(tensor) for tensor in sent],
        )
        work.wait()
        return list(received.to(flat.device, flat.dtype).split(list(received_sizes)))

    def _is_uneven(self, sizes: Sequence[int], total: int) -> bool:
        """Return whether a rank would move more than two buffers in an all-to-all.

        Two buffers are about what each rank sends in an all-reduce. With 8 ranks, a
        buffer is uneven if one rank owns more than a quarter of it.
        """
        return self.size * max(sizes) > 2 * total

    def _all_reduce(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start to all-reduce a flat tensor in place."""
        return dist.all_reduce(flat, op, group=self.group, async_op=True)

    def _all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
    ) -> Any:
        """Start to exchange segments of a flat tensor with every rank."""
        return dist.all_to_all_single(
            received, sent, received_sizes, sent_sizes, group=self.group, async_op=True
        )

    def uses_gloo(self, device: torch.device) -> bool:
        """Whether gloo sends the tensors of a device."""
        return self.backends.get(device.type, self.backend) == "gloo"

    def _stage(self, flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Move a buffer to a device and dtype that the backend can send.

        gloo sends from the CPU, and adds in the dtype that it sends. It therefore sends
        half-precision tensors as float32, unless the caller chose a dtype.
        """
        uses_gloo = self.uses_gloo(flat.device)
        if dtype is None:
            dtype = flat.dtype
            if uses_gloo and dtype in (torch.bfloat16, torch.float16):
                dtype = torch.float32
        if uses_gloo:
            return flat.to("cpu", dtype)
        return flat.to(dtype)

    # ------------------------------------------------------------------------ agreement

    def all_agree(self, vote: bool, device: torch.device) -> bool:
        """Return whether ``vote`` is True on all ranks. Collective."""
        noes = torch.tensor([float(not vote)], dtype=torch.float32, device=device)
        self.all_reduce([noes]).wait()
        return not bool(noes)

    @translate_backend_errors()
    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather a small object from every rank by pickling it.

        Return the objects by rank.
        """
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def all_equal(self, number: int) -> bool:
        """Return whether all ranks have the same 64-bit integer, by sending 16 bytes.

        Call this on a world for CPU tensors: ``on_cpu()`` or ``control_world()``.
        """
        if self.size == 1:
            return True
        # The largest complement is the complement of the smallest number.
        both = torch.tensor([number, ~number], dtype=torch.int64, device="cpu")
        self.all_reduce_max([both]).wait()
        return int(both[0]) == ~int(both[1])


class Route(NamedTuple):
    """The rank that sends an item, and the ranks that receive it."""

    source: int
    destinations: Sequence[int]


def send_tensors(
    world: World,
    shapes: Mapping[Key, Shapes],
    routes: Mapping[Key, Route],
    local: Mapping[Key, Parts],
    dtype: torch.dtype,
    device: torch.device,
    communication_dtype: torch.dtype | None = None,
) -> dict[Key, Parts]:
    """Send tuples of tensors from sources to destinations, in buckets. Collective.

    Every rank receives every item, and drops those that are not for it.

    Args:
        world: The ranks.
        shapes: The shapes of each item's tensors, the same on every rank.
        routes: The source and the destinations of each item, the same on every rank.
        local: The items of this rank, on ``device``. If a source lacks an item, it
            sends zeros, because the other ranks wait for a message nonetheless.
        dtype: Dtype of the tensors that arrive.
        device: Device of the tensors that arrive.
        communication_dtype: The dtype in messages, if it is not ``dtype``.

    Returns:
        All items that this rank has or received.
    """
    # Find the items that have to move.
    items = dict(local)
    moving: list[Key] = []
    for key, (source, destinations) in routes.items():
        if any(rank != source for rank in destinations):
            moving.append(key)

    def make_buffers(key: Key) -> Parts:
        """Return what this rank sends, or the memory for what it receives."""
        if routes[key].source == world.rank and key in local:
            return tuple(part.to(dtype) for part in local[key])
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) for shape in shapes[key]
        )

    # Broadcast one bucket at a time. A rank also receives the items that it drops, so
    # all buffers together would take as much memory as the items of all ranks.
    buckets = split_into_buckets(
        moving,
        kind=lambda _: None,
        nbytes=lambda key: dtype.itemsize * sum(map(math.prod, shapes[key])),
        max_bytes=BUCKET_BYTES,
    )
    for bucket in buckets:
        # Make the buffers, list them with their owners, and send them.
        buffers = {key: make_buffers(key) for key in bucket}
        tensors: list[Tensor] = []
        owners: list[int] = []
        for key in bucket:
            tensors += buffers[key]
            owners += [routes[key].source] * len(buffers[key])
        world.broadcast(tensors, owners, communication_dtype)

        # Keep the items that are for this rank.
        for key in bucket:
            source, destinations = routes[key]
            if source != world.rank and world.rank in destinations:
                items[key] = buffers[key]
    return items

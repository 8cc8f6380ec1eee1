"""The ranks that an optimizer works with, their process groups, and the collectives that it uses.

Tensors of all layers travel in flat buffers, so the number of collectives does not grow with the
number of layers.

    all_reduce           sums and maxima for every rank
    all_to_all_single    sums for one owner each, and tensors that a rank sends to others
    broadcast            the first rank's tensors

If most of a buffer belongs to a few ranks, a direct exchange would make these send or receive P
times their part. Such buffers are all-reduced. With one rank, all methods return immediately.
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
CONTROL = ("control",)

# One set of groups serves all optimizers: an NCCL group costs hundreds of megabytes.
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


# ---------------------------------------------------------------------------------------- errors

# Gloo and NCCL raise plain RuntimeErrors for some failures of connections.
BACKENDS = "gloo", "nccl", "pair closure"


@contextlib.contextmanager
def translate_backend_errors() -> Iterator[None]:
    """Turn a backend's errors into SecondOrderErrors that name the likely cause.

    Raises:
        SecondOrderError: Instead of the backend's own error.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error).strip().split("\n", maxsplit=1)[0]
        of_backend = dist.is_available() and isinstance(error, dist.DistError)
        of_backend = of_backend or any(word in message.lower() for word in BACKENDS)
        if not of_backend or isinstance(error, SecondOrderError):
            raise
        raise SecondOrderError(
            f"Lost contact with the other ranks: one of them exited, raised, or exceeded the "
            f"process-group timeout. See their logs. ({message})"
        ) from error


@cache
def _wait_for_gloo_at_exit() -> None:
    """Give gloo's threads a moment to release tensors when the script has ended.

    A gloo thread releases the tensors of a collective after the collective has returned, and needs
    the GIL to do so. If the interpreter is already finalizing, torch aborts the process:
    "terminate called without an active exception". FSDP2's collectives use such threads as well.
    """
    atexit.register(time.sleep, EXIT_SECONDS)


# --------------------------------------------------------------------------------------- buckets


class OwnedTensor(NamedTuple):
    """A tensor and the rank that owns it, or None if every rank does."""

    tensor: Tensor
    owner: int | None = None


def split_into_buckets(
    items: Iterable[T], kind: Callable[[T], Hashable], nbytes: Callable[[T], int], most: int
) -> list[list[T]]:
    """Split items into buckets of one kind, each of up to ``most`` bytes or one item.

    Buckets come in the order of the first item of each.
    """
    buckets: list[list[T]] = []
    open_bucket: dict[Hashable, list[T]] = {}
    filled: dict[Hashable, int] = {}
    for item in items:
        key = kind(item)
        size = nbytes(item)
        if key not in open_bucket or filled[key] + size > most:
            open_bucket[key] = []
            filled[key] = 0
            buckets.append(open_bucket[key])
        open_bucket[key].append(item)
        filled[key] += size
    return buckets


def count_elements(tensors: Iterable[Tensor]) -> int:
    """Number of elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate flattened tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def sum_in_order(addends: Tensor) -> Tensor:
    """Sum ``(ranks, n)`` over the ranks, in the order of ranks and at least in float32."""
    total = addends[0].to(accumulation_dtype(addends.dtype))
    for row in addends[1:]:
        total += row
    return total


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are summed: at least float32 for floating point."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def unflatten_into(flat: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a flat buffer back to the tensors that were concatenated in it."""
    pieces = flat.split([target.numel() for target in targets])
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece.view(target.shape))


def _buckets(tensors: Iterable[OwnedTensor]) -> list[list[OwnedTensor]]:
    """Tensors with their owners, in buckets of one dtype and device."""
    return split_into_buckets(
        tensors,
        kind=lambda owned: (owned.tensor.dtype, owned.tensor.device),
        nbytes=lambda owned: owned.tensor.nbytes,
        most=BUCKET_BYTES,
    )


@dataclass
class PendingReduction:
    """Messages in progress, each with a function to call after it."""

    messages: list[tuple[Any, Callable[[], None]]] = field(default_factory=list)

    @translate_backend_errors()
    def wait(self) -> None:
        """Wait for all messages, and write what they brought."""
        while self.messages:
            work, finish = self.messages.pop(0)
            work.wait()
            finish()


# --------------------------------------------------------------------------------------- the ranks


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
            _wait_for_gloo_at_exit()

    @classmethod
    def alone(cls) -> World:
        """Make the world of this process alone."""
        return World(alone=True)

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

    # ---------------------------------------------------------------------------------- groups

    @property
    def timeout(self) -> timedelta | None:
        """The timeout of the group's collectives, or None if it is unknown."""
        # "cpu:gloo,cuda:nccl"
        config = str(dist.get_backend_config(self.group))
        devices = [torch.device(part.partition(":")[0]) for part in config.split(",")]
        # Torch has no public way to read a timeout: each device's backend stores its own.
        group: Any = self.group
        with contextlib.suppress(AttributeError, RuntimeError):
            timeouts: list[timedelta]
            timeouts = [group._get_backend(device).options._timeout for device in devices]
            return min(timeouts)
        return None

    @translate_backend_errors()
    def equalize_group_counts(self) -> None:
        """Make unused groups until every rank is in the same number of groups; a collective.

        Torch derives the name of a group that only its members make from the number of groups that
        a rank is in. If the user made groups of some ranks, these numbers differ, and
        ``new_group`` would wait for a group of another name until the timeout.
        """
        here = len(dist.distributed_c10d._world.pg_names)
        counts = self.all_gather_object(here)
        for _ in range(max(counts) - here):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    @translate_backend_errors()
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
        members = tuple(self.global_ranks[rank] for rank in ranks)
        groups = self._shared_groups
        key = (members, timeout)
        if key not in groups:
            groups[key] = self._new_group(members, timeout=timeout)
        return World(groups[key])

    @translate_backend_errors()
    def control_world(self) -> World:
        """The same ranks in a gloo group of their own, for small control messages.

        The device is not synchronized for them, and no other collective comes between them. The
        first call is a collective.
        """
        if self.group is None:
            return self
        if self.backend == "fake":  # there is no other process
            return World.alone()
        groups = self._shared_groups
        if CONTROL not in groups:
            _wait_for_gloo_at_exit()
            self.equalize_group_counts()
            groups[CONTROL] = self._new_group(self.global_ranks, backend="gloo")
        return World(groups[CONTROL])

    @translate_backend_errors()
    def with_new_group(self) -> World:
        """The same ranks in a new group, for collectives whose order no other sender knows."""
        return self if self.group is None else World(self._new_group(self.global_ranks))

    def on_cpu(self) -> World:
        """The world of the same ranks for CPU tensors."""
        return self.control_world() if self.backend == "nccl" else self

    @property
    def _shared_groups(self) -> dict[tuple[Any, ...], dist.ProcessGroup]:
        """The groups of some of these ranks that have been made."""
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

        Backend and timeout are those of the ranks' own group unless they are given.
        """
        made = dist.new_group(
            list(members),
            timeout=timeout or self.timeout,
            backend=backend or dist.get_backend_config(self.group),
            use_local_synchronization=True,
        )
        return cast(dist.ProcessGroup, made)

    # ------------------------------------------------------------------------------ collectives

    @translate_backend_errors()
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
        if self.size == 1:
            return pending
        for bucket in _buckets(map(OwnedTensor, tensors)):
            targets = [tensor for tensor, _ in bucket]
            flat = self._stage(flatten(targets), dtype)
            work = self._all_reduce(flat, op)
            pending.messages.append((work, partial(unflatten_into, flat, targets)))
        return pending

    def all_reduce_max(self, tensors: Iterable[Tensor]) -> PendingReduction:
        """Start to take each element's maximum over the ranks, as :meth:`all_reduce`."""
        return self.all_reduce(tensors, dist.ReduceOp.MAX)

    @translate_backend_errors()
    def reduce(
        self,
        tensors: Iterable[Tensor],
        owners: Iterable[int | None],
        dtype: torch.dtype | None = None,
    ) -> PendingReduction:
        """Start to sum tensors over the ranks, each for its owner: half of an all-reduce's traffic.

        If an owner is None, every rank gets the sum. Tensors of other owners stay as they are. All
        owners add in the order of ranks, unless the sum is an all-reduce. Otherwise as
        :meth:`all_reduce`.
        """
        pending = PendingReduction()
        if self.size > 1:
            for bucket in _buckets(map(OwnedTensor, tensors, owners)):
                pending.messages.append(self._reduce_bucket(bucket, dtype))
        return pending

    def _reduce_bucket(
        self, bucket: Sequence[OwnedTensor], dtype: torch.dtype | None
    ) -> tuple[Any, Callable[[], None]]:
        """Start to sum a bucket. Returns the message, and a function to call after it."""
        parts: list[list[Tensor]] = [[] for _ in range(self.size)]
        for tensor, owner in bucket:
            for rank in range(self.size) if owner is None else [owner]:
                parts[rank].append(tensor)
        sizes = [count_elements(part) for part in parts]
        total = count_elements(tensor for tensor, _ in bucket)

        if self._is_uneven(sizes, total):
            staged = self._stage(flatten([tensor for tensor, _ in bucket]), dtype)
            whole = staged.to(accumulation_dtype(staged.dtype))

            def take_own_sums() -> None:
                pieces = whole.split([tensor.numel() for tensor, _ in bucket])
                for (tensor, owner), piece in zip(bucket, pieces, strict=True):
                    if owner is None or owner == self.rank:
                        tensor.copy_(piece.view(tensor.shape))

            return self._all_reduce(whole), take_own_sums

        flat = self._stage(flatten([tensor for part in parts for tensor in part]), dtype)
        addends = flat.new_empty(self.size, sizes[self.rank])
        arriving = [sizes[self.rank]] * self.size
        work = self._all_to_all(addends.view(-1), flat, arriving, sizes)
        return work, lambda: unflatten_into(sum_in_order(addends), parts[self.rank])

    @translate_backend_errors()
    def broadcast(
        self,
        tensors: Iterable[Tensor],
        owners: Iterable[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Give every rank the value that each tensor has on its owner, in place, in buckets.

        Tensors have the same shapes and dtypes in the same order on every rank. ``dtype`` is the
        communication dtype, if it is not theirs.
        """
        if self.size == 1:
            return
        for bucket in _buckets(map(OwnedTensor, tensors, owners)):
            parts: list[list[Tensor]] = [[] for _ in range(self.size)]
            for tensor, owner in bucket:
                assert owner is not None
                parts[owner].append(tensor)
            sizes = [count_elements(part) for part in parts]
            own = bucket[0].tensor.new_empty(0)
            if parts[self.rank]:
                own = flatten(parts[self.rank])
            for rank, flat in enumerate(self._gather(own, sizes, dtype)):
                if rank != self.rank:
                    unflatten_into(flat, parts[rank])

    def _gather(
        self, own: Tensor, sizes: Sequence[int], dtype: torch.dtype | None
    ) -> Sequence[Tensor]:
        """Every rank's flat tensor, by rank; ``sizes`` are their lengths."""
        total = sum(sizes)
        if total == 0:
            return [own] * self.size
        if not self._is_uneven(sizes, total):
            parts = [own] * self.size
            parts[self.rank] = own[:0]
            arriving = list(sizes)
            arriving[self.rank] = 0
            return self.all_to_all(parts, arriving, dtype)
        # -0.0 + x is x bit for bit, whereas 0.0 + -0.0 would be 0.0.
        staged = self._stage(own, dtype)
        whole = staged.new_full((total,), -0.0)
        whole.split(list(sizes))[self.rank].copy_(staged)
        self._all_reduce(whole).wait()
        return list(whole.to(own.device, own.dtype).split(list(sizes)))

    @translate_backend_errors()
    def broadcast_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values, in place, in buckets."""
        if self.size == 1:
            return
        for bucket in _buckets(map(OwnedTensor, tensors)):
            targets = [tensor for tensor, _ in bucket]
            flat = self._stage(flatten(targets))
            dist.broadcast(flat, group=self.group, group_src=0)
            unflatten_into(flat, targets)

    @translate_backend_errors()
    def all_to_all(
        self, parts: Sequence[Tensor], sizes: Iterable[int], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Send each rank its flat part, and receive one of so many elements from each, by rank."""
        if self.size == 1:
            return list(parts)
        arriving = list(sizes)
        leaving = [len(part) for part in parts]
        flat = torch.cat(list(parts))
        staged = self._stage(flat, dtype)
        received = staged.new_empty(sum(arriving))
        self._all_to_all(received, staged, arriving, leaving).wait()
        return list(received.to(flat.device, flat.dtype).split(arriving))

    def _is_uneven(self, sizes: Sequence[int], total: int) -> bool:
        """Whether a rank would send or receive more than twice the whole buffer."""
        return self.size * max(sizes) > 2 * total

    def _all_reduce(self, flat: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start to all-reduce a flat tensor in place."""
        return dist.all_reduce(flat, op, group=self.group, async_op=True)

    def _all_to_all(
        self, received: Tensor, sent: Tensor, arriving: list[int], leaving: list[int]
    ) -> Any:
        """Start to send consecutive parts of a flat tensor to the ranks, and to receive others."""
        return dist.all_to_all_single(
            received, sent, arriving, leaving, group=self.group, async_op=True
        )

    def _stage(self, flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer in a form that the backend can send."""
        if self.backend != "gloo":
            return flat if dtype is None else flat.to(dtype)
        if dtype is None:
            half = flat.dtype in (torch.bfloat16, torch.float16)
            dtype = torch.float32 if half else flat.dtype
        return flat.to("cpu", dtype)

    # -------------------------------------------------------------------------------- agreement

    def all_agree(self, mine: bool, device: torch.device) -> bool:
        """Whether ``mine`` is True on all ranks; a collective."""
        noes = torch.tensor([float(not mine)], dtype=torch.float32, device=device)
        self.all_reduce([noes]).wait()
        return not bool(noes)

    @translate_backend_errors()
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value of a small object that can be pickled, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def all_equal(self, word: int) -> bool:
        """Whether all ranks have the same 64-bit integer; an all-reduce of 16 bytes."""
        if self.size == 1:
            return True
        # The greatest word, and the greatest complement, which is that of the least word.
        both = torch.tensor([word, ~word], dtype=torch.int64, device="cpu")
        self.all_reduce_max([both]).wait()
        return int(both[0]) == ~int(both[1])


def send_tensors(
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
    for bucket in split_into_buckets(
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

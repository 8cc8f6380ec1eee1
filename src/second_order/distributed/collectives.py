"""A handful of bucketed collectives; with one process they return at once.

Whatever a layer has to say travels in a flat buffer with everybody else's, so that the number of
collectives does not grow with the number of layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.errors import RankMismatchError

__all__ = ["BUCKET_BYTES", "PendingReduction", "World"]

BUCKET_BYTES = 32 * 2**20


class PendingReduction:
    """All-reduces under way; :meth:`wait` puts the sums back where they came from."""

    def __init__(self) -> None:
        self._buckets: list[tuple[Any, Tensor, list[Tensor]]] = []

    def add(self, work: Any, flat: Tensor, targets: list[Tensor]) -> None:
        """Remember one bucket."""
        self._buckets.append((work, flat, targets))

    def wait(self) -> None:
        """Wait for every bucket, in the order in which they were sent."""
        for work, flat, targets in self._buckets:
            work.wait()
            start = 0
            for target in targets:
                stop = start + target.numel()
                target.copy_(flat[start:stop].view(target.shape))
                start = stop
        self._buckets.clear()


class World:
    """The processes an optimizer works with: a process group, or this process alone.

    Deep copies share it; pickling keeps only that there was one, and unpickling finds the default
    group again.

    Args:
        group: A process group; None for the default one if it is initialised.

    Attributes:
        group: The process group; None for one process alone.
        rank: This process in it.
        size: Its number of processes.
        unpickled: Whether this object came out of a pickle.
        moved: Whether it then found itself at another rank or size than it was pickled at.
    """

    unpickled = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._connect(group)

        self.moved = False

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        self._subgroups: dict[tuple[int, ...], World] = {}
        if not (dist.is_available() and dist.is_initialized()):
            self.group: dist.ProcessGroup | None = None
            self.rank, self.size = 0, 1
            return
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group=; pass one it is in")

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"place": (self.rank, self.size)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._connect(None)
        self.moved = state["place"] != (self.rank, self.size)
        self.unpickled = True

    @property
    def backend(self) -> str:
        """Name of the backend in use, "none" with one process alone."""
        return "none" if self.group is None else str(dist.get_backend(self.group))

    def subgroup(self, ranks: Sequence[int]) -> World:
        """The world of some of these ranks, made once; every member must ask in the same order."""
        key = tuple(ranks)
        if len(key) == self.size:
            return self
        if key not in self._subgroups:
            alone = World.__new__(World)
            alone._subgroups, alone.group, alone.moved = {}, None, False
            alone.rank, alone.size = key.index(self.rank), len(key)
            if len(key) > 1:
                assert self.group is not None
                members = tuple(dist.get_global_rank(self.group, r) for r in key)
                alone.group = _new_group(self.group, members)
            self._subgroups[key] = alone
        return self._subgroups[key]

    def _stage(self, flat: Tensor) -> Tensor:
        """The buffer in a form that the backend can send."""
        if self.backend == "gloo":
            dtype = torch.float32 if flat.dtype in (torch.bfloat16, torch.float16) else flat.dtype
            return flat.to("cpu", dtype)
        return flat

    def start_sum(self, tensors: Iterable[Tensor]) -> PendingReduction:
        """All-reduce tensors of any shapes in buckets; in place once the result is waited for.

        Every rank must pass the same shapes and dtypes in the same order.
        """
        pending = PendingReduction()
        if self.size == 1:
            return pending
        for bucket in _buckets(tensors):
            flat = self._stage(torch.cat([tensor.reshape(-1) for tensor in bucket]))
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            pending.add(work, flat, bucket)
        return pending

    def gather(self, flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """All-gather flat tensors of unequal, known sizes in one collective.

        Args:
            flat: This rank's contribution, ``sizes[rank]`` elements.
            sizes: Elements of every rank's.

        Returns:
            Every rank's tensor, in the order of ranks.
        """
        if self.size == 1:
            return [flat]
        longest = max(sizes)
        if longest == 0:
            return [flat.new_empty(0) for _ in sizes]
        sent = self._stage(flat)
        padded = sent.new_zeros(longest)
        padded[: flat.numel()] = sent
        received = padded.new_empty(self.size * longest)
        _all_gather_flat(received, padded, self.group)
        received = received.to(flat.device, flat.dtype)
        return [received[i * longest : i * longest + n] for i, n in enumerate(sizes)]

    def broadcast_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values, in place, in buckets."""
        if self.size == 1:
            return
        assert self.group is not None
        source = dist.get_global_rank(self.group, 0)
        for bucket in _buckets(tensors):
            flat = self._stage(torch.cat([tensor.reshape(-1) for tensor in bucket]))
            dist.broadcast(flat, source, group=self.group)
            start = 0
            for tensor in bucket:
                tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()

    def require_equal(self, description: Sequence[str], what: str) -> None:
        """Raise on every rank if the ranks' descriptions differ, naming the first difference.

        Raises:
            RankMismatchError: With the first line that differs, and the ranks it differs on.
        """
        if self.size == 1:
            return
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, list(description), group=self.group)
        for rank, theirs in enumerate(everyone):
            if theirs == everyone[0]:
                continue
            pairs = zip(everyone[0], theirs, strict=False)
            lines = next(((a, b) for a, b in pairs if a != b), None)
            if lines is None:
                shorter = min(len(everyone[0]), len(theirs))
                lines = (
                    everyone[0][shorter] if len(everyone[0]) > shorter else "nothing more",
                    theirs[shorter] if len(theirs) > shorter else "nothing more",
                )
            raise RankMismatchError(
                f"the ranks built different {what}: rank 0 has [{lines[0]}], rank {rank} has "
                f"[{lines[1]}]; build the same model with the same options on every rank"
            )


# One set of groups serves all optimizers: each of NCCL's costs hundreds of megabytes.
_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup | None]
] = weakref.WeakKeyDictionary()


def _new_group(parent: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of some global ranks, with the backend of ``parent``; made on first demand."""
    made = _groups.setdefault(parent, {})
    if members not in made:
        made[members] = dist.new_group(
            list(members),
            backend=dist.get_backend_config(parent),
            use_local_synchronization=True,
        )
    return made[members]


def _all_gather_flat(output: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> None:
    # torch 2.13 renames the single-tensor collective and deprecates the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, flat, group=group)


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split into runs of one dtype and device of at most ``BUCKET_BYTES`` (or one tensor) each."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets: list[list[Tensor]] = []
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        if key not in open_buckets or filled[key] + tensor.nbytes > BUCKET_BYTES:
            open_buckets[key] = []
            filled[key] = 0
            buckets.append(open_buckets[key])
        open_buckets[key].append(tensor)
        filled[key] += tensor.nbytes
    return buckets

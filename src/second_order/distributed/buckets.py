"""What travels together, and which way: buckets of tensors, and messages cut into equal shares.

A rank that sends one tensor to each of P ranks hands over P copies of it, and one that adds up a
tensor of P ranks receives P addends. Where ranks have about equally much, that is the whole message
on each. Where a few ranks have most of it, as with more ranks than layers, such a rank would need P
times its part. By shares no rank handles more than the whole message (Thakur, Rabenseifner and
Gropp 2005, sections 4.2 and 4.5), in two messages in the place of one:

sum    rank r adds up share r of everything, and sends the pieces on to their owners
copy   rank r gets share r of everything, and all ranks gather the shares

Addends are added in the same order, so that sums are the same bit for bit. Either way a rank has a
message for each of the others. Among many ranks these take longer than their bytes do, and an
all-reduce is faster, which sends everything twice, in 2 log P messages by NCCL's tree: of what is
summed, or of what is copied, to which the others add nothing. Gloo's is a ring of 2 (P - 1).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.distributed.groups import explained
from second_order.errors import SecondOrderError

__all__ = [
    "PendingReduction",
    "Run",
    "elements",
    "flatten",
    "goes_by_shares",
    "goes_by_sum",
    "in_buckets",
    "overlaps",
    "pack_by_dtype",
    "runs_of",
    "scatter",
    "sum_in_order",
    "take_model",
    "wide",
]

T = TypeVar("T")
Run: TypeAlias = tuple[int, int]
"""The first element of a run, and the one after its last."""

SMALL_BYTES = 8 * 2**20
"""What a rank may hold in any case: a second message would cost more than it saves."""

MESSAGE_BYTES = 10**5
"""What a link carries in the time that a message takes besides its bytes: 100 µs at 1 GB/s, and no
more than links between devices do."""


def in_buckets(
    items: Iterable[T], kind: Callable[[T], Hashable], nbytes: Callable[[T], int], most: int
) -> list[list[T]]:
    """Split items into runs of one kind, of up to ``most`` bytes or one item each.

    Runs come in the order of the first item of each.
    """
    found: list[list[T]] = []
    last: dict[Hashable, list[T]] = {}  # by kind, the run that is still open
    filled: dict[Hashable, int] = {}
    for item in items:
        key, size = kind(item), nbytes(item)
        if key not in last or filled[key] + size > most:
            last[key], filled[key] = [], 0
            found.append(last[key])
        last[key].append(item)
        filled[key] += size
    return found


def pack_by_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors in one flat tensor for each dtype, on the device of the first."""
    return [
        torch.cat([t.detach().reshape(-1).to(tensors[0].device) for t in alike])
        for alike in _by_dtype(tensors)
    ]


@torch.no_grad()
def take_model(flats: Sequence[Tensor], train: Sequence[bool], into: Sequence[Tensor]) -> None:
    """Set a helper's parameters and buffers to the workers', and freeze those frozen there.

    ``flats`` are the workers', by :func:`pack_by_dtype`, and ``train`` tells which of them train.

    Raises:
        SecondOrderError: If the workers have others.
    """
    theirs, ours = (sum(t.numel() for t in each) for each in (flats, into))
    if (len(train), theirs) != (len(into), ours):
        raise SecondOrderError(
            f"the workers' model has {len(train)} parameters and buffers of {theirs} numbers, this "
            f"helper's {len(into)} of {ours}: build and change the same model on every rank"
        )
    for flat, alike in zip(flats, _by_dtype(into), strict=True):
        scatter(flat, alike)
    for tensor, trains in zip(into, train, strict=True):
        if tensor.requires_grad != trains:
            tensor.requires_grad_(trains)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    dtypes = dict.fromkeys(t.dtype for t in tensors)
    return [[t for t in tensors if t.dtype == dtype] for dtype in dtypes]


def goes_by_shares(ranks: int, largest: int, whole: int) -> bool:
    """Whether a message is to go by shares; alike on every rank.

    Of ``whole`` bytes, one rank has to send ``largest`` to all, or to add them up.
    """
    return ranks * largest > max(2 * whole, SMALL_BYTES)


def goes_by_sum(ranks: int, whole: int, backend: str) -> bool:
    """Whether a message of so many bytes is to go by an all-reduce, to all ranks; alike on each."""
    rounds = 2 * (ranks - 1).bit_length()
    return backend != "gloo" and 0 < whole < (ranks - 1 - rounds) * MESSAGE_BYTES


def overlaps(total: int, ranks: int, run: Run) -> list[int]:
    """By rank, the number of elements of its share, cut as ``torch.chunk`` does, in a run."""
    (start, stop), size = run, -(-total // ranks)
    sizes = [0] * ranks
    if start < stop:
        for rank in range(start // size, (stop - 1) // size + 1):
            sizes[rank] = min(stop, (rank + 1) * size) - max(start, rank * size)
    return sizes


def sum_in_order(rows: Tensor) -> Tensor:
    """The sum of ``(ranks, n)`` over ranks, in the order of ranks and in float32 at least."""
    total = rows[0].to(wide(rows.dtype))
    for row in rows[1:]:
        total += row
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which addends of a dtype are added: narrow floating-point numbers in a wider."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def runs_of(sizes: Mapping[int, int]) -> dict[int, Run]:
    """The first element of each rank's run of a message, and the one after its last."""
    found, start = {}, 0
    for rank in sorted(sizes):
        found[rank] = start, start + sizes[rank]
        start += sizes[rank]
    return found


def scatter(flat: Tensor, targets: Iterable[Tensor]) -> None:
    """Copy a flat buffer back to its tensors: undo a concatenation."""
    start = 0
    for target in targets:
        stop = start + target.numel()
        target.copy_(flat[start:stop].view(target.shape))
        start = stop


def elements(tensors: Iterable[Tensor]) -> int:
    """Number of elements in all."""
    return sum(tensor.numel() for tensor in tensors)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@dataclass
class PendingReduction:
    """Sums under way, a message a bucket and what is to be done after it."""

    works: list[tuple[Any, Callable[[], Any]]] = field(default_factory=list)

    @explained()
    def wait(self) -> None:
        """Wait for every bucket, in the order in which they were sent, and take the sums in.

        Where that takes a second message, ranks must wait at the same place among their others.
        """
        while self.works:
            work, then = self.works.pop(0)
            work.wait()
            then()

    def future(self) -> torch.futures.Future[Any]:
        """A future that is done when the sums are in place, instead of :meth:`wait`.

        For sums of one message each.
        """
        works, self.works = self.works, []

        def finish(_: Any) -> None:  # on a thread of the backend, which cannot wait for itself
            for _work, then in works:
                then()

        return torch.futures.collect_all([work.get_future() for work, _ in works]).then(finish)

"""Many small tensors in few flat buffers, so that one collective serves all layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from second_order.distributed.groups import explained

__all__ = [
    "PendingReduction",
    "elements",
    "flatten",
    "in_buckets",
    "scatter",
    "sum_in_order",
    "wide",
]

T = TypeVar("T")


def in_buckets(
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


def elements(tensors: Iterable[Tensor]) -> int:
    """Number of elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate flattened tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def scatter(flat: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a flat buffer back to the tensors that were concatenated in it."""
    pieces = flat.split([target.numel() for target in targets])
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece.view(target.shape))


def sum_in_order(rows: Tensor) -> Tensor:
    """Sum ``(ranks, n)`` over the ranks, in the order of ranks and at least in float32."""
    total = rows[0].to(wide(rows.dtype))
    for row in rows[1:]:
        total += row
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are summed: at least float32 for floating point."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


@dataclass
class PendingReduction:
    """Sums in progress. Each bucket has its message, and a function to call after the message."""

    works: list[tuple[Any, Callable[[], Any]]] = field(default_factory=list)

    @explained()
    def wait(self) -> None:
        """Wait for all buckets, and write the sums."""
        while self.works:
            work, finish = self.works.pop(0)
            work.wait()
            finish()

    def future(self) -> torch.futures.Future[Any]:
        """A future that completes when the sums are written. Use it instead of :meth:`wait`."""
        works = list(self.works)
        self.works.clear()

        def finish_all(_: Any) -> None:  # on a thread of the backend, which cannot wait for itself
            for _work, finish in works:
                finish()

        return torch.futures.collect_all([work.get_future() for work, _ in works]).then(finish_all)

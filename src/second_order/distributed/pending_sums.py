"""Sums over ranks that are under way, in tensors of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from second_order.distributed.lost import explained

__all__ = ["PendingSums"]


class PendingSums:
    """Sums under way, in tensors of their own.

    Args:
        count: Number of sums.
    """

    def __init__(self, count: int) -> None:
        self._sums: list[Tensor | None] = [None] * count
        self._buckets: list[tuple[Any, Tensor, list[int], list[Tensor]]] = []

    def add(self, work: Any, flat: Tensor, places: list[int], like: Sequence[Tensor]) -> None:
        """Add one bucket.

        Args:
            work: The collective, once done, has left the bucket's sums in ``flat``.
            flat: The sums, one after the other.
            places: The place of each in the list of all sums.
            like: Tensors of their shapes, dtype and device; they are not kept.
        """
        blanks = [torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape) for t in like]
        self._buckets.append((work, flat, places, blanks))

    @explained()
    def wait(self) -> list[Tensor]:
        """Wait for every bucket; returns the sums in the order of their addends."""
        buckets, self._buckets = self._buckets, []
        for work, flat, places, blanks in buckets:
            work.wait()
            sums = flat.to(blanks[0].device, blanks[0].dtype)
            pieces = sums.split([blank.numel() for blank in blanks])
            for place, piece, blank in zip(places, pieces, blanks, strict=True):
                self._sums[place] = piece.view(blank.shape)
        found, self._sums = self._sums, []
        return [each for each in found if each is not None]

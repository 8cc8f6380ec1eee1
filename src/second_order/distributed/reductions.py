"""Sums of tensors under way, and the order in which addends are added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.lost import explained

__all__ = [
    "Finished",
    "PendingReduction",
    "PendingSums",
    "Started",
    "in_runs",
    "scatter",
    "sum_in_order",
    "wide",
]

Started: TypeAlias = tuple[Any, Callable[[], Tensor]]
"""A message under way, and what gives its flat result once it is done."""


class Finished:
    """A message that has arrived, as the backend's are waited for."""

    def wait(self) -> None:
        """Return at once."""

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return done


class PendingReduction:
    """Sums under way; :meth:`wait` writes them over the addends.

    Sums by shares take a second message, once the first has come. All ranks must start it at the
    same place among their other messages: where one calls :meth:`go_on` or :meth:`wait`, all do.
    """

    def __init__(self) -> None:
        self._buckets: list[tuple[Started, list[Tensor]]] = []
        self._halves: list[tuple[Started, Callable[[Tensor], Started], list[Tensor]]] = []
        self._done: torch.futures.Future[Any] | None = None

    def add(self, work: Any, total: Callable[[], Tensor], targets: list[Tensor]) -> None:
        """Add one bucket; ``total`` gives its flat sum once ``work`` is done."""
        self._buckets.append(((work, total), targets))

    def add_half(
        self, first: Started, onward: Callable[[Tensor], Started], targets: list[Tensor]
    ) -> None:
        """Add one bucket that takes two messages; ``onward`` starts the second one."""
        self._halves.append((first, onward, targets))

    @explained()
    def go_on(self) -> None:
        """Wait for first messages, and start the second ones; nothing where one is enough."""
        while self._halves:
            (work, total), onward, targets = self._halves.pop(0)
            work.wait()
            self._buckets.append((onward(total()), targets))
        if self._done is not None:
            done, self._done = self._done, None
            self._finished().add_done_callback(partial(_pass_on, done))

    @explained()
    def wait(self) -> None:
        """Wait for every bucket, in the order in which they were sent."""
        self.go_on()
        while self._buckets:
            (work, total), targets = self._buckets.pop(0)
            work.wait()
            scatter(total(), targets)

    def future(self) -> torch.futures.Future[Any]:
        """A future that is done when the sums are in place, instead of :meth:`wait`.

        It is not before :meth:`go_on` has been called.
        """
        if not self._halves:
            return self._finished()
        devices = {t.device for _, _, targets in self._halves for t in targets if t.is_cuda}
        self._done = torch.futures.Future(devices=sorted(devices, key=str))
        return self._done

    def _finished(self) -> torch.futures.Future[Any]:
        buckets, self._buckets = self._buckets, []

        def finish(_: Any) -> None:  # on a thread of the backend, which cannot wait for itself
            for (_, total), targets in buckets:
                scatter(total(), targets)

        return torch.futures.collect_all([work.get_future() for (work, _), _ in buckets]).then(
            finish
        )


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


def scatter(flat: Tensor, targets: Iterable[Tensor]) -> None:
    """Copy a flat buffer back to its tensors: undo a concatenation."""
    start = 0
    for target in targets:
        stop = start + target.numel()
        target.copy_(flat[start:stop].view(target.shape))
        start = stop


def in_runs(received: Tensor, own: list[int], common: list[int], sent: Tensor) -> Tensor:
    """What has come by rank, each its part of two runs, as these runs; ``sent`` as there."""
    if not any(own) or not any(common):
        return received
    pieces = received.split([n for pair in zip(own, common, strict=True) for n in pair])
    return torch.cat([*pieces[0::2], *pieces[1::2]])


def sum_in_order(rows: Tensor, sent: Tensor) -> Tensor:
    """The sum of ``(ranks, n)`` over ranks; ``sent`` is kept alive until it has gone."""
    total = rows[0].to(wide(rows.dtype))
    for row in rows[1:]:
        total += row
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which addends of a dtype are added: narrow floating-point numbers in a wider."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _pass_on(to: torch.futures.Future[Any], finished: torch.futures.Future[Any]) -> None:
    """Let one future end as another has ended."""
    try:
        finished.value()
    except Exception as error:
        to.set_exception(error)
    else:
        to.set_result(None)

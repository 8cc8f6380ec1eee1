"""A slower network than the one there is: collectives end later, and nobody computes meanwhile.

    with SlowNetwork(latency=1e-3, bandwidth=20e6) as network:
        ...

Each process has one link, which takes one collective after the other, of all groups, in the order
in which they begin. A collective takes ``latency`` plus the bytes that cross the link over
``bandwidth``, from when all ranks have come to it and the link is free. A thread sleeps for that
time, so that a busy machine changes little. Gloo itself moves the data, in no time beside that.

What runs inside of torch, such as DistributedDataParallel's own collectives, is as fast as ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

__all__ = ["SlowNetwork"]


class Transfer:
    """A collective on its way, as ``torch.distributed`` returns one."""

    def __init__(self, network: SlowNetwork, work: Any, seconds: float) -> None:
        self._network, self._work, self._seconds = network, work, seconds
        self._arrived = threading.Event()

    def travel(self) -> None:
        self._work.wait()
        time.sleep(self._seconds)
        self._network.busy += self._seconds
        self._arrived.set()

    def wait(self) -> None:
        start = time.perf_counter()
        self._arrived.wait()
        self._network.waited += time.perf_counter() - start


class SlowNetwork:
    """The links of a process.

    Args:
        latency: Seconds that each collective takes, whatever its size.
        bandwidth: Bytes a second.

    Attributes:
        busy: Seconds for which the link has been at work.
        waited: Seconds for which this process has waited for it.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._latency, self._bandwidth = latency, bandwidth
        self.busy = self.waited = 0.0
        self._link: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()

    def __enter__(self) -> SlowNetwork:
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        self._patches = [
            patch.object(dist, "all_reduce", self._slowed(dist.all_reduce, _reduced)),
            patch.object(dist, "all_to_all_single", self._slowed(dist.all_to_all_single, _sent)),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()
        self._link.put(None)
        self._thread.join()

    def read(self) -> tuple[float, float]:
        """Seconds busy and waited since the last reading."""
        found = self.busy, self.waited
        self.busy = self.waited = 0.0
        return found

    def _carry(self) -> None:
        while (transfer := self._link.get()) is not None:
            transfer.travel()

    def _slowed(self, collective: Callable[..., Any], size: Callable[..., float]) -> Any:
        def begin(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            seconds = self._latency + size(*args, **kwargs) / self._bandwidth
            transfer = Transfer(self, collective(*args, async_op=True, **kwargs), seconds)
            self._link.put(transfer)
            if async_op:
                return transfer
            return transfer.wait()

        return begin


def _reduced(tensor: Tensor, *_: Any, group: Any = None, **__: Any) -> float:
    """Bytes of an all-reduce on one link, along a ring: 2 (P - 1) / P of the tensor's."""
    ranks = dist.get_world_size(group)
    return 2 * (ranks - 1) / ranks * tensor.nbytes


def _sent(
    received: Tensor,
    sent: Tensor,
    received_sizes: Any = None,
    sent_sizes: Any = None,
    group: Any = None,
    **_: Any,
) -> float:
    """Bytes to or from the other ranks, whichever are more: a link goes both ways at once."""
    here = dist.get_rank(group)
    loads = []
    for tensor, sizes in ((received, received_sizes), (sent, sent_sizes)):
        own = len(tensor) // dist.get_world_size(group) if sizes is None else sizes[here]
        loads.append((len(tensor) - own) * tensor.itemsize)
    return float(max(loads))

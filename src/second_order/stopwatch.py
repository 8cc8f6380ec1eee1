"""A stopwatch that tells apart what the training thread's time is spent on; on CUDA, too.

Budgets choose their intervals by it: which work counts as which is said where they are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol

import torch

__all__ = ["Account", "Clock", "DeviceClock", "HostClock", "Stopwatch", "clock_of"]


class Account(Enum):
    """The kinds of work that the training thread's time is spent on."""

    STATISTICS = "S"
    REFRESH = "R"
    BASE = "T"
    APART = "apart"


class Clock(Protocol):
    """A clock that marks moments, and tells later how far they are apart."""

    def mark(self) -> Any:
        """The present moment."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another, once :meth:`settle` has been called."""

    def settle(self) -> None:
        """Wait until the device has come to all moments that were marked."""


class HostClock:
    """The clock of the CPU.

    Args:
        now: Returns the time in seconds, from any origin.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """The present time in seconds."""
        return self._now()

    def seconds(self, start: float, end: float) -> float:
        """Seconds from one mark to another."""
        return end - start

    def settle(self) -> None:
        """Do nothing: the CPU's marks are complete at once."""


class DeviceClock:
    """The clock of a CUDA device: events on its current stream, not waited for by the host.

    Args:
        device: The CUDA device to measure.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """The moment at which the device has done all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from one mark to another."""
        return float(start.elapsed_time(end)) / 1000

    def settle(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock to measure a device's work by."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class Stopwatch:
    """Lap times by account; exactly one account is open at each moment, the base's or another.

    Args:
        clock: The clock to measure by.
        kept: Number of the last laps that are kept; None for all.
    """

    def __init__(self, clock: Clock, kept: int | None = None) -> None:
        self._clock = clock
        self._open = Account.BASE
        most = None if kept is None else kept + 1  # and the one under way
        self._laps: deque[list[tuple[Account, Any]]] = deque(
            [[(self._open, clock.mark())]], maxlen=most
        )

    @contextmanager
    def on(self, account: Account) -> Iterator[None]:
        """Measure the enclosed work on another account, then go back to the one before."""
        before = self._open
        self._switch(account)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, account: Account) -> None:
        self._open = account
        self._laps[-1].append((account, self._clock.mark()))

    def lap(self) -> None:
        """End a lap, and begin the next: a lap is a step."""
        self._switch(Account.BASE)
        self._laps.append(self._laps[-1][-1:])

    def read(self) -> list[dict[Account, float]]:
        """Seconds by account of each lap kept that has ended; waits for the device, if any."""
        self._clock.settle()
        found = []
        for marks in list(self._laps)[:-1]:
            spent = dict.fromkeys(Account, 0.0)
            for (account, start), (_, end) in pairwise(marks):
                spent[account] += self._clock.seconds(start, end)
            found.append(spent)
        return found

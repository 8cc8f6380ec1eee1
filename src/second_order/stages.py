"""Stages of a step: seconds and bytes by stage, and ranges for torch's profiler.

    with meter.stage("statistics"):
        ...
        with meter.stage("exchange"):  # on the account "statistics_exchange" meanwhile
            ...

Exactly one account is open at each moment, so that all of them together are the whole time. A range
of the profiler, ``second_order.`` and the stage's name, is entered only while a profiler runs: even
an idle one takes microseconds. Seconds are the host's, and no device is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["ELSEWHERE", "PAPER_NAMES", "RANGES", "Meter", "account", "sent", "span"]

RANGES = "second_order."
"""What the names of all ranges begin with."""

ELSEWHERE = "elsewhere"
"""The account of all time outside of the stages: batches, passes, validation."""

EXCHANGE = "exchange"
"""The stage of messages, on an account of the stage around it."""

_EXCHANGES = frozenset(["statistics", "solve", "precondition"])

_PART_OF = {
    "capture": "statistics",
    "launch": "solve",
    "land": "solve",
    "agree": "solve_exchange",
    "clip": "precondition",
}

PAPER_NAMES = {
    "backward": "BP",
    "statistics": "FactorComp",
    "statistics_exchange": "FactorComm",
    "solve": "InverseComp",
    "solve_exchange": "InverseComm",
    "average_gradients": "GradComm",
    "precondition": "",
    "precondition_exchange": "PredComm",
    "lanczos": "",
    "split": "",
    "base": "",
    "newton": "",
    "final_update": "",
    "exchange": "",
    "wait": "",
    "judge": "",
    "compare": "",
}
"""Accounts in the order of a step, as the figures of DP-KFAC call them (Zhang et al. 2022, fig. 8);
"" where they have no name."""


def account(name: str, around: str) -> str:
    """The account of a stage within another account."""
    if name == EXCHANGE:
        return f"{around}_{EXCHANGE}" if around in _EXCHANGES else EXCHANGE
    return _PART_OF.get(name, name)


_BYTES = [0]  # that this process has handed to others, of all optimizers together


def sent(nbytes: int) -> None:
    """Count bytes that this process hands to others."""
    _BYTES[0] += nbytes


class span:  # noqa: N801
    """A range of the profiler by a stage's name, if one runs, and a stage of a meter, if given."""

    __slots__ = ("_before", "_meter", "_name", "_range")

    def __init__(self, name: str, meter: Meter | None = None) -> None:
        self._name, self._meter, self._before = name, meter, ""
        self._range: Any = None

    def __enter__(self) -> None:
        meter = self._meter
        if meter is not None:
            self._before = meter.switch(account(self._name, meter.open))
        # Of this thread, of those that take over its state, and of all threads.
        if torch._C._autograd._profiler_enabled() or profiler._is_profiler_enabled:
            self._range = profiler.record_function(RANGES + self._name)
            self._range.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._range is not None:
            self._range.__exit__(*error)
        if self._meter is not None:
            self._meter.switch(self._before)


class Meter:
    """Seconds and bytes of a training by account, of the last step and of all."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now  # returns the time in seconds, from any origin
        self.watch: Callable[[str], None] | None = None  # is told of each account that is opened
        self.open, self._since, self._bytes = ELSEWHERE, now(), _BYTES[0]
        self._step: dict[str, list[float]] = {}  # seconds and bytes of the step under way
        self._last: dict[str, list[float]] = {}
        self._total: dict[str, list[float]] = {}

    def stage(self, name: str) -> span:
        """Measure the enclosed work as a stage, and show it to a profiler that runs."""
        return span(name, self)

    def switch(self, to: str) -> str:
        """Close the open account, and open another; returns the one before."""
        before, now, total = self.open, self.now(), _BYTES[0]
        spent = self._step.setdefault(before, [0.0, 0])
        spent[0] += now - self._since
        spent[1] += total - self._bytes
        self.open, self._since, self._bytes = to, now, total
        if self.watch is not None:
            self.watch(to)
        return before

    def spent(self, *accounts: str) -> float:
        """Seconds on some accounts in the step under way, up to the last stage that has ended."""
        seconds = 0.0
        for name in accounts:
            seconds += self._step.get(name, (0.0,))[0]
        return seconds

    def lap(self) -> None:
        """End a step."""
        self.switch(ELSEWHERE)
        self._last, self._step = self._step, {}
        for name, spent in self._last.items():
            total = self._total.setdefault(name, [0.0, 0])
            total[0] += spent[0]
            total[1] += spent[1]

    def read(self, accounts: Iterable[str]) -> dict[str, float]:
        """Seconds and bytes by account, of the last step that has ended, and of all of them."""
        found: dict[str, float] = {}
        nothing: list[float] = [0.0, 0]
        for name in accounts:
            last, total = self._last.get(name, nothing), self._total.get(name, nothing)
            found |= {f"seconds/{name}": last[0], f"total_seconds/{name}": total[0]}
            found |= {f"bytes/{name}": last[1], f"total_bytes/{name}": total[1]}
        return found

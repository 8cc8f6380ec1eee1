"""A bound on the time of refreshes: at most ``overhead`` of the time of the other steps.

T     median duration of a step without a refresh
R     median duration of a step with one, minus T
n     ⌈R / (overhead T)⌉, the least number of steps from a refresh to the next

Durations are those of whole steps, passes and batches included, from the end of one step to the end
of the next. The steps up to the fifth refresh are timed. From then on n is fixed, and a resumed run
has the n of its checkpoint. All ranks use the largest n of any rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.training.context import Training

__all__ = ["THROTTLE", "Throttle"]

THROTTLE = "throttle_interval", "throttle_refreshes", "throttle_overhead"
"""The entries of a checkpoint, the same for all parameters: n, the number of refreshes that have
been timed, and the overhead that n is for."""

TIMED_REFRESHES = 5
TIMED_STEPS = 50  # the last ones that T is the median of
ENOUGH_STEPS = 10  # after which n is known, if a refresh was timed before them
LONGEST = 100_000  # steps, if steps without a refresh seem to take no time


def mark(device: torch.device) -> Any:
    """A point in time: on CUDA an event, which the host does not wait for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds from one point in time to another; synchronizes with a CUDA device."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def min_interval(R: float, T: float, overhead: float) -> int:
    """⌈R / (overhead T)⌉, at least 1."""
    if R <= 0:
        return 1
    return math.ceil(R / (overhead * T)) if LONGEST * overhead * T > R else LONGEST


class Throttle:
    """The least number of steps between refreshes, the same on all ranks.

    Args:
        training: Has the ranks and the device.
        overhead: The share of the time of the other steps that refreshes may take.
        fewest: Number of timed refreshes from which on n is known.

    Attributes:
        interval: n; 0 until it is known.
        refreshes: Number of refreshes that have been timed.
    """

    def __init__(self, training: Training, overhead: float, *, fewest: int) -> None:
        self._training = training
        self._overhead = overhead
        self._fewest = fewest
        self.clock: Callable[[torch.device], Any] = mark
        self.restart()

    def restart(self) -> None:
        """Measure from here on: other parameters train now, or the machine is another."""
        self.interval = 0
        self.refreshes = 0
        self._ordinary: deque[tuple[Any, Any]] = deque(maxlen=TIMED_STEPS)
        self._refreshing: list[tuple[Any, Any]] = []
        self._start: Any = None  # of the step

    @property
    def measures(self) -> bool:
        """Whether steps are timed: up to the fifth refresh, and until there is an interval.

        A checkpoint has no durations, so a resumed run may see its fifth refresh without them.
        """
        return self.refreshes < TIMED_REFRESHES or self.interval == 0

    def begin_step(self) -> None:
        """Let a step begin now, if the end of the one before has not been seen."""
        if self._start is None and self.measures:
            self._start = self.clock(self._training.device)

    def end_step(self, *, refreshed: bool) -> None:
        """Time a step; after a refresh agree on the interval, which is a collective."""
        if not self.measures:
            return
        end = self.clock(self._training.device)
        durations = self._refreshing if refreshed else self._ordinary
        durations.append((self._start, end))
        self._start = end
        self.refreshes += refreshed
        enough = len(self._ordinary) == ENOUGH_STEPS and not refreshed
        if self.refreshes >= self._fewest and (refreshed or enough):
            self.interval = self._agreed_interval()

    def _agreed_interval(self) -> int:
        """The largest n that any rank has measured."""
        interval = self.interval
        if self._ordinary and self._refreshing:
            T = statistics.median(seconds_between(*each) for each in self._ordinary)
            R = statistics.median(seconds_between(*each) for each in self._refreshing) - T
            interval = min_interval(R, T, self._overhead)
        world = self._training.world
        if world.size > 1:
            agreed = torch.tensor([float(interval)], dtype=torch.float64, device="cpu")
            world.on_cpu().all_reduce_max([agreed]).wait()
            interval = int(agreed)
        return interval

    @property
    def summary_line(self) -> str:
        """A part of a line of the summary."""
        if not self.interval:
            return f"overhead {self._overhead}: being measured"
        return f"overhead {self._overhead}: {self.interval} steps between refreshes at least"

    def saved(self) -> dict[str, float]:
        """What a checkpoint has of it with every parameter."""
        return dict(zip(THROTTLE, (self.interval, self.refreshes, self._overhead), strict=True))

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over the interval of a checkpoint for the same overhead; otherwise measure again."""
        self.restart()
        for part in saved.values():
            if part.keys() >= set(THROTTLE):
                if part.number(THROTTLE[2]) == self._overhead:
                    self.interval = part.whole(THROTTLE[0], 0)
                    self.refreshes = part.whole(THROTTLE[1], 0)
                return

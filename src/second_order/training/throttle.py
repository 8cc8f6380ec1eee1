"""A limit on the time of refreshes: at most ``overhead`` of the time of other steps.

    T    median duration of a step without a refresh
    R    median duration of a step with a refresh, minus T
    n    ⌈R / (overhead T)⌉, the smallest number of steps from one refresh to the next

A duration runs from the end of one step to the end of the next, so it includes the
forward and backward passes and the loading of data. The steps up to the fifth refresh
are timed. After that n is fixed, and a resumed run uses the n of its checkpoint. All
ranks use the largest n of any rank.
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

__all__ = ["THROTTLE_ENTRIES", "Throttle"]

THROTTLE_ENTRIES = ("throttle_interval", "throttle_refreshes", "throttle_overhead")
"""The entries of a checkpoint, equal for all parameters: n, the number of timed
refreshes, and the overhead that n was computed for."""

TIMED_REFRESHES = 5
TIMED_STEPS = 50  # T is the median of so many last steps
# If a refresh was timed first, n is computed after so many other steps.
ENOUGH_STEPS = 10
# Bounds n if the clock is too coarse to time a step without a refresh.
MAX_INTERVAL = 100_000


def record_time(device: torch.device) -> Any:
    """Return the time now: a CUDA event, which does not block the host, or seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two times. Synchronizes with a CUDA device."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def min_interval(R: float, T: float, overhead: float) -> int:
    """Return ⌈R / (overhead T)⌉, between 1 and MAX_INTERVAL."""
    if R <= 0:
        return 1
    if MAX_INTERVAL * overhead * T <= R:
        return MAX_INTERVAL
    return math.ceil(R / (overhead * T))


class Throttle:
    """The smallest number of steps between refreshes, the same on all ranks.

    Args:
        training: Has the ranks and the device.
        overhead: Limit on the time of refreshes, as a share of that of other steps.
        min_refreshes: Number of timed refreshes after which n is first computed.

    Attributes:
        interval: n; 0 until it is known.
        refreshes: Number of refreshes that have been timed.
    """

    def __init__(
        self, training: Training, overhead: float, *, min_refreshes: int
    ) -> None:
        self._training = training
        self._overhead = overhead
        self._min_refreshes = min_refreshes
        self.clock: Callable[[torch.device], Any] = record_time
        self.restart()

    def restart(self) -> None:
        """Measure again, because parameters or the machine have changed."""
        self.interval = 0
        self.refreshes = 0
        # Start and end of the last steps without a refresh, and of those with one.
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=TIMED_STEPS)
        self._refresh_steps: list[tuple[Any, Any]] = []
        self._start: Any = None  # of the current step

    @property
    def measures(self) -> bool:
        """Whether steps are timed: until the fifth refresh, and until n is known.

        Checkpoints have no durations, so a resumed run may reach its fifth refresh with
        too few durations for an interval.
        """
        return self.refreshes < TIMED_REFRESHES or self.interval == 0

    def begin_step(self) -> None:
        """Start the clock, unless the end of the previous step has started it."""
        if self._start is None and self.measures:
            self._start = self.clock(self._training.device)

    def end_step(self, *, refreshed: bool) -> None:
        """Record the duration of a step.

        After a refresh, agree on the interval: a collective.
        """
        if not self.measures:
            return
        end = self.clock(self._training.device)
        durations = self._refresh_steps if refreshed else self._steps
        durations.append((self._start, end))
        self._start = end
        self.refreshes += refreshed

        # After each timed refresh, and once after the tenth step without one.
        has_enough_steps = len(self._steps) == ENOUGH_STEPS and not refreshed
        if self.refreshes >= self._min_refreshes and (refreshed or has_enough_steps):
            self.interval = self._agree_on_interval()

    def _agree_on_interval(self) -> int:
        """Return the largest n that any rank has measured."""
        interval = self.interval
        if self._steps and self._refresh_steps:
            T = statistics.median(seconds_between(*times) for times in self._steps)
            durations = [seconds_between(*times) for times in self._refresh_steps]
            R = statistics.median(durations) - T
            interval = min_interval(R, T, self._overhead)
        world = self._training.world
        if world.size > 1:
            agreed = torch.tensor([float(interval)], dtype=torch.float64, device="cpu")
            world.on_cpu().all_reduce_max([agreed]).wait()
            interval = int(agreed)
        return interval

    @property
    def summary_line(self) -> str:
        """The throttle's line of the summary."""
        if not self.interval:
            return f"overhead {self._overhead}: being measured"
        return f"overhead {self._overhead}: at least {self.interval} steps between refreshes"

    def saved(self) -> dict[str, float]:
        """Return the entries that a checkpoint has with every parameter."""
        values = (self.interval, self.refreshes, self._overhead)
        return dict(zip(THROTTLE_ENTRIES, values, strict=True))

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Adopt a checkpoint's interval, or measure again for another overhead."""
        self.restart()
        interval_entry, refreshes_entry, overhead_entry = THROTTLE_ENTRIES
        for part in saved.values():
            if part.keys() >= set(THROTTLE_ENTRIES):
                if part.number(overhead_entry) == self._overhead:
                    self.interval = part.whole(interval_entry, 0)
                    self.refreshes = part.whole(refreshes_entry, 0)
                return  # all parameters have the same entries

"""Wall-clock seconds of each timer region of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StageSeconds"]


class StageSeconds:
    """Measures host seconds in each timer region, without the regions within it.

        timer = StageSeconds()
        with recorded_by(timer.stage):
            ...
        timer.stop()

    The key "elsewhere" has the time outside of all regions.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stage = "elsewhere"
        self._start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time within the block for a region."""
        outer = self._stage
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def stop(self) -> None:
        """Count the time since the last region."""
        self._switch(self._stage)

    def _switch(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._start
        self._stage = name
        self._start = now

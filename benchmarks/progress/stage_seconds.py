"""Wall-clock seconds of each stage of our optimizers' steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StageSeconds"]


class StageSeconds:
    """Seconds in each stage, without the stages within it; "elsewhere" is outside of all.

        timer = StageSeconds()
        with recorded_by(timer.stage):
            ...
        timer.stop()

    The seconds are those of the host.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stage = "elsewhere"
        self._began = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time meanwhile as that of a stage."""
        outer = self._stage
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def stop(self) -> None:
        """Count the time up to now."""
        self._switch(self._stage)

    def _switch(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._began
        self._stage = name
        self._began = now

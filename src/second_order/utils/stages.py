"""The stages of a step, as ranges that ``torch.profiler`` shows.

    with stage("statistics"):
        ...
        with stage("statistics_exchange"):
            ...

docs/instruments.md lists the stages, with their names in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler

__all__ = ["RANGES", "recorded_by", "stage"]

RANGES = "second_order."
"""The names of all ranges begin so."""

Recorder: TypeAlias = Callable[[str], AbstractContextManager[Any]]

_recorders: list[Recorder] = []


def stage(name: str) -> AbstractContextManager[Any]:
    """Make a context manager that enters a range of the profiler, if a profiler runs."""
    if _recorders:
        return _recorders[-1](name)
    # The first is true in this thread and in those that take over its state, the second in all.
    if torch._C._autograd._profiler_enabled() or profiler._is_profiler_enabled:
        return profiler.record_function(RANGES + name)
    return nullcontext()


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Replace the context managers of stages by ``recorder(name)`` inside a ``with`` block."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)

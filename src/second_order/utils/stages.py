"""Record the stages of a step as ranges of ``torch.profiler``.

    with stage("statistics"):
        ...
        with stage("statistics_exchange"):
            ...

docs/how-to/monitor.md lists the stages, with their names in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler

__all__ = ["RANGES", "recorded_by", "stage"]

RANGES = "second_order."
"""The prefix of all range names."""

Recorder: TypeAlias = Callable[[str], AbstractContextManager[Any]]

_recorders: list[Recorder] = []


def stage(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that records a range, if a profiler is running."""
    if _recorders:
        return _recorders[-1](name)
    # The first is true in the thread that started the profiler and in those that
    # inherit its state; the second is true in all threads.
    if torch._C._autograd._profiler_enabled() or profiler._is_profiler_enabled:
        return profiler.record_function(RANGES + name)
    return nullcontext()


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Record stages by ``recorder(name)`` in a ``with`` block, not by the profiler."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)

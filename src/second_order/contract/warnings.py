"""Warnings, which may be held back until the ranks no longer wait for each other.

Whoever turns warnings into errors (``python -W error``) would otherwise end one rank's step between
two collectives, and leave the other ranks waiting in the second.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from second_order.errors import SecondOrderWarning

__all__ = ["DeferredWarnings", "warns_at_its_end"]

P = ParamSpec("P")
R = TypeVar("R")


class DeferredWarnings:
    """Warnings of an optimizer; inside ``with deferred.held():`` they wait until the block ends.

    One that is an error is raised at that end, and the remaining ones at the end of the next block.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: list[str] = []
        self._held = False

    def first_time(self, key: str) -> bool:
        """True once for each key, so that a warning is given once."""
        new = key not in self._known
        self._known.add(key)
        return new

    def warn(self, message: str) -> None:
        """Warn, now or at the end of the block that is open."""
        self.keep(message)
        if not self._held:
            self._tell()

    def keep(self, message: str) -> None:
        """Warn at the end of the next block: for hooks, which run while others may wait."""
        self._waiting.append(message)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold warnings back for a block; of nested ones the outermost counts."""
        outer, self._held = self._held, True
        try:
            yield
        finally:
            self._held = outer
            if not outer:
                self._tell()

    def _tell(self) -> None:
        """Warn of all that waits, at the first frame outside of this package and torch."""
        while self._waiting:
            frame, level = sys._getframe(), 1
            ours = ("second_order.", "torch.", "contextlib")
            while frame.f_back and frame.f_globals.get("__name__", "").startswith(ours):
                frame, level = frame.f_back, level + 1
            warnings.warn(self._waiting.pop(0), SecondOrderWarning, stacklevel=level)


def warns_at_its_end(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate an optimizer's method: warnings wait until it has returned."""

    @functools.wraps(method)
    def told(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._training.warnings.held():
            return method(self, *args, **kwargs)

    return told

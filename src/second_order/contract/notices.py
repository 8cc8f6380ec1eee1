"""Warnings, which may be held back until the ranks no longer wait for each other.

Whoever turns warnings into errors (``python -W error``) would otherwise end one rank's step between
two collectives, and leave the other ranks waiting in the second.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from second_order.errors import SecondOrderWarning

__all__ = ["Notices", "warns_at_its_end"]

P = ParamSpec("P")
R = TypeVar("R")


class Notices:
    """Warnings of an optimizer. Inside ``with notices:`` they wait until the block ends.

    Blocks may be nested; the outermost counts. A warning that is an error is raised at its end, and
    the remaining ones at the end of the next block. Where the block itself raises, warnings that
    cannot be given become notes of that error.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._unsaid: list[str] = []
        self._depth = 0

    def first_time(self, key: str) -> bool:
        """True once for each key, so that a warning is given once."""
        new = key not in self._known
        self._known.add(key)
        return new

    def say(self, message: str) -> None:
        """Warn, now or at the end of the block that is open."""
        self.keep(message)
        if not self._depth:
            self._say_all()

    def keep(self, message: str) -> None:
        """Warn at the end of the next block: for hooks, which run while others may wait."""
        self._unsaid.append(message)

    def _say_all(self) -> None:
        while self._unsaid:
            _say(self._unsaid.pop(0))

    def __enter__(self) -> Notices:
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        if error is None:
            self._say_all()
        while self._unsaid:
            message = self._unsaid.pop(0)
            try:
                _say(message)
            except SecondOrderWarning:
                if sys.version_info >= (3, 11) and error is not None:
                    error.add_note(message)


def warns_at_its_end(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate an optimizer's method: warnings wait until it has returned."""

    @functools.wraps(method)
    def told(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._training.notices:
            return method(self, *args, **kwargs)

    return told


def _say(message: str) -> None:
    warnings.warn(message, SecondOrderWarning, stacklevel=_levels_to_the_caller())


def _levels_to_the_caller() -> int:
    """Stack levels from the warning up to the first frame outside this package and torch."""
    frame, level = sys._getframe(1), 1
    ours = ("second_order.", "torch.")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame, level = frame.f_back, level + 1
    return level

"""The end of threads with the interpreter: all are told, then waited for, but not long.

Python's own order would be: daemon threads are cut off wherever they are. A thread in
C++ code has nowhere to return to then, and takes the process along.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

__all__ = ["Farewell"]

SLICE_SECONDS = 0.05  # between looks at the threads waited for
ROUSED_SECONDS = 5.0  # after which the main thread hangs no more in the place of an abort
SIGEV_THREAD_ID = 4  # Linux


class Farewell:
    """Ends daemon threads, at :meth:`begin` and :meth:`finish` or with the interpreter.

    A thread that has not ended after the wait stays behind, and is not waited for again.

    Args:
        tell: Lets the threads know; it must not wait.
        threads: The threads that are then to end.
        patience: Seconds to wait for them, since they were told, or since the last sign of life.
        sign: Gives the time of the last sign of life, by ``time.monotonic``.
        most: Seconds to wait in all, whatever the signs; None for ``patience``.
    """

    def __init__(
        self,
        tell: Callable[[], None],
        threads: Sequence[threading.Thread],
        patience: float,
        sign: Callable[[], float] | None = None,
        most: float | None = None,
    ) -> None:
        self._tell, self._threads, self._sign = tell, list(threads), sign
        self._patience, self._most = patience, patience if most is None else most
        self._begun: float | None = None
        for other in [each for each in _to_come if each.over]:
            _to_come.discard(other)
        _to_come.add(self)

    @property
    def over(self) -> bool:
        """Whether all the threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def begin(self) -> None:
        """Tell the threads to end, without waiting."""
        if self._begun is None:
            self._begun = time.monotonic()
            self._tell()

    def finish(self, most: float | None = None) -> bool:
        """Tell the threads to end, and wait for them; returns whether they have ended.

        Args:
            most: Seconds to wait in all, since they were told; None for the limits of the object.
        """
        self.begin()
        while not self.over:
            left = self._until(self._most if most is None else most) - time.monotonic()
            if left <= 0.0:
                return False
            for thread in self._threads:
                thread.join(max(min(left, SLICE_SECONDS), 0.0))
        return True

    def _until(self, most: float) -> float:
        assert self._begun is not None
        sign = self._begun if self._sign is None else max(self._begun, self._sign())
        return min(sign + self._patience, self._begun + most)


_to_come: set[Farewell] = set()


@atexit.register
def _at_the_end() -> None:
    here = list(_to_come)
    try:
        for farewell in here:
            farewell.begin()
        for farewell in here:
            farewell.finish()
    finally:  # a KeyboardInterrupt may end the wait
        if not all(farewell.over for farewell in here):
            _leave_threads_alone()


def _leave_threads_alone() -> None:
    """Let a thread that comes back from C++ hang, and not abort the process.

    That is what Python does from 3.14 on. Before, it unwinds the thread's stack, which ends in
    ``std::terminate`` at the first C++ function that lets no exception through.
    """
    if sys.version_info >= (3, 14) or os.name != "posix":
        return
    library = "libc++.1.dylib" if sys.platform == "darwin" else "libstdc++.so.6"
    with suppress(OSError, AttributeError):
        set_terminate = ctypes.CDLL(library)._ZSt13set_terminatePFvvE  # std::set_terminate
        set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
        _rouse_this_thread()


def _rouse_this_thread() -> None:
    """Let this thread, the main one, hang in such a call for a moment only, then abort.

    ``pause`` returns after a signal, and ``std::terminate`` aborts where its handler returns. So a
    timer of the kernel sends a signal to this thread alone, over and over; anywhere else the signal
    does nothing, and what it interrupts goes on.

    Raises:
        AttributeError: Where there are no such timers: Linux has them.
    """
    libc, number = ctypes.CDLL(None), getattr(signal, "SIGRTMAX", 0)
    if sys.platform != "linux" or signal.getsignal(number) is not signal.SIG_DFL:
        return  # another library's handler
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc.abs, ctypes.c_void_p))  # of a number, and harmless
    event = _Event(0, number, SIGEV_THREAD_ID, threading.get_native_id())
    timer, seconds = ctypes.c_void_p(), int(ROUSED_SECONDS)
    rest = int((ROUSED_SECONDS - seconds) * 1e9)
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
        times = (ctypes.c_long * 4)(seconds, rest, seconds, rest)  # then, and between
        libc.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 2]
        libc.timer_settime(timer, 0, ctypes.byref(times), None)


class _Event(ctypes.Structure):
    """``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("padding", ctypes.c_int * 16),
    )


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_to_come.clear)  # the threads are the parent's

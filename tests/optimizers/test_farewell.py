"""Threads are told before any is waited for, and nobody waits for long; by a clock of the test's.

How processes end is among the tests of `scenes.py`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from second_order import farewell
from second_order.farewell import Farewell


class Clock:
    """It moves while somebody waits for a thread."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Thread:
    """One that ends at a time, or never; told or not."""

    def __init__(self, clock: Clock, until: float = float("inf")) -> None:
        self._clock, self._until = clock, until
        self.told: list[float] = []

    def tell(self) -> None:
        self.told.append(self._clock.now)

    def is_alive(self) -> bool:
        return self._clock.now < self._until

    def join(self, timeout: float) -> None:
        self._clock.now = min(self._clock.now + timeout, max(self._until, self._clock.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(farewell, "time", clock)
    monkeypatch.setattr(farewell, "_to_come", set())
    return clock


def of(thread: Any, patience: float = 3.0, **options: Any) -> Farewell:
    return Farewell(thread.tell, [thread], patience, **options)


def test_who_ends_is_waited_for_and_who_does_not_is_left(clock: Clock) -> None:
    soon, never = Thread(clock, 101.0), Thread(clock)
    assert of(soon).finish()
    assert clock.now == pytest.approx(101.0)
    assert not of(never).finish()
    assert clock.now == pytest.approx(104.0)


def test_it_is_told_once_and_not_waited_for_again(clock: Clock) -> None:
    never = Thread(clock)
    goodbye = of(never)
    for _ in range(3):
        goodbye.begin()
        assert not goodbye.finish()
    assert never.told == [100.0]
    assert clock.now == pytest.approx(103.0)


def test_all_are_told_before_any_is_waited_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the interpreter's end; and the waiting goes on for all of them at once."""
    threads = [Thread(clock), Thread(clock, 102.0), Thread(clock)]
    kept = [of(thread) for thread in threads]
    left: list[bool] = []
    monkeypatch.setattr(farewell, "_leave_threads_alone", lambda: left.append(True))
    farewell._at_the_end()
    assert [thread.told for thread in threads] == [[100.0]] * 3
    assert clock.now == pytest.approx(103.0)
    assert left, "some are still running"
    assert [each.over for each in kept] == [False, True, False]


def test_nothing_is_done_to_a_process_whose_threads_have_ended(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = of(Thread(clock, 101.0))
    monkeypatch.setattr(farewell, "_leave_threads_alone", lambda: pytest.fail("none is left"))
    farewell._at_the_end()
    assert kept.over


def test_signs_of_life_are_waited_for_but_not_for_ever(clock: Clock) -> None:
    lively = Thread(clock)
    assert not of(lively, sign=lambda: min(clock.now, 107.0), most=20.0).finish()
    assert clock.now == pytest.approx(110.0), "3 seconds after the last sign"
    assert not of(lively, sign=lambda: clock.now, most=20.0).finish()
    assert clock.now == pytest.approx(130.0)
    assert not of(lively, sign=lambda: clock.now, most=20.0).finish(1.0)
    assert clock.now == pytest.approx(131.0)


def test_who_has_ended_is_forgotten(clock: Clock) -> None:
    for _ in range(100):
        of(Thread(clock, 0.0))
    assert len(farewell._to_come) == 1


ENDS = """
import atexit, ctypes, os, sys, threading, time


def late():
    begun = time.monotonic()
    time.sleep(0.7)  # signals or not
    print("slept" if time.monotonic() - begun >= 0.7 else "woken", flush=True)
    if sys.argv[1] == "terminate":
        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


atexit.register(late)  # before ours: it runs after it
from second_order import farewell
from second_order.farewell import Farewell

farewell.ROUSED_SECONDS = 0.2
thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)
thread.start()
kept = Farewell(lambda: None, [thread], 0.1)
print("ends", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="by a timer of Linux")
@pytest.mark.parametrize("end", ["terminate", "as usual"])
def test_who_terminates_on_the_main_thread_is_not_kept_for_ever(end: str) -> None:
    """Whatever else happens at the end has its time."""
    run = [sys.executable, "-c", ENDS, end]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.split() == ["ends", "slept"]
    assert ended.returncode == (-signal.SIGABRT if end == "terminate" else 0), ended.stderr

"""What the tests of DistKFAC share: the optimizer, its threads at the tests' mercy, a reference.

gate = Gate()
with solving(gate):
    go(model, distkfac(model, max_staleness=None), CASE, BATCHES)  # nothing lands
    gate.open()
assert_same_trajectory(trajectory, delayed(2))
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from models import ZOO
from ranks import OPTIONS as PLAIN
from ranks import replaced
from reference import ReferenceKFAC

from second_order import DistKFAC
from second_order.kfac import async_inversion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

CASE = ZOO["mlp"]
LAYERS = "0", "2", "4"
BATCHES = CASE.batches(9, n=12)
OPTIONS: dict[str, Any] = {**PLAIN, "solver": "inverse", "inverse_threads": 1}
LONG = 20.0  # seconds, of what takes none


class BrokenError(Exception):
    """What a thread raises."""


def distkfac(params_or_model: Any, **options: Any) -> DistKFAC:
    return DistKFAC(params_or_model, **{**OPTIONS, **options})


@contextmanager
def solving(work: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """What is submitted to the threads from now on goes through `work`, which gets the solve."""
    solve = async_inversion.decompose_snapshot
    with replaced(
        async_inversion, {"decompose_snapshot": lambda *args: work(partial(solve, *args))}
    ):
        yield


class Gate:
    """Holds solves until it is opened.

    Attributes:
        waiting: how many solves have begun.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._opened = threading.Event()

    def __call__(self, solve: Callable[[], Any]) -> Any:
        self.waiting += 1
        assert self._opened.wait(LONG)
        return solve()

    def open(self) -> None:
        self._opened.set()

    @contextmanager
    def open_when_waited_for(self) -> Iterator[None]:
        """As long as somebody waits for a ticket."""
        wait = async_inversion.wait

        def opening(tickets: Any) -> None:
            self._opened.set()
            wait(tickets)
            self._opened.clear()

        with replaced(async_inversion, {"wait": opening}):
            yield


class Dawdle:
    """Solves that take their time, another one each."""

    def __init__(self, seed: int, seconds: float = 0.01) -> None:
        self._random = random.Random(seed)
        self._seconds = seconds

    def __call__(self, solve: Callable[[], Any]) -> Any:
        time.sleep(self._seconds * self._random.random())
        return solve()


def eventually(holds: Callable[[], Any], seconds: float = LONG) -> None:
    """Raise unless it comes to hold in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it has not come to hold"
        time.sleep(0.002)


def landed(optimizer: Any) -> bool:
    """Whether all that is under way has been solved."""
    tickets = optimizer._curvature.inverses.inverter._futures.values()
    return all(ticket.done() for ticket in tickets)


def threads_of(name: str = "second_order inverses") -> int:
    return sum(t.name.startswith(name) for t in threading.enumerate())


class Delayed(ReferenceKFAC):
    """A solve is put to use `staleness` steps after its factors, and the next one begun then.

    The first one is used immediately.
    """

    def update_inverses(self) -> None:
        if not self.snapshots or self.snapshots[-1].ready <= self.steps:
            super().update_inverses()


def delayed(staleness: int, **options: Any) -> list[Tensor]:
    """The trajectory of `CASE` on `BATCHES`."""
    chosen = {
        "lr": 0.05,
        "damping": 0.1,
        "kl_clip": PLAIN["kl_clip"],
        "solver": "inverse",
        **options,
    }
    return Delayed(CASE.model(), staleness=staleness, **chosen).trajectory(BATCHES)

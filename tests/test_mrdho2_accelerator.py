"""The accelerators of MRDHO2 without any processes: whose orders they follow, and their batches."""

from __future__ import annotations

from typing import Any

import pytest

from second_order.distributed.collectives import World
from second_order.optimizers.accelerator import Accelerator, Batches


class Silence:
    """A courier of the second accelerator, with one order at most."""

    lost, closed_there = True, False

    def __init__(self, *orders: dict[str, str]) -> None:
        self._orders = [([], order) for order in orders]

    def expect(self, name: str) -> None:
        assert name == "order/0/1"

    def wait(self, name: str, until: Any) -> Any:
        return self._orders.pop() if self._orders else None


@pytest.mark.parametrize(
    ("orders", "who"), [([], "the first accelerator"), ([{"do": "leave", "lost": "W"}], "W")]
)
def test_the_other_accelerators_leave_with_the_first(
    orders: list[dict[str, str]], who: str
) -> None:
    """When it tells them to, and when it is lost."""
    team = World.alone(1, 2)
    other: Any = Accelerator(Silence(*orders), team, None, workers=1, judges=True)  # type: ignore[arg-type]
    for _ in range(2):
        other.help(None, None)
        assert other.lost.startswith(who)
    assert other.answered == 0


class Unsized:
    """As a DataLoader of a dataset without a length is."""

    def __init__(self, *batches: int) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        raise TypeError("has no len()")


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([0, 1, 2], {4: 1, 5: 2, 6: 0, 8: 2, 2: 2}),
        (Unsized(0, 1, 2), {4: 0, 5: 1, 6: 2, 8: 0, 2: 1}),
        ((k for k in range(3)), {4: 0, 5: 1, 6: 2}),
    ],
)
def test_an_epoch_has_the_batch_of_its_number(batches: Any, expected: dict[int, int]) -> None:
    taken = Batches(batches, lambda batch: batch)
    assert [taken.closure(epoch)() for epoch in expected] == list(expected.values())

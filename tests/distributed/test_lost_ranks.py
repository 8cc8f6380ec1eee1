"""Errors of a process after another has ended or does not answer; see tests/faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from second_order import RankMismatchError, SecondOrderError
from second_order.distributed.world import World, translate_backend_errors

if TYPE_CHECKING:
    from collections.abc import Callable

GLOO_MESSAGE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:15257"


class Work:
    """That never succeeds."""

    def wait(self) -> None:
        raise RuntimeError(GLOO_MESSAGE)


def raises(*_: Any, **__: Any) -> None:
    raise RuntimeError(GLOO_MESSAGE)


class OfTwo(World):
    """The first of two ranks, without a process group."""

    def __init__(self) -> None:
        super().__init__(alone=True)
        self.size = 2


WAYS: dict[str, Callable[[World], object]] = {
    "a sum": lambda world: world.all_reduce([torch.ones(3)]).wait(),
    "a sum to one": lambda world: world.reduce([torch.ones(3)], [0]).wait(),
    "a delivery": lambda world: world.all_to_all([torch.ones(3), torch.ones(3)], [3, 3]),
    "words": lambda world: world.all_equal(7),
    "objects": lambda world: world.all_gather_object("here"),
}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when waited for"])
@pytest.mark.parametrize("way", WAYS)
def test_remaining_ranks_raise_with_the_reason(
    way: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo itself raises a RuntimeError of sockets and buffers."""
    for name in "all_reduce", "all_to_all_single", "broadcast":
        monkeypatch.setattr(dist, name, (lambda *_, **__: Work()) if late else raises)
    monkeypatch.setattr(dist, "all_gather_object", raises)
    with pytest.raises(SecondOrderError, match="one of them exited, raised, or") as caught:
        WAYS[way](OfTwo())
    assert GLOO_MESSAGE in str(caught.value), "what the backend has said is not lost"


def test_other_errors_pass_through() -> None:
    for error in RuntimeError("out of luck"), RankMismatchError("unlike"), ValueError("gloo"):
        with pytest.raises(type(error)) as caught, translate_backend_errors():
            raise error
        assert caught.value is error
    with (
        pytest.raises(SecondOrderError, match="Lost contact with the other ranks"),
        translate_backend_errors(),
    ):
        raise dist.DistNetworkError("socket")

"""A function of small tensors is one operation off the CPU, and the same function on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from second_order.fosi.fused import LIBRARY, fused
from second_order.fosi.trust import newton_step

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS: list[str] = []


@fused
def scaled(x: Tensor, by: float, y: Tensor, *more: Any) -> list[Tensor]:
    CALLS.append(x.device.type)
    return [x * by + y, *(y * each for each in more)]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def by(compiled: Any) -> None:
        monkeypatch.setattr(torch, "compile", lambda function: compiled or function)

    return by


def test_numbers_and_tensors_arrive_in_their_order() -> None:
    x, y = torch.randn(2, 5, dtype=torch.float64)
    expected = x * 2.0 + y, y * 3.0, y * x, y * 0.5
    operation = torch.ops.second_order.scaled([x, y, x], [2.0, 3.0, 0.5], "tntntn")
    for found in (scaled(x, 2.0, y, 3.0, x, 0.5), operation):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_what_cannot_be_compiled_runs_as_it_is(compiling: Any) -> None:
    def fails(*_: Any) -> None:
        CALLS.append("compiled")
        raise RuntimeError("no compiler")

    @fused
    def doubled(x: Tensor) -> list[Tensor]:
        CALLS.append("as it is")
        return [2.0 * x]

    compiling(fails)
    CALLS.clear()
    x = torch.empty(3, device="meta")
    for _ in range(2):
        assert doubled(x)[0].shape == (3,)
    assert CALLS == ["compiled", "as it is", "as it is"]  # it is tried once
    assert LIBRARY.ns == "second_order"


@pytest.mark.parametrize("bounded", [False, True])
def test_a_newton_step_is_one_operation_and_makes_tensors_of_its_own(
    compiling: Any, bounded: bool
) -> None:
    compiling(None)
    c, momentum, rates, last, gradient = torch.randn(5, 4, device="meta").unbind()
    bounds = (torch.empty(6, device="meta"), torch.empty((), device="meta"), 0.1, 3.8)
    given = c, momentum, rates, last, gradient, 0.9, 0.1, False, *(bounds if bounded else ())
    found = newton_step(*given)
    shapes = [tuple(each.shape) for each in found]
    assert shapes == [(4,), (4,), (), (4,), *([(4,), *[()] * 8] if bounded else [])]

"""Warnings as errors: no rank is left waiting, and what was due has been done."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import SYSTEMS, make
from models import ZOO
from ranks import agreed, replaced, shard, vector
from torch import Tensor

from second_order import DHO2, SecondOrderWarning
from second_order.contract.training import DeferredWarnings, warns_at_its_end
from second_order.kfac import solve_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pool import World

MLP = ZOO["mlp"]
BATCHES = MLP.batches(6, n=12)
BAD = 3  # the step at which there is something to tell
Kept = tuple[list[Tensor], list[str]]


@contextlib.contextmanager
def collected(raised: bool) -> Iterator[list[str]]:
    """The package's warnings, raised as errors or not; `told` catches those that are."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("error" if raised else "always", SecondOrderWarning)
        lines: list[str] = []
        yield lines
        lines += [str(w.message) for w in messages if w.category is SecondOrderWarning]


@contextlib.contextmanager
def told(lines: list[str]) -> Iterator[None]:
    try:
        yield
    except SecondOrderWarning as warning:
        lines.append(str(warning))


class Teller:
    def __init__(self) -> None:
        self._training = SimpleNamespace(warnings=DeferredWarnings())
        self.done: list[str] = []

    @warns_at_its_end
    def outer(self) -> str:
        self._training.warnings.warn("first")
        self.inner()
        self._training.warnings.warn("third")
        self.done.append("outer")
        return "result"

    @warns_at_its_end
    def inner(self) -> None:
        self._training.warnings.warn("second")
        self.done.append("inner")

    @warns_at_its_end
    def fail(self) -> None:
        self._training.warnings.warn("why it fails")
        raise KeyError("failed")


def test_a_warning_names_the_line_of_the_caller() -> None:
    with pytest.warns(SecondOrderWarning) as caught:
        Teller().outer()
    assert all(w.filename == __file__ for w in caught)


def test_errors_are_raised_one_at_a_time_after_the_work() -> None:
    teller = Teller()
    with collected(True):
        with pytest.raises(SecondOrderWarning, match="first"):
            teller.outer()
        assert teller.done == ["inner", "outer"]
        with pytest.raises(SecondOrderWarning, match="second"):
            teller.inner()
        with pytest.raises(SecondOrderWarning, match="now"):
            Teller()._training.warnings.warn("now")


def no_routine(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("failed to converge")


@contextlib.contextmanager
def nothing_decomposes(now: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if now:
            names = ("eigh", "cholesky_ex")
            stack.enter_context(replaced(torch.linalg, dict.fromkeys(names, no_routine)))
            # On the threads of DistKFAC a failure is no decomposition, an exception an error.
            solve = {"solve": lambda *_: {}}
            stack.enter_context(replaced(solve_async, solve))
        yield


def bad_step(rank: int, world_size: int, System: Any, strict: set[int]) -> Kept:
    """One bad step; what is warned of is an error on some ranks, which catch it and go on."""
    model = MLP.model()
    optimizer = make(System, model)
    trajectory = []
    with collected(rank in strict) as lines:
        for step, batch in enumerate(BATCHES):
            x, y = shard(batch, rank, world_size)
            now = step == BAD
            if System is DHO2 and now:
                x = x * float("nan")
            with told(lines), nothing_decomposes(now and System is not DHO2):
                optimizer.zero_grad()
                MLP.loss(model(x.nan_to_num()), y).backward()
                asked = {"curvature_closure": lambda x=x, y=y: MLP.loss(model(x), y)}
                optimizer.step(**(asked if System is DHO2 else {}))
            trajectory.append(vector(model))
    return trajectory, lines


@pytest.mark.parametrize("System", SYSTEMS)
def test_a_rank_whose_warnings_are_errors_stays_in_step(world: World, System: Any) -> None:
    """It has taken the step that it is told of, and takes the next one with the others."""
    results = world.run(bad_step, 2, System, {1}, timeout=20.0)
    agreed([trajectory for trajectory, _ in results])
    (_, lenient), (strict_trajectory, strict) = results
    assert lenient, "something was told"
    assert strict == lenient, "and nothing is lost where it was raised"
    alike = world.run(bad_step, 2, System, set())
    assert all(map(torch.equal, strict_trajectory, alike[0][0]))

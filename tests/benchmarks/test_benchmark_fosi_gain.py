"""The benchmark of DHO2's gain: each goal can be trained, and ratios are seed by seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import fosi_gain
from fosi_gain import GOALS, Gained, goal, ratios, reach


def test_ratios_are_of_the_same_seed() -> None:
    """A base that never arrives has at least taken so long; DHO2 has no ratio then."""
    base = Gained("x", "Adam", 0.1, 0, steps=100, total_steps=100, seconds=2.0)
    dho2_run = Gained("x", "DHO2", 0.1, 0, steps=50, total_steps=50, seconds=1.5)
    others = [replace(base, seed=1, total_steps=200), replace(dho2_run, seed=1, steps=None)]
    unmet = [replace(base, seed=2, steps=None, total_steps=500), replace(dho2_run, seed=2)]
    assert ratios([base, dho2_run, *others, *unmet], "total_steps") == [0.5, math.inf, 0.1]
    assert ratios([dho2_run, base], "seconds") == [0.75]


@pytest.mark.parametrize("name", [n for n in GOALS if n not in ("PINN", "autoencoder")])
def test_a_goal_is_trained_to_its_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An easy target, refreshes included."""
    easy = replace(goal(name), target=2.2)
    monkeypatch.setattr(fosi_gain, "goal", lambda _: easy)
    run = reach(name, "DHO2", 0.01, 0, warmup_steps=1)
    assert run.steps is not None
    assert 0.0 < run.best <= 2.2
    assert run.refreshes == 1
    assert run.products > 2
    assert not run.diverged

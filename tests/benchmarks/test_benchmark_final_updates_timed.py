"""The benchmark of MRDHO2 at equal time: what is compared when, and the rules that are tried."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import final_updates_timed as module
from final_updates_timed import ALONE, Run, Search, Task

TASK = Task("task", nn.Identity, lambda *_: torch.zeros(()), 4, 2, 2, 100, 10, torch.optim.SGD, {})


def run(rule: str, seed: int, seconds: float, losses: list[float]) -> Run:
    return Run("task", rule, seed, {}, losses, seconds, helper_seconds=0.5 * seconds)


def test_a_rule_is_judged_at_the_time_that_the_base_takes() -> None:
    """One of twice the time a step after half of its steps; a faster one at its end."""
    losses, scales = [8.0, 4.0, 2.0, 1.0], (1.0, 2.0, 3.0)
    runs = [run(ALONE, k, 1.0, [s * x for x in losses]) for k, s in enumerate(scales)]
    runs += [run("within", seed, 2.0, [0.1 * x for x in losses]) for seed in range(3)]
    runs += [run("paper", seed, 0.5, losses) for seed in range(3)]
    runs += [run("searched", seed, 9.0, losses) for seed in range(3)]
    within = module.row(TASK, "within", runs)
    assert (within.time, within.helper) == (2.0, 0.5)
    assert within.loss == pytest.approx(0.4)
    assert within.ratio == pytest.approx(0.4 / 2)
    logs = [math.log(0.4 / s) for s in scales]
    assert within.difference == pytest.approx(sum(logs) / 3)
    assert within.error == pytest.approx(torch.tensor(logs).std().item() / math.sqrt(3), rel=1e-5)
    assert module.row(TASK, "paper", runs).loss == 1.0
    assert module.row(TASK, "searched", runs).loss == 1.0, "its time is not counted"


def test_the_search_takes_what_lowers_the_loss_and_nothing_else() -> None:
    """On a quadratic whose pairs are exact, one α is best; from its minimum none is better."""
    H = torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    search = Search([p], lambda step: 0.5 * p @ H @ p, every=1, largest=3)
    p.grad = (H @ p).detach()
    search(0)
    assert search.applied == 1
    torch.testing.assert_close(p.detach(), torch.zeros(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    search(1)
    assert (search.applied, search.epochs) == (1, 2)
    torch.testing.assert_close(p.detach(), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("task", module.tasks(), ids=lambda task: task.name)
def test_every_task_has_a_loss_and_enough_batches(task: Task) -> None:
    assert math.isfinite(task.whole(task.make()))
    assert len(task.curved(0)) * task.epoch_steps >= task.steps
    assert ALONE in task.settings

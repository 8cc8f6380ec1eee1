"""DistKFAC on one process: when inverses come, what goes wrong on its threads, and its options."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from distkfac_training import (
    BATCHES,
    CASE,
    LAYERS,
    BrokenError,
    Dawdle,
    Gate,
    delayed,
    distkfac,
    eventually,
    landed,
    solving,
    threads_of,
)
from optimizer_cases import hook_count, noted, same
from ranks import assert_same_trajectory, go, replaced, vector
from torch import nn

from second_order import DecayingClip, PerStep

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER = 10**9


def train(**options: Any) -> list[torch.Tensor]:
    model = CASE.model()
    with distkfac(model, **options) as optimizer:
        return go(model, optimizer, CASE, BATCHES)


@pytest.mark.parametrize(
    ("staleness", "every", "solver"),
    fractional_product([0, 1, 2, 3], [1, 2, 4], ["inverse", "eigen"], part=2),
)
def test_with_deterministic_staleness_steps_use_inverses_of_that_age(
    staleness: int, every: int, solver: Any
) -> None:
    expected = delayed(staleness, inv_update_steps=every, solver=solver)
    assert not same(expected, delayed(staleness + 1, inv_update_steps=every, solver=solver))
    options = {"max_staleness": staleness, "deterministic": True, "inv_update_steps": every}
    found = train(solver=solver, **options)
    assert_same_trajectory(found, expected)
    with solving(Dawdle(1)):
        assert same(train(solver=solver, inverse_threads=3, **options), found), "it depends on them"


def ages(every: int, staleness: int, steps: int) -> list[int]:
    """After each step, the age of the factors that the inverse in use was made from."""
    used = under_way = None
    found = []
    for step in range(steps):
        if under_way is None and step % every == 0:
            under_way = step
        if under_way is not None and (used is None or step - under_way >= staleness):
            again = under_way < step and step % every == 0
            used = under_way
            under_way = step if again else None
        assert used is not None
        found.append(step + 1 - used)
    return found


@pytest.mark.parametrize(
    ("every", "staleness", "exactly"),
    [
        *((1, 0, True), (1, 1, False), (1, 3, True), (2, 2, False), (2, 4, True)),
        *((3, 3, False), (3, 2, True), (2, 3, False), (4, 0, False)),
    ],
)
def test_a_layer_that_became_due_while_pending_is_submitted_again(
    every: int, staleness: int, exactly: bool
) -> None:
    """With the factors of that step, instead of at the next interval."""
    model = CASE.model()
    gate = Gate()
    found = []
    options = {"max_staleness": staleness, "inv_update_steps": every, "deterministic": exactly}
    with solving(gate), gate.open_when_waited_for(), distkfac(model, **options) as optimizer:
        for step in range(6 * every):
            go(model, optimizer, CASE, [BATCHES[step % len(BATCHES)]])
            (age,) = set(optimizer.staleness.values())
            found.append(age)
        gate.open()
    assert found == ages(every, staleness, 6 * every)
    if staleness % every == 0:
        oldest = staleness + max(every, staleness)
        assert set(found[-every:]) <= set(range(staleness + 1, oldest + 1))


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_an_inverse_is_never_older_than_max_staleness(staleness: int) -> None:
    """Solves end exactly when they are awaited, which equals a fixed staleness."""
    model = CASE.model()
    gate = Gate()
    delays = []
    with (
        solving(gate),
        gate.open_when_waited_for(),
        distkfac(model, max_staleness=staleness) as optimizer,
    ):
        trajectory = []
        for batch in BATCHES:
            trajectory += go(model, optimizer, CASE, [batch])
            delays.append(max(optimizer.delays.values()))
            assert all(age <= 2 * staleness + 2 for age in optimizer.staleness.values())
        gate.open()
    assert delays[0] == 0, "the first one is waited for at once"
    assert set(delays[1:]) - {0} == {staleness}
    assert_same_trajectory(trajectory, delayed(staleness))


def falling_damping(step: int) -> float:
    return 0.5 * 0.6**step


def test_an_inverse_uses_the_damping_of_its_snapshot() -> None:
    model = CASE.model()
    options: dict[str, Any] = {"solver": "eigen", "damping": falling_damping}
    with distkfac(model, max_staleness=2, deterministic=True, **options) as optimizer:
        found = go(model, optimizer, CASE, BATCHES)
    assert_same_trajectory(found, delayed(2, **options))


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = CASE.model()
        self.unused = nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.filterwarnings("ignore:no statistics arrived")
def test_deterministic_inverses_work_next_to_a_layer_without_statistics() -> None:
    model = WithUnused()
    delays = set()
    with distkfac(model, max_staleness=3, deterministic=True) as optimizer:
        for batch in BATCHES:
            eventually(lambda: landed(optimizer))  # ready long before it is time
            go(model, optimizer, CASE, [batch])
            delays |= set(optimizer.delays.values())
    assert delays == {0, 3}


def test_deterministic_ranks_agree_only_when_a_step_waits_for_an_inverse() -> None:
    model = CASE.model()
    agreed = list[int]()
    options = {"deterministic": True, "max_staleness": 2, "inv_update_steps": 4}
    with distkfac(model, **options) as optimizer:
        inverses = optimizer._curvature.inverses
        agree = inverses._agree_on_outcomes

        def counting(*now: Any) -> Any:
            outcomes = agree(*now)
            agreed.extend([optimizer.training.steps] * bool(outcomes))
            return outcomes

        inverses._agree_on_outcomes = counting
        go(model, optimizer, CASE, BATCHES[:1] * 11)
    assert agreed == [0, 6, 10]


def one_factor_failing(solve: Callable[[], Any]) -> Any:
    result = solve()
    del result.decompositions["G"]
    return result


def test_a_failed_factor_on_a_thread_is_reported() -> None:
    model = CASE.model()
    with distkfac(model, max_staleness=0) as optimizer, noted() as warned:
        go(model, optimizer, CASE, BATCHES[:1])
        with solving(one_factor_failing):
            go(model, optimizer, CASE, BATCHES[1:2])
        assert optimizer.summary().failed == len(LAYERS)
    assert all("could not be decomposed at step 1" in line for line in warned)
    assert len(warned) == len(LAYERS)


def test_a_dropped_thread_result_is_not_used_by_a_later_refresh() -> None:
    """Here the later refresh fails before a thread has its factors."""

    def raises(work: Any) -> Any:
        raise BrokenError

    model = CASE.model()
    gate = Gate()
    with distkfac(model, max_staleness=None) as optimizer:
        go(model, optimizer, CASE, BATCHES[:1])
        with solving(gate):
            go(model, optimizer, CASE, BATCHES[1:2])
            inverses = optimizer._curvature.inverses
            assert len(inverses.pending) == len(LAYERS)
            inverses.drop([*inverses.pending])
            gate.open()
        with noted() as warned, replaced(inverses.inverter.pool, {"submit": raises}):
            go(model, optimizer, CASE, BATCHES[2:3])
        assert not any(block.solved for block in optimizer._curvature.plan)
    assert len(warned) == len(LAYERS)
    assert all("BrokenError" in line for line in warned)


def test_the_papers_clip_decays_with_steps() -> None:
    clip = DecayingClip(0.01, 0.9, every=3)
    assert [clip(step) for step in range(7)] == [0.01 * 0.9 ** (step // 3) for step in range(7)]
    assert DecayingClip() == DecayingClip(0.01, 0.96, 100)
    clip = DecayingClip(2e-3, 0.5, every=2)
    expected = delayed(1, kl_clip=lambda step: 2e-3 * 0.5 ** (step // 2))
    found = train(deterministic=True, max_staleness=1, kl_clip=clip)
    assert_same_trajectory(found, expected)
    assert pickle.loads(pickle.dumps(clip)) == clip


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"inverse_threads": 0}, "inverse_threads=0 is below 1; use 1 or more"),
    ({"inverse_device": "cuda"}, "the parameters are on cpu; move the model.*'cpu'"),
    ({"max_staleness": -1}, "max_staleness=-1 .*None for no bound"),
    (
        {"async_inverse": False, "max_staleness": 2},
        "async_inverse=False waits for every inverse, so that max_staleness=2 .*; leave it out",
    ),
    ({"deterministic": True}, "after exactly max_staleness steps; give max_staleness, 10 perhaps"),
    (
        {"deterministic": True, "max_staleness": 2, "stats_workers": 1},
        "deterministic=True does not work with stats_workers=1.*; use stats_workers=0",
    ),
    ({"doubly_factored": {"0": 3}}, r"doubly_factored=\{'0': 3\} is not .*\(locations, channels\)"),
    ({"doubly_factored": {"0": (3, 2)}}, "'0'.*5"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_invalid_options_raise_before_anything_changes(
    options: dict[str, Any], message: str
) -> None:
    model = CASE.model()
    before = vector(model)
    with pytest.raises(ValueError, match=message):
        distkfac(model, **options)
    assert torch.equal(vector(model), before)
    assert (hook_count(model), threads_of()) == (0, 0)


def test_without_a_decay_all_statistics_have_equal_weight() -> None:
    """As many steps are remembered, however often statistics are taken."""
    found = []
    for chosen in (PerStep(0.95), 0.95**3, 0.95):
        model = CASE.model()
        options = {"factor_update_steps": 3, "max_staleness": 0}
        with distkfac(model, factor_decay=chosen, **options) as optimizer:
            found.append(go(model, optimizer, CASE, BATCHES))
    assert_same_trajectory(found[0], found[1])
    assert not same(found[0], found[2])

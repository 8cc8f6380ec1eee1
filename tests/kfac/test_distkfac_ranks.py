"""DistKFAC on many processes, whose threads finish at different times."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from distkfac_training import (
    BATCHES,
    CASE,
    LAYERS,
    LONG,
    BrokenError,
    Dawdle,
    delayed,
    distkfac,
    solving,
    threads_of,
)
from models import ZOO
from optimizer_cases import noted
from ranks import OPTIONS, agreed, assert_same_trajectory, go, vector
from stats_worker_training import owned_by, shards
from torch import Tensor, nn

from second_order import KAISA, DecompositionError
from second_order.kfac.plan import distkfac_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pool import World

NEVER = 10**9


def synchronous(
    rank: int, world_size: int, choices: Sequence[tuple[str, dict[str, Any]]]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Trajectories of KAISA and of DistKFAC."""
    found = []
    for name, options in choices:
        case = ZOO[name]
        pair = []
        chosen = {**OPTIONS, "solver": "inverse", **options}
        synchronous_options = {"precondition_norms": False, "max_staleness": 0}
        for make in (KAISA, partial(distkfac, **synchronous_options)):
            model = case.model()
            with noted():
                optimizer: Any = make(model, **chosen)
            pair.append(go(model, optimizer, case, shards(case.batches(4, 12), rank, world_size)))
            optimizer.close()
        found.append((pair[0], pair[1]))
    return found


CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {}),
    ("mlp", {"solver": "eigen"}),
    ("mlp", {"solver": "eigen", "relative_damping": True}),
    ("conv_grouped", {"inv_update_steps": 2, "base": torch.optim.Adam, "lr": 0.01}),
    ("norms", {"factor_update_steps": 2, "kl_clip": None}),
    ("norms", {"grafting": "gradient", "relative_damping": True}),
]


def test_without_staleness_distkfac_equals_kaisa(world: World) -> None:
    results = world.run(synchronous, 3, CHOICES)
    for i, choice in enumerate(CHOICES):
        expected = agreed([result[i][0] for result in results])
        found = agreed([result[i][1] for result in results])
        assert_same_trajectory(found, expected, rtol=1e-12, hint=choice)


def scheduled(
    rank: int, world_size: int, choices: Sequence[dict[str, Any]]
) -> list[tuple[list[Tensor], list[dict[str, int]], list[dict[str, int]]]]:
    """Trajectories, delays and ages at each step; threads take their time, on each rank its own."""
    found = []
    for options in choices:
        model = CASE.model()
        trajectory = []
        delays = []
        ages = []
        with solving(Dawdle(rank, 0.006)), distkfac(model, **options) as optimizer:
            for batch in shards(BATCHES, rank, world_size):
                trajectory += go(model, optimizer, CASE, [batch])
                delays.append(optimizer.delays)
                ages.append(optimizer.staleness)
        found.append((trajectory, delays, ages))
    return found


def test_parameters_are_equal_on_all_ranks_for_any_thread_schedule(world: World) -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"inverse_threads": 3, "base": torch.optim.Adam, "lr": 0.01},
        {"max_staleness": 1},
        {"max_staleness": 3, "inv_update_steps": 2},
        {"max_staleness": 2, "deterministic": True},
        {"max_staleness": 1, "deterministic": True, "solver": "eigen"},
        {
            "max_staleness": 2,
            "deterministic": True,
            "grafting": "gradient",
            "step_scale": False,
        },
    ]
    results = world.run(scheduled, 3, choices)
    for i, options in enumerate(choices):
        of_choice = [result[i] for result in results]
        found = agreed([trajectory for trajectory, _, _ in of_choice])
        for _, delays, ages in of_choice:
            assert delays == of_choice[0][1]
            assert ages == of_choice[0][2]
            assert all(set(each) == set(LAYERS) for each in delays)
            most = options.get("max_staleness", NEVER)
            assert max(max(each.values()) for each in delays) <= most
        if "deterministic" in options:
            solver = options.get("solver", "inverse")
            scaled = "grafting" in options
            most = options["max_staleness"]
            expected = delayed(most, solver=solver, gradient_scale=scaled)
            assert_same_trajectory(found, expected)


def owners(rank: int, world_size: int) -> list[int]:
    model = nn.ModuleList([nn.Linear(9, 10), *(nn.Linear(4, 5) for _ in range(4))])
    plan = distkfac(model)._curvature.plan
    return [layer.inverse_rank("A") for layer in plan.values()]


def test_inverse_ranks_are_balanced_by_cost(world: World) -> None:
    """10³ + 10³ of one layer are more than 5³ + 5³ of four."""
    assert world.run(owners, 2) == [[0, 1, 1, 1, 1]] * 2


def heads(rank: int, world_size: int) -> list[tuple[float, Tensor, tuple[bool, bool]]]:
    """Of workers that have got their statistics from their own passes alone."""
    model = CASE.model()
    with distkfac(model, max_staleness=0) as optimizer:
        curvature = optimizer._curvature
        spread = partial(distkfac_plan, factors_everywhere=False)
        curvature._system = dataclasses.replace(curvature._system, plan=spread)
        curvature.layers.mark_changed()  # makes a new plan, so each factor goes to its owner
        go(model, optimizer, CASE, shards(BATCHES[:2], rank, world_size))
        known = [block.factors for block in optimizer._curvature.layers.blocks]
    return [
        (float(f.weight), f.means, tuple(letter in f.stored for letter in "AG"))
        for f in known
        if f is not None
    ]


def test_every_worker_has_the_weights_and_traces_of_all_layers(world: World) -> None:
    """The same with stats workers, where each rank stores only the factors of its own layers."""
    alone = heads(0, 1)
    results = world.run(heads, 2)
    assert {presence for *_, presence in results[0]} == {(True, True), (False, False)}
    for result in results:
        for (weight, means, _), (its_weight, its_means, _) in zip(result, alone, strict=True):
            assert weight == its_weight
            torch.testing.assert_close(means, its_means)


def raising(kind: type[BaseException], solve: Callable[[], Any]) -> Any:
    raise kind("out of paper")


# SystemExit and KeyboardInterrupt are not subclasses of Exception, and must not end the process.
RAISED = {kind.__name__: kind for kind in (BrokenError, SystemExit, KeyboardInterrupt)}


def plain(solve: Callable[[], Any]) -> Any:
    return solve()


def broken(
    rank: int, world_size: int, kind: str, options: dict[str, Any]
) -> tuple[list[Tensor], list[tuple[int, str]], list[str], list[str]]:
    """Rank 1's solves of steps 2 to 5 raise; errors are caught, and training continues.

    Returns:
        The trajectory; steps and errors; layers that rank 1 owns; warnings.
    """
    model = CASE.model()
    errors = []
    trajectory = []
    work = partial(raising, RAISED[kind])
    with noted() as warned, distkfac(model, **options) as optimizer:
        for step, batch in enumerate(shards(BATCHES, rank, world_size)):
            with solving(work if rank == 1 and 2 <= step < 6 else plain):
                try:
                    go(model, optimizer, CASE, [batch])
                except DecompositionError as error:
                    errors.append((step, str(error)))
            trajectory.append(vector(model))
        owned = [b.name for b, o in owned_by(optimizer) if o == 1]
        assert max(optimizer.staleness.values()) <= 3, "refreshes succeed again"
    assert threads_of() == 0
    return trajectory, errors, owned, warned


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("BrokenError", 2), ("BrokenError", 3), ("SystemExit", 2), ("KeyboardInterrupt", 2)],
)
def test_an_exception_on_a_thread_is_a_failed_refresh_on_all_ranks(
    world: World, kind: str, world_size: int
) -> None:
    """With a warning about each layer, and an error once it is the third in a row."""
    options = {"max_staleness": 0}
    results = world.run(broken, world_size, kind, options, timeout=LONG)
    agreed([trajectory for trajectory, *_ in results])
    owned = results[1][2]
    assert owned
    for rank, (_, errors, _, warned) in enumerate(results):
        assert [step for step, _ in errors] == [4, 5]
        assert errors == results[0][1]
        assert "3 refreshes in a row" in errors[0][1]
        for name in owned:
            assert repr(name) in errors[0][1]
            (line,) = [each for each in warned if f"layer {name!r}" in each]
            assert "could not be decomposed at step 2" in line
            assert (f"({kind}: out of paper)" in line) == (rank == 1)

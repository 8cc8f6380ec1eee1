"""The option `debug`: if parameters or states differ between ranks, all ranks raise an error."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import ZOO
from optimizer_cases import asking, each_of_five, make, same, take
from ranks import agreed, shard, vector
from torch import nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, RankMismatchError
from second_order.optimizers import consistency
from second_order.optimizers.consistency import BLOCK_SIZE, checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
CASE = ZOO["mlp"]
BATCHES = CASE.batches(6, n=12)
ADAM = {"base": torch.optim.Adam, "lr": 0.01}
CHOICES: list[tuple[int, Any, dict[str, Any]]] = [
    (2, KAISA, ADAM),
    (3, KAISA, {"grad_worker_fraction": 1 / 3, "factor_exchange": "reduce"}),
    (2, DPKFAC, {"momentum": 0.9}),
    (2, DistKFAC, {}),
    (3, DistKFAC, {"stats_workers": 1, "inverse_threads": 1, "helper_timeout": 20.0}),
    (2, DHO2, ADAM),
    (2, DHO2, {"layout": "column", **ADAM}),
    (3, MRDHO2, {"helper_timeout": 20.0}),
]


@given(st.lists(st.floats(width=32), min_size=2, max_size=20, unique=True), st.data())
def test_the_checksum_depends_on_positions(numbers: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(numbers)
    order = data.draw(st.permutations(range(len(numbers))))
    changed = tensor[list(order)]
    are_equal = torch.equal(tensor.view(torch.int32), changed.view(torch.int32))
    assert (checksum(tensor) == checksum(changed)) is are_equal


def test_large_parameters_are_read_in_blocks() -> None:
    tensor = torch.zeros(2 * BLOCK_SIZE + 5)
    found = {checksum(tensor)}
    for at in (0, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 4):
        changed = tensor.clone()
        changed[at] = 1.0
        found.add(checksum(changed))
    assert len(found) == 6
    powers = torch.ones(2**13, dtype=torch.float64)
    powers[0] = 2.0
    assert len({checksum(powers.roll(n)) for n in (0, 1, 2**11, 2**12)}) == 4


def go(rank: int, world_size: int, model: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    helps = getattr(optimizer, "role", "worker") != "worker"
    size = world_size - (1 if hasattr(optimizer, "role") and world_size == 3 else 0)
    trajectory = []
    for i in steps:
        take(model, optimizer, shard(BATCHES[i], 0 if helps else rank, size))
        trajectory.append(vector(model))
    return trajectory


def trained(rank: int, world_size: int, System: Any, options: dict[str, Any]) -> Any:
    with make(System, model := CASE.model(), **options) as optimizer:
        found = go(rank, world_size, model, optimizer, range(4))
        saved = optimizer._consistency.steps_between_checksums
    return getattr(optimizer, "role", "worker") == "worker", found, saved


@pytest.mark.parametrize(("size", "System", "options"), CHOICES)
def test_debug_does_not_change_training(
    world: World, size: int, System: Any, options: dict[str, Any]
) -> None:
    sync = {"max_staleness": None} if "stats_workers" in options else {}
    runs = [
        [found for works, found, _ in each if works]
        for each in (
            world.run(trained, size, System, {**options, **sync, "debug": debug})
            for debug in (False, 1)
        )
    ]
    if not sync and System is not MRDHO2:  # what helpers send in time depends on theirs
        assert same(agreed(runs[0]), agreed(runs[1]))
    agreed(runs[1])
    assert not same(runs[1][0][:1], runs[1][0][1:2]), "it has trained"


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """Change a bit of the first number, the last one by default."""
    words = tensor.detach().view(-1).view(torch.int64)
    words[0] ^= 1 << bit


def of_parameter(optimizer: Any, model: nn.Module) -> None:
    flip(model[2].weight, bit=8)  # rounding may change the last one back


def of_nan(optimizer: Any, model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan


def parted(
    rank: int,
    world_size: int,
    System: Any,
    options: dict[str, Any],
    change: Callable[[Any, Any], None],
    at: int,
    changed: int,
    steps: int = 6,
) -> tuple[str, int, bool]:
    """The error, the steps taken until then, and whether the step of the error changed anything."""
    model = CASE.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make(System, model, **options)
    for i in range(steps):
        if i == at and rank == changed:
            change(optimizer, model)
        before = vector(model)
        try:
            go(rank, world_size, model, optimizer, range(i, i + 1))
        except RankMismatchError as error:
            after = vector(model)
            return str(error), i, torch.equal(after.view(torch.int64), before.view(torch.int64))
    return "", steps, True


W = "parameter '2.weight'"
CHANGES: list[Any] = [
    (3, KAISA, of_parameter, 2, f"rank 0 has .{W}: .* rank 2 has .{W}"),
    (2, DPKFAC, of_parameter, 1, f"rank 0 has .{W}: .* rank 1 has .{W}"),
    (2, DHO2, of_nan, 1, f"rank 0 has .{W}: .* rank 1 has .{W}"),
    (2, MRDHO2, of_parameter, 1, f"rank 0 has .{W}: .* rank 1 has .{W}"),
]


@pytest.mark.parametrize(("size", "System", "change", "changed", "error_text"), CHANGES)
def test_a_differing_bit_raises_with_the_rank_before_the_next_step(
    world: World, size: int, System: Any, change: Any, changed: int, error_text: str
) -> None:
    """At the next comparison, on every rank, and not before."""
    options = {**ADAM, "debug": 2}
    if System is MRDHO2:
        options["helper_ranks"] = 0
    at = 4 if System in (DHO2, MRDHO2) else 3  # DHO2's rows are sent again at each step
    for message, steps, unchanged in world.run(parted, size, System, options, change, at, changed):
        assert steps == 4
        assert unchanged
        assert message.startswith("the ranks are out of sync: ")
        with pytest.raises(RankMismatchError, match=error_text):
            raise RankMismatchError(message)


def test_without_debug_differences_are_not_detected(world: World) -> None:
    for change, options in ((of_parameter, {}), (of_parameter, {"debug": 10})):
        found = world.run(parted, 2, KAISA, {**ADAM, **options}, change, 3, 1)
        assert [steps for _, steps, _ in found] == [6, 6]


def different_seeds(rank: int, world_size: int) -> str:
    torch.manual_seed(rank)
    model = nn.Linear(3, 2).double()
    optimizer = KAISA(model, lr=0.1, gradient_averaging=False, debug=True)
    try:
        optimizer.step()
    except RankMismatchError as error:
        return str(error)
    return ""


def test_the_first_step_is_also_compared(world: World) -> None:
    for message in world.run(different_seeds, 2):
        assert "the ranks are out of sync: rank 0 has [parameter 'weight': " in message
        assert "average (gradient_averaging=)" in message


@each_of_five
def test_one_process_compares_nothing(System: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CASE.model()
    twin = CASE.model()
    optimizer = make(System, model, debug=True)
    without = make(System, twin)
    monkeypatch.setattr(consistency, "_checksums", None)
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
        take(twin, without, batch)
    assert same(model, twin)
    assert asking(model, optimizer, BATCHES[0]) is not None


def with_failing_callable(rank: int, world_size: int, option: str) -> tuple[str, int]:
    """The error of a step at which a callable raises on rank 1, and the number of that step."""

    def interval(step: int) -> int:
        if step == 2 and rank == 1:
            raise OSError("no such file")
        return 1

    model = CASE.model()
    optimizer = make(KAISA, model, **{"inv_update_steps": 1, option: interval})
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
    with pytest.raises(RankMismatchError) as error:
        take(model, optimizer, BATCHES[2])
    return str(error.value), optimizer._training.steps


@pytest.mark.parametrize("option", ["inv_update_steps", "factor_update_steps", "damping"])
def test_all_ranks_raise_if_a_callable_raises_on_one(world: World, option: str) -> None:
    for message, steps in world.run(with_failing_callable, 2, option):
        assert f"rank 1 has [{option}: OSError: no such file]" in message
        assert steps == 2

"""The option `debug`: ranks whose parameters or states have parted are told which, and stop.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import asking, each_of_five, make, same, take
from hypothesis import given
from hypothesis import strategies as st
from models import ZOO
from ranks import agreed, counted, shard, vector
from torch import nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, RankMismatchError
from second_order.contract import consistency
from second_order.distributed import agreement
from second_order.distributed.agreement import BLOCK, checksum

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


# Checksums.


def test_every_bit_of_every_dtype_counts() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.ones(9).to(dtype)
        before = checksum(tensor)
        size = tensor.element_size()
        seen = {before}
        for at in range(9 * size):
            for bit in range(8):
                changed = tensor.clone().view(torch.uint8)
                changed[at] ^= 1 << bit
                seen.add(checksum(changed.view(dtype)))
        assert len(seen) == 1 + 9 * size * 8


@given(st.lists(st.floats(width=32), min_size=2, max_size=20, unique=True), st.data())
def test_places_count(numbers: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(numbers)
    order = data.draw(st.permutations(range(len(numbers))))
    changed = tensor[list(order)]
    alike = torch.equal(tensor.view(torch.int32), changed.view(torch.int32))
    assert (checksum(tensor) == checksum(changed)) is alike


def test_large_ones_are_read_in_blocks() -> None:
    tensor = torch.zeros(2 * BLOCK + 5)
    found = {checksum(tensor)}
    for at in (0, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 4):
        changed = tensor.clone()
        changed[at] = 1.0
        found.add(checksum(changed))
    assert len(found) == 6
    powers = torch.ones(2**13, dtype=torch.float64)
    powers[0] = 2.0
    assert len({checksum(powers.roll(n)) for n in (0, 1, 2**11, 2**12)}) == 4


def test_a_nan_is_that_nan_and_zero_has_a_sign() -> None:
    nan, zero = torch.full((3,), torch.nan), torch.zeros(3)
    assert checksum(nan) == checksum(nan.clone())
    other = nan.clone().view(torch.int32)
    other[1] += 1
    assert torch.isnan(other.view(torch.float32)).all()
    assert checksum(nan) != checksum(other.view(torch.float32))
    assert checksum(zero) != checksum(-zero)


def test_views_and_scalars_are_read_as_they_look() -> None:
    square = torch.arange(6.0).view(2, 3)
    assert checksum(square.T) == checksum(square.T.contiguous())
    assert checksum(torch.empty(0)) == 0 != checksum(torch.tensor(2.0))
    state = torch.get_rng_state()
    agreement._multipliers.cache_clear()
    checksum(square)
    assert torch.equal(torch.get_rng_state(), state)


# Trainings.


def started(rank: int, world_size: int, System: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    model = CASE.model()
    return model, make(System, model, **options)


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
        saved = optimizer._consistency.every
    return getattr(optimizer, "role", "worker") == "worker", found, saved


@pytest.mark.parametrize(("size", "System", "options"), CHOICES)
def test_ranks_that_are_alike_train_bit_for_bit_as_without(
    world: World, size: int, System: Any, options: dict[str, Any]
) -> None:
    """Factors, inverses, eigenvalues and the base's state are alike, where each has them whole."""
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


def flip(tensor: torch.Tensor) -> None:
    """Change the last bit of the first number."""
    words = tensor.detach().view(-1).view(torch.int64)
    words[0] ^= 1


def of_parameter(optimizer: Any, model: nn.Module) -> None:
    flip(model[2].weight)


def of_base(optimizer: Any, model: nn.Module) -> None:
    flip(optimizer.state[model[2].weight]["base"]["exp_avg_sq"])


def of_factor(optimizer: Any, model: nn.Module) -> None:
    flip(optimizer._curvature.layers.blocks[1].factors.stored["G"])


def of_inverse(optimizer: Any, model: nn.Module) -> None:
    flip(optimizer._curvature.layers.blocks[1].inverse.tensors[0])


def of_nan(optimizer: Any, model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan


def of_eigenvalue(optimizer: Any, model: nn.Module) -> None:
    flip(optimizer._curvature.subspace.values)


def of_step(optimizer: Any, model: nn.Module) -> None:
    optimizer.state[model[0].bias]["base"]["step"] += 1


def of_absence(optimizer: Any, model: nn.Module) -> None:
    del optimizer.state[model[0].bias]["base"]["exp_avg"]


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


# What is renewed at each step would be alike again before it is compared.
KEPT = {of_factor: {"factor_update_steps": 10}, of_inverse: {"inv_update_steps": 10}}
W = "parameter '2.weight'"
CHANGES: list[Any] = [
    (3, KAISA, of_parameter, 2, f"rank 0 has .{W}: .* rank 2 has .{W}"),
    (3, KAISA, of_base, 0, f"rank 1 has .the base's 'exp_avg_sq' of {W}: .* rank 0 has .the"),
    (3, DistKFAC, of_factor, 1, "rank 0 has .factor G of layer '2': .* rank 1 has .factor"),
    (2, KAISA, of_inverse, 0, "rank 0 has .tensor 0 of the inverse of layer '2': .* rank 1"),
    (2, DPKFAC, of_parameter, 1, f"rank 0 has .{W}: .* rank 1 has .{W}"),
    (2, DHO2, of_nan, 1, f"rank 0 has .{W}: .* rank 1 has .{W}"),
    (2, DHO2, of_eigenvalue, 1, "rank 0 has .the eigenvalues: .* rank 1 has .the"),
    (2, KAISA, of_step, 1, "rank 0 has .the base's 'step' of parameter '0.bias': .* rank 1 has"),
    (2, KAISA, of_absence, 1, "rank 0 has .the base's 'exp_avg' of parameter '0.bias': "),
    (2, MRDHO2, of_parameter, 1, f"rank 0 has .{W}: .* rank 1 has .{W}"),
]


@pytest.mark.parametrize(("size", "System", "change", "changed", "told"), CHANGES)
def test_a_parted_bit_is_named_with_its_rank_before_a_further_step(
    world: World, size: int, System: Any, change: Any, changed: int, told: str
) -> None:
    """At the next comparison, on every rank, and not before."""
    options = {**ADAM, "debug": 2, **KEPT.get(change, {})}
    if System is MRDHO2:
        options["accelerators"] = 0
    # DHO2's rows are sent anew at each step; Adam fails without its state; and others move weights.
    at = 4 if System in (DHO2, MRDHO2) or change in (of_absence, of_step, of_inverse) else 3
    for message, steps, unchanged in world.run(parted, size, System, options, change, at, changed):
        assert steps == 4
        assert unchanged
        assert message.startswith("the ranks have parted: ")
        with pytest.raises(RankMismatchError, match=told):
            raise RankMismatchError(message)


def test_without_the_option_nobody_tells(world: World) -> None:
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


def test_the_first_step_is_compared_too(world: World) -> None:
    for message in world.run(different_seeds, 2):
        assert "the ranks have parted: rank 0 has [parameter 'weight': " in message
        assert "average (gradient_averaging=)" in message


def other_intervals(rank: int, world_size: int) -> str:
    try:
        KAISA(CASE.model(), lr=0.1, debug=rank + 1)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_intervals_must_be_the_same(world: World) -> None:
    for message in world.run(other_intervals, 2):
        assert "rank 0 has [debug: every 1 steps], rank 1 has [debug: every 2 steps]" in message


def accumulated(rank: int, world_size: int) -> Any:
    """With a closure, two passes a step, a scheduler, and a checkpoint on the way."""
    model, optimizer = started(rank, world_size, KAISA, {**ADAM, "debug": 2})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    calls = []

    def closure() -> Any:
        calls.append(1)
        optimizer.zero_grad()
        for x, y in (shard(batch, rank, world_size) for batch in BATCHES[:2]):
            (CASE.loss(model(x), y) / 2).backward()
        return torch.tensor(0.0)

    for _ in range(3):
        optimizer.step(closure)
        scheduler.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other, again = started(rank, world_size, KAISA, {**ADAM, "debug": 3})
    other.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    with counted("all_reduce", "all_gather_object") as few:
        take(other, again, shard(BATCHES[2], rank, world_size))
    with counted("all_reduce", "all_gather_object") as fewer:
        take(other, again, shard(BATCHES[3], rank, world_size))
    if rank == 1:
        of_parameter(again, other)
    try:
        for batch in BATCHES[:3]:
            take(other, again, shard(batch, rank, world_size))
    except RankMismatchError:
        return len(calls), again._training.steps, few - fewer, "debug" in repr(saved)
    return None


def test_it_goes_with_closures_accumulation_schedulers_and_checkpoints(world: World) -> None:
    """A comparison adds no message; the option is none of a checkpoint's."""
    for calls, steps, more, saved in world.run(accumulated, 2):
        assert calls == 3
        assert steps == 6, "a multiple of the interval"
        assert not more
        assert not saved


@each_of_five
def test_one_process_compares_nothing(System: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = CASE.model(), CASE.model()
    optimizer, without = make(System, model, debug=True), make(System, twin)
    monkeypatch.setattr(consistency, "_checksums", None)
    for batch in BATCHES[:2]:
        take(model, optimizer, batch)
        take(twin, without, batch)
    assert same(model, twin)
    assert asking(model, optimizer, BATCHES[0]) is not None

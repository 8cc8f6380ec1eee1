"""Layers frozen between backward and step: the ranks stay together, bit for bit.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import asking, make
from models import ZOO
from ranks import agreed, assert_same_trajectory, shard, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2, DPKFAC, KAISA, DistKFAC, SecondOrderWarning

if TYPE_CHECKING:
    from pool import World

MLP = ZOO["mlp"]
BATCHES = MLP.batches(5, n=12)
FREEZE, THAW = 2, 4
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "KAISA": (KAISA, {"momentum": 0.9}),
    "KAISA-reduce": (KAISA, {"factor_exchange": "reduce", "grad_worker_fraction": 0.5}),
    "DPKFAC": (DPKFAC, {"momentum": 0.9}),
    "DPKFAC-all-reduce": (DPKFAC, {"gradient_exchange": "all_reduce"}),
    "DistKFAC": (DistKFAC, {"base": torch.optim.Adam, "lr": 0.01}),
    "DHO2-column": (DHO2, {"layout": "column", "largest": 0, "smallest": 0}),
    "DHO2-row": (DHO2, {"momentum": 0.9}),
}


def frozen_too_late(rank: int, world_size: int, name: str) -> list[Tensor]:
    """The first layer is frozen after a step's backward, and thaws two steps later."""
    System, options = CASES[name]
    model = MLP.model()
    optimizer, found = make(System, model, **options), []
    curved = shard(BATCHES[0], rank, world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        for step, batch in enumerate(BATCHES):
            x, y = shard(batch, rank, world_size)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if step in (FREEZE, THAW):
                model[0].requires_grad_(step == THAW)
            optimizer.step(**asking(model, optimizer, curved))
            found.append(vector(model))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_layer_frozen_after_its_backward_keeps_the_ranks_together(
    world: World, name: str
) -> None:
    found = agreed(world.run(frozen_too_late, 2, name))
    if name.startswith(("KAISA", "DistKFAC", "DHO2-column")):
        # As on one process, where the base takes one more step with the gradient that there is.
        assert_same_trajectory(found, frozen_too_late(0, 1, name))


def own_gradients(rank: int, world_size: int, name: str) -> tuple[list[Tensor], list[str]]:
    """A frozen layer thaws for a backward pass alone: no rank was to average its gradient."""
    System, options = CASES[name]
    model = MLP.model()
    model[0].requires_grad_(False)
    params = list(model.parameters())
    optimizer, found = make(System, params, model=model, **options), []
    curved = shard(BATCHES[0], rank, world_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SecondOrderWarning)
        for step, batch in enumerate(BATCHES):
            x, y = shard(batch, rank, world_size)
            model[0].requires_grad_(step in (1, 2))
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            model[0].requires_grad_(False)
            optimizer.step(**asking(model, optimizer, curved))
            found.append(vector(model))
    said = [str(w.message) for w in caught if "frozen parameters" in str(w.message)]
    return found, said


@pytest.mark.parametrize("name", CASES)
def test_gradients_that_nobody_averaged_are_not_stepped_and_that_is_told(
    world: World, name: str
) -> None:
    results = world.run(own_gradients, 2, name)
    agreed([found for found, _ in results])
    size = sum(p.numel() for p in MLP.model()[0].parameters())
    for found, said in results:
        assert all(torch.equal(each[:size], found[0][:size]) for each in found)
        assert len(said) == 1
        assert "have gradients that the processes have not averaged" in said[0]
        assert "'0.weight', '0.bias'; call zero_grad() after freezing" in said[0]


class Branches(nn.Module):
    """A layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, *, own: bool) -> Tensor:
        x = torch.tanh(self.shared(x))
        y: Tensor = self.head(self.own(x) if own else x)
        return y


def used_by_one(rank: int, world_size: int, name: str) -> list[Tensor]:
    """What only rank 0 has a gradient of is frozen after the backward, everywhere."""
    torch.manual_seed(0)
    System, options = CASES[name]
    model, found = Branches().double(), []
    optimizer = make(System, model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        for step in range(4):
            x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
            optimizer.zero_grad()
            cross_entropy(model(x, own=rank == 0), y).backward()
            if step == FREEZE:
                model.own.requires_grad_(False)
            optimizer.step()
            found.append(vector(model))
    return found


@pytest.mark.parametrize("name", ["KAISA", "DPKFAC", "DPKFAC-all-reduce", "DistKFAC"])
def test_a_frozen_layer_that_one_rank_alone_has_used(world: World, name: str) -> None:
    agreed(world.run(used_by_one, 2, name))


def frozen_under_the_hook(rank: int, world_size: int) -> list[Tensor]:
    """DPKFAC's hook has taken the mean to one rank when the layer is frozen."""
    model, found = MLP.model(), []
    optimizer: Any = None
    wrapped = DistributedDataParallel(model)
    optimizer = make(DPKFAC, wrapped)
    optimizer.register_owner_hook(wrapped)
    for step, batch in enumerate(BATCHES):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        if step == FREEZE:
            model[0].requires_grad_(False)
        optimizer.step()
        found.append(vector(model))
        if step == FREEZE:
            break  # DistributedDataParallel does not follow
    return found


def test_a_layer_frozen_after_the_owner_hook_has_run(world: World) -> None:
    agreed(world.run(frozen_under_the_hook, 2))


def added_then_frozen(rank: int, world_size: int) -> list[Tensor]:
    """A group that is added and frozen before it has ever been stepped."""
    model, found = MLP.model(), []
    optimizer = make(KAISA, list(model[2:].parameters()), model=model)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    for step, batch in enumerate(BATCHES):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if step == 0:
            model[0].requires_grad_(False)
        optimizer.step()
        found.append(vector(model))
    return found


def test_an_added_group_frozen_before_its_first_step(world: World) -> None:
    assert_same_trajectory(agreed(world.run(added_then_frozen, 2)), added_then_frozen(0, 1))

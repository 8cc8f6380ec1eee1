"""Layers frozen between backward and step: the ranks stay together, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from models import ZOO
from optimizer_cases import asking, make, noted
from ranks import agreed, shard, vector
from reference import cross_entropy
from torch import Tensor

from second_order import DHO2, DPKFAC, KAISA, DistKFAC

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

MLP = ZOO["mlp"]
BATCHES = MLP.batches(5, n=12)
FREEZE = 2
THAW = 4
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "KAISA": (KAISA, {"momentum": 0.9}),
    "KAISA-reduce": (KAISA, {"factor_exchange": "reduce", "grad_worker_fraction": 0.5}),
    "DPKFAC": (DPKFAC, {"momentum": 0.9}),
    "DPKFAC-all-reduce": (DPKFAC, {"gradient_exchange": "all_reduce"}),
    "DistKFAC": (DistKFAC, {"base": torch.optim.Adam, "lr": 0.01}),
    "DHO2-column": (DHO2, {"layout": "column", "num_largest": 0, "num_smallest": 0}),
    "DHO2-row": (DHO2, {"momentum": 0.9}),
}


def each_case(rank: int, world_size: int, train: Callable[[int, int, str], Any]) -> dict[str, Any]:
    return {name: train(rank, world_size, name) for name in CASES}


def frozen_too_late(rank: int, world_size: int, name: str) -> list[Tensor]:
    """The first layer is frozen after a step's backward, and thaws two steps later."""
    System, options = CASES[name]
    model = MLP.model()
    optimizer = make(System, model, **options)
    found = []
    curved = shard(BATCHES[0], rank, world_size)
    with noted():
        for step, batch in enumerate(BATCHES):
            x, y = shard(batch, rank, world_size)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if step in (FREEZE, THAW):
                model[0].requires_grad_(step == THAW)
            optimizer.step(**asking(model, optimizer, curved))
            found.append(vector(model))
    return found


def test_freezing_a_layer_after_backward_keeps_ranks_in_sync(world: World) -> None:
    results = world.run(each_case, 2, frozen_too_late)
    for name in CASES:
        agreed([by_case[name] for by_case in results])


def own_gradients(rank: int, world_size: int, name: str) -> tuple[list[Tensor], list[str]]:
    """A frozen layer thaws during a backward pass, so no rank averages its gradient."""
    System, options = CASES[name]
    model = MLP.model()
    model[0].requires_grad_(False)
    params = list(model.parameters())
    optimizer = make(System, params, model=model, **options)
    found = []
    curved = shard(BATCHES[0], rank, world_size)
    with noted() as warned:
        for step, batch in enumerate(BATCHES):
            x, y = shard(batch, rank, world_size)
            model[0].requires_grad_(step in (1, 2))
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            model[0].requires_grad_(False)
            optimizer.step(**asking(model, optimizer, curved))
            found.append(vector(model))
    return found, [line for line in warned if "frozen parameters" in line]


def test_gradients_that_no_rank_averaged_are_not_stepped_with_a_warning(world: World) -> None:
    ranks = world.run(each_case, 2, own_gradients)
    size = sum(p.numel() for p in MLP.model()[0].parameters())
    for name in CASES:
        results = [by_case[name] for by_case in ranks]
        agreed([found for found, _ in results])
        for found, messages in results:
            assert all(torch.equal(each[:size], found[0][:size]) for each in found)
            (message,) = messages
            assert "gradients, which the ranks do not average" in message
            assert "'0.weight', '0.bias'; call zero_grad() after you freeze parameters" in message

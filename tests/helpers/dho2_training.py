"""What the tests of DHO2 share: a network, its batches, and an optimizer that finds exact pairs.

model = CASE.model()
trajectory = go(model, dho2(model, momentum=0.9), BATCHES)
parallel = world.run(train_spread, 3, {"momentum": 0.9})
assert_same_trajectory(agreed(parallel), alone(momentum=0.9))
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from models import ZOO
from ranks import shard, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reference import Batch

CASE = ZOO["mlp"]
BATCHES = CASE.batches(12, n=12)
CURVED = CASE.batch(30, seed=99)
SGD = torch.optim.SGD
ADAM = torch.optim.Adam
# Every pair to rounding, at steps 2, 6 and 10.
OPTIONS: dict[str, Any] = {
    "num_largest": 4,
    "num_smallest": 1,
    "warmup_steps": 2,
    "curvature_interval": 4,
    "lanczos_iterations": 111,
    "lanczos_tol": 1e-12,
}


# Where nothing depends on how good the pairs are.
QUICK: dict[str, Any] = {"lanczos_iterations": 10, "lanczos_tol": 0.0}
BRIEF = {**OPTIONS, **QUICK}


def closure_of(model: nn.Module, batch: Batch = CURVED) -> Callable[[], Tensor]:
    return lambda: cross_entropy(model(batch[0]), batch[1])


def dho2(model: nn.Module, params: Any = None, **options: Any) -> DHO2:
    options = {"lr": 0.1, "curvature_closure": closure_of(model), **OPTIONS, **options}
    return DHO2(model if params is None else params, **options)


def take(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def go(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> list[Tensor]:
    """The parameters after each step."""
    trajectory = []
    for batch in batches:
        take(model, optimizer, batch)
        trajectory.append(vector(model))
    return trajectory


# On many processes: neither n = 89 nor the five eigenpairs divide by 2, 3 or 4, and curvature
# batches are ragged.

LAYOUTS = "row", "column"
STEPS = 11
SIZE = 89
COUNT = 5
RAGGED = {1: [0, 30], 2: [0, 9, 30], 3: [0, 4, 17, 30], 4: [0, 3, 7, 18, 30]}
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"base": ADAM, "lr": 0.02},
}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    widths = [5, 6, 5, 3]
    layers = [p for d in itertools.pairwise(widths) for p in (nn.Linear(*d), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def curvature(model: nn.Module, rank: int, world_size: int) -> Callable[[], tuple[Tensor, int]]:
    """Of this rank's part of the curvature batch."""
    a, b = RAGGED[world_size][rank : rank + 2]
    x, y = CURVED
    return lambda: (cross_entropy(model(x[a:b]), y[a:b]), b - a)


def shards(batches: Sequence[Batch], rank: int, world_size: int) -> list[Batch]:
    return [shard(batch, rank, world_size) for batch in batches]


def spread(model: nn.Module, rank: int, world_size: int, **options: Any) -> DHO2:
    closure = curvature(model, rank, world_size)
    return DHO2(model, **{"lr": 0.1, "curvature_closure": closure, **BRIEF, **options})


def train_spread(
    rank: int, world_size: int, options: dict[str, Any], wrap: bool = False, steps: int = STEPS
) -> list[Tensor]:
    model: nn.Module = network()
    if wrap:
        model = DistributedDataParallel(model)
    optimizer = spread(model, rank, world_size, **options)
    return go(model, optimizer, shards(BATCHES[:steps], rank, world_size))


def alone(**options: Any) -> list[Tensor]:
    return train_spread(0, 1, options)

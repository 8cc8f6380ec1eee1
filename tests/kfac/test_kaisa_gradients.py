"""KAISA on many processes: where they start from, and layers that are not used.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import factors
from models import ZOO
from placed import Forked
from ranks import OPTIONS, agreed, assert_same_trajectory, follow, kaisa, shard, vector
from reference import cross_entropy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from second_order import SecondOrderWarning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4, n=12)
HALVES = {"grad_worker_fraction": 0.5}


def train_forked(
    rank: int, world_size: int, uses: Sequence[set[int]], wrap: bool, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor | None, Any]]:
    """`uses`: for each step, the ranks that take the branch."""
    torch.manual_seed(0)
    model = Forked().double()
    called = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
    optimizer = kaisa(called, weight_decay=0.1, **options)
    records = []
    for batch, users in zip(BATCHES, uses, strict=False):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy(called(x, rank in users), y).backward()
        optimizer.step()
        grad = model.branch.weight.grad
        records.append(
            (vector(model), None if grad is None else grad.clone(), factors(optimizer)["branch"])
        )
    return records


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "DDP"])
def test_a_layer_that_some_ranks_skip(world: World, workers: int, wrap: bool) -> None:
    """It takes part with what the others saw; skipped by all, it has no gradient and stays."""
    uses: list[set[int]] = [set(), {0, 1, 2, 3}, {1, 2}, set()]
    options = {"grad_worker_fraction": workers / 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        results = world.run(train_forked, 4, uses, wrap, options)
    for step in range(4):
        agreed([[rank[step][0]] for rank in results])
    start = vector(Forked().double()).numel()
    assert all(len(rank[0][0]) == start for rank in results)
    for rank in results:
        gradients = [gradient for _, gradient, _ in rank]
        assert gradients[0] is None
        assert gradients[1] is not None
        assert gradients[2] is not None
        if not wrap:  # DDP leaves what zero_grad left, or a zero
            assert gradients[3] is None
        averages = [average for _, _, average in rank]
        assert torch.equal(averages[0][0], torch.zeros_like(averages[0][0]))
        assert torch.equal(averages[3][0], averages[2][0]), "nobody saw it in the last step"
    branch = slice(36, 36 + 42)  # the trunk has 5 x 6 + 6
    for rank in results:
        before, after = rank[2][0][branch], rank[3][0][branch]
        if not wrap:
            assert torch.equal(before, after)


class Dead(Forked):
    """Whose branch is off for every input."""

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.head(x + torch.relu(self.branch(x) - 1e3) if branch else x)


def train_dead(rank: int, world_size: int, user: int, colocate: bool) -> tuple[Any, list[str]]:
    """One rank alone calls the branch."""
    torch.manual_seed(0)
    model = Dead().double()
    optimizer = kaisa(model, colocate_factors=colocate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in BATCHES[:2]:
            x, y = shard(batch, rank, world_size)
            optimizer.zero_grad()
            cross_entropy(model(x, rank == user), y).backward()
            optimizer.step()
    plan = {b.name: each.solvers for b, each in optimizer._curvature.plan.items()}
    return plan["branch"], [str(w.message) for w in caught]


@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize("user", [0, 1])
def test_a_dead_layer_that_one_rank_alone_calls_is_not_called_unused(
    world: World, user: int, colocate: bool
) -> None:
    """One rank decomposes its factors, or each of two does one, and one of them sees it called."""
    for solvers, warned in world.run(train_dead, 2, user, colocate):
        assert len(set(solvers)) == (1 if colocate else 2)
        assert warned == []


def train_without_layers(rank: int, world_size: int, how: str) -> list[Tensor]:
    model = MLP.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = kaisa(model, skip_layers=["*"] if how == "skipped" else (), **HALVES)
    if how == "closed":
        optimizer.close()
    return follow(rank, world_size, model, optimizer, MLP, BATCHES)


@pytest.mark.parametrize("how", ["skipped", "closed"])
def test_with_nothing_to_precondition_it_is_the_base(world: World, how: str) -> None:
    model = MLP.model()
    base = torch.optim.SGD(model.parameters(), lr=OPTIONS["lr"])
    expected = follow(0, 1, model, base, MLP, BATCHES)
    assert_same_trajectory(agreed(world.run(train_without_layers, 4, how)), expected, rtol=1e-12)

"""KAISA: what is compared with, dtypes, unequal shards, and when inverses come.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import factors, take
from models import ZOO
from ranks import (
    OPTIONS,
    agreed,
    assert_same_trajectory,
    by_reference,
    kaisa,
    replaced,
    shard,
    train,
    vector,
)
from reference import ReferenceKFAC, cross_entropy, empirical_factors, weighted_mean
from torch import Tensor, nn

from second_order.kfac import solve as solves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4, n=12)
HALVES = {"grad_worker_fraction": 0.5}


# The same trajectory: invariant 21.


def test_one_process_is_the_reference() -> None:
    """What the tests below compare with is K-FAC itself, every solve dense."""
    reference = ReferenceKFAC(MLP.model(), lr=0.05, damping=0.1, kl_clip=OPTIONS["kl_clip"])
    expected = reference.trajectory(BATCHES)
    assert_same_trajectory(train(0, 1, MLP, BATCHES), expected)
    assert_same_trajectory(by_reference(MLP, BATCHES, {}), expected)


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def mixed() -> nn.Module:
    """The zoo's models are cast after they are built; this one's first layer casts itself back."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), Cast(), nn.Linear(7, 3).double())


def train_mixed(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = mixed()
    optimizer = kaisa(model, **options)
    trajectory = []
    for x, y in MLP.batches(3, n=8, dtype=torch.float32):
        take(model, optimizer, shard((x, y), rank, world_size))
        trajectory.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    return trajectory


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_layers_of_different_dtypes(world: World, workers: int) -> None:
    parallel = world.run(train_mixed, 4, {"grad_worker_fraction": workers / 4})
    assert_same_trajectory(agreed(parallel), train_mixed(0, 1, {}), rtol=1e-5)


def accumulate(
    rank: int, world_size: int, batches: Sequence[Batch], micro: int, options: dict[str, Any]
) -> list[Tensor]:
    model = MLP.model()
    optimizer = kaisa(model, accumulation_steps=micro, **options)
    trajectory = []
    for batch in batches:
        optimizer.zero_grad()
        mine = shard(batch, rank, world_size)
        for i in range(micro):
            x, y = shard(mine, i, micro)
            (cross_entropy(model(x), y) / micro).backward()
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


def test_micro_batches_on_many_processes_are_one_batch(world: World) -> None:
    parallel = world.run(accumulate, 2, BATCHES, 3, HALVES)
    assert_same_trajectory(agreed(parallel), train(0, 1, MLP, BATCHES))


def widest_dtypes(rank: int, world_size: int, dtype: torch.dtype) -> list[set[torch.dtype]]:
    model = MLP.model(torch.float32)
    optimizer = kaisa(model, factor_dtype=dtype, inv_dtype=dtype, **HALVES)
    take(model, optimizer, shard(MLP.batch(8, torch.float32), rank, world_size))
    kept = [
        {part.dtype for part in block.inverse.tensors}
        for block in optimizer._curvature.layers.blocks
        if block.inverse is not None
    ]
    state = optimizer.state_dict()["state"]
    kept += [{part["curvature"]["A"].dtype} for part in state.values() if "A" in part["curvature"]]
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_factors_and_inverses_are_kept_in_the_dtype_asked_for(
    world: World, dtype: torch.dtype
) -> None:
    for kept in world.run(widest_dtypes, 2, dtype):
        assert len(kept) > 3
        assert set.union(*kept) == {dtype}


# Unequal shards: invariant 10.


def factors_of_shards(
    rank: int, world_size: int, batch: Batch, counts: Sequence[int]
) -> tuple[Any, Tensor]:
    x, y = (part.split(list(counts))[rank] for part in batch)
    model = MLP.model()
    optimizer = kaisa(model, **HALVES)
    take(model, optimizer, (x, y))
    return factors(optimizer), vector(model)


def test_unequal_shards_are_weighted_by_their_examples(world: World) -> None:
    counts = [1, 2, 6, 3]
    batch = MLP.batch(sum(counts))
    results = world.run(factors_of_shards, 4, batch, counts)
    assert all(torch.equal(parameters, results[0][1]) for _, parameters in results)
    shards = list(zip(*(part.split(counts) for part in batch), strict=True))
    for layer in ("0", "2", "4"):
        whole = empirical_factors(MLP.model(), *batch, cross_entropy, layer)
        each = [empirical_factors(MLP.model(), x, y, cross_entropy, layer) for x, y in shards]
        for i, full in enumerate(whole):
            torch.testing.assert_close(weighted_mean([f[i] for f in each], counts), full)
            for averages, _ in results:
                torch.testing.assert_close(averages[layer][i], full, rtol=1e-10, atol=1e-12)
            plain = torch.stack([f[i] for f in each]).mean(0)
            assert (plain - full).norm() > 0.03 * full.norm(), "the weights make no difference"


# When inverses come, and what for.


def test_alone_a_refresh_takes_a_few_layers_at_a_time() -> None:
    """An old inverse can go before the next layers' new ones come."""
    found = []
    for most in (1, 1800, 2**20):
        model, parts = MLP.model(), []
        optimizer = kaisa(model)
        decompose = optimizer._curvature.solves.solver.decompose

        def noted(problems: Any, *args: Any, parts: Any = parts, go_on: Any = decompose) -> Any:
            parts.append(len(problems) // 2)
            return go_on(problems, *args)

        with (
            replaced(solves, {"PART_BYTES": most}),
            replaced(optimizer._curvature.solves.solver, {"decompose": noted}),
        ):
            take(model, optimizer, BATCHES[0])
        found.append(parts)
    assert found == [[1, 1, 1], [2, 1], [3]]


def test_a_frozen_layer_holds_no_inverse() -> None:
    model = MLP.model()
    optimizer = kaisa(model)
    take(model, optimizer, BATCHES[0])
    assert all(row.inverse_bytes > 0 for row in optimizer.summary().rows)
    model[2].requires_grad_(False)
    take(model, optimizer, BATCHES[1])
    assert [row.inverse_bytes > 0 for row in optimizer.summary().rows] == [True, False, True]


@pytest.mark.parametrize("how", ["loaded", "thawed"])
def test_a_layer_without_an_inverse_gets_one_at_the_next_step(how: str) -> None:
    """Not at the next of the long intervals."""
    options: dict[str, Any] = {"inv_update_steps": 100, "kl_clip": None}
    model = MLP.model()
    optimizer = kaisa(model, **options)
    for batch in MLP.batches(3):
        take(model, optimizer, batch)
    if how == "loaded":
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = kaisa(model, **options)
        optimizer.load_state_dict(saved)
    else:
        model[2].requires_grad_(False)
        take(model, optimizer, MLP.batch(6))
        model[2].requires_grad_(True)
    x, y = MLP.batch(6)
    plain = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    take(model, optimizer, (x, y))
    for p, gradient in zip(model.parameters(), plain, strict=True):
        assert not torch.allclose(p.grad, gradient, rtol=1e-3)


# Labels and checkpoints.


def labels_by_rank(rank: int, world_size: int) -> Any:
    """The same example on every rank; only the drawn labels differ."""
    model = MLP.model()
    optimizer = kaisa(model, fisher="sampled")
    staged = []
    for _ in range(6):
        model(MLP.batch(1)[0]).sum().backward()
        block = optimizer._curvature.layers.blocks[-1]
        staged.append(block.staged.sums().factors["G"].clone())
        block.staged.clear()
    return torch.stack(staged)


def test_ranks_draw_labels_of_their_own(world: World) -> None:
    first, second = world.run(labels_by_rank, 2)
    assert not torch.equal(first, second)


# Killed and resumed.


def test_a_checkpoint_without_mean_eigenvalues_gets_those_of_its_factors() -> None:
    """As those of the first version are; a relative damping is made of them."""
    model = MLP.model()
    donor = kaisa(model, relative_damping=True)
    take(model, donor, MLP.batch(6))
    saved = copy.deepcopy(donor.state_dict())
    for entry in saved["state"].values():
        entry["curvature"].pop("mean_eigenvalues", None)
    loaded = kaisa(model, relative_damping=True)
    loaded.load_state_dict(saved)
    for mine, its in zip(
        loaded._curvature.layers.blocks, donor._curvature.layers.blocks, strict=True
    ):
        torch.testing.assert_close(mine.factors.means, its.factors.means)

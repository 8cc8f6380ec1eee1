"""DPKFAC: factors of the owners' batches, and equal parameters on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from dpkfac_training import by_choice, dpkfac, train_separately
from models import ZOO
from optimizer_cases import factors, take
from placement_training import DPKFAC_OWNER, count_factors, loaded_dcp, save_dcp
from ranks import OPTIONS, agreed, assert_same_trajectory, go, shard, train, vector
from reference import cross_entropy, empirical_factors
from torch import Tensor, nn

from second_order.distributed.assignment import assign_owners
from second_order.kfac.plan import layer_dims

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from models import Case
    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
CONV = ZOO["conv_grouped"]
BATCHES = MLP.batches(7, n=12)
ALL_REDUCE = {"gradient_exchange": "all_reduce"}
BASES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"base": torch.optim.Adam, "lr": 0.01},
}


def own_factors(
    rank: int, world_size: int, case: Case, batches: Sequence[Batch], options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The parameters before each step, and the factors that this rank keeps at the end."""
    model = case.model()
    optimizer = dpkfac(model, **options)
    start = [vector(model)]
    shards = [shard(batch, rank, world_size) for batch in batches]
    trajectory = start + go(model, optimizer, case, shards)
    for block in optimizer._curvature.layers.blocks:
        assert block.factors is not None
        assert len(block.factors.stored) in (0, 2)
        if not block.factors.stored:
            block.factors = None
    return trajectory, factors(optimizer)


def averages(
    case: Case, trajectory: Sequence[Tensor], batches: Sequence[Batch], name: str, decay: float
) -> list[Tensor]:
    """Running averages of one layer along a trajectory, by the book."""
    model = case.model()
    weight = 0.0
    found = []
    for parameters, (x, y) in zip(trajectory, batches, strict=False):
        nn.utils.vector_to_parameters(parameters, model.parameters())
        new = empirical_factors(model, x, y, case.loss, name)
        weight = decay * weight + 1.0
        found = [a + (b - a) / weight for a, b in zip(found or new, new, strict=True)]
    return found


def close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-8, atol=1e-11) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("world_size", "case", "assignment"),
    fractional_product([2, 3, 4], [MLP, CONV], ["balanced", "round_robin"], part=2),
    ids=str,
)
def test_a_layers_factors_come_from_its_owners_batches(
    world: World, world_size: int, case: Case, assignment: str
) -> None:
    """Factors come from one rank's own batches, and only that rank has them."""
    batches = case.batches(3, n=12)
    options = {"assignment": assignment, "factor_decay": 0.5}
    results = world.run(own_factors, world_size, case, batches, options)
    trajectory = agreed([trajectory for trajectory, _ in results])
    names = [name for _, stored_names in results for name in stored_names]
    blocks = dpkfac(case.model())._curvature.layers.blocks
    assert sorted(names) == sorted(block.name for block in blocks)
    owners = assign_owners(list(map(layer_dims, blocks)), world_size, assignment)  # type: ignore[arg-type]
    for block, owner in zip(blocks, owners, strict=True):
        found = results[owner][1][block.name]
        for rank in range(world_size):
            own_batches = [shard(batch, rank, world_size) for batch in batches]
            same = close(found, averages(case, trajectory, own_batches, block.name, 0.5))
            assert same == (rank == owner)
        assert not close(found, averages(case, trajectory, batches, block.name, 0.5))


@pytest.mark.parametrize(("world_size", "base"), fractional_product([2, 3, 4], [*BASES], part=2))
def test_both_gradient_exchanges_give_the_same_trajectory(
    world: World, world_size: int, base: str
) -> None:
    """All ranks are equal bit for bit, and differ from KAISA."""
    choices = [
        {**BASES[base], **how, "assignment": assignment, "inv_update_steps": 2}
        for how in ({}, ALL_REDUCE)
        for assignment in ("balanced", "round_robin")
    ]
    results = world.run(train_separately, world_size, MLP, BATCHES, choices)
    balanced, round_robin, reduced, reduced_round_robin = by_choice(results)
    assert_same_trajectory(balanced, reduced, rtol=1e-9)
    assert_same_trajectory(round_robin, reduced_round_robin, rtol=1e-9)
    expected = train(0, 1, MLP, BATCHES, {**BASES[base], "inv_update_steps": 2})[-1]
    assert not torch.allclose(balanced[-1], expected, rtol=1e-4)


def clip_and_gradients(
    rank: int, world_size: int, options: dict[str, Any]
) -> tuple[float, list[Tensor]]:
    """Σ lr² |P·∇| after the clip, from gradients that a copy without it sees."""
    batch = shard(BATCHES[0], rank, world_size)
    found = []
    for clip in (options["kl_clip"], None):
        model = MLP.model()
        optimizer = dpkfac(model, **{**options, "kl_clip": clip}, damping=0.01)
        take(model, optimizer, batch)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    clipped, free = found
    return float((clipped / free).mean()), [clipped, free]


@pytest.mark.parametrize("exchange", ["owner", "all_reduce"])
def test_one_coefficient_clips_the_layers_of_all_owners(world: World, exchange: str) -> None:
    """ν² Σ lr² |P·∇| = κ, with the mean gradients and the P of all ranks."""
    options = {"kl_clip": 1e-5, "gradient_exchange": exchange}
    results = world.run(clip_and_gradients, 3, options)
    agreed([gradients for _, gradients in results])
    coefficient, (clipped, free) = results[0]
    torch.testing.assert_close(clipped, coefficient * free, rtol=1e-10, atol=0.0)
    model = MLP.model()
    x, y = BATCHES[0]
    cross_entropy(model(x), y).backward()
    mean = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    spans = [p.numel() for p in model.parameters()]
    parts = zip(free.split(spans), mean.split(spans), strict=True)
    dots = torch.stack([torch.dot(p, g) for p, g in parts]).view(-1, 2).sum(1)  # weight and bias
    change = float(OPTIONS["lr"] ** 2 * dots.abs().sum())
    assert coefficient == pytest.approx((1e-5 / change) ** 0.5, rel=1e-9)
    assert coefficient < 0.5, "the clip is active"


def load_then(
    rank: int, world_size: int, path: str, options: dict[str, Any], then: str
) -> tuple[list[Tensor], int]:
    """`then`: what is done before the next step. With the number of factors that were collected."""
    model, optimizer = loaded_dcp(world_size, DPKFAC_OWNER, path, False, options)
    collected = 0
    if then == "consolidate":
        optimizer.consolidate(to=0)
        if rank == 0:
            collected = count_factors({"optimizer": optimizer.state_dict()}).total()
    else:
        for name in ("0", "4"):
            model.get_submodule(name).requires_grad_(False)
    return go(model, optimizer, MLP, BATCHES[3:]), collected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("then", ["consolidate", "freeze"])
def test_after_a_distributed_load_all_ranks_move_factors_together(
    world: World, tmp_path: Path, then: str
) -> None:
    """Before new statistics, when each rank knows only its own layers."""
    options = {"inv_update_steps": 4, "factor_update_steps": 4}
    path = str(tmp_path)
    world.run(save_dcp, 2, DPKFAC_OWNER, path, False, options)
    one, _ = world.run(load_then, 1, path, options, then)[0]
    for after in (2, 3):
        results = world.run(load_then, after, path, options, then, timeout=20)
        found = agreed([trajectory for trajectory, _ in results])
        assert_same_trajectory(found, one, hint=f"on {after}")
        if then == "consolidate":
            assert results[0][1] == 6


def owners_with_a_norm(rank: int, world_size: int) -> list[int]:
    """One large layer for rank 0, two small ones for rank 1, and a norm without an owner."""
    norm = nn.LayerNorm(30, bias=False)
    model = nn.Sequential(nn.Linear(9, 10), norm, nn.Linear(2, 3), nn.Linear(2, 3))
    optimizer = dpkfac(model)
    params = optimizer._training.averaged_params()
    optimizer._curvature.prepare()
    _, ranks = optimizer._curvature.route(params, params)
    owners = dict(zip(params, ranks, strict=True))
    return [owners[layer.weight] for layer in model]


def test_parameters_without_a_layer_go_to_the_rank_that_sends_least(world: World) -> None:
    assert world.run(owners_with_a_norm, 2) == [[0, 1, 1, 1]] * 2

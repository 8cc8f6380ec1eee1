"""Wherever work is placed: gradients that others average, and layers and ranks that have none.

For KAISA, its `reduce` exchange and DPKFAC alike; DPKFAC's ranks have the same batch each,
or shards if the option says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from models import ZOO
from optimizer_cases import noted, take
from placement_training import DPKFAC_ALL_REDUCE, DPKFAC_OWNER, PLACEMENTS, Placement
from ranks import agreed, assert_same_trajectory, shard, train, vector
from reference import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from second_order import DPKFAC, KAISA

if TYPE_CHECKING:
    from pool import World
    from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(5, n=12)
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}
each_placement = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


# Whether DDP's gradients are views of its buckets, whether the optimizer is made of parameters,
# and whether it averages gradients.
WRAPPED = fractional_product((True, False), (True, False), ("auto", True, False), part=2)


def train_shards(
    rank: int, world_size: int, placement: Placement, options: dict[str, Any]
) -> list[list[Tensor]]:
    """Trajectories of the plain model, and in DistributedDataParallel."""
    trajectories = []
    for how in (None, *WRAPPED):
        model = MLP.model()
        if how is None:
            wrapped: nn.Module = model
            optimizer = placement.make(model, **options)
        else:
            view, by_parameters, averaging = how
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
            argument = wrapped.parameters() if by_parameters else wrapped
            optimizer = placement.make(
                argument, model=wrapped, gradient_averaging=averaging, **options
            )
        trajectory = []
        for batch in BATCHES:
            take(wrapped, optimizer, shard(batch, rank, world_size))
            trajectory.append(vector(model))
        assert {row.name for row in optimizer.summary().rows} == {"0", "2", "4"}
        trajectories.append(trajectory)
    return trajectories


@each_placement
@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_wrapped_models_are_unwrapped(
    world: World, world_size: int, placement: Placement
) -> None:
    """Averaging gradients that DDP has averaged changes nothing."""
    options = {**MOMENTUM, **placement.fewest(world_size)}
    results = world.run(train_shards, world_size, placement, options)
    expected, *others = (agreed(parallel) for parallel in zip(*results, strict=True))
    if placement.System is KAISA:
        assert_same_trajectory(expected, train(0, 1, MLP, BATCHES, options))
    for how, found in zip(WRAPPED, others, strict=True):
        assert_same_trajectory(found, expected, hint=how)


def train_idle(
    rank: int, world_size: int, placement: Placement, idle: int, options: dict[str, Any]
) -> list[Tensor]:
    """From step 1 on, one rank has no data, and takes its steps all the same."""
    model = MLP.model()
    optimizer = placement.make(model, factor_update_steps=10, **options)
    trajectory = []
    for step, batch in enumerate(BATCHES):
        x, y = placement.part(batch, rank, world_size)
        optimizer.zero_grad()
        if rank != idle or step == 0:
            # Two of three ranks: the mean over three must be the mean over the two.
            (cross_entropy(model(x), y) * (1.0 if step == 0 else 1.5)).backward()
        optimizer.step()
        trajectory.append(vector(model))
    return trajectory


@pytest.mark.parametrize("idle", [0, 2])
@pytest.mark.parametrize(
    "placement",
    [
        *[
            Placement(f"{each} {n}", KAISA, {**each.options, "grad_worker_fraction": n / 3})
            for each in PLACEMENTS[:2]
            for n in (1, 3)
        ],
        DPKFAC_OWNER,
        DPKFAC_ALL_REDUCE,
    ],
    ids=str,
)
def test_a_rank_without_data_participates(world: World, idle: int, placement: Placement) -> None:
    """With what it keeps and solves; the others' gradients come to it."""
    first, *rest = BATCHES
    if not placement.whole:
        rest = [
            (
                torch.cat([x[: 4 * idle], x[4 * idle + 4 :]]),
                torch.cat([y[: 4 * idle], y[4 * idle + 4 :]]),
            )
            for x, y in rest
        ]
    expected = train(0, 1, MLP, [first, *rest], {"factor_update_steps": 10})
    assert_same_trajectory(agreed(world.run(train_idle, 3, placement, idle, {})), expected)


def train_unused(
    rank: int, world_size: int, placement: Placement
) -> tuple[bool, bool, list[str], list[str]]:
    """Of a layer that is never called; statuses, and warnings."""
    case = ZOO["unused"]
    model = case.model()
    with noted() as messages:
        shares = placement.fewest(world_size)
        optimizer = placement.make(model, weight_decay=0.1, **shares)
        before = model.get_parameter("unused.weight").clone()
        for batch in case.batches(3, n=12):
            take(model, optimizer, shard(batch, rank, world_size))
    after = model.get_parameter("unused.weight")
    statuses = [row.status for row in optimizer.summary().rows]
    return after.grad is None, torch.equal(before, after), statuses, messages


@each_placement
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_that_is_none_on_all_ranks_stays_none(
    world: World, world_size: int, placement: Placement
) -> None:
    """Weight decay does not apply either. KAISA's ranks, or DPKFAC's owner, warn."""
    results = world.run(train_unused, world_size, placement)
    for stays_none, stays, statuses, messages in results:
        assert stays_none
        assert stays
        assert statuses == ["preconditioned", "base", "preconditioned"]
        assert all("no statistics arrived for 'unused'" in message for message in messages)
        assert placement.System is DPKFAC or len(messages) == 1
    assert any(messages for _, _, _, messages in results)

"""DPKFAC: what is sent, by step and by the hook, and what each rank has."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from owned import by_choice, dpkfac, train_apart
from ranks import agreed, assert_same_trajectory, counted, shard, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(7, n=12)
ALL_REDUCE = {"gradient_exchange": "all_reduce"}
BASES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"base": torch.optim.Adam, "lr": 0.01},
}


def train_hooked(
    rank: int, world_size: int, how: dict[str, Any], options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], Counter[str]]:
    """Parameters, the gradients as backward has left them, and collectives of the last step."""
    model = MLP.model()
    wrapped = DistributedDataParallel(model, **how)
    optimizer = dpkfac(wrapped, **options)
    optimizer.register_owner_hook(wrapped)
    trajectory, gradients = [], []
    for batch in BATCHES:
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        with counted() as counts:
            cross_entropy(wrapped(x), y).backward()
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            gradients.append(torch.cat(parts))
            optimizer.step()
        trajectory.append(vector(model))
    return trajectory, gradients, +counts


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_owner_hook_sends_gradients_as_step_would(world: World, world_size: int) -> None:
    """During backward, in as many buckets as there are; and not a second time."""
    plain = {**BASES["SGD"], "inv_update_steps": 2}
    for options in (plain, {**plain, "assignment": "round_robin", "kl_clip": None}):
        expected = by_choice(world.run(train_apart, world_size, MLP, BATCHES, [options]))[0]
        for how in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}):
            results = world.run(train_hooked, world_size, how, options)
            found = agreed([trajectory for trajectory, _, _ in results])
            assert_same_trajectory(found, expected, hint=how)
            if world_size > 1:
                assert not torch.equal(results[0][1][0], results[1][1][0]), "sums are everywhere"
            for _, _, counts in results:
                many = "bucket_cap_mb" in how
                assert (counts.total() > 4) == (many and world_size > 1)
                if not many:
                    assert counts.total() == (4 if world_size > 1 else 0), "with a refresh"


def frozen_for_a_step(rank: int, world_size: int, hooked: bool) -> list[Tensor]:
    """A layer freezes between the backward pass and the step: others own what is left."""
    model = MLP.model()
    wrapped = DistributedDataParallel(model)
    optimizer = dpkfac(wrapped if hooked else model, inv_update_steps=2, assignment="round_robin")
    if hooked:
        optimizer.register_owner_hook(wrapped)
    trajectory = []
    for step, batch in enumerate(BATCHES[:4]):
        x, y = shard(batch, rank, world_size)
        optimizer.zero_grad()
        cross_entropy((wrapped if hooked else model)(x), y).backward()
        if step == 1:
            model[0].requires_grad_(False)
            model[0].zero_grad()
        optimizer.step()
        model[0].requires_grad_(True)
        trajectory.append(vector(model))
    return trajectory


def test_owners_that_move_after_the_backward_pass_get_the_hooks_means(world: World) -> None:
    expected = agreed(world.run(frozen_for_a_step, 2, False))
    assert_same_trajectory(agreed(world.run(frozen_for_a_step, 2, True)), expected)


def hook_refusals(rank: int, world_size: int) -> list[str]:
    model, scaler = MLP.model(), torch.amp.GradScaler("cpu")
    wrapped, other = DistributedDataParallel(model), DistributedDataParallel(MLP.model())
    tries: list[tuple[dict[str, Any], Any]] = [
        ({}, model),
        ({}, other),
        ({"grad_scaler": scaler}, wrapped),
        (ALL_REDUCE, wrapped),
    ]
    messages = []
    for options, given_model in tries:
        with pytest.raises((TypeError, ValueError)) as error:
            dpkfac(wrapped, **options).register_owner_hook(given_model)
        messages.append(f"{error.type.__name__}: {error.value}")
    return messages


def test_the_owner_hook_is_refused_where_it_would_do_harm(world: World) -> None:
    starts = [
        "TypeError: Sequential is not a DistributedDataParallel model",
        "ValueError: the DistributedDataParallel model wraps another model",
        "ValueError: with the owner hook a GradScaler",
        "ValueError: gradient_exchange='all_reduce' averages gradients everywhere",
    ]
    for messages in world.run(hook_refusals, 2):
        for message, start in zip(messages, starts, strict=True):
            assert message.startswith(start)


def owners_beside_a_norm(rank: int, world_size: int) -> list[int]:
    """One large layer for rank 0, two small ones for rank 1, and a norm that is nobody's."""
    norm = nn.LayerNorm(30, bias=False)
    model = nn.Sequential(nn.Linear(9, 10), norm, nn.Linear(2, 3), nn.Linear(2, 3))
    optimizer = dpkfac(model)
    params = optimizer._training.averaged_params()
    _, ranks = optimizer._curvature.route(params, params)
    owners = dict(zip(params, ranks, strict=True))
    return [owners[layer.weight] for layer in model]


def test_parameters_of_no_layer_go_where_the_least_is_to_be_sent(world: World) -> None:
    assert world.run(owners_beside_a_norm, 2) == [[0, 1, 1, 1]] * 2

"""DPKFAC: what is sent, and to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from dpkfac_training import dpkfac
from models import ZOO
from torch import nn

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


def owners_with_a_norm(rank: int, world_size: int) -> list[int]:
    """One large layer for rank 0, two small ones for rank 1, and a norm without an owner."""
    norm = nn.LayerNorm(30, bias=False)
    model = nn.Sequential(nn.Linear(9, 10), norm, nn.Linear(2, 3), nn.Linear(2, 3))
    optimizer = dpkfac(model)
    params = optimizer._training.averaged_params()
    _, ranks = optimizer._curvature.route(params, params)
    owners = dict(zip(params, ranks, strict=True))
    return [owners[layer.weight] for layer in model]


def test_parameters_without_a_layer_go_to_the_rank_that_sends_least(world: World) -> None:
    assert world.run(owners_with_a_norm, 2) == [[0, 1, 1, 1]] * 2

"""Ranks with different default dtypes: every message has a dtype of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from models import ZOO
from optimizer_cases import make
from ranks import agreed, go, shard
from torch import Tensor, nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

if TYPE_CHECKING:
    from pool import World

CASE = ZOO["mlp"]
BATCHES = CASE.batches(3, n=12)
HELPED = {"helper_timeout": 20.0}
CHOICES: dict[str, tuple[Any, dict[str, Any]]] = {
    "KAISA": (KAISA, {"grad_worker_fraction": 0.5, "unsupported_layers": "gradient_factors"}),
    "KAISA, pipelined": (KAISA, {"factor_exchange": "pipelined"}),
    "DPKFAC": (DPKFAC, {}),
    "DistKFAC": (DistKFAC, {"inverse_threads": 1}),
    "DistKFAC, stats": (DistKFAC, {"inverse_threads": 1, "stats_workers": 1, **HELPED}),
    "DHO2, rows": (DHO2, {"base": torch.optim.Adam}),
    "DHO2, columns": (DHO2, {"layout": "column"}),
    "MRDHO2": (MRDHO2, {"helper_ranks": 1, "final_update": "paper", **HELPED}),
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return CASE.loss(model(batch[0].float()), batch[1])


def trained(
    rank: int, world_size: int, defaults: tuple[torch.dtype, torch.dtype]
) -> dict[str, list[Tensor]]:
    """The trajectories by choice; a helper has none of those that it helps in."""
    trajectories = {}
    for name, (System, options) in CHOICES.items():
        model = CASE.model().float()
        batches = [shard((x.float(), y), rank, world_size) for x, y in BATCHES]
        torch.set_default_dtype(defaults[rank])
        try:
            with make(System, model, **options) as optimizer:
                if getattr(optimizer, "role", "worker") == "worker":
                    trajectories[name] = go(model, optimizer, CASE, batches)
                else:
                    optimizer.serve(BATCHES, partial(loss_of, model))
        finally:
            torch.set_default_dtype(torch.float32)
    return trajectories


def test_ranks_can_have_different_default_dtypes(world: World) -> None:
    results = world.run(trained, 2, (torch.float32, torch.float64))
    for name in CHOICES:
        agreed([by_name[name] for by_name in results if name in by_name])

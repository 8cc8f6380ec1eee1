"""Eigenvectors that are refined, wherever the factors are kept.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from ranks import agreed, follow, kaisa, replaced
from torch import Tensor

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]


def train_counting(
    rank: int, world_size: int, options: dict[str, Any]
) -> tuple[list[Tensor], Counter[str]]:
    """The trajectory, and how many matrices were decomposed in which way from step 5 on."""
    model = MLP.model()
    optimizer = kaisa(model, **options)
    counts: Counter[str] = Counter()
    native = {"eigh": torch.linalg.eigh, "qr": torch.linalg.qr}

    def counting(name: str, matrix: Tensor) -> Any:
        counts[name] += len(matrix)
        return native[name](matrix)

    batch = MLP.batch(48)
    trajectory = follow(rank, world_size, model, optimizer, MLP, [batch] * 5)
    with replaced(torch.linalg, {name: partial(counting, name) for name in native}):
        trajectory += follow(rank, world_size, model, optimizer, MLP, [batch] * 15)
    return trajectory, counts


WARM: dict[str, Any] = {
    "eigen_refresh": "warm",
    "relative_damping": True,
    "damping": 1.0,
    "lr": 0.3,
    "kl_clip": 1e-3,
}


@pytest.mark.parametrize("exchange", ["all_reduce", "reduce"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_refined_eigenvectors_train_as_eigendecompositions_do(
    world: World, world_size: int, exchange: str
) -> None:
    """Close by, on all ranks bit for bit the same, and with few eigendecompositions."""
    options = {**WARM, "factor_exchange": exchange, "colocate_factors": False}
    results = world.run(train_counting, world_size, options)
    found = agreed([trajectory for trajectory, _ in results])
    full, full_counts = train_counting(0, 1, {**WARM, "eigen_refresh": "full"})
    moved = (full[-1] - full[0]).norm()
    assert moved > 0.1
    assert (found[-1] - full[-1]).norm() < 0.01 * moved
    assert not torch.equal(found[-1], full[-1])
    counts: Counter[str] = Counter()
    for _, each in results:
        counts += each
    assert full_counts == {"eigh": 15 * 6}
    assert counts["qr"] == 15 * 6, "three layers, two factors each"
    assert counts["eigh"] < 0.2 * counts["qr"]

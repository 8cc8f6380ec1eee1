"""`curvature()` and `statistics()` of sharded models, and of layers of other kinds.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import make, take
from ranks import OPTIONS
from shards import fsdp, go_on, narrow, shares
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from second_order import DPKFAC, KAISA, DistKFAC

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def of_shards(rank: int, world_size: int, System: Any, sharded: bool) -> dict[str, Any]:
    """Products with the curvature, and numbers to log."""
    model = narrow()
    if sharded:
        fsdp(model)
        assert any(isinstance(p, DTensor) for p in model.parameters())
    options = {"async_inverse": False} if System is DistKFAC else {}
    optimizer = System(model, **OPTIONS, **options)
    go_on(model, optimizer, shares(rank, world_size))
    curvature = optimizer.curvature()
    generator = torch.Generator().manual_seed(3)
    covered = {n: size for layer in curvature.values() for n, size in layer.shapes.items()}
    v = {n: torch.randn(size, generator=generator).double() for n, size in covered.items()}
    found = optimizer.statistics()
    numbers = {n: found[n] for n in ("clip", "trace_A/max", "trace_G/min", "layers/solved")}
    accounts = {n for n, value in found.items() if n.startswith("bytes/") and value > 0}
    return {"solved": curvature.solve(v, damping=0.1), "numbers": numbers, "accounts": accounts}


@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])
def test_sharded_models_have_the_curvature_of_whole_ones(world: World, System: Any) -> None:
    sharded = world.run(of_shards, 2, System, True)
    plain = world.run(of_shards, 2, System, False)
    for result, expected in zip(sharded, plain, strict=True):
        assert "conv.weight" in result["solved"]
        assert result["solved"].keys() == expected["solved"].keys()
        for name, x in result["solved"].items():
            torch.testing.assert_close(x, expected["solved"][name], rtol=1e-9, atol=1e-12)
        assert result["numbers"] == pytest.approx(expected["numbers"], rel=1e-9, nan_ok=True)
        assert result["accounts"] == sharded[0]["accounts"]


class Strange(nn.Module):
    """A matrix that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix @ self.matrix)


def test_factors_of_gradients_are_no_fisher_information() -> None:
    model = nn.Sequential(Strange(), nn.Linear(4, 3)).double()
    optimizer = make(KAISA, model, other_matrices="gradient")
    take(model, optimizer, (torch.randn(12, 4).double(), torch.randint(3, (12,))))
    assert optimizer.statistics()["layers"] == 2
    curvature = optimizer.curvature()
    assert list(curvature) == ["1"]
    assert "make no Fisher information" in curvature.uncovered["0.matrix"]

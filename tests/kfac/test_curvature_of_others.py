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

from second_order import DPKFAC, KAISA, DistKFAC, register_layer

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


class Backwards(nn.Module):
    """Its weight is stored (in, out), as GPT-2's are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_a_transposed_weight_has_the_curvature_of_its_transpose() -> None:
    register_layer(Backwards, transposed=True)
    torch.manual_seed(0)
    plain, other = nn.Sequential(nn.Linear(4, 3)).double(), nn.Sequential(Backwards()).double()
    with torch.no_grad():
        plain[0].weight.copy_(other[0].weight.mT)
        plain[0].bias.copy_(other[0].bias)
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    found = []
    for model in (plain, other):
        optimizer = make(KAISA, model)
        take(model, optimizer, (x, y))
        found.append(optimizer.curvature())
    v = {"0.weight": torch.randn(3, 4).double(), "0.bias": torch.randn(3).double()}
    expected = found[0].solve(v, damping=0.1)
    solved = found[1].solve({**v, "0.weight": v["0.weight"].mT}, damping=0.1)
    torch.testing.assert_close(solved["0.weight"], expected["0.weight"].mT)
    torch.testing.assert_close(solved["0.bias"], expected["0.bias"])


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

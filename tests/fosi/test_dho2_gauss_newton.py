"""DHO2 and MRDHO2 on Gauss-Newton products, as on the Hessian of a loss that has such a Hessian.

With z linear in w around the point w₀ where it is evaluated, the Hessian of the loss at w₀ is the
Gauss-Newton matrix: `linear` evaluates that.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from dho2_training import BATCHES, BRIEF, CURVED, RAGGED, dho2, go, network, shards, vector
from ranks import assert_same_trajectory
from reference import cross_entropy
from torch import Tensor, nn
from torch.func import functional_call, jvp

from second_order import DHO2, CurvatureError
from second_order.lanczos import Outputs

if TYPE_CHECKING:
    from collections.abc import Callable


GAUSS_NEWTON = {"curvature": "gauss-newton", "num_smallest": 0}


def linear(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of outputs that are linear in the parameters around where they are."""
    params = dict(model.named_parameters())
    here = {name: p.detach() for name, p in params.items()}
    moved = {name: p - here[name] for name, p in params.items()}
    z, dz = jvp(lambda w: functional_call(model, w, (x,)), (here,), (moved,))
    return cross_entropy(z + dz, y)


def outputs(model: nn.Module, x: Tensor, y: Tensor) -> Outputs:
    return Outputs(model(x), lambda z: cross_entropy(z, y))


def part(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    a, b = RAGGED[world_size][rank : rank + 2]
    return CURVED[0][a:b], CURVED[1][a:b]


def train(rank: int, world_size: int, layout: str, hvp: str = "auto") -> list[Tensor]:
    model = network()
    (x, y) = part(rank, world_size)
    optimizer = DHO2(
        model, lr=0.05, momentum=0.9, layout=layout, hvp=hvp,
        curvature_closure=lambda: (outputs(model, x, y), len(y)),
        **{**BRIEF, **GAUSS_NEWTON},
    )  # fmt: skip
    return go(model, optimizer, shards(BATCHES, rank, world_size))


def train_linear(curvature: str = "hessian") -> list[Tensor]:
    model = network()
    loss: Callable[[], Any] = lambda: linear(model, *CURVED)  # noqa: E731
    if curvature == "true":
        loss = lambda: cross_entropy(model(CURVED[0]), CURVED[1])  # noqa: E731
    options = {**BRIEF, "num_smallest": 0, "lr": 0.05, "momentum": 0.9}
    return go(model, dho2(model, curvature_closure=loss, **options), BATCHES)


def test_gauss_newton_trains_like_a_loss_with_that_hessian() -> None:
    expected = train_linear()
    assert_same_trajectory(train(0, 1, "row"), expected, rtol=1e-9)
    assert_same_trajectory(train(0, 1, "row", "recomputed"), expected, rtol=1e-9)
    with pytest.raises(ValueError, match="use hvp='auto', or curvature='hessian'"):
        train(0, 1, "row", "differences")
    assert not torch.allclose(train_linear("true")[-1], expected[-1], rtol=1e-3)


def test_a_closure_that_returns_only_a_loss_raises() -> None:
    model = network()
    optimizer = dho2(model, **GAUSS_NEWTON)
    go(model, optimizer, BATCHES[:2])
    before = vector(model)
    with pytest.raises(CurvatureError, match=r"curvature='gauss-newton' needs .*Outputs\(model"):
        go(model, optimizer, BATCHES[2:3])
    assert torch.equal(vector(model), before)
    optimizer.curvature_closure = lambda: outputs(model, *CURVED)
    go(model, optimizer, BATCHES[2:3])
    assert optimizer.curvature.refreshes == 1

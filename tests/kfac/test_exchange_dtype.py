"""What travels in bfloat16: half the bytes, and the same numbers on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from ranks import agreed, kaisa, replaced, shard, vector
from reference import cross_entropy
from torch import Tensor

from instruments import bytes_by_stage
from second_order.kfac import curvature
from second_order.kronecker.storage import unpack_upper_triangular

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4, n=12)
BF16 = torch.bfloat16
WAYS: dict[str, dict[str, Any]] = {
    "all_reduce": {},
    "pipelined": {"factor_exchange": "pipelined"},
    "reduce": {"factor_exchange": "reduce", "colocate_factors": False},
}
Found = tuple[list[Tensor], list[list[Tensor]], dict[str, float]]


def train(rank: int, ranks: int, options: dict[str, Any]) -> Found:
    """The trajectory, each layer's inverse on this rank, and the bytes of the last step."""
    model = MLP.model()
    with (
        replaced(curvature, {"FULL_PRECISION_STEPS": 0}),
        kaisa(model, damping=0.1, **options) as optimizer,
    ):
        trajectory = []
        for batch in BATCHES:
            x, y = shard(batch, rank, ranks)
            with bytes_by_stage() as sent:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            trajectory.append(vector(model))
        plan = optimizer._curvature.plan
        inverses = [b.inverse.tensors for b in plan if b.inverse is not None]
        return trajectory, inverses, dict(sent)


@pytest.mark.parametrize(
    ("way", "solver"),
    [("all_reduce", "inverse"), ("pipelined", "eigen"), ("reduce", "inverse"), ("reduce", "eigen")],
)
def test_all_ranks_have_equal_parameters(world: World, way: str, solver: str) -> None:
    """They are close to those without rounding, and not equal to them."""
    options = {**WAYS[way], "solver": solver}
    exact = agreed([each[0] for each in world.run(train, 3, options)])
    results = world.run(train, 3, {**options, "exchange_dtype": BF16})
    found = agreed([each[0] for each in results])
    for step, (actual, expected) in enumerate(zip(found, exact, strict=True)):
        assert 1e-6 < float((actual - expected).norm() / expected.norm()) < 0.02, step
    first = results[0][1]
    assert len(first) == 3
    for _, inverses, _ in results:
        for layer, of_first in zip(inverses, first, strict=True):
            assert all(map(torch.equal, layer, of_first))
    if solver == "inverse":
        for matrix in (m for layer in first for m in layer):
            whole = matrix if matrix.dim() == 3 else unpack_upper_triangular(matrix, 0)
            assert torch.equal(whole, whole.mT)
            assert float(torch.linalg.eigvalsh(whole).min()) > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_16_bit_dtype_halves_the_bytes_of_factors_and_decompositions(
    world: World, way: str
) -> None:
    """Examples and traces travel as they are, and so do gradients."""
    float32_factors = {"factor_dtype": torch.float32}
    options = {**WAYS[way], **float32_factors, "solver": "inverse", "grad_worker_fraction": 0.5}
    options["kl_clip"] = None
    heads = 4 * 3 * 4  # loss terms, rows of A, and two mean eigenvalues, of three layers
    whole, half = (
        world.run(train, 4, {**options, "exchange_dtype": dtype}) for dtype in (None, BF16)
    )
    for (*_, before), (*_, after) in zip(whole, half, strict=True):
        sums = "statistics_exchange"
        flags = 4 * 3 if way == "pipelined" else 0
        copies = 4 if way == "reduce" else 1  # a head to each rank, or one into the all-reduce
        rounded = before[sums] - copies * heads - flags
        assert after[sums] == rounded / 2 + heads + flags
        outcomes = 4 * 3
        assert after["solve_exchange"] - outcomes == ((before["solve_exchange"] - outcomes) / 2)
        same = ("average_gradients", "precondition_exchange")
        assert all(after.get(name) == before.get(name) for name in same)
        assert before.get("precondition_exchange", 0) > 0 or before["average_gradients"] > 0
    assert sum(each[2]["solve_exchange"] for each in half) > 4 * 4 * 3


def test_one_process_does_not_round() -> None:
    exact, _, _ = train(0, 1, {})
    found, _, _ = train(0, 1, {"exchange_dtype": BF16, "factor_exchange": "pipelined"})
    assert all(map(torch.equal, found, exact))


def sums_sent(rank: int, ranks: int, options: dict[str, Any]) -> list[float]:
    """Bytes of the statistics' exchange, step by step."""
    model = MLP.model()
    optimizer = kaisa(model, exchange_dtype=BF16, **options)
    found = []
    for batch in BATCHES:
        x, y = shard(batch, rank, ranks)
        with bytes_by_stage() as sent:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            with replaced(curvature, {"FULL_PRECISION_STEPS": 2}):
                optimizer.step()
        found.append(sent["statistics_exchange"])
    return found


@pytest.mark.parametrize("way", WAYS)
def test_the_first_statistics_are_sent_without_rounding(world: World, way: str) -> None:
    """So that no average is of rounded numbers alone."""
    (first, second, third, fourth), _ = world.run(sums_sent, 2, WAYS[way])
    assert second > 3 * third
    assert third == fourth
    assert first == second

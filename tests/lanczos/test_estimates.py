"""Trace, diagonal, blocks of layers and loaders, against dense matrices.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ZOO
from reference import cross_entropy, empirical_fisher, ggn, hessian
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from second_order.errors import CurvatureError
from second_order.lanczos import (
    Diagonal,
    Outputs,
    Trace,
    diagonal,
    eigenpairs,
    losses_over,
    spectral_density,
    trace,
)
from second_order.lanczos.hvp import RowSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

MLP = ZOO["mlp"]
few = settings(max_examples=15, deadline=None)


def problem(rank: int, seed: int, size: int = 30) -> tuple[Tensor, Callable[[], Tensor], Tensor]:
    """A matrix of a rank, with eigenvalues of both signs, a loss of this Hessian, its parameter."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(size, rank, generator=generator).double())[0]
    A = Q @ torch.diag(torch.linspace(-2, 9, rank).double()) @ Q.T
    w = nn.Parameter(torch.ones(size).double())
    return A, lambda: 0.5 * w @ A @ w, w


def of_mlp(size: int = 6) -> tuple[nn.Module, Callable[[], Outputs], dict[str, Tensor]]:
    """A model, its outputs with a loss an example, and the three dense matrices."""
    model = MLP.model()
    (x, y) = MLP.batch(size)
    dense = {
        "hessian": hessian(model, x, y, cross_entropy),
        "gauss-newton": ggn(model, x, y, cross_entropy),
        "empirical-fisher": empirical_fisher(model, x, y, cross_entropy),
    }
    loss = lambda z: functional.cross_entropy(z, y, reduction="none")  # noqa: E731
    return model, lambda: Outputs(model(x), loss), dense


CURVATURES = ["hessian", "gauss-newton", "empirical-fisher"]


# Trace.


@few
@given(st.integers(0, 8), st.integers(0, 99), st.integers(24, 40))
def test_a_matrix_of_low_rank_is_found_exactly(rank: int, seed: int, products: int) -> None:
    """As many directions as a third of the products are taken out of chance's way."""
    A, loss, w = problem(rank, seed)
    found = trace(loss, [w], products=products, seed=seed)
    assert found.value == pytest.approx(float(A.trace()), abs=1e-10)
    assert found.standard_error < 1e-10
    assert (found.products, found.size) == (products, 30)
    entries = diagonal(loss, [w], products=products, seed=seed)
    torch.testing.assert_close(entries.values, A.diagonal(), rtol=0, atol=1e-10)
    assert float(entries.standard_errors.max()) < 1e-10


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_trace_is_within_its_error(curvature: Any) -> None:
    """Over many seeds: no bias, errors of the stated size, and smaller than Hutchinson's."""
    model, closure, dense = of_mlp(12)
    A = dense[curvature]
    expected = float(A.trace())
    found = [trace(closure, model, products=18, seed=i, curvature=curvature) for i in range(20)]
    errors = torch.tensor([f.value - expected for f in found])
    stated = torch.tensor([f.standard_error for f in found])
    spread = float(errors.square().mean().sqrt())
    assert abs(float(errors.mean())) < 3 * spread / math.sqrt(20)
    assert 0.4 < spread / float(stated.square().mean().sqrt()) < 2.5
    if curvature != "hessian":  # whose eigenvalues fall off slowly, before any training
        off = A - torch.diag(A.diagonal())
        assert spread < 0.6 * math.sqrt(2 * float(off.square().sum()) / 18)


@pytest.mark.parametrize("estimate", [trace, diagonal, spectral_density])
def test_different_seeds_share_no_random_vector(
    estimate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they differ above the lowest 32 bits, the only ones that torch uses."""
    native = RowSpace.random
    vectors = []

    def random(space: RowSpace, seed: int, scale: float) -> Tensor:
        vectors.append(native(space, seed, scale))
        return vectors[-1]

    monkeypatch.setattr(RowSpace, "random", random)
    _, loss, w = problem(4, 0)
    for seed in (0, 1, 2, 2**32):
        estimate(loss, [w], seed=seed)
    assert len(vectors) >= 16
    assert len(torch.stack(vectors).unique(dim=0)) == len(vectors)


# Diagonal.


def test_the_error_of_a_diagonal_follows_from_two_samples() -> None:
    """They are 1 + b and 1 - b in one of two cases, of a deviation of b √2 and an error of b."""
    w = nn.Parameter(torch.ones(2).double())
    loss = lambda: 0.5 * w @ torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=torch.float64) @ w  # noqa: E731
    errors = [
        diagonal(loss, [w], products=2, directions=0, seed=i).standard_errors for i in range(12)
    ]
    found = torch.cat(errors).unique()
    torch.testing.assert_close(found, torch.tensor([0.0, 0.3]).double(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_diagonal_is_within_its_errors(curvature: Any) -> None:
    """Steep directions are treated exactly, and are projected out of the samples."""
    model, closure, dense = of_mlp(12)
    A = dense[curvature]
    errors = {}
    for directions in (0, 3):
        found = diagonal(closure, model, products=150, directions=directions, curvature=curvature)
        assert found.products == 150
        clear = found.standard_errors > 1e-9 * float(found.standard_errors.max())
        ratio = (found.values - A.diagonal())[clear] / found.standard_errors[clear]
        assert 0.7 < float(ratio.square().mean().sqrt()) < 1.4
        errors[directions] = float((found.values - A.diagonal()).norm())
        if directions == 0:
            off = A - torch.diag(A.diagonal())
            expected = (off.square().sum(1) / 150).sqrt()  # of signs, by their formula
            ratio = found.standard_errors[clear] / expected[clear]
            assert 0.8 < float(ratio.square().mean().sqrt()) < 1.25
    assert errors[3] < (1.2 if curvature == "hessian" else 0.6) * errors[0]
    parts = found.parts(model.parameters())
    assert [part.shape for part in parts] == [p.shape for p in model.parameters()]
    assert torch.equal(torch.cat([part.flatten() for part in parts]), found.values)


# On several processes.


def on_shards(rank: int, world_size: int, sizes: list[int]) -> tuple[Trace, Diagonal]:
    model = MLP.model()
    (x, y) = MLP.batch(sum(sizes))
    x = x.split(sizes)[rank]
    y = y.split(sizes)[rank]
    options: Any = {"process_group": dist.group.WORLD if world_size > 1 else None}
    closure = lambda: (cross_entropy(model(x), y), len(y))  # noqa: E731
    return (
        trace(closure, model, products=15, **options),
        diagonal(closure, model[4], products=9, **options),
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_processes_equal_one(world: World, world_size: int) -> None:
    sizes = [[3, 8], [1, 4, 6]][world_size - 2]
    results = world.run(on_shards, world_size, sizes)
    of_trace, of_diagonal = on_shards(0, 1, [11])
    for found, diagonals in results:
        assert found == results[0][0]
        assert found.value == pytest.approx(of_trace.value)
        assert found.standard_error == pytest.approx(of_trace.standard_error)
        assert torch.equal(diagonals.values, results[0][1].values)
        torch.testing.assert_close(diagonals.values, of_diagonal.values)
        torch.testing.assert_close(diagonals.standard_errors, of_diagonal.standard_errors)


# Some of the parameters.


def test_a_subset_of_parameters_has_its_block() -> None:
    """Of a module within the model, or in any order; each once, and no frozen one."""
    model, closure, dense = of_mlp()
    names = [name for name, _ in model.named_parameters()]
    parts = torch.arange(111).split([p.numel() for p in model.parameters()])
    for params, chosen in (
        (model[0], ["0.weight", "0.bias"]),
        ([*model[4].parameters(), model[2].bias, model[4].bias], ["4.weight", "4.bias", "2.bias"]),
    ):
        rows = torch.cat([parts[names.index(name)] for name in chosen])
        options: Any = {"largest": 3, "iterations": 60, "tol": 1e-9}
        found = eigenpairs(closure, params, **options)
        assert found.eigenvectors.shape[1] == len(rows)
        expected = torch.linalg.eigvalsh(dense["hessian"][rows][:, rows]).flip(0)[:3]
        torch.testing.assert_close(found.eigenvalues, expected)
        density = spectral_density(closure, params, probes=2, iterations=5)
        assert density.size == len(rows)
    model[0].weight.requires_grad_(False)
    assert trace(closure, model[0], products=9).size == model[0].bias.numel()
    for result in (diagonal(closure, model[0]), eigenpairs(closure, model[0], largest=1)):
        (part,) = result.parts([model[0].bias])
        assert part.shape[-1:] == model[0].bias.shape
        with pytest.raises(ValueError, match=r"42 elements, .* have 7; .* require a gradient"):
            result.parts(model[0].parameters())


# A loader.


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_loader_gives_the_mean_over_its_examples(curvature: Any) -> None:
    """The last batch is shorter, and the loader shuffles."""
    model, _, dense = of_mlp(11)
    loader = DataLoader(TensorDataset(*MLP.batch(11)), batch_size=4, shuffle=True)
    criterion = nn.CrossEntropyLoss(reduction="none" if curvature == "empirical-fisher" else "mean")
    losses = losses_over(model, loader, criterion)
    assert len(losses) == 3
    options: Any = {"largest": 3, "iterations": 60, "tol": 1e-9, "curvature": curvature}
    found = eigenpairs(losses, model, **options)
    expected = torch.linalg.eigvalsh(dense[curvature]).flip(0)[:3]
    torch.testing.assert_close(found.eigenvalues, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    ("batches", "criterion", "message"),
    [
        ([], cross_entropy, "there is no batch"),
        ([{"x": 1}], cross_entropy, "batch 0 is a dict, not a pair"),
        ([(1, 2, 3)], cross_entropy, "a tuple of 3, not a pair"),
        ([MLP.batch(2)], nn.CrossEntropyLoss(reduction="sum"), "use reduction='mean'"),
        ([MLP.batch(2)], partial(cross_entropy, reduction="sum"), "use reduction='mean'"),
    ],
)
def test_values_that_are_not_loaders_raise(batches: Any, criterion: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        losses_over(MLP.model(), batches, criterion)


# Bad numbers.


def test_too_few_products_raise() -> None:
    _, loss, w = problem(3, 0)
    for estimate in (trace, diagonal):
        with pytest.raises(ValueError, match=r"products=1 .*use products=6 or more"):
            estimate(loss, [w], products=1)  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"products=9 with directions=4: .*products=10"):
            estimate(loss, [w], products=9, directions=4)  # type: ignore[operator]
        with pytest.raises(ValueError, match="directions=-1"):
            estimate(loss, [w], directions=-1)  # type: ignore[operator]
        with pytest.raises(TypeError, match=r"directions=2\.0 is not an integer"):
            estimate(loss, [w], directions=2.0)  # type: ignore[operator]


@pytest.mark.parametrize("estimate", [trace, diagonal])
def test_non_finite_values_raise(estimate: Any) -> None:
    w = nn.Parameter(torch.ones(4).double())
    with pytest.raises(CurvatureError, match="not finite"):
        estimate(lambda: (w * math.inf).square().sum(), [w])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.layer(x + shift)


def test_batches_can_have_several_inputs() -> None:
    model = Pair().double()
    x, shift, y = torch.randn(3, 4, 3).double().unbind()
    plain = trace(lambda: (model(x, shift) - y[:, :2]).square().mean(), model, products=30)
    for inputs in ((x, shift), [x, shift], {"shift": shift, "x": x}):
        losses = losses_over(model, [(inputs, y[:, :2])], functional.mse_loss)
        assert trace(losses, model, products=30).value == pytest.approx(plain.value)


def test_the_width_option_sets_the_width_of_the_peaks() -> None:
    _, loss, w = problem(8, 0)
    density = spectral_density(loss, [w], probes=2, iterations=20)
    for width, message in (
        (0, r"width=0 is outside \(0, inf\)"),
        (-0.1, "-0.1"),
        (math.nan, "nan"),
    ):
        with pytest.raises(ValueError, match=message):
            density.on(torch.ones(3), width)
    with pytest.raises(TypeError, match="width=None is not a number"):
        density.on(torch.ones(3), None)  # type: ignore[arg-type]

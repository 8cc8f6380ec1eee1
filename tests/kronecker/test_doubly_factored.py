"""Three Kronecker factors: doubly factored Linears and their solves.

Invariants 15 and 18 for three factors. A block multiplies a gradient (out, channels,
locations), row after row: it is kron(G, A, L).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference as ref
import torch
from factor_checks import dense as dense_block
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CLASSES
from optimizer_cases import make, matrices, take
from reference import cross_entropy
from tolerances import near
from torch import Tensor, nn

from second_order import DistKFAC
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.doubly_factored import rank_one
from second_order.kronecker.layers import PairOptions, full_row_mask
from second_order.kronecker.solvers import SOLVERS, Problem

F32 = torch.float32
F64 = torch.float64
SEEDS = st.integers(0, 2**16)
SIZES = st.integers(1, 5)
DAMPINGS = st.floats(1e-4, 10.0)
few = settings(max_examples=8)
each_solver = pytest.mark.parametrize("solver", ["eigen", "inverse"])


def distkfac(model: nn.Module, **options: Any) -> Any:
    return make(DistKFAC, model, **{"async_inverse": False, "precondition_norms": True, **options})


def factor(dim: int) -> Tensor:
    x = torch.randn(2 * dim, dim, dtype=F64)
    return x.T @ x / len(x)


def network(channels: int, locations: int) -> nn.Sequential:
    """The doubly factored layer is "1"."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * locations, 3), nn.Tanh(), nn.Linear(3, CLASSES)
    ).double()


def doubly_factored(
    model: nn.Module, channels: int, locations: int, **options: Any
) -> tuple[Any, KroneckerBlock]:
    optimizer = distkfac(model, doubly_factored={"1": (locations, channels)}, **options)
    (block,) = (b for b in optimizer._curvature.layers.blocks if b.name == "1")
    assert block.shape.locations == locations
    return optimizer, block


def alg(block: KroneckerBlock) -> tuple[Tensor, Tensor, Tensor]:
    """A, L and G of a block."""
    A, L, G = (each[0] for each in matrices(block.ensure_factors()))
    return A, L, G


def weight_fisher(fisher: Tensor, width: int) -> Tensor:
    """Without the bias, which is the last column of a row."""
    selected = [i for i in range(len(fisher)) if i % (width + 1) != width]
    return fisher[selected][:, selected]


# The best rank one.


def best_error(x: Tensor) -> Tensor:
    """‖x - ψκᵀ‖ of the best approximation, and σ, for each of (N, C, T)."""
    values = torch.linalg.svdvals(x)
    return torch.stack([values[:, 1:].square().sum(1).sqrt(), values[:, 0]])


@pytest.mark.parametrize("scale", [1e-36, 1e-22, 1e22, 1e36])
@pytest.mark.parametrize("shape", [(3, 6), (6, 3)], ids=str)
def test_18_rank_one_in_float32_far_from_one(shape: tuple[int, int], scale: float) -> None:
    x = torch.randn(4, *shape, dtype=F64)
    psi, kappa = rank_one((x * scale).float())
    product = (psi.double()[:, :, None] * kappa.double()[:, None]) / scale
    rest, sigma = best_error(x)
    near((x - product).norm(dim=(1, 2)), rest, rtol=1e-5)
    near(psi.double().norm(dim=1).square() / scale, sigma, rtol=1e-5)
    near(kappa.double().norm(dim=1).square() / scale, sigma, rtol=1e-5)


# 18. Doubly factored: exact for one example of rank-one input; unchanged by the SVD's sign.


@few
@given(channels=SIZES, locations=SIZES, seed=SEEDS)
def test_18_exact_for_one_example_of_rank_one(channels: int, locations: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = network(channels, locations)
    x = torch.einsum("c,t->ct", *(torch.randn(k, dtype=F64) for k in (channels, locations)))[None]
    y = torch.randint(CLASSES, (1,))
    optimizer, block = doubly_factored(model, channels, locations, lr=0.0)
    take(model, optimizer, (x, y))
    width = channels * locations
    empirical = weight_fisher(ref.empirical_fisher(model, x, y, cross_entropy, "1"), width)
    near(dense_block(block.ensure_factors())[0], empirical, rtol=1e-9)
    # The expectation over the model's labels: the layer's G is the sum over them.
    v = ref.label_gradients(model(x).detach(), "categorical")
    total = torch.zeros_like(empirical)
    for label in range(CLASSES):
        ((_, d),) = ref.captured(model, x, lambda out, i=label: (out * v[i]).sum(), "1")["1"]
        pair = block.statistics(
            model[1], x.flatten(1), d, PairOptions(False, "expand", full_row_mask(len(x)))
        )
        A, G, L = (part[0] for part in pair.factors.values())
        total += ref.kron(G, A, L)
    exact = weight_fisher(ref.exact_fisher(model, x, "categorical", "1"), width)
    near(total, exact, rtol=1e-9)


@few
@given(n=SIZES, channels=SIZES, locations=SIZES, seed=SEEDS)
def test_18_the_factors_are_the_means_over_examples(
    n: int, channels: int, locations: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = network(channels, locations)
    x = torch.randn(n, channels, locations, dtype=F64)
    y = torch.randint(CLASSES, (n,))
    optimizer, block = doubly_factored(model, channels, locations, lr=0.0)
    take(model, optimizer, (x, y))
    ((_, d),) = ref.captured(model, x, lambda out: cross_entropy(out, y), "1")["1"]
    L, A, G = ref.doubly_factored_factors(x.mT, d)
    for found, expected in zip(alg(block), (A, L, G), strict=True):
        near(found, expected, rtol=1e-8)
    near(dense_block(block.ensure_factors())[0], ref.kron(G, A, L), rtol=1e-8)


def test_reduce_averages_the_inputs_of_an_example_before_they_are_factored() -> None:
    _, block = doubly_factored(network(2, 3), 2, 3, lr=0.0)
    x = torch.randn(4, 5, 6, dtype=F64)
    d = torch.randn(4, 5, block.shape.out_dim, dtype=F64)
    module = block.modules[0]
    found = block.statistics(module, x, d, PairOptions(False, "reduce", full_row_mask(20)))
    options = PairOptions(False, "expand", full_row_mask(4))
    expected = block.statistics(module, x.mean(1), d.sum(1), options)
    assert float(found.num_examples) == 4
    for name, matrix in expected.factors.items():
        near(found.factors[name], matrix)


def test_a_non_finite_input_makes_a_non_finite() -> None:
    """The output of such an input may be masked. Its replacement in `eigh` must not count."""
    _, block = doubly_factored(network(2, 3), 2, 3, lr=0.0)
    x = torch.randn(4, 6, dtype=F64)
    d = torch.randn(4, block.shape.out_dim, dtype=F64)
    x[1, 1] = math.nan
    pair = block.statistics(
        block.modules[0], x, d, PairOptions(False, "expand", full_row_mask(len(x)))
    )
    assert not pair.factors["A"].isfinite().all()


# 15. eigen = dense solve with A ⊗ L ⊗ G + γI. inverse = dense solve with the damped factors.


def dense(solver: str, A: Tensor, L: Tensor, G: Tensor, gradient: Tensor, damping: float) -> Tensor:
    if solver == "eigen":
        return ref.dense_solve(ref.kron(G, A, L), gradient, damping)
    A, L, G = ref.damp((A, L, G), damping)
    return ref.dense_solve(ref.kron(G, A, L), gradient)


def inverse_of(solver: str, A: Tensor, G: Tensor, L: Tensor, damping: float) -> Any:
    means = torch.stack([f.diagonal().mean()[None] for f in (A, G, L)])
    problems = [
        Problem(f[None], len(f), F64, added)
        for f, added in zip((A, G, L), SOLVERS[solver].split_damping(means, damping), strict=True)
    ]
    found = SOLVERS[solver].decompose(problems, F64)
    parts = {k: part for k, part in zip("AGL", found, strict=True) if part is not None}
    return SOLVERS[solver].combine(parts, damping)


@each_solver
@few
@given(dims=st.tuples(SIZES, SIZES, SIZES), damping=DAMPINGS, seed=SEEDS)
def test_15_three_factor_solves_equal_dense_solves(
    solver: str, dims: tuple[int, int, int], damping: float, seed: int
) -> None:
    A, G, L = map(factor, dims)
    gradient = torch.randn(1, dims[1], dims[0] * dims[2], dtype=F64)
    inverse = inverse_of(solver, A, G, L, damping)
    selected = gradient.clone()
    near(inverse.precondition(gradient), dense(solver, A, L, G, gradient, damping), rtol=1e-8)
    assert torch.equal(gradient, selected)

"""The Lanczos engine: eigenpairs and spectral density, on one process and on many.

The loss ½wᵀAw has the Hessian A: `quadratic(A)`. Functions that take (rank, world_size, ...) run on
the pool's ranks.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanczos_spaces import space_of
from models import ZOO
from reference import cross_entropy, hessian
from torch import Tensor, nn

from second_order.distributed.world import World
from second_order.errors import CurvatureError
from second_order.lanczos import (
    Eigenpairs,
    Hessian,
    diagonal,
    eigenpairs,
    spectral_density,
    trace,
)
from second_order.lanczos.estimates import random_vector
from second_order.lanczos.hvp import RowSpace
from second_order.lanczos.lanczos import ritz_pairs, tridiagonalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


MLP = ZOO["mlp"]
few = settings(max_examples=15, deadline=None)


def symmetric(eigenvalues: Iterable[float], seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues and random eigenvectors."""
    values = torch.tensor([*eigenvalues], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator).double())[0]
    return Q @ torch.diag(values) @ Q.T


def quadratic(
    A: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A loss with the Hessian A, and its parameters."""
    w = nn.Parameter(torch.ones(len(A), dtype=dtype))
    A = A.to(dtype)
    return lambda: 0.5 * w @ A @ w, [w]


def of_quadratic(A: Tensor, **options: Any) -> Eigenpairs:
    return eigenpairs(*quadratic(A), **{"largest": 2, **options})


def both_ends(A: Tensor, largest: int, smallest: int) -> Tensor:
    """As `Eigenpairs.eigenvalues` has them."""
    values = torch.linalg.eigvalsh(A)
    return torch.cat([values.flip(0)[:largest], values[:smallest]])


def explicit_residuals(pairs: Eigenpairs, A: Tensor) -> Tensor:
    V = pairs.eigenvectors.double()
    return (V @ A - pairs.eigenvalues[:, None] * V).norm(dim=1)


def assert_pairs(pairs: Eigenpairs, A: Tensor, tol: float = 1e-10) -> None:
    """Orthonormal vectors, the stated residuals, both ends of the spectrum."""
    scale = float(torch.linalg.matrix_norm(A, 2)) or 1.0
    count = len(pairs.eigenvalues)
    V = pairs.eigenvectors.double()
    torch.testing.assert_close(V @ V.T, torch.eye(count).double(), rtol=0, atol=tol)
    expected = both_ends(A, pairs.largest, count - pairs.largest)
    torch.testing.assert_close(pairs.eigenvalues, expected, rtol=0, atol=tol * scale)
    residuals = explicit_residuals(pairs, A)
    torch.testing.assert_close(pairs.residuals, residuals, rtol=0, atol=tol * scale)


# The recurrence.


@few
@given(
    st.integers(1, 40), st.integers(1, 50), st.integers(0, 99),
    st.sampled_from([(torch.float64, 1e-12), (torch.float32, 2e-6)]),
    st.sampled_from(["spread", "low rank", "clustered"]),
)  # fmt: skip
def test_the_basis_is_orthonormal_and_tridiagonalizes_the_matrix(
    size: int, iterations: int, seed: int, precision: tuple[torch.dtype, float], kind: str
) -> None:
    dtype, tol = precision
    values = {
        "spread": [10.0 ** (i / 5) for i in range(size)],
        "low rank": [float(i) if i < 4 else 0.0 for i in range(size)],
        "clustered": [1.0 + 1e-3 * (i % 5) for i in range(size)],
    }[kind]
    A = symmetric(values, seed).to(dtype)
    space = space_of(lambda d: A @ d, size, dtype)
    run = tridiagonalize(space, space.random(seed, 3.0), iterations, at_least=iterations)
    assert run.finite
    assert len(run.diagonal) == min(size, iterations)
    D = run.basis.double()
    torch.testing.assert_close(D @ D.T, torch.eye(len(D)).double(), rtol=0, atol=tol)
    inner = run.off_diagonal[:-1]
    B = torch.diag(run.diagonal) + torch.diag(inner, 1) + torch.diag(inner, -1)
    scale = max(values)
    torch.testing.assert_close(D @ A.double() @ D.T, B, rtol=0, atol=10 * tol * scale)


# Eigenpairs.


@few
@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=25),
    st.integers(0, 4), st.integers(0, 4), st.integers(0, 99),
)  # fmt: skip
def test_a_full_run_finds_both_ends(
    values: list[float], largest: int, smallest: int, seed: int
) -> None:
    """Distinct eigenvalues, as many as there are unknowns."""
    values = [value + i for i, value in enumerate(sorted(values))]
    largest = min(max(largest, 1), len(values))
    smallest = min(smallest, len(values) - largest)
    A = symmetric(values, seed)
    pairs = of_quadratic(
        A, largest=largest, smallest=smallest, iterations=len(A), tol=0.0, seed=seed
    )
    assert pairs.products == len(A)
    assert_pairs(pairs, A)


@pytest.mark.parametrize("hvp", ["retained", "recomputed", "differences"])
def test_eigenpairs_of_networks_equal_dense_ones(hvp: Any) -> None:
    """Both ends against the dense Hessian's, and the vectors parameter by parameter."""
    model = MLP.model()
    (x, y) = MLP.batch(12)
    H = hessian(model, x, y, cross_entropy)
    pairs = eigenpairs(
        lambda: cross_entropy(model(x), y), model,
        largest=4, smallest=3, iterations=60, tol=1e-9, hvp=hvp,
    )  # fmt: skip
    assert_pairs(pairs, H, 1e-6 if hvp == "differences" else 1e-10)
    assert pairs.converged.all() or hvp == "differences"
    parts = pairs.parts(model.parameters())
    assert [part.shape for part in parts] == [(7, *p.shape) for p in model.parameters()]
    assert torch.equal(torch.cat([part.flatten(1) for part in parts], 1), pairs.eigenvectors)


def test_iterations_stop_when_all_pairs_are_within_tol() -> None:
    A = symmetric(1.2**i for i in range(60))
    products = []
    for tol in (0.0, 1e-8, 1e-2):
        pairs = of_quadratic(A, largest=3, iterations=50, tol=tol)
        products.append(pairs.products)
        assert pairs.converged.all()
    assert products[0] == 50 > products[1] > products[2] > 3
    shorter = of_quadratic(A, largest=3, iterations=products[1] - 1, tol=1e-8)
    assert not shorter.converged.all(), "no product is made in vain"
    one_end = of_quadratic(A, largest=1, iterations=50, tol=1e-8)
    assert one_end.products < products[1]


class Coarse(RowSpace):
    """A space whose first inner products with the basis are rounded, as those of long vectors."""

    def apply(self, d: Tensor) -> Tensor:
        self.fresh = True
        return super().apply(d)

    def total(self, x: Tensor) -> Tensor:
        rounded = getattr(self, "fresh", False)
        self.fresh = False
        return x.bfloat16().double() if rounded else x


def test_reorthogonalization_leaves_unit_vectors() -> None:
    """The remainder is measured directly, because a difference of squares loses digits."""
    A = 1.2345 * torch.diag(torch.arange(1.0, 31.0))
    start = torch.full((30,), 1e-7)
    start[-2:] = 1.0
    run = tridiagonalize(space_of(lambda d: A @ d, 30, kind=Coarse), start, 4)
    assert 1e-4 < run.off_diagonal[1] < 1e-3
    torch.testing.assert_close(run.basis.norm(dim=1), torch.ones(4), rtol=0, atol=1e-5)


def test_a_start_in_an_invariant_subspace_stays_in_it() -> None:
    """The sum of r exact eigenvectors ends after r products, of however small a share of one."""
    A = symmetric(range(1, 31))
    values, Q = torch.linalg.eigh(A)
    for shares in ([1.0, 1.0, 1.0], [1.0, 1e-3, 50.0]):
        start = Q[:, -3:] @ torch.tensor(shares).double()
        pairs = of_quadratic(A, largest=3, iterations=30, tol=1e-6, start=start)
        assert pairs.products == 3
        assert_pairs(pairs, A, 1e-9)
    within = (Q[:, 10] + Q[:, 12]).requires_grad_()
    inner = of_quadratic(A, largest=2, iterations=30, tol=1e-6, start=within)
    torch.testing.assert_close(inner.eigenvalues, values[[12, 10]], rtol=1e-10, atol=0)
    assert inner.products == 2
    # One eigenvector is not enough for two pairs, so it continues from a random vector.
    more = of_quadratic(A, largest=2, iterations=30, tol=1e-9, start=Q[:, -1].clone())
    assert_pairs(more, A, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "values",
    [[0.0] * 12, [3.0] * 12, [-2.0] * 12, [5.0] + [0.0] * 11, [4.0, 2.0, -1.0] + [0.0] * 9,
     [1.0] * 6 + [2.0] * 6, [1e-30] * 12, [1e25] * 6 + [2e25] * 6],
    ids=["zero", "identity", "negative", "rank 1", "rank 3", "two", "tiny", "huge"],
)  # fmt: skip
def test_exhausted_krylov_spaces_are_extended(values: list[float], dtype: torch.dtype) -> None:
    """A random start sees one vector of each eigenspace; further ones come from fresh vectors."""
    A = symmetric(values).to(dtype).double()
    loss, params = quadratic(A, dtype)
    tol = 1e-10 if dtype == torch.float64 else 5e-6
    for largest, smallest in ((1, 0), (1, 1), (12, 0), (6, 6), (5, 4)):
        pairs = eigenpairs(loss, params, largest=largest, smallest=smallest, iterations=12)
        scale = float(A.abs().max()) or 1.0
        residuals = explicit_residuals(pairs, A)
        assert float(residuals.max()) <= 3 * tol * scale
        torch.testing.assert_close(pairs.residuals, residuals, rtol=0, atol=3 * tol * scale)
        V = pairs.eigenvectors.double()
        torch.testing.assert_close(V @ V.T, torch.eye(len(V)).double(), rtol=0, atol=tol)
        if largest + smallest in (2, 12):  # the extreme ones of the spectrum without multiplicity
            ends = both_ends(A, largest, smallest)
            torch.testing.assert_close(pairs.eigenvalues, ends, rtol=0, atol=10 * tol * scale)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("hvp", ["retained", "recomputed", "differences"])
def test_non_finite_losses_raise(hvp: Any, value: float) -> None:
    loss, params = quadratic(symmetric(range(5)))
    for estimate in (eigenpairs, spectral_density):
        with pytest.raises(CurvatureError, match="not finite"):
            estimate(lambda: loss() * value, params, hvp=hvp)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"largest": 0}, "sum must be between 1 and the number of parameters, 5"),
        ({"largest": 6}, "sum must be between 1"),
        ({"largest": 3, "smallest": 3}, "sum must be between 1"),
        ({"largest": -1, "smallest": 3}, "largest=-1 is below 0"),
        ({"largest": 2, "iterations": 1}, "iterations=1 is below 2; .* largest"),
        ({"tol": -1}, r"tol=-1 is outside \[0, inf\); 1e-3 is the default"),
        ({"tol": math.nan}, "tol=nan is outside"),
        ({"seed": -1}, "seed=-1 is below 0"),
        ({"start": torch.ones(4)}, r"start has shape .* must be \(5,\)"),
        ({"start": torch.zeros(5)}, "start is zero or not finite"),
        ({"start": torch.full((5,), math.nan)}, "start is zero or not finite"),
        ({"hvp": "dense"}, "not one of 'auto'"),
    ],
)
def test_arguments_outside_of_their_bounds_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_quadratic(symmetric(range(5)), **options)


def test_counts_and_seeds_must_be_integers() -> None:
    A = symmetric(range(1, 9))
    for name, value in itertools.product(("largest", "smallest", "iterations", "seed"), (2.0, "2")):
        with pytest.raises(TypeError, match=f"{name}={value!r} is not an integer; use"):
            of_quadratic(A, **{name: value})


def test_a_seed_can_be_an_integer_of_numpy() -> None:
    A = symmetric(range(1, 9))
    expected = of_quadratic(A, seed=3)
    assert torch.equal(of_quadratic(A, seed=np.int64(3)).eigenvectors, expected.eigenvectors)


def test_params_that_are_not_tensors_raise() -> None:
    model = MLP.model()
    (x, y) = MLP.batch(3)
    for params in (model.named_parameters(), dict(model.named_parameters()), [model]):
        with pytest.raises(TypeError, match=r"not a parameter; .* model\.parameters\(\)"):
            eigenpairs(lambda: cross_entropy(model(x), y), params, largest=1)  # type: ignore[arg-type]


def test_seeds_above_those_of_torch_raise() -> None:
    loss, params = quadratic(torch.eye(3).double())
    for estimate in (eigenpairs, trace, diagonal, spectral_density):
        with pytest.raises(ValueError, match="use a smaller one"):
            estimate(loss, params, seed=2**64)  # type: ignore[operator]


@pytest.mark.parametrize("hvp", ["retained", "recomputed", "differences"])
def test_a_constant_loss_raises(hvp: Any) -> None:
    """Is an error, where a linear loss has no curvature; a micro-batch may do without them."""
    (loss, _) = quadratic(symmetric(range(5)))
    other = nn.Parameter(torch.ones(6).double())
    for estimate in (eigenpairs, spectral_density, trace, diagonal):
        with pytest.raises(CurvatureError, match="does not depend on any of the parameters"):
            estimate(loss, [other], hvp=hvp)
    assert float(eigenpairs(other.sum, [other], largest=1, hvp=hvp).eigenvalues) == 0.0
    both = [loss, lambda: other.square().sum()]
    found = eigenpairs(both, [other], largest=1, hvp=hvp)
    assert float(found.eigenvalues) == pytest.approx(1.0)


# The spectral density.


@few
@given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 99))
def test_a_full_run_equals_the_quadrature_of_its_probes(size: int, probes: int, seed: int) -> None:
    """Mean of zᵀf(H)z / zᵀz over the probes z, exactly, for any f."""
    A = symmetric([0.5 * i - 3 for i in range(size)], seed)
    density = spectral_density(*quadratic(A), probes=probes, iterations=size, seed=seed)
    assert density.products == probes * size
    torch.testing.assert_close(
        density.weights.sum(1), torch.ones(probes).double(), rtol=0, atol=1e-12
    )
    space = space_of(lambda d: d, size, torch.float64)
    Z = torch.stack([random_vector(space, seed, i) for i in range(probes)])
    functions: Sequence[Any] = [lambda x: x, torch.square, torch.exp]
    for function, f_of_A in zip(functions, [A, A @ A, torch.matrix_exp(A)], strict=True):
        means = ((Z @ f_of_A) * Z).sum(1) / Z.square().sum(1)
        assert density.expectation(function) == pytest.approx(float(means.mean()), rel=1e-9)


def test_on_a_grid_the_density_equals_the_histogram() -> None:
    """A quarter of the eigenvalues at −2, half at 0, a quarter at 3; n = 400."""
    A = torch.tensor([-2.0] * 100 + [0.0] * 200 + [3.0] * 100).double()
    w = nn.Parameter(torch.ones(400).double())
    density = spectral_density(lambda: 0.5 * (A * w * w).sum(), [w], probes=20, iterations=10)
    assert density.nodes.shape == density.weights.shape == (20, 10)
    assert density.products == 60, "three products exhaust the space"
    assert not density.weights[:, 3:].any()
    grid = torch.linspace(-4, 5, 9001)
    curve = density.on(grid, 0.1)
    step = 9 / 9000
    assert float(curve.sum()) * step == pytest.approx(1.0, abs=1e-6)
    for center, share in ((-2.0, 0.25), (0.0, 0.5), (3.0, 0.25)):
        near = (grid - center).abs() < 0.5
        assert float(curve[near].sum()) * step == pytest.approx(share, abs=0.03)
    far = (grid - 1.5).abs() < 0.5
    assert float(curve[far].sum()) * step < 1e-6


def test_functions_with_a_pole_at_zero_have_an_expectation() -> None:
    """Also if a probe ended early: the log-determinant and the mean inverse of 2 I."""
    density = spectral_density(*quadratic(2 * torch.eye(5).double()), probes=2, iterations=5)
    assert density.products == 2
    assert density.expectation(torch.log) == pytest.approx(math.log(2))
    assert density.expectation(torch.reciprocal) == pytest.approx(0.5)


def test_the_loss_of_micro_batches_is_weighted_by_their_examples() -> None:
    w = nn.Parameter(torch.ones(2).double())
    losses = [lambda: (w.square().sum(), 1), lambda: (4 * w.square().sum(), 3)]
    with RowSpace(Hessian(losses, [w]), World.alone(), torch.float64) as space:
        space.apply(torch.ones(2).double())
        assert space.loss() == pytest.approx((2 * 1 + 8 * 3) / 4)


WRONG: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "not finite": lambda u, Q: (u, Q * torch.nan),
    "too long": lambda u, Q: (u, Q * 1.001),
    "of other vectors": lambda u, Q: (u, Q.roll(1, 1)),
    "of other values": lambda u, Q: (u * 1.001, Q),
    "twice the same": lambda u, Q: (u[[0, 0, *range(2, len(u))]], Q[:, [0, 0, *range(2, len(u))]]),
    "in another order": lambda u, Q: (u.flip(0), Q.flip(1)),
}


@pytest.mark.parametrize("kind", [*WRONG, "right", "right, with other signs"])
def test_a_wrong_decomposition_is_rejected(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    diagonal = torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    other_spectrum = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    native = torch.linalg.eigh
    change = WRONG.get(kind, lambda u, Q: (u, -Q if "signs" in kind else Q))
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: change(*native(matrix)))
    found = ritz_pairs(diagonal, other_spectrum)
    for part in (found.values, found.vectors, found.residuals):
        expected = kind not in WRONG
        assert part.isfinite().all() if expected else part.isnan().all()

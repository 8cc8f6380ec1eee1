"""Damped solves against dense ones, and the ladder that a failing decomposition climbs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import clip_factor, damped_dense_solve, damped_factored_solve, kron
from torch import Tensor

from second_order.kronecker import decompositions, solvers, triangles
from second_order.kronecker.clip import kl_change, kl_clip_coefficient
from second_order.kronecker.decompositions import (
    Problem,
    orthogonal_iteration,
)
from second_order.kronecker.solvers import SOLVERS, factored_damping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DENSE = {"eigen": damped_dense_solve, "inverse": damped_factored_solve}
each_solver = pytest.mark.parametrize("name", ["eigen", "inverse"])

DAMPINGS = st.floats(1e-4, 10.0)
GROUPS = st.integers(1, 3)
DIMS = st.integers(1, 7)
SEEDS = st.integers(0, 2**16)
F32, F64 = torch.float32, torch.float64


def factor(groups: int, dim: int, rank: int | None = None) -> Tensor:
    """A positive semi-definite factor, of full rank unless told."""
    x = torch.randn(groups, 2 * dim if rank is None else rank, dim, dtype=torch.float64)
    return x.mT @ x / max(1, x.shape[1])


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Of matrices, or of diagonals ``(groups, n)``; shape ``(groups,)``."""
    return (factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)).mean(-1)


def problem(matrix: Tensor, added: Tensor | None = None, guess: Tensor | None = None) -> Problem:
    """Of a matrix, or of a diagonal ``(groups, n)``."""
    groups, dim = matrix.shape[:2]
    return Problem(
        groups, dim, matrix.dtype, matrix.device, matrix.clone, added, guess, matrix.dim() == 2
    )


def damped(name: str, A: Tensor, G: Tensor, damping: Any) -> list[Problem]:
    means = torch.stack([mean_eigenvalue(A), mean_eigenvalue(G)])
    added = SOLVERS[name].dampings(means, damping)
    return [problem(matrix, on) for matrix, on in zip((A, G), added, strict=True)]


def solve(
    name: str, A: Tensor, G: Tensor, gradient: Tensor, damping: Any, triangular: bool = False
) -> Tensor:
    solver = SOLVERS[name]
    a, g = solver.decompose(damped(name, A, G, damping), A.dtype, triangular)
    assert a is not None
    assert g is not None
    return solver.combine({"A": a, "G": g}, damping).precondition(gradient)


def decompose(
    name: str, *matrices: Tensor, dtype: torch.dtype | None = None, triangular: bool = False
) -> list[Any]:
    kept = dtype or next((matrix.dtype for matrix in matrices), torch.float32)
    return SOLVERS[name].decompose([problem(m) for m in matrices], kept, triangular)


def restored(name: str, decomposition: tuple[Tensor, ...]) -> Tensor:
    """The matrix that was decomposed."""
    if name == "inverse":
        return torch.linalg.inv(decomposition[0].double())
    vectors, values = (part.double() for part in decomposition)
    return vectors @ torch.diag_embed(values) @ vectors.mT


def assert_solved(actual: Tensor, expected: Tensor, rtol: float = 1e-8) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


# Dense references.


@each_solver
@given(groups=GROUPS, d_in=DIMS, d_out=DIMS, damping=DAMPINGS)
def test_solves_equal_the_dense_solve(
    name: str, groups: int, d_in: int, d_out: int, damping: float
) -> None:
    A, G = factor(groups, d_in), factor(groups, d_out)
    gradient = torch.randn(groups, d_out, d_in, dtype=torch.float64)
    expected = torch.stack(
        [DENSE[name](A[i, None], G[i, None], gradient[i], damping) for i in range(groups)]
    )
    assert_solved(solve(name, A, G, gradient, damping), expected)
    assert_solved(solve(name, A, G, gradient, torch.tensor(damping, dtype=A.dtype)), expected)


@each_solver
@given(groups=GROUPS, d_in=DIMS, d_out=DIMS, damping=DAMPINGS)
def test_a_diagonal_factor_is_that_matrix(
    name: str, groups: int, d_in: int, d_out: int, damping: float
) -> None:
    diagonal, G = torch.rand(groups, d_in, dtype=torch.float64), factor(groups, d_out)
    diagonal[:, 0] = 0
    gradient = torch.randn(groups, d_out, d_in, dtype=torch.float64)
    expected = solve(name, torch.diag_embed(diagonal), G, gradient, damping)
    assert_solved(solve(name, diagonal, G, gradient, damping), expected)


@each_solver
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diagonal_factor_that_is_not_finite_is_given_up(name: str, bad: float) -> None:
    diagonal = torch.ones(1, 4)
    diagonal[0, 2] = bad
    failed, fine = decompose(name, diagonal, torch.ones(1, 4))
    assert failed is None
    assert torch.equal(fine[0], torch.ones(1, 4))


@each_solver
def test_the_two_solves_differ(name: str) -> None:
    """A test of one against the other's reference would notice."""
    A, G = factor(1, 4), factor(1, 3)
    gradient = torch.randn(1, 3, 4, dtype=torch.float64)
    other = DENSE["inverse" if name == "eigen" else "eigen"](A, G, gradient[0], 0.1)
    assert (solve(name, A, G, gradient, 0.1)[0] - other).norm() > 1e-3 * other.norm()


@each_solver
def test_factors_of_low_rank(name: str) -> None:
    A, G = factor(1, 6, rank=2), factor(1, 5, rank=1)
    gradient = torch.randn(1, 5, 6, dtype=torch.float64)
    assert_solved(
        solve(name, A, G, gradient, 0.01)[0], DENSE[name](A, G, gradient[0], 0.01), rtol=1e-6
    )


@each_solver
@pytest.mark.parametrize("zero", ["A", "G", "both"])
def test_a_zero_factor_leaves_the_damping(name: str, zero: str) -> None:
    """π is 1 then; the eigen solve divides by the damping alone."""
    A, G = factor(1, 3), factor(1, 2)
    A = A if zero == "G" else torch.zeros_like(A)
    G = G if zero == "A" else torch.zeros_like(G)
    gradient = torch.randn(1, 2, 3, dtype=torch.float64)
    P = solve(name, A, G, gradient, 0.25)
    if name == "eigen" or zero == "both":
        assert_solved(P, gradient / 0.25)
    else:
        assert_solved(P[0], DENSE[name](A, G, gradient[0], 0.25))


@each_solver
@given(st.integers(-12, 12), st.integers(-12, 12))
def test_a_common_scale_of_factors_and_damping_divides_the_solution(
    name: str, a_power: int, g_power: int
) -> None:
    """Invariant 12, in the solver: exact, as powers of two are."""
    a_scale, g_scale = 2.0**a_power, 2.0**g_power
    A, G = factor(1, 4), factor(1, 3)
    gradient = torch.randn(1, 3, 4, dtype=torch.float64)
    scaled = solve(name, A * a_scale, G * g_scale, gradient, 0.1 * a_scale * g_scale)
    assert_solved(scaled * a_scale * g_scale, solve(name, A, G, gradient, 0.1))


@each_solver
def test_huge_damping_gives_the_gradients_direction(name: str) -> None:
    A, G = factor(2, 4), factor(2, 3)
    gradient = torch.randn(2, 3, 4, dtype=torch.float64)
    assert_solved(solve(name, A, G, gradient, 1e12) * 1e12, gradient, rtol=1e-5)


# π.


@given(d_in=DIMS, d_out=DIMS, damping=DAMPINGS)
def test_pi_splits_the_damping(d_in: int, d_out: int, damping: float) -> None:
    """The product over the factors is γ, so that Π πᵢ = 1."""
    means = mean_eigenvalue(factor(2, d_in)), mean_eigenvalue(factor(2, d_out))
    on_a, on_g = factored_damping(*means, damping=damping)
    torch.testing.assert_close(on_a * on_g, torch.full((2,), damping, dtype=torch.float64))


@given(d_in=DIMS, d_out=DIMS, damping=DAMPINGS)
def test_factored_damping_is_never_less_than_the_damping(
    d_in: int, d_out: int, damping: float
) -> None:
    """⊗F̃ᵢ − ⊗Fᵢ − γI is positive semi-definite."""
    A, G = factor(1, d_in), factor(1, d_out)
    damped_a, damped_g = (each.damped() for each in damped("inverse", A, G, damping))
    excess = kron(damped_g[0], damped_a[0]) - kron(G[0], A[0])
    excess -= damping * torch.eye(len(excess), dtype=torch.float64)
    smallest = torch.linalg.eigvalsh(excess).min()
    assert smallest >= -1e-10 * float(kron(damped_g[0], damped_a[0]).abs().max())


@given(d_in=DIMS, d_out=DIMS, damping=DAMPINGS, scale=st.floats(1e-3, 1e3))
def test_the_inverse_solve_does_not_see_how_a_scale_is_split(
    d_in: int, d_out: int, damping: float, scale: float
) -> None:
    A, G = factor(1, d_in), factor(1, d_out)
    gradient = torch.randn(1, d_out, d_in, dtype=torch.float64)
    moved = solve("inverse", A * scale, G / scale, gradient, damping)
    assert_solved(moved, solve("inverse", A, G, gradient, damping))


@given(d_in=DIMS, d_out=DIMS, damping=DAMPINGS, stretch=st.floats(0.1, 10.0))
def test_pi_minimises_its_bound(d_in: int, d_out: int, damping: float, stretch: float) -> None:
    """The trace norm of what F̃_A ⊗ F̃_G adds to A ⊗ G + γI: no other split has less of it."""
    A, G = factor(1, d_in), factor(1, d_out)
    on_a, on_g = factored_damping(mean_eigenvalue(A), mean_eigenvalue(G), damping=damping)

    def bound(a: Tensor, g: Tensor) -> float:
        return float(a * d_in * G[0].trace() + g * d_out * A[0].trace())

    assert bound(on_a, on_g) <= bound(on_a * stretch, on_g / stretch) * (1 + 1e-12)


@given(dims=st.tuples(DIMS, DIMS, DIMS), damping=DAMPINGS)
def test_three_factors_are_damped_and_solved_like_two(
    dims: tuple[int, int, int], damping: float
) -> None:
    """Π πᵢ = 1, the excess is positive semi-definite, three inverses make the dense solve."""
    factors = [factor(1, dim) for dim in dims]
    added = factored_damping(*map(mean_eigenvalue, factors), damping=damping)
    assert float(torch.stack(added).prod()) == pytest.approx(damping)
    matrices = [
        f + on * torch.eye(f.shape[-1], dtype=f.dtype) for f, on in zip(factors, added, strict=True)
    ]
    first, second, third = (matrix[0] for matrix in matrices)
    dense = kron(kron(first, second), third)
    undamped = kron(kron(factors[0][0], factors[1][0]), factors[2][0])
    excess = dense - undamped - damping * torch.eye(len(dense), dtype=dense.dtype)
    assert torch.linalg.eigvalsh(excess).min() >= -1e-10 * float(dense.abs().max())
    inverses = [part[0] for (part,) in decompose("inverse", *matrices)]
    gradient = torch.randn(*dims, dtype=torch.float64)
    solved = torch.einsum("abc,ia,jb,kc->ijk", gradient, *inverses)
    assert_solved(solved.flatten(), torch.linalg.solve(dense, gradient.flatten()))


@pytest.mark.parametrize("zero", ["A", "G"])
def test_a_zero_trace_gives_pi_one(zero: str) -> None:
    A, G = factor(2, 3), factor(2, 4)
    (A if zero == "A" else G)[1] = 0
    on_a, on_g = factored_damping(mean_eigenvalue(A), mean_eigenvalue(G), damping=0.09)
    assert on_a[1].item() == on_g[1].item() == pytest.approx(0.3)
    assert on_a[0].item() != pytest.approx(0.3)


# Batches.


@each_solver
@given(
    shapes=st.lists(
        st.tuples(GROUPS, DIMS, st.sampled_from([torch.float32, torch.float64])), max_size=8
    ),
    kept=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    triangular=st.booleans(),
    batch_bytes=st.sampled_from([1, 500, 2**20]),
)
def test_batched_by_shape_equals_one_at_a_time(
    name: str,
    shapes: list[tuple[int, int, torch.dtype]],
    kept: torch.dtype,
    triangular: bool,
    batch_bytes: int,
) -> None:
    matrices = [
        (factor(groups, dim) + 0.1 * torch.eye(dim, dtype=torch.float64)).to(dtype)
        for groups, dim, dtype in shapes
    ]
    with (
        patch.object(solvers, "TRIANGULAR_FROM", 4),
        patch.object(decompositions, "CPU_BATCH_BYTES", batch_bytes),
    ):
        together = decompose(name, *matrices, dtype=kept, triangular=triangular)
        alone = [decompose(name, each, dtype=kept, triangular=triangular)[0] for each in matrices]
        shapes_kept = [
            SOLVERS[name].kept_shapes(*matrix.shape[:2], False, triangular) for matrix in matrices
        ]
    for i, (batched, single) in enumerate(zip(together, alone, strict=True)):
        assert tuple(tuple(part.shape) for part in batched) == shapes_kept[i]
        coarser = max(kept, matrices[i].dtype, key=lambda dtype: torch.finfo(dtype).eps)
        assert {part.dtype for part in (*batched, *single)} == {kept}
        pairs = list(zip(batched, single, strict=True))
        if name == "eigen":  # its vectors may differ by a sign
            pairs[0] = restored(name, batched), restored(name, single)
        for part, other in pairs:
            torch.testing.assert_close(part.to(coarser), other.to(coarser))


@each_solver
@pytest.mark.parametrize("triangular", [False, True])
def test_what_is_kept_holds_no_more_memory_than_it_needs_and_lies_row_after_row(
    name: str, triangular: bool
) -> None:
    """A rank that has computed it and one that has received it multiply in the same order."""
    with patch.object(solvers, "TRIANGULAR_FROM", 6):
        results = decompose(name, *(factor(2, dim) for dim in (5, 7, 5)), triangular=triangular)
    for part in (part for result in results for part in result):
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes


@each_solver
def test_factors_are_built_batch_by_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many matrices at a time as `CPU_BATCH_BYTES` allows, or one that is larger."""
    events: list[str] = []
    injected(monkeypatch, name, lambda matrix, _: events.append(f"{len(matrix)} decomposed"))
    monkeypatch.setattr(decompositions, "CPU_BATCH_BYTES", 2 * 3 * 3 * 8 + 5)

    def built(matrix: Tensor) -> Tensor:
        events.append("built")
        return matrix

    each = [
        Problem(1, dim, torch.float64, torch.device("cpu"), partial(built, factor(1, dim)))
        for dim in (3, 3, 3, 9)
    ]
    SOLVERS[name].decompose(each, torch.float64, False)
    two, one = ["built", "built", "2 decomposed"], ["built", "1 decomposed"]
    assert events == [*two, *one, *one]


@each_solver
def test_one_call_a_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    injected(monkeypatch, name, lambda matrix, _: calls.append(tuple(matrix.shape)))
    matrices = [factor(groups, dim) + torch.eye(dim) for groups, dim in [(1, 3), (2, 3), (1, 4)]]
    decompose(name, *matrices)
    assert sorted(calls) == [(1, 4, 4), (3, 3, 3)]


@each_solver
def test_nothing_to_decompose(name: str) -> None:
    assert decompose(name) == []


# Extremes that must not look like failures.


@each_solver
@given(
    dim=st.integers(1, 24),
    rank=st.integers(0, 3),
    power=st.integers(-18, 18),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_finite_factor_can_be_decomposed(
    name: str, dim: int, rank: int, power: int, dtype: torch.dtype
) -> None:
    """Of low rank, zero, tiny or huge, with the little damping that "inverse" has by then."""
    matrix = factor(1, dim, rank) * 10.0**power
    if name == "inverse":
        matrix += 1e-6 * 10.0**power * torch.eye(dim, dtype=torch.float64)
    matrix = matrix.to(dtype)
    (result,) = decompose(name, matrix)
    assert result is not None
    if name == "eigen":
        assert (result[1] >= 0).all()
        error = (restored(name, result) - matrix).abs().max()
        assert error <= 1e-4 * float(matrix.abs().max())


def test_without_damping_what_has_no_curvature_does_not_move() -> None:
    """The pseudo-inverse: a gradient has no part there but rounding."""
    A = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64))[None]
    G = torch.diag(torch.tensor([0.0, 4.0], dtype=torch.float64))[None]
    P = solve("eigen", A, G, torch.ones(1, 2, 2, dtype=torch.float64), 0.0)
    assert_solved(P, torch.tensor([[[0.0, 0.0], [0.125, 0.0]]], dtype=torch.float64))


def test_negative_eigenvalues_are_clamped() -> None:
    """Rounding makes some; with a small damping they would turn the step around."""
    matrix = torch.diag(torch.tensor([1.0, -1e-7, 0.0]))[None]
    ((_, values),) = decompose("eigen", matrix)
    assert values.min() == 0


# The ladder, each rung forced by injection.

NATIVE: dict[str, Any] = {
    "eigen": torch.linalg.eigh,
    "inverse": torch.linalg.cholesky_ex,
}


def injected(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[Tensor, Any], Any]
) -> list[tuple[torch.dtype, int]]:
    """`fault(matrix, result)` may raise, or return what stands in for the result.

    Returns:
        The dtype and the number of members of each call.
    """
    attempts: list[tuple[torch.dtype, int]] = []

    def faulty(matrix: Tensor) -> Any:
        attempts.append((matrix.dtype, len(matrix)))
        result = NATIVE[name](matrix)
        replaced = fault(matrix, result)
        return result if replaced is None else replaced

    monkeypatch.setattr(torch.linalg, NATIVE[name].__name__.removeprefix("linalg_"), faulty)
    return attempts


def raises(matrix: Tensor, result: Any) -> Any:
    raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")


def not_a_number(matrix: Tensor, result: Any) -> Any:
    return tuple(
        torch.full_like(part, math.nan) if part.is_floating_point() else part for part in result
    )


def inaccurate(matrix: Tensor, result: Any) -> Any:
    """Values of the right size, and wrong by a twentieth."""
    first, second = result
    if second.is_floating_point():  # eigenvalues first
        return first, second + 0.05 * second.roll(1, -1)
    return first * 1.05, second


def not_orthogonal(matrix: Tensor, result: Any) -> Any:
    """Where the eigenvalues vanish, Q Λ Qᵀ does not show it."""
    values, vectors = result
    return values, torch.where(values.unsqueeze(-2) < 1e-6 * values.max(), 2 * vectors, vectors)


def not_definite(matrix: Tensor, result: Any) -> Any:
    return result[0], torch.ones_like(result[1])


FAULTS = [
    ("eigen", raises),
    ("eigen", not_a_number),
    ("eigen", inaccurate),
    ("eigen", not_orthogonal),
    ("inverse", raises),
    ("inverse", not_a_number),
    ("inverse", inaccurate),
    ("inverse", not_definite),
]
each_fault = pytest.mark.parametrize(
    ("name", "fault"), FAULTS, ids=[f"{n} {f.__name__}" for n, f in FAULTS]
)


def sample(name: str, dim: int = 5) -> Tensor:
    """In float32; without full rank where that can be solved."""
    if name == "eigen":
        return factor(1, dim, rank=2).float()
    return (factor(1, dim) + 0.1 * torch.eye(dim)).float()


@each_fault
def test_float64_is_the_second_rung(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = sample(name)
    attempts = injected(
        monkeypatch, name, lambda m, r: fault(m, r) if m.dtype == torch.float32 else None
    )
    (result,) = decompose(name, matrix)
    assert attempts == [(torch.float32, 1), (torch.float64, 1)]
    assert result is not None
    assert {part.dtype for part in result} == {torch.float32}
    assert_solved(restored(name, result).float(), matrix, rtol=1e-5)


class ElsewhereTorch:
    """torch, with a CPU that is not the device of the factors."""

    def __getattr__(self, attribute: str) -> Any:
        return getattr(torch, attribute)

    @staticmethod
    def device(kind: str) -> torch.device:
        return torch.device(kind, 0)  # where "cpu" tensors are as well, under another name


@each_fault
def test_the_cpu_is_the_third_rung(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompositions, "torch", ElsewhereTorch())
    matrix = sample(name)
    attempts = injected(monkeypatch, name, lambda m, r: fault(m, r) if len(attempts) < 3 else None)
    (result,) = decompose(name, matrix)
    assert attempts == [(torch.float32, 1), (torch.float64, 1), (torch.float64, 1)]
    assert result is not None
    assert_solved(restored(name, result).float(), matrix, rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_fault
def test_the_cpu_is_the_third_rung_on_cuda(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = sample(name).cuda()
    attempts = injected(monkeypatch, name, lambda m, r: fault(m, r) if m.is_cuda else None)
    (result,) = decompose(name, matrix)
    assert attempts == [(torch.float32, 1), (torch.float64, 1), (torch.float64, 1)]
    assert result is not None
    assert all(part.is_cuda for part in result)
    assert_solved(restored(name, result).float(), matrix, rtol=1e-5)


@each_fault
def test_no_rung_is_left(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    injected(monkeypatch, name, fault)
    assert decompose(name, sample(name), sample(name, 3)) == [None, None]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_first_rung_will_do_at_any_scale(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are decomposed in units of their size, so that no square leaves the range."""
    attempts = injected(monkeypatch, "eigen", lambda *_: None)
    (found,) = decompose("eigen", sample("eigen") * scale)
    assert found is not None
    assert attempts == [(torch.float32, 1)]


def test_eigenvectors_that_are_not_orthogonal_are_not_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the eigenvalue is 0, a column twice makes the same matrix."""

    def twice(matrix: Tensor, result: Any) -> Any:
        values, vectors = result
        vectors = vectors.clone()
        vectors[..., 0] = vectors[..., 1]
        return values, vectors

    injected(monkeypatch, "eigen", twice)
    assert decompose("eigen", torch.diag(torch.tensor([0.0, 0.0, 1.0]))[None]) == [None]


@each_fault
def test_a_double_needs_no_second_double(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = injected(monkeypatch, name, fault)
    assert decompose(name, sample(name).double()) == [None]
    assert attempts == [(torch.float64, 1)]


@each_fault
@pytest.mark.parametrize("rungs", [1, 2])
def test_a_bad_member_does_not_spoil_its_batch(
    name: str, fault: Any, rungs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four fails, in a batch and alone: in float32 only, or on every rung."""
    marked = sample(name)
    marked[0, 0, 0] = 64.0
    matrices = [sample(name), marked, sample(name), sample(name)]

    def on_marked(matrix: Tensor, result: Any) -> Any:
        bad = matrix[:, 0, 0] >= 2.5 * matrix.diagonal(dim1=-2, dim2=-1).mean(-1)  # scaled or not
        if not bad.any() or (rungs == 1 and matrix.dtype == torch.float64):
            return None
        wrong = fault(matrix, result)
        return tuple(
            torch.where(bad.view(-1, *[1] * (part.dim() - 1)), w, part)
            for w, part in zip(wrong, result, strict=True)
        )

    injected(monkeypatch, name, on_marked)
    results = decompose(name, *matrices)
    for index, (matrix, result) in enumerate(zip(matrices, results, strict=True)):
        if index == 1 and rungs == 2:
            assert result is None
        else:
            assert result is not None
            assert_solved(restored(name, result).float(), matrix, rtol=1e-5)


@each_solver
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_factor_that_is_not_finite_is_given_up_and_the_others_are_not(
    name: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is shown to no routine: some return garbage, some never return."""
    seen: list[bool] = []
    injected(monkeypatch, name, lambda m, _: seen.append(bool(torch.isfinite(m).all())))
    matrices = [sample(name), sample(name), sample(name)]
    matrices[1][0, 2, 1] = matrices[1][0, 1, 2] = bad
    first, second, third = decompose(name, *matrices)
    assert second is None
    assert_solved(restored(name, first).float(), matrices[0], rtol=1e-5)
    assert_solved(restored(name, third).float(), matrices[2], rtol=1e-5)
    assert all(seen)


@each_solver
def test_one_bad_group_fails_its_factor(name: str) -> None:
    good = torch.cat([sample(name), sample(name)])
    bad = good.clone()
    bad[1, 0, 0] = math.nan
    result, failed = decompose(name, good, bad)
    assert result is not None
    assert failed is None


def test_an_indefinite_factor_fails_the_inverse() -> None:
    indefinite = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]])
    failed, fine = decompose("inverse", indefinite, torch.eye(2)[None])
    assert failed is None
    assert torch.equal(fine[0], torch.eye(2)[None])


# Eigenvectors from those of an earlier matrix.


def with_spectrum(values: Sequence[float], seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix ``(1, n, n)``, and its eigenvectors in the order of the (rising) values."""
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
    return (Q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ Q.T)[None], Q[None]


def perturbed(matrix: Tensor, size: float) -> Tensor:
    """By a symmetric matrix of a relative size, in the Frobenius norm."""
    noise = torch.randn_like(matrix)
    noise = noise + noise.mT
    return matrix + noise * (size * matrix.norm() / noise.norm())


SPECTRA = {
    "wide": [1e-9, 1e-6, 1e-4, 1e-2, 0.3, 3.0, 40.0],
    "flat": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "low rank": [0.0, 0.0, 0.0, 0.0, 1.0, 10.0],
    "equal": [2.0] * 5,
    "zero": [0.0] * 3,
    "one": [3.0],
}


@given(spectrum=st.sampled_from(sorted(SPECTRA)), power=st.integers(-15, 15), seed=SEEDS)
def test_eigenvectors_of_a_nearby_matrix_are_refined(spectrum: str, power: int, seed: int) -> None:
    """A thousandth away: Q Λ Qᵀ and the eigenvalues are right within a few thousandths."""
    torch.manual_seed(seed)
    matrix, guess = with_spectrum(SPECTRA[spectrum], seed)
    matrix = perturbed(matrix, 1e-3) * 10.0**power
    (vectors, values), sound = orthogonal_iteration(matrix, guess)
    assert bool(sound)
    n, size = matrix.shape[-1], float(matrix.norm())
    assert_solved(vectors.mT @ vectors, torch.eye(n, dtype=torch.float64)[None], rtol=1e-12)
    assert (restored("eigen", (vectors, values)) - matrix).norm() <= 5e-3 * size
    exact = torch.linalg.eigvalsh(matrix).clamp_min(0)
    assert (values.sort().values - exact).norm() <= 5e-3 * size
    assert (values >= 0).all()


@given(
    spectrum=st.sampled_from(sorted(SPECTRA)),
    power=st.integers(-15, 15),
    away=st.floats(-3.0, 1.0),
    damping=st.none() | st.floats(-4.0, 2.0),
    seed=SEEDS,
)
def test_what_is_taken_makes_a_damped_inverse(
    spectrum: str, power: int, away: float, damping: float | None, seed: int
) -> None:
    """From however bad a guess: within a quarter in the norm of that inverse.

    The damping is given, or the mean eigenvalue.
    """
    torch.manual_seed(seed)
    matrix, guess = with_spectrum(SPECTRA[spectrum], seed)
    n = matrix.shape[-1]
    guess = torch.linalg.qr(guess + 10.0**away * torch.randn_like(guess)).Q
    matrix = matrix * 10.0**power
    scale = None if damping is None else torch.tensor([10.0 ** (damping + power)], dtype=F64)
    (vectors, values), sound = orthogonal_iteration(matrix, guess, scale)
    assume(bool(sound))
    unit = matrix.diagonal(dim1=-2, dim2=-1).mean().clamp_min(1e-300) if scale is None else scale
    eye = torch.eye(n, dtype=F64)
    inverse = torch.linalg.inv(matrix / unit + eye)
    root = torch.diag_embed((values / unit + 1).sqrt())
    found = root @ vectors.mT @ inverse @ vectors @ root
    assert torch.linalg.matrix_norm(found - eye, 2).item() <= 0.25 + 1e-6


def test_the_smaller_the_damping_the_better_the_guess_must_be() -> None:
    """Each factor of a batch by its own."""
    matrix, guess = with_spectrum([0.001, 0.01, 0.1, 1.0, 1.5, 2.0])
    matrix = perturbed(matrix, 0.02)
    dampings = torch.tensor([1e3, 1.0, 1e-3], dtype=F64)
    _, sound = orthogonal_iteration(matrix.expand(3, -1, -1), guess.expand(3, -1, -1), dampings)
    assert sound.tolist() == [True, True, False]
    assert orthogonal_iteration(matrix, guess)[1].tolist() == [True]
    problems = [replace(problem(matrix, guess=guess), scale=damping[None]) for damping in dampings]
    seen: list[int] = []
    native = torch.linalg.eigh
    counting = lambda matrix: seen.append(len(matrix)) or native(matrix)  # noqa: E731
    with patch.object(torch.linalg, "eigh", counting):
        results = SOLVERS["eigen"].decompose(problems, F64, False)
    assert seen == [1]
    assert results[2] is not None
    assert_solved(results[2][1], torch.linalg.eigvalsh(matrix).clamp_min(0))


def test_the_exact_eigenvectors_stay_as_they_are() -> None:
    matrix, guess = with_spectrum(SPECTRA["wide"])
    (vectors, values), sound = orthogonal_iteration(matrix, guess)
    assert bool(sound)
    assert_solved(values, torch.tensor([SPECTRA["wide"]], dtype=torch.float64), rtol=1e-12)
    assert_solved((vectors * guess).sum(-2).abs(), torch.ones(1, 7, dtype=torch.float64))


def test_a_step_shrinks_the_error_of_a_subspace_by_the_ratio_of_its_eigenvalues() -> None:
    """The projector on the two large directions, a hundred times above the rest."""
    matrix, guess = with_spectrum([0.01, 0.02, 0.03, 0.04, 4.0, 5.0])
    matrix = perturbed(matrix, 3e-3)

    def projector(vectors: Tensor) -> Tensor:
        return vectors[..., -2:] @ vectors[..., -2:].mT

    exact = projector(torch.linalg.eigh(matrix).eigenvectors)
    (vectors, _), sound = orthogonal_iteration(matrix, guess)
    assert bool(sound)
    before = (projector(guess) - exact).norm()
    assert before > 1e-4
    assert (projector(vectors) - exact).norm() < 0.02 * before


@pytest.mark.parametrize("bad", ["unrelated", "not a number", "infinite", "zero"])
def test_a_guess_that_is_no_guide_is_not_taken(bad: str) -> None:
    spectrum = [0.001, 0.01, 0.1, 1.0, 1.5, 2.0]
    matrix, guess = with_spectrum(spectrum)
    if bad == "unrelated":
        guess = with_spectrum(spectrum, seed=1)[1]
    elif bad == "zero":
        guess = torch.zeros_like(guess)
    else:
        guess[0, 1, 2] = math.nan if bad == "not a number" else math.inf
    _, sound = orthogonal_iteration(matrix, guess)
    assert not bool(sound)


def refined(*pairs: tuple[Tensor, Tensor | None]) -> list[Any]:
    problems = [problem(matrix, guess=guess) for matrix, guess in pairs]
    return SOLVERS["eigen"].decompose(problems, torch.float64, False)


def test_no_eigendecomposition_where_a_guess_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch of four: one has a bad guess, and one has none."""
    spectrum = [0.001, 0.01, 0.1, 1.0, 1.5, 2.0]
    matrices = [with_spectrum(spectrum, seed)[0] for seed in range(4)]
    guesses = [with_spectrum(spectrum, seed)[1] for seed in (0, 1, 5)]
    seen: list[Tensor] = []
    injected(monkeypatch, "eigen", lambda matrix, _: seen.append(matrix))
    results = refined(*zip(matrices, [*guesses, None], strict=True))
    assert [len(batch) for batch in seen] == [1, 1]
    for batch, index in zip(seen, (2, 3), strict=True):
        assert_solved(batch / batch.norm(), matrices[index] / matrices[index].norm())
    for matrix, result in zip(matrices, results, strict=True):
        assert_solved(restored("eigen", result), matrix)


@pytest.mark.parametrize("fault", ["raises", "out of memory", "not a number", "not orthogonal"])
def test_a_refinement_that_fails_leaves_the_eigendecomposition(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = torch.linalg.qr

    def faulty(matrix: Tensor) -> Any:
        if fault == "raises":
            raise torch.linalg.LinAlgError("linalg.qr: failed")
        if fault == "out of memory":
            raise torch.OutOfMemoryError("no memory is left")
        result = native(matrix)
        wrong = 2.0 if fault == "not orthogonal" else math.nan
        return type(result)((result.Q * wrong, result.R))

    matrix, guess = with_spectrum(SPECTRA["wide"])
    attempts = injected(monkeypatch, "eigen", lambda *_: None)
    monkeypatch.setattr(torch.linalg, "qr", faulty)
    (result,) = refined((matrix, guess))
    assert attempts == [(torch.float64, 1)]
    assert_solved(restored("eigen", result), matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_eigenvectors_kept_in_few_digits_are_a_guess_as_well(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, guess = with_spectrum(SPECTRA["flat"])
    attempts = injected(monkeypatch, "eigen", lambda *_: None)
    ((vectors, values),) = refined((matrix, guess.to(dtype)))
    assert attempts == []
    assert_solved(vectors.mT @ vectors, torch.eye(6, dtype=torch.float64)[None], rtol=1e-12)
    error = (restored("eigen", (vectors, values)) - matrix).norm()
    assert error <= torch.finfo(dtype).eps * matrix.norm()


def test_a_guess_for_a_matrix_that_is_not_finite_is_given_up() -> None:
    matrix, guess = with_spectrum(SPECTRA["flat"])
    bad = matrix.clone()
    bad[0, 0, 0] = math.nan
    failed, fine = refined((bad, guess), (matrix, guess))
    assert failed is None
    assert_solved(restored("eigen", fine), matrix)


# Triangles.


@given(groups=GROUPS, d_in=DIMS, d_out=DIMS, damping=DAMPINGS, dtype=st.sampled_from([F32, F64]))
@pytest.mark.parametrize("diagonal", [False, True])
def test_an_inverse_as_triangles_is_that_inverse(
    diagonal: bool, groups: int, d_in: int, d_out: int, damping: float, dtype: torch.dtype
) -> None:
    """Multiplied as a whole or by halves; the smallest ones are triangles and diagonals in one."""
    A = (torch.rand(groups, d_in).double() if diagonal else factor(groups, d_in)).to(dtype)
    G, gradient = factor(groups, d_out).to(dtype), torch.randn(groups, d_out, d_in, dtype=dtype)
    expected = solve("inverse", A, G, gradient, damping)
    for halved_from in (1, 100):
        with (
            patch.object(solvers, "TRIANGULAR_FROM", 1),
            patch.object(triangles, "HALVED_FROM", halved_from),
        ):
            found = solve("inverse", A, G, gradient, damping, triangular=True)
        assert_solved(found, expected, rtol=1e-12 if dtype == F64 else 1e-4)


def test_only_large_inverses_are_triangles() -> None:
    """Unpacking the others at every step would take longer than multiplying does."""
    with patch.object(solvers, "TRIANGULAR_FROM", 5):
        small, large = decompose("inverse", factor(1, 4), factor(1, 5), triangular=True)
    assert [part.shape for part in (*small, *large)] == [(1, 4, 4), (1, 15)]


# The clip.


def clip(
    P: list[Tensor], gradients: list[Tensor], rates: list[float | Tensor], kappa: float
) -> Tensor:
    return kl_clip_coefficient(kl_change(P, gradients, rates), kappa)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
    lr=st.floats(1e-4, 10.0),
    kappa=st.floats(1e-6, 10.0),
)
def test_the_clip_bounds_what_it_measures(
    shapes: list[tuple[int, int]], lr: float, kappa: float
) -> None:
    """Invariant 19: lr² ν² Σ|P·∇| = min(κ, lr² Σ|P·∇|)."""
    pairs = [
        (torch.randn(s, dtype=torch.float64), torch.randn(s, dtype=torch.float64)) for s in shapes
    ]
    P, gradients = ([*column] for column in zip(*pairs, strict=True))
    nu = clip(P, gradients, [lr] * len(pairs), kappa)
    change = lr**2 * sum(float((p * g).sum().abs()) for p, g in pairs)
    assert nu.shape == ()
    assert float(nu) == pytest.approx(clip_factor(pairs, lr, kappa), rel=1e-12)
    assert float(nu) ** 2 * change == pytest.approx(min(kappa, change), rel=1e-12)


def test_the_clip_takes_each_layers_own_learning_rate() -> None:
    """|P·∇| = 4 and 9, rates 1/2 and 1/3: 1 + 1 = 2, and κ = 1/2 gives ν = 1/2."""
    P = [torch.tensor([2.0]), torch.tensor([-3.0])]
    gradients = [torch.tensor([2.0]), torch.tensor([3.0])]
    nu = clip(P, gradients, [0.5, torch.tensor(1 / 3)], 0.5)
    assert float(nu) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_layer_that_is_not_finite_does_not_count(bad: float) -> None:
    P = [torch.tensor([2.0, 0.0]), torch.tensor([bad, 1.0])]
    gradients = [torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0])]
    assert float(clip(P, gradients, [1.0, 1.0], 1.0)) == 0.5
    assert float(clip(P[1:], gradients[1:], [1.0], 1.0)) == 1.0


def test_a_step_of_nothing_is_not_clipped() -> None:
    zero = torch.zeros(3)
    assert float(clip([zero], [zero], [0.1], 1e-3)) == 1.0
    assert float(clip([zero + 1], [zero + 1], [0.0], 1e-3)) == 1.0


@each_solver
def test_large_factors_are_finite_though_their_squares_are_not(name: str) -> None:
    matrix = (torch.eye(3) * 1e25)[None]
    (found,) = decompose(name, matrix)
    assert found is not None
    torch.testing.assert_close(restored(name, found), matrix.double(), rtol=1e-5, atol=0)

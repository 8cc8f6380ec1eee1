"""The fallbacks of a failing decomposition, and extreme matrices that do not fail."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from solver_problems import assert_solved, decompose, factor, injected, restored, solve
from torch import Tensor

from second_order.kronecker import solvers
from second_order.kronecker.solvers import SOLVERS, Problem

each_solver = pytest.mark.parametrize("name", ["eigen", "inverse"])


# Extremes that must not look like failures.


@each_solver
@example(dim=3, rank=3, power=25, dtype=torch.float32)
@given(
    dim=st.integers(1, 24),
    rank=st.integers(0, 3),
    power=st.integers(-18, 18),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_finite_factor_can_be_decomposed(
    name: str, dim: int, rank: int, power: int, dtype: torch.dtype
) -> None:
    """Factors of low rank, zero, tiny or huge; "inverse" gets them with a little damping."""
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


def test_without_damping_directions_of_zero_curvature_do_not_move() -> None:
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


# Retries and fallbacks, each forced by injection.


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
    """If the eigenvalues vanish, Q Λ Qᵀ does not show the fault."""
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


class ElsewhereTorch:
    """torch, with a CPU that is not the device of the factors."""

    def __getattr__(self, attribute: str) -> Any:
        return getattr(torch, attribute)

    @staticmethod
    def device(kind: str) -> torch.device:
        return torch.device(kind, 0)  # where "cpu" tensors are as well, under another name


@each_fault
def test_the_cpu_is_the_third_attempt(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solvers, "torch", ElsewhereTorch())
    matrix = sample(name)
    attempts = injected(monkeypatch, name, lambda m, r: fault(m, r) if len(attempts) < 3 else None)
    (result,) = decompose(name, matrix)
    assert attempts == [(torch.float32, 1), (torch.float64, 1), (torch.float64, 1)]
    assert result is not None
    assert_solved(restored(name, result).float(), matrix, rtol=1e-5)


def test_a_retry_adds_the_damping_in_float64() -> None:
    """In float32, 1 + 1e-9 is 1, and the factor of ones has no inverse."""
    singular = Problem(torch.ones(1, 2, 2), 2, torch.float32, added=torch.tensor([1e-9]))
    (result,) = SOLVERS["inverse"].decompose([singular], torch.float64)
    assert result is not None
    difference = torch.tensor([[[1.0], [-1.0]]], dtype=torch.float64)
    assert_solved(result[0] @ difference, difference / 1e-9, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_first_attempt_works_at_any_scale(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are decomposed in units of their size, so that no square leaves the range."""
    attempts = injected(monkeypatch, "eigen", lambda *_: None)
    (found,) = decompose("eigen", sample("eigen") * scale)
    assert found is not None
    assert attempts == [(torch.float32, 1)]


@each_fault
@pytest.mark.parametrize("rungs", [1, 2])
def test_a_failed_factor_does_not_affect_its_batch(
    name: str, fault: Any, rungs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four fails, in a batch and alone: in float32 only, or in every attempt."""
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
def test_a_non_finite_factor_fails_without_the_others(
    name: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is shown to no eigensolver: some return garbage, some never return."""
    seen: list[bool] = []
    injected(monkeypatch, name, lambda m, _: seen.append(bool(torch.isfinite(m).all())))
    matrices = [sample(name), sample(name), sample(name)]
    matrices[1][0, 2, 1] = matrices[1][0, 1, 2] = bad
    first, second, third = decompose(name, *matrices)
    assert second is None
    assert_solved(restored(name, first).float(), matrices[0], rtol=1e-5)
    assert_solved(restored(name, third).float(), matrices[2], rtol=1e-5)
    assert all(seen) or name == "inverse"


@pytest.mark.parametrize("smallest", [-1.0, -1e-6])
def test_an_indefinite_factor_fails_the_inverse(smallest: float) -> None:
    """Where the negative eigenvalue is tiny, the residual of a wrong inverse is small as well."""
    indefinite = torch.diag(torch.tensor([1.0, smallest]))[None]
    failed, fine = decompose("inverse", indefinite, torch.eye(2)[None])
    assert failed is None
    assert torch.equal(fine[0], torch.eye(2)[None])

"""Eigenvectors that are refined from those of an earlier matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import assert_solved, injected, problem, restored
from torch import Tensor

from second_order.kronecker.decompositions import orthogonal_iteration
from second_order.kronecker.solvers import SOLVERS

if TYPE_CHECKING:
    from collections.abc import Sequence

SEEDS = st.integers(0, 2**16)
F32, F64 = torch.float32, torch.float64


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

"""What the tests of damped solves share: factors, problems, their solutions, and faults put in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from second_order.kronecker.solvers import SOLVERS, Problem

if TYPE_CHECKING:
    from collections.abc import Callable


def factor(groups: int, dim: int, rank: int | None = None) -> Tensor:
    """A positive semi-definite factor, of full rank by default."""
    x = torch.randn(groups, 2 * dim if rank is None else rank, dim, dtype=torch.float64)
    return x.mT @ x / max(1, x.shape[1])


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Of matrices, or of diagonals ``(groups, n)``; shape ``(groups,)``."""
    return (factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)).mean(-1)


def problem(matrix: Tensor, added: Tensor | None = None) -> Problem:
    """Of a matrix, or of a diagonal ``(groups, n)``."""
    return Problem(matrix, matrix.shape[1], matrix.dtype, added, matrix.dim() == 2)


def damped(name: str, A: Tensor, G: Tensor, damping: Any) -> list[Problem]:
    means = torch.stack([mean_eigenvalue(A), mean_eigenvalue(G)])
    added = SOLVERS[name].split_damping(means, damping)
    return [problem(matrix, on) for matrix, on in zip((A, G), added, strict=True)]


def solve(name: str, A: Tensor, G: Tensor, gradient: Tensor, damping: Any) -> Tensor:
    solver = SOLVERS[name]
    a, g = solver.decompose(damped(name, A, G, damping), A.dtype)
    assert a is not None
    assert g is not None
    return solver.combine({"A": a, "G": g}, damping).precondition(gradient)


def decompose(name: str, *matrices: Tensor, dtype: torch.dtype | None = None) -> list[Any]:
    storage_dtype = dtype or next((matrix.dtype for matrix in matrices), torch.float32)
    return SOLVERS[name].decompose([problem(m) for m in matrices], storage_dtype)


def restored(name: str, decomposition: tuple[Tensor, ...]) -> Tensor:
    """The matrix that was decomposed."""
    if name == "inverse":
        return torch.linalg.inv(decomposition[0].double())
    vectors, values = (part.double() for part in decomposition)
    return vectors @ torch.diag_embed(values) @ vectors.mT


def assert_solved(actual: Tensor, expected: Tensor, rtol: float = 1e-8) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


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

"""The Lanczos recurrence with full reorthogonalisation, over any symmetric product.

    h = H dᵢ;  Bᵢᵢ = dᵢᵀh;  h <- h − D(Dᵀh), twice;  B_{i,i+1} = ‖h‖;  d_{i+1} = h/‖h‖

so that DᵀHD = B is tridiagonal, and B = U diag(u) Uᵀ gives the Ritz pairs u, DU of H. The rows of
D may be spread over processes: a :class:`RowSpace` multiplies vectors and makes sums whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from second_order.lanczos.vector_space import RowSpace

__all__ = ["Ritz", "Tridiagonal", "ritz_pairs", "tridiagonalise"]

# Whether a run is finished takes a decomposition of B: a long one is not asked at each iteration.
ASK_ALWAYS, ASK_EVERY = 32, 4

TOLERANCE = 1e-8
"""Error up to which an eigendecomposition in float64 is valid, of B's size; it is near 1e-15."""

UNREAD = 4
"""Iterations on a device, times those at least, before it is first asked how they went."""


@dataclass(frozen=True)
class Ritz:
    """Eigenpairs of B, ascending, float64 on the CPU; all NaN where it could not be decomposed."""

    values: Tensor  # (m,) θ
    vectors: Tensor  # (m, m) U, a column a pair
    residuals: Tensor  # (m,) ‖Hx − θx‖ = β_m |s_{mi}| of the Ritz vector x = D U[:, i]


@dataclass(frozen=True)
class Tridiagonal:
    """The result of a recurrence: D, and B on the CPU in float64."""

    basis: Tensor  # (m, rows), this process's rows of D, transposed: orthonormal vectors
    diagonal: Tensor  # (m,), of B
    off_diagonal: Tensor  # (m,), B's m − 1 entries beside it, and ‖h‖ after the last step
    finite: bool  # whether every number has been
    products: int  # made, of which a device may have made some beyond the end


def ritz_pairs(diagonal: Tensor, off_diagonal: Tensor) -> Ritz:
    """The eigenpairs of B, as :class:`Tridiagonal` has it; NaN if they are not those of B."""
    inner = off_diagonal[:-1]
    B = torch.diag(diagonal) + torch.diag(inner, 1) + torch.diag(inner, -1)
    try:
        values, vectors = torch.linalg.eigh(B)
        valid = _are_eigenpairs(B, values, vectors)
    except Exception:  # the verdicts are exchanged next: the others must not wait in vain
        valid = False
    if not valid:
        values, vectors = torch.full_like(diagonal, torch.nan), torch.full_like(B, torch.nan)
    return Ritz(values, vectors, off_diagonal[-1] * vectors[-1].abs())


def _are_eigenpairs(matrix: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Whether ‖B s − θ s‖ is small for every pair, the s are orthonormal, and the θ ascend.

    Routines have returned wrong numbers that were finite, after which a Newton step raised the loss
    from 1.2 to 1.7e10.
    """
    norm = matrix.abs().amax()
    residual = (matrix @ vectors - vectors * values).abs().amax()
    identity = torch.eye(len(values), dtype=matrix.dtype, device=matrix.device)
    overlap = (vectors.mT @ vectors - identity).abs().amax()
    ascending = bool((values.diff() >= 0.0).all())
    return ascending and bool((residual <= TOLERANCE * norm) & (overlap <= TOLERANCE))


def tridiagonalise(
    space: RowSpace,
    start: Tensor,
    iterations: int,
    *,
    at_least: int = 1,
    finished: Callable[[Ritz], bool] | None = None,
    seed: int = 0,
    expected: int = 0,
) -> Tridiagonal:
    """Run the Lanczos recurrence from this process's rows of a vector, for m iterations at most.

    B is kept in float64, D in the dtype of ``start``. From ``at_least`` iterations on the run ends
    where ``finished`` says so, or the Krylov space is exhausted; if that is so earlier, the
    recurrence goes on from a random vector orthogonal to it, of this ``seed``.

    On the CPU coefficients are read at each iteration. A device is read once as many iterations are
    made as are ``expected``, 0 where nothing is known, and every few from there on: what is made
    beyond the end is left out, which is the same as to have stopped there.
    """
    iterations = min(iterations, space.size)
    D = start.new_empty((iterations, start.numel()))
    torch.div(start, space.total(_square(start)).sqrt(), out=D[0])
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    products = 0
    ahead = 1
    if start.device.type != "cpu":
        ahead = expected or max(ASK_ALWAYS, UNREAD * at_least)
        if finished is None:
            ahead = iterations

    def matrix(count: int) -> Tensor:
        both = [diagonal[:count], off_diagonal[:count]]
        return torch.tensor(both, dtype=torch.float64, device="cpu")

    def result(count: int, finite: bool) -> Tridiagonal:
        B = matrix(count)
        return Tridiagonal(D[:count], B[0], B[1], finite, products)

    while len(diagonal) < iterations:
        # Make some rows of D, and read the coefficients of B.
        before = len(diagonal)
        last = min(before + ahead, iterations)
        unread = [_iterate(space, D, j) for j in range(before, last)]
        products += len(unread)
        numbers = space.read(unread)
        ahead = 1 if start.device.type == "cpu" else ASK_EVERY
        finite, exhausted = _take(numbers, diagonal, off_diagonal, torch.finfo(D.dtype).eps)
        count = len(diagonal)

        # Stop where all that is wanted has converged, as the first process finds: rounding must
        # not make processes differ.
        lengths = range(max(before + 1, at_least), count + (not exhausted))
        asked = [n for n in lengths if n <= ASK_ALWAYS or n % ASK_EVERY == 1]
        if finished is not None and asked:
            stop = next((n for n in asked if finished(ritz_pairs(*matrix(n)))), 0)
            stop = int(space.first(torch.tensor([float(stop)], dtype=torch.float64, device="cpu")))
            if stop:
                return result(stop, finite=True)
        if not finite:
            return result(count, finite=False)

        # Continue from a random vector if the Krylov space is exhausted early.
        if exhausted:
            if at_least <= count or count == iterations:
                break
            d = _orthogonal(space, D[:count], seed + count)
            if d is None:
                return result(count, finite=count > 0)
            D[count] = d
    return result(len(diagonal), finite=True)


def _iterate(space: RowSpace, D: Tensor, j: int) -> Tensor:
    """Make row j + 1 of D, if there is one: returns B_jj in two parts, and ‖h‖², float64."""
    basis = D[: j + 1]
    h = space.apply(D[j])
    first = space.total(basis @ h)
    h.addmv_(basis.t(), first.to(h.dtype), alpha=-1)
    again = space.total(basis @ h)
    h.addmv_(basis.t(), again.to(h.dtype), alpha=-1)
    square = space.total(_square(h))
    if j + 1 < len(D):
        torch.div(h, square.sqrt(), out=D[j + 1])
    return torch.cat([first[j:].double(), again[j:].double(), square])


def _take(
    numbers: Sequence[float], diagonal: list[float], off_diagonal: list[float], eps: float
) -> tuple[bool, bool]:
    """Append the coefficients of iterations; returns whether they are finite, and exhausted.

    Up to the first that is: what comes after such a one is of no use.
    """
    for i in range(0, len(numbers), 3):
        alpha = numbers[i] + numbers[i + 1]
        square = numbers[i + 2]
        if not (math.isfinite(alpha) and math.isfinite(square)):
            return False, False
        beta = math.sqrt(max(square, 0.0))
        diagonal.append(alpha)
        exhausted = beta <= 8 * eps * max(map(abs, [*diagonal, *off_diagonal, beta]))
        off_diagonal.append(0.0 if exhausted else beta)
        if exhausted:
            return True, True
    return True, False


def _square(x: Tensor) -> Tensor:
    """The squared norm ‖x‖², ``(1,)``, summed in float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square().reshape(1)


def _orthogonal(space: RowSpace, basis: Tensor, seed: int) -> Tensor | None:
    """A random unit vector orthogonal to the basis; None if there is none left."""
    if len(basis) >= space.size:
        return None
    d = space.random(seed, 1.0)
    d /= math.sqrt(float(space.total(_square(d))))
    for _ in range(2):
        d.addmv_(basis.t(), space.total((basis @ d).double()).to(d.dtype), alpha=-1)
        norm = math.sqrt(float(space.total(_square(d))))
        if not norm > 10 * torch.finfo(d.dtype).eps:
            return None
        d /= norm
    return d

"""The Lanczos recurrence with full reorthogonalization, for any symmetric matrix H.

    h = H dᵢ;  Bᵢᵢ = dᵢᵀh;  h <- h − D(Dᵀh), twice;  B_{i,i+1} = ‖h‖;  d_{i+1} = h/‖h‖

Then DᵀHD = B is tridiagonal, and B = U diag(u) Uᵀ gives the Ritz pairs u, DU of H. The rows of D
may be distributed over processes: a :class:`RowSpace` multiplies vectors and completes sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from second_order.lanczos.vector_space import RowSpace

__all__ = ["Ritz", "Tridiagonal", "ritz_pairs", "tridiagonalize"]

# Testing for convergence takes an eigendecomposition of B. Runs of up to TEST_ALWAYS iterations
# test after each one, longer runs after each TEST_INTERVAL-th.
TEST_ALWAYS = 32
TEST_INTERVAL = 4

# On a device the host first reads coefficients after this multiple of the minimum of iterations.
FIRST_READ = 4

# Relative error up to which an eigendecomposition of B is valid. In float64 it is near 1e-15.
DECOMPOSITION_TOL = 1e-8

RANDOM_ATTEMPTS = 3  # random vectors to try if the Krylov space is exhausted


@dataclass(frozen=True)
class Ritz:
    """Eigenpairs of B, ascending, in float64 on the CPU. All NaN if the decomposition failed."""

    values: Tensor  # (m,) θ
    vectors: Tensor  # (m, m) U, whose columns are the eigenvectors
    residuals: Tensor  # (m,) ‖Hx − θx‖ = β_m |s_{mi}| of the Ritz vector x = D U[:, i]


@dataclass(frozen=True)
class Tridiagonal:
    """The result of a recurrence: D, and B in float64 on the CPU."""

    basis: Tensor  # (m, rows) this process's rows of D, transposed: orthonormal vectors
    diagonal: Tensor  # (m,) of B
    off_diagonal: Tensor  # (m,) the m − 1 entries next to B's diagonal, and the last ‖h‖
    finite: bool  # whether every number was finite
    products: int  # number of products; a device may have computed some that are not used


def ritz_pairs(diagonal: Tensor, off_diagonal: Tensor) -> Ritz:
    """Compute the eigenpairs of B, which are NaN if the decomposition failed."""
    inner = off_diagonal[:-1]
    B = torch.diag(diagonal) + torch.diag(inner, 1) + torch.diag(inner, -1)
    try:
        values, vectors = torch.linalg.eigh(B)
        valid = _are_eigenpairs(B, values, vectors)
    except Exception:  # no error here, because the other processes wait in the next collective
        valid = False
    if not valid:
        values = torch.full_like(diagonal, torch.nan)
        vectors = torch.full_like(B, torch.nan)
    return Ritz(values, vectors, off_diagonal[-1] * vectors[-1].abs())


def _are_eigenpairs(matrix: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Whether ‖B s − θ s‖ is small for every pair, the s are orthonormal, and the θ ascend.

    LAPACK routines have returned wrong but finite numbers. The Newton step with them raised a loss
    from 1.2 to 1.7e10.
    """
    norm = matrix.abs().amax()
    residual = (matrix @ vectors - vectors * values).abs().amax()
    identity = torch.eye(len(values), dtype=matrix.dtype, device=matrix.device)
    overlap = (vectors.mT @ vectors - identity).abs().amax()
    ascending = bool((values.diff() >= 0.0).all())
    is_small = (residual <= DECOMPOSITION_TOL * norm) & (overlap <= DECOMPOSITION_TOL)
    return ascending and bool(is_small)


@dataclass
class _Coefficients:
    """The entries of B so far, on the host."""

    diagonal: list[float] = field(default_factory=list)
    off_diagonal: list[float] = field(default_factory=list)
    finite: bool = True
    exhausted: bool = False  # whether the last ‖h‖ was 0, so that the Krylov space is invariant

    def __len__(self) -> int:
        return len(self.diagonal)

    def extend(self, numbers: Sequence[float], eps: float) -> None:
        """Append the entries of some iterations, up to one that is not finite or exhausted.

        Args:
            numbers: Three for each iteration, as :func:`_iterate` returns them.
            eps: The machine epsilon of D.
        """
        self.exhausted = False
        for i in range(0, len(numbers), 3):
            alpha = numbers[i] + numbers[i + 1]
            squared_norm = numbers[i + 2]
            if not (math.isfinite(alpha) and math.isfinite(squared_norm)):
                self.finite = False
                return
            beta = math.sqrt(max(squared_norm, 0.0))
            self.diagonal.append(alpha)
            norm = max(map(abs, [*self.diagonal, *self.off_diagonal, beta]))
            self.exhausted = beta <= 8 * eps * norm
            self.off_diagonal.append(0.0 if self.exhausted else beta)
            if self.exhausted:
                return

    def tensors(self, count: int) -> Tensor:
        """Return the diagonal and the off-diagonal of the first rows, ``(2, count)``."""
        both = [self.diagonal[:count], self.off_diagonal[:count]]
        return torch.tensor(both, dtype=torch.float64, device="cpu")


def tridiagonalize(
    space: RowSpace,
    start: Tensor,
    iterations: int,
    *,
    at_least: int = 1,
    finished: Callable[[Ritz], bool] | None = None,
    seed: int = 0,
    expected: int = 0,
) -> Tridiagonal:
    """Run the Lanczos recurrence. Collective.

    B is stored in float64, D in the dtype of ``start``. On the CPU, coefficients are read after
    each iteration. On a device they are read rarely, to avoid synchronizing with it: first after
    the ``expected`` number of iterations, and then after every few. Iterations beyond the end are
    left out, so the result is the same.

    Args:
        space: H, and the processes.
        start: This process's rows of the start vector.
        iterations: m, the maximum number of iterations.
        at_least: The minimum number of iterations. If the Krylov space is exhausted before, the
            recurrence continues with a random vector that is orthogonal to it.
        finished: Whether the run can end, given the Ritz pairs. None: it cannot.
        seed: The seed of these random vectors.
        expected: The number of iterations that are probably needed; 0 if it is not known.
    """
    on_cpu = start.device.type == "cpu"
    iterations = min(iterations, space.size)
    D = start.new_empty((iterations, start.numel()))
    torch.div(start, space.total(_squared_norm(start)).sqrt(), out=D[0])
    B = _Coefficients()
    products = 0

    # How many iterations to run before the next read.
    ahead = 1
    if not on_cpu:
        ahead = expected or max(TEST_ALWAYS, FIRST_READ * at_least)
        if finished is None:
            ahead = iterations

    def result(count: int, finite: bool) -> Tridiagonal:
        diagonal, off_diagonal = B.tensors(count)
        return Tridiagonal(D[:count], diagonal, off_diagonal, finite, products)

    while len(B) < iterations:
        # Compute some rows of D, and read the coefficients of B.
        before = len(B)
        last = min(before + ahead, iterations)
        unread = [_iterate(space, D, j) for j in range(before, last)]
        products += len(unread)
        B.extend(space.read(unread), torch.finfo(D.dtype).eps)
        ahead = 1 if on_cpu else TEST_INTERVAL
        count = len(B)

        # Stop if everything has converged. The first process decides, because rounding differs
        # between processes.
        longest = count - 1 if B.exhausted else count
        lengths = range(max(before + 1, at_least), longest + 1)
        tested = [n for n in lengths if n <= TEST_ALWAYS or n % TEST_INTERVAL == 1]
        if finished is not None and tested:
            stop = 0
            for n in tested:
                if finished(ritz_pairs(*B.tensors(n))):
                    stop = n
                    break
            decision = torch.tensor([float(stop)], dtype=torch.float64, device="cpu")
            stop = int(space.broadcast_from_first(decision))
            if stop:
                return result(stop, finite=True)
        if not B.finite:
            return result(count, finite=False)

        # Continue with a random vector if the Krylov space is exhausted early.
        if B.exhausted:
            if at_least <= count or count == iterations:
                break
            d = _random_orthogonal(space, D[:count], seed + count)
            if d is None:
                return result(count, finite=count > 0)
            D[count] = d
    return result(len(B), finite=True)


def _iterate(space: RowSpace, D: Tensor, j: int) -> Tensor:
    """Compute row j + 1 of D if there is one. Returns B_jj in two parts, and ‖h‖², in float64."""
    basis = D[: j + 1]
    h = space.apply(D[j])
    first = space.total(basis @ h)
    h.addmv_(basis.t(), first.to(h.dtype), alpha=-1)
    second = space.total(basis @ h)
    h.addmv_(basis.t(), second.to(h.dtype), alpha=-1)
    squared_norm = space.total(_squared_norm(h))
    if j + 1 < len(D):
        torch.div(h, squared_norm.sqrt(), out=D[j + 1])
    return torch.cat([first[j:].double(), second[j:].double(), squared_norm])


def _squared_norm(x: Tensor) -> Tensor:
    """Return ‖x‖², ``(1,)``, summed in float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square().reshape(1)


def _random_orthogonal(space: RowSpace, basis: Tensor, seed: int) -> Tensor | None:
    """Return a random unit vector orthogonal to the basis; None if the basis spans all of R^n."""
    if len(basis) >= space.size:
        return None
    # The first vector may be in the span: the start vector is, if it was drawn with the same seed.
    for attempt in range(RANDOM_ATTEMPTS):
        d = _orthogonalize(space, basis, space.random(seed + attempt * space.size, 1.0))
        if d is not None:
            return d
    return None


def _orthogonalize(space: RowSpace, basis: Tensor, d: Tensor) -> Tensor | None:
    """Return the normalized part of d outside of the basis' span; None if only rounding is left."""
    d /= math.sqrt(float(space.total(_squared_norm(d))))
    for _ in range(2):
        coefficients = space.total((basis @ d).double())
        d.addmv_(basis.t(), coefficients.to(d.dtype), alpha=-1)
        norm = math.sqrt(float(space.total(_squared_norm(d))))
        if not norm > 10 * torch.finfo(d.dtype).eps:
            return None
        d /= norm
    return d

"""The Lanczos recurrence with full reorthogonalization, and extreme eigenpairs.

    h = H dᵢ;  Bᵢᵢ = dᵢᵀh;  h <- h − D(Dᵀh), twice;  B_{i,i+1} = ‖h‖;  d_{i+1} = h/‖h‖

Then DᵀHD = B is tridiagonal, and B = U diag(u) Uᵀ gives the Ritz pairs u, DU of any
symmetric H. The k largest and l smallest eigenpairs take

    m <= max(4(k + l), 2 ln n) iterations, until β_m |s_{mi}| <= tol |θᵢ| for each pair
    V̂ = D U[:, last k ∪ first l]

The rows of D may be distributed over processes: a :class:`RowSpace` multiplies vectors
and completes sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from second_order.lanczos.hvp import RowSpace

__all__ = [
    "UNDECOMPOSED",
    "Pairs",
    "Ritz",
    "Tridiagonal",
    "agreed_ritz_pairs",
    "default_iterations",
    "extreme_pairs",
    "ritz_pairs",
    "tridiagonalize",
]

# Testing for convergence takes an eigendecomposition of B. Runs of up to TEST_ALWAYS
# iterations test after each one, longer runs after each TEST_INTERVAL-th.
TEST_ALWAYS = 32
TEST_INTERVAL = 4

# On a device, the first read comes after this multiple of the minimum of iterations.
FIRST_READ = 4

# Bound on the relative error of B's eigendecomposition, which is near 1e-15.
DECOMPOSITION_TOL = 1e-8

UNDECOMPOSED = (
    "the tridiagonal matrix of the recurrence could not be decomposed on the first process; use "
    "another batch, or a wider dtype"
)
ROUNDING = 4.0  # times eps ‖H‖: the rounding of a product and its reorthogonalization

RANDOM_ATTEMPTS = 3  # random vectors to try if the Krylov space is exhausted


@dataclass(frozen=True)
class Ritz:
    """Eigenpairs of B, ascending, in float64 on the CPU.

    All NaN if the decomposition failed.
    """

    values: Tensor  # (m,) θ
    vectors: Tensor  # (m, m) U, whose columns are the eigenvectors
    residuals: Tensor  # (m,) ‖Hx − θx‖ = β_m |s_{mi}| of the Ritz vector x = D U[:, i]


@dataclass(frozen=True)
class Tridiagonal:
    """The result of a recurrence: D, and B in float64 on the CPU."""

    basis: Tensor  # (m, rows) this process's rows of D, transposed: orthonormal vectors
    diagonal: Tensor  # (m,) of B
    off_diagonal: Tensor  # (m,) the m − 1 entries next to it, and the last ‖h‖
    finite: bool  # whether every number was finite
    products: int  # number of products; a device may leave some unused


def ritz_pairs(diagonal: Tensor, off_diagonal: Tensor) -> Ritz:
    """Compute the eigenpairs of B, which are NaN if the decomposition failed."""
    inner = off_diagonal[:-1]
    B = torch.diag(diagonal) + torch.diag(inner, 1) + torch.diag(inner, -1)
    try:
        values, vectors = torch.linalg.eigh(B)
        valid = _are_eigenpairs(B, values, vectors)
    except Exception:
        # Do not raise, because the other processes wait in the next collective.
        valid = False
    if not valid:
        values = torch.full_like(diagonal, torch.nan)
        vectors = torch.full_like(B, torch.nan)
    return Ritz(values, vectors, off_diagonal[-1] * vectors[-1].abs())


def _are_eigenpairs(matrix: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Return whether ‖B s − θ s‖ is small, the s are orthonormal, and the θ ascend.

    LAPACK routines have returned wrong but finite numbers. The Newton step with them
    raised a loss from 1.2 to 1.7e10.
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
    exhausted: bool = False  # the last ‖h‖ was 0, so the Krylov space is invariant

    def extend(self, numbers: Sequence[float], eps: float) -> None:
        """Append entries, until one is not finite or the Krylov space is exhausted.

        Args:
            numbers: Three for each iteration, as :func:`_iterate` returns them.
            eps: The machine epsilon of D.
        """
        self.exhausted = False
        for i in range(0, len(numbers), 3):
            # The numbers are α in two parts, and the squared norm.
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

    def first(self, count: int) -> Tensor:
        """Return the first diagonal and off-diagonal entries, ``(2, count)``."""
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

    B is stored in float64, D in the dtype of ``start``. On the CPU, coefficients are
    read after each iteration. On a device they are read rarely, to avoid synchronizing
    with it: first after the ``expected`` number of iterations, and then after every
    few. Iterations beyond the end are left out, so the result is the same.

    Args:
        space: H, and the processes.
        start: This process's rows of the start vector.
        iterations: m, the maximum number of iterations.
        at_least: The minimum number of iterations. If the Krylov space is exhausted
            before, the recurrence continues with a random vector orthogonal to it.
        finished: Whether the run can end, given the Ritz pairs. None: it cannot.
        seed: The seed of these random vectors.
        expected: The probable number of iterations; 0 if it is not known.
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

    stop = 0  # the number of iterations after which everything had converged
    count = 0
    while count < iterations and B.finite and not stop:
        # Compute some rows of D, and read the coefficients of B.
        before = count
        last = min(before + ahead, iterations)
        unread = [_iterate(space, D, j) for j in range(before, last)]
        products += len(unread)
        B.extend(space.read(unread), torch.finfo(D.dtype).eps)
        ahead = 1 if on_cpu else TEST_INTERVAL
        count = len(B.diagonal)

        # Stop if everything has converged. The first process decides, because rounding
        # differs between processes.
        longest = count - 1 if B.exhausted else count
        lengths = range(max(before + 1, at_least), longest + 1)
        tested = [n for n in lengths if n <= TEST_ALWAYS or n % TEST_INTERVAL == 1]
        if finished is not None and tested:
            for n in tested:
                if finished(ritz_pairs(*B.first(n))):
                    stop = n
                    break
            decision = torch.tensor([float(stop)], dtype=torch.float64, device="cpu")
            stop = int(space.broadcast_from_first(decision))

        # Continue with a random vector if the Krylov space is exhausted early.
        if B.exhausted and not stop:
            if count >= at_least or count == iterations:
                break
            d = _random_orthogonal(space, D[:count], seed + count)
            if d is None:
                break
            D[count] = d

    count = stop or count
    diagonal, off_diagonal = B.first(count)
    finite = B.finite or stop > 0
    return Tridiagonal(D[:count], diagonal, off_diagonal, finite, products)


def _iterate(space: RowSpace, D: Tensor, j: int) -> Tensor:
    """Compute row j + 1 of D if there is one.

    Returns B_jj in two parts, and ‖h‖², in float64.
    """
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
    """Return a random unit vector orthogonal to the basis; None if there is none."""
    # With equal seeds, the first vector is the start vector, which is in the span.
    for attempt in range(RANDOM_ATTEMPTS):
        d = _orthogonalize(space, basis, space.random(seed + attempt * space.size, 1.0))
        if d is not None:
            return d
    return None


def _orthogonalize(space: RowSpace, basis: Tensor, d: Tensor) -> Tensor | None:
    """Return d's normalized part outside of the span; None if it is rounding."""
    d /= math.sqrt(float(space.total(_squared_norm(d))))
    # Do this twice, because of rounding.
    for _ in range(2):
        coefficients = space.total((basis @ d).double())
        d.addmv_(basis.t(), coefficients.to(d.dtype), alpha=-1)
        norm = math.sqrt(float(space.total(_squared_norm(d))))
        if not norm > 10 * torch.finfo(d.dtype).eps:
            return None
        d /= norm
    return d


# --------------------------------------------------------------------------- eigenpairs


@dataclass(frozen=True)
class Pairs:
    """Ritz pairs: the largest, descending, then the smallest, ascending."""

    values: Tensor  # (r,) float64 on the CPU
    residuals: Tensor  # (r,) ‖Hv − θv‖ in exact arithmetic; float64 on the CPU
    bounds: Tensor  # (r,) on ‖Hv − θv‖: the residuals, or rounding if that is larger
    num_largest: int  # how many of the pairs are the largest ones
    products: int  # number of Hessian-vector products
    basis: Tensor  # (m, rows) D, transposed
    combination: Tensor  # (m, r) the selected columns of U
    trouble: str = ""  # the reason, if the run gave no pairs

    def vectors(self) -> Tensor:
        """Return V̂ᵀ, ``(r, rows)``: this process's rows of the orthonormal vectors."""
        vectors = self.basis.new_empty((self.combination.shape[1], self.basis.shape[1]))
        # One matrix-vector product each, because a GPU may round a matrix product to
        # TF32. Autocast does not round operands if ``out`` is given.
        for vector, column in zip(vectors, self.combination.t(), strict=True):
            torch.mv(self.basis.t(), column, out=vector)
        return vectors


def default_iterations(size: int, num_pairs: int) -> int:
    """Return the paper's m = max(4(k + l), 2 ln n), at most n."""
    return min(size, max(4 * num_pairs, math.ceil(2 * math.log(max(size, 2)))))


def extreme_pairs(
    space: RowSpace,
    start: Tensor,
    largest: int,
    smallest: int,
    *,
    iterations: int,
    tol: float,
    seed: int,
    expected: int = 0,
) -> Pairs:
    """Compute the algebraically largest and smallest eigenpairs. Collective.

    Args:
        space: The Hessian, and the processes.
        start: This process's rows of the start vector.
        largest: k. If k + l exceeds n, fewer pairs are computed.
        smallest: l.
        iterations: m, the maximum number of products.
        tol: The run ends once every requested pair has a residual of at most tol |θ|.
        seed: The seed of random vectors, used if the Krylov space is exhausted early.
        expected: The probable number of iterations; 0 if it is not known.
    """
    # The Ritz values ascend: the last k are the largest, and the first l the smallest.
    num_pairs = min(largest + smallest, space.size)
    largest = min(largest, num_pairs)
    smallest = num_pairs - largest
    indices = [*range(-1, -1 - largest, -1), *range(smallest)]

    def all_converged(ritz: Ritz) -> bool:
        return bool((ritz.residuals[indices] <= tol * ritz.values[indices].abs()).all())

    # Run the recurrence until the pairs have converged.
    run = tridiagonalize(
        space,
        start,
        max(iterations, num_pairs),
        at_least=num_pairs,
        finished=all_converged if tol > 0 else None,
        seed=seed,
        expected=expected,
    )

    # Decompose the tridiagonal matrix.
    count = len(run.diagonal)
    ritz: Ritz | None = None
    trouble = UNDECOMPOSED
    if run.finite:
        ritz = agreed_ritz_pairs(space, run)
        is_finite = ritz.vectors.isfinite().all() & ritz.values.isfinite().all()
        if not bool(is_finite):
            ritz = None
    else:
        trouble = (
            f"Hessian-vector product {count + 1} is not finite; look at the loss of the batch, or "
            f"use a wider dtype for the model"
        )
    # Without valid Ritz pairs, return no pairs and the reason.
    if ritz is None:
        empty = torch.empty(0, dtype=torch.float64, device="cpu")
        return Pairs(
            values=empty,
            residuals=empty,
            bounds=empty,
            num_largest=0,
            products=run.products,
            basis=run.basis,
            combination=run.basis.new_empty((count, 0)),
            trouble=trouble,
        )

    # The caller combines the basis to eigenvectors if it needs them.
    residuals = ritz.residuals[indices]
    eps = torch.finfo(run.basis.dtype).eps
    norm = float(ritz.values.abs().max())
    rounding = ROUNDING * eps * norm
    return Pairs(
        values=ritz.values[indices],
        residuals=residuals,
        bounds=residuals.clamp(min=rounding),
        num_largest=largest,
        products=run.products,
        basis=run.basis,
        combination=ritz.vectors[:, indices].to(start.device, start.dtype),
    )


def agreed_ritz_pairs(space: RowSpace, run: Tridiagonal) -> Ritz:
    """Return the first process's Ritz pairs on all processes. Collective.

    Signs, vectors of equal eigenvalues, and failures could differ between processes.
    """
    ritz = ritz_pairs(run.diagonal, run.off_diagonal)
    packed = torch.cat([ritz.values[None], ritz.residuals[None], ritz.vectors.t()])
    packed = space.broadcast_from_first(packed)
    return Ritz(values=packed[0], vectors=packed[2:].t(), residuals=packed[1])

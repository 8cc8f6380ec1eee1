"""The Lanczos recurrence with full reorthogonalisation, over any symmetric product.

    h = H dᵢ;  Bᵢᵢ = dᵢᵀh;  h <- h − D(Dᵀh), twice;  B_{i,i+1} = ‖h‖;  d_{i+1} = h/‖h‖

so that DᵀHD = B is tridiagonal, and B = U diag(u) Uᵀ gives the Ritz pairs u, DU of H. The rows of
D may be spread over processes: a :class:`Space` multiplies vectors and makes sums whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Ritz", "Space", "Tridiagonal", "normal", "ritz_pairs", "tridiagonalise"]

# Whether a run is finished takes a decomposition of B: a long one is not asked at each iteration.
ASK_ALWAYS, ASK_EVERY = 32, 4


class Space:
    """The space of a recurrence's vectors, whose rows this process has: all, with a plain product.

    That multiplies by a symmetric matrix of this size, ``(n,) -> (n,)``. `vector_space.py` has
    spaces of which processes have some rows each.
    """

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size = size
        self._product, self.dtype, self.device = product, dtype, torch.device(device)

    def random(self, seed: int, scale: float) -> Tensor:
        """The rows here of a seeded normal vector, which depends on no device nor on processes."""
        return normal(self.size, seed, scale).to(self.device, self.dtype)

    def apply(self, d: Tensor) -> Tensor:
        """The rows here of H d, from those of d."""
        return self._product(d)

    def total(self, x: Tensor) -> Tensor:
        """The sum of a small tensor over the processes, equal on all of them bit for bit."""
        return x

    def first(self, x: Tensor) -> Tensor:
        """The first process's values of a small tensor, on all of them."""
        return x


def normal(size: int, seed: int, scale: float) -> Tensor:
    """Draw ``(size,)``: scale times a standard normal vector in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float32).mul_(scale)


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


def ritz_pairs(diagonal: Tensor, off_diagonal: Tensor) -> Ritz:
    """The eigenpairs of B, as :class:`Tridiagonal` has it."""
    inner = off_diagonal[:-1]
    B = torch.diag(diagonal) + torch.diag(inner, 1) + torch.diag(inner, -1)
    try:
        values, vectors = torch.linalg.eigh(B)
    except Exception:  # the verdicts are exchanged next: the others must not wait in vain
        values, vectors = torch.full_like(diagonal, torch.nan), torch.full_like(B, torch.nan)
    return Ritz(values, vectors, off_diagonal[-1] * vectors[-1].abs())


def tridiagonalise(
    space: Space,
    start: Tensor,
    iterations: int,
    *,
    at_least: int = 1,
    finished: Callable[[Ritz], bool] | None = None,
    seed: int = 0,
) -> Tridiagonal:
    """Run the Lanczos recurrence from this process's rows of a vector, for m iterations at most.

    B is kept in float64, D in the dtype of ``start``. The host reads coefficients at each
    iteration, and so waits for the device. From ``at_least`` iterations on the run ends where
    ``finished`` says so, or the Krylov space is exhausted; if that is so earlier, the recurrence
    goes on from a random vector orthogonal to it, of this ``seed``.
    """
    iterations = min(iterations, space.size)
    D = start.new_empty((iterations, start.numel()))
    norm = math.sqrt(float(space.total(_square(start))))
    d = start / norm if norm > 0.0 else _orthogonal(space, D[:0], seed)
    finite = math.isfinite(norm) and d is not None
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    scale = 0.0
    while finite and d is not None and len(diagonal) < iterations:
        j = len(diagonal)
        D[j] = d
        basis = D[: j + 1]
        h = space.apply(d)
        first = space.total((basis @ h).double())
        h.addmv_(basis.t(), first.to(h.dtype), alpha=-1)
        again = space.total(torch.cat([(basis @ h).double(), _square(h)]))
        h.addmv_(basis.t(), again[:-1].to(h.dtype), alpha=-1)
        rest = again[-1] - again[:-1].square().sum()
        if not rest > 0.5 * again[-1]:  # the second pass took most of it: rounding alone is left
            rest = space.total(_square(h))[0]
        alpha, square = torch.stack([first[j] + again[j], rest]).tolist()
        beta = math.sqrt(max(square, 0.0)) if math.isfinite(square) else math.nan
        finite = math.isfinite(alpha) and math.isfinite(beta)
        if not finite:
            break
        diagonal.append(alpha)
        scale = max(scale, abs(alpha), beta)
        exhausted = beta <= 8 * torch.finfo(h.dtype).eps * scale
        off_diagonal.append(0.0 if exhausted else beta)
        if j + 1 >= at_least:
            done = exhausted
            if finished is not None and not done and (j < ASK_ALWAYS or j % ASK_EVERY == 0):
                # As the first process finds: rounding must not part them.
                numbers = torch.tensor([diagonal, off_diagonal], dtype=torch.float64)
                verdict = float(finished(ritz_pairs(*numbers)))
                done = bool(space.first(torch.tensor([verdict], device=h.device)))
            if done:
                break
        d = _orthogonal(space, basis, seed + j + 1) if exhausted else h / beta
    return Tridiagonal(
        D[: len(diagonal)],
        torch.tensor(diagonal, dtype=torch.float64),
        torch.tensor(off_diagonal, dtype=torch.float64),
        finite,
    )


def _square(x: Tensor) -> Tensor:
    """The squared norm ‖x‖², ``(1,)``, summed in float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square().reshape(1)


def _orthogonal(space: Space, basis: Tensor, seed: int) -> Tensor | None:
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

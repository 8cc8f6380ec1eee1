"""Damped solves with Kronecker factors: eigendecomposition or Cholesky inverse, batched by size.

A decomposition climbs a ladder until its result is finite and accurate: the working precision,
float64, float64 on the CPU. One bad member never spoils the others of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "SOLVERS",
    "Damping",
    "Decomposition",
    "EigenInverse",
    "EigenSolver",
    "FactoredInverse",
    "Inverse",
    "InverseSolver",
    "Solver",
    "SolverName",
    "decompose_batched",
    "factored_damping",
]

SolverName: TypeAlias = Literal["eigen", "inverse"]
Decomposition: TypeAlias = tuple[Tensor, ...]
Damping: TypeAlias = float | Tensor

# Relative residual above which a float32 decomposition is taken again in float64. A sound one is
# near 1e-6; a wrong one is near 1.
RESIDUAL_TOLERANCE = 1e-3


@contextmanager
def ieee_matmul(device: torch.device) -> Iterator[None]:
    """Full float32 products on CUDA, where TF32 would keep ten bits of each factor."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class Inverse(Protocol):
    """A damped inverse of one layer's curvature block, ready to be applied."""

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply to a gradient of shape ``(groups, out, in)``."""

    @property
    def nbytes(self) -> int:
        """Bytes this inverse holds."""


@dataclass(frozen=True)
class EigenInverse:
    """P = Q_G ((Q_Gᵀ ∇ Q_A) / (v_G v_Aᵀ + γ)) Q_Aᵀ (Pauloski et al. 2022, eq. 13-15).

    Equal to the dense solve with A ⊗ G + γ I.

    Attributes:
        q_a: Eigenvectors of A, ``(groups, in, in)``, one a column; None if A is diagonal.
        q_g: Eigenvectors of G, ``(groups, out, out)``.
        scale: 1 / (v_G v_Aᵀ + γ), ``(groups, out, in)``.
    """

    q_a: Tensor | None
    q_g: Tensor
    scale: Tensor

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply to a gradient of shape ``(groups, out, in)``."""
        rotated = self.q_g.mT @ gradient
        if self.q_a is None:
            return self.q_g @ rotated.mul_(self.scale)
        return self.q_g @ (rotated @ self.q_a).mul_(self.scale) @ self.q_a.mT

    @property
    def nbytes(self) -> int:
        """Bytes this inverse holds."""
        vectors = 0 if self.q_a is None else self.q_a.nbytes
        return vectors + self.q_g.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class FactoredInverse:
    """P = (G + √γ/π I)⁻¹ ∇ (A + π √γ I)⁻¹ (Martens & Grosse 2015, section 6.3).

    Attributes:
        a_inverse: ``(groups, in, in)``, or ``(groups, in)`` if A is diagonal.
        g_inverse: ``(groups, out, out)``.
    """

    a_inverse: Tensor
    g_inverse: Tensor

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply to a gradient of shape ``(groups, out, in)``."""
        if self.a_inverse.dim() == 2:
            return (self.g_inverse @ gradient).mul_(self.a_inverse.unsqueeze(-2))
        return self.g_inverse @ gradient @ self.a_inverse

    @property
    def nbytes(self) -> int:
        """Bytes this inverse holds."""
        return self.a_inverse.nbytes + self.g_inverse.nbytes


def factored_damping(*factors: Tensor, damping: Damping) -> tuple[Tensor, ...]:
    """Split γ over N Kronecker factors: factor i gets πᵢ γ^(1/N).

    With nᵢ = tr Fᵢ / dim Fᵢ, πᵢ = nᵢ / (Π n)^(1/N). These πᵢ, whose product is 1, minimise the
    bound on the error that the cross terms make (Ba et al. 2017, section 4.1). Two factors have
    π √γ and √γ / π, π² = (tr A / dim A) / (tr G / dim G) (Martens & Grosse 2015, section 6.3). A
    zero trace gives πᵢ = 1.

    Args:
        *factors: Each ``(groups, n, n)``, or ``(groups, n)`` if it is diagonal; n may differ.
        damping: γ, a number or a scalar.

    Returns:
        What is added to the diagonal of each factor, of shape ``(groups,)``.
    """
    means = torch.stack([_diagonal(factor).mean(-1) for factor in factors])
    usable = (means > 0).all(0)
    logarithms = torch.where(usable, means, 1.0).log()  # of a product that may overflow
    pi = (logarithms - logarithms.mean(0)).exp()
    return tuple((pi * damping ** (1 / len(factors))).unbind())


def _eigh(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Eigenvectors and eigenvalues (at least 0) of ``(batch, n, n)``, and which are sound."""
    tiny = torch.finfo(matrix.dtype).tiny
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).abs().clamp_min(tiny)[:, None, None]
    scaled = matrix / size
    values, vectors = torch.linalg.eigh(scaled)
    probe = _probe(matrix)
    coordinates = vectors.mT @ probe
    expected = scaled @ probe
    error = _norm(vectors @ (values.unsqueeze(-1) * coordinates) - expected)
    error = error / (_norm(expected) + _norm(probe))
    # Q Λ Qᵀ alone would pass with a Q that is not orthogonal where Λ vanishes.
    skew = _norm(vectors @ coordinates - probe) / _norm(probe)
    sound = torch.maximum(error, skew) < RESIDUAL_TOLERANCE
    return (vectors, values.clamp_min(0) * size.squeeze(-1)), sound


def _cholesky_inverse(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Inverses of positive definite ``(batch, n, n)``, and whether each is sound."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    definite = info == 0
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor = torch.where(definite[:, None, None], factor, identity)
    inverse = torch.cholesky_inverse(factor)
    probe = _probe(matrix)
    solved = inverse @ probe
    # The backward error: small whatever the condition number, unless the inverse is wrong.
    error = _norm(matrix @ solved - probe) / (_norm(matrix) * _norm(solved) + _norm(probe))
    return (inverse,), definite & (error < RESIDUAL_TOLERANCE)


def _diagonal(factor: Tensor) -> Tensor:
    """The diagonal, shape ``(groups, n)``, as a view, of a factor that may be kept as one."""
    return factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)


def _owned(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, without the rest of the batch or message that it is a view of."""
    part = part.to(dtype)
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norm


def _probe(matrix: Tensor) -> Tensor:
    """A fixed vector with no zero and no pattern, shape ``(n, 1)``."""
    steps = torch.arange(1, matrix.shape[-1] + 1, dtype=matrix.dtype, device=matrix.device)
    wave: Tensor = torch.cos(steps * steps * 0.7)
    return wave.add_(1.5).unsqueeze(-1)


class Solver(Protocol):
    """How factors become something that preconditions."""

    symmetric: bool
    """Whether the first tensor of a decomposition is symmetric, so that a triangle will do."""

    def damp(self, a: Tensor, g: Tensor, damping: Damping) -> tuple[Tensor, Tensor]:
        """The matrices to decompose, of the factors' shapes."""

    def decompose(self, matrix: Tensor) -> tuple[Decomposition, Tensor]:
        """Decompose ``(batch, n, n)``; also which members are sound, shape ``(batch,)``."""

    def decompose_diagonal(self, entries: Tensor) -> Decomposition:
        """Decompose a diagonal factor ``(groups, n)``; one tensor of the same shape."""

    def payload_shapes(self, groups: int, dim: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of a decomposition of a factor of shape ``(groups, dim, dim)``."""

    def combine(
        self, a: Decomposition, g: Decomposition, damping: Damping, dtype: torch.dtype
    ) -> Inverse:
        """The layer's inverse, in ``dtype``, from the decompositions of its two factors."""


class EigenSolver:
    """Eigendecomposition of the factors; damping enters when the two meet."""

    symmetric = False

    def damp(self, a: Tensor, g: Tensor, damping: Damping) -> tuple[Tensor, Tensor]:
        """The factors as they are."""
        return a, g

    def decompose(self, matrix: Tensor) -> tuple[Decomposition, Tensor]:
        """``(eigenvectors, eigenvalues)``, each with a leading batch, and which are sound."""
        return _eigh(matrix)

    def decompose_diagonal(self, entries: Tensor) -> Decomposition:
        """``(eigenvalues,)``; the eigenvectors are the identity."""
        return (entries.clamp_min(0),)

    def payload_shapes(self, groups: int, dim: int) -> tuple[tuple[int, ...], ...]:
        """Eigenvectors and eigenvalues."""
        return (groups, dim, dim), (groups, dim)

    def combine(
        self, a: Decomposition, g: Decomposition, damping: Damping, dtype: torch.dtype
    ) -> EigenInverse:
        """Form 1 / (v_G v_Aᵀ + γ) once, for all steps until the next refresh."""
        q_a, v_a = (None, a[0]) if len(a) == 1 else a
        q_g, v_g = g
        curvature = (v_g.unsqueeze(-1) * v_a.unsqueeze(-2)).add_(damping)
        # Without damping the gradient has no part where the curvature is 0: the pseudo-inverse.
        scale = curvature.reciprocal_().masked_fill_(curvature.isinf(), 0.0)
        vectors = None if q_a is None else _owned(q_a, dtype)
        return EigenInverse(vectors, _owned(q_g, dtype), _owned(scale, dtype))


class InverseSolver:
    """Cholesky inverses of the two damped factors."""

    symmetric = True

    def damp(self, a: Tensor, g: Tensor, damping: Damping) -> tuple[Tensor, Tensor]:
        """A + π √γ I and G + √γ/π I."""
        on_a, on_g = factored_damping(a, g, damping=damping)
        damped_a, damped_g = a.clone(), g.clone()
        _diagonal(damped_a).add_(on_a.unsqueeze(-1))
        _diagonal(damped_g).add_(on_g.unsqueeze(-1))
        return damped_a, damped_g

    def decompose(self, matrix: Tensor) -> tuple[Decomposition, Tensor]:
        """``(inverse,)`` with a leading batch, and which are sound."""
        return _cholesky_inverse(matrix)

    def decompose_diagonal(self, entries: Tensor) -> Decomposition:
        """``(inverse,)``."""
        return (entries.reciprocal(),)

    def payload_shapes(self, groups: int, dim: int) -> tuple[tuple[int, ...], ...]:
        """The inverse."""
        return ((groups, dim, dim),)

    def combine(
        self, a: Decomposition, g: Decomposition, damping: Damping, dtype: torch.dtype
    ) -> FactoredInverse:
        """Nothing is left to do."""
        return FactoredInverse(_owned(a[0], dtype), _owned(g[0], dtype))


SOLVERS: dict[str, Solver] = {"eigen": EigenSolver(), "inverse": InverseSolver()}


def decompose_batched(solver: Solver, matrices: Sequence[Tensor]) -> list[Decomposition | None]:
    """Decompose many factors, those of one size, dtype and device together.

    Args:
        solver: What to do with each.
        matrices: Each of shape ``(groups, n, n)``, symmetric, or ``(groups, n)``, a diagonal.

    Returns:
        Per matrix its decomposition with leading ``groups``, or None if no rung of the ladder gave
        a sound one for every group.
    """
    batches: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    results: list[Decomposition | None] = [None] * len(matrices)
    for index, matrix in enumerate(matrices):
        if matrix.dim() == 2:
            parts = solver.decompose_diagonal(matrix)
            finite = torch.isfinite(matrix).all() & torch.isfinite(parts[0]).all()
            results[index] = parts if bool(finite) else None
            continue
        key = (matrix.shape[-1], matrix.dtype, matrix.device)
        batches.setdefault(key, []).append(index)
    for (_, _, device), indices in batches.items():
        stacked = torch.cat([matrices[i] for i in indices])
        with ieee_matmul(device):
            payload, sound = _climb(solver.decompose, stacked)
        start = 0
        for i in indices:
            stop = start + matrices[i].shape[0]
            if all(sound[start:stop]):
                results[i] = tuple(part[start:stop] for part in payload)
            start = stop
    return results


_Decompose: TypeAlias = Callable[[Tensor], tuple[Decomposition, Tensor]]


def _climb(decompose: _Decompose, batch: Tensor) -> tuple[Decomposition, list[bool]]:
    """Decompose ``(batch, n, n)`` by the ladder; the result is in the batch's dtype and place."""
    finite = torch.isfinite(batch).flatten(1).all(1)
    identity = torch.eye(batch.shape[-1], dtype=batch.dtype, device=batch.device)
    batch = torch.where(finite[:, None, None], batch, identity)
    working = torch.promote_types(batch.dtype, torch.float32)
    rungs = [(batch.device, working), (batch.device, torch.float64)]
    rungs.append((torch.device("cpu"), torch.float64))
    payload: Decomposition = ()
    usable = finite.tolist()
    todo = list(range(len(usable)))
    for device, dtype in dict.fromkeys(rungs):
        members = batch if len(todo) == len(batch) else batch[todo]
        parts, sound = _attempt(decompose, members.to(device, dtype))
        if not payload and parts:
            payload = tuple(
                torch.zeros(len(batch), *p.shape[1:], dtype=batch.dtype, device=batch.device)
                for p in parts
            )
        done = [i for i, ok in zip(todo, sound, strict=True) if ok]
        if len(done) == len(batch):  # the common case, without a gather
            return tuple(p.to(batch.device, batch.dtype) for p in parts), usable
        chosen = [position for position, ok in enumerate(sound) if ok]
        for target, part in zip(payload, parts, strict=False):
            target[done] = part[chosen].to(batch.device, batch.dtype)
        todo = [i for i, ok in zip(todo, sound, strict=True) if not ok]
        if not todo:
            break
    for i in todo:
        usable[i] = False
    return payload, usable


def _attempt(decompose: _Decompose, members: Tensor) -> tuple[Decomposition, list[bool]]:
    """One rung: the whole batch, and one by one if that raises."""
    try:
        parts, sound = decompose(members)
        for part in parts:
            sound = sound & torch.isfinite(part).flatten(1).all(1)
        return parts, sound.tolist()
    except RuntimeError:  # torch.linalg.LinAlgError, solver errors, out of memory
        if len(members) == 1:
            return (), [False]
    singles = [_attempt(decompose, member.unsqueeze(0)) for member in members]
    sound_parts = [parts for parts, (ok,) in singles if ok]
    if not sound_parts:
        return (), [False] * len(members)
    blank = tuple(torch.zeros_like(p) for p in sound_parts[0])
    whole = [parts if ok else blank for parts, (ok,) in singles]
    return tuple(torch.cat(column) for column in zip(*whole, strict=True)), [
        ok for _, (ok,) in singles
    ]

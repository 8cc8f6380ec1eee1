"""Eigendecompositions and Cholesky inverses that do not fail quietly, batched by size.

A decomposition climbs a ladder until its result is finite and accurate: the working precision,
float64, float64 on the CPU. One bad member never spoils the others of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Decompose",
    "Decomposition",
    "Problem",
    "cholesky_inverse",
    "decompose_batched",
    "diagonal",
    "eigh",
    "ieee_matmul",
    "orthogonal_iteration",
]

Decomposition: TypeAlias = tuple[Tensor, ...]
Decompose: TypeAlias = Callable[[Tensor], tuple[Decomposition, Tensor]]
"""Takes ``(batch, n, n)``, gives the parts, and which members are sound, shape ``(batch,)``."""

# Relative residual above which a float32 decomposition is taken again in float64. A sound one is
# near 1e-6; a wrong one is near 1.
RESIDUAL_TOLERANCE = 1e-3

# What may remain off the diagonal after an orthogonal iteration: a bound on the relative error of
# the damped inverse.
REFINEMENT_TOLERANCE = 0.2

# Bytes of matrices decomposed together, unless one alone is larger. LAPACK takes one after the
# other, so that on a CPU a batch only saves calls, and costs a copy.
CPU_BATCH_BYTES, BATCH_BYTES = 2**20, 64 * 2**20


@contextmanager
def ieee_matmul(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Full float32 products on CUDA, where TF32 would keep ten bits of each factor.

    The setting is the whole process's, so threads use float64, which it is not for.
    """
    if device.type != "cuda" or dtype == torch.float64:
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@dataclass(frozen=True)
class Problem:
    """A factor to decompose, which is not built before its turn.

    Attributes:
        groups: Number of matrices.
        dim: Size n of each matrix.
        dtype: The narrowest dtype in which the matrices are decomposed.
        device: The device of the matrices.
        build: Makes ``(groups, n, n)``, or ``(groups, n)`` for a diagonal, a new tensor.
        added: Damping added to the diagonals, ``(groups,)``, or None.
        guess: Eigenvectors of an earlier version, ``(groups, n, n)``, or None.
        is_diagonal: Whether ``build`` makes a diagonal.
        scale: With a guess: the damping of the whole inverse, ``(groups,)``, or None.
    """

    groups: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    build: Callable[[], Tensor]
    added: Tensor | None = None
    guess: Tensor | None = None
    is_diagonal: bool = False
    scale: Tensor | None = None

    def damped(self) -> Tensor:
        """The matrices, or the diagonal, with the damping added."""
        matrix = self.build()
        if self.added is not None:
            diagonal(matrix).add_(self.added.to(matrix.dtype).unsqueeze(-1))
        return matrix


def diagonal(factor: Tensor) -> Tensor:
    """The diagonal, shape ``(groups, n)``, as a view, of a factor that may be kept as one."""
    return factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)


def eigh(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Eigenvectors and eigenvalues (at least 0) of ``(batch, n, n)``, and which are sound."""
    size = _size(matrix)
    scaled = matrix / size
    values, vectors = torch.linalg.eigh(scaled)
    return (vectors, values.clamp_min(0) * size.squeeze(-1)), _is_eigenbasis(
        scaled, vectors, values
    )


def orthogonal_iteration(
    matrix: Tensor, guess: Tensor, scale: Tensor | None = None
) -> tuple[Decomposition, Tensor]:
    """One step of orthogonal iteration from the eigenvectors of a nearby matrix.

    Y = X Q, its QR decomposition gives the new Q, the diagonal of Qᵀ X Q the eigenvalues (Golub &
    Van Loan 2013, section 8.2.4). Columns come in the order of falling eigenvalues, so that a
    strong direction is never corrected by a weak one.

    Args:
        matrix: X, ``(batch, n, n)``.
        guess: Q, ``(batch, n, n)``, columns in the order of rising eigenvalues, as ``eigh`` has it.
        scale: Damping on the scale of which errors count, ``(batch,)``; None for the mean
            eigenvalue.

    Returns:
        Eigenvectors and eigenvalues as from :func:`eigh`, nearly in rising order, and for which
        members they are sound: what is left off the diagonal is below the tolerance.
    """
    size, guess = _size(matrix), guess.to(matrix)
    scaled = matrix / size
    vectors = torch.linalg.qr(scaled @ guess.flip(-1)).Q.flip(-1)
    rotated = vectors.mT @ (scaled @ vectors)
    values = diagonal(rotated).clamp_min(0)
    diagonal(rotated).zero_()
    damping = 1.0 if scale is None else scale.to(matrix).unsqueeze(-1) / size.squeeze(-1)
    weights = (values + damping).rsqrt_()
    left = _norm(rotated.mul_(weights.unsqueeze(-1)).mul_(weights.unsqueeze(-2)))
    sound = (left < REFINEMENT_TOLERANCE) & _is_orthogonal(vectors)
    return (vectors, values * size.squeeze(-1)), sound


def cholesky_inverse(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Inverses of positive definite ``(batch, n, n)``, and whether each is sound."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    definite = info == 0
    if not bool(definite.all()):
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        factor = torch.where(definite[:, None, None], factor, identity)
    inverse = torch.cholesky_inverse(factor)
    del factor
    probe = _probe(matrix)
    solved = inverse @ probe
    # The backward error: small whatever the condition number, unless the inverse is wrong.
    error = _norm(matrix @ solved - probe) / (_norm(matrix) * _norm(solved) + _norm(probe))
    return (inverse,), definite & (error < RESIDUAL_TOLERANCE)


def _size(matrix: Tensor) -> Tensor:
    """The mean diagonal entry, ``(batch, 1, 1)``: dividing by it keeps squares in range."""
    tiny = torch.finfo(matrix.dtype).tiny
    return diagonal(matrix).mean(-1).abs().clamp_min(tiny)[:, None, None]


def _is_eigenbasis(matrix: Tensor, vectors: Tensor, values: Tensor) -> Tensor:
    probe = _probe(matrix)
    coordinates = vectors.mT @ probe
    expected = matrix @ probe
    error = _norm(vectors @ (values.unsqueeze(-1) * coordinates) - expected)
    error = error / (_norm(expected) + _norm(probe))
    # Q Λ Qᵀ alone would pass with a Q that is not orthogonal where Λ vanishes.
    skew = _norm(vectors @ coordinates - probe) / _norm(probe)
    return torch.maximum(error, skew) < RESIDUAL_TOLERANCE


def _is_orthogonal(vectors: Tensor) -> Tensor:
    probe = _probe(vectors)
    skew = _norm(vectors @ (vectors.mT @ probe) - probe) / _norm(probe)
    return skew < RESIDUAL_TOLERANCE


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norm


def _probe(matrix: Tensor) -> Tensor:
    """A fixed vector with no zero and no pattern, shape ``(n, 1)``."""
    steps = torch.arange(1, matrix.shape[-1] + 1, dtype=matrix.dtype, device=matrix.device)
    wave: Tensor = torch.cos(steps * steps * 0.7)
    return wave.add_(1.5).unsqueeze(-1)


def decompose_batched(
    problems: Sequence[Problem],
    decompose: Decompose,
    decompose_diagonal: Callable[[Tensor], Decomposition],
    keep: Callable[[Decomposition], Decomposition],
) -> list[Decomposition | None]:
    """Decompose many factors, those of one size, dtype and device together.

    Those with guesses are first refined from them. ``keep`` brings a decomposition into the form in
    which it is kept; the rest is let go before the next batch.

    Returns:
        Per problem its decomposition with leading ``groups``, or None if no rung of the ladder gave
        a sound one for every group.
    """
    results: list[Decomposition | None] = [None] * len(problems)
    for indices in _batches(problems):
        matrices = [problems[i].damped() for i in indices]
        if problems[indices[0]].is_diagonal:
            for i, matrix in zip(indices, matrices, strict=True):
                parts = decompose_diagonal(matrix)
                sums = torch.stack([matrix.sum(), *(part.sum() for part in parts)])
                results[i] = keep(parts) if bool(torch.isfinite(sums).all()) else None
            continue
        stacked = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        del matrices
        refine = None
        if problems[indices[0]].guess is not None:  # of all or of none
            guess = torch.cat([g for i in indices if (g := problems[i].guess) is not None])
            scales = [scale for i in indices if (scale := problems[i].scale) is not None]
            damping = torch.cat(scales) if len(scales) == len(indices) else None
            refine = partial(orthogonal_iteration, guess=guess, scale=damping)
        with ieee_matmul(stacked.device, stacked.dtype):
            payload, sound = _climb(decompose, stacked, refine)
        start = 0
        for i in indices:
            stop = start + problems[i].groups
            if all(sound[start:stop]):
                results[i] = keep(tuple(part[start:stop] for part in payload))
            start = stop
    return results


def _batches(problems: Sequence[Problem]) -> list[list[int]]:
    """Indices of problems of one kind, cut into batches of bounded bytes."""
    batches: list[list[int]] = []
    current: dict[object, list[int]] = {}
    filled: dict[object, int] = {}
    for i, problem in enumerate(problems):
        key = problem.dim, problem.dtype, problem.device, problem.guess is None, problem.is_diagonal
        nbytes = problem.groups * problem.dim**2 * problem.dtype.itemsize
        most = CPU_BATCH_BYTES if problem.device.type == "cpu" else BATCH_BYTES
        if key not in current or filled[key] + nbytes > most:
            current[key], filled[key] = [], 0
            batches.append(current[key])
        current[key].append(i)
        filled[key] += nbytes
    return batches


def _climb(
    decompose: Decompose, batch: Tensor, refine: Decompose | None
) -> tuple[Decomposition, list[bool]]:
    """Decompose ``(batch, n, n)`` by the ladder; the result is in the batch's dtype and place."""
    batch, finite = _with_finite_members(batch)
    working = torch.promote_types(batch.dtype, torch.float32)
    places = dict.fromkeys((batch.device, dtype) for dtype in (working, torch.float64))
    rungs = [(decompose, place) for place in {**places, (torch.device("cpu"), torch.float64): None}]
    if refine is not None:
        rungs.insert(0, (refine, (batch.device, working)))
    found: dict[int, Decomposition] = {}
    for rung, place in rungs:
        todo = [i for i in range(len(batch)) if i not in found]
        members = batch[todo] if found else batch
        parts, sound = _attempt(rung, place, members, alone=rung is not refine)
        if not found and all(sound):  # the common case, without a copy
            return tuple(p.to(batch.device, batch.dtype) for p in parts), finite
        for k, i in enumerate(todo):
            if sound[k]:
                found[i] = tuple(p[k : k + 1].to(batch.device, batch.dtype) for p in parts)
        if len(found) == len(batch):
            break
    if not found:
        return (), [False] * len(batch)
    any_one = next(iter(found.values()))
    columns = zip(*(found.get(i, any_one) for i in range(len(batch))), strict=True)
    return tuple(map(torch.cat, columns)), [ok and i in found for i, ok in enumerate(finite)]


def _with_finite_members(batch: Tensor) -> tuple[Tensor, list[bool]]:
    """The batch with the identity for members that are not finite, and which are finite."""
    finite: list[bool] = torch.isfinite(_norm(batch)).tolist()
    if all(finite):
        return batch, finite
    exact = torch.isfinite(batch).flatten(1).all(1)  # a square may have overflowed
    identity = torch.eye(batch.shape[-1], dtype=batch.dtype, device=batch.device)
    return torch.where(exact[:, None, None], batch, identity), exact.tolist()


def _attempt(
    decompose: Decompose, place: tuple[torch.device, torch.dtype], members: Tensor, *, alone: bool
) -> tuple[Decomposition, list[bool]]:
    """Try one rung of the ladder: the whole batch at once; if that raises, one by one, or none."""
    try:
        parts, sound = decompose(members.to(*place))
        return parts, sound.tolist()
    except RuntimeError:  # torch.linalg.LinAlgError, solver errors, out of memory
        if len(members) == 1 or not alone:
            return (), [False] * len(members)
    singles = [_attempt(decompose, place, m.unsqueeze(0), alone=True) for m in members]
    sound_parts = [parts for parts, (ok,) in singles if ok]
    if not sound_parts:
        return (), [False] * len(members)
    whole = [parts if ok else sound_parts[0] for parts, (ok,) in singles]
    return tuple(map(torch.cat, zip(*whole, strict=True))), [ok for _, (ok,) in singles]

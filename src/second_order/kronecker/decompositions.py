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
]

Decomposition: TypeAlias = tuple[Tensor, ...]
Decompose: TypeAlias = Callable[[Tensor], tuple[Decomposition, Tensor]]
"""Takes ``(batch, n, n)``, gives the parts, and which members are sound, shape ``(batch,)``."""

# Relative residual above which a float32 decomposition is taken again in float64. A sound one is
# near 1e-6; a wrong one is near 1.
RESIDUAL_TOLERANCE = 1e-3

# Bytes of matrices decomposed together, unless one alone is larger. LAPACK takes one after the
# other, so that on a CPU a batch only saves calls, and costs a copy.
CPU_BATCH_BYTES, BATCH_BYTES = 2**20, 64 * 2**20

_norm: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dim=(-2, -1))


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
    """A factor to decompose, which is not built before its turn."""

    groups: int
    dim: int  # n
    dtype: torch.dtype  # in which it is decomposed first, float32 at least
    device: torch.device
    build: Callable[[], Tensor]  # a new tensor, (groups, n, n), or (groups, n) for a diagonal
    added: Tensor | None = None  # damping added to the diagonals, (groups,)
    is_diagonal: bool = False


def diagonal(factor: Tensor) -> Tensor:
    """The diagonal, shape ``(groups, n)``, as a view, of a factor that may be kept as one."""
    return factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)


def eigh(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Eigenvectors and eigenvalues (at least 0) of ``(batch, n, n)``, and which are sound.

    Of diagonals ``(batch, n)`` the eigenvalues alone.
    """
    if matrix.dim() == 2:
        return (matrix.clamp_min(0),), torch.isfinite(matrix).all(1)
    size = _size(matrix)
    scaled = matrix / size
    values, vectors = torch.linalg.eigh(scaled)
    return (vectors, values.clamp_min(0) * size.squeeze(-1)), _is_eigenbasis(
        scaled, vectors, values
    )


def cholesky_inverse(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Inverses of positive definite ``(batch, n, n)``, or of diagonals, and which are sound."""
    if matrix.dim() == 2:
        inverse = matrix.reciprocal()
        return (inverse,), torch.isfinite(matrix + inverse).all(1)
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
    coordinates, expected = vectors.mT @ probe, matrix @ probe
    error = _norm(vectors @ (values.unsqueeze(-1) * coordinates) - expected)
    error = error / (_norm(expected) + _norm(probe))
    # Q Λ Qᵀ alone would pass with a Q that is not orthogonal where Λ vanishes.
    skew = _norm(vectors @ coordinates - probe) / _norm(probe)
    return torch.maximum(error, skew) < RESIDUAL_TOLERANCE


def _probe(matrix: Tensor) -> Tensor:
    """A fixed vector with no zero and no pattern, shape ``(n, 1)``."""
    steps = torch.arange(1, matrix.shape[-1] + 1, dtype=matrix.dtype, device=matrix.device)
    wave: Tensor = torch.cos(steps * steps * 0.7)
    return wave.add_(1.5).unsqueeze(-1)


def decompose_batched(
    problems: Sequence[Problem], decompose: Decompose
) -> Iterator[tuple[int, Decomposition]]:
    """Decompose many factors, those of one size, dtype and device together.

    Yields the index and the decomposition, with leading ``groups``, of each problem that has a
    sound one for every group. The parts are views of their batch's.
    """
    batches: list[list[int]] = []
    current: dict[object, list[int]] = {}
    filled: dict[object, int] = {}
    for i, each in enumerate(problems):
        key = each.dim, each.dtype, each.device, each.is_diagonal
        nbytes = each.groups * each.dim**2 * each.dtype.itemsize
        most = CPU_BATCH_BYTES if each.device.type == "cpu" else BATCH_BYTES
        if key not in current or filled[key] + nbytes > most:
            current[key], filled[key] = [], 0
            batches.append(current[key])
        current[key].append(i)
        filled[key] += nbytes
    for indices in batches:
        matrices: list[Tensor] = []
        sizes: list[int] = []
        for i in indices:
            problem, matrix = problems[i], problems[i].build()
            if problem.added is not None:
                diagonal(matrix).add_(problem.added.to(matrix.dtype).unsqueeze(-1))
            matrices.append(matrix)
            sizes.append(problem.groups)
        batch = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        del matrices, matrix
        if batch.dim() == 2:
            payload, finite = decompose(batch)
            sound = finite.tolist()
        else:
            with ieee_matmul(batch.device, batch.dtype):
                payload, sound = _climb(decompose, batch)
        del batch
        pieces = zip(*map(partial(torch.split, split_size_or_sections=sizes), payload), strict=True)
        start = 0
        for i, size, parts in zip(indices, sizes, pieces, strict=False):  # none if none is sound
            if all(sound[start : start + size]):
                yield i, parts
            start += size


def _climb(decompose: Decompose, batch: Tensor) -> tuple[Decomposition, list[bool]]:
    """Decompose ``(batch, n, n)`` by the ladder: parts in its dtype and place, and which are sound.

    Members that are not finite are shown to no routine. Where one raises, each is tried alone.
    """
    finite = torch.isfinite(_norm(batch)).tolist()
    if not all(finite):
        exact = torch.isfinite(batch).flatten(1).all(1)  # a square may have overflowed
        identity = torch.eye(batch.shape[-1], dtype=batch.dtype, device=batch.device)
        batch, finite = torch.where(exact[:, None, None], batch, identity), exact.tolist()
    here, wide, cpu = (batch.device, batch.dtype), torch.float64, torch.device("cpu")
    rungs = dict.fromkeys([here, (batch.device, wide), (cpu, wide)])
    found: dict[int, Decomposition] = {}
    left = set(range(len(batch)))
    for place in rungs:
        attempts = [sorted(left)] if left else []
        while attempts:
            members = attempts.pop()
            some = batch if len(members) == len(batch) else batch[members]
            try:
                parts, verdicts = decompose(some.to(*place))
                sound = verdicts.tolist()
            except RuntimeError:  # torch.linalg.LinAlgError, solver errors, out of memory
                if len(members) > 1:
                    attempts += [[i] for i in members]
                continue
            if some is batch and place == here and all(sound):
                return parts, finite  # the common case, without a copy
            for k, i in enumerate(members):
                if sound[k]:
                    found[i] = tuple(part[k : k + 1].to(*here) for part in parts)
            left -= found.keys()
    if not found:
        return (), [False] * len(batch)
    any_one = next(iter(found.values()))
    columns = zip(*(found.get(i, any_one) for i in range(len(batch))), strict=True)
    return tuple(map(torch.cat, columns)), [ok and i in found for i, ok in enumerate(finite)]

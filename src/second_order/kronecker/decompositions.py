"""Eigendecompositions and Cholesky inverses that do not fail quietly, batched by size.

A decomposition climbs a ladder until its result is finite and accurate: the working precision,
float64, float64 on the CPU. One bad member never spoils the others of its batch. All first attempts
are made before a device is waited for, once, to know which of them are accurate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.stacks import in_groups
from second_order.kronecker.triangles import unpack_upper_triangular

__all__ = [
    "RESIDUAL_TOLERANCE",
    "Attempts",
    "Decompose",
    "Decomposition",
    "Problem",
    "cholesky_inverse",
    "diagonal",
    "eigh",
    "ieee_matmul",
]

Decomposition: TypeAlias = tuple[Tensor, ...]
Decompose: TypeAlias = Callable[[Tensor], tuple[Decomposition, Tensor]]
"""Takes ``(batch, n, n)``, gives the parts and each member's relative error, shape ``(batch,)``."""

# Relative error above which a float32 decomposition is taken again in float64. A sound one is
# near 1e-6; a wrong one is near 1.
RESIDUAL_TOLERANCE = 1e-3

# Bytes of matrices decomposed together, unless one alone is larger. LAPACK takes one after the
# other, so that on a CPU a batch only saves calls, and costs a copy.
CPU_BATCH_BYTES, BATCH_BYTES = 2**20, 64 * 2**20

_norm: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dim=(-2, -1))
_lengths: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dim=-2)


@contextmanager
def ieee_matmul(
    device: torch.device, dtype: torch.dtype = torch.float32, *, narrow: bool = False
) -> Iterator[None]:
    """Full float32 products on CUDA, where TF32 would keep ten bits of each factor.

    The setting is the whole process's, so threads use float64, which it is not for.

    Args:
        device: Where the products are computed.
        dtype: Of what is multiplied.
        narrow: The numbers were bfloat16 or float16 before they became float32. TF32 holds these
            as they are, so that a product of theirs loses nothing, and takes a quarter of the time.
    """
    if device.type != "cuda" or dtype == torch.float64:
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if narrow else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@dataclass(frozen=True)
class Problem:
    """A factor to decompose, which is copied or unpacked when its turn comes."""

    groups: int
    dim: int  # n
    dtype: torch.dtype  # in which it is decomposed first, float32 at least
    device: torch.device
    stored: Tensor  # (groups, n, n); (groups, n (n + 1) / 2), a triangle; (groups, n), a diagonal
    added: Tensor | None = None  # damping added to the diagonals, (groups,)
    is_diagonal: bool = False
    tolerance: float = RESIDUAL_TOLERANCE  # relative error up to which a decomposition is valid


def diagonal(factor: Tensor) -> Tensor:
    """The diagonal, shape ``(groups, n)``, as a view, of a factor that may be kept as one."""
    return factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)


def eigh(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Eigenvectors and eigenvalues (at least 0) of ``(batch, n, n)``, and the errors.

    Of diagonals ``(batch, n)`` the eigenvalues alone. Members that are not finite are not shown to
    the routine: some return garbage, some never return.
    """
    if matrix.dim() == 2:
        return (matrix.clamp_min(0),), _zero_if_finite(matrix)
    size = _size(matrix)
    scaled = matrix / size
    probe, _ = _probe(matrix.shape[-1], matrix.dtype, matrix.device)
    expected = scaled @ probe  # NaN of what is not finite
    values, vectors = torch.linalg.eigh(scaled.nan_to_num_(0.0, 0.0, 0.0))
    error = _error_of_basis(expected, vectors, values)
    return (vectors, values.clamp_min(0) * size.squeeze(-1)), error


def cholesky_inverse(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Inverses of positive definite ``(batch, n, n)``, or of diagonals, and the errors."""
    if matrix.dim() == 2:
        inverse = matrix.reciprocal()
        return (inverse,), _zero_if_finite(matrix + inverse)
    factor, info = torch.linalg.cholesky_ex(matrix)
    bad = info != 0
    _fill(diagonal(factor), bad[:, None], 1.0)  # some routines raise at a zero
    inverse = _inverse_of(factor)
    del factor
    probe, length = _probe(matrix.shape[-1], matrix.dtype, matrix.device)
    solved = inverse @ probe
    # The backward error: small whatever the condition number, unless the inverse is wrong.
    error = _norm(torch.baddbmm(probe, matrix, solved, beta=-1))
    error = error / torch.addcmul(length, _norm(matrix), _norm(solved))
    return (inverse,), _fill(error, bad, torch.inf)


def _inverse_of(factor: Tensor) -> Tensor:
    """The inverse of L Lᵀ for L of shape ``(batch, n, n)``, as rows.

    A GPU inverts a batch of triangles, and squares them, in half the time of `cholesky_inverse`,
    which takes one member of the batch after the other.
    """
    if factor.device.type == "cpu":
        inverse: Tensor = torch.cholesky_inverse(factor)
        return inverse.mT
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    inverted: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
    return inverted.mT @ inverted


def _fill(target: Tensor, where: Tensor, value: float) -> Tensor:
    """Fill in place; on the CPU, where nobody waits for the answer, if there is anything to."""
    if where.device.type != "cpu" or bool(where.any()):
        target.masked_fill_(where, value)
    return target


def _zero_if_finite(x: Tensor) -> Tensor:
    """0, or NaN, for each row."""
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1)
    return largest * 0.0


def _size(matrix: Tensor) -> Tensor:
    """The mean diagonal entry, ``(batch, 1, 1)``: dividing by it keeps squares in range."""
    numbers = torch.finfo(matrix.dtype)
    return diagonal(matrix).mean(-1).abs().clamp(numbers.tiny, numbers.max)[:, None, None]


def _error_of_basis(expected: Tensor, vectors: Tensor, values: Tensor) -> Tensor:
    """The error of Q Λ Qᵀ x, which is ``expected``, or that of Q Qᵀ x, which is larger.

    The first would pass with a Q that is not orthogonal where Λ vanishes.
    """
    probe, length = _probe(expected.shape[-2], expected.dtype, expected.device)
    coordinates = vectors.mT @ probe
    found = vectors @ torch.cat([values.unsqueeze(-1) * coordinates, coordinates], -1)
    right = torch.cat([expected, probe.expand_as(expected)], -1)
    errors, sizes = _lengths(found - right), _lengths(right)
    return (errors / torch.maximum(sizes, length)).amax(-1)


@lru_cache(maxsize=256)
def _probe(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A fixed vector with no zero and no pattern, shape ``(1, n, 1)``, and its length, ``(1,)``."""
    with torch.inference_mode(False):
        steps = torch.arange(1, dim + 1, dtype=dtype, device=device)
        wave = torch.cos(steps * steps * 0.7).add_(1.5).view(1, -1, 1)
        return wave, _norm(wave)


@dataclass
class _Batch:
    """Factors that are decomposed together, and what has come of it."""

    indices: list[int]
    parts: Decomposition = ()  # none where the routine has raised


class Attempts:
    """Many factors, decomposed together as size, dtype and device allow, by one attempt each.

    Nothing has been waited for: ``errors``, one number for each group of each problem, in an order
    of its own, tells on the device which of them are sound.
    """

    def __init__(self, problems: Sequence[Problem], decompose: Decompose) -> None:
        self._problems, self._decompose = problems, decompose
        self.tolerance = max((each.tolerance for each in problems), default=RESIDUAL_TOLERANCE)
        self._batches = list(map(_Batch, _batches(problems)))
        errors: list[Tensor] = []
        for batch in self._batches:
            matrices = _gathered([problems[i] for i in batch.indices])
            try:
                with ieee_matmul(matrices.device, matrices.dtype):
                    batch.parts, error = decompose(matrices)
            except RuntimeError:  # torch.linalg.LinAlgError, solver errors, out of memory
                error = matrices.new_full((len(matrices),), torch.inf)
            errors.append(error.to(errors[0].device) if errors else error)
            del matrices
        self.errors = torch.cat(errors) if errors else torch.zeros(0, device="cpu")

    @property
    def parts(self) -> list[Decomposition]:
        """What :meth:`finish` gives if all are sound; of a batch whose routine raised, nothing."""
        found: list[Decomposition] = [()] * len(self._problems)
        for batch in self._batches:
            sizes = [self._problems[i].groups for i in batch.indices]
            pieces = zip(*(part.split(sizes) for part in batch.parts), strict=True)
            for i, parts in zip(batch.indices, pieces, strict=False):
                found[i] = parts
        return found

    def finish(self, errors: Sequence[float] | None = None) -> list[Decomposition | None]:
        """The parts of each problem, with leading ``groups``; None where not all are sound.

        The ``errors`` are read if that has not been done. Members that are not sound climb the
        ladder. Parts are views of their batch's.
        """
        told = iter(self.errors.tolist() if errors is None else errors)
        fine: set[int] = set()
        for batch in self._batches:
            rows = [i for i in batch.indices for _ in range(self._problems[i].groups)]
            sound = [next(told) < self.tolerance for _ in rows]
            if not all(sound):
                self._mend(batch, sound)
            fine |= {*rows} - {i for i, each in zip(rows, sound, strict=True) if not each}
        return [parts if i in fine else None for i, parts in enumerate(self.parts)]

    def _mend(self, batch: _Batch, sound: list[bool]) -> None:
        """Decompose a batch's members that are not ``sound`` by the ladder; tell which are now."""
        rows = [i for i in batch.indices for _ in range(self._problems[i].groups)]
        failed = dict.fromkeys(i for i, fine in zip(rows, sound, strict=True) if not fine)
        problems = [self._problems[i] for i in failed]
        if problems[0].is_diagonal:
            return
        again = [k for k, i in enumerate(rows) if i in failed]
        matrices = _gathered(problems)
        left = [j for j, k in enumerate(again) if not sound[k]]
        with ieee_matmul(matrices.device, matrices.dtype):
            climbed = _climb(
                self._decompose, matrices, left, raised=not batch.parts, tolerance=self.tolerance
            )
        for j, parts in climbed.items():
            if not batch.parts:
                batch.parts = tuple(p.new_zeros(len(rows), *p.shape[1:]) for p in parts)
            for whole, part in zip(batch.parts, parts, strict=True):
                whole[again[j]].copy_(part[0])
            sound[again[j]] = True


def _batches(problems: Sequence[Problem]) -> list[list[int]]:
    """Indices of problems that are decomposed together, in their order."""
    keys, shares = list[object](), list[float]()
    for each in problems:
        form = each.stored.dim(), each.added is None
        keys.append((each.dim, each.dtype, each.device, each.is_diagonal, *form))
        most = CPU_BATCH_BYTES if each.device.type == "cpu" else BATCH_BYTES
        shares.append(each.groups * each.dim**2 * each.dtype.itemsize / most)
    return in_groups(keys, shares, 1)


def _gathered(problems: Sequence[Problem]) -> Tensor:
    """New damped matrices, or diagonals, of problems of one batch."""
    first, alone = problems[0], len(problems) == 1
    packed = first.stored.dim() == 2 and not first.is_diagonal
    batch = first.stored if alone else torch.cat([each.stored for each in problems])
    batch = batch.to(first.dtype, copy=alone and not packed)
    if packed:
        batch = unpack_upper_triangular(batch, first.dim)
    added = [each.added for each in problems if each.added is not None]
    if added:
        dampings = added[0] if alone else torch.cat(added)
        diagonal(batch).add_(dampings.to(batch.dtype).unsqueeze(-1))
    return batch


def _climb(
    decompose: Decompose, batch: Tensor, left: Sequence[int], *, raised: bool, tolerance: float
) -> dict[int, Decomposition]:
    """Decompose the members that are ``left`` of a batch, on the rungs above the first attempt.

    If that has ``raised``, it may be for one member's sake: each is tried alone. Members that are
    not finite are shown to no routine.
    """
    finite = torch.isfinite(batch).flatten(1).all(1).tolist()
    here, wide, cpu = (batch.device, batch.dtype), torch.float64, torch.device("cpu")
    left = [i for i in left if finite[i]]
    attempts = [[i] for i in left] if raised and len(batch) > 1 else []
    found: dict[int, Decomposition] = {}
    for place in dict.fromkeys([here, (batch.device, wide), (cpu, wide)]):
        if place != here:
            attempts = [left] if left else []
        while attempts:
            members = attempts.pop()
            try:
                parts, errors = decompose(batch[members].to(*place))
                told = errors.tolist()
            except RuntimeError:
                if len(members) > 1:
                    attempts += [[i] for i in members]
                continue
            for k, i in enumerate(members):
                if told[k] < tolerance:
                    found[i] = tuple(part[k : k + 1].to(batch.device) for part in parts)
        left = [i for i in left if i not in found]
    return found

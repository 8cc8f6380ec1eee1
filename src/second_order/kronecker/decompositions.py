"""Eigendecompositions and Cholesky inverses, batched by size, with a check of every result.

All factors get one attempt in the working precision, and a device is read once to know which
results are accurate. A factor whose result is not is decomposed again, alone: in float64, then in
float64 on the CPU. One bad factor never changes the results of the others of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
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

# Relative error above which a float32 decomposition is taken again in float64. A valid one is
# near 1e-6; a wrong one is near 1.
RESIDUAL_TOLERANCE = 1e-3

# Bytes of matrices decomposed together, unless one alone is larger. LAPACK takes one after the
# other, so that on a CPU a batch only saves calls, and costs a copy.
CPU_BATCH_BYTES = 2**20
BATCH_BYTES = 64 * 2**20

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


def diagonal(factor: Tensor) -> Tensor:
    """The diagonal, shape ``(groups, n)``, as a view, of a factor that may be kept as one."""
    return factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)


def eigh(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Eigenvectors and eigenvalues (at least 0) of ``(batch, n, n)``, and the errors.

    Diagonals ``(batch, n)`` have eigenvalues alone. The routine gets zeros in place of numbers that
    are not finite: some routines return garbage for these, some never return.
    """
    if matrix.dim() == 2:
        return (matrix.clamp_min(0),), _zero_if_finite(matrix)

    # In units of the mean diagonal entry, so that squares stay in range.
    number = torch.finfo(matrix.dtype)
    size = diagonal(matrix).mean(-1).abs().clamp(number.tiny, number.max)[:, None, None]
    scaled = matrix / size
    probe, length = _probe(matrix.shape[-1], matrix.dtype, matrix.device)
    expected = scaled @ probe  # NaN if the matrix is not finite
    values, vectors = torch.linalg.eigh(scaled.nan_to_num_(0.0, 0.0, 0.0))

    # The error of Q Λ Qᵀ x, or that of Q Qᵀ x, which is larger if Q is not orthogonal where Λ
    # vanishes.
    coordinates = vectors.mT @ probe
    found = vectors @ torch.cat([values.unsqueeze(-1) * coordinates, coordinates], -1)
    right = torch.cat([expected, probe.expand_as(expected)], -1)
    errors = _lengths(found - right) / torch.maximum(_lengths(right), length)
    return (vectors, values.clamp_min(0) * size.squeeze(-1)), errors.amax(-1)


def cholesky_inverse(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Inverses of positive definite ``(batch, n, n)``, or of diagonals, and the errors."""
    if matrix.dim() == 2:
        inverse = matrix.reciprocal()
        return (inverse,), _zero_if_finite(matrix + inverse)
    factor, info = torch.linalg.cholesky_ex(matrix)
    failed = info != 0
    diagonal(factor).masked_fill_(failed.unsqueeze(1), 1.0)  # some routines raise at a zero
    inverse = _inverse_of(factor)
    del factor

    # The backward error: small whatever the condition number, unless the inverse is wrong.
    probe, length = _probe(matrix.shape[-1], matrix.dtype, matrix.device)
    solved = inverse @ probe
    error = _norm(torch.baddbmm(probe, matrix, solved, beta=-1))
    error = error / torch.addcmul(length, _norm(matrix), _norm(solved))
    return (inverse,), error.masked_fill_(failed, torch.inf)


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


def _zero_if_finite(x: Tensor) -> Tensor:
    """0, or NaN, for each row."""
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1)
    return largest * 0.0


@lru_cache(maxsize=256)
def _probe(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A fixed vector with no zero and no pattern, shape ``(1, n, 1)``, and its length, ``(1,)``."""
    with torch.inference_mode(False):
        steps = torch.arange(1, dim + 1, dtype=dtype, device=device)
        wave = torch.cos(steps * steps * 0.7).add_(1.5).view(1, -1, 1)
        return wave, _norm(wave)


class Attempts:
    """Many factors, decomposed together as size, dtype and device allow, by one attempt each.

    The host has not waited for a device yet.

    Attributes:
        errors: One number for each group of each problem, in the order of the batches.
        parts: What :meth:`finish` returns if all are valid; ``()`` for a problem of a batch whose
            routine raised.
    """

    def __init__(self, problems: Sequence[Problem], decompose: Decompose) -> None:
        self._problems = problems
        self._decompose = decompose
        self._batches = _batches(problems)
        self.parts: list[Decomposition] = [()] * len(problems)
        errors = [self._attempt(batch) for batch in self._batches]
        if not errors:
            errors.append(torch.zeros(0, device="cpu"))
        self.errors = torch.cat([each.to(errors[0].device) for each in errors])

    def _attempt(self, batch: Sequence[int]) -> Tensor:
        """Decompose a batch's factors; returns their errors, infinite if the routine raises."""
        matrices = _damped([self._problems[i] for i in batch])
        try:
            with ieee_matmul(matrices.device, matrices.dtype):
                parts, errors = self._decompose(matrices)
        except RuntimeError:  # torch.linalg.LinAlgError, solver errors, out of memory
            return matrices.new_full((len(matrices),), torch.inf)
        sizes = [self._problems[i].groups for i in batch]
        for i, *pieces in zip(batch, *(part.split(sizes) for part in parts), strict=True):
            self.parts[i] = tuple(pieces)
        return errors

    def finish(self, errors: Sequence[float] | None = None) -> list[Decomposition | None]:
        """The parts of each problem, with leading ``groups``; None if not all groups are valid.

        The ``errors`` are read if that has not been done. Parts are views of their batch's.
        """
        known = iter(self.errors.tolist() if errors is None else errors)
        found: list[Decomposition | None] = list(self.parts)
        for batch in self._batches:
            for i in batch:
                of_groups = list(islice(known, self._problems[i].groups))
                if not all(error < RESIDUAL_TOLERANCE for error in of_groups):
                    found[i] = self._retry(self._problems[i])
        return found

    def _retry(self, problem: Problem) -> Decomposition | None:
        """Decompose a factor alone, in float64, then on the CPU; None if both fail."""
        matrices = _damped([problem])
        if problem.is_diagonal or not bool(matrices.isfinite().all()):
            return None
        for device in dict.fromkeys([matrices.device, torch.device("cpu")]):
            with suppress(RuntimeError):
                parts, errors = self._decompose(matrices.to(device, torch.float64))
                if all(error < RESIDUAL_TOLERANCE for error in errors.tolist()):
                    return tuple(part.to(matrices.device) for part in parts)
        return None


def _batches(problems: Sequence[Problem]) -> list[list[int]]:
    """Indices of problems that are decomposed together, in their order."""
    keys: list[object] = []
    shares: list[float] = []
    for each in problems:
        form = each.stored.dim(), each.added is None
        keys.append((each.dim, each.dtype, each.device, each.is_diagonal, *form))
        most = CPU_BATCH_BYTES if each.device.type == "cpu" else BATCH_BYTES
        shares.append(each.groups * each.dim**2 * each.dtype.itemsize / most)
    return in_groups(keys, shares, 1)


def _damped(problems: Sequence[Problem]) -> Tensor:
    """New damped matrices, or diagonals, of problems of one batch."""
    first = problems[0]
    packed = first.stored.dim() == 2 and not first.is_diagonal
    batch = torch.cat([each.stored for each in problems]).to(first.dtype)
    if packed:
        batch = unpack_upper_triangular(batch, first.dim)
    added = [each.added for each in problems if each.added is not None]
    if added:
        diagonal(batch).add_(torch.cat(added).to(batch.dtype).unsqueeze(-1))
    return batch

"""Damped inverses of Kronecker factors: from eigendecompositions, or from Cholesky inverses.

All factors get one attempt in the working precision, and a device is read once to know which
results are accurate. A factor whose result is not is decomposed again, alone: in float64, then in
float64 on the CPU. One bad factor never changes the results of the others of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.layers import FactorShape
from second_order.kronecker.storage import (
    group_equal,
    pack_upper_triangular,
    packed_length,
    read_numbers,
    unpack_upper_triangular,
)

__all__ = [
    "INVERSE_ENTRIES",
    "RESIDUAL_TOLERANCE",
    "SOLVERS",
    "Attempts",
    "Damping",
    "Decompose",
    "Decomposition",
    "EigenInverse",
    "FactoredInverse",
    "Inverse",
    "Problem",
    "Solver",
    "attempt_all",
    "cholesky_inverse",
    "diagonal",
    "eigh",
    "ieee_matmul",
    "round_definite",
    "round_to",
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

    stored: Tensor  # (groups, n, n); (groups, n (n + 1) / 2), a triangle; (groups, n), a diagonal
    dim: int  # n
    dtype: torch.dtype  # in which it is decomposed first, float32 at least
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


@dataclass(frozen=True)
class Attempts:
    """One attempt at each of many factors. The device has not been read yet.

    Attributes:
        problems: The factors.
        decompose: The routine of the attempts.
        parts: The parts of each problem, with leading ``groups``; None if the routine raised.
        errors: The relative errors of each problem, ``(groups,)``.
    """

    problems: Sequence[Problem]
    decompose: Decompose
    parts: Sequence[Decomposition | None]
    errors: Sequence[Tensor]

    def result(self) -> list[Decomposition | None]:
        """Read the errors, and retry what is inaccurate. The device is read once."""
        (errors,) = read_numbers(self.errors)
        return self.retry(self.inaccurate(errors))

    def inaccurate(self, errors: Sequence[float]) -> list[int]:
        """Indices of the problems with a large error.

        Args:
            errors: The numbers of :attr:`errors`, one after the other.
        """
        found: list[int] = []
        start = 0
        for i, problem in enumerate(self.problems):
            stop = start + len(problem.stored)
            if not _are_small(errors[start:stop]):
                found.append(i)
            start = stop
        return found

    def retry(self, inaccurate: Iterable[int]) -> list[Decomposition | None]:
        """Decompose some problems again, in other ways.

        Returns the parts of all problems; None if not all groups of one are valid.
        """
        parts = list(self.parts)
        for i in inaccurate:
            parts[i] = _retried(self.problems[i], self.decompose)
        return parts


def attempt_all(problems: Sequence[Problem], decompose: Decompose) -> Attempts:
    """Attempt to decompose many factors, together as size, dtype and device allow.

    The parts are views of those of their batch.
    """
    parts: list[Decomposition | None] = [None] * len(problems)
    errors: list[Tensor | None] = [None] * len(problems)
    for batch in _batches(problems):
        members = [problems[i] for i in batch]
        sizes = [len(problem.stored) for problem in members]
        matrices = _damped(members)
        try:
            with ieee_matmul(matrices.device, matrices.dtype):
                batch_parts, batch_errors = decompose(matrices)
        except RuntimeError:  # torch.linalg.LinAlgError, solver errors, out of memory
            batch_errors = matrices.new_full((len(matrices),), torch.inf)
        else:
            columns = [part.split(sizes) for part in batch_parts]
            for i, own_parts in zip(batch, zip(*columns, strict=True), strict=True):
                parts[i] = own_parts
        for i, own_errors in zip(batch, batch_errors.split(sizes), strict=True):
            errors[i] = own_errors
    return Attempts(problems, decompose, parts, [each for each in errors if each is not None])


def _retried(problem: Problem, decompose: Decompose) -> Decomposition | None:
    """Decompose a factor alone, in float64, then on the CPU; None if both fail."""
    matrices = _damped([problem])
    if problem.is_diagonal or not bool(matrices.isfinite().all()):
        return None
    for device in dict.fromkeys([matrices.device, torch.device("cpu")]):
        with suppress(RuntimeError):
            parts, errors = decompose(matrices.to(device, torch.float64))
            if _are_small(errors.tolist()):
                return tuple(part.to(matrices.device) for part in parts)
    return None


def _are_small(errors: Sequence[float]) -> bool:
    return all(error < RESIDUAL_TOLERANCE for error in errors)


def _batches(problems: Sequence[Problem]) -> list[list[int]]:
    """Indices of problems that are decomposed together, in their order."""
    keys: list[object] = []
    shares: list[float] = []
    for each in problems:
        device = each.stored.device
        form = each.stored.dim(), each.is_diagonal, each.added is None
        keys.append((each.dim, each.dtype, device, form))
        most = CPU_BATCH_BYTES if device.type == "cpu" else BATCH_BYTES
        shares.append(len(each.stored) * each.dim**2 * each.dtype.itemsize / most)
    return group_equal(keys, shares, 1)


def _damped(problems: Sequence[Problem]) -> Tensor:
    """New damped matrices, or diagonals, of problems of one batch."""
    first = problems[0]
    batch = torch.cat([each.stored for each in problems]).to(first.dtype)
    if batch.dim() == 2 and not first.is_diagonal:
        batch = unpack_upper_triangular(batch, first.dim)
    added = [each.added for each in problems if each.added is not None]
    if added:
        diagonal(batch).add_(torch.cat(added).to(batch.dtype).unsqueeze(-1))
    return batch


# Smaller inverses are sent whole.
TRIANGULAR_FROM = 1024


EIGEN_SCALE = "eigen_scale"
INVERSE_ENTRIES = (
    *(f"eigenvectors_{letter}" for letter in "AGL"),
    EIGEN_SCALE,
    *(f"inverse_{letter}" for letter in "AGL"),
)
"""The names of an inverse's tensors in a checkpoint, of either solver."""

Damping: TypeAlias = float | Tensor


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round each number to one that a narrower dtype has; the result has the dtype of ``x``."""
    return x.to(dtype).to(x.dtype)


def round_definite(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Round symmetric matrices ``(groups, n, n)`` to ones that are at least as large, M̂ ⪰ M.

    Numbers off the diagonal are rounded to the nearest, which changes M by E. The diagonal grows by
    Σ_j |E_ij|, and is rounded up: M̂ - M is then diagonally dominant, and so without negative
    eigenvalues (Golub & Van Loan 2013, section 4.1.1).
    """
    rounded = round_to(matrix, dtype)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    error = (rounded - matrix).abs_()
    error.diagonal(dim1=-2, dim2=-1).zero_()
    raised = diagonal + error.sum(-1)
    narrow = raised.to(dtype)
    infinity = torch.full_like(narrow, torch.inf)
    above = torch.where(narrow.to(raised.dtype) < raised, narrow.nextafter(infinity), narrow)
    rounded.diagonal(dim1=-2, dim2=-1).copy_(above)
    return rounded


@dataclass(frozen=True, eq=False)
class Inverse:
    """The damped inverse of a layer, or of a stack of equal ones, and how it is computed.

    dampings      what each factor's diagonal gets before it is decomposed, ``(..., groups)`` or
                  None, of the mean eigenvalues of A, G, and L if there is one, ``(2 or 3, ...,
                  groups)``; ``exact`` if G is the whole curvature
    attempt       the parts of each damped factor, in the dtype in which they are kept, and their
                  errors
    sent_shapes   the shapes of these parts as they are sent
    to_send       the parts as they are sent; with numbers that a narrower dtype has, of which
                  ``combine`` still makes a positive definite inverse
    received      the parts again, from what was sent
    combine       the inverse of a layer, or of a stack of equal ones; γ, and what the inverse is
                  multiplied by, are scalars or ``(layers x groups,)``; parts' memory is shared
    saved_shapes  the shapes of an inverse's tensors, by their names in a checkpoint

    ``entries`` are its tensors, ``(layers x groups, ...)``, by their names in a checkpoint.
    """

    entries: dict[str, Tensor]

    routine: ClassVar[staticmethod[[Tensor], tuple[Decomposition, Tensor]]]

    @staticmethod
    def dampings(means: Tensor, damping: Damping, exact: bool = False) -> Sequence[Tensor | None]:
        """None for each factor: γ is added later, to the products of eigenvalues."""
        return (None,) * len(means)

    @classmethod
    def attempt(cls, problems: Sequence[Problem], dtype: torch.dtype) -> Attempts:
        """Attempt to decompose each factor by :attr:`routine`. The parts have a given dtype."""

        def in_dtype(matrices: Tensor) -> tuple[Decomposition, Tensor]:
            parts, errors = cls.routine(matrices)
            return tuple(part.to(dtype).contiguous() for part in parts), errors

        return attempt_all(problems, in_dtype)

    @classmethod
    def decompose(
        cls, problems: Sequence[Problem], dtype: torch.dtype
    ) -> list[Decomposition | None]:
        """Decompose each factor; None if it has no valid decomposition."""
        return cls.attempt(problems, dtype).result()

    @staticmethod
    def to_send(parts: Decomposition, dtype: torch.dtype | None) -> Decomposition:
        """Round to the nearest: Q Λ Qᵀ has no sign to lose."""
        return parts if dtype is None else tuple(round_to(part, dtype) for part in parts)

    @staticmethod
    def received(parts: Decomposition, dim: int) -> Decomposition:
        """The parts as they were sent."""
        return parts

    def precondition(self, gradient: Tensor) -> Tensor:
        """The inverse applied to a gradient of shape ``(groups, out, in)``."""
        raise NotImplementedError

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that this inverse holds."""
        return list(self.entries.values())

    def split_layers(self, groups: int) -> list[Inverse]:
        """The inverse of each layer of a stack.

        Parts of a larger batch, or of a message, are copied: they would keep its memory.
        """
        columns: list[Sequence[Tensor]] = []
        for tensor in self.tensors:
            shared = tensor.untyped_storage().nbytes() > tensor.nbytes
            own = tensor.clone() if shared else tensor
            columns.append(own.unflatten(0, (-1, groups)).unbind())
        return [self.of(parts) for parts in zip(*columns, strict=True)]

    def of(self, tensors: Sequence[Tensor]) -> Inverse:
        """An inverse of other tensors, in the order of :attr:`tensors`."""
        return type(self)(dict(zip(self.entries, tensors, strict=True)))


class EigenInverse(Inverse):
    """P = Q_G ((Q_Gᵀ ∇ Q) ∘ 1 / (v_G vᵀ + γ)) Qᵀ (Pauloski et al. 2022, eq. 13-15).

    Q and v are those of A, or of A ⊗ L if an input is channels by locations. Equal to the dense
    solve with A ⊗ G + γ I, or A ⊗ L ⊗ G + γ I. The eigenvectors of a factor are ``(groups, n, n)``,
    as columns; a diagonal A has none. The scale is 1 / (v_G vᵀ + γ), ``(groups, out, in)`` or
    ``(1, out, channels, locations)``.
    """

    routine = staticmethod(eigh)

    @staticmethod
    def sent_shapes(shape: FactorShape, letter: str) -> tuple[tuple[int, ...], ...]:
        """Shapes of the eigenvectors, if any, and of the eigenvalues."""
        values = shape.groups, shape.dims[letter]
        return (values,) if letter in shape.diagonals else ((*values, values[1]), values)

    @staticmethod
    def combine(
        parts: Mapping[str, Decomposition], damping: Damping, times: Tensor | None = None
    ) -> Inverse:
        """Form 1 / (v_G vᵀ + γ) once, for all steps until the next refresh."""
        curvature = parts["A"][-1].unsqueeze(-2)
        if "L" in parts:
            curvature = curvature.unsqueeze(-1) * parts["L"][-1].unsqueeze(-2).unsqueeze(-2)
        g = parts["G"][-1]
        ones = [1] * (curvature.dim() - 2)
        added = damping.view(-1, 1, *ones) if isinstance(damping, Tensor) else damping
        # Without damping the gradient has no part where the curvature is 0: the pseudo-inverse.
        scale = (g.view(*g.shape, *ones) * curvature).add_(added).reciprocal_()
        scale.nan_to_num_(nan=torch.nan, posinf=0.0)
        if times is not None:
            scale.mul_(times.view(-1, 1, *ones))
        entries = {f"eigenvectors_{k}": v[0] for k, v in parts.items() if len(v) == 2}
        return EigenInverse({**entries, EIGEN_SCALE: scale})

    @staticmethod
    def saved_shapes(shape: FactorShape) -> dict[str, tuple[int, ...]]:
        """The shapes of the eigenvectors, and of 1 / (v_G vᵀ + γ)."""
        found: dict[str, tuple[int, ...]] = {}
        for letter, dim in shape.dims.items():
            if letter not in shape.diagonals:
                found[f"eigenvectors_{letter}"] = shape.groups, dim, dim
        columns = (shape.dims["A"], shape.locations) if shape.locations else (shape.dims["A"],)
        found[EIGEN_SCALE] = shape.groups, shape.dims["G"], *columns
        return found

    def precondition(self, gradient: Tensor) -> Tensor:
        """The inverse applied to a gradient of shape ``(groups, out, in)``."""
        q_a = self.entries.get("eigenvectors_A")
        q_g = self.entries["eigenvectors_G"]
        q_l = self.entries.get("eigenvectors_L")
        scale = self.entries[EIGEN_SCALE]
        rotated = torch.bmm(q_g.mT, gradient)
        if q_l is not None:
            assert q_a is not None
            rotated = q_a[0].mT @ rotated.view(scale.shape) @ q_l[0]
            rotated = q_a[0] @ rotated.mul_(scale) @ q_l[0].mT
            return q_g @ rotated.view_as(gradient)
        if q_a is None:
            return torch.bmm(q_g, rotated.mul_(scale))
        scaled = torch.bmm(rotated, q_a).mul_(scale)
        return torch.bmm(torch.bmm(q_g, scaled, out=rotated), q_a.mT, out=scaled)


class FactoredInverse(Inverse):
    """P = (G + √γ/π I)⁻¹ ∇ (A + π √γ I)⁻¹ (Martens & Grosse 2015, section 6.3), by Cholesky.

    With L, the inverse on the inputs is that of A ⊗ L, each damped by itself (Ba et al. 2017,
    eq. 9). An inverse is ``(groups, n, n)``, or ``(groups, in)`` if A is diagonal.
    """

    routine = staticmethod(cholesky_inverse)

    @staticmethod
    def dampings(means: Tensor, damping: Damping, exact: bool = False) -> Sequence[Tensor | None]:
        """Split γ over N factors: factor i gets πᵢ γ^(1/N); γ itself for an exact block.

        With nᵢ = tr Fᵢ / dim Fᵢ, the ``means``, πᵢ = nᵢ / (Π n)^(1/N); a zero trace gives πᵢ = 1.
        These πᵢ, whose product is 1, minimise the bound on the error that the cross terms make (Ba
        et al. 2017, section 4.1). Two factors have π √γ and √γ / π, π² = (tr A / dim A) / (tr G /
        dim G) (Martens & Grosse 2015, section 6.3).
        """
        if exact:
            return None, torch.zeros_like(means[1]) + damping
        usable = (means > 0).all(0)
        logarithms = torch.where(usable, means, 1.0).log()  # logarithms: the product may overflow
        pi = (logarithms - logarithms.mean(0)).exp()
        return (pi * damping ** (1 / len(means))).unbind()

    @staticmethod
    def sent_shapes(shape: FactorShape, letter: str) -> tuple[tuple[int, ...], ...]:
        """Shape of the inverse, alone in a tuple."""
        dim = shape.dims[letter]
        if letter in shape.diagonals:
            return ((shape.groups, dim),)
        if dim >= TRIANGULAR_FROM:
            return ((shape.groups, packed_length(dim)),)
        return ((shape.groups, dim, dim),)

    @staticmethod
    def to_send(parts: Decomposition, dtype: torch.dtype | None) -> Decomposition:
        """Round an inverse to the nearest, and its diagonal so far up that it stays definite."""
        (inverse,) = parts
        if dtype is not None:
            inverse = (round_to if inverse.dim() == 2 else round_definite)(inverse, dtype)
        if inverse.dim() == 3 and inverse.shape[-1] >= TRIANGULAR_FROM:
            inverse = pack_upper_triangular(inverse)
        return (inverse,)

    @staticmethod
    def received(parts: Decomposition, dim: int) -> Decomposition:
        """The inverse as whole matrices, or as a diagonal of the size ``dim``."""
        (inverse,) = parts
        whole = inverse.dim() == 3 or inverse.shape[-1] == dim
        return (inverse if whole else unpack_upper_triangular(inverse, dim),)

    @staticmethod
    def combine(
        parts: Mapping[str, Decomposition], damping: Damping, times: Tensor | None = None
    ) -> Inverse:
        """Collect the factors' inverses."""
        inverses = {f"inverse_{letter}": part for letter, (part,) in parts.items()}
        if times is not None:
            g = inverses["inverse_G"]
            inverses["inverse_G"] = (g * times.view(-1, 1, 1)).to(g.dtype)
        return FactoredInverse(inverses)

    @staticmethod
    def saved_shapes(shape: FactorShape) -> dict[str, tuple[int, ...]]:
        """The shapes of the factors' inverses."""
        found: dict[str, tuple[int, ...]] = {}
        for letter, dim in shape.dims.items():
            sides = (dim,) if letter in shape.diagonals else (dim, dim)
            found[f"inverse_{letter}"] = shape.groups, *sides
        return found

    def precondition(self, gradient: Tensor) -> Tensor:
        """The inverse applied to a gradient of shape ``(groups, out, in)``."""
        a = self.entries["inverse_A"]
        locations = self.entries.get("inverse_L")
        half = torch.bmm(self.entries["inverse_G"], gradient)
        if locations is not None:
            maps = half.reshape(-1, a.shape[-1], locations.shape[-1])
            return (a[0] @ maps @ locations[0]).view_as(gradient)
        if a.dim() == 2:
            return half.mul_(a.unsqueeze(-2))
        return torch.bmm(half, a)


Solver: TypeAlias = type[EigenInverse] | type[FactoredInverse]

SOLVERS: dict[str, Solver] = {"eigen": EigenInverse, "inverse": FactoredInverse}

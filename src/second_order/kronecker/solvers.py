"""Damped inverses of Kronecker factors, by eigendecomposition or by Cholesky.

    attempt    decompose all factors, those of equal size in one batch
    check      read their errors from the device in one transfer
    retry      decompose a factor with a large error in float64, then so on the CPU
    combine    form the inverse of a layer from the decompositions of its factors

A layer has the factor A of its inputs and the factor G of its output gradients. If its
inputs are channels by locations, it may have a third factor L: A is then that of the
channels, and L that of the locations. Each factor is ``groups`` matrices, one per group
of a grouped layer, and one for most layers. P is the preconditioned gradient,
(A ⊗ G + γ)⁻¹ ∇.

A solver is a subclass of :class:`Inverse`. Its instances are the inverses that it has
computed.

A bad factor leaves the results of the other factors in its batch as they are. Some
routines raise at the first bad factor instead, and any routine may run out of memory.
Each factor of the batch is then decomposed alone, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple, TypeAlias

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
    "CholeskyInverse",
    "Damping",
    "Decompose",
    "Decomposition",
    "EigenInverse",
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
"""The parts of a decomposed factor: its inverse, or its eigenvectors and eigenvalues.

Each part has a leading dimension of ``groups``.
"""

Decompose: TypeAlias = Callable[[Tensor], tuple[Decomposition, Tensor]]
"""A routine for ``(batch, n, n)`` that returns the parts and relative errors."""

Damping: TypeAlias = float | Tensor

# Relative error above which a factor is decomposed again in float64. The error of an
# accurate float32 decomposition is near 1e-6, that of a wrong one near 1.
RESIDUAL_TOLERANCE = 1e-3

# Bytes of matrices that are decomposed in one batch. A larger matrix has a batch of
# its own. LAPACK takes one matrix after the other, so a batch on a CPU only saves
# calls, and costs a copy.
CPU_BATCH_BYTES = 2**20
BATCH_BYTES = 64 * 2**20

_norm: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dim=(-2, -1))
_lengths: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dim=-2)


def ieee_matmul(
    device: torch.device, dtype: torch.dtype = torch.float32, *, narrow: bool = False
) -> AbstractContextManager[None]:
    """Compute float32 products on CUDA in full precision, because TF32 keeps ten bits.

    The setting is global in a process, so it must not change while another thread
    multiplies in float32. DistKFAC's threads multiply in float64 on CUDA, which the
    setting does not affect.

    Args:
        device: The device of the products.
        dtype: The dtype of the matrices.
        narrow: Whether the numbers were bfloat16 or float16 before they became float32.
            TF32 represents these exactly. It therefore loses nothing, and is used,
            because it takes a quarter of the time.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return nullcontext()
    return _cuda_matmul("tf32" if narrow else "ieee")


@contextmanager
def _cuda_matmul(precision: str) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    previous = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = previous


class Problem(NamedTuple):
    """A factor to decompose.

    Attributes:
        stored: The factor as it is stored: ``(groups, n, n)``, the triangle
            ``(groups, n (n + 1) / 2)``, or the diagonal ``(groups, n)``. It is copied
            when it is decomposed.
        dim: n.
        dtype: The dtype of the first attempt, float32 or wider.
        added: The damping that is added to the diagonals, ``(groups,)``.
        is_diagonal: Whether the factor is diagonal.
    """

    stored: Tensor
    dim: int
    dtype: torch.dtype
    added: Tensor | None = None
    is_diagonal: bool = False


# ------------------------------------------------------------------------ decomposition


def diagonal(factor: Tensor) -> Tensor:
    """A view of the diagonal, ``(groups, n)``, of matrices or of diagonals."""
    if factor.dim() == 2:
        return factor
    return factor.diagonal(dim1=-2, dim2=-1)


def eigh(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Decompose ``(batch, n, n)`` into eigenvectors and eigenvalues, with errors.

    Negative eigenvalues become 0. Diagonals ``(batch, n)`` have no eigenvectors. LAPACK
    receives zeros instead of non-finite numbers, for which some routines return
    garbage, or never return.
    """
    if matrix.dim() == 2:
        return (matrix.clamp_min(0),), _zero_if_finite(matrix)

    # Scale by the mean diagonal entry, so that squares do not overflow.
    limits = torch.finfo(matrix.dtype)
    size = diagonal(matrix).mean(-1).abs().clamp(limits.tiny, limits.max)[:, None, None]
    scaled = matrix / size
    probe, length = _probe_vector(matrix.shape[-1], matrix.dtype, matrix.device)
    expected = scaled @ probe  # NaN if the matrix is not finite
    values, vectors = torch.linalg.eigh(scaled.nan_to_num_(0.0, 0.0, 0.0))

    # Check Q Λ Qᵀ x = M x, and Q Qᵀ x = x. The second check also finds vectors that are
    # not orthogonal where Λ vanishes.
    coordinates = vectors.mT @ probe
    scaled_coordinates = values.unsqueeze(-1) * coordinates
    products = vectors @ torch.cat([scaled_coordinates, coordinates], -1)
    exact = torch.cat([expected, probe.expand_as(expected)], -1)
    errors = _lengths(products - exact) / torch.maximum(_lengths(exact), length)
    return (vectors, values.clamp_min(0) * size.squeeze(-1)), errors.amax(-1)


def cholesky_inverse(matrix: Tensor) -> tuple[Decomposition, Tensor]:
    """Invert positive definite ``(batch, n, n)``, or diagonals, with errors."""
    inverse: Tensor
    if matrix.dim() == 2:
        inverse = matrix.reciprocal()
        return (inverse,), _zero_if_finite(matrix + inverse)
    factor, info = torch.linalg.cholesky_ex(matrix)
    # Make the diagonal of a failed factor NaN, so that its error is NaN. Some routines
    # would raise an error if it had a 0.
    failed = info != 0
    factor.diagonal(dim1=-2, dim2=-1).masked_fill_(failed.unsqueeze(1), torch.nan)
    if factor.is_cpu:
        inverse = torch.cholesky_inverse(factor).mT  # row-major
    else:
        # On a GPU, cholesky_inverse inverts the matrices one by one. It takes half the
        # time to invert all triangles as a batch and to multiply them.
        identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverted = torch.linalg.solve_triangular(factor, identity, upper=False)
        inverse = inverted.mT @ inverted
        del inverted  # frees memory
    del factor

    # The backward error is small for any condition number, unless the inverse is wrong.
    probe, length = _probe_vector(matrix.shape[-1], matrix.dtype, matrix.device)
    solved = torch.bmm(inverse, probe.expand(matrix.shape[0], -1, -1))
    error = _norm(torch.baddbmm(probe, matrix, solved, beta=-1))
    return (inverse,), error / torch.addcmul(length, _norm(matrix), _norm(solved))


def _zero_if_finite(x: Tensor) -> Tensor:
    """0 for each row of finite numbers, NaN for the other rows."""
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1)
    return largest * 0.0


@lru_cache(maxsize=256)
def _probe_vector(
    dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A fixed vector ``(1, n, 1)`` without zeros or a pattern, and its norm."""
    # Leave inference mode, so that the cached tensors can be used with autograd.
    with torch.inference_mode(False):
        steps = torch.arange(1, dim + 1, dtype=dtype, device=device)
        wave = torch.cos(steps * steps * 0.7).add_(1.5).view(1, -1, 1)
        return wave, _norm(wave)


@dataclass(frozen=True)
class Attempts:
    """One attempt at each of many factors. The errors may still be on the device.

    Attributes:
        problems: The factors.
        routine: The routine that decomposes a batch.
        dtype: The dtype of the parts; None for that in which they were computed.
        parts: The decomposition of each factor; None if the routine raised.
        order: The indices of the factors, batch by batch.
        errors: The relative errors of each batch, ``(factors x groups,)``.
    """

    problems: Sequence[Problem]
    routine: Decompose
    dtype: torch.dtype | None
    parts: Sequence[Decomposition | None]
    order: Sequence[int]
    errors: Sequence[Tensor]

    def finish(self) -> list[Decomposition | None]:
        """Read the errors from the device, and retry the factors with a large one."""
        errors = read_numbers(self.errors)
        return self.retry(self.find_inaccurate(errors))

    def find_inaccurate(self, errors: Sequence[float]) -> list[int]:
        """The indices of the factors with a large error.

        Args:
            errors: The numbers of :attr:`errors`, one after the other.
        """
        inaccurate: list[int] = []
        start = 0
        for i in self.order:
            stop = start + self.problems[i].stored.shape[0]
            for error in errors[start:stop]:
                if not error < RESIDUAL_TOLERANCE:  # large, or NaN
                    inaccurate.append(i)
                    break
            start = stop
        return inaccurate

    def retry(self, inaccurate: Iterable[int]) -> list[Decomposition | None]:
        """Decompose some factors again, in float64.

        Args:
            inaccurate: The indices of these factors.

        Returns:
            The decompositions of all factors; None for a factor that has none.
        """
        parts = list(self.parts)
        for i in inaccurate:
            parts[i] = _decompose_in_float64(self.problems[i], self.routine, self.dtype)
        return parts


def attempt_all(
    problems: Sequence[Problem], routine: Decompose, dtype: torch.dtype | None = None
) -> Attempts:
    """Attempt to decompose many factors, in batches of equal size, dtype and device.

    The parts of a factor are views of those of its batch.

    Args:
        problems: The factors.
        routine: The routine that decomposes a batch.
        dtype: The dtype of the parts; None for that in which they were computed.
    """
    parts: list[Decomposition | None] = [None] * len(problems)
    order: list[int] = []
    errors: list[Tensor] = []
    for batch in _split_into_batches(problems):
        members = [problems[i] for i in batch]
        matrices = _build_matrices(members, members[0].dtype)
        order += batch
        try:
            with ieee_matmul(matrices.device, matrices.dtype):
                batch_parts, batch_errors = routine(matrices)
        except RuntimeError:
            # It may be a LinAlgError, another error of the library, or out of memory.
            errors.append(matrices.new_full((len(matrices),), torch.inf))
            continue
        errors.append(batch_errors)
        sizes = [problem.stored.shape[0] for problem in members]
        in_dtype = _in_dtype(batch_parts, dtype)
        columns = [part.split_with_sizes(sizes) for part in in_dtype]
        for i, own_parts in zip(batch, zip(*columns, strict=True), strict=True):
            parts[i] = own_parts
    return Attempts(problems, routine, dtype, parts, order, errors)


def _decompose_in_float64(
    problem: Problem, routine: Decompose, dtype: torch.dtype | None
) -> Decomposition | None:
    """Decompose one factor on its device, then on the CPU; None if both are inaccurate.

    The damping is added in float64. In float32, γ below 1e-7 of the diagonal is lost.
    """
    stored = problem.stored
    if problem.is_diagonal or not bool(stored.isfinite().all()):
        return None
    for device in dict.fromkeys([stored.device, torch.device("cpu")]):
        added = None if problem.added is None else problem.added.to(device)
        moved = problem._replace(stored=stored.to(device), added=added)
        try:
            parts, errors = routine(_build_matrices([moved], torch.float64))
        except (RuntimeError, TypeError):  # MPS raises TypeError, as it has no float64
            continue
        if bool((errors < RESIDUAL_TOLERANCE).all()):
            in_dtype = _in_dtype(parts, dtype or problem.dtype)
            return tuple(part.to(stored.device) for part in in_dtype)
    return None


def _in_dtype(parts: Decomposition, dtype: torch.dtype | None) -> Decomposition:
    """Convert the parts to a dtype, if one is given, in row-major order."""
    if dtype is None:
        return parts
    return tuple([part.to(dtype).contiguous() for part in parts])


def _split_into_batches(problems: Sequence[Problem]) -> list[list[int]]:
    """Group the indices of factors that are decomposed together, in their order."""
    keys: list[object] = []
    sizes: list[float] = []  # as shares of the largest batch
    for problem in problems:
        stored = problem.stored
        layout = (stored.dim(), problem.is_diagonal, problem.added is None)
        keys.append((problem.dim, problem.dtype, stored.device, layout))
        max_bytes = BATCH_BYTES
        if stored.device.type == "cpu":
            max_bytes = CPU_BATCH_BYTES
        nbytes = stored.shape[0] * problem.dim**2 * problem.dtype.itemsize
        sizes.append(nbytes / max_bytes)
    return group_equal(keys, sizes, max_size=1)


def _build_matrices(problems: Sequence[Problem], dtype: torch.dtype) -> Tensor:
    """The damped matrices, or diagonals, of one batch of factors, in new memory."""
    first = problems[0]
    batch = torch.cat([problem.stored for problem in problems]).to(dtype)
    if batch.dim() == 2 and not first.is_diagonal:
        batch = unpack_upper_triangular(batch, first.dim)
    added = [problem.added for problem in problems if problem.added is not None]
    if added:
        diagonal(batch).add_(torch.cat(added).to(dtype).unsqueeze(-1))
    return batch


# ----------------------------------------------------------------------------- rounding


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest numbers of a narrower dtype, in the dtype of ``x``."""
    return x.to(dtype).to(x.dtype)


def round_definite(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Round symmetric matrices M, ``(groups, n, n)``, to M̂ ⪰ M of a narrower dtype.

    Off the diagonal, numbers are rounded to the nearest, which changes M by E. The
    diagonal grows by Σ_j |E_ij| and is rounded up. M̂ - M is then diagonally dominant,
    so it has no negative eigenvalues (Golub & Van Loan 2013, section 4.1.1).
    """
    # Round to the nearest, and raise the diagonal by the errors of its row.
    rounded = round_to(matrix, dtype)
    error = (rounded - matrix).abs_()
    diagonal(error).zero_()
    raised = diagonal(matrix) + error.sum(-1)

    # Round the diagonal up: to the next number where the nearest is too small.
    narrow = raised.to(dtype)
    infinity = torch.full_like(narrow, torch.inf)
    is_below = narrow.to(raised.dtype) < raised
    above = torch.where(is_below, narrow.nextafter(infinity), narrow)
    diagonal(rounded).copy_(above)
    return rounded


# ----------------------------------------------------------------------------- inverses

# A smaller inverse is sent as a full matrix, because to pack its triangle costs more.
MIN_TRIANGLE_DIM = 1024

EIGEN_SCALE = "eigen_scale"

INVERSE_ENTRIES = (
    *(f"eigenvectors_{factor_name}" for factor_name in "AGL"),
    EIGEN_SCALE,
    *(f"inverse_{factor_name}" for factor_name in "AGL"),
)
"""The names of all tensors that the inverse of some solver has in a checkpoint."""


@dataclass(frozen=True, eq=False)
class Inverse:
    """The damped inverse of a layer, or of a stack of layers of equal shape.

    The subclasses are the solvers. These methods belong to a solver, before there is an
    inverse:

    split_damping     splits γ into what is added to the diagonal of each factor
    decompose         decomposes the damped factors
    message_shapes    gives the shapes of the parts in a message
    pack_message      packs the parts into a message
    unpack_message    unpacks them
    combine           forms the inverse from the parts of all factors
    saved_shapes      gives the shapes of the inverse's tensors in a checkpoint

    These belong to an inverse:

    precondition      applies the inverse to a gradient
    split_layers      splits the inverse of a stack into those of its layers

    A message is what the rank that has decomposed a factor sends to the layer's
    gradient workers.

    Attributes:
        entries: The tensors, ``(layers x groups, ...)``, by their checkpoint names.
        routine: The routine that decomposes a batch of factors.
    """

    entries: dict[str, Tensor]

    routine: ClassVar[staticmethod[[Tensor], tuple[Decomposition, Tensor]]]

    @staticmethod
    def split_damping(
        means: Tensor, damping: Damping, exact: bool = False
    ) -> Sequence[Tensor | None]:
        """Split γ into what is added to each factor's diagonal before decomposition.

        By default that is nothing, because γ is added to products of eigenvalues later.

        Args:
            means: The mean eigenvalues of A, G, and L if there is one,
                ``(2 or 3, ..., groups)``.
            damping: γ.
            exact: Whether G alone is the curvature of the layer, and A is the number 1.
                This is so for the gain and bias of a norm layer.

        Returns:
            A tensor ``(..., groups)`` for each factor, or None.
        """
        return (None,) * len(means)

    @classmethod
    def decompose(
        cls, problems: Sequence[Problem], dtype: torch.dtype
    ) -> list[Decomposition | None]:
        """Decompose each factor; None if it has no accurate decomposition."""
        return attempt_all(problems, cls.routine, dtype).finish()

    @staticmethod
    def message_shapes(
        shape: FactorShape, factor_name: str
    ) -> tuple[tuple[int, ...], ...]:
        """The shapes of a factor's parts in a message."""
        raise NotImplementedError

    @staticmethod
    def pack_message(parts: Decomposition, dtype: torch.dtype | None) -> Decomposition:
        """Round the parts to a communication dtype, if there is one.

        The parts keep their own dtype here, and are sent in the narrow one. The sender
        also uses the rounded parts, so that all ranks have the same inverse.
        ``combine`` must make a positive definite inverse of them. Q Λ Qᵀ remains
        positive semidefinite if its parts are rounded to the nearest.
        """
        if dtype is None:
            return parts
        return tuple(round_to(part, dtype) for part in parts)

    @staticmethod
    def unpack_message(parts: Decomposition, dim: int) -> Decomposition:
        """The parts of a factor of dimension ``dim``, from a message."""
        return parts

    @staticmethod
    def combine(
        parts: Mapping[str, Decomposition],
        damping: Damping,
        multiplier: Tensor | None = None,
    ) -> Inverse:
        """Form the inverse of a layer, or of a stack of layers.

        The parts become tensors of the inverse where that is possible.

        Args:
            parts: The decompositions by factor, ``(layers x groups, ...)``.
            damping: γ, a scalar or ``(layers x groups,)``. A solver that has added it
                to the factors ignores it here.
            multiplier: The inverse is multiplied by this, a scalar or
                ``(layers x groups,)``. With grafting, it is the mean eigenvalue of
                A ⊗ G + γ.
        """
        raise NotImplementedError

    @staticmethod
    def saved_shapes(shape: FactorShape) -> dict[str, tuple[int, ...]]:
        """The shapes of the inverse's tensors, by their names in a checkpoint."""
        raise NotImplementedError

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply the inverse to a gradient of shape ``(groups, out, in)``."""
        raise NotImplementedError

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that this inverse holds."""
        return list(self.entries.values())

    def split_layers(self, groups: int) -> list[Inverse]:
        """Split a stacked inverse into the inverses of its layers.

        A view of a larger batch or of a message is copied first, because it would
        keep the whole memory.
        """
        columns: list[Sequence[Tensor]] = []
        for tensor in self.entries.values():
            is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
            own = tensor.clone() if is_part else tensor
            columns.append(own.split(groups))
        inverses: list[Inverse] = []
        for parts in zip(*columns, strict=True):
            entries = dict(zip(self.entries, parts, strict=True))
            inverses.append(type(self)(entries))
        return inverses


class EigenInverse(Inverse):
    """P = Q_G ((Q_Gᵀ ∇ Q) ∘ 1 / (v_G vᵀ + γ)) Qᵀ (Pauloski et al. 2022, eq. 13-15).

    Q and v are those of A, or of A ⊗ L if an input is channels by locations. P equals
    the dense solution with A ⊗ G + γ I, or A ⊗ L ⊗ G + γ I.

    The eigenvectors of a factor are the columns of ``(groups, n, n)``. A diagonal A has
    none. The scale is 1 / (v_G vᵀ + γ), ``(groups, out, in)`` or
    ``(1, out, channels, locations)``.
    """

    routine = staticmethod(eigh)

    @staticmethod
    def message_shapes(
        shape: FactorShape, factor_name: str
    ) -> tuple[tuple[int, ...], ...]:
        """The shapes of the eigenvectors, if there are any, and of the eigenvalues."""
        dim = shape.dims[factor_name]
        if factor_name in shape.diagonals:
            return ((shape.groups, dim),)
        return ((shape.groups, dim, dim), (shape.groups, dim))

    @staticmethod
    def combine(
        parts: Mapping[str, Decomposition],
        damping: Damping,
        multiplier: Tensor | None = None,
    ) -> Inverse:
        """Compute 1 / (v_G vᵀ + γ) for all steps until the next refresh."""
        # The eigenvalues of A ⊗ G, (layers x groups, out, in), or of A ⊗ L ⊗ G,
        # (layers x groups, out, channels, locations).
        curvature = parts["A"][-1].unsqueeze(-2)
        if "L" in parts:
            locations = parts["L"][-1].unsqueeze(-2).unsqueeze(-2)
            curvature = curvature.unsqueeze(-1) * locations
        g = parts["G"][-1]
        ones = [1] * (curvature.dim() - 2)
        added = damping.view(-1, 1, *ones) if isinstance(damping, Tensor) else damping

        # Without damping, 1 / 0 becomes 0. This is the pseudo-inverse: the gradient has
        # no part where the curvature is 0.
        scale = (g.view(*g.shape, *ones) * curvature).add_(added).reciprocal_()
        scale.nan_to_num_(nan=torch.nan, posinf=0.0)
        if multiplier is not None:
            scale.mul_(multiplier.view(-1, 1, *ones))

        entries: dict[str, Tensor] = {}
        for factor_name, decomposition in parts.items():
            if len(decomposition) == 2:
                entries[f"eigenvectors_{factor_name}"] = decomposition[0]
        entries[EIGEN_SCALE] = scale
        return EigenInverse(entries)

    @staticmethod
    def saved_shapes(shape: FactorShape) -> dict[str, tuple[int, ...]]:
        """The shapes of the eigenvectors, and of 1 / (v_G vᵀ + γ)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for factor_name, dim in shape.dims.items():
            if factor_name not in shape.diagonals:
                shapes[f"eigenvectors_{factor_name}"] = (shape.groups, dim, dim)
        scale_shape: tuple[int, ...] = (shape.groups, shape.dims["G"], shape.dims["A"])
        if shape.locations:
            scale_shape = (*scale_shape, shape.locations)
        shapes[EIGEN_SCALE] = scale_shape
        return shapes

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply the inverse to a gradient of shape ``(groups, out, in)``."""
        q_a = self.entries.get("eigenvectors_A")
        q_g = self.entries["eigenvectors_G"]
        q_l = self.entries.get("eigenvectors_L")
        scale = self.entries[EIGEN_SCALE]
        rotated = torch.bmm(q_g.mT, gradient)

        # With L: rotate each output's map of channels by locations. Such layers have
        # one group.
        if q_l is not None:
            assert q_a is not None
            rotated = q_a[0].mT @ rotated.view(scale.shape) @ q_l[0]
            rotated = q_a[0] @ rotated.mul_(scale) @ q_l[0].mT
            return q_g @ rotated.view_as(gradient)

        # With a diagonal A, whose eigenvectors are the unit vectors.
        if q_a is None:
            return torch.bmm(q_g, rotated.mul_(scale))

        # Q_G (scaled) Qᵀ, in the memory of the two intermediate results.
        scaled = torch.bmm(rotated, q_a).mul_(scale)
        half = torch.bmm(q_g, scaled, out=rotated)
        return torch.bmm(half, q_a.mT, out=scaled)


class CholeskyInverse(Inverse):
    """P = (G + √γ/π I)⁻¹ ∇ (A + π √γ I)⁻¹ (Martens & Grosse 2015, section 6.3).

    With L, the inverse on the inputs is that of A ⊗ L, where A and L are damped
    separately (Ba et al. 2017, eq. 9). The inverse of a factor is ``(groups, n, n)``,
    or ``(groups, in)`` if A is diagonal.
    """

    routine = staticmethod(cholesky_inverse)

    @staticmethod
    def split_damping(
        means: Tensor, damping: Damping, exact: bool = False
    ) -> Sequence[Tensor | None]:
        """Split γ over N factors: factor i gets πᵢ γ^(1/N). An exact G gets all of γ.

        The ``means`` are nᵢ = tr Fᵢ / dim Fᵢ, and πᵢ = nᵢ / (Π n)^(1/N). If a trace is
        0, all πᵢ are 1. These πᵢ, whose product is 1, minimize the bound on the error
        of the cross terms (Ba et al. 2017, section 4.1). Two factors have π √γ and
        √γ / π, with π² = (tr A / dim A) / (tr G / dim G) (Martens & Grosse 2015,
        section 6.3).
        """
        if exact:
            return None, torch.zeros_like(means[1]) + damping
        is_zero = (means <= 0).any(0)
        # Take logarithms, because the product may overflow.
        logarithms = means.masked_fill(is_zero, 1.0).log()
        pi = (logarithms - logarithms.mean(0)).exp()
        return (pi * damping ** (1 / len(means))).unbind()

    @staticmethod
    def message_shapes(
        shape: FactorShape, factor_name: str
    ) -> tuple[tuple[int, ...], ...]:
        """The shape of the inverse, or of its triangle."""
        dim = shape.dims[factor_name]
        if factor_name in shape.diagonals:
            return ((shape.groups, dim),)
        if dim >= MIN_TRIANGLE_DIM:
            return ((shape.groups, packed_length(dim)),)
        return ((shape.groups, dim, dim),)

    @staticmethod
    def pack_message(parts: Decomposition, dtype: torch.dtype | None) -> Decomposition:
        """Round the inverse, which stays positive definite, and pack a large one."""
        (inverse,) = parts
        is_diagonal = inverse.dim() == 2
        if dtype is not None:
            round_inverse = round_to if is_diagonal else round_definite
            inverse = round_inverse(inverse, dtype)
        if not is_diagonal and inverse.shape[-1] >= MIN_TRIANGLE_DIM:
            inverse = pack_upper_triangular(inverse)
        return (inverse,)

    @staticmethod
    def unpack_message(parts: Decomposition, dim: int) -> Decomposition:
        """The inverse as full matrices, or as a diagonal of length ``dim``."""
        (inverse,) = parts
        is_triangle = inverse.dim() == 2 and inverse.shape[-1] != dim
        if is_triangle:
            inverse = unpack_upper_triangular(inverse, dim)
        return (inverse,)

    @staticmethod
    def combine(
        parts: Mapping[str, Decomposition],
        damping: Damping,
        multiplier: Tensor | None = None,
    ) -> Inverse:
        """Collect the factors' inverses, which include γ, and multiply that of G."""
        entries: dict[str, Tensor] = {}
        for factor_name, (inverse,) in parts.items():
            entries[f"inverse_{factor_name}"] = inverse
        if multiplier is not None:
            g = entries["inverse_G"]  # of all factors, only A may be diagonal
            entries["inverse_G"] = (g * multiplier.view(-1, 1, 1)).to(g.dtype)
        return CholeskyInverse(entries)

    @staticmethod
    def saved_shapes(shape: FactorShape) -> dict[str, tuple[int, ...]]:
        """The shapes of the factors' inverses."""
        shapes: dict[str, tuple[int, ...]] = {}
        for factor_name, dim in shape.dims.items():
            sides = (dim,) if factor_name in shape.diagonals else (dim, dim)
            shapes[f"inverse_{factor_name}"] = (shape.groups, *sides)
        return shapes

    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply the inverse to a gradient of shape ``(groups, out, in)``."""
        a = self.entries["inverse_A"]
        locations = self.entries.get("inverse_L")
        half = torch.bmm(self.entries["inverse_G"], gradient)
        if locations is not None:  # such layers have one group
            maps = half.reshape(-1, a.shape[-1], locations.shape[-1])
            return (a[0] @ maps @ locations[0]).view_as(gradient)
        if a.dim() == 2:
            return half.mul_(a.unsqueeze(-2))
        return torch.bmm(half, a)


Solver: TypeAlias = type[EigenInverse] | type[CholeskyInverse]
"""A class of inverses, with the methods that compute them."""

SOLVERS: dict[str, Solver] = {"eigen": EigenInverse, "inverse": CholeskyInverse}

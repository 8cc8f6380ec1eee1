"""Trace and diagonal of a curvature matrix, from products with random signs.

    trace, Hutch++    S: m/3 sign vectors, Q = orth(H S);  tr H = tr(QᵀHQ) + tr(PHP), P = I − QQᵀ,
                      the first exactly, the second as the mean of zᵀPHPz over m/3 sign vectors
                      (Meyer, Musco, Musco, Woodruff, 2021)
    diagonal          the mean of z ∘ Hz over sign vectors (Bekas, Kokiopoulou, Saad, 2007)

What is left to chance is a mean of independent samples, and so has a standard error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.errors import CurvatureError
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import ProductMode
from second_order.lanczos.spectrum import ParamsOrModel, measurement
from second_order.lanczos.vector_space import RowSpace

__all__ = ["Diagonal", "Trace", "diagonal", "trace"]

LEAST_PRODUCTS = 6  # of a trace: two samples at least for a standard error
NOT_FINITE = (
    "a Hessian-vector product is not finite; look at the loss of the batch, or use a wider dtype"
)


@dataclass(frozen=True)
class Trace:
    """An estimate of a trace.

    Attributes:
        value: tr H, the sum of all eigenvalues.
        standard_error: Standard error of ``value``; 0 where nothing was left to chance.
        size: n, the number of eigenvalues; ``value / size`` is their mean.
        products: Number of Hessian-vector products taken.
    """

    value: float
    standard_error: float
    size: int
    products: int


def trace(
    loss_fn: LossFn | Sequence[LossFn],
    params: ParamsOrModel,
    *,
    products: int = 48,
    seed: int = 0,
    hvp: ProductMode = "auto",
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
    curvature: CurvatureKind = "hessian",
    layers: str | Iterable[str] = (),
) -> Trace:
    """Estimate the trace of the Hessian of a loss.

    A third of the products looks for the steep directions, a third takes their share of the trace
    exactly, and a third samples the rest: the error falls with 1 / m, and not with 1 / √m, where
    few eigenvalues stand out.

    Args:
        loss_fn: Evaluates the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as for :func:`eigenpairs`.
        products: m, Hessian-vector products at most, at least 6.
        seed: Seed of the random vectors.
        hvp: How products are made, as for :func:`eigenpairs`.
        dtype: Dtype of the vectors, as for :func:`eigenpairs`.
        process_group: Processes that call together, as for :func:`eigenpairs`.
        curvature: Which matrix, as for :func:`eigenpairs`.
        layers: A block of it, as for :func:`eigenpairs`.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        ValueError: For too few products, or a pattern that matches no layer.
    """
    if products < LEAST_PRODUCTS:
        raise ValueError(
            f"products={products} is below {LEAST_PRODUCTS}, which leave two samples for the "
            f"standard error; 48 is the default"
        )
    with measurement(loss_fn, params, layers, curvature, hvp, dtype, process_group) as space:
        sketched = min(products // 3, space.size)
        Q = _orthonormal(space, [space.apply(_signs(space, seed + i)) for i in range(sketched)])
        captured = [_dot(space, q, space.apply(q)) for q in Q]
        rest = []
        count = products - 2 * sketched if len(Q) < space.size else 0
        for i in range(count):
            z = _without(space, Q, _signs(space, seed + sketched + i))
            rest.append(_dot(space, z, space.apply(z)))
        space.raise_together()
        size = space.size
    value = math.fsum(captured) + (statistics.fmean(rest) if rest else 0.0)
    if not math.isfinite(value):
        raise CurvatureError(NOT_FINITE)
    error = statistics.stdev(rest) / math.sqrt(count) if rest else 0.0
    return Trace(value, error, size, sketched + len(Q) + count)


@dataclass(frozen=True)
class Diagonal:
    """An estimate of a diagonal.

    Attributes:
        values: ``(n,)`` over the flattened parameters, in their order; float64.
        standard_errors: ``(n,)`` standard error of each value; float64.
        products: Number of Hessian-vector products taken.
    """

    values: Tensor
    standard_errors: Tensor
    products: int

    def parts(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The values a parameter at a time, each in its shape."""
        shapes = [p.shape for p in params]
        pieces = self.values.split([shape.numel() for shape in shapes])
        return [v.reshape(shape) for v, shape in zip(pieces, shapes, strict=True)]


def diagonal(
    loss_fn: LossFn | Sequence[LossFn],
    params: ParamsOrModel,
    *,
    probes: int = 64,
    seed: int = 0,
    hvp: ProductMode = "auto",
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
    curvature: CurvatureKind = "hessian",
    layers: str | Iterable[str] = (),
) -> Diagonal:
    """Estimate the diagonal of the Hessian of a loss.

    An element's variance is the sum of the squares of the others in its row, over ``probes``: a
    diagonal Hessian is found exactly by one.

    Args:
        loss_fn: Evaluates the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as for :func:`eigenpairs`.
        probes: Random vectors to average over, a product each; at least 2.
        seed: Seed of the random vectors.
        hvp: How products are made, as for :func:`eigenpairs`.
        dtype: Dtype of the vectors, as for :func:`eigenpairs`.
        process_group: Processes that call together, as for :func:`eigenpairs`.
        curvature: Which matrix, as for :func:`eigenpairs`.
        layers: A block of it, as for :func:`eigenpairs`.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        ValueError: For too few probes, or a pattern that matches no layer.
    """
    if probes < 2:
        raise ValueError(f"probes={probes} is below 2, which a standard error takes; use 64")
    with measurement(loss_fn, params, layers, curvature, hvp, dtype, process_group) as space:
        mean = torch.zeros_like(space.random(seed, 1.0), dtype=torch.float64)
        squares = torch.zeros_like(mean)
        for i in range(probes):  # mean and sum of squared deviations, updated (Welford, 1962)
            z = _signs(space, seed + i)
            sample = (z * space.apply(z)).double()
            deviation = sample - mean
            mean += deviation / (i + 1)
            squares += deviation * (sample - mean)
        space.raise_together()
        values = space.gathered(mean)
        errors = space.gathered((squares / (probes - 1) / probes).sqrt())
    if not bool(values.isfinite().all()):
        raise CurvatureError(NOT_FINITE)
    return Diagonal(values, errors, probes)


def _signs(space: RowSpace, seed: int) -> Tensor:
    """This process's rows of a seeded vector of ones with random signs."""
    normal = space.random(seed, 1.0)
    return torch.ones_like(normal).copysign_(normal)


def _dot(space: RowSpace, a: Tensor, b: Tensor) -> float:
    return float(space.total((a.double() @ b.double()).reshape(1)))


def _without(space: RowSpace, Q: Tensor, v: Tensor) -> Tensor:
    """The vector v − QᵀQv, of orthonormal rows Q; twice, against rounding."""
    for _ in range(2):
        v = v - Q.t() @ space.total((Q @ v).double()).to(v.dtype)
    return v


def _orthonormal(space: RowSpace, vectors: Sequence[Tensor]) -> Tensor:
    """An orthonormal basis of the vectors' span, a row each; a zero or dependent one adds none."""
    Q = torch.stack(list(vectors))
    found, largest = 0, 0.0
    for v in vectors:
        length = math.sqrt(_dot(space, v, v))
        largest = max(largest, length)
        rest = _without(space, Q[:found], v)
        left = math.sqrt(_dot(space, rest, rest))
        if left > 100 * torch.finfo(v.dtype).eps * largest:
            Q[found] = _without(space, Q[:found], rest / left)
            found += 1
    return Q[:found]

"""Trace, diagonal and spectral density of a curvature matrix, by random vectors.

The steep directions are taken exactly, the rest by random signs:

    Q = orth(H S) of some normal vectors S, P = I − QQᵀ;  H = QQᵀH + HQQᵀ − QQᵀHQQᵀ + PHP
    trace      tr(QᵀHQ), and the mean of zᵀPHPz over sign vectors z: Hutch++ (Meyer, Musco, Musco,
               Woodruff, 2021)
    diagonal   that of the first three terms, and the mean of z ∘ PHPz; without Q it is the
               estimator of Bekas, Kokiopoulou, Saad, 2007

What is left to chance is a mean of independent samples, and so has a standard error.

    density    by stochastic Lanczos quadrature, tr f(H)/n ≈ mean over random probes of
               Σᵢ s_{1i}² f(θᵢ) (Ghorbani, Krishnan, Xiao, 2019)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from second_order.errors import CurvatureError
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import ProductMode
from second_order.lanczos.lanczos import tridiagonalise
from second_order.lanczos.spectrum import (
    UNDECOMPOSED,
    ParamsOrModel,
    everybodys_ritz,
    measurement,
)
from second_order.lanczos.vector_space import RowSpace
from second_order.utils.checks import check_number, check_whole

__all__ = ["Diagonal", "SpectralDensity", "Trace", "diagonal", "spectral_density", "trace"]

LEAST_SAMPLES = 2  # for a standard error
FAIR_SAMPLES = 4  # of two, χ² distributed, it is 1.6 times too small on average, of four 1.3 times
NOT_FINITE = (
    "a Hessian-vector product is not finite; look at the loss of the batch, or use a wider dtype "
    "for the model"
)


@dataclass(frozen=True)
class Trace:
    """An estimate of a trace.

    Attributes:
        value: tr H, the sum of all eigenvalues.
        standard_error: Standard error of ``value``; 0 where nothing was left to chance. Its square
            is right on average over seeds; of few samples it is too small more often than not.
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
    directions: int | None = None,
    seed: int = 0,
    hvp: ProductMode = "auto",
    process_group: dist.ProcessGroup | None = None,
    curvature: CurvatureKind = "hessian",
) -> Trace:
    """Estimate the trace of the Hessian of a loss.

    A third of the products looks for the steep directions, a third takes their share of the trace
    exactly, and a third samples the rest, which is little where few eigenvalues stand out.

    Args:
        loss_fn: Evaluates the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as there.
        products: m, Hessian-vector products at most.
        directions: Steep directions to take out of chance's way, two products each; None for m / 3,
            or fewer, so that four samples are left; 0 for none, which is better only where no
            eigenvalues stand out.
        seed: Seed of the random vectors.
        hvp: How products are made, as for :func:`eigenpairs`.
        process_group: Processes that call together, as there.
        curvature: Which matrix, as there.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        TypeError: If a count or a seed is no whole number.
        ValueError: For too few products.
    """
    directions = _checked(products, directions, seed)
    with measurement(loss_fn, params, curvature, hvp, process_group) as space:
        steep = _Steep(space, min(directions, space.size), seed)
        captured = [_dot(space, q, b) for q, b in zip(steep.Q, steep.HQ, strict=True)]
        rest = []
        for z in steep.probes(products):
            Pz = steep.without(z)
            rest.append(_dot(space, Pz, space.apply(Pz)))
        space.raise_together()
        size = space.size
    value = math.fsum(captured) + (statistics.fmean(rest) if rest else 0.0)
    if not math.isfinite(value):
        raise CurvatureError(NOT_FINITE)
    error = statistics.stdev(rest) / math.sqrt(len(rest)) if rest else 0.0
    return Trace(value, error, size, steep.products + len(rest))


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
    products: int = 96,
    directions: int | None = None,
    seed: int = 0,
    hvp: ProductMode = "auto",
    process_group: dist.ProcessGroup | None = None,
    curvature: CurvatureKind = "hessian",
) -> Diagonal:
    """Estimate the diagonal of the Hessian of a loss.

    As for :func:`trace`, steep directions are taken exactly, and the rest is sampled. Of samples,
    an element's variance is the sum of the squares of the others in its row, over their number.

    Args:
        loss_fn: Evaluates the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as there.
        products: m, Hessian-vector products at most.
        directions: Steep directions to take out of chance's way, as for :func:`trace`.
        seed: Seed of the random vectors.
        hvp: How products are made, as for :func:`eigenpairs`.
        process_group: Processes that call together, as there.
        curvature: Which matrix, as there.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        TypeError: If a count or a seed is no whole number.
        ValueError: For too few products.
    """
    directions = _checked(products, directions, seed)
    with measurement(loss_fn, params, curvature, hvp, process_group) as space:
        steep = _Steep(space, min(directions, space.size), seed)
        known = steep.diagonal()
        mean, squares, count = torch.zeros_like(known), torch.zeros_like(known), 0
        for z in steep.probes(products):
            sample = (z * steep.without(space.apply(steep.without(z)))).double()
            count += 1  # mean and sum of squared deviations, updated (Welford, 1962)
            deviation = sample - mean
            mean += deviation / count
            squares += deviation * (sample - mean)
        space.raise_together()
        values = space.gathered(known + mean)
        errors = space.gathered((squares / max(count - 1, 1) / max(count, 1)).sqrt())
    if not bool(values.isfinite().all()):
        raise CurvatureError(NOT_FINITE)
    return Diagonal(values, errors, steep.products + count)


def _checked(products: int, directions: int | None, seed: int) -> int:
    """The number of steep directions to look for."""
    check_whole("products", products, 1, "48")
    check_whole("seed", seed, 0, "0")
    if directions is None:
        directions = max(min(products // 3, (products - FAIR_SAMPLES) // 2), 0)
    check_whole("directions", directions, 0, "0 for none, or None")
    least = 2 * directions + LEAST_SAMPLES
    if products < least:
        raise ValueError(
            f"products={products} with directions={directions}: directions take two products each, "
            f"and {LEAST_SAMPLES} samples more make a standard error; use "
            f"products={max(least, 6)} or more"
        )
    return directions


class _Steep:
    """Directions that are taken exactly: orthonormal rows Q ``(k, rows)``, and their products."""

    def __init__(self, space: RowSpace, count: int, seed: int) -> None:
        self._space, self._seed = space, seed + count
        rows = space.random(seed, 1.0)
        found = [space.apply(space.random(seed + i, 1.0)) for i in range(count)]
        Q = torch.stack([*found, rows])  # a basis of their span, a row each
        self.Q, largest = Q[:0], 0.0
        for v in found:
            largest = max(largest, math.sqrt(_dot(space, v, v)))
            rest = self.without(v)
            left = math.sqrt(_dot(space, rest, rest))
            if left > 100 * torch.finfo(v.dtype).eps * largest:  # else zero, or dependent
                k = len(self.Q)
                Q[k] = self.without(rest / left)
                self.Q = Q[: k + 1]
        self.HQ = torch.stack([*(space.apply(q) for q in self.Q), rows])[:-1]
        self.products = count + len(self.Q)

    def without(self, v: Tensor) -> Tensor:
        """P v, the vector v − QᵀQv without these directions; twice, against rounding."""
        for _ in range(2 if len(self.Q) else 0):
            v = v - self.Q.t() @ self._space.total((self.Q @ v).double()).to(v.dtype)
        return v

    def probes(self, products: int) -> Iterator[Tensor]:
        """Yield sign vectors for the rest of the products; none where no rest is left."""
        for i in range(products - self.products if len(self.Q) < self._space.size else 0):
            normal = self._space.random(self._seed + i, 1.0)
            yield torch.ones_like(normal).copysign_(normal)

    def diagonal(self) -> Tensor:
        """This process's rows of the diagonal of QQᵀH + HQQᵀ − QQᵀHQQᵀ, in float64."""
        Q, HQ = self.Q.double(), self.HQ.double()
        inner = self._space.total(Q @ HQ.t()) if len(Q) else Q @ HQ.t()
        return (Q * (2 * HQ - inner @ Q)).sum(0)


def _dot(space: RowSpace, a: Tensor, b: Tensor) -> float:
    return float(space.total((a.double() @ b.double()).reshape(1)))


@dataclass(frozen=True)
class SpectralDensity:
    """A quadrature of the density of a Hessian's eigenvalues.

    Attributes:
        nodes: ``(probes, m)`` Ritz values; float64 on the CPU. A probe that ended early is padded
            with nodes of weight 0.
        weights: ``(probes, m)`` weights of the nodes; those of each probe sum to 1.
        size: n, the number of eigenvalues.
        products: Number of Hessian-vector products taken.
    """

    nodes: Tensor
    weights: Tensor
    size: int
    products: int

    def expectation(self, function: Any) -> float:
        """The value of tr f(H) / n; ``lambda x: x`` gives the mean eigenvalue."""
        return float((self.weights * function(self.nodes)).sum() / len(self.nodes))

    def on(self, grid: Tensor, width: float) -> Tensor:
        """The density on a grid, each node a Gaussian of a standard deviation of ``width``.

        Args:
            grid: Points to evaluate at, ``(g,)``, in units of eigenvalues.
            width: Standard deviation, in units of eigenvalues.

        Returns:
            The density, ``(g,)``, with an integral of 1.

        Raises:
            TypeError: If the width is no number.
            ValueError: If it is not above 0.
        """
        remedy = "use a percent of the spectrum's width, perhaps"
        check_number("width", width, low=0.0, open_low=True, open_high=True, remedy=remedy)
        grid = grid.to("cpu", torch.float64)
        distance = (grid[:, None, None] - self.nodes[None]) / width
        bumps = torch.exp(-0.5 * distance.square()) / (width * math.sqrt(2 * math.pi))
        return (bumps * self.weights).sum(dim=(1, 2)) / len(self.nodes)


def spectral_density(
    loss_fn: LossFn | Sequence[LossFn],
    params: ParamsOrModel,
    *,
    probes: int = 4,
    iterations: int = 64,
    seed: int = 0,
    hvp: ProductMode = "auto",
    process_group: dist.ProcessGroup | None = None,
    curvature: CurvatureKind = "hessian",
) -> SpectralDensity:
    """Estimate the density of all eigenvalues of the Hessian of a loss.

    Args:
        loss_fn: Evaluates the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as there.
        probes: Random vectors to average over.
        iterations: Products for each; details finer than the spectrum's width divided by it blur.
        seed: Seed of the random vectors.
        hvp: How products are made, as for :func:`eigenpairs`.
        process_group: Processes that call together, as there.
        curvature: Which matrix, as there.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        TypeError: If a count or a seed is no whole number.
        ValueError: For counts outside their bounds.
    """
    check_whole("probes", probes, 1, "4")
    check_whole("iterations", iterations, 1, "64")
    check_whole("seed", seed, 0, "0")
    nodes = []
    weights = []
    products = 0
    with measurement(loss_fn, params, curvature, hvp, process_group) as space:
        length = min(iterations, space.size)
        for probe in range(probes):
            run = tridiagonalise(space, space.random(seed + probe, 1.0), length)
            space.raise_together()
            if not run.finite:
                raise CurvatureError(NOT_FINITE)
            ritz = everybodys_ritz(space, run)
            if not bool(ritz.vectors.isfinite().all()):
                raise CurvatureError(UNDECOMPOSED)
            products += len(ritz.values)
            padding = (0, length - len(ritz.values))
            nodes.append(nn.functional.pad(ritz.values, padding))
            weights.append(nn.functional.pad(ritz.vectors[0].square(), padding))
        size = space.size
    return SpectralDensity(torch.stack(nodes), torch.stack(weights), size, products)

"""Random estimates of a curvature matrix's trace, diagonal and spectral density.

Trace and diagonal treat the steep directions exactly, and sample the complement:

    Q = orth(H S) of some normal vectors S, P = I − QQᵀ
    H = QQᵀH + HQQᵀ − QQᵀHQQᵀ + PHP
    trace      tr(QᵀHQ), and the mean of zᵀPHPz over sign vectors z: Hutch++ (Meyer,
               Musco, Musco, Woodruff, 2021)
    diagonal   the diagonal of the first three terms, and the mean of z ∘ PHPz. Without
               Q it is the estimator of Bekas, Kokiopoulou, Saad, 2007

The sampled part is a mean of independent samples, which gives its standard error.

    density    stochastic Lanczos quadrature, tr f(H)/n ≈ mean over random probes of
               Σᵢ s_{1i}² f(θᵢ) (Ghorbani, Krishnan, Xiao, 2019)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from second_order.errors import CurvatureError
from second_order.lanczos.closure import Closures, CurvatureKind
from second_order.lanczos.hvp import ProductMode, RowSpace
from second_order.lanczos.lanczos import UNDECOMPOSED, agreed_ritz_pairs, tridiagonalize
from second_order.lanczos.spectrum import (
    ParamsOrModel,
    curvature_space,
    split_by_parameter,
)
from second_order.utils.checks import check_number, check_seed, check_whole

__all__ = [
    "Diagonal",
    "SpectralDensity",
    "Trace",
    "diagonal",
    "spectral_density",
    "trace",
]

MIN_SAMPLES = 2  # for a standard error

# Samples to leave by default. The standard error of two samples is 1.6 times too small
# on average, that of four 1.3 times, by the chi-squared distribution.
DEFAULT_SAMPLES = 4

NOT_FINITE = (
    "a Hessian-vector product is not finite; look at the loss of the batch, or use a wider dtype "
    "for the model"
)


@dataclass(frozen=True)
class Trace:
    """An estimate of a trace.

    Attributes:
        value: tr H, the sum of all eigenvalues.
        standard_error: Standard error of ``value``; 0 if nothing was sampled. Its
            square is correct on average over seeds. With few samples it is too small
            more often than too large.
        size: n, the number of eigenvalues; ``value / size`` is their mean.
        products: Number of Hessian-vector products.
    """

    value: float
    standard_error: float
    size: int
    products: int


def trace(
    loss_fn: Closures,
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

    A third of the products finds the steep directions, a third computes their part of
    the trace exactly, and a third samples the complement, which is small if few
    eigenvalues stand out.

    Args:
        loss_fn: Returns the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as for :func:`eigenpairs`.
        products: m, the maximum number of Hessian-vector products.
        directions: Number of steep directions that are treated exactly, with two
            products each. None: m / 3, or fewer to leave four samples. 0: none, which
            is better only if no eigenvalues stand out.
        seed: Seed of the random vectors. Different seeds give independent estimates.
        hvp: How to compute products, as for :func:`eigenpairs`.
        process_group: Processes that call this together, as for :func:`eigenpairs`.
        curvature: The matrix, as for :func:`eigenpairs`.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        TypeError: If a count or a seed is not an integer.
        ValueError: If there are too few products, or the parameters are sharded.
    """
    directions = _check_counts(products, directions, seed)
    with curvature_space(loss_fn, params, curvature, hvp, process_group) as space:
        steep = _SteepDirections(space, min(directions, space.size), seed)
        # Treat the steep directions exactly, and sample the complement.
        exact = [_dot(space, q, Hq) for q, Hq in zip(steep.Q, steep.HQ, strict=True)]
        samples = []
        for z in steep.probes(products):
            Pz = steep.project_out(z)
            samples.append(_dot(space, Pz, space.apply(Pz)))
        space.raise_together()
        size = space.size

    value = math.fsum(exact)
    if samples:
        value += statistics.fmean(samples)
    if not math.isfinite(value):
        raise CurvatureError(NOT_FINITE)

    # The standard error of the mean of the samples.
    error = 0.0
    if samples:
        error = statistics.stdev(samples) / math.sqrt(len(samples))
    return Trace(value, error, size, steep.products + len(samples))


@dataclass(frozen=True)
class Diagonal:
    """An estimate of a diagonal.

    Attributes:
        values: ``(n,)`` over the flattened parameters, in their order; float64.
        standard_errors: ``(n,)`` standard error of each value; float64.
        products: Number of Hessian-vector products.
    """

    values: Tensor
    standard_errors: Tensor
    products: int

    def parts(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Split the values by parameter, each part in the parameter's shape.

        Args:
            params: The parameters that :func:`diagonal` used: of a model, those that
                require a gradient.

        Raises:
            ValueError: If they do not have n elements.
        """
        return split_by_parameter(self.values, params)


def diagonal(
    loss_fn: Closures,
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

    As in :func:`trace`, steep directions are treated exactly, and the complement is
    sampled. The variance of a sampled element is the sum of the squares of the other
    elements in its row, divided by the number of samples.

    Args:
        loss_fn: Returns the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as for :func:`eigenpairs`.
        products: m, the maximum number of Hessian-vector products.
        directions: Number of steep directions treated exactly, as for :func:`trace`.
        seed: Seed of the random vectors. Different seeds give independent estimates.
        hvp: How to compute products, as for :func:`eigenpairs`.
        process_group: Processes that call this together, as for :func:`eigenpairs`.
        curvature: The matrix, as for :func:`eigenpairs`.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        TypeError: If a count or a seed is not an integer.
        ValueError: If there are too few products, or the parameters are sharded.
    """
    directions = _check_counts(products, directions, seed)
    with curvature_space(loss_fn, params, curvature, hvp, process_group) as space:
        steep = _SteepDirections(space, min(directions, space.size), seed)
        exact = steep.diagonal()

        # Update mean and sum of squared deviations with each sample (Welford, 1962).
        mean = torch.zeros_like(exact)
        squares = torch.zeros_like(exact)
        count = 0
        for z in steep.probes(products):
            PHPz = steep.project_out(space.apply(steep.project_out(z)))
            sample = (z * PHPz).double()
            count += 1
            deviation = sample - mean
            mean += deviation / count
            squares += deviation * (sample - mean)
        space.raise_together()
        values = space.gather(exact + mean)
        errors = space.gather((squares / max(count - 1, 1) / max(count, 1)).sqrt())
    if not bool(values.isfinite().all()):
        raise CurvatureError(NOT_FINITE)
    return Diagonal(values, errors, steep.products + count)


def _check_counts(products: int, directions: int | None, seed: int) -> int:
    """Check the arguments of an estimate, and return the number of steep directions."""
    check_whole("products", products, 1, "48")
    check_seed("seed", seed)
    if directions is None:
        directions = max(min(products // 3, (products - DEFAULT_SAMPLES) // 2), 0)
    check_whole("directions", directions, 0, "0 for none, or None")
    needed = 2 * directions + MIN_SAMPLES
    if products < needed:
        raise ValueError(
            f"products={products} with directions={directions}: each direction takes two products, "
            f"and a standard error needs {MIN_SAMPLES} samples; use products={max(needed, 6)} or "
            f"more"
        )
    return directions


class _SteepDirections:
    """Directions that are treated exactly, which random products with H have found.

    Attributes:
        Q: This process's rows of orthonormal vectors, ``(k, rows)``.
        HQ: The products of H with these vectors, ``(k, rows)``.
        products: Number of Hessian-vector products so far.
    """

    def __init__(self, space: RowSpace, count: int, seed: int) -> None:
        self._space = space
        self._seed = seed
        self._first_probe = count  # the number of random vectors before the probes
        candidates = [space.apply(random_vector(space, seed, i)) for i in range(count)]

        # Gram-Schmidt. A vector that is zero, or depends on the others, is left out.
        # Estimates do not support FSDP2, whose rows would not be ``space.rows``.
        num_rows = space.rows.stop - space.rows.start
        Q = torch.empty((count, num_rows), dtype=space.dtype, device=space.device)
        self.Q = Q[:0]
        largest_norm = 0.0
        for v in candidates:
            largest_norm = max(largest_norm, math.sqrt(_dot(space, v, v)))
            residual = self.project_out(v)
            residual_norm = math.sqrt(_dot(space, residual, residual))
            if residual_norm > 100 * torch.finfo(v.dtype).eps * largest_norm:
                k = len(self.Q)
                Q[k] = self.project_out(residual / residual_norm)
                self.Q = Q[: k + 1]

        # Multiply H by the orthonormal vectors.
        self.HQ = torch.empty_like(self.Q)
        for q, Hq in zip(self.Q, self.HQ, strict=True):
            Hq.copy_(space.apply(q))
        self.products = count + len(self.Q)

    def project_out(self, v: Tensor) -> Tensor:
        """Return P v, the part of v that is orthogonal to Q.

        Rounding makes a second projection necessary.
        """
        if not len(self.Q):
            return v
        for _ in range(2):
            coefficients = self._space.total((self.Q @ v).double())
            v = v - self.Q.t() @ coefficients.to(v.dtype)
        return v

    def probes(self, products: int) -> Iterator[Tensor]:
        """Yield sign vectors for the remaining products, unless Q spans all of R^n."""
        if len(self.Q) == self._space.size:
            return
        for i in range(products - self.products):
            index = self._first_probe + i
            normal = random_vector(self._space, self._seed, index)
            yield torch.ones_like(normal).copysign_(normal)

    def diagonal(self) -> Tensor:
        """Return the local rows of diag(QQᵀH + HQQᵀ − QQᵀHQQᵀ), in float64."""
        Q = self.Q.double()
        HQ = self.HQ.double()
        inner = Q @ HQ.t()
        if len(Q):
            inner = self._space.total(inner)
        return (Q * (2 * HQ - inner @ Q)).sum(0)


def random_vector(space: RowSpace, seed: int, index: int) -> Tensor:
    """Return this process's rows of a seed's random vector with this index.

    The vectors of different seeds are independent. Python's hash of integers is the
    same in all processes.
    """
    return space.random(hash((seed, index)) % 2**63, 1.0)


def _dot(space: RowSpace, a: Tensor, b: Tensor) -> float:
    """Return aᵀb, summed over the processes. Collective."""
    return float(space.total((a.double() @ b.double()).reshape(1)))


@dataclass(frozen=True)
class SpectralDensity:
    """A quadrature of the density of a Hessian's eigenvalues.

    Attributes:
        nodes: ``(probes, m)`` Ritz values; float64 on the CPU. A probe that ended early
            repeats its last one.
        weights: ``(probes, m)`` weights of the nodes, 0 for repeated ones. Those of a
            probe sum to 1.
        size: n, the number of eigenvalues.
        products: Number of Hessian-vector products.
    """

    nodes: Tensor
    weights: Tensor
    size: int
    products: int

    def expectation(self, function: Any) -> float:
        """Estimate tr f(H) / n. With ``lambda x: x`` this is the mean eigenvalue."""
        return float((self.weights * function(self.nodes)).sum() / len(self.nodes))

    def on(self, grid: Tensor, width: float) -> Tensor:
        """Return the density on a grid, with a Gaussian instead of each node.

        Args:
            grid: Points to evaluate at, ``(g,)``, in units of eigenvalues.
            width: Standard deviation of the Gaussians, in units of eigenvalues.

        Returns:
            The density, ``(g,)``. Its integral is 1.

        Raises:
            TypeError: If the width is not a number.
            ValueError: If it is not above 0.
        """
        remedy = "use a percent of the spectrum's width, perhaps"
        check_number(
            "width", width, low=0.0, open_low=True, open_high=True, remedy=remedy
        )

        # Add up one weighted Gaussian for each node.
        grid = grid.to("cpu", torch.float64)
        distance = (grid[:, None, None] - self.nodes[None]) / width
        area = width * math.sqrt(2 * math.pi)
        gaussians = torch.exp(-0.5 * distance.square()) / area
        return (gaussians * self.weights).sum(dim=(1, 2)) / len(self.nodes)


def spectral_density(
    loss_fn: Closures,
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
        loss_fn: Returns the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as for :func:`eigenpairs`.
        probes: Number of random vectors to average over.
        iterations: Number of products per probe. The density resolves details down to
            the width of the spectrum divided by this number.
        seed: Seed of the random vectors. Different seeds give independent estimates.
        hvp: How to compute products, as for :func:`eigenpairs`.
        process_group: Processes that call this together, as for :func:`eigenpairs`.
        curvature: The matrix, as for :func:`eigenpairs`.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        TypeError: If a count or a seed is not an integer.
        ValueError: For counts outside their bounds, and for sharded parameters.
    """
    # Check the arguments.
    check_whole("probes", probes, 1, "4")
    check_whole("iterations", iterations, 1, "64")
    check_seed("seed", seed)
    nodes = []
    weights = []
    products = 0
    with curvature_space(loss_fn, params, curvature, hvp, process_group) as space:
        length = min(iterations, space.size)
        for probe in range(probes):
            # One recurrence from a random vector gives one quadrature rule.
            start = random_vector(space, seed, probe)
            run = tridiagonalize(space, start, length)
            space.raise_together()
            if not run.finite:
                raise CurvatureError(NOT_FINITE)
            ritz = agreed_ritz_pairs(space, run)
            if not bool(ritz.vectors.isfinite().all()):
                raise CurvatureError(UNDECOMPOSED)
            products += len(ritz.values)
            # Rules that ended early repeat their last node, with weight zero. A node
            # of 0 would add 0 · f(0), which is NaN if f is the logarithm.
            padding = length - len(ritz.values)
            nodes.append(torch.cat([ritz.values, ritz.values[-1:].expand(padding)]))
            weights.append(nn.functional.pad(ritz.vectors[0].square(), (0, padding)))
        size = space.size
    return SpectralDensity(torch.stack(nodes), torch.stack(weights), size, products)

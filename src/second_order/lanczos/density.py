"""The density of a curvature matrix's eigenvalues, by stochastic Lanczos quadrature.

    tr f(H)/n ≈ mean over random probes of Σᵢ s_{1i}² f(θᵢ)

(Ghorbani, Krishnan, Xiao, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from second_order.errors import CurvatureError
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.drawing import check_width, draw_density
from second_order.lanczos.hvp import ProductMode
from second_order.lanczos.lanczos import tridiagonalise
from second_order.lanczos.spectrum import (
    UNDECOMPOSED,
    ParamsOrModel,
    everybodys_ritz,
    measurement,
)
from second_order.options import check_seed, check_whole

__all__ = ["SpectralDensity", "spectral_density"]


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

    def plot(self, axes: Any = None, *, width: float | None = None, points: int = 1500) -> Any:
        """Draw the density on a logarithmic scale, and a line at the height of one eigenvalue.

        Args:
            axes: The matplotlib axes to draw on; None for those of a new figure of pyplot.
            width: Standard deviation of the bump of a node, in units of eigenvalues; None for
                0.6 % of the distance between the extreme nodes.
            points: Number of points of the curve.

        Returns:
            The axes.

        Raises:
            ImportError: Without axes, if matplotlib is not installed.
        """
        return draw_density(self, axes, width, points)

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
        check_width(width)
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
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
    curvature: CurvatureKind = "hessian",
    layers: str | Iterable[str] = (),
) -> SpectralDensity:
    """Estimate the density of all eigenvalues of the Hessian of a loss.

    Args:
        loss_fn: Evaluates the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as for :func:`eigenpairs`.
        probes: Random vectors to average over.
        iterations: Products for each; details finer than the spectrum's width divided by it blur.
        seed: Seed of the random vectors.
        hvp: How products are made, as for :func:`eigenpairs`.
        dtype: Dtype of the Lanczos vectors, as for :func:`eigenpairs`.
        process_group: Processes that call together, as for :func:`eigenpairs`.
        curvature: Which matrix, as for :func:`eigenpairs`.
        layers: A block of it, as for :func:`eigenpairs`.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        TypeError: If a count or a seed is no whole number.
        ValueError: For counts outside their bounds, or a pattern that matches no layer.
    """
    check_whole("probes", probes, 1, "4")
    check_whole("iterations", iterations, 1, "64")
    check_seed("seed", seed)
    nodes, weights, products = [], [], 0
    measured = measurement(loss_fn, params, layers, curvature, hvp, dtype, process_group)
    with closing(measured), measured as space:
        length = min(iterations, space.size)
        for probe in range(probes):
            run = tridiagonalise(space, space.random(seed + probe, 1.0), length)
            space.raise_together()
            if not run.finite:
                raise CurvatureError("a Hessian-vector product is not finite; look at the loss")
            ritz = everybodys_ritz(space, run, run.basis.device)
            if not bool(ritz.vectors.isfinite().all()):
                raise CurvatureError(UNDECOMPOSED)
            products += len(ritz.values)
            padding = (0, length - len(ritz.values))
            nodes.append(nn.functional.pad(ritz.values, padding))
            weights.append(nn.functional.pad(ritz.vectors[0].square(), padding))
        size = space.size
    return SpectralDensity(torch.stack(nodes), torch.stack(weights), size, products)

"""The density of a curvature matrix's eigenvalues, by stochastic Lanczos quadrature.

    tr f(H)/n ≈ mean over random probes of Σᵢ s_{1i}² f(θᵢ)

(Ghorbani, Krishnan, Xiao, 2019).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
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
    seed_of,
    whole,
)
from second_order.options import check_number

__all__ = ["SpectralDensity", "spectral_density"]

WIDTH, MARGIN = 0.006, 0.05  # of a bump, and of the room on both sides: shares of the spectrum's


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
        if width is not None:
            _check_width(width)
        if points < 2:
            raise ValueError(f"points={points} is below 2; 1500 is the default")
        if axes is None:
            axes = _pyplot().figure().add_subplot()
        nodes = self.nodes[self.weights > 0.0]
        low, high = float(nodes.min()), float(nodes.max())
        span = (high - low) or abs(high) or 1.0
        width = WIDTH * span if width is None else width
        ends = low - MARGIN * span, high + MARGIN * span
        grid = torch.linspace(*ends, points, dtype=torch.float64)
        x, curve = grid.numpy(), self.on(grid, width).numpy()
        one = 1 / (self.size * width * math.sqrt(2 * math.pi))
        (line,) = axes.plot(x, curve, linewidth=1.2)
        axes.fill_between(x, curve, one / 30, color=line.get_color(), alpha=0.25, linewidth=0)
        axes.axhline(one, color="0.55", linewidth=0.8, zorder=1, label="height of one eigenvalue")
        axes.set_yscale("log")
        axes.set_ylim(one / 30, 4 * max(float(curve.max()), one))
        axes.set_xlabel("eigenvalue")
        axes.set_ylabel("density of eigenvalues")
        return axes

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
        _check_width(width)
        grid = grid.to("cpu", torch.float64)
        distance = (grid[:, None, None] - self.nodes[None]) / width
        bumps = torch.exp(-0.5 * distance.square()) / (width * math.sqrt(2 * math.pi))
        return (bumps * self.weights).sum(dim=(1, 2)) / len(self.nodes)


def _check_width(width: Any) -> None:
    remedy = "use a percent of the spectrum's width, perhaps"
    check_number("width", width, low=0.0, open_low=True, open_high=True, remedy=remedy)


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise ImportError(
            "SpectralDensity.plot draws with matplotlib, which is not installed: "
            "pip install matplotlib; or take the numbers of SpectralDensity.on(grid, width)"
        ) from error


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
        params: A module or its parameters, as there.
        probes: Random vectors to average over.
        iterations: Products for each; details finer than the spectrum's width divided by it blur.
        seed: Seed of the random vectors.
        hvp: How products are made, as for :func:`eigenpairs`.
        dtype: Dtype of the vectors, as there.
        process_group: Processes that call together, as there.
        curvature: Which matrix, as there.
        layers: A block of it, as there.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        TypeError: If a count or a seed is no whole number.
        ValueError: For counts outside their bounds, or a pattern that matches no layer.
    """
    probes = whole("probes", probes, 1, "4")
    iterations = whole("iterations", iterations, 1, "64")
    seed = seed_of(seed)
    nodes, weights, products = [], [], 0
    measured = measurement(loss_fn, params, layers, curvature, hvp, dtype, process_group)
    with measured as space:
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

"""Pictures of a spectrum; matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from second_order.options import check_number

__all__ = ["check_width", "draw_density"]

WIDTH = 0.006
"""Width of a bump as a share of the spectrum's."""

MARGIN = 0.05
"""Room on both sides, as a share of the spectrum's width."""


class Density(Protocol):
    """What is drawn; :class:`~second_order.lanczos.SpectralDensity`."""

    @property
    def size(self) -> int:
        """The number of eigenvalues."""

    @property
    def nodes(self) -> Tensor:
        """The nodes of the quadrature."""

    @property
    def weights(self) -> Tensor:
        """Their weights."""

    def on(self, grid: Tensor, width: float) -> Tensor:
        """The density on a grid."""


def draw_density(density: Density, axes: Any, width: float | None, points: int) -> Any:
    """Draw a density, and return the axes; see :meth:`SpectralDensity.plot`."""
    if width is not None:
        check_width(width)
    if points < 2:
        raise ValueError(f"points={points} is below 2; 1500 is the default")
    if axes is None:
        axes = _pyplot().figure().add_subplot()
    nodes = density.nodes[density.weights > 0.0]
    low, high = float(nodes.min()), float(nodes.max())
    span = (high - low) or abs(high) or 1.0
    width = WIDTH * span if width is None else width
    grid = torch.linspace(low - MARGIN * span, high + MARGIN * span, points, dtype=torch.float64)
    curve = density.on(grid, width)
    one = 1 / (density.size * width * math.sqrt(2 * math.pi))
    (line,) = axes.plot(grid.numpy(), curve.numpy(), linewidth=1.2)
    colour = line.get_color()
    axes.fill_between(grid.numpy(), curve.numpy(), one / 30, color=colour, alpha=0.25, linewidth=0)
    axes.axhline(one, color="0.55", linewidth=0.8, zorder=1, label="height of one eigenvalue")
    axes.set_yscale("log")
    axes.set_ylim(one / 30, 4 * max(float(curve.max()), one))
    axes.set_xlabel("eigenvalue")
    axes.set_ylabel("density of eigenvalues")
    return axes


def check_width(width: Any) -> None:
    """Raise unless ``width`` can be the standard deviation of a bump."""
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

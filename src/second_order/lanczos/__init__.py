"""Curvature of a loss without its matrix: eigenpairs, density, trace, diagonal."""

from second_order.lanczos.closure import Outputs, losses_over
from second_order.lanczos.estimates import (
    Diagonal,
    SpectralDensity,
    Trace,
    diagonal,
    spectral_density,
    trace,
)
from second_order.lanczos.hvp import Hessian
from second_order.lanczos.spectrum import Eigenpairs, eigenpairs

__all__ = [
    "Diagonal",
    "Eigenpairs",
    "Hessian",
    "Outputs",
    "SpectralDensity",
    "Trace",
    "diagonal",
    "eigenpairs",
    "losses_over",
    "spectral_density",
    "trace",
]

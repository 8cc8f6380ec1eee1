"""Curvature of a loss without forming it: extreme eigenpairs and the spectral density."""

from second_order.lanczos.hvp import Hessian
from second_order.lanczos.spectrum import (
    Eigenpairs,
    SpectralDensity,
    eigenpairs,
    spectral_density,
)

__all__ = ["Eigenpairs", "Hessian", "SpectralDensity", "eigenpairs", "spectral_density"]

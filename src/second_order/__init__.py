"""Second-order optimizers that go where ``torch.optim`` optimizers go."""

from second_order import lanczos
from second_order.errors import (
    CurvatureError,
    DecompositionError,
    RankMismatchError,
    SecondOrderError,
    SecondOrderWarning,
)
from second_order.optimizers.base import SecondOrderOptimizer
from second_order.optimizers.dho2 import DHO2
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.fosi import CurvatureReport
from second_order.optimizers.kaisa import KAISA
from second_order.report import LayerRow, Summary

__version__ = "0.1.0"

__all__ = [
    "DHO2",
    "DPKFAC",
    "KAISA",
    "CurvatureError",
    "CurvatureReport",
    "DecompositionError",
    "LayerRow",
    "RankMismatchError",
    "SecondOrderError",
    "SecondOrderOptimizer",
    "SecondOrderWarning",
    "Summary",
    "lanczos",
]

"""Second-order optimizers that go where ``torch.optim`` optimizers go."""

from second_order.errors import (
    DecompositionError,
    RankMismatchError,
    SecondOrderError,
    SecondOrderWarning,
)
from second_order.optimizers.base import SecondOrderOptimizer
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.kaisa import KAISA
from second_order.report import LayerRow, Summary

__version__ = "0.1.0"

__all__ = [
    "DPKFAC",
    "KAISA",
    "DecompositionError",
    "LayerRow",
    "RankMismatchError",
    "SecondOrderError",
    "SecondOrderOptimizer",
    "SecondOrderWarning",
    "Summary",
]

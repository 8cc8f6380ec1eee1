"""Second-order optimizers for PyTorch, compatible with ``torch.optim``.

    from second_order import KAISA

    optimizer = KAISA(model.parameters(), lr=0.1, momentum=0.9)

Modules are imported on first use. DHO2 imports none of K-FAC, KAISA none of Lanczos.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from second_order import export, lanczos
    from second_order.checkpoint.files import load_checkpoint, save_checkpoint
    from second_order.errors import (
        CheckpointError,
        CurvatureError,
        DecompositionError,
        RankMismatchError,
        SecondOrderError,
        SecondOrderWarning,
    )
    from second_order.kronecker.kinds import register_layer
    from second_order.kronecker.layer_curvature import LayerCurvature
    from second_order.kronecker.model_curvature import KroneckerCurvature
    from second_order.measuring.measure import measure
    from second_order.optimizers.base import SecondOrderOptimizer
    from second_order.optimizers.checkpoint import export_base_state
    from second_order.optimizers.config import AuxBase, DecayingClip, PerStep, TraceRule
    from second_order.optimizers.dho2 import DHO2
    from second_order.optimizers.distkfac import DistKFAC
    from second_order.optimizers.dpkfac import DPKFAC
    from second_order.optimizers.kaisa import KAISA
    from second_order.optimizers.mrdho2 import MRDHO2
    from second_order.planning.machine import Interconnect, Machine, calibrate
    from second_order.planning.plan import Plan, plan
    from second_order.reporting.summary import (
        CurvatureReport,
        EpochReport,
        LayerRow,
        Summary,
    )

__version__ = "0.1.0"

__all__ = [
    "DHO2",
    "DPKFAC",
    "KAISA",
    "MRDHO2",
    "AuxBase",
    "CheckpointError",
    "CurvatureError",
    "CurvatureReport",
    "DecayingClip",
    "DecompositionError",
    "DistKFAC",
    "EpochReport",
    "Interconnect",
    "KroneckerCurvature",
    "LayerCurvature",
    "LayerRow",
    "Machine",
    "PerStep",
    "Plan",
    "RankMismatchError",
    "SecondOrderError",
    "SecondOrderOptimizer",
    "SecondOrderWarning",
    "Summary",
    "TraceRule",
    "calibrate",
    "export",
    "export_base_state",
    "lanczos",
    "load_checkpoint",
    "measure",
    "plan",
    "register_layer",
    "save_checkpoint",
]

_NAMES_BY_MODULE = {
    "optimizers.checkpoint": "export_base_state",
    "errors": (
        "CheckpointError CurvatureError DecompositionError RankMismatchError SecondOrderError "
        "SecondOrderWarning"
    ),
    "checkpoint.files": "load_checkpoint save_checkpoint",
    "optimizers.config": "DecayingClip PerStep AuxBase TraceRule",
    "kronecker.layer_curvature": "LayerCurvature",
    "kronecker.model_curvature": "KroneckerCurvature",
    "kronecker.kinds": "register_layer",
    "measuring.measure": "measure",
    "optimizers.base": "SecondOrderOptimizer",
    "optimizers.dho2": "DHO2",
    "optimizers.distkfac": "DistKFAC",
    "optimizers.dpkfac": "DPKFAC",
    "optimizers.kaisa": "KAISA",
    "optimizers.mrdho2": "MRDHO2",
    "planning.machine": "Interconnect Machine calibrate",
    "planning.plan": "Plan plan",
    "reporting.summary": "CurvatureReport EpochReport LayerRow Summary",
}
_MODULE_OF = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()
}


if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names

    def __getattr__(name: str) -> object:
        if name in _MODULE_OF:
            module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
            value = getattr(module, name)
            globals()[name] = value
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

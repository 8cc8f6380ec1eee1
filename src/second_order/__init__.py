"""Second-order optimizers that go where ``torch.optim`` optimizers go."""

from second_order import lanczos
from second_order.contract.checkpoint import export_base_state
from second_order.errors import (
    CheckpointError,
    CurvatureError,
    DecompositionError,
    RankMismatchError,
    SecondOrderError,
    SecondOrderWarning,
)
from second_order.files import load_checkpoint, save_checkpoint
from second_order.kfac.distkfac_options import DecayingClip
from second_order.kfac.options import PerStep
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.kronecker.registration import register_layer
from second_order.optimizers.base import SecondOrderOptimizer
from second_order.optimizers.dho2 import DHO2
from second_order.optimizers.distkfac import DistKFAC
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.kaisa import KAISA
from second_order.optimizers.mrdho2 import MRDHO2
from second_order.papers import paper_settings
from second_order.planning.calibration import calibrate
from second_order.planning.choices import Plan
from second_order.planning.interconnect import Interconnect
from second_order.planning.machine import Machine
from second_order.planning.plan import plan
from second_order.recipes import parameter_groups
from second_order.report import (
    CurvatureReport,
    EpochReport,
    LayerRow,
    Recipe,
    RecipeRow,
    Summary,
)

__version__ = "0.1.0"

__all__ = [
    "DHO2",
    "DPKFAC",
    "KAISA",
    "MRDHO2",
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
    "Recipe",
    "RecipeRow",
    "SecondOrderError",
    "SecondOrderOptimizer",
    "SecondOrderWarning",
    "Summary",
    "calibrate",
    "export_base_state",
    "lanczos",
    "load_checkpoint",
    "paper_settings",
    "parameter_groups",
    "plan",
    "register_layer",
    "save_checkpoint",
]

"""Whole trajectories against `ReferenceKFAC`, whose solves are dense: invariants 13 and 15."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import reference as ref
import torch
from contract import make, take
from models import FACTORED, ZOO, Case
from nearness import close, error
from reference import ReferenceKFAC
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from woven import woven

from second_order import KAISA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
each_solver = pytest.mark.parametrize("solver", ["eigen", "inverse"])
# One of every kind of layer and use.
KINDS = ["mlp", "sequence_mlp", "shared_conv", "conv_rectangular", "conv1d", "conv3d"]


# Whole trajectories.


def run(case: Case, batches: Sequence[Batch], **options: Any) -> list[Tensor]:
    """All parameters after each step of the package."""
    model = case.model()
    optimizer = make(KAISA, model, **options)
    vectors = []
    for batch in batches:
        take(model, optimizer, batch, case.loss)
        vectors.append(parameters_to_vector(model.parameters()).detach())
    return vectors


TRAJECTORIES = [
    (name, approx)
    for name, case in FACTORED.items()
    for approx in ("expand", "reduce")
    if approx == "expand" or case.shared == "reduce" or "conv" in name
]
# What is due when does not depend on the layer: all pairs for one of every kind.
INTERVALS = [
    (name, approx, solver, *pair)
    for name, approx in TRAJECTORIES
    for pair, solver in woven(
        [*itertools.product((1, 2), (1, 3))] if name in KINDS else [(1, 1), (2, 3)],
        ("eigen", "inverse"),
        part=2,
    )
]
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "damping": 0.1, "factor_decay": 0.9}


@pytest.mark.parametrize(("name", "approx", "solver", "factor_steps", "inv_steps"), INTERVALS)
def test_trajectories_are_those_of_the_reference(
    name: str, approx: ref.Approx, solver: Any, factor_steps: int, inv_steps: int
) -> None:
    """With a clip that is active and without; the two differ."""
    case, ends = FACTORED[name], []
    batches = case.batches(4, n=6)
    intervals = {"factor_update_steps": factor_steps, "inv_update_steps": inv_steps}
    for kl_clip in (None, 1e-3):
        options: dict[str, Any] = {**SGD, **intervals, "solver": solver, "kl_clip": kl_clip}
        kfac = ReferenceKFAC(case.reference.model(), loss=case.loss, approx=approx, **options)
        found = run(case, batches, kfac_approx=approx, **options)
        close(found, kfac.trajectory(batches))
        ends.append(found[-1])
    assert error(ends[1], ends[0]) > 1e-4


@pytest.mark.parametrize(
    "name", ["unused", "lora", "norms", "batch_norm", "transformer", "attention", "language_model"]
)
@each_solver
def test_trajectories_of_models_with_more_than_factored_layers(name: str, solver: Any) -> None:
    case = ZOO[name]
    batches = case.batches(4, n=6)
    approx: ref.Approx = "reduce" if case.shared == "reduce" else "expand"
    options: dict[str, Any] = {**SGD, "solver": solver, "kl_clip": 1e-3}
    kfac = ReferenceKFAC(case.model(), loss=case.loss, approx=approx, **options)
    # The reference knows nothing of nn.MultiheadAttention: tests/kronecker/test_attention.py does.
    options["skip_layers"] = ["1.attention"] if name == "transformer" else []
    close(run(case, batches, kfac_approx=approx, **options), kfac.trajectory(batches))


@each_solver
@pytest.mark.parametrize("scale", ["newton", "gradient"])
def test_a_trajectory_with_adam_for_base(solver: Any, scale: str) -> None:
    case = ZOO["conv_strided"]
    batches = case.batches(6, n=6)
    shared: dict[str, Any] = {
        "lr": 0.01,
        "damping": 0.1,
        "kl_clip": 1e-3,
        "inv_update_steps": 3,
        "solver": solver,
    }
    kfac = ReferenceKFAC(
        case.model(),
        base=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        gradient_scale=scale == "gradient",
        **shared,
    )
    expected = kfac.trajectory(batches)
    # Adam divides gradients by their size, and rounding in the smallest of them with it.
    found = run(case, batches, base=torch.optim.Adam, preconditioner_scale=scale, **shared)
    close(found, expected, rtol=1e-7)
    sgd = run(case, batches, **shared)
    assert error(sgd[-1], expected[-1]) > 1e-3


# Damping in units of a layer's mean curvature.


def relative(kfac: ReferenceKFAC) -> ReferenceKFAC:
    """A reference whose damping of a layer is times tr A tr G / (dim A dim G), by hand.

    Of a grouped convolution the groups share one damping, that of their mean curvature.
    """
    solve = kfac.solve

    def scaled(A: Tensor, G: Tensor, gradient: Tensor, damping: float) -> Tensor:
        curvatures = [
            float(a.trace()) / len(a) * float(g.trace()) / len(g) for a, g in zip(A, G, strict=True)
        ]
        return solve(A, G, gradient, damping * sum(curvatures) / len(curvatures))

    kfac.solve = scaled
    return kfac


@each_solver
@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize("name", [*KINDS, "conv_grouped", "language_model"])
def test_relative_damping_is_in_units_of_a_layers_mean_curvature(
    name: str, solver: Any, triangular: bool
) -> None:
    case = ZOO[name]
    batches = case.batches(4, n=6)
    options: dict[str, Any] = {"lr": 0.05, "damping": 2.0, "kl_clip": 1e-3, "solver": solver}
    options["inv_update_steps"] = 3
    kfac = relative(ReferenceKFAC(case.model(), loss=case.loss, **options))
    storage = {"symmetry_aware": triangular}
    found = run(case, batches, relative_damping=True, **storage, **options)
    close(found, kfac.trajectory(batches))
    absolute = run(case, batches, **storage, **options)
    assert error(absolute[-1], found[-1]) > 1e-6

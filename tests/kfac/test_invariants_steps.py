"""Whole steps of the package against dense solves: invariants 12, 13, 15, 16, 19 and 20.

The numbers in names are those of the invariants. After `step` the gradients are νP, what the base
has taken; whole trajectories are compared with `ReferenceKFAC`, whose solves are dense.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import reference as ref
import torch
from combinations import fractional_product
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FACTORED, ZOO, Case
from optimizer_cases import identity_curvature, make, same, take
from reference import ReferenceKFAC, cross_entropy
from tolerances import close, error
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from second_order import KAISA
from second_order.kronecker import rows
from second_order.kronecker.layers import RowMask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

F64 = torch.float64
MLP = ZOO["mlp"]
SOLVE = {"eigen": ref.damped_dense_solve, "inverse": ref.damped_factored_solve}
SEEDS = st.integers(0, 2**16)
DAMPINGS = st.floats(1e-3, 10.0)
each_solver = pytest.mark.parametrize("solver", ["eigen", "inverse"])
# One of every kind of layer and use.
KINDS = ["mlp", "sequence_mlp", "shared_conv", "conv_rectangular", "conv1d", "conv3d"]


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """The gradient [weight bias] of each layer that has factors, by its name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            weight, bias = ref.parameters_of(module)
            if weight.grad is not None:
                bias_gradient = None if bias is None else bias.grad
                found[name] = ref.to_matrix(module, weight.grad, bias_gradient).clone()
    return found


def plain(case: Case, batch: Batch) -> dict[str, Tensor]:
    """∇ of each layer."""
    model = case.reference.model()
    case.loss(model(batch[0]), batch[1]).backward()
    return matrices(model)


def preconditioned(
    case: Case, batch: Batch, scale: float = 1.0, **options: Any
) -> dict[str, Tensor]:
    """νP of each layer, from the package's first step on `scale` times the loss."""
    model = case.model()
    take(model, make(KAISA, model, **options), batch, lambda z, y: scale * case.loss(z, y))
    return matrices(model)


def joined(layers: dict[str, Tensor]) -> Tensor:
    return torch.cat([matrix.flatten() for matrix in layers.values()])


def direction(layers: dict[str, Tensor]) -> Tensor:
    vector = joined(layers)
    return vector / vector.norm()


# 12. Loss times c with damping times c: the same direction. The empirical Fisher of c times the
# loss is c² times that of the loss, so that its damping goes with c²; a relative damping follows
# by itself; the sampled Fisher is the model's own, and does not know the loss.


@each_solver
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=5)
@given(log_c=st.floats(-5, 5), damping=DAMPINGS, relative=st.booleans(), seed=SEEDS)
def test_12_scaling_loss_and_damping_together_changes_nothing(
    name: str, solver: str, log_c: float, damping: float, relative: bool, seed: int
) -> None:
    case = ZOO[name]
    c = math.exp(log_c)
    batch = case.batch(4, seed=seed)
    options: dict[str, Any] = {"relative_damping": relative, "solver": solver}
    P = preconditioned(case, batch, damping=damping, **options)
    follows = 1.0 if relative else c**2
    scaled = preconditioned(case, batch, c, damping=damping * follows, **options)
    close([c * joined(scaled)], [joined(P)])
    close([direction(scaled)], [direction(P)])


@each_solver
@pytest.mark.parametrize("power", [0, 1])
def test_12_scaling_the_loss_alone_changes_the_step(solver: str, power: int) -> None:
    batch = MLP.batch()
    P = preconditioned(MLP, batch, damping=0.1, solver=solver)
    scaled = preconditioned(MLP, batch, 4.0, damping=0.1 * 4.0**power, solver=solver)
    assert error(direction(scaled), direction(P)) > 0.05


def dense(
    case: Case, batch: Batch, solver: str, damping: float, approx: ref.Approx = "expand"
) -> dict[str, Tensor]:
    """P of each layer from a dense matrix."""
    model = case.reference.model()
    P = {}
    for name, gradient in plain(case, batch).items():
        A, G = ref.empirical_factors(model, *batch, case.loss, name, approx)
        P[name] = SOLVE[solver](A, G, gradient, damping)
    return P


@each_solver
@pytest.mark.parametrize("name", FACTORED)
@settings(max_examples=4)
@given(
    damping=DAMPINGS,
    approx=st.sampled_from(["expand", "reduce"]),
    n=st.integers(1, 8),
    seed=SEEDS,
)
def test_15_a_step_equals_the_dense_solve(
    name: str,
    solver: str,
    damping: float,
    approx: ref.Approx,
    n: int,
    seed: int,
) -> None:
    case = FACTORED[name]
    batch = case.batch(n, seed=seed)
    expected = dense(case, batch, solver, damping, approx)
    model = case.model()
    before = case.model()
    options = {"kfac_approx": approx, "damping": damping, "solver": solver}
    optimizer = make(KAISA, model, lr=0.01, **options)
    # The reference counts every row.
    with patch.object(rows, "nonzero_row_mask", lambda d: RowMask(None, len(d))):
        take(model, optimizer, batch, case.loss)
    assert matrices(model).keys() == expected.keys()
    close(matrices(model).values(), expected.values())
    # And that is what the base has taken.
    moved = [
        q - 0.01 * p.grad for p, q in zip(model.parameters(), before.parameters(), strict=True)
    ]
    close(model.parameters(), moved, rtol=1e-12)


@each_solver
@pytest.mark.parametrize("name", KINDS)
def test_15_another_solver_or_damping_gives_another_step(name: str, solver: str) -> None:
    case = ZOO[name]
    batch = case.batch()
    found = joined(preconditioned(case, batch, solver=solver, damping=0.1))
    other = "inverse" if solver == "eigen" else "eigen"
    assert error(joined(dense(case, batch, other, 0.1)), found) > 1e-3
    assert error(joined(dense(case, batch, solver, 0.11)), found) > 1e-3


def with_factors_scaled(solver: str, on_a: float, on_g: float, relative: bool) -> Tensor:
    """P of a second batch, the first's factors having been scaled in a checkpoint."""
    first, second = MLP.batches(2)
    options: dict[str, Any] = {
        "lr": 0.0,
        "solver": solver,
        "relative_damping": relative,
        "factor_update_steps": 10**9,
    }
    model = MLP.model()
    donor = make(KAISA, model, **options)
    take(model, donor, first)
    saved = copy.deepcopy(donor.state_dict())
    for entry in saved["state"].values():
        if "A" in entry["curvature"]:
            entry["curvature"]["A"] *= on_a
            entry["curvature"]["G"] *= on_g
            entry["curvature"]["mean_eigenvalues"] *= torch.tensor([[on_a], [on_g]], dtype=F64)
    optimizer = make(KAISA, model, **options)
    optimizer.load_state_dict(saved)
    take(model, optimizer, second)
    return joined(matrices(model))


@each_solver
@settings(max_examples=10)
@given(log_c=st.floats(-6, 6), relative=st.booleans())
def test_16_moving_a_scale_between_factors_changes_nothing(
    solver: str, log_c: float, relative: bool
) -> None:
    c = math.exp(log_c)
    found = with_factors_scaled(solver, c, 1 / c, relative)
    close([found], [with_factors_scaled(solver, 1.0, 1.0, relative)])


@each_solver
def test_16_scaling_one_factor_alone_changes_the_step(solver: str) -> None:
    expected = with_factors_scaled(solver, 1.0, 1.0, False)
    assert error(with_factors_scaled(solver, 3.0, 1.0, False), expected) > 0.05
    assert error(with_factors_scaled(solver, 1.0, 3.0, False), expected) > 0.05


def products(P: dict[str, Tensor], gradients: dict[str, Tensor]) -> float:
    return sum(float((P[name] * gradients[name]).sum().abs()) for name in P)


@pytest.mark.parametrize("name", [*KINDS, "norms"])
@settings(max_examples=10)
@given(
    lr=st.floats(1e-3, 10),
    kappa=st.floats(1e-8, 1),
    solver=st.sampled_from(["eigen", "inverse"]),
    seed=SEEDS,
)
def test_19_the_clip_bounds_the_whole_step(
    name: str, lr: float, kappa: float, solver: str, seed: int
) -> None:
    case = ZOO[name]
    batch = case.batch(4, seed=seed)
    gradients = plain(case, batch)
    P = preconditioned(case, batch, lr=lr, solver=solver)
    clipped = preconditioned(case, batch, lr=lr, solver=solver, kl_clip=kappa)
    change = lr**2 * products(P, gradients)
    nu = float(joined(clipped).norm() / joined(P).norm())
    close(clipped.values(), [nu * matrix for matrix in P.values()])  # one ν for all layers
    assert lr**2 * nu * products(clipped, gradients) == pytest.approx(min(kappa, change), rel=1e-8)


def test_19_no_clip_or_a_clip_per_layer_gives_another_step() -> None:
    batch = MLP.batch()
    lr = 1.0
    kappa = 1e-4
    gradients = plain(MLP, batch)
    P = preconditioned(MLP, batch, lr=lr)
    assert lr**2 * products(P, gradients) > 10 * kappa
    clipped = preconditioned(MLP, batch, lr=lr, kl_clip=kappa)
    for name in P:
        nu = math.sqrt(kappa / float((P[name] * gradients[name]).sum().abs()))
        assert error(clipped[name], nu * P[name]) > 0.05


@given(kappa=st.floats(1e-8, 1e-2), rates=st.tuples(*[st.floats(1e-2, 1.0)] * 3))
def test_19_the_clip_uses_each_groups_learning_rate(kappa: float, rates: tuple[float, ...]) -> None:
    batch = MLP.batch()
    gradients = plain(MLP, batch)
    P = preconditioned(MLP, batch)
    model = MLP.model()
    groups = [
        {"params": model.get_submodule(name).parameters(), "lr": lr}
        for name, lr in zip(P, rates, strict=True)
    ]
    take(model, make(KAISA, groups, model=model, kl_clip=kappa), batch)
    terms = [
        lr**2 * float((P[name] * gradients[name]).sum().abs())
        for name, lr in zip(P, rates, strict=True)
    ]
    nu = min(1.0, math.sqrt(kappa / sum(terms)))
    close(matrices(model).values(), [nu * matrix for matrix in P.values()])


# The clip under a schedule: a constant bound is that of the largest learning rate, and shrinks with
# the square of the rate; a callable one is taken as it is.

FACTORS = {
    "falling": [1.0, 0.5, 0.5, 0.1, 0.02],
    "warm-up and decay": [0.1, 0.5, 1.0, 0.3, 0.1],
}
BY_HAND = [0.02, 0.01, 0.1, 0.05, 0.08]
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    **{
        name: lambda opt, values=values: LambdaLR(opt, lambda step: values[min(step, 4)])
        for name, values in FACTORS.items()
    },
    "StepLR": lambda opt: StepLR(opt, step_size=2, gamma=0.3),
    "OneCycleLR": lambda opt: OneCycleLR(opt, max_lr=0.1, total_steps=6, cycle_momentum=False),
}


def scheduled(
    schedule: str, kl_clip: Any, batches: Sequence[Batch]
) -> tuple[list[Tensor], list[float], list[float]]:
    """The trajectory under a schedule, its learning rates, and the largest so far.

    A scheduler knows the largest from the start if its first rate is a warm-up's: "initial_lr".
    """
    model = MLP.model()
    optimizer = make(KAISA, model, lr=0.1, kl_clip=kl_clip)
    scheduler = SCHEDULES[schedule](optimizer) if schedule in SCHEDULES else None
    vectors = []
    rates = []
    peaks = []
    peak = optimizer.param_groups[0].get("initial_lr", 0.0)
    for step, batch in enumerate(batches):
        if scheduler is None:
            optimizer.param_groups[0]["lr"] = BY_HAND[step]
        rates.append(optimizer.param_groups[0]["lr"])
        peak = max(peak, rates[-1], optimizer.param_groups[0].get("max_lr", 0.0))
        peaks.append(peak)
        take(model, optimizer, batch)
        vectors.append(parameters_to_vector(model.parameters()).detach())
        if scheduler is not None:
            scheduler.step()
    return vectors, rates, peaks


BOUNDS = [1e-4, 3e-5, 1e-4, 2e-4, 1e-5]


@pytest.mark.parametrize("kl_clip", [1e-4, BOUNDS.__getitem__], ids=["constant", "callable"])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "by hand"])
def test_a_constant_clip_follows_the_square_of_the_learning_rate(
    schedule: str, kl_clip: Any
) -> None:
    """κ (lr / peak)²; a bound that stays is not the same. A callable one is as it says."""
    batches = MLP.batches(5)
    found, rates, peaks = scheduled(schedule, kl_clip, batches)
    assert len(set(rates)) > 2
    if schedule in FACTORS:
        assert rates == pytest.approx([0.1 * factor for factor in FACTORS[schedule]])
        assert set(peaks) == {0.1}

    def reference(falls: bool) -> list[Tensor]:
        def bound(step: int) -> float:
            kappa = kl_clip(step) if callable(kl_clip) else kl_clip
            return kappa * (rates[step] / peaks[step]) ** 2 if falls else kappa

        kfac = ReferenceKFAC(MLP.model(), lr=lambda step: rates[step], damping=0.1, kl_clip=bound)
        return kfac.trajectory(batches)

    close(found, reference(not callable(kl_clip)))
    assert error(reference(callable(kl_clip))[-1], found[-1]) > 1e-6


# 20. Infinite damping, rescaled, gives the base optimizer's direction; identity curvature gives the
# base optimizer bit for bit.


@pytest.mark.parametrize(
    ("name", "solver"), fractional_product([*FACTORED], ["eigen", "inverse"], part=2)
)
def test_20_infinite_damping_equals_the_base(name: str, solver: str) -> None:
    """P ≈ ∇ / γ up to ‖A ⊗ G‖ / γ, or up to a few √(‖A ⊗ G‖ / γ) with damped factors."""
    case = FACTORED[name]
    damping = 1e12
    rtol = {"eigen": 1e-8, "inverse": 1e-4}[solver]
    batch = case.batch()
    gradients = plain(case, batch)
    P = preconditioned(case, batch, damping=damping, solver=solver)
    close([damping * matrix for matrix in P.values()], gradients.values(), rtol)
    model = case.model()
    twin = case.model()
    optimizer = make(KAISA, model, lr=0.05 * damping, damping=damping, solver=solver)
    alone = torch.optim.SGD(twin.parameters(), lr=0.05)
    for each in case.batches(4):
        take(model, optimizer, each, case.loss)
        take(twin, alone, each, case.loss)
    close(
        [parameters_to_vector(model.parameters())], [parameters_to_vector(twin.parameters())], rtol
    )


@pytest.mark.parametrize(
    ("name", "base", "solver"),
    fractional_product(
        [name for name, case in FACTORED.items() if case.loss is cross_entropy],
        ["SGD", "Adam"],
        ["eigen", "inverse"],
        part=2,
    ),
)
def test_20_identity_curvature_equals_the_base_bit_for_bit(
    name: str, base: str, solver: str
) -> None:
    """With the factors of a batch, the step differs."""
    case = FACTORED[name]
    Base, options = {
        "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
        "Adam": (torch.optim.Adam, {"lr": 0.01}),
    }[base]
    model = case.model()
    twin = case.model()
    alone = Base(twin.parameters(), **options)
    batches = case.batches(4)
    optimizer = identity_curvature(
        KAISA, model, alone, batches[0], base=Base, solver=solver, **options
    )
    for batch in batches:
        take(model, optimizer, batch, case.loss)
        take(twin, alone, batch, case.loss)
        assert same(model, twin)
    curved = case.model()
    start = case.model()
    take(curved, make(KAISA, curved, base=Base, solver=solver, **options), batches[0], case.loss)
    take(start, Base(start.parameters(), **options), batches[0], case.loss)
    assert not same(curved, start)


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
# What is due when does not depend on the layer: all intervals for one layer of every kind, and
# solvers in turn for the others.
PAIRS_OF_INTERVALS = [*itertools.product((1, 2), (1, 3))]
SOLVERS = ("eigen", "inverse")
INTERVALS = [
    *(
        (name, approx, solver, *pair)
        for name, approx in TRAJECTORIES
        for pair, solver in fractional_product(PAIRS_OF_INTERVALS, SOLVERS, part=2)
        if name in KINDS
    ),
    *(
        (name, approx, SOLVERS[i % 2], 2, 3)
        for i, (name, approx) in enumerate(TRAJECTORIES)
        if name not in KINDS
    ),
]
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "damping": 0.1, "factor_decay": 0.9}


@pytest.mark.parametrize(("name", "approx", "solver", "factor_steps", "inv_steps"), INTERVALS)
def test_trajectories_equal_those_of_the_reference(
    name: str, approx: ref.Approx, solver: Any, factor_steps: int, inv_steps: int
) -> None:
    """With a clip that is active and without; the two differ."""
    case = FACTORED[name]
    ends = []
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
def test_trajectories_equal_the_reference_for_models_with_other_layers(
    name: str, solver: Any
) -> None:
    case = ZOO[name]
    batches = case.batches(4, n=6)
    approx: ref.Approx = "reduce" if case.shared == "reduce" else "expand"
    options: dict[str, Any] = {**SGD, "solver": solver, "kl_clip": 1e-3}
    kfac = ReferenceKFAC(case.model(), loss=case.loss, approx=approx, **options)
    # The reference knows nothing of nn.MultiheadAttention: tests/kronecker/test_attention.py does.
    options["skip_layers"] = ["1.attention"] if name == "transformer" else []
    close(run(case, batches, kfac_approx=approx, **options), kfac.trajectory(batches))


def relative(kfac: ReferenceKFAC) -> ReferenceKFAC:
    """A reference whose damping of a layer is times tr A tr G / (dim A dim G), by hand.

    The groups of a grouped convolution share one damping, that of their mean curvature.
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
@pytest.mark.parametrize("name", [*KINDS, "conv_grouped", "language_model"])
def test_relative_damping_is_a_share_of_a_layers_mean_curvature(name: str, solver: Any) -> None:
    case = ZOO[name]
    batches = case.batches(4, n=6)
    options: dict[str, Any] = {"lr": 0.05, "damping": 2.0, "kl_clip": 1e-3, "solver": solver}
    options["inv_update_steps"] = 3
    kfac = relative(ReferenceKFAC(case.model(), loss=case.loss, **options))
    found = run(case, batches, relative_damping=True, **options)
    close(found, kfac.trajectory(batches))
    absolute = run(case, batches, **options)
    assert error(absolute[-1], found[-1]) > 1e-6

"""DHO2 in one process, which is FOSI: its step against dense algebra, and what it owes its users.

The reference computes the whole Hessian, keeps momentum in R^n, and knows no subspace coordinates.
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dho2_training import ADAM, BATCHES, CASE, SGD, closure_of, dho2, go, take, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_cases import same
from ranks import assert_same_trajectory
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR

from second_order import DHO2
from second_order.lanczos.lanczos import Pairs

if TYPE_CHECKING:
    from collections.abc import Callable

# The step, by the book.


def dense_hessian(model: nn.Module, loss: Tensor) -> Tensor:
    params = list(model.parameters())
    gradient = parameters_to_vector(torch.autograd.grad(loss, params, create_graph=True))
    rows = [
        parameters_to_vector(
            torch.autograd.grad(g, params, retain_graph=True, materialize_grads=True)
        )
        for g in gradient
    ]
    return torch.stack(rows)


def dense_pairs(model: nn.Module, largest: int, smallest: int) -> tuple[Tensor, Tensor]:
    """û and V̂ of the curvature batch, the vectors as columns."""
    values, vectors = torch.linalg.eigh(dense_hessian(model, closure_of(model)()))
    order = [*range(len(values) - 1, len(values) - 1 - largest, -1), *range(smallest)]
    return values[order], vectors[:, order]


def by_the_book(
    base: type[torch.optim.Optimizer],
    kwargs: dict[str, Any],
    mom: tuple[float, float, bool],
    *,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    clip: float = 1.0,
    alpha: Callable[[int], float] = lambda step: 0.1,
    floor: float = 1e-2,
    lr_factor: Callable[[int], float] = lambda step: 1.0,
    guard: bool = True,
) -> list[Tensor]:
    """The parameters after each step; mom is (β, gain, nesterov)."""
    model = CASE.model()
    optimizer = base(groups(model), **kwargs)
    schedule = LambdaLR(optimizer, lr_factor)
    (beta, gain, nesterov) = mom
    momentum = 0.0
    V = None
    trajectory = []
    bound = 1.0
    last = math.inf
    for step, (x, y) in enumerate(BATCHES):
        if step in (2, 6, 10):
            u, V = dense_pairs(model, 4, 1)
            loss = float(closure_of(model)().detach())
            if last < math.inf:
                bound = min(max(bound * (0.5 if loss > 1.1 * last else 1.5), 1.0), clip)
            last = loss
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if V is None:
            optimizer.step()
        else:
            g = parameters_to_vector([p.grad for p in model.parameters()])
            g1 = V @ (V.T @ g)
            for p, part in zip(
                model.parameters(),
                (g - g1).split([p.numel() for p in model.parameters()]),
                strict=True,
            ):
                p.grad = part.view(p.shape)
            before = vector(model)
            optimizer.step()
            d2 = vector(model) - before
            momentum = beta * momentum + gain * g1
            m = beta * momentum + gain * g1 if nesterov else momentum
            sizes = u.abs()
            rates = 1.0 / sizes.clamp_min(floor * float(sizes.max()))
            d1 = -alpha(step) * V @ (rates * (V.T @ m))
            s = min(max(float(sizes[0] / sizes[3]), 1.0), bound if guard else clip)
            vector_to_parameters(before + d1 + s * (d2 - V @ (V.T @ d2)), model.parameters())
        schedule.step()
        trajectory.append(vector(model))
    return trajectory


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.02, "weight_decay": 0.1}]


HEAVY = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
NESTEROV = {**HEAVY, "nesterov": True}
DAMPENED = {**HEAVY, "dampening": 0.4}
WHOLE = {"subspace_momentum": "base"}
# Base, arguments, options; β, gain and nesterov of momentum; arguments of the reference.
STEPS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1}, {}, (0.0, 1.0, False), {"clip": 3.0}),
    "SGD, base": (SGD, {"lr": 0.1}, WHOLE, (0.0, 1.0, False), {"clip": 3.0}),
    "momentum": (SGD, HEAVY, {}, (0.9, 0.1, False), {"clip": 3.0}),
    "momentum, base": (SGD, HEAVY, WHOLE, (0.9, 1.0, False), {"clip": 3.0}),
    "momentum, own": (SGD, HEAVY, {"subspace_momentum": 0.5}, (0.5, 0.5, False), {"clip": 3.0}),
    "nesterov": (SGD, NESTEROV, {}, (0.9, 0.1, True), {"clip": 3.0}),
    "nesterov, base": (SGD, NESTEROV, WHOLE, (0.9, 1.0, True), {"clip": 3.0}),
    "dampening, base": (SGD, DAMPENED, WHOLE, (0.9, 0.6, False), {"clip": 3.0}),
    "Adam": (ADAM, {"lr": 0.01, "betas": (0.8, 0.95)}, {}, (0.8, 0.2, False), {}),
    "Adam, base": (ADAM, {"lr": 0.01, "betas": (0.8, 0.95)}, WHOLE, (0.8, 0.2, False), {}),
    "Adam, own": (ADAM, {"lr": 0.01}, {"subspace_momentum": 0.0}, (0.0, 1.0, False), {}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, {}, (0.9, 0.1, False), {}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}, {}, (0.5, 0.5, False), {}),
    "groups": (SGD, HEAVY, {}, (0.9, 0.1, False), {"clip": 3.0, "groups": two_groups}),
    "clip": (SGD, HEAVY, {"lr_scale_clip": 1.7}, (0.9, 0.1, False), {"clip": 1.7}),
    "Adam, clip": (ADAM, {"lr": 0.01}, {"lr_scale_clip": 9.0}, (0.9, 0.1, False), {"clip": 9.0}),
    "floor": (
        SGD,
        HEAVY,
        {"eigenvalue_floor": 0.6},
        (0.9, 0.1, False),
        {"clip": 3.0, "floor": 0.6},
    ),
    "scale": (SGD, HEAVY, {"newton_scale": 0.3}, (0.9, 0.1, False), {"clip": 3.0, "alpha": 0.3}),
}


def falling(step: int) -> float:
    return 0.3 * 0.7**step


def rising_and_falling(step: int) -> float:
    return (0.25, 1.0, 0.5, 0.1)[min(step // 3, 3)]


@pytest.mark.works("plain", "DHO2")
@pytest.mark.parametrize("name", STEPS)
def test_steps_equal_dense_algebra(name: str) -> None:
    """In warm-up, with pairs, and with others; momentum outlasts the refreshes."""
    base, kwargs, options, mom, book = STEPS[name]
    alpha = book.get("alpha", 0.1)
    model = CASE.model()
    groups = book.get("groups", lambda model: None)
    optimizer = dho2(model, groups(model), base=base, **kwargs, **options)
    found = go(model, optimizer, BATCHES)
    book = {**book, "alpha": lambda step: alpha}
    assert_same_trajectory(found, by_the_book(base, kwargs, mom, **book), rtol=1e-9)


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_the_newton_step_follows_the_learning_rate_unless_it_is_a_schedule(tensor: bool) -> None:
    for scale, alpha in (
        (0.1, lambda step: 0.1 * rising_and_falling(step)),
        (falling, falling),
    ):
        lr = torch.tensor(0.05, dtype=torch.float64) if tensor else 0.05
        model = CASE.model()
        optimizer = dho2(model, newton_scale=scale, **{**HEAVY, "lr": lr})
        schedule = LambdaLR(optimizer, rising_and_falling)
        found = []
        for batch in BATCHES:
            found += go(model, optimizer, [batch])
            schedule.step()
        expected = by_the_book(
            SGD, HEAVY, (0.9, 0.1, False), clip=3.0, alpha=alpha, lr_factor=rising_and_falling
        )
        assert_same_trajectory(found, expected, rtol=1e-9, hint=scale)


@pytest.mark.parametrize("base", [SGD, ADAM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_base_does_not_move_inside_the_subspace(base: Any, dtype: torch.dtype) -> None:
    model = CASE.model(dtype)
    curved = CASE.batch(30, dtype, seed=99)
    optimizer = dho2(
        model,
        base=base,
        newton_scale=0.0,
        weight_decay=0.1,
        curvature_closure=closure_of(model, curved),
    )
    trajectory = go(model, optimizer, CASE.batches(6, 12, dtype))
    V = optimizer._curvature.subspace.basis.vectors  # type: ignore[union-attr]
    assert V.shape == (5, 111)
    torch.testing.assert_close(V @ V.T, torch.eye(5, dtype=dtype), rtol=0, atol=1e-5)
    for before, after in itertools.pairwise(trajectory[2:]):
        moved = after - before
        assert (V @ moved).norm() <= 20 * torch.finfo(dtype).eps
        assert moved.norm() > 1e-3


@pytest.mark.parametrize(
    "options", [{"warmup_steps": 6}, {"num_largest": 0, "num_smallest": 0}], ids=str
)
@pytest.mark.parametrize("base", [SGD, ADAM])
def test_without_eigenpairs_training_equals_the_base_bit_for_bit(base: Any, options: Any) -> None:
    kwargs = {"lr": 0.05, "weight_decay": 0.1}
    for dtype in (torch.float32, torch.float64):
        batches = CASE.batches(6, 12, dtype)
        plain = CASE.model(dtype)
        model = CASE.model(dtype)
        optimizer = dho2(model, base=base, curvature_closure=None, **kwargs, **options)
        expected = go(plain, base(plain.parameters(), **kwargs), batches)
        assert same(go(model, optimizer, batches), expected)
    assert optimizer.curvature.refreshes == 0
    optimizer = dho2(model, base=base, **kwargs)
    optimizer.close()
    expected = go(plain, base(plain.parameters(), **kwargs), batches)
    assert same(go(model, optimizer, batches), expected)


# Quadratics.


def quadratic(values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A symmetric matrix with these eigenvalues, and its eigenvectors as columns."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator).double())
    H = Q @ torch.diag(values) @ Q.T
    return (H + H.T) / 2, Q


@settings(max_examples=10)
@given(
    sizes=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=12),
    downhill=st.integers(0, 12),
    base=st.sampled_from([SGD, torch.optim.RMSprop]),
)
def test_one_newton_step_finds_the_minimum_and_leaves_saddles(
    sizes: list[float], downhill: int, base: Any
) -> None:
    """Where the whole spectrum is taken; away from a saddle it goes as far as it would go to it."""
    values = torch.tensor(sizes, dtype=torch.float64)
    values[downhill:] *= -1.0
    H, Q = quadratic(values)
    centre = torch.linspace(-1, 1, len(values), dtype=torch.float64)
    x = nn.Parameter(torch.ones(len(values), dtype=torch.float64))
    start = Q.T @ (x.detach() - centre)

    def loss() -> Tensor:
        return 0.5 * (x - centre) @ H @ (x - centre)

    optimizer = DHO2(
        [x], base=base, lr=0.1, num_largest=len(values), warmup_steps=0, newton_scale=1.0,
        eigenvalue_floor=0.0, curvature_closure=loss,
    )  # fmt: skip
    loss().backward()
    optimizer.step()
    expected = torch.where(values > 0, 0.0, 2 * start)
    torch.testing.assert_close(Q.T @ (x.detach() - centre), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("gain", [3.0, 30.0])
@pytest.mark.parametrize("offset", [-100.0, 100.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_worse_final_update_is_rejected(maximize: bool, offset: float, gain: float) -> None:
    """A loss that gets better lets s grow, whatever its sign and direction."""
    w = nn.Parameter(torch.ones(4).double())
    d = torch.tensor([9.0, 3.0, 1.0, 0.5]).double()
    better = [0.0]
    sign = -1.0 if maximize else 1.0

    def loss() -> Tensor:
        return sign * 0.5 * (d * w * w).sum() + offset - sign * better[0] * gain

    optimizer = DHO2(
        [w],
        lr=1e-9,
        num_largest=2,
        warmup_steps=0,
        curvature_interval=1,
        maximize=maximize,
        curvature_closure=loss,
    )
    found = []
    for better[0] in (0.0, 1.0, 2.0):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        found.append(optimizer.curvature.base_scale)
    assert found == pytest.approx([1.0, 1.5, 2.25])


# When, and what it says.


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({"warmup_steps": None, "curvature_interval": 3}, [3, 6, 9]),
        ({"warmup_steps": 0, "curvature_interval": 4}, [0, 4, 8]),
        ({"warmup_steps": 3, "curvature_interval": 4}, [3, 7, 11]),
        ({"warmup_steps": 11, "curvature_interval": 1}, [11]),
        (
            {"warmup_steps": None, "curvature_interval": lambda step: 2 if step < 5 else 4},
            [2, 4, 8],
        ),
    ],
    ids=["default", "at once", "after three", "late", "a schedule"],
)
def test_refreshes_follow_the_interval(options: dict[str, Any], due: list[int]) -> None:
    model = CASE.model()
    steps = []

    def counting() -> Tensor:
        steps.append(step)
        return closure_of(model)()

    optimizer = dho2(model, **{**options, "curvature_closure": counting})
    for step, batch in enumerate(BATCHES):  # noqa: B007
        take(model, optimizer, batch)
    assert steps == due
    assert optimizer.curvature.refreshes == len(due)
    assert optimizer.curvature.step == due[-1]


def test_the_report_and_the_summary_agree_with_the_state() -> None:
    model = CASE.model()
    optimizer = dho2(model, momentum=0.9)
    assert len(optimizer.curvature.eigenvalues) == 0
    assert optimizer.curvature.gradient_share is None
    assert optimizer.curvature.step == -1
    assert "no eigenpairs yet" in str(optimizer.summary())
    assert optimizer.summary().total_bytes == 0
    go(model, optimizer, BATCHES[:6])
    values, V = dense_pairs(model, 4, 1)
    x, y = BATCHES[6]
    g = parameters_to_vector(torch.autograd.grad(cross_entropy(model(x), y), model.parameters()))  # type: ignore[arg-type]
    go(model, optimizer, BATCHES[6:8])
    report = optimizer.curvature
    torch.testing.assert_close(report.eigenvalues, values, rtol=1e-8, atol=1e-9)
    assert report.eigenvalues[4] < 0 < report.eigenvalues[3]
    assert report.gradient_share == pytest.approx(
        float((V.T @ g).square().sum() / g.square().sum()), rel=1e-7
    )
    assert 0.0 < report.gradient_share < 1.0
    assert report.residuals.shape == (5,)
    assert (report.residuals <= 1e-6 * values.abs()).all()
    assert (report.step, report.refreshes, report.failures) == (6, 2, 0)
    assert 5 <= report.products <= 111
    assert report.products < report.total_products <= 222
    assert report.base_scale == pytest.approx(min(float(values[0] / values[3]), 1.5))
    summary = optimizer.summary()
    assert summary.total_bytes == 5 * 111 * 8
    assert summary.preconditioned_share == 1.0
    assert [row.name for row in summary.rows] == [name for name, _ in model.named_parameters()]
    for text in ("DHO2 over SGD", "4 largest and 1 smallest", "step 8", f"{values[0]:.3g}"):
        assert text in str(summary)


def test_a_refresh_frees_the_old_eigenvectors_before_it_makes_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = CASE.model()
    optimizer = dho2(model, curvature_interval=2)
    go(model, optimizer, BATCHES[:3])
    old = weakref.ref(optimizer._curvature.subspace.basis.vectors)
    make_vectors = Pairs.vectors
    are_freed: list[bool] = []

    def vectors(pairs: Pairs) -> Tensor:
        are_freed.append(old() is None)
        return make_vectors(pairs)

    monkeypatch.setattr(Pairs, "vectors", vectors)
    go(model, optimizer, BATCHES[3:6])
    assert are_freed
    assert all(are_freed)

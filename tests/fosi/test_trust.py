"""The trust region of Newton steps: where it binds, where it does not, and what is taken back.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import same
from pairs import ADAM, BATCHES, LAYOUTS, SGD, go, network, shards, spread
from ranks import agreed, assert_same_trajectory
from torch import Tensor, nn

from second_order import DHO2, MRDHO2, SecondOrderWarning
from second_order.fosi.trust import TrustRegion, largest_scale, newton_terms, stability_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

YES, NO = torch.tensor(True), torch.tensor(False)


# The rule, on a line: c is the gradient of ½ λ w², of which the model says û = 1.


def rolling(decay: float, gain: float, nesterov: bool, alpha: float, curvature: float) -> float:
    """|w| after 400 steps with momentum from w = 1."""
    w, momentum = 1.0, 0.0
    for _ in range(400):
        c = curvature * w
        momentum = decay * momentum + gain * c
        w -= alpha * (decay * momentum + gain * c if nesterov else momentum)
        if abs(w) > 1e12:
            return math.inf
    return abs(w)


@pytest.mark.parametrize(
    ("decay", "gain", "nesterov"),
    [(0.0, 1.0, False), (0.9, 0.1, False), (0.9, 1.0, False), (0.5, 0.5, True), (0.9, 1.0, True)],
)
def test_the_limit_is_that_of_stability(decay: float, gain: float, nesterov: bool) -> None:
    limit = stability_limit(decay, gain, nesterov)
    for alpha in (0.1, 1.0):
        assert rolling(decay, gain, nesterov, alpha, 0.98 * limit / alpha) < 1.0
        assert rolling(decay, gain, nesterov, alpha, 1.02 * limit / alpha) == math.inf


class Line:
    """Newton steps of a region in one direction of curvature û = 1."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.trust, self.alpha, self.last = TrustRegion.new(), alpha, torch.zeros(1).double()

    def step(self, c: float, sound: Tensor = YES, finite: Tensor = YES) -> tuple[float, bool]:
        """The way that is gone for a coefficient c, and whether the last step is undone."""
        coefficient = torch.tensor([c], dtype=torch.float64)
        terms = newton_terms(coefficient, coefficient, coefficient, self.last)
        verdict = self.trust.judge(terms, self.alpha, 2.0, sound, finite)
        undo = bool(verdict.undo)
        self.last = torch.zeros(1).double() if undo else self.alpha * verdict.share * coefficient
        return float(self.last), undo

    def run(self, curvature: float, w: float = 1.0, steps: int = 60) -> float:
        for _ in range(steps):
            w -= self.step(curvature * w)[0]
        return abs(w)


@pytest.mark.parametrize("curvature", [0.01, 1.0, 1.4])
def test_where_the_model_holds_steps_are_whole(curvature: float) -> None:
    line = Line()
    for step in range(30):
        c = curvature * (1 - curvature) ** step
        assert line.step(c) == (c, False)
    assert line.trust.scale == 1.0


@pytest.mark.parametrize("curvature", [1.8, 2.1, 5.0, 60.0])
def test_steps_come_to_rest_whatever_the_curvature(curvature: float) -> None:
    assert Line().run(curvature) < 1e-6
    assert rolling(0.0, 1.0, False, 1.0, 2.1) == math.inf


def test_after_a_cut_the_steps_grow_to_whole_ones_again() -> None:
    line = Line()
    line.run(20.0, steps=3)
    assert line.trust.scale < 0.1
    line.run(0.5, steps=80)
    assert line.trust.scale == 1.0


def test_noise_does_not_cut_short_steps_and_halves_whole_ones_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    for alpha, least in ((0.1, 1.0), (0.5, 0.6), (1.0, 0.3)):
        trust, w, last = TrustRegion.new(), torch.zeros(20).double(), torch.zeros(20).double()
        found = []
        for _ in range(300):
            c = w + torch.randn(20, generator=generator).double()
            verdict = trust.judge(newton_terms(c, c, c, last), alpha, 2.0, YES, YES)
            last = alpha * verdict.share * c
            w = w - last
            found.append(float(verdict.share))
            assert not verdict.undo
        assert sum(found) / len(found) >= least, alpha


def test_a_step_is_at_most_ten_times_as_long_as_usual() -> None:
    line = Line(alpha=0.1)
    for _ in range(20):
        line.step(1.0)
    way, undo = line.step(1e6)
    assert not undo
    assert way == pytest.approx(0.1 * 10.0)
    found = [line.step(1e6)[0] for _ in range(40)]
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(found[:5]))


@pytest.mark.parametrize("how", ["not finite", "thrown across"])
def test_a_step_that_explodes_is_undone_once(how: str) -> None:
    line = Line()
    line.step(1.0)
    before = line.trust.scale
    if how == "not finite":
        assert line.step(math.nan, sound=NO, finite=NO)[1]
        assert not line.step(math.nan, sound=NO, finite=NO)[1]
    else:
        assert line.step(-1e6)[1]
        assert not line.step(1.0)[1]
    assert line.trust.scale <= 0.11 * before
    assert int(line.trust.undone) == 1
    assert bool(line.trust.numbers.isfinite().all())


def test_new_pairs_get_twice_the_trust_unless_the_loss_has_risen() -> None:
    for risen, factor in ((False, 2.0), (True, 1.0)):
        line = Line()
        line.run(20.0, steps=3)
        before, usual = line.trust.scale, float(line.trust.numbers[0])
        line.trust.renewed(risen=risen)
        assert line.trust.scale == pytest.approx(factor * before)
        assert line.trust.numbers.tolist()[2:] == [0.0, 0.0]
        assert float(line.trust.numbers[0]) == usual
    for _ in range(10):
        line.trust.renewed(risen=False)
    assert line.trust.scale == 1.0


def test_the_largest_scale_is_that_of_any_group() -> None:
    assert largest_scale([0.1, -0.3]) == 0.3
    found = largest_scale([torch.tensor(0.1), -0.3, torch.tensor(-0.2)])
    assert isinstance(found, Tensor)
    assert float(found) == pytest.approx(0.3)


# Quadratics.


def rotated(values: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator).double())
    return Q @ torch.diag(values) @ Q.T


def descend(
    H: Tensor, seen: Tensor, steps: int, parts: int = 1, sign: float = 1.0, **options: Any
) -> tuple[list[Tensor], DHO2]:
    """The points of ½ xᵀHx; the curvature batch says ½ xᵀ ``seen`` x. A group for each part."""
    xs = [nn.Parameter(part.clone()) for part in torch.ones(len(H)).double().chunk(parts)]

    def loss(of: Tensor) -> Tensor:
        x = torch.cat(list(xs))
        return sign * 0.5 * x @ of @ x

    options = {"lr": 1e-3, "warmup_steps": 0, "newton_scale": 1.0, "lanczos_tol": 1e-9, **options}
    optimizer = DHO2([{"params": [x]} for x in xs], curvature_closure=lambda: loss(seen), **options)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss(H).backward()
        optimizer.step()
        found.append(torch.cat([x.detach() for x in xs]))
    return found, optimizer


VALUES = torch.tensor([40.0, 30.0, 20.0, 10.0, 1.0, 0.5, 0.2, 0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"newton_scale": 0.5, "momentum": 0.9, "curvature_interval": 7},
        {"base": ADAM, "lr": 0.01, "subspace_momentum": 0.0, "smallest": 2},
        {"parts": 3, "momentum": 0.9, "nesterov": True, "subspace_momentum": "base"},
        {"maximize": True, "sign": -1.0},
    ],
    ids=str,
)
def test_on_a_quadratic_it_does_not_bind(options: dict[str, Any]) -> None:
    H = rotated(VALUES, 0)
    options = {"largest": 4, **options}
    found, optimizer = descend(H, H, 40, **options)
    plain, _ = descend(H, H, 40, **options, trust_region=False)
    assert same(found, plain)
    statistics = optimizer.statistics()
    assert statistics["trust_scale"] == 1.0
    assert statistics["undone"] == 0.0
    assert 0.0 < statistics["trust_radius"] < math.inf


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("options", [{}, {"parts": 3}, {"maximize": True, "sign": -1.0}], ids=str)
def test_with_wrong_pairs_of_a_quadratic_it_converges(
    options: dict[str, Any], turned: bool, momentum: float
) -> None:
    """Curvature 50 times what the pairs tell, or in other directions."""
    H = rotated(VALUES, 0)
    seen = rotated(VALUES.flip(0), 1) if turned else H / 50.0
    steps = {**options, "largest": 6, "curvature_interval": 10_000, "momentum": momentum}
    steps |= {"lr": 0.01, "subspace_momentum": "base"}

    def loss(points: list[Tensor]) -> float:
        return float(0.5 * points[-1] @ H @ points[-1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        plain, _ = descend(H, seen, 400, **steps, trust_region=False)
        found, optimizer = descend(H, seen, 400, **steps)
    start = float(0.5 * H.sum())
    assert not loss(plain) < 1e6 * start
    assert loss(found) < 1e-2 * start
    assert optimizer.statistics()["trust_scale"] < 1.0

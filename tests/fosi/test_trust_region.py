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
from dho2_training import ADAM, BATCHES, LAYOUTS, go, network, shards, spread
from optimizer_cases import same
from ranks import agreed, assert_same_trajectory
from torch import Tensor, nn

from second_order import DHO2, SecondOrderWarning
from second_order.fosi.subspace import (
    MomentumRule,
    NewtonStep,
    TrustState,
    bound_step,
    compiled_on_devices,
    propose_step,
)

if TYPE_CHECKING:
    from pool import World

# The rule, on a line: c is the gradient of ½ λ w², of which the model says û = 1.


def rolling(decay: float, gain: float, nesterov: bool, alpha: float, curvature: float) -> float:
    """|w| after 400 steps with momentum from w = 1."""
    w = 1.0
    momentum = 0.0
    for _ in range(400):
        c = curvature * w
        momentum = decay * momentum + gain * c
        w -= alpha * (decay * momentum + gain * c if nesterov else momentum)
        if abs(w) > 1e12:
            return math.inf
    return abs(w)


class Line:
    """Newton steps of a region in one direction of curvature û = 1."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha
        none = torch.zeros(1).double()
        self.newton = NewtonStep(none, none, none, none, TrustState().to_tensor(none))

    @property
    def state(self) -> TrustState:
        return TrustState(*self.newton.trust.tolist())

    def step(self, c: float) -> tuple[float, bool]:
        """The way that is gone for a coefficient c, and whether the last step is undone."""
        coefficient = torch.tensor([c]).double()
        rule = MomentumRule(0.0, 1.0, nesterov=False)
        proposal = propose_step(coefficient, self.newton, torch.ones(1).double(), rule)
        self.newton, undo = bound_step(proposal.products, proposal, self.newton, self.alpha, 2.0)
        return float(self.alpha * self.newton.step), bool(undo)

    def run(self, curvature: float, w: float = 1.0, steps: int = 60) -> float:
        for _ in range(steps):
            w -= self.step(curvature * w)[0]
        return abs(w)


@pytest.mark.parametrize("curvature", [1.8, 2.1, 5.0, 60.0])
def test_steps_converge_for_any_curvature(curvature: float) -> None:
    assert Line().run(curvature) < 1e-6
    assert rolling(0.0, 1.0, False, 1.0, 2.1) > 1e12


def test_a_step_is_at_most_ten_times_the_usual_length() -> None:
    line = Line(alpha=0.1)
    for _ in range(20):
        line.step(1.0)
    way, undo = line.step(1e6)
    assert not undo
    assert way == pytest.approx(0.1 * 10.0)
    found = [line.step(1e6)[0] for _ in range(40)]
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(found[:5]))


@pytest.mark.parametrize("how", ["not finite", "thrown across"])
def test_a_step_that_explodes_is_rejected_once(how: str) -> None:
    line = Line()
    way, _ = line.step(1.0)
    before = line.state.scale
    back, reverted_steps = line.step(math.nan if how == "not finite" else -1e6)
    assert reverted_steps
    assert back == pytest.approx(-way)
    assert line.step(math.nan if how == "not finite" else 1.0)[1] is False
    assert line.state.scale <= 0.11 * before
    assert line.state.rejected == 1
    assert bool(line.newton.trust.isfinite().all())


def test_the_rule_is_compiled_on_devices_with_an_eager_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def doubled(x: Tensor) -> Tensor:
        calls.append("as it is")
        return 2.0 * x

    def fails(_: Any) -> Any:
        def compiled(x: Tensor) -> Tensor:
            calls.append("compiled")
            raise RuntimeError("no compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    function = compiled_on_devices(doubled)
    assert float(function(torch.ones(1))) == 2.0
    assert calls == ["as it is"]
    for _ in range(2):
        assert function(torch.empty(3, device="meta")).shape == (3,)
    assert calls == ["as it is", "compiled", "as it is", "as it is"], "it is tried once"


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
        {"base": ADAM, "lr": 0.01, "subspace_momentum": 0.0, "num_smallest": 2},
        {"parts": 3, "momentum": 0.9, "nesterov": True, "subspace_momentum": "base"},
        {"maximize": True, "sign": -1.0},
    ],
    ids=str,
)
def test_the_trust_region_does_not_bind_on_a_quadratic(options: dict[str, Any]) -> None:
    H = rotated(VALUES, 0)
    options = {"num_largest": 4, "curvature_interval": 10_000, **options}  # not by the clock
    found, optimizer = descend(H, H, 40, **options)
    plain, _ = descend(H, H, 40, **options, trust_region=False)
    assert same(found, plain)
    metrics = optimizer.metrics()
    assert metrics["trust_scale"] == 1.0
    assert metrics["rejected"] == 0.0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("options", "momentum"),
    [({}, 0.0), ({}, 0.9), ({"parts": 3}, 0.9), ({"maximize": True, "sign": -1.0}, 0.0)],
    ids=str,
)
def test_training_converges_with_wrong_eigenpairs_of_a_quadratic(
    options: dict[str, Any], turned: bool, momentum: float
) -> None:
    """Curvature 50 times that of the pairs, or in other directions."""
    H = rotated(VALUES, 0)
    seen = rotated(VALUES.flip(0), 1) if turned else H / 50.0
    steps = {**options, "num_largest": 6, "curvature_interval": 10_000, "momentum": momentum}
    steps |= {"lr": 0.01, "subspace_momentum": "base"}

    def loss(points: list[Tensor]) -> float:
        return float(0.5 * points[-1] @ H @ points[-1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        plain, _ = descend(H, seen, 100, **steps, trust_region=False)
        found, optimizer = descend(H, seen, 400, **steps)
    start = float(0.5 * H.sum())
    assert not loss(plain) < 1e6 * start
    assert loss(found) < 1e-2 * start
    assert optimizer.metrics()["trust_scale"] < 1.0


# Networks, and processes.

LONG: dict[str, Any] = {"newton_scale": 20.0, "momentum": 0.0, "subspace_momentum": 0.0}
# refreshes are at steps 2 and 6
POISONED = 4
STEPS = 8


def bounded(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    model = network()
    optimizer = spread(model, rank, world_size, **{**LONG, **options})
    found = go(model, optimizer, shards(BATCHES[:STEPS], rank, world_size))
    return found, optimizer.metrics()["trust_scale"]


def test_all_processes_bound_their_steps_equally(world: World) -> None:
    found, scale = bounded(0, 1, {})
    assert scale < 0.5
    plain, _ = bounded(0, 1, {"trust_region": False})
    assert not float((found[-1] - plain[-1]).norm()) < 1.0
    for layout, processes in (("row", 3), ("column", 2)):
        results = world.run(bounded, processes, {"layout": layout})
        assert_same_trajectory(agreed([r[0] for r in results]), found, rtol=1e-7)
        assert [r[1] for r in results] == pytest.approx([scale] * processes)


def poisoned(
    rank: int, world_size: int, options: dict[str, Any], steps: int = STEPS
) -> tuple[list[Tensor], float]:
    """A gradient of the last rank is not finite at a step after a Newton step.

    Also returns how many steps have been taken back.
    """
    model = network()
    found = []
    optimizer = spread(model, rank, world_size, **{"newton_scale": 0.3, **options})
    for step, batch in enumerate(shards(BATCHES[:steps], rank, world_size)):

        def spoil(gradient: Tensor, step: int = step) -> Tensor:
            spoils = step == POISONED and rank == world_size - 1
            return gradient * math.nan if spoils else gradient

        handle = next(model.parameters()).register_hook(spoil)
        found += go(model, optimizer, [batch])
        handle.remove()
    return found, optimizer.metrics()["rejected"]


def without_the_last(step: int) -> float:
    return 0.0 if step == POISONED - 1 else 0.3


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_step_to_a_non_finite_gradient_is_rejected(world: World, layout: str | None) -> None:
    options: dict[str, Any] = {"lr": 0.1}
    if layout is not None:
        options["layout"] = layout
        results = world.run(poisoned, 2, options)
    else:
        results = [poisoned(0, 1, options)]
    found = agreed([r[0] for r in results])
    assert all(bool(w.isfinite().all()) for w in found)
    expected, _ = poisoned(0, 1, {**options, "newton_scale": without_the_last}, POISONED)
    torch.testing.assert_close(found[POISONED], expected[-1], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found[POISONED - 1], expected[-1], rtol=1e-9)
    assert not torch.equal(found[-1], found[-2])
    assert all(reverted_steps == 1 for _, reverted_steps in results)
    if layout is None:
        plain, _ = poisoned(0, 1, {**options, "trust_region": False})
        assert not bool(plain[-1].isfinite().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_non_finite_element_does_not_reach_the_others(world: World, layout: str) -> None:
    """Without the trust region, the base steps the gradient as it is."""
    options = {"lr": 0.1, "layout": layout, "trust_region": False}
    for results in (world.run(one_element, 2, options), [one_element(0, 1, options)]):
        for finite in results:
            assert finite.sum() == len(finite) - 1


def one_element(rank: int, world_size: int, options: dict[str, Any]) -> Tensor:
    """Which elements of the parameters are finite after a step with one gradient that is not."""
    model = network()
    optimizer = spread(model, rank, world_size, **options)
    batches = list(shards(BATCHES[:5], rank, world_size))
    go(model, optimizer, batches[:4])
    assert optimizer.metrics()["pairs"] > 0

    def spoil(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = math.nan
        return spoiled

    handle = next(model.parameters()).register_hook(spoil)
    found = go(model, optimizer, batches[4:])
    handle.remove()
    return found[-1].isfinite()


# State.


def test_a_run_resumed_while_the_trust_region_binds_is_equal_bit_for_bit() -> None:
    model = network()
    optimizer = spread(model, 0, 1, **LONG)
    go(model, optimizer, BATCHES[:5])
    assert optimizer.metrics()["trust_scale"] < 1.0
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer)
    twin = network(seed=5)
    other = spread(twin, 0, 1, **LONG)
    twin.load_state_dict(weights)
    other.load_state_dict(copy.deepcopy(state))
    steps = [each._curvature.subspace.newton.full_step for each in (optimizer, other)]
    assert bool(steps[0].abs().max() > 0)  # so that the next step can measure this one
    assert torch.equal(*steps)
    assert same(go(model, optimizer, BATCHES[5:10]), go(twin, other, BATCHES[5:10]))
    assert other.metrics() == {**optimizer.metrics(), **timings(other)}


def timings(optimizer: DHO2) -> dict[str, float]:
    """The counters that restart in a resumed run."""
    restarted = "seconds", "bytes", "total", "lanczos", "refresh", "failed"
    return {k: v for k, v in optimizer.metrics().items() if k.startswith(restarted)}


def test_a_checkpoint_with_a_non_finite_trust_region_raises() -> None:
    model = network()
    optimizer = spread(model, 0, 1, **LONG)
    go(model, optimizer, BATCHES[:5])
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["curvature"]["trust_region"][1] = math.nan
    with pytest.raises(ValueError, match=r"trust_region.*is not finite"):
        optimizer.load_state_dict(state)

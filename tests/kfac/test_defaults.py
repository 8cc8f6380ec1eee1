"""Defaults that follow what the optimizer can see: the base, and the examples in a batch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import each_kronecker, make, take
from hypothesis import given
from hypothesis import strategies as st
from models import ZOO
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adam,
    AdamW,
    Muon,
    RMSprop,
)

import second_order
from second_order import KAISA, DistKFAC, PerStep
from second_order.kfac.precondition import bound_for
from second_order.kfac.schedule import past_at
from second_order.options import is_adaptive

if TYPE_CHECKING:
    from pool import World

    from second_order import SecondOrderOptimizer


def options_of(optimizer: SecondOrderOptimizer) -> Any:
    return optimizer._curvature._options  # type: ignore[attr-defined]


@each_kronecker
def test_defaults_follow_the_base(System: type[KAISA]) -> None:
    model = nn.Linear(3, 2)
    for base in (Adadelta, Adafactor, Muon, RMSprop):
        assert is_adaptive(base)
        assert is_adaptive(type("Mine", (base,), {}))
    assert not is_adaptive(torch.optim.ASGD)
    plain, adaptive = (options_of(System(model, lr=0.1, base=base)) for base in (SGD, AdamW))
    assert (plain.damping, plain.kl_clip, plain.factor_decay) == (0.5, "auto", PerStep(0.995))
    assert (adaptive.damping, adaptive.kl_clip) == (0.1, None)
    assert adaptive.factor_decay == PerStep(0.978, share=1 / 3)
    given = {"damping": 1.0, "kl_clip": 1e-3, "factor_decay": 0.5}
    said = options_of(System(model, lr=0.1, base=AdamW, **given))
    assert {name: getattr(said, name) for name in given} == given


def test_of_two_bases_the_first_is_asked() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert options_of(KAISA(model, lr=0.1, base=Muon, rest=SGD)).damping == 0.1
    assert options_of(KAISA(model, lr=0.1, base=SGD, rest=AdamW)).damping == 0.5


@pytest.mark.parametrize(("examples", "bound"), [(64, 1e-4), (256, 8e-4), (16, 1.25e-5)])
def test_the_bound_grows_with_the_batch(examples: float, bound: float) -> None:
    assert float(bound_for(torch.tensor(examples).double())) == pytest.approx(bound, rel=1e-12)


def test_where_the_batch_is_unknown_it_is_the_usual_one() -> None:
    assert float(bound_for(torch.tensor(0.0).double())) == pytest.approx(1e-4, rel=1e-12)


def model_and_batch(examples: int) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(examples, 6, generator=generator, dtype=torch.float64)
    return model, x, torch.randint(3, (examples,), generator=generator)


EXACT: dict[str, Any] = {
    "lr": 1.0,
    "factor_dtype": torch.float64,
    "inv_dtype": torch.float64,
    "damping": 1e-3,
}


def stepped(
    System: Any, x: Tensor, y: Tensor, model: nn.Module, parts: int = 1, **options: Any
) -> list[Tensor]:
    """The gradients that the base gets at the second of two steps."""
    optimizer = System(model, **{**EXACT, **options})
    for _ in range(2):
        optimizer.zero_grad()
        for each_x, each_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = nn.functional.cross_entropy(model(each_x), each_y) / parts
            loss.backward()
        optimizer.step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@each_kronecker
@pytest.mark.parametrize("examples", [8, 64, 200])
def test_auto_is_the_number_for_the_batch(System: type[KAISA], examples: int) -> None:
    """Also where the batch comes in parts. The clip binds: lr is huge."""
    model, x, y = model_and_batch(examples)
    bound = 1e-4 * (examples / 64) ** 1.5
    auto = stepped(System, x, y, copy.deepcopy(model))
    told = stepped(System, x, y, copy.deepcopy(model), kl_clip=bound)
    other = stepped(System, x, y, copy.deepcopy(model), kl_clip=2 * bound)
    for ours, expected, wrong in zip(auto, told, other, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-14)
        assert not torch.allclose(ours, wrong, rtol=1e-2)
    if examples % 4 == 0:
        for ours, expected in zip(stepped(System, x, y, model, 4), told, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-12)


def on_ranks(rank: int, world_size: int, system: str, options: dict[str, Any]) -> list[Tensor]:
    model, x, y = model_and_batch(96)
    part = slice(rank * 96 // world_size, (rank + 1) * 96 // world_size)
    return stepped(getattr(second_order, system), x[part], y[part], model, **options)


@pytest.mark.parametrize("system", ["KAISA", "DPKFAC", "DistKFAC"])
def test_the_batch_is_that_of_all_ranks(world: World, system: str) -> None:
    """Also DPKFAC's, whose factors are of one rank's part."""
    told = {"kl_clip": 1e-4 * (96 / 64) ** 1.5}
    for ours, expected in zip(
        world.run(on_ranks, 2, system, {}), world.run(on_ranks, 2, system, told), strict=True
    ):
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)


def with_a_stats_worker(rank: int, world_size: int) -> list[Tensor] | None:
    """Owners alone hear of the statistics; batches of other sizes than the training's."""
    model, x, y = model_and_batch(96)
    optimizer = DistKFAC(model, **EXACT, stats_workers=1, async_inverse=False, exact_blocks=False)
    loss = nn.functional.cross_entropy
    with optimizer:
        if optimizer.role == "stats":
            optimizer.serve([(x, y)], lambda batch: loss(model(batch[0]), batch[1]))
            return None
        for _ in range(30):
            optimizer.zero_grad()
            part = slice(rank * 8, rank * 8 + 8)
            loss(model(x[part]), y[part]).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]


def test_with_stats_workers_all_clip_alike(world: World) -> None:
    first, second, _ = world.run(with_a_stats_worker, 3)
    assert first is not None
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


class Experts(nn.Module):
    """A layer that sees one row of a batch, beside others that see all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        result: Tensor = self.last(torch.cat([h[:-1], torch.tanh(self.rare(h[-1:]))]))
        return result


@each_kronecker
def test_a_layer_that_sees_little_does_not_shorten_all_steps(System: type[KAISA]) -> None:
    torch.manual_seed(0)
    model = Experts().double()
    _, x, y = model_and_batch(64)
    auto = stepped(System, x, y, copy.deepcopy(model))
    told = stepped(System, x, y, copy.deepcopy(model), kl_clip=1e-4)
    for ours, expected in zip(auto, told, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-13)


def test_a_short_batch_is_one_of_many() -> None:
    model, x, y = model_and_batch(64)
    optimizer = KAISA(model, **EXACT, factor_update_steps=1, inv_update_steps=1)
    for examples in (64, 64, 64, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:examples]), y[:examples]).backward()
        optimizer.step()
    found = float(optimizer.state_dict()["state"][0]["curvature"]["examples"])
    assert found == pytest.approx(
        (64 + 64 * 0.995 + 64 * 0.995**2 + 64 * 0.995**3 - 63) / (1 + 0.995 + 0.995**2 + 0.995**3)
    )


@each_kronecker
def test_the_number_of_examples_is_in_checkpoints(System: type[KAISA]) -> None:
    """A resumed run clips as one that was never stopped, before statistics come again."""
    model, x, y = model_and_batch(200)
    rare = {"factor_update_steps": 50, "inv_update_steps": 1}

    def take(model: nn.Module, optimizer: SecondOrderOptimizer) -> Tensor:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    optimizer = System(model, **{**EXACT, **rare})
    take(model, optimizer)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    older = copy.deepcopy(saved)
    for entry in older["state"].values():
        entry["curvature"].pop("examples", None)
    expected = take(model, optimizer)
    found = []
    for state in (saved, older):
        model.load_state_dict(weights)
        resumed = copy.deepcopy(model)
        fresh = System(resumed, **{**EXACT, **rare})
        fresh.load_state_dict(state)
        found.append(take(resumed, fresh))
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-13)
    assert not torch.allclose(found[1], expected, rtol=1e-4)  # an older one has the usual batch


def test_factors_remember_steps_whatever_the_interval() -> None:
    assert past_at(PerStep(0.95), 1, 0) == 0.95
    assert past_at(PerStep(0.95), 10, 10) == pytest.approx(0.95**10)
    model, x, y = model_and_batch(20)
    weights = []
    for every in (1, 5):
        torch.manual_seed(0)
        of = copy.deepcopy(model)
        quick = {"factor_update_steps": every, "inv_update_steps": 5}
        optimizer = KAISA(of, **{**EXACT, **quick})
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(of(x), y).backward()
            optimizer.step()
        weights.append(float(optimizer.state_dict()["state"][0]["curvature"]["average_weight"]))
    assert weights[0] == pytest.approx(sum(0.995**k for k in range(6)))
    assert weights[1] == pytest.approx(1 + 0.995**5)


@pytest.mark.parametrize("fields", [{"decay": 1.0}, {"decay": 0.9, "share": 1.5}])
def test_a_memory_in_steps_has_bounds(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=list(fields)[-1]):
        PerStep(**fields)


def test_a_young_training_remembers_a_share_of_its_steps() -> None:
    memory = PerStep(0.978, share=1 / 3)
    assert past_at(memory, 1, 0) == past_at(memory, 1, 6) == 0.5
    assert past_at(memory, 1, 30) == pytest.approx(0.9)
    assert past_at(memory, 5, 30) == pytest.approx(0.9**5)
    assert past_at(memory, 10, 10_000) == pytest.approx(0.978**10)
    model, x, y = model_and_batch(20)
    optimizer = KAISA(model, lr=1e-3, base=AdamW, inv_update_steps=1)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    weight = float(optimizer.state_dict()["state"][0]["curvature"]["average_weight"])
    assert weight == pytest.approx(1 + 0.5 + 0.25 + 0.125)


NAMES = "mlp", "conv", "embedding", "norms", "transformer"


def preconditioned(System: Any, name: str, scale: str, **options: Any) -> Any:
    """An optimizer whose last step has left preconditioned gradients, and its model."""
    case = ZOO[name]
    model = case.model()
    approx = {"kfac_approx": case.shared} if case.shared else {}
    chosen = {"preconditioner_scale": scale, "exact_blocks": True, **approx, **options}
    optimizer = make(System, model, lr=0.0, **chosen)
    for batch in case.batches(2, n=8):
        take(model, optimizer, batch, case.loss)
    return optimizer


@given(
    name=st.sampled_from(NAMES),
    solver=st.sampled_from(["eigen", "inverse"]),
    relative=st.booleans(),
    damping=st.floats(0.01, 10.0),
)
@each_kronecker
def test_the_gradients_scale_is_newtons_times_the_mean_damped_curvature(
    System: type[SecondOrderOptimizer], name: str, solver: str, relative: bool, damping: float
) -> None:
    options = {"solver": solver, "relative_damping": relative, "damping": damping}
    newton, scaled = (preconditioned(System, name, s, **options) for s in ("newton", "gradient"))
    blocks: Any = [each._curvature.layers.active for each in (newton, scaled)]
    assert blocks[0]
    for plain, other in zip(*blocks, strict=True):
        mean = plain.ensure_factors().mean_curvature()
        assert mean > 0
        times_mean = mean + damping * (mean if relative else 1.0)
        for p, q in zip(plain.params, other.params, strict=True):
            torch.testing.assert_close(q.grad, p.grad * times_mean, rtol=1e-9, atol=1e-14)


@each_kronecker
def test_auto_follows_the_base(System: type[SecondOrderOptimizer]) -> None:
    for base, expected in ((SGD, "newton"), (Adam, "gradient"), (AdamW, "gradient")):
        optimizer: Any = System(ZOO["mlp"].model(), base=base, lr=0.1)
        assert optimizer._curvature._options.preconditioner_scale == expected
    optimizer = System(ZOO["mlp"].model(), base=RMSprop, lr=0.1, preconditioner_scale="newton")
    assert optimizer._curvature._options.preconditioner_scale == "newton"

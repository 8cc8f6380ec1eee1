"""Torch's own tools around an optimizer: each run ends like the plain run."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_training import (
    BATCHES,
    CASE,
    assert_trained,
    loss_of,
    optimizer_of,
    trainable,
    trained,
    trained_by_base,
    usual_loop,
)
from models import ZOO
from optimizer_cases import each_of_five
from ranks import shard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def assert_as_plain(System: Any, found: Tensor, rtol: float = 1e-10, **plain: Any) -> None:
    """Raise unless parameters are those of the plain run on the small network."""
    build = plain.pop("build", CASE.model)
    assert_trained(
        found,
        trained(System, build(), **plain),
        trained_by_base(System, build(), **plain),
        start=trainable(build()),
        rtol=rtol,
    )


@pytest.mark.works("accumulation")
@each_of_five
def test_accumulated_halves_equal_whole_batches(System: Any) -> None:
    """Halves of a batch are the batch; its size is found out."""
    halves = [shard(batch, half, 2) for batch in BATCHES for half in (0, 1)]
    assert_as_plain(System, trained(System, CASE.model(), halves, accumulate=2), 1e-9)


@pytest.mark.works("gradient clipping")
@each_of_five
def test_gradients_are_clipped_before_they_are_preconditioned(System: Any) -> None:
    """Clipping scales the gradient, and so the preconditioned gradient."""
    largest = 0.1
    model = CASE.model()
    alone = CASE.model()
    optimizer = optimizer_of(System, model)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))  # type: ignore[arg-type]
        assert norm > largest
        for p in model.parameters():
            p.grad *= largest / (norm + 1e-6)
        optimizer.step()
    found = trained(System, CASE.model(), clip=largest)
    by_base = trained_by_base(System, alone, clip=largest)
    assert_trained(found, trainable(model), by_base, start=trainable(CASE.model()), rtol=1e-9)


class ByHand:
    """The cosine, written down."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        cosine = torch.cos(torch.tensor(torch.pi * self.steps / 6, dtype=torch.float64))
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * float(1 + cosine) / 2


@pytest.mark.works("schedulers")
@each_of_five
def test_a_scheduler_equals_rates_that_are_set_by_hand(System: Any) -> None:
    found = trained(System, CASE.model(), schedule=lambda o: CosineAnnealingLR(o, 6))
    assert_as_plain(System, found, schedule=ByHand)


@pytest.mark.works("checkpoint")
@each_of_five
def test_a_resumed_run_equals_the_whole_run(System: Any) -> None:
    """A new model and a new optimizer load the file with torch's safe defaults."""
    options = {"base": torch.optim.Adam, "lr": 0.01}
    model = CASE.model()
    optimizer = optimizer_of(System, model, **options)
    usual_loop(model, optimizer, BATCHES[:3])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    model = CASE.model(seed=1)
    model.load_state_dict(saved["model"])
    optimizer = optimizer_of(System, model, **options)
    optimizer.load_state_dict(saved["optimizer"])
    usual_loop(model, optimizer, BATCHES[3:])
    assert_as_plain(System, trainable(model), options=options)


@pytest.mark.works("activation checkpointing")
@each_of_five
def test_activation_checkpointing_changes_nothing(System: Any) -> None:
    found = trained(System, ZOO["checkpointed_nonreentrant"].model())
    assert_as_plain(System, found, build=ZOO["checkpointed_plain"].model)


class Fixed(nn.Module):
    """A Linear whose weights are not parameters."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach())
        self.register_buffer("bias", layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Adapted(nn.Module):
    """A frozen layer with two low-rank layers."""

    def __init__(self, layer: nn.Module, width_in: int, width_out: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(width_in, 2, bias=False).double()
        self.up = nn.Linear(2, width_out, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_frozen(fixed: bool) -> nn.Module:
    model: Any = CASE.model()
    if fixed:
        model[2] = Fixed(model[2])
    else:
        model[2].requires_grad_(False)
    return model


def with_adapters(fixed: bool) -> nn.Module:
    model: Any = CASE.model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for i, (width_in, width_out) in {0: (5, 7), 2: (7, 6)}.items():
            layer = Fixed(model[i]) if fixed else model[i].requires_grad_(False)
            model[i] = Adapted(layer, width_in, width_out)
    return model


@pytest.mark.works("frozen layers")
@each_of_five
def test_a_frozen_layer_equals_a_layer_without_parameters(System: Any) -> None:
    model = with_frozen(fixed=False)
    found = trained(System, model)
    assert_as_plain(System, found, build=lambda: with_frozen(fixed=True))
    assert all(torch.equal(*pair) for pair in zip(*_second(model, CASE.model()), strict=True))


def _second(*models: Any) -> list[Any]:
    return [list(model[2].parameters()) for model in models]


@pytest.mark.works("LoRA")
@each_of_five
def test_adapters_train_beneath_frozen_layers(System: Any) -> None:
    found = trained(System, with_adapters(fixed=False))
    assert_as_plain(System, found, build=lambda: with_adapters(fixed=True))


def in_float32() -> nn.Module:
    return CASE.model(torch.float32)


@pytest.mark.works("AMP bfloat16")
@each_of_five
def test_bfloat16_autocast_stays_near_float32(System: Any) -> None:
    """Three digits of each product: the way is the plain one's to some per cent of its length."""
    found = trained(System, in_float32(), autocast=torch.bfloat16)
    usual = trained(System, in_float32())
    alone = trained_by_base(System, in_float32())
    way = float((usual - trainable(in_float32())).norm())
    assert 0 < float((found - usual).norm()) < 0.05 * way
    assert float((found - alone).norm()) > 3 * float((found - usual).norm())


@pytest.mark.works("AMP float16")
@each_of_five
def test_a_grad_scaler_changes_nothing_under_float16_autocast(System: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model = in_float32()
    optimizer = optimizer_of(System, model, grad_scaler=scaler)
    for batch in BATCHES:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_as_plain(System, trainable(model), 1e-3, build=in_float32, autocast=torch.float16)


@pytest.mark.works("compile")
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("System", [MRDHO2])  # for the others: test_contract_steps_compiled.py
def test_a_compiled_model_trains_like_an_eager_one(System: Any) -> None:
    model = CASE.model()
    compiled = torch.compile(model, backend="aot_eager")
    usual_loop(compiled, optimizer_of(System, model), BATCHES)
    assert_as_plain(System, trainable(model), 1e-9)


def under_ddp(rank: int, world_size: int, System: Any) -> Tensor:
    """DPKFAC takes a layer's statistics from its owner's batch, so that all have the same one."""
    whole = System is DPKFAC
    batches = [batch if whole else shard(batch, rank, world_size) for batch in BATCHES]
    model = CASE.model(seed=rank)  # the first process's counts
    wrapped = DistributedDataParallel(model)
    usual_loop(wrapped, optimizer_of(System, wrapped), batches)
    return trainable(model)


@pytest.mark.works("DDP")
@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC, DHO2])
def test_ddp_equals_one_process(world: World, System: Any) -> None:
    first, second = world.run(under_ddp, 2, System)
    assert torch.equal(first, second)
    assert_as_plain(System, first, 1e-9)

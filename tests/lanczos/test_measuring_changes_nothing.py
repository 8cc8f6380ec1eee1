"""Measuring curvature during training does not change the training run.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from optimizer_cases import make, same, take
from ranks import shard, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2
from second_order.lanczos import eigenpairs

if TYPE_CHECKING:
    from pool import World

MODES = ["retained", "recomputed", "differences"]
MLP = ZOO["mlp"]
NORMED = ZOO["batch_norm"]


def test_training_steps_are_unchanged() -> None:
    """The whole of it: a model with dropout and batch norm, with and without curvature."""

    def trained(curvature: bool) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
        ).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in MLP.batches(4):
            take(model, optimizer, (x, y))
            if curvature:
                eigenpairs(lambda x=x, y=y: cross_entropy(model(x), y), model, largest=2)
        return model

    assert same(trained(True), trained(False))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fails_at", [None, 1, 3])
def test_measuring_does_not_change_training(mode: str, fails_at: int | None) -> None:
    """Of a closure with bad manners, whether it fails or not."""
    model = NORMED.model()
    (x, y) = NORMED.batch(8)
    model[-1].eval()
    (2 * cross_entropy(model(x), y)).backward()
    calls = 0

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        model.zero_grad(set_to_none=calls > 1)
        torch.rand(3)
        value = cross_entropy(model(x), y)
        value.backward(retain_graph=True)
        model[1].running_mean = torch.zeros(4, dtype=torch.float64)
        model.eval() if calls % 2 else model.train()
        if calls == fails_at:
            raise ZeroDivisionError
        return value

    gradients = [p.grad for p in model.parameters()]
    buffers = list(model.buffers())
    before = copy.deepcopy((model.state_dict(), gradients, [m.training for m in model.modules()]))
    random = torch.get_rng_state()
    fails = fails_at is not None and not (mode == "retained" and fails_at > 1)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), torch.no_grad():
        eigenpairs(loss, model, largest=2, hvp=mode)
        assert not torch.is_grad_enabled()
    assert calls >= (fails_at or 1) or mode == "retained"
    assert torch.equal(torch.get_rng_state(), random)
    assert not module._global_forward_pre_hooks
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(b is c for b, c in zip(model.buffers(), buffers, strict=True))
    state, values, training = before
    assert same([g for g in gradients if g is not None], [g for g in values if g is not None])
    assert same(state.values(), model.state_dict().values())
    assert [m.training for m in model.modules()] == training


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_buffers_of_compiled_modules_are_restored() -> None:
    """Compiled code calls modules unseen; and does not grow with what is seen."""
    model = NORMED.model()
    (x, y) = NORMED.batch(8)
    graphs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    outputs = torch.compile(lambda: model(x), backend=backend)
    before = copy.deepcopy(model)
    eigenpairs(lambda: cross_entropy(outputs(), y), model, largest=2, hvp="differences")
    assert same(model, before)
    assert graphs == 1


class TwoHeads(nn.Module):
    """The model's own and a copy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        *body, head = model
        self.body = nn.Sequential(*body)
        self.heads = nn.ModuleList([head, copy.deepcopy(head)])

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](self.body(x))


def ddp_training(
    rank: int, world_size: int, mode: str | None, options: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Parameters and buffers after three steps, with curvature wherever it could get in the way."""
    model = NORMED.model(seed=rank)
    other = ()
    if options.get("find_unused_parameters"):
        # curvature with the head that training does not use
        model = TwoHeads(model)
        other = (1,)
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def curvature() -> None:
        if mode is not None:
            loss = lambda: cross_entropy(ddp(x, *other), y)  # noqa: E731
            eigenpairs(loss, ddp, largest=1, iterations=3, hvp=mode)
            assert ddp.require_backward_grad_sync

    for batch in NORMED.batches(3, 8 * world_size):
        x, y = shard(batch, rank, world_size)
        curvature()
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x), y)
        curvature()
        assert ddp.require_forward_param_sync
        loss.backward()
        curvature()
        optimizer.step()
    return vector(ddp), list(ddp.buffers())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_measuring_does_not_change_ddp_training(
    world: World, mode: str, options: dict[str, Any]
) -> None:
    """Where the closure goes through DDP, whose reducer expects a backward pass per forward."""
    for (alone, its), (measured, buffers) in zip(
        world.run(ddp_training, 2, None, options),
        world.run(ddp_training, 2, mode, options),
        strict=True,
    ):
        assert torch.equal(alone, measured)
        assert same(its, buffers)


def settings() -> list[Any]:
    """What an evaluation changes in torch, and is to put back."""
    cuda = torch.backends.cuda
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return [
        *(torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), nesting),
        *(torch.is_autocast_cache_enabled(), torch.backends.cudnn.enabled),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        *(cuda.cudnn_sdp_enabled(), len(module._global_forward_pre_hooks)),
    ]


@pytest.mark.parametrize("mode", ["retained", "differences"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_in_the_closure_changes_nothing(mode: str, at: int) -> None:
    case = NORMED
    model = case.model()
    (x, y) = case.batch(6)
    params = list(model.parameters())
    buffers = list(model.buffers())
    options = {"num_largest": 1, "num_smallest": 0, "warmup_steps": 0, "hvp": mode}
    optimizer = make(DHO2, model, **options)
    calls = 0

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return cross_entropy(model(x), y)

    usual = settings()
    random = torch.get_rng_state()
    before = copy.deepcopy([*params, *buffers])
    expected = pytest.raises(KeyboardInterrupt)
    with expected if at == 1 or mode == "differences" else nullcontext():
        optimizer._curvature.refresh(loss)
    assert settings() == usual
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, [*params, *buffers], before))

"""Models with layers that cannot be preconditioned: they train, and a warning names them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from optimizer_cases import KRONECKER, SYSTEMS, asking, each_kronecker, each_system, make, noted
from ranks import agreed, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from second_order import DHO2, MRDHO2

if TYPE_CHECKING:
    from pool import World

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def warnings_of(System: Any, model: nn.Module, step: Any, **options: Any) -> list[str]:
    """The warnings of two steps. `step` computes the gradients."""
    with noted() as warned:
        options = {"warmup_steps": 0, **options} if System not in KRONECKER else options
        optimizer = System(model, lr=0.1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            step(model)
            more = {} if System in KRONECKER else asking(model, optimizer, (X, Y))
            before = vector(model)
            optimizer.step(**more)
            assert not torch.equal(vector(model), before), "nothing was trained"
    return warned


def backward(model: nn.Module) -> None:
    cross_entropy(model(X), Y).backward()


def by_func_grad(model: nn.Module) -> None:
    params = dict(model.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, values, (X,)), Y)

    for name, gradient in torch.func.grad(loss)(params).items():
        params[name].grad = gradient.detach()


def by_vmap(model: nn.Module) -> None:
    cross_entropy(torch.vmap(model)(X), Y).backward()


@each_kronecker
@pytest.mark.parametrize("step", [by_func_grad, by_vmap])
def test_function_transforms_raise_with_the_reason(System: Any, step: Any) -> None:
    (message,) = warnings_of(System, net(), step)
    assert "no layer gave statistics" in message
    assert "torch.func transforms (vmap, grad) hide gradients from layers' hooks" in message
    assert "torch.compile" not in message


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@each_system
@pytest.mark.parametrize("how", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
def test_scripted_modules_fall_back_with_a_warning(System: Any, how: Any) -> None:
    warnings_seen = warnings_of(System, nn.Sequential(how(net()), nn.Linear(3, 3)), backward)
    whole = warnings_of(System, how(net()), backward)
    if System not in KRONECKER:
        assert not [message for message in warnings_seen + whole if "torch.jit" in message]
        return
    assert len(warnings_seen) == len(whole) == 1
    for message, names in ((warnings_seen[0], ("0.0", "0.2")), (whole[0], ("0", "2"))):
        assert "without curvature" in message
        for name in names:
            assert f"{name} (" in message
        assert "torch.jit has compiled it and runs no hooks; train the plain module" in message


def flattened(rank: int, world_size: int) -> list[str]:
    messages = []
    for original in (False, True):
        inner = FullyShardedDataParallel(
            nn.Linear(5, 3), use_orig_params=original, device_id=torch.device("cpu")
        )
        model = nn.Sequential(nn.Linear(4, 5), inner)
        messages += [refusal(System, model) for System in [*SYSTEMS, MRDHO2]]
        if not original:
            messages.append(refusal(DHO2, inner.parameters()))
    return messages


def refusal(System: Any, params_or_model: Any) -> str:
    with pytest.raises(TypeError) as caught:
        System(params_or_model, lr=0.1)
    return str(caught.value)


@pytest.mark.refused(
    "FSDP1",
    *("KAISA", "DPKFAC", "DistKFAC", "DHO2", "MRDHO2"),
    message="the model is in FullyShardedDataParallel",
)
def test_fsdp1_parameters_raise_with_the_remedy(world: World) -> None:
    (messages,) = world.run(flattened, 1)
    for message in messages:
        assert re.search(
            "flatten.*FullyShardedDataParallel|FullyShardedDataParallel.*flatten", message
        )
        assert (
            "with torch.distributed.fsdp.fully_shard (FSDP2), or use DistributedDataParallel"
            in message
        )


class Spectral(nn.Module):
    """A Linear, then a complex weight of the module and a complex Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.modes = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        self.last = nn.Linear(5, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).to(torch.complex64) @ self.modes).abs()


@each_kronecker
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_complex_weights_fall_back_with_a_warning(System: Any, base: Any) -> None:
    model = Spectral()
    warned = warnings_of(System, model, backward, base=base, unsupported_layers="gradient_factors")
    assert len(warned) == 1
    assert (
        f"by {base.__name__} alone, without curvature: modes, last (Linear); summary" in warned[0]
    )


def frozen_for_a_while(rank: int, world_size: int, system: int) -> list[Tensor]:
    """All parameters are frozen for three steps, then train again."""
    model = net()
    optimizer = make(SYSTEMS[system], model)
    found = []
    for step in range(6):
        model.requires_grad_(not 1 <= step <= 3)
        optimizer.zero_grad()
        loss = cross_entropy(model(X[rank::world_size]), Y[rank::world_size])
        if loss.requires_grad:
            loss.backward()
        optimizer.step(**asking(model, optimizer, (X, Y)))
        found.append(vector(model))
    return found


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
@pytest.mark.parametrize("system", range(len(SYSTEMS)))
def test_all_layers_can_be_frozen_for_some_steps(world: World, system: int) -> None:
    found = agreed(world.run(frozen_for_a_while, 2, system))
    assert all(torch.equal(found[0], found[step]) for step in (1, 2, 3))
    assert not torch.equal(found[4], found[3])
    assert not torch.equal(found[5], found[4])

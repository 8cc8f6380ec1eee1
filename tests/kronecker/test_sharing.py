"""One A for layers that are fed by the same tensor (Ba et al. 2017, appendix C)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import KRONECKER, factors, make, take
from models import Attention
from ranks import kaisa, shard
from reference import cross_entropy, empirical_factors
from torch import Tensor, nn

from second_order import KAISA

if TYPE_CHECKING:
    from pool import World

WIDTH = 6


def train(model: Attention, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(4) % 3).backward()
        optimizer.step()


def averages(optimizer: Any) -> dict[str, Tensor]:
    return {block.name: block.factors.a for block in optimizer._curvature.layers.blocks}


@pytest.mark.parametrize("system", KRONECKER)
def test_one_tensor_is_one_a_and_changes_nothing(system: Any) -> None:
    runs = []
    for one_tensor in (True, False):
        torch.manual_seed(0)
        model = Attention()
        model.one_tensor = one_tensor
        optimizer = (
            system(model, lr=0.1, max_staleness=0)
            if system.__name__ == "DistKFAC"
            else (system(model, lr=0.1))
        )
        train(model, optimizer, range(12))
        found = averages(optimizer)
        distinct = {id(found[name]) for name in "qkv"}
        assert len(distinct) == (1 if one_tensor else 3)
        assert found["out"] is not found["q"]
        runs.append((model, optimizer))
    (model, optimizer), (other, other_optimizer) = runs
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    shared, apart = optimizer.summary().factor_bytes, other_optimizer.summary().factor_bytes
    assert shared == apart - 2 * averages(optimizer)["q"].nbytes


def test_inputs_that_part_have_an_a_each_again() -> None:
    runs = []
    for parting in (True, False):
        torch.manual_seed(0)
        model = Attention()
        model.one_tensor = parting
        optimizer = KRONECKER[0](model, lr=0.1)
        train(model, optimizer, range(6))
        model.one_tensor = False
        train(model, optimizer, range(6, 12))
        assert len({id(a) for a in averages(optimizer).values()}) == 4
        model.one_tensor = True
        train(model, optimizer, range(12, 18))
        assert len({id(a) for a in averages(optimizer).values()}) == 2
        runs.append(model)
    assert all(map(torch.equal, *(list(model.parameters()) for model in runs)))


def test_copies_and_checkpoints_keep_what_is_shared() -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = KRONECKER[0](model, lr=0.1)
    train(model, optimizer, range(6))
    copied_model, copied = copy.deepcopy((model, optimizer))
    torch.manual_seed(0)
    loaded_model = Attention()
    loaded = KRONECKER[0](loaded_model, lr=0.1)
    loaded_model.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    train(copied_model, copied, range(6, 9))
    train(loaded_model, loaded, range(6, 9))
    train(model, optimizer, range(6, 9))
    for each in (optimizer, copied, loaded):
        found = averages(each)
        assert len({id(found[name]) for name in "qkv"}) == 1
    assert all(map(torch.equal, model.parameters(), copied_model.parameters()))
    assert all(map(torch.equal, averages(optimizer).values(), averages(loaded).values()))


class SomeBiases(nn.Module):
    """As Whisper's attention: no bias for the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=b) for b in (True, False, True))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.q(x) * torch.tanh(self.k(x)) + self.v(x)).tanh())


def test_layers_of_one_input_with_and_without_a_bias() -> None:
    model = SomeBiases().double()
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    names = ("q", "k", "v", "head")
    expected = {n: empirical_factors(model, *batch, cross_entropy, n) for n in names}
    optimizer = make(KAISA, model, lr=0.0)
    take(model, optimizer, batch)
    for name, pair in factors(optimizer).items():
        for found, right in zip(pair, expected[name], strict=True):
            torch.testing.assert_close(found, right)


class Meeting(nn.Module):
    """Two layers whose inputs are one only when they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.together = nn.Linear(4, 3), nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x if self.together else x.sin())


def test_layers_that_come_together_keep_their_own_pasts() -> None:
    model = Meeting().double()
    optimizer = make(KAISA, model, lr=0.0, factor_decay=0.5)
    expected: dict[str, Tensor] = {}
    for step, weight in enumerate((1.0, 2.0 / 3.0)):
        model.together = step == 1
        x = torch.randn(6, 4, dtype=torch.float64)
        take(model, optimizer, (x, torch.randint(3, (6,))))
        for name, inputs in {"a": x, "b": x if model.together else x.sin()}.items():
            rows = torch.cat([inputs, torch.ones(6, 1, dtype=torch.float64)], 1)
            new = (rows.T @ rows / 6).unsqueeze(0)
            old = expected.get(name, torch.zeros_like(new))
            expected[name] = torch.lerp(old, new, weight)
    for name, (A, _) in factors(optimizer).items():
        torch.testing.assert_close(A, expected[name])


def meet_on_the_first(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Meeting().double()
    model.together = rank == 0
    optimizer = kaisa(model, lr=0.0)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    take(model, optimizer, shard((x, y), rank, world_size))
    return {name: A for name, (A, _) in factors(optimizer).items()} | {"x": x}


def test_inputs_that_differ_on_another_process_have_an_a_each(world: World) -> None:
    for found in world.run(meet_on_the_first, 2):
        x = found["x"]
        inputs = {"a": x, "b": torch.cat([x[:3], x[3:].sin()])}
        for name, each in inputs.items():
            rows = torch.cat([each, torch.ones(6, 1, dtype=torch.float64)], 1)
            torch.testing.assert_close(found[name], (rows.T @ rows / 6).unsqueeze(0))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return first + self.b(x.mul_(2))


def test_an_input_that_is_changed_in_place_is_another_one() -> None:
    """As is legal under autocast, where layers work on copies."""
    model, x = InPlace(), torch.randn(6, 4).bfloat16().float()
    optimizer = KAISA(model, lr=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(x.clone()).float(), torch.randint(3, (6,)))
    loss.backward()
    optimizer.step()
    for name, scale in {"a": 1.0, "b": 2.0}.items():
        rows = torch.cat([scale * x, torch.ones(6, 1)], 1).double()
        torch.testing.assert_close(
            factors(optimizer)[name][0], (rows.T @ rows / 6).unsqueeze(0), rtol=1e-5, atol=1e-5
        )

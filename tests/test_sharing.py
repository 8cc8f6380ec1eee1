"""One A for layers that are fed by the same tensor (Ba et al. 2017, appendix C)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract import KRONECKER
from torch import Tensor, nn

WIDTH = 6


class Attention(nn.Module):
    """q, k and v get one tensor, or copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)
        self.one_tensor = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        k, v = (x, x) if self.one_tensor else (x.clone(), x.clone())
        weights = (self.q(x) @ self.k(k).mT).softmax(-1)
        return self.out(weights @ self.v(v)).mean(1)


def train(model: Attention, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(4) % 3).backward()
        optimizer.step()


def averages(optimizer: Any) -> dict[str, Tensor]:
    return {block.name: block.factors.a for block in optimizer._blocks}


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

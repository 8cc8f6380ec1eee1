"""One A for layers that are fed by the same tensor (Ba et al. 2017, appendix C)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract import KRONECKER, factors, make, take
from models import Attention
from ranks import replaced
from reference import cross_entropy, empirical_factors
from torch import Tensor, nn

from second_order import KAISA
from second_order.kronecker import layers
from second_order.kronecker.layers import gram

WIDTH = 6


def train(model: Attention, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(4) % 3).backward()
        optimizer.step()


def averages(optimizer: Any) -> dict[str, Tensor]:
    return {block.name: block.factors.stored["A"] for block in optimizer._curvature.layers.blocks}


@pytest.mark.parametrize("system", KRONECKER)
def test_the_product_of_one_tensor_is_formed_once_and_changes_nothing(system: Any) -> None:
    """A of q, k and v; when their inputs part, and come together again, each has its own."""
    runs, counts = [], []
    for one_tensor in (True, False):
        torch.manual_seed(0)
        model = Attention()
        options = {"max_staleness": 0} if system.__name__ == "DistKFAC" else {}
        optimizer = system(model, lr=0.1, inv_update_steps=1, **options)
        formed: list[int] = []

        def counted(*args: Any, formed: list[int] = formed) -> Tensor:
            formed.append(1)
            return gram(*args)

        for steps, one in (
            (range(6), one_tensor),
            (range(6, 9), False),
            (range(9, 12), one_tensor),
        ):
            model.one_tensor = one
            with replaced(layers, {"gram": counted}):
                train(model, optimizer, steps)
        runs.append((model, averages(optimizer)))
        counts.append(len(formed))
    assert counts[1] - counts[0] == 2 * 9, "A of two layers, in nine passes"
    (model, found), (other, apart) = runs
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(torch.equal(found[name], apart[name]) for name in found)


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

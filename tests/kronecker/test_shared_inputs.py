"""Layers that are fed by the same tensor."""

from __future__ import annotations

import torch
from optimizer_cases import factors, make, take
from reference import cross_entropy, empirical_factors
from torch import Tensor, nn

from second_order import KAISA


class SomeBiases(nn.Module):
    """As Whisper's attention: no bias for the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=b) for b in (True, False, True))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.q(x) * torch.tanh(self.k(x)) + self.v(x)).tanh())


def test_layers_with_and_without_a_bias_share_an_input() -> None:
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
        self.a = nn.Linear(4, 3)
        self.b = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return first + self.b(x.mul_(2))


def test_an_input_changed_in_place_is_not_shared() -> None:
    """This is legal under autocast, because layers work on copies."""
    model = InPlace()
    x = torch.randn(6, 4).bfloat16().float()
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

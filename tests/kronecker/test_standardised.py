"""Standardised convolutions: their factors against plain convolutions by the computed weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from contract import each_kronecker, factors, make, take
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, pad

from second_order import KAISA

F64, CLASSES = torch.float64, 3
pytestmark = pytest.mark.filterwarnings("ignore:.*preconditioned; trained by")


def standardised(conv: Any) -> Tensor:
    """The weight as timm computes it."""
    gain = getattr(conv, "gain", None)
    gain = None if gain is None else (gain * conv.scale).view(-1)
    rows = conv.weight.reshape(1, conv.out_channels, -1)
    found = batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=conv.eps)
    return found.reshape_as(conv.weight)


class StdConv2d(nn.Conv2d):
    def __init__(self, *args: Any, eps: float = 1e-6, **options: Any) -> None:
        super().__init__(*args, **{"bias": False, **options})
        self.eps = eps

    def computed(self) -> Tensor:
        return standardised(self)

    def padded(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.stride, self.padding, self.dilation, self.groups
        return conv2d(self.padded(x), self.computed(), self.bias, *sizes)


class StdConv2dSame(StdConv2d):
    same_pad = True

    def padded(self, x: Tensor) -> Tensor:
        sides: list[int] = []
        each = zip(x.shape[-2:], self.kernel_size, self.stride, self.dilation, strict=True)
        for size, kernel, stride, dilation in each:
            reach = (math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1
            total = max(reach - size, 0)
            sides = [total // 2, total - total // 2, *sides]
        return pad(x, sides)


class ScaledStdConv2d(StdConv2d):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"bias": True, **options})
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)
        self.scale = 1.7 * self.weight[0].numel() ** -0.5


CASES = {
    "BiT": lambda: StdConv2d(2, 4, 3, padding=1),
    "same": lambda: StdConv2dSame(2, 4, 3, stride=2),
    "NFNet": lambda: ScaledStdConv2d(2, 4, 3, padding=1),
    "grouped": lambda: StdConv2d(2, 4, (3, 2), groups=2, dilation=(1, 2)),
}
each_case = pytest.mark.parametrize("name", CASES)


def network(name: str) -> Any:
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(2)
    layers = CASES[name](), nn.Tanh(), pool, nn.Flatten(), nn.Linear(16, CLASSES)
    return nn.Sequential(*layers).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 2, 7, 6, dtype=F64, generator=generator)
    return x, torch.randint(CLASSES, (6,), generator=generator)


def scales(conv: Any) -> Tensor:
    rows = conv.weight.detach().flatten(1)
    found = (rows.var(1, correction=0) + conv.eps).rsqrt()
    return found * conv.gain.detach().view(-1) * conv.scale if hasattr(conv, "gain") else found


@each_case
@each_kronecker
def test_factors_are_those_of_the_computed_weight(System: Any, name: str) -> None:
    model, twin = network(name), network(name)
    conv, biased = model[0], model[0].bias is not None
    sizes = conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups
    twin[0] = nn.Conv2d(2, 4, *sizes, bias=biased).double()
    twin[0].weight.data = conv.computed().detach()
    if biased:
        twin[0].bias.data = conv.bias.detach().clone()
    optimizers = [make(System, each, lr=0.0) for each in (model, twin)]
    x, y = batch()
    take(model, optimizers[0], (x, y))
    take(twin, optimizers[1], (conv.padded(x), y))
    (a, g), (expected_a, expected_g) = (factors(each)["0"] for each in optimizers)
    s, n = scales(conv).view(len(g), -1), a.shape[-1]
    torch.testing.assert_close(a, expected_a[:, :n, :n])
    torch.testing.assert_close(g, expected_g * s.unsqueeze(1) * s.unsqueeze(2))
    assert optimizers[0]._curvature.layers.blocks[0].state.unexplained == 0.0


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_another_computation_of_that_name_is_left_to_the_base() -> None:
    model = network("BiT")
    model[0].computed = model[0].weight.sin
    optimizer = make(KAISA, model, lr=0.0)
    take(model, optimizer, batch())
    found = {block.name: block.state.unexplained for block in optimizer._curvature.layers.blocks}
    assert found["0"] > 0.0
    assert found["4"] == 0.0


def test_a_bit_of_transformers_trains() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2}
    config = transformers.BitConfig(**sizes, num_labels=CLASSES, global_padding="SAME")
    torch.manual_seed(0)
    model = transformers.BitForImageClassification(config).double()
    x = torch.randn(6, 3, 16, 16, dtype=F64, generator=torch.Generator().manual_seed(0))
    optimizer = KAISA(model, lr=1e-2, base=torch.optim.AdamW)
    values = []
    for _ in range(5):
        optimizer.zero_grad()
        value = model(pixel_values=x, labels=torch.arange(6) % CLASSES).loss
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0] - 0.1
    blocks = optimizer._curvature.layers.blocks
    assert not any(block.state.unexplained for block in blocks)
    weights = [p for p in model.parameters() if p.dim() > 1]
    assert sum(block.weight.numel() for block in blocks) >= sum(map(torch.numel, weights))

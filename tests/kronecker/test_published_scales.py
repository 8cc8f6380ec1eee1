"""`relative_damping=False` reproduces the scales of the factors of two published codes.

Both codes take the gradients of the mean loss at a layer's output, d / N. DP-KFAC multiplies them
back by N, KAISA does not; for convolutions, both divide patches, and KAISA also the gradients, by
the T positions. Written here from the formulas of docs/concepts/distributed.md, in float64.
"""

from __future__ import annotations

import pytest
import reference as ref
import torch
from optimizer_cases import factors, make
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from second_order import KAISA

# examples, and positions of the convolution's output
N = 6
T = 16


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(3 * T, 4)]
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (N,), generator=generator)


def seen(network: nn.Module, layer: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ā (patches, for a convolution) and rows of the captured gradient, N T of them."""
    ((a, d),) = ref.captured(network, x, lambda out: cross_entropy(out, y), layer)[layer]
    module = network.get_submodule(layer)
    if isinstance(module, nn.Conv2d):
        a = nn.functional.unfold(a, module.kernel_size, padding=module.padding).mT.flatten(0, 1)
        d = d.flatten(2).mT.flatten(0, 1)
    return torch.cat([a, a.new_ones(len(a), 1)], dim=1), d


def moment(rows: Tensor, count: int) -> Tensor:
    return rows.T @ rows / count


def kaisas(network: nn.Module, layer: str, x: Tensor, y: Tensor) -> Tensor:
    """A ⊗ G of KAISA's code, as a block that multiplies a layer's gradient row by row."""
    a, d = seen(network, layer, x, y)
    positions = len(a) // N
    return torch.kron(moment(d / positions, len(d)), moment(a / positions, len(a)))


def dp_kfacs(network: nn.Module, layer: str, x: Tensor, y: Tensor) -> Tensor:
    """A ⊗ G of DP-KFAC's code."""
    a, d = seen(network, layer, x, y)
    positions = len(a) // N
    return torch.kron(moment(d * N * positions, len(d)), moment(a / positions, N))


def package_scales(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    optimizer = make(KAISA, network)
    cross_entropy(network(x), y).backward()
    optimizer.step()
    return {name: torch.kron(G[0], A[0]) for name, (A, G) in factors(optimizer).items()}


def test_factors_equal_the_published_ones_up_to_powers_of_examples_and_positions(
    network: nn.Sequential,
) -> None:
    x, y = batch()
    published = {
        layer: (kaisas(network, layer, x, y), dp_kfacs(network, layer, x, y))
        for layer in ("0", "3")
    }
    for layer, block in package_scales(network, x, y).items():
        positions = T if layer == "0" else 1
        kaisa, dp_kfac = published[layer]
        torch.testing.assert_close(block, dp_kfac)
        torch.testing.assert_close(block, kaisa * N**2 * positions**5)

"""What `relative_damping=False` reproduces: the scales of the factors of two published codes.

Both codes take the gradients of the mean loss at a layer's output, d / N. DP-KFAC multiplies them
back by N, KAISA does not; for convolutions both divide patches and KAISA the gradients, too, by the
T positions. Written here from the formulas of docs/kaisa.md, in float64.
"""

from __future__ import annotations

import pytest
import reference as ref
import torch
from contract import factors, make
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from second_order import KAISA

N, T = 6, 16  # examples, and positions of the convolution's output
GAMMA, KAPPA, LR = 3e-3, 1e-3, 0.1


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


def ours(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    optimizer = make(KAISA, network)
    cross_entropy(network(x), y).backward()
    optimizer.step()
    return {name: torch.kron(G[0], A[0]) for name, (A, G) in factors(optimizer).items()}


def test_factors_are_dp_kfacs_and_kaisas_times_powers_of_examples_and_positions(
    network: nn.Sequential,
) -> None:
    x, y = batch()
    theirs = {
        layer: (kaisas(network, layer, x, y), dp_kfacs(network, layer, x, y))
        for layer in ("0", "3")
    }
    for layer, block in ours(network, x, y).items():
        positions = T if layer == "0" else 1
        kaisa, dp_kfac = theirs[layer]
        torch.testing.assert_close(block, dp_kfac)
        torch.testing.assert_close(block, kaisa * N**2 * positions**5)


@pytest.mark.parametrize("binds", [True, False], ids=["the clip binds", "no clip"])
def test_kaisas_step_of_linears_takes_rate_damping_and_clip_times_n_squared(binds: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(32, 5), nn.Tanh(), nn.Linear(5, 4)]
    network = nn.Sequential(*layers).double()
    x, y = batch()
    kappa = KAPPA * N**2 if binds else None
    optimizer = make(
        KAISA,
        network,
        lr=LR * N**2,
        relative_damping=False,
        damping=GAMMA * N**2,
        kl_clip=None if kappa is None else lambda step: kappa,
    )
    blocks = {layer: kaisas(network, layer, x, y) for layer in ("1", "3")}
    cross_entropy(network(x), y).backward()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    pairs = {}
    for layer, block in blocks.items():
        module = network.get_submodule(layer)
        gradient = ref.to_matrix(module, module.weight.grad, module.bias.grad)
        pairs[layer] = (ref.dense_solve(block, gradient, GAMMA), gradient)
    nu = ref.clip_factor(list(pairs.values()), LR, KAPPA if binds else None)
    assert (nu < 1.0) == binds
    optimizer.step()
    for layer, (P, _) in pairs.items():
        module = network.get_submodule(layer)
        start = ref.to_matrix(module, before[f"{layer}.weight"], before[f"{layer}.bias"])
        step = start - ref.to_matrix(module, module.weight.detach(), module.bias.detach())
        torch.testing.assert_close(step, LR * nu * P, rtol=1e-9, atol=1e-12)

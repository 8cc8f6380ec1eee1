"""The rival in the benchmarks is what its paper says: against algorithm 3, written with vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soap import SOAP

BETA1 = 0.9
BETA2 = 0.95
SHAMPOO = 0.8
LR = 0.05
DECAY = 0.1
FREQUENCY = 3


def gradients(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(14)]


def dense(start: Tensor, found: list[Tensor], basis_every: int) -> Tensor:
    """All of it with one matrix Q_L ⊗ Q_R that acts on the gradient as a vector."""
    rows, columns = start.shape
    w = start.flatten()
    m = torch.zeros(rows * columns).double()
    v = torch.zeros(rows * columns)
    first = found[0]
    factors = [(1 - SHAMPOO) * first @ first.T, (1 - SHAMPOO) * first.T @ first]
    bases = [torch.linalg.eigh(factor)[1].flip(-1) for factor in factors]
    for step, g in enumerate(found[1:], 1):
        q = torch.kron(*bases)
        m = BETA1 * m + (1 - BETA1) * g.flatten()
        v = BETA2 * v + (1 - BETA2) * (q.T @ g.flatten()) ** 2
        direction = (q.T @ m) / (1 - BETA1**step)
        direction = direction / ((v / (1 - BETA2**step)).sqrt() + 1e-8)
        w = w - LR * DECAY * w - LR * q @ direction
        new_statistics = g @ g.T, g.T @ g
        factors = [
            SHAMPOO * f + (1 - SHAMPOO) * n for f, n in zip(factors, new_statistics, strict=True)
        ]
        if step % basis_every == 0:
            orders = []
            for side, (factor, basis) in enumerate(zip(factors, tuple(bases), strict=True)):
                order = torch.diagonal(basis.T @ factor @ basis).argsort(descending=True)
                bases[side] = torch.linalg.qr(factor @ basis[:, order]).Q
                orders.append(order)
            v = v.view(rows, columns)[orders[0]][:, orders[1]].flatten()
    return w.view(rows, columns)


def trained(start: Tensor, found: list[Tensor], frequency: int) -> Tensor:
    p = torch.nn.Parameter(start.clone())
    optimizer = SOAP([p], LR, (BETA1, BETA2), SHAMPOO, weight_decay=DECAY, frequency=frequency)
    for g in found:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("shape", [(4, 3), (2, 5)])
def test_it_is_algorithm_3(shape: tuple[int, int]) -> None:
    start = torch.ones(shape).double()
    found = gradients(*shape)
    actual = trained(start, found, FREQUENCY)
    torch.testing.assert_close(actual, dense(start, found, FREQUENCY), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(actual, dense(start, found, 100), rtol=1e-3)

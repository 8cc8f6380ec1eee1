"""The rival in the benchmarks is Shampoo grafted to Adam, written with one matrix on vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from shampoo import Shampoo

BETA1 = 0.9
BETA2 = 0.95
EPS = 1e-8
LR = 0.05
DECAY = 0.1
FREQUENCY = 3


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(8)]


def fourth_root(matrix: Tensor) -> Tensor:
    """The inverse fourth root, by two square roots of a singular value decomposition."""
    u, s, _ = torch.linalg.svd(matrix)
    return u @ torch.diag((s + EPS).rsqrt().sqrt()) @ u.T


def dense(start: Tensor, found: list[Tensor], every: int) -> Tensor:
    w = start.flatten()
    m = torch.zeros_like(w)
    v = torch.zeros_like(w)
    left = torch.zeros(4, 4).double()
    right = torch.zeros(3, 3).double()
    preconditioner = torch.eye(12).double()
    for step, g in enumerate(found, 1):
        m = BETA1 * m + (1 - BETA1) * g.flatten()
        v = BETA2 * v + (1 - BETA2) * g.flatten() ** 2
        left = BETA2 * left + (1 - BETA2) * g @ g.T
        right = BETA2 * right + (1 - BETA2) * g.T @ g
        debiased = 1 - BETA2**step
        if step % every == 1:
            roots = fourth_root(left / debiased), fourth_root(right / debiased)
            preconditioner = torch.kron(*roots)
        adam = m / (1 - BETA1**step) / ((v / debiased).sqrt() + EPS)
        direction = preconditioner @ m
        w = w - LR * DECAY * w - LR * direction * adam.norm() / direction.norm()
    return w.view(4, 3)


def trained(start: Tensor, found: list[Tensor]) -> Tensor:
    p = torch.nn.Parameter(start.clone())
    optimizer = Shampoo([p], LR, (BETA1, BETA2), EPS, DECAY, FREQUENCY)
    for g in found:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def test_it_is_shampoo_with_the_length_of_adams_step() -> None:
    start = torch.ones(4, 3).double()
    actual = trained(start, gradients())
    torch.testing.assert_close(actual, dense(start, gradients(), FREQUENCY), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(actual, dense(start, gradients(), 100), rtol=1e-3)


def test_a_kernel_is_the_matrix_of_its_rows_and_a_vector_is_adams() -> None:
    kernel = torch.nn.Parameter(torch.ones(4, 3, 1, 1).double())
    bias = torch.nn.Parameter(torch.ones(4).double())
    as_adam = torch.nn.Parameter(torch.ones(4).double())
    optimizer = Shampoo([kernel, bias], LR, (BETA1, BETA2), EPS, DECAY, FREQUENCY)
    adam = torch.optim.AdamW([as_adam], LR, (BETA1, BETA2), EPS, DECAY)
    for g in gradients():
        kernel.grad = g.view_as(kernel).clone()
        bias.grad = g[:, 0].clone()
        as_adam.grad = bias.grad.clone()
        optimizer.step()
        adam.step()
    torch.testing.assert_close(
        kernel.detach().flatten(1), trained(torch.ones(4, 3).double(), gradients())
    )
    torch.testing.assert_close(bias, as_adam)

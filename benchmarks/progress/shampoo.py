"""Shampoo with Adam's step length, to be compared with (Shi et al. 2023, arXiv:2309.06497).

L, R <- β₂ L + (1 - β₂) G Gᵀ,  β₂ R + (1 - β₂) Gᵀ G       the factors, running averages
M    <- β₁ M + (1 - β₁) G
P    <- L^(-1/4) M R^(-1/4)                               with roots of every so many steps
W    <- W - lr P ‖D‖ / ‖P‖,  with D the step that Adam would take

A rival for the benchmarks, not an optimizer of the package: it runs in one process. A convolutional
kernel is a matrix ``(out, in * height * width)``. Factors are whole matrices; the published code
can also split a weight into blocks, which makes factors smaller. Adam trains parameters with one
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Shampoo"]


class Shampoo(torch.optim.Optimizer):
    """Shampoo, grafted to Adam.

    Args:
        params: Parameters; those with two dimensions or more get factors.
        lr: The learning rate.
        betas: β₁, and β₂ of the factors and of Adam's second moment.
        eps: Added to eigenvalues, and to the root of Adam's second moment.
        weight_decay: Decoupled.
        frequency: Steps between two computations of the roots.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        frequency: int = 10,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "frequency": frequency,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step; a closure is not called."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                rows = p if p.dim() < 2 else p.view(len(p), -1)  # a view, so that p changes
                self._step(rows, p.grad.view_as(rows), self.state[p], group)

    def _step(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        is_matrix = p.dim() == 2
        if not state:
            state["step"] = 0
            state["m"] = torch.zeros_like(p)
            state["v"] = torch.zeros_like(p)
            if is_matrix:
                state["factors"] = [p.new_zeros(n, n) for n in p.shape]

        # Adam's step.
        state["step"] += 1
        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        state["m"].lerp_(g, 1 - beta1)
        state["v"].lerp_(g.square(), 1 - beta2)
        moment = state["m"] / correction1
        direction = moment / ((state["v"] / correction2).sqrt() + group["eps"])

        # Shampoo's direction with the length of that step.
        if is_matrix:
            for factor, square in zip(state["factors"], (g @ g.T, g.T @ g), strict=True):
                factor.lerp_(square, 1 - beta2)
            if (state["step"] - 1) % group["frequency"] == 0:
                state["roots"] = [
                    inverse_root(factor / correction2, group["eps"]) for factor in state["factors"]
                ]
            left, right = state["roots"]
            preconditioned = left @ moment @ right
            direction = preconditioned * (direction.norm() / preconditioned.norm())

        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])


def inverse_root(factor: Tensor, eps: float) -> Tensor:
    """The inverse fourth root, in float64 because one gradient's factor has a low rank."""
    values, vectors = torch.linalg.eigh(factor.double())
    roots = (values.clamp_min(0) + eps) ** -0.25
    result: Tensor = (vectors * roots) @ vectors.T
    return result.to(factor.dtype)

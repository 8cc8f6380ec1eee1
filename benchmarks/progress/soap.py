"""SOAP, from its paper (Vyas et al. 2024, arXiv:2409.11321, algorithm 3), as a rival.

L, R    <- β G Gᵀ + ..., β Gᵀ G + ...          the factors of Shampoo, running averages
Q_L,Q_R <- their eigenvectors, by one QR step of orthogonal iteration every `frequency` steps
V       <- Adam's second moment of Q_Lᵀ G Q_R
W       <- W - lr Q_L (Q_Lᵀ M Q_R / sqrt V) Q_Rᵀ, with M the running average of G

This class is for benchmarks in one process and is not part of the package. Convolutional kernels
are matrices ``(out, in * height * width)``. Parameters with one dimension are trained by Adam. The
first gradient only initializes the factors, and the first call takes no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SOAP"]


class SOAP(torch.optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's factors.

    Args:
        params: Parameters. Those with two dimensions or more get factors.
        lr: The learning rate.
        betas: Decays of the two moments.
        shampoo_beta: Decay of L and R.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        frequency: Number of steps between two updates of the eigenvectors.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        frequency: int = 10,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "shampoo_beta": shampoo_beta,
                "eps": eps,
                "weight_decay": weight_decay,
                "frequency": frequency,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() > 2:
                    # The matrix is a view, so the update changes p.
                    matrix = p.view(len(p), -1)
                    self._update(matrix, p.grad.flatten(1), self.state[p], group)
                else:
                    self._update(p, p.grad, self.state[p], group)
        return loss

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        # The first gradient initializes the factors and their eigenvectors.
        beta1, beta2 = group["betas"]
        gradient = g
        is_matrix = p.dim() == 2
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            if is_matrix:
                weight = 1 - group["shampoo_beta"]
                state["factors"] = [weight * g @ g.T, weight * g.T @ g]
                state["bases"] = [eigenvectors(f) for f in state["factors"]]
                return

        # Compute Adam's moments, the second one in the eigenbasis.
        state["step"] += 1
        state["m"].lerp_(g, 1 - beta1)
        m = state["m"]
        if is_matrix:
            left, right = state["bases"]
            g = left.T @ g @ right
            m = left.T @ m @ right
        state["v"].lerp_(g.square(), 1 - beta2)

        # Take Adam's step in the eigenbasis.
        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        direction = m / correction1 / ((state["v"] / correction2).sqrt() + group["eps"])
        if is_matrix:
            direction = left @ direction @ right.T
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])

        if is_matrix:
            self._update_factors(gradient, state, group)

    def _update_factors(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update the factors, and every `frequency` steps their eigenvectors."""
        for factor, product in zip(state["factors"], (g @ g.T, g.T @ g), strict=True):
            factor.lerp_(product, 1 - group["shampoo_beta"])
        if state["step"] % group["frequency"]:
            return
        for side in range(2):
            factor = state["factors"][side]
            basis = state["bases"][side]
            # Sort the basis and the second moment by the estimated eigenvalues.
            order = (basis.T @ factor @ basis).diagonal().argsort(descending=True)
            state["v"] = state["v"].index_select(side, order)
            state["bases"][side] = torch.linalg.qr(factor @ basis[:, order])[0]


def eigenvectors(factor: Tensor) -> Tensor:
    """Eigenvectors as columns, the largest eigenvalue first.

    They are computed in float64, because the factor of a single gradient may have a low rank.
    """
    result: Tensor = torch.linalg.eigh(factor.double())[1].flip(-1).to(factor.dtype)
    return result

"""Solve Poisson's equation with a network, by DHO2 over Adam, or by Adam alone.

python examples/pinn.py
python examples/pinn.py --optimizer adam --steps 2000

    −Δu = f in the unit square, u = 0 on its edge; f is such that u = sin(πx) sin(πy)

A network takes (x, y) and gives u (a physics-informed network: Raissi et al., 2019). It is trained
on the equation's residual at fixed points inside, and on its values at points of the edge. The
solution is known, so the error is, too. All points are one batch: a gradient has no noise.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor, nn

from second_order import DHO2

__all__ = ["Points", "loss_of", "network", "relative_error"]

EDGE_WEIGHT = 100.0  # of the edge's loss, beside the residual's


def network() -> nn.Sequential:
    """2-32-32-1 with tanh; from (N, 2) to (N, 1)."""
    return nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def solution(points: Tensor) -> Tensor:
    """u at points (N, 2), as (N, 1)."""
    return torch.sin(math.pi * points).prod(dim=1, keepdim=True)


class Points:
    """Where the equation and the edge's values are to hold, and where the error is measured.

    Args:
        side: Inside there are ``side`` × ``side`` points, on each edge ``side``.
    """

    def __init__(self, side: int = 24) -> None:
        middles = (torch.arange(side) + 0.5) / side
        self.inside = torch.cartesian_prod(middles, middles)
        self.source = 2 * math.pi**2 * solution(self.inside)
        ends = torch.tensor([0.0, 1.0])
        edges = torch.cartesian_prod(ends, middles)
        self.edge = torch.cat([edges, edges.flip(1)])
        even = torch.linspace(0.0, 1.0, 41)
        self.judged = torch.cartesian_prod(even, even)


def laplacian(net: nn.Module, points: Tensor) -> Tensor:
    """Δu at points (N, 2), as (N, 1)."""
    points = points.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
    second = [
        torch.autograd.grad(slope[:, i].sum(), points, create_graph=True)[0][:, i : i + 1]
        for i in range(2)
    ]
    return torch.stack(second).sum(dim=0)


def loss_of(net: nn.Module, points: Points) -> Tensor:
    """The mean square of −Δu − f inside, and of u on the edge."""
    residual = laplacian(net, points.inside) + points.source
    loss: Tensor = residual.square().mean() + EDGE_WEIGHT * net(points.edge).square().mean()
    return loss


@torch.no_grad()
def relative_error(net: nn.Module, points: Points) -> float:
    """‖network − u‖ / ‖u‖, over a fine grid."""
    true = solution(points.judged)
    return float((net(points.judged) - true).norm() / true.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description="Solve Poisson's equation with a network.")
    parser.add_argument("--optimizer", choices=["dho2", "adam"], default="dho2")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--side", type=int, default=24, help="of the square grid of points")
    args = parser.parse_args()

    torch.manual_seed(0)
    net, points = network(), Points(args.side)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "dho2":
        optimizer = DHO2(
            net,
            lr=args.lr,
            base=torch.optim.Adam,
            # Every gradient is of the examples of the curvature batch: no noise to average out.
            warmup_steps=100,
            newton_scale=0.5,
            subspace_momentum=0.0,
            curvature_closure=lambda: loss_of(net, points),
        )
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)

    seconds = 0.0
    for step in range(1, args.steps + 1):
        start = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(net, points)
        loss.backward()
        optimizer.step()
        seconds += time.process_time() - start
        if step % 100 == 0 or step == args.steps:
            error = relative_error(net, points)
            print(f"step {step:5}  {seconds:5.2f} s  loss {loss:.2e}  relative error {error:.2e}")


if __name__ == "__main__":
    main()

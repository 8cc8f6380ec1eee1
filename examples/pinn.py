"""Solve Poisson's equation with a neural network, by DHO2 over Adam or Adam alone.

    python pinn.py
    python pinn.py --optimizer adam --steps 2000

    −Δu = f in the unit square, u = 0 on its boundary
    f is such that u = sin(πx) sin(πy)

The network maps (x, y) to u (a physics-informed network: Raissi et al., 2019). The loss
is the equation's residual at fixed points inside and the squared values on the
boundary. The solution is known, and so is the error. All points are one batch, so
gradients are exact.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor, nn

from second_order import DHO2

__all__ = ["Points", "loss_of", "network", "relative_error"]

BOUNDARY_WEIGHT = 100.0  # of the boundary's loss; the residual's weight is 1


def network() -> nn.Sequential:
    """Make a tanh network 2-32-32-1, from (N, 2) to (N, 1)."""
    return nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def solution(points: Tensor) -> Tensor:
    """Return u at points (N, 2), of shape (N, 1)."""
    return torch.sin(math.pi * points).prod(dim=1, keepdim=True)


class Points:
    """The points of the loss, and those where the error is measured.

    Args:
        side: The square has ``side`` × ``side`` points inside, ``side`` on each edge.
    """

    def __init__(self, side: int = 24) -> None:
        centers = (torch.arange(side) + 0.5) / side
        self.inside = torch.cartesian_prod(centers, centers)
        self.source = 2 * math.pi**2 * solution(self.inside)
        ends = torch.tensor([0.0, 1.0])
        edges = torch.cartesian_prod(ends, centers)
        self.boundary = torch.cat([edges, edges.flip(1)])
        grid = torch.linspace(0.0, 1.0, 41)
        self.test = torch.cartesian_prod(grid, grid)


def laplacian(net: nn.Module, points: Tensor) -> Tensor:
    """Return Δu at points (N, 2), of shape (N, 1)."""
    points = points.clone().requires_grad_()
    gradient = torch.autograd.grad(net(points).sum(), points, create_graph=True)[0]
    result = torch.zeros_like(gradient[:, :1])
    for i in range(2):
        second = torch.autograd.grad(gradient[:, i].sum(), points, create_graph=True)[0]
        result = result + second[:, i : i + 1]
    return result


def loss_of(net: nn.Module, points: Points) -> Tensor:
    """Return the mean square of −Δu − f, plus a weighted one of u on the boundary."""
    residual = laplacian(net, points.inside) + points.source
    values = net(points.boundary)
    loss: Tensor = residual.square().mean() + BOUNDARY_WEIGHT * values.square().mean()
    return loss


@torch.no_grad()
def relative_error(net: nn.Module, points: Points) -> float:
    """Return ‖network − u‖ / ‖u‖ on a fine grid."""
    true = solution(points.test)
    return float((net(points.test) - true).norm() / true.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Solve Poisson's equation with a neural network."
    )
    parser.add_argument("--optimizer", choices=["dho2", "adam"], default="dho2")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--side", type=int, default=24, help="side of the grid of points"
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    net = network()
    points = Points(args.side)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "dho2":
        optimizer = DHO2(
            net.parameters(),
            lr=args.lr,
            base=torch.optim.Adam,
            # Longer Newton steps without momentum are safe: gradients are exact.
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
            print(
                f"step {step:5}  {seconds:5.2f} s  loss {loss:.2e}  relative error {error:.2e}"
            )


if __name__ == "__main__":
    main()

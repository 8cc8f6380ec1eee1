"""Compute the Hessian's extreme eigenvalues and spectral density during training.

    python spectrum.py
    torchrun --standalone --nproc-per-node=2 spectrum.py

The script trains a small network with SGD. After 10 and after 150 steps it runs
Lanczos on the Hessian of the training loss. It prints the largest and smallest
eigenvalues with their residuals, and draws the density of all eigenvalues. It takes
less than a minute on one core.
"""

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from second_order.lanczos import (
    Eigenpairs,
    SpectralDensity,
    eigenpairs,
    spectral_density,
)

BLACK = "#000000"
BLUE = "#0072B2"
RED = "#D55E00"
ROUNDING = 1e-6  # float32 cannot resolve residuals below this share of the eigenvalue


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits: training images and labels, test images and labels.

    The images, (N, 64), are standardized by the mean and standard deviation of the
    training pixels.
    """
    images, labels = load_digits(return_X_y=True)
    arrays = train_test_split(
        images, labels, test_size=360, random_state=0, stratify=labels
    )
    x_train, x_test, y_train, y_test = (torch.from_numpy(array) for array in arrays)
    mean = x_train.mean()
    std = x_train.std(correction=0)
    x_train = ((x_train - mean) / std).float()
    x_test = ((x_test - mean) / std).float()
    return x_train, y_train, x_test, y_test


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


MODELS = {"conv": conv_net, "mlp": mlp}


def shuffled_batches(
    count: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
) -> Iterator[Tensor]:
    """Yield this rank's part of each batch of indices, in a new order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    share = batch_size // world_size
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch_size + 1, batch_size):
            yield order[start + rank * share : start + (rank + 1) * share]


@dataclass(frozen=True)
class Snapshot:
    """The Hessian after some steps of training."""

    step: int
    loss: float
    pairs: Eigenpairs
    density: SpectralDensity


def train(args: argparse.Namespace, rank: int, world_size: int) -> list[Snapshot]:
    """Train with SGD, and analyze the Hessian after an early and a late step."""
    torch.manual_seed(args.seed)
    net = MODELS[args.model]()
    x_train, y_train, _, _ = load_data()
    model: nn.Module = net
    group = None
    if world_size > 1:
        model = DistributedDataParallel(net)
        group = dist.group.WORLD
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    # The Hessian is that of the first images, divided among the processes.
    part = slice(rank, args.examples, world_size)
    images = x_train[part]
    labels = y_train[part]

    def curvature_loss() -> tuple[Tensor, int]:
        # Call the network, not the DistributedDataParallel around it.
        return cross_entropy(net(images), labels), len(labels)

    def analyze(step: int) -> Snapshot:
        pairs = eigenpairs(
            curvature_loss,
            net,
            largest=args.largest,
            smallest=args.smallest,
            iterations=args.iterations,
            tol=1e-2,
            process_group=group,
        )
        density = spectral_density(
            curvature_loss,
            net,
            probes=args.probes,
            iterations=args.iterations,
            process_group=group,
        )
        with torch.no_grad():
            loss = cross_entropy(net(x_train), y_train).item()
        return Snapshot(step, loss, pairs, density)

    batches = shuffled_batches(len(x_train), 64, args.seed, rank, world_size)
    snapshots = []
    for step in range(args.late + 1):
        if step in (args.early, args.late):
            snapshots.append(analyze(step))
        indices = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x_train[indices]), y_train[indices]).backward()
        optimizer.step()
    return snapshots


def report(snapshot: Snapshot) -> str:
    """Return a line for each extreme eigenvalue θ.

    Its error is at most the residual ‖Hv − θv‖.
    """
    pairs = snapshot.pairs
    lines = [
        f"after {snapshot.step} steps, training loss {snapshot.loss:.4f}",
        " eigenvalue   residual",
    ]
    for value, residual, converged in zip(
        pairs.eigenvalues.tolist(),
        pairs.residuals.tolist(),
        pairs.converged,
        strict=True,
    ):
        error = f"{residual:10.1e}"
        if residual < ROUNDING * abs(value):
            error = f"{'rounding':>10}"
        line = f"{value:11.4f} {error}"
        if not converged:
            line += "  not converged"
        lines.append(line)
    mean = snapshot.density.expectation(lambda x: x)
    lines.append(f"mean of all {snapshot.density.size:,} eigenvalues: {mean:.5f}")
    lines.append(f"Hessian-vector products: {pairs.products}")
    return "\n".join(lines)


def draw(axes: Axes, snapshot: Snapshot) -> None:
    """Draw the density on a logarithmic scale, and mark the extreme eigenvalues."""
    values = snapshot.pairs.eigenvalues
    largest = snapshot.pairs.largest
    density = snapshot.density
    nodes = density.nodes[density.weights > 0.0]
    low = float(nodes.min())
    high = float(nodes.max())
    margin = 0.05 * (high - low)
    width = 0.006 * (high - low)
    grid = torch.linspace(low - margin, high + margin, 1500, dtype=torch.float64)
    curve = density.on(grid, width)
    one = 1 / (density.size * width * math.sqrt(2 * math.pi))
    axes.plot(grid, curve, color=BLUE, linewidth=1.2)
    axes.fill_between(grid, curve, one / 30, color=BLUE, alpha=0.25, linewidth=0)
    axes.axhline(
        one, color="0.55", linewidth=0.8, zorder=1, label="height of one eigenvalue"
    )
    axes.set_yscale("log")
    axes.set_ylim(one / 30, 4 * max(float(curve.max()), one))
    axes.set_xlabel("eigenvalue")
    height = 2.5 * axes.get_ylim()[0]
    for marked, name, color in [
        (values[:largest], "largest", RED),
        (values[largest:], "smallest", BLACK),
    ]:
        marks = torch.full_like(marked, height)
        axes.plot(
            marked, marks, "v", color=color, markersize=5, label=f"{len(marked)} {name}"
        )
    axes.set_title(f"after {snapshot.step} steps, loss {snapshot.loss:.2g}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False, handlelength=1)


def figure(snapshots: list[Snapshot]) -> Figure:
    """Draw one panel for each snapshot."""
    drawing = Figure(figsize=(7.2, 3.4), layout="constrained")
    panels = drawing.subplots(1, len(snapshots), squeeze=False)[0]
    for axes, snapshot in zip(panels, snapshots, strict=True):
        draw(axes, snapshot)
    panels[0].set_ylabel("density of eigenvalues")
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute the spectrum of the Hessian.")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--early", type=int, default=10, metavar="STEPS")
    parser.add_argument("--late", type=int, default=150, metavar="STEPS")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--examples", type=int, default=512, help="images in the Hessian's loss"
    )
    parser.add_argument("--largest", type=int, default=10)
    parser.add_argument("--smallest", type=int, default=3)
    parser.add_argument(
        "--iterations", type=int, default=80, help="the most Lanczos steps"
    )
    parser.add_argument(
        "--probes", type=int, default=8, help="random vectors for the density"
    )
    parser.add_argument("--output", type=Path, default=Path("spectrum.png"))
    args = parser.parse_args()
    rank = 0
    world_size = 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group()
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    snapshots = train(args, rank, world_size)
    if rank == 0:
        print("\n\n".join(map(report, snapshots)))
        figure(snapshots).savefig(args.output, dpi=160, facecolor="#ffffff")
        print(f"\nFigure: {args.output}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

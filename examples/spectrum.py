"""The curvature of a network, early and late in its training: extreme eigenvalues and spectrum.

    python examples/spectrum.py
    torchrun --standalone --nproc-per-node=2 examples/spectrum.py

Trains a small network on the digits with SGD. On the way it looks twice at the Hessian of the loss
of some training images, without forming it: prints the largest and the smallest eigenvalues with
their residuals, and draws the density of all of them. Under a minute on one core.
"""

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from digits import batches, conv_net, load_split, mlp
from second_order.lanczos import Eigenpairs, SpectralDensity, eigenpairs, spectral_density

BLACK, BLUE, RED = "#000000", "#0072B2", "#D55E00"
MODELS = {"conv": conv_net, "mlp": mlp}
ROUNDING = 1e-6  # of float32: a residual below this share of its eigenvalue says no more


@dataclass(frozen=True)
class Look:
    """What is seen of the Hessian after some steps."""

    step: int
    loss: float
    pairs: Eigenpairs
    density: SpectralDensity


def train_and_look(args: argparse.Namespace, rank: int, world_size: int) -> list[Look]:
    """Train with SGD, and look after ``args.early`` and ``args.late`` steps."""
    torch.manual_seed(args.seed)
    net, data = MODELS[args.model](), load_split()
    model = net if world_size == 1 else DistributedDataParallel(net)
    group = dist.group.WORLD if world_size > 1 else None
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    share = slice(rank, args.examples, world_size)
    images, labels = data.train_images[share], data.train_labels[share]

    def curvature_loss() -> tuple[Tensor, int]:  # of the network itself, not of DDP around it
        return cross_entropy(net(images), labels), len(labels)

    def look(step: int) -> Look:
        m, counts = args.iterations, {"largest": args.largest, "smallest": args.smallest}
        pairs = eigenpairs(
            curvature_loss, net, **counts, iterations=m, tol=1e-2, process_group=group
        )
        density = spectral_density(
            curvature_loss, net, probes=args.probes, iterations=m, process_group=group
        )
        with torch.no_grad():
            loss = cross_entropy(net(data.train_images), data.train_labels).item()
        return Look(step, loss, pairs, density)

    parts = batches(len(data.train_images), 64, seed=args.seed, rank=rank, world_size=world_size)
    looks = []
    for step in range(args.late + 1):
        if step in (args.early, args.late):
            looks.append(look(step))
        indices = next(parts)
        optimizer.zero_grad()
        cross_entropy(model(data.train_images[indices]), data.train_labels[indices]).backward()
        optimizer.step()
    return looks


def report(look: Look) -> str:
    """A line for each extreme eigenvalue; ‖Hv − θv‖ says how far off it can be."""
    pairs = look.pairs
    lines = [f"after {look.step} steps, training loss {look.loss:.4f}", " eigenvalue   residual"]
    for value, residual, converged in zip(
        pairs.eigenvalues.tolist(), pairs.residuals.tolist(), pairs.converged, strict=True
    ):
        tiny = residual < ROUNDING * abs(value)
        error = f"{'rounding':>10}" if tiny else f"{residual:10.1e}"
        lines.append(f"{value:11.4f} {error}{'' if converged else '  not converged'}")
    mean = look.density.expectation(lambda x: x)
    lines.append(f"in {pairs.products} products; the mean of all {look.density.size:,}: {mean:.5f}")
    return "\n".join(lines)


def draw(axes: Axes, look: Look) -> None:
    """The density on a logarithmic scale, and a mark for each eigenvalue that was computed."""
    values, largest = look.pairs.eigenvalues, look.pairs.largest
    density = look.density
    nodes = density.nodes[density.weights > 0.0]
    low, high = float(nodes.min()), float(nodes.max())
    room, width = 0.05 * (high - low), 0.006 * (high - low)
    grid = torch.linspace(low - room, high + room, 1500, dtype=torch.float64)
    curve = density.on(grid, width)
    one = 1 / (density.size * width * math.sqrt(2 * math.pi))
    axes.plot(grid, curve, color=BLUE, linewidth=1.2)
    axes.fill_between(grid, curve, one / 30, color=BLUE, alpha=0.25, linewidth=0)
    axes.axhline(one, color="0.55", linewidth=0.8, zorder=1, label="height of one eigenvalue")
    axes.set_yscale("log")
    axes.set_ylim(one / 30, 4 * max(float(curve.max()), one))
    axes.set_xlabel("eigenvalue")
    height = 2.5 * axes.get_ylim()[0]
    for some, name, colour in [
        (values[:largest], "largest", RED),
        (values[largest:], "smallest", BLACK),
    ]:
        marks = torch.full_like(some, height)
        axes.plot(some, marks, "v", color=colour, markersize=5, label=f"the {len(some)} {name}")
    axes.set_title(f"after {look.step} steps, loss {look.loss:.2g}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)


def figure(looks: list[Look]) -> Figure:
    """A panel a look."""
    drawing = Figure(figsize=(8.2, 3.4), layout="constrained")
    panels = drawing.subplots(1, len(looks), squeeze=False)[0]
    for axes, look in zip(panels, looks, strict=True):
        draw(axes, look)
    panels[0].set_ylabel("density of eigenvalues")
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--early", type=int, default=10, metavar="STEPS")
    parser.add_argument("--late", type=int, default=150, metavar="STEPS")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=512, help="the Hessian is that of so many")
    parser.add_argument("--largest", type=int, default=10)
    parser.add_argument("--smallest", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=80, help="Lanczos steps at most")
    parser.add_argument("--probes", type=int, default=8, help="random vectors for the density")
    parser.add_argument("--output", type=Path, default=Path("spectrum.png"))
    args = parser.parse_args()
    rank, world_size = 0, 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
    looks = train_and_look(args, rank, world_size)
    if rank == 0:
        print("\n\n".join(map(report, looks)))
        figure(looks).savefig(args.output, dpi=160, facecolor="#ffffff")
        print(f"\nFigure: {args.output}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Draw the figures of the documentation: all of them, or those that are named.

    PYTHONPATH=benchmarks python docs/figures/make_figures.py [NAME] [NAME]

Nothing is drawn by hand that can be computed: paths in valleys are real runs, the
placements and their costs come from :mod:`second_order.distributed.assignment`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from torch import Tensor, nn

from reporting import (
    BLACK,
    BLUE,
    FIGURE_WIDTH,
    GREEN,
    OPTIMIZER_COLORS,
    PURPLE,
    RED,
    SKY,
    STYLE,
    save,
)
from second_order import DHO2, KAISA
from second_order.distributed.assignment import (
    Grid,
    LayerAssignment,
    LayerDims,
    assign_layers,
    assign_owners,
    gradient_worker_count,
)
from second_order.kfac.schedule import MAX_INTERVAL

HERE = Path(__file__).parent

GREY = "#666666"
PALE = "#f2f2f2"

Pair = tuple[float, float]


def box(
    axes: Axes,
    centre: Pair,
    size: Pair,
    text: str,
    *,
    face: str,
    edge: str,
    ink: str = BLACK,
) -> None:
    """A rounded box with a text in its middle; positions in the units of the axes."""
    width, height = size
    axes.add_patch(
        FancyBboxPatch(
            (centre[0] - width / 2, centre[1] - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=face,
            edgecolor=edge,
            linewidth=1.2,
        )
    )
    axes.text(*centre, text, ha="center", va="center", color=ink, linespacing=1.25)


def arrow(
    axes: Axes,
    start: Pair,
    end: Pair,
    *,
    colour: str = BLACK,
    bend: float = 0.0,
    dash: str = "-",
) -> None:
    """An arrow from start to end, bent by a fraction of its length."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=9,
            shrinkA=0,
            shrinkB=0,
            linewidth=1.3,
            linestyle=dash,
            color=colour,
        )
    )


# ----------------------------------------------------------------------------- the step


def step() -> Figure:
    """One K-FAC step as a flow, in three lanes by how often each part happens."""
    width = FIGURE_WIDTH
    lane_height = 1.26
    figure = Figure(figsize=(width, 4.1))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, 4.1))
    axes.axis("off")

    lanes = [
        (3.42, "every step", "#ffffff", BLACK),
        (2.05, "at a refresh: running averages", "#e9f4fb", BLUE),
        (0.68, "at a refresh: inverses", "#fdf1e7", RED),
    ]
    for y, label, color, ink in lanes:
        axes.add_patch(
            FancyBboxPatch(
                (0.06, y - lane_height / 2),
                width - 0.12,
                lane_height,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=color,
                edgecolor="#cccccc",
                linewidth=0.8,
            )
        )
        axes.text(
            width - 0.16,
            y + 0.48,
            label,
            color=ink,
            ha="right",
            va="center",
            weight="bold",
        )

    top = 3.24
    middle = 1.9
    bottom = 0.56
    x = [0.77, 2.18, 3.60, 5.01, 6.42]
    size = (1.22, 0.76)

    def put(column: int, y: float, text: str, edge: str) -> None:
        box(axes, (x[column], y), size, text, face="#ffffff", edge=edge)

    def along(first: int, second: int, y: float) -> None:
        arrow(axes, (x[first] + size[0] / 2, y), (x[second] - size[0] / 2, y))

    def down(column: int, start: float, end: float) -> None:
        half = size[1] / 2 if end < start else -size[1] / 2
        arrow(axes, (x[column], start - half), (x[column], end + half))

    put(0, top, "forward and\nbackward pass", BLACK)
    put(1, top, "gradient ∇,\naveraged\nover ranks", BLACK)
    put(2, top, "precondition:\n(A⊗G + γ)⁻¹ ∇", BLACK)
    put(3, top, "base optimizer:\nSGD, AdamW, …", BLACK)
    put(4, top, "step scale:\nΔ ← τ Δ", BLACK)
    for column in range(4):
        along(column, column + 1, top)

    put(0, middle, "capture\ninputs a and\ngradients d", BLUE)
    put(1, middle, "running averages\nA of a aᵀ\nG of d dᵀ", BLUE)
    down(0, top, middle)
    along(0, 1, middle)

    put(1, bottom, "invert A⊗G + γ:\nCholesky or\neigenvectors", RED)
    put(2, bottom, "inverse, used\nuntil the next\nrefresh", RED)
    down(1, middle, bottom)
    along(1, 2, bottom)
    down(2, bottom, top)

    axes.text(
        x[3] - 0.55,
        bottom - 0.07,
        "At first, at every step. If an inverse\n"
        f"changes little, less often: after up\nto {MAX_INTERVAL} steps.",
        ha="left",
        va="center",
        color=BLACK,
        linespacing=1.4,
    )
    return figure


# --------------------------------------------------------------------------- the valley

START = (-3.3, -0.25)
STEEP = 1.0
FLAT = 0.03


def valley_data() -> tuple[Tensor, Tensor]:
    """Inputs whose second moments have eigenvalues STEEP and FLAT, turned by 25°; targets 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 2, generator=generator)
    # Exactly white.
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / len(x))).mT
    turn = torch.deg2rad(torch.tensor(25.0))
    across = torch.tensor([-turn.sin(), turn.cos()])
    along = torch.tensor([turn.cos(), turn.sin()])
    x = x[:, :1] * FLAT**0.5 * along + x[:, 1:] * STEEP**0.5 * across
    return x, torch.zeros(len(x), 1)


def valley_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Half the mean squared error: a parabola in the two weights."""
    return 0.5 * (model(x) - y).square().mean()


MakeOptimizer: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]


def descend(make: MakeOptimizer, steps: int) -> tuple[Tensor, list[float]]:
    """Train the two weights from START; returns their path ``(steps + 1, 2)`` and the losses."""
    x, y = valley_data()
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([START]))
    optimizer = make(model)
    path = [model.weight.detach().flatten().clone()]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = valley_loss(model, x, y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        path.append(model.weight.detach().flatten().clone())
    with torch.no_grad():
        losses.append(valley_loss(model, x, y).item())
    return torch.stack(path), losses


def sgd(
    lr: float, momentum: float = 0.0
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Plain SGD."""
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def kaisa(lr: float, damping: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """KAISA with plain Newton steps, so that its direction shows."""
    return lambda model: KAISA(
        model,
        lr=lr,
        damping=damping,
        grafting="none",
        solver="eigen",
        inv_update_steps=1,
        fisher="gaussian",
    )


def draw_valley(axes: Axes) -> None:
    """Contours of the loss over the two weights."""
    x, y = valley_data()
    first, second = torch.meshgrid(
        torch.linspace(-3.9, 1.3, 160), torch.linspace(-2.6, 1.5, 140), indexing="ij"
    )
    weights = torch.stack([first.flatten(), second.flatten()])
    losses = 0.5 * (x @ weights - y).square().mean(0).view(first.shape)
    levels = [0.01, 0.04, 0.1, 0.2, 0.4, 0.7, 1.1, 1.6, 2.3, 3.2, 4.4]
    axes.contour(
        first, second, losses, levels, colors="#c4c4c4", linewidths=0.8, zorder=0
    )
    axes.plot(0, 0, marker="+", color=BLACK, markersize=9, zorder=5)
    axes.plot(*START, marker="o", color=BLACK, markersize=4, zorder=5)
    axes.annotate("start", START, (-4, 7), textcoords="offset points", ha="center")
    axes.annotate("minimum", (0, 0), (6, -13), textcoords="offset points")
    axes.set(xlim=(-3.9, 1.3), ylim=(-2.6, 1.5), aspect="equal", xlabel="weight 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])


def draw_runs(
    axes: Axes, runs: Sequence[tuple[str, MakeOptimizer, str, str]], steps: int
) -> None:
    """Paths of optimizers in the valley, by label, optimizer, colour and marker."""
    draw_valley(axes)
    axes.set_ylabel("weight 2")
    for label, make, colour, marker in runs:
        path, losses = descend(make, steps)
        print(f"{label}: loss {losses[0]:.3f} -> {losses[-1]:.2g} in {steps} steps")  # noqa: T201
        axes.plot(
            *path.T,
            color=colour,
            marker=marker,
            markersize=3.5,
            linewidth=1.3,
            label=label,
        )
    axes.legend(loc="upper left", framealpha=1, edgecolor="#dddddd")


def valley() -> Figure:
    """Left: SGD and KAISA from the same start. Right: the paths of several dampings."""
    steps = 12
    rates = torch.arange(0.05, 2.0, 0.05).tolist()
    best = min(rates, key=lambda lr: descend(sgd(lr), steps)[1][-1])
    heavy = min(rates, key=lambda lr: descend(sgd(lr, 0.9), steps)[1][-1])

    figure = Figure(figsize=(FIGURE_WIDTH, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = [
        (f"SGD, lr {best:.2f}", sgd(best), OPTIMIZER_COLORS["SGD"], "o"),
        (f"SGD, momentum 0.9, lr {heavy:.2f}", sgd(heavy, 0.9), BLACK, "s"),
        (
            "KAISA, lr 0.5, damping 0.01",
            kaisa(0.5, 0.01),
            OPTIMIZER_COLORS["KAISA"],
            "D",
        ),
    ]
    draw_runs(left, runs, steps)
    left.set_title(f"{steps} steps: KAISA arrives, SGD does not", loc="left")

    draw_valley(right)
    dials = [
        (0.01, RED, "-"),
        (0.3, GREEN, "--"),
        (1.0, BLUE, "-."),
        (30.0, PURPLE, ":"),
    ]
    for damping, colour, dash in dials:
        # Steps so small that the path is a smooth line; their length
        # does not change its shape.
        lr = 0.02 * (1 + damping)
        path, _ = descend(kaisa(lr, damping), 1500)
        right.plot(
            *path.T, color=colour, linestyle=dash, linewidth=1.8, label=f"{damping:g}"
        )
    right.set_title("KAISA, many small steps, by damping", loc="left")
    right.legend(
        title="damping", loc="upper left", ncols=2, framealpha=1, edgecolor="#dddddd"
    )
    return figure


# ----------------------------------------------------------------------- the placements

PROCESSES = 4
FRACTIONS = ((1.0, "COMM-OPT"), (0.5, "HYBRID-OPT"), (0.25, "MEM-OPT"))
SMALL_NET = [
    ("conv 3→16", LayerDims(1, 28, 16)),  # 3×3 with bias: A has 9 × 3 + 1 rows
    ("conv 16→32", LayerDims(1, 145, 32)),
    ("conv 32→64", LayerDims(1, 289, 64)),
    ("conv 64→64", LayerDims(1, 577, 64)),
    ("conv 64→128", LayerDims(1, 577, 128)),
    ("linear 128→10", LayerDims(1, 129, 10)),
]


def place(
    layers: Sequence[LayerDims], fraction: float
) -> tuple[Grid, list[LayerAssignment]]:
    """The grid of PROCESSES ranks, and who works on each layer."""
    columns = gradient_worker_count(PROCESSES, fraction)
    grid = Grid(PROCESSES // columns, columns)
    return grid, assign_layers(layers, grid)


def draw_placement(
    axes: Axes, grid: Grid, assignments: Sequence[LayerAssignment]
) -> None:
    """A line of boxes a layer, one box a rank; arrows for what travels."""
    half_width = 0.36
    half_height = 0.17
    for line, assignment in enumerate(assignments):
        y = -float(line)
        workers = grid.row(assignment.row)
        for rank in range(PROCESSES):
            face = "#ffffff"
            edge = "#bbbbbb"
            if rank in workers:
                face = "#bfe0f5"
                edge = BLUE
            if rank == assignment.a_inverse_rank:
                face = BLUE
            box(
                axes,
                (rank, y),
                (2 * half_width, 2 * half_height),
                "",
                face=face,
                edge=edge,
            )
            if rank in workers and rank != assignment.a_inverse_rank:
                ends = (
                    (assignment.a_inverse_rank, y + half_height),
                    (rank, y + half_height),
                )
                bend = -0.45 if rank > assignment.a_inverse_rank else 0.45
                arrow(
                    axes,
                    *ends,
                    colour=RED,
                    bend=bend / max(1, abs(rank - assignment.a_inverse_rank)),
                )
            if rank not in workers:
                sender = next(
                    w for w in workers if grid.column_of(w) == grid.column_of(rank)
                )
                ends = (sender, y - half_height), (rank, y - half_height)
                bend = 0.45 if rank > sender else -0.45
                bend /= max(1, abs(rank - sender))
                arrow(axes, *ends, colour=GREEN, bend=bend, dash=(0, (3, 1.5)))
    axes.set(xlim=(-0.5, PROCESSES - 0.5), ylim=(-len(assignments) + 0.45, 0.5))
    axes.set_xticks(range(PROCESSES), [f"rank\n{rank}" for rank in range(PROCESSES)])
    axes.tick_params(
        length=0, top=False, labeltop=True, bottom=False, labelbottom=False
    )
    axes.spines[:].set_visible(False)


def workers_text(grid: Grid) -> str:
    """The number of gradient workers of a layer, in words."""
    count = grid.columns
    return "1 worker" if count == 1 else f"{count} workers"


def placements() -> Figure:
    """The three placements on four ranks and six layers."""
    figure = Figure(figsize=(FIGURE_WIDTH, 5.1), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, (fraction, name) in zip(panels, FRACTIONS, strict=True):
        grid, assignments = place([dims for _, dims in SMALL_NET], fraction)
        draw_placement(panel, grid, assignments)
        panel.set_title(f"{name}: {workers_text(grid)}", pad=10)
    names = [f"{name}\nA {dims.in_dim}², G {dims.out_dim}²" for name, dims in SMALL_NET]
    panels[0].set_yticks([-i for i in range(len(SMALL_NET))], names)
    figure.legend(
        handles=[
            Patch(
                facecolor=BLUE,
                edgecolor=BLUE,
                label="inverse rank, also a gradient worker",
            ),
            Patch(facecolor="#bfe0f5", edgecolor=BLUE, label="gradient worker"),
            Patch(facecolor="#ffffff", edgecolor="#bbbbbb", label="receiver"),
            Line2D([], [], color=RED, label="inverses, at a refresh"),
            Line2D(
                [],
                [],
                color=GREEN,
                linestyle=(0, (3, 1.5)),
                label="preconditioned gradients, every step",
            ),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure


# ---------------------------------------------------------------------------- the costs


def resnet20() -> list[LayerDims]:
    """CIFAR ResNet-20: widths 16, 32, 64, three blocks of two 3×3 convolutions each, 10 classes."""
    layers = [LayerDims(1, 3 * 9, 16)]
    channels = 16
    for width in (16, 32, 64):
        for block in range(3):
            layers.append(LayerDims(1, channels * 9, width))
            layers.append(LayerDims(1, width * 9, width))
            if block == 0 and channels != width:
                layers.append(LayerDims(1, channels, width))  # the 1×1 shortcut
            channels = width
    return [*layers, LayerDims(1, 64 + 1, 10)]


def factor_bytes(layer: LayerDims) -> int:
    """The running averages of A and G as triangles, in float32."""
    return 4 * sum(n * (n + 1) // 2 for n in (layer.in_dim, layer.out_dim))


def inverse_bytes(layer: LayerDims) -> int:
    """Two matrices of eigenvectors and 1 / (v_G v_Aᵀ + γ), in float32."""
    return 4 * (layer.in_dim**2 + layer.out_dim**2 + layer.in_dim * layer.out_dim)


def decomposition_bytes(layer: LayerDims) -> int:
    """Eigenvectors and eigenvalues of A and G, as they travel, in float32."""
    return 4 * sum(n * n + n for n in (layer.in_dim, layer.out_dim))


def costs() -> Figure:
    """Memory and communication of a ResNet-20 on four ranks, by grad_worker_fraction."""
    layers = resnet20()
    factors = sum(map(factor_bytes, layers)) / 2**20
    figure = Figure(figsize=(FIGURE_WIDTH, 3.6), layout="constrained")
    memory, traffic = figure.subplots(1, 2, width_ratios=(1.15, 1))
    centers = []
    for group, (fraction, name) in enumerate(FRACTIONS):
        grid, assignments = place(layers, fraction)
        pairs = list(zip(layers, assignments, strict=True))
        totals = []
        decompositions = []
        gradients = []
        for rank in range(PROCESSES):
            row = grid.row_of(rank)
            inverses = sum(inverse_bytes(y) for y, a in pairs if a.row == row) / 2**20
            x = group * (PROCESSES + 1) + rank
            memory.bar(x, factors, color=SKY, edgecolor="#ffffff", width=0.9)
            memory.bar(
                x, inverses, bottom=factors, color=BLUE, edgecolor="#ffffff", width=0.9
            )
            totals.append(factors + inverses)
            decompositions.append(
                sum(
                    decomposition_bytes(y)
                    for y, a in pairs
                    if a.row == row and a.a_inverse_rank != rank
                )
            )
            gradients.append(
                sum(4 * y.in_dim * y.out_dim for y, a in pairs if a.row != row)
            )

        # Label the group with the least and the most of its ranks.
        centers.append(group * (PROCESSES + 1) + (PROCESSES - 1) / 2)
        label = f"{max(totals):.1f}"
        if max(totals) > min(totals):
            label = f"{min(totals):.1f} to {label}"
        memory.text(centers[-1], max(totals) + 0.3, label, ha="center")

        refresh = sum(decompositions) / PROCESSES / 100 / 2**20
        each = sum(gradients) / PROCESSES / 2**20
        traffic.bar(group, refresh, color=RED, width=0.6)
        traffic.bar(group, each, bottom=refresh, color=GREEN, width=0.6)
        traffic.text(
            group, refresh + each + 0.015, f"{refresh + each:.2f}", ha="center"
        )
        print(f"{name}: factors {factors:.2f} MiB, sent {refresh:.3f} + {each:.3f}")  # noqa: T201

    names = [name for _, name in FRACTIONS]
    memory.set_title("COMM-OPT stores the most", loc="left")
    memory.set_ylabel("memory (MiB), one bar per rank")
    memory.set_xticks(centers, names)
    memory.set_ylim(top=17)
    memory.legend(
        handles=[
            Patch(color=BLUE, label="inverses"),
            Patch(color=SKY, label="running averages"),
        ],
        loc="upper right",
        frameon=False,
    )
    traffic.set_title("MEM-OPT receives the most", loc="left")
    traffic.set_ylabel("received per rank and step (MiB)")
    traffic.set_xticks(range(3), names)
    traffic.set_ylim(top=1.08)
    traffic.legend(
        handles=[
            Patch(color=GREEN, label="preconditioned gradients"),
            Patch(color=RED, label="inverses, every 100 steps"),
        ],
        loc="upper left",
        frameon=False,
    )
    for axes in (memory, traffic):
        axes.tick_params(axis="x", length=0)
    return figure


# --------------------------------------------------------------------------- the owners

DIGITS_MLP = [LayerDims(1, 65, 128), LayerDims(1, 129, 64), LayerDims(1, 65, 10)]
SUBSCRIPTS = "₁₂₃"
LAYER_COLOURS = [(BLUE, "#cfe3f1"), (RED, "#f9dfcf"), (GREEN, "#cdeae0")]  # edge, face


def owners() -> Figure:
    """DPKFAC's two exchanges: gradients to their owners, and preconditioned ones to all ranks."""
    figure = Figure(figsize=(FIGURE_WIDTH, 4.1))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, FIGURE_WIDTH), ylim=(0, 4.1))
    axes.axis("off")
    ranks = len(DIGITS_MLP)
    owner_of = assign_owners(DIGITS_MLP, ranks, "balanced")
    layer_of = {rank: layer for layer, rank in enumerate(owner_of)}
    heights = [2.72, 1.78, 0.84]
    side = (0.32, 0.34)
    gap = 0.37
    before = 0.82
    summed = 2.8
    curvature = 3.66
    solved = 4.52
    after = 6.54

    for y in heights:
        axes.add_patch(
            FancyBboxPatch(
                (0.04, y - 0.4),
                FIGURE_WIDTH - 0.08,
                0.8,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor="#f7f7f7",
                edgecolor="#dddddd",
                linewidth=0.8,
            )
        )
    for rank, y in enumerate(heights):
        axes.text(0.1, y, f"rank {rank}", ha="left", va="center", weight="bold")
        own = layer_of[rank]
        for layer, (edge, face) in enumerate(LAYER_COLOURS):
            x = before + layer * gap
            box(axes, (x, y), side, f"∇{SUBSCRIPTS[layer]}", face="#ffffff", edge=edge)
            box(
                axes,
                (after + layer * gap - gap, y),
                side,
                f"P{SUBSCRIPTS[layer]}",
                face=face,
                edge=edge,
            )
        edge, face = LAYER_COLOURS[own]
        box(axes, (summed, y), side, f"∇{SUBSCRIPTS[own]}", face=face, edge=edge)
        box(
            axes,
            (curvature, y),
            (1.0, 0.66),
            f"A{SUBSCRIPTS[own]}, G{SUBSCRIPTS[own]}\nfrom its\nown batches",
            face="#ffffff",
            edge=edge,
        )
        box(axes, (solved, y), side, f"P{SUBSCRIPTS[own]}", face=face, edge=edge)
        arrow(axes, (summed + 0.19, y), (curvature - 0.52, y), colour=edge)
        arrow(axes, (curvature + 0.52, y), (solved - 0.19, y), colour=edge)

    for layer, rank in enumerate(owner_of):
        edge, _ = LAYER_COLOURS[layer]
        for y in heights:
            start = before + 2 * gap + 0.2
            arrow(
                axes,
                (start, y + 0.09 * (1 - layer)),
                (summed - 0.2, heights[rank]),
                colour=edge,
            )
            arrow(
                axes,
                (solved + 0.2, heights[rank]),
                (after - gap - 0.2, y + 0.09 * (1 - layer)),
                colour=edge,
            )

    titles = [
        (before + gap, "gradients\nof this\nrank's batch"),
        (2.22, "sum sent to\nthe owner:\n(P − 1) N"),
        (curvature, "the owner\npreconditions\nthe mean"),
        (5.4, "sent to\nall ranks:\n(P − 1) N"),
        (after, "every rank\ntakes the\nbase step"),
    ]
    for x, title in titles:
        axes.text(x, 3.6, title, ha="center", va="center", linespacing=1.3)
    axes.text(
        FIGURE_WIDTH / 2,
        0.2,
        "Statistics, factors A and G, and inverses are never sent.",
        ha="center",
        va="center",
    )
    return figure


# ---------------------------------------------------------------------------- the split


def dho2(
    lr: float, newton_scale: float
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """DHO2 over plain SGD, the steep direction in its subspace from the first step on."""

    def make(model: nn.Module) -> DHO2:
        x, y = valley_data()
        return DHO2(
            model,
            lr=lr,
            newton_scale=newton_scale,
            num_largest=1,
            warmup_steps=0,
            curvature_interval=100,
            curvature_closure=lambda: valley_loss(model, x, y),
        )

    return make


def split() -> Figure:
    """Left: SGD and DHO2 from the same start.

    Right: the two parts of DHO2's first steps.
    """
    steps = 12
    shown = 4
    lr = 10.0
    newton_scale = 0.5
    rates = torch.arange(0.05, 2.0, 0.05).tolist()
    best = min(rates, key=lambda rate: descend(sgd(rate), steps)[1][-1])

    figure = Figure(figsize=(FIGURE_WIDTH, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = [
        (f"SGD, lr {best:.2f}, the best", sgd(best), OPTIMIZER_COLORS["SGD"], "o"),
        (
            f"DHO2 over SGD, lr {lr:g}",
            dho2(lr, newton_scale),
            OPTIMIZER_COLORS["DHO2"],
            "D",
        ),
    ]
    draw_runs(left, runs, steps)
    left.set_title(f"{steps} steps: DHO2 arrives, SGD does not", loc="left")

    draw_valley(right)
    turn = torch.deg2rad(torch.tensor(25.0))
    across = torch.tensor([-turn.sin(), turn.cos()])  # as in valley_data
    path, _ = descend(dho2(lr, newton_scale), shown)
    for here, there in pairwise(path):
        corner = here + (there - here) @ across * across
        arrow(right, tuple(here.tolist()), tuple(corner.tolist()), colour=BLUE)
        arrow(right, tuple(corner.tolist()), tuple(there.tolist()), colour=GREEN)
    right.plot(
        *path.T,
        color=OPTIMIZER_COLORS["DHO2"],
        marker="D",
        markersize=3.5,
        linestyle="none",
    )
    right.set_title(f"the two parts of DHO2's first {shown} steps", loc="left")
    handles = [
        Line2D([], [], color=BLUE, label=f"Newton, {newton_scale:g} of the way across"),
        Line2D([], [], color=GREEN, label="SGD along the valley"),
    ]
    right.legend(handles=handles, loc="upper left", framealpha=1, edgecolor="#dddddd")
    return figure


# ----------------------------------------------------------------------- the flow chart

# A question, what follows from the answer that leads out of the chart, and that answer.
CHOICES = [
    (
        "Do you use FSDP1 or tensor parallelism, or\nmust a step cost no more than AdamW's?",
        "yes",
        "your own optimizer",
        "none of these fits",
    ),
    (
        "Do you train only a head\non a frozen body?",
        "yes",
        "DHO2 (research)",
        "MRDHO2, with spare processes",
    ),
    (
        "Does summary() show most parameters\nas preconditioned?",
        "no",
        "DHO2 (research)",
        "if you cannot raise the share",
    ),
    (
        "Do you train on several processes?",
        "no",
        "KAISA",
        "",
    ),
    (
        "Is memory or communication the limit?",
        "yes",
        "DPKFAC",
        "",
    ),
    (
        "Are cores or processes idle?",
        "yes",
        "DistKFAC",
        "inverses while training continues",
    ),
]


def choosing() -> Figure:
    """A chart of questions from top to bottom. Each has one answer that ends it."""
    height = 0.95
    total = height * (len(CHOICES) + 1)
    figure = Figure(figsize=(7, total))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 7), ylim=(0, total))
    axes.axis("off")
    questions = 2.0
    optimizers = 5.55

    for row, (question, answer, optimizer, detail) in enumerate(CHOICES):
        y = total - height * (row + 0.5)
        box(axes, (questions, y), (3.76, 0.62), question, face=PALE, edge=GREY)
        ours = not optimizer.startswith("your own")
        box(
            axes,
            (optimizers, y),
            (2.66, 0.62),
            f"{optimizer}\n{detail}" if detail else optimizer,
            face="#e9f4fb" if ours else "#ffffff",
            edge=BLUE if ours else GREY,
        )
        arrow(axes, (questions + 1.88, y), (optimizers - 1.33, y))
        axes.text(4.04, y + 0.07, answer, ha="center", va="bottom")
        arrow(axes, (questions, y - 0.31), (questions, y - height + 0.31))
        other = "no" if answer == "yes" else "yes"
        axes.text(questions + 0.1, y - height / 2, other, ha="left", va="center")

    box(axes, (questions, height / 2), (3.76, 0.62), "KAISA", face="#e9f4fb", edge=BLUE)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "choosing": choosing,
    "step": step,
    "valley": valley,
    "placements": placements,
    "costs": costs,
    "owners": owners,
    "split": split,
}


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=list(FIGURES), help=", ".join(FIGURES)
    )
    torch.set_num_threads(1)
    mpl.rcParams.update(STYLE)
    for name in parser.parse_args().names:
        save(FIGURES[name](), HERE / f"{name}.png")


if __name__ == "__main__":
    main()

"""What a network does not know: Laplace's approximation of its last layer, on turned, noisy digits.

    python examples/laplace.py --output laplace.png

The posterior of the last layer's weights is N(w, (N F + δ)⁻¹), F of that layer by K-FAC (Ritter et
al. 2018; Kristiadi et al. 2020); a prediction is the mean over samples. The prior's precision δ has
the least loss on validation images; so has T of softmax(z / T). ECE is that of Guo et al. 2017.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, linear

from digits import CLASSES, PIXELS, load_split
from second_order import measure

WIDTH, VALIDATION, SAMPLES, BINS = 64, 300, 100, 10
KNOWN = 45.0, 0.5  # degrees, and noise in deviations of a pixel
KINDS = {"as in training": KNOWN, "turned more": (90.0, 1.0)}
PRECISIONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TEMPERATURES = (0.7, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0)
COLOURS = {"MAP": "#D55E00", "temperature": "#555555", "Laplace": "#0072B2"}


def disturbed(images: Tensor, angle: float, noise: float) -> Tensor:
    """Images turned by up to an angle either way, and with noise."""
    turn = (2 * torch.rand(len(images), 1) - 1) * math.radians(angle)
    cos, sin, zero = turn.cos(), turn.sin(), 0 * turn
    maps = torch.cat([cos, -sin, zero, sin, cos, zero], 1).view(-1, 2, 3)
    grid = affine_grid(maps, [len(images), 1, 8, 8], align_corners=False)
    turned = grid_sample(images.view(-1, 1, 8, 8), grid, "bilinear", "border", align_corners=False)
    return turned.flatten(1) + noise * torch.randn(images.shape)


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        some = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()


def laplace(last: Any, curvature: Any, count: int, precision: float, features: Tensor) -> Tensor:
    """Class probabilities, means over samples of a linear layer's weights."""
    generator, logits = torch.Generator().manual_seed(0), []
    for _ in range(SAMPLES):  # of N(0, (F + δ/N)⁻¹), √N too long
        weight, bias = curvature.sample(precision / count, generator).values()
        logits.append(last(features) + linear(features, weight, bias) / count**0.5)
    return torch.stack(logits).softmax(-1).mean(0)


def loss_of(p: Tensor, labels: Tensor) -> float:
    return -float(p.gather(1, labels.unsqueeze(1)).clamp(min=1e-12).log().mean())


def reliability(p: Tensor, labels: Tensor) -> Tensor:
    """By bin of confidence: the share of images, their mean confidence, and accuracy; (3, bins)."""
    confidence, guess = p.max(1)
    values = torch.stack([torch.ones_like(confidence), confidence, (guess == labels).float()])
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    count, *sums = torch.zeros(3, BINS).index_add_(1, bins, values)
    return torch.stack([count / len(p), *(each / count for each in sums)])


def predictions(seed: int, steps: int) -> dict[str, dict[str, Tensor]]:
    """By kind of test images and method, class probabilities."""
    torch.manual_seed(seed)
    data = load_split()
    held, kept = torch.randperm(len(data.train_images)).tensor_split([VALIDATION])
    images, labels = disturbed(data.train_images[kept], *KNOWN), data.train_labels[kept]
    unseen, answers = disturbed(data.train_images[held], *KNOWN), data.train_labels[held]
    body = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model = nn.Sequential(body, last := nn.Linear(WIDTH, CLASSES))
    train(model, images, labels, steps)
    model.requires_grad_(False)
    curvature = measure(model, [images], factors="kfac", layers=["1"], progress=False)

    def posterior(precision: float, x: Tensor) -> Tensor:
        return laplace(last, curvature, len(images), precision, body(x))

    def cooled(temperature: float, x: Tensor) -> Tensor:
        return torch.softmax(model(x) / temperature, 1)

    precision = min(PRECISIONS, key=lambda number: loss_of(posterior(number, unseen), answers))
    temperature = min(TEMPERATURES, key=lambda number: loss_of(cooled(number, unseen), answers))
    print(f"seed {seed}: prior precision {precision:g}, temperature {temperature:g}")
    tests = {kind: disturbed(data.test_images, *how) for kind, how in KINDS.items()}
    functions = (cooled, 1.0), (cooled, temperature), (posterior, precision)
    methods = dict(zip(COLOURS, functions, strict=True))
    return {kind: {m: f(n, x) for m, (f, n) in methods.items()} for kind, x in tests.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Laplace's approximation of the last layer.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("laplace.png"))
    args = parser.parse_args(arguments)
    runs = [predictions(seed, args.steps) for seed in args.seeds]
    labels = load_split().test_labels.repeat(len(runs))
    drawing = Figure(figsize=(7.4, 3.5), layout="constrained")
    print("test images     method       accuracy    NLL    ECE  (the seeds together)")
    for axes, kind in zip(drawing.subplots(1, 2), runs[0], strict=True):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, linestyle="--")
        for method, colour in COLOURS.items():
            p = torch.cat([run[kind][method] for run in runs])
            share, confidence, accuracy = reliability(p, labels)
            ece = float((share * (confidence - accuracy).abs()).nansum())
            right, loss = float((share * accuracy).nansum()), loss_of(p, labels)
            print(f"{kind:15} {method:12} {right:8.1%}  {loss:5.3f}  {ece:5.3f}")
            points = confidence[share > 0.01], accuracy[share > 0.01]
            axes.plot(*points, "o-", color=colour, markersize=4, label=f"{method}, ECE {ece:.3f}")
        axes.set(xlabel="confidence", ylabel="accuracy", title=f"test images {kind}")
        axes.legend(loc="upper left", frameon=False)
    drawing.savefig(args.output, dpi=160, facecolor="#ffffff")


if __name__ == "__main__":
    main()

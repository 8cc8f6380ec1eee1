"""Calibrated predictions of rotated, noisy digits, by a Laplace approximation.

    python laplace_digits.py --output laplace.png

The posterior of the last layer's weights is N(w, (N F + δ)⁻¹), with the layer's Fisher
matrix F by K-FAC (Ritter et al. 2018; Kristiadi et al. 2020). A prediction is the mean
over samples of the weights. The baselines are the network itself (MAP) and softmax(z /
T). The prior precision δ and the temperature T are those with the lowest loss on
validation images. The expected calibration error (ECE) is that of Guo et al. 2017.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, linear

from second_order import measure

WIDTH = 64
VALIDATION = 300  # images that choose the prior precision and the temperature
SAMPLES = 100  # of the last layer's weights
BINS = 10  # of confidence, for the ECE

# The largest rotation in degrees, and the noise in standard deviations of a pixel.
TRAINING = (45.0, 0.5)
TESTS = {"as in training": TRAINING, "rotated more": (90.0, 1.0)}
PRECISIONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TEMPERATURES = (0.7, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0)
COLORS = {"MAP": "#D55E00", "temperature": "#555555", "Laplace": "#0072B2"}


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


def distort(images: Tensor, angle: float, noise: float) -> Tensor:
    """Rotate images by a random angle of at most ``angle`` degrees, and add noise."""
    angles = (2 * torch.rand(len(images), 1) - 1) * math.radians(angle)
    cos = angles.cos()
    sin = angles.sin()
    zero = torch.zeros_like(angles)
    maps = torch.cat([cos, -sin, zero, sin, cos, zero], 1).view(-1, 2, 3)
    grid = affine_grid(maps, [len(images), 1, 8, 8], align_corners=False)
    rotated = grid_sample(
        images.view(-1, 1, 8, 8), grid, "bilinear", "border", align_corners=False
    )
    return rotated.flatten(1) + noise * torch.randn(images.shape)


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()


def laplace(
    last: Any, curvature: Any, count: int, precision: float, features: Tensor
) -> Tensor:
    """Return class probabilities, averaged over samples of a linear layer's weights."""
    generator = torch.Generator().manual_seed(0)
    logits = []
    for _ in range(SAMPLES):
        # A sample of N(0, (F + δ/N)⁻¹) is √N times as long as one of N(0, (N F + δ)⁻¹).
        weight, bias = curvature.sample(precision / count, generator).values()
        logits.append(last(features) + linear(features, weight, bias) / count**0.5)
    return torch.stack(logits).softmax(-1).mean(0)


def mean_loss(p: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-likelihood of labels, given class probabilities."""
    return -float(p.gather(1, labels.unsqueeze(1)).clamp(min=1e-12).log().mean())


def reliability(p: Tensor, labels: Tensor) -> Tensor:
    """Return each bin's share of images, confidence and accuracy, as (3, bins)."""
    confidence, prediction = p.max(1)
    correct = (prediction == labels).float()
    values = torch.stack([torch.ones_like(confidence), confidence, correct])
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    count, *sums = torch.zeros(3, BINS).index_add_(1, bins, values)
    return torch.stack([count / len(p), *(total / count for total in sums)])


def predictions(seed: int, steps: int) -> dict[str, dict[str, Tensor]]:
    """Return class probabilities by kind of test images and by method."""
    torch.manual_seed(seed)
    x_train, y_train, x_test, _ = load_data()
    validation, training = torch.randperm(len(x_train)).tensor_split([VALIDATION])
    images = distort(x_train[training], *TRAINING)
    x_validation = distort(x_train[validation], *TRAINING)
    y_validation = y_train[validation]

    # Train a network, and compute the curvature of its last layer.
    body = nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    )
    last = nn.Linear(WIDTH, 10)
    model = nn.Sequential(body, last)
    train(model, images, y_train[training], steps)
    model.requires_grad_(False)
    curvature = measure(model, [images], factors="kfac", layers=["1"], progress=False)

    def posterior(precision: float, x: Tensor) -> Tensor:
        return laplace(last, curvature, len(images), precision, body(x))

    def scaled(temperature: float, x: Tensor) -> Tensor:
        return torch.softmax(model(x) / temperature, 1)

    # Choose the prior precision and the temperature on the validation images.
    precision = min(
        PRECISIONS,
        key=lambda delta: mean_loss(posterior(delta, x_validation), y_validation),
    )
    temperature = min(
        TEMPERATURES, key=lambda t: mean_loss(scaled(t, x_validation), y_validation)
    )
    print(f"seed {seed}: prior precision {precision:g}, temperature {temperature:g}")
    found = {}
    for kind, distortion in TESTS.items():
        x = distort(x_test, *distortion)
        found[kind] = {
            "MAP": scaled(1.0, x),
            "temperature": scaled(temperature, x),
            "Laplace": posterior(precision, x),
        }
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="The Laplace approximation of the last layer."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("laplace.png"))
    args = parser.parse_args(arguments)
    runs = [predictions(seed, args.steps) for seed in args.seeds]
    labels = load_data()[3].repeat(len(runs))
    drawing = Figure(figsize=(7.4, 3.5), layout="constrained")
    print("test images     method       accuracy    NLL    ECE  (the seeds together)")
    for axes, kind in zip(drawing.subplots(1, 2), runs[0], strict=True):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, linestyle="--")
        for method, color in COLORS.items():
            p = torch.cat([run[kind][method] for run in runs])
            share, confidence, accuracy = reliability(p, labels)
            ece = float((share * (confidence - accuracy).abs()).nansum())
            mean_accuracy = float((share * accuracy).nansum())
            loss = mean_loss(p, labels)
            print(
                f"{kind:15} {method:12} {mean_accuracy:8.1%}  {loss:5.3f}  {ece:5.3f}"
            )
            shown = share > 0.01
            axes.plot(
                confidence[shown],
                accuracy[shown],
                "o-",
                color=color,
                markersize=4,
                label=f"{method}, ECE {ece:.3f}",
            )
        axes.set(xlabel="confidence", ylabel="accuracy", title=f"test images {kind}")
        axes.legend(loc="upper left", frameon=False)
    drawing.savefig(args.output, dpi=160, facecolor="#ffffff")


if __name__ == "__main__":
    main()

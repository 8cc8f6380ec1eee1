"""Influence functions with EK-FAC: which training images explain a prediction?

    python influence.py

If a group R of training images is left out, the loss of a query q changes to first
order by g_qᵀ (F + λ)⁻¹ Σ_R g_z / N (Koh & Liang 2017). F is the Fisher matrix, here by
EK-FAC (Grosse et al. 2023), and λ the weight decay. To check these predictions, the
script retrains the model without each group from several initializations, and compares
the rank of the predicted changes with that of the true ones. The baseline is the plain
product g_qᵀ Σ_R g_z (Pruthi et al. 2020).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import combinations
from typing import Any, cast

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from second_order import measure

SHARE = 0.2  # of the images in a group
DECAY = 1e-2  # λ / 2 ‖w‖² is part of the loss
HIDDEN = 32
STEPS = 300

Weights = Mapping[str, Tensor]  # by parameter name
Data = tuple[Tensor, Tensor]  # images and labels


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


def losses(model: nn.Module, weights: Weights, data: Data) -> Tensor:
    logits = functional_call(model, dict(weights), (data[0],))
    return cross_entropy(logits, data[1], reduction="none")


def train(model: nn.Module, data: Data, keep: Tensor) -> Weights:
    """Train a copy of the model on the images that each row of ``keep`` selects."""

    def objective(weights: Weights, keep: Tensor) -> Tensor:
        squares = torch.stack([w.square().sum() for w in weights.values()]).sum()
        return (losses(model, weights, data) * keep).mean() + DECAY / 2 * squares

    weights, _ = stack_module_state([model] * len(keep))
    optimizer = torch.optim.Adam(weights.values(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        for name, gradient in vmap(grad(objective))(weights, keep).items():
            weights[name].grad = gradient
        optimizer.step()
        schedule.step()
    return {name: w.detach() for name, w in weights.items()}


def gradients(model: nn.Module, data: Data) -> Weights:
    """Return each image's gradient by parameter name, of shape (images, ...)."""

    def loss(weights: Weights, image: Tensor, label: Tensor) -> Tensor:
        example = (image.unsqueeze(0), label.unsqueeze(0))
        return losses(model, weights, example).squeeze()

    return cast(Weights, vmap(grad(loss), (None, 0, 0))(model.state_dict(), *data))


def products(a: Weights, b: Weights) -> Tensor:
    """Return the inner products of all pairs, of shape (len of a, len of b)."""
    return torch.stack([a[name].flatten(1) @ b[name].flatten(1).T for name in b]).sum(0)


def predicted_changes(model: nn.Module, data: Data, queries: Data) -> dict[str, Tensor]:
    """Predict N times the change of a query's loss if an image is left out.

    Returns:
        By method, a tensor of shape (queries, images).
    """
    curvature = measure(model, [data], factors="ekfac", progress=False)
    data_gradients = gradients(model, data)
    query_gradients = gradients(model, queries)
    solved = curvature.solve(query_gradients, damping=DECAY)  # one call for all queries
    return {
        "EK-FAC": products(solved, data_gradients),
        "plain": products(query_gradients, data_gradients),
    }


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Return the rank correlation of each row of a with the same row of b."""
    ranks = torch.stack([a, b]).argsort(-1).argsort(-1).double()
    n = a.shape[-1]
    squares = (ranks[0] - ranks[1]).square().sum(-1)
    return 1 - 6 * squares / (n**3 - n)


def influence(seed: int, args: Any) -> dict[str, Tensor]:
    """Return each method's rank correlation with the true changes, for each query."""
    # Draw the training images, the queries, and the groups that are left out.
    generator = torch.Generator().manual_seed(seed)
    x_train, y_train, x_test, y_test = load_data()
    chosen = torch.randperm(len(x_train), generator=generator)[: args.examples]
    data = (x_train[chosen], y_train[chosen])
    chosen = torch.randperm(len(x_test), generator=generator)[: args.queries]
    queries = (x_test[chosen], y_test[chosen])
    order = torch.rand(args.groups, args.examples, generator=generator).argsort(-1)
    left_out = (order < SHARE * args.examples).float()
    # The first model keeps all.
    keep = torch.cat([torch.ones(1, args.examples), 1 - left_out])

    # Train from several initializations, with and without each group.
    true_changes: list[Tensor] = []
    predicted: dict[str, Tensor] = {}
    for start in range(args.starts):
        torch.manual_seed(1000 * seed + start)
        model = nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10))
        weights = train(model, data, keep)
        query_losses = torch.vmap(losses, (None, 0, None))(model, weights, queries)
        true_changes.append((query_losses[1:] - query_losses[0]).T)
        model.load_state_dict({name: w[0] for name, w in weights.items()})
        for method, score in predicted_changes(model, data, queries).items():
            predicted[method] = predicted.get(method, 0) + score @ left_out.T

    # Compare. Two sets of true changes agree as well as a perfect prediction could.
    mean_change = torch.stack(true_changes).mean(0)  # (queries, groups)
    correlations = {name: spearman(p, mean_change) for name, p in predicted.items()}
    between = [spearman(a, b) for a, b in combinations(true_changes, 2)]
    correlations["other initializations"] = torch.stack(between).mean(0)
    return correlations


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Influence functions, compared with retraining."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--examples", type=int, default=300, help="training images")
    parser.add_argument("--queries", type=int, default=40, help="test images")
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument(
        "--starts", type=int, default=3, help="initializations, at least 2"
    )
    args = parser.parse_args(arguments)
    print(
        "Spearman's rank correlation with the true change of a query's loss, mean over queries"
    )
    for seed in args.seeds:
        correlations = influence(seed, args)
        columns = [f"{name} {rho.mean():.3f}" for name, rho in correlations.items()]
        print(f"seed {seed}: " + ", ".join(columns))


if __name__ == "__main__":
    main()

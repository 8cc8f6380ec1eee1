"""Which training images a model's answers come from: influence, held against training anew.

    python examples/influence.py

A group R of training images is left out. To first order the loss of a query q changes by
g_qᵀ (F + λ)⁻¹ Σ_R g_z / N (Koh & Liang 2017), F by EK-FAC (Grosse et al. 2023) and λ the weight
decay. Models are trained anew without each group, from several initialisations; the true changes,
averaged over these, are ranked against those foretold, and against the plain products g_qᵀ Σ_R g_z
(Pruthi et al. 2020).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from digits import CLASSES, PIXELS, load_split
from second_order import measure

SHARE = 0.2  # of the images in a group
DECAY = 1e-2  # λ / 2 ‖w‖² is part of the loss
HIDDEN, STEPS = 32, 300

Weights = Mapping[str, Tensor]
Data = tuple[Tensor, Tensor]  # images and labels


def losses(model: nn.Module, weights: Weights, data: Data) -> Tensor:
    logits = functional_call(model, dict(weights), (data[0],))
    return cross_entropy(logits, data[1], reduction="none")


def trained(model: nn.Module, data: Data, keep: Tensor) -> Weights:
    """Train a copy of a model on the images of each row of ``keep``, side by side."""

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
    """The gradient of each image's loss, by parameter name, (images, ...)."""

    def loss(weights: Weights, image: Tensor, label: Tensor) -> Tensor:
        return losses(model, weights, (image.unsqueeze(0), label.unsqueeze(0))).squeeze()

    return cast(Weights, vmap(grad(loss), (None, 0, 0))(model.state_dict(), *data))


def products(a: Weights, b: Weights) -> Tensor:
    """Inner products of all pairs, (of a, of b)."""
    return torch.stack([a[name].flatten(1) @ b[name].flatten(1).T for name in b]).sum(0)


def foretold(model: nn.Module, data: Data, queries: Data) -> dict[str, Tensor]:
    """By method, N times what leaving out an image adds to a query's loss, (queries, images)."""
    curvature = measure(model, [data], factors="ekfac", progress=False)
    of_data, of_queries = gradients(model, data), gradients(model, queries)
    solved = curvature.solve(of_queries, damping=DECAY)  # of all queries at once
    return {"EK-FAC": products(solved, of_data), "plain": products(of_queries, of_data)}


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """The rank correlation of each row of a with that of b."""
    ranks, size = torch.stack([a, b]).argsort(-1).argsort(-1).double(), a.shape[-1]
    return torch.sub(1, 6 * ranks.diff(dim=0)[0].square().sum(-1) / (size**3 - size))


def influence(seed: int, args: Any) -> dict[str, Tensor]:
    """By method, rank correlations of foretold with true changes of each query's loss."""
    digits, generator = load_split(), torch.Generator().manual_seed(seed)
    some = torch.randperm(len(digits.train_images), generator=generator)[: args.examples]
    data = digits.train_images[some], digits.train_labels[some]
    some = torch.randperm(len(digits.test_images), generator=generator)[: args.queries]
    queries = digits.test_images[some], digits.test_labels[some]
    order = torch.rand(args.groups, args.examples, generator=generator).argsort(-1)
    left_out = (order < SHARE * args.examples).float()
    keep = torch.cat([torch.ones(1, args.examples), 1 - left_out])  # the first model has them all

    changes, scores = [], dict[str, Tensor]()
    for start in range(args.starts):
        torch.manual_seed(1000 * seed + start)
        model = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
        weights = trained(model, data, keep)
        of_models = torch.vmap(losses, (None, 0, None))(model, weights, queries)
        changes.append((of_models[1:] - of_models[0]).T)
        model.load_state_dict({name: w[0] for name, w in weights.items()})
        for method, score in foretold(model, data, queries).items():
            scores[method] = scores.get(method, 0) + score @ left_out.T
    true = torch.stack(changes).mean(0)  # (queries, groups)
    found = {method: spearman(score, true) for method, score in scores.items()}
    others = [spearman(changes[i], changes[j]) for i in range(args.starts) for j in range(i)]
    return found | {"other initialisations": torch.stack(others).mean(0)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Influence, held against training anew.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--examples", type=int, default=300, help="training images")
    parser.add_argument("--queries", type=int, default=40, help="test images")
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--starts", type=int, default=3, help="initialisations, at least 2")
    args = parser.parse_args(arguments)
    print("Spearman's rank correlation with the true change of a query's loss, mean of the queries")
    for seed in args.seeds:
        found = influence(seed, args)
        print(f"seed {seed}: " + ", ".join(f"{k} {v.mean():.3f}" for k, v in found.items()))


if __name__ == "__main__":
    main()

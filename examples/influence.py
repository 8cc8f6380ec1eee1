"""Which training images make a model see a test image as it does: influence scores on digits.

    python examples/influence.py
    python examples/influence.py --hidden 16 --points 30 --images 0 7 21

KAISA trains; its factors stand for the Hessian. Removing a training example z changes the loss of a
test image by g_testᵀ (F + λ)⁻¹ g_z / N, to first order (Koh & Liang 2017), where λ is the weight
decay, part of the loss here. Some examples are really removed, and the model is trained again
without them. The table has the correlation of what was predicted with what came true, beside that
of the same prediction with the whole Hessian of the loss, the best that can be had to first order,
and that of the plain product g_testᵀ g_z.

A linear model is convex, so that retraining has one answer. With --hidden, training again starts
from the trained weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from digits import CLASSES, PIXELS, load_split
from second_order import KAISA, KroneckerCurvature

PASSES = 100  # of the trained model, for factors of its weights alone; labels are sampled


class Data(NamedTuple):
    """Images, float64, and labels."""

    images: Tensor
    labels: Tensor


def network(hidden: int) -> nn.Sequential:
    """64-10, or 64-hidden-10 with tanh, in float64."""
    if hidden == 0:
        return nn.Sequential(nn.Linear(PIXELS, CLASSES)).double()
    first, last = nn.Linear(PIXELS, hidden), nn.Linear(hidden, CLASSES)
    return nn.Sequential(first, nn.Tanh(), last).double()


def objective(model: nn.Module, data: Data, keep: Tensor, decay: float) -> Tensor:
    """Mean cross-entropy of the examples kept, over all of them, and the weight decay."""
    losses = nn.functional.cross_entropy(model(data.images), data.labels, reduction="none")
    squares = sum(p.square().sum() for p in model.parameters())
    return (losses * keep).mean() + decay / 2 * squares


def train(model: nn.Module, data: Data, decay: float, steps: int) -> KAISA:
    """KAISA on all examples at once."""
    keep = torch.ones(len(data.images), dtype=torch.float64)
    optimizer = KAISA(model, lr=0.5, fisher="sampled", factor_decay=0.98)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(model, data, keep, decay).backward()
        optimizer.step()
    return optimizer


def settle(model: nn.Module, data: Data, keep: Tensor, decay: float) -> None:
    """Go on to the minimum of the objective: influence is about minima."""
    lbfgs = torch.optim.LBFGS(
        model.parameters(), max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        value = objective(model, data, keep, decay)
        value.backward()
        return value

    lbfgs.step(closure)


def factors_of_the_minimum(model: nn.Module, optimizer: KAISA, data: Data) -> KroneckerCurvature:
    """The factors of the weights as they are: the averages of many passes with lr=0."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(PASSES):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.images), data.labels).backward()
        optimizer.step()
    return optimizer.curvature(dtype=torch.float64)


def gradients(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """The gradient of each example's loss, by parameter name: (N, *shape)."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, weights, (image.unsqueeze(0),))
        return nn.functional.cross_entropy(logits, label.unsqueeze(0))

    found: dict[str, Tensor] = vmap(grad(loss), (None, 0, 0))(weights, *data)
    return found


def products(vector: Mapping[str, Tensor], of_each: Mapping[str, Tensor]) -> Tensor:
    """The inner products of a vector with each example's gradient, (N,)."""
    parts = [each.flatten(1) @ vector[name].reshape(-1) for name, each in of_each.items()]
    return torch.stack(parts).sum(0)


def hessian(model: nn.Module, data: Data, decay: float) -> Tensor:
    """The whole Hessian of the objective, in the order of the parameters; for small models."""
    names, weights = zip(*((n, p.detach()) for n, p in model.named_parameters()), strict=True)
    sizes = [p.numel() for p in weights]

    def value(flat: Tensor) -> Tensor:
        pieces = zip(names, weights, flat.split(sizes), strict=True)
        named = {name: piece.view_as(p) for name, p, piece in pieces}
        logits = functional_call(model, named, (data.images,))
        return nn.functional.cross_entropy(logits, data.labels) + decay / 2 * flat.square().sum()

    flat = torch.cat([p.reshape(-1) for p in weights])
    product = vmap(lambda v: jvp(grad(value), (flat,), (v,))[1], chunk_size=64)
    found: Tensor = product(torch.eye(len(flat), dtype=flat.dtype))
    return found


def losses_of(model: nn.Module, data: Data) -> Tensor:
    with torch.no_grad():
        return nn.functional.cross_entropy(model(data.images), data.labels, reduction="none")


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


class Found(NamedTuple):
    """Of the test images: predicted and true changes of the loss, (images, points)."""

    points: Tensor  # indices of the examples that were removed
    predicted: Tensor
    exact: Tensor  # the same with the whole Hessian
    plain: Tensor  # and without curvature
    true: Tensor
    scores: Tensor  # predictions for all training examples, (images, N)


def influence(
    train_data: Data, test_data: Data, *, hidden: int, decay: float, steps: int, points: int
) -> Found:
    """Predict what removing examples does to the test images' losses, and remove some of them.

    Half of those that are removed are drawn by chance, half are those of the largest predictions.
    """
    torch.manual_seed(0)
    model, count = network(hidden), len(train_data.images)
    everything = torch.ones(count, dtype=torch.float64)
    with train(model, train_data, decay, steps) as optimizer:
        settle(model, train_data, everything, decay)
        curvature = factors_of_the_minimum(model, optimizer, train_data)
    of_train, of_test = gradients(model, train_data), gradients(model, test_data)
    whole = torch.linalg.cholesky(hessian(model, train_data, decay))
    scores, exact, plain = [], [], []
    for i in range(len(test_data.images)):
        g = {name: each[i] for name, each in of_test.items()}
        scores.append(products(curvature.solve(g, damping=decay), of_train) / count)
        column = torch.cat([part.reshape(-1) for part in g.values()]).unsqueeze(1)
        pieces = torch.cholesky_solve(column, whole).split([part.numel() for part in g.values()])
        solved = {name: piece.view_as(g[name]) for name, piece in zip(g, pieces, strict=True)}
        exact.append(products(solved, of_train) / count)
        plain.append(products(g, of_train))
    predicted = torch.stack(scores)
    strongest = predicted.abs().sum(0).argsort(descending=True)[: points // 2]
    chance = torch.randperm(count)[: points - len(strongest)]
    chosen = torch.cat([strongest, chance]).unique()
    before, weights = losses_of(model, test_data), [p.detach().clone() for p in model.parameters()]
    changes = []
    for point in chosen.tolist():
        keep = everything.clone()
        keep[point] = 0.0
        with torch.no_grad():
            for p, w in zip(model.parameters(), weights, strict=True):
                p.copy_(w)
        settle(model, train_data, keep, decay)
        changes.append(losses_of(model, test_data) - before)
    true = torch.stack(changes, 1)
    by_hessian, by_nothing = (torch.stack(each)[:, chosen] for each in (exact, plain))
    return Found(chosen, predicted[:, chosen], by_hessian, by_nothing, true, predicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--examples", type=int, default=400, help="training images")
    parser.add_argument("--images", type=int, nargs="+", default=[3, 18, 42], help="test images")
    parser.add_argument("--hidden", type=int, default=0, help="hidden units; 0: a linear model")
    parser.add_argument("--decay", type=float, default=1e-2, help="λ, weight decay in the loss")
    parser.add_argument("--steps", type=int, default=60, help="steps of KAISA")
    parser.add_argument("--points", type=int, default=40, help="training images to remove")
    args = parser.parse_args()
    digits = load_split()
    train_data = Data(
        digits.train_images[: args.examples].double(), digits.train_labels[: args.examples]
    )
    images = torch.tensor(args.images)
    test_data = Data(digits.test_images[images].double(), digits.test_labels[images])
    found = influence(
        train_data,
        test_data,
        hidden=args.hidden,
        decay=args.decay,
        steps=args.steps,
        points=args.points,
    )
    print(f"{len(found.points)} of {args.examples} training images removed, one at a time")
    print("correlations of predicted with true changes of the loss:")
    print("test image  label  (A ⊗ G + λ)⁻¹  by rank  slope  H⁻¹    g·g     helpful: labels")
    for i, index in enumerate(args.images):
        predicted, true = found.predicted[i], found.true[i]
        helpful = found.scores[i].argsort(descending=True)[:6]
        labels = " ".join(map(str, train_data.labels[helpful].tolist()))
        slope = float((predicted @ true) / (predicted @ predicted))
        print(
            f"{index:10}  {int(test_data.labels[i]):5}  {correlation(predicted, true):13.3f}"
            f"  {correlation(ranks(predicted), ranks(true)):7.3f}  {slope:5.2f}"
            f"  {correlation(found.exact[i], true):5.3f}  {correlation(found.plain[i], true):6.3f}"
            f"  {labels}"
        )


if __name__ == "__main__":
    main()

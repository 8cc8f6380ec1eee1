"""Continual learning: learn digits 0 to 4, then 5 to 9, and forget little.

    python continual.py

Elastic weight consolidation adds the penalty λ/2 (w - w*)ᵀ (F + ρ) (w - w*) to the
second task's loss. w* are the weights after the first task, F is its Fisher matrix, and
ρ is the precision of a prior. The script compares F by EK-FAC (as Ritter et al. 2018),
the diagonal of F (as Kirkpatrick et al. 2017), the identity in place of F + ρ, and no
penalty. Both tasks have five classes (the digit modulo 5) and share all weights. λ and
ρ are chosen on other seeds than those reported, by the mean accuracy of both tasks on a
fifth of the training images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import product

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from second_order import measure

CHOOSING = (100, 101, 102, 103, 104)  # the seeds on which λ and ρ are chosen
DRAWS = 8  # passes over the data for F; each pass samples new labels
WIDTH = 64
LR = 3e-3
BATCH = 64
PAIRS = tuple(product((3e2, 1e3, 3e3, 1e4), (0.1, 1.0)))
CHOICES = {  # values of λ, and of ρ in units of F's mean eigenvalue
    "none": ((0.0, 0.0),),
    "identity": ((3e-2, 0.0), (1e-1, 0.0), (3e-1, 0.0), (1.0, 0.0)),
    "diagonal": PAIRS,
    "EK-FAC": PAIRS,
}

Task = tuple[Tensor, Tensor]  # images and classes
Pair = tuple[float, float]  # λ and ρ
Vector = Mapping[str, Tensor]  # by parameter name
Product = Callable[[Vector], Vector]  # multiplies by the matrix of a penalty


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


def split_tasks(images: Tensor, labels: Tensor) -> list[Task]:
    """Return the tasks: digits 0 to 4, and 5 to 9."""
    first = labels < 5
    return [(images[chosen], labels[chosen] % 5) for chosen in (first, ~first)]


def train(
    model: nn.Module, task: Task, steps: int, seed: int, gradient: Product | None = None
) -> nn.Module:
    """Train with Adam.

    ``gradient`` multiplies w - w* by the penalty's matrix, if there is one.
    """
    weights = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in weights.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(task[0]), (BATCH,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(task[0][chosen]), task[1][chosen]).backward()
        if gradient is not None:
            moved = {name: p.detach() - start[name] for name, p in weights.items()}
            pull = gradient(moved)
            for name, p in weights.items():
                p.grad = pull[name] if p.grad is None else p.grad + pull[name]
        optimizer.step()
    return model


def accuracy(model: nn.Module, task: Task) -> float:
    with torch.no_grad():
        return float((model(task[0]).argmax(1) == task[1]).float().mean())


def penalties(model: nn.Module, task: Task) -> tuple[dict[str, Product], float]:
    """Return the product with each penalty's matrix, and F's mean eigenvalue."""
    curvature = measure(model, [task[0]] * DRAWS, factors="ekfac", progress=False)
    diagonal = curvature.diagonal()

    def apply_diagonal(v: Vector) -> Vector:
        return {name: diagonal[name] * each for name, each in v.items()}

    products: dict[str, Product] = dict.fromkeys(CHOICES, lambda v: v)
    products["diagonal"] = apply_diagonal
    products["EK-FAC"] = curvature.apply
    return products, float(curvature.eigenvalues().mean())


def run(
    seed: int,
    steps: int,
    choices: Mapping[str, tuple[Pair, ...]],
    validate: bool = False,
) -> tuple[float, dict[tuple[str, Pair], Tensor]]:
    """Learn the first task, then the second with every penalty.

    Returns:
        The accuracy on the first task before the second is learned, and by penalty, λ
        and ρ the accuracies on both tasks afterwards.
    """
    # The data. To validate, hold out a fifth of the training images.
    x_train, y_train, x_test, y_test = load_data()
    if validate:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(x_train), generator=generator)
        training, validation = order.tensor_split([len(order) * 4 // 5])
        x_test = x_train[validation]
        y_test = y_train[validation]
        x_train = x_train[training]
        y_train = y_train[training]
    train_tasks = split_tasks(x_train, y_train)
    test_tasks = split_tasks(x_test, y_test)

    # The first task.
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 5),
    )
    first = train(model, train_tasks[0], steps, seed)
    products, mean_eigenvalue = penalties(first, train_tasks[0])

    # The second task, with each penalty.
    accuracies = {}
    for name, pairs in choices.items():
        for strength, precision in pairs:

            def gradient(
                v: Vector,
                f: Product = products[name],
                scale: float = strength,
                rho: float = precision * mean_eigenvalue,
            ) -> Vector:
                return {
                    key: scale * (value + rho * v[key]) for key, value in f(v).items()
                }

            second = train(deepcopy(first), train_tasks[1], steps, seed + 1, gradient)
            key = (name, (strength, precision))
            both = [accuracy(second, task) for task in test_tasks]
            accuracies[key] = torch.tensor(both)
    return accuracy(first, test_tasks[0]), accuracies


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Elastic weight consolidation on two tasks."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=200, help="for each task")
    args = parser.parse_args(arguments)

    # Choose λ and ρ of each penalty on validation images.
    validated = [run(seed, args.steps, CHOICES, validate=True)[1] for seed in CHOOSING]
    chosen = {}
    for name, pairs in CHOICES.items():
        scores = []
        for pair in pairs:
            means = [float(accuracies[name, pair].mean()) for accuracies in validated]
            scores.append(sum(means))
        # If scores are equal, choose the last pair, which is the strongest penalty.
        best = max(range(len(pairs)), key=lambda i: (scores[i], i))
        chosen[name] = (pairs[best],)

    # Report test accuracies on other seeds.
    runs = [run(seed, args.steps, chosen) for seed in args.seeds]
    before = sum(first for first, _ in runs) / len(runs)
    print(f"λ and ρ chosen on seeds {CHOOSING}; test accuracy of seeds {args.seeds}")
    print(f"task 1 before task 2 is learned: {before:.1%}")
    print("penalty        λ    ρ  task 1  task 2    mean")
    for name, pair in runs[0][1]:
        both = torch.stack([accuracies[name, pair] for _, accuracies in runs]).mean(0)
        columns = [f"{value:6.1%}" for value in (*both.tolist(), float(both.mean()))]
        print(f"{name:8} {pair[0]:7g} {pair[1]:4g}  " + "  ".join(columns))


if __name__ == "__main__":
    main()

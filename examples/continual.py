"""Learn digits 0 to 4, then 5 to 9, and forget less: elastic weight consolidation.

    python examples/continual.py

While the second task is learned, λ/2 (w - w*)ᵀ (F + ρ) (w - w*) holds the weights near the first's,
w*: F is its Fisher information, by EK-FAC (as Ritter et al. 2018) or of this the diagonal (as
Kirkpatrick et al. 2017), ρ a prior's precision; or F + ρ is the identity. Both tasks have five
classes, digits modulo 5, and share all weights. λ and ρ are chosen on other seeds than those that
are reported, by the mean accuracy on both tasks' validation images, a fifth of the training images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from digits import PIXELS, load_split
from second_order import measure

CHOOSING = (100, 101, 102, 103, 104)  # seeds by which λ is chosen
DRAWS = 8  # passes over the data, labels drawn anew in each
WIDTH, LR, BATCH = 64, 3e-3, 64
PAIRS = tuple(product((3e2, 1e3, 3e3, 1e4), (0.1, 1.0)))
CHOICES = {  # of λ, and of ρ in mean eigenvalues of F
    "none": ((0.0, 0.0),),
    "identity": ((3e-2, 0.0), (1e-1, 0.0), (3e-1, 0.0), (1.0, 0.0)),
    "diagonal": PAIRS,
    "EK-FAC": PAIRS,
}

Task = tuple[Tensor, Tensor]  # images and classes
Pair = tuple[float, float]  # λ and ρ
Vector = Mapping[str, Tensor]  # by parameter name
Product = Callable[[Vector], Vector]  # with a matrix that penalises


def tasks(images: Tensor, labels: Tensor) -> list[Task]:
    """Digits 0 to 4, and 5 to 9."""
    first = labels < 5
    return [(images[some], labels[some] % 5) for some in (first, ~first)]


def train(
    model: nn.Module, task: Task, steps: int, seed: int, gradient: Product | None = None
) -> nn.Module:
    """Train by Adam; with a penalty's gradient the weights are held near those at the beginning."""
    weights = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in weights.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        some = torch.randint(len(task[0]), (BATCH,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(task[0][some]), task[1][some]).backward()
        if gradient is not None:
            pull = gradient({name: p.detach() - start[name] for name, p in weights.items()})
            for name, p in weights.items():
                p.grad = pull[name] if p.grad is None else p.grad + pull[name]
        optimizer.step()
    return model


def accuracy(model: nn.Module, task: Task) -> float:
    with torch.no_grad():
        return float((model(task[0]).argmax(1) == task[1]).float().mean())


def penalties(model: nn.Module, task: Task) -> tuple[dict[str, Product], float]:
    """Products with the matrices of the penalties, at the end of a task; F's mean eigenvalue."""
    curvature = measure(model, [task[0]] * DRAWS, factors="ekfac", progress=False)
    diagonal = curvature.diagonal()
    products: dict[str, Product] = dict.fromkeys(CHOICES, lambda v: v)
    products["diagonal"] = lambda v: {name: diagonal[name] * each for name, each in v.items()}
    products["EK-FAC"] = curvature.apply
    return products, float(curvature.eigenvalues().mean())


def run(
    seed: int, steps: int, choices: Mapping[str, tuple[Pair, ...]], validate: bool = False
) -> tuple[float, dict[tuple[str, Pair], Tensor]]:
    """The first task's accuracy before the second; by penalty, those of both thereafter."""
    data = load_split()
    some = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(seed))
    kept, held = some.tensor_split([len(some) * 4 // 5]) if validate else (some, some)
    learned = tasks(data.train_images[kept], data.train_labels[kept])
    test = data.train_images[held], data.train_labels[held]
    judged = tasks(*test) if validate else tasks(data.test_images, data.test_labels)
    torch.manual_seed(seed)
    layers = nn.Linear(PIXELS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    first = train(nn.Sequential(*layers, nn.Linear(WIDTH, 5)), learned[0], steps, seed)
    products, mean = penalties(first, learned[0])
    found = {}
    for name, pair in ((name, pair) for name, pairs in choices.items() for pair in pairs):

        def gradient(v: Vector, of: Pair = pair, f: Product = products[name]) -> Vector:
            return {n: of[0] * (each + of[1] * mean * v[n]) for n, each in f(v).items()}

        model = train(deepcopy(first), learned[1], steps, seed + 1, gradient)
        found[name, pair] = torch.tensor([accuracy(model, task) for task in judged])
    return accuracy(first, judged[0]), found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Forget less, by elastic weight consolidation.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=200, help="for each task")
    args = parser.parse_args(arguments)
    tried = [run(seed, args.steps, CHOICES, validate=True)[1] for seed in CHOOSING]
    score = {key: sum(float(each[key].mean()) for each in tried) for key in tried[0]}
    chosen = {name: (pair,) for name, pair in sorted(score, key=score.__getitem__)}  # the last
    runs = [run(seed, args.steps, {n: chosen[n] for n in CHOICES}) for seed in args.seeds]
    before = sum(each[0] for each in runs) / len(runs)
    print(f"λ and ρ chosen on seeds {CHOOSING}; test accuracy of seeds {args.seeds}")
    print(f"the first task before the second: {before:.1%}")
    print("penalty        λ    ρ  task 1  task 2    mean")
    for name, pair in runs[0][1]:
        both = torch.stack([each[1][name, pair] for each in runs]).mean(0)
        numbers = "  ".join(f"{number:6.1%}" for number in (*both.tolist(), float(both.mean())))
        print(f"{name:8} {pair[0]:7g} {pair[1]:4g}  {numbers}")


if __name__ == "__main__":
    main()

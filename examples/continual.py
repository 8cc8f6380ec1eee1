"""Learn digits 0 to 4, then 5 to 9, and forget less: elastic weight consolidation.

    python examples/continual.py

While the second task is learned, λ/2 (w - w*)ᵀ F (w - w*) holds the weights near the first's, w*.
F is its Fisher information, of Kronecker factors (Ritter et al. 2018) or of these the diagonal
(as Kirkpatrick et al. 2017), or the identity. Both tasks have five classes, digits modulo 5, and
share all weights. λ is chosen on other seeds than those that are reported, by the mean accuracy on
both tasks' validation images, a fifth of the training images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from digits import PIXELS, load_split
from second_order import measure

CHOOSING = (100, 101, 102, 103, 104)  # seeds by which λ is chosen
DRAWS = 8  # passes over the data, labels drawn anew in each
WIDTH, LR, BATCH = 64, 3e-3, 64
STRENGTHS = {  # that λ is chosen from
    "none": (0.0,),
    "identity": (1e-2, 3e-2, 1e-1, 3e-1, 1.0),
    "diagonal": (1e3, 3e3, 1e4, 3e4, 1e5),
    "Kronecker": (1e3, 3e3, 1e4, 3e4, 1e5),
}

Task = tuple[Tensor, Tensor]  # images and classes
Vector = Mapping[str, Tensor]  # by parameter name
Product = Callable[[Vector], Vector]  # with a matrix that penalises


def tasks(images: Tensor, labels: Tensor) -> list[Task]:
    """Digits 0 to 4, and 5 to 9."""
    first = labels < 5
    return [(images[some], labels[some] % 5) for some in (first, ~first)]


def train(
    model: nn.Module, task: Task, steps: int, seed: int, product: Product | None = None
) -> nn.Module:
    """Train by Adam; with a product λ F v the weights are held near those at the beginning."""
    weights = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in weights.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        some = torch.randint(len(task[0]), (BATCH,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(task[0][some]), task[1][some]).backward()
        if product is not None:  # the penalty's gradient
            pull = product({name: p.detach() - start[name] for name, p in weights.items()})
            for name, p in weights.items():
                p.grad = pull[name] if p.grad is None else p.grad + pull[name]
        optimizer.step()
    return model


def accuracy(model: nn.Module, task: Task) -> float:
    with torch.no_grad():
        return float((model(task[0]).argmax(1) == task[1]).float().mean())


def penalties(model: nn.Module, task: Task) -> dict[str, Product]:
    """Products with the matrices of the penalties, at the end of a task."""
    curvature = measure(model, [task[0]] * DRAWS, factors="kfac", progress=False)
    diagonal = curvature.diagonal()
    return {
        "none": lambda v: {name: torch.zeros_like(each) for name, each in v.items()},
        "identity": lambda v: v,
        "diagonal": lambda v: {name: diagonal[name] * each for name, each in v.items()},
        "Kronecker": curvature.apply,
    }


def run(
    seed: int, steps: int, strengths: Mapping[str, tuple[float, ...]], validate: bool = False
) -> tuple[float, dict[tuple[str, float], Tensor]]:
    """The first task's accuracy before the second; by penalty and λ, those of both thereafter."""
    data = load_split()
    some = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(seed))
    kept, held = some.tensor_split([len(some) * 4 // 5]) if validate else (some, some)
    learned = tasks(data.train_images[kept], data.train_labels[kept])
    test = data.train_images[held], data.train_labels[held]
    judged = tasks(*test) if validate else tasks(data.test_images, data.test_labels)
    torch.manual_seed(seed)
    layers = nn.Linear(PIXELS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    first = train(nn.Sequential(*layers, nn.Linear(WIDTH, 5)), learned[0], steps, seed)
    found = {}
    for name, product in penalties(first, learned[0]).items():
        for strength in strengths[name]:

            def pull(v: Vector, by: float = strength, f: Product = product) -> Vector:
                return {name: by * each for name, each in f(v).items()}

            model = train(deepcopy(first), learned[1], steps, seed + 1, pull)
            found[name, strength] = torch.tensor([accuracy(model, task) for task in judged])
    return accuracy(first, judged[0]), found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Forget less, by elastic weight consolidation.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=200, help="for each task")
    args = parser.parse_args(arguments)
    tried = [run(seed, args.steps, STRENGTHS, validate=True)[1] for seed in CHOOSING]
    score = {key: sum(float(each[key].mean()) for each in tried) for key in tried[0]}
    best = sorted(score, key=lambda key: score[key])  # the best of each penalty is its last
    chosen = {name: (strength,) for name, strength in best}
    runs = [run(seed, args.steps, chosen) for seed in args.seeds]
    before = torch.tensor([each[0] for each in runs])
    print(f"λ chosen on seeds {CHOOSING}; test accuracy of seeds {args.seeds}")
    print(
        f"the first task before the second: {before.mean():.1%}\npenalty          λ  task 1  task 2"
    )
    for key in runs[0][1]:
        after = torch.stack([each[1][key] for each in runs])
        print(f"{key[0]:10} {key[1]:7g}  " + "  ".join(f"{a:6.1%}" for a in after.mean(0).tolist()))


if __name__ == "__main__":
    main()

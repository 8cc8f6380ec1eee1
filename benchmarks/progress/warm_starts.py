"""How good eigenpairs are after few products, by where a refresh starts from.

    PYTHONPATH=examples python benchmarks/progress/warm_starts.py

Trainings of `examples/`, in float64. Every so many steps the ten largest eigenpairs of the
curvature batch are found anew, from those that the same method found before; the first are exact.

random      Lanczos from a random vector
sum         Lanczos from the sum of the old vectors and a tenth of a random one, as DHO2 does it
worst       Rayleigh-Ritz on the old vectors, a random one and its product, and then, again and
            again, the largest relative residual (Davidson's method, as a thick restart)
block       Rayleigh-Ritz on the old vectors, a random one and its product, and their residuals

Told are means over the refreshes: residuals ‖Hv − θv‖ / |θ|, angles in radians of exact
eigenvectors to the span that was found, relative errors of eigenvalues. A minute at most.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

import digits
import pinn
from second_order.lanczos.hvp import Hessian
from second_order.lanczos.lanczos import Space
from second_order.lanczos.spectrum import extreme_pairs

PAIRS = 10
EXACT = {"iterations": 110, "tol": 1e-5}

Found: TypeAlias = tuple[Tensor, Tensor, int]  # eigenvalues, eigenvectors in rows, products
Method: TypeAlias = Callable[[Space, Tensor, int], Found]
LossFn: TypeAlias = Callable[[], Tensor]


def recurrence(
    space: Space, old: Tensor, seed: int, *, products: int, tol: float = 0.0, warm: bool = True
) -> Found:
    """Lanczos from a random vector, or from the sum of the old ones and a tenth of that."""
    fresh = space.random(seed, 1 / math.sqrt(space.size))
    start = old.sum(0) / math.sqrt(len(old)) + 0.1 * fresh if warm else fresh
    pairs = extreme_pairs(space, start, PAIRS, 0, iterations=products, tol=tol)
    return pairs.values, pairs.vectors(), pairs.iterations


class Projection:
    """A basis and its products, for Rayleigh-Ritz."""

    def __init__(self, space: Space, basis: Tensor) -> None:
        self._space = space
        self.basis = basis
        self.images = torch.stack([space.apply(v) for v in basis])

    def take(self, vector: Tensor) -> None:
        """Take in what of a vector is orthogonal to the basis."""
        for _ in range(2):
            vector = vector - self.basis.t() @ (self.basis @ vector)
        vector = vector / vector.norm()
        self.basis = torch.cat([self.basis, vector[None]])
        self.images = torch.cat([self.images, self._space.apply(vector)[None]])

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The largest Ritz values, and the combinations of the basis that belong to them."""
        matrix = self.basis @ self.images.t()
        values, vectors = torch.linalg.eigh((matrix + matrix.t()) / 2)
        return values.flip(0)[:PAIRS], vectors.flip(1)[:, :PAIRS].t()

    def residuals(self) -> Tensor:
        """The relative residuals of these pairs, a row each, the longest first."""
        values, S = self.pairs()
        found = (S @ self.images - values[:, None] * (S @ self.basis)) / values[:, None]
        return found[found.norm(dim=1).argsort(descending=True)]


def restart(space: Space, old: Tensor, seed: int, *, products: int, block: bool = False) -> Found:
    """Rayleigh-Ritz from all old vectors; the worst residual each time, or all at once."""
    projection = Projection(space, old)
    known = projection.residuals()
    projection.take(space.random(seed, 1.0))
    projection.take(projection.images[-1])
    for each in known[: products - len(projection.basis)]:
        projection.take(each if block else projection.residuals()[0])
    values, S = projection.pairs()
    return values, S @ projection.basis, len(projection.basis)


METHODS: dict[str, Method] = {
    "random": partial(recurrence, products=20, warm=False),
    "sum, 15": partial(recurrence, products=15),
    "sum": partial(recurrence, products=20),
    "sum, 25": partial(recurrence, products=25),
    "sum, until 0.01": partial(recurrence, products=40, tol=1e-2),
    "random, until 0.01": partial(recurrence, products=40, tol=1e-2, warm=False),
    "worst": partial(restart, products=20),
    "block": partial(restart, products=20, block=True),
}


@dataclass(frozen=True)
class Case:
    """A training: model, optimizer, losses of a batch and of the curvature batch; the refreshes."""

    make: Callable[[], tuple[nn.Module, Optimizer, LossFn, LossFn]]
    refreshes: Sequence[int]


def mlp(lr: float) -> Any:
    """The digits MLP over SGD; the curvature batch is of 128."""
    data, model = digits.load_split(), digits.mlp().double()
    images, labels = data.train_images.double(), data.train_labels
    order = digits.batches(len(images), 64, seed=0)

    def loss_of(which: Any) -> Tensor:
        return cross_entropy(model(images[which]), labels[which])

    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer, lambda: loss_of(next(order)), lambda: loss_of(slice(128))


def poisson() -> Any:
    """Poisson's equation over Adam."""
    torch.set_default_dtype(torch.float64)
    model, points = pinn.network(), pinn.Points(12)
    torch.set_default_dtype(torch.float32)
    loss = partial(pinn.loss_of, model, points)
    return model, Adam(model.parameters(), lr=0.005), loss, loss


CASES = {
    "MLP, lr 0.1, every 50 steps": Case(partial(mlp, 0.1), range(50, 251, 50)),
    "MLP, lr 0.01, every 50 steps": Case(partial(mlp, 0.01), range(400, 501, 50)),
    "MLP, lr 0.01, every 5 steps": Case(partial(mlp, 0.01), range(400, 411, 5)),
    "PINN, every 50 steps": Case(poisson, range(100, 201, 50)),
}


def angles(exact: Tensor, span: Tensor) -> Tensor:
    """The angle of each exact eigenvector to a span, both in orthonormal rows."""
    cosines: Tensor = torch.linalg.vector_norm(exact @ span.t(), dim=1)
    return cosines.clamp(max=1).arccos()


def measure(case: Case) -> dict[str, list[list[float]]]:
    """A row of figures for each method and refresh but the first."""
    torch.manual_seed(0)
    model, optimizer, loss, curved = case.make()
    params = list(model.parameters())
    size = sum(p.numel() for p in params)
    last: dict[str, Tensor] = {}
    rows: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    for step in range(case.refreshes[-1] + 1):
        if step in case.refreshes:
            with Hessian(curved, params, mode="retained", model=model) as hessian:
                space = Space(hessian.product, size, torch.float64)
                exact = extreme_pairs(space, space.random(7, 1.0), PAIRS, 0, **EXACT)  # type: ignore[arg-type]
                vectors = exact.vectors()
                for name, method in METHODS.items() if last else ():
                    values, found, products = method(space, last[name], step)
                    images = torch.stack([hessian.product(v) for v in found])
                    residuals = (images - values[:, None] * found).norm(dim=1) / values.abs()
                    errors = (values - exact.values).abs() / exact.values
                    near, before = angles(vectors, found), angles(vectors, last[name])
                    figures = [residuals.median(), residuals.max(), near[:5].max(), near.mean()]
                    figures += [errors.mean(), errors.max(), before.mean()]
                    rows[name].append([float(products), *map(float, figures)])
                    last[name] = found
                last = last or dict.fromkeys(METHODS, vectors)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return rows


def table(name: str, rows: dict[str, list[list[float]]]) -> Table:
    """Means over the refreshes of a case."""
    result = Table(title=name)
    headers = ["from", "products", "residual: median", "worst", "angle: worst of 5", "mean"]
    for header in [*headers, "eigenvalues: mean", "worst", "old span's angle"]:
        result.add_column(header, justify="left" if header == "from" else "right")
    for method, figures in rows.items():
        products, *means = torch.tensor(figures).mean(0).tolist()
        result.add_row(method, f"{products:.1f}", *(f"{mean:.4f}" for mean in means))
    return result


def main() -> None:
    """Measure, and print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    torch.set_num_threads(1)
    for name in parser.parse_args().cases:
        Console(width=140).print(table(name, measure(CASES[name])))


if __name__ == "__main__":
    main()

"""Eigenvalues, trace, diagonal and density of an MLP with this package and with curvlinops.

    pip install curvlinops-for-pytorch        # not a requirement of this package
    make rivals

The network classifies scikit-learn's digits after a short training run. All calculations are in
float64 on 128 training images. Their Gauss-Newton matrix G = J'HJ is F'F for a matrix F with ten
rows per image, so F and FF' give the exact trace, diagonal and eigenvalues. We compare estimates
with these. For the Hessian, we compare the two libraries with each other.

Both libraries get the same number of products, or the same tolerance, and new random vectors in
each turn. An error is the root mean square over the turns.

Times are CPU times of one thread, as medians over alternating turns. They include the construction
of the operator. The check of curvlinops for a deterministic loss is off.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy

import reporting
from digits import batches, load_split, mlp
from second_order.lanczos import (
    Hessian,
    Outputs,
    diagonal,
    eigenpairs,
    spectral_density,
    trace,
)

LARGEST = 10
TOL = 1e-3
PRODUCTS = 96
REPEATS = 4
ITERATIONS = 64


class Estimate(NamedTuple):
    """An estimate, and the number of matrix-vector products that it needed."""

    value: Any
    products: int


Estimator = Callable[[int], Estimate]
"""A function from a seed to an estimate."""


@dataclass(frozen=True)
class Task:
    """A quantity that both libraries estimate.

    Attributes:
        name: Name in the table of the documentation.
        second_order: Estimates it with this package.
        curvlinops: Estimates it with curvlinops.
        error: Relative error of an estimate, if the exact value is known.
        difference: Relative difference of the two estimates, if both are accurate.
    """

    name: str
    second_order: Estimator
    curvlinops: Estimator
    error: Callable[[Any], float] | None = None
    difference: Callable[[Any, Any], float] | None = None


def train(steps: int, images: Tensor, labels: Tensor) -> nn.Module:
    """Train the MLP with SGD, and return it in float64."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch_indices = batches(len(images), 64, seed=0)
    for _ in range(steps):
        indices = next(batch_indices)
        optimizer.zero_grad()
        cross_entropy(model(images[indices]), labels[indices]).backward()
        optimizer.step()
    return model.double()


def factor(model: nn.Module, x: Tensor) -> Tensor:
    """The matrix F ``(10 · images, n)`` with G = F'F, for the mean cross-entropy of images."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(model, w, (x,)))(params)
    J = torch.cat([part.flatten(2) for part in jacobian.values()], 2)  # images, classes, n
    p = model(x).detach().softmax(1)
    # diag(p) − pp' = LL' with L = (I − p1')diag(√p)
    L = (torch.eye(p.shape[1]) - p[:, :, None]) * p[:, None].sqrt()
    F: Tensor = (L.mT @ J).flatten(0, 1) / math.sqrt(len(x))
    return F


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest element of ``b``."""
    return float((a - b).abs().max() / b.abs().max())


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Norm of the difference, relative to the norm of ``b``."""
    return float((a - b).norm() / b.norm())


class Problem:
    """The model and its data, with the exact spectrum of the Gauss-Newton matrix."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model = model
        self.x = x
        self.y = y
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.factor = factor(model, x)
        self.size = self.factor.shape[1]
        # All further eigenvalues are 0.
        self.eigenvalues = torch.linalg.eigvalsh(self.factor @ self.factor.T).flip(0)
        self.library: Any = importlib.import_module("curvlinops")

    def closure(self) -> Outputs:
        """The curvature closure of this package."""
        return Outputs(self.model(self.x), lambda z: cross_entropy(z, self.y))

    def operator(self, curvature: str) -> Any:
        """The linear operator of curvlinops."""
        operator_class = self.library.GGNLinearOperator
        if curvature == "hessian":
            operator_class = self.library.HessianLinearOperator
        return operator_class(
            self.model,
            nn.CrossEntropyLoss(),
            self.params,
            [(self.x, self.y)],
            check_deterministic=False,
        )


def label(curvature: str) -> str:
    """Name of a matrix in the table."""
    return "Hessian" if curvature == "hessian" else "Gauss-Newton"


def product_task(problem: Problem, curvature: Any) -> Task:
    """20 products with one vector."""
    generator = torch.Generator().manual_seed(7)
    vector = torch.randn(problem.size, generator=generator).double()

    def with_second_order(_: int) -> Estimate:
        with Hessian(problem.closure, problem.params, curvature=curvature) as H:
            return Estimate([H.product(vector) for _ in range(20)][-1], 20)

    def with_curvlinops(_: int) -> Estimate:
        A = problem.operator(curvature)
        return Estimate([A @ vector for _ in range(20)][-1], 20)

    def error(product: Tensor) -> float:
        F = problem.factor
        return largest_difference(product, F.T @ (F @ vector))

    return Task(
        name=f"20 products, {label(curvature)}",
        second_order=with_second_order,
        curvlinops=with_curvlinops,
        error=None if curvature == "hessian" else error,
        difference=largest_difference,
    )


def eigenvalue_task(problem: Problem, curvature: Any) -> Task:
    """The largest eigenvalues."""
    sparse: Any = importlib.import_module("scipy.sparse.linalg")

    def with_second_order(seed: int) -> Estimate:
        pairs = eigenpairs(
            problem.closure,
            problem.model,
            largest=LARGEST,
            tol=TOL,
            iterations=200,
            seed=seed,
            curvature=curvature,
        )
        assert pairs.converged.all()
        return Estimate(pairs.eigenvalues, pairs.products)

    def with_curvlinops(_: int) -> Estimate:
        products = 0
        A = problem.operator(curvature).to_scipy()

        def product(v: Any) -> Any:
            nonlocal products
            products += 1
            return A @ v

        counting_operator = sparse.LinearOperator(A.shape, matvec=product, dtype=A.dtype)
        eigenvalues = sparse.eigsh(counting_operator, k=LARGEST, which="LA", tol=TOL)[0]
        return Estimate(torch.tensor(eigenvalues.copy()).flip(0), products)

    def error(eigenvalues: Tensor) -> float:
        return largest_difference(eigenvalues, problem.eigenvalues[:LARGEST])

    return Task(
        name=f"{LARGEST} largest eigenvalues, {label(curvature)}",
        second_order=with_second_order,
        curvlinops=with_curvlinops,
        error=None if curvature == "hessian" else error,
        difference=largest_difference,
    )


def trace_task(problem: Problem, function: str) -> Task:
    """The trace of the Gauss-Newton matrix, with a function of curvlinops."""
    exact = float(problem.eigenvalues.sum())

    def with_second_order(seed: int) -> Estimate:
        result = trace(
            problem.closure,
            problem.model,
            products=PRODUCTS,
            seed=seed,
            curvature="gauss-newton",
        )
        return Estimate(result.value, result.products)

    def with_curvlinops(seed: int) -> Estimate:
        torch.manual_seed(seed)
        estimate = getattr(problem.library, function)
        return Estimate(float(estimate(problem.operator("gauss-newton"), PRODUCTS)), PRODUCTS)

    def error(value: float) -> float:
        return abs(value / exact - 1)

    return Task(f"trace, against `{function}`", with_second_order, with_curvlinops, error)


def diagonal_task(problem: Problem, function: str) -> Task:
    """The diagonal of the Gauss-Newton matrix, with a function of curvlinops."""
    exact = problem.factor.square().sum(0)

    def with_second_order(seed: int) -> Estimate:
        result = diagonal(
            problem.closure,
            problem.model,
            products=PRODUCTS,
            seed=seed,
            curvature="gauss-newton",
        )
        return Estimate(result.values, result.products)

    def with_curvlinops(seed: int) -> Estimate:
        torch.manual_seed(seed)
        estimate = getattr(problem.library, function)
        return Estimate(estimate(problem.operator("gauss-newton"), PRODUCTS), PRODUCTS)

    def error(values: Tensor) -> float:
        return relative_difference(values, exact)

    return Task(f"diagonal, against `{function}`", with_second_order, with_curvlinops, error)


def density_task(problem: Problem) -> Task:
    """The spectral density of the Gauss-Newton matrix, with the kernel width of curvlinops."""
    largest = float(problem.eigenvalues[0])
    grid = torch.linspace(-0.05, 1.05, 1024).double() * largest
    half = 0.55 * largest
    width = half * 2 / (ITERATIONS - 1) / math.sqrt(8 * math.log(3.0))

    # The exact density has a Gaussian at each eigenvalue, and one at 0 for all further ones.
    gaussians = torch.exp(-0.5 * ((grid[:, None] - problem.eigenvalues) / width).square()).sum(1)
    num_zeros = problem.size - len(problem.eigenvalues)
    at_zero = num_zeros * torch.exp(-0.5 * (grid / width).square())
    exact = (gaussians + at_zero) / (problem.size * width * math.sqrt(2 * math.pi))

    def with_second_order(seed: int) -> Estimate:
        result = spectral_density(
            problem.closure,
            problem.model,
            probes=REPEATS,
            iterations=ITERATIONS,
            seed=seed,
            curvature="gauss-newton",
        )
        return Estimate(result.on(grid, width), result.products)

    def with_curvlinops(seed: int) -> Estimate:
        torch.manual_seed(seed)
        _, density = problem.library.lanczos_approximate_spectrum(
            problem.operator("gauss-newton"),
            ITERATIONS,
            num_repeats=REPEATS,
            boundaries=(0.0, largest),
        )
        return Estimate(density, REPEATS * ITERATIONS)

    def error(density: Tensor) -> float:
        return float(torch.trapezoid((density - exact).abs(), grid))

    name = f"density, {REPEATS} probes of {ITERATIONS}"
    return Task(name, with_second_order, with_curvlinops, error)


def all_tasks(model: nn.Module, x: Tensor, y: Tensor) -> list[Task]:
    """The rows of the table."""
    problem = Problem(model, x, y)
    return [
        product_task(problem, "hessian"),
        product_task(problem, "gauss-newton"),
        eigenvalue_task(problem, "hessian"),
        eigenvalue_task(problem, "gauss-newton"),
        trace_task(problem, "hutchpp_trace"),
        trace_task(problem, "xtrace"),
        diagonal_task(problem, "hutchinson_diag"),
        diagonal_task(problem, "xdiag"),
        density_task(problem),
    ]


@dataclass(frozen=True)
class TimedEstimate:
    """An estimate, and its CPU seconds."""

    value: Any
    products: int
    seconds: float


def time_estimate(estimator: Estimator, seed: int) -> TimedEstimate:
    """Run an estimator once."""
    start = time.process_time()
    estimate = estimator(seed)
    seconds = time.process_time() - start
    return TimedEstimate(estimate.value, estimate.products, seconds)


def compare(task: Task, turns: int) -> dict[str, Any]:
    """The record of a task: products, seconds and errors of both libraries."""
    # The libraries take turns.
    runs: dict[str, list[TimedEstimate]] = {"ours": [], "theirs": []}
    for seed in range(turns):
        runs["ours"].append(time_estimate(task.second_order, seed))
        runs["theirs"].append(time_estimate(task.curvlinops, seed))

    record: dict[str, Any] = {"task": task.name, "turns": turns}
    for library, estimates in runs.items():
        seconds = [estimate.seconds for estimate in estimates]
        record[library] = {"products": estimates[-1].products, "seconds": seconds}
        if task.error is not None:
            errors = [task.error(estimate.value) for estimate in estimates]
            record[library]["error"] = math.sqrt(statistics.fmean(e * e for e in errors))
    if task.difference is not None:
        pairs = zip(runs["ours"], runs["theirs"], strict=True)
        record["difference"] = max(task.difference(a.value, b.value) for a, b in pairs)
    return record


def print_record(record: dict[str, Any]) -> None:
    """Print a line for a task."""
    cells = [f"{record['task']:38}"]
    for library, key in (("second_order", "ours"), ("curvlinops", "theirs")):
        result = record[key]
        seconds = statistics.median(result["seconds"])
        error = " " * 9
        if "error" in result:
            error = f"{result['error']:9.1e}"
        cells.append(f"{library} {result['products']:4} products {seconds:7.3f} s {error}")
    difference = ""
    if "difference" in record:
        difference = f"difference {record['difference']:.1e}"
    print(" | ".join([*cells, difference]), flush=True)


def main() -> None:
    """Compare, print a line for each task, and store the records."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="training steps")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    arguments = parser.parse_args()
    try:
        version = importlib.metadata.version("curvlinops-for-pytorch")
    except importlib.metadata.PackageNotFoundError:
        parser.error("this script needs curvlinops: pip install curvlinops-for-pytorch")
    torch.set_num_threads(1)
    data = load_split()
    model = train(arguments.steps, data.train_images, data.train_labels)
    x = data.train_images[: arguments.images].double()
    y = data.train_labels[: arguments.images]
    records = []
    for task in all_tasks(model, x, y):
        record = {**compare(task, arguments.turns), "curvlinops": version}
        records.append(record)
        print_record(record)
    reporting.store(arguments.json, records=records)


if __name__ == "__main__":
    main()

"""Eigenvalues, trace, diagonal and density of a digits MLP, by us and by curvlinops, in one run.

    pip install curvlinops-for-pytorch        # not among our requirements
    make rivals

The network is trained a little, and everything is in float64 on 128 training images. The
Gauss-Newton matrix G = J'HJ of so few has a factor F with G = F'F and ten rows an image, so its
trace, diagonal and all eigenvalues are known, from F and FF'. Estimates are held against these; of
the Hessian, the two libraries against each other. Both are given as many products, or the same
tolerance, and new random vectors at each turn; an error is the root of its mean square over the
turns.

Times are the processor's, of one thread, medians over turns that alternate. They are of the whole
call, with the making of the operator; curvlinops' check whether the loss is deterministic is off.
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
from typing import Any

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

Found = tuple[Any, int]
"""An estimate, and the products it took."""


@dataclass(frozen=True)
class Task:
    """What one estimates.

    Attributes:
        name: What it is, as the table of the documentation has it.
        ours: Estimates it by this package, given a seed.
        theirs: Estimates it by curvlinops, given a seed.
        error: The relative error of an estimate.
        both: The relative difference of the two, where there is a point in it.
    """

    name: str
    ours: Callable[[int], Found]
    theirs: Callable[[int], Found]
    error: Callable[[Any], float] | None = None
    both: Callable[[Any, Any], float] | None = None


def trained(steps: int, images: Tensor, labels: Tensor) -> nn.Module:
    """The MLP after some steps of SGD, in float64."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = batches(len(images), 64, seed=0)
    for _ in range(steps):
        chosen = next(parts)
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model.double()


def factor(model: nn.Module, x: Tensor) -> Tensor:
    """F ``(10 · images, n)`` with G = F'F for the mean cross-entropy of images."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(model, w, (x,)))(params)
    J = torch.cat([part.flatten(2) for part in jacobian.values()], 2)  # images, classes, n
    p = model(x).detach().softmax(1)
    # diag(p) − pp' = LL' with L = (I − p1')diag(√p)
    L = (torch.eye(p.shape[1]) - p[:, :, None]) * p[:, None].sqrt()
    F: Tensor = (L.mT @ J).flatten(0, 1) / math.sqrt(len(x))
    return F


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest element of ``b``."""
    return float((a - b).abs().max() / b.abs().max())


def relative(a: Tensor, b: Tensor) -> float:
    """The length of a difference, relative to that of ``b``."""
    return float((a - b).norm() / b.norm())


def tasks(model: nn.Module, x: Tensor, y: Tensor) -> list[Task]:
    """All that is estimated, and how."""
    lib: Any = importlib.import_module("curvlinops")
    sparse: Any = importlib.import_module("scipy.sparse.linalg")
    params = [p for p in model.parameters() if p.requires_grad]
    F = factor(model, x)
    values = torch.linalg.eigvalsh(F @ F.T).flip(0)
    exact_diagonal = F.square().sum(0)
    size = F.shape[1]
    probe = torch.randn(size, generator=torch.Generator().manual_seed(7)).double()

    def closure() -> Outputs:
        return Outputs(model(x), lambda z: cross_entropy(z, y))

    def operator(curvature: str) -> Any:
        kind = lib.HessianLinearOperator if curvature == "hessian" else lib.GGNLinearOperator
        criterion = nn.CrossEntropyLoss()
        return kind(model, criterion, params, [(x, y)], check_deterministic=False)

    def product(curvature: Any) -> Task:
        def ours(_: int) -> Found:
            with Hessian(closure, params, curvature=curvature) as H:
                return [H.product(probe) for _ in range(20)][-1], 20

        def theirs(_: int) -> Found:
            A = operator(curvature)
            return [A @ probe for _ in range(20)][-1], 20

        label = "Hessian" if curvature == "hessian" else "Gauss-Newton"
        error = None
        if curvature != "hessian":
            error = lambda found: largest_difference(found, F.T @ (F @ probe))  # noqa: E731
        return Task(f"20 products, {label}", ours, theirs, error, largest_difference)

    def top(curvature: Any) -> Task:
        def ours(seed: int) -> Found:
            pairs = eigenpairs(
                closure, model, largest=LARGEST, tol=TOL, iterations=200, seed=seed,
                curvature=curvature,
            )  # fmt: skip
            assert pairs.converged.all()
            return pairs.eigenvalues, pairs.products

        def theirs(_: int) -> Found:
            count = 0
            A = operator(curvature).to_scipy()

            def counted(v: Any) -> Any:
                nonlocal count
                count += 1
                return A @ v

            wrapped = sparse.LinearOperator(A.shape, matvec=counted, dtype=A.dtype)
            found = sparse.eigsh(wrapped, k=LARGEST, which="LA", tol=TOL)[0]
            return torch.tensor(found.copy()).flip(0), count

        label = "Hessian" if curvature == "hessian" else "Gauss-Newton"
        error = None
        if curvature != "hessian":
            error = lambda found: largest_difference(found, values[:LARGEST])  # noqa: E731
        return Task(f"{LARGEST} largest eigenvalues, {label}", ours, theirs, error,
                    largest_difference)  # fmt: skip

    def our_trace(seed: int) -> Found:
        found = trace(closure, model, products=PRODUCTS, seed=1000 * seed, curvature="gauss-newton")
        return found.value, found.products

    def their_trace(name: str) -> Callable[[int], Found]:
        def theirs(seed: int) -> Found:
            torch.manual_seed(seed)
            return float(getattr(lib, name)(operator("gauss-newton"), PRODUCTS)), PRODUCTS

        return theirs

    def our_diagonal(seed: int) -> Found:
        found = diagonal(
            closure, model, products=PRODUCTS, seed=1000 * seed, curvature="gauss-newton"
        )
        return found.values, found.products

    def their_diagonal(name: str) -> Callable[[int], Found]:
        def theirs(seed: int) -> Found:
            torch.manual_seed(seed)
            return getattr(lib, name)(operator("gauss-newton"), PRODUCTS), PRODUCTS

        return theirs

    bounds = 0.0, float(values[0])
    grid = torch.linspace(-0.05, 1.05, 1024).double() * bounds[1]
    half = 0.55 * bounds[1]
    width = half * 2 / (ITERATIONS - 1) / math.sqrt(8 * math.log(3.0))  # curvlinops' bumps

    def our_density(seed: int) -> Found:
        found = spectral_density(
            closure, model, probes=REPEATS, iterations=ITERATIONS, seed=1000 * seed,
            curvature="gauss-newton",
        )  # fmt: skip
        return found.on(grid, width), found.products

    def their_density(seed: int) -> Found:
        torch.manual_seed(seed)
        _, density = lib.lanczos_approximate_spectrum(
            operator("gauss-newton"), ITERATIONS, num_repeats=REPEATS, boundaries=bounds
        )
        return density, REPEATS * ITERATIONS

    everything = torch.cat([values, torch.zeros(size - len(values)).double()])
    bumps = torch.exp(-0.5 * ((grid[:, None] - values) / width).square()).sum(1)
    at_zero = (len(everything) - len(values)) * torch.exp(-0.5 * (grid / width).square())
    density = (bumps + at_zero) / (size * width * math.sqrt(2 * math.pi))
    total = float(values.sum())
    return [
        product("hessian"),
        product("gauss-newton"),
        top("hessian"),
        top("gauss-newton"),
        *(
            Task(f"trace, beside `{name}`", our_trace, their_trace(name),
                 lambda found: abs(found / total - 1))
            for name in ("hutchpp_trace", "xtrace")
        ),
        *(
            Task(f"diagonal, beside `{name}`", our_diagonal, their_diagonal(name),
                 lambda found: relative(found, exact_diagonal))
            for name in ("hutchinson_diag", "xdiag")
        ),
        Task(f"density, {REPEATS} probes of {ITERATIONS}", our_density, their_density,
             lambda found: float(torch.trapezoid((found - density).abs(), grid))),
    ]  # fmt: skip


def timed(estimate: Callable[[int], Found], seed: int) -> tuple[Any, int, float]:
    """What is found, the products and the processor's seconds."""
    start = time.process_time()
    found, products = estimate(seed)
    return found, products, time.process_time() - start


def compared(task: Task, turns: int) -> dict[str, Any]:
    """The record of a task: products, seconds and errors of us and of curvlinops."""
    found = [[timed(each, seed) for each in (task.ours, task.theirs)] for seed in range(turns)]
    record: dict[str, Any] = {"task": task.name, "turns": turns}
    for i, who in enumerate(("ours", "theirs")):
        runs = [turn[i] for turn in found]
        record[who] = {"products": runs[-1][1], "seconds": [run[2] for run in runs]}
        if task.error is not None:
            errors = [task.error(run[0]) for run in runs]
            record[who]["error"] = math.sqrt(statistics.fmean(e * e for e in errors))
    if task.both is not None:
        record["difference"] = max(task.both(*(run[0] for run in turn)) for turn in found)
    return record


def main() -> None:
    """Compare, print a line for each task, and keep the records."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="training steps before")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the records there")
    arguments = parser.parse_args()
    try:
        version = importlib.metadata.version("curvlinops-for-pytorch")
    except importlib.metadata.PackageNotFoundError:
        parser.error("it compares with curvlinops: pip install curvlinops-for-pytorch")
    torch.set_num_threads(1)
    data = load_split()
    model = trained(arguments.steps, data.train_images, data.train_labels)
    x = data.train_images[: arguments.images].double()
    y = data.train_labels[: arguments.images]
    records = []
    for task in tasks(model, x, y):
        record = {**compared(task, arguments.turns), "curvlinops": version}
        records.append(record)
        cells = [f"{record['task']:38}"]
        for who in ("ours", "theirs"):
            of = record[who]
            error = f"{of['error']:9.1e}" if "error" in of else " " * 9
            seconds = statistics.median(of["seconds"])
            cells.append(f"{who} {of['products']:4} products {seconds:7.3f} s {error}")
        cells.append(f"difference {record['difference']:.1e}" if "difference" in record else "")
        print(" | ".join(cells), flush=True)
    reporting.store(arguments.json, records=records)


if __name__ == "__main__":
    main()

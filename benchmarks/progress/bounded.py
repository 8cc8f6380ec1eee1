"""How many of fifty training runs with full Newton steps diverge, with a trust region and without.

The tasks are those of `fosi_gain.py`: linear and two-layer heads on a frozen body, and a PINN on
Poisson's equation. DHO2 trains them over Adam at a usual rate, with 5 to 100 eigenpairs and Newton
steps of half and of full length. It has no momentum within the subspace, and refreshes every 50
steps from the first step. A run diverges if a loss is not finite, or more than ten times the first.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import reporting
from fosi_gain import goal
from second_order import DHO2

HEADS = product(("linear head", "two-layer head"), (5, 20, 50, 100), (0.5, 1.0), (0, 1))
PINNS = product(("PINN",), (10, 50, 100), (0.5, 1.0), (0, 1, 2))
GRID = [*HEADS, *PINNS]
RATES = {"linear head": 0.03, "two-layer head": 0.01, "PINN": 0.005}
STEPS = {"linear head": 150, "two-layer head": 150, "PINN": 300}
DIVERGED = 10.0  # multiple of the first loss


@dataclass
class Result:
    """The result of a training run.

    Attributes:
        task: Name of the task.
        largest: Number of eigenpairs.
        newton_scale: Length of a Newton step.
        seed: Seed of the model and of the batches.
        trust_region: Whether Newton steps are bounded.
        first: The loss of the first batch.
        worst: The largest loss of a batch, or infinity if one was not finite.
        last: The loss of the last batch.
        rejected: Number of rejected steps.
    """

    task: str
    largest: int
    newton_scale: float
    seed: int
    trust_region: bool
    first: float
    worst: float
    last: float
    rejected: float = 0.0

    @property
    def diverged(self) -> bool:
        """Whether the run diverged."""
        return self.worst > DIVERGED * self.first


def train(name: str, largest: int, scale: float, seed: int, trust_region: bool) -> Result:
    """Train for the task's steps, or until a loss is not finite."""
    torch.set_num_threads(1)
    task = goal(name).task
    curved = goal(name).curved
    torch.manual_seed(seed)
    model = task.make()
    options: dict[str, Any] = {"warmup_steps": 0, "curvature_interval": 50, "subspace_momentum": 0}
    optimizer = DHO2(
        model,
        lr=RATES[name],
        base=torch.optim.Adam,
        curvature_closure=curved(model, seed),
        num_largest=largest,
        newton_scale=scale,
        trust_region=trust_region,
        **options,
    )
    losses: list[float] = []
    for _, batch in zip(range(STEPS[name]), task.batches(seed), strict=False):
        optimizer.zero_grad()
        loss = task.loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            losses[-1] = math.inf
            break
        optimizer.step()
    return Result(
        task=name,
        largest=largest,
        newton_scale=scale,
        seed=seed,
        trust_region=trust_region,
        first=losses[0],
        worst=max(losses),
        last=losses[-1],
        rejected=optimizer.metrics().get("rejected", 0.0),
    )


def main() -> None:
    """Train with and without the trust region, print the table, and store the runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=int, help="number of training runs")
    parser.add_argument("--json", type=Path, help="write the runs to this file")
    arguments = parser.parse_args()
    grid = GRID
    if arguments.only:
        grid = GRID[:: len(GRID) // arguments.only]
    runs = []
    for name, largest, scale, seed in tqdm(grid, leave=False):
        for trust_region in (True, False):
            runs.append(train(name, largest, scale, seed, trust_region))  # noqa: PERF401

    rows = []
    for name in RATES:
        task_runs = [run for run in runs if run.task == name]
        bounded = [run for run in task_runs if run.trust_region]
        unbounded = [run for run in task_runs if not run.trust_region]
        if bounded:
            counts = [sum(run.diverged for run in group) for group in (bounded, unbounded)]
            worst = max(run.worst / run.first for run in bounded)
            rows.append([name, str(len(bounded)), *map(str, counts), f"{worst:.2g} times"])
    columns = "task", "runs", "trust region", "without", "worst loss with it, of the first"
    reporting.show(reporting.table("training runs that diverged", columns, rows))

    # JSON has no infinity.
    stored = []
    for run in runs:
        fields = asdict(run)
        stored.append({key: None if fields[key] == math.inf else fields[key] for key in fields})
    reporting.store(arguments.json, runs=stored)


if __name__ == "__main__":
    main()

"""Whether any of fifty trainings with full Newton steps is thrown away, bounded and not.

Heads on a frozen body, linear and of two layers, and a PINN on Poisson's equation (the tasks of
`fosi_gain.py`) by DHO2 over Adam at a usual rate: 5 to 100 eigenpairs, Newton steps of half their
length and of all of it, no momentum within the subspace, refreshes every 50 steps from the first
step on. A run counts as thrown away where its loss is not finite, or ten times what it was at the
start, at any step after a refresh.
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
THROWN = 10.0  # times the loss at the start


@dataclass
class Bounded:
    """A training done.

    Attributes:
        task: Its name.
        largest: Number of eigenpairs.
        newton_scale: Length of a Newton step.
        seed: Of the model and of the batches.
        trust_region: Whether Newton steps are bounded.
        first: The loss of the first batch.
        worst: The largest loss of any batch; infinite if one was not finite.
        last: The loss of the last batch.
        undone: How many steps were taken back.
    """

    task: str
    largest: int
    newton_scale: float
    seed: int
    trust_region: bool
    first: float
    worst: float
    last: float
    undone: float = 0.0

    @property
    def thrown(self) -> bool:
        """Whether the training was thrown away."""
        return self.worst > THROWN * self.first


def train(name: str, largest: int, scale: float, seed: int, trust_region: bool) -> Bounded:
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
    undone = optimizer.metrics().get("rejected", 0.0)
    shown = losses[0], max(losses), losses[-1]
    return Bounded(name, largest, scale, seed, trust_region, *shown, undone)


def main() -> None:
    """Train, print, and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=int, help="so many of the trainings, spread over the grid")
    parser.add_argument("--json", type=Path, help="write the runs there")
    arguments = parser.parse_args()
    grid = GRID[:: len(GRID) // arguments.only] if arguments.only else GRID
    runs = [
        train(name, largest, scale, seed, trust_region)
        for name, largest, scale, seed in tqdm(grid, leave=False)
        for trust_region in (True, False)
    ]
    rows = []
    for name in RATES:
        of = [run for run in runs if run.task == name]
        bounded, free = ([r for r in of if r.trust_region is on] for on in (True, False))
        if bounded:
            counts = (str(sum(run.thrown for run in each)) for each in (bounded, free))
            worst = max(run.worst / run.first for run in bounded)
            rows.append([name, str(len(bounded)), *counts, f"{worst:.2g} times"])
    columns = "task", "trainings", "trust region", "without", "worst loss with it, of the first"
    reporting.show(reporting.table("trainings that were thrown away", columns, rows))
    stored = [{k: None if v == math.inf else v for k, v in asdict(r).items()} for r in runs]
    reporting.store(arguments.json, runs=stored)


if __name__ == "__main__":
    main()

"""Loss at the end against the learning rate: AdamW, Muon and KAISA over AdamW.

    make rates                                            42 training runs: six minutes
    make rates ARGS="--seeds 1"                           half of them

The task is "torch source" of `unseen`: a small transformer with the blocks of Llama. No default
setting was chosen on it. Each optimizer runs at seven learning rates, a factor of two apart, so the
largest is 64 times the smallest. The middle one is near the best rate. KAISA has default settings.

The tables have the mean loss on held-out text over the seeds, and the median seconds of a run. Then
they have each optimizer's range: all rates whose mean loss is at most 5 % above its lowest one.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import reporting
from second_order import SecondOrderWarning
from tasks import Job, Run, final_loss, run_all

TASK = "torch source"
NEAR = 1.05  # times the lowest loss
FACTORS = 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8
MIDDLE = {"AdamW": 0.004, "Muon": 0.016, "KAISA, AdamW": 0.008}
SEEDS = 2

Losses = dict[float, float]
"""The mean loss over the seeds, by learning rate."""


def rates_of(optimizer: str) -> list[float]:
    """The learning rates of an optimizer, in ascending order."""
    return [MIDDLE[optimizer] * factor for factor in FACTORS]


def jobs_of(seed: int, optimizers: Sequence[str]) -> list[Job]:
    """The training runs of a seed.

    Neighbors are runs of different optimizers, so that other work on the machine slows all alike.
    """
    return [
        Job(TASK, optimizer, MIDDLE[optimizer] * factor, seed)
        for factor in FACTORS
        for optimizer in optimizers
    ]


def mean_losses(runs: Sequence[Run], optimizer: str) -> Losses:
    """The mean loss at the end, which is infinite if a run diverged."""
    return {
        lr: statistics.mean(
            final_loss(run) for run in runs if run.job.optimizer == optimizer and run.job.lr == lr
        )
        for lr in rates_of(optimizer)
    }


def near_best(losses: Losses) -> list[float]:
    """The rates whose loss is at most :data:`NEAR` times the lowest one."""
    lowest = min(losses.values())
    return [lr for lr, loss in losses.items() if loss <= NEAR * lowest]


def show(runs: Sequence[Run], optimizers: Sequence[str]) -> None:
    """Print both tables."""
    loss_rows = []
    range_rows = []
    for optimizer in optimizers:
        losses = mean_losses(runs, optimizer)
        seconds = [run.seconds[-1] for run in runs if run.job.optimizer == optimizer]
        near = near_best(losses)
        spread = near[-1] / near[0] if near else math.nan
        cells = [f"{lr:g}: {loss:.3f}" for lr, loss in losses.items()]
        loss_rows.append([optimizer, *cells, f"{statistics.median(seconds):.1f}"])
        range_rows.append([optimizer, f"{near[0]:g} to {near[-1]:g}", f"{spread:g} ×"])

    columns = [f"{factor:g} ×" for factor in FACTORS]
    title = "learning rate: mean held-out loss at the end; seconds of a run"
    reporting.show(
        reporting.table(title, ["optimizer", *columns, "seconds"], loss_rows),
        reporting.table(
            "rates with a loss at most 5 % above the lowest",
            ["optimizer", "rates", "range"],
            range_rows,
        ),
    )


def main() -> None:
    """Train, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", choices=MIDDLE, default=list(MIDDLE))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=1, help="training runs at a time")
    parser.add_argument("--json", type=Path, help="write the runs there")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SecondOrderWarning)

    runs: list[Run] = []
    for seed in range(arguments.seeds):
        runs += run_all(jobs_of(seed, arguments.optimizers), arguments.processes)
        reporting.store(arguments.json, task=TASK, runs=[asdict(run) for run in runs])
    show(runs, arguments.optimizers)


if __name__ == "__main__":
    main()

"""Steps to a target: DPKFAC, whose factors see one process's batches, beside KAISA.

    export PYTHONPATH=examples
    torchrun --standalone --nproc-per-node=2 benchmarks/progress/progress_distributed.py
    torchrun --standalone --nproc-per-node=8 benchmarks/progress/progress_distributed.py \
        --dampings 0.5 2

The classifiers, targets and settings of `progress.py`. A batch of 64 is divided over the processes,
and both optimizers see the same one in the same order. Each gets five dampings; for each target the
one with the best median over the seeds counts. "defaults" is the run with nothing set but the
learning rate of 0.1. The last row compares runs with the same damping and seed, where both arrive:
25 pairs say more than medians of five. Runs are evaluated every five steps: two figures that differ
by five steps may differ by one.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer
from tqdm import tqdm

from progress import (
    CLASSIFIER_TARGETS,
    CLASSIFIERS,
    TUNED,
    Run,
    Setting,
    median_steps,
    run_classifier,
    table,
)
from second_order import DPKFAC, KAISA
from second_order.kfac.options import DAMPING

OPTIMIZERS: dict[str, type[DPKFAC] | type[KAISA]] = {"KAISA": KAISA, "DPKFAC": DPKFAC}


def setting(name: str, lr: float, damping: float) -> Setting:
    """One of the optimizers at one point of the grid."""

    def build(model: nn.Module) -> Optimizer:
        return OPTIMIZERS[name](model, lr=lr, momentum=0.9, damping=damping)

    return Setting(name, f"lr {lr}, damping {damping}", build)


def defaults(runs: list[Run]) -> list[Run]:
    """The runs with the default damping, under a name of their own."""
    label = setting("KAISA", 0.1, DAMPING).label
    chosen = [run for run in runs if run.setting == label]
    return [replace(run, optimizer=f"{run.optimizer}, defaults") for run in chosen]


def fewest(runs: list[Run], target: str) -> float:
    """The median steps of the best setting."""
    settings = dict.fromkeys(run.setting for run in runs)
    return min(median_steps([r for r in runs if r.setting == s], target) for s in settings)


def comparison(model: str, runs: list[Run]) -> Table:
    """DPKFAC's steps over KAISA's."""
    result = Table(title=f"{model}: median steps of DPKFAC / of KAISA")
    result.add_column("setting")
    for target in CLASSIFIER_TARGETS:
        result.add_column(target, justify="right")
    for label, suffix in (("best damping", ""), ("defaults", ", defaults")):
        cells = []
        for target in CLASSIFIER_TARGETS:
            ours, theirs = (
                fewest([run for run in runs if run.optimizer == name + suffix], target)
                for name in ("DPKFAC", "KAISA")
            )
            ratio = f" = {ours / theirs:.2f}" if math.isfinite(ours + theirs) else ""
            cells.append(f"{steps(ours)} / {steps(theirs)}{ratio}")
        result.add_row(label, *cells)
    pairs = [paired(runs, target) for target in CLASSIFIER_TARGETS]
    result.add_row(
        "mean ratio of pairs",
        *(f"{geometric_mean(ratios):.2f} of {len(ratios)}" if ratios else "" for ratios in pairs),
    )
    return result


def paired(runs: list[Run], target: str) -> list[float]:
    """Ratios of steps, DPKFAC's over KAISA's, with the same damping and seed, where both arrive."""
    found: dict[str, dict[tuple[str, int], int]] = {name: {} for name in OPTIMIZERS}
    for run in runs:
        if run.optimizer in found and target in run.steps_to:
            found[run.optimizer][run.setting, run.seed] = run.steps_to[target]
    ours, theirs = found["DPKFAC"], found["KAISA"]
    return [ours[key] / theirs[key] for key in theirs if key in ours]


def geometric_mean(ratios: list[float]) -> float:
    """Of ratios, so that twice and half make one."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def steps(count: float) -> str:
    """A number of steps, if there is one."""
    return f"{count:.0f}" if math.isfinite(count) else "never"


def main() -> None:
    """Run the benchmark, and let the first process print the tables and write the runs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CLASSIFIERS, default=list(CLASSIFIERS))
    parser.add_argument("--seeds", type=int, default=5)
    tuned = [damping for _, damping in TUNED]
    parser.add_argument("--dampings", nargs="+", type=float, choices=tuned, default=tuned)
    parser.add_argument("--output", type=Path, help="write the runs as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank > 0)
    everything: dict[str, list[dict[str, object]]] = {}
    for model in arguments.models:
        points = [(lr, damping) for lr, damping in TUNED if damping in arguments.dampings]
        settings = [setting(name, *point) for name in OPTIMIZERS for point in points]
        work = [(each, seed) for each in settings for seed in range(arguments.seeds)]
        runs = [
            run_classifier(model, each, seed, rank, processes)
            for each, seed in tqdm(work, desc=model, leave=False, disable=rank > 0)
        ]
        runs += defaults(runs)
        console.print(table(model, runs, CLASSIFIER_TARGETS))
        console.print(comparison(model, runs))
        everything[model] = [asdict(run) for run in runs]
    if arguments.output and rank == 0:
        machine = f"{platform.machine()}, torch {torch.__version__}, {processes} processes"
        arguments.output.write_text(json.dumps({"machine": machine, "runs": everything}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

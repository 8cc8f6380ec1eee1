"""A transformer of ten million parameters: AdamW tuned over three rates, and KAISA over it.

    make larger                                          two to three hours on two cores
    make larger ARGS="--minutes 0.2 --layers 2 --width 64"          a minute: does it run?
    make larger ARGS="--device cuda --processes 1 --minutes 0.4 --context 256 --batch 64 \
        --rivals Muon --multiples 1 2"                              three minutes on a GPU

The model is that of `benchmarks/language_model.py` on the standard library's source, with contexts
of 128 characters, and the learning rate rises and then falls by a cosine. AdamW at each rate is
trained in a fifth of the steps on a seed that is not reported, with a schedule of the same shape;
the best rate has the least held-out loss at the end. Then AdamW and KAISA with default settings are
trained at that rate, one run each, in equally many steps, and at the same time if there are
several processes. Muon can be tuned and trained in the same way.

The number of steps follows from the minutes that AdamW's whole run may take, and from the measured
time of its step. Seconds in the table are of training alone: processor time, or on a GPU, where
passes are in bfloat16 by autocast, wall-clock time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from rich.table import Table
from torch import nn

import reporting
import tasks
from language_model import Size, Transformer
from second_order import SecondOrderWarning
from task import Task
from tasks import TASKS, Job, Run, final, seconds_to, steps_to, train

GRIDS = {"AdamW": (0.001, 0.002, 0.004), "Muon": (0.002, 0.004, 0.008)}
TUNED_ON = 100
JUDGEMENTS = 60  # of a run
SHORT = "larger, a fifth of the steps"
FULL = "larger"
TIMED = "larger, some steps"
TIMED_STEPS = 5


def sized(size: Size) -> Task:
    """The training of a model, with about as many judgements whatever the number of steps."""
    return replace(tasks.language(size), every=max(1, size.steps // JUDGEMENTS))


def in_steps(size: Size, steps: int) -> Size:
    """A training in about so many steps, a tenth of them warm-up; the last one is judged."""
    every = max(1, steps // JUDGEMENTS)
    steps -= steps % every
    return replace(size, steps=steps, warmup=max(1, steps // 10))


def register(size: Size) -> None:
    """Make the full and the short training known by their names, in this process."""
    fifth = in_steps(size, max(1, size.steps // 5))
    TASKS[FULL] = lambda: sized(size)
    TASKS[SHORT] = lambda: sized(fifth)


def step_seconds(size: Size, threads: int, device: str) -> float:
    """Wall-clock seconds per step of AdamW: the median over the steps of a size but the first."""
    times: list[float] = []

    def note_the_time(model: nn.Module) -> float:
        times.append(time.perf_counter())
        return 0.0

    few = replace(tasks.language(size), every=1, judge=note_the_time)
    TASKS[TIMED] = lambda: few
    train(Job(TIMED, "AdamW", GRIDS["AdamW"][0], TUNED_ON, threads=threads, device=device))
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def best_rate(runs: Iterable[Run]) -> float:
    """The rate of the run with the least loss at the end; which it is, is printed."""
    runs = list(runs)
    best = min(runs, key=final).job.lr
    rates = [run.job.lr for run in runs]
    edge = ", at the edge of the grid" if best in (min(rates), max(rates)) else ""
    losses = ", ".join(f"{run.job.lr:g}: {final(run):.4f}" for run in runs)
    name = runs[0].job.optimizer
    reporting.show(f"held-out losses of {name} by rate: {losses}; {best:g} is taken{edge}")
    return best


def table(runs: Sequence[Run]) -> Table:
    """Losses at the end, and when each run meets the last loss of the first one, AdamW's."""
    adamw = runs[0]
    goal = adamw.losses[-1]
    steps = TASKS[FULL]().steps
    rows = []
    for run in runs:
        needed = steps_to(run, goal)
        seconds = seconds_to(run, goal)
        rows.append(
            [
                run.job.optimizer,
                f"{run.job.lr:g}",
                f"{final(run):.4f}",
                f"{run.seconds[-1]:.0f}",
                f"{needed:g} ({needed / steps:.2f} ×)",
                f"{seconds:.0f} ({seconds / adamw.seconds[-1]:.2f} ×)",
            ]
        )
    columns = "optimizer", "rate", "held-out loss", "seconds in all"
    title = f"{steps:,} steps; steps and seconds to AdamW's last loss, as shares of AdamW's"
    return reporting.table(title, (*columns, "steps", "seconds"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a step, choose a rate, train, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="of AdamW's whole run")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--context", type=int, default=128, help="characters")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rivals", nargs="*", choices=("Muon",), default=[], help="beside AdamW")
    parser.add_argument(
        "--multiples", nargs="+", type=float, default=[1.0], help="KAISA's rates, over AdamW's best"
    )
    parser.add_argument("--json", type=Path, help="write the runs there")
    options = parser.parse_args(arguments)
    if options.width % 64:
        parser.error(f"--width {options.width} is not a multiple of 64, the width of a head")
    warnings.simplefilter("ignore", SecondOrderWarning)
    size = Size(
        layers=options.layers,
        width=options.width,
        heads=options.width // 64,
        context=options.context,
        batch=options.batch,
        steps=TIMED_STEPS + 1,
        warmup=1,
    )
    parameters = sum(p.numel() for p in Transformer(size).parameters())
    seconds = step_seconds(size, options.threads, options.device)
    size = in_steps(size, max(10, round(60 * options.minutes / seconds)))
    register(size)
    reporting.show(f"{parameters:,} parameters, {seconds:.3f} s per step, {size.steps:,} steps")

    def job(task: str, optimizer: str, lr: float, seed: int) -> Job:
        return Job(task, optimizer, lr, seed, threads=options.threads, device=options.device)

    # Spawned, as a process that is forked cannot use CUDA.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawn, register, (size,)) as pool:
        names = ["AdamW", *options.rivals]
        cells = [(name, lr) for name in names for lr in GRIDS[name]]
        tuning = list(pool.map(train, [job(SHORT, name, lr, TUNED_ON) for name, lr in cells]))
        best = {
            name: best_rate(run for run in tuning if run.job.optimizer == name) for name in names
        }
        jobs = [job(FULL, name, best[name], 0) for name in names]
        jobs += [job(FULL, "KAISA, AdamW", n * best["AdamW"], 0) for n in options.multiples]
        runs = list(pool.map(train, jobs))

    reporting.show(table(runs))
    reporting.store(
        options.json,
        size=asdict(size),
        parameters=parameters,
        step_seconds=seconds,
        every=TASKS[FULL]().every,
        runs=list(map(asdict, runs)),
        tuning=list(map(asdict, tuning)),
    )


if __name__ == "__main__":
    main()

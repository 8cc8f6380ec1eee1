"""A transformer of ten million parameters: AdamW tuned over three rates, and KAISA over it.

    make larger                                          two to three hours on two cores
    make larger ARGS="--minutes 0.2 --layers 2 --width 64"          a test run of a minute
    make larger ARGS="--device cuda --processes 1 --minutes 0.4 --context 256 --batch 64 \
        --rivals Muon --multiples 1 2"                              three minutes on a GPU

The model is that of `benchmarks/language_model.py` on the standard library's source, with contexts
of 128 characters. The learning rate rises and then falls along a cosine. To tune AdamW, we train at
each rate for a fifth of the steps, on a seed that is not reported, with a schedule of the same
shape. The best rate has the smallest final held-out loss. Then we train AdamW and KAISA with
default settings at that rate, one run each, for the same number of steps. With several processes,
they run at the same time. Muon can be tuned and trained in the same way.

The number of steps follows from the minutes that AdamW's whole run may take, and from its measured
step time. Seconds in the table are those of the training steps: CPU time, or wall-clock time on a
GPU, where passes run under autocast to bfloat16.
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
from tasks import TASKS, Job, Run, final_loss, seconds_to, steps_to, train

GRIDS = {"AdamW": (0.001, 0.002, 0.004), "Muon": (0.002, 0.004, 0.008)}
TUNED_ON = 100
EVALUATIONS = 60  # per run
SHORT = "larger, a fifth of the steps"
FULL = "larger"
TIMED = "larger, some steps"
TIMED_STEPS = 5


def make_task(size: Size) -> Task:
    """The task of a size, with about the same number of evaluations for any number of steps."""
    return replace(tasks.language(size), every=max(1, size.steps // EVALUATIONS))


def with_steps(size: Size, steps: int) -> Size:
    """Change the number of steps, so that the last step is evaluated. A tenth is warm-up."""
    every = max(1, steps // EVALUATIONS)
    steps -= steps % every
    return replace(size, steps=steps, warmup=max(1, steps // 10))


def register(size: Size) -> None:
    """Register the tasks of the full and the short training run in this process."""
    short_size = with_steps(size, max(1, size.steps // 5))
    TASKS[FULL] = lambda: make_task(size)
    TASKS[SHORT] = lambda: make_task(short_size)


def step_seconds(size: Size, threads: int, device: str) -> float:
    """Median wall-clock seconds per step of AdamW, without the first step."""
    times: list[float] = []

    def record_time(model: nn.Module) -> float:
        times.append(time.perf_counter())
        return 0.0

    task = replace(tasks.language(size), every=1, judge=record_time)
    TASKS[TIMED] = lambda: task
    train(Job(TIMED, "AdamW", GRIDS["AdamW"][0], TUNED_ON, threads=threads, device=device))
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def best_rate(runs: Iterable[Run]) -> float:
    """The learning rate of the run with the smallest final loss. Prints all losses."""
    runs = list(runs)
    best = min(runs, key=final_loss).job.lr
    losses = ", ".join(f"{run.job.lr:g}: {final_loss(run):.4f}" for run in runs)
    name = runs[0].job.optimizer
    message = f"held-out losses of {name} by rate: {losses}; the best rate is {best:g}"
    rates = [run.job.lr for run in runs]
    if best in (min(rates), max(rates)):
        message += ", at the edge of the grid"
    reporting.show(message)
    return best


def table(runs: Sequence[Run]) -> Table:
    """Final losses, and the steps and seconds to the last loss of the first run, AdamW's."""
    adamw = runs[0]
    target = adamw.losses[-1]
    steps = TASKS[FULL]().steps
    rows = []
    for run in runs:
        steps_to_target = steps_to(run, target)
        seconds = seconds_to(run, target)
        rows.append(
            [
                run.job.optimizer,
                f"{run.job.lr:g}",
                f"{final_loss(run):.4f}",
                f"{run.seconds[-1]:.0f}",
                f"{steps_to_target:g} ({steps_to_target / steps:.2f} ×)",
                f"{seconds:.0f} ({seconds / adamw.seconds[-1]:.2f} ×)",
            ]
        )
    columns = "optimizer", "rate", "held-out loss", "seconds in all"
    title = f"{steps:,} steps; steps and seconds to AdamW's last loss, as shares of AdamW's"
    return reporting.table(title, (*columns, "steps", "seconds"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the step time, tune the rivals, train, print the table, and store the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="duration of AdamW's run")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--context", type=int, default=128, help="characters")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--processes", type=int, default=2, help="training runs at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rivals", nargs="*", choices=("Muon",), default=[], help="further rivals")
    parser.add_argument(
        "--multiples",
        nargs="+",
        type=float,
        default=[1.0],
        help="KAISA's learning rates, as multiples of AdamW's best",
    )
    parser.add_argument("--json", type=Path, help="write the runs to this file")
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

    # The number of steps follows from the measured step time.
    parameters = sum(p.numel() for p in Transformer(size).parameters())
    seconds = step_seconds(size, options.threads, options.device)
    size = with_steps(size, max(10, round(60 * options.minutes / seconds)))
    register(size)
    reporting.show(f"{parameters:,} parameters, {seconds:.3f} s per step, {size.steps:,} steps")

    def job(task: str, optimizer: str, lr: float, seed: int) -> Job:
        return Job(task, optimizer, lr, seed, threads=options.threads, device=options.device)

    # The processes are spawned, because a forked process cannot use CUDA.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawn, register, (size,)) as pool:
        # Tune the rivals on short runs.
        names = ["AdamW", *options.rivals]
        tuning_jobs = []
        for name in names:
            tuning_jobs += [job(SHORT, name, lr, TUNED_ON) for lr in GRIDS[name]]
        tuning = list(pool.map(train, tuning_jobs))
        best = {}
        for name in names:
            best[name] = best_rate(run for run in tuning if run.job.optimizer == name)

        # Train the rivals at their best rates, and KAISA at multiples of AdamW's best rate.
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
        runs=[asdict(run) for run in runs],
        tuning=[asdict(run) for run in tuning],
    )


if __name__ == "__main__":
    main()

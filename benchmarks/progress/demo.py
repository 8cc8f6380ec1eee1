"""The gain from curvature: KAISA next to Adam, AdamW and Muon, on two tasks, in three minutes.

    make demo

A small transformer learns the characters of the standard library's source, and a deep autoencoder
learns the digits. The optimizers of a task start from the same weights and get the same batches,
divided over the processes. KAISA has default settings and the options of its base, at twice AdamW's
learning rate or at Adam's. The script prints a table for each task. It draws the loss against steps
and against seconds of training, without those of evaluations. If 500 steps per optimizer take too
long, all optimizers run for fewer steps.
"""

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import digits
import language_model
from muon import Muon
from reporting import FIGURE_WIDTH, OPTIMIZER_COLORS, STYLE, machine, save
from second_order import KAISA, SecondOrderWarning

MOST_STEPS = 500
STEPS_BETWEEN_JUDGEMENTS = 25
TRIAL_STEPS = 10  # after a first block: KAISA refreshes at its first 20 steps, and at every tenth
SIZE = language_model.SIZES["small"]
DECAY: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95)}


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of the transformer's blocks, and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = {name: p for name, p in named if "blocks." in name and p.dim() == 2}
    rest = [p for name, p in named if name not in matrices]
    return [
        Muon(matrices.values(), lr=0.014, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, lr=0.014, **DECAY),
    ]


def rise_and_fall(steps: int, step: int) -> float:
    """A share of the learning rate: up in a tenth of the steps, down to 5 % by a cosine."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    passed = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * passed))


def image_batches() -> Iterator[Tensor]:
    images = digits.autoencoder_images()
    return (images[indices] for indices in digits.batches(len(images), 256, seed=0))


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizers. The first optimizer is the reference."""

    name: str
    make: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module, Tensor], Tensor]
    batches: Callable[[], Iterator[Tensor]]  # those of all processes together
    judged_on: Callable[[], Tensor]
    judged_by: str
    share_of_rate: Callable[[int, int], float]  # of how many steps, and of which
    optimizers: dict[str, Callable[[nn.Module], list[Optimizer]]]


LANGUAGE_MODEL = Task(
    "language model",
    partial(language_model.Transformer, SIZE),
    language_model.next_loss,
    partial(language_model.batches, SIZE, seed=0),
    partial(language_model.held_out, SIZE),
    "held-out loss (nats per character)",
    rise_and_fall,
    {
        "AdamW": lambda model: [AdamW(model.parameters(), lr=0.003, **DECAY)],
        "Muon": muon,
        "KAISA, AdamW": lambda model: [KAISA(model, lr=0.006, base=AdamW, **DECAY)],
    },
)
AUTOENCODER = Task(
    "deep autoencoder",
    digits.autoencoder,
    lambda model, images: digits.autoencoder_loss(model(images), images),
    image_batches,
    digits.autoencoder_images,
    "training loss (nats per image)",
    lambda steps, step: 1.0,
    {
        "Adam": lambda model: [Adam(model.parameters(), lr=0.01)],
        "KAISA, Adam": lambda model: [KAISA(model, lr=0.01, base=Adam)],
    },
)
TASKS = [LANGUAGE_MODEL, AUTOENCODER]


@dataclass
class Run:
    """One training: the loss every few steps, and the seconds that had passed."""

    task: str
    optimizer: str
    steps: list[int]
    seconds: list[float]
    losses: list[float]

    def first_at(self, loss: float) -> int | None:
        """Index of the first evaluation with at most this loss."""
        for index, evaluated_loss in enumerate(self.losses):
            if evaluated_loss <= loss:
                return index
        return None


def part_of_this_process(batch: Tensor) -> Tensor:
    return batch[dist.get_rank() :: dist.get_world_size()]


@torch.no_grad()
def judge(task: Task, model: nn.Module) -> float:
    """The loss on all examples, divided over the processes."""
    part = part_of_this_process(task.judged_on())
    sums = torch.tensor([task.loss_of(model, part).item() * len(part), len(part)])
    dist.all_reduce(sums)
    return round((sums[0] / sums[1]).item(), 4)


def train(task: Task, name: str, steps: int, quiet: bool) -> Run:
    torch.manual_seed(0)
    net = task.make()
    model = DistributedDataParallel(net)  # averages the gradients of the processes
    optimizers = task.optimizers[name](model)
    share = partial(task.share_of_rate, steps)
    schedulers = [LambdaLR(optimizer, share) for optimizer in optimizers]
    batches = task.batches()
    seconds = 0.0
    run = Run(task.name, name, [0], [0.0], [judge(task, net)])
    with tqdm(total=steps, desc=f"{task.name}, {name}", unit="step", disable=quiet) as bar:
        while run.steps[-1] < steps:
            block = min(STEPS_BETWEEN_JUDGEMENTS, steps - run.steps[-1])
            dist.barrier()
            start = time.perf_counter()
            for batch in islice(batches, block):
                model.zero_grad()
                task.loss_of(model, part_of_this_process(batch)).backward()
                for each in optimizers:
                    each.step()
                for scheduler in schedulers:
                    scheduler.step()
            seconds += time.perf_counter() - start
            run.steps.append(run.steps[-1] + block)
            run.seconds.append(round(seconds, 3))
            run.losses.append(judge(task, net))
            bar.set_postfix_str(f"loss {run.losses[-1]:.3f}", refresh=False)
            bar.update(block)
    return run


def cost_of(task: Task, name: str) -> tuple[float, float]:
    """Seconds of a run's first block of steps and of each later step, from a short run."""
    start = time.perf_counter()
    run = train(task, name, STEPS_BETWEEN_JUDGEMENTS + TRIAL_STEPS, quiet=True)
    *_, first, last = run.seconds
    judging = (time.perf_counter() - start - last) / len(run.losses)
    each_step = (last - first) / TRIAL_STEPS + judging / STEPS_BETWEEN_JUDGEMENTS
    return first + 2 * judging, each_step


def steps_within(seconds: float) -> int:
    """How many steps of every training there is time for, after a trial of each.

    Whole blocks, one at least; the same on all processes.
    """
    start = time.perf_counter()
    costs = [cost_of(task, name) for task in TASKS for name in task.optimizers]
    first, each_step = map(sum, zip(*costs, strict=True))
    left = seconds - (time.perf_counter() - start)
    blocks = 1 + max(0, int((left - first) / each_step) // STEPS_BETWEEN_JUDGEMENTS)
    steps = torch.tensor(min(MOST_STEPS, blocks * STEPS_BETWEEN_JUDGEMENTS))
    dist.broadcast(steps, 0)
    return int(steps)


def table(runs: list[Run]) -> Table:
    """A row for each optimizer, with the steps and seconds to the first optimizer's final loss."""
    first = runs[0].optimizer
    goal = runs[0].losses[-1]
    result = Table("\noptimizer", title=runs[0].task, title_justify="left", box=SIMPLE_HEAD)
    reached = [f"{unit} to {first}'s\nfinal loss" for unit in ("steps", "seconds")]
    for header in [*reached, "final\nloss", "ms\nper step"]:
        result.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        first_met = run.first_at(goal)
        to_goal = ["never", "never"]
        if first_met is not None:
            to_goal = [f"{run.steps[first_met]}", f"{run.seconds[first_met]:.1f}"]
        step_time = 1e3 * run.seconds[-1] / run.steps[-1]
        result.add_row(run.optimizer, *to_goal, f"{run.losses[-1]:.3f}", f"{step_time:.1f}")
    return result


def figure(results: list[list[Run]]) -> Figure:
    """The loss of each task (rows) against steps and against seconds (columns)."""
    font_size = 10.5  # readable on a phone also
    with mpl.rc_context({**STYLE, "font.size": font_size, "legend.fontsize": font_size}):
        drawing = Figure(figsize=(FIGURE_WIDTH, 6.0), layout="constrained")
        rows = drawing.subplots(len(results), 2, sharey="row")
        for (left, right), task, runs in zip(rows, TASKS, results, strict=True):
            draw(left, runs, "steps")
            draw(right, runs, "seconds")
            left.set_title(task.name, loc="left", fontsize=font_size + 1)
            left.set_ylabel(task.judged_by)
            # Leave room for the legend above the curves.
            highest = max(run.losses[1] for run in runs)
            lowest = min(run.losses[-1] for run in runs)
            left.set_ylim(top=highest + 0.3 * (highest - lowest))
            left.set_xlabel("training step")
            right.set_xlabel("wall-clock time (s)")
    return drawing


def draw(axes: Axes, runs: list[Run], unit: str) -> None:
    """Draw the curves, with a dot where an optimizer reaches the first one's final loss."""
    goal = runs[0].losses[-1]
    for run in runs:
        name, _, base = run.optimizer.partition(", ")
        color = OPTIMIZER_COLORS[name]
        across = getattr(run, unit)
        label = f"{name} over {base}" if base else name
        met = run.first_at(goal)
        if met is not None:
            axes.plot(across[met], run.losses[met], "o", color=color, zorder=3)
            label += f": {round(across[met], 1):g}"
        axes.plot(across, run.losses, color=color, linewidth=2, label=label)
    axes.axhline(goal, color="#8c8c8c", linewidth=0.9, linestyle=":", zorder=1)
    axes.set_xlim(left=0)
    axes.legend(
        title=f"{unit} to {runs[0].optimizer}'s last loss",
        loc="upper right",
        alignment="left",
        frameon=False,
        handlelength=1.2,
        labelcolor="linecolor",
        borderaxespad=0,
        borderpad=0,
    )


def stored_runs(path: Path) -> list[list[Run]]:
    """The runs of a file that ``--json`` wrote, by task."""
    runs = [Run(**run) for run in json.loads(path.read_text("utf-8"))["runs"]]
    return [[run for run in runs if run.task == task.name] for task in TASKS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help=f"of each training; {MOST_STEPS} if time allows")
    parser.add_argument(
        "--seconds", type=float, default=130, help="for all of them, without --steps"
    )
    parser.add_argument("--figure", type=Path, default=Path("demo.png"))
    parser.add_argument("--json", type=Path, help="write the runs")
    parser.add_argument("--stored", type=Path, help="draw the runs of this file, without training")
    args = parser.parse_args()
    if args.stored is not None:
        save(figure(stored_runs(args.stored)), args.figure)
        return
    warnings.filterwarnings("ignore", ".*trained by AdamW alone", SecondOrderWarning)  # layer norms
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", "tcp://localhost:0", rank=0, world_size=1)
    processes = dist.get_world_size()
    quiet = dist.get_rank() != 0
    console = Console(quiet=quiet)
    results = []
    if args.steps is None:
        steps = steps_within(args.seconds)
        if steps < MOST_STEPS:
            console.print(
                f"{steps} steps per optimizer, because {MOST_STEPS} take more than "
                f"{args.seconds:g} s here. Use --steps {MOST_STEPS} to run them anyway."
            )
    else:
        steps = args.steps
        for task in TASKS:
            for name in task.optimizers:  # warm-up
                train(task, name, 2, quiet=True)
    for task in TASKS:
        results.append([train(task, name, steps, quiet) for name in task.optimizers])
        console.print(table(results[-1]))
    dist.destroy_process_group()
    if quiet:
        return
    save(figure(results), args.figure)
    console.print(f"Figure: {args.figure}")
    if args.json is not None:
        runs = [asdict(run) for of_task in results for run in of_task]
        record = {"machine": machine(), "processes": processes, "runs": runs}
        args.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

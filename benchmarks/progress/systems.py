"""SGD and Adam next to every optimizer of the package, on real data, in a few minutes.

    make systems

Each optimizer trains the same network from the same weights on the same batches, once for each
learning rate of a small grid. The best rate needs the fewest steps to all targets together. The
script prints a table of the best rates. It draws the training loss against steps and against
seconds of training, without those of evaluations.
"""

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from tqdm import tqdm

from digits import Digits, batches, conv_net, load_split, mlp
from plot_systems import figure
from reporting import machine, save
from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

GLOBAL_BATCH = 64
CURVATURE_BATCH = 256  # training images that eigenpairs are of
STEPS_BETWEEN_EVALUATIONS = 5
MODELS: dict[str, Callable[[], nn.Module]] = {"conv": conv_net, "mlp": mlp}


@dataclass(frozen=True)
class Entry:
    """An optimizer of the comparison: how to make it, and the learning rates it may choose from."""

    name: str
    learning_rates: tuple[float, ...]
    build: Callable[[nn.Module, float, Digits], tuple[nn.Module, Optimizer]]
    """(model, lr, data) -> (what to call, optimizer); only curvature closures look at the data."""


def sgd(model: nn.Module, lr: float, _: Digits) -> tuple[nn.Module, Optimizer]:
    trained = DistributedDataParallel(model)
    return trained, torch.optim.SGD(trained.parameters(), lr=lr, momentum=0.9)


def kaisa_comm_opt(model: nn.Module, lr: float, _: Digits) -> tuple[nn.Module, Optimizer]:
    return model, KAISA(model, lr=lr, momentum=0.9, grad_worker_fraction=1.0)


def kaisa_mem_opt(model: nn.Module, lr: float, _: Digits) -> tuple[nn.Module, Optimizer]:
    fraction = 1 / dist.get_world_size()
    return model, KAISA(model, lr=lr, momentum=0.9, grad_worker_fraction=fraction)


def dpkfac(model: nn.Module, lr: float, _: Digits) -> tuple[nn.Module, Optimizer]:
    return model, DPKFAC(model, lr=lr, momentum=0.9)


def distkfac(model: nn.Module, lr: float, _: Digits) -> tuple[nn.Module, Optimizer]:
    return model, DistKFAC(model, lr=lr, momentum=0.9)


def distkfac_stats(model: nn.Module, lr: float, _: Digits) -> tuple[nn.Module, Optimizer]:
    helpers = dist.get_world_size() // 2  # with one process it takes its own statistics
    return model, DistKFAC(model, lr=lr, momentum=0.9, stats_workers=helpers)


def dho2(model: nn.Module, lr: float, data: Digits) -> tuple[nn.Module, Optimizer]:
    closure = curvature_closure(model, data)
    optimizer = DHO2(
        model,
        lr=lr,
        momentum=0.9,
        curvature_interval=50,
        warmup_steps=25,
        curvature_closure=closure,
    )
    return model, optimizer


def adam(model: nn.Module, lr: float, _: Digits) -> tuple[nn.Module, Optimizer]:
    trained = DistributedDataParallel(model)
    return trained, torch.optim.Adam(trained.parameters(), lr=lr)


def dho2_adam(model: nn.Module, lr: float, data: Digits) -> tuple[nn.Module, Optimizer]:
    closure = curvature_closure(model, data)
    optimizer = DHO2(
        model,
        lr=lr,
        base=torch.optim.Adam,
        curvature_interval=50,
        warmup_steps=25,
        curvature_closure=closure,
    )
    return model, optimizer


def mrdho2(model: nn.Module, lr: float, data: Digits) -> tuple[nn.Module, Optimizer]:
    optimizer = MRDHO2(
        model,
        lr=lr,
        momentum=0.9,
        epoch_steps=50,
        helper_ranks=dist.get_world_size() // 2,  # with one process it falls back to DHO2
        curvature_closure=curvature_closure(model, data),
    )
    return model, optimizer


def curvature_closure(model: nn.Module, data: Digits, group: Any = None) -> Callable[[], Tensor]:
    """The loss on this process's part of a fixed batch. The group (None: all) divides the batch."""
    share = slice(dist.get_rank(group), CURVATURE_BATCH, dist.get_world_size(group))
    images = data.train_images[share]
    labels = data.train_labels[share]
    return lambda: cross_entropy(model(images), labels)


ENTRIES = [
    Entry("SGD", (0.01, 0.03, 0.1, 0.3), sgd),
    Entry("KAISA COMM-OPT", (0.03, 0.1, 0.3), kaisa_comm_opt),
    Entry("KAISA MEM-OPT", (0.03, 0.1, 0.3), kaisa_mem_opt),
    Entry("DPKFAC", (0.03, 0.1, 0.3), dpkfac),
    Entry("DistKFAC", (0.03, 0.1, 0.3), distkfac),
    Entry("DistKFAC, stats", (0.03, 0.1, 0.3), distkfac_stats),
    Entry("DHO2", (0.03, 0.1, 0.3), dho2),
    Entry("MRDHO2", (0.03, 0.1, 0.3), mrdho2),
    Entry("Adam", (0.001, 0.003, 0.01), adam),
    Entry("DHO2 (Adam)", (0.001, 0.003, 0.01), dho2_adam),
]


@dataclass
class Run:
    """One training: what was measured every few steps, and what it cost."""

    name: str
    lr: float
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    curvature_bytes: int | None = None  # of the process that holds the most; None: first order

    @property
    def milliseconds_per_step(self) -> float:
        return 1e3 * self.seconds[-1] / self.steps[-1]

    def add(self, step: int, seconds: float, loss: float, accuracy: float) -> None:
        self.steps.append(step)
        self.seconds.append(seconds)
        self.losses.append(loss)
        self.accuracies.append(accuracy)


@dataclass(frozen=True)
class Target:
    """A goal, and whether a measurement (loss, accuracy) meets it."""

    label: str
    met: Callable[[float, float], bool]

    def first(self, run: Run) -> int | None:
        """Index of the first measurement of the run that meets the goal."""
        for index, (loss, accuracy) in enumerate(zip(run.losses, run.accuracies, strict=True)):
            if self.met(loss, accuracy):
                return index
        return None


TARGETS = [
    Target("97% acc.", lambda loss, accuracy: accuracy >= 0.97),
    Target("98% acc.", lambda loss, accuracy: accuracy >= 0.98),
    Target("loss 0.01", lambda loss, accuracy: loss <= 0.01),
]


def steps_to_all_targets(run: Run, max_steps: int) -> tuple[int, float]:
    """What the learning rate is chosen by: steps summed over the targets, then the last loss.

    A target that was missed counts as twice the steps of a whole run.
    """
    total = 0
    for target in TARGETS:
        index = target.first(run)
        total += 2 * max_steps if index is None else run.steps[index]
    last_loss = run.losses[-1]
    return total, last_loss if math.isfinite(last_loss) else math.inf


@torch.no_grad()
def evaluate(model: nn.Module, data: Digits) -> tuple[float, float]:
    """Training loss and test accuracy; each process looks at its share of the images."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    share = slice(rank, None, world_size)
    loss = cross_entropy(model(data.train_images[share]), data.train_labels[share], reduction="sum")
    hits = (model(data.test_images[share]).argmax(dim=1) == data.test_labels[share]).sum()
    sums = torch.stack([loss.double(), hits.double()])
    dist.all_reduce(sums)
    return (
        sums[0].item() / len(data.train_images),
        sums[1].item() / len(data.test_images),
    )


def largest_over_processes(value: int) -> int:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def train(
    entry: Entry,
    lr: float,
    make_model: Callable[[], nn.Module],
    data: Digits,
    steps: int,
    seed: int,
) -> Run:
    """Train from seeded weights for ``steps`` steps, or until the loss is not finite."""
    torch.manual_seed(seed)
    model = make_model()
    trained, optimizer = entry.build(model, lr, data)
    run = Run(entry.name, lr)
    run.add(0, 0.0, *evaluate(model, data))
    with tqdm(
        total=steps,
        desc=f"{entry.name:<16} lr {lr:<4g}",
        unit="step",
        mininterval=0.5,
        disable=dist.get_rank() != 0,
    ) as bar:
        if isinstance(optimizer, MRDHO2 | DistKFAC) and has_helpers(optimizer):
            curvature_bytes = train_with_helpers(run, model, optimizer, data, steps, seed, bar)
        else:
            curvature_bytes = train_together(run, model, trained, optimizer, data, steps, seed, bar)
    if curvature_bytes is not None:
        run.curvature_bytes = largest_over_processes(curvature_bytes)
    return run


def train_together(
    run: Run,
    model: nn.Module,
    trained: nn.Module,
    optimizer: Optimizer,
    data: Digits,
    steps: int,
    seed: int,
    bar: "tqdm[NoReturn]",
) -> int | None:
    """Train on all processes, with evaluations whose time does not count.

    Returns the bytes of curvature that this process stores.
    """
    parts = batches_of_this_process(data, seed, None)
    seconds = 0.0
    while run.steps[-1] < steps and math.isfinite(run.losses[-1]):
        block = min(STEPS_BETWEEN_EVALUATIONS, steps - run.steps[-1])
        dist.barrier()
        start = time.perf_counter()
        for _ in range(block):
            take_step(trained, optimizer, data, next(parts))
        seconds += time.perf_counter() - start
        run.add(run.steps[-1] + block, seconds, *evaluate(model, data))
        bar.set_postfix_str(
            f"loss {run.losses[-1]:.4f}, accuracy {run.accuracies[-1]:.1%}", refresh=False
        )
        bar.update(block)
    summary = getattr(optimizer, "summary", None)  # torch's own optimizers have none
    return None if summary is None else summary().total_bytes


def train_with_helpers(
    run: Run,
    model: nn.Module,
    optimizer: MRDHO2 | DistKFAC,
    data: Digits,
    steps: int,
    seed: int,
    bar: "tqdm[NoReturn]",
) -> int | None:
    """Train on the workers while helpers compute, and evaluate snapshots of the parameters later.

    Evaluations during training would give helpers additional time. Returns the bytes of curvature
    that this process stores. MRDHO2 stores none between epochs.
    """
    snapshots: list[tuple[int, float, dict[str, Tensor]]] = []
    with optimizer:
        if optimizer.role == "accelerator":
            closure = curvature_closure(model, data, optimizer.worker_group)
            optimizer.serve([closure], lambda closure: closure())
        elif optimizer.role == "stats":
            helper_seed = seed + 1 + dist.get_rank()
            optimizer.serve(
                batches(len(data.train_images), GLOBAL_BATCH, seed=helper_seed),
                lambda indices: cross_entropy(
                    model(data.train_images[indices]), data.train_labels[indices]
                ),
            )
        else:
            parts = batches_of_this_process(data, seed, optimizer.worker_group)
            start = time.perf_counter()
            for step in range(1, steps + 1):
                take_step(model, optimizer, data, next(parts))
                if step % STEPS_BETWEEN_EVALUATIONS == 0 or step == steps:
                    seconds = time.perf_counter() - start
                    snapshots.append((step, seconds, copy.deepcopy(model.state_dict())))
                    bar.update(step - bar.n)
        size = None
        if isinstance(optimizer, DistKFAC):
            size = optimizer.summary().total_bytes
    broadcast = [snapshots]
    dist.broadcast_object_list(broadcast, src=0)
    for step, seconds, parameters in broadcast[0]:
        if math.isfinite(run.losses[-1]):
            model.load_state_dict(parameters)
            run.add(step, seconds, *evaluate(model, data))
    return size


def has_helpers(optimizer: MRDHO2 | DistKFAC) -> bool:
    """Whether some processes are helpers. A single process is always a worker."""
    return dist.get_world_size(optimizer.worker_group) < dist.get_world_size()


def batches_of_this_process(data: Digits, seed: int, group: Any) -> Iterator[Tensor]:
    """This process's part of each batch. The group (None: all) divides the batch."""
    return batches(
        len(data.train_images),
        GLOBAL_BATCH,
        seed=seed,
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
    )


def take_step(model: nn.Module, optimizer: Optimizer, data: Digits, indices: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(data.train_images[indices]), data.train_labels[indices]).backward()
    optimizer.step()


def warm_up(make_model: Callable[[], nn.Module], data: Digits) -> None:
    """Pay for the first call of every kernel before the clock runs."""
    model = make_model()
    for _ in range(3):
        cross_entropy(model(data.train_images[:64]), data.train_labels[:64]).backward()


def table(runs: list[Run], title: str) -> Table:
    """One row an optimizer; the best of each column is bold. Fits a terminal of 80 columns."""
    result = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, padding=0)
    result.add_column("\noptimizer", no_wrap=True)
    goals = [f"steps (s)\nto {target.label}" for target in TARGETS]
    for header in ["\nrate", *goals, "final\nacc.", "ms a\nstep", "curv.\nMB"]:
        result.add_column(header, justify="right", no_wrap=True)

    fewest = [
        min((run.steps[i] for run in runs if (i := target.first(run)) is not None), default=0)
        for target in TARGETS
    ]
    best_accuracy = max(run.accuracies[-1] for run in runs)
    for run in runs:
        cells = [run.name, f"{run.lr:g}"]
        for target, steps in zip(TARGETS, fewest, strict=True):
            index = target.first(run)
            if index is None:
                cells.append("never")
            else:
                count = bold(str(run.steps[index]), run.steps[index] == steps)
                cells.append(f"{count} ({run.seconds[index]:.2f})")
        cells.append(bold(f"{run.accuracies[-1]:.1%}", run.accuracies[-1] == best_accuracy))
        cells.append(f"{run.milliseconds_per_step:.1f}")
        cells.append("–" if run.curvature_bytes is None else f"{run.curvature_bytes / 1e6:.2f}")
        result.add_row(*cells)
    return result


def bold(text: str, best: bool) -> str:
    return f"[bold]{text}[/bold]" if best else text


@contextmanager
def process_group() -> Iterator[None]:
    """The group that torchrun prepared, or one of this process alone; gloo, as the data is tiny."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", "tcp://localhost:0", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    names = [entry.name for entry in ENTRIES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="conv")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("systems.png"), help="the figure")
    parser.add_argument("--json", type=Path, help="write the runs, of every learning rate")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    make_model = MODELS[args.model]
    data = load_split()
    with process_group():
        warm_up(make_model, data)
        best = []
        everything = []
        for entry in ENTRIES:
            if entry.name not in args.only:
                continue
            runs = [
                train(entry, lr, make_model, data, args.steps, args.seed)
                for lr in entry.learning_rates
            ]
            best.append(min(runs, key=lambda run: steps_to_all_targets(run, args.steps)))
            everything += [asdict(run) | {"chosen": run is best[-1]} for run in runs]
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    if rank != 0:
        return
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    title = (
        f"Digits, {args.model} network, batches of {GLOBAL_BATCH} over {processes}:"
        " each optimizer at the best learning rate of its grid"
    )
    console = Console()
    console.print(table(best, title))
    console.print(
        "Seconds are of training alone, without evaluation. Curvature (curv.): what the optimizer"
        " keeps beside the base optimizer's state, on the process that holds the most. MRDHO2 keeps"
        " nothing from one epoch to the next."
    )
    save(figure(list(map(asdict, best))), args.output)
    console.print(f"Figure: {args.output}")
    if args.json is not None:
        record = {"machine": machine(), "model": args.model, "runs": everything}
        args.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

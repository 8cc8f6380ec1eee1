"""What MRDHO2 makes of its eigenpairs, at equal time: each `final_update` beside the base alone.

    export PYTHONPATH=examples
    torchrun --standalone --nproc-per-node=2 benchmarks/progress/final_updates_timed.py

One worker and one accelerator, on three tasks with batches of the size that several processes would
share: the digits with an MLP, the deep autoencoder, and a new head on a frozen body. Each rule has
settings of its own, the best of `--scan`, on seeds from 100 on.

Time is the worker's processor time of steps, as medians over all seeds, so that it does not matter
what else the machine does: a rule whose step takes twice as long as the base's is judged after half
as many steps. That is wall time where the worker does not wait, which is where an epoch takes the
accelerator less of its own processor time than the worker; the table tells both.

Two rules that the package has not are tried in the worker alone: "searched" is equation 17 with the
α among 0 and ½ⁱ, i = 0 to 6, at which the loss of the accelerator's batch is least, and "ADMM" that
of the second version's published code: DHO2 with an interval of an epoch, at whose end the
displacements of all epochs so far are added to w once more. Their time is not counted: they are
judged after as many steps as the base.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adam, Optimizer

import digits
import fine_tuning
from second_order import DHO2, MRDHO2
from second_order.lanczos import eigenpairs

ALONE = "base alone"
SHIPPED = ("within", "guarded", "paper", "additive")
TRIED = ("searched", "ADMM")
RULES = (ALONE, *SHIPPED, *TRIED)
JUDGED = 50  # times in a run
PATIENCE = 600.0  # seconds: the machine may have other work to do


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        name: In the table.
        make: The model.
        loss: (model, indices of examples, source of noise) -> loss.
        examples: How many there are.
        batch: How many to a step.
        curvature: How many to the accelerator's batch.
        steps: How many.
        epoch_steps: E.
        base: The base optimizer.
        settings: Of the base alone, and further ones of each rule.
        scan: What `--scan` compares for a rule, beside these.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, torch.Generator], Tensor]
    examples: int
    batch: int
    curvature: int
    steps: int
    epoch_steps: int
    base: type[Optimizer]
    settings: dict[str, dict[str, Any]]
    scan: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def whole(self, model: nn.Module) -> float:
        """The loss of all examples, with the same noise each time."""
        with torch.no_grad():
            everything = torch.arange(self.examples)
            return float(self.loss(model, everything, torch.Generator().manual_seed(1)))

    def batches(self, seed: int) -> Iterator[Tensor]:
        """The worker's batches."""
        return digits.batches(self.examples, self.batch, seed=seed)

    def curved(self, seed: int) -> list[Tensor]:
        """The accelerator's batches, one for each epoch."""
        parts = digits.batches(self.examples, self.curvature, seed=seed + 10_000)
        return [next(parts) for _ in range(math.ceil(self.steps / self.epoch_steps))]


@dataclass
class Run:
    """One training.

    Attributes:
        losses: Of all examples, at `JUDGED` places.
        seconds: Of the worker's processor time, of all steps; 0 if it does not count.
        helper_seconds: Of the accelerator's.
    """

    task: str
    rule: str
    seed: int
    settings: dict[str, Any]
    losses: list[float]
    seconds: float
    helper_seconds: float = 0.0
    applied: int = 0
    epochs: int = 0


DEEP = {"warmup_steps": 50, "lr_scale_clip": 1.5}
HEAD = {"largest": 30, "lanczos_iterations": 60, "newton_scale": 0.3}


def wide_mlp() -> nn.Sequential:
    """64-256-128-10 with ReLU: a step that takes some milliseconds; takes (N, 64)."""
    return nn.Sequential(
        *(nn.Linear(digits.PIXELS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()),
        nn.Linear(128, digits.CLASSES),
    )


def tasks() -> list[Task]:
    data, images = digits.load_split(), digits.autoencoder_images()

    def classify(model: nn.Module, indices: Tensor, _: torch.Generator) -> Tensor:
        return cross_entropy(model(data.train_images[indices]), data.train_labels[indices])

    def reconstruct(model: nn.Module, indices: Tensor, _: torch.Generator) -> Tensor:
        return digits.autoencoder_loss(model(images[indices]), images[indices])

    def tune(model: nn.Module, indices: Tensor, noise: torch.Generator) -> Tensor:
        noisy = fine_tuning.noisy(data.train_images[indices], noise)
        return cross_entropy(model(noisy), data.train_labels[indices])

    mlp = Task(
        "MLP",
        wide_mlp,
        classify,
        len(data.train_images),
        batch=1024,
        curvature=256,
        steps=300,
        epoch_steps=25,
        base=SGD,
        settings={ALONE: {"lr": 0.5, "momentum": 0.9}, "within": {"warmup_steps": 25}},
    )
    autoencoder = Task(
        "autoencoder",
        digits.autoencoder,
        reconstruct,
        len(images),
        batch=1024,
        curvature=512,
        steps=500,
        epoch_steps=50,
        base=SGD,
        settings={ALONE: {"lr": 0.06, "momentum": 0.9}, "within": DEEP},
    )
    head = Task(
        "fine-tuning",
        partial(fine_tuning.fine_tuned, "linear"),
        tune,
        len(data.train_images),
        batch=512,
        curvature=512,
        steps=200,
        epoch_steps=20,
        base=Adam,
        settings={ALONE: {"lr": 0.02}, "within": HEAD},
    )
    return [mlp, autoencoder, head]


# ---------------------------------------------------------------------------------- one training


def trained(task: Task, rule: str, seed: int, settings: dict[str, Any]) -> Run | None:
    """On the worker its run; None on the accelerator."""
    torch.manual_seed(seed)
    model, works = task.make(), dist.get_rank() == 0
    if rule not in SHIPPED:
        return alone(task, rule, seed, settings, model) if works else None
    optimizer = MRDHO2(
        model,
        base=task.base,
        epoch_steps=task.epoch_steps,
        final_update=rule,  # type: ignore[arg-type]
        gradient_averaging=False,
        helper_timeout=PATIENCE,
        **settings,
    )
    run = None
    with optimizer:
        begun = time.process_time()
        if works:
            run = loop(task, rule, seed, settings, model, optimizer)
        else:
            noise = torch.Generator()

            def loss_fn(indices: Tensor) -> Tensor:
                return task.loss(model, indices, noise.manual_seed(int(indices[0]) + seed))

            optimizer.serve(task.curved(seed), loss_fn)
        spent = time.process_time() - begun
    report = torch.tensor([spent], dtype=torch.float64)
    dist.broadcast(report, 1)
    if run is not None:
        run.helper_seconds = float(report)
        run.epochs = len(optimizer.epochs)
        run.applied = sum(epoch.applied for epoch in optimizer.epochs)
    return run


@cache
def own_group() -> Any:
    """The worker's process group of one; the first call is a collective of both."""
    return dist.new_group([0])


def loop(
    task: Task,
    rule: str,
    seed: int,
    settings: dict[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    after: Callable[[int], None] = lambda step: None,
) -> Run:
    parts, noise = task.batches(seed), torch.Generator().manual_seed(seed)
    losses, seconds, every = [], 0.0, max(1, task.steps // JUDGED)
    for step in range(task.steps):
        begun = time.process_time()
        optimizer.zero_grad()
        task.loss(model, next(parts), noise).backward()
        optimizer.step()
        seconds += time.process_time() - begun
        after(step)
        if (step + 1) % every == 0:
            losses.append(task.whole(model))
    return Run(task.name, rule, seed, settings, losses, seconds)


def alone(task: Task, rule: str, seed: int, settings: dict[str, Any], model: nn.Module) -> Run:
    """The base alone, or a rule that is only tried."""
    params = [p for p in model.parameters() if p.requires_grad]
    curved, noise = task.curved(seed), torch.Generator()

    def closure(step: int) -> Tensor:
        indices = curved[min(step // task.epoch_steps, len(curved) - 1)]
        return task.loss(model, indices, noise.manual_seed(int(indices[0]) + seed))

    if rule == "ADMM":
        place = [0]
        optimizer: Optimizer = DHO2(
            model,
            base=task.base,
            curvature_interval=task.epoch_steps,
            warmup_steps=0,
            curvature_closure=lambda: closure(place[0]),
            process_group=own_group(),
            **settings,
        )
        start = parameters_to_vector(params).detach().clone()
        moved = torch.zeros_like(start)

        def extrapolate(step: int) -> None:
            place[0] = step + 1
            if (step + 1) % task.epoch_steps == 0:
                here = parameters_to_vector(params).detach()
                moved.add_(here - start)
                vector_to_parameters(here + moved, params)
                start.copy_(here + moved)

        return loop(task, rule, seed, settings, model, optimizer, extrapolate)
    own = {"largest": 10, **settings}
    largest = own.pop("largest")
    optimizer = cast(Callable[..., Optimizer], task.base)(params, **own)
    if rule == ALONE:
        return loop(task, rule, seed, settings, model, optimizer)
    search = Search(params, closure, task.epoch_steps, largest)
    run = loop(task, rule, seed, settings, model, optimizer, search)
    run.applied, run.epochs = search.applied, search.epochs
    return run


class Search:
    """Equation 17 with the α that suits the accelerator's batch best; 0 is no update at all.

    Args:
        params: What trains.
        closure: The loss of the accelerator's batch at a step.
        every: E.
        largest: k.
    """

    def __init__(
        self, params: Sequence[Tensor], closure: Callable[[int], Tensor], every: int, largest: int
    ) -> None:
        self.params, self.closure, self.every, self.largest = params, closure, every, largest
        self.applied = self.epochs = 0
        self.begin(0)

    def begin(self, step: int) -> None:
        self.start = parameters_to_vector(self.params).detach().clone()
        self.total = torch.zeros_like(self.start)
        pairs = eigenpairs(lambda: self.closure(step), self.params, largest=self.largest, tol=1e-2)
        sizes = pairs.eigenvalues.abs().to(self.start)
        self.rates = 1.0 / sizes.clamp_min(0.01 * float(sizes.max()))
        self.V = pairs.eigenvectors

    def loss_at(self, point: Tensor, step: int) -> float:
        vector_to_parameters(point, self.params)
        with torch.no_grad():
            loss = float(self.closure(step))
        return loss if math.isfinite(loss) else math.inf

    def __call__(self, step: int) -> None:
        """Add the step's gradients; search at the end of an epoch."""
        self.total += parameters_to_vector([cast(Tensor, p.grad) for p in self.params])
        if (step + 1) % self.every:
            return
        here = parameters_to_vector(self.params).detach().clone()
        undone = here - self.V.t() @ (self.V @ (here - self.start))
        newton = self.V.t() @ (self.rates * (self.V @ self.total))
        points = [here, *(undone - 0.5**i * newton for i in range(7))]
        losses = [self.loss_at(point, step) for point in points]
        best = min(range(len(points)), key=losses.__getitem__)
        vector_to_parameters(points[best], self.params)
        self.applied, self.epochs = self.applied + (best > 0), self.epochs + 1
        self.begin(step + 1)


# ------------------------------------------------------------------------------------- the table


def milliseconds(runs: list[Run], steps: int) -> float:
    """Of the worker's processor time for a step, the median over runs."""
    return 1000 * statistics.median(run.seconds for run in runs) / steps


def at(run: Run, share: float) -> float:
    """The loss after a share of the steps, between judgements by its logarithm."""
    place = share * len(run.losses) - 1
    low = max(0, min(len(run.losses) - 1, math.floor(place)))
    high = min(low + 1, len(run.losses) - 1)
    first, last = run.losses[low], run.losses[high]
    if not (math.isfinite(first) and math.isfinite(last)):
        return math.inf
    part = min(max(place - low, 0.0), 1.0)
    return math.exp((1 - part) * math.log(first) + part * math.log(last))


@dataclass(frozen=True)
class Row:
    """A rule on a task.

    Attributes:
        loss: Median over seeds, at the time that the base alone takes for its run.
        ratio: Median over seeds of the quotient of that and the base's loss.
        difference: Mean over seeds of the logarithm of that quotient.
        error: Its standard error.
        time: Of a step, over the base's.
        helper: The accelerator's processor time over the worker's.
    """

    loss: float
    ratio: float
    difference: float
    error: float
    time: float
    helper: float
    applied: int
    epochs: int


def row(task: Task, rule: str, runs: list[Run]) -> Row:
    """A rule at the base's time."""
    floor = {r.seed: r for r in runs if (r.task, r.rule) == (task.name, ALONE)}
    ours = [r for r in runs if (r.task, r.rule) == (task.name, rule)]
    base, own = milliseconds(list(floor.values()), task.steps), milliseconds(ours, task.steps)
    counts = rule in (ALONE, *SHIPPED)
    share = min(1.0, base / own) if counts else 1.0
    losses = [at(r, share) for r in ours]
    logs = [math.log(at(r, share) / at(floor[r.seed], 1.0)) for r in ours]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return Row(
        statistics.median(losses),
        math.exp(statistics.median(logs)),
        statistics.fmean(logs),
        error,
        own / base,
        statistics.median(r.helper_seconds / r.seconds for r in ours),
        sum(r.applied for r in ours),
        sum(r.epochs for r in ours),
    )


def table(every: list[Task], runs: list[Run]) -> Table:
    """A row a task and rule."""
    title = "Training loss at the time that the base takes, medians over the seeds"
    result = Table(title=title)
    headers = (
        "task",
        "rule",
        "loss",
        "to base",
        "mean log",
        "± its error",
        "step",
        "helper",
        "made",
    )
    for header in headers:
        result.add_column(header, justify="left" if header in headers[:2] else "right")
    for task in every:
        for rule in dict.fromkeys(r.rule for r in runs if r.task == task.name):
            of = row(task, rule, runs)
            result.add_row(
                task.name,
                rule,
                f"{of.loss:.4g}",
                f"{of.ratio:.3f}",
                f"{of.difference:+.3f}",
                f"{of.error:.3f}",
                f"{of.time:.2f}",
                f"{of.helper:.2f}",
                f"{of.applied} of {of.epochs}",
            )
    return result


def store(path: Path, runs: list[Run]) -> None:
    """Set "timed" in a JSON file to the runs."""
    machine = f"{platform.machine()}, torch {torch.__version__}, {os.cpu_count()} cores"
    record = json.loads(path.read_text())
    told = [asdict(run) for run in runs]
    for run in told:  # JSON has no endless numbers
        run["losses"] = [loss if math.isfinite(loss) else None for loss in run["losses"]]
    record["timed"] = {"machine": machine, "runs": told}
    path.write_text(json.dumps(record, indent=1))


def main() -> None:
    """Run everything, print the table and add the runs to the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [task.name for task in tasks()]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--scan", action="store_true", help="compare settings, on seeds from 100")
    parser.add_argument("--output", type=Path, help='a JSON file, whose "timed" is set to the runs')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own_group()
    runs: list[Run] = []
    every = [task for task in tasks() if task.name in arguments.only]
    first = 100 if arguments.scan else 0
    seeds = range(first, first + arguments.seeds)
    # What is compared takes turns.
    for seed, task, rule in itertools.product(seeds, every, arguments.rules):
        settings = {**task.settings[ALONE], **task.settings.get(rule, {})}
        for other in task.scan.get(rule, [{}]) if arguments.scan else [{}]:
            run = trained(task, rule, seed, {**settings, **other})
            dist.barrier()
            if run is None:
                continue
            runs.append(run)
            if arguments.scan:
                cost = f"{1000 * run.seconds / task.steps:.2f} ms a step"
                print(task.name, rule, other, *(f"{x:.4g}" for x in run.losses[9::10]), cost)
            elif arguments.output:
                store(arguments.output, runs)
    if dist.get_rank() == 0 and not arguments.scan:
        Console(width=120).print(table(every, runs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

r"""Draw who does what when in a real run of DistKFAC, a worker, its thread and a stats worker.

    OMP_NUM_THREADS=1 PYTHONPATH=examples torchrun --standalone --nproc-per-node=2 \
        docs/figures/make_distkfac_timeline.py

Times are of the wall clock. What threads and messages do is noted by wrapping the package's own
functions: a solve, a snapshot, the sending of statistics and their arrival in a factor.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from digits import batches, load_split
from second_order import DistKFAC
from second_order.kfac import solve_async
from second_order.kfac.solve import Solves
from second_order.kfac.stats_workers import StatsWorker, StatsWorkers

HERE = Path(__file__).parent
BATCH = 512
INTERVAL = 8  # steps between launches
WARM_UP = 48  # steps before those that are shown, at least

# Okabe and Ito's colours.
STEP, LAUNCHING, SOLVE, STATISTICS = "#56B4E9", "#0072B2", "#E69F00", "#009E73"
ADOPTED = "#CC79A7"

Bar = tuple[float, float]  # from, to; seconds on the wall clock


@dataclass
class Record:
    """What a process has done and when.

    Attributes:
        steps: Training steps.
        launches: When snapshots were taken.
        names: Of the layers they are of.
        launch_steps: The steps' numbers.
        solves: In the order of the launches, as there is one thread.
        landings: The step's number, by the layer's name and the step of the snapshot.
        batches: On a stats worker, from the loss to when its statistics are sent.
        adopted: On a worker, when the k-th message entered its factors.
    """

    steps: list[Bar] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    launch_steps: list[int] = field(default_factory=list)
    solves: list[Bar] = field(default_factory=list)
    landings: dict[tuple[str, int], int] = field(default_factory=dict)
    batches: list[Bar] = field(default_factory=list)
    adopted: dict[int, float] = field(default_factory=dict)


def watch(record: Record) -> None:
    """Note what the package does from here on."""
    launched, solve = Solves._launched, solve_async.solve
    deliver, statistics = StatsWorker._deliver, StatsWorkers.statistics

    def noted_launch(me: Any, block: Any) -> Any:
        record.launches.append(time.time())
        record.names.append(block.name)
        record.launch_steps.append(len(record.steps))
        return launched(me, block)

    def noted_solve(*args: Any) -> Any:
        start = time.time()
        found = solve(*args)
        record.solves.append((start, time.time()))
        return found

    def noted_deliver(me: Any) -> None:
        deliver(me)
        record.batches[-1] = record.batches[-1][0], time.time()

    def noted_statistics(me: Any, mine: Any, fed: Any = ()) -> Iterator[Any]:
        for sums in statistics(me, mine, fed):
            record.adopted[me.active[0].heard - 1] = time.time()
            yield sums

    Solves._launched = noted_launch  # type: ignore[method-assign]
    solve_async.solve = noted_solve
    StatsWorker._deliver = noted_deliver  # type: ignore[method-assign]
    StatsWorkers.statistics = noted_statistics  # type: ignore[method-assign]


def network(width: int) -> nn.Sequential:
    """Wide enough that solving takes about as long as a step."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def run(arguments: argparse.Namespace) -> Record:
    """Train; what this process has done and when."""
    record = Record()
    watch(record)
    torch.manual_seed(0)
    data, model = load_split(), network(arguments.width)

    def loss_of(indices: Tensor) -> Tensor:
        return cross_entropy(model(data.train_images[indices]), data.train_labels[indices])

    def noted_loss(indices: Tensor) -> Tensor:
        record.batches.append((time.time(), time.time()))
        return loss_of(indices)

    optimizer = DistKFAC(
        model,
        lr=0.1,
        momentum=0.9,
        stats_workers=1,
        inverse_threads=1,
        solver="eigen",  # whose solves are long beside the steps of so small a network
        inv_update_steps=INTERVAL,
    )
    mine = batches(len(data.train_images), BATCH, seed=dist.get_rank())
    with optimizer:
        if optimizer.role == "stats":
            optimizer.serve(mine, noted_loss)
        else:
            taken: dict[str, int] = {}
            for step in range(arguments.steps):
                start = time.time()
                optimizer.zero_grad()
                loss_of(next(mine)).backward()
                optimizer.step()
                record.steps.append((start, time.time()))
                before, taken = taken, {n: step + 1 - s for n, s in optimizer.staleness.items()}
                for name, snapshot in taken.items():
                    if before.get(name) != snapshot:
                        record.landings[name, snapshot] = step
    return record


def draw(worker: Record, helper: Record, shown: int) -> tuple[Figure, str]:
    """Three rows, time to the right in milliseconds; and what is to be said of them."""
    first = next(s for s in worker.launch_steps if s >= WARM_UP)
    last = min(first + shown, len(worker.steps)) - 1
    origin, end = worker.steps[first][0], worker.steps[last][1]
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    rows = {"training": 1.0, "thread": 2.0, "stats": 0.0}

    def x(when: float) -> float:
        return (when - origin) * 1e3

    def bars(row: str, spans: list[Bar], colour: str) -> None:
        inside = [(max(a, origin), min(b, end)) for a, b in spans if b > origin and a < end]
        axes.broken_barh(
            [(x(a), (b - a) * 1e3) for a, b in inside],
            (rows[row] - 0.22, 0.44),
            facecolors=colour,
            edgecolor="#ffffff",
            linewidth=0.6,
            zorder=3,
        )

    launching = sorted(set(worker.launch_steps))
    bars("training", worker.steps, STEP)
    bars("training", [worker.steps[s] for s in launching], LAUNCHING)
    bars("thread", worker.solves, SOLVE)
    bars("stats", helper.batches, STATISTICS)

    begun: set[int] = set()
    delays, solving = [], []
    for launch, name, step, solve in zip(
        worker.launches, worker.names, worker.launch_steps, worker.solves, strict=False
    ):
        landing = worker.landings.get((name, step))
        if step < first or landing is None or landing > last:
            continue
        delays.append(landing - step)
        solving.append(solve[1] - solve[0])
        if step not in begun:
            arrow(axes, (x(launch), 1.22), (x(solve[0]), 1.78), "#000000")
            begun.add(step)
        landed = sum(worker.steps[landing]) / 2
        arrow(axes, (x(solve[1]), 1.78), (x(landed), 1.22), "#000000")
    ages = []
    for number, when in worker.adopted.items():
        sent = helper.batches[number][1]
        if sent > origin and when < end:
            arrow(axes, (x(sent), 0.22), (x(when), 0.78), ADOPTED)
            ages.append(when - sent)
    axes.set_yticks(
        list(rows.values()),
        ["worker:\ntraining steps", "worker:\ninverse thread", "stats worker:\nbatches"],
    )
    axes.set_ylim(-0.45, 2.4)
    axes.set_xlim(-0.01 * x(end), 1.01 * x(end))
    axes.set_xlabel("milliseconds")
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    labels = {
        STEP: "a training step",
        LAUNCHING: "one that takes snapshots",
        SOLVE: "a layer's inverse",
        STATISTICS: "statistics of a batch",
    }
    handles: list[Any] = [Patch(facecolor=c, label=label) for c, label in labels.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False)
    said = (
        f"steps {first} to {last} in {1e3 * (end - origin):.0f} ms; "
        f"{len(begun)} launches, {len(delays)} solves of {1e3 * min(solving):.1f} to "
        f"{1e3 * max(solving):.1f} ms, landed {min(delays)} to {max(delays)} steps later; "
        f"{len(ages)} statistics, adopted {1e3 * min(ages, default=0):.0f} to "
        f"{1e3 * max(ages, default=0):.0f} ms later"
    )
    return figure, said


def arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], colour: str) -> None:
    """From a bar to another."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            stop,
            arrowstyle="-|>",
            mutation_scale=7,
            shrinkA=0,
            shrinkB=0,
            linewidth=0.9,
            color=colour,
            zorder=4,
        )
    )


def main() -> None:
    """Run, and draw on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--shown", type=int, default=30, help="steps")
    parser.add_argument("--output", type=Path, default=HERE / "distkfac_timeline.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, run(arguments))
    if dist.get_rank() == 0:
        mpl.rcParams.update({"font.size": 9, "legend.fontsize": 8})
        figure, said = draw(everybody[0], everybody[1], arguments.shown)
        print(said)  # noqa: T201
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=160, facecolor="#ffffff")
        Image.open(buffer).convert("RGB").quantize(128).save(arguments.output, optimize=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

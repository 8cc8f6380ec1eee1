"""The grids of the papers in miniature: digits, small networks, steps in place of epochs.

    export PYTHONPATH=examples
    python benchmarks/progress/grids.py                          all of them, some ten minutes
    python benchmarks/progress/grids.py --only damping --seeds 1

damping    damping x interval, KAISA and DPKFAC on four processes (DP-KFAC, figure 13)
processes  DPKFAC on 2, 4 and 8 processes with 8 to 64 images each (DP-KFAC, table 7, figure 10)
solver     Cholesky inverses and eigenvectors by the batch (KAISA, table 4.1; DP-KFAC, table 6)
cost       processor time of both by the size of a factor (DP-KFAC, figure 6)
norm       a deep plain network with batch norm and without (DistKFAC, figure 3)
doubly     a wide Linear doubly factored, with A and G, or left to the base (DistKFAC, figure 4)

lr is 0.1 and momentum 0.9 unless a row says otherwise; all else is default but what a row names. A
loss is that of all training images, looked at every five steps, or at every one in the grid of
processes. Without batch norm, KAISA takes the same steps on several processes as on one with the
whole batch, so that it and SGD run on one; DPKFAC runs on so many processes in truth, over gloo.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

import digits
import second_order

__all__ = ["GRIDS", "Point", "main", "train", "train_on"]

Row = dict[str, Any]
EVERY = 5  # steps between two looks at the loss


@dataclass(frozen=True)
class Point:
    """A training at one point of a grid.

    Attributes:
        network: Name in :data:`NETWORKS`.
        optimizer: "SGD", or the name of a system over it.
        batch: Images in a step, over all processes.
        seed: Of the network and the order of the images.
        steps: Number of steps at most.
        target: Loss on the training images at which it ends.
        lr: The learning rate.
        options: The system's keywords.
        every: Steps between two looks at the loss.
    """

    network: str
    optimizer: str
    batch: int
    seed: int
    steps: int
    target: float
    lr: float = 0.1
    options: Mapping[str, Any] = field(default_factory=dict)
    every: int = EVERY


def plain_network(norm: bool) -> nn.Module:
    """Six convolutions one after the other, 8 to 32 channels, with batch norm or without."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    widths = (1, 8, 8, 16, 16, 32, 32)
    for i, (width_in, width) in enumerate(pairwise(widths)):
        stride = 2 if i in (2, 4) else 1
        conv = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=not norm)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers.append(conv)
        layers += [nn.BatchNorm2d(width), nn.ReLU()] if norm else [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": digits.mlp,
    "conv": digits.conv_net,
    "plain": partial(plain_network, False),
    "plain, batch norm": partial(plain_network, True),
}


def build(point: Point, model: nn.Module) -> Any:
    """The optimizer of a point."""
    if point.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=point.lr, momentum=0.9)
    system = getattr(second_order, point.optimizer)
    return system(model, lr=point.lr, momentum=0.9, **point.options)


def train(point: Point, rank: int = 0, processes: int = 1) -> Row:
    """Train until the target is met: the steps that it took, and losses and accuracies seen.

    Args:
        point: What is trained.
        rank: This process's number.
        processes: Number of processes that share each batch.
    """
    torch.manual_seed(point.seed)
    data, model = digits.load_split(), NETWORKS[point.network]()
    optimizer = build(point, model)
    found: Row = {"steps": None, "losses": [], "accuracies": []}
    order = digits.batches(
        len(data.train_images), point.batch, seed=point.seed, rank=rank, world_size=processes
    )
    for step, indices in zip(range(1, point.steps + 1), order, strict=False):
        optimizer.zero_grad()
        cross_entropy(model(data.train_images[indices]), data.train_labels[indices]).backward()
        optimizer.step()
        if step % point.every == 0:
            model.eval()
            with torch.no_grad():
                loss = cross_entropy(model(data.train_images), data.train_labels).item()
                right = model(data.test_images).argmax(1) == data.test_labels
            model.train()
            found["losses"].append(float(f"{loss:.4g}"))
            found["accuracies"].append(round(right.float().mean().item(), 4))
            if loss <= point.target:
                found["steps"] = step
                break
            if not math.isfinite(loss):
                break
    if isinstance(optimizer, second_order.SecondOrderOptimizer):
        found["bytes"] = optimizer.summary().total_bytes
        optimizer.close()
    return found


def _serve(rank: int, processes: int, place: str, points: Sequence[Point], found: Any) -> None:
    """What a process does: every point, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=processes)
    for point in points:
        row = train(point, rank, processes)
        if rank == 0:
            found.put(row)
    dist.barrier()
    dist.destroy_process_group()


def train_on(processes: int, points: Sequence[Point]) -> list[Row]:
    """Train at points on so many processes of this machine."""
    if processes == 1:
        return [train(point) for point in points]
    context = multiprocessing.get_context("fork")  # to import torch anew costs more than to train
    found = context.SimpleQueue()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, f"{folder}/store", points, found)
        ranks = [context.Process(target=_serve, args=(i, *arguments)) for i in range(processes)]
        for rank in ranks:
            rank.start()
        while len(rows) < len(points):
            if not found.empty():
                rows.append(found.get())
            elif any(rank.exitcode for rank in ranks):
                for rank in ranks:
                    rank.terminate()
                raise RuntimeError("a process of the grid has failed; see above")
            else:
                time.sleep(0.05)
        for rank in ranks:
            rank.join()
    return rows


def run(
    labels: Sequence[Row], points: Callable[[Row], Point], processes: Callable[[Row], int]
) -> list[Row]:
    """Train at all points; those of as many processes together.

    Args:
        labels: What a row says of its point.
        points: The point of a row.
        processes: The processes of a row.
    """
    found: dict[int, Row] = {}
    for count in sorted(set(map(processes, labels))):
        mine = [i for i, label in enumerate(labels) if processes(label) == count]
        rows = train_on(count, [points(labels[i]) for i in mine])
        found |= dict(zip(mine, rows, strict=True))
        print(f"{len(mine)} trainings on {count} processes done", file=sys.stderr, flush=True)
    return [{**label, **found[i]} for i, label in enumerate(labels)]


# ------------------------------------------------------------------------------------------ tables


def median_steps(rows: Sequence[Row]) -> float:
    """Of the seeds; infinite where most never arrive."""
    return statistics.median(math.inf if row["steps"] is None else row["steps"] for row in rows)


def shown(rows: Sequence[Row]) -> str:
    """The median number of steps."""
    middle = median_steps(rows)
    return f"{middle:g}" if math.isfinite(middle) else "never"


def drawn(
    title: str, rows: Sequence[Row], down: str, across: str, cell: Callable[[Sequence[Row]], str]
) -> Table:
    """A table of one entry of the rows against another."""
    result = Table(title=title)
    columns = list(dict.fromkeys(row[across] for row in rows))
    result.add_column(f"{down} \\ {across}")
    for column in columns:
        result.add_column(str(column), justify="right")
    for name in dict.fromkeys(row[down] for row in rows):
        mine = [row for row in rows if row[down] == name]
        cells = [[row for row in mine if row[across] == column] for column in columns]
        result.add_row(str(name), *(cell(of) if of else "" for of in cells))
    return result


# ------------------------------------------------------------------------------------------- grids

DAMPINGS, INTERVALS = (0.1, 0.5, 2.0, 8.0), (1, 10, 50, 100)


def damping(seeds: int) -> list[Row]:
    """Statistics and inverses at every so many steps, from the first one on."""
    labels = [
        {"optimizer": optimizer, "damping": gamma, "interval": every, "seed": seed}
        for optimizer in ("KAISA", "DPKFAC")
        for gamma in DAMPINGS
        for every in INTERVALS
        for seed in range(seeds)
    ]

    def point(row: Row) -> Point:
        options = {
            "damping": row["damping"],
            "factor_update_steps": row["interval"],
            "inv_update_steps": row["interval"],
        }
        return Point("MLP", row["optimizer"], 64, row["seed"], 200, 0.05, options=options)

    return run(labels, point, lambda row: 4 if row["optimizer"] == "DPKFAC" else 1)


def damping_tables(rows: Sequence[Row]) -> list[Table]:
    """One for each optimizer."""
    return [
        drawn(
            f"{name}: median steps to a loss of 0.05",
            [row for row in rows if row["optimizer"] == name],
            "damping",
            "interval",
            shown,
        )
        for name in dict.fromkeys(row["optimizer"] for row in rows)
    ]


PROCESSES, LOCAL = (2, 4, 8), (8, 16, 32, 64)


def processes(seeds: int) -> list[Row]:
    """SGD and KAISA at the same global batches, which depend on the product alone."""
    labels = [
        {"optimizer": "DPKFAC", "processes": count, "local batch": local, "seed": seed}
        for count in PROCESSES
        for local in LOCAL
        for seed in range(seeds)
    ]
    batches = sorted({count * local for count in PROCESSES for local in LOCAL})
    labels += [
        {"optimizer": optimizer, "processes": 1, "local batch": batch, "seed": seed}
        for optimizer in ("SGD", "KAISA")
        for batch in batches
        for seed in range(seeds)
    ]

    def point(row: Row) -> Point:
        batch = row["processes"] * row["local batch"]
        return Point("MLP", row["optimizer"], batch, row["seed"], 200, 0.05, every=1)

    return [
        {**row, "global batch": row["processes"] * row["local batch"]}
        for row in run(labels, point, lambda row: row["processes"])
    ]


def processes_tables(rows: Sequence[Row]) -> list[Table]:
    """By the processes, beside those of the same global batch on one."""
    named = [
        row | {"optimizer": f"DPKFAC, {row['processes']} processes"}
        if row["optimizer"] == "DPKFAC"
        else row
        for row in rows
    ]
    named.sort(key=lambda row: row["global batch"])
    title = "Median steps to a loss of 0.05"
    return [drawn(title, named, "optimizer", "global batch", shown)]


EPOCHS, BATCHES = 15, (64, 256, 718)


def solver(seeds: int) -> list[Row]:
    """The conv net for as many epochs with every batch, as the paper does."""
    labels = [
        {"optimizer": name, "batch": batch, "seed": seed}
        for name in ("SGD", "KAISA, inverse", "KAISA, eigen")
        for batch in BATCHES
        for seed in range(seeds)
    ]

    def point(row: Row) -> Point:
        name, _, kind = row["optimizer"].partition(", ")
        steps = EPOCHS * (1437 // row["batch"])
        options = {"solver": kind} if kind else {}
        return Point("conv", name, row["batch"], row["seed"], steps, 0.0, options=options)

    return run(labels, point, lambda row: 1)


def solver_tables(rows: Sequence[Row]) -> list[Table]:
    """Best accuracies, and losses at the end."""
    return [
        drawn(
            "Best test accuracy, mean of the seeds",
            rows,
            "optimizer",
            "batch",
            lambda of: f"{100 * statistics.fmean(max(row['accuracies']) for row in of):.1f} %",
        ),
        drawn(
            "Training loss at the end, median of the seeds",
            rows,
            "optimizer",
            "batch",
            lambda of: f"{statistics.median(row['losses'][-1] for row in of):.2g}",
        ),
    ]


SIZES = (64, 128, 256, 512, 1024)


def cost(seeds: int) -> list[Row]:
    """Processor seconds of a Cholesky inverse and of eigenvectors, float32, one thread."""
    rows = []
    for size in SIZES:
        x = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(0))
        factor = x.t() @ x / len(x) + 0.1 * torch.eye(size)
        ways: dict[str, Callable[[], Any]] = {
            "inverse": partial(_inverse, factor),
            "eigen": partial(torch.linalg.eigh, factor),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(1 + 2 * seeds):
            for name, way in ways.items():
                start = time.process_time()
                way()
                times[name].append(time.process_time() - start)
        rows += [
            {"solver": name, "rows": size, "seconds": statistics.median(each[1:])}
            for name, each in times.items()
        ]
    return rows


def _inverse(factor: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(factor))


def cost_tables(rows: Sequence[Row]) -> list[Table]:
    """Milliseconds."""
    title = "Processor milliseconds for a factor"
    return [drawn(title, rows, "solver", "rows", lambda of: f"{1000 * of[0]['seconds']:.3g}")]


RATES = (0.03, 0.1, 0.3)


def norm(seeds: int) -> list[Row]:
    """Each at three rates. DistKFAC waits for its inverses, so that a run can be repeated."""
    labels = [
        {"optimizer": optimizer, "lr": lr, "network": network, "seed": seed}
        for network in ("plain", "plain, batch norm")
        for optimizer in ("SGD", "DistKFAC")
        for lr in RATES
        for seed in range(seeds)
    ]

    def point(row: Row) -> Point:
        options = {"async_inverse": False} if row["optimizer"] == "DistKFAC" else {}
        return Point(
            row["network"], row["optimizer"], 64, row["seed"], 200, 0.05, row["lr"], options
        )

    return run(labels, point, lambda row: 1)


def norm_tables(rows: Sequence[Row]) -> list[Table]:
    """Networks against optimizers and their rates."""
    named = [row | {"optimizer": f"{row['optimizer']}, lr {row['lr']:g}"} for row in rows]
    return [drawn("Median steps to a loss of 0.05", named, "network", "optimizer", shown)]


WIDE = "6"  # the conv net's Linear after the flattened feature map: 32 channels at 16 locations
BLOCKS: dict[str, Row] = {
    "A and G": {"doubly_factored": None},
    "doubly factored": {"doubly_factored": {WIDE: (16, 32)}},
    "left to the base": {"doubly_factored": None, "skip_layers": [WIDE]},
}


def doubly(seeds: int) -> list[Row]:
    """DistKFAC on the conv net, whose widest Linear has 512 inputs; SGD beside it."""
    labels = [
        {"layer": name, "seed": seed} for name in (*BLOCKS, "SGD alone") for seed in range(seeds)
    ]

    def point(row: Row) -> Point:
        system = "DistKFAC" if row["layer"] in BLOCKS else "SGD"
        options = {**BLOCKS.get(row["layer"], {}), "async_inverse": False}
        return Point("conv", system, 64, row["seed"], 200, 0.01, options=options)

    return run(labels, point, lambda row: 1)


def doubly_tables(rows: Sequence[Row]) -> list[Table]:
    """Steps, and what is kept."""
    met = [
        {**row, "to": f"loss {target:g}", "steps": steps_to(row, target)}
        for target in (0.05, 0.01)
        for row in rows
    ]
    met += [{**row, "to": "KiB of factors and inverses"} for row in rows if "bytes" in row]

    def cell(of: Sequence[Row]) -> str:
        return shown(of) if "loss" in of[0]["to"] else f"{of[0]['bytes'] / 1024:,.0f}"

    return [drawn("Median steps to a loss", met, "layer", "to", cell)]


def steps_to(row: Row, target: float) -> int | None:
    """Steps to a loss on the way."""
    met = (EVERY * i for i, loss in enumerate(row["losses"], 1) if loss <= target)
    return next(met, None)


GRIDS: dict[str, tuple[Callable[[int], list[Row]], Callable[[Sequence[Row]], list[Table]]]] = {
    "damping": (damping, damping_tables),
    "processes": (processes, processes_tables),
    "solver": (solver, solver_tables),
    "cost": (cost, cost_tables),
    "norm": (norm, norm_tables),
    "doubly": (doubly, doubly_tables),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run grids, print their tables, and put the runs into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="put the grids into this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120)
    record: Row = {}
    if options.json and options.json.exists():
        record = json.loads(options.json.read_text())
    for name in options.only:
        measure, tables = GRIDS[name]
        start = time.process_time()
        rows = measure(options.seeds)
        for table in tables(rows):
            console.print(table)
        print(f"{name}: {time.process_time() - start:.0f} s here", file=sys.stderr, flush=True)
        record |= {"torch": torch.__version__, name: rows}
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            lines = [f" {json.dumps(key)}: {_lines(value)}" for key, value in record.items()]
            options.json.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(value: Any) -> str:
    """A grid as JSON, a line for each run."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"


if __name__ == "__main__":
    main()

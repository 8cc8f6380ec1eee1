"""What a step of DistKFAC costs beside SGD's, and twenty thousand of them.

Times are of blocks of steps that take turns, ratios those of neighbours in time. Three clocks run:

    wall      what a user waits
    thread    processor time of the training thread alone: what is on its path, less its waiting
    process   processor time of all threads: with one that only waits for the other, their sum
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import digits
from curvature_cost import table
from floor import (
    a_by_offsets,
    a_by_one_product,
    captured,
    cholesky_inverse,
    g_by_one_product,
    measure_floor,
)
from measure import Training, of_all, process_group, sgd
from second_order import DistKFAC
from workloads import WORKLOADS, Batch, Workload

Record = dict[str, Any]
Clock = Literal["wall", "thread", "process"]
Intervals = tuple[int, int]

EQUAL: tuple[Intervals, ...] = ((1, 1), (1, 5), (10, 20))
EIGEN: tuple[Intervals, ...] = ((1, 5), (10, 20))
GRID: tuple[Intervals, ...] = ((1, 1), (1, 5), (2, 10), (5, 20), (10, 20), (20, 20))
CHEAP: tuple[Intervals, ...] = ((1, 1), (5, 20), (10, 20))
RESNET: tuple[Intervals, ...] = ((1, 1), (5, 20), (10, 20), (20, 20))  # on ResNet-20
INEXACT: tuple[Intervals, ...] = ((10, 20),)  # normalisations are left to SGD
BESIDE_STATS: tuple[int, ...] = (1, 5, 20)  # inv_update_steps
SETTLE = 0.1  # seconds for what is under way to end before others take their turn


# ----------------------------------------------------------------------------------- the workloads


@dataclass(frozen=True)
class Pictures(Workload):
    """Digits: what the classifiers train on."""

    def batch(self, rank: int = 0) -> Batch:
        data, size = digits.load_split(), self.inputs[0]
        part = slice(rank * size, (rank + 1) * size)
        return data.train_images[part], data.train_labels[part]


@dataclass(frozen=True)
class Reconstruction(Workload):
    """Digits: what the autoencoder trains on."""

    def batch(self, rank: int = 0) -> Batch:
        images = digits.autoencoder_images()[: self.inputs[0]]
        return images, images

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return digits.autoencoder_loss(model(batch[0]), batch[1])


SMALL: dict[str, Workload] = {
    "conv": Pictures("digits conv", digits.conv_net, (64, 64)),
    "autoencoder": Reconstruction("digits autoencoder", digits.autoencoder, (256, 64)),
}


def distkfac(model: nn.Module, **options: Any) -> DistKFAC:
    """One thread to solve, and intervals as they are given from the first step on."""
    keywords: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "inverse_threads": 1}
    return DistKFAC(model, **{**keywords, **options})


def first_only(step: int) -> int:
    """An interval that falls due on step 0 and never again."""
    return step + 1


def at(intervals: Intervals, **options: Any) -> Callable[[nn.Module], DistKFAC]:
    factors, inverses = intervals
    own: dict[str, Any] = {"factor_update_steps": factors, "inv_update_steps": inverses}
    return partial(distkfac, **own, **options)


def preconditioned(**options: Any) -> Callable[[nn.Module], DistKFAC]:
    """Neither statistics nor solves after the first step."""
    return partial(distkfac, factor_update_steps=first_only, inv_update_steps=first_only, **options)


# --------------------------------------------------------------------------------------- the clocks


@dataclass
class Pace:
    """Milliseconds a step, a figure for each block."""

    wall: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)

    def add(self, training: Training, steps: int) -> None:
        """Time a block of steps."""
        clocks = (time.perf_counter, time.thread_time, time.process_time)
        start = [clock() for clock in clocks]
        for _ in range(steps):
            training.step()
        passed = [
            1000 * (clock() - then) / steps for clock, then in zip(clocks, start, strict=True)
        ]
        for times, each in zip((self.wall, self.thread, self.process), passed, strict=True):
            times.append(each)

    @property
    def medians(self) -> dict[str, float]:
        """By clock."""
        return {clock: statistics.median(times) for clock, times in vars(self).items()}

    def over(self, other: Pace) -> dict[str, float]:
        """Median ratio of blocks that were neighbours, by clock."""
        return {
            clock: statistics.median(a / b for a, b in zip(times, vars(other)[clock], strict=True))
            for clock, times in vars(self).items()
        }

    def path(self, other: Pace) -> float:
        """CPU time of all threads over that of the other's training thread, as `over`.

        Of one whose threads wait for each other to one whose do not: wall over wall, if both had
        cores to themselves.
        """
        return statistics.median(a / b for a, b in zip(self.process, other.thread, strict=True))


def in_turn(trainings: Mapping[str, Training], steps: int, rounds: int) -> dict[str, Pace]:
    """Blocks of steps of each, after one that warms up."""
    paces = {name: Pace() for name in trainings}
    for training in trainings.values():
        for _ in range(max(3, steps // 4)):
            training.step()
    for _ in range(rounds):
        for name, training in trainings.items():
            paces[name].add(training, steps)
            time.sleep(SETTLE)
    for training in trainings.values():
        training.require_finite()
    return paces


def alternate(
    base: Training, alone: Pace, ours: Training, beside: Pace, steps: int, part: int = 5
) -> None:
    """A block of steps of both, in parts that take turns: the pace changes within a minute."""
    parts = Pace(), Pace()
    for _ in range(steps // part):
        for pace, training in zip(parts, (base, ours), strict=True):
            pace.add(training, part)
    for pace, found in zip((alone, beside), parts, strict=True):
        for clock, times in vars(found).items():
            vars(pace)[clock].append(statistics.fmean(times))


def staleness(optimizer: DistKFAC) -> float:
    """Steps that the last solves were under way, the mean over layers."""
    return statistics.fmean(optimizer.delays.values())


# ------------------------------------------------------------------------- async against sync: time


def pace(name: str, steps: int, rounds: int) -> list[Record]:
    """Async and sync steps of a small network beside SGD's, at equal intervals."""
    workload = SMALL[name]
    floors = measure_floor(workload)
    records = []
    for solver, intervals in (*(("inverse", i) for i in EQUAL), *(("eigen", i) for i in EIGEN)):
        trainings = {
            "sgd": Training(workload, sgd),
            "precondition": Training(workload, preconditioned(solver=solver)),
            "sync": Training(workload, at(intervals, solver=solver, async_inverse=False)),
            "async": Training(workload, at(intervals, solver=solver)),
        }
        paces = in_turn(trainings, steps, rounds)
        factors, inverses = intervals
        solve = floors["eigh" if solver == "eigen" else "cholesky"] / inverses
        bare = floors["sgd"] + floors[f"precondition_{solver}"] + floors["statistics"] / factors
        records.append(
            {
                "model": name,
                "solver": solver,
                "intervals": intervals,
                "milliseconds": {kind: each.medians for kind, each in paces.items()},
                "sync to async": paces["sync"].over(paces["async"]),
                "cpu ratio": paces["sync"].path(paces["async"]),
                "floor": {
                    "sync": bare + solve,
                    "async": bare,
                    "ratio": 1 + solve / bare,
                },
                "delay": staleness(trainings["async"].optimizer),
            }
        )
        for kind in ("precondition", "sync", "async"):
            trainings[kind].optimizer.close()
    return records


def pace_table(records: Sequence[Record]) -> Table:
    result = table(
        "Milliseconds a step (floor: bare calls); asked: sync / async at least 1.3",
        (
            "model",
            "solver",
            "intervals",
            "SGD",
            "precondition",
            "sync",
            "async",
            "sync / async",
            "by CPU time",
            "floor",
            "delay",
        ),
    )
    for record in records:
        ms, floor = record["milliseconds"], record["floor"]
        result.add_row(
            record["model"],
            record["solver"],
            "{} / {}".format(*record["intervals"]),
            *(f"{ms[kind]['wall']:.2f}" for kind in ("sgd", "precondition")),
            *(f"{ms[kind]['wall']:.2f} ({floor[kind]:.2f})" for kind in ("sync", "async")),
            f"{record['sync to async']['wall']:.2f}",
            f"{record['cpu ratio']:.2f}",
            f"{floor['ratio']:.2f}",
            f"{record['delay']:.1f}",
        )
    return result


# ----------------------------------------------------------------------------- against SGD: time


def bare_solves(workload: Workload) -> Callable[[], None]:
    """One Cholesky inverse of a matrix of each size that the model's factors have."""
    sizes = []
    for layer in captured(workload):
        a, g = a_by_one_product(layer), g_by_one_product(layer)
        sizes += [len(a), len(g)]
    matrices = [torch.eye(size) for size in sizes]

    @torch.no_grad()
    def solve() -> None:
        for matrix in matrices:
            cholesky_inverse(matrix)

    return solve


@contextmanager
def on_the_other_core(work: Callable[[], None]) -> Iterator[None]:
    """A thread that does some work over and over."""
    ending = threading.Event()

    def loop() -> None:
        torch.set_num_threads(1)
        while not ending.is_set():
            work()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def resnet(steps: int, rounds: int) -> Record:
    """ResNet-20 over some intervals, each in turn with SGD.

    "beside" is SGD while another thread solves without end: what the two cores cost each other.
    """
    workload = WORKLOADS["resnet20"]
    ways = {
        "precondition": preconditioned(),
        **{f"kfc {f} / {i}": at((f, i)) for f, i in RESNET},
        **{f"inexact {f} / {i}": at((f, i), exact_blocks=False) for f, i in INEXACT},
        **{f"cheap {f} / {i}": at((f, i), conv_factors="cheap") for f, i in INEXACT},
    }
    base = Training(workload, sgd)
    trainings = {name: Training(workload, make) for name, make in ways.items()}
    alone = {name: Pace() for name in (*trainings, "beside")}
    paces = {name: Pace() for name in (*trainings, "beside")}
    for training in (base, *trainings.values()):
        for _ in range(3):
            training.step()
    solve = bare_solves(workload)
    for _ in range(rounds):
        for name, training in trainings.items():
            alternate(base, alone[name], training, paces[name], steps)
        alone["beside"].add(base, steps // 2)
        with on_the_other_core(solve):
            paces["beside"].add(base, steps // 2)
    for training in trainings.values():
        training.require_finite()
    rows = [
        {
            "what": name,
            "milliseconds": each.medians,
            "sgd": alone[name].medians,
            "to sgd": each.over(alone[name]),
            "delay": staleness(trainings[name].optimizer) if " / " in name else None,
        }
        for name, each in paces.items()
    ]
    return {"rows": rows, "floors": measure_floor(workload)}


def floor_of(floors: Mapping[str, float], factors: float) -> float:
    """SGD's step, bare products, and bare statistics every so many steps, over SGD's step."""
    taken = floors["precondition_inverse"] + floors["statistics"] / factors
    return 1 + taken / floors["sgd"]


def resnet_table(record: Record) -> Table:
    floors = record["floors"]
    result = table(
        "ResNet-20, a step over SGD's; asked: at most 1.15. Floor: SGD and bare products "
        f"{floor_of(floors, float('inf')):.3f}, and bare statistics",
        (
            "factors / inverses every",
            "SGD ms",
            "ms",
            "to SGD",
            "training thread's CPU",
            "floor",
            "delay",
        ),
    )
    for row in record["rows"]:
        kind, _, intervals = row["what"].partition(" ")
        floor = ""
        if kind in ("kfc", "inexact"):
            floor = f"{floor_of(floors, float(intervals.split(' / ')[0])):.3f}"
        elif kind == "precondition":
            floor = f"{floor_of(floors, float('inf')):.3f}"
        result.add_row(
            NAMES.get(row["what"], row["what"]),
            *(f"{row[which]['wall']:.1f}" for which in ("sgd", "milliseconds")),
            *(f"{row['to sgd'][clock]:.3f}" for clock in ("wall", "thread")),
            floor,
            f"{row['delay']:.1f}" if row.get("delay") is not None else "",
        )
    return result


NAMES = {
    "beside": "SGD, the other core busy",
    "precondition": "neither, ever",
    "inexact 10 / 20": "kfc 10 / 20, BatchNorm left to SGD",
}


# ---------------------------------------------------------------------------------- a stats worker


def bare_statistics(workload: Workload) -> None:
    """A pass of the model, and A and G of all layers, as bare library calls."""
    for layer in captured(workload):
        (a_by_offsets if layer.autocorrelates else a_by_one_product)(layer)
        g_by_one_product(layer)


def stats_worker(steps: int, rounds: int) -> Record:
    """One process that trains and one that computes statistics, on ResNet-20.

    "beside" is SGD while the other process computes statistics without end and talks to nobody.
    """
    workload = WORKLOADS["resnet20"]
    base = Training(workload, sgd)
    rows: list[Record] = []
    trains = dist.get_rank() == 0
    alone, beside = Pace(), Pace()
    for turn in range(rounds + 1):
        dist.barrier()
        if trains and turn:
            alone.add(base, steps)
        elif trains:
            base.step()
        seconds = torch.tensor(alone.medians["wall"] * steps / 1000 if trains and turn else 0.1)
        dist.broadcast(seconds, 0)
        until = time.perf_counter() + 1.5 * seconds.item()
        if trains and turn:
            beside.add(base, steps)
        while not trains and time.perf_counter() < until:
            bare_statistics(workload)
    if trains:
        rows.append(
            {"what": "beside", "milliseconds": beside.medians, "to sgd": beside.over(alone)}
        )
    for inverses in BESIDE_STATS:
        ours = Training(workload, at((10**6, inverses), stats_workers=1, helper_timeout=120.0))
        optimizer: DistKFAC = ours.optimizer
        sent = 0
        with optimizer:
            if trains:
                warm = 0
                while optimizer.role == "worker" and warm < steps:
                    ours.step()
                    warm += 1
                paces = in_turn({"sgd": base, "async": ours}, steps, rounds)
                delay = staleness(optimizer)
            else:
                sent = optimizer.serve([ours.batch], partial(workload.loss, ours.model))
        count = torch.tensor(float(sent))
        dist.all_reduce(count)
        if trains:
            row: Record = {
                "what": f"every {inverses}",
                "milliseconds": paces["async"].medians,
                "to sgd": paces["async"].over(paces["sgd"]),
                "delay": delay,
                "steps a statistic": ours.steps / max(count.item(), 1.0),
            }
            rows.append(row)
    return {"rows": rows, "floors": measure_floor(workload) if trains else {}}


def stats_worker_table(record: Record) -> Table:
    bare = floor_of(record["floors"], float("inf"))
    result = table(
        "ResNet-20 with a stats worker, a step over SGD's alone; asked: at most 1.15. "
        f"Floor: SGD and bare products {bare:.3f}",
        ("inverses", "ms", "to SGD", "training thread's CPU", "delay", "steps a statistic"),
    )
    for row in record["rows"]:
        result.add_row(
            NAMES.get(row["what"], row["what"]),
            f"{row['milliseconds']['wall']:.1f}",
            *(f"{row['to sgd'][clock]:.3f}" for clock in ("wall", "thread")),
            f"{row['delay']:.1f}" if "delay" in row else "",
            f"{row['steps a statistic']:.1f}" if "steps a statistic" in row else "",
        )
    return result


# --------------------------------------------------------------------------------- a long training


def resident() -> float:
    """Megabytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass
class Mean:
    """Of numbers that are not kept: what grows here would show in the memory."""

    total: float = 0.0
    count: int = 0
    most: float = 0.0

    def add(self, numbers: Collection[int]) -> None:
        self.total += sum(numbers)
        self.count += len(numbers)
        self.most = max(self.most, *numbers)

    def __str__(self) -> str:
        return f"{self.total / self.count:.2f} ({self.most:g})"


def long_run(steps: int, every: int = 1000) -> Record:
    """A small network, statistics and solves at every step: memory, delays, equality of ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    data = digits.load_split()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10))
    noise = torch.Generator().manual_seed(rank)
    order = digits.batches(len(data.train_images), 64, seed=0, rank=rank, world_size=world)
    megabytes: list[float] = []
    delays, ages = Mean(), Mean()
    optimizer = distkfac(model, lr=0.03, factor_update_steps=1, inv_update_steps=1)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        indices = next(order)
        x = data.train_images[indices]
        x = x + 0.5 * torch.randn(x.shape, generator=noise)  # never learnt by heart
        optimizer.zero_grad()
        loss = cross_entropy(model(x), data.train_labels[indices])
        loss.backward()
        optimizer.step()
        delays.add(optimizer.delays.values())
        ages.add(optimizer.staleness.values())
        if step % every == 0:
            megabytes.append(resident())
    seconds = time.perf_counter() - start
    optimizer.close()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    low, high = flat.clone(), flat.clone()
    if dist.is_initialized():
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
    return {
        "processes": world,
        "steps": steps,
        "milliseconds": 1000 * seconds / steps,
        "loss": loss.item(),
        "every": every,
        "megabytes": of_all(megabytes),
        "equal": bool((low == high).all() and flat.isfinite().all()),
        "delay": str(delays),
        "staleness": str(ages),
    }


def long_table(records: Sequence[Record]) -> Table:
    result = table(
        "Resident MB, statistics and solves every step; asked: flat, and parameters equal",
        ("process", "after", "half-way", "end", "least–most since", "equal", "delay", "staleness"),
    )
    for record in records:
        for rank, megabytes in enumerate(record["megabytes"]):
            first, *later = megabytes
            result.add_row(
                f"{rank + 1} of {record['processes']}",
                f"{first:.1f} at {record['every']:,}",
                f"{megabytes[len(megabytes) // 2 - 1]:.1f}",
                f"{megabytes[-1]:.1f} at {record['steps']:,}",
                f"{min(later or megabytes):.1f}–{max(later or megabytes):.1f}",
                "yes" if record["equal"] else "NO",
                record["delay"],
                record["staleness"],
            )
    return result


# ----------------------------------------------------------------------- processes started for it


def spawned(part: str, processes: int, amount: int, rounds: int) -> Record:
    """A part of the benchmark in processes of its own.

    Raises:
        RuntimeError: With what the processes wrote, if one fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), __file__]
        command += [part, str(amount), str(rounds), str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not output.exists():
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        result: Record = json.loads(output.read_text())
    return result


def work(part: str, amount: int, rounds: int, output: Path) -> None:
    """One of the processes of `spawned`."""
    torch.set_num_threads(1)
    with process_group("cpu") as rank:
        result = long_run(amount) if part == "long" else stats_worker(amount, rounds)
    if rank == 0:
        output.write_text(json.dumps(result))


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))

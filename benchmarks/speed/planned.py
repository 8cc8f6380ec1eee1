"""Plans beside what comes true: stage times, bytes and memory of six models, on 1 and 2 ranks.

    python benchmarks/speed/planned.py                       some minutes on an idle machine
    python benchmarks/speed/planned.py --models mlp --clock processor --processes 1

The machine and the links between the processes are measured first, and the passes of each model:
none of the times of second order that are compared. Statistics and refreshes come at every step.
Each rank's stages are medians over steps, or with --of fastest, where others use the machine, the
least; of the ranks the slowest counts, as in a plan. Bytes and
kept memory are not times, and have to be equal.

Under "elsewhere" in the optimizer's accounts are forward and backward, the plan's "passes".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import second_order
from measure import of_all
from second_order.planning.choices import Choice
from second_order.planning.times import step_times
from workloads import ResNet, Transformer

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "processor": time.process_time,
}
WARM_UP = 3
LARGE = 0.05  # of a step: stages below are too short to be judged by a ratio
TOLERANCE = 0.3


class Tokens(nn.Module):
    """An embedding, the mean over tokens, and two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 96)
        self.hidden, self.head = nn.Linear(96, 192), nn.Linear(192, 50)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embedding(x)).mean(1)))
        return logits


def mlp() -> nn.Module:
    """256-512-512-10."""
    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def convolutions() -> nn.Module:
    """Three convolutions and a Linear."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def autoencoder() -> nn.Module:
    """784-256-64-256-784."""
    sizes = (784, 256, 64, 256, 784)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Model:
    """A model, and the shape and kind of its inputs."""

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    tokens: bool = False
    classes: int = 10

    def batches(self, count: int, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Batches of random numbers; every rank has its own."""
        random = torch.Generator().manual_seed(rank + 1)
        found = []
        for _ in range(count):
            x = torch.randn(self.inputs, generator=random)
            if self.tokens:
                x = torch.randint(1000, self.inputs, generator=random)
            found.append((x, torch.randint(self.classes, self.inputs[:1], generator=random)))
        return found


MODELS = {
    "mlp": Model(mlp, (128, 256)),
    "convolutions": Model(convolutions, (64, 3, 16, 16)),
    "transformer": Model(partial(Transformer, 2, 128, 4, 256), (16, 32, 128)),
    "tokens": Model(Tokens, (64, 20), tokens=True, classes=50),
    "resnet": Model(partial(ResNet, (16, 32, 64), (1, 1, 1)), (32, 3, 32, 32)),
    "autoencoder": Model(autoencoder, (64, 784), classes=784),
}


@dataclass(frozen=True)
class How:
    """How steps are measured: their number, the clock, and which of them counts."""

    steps: int
    clock: str
    of: str


def measured(
    model: Model, choice: Choice, how: How
) -> tuple[dict[str, float], dict[str, float], int]:
    """Seconds and bytes by stage of this rank, and the bytes that it keeps."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    net = model.build()
    system = getattr(second_order, choice.system)
    optimizer = system(net, lr=1e-3, momentum=0.9, **choice.keywords)
    meter = optimizer._training.meter
    meter.now = CLOCKS[how.clock]
    meter.lap()
    seconds: dict[str, list[float]] = {}
    found: dict[str, float] = {}
    for step, (x, y) in enumerate(model.batches(WARM_UP + how.steps, rank)):
        if dist.is_initialized():
            dist.barrier()
        meter.lap()
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        found = optimizer.statistics()
        if step >= WARM_UP:
            for name, value in found.items():
                if name.startswith("seconds/"):
                    seconds.setdefault(name.removeprefix("seconds/"), []).append(value)
    sent = {k.removeprefix("bytes/"): v for k, v in found.items() if k.startswith("bytes/")}
    summary = optimizer.summary()
    optimizer.close()
    of = statistics.median if how.of == "median" else min
    usual = {name: float(of(values)) for name, values in seconds.items()}
    usual["passes"] = usual.pop("elsewhere")
    return usual, sent, summary.factor_bytes + summary.inverse_bytes


def compared(name: str, choice: Choice, how: How) -> dict[str, Any]:
    """A setting's stages, bytes and memory, foretold and found."""
    everyone = of_all(measured(MODELS[name], choice, how))
    times = step_times(choice.ranks)
    stages = {}
    for stage, seconds in times.due.items():
        stages[stage] = [seconds, max(each[0].get(stage, 0.0) for each in everyone)]
    # A rank that waits for another has the wait among its messages: stages cannot be added up.
    found = max(sum(each[0].values()) for each in everyone)
    totals = [sum(seconds for seconds, _ in stages.values()), found]
    foretold_bytes, foretold_memory = [], []
    for rank in range(len(everyone)):
        work = next(c.work for c in choice.ranks if c.work.rank == rank)
        handed = {t.stage: work.handed(t.stage) for t in work.transfers}
        foretold_bytes.append(handed)
        foretold_memory.append(work.nbytes("factors", "inverses"))
    found_bytes = [{k: int(v) for k, v in each[1].items() if v} for each in everyone]
    return {
        "model": name,
        "setting": choice.name,
        "processes": len(everyone),
        "stages": stages,
        "step": totals,
        "bytes": [foretold_bytes, found_bytes],
        "memory": [foretold_memory, [each[2] for each in everyone]],
    }


def work(names: Sequence[str], solvers: Sequence[str], how: How) -> list[Any]:
    """All comparisons with the processes that there are."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if processes > 1:
        dist.init_process_group("gloo")
    now = CLOCKS[how.clock]
    sizes = (64, 96, 128, 192, 256, 512)  # usual ones; those of the six models are others
    machine, network = second_order.calibrate("cpu", seconds=10.0, sizes=sizes, clock=now)
    found = []
    for name in names:
        model = MODELS[name]
        torch.manual_seed(0)
        plan = second_order.plan(
            model.build(),
            model.batches(1, 0)[0][:1],
            processes,
            machine=machine,
            network=network,
            measure=True,
            systems=["KAISA", "DPKFAC"] if processes > 1 else ["KAISA"],
            solvers=solvers,
            intervals=[(1, 1)],
            clock=now,
        )
        wanted = ("COMM-OPT", "MEM-OPT", "")
        choices = [c for c in plan.choices if c.setting in wanted]
        for choice in sorted(choices, key=lambda c: c.name):
            found.append(compared(name, choice, how))
            if rank == 0:
                print(said(found[-1]), flush=True)
    if processes > 1:
        dist.destroy_process_group()
    return found


def said(row: dict[str, Any]) -> str:
    """A comparison in lines."""
    foretold, found = row["step"]
    title = f"{row['model']}, {row['setting']}, {row['processes']} process(es): "
    lines = [f"{title}{1e3 * foretold:.2f} ms foretold, {1e3 * found:.2f} ms found"]
    for stage, (s, t) in row["stages"].items():
        ratio = f"{s / t:.2f}" if t else ""
        lines.append(f"    {stage:22} {1e3 * s:9.3f} {1e3 * t:9.3f} {ratio:>6}")
    lines += [
        f"    {what} differ: {row[what][0]} foretold, {row[what][1]} found"
        for what in ("bytes", "memory")
        if not equal(row, what)
    ]
    return "\n".join(lines)


def equal(row: dict[str, Any], what: str) -> bool:
    """Whether bytes or memory are as foretold, on every rank."""
    foretold, found = row[what]
    if what == "bytes":
        foretold = [{k: v for k, v in each.items() if v} for each in foretold]
    return bool(foretold == found)


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many of the predictions hold."""
    large = [
        (s / t) for row in rows for s, t in row["stages"].values() if t > LARGE * row["step"][1]
    ]
    steps = [row["step"][0] / row["step"][1] for row in rows]
    return {
        "steps": len(steps),
        "steps_within": sum(abs(r - 1) <= TOLERANCE for r in steps),
        "worst_steps": [min(steps), max(steps)],
        "stages": len(large),
        "stages_within": sum(abs(r - 1) <= TOLERANCE for r in large),
        "worst_stages": [min(large), max(large)],
        "bytes_equal": sum(equal(row, "bytes") for row in rows),
        "memory_equal": sum(equal(row, "memory") for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--solvers", nargs="+", default=["inverse", "eigen"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=9, help="that are measured, of each setting")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--of", choices=["median", "fastest"], default="median")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", second_order.SecondOrderWarning)
    if chosen.worker is not None:
        how = How(chosen.steps, chosen.clock, chosen.of)
        rows = work(chosen.models, chosen.solvers, how)
        if int(os.environ.get("RANK", "0")) == 0:
            chosen.worker.write_text(json.dumps(rows), "utf-8")
        return
    rows = []
    words = ["--models", *chosen.models, "--solvers", *chosen.solvers]
    words += ["--steps", str(chosen.steps), "--clock", chosen.clock, "--of", chosen.of]
    for processes in chosen.processes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            run = ["--standalone", f"--nproc-per-node={processes}"]
            command = [sys.executable, "-m", "torch.distributed.run", *run]
            command = command if processes > 1 else [sys.executable]
            subprocess.run([*command, __file__, *words, "--worker", str(path)], check=True)
            rows += json.loads(path.read_text("utf-8"))
    found = verdict(rows)
    for name, value in found.items():
        print(f"{name:14} {value}")
    if chosen.json is not None:
        about = {"torch": torch.__version__, "clock": chosen.clock, "of": chosen.of}
        about |= {"large_stage": LARGE, "tolerance": TOLERANCE}
        chosen.json.write_text(json.dumps({**about, **found, "rows": rows}, indent=1), "utf-8")


if __name__ == "__main__":
    main()

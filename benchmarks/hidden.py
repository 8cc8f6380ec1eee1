"""Whether accelerators hide the curvature: a worker's time for a step, beside its base alone.

    PYTHONPATH=examples torchrun --standalone --nproc-per-node=2 benchmarks/hidden.py

One worker and one accelerator, a thread each. The worker takes turns: an epoch of SGD alone, an
epoch of MRDHO2 with its final update and all that it waits for. Asked: at most 1.05 times the base.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import digits
from second_order import MRDHO2
from workloads import WORKLOADS

ASKED = 1.05


def digits_conv() -> tuple[nn.Module, Tensor, Tensor]:
    data = digits.load_split()
    return digits.conv_net(), data.train_images[:256], data.train_labels[:256]


def workload(name: str) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        chosen = WORKLOADS[name]
        x, y = chosen.batch()
        return chosen.model(), x, y

    return make


TASKS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor, Tensor]], int]] = {
    "digits conv, batch 256": (digits_conv, 100),
    "mlp, 2.1 M parameters, batch 128": (workload("mlp"), 200),
    "resnet20, batch 64": (workload("resnet20"), 60),
}


def epoch(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, steps: int) -> float:
    """Milliseconds a step."""
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return 1000 * (time.perf_counter() - start) / steps


def measure(name: str, update: str, epochs: int) -> dict[str, Any] | None:
    """On the worker its times; None on the accelerator."""
    make, steps = TASKS[name]
    torch.manual_seed(0)
    model, x, y = make()
    options: dict[str, Any] = {"final_update": update, "epoch_steps": steps, "lr": 1e-3}
    optimizer = MRDHO2(model, momentum=0.9, gradient_averaging=False, **options)
    with optimizer:
        if optimizer.role == "accelerator":
            optimizer.serve([None], lambda _: cross_entropy(model(x), y))
            return None
        other, _, _ = make()
        base = SGD(other.parameters(), lr=1e-3, momentum=0.9)
        epoch(other, base, x, y, min(steps, 10))
        alone, helped = [], []
        for _ in range(epochs):
            alone.append(epoch(other, base, x, y, steps))
            helped.append(epoch(model, optimizer, x, y, steps))
        return {
            "task": name,
            "update": update,
            "epoch_steps": steps,
            "alone": statistics.median(alone),
            "helped": statistics.median(helped),
            "ratio": statistics.median(b / a for a, b in zip(alone, helped, strict=True)),
            "waited": statistics.median(report.waited for report in optimizer.epochs),
            "products": statistics.median(report.products for report in optimizer.epochs),
            "applied": sum(report.applied for report in optimizer.epochs),
            "epochs": epochs,
        }


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title=f"A worker's step, beside SGD alone; asked: at most {ASKED}")
    for header in ("task", "update", "E", "SGD ms", "MRDHO2 ms", "ratio", "waited s", "products"):
        result.add_column(header, justify="left" if header in ("task", "update") else "right")
    for row in rows:
        result.add_row(
            row["task"],
            row["update"],
            str(row["epoch_steps"]),
            f"{row['alone']:.2f}",
            f"{row['helped']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['waited']:.3f}",
            f"{row['products']:.0f}",
        )
    return result


def main() -> None:
    """Measure, print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--updates", nargs="+", default=["guarded", "paper"])
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name in arguments.only:
        for update in arguments.updates:
            row = measure(name, update, arguments.epochs)
            dist.barrier()
            if row is not None:
                rows.append(row)
    if dist.get_rank() == 0:
        Console().print(table(rows))
        if arguments.json:
            machine = f"{platform.machine()}, torch {torch.__version__}, {os.cpu_count()} cores"
            arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

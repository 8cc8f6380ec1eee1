"""Fifty thousand steps of every optimizer: does memory grow, or a step's time?

    python tests/faults/soak.py --json benchmarks/results/soak.json

Each optimizer trains a tiny model in a process of its own. Refreshes come at their usual intervals
or more often. The run is cut in ten windows; of each are kept resident memory, how many Python
objects, tensors, threads and file descriptors there are at its end, and the median step.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

Window: TypeAlias = dict[str, float]

WINDOWS = 10
FEATURES = 6
CLASSES = 3
EXAMPLES = 8
COUNTED = ("megabytes", "objects", "tensors", "threads", "files")

KFAC: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
FOSI: dict[str, Any] = {**KFAC, "num_largest": 2}
SYSTEMS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "KAISA": (KAISA, KFAC),
    "DPKFAC": (DPKFAC, KFAC),
    "DistKFAC": (DistKFAC, {**KFAC, "inverse_threads": 1}),
    "DHO2": (DHO2, {**FOSI, "curvature_interval": 50}),
    "MRDHO2": (MRDHO2, {**FOSI, "epoch_steps": 50}),
}


def measured(window: Sequence[float], seconds: float) -> Window:
    """What there is at the end of a window of steps."""
    gc.collect()
    objects = gc.get_objects()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "megabytes": round(resident / 2**20, 2),
        "objects": len(objects),
        "tensors": sum(isinstance(each, Tensor) for each in objects),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - one of them is the list's own
        "milliseconds": round(1e3 * statistics.median(window), 4),
        "processor_milliseconds": round(1e3 * seconds / len(window), 4),
    }


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    drawn = [torch.randn(EXAMPLES, FEATURES, generator=generator) for _ in range(16)]
    return [(x, (x @ teacher).argmax(1)) for x in drawn]


def train(system: str, steps: int, report: Callable[[Window], None] | None = None) -> list[Window]:
    """Train, and measure at the end of each of ten windows.

    Args:
        system: A key of ``SYSTEMS``.
        steps: The number of steps, warm-up included.
        report: Called with each window.
    """
    kind, options = SYSTEMS[system]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    optimizer = kind(model, **options)
    data = batches()
    windows = []
    x, y = data[0]
    if hasattr(optimizer, "curvature_closure"):
        optimizer.curvature_closure = lambda: cross_entropy(model(x), y)
    for first in range(0, steps, steps // WINDOWS):
        times = []
        processor = time.process_time()
        for step in range(first, first + steps // WINDOWS):
            started = time.thread_time()
            inputs, labels = data[step % len(data)]
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            times.append(time.thread_time() - started)
        windows.append(measured(times, time.process_time() - processor))
        if report is not None:
            report(windows[-1])
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    optimizer.close()
    return windows


def growth(windows: Sequence[Window], name: str) -> float:
    """The last window over the second, the first after everything has warmed up; 1.0 is flat."""
    return windows[-1][name] / windows[1][name]


def table(runs: dict[str, list[Window]]) -> str:
    """In Markdown: the second window and the last of each optimizer."""
    lines = [
        "| optimizer | resident, MB | Python objects | tensors | threads | files | "
        "median step, ms of processor |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, windows in runs.items():
        second = windows[1]
        last = windows[-1]
        cells = [f"{second['megabytes']:.1f} → {last['megabytes']:.1f}"]
        cells += [f"{second[name]:,.0f} → {last[name]:,.0f}" for name in COUNTED[1:]]
        cells.append(f"{second['milliseconds']:.2f} → {last['milliseconds']:.2f}")
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _send(system: str, steps: int, line: Any) -> None:
    def report(window: Window) -> None:
        print(f"{system}: {window}, {threading.active_count()} Python threads", flush=True)

    line.send(train(system, steps, report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--only", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="where to write the windows")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    about = {"machine": platform.machine(), "torch": torch.__version__, "steps": arguments.steps}
    runs: dict[str, list[Window]] = {}
    if arguments.json and arguments.json.exists():
        runs = json.loads(arguments.json.read_text())["runs"]
    for system in arguments.only:
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_send, args=(system, arguments.steps, child_end))
        process.start()
        child_end.close()
        runs[system] = parent_end.recv()
        process.join()
        if arguments.json:
            arguments.json.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

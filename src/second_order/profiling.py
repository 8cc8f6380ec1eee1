"""Where a step's time goes: ``python -m second_order profile train.py``.

The script runs as it would alone, and the meter of its first second-order optimizer tells the time
of each step by stage; ``backward`` is a stage, too. What is left is forward, batches and everything
else. On a device each stage ends when its work there has ended. Figure 8 of DP-KFAC (Zhang et al.
2022) is a picture of such numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from second_order.files import replacing
from second_order.report import aligned
from second_order.stages import ELSEWHERE, PAPER_NAMES

__all__ = ["Recorder", "add_command", "table_of"]

NAMES_THERE = {ELSEWHERE: "FF", **PAPER_NAMES}
"""The accounts in the order of a step, as papers call them."""


class Recorder:
    """Milliseconds by stage of ``count`` steps of a script's first optimizer, after ``skip``.

    Attributes:
        optimizer: The optimizer, once it has taken a step.
        taken: How many steps it took.
        steps: For each step that was measured, milliseconds by account, which add up to its length.
    """

    def __init__(self, skip: int, count: int) -> None:
        self._skip, self._last = skip, skip + count
        self.optimizer: Any = None
        self.taken, self.steps = 0, list[dict[str, float]]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the steps that are taken meanwhile."""
        hook = register_optimizer_step_post_hook(self._stepped)
        backward = torch.autograd.backward

        def measured(*args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                return backward(*args, **kwargs)
            with self.optimizer._training.meter.stage("backward"):
                return backward(*args, **kwargs)

        try:
            with patch.object(torch.autograd, "backward", measured):
                yield
        finally:
            hook.remove()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.optimizer is None and hasattr(optimizer, "_training"):
            self.optimizer = optimizer
        if optimizer is not self.optimizer:
            return
        self.taken += 1
        meter = optimizer._training.meter
        if self._skip < self.taken <= self._last:
            spent = meter.read(NAMES_THERE)
            seconds = {name: spent[f"seconds/{name}"] for name in NAMES_THERE}
            self.steps.append({name: 1000 * s for name, s in seconds.items() if s})
        if torch.accelerator.is_available():
            if self.taken == self._skip:
                meter.now = _synchronized
            elif self.taken == self._last:
                meter.now = time.perf_counter

    def means(self) -> dict[str, float]:
        """Milliseconds a step by account, in the order of a step."""
        of = {name: [step.get(name, 0.0) for step in self.steps] for name in NAMES_THERE}
        return {name: sum(times) / len(times) for name, times in of.items() if any(times)}


def _synchronized() -> float:
    """The time, once the device has done what it was given."""
    torch.accelerator.synchronize()
    return time.perf_counter()


def table_of(recorder: Recorder) -> str:
    """The means over steps as a table."""
    means = recorder.means()
    total = sum(means.values())
    rows = [("stage", "papers", "ms a step", "share")]
    rows += [(n, NAMES_THERE[n], f"{ms:,.3f}", f"{ms / total:.1%}") for n, ms in means.items()]
    rows.append(("the whole step", "", f"{total:,.3f}", ""))
    title = f"{type(recorder.optimizer).__name__}: mean of {len(recorder.steps)} steps"
    return "\n".join([title, *aligned(rows, {2, 3})])


def add_command(commands: Any) -> None:
    """Add ``profile`` to the commands of ``python -m second_order``."""
    parser = commands.add_parser(
        "profile",
        help="run a training script, and show where the time of its steps goes",
        description="Run a training script; write a table of milliseconds by stage, and the same "
        "for each step as JSON. Under torchrun, every rank writes its JSON, and rank 0 the table.",
    )
    parser.add_argument("--skip", type=_count, default=5, help="steps before the first measured")
    parser.add_argument("--steps", type=_count, default=20, help="steps that are measured")
    parser.add_argument("--output", type=Path, default=Path("profile"), help="path, no suffix")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("script", help="the training script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    parser.set_defaults(run=run)


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of steps, 1 or more")
    return int(word)


def run(chosen: argparse.Namespace) -> int:
    """Run the script, and write what has been measured, also if the script ends by an error."""
    recorder, status = Recorder(chosen.skip, chosen.steps), 0
    first = os.getcwd() if chosen.module else str(Path(chosen.script).resolve().parent)  # noqa: PTH109
    argv, path = [chosen.script, *chosen.arguments], [first, *sys.path]
    try:
        with recorder.watching(), patch.multiple(sys, argv=argv, path=path):
            if chosen.module:
                runpy.run_module(chosen.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(chosen.script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    finally:
        written = _write(recorder, chosen)
    return status or int(not written)


def _write(recorder: Recorder, chosen: argparse.Namespace) -> bool:
    """Write what was measured; returns whether there is any."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not recorder.steps:
        sys.stderr.write(
            f"rank {rank}: no step was measured: a second-order optimizer of the script took "
            f"{recorder.taken} steps, and the first {chosen.skip} are not measured; lower --skip, "
            f"or let it run on\n"
        )
        return False
    suffix = f"-rank{rank}" if size > 1 else ""
    path = chosen.output.with_name(f"{chosen.output.name}{suffix}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "rank": rank,
        "world_size": size,
        "skipped": chosen.skip,
        "optimizer": type(recorder.optimizer).__name__,
        "papers": NAMES_THERE,
        "mean_milliseconds": recorder.means(),
        "steps": recorder.steps,
    }
    with replacing(path) as file:
        file.write(json.dumps(found, indent=1).encode())
    if rank == 0:
        sys.stdout.write(f"{table_of(recorder)}\nwritten: {path}\n")
    return True

"""The stage picture of a training script: ``python -m second_order profile train.py``.

The script runs as it would alone. After each step of its first optimizer a mark is set; between two
marks, the ranges of the package's stages and of ``backward`` share out the time. What is left is
forward, batches and everything else. Figure 8 of DP-KFAC is such a picture.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from second_order.files import replacing
from second_order.report import aligned
from second_order.stages import ELSEWHERE, PAPER_NAMES, RANGES, account

__all__ = ["Picture", "Recorder", "Span", "add_command", "picture_of", "read", "table_of"]

Mark: TypeAlias = tuple[float, int]

MARK = f"{RANGES}step"
ORDER = (ELSEWHERE, *PAPER_NAMES)
NAMES_THERE = {**PAPER_NAMES, ELSEWHERE: "FF"}


@dataclass(frozen=True)
class Span:
    """One run of a named range on one thread, in milliseconds.

    ``device`` is the time that a device worked on what was launched within it.
    """

    name: str
    thread: int
    start: float
    end: float
    device: float = 0.0


@dataclass(frozen=True)
class Picture:
    """Milliseconds by stage of each step.

    Attributes:
        host: For each step, milliseconds of the thread that trains, by account; all accounts of a
            step add up to its length.
        device: For each step, milliseconds that a device worked on what a stage had launched; no
            entries without a device.
        optimizer: Name of the optimizer's class.
    """

    host: Sequence[Mapping[str, float]]
    device: Sequence[Mapping[str, float]]
    optimizer: str = ""

    @property
    def accounts(self) -> list[str]:
        """The accounts that took any time, in the order of a step."""
        seen = {name for step in (*self.host, *self.device) for name, ms in step.items() if ms > 0}
        return sorted(seen, key=lambda name: [*ORDER, name].index(name))

    def mean(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Milliseconds a step by account."""
        return {n: sum(s.get(n, 0.0) for s in steps) / len(steps) for n in self.accounts if steps}


def read(events: Iterable[Any]) -> tuple[list[Span], list[Mark], list[tuple[float, float]]]:
    """The package's ranges among a profile's events, the marks, and work of a device.

    Marks are (when, on which thread), work (when, how long); times of a profile are microseconds.
    """
    spans, marks, work = [], [], []
    for event in events:
        start, end = event.time_range.start / 1000, event.time_range.end / 1000
        if event.device_type.name != "CPU":
            # A range shows a second time on the device's own timeline.
            if not getattr(event, "is_user_annotation", False) and RANGES not in event.name:
                work.append((start, end - start))
        elif event.name == MARK:
            marks.append((start, event.thread))
        elif event.name.startswith(RANGES):
            name = event.name.removeprefix(RANGES)
            spans.append(Span(name, event.thread, start, end, event.device_time_total / 1000))
    return spans, sorted(marks), work


def picture_of(
    spans: Iterable[Span], marks: Sequence[Mark], work: Iterable[tuple[float, float]] = ()
) -> Picture:
    """Share out the time between marks over the stages; a span counts in the step it begins in.

    Marks tell when each step ended, and on which thread: there is one more than there are steps.
    """
    count = max(len(marks) - 1, 0)
    host: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(count)]
    device: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(count)]
    around: dict[int, list[tuple[Span, str]]] = defaultdict(list)

    def step_of(moment: float) -> int | None:
        step = sum(moment >= start for start, _ in marks) - 1
        return step if 0 <= step < count else None

    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        step = step_of(span.start)
        if step is None:
            continue
        open_spans = around[span.thread]
        while open_spans and open_spans[-1][0].end <= span.start:
            open_spans.pop()
        outer = open_spans[-1][1] if open_spans else ELSEWHERE
        mine, length = account(span.name, outer), span.end - span.start
        if not open_spans and span.thread != marks[0][1]:
            # Hooks on autograd's own thread, while the one that trains stands in `backward`.
            outer = "backward" if span.name == "capture" else ""
        host[step][mine] += length
        host[step][outer] -= length
        if span.name != "backward":  # whose work other threads launch: it is what is left
            device[step][mine] += span.device
            device[step][outer if outer != "backward" else ELSEWHERE] -= span.device
        open_spans.append((span, mine))
    for step, ((start, _), (end, _)) in enumerate(pairwise(marks)):
        host[step][ELSEWHERE] += end - start
    busy = [(step, length) for start, length in work if (step := step_of(start)) is not None]
    for step, length in busy:
        device[step][ELSEWHERE] += length
    of_host, of_device = ([{n: ms for n, ms in s.items() if n} for s in e] for e in (host, device))
    return Picture(of_host, of_device if busy else [])


def table_of(picture: Picture) -> str:
    """The means over steps as a table."""
    host, device = picture.mean(picture.host), picture.mean(picture.device)
    total = sum(host.values())
    rows = [("stage", "papers", "ms a step", "share", *(["device ms"] if device else []))]
    for name in picture.accounts:
        ms = host.get(name, 0.0)
        on_device = [f"{device.get(name, 0.0):,.3f}"] if device else []
        of_all = f"{ms / total:.1%}" if total else ""
        said = NAMES_THERE.get(name, "")
        rows.append((name, said, f"{ms:,.3f}", of_all, *on_device))
    rows.append(("the whole step", "", f"{total:,.3f}", *[""] * (len(rows[0]) - 3)))
    title = f"{picture.optimizer}: mean of {len(picture.host)} steps"
    return "\n".join([title, *aligned(rows, {2, 3, 4})])


def draw(picture: Picture, path: Path) -> bool:
    """Draw time a step, stacked by stage; returns whether matplotlib is there to do it."""
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    steps = picture.device or picture.host
    figure = module.Figure(figsize=(8, 4.5), layout="constrained")
    axes, bottoms = figure.subplots(), [0.0] * len(steps)
    for name in picture.accounts:
        heights = [max(step.get(name, 0.0), 0.0) for step in steps]
        label = " · ".join(filter(None, [NAMES_THERE.get(name, ""), name]))
        axes.bar(range(len(steps)), heights, 0.9, bottom=bottoms, label=label)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    where = "of the device" if picture.device else "of the thread that trains"
    axes.set(xlabel="step", ylabel=f"milliseconds {where}", title=picture.optimizer)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", reverse=True)
    figure.savefig(path, dpi=150)
    return True


class Recorder:
    """Profiles ``steps`` steps of the first optimizer that takes one, after ``skip`` of them."""

    def __init__(self, skip: int, steps: int) -> None:
        self._skip, self._steps = skip, steps
        self.taken = 0
        self.result: profile | None = None
        self._running = False
        self._optimizer: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the steps that are taken meanwhile, and profile those that are asked for."""
        hook = register_optimizer_step_post_hook(self._stepped)
        backward = torch.autograd.backward

        def ranged(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{RANGES}backward"):
                return backward(*args, **kwargs)

        try:
            with patch.object(torch.autograd, "backward", ranged):
                yield
        finally:
            hook.remove()
            self._stop()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if self._optimizer is not optimizer:
            return
        self.taken += 1
        if self.taken == self._skip:
            on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.result = profile(activities=[ProfilerActivity.CPU, *on_device])
            self.result.start()
            self._running = True
        if self._running:
            with record_function(MARK):
                pass
        if self.taken == self._skip + self._steps:
            self._stop()

    def _stop(self) -> None:
        if self._running and self.result is not None:
            self._running = False
            self.result.stop()

    def picture(self) -> Picture:
        """The steps that were measured; none if there were too few."""
        if self.result is None:
            return Picture([], [])
        found = picture_of(*read(self.result.events() or []))
        return Picture(found.host, found.device, type(self._optimizer).__name__)


def add_command(commands: Any) -> None:
    """Add ``profile`` to the commands of ``python -m second_order``."""
    parser = commands.add_parser(
        "profile",
        help="run a training script, and show where the time of its steps goes",
        description="Run a training script under torch.profiler; write a table of milliseconds by "
        "stage, the same for each step as JSON, and a figure if matplotlib is there. Under "
        "torchrun, every rank writes its JSON, and rank 0 the table and the figure.",
    )
    parser.add_argument("--skip", type=_count, default=5, help="steps before the first measured")
    parser.add_argument("--steps", type=_count, default=20, help="steps that are measured")
    parser.add_argument("--output", type=Path, default=Path("profile"), help="path, no suffix")
    parser.add_argument("--trace", action="store_true", help="write Chrome's trace as well")
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
    """Write the picture; returns whether there is one."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    picture = recorder.picture()
    if not picture.host:
        sys.stderr.write(
            f"rank {rank}: no step was measured: an optimizer of the script took {recorder.taken} "
            f"steps, and the first {chosen.skip} are not measured; lower --skip, or let it run on\n"
        )
        return False
    name = f"{chosen.output.name}-rank{rank}" if size > 1 else chosen.output.name
    path = chosen.output.with_name(f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "rank": rank,
        "world_size": size,
        "skipped": chosen.skip,
        "optimizer": picture.optimizer,
        "papers": {name: NAMES_THERE.get(name, "") for name in picture.accounts},
        "mean_milliseconds": picture.mean(picture.host),
        "mean_device_milliseconds": picture.mean(picture.device),
        "steps": picture.host,
        "device_steps": picture.device,
    }
    with replacing(path) as file:
        file.write(json.dumps(found, indent=1).encode())
    if chosen.trace and recorder.result is not None:
        recorder.result.export_chrome_trace(str(path.with_name(f"{name}.trace.json")))
    if rank == 0:
        figure = chosen.output.with_name(f"{chosen.output.name}.png")
        drawn = f", {figure}" if draw(picture, figure) else "; no figure: matplotlib is not there"
        sys.stdout.write(f"{table_of(picture)}\nwritten: {path}{drawn}\n")
    return True

"""Meters of the speed benchmark: bytes sent, time by stage, peak memory."""

from __future__ import annotations

import re
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from second_order.utils.stages import RANGES, recorded_by

__all__ = [
    "CATEGORIES",
    "RANGES",
    "Span",
    "bytes_by_stage",
    "moved_bytes",
    "peak_bytes",
    "profiled",
    "sent_bytes",
    "spans_of",
    "stage_milliseconds",
]


# --------------------------------------------------------------------------------- bytes sent

CATEGORIES = ("factors", "inverses", "gradients", "averaging", "other")
"""Preconditioned gradients are "gradients"; "averaging" is what training without us sends too."""

# The position of what a process hands over; the first argument unless listed.
_SECOND_ARGUMENT = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
}
_FIRST_ARGUMENT = {
    "all_gather_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "reduce",
    "send",
}
_ONE_SOURCE = {"broadcast": 1, "scatter": 2}
_INPUT_NAMES = ("input", "input_tensor", "input_list", "input_tensor_list", "scatter_list")

_BY_STAGE = {
    "average_gradients": "averaging",
    "statistics": "factors",
    "statistics_exchange": "factors",
    "solve": "inverses",
    "solve_exchange": "inverses",
    "wait": "inverses",
    "precondition": "gradients",
    "precondition_exchange": "gradients",
}


def _category(stage: str) -> str:
    """What a collective carries, by the stage in which it is called."""
    return _BY_STAGE.get(stage, "other")


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dist.P2POp):
        sends = value.op is dist.isend
        return value.tensor.nbytes if sends else 0
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


def _handed_over(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of this process's own contribution to a call."""
    if name in _ONE_SOURCE:
        position = _ONE_SOURCE[name]
        source = args[position] if len(args) > position else kwargs.get("src", dist.get_rank())
        if source != dist.get_rank():
            return 0
    named = next((kwargs[key] for key in _INPUT_NAMES if key in kwargs), None)
    if named is not None:
        return _nbytes(named)
    position = 1 if name in _SECOND_ARGUMENT else 0
    if len(args) > position:
        return _nbytes(args[position])
    return _nbytes(kwargs.get("tensor"))


def _moved(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Bytes that have to leave this process in a call, by the cheapest algorithm for it."""
    nbytes = _handed_over(name, args, kwargs)
    group = kwargs.get("group")
    ranks = dist.get_world_size(group)
    if name.startswith("all_reduce"):
        return 2 * (ranks - 1) / ranks * nbytes
    if name.startswith(("reduce", "scatter")):
        return (ranks - 1) / ranks * nbytes
    if name.startswith(("all_gather", "broadcast")):
        return (ranks - 1) * nbytes
    if name.startswith("all_to_all_single"):
        sizes = args[3] if len(args) > 3 else kwargs.get("input_split_sizes")
        if sizes:
            own_share: float = sizes[dist.get_rank(group)] / max(sum(sizes), 1)
            return nbytes * (1 - own_share)
        return (ranks - 1) / ranks * nbytes
    return nbytes


def moved_bytes() -> AbstractContextManager[Counter[str]]:
    """Bytes that have to leave this process meanwhile, by category.

    An all-reduce of n bytes over P processes counts 2 (P - 1) / P n, as in a ring. A broadcast
    counts P - 1 copies. Other messages count once, without the part that stays on the process.
    """
    return sent_bytes(_moved)


def bytes_by_stage() -> AbstractContextManager[Counter[str]]:
    """Bytes that this process hands to torch.distributed meanwhile, by stage; "" outside of all."""
    return sent_bytes(by=str)


@contextmanager
def sent_bytes(
    count: Callable[[str, tuple[Any, ...], dict[str, Any]], float] = _handed_over,
    by: Callable[[str], str] = _category,
) -> Iterator[Counter[str]]:
    """Bytes that this process hands to torch.distributed meanwhile, by category."""
    sent: Counter[str] = Counter()
    stages = [""]

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        stages.append(name)
        try:
            yield
        finally:
            stages.pop()

    def call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sent[by(stages[-1])] += round(count(name, args, kwargs))
        return function(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(recorded_by(stage))
        for name in sorted(_FIRST_ARGUMENT | _SECOND_ARGUMENT):
            function = getattr(dist, name, None)
            if function is not None:
                wrapper = partial(call, name, function)
                stack.enter_context(patch.object(dist, name, wrapper))
        yield sent


# ------------------------------------------------------------------------------- time by stage


@dataclass(frozen=True)
class Span:
    """One run of a named range on one thread, in milliseconds."""

    name: str
    thread: int
    start: float
    end: float
    device: float = 0.0

    @property
    def host(self) -> float:
        """Time between entering and leaving it."""
        return self.end - self.start


def profiled(step: Callable[[], Any]) -> list[Span]:
    """The package's ranges during a step, the innermost ones and those around them."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as result:
        step()
    return spans_of(result.events() or [])


def spans_of(events: Iterable[Any]) -> list[Span]:
    """The package's ranges among a profile's events; the times of a profile are microseconds."""
    return [
        Span(
            event.name,
            event.thread,
            event.time_range.start / 1000,
            event.time_range.end / 1000,
            event.device_time_total / 1000,
        )
        for event in events
        # A range shows a second time on the device's own timeline.
        if event.name.startswith(RANGES) and event.device_type.name == "CPU"
    ]


def stage_milliseconds(spans: Iterable[Span], *, device: bool = False) -> dict[str, float]:
    """Time in each range but not in a range within it; on the host, or of the device's work."""
    totals: defaultdict[str, float] = defaultdict(float)
    around: defaultdict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        open_spans = around[span.thread]
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        time = span.device if device else span.host
        totals[span.name] += time
        if open_spans:
            totals[open_spans[-1].name] -= time
        open_spans.append(span)
    return {name.removeprefix(RANGES): time for name, time in totals.items()}


# --------------------------------------------------------------------------------------- memory


def peak_bytes(device: str = "cpu") -> int:
    """The most memory this process has had so far: resident, or allocated on the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage's figure is never below that of the process that started this one.
        found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

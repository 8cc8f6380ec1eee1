"""Measures bytes sent, time per timer region, and peak memory."""

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
"""What is sent. "gradients" are preconditioned gradients, and "averaging" is the all-reduce of
gradients that training without the package also needs."""

# Collectives by the position of the argument that a process sends.
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
_SOURCE_POSITION = {"broadcast": 1, "scatter": 2}
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
    """Category of the bytes that a collective sends within a timer region."""
    return _BY_STAGE.get(stage, "other")


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dist.P2POp):
        sends = value.op is dist.isend
        return value.tensor.nbytes if sends else 0
    if isinstance(value, list | tuple):
        return sum(_nbytes(entry) for entry in value)
    return 0


def _input_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that this process contributes to a call."""
    # Only the source of a broadcast or scatter contributes.
    if name in _SOURCE_POSITION:
        position = _SOURCE_POSITION[name]
        source = kwargs.get("src", dist.get_rank())
        if len(args) > position:
            source = args[position]
        if source != dist.get_rank():
            return 0

    # The input is a named or a positional argument.
    for key in _INPUT_NAMES:
        if kwargs.get(key) is not None:
            return _nbytes(kwargs[key])
    position = 1 if name in _SECOND_ARGUMENT else 0
    if len(args) > position:
        return _nbytes(args[position])
    return _nbytes(kwargs.get("tensor"))


def _leaving_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Bytes that leave this process in a call, with the cheapest algorithm for the call."""
    nbytes = _input_bytes(name, args, kwargs)
    group = kwargs.get("group")
    ranks = dist.get_world_size(group)
    if name.startswith("all_reduce"):
        return 2 * (ranks - 1) / ranks * nbytes
    if name.startswith(("reduce", "scatter")):
        return (ranks - 1) / ranks * nbytes
    if name.startswith(("all_gather", "broadcast")):
        return (ranks - 1) * nbytes
    if name.startswith("all_to_all_single"):
        sizes = kwargs.get("input_split_sizes")
        if len(args) > 3:
            sizes = args[3]
        if sizes:
            own_share: float = sizes[dist.get_rank(group)] / max(sum(sizes), 1)
            return nbytes * (1 - own_share)
        return (ranks - 1) / ranks * nbytes
    return nbytes


def moved_bytes() -> AbstractContextManager[Counter[str]]:
    """Count the bytes that leave this process within the block, by category.

    An all-reduce of n bytes over P processes counts 2 (P - 1) / P n, as in a ring. A broadcast
    counts P - 1 copies. Other messages count once, without the part that stays on the process.
    """
    return sent_bytes(_leaving_bytes)


def bytes_by_stage() -> AbstractContextManager[Counter[str]]:
    """Count the bytes that this process passes to torch.distributed, by timer region.

    Bytes outside of all timer regions have the key "".
    """
    return sent_bytes(group_by=str)


@contextmanager
def sent_bytes(
    count: Callable[[str, tuple[Any, ...], dict[str, Any]], float] = _input_bytes,
    group_by: Callable[[str], str] = _category,
) -> Iterator[Counter[str]]:
    """Count the bytes that this process passes to torch.distributed within the block.

    Args:
        count: The bytes of a call, from the collective's name and its arguments.
        group_by: The key of the result, from the name of the timer region.
    """
    sent: Counter[str] = Counter()
    open_stages = [""]

    @contextmanager
    def record_stage(name: str) -> Iterator[None]:
        open_stages.append(name)
        try:
            yield
        finally:
            open_stages.pop()

    def call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sent[group_by(open_stages[-1])] += round(count(name, args, kwargs))
        return function(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(recorded_by(record_stage))
        for name in sorted(_FIRST_ARGUMENT | _SECOND_ARGUMENT):
            function = getattr(dist, name, None)
            if function is not None:
                wrapper = partial(call, name, function)
                stack.enter_context(patch.object(dist, name, wrapper))
        yield sent


# ------------------------------------------------------------------------------- time by stage


@dataclass(frozen=True)
class Span:
    """One execution of a timer region on a thread, in milliseconds."""

    name: str
    thread: int
    start: float
    end: float
    device: float = 0.0

    @property
    def host(self) -> float:
        """Time on the host."""
        return self.end - self.start


def profiled(step: Callable[[], Any]) -> list[Span]:
    """Profile a step, and return the spans of all timer regions of the package."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as result:
        step()
    return spans_of(result.events() or [])


def spans_of(events: Iterable[Any]) -> list[Span]:
    """The timer regions of the package among a profile's events, converted from microseconds."""
    spans = []
    for event in events:
        # The device's timeline repeats each region.
        if event.name.startswith(RANGES) and event.device_type.name == "CPU":
            span = Span(
                name=event.name,
                thread=event.thread,
                start=event.time_range.start / 1000,
                end=event.time_range.end / 1000,
                device=event.device_time_total / 1000,
            )
            spans.append(span)
    return spans


def stage_milliseconds(spans: Iterable[Span], *, device: bool = False) -> dict[str, float]:
    """Time in each timer region without the regions within it, on the host or on the device."""
    totals: defaultdict[str, float] = defaultdict(float)
    open_spans_by_thread: defaultdict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        # Find the region around this one on the same thread.
        open_spans = open_spans_by_thread[span.thread]
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()

        # The surrounding region doesn't count this time.
        time = span.device if device else span.host
        totals[span.name] += time
        if open_spans:
            totals[open_spans[-1].name] -= time
        open_spans.append(span)
    return {name.removeprefix(RANGES): time for name, time in totals.items()}


# --------------------------------------------------------------------------------------- memory


def peak_bytes(device: str = "cpu") -> int:
    """Peak memory of this process: resident memory, or memory allocated on the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # getrusage includes the parent's peak, so Linux's status file is read first.
    status = Path("/proc/self/status")
    if status.exists():
        match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if match:
            return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

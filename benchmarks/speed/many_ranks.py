"""Bytes sent, memory and seconds of one rank of 64, 1,024 and 4,096, simulated in one process.

    python benchmarks/speed/many_ranks.py                    all systems, some minutes
    python benchmarks/speed/many_ranks.py --ranks 64 1024 --systems "DPKFAC"

The simulated rank builds its model and its optimizer in a world of that size, with torch's fake
process group, and takes a step with a refresh. Nothing is sent. In place of messages from other
ranks, it receives a copy of its own data, or ones. The seconds therefore don't include waiting for
other ranks.

Memory is the sum over the tensors that are allocated while we measure. It doesn't include the model
and its gradients. Python's own memory is measured by tracemalloc.

The model is a stack of a thousand narrow Linear layers with a wide head. With --resnet it is
ResNet-50 on small images, whose layers have their real sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import reporting
from second_order import DHO2, DPKFAC, KAISA, DistKFAC, SecondOrderWarning
from workloads import resnet50

LAYERS = 1000
WIDTH = 24
HEAD = 1000
MB = 1e6


class Narrow(nn.Module):
    """Residual blocks of one Linear layer each, and a wide head."""

    def __init__(self, layers: int, width: int, head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 1))
        self.head = nn.Linear(width, head)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / len(self.layers)
        logits: Tensor = self.head(x)
        return logits


# ------------------------------------------------------------------------------- the fake world


class _CompletedWork:
    """The handle of a collective that has completed."""

    def wait(self) -> None:
        """Return immediately."""


def _fake_all_to_all(
    output: Tensor, message: Tensor, received: list[int], sent: list[int], *, group: Any, **_: Any
) -> _CompletedWork:
    """Fill the output with copies of this rank's message to itself, if the sizes match."""
    rank = dist.get_rank(group)
    if sent[rank] and set(received) == {sent[rank]}:
        output.view(len(received), -1).copy_(message.split(sent)[rank])
    else:
        # A matrix of ones has no negative eigenvalue.
        output.fill_(1.0)
    return _CompletedWork()


@contextmanager
def simulated_world(ranks: int, rank: int) -> Iterator[Counter[str]]:
    """Make this process one rank of a fake world, and count the process groups that it creates."""
    groups: Counter[str] = Counter()
    new_group = dist.new_group

    def count_group(*args: Any, **kwargs: Any) -> Any:
        groups["made"] += 1
        return new_group(*args, **kwargs)

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            patch.object(dist, "all_to_all_single", _fake_all_to_all),
            patch.object(dist, "new_group", count_group),
        ):
            yield groups
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- memory and collectives


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of new tensors while the mode is active: the current sum and its peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def reset_peak(self) -> None:
        """Measure the peak from the current sum on."""
        self.peak = self.current

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [tensor.untyped_storage() for tensor in _tensors([result])]
        if outputs:
            input_ids = {id(tensor.untyped_storage()) for tensor in _tensors(args)}
            for storage in outputs:
                if id(storage) not in input_ids and storage not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        self._known.add(storage)
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._subtract, nbytes)

    def _subtract(self, nbytes: int) -> None:
        self.current -= nbytes


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


# Collectives by the position of the argument that a rank sends.
COLLECTIVES = {
    "all_reduce": 0,
    "broadcast": 0,
    "all_to_all_single": 1,
    "all_gather_single": 1,
    "all_gather_object": 0,
}


@contextmanager
def count_collectives() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count the calls of each collective, and the bytes that this rank passes to it."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            tensor = args[COLLECTIVES[name]]
            if isinstance(tensor, Tensor):
                sent[name] += tensor.nbytes
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                wrapper = count(name, getattr(dist, name))
                stack.enter_context(patch.object(dist, name, wrapper))
        yield calls, sent


# ------------------------------------------------------------------------------------ the systems


@dataclass(frozen=True)
class System:
    """An optimizer with its options, and whether it needs a curvature closure."""

    name: str
    optimizer: Callable[..., Any]
    options: dict[str, Any]
    closure: bool = False


def _dho2(layout: str) -> System:
    options = {
        "layout": layout,
        "num_largest": 4,
        "lanczos_iterations": 8,
        "warmup_steps": 0,
        "momentum": 0.9,
    }
    return System(f"DHO2, {layout}s", DHO2, options, closure=True)


SYSTEMS = (
    System("KAISA MEM-OPT", KAISA, {"grad_worker_fraction": 0.0, "factor_exchange": "reduce"}),
    System("KAISA HYBRID", KAISA, {"grad_worker_fraction": 0.5, "factor_exchange": "reduce"}),
    System("KAISA COMM-OPT", KAISA, {"grad_worker_fraction": 1.0}),
    System("DPKFAC", DPKFAC, {}),
    System("DistKFAC", DistKFAC, {"max_staleness": 0}),
    _dho2("row"),
    _dho2("column"),
)


@dataclass(frozen=True)
class Row:
    """Figures of one rank, during the optimizer's construction and a step with a refresh.

    Attributes:
        system: Name in the tables.
        model: "narrow" or "resnet50".
        ranks: Number of ranks.
        rank: The simulated rank.
        groups: Number of process groups that the rank creates.
        construction_s: CPU seconds of the construction.
        construction_mb: Peak memory of tensors during the construction.
        construction_python_mb: Peak memory of Python objects during the construction.
        collectives: Number of collectives in the step.
        sent_mb: Megabytes that the rank passes to the collectives.
        step_s: CPU seconds of the step.
        next_s: CPU seconds of the step after it.
        step_mb: Peak memory of tensors during the step.
        step_python_mb: Peak memory of Python objects during the step.
        state_mb: Tensors that the optimizer stores after the step.
    """

    system: str
    model: str
    ranks: int
    rank: int
    groups: int
    construction_s: float
    construction_mb: float
    construction_python_mb: float
    collectives: int
    sent_mb: float
    step_s: float
    next_s: float
    step_mb: float
    step_python_mb: float
    state_mb: float


def narrow_task(
    layers: int = LAYERS, width: int = WIDTH, head: int = HEAD
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The stack of narrow layers, and a batch."""
    torch.manual_seed(0)
    return Narrow(layers, width, head), (torch.randn(8, width), torch.arange(8) % head)


def resnet_task() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """ResNet-50, and two small images."""
    torch.manual_seed(0)
    return resnet50(), (torch.randn(2, 3, 64, 64), torch.arange(2))


Task = Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]


def simulate(system: System, task: Task, name: str, ranks: int, rank: int) -> Row:
    """Run the system twice, to measure times and memory separately."""
    times = run(system, task, ranks, rank, counts_memory=False)
    memory = run(system, task, ranks, rank, counts_memory=True)
    return Row(system.name, name, ranks, rank, **{**memory, **times})


def run(
    system: System, task: Task, ranks: int, rank: int, *, counts_memory: bool
) -> dict[str, Any]:
    """Fields of a :class:`Row`: those of time or those of memory, and the counts."""
    model, (x, y) = task()
    options = dict(system.options)
    if system.closure:
        options["curvature_closure"] = lambda: cross_entropy(model(x), y)
    memory = TensorMemory()
    fields: dict[str, Any] = {}

    def measure_time(name: str, function: Callable[[], Any]) -> Any:
        gc.collect()
        start = time.process_time()
        result = function()
        fields[f"{name}_s"] = round(time.process_time() - start, 3)
        return result

    def measure_memory(name: str, function: Callable[[], Any]) -> Any:
        gc.collect()
        before = memory.current
        memory.reset_peak()
        tracemalloc.start()
        try:
            with memory:
                result = function()
            fields[f"{name}_python_mb"] = round(tracemalloc.get_traced_memory()[1] / MB, 2)
        finally:
            tracemalloc.stop()
        fields[f"{name}_mb"] = round((memory.peak - before) / MB, 2)
        return result

    def compute_gradients() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()

    measure = measure_memory if counts_memory else measure_time
    with simulated_world(ranks, rank) as groups, warnings.catch_warnings():
        # Measure the construction and the first step, which refreshes all layers.
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = measure("construction", lambda: system.optimizer(model, lr=0.01, **options))
        compute_gradients()
        with count_collectives() as (calls, sent):
            measure("step", optimizer.step)
        fields["collectives"] = calls.total()
        fields["sent_mb"] = round(sent.total() / MB, 2)
        fields["groups"] = groups["made"]

        # Measure the state, or the time of a step without a refresh.
        if counts_memory:
            gc.collect()
            fields["state_mb"] = round(memory.current / MB, 2)
        else:
            compute_gradients()
            start = time.process_time()
            optimizer.step()
            fields["next_s"] = round(time.process_time() - start, 3)
        optimizer.close()
    return fields


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Identifies a row of the stored runs."""
    return row["system"], row["model"], row["ranks"], row["rank"]


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate each system in each world, print the rows, and update the stored runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--systems", nargs="+", default=[s.name for s in SYSTEMS])
    parser.add_argument("--resnet", action="store_true", help="ResNet-50 instead of 1,000 layers")
    parser.add_argument("--first", action="store_true", help="only the first rank of each world")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--json", type=Path, help="update the rows in this file")
    args = parser.parse_args(argv)

    name = "narrow"
    task: Task = partial(narrow_task, args.layers)
    if args.resnet:
        name = "resnet50"
        task = resnet_task

    rows = []
    for system in SYSTEMS:
        if system.name not in args.systems:
            continue
        for ranks in args.ranks:
            # The first rank has the largest layer. Most others are like the one in the middle.
            simulated_ranks = [0] if args.first else [0, ranks // 2]
            for rank in simulated_ranks:
                row = asdict(simulate(system, task, name, ranks, rank))
                print(json.dumps(row), flush=True)
                rows.append(row)

    # Rows of other systems and worlds stay in the file.
    if args.json:
        stored_rows = []
        if args.json.exists():
            stored_rows = json.loads(args.json.read_text())["rows"]
        new_keys = {key(row) for row in rows}
        other_rows = [row for row in stored_rows if key(row) not in new_keys]
        reporting.store(args.json, None, rows=[*other_rows, *rows])


if __name__ == "__main__":
    main()

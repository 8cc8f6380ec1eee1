"""One rank of 64, 1,024 and 4,096: what it sends, keeps and allocates, and how long that takes.

    python benchmarks/speed/many_ranks.py                    all systems, some minutes
    python benchmarks/speed/many_ranks.py --ranks 64 1024 --systems "DPKFAC"

The rank is real: it builds its model and its optimizer in a world of that size, with torch's fake
process group, and takes a step with a refresh. Nothing is sent, and of the other ranks it is
pretended that they send what this one has, or else ones. Seconds and the optimizer's volumes are
therefore those of one rank without its waiting for others.

Allocated memory is counted tensor by tensor, above what there was before: the model and its
gradients are not counted. Python's own memory is that of tracemalloc.

The model is a stack of a thousand narrow Linear layers under a wide head; with --resnet it is
ResNet-50 on small images, whose largest layers are real, and take a while to decompose.
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
    """Residual blocks of one Linear each, and a wide head."""

    def __init__(self, layers: int, width: int, head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 1))
        self.head = nn.Linear(width, head)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / len(self.layers)
        logits: Tensor = self.head(x)
        return logits


# --------------------------------------------------------------------------------- the pretence


class _Done:
    """What there is to wait for where nothing travels."""

    def wait(self) -> None:
        """Return at once."""


def _from_all_alike(
    output: Tensor, message: Tensor, received: list[int], sent: list[int], *, group: Any, **_: Any
) -> _Done:
    """An all-to-all where the others send what this rank sends to itself, if that fits all."""
    rank = dist.get_rank(group)
    if sent[rank] and set(received) == {sent[rank]}:
        output.view(len(received), -1).copy_(message.split(sent)[rank])
    else:  # a matrix of ones has no negative eigenvalue
        output.fill_(1.0)
    return _Done()


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[Counter[str]]:
    """Be one rank of a world whose others are pretended; yields how often groups are made."""
    groups: Counter[str] = Counter()
    new_group = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        groups["made"] += 1
        return new_group(*args, **kwargs)

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            patch.object(dist, "all_to_all_single", _from_all_alike),
            patch.object(dist, "new_group", counted),
        ):
            yield groups
    finally:
        dist.destroy_process_group()


# -------------------------------------------------------------------------------- what is counted


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that operations make meanwhile: those alive now, and the most so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [tensor.untyped_storage() for tensor in _tensors([result])]
        if made:
            given = {id(tensor.untyped_storage()) for tensor in _tensors(args)}
            for storage in made:
                if id(storage) not in given and storage not in self._known:
                    self._take(storage)
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        self._known.add(storage)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._give_back, nbytes)

    def _give_back(self, nbytes: int) -> None:
        self.now -= nbytes


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


SENDING = ("all_reduce", "broadcast", "all_to_all_single", "all_gather_single", "all_gather_object")


@contextmanager
def handed_over() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """How often each collective is called, and the bytes that this rank hands to it."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            position = 1 if name in ("all_to_all_single", "all_gather_single") else 0
            if isinstance(args[position], Tensor):
                sent[name] += args[position].nbytes
            return function(*args, **kwargs)

        return call

    found = {name: getattr(dist, name) for name in SENDING if hasattr(dist, name)}
    with ExitStack() as stack:
        for name, function in found.items():
            stack.enter_context(patch.object(dist, name, wrapped(name, function)))
        yield calls, sent


# ------------------------------------------------------------------------------------ the systems


@dataclass(frozen=True)
class System:
    """An optimizer with its options; ``closure`` where it wants one of the curvature."""

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
    """One rank of a world, at its construction and at a step with a refresh.

    Attributes:
        system: As the tables have it.
        model: "narrow" or "resnet50".
        ranks: Number of ranks.
        rank: The one that is simulated.
        groups: Process groups that it makes.
        construction_s: Processor seconds of the construction.
        construction_mb: Largest memory of tensors during it.
        construction_python_mb: Largest memory of Python's own objects.
        collectives: Collectives of the step.
        sent_mb: What the rank hands to them.
        step_s: Processor seconds of the step.
        next_s: Those of the step after it.
        step_mb: Largest memory of tensors during the step.
        step_python_mb: Largest memory of Python's own objects.
        state_mb: Tensors that the optimizer keeps after the step.
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


def simulated(system: System, task: Task, name: str, ranks: int, rank: int) -> Row:
    """Build and step twice: once timed, once with the memory counted."""
    timed = run(system, task, ranks, rank, counts_memory=False)
    counted = run(system, task, ranks, rank, counts_memory=True)
    return Row(system.name, name, ranks, rank, **{**counted, **timed})


def run(
    system: System, task: Task, ranks: int, rank: int, *, counts_memory: bool
) -> dict[str, Any]:
    """Fields of a :class:`Row`: those of time, or those of memory, and what both have."""
    model, (x, y) = task()
    options = dict(system.options)
    if system.closure:
        options["curvature_closure"] = lambda: cross_entropy(model(x), y)
    found: dict[str, Any] = {}

    def measured(name: str, work: Callable[[], Any]) -> Any:
        gc.collect()
        if not counts_memory:
            start = time.process_time()
            result = work()
            found[f"{name}_s"] = round(time.process_time() - start, 3)
            return result
        before = allocated.now
        allocated.peak = before
        tracemalloc.start()
        try:
            with allocated:
                result = work()
            found[f"{name}_python_mb"] = round(tracemalloc.get_traced_memory()[1] / MB, 2)
        finally:
            tracemalloc.stop()
        found[f"{name}_mb"] = round((allocated.peak - before) / MB, 2)
        return result

    def take() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()

    allocated = Allocated()
    with one_of(ranks, rank) as groups, warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = measured("construction", lambda: system.optimizer(model, lr=0.01, **options))
        take()
        with handed_over() as (calls, sent):
            measured("step", optimizer.step)
        found["collectives"] = calls.total()
        found["sent_mb"] = round(sent.total() / MB, 2)
        found["groups"] = groups["made"]
        if counts_memory:
            gc.collect()
            found["state_mb"] = round(allocated.now / MB, 2)
        else:
            take()
            start = time.process_time()
            optimizer.step()
            found["next_s"] = round(time.process_time() - start, 3)
        optimizer.close()
    return found


def ranks_of(ranks: int) -> list[int]:
    """The first rank, which gets the largest layer, and one in the middle."""
    return [0, ranks // 2]


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--systems", nargs="+", default=[s.name for s in SYSTEMS])
    parser.add_argument("--resnet", action="store_true", help="ResNet-50 in place of 1,000 layers")
    parser.add_argument("--first", action="store_true", help="the first rank of each world alone")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    name = "resnet50" if args.resnet else "narrow"
    task: Task = resnet_task if args.resnet else lambda: narrow_task(args.layers)
    rows = []
    for system in SYSTEMS:
        if system.name not in args.systems:
            continue
        for ranks in args.ranks:
            for rank in ranks_of(ranks)[: 1 if args.first else None]:
                row = simulated(system, task, name, ranks, rank)
                print(json.dumps(asdict(row)), flush=True)
                rows.append(asdict(row))
    if args.json:
        known = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        fresh = {(r["system"], r["model"], r["ranks"], r["rank"]) for r in rows}
        kept = [r for r in known if (r["system"], r["model"], r["ranks"], r["rank"]) not in fresh]
        reporting.store(args.json, None, rows=[*kept, *rows])


if __name__ == "__main__":
    main()

"""The runs that `faults.py` breaks: small ones of every optimizer, with points for faults.

A `Run` is one process of a training run. A fault attaches functions to points of the run
(`Run.on`), or replaces one of its parts (`Run.replace`).
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, SecondOrderWarning, TraceRule

__all__ = ["SYSTEMS", "Batch", "Injected", "Run", "System", "perform"]

Batch: TypeAlias = tuple[Tensor, Tensor]

EXAMPLES = 12
FEATURES = 6
CLASSES = 3
PATIENCE = 2.0  # seconds without a sign of life after which a helper is given up
LATER = {"first": 0, "refresh": 3, "between": 4}


class Injected(Exception):  # noqa: N818 - the fault itself, not an error of ours
    """What a fault raises in the user's own code."""


@dataclass(frozen=True)
class System:
    """An optimizer, with how many processes it has, `helpers` among them, and what they do.

    Attributes:
        moments: The steps at which faults come, by name.
        exact: Whether two runs end with equal parameters.
        sharded: Whether fully_shard (FSDP2) has cut the model into rows.
    """

    name: str
    kind: type[Any]
    size: int
    options: dict[str, Any]
    helpers: int = 0
    steps: int = 7
    moments: dict[str, int] = field(default_factory=lambda: LATER)
    exact: bool = True
    sharded: bool = False

    @property
    def workers(self) -> int:
        """How many processes train."""
        return self.size - self.helpers

    @property
    def kfac(self) -> bool:
        """Whether it has Kronecker factors."""
        return self.kind in (KAISA, DPKFAC, DistKFAC)


SGD = {"lr": 0.05, "momentum": 0.9}
KFAC: dict[str, Any] = {**SGD, "damping": 1.0, "factor_update_steps": 1, "inv_update_steps": 3}
INVERSE = {**KFAC, "solver": "inverse"}
ONE = {**KFAC, "grad_worker_fraction": 0.0, "factor_exchange": "reduce"}
HALF = {**KFAC, "grad_worker_fraction": 0.5, "colocate_factors": False}
PIPELINED = {**KFAC, "factor_exchange": "pipelined", "debug": 2}
TRACE = {**KFAC, "inv_update_steps": TraceRule(1e-9, 0.0, every=3), "debug": 1}
REPEATED = {**KFAC, "max_staleness": 1, "deterministic": True, "inverse_threads": 1}
STATS = {**KFAC, "stats_workers": 1, "helper_timeout": PATIENCE}

FOSI: dict[str, Any] = {**SGD, "num_largest": 2, "num_smallest": 1}
NEWTON = {**FOSI, "warmup_steps": 1, "curvature_interval": 3}
COLUMN = {**NEWTON, "layout": "column"}
LONG = {**NEWTON, "newton_scale": 0.5, "subspace_momentum": 0.0}
BY_BUDGET = {**FOSI, "warmup_steps": 1, "overhead": 10.0}
EPOCHS = {**FOSI, "epoch_steps": 3, "final_update": "paper", "helper_timeout": PATIENCE}
MOMENTS = {"first": 1, "refresh": 4, "between": 5}
BUDGET_MOMENTS = {"first": 1, "refresh": 1, "between": 12}  # later ones come by the clock

SYSTEMS = [
    System("KAISA 1", KAISA, 1, KFAC),
    System("KAISA 2, all", KAISA, 2, INVERSE),
    System("KAISA 2, one", KAISA, 2, ONE),
    System("KAISA 4, half", KAISA, 4, HALF),
    System("KAISA 2, sharded", KAISA, 2, KFAC, sharded=True),
    System("DPKFAC 1", DPKFAC, 1, KFAC),
    System("DPKFAC 2", DPKFAC, 2, KFAC),
    System("DistKFAC 1", DistKFAC, 1, KFAC, exact=False),
    System("DistKFAC 2", DistKFAC, 2, REPEATED),
    System("DistKFAC 2+1", DistKFAC, 3, STATS, helpers=1, steps=12, exact=False),
    System("DHO2 1", DHO2, 1, NEWTON, moments=MOMENTS),
    System("DHO2 2, row", DHO2, 2, NEWTON, moments=MOMENTS),
    System("DHO2 2, column", DHO2, 2, COLUMN, moments=MOMENTS),
    System("DHO2 1, long steps", DHO2, 1, LONG, moments=MOMENTS),
    System("DHO2 2, auto", DHO2, 2, BY_BUDGET, steps=14, moments=BUDGET_MOMENTS, exact=False),
    System("MRDHO2 1+1", MRDHO2, 2, EPOCHS, helpers=1, steps=9),
    System("MRDHO2 2+1", MRDHO2, 3, EPOCHS, helpers=1, steps=9),
    System("KAISA 2, pipelined", KAISA, 2, PIPELINED),
    System("DPKFAC 2, by trace", DPKFAC, 2, TRACE),
]


class Net(nn.Module):
    """Three Linears and a LayerNorm; the middle can be left out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x)))
        if not self.skips:
            h = torch.tanh(self.middle(h))
        out: Tensor = self.last(h)
        return out


def batches(count: int = 12) -> list[Batch]:
    """The same batches on every rank, which takes its shard."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    found = []
    for _ in range(count):
        x = torch.randn(EXAMPLES, FEATURES, generator=generator)
        found.append((x, (x @ teacher).argmax(1)))
    return found


class Run:
    """One process of a training run.

    Attributes:
        step: The current step; -1 before the first.
        moment: The step of the fault.
        phase: 0, or 1 after a restart.
        notes: What the fault has noted.
        caught: Errors that the fault has caught, as `described`.
        helps: Whether this process is a helper.
    """

    def __init__(
        self, system: System, rank: int, size: int, moment: int, phase: int, directory: Path
    ) -> None:
        self.system = system
        self.rank = rank
        self.size = size
        self.moment = moment
        self.phase = phase
        self.directory = directory
        self.workers = size - system.helpers
        self.helps = rank >= self.workers
        self.step = -1
        self.first_step = 0
        self.width = 8
        self.model: Net
        self.optimizer: Any = None
        self.options = dict(system.options)
        self.notes: list[str] = []
        self.caught: list[dict[str, Any]] = []
        self.closes = True
        self.trains = True
        self.steps = True
        self.points: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self.batches = batches()

    @property
    def culprit(self) -> bool:
        """Whether this is the worker that has the fault."""
        return self.rank == self.workers - 1

    def on(self, point: str, function: Callable[[], Any], step: int | None = None) -> None:
        """Call a function at a point of the training, at one step only if one is given."""

        def called() -> None:
            if step is None or self.step == step:
                function()

        self.points[point].append(called)

    def at(self, point: str, function: Callable[[], Any]) -> None:
        """Call a function at a point of the step at which the fault comes."""
        self.on(point, function, self.moment)

    def replace(self, owner: Any, name: str, value: Any, steps: int = 1) -> None:
        """Replace an attribute from the fault's moment on."""
        old = getattr(owner, name)
        self.on("before", lambda: setattr(owner, name, value), self.moment)
        self.on("stepped", lambda: setattr(owner, name, old), self.moment + steps - 1)
        self.on("ending", lambda: setattr(owner, name, old))

    def fire(self, point: str) -> None:
        for function in self.points[point]:
            function()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def catch(self, error: BaseException) -> None:
        self.caught.append(described(error))

    def signal(self, number: int) -> None:
        """Send a signal to this process, and write down that it was intended."""
        (self.directory / f"signal.{self.phase}.{self.rank}").write_text(str(int(number)))
        os.kill(os.getpid(), number)

    def saved(self) -> dict[str, Any]:
        """The optimizer's state, all of it; a collective."""
        self.optimizer.consolidate(to=None)
        state: dict[str, Any] = copy.deepcopy(self.optimizer.state_dict())
        return state

    def batch(self) -> Batch:
        """This process's share."""
        x, y = self.batches[self.step % len(self.batches)]
        share = len(x) // self.workers
        return x[self.rank * share :][:share], y[self.rank * share :][:share]

    def loss(self, batch: Batch) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def curvature_loss(self) -> Any:
        x, y = self.batches[0]
        share = len(x) // self.workers
        own_rows = slice(self.rank * share, (self.rank + 1) * share)
        return cross_entropy(self.model(x[own_rows]), y[own_rows])

    def helper_loss(self, batch: Batch) -> Any:
        self.step += 1
        self.fire("helper_loss")
        return cross_entropy(self.model(batch[0]), batch[1])

    def curved(self) -> Any:
        """Looked up at each call, because a fault may replace it."""
        return self.curvature_loss()

    def helped(self, batch: Batch) -> Any:
        return self.helper_loss(batch)

    def make(self) -> Any:
        return self.system.kind(self.model, **self.options)

    def take(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        loss = self.loss(self.batch())
        self.fire("forward")
        if self.trains:
            loss.backward()
        self.fire("backward")
        if self.steps:
            self.optimizer.step()

    def train(self) -> None:
        for step in range(self.first_step, self.system.steps):
            self.step = step
            self.fire("before")
            self.take()
            self.fire("stepped")
            if not self.system.exact:
                time.sleep(0.01)  # for threads and helpers, as a larger network would leave them
        self.fire("ending")

    def go(self, report: dict[str, Any]) -> None:
        """The training, from beginning to end."""
        torch.manual_seed(0)
        self.model = Net(self.width)
        self.fire("model")
        if self.system.sharded:
            fully_shard(self.model.middle)
            fully_shard(self.model)
        self.optimizer = self.make()
        if hasattr(self.optimizer, "curvature_closure"):
            self.optimizer.curvature_closure = self.curved
        self.fire("made")
        has_exit = hasattr(type(self.optimizer), "__exit__") and self.closes
        with self.optimizer if has_exit else nullcontext():
            if self.helps:
                self.fire("serving")
                served = self.optimizer.serve(self.batches, self.helped)
                self.note(f"served {served}")
            else:
                self.train()
                report.update(findings(self))
        if self.closes:
            self.optimizer.close()
        self.fire("closed")


def findings(run: Run) -> dict[str, Any]:
    """What there is at the end: parameters, and how much curvature is in use."""
    values = [_whole(p.detach()).double().reshape(-1) for p in run.model.parameters()]
    found: dict[str, Any] = {"parameters": torch.cat(values).tolist()}
    summary = run.optimizer.summary()
    use: dict[str, float] = {"bytes": float(summary.inverse_bytes)}
    if run.system.kfac:
        use["failing"] = -float(summary.failed)
        if hasattr(run.optimizer, "staleness"):
            use["in use"] = float(len(run.optimizer.staleness))
    else:
        report = run.optimizer.curvature
        use["eigenvalues"] = float(len(report.eigenvalues))
        use["failures"] = -float(report.failures)
    if run.system.kind is MRDHO2:
        use["epochs"] = float(sum(e.applied for e in run.optimizer.epochs))
    found["use"] = use
    state = run.optimizer.state
    found["finite"] = all(
        bool((t.to_local() if isinstance(t, DTensor) else t).isfinite().all())
        for parts in state.values()
        for t in parts.get("curvature", {}).values()
        if isinstance(t, Tensor) and t.is_floating_point()
    )
    return found


def _whole(parameter: Tensor) -> Tensor:
    """A collective, where it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def described(error: BaseException) -> dict[str, Any]:
    """An error as data."""
    frames = traceback.extract_tb(error.__traceback__)
    chain: list[str] = []
    link = error.__cause__ or error.__context__
    while link is not None and len(chain) < 10:
        chain.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return {
        "type": type(error).__name__,
        "module": type(error).__module__,
        "message": str(error),
        "from": frames[-1].filename if frames else "",
        "chain": chain,
        "traceback": "".join(traceback.format_exception(error)),
    }


def perform(run: Run, join: Callable[[], None]) -> None:
    """Run a training loop in the group that `join` makes, and record how it ended."""
    report: dict[str, Any] = {"status": "done", "warnings": []}

    def shown(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, SecondOrderWarning):
            report["warnings"].append(str(message))

    warnings.showwarning = shown
    warnings.simplefilter("always")
    started = time.monotonic()
    try:
        join()
        run.go(report)
    except BaseException as error:
        report["status"] = "raised"
        report["error"] = described(error)
        traceback.print_exc()
    report |= {"notes": run.notes, "caught": run.caught, "seconds": time.monotonic() - started}
    part = run.directory / f"part.{run.phase}.{run.rank}"
    part.write_text(json.dumps(report))
    part.rename(run.directory / f"report.{run.phase}.{run.rank}")
    sys.stdout.flush()


def is_close(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two lists of parameters are equal but for rounding."""
    if len(a) != len(b):
        return False
    bound = 1e-5 * max(map(abs, b), default=0.0)
    return all(math.isfinite(p) and abs(p - q) <= bound for p, q in zip(a, b, strict=True))

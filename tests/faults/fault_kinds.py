"""The faults that `faults.py` puts into trainings, but for those of checkpoints.

Each is a function that hangs what it wants to a `Run`, and says by `expect` what has to follow:

    same     training goes on as if nothing had been
    goes on  training goes on, with other numbers perhaps
    told     it goes on and says so, or ends by an error
    raises   it ends by an error, or at least says so
    any      whatever is none of the other verdicts
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fault_scenes import Injected, Run, System, batches
from second_order import DHO2, DistKFAC
from second_order.fosi import eigenpairs

__all__ = ["FAULTS", "Fault", "fault"]

Install = Callable[[Run], None]
EACH = ("first", "refresh", "between")
LATER = ("refresh", "between")
BEGINNINGS = ("first", "refresh")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        name: In lists.
        group: In the table.
        install: Hangs it to a training.
        suits: Which systems it is for.
        moments: When it comes; "whole" if that is not one step.
        expect: What has to follow.
        poisons: The base alone would end with parameters that are not finite, too.
        alters: There is less to precondition afterwards.
        exits: A process may end without a report, and with any status.
        signals: Whose death is the fault itself.
        errors: Names of errors that are the fault itself.
        sizes: How many processes, of each of the phases.
    """

    name: str
    group: str
    install: Install
    suits: Callable[[System], bool] = lambda system: True
    moments: tuple[str, ...] = EACH
    expect: str = "goes on"
    poisons: bool = False
    alters: bool = False
    exits: bool = False
    signals: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()
    sizes: Callable[[System], Sequence[int]] = lambda system: (system.size,)

    @property
    def on_shards(self) -> bool:
        """Whether it befalls what is ours, and none of the collectives of a sharded model."""
        return self.group == SOLVES or self.name in ON_SHARDS


SOLVES = "solves"
ON_SHARDS = (
    "nothing",
    "NaN in the inputs of one rank",
    "inf in the inputs of one rank",
    "statistics of one rank overflow, gradients do not",
    "gradients of zero on one rank",
    "a learning rate of 0 from then on",
    "is stopped for a second",
    "is slow by two seconds",
    "an option out of bounds",
    "another learning rate",
    "another interval",
    "another solver",
    "the state is saved by all",
    "of an older version",
    "end without close()",
)

FAULTS: list[Fault] = []


def fault(name: str, group: str, **rest: Any) -> Callable[[Install], Install]:
    """Put a function on the list of faults."""

    def add(install: Install) -> Install:
        FAULTS.append(Fault(name, group, install, **rest))
        return install

    return add


def several(system: System) -> bool:
    """Whether more than one process trains."""
    return system.workers > 1


def kfac(system: System) -> bool:
    return system.kfac


def synchronous(system: System) -> bool:
    return system.kfac and system.kind is not DistKFAC


def threaded(system: System) -> bool:
    return system.kind is DistKFAC


def newton(system: System) -> bool:
    return system.kind is DHO2


def helped(system: System) -> bool:
    return system.helpers > 0


def several_kfac(system: System) -> bool:
    return several(system) and kfac(system)


# ------------------------------------------------------------------------- numbers and data

NUMBERS = "numbers and batches"


def at_once(run: Run, spoil: Callable[[], Any], mend: Callable[[], Any]) -> None:
    """Spoil something for one step."""
    run.at("before", spoil)
    run.at("stepped", mend)


def with_batch(run: Run, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Another batch at the fault's step, on the culprit."""
    batch = run.batch
    if run.culprit:
        changed = lambda: change(*batch())  # noqa: E731
        at_once(run, lambda: setattr(run, "batch", changed), lambda: setattr(run, "batch", batch))


def with_loss(run: Run, loss: Callable[[Any], Any]) -> None:
    """Another loss at the fault's step, on this rank."""
    usual = run.loss
    at_once(run, lambda: setattr(run, "loss", loss), lambda: setattr(run, "loss", usual))


@fault("NaN in the inputs of one rank", NUMBERS, poisons=True)
def _(run: Run) -> None:
    with_batch(run, lambda x, y: (x.index_fill(0, torch.tensor([0]), float("nan")), y))


@fault("NaN in the inputs of one rank, the step is skipped by all", NUMBERS, alters=True)
def _(run: Run) -> None:
    with_batch(run, lambda x, y: (x.index_fill(0, torch.tensor([0]), float("nan")), y))
    at_once(run, lambda: setattr(run, "steps", False), lambda: setattr(run, "steps", True))


@fault("inf in the inputs of one rank", NUMBERS, poisons=True)
def _(run: Run) -> None:
    with_batch(run, lambda x, y: (x * float("inf"), y))


@fault("statistics of one rank overflow, gradients do not", NUMBERS)
def _(run: Run) -> None:
    with_batch(run, lambda x, y: (x * 1e25, y))


@fault("NaN in the gradient of one rank", NUMBERS, poisons=True)
def _(run: Run) -> None:
    def spoil() -> None:
        run.model.middle.weight.grad[0, 0] = float("nan")  # type: ignore[index]

    if run.culprit:
        run.at("backward", spoil)


@fault("gradients of 1e20 on one rank", NUMBERS, poisons=True)
def _(run: Run) -> None:
    if run.culprit:
        with_loss(run, lambda batch: 1e20 * cross_entropy(run.model(batch[0]), batch[1]))


@fault("gradients of zero on one rank", NUMBERS)
def _(run: Run) -> None:
    if run.culprit:
        with_loss(run, lambda batch: 0.0 * cross_entropy(run.model(batch[0]), batch[1]))


@fault("gradients of zero on all ranks", NUMBERS)
def _(run: Run) -> None:
    with_loss(run, lambda batch: 0.0 * cross_entropy(run.model(batch[0]), batch[1]))


@fault("an empty batch on one rank", NUMBERS)
def _(run: Run) -> None:
    with_batch(run, lambda x, y: (x[:0], y[:0]))
    if run.culprit:
        with_loss(run, lambda batch: cross_entropy(run.model(batch[0]), batch[1], reduction="sum"))


@fault("empty batches on all ranks", NUMBERS)
def _(run: Run) -> None:
    def loss(batch: Any) -> Tensor:
        return cross_entropy(run.model(batch[0][:0]), batch[1][:0], reduction="sum")

    with_loss(run, loss)


@fault("a learning rate of 0 from then on", NUMBERS)
def _(run: Run) -> None:
    run.at("before", lambda: [g.update(lr=0.0) for g in run.optimizer.param_groups])


@fault("lr=0 at construction", NUMBERS, moments=("whole",))
def _(run: Run) -> None:
    run.options["lr"] = 0.0


@fault("bfloat16 autocast on one rank", NUMBERS)
def _(run: Run) -> None:
    def loss(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(run.model(batch[0]), batch[1])

    if run.culprit:
        with_loss(run, loss)


# ------------------------------------------------------------------------------- passes

PASSES = "passes"


@fault("a step without backward on all ranks", PASSES)
def _(run: Run) -> None:
    at_once(run, lambda: setattr(run, "trains", False), lambda: setattr(run, "trains", True))


@fault("a step without backward on one rank", PASSES)
def _(run: Run) -> None:
    if run.culprit:
        at_once(run, lambda: setattr(run, "trains", False), lambda: setattr(run, "trains", True))


@fault("forwards without gradients between steps", PASSES, expect="same")
def _(run: Run) -> None:
    def look() -> None:
        run.model.eval()
        with torch.no_grad():
            run.model(batches()[5][0])
        run.model(batches()[6][0])
        run.model.train()

    for point in "before", "forward", "backward":
        run.at(point, look)


@fault("zero_grad between forward and backward", PASSES, expect="same")
def _(run: Run) -> None:
    run.at("forward", run.zero_grad)


def _skips(run: Run) -> None:
    at_once(
        run, lambda: setattr(run.model, "skips", True), lambda: setattr(run.model, "skips", False)
    )


@fault("a layer unused on one rank", PASSES)
def _(run: Run) -> None:
    if run.culprit:
        _skips(run)


@fault("a layer unused on all ranks", PASSES, expect="any")
def _(run: Run) -> None:
    _skips(run)


@fault("a child is forked in mid-run", PASSES, expect="same", moments=LATER)
def _(run: Run) -> None:
    def go() -> None:
        pid = os.fork()
        if pid == 0:
            if run.workers == 1:
                run.state()
            os._exit(0)
        os.waitpid(pid, 0)

    run.at("before", go)


@fault("GradScaler skips a step", PASSES, suits=lambda system: system.size == 1)
def _(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.options["grad_scaler"] = scaler

    def take() -> None:
        run.optimizer.zero_grad()
        scaler.scale(run.loss(run.batch())).backward()
        if run.step == run.moment:
            run.model.first.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(run.optimizer)
        scaler.update()

    run.take = take  # type: ignore[method-assign]


@fault(
    "a GradScaler that the optimizer is not told of",
    PASSES,
    moments=("whole",),
    suits=lambda system: system.size == 1 and system.kfac,
    expect="raises",
)
def _(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def take() -> None:
        run.optimizer.zero_grad()
        scaler.scale(run.loss(run.batch())).backward()
        scaler.step(run.optimizer)
        scaler.update()

    run.take = take  # type: ignore[method-assign]


# ------------------------------------------------------------------------------- solves

ROUTINES = ("eigh", "cholesky_ex")


def solving(run: Run, spoil: Callable[[Any], Any], everywhere: bool = False) -> None:
    """Put `spoil(native)(matrix)` in the place of what decomposes, at the fault's step.

    In DHO2 on the first rank, whose small matrix counts for all.
    """
    if everywhere or (run.rank == 0 if run.system.kind is DHO2 else run.culprit):
        for name in ROUTINES:
            native = getattr(torch.linalg, name)
            run.replace(torch.linalg, name, spoil(native), 3 if threaded(run.system) else 1)


def raising(error: BaseException) -> Callable[[Any], Any]:
    def spoil(_: Any) -> Any:
        def routine(*_: Any, **__: Any) -> Any:
            raise error.with_traceback(None)

        return routine

    return spoil


def nan_solves(native: Any) -> Any:
    def routine(matrix: Tensor, *rest: Any, **more: Any) -> Any:
        found = native(matrix, *rest, **more)
        return type(found)(p * float("nan") if p.is_floating_point() else p for p in found)

    return routine


def _slow(native: Any) -> Any:
    first = [True]

    def routine(*rest: Any, **more: Any) -> Any:
        if first.pop() if first else False:
            time.sleep(1.5)
        return native(*rest, **more)

    return routine


def does_solve(system: System) -> bool:
    """DHO2's small problems and the factors' decompositions; accelerators have theirs below."""
    return not helped(system) or system.kfac


def _raises(error: BaseException, run: Run) -> None:
    solving(run, raising(error))


for _error in (
    torch.linalg.LinAlgError("injected: failed to converge"),  # type: ignore[attr-defined]
    KeyError("injected"),
    MemoryError("injected"),
    torch.OutOfMemoryError("injected: CUDA out of memory"),
    SystemExit("injected"),
    KeyboardInterrupt("injected"),
):
    _kind = type(_error).__name__
    fault(
        f"solves raise {_kind} on one rank",
        SOLVES,
        suits=does_solve,
        moments=BEGINNINGS if isinstance(_error, Exception) else ("refresh",),
        expect="told",
        errors=() if isinstance(_error, Exception) else (_kind,),
    )(partial(_raises, _error))


@fault("solves return NaN on one rank", SOLVES, suits=does_solve, moments=BEGINNINGS, expect="told")
def _(run: Run) -> None:
    solving(run, nan_solves)


@fault(
    "solves return NaN on all ranks from then on",
    SOLVES,
    suits=does_solve,
    moments=BEGINNINGS,
    expect="told",
)
def _(run: Run) -> None:
    for name in ROUTINES:
        run.replace(torch.linalg, name, nan_solves(getattr(torch.linalg, name)), 100)


@fault("a solve takes long on one rank", SOLVES, suits=does_solve, moments=("refresh",))
def _(run: Run) -> None:
    solving(run, _slow)


@fault("a solve hangs while the script ends", SOLVES, suits=threaded, moments=("refresh",))
def _(run: Run) -> None:
    def hangs(_: Any) -> Any:
        def routine(*_: Any, **__: Any) -> Any:
            time.sleep(1000)

        return routine

    run.closes = False
    run.options.update(max_staleness=None, deterministic=False)
    for name in ROUTINES:
        run.replace(torch.linalg, name, hangs(None), 100)


@fault("no thread can be started", SOLVES, suits=threaded, moments=("first",), expect="any")
def _(run: Run) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("injected: can't start new thread")

    if run.culprit:
        run.replace(threading.Thread, "start", start)


@fault(
    "the eigenvectors of one rank are NaN",
    SOLVES,
    suits=newton,
    moments=("refresh",),
    expect="told",
)
def _(run: Run) -> None:
    native = eigenpairs.extreme_pairs  # type: ignore[attr-defined]

    def pairs(*rest: Any, **more: Any) -> Any:
        found = native(*rest, **more)
        vectors = found.vectors

        def spoilt() -> Tensor:
            rows: Tensor = vectors()
            return rows * float("nan")

        object.__setattr__(found, "vectors", spoilt)
        return found

    if run.culprit:
        run.replace(eigenpairs, "extreme_pairs", pairs)


@fault(
    "eigh returns NaN once, on one rank", SOLVES, suits=newton, moments=("refresh",), expect="told"
)
def _(run: Run) -> None:
    solving(run, nan_solves)


# ---------------------------------------------------------------------------- curvature closures

CLOSURES = "curvature closures"


def curved(run: Run, loss: Callable[[], Any], everywhere: bool = False) -> None:
    """Another curvature loss at the fault's step."""
    if run.culprit or everywhere:
        usual = run.curvature_loss
        at_once(
            run,
            lambda: setattr(run, "curvature_loss", loss),
            lambda: setattr(run, "curvature_loss", usual),
        )


def _raise(_: Run) -> Any:
    raise Injected("no curvature batch")


LOSSES: dict[str, tuple[str, Callable[[Run], Any]]] = {
    "raises": ("raises", _raise),
    "returns NaN": ("told", lambda run: run.loss(run.batch()) * float("nan")),
    "returns inf": ("told", lambda run: run.loss(run.batch()) * float("inf")),
    "returns None": ("raises", lambda run: None),
    "returns a number": ("raises", lambda run: 1.0),
    "returns a vector": ("raises", lambda run: run.model(run.batch()[0])[:, 0]),
    "returns a constant tensor": ("raises", lambda run: torch.tensor(1.0)),
    "calls backward": ("raises", lambda run: run.loss(run.batch()).backward()),
    "has no examples": ("any", lambda run: (run.loss(run.batch()), 0)),
    "counts -3 examples": ("raises", lambda run: (run.loss(run.batch()), -3)),
}


def _curves(loss: Callable[[Run], Any], run: Run) -> None:
    curved(run, lambda: loss(run))


for _name, (_expect, _loss) in LOSSES.items():
    fault(f"{_name} on one rank", CLOSURES, suits=newton, moments=("refresh",), expect=_expect)(
        partial(_curves, _loss)
    )


@fault("is missing", CLOSURES, suits=newton, moments=("refresh",), expect="raises")
def _(run: Run) -> None:
    if run.culprit:
        run.at("before", lambda: setattr(run.optimizer, "curvature_closure", None))

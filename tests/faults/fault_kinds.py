"""The faults that `faults.py` injects into training runs: in numbers, passes, solves and closures.

Each is a function that attaches its fault to a `Run`. `expect` names the required result:

    same       training continues with the same numbers
    continues  training continues, possibly with other numbers
    reported   it continues with a warning, or ends with an error
    raises     it ends with an error, or continues with a warning
    any        no requirement beyond those of every case
"""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fault_scenes import Batch, Injected, Run, System, batches
from second_order import DHO2, DistKFAC
from second_order.fosi import update
from second_order.training import throttle

__all__ = ["FAULTS", "Fault", "fault"]

Install = Callable[[Run], None]
EACH = ("first", "refresh", "between")
LATER = ("refresh", "between")
BEGINNINGS = ("first", "refresh")
WHOLE = ("whole",)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        name: In lists.
        group: In the table.
        install: Installs the fault in a run.
        suits: Whether a system can have it.
        moments: When it happens; "whole" if that is not one step.
        expect: The required result.
        poisons: Whether the base alone would also end with non-finite parameters.
        alters: Whether less can be preconditioned afterwards.
        shards: Whether a model sharded by FSDP2 can have it.
        signals: Signals that are the fault itself.
        errors: Names of errors that are the fault itself.
        sizes: The number of processes of each phase.
    """

    name: str
    group: str
    install: Install
    suits: Callable[[System], bool] = lambda system: True
    moments: tuple[str, ...] = EACH
    expect: str = "continues"
    poisons: bool = False
    alters: bool = False
    shards: bool = False
    signals: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()
    sizes: Callable[[System], Sequence[int]] = lambda system: (system.size,)


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


def several_kfac(system: System) -> bool:
    return several(system) and kfac(system)


def threaded(system: System) -> bool:
    return system.kind is DistKFAC


def newton(system: System) -> bool:
    return system.kind is DHO2


def helped(system: System) -> bool:
    return system.helpers > 0


def alone(
    act: Callable[[Run], Any], point: str = "before", everywhere: bool = False
) -> Callable[[Run], None]:
    """Something that one rank does at the fault's step, or every one."""

    def install(run: Run) -> None:
        if everywhere or run.culprit:
            run.at(point, lambda: act(run))

    return install


# ------------------------------------------------------------------------- numbers and data

NUMBERS = "numbers and batches"


def with_batch(change: Callable[[Tensor, Tensor], Batch]) -> Install:
    """Another batch at the fault's step, on the culprit."""

    def install(run: Run) -> None:
        usual = run.batch
        if run.culprit:
            run.replace(run, "batch", lambda: change(*usual()))

    return install


def with_loss(loss: Callable[[Run, Any], Any], everywhere: bool = False) -> Install:
    """Another loss at the fault's step, on the culprit or on all."""

    def install(run: Run) -> None:
        if everywhere or run.culprit:
            run.replace(run, "loss", lambda batch: loss(run, batch))

    return install


def times(number: float) -> Callable[[Run, Any], Tensor]:
    return lambda run, batch: number * cross_entropy(run.model(batch[0]), batch[1])


def cast(run: Run, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(run.model(batch[0]), batch[1])


def empty(run: Run, batch: Any) -> Tensor:
    return cross_entropy(run.model(batch[0][:0]), batch[1][:0], reduction="sum")


def with_nan(x: Tensor, y: Tensor) -> Batch:
    return x.index_fill(0, torch.tensor([0]), float("nan")), y


def damage_gradient(run: Run) -> None:
    run.model.middle.weight.grad[0, 0] = float("nan")  # type: ignore[index]


def stop_learning(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group.update(lr=0.0)


fault("NaN in the inputs of one rank", NUMBERS, poisons=True, shards=True)(with_batch(with_nan))
fault("statistics of one rank overflow, gradients do not", NUMBERS, shards=True)(
    with_batch(lambda x, y: (x * 1e25, y))
)
fault("NaN in the gradient of one rank", NUMBERS, poisons=True)(alone(damage_gradient, "backward"))
fault("gradients of 1e20 on one rank", NUMBERS, poisons=True)(with_loss(times(1e20)))
fault("gradients of zero on one rank", NUMBERS, shards=True)(with_loss(times(0.0)))
fault("gradients of zero on all ranks", NUMBERS)(with_loss(times(0.0), everywhere=True))
fault("an empty batch on one rank", NUMBERS)(with_loss(empty))
fault("empty batches on all ranks", NUMBERS)(with_loss(empty, everywhere=True))
fault("bfloat16 autocast on one rank", NUMBERS)(with_loss(cast))
fault("a learning rate of 0 from then on", NUMBERS, shards=True)(
    alone(stop_learning, everywhere=True)
)


@fault("NaN in the inputs of one rank, the step is skipped by all", NUMBERS, alters=True)
def _(run: Run) -> None:
    with_batch(with_nan)(run)
    run.replace(run, "steps", False)


@fault("the loss is a hundred times as steep from then on", NUMBERS, suits=newton, poisons=True)
def _(run: Run) -> None:
    """The trust region must bound the next steps."""
    run.replace(run, "loss", lambda batch: times(100.0)(run, batch), steps=100)


def budgeted(system: System) -> bool:
    return newton(system) and "curvature_interval" not in system.options


def with_clock(seconds: Callable[[], float]) -> Install:
    def install(run: Run) -> None:
        if run.culprit:
            run.replace(throttle, "seconds_between", lambda start, end: seconds(), steps=100)

    return install


fault("a clock that runs back on one rank", NUMBERS, suits=budgeted)(
    with_clock(lambda: -time.perf_counter())
)
fault("a clock that jumps by hours on one rank", NUMBERS, suits=budgeted)(
    with_clock(lambda: time.perf_counter() + random.uniform(-1e4, 1e4))
)


# ------------------------------------------------------------------------------- passes

PASSES = "passes"


for _everywhere, _who in ((False, "one rank"), (True, "all ranks")):

    def _trains_not(run: Run, everywhere: bool = _everywhere) -> None:
        if everywhere or run.culprit:
            run.replace(run, "trains", False)

    def _skips(run: Run, everywhere: bool = _everywhere) -> None:
        if everywhere or run.culprit:
            run.on("model", lambda: run.replace(run.model, "skips", True))

    fault(f"a step without backward on {_who}", PASSES)(_trains_not)
    fault(f"a layer unused on {_who}", PASSES, expect="any" if _everywhere else "continues")(_skips)


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


fault("zero_grad between forward and backward", PASSES, expect="same")(
    alone(lambda run: run.optimizer.zero_grad(), "forward", everywhere=True)
)


@fault("a child is forked in mid-run", PASSES, expect="same", moments=LATER)
def _(run: Run) -> None:
    def go() -> None:
        pid = os.fork()
        if pid == 0:
            if run.workers == 1:
                run.optimizer.state_dict()
            os._exit(0)
        os.waitpid(pid, 0)

    run.at("before", go)


def with_scaler(run: Run, is_reported: bool) -> None:
    """A GradScaler, with an overflow at the fault's step if the optimizer has it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if is_reported:
        run.options["grad_scaler"] = scaler

    def take() -> None:
        run.optimizer.zero_grad()
        scaler.scale(run.loss(run.batch())).backward()
        if is_reported and run.step == run.moment:
            run.model.first.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(run.optimizer)
        scaler.update()

    run.take = take  # type: ignore[method-assign]


@fault("GradScaler skips a step", PASSES, suits=lambda system: system.size == 1)
def _(run: Run) -> None:
    with_scaler(run, is_reported=True)


@fault(
    "a GradScaler that the optimizer does not know",
    PASSES,
    moments=WHOLE,
    suits=lambda system: system.size == 1 and system.kfac,
    expect="raises",
)
def _(run: Run) -> None:
    with_scaler(run, is_reported=False)


# ------------------------------------------------------------------------------- solves

SOLVES = "solves"
ROUTINES = ("eigh", "cholesky_ex")
Damage = Callable[[Any], Any]


def does_solve(system: System) -> bool:
    """DHO2's small problems and the factors' decompositions; accelerators have theirs below."""
    return not helped(system) or system.kfac


def solving(run: Run, damage: Damage) -> None:
    """Replace the decomposition at the fault's step by `damage(native)(matrix)`.

    DHO2 uses the first rank's small matrix on all ranks, so the fault is on that rank.
    """
    is_culprit = run.culprit
    if run.system.kind is DHO2:
        is_culprit = run.rank == 0
    if is_culprit:
        for name in ROUTINES:
            native = getattr(torch.linalg, name)
            run.replace(torch.linalg, name, damage(native), 3 if threaded(run.system) else 1)


def changed(change: Callable[[Tensor], Tensor]) -> Damage:
    """Another result."""

    def damage(native: Any) -> Any:
        def routine(matrix: Tensor, *rest: Any, **more: Any) -> Any:
            found = native(matrix, *rest, **more)
            return type(found)(change(p) if p.is_floating_point() else p for p in found)

        return routine

    return damage


def raising(error: BaseException) -> Damage:
    def damage(_: Any) -> Any:
        def routine(*_: Any, **__: Any) -> Any:
            raise error.with_traceback(None)

        return routine

    return damage


def sleeping(seconds: float) -> Damage:
    """The first of them takes so long."""

    def damage(native: Any) -> Any:
        left = [seconds]

        def routine(*rest: Any, **more: Any) -> Any:
            time.sleep(left.pop() if left else 0.0)
            return native(*rest, **more)

        return routine

    return damage


nan_solves = changed(lambda t: t * float("nan"))
REPORTED: dict[str, Any] = {"expect": "reported"}
GARBAGE: dict[str, Any] = {"expect": "any", "poisons": True}  # undetectable, but ranks stay equal

# What solves do on one rank, when, and what follows.
DAMAGED: dict[str, tuple[Damage, tuple[str, ...], dict[str, Any]]] = {
    "solves return NaN": (nan_solves, BEGINNINGS, REPORTED),
    "solves return zeros": (changed(torch.zeros_like), BEGINNINGS, GARBAGE),
    "solves return noise": (
        changed(lambda t: torch.full_like(t, 0.3).cumsum(-1).sin()),
        BEGINNINGS,
        GARBAGE,
    ),
    "a solve takes long": (sleeping(1.5), ("refresh",), {}),
}
for _error in (
    torch.linalg.LinAlgError("injected: failed to converge"),  # type: ignore[attr-defined]
    MemoryError("injected"),
    SystemExit("injected"),
    KeyboardInterrupt("injected"),
):
    _kind = type(_error).__name__
    _usual = isinstance(_error, Exception)
    DAMAGED[f"solves raise {_kind}"] = (
        raising(_error),
        BEGINNINGS if _usual else ("refresh",),
        {**REPORTED, "errors": () if _usual else (_kind,)},
    )
for _name, (_damage, _moments, _rest) in DAMAGED.items():

    def _damaged(run: Run, damage: Damage = _damage) -> None:
        solving(run, damage)

    fault(f"{_name} on one rank", SOLVES, suits=does_solve, moments=_moments, shards=True, **_rest)(
        _damaged
    )


@fault(
    "solves return NaN on all ranks from then on",
    SOLVES,
    suits=does_solve,
    moments=BEGINNINGS,
    expect="reported",
    shards=True,
)
def _(run: Run) -> None:
    for name in ROUTINES:
        run.replace(torch.linalg, name, nan_solves(getattr(torch.linalg, name)), 100)


@fault("no thread can be started", SOLVES, suits=threaded, moments=("first",), expect="any")
def _(run: Run) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("injected: can't start new thread")

    if run.culprit:
        run.replace(threading.Thread, "start", start)


def with_pairs(run: Run, change: Callable[[Any], Any]) -> None:
    """Other eigenpairs of the refresh."""
    native = update.extreme_pairs  # type: ignore[attr-defined]
    run.replace(update, "extreme_pairs", lambda *rest, **more: change(native(*rest, **more)))


@fault(
    "the eigenvectors of one rank are NaN",
    SOLVES,
    suits=newton,
    moments=("refresh",),
    expect="reported",
)
def _(run: Run) -> None:
    def damaged(found: Any) -> Any:
        vectors = found.vectors
        object.__setattr__(found, "vectors", lambda: vectors() * float("nan"))
        return found

    if run.culprit:
        with_pairs(run, damaged)


@fault(
    "the eigenvalues are a millionth of what they are", SOLVES, suits=newton, moments=("refresh",)
)
def _(run: Run) -> None:
    """Newton steps are a million times as long as they have to be: the region shortens them."""
    run.options["newton_scale"] = 1.0
    with_pairs(run, lambda found: dataclasses.replace(found, values=1e-6 * found.values))


# ---------------------------------------------------------------------------- curvature closures

CLOSURES = "curvature closures"


def _raise(_: Run) -> Any:
    raise Injected("no curvature batch")


LOSSES: dict[str, tuple[str, Callable[[Run], Any]]] = {
    "raises": ("raises", _raise),
    "returns NaN": ("reported", lambda run: run.loss(run.batch()) * float("nan")),
    "returns None": ("raises", lambda run: None),
    "returns a number": ("raises", lambda run: 1.0),
    "returns a constant tensor": ("raises", lambda run: torch.tensor(1.0)),
    "calls backward": ("raises", lambda run: run.loss(run.batch()).backward()),
    "has no examples": ("any", lambda run: (run.loss(run.batch()), 0)),
    "counts -3 examples": ("raises", lambda run: (run.loss(run.batch()), -3)),
}

for _name, (_expect, _loss) in LOSSES.items():

    def _curves(run: Run, loss: Callable[[Run], Any] = _loss) -> None:
        if run.culprit:
            run.replace(run, "curvature_loss", lambda: loss(run))

    fault(f"{_name} on one rank", CLOSURES, suits=newton, moments=("refresh",), expect=_expect)(
        _curves
    )


@fault("is missing", CLOSURES, suits=newton, moments=("refresh",), expect="raises")
def _(run: Run) -> None:
    if run.culprit:
        run.at("before", lambda: setattr(run.optimizer, "curvature_closure", None))

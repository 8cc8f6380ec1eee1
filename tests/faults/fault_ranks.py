"""The faults that befall ranks: what one does alone, what all do, how they differ."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fault_kinds import (
    LATER,
    PASSES,
    does_solve,
    fault,
    helped,
    kfac,
    nan_solves,
    newton,
    several,
    solving,
    with_batch,
    with_loss,
)
from fault_scenes import Injected, Run, System, killed, stopped
from second_order import DHO2, MRDHO2

__all__: list[str] = []


def several_kfac(system: System) -> bool:
    return several(system) and kfac(system)


# --------------------------------------------------------------- what one rank does alone

ALONE = "one rank alone"


def alone(run: Run, act: Callable[[], Any], point: str = "before") -> None:
    if run.culprit:
        run.at(point, act)


@fault("freezes a layer", ALONE, suits=several, expect="raises", alters=True)
def _(run: Run) -> None:
    alone(run, lambda: run.model.middle.requires_grad_(False))


@fault(
    "freezes a layer between backward and step",
    ALONE,
    suits=several,
    expect="raises",
    alters=True,
    moments=LATER,
)
def _(run: Run) -> None:
    alone(run, lambda: run.model.middle.requires_grad_(False), "backward")


@fault("unfreezes a layer", ALONE, suits=several, expect="raises")
def _(run: Run) -> None:
    run.on("model", lambda: run.model.middle.requires_grad_(False))
    run.on("made", lambda: run.optimizer.add_param_group({"params": run.model.middle.parameters()}))
    alone(run, lambda: run.model.middle.requires_grad_(True))


def _hold_back(run: Run) -> None:
    """Leave the last layer to a group that is added later."""

    def make() -> Any:
        first = [p for n, p in run.model.named_parameters() if not n.startswith("last")]
        return run.system.kind(first, model=run.model, **run.options)

    run.make = make  # type: ignore[method-assign]


@fault("adds a group", ALONE, suits=several, expect="raises")
def _(run: Run) -> None:
    _hold_back(run)
    alone(run, lambda: run.optimizer.add_param_group({"params": run.model.last.parameters()}))


@fault("loads a checkpoint", ALONE, suits=several, expect="raises", moments=LATER)
def _(run: Run) -> None:
    state: list[Any] = []
    run.on("stepped", lambda: state.append(run.saved()), 1)
    alone(run, lambda: run.optimizer.load_state_dict(state[0]))


@fault("closes", ALONE, suits=several, expect="raises", moments=LATER)
def _(run: Run) -> None:
    alone(run, run.close)


@fault("calls consolidate()", ALONE, suits=several, expect="any", moments=("between",))
def _(run: Run) -> None:
    alone(run, lambda: run.optimizer.consolidate(to=0))


@fault("calls state_dict()", ALONE, suits=several, expect="any", moments=LATER)
def _(run: Run) -> None:
    alone(run, run.state)


@fault("skips a step", ALONE, suits=several, expect="raises")
def _(run: Run) -> None:
    def skip() -> None:
        run.steps = run.step != run.moment

    alone(run, skip)


@fault("leaves by sys.exit()", ALONE, suits=several, expect="raises", errors=("SystemExit",))
def _(run: Run) -> None:
    alone(run, lambda: sys.exit(3))


@fault("raises in the loss", ALONE, suits=several, expect="raises")
def _(run: Run) -> None:
    def loss(_: Any) -> Tensor:
        raise Injected("the data are gone")

    if run.culprit:
        with_loss(run, loss)


@fault("raises in a closure", ALONE, suits=several, expect="raises")
def _(run: Run) -> None:
    def closure() -> Any:
        if run.culprit and run.step == run.moment:
            raise Injected("the data are gone")
        run.optimizer.zero_grad()
        loss = run.loss(run.batch())
        loss.backward()
        return loss

    run.take = lambda: run.optimizer.step(closure)  # type: ignore[method-assign]


@fault("raises in a closure on all ranks, which catch it", PASSES)
def _(run: Run) -> None:
    usual = run.take

    def closure() -> Any:
        raise Injected("the data are gone")

    def take() -> None:
        if run.step == run.moment:
            with contextlib.suppress(Injected):
                run.optimizer.step(closure)
        usual()

    run.take = take  # type: ignore[method-assign]


@fault("is killed", ALONE, suits=several, expect="raises", signals=(signal.SIGKILL,))
def _(run: Run) -> None:
    alone(run, lambda: killed(run))


@fault(
    "is ended by SIGTERM",
    ALONE,
    suits=several,
    expect="raises",
    signals=(signal.SIGTERM,),
    moments=("between",),
)
def _(run: Run) -> None:
    alone(run, lambda: run.signal(signal.SIGTERM))


@fault(
    "is interrupted by Ctrl-C", ALONE, suits=several, expect="raises", errors=("KeyboardInterrupt",)
)
def _(run: Run) -> None:
    alone(run, lambda: run.signal(signal.SIGINT), "forward")


@fault("is stopped for a second", ALONE, suits=several, moments=("refresh",))
def _(run: Run) -> None:
    alone(run, lambda: stopped(run, 1.0))


@fault("is stopped for good", ALONE, suits=several, moments=("between",), expect="raises")
def _(run: Run) -> None:
    alone(run, lambda: os.kill(os.getpid(), signal.SIGSTOP))


# -------------------------------------------------------------------- differences from the start

UNLIKE = "ranks made differently"


def unlike(run: Run, **options: Any) -> None:
    if run.culprit:
        run.options.update(options)


@fault("another base", UNLIKE, suits=several, moments=("whole",), expect="raises")
def _(run: Run) -> None:
    if run.culprit:
        del run.options["momentum"]
        run.options["base"] = torch.optim.Adam


@fault("another learning rate", UNLIKE, suits=several, moments=("whole",), expect="raises")
def _(run: Run) -> None:
    unlike(run, lr=0.1)


@fault("another interval", UNLIKE, suits=several, moments=("whole",), expect="raises")
def _(run: Run) -> None:
    name = {DHO2: "curvature_interval", MRDHO2: "epoch_steps"}.get(run.system.kind)
    unlike(run, **{name or "inv_update_steps": 5})


@fault(
    "another interval, by a callable",
    UNLIKE,
    suits=lambda system: several(system) and system.kind is not MRDHO2,
    moments=("whole",),
    expect="raises",
)
def _(run: Run) -> None:
    name = "curvature_interval" if run.system.kind is DHO2 else "inv_update_steps"
    run.options[name] = (lambda step: 2) if run.culprit else (lambda step: 3)


@fault(
    "another damping, by a callable", UNLIKE, suits=several_kfac, moments=("whole",), expect="any"
)
def _(run: Run) -> None:
    run.options["damping"] = (lambda step: 0.5) if run.culprit else (lambda step: 1.0)


@fault(
    "a callable where the others have a number",
    UNLIKE,
    suits=several_kfac,
    moments=("whole",),
    expect="raises",
)
def _(run: Run) -> None:
    unlike(run, inv_update_steps=lambda step: 3)


@fault(
    "an interval that raises",
    UNLIKE,
    suits=lambda system: system.kind is not MRDHO2,
    expect="raises",
)
def _(run: Run) -> None:
    def interval(step: int) -> int:
        if step >= run.moment and run.culprit:
            raise Injected("no such step")
        return 3

    name = "curvature_interval" if run.system.kind is DHO2 else "inv_update_steps"
    run.options[name] = interval


@fault("another width", UNLIKE, suits=several, moments=("whole",), expect="raises")
def _(run: Run) -> None:
    if run.culprit:
        run.width = 9


@fault("another dtype", UNLIKE, suits=several, moments=("whole",), expect="raises")
def _(run: Run) -> None:
    if run.culprit:
        run.on("model", lambda: setattr(run, "model", run.model.double()))


@fault("a frozen layer", UNLIKE, suits=several, moments=("whole",), expect="raises")
def _(run: Run) -> None:
    if run.culprit:
        run.on("model", lambda: run.model.middle.requires_grad_(False))


@fault("another seed of the parameters", UNLIKE, suits=several, moments=("whole",))
def _(run: Run) -> None:
    def other() -> None:
        torch.manual_seed(run.rank)
        for p in run.model.parameters():
            torch.nn.init.normal_(p)

    run.on("model", other)


@fault("an option out of bounds", UNLIKE, moments=("whole",), expect="raises")
def _(run: Run) -> None:
    unlike(run, lr=-1.0)


@fault(
    "an exception before the optimizer is made",
    UNLIKE,
    suits=several,
    moments=("whole",),
    expect="raises",
)
def _(run: Run) -> None:
    def leave() -> None:
        raise Injected("no such model")

    if run.culprit:
        run.on("model", leave)


# --------------------------------------------------------------------------- what all do

TOGETHER = "all ranks"


@fault("freeze a layer", TOGETHER, alters=True)
def _(run: Run) -> None:
    run.at("before", lambda: run.model.middle.requires_grad_(False))


@fault("freeze a layer between backward and step", TOGETHER, alters=True)
def _(run: Run) -> None:
    run.at("backward", lambda: run.model.middle.requires_grad_(False))


@fault("unfreeze a layer", TOGETHER)
def _(run: Run) -> None:
    run.on("made", lambda: run.model.middle.requires_grad_(False))
    run.at("before", lambda: run.model.middle.requires_grad_(True))


@fault("add a group", TOGETHER, suits=lambda system: not helped(system) or system.kfac)
def _(run: Run) -> None:
    _hold_back(run)
    run.at("before", lambda: run.optimizer.add_param_group({"params": run.model.last.parameters()}))


@fault("close and go on", TOGETHER, moments=LATER, alters=True)
def _(run: Run) -> None:
    run.at("before", run.close)
    run.on("ending", run.close)


@fault("leave by sys.exit()", TOGETHER, errors=("SystemExit",), expect="raises")
def _(run: Run) -> None:
    run.closes = False
    run.at("before", lambda: sys.exit(3))


@fault("raise in the loss", TOGETHER, expect="raises")
def _(run: Run) -> None:
    def loss(_: Any) -> Tensor:
        raise Injected("the data are gone")

    with_loss(run, loss)


@fault("are interrupted by Ctrl-C", TOGETHER, errors=("KeyboardInterrupt",), expect="raises")
def _(run: Run) -> None:
    run.at("forward", lambda: run.signal(signal.SIGINT))
    if run.helps:
        run.on("helper_loss", lambda: run.signal(signal.SIGINT))


@fault("end without close()", TOGETHER, moments=("whole",))
def _(run: Run) -> None:
    run.closes = False


@fault("keep the optimizer in a cycle, and end without close()", TOGETHER, moments=("whole",))
def _(run: Run) -> None:
    run.closes = False
    run.on("made", lambda: setattr(run.model, "optimizer", run.optimizer))


@fault(
    "make a second optimizer, dropping the first",
    TOGETHER,
    moments=LATER,
    suits=lambda system: not helped(system),
)
def _(run: Run) -> None:
    def again() -> None:
        run.optimizer = run.make()
        if newton(run.system):
            run.optimizer.curvature_closure = run.curved

    run.at("before", again)


# ------------------------------------------------------------------------- warnings as errors

WARNED = "warnings as errors"
RAISED = ("SecondOrderWarning",)


def strict(run: Run, everywhere: bool, point: str) -> None:
    if everywhere or run.culprit:
        run.on(point, lambda: warnings.simplefilter("error"))


for _everywhere, _who in ((False, "one rank"), (True, "all ranks")):
    for _point, _when in (("model", "from the start"), ("made", "once it is made")):

        def _install(run: Run, everywhere: bool = _everywhere, point: str = _point) -> None:
            strict(run, everywhere, point)
            solving(run, nan_solves)

        fault(
            f"on {_who} {_when}, where a solve fails",
            WARNED,
            moments=("refresh",),
            expect="any",
            errors=RAISED,
            suits=does_solve,
        )(_install)


@fault(
    "on one rank, where a statistic overflows",
    WARNED,
    suits=several_kfac,
    moments=("refresh",),
    expect="any",
    errors=RAISED,
)
def _(run: Run) -> None:
    strict(run, False, "made")
    with_batch(run, lambda x, y: (x * 1e25, y))

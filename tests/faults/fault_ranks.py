"""The faults that befall ranks: what one does alone, what all do, how they differ; and helpers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fault_kinds import (
    LATER,
    PASSES,
    WHOLE,
    alone,
    does_solve,
    fault,
    helped,
    nan_solves,
    newton,
    several,
    several_kfac,
    solving,
    with_loss,
)
from fault_scenes import Injected, Run, System
from second_order import DHO2, KAISA, MRDHO2
from second_order.utils.checks import AUTO

__all__: list[str] = []


def leave(*_: Any, **__: Any) -> Any:
    raise Injected("the data are gone")


def freeze(run: Run) -> None:
    run.model.middle.requires_grad_(False)


def unfreeze(run: Run) -> None:
    run.model.middle.requires_grad_(True)


def add_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": run.model.last.parameters()})


def close(run: Run) -> None:
    run.optimizer.close()


def stop(_: Run) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def send(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.signal(number)


def hold_back(run: Run) -> None:
    """Leave the last layer to a group that is added later."""

    def make() -> Any:
        first = [p for n, p in run.model.named_parameters() if not n.startswith("last")]
        return run.system.kind(first, model=run.model, **run.options)

    run.make = make  # type: ignore[method-assign]


def interval_of(system: System) -> str:
    names = {DHO2: "curvature_interval", MRDHO2: "epoch_steps"}
    return names.get(system.kind, "inv_update_steps")


# --------------------------------------------------------------- what one rank does alone

by_one = partial(fault, group="one rank alone", suits=several, expect="raises")

by_one("freezes a layer", alters=True)(alone(freeze))
by_one("freezes a layer between backward and step", alters=True, moments=LATER)(
    alone(freeze, "backward")
)
by_one("closes", moments=LATER)(alone(close))
by_one("calls consolidate()", expect="any", moments=("between",))(
    alone(lambda run: run.optimizer.consolidate(to=0))
)
by_one("calls state_dict()", expect="any", moments=LATER)(
    alone(lambda run: run.optimizer.state_dict())
)
by_one("skips a step")(alone(lambda run: run.replace(run, "steps", False)))
by_one("leaves by sys.exit()", errors=("SystemExit",))(alone(lambda run: sys.exit(3)))
by_one("raises in the loss")(with_loss(leave))
by_one("is killed", signals=(signal.SIGKILL,))(alone(send(signal.SIGKILL)))
by_one("is ended by SIGTERM", signals=(signal.SIGTERM,), moments=("between",))(
    alone(send(signal.SIGTERM))
)
by_one("is interrupted by Ctrl-C", errors=("KeyboardInterrupt",))(
    alone(send(signal.SIGINT), "forward")
)
by_one("is slow by two seconds", expect="continues", shards=True)(
    alone(lambda run: time.sleep(2.0))
)
by_one("is stopped for good", moments=("between",))(alone(stop))


@by_one("unfreezes a layer")
def _(run: Run) -> None:
    run.on("model", lambda: freeze(run))
    run.on("made", lambda: run.optimizer.add_param_group({"params": run.model.middle.parameters()}))
    alone(unfreeze)(run)


@by_one("adds a group")
def _(run: Run) -> None:
    hold_back(run)
    alone(add_group)(run)


@by_one("loads a checkpoint", moments=LATER)
def _(run: Run) -> None:
    state: list[Any] = []
    run.on("stepped", lambda: state.append(run.saved()), 1)
    alone(lambda run: run.optimizer.load_state_dict(state[0]))(run)


@by_one("raises in a closure")
def _(run: Run) -> None:
    def closure() -> Any:
        if run.culprit and run.step == run.moment:
            leave()
        run.optimizer.zero_grad()
        loss = run.loss(run.batch())
        loss.backward()
        return loss

    run.take = lambda: run.optimizer.step(closure)  # type: ignore[method-assign]


@by_one("raises in the step of the base")
def _(run: Run) -> None:
    class Base(torch.optim.SGD):
        def step(self, *arguments: Any) -> Any:
            return leave() if run.culprit and run.step == run.moment else super().step(*arguments)

    run.options["base"] = Base


@fault("raises in a closure on all ranks, which catch it", PASSES)
def _(run: Run) -> None:
    def fail() -> None:
        with contextlib.suppress(Injected):
            run.optimizer.step(leave)

    run.at("before", fail)


# -------------------------------------------------------------------- differences from the start

unlike = partial(
    fault, group="ranks made differently", suits=several, moments=WHOLE, expect="raises"
)
# Options of one rank.
OTHERS: dict[str, tuple[Callable[[System], bool], Callable[[System], dict[str, Any]]]] = {
    "another base": (several, lambda s: {"base": torch.optim.RMSprop}),
    "another learning rate": (several, lambda s: {"lr": 0.1}),
    "another interval": (several, lambda s: {interval_of(s): 5}),
    "an interval that is measured by all, and taken from a number by one": (
        several_kfac,
        lambda s: {"inv_update_steps": AUTO},
    ),
    "another trust region": (
        lambda s: several(s) and newton(s),
        lambda s: {"trust_region": False},
    ),
    "another exchange of factors": (
        lambda s: several(s) and s.kind is KAISA,
        lambda s: {"factor_exchange": "reduce", "grad_worker_fraction": 0.1},
    ),
    "another final update": (
        lambda s: several(s) and s.kind is MRDHO2,
        lambda s: {"final_update": "guarded"},
    ),
    "another solver": (several_kfac, lambda s: {"solver": "eigen", "damping": 0.3}),
    "an option out of bounds": (lambda s: True, lambda s: {"lr": -1.0}),
}
SHARDED = ("another learning rate", "another interval", "another solver", "an option out of bounds")
for _name, (_suits, _options) in OTHERS.items():

    def _other(run: Run, options: Callable[[System], dict[str, Any]] = _options) -> None:
        if run.culprit:
            run.options.update(options(run.system))

    unlike(_name, suits=_suits, shards=_name in SHARDED)(_other)


@unlike("another interval, by a callable", suits=lambda s: several(s) and s.kind is not MRDHO2)
def _(run: Run) -> None:
    run.options[interval_of(run.system)] = (lambda s: 2) if run.culprit else (lambda s: 3)


@unlike("another damping, by a callable", suits=several_kfac, expect="any")
def _(run: Run) -> None:
    run.options["damping"] = (lambda step: 0.5) if run.culprit else (lambda step: 1.0)


@unlike("an interval that raises", suits=lambda s: s.kind is not MRDHO2, moments=("refresh",))
def _(run: Run) -> None:
    def interval(step: int) -> int:
        return int(leave()) if step >= run.moment and run.culprit else 3

    run.options[interval_of(run.system)] = interval


@unlike("another width")
def _(run: Run) -> None:
    if run.culprit:
        run.width = 9


# What one rank does once it has a model.
MODELS: dict[str, Callable[[Run], Any]] = {
    "another dtype": lambda run: run.model.double(),
    "a frozen layer": freeze,
    "an exception before the optimizer is made": leave,
}
for _name, _act in MODELS.items():

    def _model(run: Run, act: Callable[[Run], Any] = _act) -> None:
        if run.culprit:
            run.on("model", lambda: act(run))

    unlike(_name)(_model)


@unlike("another seed of the parameters", expect="continues")
def _(run: Run) -> None:
    def other() -> None:
        torch.manual_seed(run.rank)
        for p in run.model.parameters():
            torch.nn.init.normal_(p)

    run.on("model", other)


# --------------------------------------------------------------------------- what all do

together = partial(fault, group="all ranks")

together("freeze a layer", alters=True)(alone(freeze, everywhere=True))
together("freeze a layer between backward and step", alters=True)(
    alone(freeze, "backward", everywhere=True)
)
together("raise in the loss", expect="raises")(with_loss(leave, everywhere=True))


@together("unfreeze a layer")
def _(run: Run) -> None:
    run.on("made", lambda: freeze(run))
    alone(unfreeze, everywhere=True)(run)


@together("add a group", suits=lambda system: not helped(system) or system.kfac)
def _(run: Run) -> None:
    hold_back(run)
    alone(add_group, everywhere=True)(run)


@together("close and continue", moments=LATER, alters=True)
def _(run: Run) -> None:
    alone(close, everywhere=True)(run)
    run.on("ending", lambda: close(run))


@together("leave by sys.exit()", errors=("SystemExit",), expect="raises")
def _(run: Run) -> None:
    run.closes = False
    run.at("before", lambda: sys.exit(3))


@together("are interrupted by Ctrl-C", errors=("KeyboardInterrupt",), expect="raises")
def _(run: Run) -> None:
    run.at("forward", lambda: run.signal(signal.SIGINT))
    if run.helps:
        run.on("helper_loss", lambda: run.signal(signal.SIGINT))


@together("end without close()", moments=WHOLE, shards=True)
def _(run: Run) -> None:
    run.closes = False


@together(
    "make a second optimizer, dropping the first", moments=LATER, suits=lambda s: not helped(s)
)
def _(run: Run) -> None:
    def again() -> None:
        run.optimizer = run.make()
        if newton(run.system):
            run.optimizer.curvature_closure = run.curved

    run.at("before", again)


for _everywhere, _who in ((False, "one rank"), (True, "all ranks")):
    for _point, _when in (("model", "from the start"), ("made", "once it is made")):

        def _strict(run: Run, everywhere: bool = _everywhere, point: str = _point) -> None:
            if everywhere or run.culprit:
                run.on(point, lambda: warnings.simplefilter("error"))
            solving(run, nan_solves)

        fault(
            f"on {_who} {_when}, where a solve fails",
            "warnings as errors",
            moments=("refresh",),
            expect="any",
            errors=("SecondOrderWarning",),
            suits=does_solve,
        )(_strict)


# ----------------------------------------------------------------------------------- helpers

of_helpers = partial(fault, group="helpers", suits=helped, moments=WHOLE, expect="reported")


def stop_for_a_second(_: Run) -> None:
    here = os.getpid()
    child = os.fork()
    if child == 0:
        time.sleep(1.0)
        os.kill(here, signal.SIGCONT)
        os._exit(0)
    os.kill(here, signal.SIGSTOP)
    os.waitpid(child, 0)


# What a helper does, at which point, at which call, and what follows.
Helped = tuple[Callable[[Run], Any], str, "int | None", dict[str, Any]]
KILLED = {"signals": (signal.SIGKILL,)}
EXITS = {"errors": ("SystemExit",)}
DONE: dict[str, Helped] = {
    "is killed": (send(signal.SIGKILL), "helper_loss", 1, KILLED),
    "is killed at its second batch": (  # it may not come to that batch
        send(signal.SIGKILL),
        "helper_loss",
        2,
        {**KILLED, "expect": "any"},
    ),
    "is killed before it serves": (send(signal.SIGKILL), "serving", None, KILLED),
    "is stopped for good": (stop, "helper_loss", 1, {"expect": "continues"}),
    "is stopped for a second": (stop_for_a_second, "helper_loss", 1, {"expect": "continues"}),
    "raises": (leave, "helper_loss", 1, {}),
    "leaves by sys.exit()": (lambda run: sys.exit(3), "helper_loss", 1, EXITS),
    "never serves": (lambda run: sys.exit(0), "made", None, {**EXITS, "expect": "any"}),
    "has no batches": (lambda run: run.batches.clear(), "made", None, {}),
}
for _name, (_act, _point, _count, _rest) in DONE.items():

    def _does(
        run: Run, act: Callable[[Run], Any] = _act, point: str = _point, count: Any = _count
    ) -> None:
        if run.helps:
            run.on(point, lambda: act(run), count)

    of_helpers(_name, **_rest)(_does)


@of_helpers("has a loss that is NaN")
def _(run: Run) -> None:
    usual: Callable[[Any], Tensor] = run.helper_loss
    if run.helps:
        run.helper_loss = lambda batch: usual(batch) * float("nan")  # type: ignore[method-assign]


# ------------------------------------------------------------------------ unknown processes


def listening() -> list[int]:
    """The ports at which this process listens."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - some vanish during the loop
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            inodes.add(target.removeprefix("socket:[").rstrip("]"))
    ports = set()
    for table in "tcp", "tcp6":
        with open(f"/proc/self/net/{table}") as file:  # noqa: PTH123
            lines = [line.split() for line in file.read().splitlines()[1:]]
        own_ports = [line[1] for line in lines if line[3] == "0A" and line[9] in inodes]
        ports |= {int(place.rpartition(":")[2], 16) for place in own_ports}
    return sorted(ports)


def send_noise(port: int) -> None:
    noise = random.Random(0).randbytes(1 << 16)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port), 2.0) as line:
            line.settimeout(0.5)
            with contextlib.suppress(OSError):
                line.sendall(noise)
                line.recv(100)


def say_nothing(port: int) -> None:
    lines = [socket.create_connection(("127.0.0.1", port), 2.0) for _ in range(30)]
    time.sleep(1.5)
    for line in lines:
        line.close()


for _name, _visit in (
    ("send 64 KiB of noise", send_noise),
    ("connect, and say nothing", say_nothing),
):

    def _visited(run: Run, visit: Callable[[int], None] = _visit) -> None:
        """Other processes connect to the helper's ports while it serves, those of gloo included."""

        def look() -> None:
            for port in listening():
                if os.fork() == 0:
                    signal.alarm(4)
                    try:
                        visit(port)
                    finally:
                        os._exit(0)

        if run.helps:
            run.on("serving", look)

    fault(_name, "strangers", suits=helped, moments=WHOLE)(_visited)

"""The faults of single features: trust region, budgets, presets, epochs, files of checkpoints."""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fault_checkpoints import GROUP, part_with, tampered
from fault_helpers import HELPERS, helper
from fault_kinds import (
    BEGINNINGS,
    EACH,
    NUMBERS,
    SOLVES,
    does_solve,
    fault,
    helped,
    kfac,
    several,
    solving,
    with_loss,
)
from fault_ranks import ALONE, UNLIKE, alone, unlike
from fault_scenes import Injected, Net, Run, System, killed
from second_order import DHO2, KAISA, MRDHO2
from second_order.budget import RefreshBudget, Stopwatch
from second_order.fosi import eigenpairs
from second_order.kronecker.layers import KINDS
from second_order.options import AUTO

__all__: list[str] = []

# ------------------------------------------------------------------------ what one rank does alone


@fault("is slow by two seconds", ALONE, suits=several, moments=EACH)
def _(run: Run) -> None:
    alone(run, lambda: time.sleep(2.0))


@fault("raises in backward", ALONE, suits=several, expect="raises")
def _(run: Run) -> None:
    def leave(_: Tensor) -> None:
        raise Injected("the gradient is gone")

    def loss(batch: Any) -> Tensor:
        found = cross_entropy(run.model(batch[0]), batch[1])
        found.register_hook(leave)
        return found

    if run.culprit:
        with_loss(run, loss)


@fault("raises in the step of the base", ALONE, suits=several, expect="raises")
def _(run: Run) -> None:
    def step(*_: Any, **__: Any) -> None:
        raise Injected("the base is broken")

    if run.culprit:
        run.replace(torch.optim.SGD, "step", step)


@fault(
    "has no memory for statistics",
    ALONE,
    suits=lambda system: several(system) and system.kfac,
    expect="raises",
    moments=BEGINNINGS,
)
def _(run: Run) -> None:
    native = KINDS[nn.Linear]

    def statistics(*given: Any) -> Any:
        if run.step == run.moment:
            raise torch.OutOfMemoryError("injected: out of memory")
        return native.statistics(*given)

    if run.culprit and not run.helps:
        KINDS[nn.Linear] = dataclasses.replace(native, statistics=statistics)


@fault("has inf in its gradient", NUMBERS, poisons=True)
def _(run: Run) -> None:
    def spoil() -> None:
        run.model.last.bias.grad[0] = float("inf")  # type: ignore[index]

    if run.culprit:
        run.at("backward", spoil)


# ---------------------------------------------------------------- decompositions that are garbage


def garbage(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Another result of what decomposes: finite, and wrong."""

    def spoil(native: Any) -> Any:
        def routine(matrix: Tensor, *rest: Any, **more: Any) -> Any:
            found = native(matrix, *rest, **more)
            return type(found)(change(p) if p.is_floating_point() else p for p in found)

        return routine

    return spoil


GARBAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "negative numbers": lambda t: -t,
    "numbers a million times too large": lambda t: 1e6 * t,
    "noise": lambda t: torch.full_like(t, 0.3).cumsum(-1).sin(),
}
for _name, _change in GARBAGE.items():

    def _garbage(run: Run, change: Any = _change) -> None:
        solving(run, garbage(change))

    fault(
        f"solves return {_name} on one rank",
        SOLVES,
        suits=does_solve,
        moments=BEGINNINGS,
        expect="any",
        poisons=True,  # nobody can tell; the ranks stay together all the same
    )(_garbage)


# ------------------------------------------------------------------------------- the trust region


def trusting(system: System) -> bool:
    return system.kind is DHO2


@fault(
    "the eigenvalues are a millionth of what they are",
    SOLVES,
    suits=trusting,
    moments=("refresh",),
)
def _(run: Run) -> None:
    """Newton steps are a million times as long as they have to be: the region shortens them."""
    native = eigenpairs.extreme_pairs  # type: ignore[attr-defined]

    def pairs(*rest: Any, **more: Any) -> Any:
        found = native(*rest, **more)
        return dataclasses.replace(found, values=1e-6 * found.values)

    run.options["newton_scale"] = 1.0
    run.replace(eigenpairs, "extreme_pairs", pairs)


@fault("the loss is a hundred times as steep from then on", NUMBERS, suits=trusting, poisons=True)
def _(run: Run) -> None:
    usual = run.loss

    def steep(batch: Any) -> Any:
        return 100.0 * usual(batch)

    run.at("before", lambda: setattr(run, "loss", steep))


# ---------------------------------------------------------------------------- intervals by budget


def budgeted(system: System) -> bool:
    return system.kind is DHO2 and "curvature_interval" not in system.options


def _clock(run: Run, seconds: Callable[[], float]) -> None:
    if run.culprit:
        run.replace(Stopwatch, "_mark", lambda self: seconds(), steps=100)
        run.replace(RefreshBudget, "now", lambda self: seconds(), steps=100)


@fault("a clock that stands still on one rank", NUMBERS, suits=budgeted, moments=EACH)
def _(run: Run) -> None:
    _clock(run, lambda: 1.0)


@fault("a clock that runs back on one rank", NUMBERS, suits=budgeted, moments=EACH)
def _(run: Run) -> None:
    _clock(run, lambda: -time.perf_counter())


@fault("a clock that jumps by hours on one rank", NUMBERS, suits=budgeted, moments=EACH)
def _(run: Run) -> None:
    jumps = random.Random(0)
    _clock(run, lambda: time.perf_counter() + jumps.uniform(-1e4, 1e4))


@fault(
    "an interval that is measured by all, and taken from a number by one",
    UNLIKE,
    suits=lambda system: several(system) and system.kfac,
    moments=("whole",),
    expect="raises",
)
def _(run: Run) -> None:
    unlike(run, inv_update_steps=AUTO)


# -------------------------------------------------------------------- options that ranks differ in

OTHERS: dict[str, tuple[Callable[[System], bool], dict[str, Any]]] = {
    "another preset": (lambda s: s.kind is DHO2, {"preset": "full-batch"}),
    "another trust region": (lambda s: s.kind is DHO2, {"trust_region": False}),
    "another overhead": (lambda s: s.kind in (KAISA, DHO2), {"overhead": 0.07}),
    "another exchange of factors": (
        lambda s: s.kind is KAISA,
        {"factor_exchange": "reduce", "grad_worker_fraction": 0.1},
    ),
    "another final update": (lambda s: s.kind is MRDHO2, {"final_update": "paper"}),
    "another number of first steps": (lambda s: not s.kfac, {"warmup_steps": 4}),
    "another solver": (kfac, {"solver": "eigen", "damping": 0.3}),
}
for _name, (_suits, _options) in OTHERS.items():

    def _other(run: Run, options: dict[str, Any] = _options) -> None:
        unlike(run, **options)

    def _fits(system: System, suits: Callable[[System], bool] = _suits) -> bool:
        return several(system) and suits(system)

    fault(_name, UNLIKE, suits=_fits, moments=("whole",), expect="raises")(_other)


# ----------------------------------------------------------------------------------- accelerators


for _count, _when in ((2, "its second batch"), (3, "its third batch")):

    def _late(run: Run, count: int = _count) -> None:
        helper(run, lambda: killed(run), count)

    fault(
        f"is killed at {_when}",
        HELPERS,
        suits=helped,
        moments=("whole",),
        expect="any",  # it may not come to that batch
        signals=(signal.SIGKILL,),
    )(_late)


# ------------------------------------------------------------------------------------ checkpoints


def _of_another(run: Run, _: dict[str, Any]) -> Any:
    """The checkpoint of one of our own that is not this one, of the same model."""
    model = Net(run.width)
    other: Any = DHO2 if run.system.kfac else KAISA
    steps = {"warmup_steps": 0} if run.system.kfac else {}
    group = run.optimizer.worker_group if run.system.helpers else None
    optimizer = other(model, lr=0.05, momentum=0.9, process_group=group, **steps)
    x, y = run.batch()
    cross_entropy(model(x), y).backward()
    if other is DHO2:
        optimizer.step(curvature_closure=lambda: cross_entropy(model(x), y))
    else:
        optimizer.step()
    optimizer.consolidate(to=None)
    state = optimizer.state_dict()
    optimizer.close()
    return state


tampered("of another of these optimizers", _of_another)
tampered("of a version to come", lambda _, state: part_with(state, "steps").update(version=99))


def loaded(run: Run, change: Callable[[dict[str, Any]], None]) -> None:
    """All load a checkpoint that has been changed, and have to be able to."""

    def go() -> None:
        state = run.saved()
        change(state)
        run.optimizer.load_state_dict(state)

    if not run.helps:
        run.at("before", go)


@fault("of an older version", GROUP, moments=("between",))
def _(run: Run) -> None:
    def older(state: dict[str, Any]) -> None:
        for entry in state["state"].values():
            for key in ("version", "base_class"):
                entry.get("curvature", {}).pop(key, None)

    loaded(run, older)


def from_file(name: str, spoil: Callable[[bytes], bytes]) -> None:
    """A fault of the file, which `torch.load` or the optimizer refuses."""

    def install(run: Run) -> None:
        def go() -> None:
            path = run.directory / f"spoilt.{run.rank}"
            torch.save(run.saved(), path)
            path.write_bytes(spoil(path.read_bytes()))
            try:
                state = torch.load(path)
            except Exception as error:  # torch's own
                run.catch(Injected(f"torch.load: {type(error).__name__}: {error}"))
                return
            try:
                run.optimizer.load_state_dict(state)
            except Exception as error:
                run.catch(error)
            else:
                run.note("accepted: the checkpoint loads")

        if not run.helps:
            run.at("before", go)

    fault(name, GROUP, moments=("between",), expect="same")(install)


def _noise(whole: bytes) -> bytes:
    """Every fiftieth byte of the middle is another."""
    start, stop = len(whole) // 4, len(whole) // 2
    changed = bytes(b ^ 0xFF if i % 50 == 0 else b for i, b in enumerate(whole[start:stop]))
    return whole[:start] + changed + whole[stop:]


from_file("a checkpoint of which bytes have been changed", _noise)
from_file("a checkpoint that is empty", lambda whole: b"")
from_file("a file that is none of a checkpoint", lambda whole: b"\x00\xff" * 2000)

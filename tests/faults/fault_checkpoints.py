"""The faults of checkpoints that `faults.py` puts into trainings."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fault_kinds import fault, kfac, several
from fault_scenes import Net, Run, System
from second_order import DHO2, KAISA, MRDHO2

__all__: list[str] = []

GROUP = "checkpoints"
Tamper = Callable[[Run, dict[str, Any]], Any]


def newton(system: System) -> bool:
    return system.kind in (DHO2, MRDHO2)


def summing(system: System) -> bool:
    """Whether its checkpoints have a sum of an epoch's gradients."""
    return system.kind is MRDHO2 and system.options["final_update"] != "within"


def part_with(state: dict[str, Any], name: str) -> dict[str, Any]:
    """The first parameter's curvature that has an entry."""
    for entry in state["state"].values():
        part: dict[str, Any] = entry.get("curvature", {})
        if name in part:
            return part
    raise LookupError(f"no entry {name!r}")


def refused(run: Run, tamper: Tamper) -> None:
    """All ranks try to load a checkpoint that has been tampered with, and go on."""

    def go() -> None:
        saved = run.saved()
        state = tamper(run, saved)
        try:
            run.optimizer.load_state_dict(saved if state is None else state)
        except Exception as error:
            run.catch(error)
        else:
            run.note("accepted: the checkpoint loads")

    if not run.helps:
        run.at("before", go)


def tampered(name: str, tamper: Tamper, suits: Callable[[System], bool] = lambda s: True) -> None:
    def install(run: Run) -> None:
        refused(run, tamper)

    fault(name, GROUP, suits=suits, moments=("between",), expect="same")(install)


def put(name: str, value: Any) -> Tamper:
    """Another value for an entry of the curvature, or a function of the one it has."""

    def tamper(_: Run, state: dict[str, Any]) -> None:
        part = part_with(state, name)
        part[name] = value(part[name]) if callable(value) else value

    return tamper


def spoilt(tensor: Any) -> Any:
    """With a NaN as its last number."""
    found = torch.as_tensor(tensor).clone()
    found.reshape(-1)[-1] = float("nan")
    return found


def cut(tensor: Any) -> Any:
    return tensor[..., :-1] if tensor.dim() else tensor.new_ones(2)


# Of all checkpoints.


def _without(name: str) -> Tamper:
    return lambda _, state: state.pop(name) and None


for _name in "state", "param_groups":
    tampered(f"without {_name!r}", _without(_name))
tampered("text for the state", lambda _, state: state.update(state="text"))
tampered("a list for the checkpoint", lambda _, state: [1, 2, 3])
tampered("None for its parts", lambda _, state: {"state": None, "param_groups": None})
tampered("a group too many", lambda _, state: state["param_groups"].append({"params": []}))
tampered("a parameter too few", lambda _, state: state["param_groups"][0]["params"].pop() and None)
tampered("an unknown entry", lambda _, s: part_with(s, "steps").update(unknown=torch.ones(3)))
for _what, _value in (
    ("text", "three"),
    ("-5", -5),
    ("NaN", float("nan")),
    ("None", None),
    ("2.5", 2.5),
):
    tampered(f"{_what} for steps", put("steps", _value))


def _of_base(base: type[torch.optim.Optimizer], width: int, **options: Any) -> Tamper:
    def tamper(run: Run, _: dict[str, Any]) -> Any:
        model = Net(width)
        plain = base(model.parameters(), **options)
        model(run.batches[0][0]).sum().backward()
        plain.step()
        return plain.state_dict()

    return tamper


tampered("of SGD with another network", _of_base(torch.optim.SGD, 10, lr=0.1, momentum=0.9))
tampered("of Adam, where the base is SGD", _of_base(torch.optim.Adam, 8, lr=0.1))

# Of Kronecker factors.

for _name in "A", "G", "average_weight", "mean_eigenvalues":
    tampered(f"NaN in {_name}", put(_name, spoilt), kfac)
    tampered(f"text for {_name}", put(_name, "text"), kfac)
    tampered(f"None for {_name}", put(_name, None), kfac)
    tampered(f"{_name} of another shape", put(_name, cut), kfac)
tampered("a negative average_weight", put("average_weight", lambda w: -w), kfac)

# Of eigenpairs.

for _name in "eigenvectors", "eigenvalues", "residuals", "subspace_momentum":
    tampered(f"NaN in {_name}", put(_name, spoilt), lambda s: s.kind is DHO2)
    tampered(f"text for {_name}", put(_name, "text"), lambda s: s.kind is DHO2)
    tampered(f"{_name} of another shape", put(_name, cut), lambda s: s.kind is DHO2)
for _name, _bad in (
    ("largest", 99),
    ("largest", "text"),
    ("refreshed_at", "text"),
    ("refreshed_at", 1000),
    ("rest_scale_bound", float("nan")),
    ("rest_scale_bound", -1.0),
    ("carried_decay", float("nan")),
):
    tampered(f"{_bad} for {_name}", put(_name, _bad), lambda s: s.kind is DHO2)
for _name in "gradient_sum", "epoch_start":
    tampered(f"NaN in {_name}", put(_name, spoilt), summing)
    tampered(f"{_name} of another shape", put(_name, cut), summing)


# Saving and resuming.


@fault("the state is saved by all", GROUP, moments=("refresh", "between"), expect="same")
def _(run: Run) -> None:
    if not run.helps:
        run.at("before", run.saved)


def _save(run: Run) -> None:
    path = run.directory / "checkpoint"
    state = {"model": run.model.state_dict(), "optimizer": run.saved(), "step": run.step}
    if run.rank == 0:
        torch.save(state, path)
    (run.directory / f"saved.{run.rank}").touch()


def _load(run: Run) -> None:
    state = torch.load(run.directory / "checkpoint")
    run.model.load_state_dict(state["model"])
    if not run.helps:
        run.optimizer.load_state_dict(state["optimizer"])
    run.first_step = state["step"]


def _resumed(run: Run) -> None:
    def leave() -> None:
        _save(run)
        group = run.optimizer.worker_group if run.system.helpers else None
        if run.workers > 1:
            dist.barrier(group=group)
        run.signal(signal.SIGKILL)

    if run.phase == 0 and not run.helps:
        run.at("before", leave)
    elif run.phase == 1:
        run.on("made", lambda: _load(run))


def _others(system: System) -> Sequence[int]:
    other = {1: 2, 2: 1, 3: 2, 4: 2}[system.size]
    if system.helpers:
        other = {2: 3, 3: 2}[system.size]
    return system.size, other


def repeats(system: System) -> bool:
    """Whether a run resumed on other processes has the same trajectory."""
    return system.kind in (KAISA, DHO2)


for _what, _sizes in (("as many", lambda s: (s.size, s.size)), ("other", _others)):
    fault(
        f"killed, and resumed on {_what} processes",
        GROUP,
        suits=repeats,
        moments=("refresh",),
        expect="same",
        sizes=_sizes,
        signals=(signal.SIGKILL,),
    )(_resumed)
    fault(
        f"killed, and resumed on {_what} processes",
        GROUP,
        suits=lambda s: not repeats(s),
        moments=("refresh",),
        expect="goes on",
        alters=True,
        sizes=_sizes,
        signals=(signal.SIGKILL,),
    )(_resumed)


@fault(
    "a checkpoint that is truncated",
    GROUP,
    moments=("between",),
    expect="same",
    errors=("EOFError", "OSError", "RuntimeError", "UnpicklingError"),
)
def _(run: Run) -> None:
    def go() -> None:
        path = run.directory / f"truncated.{run.rank}"
        torch.save(run.saved(), path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        try:
            run.optimizer.load_state_dict(torch.load(path))
        except Exception as error:
            run.catch(error)

    if not run.helps:
        run.at("before", go)


@fault(
    "a factor that nobody saved",
    GROUP,
    suits=lambda s: kfac(s) and several(s),
    moments=("between",),
    expect="told",
)
def _(run: Run) -> None:
    def go() -> None:
        state = run.saved()
        part_with(state, "A").pop("A")
        run.optimizer.load_state_dict(state)

    if not run.helps:
        run.at("before", go)

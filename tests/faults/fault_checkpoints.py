"""The faults of checkpoints that `faults.py` injects into training runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from fault_kinds import LATER, fault, kfac, newton, several_kfac
from fault_scenes import Injected, Net, Run, System
from second_order import DHO2, KAISA, MRDHO2

__all__: list[str] = []

Tamper = Callable[[Run, dict[str, Any]], Any]
checkpoint = partial(fault, group="checkpoints", moments=("between",))


def summing(system: System) -> bool:
    """Whether its checkpoints have a sum of an epoch's gradients."""
    return system.kind is MRDHO2


def part_with(state: dict[str, Any], name: str) -> dict[str, Any]:
    """The first parameter's curvature that has an entry."""
    for entry in state["state"].values():
        part: dict[str, Any] = entry.get("curvature", {})
        if name in part:
            return part
    raise LookupError(f"no entry {name!r}")


def refused(run: Run, made: Callable[[], Any]) -> None:
    """All ranks try to load something invalid, and continue."""

    def go() -> None:
        try:
            run.optimizer.load_state_dict(made())
        except Exception as error:
            run.catch(error)
        else:
            run.note("accepted: the checkpoint loads")

    if not run.helps:
        run.at("before", go)


def tampered(name: str, tamper: Tamper, suits: Callable[[System], bool] = lambda s: True) -> None:
    """A checkpoint is changed, or another returned in its place."""

    def install(run: Run) -> None:
        def made() -> Any:
            saved = run.saved()
            state = tamper(run, saved)
            return saved if state is None else state

        refused(run, made)

    checkpoint(name, suits=suits, expect="same")(install)


def put(name: str, value: Any) -> Tamper:
    """Another value for an entry of the curvature, or a function of the one it has."""

    def tamper(_: Run, state: dict[str, Any]) -> None:
        part = part_with(state, name)
        part[name] = value(part[name]) if callable(value) else value

    return tamper


def with_nan(tensor: Any) -> Any:
    """With a NaN as its last number."""
    found = torch.as_tensor(tensor).clone()
    found.reshape(-1)[-1] = float("nan")
    return found


def cut(tensor: Any) -> Any:
    return tensor[..., :-1] if tensor.dim() else tensor.new_ones(2)


def of_base(base: type[torch.optim.Optimizer], width: int, **options: Any) -> Tamper:
    def tamper(run: Run, _: dict[str, Any]) -> Any:
        model = Net(width)
        plain = base(model.parameters(), **options)
        model(run.batches[0][0]).sum().backward()
        plain.step()
        return plain.state_dict()

    return tamper


def of_another(run: Run, _: dict[str, Any]) -> Any:
    """The checkpoint of one of our own that is not this one, of the same model."""
    model = Net(run.width)
    other: Any = DHO2 if run.system.kfac else KAISA
    steps = {"warmup_steps": 0} if run.system.kfac else {}
    group = run.optimizer.worker_group if run.system.helpers else None
    with other(model, lr=0.05, momentum=0.9, process_group=group, **steps) as optimizer:
        x, y = run.batch()
        cross_entropy(model(x), y).backward()
        if other is DHO2:
            optimizer.step(curvature_closure=lambda: cross_entropy(model(x), y))
        else:
            optimizer.step()
        optimizer.consolidate(to=None)
        return optimizer.state_dict()


tampered("without 'state'", lambda _, state: state.pop("state") and None)
tampered("without 'param_groups'", lambda _, state: state.pop("param_groups") and None)
tampered("text for the state", lambda _, state: state.update(state="text"))
tampered("a list for the checkpoint", lambda _, state: [1, 2, 3])
tampered("None for its parts", lambda _, state: {"state": None, "param_groups": None})
tampered("a group too many", lambda _, state: state["param_groups"].append({"params": []}))
tampered("a parameter too few", lambda _, state: state["param_groups"][0]["params"].pop() and None)
tampered("an unknown entry", lambda _, s: part_with(s, "steps").update(unknown=torch.ones(3)))
tampered("of SGD with another network", of_base(torch.optim.SGD, 10, lr=0.1, momentum=0.9))
tampered("of Adam, where the base is SGD", of_base(torch.optim.Adam, 8, lr=0.1))
tampered("of another of these optimizers", of_another)
tampered("without a version", lambda _, state: part_with(state, "steps").pop("version") and None)
tampered("of a version to come", lambda _, state: part_with(state, "steps").update(version=99))

# Whose checkpoints, which entries, and what for them.
Bad = tuple[Callable[[System], bool], tuple[str, ...], dict[str, Any]]
OF_TENSORS = {"NaN in {}": with_nan, "text for {}": "text", "{} of another shape": cut}
STEPS = {"text": "three", "-5": -5, "NaN": float("nan"), "None": None, "2.5": 2.5}
BAD: list[Bad] = [
    (lambda s: True, ("steps",), {f"{what} for {{}}": value for what, value in STEPS.items()}),
    (kfac, ("A", "G", "average_weight", "mean_eigenvalues"), {**OF_TENSORS, "None for {}": None}),
    (newton, ("eigenvectors", "eigenvalues", "residuals", "subspace_momentum"), OF_TENSORS),
    (newton, ("num_largest", "refreshed_at"), {"text for {}": "text"}),
    (newton, ("refreshed_at",), {"1000 for {}": 1000}),
    (newton, ("base_scale_bound", "outside_decay"), {"nan for {}": float("nan")}),
    (summing, ("gradient_sum", "epoch_start"), {"NaN in {}": with_nan, "{} of another shape": cut}),
]
for _suits, _entries, _values in BAD:
    for _entry in _entries:
        for _what, _value in _values.items():
            tampered(_what.format(_entry), put(_entry, _value), _suits)


def from_file(name: str, damage: Callable[[bytes], bytes]) -> None:
    """A fault of the file, which `torch.load` or the optimizer refuses."""

    def install(run: Run) -> None:
        def made() -> Any:
            path = run.directory / f"damaged.{run.rank}"
            torch.save(run.saved(), path)
            path.write_bytes(damage(path.read_bytes()))
            try:
                return torch.load(path)
            except Exception as error:  # torch's own
                raise Injected(f"torch.load: {type(error).__name__}: {error}") from error

        refused(run, made)

    checkpoint(name, expect="same")(install)


def noise(whole: bytes) -> bytes:
    """Every fiftieth byte of the middle is another."""
    start = len(whole) // 4
    stop = len(whole) // 2
    changed = bytes(b ^ 0xFF if i % 50 == 0 else b for i, b in enumerate(whole[start:stop]))
    return whole[:start] + changed + whole[stop:]


from_file("a checkpoint that is truncated", lambda whole: whole[: len(whole) // 2])
from_file("a checkpoint of which bytes have been changed", noise)
from_file("a checkpoint that is empty", lambda whole: b"")


def loaded(run: Run, change: Callable[[dict[str, Any]], Any]) -> None:
    """All load a checkpoint that has been changed, and have to be able to."""

    def go() -> None:
        state = run.saved()
        change(state)
        run.optimizer.load_state_dict(state)

    if not run.helps:
        run.at("before", go)


@checkpoint("a factor that no rank saved", suits=several_kfac, expect="reported")
def _(run: Run) -> None:
    loaded(run, lambda state: part_with(state, "A").pop("A"))


@checkpoint("the state is saved by all", moments=LATER, expect="same", shards=True)
def _(run: Run) -> None:
    if not run.helps:
        run.at("before", run.saved)


def resumed(run: Run) -> None:
    """Killed once it has saved, and started again from the file."""
    path = run.directory / "checkpoint"

    def leave() -> None:
        state = {"model": run.model.state_dict(), "optimizer": run.saved(), "step": run.step}
        if run.rank == 0:
            torch.save(state, path)
        if run.workers > 1:
            dist.barrier(group=run.optimizer.worker_group if run.system.helpers else None)
        run.signal(signal.SIGKILL)

    def load() -> None:
        state = torch.load(path)
        run.model.load_state_dict(state["model"])
        if not run.helps:
            run.optimizer.load_state_dict(state["optimizer"])
        run.first_step = state["step"]

    if run.phase == 0 and not run.helps:
        run.at("before", leave)
    elif run.phase == 1:
        run.on("made", load)


def another(system: System) -> Sequence[int]:
    sizes = {2: 3, 3: 2} if system.helpers else {1: 2, 2: 1, 3: 2, 4: 2}
    return system.size, sizes[system.size]


def repeats(system: System) -> bool:
    """Whether a run resumed on other processes has the same trajectory."""
    return system.kind in (KAISA, DHO2)


for _what, _sizes in (("as many", lambda s: (s.size, s.size)), ("other", another)):
    for _suits, _expect in ((repeats, "same"), (lambda s: not repeats(s), "continues")):
        checkpoint(
            f"killed, and resumed on {_what} processes",
            suits=_suits,
            moments=("refresh",),
            expect=_expect,
            alters=_expect == "continues",
            sizes=_sizes,
            signals=(signal.SIGKILL,),
        )(resumed)

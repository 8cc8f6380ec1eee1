"""Quiet steps as CUDA graphs, and hyperparameters on the device.

What is of the pretended device runs as a process of its own: this file as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from graphs import Graph
from hypothesis import example, given
from hypothesis import strategies as st
from pretended import pretend_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from second_order import DHO2, DPKFAC, KAISA, DistKFAC
from second_order.contract.training import check_capture
from second_order.kfac.schedule import Change, Drift

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

STEPS = 33
EVERY: dict[str, Any] = {"factor_update_steps": 5, "inv_update_steps": 10}
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
FUSED: dict[str, Any] = {"lr": torch.tensor(1e-3), "base": torch.optim.AdamW, "fused": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "KAISA": (KAISA, SGD | EVERY),
    "KAISA, eigen": (KAISA, SGD | EVERY | {"solver": "eigen"}),
    "KAISA over AdamW": (KAISA, FUSED | EVERY),
    "KAISA by drift": (KAISA, SGD | {"kl_clip": torch.tensor(1e-3)}),
    "DPKFAC": (DPKFAC, SGD | EVERY),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 9), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(9, 9), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(9, 5))


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, 6, 6, generator=drawn), torch.randint(5, (8,), generator=drawn)


def trained(System: Any, options: dict[str, Any], *, graphs: bool) -> tuple[Tensor, int, int]:
    """The parameters after some steps, the number of steps, and of those that were replayed."""
    model, graph, replayed = network(), None, 0
    optimizer = System(model, **options)
    x, y = batch(0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    for i in range(STEPS):
        for place, values in zip((x, y), batch(i), strict=True):
            place.copy_(values)
        if not graphs or optimizer.quiet_until == optimizer.training.steps:
            step()
            graph = None
            continue
        if graph is None:
            graph = Graph()
            with graph.recording():
                step()
        graph.replay()
        optimizer.replayed()
        replayed += 1
    return parameters_to_vector(model.parameters()).detach(), optimizer.training.steps, replayed


@pytest.mark.parametrize("name", CASES)
def test_a_graph_replayed_trains_as_steps_do(name: str) -> None:
    there, steps, replayed = trained(*CASES[name], graphs=True)
    here, *_ = trained(*CASES[name], graphs=False)
    assert torch.equal(here, there)
    assert steps == STEPS
    assert replayed > STEPS / 3


@given(st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(0, 40))
@example(20, 7, True, 2)
def test_steps_are_quiet_until_the_first_that_is_not(
    f: int, i: int, follows: bool, steps: int
) -> None:
    clip = {} if follows else {"kl_clip": 1e-3}
    optimizer = KAISA(nn.Linear(3, 2), lr=0.1, factor_update_steps=f, inv_update_steps=i, **clip)
    optimizer._curvature.solves.wanted = False
    optimizer.training.steps = steps
    last = optimizer.quiet_until
    for step in range(steps, last + 1):
        refresh = step % i == 0 or (follows and (step + 1) % i == 0)
        assert (step % f == 0 or refresh) == (step == last)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(0, 100),
)
def test_layers_that_drift_are_next_due_at_the_first_step_that_has_any(
    layers: list[tuple[int, bool]], least: int, step: int
) -> None:
    drift, blocks = Drift(), [Mock(solved=solved) for _, solved in layers]
    for block, (power, _) in zip(blocks, layers, strict=True):
        drift.changes[block] = Change(2**power)
    drift.least = 2**least
    last = drift.next_due(blocks, step)
    assert [bool(drift.due(blocks, at)) for at in range(step, last + 1)] == [False] * (
        last - step
    ) + [True]


@pytest.mark.parametrize(
    ("System", "options"),
    [
        (KAISA, {"kl_clip": lambda step: 1e-3}),
        (KAISA, {"inv_update_steps": lambda step: 10}),
        (KAISA, {"overhead": 0.1, "inv_update_steps": "auto"}),
        (DistKFAC, {}),
    ],
)
def test_no_step_is_quiet_whose_successor_is_not_known(System: Any, options: Any) -> None:
    optimizer = System(nn.Linear(3, 2), lr=0.1, factor_update_steps=5, **options)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer._training.model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        assert optimizer.quiet_until == optimizer.training.steps
    optimizer.close()


def test_what_a_graph_does_not_hold_is_refused_before_anything_has_changed() -> None:
    model = network()
    optimizer = KAISA(model, **SGD, **EVERY)

    def step(graph: Graph | None = None) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        if graph is None:
            optimizer.step()
        else:
            with graph.recording():
                optimizer.step()

    before = parameters_to_vector(model.parameters()).clone()
    with pytest.raises(RuntimeError, match=r"at step 0, at which more may be due .*quiet_until"):
        step(Graph())
    assert torch.equal(before, parameters_to_vector(model.parameters()))
    step()
    with pytest.raises(RuntimeError, match=r"replayed\(1\) at step 1: the last graph"):
        optimizer.replayed()
    step(graph := Graph())
    optimizer.replayed(optimizer.quiet_until - 1)
    with pytest.raises(RuntimeError, match=r"holds up to step 5; take what is due"):
        optimizer.replayed()
    for _ in range(2):
        step()
    graph.replay()  # an old one
    with pytest.raises(RuntimeError, match=r"holds up to step 5"):
        optimizer.replayed()
    step(Graph())
    model[3].weight.requires_grad_(False)  # other layers are to be preconditioned
    with pytest.raises(RuntimeError, match=r"has changed"):
        optimizer.replayed()
    alone = SimpleNamespace(name="KAISA", steps=3, world=SimpleNamespace(size=2))
    with pytest.raises(RuntimeError, match="by one of 2 processes"):
        check_capture(alone, 9)  # type: ignore[arg-type]


# ------------------------------------------------------------------------- on the pretended device


def on_device(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).to("pretend")


ADAM = {"base": torch.optim.AdamW, "foreach": True, "capturable": True}
TUNED: dict[str, tuple[Any, Any]] = {
    "KAISA": (KAISA, {**ADAM, **EVERY, "damping": 0.1}),
    "KAISA, absolute": (KAISA, {**ADAM, **EVERY, "damping": 0.1, "relative_damping": False}),
    "KAISA, clipped": (KAISA, {**SGD, **EVERY, "damping": 0.5, "kl_clip": 1e-3}),
    "KAISA, eigen": (KAISA, {**ADAM, **EVERY, "solver": "eigen", "damping": lambda _: 0.1}),
    "DPKFAC": (DPKFAC, {**SGD, **EVERY, "damping": 0.5}),
    "DHO2": (DHO2, {**ADAM, "curvature_interval": 10, "warmup_steps": 0, "largest": 3}),
}


def seen_by(System: Any, options: dict[str, Any], *, tensors: bool) -> dict[str, Any]:
    """Waits, uploads and repeated steps; numbers are ``tensors`` on the device, or plain."""
    rate = options.get("lr", 1e-3)
    if tensors:
        rate, options = on_device(rate), dict(options)
        for name in options.keys() & {"damping", "kl_clip"}:
            value = options[name]
            number = on_device(value(0) if callable(value) else value)
            options[name] = (lambda _, number=number: number) if callable(value) else number
    found: dict[str, Any] = {"waits": [], "uploads": [], "alike": []}
    with pretend_device() as seen:
        model = network().double().to("pretend")
        optimizer = System(model, **{**options, "lr": rate})
        x, y = batch(0)
        x, y = x.double().to("pretend"), y.to("pretend")
        if System is DHO2:
            optimizer.curvature_closure = lambda: cross_entropy(model(x), y)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        last: Graph | None = None
        for i in range(25):
            quiet = System is not DHO2 and i > 11 and getattr(optimizer, "quiet_until", 0) > i
            optimizer.zero_grad(set_to_none=False)
            cross_entropy(model(x), y).backward()
            seen.clear()
            with Graph() as graph:
                optimizer.step()
            found["waits"].append(seen.syncs.total())
            found["uploads"].append(seen.uploads.total())
            if quiet and last is not None:
                found["alike"].append(last.asked == graph.asked)
            last = graph if quiet else None
            schedule.step()
    found["parameters"] = [p.inner.detach().flatten().tolist() for p in model.parameters()]
    return found


@cache
def seen_there() -> Any:
    paths = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", TUNED)
def test_hyperparameters_on_the_device_are_not_waited_for(name: str) -> None:
    alone = seen_there()["SGD" if "lr" in TUNED[name][1] else "AdamW"]
    plain, tuned = (seen_there()[f"{name} {kind}"] for kind in ("plain", "tuned"))
    waits = zip(tuned["waits"], plain["waits"], alone["waits"], strict=True)
    assert all(mine <= before + base for mine, before, base in [*waits][1:])
    assert tuned["uploads"][1:] == plain["uploads"][1:]
    for mine, theirs in zip(tuned["parameters"], plain["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in TUNED if name != "DHO2"])
def test_quiet_steps_ask_for_the_same_of_the_same_memory(name: str) -> None:
    alike = seen_there()[f"{name} tuned"]["alike"]
    assert len(alike) > 4
    assert all(alike)


def plain(base: Any, model: nn.Module, **options: Any) -> Any:
    return base(model.parameters(), **options)


def main() -> None:
    found = {f"{name} plain": seen_by(*case, tensors=False) for name, case in TUNED.items()}
    found |= {f"{name} tuned": seen_by(*case, tensors=True) for name, case in TUNED.items()}
    for base, options in ((torch.optim.SGD, SGD), (torch.optim.AdamW, ADAM)):
        alone = {k: v for k, v in options.items() if k not in ("base", "lr")}
        found[base.__name__] = seen_by(partial(plain, base), alone, tensors=True)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

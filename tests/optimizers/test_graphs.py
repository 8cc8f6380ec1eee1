"""Quiet steps as CUDA graphs, and hyperparameters on the device.

What is of the pretended device runs as a process of its own: this file as a script.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from apart import found_by
from graphs import Graph
from hypothesis import given
from hypothesis import strategies as st
from pretended import pretend_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from second_order import DHO2, DPKFAC, KAISA, DistKFAC
from second_order.contract.training import check_capture
from second_order.kfac import precondition
from second_order.kfac.schedule import Change, Drift

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

STEPS = 33
EVERY: dict[str, Any] = {"factor_update_steps": 5, "inv_update_steps": 10}
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
# On the CPU ν is a number, which would be recorded.
FUSED: dict[str, Any] = {
    "lr": torch.tensor(1e-3),
    "base": torch.optim.AdamW,
    "fused": True,
    "kl_clip": None,
}
PLAIN: dict[str, Any] = SGD | {"kl_clip": None}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "KAISA": (KAISA, PLAIN | EVERY),
    "KAISA, eigen": (KAISA, PLAIN | EVERY | {"solver": "eigen"}),
    "KAISA over AdamW": (KAISA, FUSED | EVERY),
    "KAISA by drift": (KAISA, PLAIN),
    "DPKFAC": (DPKFAC, PLAIN | EVERY),
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


def test_the_usual_change_is_that_of_steps_without_graphs(monkeypatch: Any) -> None:
    """Sums of changes are scalars, as on a device; a checkpoint is loaded halfway."""
    monkeypatch.setattr(precondition, "sum_of_changes", lambda stacks: torch.cat(stacks).sum())
    found = []
    for graphs in (True, False):
        model, graph, replayed = network(), None, []
        optimizer = DPKFAC(model, **SGD, factor_update_steps=12, inv_update_steps=12)
        for i in range(60):
            x, y = batch(i)
            optimizer.zero_grad(set_to_none=False)
            cross_entropy(model(x * (30.0 if i == 54 else 1.0)), y).backward()
            if i == 38:
                optimizer.load_state_dict(optimizer.state_dict())
                graph = None
            if not graphs or optimizer.quiet_until == optimizer.training.steps:
                optimizer.step()
                graph = None
                continue
            if graph is None:
                graph = Graph()
                with graph.recording():
                    optimizer.step()
            graph.replay()
            optimizer.replayed()
            replayed.append(i)
        usual = optimizer._curvature.clip.usual
        assert usual is not None
        found.append((parameters_to_vector(model.parameters()).tolist(), usual.saved()))
        if graphs:
            assert min(replayed) == 20  # all changes weigh the same from there on
            assert len(replayed) > 20
    assert found[0] == found[1]


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


def test_the_momentum_fades_by_each_step_that_is_replayed() -> None:
    def left(*steps: int) -> float:
        model, (x, y) = network(), batch(0)
        optimizer = DHO2(model, **SGD, curvature_interval=9, warmup_steps=0, largest=2)
        optimizer.curvature_closure = lambda: cross_entropy(model(x), y)
        for graph in (nullcontext(), Graph().recording()):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            with graph:
                optimizer.step()
        for n in steps:
            optimizer.replayed(n)
        return float(optimizer._curvature.subspace.decayed)

    assert left(3) == left(1, 1, 1) < left(1)


def test_what_a_graph_does_not_hold_is_refused_before_anything_has_changed() -> None:
    model = network()
    optimizer = KAISA(model, **PLAIN, **EVERY)

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
    "KAISA, absolute": (
        KAISA,
        {**ADAM, **EVERY, "damping": 0.1, "relative_damping": False, "kl_clip": 1e-6},
    ),
    "KAISA, clipped": (KAISA, {**SGD, **EVERY, "damping": 0.5, "kl_clip": 1e-3}),
    "KAISA, eigen": (KAISA, {**ADAM, **EVERY, "solver": "eigen", "damping": lambda _: 0.1}),
    "DPKFAC": (DPKFAC, {**SGD, **EVERY, "damping": 0.5}),
    "DHO2": (DHO2, {**ADAM, "curvature_interval": 10, "warmup_steps": 0, "largest": 3}),
}


REPLAYED = "KAISA", "KAISA, absolute", "DHO2"


def put_there(options: dict[str, Any]) -> dict[str, Any]:
    """Options whose numbers that may be tensors are, on the device."""
    put = {"lr": 1e-3, **options}
    for name in put.keys() & {"lr", "damping", "kl_clip"}:
        value = put[name]
        number = on_device(value(0) if callable(value) else value)
        put[name] = partial(lambda number, _: number, number) if callable(value) else number
    return put


class Training:
    """A model there, and its steps on one batch after another, of which some are recorded."""

    def __init__(self, System: Any, options: dict[str, Any]) -> None:
        self.model = network().double().to("pretend")
        self.optimizer = System(self.model, **{"lr": 1e-3, **options})
        curvature = getattr(self.optimizer, "_curvature", None)
        usual = getattr(getattr(curvature, "clip", None), "usual", None)
        if usual is not None:  # steps are quiet once the average of changes is full
            usual.bound, usual.steps = 1.0, precondition.REMEMBERED
        if System is DHO2:
            self.optimizer.curvature_closure = partial(self.loss, 0)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)

    def loss(self, step: int) -> Tensor:
        x, y = batch(step)
        return cross_entropy(self.model(x.double().to("pretend")), y.to("pretend"))

    def passes(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.loss(step).backward()

    @property
    def quiet(self) -> bool:
        ours = hasattr(self.optimizer, "quiet_until")  # else a base alone
        return ours and self.optimizer.quiet_until > self.optimizer.training.steps

    @property
    def parameters(self) -> list[list[float]]:
        return [p.inner.detach().flatten().tolist() for p in self.model.parameters()]  # type: ignore[attr-defined]


def seen_by(System: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Waits, uploads, and whether quiet steps ask for the same as the one before."""
    found: dict[str, Any] = {"waits": [], "uploads": [], "alike": []}
    last: Graph | None = None
    with pretend_device() as seen:
        training = Training(System, put_there(options) if options.pop("tensors") else options)
        for _ in range(20):
            graph = Graph() if training.quiet else None
            training.passes(0)
            seen.clear()
            with graph or nullcontext():
                training.optimizer.step()
            found["waits"].append(seen.syncs.total())
            found["uploads"].append(seen.uploads.total())
            if graph is not None and last is not None:
                found["alike"].append(last.asked == graph.asked)
            last = graph
            training.schedule.step()
        found["parameters"] = training.parameters
    return found


def replayed_by(System: Any, options: dict[str, Any]) -> tuple[Any, Any, int]:
    """The parameters after steps, and after steps some of which are replayed, and how many."""
    graph, replayed = None, 0
    with pretend_device():
        alone, training = (Training(System, put_there(options)) for _ in range(2))
        for i in range(20):
            for each in (alone, training):
                each.passes(i)
            alone.optimizer.step()
            if training.quiet:
                if graph is None:
                    graph = Graph()
                    with graph.recording():
                        training.optimizer.step()
                graph.replay()
                training.optimizer.replayed()
                replayed += 1
            else:
                training.optimizer.step()
                graph = None
            for each in (alone, training):
                each.schedule.step()
        return alone.parameters, training.parameters, replayed


@cache
def seen_there() -> Any:
    return found_by(__file__)


@pytest.mark.parametrize("name", TUNED)
def test_hyperparameters_on_the_device_are_not_waited_for(name: str) -> None:
    alone = seen_there()["SGD" if "lr" in TUNED[name][1] else "AdamW"]
    plain, tuned = (seen_there()[f"{name} {kind}"] for kind in ("plain", "tuned"))
    waits = zip(tuned["waits"], plain["waits"], alone["waits"], strict=True)
    assert all(mine <= before + base for mine, before, base in [*waits][1:])
    assert tuned["uploads"][1:] == plain["uploads"][1:]
    for mine, theirs in zip(tuned["parameters"], plain["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", TUNED)
def test_quiet_steps_ask_for_the_same_of_the_same_memory(name: str) -> None:
    alike = seen_there()[f"{name} tuned"]["alike"]
    assert len(alike) > 3
    assert all(alike)


@pytest.mark.parametrize("name", REPLAYED)
def test_a_graph_replayed_on_a_device_trains_as_steps_do(name: str) -> None:
    here, there, replayed = seen_there()[f"{name} replayed"]
    assert here == there
    assert replayed > 9


def plain(base: Any, model: nn.Module, **options: Any) -> Any:
    return base(model.parameters(), **options)


def main() -> None:
    found: dict[str, Any] = {}
    for name, (System, options) in TUNED.items():
        for kind in ("plain", "tuned"):
            found[f"{name} {kind}"] = seen_by(System, {**options, "tensors": kind == "tuned"})
    for name in REPLAYED:
        found[f"{name} replayed"] = replayed_by(*TUNED[name])
    for base, options in ((torch.optim.SGD, SGD), (torch.optim.AdamW, ADAM)):
        alone = {k: v for k, v in options.items() if k != "base"}
        found[base.__name__] = seen_by(partial(plain, base), {**alone, "tensors": True})
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

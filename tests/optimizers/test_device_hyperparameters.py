"""Hyperparameters as tensors on the device, and steps while a CUDA graph is recorded.

The tests of the fake device run this file as a script, in a process of their own.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_device import pretend_device
from separate_process import found_by
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from second_order import DHO2, DPKFAC, KAISA

if TYPE_CHECKING:
    from pool import Forks

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

EVERY: dict[str, Any] = {"factor_update_steps": 5, "inv_update_steps": 10}
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
STEPS = 12  # two refreshes


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 9), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(9, 9), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(9, 5))


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, 6, 6, generator=drawn), torch.randint(5, (8,), generator=drawn)


@pytest.mark.parametrize("System", [KAISA, DHO2])
def test_a_step_during_cuda_graph_capture_raises(System: Any, monkeypatch: Any) -> None:
    model = network()
    optimizer = System(model, lr=0.05)
    optimizer.curvature_closure = lambda: cross_entropy(model(batch(0)[0]), batch(0)[1])
    cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    before = parameters_to_vector(model.parameters()).clone()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be recorded in a CUDA graph"):
        optimizer.step()
    assert torch.equal(before, parameters_to_vector(model.parameters()))
    assert optimizer.training.steps == 0
    monkeypatch.undo()
    optimizer.step()
    assert optimizer.training.steps == 1


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
    "DHO2": (DHO2, {**ADAM, "curvature_interval": 10, "warmup_steps": 0, "num_largest": 3}),
}


def put_there(options: dict[str, Any]) -> dict[str, Any]:
    """Options whose numbers that may be tensors are, on the device."""
    put = {"lr": 1e-3, **options}
    for name in put.keys() & {"lr", "damping", "kl_clip"}:
        value = put[name]
        number = on_device(value(0) if callable(value) else value)
        put[name] = partial(lambda number, _: number, number) if callable(value) else number
    return put


class Training:
    """A model there, and its steps on one batch after another."""

    def __init__(self, System: Any, options: dict[str, Any]) -> None:
        self.model = network().double().to("pretend")
        self.optimizer = System(self.model, **{"lr": 1e-3, **options})
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
    def parameters(self) -> list[list[float]]:
        return [p.inner.detach().flatten().tolist() for p in self.model.parameters()]  # type: ignore[attr-defined]


def seen_by(System: Any, options: dict[str, Any]) -> dict[str, Any]:
    """How often each step waits for the device, and uploads; the parameters at the end."""
    found: dict[str, Any] = {"waits": [], "uploads": []}
    with pretend_device() as seen:
        training = Training(System, put_there(options) if options.pop("tensors") else options)
        for _ in range(STEPS):
            training.passes(0)
            seen.clear()
            training.optimizer.step()
            found["waits"].append(seen.syncs.total())
            found["uploads"].append(seen.uploads.total())
            training.schedule.step()
        found["parameters"] = training.parameters
    return found


@pytest.fixture(scope="module")
def found(forks: Forks) -> Any:
    return found_by(forks, __file__)


@pytest.mark.parametrize("name", TUNED)
def test_hyperparameters_on_the_device_are_not_synchronized(found: Any, name: str) -> None:
    alone = found["SGD" if "lr" in TUNED[name][1] else "AdamW"]
    plain, tuned = (found[f"{name} {kind}"] for kind in ("plain", "tuned"))
    waits = zip(tuned["waits"], plain["waits"], alone["waits"], strict=True)
    assert all(actual <= before + base for actual, before, base in [*waits][1:])
    assert tuned["uploads"][1:] == plain["uploads"][1:]
    for actual, expected in zip(tuned["parameters"], plain["parameters"], strict=True):
        torch.testing.assert_close(
            torch.tensor(actual), torch.tensor(expected), rtol=1e-2, atol=1e-4
        )


def plain(base: Any, model: nn.Module, **options: Any) -> Any:
    return base(model.parameters(), **options)


def main() -> None:
    found: dict[str, Any] = {}
    for name, (System, options) in TUNED.items():
        for kind in ("plain", "tuned"):
            found[f"{name} {kind}"] = seen_by(System, {**options, "tensors": kind == "tuned"})
    for base, options in ((torch.optim.SGD, SGD), (torch.optim.AdamW, ADAM)):
        alone = {k: v for k, v in options.items() if k != "base"}
        found[base.__name__] = seen_by(partial(plain, base), {**alone, "tensors": True})
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

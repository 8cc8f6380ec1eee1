"""Runs whose parts take given times, for the tests of the throttle.

Time is what the tests make it: `Time.spend` moves the clock that the throttle reads, and nothing
else does.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from optimizer_cases import make, take
from ranks import shard
from torch import nn

from second_order import DPKFAC, KAISA, DistKFAC

if TYPE_CHECKING:
    from collections.abc import Callable


MLP = ZOO["mlp"]
LAYERS = sum(isinstance(m, nn.Linear) for m in MLP.model().modules())
AUTO: dict[str, Any] = {"factor_update_steps": "auto", "inv_update_steps": "auto"}
each_system = pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])


class Time:
    """A clock that somebody has to move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        self.looks += 1
        return self.now

    def before(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The same function, which takes so long."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.spend(seconds)
            return function(*args, **kwargs)

        return slow


class Run:
    """A run whose parts take given times: S = 5, R = 40, T = 100.

    Attributes:
        updates: The steps of statistics.
        refreshes: The steps of refreshes.
        decays: Weights of the past, by step.
    """

    S = 5.0
    R = 40.0
    T = 100.0

    def __init__(
        self,
        System: Any = KAISA,
        *,
        scale: float = 1.0,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.time = Time()
        self.scale = scale
        self.model = MLP.model() if model is None else model
        auto = {} if "overhead" in options else {"overhead": 0.1}
        self.optimizer = make(System, self.model, **{**AUTO, **auto, **options})
        self.curvature = self.optimizer._curvature
        self.throttle = self.curvature.throttle
        if self.throttle is not None:
            self.throttle.clock = lambda _: self.time()
        self.updates: list[int] = []
        self.refreshes: list[int] = []
        self.decays: dict[int, float] = {}
        layers = self.curvature.layers
        inverses = self.curvature.inverses
        update_averages = layers.update_averages
        refresh = inverses.refresh
        consume = layers.collector.consume

        def taking(sums: Any, decay: float) -> None:
            self.time.spend(3 * self.scale)
            self.updates.append(self.steps)
            self.decays[self.steps] = decay
            update_averages(sums, decay)

        def refreshing(due: Any, *args: Any, **kwargs: Any) -> Any:
            if due:
                self.time.spend(self.R * self.scale)
                self.refreshes.append(self.steps)
            return refresh(due, *args, **kwargs)

        def consuming(*args: Any, **kwargs: Any) -> None:
            self.time.spend(2 / LAYERS * self.scale)
            consume(*args, **kwargs)

        layers.update_averages = taking
        inverses.refresh = refreshing
        layers.collector.consume = consuming

    @property
    def steps(self) -> int:
        return int(self.optimizer._training.steps)

    def go(self, steps: int, rank: int = 0, world_size: int = 1) -> Run:
        for step in range(self.steps, self.steps + steps):
            self.time.spend(self.T * self.scale)
            batch = shard(MLP.batch(12, seed=step), rank, world_size)
            take(self.model, self.optimizer, batch, MLP.loss)
        return self

    def saved(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], buffer)
        buffer.seek(0)
        model, optimizer = torch.load(buffer)
        return {"model": model, "optimizer": optimizer}

    def load(self, saved: dict[str, Any]) -> Run:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return self


TIMED = 10  # steps until the throttle knows its interval
LEAST = 5  # steps between refreshes then: (5 + 40) / (0.1 * 100)

"""What the tests of captures share: who records pairs, and models that are watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from models import ZOO
from torch import Tensor, nn

from second_order.kronecker.capture import Capture

MLP = ZOO["mlp"]  # Linear layers "0", "2", "4"


@dataclass
class Pair:
    module: nn.Module
    x: Tensor
    d: Tensor
    pass_id: int


@dataclass
class Recorder:
    """A consumer that keeps every pair, and the state it was handed over in."""

    pairs: list[Pair] = field(default_factory=list)
    grad_enabled: list[bool] = field(default_factory=list)
    autocast: list[bool] = field(default_factory=list)

    def wants(self, module: nn.Module) -> bool:
        return bool(module.weight.requires_grad)

    def verify(self, module: nn.Module, x: Tensor, d: Tensor) -> None:
        """Of gradients, nothing is compared."""

    def consume(self, module: nn.Module, x: Tensor, d: Tensor, pass_id: int, again: bool) -> None:
        self.pairs.append(Pair(module, x, d, pass_id))
        self.grad_enabled.append(torch.is_grad_enabled())
        self.autocast.append(torch.is_autocast_enabled("cpu"))

    @property
    def modules(self) -> list[nn.Module]:
        return [pair.module for pair in self.pairs]

    def clear(self) -> None:
        self.pairs.clear()


def linears(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def watched(model: nn.Module, sampler: Any = None, recorder: Any = None) -> tuple[Capture, Any]:
    """A capture of all Linear layers."""
    recorder = Recorder() if recorder is None else recorder
    capture = Capture(recorder, sampler)
    capture.attach(model, linears(model))
    return capture, recorder


def backward(model: nn.Module, x: Tensor | None = None) -> None:
    x = MLP.batch()[0] if x is None else x
    model(x).square().mean().backward()


def summed(output: Any, call: int) -> Tensor:
    """A sampler that draws no labels."""
    return output.square().sum()


class Keeper(Recorder):
    """A recorder that keeps copies: a graph uses the memory of a pair again."""

    def consume(self, module: nn.Module, x: Tensor, d: Tensor, pass_id: int, again: bool) -> None:
        super().consume(module, x.clone(), d.clone(), pass_id, again)
        self.again = [*getattr(self, "again", []), again]

    def of(self, model: nn.Module) -> list[Pair]:
        """The pairs in an order that does not depend on how they came."""
        place = {module: i for i, module in enumerate(model.modules())}
        return sorted(self.pairs, key=lambda p: (p.pass_id, place[p.module], float(p.d.norm())))

"""What the tests of single steps share: a reference, first factors, messages, and tolerances."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from reference import captured, cross_entropy, layer_factors
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from reference import Batch, Factors, Loss


def reference(
    model: nn.Module, batch: Batch, loss: Loss = cross_entropy, *layers: str
) -> dict[str, Factors]:
    """Factors of one batch, by the formulas, of all Linear and convolution layers or of some."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    names = layers or tuple(n for n, m in model.named_modules() if isinstance(m, kinds))
    pairs = captured(model, batch[0], lambda outputs: loss(outputs, batch[1]), *names)
    return {name: layer_factors(model.get_submodule(name), uses) for name, uses in pairs.items()}


def weights(optimizer: Any) -> set[float]:
    """How much each layer's running average weighs: 1 after one statistic."""
    states = optimizer.state_dict()["state"].values()
    found = [entry["curvature"].get("average_weight") for entry in states]
    return {round(float(weight), 12) for weight in found if weight is not None}


def assert_near(a: nn.Module, b: nn.Module, rtol: float = 1e-8, atol: float = 1e-12) -> None:
    """Raise unless the parameters are equal up to rounding."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


def former_scaler(kind: Any, **options: Any) -> Any:
    """A class of torch that is deprecated in favor of torch.amp.GradScaler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return kind(**options)


SCALERS: dict[str, Callable[[], Any]] = {
    "torch.amp": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
    "torch.cpu.amp": lambda: former_scaler(
        torch.cpu.amp.GradScaler, init_scale=1024.0, growth_interval=2
    ),
    "torch.cuda.amp disabled": lambda: former_scaler(torch.cuda.amp.GradScaler, enabled=False),
}


def fixed_labels(y: Tensor) -> Callable[[Any], Tensor]:
    """A likelihood with the labels of the data: "sampled" then has the empirical factors."""
    return lambda outputs: functional.cross_entropy(
        outputs.flatten(0, -2).double(), y.flatten(), reduction="sum"
    )

"""What the tests of the contract share: the systems, the bases, and a step.

optimizer = make(KAISA, model, base=torch.optim.Adam)
take(model, optimizer, batch)
factors(optimizer)["0"]  # (A, G) of the layer named "0"
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from reference import cross_entropy
from torch import Tensor, nn

from second_order import DPKFAC, KAISA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reference import Batch, Factors

    from second_order import SecondOrderOptimizer

SYSTEMS: list[type[SecondOrderOptimizer]] = [KAISA, DPKFAC]
EXACT = {"factor_dtype": torch.float64, "inv_dtype": torch.float64}
PLAIN: dict[str, Any] = {
    "lr": 0.05,
    "damping": 0.1,
    "relative_damping": False,
    "factor_decay": 0.95,
    "kl_clip": None,
    "factor_update_steps": 1,
    "inv_update_steps": 1,
    "refresh_warmup_steps": 0,
    **EXACT,
}
BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def make(
    System: type[SecondOrderOptimizer], params_or_model: Any, /, **options: Any
) -> Any:  # whatever the system has beyond the contract
    """A system in float64 with `PLAIN` options, as far as it has them, and those given."""
    known = inspect.signature(System).parameters
    plain = {name: value for name, value in PLAIN.items() if name in known}
    return System(params_or_model, **{**plain, **options})


def take(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Tensor:
    """One step of training; the loss before it."""
    x, y = batch
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    optimizer.step()
    return value.detach()


def factors(optimizer: Any) -> dict[str, Factors]:
    """Copies of the running averages (A, G) of every layer that has any, in float64."""
    return {
        block.name: tuple(block.factors.matrices(torch.float64))
        for block in optimizer._blocks
        if block.factors is not None
    }


def hook_count(model: nn.Module) -> int:
    """How many forward hooks of any kind a model and its parts carry."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


def same(a: Iterable[Tensor] | nn.Module, b: Iterable[Tensor] | nn.Module) -> bool:
    """Whether all tensors, or all parameters and buffers, are equal bit for bit."""
    return all(torch.equal(p, q) for p, q in zip(_tensors(a), _tensors(b), strict=True))


def _tensors(values: Iterable[Tensor] | nn.Module) -> Iterator[Tensor]:
    if isinstance(values, nn.Module):
        return iter(values.state_dict().values())
    return iter(values)


def assert_same_factors(
    actual: dict[str, Factors], expected: dict[str, Factors], rtol: float = 1e-10
) -> None:
    """Raise unless both have the same layers with factors equal up to rounding."""
    assert actual.keys() == expected.keys()
    assert actual, "no layer has factors"
    for name, (A, G) in expected.items():
        torch.testing.assert_close(actual[name][0], A, rtol=rtol, atol=rtol * float(A.abs().max()))
        torch.testing.assert_close(actual[name][1], G, rtol=rtol, atol=rtol * float(G.abs().max()))


def identity_curvature(
    System: type[SecondOrderOptimizer], model: nn.Module, plain: Any, batch: Batch, **options: Any
) -> Any:
    """A system over `model` whose factors are identities and stay so, and whose damping is 0.

    Args:
        plain: the base alone on a copy of the model, before its first step.
        batch: of the model's inputs, to bring a checkpoint into being.
    """
    options = {
        "damping": 0.0,
        "symmetry_aware": False,  # factors as matrices, not triangles
        "factor_update_steps": 10**9,
        **options,
    }
    scratch = copy.deepcopy(model)
    donor = make(System, scratch, **options)
    take(scratch, donor, batch)
    saved = donor.state_dict()
    for index, entry in saved["state"].items():
        entry["base"] = copy.deepcopy(plain.state_dict()["state"].get(index, {}))
        curvature = entry["curvature"]
        for letter in {"A", "G"} & curvature.keys():
            eye = torch.eye(curvature[letter].shape[-1], dtype=curvature[letter].dtype)
            curvature[letter] = eye.expand_as(curvature[letter]).clone()
        if "A" in curvature:
            curvature["mean_eigenvalues"] = torch.ones_like(curvature["mean_eigenvalues"])
    optimizer = make(System, model, **options)
    optimizer.load_state_dict(saved)
    return optimizer

"""What the tests of the contract share: the systems, the bases, and a step.

optimizer = make(KAISA, model, base=torch.optim.Adam)
take(model, optimizer, batch)
factors(optimizer)["0"]  # (A, G) of the layer named "0"

`each_system` is for what holds of every optimizer, `each_kronecker` for what looks at factors;
`curvature_of` is what either knows of the curvature.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reference import cross_entropy
from torch import Tensor, nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, SecondOrderWarning
from second_order.kronecker.storage import pack_upper_triangular, unpack_upper_triangular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reference import Batch, Factors

    from second_order import SecondOrderOptimizer

KRONECKER: list[type[SecondOrderOptimizer]] = [KAISA, DPKFAC, DistKFAC]
SYSTEMS: list[type[SecondOrderOptimizer]] = [*KRONECKER, DHO2]
EIGENPAIRS = (DHO2, MRDHO2)
EXACT = {"factor_dtype": torch.float64}
PLAIN: dict[str, Any] = {
    "lr": 0.05,
    "damping": 0.1,
    "relative_damping": False,
    "damping_floor": 0.0,
    "factor_decay": 0.95,
    "kl_clip": None,
    "grafting": "none",
    "factor_update_steps": 1,
    "inv_update_steps": 1,
    # DistKFAC as the others: when inverses come must not depend on threads.
    "max_staleness": 0,
    "solver": "eigen",
    "precondition_norms": False,
    **EXACT,
}
PAIRS: dict[str, Any] = {
    "lr": 0.05,
    "num_largest": 3,
    "num_smallest": 1,
    "warmup_steps": 1,
    "curvature_interval": 2,
    "epoch_steps": 2,
    "newton_scale": 0.5,
}
BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


@dataclass(frozen=True)
class DenseFirst:
    """An interval of one during the first steps."""

    steps: int
    every: int

    def __call__(self, step: int) -> int:
        return 1 if step < self.steps else self.every


def _named(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else None


each_system = pytest.mark.parametrize("System", SYSTEMS, ids=_named)
each_of_five = pytest.mark.parametrize("System", [*SYSTEMS, MRDHO2], ids=_named)
each_kronecker = pytest.mark.parametrize("System", KRONECKER, ids=_named)
eigenpairs_only = pytest.mark.parametrize("System", [DHO2], ids=_named)
each_variant = pytest.mark.parametrize(
    ("System", "options"),
    [
        *(
            pytest.param(System, {"fisher": fisher}, id=f"{System.__name__}-{fisher}")
            for System in KRONECKER
            for fisher in ("empirical", "categorical")
        ),
        pytest.param(
            DistKFAC, {"solver": "inverse", "precondition_norms": True}, id="DistKFAC-exact-blocks"
        ),
        pytest.param(DHO2, {}, id="DHO2"),
    ],
)


def make(
    System: type[SecondOrderOptimizer], params_or_model: Any, /, **options: Any
) -> Any:  # whatever the system has beyond the contract
    """A system in float64 with `PLAIN` or `PAIRS`, as far as it has them, and those given."""
    known = inspect.signature(System).parameters
    own_cases = PAIRS if issubclass(System, EIGENPAIRS) else PLAIN
    plain = {name: value for name, value in own_cases.items() if name in known}
    return System(params_or_model, **{**plain, **options})


def base_only(System: type[SecondOrderOptimizer]) -> dict[str, Any]:
    """Options that leave everything to the base."""
    if issubclass(System, EIGENPAIRS):
        return {"num_largest": 0, "num_smallest": 0}
    return {"skip_layers": ["*"]}


def asking(
    model: nn.Module,
    optimizer: Any,
    batch: Batch,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> dict[str, Any]:
    """The arguments of `step`: the curvature closure, if the optimizer needs one."""
    if not isinstance(optimizer, EIGENPAIRS):
        return {}
    inner: Any = getattr(model, "_orig_mod", model)  # a compiled one has no second derivatives
    x, y = batch
    return {"curvature_closure": lambda: loss(inner(x), y)}


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
    optimizer.step(**asking(model, optimizer, batch, loss))
    return value.detach()


def factors(optimizer: Any) -> dict[str, Factors]:
    """Copies of the running averages (A, G) of every layer that has any, in float64."""
    return {
        block.name: tuple(matrices(block.factors))
        for block in optimizer._curvature.layers.blocks
        if block.factors is not None
    }


def curvature_of(optimizer: Any) -> dict[str, tuple[Tensor, ...]]:
    """Copies of what an optimizer knows of the curvature; nothing where it knows nothing."""
    if not isinstance(optimizer, EIGENPAIRS):
        return dict(factors(optimizer))
    subspace = optimizer._curvature.subspace
    if subspace is None:
        return {}
    vectors = subspace.basis.vectors
    outside = subspace.outside_momentum * subspace.outside_decay
    momentum = subspace.newton.momentum
    known = (subspace.values, vectors, subspace.residuals, momentum, outside)
    return {"eigenpairs": tuple(value.clone() for value in known)}


@contextmanager
def noted() -> Iterator[list[str]]:
    """A list that has the package's warnings after the block."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield lines
        finally:
            lines += [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]


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


def assert_same_curvature(
    actual: Mapping[str, Sequence[Tensor]],
    expected: Mapping[str, Sequence[Tensor]],
    rtol: float = 1e-10,
) -> None:
    """Raise unless both know as much, equal up to rounding."""
    assert actual.keys() == expected.keys()
    assert actual, "nothing is known of the curvature"
    for name, values in expected.items():
        for found, value in zip(actual[name], values, strict=True):
            atol = rtol * float(value.abs().max())
            torch.testing.assert_close(found, value, rtol=rtol, atol=atol)


def assert_same_factors(
    actual: dict[str, Factors], expected: dict[str, Factors], rtol: float = 1e-10
) -> None:
    """Raise unless both have the same layers with factors equal up to rounding."""
    assert_same_curvature(actual, expected, rtol)


def packed_identity_like(packed: Tensor) -> Tensor:
    """Identities as upper triangles, as many and as large as those of a factor."""
    dim = math.isqrt(2 * packed.shape[-1])
    eye = pack_upper_triangular(torch.eye(dim, dtype=packed.dtype))
    return eye.expand_as(packed).clone()


def identity_curvature(
    System: type[SecondOrderOptimizer], model: nn.Module, plain: Any, batch: Batch, **options: Any
) -> Any:
    """A system over `model` whose factors are identities and stay so, and whose damping is 0.

    One of eigenpairs waits for them for ever.

    Args:
        plain: the base alone on a copy of the model, before its first step.
        batch: of the model's inputs, to bring a checkpoint into being.
    """
    if System is DHO2:
        return make(System, model, warmup_steps=10**9, **options)
    options = {
        "damping": 0.0,
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
            curvature[letter] = packed_identity_like(curvature[letter])
        if "A" in curvature:
            curvature["mean_eigenvalues"] = torch.ones_like(curvature["mean_eigenvalues"])
    optimizer = make(System, model, **options)
    optimizer.load_state_dict(saved)
    return optimizer


def matrices(factors: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """A, L if there is one, and G of running averages: ``(groups, n, n)``, or a diagonal."""
    shape = factors.shape
    found: list[Tensor] = []
    for letter in sorted(shape.factor_names, key="ALG".index):
        stored = factors.stored[letter].to(dtype)
        full = letter not in shape.diagonals
        found.append(unpack_upper_triangular(stored, shape.dims[letter]) if full else stored)
    return tuple(found)


class Imitation:
    """As Lightning's wrapper: passes on what it lacks; its class inherits from the optimizer's."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Wrapped{kind.__name__}", (type(self), kind), {})  # type: ignore[assignment]

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

"""Layers of users' own classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

import second_order.kronecker.kinds  # noqa: F401 - its rules come before a user's, not after
from second_order.kronecker.exact import GAINS, NORMALISATIONS, Gain
from second_order.kronecker.layers import (
    KINDS,
    FactorShape,
    Form,
    LayerKind,
    PairStatistics,
    linear_gradient,
    linear_statistics,
)

__all__ = ["register_layer"]

Rows: TypeAlias = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
Factor: TypeAlias = Callable[[nn.Module, Tensor], Tensor]


def register_layer(
    kind: type[nn.Module],
    *,
    rows: Rows | None = None,
    gain: Factor | None = None,
    transposed: bool = False,
    weight: str = "weight",
    bias: str | None = "bias",
) -> None:
    """Tell how a class of modules computes, so that KAISA, DPKFAC and DistKFAC precondition it.

    Subclasses are taken for it if they keep its ``forward``. A later call replaces an earlier one;
    torch's own layers that have a rule keep it. Register on every process, before the optimizer is
    made.

    A product: the output's rows are ``W x + b`` of rows x, so that the weight's gradient is the sum
    of d xᵀ over rows. It gets Kronecker factors, as a Linear has.

    A gain: the output is ``gain * factor(x) + b``, the gain along its last dimensions. It gets an
    exact block, where the optimizer has ``exact_blocks=True``.

    Args:
        kind: The class.
        rows: ``rows(module, input, output_gradient)`` gives x and d, ``(..., in)`` and
            ``(..., out)``, of the same leading dimensions; None: the input and the gradient as they
            are. The first leading dimension counts examples.
        gain: ``gain(module, input)`` gives what the gain multiplies, of the output's shape; None
            for a product.
        transposed: Whether the weight is stored ``(in, out)``.
        weight: Name of the weight, of two dimensions; or of the gain.
        bias: Name of the bias; None if the class has none.

    Raises:
        TypeError: If ``kind`` is no class of modules, or a function is none.
        ValueError: If the class is both a product and a gain, or one of torch's with a rule.
    """
    given: Any = (kind, weight, bias)
    if not (isinstance(given[0], type) and issubclass(kind, nn.Module)) or kind is nn.Module:
        raise TypeError(
            f"register_layer: {kind!r} is not a class of modules; pass the class itself"
        )
    ruled = kind in KINDS or issubclass(kind, NORMALISATIONS)
    if ruled and kind.__module__.startswith("torch."):
        raise ValueError(
            f"register_layer: torch's {kind.__name__} has a rule, which every optimizer of this "
            f"process uses; register a class of your own, with a forward of its own"
        )
    if not all(function is None or callable(function) for function in (rows, gain)):
        raise TypeError("register_layer: rows= and gain= are functions")
    if not (isinstance(given[1], str) and isinstance(given[2], str | None)):
        raise TypeError("register_layer: weight= and bias= are names of parameters")
    if gain is not None and (rows is not None or transposed):
        raise ValueError(
            "register_layer: gain= is for a layer that multiplies its input by a vector, rows= and "
            "transposed= for one that multiplies it by a matrix; give one or the other"
        )
    if gain is not None:
        KINDS.pop(kind, None)
        GAINS[kind] = Gain(gain, weight, bias)
        return
    GAINS.pop(kind, None)
    KINDS[kind] = LayerKind(
        partial(_statistics, rows),
        partial(_shape, weight, transposed),
        weight,
        "" if bias is None else bias,
        gradient=partial(_gradient, rows, transposed),
        fits=lambda module, x, d: True,  # who tells of rows has told of their sizes
    )


def _shape(weight: str, transposed: bool, module: nn.Module, bias: bool) -> FactorShape:
    size = cast(Tensor, getattr(module, weight)).shape
    out_dim, in_dim = (size[1], size[0]) if transposed else (size[0], size[1:].numel())
    return FactorShape(1, in_dim + int(bias), out_dim, transposed=transposed)


def _statistics(
    rows: Rows | None, module: nn.Module, x: Tensor, d: Tensor, form: Form
) -> PairStatistics:
    if rows is not None:
        x, d = rows(module, x, d)
    return linear_statistics(module, x, d, replace(form, known=None))


def _gradient(
    rows: Rows | None, transposed: bool, module: nn.Module, x: Tensor, d: Tensor
) -> Tensor:
    x, d = (x, d) if rows is None else rows(module, x, d)
    return linear_gradient(module, d, x) if transposed else linear_gradient(module, x, d)

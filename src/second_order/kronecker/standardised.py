"""Standardised convolutions, whose weight is computed from the parameter, as in BiT and NFNets.

The weight of output o is s (W - mean W), s = gain / √(var W + ε), over the entries of W_o (Qiao et
al. 2019; Brock et al. 2021). With d the gradient of the output and x a patch, the gradient of W_o
is s d x less what it has along two directions: that of ones, and that of the weight itself, which
the standardisation takes out. The block is that of the plain convolution by the computed weight,
with s d in the place of d: F ≈ A ⊗ E[s d (s d)ᵀ]. It is an approximation in these two directions of
each output's, in which the gradient has no part: curvature is seen there, and there is none.

The gain, if there is one, and the bias, whose gradient is d without s, are apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.convolutions import CONV
from second_order.kronecker.layers import KINDS, Form, PairStatistics

__all__ = ["STANDARDISED", "is_standardised"]

STANDARDISED = "standardised convolution"
CLASSES = (
    *("StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"),
    "WeightStandardizedConv2d",
)
"""Classes of timm and transformers, by their names; the first statistics show whether they are."""


def is_standardised(module: nn.Module) -> bool:
    """Whether a module is a standardised convolution, by its class's name."""
    named = isinstance(module, nn.Conv2d) and type(module).__name__ in CLASSES
    return named and isinstance(getattr(module, "eps", None), float)


def _scale(module: Any, weight: Tensor) -> Tensor:
    """The number s of each output, ``(out, 1)``."""
    rows = weight.flatten(1)
    scale: Tensor = (rows.var(1, correction=0, keepdim=True) + module.eps).rsqrt()
    gain = getattr(module, "gain", None)
    if gain is not None:
        scale = scale * gain.detach().to(rows).view(-1, 1) * getattr(module, "scale", 1.0)
    return scale


def _padded(module: Any, x: Tensor) -> Tensor:
    """The input as a convolution with "same" padding pads it before."""
    if not (getattr(module, "same_pad", False) or getattr(module, "pad", None) is not None):
        return x
    sides: list[int] = []
    each = zip(x.shape[-2:], module.kernel_size, module.stride, module.dilation, strict=True)
    for size, kernel, stride, dilation in each:
        total = (math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size
        sides = [max(total, 0) // 2, max(total, 0) - max(total, 0) // 2, *sides]
    return nn.functional.pad(x, sides)


def _statistics(module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
    scale = _scale(module, cast(Tensor, module.weight).detach().to(d.dtype))
    if d.shape[-3] == len(scale):
        d = d * scale.unsqueeze(-1)
    return CONV.statistics(module, _padded(module, x), d, form)


def _gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    """The gradient of the parameter, by that of the computed weight."""
    of_computed = CONV.gradient(module, _padded(module, x), d)
    with torch.enable_grad():
        weight = cast(Tensor, module.weight).detach().to(d.dtype).requires_grad_()
        rows = weight.flatten(1)
        computed = (rows - rows.mean(1, keepdim=True)) * _scale(module, weight)
        (found,) = torch.autograd.grad(computed, weight, of_computed.flatten(1))
    return found


KINDS[STANDARDISED] = replace(
    CONV,
    statistics=_statistics,
    gradient=_gradient,
    fits=lambda module, x, d: CONV.fits(module, _padded(module, x), d),
    with_bias=False,
)

"""The patches that a convolution of any dimension multiplies its weight with."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Convolution", "extract_patches", "pad_input", "padding_per_side"]

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


def padding_per_side(conv: Convolution) -> list[tuple[int, int]]:
    """``(before, after)`` for every spatial dimension, first dimension first."""
    if conv.padding == "valid":
        return [(0, 0)] * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in conv.padding]


def pad_input(x: Tensor, conv: Convolution) -> Tensor:
    """Pad ``x`` of shape ``(N, C, *spatial)`` the way ``conv`` does."""
    sides = padding_per_side(conv)
    if not any(before or after for before, after in sides):
        return x
    flat = [amount for side in reversed(sides) for amount in side]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return nn.functional.pad(x, flat, mode=mode)


def extract_patches(x: Tensor, conv: Convolution) -> Tensor:
    """Patches of ``x`` as a view wherever padding allows.

    Args:
        x: Input of shape ``(N, C, *spatial)``.
        conv: The layer; stride, padding (any mode), dilation and groups are honoured.

    Returns:
        Shape ``(N, groups, C / groups, *kernel, *output)``: flattening dimensions 2 to 2 + k
        gives the order of ``conv.weight.flatten(1)``.
    """
    dims = len(conv.kernel_size)
    x = pad_input(x, conv)
    for i in range(dims):
        kernel, stride, dilation = conv.kernel_size[i], conv.stride[i], conv.dilation[i]
        # unfold appends the window as the last dimension; every dilation-th entry is a tap.
        x = x.unfold(2 + i, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    # (N, C, *output, *kernel) -> (N, C, *kernel, *output)
    output, kernel_dims = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
    x = x.permute(0, 1, *kernel_dims, *output)
    return torch.unflatten(x, 1, (conv.groups, -1))

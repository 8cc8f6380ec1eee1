"""The patches that a convolution of any dimension multiplies its weight with."""

from __future__ import annotations

import math
from functools import lru_cache, reduce
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Convolution", "extract_patches", "pad_input", "padding_per_side", "sum_patches"]

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


# Elements of matrices of zeros and ones. On one core a product was 3 to 10 times faster than
# patches for usual layers, and 5 to 200 times slower for windows of 10 to 400 in a long signal.
TAPS_AT_ONCE, TAPS_A_DIMENSION = 2**16, 2**12


def sum_patches(x: Tensor, conv: Convolution) -> Tensor:
    """The sum of all patches of each example, without the patches where that is faster.

    Every tap of the kernel meets some of the inputs: a product of the input with a matrix of zeros
    and ones, or, as the taps of one spatial dimension do not ask for those of another, with one for
    each dimension.

    Args:
        x: Input of shape ``(N, C, *spatial)``.
        conv: The layer, as for :func:`extract_patches`.

    Returns:
        Shape ``(N, groups, in)``, with the order of ``conv.weight.flatten(1)``.
    """
    dims, sizes = len(conv.kernel_size), zip(x.shape[2:], conv.kernel_size, strict=True)
    if any(size * kernel > TAPS_A_DIMENSION for size, kernel in sizes):
        patches = extract_patches(x, conv)
        return patches.sum(tuple(range(3 + dims, 3 + 2 * dims))).flatten(2)
    sides = padding_per_side(conv)
    if conv.padding_mode != "zeros":
        x, sides = pad_input(x, conv), [(0, 0)] * len(sides)
    spatial, taps = x.shape[2:], math.prod(conv.kernel_size)
    each = zip(spatial, conv.kernel_size, conv.stride, conv.dilation, sides, strict=True)
    met = [_taps_met(*one, x.dtype, x.device) for one in each]
    if taps * spatial.numel() <= TAPS_AT_ONCE:
        all_met = reduce(torch.kron, met)
        if x.is_contiguous():
            x = x.flatten(2) @ all_met.mT
        else:  # channels last, as a rule
            x = (all_met @ x.movedim(1, -1).flatten(1, -2)).mT
    else:
        x = x @ met[-1].mT
        for i in reversed(range(dims - 1)):
            x = met[i] @ x.flatten(3 + i)
    return torch.unflatten(x.flatten(1), 1, (conv.groups, -1))


@lru_cache(maxsize=256)
def _taps_met(
    size: int,
    kernel: int,
    stride: int,
    dilation: int,
    side: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A matrix ``(kernel, size)``: 1 where a tap meets an input along one dimension."""
    with torch.inference_mode(False):
        outputs = (size + sum(side) - dilation * (kernel - 1) - 1) // stride + 1
        met = torch.zeros(kernel, size, dtype=dtype, device="cpu")
        for tap in range(kernel):
            first = tap * dilation - side[0]
            last = first + (outputs - 1) * stride
            met[tap, first if first >= 0 else first % stride : max(0, last + 1) : stride] = 1.0
        return met.to(device)

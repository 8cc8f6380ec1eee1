"""Convolutions of one to three dimensions: their patches, and the statistics made of these.

The sum of āāᵀ over patches is made without them at stride 1: it is a cross-correlation. Its block
for the taps p and q of the kernel is the sum of x[s + p] x[s + q]ᵀ over the output's positions s,
and to move both taps by a row only moves this window of positions by a row. So blocks are computed
for pairs that start with a corner of the kernel, 13 of the 81 for 3 x 3, as weight gradients of a
convolution of the input with itself. The others follow from them by a row or a column at each end
of the window ("displacement structure": Kailath, Kung & Morf 1979). A patch matrix would be k²
times the input. As differences, blocks have rounding errors relative to the largest of them, not to
each: in float32 up to 3e-6 of the largest element, against 1e-6 with patches.

A transposed convolution multiplies each location of its input by the weight and adds the products
to a patch of its output. So it is a Linear whose output is that patch, at each location of the
input; its bias, which is added at locations of the output, is apart.

Rows are whole images or signals. Sources: Grosse & Martens 2016, eq. 30-35 (KFC), Ba et al. 2017,
appendix A (reduce).

Shapes: padded input (N, C, H', W'); groups g of c = C / g channels; kernel k₁ x k₂, dilation
d₁ x d₂, output H x W with H' = H + (k₁ - 1) d₁ and W' = W + (k₂ - 1) d₂.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, reduce
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from second_order.kronecker.layers import (
    CONVOLUTIONS,
    KINDS,
    FactorShape,
    Form,
    LayerKind,
    PairStatistics,
    gram,
    symmetric,
)

__all__ = ["CONV", "extract_patches", "pad_input", "patch_second_moment", "sum_patches"]

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d

AUTOCORRELATION_ELEMENTS = 2**20  # least elements of a patch matrix spared

# Elements of matrices of zeros and ones. On one core a product was 3 to 10 times faster than
# patches for usual layers, and 5 to 200 times slower for windows of 10 to 400 in a long signal.
TAPS_AT_ONCE, TAPS_A_DIMENSION = 2**16, 2**12

# Positions to a piece: oneDNN adds one after the other: half a million in float32 were off by 2e-4.
LONGEST_SUM = 2**14

BAND_ROWS = 256  # rows that are copied at a time


# ------------------------------------------------------------------------------------------ patches


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
    """Patches of ``x``, ``(N, C, *spatial)``, as a view wherever padding allows.

    ``(N, groups, C / groups, *kernel, *output)``: flattening dimensions 2 to 2 + k gives the order
    of ``conv.weight.flatten(1)``.
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


def sum_patches(x: Tensor, conv: Convolution) -> Tensor:
    """The sum of all patches of each example, without the patches where that is faster.

    Every tap of the kernel meets some of the inputs: a product of the input with a matrix of zeros
    and ones. ``(N, groups, in)``, with the order of ``conv.weight.flatten(1)``.
    """
    dims, sizes = len(conv.kernel_size), zip(x.shape[2:], conv.kernel_size, strict=True)
    if any(size * kernel > TAPS_A_DIMENSION for size, kernel in sizes):
        patches = extract_patches(x, conv)
        return patches.sum(tuple(range(3 + dims, 3 + 2 * dims))).flatten(2)
    sides = padding_per_side(conv)
    if conv.padding_mode != "zeros":
        x, sides = pad_input(x, conv), [(0, 0)] * len(sides)
    each = zip(x.shape[2:], conv.kernel_size, conv.stride, conv.dilation, sides, strict=True)
    met = [_taps_met(*one, x.dtype, x.device) for one in each]
    if math.prod(conv.kernel_size) * x.shape[2:].numel() > TAPS_AT_ONCE:
        # The taps of one spatial dimension do not ask for those of another.
        x = x @ met[-1].mT
        for i in reversed(range(dims - 1)):
            x = met[i] @ x.flatten(3 + i)
    else:
        all_met = reduce(torch.kron, met)
        if x.is_contiguous():
            x = x.flatten(2) @ all_met.mT
        else:  # channels last, as a rule
            x = (all_met @ x.movedim(1, -1).flatten(1, -2)).mT
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


# ------------------------------------------------------------- second moments without patches


def patch_second_moment(
    x: Tensor, kernel: tuple[int, int], dilation: tuple[int, int] = (1, 1), groups: int = 1
) -> Iterator[tuple[int, Tensor]]:
    """Sum over examples and output positions of the outer products of the patches, at stride 1.

    The sum is made in bands of rows, so that the whole ``(groups, c k₁ k₂, c k₁ k₂)`` need not
    exist; the taps of a channel are next to each other, as in ``weight.flatten(1)``.

    Of the padded input ``(N, C, H', W')``. Yields the first row of each band, and the band as
    :func:`~second_order.kronecker.triangles.write_band` takes it.
    """
    c, taps = x.shape[1] // groups, kernel[0] * kernel[1]
    x = x.contiguous(memory_format=torch.channels_last)  # a quarter faster for narrow layers
    blocks = _tap_blocks(x, x, kernel, dilation, groups).view(taps, groups, c, taps, c)
    channels = max(1, BAND_ROWS // taps)
    for first in range(0, c, channels):
        # The taps of the second index move from the outermost place to the innermost.
        band = blocks[:, :, first : first + channels, :, first:].permute(1, 2, 3, 4, 0)
        yield first * taps, band.flatten(3).flatten(1, 2)


def _tap_blocks(
    x: Tensor, y: Tensor, kernel: tuple[int, int], dilation: tuple[int, int], groups: int
) -> Tensor:
    """Blocks of the second moment by pairs of taps, ``(k₁, k₂, g, c, k₁, k₂, c)``.

    [i', j', :, a, i, j, b] is the sum of y[a, s + (i, j)] x[b, s + (i', j')]; y is x with a sign
    for each example, its weight in the sum.
    """
    (k1, k2), (d1, d2) = kernel, dilation
    height, width = x.shape[2] - (k1 - 1) * d1, x.shape[3] - (k2 - 1) * d2
    c = x.shape[1] // groups
    blocks = x.new_empty(k1, k2, groups, c, k1, k2, c)
    blocks[..., 0, 0, :] = _correlation(x, y[:, :, :height, :width], kernel, dilation, groups)
    if k1 > 1 and k2 > 1:
        left, last = x[:, :, d1:, : width + (k2 - 2) * d2], y[:, :, :height, (k2 - 1) * d2 :]
        blocks[1:, :-1, ..., 0, -1, :] = _correlation(
            left, last, (k1 - 1, k2 - 1), dilation, groups
        )
    if k2 > 1:
        _shift_columns(blocks, _column_change(x, y, kernel, dilation, groups))
    for j in range(k2):
        row = blocks[0, :, :, :, 0, j]
        row[j] = (row[j] + row[j].mT) / 2
        row[:j] = blocks[0, j, :, :, 0, :j].permute(2, 0, 3, 1)
    if k1 > 1:
        _shift_rows(blocks, _row_change(x, y, kernel, dilation, groups))
    return blocks


def _correlation(
    x: Tensor, y: Tensor, taps: tuple[int, int], dilation: tuple[int, int], groups: int
) -> Tensor:
    """Correlate: [i', j', :, a, b] sums y[a, s] x[b, s + (i', j')], all i', j' below ``taps``."""
    c = x.shape[1] // groups
    examples = max(1, LONGEST_SUM // y[0, 0].numel())
    parts = [
        conv2d_weight(some, (x.shape[1], c, *taps), weighted, dilation=dilation, groups=groups)
        for some, weighted in zip(x.split(examples), y.split(examples), strict=True)
    ]
    sums: Tensor = sum(parts[1:], parts[0])
    return sums.view(groups, c, c, *taps).permute(3, 4, 0, 1, 2)


def _ends(x: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    return x.narrow(dim, 0, size), x.narrow(dim, x.shape[dim] - size, size)


def _column_change(
    x: Tensor, y: Tensor, kernel: tuple[int, int], dilation: tuple[int, int], groups: int
) -> Tensor:
    """The change of the blocks of the first row of taps when both taps move a column to the right.

    ``(k₁, k₂ - 1, g, c, k₂ - 1, c)``: [i', j', ..., j, :] leads from j, j' to the next.
    """
    taps, c = kernel[1] - 1, x.shape[1] // groups
    height = x.shape[2] - (kernel[0] - 1) * dilation[0]

    def by_tap(first: Tensor, last: Tensor) -> Tensor:
        ends = torch.cat([first, last]).permute(0, 2, 3, 1)
        return ends.reshape(*ends.shape[:2], taps, dilation[1], groups, c)

    # (2 N, H, k₂ - 1, d₂, g, c) and (2 N, k₁, k₂ - 1, d₂, g, c, H) as matrices of rows
    right = by_tap(*_ends(x, 3, taps * dilation[1])).unfold(1, height, dilation[0])
    right = right.permute(4, 0, 6, 3, 1, 2, 5).reshape(groups, -1, kernel[0] * taps * c)
    first, last = _ends(y[:, :, :height], 3, taps * dilation[1])
    left = by_tap(-first, last).permute(4, 0, 1, 3, 2, 5).reshape(groups, -1, taps * c)
    change: Tensor = left.mT @ right
    return change.view(groups, taps, c, kernel[0], taps, c).permute(3, 4, 0, 2, 1, 5)


def _shift_columns(blocks: Tensor, change: Tensor) -> None:
    """Complete the blocks whose first tap is in the first row."""
    k2 = blocks.shape[1]
    for j in range(k2 - 1):
        out = blocks[:, j + 1 :, :, :, 0, j + 1]
        torch.add(blocks[:, j:-1, :, :, 0, j], change[:, j:, :, :, j], out=out)
    for j in reversed(range(1, k2 - 1)):
        out = blocks[1:, :j, :, :, 0, j]
        torch.sub(blocks[1:, 1 : j + 1, :, :, 0, j + 1], change[1:, :j, :, :, j], out=out)


def _row_change(
    x: Tensor, y: Tensor, kernel: tuple[int, int], dilation: tuple[int, int], groups: int
) -> Tensor:
    """The change of the blocks when both taps move a row down.

    ``(k₁ - 1, k₂, g, k₁ - 1, c, k₂, c)``: [i', ..., i, :, :, :] leads from i, i' to the next.
    """
    taps, c = kernel[0] - 1, x.shape[1] // groups

    def as_channels(first: Tensor, last: Tensor) -> Tensor:
        # The rows of a tap as channels (g, k₁ - 1, c) of an image of d₁ rows.
        ends = torch.cat([first, last]).permute(0, 2, 3, 1)
        ends = ends.reshape(ends.shape[0], taps, dilation[0], -1, groups, c)
        return ends.permute(0, 2, 3, 4, 1, 5).flatten(3).permute(0, 3, 1, 2)

    right = as_channels(*_ends(x, 2, taps * dilation[0]))
    first, last = _ends(y, 2, taps * dilation[0])
    left = as_channels(-first, last)
    change = _tap_blocks(right, left, (1, kernel[1]), (1, dilation[1]), groups)
    change = change.view(kernel[1], groups, taps, c, kernel[1], taps, c)
    return change.movedim(5, 0)


def _shift_rows(blocks: Tensor, change: Tensor) -> None:
    """Complete all blocks from those whose first tap is in the first row."""
    for i in range(blocks.shape[0]):
        if i > 0:
            out = blocks[i:, :, :, :, i]
            torch.add(blocks[i - 1 : -1, :, :, :, i - 1], change[i - 1 :, :, :, i - 1], out=out)
        blocks[:i, :, :, :, i] = blocks[i, :, :, :, :i].permute(3, 4, 1, 5, 0, 2)


# --------------------------------------------------------------------------------------- statistics


def _spares_patches(conv: Convolution, x: Tensor) -> bool:
    """Whether the second moment of the patches is taken without them.

    At stride 1, as larger ones share next to nothing between taps, and on the CPU; on CUDA nothing
    is measured, and float32 convolutions round to TF32. On one core, float32, 3 x 3, it is 2.4 to
    4.9 times as fast at 16 x 16 positions and above with 16 to 128 channels, 1.7 at 8 x 8. Below a
    million patch elements, or with a window of less than twice the kernel's reach, it is slower.
    """
    usual = isinstance(conv, nn.Conv1d | nn.Conv2d) and x.device.type == "cpu"
    if not usual or any(stride > 1 for stride in conv.stride):
        return False
    padded = [n + sum(p) for n, p in zip(x.shape[2:], padding_per_side(conv), strict=True)]
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    outputs = [n - r for n, r in zip(padded, reach, strict=True)]
    positions, taps = x.shape[0] * math.prod(outputs), math.prod(conv.kernel_size)
    return (
        taps > 1
        and all(n > 2 * r for n, r in zip(outputs, reach, strict=True))
        and positions * min(x.shape[1] * taps, 1024) >= AUTOCORRELATION_ELEMENTS
    )


def _autocorrelation_gram(
    x: Tensor, conv: Convolution, homogeneous: bool, triangular: bool, examples: int | Tensor
) -> Tensor:
    """:func:`gram` of the patches of the padded input ``x``, computed without patches."""
    if x.dim() == 3:  # of one dimension: an image of one row
        x = x.unsqueeze(2)
    (k1, k2), (d1, d2) = (1, *conv.kernel_size)[-2:], (1, *conv.dilation)[-2:]
    dim, column = conv.weight[0].numel(), None
    height, width = x.shape[2] - (k1 - 1) * d1, x.shape[3] - (k2 - 1) * d2
    if homogeneous:
        windows = x.sum(0).unfold(1, height, d1).unfold(2, width, d2)  # (C, k₁, k₂, H, W)
        column = windows.sum((-2, -1)).view(conv.groups, dim)
    bands = patch_second_moment(x, (k1, k2), (d1, d2), conv.groups)
    return symmetric(bands, x, dim, column, examples * (height * width), triangular)


def _live_images(
    x: Tensor, d: Tensor, dims: int, form: Form
) -> tuple[Tensor, Tensor, int | Tensor]:
    """Inputs and output gradients of images, those that do not count left out as far as that pays.

    Both ``(N, C, ...)``, or of one image without the first dimension. Returns them, of one image of
    zeros at least, and how many count.
    """
    if x.dim() == dims + 1:  # a single example without a batch dimension
        x, d = x.unsqueeze(0), d.unsqueeze(0)
    live, rows = form.live(d), len(d)
    if live.mask is not None:
        x = live.pick(x)
        d = live.pick(d) if len(x) < rows else d  # d is zero where x is not left out
    if len(d) == 0:
        x, d = x.new_zeros(1, *x.shape[1:]), d.new_zeros(1, *d.shape[1:])
    return x, d, live.count


def _conv_statistics(module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
    """Statistics of a convolution, whose rows are patches of x, or a transposed one, those of d."""
    conv = cast(Convolution, module)
    dims, groups, packed = len(conv.kernel_size), conv.groups, form.triangular
    x, d, examples = _live_images(x, d, dims, form)
    count = len(d)
    if conv.transposed:
        d = extract_patches(d, conv)  # (N, groups, out / groups, *kernel, *locations)
        for i, size in enumerate(x.shape[2:]):  # output padding can make room for more
            d = d.narrow(3 + dims + i, 0, size)
        d = d.flatten(3 + dims).flatten(2, 2 + dims)
        maps = x.flatten(2).unflatten(1, (groups, -1))  # (N, groups, in, T)
    else:
        d = d.flatten(2).unflatten(1, (groups, -1))
    locations = d.shape[-1]  # (N, groups, out, T)
    if form.approximation == "reduce":
        means = maps.mean(-1) if conv.transposed else sum_patches(x, conv).div_(locations)
        g = gram(d.sum(-1).transpose(0, 1), False, packed)
        a = gram(means.transpose(0, 1), form.bias, packed, examples)
        return PairStatistics({"A": a, "G": g}, examples)
    # Copied along the locations, which lie next to each other in most inputs.
    rows_d = d.permute(1, 2, 0, 3).reshape(groups, -1, count * locations).mT
    g = gram(rows_d, False, packed).div_(locations)
    if _spares_patches(conv, x):
        a = _autocorrelation_gram(pad_input(x, conv), conv, form.bias, packed, examples)
        return PairStatistics({"A": a, "G": g}, examples)
    if conv.transposed:
        columns = maps.permute(1, 2, 0, 3)
    else:  # from (N, groups, C / groups, *kernel, *output)
        order = (1, *range(2, 3 + dims), 0, *range(3 + dims, 3 + 2 * dims))
        columns = extract_patches(x, conv).permute(order)
    columns = columns.reshape(groups, -1, count * locations)
    a = gram(columns.mT, form.bias, packed, examples * locations)
    return PairStatistics({"A": a, "G": g}, examples)


def _conv_gradient(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    """The gradient of the weight of a convolution, transposed or not, of its shape."""
    conv = cast(Convolution, module)
    dims, transposed = len(conv.kernel_size), conv.transposed
    if x.dim() == dims + 1:
        x, d = x.unsqueeze(0), d.unsqueeze(0)
    _, gradient, _ = torch.ops.aten.convolution_backward(
        d,
        x if transposed else pad_input(x, conv),
        x.new_empty(conv.weight.shape),  # its values do not matter
        None,
        conv.stride,
        conv.padding if transposed else [0] * dims,
        conv.dilation,
        transposed,
        conv.output_padding,
        conv.groups,
        (False, True, False),
    )
    return cast(Tensor, gradient)


def _patches_of_output(module: nn.Module, bias: bool) -> FactorShape:
    weight, groups = cast(Tensor, module.weight), cast(int, module.groups)
    return FactorShape(groups, weight.shape[0] // groups, weight.shape[1:].numel(), transposed=True)


def _conv_fits(module: nn.Module, x: Tensor, d: Tensor) -> bool:
    """Whether a pair has the sizes of a convolution's input and output, transposed or not."""
    conv = cast(Convolution, module)
    at = -len(conv.kernel_size) - 1
    channels = (*x.shape[at : at + 1], *d.shape[at : at + 1])
    if x.shape[:at] != d.shape[:at] or channels != (conv.in_channels, conv.out_channels):
        return False
    narrow, wide = (t.shape[at + 1 :] for t in ((x, d) if conv.transposed else (d, x)))
    windows = (padding_per_side(conv), conv.dilation, conv.kernel_size, conv.stride)
    for found, size, sides, dilation, kernel, stride in zip(narrow, wide, *windows, strict=True):
        expected = (size + sum(sides) - dilation * (kernel - 1) - 1) // stride + 1
        # A transposed one may add to its output's end.
        if found > expected or (found < expected and not conv.transposed):
            return False
    return True


CONV = LayerKind(_conv_statistics, gradient=_conv_gradient, fits=_conv_fits)
KINDS.update(dict.fromkeys(CONVOLUTIONS[:3], CONV))
KINDS.update(
    dict.fromkeys(CONVOLUTIONS[3:], replace(CONV, shape=_patches_of_output, with_bias=False))
)

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

This is done on CPUs, without groups and dilation; all else has its patches. Shapes: padded input
(N, C, H', W'), kernel k₁ x k₂, output H x W with H' = H + k₁ - 1 and W' = W + k₂ - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from second_order.kronecker.layers import (
    CONVOLUTIONS,
    KINDS,
    FactorShape,
    LayerKind,
    PairOptions,
    PairRows,
    PairStatistics,
    append_ones,
    gram,
    image_rows,
)

__all__ = ["ConvolutionKind", "extract_patches", "pad_input", "patch_second_moment"]

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d

AUTOCORRELATION_ELEMENTS = 2**20  # least elements of a patch matrix spared

# Positions to a piece: oneDNN adds one after the other: half a million in float32 were off by 2e-4.
LONGEST_SUM = 2**14


# ------------------------------------------------------------------------------------------ patches


def pad_input(x: Tensor, conv: Convolution) -> Tensor:
    """Pad ``x`` of shape ``(N, C, *spatial)`` the way ``conv`` does."""
    sides: list[int] = []  # before and after, last dimension first
    for i in reversed(range(len(conv.kernel_size))):
        if conv.padding == "same":
            total = conv.dilation[i] * (conv.kernel_size[i] - 1)
            sides += (total // 2, total - total // 2)
        elif conv.padding != "valid":
            sides += (int(conv.padding[i]), int(conv.padding[i]))
    if not any(sides):
        return x
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return nn.functional.pad(x, sides, mode=mode)


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


# ------------------------------------------------------------- second moments without patches


def patch_second_moment(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Sum over examples and output positions of the outer products of the patches, at stride 1.

    ``x`` is the padded input ``(N, C, H', W')``. Returns ``(C k₁ k₂, C k₁ k₂)``. The taps of a
    channel are next to each other, as in ``weight.flatten(1)``.
    """
    dim = x.shape[1] * math.prod(kernel)
    x = x.contiguous(memory_format=torch.channels_last)  # a quarter faster for narrow layers
    blocks = _tap_blocks(x, x, kernel).flatten(0, 1).flatten(2, 3)  # (taps, C, taps, C)
    # The taps of the second index move from the outermost place to the innermost.
    return blocks.permute(1, 2, 3, 0).reshape(dim, dim)


def _tap_blocks(x: Tensor, y: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Blocks of the second moment by pairs of taps, ``(k₁, k₂, C, k₁, k₂, C)``.

    [i', j', a, i, j, b] is the sum of y[a, s + (i, j)] x[b, s + (i', j')]. ``y`` is x with a sign
    for each example, its weight in the sum.
    """
    k1, k2 = kernel
    channels = x.shape[1]
    height = x.shape[2] - k1 + 1
    width = x.shape[3] - k2 + 1
    blocks = x.new_empty(k1, k2, channels, k1, k2, channels)

    # Pairs that start with a corner of the first row.
    blocks[..., 0, 0, :] = _correlation(x, y[:, :, :height, :width], (k1, k2))
    if k1 > 1 and k2 > 1:
        left = x[:, :, 1:, : width + k2 - 2]
        last = y[:, :, :height, k2 - 1 :]
        blocks[1:, :-1, :, 0, -1, :] = _correlation(left, last, (k1 - 1, k2 - 1))

    # All pairs that start in the first row, then all pairs.
    if k2 > 1:
        _shift_columns(blocks, _column_change(x, y, kernel))
    for j in range(k2):
        row = blocks[0, :, :, 0, j]
        row[j] = (row[j] + row[j].mT) / 2
        row[:j] = blocks[0, j, :, 0, :j].permute(1, 2, 0)
    if k1 > 1:
        _shift_rows(blocks, _row_change(x, y, kernel))
    return blocks


def _correlation(x: Tensor, y: Tensor, taps: tuple[int, int]) -> Tensor:
    """Correlate: [i', j', a, b] sums y[a, s] x[b, s + (i', j')], all i', j' below ``taps``."""
    channels = x.shape[1]
    examples = max(1, LONGEST_SUM // y[0, 0].numel())
    total = x.new_zeros(channels, channels, *taps)
    for some, weighted in zip(x.split(examples), y.split(examples), strict=True):
        total += conv2d_weight(some, total.shape, weighted)
    return total.permute(2, 3, 0, 1)


def _ends(x: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    return x.narrow(dim, 0, size), x.narrow(dim, x.shape[dim] - size, size)


def _column_change(x: Tensor, y: Tensor, kernel: tuple[int, int]) -> Tensor:
    """The change of the blocks of the first row of taps when both taps move a column to the right.

    ``(k₁, k₂ - 1, C, k₂ - 1, C)``: [i', j', :, j, :] leads from j, j' to the next.
    """
    taps = kernel[1] - 1
    channels = x.shape[1]
    height = x.shape[2] - kernel[0] + 1
    first, last = _ends(y[:, :, :height], 3, taps)

    # (2 N, H, k₂ - 1, C) and (2 N, k₁, k₂ - 1, C, H) as matrices of rows
    left = torch.cat([-first, last]).permute(0, 2, 3, 1)
    left = left.reshape(-1, taps * channels)
    right = torch.cat(_ends(x, 3, taps)).permute(0, 2, 3, 1).unfold(1, height, 1)
    right = right.permute(0, 4, 1, 2, 3).reshape(-1, kernel[0] * taps * channels)
    change = (left.mT @ right).view(taps, channels, kernel[0], taps, channels)
    return change.permute(2, 3, 1, 0, 4)


def _shift_columns(blocks: Tensor, change: Tensor) -> None:
    """Complete the blocks whose first tap is in the first row."""
    k2 = blocks.shape[1]
    for j in range(k2 - 1):
        out = blocks[:, j + 1 :, :, 0, j + 1]
        torch.add(blocks[:, j:-1, :, 0, j], change[:, j:, :, j], out=out)
    for j in reversed(range(1, k2 - 1)):
        out = blocks[1:, :j, :, 0, j]
        torch.sub(blocks[1:, 1 : j + 1, :, 0, j + 1], change[1:, :j, :, j], out=out)


def _row_change(x: Tensor, y: Tensor, kernel: tuple[int, int]) -> Tensor:
    """The change of the blocks when both taps move a row down.

    ``(k₁ - 1, k₂, k₁ - 1, C, k₂, C)``: [i', :, i, :, :, :] leads from i, i' to the next.
    """
    taps = kernel[0] - 1
    channels = x.shape[1]

    def as_channels(first: Tensor, last: Tensor) -> Tensor:
        # The rows of a tap as channels (k₁ - 1, C) of an image of one row.
        ends = torch.cat([first, last]).permute(0, 3, 2, 1)
        return ends.flatten(2).unsqueeze(1).permute(0, 3, 1, 2)

    first, last = _ends(y, 2, taps)
    right = as_channels(*_ends(x, 2, taps))
    change = _tap_blocks(right, as_channels(-first, last), (1, kernel[1]))
    return change.view(kernel[1], taps, channels, kernel[1], taps, channels).movedim(4, 0)


def _shift_rows(blocks: Tensor, change: Tensor) -> None:
    """Complete all blocks from those whose first tap is in the first row."""
    for i in range(blocks.shape[0]):
        if i > 0:
            out = blocks[i:, :, :, i]
            torch.add(blocks[i - 1 : -1, :, :, i - 1], change[i - 1 :, :, i - 1], out=out)
        blocks[:i, :, :, i] = blocks[i, :, :, :i].permute(2, 3, 4, 0, 1)


# --------------------------------------------------------------------------------------- statistics


def _spares_patches(conv: Convolution, d: Tensor) -> bool:
    """Whether the second moment of the patches is taken without them, by the output's gradient.

    At stride 1, as larger ones share next to nothing between taps, and on the CPU; on CUDA nothing
    is measured, and float32 convolutions round to TF32. On one core, float32, 3 x 3, it is 2.4 to
    4.9 times as fast at 16 x 16 positions and above with 16 to 128 channels, 1.7 at 8 x 8. Below a
    million patch elements, or with a window of less than twice the kernel's reach, it is slower.
    """
    plain = isinstance(conv, nn.Conv1d | nn.Conv2d) and conv.groups == 1
    if not plain or d.device.type != "cpu" or any(n > 1 for n in (*conv.stride, *conv.dilation)):
        return False
    for output, kernel in zip(d.shape[2:], conv.kernel_size, strict=True):
        if output <= 2 * (kernel - 1):
            return False
    taps = math.prod(conv.kernel_size)
    elements = len(d) * d.shape[2:].numel() * min(conv.in_channels * taps, 1024)
    return taps > 1 and elements >= AUTOCORRELATION_ELEMENTS


def _gram_without_patches(x: Tensor, conv: Convolution, homogeneous: bool) -> Tensor:
    """:func:`gram` of the patches of ``x``, computed without patches."""
    x = pad_input(x, conv)
    if x.dim() == 3:  # of one dimension: an image of one row
        x = x.unsqueeze(2)
    k1, k2 = (1, *conv.kernel_size)[-2:]
    height = x.shape[2] - k1 + 1
    width = x.shape[3] - k2 + 1
    moment = patch_second_moment(x, (k1, k2)).unsqueeze(0)
    if not homogeneous:
        return moment
    windows = x.sum(0).unfold(1, height, 1).unfold(2, width, 1)  # (C, k₁, k₂, H, W)
    return append_ones(moment, windows.sum((-2, -1)).view(1, -1), len(x) * height * width)


def _rows(maps: Tensor, dims: int) -> Tensor:
    """Maps ``(N, groups, *features, *locations)`` as rows ``(groups, N x locations, features)``.

    They are copied along the locations, which lie next to each other in most inputs.
    """
    columns = maps.movedim(0, -dims - 1)
    return columns.reshape(len(columns), maps.shape[2:-dims].numel(), -1).mT


@dataclass(frozen=True)
class ConvolutionKind(LayerKind):
    """A convolution, whose rows are patches of x, or a transposed one, those of d.

    All examples take part.
    """

    transposed: bool = False

    @property
    def separate_bias_reason(self) -> str:  # type: ignore[override]
        """Why the bias is not the homogeneous coordinate of A; "" if it is."""
        return "multiplied at other positions" if self.transposed else ""

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        """Sizes of the factors, of channels and patches."""
        conv = cast(Convolution, module)
        first, patch = conv.weight.shape[0] // conv.groups, conv.weight.shape[1:].numel()
        if self.transposed:
            return FactorShape(conv.groups, first, patch, transposed=True)
        return FactorShape(conv.groups, patch + int(bias), first)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Statistics of a pair, ``(N, channels, *spatial)`` or one example without N."""
        conv = cast(Convolution, module)
        dims = len(conv.kernel_size)
        spatial = tuple(range(-dims, 0))
        x, d = _batched(x, d, dims)

        # Maps of inputs and of gradients, (N, groups, *features, *locations).
        reduces = options.approximation == "reduce"
        spared = not (reduces or self.transposed) and _spares_patches(conv, d)
        if self.transposed:
            inputs = x.unflatten(1, (conv.groups, -1))
            outputs = extract_patches(d, conv)
            for dim in spatial:  # output padding can make room for more
                outputs = outputs.narrow(dim, 0, x.shape[dim])
        else:
            inputs = x if spared else extract_patches(x, conv)
            outputs = d.unflatten(1, (conv.groups, -1))

        if reduces:
            a = gram(inputs.mean(spatial).flatten(2).transpose(0, 1), options.has_bias)
            g = gram(outputs.sum(spatial).flatten(2).transpose(0, 1))
            return PairStatistics({"A": a, "G": g}, len(d))
        if spared:
            a = _gram_without_patches(x, conv, options.has_bias)
        else:
            a = gram(_rows(inputs, dims), options.has_bias)
        g = gram(_rows(outputs, dims)).div_(outputs.shape[-dims:].numel())
        return PairStatistics({"A": a, "G": g}, len(d))

    def weight_gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        """A pair's part of the gradient of the weight."""
        conv = cast(Convolution, module)
        dims = len(conv.kernel_size)
        x, d = _batched(x, d, dims)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            d,
            x if self.transposed else pad_input(x, conv),
            x.new_empty(conv.weight.shape),  # its values do not matter
            None,
            conv.stride,
            conv.padding if self.transposed else [0] * dims,
            conv.dilation,
            self.transposed,
            conv.output_padding,
            conv.groups,
            (False, True, False),
        )
        return cast(Tensor, gradient)

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        """Whether a pair has the channels of input and output."""
        conv = cast(Convolution, module)
        channels = -len(conv.kernel_size) - 1
        if x.dim() != d.dim() or x.dim() < -channels:
            return False
        return x.shape[channels] == conv.in_channels and d.shape[channels] == conv.out_channels

    def gradient_rows(self, module: nn.Module, x: Tensor, d: Tensor) -> PairRows:
        """Whole images or signals."""
        return image_rows(d, d.dim() > len(cast(Convolution, module).kernel_size) + 1)


def _batched(x: Tensor, d: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """A pair with a batch dimension, which a single example may lack."""
    return (x.unsqueeze(0), d.unsqueeze(0)) if x.dim() == dims + 1 else (x, d)


KINDS.update(dict.fromkeys(CONVOLUTIONS[:3], ConvolutionKind()))
KINDS.update(dict.fromkeys(CONVOLUTIONS[3:], ConvolutionKind(transposed=True)))

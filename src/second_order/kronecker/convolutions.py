"""Convolutions of one to three dimensions, and the second moment of their patches.

A convolution multiplies each patch of its input by the weight. A is therefore a sum
over patches, and G is a sum over the locations of the output. The rows of a pair are
whole images or signals.

A transposed convolution multiplies each location of its input by the weight, and adds
the products to a patch of its output. It is a Linear whose output is that patch. Its
bias is added at locations of the output, and is therefore not the homogeneous
coordinate of A.

On CPUs, at stride 1 and without groups or dilation, ``patch_second_moment`` computes
the sum of a aᵀ over the patches a without forming them, which would take k² times the
memory of the input. The sum is a cross-correlation of the input with itself:

1. Its block for the taps p and q of the kernel is the sum of x[s + p] x[s + q]ᵀ over
   the positions s of the output. Moving both taps by one row moves this window of
   positions by one row.
2. Blocks of pairs of taps that start in a corner of the kernel are computed as the
   weight gradients of a convolution. These are 13 of 81 blocks for a 3 x 3 kernel.
3. Each other block follows from a neighbor: add the row or column at one end of the
   window, and subtract that at the other ("displacement structure", Kailath, Kung &
   Morf 1979).

Because of these differences, rounding errors are relative to the largest block: in
float32 up to 3e-6 of the largest element, compared with 1e-6 with patches.

Shapes: padded input (N, C, H', W'), kernel k₁ x k₂, output H x W with H' = H + k₁ - 1
and W' = W + k₂ - 1.

Sources: Grosse & Martens 2016, eq. 30-35 (KFC), Ba et al. 2017, appendix A (reduce).
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

AUTOCORRELATION_ELEMENTS = 2**20
"""With fewer elements of patches, the patches are faster."""

LONGEST_SUM = 2**14
"""Positions per call of oneDNN, which adds them one after the other. With half a
million positions, float32 sums had errors of 2e-4."""


# ------------------------------------------------------------------------------ patches


def pad_input(x: Tensor, conv: Convolution) -> Tensor:
    """Pad ``x``, ``(N, C, *spatial)``, as ``conv`` does."""
    sides: list[int] = []  # before and after each dimension, the last dimension first
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
    """Extract the patches of ``x``, ``(N, C, *spatial)``: a view, unless it is padded.

    Returns:
        A tensor ``(N, groups, C / groups, *kernel, *output)``. Its dimensions from 2 to
        2 + k have the order of ``conv.weight.flatten(1)``.
    """
    dims = len(conv.kernel_size)
    x = pad_input(x, conv)
    for i in range(dims):
        dilation = conv.dilation[i]
        window = dilation * (conv.kernel_size[i] - 1) + 1
        # unfold appends the window as the last dimension. Every dilation-th entry is a
        # tap.
        x = x.unfold(2 + i, window, conv.stride[i])[..., ::dilation]
    # (N, C, *output, *kernel) -> (N, C, *kernel, *output)
    output_dims = range(2, 2 + dims)
    kernel_dims = range(2 + dims, 2 + 2 * dims)
    x = x.permute(0, 1, *kernel_dims, *output_dims)
    return torch.unflatten(x, 1, (conv.groups, -1))


# ------------------------------------------------------- second moments without patches


def patch_second_moment(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Sum the outer products of all patches at stride 1.

    Args:
        x: The padded input, ``(N, C, H', W')``.
        kernel: (k₁, k₂).

    Returns:
        A tensor ``(C k₁ k₂, C k₁ k₂)``, in the order of ``weight.flatten(1)``.
    """
    dim = x.shape[1] * math.prod(kernel)
    x = x.contiguous(memory_format=torch.channels_last)  # 25 % faster for narrow layers
    blocks = _tap_blocks(x, x, kernel).flatten(0, 1).flatten(2, 3)  # (taps, C, taps, C)
    # Order both indices by channel, then by tap.
    return blocks.permute(1, 2, 3, 0).reshape(dim, dim)


def _tap_blocks(x: Tensor, y: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Compute the blocks of all pairs of taps, ``(k₁, k₂, C, k₁, k₂, C)``.

    Entry [i', j', a, i, j, b] is the sum of y[a, s + (i, j)] x[b, s + (i', j')] over s.
    ``y`` is x. In :func:`_row_change`, it is x with a sign per example, which is the
    example's weight in the sum.
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
    """Correlate two images, with shifts (i', j') less than ``taps``.

    Entry [i', j', a, b] is the sum of y[a, s] x[b, s + (i', j')] over s.
    """
    channels = x.shape[1]
    examples = max(1, LONGEST_SUM // y[0, 0].numel())
    total = x.new_zeros(channels, channels, *taps)
    for x_part, y_part in zip(x.split(examples), y.split(examples), strict=True):
        total += conv2d_weight(x_part, total.shape, y_part)
    return total.permute(2, 3, 0, 1)


def _ends(x: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    """The first and the last ``size`` entries of a dimension."""
    return x.narrow(dim, 0, size), x.narrow(dim, x.shape[dim] - size, size)


def _column_change(x: Tensor, y: Tensor, kernel: tuple[int, int]) -> Tensor:
    """How the blocks of the first row change if both taps move one column right.

    Returns ``(k₁, k₂ - 1, C, k₂ - 1, C)``. Entry [i', j', :, j, :] is the change from
    (j, j') to (j + 1, j' + 1).
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
    """Fill in the blocks whose first tap is in the first row."""
    k2 = blocks.shape[1]
    for j in range(k2 - 1):
        out = blocks[:, j + 1 :, :, 0, j + 1]
        torch.add(blocks[:, j:-1, :, 0, j], change[:, j:, :, j], out=out)
    for j in reversed(range(1, k2 - 1)):
        out = blocks[1:, :j, :, 0, j]
        torch.sub(blocks[1:, 1 : j + 1, :, 0, j + 1], change[1:, :j, :, j], out=out)


def _row_change(x: Tensor, y: Tensor, kernel: tuple[int, int]) -> Tensor:
    """How the blocks change if both taps move one row down.

    Returns ``(k₁ - 1, k₂, k₁ - 1, C, k₂, C)``. Entry [i', :, i, :, :, :] is the change
    from (i, i') to (i + 1, i' + 1).
    """
    taps = kernel[0] - 1
    channels = x.shape[1]

    def as_channels(first: Tensor, last: Tensor) -> Tensor:
        # View the k₁ - 1 rows as further channels (k₁ - 1, C) of an image with one row.
        ends = torch.cat([first, last]).permute(0, 3, 2, 1)
        return ends.flatten(2).unsqueeze(1).permute(0, 3, 1, 2)

    first, last = _ends(y, 2, taps)
    right = as_channels(*_ends(x, 2, taps))
    change = _tap_blocks(right, as_channels(-first, last), (1, kernel[1]))
    change = change.view(kernel[1], taps, channels, kernel[1], taps, channels)
    return change.movedim(4, 0)


def _shift_rows(blocks: Tensor, change: Tensor) -> None:
    """Fill in all blocks from those whose first tap is in the first row."""
    for i in range(blocks.shape[0]):
        if i > 0:
            previous = blocks[i - 1 : -1, :, :, i - 1]
            out = blocks[i:, :, :, i]
            torch.add(previous, change[i - 1 :, :, i - 1], out=out)
        blocks[:i, :, :, i] = blocks[i, :, :, :i].permute(2, 3, 4, 0, 1)


# --------------------------------------------------------------------------- statistics


def _avoids_patches(conv: Convolution, d: Tensor) -> bool:
    """Whether to compute the second moment of the patches without forming them.

    At larger strides, taps have almost no products in common. On CUDA this has not been
    measured, and float32 convolutions round to TF32 there.

    On one core, with float32 and a 3 x 3 kernel, it is 2.4 to 4.9 times as fast as with
    patches at 16 x 16 positions or more and 16 to 128 channels, and 1.7 times at 8 x 8.
    It is slower with fewer than a million elements of patches, or if the output is less
    than twice as large as the kernel.
    """
    if not isinstance(conv, nn.Conv1d | nn.Conv2d) or conv.groups != 1:
        return False
    if d.device.type != "cpu" or any(n > 1 for n in (*conv.stride, *conv.dilation)):
        return False
    for output, kernel in zip(d.shape[2:], conv.kernel_size, strict=True):
        if output <= 2 * (kernel - 1):
            return False
    taps = math.prod(conv.kernel_size)
    elements = len(d) * d.shape[2:].numel() * min(conv.in_channels * taps, 1024)
    return taps > 1 and elements >= AUTOCORRELATION_ELEMENTS


def _gram_without_patches(x: Tensor, conv: Convolution, homogeneous: bool) -> Tensor:
    """Compute :func:`gram` of the patches of ``x`` without forming them."""
    x = pad_input(x, conv)
    if x.dim() == 3:  # view a signal as an image with one row
        x = x.unsqueeze(2)
    k1, k2 = (1, *conv.kernel_size)[-2:]
    height = x.shape[2] - k1 + 1
    width = x.shape[3] - k2 + 1
    moment = patch_second_moment(x, (k1, k2)).unsqueeze(0)
    if not homogeneous:
        return moment
    windows = x.sum(0).unfold(1, height, 1).unfold(2, width, 1)  # (C, k₁, k₂, H, W)
    sums = windows.sum((-2, -1)).view(1, -1)
    return append_ones(moment, sums, len(x) * height * width)


def _to_rows(maps: Tensor, dims: int) -> Tensor:
    """Reshape ``(N, groups, *features, *locations)`` to one row per location.

    The result is ``(groups, N x locations, features)``. The copy runs along the
    locations, which are contiguous in most inputs.
    """
    columns = maps.movedim(0, -dims - 1)
    return columns.reshape(len(columns), maps.shape[2:-dims].numel(), -1).mT


@dataclass(frozen=True)
class ConvolutionKind(LayerKind):
    """A convolution, with patches of x, or a transposed convolution, with patches of d.

    All examples take part in a pass.
    """

    transposed: bool = False

    @property
    def separate_bias_reason(self) -> str:  # type: ignore[override]
        """Why the bias is not the homogeneous coordinate of A. "" if it is."""
        return "multiplied at other positions" if self.transposed else ""

    def shape(self, module: nn.Module, bias: bool) -> FactorShape:
        """Sizes of the factors, from channels and patches."""
        conv = cast(Convolution, module)
        channels = conv.weight.shape[0] // conv.groups
        patch = conv.weight.shape[1:].numel()
        if self.transposed:
            return FactorShape(
                conv.groups, in_dim=channels, out_dim=patch, transposed=True
            )
        return FactorShape(conv.groups, in_dim=patch + int(bias), out_dim=channels)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Compute the sums of ``(N, channels, *spatial)``. One example has no N."""
        conv = cast(Convolution, module)
        dims = len(conv.kernel_size)
        spatial = tuple(range(-dims, 0))
        x, d = _add_batch_dim(x, d, dims)
        is_reduced = options.approximation == "reduce"
        avoids_patches = False
        if not is_reduced and not self.transposed:
            avoids_patches = _avoids_patches(conv, d)

        # Maps of the inputs and of the gradients, (N, groups, *features, *locations).
        if self.transposed:
            inputs = x.unflatten(1, (conv.groups, -1))
            outputs = extract_patches(d, conv)
            for dim in spatial:  # output_padding can make room for more patches
                outputs = outputs.narrow(dim, 0, x.shape[dim])
        else:
            inputs = x if avoids_patches else extract_patches(x, conv)
            outputs = d.unflatten(1, (conv.groups, -1))

        # With "reduce", a row is the mean input and the summed gradient of an example.
        if is_reduced:
            a = gram(inputs.mean(spatial).flatten(2).transpose(0, 1), options.has_bias)
            g = gram(outputs.sum(spatial).flatten(2).transpose(0, 1))
            return PairStatistics({"A": a, "G": g}, len(d))

        # With "expand", each location is a row.
        if avoids_patches:
            a = _gram_without_patches(x, conv, options.has_bias)
        else:
            a = gram(_to_rows(inputs, dims), options.has_bias)
        g = gram(_to_rows(outputs, dims)).div_(outputs.shape[-dims:].numel())
        return PairStatistics({"A": a, "G": g}, len(d))

    def weight_gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        """Compute a pair's contribution to the gradient of the weight."""
        conv = cast(Convolution, module)
        dims = len(conv.kernel_size)
        x, d = _add_batch_dim(x, d, dims)
        padding = [0] * dims
        output_padding = [0] * dims
        if self.transposed:
            # A call with output_size= uses another output padding than the module's.
            padding = [int(p) for p in conv.padding]
            for i in range(dims):
                window = conv.dilation[i] * (conv.kernel_size[i] - 1) + 1
                smallest = (x.shape[2 + i] - 1) * conv.stride[i] + window
                output_padding[i] = d.shape[2 + i] + 2 * padding[i] - smallest
        _, gradient, _ = torch.ops.aten.convolution_backward(
            d,
            x if self.transposed else pad_input(x, conv),
            x.new_empty(conv.weight.shape),  # the weight, whose values do not matter
            None,
            conv.stride,
            padding,
            conv.dilation,
            self.transposed,
            output_padding,
            conv.groups,
            (False, True, False),
        )
        return cast(Tensor, gradient)

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        """Whether a pair has the channels of the layer's input and output."""
        conv = cast(Convolution, module)
        channel_dim = -len(conv.kernel_size) - 1
        if x.dim() != d.dim() or x.dim() < -channel_dim:
            return False
        same_inputs = x.shape[channel_dim] == conv.in_channels
        same_outputs = d.shape[channel_dim] == conv.out_channels
        return same_inputs and same_outputs

    def gradient_rows(self, module: nn.Module, x: Tensor, d: Tensor) -> PairRows:
        """The rows of a pair: whole images or signals."""
        dims = len(cast(Convolution, module).kernel_size)
        return image_rows(d, batched=d.dim() > dims + 1)


def _add_batch_dim(x: Tensor, d: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Add a batch dimension to a pair of a single example."""
    if x.dim() == dims + 1:
        return x.unsqueeze(0), d.unsqueeze(0)
    return x, d


KINDS.update(dict.fromkeys(CONVOLUTIONS[:3], ConvolutionKind()))
KINDS.update(dict.fromkeys(CONVOLUTIONS[3:], ConvolutionKind(transposed=True)))

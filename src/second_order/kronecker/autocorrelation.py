"""The second moment of a convolution's patches, without the patches.

At stride 1 the sum of āāᵀ is a cross-correlation. Its block for the taps p and q of the kernel is
the sum of x[s + p] x[s + q]ᵀ over the output's positions s, and to move both taps by a row only
moves this window of positions by a row. So blocks are computed for pairs that start with a corner
of the kernel, 13 of the 81 for 3 x 3, as weight gradients of a convolution of the input with
itself. The others follow from them by a row or a column at each end of the window ("displacement
structure": Kailath, Kung & Morf 1979). A patch matrix would be k² times the input.

As differences, blocks have rounding errors relative to the largest of them, not to each: in float32
up to 3e-6 of the largest element, against 1e-6 with patches. Where a border of the input outweighs
the rest by a thousand, the smallest eigenvalue of a definite matrix was -5e-6 times the largest.

Shapes: padded input (N, C, H', W'); groups g of c = C / g channels; kernel k₁ x k₂, dilation
d₁ x d₂, output H x W with H' = H + (k₁ - 1) d₁ and W' = W + (k₂ - 1) d₂.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

__all__ = ["patch_second_moment"]

# Positions to a piece: oneDNN adds one after the other: half a million in float32 were off by 2e-4.
LONGEST_SUM = 2**14

BAND_ROWS = 256  # rows that are copied at a time


def patch_second_moment(
    x: Tensor, kernel: tuple[int, int], dilation: tuple[int, int] = (1, 1), groups: int = 1
) -> Iterator[tuple[int, Tensor]]:
    """Sum over examples and output positions of the outer products of the patches, at stride 1.

    The sum is made in bands of rows, so that the whole ``(groups, c k₁ k₂, c k₁ k₂)`` need not
    exist; the taps of a channel are next to each other, as in ``weight.flatten(1)``.

    Args:
        x: Padded input, ``(N, C, H', W')``.
        kernel: ``(k₁, k₂)``.
        dilation: ``(d₁, d₂)``.
        groups: Channels of different groups are not multiplied.

    Yields:
        The first row of a band, and the band as
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
    """Blocks of the second moment by pairs of taps.

    Args:
        x: Padded input, as for :func:`patch_second_moment`.
        y: ``x`` with a sign for each example, its weight in the sum.
        kernel: ``(k₁, k₂)``.
        dilation: ``(d₁, d₂)``.
        groups: Number of groups of channels.

    Returns:
        Shape ``(k₁, k₂, g, c, k₁, k₂, c)``: [i', j', :, a, i, j, b] is the sum of
        y[a, s + (i, j)] x[b, s + (i', j')].
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

    Returns:
        Shape ``(k₁, k₂ - 1, g, c, k₂ - 1, c)``: [i', j', ..., j, :] leads from j, j' to the next.
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

    Returns:
        Shape ``(k₁ - 1, k₂, g, k₁ - 1, c, k₂, c)``: [i', ..., i, :, :, :] leads from i, i' to the
        next.
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

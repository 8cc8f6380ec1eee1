"""The second moment of a convolution's patches, without the patches.

For a stride of 1, the entry of Σ āāᵀ for two taps p and q of the kernel is a sum of
x[s] x[s + q - p] over a window of positions s that moves with p by a few rows and columns only. All
windows share one autocorrelation of the input at (2k - 1)² offsets, the weight gradient of a
convolution; what remains are k - 1 rows and columns for each tap. A patch matrix would be k² times
the input.

Shapes: padded input x (N, C, H', W'), kernel k₁ x k₂, output H = H' - k₁ + 1, W = W' - k₂ + 1.
The window of tap (i, j) is rows i .. i + H - 1 and columns j .. j + W - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

__all__ = ["patch_second_moment"]


def patch_second_moment(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Sum over examples and output positions of the outer products of the patches.

    Args:
        x: Padded input, ``(N, C, H', W')``.
        kernel: ``(k₁, k₂)``; the output must have at least as many rows and columns.

    Returns:
        Shape ``(C k₁ k₂, C k₁ k₂)``, the taps of a channel next to each other, as in
        ``weight.flatten(1)``.

    Raises:
        ValueError: If the output is smaller than the kernel.
    """
    channels, (k1, k2) = x.shape[1], kernel
    height, width = x.shape[2] - k1 + 1, x.shape[3] - k2 + 1
    if height < k1 or width < k2:
        raise ValueError(f"the output {height} x {width} is smaller than the kernel {k1} x {k2}")
    moment = _shared_window(x, k1, k2, height, width)
    if k1 > 1:
        _add_rows(moment, x, k1, k2, height, width)
    if k2 > 1:
        _add_columns(moment, x, k1, k2, height, width)
    size = channels * k1 * k2
    return moment.reshape(size, size)


def _shared_window(x: Tensor, k1: int, k2: int, height: int, width: int) -> Tensor:
    """Rows k₁ - 1 .. H - 1 and columns k₂ - 1 .. W - 1, in the window of every tap."""
    channels = x.shape[1]
    core = x[:, :, k1 - 1 : height, k2 - 1 : width]
    offsets = (channels, channels, 2 * k1 - 1, 2 * k2 - 1)
    # offsets[c, c', u, v] = sum of core[c, s] x[c', s + (u, v)], s counted from the core's corner.
    at: Tensor = conv2d_weight(x, offsets, core)
    rows = torch.arange(k1, device=x.device)
    columns = torch.arange(k2, device=x.device)
    u = (rows[None, :] - rows[:, None] + k1 - 1)[:, None, :, None]
    v = (columns[None, :] - columns[:, None] + k2 - 1)[None, :, None, :]
    blocks = at[:, :, u, v]  # (C, C, k₁, k₂, k₁, k₂): the taps of p before those of q
    return blocks.permute(0, 2, 3, 1, 4, 5).contiguous()


def _add_rows(moment: Tensor, x: Tensor, k1: int, k2: int, height: int, width: int) -> None:
    """The k₁ - 1 rows of each tap's window that are not shared, over its whole width."""
    channels = x.shape[1]
    for i in range(k1):
        rows = [*range(i, k1 - 1), *range(height, height + i)]
        # (N, C, rows, k₂, W): a row of taps sees every row of the strip k₂ times, shifted.
        left = x[:, :, rows].unfold(3, width, 1)
        left = left.permute(1, 3, 0, 2, 4).reshape(channels * k2, -1)
        for i2 in range(k1):
            right = x[:, :, [row + i2 - i for row in rows]].unfold(3, width, 1)
            right = right.permute(0, 2, 4, 1, 3).reshape(-1, channels * k2)
            moment[:, i, :, :, i2, :] += (left @ right).view(channels, k2, channels, k2)


def _add_columns(moment: Tensor, x: Tensor, k1: int, k2: int, height: int, width: int) -> None:
    """The k₂ - 1 columns of each tap's window that are not shared, over the shared rows."""
    channels, core = x.shape[1], height - k1 + 1
    for j in range(k2):
        columns = [*range(j, k2 - 1), *range(width, width + j)]
        left = x[:, :, k1 - 1 : height][:, :, :, columns].transpose(0, 1).reshape(channels, -1)
        for j2 in range(k2):
            strip = x[:, :, :, [column + j2 - j for column in columns]]
            # (N, C, 2 k₁ - 1, columns, core): the shared rows under every offset of the rows.
            right = strip.unfold(2, core, 1).permute(0, 4, 3, 1, 2)
            sums = left @ right.reshape(left.shape[1], channels * (2 * k1 - 1))
            sums = sums.view(channels, channels, 2 * k1 - 1)
            for i in range(k1):
                moment[:, i, j, :, :, j2] += sums[:, :, k1 - 1 - i : 2 * k1 - 1 - i]

"""The rows of a captured pair that are examples: their output gradient is not zero.

A padded token, a label that the loss ignores, or an example beyond a hinge has no part in the loss.
Counted as an example it would thin A by inputs that teach nothing, and a mean over N terms would be
taken for one over more: G would be too large by their number over N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LiveRows", "live_rows"]

LOOKED_AT = 32  # entries of each row that are looked at before all are


@dataclass(frozen=True)
class LiveRows:
    """The rows that are examples.

    Attributes:
        mask: ``(rows,)``, True where a row is an example; None if all rows are known to be.
        count: Number of examples; on a device a scalar tensor, which the host does not read.
    """

    mask: Tensor | None
    count: int | Tensor

    def pick(self, rows: Tensor) -> Tensor:
        """The examples among ``(rows, ...)``; on a device all rows, the others being zero.

        A row that is no example and not finite becomes NaN, as it does in the weight's gradient.
        """
        if self.mask is None:
            return rows
        if _answers_at_once(rows.device) and bool(rows[~self.mask].isfinite().all()):
            return rows[self.mask]
        return rows * self.mask.view(-1, *[1] * (rows.dim() - 1))

    def same(self, other: LiveRows) -> bool:
        """Whether both are known to be the same rows; False where a device would have to tell."""
        if self.mask is None or other.mask is None:
            return self.mask is other.mask and bool(self.count == other.count)
        return _answers_at_once(self.mask.device) and torch.equal(self.mask, other.mask)


def live_rows(d: Tensor) -> LiveRows:
    """The rows of ``(rows, ...)`` that have an entry other than zero."""
    if not _answers_at_once(d.device):
        mask = d.flatten(1).abs().amax(1) != 0
        return LiveRows(mask, mask.sum())
    # Few rows have zeros in all their first entries: only those are looked at in full.
    look = d[:, :LOOKED_AT]
    while look.dim() > 2:
        look = look.select(-1, look.shape[-1] // 2)
    suspects = (look == 0).all(1).nonzero().squeeze(1)
    if len(suspects) == 0:
        return LiveRows(None, len(d))
    dead = suspects[d[suspects].flatten(1).abs().amax(1) == 0]
    if len(dead) == 0:
        return LiveRows(None, len(d))
    mask = torch.ones(len(d), dtype=torch.bool)
    mask[dead] = False
    return LiveRows(mask, len(d) - len(dead))


def _answers_at_once(device: torch.device) -> bool:
    """Whether values on a device can be read without waiting, as on the CPU."""
    return device.type == "cpu"

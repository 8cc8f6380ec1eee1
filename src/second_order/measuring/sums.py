"""Sums of matrices of layers over a data set, and where they are stored during a pass.

    keep="device"   whole matrices on the model's device, reduced to owners at the end
    keep="cpu"      triangles in host memory, reduced to their owners at the end
    keep="owner"    triangles on their owner only, which receives sums of each batch

With "owner", all ranks have to issue the same collectives. Therefore the matrices have
one order, in which layers usually receive their gradients. When a rank adds to a
matrix, it reduces all matrices up to this one that it has not reduced in this batch,
with zeros for layers that were not called. If a layer adds to its matrix after that,
the addition is sent with the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.distributed.world import World
from second_order.kronecker.layers import gram
from second_order.kronecker.solvers import ieee_matmul
from second_order.kronecker.storage import (
    GATHERED_UP_TO,
    pack_from_blocks,
    pack_upper_triangular,
)
from second_order.measuring.layers import Layer

__all__ = ["WIDENING", "Keep", "Key", "Sums", "full_precision"]

WIDENING = {"cuda"}
"""Device types with ``torch.mm(..., out_dtype=torch.float32)`` of 16-bit floats."""

Keep: TypeAlias = Literal["device", "cpu", "owner"]

Key: TypeAlias = tuple[str, str]
"""The name of a layer, and the name of one of its matrices: "A", "G", "L" or "F"."""


class Sums:
    """Sums of matrices of layers, one for each key.

    Args:
        layers: The layers, in the order in which their sums are sent to their owners.
        shapes_of: Returns the shapes of a layer's matrices as their owner stores them,
            by name: ``(groups, n (n + 1) / 2)``, ``(groups, n)`` or ``(groups, n, m)``.
        keep: Where the sums are stored.
        world: The ranks.
        device: The device of the model.
        dtype: The dtype of the sums.
        sends_immediately: With "owner", whether each sum is sent when it is added to,
            instead of at the end of the batch. FSDP2 needs the latter, because its own
            collectives run during the batch.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        shapes_of: Callable[[Layer], Mapping[str, torch.Size]],
        keep: Keep,
        world: World,
        device: torch.device,
        dtype: torch.dtype,
        sends_immediately: bool,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._world = world
        self._is_packed = keep != "device"
        self._is_on_host = keep == "cpu"
        self._sends_batches = keep == "owner" and world.size > 1
        self._sends_immediately = sends_immediately

        self._shapes: dict[Key, torch.Size] = {}
        self._owners: dict[Key, int] = {}
        for layer in layers:
            for name, shape in shapes_of(layer).items():
                self._shapes[layer.name, name] = shape
                self._owners[layer.name, name] = layer.owner
        self._order = list(self._shapes)
        self._positions = {key: position for position, key in enumerate(self._order)}
        self._num_sent = 0  # in this batch

        self._local: dict[Key, Tensor] = {}  # not sent yet
        self._owned: dict[Key, Tensor] = {}  # sums over the ranks

    def add_gram(self, key: Key, rows: Tensor) -> None:
        """Add rowsᵀ rows for rows of shape ``(rows, n)``."""
        is_narrow = rows.dtype in (torch.bfloat16, torch.float16)
        can_widen = self.dtype is torch.float32 and rows.device.type in WIDENING
        widens = is_narrow and can_widen
        if not widens:
            rows = rows.to(self.dtype)

        def product(first: slice, second: slice) -> Tensor:
            left = rows[:, first]
            right = rows[:, second]
            if widens:  # without a float32 copy of the rows
                return torch.mm(left.mT, right, out_dtype=self.dtype).unsqueeze(0)
            if first == second:
                return gram(left.unsqueeze(0))
            return (left.mT @ right).unsqueeze(0)

        dim = rows.shape[-1]
        with full_precision(rows.device):
            if self._is_packed and dim > GATHERED_UP_TO:
                self.add(key, pack_from_blocks(dim, product))
            elif key in self._local and not self._is_packed and not widens:
                self._local[key][0].addmm_(rows.mT, rows)  # without a temporary matrix
            else:
                self.add(key, product(slice(None), slice(None)))

    def add(self, key: Key, matrix: Tensor) -> None:
        """Add a matrix ``(groups, n, n)``, or one as stored. It may be overwritten."""
        if self._is_packed and matrix.shape != self._shapes[key]:
            matrix = pack_upper_triangular(matrix)
        if self._is_on_host:
            matrix = matrix.cpu()
        _add_to(self._local, key, matrix.to(self.dtype))
        if self._sends_batches and self._sends_immediately:
            self._send_until(self._positions[key] + 1)

    def end_batch(self) -> None:
        """Send the sums that were not sent in this batch. Collective with "owner"."""
        if self._sends_batches:
            self._send_until(len(self._order))
            self._num_sent = 0

    def finish(self) -> dict[Key, Tensor]:
        """Return the sums over ranks that this rank owns, as stored. Collective."""
        self._send_until(len(self._order))
        return self._owned

    def _send_until(self, end: int) -> None:
        """Send the sums up to a position of the order to their owners."""
        for key in self._order[self._num_sent : end]:
            self._num_sent += 1  # counts even if the send fails
            self._send(key)

    def _send(self, key: Key) -> None:
        """Reduce what the ranks have added since the last call, to the owner's sum."""
        part = self._local.pop(key, None)
        if part is None:
            device = torch.device("cpu") if self._is_on_host else self.device
            part = torch.zeros(self._shapes[key], dtype=self.dtype, device=device)
        if part.shape != self._shapes[key]:
            part = pack_upper_triangular(part)
        device = part.device
        owner = self._owners[key]
        if self._world.size > 1:
            if self._world.uses_gloo(device):
                part = part.cpu()
            dist.reduce(part, group=self._world.group, group_dst=owner)
        if owner == self._world.rank:
            _add_to(self._owned, key, part.to(device))


def _add_to(sums: dict[Key, Tensor], key: Key, part: Tensor) -> None:
    if key in sums:
        sums[key].add_(part)
    else:
        sums[key] = part


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in full float32, without TF32 and autocast."""
    with ieee_matmul(device), torch.autocast(device.type, enabled=False):
        yield

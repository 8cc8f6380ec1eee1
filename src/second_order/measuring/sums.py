"""Sums over a data set of the matrices of layers, and where they are stored meanwhile.

device   whole matrices on the device of the model, reduced to their owners at the end
cpu      triangles in the host's memory, reduced to their owners at the end
owner    triangles, each on its owner alone: every rank sends its sum of each batch to the owner

With "owner" all ranks send in one fixed order, that in which layers are usually called. When a
layer adds to its sum, the rank sends it and those that come before it in that order, as zeros if
the layer was not called. What a layer adds later is sent with the next batch.
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
from second_order.kronecker.storage import pack_upper_triangular
from second_order.measuring.layers import Layer

__all__ = ["WIDENING", "Keep", "Key", "Sums", "full_precision"]

WIDENING = {"cuda"}
"""Devices whose products of bfloat16 or float16 can be accumulated in float32."""

Keep: TypeAlias = Literal["device", "cpu", "owner"]

Key: TypeAlias = tuple[str, str]
"""A layer's name, and the name of one of its matrices."""


class Sums:
    """Sums of the matrices of layers.

    Args:
        layers: The layers, in the order in which their sums are sent to their owners.
        shapes_of: The shapes of a layer's matrices as its owner stores them, by name:
            ``(groups, n (n + 1) / 2)``, ``(groups, n)`` or ``(groups, n, m)``.
        keep: Where they are stored.
        world: The ranks.
        device: The device of the model.
        dtype: The dtype of the sums.
        at_once: With "owner", send each sum when it is added to, rather than at the end of a batch.
            FSDP2 does not allow it, because its own collectives come between.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        shapes_of: Callable[[Layer], Mapping[str, torch.Size]],
        keep: Keep,
        world: World,
        device: torch.device,
        dtype: torch.dtype,
        at_once: bool,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._by_owner = keep == "owner" and world.size > 1
        self._packed = keep != "device"
        self._on_host = keep == "cpu"
        self._sizes = {(x.name, key): size for x in layers for key, size in shapes_of(x).items()}
        self._owners = {layer.name: layer.owner for layer in layers}
        self._world = world
        self._at_once = at_once
        self._order = list(self._sizes)
        self._turns = {key: turn for turn, key in enumerate(self._order)}
        self._next_turn = 0  # the number of sums that have been sent in this batch
        self._local: dict[Key, Tensor] = {}
        self._owned: dict[Key, Tensor] = {}

    def add_gram(self, key: Key, rows: Tensor) -> None:
        """Add rowsᵀ rows, of ``(rows, n)``."""
        is_narrow = self.dtype is torch.float32 and rows.dtype in (torch.bfloat16, torch.float16)
        widens = is_narrow and rows.device.type in WIDENING
        if not widens:
            rows = rows.to(self.dtype)
        with full_precision(rows.device):
            if widens:
                self.add(key, torch.mm(rows.mT, rows, out_dtype=self.dtype).unsqueeze(0))
            elif self._packed:
                self.add(key, gram(rows.unsqueeze(0)))
            elif key in self._local:
                self._local[key][0].addmm_(rows.mT, rows)
            else:
                self.add(key, (rows.mT @ rows).unsqueeze(0))

    def add(self, key: Key, matrix: Tensor) -> None:
        """Add ``(groups, n, n)``, or a form in which a sum is stored; takes over its memory."""
        if self._packed and matrix.shape != self._sizes[key]:
            matrix = pack_upper_triangular(matrix)
        matrix = matrix.cpu() if self._on_host else matrix
        _add_to(self._local, key, matrix.to(self.dtype))
        if self._by_owner and self._at_once:
            self._send(self._turns[key] + 1)

    def end_batch(self) -> None:
        """Send the sums that have not been sent in this batch. Collective with "owner"."""
        if self._by_owner:
            self._send(len(self._order))
            self._next_turn = 0

    def _send(self, end: int) -> None:
        """Send all sums up to a turn to their owners."""
        for key in self._order[self._next_turn : end]:
            self._next_turn += 1  # also if this one raises
            total = self._reduce_to_owner(key)
            if total is not None:
                _add_to(self._owned, key, total)

    def _reduce_to_owner(self, key: Key) -> Tensor | None:
        """The sum over ranks of what each has added since the last one; None if not the owner."""
        part = self._local.pop(key, None)
        if part is None:
            place = "cpu" if self._on_host else self.device
            part = torch.zeros(self._sizes[key], dtype=self.dtype, device=place)
        if part.shape != self._sizes[key]:
            part = pack_upper_triangular(part)
        owner = self._owners[key[0]]
        device = part.device
        if self._world.size > 1:
            part = part.cpu() if self._world.backend == "gloo" else part
            dist.reduce(part, group=self._world.group, group_dst=owner)
        return part.to(device) if owner == self._world.rank else None

    def finish(self) -> dict[Key, Tensor]:
        """The sums over all ranks that this rank owns, as they are stored. Collective."""
        self._send(len(self._order))
        return self._owned


def _add_to(sums: dict[Key, Tensor], key: Key, part: Tensor) -> None:
    sums[key] = sums[key].add_(part) if key in sums else part


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products in full float32 for a block: without TF32 and without autocast."""
    with ieee_matmul(device), torch.autocast(device.type, enabled=False):
        yield

"""Sums over a data set of the matrices of layers, and where they live while they grow.

device   whole on the device, each process its own, summed to the owners at the end
cpu      as triangles in the host's memory
owner    as triangles, each on one process alone: with every batch each layer's sum goes to its
         owner, in a fixed order, and nobody keeps another's for longer than that takes

With "owner" a layer's turn comes once a batch, in the order in which layers are called. When a
layer has been called, those before it have had theirs, with or without a sum of this process; what
comes after its turn waits for the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from second_order.distributed.world import World
from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.layers import gram
from second_order.kronecker.triangles import pack_upper_triangular

__all__ = ["WIDENING", "Keep", "Key", "Sums"]

WIDENING = {"cuda"}
"""Devices whose products of narrow numbers can be added up in float32."""

Keep: TypeAlias = Literal["device", "cpu", "owner"]

Key: TypeAlias = tuple[str, str]
"""A layer's name, and the letter of one of its matrices."""


class Sums:
    """Sums of the layers of a pass over the data.

    Args:
        keep: Where they live; "owner" among several processes only.
        sizes: The shape of each sum as it is kept, ``(groups, n, n)``, ``(groups, n (n + 1) / 2)``
            or ``(groups, n)``, in the order of turns.
        owners: The process that gets each.
        world: The processes.
        device: Where the model is.
        dtype: Of the sums.
        waits: With "owner", wait for a layer's message before the next Linear's sum is computed,
            as little memory is then under way. Not where others need this process's passes to send
            theirs, as FSDP2 does: then what has not arrived is waited for as the batch ends.
    """

    def __init__(
        self,
        keep: Keep,
        sizes: Mapping[Key, torch.Size],
        owners: Mapping[Key, int],
        world: World,
        device: torch.device,
        dtype: torch.dtype,
        waits: bool = True,
    ) -> None:
        self._keep, self._sizes, self._owners = keep, sizes, owners
        self._world, self._device, self.dtype = world, device, dtype  # dtype: of the sums
        self._turns = {key: turn for turn, key in enumerate(sizes)}
        self._order = list(sizes)
        self._next = 0
        self._sending: deque[tuple[Key, Tensor, Any]] = deque()
        self._waits = waits
        self.found: dict[Key, Tensor] = {}
        self.waiting: dict[Key, Tensor] = {}  # for their owners

    def drop(self, keys: Iterable[Key]) -> None:
        """Expect no more of these."""
        for key in set(keys).intersection(self._turns):
            del self._turns[key]
            self.found.pop(key, None)
        self._order = list(self._turns)
        self._turns = {key: turn for turn, key in enumerate(self._order)}

    def gram(self, key: Key, rows: Tensor) -> None:
        """Add rowsᵀ rows, of ``(rows, n)``."""
        self._make_room()
        wide = self.dtype
        narrow = wide is torch.float32 and rows.dtype in (torch.bfloat16, torch.float16)
        fused = narrow and rows.device.type in WIDENING
        rows = rows if fused else rows.to(wide)
        with ieee_matmul(rows.device), torch.autocast(rows.device.type, enabled=False):
            if self._keep != "device" and not fused:
                self.add(key, gram(rows.unsqueeze(0), False, triangular=True))
            elif self._keep != "device":
                self.add(key, _product(rows, wide).unsqueeze(0))
            elif key not in self.found:
                self.found[key] = _product(rows, wide).unsqueeze(0)
            elif not fused:
                self.found[key][0].addmm_(rows.mT, rows)
            elif torch.__version__ >= "2.12":  # before, what is added to had to be narrow, too
                total = self.found[key][0]
                torch.addmm(total, rows.mT, rows, out_dtype=wide, out=total)
            else:
                self.found[key][0].add_(_product(rows, wide))

    def add(self, key: Key, matrix: Tensor) -> None:
        """Add ``(groups, n, n)``, or another form in which a sum is kept; its memory is taken."""
        if self._keep != "device" and matrix.shape != self._sizes[key]:
            matrix = pack_upper_triangular(matrix)
        place = self.waiting if self._keep == "owner" else self.found
        matrix = matrix.to("cpu" if self._keep == "cpu" else self._device, self.dtype)
        place[key] = place[key].add_(matrix) if key in place else matrix
        if self._keep == "owner" and (turn := self._turns[key]) >= self._next:
            self._send(turn + 1)

    def end_batch(self) -> None:
        """Give the layers that have not been called in this batch their turn."""
        if self._keep == "owner":
            self._send(len(self._order))
            self._next = 0
            self._take_in(all_of_them=True)

    def _send(self, end: int) -> None:
        world = self._world
        for key in self._order[self._next : end]:
            self._make_room()
            part = self.waiting.pop(key, None)
            part = self._zeros(key) if part is None else part
            part = part.cpu() if world.backend == "gloo" else part
            to = self._owners[key]
            work = dist.reduce(part, group=world.group, group_dst=to, async_op=True)
            self._sending.append((key, part, work))
            self._next += 1  # also where the next one raises: it is not sent again

    def _make_room(self) -> None:
        """Take in sums before another is computed or sent."""
        self._take_in(all_of_them=self._waits)

    def _take_in(self, all_of_them: bool) -> None:
        """Take in the sums that have arrived, or wait for all that are under way."""
        sending = self._sending
        while sending and (all_of_them or sending[0][2].is_completed()):
            key, part, work = sending.popleft()
            work.wait()
            if self._owners[key] == self._world.rank:
                part = part.to(self._device)
                self.found[key] = self.found[key].add_(part) if key in self.found else part

    def finish(self) -> dict[Key, Tensor]:
        """The sums over all processes of which this one is the owner, as they are kept.

        A collective. A sum to which nobody has added is zero.
        """
        if self._keep == "owner":
            self.end_batch()  # what has come after its turn
        mine: dict[Key, Tensor] = {}
        for key in self._order:
            part, size = self.found.pop(key, None), self._sizes[key]
            if part is None:
                part = self._zeros(key)
            if part.shape != size:
                part = pack_upper_triangular(part)
            if self._keep != "owner" and self._world.size > 1:
                self._world.reduce([part], [self._owners[key]]).wait()
            if self._owners[key] == self._world.rank:
                mine[key] = part
        return mine

    def _zeros(self, key: Key) -> Tensor:
        return torch.zeros(self._sizes[key], dtype=self.dtype, device=self._device)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of them, between batches."""
        parts = ("found", self.found), ("waiting", self.waiting)
        return {name: [(*key, part) for key, part in of.items()] for name, of in parts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        place = torch.device("cpu") if self._keep == "cpu" else self._device
        for name in ("found", "waiting"):
            setattr(self, name, {(layer, k): part.to(place) for layer, k, part in state[name]})


def _product(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.dtype == dtype:
        return rows.mT @ rows
    return torch.mm(rows.mT, rows, out_dtype=dtype)

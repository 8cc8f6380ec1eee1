"""Vectors in R^n whose rows are distributed over processes (DHO2, algorithm 2).

Rank p stores the rows D_p of every vector. To multiply, it gathers d, multiplies d by the Hessian
of its own batch, and receives the sum of all results for its rows, weighted by examples. The
recurrence is therefore that of one process on the union of all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.errors import CurvatureError
from second_order.lanczos.hvp import Hessian

__all__ = ["RowSpace", "row_bounds", "row_counts"]


def row_bounds(size: int, processes: int) -> list[int]:
    """Return the index of each process's first row, and n. Counts differ by at most one row."""
    return [size * p // processes for p in range(processes + 1)]


def row_counts(size: int, processes: int) -> list[int]:
    """Return the number of rows of each process."""
    return [stop - start for start, stop in pairwise(row_bounds(size, processes))]


class RowSpace:
    """This process's rows of vectors in R^n, and the Hessian of all processes' batches.

    Use it as a context manager, in which autocast is off except in the loss. If the loss of one
    process cannot be evaluated, every process raises an error on entry. If a product fails later on
    one process, all processes get NaN, so that no process waits for it in a collective.

    Args:
        hessian: The Hessian of this process's batch.
        world: The processes.
        dtype: The dtype of vectors.
        sign: −1.0 for the Hessian of the negative loss.
        local_rows: With a :class:`~second_order.lanczos.hvp.ShardedHessian`, a function that
            returns this process's elements of a complete vector. FSDP2 decides which these are.

    Attributes:
        size: n.
        dtype: The dtype of vectors.
        device: The device of vectors.
        rows: The slice of the n rows that this process has, unless FSDP2 decides.
        error: The error of a product that failed on this process.
    """

    def __init__(
        self,
        hessian: Hessian,
        world: World,
        dtype: torch.dtype,
        sign: float = 1.0,
        local_rows: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.size = hessian.size
        self.dtype = dtype
        self.device = hessian.params[0].device
        bounds = row_bounds(hessian.size, world.size)
        self.rows = slice(bounds[world.rank], bounds[world.rank + 1])
        self.error: Exception | None = None

        self._hessian = hessian
        self._world = world
        self._sign = sign
        self._local_rows = local_rows
        self._row_counts = row_counts(hessian.size, world.size)
        self._loss_sums: Sequence[float] = ()  # of losses and examples, if already read

    def __enter__(self) -> RowSpace:
        try:
            try:
                self._hessian.__enter__()
            except Exception as error:
                self.error = error
            self.raise_together()
        except BaseException:
            self._hessian.__exit__()
            raise
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._hessian.__exit__()
        if error is not None and self.error is not None and error is not self.error:
            raise self.error from error  # the failure here explains why other processes are gone

    def random(self, seed: int, scale: float) -> Tensor:
        """Return this process's rows of scale times a seeded standard normal vector.

        The vector depends neither on the device nor on the number of processes.
        """
        generator = torch.Generator().manual_seed(seed)
        vector = torch.randn(self.size, generator=generator, dtype=torch.float32, device="cpu")
        vector.mul_(scale)
        rows = vector[self.rows] if self._local_rows is None else self._local_rows(vector)
        return rows.to(self.device, self.dtype)

    def gather(self, rows: Tensor) -> Tensor:
        """Gather a complete vector from all processes' rows. Collective."""
        if self._world.size == 1:
            return rows
        return torch.cat(self._world.all_to_all([rows] * self._world.size, self._row_counts))

    def apply(self, d: Tensor) -> Tensor:
        """Return this process's rows of H d, where H is the mean over all batches. Collective.

        If FSDP2 has sharded the parameters, errors are raised immediately, because the other
        processes then wait in the collectives of FSDP2.
        """
        if self._local_rows is not None:
            return self._hessian.product(d).mul_(self._sign)

        # Multiply by the Hessian of the local batch. After an error, send NaN instead.
        d = self.gather(d)
        h = None
        if self.error is None:
            try:
                h = self._hessian.product(d)
            except Exception as error:  # the other processes wait for the sum below
                self.error = error
        if h is None:
            h = torch.full_like(d, torch.nan)

        weight = self._sign * self._hessian.examples
        if self._world.size == 1:
            return h if weight == 1.0 else h.div_(weight)

        # Send each process its rows and the weight, and sum up what arrives.
        weight_element = h.new_full((1,), weight)
        messages = [torch.cat([rows, weight_element]) for rows in h.split(self._row_counts)]
        message_size = len(messages[self._world.rank])
        received = self._world.all_to_all(messages, [message_size] * self._world.size)
        total = torch.stack(received).sum(0)
        return total[:-1] / total[-1]

    def read(self, numbers: Sequence[Tensor]) -> list[float]:
        """Return the values of small tensors. On a device this synchronizes once.

        The loss of a device is read in the same copy, because a refresh needs it next.
        """
        tensors = list(numbers)
        on_device = self.device.type != "cpu"
        if on_device:
            tensors.append(self._sum_losses())
        values: list[float] = torch.cat([x.reshape(-1).double() for x in tensors]).tolist()
        if on_device:
            self._loss_sums = values[-2:]
            values = values[:-2]
        return values

    def _sum_losses(self) -> Tensor:
        """Sum all processes' losses and examples of the last product, ``(2,)``. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums[0] += self._hessian.loss
        sums[1] += self._hessian.examples
        return self.total(sums)

    def loss(self) -> float:
        """Return the mean loss of all processes' batches at the last product."""
        loss, examples = self._loss_sums or self._sum_losses().tolist()
        return self._sign * float(loss) / float(examples)

    def total(self, x: Tensor) -> Tensor:
        """Sum a small tensor over the processes, in float64 if there are several. Collective."""
        if self._world.size > 1:
            x = x.double()
            self._world.all_reduce([x]).wait()
        return x

    def broadcast_from_first(self, x: Tensor) -> Tensor:
        """Return the first process's values of a small tensor, on the CPU. Collective."""
        if self._world.size > 1:
            x = x.to(self.device)
            self._world.broadcast_from_first([x])
        return x.cpu()

    def raise_together(self) -> None:
        """Raise on every process if a product has failed on one of them. Collective.

        Raises:
            CurvatureError: On a process whose product did not fail, naming the one that failed; and
                on all, if no process's loss depends on the parameters.
            Exception: The error of the product, on the process where it failed.
        """
        device = "cpu" if self._world.size == 1 else self.device
        flags = torch.zeros(self._world.size + 1, dtype=torch.float32, device=device)
        flags[self._world.rank] = float(self.error is not None)
        flags[-1] = float(self._hessian.constant is not True)
        self._world.all_reduce([flags]).wait()
        *failed, depends = flags.tolist()
        if self.error is not None:
            raise self.error
        if any(failed):
            raise CurvatureError(
                f"the curvature closure failed on rank {failed.index(1.0)}; see its log for the "
                f"error"
            )
        if not depends:
            raise CurvatureError(
                "the loss of the curvature closure does not depend on any of the parameters; "
                "evaluate the model that has these parameters"
            )

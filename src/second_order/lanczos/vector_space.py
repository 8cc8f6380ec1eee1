"""Vectors whose rows are spread over processes (DHO2, algorithm 2).

Rank p keeps rows D_p. A product gathers d, multiplies by the Hessian of the rank's own batch, and
sums the results to their rows, weighted by examples: the same recurrence as that of one process
on the union of the batches.
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
    """The index at which each process's rows start, and n; parts differ by at most one row."""
    return [size * p // processes for p in range(processes + 1)]


def row_counts(size: int, processes: int) -> list[int]:
    """The number of rows of each process."""
    return [stop - start for start, stop in pairwise(row_bounds(size, processes))]


class RowSpace:
    """The rows of this process of vectors in R^n, and the Hessian of all processes' batches.

    A context to multiply in, with autocast off for all but the loss. A process whose loss cannot be
    evaluated raises its error on entering, and all others with it. A product that fails on one
    process gives NaN on all of them, so that no process is left waiting; there :attr:`error` says
    why. With a sign of −1 it is the Hessian of the negative loss. This process has the slice
    :attr:`rows` of the n rows; or, of a :class:`~second_order.lanczos.hvp.ShardedHessian`, those
    that FSDP2 has left it of the parameters, which ``mine`` takes out of a whole vector.
    """

    def __init__(
        self,
        hessian: Hessian,
        world: World,
        dtype: torch.dtype,
        sign: float = 1.0,
        mine: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.size = hessian.size
        self.dtype = dtype
        self.device = hessian.params[0].device
        bounds = row_bounds(hessian.size, world.size)
        self.rows = slice(bounds[world.rank], bounds[world.rank + 1])
        self.error: Exception | None = None
        self._sums: Sequence[float] = ()  # of losses and examples, read with the coefficients
        self._hessian = hessian
        self._world = world
        self._sign = sign
        self._mine = mine
        self._sizes = row_counts(hessian.size, world.size)

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
            raise self.error from error  # what has failed here is why others do not answer

    def random(self, seed: int, scale: float) -> Tensor:
        """This process's rows of scale times a seeded standard normal vector.

        The vector depends on no device, nor on the number of processes.
        """
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(self.size, generator=generator, dtype=torch.float32, device="cpu")
        whole.mul_(scale)
        rows = whole[self.rows] if self._mine is None else self._mine(whole)
        return rows.to(self.device, self.dtype)

    def gathered(self, rows: Tensor) -> Tensor:
        """The whole vector, gathered from all processes' rows."""
        if self._world.size == 1:
            return rows
        return torch.cat(self._world.all_to_all([rows] * self._world.size, self._sizes))

    def apply(self, d: Tensor) -> Tensor:
        """This process's rows of the Hessian of all processes' batches times d.

        Of FSDP2's shards an error is raised at once: others stand in its collectives, not in ours.
        """
        if self._mine is not None:
            return self._hessian.product(d).mul_(self._sign)
        d = self.gathered(d)
        try:
            h = torch.full_like(d, torch.nan) if self.error else self._hessian.product(d)
        except Exception as error:  # the others sum next, and would wait in vain
            self.error, h = error, torch.full_like(d, torch.nan)
        weight = self._sign * self._hessian.examples
        if self._world.size == 1:
            return h if weight == 1.0 else h.div_(weight)
        # Send every process its rows, with the weight, and add up what arrives.
        parts = [torch.cat([rows, rows.new_full((1,), weight)]) for rows in h.split(self._sizes)]
        arriving = [len(parts[self._world.rank])] * self._world.size
        total = torch.stack(self._world.all_to_all(parts, arriving)).sum(0)
        return total[:-1] / total[-1]

    def read(self, numbers: Sequence[Tensor]) -> list[float]:
        """The values of small tensors; the host synchronizes with the device once.

        With those of a device comes the loss, which a refresh reads next.
        """
        on_device = self.device.type != "cpu"
        tensors = [*numbers, self._losses()] if on_device else numbers
        found: list[float] = torch.cat([x.reshape(-1).double() for x in tensors]).tolist()
        if on_device:
            *found, loss, examples = found
            self._sums = loss, examples
        return found

    def _losses(self) -> Tensor:
        """The sums of all processes' losses and examples at the last product, ``(2,)``."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums[0] += self._hessian.loss
        sums[1] += self._hessian.examples
        return self.total(sums)

    def loss(self) -> float:
        """The mean loss of all processes' batches at the last product."""
        loss, examples = self._sums or self._losses().tolist()
        return self._sign * float(loss) / float(examples)

    def total(self, x: Tensor) -> Tensor:
        """The sum of a small tensor over the processes, in float64 where there are several."""
        if self._world.size > 1:
            x = x.double()
            self._world.all_reduce([x]).wait()
        return x

    def first(self, x: Tensor) -> Tensor:
        """The first process's values of a small tensor on the CPU, on all processes."""
        if self._world.size > 1:
            x = x.to(self.device)
            self._world.broadcast_from_first([x])
        return x.cpu()

    def raise_together(self) -> None:
        """Raise on every process if a product has failed on one, or no loss has a gradient.

        Raises:
            CurvatureError: The error of the product; elsewhere one that names the process. Or that
                no process's loss depends on the parameters.
        """
        device = "cpu" if self._world.size == 1 else self.device
        flags = torch.zeros(self._world.size + 1, dtype=torch.float32, device=device)
        flags[self._world.rank] = float(self.error is not None)
        flags[-1] = float(self._hessian.constant is not True)
        self._world.all_reduce([flags]).wait()
        *failed, dependent = flags.tolist()
        if self.error is not None:
            raise self.error
        if any(failed):
            raise CurvatureError(
                f"the curvature closure failed on rank {failed.index(1.0)}, whose error says why"
            )
        if not dependent:
            raise CurvatureError(
                "the curvature closure's loss depends on none of the parameters given, so that "
                "they have no curvature; evaluate the model that they are of"
            )

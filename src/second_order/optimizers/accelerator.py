"""What an accelerator of MRDHO2 does: eigenpairs for the workers, and verdicts on their updates.

point/i   c, of some epoch         ->  pairs/i/j: û, residuals and worker j's vectors, rows of mine
try/i     w_E without and with V̂'s  ->  verdict/i/j: the losses of the accelerators' batches

i counts what has been asked for, from 0 on, whatever epochs a checkpoint takes the workers to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from second_order.distributed.collectives import World
from second_order.distributed.courier import Courier
from second_order.errors import SecondOrderError
from second_order.lanczos.hvp import LossFn
from second_order.lanczos.rows import row_bounds
from second_order.lanczos.spectrum import Measured, Pairs, extreme_pairs, mean_loss
from second_order.optimizers.flat import Chunk
from second_order.optimizers.fosi_options import FOSIOptions

__all__ = ["Accelerator", "Subject", "closures_of"]


@dataclass(frozen=True)
class Subject:
    """Whose curvature it is.

    Attributes:
        params: The parameters that train.
        chunks: All of them, to be written.
        dtype: Of the vectors.
        model: The module whose train/eval mode is kept, if it is known.
        sign: −1 where the loss is maximized.
    """

    params: Sequence[Tensor]
    chunks: Sequence[Chunk]
    dtype: torch.dtype
    model: nn.Module | None
    sign: float

    def flat(self) -> Tensor:
        """The parameters, as one vector."""
        return torch.cat([chunk.values(self.dtype) for chunk in self.chunks])

    def write(self, flat: Tensor) -> None:
        """Set the parameters.

        Raises:
            SecondOrderError: If there are more or fewer of them elsewhere.
        """
        n = sum(p.numel() for p in self.params)
        if len(flat) != n:
            raise SecondOrderError(
                f"the workers train {len(flat)} numbers, this accelerator {n}: freeze and unfreeze "
                f"the same parameters on every rank"
            )
        flat = flat.to(self.params[0].device, self.dtype)
        for chunk in self.chunks:
            chunk.overwrite(flat[chunk.columns])


class Accelerator:
    """Answers the workers' messages.

    Args:
        courier: To the workers.
        team: The accelerators.
        options: Of the eigenpairs.
        workers: How many workers there are.
        judges: Whether final updates are guarded.

    Attributes:
        answered: How many points' eigenpairs have been computed.
    """

    def __init__(
        self, courier: Courier, team: World, options: FOSIOptions, *, workers: int, judges: bool
    ) -> None:
        self._courier, self._team, self._options = courier, team, options
        self._workers, self._judges = workers, judges
        self._loss_fn: LossFn | Sequence[LossFn] | None = None
        self.answered = 0

    @property
    def dismissed(self) -> bool:
        """Whether the workers have said goodbye."""
        return self._courier.closed_there

    def close(self, patience: float) -> None:
        """Say goodbye."""
        self._courier.close(patience)

    def help(
        self, subject: Subject, closures: Iterator[Any], enough: Callable[[Courier], bool]
    ) -> None:
        """Answer messages until the workers close or are lost, or it is enough.

        Args:
            subject: What to compute eigenpairs of.
            closures: The curvature closure of each epoch.
            enough: Asked while there is nothing to do.

        Raises:
            CurvatureError: If the loss cannot be evaluated or differentiated twice.
        """
        courier = self._courier
        while True:
            point, trial = f"point/{self.answered}/{self._team.rank}", ""
            courier.expect(point)
            if self._judges and self._loss_fn is not None:
                trial = f"try/{self.answered - 1}/{self._team.rank}"
                courier.expect(trial)
            asked = courier.arrived(trial)
            if asked is not None:
                self._judge(subject, *asked[0])
                continue
            message = courier.wait(point, partial(self._interrupted, trial, enough))
            if message is not None:
                courier.forget(trial)
                self._compute(subject, closures, *message)
            elif not courier.holds(trial):
                return

    def _interrupted(self, trial: str, enough: Callable[[Courier], bool]) -> bool:
        return self._courier.holds(trial) or enough(self._courier)

    def _compute(
        self,
        subject: Subject,
        closures: Iterator[Any],
        point: Sequence[Tensor],
        asked: Mapping[str, Any],
    ) -> None:
        """û, V̂ at c, to the workers; if that fails they are told to go on without."""
        try:
            subject.write(point[0])
            self._loss_fn = next(closures)
            pairs = self._pairs(subject, self._loss_fn, asked["epoch"])
        except Exception:
            self._courier.close(1.0)
            raise
        note = {"finite": pairs.finite, "products": pairs.iterations}
        cuts = row_bounds(len(pairs.values), self._workers)
        with torch.autocast(subject.params[0].device.type, enabled=False):
            rows = pairs.vectors() if pairs.finite else None
        for j in range(self._workers):
            tensors = []
            if rows is not None:
                tensors = [pairs.values, pairs.bounds(), rows[cuts[j] : cuts[j + 1]]]
            self._courier.post(f"pairs/{self.answered}/{j}/{self._team.rank}", tensors, **note)
        self.answered += 1

    def _pairs(self, subject: Subject, loss_fn: Any, epoch: int) -> Pairs:
        options = self._options
        measured = Measured(
            loss_fn,
            subject.params,
            self._team,
            subject.dtype,
            options.hvp,
            subject.model,
            subject.sign,
        )
        with record_function("second_order.lanczos"), measured as space:
            pairs = extreme_pairs(
                space,
                space.random(options.seed + epoch, 1.0),
                options.largest,
                options.smallest,
                iterations=options.lanczos_iterations,
                tol=options.lanczos_tol,
                seed=options.seed,
            )
            space.raise_together()
        return pairs

    def _judge(self, subject: Subject, before: Tensor, after: Tensor) -> None:
        """The losses of the accelerators' batches without and with the update."""
        assert self._loss_fn is not None
        losses = []
        for flat in (before, after):
            with record_function("second_order.judge"):
                subject.write(flat)
                loss = mean_loss(self._loss_fn, subject.params, self._team, subject.model)
            losses.append(subject.sign * loss if math.isfinite(loss) else None)
        if self._team.rank == 0:
            for j in range(self._workers):
                self._courier.post(f"verdict/{self.answered - 1}/{j}", [], losses=losses)


def closures_of(batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> Iterator[Any]:
    """The loss of each batch, over and over.

    Raises:
        ValueError: If there is none.
    """
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield partial(loss_fn, batch)
        if empty:
            raise ValueError("batches is empty, or an iterator that has ended; give a loader")

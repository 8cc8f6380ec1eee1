"""Solves on threads beside training: a layer's factors as they are now, decomposed meanwhile.

snapshot   copies of the factors and of what is added to them, begun at the step that submits them
solve      the decompositions of the copies, by a thread
retrieve   the results, on the device of the training
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.kfac.flights import Solved
from second_order.kronecker.background import (
    Streams,
    Ticket,
    WorkerPool,
    retrieve,
    take_snapshot,
)
from second_order.kronecker.decompositions import Decomposition, Problem
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.triangles import unpack_upper_triangular

__all__ = ["Background", "Threads", "solve"]

Decompose: TypeAlias = Callable[[Sequence[Problem]], list[Decomposition | None]]


@dataclass(frozen=True)
class Background:
    """Settings for inverses that are computed on threads beside training.

    Attributes:
        threads: Number of threads of this process.
        device: The device that factors are decomposed on: "cpu" or "cuda".
        max_staleness: Steps after which a layer that is under way is waited for; None: never.
        deterministic: Whether layers land exactly after ``max_staleness`` steps, not before.
    """

    threads: int
    device: str
    max_staleness: int | None
    deterministic: bool


class Threads:
    """The threads of a training's solves, and the CUDA streams of their copies.

    Args:
        training: The training to serve.
        background: The settings.
    """

    def __init__(self, training: Training, background: Background) -> None:
        self._training, self._background = training, background
        self.pool = WorkerPool(self._background.threads)
        self._made_streams: Streams | None = None

    def _streams(self) -> Streams | None:
        """The CUDA streams that copy and solve beside training; None without CUDA."""
        device = self._training.device
        if self._made_streams is None and device.type == "cuda":
            self._made_streams = Streams(*(torch.cuda.Stream(device) for _ in range(3)))
        return self._made_streams

    def check_device(self) -> None:
        """Raise ValueError if inverses are to be solved on a device that does not exist."""
        device = self._training.device
        if self._background.device == "cuda" and device.type != "cuda":
            raise ValueError(
                f"inverse_device='cuda', but the parameters are on {device}; move the "
                f"model there first, or use inverse_device='cpu'"
            )

    def device_for(self, own: torch.device) -> torch.device:
        """The device on which factors are decomposed that are kept on their ``own``."""
        return own if self._background.device == "cuda" else torch.device("cpu")

    def submit(
        self, factors: KroneckerFactors, problems: Mapping[str, Problem], decompose: Decompose
    ) -> Ticket[Solved]:
        """Hand a snapshot of a layer's factors to a thread; returns the ticket.

        Args:
            factors: The factors, of which this rank has all.
            problems: By letter, what is to be decomposed, all on one device; the matrices
                themselves are built from the snapshot.
            decompose: Decomposes them.
        """
        device = next(iter(problems.values())).device
        if device.type == "cuda":  # where float32 products obey a setting of the whole process
            problems = {k: replace(each, dtype=torch.float64) for k, each in problems.items()}
        added = [each.added for each in problems.values() if each.added is not None]
        stored = [factors.stored[letter] for letter in problems]
        streams = self._streams()
        fetch = take_snapshot([*(t for t in stored if t is not None), *added], device, streams)
        work = partial(solve, fetch, problems, factors.triangular, decompose, streams)
        return self.pool.submit(work)

    def retrieve(self, ticket: Ticket[Solved]) -> Solved:
        """The decompositions of a ticket that is done, on the training's device."""
        device, streams = self._training.device, self._streams()
        return {k: retrieve(parts, device, streams) for k, parts in ticket.result().items()}

    def post(self, copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Send copies of tensors from the CPU; copies on CUDA by a thread that waits for them."""
        streams = self._streams()
        if streams is None:
            send(copies)
            return
        fetch = take_snapshot(copies, torch.device("cpu"), streams)
        self.pool.submit(lambda: send(fetch()))

    def close(self) -> None:
        """End the threads."""
        self.pool.close()


def solve(
    fetch: Callable[[], list[Tensor]],
    problems: Mapping[str, Problem],
    triangular: bool,
    decompose: Decompose,
    streams: Streams | None,
) -> Solved:
    """Decompose a layer's factors from a snapshot; runs on a thread."""
    snapshot = fetch()
    added = iter(snapshot[len(problems) :])
    built = [
        problem.on(
            partial(_matrix, stored, problem, triangular),
            None if problem.added is None else next(added),
        )
        for stored, problem in zip(snapshot, problems.values(), strict=False)
    ]
    with torch.no_grad():
        if streams is None:
            found = decompose(built)
        elif built[0].device.type == "cpu":  # pinned, to be fetched without waiting
            found = [p and tuple(t.pin_memory() for t in p) for p in decompose(built)]
        else:
            with torch.cuda.stream(streams.solves):
                found = decompose(built)
            streams.solves.record_event().synchronize()
    return {letter: parts for letter, parts in zip(problems, found, strict=True) if parts}


def _matrix(stored: Tensor, problem: Problem, triangular: bool) -> Tensor:
    """A factor of a snapshot as a full matrix, or as a diagonal."""
    if not triangular or problem.is_diagonal:
        return stored.to(problem.dtype, copy=True)
    return unpack_upper_triangular(stored.to(problem.dtype), problem.dim)

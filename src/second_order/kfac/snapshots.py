"""Decompositions of a layer's factors as they were when they were taken: the work of a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from second_order.kronecker.background import Streams
from second_order.kronecker.decompositions import Decomposition, Problem
from second_order.kronecker.triangles import unpack_upper_triangular

__all__ = ["solve"]


def solve(
    fetch: Callable[[], list[Tensor]],
    problems: Mapping[str, Problem],
    triangular: bool,
    decompose: Callable[[Sequence[Problem]], list[Decomposition | None]],
    streams: Streams | None,
) -> dict[str, Decomposition]:
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

"""What one rank does at a step: the parts that a model of time is built on.

Stages are the accounts of :mod:`second_order.stages`; "compare" is the ranks' word of greeting.
Bytes are those that the step itself hands to ``torch.distributed`` and keeps, not estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch

__all__ = [
    "Among",
    "Collective",
    "Compute",
    "Held",
    "Kind",
    "RankWork",
    "StageWork",
    "Transfer",
    "merged",
]

Kind: TypeAlias = Literal["gram", "eigh", "cholesky_inverse", "qr", "matmul"]
Collective: TypeAlias = Literal["all_reduce", "all_to_all", "all_gather"]


@dataclass(frozen=True)
class Compute:
    """Equal pieces of dense linear algebra.

    Attributes:
        stage: The account that the time is on.
        kind: "gram": XᵀX of ``(rows, n)``; "eigh", "cholesky_inverse" and "qr" of ``(n, n)``;
            "matmul": ``(m, k)`` times ``(k, n)``.
        sizes: ``(rows, n)``, ``(n,)`` or ``(m, k, n)``.
        count: Number of pieces.
        dtype: The dtype in which they are computed.
    """

    stage: str
    kind: Kind
    sizes: tuple[int, ...]
    count: int
    dtype: torch.dtype

    @property
    def operations(self) -> float:
        """Floating point operations of all pieces, by the usual counts.

        2 rows n² (the whole product; on a CPU an upper triangle alone is computed, in strips), 2 m
        k n, n³ for a Cholesky inverse, 9 n³ for eigenvectors, 8/3 n³ for QR with Q (Golub & Van
        Loan 2013, sections 4.2, 5.2 and 8.3).
        """
        n = self.sizes[-1]
        if self.kind == "gram":
            each: float = 2 * self.sizes[0] * n**2
        elif self.kind == "matmul":
            each = 2 * math.prod(self.sizes)
        else:
            each = {"eigh": 9.0, "cholesky_inverse": 1.0, "qr": 8 / 3}[self.kind] * n**3
        return each * self.count


@dataclass(frozen=True)
class StageWork:
    """Dense linear algebra of one stage; ranks that do the same share one.

    Attributes:
        stage: The account.
        computes: What is computed, equal pieces together.
    """

    stage: str
    computes: tuple[Compute, ...]

    @cached_property
    def operations(self) -> float:
        """Floating point operations of all pieces."""
        return sum(c.operations for c in self.computes)


@dataclass(frozen=True)
class Among:
    """The ranks that take part in a collective.

    Attributes:
        name: "world", or "row" or "column" of the grid of ranks.
        size: Number of ranks.
        stride: The distance from one of them to the next.
    """

    name: Literal["world", "row", "column"]
    size: int
    stride: int = 1


@dataclass(frozen=True)
class Transfer:
    """Messages of one rank in collectives of one kind.

    Attributes:
        stage: The account that the bytes are on.
        collective: "all_reduce", "all_gather" of equal parts, or "all_to_all" with unlike ones.
        among: The ranks that take part.
        handed: Bytes that this rank passes to ``torch.distributed``.
        moved: Bytes that have to leave it: an all-reduce of n bytes counts 2 (P - 1) / P n, a
            ring's; an all-gather (P - 1) times this rank's part; a message to a named rank its
            size.
        received: Bytes that have to come to it, counted likewise.
        buffers: Bytes of the tensors that are sent and received, while they are under way.
        messages: Number of collectives.
        host: Whether they go by the host, in a gloo group, under NCCL too.
    """

    stage: str
    collective: Collective
    among: Among
    handed: int
    moved: float
    received: float
    buffers: int
    messages: int
    host: bool = False


@dataclass(frozen=True)
class Held:
    """Memory that a rank keeps.

    Attributes:
        what: "parameters", "gradients", "base" (the base's state, as momentum), "factors" (running
            averages), "heads" (their weights and traces), "inverses", and "statistics" (the sums
            of a step with statistics, from the backward pass on until they are taken in).
        nbytes: Bytes.
    """

    what: str
    nbytes: int


@dataclass(frozen=True)
class RankWork:
    """What one rank does at a step, and what it keeps.

    Attributes:
        rank: The rank.
        stages: Dense linear algebra by stage, each once.
        transfers: Messages, in the order of the step.
        held: Memory, each kind once.
    """

    rank: int
    stages: tuple[StageWork, ...]
    transfers: tuple[Transfer, ...]
    held: tuple[Held, ...]

    @property
    def computes(self) -> tuple[Compute, ...]:
        """Dense linear algebra of all stages."""
        return tuple(c for stage in self.stages for c in stage.computes)

    def operations(self, stage: str | None = None) -> float:
        """Floating point operations, of one stage or of all."""
        return sum(s.operations for s in self.stages if stage in (None, s.stage))

    def handed(self, stage: str | None = None) -> int:
        """Bytes handed over, in one stage or in all."""
        return sum(t.handed for t in self.transfers if stage in (None, t.stage))

    def moved(self, stage: str | None = None) -> float:
        """Bytes that leave the rank, in one stage or in all."""
        return sum(t.moved for t in self.transfers if stage in (None, t.stage))

    def nbytes(self, *what: str) -> int:
        """Bytes kept, of some kinds or of all."""
        return sum(h.nbytes for h in self.held if not what or h.what in what)


def merged(stage: str, computes: Iterable[Compute]) -> StageWork:
    """The work of a stage, equal pieces together, in the order of their first."""
    counts: dict[tuple[Kind, tuple[int, ...], torch.dtype], int] = {}
    for c in computes:
        key = c.kind, c.sizes, c.dtype
        counts[key] = counts.get(key, 0) + c.count
    return StageWork(stage, tuple(Compute(stage, *key[:2], n, key[2]) for key, n in counts.items()))

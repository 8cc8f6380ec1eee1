"""The span of some eigenvectors V̂, and the Newton step in it ([D] algorithm 3, [F]).

    c = V̂ᵀg,  mom <- β mom + gain · c,  step coefficients −α |û|⁻¹ mom

A basis keeps V̂ in one of two layouts, behind the same three verbs:

    row     V̂_p ∈ R^{n/P × r}: this process's rows. V̂ᵀx is summed over processes (r elements).
    column  V̂^{(p)} ∈ R^{n × r/P}: this process's vectors. V̂c is summed over processes (n elements).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from second_order.distributed.collectives import Delivery, World
from second_order.lanczos.rows import row_bounds
from second_order.optimizers.flat import Chunk

__all__ = [
    "Basis",
    "ColumnBasis",
    "RowBasis",
    "Subspace",
    "differs_in_momentum",
    "momentum_rule",
    "newton_rates",
    "rest_scale",
    "share_inside",
]


class Basis(Protocol):
    """V̂, wherever its parts are; vectors are lists of this process's chunks."""

    vectors: Tensor
    """``(rows of V̂ᵀ here, columns here)``."""
    mine: slice
    """Which of the r vectors the coefficients here are of."""

    def coefficients(self, x: Sequence[Tensor]) -> Tensor:
        """V̂ᵀx, of the vectors that are ``mine``."""

    def add(self, x: Sequence[Tensor], c: Sequence[Tensor]) -> None:
        """Add V̂c to x in place; c for each chunk."""

    def rows_of_sum(self, rows: slice) -> Tensor:
        """Some rows of the sum of all the vectors, to start a recurrence from."""


class _Chunked:
    def __init__(self, vectors: Tensor, chunks: Sequence[Chunk]) -> None:
        self.vectors = vectors
        self._parts = [vectors[:, chunk.columns] for chunk in chunks]

    def _dots(self, x: Sequence[Tensor]) -> Tensor:
        total: Tensor | None = None
        for part, each in zip(self._parts, x, strict=True):
            total = part @ each if total is None else total.addmv_(part, each)
        return self.vectors.new_zeros(len(self.vectors)) if total is None else total


class RowBasis(_Chunked):
    """This process's rows of all vectors; with one process, all of V̂.

    Args:
        vectors: ``(r, rows)``.
        chunks: Of the rows.
        world: The processes that have the other rows.
    """

    def __init__(self, vectors: Tensor, chunks: Sequence[Chunk], world: World) -> None:
        super().__init__(vectors, chunks)
        self.mine = slice(0, len(vectors))
        self._world = world

    def coefficients(self, x: Sequence[Tensor]) -> Tensor:
        """V̂ᵀx, ``(r,)``."""
        c = self._dots(x)
        self._world.start_sum([c]).wait()
        return c

    def add(self, x: Sequence[Tensor], c: Sequence[Tensor]) -> None:
        """Add V̂c to x in place."""
        for part, each, coefficients in zip(self._parts, x, c, strict=True):
            each.addmv_(part.t(), coefficients)

    def rows_of_sum(self, rows: slice) -> Tensor:
        """The sum of the vectors; ``rows`` are those that are here."""
        return self.vectors.sum(0)


class ColumnBasis(_Chunked):
    """Some of the vectors, whole ([D] algorithm 3).

    Args:
        vectors: ``(r_p, n)``.
        chunks: Of all n.
        world: The processes that have the other vectors.
        count: r.
    """

    def __init__(self, vectors: Tensor, chunks: Sequence[Chunk], world: World, count: int) -> None:
        super().__init__(vectors, chunks)
        bounds = row_bounds(count, world.size)
        self.mine = slice(bounds[world.rank], bounds[world.rank + 1])
        self._world = world

    @classmethod
    def of_rows(cls, rows: Tensor, chunks: Sequence[Chunk], size: int, world: World) -> ColumnBasis:
        """From every process's rows, ``(r, rows)``: about n r (P − 1)/P² elements each."""
        count, everybody = len(rows), range(world.size)
        bounds, cuts = row_bounds(size, world.size), row_bounds(count, world.size)
        items = [
            Delivery(
                source,
                [to],
                (cuts[to + 1] - cuts[to]) * (bounds[source + 1] - bounds[source]),
                rows[cuts[to] : cuts[to + 1]] if source == world.rank else None,
            )
            for source in everybody
            for to in everybody
        ]
        received = world.deliver(items, rows.dtype, rows.device)
        mine = cuts[world.rank + 1] - cuts[world.rank]
        vectors = rows.new_empty((mine, size))
        for item, content in zip(items, received, strict=True):
            if world.rank in item.destinations and content is not None:
                here = slice(bounds[item.source], bounds[item.source + 1])
                vectors[:, here] = content.view(mine, here.stop - here.start)
        return cls(vectors, chunks, world, count)

    @classmethod
    def of_all(cls, vectors: Tensor, chunks: Sequence[Chunk], world: World) -> ColumnBasis:
        """From all vectors, ``(r, n)``."""
        cuts = row_bounds(len(vectors), world.size)
        mine = vectors[cuts[world.rank] : cuts[world.rank + 1]]
        return cls(mine.clone(), chunks, world, len(vectors))

    def coefficients(self, x: Sequence[Tensor]) -> Tensor:
        """V̂^{(p)ᵀ}x, ``(r_p,)``."""
        return self._dots(x)

    def add(self, x: Sequence[Tensor], c: Sequence[Tensor]) -> None:
        """Add V̂c to x in place."""
        sums = [part.t() @ own for part, own in zip(self._parts, c, strict=True)]
        self._world.start_sum(sums).wait()
        torch._foreach_add_(list(x), sums)

    def rows_of_sum(self, rows: slice) -> Tensor:
        """Some rows of the sum of all vectors."""
        total = self.vectors.sum(0)
        self._world.start_sum([total]).wait()
        return total[rows]


def newton_rates(values: Tensor, floor: float) -> Tensor:
    """``1 / max(|û|, floor · max|û|)``: the steps that Newton's method takes in a subspace.

    Args:
        values: ``(r,)`` eigenvalues.
        floor: Relative to the largest in size; near-zero eigenvalues would give endless steps.
    """
    sizes = values.abs()
    largest = sizes.max() if len(sizes) else sizes.new_zeros(())
    rates = 1.0 / torch.maximum(sizes, floor * largest)
    return torch.where(torch.isfinite(rates), rates, 0.0)


def rest_scale(values: Tensor, largest: int, clip: float) -> float:
    """How much longer steps outside the subspace may be: s = clip(|λ₁| / |λ_k|, 1, clip) ([F]).

    Args:
        values: ``(r,)`` eigenvalues, the largest first, in descending order.
        largest: k.
        clip: The most that s may be.
    """
    if largest < 1:
        return 1.0
    first, last = abs(float(values[0])), abs(float(values[largest - 1]))
    return min(max(first / last, 1.0), clip) if last > 0.0 else 1.0


def differs_in_momentum(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the base's momentum is not the same in all groups."""
    return len({str(group.get("betas", group.get("momentum"))) for group in groups}) > 1


def momentum_rule(group: Mapping[str, Any], chosen: float | str) -> tuple[float, float, bool]:
    """(β, gain, nesterov) of mom <- β mom + gain · V̂ᵀg.

    Args:
        group: The base's.
        chosen: A number: a running average with that β; "average": with the base's; "base": as the
            base does it.
    """
    if not isinstance(chosen, str):
        return float(chosen), 1.0 - chosen, False
    if "betas" in group:
        beta = float(group["betas"][0])
        return beta, 1.0 - beta, False
    momentum = float(group.get("momentum") or 0.0)
    if chosen == "average":
        return momentum, 1.0 - momentum, bool(group.get("nesterov"))
    gain = 1.0 - float(group.get("dampening") or 0.0) if momentum else 1.0
    return momentum, gain, bool(group.get("nesterov"))


def share_inside(c: Tensor, gradients: Sequence[Tensor], world: World, *, rows: bool) -> Tensor:
    """‖V̂ᵀg‖² / ‖g‖², on the device.

    Args:
        c: V̂ᵀg, of the vectors that are here.
        gradients: g, of the rows that are here.
        world: The processes.
        rows: Whether it is the rows that are spread over them, and not the vectors.
    """
    inside = c.double().square().sum()
    whole = torch.zeros_like(inside)
    for gradient in gradients:
        whole += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    sums = torch.stack([inside, whole])
    if world.size > 1:  # one of the two is known in full by every process
        sums[0 if rows else 1] /= world.size
        world.start_sum([sums]).wait()
    return sums[0] / sums[1].clamp(min=torch.finfo(sums.dtype).tiny)


@dataclass
class Subspace:
    """What is kept of the last refresh, and the momentum of the gradient inside it.

    The momentum of g₁ lives in R^n and outlasts refreshes: it is V̂ ``momentum`` + ``decayed`` ·
    ``carried``, the second part, of earlier subspaces, being orthogonal to V̂.

    Attributes:
        basis: V̂.
        values: ``(r,)`` û, the largest first; float64 on the CPU.
        residuals: ``(r,)``, float64 on the CPU.
        largest: k.
        rates: ``(r_p,)`` Newton's steps in the vectors that are ``basis.mine``.
        rest_scale: s.
        momentum: Coefficients of the vectors that are ``basis.mine``.
        carried: This process's part of a vector, or None for zero.
        decayed: What is left of ``carried``.
    """

    basis: Basis
    values: Tensor
    residuals: Tensor
    largest: int
    rates: Tensor
    rest_scale: float
    momentum: Tensor
    carried: Tensor | None = None
    decayed: float = 1.0

    def accumulate(self, c: Tensor, decay: float, gain: float, nesterov: bool) -> Tensor:
        """The momentum takes in V̂ᵀg; returns what the Newton step is made of."""
        self.momentum.mul_(decay).add_(c, alpha=gain)
        self.decayed *= decay
        return self.momentum * decay + gain * c if nesterov else self.momentum.clone()

    def momentum_vector(self, chunks: Sequence[Chunk]) -> Tensor:
        """The momentum in full, this process's part."""
        size = sum(sum(chunk.sizes) for chunk in chunks)
        vector = self.momentum.new_zeros(size)
        self.basis.add([vector[c.columns] for c in chunks], [self.momentum] * len(chunks))
        if self.carried is not None:
            vector.add_(self.carried, alpha=self.decayed)
        return vector

    def carry(self, vector: Tensor, chunks: Sequence[Chunk]) -> None:
        """Take over a momentum in full: its part in V̂, and what is left."""
        parts = [vector[chunk.columns] for chunk in chunks]
        self.momentum = self.basis.coefficients(parts)
        self.basis.add(parts, [-self.momentum] * len(chunks))
        self.carried, self.decayed = vector, 1.0

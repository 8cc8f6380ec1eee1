"""The span of some eigenvectors V̂, and the Newton step in it (FOSI; DHO2, algorithm 3).

    c = V̂ᵀg,  mom <- β mom + gain · c,  step coefficients −α |û|⁻¹ mom

A basis keeps V̂ in one of two layouts, behind the same verbs:

    row     V̂_p ∈ R^{n/P × r}: this process's rows. V̂ᵀx is summed over processes (r elements).
    column  V̂^{(p)} ∈ R^{n × r/P}: this process's vectors. V̂c is summed over processes (n elements).

A number that is not finite on one process makes these sums so on all: then none of them adds
anything. Whether it did is a plain value on the CPU, and a tensor elsewhere, as in `trust.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.fosi.fused import fused
from second_order.fosi.trust import Flag, TrustVerdict, newton_step, settled, taken_in
from second_order.fosi.vector import Chunk
from second_order.lanczos.vector_space import row_bounds

__all__ = ["Basis", "Subspace", "newton_rates", "share_inside"]


class Basis:
    """V̂, wherever its parts are; vectors are lists of this process's chunks.

    Attributes:
        vectors: The part of V̂ᵀ here, ``(rows here, columns here)``; columns are cut by ``chunks``.
        by_rows: Whether these are rows of all vectors; with one process, all of V̂. Otherwise they
            are some of ``count`` whole vectors (DHO2, algorithm 3).
        mine: The slice of the r vectors whose coefficients are here.
    """

    def __init__(
        self, vectors: Tensor, chunks: Sequence[Chunk], world: World, count: int | None = None
    ) -> None:
        self.vectors, self.by_rows, self._world = vectors, count is None, world
        self.mine = slice(0, len(vectors))
        if count is not None:
            self.mine = slice(*row_bounds(count, world.size)[world.rank : world.rank + 2])
        self._parts = [vectors[:, chunk.columns] for chunk in chunks]
        self._whole = [[(0, slice(None), part)] for part in self._parts]
        self._spans = [
            [
                (group, slice(columns.start - at, columns.stop - at), vectors[:, columns])
                for at in [chunk.columns.start]
                for group, columns in chunk.spans
            ]
            for chunk in chunks
        ]

    @property
    def alone(self) -> bool:
        """Whether nobody else is to hear of what is not finite, nor is the host."""
        return self._world.size == 1 and self.vectors.device.type != "cpu"

    @classmethod
    def whole_vectors(cls, rows: Tensor, chunks: Sequence[Chunk], size: int, world: World) -> Basis:
        """Make whole vectors of all processes' rows, ``(r, rows)``; about n r (P − 1)/P² each."""
        bounds, cuts = row_bounds(size, world.size), row_bounds(len(rows), world.size)
        mine = cuts[world.rank + 1] - cuts[world.rank]
        widths = [stop - start for start, stop in pairwise(bounds)]
        parts = rows.split([stop - start for start, stop in pairwise(cuts)])
        received = world.swap([part.reshape(-1) for part in parts], [mine * n for n in widths])
        vectors = [part.view(mine, n) for part, n in zip(received, widths, strict=True)]
        return cls(torch.cat(vectors, 1), chunks, world, len(rows))

    def coefficients(
        self, x: Sequence[Tensor], witness: Tensor | None = None, along: Tensor | None = None
    ) -> Tensor:
        """The coefficients V̂ᵀx of the vectors that are ``mine``, of x chunk by chunk.

        If ``witness`` is not finite on a process, neither are they there, nor the sums that
        :meth:`add` makes of them anywhere. A sum over the rows that are here goes ``along``; in
        place it becomes that over all.
        """
        c: Tensor | None = None
        for part, each in zip(self._parts, x, strict=True):
            c = torch.mv(part, each) if c is None else c.addmv_(part, each)
        if c is None:  # a process may have no rows
            c = self.vectors.new_zeros(len(self.vectors))
        if witness is not None:
            c.add_(witness.sum(), alpha=0.0)
        if self.by_rows and self._world.size > 1:
            self._world.all_reduce([c] if along is None else [c, along]).wait()
        return c

    def add(
        self,
        x: Sequence[Tensor],
        c: Sequence[Tensor],
        along: Tensor | None = None,
        sound: Flag | None = None,
    ) -> Flag:
        """Add V̂c to x in place if it is finite; returns whether, the same on all processes.

        By rows it is if c is finite, where it is not known whether that is ``sound``: V̂ is wherever
        V̂ᵀx has been. c is one set, or one of each group. Sums over the vectors that are ``mine`` go
        ``along``; in place they become those over all.
        """
        spans = self._spans if len(c) > 1 else self._whole
        if self.by_rows:
            sound = _finite(c) if sound is None else sound
            for each, parts in zip(x, spans, strict=True) if sound is not False else ():
                # In place, where no answer is waited for.
                new = torch.empty_like(each) if isinstance(sound, Tensor) else each
                for group, span, part in parts:
                    torch.addmv(each[span], part.t(), c[group], out=new[span])
                if isinstance(sound, Tensor):
                    torch.where(sound, new, each, out=each)
            return sound
        sums = [torch.cat([part.t() @ c[group] for group, _, part in parts]) for parts in spans]
        self._world.all_reduce(sums if along is None else [*sums, along]).wait()
        sound = _finite([each.sum() for each in sums])
        _add_where(sound, x, sums)
        return sound

    def rows_of_sum(self, rows: slice) -> Tensor:
        """Some rows of the sum of all vectors, to start from; by rows, those that are here."""
        total = self.vectors.sum(0)
        if self.by_rows:
            return total
        self._world.all_reduce([total]).wait()
        return total[rows]


def _finite(tensors: Sequence[Tensor]) -> Flag:
    """Whether tensors of one shape are finite, by their sum; a plain value on the CPU."""
    total = (tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))).sum()
    return math.isfinite(total.item()) if total.device.type == "cpu" else total.abs() < math.inf


def _add_where(sound: Flag, x: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    """Add to x in place, if ``sound``."""
    if not sums or sound is False:  # a process may have no rows
        return
    if isinstance(sound, Tensor):
        sums = [torch.where(sound, each, sums[0].new_zeros(())) for each in sums]
    torch._foreach_add_(list(x), list(sums))


def newton_rates(values: Tensor, floor: float) -> Tensor:
    """``1 / max(|û|, floor · max|û|)``, ``(r,)``: eigenvalues near 0 would give endless steps."""
    sizes = values.abs()
    largest = sizes.max() if len(sizes) else sizes.new_zeros(())
    rates = 1.0 / torch.maximum(sizes, floor * largest)
    return torch.where(torch.isfinite(rates), rates, 0.0)


def share_inside(c: Tensor, gradients: Sequence[Tensor], world: World, *, rows: bool) -> Tensor:
    """The share of the gradient in the subspace, ‖V̂ᵀg‖² / ‖g‖², on the device.

    Of the coefficients and rows that are here; whether the rows of V̂ are spread over the processes,
    and not its vectors, tells ``rows``.
    """
    inside = c.double().square().sum()
    whole = torch.zeros_like(inside)
    for gradient in gradients:
        whole += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    sums = torch.stack([inside, whole])
    if world.size > 1:  # one of the two is known in full by every process
        sums[0 if rows else 1] /= world.size
        world.all_reduce([sums]).wait()
    return sums[0] / sums[1].clamp(min=torch.finfo(sums.dtype).tiny)


@dataclass
class Subspace:
    """The eigenpairs of the last refresh, and the momentum of the gradient in their span.

    The momentum of g₁ lives in R^n and outlasts refreshes: it is V̂ ``momentum`` + ``decayed`` ·
    ``carried``, the second part, of earlier subspaces, being orthogonal to V̂.
    """

    basis: Basis  # V̂, in one of the two layouts
    values: Tensor  # (r,) û, the largest first; float64 on the CPU
    residuals: Tensor  # (r,), alike
    largest: int  # k, number of the largest eigenpairs
    rates: Tensor  # (r_p,) Newton's steps in the vectors that are ``basis.mine``
    rest_scale: float  # s, by which the base's step is stretched
    momentum: Tensor  # (r_p,) its coefficients
    last: Tensor  # (r_p,) |û|⁻¹ mom of the last step
    carried: Tensor | None = None  # this process's part; None for zero
    decayed: float = 1.0  # the factor of ``carried`` that is left
    fades: float = 0.0  # what a step leaves of it
    unsound: Flag = False  # whether a step was not finite, the same on all processes
    # The last Newton step without α, the base's step in the span, and α of each group.
    taken: tuple[Tensor, Tensor, Sequence[float | Tensor]] | None = None

    def bounded(
        self, step: Tensor, momentum: Tensor, sound: bool, verdict: TrustVerdict
    ) -> tuple[Tensor, Tensor, bool]:
        """Make of a Newton step and momentum, if ``sound``, what the trust region allows of them.

        Returns the step, the momentum, and whether they are to be taken.
        """
        if verdict.undo:
            new, self.last = verdict.back * self.last, torch.zeros_like(step)
            return new, torch.zeros_like(momentum), True
        self.last = step if sound else self.last
        return step * verdict.share, momentum, sound

    def settle_there(
        self,
        gradients: Sequence[Tensor],
        c: Tensor,
        health: Tensor,
        rule: tuple[float, float, bool],
        bounds: tuple[Any, ...],
    ) -> Tensor:
        """Take V̂c out of the gradients on a device, and c into the momentum: nobody waits.

        The gradients are finite if the sum of ``health`` is; ``bounds`` are the numbers of the
        trust region, how many steps are undone, α and the limit of stability, or none. Returns the
        Newton step to make, NaN for none.
        """
        basis, of = self.basis, (self.momentum, self.rates, self.last)
        kept = [self.momentum]
        if bounds:
            kept += [self.last, *bounds[0].unbind(), bounds[1]]
        if basis.by_rows:
            taken_out, step, sound, *after = newton_step(c, *of, health, *rule, *bounds)
            basis.add(gradients, [taken_out], sound=sound)
        else:  # sums over the processes tell, which others' vectors are in
            momentum, step, *terms = taken_in(c, *of, *rule, bool(bounds))
            finite = basis.add(gradients, [-c], along=terms[0] if terms else None)
            sound = torch.as_tensor(finite, device=c.device)
            known = (*terms, self.last, *bounds) if bounds else ()
            found = settled(1.0 / sound, health, c, self.momentum, momentum, step, *known)
            _, step, _, *after = found
        if bounds:
            undo = after.pop()
            for gradient in gradients:  # they are of where the step has led to that is undone
                gradient.masked_fill_(undo, 0.0)
        torch._foreach_copy_(kept, after)
        return step

    def note(self, sound: Tensor) -> None:
        """Remember a step that was not finite."""
        if not isinstance(self.unsound, Tensor):
            self.unsound = torch.zeros_like(sound)
        self.unsound.logical_or_(~sound)

    def momentum_vector(self, chunks: Sequence[Chunk]) -> Tensor:
        """This process's part of the momentum in R^n."""
        vector = self.momentum.new_zeros(self.basis.vectors.shape[1])
        self.basis.add([vector[c.columns] for c in chunks], [self.momentum])
        if self.carried is not None:
            vector.add_(self.carried, alpha=self.decayed)
        return vector

    def fade(self) -> None:
        """Let the momentum outside of the span fade by a step."""
        self.decayed *= self.fades

    def carry(self, vector: Tensor, chunks: Sequence[Chunk]) -> None:
        """Take over a momentum in R^n, split into its part in V̂ and the rest, if it is finite."""
        parts = [vector[chunk.columns] for chunk in chunks]
        c = self.basis.coefficients(parts)
        sound = torch.as_tensor(self.basis.add(parts, [-c]), device=c.device)
        self.momentum = torch.where(sound, c, 0.0)
        self.carried, self.decayed = vector.masked_fill_(~sound, 0.0), 1.0

    def correct(
        self,
        values: Sequence[Tensor],
        moved: Sequence[Tensor],
        step: Tensor,
        scales: Sequence[float | Tensor],
    ) -> Flag:
        """Take the base's step out of the subspace, stretch it, and add the Newton step.

        Of ``values``, the parameters after the base's step, in place; that step, ``moved``, is
        overwritten. The Newton step has these coefficients, not finite to leave it out, and α, in
        ``scales``, of all groups or each. Nothing changes, on any process, where a step is not
        finite on one; returns whether none is.
        """
        basis, stretch = self.basis, self.rest_scale - 1.0
        c = basis.coefficients(moved, witness=None if basis.alone else step)
        if c.device.type == "cpu":
            taken_out = self.rest_scale * c if stretch else c
            steps = [-scale * step - taken_out for scale in scales]
            sound = basis.add(values, steps)
        else:
            c, known, *steps = corrections(c, step, self.rest_scale, *scales)
            sound = basis.add(values, steps, sound=known)
        self.taken = step, c, scales
        if stretch and moved:
            torch._foreach_mul_(list(moved), stretch)
            _add_where(sound, values, moved)
        return sound


@fused
def corrections(c: Tensor, step: Tensor, rest: float, *scales: float | Tensor) -> list[Tensor]:
    """V̂ᵀd₂, not finite where the step is not; whether none is; −α step − s V̂ᵀd₂ of each α."""
    c = c + 0.0 * step.sum()
    steps = [-scale * step - rest * c for scale in scales]
    return [c, torch.stack(steps).sum().abs() < math.inf, *steps]

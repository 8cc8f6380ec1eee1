"""Refreshes of the eigenpairs: Lanczos on the Hessian of a curvature batch, when due.

    start from V̂1, and FRESH of everything else; half as many products then
    û, V̂ <- the k largest and l smallest Ritz pairs          lanczos/
    the bound of s grows while the loss of the batch does not rise

Accelerators (`accelerator.py`) compute their eigenpairs by the same :func:`wanted_pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.fosi.flat_params import FlatParams
from second_order.fosi.options import most_products
from second_order.fosi.state import CARRIED, TENSORS, VECTORS, counts_of, pairs_of
from second_order.fosi.subspace import (
    Basis,
    Subspace,
    finite_or_zero,
    newton_rates,
    whole_vectors,
)
from second_order.fosi.trust import MomentumRule, TrustState
from second_order.lanczos.closure import LossFn
from second_order.lanczos.spectrum import Pairs, extreme_pairs
from second_order.lanczos.vector_space import RowSpace, row_bounds
from second_order.optimizers.config import FOSIOptions
from second_order.training.context import Training
from second_order.training.throttle import Throttle
from second_order.utils.checks import AUTO, check_interval, value_at
from second_order.utils.stages import stage

__all__ = ["Closures", "RefreshedPairs", "Tally", "wanted_pairs"]

Closures: TypeAlias = LossFn | Sequence[LossFn]

# The guard of s, at a refresh: how it grows or shrinks, and what rise of the loss is chance.
GROWTH, SHRINK, TOLERATED_RISE = 1.5, 0.5, 0.1

REST_CLIP = 3.0  # FOSI's bound on s for SGD; adaptive bases, which scale their steps, have 1

VANISHED = 1e-6  # of the last pairs' largest |û|: Newton steps would be a million times as long

FRESH = 0.1
"""The random share of the vector that a refresh starts from."""


def wanted_pairs(
    space: RowSpace, start: Tensor, options: FOSIOptions, *, warm: bool = False, expected: int = 0
) -> Pairs:
    """The k largest and l smallest eigenpairs; fewer products will do from a ``warm`` start.

    About as many as are ``expected``, where that is known.
    """
    pairs = extreme_pairs(
        space,
        start,
        options.largest,
        options.smallest,
        iterations=most_products(options, space.size, warm=warm),
        tol=options.lanczos_tol,
        seed=options.seed,
        expected=expected,
    )
    space.raise_together()
    return pairs


@dataclass(frozen=True)
class Tally:
    """Counts of refreshes and products so far, for :class:`CurvatureReport`."""

    step: int = -1
    products: int = 0
    total_products: int = 0
    refreshes: int = 0
    failures: int = 0


class RefreshedPairs:
    """The eigenpairs in use, refreshed on the curvature batch every ``curvature_interval``."""

    def __init__(self, training: Training, options: FOSIOptions, vector: FlatParams) -> None:
        self._training = training
        self._options = options
        self._vector = vector
        self.subspace: Subspace | None = None  # None without eigenpairs
        self.tally = Tally()
        self.batch_loss = math.inf  # of the curvature batch at the last refresh
        self.bound = 1.0  # on s, that the guard allows
        self._expected = 0  # iterations, as many as the last refresh needed
        self.throttle: Throttle | None = None
        if options.curvature_interval == AUTO and options.wanted > 0:
            self.throttle = Throttle(training, options.overhead, fewest=1)

    # ------------------------------------------------------------------------------ a refresh

    def due(self) -> bool:
        """Whether the eigenpairs are to be refreshed at this step."""
        options = self._options
        step = self._training.steps
        last = self.tally.step
        if options.wanted == 0 or not self._vector.params:
            return False
        if last < 0 and options.warmup_steps is not None:
            return step >= options.warmup_steps
        return step - max(last, 0) >= self.interval(step if last >= 0 else 0)

    def interval(self, step: int) -> int:
        """Steps from a refresh to the next one."""
        options = self._options
        every = options.curvature_interval
        if self.throttle is not None:
            # Until the throttle knows, a product counts as one step.
            products = most_products(options, self._vector.size, warm=False)
            return self.throttle.interval or math.ceil(products / options.overhead)
        every = value_at(every, step)
        check_interval(f"curvature_interval at step {step}: curvature_interval", every)
        return int(every)

    def renew(self, loss_fn: Closures) -> None:
        """û, V̂ <- the eigenpairs of the curvature batch, if they are finite. A collective.

        Raises CurvatureError on all if the loss of one cannot be evaluated or differentiated twice.
        """
        training = self._training
        options = self._options
        with stage("lanczos"):
            measured = self._vector.hessian(loss_fn, options.hvp, options.curvature)
            with measured as space:
                pairs = self._find(space)
                loss = space.loss()
            usable = not pairs.trouble and math.isfinite(loss) and not self._vanished(pairs.values)
            self.count(training.steps, pairs.iterations, failed=not usable)
            if usable:
                self._use(pairs, loss)
            elif training.first_time("refresh failed"):
                kept = "no eigenpairs yet" if self.subspace is None else "the last ones are kept"
                training.warn(
                    f"the curvature at step {training.steps} is not finite, was decomposed "
                    f"wrongly, or has vanished: {kept}, as after each such refresh; statistics() "
                    f"counts them as 'failed'"
                )

    def count(self, step: int, products: int, *, failed: bool) -> None:
        """Count a refresh, here or by an accelerator."""
        before = self.tally
        self.tally = Tally(
            step=step,
            products=products,
            total_products=before.total_products + products,
            refreshes=before.refreshes + 1,
            failures=before.failures + failed,
        )

    def _find(self, space: RowSpace) -> Pairs:
        """The eigenpairs, from the last ones if they are finite."""
        last = self.subspace
        fresh = space.random(self._options.seed + self._training.steps, 1 / math.sqrt(space.size))
        undone: list[Tensor] = []
        if last is not None:  # read with the first numbers of Lanczos: the host synchronizes once
            undone = [TrustState(*last.trust.unbind()).undone]
        space.read_along(undone)
        if warm := last is not None and self._options.warm_start:
            old = last.basis.rows_of_sum(space.rows) / math.sqrt(last.basis.count)
            start = old.add_(fresh, alpha=FRESH)
        else:
            start = fresh
        pairs = wanted_pairs(space, start, self._options, warm=warm, expected=self._expected)
        self._warn_of_steps(sum(space.told or map(float, undone)))
        if warm and pairs.trouble:  # the last vectors were not finite, perhaps
            pairs = wanted_pairs(space, fresh, self._options)
        self._expected = 0 if pairs.trouble else len(pairs.basis)
        return pairs

    def _warn_of_steps(self, count: float) -> None:
        """Warn once of Newton steps that were taken back or left out."""
        if count and self._training.first_time("steps taken back"):
            self._training.warn(
                f"a Newton step before step {self._training.steps} was taken back, because the "
                f"gradient after it was not finite, or had grown far more than the eigenpairs "
                f"tell. Later steps are shorter. If statistics() shows many as 'undone', lower "
                f"newton_scale"
            )

    def _vanished(self, values: Tensor) -> bool:
        """Whether next to nothing is left of the curvature.

        As where a softmax is saturated on the curvature batch: gradients of other batches do not
        vanish with it, and no unit of the loss bounds their Newton steps.
        """
        if self.subspace is None or not len(values):
            return False
        return bool(values.abs().max() < VANISHED * self.subspace.values.abs().max())

    def _use(self, pairs: Pairs, loss: float) -> None:
        """Replace the eigenpairs, and carry the momentum over. A collective.

        ``loss`` is that of the batch that they were computed from, at the same point. While it does
        not rise, s and Newton steps may grow.
        """
        risen = False
        if math.isfinite(self.batch_loss):
            risen = loss - self.batch_loss > TOLERATED_RISE * abs(self.batch_loss)
            self.bound = max(1.0, self.bound * (SHRINK if risen else GROWTH))
        self.batch_loss = loss
        with self._vector.plain():
            momentum = trust = None
            if self.subspace is not None:
                trust = self.subspace.trust
                if self.momentum_rule().decay > 0.0:
                    momentum = self.subspace.momentum_vector()
            self.subspace = None
            self._training.publish()  # frees the old vectors before there are new ones
            vectors = pairs.vectors()
            if not self._by_rows:
                vectors = whole_vectors(vectors, self._vector.size, self._training.world)
            vectors = finite_or_zero(vectors, self._training.world)
            self.subspace = self._subspace(vectors, pairs.values, pairs.bounds(), pairs.largest)
            if trust is not None:
                self.subspace.trust_as(trust, risen=risen)
            if momentum is not None:
                self.subspace.carry(momentum)
        self._training.publish()

    @property
    def _by_rows(self) -> bool:
        return self._vector.spread or self._training.world.size == 1

    def _subspace(
        self, vectors: Tensor, values: Tensor, residuals: Tensor, largest: int
    ) -> Subspace:
        """The subspace of eigenpairs, without momentum."""
        options = self._options
        clip = options.lr_scale_clip
        if clip is None:
            clip = REST_CLIP if type(self._training.base) is torch.optim.SGD else 1.0
        self.bound = min(self.bound, clip)

        # s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip) (FOSI)
        scale = 1.0
        if largest and float(values[largest - 1]) != 0.0:
            ratio = abs(float(values[0] / values[largest - 1]))
            scale = min(max(ratio, 1.0), self.bound if options.lr_scale_guard else clip)

        world, spans = self._training.world, self._vector.group_spans
        basis = Basis(vectors, len(values), self._by_rows, world, spans)
        rates = newton_rates(values, options.eigenvalue_floor)[basis.mine].to(vectors)
        return Subspace(basis, values, residuals, largest, rates, scale)

    def drop(self, why: str) -> None:
        """Drop the eigenpairs, and warn of the reason."""
        self.subspace = None
        self._training.publish()
        self._training.warn(why)

    def close(self) -> None:
        """Drop the eigenpairs, and measure no more what they cost."""
        self.subspace = None
        self.throttle = None

    def momentum_rule(self) -> MomentumRule:
        """How the momentum in the subspace takes in V̂ᵀg; as the first group's base, if named."""
        chosen = self._options.subspace_momentum
        group = self._training.groups[0]
        if not isinstance(chosen, str):
            return MomentumRule(float(chosen), 1.0 - chosen, nesterov=False)
        if "betas" in group:
            beta = float(group["betas"][0])
            return MomentumRule(beta, 1.0 - beta, nesterov=False)
        momentum = float(group.get("momentum") or 0.0)
        nesterov = bool(group.get("nesterov"))
        if chosen == "average":
            return MomentumRule(momentum, 1.0 - momentum, nesterov)
        gain = 1.0 - float(group.get("dampening") or 0.0) if momentum else 1.0
        return MomentumRule(momentum, gain, nesterov)

    # ---------------------------------------------------------------------------------- state

    def counts(self) -> dict[str, float]:
        """The counts of refreshes and the guard that a checkpoint keeps."""
        return {
            "refreshed_at": self.tally.step,
            "batch_loss": self.batch_loss,
            "rest_scale_bound": self.bound,
            **({} if self.throttle is None else self.throttle.saved()),
        }

    def resume(self, saved: Mapping[Tensor, SavedPart], *, with_pairs: bool) -> None:
        """Go on from a checkpoint, with its eigenpairs if wanted, and if the same parameters train.

        A checkpoint of the base alone has no counts: the curvature starts from nothing then.
        """
        counts = counts_of(saved)
        vector = self._vector
        world = self._training.world
        self.subspace = None
        self.tally = replace(self.tally, step=counts.get("refreshed_at", -1))
        self.batch_loss = counts.get("batch_loss", math.inf)
        self.bound = counts.get("rest_scale_bound", 1.0)
        if self.throttle is not None:
            self.throttle.load(saved)
        if not with_pairs:
            return
        pairs = pairs_of(saved, vector.params)
        if pairs is None or not all(VECTORS in saved.get(p, {}) for p in vector.params):
            if any(part.get("largest", -1) >= 0 for part in saved.values()):
                self._training.warn(
                    "the eigenpairs of the checkpoint are not taken over: other parameters trained "
                    "then than now; the base goes on alone until the next refresh"
                )
            return
        vectors = vector.cut({p: saved[p][VECTORS] for p in vector.params}, vector.dtype)
        if not self._by_rows:
            start, stop = row_bounds(len(vectors), world.size)[world.rank :][:2]
            vectors = vectors[start:stop].clone()
        values, residuals = (pairs[name].to("cpu", torch.float64) for name in TENSORS[:2])
        self.subspace = self._subspace(vectors, values, residuals, int(pairs["largest"]))
        self.subspace.resume(
            momentum=pairs["subspace_momentum"].to(vectors),
            last=pairs["last_step"].to(vectors),
            carried=vector.cut({p: saved[p][CARRIED] for p in vector.params}, vector.dtype),
            decayed=float(pairs["carried_decay"]),
            trust=pairs["trust_region"],
        )

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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.fosi.flat_params import FlatParams
from second_order.fosi.state import counts_of, read_pairs, same_params
from second_order.fosi.subspace import (
    Basis,
    Subspace,
    exchange_rows_for_vectors,
    inverse_magnitudes,
)
from second_order.fosi.trust import MomentumRule, trust_after_refresh
from second_order.lanczos.closure import LossFn
from second_order.lanczos.spectrum import Pairs, default_iterations, extreme_pairs
from second_order.lanczos.vector_space import RowSpace, row_bounds
from second_order.optimizers.config import FOSIOptions
from second_order.training.context import Training
from second_order.training.throttle import Throttle
from second_order.utils.checks import AUTO, check_interval, value_at
from second_order.utils.stages import stage

__all__ = ["Closures", "RefreshedPairs", "Tally", "momentum_rule", "wanted_pairs"]

Closures: TypeAlias = LossFn | Sequence[LossFn]

# The guard of s, at a refresh: how it grows or shrinks, and what rise of the loss is chance.
GROWTH, SHRINK, TOLERATED_RISE = 1.5, 0.5, 0.1

REST_CLIP = 3.0  # FOSI's bound on s for SGD; adaptive bases, which scale their steps, have 1

VANISHED = 1e-6  # of the last pairs' largest |û|: Newton steps would be a million times as long

FRESH = 0.1
"""The random share of the vector that a refresh starts from."""

WARM_PRODUCTS = 20
"""Products that a warm start may take whatever the number of pairs."""


def most_products(options: FOSIOptions, size: int, *, warm: bool) -> int:
    """Products of a refresh at most, m, for n parameters; ``warm`` from the last eigenvectors.

    Between refreshes the steep directions turn further than what the second half of the products
    would still correct, so a warm start takes half of them. The smallest eigenvalues, among many
    others, need all.
    """
    wanted = min(options.wanted, size)
    if options.lanczos_iterations is not None:
        return min(size, max(options.lanczos_iterations, wanted))
    usual = default_iterations(size, wanted)
    if not warm or options.num_smallest:
        return usual
    return min(usual, max(2 * wanted, WARM_PRODUCTS))


def wanted_pairs(
    space: RowSpace, start: Tensor, options: FOSIOptions, *, warm: bool = False, expected: int = 0
) -> Pairs:
    """The k largest and l smallest eigenpairs; fewer products will do from a ``warm`` start.

    About as many as are ``expected``, where that is known.
    """
    pairs = extreme_pairs(
        space,
        start,
        options.num_largest,
        options.num_smallest,
        iterations=most_products(options, space.size, warm=warm),
        tol=options.lanczos_tol,
        seed=options.seed,
        expected=expected,
    )
    space.raise_together()
    return pairs


def momentum_rule(options: FOSIOptions, group: Mapping[str, Any]) -> MomentumRule:
    """How the momentum in the subspace takes in V̂ᵀg; as the base of a group, if it is named."""
    chosen = options.subspace_momentum
    if not isinstance(chosen, str):
        return MomentumRule(float(chosen), 1.0 - chosen, nesterov=False)
    if "betas" in group:
        beta = float(group["betas"][0])
        return MomentumRule(beta, 1.0 - beta, nesterov=False)
    momentum = float(group.get("momentum") or 0.0)
    gain = 1.0 - momentum
    if chosen == "base":
        gain = 1.0 - float(group.get("dampening") or 0.0) if momentum else 1.0
    return MomentumRule(momentum, gain, bool(group.get("nesterov")))


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

    def __init__(
        self, training: Training, options: FOSIOptions, vector: FlatParams, *, refreshes: bool
    ) -> None:
        self._training = training
        self._options = options
        self._flat_params = vector
        self.subspace: Subspace | None = None  # None without eigenpairs
        self.closed = not refreshes  # whether there are none, or none any more
        self.tally = Tally()
        self._batch_loss = math.inf  # of the curvature batch at the last refresh
        self._bound = 1.0  # on s, that the guard allows
        self._expected = 0  # iterations, as many as the last refresh needed
        self.throttle: Throttle | None = None
        if options.curvature_interval == AUTO and options.wanted > 0:
            self.throttle = Throttle(training, options.overhead, min_refreshes=1)

    # ------------------------------------------------------------------------------ a refresh

    def is_due(self) -> bool:
        """Whether the eigenpairs are to be refreshed at this step."""
        options = self._options
        step = self._training.steps
        last = self.tally.step
        if self.closed or options.wanted == 0 or not self._flat_params.params:
            return False
        if last < 0 and options.warmup_steps is not None:
            return step >= options.warmup_steps
        return step - max(last, 0) >= self.interval(step if last >= 0 else 0)

    def interval(self, step: int) -> int:
        """Steps from a refresh to the next one."""
        options = self._options
        if self.throttle is not None:
            # Until the throttle knows, a product counts as one step.
            products = most_products(options, self._flat_params.size, warm=False)
            return self.throttle.interval or math.ceil(products / options.overhead)
        every = value_at(options.curvature_interval, step)
        check_interval(f"curvature_interval at step {step}: curvature_interval", every)
        return int(every)

    def refresh(self, loss_fn: Closures) -> None:
        """û, V̂ <- the eigenpairs of the curvature batch, if they are finite. A collective.

        Raises CurvatureError on all if the loss of one cannot be evaluated or differentiated twice.
        """
        training = self._training
        with stage("lanczos"):
            with self._flat_params.hessian(loss_fn) as space:
                pairs = self._find(space)
                loss = space.loss()
            failed = bool(pairs.trouble) or not math.isfinite(loss) or self._vanished(pairs.values)
            self.count(training.steps, pairs.iterations, failed=failed)
            if not failed:
                self._use(pairs, loss)
            elif training.is_first_warning("refresh failed"):
                kept = "no eigenpairs yet" if self.subspace is None else "the last ones are kept"
                training.warn(
                    f"the curvature at step {training.steps} is not finite, was decomposed "
                    f"wrongly, or has vanished: {kept}, as after each such refresh; metrics() "
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
        """The eigenpairs, by Lanczos from the last ones."""
        last = self.subspace
        start = space.random(self._options.seed + self._training.steps, 1 / math.sqrt(space.size))
        warm = last is not None and self._options.warm_start
        if last is not None and warm:
            old = last.basis.sum_of_vectors(space.rows) / math.sqrt(last.basis.count)
            start = old.add_(start, alpha=FRESH)
        pairs = wanted_pairs(space, start, self._options, warm=warm, expected=self._expected)
        self._expected = 0 if pairs.trouble else len(pairs.basis)
        return pairs

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
        if math.isfinite(self._batch_loss):
            risen = loss - self._batch_loss > TOLERATED_RISE * abs(self._batch_loss)
            self._bound = max(1.0, self._bound * (SHRINK if risen else GROWTH))
        self._batch_loss = loss
        with self._flat_params.without_autocast():
            momentum = trust = None
            if self.subspace is not None:
                trust = trust_after_refresh(self.subspace.newton.trust, loss_has_risen=risen)
                if momentum_rule(self._options, self._training.groups[0]).decay > 0.0:
                    momentum = self.subspace.momentum_vector()
            self.subspace = None
            self._training.publish()  # frees the old vectors before there are new ones
            vectors = pairs.vectors()
            if not self._flat_params.by_rows:
                vectors = exchange_rows_for_vectors(
                    vectors, self._flat_params.size, self._training.world
                )
            self.subspace = self._subspace(vectors, pairs.values, pairs.bounds(), pairs.num_largest)
            if trust is not None:
                self.subspace.inherit(momentum, trust)
        self._training.publish()

    def _subspace(
        self, vectors: Tensor, values: Tensor, residuals: Tensor, num_largest: int
    ) -> Subspace:
        """The subspace of eigenpairs, without momentum."""
        options = self._options
        clip = options.lr_scale_clip
        if clip is None:
            clip = REST_CLIP if type(self._training.base) is torch.optim.SGD else 1.0
        self._bound = min(self._bound, clip)

        # s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip) (FOSI)
        scale = 1.0
        if num_largest and float(values[num_largest - 1]) != 0.0:
            ratio = abs(float(values[0] / values[num_largest - 1]))
            scale = min(max(ratio, 1.0), self._bound if options.lr_scale_guard else clip)

        vector = self._flat_params
        basis = Basis(
            vectors=vectors,
            count=len(values),
            by_rows=vector.by_rows,
            world=self._training.world,
            group_spans=vector.group_spans,
        )
        rates = inverse_magnitudes(values, options.eigenvalue_floor)[basis.local_slice].to(vectors)
        return Subspace(basis, values, residuals, num_largest, rates, scale)

    def drop(self) -> None:
        """Drop the eigenpairs, because other parameters train, and measure what refreshes cost."""
        if self.throttle is not None:
            self.throttle.restart()
        if self.subspace is not None:
            self.subspace = None
            self._training.publish()
            self._training.warn(
                "the parameters that train have changed: the eigenpairs are dropped, and "
                f"{self._training.base_name} goes on alone until the next refresh"
            )

    def close(self) -> None:
        """Drop the eigenpairs, and refresh no more."""
        self.closed = True
        self.subspace = None
        self.throttle = None

    # ---------------------------------------------------------------------------------- state

    def counts(self) -> dict[str, float]:
        """The counts of refreshes and the guard that a checkpoint keeps."""
        return {
            "refreshed_at": self.tally.step,
            "batch_loss": self._batch_loss,
            "rest_scale_bound": self._bound,
            **({} if self.throttle is None else self.throttle.saved()),
        }

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over a checkpoint, with its eigenpairs if the same parameters train.

        A checkpoint of the base alone has no counts: the curvature starts from nothing then.
        """
        counts = counts_of(saved)
        self.subspace = None
        self.tally = replace(self.tally, step=counts.get("refreshed_at", -1))
        self._batch_loss = counts.get("batch_loss", math.inf)
        self._bound = counts.get("rest_scale_bound", 1.0)
        if self.throttle is not None:
            self.throttle.load(saved)
        pairs = None if self.closed else read_pairs(saved)
        if pairs is None:
            return
        vector = self._flat_params
        if not same_params(saved, vector.params):
            self._training.warn(
                "the eigenpairs of the checkpoint are not taken over: other parameters trained "
                "then than now; the base goes on alone until the next refresh"
            )
            return
        vectors = pairs.eigenvectors.to(self._training.device, vector.dtype)
        if vector.by_rows:
            vectors = vector.local_rows(vectors)
        else:
            world = self._training.world
            start, stop = row_bounds(len(vectors), world.size)[world.rank :][:2]
            vectors = vectors[start:stop].clone()
        values = pairs.eigenvalues.to("cpu", torch.float64)
        residuals = pairs.residuals.to("cpu", torch.float64)
        subspace = self._subspace(vectors, values, residuals, pairs.num_largest)
        subspace.load(
            momentum=pairs.subspace_momentum,
            full_step=pairs.last_step,
            trust=pairs.trust_region,
            carried_momentum=vector.local_rows(pairs.carried_momentum),
            carried_decay=float(pairs.carried_decay),
        )
        self.subspace = subspace

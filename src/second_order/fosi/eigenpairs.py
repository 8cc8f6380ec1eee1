"""Refreshes of the eigenpairs: Lanczos on the Hessian of the curvature batch.

    is_due     after the warm-up, and every curvature_interval steps from then on
    refresh    start vector <- V̂1 + 0.1 · random
               û, V̂ <- the k largest and l smallest Ritz pairs               lanczos/
               s, momentum and trust region of the new subspace

A start from the last eigenvectors needs half as many Hessian-vector products as a random start.
Accelerators (`accelerator.py`) compute their eigenpairs with the same :func:`compute_pairs`.
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

__all__ = ["Closures", "RefreshCounts", "RefreshedPairs", "compute_pairs", "momentum_rule"]

Closures: TypeAlias = LossFn | Sequence[LossFn]

# lr_scale_guard: the bound on s grows at a refresh if the loss of the curvature batch has not risen
# by more than a tolerated fraction, which may be chance, and shrinks otherwise.
GROWTH = 1.5
SHRINK = 0.5
TOLERATED_RISE = 0.1

SGD_SCALE_CLIP = 3.0  # FOSI's bound on s. Adaptive optimizers scale their steps, and have 1.

# If the largest |û| falls below this fraction of the last one, new Newton steps would be a million
# times as long, so the refresh is rejected.
VANISHED = 1e-6

RANDOM_SHARE = 0.1  # length of the random part of a start vector; that of the last pairs has 1
WARM_PRODUCTS = 20  # products that a warm start may take for any number of pairs


def max_products(options: FOSIOptions, size: int, *, warm: bool) -> int:
    """Return m, the most Hessian-vector products that a refresh takes for n parameters.

    A ``warm`` start, from the last eigenvectors, takes half of them: between refreshes the steep
    directions rotate further than the second half of the products would correct. The smallest
    eigenvalues are close to many others and need all products.
    """
    num_pairs = min(options.num_pairs, size)
    if options.lanczos_iterations is not None:
        return min(size, max(options.lanczos_iterations, num_pairs))
    products = default_iterations(size, num_pairs)
    if warm and not options.num_smallest:
        products = min(products, max(2 * num_pairs, WARM_PRODUCTS))
    return products


def compute_pairs(
    space: RowSpace, start: Tensor, options: FOSIOptions, *, warm: bool = False, expected: int = 0
) -> Pairs:
    """Compute the k largest and l smallest eigenpairs. Collective.

    Args:
        space: The Hessian, and the rows of this process.
        start: The rows of the start vector.
        options: The options of DHO2.
        warm: Whether the start vector is made of the last eigenvectors.
        expected: The number of iterations that will probably be needed; 0 if it is not known.
    """
    pairs = extreme_pairs(
        space,
        start,
        options.num_largest,
        options.num_smallest,
        iterations=max_products(options, space.size, warm=warm),
        tol=options.lanczos_tol,
        seed=options.seed,
        expected=expected,
    )
    space.raise_together()
    return pairs


def momentum_rule(options: FOSIOptions, group: Mapping[str, Any]) -> MomentumRule:
    """Return the rule of the momentum in the subspace.

    Args:
        options: The options of DHO2. ``subspace_momentum`` is a number, or refers to the base.
        group: The base's parameter group, with the base's momentum.
    """
    momentum = options.subspace_momentum
    if not isinstance(momentum, str):
        return MomentumRule(decay=float(momentum), gain=1.0 - momentum, nesterov=False)
    if "betas" in group:
        beta = float(group["betas"][0])
        return MomentumRule(decay=beta, gain=1.0 - beta, nesterov=False)

    decay = float(group.get("momentum") or 0.0)
    gain = 1.0 - decay
    if momentum == "base":
        gain = 1.0
        if decay:
            gain = 1.0 - float(group.get("dampening") or 0.0)
    return MomentumRule(decay=decay, gain=gain, nesterov=bool(group.get("nesterov")))


@dataclass(frozen=True)
class RefreshCounts:
    """The step of the last refresh, and counts for :class:`CurvatureReport`."""

    step: int = -1  # before the first refresh
    products: int = 0  # of the last refresh
    total_products: int = 0
    refreshes: int = 0
    failures: int = 0


class RefreshedPairs:
    """The eigenpairs in use, and their refreshes.

    Attributes:
        subspace: The eigenpairs; None before the first refresh and after :meth:`drop`.
        closed: Whether refreshes are over, or were never wanted.
        refresh_counts: The counts of refreshes so far.
        throttle: The limit on the cost of refreshes, with ``curvature_interval="auto"``.
    """

    def __init__(
        self, training: Training, options: FOSIOptions, flat_params: FlatParams, *, refreshes: bool
    ) -> None:
        self.subspace: Subspace | None = None
        self.closed = not refreshes
        self.refresh_counts = RefreshCounts()
        self.throttle: Throttle | None = None
        if options.curvature_interval == AUTO and options.num_pairs > 0:
            self.throttle = Throttle(training, options.overhead, min_refreshes=1)

        self._training = training
        self._options = options
        self._flat_params = flat_params
        self._batch_loss = math.inf  # of the curvature batch at the last refresh
        self._scale_bound = 1.0  # the bound on s from lr_scale_guard
        self._expected_iterations = 0  # as many as the last refresh took

    # ------------------------------------------------------------------------------ a refresh

    def is_due(self) -> bool:
        """Return whether a refresh of the eigenpairs is due at this step."""
        options = self._options
        if self.closed or options.num_pairs == 0 or not self._flat_params.params:
            return False
        step = self._training.steps
        last_refresh = self.refresh_counts.step
        if last_refresh >= 0:
            return step - last_refresh >= self.interval(step)
        if options.warmup_steps is not None:
            return step >= options.warmup_steps
        return step >= self.interval(0)

    def interval(self, step: int) -> int:
        """Return the number of steps from a refresh to the next one."""
        options = self._options
        if self.throttle is not None:
            if self.throttle.interval:
                return self.throttle.interval
            # Until the throttle has measured refreshes, a product counts as one step.
            products = max_products(options, self._flat_params.size, warm=False)
            return math.ceil(products / options.overhead)
        interval = value_at(options.curvature_interval, step)
        check_interval(f"curvature_interval at step {step}: curvature_interval", interval)
        return int(interval)

    def refresh(self, loss_fn: Closures) -> None:
        """Replace û and V̂ by eigenpairs of the curvature batch, if they are finite. Collective.

        Raises:
            CurvatureError: On all processes, if the loss of one process cannot be evaluated or
                differentiated twice.
        """
        training = self._training
        with stage("lanczos"):
            with self._flat_params.hessian(loss_fn) as space:
                pairs = self._run_lanczos(space)
                loss = space.loss()
            failed = bool(pairs.trouble) or not math.isfinite(loss) or self._vanished(pairs.values)
            self.count_refresh(training.steps, pairs.iterations, failed=failed)
            if not failed:
                self._use_pairs(pairs, loss)
            elif training.is_first_warning("refresh failed"):
                outcome = "the last eigenpairs stay in use"
                if self.subspace is None:
                    outcome = "there are no eigenpairs yet"
                training.warn(
                    f"the refresh at step {training.steps} failed, because the curvature is not "
                    f"finite, has vanished, or was decomposed wrongly: {outcome}; later failures "
                    f"give no warning, but metrics() counts them as 'failed'"
                )

    def count_refresh(self, step: int, products: int, *, failed: bool) -> None:
        """Count a refresh by this process or by an accelerator."""
        counts = self.refresh_counts
        self.refresh_counts = RefreshCounts(
            step=step,
            products=products,
            total_products=counts.total_products + products,
            refreshes=counts.refreshes + 1,
            failures=counts.failures + failed,
        )

    def _run_lanczos(self, space: RowSpace) -> Pairs:
        """Compute eigenpairs, from the last ones if ``warm_start`` is set."""
        options = self._options
        last = self.subspace
        scale = 1 / math.sqrt(space.size)
        start = space.random(options.seed + self._training.steps, scale)
        warm = False
        if last is not None and options.warm_start:
            warm = True
            last_sum = last.basis.sum_of_vectors(space.rows) / math.sqrt(last.basis.count)
            start = last_sum.add_(start, alpha=RANDOM_SHARE)
        expected = self._expected_iterations
        pairs = compute_pairs(space, start, options, warm=warm, expected=expected)
        self._expected_iterations = 0 if pairs.trouble else len(pairs.basis)
        return pairs

    def _vanished(self, values: Tensor) -> bool:
        """Whether hardly any curvature is left compared with the last refresh.

        This happens if a softmax saturates on the curvature batch. The gradients of other batches
        do not vanish with it, and nothing would bound their Newton steps.
        """
        if self.subspace is None or not len(values):
            return False
        return bool(values.abs().max() < VANISHED * self.subspace.values.abs().max())

    def _use_pairs(self, pairs: Pairs, loss: float) -> None:
        """Replace the eigenpairs, and keep the momentum and the trust region. Collective.

        ``loss`` is the loss of the batch that the pairs were computed from, at the same parameters.
        While it does not rise from refresh to refresh, s and the Newton steps may grow.
        """
        training = self._training

        # Has the loss of the curvature batch risen since the last refresh?
        loss_has_risen = False
        if math.isfinite(self._batch_loss):
            loss_has_risen = loss - self._batch_loss > TOLERATED_RISE * abs(self._batch_loss)
            factor = SHRINK if loss_has_risen else GROWTH
            self._scale_bound = max(1.0, self._scale_bound * factor)
        self._batch_loss = loss

        with self._flat_params.without_autocast():
            # Save the momentum and the trust region, and free the old vectors.
            momentum = None
            trust = None
            if self.subspace is not None:
                newton = self.subspace.newton
                trust = trust_after_refresh(newton.trust, loss_has_risen=loss_has_risen)
                if momentum_rule(self._options, training.groups[0]).decay > 0.0:
                    momentum = self.subspace.momentum_vector()
            self.subspace = None
            training.publish()

            # Make the new subspace.
            vectors = pairs.vectors()
            if not self._flat_params.by_rows:
                size = self._flat_params.size
                vectors = exchange_rows_for_vectors(vectors, size, training.world)
            self.subspace = self._make_subspace(
                vectors, pairs.values, residuals=pairs.bounds(), num_largest=pairs.num_largest
            )
            if trust is not None:
                self.subspace.inherit(momentum, trust)
        training.publish()

    def _make_subspace(
        self, vectors: Tensor, values: Tensor, *, residuals: Tensor, num_largest: int
    ) -> Subspace:
        """Make the subspace of eigenpairs, without momentum."""
        options = self._options
        flat_params = self._flat_params
        basis = Basis(
            vectors=vectors,
            count=len(values),
            by_rows=flat_params.by_rows,
            world=self._training.world,
            group_spans=flat_params.group_spans,
        )
        inverses = inverse_magnitudes(values, options.eigenvalue_floor)[basis.local_slice]
        return Subspace(
            basis=basis,
            values=values,
            residuals=residuals,
            num_largest=num_largest,
            inverse_eigenvalues=inverses.to(vectors),
            base_scale=self._compute_base_scale(values, num_largest),
        )

    def _compute_base_scale(self, values: Tensor, num_largest: int) -> float:
        """Return s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip) (FOSI), within the guard's bound."""
        options = self._options
        clip = options.lr_scale_clip
        if clip is None:
            clip = SGD_SCALE_CLIP if type(self._training.base) is torch.optim.SGD else 1.0
        self._scale_bound = min(self._scale_bound, clip)

        if num_largest == 0 or float(values[num_largest - 1]) == 0.0:
            return 1.0
        ratio = abs(float(values[0] / values[num_largest - 1]))
        upper = self._scale_bound if options.lr_scale_guard else clip
        return min(max(ratio, 1.0), upper)

    def drop(self) -> None:
        """Drop the eigenpairs because other parameters train now, and time refreshes again."""
        if self.throttle is not None:
            self.throttle.restart()
        if self.subspace is not None:
            self.subspace = None
            self._training.publish()
            self._training.warn(
                "the parameters that train have changed, so the eigenpairs are dropped, and "
                f"{self._training.base_name} steps alone until the next refresh"
            )

    def close(self) -> None:
        """Drop the eigenpairs, and refresh no more."""
        self.closed = True
        self.subspace = None
        self.throttle = None

    # ---------------------------------------------------------------------------------- state

    def counts(self) -> dict[str, float]:
        """The entries of a checkpoint about refreshes and the guard of s."""
        counts: dict[str, float] = {
            "refreshed_at": self.refresh_counts.step,
            "batch_loss": self._batch_loss,
            "base_scale_bound": self._scale_bound,
        }
        if self.throttle is not None:
            counts |= self.throttle.saved()
        return counts

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load a checkpoint, with its eigenpairs if the same parameters train.

        A checkpoint of the base alone has no counts. The curvature then starts from the beginning.
        """
        # Load the counts.
        counts = counts_of(saved)
        self.subspace = None
        self.refresh_counts = replace(self.refresh_counts, step=counts.get("refreshed_at", -1))
        self._batch_loss = counts.get("batch_loss", math.inf)
        self._scale_bound = counts.get("base_scale_bound", 1.0)
        if self.throttle is not None:
            self.throttle.load(saved)

        # Are there eigenpairs of the same parameters?
        pairs = None if self.closed else read_pairs(saved)
        if pairs is None:
            return
        flat_params = self._flat_params
        if not same_params(saved, flat_params.params):
            self._training.warn(
                "the eigenpairs of the checkpoint are not loaded, because other parameters trained "
                "when it was made; the base steps alone until the next refresh"
            )
            return

        # Take this process's part of the vectors.
        vectors = pairs.eigenvectors.to(self._training.device, flat_params.dtype)
        if flat_params.by_rows:
            vectors = flat_params.local_rows(vectors)
        else:
            world = self._training.world
            bounds = row_bounds(len(vectors), world.size)
            vectors = vectors[bounds[world.rank] : bounds[world.rank + 1]].clone()
        subspace = self._make_subspace(
            vectors,
            pairs.eigenvalues.to("cpu", torch.float64),
            residuals=pairs.residuals.to("cpu", torch.float64),
            num_largest=pairs.num_largest,
        )
        subspace.load(
            momentum=pairs.subspace_momentum,
            full_step=pairs.last_step,
            trust=pairs.trust_region,
            outside_momentum=flat_params.local_rows(pairs.outside_momentum),
            outside_decay=float(pairs.outside_decay),
        )
        self.subspace = subspace

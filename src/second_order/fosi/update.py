"""The step of FOSI (Sivan et al., FOSI, ICLR 2024) that DHO2 and MRDHO2 take.

    prepare        if a refresh is due:
                   start vector <- random, or Σᵢ V̂ᵢ / √r + 0.1 · random with the r last
                                   eigenvectors
                   û, V̂ <- k largest and l smallest eigenpairs of the Hessian on the
                           curvature batch
    precondition   c = V̂ᵀg,  g₂ = g − V̂c,  mom <- β mom + gain · c
                   d₁ = −α τ V̂ diag(|û|⁻¹) mom
    step_base      d₂ = Base(g₂)
    finish_step    w <- w + d₁ + s (d₂ − V̂V̂ᵀd₂)

w are the parameters, g is the mean gradient, and α is `newton_scale`. mom follows the
base's rule of momentum, applied to g₁ = V̂c in the coordinates of V̂. τ comes from the
trust region (`subspace.py`). If it rejects the previous d₁, this step's d₁ reverts it,
and g₂ is 0. The factor on the base's step is s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip),
where λ₁ to λ_k are the k largest û; `lr_scale_guard` bounds it further. d₂ is the
change that the base made to the parameters. Without eigenpairs, the base steps alone.

If l is 0, a start from the last eigenvectors takes half as many Hessian-vector products
as a random start. Accelerators (`accelerator.py`) also compute their eigenpairs with
:func:`compute_pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.caller import is_checkpointing
from second_order.checkpoint.saved import BASE, CURVATURE, SavedPart
from second_order.errors import CurvatureError
from second_order.fosi.flat_params import FlatParams, check_one_vector
from second_order.fosi.report import curvature_metrics, summary_lines, summary_rows
from second_order.fosi.state import (
    check_saved_pairs,
    counts_of,
    empty_pairs,
    gather_pairs,
    read_pairs,
    same_params,
)
from second_order.fosi.subspace import (
    Basis,
    Subspace,
    exchange_rows_for_vectors,
    inverse_magnitudes,
    larger,
    momentum_rule,
    trust_after_refresh,
)
from second_order.lanczos.closure import Closures, check_closure
from second_order.lanczos.hvp import RowSpace, row_slice
from second_order.lanczos.lanczos import Pairs, default_iterations, extreme_pairs
from second_order.optimizers.config import FOSIOptions, check_newton_scale
from second_order.reporting.summary import CurvatureReport, Summary
from second_order.training.context import Training
from second_order.training.curvature import Curvature, PendingAverage, Routed
from second_order.training.groups import as_scalar
from second_order.training.throttle import Throttle
from second_order.utils.checks import (
    AUTO,
    PEAK_LR,
    Schedule,
    check_interval,
    scheduled,
    value_at,
)
from second_order.utils.stages import stage

__all__ = [
    "FOSICurvature",
    "RefreshCounts",
    "compute_pairs",
    "group_alphas",
    "max_products",
]

# lr_scale_guard: at a refresh, the bound on s shrinks if the loss of the curvature
# batch has risen by more than a fraction, since a smaller rise may be chance. Otherwise
# it grows.
SCALE_BOUND_GROWTH = 1.5
SCALE_BOUND_SHRINK = 0.5
TOLERATED_RISE = 0.1

# FOSI's bound on s. Adaptive optimizers scale their steps, and have 1.
SGD_SCALE_CLIP = 3.0

# If the largest |û| falls below this fraction of the last one, the refresh is
# rejected. A softmax may saturate on the curvature batch. The gradients of other
# batches do not vanish with it, and nothing would bound their Newton steps, which
# would be a million times as long.
VANISHED = 1e-6

# Length of the random part of a start vector; that of the last pairs has 1.
RANDOM_SHARE = 0.1
WARM_PRODUCTS = 20  # products that a warm start may take for any number of pairs

CLOSURE_REMEDY = (
    "pass {name}(..., curvature_closure=f), assign optimizer.curvature_closure = f, or call "
    "step(curvature_closure=f), where f returns the loss on the curvature batch without calling "
    "backward()"
)


@dataclass(frozen=True)
class RefreshCounts:
    """The step of the last refresh, and counts for :class:`CurvatureReport`."""

    step: int = -1  # -1 before the first refresh
    products: int = 0  # of the last refresh
    total_products: int = 0
    refreshes: int = 0
    failures: int = 0


@dataclass(frozen=True)
class BaseStepCorrection:
    """What :meth:`FOSICurvature.finish_step` needs from before the base's step."""

    alphas: Sequence[float | Tensor]  # α of each parameter group
    params_before: Tensor  # the local elements of w


class FOSICurvature(Curvature):
    """The curvature of DHO2: eigenpairs of the Hessian, and the step of FOSI with them.

    Attributes:
        options: The options of DHO2.
        closure: The curvature closure.
        flat_params: The parameters as one vector.
        subspace: The eigenpairs in use; None before the first refresh.
        refresh_counts: The counts of refreshes so far.
        throttle: The limit on refreshes' cost, with ``curvature_interval="auto"``.
        closed: Whether refreshes are over.
    """

    computes_pairs = True
    """Whether this process computes the eigenpairs that it uses."""

    def __init__(
        self, training: Training, options: FOSIOptions, closure: Closures | None
    ) -> None:
        super().__init__(training)
        self.options = options
        self.set_closure(closure)
        self.flat_params = FlatParams(training, options)
        self.subspace: Subspace | None = None
        self.refresh_counts = RefreshCounts()
        self.throttle: Throttle | None = None
        if options.curvature_interval == AUTO and options.num_pairs > 0:
            self.throttle = Throttle(training, options.overhead, min_refreshes=1)
        self.closed = False

        self._expected_iterations = 0  # as many as the last refresh took
        self._batch_loss = math.inf  # of the curvature batch at the last refresh
        self._scale_bound = 1.0  # the bound on s from lr_scale_guard
        # The fraction of the squared gradient in the span of V̂, at the first step with
        # these eigenpairs; None before that step.
        self._gradient_share: Tensor | None = None
        self._correction: BaseStepCorrection | None = None  # until finish_step()

    def set_closure(self, closure: Closures | None) -> None:
        """Set the curvature closure."""
        if closure is not None:
            check_closure(closure)
        self.closure = closure

    @contextmanager
    def replaced_closure(self, closure: Closures) -> Iterator[None]:
        """Use another curvature closure within the block, without a check."""
        own_closure = self.closure
        self.closure = closure
        try:
            yield
        finally:
            self.closure = own_closure

    def required_closure(self) -> Closures:
        """Return the curvature closure, or a function that raises CurvatureError.

        The refresh calls it, so that the error is raised on all processes together.
        """
        if self.closure is None:
            return partial(_raise_no_closure, self.training.name, self.training.steps)
        return self.closure

    def description(self) -> list[str]:
        """The options that must be equal on all ranks, one per line."""
        shown: dict[str, Any] = {}
        for field in fields(self.options):
            value = getattr(self.options, field.name)
            if not callable(value):
                shown[field.name] = value
        return [f"options: {self.training.base_name} {shown}"]

    @property
    def scaler_reason(self) -> str:  # type: ignore[override]
        """Why the optimizer needs to know a GradScaler; "" if it does not."""
        if self.training.averages_gradients:
            return "a step skipped on one process would leave the others waiting"
        return ""

    # --------------------------------------------------------------------------- a step

    def prepare(self) -> None:
        """Adopt changed parameters, and refresh the eigenpairs if due."""
        self.adopt_params()
        if self.throttle is not None:
            self.throttle.begin_step()
        refresh_step = self.next_refresh()
        if refresh_step is None:
            return
        if self.training.steps >= refresh_step:
            self.refresh(self.required_closure())
        elif self.closure is None and self.training.is_first_warning("closure"):
            name = self.training.name
            self.training.warn(
                f"{name} has no curvature closure yet, and the next refresh of the eigenpairs, at "
                f"step {refresh_step}, requires one; {CLOSURE_REMEDY.format(name=name)}"
            )

    def precondition(self, pending: PendingAverage) -> None:
        """Replace ``p.grad`` by g₂, compute the Newton step from g₁, and copy w."""
        with stage("average_gradients"):
            pending.wait()
        subspace = self.subspace
        if subspace is None:
            return
        options = self.options
        flat_params = self.flat_params
        params = flat_params.local_params
        with stage("split"), flat_params.without_autocast():
            # c = V̂ᵀg. `gradient` is a buffer of `flat_params`: the code below changes
            # it in place, and write() copies it back.
            gradients = [p.grad for p in params]
            gradient = flat_params.read(gradients)
            c = subspace.basis.coefficients(gradient)
            if self._gradient_share is None:
                self._gradient_share = subspace.basis.fraction_inside(c, gradient)

            # Compute the Newton step from c with momentum. finish_step() adds it to w.
            rule = momentum_rule(options.subspace_momentum, self.training.groups[0])
            alphas = group_alphas(options.newton_scale, self.training)
            reverts_previous = subspace.compute_newton_step(
                c, rule, alphas, bounded=options.trust_region
            )

            # Leave g₂ = g − V̂c to the base, or 0 if the Newton step reverts the last
            # one, because the gradient after a rejected step is of no use.
            subspace.basis.add_combination(gradient, [subspace.newton.gradient_change])
            # On a device, the host does not read the flag.
            if isinstance(reverts_previous, Tensor):
                gradient.masked_fill_(reverts_previous, 0.0)
            elif reverts_previous:
                gradient.zero_()
            flat_params.write(gradients)
            params_before = flat_params.read(params).clone()
            self._correction = BaseStepCorrection(alphas, params_before)

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base step the local rows of the parameters."""
        self.flat_params.step_base(step)

    def finish_step(self) -> None:
        """Scale the base's step in the complement, and add the Newton step."""
        correction = self._correction
        self._correction = None
        flat_params = self.flat_params
        if correction is not None and self.subspace is not None:
            with stage("newton"), flat_params.without_autocast():
                # w + d₂, in the buffer that write() copies back, and d₂
                params = flat_params.local_params
                values = flat_params.read(params)
                before = correction.params_before
                base_step = torch.sub(values, before, out=before)

                # V̂ᵀd₂. A single non-finite element makes all coefficients non-finite,
                # and would reach all parameters.
                inside = self.subspace.basis.coefficients(base_step)
                inside = torch.nan_to_num(inside, nan=0.0, posinf=0.0, neginf=0.0)

                # w + d₁ + s (d₂ − V̂V̂ᵀd₂)
                s = self.subspace.base_scale
                if s != 1.0:
                    values.add_(base_step, alpha=s - 1.0)
                newton = self.subspace.newton.step
                changes = [-alpha * newton - s * inside for alpha in correction.alphas]
                self.subspace.basis.add_combination(values, changes)
                # Parameters without a gradient do not move, as with any base.
                flat_params.write([None if p.grad is None else p for p in params])
        if flat_params.base_steps_rows:
            with stage("exchange"):
                flat_params.broadcast_rows()
        if self.throttle is not None:
            refreshed = self.refresh_counts.step == self.training.steps
            self.throttle.end_step(refreshed=refreshed)

    def fingerprint_values(self) -> list[tuple[str, Any]]:
        """The values that decide which collectives a step issues, by name."""
        least_interval = 0
        if self.throttle is not None:
            least_interval = self.throttle.interval
        return [
            ("closed", self.closed),
            ("the base's state in parts", self.flat_params.base_state_in_rows),
            ("eigenpairs", self.subspace is not None),
            ("of step", self.refresh_counts.step),
            *scheduled(
                self.options,
                ("curvature_interval", "newton_scale"),
                self.training.steps,
            ),
            ("least interval", least_interval),
        ]

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Return the gradients' parts, and each one's receiver; None for all ranks."""
        return self.flat_params.route(params, gradients)

    # ------------------------------------------------------------------------ a refresh

    def next_refresh(self) -> int | None:
        """Return the step from which a refresh is due; None for no refreshes."""
        options = self.options
        if not self.computes_pairs or self.closed:
            return None
        if options.num_pairs == 0 or not self.flat_params.params:
            return None
        last_refresh = self.refresh_counts.step
        if last_refresh >= 0:
            return last_refresh + self.interval(self.training.steps)
        if options.warmup_steps is not None:
            return options.warmup_steps
        return self.interval(0)

    def interval(self, step: int) -> int:
        """Return the number of steps from a refresh to the next one."""
        options = self.options
        if self.throttle is not None:
            if self.throttle.interval:
                return self.throttle.interval
            # Until the throttle has measured refreshes, a product counts as one step.
            products = max_products(options, self.flat_params.size, warm=False)
            return math.ceil(products / options.overhead)
        interval = value_at(options.curvature_interval, step)
        check_interval(f"at step {step}, curvature_interval", interval)
        return int(interval)

    def refresh(self, closure: Closures) -> None:
        """Replace û and V̂ by eigenpairs of the curvature batch. Collective.

        The last eigenpairs stay in use if û or the loss is not finite, or if û has
        vanished. If only V̂ is not finite, there are no eigenpairs until the next
        refresh.

        Raises:
            CurvatureError: On all processes, if the loss of one process cannot be
                evaluated or differentiated twice.
        """
        training = self.training
        options = self.options
        last = self.subspace
        with stage("lanczos"):
            with self.flat_params.hessian(closure) as space:
                # Start from a random vector, plus the sum of the last eigenvectors if
                # there are any.
                scale = 1 / math.sqrt(space.size)
                start = space.random(options.seed + training.steps, scale)
                warm = False
                if last is not None and options.warm_start:
                    warm = True
                    norm = math.sqrt(last.basis.count)
                    last_sum = last.basis.sum_of_vectors(space.rows) / norm
                    start = last_sum.add_(start, alpha=RANDOM_SHARE)

                # Run Lanczos.
                pairs = compute_pairs(
                    space, start, options, warm=warm, expected=self._expected_iterations
                )
                self._expected_iterations = 0 if pairs.trouble else len(pairs.basis)
                loss = space.loss()

            # Check the eigenpairs.
            failed = bool(pairs.trouble) or not math.isfinite(loss)
            if last is not None and len(pairs.values):
                last_largest = last.values.abs().max()
                largest = pairs.values.abs().max()
                failed = failed or bool(largest < VANISHED * last_largest)

            # Use them, or keep the last ones.
            del last  # so that _use_pairs() can free its vectors
            if not failed:
                failed = not self._use_pairs(pairs, loss)
            self.count_refresh(training.steps, pairs.products, failed=failed)
            self._gradient_share = None
            if failed and training.is_first_warning("refresh failed"):
                outcome = "the last eigenpairs stay in use"
                if self.subspace is None:
                    outcome = "there are no eigenpairs"
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

    def _use_pairs(self, pairs: Pairs, loss: float) -> bool:
        """Replace the eigenpairs, and keep the momentum and the trust region.

        Collective.

        Args:
            pairs: The new eigenpairs.
            loss: The loss of the batch that they were computed from, at the same
                parameters. While it does not rise by more than TOLERATED_RISE from
                refresh to refresh, s and the Newton steps may grow.

        Returns:
            Whether the new eigenvectors are finite on all ranks. If not, there are no
            eigenpairs until the next refresh, because the last ones were freed before.
        """
        training = self.training
        flat_params = self.flat_params

        # Has the loss of the curvature batch risen by more than may be chance?
        loss_has_risen = False
        if math.isfinite(self._batch_loss):
            rise = loss - self._batch_loss
            loss_has_risen = rise > TOLERATED_RISE * abs(self._batch_loss)
            factor = SCALE_BOUND_GROWTH
            if loss_has_risen:
                factor = SCALE_BOUND_SHRINK
            self._scale_bound = max(1.0, self._scale_bound * factor)
        self._batch_loss = loss

        with flat_params.without_autocast():
            # Save the momentum and the trust region, and free the old vectors.
            momentum = None
            trust = None
            if self.subspace is not None:
                newton = self.subspace.newton
                trust = trust_after_refresh(newton.trust, loss_has_risen=loss_has_risen)
                rule = momentum_rule(self.options.subspace_momentum, training.groups[0])
                if rule.decay > 0.0:
                    momentum = self.subspace.momentum_vector()
            self.subspace = None
            training.publish()

            # Compute the new vectors. Non-finite ones would spread even if c = 0.
            vectors = pairs.vectors()
            if not flat_params.by_rows:
                vectors = exchange_rows_for_vectors(
                    vectors, flat_params.size, training.world
                )
            total = vectors.sum().reshape(1)
            training.world.all_reduce([total]).wait()
            if not math.isfinite(float(total)):
                return False

            # Make the new subspace.
            self.subspace = self._make_subspace(
                vectors,
                pairs.values,
                residuals=pairs.bounds,
                num_largest=pairs.num_largest,
            )
            if trust is not None:
                self.subspace.inherit(momentum, trust)
        training.publish()
        return True

    def _make_subspace(
        self, vectors: Tensor, values: Tensor, *, residuals: Tensor, num_largest: int
    ) -> Subspace:
        """Make the subspace of eigenpairs, without momentum."""
        basis = Basis(
            vectors=vectors,
            count=len(values),
            by_rows=self.flat_params.by_rows,
            world=self.training.world,
            group_spans=self.flat_params.group_spans,
        )
        inverses = inverse_magnitudes(values, self.options.eigenvalue_floor)
        return Subspace(
            basis=basis,
            values=values,
            residuals=residuals,
            num_largest=num_largest,
            inverse_eigenvalues=inverses[basis.local_slice].to(vectors),
            base_scale=self._compute_base_scale(values, num_largest),
        )

    def _compute_base_scale(self, values: Tensor, num_largest: int) -> float:
        """Return s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip), within the guard's bound.

        This first limits the guard's bound to ``lr_scale_clip``.
        """
        clip = self.options.lr_scale_clip
        if clip is None:
            clip = 1.0
            if type(self.training.base) is torch.optim.SGD:
                clip = SGD_SCALE_CLIP
        self._scale_bound = min(self._scale_bound, clip)

        if num_largest == 0 or float(values[num_largest - 1]) == 0.0:
            return 1.0
        ratio = abs(float(values[0] / values[num_largest - 1]))
        upper = self._scale_bound if self.options.lr_scale_guard else clip
        return min(max(ratio, 1.0), upper)

    # -------------------------------------------------------------------------- changes

    def adopt_params(self) -> None:
        """Lay out the vector again if its dtype or the trainable parameters changed."""
        if self.flat_params.update_layout():
            self.handle_changed_params()
        self.flat_params.check_gradients()

    def handle_changed_params(self) -> None:
        """Drop the eigenpairs of the old vector, and time refreshes again."""
        if self.throttle is not None:
            self.throttle.restart()
        if self.subspace is not None:
            self.subspace = None
            self.training.publish()
            self.training.warn(
                "the parameters that train have changed, or their dtype, so the eigenpairs are "
                f"dropped, and {self.training.base_name} steps alone until the next refresh"
            )

    def begin(self) -> None:
        """Check that the parameters make one vector."""
        self.replan()

    def replan(self) -> None:
        """Check that changed parameters and groups still make one vector."""
        check_one_vector(self.training, self.options)
        # Raises if the gradient would have weight 0 in the momentum of Newton steps.
        if self.computes_pairs and self.options.num_pairs > 0:
            momentum_rule(self.options.subspace_momentum, self.training.groups[0])

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Adopt the shards that have replaced parameters in the groups."""
        if self.flat_params.base_state_in_rows:
            raise TypeError(
                f"{self.training.name} has stepped this model before fully_shard sharded it, and "
                f"each process has another part of the base's state; shard the model before the "
                f"first step"
            )
        self.replan()
        self.adopt_params()

    def close(self) -> None:
        """Drop the eigenpairs for good. The base trains alone from now on."""
        self.closed = True
        self.subspace = None
        self.throttle = None

    # ---------------------------------------------------------------------------- state

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        counts: dict[str, float] = {
            "steps": self.training.steps,
            "refreshed_at": self.refresh_counts.step,
            "batch_loss": self._batch_loss,
            "base_scale_bound": self._scale_bound,
        }
        if self.throttle is not None:
            counts |= self.throttle.saved()
        return counts

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and the eigenpairs if this process has them all."""
        parts: dict[Tensor, dict[str, Any]] = {}
        for p in self.flat_params.params:
            parts[p] = dict(self.counts())

        if not parts:
            return parts

        # The eigenpairs belong to all parameters. The first one has their entries.
        first = self.flat_params.params[0]
        if self.subspace is not None:
            if self.training.world.size == 1:  # else consolidate() gathers them
                pairs = gather_pairs(self.subspace, self.flat_params)
                parts[first] |= pairs.entries(first.device)
        elif self.options.num_pairs > 0 and is_checkpointing(part=True):
            # torch.distributed.checkpoint can only read into existing tensors.
            parts[first] |= vars(empty_pairs(self.options.num_pairs, self.flat_params))
        return parts

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError unless all values are finite and fit the parameters."""
        check_saved_pairs(saved)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load :meth:`counts`, and the eigenpairs if the same parameters trained.

        A checkpoint of the base alone has no counts. The curvature then starts again.
        The totals in ``refresh_counts`` continue, because no checkpoint has them.
        """
        flat_params = self.flat_params
        flat_params.lay_out()
        counts = counts_of(saved)
        last_refresh = counts.get("refreshed_at", -1)
        self.refresh_counts = replace(self.refresh_counts, step=last_refresh)
        self._batch_loss = counts.get("batch_loss", math.inf)
        self._scale_bound = counts.get("base_scale_bound", 1.0)
        if self.throttle is not None:
            self.throttle.load(saved)
        self._gradient_share = None
        self.subspace = None

        # Are there eigenpairs of the same parameters?
        pairs = None
        if self.computes_pairs and not self.closed:
            pairs = read_pairs(saved)
        if pairs is None:
            return
        if not same_params(saved, flat_params.params):
            self.training.warn(
                "the eigenpairs of the checkpoint are not loaded, because other parameters trained "
                "when it was made; the base steps alone until the next refresh"
            )
            return

        # Take this process's part: its rows of all vectors, or all rows of its vectors.
        vectors = pairs.eigenvectors.to(self.training.device, flat_params.dtype)
        if flat_params.by_rows:
            vectors = flat_params.local_rows(vectors)
        else:
            world = self.training.world
            vectors = vectors[row_slice(len(vectors), world.size, world.rank)].clone()
        self.subspace = self._make_subspace(
            vectors,
            pairs.eigenvalues.to("cpu", torch.float64),
            residuals=pairs.residuals.to("cpu", torch.float64),
            num_largest=pairs.num_largest,
        )
        self.subspace.load(
            momentum=pairs.subspace_momentum,
            full_step=pairs.last_step,
            trust=pairs.trust_region,
            outside_momentum=flat_params.local_rows(pairs.outside_momentum),
            outside_decay=float(pairs.outside_decay),
        )

    @property
    def remote_state(self) -> str:
        """A name for state that only other processes store; "" if there is none."""
        has_peers = self.training.world.size > 1
        pairs_are_distributed = has_peers and self.subspace is not None
        if not (pairs_are_distributed or self.flat_params.base_state_in_rows):
            return ""
        return "what other processes keep of the eigenvectors and of the base's state"

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Gather the base's state and the eigenpairs on some ranks. Collective."""
        parts: dict[Tensor, dict[str, Any]] = {}
        for p, base_part in self.flat_params.gather_base_state(ranks).items():
            parts[p] = {BASE: base_part}
        if self.subspace is not None:
            pairs = gather_pairs(self.subspace, self.flat_params)
            if self.training.world.rank in ranks:
                first = self.flat_params.params[0]
                parts.setdefault(first, {})[CURVATURE] = pairs.entries(first.device)
        return parts

    # -------------------------------------------------------------------------- reports

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Return û and the residuals of the eigenpairs in use."""
        if self.subspace is None:
            empty = torch.empty(0, dtype=torch.float64, device="cpu")
            return empty, empty
        return self.subspace.values.clone(), self.subspace.residuals.clone()

    def report(self) -> CurvatureReport:
        """Report the last refresh and the cost of all refreshes.

        Synchronizes with the device.
        """
        values, residuals = self.eigenvalues()
        gradient_share = None
        if self._gradient_share is not None:
            gradient_share = float(self._gradient_share)
        base_scale = 1.0
        if self.subspace is not None:
            base_scale = self.subspace.base_scale
        return CurvatureReport(
            eigenvalues=values,
            residuals=residuals,
            gradient_share=gradient_share,
            base_scale=base_scale,
            **vars(self.refresh_counts),
        )

    def metrics(self) -> dict[str, float]:
        """Numbers to log: the eigenpairs, their age and cost, and the trust region."""
        last_step = self.training.steps - 1
        trust = None
        if self.options.trust_region and self.subspace is not None:
            trust = self.subspace.newton.trust
        # "auto" has no interval without the throttle: after close(), or without pairs.
        interval = math.nan
        if self.throttle is not None or self.options.curvature_interval != AUTO:
            interval = self.interval(max(last_step, 0))
        return curvature_metrics(
            self.report(), last_step=last_step, interval=interval, trust=trust
        )

    def summary(self) -> Summary:
        """Table of parameters: whether eigenvectors span them, and local bytes."""
        lines = summary_lines(self.report())
        if self.throttle is not None:
            lines.append(self.throttle.summary_line)
        basis = None if self.subspace is None else self.subspace.basis
        rows = summary_rows(self.training, self.flat_params, basis)
        options = self.options
        pairs = f"{options.num_largest} largest and {options.num_smallest} smallest eigenpairs"
        layout = "row" if self.flat_params.fsdp_sharded else options.layout
        title = self.training.summary_title(pairs, f"layout {layout}")
        return Summary(title, rows, lines=lines)


def max_products(options: FOSIOptions, size: int, *, warm: bool) -> int:
    """Return m, the most Hessian-vector products that a refresh takes for n parameters.

    ``lanczos_iterations`` sets m, within k + l and n. Otherwise, if l is 0, a ``warm``
    start from the last eigenvectors takes fewer: 2 k, and at least WARM_PRODUCTS. More
    would be wasted: by the next refresh, the steep directions have rotated by more than
    the error that remains. The l smallest eigenvalues are close to many others, and
    need all products.
    """
    num_pairs = min(options.num_pairs, size)
    if options.lanczos_iterations is not None:
        return min(size, max(options.lanczos_iterations, num_pairs))
    products = default_iterations(size, num_pairs)
    if warm and not options.num_smallest:
        products = min(products, max(2 * num_pairs, WARM_PRODUCTS))
    return products


def compute_pairs(
    space: RowSpace,
    start: Tensor,
    options: FOSIOptions,
    *,
    warm: bool = False,
    expected: int = 0,
) -> Pairs:
    """Compute the k largest and l smallest eigenpairs. Collective.

    Args:
        space: The Hessian, and the rows of this process.
        start: The rows of the start vector.
        options: The options of DHO2.
        warm: Whether the start vector is made of the last eigenvectors.
        expected: The probable number of iterations; 0 if it is not known.
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


def group_alphas(option: Schedule, training: Training) -> list[float | Tensor]:
    """Return α of each parameter group at this step, negative if the loss is maximized.

    Args:
        option: ``newton_scale``. A number is α at the group's largest learning rate,
            and α falls with the learning rate. A callable's value is α.
        training: The context of the optimizer.
    """
    if callable(option):
        value = option(training.steps)
        check_newton_scale(value)
    else:
        value = option  # the constructor has checked it
    newton_scale = float(value)

    alphas = []
    for group in training.groups:
        alpha: float | Tensor = newton_scale
        if group.get("maximize"):
            alpha = -alpha
        if not callable(option):
            peak = as_scalar(group[PEAK_LR])
            alpha = alpha * (as_scalar(group["lr"]) / larger(peak, 1e-30))
        alphas.append(alpha)
    return alphas


def _raise_no_closure(name: str, step: int) -> Any:
    raise CurvatureError(
        f"a refresh of the eigenpairs is due at step {step}, but there is no curvature closure; "
        f"{CLOSURE_REMEDY.format(name=name)}"
    )

"""Refreshes of the eigenpairs: Lanczos on the Hessian of a curvature batch, when due.

    start from V̂1, and FRESH of everything else; half as many products then
    û, V̂ <- the k largest and l smallest Ritz pairs          lanczos/
    the bound of s grows while the loss of the batch does not rise

Accelerators (`accelerator.py`) compute their eigenpairs by the same :func:`wanted_pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.fosi.budget import RefreshBudget
from second_order.fosi.checkpoint import OTHERS_TRAINED, counts_of, has_pairs, load_eigenpairs
from second_order.fosi.options import FOSIOptions, refuse_no_closure
from second_order.fosi.subspace import (
    Basis,
    ColumnBasis,
    RowBasis,
    Subspace,
    differs_in_momentum,
    momentum_rule,
    newton_rates,
    rest_scale,
)
from second_order.fosi.trust import TrustRegion
from second_order.fosi.vector import ParameterVector
from second_order.lanczos.closure import LossFn
from second_order.lanczos.spectrum import Pairs, extreme_pairs
from second_order.lanczos.vector_space import RowSpace
from second_order.options import AUTO, check_interval, value_at
from second_order.stopwatch import Account

__all__ = [
    "FRESH",
    "Closures",
    "CurvatureClosure",
    "Eigenpairs",
    "Found",
    "Tally",
    "publish",
    "wanted_pairs",
]

Closures: TypeAlias = LossFn | Sequence[LossFn]

# The guard of s, at a refresh: how it grows or shrinks, and what rise of the loss is chance.
GROWTH, SHRINK, TOLERATED_RISE = 1.5, 0.5, 0.1

BLOWN_UP = 10.0  # times the loss at the first refresh

VANISHED = 1e-6  # of the last pairs' largest |û|: Newton steps would be a million times as long

FRESH = 0.1
"""The random share of the vector that a refresh starts from."""


def wanted_pairs(
    space: RowSpace, start: Tensor, options: FOSIOptions, *, warm: bool = False
) -> Pairs:
    """The k largest and l smallest eigenpairs.

    Args:
        space: The product and the sums.
        start: This process's rows of the start vector.
        options: The options of the step.
        warm: Whether the start is of eigenvectors: fewer products will do.

    Raises:
        CurvatureError: On every process, if the loss of one cannot be differentiated twice.
    """
    pairs = extreme_pairs(
        space,
        start,
        options.largest,
        options.smallest,
        iterations=options.most_products(space.size, warm=warm),
        tol=options.lanczos_tol,
        seed=options.seed,
    )
    space.raise_together()
    return pairs


def _largest(values: Tensor) -> float:
    """max|û|, 0 of none."""
    return float(values.abs().max()) if len(values) else 0.0


def publish(training: Training) -> None:
    """Replace the optimizer's published ``state`` by the present one."""
    if training.steps:
        training.publish()


@dataclass
class CurvatureClosure:
    """The closures that evaluate the loss on the curvature batch; copies start without.

    Attributes:
        own: The optimizer's own closure, or None.
        given: The closure that the present step is given in its place, or None.
    """

    own: Closures | None = None
    given: Closures | None = None

    def chosen(self, training: Training) -> Closures:
        """The closure to call now; without any, a function that raises CurvatureError."""

        def none() -> Any:
            refuse_no_closure(training.name, training.steps)

        chosen = self.own if self.given is None else self.given
        return none if chosen is None else chosen


@dataclass
class Tally:
    """Counts of refreshes and products so far, for :class:`CurvatureReport`."""

    step: int = -1
    products: int = 0
    total_products: int = 0
    refreshes: int = 0
    failures: int = 0

    def add(self, step: int, products: int) -> None:
        """Count a refresh."""
        self.step, self.products = step, products
        self.total_products += products
        self.refreshes += 1


@dataclass(frozen=True)
class Found:
    """Eigenpairs that other processes have computed.

    Attributes:
        values: ``(r,)`` û, the largest first; float64 on the CPU.
        residuals: ``(r,)`` residuals, float64 on the CPU.
        vectors: ``(r_p, n)`` this process's share of the eigenvectors, whole; or ``(r, rows)``, its
            rows of all.
        loss: The loss of the batch that they were computed on, at the same point.
    """

    values: Tensor
    residuals: Tensor
    vectors: Tensor
    loss: float


class Eigenpairs:
    """The eigenpairs in use, refreshed on the curvature batch every ``curvature_interval``.

    Args:
        training: The training whose loss has the Hessian.
        options: The options of the step.
        vector: The parameters that train, as one vector.

    Attributes:
        subspace: The eigenvectors' span; None without eigenpairs.
        tally: Counts of all refreshes.
        trust: What bounds the Newton steps.
        batch_loss: Loss of the curvature batch at the last refresh.
        bound: The bound on s that the guard allows.
        budget: Tells when refreshes are due, if their interval is "auto".
        first_used: The first step that uses the newest eigenpairs; -1 before there are any.
    """

    def __init__(self, training: Training, options: FOSIOptions, vector: ParameterVector) -> None:
        self._training, self._options, self._vector = training, options, vector
        self.subspace: Subspace | None = None
        self.tally = Tally()
        self.batch_loss, self.bound = math.inf, 1.0
        self.first_used = -1
        self._first_loss: float | None = None
        self.budget = RefreshBudget(training, options)
        self.trust = TrustRegion()

    def due(self) -> bool:
        """Whether the eigenpairs are to be refreshed at this step."""
        options, step = self._options, self._training.steps
        if options.wanted == 0 or not self._vector.params:
            return False
        if options.curvature_interval == AUTO:
            return self.budget.due(self.tally.step)
        if step < options.first_refresh:
            return False
        if self.tally.step < 0:
            return True
        every = value_at(options.curvature_interval, step)
        check_interval(f"curvature_interval at step {step}: curvature_interval", every)
        return step - self.tally.step >= int(every)

    def probe(self, loss_fn: Closures) -> None:
        """Time a product, for the budget to know about what a refresh costs. A collective.

        Args:
            loss_fn: Evaluates the loss of the curvature batch.

        Raises:
            CurvatureError: As :meth:`renew` does.
        """
        options = self._options
        measured = self._vector.hessian(loss_fn, options.hvp, options.curvature)
        meter, probing = self._training.meter, self.budget.probing()
        with meter.stage("lanczos"), probing as probe, closing(measured), measured as space:
            probe.take(space, options.seed)

    def renew(self, loss_fn: Closures) -> None:
        """û, V̂ <- the eigenpairs of the curvature batch, if they are finite. A collective.

        Args:
            loss_fn: Evaluates the loss of that batch.

        Raises:
            CurvatureError: On every process, if the loss of one cannot be evaluated or
                differentiated twice.
        """
        with self.budget.on(Account.REFRESH):
            self._renew(loss_fn)
        size, warm = self._vector.layout.size, self._options.warm_start
        self.budget.refreshed(self.tally.products, self._options.most_products(size, warm=warm))

    def _renew(self, loss_fn: Closures) -> None:
        training, options, tally = self._training, self._options, self.tally
        self.drop_unsound()
        self.tell_undone()
        had = self.subspace is not None
        measured = self._vector.hessian(loss_fn, options.hvp, options.curvature)
        with training.meter.stage("lanczos"), closing(measured), measured as space:
            self.budget.warm_up(space)
            start, warm = self._start(space)
            pairs = wanted_pairs(space, start, options, warm=warm)
            loss = space.loss()
        tally.add(training.steps, pairs.iterations)
        self.first_used = training.steps
        if pairs.finite and math.isfinite(loss):
            if self._vanished(pairs.values):
                return
            self._guard(loss)
            with self._vector.plain():
                if self._adopt(pairs):
                    return
        tally.failures += 1
        kept = "kept" if self.subspace is not None else "let go"
        kept = f"the last eigenpairs are {kept}" if had else "no eigenpairs yet"
        training.warn(
            f"the curvature at step {training.steps} is not finite: {kept} (failure "
            f"{tally.failures} of {tally.refreshes} refreshes)"
        )

    def _vanished(self, values: Tensor) -> bool:
        """Whether next to nothing is left of the curvature; the last pairs are kept then.

        As where a softmax is saturated on the curvature batch: gradients of other batches do not
        vanish with it, and no unit of the loss bounds their Newton steps.
        """
        before = _largest(self.subspace.values) if self.subspace is not None else 0.0
        now = _largest(values)
        if not now < VANISHED * before:
            return False
        if self._training.first_time("vanished"):
            self._training.warn(
                f"the curvature at step {self._training.steps} has vanished: eigenvalues of "
                f"{now:.3g} at most, after {before:.3g}; the last eigenpairs are kept as long as "
                f"that is so"
            )
        return True

    def _start(self, space: RowSpace) -> tuple[Tensor, bool]:
        """The start vector: the sum of the last vectors, and a little of every direction.

        And whether it is that, and not a fresh one.
        """
        seed, last = self._options.seed + self._training.steps, self.subspace
        fresh = space.random(seed, 1.0 / math.sqrt(space.size))
        if last is None or not self._options.warm_start:
            return fresh, False
        old = last.basis.rows_of_sum(space.rows) / math.sqrt(len(last.values))
        old.add_(fresh, alpha=FRESH)
        # From vectors that are not finite no others would ever come.
        sound = math.isfinite(float(space.total(old.sum().double())))
        return (old, True) if sound else (fresh, False)

    def _guard(self, loss: float) -> None:
        """Let s grow while the loss of the curvature batch does not rise, and Newton steps too."""
        if math.isfinite(self.batch_loss):
            risen = loss - self.batch_loss > TOLERATED_RISE * abs(self.batch_loss)
            self.bound = max(1.0, self.bound * (SHRINK if risen else GROWTH))
            self.trust.renewed(risen=risen)
        self.batch_loss = loss
        self._first_loss = loss if self._first_loss is None else self._first_loss
        training = self._training
        if loss > BLOWN_UP * abs(self._first_loss) and training.first_time("blown up"):
            training.warn(
                f"the loss of the curvature batch has grown from {self._first_loss:.3g} at the "
                f"first refresh to {loss:.3g} at step {training.steps}: lower newton_scale or lr"
            )

    def _adopt(self, pairs: Pairs) -> bool:
        """Use new eigenpairs if they are finite on all processes; returns whether they are."""
        chunks, world, momentum = self._vector.chunks, self._training.world, self._momentum()
        self.drop()  # the old vectors, before there are new ones
        rows = pairs.vectors()
        if not world.all_agree(bool(rows.sum().isfinite()), rows.device):
            return False
        basis: Basis
        if self._by_rows:
            basis = RowBasis(rows, chunks, world)
        else:
            basis = ColumnBasis.of_rows(rows, chunks, self._vector.layout.size, world)
        self._use(self._span(basis, pairs.values, pairs.bounds(), pairs.largest), momentum)
        return True

    def take(self, found: Found) -> None:
        """Use eigenpairs that other processes have computed. A collective.

        Args:
            found: The eigenpairs, finite on all processes.
        """
        self.drop_unsound()
        self.tell_undone()
        self.first_used = self._training.steps + 1
        self._guard(found.loss)
        vector, world = self._vector, self._training.world
        with vector.plain():
            momentum, count = self._momentum(), len(found.values)
            self.drop()
            basis: Basis
            if self._by_rows:
                basis = RowBasis(found.vectors, vector.chunks, world)
            else:
                basis = ColumnBasis(found.vectors, vector.chunks, world, count)
            largest = min(self._options.largest, count)
            self._use(self._span(basis, found.values, found.residuals, largest), momentum)

    def _momentum(self) -> Tensor | None:
        """This process's part of the momentum in R^n; None if there is none to carry over."""
        if self.subspace is None or self.momentum_rule()[0] <= 0.0:
            return None
        return self.subspace.momentum_vector(self._vector.chunks)

    def _use(self, subspace: Subspace, momentum: Tensor | None) -> None:
        self.subspace = subspace
        if momentum is not None:
            subspace.carry(momentum, self._vector.chunks)
        publish(self._training)

    @property
    def _by_rows(self) -> bool:
        return self._vector.spread or self._training.world.size == 1

    def _span(self, basis: Basis, values: Tensor, residuals: Tensor, largest: int) -> Subspace:
        options, clip = self._options, self._options.rest_clip(type(self._training.base))
        self.bound = min(self.bound, clip)
        scale = rest_scale(values, largest, self.bound if options.lr_scale_guard else clip)
        rates = newton_rates(values, options.eigenvalue_floor)[basis.mine].to(basis.vectors)
        nothing = torch.zeros_like(rates)
        self.trust.follow(rates)
        return Subspace(
            basis, values, residuals, largest, rates, scale, nothing, last=nothing.clone()
        )

    def momentum_rule(self) -> tuple[float, float, bool]:
        """The numbers (β, gain, nesterov) of mom <- β mom + gain · V̂ᵀg."""
        training, chosen = self._training, self._options.subspace_momentum
        unlike = isinstance(chosen, str) and differs_in_momentum(training.groups)
        if unlike and training.first_time("momentum"):
            training.warn(
                "momentum differs between the groups; in the eigenvectors' span that of the first "
                "is used: subspace_momentum= sets another"
            )
        return momentum_rule(training.groups[0], chosen)

    def drop(self, why: str = "") -> None:
        """Drop the eigenpairs, and warn of the reason if one is given."""
        self.subspace = None
        publish(self._training)
        if why:
            self._training.warn(why)

    def drop_unsound(self) -> None:
        """Drop the eigenpairs if a Newton step was not finite; alike on all processes."""
        if self.subspace is not None and bool(self.subspace.unsound):
            self.drop(
                f"a Newton step at step {self._training.steps} or before is not finite, by the "
                f"gradient, the eigenvectors or their momentum: it is left out, and "
                f"{self._training.base_name} goes on alone until the next refresh"
            )

    def tell_undone(self) -> None:
        """Warn, the first time, that a Newton step has been taken back."""
        if bool(self.trust.undone) and self._training.first_time("undone"):
            self._training.warn(
                f"the gradient after a Newton step, at step {self._training.steps} or before, was "
                f"not finite, or has grown far more than the eigenpairs tell: that step is taken "
                f"back, and later ones are shorter; lower newton_scale if statistics() shows many"
            )

    def counts(self) -> dict[str, float]:
        """The counts of refreshes and the guard that a checkpoint keeps."""
        return {
            "refreshed_at": self.tally.step,
            "batch_loss": self.batch_loss,
            "rest_scale_bound": self.bound,
            **self.budget.counts(),
        }

    def resume(self, saved: Mapping[Tensor, SavedPart], *, taken: bool) -> None:
        """Go on from a checkpoint.

        Args:
            saved: Each parameter's part of the checkpoint.
            taken: Whether eigenpairs are loaded, if the same parameters trained.
        """
        counts, vector, world = counts_of(saved), self._vector, self._training.world
        self.subspace, self.trust = None, TrustRegion()
        self.tally.step = counts.get("refreshed_at", -1)
        self.batch_loss = counts.get("batch_loss", math.inf)
        self.bound = counts.get("rest_scale_bound", 1.0)
        self.budget.load(counts)
        loaded = load_eigenpairs(saved, vector.params, vector.dtype) if taken else None
        if loaded is None:
            if taken and has_pairs(saved):
                self._training.warn(OTHERS_TRAINED)
            return
        basis: Basis
        if self._by_rows:
            rows = vector.here(loaded.vectors).contiguous()
            basis = RowBasis(rows, vector.chunks, world)
        else:
            basis = ColumnBasis.of_all(loaded.vectors, vector.chunks, world)
        subspace = self._span(basis, loaded.values, loaded.residuals, loaded.largest)
        subspace.momentum = loaded.momentum[basis.mine].clone()
        subspace.carried = None if loaded.carried is None else vector.here(loaded.carried).clone()
        subspace.decayed = loaded.decayed
        if loaded.trust is not None and loaded.last is not None:
            self.trust.numbers = loaded.trust.tolist()
            self.trust.follow(subspace.rates)
            subspace.last = loaded.last[basis.mine].clone()
        self.subspace = subspace

"""Where eigenpairs come from: Lanczos on the Hessian of a curvature batch, when they are due.

    start from V̂1, and FRESH of everything else
    û, V̂ <- the k largest and l smallest Ritz pairs          lanczos/
    the bound of s grows while the loss of the batch does not rise

Accelerators (`accelerator.py`) ask for theirs by the same :func:`wanted_pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.profiler import record_function

from second_order.contract.training import Training
from second_order.fosi.options import FOSIOptions, refuse_no_closure
from second_order.fosi.subspace import Subspace
from second_order.fosi.vector import ParameterVector
from second_order.lanczos.hvp import LossFn
from second_order.lanczos.spectrum import Pairs, extreme_pairs
from second_order.lanczos.vector_space import RowSpace
from second_order.options import check_interval, value_at

__all__ = ["FRESH", "Closures", "CurvatureClosure", "Refreshes", "Tally", "wanted_pairs"]

Closures: TypeAlias = LossFn | Sequence[LossFn]

# The guard of s, at a refresh: how it grows or shrinks, and what rise of the loss is chance.
GROWTH, SHRINK, TOLERATED_RISE = 1.5, 0.5, 0.1

BLOWN_UP = 10.0  # times the loss at the first refresh

FRESH = 0.1
"""The random share of the vector that a refresh starts from."""


def wanted_pairs(space: RowSpace, start: Tensor, options: FOSIOptions) -> Pairs:
    """The k largest and l smallest eigenpairs.

    Raises:
        CurvatureError: On every process, if the loss of one cannot be differentiated twice.
    """
    pairs = extreme_pairs(
        space,
        start,
        options.largest,
        options.smallest,
        iterations=options.lanczos_iterations,
        tol=options.lanczos_tol,
        seed=options.seed,
    )
    space.raise_together()
    return pairs


@dataclass
class CurvatureClosure:
    """What evaluates the loss on the curvature batch; a copy has none, as it is of another model.

    Attributes:
        own: The optimizer's.
        given: The one that a step is given in its place.
    """

    own: Closures | None = None
    given: Closures | None = None

    def chosen(self, training: Training) -> Closures:
        """Give the one to ask now; without any, a function that says so."""

        def none() -> Any:
            refuse_no_closure(training.name, training.steps)

        chosen = self.own if self.given is None else self.given
        return none if chosen is None else chosen

    def __getstate__(self) -> dict[str, Any]:
        return {}


@dataclass
class Tally:
    """What eigenpairs have taken so far, as :class:`CurvatureReport` tells it."""

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


class Refreshes:
    """Eigenpairs of the curvature batch, every ``curvature_interval`` steps.

    Args:
        training: Whose Hessian it is.
        options: Of the step.
        vector: The parameters that train.

    Attributes:
        tally: Of all refreshes.
        batch_loss: Of the curvature batch at the last one.
        bound: The most that s may be, by the guard.
    """

    def __init__(self, training: Training, options: FOSIOptions, vector: ParameterVector) -> None:
        self._training, self._options, self._vector = training, options, vector
        self.tally = Tally()
        self.batch_loss, self.bound = math.inf, 1.0
        self._first_loss: float | None = None

    def due(self) -> bool:
        """Whether there are to be new ones at this step."""
        options, step = self._options, self._training.steps
        if options.wanted == 0 or step < options.first_refresh or not self._vector.params:
            return False
        if self.tally.step < 0:
            return True
        every = value_at(options.curvature_interval, step)
        check_interval(f"curvature_interval at step {step}: curvature_interval", every)
        return step - self.tally.step >= int(every)

    def find(self, closure: CurvatureClosure, last: Subspace | None) -> Pairs | None:
        """Compute them; None if a number is not finite. A collective.

        Args:
            closure: Evaluates the curvature batch.
            last: Those to start from.

        Raises:
            CurvatureError: On every process, if the loss of one cannot be evaluated or
                differentiated twice.
        """
        training, options = self._training, self._options
        measured = self._vector.hessian(closure.chosen(training), options.hvp)
        with record_function("second_order.lanczos"), measured as space:
            pairs = wanted_pairs(space, self._start(space, last), options)
            loss = space.loss()
        self.tally.add(training.steps, pairs.iterations)
        if not (pairs.finite and math.isfinite(loss)):
            return None
        self._guard(loss)
        return pairs

    def failed(self, kept: str) -> None:
        """Count and tell that the last ones were not finite."""
        self.tally.failures += 1
        self._training.warn(
            f"the curvature at step {self._training.steps} is not finite: {kept} (failure "
            f"{self.tally.failures} of {self.tally.refreshes} refreshes)"
        )

    def _start(self, space: RowSpace, last: Subspace | None) -> Tensor:
        """The sum of the last vectors, and a little of all others: what is new may be there."""
        seed = self._options.seed + self._training.steps
        fresh = space.random(seed, 1.0 / math.sqrt(space.size))
        if last is None or not self._options.warm_start:
            return fresh
        old = last.basis.rows_of_sum(space.rows) / math.sqrt(len(last.values))
        old.add_(fresh, alpha=FRESH)
        # From vectors that are not finite no others would ever come.
        return old if math.isfinite(float(space.total(old.sum().double()))) else fresh

    def _guard(self, loss: float) -> None:
        """Let s grow while the loss of the curvature batch does not rise."""
        if math.isfinite(self.batch_loss):
            risen = loss - self.batch_loss > TOLERATED_RISE * abs(self.batch_loss)
            self.bound = max(1.0, self.bound * (SHRINK if risen else GROWTH))
        self.batch_loss = loss
        self._first_loss = loss if self._first_loss is None else self._first_loss
        training = self._training
        if loss > BLOWN_UP * abs(self._first_loss) and training.first_time("blown up"):
            training.warn(
                f"the loss of the curvature batch has grown from {self._first_loss:.3g} at the "
                f"first refresh to {loss:.3g} at step {training.steps}: lower newton_scale or lr"
            )

    def rest_clip(self) -> float:
        """The most that s may be now."""
        clip = self._options.rest_clip(type(self._training.base))
        self.bound = min(self.bound, clip)
        return self.bound if self._options.lr_scale_guard else clip

    def counts(self) -> dict[str, float]:
        """What a checkpoint keeps of them."""
        return {
            "refreshed_at": self.tally.step,
            "batch_loss": self.batch_loss,
            "rest_scale_bound": self.bound,
        }

    def resume(self, counts: Any) -> None:
        """Go on from the counts of a checkpoint."""
        self.tally.step = counts.get("refreshed_at", -1)
        self.batch_loss = counts.get("batch_loss", math.inf)
        self.bound = counts.get("rest_scale_bound", 1.0)

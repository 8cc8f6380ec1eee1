"""Refreshes by budget: as often as all of them cost no more than asked.

Refreshes are counted in products, and products in steps of the base alone:

T       a step of the base: batches, passes, the mean of gradients, the base's own step; seconds
R       a refresh, of m products; seconds
price   a product, R / ((m + 1) T): the evaluation counts as one more
cost    the refresh to come: price (m + 1), with m products of the last one, or what it may take
spent   all refreshes so far

The next one comes at the first step t with  spent + cost <= overhead t  and  cost <= CATCH_UP
overhead (t - t_last): what a refresh has left over is not spent at once. The first MEASURED ones
are timed, each with the steps around it, and the price is the median: memory is allocated in the
first. Before that a probe, of two products, tells about what it will cost; it waits until what
probes cost usually is earned, for a training that ends before that would pay for nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from second_order.contract.training import Training
from second_order.distributed.agreement import mean_over
from second_order.fosi.checkpoint import BUDGET, PRICES
from second_order.fosi.options import FOSIOptions
from second_order.lanczos.lanczos import tridiagonalise
from second_order.lanczos.vector_space import RowSpace
from second_order.options import AUTO
from second_order.stopwatch import Account, Clock, Stopwatch, clock_of

__all__ = ["RefreshBudget"]

FEWEST, KEPT = 5, 50  # steps that T is measured in at least, and at most the last
BEFORE_PROBE = 10  # steps that T is measured in
MEASURED = len(PRICES)  # refreshes
CATCH_UP = 1.5  # times the overhead, where less has been spent so far
HALFWAY = 20  # rows of a matrix that a refresh of usual size decomposes on its way
BEFORE_REFRESH = 10  # steps that T is measured in before a refresh after the first
LEAST = 1e-12  # seconds: nothing is for nothing, be a clock ever so coarse


class RefreshBudget:
    """Tells when refreshes are due whose interval is "auto", the same on all ranks.

    Args:
        training: The training whose steps are measured.
        options: The interval, and the overhead allowed.
        clock: Clock to measure by; None for that of the training's device.

    Attributes:
        prices: Those of the refreshes that have been measured, in steps of the base.
        cost: The next refresh in steps of the base; 0 until it is known.
        spent: All refreshes so far, and the probe, in steps of the base.
        clock: Clock to measure by; None for that of the training's device.
        usual_probe: What a probe is taken to cost before it, in steps of the base.
    """

    usual_probe = 10.0

    def __init__(
        self, training: Training, options: FOSIOptions, clock: Clock | None = None
    ) -> None:
        self._training, self._options = training, options
        self.clock = clock
        self.active = options.curvature_interval == AUTO and options.wanted > 0
        self.prices: list[float] = []
        self.cost = self.spent = 0.0
        self._warmed = False  # whether this process has made a product
        self._least = math.inf  # seconds: the least T so far
        self._restart()

    def _restart(self) -> None:
        """Measure from the next step on, if there is something to measure."""
        self._watch: Stopwatch | None = None
        self._laps = 0
        self._products = 0  # of a refresh whose price is not known yet
        self._expected = 0  # of the one after it

    @property
    def price(self) -> float:
        """A product in steps of the base; 0 until it has been measured."""
        return statistics.median(self.prices) if self.prices else 0.0

    # ------------------------------------------------------------------------------ when

    def due(self, last: int) -> bool:
        """Whether a refresh is due at this step.

        Args:
            last: The step of the last refresh, -1 before the first.
        """
        step, given = self._training.steps, self._options.warmup_steps
        if last < 0 and given is not None:
            return step >= given
        return self.cost > 0.0 and step >= self.next_step(last)

    def next_step(self, last: int) -> int:
        """The step of the next refresh, once its cost is known."""
        overhead, last = self._options.overhead, max(last, 0)
        earned = (self.spent + self.cost) / overhead
        return math.ceil(max(earned, last + self.cost / (CATCH_UP * overhead)))

    def wants_probe(self, last: int) -> bool:
        """Whether two products are to be timed at this step; the same on every rank."""
        if not self.active or self.cost or self._products or self._laps < BEFORE_PROBE:
            return False
        if self._training.steps * self._options.overhead < self.usual_probe:
            return False
        return last >= 0 or self._options.warmup_steps is None

    # --------------------------------------------------------------------------- measuring

    @property
    def measuring(self) -> bool:
        """Whether there is no price of a product yet."""
        return self.active and not self.prices

    def _wants_times(self, last: int) -> bool:
        """Whether times are taken at this step: with no price, and around the next refreshes."""
        if not self.active or len(self.prices) >= MEASURED:
            return False
        near = self._training.steps >= self.next_step(last) - BEFORE_REFRESH
        return not self.prices or self._products > 0 or near

    def begin(self, working: bool, last: int) -> None:
        """Begin a step: measure from now on, if there is something to measure.

        Args:
            working: Whether a parameter trains; the same on every rank.
            last: The step of the last refresh, -1 before the first.
        """
        if not (self._wants_times(last) and working):
            self._restart()
        elif self._watch is None:
            self._watch = Stopwatch(self._clock(), KEPT)

    def _clock(self) -> Clock:
        return self.clock or clock_of(self._training.device)

    def on(self, account: Account) -> AbstractContextManager[None]:
        """Measure the enclosed work on an account."""
        return nullcontext() if self._watch is None else self._watch.on(account)

    @contextmanager
    def probing(self) -> Iterator[_Probe]:
        """Time the work on a space and, by :meth:`_Probe.take`, a product in it; a collective."""
        watch = Stopwatch(self._clock())
        with self.on(Account.APART), watch.on(Account.APART):
            probe = _Probe(watch)
            yield probe
        watch.lap()
        (lap,) = watch.read()
        T, product, whole = mean_over(
            self._training.world,
            [self._base_step(), lap[Account.REFRESH], lap[Account.REFRESH] + lap[Account.APART]],
        )
        T = max(T, LEAST)
        most = self._options.most_products(probe.size, warm=False)
        self.cost = max(product, LEAST) / T * (most + 1)
        self.spent += whole / T
        self._warmed = True

    def warm_up(self, space: RowSpace) -> None:
        """Make a product that does not count, if the first to be measured would be the first."""
        if self._watch is not None and not self._warmed:
            self._warmed = True
            with self.on(Account.APART):
                space.apply(space.random(self._options.seed, 1.0 / math.sqrt(space.size)))

    def refreshed(self, products: int, most: int) -> None:
        """Count a refresh, whatever came of it.

        Args:
            products: Number of its products.
            most: Number of products that the next one may take.
        """
        expected = min(products, most)
        self.spent += self.price * (products + 1)
        self.cost = self.price * (expected + 1)
        if self._watch is not None:
            self._products, self._expected = products, expected

    def lap(self) -> None:
        """End a step; a collective at the step from which on the price is known."""
        if self._watch is None:
            return
        self._watch.lap()
        self._laps += 1
        if self._products and self._laps >= FEWEST:
            refresh = sum(lap[Account.REFRESH] for lap in self._watch.read())
            T, R = mean_over(self._training.world, [self._base_step(), refresh])
            found = max(R, LEAST) / (max(T, LEAST) * (self._products + 1))
            self.spent += (found - self.price) * (self._products + 1)
            self.prices.append(found)
            self.cost = self.price * (self._expected + 1)
            self._restart()

    def _base_step(self) -> float:
        """T: the median of the laps, without the first ones; the least that this has been.

        Once there are eigenvectors, reading them leaves the caches to the base as it would not be
        alone.
        """
        assert self._watch is not None
        laps = self._watch.read()
        settled = laps[max(2, len(laps) // 4) :]  # memory is allocated, kernels are chosen
        self._least = min(self._least, statistics.median(lap[Account.BASE] for lap in settled))
        return self._least

    def forget(self) -> None:
        """Measure anew: other parameters train, and their products cost something else."""
        self.prices, self.cost, self._least = [], 0.0, math.inf
        self._restart()

    def close(self) -> None:
        """Measure no more: there are no refreshes to come."""
        self.forget()
        self.active = False

    # --------------------------------------------------------------------- state and summary

    def facts(self) -> list[tuple[str, Any]]:
        """What is known of the costs, which must be equal on all ranks."""
        if not self.active:
            return []
        known = self.cost, self.spent, self._laps, self._products, self._expected
        of = "refreshes by budget: cost, spent, steps measured, products, prices"
        return [(of, (*known, *self.prices))]

    def interval(self, last: int) -> float:
        """Steps from the last refresh to the next; NaN where they are not known."""
        return float(self.next_step(last) - max(last, 0)) if self.cost else math.nan

    def said(self, last: int) -> list[str]:
        """A line for the summary, if refreshes come by budget.

        Args:
            last: The step of the last refresh, -1 before the first.
        """
        if not self.active:
            return []
        line = f"refreshes by budget, overhead {self._options.overhead}: "
        if not self.cost:
            return [line + "being measured"]
        line += f"the next at step {self.next_step(last)}, "
        base = f"steps of {self._training.base_name} alone"
        if not self.price:
            return [f"{line}for about {self.cost:.3g} {base}, as two products tell"]
        return [
            f"{line}every {self.cost / self._options.overhead:.0f} steps or so; a product costs "
            f"{self.price:.3g} {base}, the next refresh {self.cost:.3g}, all so far "
            f"{self.spent:.3g}"
        ]

    def counts(self) -> dict[str, float]:
        """The entries for a checkpoint; none without "auto"."""
        if not self.active:
            return {}
        prices = [*self.prices, *[0.0] * MEASURED][:MEASURED]
        values = self.price, self.cost, self.spent, *prices
        return dict(zip((*BUDGET, *PRICES), values, strict=True))

    def load(self, counts: Mapping[str, Any]) -> None:
        """Take over what a checkpoint knows of costs; otherwise measure from here on."""
        price, *known = [float(counts.get(name, 0.0)) for name in BUDGET]
        self.cost, self.spent = known if self.active else (0.0, 0.0)
        # Versions that measured one refresh have no more than its price.
        prices = [float(counts.get(name, price)) for name in PRICES]
        self.prices = [each for each in prices if each] if self.active else []
        self._least = math.inf
        self._restart()


class _Probe:
    """A product that is timed.

    Attributes:
        size: Size n of the space.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self.size = 1

    def take(self, space: RowSpace, seed: int) -> None:
        """Make two products with a random vector, and time the second.

        With what Lanczos does beside it, which on a small model takes longer: the vectors are made
        orthogonal, and a matrix of about half the largest size is decomposed.
        """
        self.size = space.size
        d = space.random(seed, 1.0 / math.sqrt(space.size))
        space.apply(d)
        with self._watch.on(Account.REFRESH):
            entries = torch.ones(HALFWAY, dtype=torch.float64)
            found = tridiagonalise(space, d, 1)
            replace(found, diagonal=entries, off_diagonal=entries).ritz()
        space.raise_together()

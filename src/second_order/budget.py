"""How often curvature is renewed, where that is to cost no more than asked.

The training's stages are timed in a few steps, a step a lap, and told apart as

S      statistics: the hooks' work in the passes, sums, their exchange, the running averages
R      a refresh: solves and the exchange of decompositions; or products, and pairs of them
T      the base alone: batches, passes, the mean of gradients, the base's step
apart  preconditioning and what it sends, which no interval makes rarer; waiting for threads

K-FAC measures the first steps, S and R in each, and then chooses intervals f <= i, once, with
S/f + R/i <= overhead T. FOSI renews its pairs whenever that has been earned. All ranks choose the
same: times are averaged over them, at a step that all know by its number.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.options import AUTO, check_interval, value_at

__all__ = [
    "BUDGET",
    "MEASURED",
    "MEASURED_STEPS",
    "MEASURED_UNTIL",
    "OVERHEAD",
    "PRICES",
    "IntervalBudget",
    "RefreshBudget",
    "Stopwatch",
    "intervals",
    "settle",
]

OVERHEAD = "overhead"
BUDGET = ("product_price", "refresh_cost", "refreshes_spent")
"""Entries of a checkpoint: what a budget of refreshes knows, in steps of the base."""
MEASURED = ("statistics_seconds", "refresh_seconds", "base_seconds")
MEASURED_STEPS, MEASURED_UNTIL = "measured_steps", "measured_until"
"""Entries of a checkpoint: what a budget of intervals has measured on the process that wrote it, in
how many steps, and until which step it measures."""
PRICES = ("first_price", "second_price", "third_price")
"""Of a product, in the first refreshes; 0 of one to come. Not in checkpoints of older versions."""

KEPT = 50  # laps
LONGEST = 1000  # steps at most: older curvature is no guide, whatever the next refresh costs
FEWEST, BEFORE_PROBE = 5, 10  # steps that T is measured in, before a price and before a probe
CATCH_UP = 1.5  # times the overhead, where less has been spent so far
LEAST = 1e-12  # seconds: nothing is for nothing, be a clock ever so coarse


def settle(device: torch.device) -> None:
    """Wait until a CUDA device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds of stages by kind of work, "T" without one, a step a lap; on CUDA the device's."""

    def __init__(self, training: Training, kinds: Mapping[str, str]) -> None:
        self._kinds, self._meter, self._device = kinds, training.meter, training.device
        self._laps = deque([[("T", self._mark())]], maxlen=KEPT + 1)  # with the one under way
        self._meter.watch = self._opened

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return self._meter.now()
        event = torch.cuda.Event(enable_timing=True)  # nobody waits for it before it is read
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _opened(self, account: str) -> None:
        kind = self._kinds.get(account, "T")
        if kind != self._laps[-1][-1][0]:
            self._laps[-1].append((kind, self._mark()))

    def lap(self) -> None:
        """End a lap, and begin the next."""
        end = "T", self._mark()
        self._laps[-1].append(end)
        self._laps.append([end])

    @property
    def laps(self) -> int:
        """Number of laps that have ended."""
        return len(self._laps) - 1

    def medians(self, *kinds: str) -> list[float]:
        """Seconds by kind, without the first laps; waits for the device."""
        settle(self._device)
        laps = []
        for marks in list(self._laps)[:-1]:
            lap = dict.fromkeys((*kinds, *self._kinds.values(), "T"), 0.0)
            for (kind, start), (_, end) in pairwise(marks):
                on_device = self._device.type == "cuda"
                lap[kind] += start.elapsed_time(end) / 1000 if on_device else end - start
            laps.append(lap)
        settled = laps[max(2, len(laps) // 4) :] or laps  # memory is allocated, kernels are chosen
        return [statistics.median(lap[kind] for lap in settled) for kind in kinds]


def intervals(
    S: float, R: float, T: float, overhead: float, f: int | None = None, i: int | None = None
) -> tuple[int, int]:
    """Steps between statistics and between refreshes, ``f <= i``, with S/f + R/i <= overhead T.

    Where both are chosen, and a refresh costs less than two statistics, both come at every so many
    steps. Otherwise statistics may take a third of the budget, and refreshes two thirds and what
    statistics at every step leave. Where one is given, the other gets what it leaves. The bound
    does not hold where it would take more than 1,000 steps, or statistics rarer than refreshes.
    """
    budget = overhead * T
    if f is not None:
        return f, max(f, _steps(R, budget - S / f)) if i is None else i
    if i is not None:
        return min(i, _steps(S, budget - R / i)), i
    if R <= 2 * S:
        return (_steps(S + R, budget),) * 2
    f = _steps(3 * S, budget)
    return f, max(f, _steps(R, max(budget - S, budget * 2 / 3)))


def _steps(cost: float, budget: float) -> int:
    """The least number of steps in each of which a cost is within budget, 1 to 1,000."""
    if cost >= LONGEST * budget:
        return 1 if cost == 0 else LONGEST
    return max(math.ceil(cost / budget), 1)


class IntervalBudget:
    """Chooses the intervals that are "auto" from times measured in the first ``steps``.

    ``given`` has, by option, steps between statistics and between refreshes: a number, a callable
    of the step, "auto", or None for what is neither chosen nor given; ``kinds`` the kind of each of
    the meter's accounts.
    """

    def __init__(
        self,
        training: Training,
        overhead: float | None,
        given: Mapping[str, Any],
        kinds: Mapping[str, str],
        steps: int,
    ) -> None:
        self._training, self._overhead, self._given = training, overhead, given
        self._auto = [name for name, every in given.items() if every == AUTO]
        self._kinds, self._steps = kinds, steps if self._auto else 0
        self.measuring = bool(self._auto)  # an interval is still to be chosen
        self.chosen: dict[str, int] = {}  # by option; empty while measuring, or without "auto"
        self.measured: Sequence[float] | None = None  # S, R, T in seconds, the mean of ranks
        self.until = self._steps  # until then both come at every step; 0 without "auto"
        self._watch: Stopwatch | None = None
        # S, R, T before a checkpoint that was written during the measurement, and their steps.
        self._earlier: tuple[Sequence[float], int] = ((0.0, 0.0, 0.0), 0)

    def begin(self, coming: int = 0) -> None:
        """Measure from now on, or from so many steps later, if an interval is to be chosen."""
        if self.measuring:
            self._watch = Stopwatch(self._training, self._kinds)
            self.until = self._training.steps + coming + self._steps

    def lap(self, working: bool) -> None:
        """End a step in which layers were ``working``; a collective at the last one measured."""
        if self._watch is None:
            return
        if not working:
            self.begin(coming=1)
            return
        self._watch.lap()
        if self._training.steps + 1 >= self.until:
            times, _ = self._so_far(self._watch)
            self._choose(*self._training.world.mean(times))
            self._watch = self._training.meter.watch = None

    def _so_far(self, watch: Stopwatch) -> tuple[list[float], int]:
        """S, R, T of this process and their number of steps, with those before a resume."""
        earlier, steps = self._earlier
        laps = watch.laps
        if not laps:
            return list(earlier), steps
        medians = watch.medians("S", "R", "T")
        total = steps + laps
        pairs = zip(earlier, medians, strict=True)
        return [(steps * before + laps * now) / total for before, now in pairs], total

    def _choose(self, S: float, R: float, T: float) -> None:
        training, overhead, given = self._training, self._overhead or 0.0, []
        for name, option in self._given.items():
            every = None if name in self._auto else value_at(option, training.steps)
            if every is not None:
                check_interval(f"{name} at step {training.steps}: {name}", every)
            given.append(every)
        f, i = intervals(S, R, T, overhead, *given)
        pairs = zip(self._given, (f, i), strict=True)
        self.chosen = {name: steps for name, steps in pairs if name in self._auto}
        self.measuring, self.measured = False, (S, R, T)
        share = (S / f + R / i) / T if T > 0 else 0.0
        if share > overhead * (1 + 1e-9) and training.first_time(OVERHEAD):
            training.warn(
                f"overhead={overhead} cannot be kept: with statistics every {f} steps and solves "
                f"every {i}, they cost {share:.3f} of a step of {training.base_name} alone; "
                f"solver='inverse' is the cheapest, and skip_layers=[...] spares the widest layers"
            )

    @property
    def state(self) -> str:
        """What is chosen, in words, the same on all ranks; "" without "auto"."""
        if self.measuring:
            return f"being measured until step {self.until}"
        words = zip(("statistics", "inverses"), map(self.chosen.get, self._given), strict=True)
        return ", ".join(f"{word} every {steps} steps" for word, steps in words if steps)

    @property
    def said(self) -> str:
        """A line for the summary about the chosen intervals; "" without "auto"."""
        line = f"intervals by budget, overhead {self._overhead}: {self.state}"
        if self.measured is not None:
            S, R, T = (f"{1000 * seconds:.3g} ms" for seconds in self.measured)
            line += f"; measured: statistics {S}, a refresh {R}, a step of the base {T}"
        return line if self._auto else ""

    def saved(self) -> dict[str, Any]:
        """The intervals as a checkpoint saves them with every layer; 0 during measurement."""
        if not self._auto:
            return {}
        return {OVERHEAD: self._overhead} | {name: self.chosen.get(name, 0) for name in self._auto}

    def saved_times(self) -> dict[str, Any]:
        """The part of a checkpoint for the measurement; synchronizes while it is running."""
        if not self._auto:
            return {}
        measured, steps = self.measured or (0.0, 0.0, 0.0), self._steps
        if self._watch is not None:
            measured, steps = self._so_far(self._watch)
        found: dict[str, Any] = dict(zip(MEASURED, measured, strict=True))
        return {**found, MEASURED_STEPS: steps, MEASURED_UNTIL: self.until}

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over intervals saved for the same overhead; otherwise measure anew from here on."""
        wanted = {OVERHEAD, *self._auto}
        found = next((part for part in saved.values() if part.keys() >= wanted), None)
        self.chosen, self.measured, self.until = {}, None, self._steps
        self._earlier = ((0.0, 0.0, 0.0), 0)
        if self._watch is not None:
            self._training.meter.watch, self._watch = None, None  # its laps would never end
        until, times = 0, None
        if found is not None and found.number(OVERHEAD) == self._overhead:
            chosen = {name: found.whole(name, 0) for name in self._auto}
            self.chosen = chosen if all(chosen.values()) else {}
            if found.keys() >= {*MEASURED, MEASURED_STEPS, MEASURED_UNTIL}:
                times = [found.number(name, 0.0) for name in MEASURED]
                until = found.whole(MEASURED_UNTIL, 0)
                self._earlier = times, found.whole(MEASURED_STEPS, 0)
        self.measuring = bool(self._auto) and not self.chosen
        if self.chosen and times is not None:
            self.measured, self.until = times, until
        self.begin()
        if self.measuring and until > self._training.steps:
            self.until = until  # as in the run that wrote the checkpoint


class RefreshBudget:
    """Tells when refreshes are due, each once it is earned; the same on all ranks.

        price   a product, R / ((m + 1) T) in a refresh of m; the evaluation counts as one more
        cost    the refresh to come: price (m + 1), with m of the last one, or what it may take
        spent   all refreshes so far

    The next one comes at the first step t with  spent + cost <= overhead t  and
    cost <= CATCH_UP overhead (t - last): what one has left over is not spent at once. The first
    ones are timed, and the price is the median: memory is allocated in the first. Before that a
    probe, of two products, tells about what it will cost; it waits until what probes cost usually
    is earned, lest a short training pay for nothing.

    Prices, cost, what is spent and what a probe is taken to cost before it are in steps of the
    base; ``cost`` is 0 until it is known. The ``first`` refresh comes at that step, or once it is
    earned. It is ``active`` if the interval is "auto", and there are pairs to find.
    """

    usual_probe = 10.0

    def __init__(
        self, training: Training, overhead: float, first: int | None, *, active: bool
    ) -> None:
        self._training, self._overhead, self._first = training, overhead, first
        self.active, self.warmed = active, False  # whether this process has made a product
        self.spent = 0.0
        self.forget()

    def forget(self) -> None:
        """Measure anew: other parameters train, and their products cost something else."""
        self.prices: list[float] = []
        self.cost, self._least = 0.0, math.inf  # seconds: the least T so far
        self._restart()

    def _restart(self) -> None:
        self._watch: Stopwatch | None = None
        self._training.meter.watch = None
        self._laps, self._seconds = 0, 0.0
        self._products = self._expected = 0  # of a refresh without a price yet, and of the next

    @property
    def price(self) -> float:
        """A product in steps of the base; 0 until it has been measured."""
        return statistics.median(self.prices) if self.prices else 0.0

    def due(self, last: int) -> bool:
        """Whether a refresh is due, the last one having come at step ``last``, or -1 for none."""
        if last < 0 and self._first is not None:
            return self._training.steps >= self._first
        return self.cost > 0.0 and self._training.steps >= self.next_step(last)

    def next_step(self, last: int) -> int:
        """The step of the next refresh, once its cost is known."""
        earned = (self.spent + self.cost) / self._overhead
        return math.ceil(max(earned, max(last, 0) + self.cost / (CATCH_UP * self._overhead)))

    def interval(self, last: int) -> float:
        """Steps from the last refresh to the next; NaN where they are not known."""
        return float(self.next_step(last) - max(last, 0)) if self.cost else math.nan

    def wants_probe(self, last: int) -> bool:
        """Whether two products are to be timed at this step; the same on every rank."""
        if self.cost or self._products or self._laps < BEFORE_PROBE:
            return False
        earned = self._training.steps * self._overhead >= self.usual_probe
        return earned and (last >= 0 or self._first is None)

    def begin(self, working: bool) -> None:
        """Begin a step, and measure it if a price is wanting, and parameters train."""
        if not (self.active and working and len(self.prices) < len(PRICES)):
            self._restart()
        elif self._watch is None:
            kinds = dict.fromkeys(("lanczos", "split", "newton"), "apart")
            self._watch = Stopwatch(self._training, kinds)

    def now(self) -> float:
        """Seconds, once the device has done all that is queued; 0 where nothing is measured."""
        if self._watch is None:
            return 0.0
        settle(self._training.device)
        return self._training.meter.now()

    def probed(self, product: float, whole: float, most: int) -> None:
        """Know about what a refresh of ``most`` products costs, by seconds. A collective."""
        times = [self._base_step(), product, whole]
        T, product, whole = self._training.world.mean(times)
        self.cost = max(product, LEAST) / max(T, LEAST) * (most + 1)
        self.spent += whole / max(T, LEAST)
        self.warmed = True

    def refreshed(self, seconds: float, products: int, most: int) -> None:
        """Count a refresh, whatever came of it; the next one may take ``most`` products."""
        expected = min(products, most)
        self.spent += self.price * (products + 1)
        self.cost = self.price * (expected + 1)
        if self._watch is not None:
            self._seconds, self._products, self._expected = seconds, products, expected

    def lap(self) -> None:
        """End a step; a collective at the step from which on the price is known."""
        if self._watch is None:
            return
        self._watch.lap()
        self._laps += 1
        if self._products and self._laps >= FEWEST:
            T, R = self._training.world.mean([self._base_step(), self._seconds])
            found = max(R, LEAST) / (max(T, LEAST) * (self._products + 1))
            self.spent += (found - self.price) * (self._products + 1)
            self.prices.append(found)
            self.cost = self.price * (self._expected + 1)
            self._products = 0

    def _base_step(self) -> float:
        # The least: once there are eigenvectors, reading them spoils the caches of the base.
        assert self._watch is not None
        self._least = min(self._least, *self._watch.medians("T"))
        return self._least

    def facts(self) -> list[tuple[str, Any]]:
        """What is known of the costs, which must be equal on all ranks."""
        known = self.cost, self.spent, self._laps, self._products, self._expected
        of = "refreshes by budget: cost, spent, steps measured, products, prices"
        return [(of, (*known, *self.prices))] if self.active else []

    def said(self, last: int) -> list[str]:
        """A line for the summary, if refreshes come by budget."""
        line, base = "being measured", f"steps of {self._training.base_name} alone"
        if self.cost:
            line = f"the next at step {self.next_step(last)}, for about {self.cost:.3g} {base}"
        if self.price:
            line += f"; a product costs {self.price:.3g}, all so far {self.spent:.3g}"
        line = f"refreshes by budget, overhead {self._overhead}: {line}"
        return [line] if self.active else []

    def counts(self) -> dict[str, float]:
        """The entries for a checkpoint; none without "auto"."""
        prices = [*self.prices, *[0.0] * len(PRICES)][: len(PRICES)]
        values = self.price, self.cost, self.spent, *prices
        return dict(zip((*BUDGET, *PRICES), values, strict=True)) if self.active else {}

    def load(self, counts: Mapping[str, Any]) -> None:
        """Take over what a checkpoint knows of costs; otherwise measure from here on."""
        self.forget()
        self.spent = 0.0
        if self.active:
            price, self.cost, self.spent = (float(counts.get(name, 0.0)) for name in BUDGET)
            # Versions that measured one refresh have no more than its price.
            known = (float(counts.get(name, price)) for name in PRICES)
            self.prices = [each for each in known if each]

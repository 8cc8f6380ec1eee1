"""When statistics and refreshes come: as options say, or as often as they cost no more than asked.

For intervals that are "auto" the training thread's time is told apart in the first steps, in which
both come at every step:

S      statistics: the hooks' work in the passes, sums, their exchange, the running averages
R      a refresh: solves, verdicts, the exchange of decompositions
T      the base alone: batches, passes, the mean of gradients, the base's step
apart  preconditioning, clip and what they send: they come at every step, so that no interval
       makes them rarer; and waiting for solves that later ones do not wait for

Then intervals f <= i with S/f + R/i <= overhead T are chosen, once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.distributed.agreement import mean_over
from second_order.kfac.drift import ADAPTIVE, PLAIN, Drift
from second_order.kfac.layers import Layers
from second_order.kfac.options import BUDGETED, KFACOptions, PerStep, check_decay
from second_order.kronecker.block import KroneckerBlock
from second_order.options import AUTO, check_interval, value_at
from second_order.stages import ELSEWHERE
from second_order.stopwatch import Account, Clock, Stopwatch, clock_of

__all__ = ["SAVED", "Budget", "Cadence", "intervals"]

COSTLY, SHORT = 10, 0.5  # a refresh that is told of: in steps of the base, and in seconds
JUDGED = 100  # steps whose refreshes may be told of
LONGEST = 1000  # steps at most: older curvature is no guide, whatever the next refresh costs
FEWEST, MOST = 5, 20  # number of steps that are measured

OVERHEAD = "overhead"
SAVED = frozenset([OVERHEAD, *BUDGETED])
"""The entries of a checkpoint, in the part of every layer."""


# ----------------------------------------------------------------------------------- the intervals


def intervals(
    S: float, R: float, T: float, overhead: float, f: int | None = None, i: int | None = None
) -> tuple[int, int]:
    """Steps between statistics and between refreshes, ``f <= i``, with S/f + R/i <= overhead T.

    Where both are chosen, and a refresh costs less than two statistics, both come at every so many
    steps. Otherwise statistics may take a third of the budget, and refreshes two thirds and what
    statistics at every step leave. Where one is given, the other gets what it leaves. The bound
    does not hold where it would take more than 1,000 steps, or statistics rarer than refreshes.

    Args:
        S: Cost of an update of statistics, seconds.
        R: Cost of a refresh, seconds.
        T: Time of a step of the base alone, seconds.
        overhead: The share of T that statistics and refreshes may cost.
        f: Steps between statistics, where they are given.
        i: Steps between refreshes, where they are given.
    """
    budget = overhead * T
    if f is not None and i is not None:
        return f, i
    if f is not None:
        return f, max(f, _steps(R, budget - S / f))
    if i is not None:
        return min(i, _steps(S, budget - R / i)), i
    if R <= 2 * S:
        both = _steps(S + R, budget)
        return both, both
    f = _steps(3 * S, budget)
    return f, max(f, _steps(R, max(budget - S, budget * 2 / 3)))


def _steps(cost: float, budget: float) -> int:
    """The least number of steps in each of which a cost is within budget, 1 to 1,000."""
    if cost >= LONGEST * budget:
        return 1 if cost == 0 else LONGEST
    return max(math.ceil(cost / budget), 1)


# --------------------------------------------------------------------------------------- the budget


class Budget:
    """Chooses the intervals that are "auto" from times measured in the first steps.

    All ranks choose the same: the times are averaged over them, after a step that all know by its
    number.

    Args:
        training: The training whose steps are measured.
        options: The intervals, and the overhead allowed.
        elsewhere: Whether other processes take the statistics, which then cost nothing here.
        clock: Clock to measure by; None for that of the training's device.

    Attributes:
        chosen: Chosen intervals in steps, by option; empty during measurement or without "auto".
        measured: S, R and T in seconds, the ranks' mean; None where they have not been measured.
        until: The step up to which statistics and refreshes come at every step; 0 without "auto".
        clock: Clock to measure by; None for that of the training's device.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        *,
        elsewhere: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._training, self._options, self._elsewhere = training, options, elsewhere
        self.clock = clock
        self._auto = [name for name in BUDGETED if getattr(options, name) == AUTO]
        if options.by_drift and options.overhead is not None:
            self._auto = ["inv_update_steps"]
        self._most = FEWEST if options.by_drift else MOST
        self.chosen: dict[str, int] = {}
        self.measured: tuple[float, float, float] | None = None
        self.until = self._most if self._auto else 0
        self._watch: Stopwatch | None = None

    @property
    def measuring(self) -> bool:
        """Whether an interval is still to be chosen."""
        return bool(self._auto) and not self.chosen

    def begin(self) -> None:
        """Measure from now on, unless no interval is to be chosen."""
        self._begin_at(self._training.steps)

    def _begin_at(self, step: int) -> None:
        if not self.measuring:
            self._watch = None
            return
        self._watch = Stopwatch(self.clock or clock_of(self._training.device))
        self.until = step + self._most

    def on(self, account: Account) -> AbstractContextManager[None]:
        """Measure the enclosed work on an account."""
        return nullcontext() if self._watch is None else self._watch.on(account)

    def lap(self, working: bool) -> None:
        """End a step; a collective at the last step that is measured.

        Args:
            working: Whether there are layers to measure; the same on every rank.
        """
        if self._watch is None:
            return
        if not working:
            self._begin_at(self._training.steps + 1)
            return
        self._watch.lap()
        if self._training.steps + 1 >= self.until:
            self._choose(self._watch.read())
            self._watch = None

    def _choose(self, laps: list[dict[Account, float]]) -> None:
        """Fix the intervals by the medians of the laps, without the first ones."""
        settled = laps[max(2, len(laps) // 4) :] or laps  # memory is allocated, kernels are chosen
        accounts = (Account.STATISTICS, Account.REFRESH, Account.BASE)
        medians = [statistics.median(lap[account] for lap in settled) for account in accounts]
        S, R, T = mean_over(self._training.world, medians)
        if self._elsewhere:
            S = 0.0
        self.measured = S, R, T
        overhead = self._options.overhead
        assert overhead is not None
        f, i = intervals(S, R, T, overhead, *(self._given(name) for name in BUDGETED))
        pairs = zip(BUDGETED, (f, i), strict=True)
        self.chosen = {name: steps for name, steps in pairs if name in self._auto}
        share = (S / f + R / i) / T if T > 0 else 0.0
        cheaper = "solver='inverse' is cheaper, and " if self._options.solver == "eigen" else ""
        if share > overhead * (1 + 1e-9) and self._training.first_time("overhead"):
            self._training.warn(
                f"overhead={overhead} cannot be kept: with statistics every {f} steps and solves "
                f"every {i}, they cost {share:.3f} of a step of {self._training.base_name} alone; "
                f"{cheaper}skip_layers=[...] spares the widest layers"
            )

    def _given(self, name: str) -> int | None:
        """The interval of an option at this step; None if it is to be chosen."""
        if name in self._auto or getattr(self._options, name) is None:
            return None
        if self._elsewhere and name == BUDGETED[0]:
            return 1  # the steps of these statistics are not known here
        every = value_at(getattr(self._options, name), self._training.steps)
        check_interval(f"{name} at step {self._training.steps}: {name}", every)
        return int(every)

    # ----------------------------------------------------------------------- state and summary

    def facts(self) -> list[tuple[str, Any]]:
        """Chosen intervals and the like, which must be equal on all ranks."""
        return [("intervals by budget", self._state())] if self._auto else []

    def _state(self) -> str:
        if self.measuring:
            return f"being measured until step {self.until}"
        words = {"factor_update_steps": "statistics", "inv_update_steps": "inverses"}
        return ", ".join(f"{words[n]} every {steps} steps" for n, steps in self.chosen.items())

    @property
    def said(self) -> str:
        """A line for the summary about the chosen intervals; "" without "auto"."""
        if not self._auto:
            return ""
        costs = ""
        if self.measured is not None:
            S, R, T = (f"{1000 * seconds:.3g} ms" for seconds in self.measured)
            costs = f"; measured: statistics {S}, a refresh {R}, a step of the base {T}"
        return f"intervals by budget, overhead {self._options.overhead}: {self._state()}{costs}"

    def saved(self) -> dict[str, Any]:
        """The intervals as a checkpoint saves them with every layer; 0 during measurement."""
        if not self._auto:
            return {}
        return {OVERHEAD: self._options.overhead, **{n: self.chosen.get(n, 0) for n in self._auto}}

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over intervals saved for the same overhead; otherwise measure anew from here on."""
        wanted = {OVERHEAD, *self._auto}
        found = next((part for part in saved.values() if part.keys() >= wanted), None)
        self.chosen = {}
        if found is not None and found.number(OVERHEAD) == self._options.overhead:
            chosen = {name: found.whole(name, 0) for name in self._auto}
            self.chosen = chosen if all(chosen.values()) else {}
        self.measured = None
        self.until = self._most if self._auto else 0
        self.begin()


# -------------------------------------------------------------------------------------- the cadence


class Cadence:
    """When statistics and refreshes are due, and how much of the past an update keeps.

    Args:
        training: The training whose steps are counted.
        options: The intervals, and the weight of the past.
        budget: The intervals that are chosen.
        layers: The layers, some of which may be new.

    Attributes:
        updated_at: The step of the last update of the running averages.
        drift: The layers' intervals where refreshes follow what they change; None otherwise.
    """

    def __init__(
        self, training: Training, options: KFACOptions, budget: Budget, layers: Layers
    ) -> None:
        self._training, self._options, self._budget = training, options, budget
        self._layers = layers
        self.updated_at = 0
        bounds = ADAPTIVE if options.adaptive else PLAIN
        self.drift = Drift(bounds) if options.by_drift else None

    def takes_statistics(self) -> bool:
        """Whether statistics are due at this step."""
        if self._options.factor_update_steps is None:
            return bool(self.due())
        return self._is_one_of("factor_update_steps", self._training.steps)

    def due(self, coming: int = 0) -> list[KroneckerBlock]:
        """The layers that are to be solved at this step, or as many steps later."""
        step = self._training.steps + coming
        if self.drift is None:
            return list(self._layers.active) if self._is_one_of("inv_update_steps", step) else []
        if self._is_dense(step):
            return list(self._layers.active)
        allowed = self._budget.chosen.get("inv_update_steps", 1)
        self.drift.least = 1 << (allowed - 1).bit_length()  # a power of two, as all intervals are
        return self.drift.due(self._layers.active, step)

    @property
    def may_come(self) -> bool:
        """Whether a refresh may be due at the next step.

        A callable is not asked before its turn: one that raises on one rank would part the others.
        """
        return callable(self._options.inv_update_steps) or bool(self.due(coming=1))

    def _is_dense(self, step: int) -> bool:
        """Whether statistics and refreshes are due whatever the intervals."""
        return self._budget.measuring or step == self._layers.newcomers_at

    def _is_one_of(self, option: str, step: int) -> bool:
        """Whether a step is one of an interval's, by the name of its option."""
        return self._is_dense(step) or step % self.interval(option, step) == 0

    def interval(self, option: str, step: int) -> int:
        """What an option says of a step, or the budget has chosen for it."""
        if option in self._budget.chosen:
            return self._budget.chosen[option]
        every = value_at(getattr(self._options, option), step)
        check_interval(f"{option} at step {step}: {option}", every)
        return int(every)

    def tell_of_drift(self) -> None:
        """Warn, once, if the budget keeps layers from being refreshed as often as they drift."""
        drift = self.drift
        if drift is None or not drift.held or not self._training.first_time("drift is held"):
            return
        self._training.warn(
            f"overhead={self._options.overhead} leaves a refresh every {drift.least} steps, and "
            f"{drift.held} layers have drifted so far that they want one oftener; a larger "
            f"overhead allows it, and skip_layers=[...] spares wide layers"
        )

    @property
    def judges_cost(self) -> bool:
        """Whether a costly refresh is told of at this step, for which a device is waited for."""
        return self._training.steps < JUDGED

    def tell_of_cost(self) -> None:
        """Warn, once, if the refresh of the step that ends took as long as many steps of the base.

        Seconds are the host's; a device has been waited for before the refresh.
        """
        training, options = self._training, self._options
        if not self.judges_cost:
            return
        base = training.meter.spent(ELSEWHERE, "average_gradients", "base")
        refresh = training.meter.spent("solve", "solve_exchange")
        if training.steps == 0 and training.device.type != "cpu":
            return  # its libraries are loaded
        if refresh < max(SHORT, COSTLY * base) or not training.first_time("cost of a refresh"):
            return
        every, remedy = options.inv_update_steps, "a larger inv_update_steps makes them rarer"
        when = f"every {every} steps" if isinstance(every, int) else "as inv_update_steps says"
        if self.drift is not None:
            when, remedy = "as often as layers drift", "overhead=0.5 or the like makes them rarer"
        elif every == AUTO:
            when = f"as overhead={options.overhead} allows"
        if training.steps + 1 < self._budget.until:
            when = f"at every step until step {self._budget.until}, then {when}"
        cheaper = "solver='inverse' is cheaper, " if options.solver == "eigen" else ""
        training.warn(
            f"a refresh of the inverses took {refresh:.3g} s, and a step of {training.base_name} "
            f"alone {base:.2g} s: one comes {when}; {remedy}, {cheaper}skip_layers=[...] spares "
            f"the widest layers"
        )

    def updated(self) -> None:
        """Take note that the averages have been updated at this step."""
        self.updated_at = self._training.steps

    def decay(self, age: int | None = None) -> float:
        """The averages' weight of the past at an update from the training passes.

        Args:
            age: Steps since the last update, if this one has been noted already.
        """
        if self._options.factor_update_steps is None:
            return self.decay_since_update() if age is None else self._decay_after(age)
        every, steps = 1, self._training.steps
        counts_steps = isinstance(self._options.factor_decay, PerStep)
        if counts_steps and not self._is_dense(steps):
            every = min(self.interval("factor_update_steps", steps), steps - self._budget.until + 1)
        return self._decay_after(every)

    def decay_since_update(self) -> float:
        """The averages' weight of the past at an update whenever it comes."""
        return self._decay_after(self._training.steps - self.updated_at)

    def _decay_after(self, steps: int) -> float:
        """The averages' weight of the past at an update, ``steps`` after the last one."""
        if isinstance(self._options.factor_decay, PerStep):
            return self._options.factor_decay.after(steps, self._training.steps)
        decay: float = value_at(self._options.factor_decay, self._training.steps)
        check_decay(decay)
        return decay

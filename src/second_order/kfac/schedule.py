"""When statistics and refreshes come: as numbers, callables, the budget or drift say."""

from __future__ import annotations

from second_order.budget import IntervalBudget
from second_order.contract.training import Training
from second_order.kfac.drift import ADAPTIVE, PLAIN, Drift
from second_order.kfac.layers import Layers
from second_order.kfac.options import BUDGETED, KFACOptions, PerStep, check_decay
from second_order.kronecker.block import KroneckerBlock
from second_order.options import AUTO, check_interval, value_at
from second_order.stages import ELSEWHERE

__all__ = ["Cadence"]

COSTLY, SHORT = 10, 0.5  # a refresh that is told of: in steps of the base, and in seconds
JUDGED = 100  # steps whose refreshes may be told of
BY_DRIFT, BY_BUDGET = 5, 20  # number of steps that are measured


class Cadence:
    """When statistics and refreshes are due, and how much of the past an update keeps.

    Args:
        training: The training whose steps are counted.
        options: The intervals, and the weight of the past.
        layers: The layers, some of which may be new.
        helped: Whether other processes take the statistics, which then cost nothing here.
        waits: Whether all solves are waited for: then that is of a refresh's cost.

    Attributes:
        updated_at: The step of the last update of the running averages.
        budget: Chooses the intervals that are "auto".
        drift: The layers' intervals where refreshes follow what they change; None otherwise.
    """

    def __init__(
        self, training: Training, options: KFACOptions, layers: Layers, helped: bool, waits: bool
    ) -> None:
        self._training, self._options, self._layers = training, options, layers
        self.updated_at, self.drift = 0, None
        given = {name: getattr(options, name) for name in BUDGETED}
        if options.by_drift:
            self.drift = Drift(ADAPTIVE if options.adaptive else PLAIN)
            given["inv_update_steps"] = None if options.overhead is None else AUTO
        kinds = {"wait": "R" if waits else "apart"}
        for stage, kind in (("statistics", "S"), ("solve", "R"), ("precondition", "apart")):
            kinds |= {stage: kind, f"{stage}_exchange": kind}
        if helped:
            kinds["statistics"] = kinds["statistics_exchange"] = "apart"
            given["factor_update_steps"] = 1  # the steps of these statistics are not known here
        steps = BY_DRIFT if options.by_drift else BY_BUDGET
        self.budget = IntervalBudget(training, options.overhead, given, kinds, steps)

    def takes_statistics(self) -> bool:
        """Whether statistics are due at this step."""
        if self._options.factor_update_steps is None:
            return bool(self.due())
        return self._is_one_of("factor_update_steps", self._training.steps)

    def due(self, coming: int = 0) -> list[KroneckerBlock]:
        """The layers that are to be solved at this step, or as many steps later."""
        step, layers = self._training.steps + coming, list(self._layers.active)
        if self.drift is None:
            return layers if self._is_one_of("inv_update_steps", step) else []
        if self._is_dense(step):
            return layers
        allowed = self.budget.chosen.get("inv_update_steps", 1)
        self.drift.least = 1 << (allowed - 1).bit_length()  # a power of two, as all intervals are
        return self.drift.due(layers, step)

    @property
    def may_come(self) -> bool:
        """Whether a refresh may be due at the next step.

        A callable is not asked before its turn: one that raises on one rank would part the others.
        """
        return callable(self._options.inv_update_steps) or bool(self.due(coming=1))

    def _is_dense(self, step: int) -> bool:
        """Whether statistics and refreshes are due whatever the intervals."""
        return self.budget.measuring or step == self._layers.newcomers_at

    def _is_one_of(self, option: str, step: int) -> bool:
        return self._is_dense(step) or step % self.interval(option, step) == 0

    def interval(self, option: str, step: int) -> int:
        """What an option says of a step, or the budget has chosen for it."""
        if option in self.budget.chosen:
            return self.budget.chosen[option]
        every = value_at(getattr(self._options, option), step)
        check_interval(f"{option} at step {step}: {option}", every)
        return int(every)

    @property
    def judges_cost(self) -> bool:
        """Whether a costly refresh is told of at this step, for which a device is waited for."""
        return self._training.steps < JUDGED

    def tell(self) -> None:
        """Warn, once each, of a budget that keeps drifting layers waiting, and of a dear refresh.

        Seconds are the host's; a device has been waited for before the refresh.
        """
        training, options, drift = self._training, self._options, self.drift
        if drift is not None and drift.held and training.first_time("drift is held"):
            training.warn(
                f"overhead={options.overhead} leaves a refresh every {drift.least} steps, and "
                f"{drift.held} layers have drifted so far that they want one oftener; a larger "
                f"overhead allows it, and skip_layers=[...] spares wide layers"
            )
        base = training.meter.spent(ELSEWHERE, "average_gradients", "base")
        refresh = training.meter.spent("solve", "solve_exchange")
        loading = training.steps == 0 and training.device.type != "cpu"  # a device's libraries
        if not self.judges_cost or loading or refresh < max(SHORT, COSTLY * base):
            return
        if not training.first_time("cost of a refresh"):
            return
        every, remedy = options.inv_update_steps, "a larger inv_update_steps makes them rarer"
        when = f"every {every} steps" if isinstance(every, int) else "as inv_update_steps says"
        if drift is not None:
            when, remedy = "as often as layers drift", "overhead=0.5 or the like makes them rarer"
        elif every == AUTO:
            when = f"as overhead={options.overhead} allows"
        if training.steps + 1 < self.budget.until:
            when = f"at every step until step {self.budget.until}, then {when}"
        cheaper = "solver='inverse' is cheaper, " if options.solver == "eigen" else ""
        training.warn(
            f"a refresh of the inverses took {refresh:.3g} s, and a step of {training.base_name} "
            f"alone {base:.2g} s: one comes {when}; {remedy}, {cheaper}skip_layers=[...] spares "
            f"the widest layers"
        )

    def updated(self) -> None:
        """Take note that the averages have been updated at this step."""
        self.updated_at = self._training.steps

    def decay(self, age: int | None = None, *, exactly: bool = False) -> float:
        """The averages' weight of the past at an update.

        Args:
            age: Steps since the last update, if this one has been noted already.
            exactly: Whether to count them where factors have an interval, and not that.
        """
        past, steps = self._options.factor_decay, self._training.steps
        since = steps - self.updated_at if age is None else age
        if self._options.factor_update_steps is not None and not exactly:
            since = 1
            if not self._is_dense(steps):
                every = self.interval("factor_update_steps", steps)
                since = min(every, steps - self.budget.until + 1)
        if isinstance(past, PerStep):
            return past.after(since, steps)
        decay: float = value_at(past, steps)
        check_decay(decay)
        return decay

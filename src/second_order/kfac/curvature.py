"""The K-FAC step, whoever does which part of it.

plan          who does what, anew where layers were frozen, unfrozen or added
statistics    A, G of the step's passes, summed over the ranks that contribute
averages      A, G <- running averages, every factor_update_steps
solve         damped inverse of A ⊗ G, layer by layer, every inv_update_steps
precondition  P = (A ⊗ G + γ)⁻¹ ∇, by the layer's gradient workers
clip          ν = min(1, sqrt(κ / Σ lr² |P·∇|))
p.grad        <- ν P, everywhere
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from second_order.contract.averaging import Routed
from second_order.contract.curvature import Curvature
from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.kfac.budget import Budget, Cadence
from second_order.kfac.checkpoint import (
    MEAN_CURVATURE,
    READ_BY_ALL,
    check_saved_factors,
    load_factors,
    loaded_mean_curvature,
    loaded_workers,
    saved_factors,
    saved_workers,
)
from second_order.kfac.clip import Clip
from second_order.kfac.exchange import Exchange, OwnerGradients, ResultGradients
from second_order.kfac.factor_moves import gather_factors, move_factors
from second_order.kfac.feedback import Feedback
from second_order.kfac.fitted import fitted_curvature
from second_order.kfac.layers import Layers, gradient_blocks, gradient_statistics
from second_order.kfac.options import AUTO, BUDGETED, KFACOptions
from second_order.kfac.pipeline import Pipeline, Sums
from second_order.kfac.plan import (
    LayerPlan,
    Plan,
    dims_of,
    with_one_worker,
)
from second_order.kfac.sharded_gradients import ShardedGradients
from second_order.kfac.solves import Solves
from second_order.kfac.statistics import ACCOUNTS, statistics_of
from second_order.kfac.stats_workers import StatsWorkers
from second_order.kfac.step_length import ADAPTIVE, PLAIN, StepLength
from second_order.kfac.system import System, described
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.report import Summary
from second_order.stages import Meter
from second_order.stopwatch import Account, clock_of

__all__ = ["KFACCurvature"]

EXACT = 20  # first steps whose statistics travel unrounded


class KFACCurvature(Curvature):
    """The layers of a training, their factors and inverses.

    Args:
        training: The training to serve.
        options: The options that all systems with Kronecker factors share.
        system: The choices of KAISA, DPKFAC or DistKFAC.
        helpers: The stats workers that take statistics for this training, or None.

    Attributes:
        layers: The layers of the model.
        plan: The plan of each layer that trains: which rank does what.
        solves: The layers' inverses, and the solves under way.
        gradients: The exchange of preconditioned gradients between ranks.
        helpers: The stats workers, or None.
        budget: Chooses the intervals that are "auto".
        workers: The number of gradient workers that has been chosen; 0 where it is given.
    """

    scaler_matters = "the gradients it has captured carry the scale"
    parts_suffice = True

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        system: System,
        helpers: StatsWorkers | None = None,
    ) -> None:
        super().__init__(training)
        self._options, self._system = options, system
        # Of a distributed checkpoint an owner may read its own layers alone.
        self.read_by_all = READ_BY_ALL if system.owners is None else ()
        self.helpers = helpers
        self.budget = Budget(training, options, elsewhere=helpers is not None)
        timed = partial(_in_hooks, training.meter, self.budget)
        self.layers = Layers(training, options, system.rules, system.conv_approximation, timed)
        self.plan: dict[KroneckerBlock, LayerPlan] = {}
        self.known: dict[KroneckerBlock, LayerPlan] = {}  # of layers that have ever trained
        self._shapes: dict[KroneckerBlock, Any] = {}  # shapes of these layers
        self._cadence = Cadence(training, options, self.budget, self.layers)
        self.drift = self._cadence.drift
        self.solves = Solves(
            training, options, self.layers, system.background, self.budget, self.drift
        )
        self._exchange: Exchange | None = None
        self._pipeline: Pipeline | None = None
        if system.pipelined and training.world.size > 1:
            self._pipeline = Pipeline(training, options.factor_dtype)
            self.layers.heard = self._pipeline.heard
        lengths = ADAPTIVE if options.adaptive else PLAIN
        self.step_length = StepLength(lengths if options.follows_steps else None)
        self._measured: Tensor | None = None
        self._closed = False
        self.workers = 0
        self.layers.find()
        self.gradients = self._gradients()
        self._feedback = Feedback(training, options, self.solves, self.drift, self.step_length)

    def _gradients(self) -> ResultGradients | OwnerGradients | ShardedGradients:
        """Make the exchange of gradients, as they are kept and as the system wants them."""
        training, owners = self.training, self._system.owners
        counted: Literal["all", "one"] = "all" if owners is None else "one"
        clip = Clip(training, self._options, counted if self.helpers is None else "helpers")
        if self.layers.sharded:
            self._check_sharded()
            return ShardedGradients(training, clip, batch_of_all=owners is None)
        if owners is None:
            return ResultGradients(training, clip)
        return OwnerGradients(training, clip, only_to_owners=owners == "owner")

    def _check_sharded(self) -> None:
        if self._options.other_matrices == "gradient":
            raise ValueError(
                f"{self.training.name}: other_matrices='gradient' makes factors of whole "
                f"gradients, and FSDP2 leaves each rank some of their rows; use 'base'"
            )

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Go on with the shards of parameters that FSDP2 has taken meanwhile."""
        self.layers.replace_params(others)
        self.gradients = self._gradients()

    def replaced(self) -> None:
        """Leave matrices without a rule to the base, now that no rank has their whole gradients."""
        if self._options.other_matrices == AUTO and gradient_blocks(self.layers.blocks):
            self.replan()

    def description(self) -> list[str]:
        """The options, and the layers."""
        return described(self.training, self._options, self._system, self.layers)

    def require_no_growth(self) -> None:
        """Raise SecondOrderError if the model has grown, and stats workers lack what is new."""
        if self.helpers is not None:
            self.helpers.require_no_growth(self.training)

    def check_processes(self) -> None:
        """Raise ValueError if these processes and devices cannot do what is asked."""
        if self.solves.threads is not None:
            self.solves.threads.check_device()
        if self.helpers is not None:
            self.helpers.check_processes(self.training)
        self._system.plan([], self.training.world.size)

    def begin(self) -> None:
        """Give the processes their roles, plan, and watch the model."""
        if self.helpers is not None:
            self.helpers.begin(self.training)
        self.budget.begin()
        if self._system.chooser is not None and not self.layers.sharded:
            # Sharded gradients come together on one rank, whatever would be chosen.
            self._take_workers(self._system.chooser.choose(self.training))
        self._look()

    def _take_workers(self, workers: int) -> None:
        """Plan with so many gradient workers, at the next look at the layers."""
        chooser, ranks = self._system.chooser, self.training.world.size
        assert chooser is not None
        self.workers = workers
        self._system = replace(self._system, plan=chooser.planner(workers, ranks))
        self.layers.forget_plan()

    def _look(self) -> None:
        self.layers.forget_plan()
        self.layers.connect()
        self._follow()
        self.layers.name_those_left()
        self.watch()

    def replan(self) -> None:
        """Look for the model's layers again."""
        if not self._closed:
            self.layers.find()
            if self.layers.sharded != isinstance(self.gradients, ShardedGradients):
                self.gradients = self._gradients()
            self._look()

    # --------------------------------------------------------------------------------- the step

    def prepare(self) -> None:
        """Plan anew where layers have changed: gradients go to those that precondition them."""
        self._follow()
        self.gradients.follow_moved(self.plan)

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """The rank that each mean gradient goes to."""
        return self.gradients.route(self.plan, params, gradients)

    def start_bucket(self, bucket: Any) -> Any:
        """Send a bucket of DistributedDataParallel's gradients to their owners; a future of it."""
        assert isinstance(self.gradients, OwnerGradients)
        return self.gradients.start_bucket(self.plan, bucket)

    def precondition(self, average: Callable[[], None]) -> None:
        """Set ``p.grad`` to ν P; see the top of this file."""
        on = self.budget.on

        def averaged() -> None:
            with on(Account.BASE):
                average()

        with self.training.meter.stage("statistics"), on(Account.STATISTICS):
            age = self.training.steps - self._cadence.updated_at
            coming = self.take_statistics()
            self._take_gradients(averaged, age)
        due = self._cadence.due()
        if due and self._cadence.judges_cost:  # what the passes have queued is not the refresh's
            clock_of(self.training.device).settle()
        with self.training.meter.stage("solve"), on(Account.REFRESH):
            news = [] if self.helpers is None else self.helpers.news()
            arriving = partial(_arriving, coming)
            try:
                heard = self.solves.refresh(due, averaged, news, arriving)
            finally:
                deque(coming, 0)
            if self.helpers is not None:
                self.helpers.hear(heard, self.training)
        with self.training.meter.stage("average_gradients"):
            average()
        rows = isinstance(self.gradients, ShardedGradients)
        self._measured = self._feedback.measured(self.plan, rows)
        with self.training.meter.stage("precondition"), on(Account.APART):
            self._precondition()
        self._feedback.keep(self.plan, coming=bool(self.solves.flights) or self._cadence.may_come)

    def take_statistics(self) -> Iterator[list[KroneckerBlock]]:
        """Update the running averages by the statistics of the step's passes and of helpers.

        Returns:
            An iterator over layers whose averages are updated as it goes on, all at once if their
            statistics are still on their way; to be taken to its end.
        """
        helpers, exchange = self.helpers, self._exchange
        assert exchange is not None
        taken = [block for block in self.plan if block.watched and self._takes(block)]
        own = self._cadence.takes_statistics()
        if helpers is not None:
            own = own and helpers.own_passes and self.layers.capture.enabled  # during the passes
        coming: Iterator[list[KroneckerBlock]] = iter(())
        more = self._more_terms() if own else 1.0  # before pairs that explain nothing are dropped
        if own:
            self.layers.look(taken)
            for block in self.plan:
                block.expect()
        fed = [block for block in taken if not block.staged.empty]
        if self._pipeline is not None:
            if own:
                self._pipeline.expect(self._wire)
                coming = self._take_in(
                    self._pipeline.sums(self.layers, exchange.statistics), self._cadence.decay()
                )
                self._cadence.updated()
            else:
                self._pipeline.drain()
        elif own:
            sums = self.layers.sums(taken)
            with self.training.meter.stage("exchange"):
                exchange.statistics(sums, self._wire)
            sums = self.layers.whole_steps(sums, self.training.world.size, more)
            self.layers.take_in(sums, self._cadence.decay())
            self._cadence.updated()
        if helpers is None:
            return coming
        mine = {b.name: b for b, layer in self.plan.items() if layer.solver("A") == self._rank}
        for found in helpers.statistics(mine, [b.name for b in fed]):
            decay = self._cadence.decay_since_update()
            self._cadence.updated()
            for block in found:
                block.expect()
            self.layers.take_in(found, decay)
        helpers.tell(self.training)
        return coming

    def _more_terms(self) -> Tensor | float:
        """The terms of a step on all ranks over those in sums of examples: 1, or of one rank's.

        Shares are taken for equal where a rank has not counted, or has none of the counted layer's.
        """
        counted = self._counted
        if counted is None or self.layers.reduction != "step_mean":
            return 1.0
        here = counted.staged.terms
        everywhere = here.clone()
        with self.training.meter.stage("exchange"):
            self.training.world.all_reduce([everywhere]).wait()
        ranks = self.training.world.size
        known = (everywhere[1] == ranks) & (here[0] > 0)
        return torch.where(known, everywhere[0] / here[0].clamp_min(1.0), ranks)

    @property
    def _wire(self) -> torch.dtype | None:
        """The dtype in which factors' sums travel at this step; None for their own.

        The averages' first entries are exact: a later one's rounding is divided by the number of
        those before it, where alone it may be larger than a small damping.
        """
        exact = self.training.steps < EXACT
        return None if exact else self._system.exchange_dtype

    def _take_in(self, coming: Iterator[Sums], decay: float) -> Iterator[list[KroneckerBlock]]:
        """Update the running averages by the sums that come; yields their layers."""
        while True:
            with self.training.meter.stage("statistics"), self.budget.on(Account.STATISTICS):
                sums = next(coming, None)
                if sums is None:
                    return
                blocks = list(sums)
                sums = self.layers.whole_steps(sums, self.training.world.size)
                self.layers.take_in(sums, decay)
            yield blocks

    def _take_gradients(self, average: Callable[[], None], age: int) -> None:
        """Update the averages of matrices that no rule knows, ``age`` steps after the last time."""
        blocks = gradient_blocks(self.plan)
        if not blocks or not self._cadence.takes_statistics():
            return
        with self.training.meter.stage("average_gradients"):
            average()
        # Stats workers' batches are not the training's.
        counting = self.layers.blocks if self.helpers is None else []
        sums = gradient_statistics(
            self.training,
            counting,
            [block for block in blocks if self._takes(block)],
            counts_own=self._system.owners is not None,
            mean_loss=self._options.loss_reduction != "sum",
        )
        for block in blocks:
            block.expect()
        self.layers.take_in(sums, self._cadence.decay(age))

    def _precondition(self) -> None:
        """Compute P as gradient worker, get the other ranks' P, and write ν P to ``p.grad``."""
        assert self._exchange is not None
        self.gradients.precondition(self.plan, self._exchange, self._options.inv_dtype)

    def correct(self) -> None:
        """Scale the step, and offer the parameters to stats workers; the step is over."""
        self._feedback.follow(self.plan, self.layers.active, self._measured)
        self._cadence.tell_of_drift()
        self.step_length.scale(asked=bool(self.solves.flights) or self._cadence.may_come)
        if self.helpers is not None:
            threads = self.solves.threads
            self.helpers.offer(self.training, _at_once if threads is None else threads.post)
        self._cadence.tell_of_cost()
        self.budget.lap(working=bool(self.plan))

    def averaging_processes(self) -> int:
        """The processes that train, whose gradients are averaged."""
        count = 0 if self.helpers is None else self.helpers.count
        return self.training.world.size - count

    def watch(self) -> None:
        """Capture during the coming passes only if the coming step wants statistics."""
        own = self.helpers is None or self.helpers.own_passes
        due = own and self._cadence.takes_statistics()
        self.layers.expect(due)
        if self.layers.collector.counted is not self._counted:  # a refresh has found it silent
            self.layers.watch(self._takes, self._counted)
        if self._pipeline is not None and due:
            self._pipeline.expect(self._wire)

    # ------------------------------------------------------------------------------ who and when

    @property
    def _rank(self) -> int:
        return self.training.world.rank

    def _takes(self, block: KroneckerBlock) -> bool:
        """Whether this rank's batches go into a layer's factors."""
        # A layer that was frozen from the start is watched by all: whoever gets it has its passes.
        layer = self.known.get(block)
        return layer is None or layer.source in (None, self._rank)

    @property
    def _counted(self) -> KroneckerBlock | None:
        """The layer whose terms all ranks count; None where statistics are of all ranks' terms."""
        alone = self._system.owners is None or self.training.world.size == 1
        return None if alone else self.layers.counting

    def _follow(self) -> None:
        """Plan anew if layers were frozen or unfrozen since the last step."""
        layers, steps, world = self.layers, self.training.steps, self.training.world
        if not layers.follow():
            return
        shapes = {block: block.shape for block in layers.active}
        changed = any(self._shapes.get(block) != shape for block, shape in shapes.items())
        self._shapes |= shapes
        plan: Plan = self._system.plan(list(map(dims_of, layers.active)), world.size)
        if isinstance(self.gradients, ShardedGradients):
            plan = with_one_worker(plan)
        before = self.known
        self.plan = dict(zip(layers.active, plan.layers, strict=True))
        pairs = [(before.get(block, layer), layer) for block, layer in self.plan.items()]
        if (steps > 0 and changed) or any(old.source != new.source for old, new in pairs):
            layers.newcomers_at = steps + 1  # the first passes that are sure to be captured
        self._grid = plan.grid
        self._connect()
        move_factors(world, self.plan, before)
        known = before | self.plan
        self.known = {block: known[block] for block in layers.blocks if block in known}
        layers.watch(self._takes, self._counted)
        for block in layers.blocks:
            block.drop_inverse()
        self.solves.follow(self.plan)
        if self.drift is not None:
            self.drift.follow(layers.blocks)
        if self.helpers is not None:
            self.helpers.begin_anew()
        if steps > 0:
            self.training.publish()  # frees factors that other ranks keep now

    def _connect(self) -> None:
        """Make the groups of processes by which the plan is carried out."""
        wire = self._system.exchange_dtype
        self._exchange = Exchange(self.training.world, self._grid, self.plan, wire)
        self.solves.exchange = self._exchange
        if self._pipeline is not None:
            self._pipeline.connect()
            self._pipeline.follow([block for block in self.plan if block.watched])

    def nothing_captured(self) -> bool:
        """Whether no statistic has arrived since the last step."""
        return self.layers.nothing_captured

    def drop_pending(self) -> None:
        """Drop the statistics of backward passes already completed."""
        self.layers.drop_pending()

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        wanted = ("inverses wanted at once", self.solves.wanted)
        newcomers = ("anew at", self.layers.newcomers_at)
        scheduled = self._options.scheduled(self.training.steps)
        sharded = ("sharded by FSDP2", isinstance(self.gradients, ShardedGradients))
        return [
            *(("closed", self._closed), sharded, wanted, newcomers),
            *scheduled,
            ("losses", self.layers.reduction),
            ("length of steps", self.step_length.factor),
            *([("intervals", self.drift.facts(self.layers.active))] if self.drift else []),
            *([("gradient workers", self.workers)] if self.workers else []),
            *self.budget.facts(),
        ]

    # ------------------------------------------------------------------------ state and summary

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The factors that this process keeps, by the layers' weights."""
        kept = {**self.budget.saved(), **self.step_length.saved()}
        kept[MEAN_CURVATURE] = self.solves.mean_curvature
        if self._system.chooser is not None:
            kept |= saved_workers(self.workers, self.training.world.size)
        return saved_factors(self.layers, self._takes, kept, self._saved_of_layer)

    def _saved_of_layer(self, block: KroneckerBlock) -> dict[str, Any]:
        drift = {} if self.drift is None else self.drift.saved(block)
        return self.solves.traces.saved(block) | drift

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError if saved factors do not fit the layers."""
        check_saved_factors(saved, self.layers.blocks)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over saved factors; inverses are computed at the next step."""
        load_factors(saved, self.layers.blocks, self.training)
        # A process may have got its own layers' factors alone, but moves and collects with others.
        for block, layer in self.known.items():
            if block.factors is None and layer.source is not None:
                factors = block.ensure_factors()
                if self.training.steps > 0 and self._takes(block):
                    factors.stored.update(A=None, G=None)  # lost: the next refresh tells
        self.solves.restart()
        workers = loaded_workers(saved, self.training.world.size)
        if self.workers and workers not in (0, self.workers):
            self._take_workers(workers)
        self.solves.traces.load(saved, self.layers.blocks)
        if self.drift is not None:
            self.drift.load(saved, self.layers.blocks)
        self.budget.load(saved)
        self.step_length.load(saved)
        self.solves.mean_curvature = loaded_mean_curvature(saved)
        self._cadence.updated()
        self.watch()

    @property
    def kept_elsewhere(self) -> str:
        """A name for the factors if some are kept by other ranks alone; "" otherwise.

        Before the first step there are none: Accelerate asks for the state of each new optimizer.
        """
        spread = any(layer.keepers is not None for layer in self.known.values())
        here = self.training.world.size > 1 and self.training.steps > 0 and spread
        return "the factors that other processes keep" if here else ""

    def kept_by_all(self) -> Iterable[tuple[str, Tensor]]:
        """The factors and the inverses of layers of which every rank has them."""
        for block, layer in self.plan.items():
            if layer.keepers is None:
                for letter in block.shape.letters:
                    factor = block.stored(letter)
                    if factor is not None:
                        yield f"factor {letter} of layer {block.name!r}", factor
            if block.inverse is not None and len(layer.workers) == self.training.world.size:
                for i, tensor in enumerate(block.inverse.tensors):
                    yield f"tensor {i} of the inverse of layer {block.name!r}", tensor

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Collect copies of the factors that other ranks keep; a collective."""
        if not self._closed:
            self._follow()
        found = gather_factors(self.training.world, self.known, ranks)
        return {block.weight: {"curvature": parts} for block, parts in found.items()}

    def close(self) -> None:
        """End threads and hooks; the optimizer goes on as its base alone."""
        if self.helpers is not None:
            self.helpers.close()
        self.solves.close()
        self.layers.close()
        if self.drift is not None:
            self.drift.follow(())
        if self._pipeline is not None:
            self._pipeline.close()
        self._closed = True
        self.plan.clear()  # the exchange holds it, too
        self.known, self._shapes = {}, {}

    def fitted(self, dtype: torch.dtype, gather: bool) -> KroneckerCurvature:
        """The factors as an object of their own; a collective if some are kept elsewhere.

        Args:
            dtype: Dtype of the copies.
            gather: Whether to get factors that other processes keep.
        """
        gather = gather and bool(self.kept_elsewhere)
        if gather:
            self._follow()
        return fitted_curvature(
            self.training,
            self._options,
            self.layers,
            self.known,
            self.solves.damping,
            dtype,
            gather,
        )

    def unwatched(self) -> AbstractContextManager[None]:
        """Make a context manager that takes all hooks off the model and puts them back."""
        return self.layers.unwatched()

    def preconditioned(self) -> list[Tensor]:
        """The parameters of layers that train, and of which statistics come."""
        return self.layers.preconditioned()

    accounts = ACCOUNTS

    def statistics(self) -> dict[str, float]:
        """Numbers to log: clip, damping, traces, condition, ages and failures."""
        last, nu = self.training.steps - 1, self.gradients.coefficient
        found = statistics_of(self.layers, self.plan, self.solves, last)
        found["clip"] = 1.0 if nu is None else float(nu)
        found["step_length"] = self.step_length.factor
        if last >= 0 and not self._closed:
            # 0 after a load
            found["age/statistics"] = float(
                max(last - self._cadence.updated_at, 0)
            )  # 0 after a load
            found |= self._intervals()
        return found

    def _intervals(self) -> dict[str, float]:
        """The steps between updates and between refreshes, in the middle where layers differ."""
        if self.drift is None:
            last = self.training.steps - 1
            return {name: float(self._cadence.interval(name, last)) for name in BUDGETED}
        found, every = self.drift.metrics, self._options.factor_update_steps
        found["inv_update_steps"] = found["factor_update_steps"] = found["drift/interval"]
        if every is not None:
            last = self.training.steps - 1
            found["factor_update_steps"] = float(
                self._cadence.interval("factor_update_steps", last)
            )
        return found

    def summary(self) -> Summary:
        """A table of every layer: its factors, who computes what, what is left to the base."""
        said = {block.name: layer.said for block, layer in self.plan.items()}
        drift = "" if self.drift is None else self.drift.said
        settings = [self._options.said, self.solves.traces.said, drift]
        if self.workers:
            ranks = self.training.world.size
            settings.append(f"gradient workers chosen: {self.workers} of {ranks} for each layer")
        settled = "; ".join(filter(None, settings))
        return replace(self.layers.summary(said), intervals=self.budget.said, settings=settled)


@contextmanager
def _in_hooks(meter: Meter, budget: Budget) -> Iterator[None]:
    """Measure the work of a hook."""
    before = meter.switch("statistics")
    try:
        with budget.on(Account.STATISTICS):
            yield
    finally:
        meter.switch(before)


def _at_once(copies: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
    send(copies)


def _arriving(
    coming: Iterator[list[KroneckerBlock]], wanted: list[KroneckerBlock]
) -> Iterator[list[KroneckerBlock]]:
    """The layers of a list, each as soon as its averages are those of this step."""
    left = wanted
    for blocks in coming:
        arrived = set(blocks)
        yield [block for block in left if block in arrived]
        left = [block for block in left if block not in arrived]
    yield left

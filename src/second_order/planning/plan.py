"""Which system with which setting: time, memory and bytes of each, and the one to take.

Costs come from `times`, and what is told of them from `choices`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from second_order.budget import intervals as budgeted
from second_order.distributed.world import BUCKET_BYTES
from second_order.fosi.sharded_base import works_by_element
from second_order.kfac.options import USUAL_OVERHEAD, KFACOptions
from second_order.options import AUTO, check_choice, check_count, check_interval, check_number
from second_order.planning.calibration import DEFAULT_NETWORKS, measure_machine
from second_order.planning.choices import Choice, Plan, bytes_of, recommended
from second_order.planning.counts import Case
from second_order.planning.eigenpairs import (
    GRAPH,
    PAIRED,
    PRODUCT,
    PairCase,
    PlannedPairs,
    names_of,
    pair_costs,
)
from second_order.planning.interconnect import Interconnect
from second_order.planning.machine import Machine
from second_order.planning.memory import largest_batch, message_bytes
from second_order.planning.network import Network, Parameter
from second_order.planning.observation import Observation, arguments_of, observe, undisturbed
from second_order.planning.systems import PLANNED, Planned, workers_of
from second_order.planning.times import (
    RankCost,
    StepTimes,
    base_step_seconds,
    every_steps,
    exchange_seconds,
    rank_costs,
    step_times,
)
from second_order.planning.work import Among, Transfer

__all__ = ["Intervals", "peak_memory", "plan", "workers_of"]

Intervals: TypeAlias = tuple[int, int] | Literal["auto"]
"""Steps between statistics and between refreshes, or "auto" for those of the budget."""

Seen: TypeAlias = tuple[Network, Observation]
"""A model's layers, and what its passes take."""

COPIES = 4  # of the largest factor while it is decomposed: itself, scaled, its result, work space


# ------------------------------------------------------------------------------------- the planner


def plan(
    model: nn.Module,
    sample_batch: Any,
    world_size: int | Sequence[int] = 1,
    *,
    device: torch.device | str | None = None,
    machine: Machine | None = None,
    network: Interconnect | None = None,
    measure: bool | None = None,
    memory: int | str | None = None,
    systems: Sequence[str] = (*PLANNED, *PAIRED),
    solvers: Sequence[str] = ("inverse", "eigen"),
    intervals: Sequence[Intervals] = ((10, 10),),
    base: type[torch.optim.Optimizer] = torch.optim.SGD,
    base_kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    seconds: float = 10.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """Predict time, memory and bytes of every system's settings, and recommend one.

    Each rank has a batch like ``sample_batch``. Counts of work, bytes and kept memory are exact;
    times are those of a model: see docs/planning.md. No message is sent, and the model stays as it
    is.

    Args:
        model: The model; on the meta device if it is too large for this machine, with ``machine``.
        sample_batch: A rank's batch, as the model's arguments: a tensor, a tuple or list of
            arguments, or a dictionary by name.
        world_size: Number of ranks to plan for; or some such numbers, for which the model is looked
            at once: the plan is for the first, and has those for the others.
        device: The device to measure; None for that of the model.
        machine: The machine of each rank; None to measure this one.
        network: The links between the ranks; None for documented numbers, which are round.
        measure: Whether to measure the model's passes and statistics on this machine; None: if
            ``machine`` is None. Otherwise their operations are counted.
        memory: Bytes that a rank may use, as a number or like "80GB"; None for the machine's memory
            where it is known.
        systems: Names of the optimizers.
        solvers: The solvers: "inverse" (Cholesky) and "eigen".
        intervals: Pairs of ``factor_update_steps`` and ``inv_update_steps``; "auto" for those that
            a budget of 15 % would choose. The recommendation is for the first. DHO2 and MRDHO2 have
            intervals of their own, among ``options``.
        base: Class of the base.
        base_kwargs: Arguments of the base that decide the size of its state.
        options: Further keywords: those that all K-FAC systems share, as ``symmetry_aware`` or
            ``skip_layers``, and those of DHO2 and MRDHO2, as ``largest`` or ``epoch_steps``.
        seconds: About how long the machine may be measured, 60 at most.
        clock: The clock to measure by; ``time.process_time`` leaves out what others do on a CPU.

    Raises:
        TypeError: For values of the wrong type.
        ValueError: For values out of range, a model that does not take the batch, or a model on the
            meta device without a machine.
    """
    sizes = list(world_size) if isinstance(world_size, Sequence) else [world_size]
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if not sizes:
        raise ValueError("world_size=[]; give one number of ranks at least")
    for size in sizes:
        check_count("world_size", size, "ranks")
    for name, values, allowed in (
        ("systems", systems, (*PLANNED, *PAIRED)),
        ("solvers", solvers, ("inverse", "eigen")),
    ):
        if isinstance(values, str) or not values:
            raise ValueError(f"{name}={values!r}; give a list of some of {', '.join(allowed)}")
        for value in values:
            check_choice(name, value, allowed)
    wanted = [_checked_intervals(pair) for pair in intervals]
    if not wanted:
        raise ValueError("intervals=[]; give one pair at least, as (10, 10)")
    check_number("seconds", seconds, low=0.0, open_low=True, high=60.0, remedy="10 is usual")
    allowance = None if memory is None else bytes_of(memory)
    arguments_of(sample_batch)
    placed = next((p.device for p in model.parameters()), torch.device("cpu"))
    device = placed if device is None else torch.device(device)
    if machine is None:
        _check_measurable(placed, device)
    shared = dict(options or {})
    _check_options(shared)
    of_factors = [system for system in systems if system in PLANNED]
    of_pairs = [system for system in systems if system in PAIRED]
    of_all = _of_factors(shared, of_pairs)
    make = {
        # At intervals: a refresh by drift tells more.
        (system, solver): partial(
            PLANNED[system], base=base, solver=solver, inv_update_steps=1, **of_all
        )
        for system in of_factors
        for solver in solvers
    }
    made = {key: each() for key, each in make.items()}
    paired = {
        system: partial(
            PAIRED[system], base=base, **_of_pairs(system, shared, of_pairs, of_factors)
        )
        for system in of_pairs
    }
    keywords = {"lr": 0.1, **({"momentum": 0.9} if base is torch.optim.SGD else {})}
    keywords |= dict(base_kwargs or {})

    # Nothing is run before all is checked.
    measured = machine is None if measure is None else measure
    seen: dict[str, Seen] = {}
    looks: dict[str, Seen] = {}  # by what counts as a layer
    found: Observation | None = None
    for system in of_factors:
        planned = made[system, solvers[0]]
        kind = f"{planned.rules} {planned.conv_approximation}"
        if kind not in looks:
            found = observe(
                model, sample_batch, planned, measure=measured, clock=clock, passes=found
            )
            arguments, named = arguments_of(sample_batch)
            with undisturbed(model, placed):
                looks[kind] = planned.network(model, example=named or arguments, **keywords), found
        seen[system] = looks[kind]
    for system, describe in paired.items():
        if found is None:
            found = observe(model, sample_batch, None, measure=measured, clock=clock)
        seen[system] = describe().network(model, **keywords), found
    machine = machine or measure_machine(
        device, seconds=seconds, sizes=_spread(_sizes_of(seen.values())), clock=clock
    )
    planner = Planner(
        make,
        paired,
        keywords,
        seen,
        wanted,
        machine,
        network or DEFAULT_NETWORKS[machine.device],
        machine.memory if allowance is None else allowance,
    )
    first, *others = map(planner.plan, dict.fromkeys(sizes))
    return replace(first, others=tuple(others))


def _check_measurable(placed: torch.device, device: torch.device) -> None:
    """Raise ValueError unless a model placed on one device can be measured on the other."""
    if "meta" in (placed.type, device.type):
        raise ValueError(
            "the model is on the meta device, and no machine is given to plan for; give "
            "machine=Machine.given(...), or the model on the device to measure"
        )
    if placed.type != device.type:
        raise ValueError(
            f"the model is on {placed}, and the machine to measure is {device}; move the "
            f"model and the batch there, or give machine="
        )


def _check_options(shared: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that is planned itself, or that the costs do not know."""
    for name in ("solver", "factor_update_steps", "inv_update_steps"):
        if name in shared:
            raise ValueError(f"options[{name!r}] is planned; use solvers= and intervals=")
    for name in ("factor_exchange", "grad_worker_fraction"):
        if name in shared:
            raise ValueError(
                f"options[{name!r}] is planned: the settings MEM-OPT, HYBRID and COMM-OPT of "
                f"KAISA differ in it; leave it out"
            )
    if "layout" in shared:
        raise ValueError("options['layout'] is planned: DHO2's rows and columns; leave it out")
    for name in ("debug", "exchange_dtype", "hvp", "refresh", "stats_workers", "trace_bounds"):
        if name in shared:
            raise ValueError(
                f"options[{name!r}] is not in the model of costs, which counts every message "
                f"and solve at its full size; leave it out"
            )


def _sizes_of(seen: Iterable[Seen]) -> set[int]:
    """The sizes of the factors that are decomposed."""
    return {
        layer.shape.dim(letter)
        for network, _ in seen
        for layer in network.layers
        for letter in layer.shape.letters
        if not layer.shape.is_diagonal(letter)
    }


@dataclass(frozen=True)
class Planner:
    """A model that has been looked at, to be planned for any number of ranks.

    Attributes:
        make: By system and solver, describes the optimizer with a setting's keywords.
        paired: By system with eigenpairs, the same.
        base_kwargs: Arguments of the base.
        seen: By system, the model's layers and what its passes take.
        intervals: The intervals that are compared.
        machine: The machine of every rank.
        network: The links between the ranks.
        memory: Bytes that a rank may use; None for no limit.
    """

    make: Mapping[tuple[str, str], Callable[..., Planned]]
    paired: Mapping[str, partial[PlannedPairs]]
    base_kwargs: Mapping[str, Any]
    seen: Mapping[str, Seen]
    intervals: Sequence[Intervals]
    machine: Machine
    network: Interconnect
    memory: int | None

    def plan(self, world_size: int) -> Plan:
        """The plan for a number of ranks."""
        choices: list[Choice] = []
        for system, solver in self.make:
            for setting, keywords in _settings(system, world_size):
                choices += self._choices(system, solver, setting, keywords, world_size)
        for system in self.paired:
            for setting, keywords in self._pair_settings(system, world_size):
                choices.append(self._pair_choice(system, setting, keywords, world_size))
        network, observation = next(iter(self.seen.values()))
        base = self._base_seconds(network.params, observation, world_size)
        choices.sort(key=lambda choice: choice.seconds)
        first = _interval_keywords(self.intervals[0])
        comparable = [c for c in choices if first.items() <= c.keywords.items()]
        best, reason = recommended(comparable or choices, self.memory)
        if comparable and self.paired:
            others = " and ".join(self.paired)
            reason += (
                f"; {others} {'have' if len(self.paired) > 1 else 'has'} another curvature: "
                f"seconds of a step do not tell which makes more progress"
            )
        return Plan(
            world_size,
            tuple(choices),
            best,
            reason,
            base,
            observation,
            self.machine,
            self.network,
            self.memory,
        )

    def _base_seconds(self, params: Sequence[Parameter], seen: Observation, ranks: int) -> float:
        """Seconds a step of the base alone: its gradients are summed for all ranks."""
        nbytes = sum(p.nbytes for p in params)
        seconds = seen.passes(self.machine) + base_step_seconds(nbytes, len(params), self.machine)
        if ranks == 1:
            return seconds
        moved = 2 * (ranks - 1) / ranks * nbytes
        world, count = Among("world", ranks), -(-nbytes // BUCKET_BYTES)
        summed = Transfer(
            "average_gradients", "all_reduce", world, nbytes, moved, moved, nbytes, count
        )
        return seconds + exchange_seconds(summed, self.machine, self.network, tensors=len(params))

    def _choices(
        self, system: str, solver: str, setting: str, keywords: Mapping[str, Any], world_size: int
    ) -> Iterable[Choice]:
        """A setting at each of the intervals."""
        network, seen = self.seen[system]
        planned = self.make[system, solver](**keywords)
        case = Case(network, planned, world_size, examples=seen.examples)
        passes = seen.passes(self.machine)
        costs = rank_costs(case, self.machine, self.network, passes=passes, captured=seen.captured)
        times = step_times(costs)
        peak, held = peak_memory(case, costs, seen)
        room, each = None, seen.activations / seen.examples
        if self.memory is not None and each:
            room = largest_batch(self.memory, [cost.work for cost in costs], each)
        for wanted in self.intervals:
            every = _steps(wanted, times)
            words = {"solver": solver, **keywords, **_interval_keywords(wanted)}
            called = system, setting, words, every, world_size
            yield self._choice(called, times, costs, peak, held, room)

    def _choice(
        self,
        called: tuple[str, str, Mapping[str, Any], tuple[int, int], int],
        times: StepTimes,
        costs: Sequence[RankCost],
        peak: int,
        held: Mapping[str, int],
        room: int | None,
        products: float = 0.0,
    ) -> Choice:
        """A setting, as :class:`Choice` begins, with its costs; ``products`` are operations."""
        every = called[3]
        solves = times.hidden / every[1]
        return Choice(
            *called,
            times.amortised(*every),
            times.step(*every),
            peak,
            held,
            max(_amortised(cost, *every, cost.work.moved) for cost in costs),
            products + max(_amortised(cost, *every, cost.work.operations) for cost in costs),
            solves if times.beside else 0.0,
            self.memory is None or peak <= self.memory,
            room,
            tuple(costs),
            0.0 if times.beside else solves,
        )

    def _pair_settings(self, system: str, world_size: int) -> Iterable[tuple[str, dict[str, Any]]]:
        """The settings of a system with eigenpairs, in words and as keywords."""
        if system == "MRDHO2":
            count = self.paired[system]().helpers
            if world_size > 1:
                yield f"{count} accelerator{'s' if count > 1 else ''}", {}
            elif len(self.seen) == 1:  # one rank has none to spare: beside DHO2 it is the same
                yield "", {}
            return
        base: Any = self.paired[system].keywords["base"]
        if works_by_element(base):
            yield "rows" if world_size > 1 else "", {"layout": "row"}
        if world_size > 1 or not works_by_element(base):
            yield "columns" if world_size > 1 else "", {"layout": "column"}

    def _pair_choice(
        self, system: str, setting: str, keywords: Mapping[str, Any], world_size: int
    ) -> Choice:
        """A setting of a system with eigenpairs, at its own interval."""
        network, seen = self.seen[system]
        planned = self.paired[system](**keywords)
        case = PairCase(network, planned, world_size, base_kwargs=self.base_kwargs)
        costs = pair_costs(case, self.machine, self.network, passes=seen.passes(self.machine))
        times = step_times(costs)
        interval = case.interval(times)
        works, graph = [cost.work for cost in costs], GRAPH * seen.activations
        refreshing = {w.rank: case.basis_bytes(w.rank) for w in works}
        peaks = []
        for work in works:
            kept = {each.what: each.nbytes for each in work.held}
            passing = max(
                seen.activations,
                message_bytes(work),
                refreshing[work.rank] + graph * case.computes(work.rank),
            )
            peaks.append({**kept, "passing": passing})
        held = max(peaks, key=lambda each: sum(each.values()))
        peak, room, each = sum(held.values()), None, seen.activations / seen.examples
        if self.memory is not None and each:
            left = self.memory - max(refreshing.values())
            room = largest_batch(left, works, GRAPH * each)
        options = self.paired[system].keywords.keys() - {"base"}
        words = {k: self.paired[system].keywords[k] for k in sorted(options)} | {**keywords}
        words |= case.intervals_said
        every = interval, interval
        products = case.products * PRODUCT * seen.operations / interval
        called = system, setting, words, every, world_size
        return self._choice(called, times, costs, peak, held, room, products)


def _of_factors(options: Mapping[str, Any], paired: Sequence[str]) -> dict[str, Any]:
    """The options for K-FAC systems, where others are planned with them."""
    known = {field.name for field in fields(KFACOptions)}
    others = {name for system in paired for name in names_of(system)} - known
    return {name: value for name, value in options.items() if name not in others}


def _of_pairs(
    system: str, options: Mapping[str, Any], paired: Sequence[str], of_factors: Sequence[str]
) -> dict[str, Any]:
    """The options for a system with eigenpairs, and those that no planned system knows."""
    known = names_of(system)
    others = {name for other in paired for name in names_of(other)} - known
    return {
        name: value
        for name, value in options.items()
        if name in known or not (of_factors or name in others)
    }


def _checked_intervals(pair: Any) -> Intervals:
    if pair == AUTO:
        return AUTO
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise ValueError(
            f"intervals: {pair!r} is not a pair of factor_update_steps and inv_update_steps, as "
            f"(10, 100), or 'auto'"
        )
    for name, every in zip(("factor_update_steps", "inv_update_steps"), pair, strict=True):
        check_interval(name, every)
    return int(pair[0]), int(pair[1])


def _interval_keywords(wanted: Intervals) -> dict[str, Any]:
    both = (AUTO, AUTO) if wanted == AUTO else wanted
    return dict(zip(("factor_update_steps", "inv_update_steps"), both, strict=True))


def _steps(wanted: Intervals, times: StepTimes) -> tuple[int, int]:
    return budgeted(*times.costs, USUAL_OVERHEAD) if wanted == AUTO else wanted


def _spread(sizes: Iterable[int], most: int = 6) -> list[int]:
    """Some of the sizes, evenly among them; a measurement at each takes its time."""
    found = sorted(sizes)
    step = max(1, -(-len(found) // most))
    return found[::-step]


def _amortised(cost: RankCost, f: int, i: int, of: Callable[[str], float]) -> float:
    """What a rank does or sends a step, by a function of the stage."""
    stages = {s.stage for s in cost.work.stages} | {t.stage for t in cost.work.transfers}
    every = every_steps(f, i)
    return sum(of(stage) / every.get(stage, 1) for stage in sorted(stages))


def _settings(system: str, world_size: int) -> Iterable[tuple[str, dict[str, Any]]]:
    """The settings of a system on so many ranks, in words and as keywords."""
    if system != "KAISA":
        yield "", {}
        if system == "DPKFAC" and world_size > 1:
            yield "all_reduce", {"gradient_exchange": "all_reduce"}
        return
    for workers in workers_of(world_size):
        name = "HYBRID " + f"1/{world_size // workers}"
        if workers in (1, world_size):
            name = "MEM-OPT" if workers < world_size else "COMM-OPT"
        fraction = workers / world_size
        yield name, {"grad_worker_fraction": fraction}
        if world_size > 1:
            yield f"{name}, reduce", {"grad_worker_fraction": fraction, "factor_exchange": "reduce"}


def peak_memory(
    case: Case, costs: Iterable[RankCost], seen: Observation
) -> tuple[int, dict[str, int]]:
    """Bytes at the peak on the fullest rank, and what they are for.

    Kept memory is exact. What comes and goes does not come at once: activations during the passes,
    buffers of one exchange, the largest factor in some copies; the greatest of them counts.
    """
    peak, held = 0, {}
    for cost in costs:
        kept = {each.what: each.nbytes for each in cost.work.held}
        buffers = message_bytes(cost.work)
        solved = (s.computes for s in cost.work.stages if s.stage == "solve")
        factors = (c.sizes[-1] ** 2 * c.dtype.itemsize for c in chain(*solved))
        passing = max(seen.activations, buffers, COPIES * max(factors, default=0))
        total = sum(kept.values()) + passing
        if total > peak:
            peak, held = total, {**kept, "passing": passing}
    return peak, held

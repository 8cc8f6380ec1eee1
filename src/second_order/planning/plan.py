"""Which system with which setting: time, memory and bytes of each, and the one to take.

Each setting's costs are those of :mod:`second_order.planning.record`: the optimizer's own code
takes a step, and nothing is sent.
"""

from __future__ import annotations

import copy
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from second_order.errors import CurvatureError
from second_order.fosi.sharded_base import works_by_element
from second_order.optimizers.dho2 import DHO2
from second_order.optimizers.distkfac import DistKFAC
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.kaisa import KAISA
from second_order.optimizers.mrdho2 import MRDHO2
from second_order.options import check_choice, check_count, check_number
from second_order.planning.calibration import DEFAULT_NETWORKS, measure_machine
from second_order.planning.fraction import SIMILAR, workers_of
from second_order.planning.machine import Interconnect, Machine
from second_order.planning.record import Record, loss_of, record
from second_order.report import aligned
from second_order.stages import ELSEWHERE

__all__ = ["SYSTEMS", "Choice", "Plan", "bytes_of", "plan"]

SYSTEMS: dict[str, Any] = {c.__name__: c for c in (KAISA, DPKFAC, DistKFAC, DHO2, MRDHO2)}
OF_PAIRS = ("DHO2", "MRDHO2")
PASSES = "passes"
"""The account of forward and backward."""

PLANNED = {
    "solver": "use solvers=",
    "factor_update_steps": "use intervals=",
    "inv_update_steps": "use intervals=",
    "grad_worker_fraction": "MEM-OPT, HYBRID and COMM-OPT differ in it; leave it out",
    "factor_exchange": "settings of KAISA differ in it; leave it out",
    "layout": "DHO2's rows and columns; leave it out",
    "stats_workers": "messages of stats workers come when they come; leave it out",
    "process_group": "ranks are pretended; leave it out",
}
"""Options that are planned themselves, or that a pretended world has not."""

STATISTICS = ("statistics", "statistics_exchange")
REFRESH = ("solve", "solve_exchange", "lanczos", "final_update", "pairs", "wait")
COLUMNS = {
    "statistics": STATISTICS[:1],
    "solve": ("solve", "lanczos"),
    "precondition": ("precondition", "split", "newton"),
}
"""Columns of the table that are stages; those of no column are messages."""


@dataclass(frozen=True)
class Choice:
    """A setting, and what it costs.

    Attributes:
        system: The optimizer's class.
        setting: The setting in words.
        keywords: The keywords that have the optimizer do this.
        intervals: Steps between statistics and between refreshes; for eigenpairs both times the
            steps from one refresh to the next.
        stages: Seconds a step by stage, those of statistics and refreshes shared out over their
            intervals.
        seconds: Seconds a step.
        memory: Bytes at the peak on the fullest rank: parameters, what the optimizer and the
            gradients keep, and what comes and goes.
        kept: Bytes of these that the optimizer and the gradients keep.
        sent: Bytes a step that the busiest rank hands to ``torch.distributed``.
        hidden: Seconds a step of solves on threads, beside training.
        fits: Whether the memory allowed is enough.
        ranks: What each recorded rank takes at a step with statistics and a refresh.
    """

    system: str
    setting: str
    keywords: Mapping[str, Any]
    intervals: tuple[int, int]
    stages: Mapping[str, float]
    seconds: float
    memory: int
    kept: int
    sent: float
    hidden: float = 0.0
    fits: bool = True
    ranks: tuple[Record, ...] = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        """The system, the setting and the solver in words."""
        words = " ".join(filter(None, [self.system, self.setting]))
        return ", ".join(filter(None, [words, self.keywords.get("solver")]))


@dataclass(frozen=True)
class Plan:
    """The settings for a number of ranks, and the one that is recommended.

    Attributes:
        world_size: Number of ranks.
        choices: The settings, the fastest first.
        recommended: The setting to take; None where none fits into memory.
        reason: Why, in words.
        base: Seconds a step of the base alone, with its mean of gradients.
        machine: The machine of every rank.
        network: The links between the ranks.
        memory: Bytes that a rank may use; None for no limit.
        others: The plans for the other numbers of ranks that were asked for together.
    """

    world_size: int
    choices: tuple[Choice, ...]
    recommended: Choice | None
    reason: str
    base: float
    machine: Machine
    network: Interconnect
    memory: int | None = None
    others: tuple[Plan, ...] = field(default=(), repr=False)

    def summary(self, rows: int | None = 12) -> str:
        """The settings as a table, and the recommendation.

        Args:
            rows: Number of rows at most; None for all.
        """
        header = ["system", "setting", "solver", "intervals", "ms a step", "over base", *COLUMNS]
        table = [[*header, "messages", "peak memory", "sent", ""]]
        table += map(self._row, self.choices[:rows])
        left = len(self.choices) - len(table) + 1
        known = "measured" if self.network.measured else "not measured"
        title = f"{self.world_size} rank{'s' if self.world_size > 1 else ''} of "
        title += f"{self.machine.name}; network {known}; "
        title += f"the base alone takes {1000 * self.base:.3g} ms a step"
        more = [f"and {left} slower settings"] if left else []
        return "\n".join([title, *aligned(table, set(range(4, 12))), *more, self.reason])

    def _row(self, choice: Choice) -> list[str]:
        of = {name: sum(choice.stages.get(s, 0.0) for s in ss) for name, ss in COLUMNS.items()}
        others = sum(choice.stages.get(s, 0.0) for s in (PASSES, "base", "wait"))
        messages = sum(choice.stages.values()) - sum(of.values()) - others
        note = "recommended" if choice is self.recommended else ""
        return [
            choice.system,
            choice.setting,
            choice.keywords.get("solver", ""),
            "/".join(map(str, choice.intervals)),
            f"{1000 * choice.seconds:,.3g}",
            f"{choice.seconds / self.base - 1:+.0%}",
            *(f"{1000 * max(seconds, 0.0):,.3g}" for seconds in (*of.values(), messages)),
            _said(choice.memory),
            _said(choice.sent),
            note if choice.fits else "does not fit",
        ]

    def as_json(self) -> dict[str, Any]:
        """The plan as primitives; the recommended setting with what its ranks take."""

        def primitive(choice: Choice) -> dict[str, Any]:
            return {k: v for k, v in vars(choice).items() if k != "ranks"}

        best = self.recommended
        return {
            **{k: getattr(self, k) for k in ("world_size", "memory", "reason")},
            "base_seconds": self.base,
            "recommended": best and primitive(best) | {"ranks": [vars(r) for r in best.ranks]},
            "choices": [primitive(choice) for choice in self.choices],
            "machine": self.machine.as_json(),
            "network": self.network.as_json(),
        }

    def to_json(self, indent: int | None = 1) -> str:
        """The plan as JSON."""
        return json.dumps(self.as_json(), indent=indent)

    def __str__(self) -> str:
        return self.summary()


def plan(
    model: nn.Module,
    sample_batch: Any,
    world_size: int | Sequence[int] = 1,
    *,
    machine: Machine | None = None,
    network: Interconnect | None = None,
    memory: int | str | None = None,
    systems: Sequence[str] = tuple(SYSTEMS),
    solvers: Sequence[str] = ("inverse", "eigen"),
    intervals: Sequence[tuple[int, int]] = ((10, 10),),
    base: type[torch.optim.Optimizer] = torch.optim.SGD,
    base_kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    seconds: float = 10.0,
) -> Plan:
    """Predict time, memory and bytes of every system's settings, and recommend one.

    Each rank has a batch like ``sample_batch``. Of every setting the first rank, which owns the
    largest layer, and one in the middle take two steps on a copy of the model, in a world that
    sends nothing. Bytes and memory are theirs; times are those of a model: see docs/planning.md.
    The model stays as it is.

    Args:
        model: The model; on the meta device with ``machine`` alone.
        sample_batch: A rank's batch, as the model's arguments: a tensor, a tuple or list of
            arguments, or a dictionary by name.
        world_size: Number of ranks to plan for; or some such numbers: the plan is for the first,
            and has those for the others.
        machine: The machine of each rank; None to measure the one that the model is on, and the
            model's passes on it.
        network: The links between the ranks; None for documented numbers, which are round.
        memory: Bytes that a rank may use, as a number or like "80GB"; None for the machine's memory
            where it is known.
        systems: Names of the optimizers.
        solvers: The solvers: "inverse" (Cholesky) and "eigen".
        intervals: Pairs of ``factor_update_steps`` and ``inv_update_steps``. The recommendation is
            for the first. DHO2 and MRDHO2 have intervals of their own, among ``options``.
        base: Class of the base.
        base_kwargs: Arguments of the base.
        options: Further keywords of the optimizers; each gets those that it knows.
        seconds: About how long the machine may be measured, 60 at most.

    Raises:
        TypeError: For values of the wrong type.
        ValueError: For values out of range, a model that does not take the batch, a model on the
            meta device without a machine, or where a process group is initialised.
    """
    sizes = list(world_size) if isinstance(world_size, Sequence) else [world_size]
    _check(sizes, systems, solvers, intervals, options or {})
    check_number("seconds", seconds, low=0.0, open_low=True, high=60.0, remedy="10 is usual")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    device = next((p.device for p in model.parameters() if p.requires_grad), None)
    if device is None:
        raise ValueError("no parameter of the model trains; set requires_grad")
    if device.type == "meta" and machine is None:
        raise ValueError(
            "the model is on the meta device, and no machine is given to plan for; give "
            "machine=Machine.given(...), or the model on the device to measure"
        )
    allowed = None if memory is None else bytes_of(memory)
    positional, named = _arguments_of(sample_batch)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "meta":  # no number matters, but there have to be some
            model, device = copy.deepcopy(model).to_empty(device="cpu"), torch.device("cpu")
            with torch.no_grad():
                for x in (*model.parameters(), *model.buffers()):
                    x.fill_(0.01 if x.is_floating_point() else 0)
            positional, named = tree_map_only(
                Tensor, lambda x: torch.zeros_like(x, device="cpu"), (positional, named)
            )

        def run(model: nn.Module) -> Any:
            return model(*positional, **named)

        passes = _measured(model, run, device, 5 if machine is None else 0)
        machine = machine or measure_machine(device, seconds=seconds)
        keywords = {"lr": 0.1, "base": base, **(base_kwargs or {})}
        if base is torch.optim.SGD:
            keywords.setdefault("momentum", 0.9)
        network = network or DEFAULT_NETWORKS[machine.device]
        allowed = machine.memory if allowed is None else allowed
        given = passes, keywords, dict(options or {}), tuple(intervals), machine, network, allowed
        planner = _Planner(model, run, *given)
        first, *others = (planner.plan(n, systems, solvers) for n in dict.fromkeys(sizes))
    return replace(first, others=tuple(others))


def _check(
    sizes: Sequence[Any],
    systems: Sequence[str],
    solvers: Sequence[str],
    intervals: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    """Raise TypeError or ValueError for what cannot be planned."""
    if not sizes or not intervals:
        raise ValueError("world_size and intervals: give one of each at least")
    for size in sizes:
        check_count("world_size", size, "ranks")
    allowed = {"systems": (systems, tuple(SYSTEMS)), "solvers": (solvers, ("inverse", "eigen"))}
    for name, (values, known) in allowed.items():
        if isinstance(values, str) or not values:
            raise ValueError(f"{name}={values!r}; give a list of some of {', '.join(known)}")
        for value in values:
            check_choice(name, value, known)
    for pair in intervals:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"intervals: {pair!r} is not a pair of two numbers, as (10, 100)")
        check_count("factor_update_steps", pair[0], "steps")
        check_count("inv_update_steps", pair[1], "steps")
    for name in options.keys() & PLANNED.keys():
        raise ValueError(f"options[{name!r}] is planned: {PLANNED[name]}")
    unknown = set(options).difference(*(inspect.signature(SYSTEMS[s]).parameters for s in systems))
    if unknown:
        raise TypeError(f"options: none of {', '.join(systems)} knows {', '.join(sorted(unknown))}")


def _arguments_of(sample_batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as a model's positional and named arguments."""
    if isinstance(sample_batch, Tensor):
        sample_batch = (sample_batch,)
    if isinstance(sample_batch, str) or not isinstance(sample_batch, Mapping | Sequence):
        raise TypeError(
            f"sample_batch is a {type(sample_batch).__name__}; give the model's arguments: a "
            f"tensor, a tuple or a list of them, or a dictionary by name"
        )
    if not any(isinstance(x, Tensor) and x.dim() and len(x) for x in tree_leaves(sample_batch)):
        raise ValueError(
            "sample_batch has no tensor with a batch dimension; give one example at least"
        )
    if isinstance(sample_batch, Mapping):
        return (), dict(sample_batch)
    return tuple(sample_batch), {}


def _measured(
    model: nn.Module, run: Callable[[nn.Module], Any], device: torch.device, times: int
) -> float | None:
    """Seconds of the fastest of some passes of a copy; None if they are not to be taken."""
    model, found = copy.deepcopy(model).train(), []
    try:
        with torch.no_grad():
            run(model)
    except Exception as error:
        raise ValueError(
            f"the model does not take sample_batch: {type(error).__name__}: {error}; give the "
            f"arguments of the model alone, without targets that its forward does not take"
        ) from error
    for _ in range(times):
        start = time.perf_counter()
        loss_of(run(model)).backward()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found, default=None)


@dataclass(frozen=True)
class _Planner:
    """A model that runs on a batch, to be planned for any number of ranks."""

    model: nn.Module
    run: Callable[[nn.Module], Any]
    passes: float | None
    """Measured seconds of forward and backward; None for simulated ones."""
    keywords: Mapping[str, Any]
    options: Mapping[str, Any]
    intervals: tuple[tuple[int, int], ...]
    machine: Machine
    network: Interconnect
    memory: int | None

    def plan(self, world_size: int, systems: Sequence[str], solvers: Sequence[str]) -> Plan:
        """The plan for a number of ranks."""
        choices: list[Choice] = []
        for system in systems:
            for setting, keywords in _settings(system, world_size, solvers, self._by_element):
                try:
                    choices += self._choices(system, setting, keywords, world_size)
                except CurvatureError:  # noqa: PERF203  # no second derivatives: factors are planned
                    if set(systems) <= set(OF_PAIRS):
                        raise
        if not choices:
            raise ValueError(
                f"MRDHO2 needs more ranks than accelerators, and there is {world_size}"
            )
        choices.sort(key=lambda choice: choice.seconds)
        base = choices[0].stages[PASSES] + choices[0].stages.get("base", 0.0)
        if world_size > 1:
            trained = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
            base += self.network.all_reduce(trained, range(world_size))
        of_factors = [
            c for c in choices if c.intervals == self.intervals[0] and c.system not in OF_PAIRS
        ]
        best, reason = _recommended(of_factors or choices, self.memory, self.machine)
        if len(of_factors) < len(choices) and any(s in OF_PAIRS for s in systems):
            reason += (
                "; DHO2 and MRDHO2 have another curvature: seconds of a step do not tell which "
                "makes more progress"
            )
        links = self.machine, self.network, self.memory
        return Plan(world_size, tuple(choices), best, reason, base, *links)

    @property
    def _by_element(self) -> bool:
        """Whether the base suits rows of the parameters."""
        return works_by_element(self.keywords["base"])

    def _option(self, name: str, system: Any = DHO2) -> Any:
        return self.options.get(name, inspect.signature(system).parameters[name].default)

    def _records(self, system: str, keywords: Mapping[str, Any], ranks: int) -> list[Record]:
        """What the first rank and one in the middle take, if all is due at each step."""
        known = inspect.signature(SYSTEMS[system]).parameters
        own = {k: v for k, v in self.options.items() if k in known}

        def make(model: nn.Module, closure: Callable[[], Tensor]) -> Any:
            every: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 1}
            if system in OF_PAIRS:  # with as many products as a refresh may take
                every = {"curvature_closure": closure, "warmup_steps": 0}
                every |= {"curvature_interval": 1, "lanczos_tol": 0.0, "curvature": "hessian"}
            return SYSTEMS[system](model, **{**self.keywords, **own, **keywords, **every})

        setting = self.model, self.run, self.machine, self.network
        return [record(make, *setting, rank, ranks) for rank in sorted({0, ranks // 2})]

    def _choices(
        self, system: str, setting: str, keywords: dict[str, Any], ranks: int
    ) -> Iterator[Choice]:
        """A setting at each of the intervals."""
        epoch, helpers = 1, 0
        if system == "MRDHO2":
            epoch, helpers = (self._option(k, MRDHO2) for k in ("epoch_steps", "accelerators"))
            if helpers >= ranks:
                return
            # Workers step as DHO2's do; of an epoch's end they get the pairs of the accelerators.
            layout = "row" if self._by_element else "column"
            records = self._records("DHO2", {"layout": layout}, ranks - helpers)
        else:
            records = self._records(system, keywords, ranks)
        due = {k: max(r.seconds.get(k, 0.0) for r in records) for r in records for k in r.seconds}
        sent = {k: max(r.sent.get(k, 0.0) for r in records) for r in records for k in r.sent}
        simulated = due.pop(ELSEWHERE)
        due = {PASSES: simulated if self.passes is None else self.passes, **due}
        hidden = max(r.hidden for r in records)
        if helpers:
            hidden = due.pop("lanczos", 0.0) * (ranks - helpers) / helpers
            sent.pop("lanczos", None)
            due["wait"] = max(hidden - epoch * sum(due.values()), 0.0)
        elif not self.machine.solves_beside:
            due["solve"], hidden = due.get("solve", 0.0) + hidden, 0.0
        fullest = max(records, key=lambda r: r.peak)
        memory = sum(p.nbytes for p in self.model.parameters()) + fullest.peak
        for pair in [self._interval(system, due, epoch)] if system in OF_PAIRS else self.intervals:
            every = dict.fromkeys(STATISTICS, pair[0]) | dict.fromkeys(REFRESH, pair[1])
            stages = {stage: s / every.get(stage, 1) for stage, s in due.items()}
            total, beside = sum(stages.values()), hidden / pair[1]
            if system not in OF_PAIRS:
                keywords = {**keywords, "factor_update_steps": pair[0], "inv_update_steps": pair[1]}
            yield Choice(
                system,
                setting,
                keywords,
                pair,
                stages,
                total if helpers else max(total, beside),
                memory,
                fullest.kept,
                sum(nbytes / every.get(stage, 1) for stage, nbytes in sent.items()),
                beside,
                self.memory is None or memory <= self.memory,
                tuple(records),
            )

    def _interval(self, system: str, due: Mapping[str, float], epoch: int) -> tuple[int, int]:
        """Steps from one refresh of eigenpairs to the next: an epoch, a number, or by budget."""
        every = epoch if system == "MRDHO2" else self._option("curvature_interval")
        if not isinstance(every, int):
            overhead = self._option("overhead") or 0.15
            alone = due[PASSES] + due.get("base", 0.0) + due.get("average_gradients", 0.0)
            every = max(round(due.get("lanczos", 0.0) / (overhead * alone)), 1)
        return every, every


def _settings(
    system: str, ranks: int, solvers: Sequence[str], by_element: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A system's settings that are compared, in words and as keywords."""
    if system == "MRDHO2":
        yield "", {}
    elif system == "DHO2":
        layouts = ("row", "column") if by_element else ("column",)
        for layout in layouts if ranks > 1 else ("row",):
            yield f"{layout}s" if ranks > 1 else "", {"layout": layout}
    elif system != "KAISA" or ranks == 1:
        yield from (("", {"solver": solver}) for solver in solvers)
    else:
        for solver in solvers:
            for workers in workers_of(ranks, 4):
                name = {1: "MEM-OPT", ranks: "COMM-OPT"}.get(workers, f"HYBRID {workers}/{ranks}")
                words = {"solver": solver, "grad_worker_fraction": workers / ranks}
                yield name, words
                yield f"{name}, reduce", {**words, "factor_exchange": "reduce"}


def _recommended(
    choices: Sequence[Choice], memory: int | None, machine: Machine
) -> tuple[Choice | None, str]:
    """The fastest setting that fits, and why; of similar ones the one with the least memory."""
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        least = min(choices, key=lambda choice: choice.memory)
        return None, (
            f"none of {len(choices)} settings fits into {_said(memory or 0)}: {least.name} takes "
            f"the least, {_said(least.memory)}; a smaller batch, skip_layers=[...] or FSDP2 would "
            f"make room"
        )
    # Solves on threads that have no core are no faster than those at once, and come later.
    if not machine.solves_beside:
        fitting = [choice for choice in fitting if choice.system != "DistKFAC"] or fitting
    fastest = fitting[0]
    similar = [c for c in fitting if c.seconds <= (1 + SIMILAR) * fastest.seconds]
    best = min(similar, key=lambda choice: (choice.memory, choice.seconds))
    said = f"recommended: {best.name}: {1000 * best.seconds:.3g} ms a step"
    if best is fastest:
        said += f", the fastest of {len(choices)} settings"
    else:
        saved = _said(fastest.memory - best.memory)
        said += f", within {SIMILAR:.0%} of the fastest, {fastest.name}, and {saved} less memory"
    unfit = [choice for choice in choices if not choice.fits]
    if unfit:
        quicker = sum(c.seconds < best.seconds for c in unfit)
        said += f"; {len(unfit)} do not fit into {_said(memory or 0)}"
        said += f", {quicker} of them faster" if quicker else ""
    if best.system == "DPKFAC":
        said += "; its factors are of their owner's batches alone"
    if best.system == "MRDHO2":
        said += "; its accelerators do not train, and the step is of fewer examples"
    if best.system == "DistKFAC" and best.hidden:
        said += "; its solves need cores of their own beside training"
    if any(choice.system == "DistKFAC" for choice in choices) and not machine.solves_beside:
        said += (
            "; no core is left to DistKFAC's threads (spare_cores of the machine): its solves take "
            "training's time, and are counted in full"
        )
    return best, said


def bytes_of(size: int | str) -> int:
    """A number of bytes from a number, or a text like "80GB" or "512 MiB".

    Raises:
        ValueError: For anything else, or less than one byte.
    """
    text = str(size).strip()
    digits = text.rstrip("BbKkMmGgTtIi ")
    unit = text[len(digits) :].strip().upper().removesuffix("B")
    try:
        power = " KMGT".index(unit[:1] or " ")
        found = int(float(digits) * (1024 if unit.endswith("I") else 1000) ** power)
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ValueError(f"memory={size!r} is not a number of bytes; write 80GB or 512MiB")
    return found


def _said(size: float) -> str:
    """A number of bytes for tables."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"

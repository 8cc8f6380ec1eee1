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
REFRESH = ("solve", "solve_exchange", "lanczos", "final_update", "pairs")
COLUMNS = (STATISTICS[:1], ("solve", "lanczos"), ("precondition", "split", "newton"))
"""The stages of three columns of the table."""


@dataclass(frozen=True)
class Choice:
    """A setting, and what it costs.

    Attributes:
        system: The optimizer's class.
        setting: The setting in words.
        keywords: The keywords that have the optimizer do this.
        intervals: Steps between statistics and between refreshes; for eigenpairs both times the
            steps from one refresh to the next.
        world_size: Number of ranks.
        stages: Seconds a step by stage, those of statistics and refreshes shared out over their
            intervals.
        seconds: Seconds a step.
        memory: Bytes at the peak on the fullest rank: parameters, what the optimizer and the
            gradients keep, and what comes and goes.
        held: Bytes by what they are for, on that rank: "parameters", "kept" and "passing".
        sent: Bytes a step that the busiest rank hands to ``torch.distributed``.
        operations: Floating point operations of a step at which all is due, on the busiest rank.
        hidden: Seconds a step of solves on threads, beside training.
        shared: Seconds a step of solves on threads that have no cores of their own: training gives
            them its time, and they are among ``seconds``.
        fits: Whether the memory allowed is enough.
        largest_batch: Examples to a rank's batch for which it would still be; None without a limit.
        ranks: What each recorded rank takes at a step with statistics and a refresh.
    """

    system: str
    setting: str
    keywords: Mapping[str, Any]
    intervals: tuple[int, int]
    world_size: int
    stages: Mapping[str, float]
    seconds: float
    memory: int
    held: Mapping[str, int]
    sent: float
    operations: float
    hidden: float = 0.0
    shared: float = 0.0
    fits: bool = True
    largest_batch: int | None = None
    ranks: tuple[Record, ...] = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        """The system, the setting and the solver in words."""
        words = " ".join(filter(None, [self.system, self.setting]))
        return ", ".join(filter(None, [words, self.keywords.get("solver")]))

    def as_json(self) -> dict[str, Any]:
        """The choice as primitives, but for its ranks."""
        found = {k: v for k, v in vars(self).items() if k != "ranks"}
        primitive = bool, int, float, str, type(None)
        words = self.keywords.items()
        return found | {
            "keywords": {k: v if isinstance(v, primitive) else str(v) for k, v in words}
        }


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
        header = "system|setting|solver|intervals|ms a step|over base|statistics|solve|"
        header += "precondition|messages|peak memory|sent|"
        table = [header.split("|"), *map(self._row, self.choices[:rows])]
        left = len(self.choices) - len(table) + 1
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for row in table:
            cells = zip(row, widths, strict=True)
            cells_ = [
                c.ljust(w) if i < 4 or i == 12 else c.rjust(w) for i, (c, w) in enumerate(cells)
            ]
            lines.append("  ".join(cells_).rstrip())
        lines.insert(1, "-" * max(map(len, lines)))
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        known = "measured" if self.network.measured else "not measured"
        title = f"{ranks} of {self.machine.name}; network {known}; "
        title += f"the base alone takes {1000 * self.base:.3g} ms a step"
        lines += [f"and {left} slower settings"] if left else []
        return "\n".join([title, *lines, self.reason])

    def _row(self, choice: Choice) -> list[str]:
        stages = choice.stages
        own = {PASSES, "base", "wait", *(stage for column in COLUMNS for stage in column)}
        note = "recommended" if choice is self.recommended else ""
        return [
            choice.system,
            choice.setting,
            choice.keywords.get("solver", ""),
            "/".join(map(str, choice.intervals)),
            f"{1000 * choice.seconds:,.3g}",
            f"{choice.seconds / self.base - 1:+.0%}",
            *(f"{1000 * sum(stages.get(k, 0.0) for k in of):,.3g}" for of in COLUMNS),
            f"{1000 * sum(s for k, s in stages.items() if k not in own):,.3g}",
            _said(choice.memory),
            _said(choice.sent),
            note if choice.fits else "does not fit",
        ]

    def as_json(self) -> dict[str, Any]:
        """The plan as primitives; the recommended setting with what its ranks take."""
        best = self.recommended
        every = {} if best is None else best.as_json() | {"ranks": [vars(r) for r in best.ranks]}
        return {
            **{k: getattr(self, k) for k in ("world_size", "memory", "reason")},
            "base_seconds": self.base,
            "recommended": every or None,
            "choices": [choice.as_json() for choice in self.choices],
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
    clock: Callable[[], float] = time.perf_counter,
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
        clock: The clock to measure by; ``time.process_time`` leaves out what others do on a CPU.

    Raises:
        TypeError: For values of the wrong type.
        ValueError: For values out of range, a model that does not take the batch, a model on the
            meta device without a machine, or where a process group is initialised.
    """
    sizes = list(world_size) if isinstance(world_size, Sequence) else [world_size]
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if not sizes or not intervals:
        raise ValueError("world_size and intervals: give one of each at least")
    for size in sizes:
        check_count("world_size", size, "ranks")
    for name, values, allowed in (
        ("systems", systems, tuple(SYSTEMS)),
        ("solvers", solvers, ("inverse", "eigen")),
    ):
        if isinstance(values, str) or not values:
            raise ValueError(f"{name}={values!r}; give a list of some of {', '.join(allowed)}")
        for value in values:
            check_choice(name, value, allowed)
    wanted: list[Any] = list(intervals)
    for pair in wanted:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"intervals: {pair!r} is not a pair of two numbers, as (10, 100)")
        check_count("factor_update_steps", pair[0], "steps")
        check_count("inv_update_steps", pair[1], "steps")
    check_number("seconds", seconds, low=0.0, open_low=True, high=60.0, remedy="10 is usual")
    allowance = None if memory is None else bytes_of(memory)
    for name in (options or {}).keys() & PLANNED.keys():
        raise ValueError(f"options[{name!r}] is planned: {PLANNED[name]}")
    known = {n for s in systems for n in inspect.signature(SYSTEMS[s]).parameters}
    if (options or {}).keys() - known:
        raise TypeError(f"options: none of {', '.join(systems)} knows {set(options or {}) - known}")
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise ValueError("no parameter of the model trains; set requires_grad")
    device = params[0].device
    if device.type == "meta" and machine is None:
        raise ValueError(
            "the model is on the meta device, and no machine is given to plan for; give "
            "machine=Machine.given(...), or the model on the device to measure"
        )
    arguments, examples = _arguments_of(sample_batch)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "meta":  # no number matters, but there have to be some
            model, device = copy.deepcopy(model).to_empty(device="cpu"), torch.device("cpu")
            with torch.no_grad():
                for x in (*model.parameters(), *model.buffers()):
                    x.fill_(0.01 if x.is_floating_point() else 0)
        arguments = tree_map_only(
            Tensor, lambda x: torch.zeros_like(x, device=device) if x.is_meta else x, arguments
        )
        run = _Run(*arguments)
        passes = run.measured(model, device, clock, take=machine is None)
        machine = machine or measure_machine(device, seconds=seconds, clock=clock)
        keywords = {
            "lr": 0.1,
            "base": base,
            **({"momentum": 0.9} if base is torch.optim.SGD else {}),
        }
        planner = Planner(
            model,
            run,
            examples,
            passes,
            {**keywords, **(base_kwargs or {})},
            dict(options or {}),
            tuple(wanted),
            machine,
            network or DEFAULT_NETWORKS[machine.device],
            machine.memory if allowance is None else allowance,
        )
        first, *others = (planner.plan(n, systems, solvers) for n in dict.fromkeys(sizes))
    return replace(first, others=tuple(others))


def _arguments_of(sample_batch: Any) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], int]:
    """A batch as a model's positional and named arguments, and its number of examples."""
    if isinstance(sample_batch, Tensor):
        found: tuple[tuple[Any, ...], dict[str, Any]] = ((sample_batch,), {})
    elif isinstance(sample_batch, Mapping):
        found = (), {str(name): value for name, value in sample_batch.items()}
    elif isinstance(sample_batch, Sequence) and not isinstance(sample_batch, str):
        found = tuple(sample_batch), {}
    else:
        raise TypeError(
            f"sample_batch is a {type(sample_batch).__name__}; give the model's arguments: a "
            f"tensor, a tuple or a list of them, or a dictionary by name"
        )
    examples = next(
        (x.shape[0] for x in tree_leaves(found) if isinstance(x, Tensor) and x.dim()), 0
    )
    if not examples:
        raise ValueError(
            "sample_batch has no tensor with a batch dimension; give one example at least"
        )
    return found, examples


@dataclass(frozen=True)
class _Run:
    """Runs a model on a batch."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self, model: nn.Module) -> Any:
        return model(*self.positional, **self.named)

    def measured(
        self, model: nn.Module, device: torch.device, clock: Callable[[], float], *, take: bool
    ) -> float | None:
        """Seconds of the fastest of some passes of a copy; None if they are not to be taken."""
        model, times = copy.deepcopy(model).train(), []
        try:
            with torch.no_grad():
                self(model)
        except Exception as error:
            raise ValueError(
                f"the model does not take sample_batch: {type(error).__name__}: {error}; give the "
                f"arguments of the model alone, without targets that its forward does not take"
            ) from error
        for _ in range(5 if take else 0):
            start = clock()
            loss_of(self(model)).backward()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(clock() - start)
        return min(times[1:]) if take else None


@dataclass(frozen=True)
class Planner:
    """A model and a batch, to be planned for any number of ranks.

    Attributes:
        model: The model.
        run: Runs it on the batch.
        examples: Examples in the batch.
        passes: Measured seconds of forward and backward; None for simulated ones.
        keywords: The base and its arguments.
        options: Further keywords.
        intervals: The intervals that are compared.
        machine: The machine of every rank.
        network: The links between the ranks.
        memory: Bytes that a rank may use; None for no limit.
    """

    model: nn.Module
    run: _Run
    examples: int
    passes: float | None
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
            for setting, keywords in _settings(system, world_size, solvers):
                choices += self._choices(system, setting, keywords, world_size)
        choices.sort(key=lambda choice: choice.seconds)
        params = [p.nbytes for p in self.model.parameters() if p.requires_grad]
        stages = choices[0].stages
        base = stages[PASSES] + stages.get("base", 0.0)
        if world_size > 1:
            base += self.network.all_reduce(sum(params), range(world_size))
        of_factors = [
            c for c in choices if c.intervals == self.intervals[0] and "solver" in c.keywords
        ]
        best, reason = _recommended(of_factors or choices, self.memory)
        if of_factors and any(system in OF_PAIRS for system in systems):
            reason += (
                "; DHO2 and MRDHO2 have another curvature: seconds of a step do not tell which "
                "makes more progress"
            )
        links = self.machine, self.network, self.memory
        return Plan(world_size, tuple(choices), best, reason, base, *links)

    def _records(self, system: str, keywords: Mapping[str, Any], ranks: int) -> list[Record]:
        """What the first rank and one in the middle take, if all is due at each step."""
        optimizer = SYSTEMS[system]
        known = inspect.signature(optimizer).parameters
        given = {
            **self.keywords,
            **{k: v for k, v in self.options.items() if k in known},
            **keywords,
        }

        def make(model: nn.Module, closure: Callable[[], Tensor]) -> Any:
            if system in OF_PAIRS:
                every = {"curvature_closure": closure, "warmup_steps": 0, "curvature_interval": 1}
            else:
                every = {"factor_update_steps": 1, "inv_update_steps": 1}
            return optimizer(model, **{**given, **every})

        setting = self.model, self.run, self.machine, self.network
        return [record(make, *setting, rank, ranks) for rank in sorted({0, ranks // 2})]

    def _choices(
        self, system: str, setting: str, keywords: Mapping[str, Any], ranks: int
    ) -> Iterator[Choice]:
        """A setting at each of the intervals."""
        epoch, accelerators = 1, 0
        if system == "MRDHO2":
            epoch, accelerators = (
                self.options.get(k, inspect.signature(MRDHO2).parameters[k].default)
                for k in ("epoch_steps", "accelerators")
            )
            if accelerators >= ranks:
                return
            # Workers step as DHO2's do; of an epoch's end they get the pairs of the accelerators.
            records = self._records("DHO2", {"layout": "row"}, ranks - accelerators)
        else:
            records = self._records(system, keywords, ranks)
        due = {k: max(r.seconds.get(k, 0.0) for r in records) for r in records for k in r.seconds}
        sent = {k: max(r.sent.get(k, 0.0) for r in records) for r in records for k in r.sent}
        simulated = due.pop(ELSEWHERE)
        due = {PASSES: simulated if self.passes is None else self.passes, **due}
        hidden, shared = max(r.hidden for r in records), 0.0
        if accelerators:
            hidden = due.pop("lanczos") * (ranks - accelerators) / accelerators
            sent.pop("lanczos", None)
            due["wait"] = max(hidden - epoch * sum(due.values()), 0.0)
        elif hidden and not self.machine.solves_beside:
            due["solve"], shared, hidden = due.get("solve", 0.0) + hidden, hidden, 0.0
        parameters = sum(p.nbytes for p in self.model.parameters())
        fullest = max(records, key=lambda r: r.peak)
        held = {"parameters": parameters, "kept": fullest.kept}
        held["passing"] = fullest.peak - fullest.kept
        memory = sum(held.values())
        room, each = None, fullest.activations / self.examples
        if self.memory is not None and each:
            room = max(int((self.memory - memory) / each) + self.examples, 0)
        for pair in [self._interval(system, due, epoch)] if system in OF_PAIRS else self.intervals:
            every = dict.fromkeys(STATISTICS, pair[0]) | dict.fromkeys((*REFRESH, "wait"), pair[1])
            stages = {stage: s / every.get(stage, 1) for stage, s in due.items()}
            total = sum(stages.values())
            if system not in OF_PAIRS:
                keywords = {**keywords, "factor_update_steps": pair[0], "inv_update_steps": pair[1]}
            yield Choice(
                system,
                setting,
                dict(keywords),
                pair,
                ranks,
                stages,
                total if accelerators else max(total, hidden / pair[1]),
                memory,
                held,
                sum(nbytes / every.get(stage, 1) for stage, nbytes in sent.items()),
                max(r.operations for r in records),
                hidden / pair[1],
                shared / pair[1],
                self.memory is None or memory <= self.memory,
                room,
                tuple(records),
            )

    def _interval(self, system: str, due: Mapping[str, float], epoch: int) -> tuple[int, int]:
        """Steps from one refresh of eigenpairs to the next: an epoch, a number, or by budget."""
        known = inspect.signature(DHO2).parameters
        every = self.options.get("curvature_interval", known["curvature_interval"].default)
        if system == "MRDHO2":
            every = epoch
        elif not isinstance(every, int):
            overhead = self.options.get("overhead", known["overhead"].default) or 0.15
            alone = due[PASSES] + due.get("base", 0.0) + due.get("average_gradients", 0.0)
            every = max(round(due.get("lanczos", 0.0) / (overhead * alone)), 1)
        return every, every


def _settings(
    system: str, ranks: int, solvers: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A system's settings that are compared, in words and as keywords."""
    if system == "DHO2":
        for layout in ("row", "column") if ranks > 1 else ("row",):
            yield f"{layout}s" if ranks > 1 else "", {"layout": layout}
        return
    for solver in solvers if system != "MRDHO2" else ():
        if system != "KAISA" or ranks == 1:
            yield "", {"solver": solver}
            continue
        for workers in workers_of(ranks, 4):
            name = {1: "MEM-OPT", ranks: "COMM-OPT"}.get(workers, f"HYBRID {workers}/{ranks}")
            words = {"solver": solver, "grad_worker_fraction": workers / ranks}
            yield name, words
            yield f"{name}, reduce", {**words, "factor_exchange": "reduce"}
    if system == "MRDHO2":
        yield "", {}


def _recommended(choices: Sequence[Choice], memory: int | None) -> tuple[Choice | None, str]:
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
    fitting = [choice for choice in fitting if not choice.shared] or fitting
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
    if best.system == "DPKFAC" and best.world_size > 1:
        said += "; its factors are of their owner's batches alone"
    if best.system == "MRDHO2":
        said += "; its accelerators do not train, and the step is of fewer examples"
    elif best.hidden:
        said += "; its solves need cores of their own beside training"
    if any(choice.shared for choice in choices):
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

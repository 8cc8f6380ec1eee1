"""Which system with which setting: time, memory and bytes of each, and the one to take.

``python -m second_order plan`` is the command. Costs are those of
:mod:`second_order.planning.record`: the optimizer's own code takes a step, and nothing is sent.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import itertools
import json
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError
from second_order.optimizers.distkfac import DistKFAC
from second_order.optimizers.dpkfac import DPKFAC
from second_order.optimizers.kaisa import KAISA
from second_order.options import check_count, check_number
from second_order.planning.machine import (
    DEFAULT_NETWORKS,
    SIMILAR,
    Interconnect,
    Machine,
    measure_machine,
    workers_of,
)
from second_order.planning.record import ELSEWHERE, loss_of, record
from second_order.report import aligned

__all__ = ["SOLVERS", "SYSTEMS", "Choice", "Plan", "add_command", "plan"]

SYSTEMS: dict[str, Any] = {c.__name__: c for c in (KAISA, DPKFAC, DistKFAC)}
SOLVERS = ("inverse", "eigen")
FUNCTION = "model_and_batch"
"""The function that the command calls where none is named."""

PASSES = "passes"
"""The account of forward and backward."""

PLANNED = {
    *("solver", "factor_update_steps", "inv_update_steps", "grad_worker_fraction"),
    *("factor_exchange", "stats_workers", "process_group"),
}
"""Options that are planned themselves, or that a pretended world has not."""

STATISTICS = ("statistics", "statistics_exchange")
REFRESH = ("solve", "solve_exchange", "wait")
COLUMNS = ("statistics", "solve", "precondition")
"""Columns of the table that are stages; those of no column are messages."""


@dataclass(frozen=True)
class Choice:
    """A setting, and what it costs.

    Attributes:
        system: The optimizer's class.
        setting: The setting in words.
        keywords: The keywords that have the optimizer do this.
        intervals: Steps between statistics and between refreshes.
        stages: Seconds a step by stage, those of statistics and refreshes shared out over their
            intervals.
        seconds: Seconds a step.
        memory: Bytes at the peak on the fullest rank: parameters, what the optimizer and the
            gradients keep, and what comes and goes.
        kept: Bytes of these that the optimizer and the gradients keep.
        sent: Bytes a step that the busiest rank hands to ``torch.distributed``.
        hidden: Seconds a step of solves on threads, beside training.
        fits: Whether the memory allowed is enough.
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
        known = "as given"
        if self.network.measured:
            known = "measured"
        elif self.network in DEFAULT_NETWORKS.values():
            known = "assumed"
        title = f"{self.world_size} rank{'s' if self.world_size > 1 else ''} of "
        title += f"{self.machine.name}; network {known}; "
        title += f"the base alone takes {1000 * self.base:.3g} ms a step"
        more = [f"and {left} slower settings"] if left else []
        return "\n".join([title, *aligned(table, set(range(4, 12))), *more, self.reason])

    def _row(self, choice: Choice) -> list[str]:
        of = [choice.stages.get(name, 0.0) for name in COLUMNS]
        others = sum(choice.stages.get(s, 0.0) for s in (PASSES, "base", "wait"))
        messages = sum(choice.stages.values()) - sum(of) - others
        note = "recommended" if choice is self.recommended else ""
        return [
            choice.system,
            choice.setting,
            choice.keywords.get("solver", ""),
            "/".join(map(str, choice.intervals)),
            f"{1000 * choice.seconds:,.3g}",
            f"{choice.seconds / self.base - 1:+.0%}",
            *(f"{1000 * max(seconds, 0.0):,.3g}" for seconds in (*of, messages)),
            _said(choice.memory),
            _said(choice.sent),
            note if choice.fits else "does not fit",
        ]

    def to_json(self, indent: int | None = 1) -> str:
        """The plan as JSON."""
        found = {
            **{k: getattr(self, k) for k in ("world_size", "memory", "reason")},
            "base_seconds": self.base,
            "recommended": self.recommended and vars(self.recommended),
            "choices": [vars(choice) for choice in self.choices],
            "machine": self.machine.as_json(),
            "network": self.network.as_json(),
        }
        return json.dumps(found, indent=indent)

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
    solvers: Sequence[str] = SOLVERS,
    intervals: Sequence[tuple[int, int]] = ((10, 10),),
    base: type[torch.optim.Optimizer] = torch.optim.SGD,
    base_kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    seconds: float = 10.0,
) -> Plan:
    """Predict time, memory and bytes of every system's settings, and recommend one.

    Each rank has a batch like ``sample_batch``. In every setting the first rank, which owns the
    largest layer, takes two steps on a copy of the model, in a world that sends nothing. So does
    the rank in the middle, if it works on layers of other shapes than the first one does. Bytes and
    memory are theirs; times are those of a model: see docs/planning.md. The model stays as it is.
    A process group may be initialized; nothing is sent in it.

    Args:
        model: The model.
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
            for the first.
        base: Class of the base.
        base_kwargs: Arguments of the base.
        options: Further keywords of the optimizers; each gets those that it knows.
        seconds: About how long the machine may be measured, 60 at most.

    Raises:
        TypeError: For values of the wrong type.
        ValueError: For values out of range, or a model that does not take the batch or is on the
            meta device.
    """
    sizes = list(world_size) if isinstance(world_size, Sequence) else [world_size]
    options = dict(options or {})
    _check(model, sizes, {"systems": systems, "solvers": solvers}, intervals, options)
    check_number("seconds", seconds, low=0.0, open_low=True, high=60.0, remedy="10 is usual")
    allowed = None if memory is None else _bytes_of(memory)
    keywords = {"lr": 0.1, "base": base, **(base_kwargs or {})}
    if base is torch.optim.SGD:
        keywords.setdefault("momentum", 0.9)
    device = next(p.device for p in model.parameters() if p.requires_grad)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        run, passes = _ready(model, sample_batch, 5 if machine is None else 0)
        machine = machine or measure_machine(device, seconds=seconds)
        network = network or DEFAULT_NETWORKS[machine.device]
        allowed = machine.memory if allowed is None else allowed
        costs = machine, network, allowed
        planner = _Planner(model, run, passes, keywords, options, tuple(intervals), *costs)
        first, *others = (planner.plan(n, systems, solvers) for n in dict.fromkeys(sizes))
    return replace(first, others=tuple(others))


def _check(
    model: Any,
    sizes: Sequence[Any],
    named: Mapping[str, Sequence[str]],
    intervals: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    """Raise TypeError or ValueError for what cannot be planned."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    device = next((p.device for p in model.parameters() if p.requires_grad), None)
    if device is None:
        raise ValueError("no parameter of the model trains; set requires_grad")
    if device.type == "meta":
        raise ValueError("the model is on the meta device; give one with numbers, by to_empty()")
    if not sizes or not intervals:
        raise ValueError("world_size and intervals: give one of each at least")
    for size in sizes:
        check_count("world_size", size, "ranks")
    for (name, values), known in zip(named.items(), (SYSTEMS, SOLVERS), strict=True):
        if isinstance(values, str) or not values or not set(values) <= set(known):
            raise ValueError(f"{name}={values!r}; give a list of some of {', '.join(known)}")
    for pair in intervals:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"intervals: {pair!r} is not a pair of two numbers, as (10, 100)")
        for steps in pair:
            check_count("intervals", steps, "steps")
    systems = named["systems"]
    known = set().union(*(inspect.signature(SYSTEMS[s]).parameters for s in systems)) - PLANNED
    for name in options.keys() - known:
        raise TypeError(
            f"options: {name!r} is a setting that is planned, or unknown to {', '.join(systems)}"
        )


def _ready(
    model: nn.Module, batch: Any, times: int
) -> tuple[Callable[[nn.Module], Any], float | None]:
    """A run of the model on the batch, and seconds of the fastest of some passes of a copy."""
    if isinstance(batch, Tensor):
        batch = (batch,)
    if isinstance(batch, str) or not isinstance(batch, Mapping | Sequence):
        raise TypeError(
            f"sample_batch is a {type(batch).__name__}; give the model's arguments: a tensor, a "
            f"tuple or a list of them, or a dictionary by name"
        )

    def run(model: nn.Module) -> Any:
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)

    twin, found = copy.deepcopy(model).train(), []
    try:
        with torch.no_grad():
            run(twin)
    except Exception as error:
        raise ValueError(
            f"the model does not take sample_batch: {type(error).__name__}: {error}; give the "
            f"arguments of the model alone, without targets that its forward does not take"
        ) from error
    for _ in range(times):
        start = time.perf_counter()
        loss_of(run(twin)).backward()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - start)
    return run, min(found, default=None)


@dataclass(frozen=True)
class _Planner:
    """A model that runs on a batch, to be planned for any number of ranks."""

    model: nn.Module
    run: Callable[[nn.Module], Any]
    passes: float | None  # measured seconds of forward and backward; None for simulated ones
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
        base = choices[0].stages[PASSES] + choices[0].stages.get("base", 0.0)
        if world_size > 1:
            trained = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
            base += self.network.all_reduce(trained, range(world_size))
        asked = [choice for choice in choices if choice.intervals == self.intervals[0]]
        best, reason = _recommended(asked, self.memory, self.machine)
        links = self.machine, self.network, self.memory
        return Plan(world_size, tuple(choices), best, reason, base, *links)

    def _choices(
        self, system: str, setting: str, keywords: dict[str, Any], ranks: int
    ) -> Iterator[Choice]:
        """A setting at each of the intervals.

        The first rank is recorded, and the one in the middle if it has duties that the first has
        not.
        """
        known = inspect.signature(SYSTEMS[system]).parameters
        own = {k: v for k, v in self.options.items() if k in known}
        every = {"factor_update_steps": 1, "inv_update_steps": 1}
        make = partial(SYSTEMS[system], **{**self.keywords, **own, **keywords, **every})
        given = make, self.model, self.run, self.machine, self.network
        records = [record(*given, 0, ranks)]
        if not records[0].covers_middle:
            records.append(record(*given, ranks // 2, ranks))
        due = {k: max(r.seconds.get(k, 0.0) for r in records) for r in records for k in r.seconds}
        sent = {k: max(r.sent.get(k, 0.0) for r in records) for r in records for k in r.sent}
        simulated = due.pop(ELSEWHERE)
        due = {PASSES: simulated if self.passes is None else self.passes, **due}
        hidden = max(r.hidden for r in records)
        if not self.machine.solves_beside:
            due["solve"], hidden = due.get("solve", 0.0) + hidden, 0.0
        fullest = max(records, key=lambda r: r.peak)
        memory = sum(p.nbytes for p in self.model.parameters()) + fullest.peak
        for pair in self.intervals:
            often = dict.fromkeys(STATISTICS, pair[0]) | dict.fromkeys(REFRESH, pair[1])
            stages = {stage: s / often.get(stage, 1) for stage, s in due.items()}
            yield Choice(
                system,
                setting,
                {**keywords, "factor_update_steps": pair[0], "inv_update_steps": pair[1]},
                pair,
                stages,
                max(sum(stages.values()), hidden / pair[1]),
                memory,
                fullest.kept,
                sum(nbytes / often.get(stage, 1) for stage, nbytes in sent.items()),
                hidden / pair[1],
                self.memory is None or memory <= self.memory,
            )


def _settings(
    system: str, ranks: int, solvers: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A system's settings that are compared, in words and as keywords."""
    if system != "KAISA" or ranks == 1:
        yield from (("", {"solver": solver}) for solver in solvers)
        return
    for solver, workers in itertools.product(solvers, workers_of(ranks, 4)):
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
        said += f"; {len(unfit)} do not fit into {_said(memory or 0)}, {quicker} of them faster"
    if best.system == "DPKFAC":
        said += "; its factors are of their owner's batches alone"
    if not machine.solves_beside and any(choice.system == "DistKFAC" for choice in choices):
        said += "; no core is left to DistKFAC's threads (spare_cores of the machine): its solves "
        said += "take training's time, and are counted in full"
    return best, said


def _bytes_of(size: int | str) -> int:
    """A number of bytes from a number, or a text like "80GB" or "512 MiB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\d+)?) *([KMGT]?)(I?)B?", str(size).strip().upper())
    nbytes = 0
    if found:
        unit = (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")
        nbytes = int(float(found[1]) * unit)
    if nbytes < 1:
        raise ValueError(f"memory={size!r} is not a number of bytes; write 80GB or 512MiB")
    return nbytes


def _said(size: float) -> str:
    """A number of bytes for tables."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def add_command(commands: Any) -> None:
    """Add ``plan`` to the commands of ``python -m second_order``."""
    parser = commands.add_parser(
        "plan",
        help="predict time, memory and bytes of every system and setting, and recommend one",
        description="Predict time, memory and bytes of every system and setting for some "
        "numbers of ranks, and recommend one. The machine at hand is measured for some seconds, "
        "unless numbers of another are given.",
    )
    parser.add_argument(
        "target",
        help=f"train.py, train.py:function or module:function; the function ({FUNCTION} where none "
        f"is named) takes no arguments and returns (model, batch): the batch of one rank, as the "
        f"model's arguments",
    )
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--memory", help="what a rank may use, as 80GB")
    parser.add_argument("--machine", type=Path, help="JSON of a machine's numbers; see the docs")
    parser.add_argument("--network", type=Path, help="JSON of a network's levels")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=list(SOLVERS))
    words = "factor_update_steps/inv_update_steps, as 10/100; the first is recommended for"
    parser.add_argument("--intervals", type=_intervals, nargs="+", default=[(10, 10)], help=words)
    parser.add_argument("--seconds", type=float, default=10.0, help="of measurement, up to 60")
    parser.add_argument("--json", type=Path, help="where to write the plans")
    parser.set_defaults(run=_run)


def _intervals(word: str) -> tuple[int, int]:
    first, slash, second = word.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal()):
        raise argparse.ArgumentTypeError(f"{word!r} is not two intervals, as 10/100")
    return int(first), int(second)


def _run(chosen: argparse.Namespace) -> int:
    """Plan, print a table for each number of ranks, and write JSON if it is asked for."""
    try:
        machine, network = _read(chosen.machine, Machine), _read(chosen.network, Interconnect)
        model, batch = _called(chosen.target)
        names = "memory", "systems", "solvers", "intervals", "seconds"
        wanted = {name: getattr(chosen, name) for name in names}
        first = plan(model, batch, chosen.world_sizes, machine=machine, network=network, **wanted)
    except (ValueError, TypeError, OSError, ImportError, SecondOrderError) as error:
        sys.stderr.write(f"python -m second_order plan: {error}\n")
        return 2
    plans = [first, *first.others]
    for each in plans:
        sys.stdout.write(f"{each.summary()}\n\n")
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(f"[{','.join(each.to_json() for each in plans)}]", "utf-8")
        sys.stdout.write(f"written: {chosen.json}\n")
    return 0 if all(each.recommended is not None for each in plans) else 1


def _read(path: Path | None, kind: Any) -> Any:
    """A machine or a network from a file, if one is named."""
    try:
        return path and kind.of_json(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no numbers of a {kind.__name__}: {error}") from None


def _called(target: str) -> tuple[nn.Module, Any]:
    """A model and a batch from a script's or a module's function."""
    place, _, name = target.partition(":")
    is_script = place.endswith(".py")
    first = str(Path(place).resolve().parent) if is_script else os.getcwd()  # noqa: PTH109
    with patch.multiple(sys, path=[first, *sys.path], argv=[place]):
        if is_script:  # not as __main__: a script's training stays behind its guard
            names = runpy.run_path(place, run_name="second_order_plan")
        else:
            names = vars(importlib.import_module(place))
        function = names.get(name or FUNCTION)
        found: Any = function() if callable(function) else None
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module):
        return found
    raise ValueError(
        f"{place} has no function {name or FUNCTION}() that takes nothing and returns (model, "
        f"batch), a torch.nn.Module and its arguments for one rank's batch; write it, or name "
        f"yours as {place}:function"
    )

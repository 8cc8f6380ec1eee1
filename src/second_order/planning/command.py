"""``python -m second_order plan``: what every system would cost on how many ranks."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from torch import nn

from second_order.planning.calibration import DEFAULT_NETWORKS
from second_order.planning.machine import Interconnect, Machine
from second_order.planning.plan import SYSTEMS, bytes_of, plan

__all__ = ["FUNCTION", "add_command", "run"]

FUNCTION = "model_and_batch"
"""The function that is called where none is named."""


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
    parser.add_argument("--world-sizes", type=_count, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--nodes-of", type=_count, metavar="N", help="ranks of each node")
    parser.add_argument("--memory", type=_memory, help="what a rank may use, as 80GB")
    parser.add_argument("--machine", type=Path, help="JSON of a machine's numbers; see the docs")
    parser.add_argument("--network", type=Path, help="JSON of a network's levels")
    for name, where in (("inside", "inside of a node"), ("between", "between nodes")):
        words = f"seconds of latency and bytes a second of a rank {where}"
        parser.add_argument(f"--{name}", type=_positive, nargs=2, help=words, metavar="X")
    systems = list(SYSTEMS)
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    solvers = ["inverse", "eigen"]
    parser.add_argument("--solvers", nargs="+", choices=solvers, default=solvers)
    words = "factor_update_steps/inv_update_steps, as 10/100; the first is recommended for"
    parser.add_argument("--intervals", type=_intervals, nargs="+", default=[(10, 10)], help=words)
    parser.add_argument("--seconds", type=_positive, default=10.0, help="of measurement, up to 60")
    parser.add_argument("--rows", type=_count, default=12, help="of each table")
    parser.add_argument("--json", type=Path, help="where to write the plans")
    parser.set_defaults(run=run)


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number, 1 or more")
    return int(word)


def _positive(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0")
    return value


def _memory(word: str) -> int:
    try:
        return bytes_of(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _intervals(word: str) -> tuple[int, int]:
    first, slash, second = word.partition("/")
    if not slash:
        raise argparse.ArgumentTypeError(f"{word!r} is not two intervals, as 10/100")
    return _count(first), _count(second)


def run(chosen: argparse.Namespace) -> int:
    """Plan, print a table for each number of ranks, and write JSON if it is asked for."""
    try:
        machine = None if chosen.machine is None else Machine.of_json(_read(chosen.machine))
        _network(chosen, "cpu")  # wrong numbers are told before the script is run
        model, batch = _called(chosen.target)
        device = next((p.device.type for p in model.parameters()), "cpu")
        network = _network(chosen, device if machine is None else machine.device)
        first = plan(
            model,
            batch,
            chosen.world_sizes,
            machine=machine,
            network=network,
            memory=chosen.memory,
            systems=chosen.systems,
            solvers=chosen.solvers,
            intervals=chosen.intervals,
            seconds=chosen.seconds,
        )
    except (ValueError, TypeError, OSError) as error:
        sys.stderr.write(f"python -m second_order plan: {error}\n")
        return 2
    plans = [first, *first.others]
    for each in plans:
        sys.stdout.write(f"{each.summary(chosen.rows)}\n\n")
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps([each.as_json() for each in plans], indent=1), "utf-8")
        sys.stdout.write(f"written: {chosen.json}\n")
    return 0 if all(each.recommended is not None for each in plans) else 1


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; give an object of numbers")
    return found


def _network(chosen: argparse.Namespace, device: str) -> Interconnect | None:
    """The network that is asked for; None for the default of the device."""
    parts = [chosen.nodes_of, chosen.inside, chosen.between]
    if chosen.network is not None:
        if any(part is not None for part in parts):
            raise ValueError("--network has all levels; leave out --nodes-of, --inside, --between")
        return Interconnect.of_json(_read(chosen.network))
    if all(part is None for part in parts):
        return None
    levels = DEFAULT_NETWORKS[device if device in DEFAULT_NETWORKS else "cuda"].levels
    inside = chosen.inside or (levels[0].latency, levels[0].bandwidth)
    between = chosen.between or (levels[-1].latency, levels[-1].bandwidth)
    if chosen.nodes_of is None:
        if chosen.inside is not None:
            raise ValueError("--inside needs --nodes-of, the number of ranks of a node")
        return Interconnect.flat(*between)
    return Interconnect.of_nodes(chosen.nodes_of, tuple(inside), tuple(between))


def _called(target: str) -> tuple[nn.Module, Any]:
    """A model and a batch from a script's or a module's function."""
    place, colon, name = target.rpartition(":")
    if not colon:
        place, name = target, FUNCTION
    is_script = place.endswith(".py")
    if is_script and not Path(place).is_file():
        raise ValueError(f"{place} is not a file; give train.py, or a module's name and function")
    first = str(Path(place).resolve().parent) if is_script else os.getcwd()  # noqa: PTH109
    with patch.object(sys, "path", [first, *sys.path]), patch.object(sys, "argv", [place]):
        if is_script:
            # Not as __main__: a script's training stays behind its guard.
            names = runpy.run_path(place, run_name="second_order_plan")
        else:
            try:
                names = vars(importlib.import_module(place))
            except ModuleNotFoundError as error:
                raise ValueError(f"{place!r}: {error}; give train.py or module:function") from None
        function = names.get(name)
        if not callable(function):
            raise ValueError(
                f"{place} has no function {name!r}; write one that takes nothing and returns "
                f"(model, batch), or name yours as {place}:function"
            )
        found = cast("Callable[[], Any]", function)()
    pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)
    if not pair:
        raise ValueError(
            f"{name}() of {place} returns a {type(found).__name__}, not (model, batch): a "
            f"torch.nn.Module, and its arguments for one rank's batch"
        )
    return cast("tuple[nn.Module, Any]", found)

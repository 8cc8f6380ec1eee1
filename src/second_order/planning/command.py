"""``python -m second_order plan``: what every system would cost on how many ranks."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from second_order.errors import SecondOrderError
from second_order.planning.machine import Interconnect, Machine
from second_order.planning.plan import SYSTEMS, plan

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
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--memory", help="what a rank may use, as 80GB")
    parser.add_argument("--machine", type=Path, help="JSON of a machine's numbers; see the docs")
    parser.add_argument("--network", type=Path, help="JSON of a network's levels")
    systems, solvers = list(SYSTEMS), ["inverse", "eigen"]
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument("--solvers", nargs="+", choices=solvers, default=solvers)
    words = "factor_update_steps/inv_update_steps, as 10/100; the first is recommended for"
    parser.add_argument("--intervals", type=_intervals, nargs="+", default=[(10, 10)], help=words)
    parser.add_argument("--seconds", type=float, default=10.0, help="of measurement, up to 60")
    parser.add_argument("--json", type=Path, help="where to write the plans")
    parser.set_defaults(run=run)


def _intervals(word: str) -> tuple[int, int]:
    first, slash, second = word.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal()):
        raise argparse.ArgumentTypeError(f"{word!r} is not two intervals, as 10/100")
    return int(first), int(second)


def run(chosen: argparse.Namespace) -> int:
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

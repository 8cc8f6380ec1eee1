"""The size of the code that you read to follow one step of each optimizer.

    python benchmarks/reading/structure.py --json benchmarks/results/structure.json
    python benchmarks/reading/structure.py --list KAISA
    python benchmarks/reading/structure.py --list measure

For each optimizer, the script takes a step with all refreshes due, in one process with two Linear
layers. It counts the files and functions of the package that the step enters, the lines of all
classes of the optimizer, and its attributes. For the whole package, it counts the lines of code,
and accesses to private names of another file's classes. With ``--list``, it prints the names of the
functions that the step of one optimizer, or a pass of ``measure``, enters.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import reporting
import second_order
from second_order import (
    DHO2,
    DPKFAC,
    KAISA,
    MRDHO2,
    DistKFAC,
    SecondOrderOptimizer,
    SecondOrderWarning,
)

PACKAGE = Path(second_order.__file__).parent
DUE: dict[type[SecondOrderOptimizer], dict[str, Any]] = {
    KAISA: {},
    DPKFAC: {},
    DistKFAC: {"max_staleness": 0},
    DHO2: {"warmup_steps": 0, "curvature_interval": 1, "num_largest": 2, "lanczos_iterations": 5},
    MRDHO2: {"epoch_steps": 1, "num_largest": 2, "lanczos_iterations": 5},
}


KFAC = (KAISA, DPKFAC, DistKFAC)
QUIET = {"factor_update_steps": 1000, "inv_update_steps": 1000}


def entered(work: Callable[[], Any]) -> tuple[set[str], set[tuple[str, str]]]:
    """Files and functions of the package that a call enters."""
    files: set[str] = set()
    functions: set[tuple[str, str]] = set()

    def enter(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            files.add(name)
            functions.add((name, frame.f_code.co_qualname if sys.version_info >= (3, 11) else ""))

    sys.setprofile(enter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return files, functions


def measured() -> tuple[set[str], set[tuple[str, str]]]:
    """Files and functions that a pass of `measure` over the data enters."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    batches = [torch.randn(8, 4) for _ in range(2)]
    run: Any = importlib.import_module("second_order.measuring.measure")
    accumulate = run.accumulate
    found = []

    def watched(*arguments: Any) -> Any:
        result = []
        found.append(entered(lambda: result.append(accumulate(*arguments))))
        return result[0]

    for name in (accumulate, watched):  # the first call imports modules
        run.accumulate = name
        run.measure(model, batches, factors="kfac", progress=False)
    run.accumulate = accumulate
    return found[0]


def stepped(System: Any, quiet: bool = False) -> tuple[set[str], set[tuple[str, str]], int]:
    """Files and functions that one step enters, and the number of the optimizer's attributes.

    The first step, at which everything is due; or a ``quiet`` one long after it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    x = torch.randn(8, 4)
    y = torch.randint(3, (8,))
    loss = nn.functional.cross_entropy
    optimizer = System(model, lr=0.1, **(DUE[System] | (QUIET if quiet else {})))
    if isinstance(optimizer, DHO2):
        optimizer.curvature_closure = lambda: loss(model(x), y)
    for _ in range(110 if quiet else 0):
        loss(model(x), y).backward()
        optimizer.step()
    loss(model(x), y).backward()
    files, functions = entered(optimizer.step)
    attributes = len(vars(optimizer))
    if hasattr(optimizer, "close"):
        optimizer.close()
    return files, functions, attributes


def comprehensions(functions: Iterable[tuple[str, str]]) -> int:
    """How many of the functions are comprehensions, which Python 3.11 calls as functions."""
    return sum(name.endswith(("comp>", "genexpr>")) for _, name in functions)


def _quiet(System: type[SecondOrderOptimizer]) -> dict[str, int]:
    """The same counts for a step without a refresh, or zeros if that is not measured."""
    if System not in KFAC:
        counts = (0, 0, 0)
    else:
        files, functions, _ = stepped(System, quiet=True)
        counts = (len(files), len(functions), comprehensions(functions))
    return {
        "files, nothing due": counts[0],
        "functions, nothing due": counts[1],
        "of them comprehensions, nothing due": counts[2],
    }


def lines_in_self(System: type[SecondOrderOptimizer]) -> int:
    """Lines of the optimizer's class and of its base classes in the package."""
    classes = [c for c in System.__mro__ if c.__module__.startswith("second_order.")]
    return sum(len(inspect.getsourcelines(c)[0]) for c in classes)


@functools.cache
def private_names() -> dict[str, set[Path]]:
    """The files in which a class sets or defines a private name, by name."""
    found: dict[str, set[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ClassDef):
                names += [f.name for f in node.body if isinstance(f, ast.FunctionDef)]
                names += [
                    target.id
                    for f in node.body
                    for target in _targets(f)
                    if isinstance(target, ast.Name)
                ]
            names += [
                target.attr
                for target in _targets(node)
                if isinstance(target, ast.Attribute) and _is_self(target.value)
            ]
            for name in names:
                if name.startswith("_") and not name.startswith("__"):
                    found.setdefault(name, set()).add(path)
    return found


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part for t in node.targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])
        ]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_privates() -> Counter[str]:
    """Accesses to private names that only classes of other files have, by file."""
    owners = private_names()
    counts = Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in owners:
                counts[path.name] += path not in owners[node.attr]
    return +counts


def list_functions(functions: Iterable[tuple[str, str]]) -> None:
    """Print functions by file, the file with the most functions first."""
    by_file: dict[str, list[str]] = {}
    for file, name in functions:
        by_file.setdefault(str(Path(file).relative_to(PACKAGE)), []).append(name)
    for file in sorted(by_file, key=lambda file: -len(by_file[file])):
        print(f"{file}: {len(by_file[file])}")
        for name in sorted(by_file[file]):
            print(f"    {name.replace('<locals>.', '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [System.__name__ for System in DUE]
    parser.add_argument(
        "--list",
        choices=[*names, "measure"],
        help="only list the functions of one optimizer, or of a pass of measure",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SecondOrderWarning)
    if arguments.list == "measure":
        list_functions(measured()[1])
        return
    if arguments.list:
        (listed,) = (System for System in DUE if System.__name__ == arguments.list)
        list_functions(stepped(listed)[1])
        return
    figures: dict[str, Any] = {}
    for System in DUE:
        files, functions, attributes = stepped(System)
        figures[System.__name__] = {
            "files entered": len(files),
            "functions entered": len(functions),
            "of them comprehensions": comprehensions(functions),
            **_quiet(System),
            "lines in one self": lines_in_self(System),
            "attributes": attributes,
        }
    rows = list(figures["KAISA"])
    print(f"{'':36}" + "".join(f"{name:>10}" for name in figures))
    for row in rows:
        print(f"{row:36}" + "".join(f"{figures[name][row]:10,}" for name in figures))
    files, functions = measured()
    print(
        f"a pass of measure: {len(files)} files, {len(functions)} functions entered, "
        f"{comprehensions(functions)} of them comprehensions"
    )
    foreign = foreign_privates()
    lines = sum(len(p.read_text("utf-8").splitlines()) for p in PACKAGE.rglob("*.py"))
    worst = ", ".join(f"{name} {count}" for name, count in foreign.most_common(4))
    print(f"private names of other files: {foreign.total()} ({worst}); lines of code: {lines:,}")
    figures["package"] = {"foreign privates": dict(foreign), "lines": lines}
    reporting.store(arguments.json, **figures)


if __name__ == "__main__":
    main()

"""Faults put into the source one at a time, and whether the tests notice: `make mutants`.

Each mutant is a small change of behaviour (`mutations.py`) with the tests that are to notice it. A
copy of the repository is made for each job; the package is imported from there by the tests and by
the processes that they start. First all of these tests run without a mutant, and must pass. Each
run is a fork of this process, which has imported torch and not the package.

    python tests/mutants.py --only "a clip" --jobs 2

A mutant whose text no longer occurs exactly once in its file is stale: an error, as is one with
which nothing can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mutations import MUTANTS, Mutant

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/second_order")
COPIED = ("src", "tests", "examples", "benchmarks", "pyproject.toml", "setup.cfg", "README.md")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "results", "*.egg-info", ".hypothesis")
IMPORTED = ("pytest", "_pytest.assertion.rewrite", "hypothesis", "numpy", "torch.distributed")
FORK = multiprocessing.get_context("fork")
NOTICED = "noticed"
MISSED = "not noticed"
TIMED_OUT = "out of time"
STALE = "stale"
BROKEN = "error"
RESULTS = {0: MISSED, 1: NOTICED, None: TIMED_OUT}  # by the exit code of pytest
ELSEWHERE = 99  # the exit code if the package was imported from another place


@dataclass(frozen=True)
class Outcome:
    """The result of a mutant."""

    mutant: Mutant
    result: str
    seconds: float = 0.0
    output: str = ""


def mutated(source: str, mutant: Mutant) -> str | None:
    """The source with the mutant; None if its text does not occur exactly once."""
    return source.replace(mutant.old, mutant.new) if source.count(mutant.old) == 1 else None


@functools.cache
def _homes() -> dict[str, list[Path]]:
    """The files that have a test, by its name, wherever it has moved to."""
    homes: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def test_(\w+)\(", path.read_text("utf-8"), re.MULTILINE):
            homes.setdefault(name, []).append(path)
    return homes


def nodes(mutant: Mutant) -> list[str]:
    """The names that pytest has for the tests of a mutant.

    "kaisa::x" is short for test_x of test_kaisa.py, or else of a file whose name begins like that.
    """
    found = []
    for file, name in (test.split("::") for test in mutant.tests):
        files = _homes().get(name.split("[")[0], [])
        ranked = sorted(files, key=lambda p, f=file: (not p.stem.startswith(f"test_{f}"), p.stem))
        assert ranked, f"{mutant.name}: there is no test_{name}"
        found.append(f"{ranked[0].relative_to(ROOT)}::test_{name}")
    return found


def copy(into: Path) -> Path:
    """Copy the part of the repository that the tests need."""
    for name in COPIED:
        source = ROOT / name
        target = into / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=LEFT_OUT)
        else:
            shutil.copy2(source, target)
    return into


def be_pytest(place: Path, tests: Sequence[str]) -> None:
    """In the fork: run tests in a copy, and leave with pytest's exit code."""
    os.setsid()
    with (place / "output.txt").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(place)
    os.environ |= {
        "PYTHONPATH": str(place / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",  # two versions of a file in one second look alike
        "OMP_NUM_THREADS": "1",
    }
    sys.dont_write_bytecode = True
    others = [p for p in sys.path if "site-packages" in p or not p.startswith(str(ROOT))]
    sys.path[:] = [str(place / "src"), *others]
    import pytest

    code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    package = sys.modules.get("second_order")
    here = package is None or str(package.__file__).startswith(str(place))
    sys.stdout.flush()
    os._exit(code if here else ELSEWHERE)


def run(place: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, float]:
    """Tests in a copy: the exit code, None of a run that was out of time, and the seconds taken."""
    started = time.monotonic()
    process = FORK.Process(target=be_pytest, args=(place, tests))
    process.start()
    process.join(seconds)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError):  # processes that remain
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return code, time.monotonic() - started


def output_of(place: Path) -> str:
    path = place / "output.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def tried(mutant: Mutant, place: Path, seconds: float) -> Outcome:
    """Put it in, run its tests, and take it out."""
    path = place / PACKAGE / mutant.file
    source = path.read_text("utf-8")
    changed = mutated(source, mutant)
    if changed is None:
        return Outcome(mutant, STALE)
    path.write_text(changed, "utf-8")
    code, elapsed = run(place, nodes(mutant), seconds)
    path.write_text(source, "utf-8")
    return Outcome(mutant, RESULTS.get(code, BROKEN), elapsed, output_of(place))


def try_all(mutants: Sequence[Mutant], jobs: int, seconds: float) -> list[Outcome]:
    """Each of them, in as many copies as there are jobs."""
    with tempfile.TemporaryDirectory(prefix="mutants") as directory:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            place = Path(directory) / str(job)
            place.mkdir()
            free.put(copy(place))
        tests = sorted({node for mutant in mutants for node in nodes(mutant)})
        code, elapsed = run(place, tests, seconds * len(mutants))
        if code != 0:
            raise SystemExit(f"the tests do not pass without a mutant:\n{output_of(place)[-4000:]}")
        print(f"{len(tests)} tests pass without a mutant: {elapsed:.0f} s", flush=True)

        def one(mutant: Mutant) -> Outcome:
            place = free.get()
            outcome = tried(mutant, place, seconds)
            free.put(place)
            print(f"{outcome.result:12}{outcome.seconds:6.1f} s  {mutant.name}", flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


def report(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write what has become of each."""
    counts = Counter(outcome.result for outcome in outcomes)
    summary = {
        "mutants": len(outcomes),
        **{result: counts[result] for result in (NOTICED, TIMED_OUT, MISSED, STALE, BROKEN)},
        "results": [
            {
                "name": outcome.mutant.name,
                "file": outcome.mutant.file,
                "tests": nodes(outcome.mutant),
                "result": outcome.result,
            }
            for outcome in outcomes
        ],
    }
    path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="a part of a name; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--seconds", type=float, default=180.0, help="that the tests of one take")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
    parser.add_argument("--verbose", action="store_true", help="print what the tests say")
    arguments = parser.parse_args()
    only = arguments.only
    mutants = [m for m in MUTANTS if not only or any(part in m.name for part in only)]
    if not mutants:
        raise SystemExit(f"no mutant has {' or '.join(only)} in its name; see --list")
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.file:36}{mutant.name}")
        return
    started = time.monotonic()
    for name in IMPORTED:
        importlib.import_module(name)
    outcomes = try_all(mutants, arguments.jobs, arguments.seconds)
    seen = [outcome for outcome in outcomes if outcome.result in (NOTICED, TIMED_OUT)]
    for outcome in outcomes:
        if outcome.result != NOTICED or arguments.verbose:
            print(f"\n{outcome.result}: {outcome.mutant.name} ({outcome.mutant.file})")
            print("\n".join(outcome.output.splitlines()[-30:]) if arguments.verbose else "")
    share = len(seen) / len(outcomes)
    minutes = (time.monotonic() - started) / 60
    print(f"\n{len(seen)} of {len(outcomes)} noticed ({share:.0%}), in {minutes:.0f} minutes")
    if arguments.json is not None:
        report(outcomes, arguments.json)
    if share < 0.95 or any(outcome.result in (STALE, BROKEN) for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Random runs of every optimizer: random models, options and scripts, on one to three ranks.

    python tests/fuzz/fuzz.py --examples 1000 --json benchmarks/results/fuzz.json

A seed determines an example: `--first 123 --examples 1` plays number 123 again, and `--show` prints
it. `fuzz_training.py` lists the outcomes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # for the pool, as in the tests
from pool import PoolTimeoutError, WorkerDiedError, WorkerError, World

from fuzz_training import Example, Outcome, Reported, draw_example, judge, train

TIMEOUT = 120.0  # seconds of one example
OUTCOMES = ("trains", "refused", "raises", "by base", "diverges", "finding")


def play(world: World, example: Example, timeout: float = TIMEOUT) -> Outcome:
    """Play an example on processes of the pool."""
    try:
        results = world.run(train, example.ranks, example, timeout=timeout, expect_errors=True)
    except PoolTimeoutError as error:
        cause = error.__cause__.original if isinstance(error.__cause__, WorkerError) else None
        first = f", after {cause.report['traceback']}" if isinstance(cause, Reported) else ""
        return Outcome("finding", f"hung: {error}"[:200], f"{error}{first}")
    except WorkerDiedError as error:
        return Outcome("finding", f"died: {error}", str(error))
    return judge(example, results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first example")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    parser.add_argument("--show", action="store_true", help="show the examples and the tracebacks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = World()
    started = time.monotonic()
    found: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    try:
        for seed in range(arguments.first, arguments.first + arguments.examples):
            example = draw_example(Random(seed))
            if arguments.show:
                print(example, flush=True)
            start = time.monotonic()
            outcome = play(world, example)
            seconds = round(time.monotonic() - start, 2)
            counts[outcome.name] += 1
            row = {"seed": seed, "system": example.system, "processes": example.ranks}
            found.append(
                {**row, "outcome": outcome.name, "detail": outcome.detail, "seconds": seconds}
            )
            if outcome.name == "finding" or arguments.show:
                print(
                    f"\n{seed} {example.system} {example.ranks}: {outcome.name}: {outcome.detail}"
                )
                print(outcome.whole if arguments.show else "", flush=True)
            if sys.stdout.isatty() or seed % 50 == 49:
                summary = ", ".join(f"{n} {name}" for name, n in counts.most_common())
                print(f"\r{len(found)} of {arguments.examples}: {summary}", end="", flush=True)
    finally:
        world.close()
    print(f"\n{len(found)} examples, {time.monotonic() - started:.0f} s: {dict(counts)}")
    if arguments.json:
        about = {"machine": platform.machine(), "torch": torch.__version__}
        rows = ",\n".join(json.dumps(row) for row in found)
        head = json.dumps({**about, "first": arguments.first})[:-1]
        arguments.json.write_text(f'{head}, "results": [\n{rows}\n]}}\n')
    return int(counts["finding"] > 0)


if __name__ == "__main__":
    sys.exit(main())

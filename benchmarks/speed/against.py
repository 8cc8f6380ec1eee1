"""Step times of this source compared with those of another commit, measured in one run.

    git worktree add /tmp/before COMMIT
    make against ARGS="/tmp/before/src"

The two sources take turns, because other processes on the machine then slow down both. Each
measurement runs in a new process with one thread. For each kind of step (see `measure.py`), the
script prints the ratio of the medians over all turns, and the range of the ratios per turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import reporting
from measure import KINDS, measure_steps
from variants import VARIANTS
from workloads import WORKLOADS

THIS_FILE = Path(__file__).resolve()
SOURCE = THIS_FILE.parents[2] / "src"


def measure_here(workload: str, variant: str, repeats: int) -> None:
    """Measure the source that is on the path, and print the result as JSON."""
    torch.set_num_threads(1)
    result = measure_steps(WORKLOADS[workload], VARIANTS[variant], repeats)
    print(json.dumps(result["milliseconds"]))


def measure_source(source: Path, workload: str, variant: str, repeats: int) -> dict[str, float]:
    """Milliseconds of each kind of step with one source, measured in a new process."""
    arguments = [sys.executable, str(THIS_FILE), "--child", workload, variant, str(repeats)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{source}:{THIS_FILE.parents[1]}",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{workload}, {variant} with {source}:\n{process.stderr}")
    milliseconds: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return milliseconds


def print_ratios(workload: str, variant: str, turns: dict[str, list[dict[str, float]]]) -> None:
    """Print a line for each kind of step."""
    for kind in KINDS:
        times_before = [turn[kind] for turn in turns["before"]]
        times_now = [turn[kind] for turn in turns["now"]]
        ratio = statistics.median(times_now) / statistics.median(times_before)
        pairs = zip(times_now, times_before, strict=True)
        ratios = sorted(now / before for now, before in pairs)
        print(
            f"{workload:12} {variant:8} {kind:10} {statistics.median(times_now):8.2f} ms"
            f"  x {ratio:.3f}  (turns {ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


def main() -> None:
    """Compare, print a line for each workload, variant and kind of step, and store the turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, help="the folder of the other source")
    parser.add_argument("--workloads", nargs="+", default=["resnet20", "mlp", "transformer"])
    parser.add_argument("--variants", nargs="+", default=["eigen", "inverse"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="steps of each kind per turn")
    parser.add_argument("--json", type=Path, help="write the turns to this file")
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    for workload in arguments.workloads:
        for variant in arguments.variants:
            turns: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
            for _ in range(arguments.turns):
                for name, source in (("before", arguments.before), ("now", SOURCE)):
                    times = measure_source(source, workload, variant, arguments.repeats)
                    turns[name].append(times)
            records.append({"workload": workload, "variant": variant, "turns": turns})
            print_ratios(workload, variant, turns)
    reporting.store(arguments.json, records=records)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure_here(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()

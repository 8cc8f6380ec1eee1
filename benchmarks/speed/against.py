"""The step time of this source against that of another commit's, both measured in one run.

    git worktree add /tmp/before COMMIT
    make against ARGS="/tmp/before/src"

Each workload and variant is measured in turns, a process of its own with one thread each time, so
that what else the machine does falls on both alike. Of each kind of step (see `measure.py`) the
ratio of the medians over all turns is printed, and the spread of the turns' own ratios.
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

HERE = Path(__file__).resolve()
SOURCE = HERE.parents[2] / "src"


def child(workload: str, variant: str, repeats: int) -> None:
    """Measure here, by whatever source is on the path."""
    torch.set_num_threads(1)
    found = measure_steps(WORKLOADS[workload], VARIANTS[variant], repeats)
    print(json.dumps(found["milliseconds"]))


def measured(source: Path, workload: str, variant: str, repeats: int) -> dict[str, float]:
    """The milliseconds of each kind of step, by one source."""
    arguments = [sys.executable, str(HERE), "--child", workload, variant, str(repeats)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{source}:{HERE.parents[1]}",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{workload}, {variant} by {source}:\n{run.stderr}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Compare, print a line for each workload, variant and kind of step, and keep the turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, help="the other source's folder")
    parser.add_argument("--workloads", nargs="+", default=["resnet20", "mlp", "transformer"])
    parser.add_argument("--variants", nargs="+", default=["eigen", "inverse"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="of every kind of step, in a turn")
    parser.add_argument("--json", type=Path, help="write the turns there")
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    for workload in arguments.workloads:
        for variant in arguments.variants:
            turns: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
            for _ in range(arguments.turns):
                for name, source in (("before", arguments.before), ("now", SOURCE)):
                    turns[name].append(measured(source, workload, variant, arguments.repeats))
            records.append({"workload": workload, "variant": variant, "turns": turns})
            for kind in KINDS:
                times = {k: [turn[kind] for turn in found] for k, found in turns.items()}
                ratio = statistics.median(times["now"]) / statistics.median(times["before"])
                each = sorted(n / b for n, b in zip(times["now"], times["before"], strict=True))
                print(
                    f"{workload:12} {variant:8} {kind:10} {statistics.median(times['now']):8.2f} ms"
                    f"  x {ratio:.3f}  (turns {each[0]:.3f} to {each[-1]:.3f})",
                    flush=True,
                )
    reporting.store(arguments.json, records=records)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()

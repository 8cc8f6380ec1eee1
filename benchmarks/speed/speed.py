"""The time of a second-order step, as a multiple of SGD's, on networks of realistic size.

    python benchmarks/speed/speed.py                          everything this machine can run
    python benchmarks/speed/speed.py --workloads mlp --variants eigen inverse --repeats 3

Each workload and variant is measured in processes of its own with one thread each; see `measure.py`
for what is timed. The floor, in parentheses, is the same work as bare library calls on one process:
see `floor.py`. "every step" refreshes statistics and inverses at every step; "10 / 100" takes
statistics every 10 and inverses every 100 steps, and is the mean over such a hundred. Memory is
measured in further processes, since what has been allocated once never shows again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import reporting
from floor import floor_ratios, measure_floor
from measure import measure_memory, measure_steps, process_group
from variants import VARIANTS, Variant
from workloads import WORKLOADS, Workload

MB = 1e6

# ---------------------------------------------------------------------------------- one process


def work(arguments: argparse.Namespace) -> None:
    """Measure one thing, and leave the result in a file."""
    torch.set_num_threads(1)
    workload = WORKLOADS[arguments.workloads[0]]
    variant = VARIANTS[arguments.variants[0]] if arguments.variants else None
    with process_group(workload.device) as rank:
        if arguments.worker == "floor":
            result: dict[str, Any] = measure_floor(workload, arguments.repeats)
        elif arguments.worker == "memory":
            result = measure_memory(workload, variant)
        else:
            assert variant is not None
            result = measure_steps(workload, variant, arguments.repeats)
    if rank == 0:
        arguments.json.write_text(json.dumps(result))


def in_processes(
    what: str, workload: Workload, variant: Variant | None, repeats: int, processes: int = 1
) -> dict[str, Any]:
    """The result of `work` in one process or more, started for it.

    Raises:
        RuntimeError: With what the processes wrote, if one fails.
    """
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        command += [__file__, "--worker", what, "--workloads", workload.name]
        command += ["--repeats", str(repeats), "--json", str(output)]
        if variant is not None:
            command += ["--variants", variant.name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not output.exists():
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        result: dict[str, Any] = json.loads(output.read_text())
    return result


# ------------------------------------------------------------------------------------- all of it


def measure(
    workload: Workload, variant: Variant, repeats: int, sgd_memory: dict[str, Any] | None
) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {
        "workload": workload.name,
        "variant": variant.name,
        "solver": variant.solver,
        "placement": variant.placement,
        "processes": variant.processes,
        **in_processes("steps", workload, variant, repeats, variant.processes),
    }
    if sgd_memory is not None:
        ours = in_processes("memory", workload, variant, repeats, variant.processes)
        row["memory"] = {
            "optimizer_bytes": ours["peak_bytes"],
            "sgd_bytes": sgd_memory["peak_bytes"],
            "bytes_after_import": ours["bytes_after_import"],
            "ratio": ours["peak_bytes"] / sgd_memory["peak_bytes"],
        }
    return row


def runnable(
    workloads: Sequence[Workload], variants: Sequence[Variant], console: Console
) -> list[tuple[Workload, list[Variant]]]:
    """What this machine can run; the rest is named."""
    plan = []
    for workload in workloads:
        if not workload.available:
            console.print(f"{workload.name}: skipped, needs CUDA")
            continue
        devices = torch.cuda.device_count() if workload.device == "cuda" else sys.maxsize
        possible = [variant for variant in variants if variant.processes <= devices]
        for variant in variants:
            if variant not in possible:
                console.print(f"{workload.name}, {variant.name}: skipped, needs more GPUs")
        plan.append((workload, possible))
    return plan


def run(
    plan: Sequence[tuple[Workload, Sequence[Variant]]],
    repeats: int,
    *,
    memory: bool,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure all of a plan, one thing at a time; what there is so far is always in the file."""
    rows: list[dict[str, Any]] = []
    floors: dict[str, dict[str, float]] = {}
    record = {"repeats": repeats, "floors": floors, "rows": rows}
    bar = tqdm(total=sum(1 + len(variants) for _, variants in plan), leave=False)
    for workload, variants in plan:
        bar.set_description(f"{workload.name}, floor")
        floors[workload.name] = in_processes("floor", workload, None, repeats)
        bar.update()
        sgd_memory: dict[int, dict[str, Any]] = {}
        for variant in variants:
            bar.set_description(f"{workload.name}, {variant.name}")
            size = variant.processes
            if memory and size not in sgd_memory:
                sgd_memory[size] = in_processes("memory", workload, None, repeats, size)
            rows.append(measure(workload, variant, repeats, sgd_memory.get(size)))
            reporting.store(output, **rounded(record))
            bar.update()
    bar.close()
    return record


def rounded(value: Any) -> Any:
    """Numbers to four digits after the point: what the clock is good for."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return round(value, 4) if isinstance(value, float) else value


# ----------------------------------------------------------------------------------- the results


def sent_megabytes(row: dict[str, Any], kind: str = "full") -> float:
    """What a process sends because of second order: the mean of the gradients is not counted."""
    sent: dict[str, int] = row["sent"].get(kind, {})
    return sum(count for category, count in sent.items() if category != "averaging") / MB


def table(record: dict[str, Any]) -> Table:
    """A row for each workload and variant."""
    rows: list[list[str] | None] = []
    previous = None
    for row in record["rows"]:
        if previous not in (None, row["workload"]):
            rows.append(None)
        floors = ("", "")
        if row["processes"] == 1:
            times = record["floors"][row["workload"]]
            sgd = row["milliseconds"]["sgd"]
            ratios = floor_ratios(times, row["solver"], sgd)
            floors = (f" ({ratios[0]:.2f})", f" ({ratios[1]:.2f})")
        many = row["processes"] > 1
        rows.append(
            [
                "" if row["workload"] == previous else row["workload"],
                row["solver"],
                f"{row['placement']} × {row['processes']}" if many else row["placement"],
                f"{row['milliseconds']['sgd']:.1f}",
                f"{row['every_step']:.2f}{floors[0]}",
                f"{row['every_10_and_100']:.2f}{floors[1]}",
                f"{(row['factor_bytes'] + row['inverse_bytes']) / MB:.1f}",
                f"{row['memory']['ratio']:.2f}" if "memory" in row else "",
                f"{sent_megabytes(row):.1f}" if many else "",
            ]
        )
        previous = row["workload"]
    title = "Step time as a multiple of SGD's (floor); memory and bytes of one process"
    words = "workload", "solver", "placement"
    numbers = "SGD ms", "every step", "10 / 100", "state MB", "peak memory", "sent MB"
    return reporting.table(title, (*words, *numbers), rows, left=3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[])
    parser.add_argument("--repeats", type=int, default=7, help="of every kind of step")
    parser.add_argument("--processes", type=int, help="of the variants with more than one")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--worker", choices=("steps", "memory", "floor"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    variants = [VARIANTS[name] for name in options.variants or VARIANTS]
    if options.processes:
        variants = [
            replace(v, processes=options.processes) if v.processes > 1 else v for v in variants
        ]
    plan = runnable([WORKLOADS[name] for name in options.workloads], variants, console)
    if not plan:
        return
    record = run(plan, options.repeats, memory=not options.skip_memory, output=options.json)
    reporting.show(table(record))


if __name__ == "__main__":
    main()

"""The time of a second-order step, as a multiple of SGD's, on networks of realistic size.

    python benchmarks/speed/speed.py                          everything this machine can run
    python benchmarks/speed/speed.py --workloads mlp --variants eigen inverse --repeats 3

Each workload and variant is measured in separate processes with one thread each. `measure.py`
defines what is timed. The floor, in parentheses, is the same work as bare library calls in one
process (see `floor.py`).

"every step" updates statistics and inverses at every step. "10 / 100" updates statistics every 10
steps and inverses every 100, and is the mean over 100 steps. Memory is measured in separate
processes, because a process's peak never falls.
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
    """Make one measurement, and write the result to a file."""
    torch.set_num_threads(1)
    workload = WORKLOADS[arguments.workloads[0]]
    variant = None
    if arguments.variants:
        variant = VARIANTS[arguments.variants[0]]
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


def run_in_processes(
    what: str, workload: Workload, variant: Variant | None, repeats: int, processes: int = 1
) -> dict[str, Any]:
    """Start one process or more, run `work` in them, and return the result.

    Raises:
        RuntimeError: If a process fails, with the output of the processes.
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
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if process.returncode or not output.exists():
            printed = f"{process.stdout}\n{process.stderr}"
            raise RuntimeError(f"{' '.join(command)} failed:\n{printed}")
        result: dict[str, Any] = json.loads(output.read_text())
    return result


# ------------------------------------------------------------------------------------- all of it


def measure(
    workload: Workload, variant: Variant, repeats: int, sgd_memory: dict[str, Any] | None
) -> dict[str, Any]:
    """Measure one row of the table."""
    row: dict[str, Any] = {
        "workload": workload.name,
        "variant": variant.name,
        "solver": variant.solver,
        "placement": variant.placement,
        "processes": variant.processes,
        **run_in_processes("steps", workload, variant, repeats, variant.processes),
    }
    if sgd_memory is not None:
        memory = run_in_processes("memory", workload, variant, repeats, variant.processes)
        row["memory"] = {
            "optimizer_bytes": memory["peak_bytes"],
            "sgd_bytes": sgd_memory["peak_bytes"],
            "bytes_after_import": memory["bytes_after_import"],
            "ratio": memory["peak_bytes"] / sgd_memory["peak_bytes"],
        }
    return row


def runnable(
    workloads: Sequence[Workload], variants: Sequence[Variant], console: Console
) -> list[tuple[Workload, list[Variant]]]:
    """The workloads and variants that this machine can run. Prints which ones are skipped."""
    plan = []
    for workload in workloads:
        if not workload.available:
            console.print(f"{workload.name}: skipped, needs CUDA")
            continue
        max_processes = sys.maxsize
        if workload.device == "cuda":
            max_processes = torch.cuda.device_count()
        possible = [variant for variant in variants if variant.processes <= max_processes]
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
    """Measure all workloads and variants of a plan, and write the file after each of them."""
    rows: list[dict[str, Any]] = []
    floors: dict[str, dict[str, float]] = {}
    record = {"repeats": repeats, "floors": floors, "rows": rows}
    bar = tqdm(total=sum(1 + len(variants) for _, variants in plan), leave=False)
    for workload, variants in plan:
        # The floor needs one process per workload.
        bar.set_description(f"{workload.name}, floor")
        floors[workload.name] = run_in_processes("floor", workload, None, repeats)
        bar.update()

        # SGD's memory is measured once per number of processes.
        sgd_memory: dict[int, dict[str, Any]] = {}
        for variant in variants:
            bar.set_description(f"{workload.name}, {variant.name}")
            size = variant.processes
            if memory and size not in sgd_memory:
                sgd_memory[size] = run_in_processes("memory", workload, None, repeats, size)
            rows.append(measure(workload, variant, repeats, sgd_memory.get(size)))
            reporting.store(output, **round_numbers(record))
            bar.update()
    bar.close()
    return record


def round_numbers(value: Any) -> Any:
    """Round all numbers of a record to four decimals, which is the precision of the clock."""
    if isinstance(value, dict):
        return {key: round_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [round_numbers(entry) for entry in value]
    if isinstance(value, float):
        return round(value, 4)
    return value


# ----------------------------------------------------------------------------------- the results


def sent_megabytes(row: dict[str, Any], kind: str = "full") -> float:
    """Megabytes that a process sends in a step, without those that average the gradients."""
    sent: dict[str, int] = row["sent"].get(kind, {})
    return sum(nbytes for category, nbytes in sent.items() if category != "averaging") / MB


def table(record: dict[str, Any]) -> Table:
    """A row for each workload and variant."""
    rows: list[list[str] | None] = []
    previous_workload = None
    for row in record["rows"]:
        # The first row of a workload has its name, and a separator above it.
        workload = ""
        if row["workload"] != previous_workload:
            workload = row["workload"]
            if previous_workload is not None:
                rows.append(None)
        previous_workload = row["workload"]

        # Rows of one process show the floor; others, the processes and the bytes that they send.
        every_step = f"{row['every_step']:.2f}"
        every_10_and_100 = f"{row['every_10_and_100']:.2f}"
        placement = row["placement"]
        sent = ""
        if row["processes"] == 1:
            times = record["floors"][row["workload"]]
            floors = floor_ratios(times, row["solver"], row["milliseconds"]["sgd"])
            every_step += f" ({floors[0]:.2f})"
            every_10_and_100 += f" ({floors[1]:.2f})"
        else:
            placement = f"{placement} × {row['processes']}"
            sent = f"{sent_megabytes(row):.1f}"

        memory = ""
        if "memory" in row:
            memory = f"{row['memory']['ratio']:.2f}"
        state = (row["factor_bytes"] + row["inverse_bytes"]) / MB
        sgd = f"{row['milliseconds']['sgd']:.1f}"
        names = [workload, row["solver"], placement]
        rows.append([*names, sgd, every_step, every_10_and_100, f"{state:.1f}", memory, sent])

    title = "Step time as a multiple of SGD's (floor); memory and bytes of one process"
    words = "workload", "solver", "placement"
    numbers = "SGD ms", "every step", "10 / 100", "state MB", "peak memory", "sent MB"
    return reporting.table(title, (*words, *numbers), rows, left=3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[])
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each kind")
    parser.add_argument("--processes", type=int, help="processes of the distributed variants")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--worker", choices=("steps", "memory", "floor"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    variants = []
    for name in options.variants or VARIANTS:
        variant = VARIANTS[name]
        if options.processes and variant.processes > 1:
            variant = replace(variant, processes=options.processes)
        variants.append(variant)
    plan = runnable([WORKLOADS[name] for name in options.workloads], variants, console)
    if not plan:
        return
    record = run(plan, options.repeats, memory=not options.skip_memory, output=options.json)
    reporting.show(table(record))


if __name__ == "__main__":
    main()

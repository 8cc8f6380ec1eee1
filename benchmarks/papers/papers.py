"""The headline claims of the four papers, each next to what this package does.

    make papers
    make papers ARGS=--tiny        seconds, to see that everything runs

Measures at small scale what a paper measured on many GPUs: training runs on the digits, step times
of small networks on one process and on two gloo processes, bytes counted on them, and memory that
`second_order.plan` predicts for 64 ranks. Times are ratios of medians of steps that alternate.

Prints the table, and writes it as JSON and into the page. Where our value does not support a claim,
the row says why.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import reporting
from claim import Row, Scale, markdown
from dho2_claims import dho2_rows
from distkfac_claims import distkfac_rows
from dpkfac_claims import dpkfac_rows
from kaisa_claims import kaisa_rows, planned
from measuring import Processes
from second_order import SecondOrderWarning

__all__ = ["START", "main", "measure", "rows_of", "with_tables"]

TINY = Scale(
    tiny=True, seeds=1, epochs=1, steps=5, repeats=1, block=2, epoch=3, interval=3, ranks=2
)
START = "<!-- The tables below are written by `make papers`. -->\n"


def measure(scale: Scale, processes: Processes) -> list[Row]:
    """All rows, paper by paper."""
    plan = planned(scale)
    return [
        *kaisa_rows(scale, processes, plan),
        *dpkfac_rows(scale, processes, plan),
        *distkfac_rows(scale, processes),
        *dho2_rows(scale, processes),
    ]


def rows_of(record: dict[str, Any]) -> list[Row]:
    """The rows of a stored run."""
    return [Row(**row) for row in record["rows"]]


def with_tables(page: str, record: dict[str, Any]) -> str:
    """A page with the tables of a stored run."""
    machine = record["machine"]
    run = (
        f"Stored run of {machine['date']}: torch {machine['torch']}, {machine['cores']} cores, "
        f"{record['seconds']:,} seconds. Load: {machine['load']}."
    )
    return f"{page[: page.index(START)]}{START}\n{run}\n\n{markdown(rows_of(record))}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="seconds, on tiny networks")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", SecondOrderWarning)
    start = time.perf_counter()
    processes = Processes(2)
    try:
        rows = measure(TINY if options.tiny else Scale(), processes)
    finally:
        processes.close()
    seconds = time.perf_counter() - start
    cells = [
        [row.paper, row.claim, row.paper_value, row.our_value, "yes" if row.agrees else "no"]
        for row in rows
    ]
    columns = ("paper", "claim", "the paper's value", "ours", "agrees")
    reporting.show(reporting.table(f"{seconds:.0f} s", columns, cells, left=len(columns)))
    if options.json is not None and options.tiny:
        raise SystemExit("a tiny run is not stored: leave out --json")
    reporting.store(options.json, rows=[asdict(row) for row in rows], seconds=round(seconds))
    if options.page is not None:
        record = json.loads(options.json.read_text("utf-8"))
        options.page.write_text(with_tables(options.page.read_text("utf-8"), record), "utf-8")


if __name__ == "__main__":
    main()

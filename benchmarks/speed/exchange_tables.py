"""The tables that docs/kaisa.md has of the runs of pipelined.py and exchange_dtype.py.

python benchmarks/speed/exchange_tables.py  # writes them there, from the stored runs
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kaisa.md"
EXCHANGES = "all_reduce", "pipelined"


def pipelined(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Steps, work of the network and waiting, in milliseconds, of both exchanges."""
    lines = _head("network, step with, in", "step", "link at work", "waited", "ratio of steps")
    for row in rows:
        cells = [
            " / ".join(f"{row[exchange][name]:.0f}" for exchange in EXCHANGES)
            for name in ("step", "network", "waited")
        ]
        case = f"{row['network']}, {row['kind']}, {row['dtype']}"
        lines.append(_line(case, *cells, f"{row['ratio']:.2f}"))
    return lines


def exchange_dtype(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Relative errors in per cent, and kilobytes that a process sends, in float32 and bfloat16."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = f"{row['model']}, {row['solver']}, {row['damping']:g}"
        cases.setdefault(case, {})[row["kind"]] = row
    lines = _head(
        "model, solver, damping", "sums, %", "both, %", "at once, %", "sums, kB", "solves, kB"
    )
    for case, kinds in cases.items():
        errors = [kinds["sums"]["last"], kinds["both"]["last"], kinds["at once"]["first"]]
        shown = [f"{100 * e['median']:.1f} / {100 * e['worst']:.1f}" for e in errors]
        sent = kinds["both"]["bytes"]
        shown += [
            " / ".join(f"{n / 1000:.0f}" for n in sent[what]) for what in ("sums", "decompositions")
        ]
        lines.append(_line(case, *shown))
    return lines


TABLES = {"pipelined": pipelined, "exchange_dtype": exchange_dtype}


def stored(name: str) -> list[str]:
    """The lines of a table of a stored run."""
    record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return TABLES[name](record["rows"])


def _head(*cells: str) -> list[str]:
    return [_line(*cells), "|---|" + "---:|" * (len(cells) - 1)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def replaced(page: str, table: Sequence[str]) -> str:
    """The page with a table in the place of the one that has the same header."""
    return "\n".join(_with(page.split("\n"), table))


def _with(lines: Sequence[str], table: Sequence[str]) -> Iterable[str]:
    inside = False
    for line in lines:
        if line == table[0]:
            inside = True
            yield from table
        inside = inside and line.startswith("|")
        if not inside:
            yield line


if __name__ == "__main__":
    text = PAGE.read_text()
    for each in TABLES:
        text = replaced(text, stored(each))
    PAGE.write_text(text)

"""Write the table of docs/reference/compatibility.md from the marks of the tests.

    @pytest.mark.works("DDP")                       # of the optimizer in the parameter `System`
    @pytest.mark.works("compile", "KAISA", "DHO2")  # of those named
    @pytest.mark.refused("FSDP1", message="the model is in FullyShardedDataParallel")
    @pytest.mark.refused("AMP float16", when="without `grad_scaler=`", message="...")

python tests/compatibility.py          # runs the tests that have a mark, and writes the page
python tests/compatibility.py --check  # only compares the page with the marks
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reference/compatibility.md"
OPTIMIZERS = ("KAISA", "DPKFAC", "DistKFAC", "DHO2", "MRDHO2")
STACKS = {
    "plain": "one process, a plain loop",
    "DDP": "`DistributedDataParallel`, gloo",
    "FSDP1": "`FullyShardedDataParallel`",
    "FSDP2": "`fully_shard`",
    "HSDP": "`fully_shard` on a mesh of two dimensions",
    "tensor parallelism": "`ColwiseParallel`, `RowwiseParallel`",
    "Lightning": "automatic and manual optimization",
    "Lightning DDP": '`strategy="ddp"`, two processes',
    "Lightning FSDP2": "`ModelParallelStrategy`",
    "Trainer": "`transformers.Trainer`",
    "Trainer DDP": "under `torchrun`, two processes",
    "Accelerate": "`prepare`, `accumulate`, `save_state`",
    "Accelerate DDP": "two processes",
    "compile": "`torch.compile(model)`",
    "AMP bfloat16": "`torch.autocast`",
    "AMP float16": "`torch.autocast` and a `GradScaler`",
    "accumulation": "several backward passes per step",
    "checkpoint": "`state_dict`, `torch.save`, resume",
    "activation checkpointing": "`torch.utils.checkpoint`",
    "schedulers": "`torch.optim.lr_scheduler`",
    "frozen layers": "`requires_grad=False`",
    "LoRA": "adapters next to frozen layers",
    "gradient clipping": "`clip_grad_norm_`",
}
HEAD = """\
# Compatibility

<!-- Written by `make compatibility`. -->

Look up your training stack to see which optimizers you can use with it. We write this table from
our tests, which train small models on CPUs:

- **works**: you get the same parameters as in a plain training loop, up to rounding. We check that
  the base optimizer alone gives others.
- **refused**: you get an error that says what to do instead.
- **not tested**: no test covers it.

[Frameworks](../how-to/frameworks.md) and [FSDP2](../how-to/fsdp-compile.md) show the code. On one
process, MRDHO2 has no accelerators and equals DHO2.

"""
# The line before the list of error messages.
INTRODUCTION = "If we refuse your combination, the error contains this text:"


class Cell(NamedTuple):
    """The outcome of a test for a stack and an optimizer; the message of a refusal."""

    stack: str
    optimizer: str
    outcome: str
    test: str
    message: str


def cells_of(item: Any) -> Iterable[Cell]:
    """The cells of one test's marks; ValueError for a name that is not in the table."""
    test = f"{item.path.name}::{getattr(item, 'originalname', None) or item.name}"
    for outcome in ("works", "refused"):
        for mark in item.iter_markers(outcome):
            stack, *named = mark.args
            if not named:
                System = getattr(item, "callspec", None) and item.callspec.params.get("System")
                if System is None:
                    raise ValueError(f"{test}: name the optimizers of mark {outcome}({stack!r})")
                named = [System.__name__]
            for optimizer in named:
                if stack not in STACKS or optimizer not in OPTIMIZERS:
                    raise ValueError(f"{test}: {stack!r} with {optimizer!r} is not in the table")
                when = f"{outcome} {mark.kwargs.get('when', '')}".strip()
                yield Cell(stack, optimizer, when, test, mark.kwargs.get("message", ""))


class Collected:
    """A plugin that keeps what the marks of the tests say, and which tests failed."""

    def __init__(self) -> None:
        self.cells: dict[Cell, None] = {}
        self.failed: list[str] = []

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self.cells |= dict.fromkeys(cells_of(item))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or (report.skipped and report.when != "teardown"):
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def page(cells: Iterable[Cell]) -> str:
    """The whole page."""
    table: Mapping[str, dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        table[cell.stack][cell.optimizer].append(cell)
    lines = [
        f"| | {' | '.join(OPTIMIZERS)} |",
        "|---" * (len(OPTIMIZERS) + 1) + "|",
    ]
    for stack, what in STACKS.items():
        outcomes = [_outcome(table[stack][optimizer]) for optimizer in OPTIMIZERS]
        lines.append(f"| {stack}: {what} | {' | '.join(outcomes)} |")
    lines += ["", "## Error messages", "", INTRODUCTION, ""]
    for stack in STACKS:
        messages: dict[str, dict[str, None]] = defaultdict(dict)
        for optimizer in OPTIMIZERS:
            for cell in table[stack][optimizer]:
                messages[cell.message][optimizer] = None
        for message in sorted(messages.keys() - {""}):
            named = (
                "all" if len(messages[message]) == len(OPTIMIZERS) else ", ".join(messages[message])
            )
            lines.append(f'- {stack} ({named}): "{message}"')
    return HEAD + "\n".join(lines) + "\n"


def _outcome(cells: list[Cell]) -> str:
    """The text of a cell: outcomes that work come first, and the general case before others."""
    found = {cell.outcome for cell in cells}
    ordered = sorted(found, key=lambda outcome: (outcome.startswith("refused"), len(outcome)))
    return ", ".join(ordered) or "not tested"


def marked() -> list[str]:
    """The files of tests that have a mark."""
    pattern = re.compile(r"mark\.(works|refused)\(")
    return [str(p) for p in sorted(TESTS.rglob("test_*.py")) if pattern.search(p.read_text())]


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    found = Collected()
    options = ["--collect-only"] if check else ["-m", "works or refused"]
    quiet = ["-q", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main([*quiet, *options, *marked()], plugins=[found])
    if code or found.failed:
        sys.stderr.write(f"nothing is written: {found.failed}\n")
        return 1
    text = page(found.cells)
    if check:
        same = PAGE.exists() and PAGE.read_text("utf-8") == text
        sys.stderr.write("" if same else f"{PAGE} is not what the marks say\n")
        return int(not same)
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

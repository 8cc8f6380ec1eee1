"""The table of what works with what is what the marks of the tests say."""

from __future__ import annotations

import subprocess
import sys

import pytest
from compatibility import PAGE, TESTS, cells_of, page

NEEDED = (
    "DDP",
    "FSDP2",
    "Lightning",
    "Trainer",
    "Accelerate",
    "compile",
    "accumulation",
    "checkpoint",
)


def test_the_page_is_what_the_marks_say(request: pytest.FixtureRequest) -> None:
    """The marks are collected here or, if only some tests run, by another process."""
    cells = dict.fromkeys(cell for item in request.session.items for cell in cells_of(item))
    if page(cells) == PAGE.read_text("utf-8"):
        return
    command = [sys.executable, str(TESTS / "compatibility.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, check=False)
    assert done.returncode == 0, f"run `make compatibility`\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("stack", [*NEEDED, "AMP bfloat16", "AMP float16"])
def test_common_stacks_are_tested_with_every_optimizer(stack: str) -> None:
    (row,) = [r for r in PAGE.read_text("utf-8").splitlines() if r.startswith(f"| {stack}: ")]
    assert "not tested" not in row

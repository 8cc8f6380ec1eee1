"""Read the code blocks of a page, run its complete scripts, and compare what they print."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)
COMMAND = re.compile(r'\A"""(?P<command>(python|torchrun) .*?)(\.?\n.*?)?"""', re.S)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# Scripts that import one of these are skipped if it is not installed.
OPTIONAL_MODULES = ("accelerate", "lightning", "transformers")


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the code of each fenced block of a page."""
    found = []
    for match in FENCE.finditer((ROOT / page).read_text("utf-8")):
        indent = len(match["indent"])
        lines = [line[indent:] for line in match["code"].splitlines(keepends=True)]
        found.append((match["language"], "".join(line or "\n" for line in lines)))
    return found


def python_blocks(page: str) -> list[str]:
    return [code for language, code in blocks(page) if language == "python"]


def scripts(page: str) -> list[tuple[str, str]]:
    """Each complete script of a page, with the `text` block that follows it, or ""."""
    found = []
    of_page = [*blocks(page), ("", "")]
    for (_, code), (language, following) in itertools.pairwise(of_page):
        if COMMAND.match(code):
            found.append((code, following if language == "text" else ""))
    return found


def run_script(code: str, folder: Path, arguments: list[str] | None = None) -> str:
    """Run a complete script in a folder by its command, and return what it prints."""
    for module in OPTIONAL_MODULES:
        if re.search(rf"^(import|from) {module}\b", code, re.M):
            pytest.importorskip(module)
    match = COMMAND.match(code)
    assert match is not None
    program, *words = shlex.split(match["command"])
    file = next(word for word in words if word.endswith(".py"))
    (folder / file).write_text(code, "utf-8")
    launcher = ["-m", "torch.distributed.run"] if program == "torchrun" else []

    run = subprocess.run(
        [sys.executable, *launcher, *words, *(arguments or [])],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def assert_prints(output: str, expected: str, rel: float = 0.1) -> None:
    """Raise unless a page's `text` block is printed, with numbers up to a relative tolerance."""
    lines = iter([line.rstrip() for line in output.splitlines()])
    for expected_line in expected.splitlines():
        words = NUMBER.sub("#", expected_line)
        line = next((line for line in lines if NUMBER.sub("#", line) == words), None)
        assert line is not None, f"{expected_line!r} is not in the output:\n{output}"
        numbers = [float(number) for number in NUMBER.findall(line)]
        expected_numbers = [float(number) for number in NUMBER.findall(expected_line)]
        assert numbers == pytest.approx(expected_numbers, rel=rel)

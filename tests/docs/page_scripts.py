"""Read the code blocks of a page, run its complete scripts, and compare what they print."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pool import Fork, Forks, Launch

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


def run_script(code: str, folder: Path, forks: Forks, arguments: Sequence[str] = ()) -> str:
    """Run a complete script in a folder as the command that it states, and return what it prints.

    Args:
        code: The script.
        folder: The folder.
        forks: A server that forks processes in which torch is already imported. The import takes
            two seconds.
        arguments: Further arguments of the script.
    """
    for module in OPTIONAL_MODULES:
        if re.search(rf"^(import|from) {module}\b", code, re.M):
            pytest.importorskip(module)
    match = COMMAND.match(code)
    assert match is not None
    _, *words = shlex.split(match["command"])
    file = next(word for word in words if word.endswith(".py"))
    script = folder / file
    script.write_text(code, "utf-8")
    arguments = [*words[words.index(file) + 1 :], *arguments]
    (num_ranks,) = re.findall(r"--nproc-per-node=(\d+)", match["command"]) or ["0"]
    options = words[: words.index(file)]
    assert set(options) <= {"--standalone", f"--nproc-per-node={num_ranks}"}, options
    return run_fork(script, arguments, forks, int(num_ranks))


def run_fork(script: Path, arguments: Sequence[str], forks: Forks, num_ranks: int) -> str:
    """Run a script in its folder, and return what it prints, rank after rank.

    Args:
        script: The script.
        arguments: Its arguments.
        forks: The server of the processes.
        num_ranks: Number of ranks that `torchrun` would start; 0 for one process without it.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        errors = directory / "errors"
        options: dict[str, Any] = {
            "errors": errors,
            "folder": script.parent,
            "path": [str(script.parent), str(ROOT / "src"), *paths_of_packages()],
        }
        if num_ranks == 0:
            output = directory / "output"
            process = Fork(forks, script, arguments, environment={}, output=output, **options)
            try:
                codes = [process.wait(timeout=480)]
            finally:
                process.kill()
            printed = output.read_text()
        else:
            run = Launch(forks, script, num_ranks, *arguments, directory=directory, **options)
            codes = run.wait(timeout=480)
            printed = "".join(run.output(rank) for rank in range(num_ranks))
        assert codes == [0] * len(codes), errors.read_text()[-3000:]
    return printed


def paths_of_packages() -> list[str]:
    """Where modules are found, without the folders of this repository that users do not have."""
    own = [ROOT / name for name in ("benchmarks", "examples", "tests")]
    return [path for path in sys.path if not any(Path(path).is_relative_to(f) for f in own)]


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

"""Every code block of the documentation runs.

A Python block that begins with a docstring such as ``"python train.py"`` is a complete script. It
runs with that command in an empty folder.

All other Python blocks of a page run in order in one namespace. The page's file in `preambles/`
defines the names that the page takes for granted, such as ``model``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
# Pages whose blocks another test runs.
TESTED_ELSEWHERE = {
    "docs/how-to/frameworks.md": "tests/frameworks/test_frameworks_page.py",
    "docs/how-to/migrate.md": "tests/docs/test_migrate_page.py",
}
# Pages that take for granted what no preamble defines yet.
UNTESTED = {
    "docs/concepts/spectra.md",
    "docs/how-to/curvature.md",
    "docs/how-to/monitor.md",
    "docs/reference/extending.md",
}
# Arguments that keep a complete script short, by page and name of the script.
ARGUMENTS: dict[tuple[str, str], list[str]] = {}
LANGUAGES = {"python", "sh", "text", "console", "diff", "yaml", "bibtex"}
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)
COMMAND = re.compile(r'\A"""(?P<command>(python|torchrun) .*?)(\.?\n.*?)?"""', re.S)

pytestmark = [pytest.mark.filterwarnings("ignore")]


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the code of each fenced block of a page."""
    found = []
    for match in FENCE.finditer((ROOT / page).read_text("utf-8")):
        indent = len(match["indent"])
        lines = [line[indent:] for line in match["code"].splitlines(keepends=True)]
        found.append((match["language"], "".join(line or "\n" for line in lines)))
    return found


def preamble(page: str) -> str:
    """Python that runs before the first block of a page."""
    name = page.removeprefix("docs/").removesuffix(".md").replace("/", "_").replace("-", "_")
    path = Path(__file__).parent / "preambles" / f"{name}.py"
    return path.read_text("utf-8") if path.exists() else ""


def python_blocks(page: str) -> list[str]:
    return [code for language, code in blocks(page) if language == "python"]


def scripts() -> list[object]:
    """Each complete script, with the page that shows it."""
    found = []
    for page in PAGES:
        for code in python_blocks(page):
            if COMMAND.match(code):
                number = sum(parameter.values[0] == page for parameter in found)
                found.append(pytest.param(page, code, id=f"{page}-{number}"))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_that_is_tested_or_is_no_code(page: str) -> None:
    assert {language for language, _ in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in {*TESTED_ELSEWHERE, *UNTESTED}]
)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(preamble(page), f"preamble of {page}", "exec"), names)
    for code in python_blocks(page):
        if not COMMAND.match(code):
            exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize(("page", "code"), scripts())
def test_a_complete_script_runs_in_an_empty_folder(page: str, code: str, tmp_path: Path) -> None:
    match = COMMAND.match(code)
    assert match is not None
    program, *arguments = shlex.split(match["command"])
    name = next(argument for argument in arguments if argument.endswith(".py"))
    (tmp_path / name).write_text(code, "utf-8")
    arguments += ARGUMENTS.get((page, name), [])

    launcher = (
        [sys.executable] if program == "python" else [sys.executable, "-m", "torch.distributed.run"]
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*launcher, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]

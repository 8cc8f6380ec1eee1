"""Every script of ``examples/`` runs when it is copied into an empty folder."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_scripts import run_fork

import train_digits

if TYPE_CHECKING:
    from pool import Forks

EXAMPLES = Path(train_digits.__file__).parent
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def imported_modules(script: Path) -> set[str]:
    """Return the top-level names of all modules that a script imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_script_imports_a_module_of_this_repository(script: Path) -> None:
    root = EXAMPLES.parent
    local = {
        path.stem
        for folder in ("examples", "benchmarks")
        for path in root.glob(f"{folder}/**/*.py")
    }
    assert not imported_modules(script) & local


def test_the_overview_names_every_script() -> None:
    text = (EXAMPLES.parent / "docs" / "index.md").read_text("utf-8")
    section = text.partition("## Example scripts")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`(\w+\.py)`", section)) == [script.name for script in SCRIPTS]


def test_a_copied_script_trains_in_an_empty_folder(tmp_path: Path, forks: Forks) -> None:
    script = Path(shutil.copy(EXAMPLES / "train_digits.py", tmp_path))
    printed = run_fork(script, ["--steps", "20"], forks, num_ranks=0)
    assert "step  20  loss" in printed

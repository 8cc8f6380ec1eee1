"""Every script of ``examples/`` runs when it is copied into an empty folder."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train_digits

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


def test_a_copied_script_trains_in_an_empty_folder(tmp_path: Path) -> None:
    script = shutil.copy(EXAMPLES / "train_digits.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("RANK", None)
    run = subprocess.run(
        [sys.executable, script, "--steps", "20"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "step  20  loss" in run.stdout

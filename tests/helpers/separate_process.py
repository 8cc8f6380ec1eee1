"""Scripts that run in a process of their own, as the pretended device exists once in each."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

SETTINGS = Path(__file__).resolve().parents[2] / "pyproject.toml"


def run(script: str, *arguments: object, **environment: str) -> str:
    """What a script prints, which finds the modules that this process does."""
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr}"
    return done.stdout


def found_by(script: str) -> Any:
    """What a script prints last, in JSON; coverage counts there if it does here."""
    counted = "coverage" in sys.modules and sys.modules["coverage"].Coverage.current() is not None
    environment = {"COVERAGE_PROCESS_START": str(SETTINGS)} if counted else {}
    return json.loads(run(script, **environment).splitlines()[-1])


def found_once_by(script: str, factory: pytest.TempPathFactory) -> Any:
    """As `found_by`. The first test process runs the script; the others wait for its result."""
    base = factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    result = folder / f"{Path(script).stem}.json"
    with result.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(json.dumps(found_by(script)))
    return json.loads(result.read_text())

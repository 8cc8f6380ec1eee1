"""Scripts that run in a process of their own, as the pretended device exists once in each."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pool import Fork

if TYPE_CHECKING:
    import pytest
    from pool import Forks


SETTINGS = Path(__file__).resolve().parents[2] / "pyproject.toml"


def run(forks: Forks, script: str, *arguments: object, **environment: str) -> str:
    """What a script prints, in a fork of a process that has imported torch."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        errors = Path(folder) / "errors"
        process = Fork(
            forks, Path(script), arguments, environment=environment, output=output, errors=errors
        )
        try:
            code = process.wait(timeout=800)
        finally:
            process.kill()
        printed = output.read_text()
        assert code == 0, f"{printed[-2000:]}\n{errors.read_text()}"
    return printed


def found_by(forks: Forks, script: str, is_counted: bool = True) -> Any:
    """What a script prints last, in JSON; coverage counts there if it does here, or not at all."""
    coverage = sys.modules.get("coverage")
    counts_here = coverage is not None and coverage.Coverage.current() is not None
    environment: dict[str, str] = {}
    if is_counted and counts_here:
        environment["COVERAGE_PROCESS_START"] = str(SETTINGS)
    return json.loads(run(forks, script, **environment).splitlines()[-1])


def found_once_by(
    forks: Forks, script: str, factory: pytest.TempPathFactory, is_counted: bool = True
) -> Any:
    """As `found_by`. The first test process runs the script; the others wait for its result."""
    base = factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    result = folder / f"{Path(script).stem}.json"
    with result.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(json.dumps(found_by(forks, script, is_counted)))
    return json.loads(result.read_text())

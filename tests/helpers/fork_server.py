"""A process that has imported torch and forks into scripts: what `pool.Forks` talks to.

Reads lines of JSON: a script to run, which it answers with the new process's number; or such a
number, which it answers with the exit code, null while the process runs. A fork is from its script
on like any other interpreter: exceptions, signals and exit handlers do what they do everywhere.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis  # noqa: F401 - what scripts import
import pytest  # noqa: F401
import torch  # noqa: F401

from second_order import KAISA  # noqa: F401 - second_order imports its optimizers when asked


def become(
    script: str,
    arguments: list[str],
    environment: dict[str, str],
    output: str,
    errors: str,
    folder: str,
    path: list[str],
) -> None:
    """What `python script` does, in a folder, with its output and its errors in files."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, output), (2, errors)):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    sys.argv = [script, *arguments]
    if "COVERAGE_PROCESS_START" in environment:
        import coverage

        coverage.process_startup()
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    exec(compile(Path(script).read_text(), script, "exec"), main.__dict__)


def serve() -> dict[str, Any] | None:
    """Serve until the input ends. In a fork, return the script to run."""
    codes: dict[int, int] = {}
    for line in sys.stdin:
        report = json.loads(line)
        if isinstance(report, dict):
            answer: int | None = os.fork()
            if answer == 0:
                return report
        else:
            if report not in codes:
                found, status = os.waitpid(report, os.WNOHANG)
                codes |= {found: os.waitstatus_to_exitcode(status)} if found else {}
            answer = codes.get(report)
        sys.stdout.write(json.dumps(answer) + "\n")
    return None


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    if (report := serve()) is not None:
        become(**report)

"""A process ends when its script does, whatever is under way, and however the script ends.

Limits are far above what an end takes on an idle machine, and below what made these tests fail:
minutes of waiting for a thread, one helper after the other, or for ever.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pool import RANK_ENVIRONMENT
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import second_order

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON = 40.0  # seconds, on a loaded machine
HERE = Path(__file__).parents[1]
INTERRUPTED = -signal.SIGINT


class Stage:
    """Plays scenes in a process that has imported torch once; see `scenes.py`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = f"{HERE}:{Path(second_order.__file__).parents[1]}"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "scenes.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": path},
        )
        assert self._line() == "ready\n"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def play(self, *scenes: dict[str, Any]) -> list[list[int | None]]:
        """The exit statuses of scenes that are played side by side, all of which have ended soon.

        By rank; None of those that were stopped.
        """
        assert self._process.stdin is not None
        common = {"port": self._store.port, "root": str(self._root)}
        self._process.stdin.write(json.dumps([{**common, **scene} for scene in scenes]) + "\n")
        self._process.stdin.flush()
        all_results = json.loads(self._line())
        return [self._statuses(*pair) for pair in zip(scenes, all_results, strict=True)]

    def _statuses(self, scene: dict[str, Any], results: list[dict[str, Any]]) -> list[int | None]:
        output = "\n\n".join(f"rank {i}:\n{each['said']}" for i, each in enumerate(results))
        begun = min(each["begun"] or float("inf") for each in results)
        for rank, each in enumerate(results):
            if rank not in scene.get("stops", ()):
                assert each["status"] is not None, f"{scene}: rank {rank} has not ended:\n{output}"
                took = each["ended"] - begun
                assert took < SOON, f"{scene}: rank {rank} has taken {took:.1f} s:\n{output}"
        for complaint in ("terminate called", "Exception ignored"):
            assert complaint not in output, f"{scene}:\n{output}"
        return [each["status"] for each in results]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("scenes"))
    yield stage
    stage.close()


def scene(system: str, end: str, **details: Any) -> dict[str, Any]:
    return {"system": system, "end": end, **details}


@pytest.mark.parametrize("system", ["KAISA", "DistKFAC", "stats", "MRDHO2"])
def test_a_script_that_closes_nothing(stage: Stage, system: str) -> None:
    """Workers leave without a word; helpers return from `serve`, and end as well."""
    (statuses,) = stage.play(scene(system, "no close"))
    assert set(statuses) == {0}


@pytest.mark.parametrize("system", ["DistKFAC", "stats", "MRDHO2"])
def test_an_interrupt(stage: Stage, system: str) -> None:
    """As Ctrl-C sends it, to all processes; some of them are in the middle of a collective."""
    (statuses,) = stage.play(scene(system, "interrupt"))
    assert set(statuses) <= {INTERRUPTED, 1}


@pytest.mark.parametrize("system", ["DHO2", "stats", "MRDHO2"])
def test_an_exception_in_the_with_block(stage: Stage, system: str) -> None:
    """Helpers are told; nothing hides the exception."""
    assert stage.play(scene(system, "raise")) in ([[1, 1]], [[1, 1, 0, 0]])


@pytest.mark.parametrize("system", ["DPKFAC", "stats", "MRDHO2"])
def test_an_exception_on_one_worker(stage: Stage, system: str) -> None:
    """The others fail in their next collective."""
    (statuses,) = stage.play(scene(system, "raise", raises=[1]))
    assert statuses[1] == 1
    assert statuses[0] not in (0, None)
    assert not any(statuses[2:])


def test_helpers_that_have_been_stopped(stage: Stage) -> None:
    """Both stats workers, which takes seconds for the two of them; the first accelerator.

    The other one waits for it for `helper_timeout`. If the two were to begin a round together, it
    ends with an error that says so; it ends well if the workers had not called for one yet.
    """
    patient = {"epoch_steps": 1000, "helper_timeout": 8.0}
    scenes = [
        scene("stats", "close", stops=[2, 3], before=2),
        scene("stats", "no close", stops=[2, 3], before=2),
        scene("MRDHO2", "close", stops=[2], before=0, options=patient),
    ]
    *stats, (*workers, stopped, other) = stage.play(*scenes)
    assert stats == [[0, 0, None, None], [0, 0, None, None]]
    assert (workers, stopped) == ([0, 0], None)
    assert other in (0, 1)

"""Fixtures and settings that every test shares."""

from __future__ import annotations

import gc
import os
import random
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import hypothesis
import pytest
import torch
from pool import Forks, Launch, World

if TYPE_CHECKING:
    from collections.abc import Iterator

# "ci" gives the same examples in every run; "thorough" looks for new ones.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=5, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Coverage counts with so many sets of a test's parameters, in one process and on the pool's ranks.
COUNTED = 12
COUNTED_ON_RANKS = 4
# What these folders and files reach, others do; the files would take two fifths of what counting
# takes.
NOT_COUNTED = {"benchmarks", "examples", "faults", "frameworks", "fuzz"} | {
    f"test_{name}"
    for name in (
        "compiled",
        "compiled_drawn",
        "dho2",
        "dho2_checkpoints",
        "dho2_processes",
        "distkfac_ranks",
        "distkfac_ranks_stats",
        "dpkfac",
        "dpkfac_changes",
        "fsdp",
        "fsdp_checkpoints",
        "invariants_steps",
        "kaisa_ranks",
        "many_ranks",
        "placements",
        "placements_checkpoints",
        "placements_gradients",
        "resume",
    )
}


class _TorchRandom:
    """Lets hypothesis seed torch for each example, as it does `random` and numpy."""

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


_TORCH_RANDOM = _TorchRandom()  # hypothesis keeps a weak reference only
hypothesis.register_random(_TORCH_RANDOM)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # What the zoo's asymmetric padding is for.
    config.addinivalue_line("filterwarnings", "ignore:Using padding='same' with even:UserWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Coverage counts where it finds something: it slows all code down by a half, torch's too."""
    plugin = config.pluginmanager.getplugin("_cov")
    if plugin is None or plugin.cov_controller is None:
        return
    # As coverage does in its own processes: what is imported already has been counted from there.
    # It would inspect all modules each time it resumes, and fails on those of torch.
    plugin.cov_controller.cov._warn_preimported_source = False
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        enough = COUNTED_ON_RANKS if "world" in getattr(item, "fixturenames", ()) else COUNTED
        if seen[name] > enough or {item.path.parent.name, item.path.stem} & NOT_COUNTED:
            item.add_marker("no_cover")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state."""
    random.seed(0)
    # torch.manual_seed() formats a stack for each kind of device that there might be.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="module", autouse=True)
def freeze() -> None:
    """Modules, mostly: each gc.collect() of a test took 0.3 s to look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Persistent gloo ranks: `world.run(function, world_size, *args)`; see `pool.World`."""
    world = World()
    yield world
    world.close()


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Forget compiled graphs: after a number of them, torch.compile makes no more."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Launcher(Protocol):
    """`launch(script, nproc, *args)`."""

    def __call__(self, script: str | Path, nproc: int, *args: object) -> Launch: ...


def _path(script: str | Path, directory: Path) -> Path:
    """Return the path of a script that is given as a path or as its text."""
    if isinstance(script, Path):
        return script
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script))
    return path


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """The server that forks the processes of `launch`."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def launch(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Separate processes, one a rank, that the test may kill; see `pool.Launch`."""
    started: list[Launch] = []

    def start(script: str | Path, nproc: int, *args: object) -> Launch:
        directory = tmp_path_factory.mktemp("launch")
        started.append(Launch(forks, _path(script, directory), nproc, *args, directory=directory))
        return started[-1]

    yield start
    for run in started:
        run.close()

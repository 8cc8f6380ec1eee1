"""A wheel builds and installs without a network, and its extras hold what the scripts import."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

import second_order

ROOT = Path(__file__).parents[1]
BUILT_FROM = "pyproject.toml", "setup.cfg", "README.md", "LICENSE"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
OFFLINE = ["--no-deps", "--no-index"]
PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}
"""Names in the index of packages that are imported by another name."""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, into which a wheel of this tree was installed."""
    folder = tmp_path_factory.mktemp("install")
    clone = folder / "clone"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", clone / "src", ignore=ignored)
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, clone / name)
    run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", str(folder), ".", cwd=clone)
    (wheel,) = folder.glob("*.whl")
    run(*PIP, "install", *OFFLINE, "--target", str(folder / "site"), str(wheel), cwd=folder)
    return folder / "site"


@pytest.fixture(scope="module")
def distribution(installed: Path) -> Distribution:
    (information,) = installed.glob("*.dist-info")
    return PathDistribution(information)


def test_the_installed_package_imports_and_trains(installed: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(installed)!r})
import second_order, torch
model = torch.nn.Linear(3, 2)
optimizer = second_order.KAISA(model.parameters(), lr=0.1)
model(torch.randn(8, 3)).square().mean().backward()
optimizer.step()
print(second_order.__file__, second_order.__version__)
"""
    file, version = run(sys.executable, "-c", code, cwd=installed.parent).split()
    assert Path(file).is_relative_to(installed)
    assert version == second_order.__version__


def test_the_wheel_has_all_modules_types_and_the_license(
    installed: Path, distribution: Distribution
) -> None:
    names = {path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py")}
    assert names <= {path.relative_to(installed) for path in installed.rglob("*.py")}
    assert (installed / "second_order" / "py.typed").exists()
    assert (distribution._path / "licenses" / "LICENSE").exists()  # type: ignore[attr-defined]


def test_the_metadata_says_what_the_package_is(distribution: Distribution) -> None:
    metadata = distribution.metadata
    assert metadata["Version"] == second_order.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("Project-URL")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert required(distribution) == {"torch"}


def required(distribution: Distribution, extra: str | None = None) -> set[str]:
    """The packages that the package requires, or that an extra adds."""
    found = set()
    for requirement in distribution.requires or []:
        name, extras = re.match(r"([\w.-]+)(?:\[(\w+)\])?", requirement).groups()  # type: ignore[union-attr]
        of = re.search(r'extra == "(\w+)"', requirement)
        if (of[1] if of else None) != extra:
            continue
        found |= required(distribution, extras) if name == "second_order" else {name.lower()}
    return found


def imported(folder: str) -> set[str]:
    """Packages that the scripts of a folder import, but neither Python nor the repository has."""
    files = [*(ROOT / folder).rglob("*.py")]
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    helpers = (ROOT / "tests" / "helpers").glob("*.py")
    local = {file.stem for file in (*files, *helpers, *(ROOT / "examples").glob("*.py"))}
    names -= sys.stdlib_module_names | local | {"second_order"}
    return {PACKAGES.get(name, name) for name in names}


def test_the_examples_import_what_their_extras_have(distribution: Distribution) -> None:
    extras = (None, "examples", "frameworks")
    assert imported("examples") == set().union(*(required(distribution, e) for e in extras))


def test_the_exporters_import_what_their_extra_has(distribution: Distribution) -> None:
    needs = "pip install safetensors"
    assert needs in (ROOT / "src/second_order/checkpoint/files.py").read_text()
    assert required(distribution, "export") == required(distribution, "safetensors")
    assert required(distribution, "export") == {"safetensors"}
    assert imported("src/second_order/export") == {"torch"}


def test_make_test_installs_what_the_benchmarks_import(distribution: Distribution) -> None:
    missing = imported("benchmarks") - required(distribution) - required(distribution, "dev")
    assert missing <= {"tokenizers"}, "transformers brings it"


def test_a_change_of_the_metadata_updates_the_environment() -> None:
    (line,) = re.findall(r"^\$\(STAMP\): (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.split() == ["pyproject.toml", "setup.cfg", "constraints.txt"]

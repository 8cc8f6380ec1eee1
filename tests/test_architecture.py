"""The package's folders: nothing imports upwards, and an optimizer loads only its own folders.

    papers                                 the keywords that reproduce a paper
    integrations                           connections to frameworks, which only users import
    optimizers                             what users make: the step, keywords, checkpoints
    measuring   export                     the curvature of a trained model, without an optimizer
    kfac        fosi                       two kinds of curvature that know nothing of each other
    planning                               the cost model, from which kfac gets a number of workers
    training                               the run as an optimizer and its curvature share it
    kronecker   lanczos                    mathematics
    checkpoint                             what is saved, and files
    distributed                            processes, collectives, FSDP2
    reporting   utils   errors             know nothing of the others

Imports are read from the source, those inside functions and under TYPE_CHECKING included.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import second_order
import structure

ROOT = Path(second_order.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

CONFIG = "second_order.optimizers.config"

# What a part may import in addition to itself and the configuration. The top, "", is `second_order`
# itself, which no part may import.
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "utils": {"errors"},
    "reporting": set(),
    CONFIG: {"utils"},
    "distributed": {"errors", "utils"},
    "checkpoint": {"errors", "distributed"},
    "kronecker": {"errors", "utils", "distributed", "checkpoint"},
    "lanczos": {"errors", "utils", "distributed"},
    "training": {"errors", "utils", "reporting", "distributed", "checkpoint"},
    "planning": {"errors", "utils", "reporting", "distributed", "kronecker"},
    "kfac": {
        *("errors", "utils", "reporting", "distributed", "checkpoint", "kronecker", "training"),
        "planning",
    },
    "fosi": {
        *("errors", "utils", "reporting", "distributed", "checkpoint", "lanczos", "training"),
    },
    "measuring": {"errors", "utils", "reporting", "distributed", "checkpoint", "kronecker"},
    "export": {"checkpoint", "kronecker"},
    "optimizers": {
        *("errors", "utils", "reporting", "distributed", "checkpoint", "kronecker", "lanczos"),
        *("training", "kfac", "fosi"),
    },
    "integrations": {"optimizers"},
    "papers": {"utils", "optimizers"},
    "": {
        *("errors", "reporting", "checkpoint", "lanczos", "kronecker", "planning", "measuring"),
        *("export", "optimizers"),
    },
}


def module_name(path: Path) -> str:
    parts = ["second_order", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """The file or folder right below `second_order` that a module belongs to.

    The configuration of the optimizers is a part of its own, which every folder may read.
    """
    if module == CONFIG:
        return CONFIG
    return f"{module}.".split(".")[1]


@functools.cache
def imported(source: str) -> frozenset[str]:
    """The modules of this package that a source imports; a relative import is refused."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = names & MODULES
            found |= inner or {node.module}
    return frozenset(name for name in found if name.split(".")[0] == "second_order")


MODULES = {module_name(path) for path in FILES}


def upward(module: str, source: str) -> set[str]:
    """Return the imports of a module that it must not have."""
    own_part = part(module)
    return {
        name
        for name in imported(source)
        if part(name) not in BELOW[own_part] | ({own_part, CONFIG} - {""})
    }


def public(source: str) -> list[str]:
    """The names in `__all__`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def undocumented(source: str) -> list[str]:
    """Functions and classes in `__all__` without a docstring, and their public methods."""
    found = []
    names = public(source)
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            if ast.get_docstring(node) is None:
                found.append(node.name)
            found += [
                f"{node.name}.{method.name}"
                for method in node.body
                if isinstance(node, ast.ClassDef)
                and isinstance(method, ast.FunctionDef)
                and not method.name.startswith("_")
                and ast.get_docstring(method) is None
            ]
    return found


def test_every_part_of_the_package_has_its_place() -> None:
    assert {part(module) for module in MODULES} <= BELOW.keys()
    assert len(FILES) > 10


def test_nothing_imports_upwards_or_sideways() -> None:
    for path in FILES:
        assert not upward(module_name(path), path.read_text("utf-8")), path


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module_name(path): imported(path.read_text("utf-8")) & MODULES for path in FILES}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for below in sorted(graph[module]):
                visit(below, (*above, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def loaded(name: str) -> ModuleType | None:
    """A module; None if it is for a framework that is not installed."""
    framework = name.rpartition(".")[2]
    if ".integrations." in name and importlib.util.find_spec(framework) is None:
        return None
    return importlib.import_module(name)


WINGS = {"kfac": ("fosi", "lanczos"), "fosi": ("kfac", "kronecker")}
SYSTEMS = {"kaisa": "kfac", "dpkfac": "kfac", "distkfac": "kfac", "dho2": "fosi", "mrdho2": "fosi"}


def reached(module: str) -> set[str]:
    """Every module of the package that an import of one loads."""
    graph = {module_name(path): imported(path.read_text("utf-8")) & MODULES for path in FILES}
    found: set[str] = set()
    todo = [module]
    while todo:
        here = todo.pop()
        if here not in found:
            found.add(here)
            todo += graph[here]
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_loads_nothing_of_the_other_wing(system: str) -> None:
    loaded = reached(f"second_order.optimizers.{system}")
    unexpected = [name for name in loaded if part(name) in WINGS[SYSTEMS[system]]]
    assert not unexpected


@pytest.mark.parametrize(
    ("names", "unexpected"),
    [
        ("DHO2, MRDHO2", ("kfac", "kronecker", "planning")),
        ("KAISA, DPKFAC, DistKFAC", ("fosi", "lanczos")),
    ],
)
def test_the_package_loads_only_the_names_that_are_used(
    names: str, unexpected: tuple[str, ...]
) -> None:
    code = f"from second_order import {names}; import sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    own_modules = [name for name in loaded.stdout.split() if name.startswith("second_order.")]
    assert len(own_modules) > 20
    assert "second_order.integrations" not in own_modules
    assert [name for name in own_modules if part(name) in unexpected] == []


def test_lazily_loaded_names_are_those_that_type_checkers_see() -> None:
    (seen,) = (
        node.body
        for node in ast.parse((ROOT / "__init__.py").read_text("utf-8")).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    )
    homes = {a.name: n.module for n in seen if isinstance(n, ast.ImportFrom) for a in n.names}
    assert sorted(homes) == sorted(second_order.__all__)
    assert set(second_order.__all__) <= set(dir(second_order))
    for name, home in homes.items():
        assert home is not None
        is_folder = home == "second_order"
        module = importlib.import_module(f"{home}.{name}" if is_folder else home)
        expected = module if is_folder else getattr(module, name)
        assert getattr(second_order, name) is expected
    with pytest.raises(AttributeError, match="'second_order' has no attribute 'KAISER'"):
        _ = second_order.KAISER


def foreign(path: Path, owners: dict[str, set[Path]]) -> list[str]:
    """Private names that a file reaches on an object, and that only other files' classes have."""
    return [
        f"line {node.lineno}: {node.attr}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in owners
        and path not in owners[node.attr]
        # The package's optimizers are one with their base; torch's names are torch's, such as a
        # view's ``_base``.
        and node.attr not in ("_training", "_curvature")
        and not hasattr(torch.Tensor, node.attr)
        and not {getattr(n, "id", "") for n in ast.walk(node.value)} & {"torch", "dist", "group"}
    ]


def test_no_private_name_of_another_files_class() -> None:
    owners = structure.private_names()
    for path in FILES:
        assert not foreign(path, owners), path


RANK = re.compile(r"\b(if|elif) [^:\n]*\b_?rank [=!]= \d")


HELPERS = {"kfac.stats_workers", "fosi.accelerator", "fosi.epochs"}


def test_only_helpers_are_distinguished_by_their_rank() -> None:
    """All other differences between ranks follow from the plan."""
    for path in FILES:
        module = module_name(path).removeprefix("second_order.")
        if part(module_name(path)) in ("kfac", "fosi", "optimizers") and module not in HELPERS:
            assert not RANK.search(path.read_text("utf-8")), path


MAKERS = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "tensor", "zeros"),
}


def test_every_new_tensor_names_its_device() -> None:
    """A user's default device may be another than the model's."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and node.func.attr in MAKERS:
                    has_device = any(keyword.arg in ("device", None) for keyword in node.keywords)
                    assert has_device, f"{path}:{node.lineno}: torch.{node.func.attr}"


def test_each_test_file_has_its_own_name() -> None:
    """pytest imports them by their names alone."""
    paths = list(Path(__file__).parent.rglob("test_*.py"))
    assert len({p.name for p in paths}) == len(paths)


def test_public_names_exist_and_are_documented() -> None:
    for path in FILES:
        source = path.read_text("utf-8")
        assert ast.get_docstring(ast.parse(source)), path
        names = public(source)
        module = loaded(module_name(path))
        assert len(names) == len(set(names)), path
        assert module is None or all(hasattr(module, name) for name in names), path
        assert not undocumented(source), path
        if path.name != "__init__.py":
            assert names, f"{path}: say in __all__ what is public"


REPOSITORY = Path(__file__).parents[1]
SCRIPTS = [p for d in ("benchmarks", "examples", "docs") for p in (REPOSITORY / d).rglob("*.py")]


def test_what_scripts_import_of_the_package_is_there() -> None:
    """Figures are redrawn from time to time, by scripts that no test runs."""
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("second_order"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    assert name in MODULES or hasattr(module, alias.name), f"{path}: {name}"

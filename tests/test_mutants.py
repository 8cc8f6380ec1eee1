"""The list of `make mutants`: each mutant can be put in, and the tests that it names are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import mutated, nodes
from mutations import MUTANTS, Mutant

import second_order

PACKAGE = Path(second_order.__file__).parent


def stale(mutants: list[Mutant]) -> list[str]:
    """Those whose text does not occur exactly once."""
    sources = {m.file: (PACKAGE / m.file).read_text("utf-8") for m in mutants}
    return [f"{m.name}: {m.file}" for m in mutants if mutated(sources[m.file], m) is None]


def test_no_mutant_is_stale() -> None:
    """If you change a line that a mutant replaces, update `mutations.py`."""
    assert stale(MUTANTS) == []
    assert stale([Mutant("none", "errors.py", "no such text", "", ())]) == ["none: errors.py"]


def test_a_mutant_is_another_source_and_compiles() -> None:
    for file in {mutant.file for mutant in MUTANTS}:
        source = (PACKAGE / file).read_text("utf-8")
        tree = ast.dump(ast.parse(source))
        for mutant in (m for m in MUTANTS if m.file == file):
            changed = mutated(source, mutant)
            assert changed not in (None, source), mutant.name
            assert changed is not None
            assert ast.dump(ast.parse(changed)) != tree, mutant.name


def test_each_mutant_has_a_name_of_its_own_and_tests_that_there_are() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 107
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        assert nodes(mutant), mutant.name  # each is looked for


@pytest.mark.parametrize(
    "part",
    ["optimizers", "training", "kfac", "fosi", "kronecker", "lanczos", "distributed", "measuring"],
)
def test_every_part_of_the_package_has_mutants(part: str) -> None:
    assert sum(mutant.file.startswith(f"{part}/") for mutant in MUTANTS) >= 10

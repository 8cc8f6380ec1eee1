"""CONTRIBUTING.md describes the folders and files of the source."""

from __future__ import annotations

import re

import optimizer_cases
from page_scripts import ROOT
from test_architecture import BELOW

from second_order.kronecker import kinds

TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
TABLE = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)


def test_the_table_has_every_folder_of_the_package() -> None:
    package = ROOT / "src/second_order"
    folders = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    assert set(TABLE) == folders


def test_a_folder_imports_only_folders_below_it_in_the_table() -> None:
    for place, folder in enumerate(TABLE):
        assert BELOW[folder] & set(TABLE) <= set(TABLE[place + 1 :]), folder


def test_the_names_that_a_contributor_looks_for_are_there() -> None:
    assert kinds.KINDS
    assert optimizer_cases.SYSTEMS
    for path in re.findall(r"`([\w/]+\.py)`", TEXT):
        assert any((ROOT / folder / path).exists() for folder in ("", "src/second_order")), path

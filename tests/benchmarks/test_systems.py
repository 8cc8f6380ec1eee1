"""The comparison of all systems on the digits, as it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ranks import script

if TYPE_CHECKING:
    from pool import World


def test_prints_a_table_draws_and_stores_the_runs(world: World, tmp_path: Path) -> None:
    picture = tmp_path / "systems.png"
    stored = tmp_path / "systems.json"
    names = ["SGD", "KAISA COMM-OPT", "DistKFAC, stats", "MRDHO2"]
    arguments = ("--model", "mlp", "--only", *names, "--steps", 6)
    output, _ = world.run(script, 2, "systems", *arguments, "--output", picture, "--json", stored)
    assert picture.read_bytes().startswith(b"\x89PNG")
    runs = json.loads(stored.read_text())["runs"]
    assert [run["name"] for run in runs if run["chosen"]] == names
    for run in runs:
        assert run["steps"] == [0, 5, 6]
        assert run["name"] in output

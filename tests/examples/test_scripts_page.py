"""The scripts of docs/start/quickstart.md run as they stand there, and train what the page says."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from ranks import replaced

if TYPE_CHECKING:
    from pool import World

PAGE = Path(__file__).parents[2] / "docs" / "start/quickstart.md"
(FSDP,) = [
    script
    for script in re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    if "import fully_shard" in script
]
pytestmark = [
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


def told(text: str) -> float:
    """A loss that the page promises."""
    (loss,) = re.findall(text, PAGE.read_text("utf-8"))
    return float(loss)


def played(script: str, folder: Path, *arguments: object) -> tuple[list[float], dict[str, Any]]:
    """The losses that a script prints, run in a folder, and the names it has in the end."""
    here = Path.cwd()
    names = {"__name__": "__main__"}
    os.chdir(folder)
    try:
        argv = {"argv": ["train.py", *map(str, arguments)]}
        with replaced(sys, argv), redirect_stdout(io.StringIO()) as output:
            exec(compile(script, PAGE.name, "exec"), names)
    finally:
        os.chdir(here)
    return [float(loss) for loss in re.findall(r"loss (\S+)", output.getvalue())], names


def on_ranks(
    rank: int, world_size: int, runs: list[tuple[str, Path, tuple[object, ...]]]
) -> list[list[float]]:
    """As above, one run after the other, in the process group that there is."""
    groups = dict.fromkeys(("init_process_group", "destroy_process_group"), lambda *_, **__: None)
    with replaced(dist, groups):
        return [played(script, folder, *arguments)[0] for script, folder, arguments in runs]


def test_fsdp_goes_on_from_its_checkpoint(world: World, tmp_path: Path) -> None:
    """On as many processes, and on one."""
    folders = [tmp_path / name for name in ("whole", "halves", "alone")]
    for folder in folders:
        folder.mkdir()
    whole, halves, alone = folders
    first = [(FSDP, halves, (40,)), (FSDP, alone, (40,))]
    two = world.run(on_ranks, 2, [(FSDP, whole, (80,)), *first, (FSDP, halves, (80,))])[0]
    (later,) = world.run(on_ranks, 1, [(FSDP, alone, (80,))])[0]
    assert len(two[0]) == 4
    assert two[1] + two[3] == two[0]  # to all digits that are printed
    assert two[2] + later == pytest.approx(two[0], rel=1e-3)  # in float32
    assert two[0][-1] < told(r"loss is below (\S+) after 80 steps")

"""The table of errors on docs/how-to/checkpoints.md names the classes that are raised."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from optimizer_cases import make, take
from page_scripts import ROOT, assert_prints, run_script, scripts
from ranks import shard
from saved_states import BATCHES, MLP, are_equal, snapshot, trained

from second_order import DHO2, DPKFAC, KAISA, load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import Forks, World

PAGE = "docs/how-to/checkpoints.md"
ROWS = dict(
    re.findall(r"^\| (.+?) \| `(\w+)`.*? \| .+ \|$", (ROOT / PAGE).read_text("utf-8"), re.M)
)

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def test_a_resumed_run_prints_the_losses_of_the_whole_run(tmp_path: Path, forks: Forks) -> None:
    ((code, shown),) = scripts(PAGE)
    printed = run_script(code, tmp_path, forks)
    assert_prints(printed, shown)
    for line in (*printed.splitlines(), *shown.splitlines()):
        whole, resumed = re.findall(r"\d\.\d+", line)
        assert whole == resumed, line


def load_truncated(optimizer: Any, path: Path) -> None:
    save_checkpoint(optimizer.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-1])
    load_checkpoint(path)


def load_with_nan(optimizer: Any, path: Path) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["base"]["momentum_buffer"][0, 0] = torch.nan
    optimizer.load_state_dict(state)


def load_other_groups(optimizer: Any, path: Path) -> None:
    model = MLP.model()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer.load_state_dict(make(KAISA, groups, model=model).state_dict())


ON_ONE_PROCESS: dict[str, Callable[[Any, Path], object]] = {
    "the file does not exist": lambda optimizer, path: load_checkpoint(path),
    "the file is truncated, or is not a checkpoint": load_truncated,
    "the saved state has another object than tensors and primitives": (
        lambda optimizer, path: save_checkpoint({"generator": torch.Generator()}, path)
    ),
    "a tensor has another shape or a NaN": load_with_nan,
    "a K-FAC optimizer saved it, and DHO2 or MRDHO2 loads it, or the reverse": (
        lambda optimizer, path: optimizer.load_state_dict(trained(DHO2)[1].state_dict())
    ),
    "the base optimizer was another": (
        lambda optimizer, path: optimizer.load_state_dict(trained(KAISA, "AdamW")[1].state_dict())
    ),
    "the parameter groups differ": load_other_groups,
}
ON_TWO_PROCESSES = {
    "only some processes loaded it",
    "other processes store a part of the state",
}


def test_every_row_of_the_table_is_tested() -> None:
    assert ROWS.keys() == ON_ONE_PROCESS.keys() | ON_TWO_PROCESSES


@pytest.mark.parametrize("cause", ON_ONE_PROCESS)
def test_a_cause_raises_the_error_of_its_row_and_changes_nothing(
    cause: str, tmp_path: Path
) -> None:
    model, optimizer = trained(KAISA)
    before = snapshot(model, optimizer)
    with pytest.raises(Exception, match=r".") as caught:
        ON_ONE_PROCESS[cause](optimizer, tmp_path / "a.pt")
    assert type(caught.value).__name__ == ROWS[cause]
    assert are_equal(snapshot(model, optimizer), before)


def errors_of_a_rank(rank: int, world_size: int) -> dict[str, str]:
    """The classes of the errors in the rows that need two processes."""
    errors: dict[str, str] = {}
    model = MLP.model()
    optimizer = make(KAISA, model)
    take(model, optimizer, shard(BATCHES[0], rank, world_size))
    if rank == 0:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    try:
        take(model, optimizer, shard(BATCHES[1], rank, world_size))
    except Exception as error:
        errors["only some processes loaded it"] = type(error).__name__

    model = MLP.model()
    optimizer = make(DPKFAC, model)
    take(model, optimizer, shard(BATCHES[0], rank, world_size))
    try:
        optimizer.state_dict()
    except Exception as error:
        errors["other processes store a part of the state"] = type(error).__name__
    return errors


def test_two_processes_raise_the_errors_of_their_rows(world: World) -> None:
    expected = {cause: ROWS[cause] for cause in ON_TWO_PROCESSES}
    assert world.run(errors_of_a_rank, 2, timeout=60) == [expected, expected]


def test_a_changed_bit_in_a_number_is_not_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    numbers = torch.arange(100.0)
    save_checkpoint({"w": numbers}, path)
    content = path.read_bytes()
    stored = numbers.numpy().tobytes()
    path.write_bytes(content.replace(stored, bytes([stored[0] ^ 1]) + stored[1:]))
    assert not torch.equal(load_checkpoint(path)["w"], numbers)

"""The examples of docs/how-to/migrate.md run: the lines after the change, and torch's before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_code_blocks import blocks, preamble

PAGE = "docs/how-to/migrate.md"
OF_TORCH = "torch.optim."
"""A first line with this name shows an optimizer that is installed here."""

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def side(code: str, mark: str) -> str:
    """Return one side of a diff: the lines with a mark and those that both sides share."""
    lines = [line[1:] for line in code.splitlines() if line[:1] in (mark, " ")]
    return "\n".join(lines) + "\n"


def names_of_page() -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(preamble(PAGE), f"preamble of {PAGE}", "exec"), names)
    return names


def test_the_blocks_run_after_the_change() -> None:
    names = names_of_page()
    for language, code in blocks(PAGE):
        after = side(code, "+") if language == "diff" else code
        exec(compile(after, PAGE, "exec"), names)

        # The optimizer of the block takes a step.
        before = [p.detach().clone() for p in names["model"].parameters()]
        names["optimizer"].zero_grad()
        names["criterion"](names["model"](names["inputs"]), names["targets"]).backward()
        names["optimizer"].step()
        after_step = names["model"].parameters()
        assert not any(map(torch.equal, before, after_step))


def test_the_blocks_of_torch_run_before_the_change() -> None:
    names = names_of_page()
    names["hidden"] = [p for p in names["model"].parameters() if p.ndim == 2]
    names["others"] = [p for p in names["model"].parameters() if p.ndim == 1]
    num_run = 0
    for language, code in blocks(PAGE):
        if language == "diff":
            before = side(code, "-")
            compiled = compile(before, PAGE, "exec")
            if OF_TORCH in before and "kfac" not in before.lower():
                exec(compiled, names)
                num_run += 1
    assert num_run == 3  # AdamW, SGD and Muon

"""Every snippet of docs/frameworks.md runs as it stands, in the order of its section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from stacks import CASE
from torch import nn
from torch.utils.data import DataLoader

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

pytestmark = [
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def snippets() -> dict[str, list[str]]:
    """The blocks of Python by the headings that they are below."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, text = section.split("\n", 1)
        found[title] = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return found


def given(tmp_path: Path) -> dict[str, Any]:
    """What a script has by then."""
    batches = CASE.batches(4, dtype=torch.float32)
    return {
        "torch": torch,
        "make_network": lambda: CASE.model(torch.float32),
        "model": CASE.model(torch.float32),
        "criterion": nn.functional.cross_entropy,
        "loader": DataLoader(batches, batch_size=None),
        "folder": str(tmp_path),
    }


def for_the_trainer(tmp_path: Path) -> dict[str, Any]:
    import in_transformers as hf

    arguments = hf.TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    return {
        "model": hf.model_of("Llama").float(),
        "arguments": arguments,
        "data": hf.examples("Llama"),
    }


@pytest.mark.parametrize("title", snippets())
def test_snippets(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    from in_transformers import fresh_state

    monkeypatch.chdir(tmp_path)
    with fresh_state():
        names = given(tmp_path)
        if "Trainer" in title:
            names |= for_the_trainer(tmp_path)
        blocks = snippets()[title]
        assert blocks
        for block in blocks:
            exec(compile(block, f"{PAGE.name}: {title}", "exec"), names)
    assert "optimizer" in names or "Classifier" in names

"""The snippets in docs/how-to/frameworks.md run as they stand, and train what the page says.

What it trains is compared with a plain loop of torch over whole batches: the micro-batches of a
step in one, with one loss, the mean over all its terms.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_training import decayed_groups, trainable
from models import ZOO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from second_order import DPKFAC, KAISA

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE = Path(__file__).parents[2] / "docs" / "how-to/frameworks.md"
CASE = ZOO["mlp"]
STEPS = 2

pytestmark = [
    pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Make = Callable[[nn.Module], torch.optim.Optimizer]


def with_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = decayed_groups(model, weight_decay=0.1)
    return KAISA(groups, lr=5e-3, base=torch.optim.AdamW)


# By heading and block: the optimizers of its trainings, and the batches to a step.
TRAINED: dict[tuple[str, int], tuple[list[Make], int]] = {
    ("Lightning", 0): ([lambda model: KAISA(model, lr=0.1, momentum=0.9)], 1),
    ("transformers' Trainer", 0): ([with_groups], 2),
    ("transformers' Trainer", 1): (
        [lambda model: KAISA(model, lr=5e-3, base=torch.optim.AdamW, weight_decay=0.0)],
        2,
    ),
    ("transformers' Trainer", 2): ([lambda model: DPKFAC(model, lr=0.1)], 2),
    ("Accelerate", 0): ([lambda model: KAISA(model, lr=0.1, momentum=0.9)], 2),
}


def snippets() -> dict[str, list[str]]:
    """The blocks of Python by the headings that they are below."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, text = section.split("\n", 1)
        if title == "torch.compile":
            break
        found[title] = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return found


def given(tmp_path: Path) -> dict[str, Any]:
    """What a script has by then."""
    model = CASE.model()
    return {
        "torch": torch,
        "make_network": lambda: model,
        "model": model,
        "criterion": nn.functional.cross_entropy,
        "loader": DataLoader(CASE.batches(2 * STEPS), batch_size=None),
        "folder": str(tmp_path),
    }


def for_the_trainer(tmp_path: Path) -> dict[str, Any]:
    import transformers_training as hf

    arguments = hf.TrainingArguments(
        str(tmp_path),
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    return {"model": hf.model_of("Llama"), "arguments": arguments, "data": hf.examples("Llama")}


def whole(batches: Sequence[dict[str, Tensor] | Sequence[Tensor]], parts: int) -> Iterator[Any]:
    """Each `parts` batches as one."""
    for i in range(0, len(batches), parts):
        these = batches[i : i + parts]
        if isinstance(these[0], dict):
            yield {name: torch.cat([each[name] for each in these]) for name in these[0]}
        else:
            yield tuple(map(torch.cat, zip(*these, strict=True)))


def plain(model: nn.Module, make: Make, batches: Sequence[Any]) -> None:
    """Train by a loop of torch; by the schedule and the clipping of the Trainer, if it is its."""
    optimizer = make(model)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        if isinstance(batch, dict):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = group.get("initial_lr", group["lr"])
                group["lr"] *= (len(batches) - step) / len(batches)
        else:
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()


def assert_trains(names: dict[str, Any], block: str, makes: Sequence[Make], parts: int) -> None:
    """Run a snippet, and raise unless it has trained as the plain loops one after another."""
    model = names["model"]
    start = trainable(model)
    twin = copy.deepcopy(model)
    seen = []

    def note(_: nn.Module, __: Any, batch: dict[str, Any]) -> None:
        seen.append({key: batch[key] for key in ("input_ids", "labels") if key in batch})

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    exec(block, names)
    handle.remove()
    batches: Any = seen if seen[0] else list(names["loader"])
    each = len(batches) // len(makes)
    for i, make in enumerate(makes):
        plain(twin, make, list(whole(batches[i * each : (i + 1) * each], parts)))
    found = trainable(model)
    expected = trainable(twin)
    # Factors are in float32, as are these losses of transformers, and Adam makes the rounding of
    # tiny gradients large.
    rtol = 1e-2 if seen[0] else 1e-5
    assert float((found - expected).norm()) <= rtol * float((expected - start).norm())


@pytest.mark.parametrize("title", snippets())
def test_snippets(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    from transformers_training import fresh_state

    monkeypatch.chdir(tmp_path)
    with fresh_state():
        names = given(tmp_path)
        if "Trainer" in title:
            names |= for_the_trainer(tmp_path)
        blocks = snippets()[title]
        assert blocks
        for i, block in enumerate(blocks):
            if (title, i) in TRAINED:
                assert_trains(names, block, *TRAINED[title, i])
            else:
                exec(compile(block, f"{PAGE.name}: {title}", "exec"), names)
    assert "optimizer" in names or "Classifier" in names

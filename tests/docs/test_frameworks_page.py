"""The blocks of docs/how-to/frameworks.md run, and train the model as a plain loop would.

The plain loop takes whole batches: it joins the micro-batches of a step, and its loss is the mean
over all of their terms.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from framework_training import launched, trainable
from models import ZOO
from page_scripts import COMMAND, ROOT, assert_prints, run_script, scripts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from second_order import DPKFAC, KAISA

if TYPE_CHECKING:
    from pool import Forks, World

PAGE = "docs/how-to/frameworks.md"
CASE = ZOO["mlp"]
STEPS = 2

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Training:
    """What the plain loop does, to compare with a block of the page."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    micro_batches: int = 1  # per step


# By heading and position of the block.
TRAININGS = {
    ("Hugging Face Trainer", 0): Training(
        lambda model: KAISA(model, lr=5e-3, base=torch.optim.AdamW, weight_decay=0.0),
        micro_batches=2,
    ),
    ("Hugging Face Trainer", 1): Training(lambda model: DPKFAC(model, lr=0.1), micro_batches=2),
    ("Accelerate", 0): Training(lambda model: KAISA(model, lr=0.1, momentum=0.9), micro_batches=2),
    ("Lightning", 0): Training(lambda model: KAISA(model, lr=0.1, momentum=0.9)),
}


def blocks_by_heading() -> dict[str, list[str]]:
    """The Python blocks below each heading, without complete scripts."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", (ROOT / PAGE).read_text("utf-8"), flags=re.M)[1:]:
        heading, text = section.split("\n", 1)
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        if blocks:
            found[heading] = [block for block in blocks if not COMMAND.match(block)]
    return found


BLOCKS = blocks_by_heading()


def names_for_blocks(folder: Path) -> dict[str, Any]:
    """The names that the page takes for granted."""
    model = CASE.model()
    return {
        "torch": torch,
        "KAISA": KAISA,
        "make_network": lambda: model,
        "model": model,
        "criterion": nn.functional.cross_entropy,
        "loader": DataLoader(CASE.batches(2 * STEPS), batch_size=None),
        "folder": str(folder),
    }


def names_for_trainer(folder: Path) -> dict[str, Any]:
    import transformers_training as hf

    arguments = hf.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    return {"model": hf.model_of("Llama"), "arguments": arguments, "data": hf.examples("Llama")}


def join_micro_batches(batches: Sequence[Any], count: int) -> Iterator[Any]:
    """Each `count` batches as one."""
    for i in range(0, len(batches), count):
        parts = batches[i : i + count]
        if isinstance(parts[0], dict):
            yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        else:
            yield tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def train_by_plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any]
) -> None:
    """Batches of the Trainer, which are dictionaries, get its schedule and gradient clipping."""
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        if isinstance(batch, dict):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * (len(batches) - step) / len(batches)
        else:
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()


def assert_trains(names: dict[str, Any], block: str, training: Training) -> None:
    """Run a block, and raise unless it trains the model as the plain loop does."""
    model = names["model"]
    start = trainable(model)
    twin = copy.deepcopy(model)
    of_trainer: list[dict[str, Any]] = []

    def record(_: nn.Module, __: Any, batch: dict[str, Any]) -> None:
        if batch:
            of_trainer.append({name: batch[name] for name in ("input_ids", "labels")})

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    exec(compile(block, PAGE, "exec"), names)
    handle.remove()

    batches = of_trainer or list(names["loader"])
    whole = list(join_micro_batches(batches, training.micro_batches))
    train_by_plain_loop(twin, training.optimizer(twin), whole)

    # Factors are in float32, as are the losses of transformers, and Adam amplifies the rounding
    # of tiny gradients.
    rtol = 1e-2 if of_trainer else 1e-5
    expected = trainable(twin)
    difference = float((trainable(model) - expected).norm())
    assert difference <= rtol * float((expected - start).norm())


@pytest.mark.parametrize("heading", BLOCKS)
def test_blocks_train_as_a_plain_loop(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(module)
    from transformers_training import fresh_state

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the plain loop is on the CPU
    names = names_for_blocks(tmp_path)
    with fresh_state():
        if "Trainer" in heading:
            names |= names_for_trainer(tmp_path)
        for i, block in enumerate(BLOCKS[heading]):
            if (heading, i) in TRAININGS:
                assert_trains(names, block, TRAININGS[heading, i])
            else:
                exec(compile(block, PAGE, "exec"), names)


def test_every_block_that_trains_is_compared() -> None:
    calls = re.compile(r"trainer\.train\(|\.fit\(|optimizer\.step\(")
    found = {
        (heading, i)
        for heading, blocks in BLOCKS.items()
        for i, block in enumerate(blocks)
        if calls.search(block)
    }
    assert found == set(TRAININGS)


def assert_resumed_losses_agree(printed: str, steps: int) -> None:
    """Raise unless a resumed run has the losses of the whole run, in all printed digits."""
    losses = re.findall(r"^step \d+: loss (\S+), resumed (\S+)$", printed, re.M)
    assert len(losses) == steps
    for loss, resumed_loss in losses:
        assert resumed_loss == loss


def test_the_resumed_trainer_repeats_the_losses_of_the_whole_run(
    tmp_path: Path, forks: Forks
) -> None:
    ((code, shown),) = scripts(PAGE)
    printed = run_script(code, tmp_path, forks)
    assert_prints(printed, shown)
    assert_resumed_losses_agree(printed, steps=3)


SHORTER = {
    "max_steps=60": "max_steps=4",
    "save_steps=30": "save_steps=2",
    "logging_steps=10": "logging_steps=1",
    "checkpoint-30": "checkpoint-2",
    "(40, 50, 60)": "(3, 4)",
}


def run_on_rank(rank: int, world_size: int, code: str) -> tuple[str, int]:
    """What the script prints on this rank, and how often it wraps a model in DDP."""
    from transformers_training import fresh_state

    create = DistributedDataParallel.__init__
    with (
        fresh_state(),
        launched(rank, world_size),
        patch.object(DistributedDataParallel, "__init__", autospec=True, side_effect=create) as ddp,
        redirect_stdout(io.StringIO()) as output,
    ):
        exec(compile(code, PAGE, "exec"), {"__name__": "__main__"})
    return output.getvalue(), ddp.call_count


def test_the_script_trains_one_model_on_two_processes(world: World, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ((code, _),) = scripts(PAGE)
    folder = str(tmp_path / "checkpoints")
    for old, new in (SHORTER | {'"checkpoints"': repr(folder)}).items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    for printed, num_wrapped in world.run(run_on_rank, 2, code, timeout=240):
        assert num_wrapped == 2  # the whole run and the resumed one
        assert_resumed_losses_agree(printed, steps=2)

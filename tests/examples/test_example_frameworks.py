"""The examples of Lightning, the Trainer and Accelerate, a few steps each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from framework_training import launched
from ranks import script
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
TINY = ("--steps", 2, "--batch-size", 4, "--length", 8, "--width", 8, "--layers", 1)


def under_torchrun(rank: int, world_size: int, *arguments: Any) -> tuple[str, bool]:
    """What the script prints, and whether DistributedDataParallel wraps its model."""
    create = DistributedDataParallel.__init__
    with (
        launched(rank, world_size),
        patch.object(DistributedDataParallel, "__init__", autospec=True, side_effect=create) as ddp,
    ):
        output = fresh(*arguments)
    return output, ddp.called


def fresh(*arguments: Any) -> str:
    """Return what a script prints if it is the first to use Accelerate in its process."""
    from transformers_training import fresh_state

    with fresh_state():
        return script(0, 1, *arguments)


def test_lightning_finds_a_rate_saves_and_resumes(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "digits.ckpt"
    saved = script(0, 1, "lightning_digits", "--steps", 3, "--save", path)
    assert re.search(r"step 3  test accuracy \d", saved)
    assert "KAISA over SGD" in saved
    output = script(0, 1, "lightning_digits", "--steps", 5, "--resume", path, "--clip", 1.0)
    assert "step 5  test accuracy" in output
    options = ("--find-lr", "--precision", "bf16-mixed", "--accumulate", 2)
    assert "found a learning rate of" in script(0, 1, "lightning_digits", "--steps", 2, *options)


@pytest.mark.parametrize("model", ["llama", "bert", "gpt2"])
def test_the_trainer_saves_and_resumes(model: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments = ("trainer_language", *TINY, "--model", model, "--folder", tmp_path)
    assert "held-out loss" in fresh(*arguments, "--save-steps", 1)
    resumed = fresh(*arguments, "--save-steps", 1, "--resume", "--steps", 3, "--accumulate", 2)
    assert "held-out loss" in resumed
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").exists()


def test_accelerate_saves_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    arguments = ("accelerate_digits", "--steps", 2, "--folder", tmp_path, "--epochs")
    assert "epoch 1  test accuracy" in fresh(*arguments, 1)
    output = fresh(*arguments, 2, "--resume", "--accumulate", 2)
    assert "epoch 1" not in output
    assert "epoch 2  test accuracy" in output
    assert "KAISA over SGD" in output


def test_frameworks_train_one_model_on_two_processes(world: World, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    ran = {
        "accelerate_digits": ("--steps", 2, "--epochs", 1),
        "trainer_language": (*TINY, "--model", "llama", "--folder", tmp_path),
        "lightning_digits": ("--steps", 2, "--strategy", "ddp"),
    }
    for name, arguments in ran.items():
        results = world.run(under_torchrun, 2, name, *arguments, timeout=240)
        (first, first_is_wrapped), (second, second_is_wrapped) = results
        assert first_is_wrapped
        assert second_is_wrapped
        assert "KAISA over" in first
        assert "2 processes" in first
        assert second == ""

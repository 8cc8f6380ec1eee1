"""The examples of Lightning, the Trainer and Accelerate, a few steps each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import script
from stacks import launched

from second_order import KAISA

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
TINY = ("--steps", 2, "--batch-size", 4, "--length", 8, "--width", 8, "--layers", 1)


def under_torchrun(rank: int, world_size: int, *arguments: Any) -> str:
    with launched(rank, world_size):
        return fresh(*arguments)


def fresh(*arguments: Any) -> str:
    """What a script prints that is the first to use Accelerate in its process."""
    from in_transformers import fresh_state

    with fresh_state():
        return script(0, 1, *arguments)


def test_lightning_finds_a_rate_saves_and_resumes(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "digits.ckpt"
    saved = script(0, 1, "lightning_digits", "--steps", 3, "--save", path)
    assert re.search(r"step 3  test accuracy \d", saved)
    assert "KAISA over SGD" in saved
    told = script(0, 1, "lightning_digits", "--steps", 5, "--resume", path, "--clip", 1.0)
    assert "step 5  test accuracy" in told
    options = ("--find-lr", "--precision", "bf16-mixed", "--accumulate", 2)
    assert "found a learning rate of" in script(0, 1, "lightning_digits", "--steps", 2, *options)


@pytest.mark.parametrize("model", ["llama", "bert", "gpt2"])
def test_trainer(model: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments = ("trainer_language", *TINY, "--model", model, "--folder", tmp_path)
    assert "held-out loss" in fresh(*arguments, "--save-steps", 1)
    resumed = fresh(*arguments, "--save-steps", 1, "--resume", "--steps", 3, "--accumulate", 2)
    assert "held-out loss" in resumed
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").exists()


def test_the_trainer_on_lines_does_not_mind_how_a_batch_is_cut(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The curvature of 12 lines is that of 4 times 3; not where each 3 are taken for a mean."""
    pytest.importorskip("transformers")
    import trainer_language

    def curvature(*arguments: Any, **options: Any) -> tuple[float, float]:
        made: list[Any] = []

        def noted(*args: Any, **given: Any) -> Any:
            made.append(KAISA(*args, **{**given, **options}))
            return made[0]

        monkeypatch.setattr(trainer_language, "KAISA", noted)
        folder = ("--length", 40, "--folder", tmp_path)
        assert "held-out loss" in fresh("trainer_language", *TINY, "--lines", *folder, *arguments)
        found = made[0].statistics()
        return found["trace_G/min"], found["trace_G/max"]

    whole = curvature("--batch-size", 12)
    cut = ("--batch-size", 3, "--accumulate", 4)
    assert curvature(*cut) == pytest.approx(whole, rel=1e-3)
    assert curvature(*cut, loss_reduction="mean") != pytest.approx(whole, rel=2e-2)


def test_accelerate_saves_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    arguments = ("accelerate_digits", "--steps", 2, "--folder", tmp_path, "--epochs")
    assert "epoch 1  test accuracy" in fresh(*arguments, 1)
    told = fresh(*arguments, 2, "--resume", "--accumulate", 2)
    assert "epoch 1" not in told
    assert "epoch 2  test accuracy" in told
    assert "KAISA over SGD" in told


def test_accelerate_steps_on_all_micro_batches(monkeypatch: Any) -> None:
    """No gradient is thrown away between a backward pass and the step."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    calls = []

    def note(of: type, name: str) -> None:
        real = getattr(of, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(of, name, noted)

    note(torch.Tensor, "backward")
    note(KAISA, "step")
    note(KAISA, "zero_grad")
    fresh("accelerate_digits", "--steps", 4, "--epochs", 1, "--accumulate", 2)
    assert calls == ["backward", "backward", "step", "zero_grad"] * 2


def test_on_two_processes(world: World, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    ran = {
        "accelerate_digits": ("--steps", 2, "--epochs", 1),
        "trainer_language": (*TINY, "--model", "llama", "--folder", tmp_path),
        "lightning_digits": ("--steps", 2, "--strategy", "ddp"),
    }
    for name, arguments in ran.items():
        first, second = world.run(under_torchrun, 2, name, *arguments, timeout=240)
        assert "KAISA over" in first
        assert "2 processes" in first
        assert second == ""

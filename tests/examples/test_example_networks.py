"""The residual network, the U-Net, BERT, a frozen body and a PINN, a few steps each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_training import launched
from ranks import script

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
RESNET = ("--steps", 3, "--batch-size", 16, "--width", 4)
UNET = ("--steps", 3, "--batch-size", 4, "--width", 4, "--size", 16)
TUNED = ("--steps", 3, "--batch-size", 32, "--body-steps", 2)
ADAM = ("--optimizer", "adam")
BERT = ("--steps", 2, "--pretrain-steps", 2, "--batch-size", 4, "--length", 16, "--width", 16)


def under_torchrun(rank: int, world_size: int, *arguments: Any) -> str:
    with launched(rank, world_size):
        return script(rank, world_size, *arguments)


@pytest.mark.parametrize(
    ("name", "arguments"), [("resnet", RESNET), ("unet", UNET), ("fine_tuning", TUNED)]
)
def test_an_example_trains_on_one_process_and_on_two(
    world: World, name: str, arguments: Any
) -> None:
    """Only the first process prints, and its numbers differ from those of the base alone."""
    alone = script(0, 1, name, *arguments)
    first, second = world.run(under_torchrun, 2, name, *arguments)
    assert second == ""
    other = {"resnet": "sgd", "unet": "adam", "fine_tuning": "adam"}[name]
    plain = script(0, 1, name, *arguments, "--optimizer", other)
    for output in (alone, first, plain):
        assert re.search(r"step    3 .* loss \d", output)
    assert plain != alone


def test_bert_trains_on_two_processes(world: World) -> None:
    pytest.importorskip("transformers")
    first, second = world.run(under_torchrun, 2, "fine_tune_bert", *BERT, timeout=240)
    assert second == ""
    assert "pre-training" in first
    assert "held-out accuracy:" in first


def test_the_pinn_approaches_the_solution_by_newton_steps() -> None:
    """The Laplacian is that of its network, and Newton steps begin after the warm-up."""
    import pinn

    found = [script(0, 1, "pinn", "--steps", 120, "--side", 6, *m) for m in ((), ADAM)]
    dho2, base = ([float(e) for e in re.findall(r"relative error (\S+)", f)] for f in found)
    assert dho2[0] == base[0]
    assert dho2[1] != base[1]
    assert dho2[1] < dho2[0] < 1.0
    net = pinn.network().double()
    points = torch.rand(3, 2, dtype=torch.float64)
    hessians = [torch.autograd.functional.hessian(lambda x: net(x).sum(), p) for p in points]
    expected = torch.stack([h.trace() for h in hessians])
    assert torch.allclose(pinn.laplacian(net, points).squeeze(), expected)

"""What goes wrong quietly elsewhere: scales, memory, newcomers, overflows, ranks that differ."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from contract import SYSTEMS, each_system, make, take
from models import ZOO
from torch import Tensor
from torch.nn.functional import cross_entropy

from second_order import KAISA, DecompositionError, SecondOrderWarning
from second_order.kronecker import solvers

if TYPE_CHECKING:
    from pool import World

MLP = ZOO["mlp"]
BATCHES = MLP.batches(8)
quiet = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def trained(options: dict[str, Any], scale: float = 1.0) -> list[Tensor]:
    model = MLP.model()
    options = {"lr": 0.05, "damping": 1.0, "relative_damping": True, **options}
    optimizer = make(KAISA, model, **options)
    for x, y in BATCHES[:4]:
        optimizer.zero_grad()
        (scale * cross_entropy(model(x), y)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 1e4])
def test_relative_damping_is_free_of_the_scale_of_the_loss(scale: float) -> None:
    """c times the loss: c² times the curvature, and 1/c times the direction, the same one."""
    options = {"kl_clip": None, "factor_dtype": torch.float32}
    other = {**options, "lr": 0.05 * scale}
    for p, q in zip(trained(options), trained(other, scale), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_a_newcomer_is_solved_as_soon_as_it_has_statistics(how: str) -> None:
    """Not at the next of the long intervals, and without a warning that it is never called."""
    model = MLP.model()
    intervals = {"factor_update_steps": 100, "inv_update_steps": 100}
    late = list(model[2].parameters())
    if how == "unfrozen":
        model[2].requires_grad_(False)
        optimizer = make(KAISA, list(model.parameters()), model=model, **intervals)
    else:
        others = [*model[0].parameters(), *model[4].parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecondOrderWarning)
            optimizer = make(KAISA, others, model=model, **intervals)
    for batch in BATCHES[:3]:
        take(model, optimizer, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        if how == "unfrozen":
            model[2].requires_grad_(True)
        else:
            optimizer.add_param_group({"params": late})
        for batch in BATCHES[3:6]:
            take(model, optimizer, batch)
    held = {row.name: row.inverse_bytes for row in optimizer.summary().rows}
    assert all(held[name] > 0 for name in ("0", "2", "4"))


@quiet
def test_a_checkpoint_gives_a_failing_layer_all_its_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MLP.model()
    optimizer = make(KAISA, model, max_consecutive_failures=2)
    take(model, optimizer, BATCHES[0])
    good = optimizer.state_dict()
    with monkeypatch.context() as patch:
        nothing = lambda matrix: ((), torch.zeros(len(matrix), dtype=torch.bool))  # noqa: E731
        patch.setattr(solvers, "eigh", nothing)
        take(model, optimizer, BATCHES[1])
        with pytest.raises(DecompositionError):
            take(model, optimizer, BATCHES[2])
        optimizer.load_state_dict(good)
        take(model, optimizer, BATCHES[1])  # the first failure of two
    take(model, optimizer, BATCHES[2])


@each_system
def test_processes_that_were_launched_but_not_joined_are_told(
    System: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(SecondOrderWarning, match=r"each process trains alone; call .*init_process"):
        System(MLP.model(), lr=0.1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        System(MLP.model(), lr=0.1)


# Ranks.


def groups_of_many(rank: int, world_size: int) -> int:
    before = dist.new_group
    made = []
    dist.new_group = lambda *a, **k: made.append(a) or before(*a, **k)  # type: ignore[assignment]
    try:
        for _ in range(3):
            KAISA(MLP.model(), lr=0.1, grad_worker_fraction=0.5)
    finally:
        dist.new_group = before
    return len(made)


def test_optimizers_share_their_groups(world: World) -> None:
    """A row, a column and what they compare in, for as many optimizers as there are."""
    assert world.run(groups_of_many, 4) == [3, 3, 3, 3]


def warm_up_from_zero(rank: int, world_size: int, system: int, zeros: bool) -> list[Tensor]:
    """lr 0 at first, and a rank that has nothing to learn from at that step."""
    model = MLP.model()
    optimizer = make(SYSTEMS[system], model, lr=0.0)
    x, y = BATCHES[0]
    if rank == 0 or zeros:
        (cross_entropy(model(x), y) * float(rank == 0)).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    for batch in BATCHES[1:4]:
        take(model, optimizer, batch)
    return [p.detach() for p in model.parameters()]


@quiet
@pytest.mark.parametrize("zeros", [False, True], ids=["no gradient", "gradients of zero"])
@pytest.mark.parametrize("system", range(len(SYSTEMS)))
def test_a_first_step_with_lr_zero_keeps_the_ranks_together(
    world: World, system: int, zeros: bool
) -> None:
    first, second = world.run(warm_up_from_zero, 2, system, zeros, timeout=30)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


# Python's own options.

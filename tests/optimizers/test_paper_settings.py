"""With the settings of its paper each optimizer is the paper's algorithm, to rounding.

The references are written from the papers' equations alone, with dense matrices in float64.
Learning rates fall: the papers' bounds and Newton steps do not follow them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO, Case
from mrdho2_training import BATCHES as EPOCHS
from mrdho2_training import CURVED, EPOCH, loss_at, write
from mrdho2_training import reference as equation_17
from mrdho2_training import train as train_by_role
from optimizer_cases import EXACT, take
from ranks import agreed, assert_same_trajectory, shard, vector
from reference import ReferenceKFAC, cross_entropy
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC
from second_order.papers import paper_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
CONV = ZOO["conv_strided"]


def narrow() -> nn.Module:
    """Three units, of which ReLU switches all off for some examples."""
    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


each_network = pytest.mark.parametrize("case", [MLP, Case("narrow", narrow, (5,))], ids=str)
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
ALL_PAIRS = {"lanczos_iterations": 111}  # exact ones: there are as many parameters


def falling(step: int) -> float:
    return 0.9**step


def rate(step: int) -> float:
    return 0.1 * falling(step)


def trajectory(System: Any, case: Case, batches: Sequence[Batch], **options: Any) -> list[Tensor]:
    """The parameters after each step of the package."""
    model = case.model()
    found = []
    optimizer = System(model, **options)
    schedule = LambdaLR(optimizer, falling)
    for batch in batches:
        take(model, optimizer, batch, case.loss)
        schedule.step()
        found.append(vector(model))
    return found


def unlikely(outputs: Tensor) -> Tensor:
    """Labels that a test can draw as well: the least likely ones."""
    return outputs.detach().argmin(-1)


def likelihood(outputs: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, unlikely(outputs), reduction="sum")


def by_kaisa(case: Case, batches: Sequence[Batch], kl_clip: float | None = 1e-3) -> list[Tensor]:
    return ReferenceKFAC(
        case.model(),
        lr=rate,
        momentum=0.9,
        damping=0.003,
        factor_decay=0.95,
        kl_clip=kl_clip,
        factor_update_steps=1,
        inv_update_steps=10,
    ).trajectory(batches)


def by_dpkfac(case: Case, batches: Sequence[Batch], processes: int) -> list[Tensor]:
    """Layer i's factors are of the batch of process i mod P; the gradient is of all batches."""
    kfac = ReferenceKFAC(
        case.model(), lr=rate, momentum=0.9, damping=0.03, factor_decay=0.95, kl_clip=None
    )
    found = []
    for batch in batches:
        for rank in range(processes):
            own = list(kfac.layers)[rank::processes]
            kfac.update_factors(shard(batch, rank, processes), layers=own)
        kfac.step(*batch, statistics=())
        found.append(vector(kfac.model))
    return found


def by_distkfac(batches: Sequence[Batch], kl_clip: Callable[[int], float]) -> list[Tensor]:
    """With labels drawn from the network, and inputs and gradients summed over locations."""
    kfac = ReferenceKFAC(
        CONV.model(),
        lr=rate,
        momentum=0.9,
        damping=0.1,
        factor_decay=0.95,
        kl_clip=kl_clip,
        solver="inverse",
        approx="reduce",
        factor_update_steps=1,
        inv_update_steps=20,
    )
    found = []
    for x, y in batches:
        kfac.step(x, y, statistics=[(x, unlikely(kfac.model(x)))])
        found.append(vector(kfac.model))
    return found


def by_fosi(batches: Sequence[Batch]) -> list[Tensor]:
    """An epoch of the base alone; then pairs at the beginning of each, from dense Hessians."""
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    schedule = LambdaLR(optimizer, falling)
    found: list[Tensor] = []
    momentum = torch.zeros_like(vector(model))
    V = torch.zeros(len(momentum), 10, dtype=momentum.dtype)
    sizes = torch.ones(10, dtype=momentum.dtype)
    for step, (x, y) in enumerate(batches):
        if step and step % EPOCH == 0:
            H = torch.autograd.functional.hessian(partial(loss_at, batch=CURVED[0]), vector(model))
            values, vectors = torch.linalg.eigh(H)
            sizes = values[-10:].abs()
            V = vectors[:, -10:]
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        g = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
        g1 = V @ (V.T @ g)
        parts = (g - g1).split([p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts, strict=True):
            p.grad = part.view_as(p)
        before = vector(model)
        optimizer.step()
        momentum = 0.9 * momentum + g1
        d1 = -0.01 * V @ ((V.T @ momentum) / sizes)
        d2 = vector(model) - before
        s = min(max(float(sizes[-1] / sizes[0]), 1.0), 3.0)
        write(model, before + d1 + s * (d2 - V @ (V.T @ d2)))
        schedule.step()
        found.append(vector(model))
    return found


@each_network
def test_kaisa_has_the_papers_settings(case: Case) -> None:
    batches = case.batches(25, n=12)
    found = trajectory(KAISA, case, batches, **SGD, **EXACT, **paper_settings(KAISA))
    assert_same_trajectory(found, by_kaisa(case, batches), rtol=1e-10)
    assert not torch.allclose(by_kaisa(case, batches, kl_clip=None)[-1], found[-1], rtol=1e-3)


def on_shards(rank: int, world_size: int, case: Case, batches: Sequence[Batch]) -> list[Tensor]:
    own = [shard(batch, rank, world_size) for batch in batches]
    return trajectory(DPKFAC, case, own, **SGD, **EXACT, **paper_settings(DPKFAC))


@each_network
def test_dpkfac_has_the_papers_settings(world: World, case: Case) -> None:
    batches = case.batches(12, n=12)
    found = agreed(world.run(on_shards, 2, case, batches))
    assert_same_trajectory(found, by_dpkfac(case, batches, 2), rtol=1e-10)


DISTKFAC: dict[str, Any] = {
    "damping": 0.1,
    "fisher": likelihood,
    "async_inverse": False,  # when threads are done depends on the machine
    **EXACT,
}


def test_distkfac_has_the_papers_settings() -> None:
    """The bound on a step decays each half epoch."""
    batches = CONV.batches(25, n=8)
    settings = paper_settings(DistKFAC, epoch_steps=10)
    found = trajectory(DistKFAC, CONV, batches, **{**SGD, **settings, **DISTKFAC})
    expected = by_distkfac(batches, lambda step: 0.01 * 0.96 ** (step // 5))
    assert_same_trajectory(found, expected, rtol=1e-10)


def test_dho2_has_the_papers_settings() -> None:
    settings = paper_settings(DHO2, epoch_steps=EPOCH)
    model = MLP.model()
    found = []
    optimizer = DHO2(model, **SGD, **ALL_PAIRS, **settings)
    optimizer.curvature_closure = lambda: cross_entropy(model(CURVED[0][0]), CURVED[0][1])
    schedule = LambdaLR(optimizer, falling)
    for x, y in EPOCHS:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        found.append(vector(model))
    assert_same_trajectory(found, by_fosi(EPOCHS), rtol=1e-10)


def in_roles(rank: int, world_size: int) -> dict[str, Any]:
    settings = paper_settings(MRDHO2, epoch_steps=EPOCH)
    return train_by_role(rank, world_size, {**SGD, **settings, **ALL_PAIRS})


def test_mrdho2_has_the_papers_settings(world: World) -> None:
    """A warm-up of one epoch, and two epochs that end with equation 17."""
    found = world.run(in_roles, 3)
    workers = agreed([each["trajectory"] for each in found if each["role"] == "worker"])
    expected, _ = equation_17(
        "paper", num_largest=10, num_smallest=0, alpha=0.01, first=EPOCH, **SGD
    )
    assert_same_trajectory(workers, expected, rtol=1e-10)


def test_unknown_settings_raise() -> None:
    with pytest.raises(TypeError, match="pass one of the classes KAISA, DPKFAC, DistKFAC"):
        paper_settings(torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"paper_settings\(DHO2, epoch_steps=len\(loader\)\)"):
        paper_settings(DHO2)
    with pytest.raises(ValueError, match="epoch_steps=0 is below 1"):
        paper_settings(DistKFAC, epoch_steps=0)

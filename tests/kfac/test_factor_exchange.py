"""Factors that one rank stores: a share of the memory, sent to no other rank."""

from __future__ import annotations

import copy
import io
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from optimizer_cases import Imitation, noted, take
from placement_training import count_factors, network, written
from ranks import agreed, assert_same_trajectory, follow, kaisa
from reference import cross_entropy, empirical_factors
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from second_order import SecondOrderError
from second_order.checkpoint.saved import HEADER
from second_order.kronecker.storage import unpack_upper_triangular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World
    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
REDUCE = {"factor_exchange": "reduce"}
SPREAD = {**REDUCE, "grad_worker_fraction": 0.5, "colocate_factors": False}


def factors_of_shards(
    rank: int, world_size: int, batch: Batch, counts: Sequence[int], options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    x, y = (part.split(list(counts))[rank] for part in batch)
    model = MLP.model()
    optimizer = kaisa(model, **options)
    optimizer.zero_grad()
    if counts[rank]:
        cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.consolidate(to=None)
    state = optimizer.state_dict()["state"]
    return [state[index]["curvature"] for index in (0, 2, 4)]


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ([1, 2, 6, 3], {"grad_worker_fraction": 0.5}),
        ([4, 0, 5, 3], SPREAD),
        ([0, 0, 12, 0], {"grad_worker_fraction": 0.5}),
        ([0, 0, 12, 0], SPREAD),
    ],
)
def test_ranks_are_weighted_by_their_examples(
    world: World, counts: list[int], options: dict[str, Any]
) -> None:
    """A rank without examples may keep a factor of the others'."""
    batch = MLP.batch(12)
    for found in world.run(factors_of_shards, 4, batch, counts, options):
        for layer, part in zip(("0", "2", "4"), found, strict=True):
            whole = empirical_factors(MLP.model(), *batch, cross_entropy, layer)
            for letter, full in zip("AG", whole, strict=True):
                factor = unpack_upper_triangular(part[letter], full.shape[-1])
                torch.testing.assert_close(factor, full, rtol=1e-10, atol=1e-12)
            means = [full.diagonal(dim1=-2, dim2=-1).mean(-1) for full in whole]
            torch.testing.assert_close(part["mean_eigenvalues"], torch.stack(means))


def stored_bytes(
    rank: int, world_size: int, widths: Sequence[int], options: dict[str, Any]
) -> tuple[list[tuple[bool, bool]], list[Tensor], int, int]:
    """Which factors there are, what all ranks have, and the bytes of factors and inverses."""
    model = network(widths)
    optimizer = kaisa(model, **options)
    x = torch.randn(4, widths[0], dtype=torch.float64)
    for _ in range(2):
        take(model, optimizer, (x + rank, torch.zeros(4, dtype=torch.int64)))
    held = []
    for block, layer in optimizer._curvature.plan.items():
        assert block.factors is not None
        held.append(tuple(letter in block.factors.stored for letter in "AG"))
        if options.get("factor_exchange") == "reduce":
            assert held[-1] == tuple(solver == rank for solver in layer.inverse_ranks)
    everywhere = [
        t for b in optimizer._curvature.layers.blocks for t in (b.factors.weight, b.factors.means)
    ]  # type: ignore[union-attr]
    summary = optimizer.summary()
    return held, everywhere, summary.factor_bytes, summary.inverse_bytes


@pytest.mark.parametrize(
    ("world_size", "workers", "colocate"),
    [(1, 1, True), (2, 2, False), (3, 1, True), (3, 1, False), (4, 2, False)],
)
def test_each_factor_is_on_one_rank_and_its_trace_on_all_ranks(
    world: World, world_size: int, workers: int, colocate: bool
) -> None:
    """On the one that decomposes it."""
    widths = [9, 8, 7, 6, 3]
    options = {"colocate_factors": colocate, "grad_worker_fraction": workers / world_size}
    results = world.run(stored_bytes, world_size, widths, {**options, **REDUCE})
    for layer in range(4):
        for which in range(2):
            assert sum(held[layer][which] for held, *_ in results) == 1
    assert sum(factors for _, _, factors, _ in results) == stored_bytes(0, 1, widths, {})[2]
    for _, everywhere, _, _ in results:
        for own, first in zip(everywhere, results[0][1], strict=True):
            assert torch.equal(own, first)
    every = world.run(stored_bytes, world_size, widths, options)
    assert all(factors == stored_bytes(0, 1, widths, {})[2] for _, _, factors, _ in every)


BATCHES = MLP.batches(7, n=12)


def consolidated(
    rank: int, world_size: int, to: int | None, options: dict[str, Any], steps: int = 3
) -> dict[str, Any]:
    model = MLP.model()
    optimizer = kaisa(model, **options)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:steps])
    optimizer.consolidate(to=to)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("to", [0, 2, None])
def test_the_rank_that_saves_has_all_factors(world: World, to: int | None) -> None:
    """The same ones that one process would have."""
    whole = consolidated(0, 1, None, {})
    results = world.run(consolidated, 3, to, SPREAD | {"grad_worker_fraction": 1 / 3})
    for rank, saved in enumerate(results):
        if to in (rank, None):
            assert count_factors(saved) == {"A": 3, "G": 3}
            for index, entry in whole["optimizer"]["state"].items():
                part = saved["optimizer"]["state"][index]["curvature"]
                assert part.keys() == entry["curvature"].keys()
                for key, value in entry["curvature"].items():
                    if isinstance(value, Tensor):
                        torch.testing.assert_close(part[key], value, rtol=1e-9, atol=1e-12)
        else:
            assert count_factors(saved).total() < 6
    if to is not None:
        assert sum(count_factors(saved).total() for saved in results) < 12


def after_consolidation(rank: int, world_size: int, wrapped: bool) -> list[tuple[int, bool]]:
    """The bytes of state beyond those stored, and whether state_dict() may be called."""
    model = MLP.model()
    optimizer = kaisa(model, **REDUCE)
    wrapper: Any = Imitation(optimizer) if wrapped else optimizer
    found = []
    for batch in BATCHES[:2]:
        follow(rank, world_size, model, optimizer, MLP, [batch])
        for how in ("collected", "stepped"):
            if how == "collected":
                wrapper.consolidate(to=None)
                saved = wrapper.state_dict()["state"].values()
                allowed = True
            else:
                follow(rank, world_size, model, optimizer, MLP, [batch])
                with pytest.raises(SecondOrderError, match="consolidate"):
                    wrapper.state_dict()
                saved = optimizer.state.values()
                allowed = False
            curvature = [parts["curvature"] for parts in saved]
            stored_here = {
                id(b.stored(which)) for b in optimizer._curvature.layers.blocks for which in "AG"
            }
            copies = [
                part[which]
                for part in curvature
                for which in "AG"
                if which in part and id(part[which]) not in stored_here
            ]
            found.append((sum(t.nbytes for t in copies), allowed))
    return found


@pytest.mark.parametrize("wrapped", [False, True])
def test_gathered_factors_are_dropped_at_the_next_step(world: World, wrapped: bool) -> None:
    """Also if a wrapper of Lightning's collects and saves."""
    for found in world.run(after_consolidation, 2, wrapped):
        collected = found[0::2]
        stepped = found[1::2]
        assert all(size > 0 and allowed for size, allowed in collected)
        assert all(size == 0 and not allowed for size, allowed in stepped)


def full_state(rank: int, world_size: int, to: Any) -> Counter[str]:
    model = MLP.model()
    optimizer = kaisa(model, **REDUCE)
    follow(rank, world_size, model, optimizer, MLP, BATCHES[:1])
    if to != "no rank":
        optimizer.consolidate(to=to)
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=how)
    return count_factors({"optimizer": {"state": state.get("state", {})}})


def test_a_full_state_dict_requires_consolidate(world: World) -> None:
    """Rank 0 alone writes the whole checkpoint."""
    for error in world.run(full_state, 2, "no rank", expect_errors=True):
        assert isinstance(error, SecondOrderError)
        assert "consolidate(to=0)" in str(error)
    for to in (0, None):
        first, second = world.run(full_state, 2, to)
        assert first == {"A": 3, "G": 3}
        assert not second  # torch gives it to rank 0 alone


def without(saved: dict[str, Any], *lost: tuple[int, str]) -> dict[str, Any]:
    """A checkpoint without some factors: (index of the weight, "A" or "G")."""
    saved = copy.deepcopy(saved)
    for index, letter in lost:
        del saved["optimizer"]["state"][index]["curvature"][letter]
    return saved


def resume_damaged(
    rank: int, world_size: int, data: bytes, options: dict[str, Any]
) -> tuple[list[Tensor], list[list[str]], list[str]]:
    """Parameters, and the layers without an inverse, after each step; warnings."""
    saved = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = kaisa(model, **options)
    trajectory = []
    unsolved = []
    with noted() as messages:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for batch in BATCHES[3:]:
            trajectory += follow(rank, world_size, model, optimizer, MLP, [batch])
            unsolved.append(
                [block.name for block in optimizer._curvature.layers.blocks if not block.solved]
            )
    return trajectory, unsolved, messages


@pytest.mark.parametrize(
    ("lost", "world_size"),
    [([(2, "A")], 1), ([(2, "G")], 2), ([(2, "A"), (2, "G"), (4, "A")], 3)],
)
def test_a_layer_with_a_lost_factor_starts_its_averages_again(
    world: World, lost: list[tuple[int, str]], world_size: int
) -> None:
    """With a warning on every rank. Other layers keep their averages."""
    whole = world.run(consolidated, 2, 0, REDUCE)[0]
    data = written(without(whole, *lost))
    names = sorted({str(index) for index, _ in lost})
    options = {"kl_clip": None, "grad_worker_fraction": 1 / world_size, **REDUCE}
    results = world.run(resume_damaged, world_size, data, options)
    found = agreed([trajectory for trajectory, _, _ in results])
    expected = expected_after_loss(written(whole), names)
    assert_same_trajectory(found, expected)
    for _, unsolved, messages in results:
        assert unsolved == [[], [], [], []]
        assert len(messages) == len(names)
        for name, message in zip(names, messages, strict=True):
            assert f"a factor of layer {name!r} is not loaded" in message
            assert "without consolidate()" in message


def expected_after_loss(data: bytes, names: Sequence[str]) -> list[Tensor]:
    """By one process: those layers without their past."""
    saved = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    model.load_state_dict(saved["model"])
    state = saved["optimizer"]
    for index in map(int, names):
        part = state["state"][index]["curvature"]
        state["state"][index]["curvature"] = {key: part[key] for key in HEADER}
    optimizer = kaisa(model, kl_clip=None)
    optimizer.load_state_dict(state)
    return follow(0, 1, model, optimizer, MLP, BATCHES[3:])


def saved_at_once(rank: int, world_size: int, data: bytes) -> tuple[list[str], dict[int, Any]]:
    """The layers that have curvature after a load, and the state of the next checkpoint."""
    model = MLP.model()
    optimizer = kaisa(model, **REDUCE)
    optimizer.load_state_dict(torch.load(io.BytesIO(data))["optimizer"])
    covered = list(optimizer.curvature())
    optimizer.consolidate(to=None)
    return covered, optimizer.state_dict()["state"]


def test_a_lost_factor_is_also_missing_from_the_next_checkpoint(world: World) -> None:
    """And not a matrix of zeros there. No rank takes its layer for one that has curvature."""
    whole = world.run(consolidated, 2, 0, REDUCE)[0]
    data = written(without(whole, (0, "G"), (2, "A")))
    for covered, state in world.run(saved_at_once, 2, data):
        assert covered == ["4"]
        found = {(i, w) for i in (0, 2, 4) for w in "AG" if w in state[i]["curvature"]}
        assert found == {(0, "A"), (2, "G"), (4, "A"), (4, "G")}
        for index, which in found:
            expected = whole["optimizer"]["state"][index]["curvature"][which]
            assert torch.equal(state[index]["curvature"][which], expected)

"""Messages by shares: the same values bit for bit, and no rank holds more than the whole."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import counted

from second_order.distributed import buckets
from second_order.distributed import world as worlds
from second_order.distributed.buckets import goes_by_shares, goes_by_sum, overlaps
from second_order.distributed.world import World, deliver_parts
from second_order.sharded import chunk

if TYPE_CHECKING:
    import pool

# The arithmetic.


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 60), st.integers(0, 60))
def test_what_ranks_have_of_a_run_is_all_of_it(total: int, ranks: int, a: int, b: int) -> None:
    start, stop = sorted((min(a, total), min(b, total)))
    shares = [range(*chunk(total, ranks, rank)) for rank in range(ranks)]
    found = overlaps(total, ranks, (start, stop))
    assert found == [len(set(share) & set(range(start, stop))) for share in shares]
    assert sum(found) == stop - start


def test_balanced_and_small_messages_go_directly() -> None:
    large = 2**30
    assert not goes_by_shares(4096, large // 4096, large), "each rank has its part"
    assert goes_by_shares(64, large, large), "one rank has everything"
    assert not goes_by_shares(2, large, large), "two ranks exchange as much as there is"
    assert not goes_by_shares(64, 2**10, 2**10)


def test_messages_of_many_ranks_go_by_a_sum() -> None:
    """Where a message to each takes longer than sending everything twice."""
    assert goes_by_sum(4096, 2**26, "nccl"), "a bucket"
    assert goes_by_sum(64, 5_000_000, "nccl")
    assert not goes_by_sum(64, 6_000_000, "nccl")
    assert not goes_by_sum(8, 2**20, "nccl")
    assert not any(goes_by_sum(ranks, 1, "nccl") for ranks in range(1, 6)), "no fewer messages"
    assert not goes_by_sum(4096, 0, "nccl")
    assert not goes_by_sum(4096, 2**20, "gloo")


# The messages.


def addends(rank: int) -> list[torch.Tensor]:
    """Numbers whose sum depends on its order."""
    generator = torch.Generator().manual_seed(rank)
    large = [3.0**rank * torch.randn(n, generator=generator, dtype=torch.float64) for n in (7, 1)]
    half = torch.randn(5, generator=generator).to(torch.bfloat16)
    return [
        *large,
        half,
        torch.randn((0,)).double(),
        torch.randn(3, 4, generator=generator).double(),
    ]


def summed_and_copied(
    rank: int, world_size: int, seed: int, small_bytes: int, by_sum: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor | None], Counter[str]]:
    world, chance = World(), random.Random(seed)
    tensors, copies = addends(rank), addends(rank)
    wanted = [chance.choice([None, None, 0, world_size - 1, 1]) for _ in tensors]
    sources = [chance.choice([1, 1, world_size - 1]) for _ in copies]
    with (
        patch.object(buckets, "SMALL_BYTES", small_bytes),
        patch.object(worlds, "goes_by_sum", lambda _, whole, __: by_sum and whole > 0),
        counted() as counts,
    ):
        first, second = world.reduce(tensors, wanted), world.reduce(copies[:1], [1])
        first.wait()
        second.wait()
        world.broadcast(copies[1:], sources[1:])
        routes = {i: (source, range(world_size)) for i, source in enumerate(sources)} | {
            "alone": (0, [world_size - 1])
        }
        pieces = {key: ((3,), (i, 2)) for i, key in enumerate(routes)}
        mine = {
            key: (torch.full((3,), 1.0 + source), torch.rand(shape[1], generator=seeded(i)))
            for i, ((key, shape), (source, _)) in enumerate(
                zip(pieces.items(), routes.values(), strict=True)
            )
            if source == rank and key != 2  # which is missing on its source
        }
        delivered = deliver_parts(world, pieces, routes, mine, torch.float32, torch.device("cpu"))
    parts = [part for key in routes for part in delivered.get(key, (None,))]
    return tensors, copies, parts, +counts


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_by_shares_is_bit_for_bit_as_directly(
    world: pool.World, world_size: int, seed: int
) -> None:
    directly = world.run(summed_and_copied, world_size, seed, 2**30)
    by_shares = world.run(summed_and_copied, world_size, seed, 0)
    for expected, found in zip(directly, by_shares, strict=True):
        for theirs, ours in zip(expected[:3], found[:3], strict=True):
            assert len(theirs) == len(ours)
            assert all(same(a, b) for a, b in zip(theirs, ours, strict=True))
        assert set(expected[3]) == {"all_to_all_single"}
        gathering = {"all_gather_single", "all_gather_into_tensor"} & set(found[3])
        assert gathering, "nothing went by shares"
    before = [addends(rank) for rank in range(world_size)]
    pairs = zip([found[0] for found in by_shares], before, strict=True)
    assert any(not same(a, b) for after, old in pairs for a, b in zip(after, old, strict=True))


@pytest.mark.parametrize("seed", [0, 1])
def test_by_a_sum_is_as_directly_but_for_the_order_of_addends(world: pool.World, seed: int) -> None:
    """Copies are the same bit for bit; what is one's own alone is changed nowhere else."""
    directly = world.run(summed_and_copied, 4, seed, 2**30)
    by_sum = world.run(summed_and_copied, 4, seed, 2**30, True)
    for expected, found in zip(directly, by_sum, strict=True):
        assert all(
            torch.allclose(a, b, rtol=1e-14 if a.dtype == torch.float64 else 0)
            for a, b in zip(expected[0], found[0], strict=True)
        )
        copies = zip(expected[1][1:] + expected[2], found[1][1:] + found[2], strict=True)
        assert all(same(a, b) for a, b in copies)
        assert found[3]["all_to_all_single"] <= 1, "what goes to some ranks alone"
        assert found[3]["all_reduce"] > 0


def odd_values(rank: int, world_size: int) -> list[bytes]:
    """Copies from the last rank, of zeros of both signs and what is no number, by their bits."""
    odd = [0.0, -0.0, float("inf"), float("nan"), 2.0**-149]
    tensors = [torch.tensor(odd) if rank == source else torch.ones(5) for source in (2, 0)]
    with patch.object(worlds, "goes_by_sum", lambda *_: True):
        World().broadcast(tensors, [2, 0])
    return [tensor.numpy().tobytes() for tensor in tensors]


def test_copies_by_a_sum_keep_every_bit(world: pool.World) -> None:
    """Ranks would part otherwise: the source has its own."""
    first, *others = world.run(odd_values, 3)
    assert all(other == first for other in others)
    assert len(set(first)) == 1


def narrow(rank: int, world_size: int) -> list[float]:
    total = torch.tensor([256.0 if rank == 0 else 1.0])
    with patch.object(worlds, "goes_by_sum", lambda *_: True):
        World().wired(torch.bfloat16).reduce([total], [1]).wait()
    return total.tolist()


def test_narrow_messages_add_up_wide_by_a_sum(world: pool.World) -> None:
    """1 is half of a spacing at 256 in bfloat16."""
    assert world.run(narrow, 4) == [[256.0], [259.0], [1.0], [1.0]]


def hooked_future(rank: int, world_size: int) -> tuple[list[torch.Tensor], Counter[str]]:
    tensors = addends(rank)
    with patch.object(buckets, "SMALL_BYTES", 0), counted() as counts:
        World().reduce(tensors, [1] * len(tensors), once=True).future().wait()
    return tensors, +counts


def test_sums_in_one_message_have_a_future(world: pool.World) -> None:
    """In the place of shares an all-reduce; only the owner takes the sum."""
    results = world.run(hooked_future, 3)
    for i, mine in enumerate(results[1][0]):
        total = torch.stack([addends(rank)[i].double() for rank in range(3)]).sum(0)
        assert torch.allclose(mine.double(), total, rtol=1e-2 if i == 2 else 1e-14)
    assert torch.equal(results[0][0][0], addends(0)[0])
    assert all(set(counts) == {"all_reduce"} for _, counts in results)

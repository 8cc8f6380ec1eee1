"""The collectives: what arrives, in how many messages, and over which groups.

Functions that take (rank, world_size, ...) run on the pool's ranks; they undo what they patch, as
the ranks outlive the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import counted

from second_order import RankMismatchError
from second_order.distributed import world as worlds
from second_order.distributed.assignment import Grid
from second_order.distributed.world import Route, World, send_tensors, sum_in_order
from second_order.optimizers.consistency import require_same

if TYPE_CHECKING:
    from collections import Counter

    import pool


# Sums.


def assorted(rank: int) -> list[torch.Tensor]:
    """Tensors of many shapes, dtypes and strides, exact in all of them, different on each rank."""
    return [
        torch.arange(6.0).view(2, 3) * (rank + 1),
        torch.tensor(0.5 + rank, dtype=torch.float64),
        torch.arange(5, dtype=torch.bfloat16) + rank,
        torch.empty(0, 3),
        torch.tensor([1, -2]) * (rank + 1),
        (torch.arange(12.0).view(3, 4) - rank).mT,
        torch.full((2, 1, 2), 2.0**-40 * (rank + 1), dtype=torch.float64),
        torch.tensor(-3.0 * rank),
        torch.arange(8.0).view(1, 2, 2, 2).to(memory_format=torch.channels_last) * rank,
    ]


def summed(rank: int, world_size: int, bucket_bytes: int) -> tuple[list[torch.Tensor], int, bool]:
    tensors = assorted(rank)
    untouched = [tensor.clone() for tensor in tensors]
    with patch.object(worlds, "BUCKET_BYTES", bucket_bytes), counted("all_reduce") as counts:
        pending = World().all_reduce(tensors)
        early = all(torch.equal(a, b) for a, b in zip(tensors, untouched, strict=True))
        pending.wait()
        pending.wait()  # nothing is left to do
    return tensors, counts["all_reduce"], early


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("bucket_bytes", "messages"),
    [(1 << 20, 4), (100, 5), (1, 9)],
    ids=["one a dtype", "split", "one a tensor"],
)
def test_sums_support_any_shape_and_dtype(
    world: pool.World, world_size: int, bucket_bytes: int, messages: int
) -> None:
    expected = [
        torch.stack(column).sum(0) for column in zip(*map(assorted, range(world_size)), strict=True)
    ]
    for tensors, sent, early in world.run(summed, world_size, bucket_bytes):
        for tensor, total in zip(tensors, expected, strict=True):
            assert tensor.dtype == total.dtype
            assert torch.equal(tensor, total)
        assert early, "tensors changed before wait()"
        assert sent == (messages if world_size > 1 else 0)


def test_low_precision_sums_accumulate_in_float32_in_rank_order() -> None:
    """256 has neighbours two away in bfloat16, where twice 1 more would be nothing."""
    rows = torch.tensor([[256.0], [1.0], [1.0]])
    for dtype in (torch.bfloat16, torch.float32):
        total = sum_in_order(rows.to(dtype))
        assert (total.dtype, float(total)) == (torch.float32, 258.0)
    assert sum_in_order(rows.double()).dtype == torch.float64


LARGE = {torch.bfloat16: 256.0, torch.float16: 2048.0}


def half_precision(
    rank: int, world_size: int, dtype: torch.dtype, backend: str
) -> list[torch.Tensor]:
    """1 is half of a spacing there: what is added in float32 rounds once, at the end.

    Each rank has the large addend of some element, because gloo may add in any order.
    """
    world = World(dist.new_group(backend=backend))
    total = torch.ones(world_size + 1, dtype=dtype)
    total[rank] = LARGE[dtype]
    total[-1] = rank
    for_all = total.clone()
    for_third = total.clone()
    world.reduce([for_all, for_third], [None, 2]).wait()
    first, last = (torch.full((1,), rank + 0.5, dtype=dtype) for _ in range(2))
    world.broadcast([first, last], [0, 3])
    world.all_reduce([total]).wait()
    sent = torch.full((3,), 1.5 - rank, dtype=dtype)
    world.broadcast_from_first([sent])
    return [total, for_all, for_third, first, last, sent]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_gloo_sends_half_precision(world: pool.World, dtype: torch.dtype, backend: str) -> None:
    """Also if the group has a backend for each device, as after `init_process_group()`."""
    for rank, received in enumerate(world.run(half_precision, 4, dtype, backend)):
        total, for_all, for_third, first, last, sent = received
        assert {each.dtype for each in received} == {dtype}
        assert torch.equal(total, torch.tensor([*[LARGE[dtype] + 3.0] * 4, 6.0]).to(dtype))
        assert torch.equal(for_all, total)
        assert torch.equal(for_third, total) == (rank == 2)
        assert torch.equal(first, torch.tensor([0.5]).to(dtype))
        assert torch.equal(last, torch.tensor([3.5]).to(dtype))
        assert torch.equal(sent, torch.full((3,), 1.5).to(dtype))


# Sums for their owners.


def summed_to(
    rank: int, world_size: int, owners: list[int | None], bucket_bytes: int
) -> tuple[list[torch.Tensor], Counter[str], bool]:
    tensors = assorted(rank)
    untouched = [tensor.clone() for tensor in tensors]
    with patch.object(worlds, "BUCKET_BYTES", bucket_bytes), counted() as counts:
        pending = World().reduce(tensors, owners)
        early = all(torch.equal(a, b) for a, b in zip(tensors, untouched, strict=True))
        pending.wait()
        pending.wait()  # nothing is left to do
    return tensors, counts, early


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("owners", ["all", "one", "in turn", "mixed"])
@pytest.mark.parametrize(
    ("bucket_bytes", "messages"),
    [(1 << 20, 4), (100, 5), (1, 9)],
    ids=["one a dtype", "split", "one a tensor"],
)
def test_sums_reach_only_their_owners(
    world: pool.World, world_size: int, owners: str, bucket_bytes: int, messages: int
) -> None:
    """Whatever shape, dtype and bucket; what is not one's own stays as it was."""
    addends = [assorted(rank) for rank in range(world_size)]
    count = len(addends[0])
    last = world_size - 1
    destinations: list[int | None] = {
        "all": [None] * count,
        "one": [last] * count,
        "in turn": [i % world_size for i in range(count)],
        "mixed": [(None, last, 0, last)[i % 4] for i in range(count)],
    }[owners]
    expected = [torch.stack(column).sum(0) for column in zip(*addends, strict=True)]
    results = world.run(summed_to, world_size, destinations, bucket_bytes)
    for rank, (tensors, sent, early) in enumerate(results):
        for i, tensor in enumerate(tensors):
            own = destinations[i] in (rank, None)
            assert tensor.dtype == expected[i].dtype
            assert torch.equal(tensor, expected[i] if own else addends[rank][i])
        assert early, "tensors changed before wait()"
        assert set(sent) <= {"all_to_all_single", "all_reduce"}
        assert sum(sent.values()) == (messages if world_size > 1 else 0)
        if owners == "all" and world_size > 2:
            assert sent["all_reduce"] >= messages - 1, "an empty tensor is even"


ROUNDING = [1.0, 2.0**53, -(2.0**53), 1.0]


def summed_in_some_order(rank: int, world_size: int) -> list[torch.Tensor]:
    drawn = [ROUNDING[rank], *torch.randn(999, generator=seeded(rank)).tolist()]
    addends = [torch.tensor(drawn).double() for _ in range(world_size)]
    World().reduce(addends, range(world_size)).wait()
    return addends


def seeded(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_owners_add_in_rank_order(world: pool.World, world_size: int) -> None:
    """So that all owners agree bit for bit: (1 + 2⁵³) - 2⁵³ is 0, and 1 in another order."""
    expected = torch.zeros(1000, dtype=torch.float64)
    for rank in range(world_size):
        drawn = torch.randn(999, generator=seeded(rank)).tolist()
        expected += torch.tensor([ROUNDING[rank], *drawn]).double()
    results = world.run(summed_in_some_order, world_size)
    assert all(torch.equal(found[rank], expected) for rank, found in enumerate(results))


def uneven(rank: int, world_size: int) -> tuple[list[float], list[float], list[bytes], Any]:
    """Sums and copies of which one rank has nearly everything."""
    world = World()
    total = torch.tensor([256.0 if rank == 0 else 1.0])
    pair = torch.full((4,), float(rank))
    odd = [0.0, -0.0, float("inf"), float("nan"), 2.0**-149]
    tensors = [torch.tensor(odd) if rank == source else torch.ones(5) for source in (2, 0)]
    with counted() as counts:
        world.reduce([total], [1], torch.bfloat16).wait()
        world.reduce([pair], [1]).wait()
        world.broadcast(tensors, [2, 0])
        world.broadcast(tensors[:1], [2])
    return total.tolist(), pair.tolist(), [t.numpy().tobytes() for t in tensors], +counts


def test_uneven_messages_are_all_reduced(world: pool.World) -> None:
    """Narrow sums are added wide: 1 is half of a spacing at 256 in bfloat16. Copies keep bits."""
    results = world.run(uneven, 4)
    assert [total for total, _, _, _ in results] == [[256.0], [259.0], [1.0], [1.0]]
    assert [pair[0] for _, pair, _, _ in results] == [0.0, 6.0, 2.0, 3.0]
    assert len({tuple(copies) for _, _, copies, _ in results}) == 1
    assert len(set(results[0][2])) == 1
    for *_, counts in results:
        assert counts == {"all_reduce": 3, "all_to_all_single": 1}


# Deliveries and broadcasts.


SHAPES = {"a": ((2, 3), (), (4,)), "b": ((0, 3),), "c": ((5,), (1, 1, 2)), "lost": ((2, 2), (3,))}


def parts_of(key: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    start = 10.0 * list(SHAPES).index(key)
    return tuple(
        (torch.arange(float(torch.Size(shape).numel())) + start + i).view(shape).to(dtype)
        for i, shape in enumerate(SHAPES[key])
    )


def parcels_delivered(
    rank: int, world_size: int, routes: dict[str, Route], dtype: torch.dtype
) -> tuple[dict[str, tuple[torch.Tensor, ...]], Counter[str]]:
    """Sources have their parts in another dtype, and "lost" is nowhere."""
    has = [key for key, (source, _) in routes.items() if source == rank and key != "lost"]
    own = {key: parts_of(key, torch.float32) for key in has}
    with counted() as counts:
        found = send_tensors(World(), SHAPES, routes, own, dtype, torch.device("cpu"))
    assert all(found[key] is own[key] for key in own)
    return found, counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parts_arrive_in_their_shapes(
    world: pool.World, world_size: int, dtype: torch.dtype
) -> None:
    """What is missing on its source arrives as zeros; strangers to an item get nothing of it."""
    last = world_size - 1
    all_ranks = list(range(world_size))
    routes = {
        "a": Route(0, all_ranks),
        "b": Route(last, [0]),
        "c": Route(last, [last]),
        "lost": Route(last, [0]),
    }
    for rank, (found, sent) in enumerate(world.run(parcels_delivered, world_size, routes, dtype)):
        expected = {key for key, (source, to) in routes.items() if rank in (source, *to)}
        if rank == last:
            expected.discard("lost")
        assert found.keys() == expected
        assert sum(sent.values()) == (world_size > 1)
        for key, parts in found.items():
            here = routes[key][0] == rank
            for part, right in zip(parts, parts_of(key, dtype), strict=True):
                assert part.shape == right.shape
                assert part.dtype == (torch.float32 if here else dtype)
                assert torch.equal(part.to(dtype), right * (key != "lost"))


def copyable(rank: int) -> list[torch.Tensor]:
    """Tensors of dtypes that gloo cannot send as such, too."""
    dtypes = (torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64)
    return assorted(rank) + [torch.full((3,), rank).to(dtype) for dtype in dtypes]


def broadcast(rank: int, world_size: int, bucket_bytes: int) -> tuple[list[torch.Tensor], int]:
    tensors = copyable(rank)
    with patch.object(worlds, "BUCKET_BYTES", bucket_bytes), counted("broadcast") as counts:
        World().broadcast_from_first(tensors)
    return tensors, counts["broadcast"]


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(1 << 20, 9), (1, 14)])
def test_broadcast_copies_the_first_rank(
    world: pool.World, bucket_bytes: int, messages: int
) -> None:
    for tensors, sent in world.run(broadcast, 3, bucket_bytes):
        assert all(torch.equal(a, b) for a, b in zip(tensors, copyable(0), strict=True))
        assert sent == messages


# Groups.


def grid_sums(rank: int, world_size: int, rows: int, columns: int) -> tuple[float, float, int]:
    grid = Grid(rows, columns)
    world = World()
    with counted("new_group") as counts:
        for _ in range(3):
            row = world.subgroup(grid.row(grid.row_of(rank)))
            column = world.subgroup(grid.column(grid.column_of(rank)))
    assert row.group is world.subgroup(grid.row(grid.row_of(rank))).group
    assert (row.rank, row.size) == (grid.column_of(rank), columns)
    assert (column.rank, column.size) == (grid.row_of(rank), rows)
    in_row = torch.tensor(2.0**rank)
    in_column = torch.tensor(2.0**rank)
    row.all_reduce([in_row]).wait()
    column.all_reduce([in_column]).wait()
    return in_row.item(), in_column.item(), counts["new_group"]


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (2, 2), (4, 1)])
def test_a_group_is_created_once(world: pool.World, rows: int, columns: int) -> None:
    """A group of all ranks is the one there is, and a group of one rank needs none."""
    grid = Grid(rows, columns)
    made = sum(1 < members < rows * columns for members in (rows, columns))
    for rank, result in enumerate(world.run(grid_sums, rows * columns, rows, columns)):
        in_row = sum(2.0**r for r in grid.row(grid.row_of(rank)))
        in_column = sum(2.0**r for r in grid.column(grid.column_of(rank)))
        assert result == (in_row, in_column, made)


def inside_a_group(rank: int, world_size: int, members: list[int]) -> Any:
    group = dist.new_group(members)
    if rank not in members:
        with pytest.raises(ValueError, match="not a member of process_group="):
            World(group)
        return None
    world = World(group)
    total = torch.tensor(float(rank))
    sent = torch.tensor(float(rank))
    world.all_reduce([total]).wait()
    world.broadcast_from_first([sent])
    last_two = float("nan")
    if world.rank >= world.size - 2:
        part = world.subgroup([world.size - 2, world.size - 1])
        value = torch.tensor(float(rank))
        part.broadcast_from_first([value])
        last_two = value.item()
    return world.rank, world.size, total.item(), sent.item(), last_two


def test_a_group_numbers_its_own_ranks(world: pool.World) -> None:
    outside, *inside = world.run(inside_a_group, 4, [1, 2, 3])
    assert outside is None
    assert [result[:4] for result in inside] == [(i, 3, 6.0, 1.0) for i in range(3)]
    assert [result[4] for result in inside[1:]] == [2.0, 2.0]


# Agreement.


def agree(rank: int, world_size: int, descriptions: list[str]) -> None:
    facts = list(enumerate(descriptions[rank]))
    require_same(World(), "go", facts, lambda: [("it", fact) for _, fact in facts], "remedy")


@pytest.mark.parametrize(
    ("descriptions", "message"),
    [
        (["ab", "ac"], "rank 0 has [it: b], rank 1 has [it: c]"),
        (["abx", "abx", "acy"], "rank 0 has [it: b], rank 2 has [it: c]"),
        (["ac", "ab", "ab"], "rank 0 has [it: c], rank 1 has [it: b]"),
        (["a", "ab"], "rank 0 has [nothing more], rank 1 has [it: b]"),
        (["ab", "a"], "rank 0 has [it: b], rank 1 has [nothing more]"),
        (["", "a", "b"], "rank 0 has [nothing more], rank 1 has [it: a]"),
    ],
)
def test_every_rank_reports_the_first_difference(
    world: pool.World, descriptions: list[str], message: str
) -> None:
    errors = world.run(agree, len(descriptions), descriptions, expect_errors=True)
    for error in errors:
        assert isinstance(error, RankMismatchError)
        assert f"the ranks are out of sync: {message}; remedy" in str(error)


def opinions(rank: int, world_size: int) -> list[bool]:
    return [World().all_agree(rank not in noes, torch.device("cpu")) for noes in ((), (2,), (0, 1))]


def test_ranks_agree_only_if_all_agree(world: pool.World) -> None:
    assert world.run(opinions, 3) == [[True, False, False]] * 3


def unequal_owners(rank: int, world_size: int) -> list[float]:
    world = World()
    tensors = [torch.tensor([rank + 1.0]) for _ in range(2)]
    for send in (world.reduce, world.broadcast):
        with pytest.raises(ValueError, match="shorter"):
            send(tensors, [0])
    return torch.cat(tensors).tolist()


def test_each_tensor_needs_an_owner(world: pool.World) -> None:
    for rank, tensors in enumerate(world.run(unequal_owners, 2)):
        assert tensors == [rank + 1.0] * 2

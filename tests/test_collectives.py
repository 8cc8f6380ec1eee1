"""The collectives: what arrives, in how many messages, and over which groups.

Functions that take (rank, world_size, ...) run on the pool's ranks; they undo what they patch, as
the ranks outlive the test.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import counted, replaced

from second_order import RankMismatchError
from second_order.distributed import collectives
from second_order.distributed.assignment import Grid
from second_order.distributed.collectives import World

if TYPE_CHECKING:
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
    with patch.object(collectives, "BUCKET_BYTES", bucket_bytes), counted("all_reduce") as counts:
        pending = World().start_sum(tensors)
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
def test_sums_of_any_shape_and_dtype(
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


def sums_in_flight(rank: int, world_size: int) -> tuple[float, float]:
    world = World()
    first, second = torch.tensor(1.0 + rank), torch.tensor(10.0 + rank)
    a, b = world.start_sum([first]), world.start_sum([second])
    b.wait()
    a.wait()
    return first.item(), second.item()


def test_several_sums_can_be_under_way(world: pool.World) -> None:
    assert world.run(sums_in_flight, 3) == [(6.0, 33.0)] * 3


def sum_of_nothing(rank: int, world_size: int) -> tuple[int, int]:
    with counted("all_reduce") as counts:
        World().start_sum([]).wait()
        none = counts["all_reduce"]
        empty = torch.zeros(0)
        World().start_sum([empty]).wait()
    return none, empty.numel()


def test_a_sum_of_nothing_ends(world: pool.World) -> None:
    assert world.run(sum_of_nothing, 2) == [(0, 0)] * 2


def half_precision(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """2048 + 1 is 2048 in either dtype: what is added in float32 rounds once, at the end."""
    world = World()
    total = torch.tensor([2048.0 if rank == 0 else 1.0, rank], dtype=dtype)
    world.start_sum([total]).wait()
    (first, *_) = world.gather(torch.full((rank + 1,), rank + 0.5, dtype=dtype), [1, 2, 3, 4])
    sent = torch.full((3,), 1.5 - rank, dtype=dtype)
    world.broadcast_from_first([sent])
    return [total, first, sent]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_travels_on_gloo(world: pool.World, dtype: torch.dtype) -> None:
    for total, first, sent in world.run(half_precision, 4, dtype):
        assert torch.equal(total, torch.tensor([2051.0, 6.0]).to(dtype))
        assert torch.equal(first, torch.tensor([0.5]).to(dtype))
        assert torch.equal(sent, torch.full((3,), 1.5).to(dtype))


# Gathers and broadcasts.


def gathered(rank: int, world_size: int, sizes: list[int]) -> tuple[list[torch.Tensor], int]:
    mine = torch.arange(sizes[rank], dtype=torch.float64) + 100 * rank
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with counted(name) as counts:
        parts = World().gather(mine, sizes)
    return parts, counts[name]


@pytest.mark.parametrize(
    "sizes", [[3], [3, 5], [5, 3], [2, 0, 1], [0, 4, 1, 2], [0, 0], [4, 4, 4, 4]]
)
def test_gather_of_unequal_sizes(world: pool.World, sizes: list[int]) -> None:
    for parts, messages in world.run(gathered, len(sizes), sizes):
        for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            assert torch.equal(part, torch.arange(size, dtype=torch.float64) + 100 * rank)
        assert messages == (1 if len(sizes) > 1 and any(sizes) else 0)


def broadcast(rank: int, world_size: int, bucket_bytes: int) -> tuple[list[torch.Tensor], int]:
    tensors = assorted(rank)
    with patch.object(collectives, "BUCKET_BYTES", bucket_bytes), counted("broadcast") as counts:
        World().broadcast_from_first(tensors)
    return tensors, counts["broadcast"]


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(1 << 20, 4), (1, 9)])
def test_the_first_rank_is_copied(world: pool.World, bucket_bytes: int, messages: int) -> None:
    for tensors, sent in world.run(broadcast, 3, bucket_bytes):
        assert all(torch.equal(a, b) for a, b in zip(tensors, assorted(0), strict=True))
        assert sent == messages


def with_either_name(rank: int, world_size: int, absent: bool) -> tuple[list[float], int]:
    """torch 2.11 has only all_gather_into_tensor, which torch 2.13 deprecates."""
    replacements: dict[str, Any] = {}
    calls = []
    if absent:
        implementation = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

        def old_name(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return implementation(*args, **kwargs)

        replacements = {"all_gather_into_tensor": old_name}
        if hasattr(dist, "all_gather_single"):
            replacements["all_gather_single"] = None
    with replaced(dist, replacements), warnings.catch_warnings():
        warnings.simplefilter("error")
        world = World()
        parts = world.gather(torch.tensor([1.0 + rank]), [1, 1])
        total = torch.ones(1)
        world.start_sum([total]).wait()
        world.broadcast_from_first([total])
        world.require_equal(["same"], "things")
        world.subgroup([rank])
    return torch.cat(parts).tolist(), len(calls)


@pytest.mark.parametrize("absent", [False, True])
def test_no_name_that_is_used_is_deprecated(world: pool.World, absent: bool) -> None:
    assert world.run(with_either_name, 2, absent) == [([1.0, 2.0], int(absent))] * 2


# Groups.


def grid_sums(rank: int, world_size: int, rows: int, columns: int) -> tuple[float, float, int]:
    grid, world = Grid(rows, columns), World()
    with counted("new_group") as counts:
        for _ in range(3):
            row = world.subgroup(grid.row(grid.row_of(rank)))
            column = world.subgroup(grid.column(grid.column_of(rank)))
    assert row is world.subgroup(grid.row(grid.row_of(rank)))
    assert (row.rank, row.size) == (grid.column_of(rank), columns)
    assert (column.rank, column.size) == (grid.row_of(rank), rows)
    in_row, in_column = torch.tensor(2.0**rank), torch.tensor(2.0**rank)
    row.start_sum([in_row]).wait()
    column.start_sum([in_column]).wait()
    return in_row.item(), in_column.item(), counts["new_group"]


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (2, 2), (4, 1)])
def test_a_group_is_made_once(world: pool.World, rows: int, columns: int) -> None:
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
    total, sent = torch.tensor(float(rank)), torch.tensor(float(rank))
    world.start_sum([total]).wait()
    world.broadcast_from_first([sent])
    last_two = float("nan")
    if world.rank >= world.size - 2:
        part = world.subgroup([world.size - 2, world.size - 1])
        value = torch.tensor(float(rank))
        part.broadcast_from_first([value])
        last_two = value.item()
    return world.rank, world.size, total.item(), sent.item(), last_two


def test_a_group_has_ranks_of_its_own(world: pool.World) -> None:
    outside, *inside = world.run(inside_a_group, 4, [1, 2, 3])
    assert outside is None
    assert [result[:4] for result in inside] == [(i, 3, 6.0, 1.0) for i in range(3)]
    assert [result[4] for result in inside[1:]] == [2.0, 2.0]


# Alone.


def test_one_process_sends_nothing() -> None:
    """And needs no process group."""
    assert not dist.is_initialized()
    world = World()
    assert (world.rank, world.size, world.backend) == (0, 1, "none")
    tensor = torch.arange(3.0)
    world.start_sum([tensor]).wait()
    world.broadcast_from_first([tensor])
    world.require_equal(["anything"], "things")
    (same,) = world.gather(tensor, [3])
    assert same is tensor
    assert torch.equal(tensor, torch.arange(3.0))
    assert world.subgroup([0]) is world


# Copies.


def copies(rank: int, world_size: int) -> bool:
    world = World()
    assert copy.deepcopy(world) is world
    assert copy.deepcopy([world, world])[1] is world
    read = pickle.loads(pickle.dumps(world))
    assert (read.rank, read.size, read.backend) == (rank, world_size, "gloo")
    total = torch.tensor(1.0)
    read.start_sum([total]).wait()
    return bool(total == world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_go_on_working(world: pool.World, world_size: int) -> None:
    assert world.run(copies, world_size) == [True] * world_size


def written(rank: int, world_size: int) -> bytes:
    return pickle.dumps(World())


def test_a_pickle_is_read_without_processes(world: pool.World) -> None:
    read = pickle.loads(world.run(written, 2)[0])
    assert (read.rank, read.size) == (0, 1)


# Agreement.


def agree(rank: int, world_size: int, descriptions: list[list[str]]) -> None:
    World().require_equal(descriptions[rank], "models")


def test_equal_descriptions_agree(world: pool.World) -> None:
    assert world.run(agree, 3, [["a", "b"]] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("descriptions", "message"),
    [
        ([["a", "b"], ["a", "c"]], "rank 0 has [b], rank 1 has [c]"),
        ([["a", "b", "x"], ["a", "b", "x"], ["a", "c", "y"]], "rank 0 has [b], rank 2 has [c]"),
        ([["a"], ["a", "b"]], "rank 0 has [nothing more], rank 1 has [b]"),
        ([["a", "b"], ["a"]], "rank 0 has [b], rank 1 has [nothing more]"),
        ([[], ["a"], ["b"]], "rank 0 has [nothing more], rank 1 has [a]"),
    ],
)
def test_every_rank_is_told_the_first_difference(
    world: pool.World, descriptions: list[list[str]], message: str
) -> None:
    errors = world.run(agree, len(descriptions), descriptions, expect_errors=True)
    for error in errors:
        assert isinstance(error, RankMismatchError)
        assert "the ranks built different models" in str(error)
        assert message in str(error)
        assert "build the same model with the same options on every rank" in str(error)

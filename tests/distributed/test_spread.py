"""Which elements each process has of tensors, as others compute it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from second_order.distributed.spread import Spread, common, count, pick, place, taken

SHAPES = st.lists(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(torch.Size), min_size=1, max_size=6
)
TEAM = st.integers(1, 5)


@given(SHAPES, st.data(), TEAM)
def test_each_element_is_sent_once_and_rows_go_as_torch_chunks_them(
    shapes: list[torch.Size], data: st.DataObject, processes: int
) -> None:
    flags = st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes))
    sharded = data.draw(flags)
    spread = Spread(shapes, sharded, processes)
    flat = torch.arange(spread.size)
    pieces = flat.split([shape.numel() for shape in shapes])
    tensors = [t.view(shape) for t, shape in zip(pieces, shapes, strict=True)]
    sent = []
    for process in range(processes):
        expected = []
        for tensor, cut in zip(tensors, sharded, strict=True):
            parts = tensor.chunk(processes) if cut else [tensor] * processes
            expected += [parts[process].flatten()] if process < len(parts) else []
        here = spread.runs(process)
        assert torch.equal(pick(flat, [(0, spread.size)], here), torch.cat([flat[:0], *expected]))
        assert all(a[1] < b[0] for a, b in pairwise(here)), "neighbours are one run"
        sent += [i for run in spread.runs(process, once=True) for i in range(*run)]
    assert sorted(sent) == flat.tolist()


RUNS = st.lists(st.integers(0, 30), max_size=12, unique=True).map(
    lambda cuts: list(zip(*[iter(sorted(cuts))] * 2, strict=False))
)


@given(RUNS, RUNS)
def test_what_two_have_in_common_is_picked_and_placed(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    def elements(runs: list[tuple[int, int]]) -> list[int]:
        return [i for run in runs for i in range(*run)]

    both = common(one, other)
    assert elements(both) == sorted(set(elements(one)) & set(elements(other)))
    assert count(both) == len(elements(both))
    part = torch.tensor(elements(one), dtype=torch.float64)
    taken = pick(part, one, both)
    assert taken.tolist() == elements(both)
    into = torch.full((count(other),), -1.0, dtype=torch.float64)
    place(taken, both, into, other)
    expected = [i if i in set(elements(one)) else -1 for i in elements(other)]
    assert into.tolist() == expected


@given(SHAPES, st.data(), TEAM, TEAM)
def test_what_another_team_has_arrives_in_this_ones_rows(
    shapes: list[torch.Size], data: st.DataObject, there: int, here: int
) -> None:
    flags = st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes))
    theirs = Spread(shapes, data.draw(flags), there)
    mine = Spread(shapes, data.draw(flags), here)
    flat, everything = torch.arange(theirs.size), [(0, theirs.size)]
    parts = [pick(flat, everything, theirs.runs(p, once=True)) for p in range(there)]
    for process in range(here):
        wanted = mine.runs(process)
        assert torch.equal(taken(parts, theirs, wanted), pick(flat, everything, wanted))
    with pytest.raises(ValueError, match="process 0 has sent"):
        taken([torch.cat([parts[0], flat[:1]]), *parts[1:]], theirs, everything)

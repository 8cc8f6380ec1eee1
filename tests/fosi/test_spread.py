"""Which elements travel from one team of processes to another, whichever of them is sharded."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from second_order.fosi.spread import PairRoutes, Spread, common, count, pick, place
from second_order.lanczos.vector_space import row_bounds

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


@given(SHAPES, st.data(), TEAM, TEAM, st.integers(1, 7), st.booleans(), st.booleans())
def test_eigenvectors_arrive_whoever_is_sharded(
    shapes: list[torch.Size],
    data: st.DataObject,
    workers: int,
    accelerators: int,
    pairs: int,
    to_shards: bool,
    from_shards: bool,
) -> None:
    routes = PairRoutes(shapes, pairs, workers, accelerators, to_shards, from_shards)
    n = sum(shape.numel() for shape in shapes)
    V = torch.randn(pairs, n)
    rows = torch.arange(n).tensor_split(row_bounds(n, accelerators)[1:-1])
    if from_shards:
        spread = Spread(shapes, [True] * len(shapes), accelerators)
        everything = torch.arange(n)
        rows = tuple(pick(everything, [(0, n)], spread.runs(a)) for a in range(accelerators))
    theirs = Spread(shapes, [True] * len(shapes), workers)
    for worker in range(workers):
        parts = [routes.part(V[:, rows[a]], a, worker) for a in range(accelerators)]
        assert [tuple(p.shape) for p in parts] == [
            routes.shape(a, worker) for a in range(accelerators)
        ]
        expected = V.tensor_split(row_bounds(pairs, workers)[1:-1])[worker]
        if to_shards:
            expected = pick(V, [(0, n)], theirs.runs(worker))
        assert torch.equal(routes.joined(parts, worker), expected)


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

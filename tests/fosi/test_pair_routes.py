"""Eigenvectors on their way from accelerators to workers, either of which may be sharded."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from second_order.distributed.spread import Spread, pick
from second_order.fosi.pair_routes import PairRoutes
from second_order.lanczos.vector_space import row_bounds

SHAPES = st.lists(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(torch.Size), min_size=1, max_size=6
)
TEAM = st.integers(1, 5)


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

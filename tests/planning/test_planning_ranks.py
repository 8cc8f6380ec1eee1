"""What is counted is what processes send to each other; functions with (rank, ...) run on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from second_order import DPKFAC, KAISA, DistKFAC
from second_order.kfac.plan import gradient_owners
from second_order.planning.counts import Case
from second_order.planning.systems import PLANNED

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

OPTIMIZERS: dict[str, Any] = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}
INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 3}
DUE = [(True, True), (False, False), (True, False)]
BY_DRIFT = {"factor_update_steps": None, "inv_update_steps": None}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def accounts(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Any:
    """The bytes of three steps by account, as the optimizer has counted them."""
    model, found = network(), []
    with OPTIMIZERS[name](model, lr=0.01, **{**INTERVALS, **options}) as optimizer:
        for _ in range(len(DUE)):
            model.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            told = optimizer.statistics()
            sent = {k.removeprefix("bytes/"): v for k, v in told.items() if k.startswith("bytes/")}
            found.append({k: v for k, v in sent.items() if v and k != "elsewhere"})
    return found


@pytest.mark.parametrize(
    ("name", "options", "more", "ranks"),
    [
        ("KAISA", {"grad_worker_fraction": 0.5, "factor_exchange": "reduce"}, {}, 2),
        ("KAISA", {"solver": "eigen", "preconditioner_scale": "gradient"}, {}, 3),
        ("DPKFAC", {"other_matrices": "gradient"}, {}, 3),
        ("DistKFAC", {}, {"async_inverse": False}, 2),
        ("KAISA", BY_DRIFT, {}, 2),
    ],
)
def test_processes_send_what_is_counted(
    world: World, name: str, options: dict[str, Any], more: dict[str, Any], ranks: int
) -> None:
    """The word of greeting among it, which pretended ranks have not."""
    planned = PLANNED[name](**{**INTERVALS, **options})
    case = Case(planned.network(network()), planned, ranks)
    due = [(True, True)] * len(DUE) if options is BY_DRIFT else DUE  # drift begins at each step
    for rank, steps in enumerate(world.run(accounts, ranks, name, {**options, **more})):
        for seen, (statistics, refresh) in zip(steps, due, strict=True):
            work = case.work(rank, statistics=statistics, refresh=refresh)
            stages = dict.fromkeys(t.stage for t in work.transfers if t.handed)
            assert {stage: work.handed(stage) for stage in stages} == seen
            assert seen["compare"] == 16


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 3))), max_size=9))
def test_gradients_of_no_layer_go_where_there_is_least(
    gradients: list[tuple[int, int | None]],
) -> None:
    """The largest first, the lowest rank where several have the least."""
    sizes = [size for size, _ in gradients]
    load, expected = [0] * 4, [owner for _, owner in gradients]
    for size, owner in gradients:
        if owner is not None:
            load[owner] += size
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if expected[i] is None:
            rank = load.index(min(load))
            expected[i] = rank
            load[rank] += sizes[i]
    assert gradient_owners(sizes, [owner for _, owner in gradients], 4) == expected

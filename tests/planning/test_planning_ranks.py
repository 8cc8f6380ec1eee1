"""What is recorded of one rank is what processes send; functions with (rank, ...) run on them."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import second_order.planning.record as recording
from instruments import bytes_by_stage
from second_order import DPKFAC, KAISA, DistKFAC, Interconnect, Machine
from second_order.kfac.plan import gradient_owners
from second_order.kronecker.decompositions import RESIDUAL_TOLERANCE, Attempts
from second_order.planning.record import Record, Simulation, loss_of, record

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

OF_FACTORS: dict[str, Any] = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}
EVERY = {"lr": 0.01, "factor_update_steps": 1, "inv_update_steps": 1}
MACHINE = Machine.given(1e12, eigh={64: 1e-3}, inverse={64: 1e-4}, bandwidth=1e11, device="cpu")
LINKS = Interconnect.flat(1e-4, 1e9)
X = torch.arange(16.0).sin().view(4, 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def recorded(name: str, options: dict[str, Any], rank: int, ranks: int) -> Record:
    make = partial(OF_FACTORS[name], **EVERY, **options)
    return record(make, network(), lambda model: model(X), MACHINE, LINKS, rank, ranks)


def bytes_of_a_step(
    rank: int, world_size: int, name: str, options: dict[str, Any]
) -> dict[str, float]:
    """The bytes of a step by stage."""
    model = network()
    with OF_FACTORS[name](model, **EVERY, **options) as optimizer:
        for _ in range(2):
            with bytes_by_stage() as sent:
                model.zero_grad()
                loss_of(model(X)).backward()
                optimizer.step()
    return dict(sent)


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("KAISA", {"grad_worker_fraction": 0.5, "factor_exchange": "reduce"}, 2),
        ("KAISA", {"solver": "eigen", "preconditioner_scale": "gradient"}, 3),
        ("DPKFAC", {"other_matrices": "gradient"}, 3),
        ("DistKFAC", {"async_inverse": False}, 2),
    ],
)
def test_processes_send_what_is_recorded(
    world: World, name: str, options: dict[str, Any], ranks: int
) -> None:
    # The ranks' comparison is not recorded.
    besides = {"", "elsewhere", "compare"}
    for rank, seen in enumerate(world.run(bytes_of_a_step, ranks, name, options)):
        planned = recorded(name, options, rank, ranks).sent
        same = {k: v for k, v in planned.items() if k not in besides}
        assert same == {k: v for k, v in seen.items() if v and k not in besides}


def test_mpd_and_dp_kfac_send_as_table_2_has_it() -> None:
    """Zhang et al. 2023: DPKFAC sends no statistics, and each rank solves and keeps its share."""
    mpd = [recorded("KAISA", {"grad_worker_fraction": 0.0}, r, 2) for r in (0, 1)]
    dp = [recorded("DPKFAC", {"gradient_exchange": "all_reduce"}, r, 2) for r in (0, 1)]
    factors = sum(n * (n + 1) // 2 for n in (5, 6, 7, 3))
    for each in mpd:
        rest = each.sent["statistics_exchange"] / 4 - factors
        assert 0 < rest <= 3 * 3, "three numbers a layer: examples, and traces"
    assert not any(each.sent.get("statistics_exchange") for each in dp)
    gradients = sum(p.numel() for p in network().parameters())
    for each in (*mpd, *dp):
        assert gradients <= each.sent["average_gradients"] / 4 <= gradients + 6
    assert max(each.kept for each in dp) < max(each.kept for each in mpd)


def test_solves_fall_with_ranks_and_messages_rise() -> None:
    for name in OF_FACTORS:
        alone, two = (recorded(name, {}, 0, ranks) for ranks in (1, 2))
        at_once = name != "DistKFAC"
        solves = [r.seconds["solve"] if at_once else r.hidden for r in (alone, two)]
        assert solves[0] > solves[1] > 0
        assert "average_gradients" not in alone.seconds
        assert two.seconds["average_gradients"] >= LINKS.all_reduce(4, range(2))


def test_large_products_and_decompositions_are_not_computed() -> None:
    """Seconds and bytes are those of the same step with the work done."""

    make = partial(KAISA, solver="eigen", **EVERY)

    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 10))

    x = torch.randn(200, 150)
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for least in (2**14, 2**40):
            patch.setattr("second_order.planning.record.LARGE", least)
            found.append(record(make, large(), lambda m: m(x), MACHINE, LINKS, 0, 2))
    skipped, computed = found
    assert skipped.sent == computed.sent
    assert skipped.seconds == pytest.approx(computed.seconds, rel=0.1)


def test_gram_matrices_of_one_shape_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds and bytes are the same as if each of them was simulated."""
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))
    x = torch.randn(20, 200)
    make = partial(KAISA, **EVERY)
    gram = recording.GRAM
    computed: list[torch.Size] = []

    def counted(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(rows.shape)
        return gram(rows, *rest)

    def recorded_with(function: Any) -> Record:
        with monkeypatch.context() as patch:
            patch.setattr(recording, "GRAM", counted)
            patch.setattr(Simulation, "gram", function)
            return record(make, model, lambda m: m(x), MACHINE, LINKS, 0, 2)

    recorded_with(Simulation.gram)  # makes the indices of triangles, which the process keeps
    computed.clear()
    once = recorded_with(Simulation.gram)
    assert len(computed) == 2, "one with a row of ones, one without"
    each = recorded_with(lambda _, *rest: counted(*rest))
    assert len(computed) == 2 + 12, "two factors of three layers at two steps"
    assert (once.sent, once.kept, once.peak) == (each.sent, each.kept, each.peak)
    assert once.seconds == pytest.approx(each.seconds)


def test_a_rank_without_duties_of_its_own_shares_a_record() -> None:
    """The network has two layers: of 4 owners, the last two have nothing to do."""
    make = partial(DPKFAC, **EVERY)

    def covers_middle(ranks: int) -> bool:
        found = record(make, network(), lambda model: model(X), MACHINE, LINKS, 0, ranks)
        return found.covers_middle

    assert covers_middle(4)
    assert not covers_middle(2), "the second of two ranks owns a layer of another shape"


def test_every_decomposition_of_a_plan_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers have no meaning, so that no error does."""
    seen = set[float]()

    finish = Attempts.finish

    def noted(attempts: Attempts, errors: Any = None) -> Any:
        seen.add(attempts.tolerance)
        return finish(attempts, errors)

    monkeypatch.setattr(Attempts, "finish", noted)
    recorded("KAISA", {}, 0, 1)
    assert seen == {math.inf}
    seen.clear()
    bytes_of_a_step(0, 1, "KAISA", {})
    assert seen == {RESIDUAL_TOLERANCE}


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

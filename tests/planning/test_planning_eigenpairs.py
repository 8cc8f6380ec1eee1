"""DHO2 and MRDHO2: what is counted is what processes send and keep; times by hand."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import second_order
from second_order import DHO2, MRDHO2, Interconnect, Machine
from second_order.fosi.options import PRESETS
from second_order.planning.eigenpairs import (
    PAIRED,
    PRODUCT,
    USUAL,
    PairCase,
    dho2,
    mrdho2,
    names_of,
    pair_costs,
)
from second_order.planning.network import base_state_bytes
from second_order.planning.times import step_times

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {}),
}
PAIRS = 3
MACHINE = Machine.given(
    1e12, eigh={64: 1e-3}, inverse={64: 1e-4}, bandwidth=1e11, layer=0.0, step=0.0, device="cpu"
)
LINKS = Interconnect.flat(1e-4, 1e9)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def state_bytes(optimizer: Any) -> int:
    parts = [state.get("base", {}) for state in optimizer.state.values()]
    tensors = [v for part in parts for v in part.values() if isinstance(v, torch.Tensor)]
    return sum(v.nbytes for v in tensors)


def told(optimizer: Any) -> dict[str, int]:
    names = optimizer.statistics().items()
    sent = {k.removeprefix("bytes/"): int(v) for k, v in names if k.startswith("bytes/") and v}
    return {k: v for k, v in sent.items() if k != "elsewhere"}


def stepped(rank: int, size: int, base: str, options: dict[str, Any]) -> Any:
    """The bytes of a step with a refresh and of the next, products, and what is kept after it."""
    torch.manual_seed(rank)
    model, x = network(), torch.randn(8, 4)
    kind, keywords = BASES[base]
    with DHO2(
        model, lr=0.01, base=kind, **keywords, largest=PAIRS, curvature_interval=5,
        warmup_steps=0, curvature_closure=partial(loss, model, x), **options,
    ) as optimizer:  # fmt: skip
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, torch.randn(4, 4)).backward()
            optimizer.step()
            found.append(told(optimizer))
        curvature = optimizer._curvature
        kept = {
            "eigenvectors": curvature.subspace.basis.vectors.nbytes,
            "step": sum(t.nbytes for t in curvature._before),
            "base": state_bytes(optimizer),
        }
        products = int(optimizer.statistics()["lanczos/products"])
    return found, products, kept


@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes_send_and_keep_what_is_counted(
    world: World, base: str, layout: str, ranks: int
) -> None:
    kind, keywords = BASES[base]
    planned = dho2(base=kind, largest=PAIRS, layout=layout)
    counted = planned.network(network(), **keywords)
    for rank, seen in enumerate(world.run(stepped, ranks, base, {"layout": layout})):
        (refresh, plain), products, kept = seen
        case = PairCase(counted, planned, ranks, base_kwargs=keywords, products=products)
        work = case.work(rank, refresh=True)
        assert {held.what: held.nbytes for held in work.held} == {
            "parameters": work.nbytes("gradients"), "gradients": 4 * case.size, **kept,
        }  # fmt: skip
        every = case.work(rank)
        stages = dict.fromkeys(t.stage for t in every.transfers if t.handed)
        assert {stage: every.handed(stage) for stage in stages} == plain
        if ranks == 1:
            assert not refresh
        elif layout == "row":
            words = refresh["lanczos"] - work.handed("lanczos")
            # Besides: the loss, verdicts, and the first rank's B to all.
            most = 8 * products * (products + 2) * (ranks - 1) if rank == 0 else 0
            assert 0 <= words <= most + 16 * (products + 8) * ranks


def trained(rank: int, size: int, options: dict[str, Any]) -> Any:
    torch.manual_seed(rank)
    model, x = network(), torch.randn(8, 4)
    with MRDHO2(model, lr=0.01, momentum=0.9, largest=PAIRS, epoch_steps=3, **options) as optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve([x], partial(loss, model))
        found = []
        for _ in range(6):
            optimizer.zero_grad()
            loss(model, torch.randn(4, 4)).backward()
            optimizer.step()
            epochs = optimizer._curvature.epochs
            kept = sum(t.nbytes for t in (epochs.start, epochs.total) if t is not None)
            found.append((told(optimizer), kept, state_bytes(optimizer)))
        return found


@pytest.mark.parametrize(("final", "ranks"), [("guarded", 3), ("paper", 4), ("paper", 2)])
def test_workers_of_accelerators_send_and_keep_what_is_counted(
    world: World, final: str, ranks: int
) -> None:
    planned = mrdho2(largest=PAIRS, epoch_steps=3, final_update=final)
    case = PairCase(planned.network(network(), momentum=0.9), planned, ranks)
    *workers, _ = world.run(trained, ranks, {"final_update": final})
    for rank, steps in enumerate(workers):
        every = case.work(rank)
        stages = dict.fromkeys(t.stage for t in every.transfers if t.handed)
        plain = {stage: every.handed(stage) for stage in stages}
        assert [sent for sent, *_ in (steps[1], steps[4])] == [plain, plain]
        _, kept, base = steps[1]
        assert every.nbytes("epoch") == kept
        assert every.nbytes("base") == base
        end = case.work(rank, refresh=True)
        asked = 2 * 4 * case.size if final == "guarded" and rank == 0 else 0
        counted, real = end.handed("final_update") + asked, steps[5][0].get("final_update", 0)
        assert 0 <= counted - real <= 16, "but for a verdict or two"
        assert end.handed("pairs") == (asked + 4 * case.size if rank == 0 else 0)


def test_equal_ranks_are_counted_once() -> None:
    for describe in (dho2, partial(dho2, layout="column"), mrdho2, partial(mrdho2, accelerators=3)):
        planned = describe(largest=PAIRS)
        case = PairCase(planned.network(network(), momentum=0.9), planned, 13)
        found = {share.work.rank: share for share in case.everybody(refresh=True)}
        assert sum(share.ranks for share in found.values()) == 13
        for rank in range(13):
            mine, alike = case.work(rank, refresh=True), found[case._alike[rank]].work
            assert (mine.stages, mine.transfers, mine.held) == (
                alike.stages, alike.transfers, alike.held,
            )  # fmt: skip


def test_a_refresh_takes_its_products_and_comes_as_its_budget_says() -> None:
    planned = dho2(largest=PAIRS)
    case = PairCase(planned.network(network()), planned, 1)
    times = step_times(pair_costs(case, MACHINE, LINKS, passes=1.0))
    m, n = 12, 63
    assert (case.products, case.size) == (m, n)
    many = dho2(largest=10)
    assert PairCase(many.network(network()), many, 1).products == 20, "half of a cold start's"
    read = 2 * m * m * n * 4
    by_hand = PRODUCT * (m + 1) + read / 1e11 + MACHINE.product(PAIRS, m, n)
    assert times.due["lanczos"] == pytest.approx(by_hand)
    every = case.interval(times)
    assert every == math.ceil(by_hand / (0.2 * (1.0 + times.due["base"])))
    assert times.step(every, every) - 1.0 <= 0.2 * 1.01
    given = dho2(largest=PAIRS, curvature_interval=7)
    assert PairCase(given.network(network()), given, 1).interval(times) == 7


@pytest.mark.parametrize("ranks", [1, 4])
def test_fewer_parameters_than_eigenpairs_are_planned(ranks: int) -> None:
    """As many pairs, products and rows: both pieces of a refresh's work are one."""
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    found = second_order.plan(model, x, ranks, machine=MACHINE, network=LINKS)
    known = {choice.system for choice in found.choices}
    assert known >= ({"DHO2", "MRDHO2"} if ranks > 1 else {"DHO2"})
    planned = dho2()
    case = PairCase(planned.network(model), planned, 1)
    m = n = case.pairs
    assert (case.products, case.size) == (m, n) == (5, 5)
    times = step_times(pair_costs(case, MACHINE, LINKS))
    by_hand = 2 * m * m * n * 4 / 1e11 + MACHINE.product(m, m, n)
    assert times.due["lanczos"] == pytest.approx(by_hand, rel=1e-9)


def test_workers_wait_for_accelerators_that_take_longer_than_an_epoch() -> None:
    def seconds(epoch_steps: int) -> float:
        planned = mrdho2(largest=PAIRS, epoch_steps=epoch_steps)
        case = PairCase(planned.network(network()), planned, 3)
        times = step_times(pair_costs(case, MACHINE, LINKS, passes=1.0))
        assert times.hidden > PRODUCT * case.products
        return times.step(epoch_steps, epoch_steps)

    assert seconds(2) > PRODUCT * 12 / 2
    assert 1.0 < seconds(1000) < 1.1


def test_the_defaults_and_the_keywords_are_the_optimizers_own() -> None:
    for kind, system in ((DHO2, "DHO2"), (MRDHO2, "MRDHO2")):
        parameters = inspect.signature(kind).parameters
        assert names_of(system) <= parameters.keys()
        usual = {**USUAL, **PRESETS["general"]} if system == "MRDHO2" else USUAL
        options = vars(PAIRED[system]().options)
        for name in (names_of(system) & usual.keys()) - {"subspace_momentum"}:
            given = parameters[name].default
            assert given == options[name] or (given is None and name == "warmup_steps"), name


def test_the_plan_has_rows_columns_and_accelerators() -> None:
    x = torch.randn(8, 4)
    given: dict[str, Any] = {"machine": MACHINE, "network": LINKS}
    found = second_order.plan(network(), x, [4, 1], options={"largest": PAIRS}, **given)
    by = {choice.name: choice for choice in found.choices}
    assert {"DHO2 rows", "DHO2 columns", "MRDHO2 1 accelerator"} <= by.keys()
    rows, columns = by["DHO2 rows"], by["DHO2 columns"]
    assert rows.keywords == {"largest": PAIRS, "layout": "row", "curvature_interval": "auto"}
    assert rows.held["eigenvectors"] == 4 * 16 * PAIRS
    assert columns.held["eigenvectors"] == 4 * 63
    assert rows.sent < columns.sent
    assert found.recommended is not None
    assert found.recommended.system not in PAIRED
    assert "DHO2 and MRDHO2 have another curvature" in found.reason
    assert {c.system for c in found.others[0].choices} == {"KAISA", "DPKFAC", "DistKFAC", "DHO2"}
    alone = second_order.plan(network(), x, 4, systems=["DHO2"], **given)
    assert alone.recommended is not None
    assert alone.recommended.system == "DHO2"
    DHO2(network(), lr=0.1, **rows.keywords)
    best = by["MRDHO2 1 accelerator"]
    MRDHO2(network(), lr=0.1, **best.keywords)
    helped = second_order.plan(network(), x, 4, systems=["MRDHO2"], **given)
    assert "its accelerators do not train" in helped.reason
    assert '"system": "MRDHO2"' in helped.to_json()
    tight = second_order.plan(network(), x, 4, systems=["DHO2"], memory=best.memory // 2, **given)
    assert "does not fit" in tight.summary() or tight.recommended is not None


@pytest.mark.parametrize("others", [[], ["KAISA"]])
def test_each_system_takes_the_options_that_it_knows(others: list[str]) -> None:
    """Those of one alone are left out of the other, whether there is a K-FAC system or not."""
    given: dict[str, Any] = {"machine": MACHINE, "network": LINKS}
    options = {"largest": 2, "accelerators": 2, "subspace_momentum": 0.5}
    systems = [*others, "DHO2", "MRDHO2"]
    found = second_order.plan(
        network(), torch.randn(8, 4), 4, systems=systems, options=options, **given
    )
    by = {choice.name: choice.keywords for choice in found.choices}
    assert by["DHO2 rows"].items() >= {"largest": 2, "subspace_momentum": 0.5}.items()
    assert by["MRDHO2 2 accelerators"].items() >= {"largest": 2, "accelerators": 2}.items()
    assert "accelerators" not in by["DHO2 rows"]
    assert "subspace_momentum" not in by["MRDHO2 2 accelerators"]


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"options": {"layout": "row"}}, ValueError, "is planned: DHO2's rows and columns"),
        ({"systems": ["DHO2"], "options": {"damping": 1.0}}, TypeError, "unknown options"),
        ({"systems": ["DHO2"], "options": {"epoch_steps": 9}}, TypeError, "unknown options"),
        ({"systems": ["DHO2", "MRDHO2"], "options": {"big": 1}}, TypeError, r"options \['big'\]"),
        ({"systems": ["MRDHO2"], "options": {"accelerators": 4}}, ValueError, "leaves none to"),
        ({"systems": ["DHO2"], "options": {"largest": -1}}, ValueError, "largest=-1"),
    ],
)
def test_what_cannot_be_planned_is_said(given: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        second_order.plan(
            network(), torch.randn(8, 4), 4, **{"machine": MACHINE, "network": LINKS, **given}
        )


def test_a_base_that_needs_whole_tensors_has_columns_alone() -> None:
    with pytest.raises(ValueError, match=r"layout='row' steps parts .* LBFGS"):
        dho2(base=torch.optim.LBFGS)
    assert base_state_bytes(torch.optim.SGD, [torch.ones(3)], momentum=0.9) == 12

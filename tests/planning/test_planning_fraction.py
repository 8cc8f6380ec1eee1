"""KAISA's grad_worker_fraction="auto": one choice for all ranks, remembered by checkpoints."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from optimizer_cases import take
from ranks import kaisa, shard, vector
from torch import nn

from second_order import KAISA, RankMismatchError
from second_order.kfac import curvature

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(3, n=12)


def trained(model: nn.Module, optimizer: KAISA, rank: int, size: int) -> torch.Tensor:
    for batch in BATCHES:
        take(model, optimizer, shard(batch, rank, size), MLP.loss)
    return vector(model)


def workers_in(optimizer: KAISA) -> int:
    return len(next(iter(optimizer._curvature.plan.values())).workers)


def chosen(rank: int, size: int) -> Any:
    model = MLP.model()
    other = MLP.model()
    optimizer = kaisa(model, grad_worker_fraction="auto")
    workers = workers_in(optimizer)
    text = str(optimizer.summary())
    same = trained(model, optimizer, rank, size)
    by_hand = trained(other, kaisa(other, grad_worker_fraction=workers / size), rank, size)
    return workers, text, torch.equal(same, by_hand)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_choose_the_same_fraction_and_train_as_with_that_fraction(
    world: World, size: int
) -> None:
    found = world.run(chosen, size, timeout=200.0)
    workers = {workers for workers, *_ in found}
    assert len(workers) == 1
    assert size % workers.pop() == 0
    for count, text, equal in found:
        assert equal
        assert f"gradient workers chosen: {count} of {size} for each layer" in text


def force(patch: pytest.MonkeyPatch, workers: int) -> None:
    """Let the cost model choose this number on rank 0, and another one on the other ranks."""
    chosen = 1 if torch.distributed.get_rank() else workers
    patch.setattr(curvature, "calibrate", lambda *_: (None, None))
    patch.setattr(curvature, "cheapest_workers", lambda *_, **__: chosen)


def remembered(rank: int, size: int) -> Any:
    patch = pytest.MonkeyPatch()
    force(patch, 2)
    model = MLP.model()
    first = kaisa(model, grad_worker_fraction="auto")
    assert workers_in(first) == 2
    trained(model, first, rank, size)
    file = io.BytesIO()
    torch.save((model.state_dict(), first.state_dict()), file)
    force(patch, 4)
    weights, state = torch.load(io.BytesIO(file.getvalue()))
    again = MLP.model()
    again.load_state_dict(weights)
    second = kaisa(again, grad_worker_fraction="auto")
    assert workers_in(second) == 4
    second.load_state_dict(state)
    went = [trained(m, o, rank, size) for m, o in ((model, first), (again, second))]
    explicit = kaisa(MLP.model(), grad_worker_fraction=1.0)
    explicit.load_state_dict(state)
    patch.undo()
    found = workers_in(second), workers_in(explicit)
    return found, torch.equal(*went), file.getvalue()


def elsewhere(rank: int, size: int, saved: bytes) -> tuple[int, int]:
    patch = pytest.MonkeyPatch()
    force(patch, 1)
    weights, state = torch.load(io.BytesIO(saved))
    model = MLP.model()
    model.load_state_dict(weights)
    optimizer = kaisa(model, grad_worker_fraction="auto")
    before = workers_in(optimizer)
    optimizer.load_state_dict(state)
    trained(model, optimizer, rank, size)
    patch.undo()
    return before, workers_in(optimizer)


def test_a_checkpoint_remembers_the_choice_for_as_many_ranks(world: World) -> None:
    found = world.run(remembered, 4)
    for workers, equal, _ in found:
        assert workers == (2, 4), "the saved choice; and one that was given stays"
        assert equal, "the loaded run goes on bit for bit"
    assert world.run(elsewhere, 2, found[0][2]) == [(1, 1)] * 2, "of another number of ranks"


def one_rank_alone(rank: int, size: int) -> str:
    with pytest.raises(RankMismatchError) as caught:
        kaisa(MLP.model(), grad_worker_fraction="auto" if rank else 0.5)
    return str(caught.value)


def test_ranks_that_differ_raise_an_error(world: World) -> None:
    """No rank waits for a measurement that the others do not take."""
    assert all("auto" in text for text in world.run(one_rank_alone, 2))


def test_one_process_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature, "calibrate", None)
    assert workers_in(KAISA(MLP.model(), lr=0.1, grad_worker_fraction="auto")) == 1
    with pytest.raises(TypeError, match="'auto' chooses"):
        KAISA(MLP.model(), lr=0.1, grad_worker_fraction="most")  # type: ignore[arg-type]


def test_an_invalid_saved_choice_is_refused() -> None:
    model = MLP.model()
    optimizer = KAISA(model, lr=0.1)
    take(model, optimizer, BATCHES[0], MLP.loss)
    state = copy.deepcopy(optimizer.state_dict())
    for part in state["state"].values():
        if "curvature" in part and "average_weight" in part["curvature"]:
            part["curvature"] |= {"gradient_workers": "2", "gradient_workers_of": 4}
    with pytest.raises((ValueError, TypeError), match="gradient_work"):
        optimizer.load_state_dict(state)

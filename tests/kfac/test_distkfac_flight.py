"""DistKFAC on one process in mid-flight: copies, checkpoints, changes, and the end."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from contract import factors, hook_count, same
from ranks import assert_same_trajectory, go
from threaded import (
    BATCHES,
    CASE,
    LAYERS,
    Gate,
    distkfac,
    solving,
    threads_of,
)
from torch import nn

from second_order import DistKFAC

if TYPE_CHECKING:
    pass

# In mid-flight.


def in_flight(model: nn.Module, gate: Gate, **options: Any) -> DistKFAC:
    """An optimizer after three steps, all of whose layers are under way since the second."""
    optimizer = distkfac(model, **{"momentum": 0.9, **options})
    go(model, optimizer, CASE, BATCHES[:1])
    with solving(gate):
        go(model, optimizer, CASE, BATCHES[1:3])
    assert len(optimizer._curvature.solves.under_way) == 3
    return optimizer


def test_loading_in_mid_flight_drops_what_is_under_way() -> None:
    """Inverses are solved anew of the factors loaded, and waited for."""
    model, gate = CASE.model(), Gate()
    saved = CASE.model()
    with distkfac(saved, max_staleness=0, momentum=0.9) as other:
        go(saved, other, CASE, BATCHES[:5])
        state = copy.deepcopy((saved.state_dict(), other.state_dict()))
        expected = go(saved, other, CASE, BATCHES[5:])
    optimizer = in_flight(model, gate, inverse_threads=4)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    assert (optimizer.staleness, optimizer.delays) == ({}, {}), "no inverse is in use"
    found = go(model, optimizer, CASE, BATCHES[5:6])
    assert optimizer.staleness == dict.fromkeys(LAYERS, 1)
    assert_same_trajectory(found, expected[:1])
    gate.open()
    go(model, optimizer, CASE, BATCHES[6:8])
    assert max(optimizer.staleness.values()) <= 3
    optimizer.close()


def test_freezing_in_mid_flight_drops_what_is_under_way() -> None:
    model, gate = CASE.model(), Gate()
    optimizer = in_flight(model, gate, inverse_threads=4, max_staleness=2)
    kept = factors(optimizer)["2"]
    model[2].requires_grad_(False)
    frozen = model[2].weight.detach().clone()
    go(model, optimizer, CASE, BATCHES[3:4])
    assert sorted(optimizer.staleness) == ["0", "4"], "solved anew, and waited for"
    assert set(optimizer.staleness.values()) == {1}
    gate.open()
    go(model, optimizer, CASE, BATCHES[4:6])
    assert torch.equal(model[2].weight, frozen)
    model[2].requires_grad_(True)
    go(model, optimizer, CASE, BATCHES[6:7])
    assert sorted(optimizer.staleness) == list(LAYERS)
    assert set(optimizer.staleness.values()) == {1}
    assert not torch.equal(model[2].weight, frozen)
    assert not torch.equal(factors(optimizer)["2"][0], kept[0]), "averaged on from what it had"
    go(model, optimizer, CASE, BATCHES[7:])
    assert max(optimizer.delays.values()) <= 2
    optimizer.close()


# Threads end with the optimizer.


def test_threads_end_when_it_is_closed_even_twice() -> None:
    model = CASE.model()
    optimizer = distkfac(model, inverse_threads=3)
    go(model, optimizer, CASE, BATCHES[:2])
    assert threads_of() == 3
    optimizer.close()
    optimizer.close()
    assert (threads_of(), hook_count(model)) == (0, 0)
    assert (optimizer.staleness, optimizer.delays) == ({}, {})
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05)
    expected = go(plain, sgd, CASE, BATCHES[2:4])
    assert same(go(model, optimizer, CASE, BATCHES[2:4]), expected), "it goes on as its base"

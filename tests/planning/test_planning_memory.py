"""Activations counted are those that autograd saves; a batch fits, and one more does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from second_order.planning.counts import Case
from second_order.planning.memory import activation_bytes, largest_batch, message_bytes
from second_order.planning.systems import kaisa
from second_order.planning.work import Among, RankWork, Transfer


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Flatten(), nn.Linear(7, 3))


def test_activations_are_what_autograd_saves_each_once() -> None:
    # The input, and the output of tanh, which the next layer saves as its input, too.
    for batch in (1, 4):
        assert activation_bytes(network(), [torch.ones(batch, 5)]) == 4 * (5 + 7)
    with torch.device("meta"):
        model, x = network(), torch.empty(2, 5)
    assert activation_bytes(model, [x]) == 4 * (5 + 7)
    assert activation_bytes(model, {"input": x}) == 4 * (5 + 7)
    assert activation_bytes(model.double(), [x.double()]) == 8 * (5 + 7)


def test_a_batch_fits_and_one_more_does_not() -> None:
    with torch.device("meta"):
        model, x = network(), torch.empty(2, 5)
    planned = kaisa()
    found = planned.network(model, momentum=0.9)
    works = [s.work for s in Case(found, planned, 4).everybody(statistics=True, refresh=True)]
    each = activation_bytes(model, [x])
    kept = max(work.nbytes() for work in works)
    room = max(map(message_bytes, works))
    budget = kept + room + 3
    batch = largest_batch(budget, works, each)
    assert kept + batch * each <= budget < kept + (batch + 1) * each
    assert batch > 0
    assert largest_batch(kept + room - 1, works, each) == 0  # the messages of the step do not fit
    with pytest.raises(ValueError, match=r"per_example=0.0 bytes leave room"):
        largest_batch(budget, works, 0.0)


def test_gradients_travel_beside_the_largest_of_the_other_messages() -> None:
    one = Transfer("average_gradients", "all_reduce", Among("world", 2), 8, 8.0, 8.0, 8, 1)
    transfers = (
        one,
        replace(one, stage="statistics_exchange", buffers=100),
        replace(one, stage="solve_exchange", buffers=60),
        replace(one, stage="solve_exchange", buffers=70),
        replace(one, stage="compare", buffers=1000, host=True),
    )
    assert message_bytes(RankWork(0, (), transfers, ())) == 8 + 130
    assert message_bytes(RankWork(0, (), (), ())) == 0

"""From a plain optimizer to one of ours in mid-run, and back."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
from contract import BASES, base_only, each_of_five, make, same, take
from models import ZOO

from second_order import SecondOrderWarning

MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)


@each_of_five
@pytest.mark.parametrize("base", BASES)
def test_there_and_back_again_is_the_base_bit_for_bit(System: Any, base: str) -> None:
    """Momentum and rates go along, and it is said once that curvature starts anew."""
    Base, options = BASES[base]
    model = MLP.model()
    twin = copy.deepcopy(model)
    plain, alone = Base(model.parameters(), **options), Base(twin.parameters(), **options)
    for batch in BATCHES[:2]:
        take(model, plain, batch)
        take(twin, alone, batch)
    plain.param_groups[0]["lr"] = alone.param_groups[0]["lr"] = 0.02
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = make(System, model, base=Base, **options, **base_only(System))
    with pytest.warns(SecondOrderWarning) as told:
        optimizer.load_state_dict(plain.state_dict())
    said = [str(w.message) for w in told if "the curvature starts anew" in str(w.message)]
    assert said == [
        f"the state loaded is of {Base.__name__} alone: it is taken over, and the "
        f"curvature starts anew"
    ]
    assert optimizer.param_groups[0]["lr"] == 0.02
    for batch in BATCHES[2:4]:
        take(model, optimizer, batch)
        take(twin, alone, batch)
        assert same(model, twin)
    again = Base(model.parameters(), **options)
    again.load_state_dict(optimizer.export_base_state())
    for batch in BATCHES[4:]:
        take(model, again, batch)
        take(twin, alone, batch)
        assert same(model, twin)

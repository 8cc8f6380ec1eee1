"""Wrappers whose class is made of the optimizer's own, as Lightning makes them."""

from __future__ import annotations

from typing import Any

import pytest
from contract import each_kronecker, each_of_five, factors, make
from stacks import BATCHES, CASE, loss_of, usual_loop

from second_order import KAISA

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


class Imitation:
    """Passes on what it does not have; its class inherits from the optimizer's."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Wrapped{kind.__name__}", (type(self), kind), {})  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@each_of_five
def test_what_is_read_of_an_imitation_is_the_optimizers(System: Any) -> None:
    model = CASE.model()
    optimizer = make(System, model)
    wrapper: Any = Imitation(optimizer)
    assert isinstance(wrapper, System)
    assert wrapper.param_groups is optimizer.param_groups
    assert str(wrapper.summary()) == str(optimizer.summary())
    assert str(wrapper.recipe()) == str(optimizer.recipe())
    assert wrapper.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@each_of_five
def test_what_is_assigned_to_an_imitation_reaches_the_optimizer(System: Any) -> None:
    """And a checkpoint that is loaded into it: the base would go on with other groups."""
    model = CASE.model()
    optimizer = make(System, model, momentum=0.9)
    wrapper: Any = Imitation(optimizer)
    usual_loop(model, wrapper, BATCHES[:1])
    wrapper.param_groups = [{**group, "lr": 0.5} for group in wrapper.param_groups]
    assert optimizer._base.param_groups is optimizer.param_groups
    assert optimizer.param_groups[0]["lr"] == 0.5
    wrapper.load_state_dict(make(System, CASE.model(), momentum=0.9).state_dict())
    assert vars(wrapper).keys() == {"_optimizer"}
    assert optimizer._base.param_groups is optimizer.param_groups
    assert optimizer.param_groups[0]["lr"] == 0.05


@each_kronecker
def test_zero_grad_of_an_imitation_drops_the_statistics(System: Any) -> None:
    model = CASE.model()
    optimizer = make(System, model)
    wrapper: Any = Imitation(optimizer)
    for drops in (True, False):
        loss_of(model, BATCHES[0]).backward()
        if drops:
            wrapper.zero_grad()
        wrapper.step()
        taken = [bool(A.any()) for A, _ in factors(optimizer).values()]
        assert taken == [not drops] * 3


def test_an_optimizer_without_groups_says_so_as_others_do() -> None:
    with pytest.raises(AttributeError, match="param_groups"):
        _ = KAISA.__new__(KAISA).param_groups

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

    @property
    def optimizer(self) -> Any:
        return self._optimizer

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
def test_groups_assigned_by_way_of_an_imitation_are_taken_up(System: Any) -> None:
    """As Lightning's BaseFinetuning resumes: other settings, and groups that came later."""
    model = CASE.model()
    optimizer = make(System, model[:-1].parameters(), model=model, momentum=0.9)
    wrapper: Any = Imitation(optimizer)
    usual_loop(model, wrapper, BATCHES[:1])
    (group,), saved = wrapper.param_groups, optimizer.state_dict()
    wrapper.param_groups = [{**group, "lr": 0.5}, {"params": [*model[-1].parameters()], "lr": 0.1}]
    assert [each["lr"] for each in optimizer.param_groups] == [0.5, 0.1]
    assert optimizer.param_groups[1]["momentum"] == 0.9
    assert optimizer._base.param_groups is optimizer.param_groups
    again = make(System, model[:-1].parameters(), model=model, momentum=0.9)
    other: Any = Imitation(again)
    other.load_state_dict(saved)
    other.add_param_group({"params": [*model[-1].parameters()]})
    assert vars(other).keys() == vars(wrapper).keys() == {"_optimizer"}
    assert len(again.param_groups) == 2
    assert again._base.param_groups is again.param_groups


@each_of_five
def test_other_groups_and_another_state_are_refused_with_a_way(System: Any) -> None:
    model = CASE.model()
    optimizer = make(System, model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[next(model.parameters())]["base"] = {}
    for each in (optimizer, Imitation(optimizer)):
        groups, state = each.param_groups, each.state
        wrong: list[Any] = [[], [{**groups[0], "params": groups[0]["params"][:1]}]]
        for other in wrong:
            with pytest.raises(AttributeError, match=r"does not begin.*add_param_group\(\)"):
                each.param_groups = other
        with pytest.raises(AttributeError, match=r"cannot be replaced: use load_state_dict\(\)"):
            each.state = {**state}
        assert each.param_groups is groups is optimizer._base.param_groups
        assert each.state is state


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

"""Parameter groups: replaced during a run, named, empty, and of a hooked model."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from framework_training import CASE, usual_loop
from optimizer_cases import (
    KRONECKER,
    Imitation,
    each_of_five,
    make,
    same,
)
from saved_states import BATCHES, MLP, train
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


@each_of_five
def test_a_model_without_any_of_the_parameters_raises(System: Any) -> None:
    """It would train with the base alone, or be kept in the wrong mode."""
    model = MLP.model()
    name = System.__name__
    with pytest.raises(ValueError, match=f"none of the 6 parameters belongs to.*{name} would be"):
        make(System, model.parameters(), model=copy.deepcopy(model))


@each_of_five
def test_a_parameter_that_is_listed_twice_raises_with_a_remedy(System: Any) -> None:
    """As in `[*encoder.parameters(), *decoder.parameters()]` with a tied weight."""
    model = MLP.model()
    twice = [*model[:2].parameters(), model[0].weight]
    message = r"parameter '0\.weight' of shape .* is listed twice.*list it once, as in dict"
    for params in (twice, [{"params": twice}], [("a", model[0].weight), ("b", model[0].weight)]):
        with pytest.raises(ValueError, match=message):
            make(System, params, model=model)
    optimizer = make(System, model[2:].parameters(), model=model)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": twice})
    optimizer.add_param_group({"params": dict.fromkeys(twice)})
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]


@each_of_five
def test_a_set_of_parameters_raises_because_its_order_differs_between_runs(System: Any) -> None:
    """A resumed run would load the momentum of other parameters."""
    model = MLP.model()
    params = set(model.parameters())
    for wrong in (params, frozenset(params), [{"params": params}]):
        with pytest.raises(TypeError, match=r"a set, whose order changes .*use a list"):
            make(System, wrong, model=model)
    optimizer = make(System, model[2:].parameters(), model=model)
    with pytest.raises(TypeError, match=r"a set, whose order changes .*use a list"):
        optimizer.add_param_group({"params": set(model[0].parameters())})


@each_of_five
def test_groups_of_a_subclass_can_set_what_groups_of_the_class_can(System: Any) -> None:
    class Decaying(System):  # type: ignore[misc]
        def __init__(self, params: Any, lr: float, weight_decay: float = 0.1, **more: Any) -> None:
            super().__init__(params, lr, weight_decay=weight_decay, **more)

    model = MLP.model()
    params = list(model.parameters())
    optimizer = Decaying([{"params": params, "weight_decay": 0.0}], 0.1, model=model)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    option = "kl_clip" if System in KRONECKER else "newton_scale"
    with pytest.raises(ValueError, match=f"has {option}=0.5, which cannot differ between groups"):
        Decaying([{"params": params, option: 0.5}], 0.1, model=model)


@each_of_five
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "compiled"])
def test_groups_have_parameter_names(System: Any, wrapped: bool) -> None:
    """As those of `SGD(model.named_parameters())`; wrappers add nothing to the names."""
    model = MLP.model()
    model[0].bias.requires_grad_(False)
    argument = torch.compile(model, backend="eager") if wrapped else model
    optimizer = make(System, argument)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    (group,) = optimizer.param_groups
    assert group["param_names"] == list(named)
    assert all(p is q for p, q in zip(group["params"], named.values(), strict=True))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == list(named)


@each_of_five
def test_an_added_group_has_names_if_the_others_do(System: Any) -> None:
    """torch refuses to mix the two."""
    model = MLP.model()
    for p in model[4].parameters():
        p.requires_grad_(False)
    optimizer = make(System, model)
    for p in model[4].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": model[4].parameters()})
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2, dtype=torch.float64))})
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names[1:] == [["4.weight", "4.bias"], ["parameter 6"]]
    unnamed = make(System, [*model.parameters()], model=model)
    assert "param_names" not in unnamed.param_groups[0]


@each_of_five
def test_empty_groups_are_ignored(System: Any) -> None:
    """Also where it is the first, and the only one at first."""
    model = MLP.model()
    twin = MLP.model()
    groups: list[dict[str, Any]] = [{"params": []}, {"params": list(model.parameters())}]
    optimizer = make(System, groups[:1], model=model)
    expected = make(System, twin)
    optimizer.add_param_group(groups[1])
    train(model, optimizer, 4)
    train(twin, expected, 4)
    assert same(model, twin)
    str(optimizer.summary())
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer))
    train(model, optimizer, 1, start=4)


@each_of_five
def test_parameters_on_the_meta_device_raise_until_they_are_materialized(System: Any) -> None:
    """`to_empty` makes other ones: an optimizer of the old ones would train nothing."""
    with torch.device("meta"):
        model = MLP.model()
    message = (
        r"parameter '0\.weight' is on the meta device and has no data: first call "
        rf"model\.to_empty\(device=\.\.\.\) and initialize it, then make {System.__name__}; with "
    )
    for argument, named in ((model, None), (model.parameters(), model), (model.parameters(), None)):
        with pytest.raises(ValueError, match=message):
            make(System, argument, model=named)
    model.to_empty(device="cpu")
    model.load_state_dict(MLP.model().state_dict())
    train(model, make(System, model))


@each_of_five
def test_groups_assigned_through_a_wrapper_take_effect(System: Any) -> None:
    """As Lightning's BaseFinetuning resumes: other settings, and groups that came later."""
    model = CASE.model()
    optimizer = make(System, model[:-1].parameters(), model=model, momentum=0.9)
    wrapper: Any = Imitation(optimizer)
    usual_loop(model, wrapper, BATCHES[:1])
    (group,) = wrapper.param_groups
    saved = optimizer.state_dict()
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
def test_no_step_is_taken_while_a_wrapper_has_removed_the_hooks(System: Any) -> None:
    model = CASE.model()
    optimizer = make(System, model)
    wrapper: Any = Imitation(optimizer)
    with wrapper.hooks_removed(), pytest.raises(RuntimeError, match=r"inside hooks_removed\(\)"):
        wrapper.step()
    train(model, optimizer, 1)


@each_of_five
def test_replacing_groups_or_state_raises_with_a_remedy(System: Any) -> None:
    model = CASE.model()
    optimizer = make(System, model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[next(model.parameters())]["base"] = {}
    for each in (optimizer, Imitation(optimizer)):
        groups = each.param_groups
        state = each.state
        wrong: list[Any] = [[], [{**groups[0], "params": groups[0]["params"][:1]}]]
        for other in wrong:
            with pytest.raises(AttributeError, match=r"does not begin.*add_param_group\(\)"):
                each.param_groups = other
        with pytest.raises(AttributeError, match=r"cannot be replaced: use load_state_dict\(\)"):
            each.state = {**state}
        assert each.param_groups is groups is optimizer._base.param_groups
        assert each.state is state

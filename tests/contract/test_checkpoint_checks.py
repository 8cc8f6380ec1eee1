"""What a checkpoint may be: tampered with, it is refused whole or sound."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    BASES,
    EIGENPAIRS,
    assert_same_curvature,
    curvature_of,
    each_kronecker,
    each_of_five,
    make,
)
from models import ZOO
from states import alike, containers, snapshot, train, trained
from torch import Tensor, nn

from second_order import DHO2, KAISA, SecondOrderWarning, export_base_state

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
Path = tuple[Any, ...]


def at_path(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def spoilt(value: Any) -> Iterator[Any]:
    """What a diverged training, or another model, makes of an entry."""
    if isinstance(value, Tensor):
        wrong = value.clone()
        wrong.view(-1)[-1:] = torch.nan
        yield from (wrong, torch.full_like(value, torch.inf), torch.zeros(2, 9, 1, 3))
    elif isinstance(value, (int, float)):
        yield from (torch.nan, -torch.inf)


@each_of_five
@pytest.mark.parametrize("base", ["SGD", "AdamW"])
def test_wrong_shapes_and_numbers_are_refused_before_anything_changes(
    System: Any, base: str
) -> None:
    """An error names the entry and its parameter, whichever of all entries it is."""
    model, optimizer = trained(System, base)
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(model, optimizer)
    refused = 0
    for key, entry in saved["state"].items():
        for part, entries in entry.items():
            for name, value in entries.items():
                for wrong in spoilt(value):
                    if name == "batch_loss" or key not in (0, 5):
                        continue  # it may be infinite
                    state = containers(saved)
                    state["state"][key][part][name] = wrong
                    with pytest.raises(ValueError, match=rf"'{name}'\]|factor {name} of layer"):
                        optimizer.load_state_dict(state)
                    assert alike(snapshot(model, optimizer), before), (key, part, name)
                    refused += 1
    assert refused > 10
    train(model, optimizer, 2, start=3)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@each_of_five
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("curvature", "steps"), 2, r"\['steps'\], of parameter '4.bias', is 2, and 3"),
        (
            ("curvature", "steps"),
            -1,
            r"\['steps'\], of parameter '4.bias', is -1, and no",
        ),
        (("curvature", "version"), 99, r"'version'\].*is 99: another second_order wrote it"),
        (("curvature", "surprise"), 1, r"'surprise'\].*'4.bias', is not known here"),
        (("base", "momentum_buffer"), torch.zeros(2), r"shape \(2,\), where \(3,\) is needed"),
    ],
)
def test_errors_name_entry_parameter_and_bound(
    System: Any, path: Path, value: Any, message: str
) -> None:
    _, optimizer = trained(System)
    saved = copy.deepcopy(optimizer.state_dict())
    at_path(saved["state"][5], path[:-1])[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


def groups_of(model: nn.Module, turned: bool) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    groups = [{"params": named[i : i + 2]} for i in range(0, len(named), 2)]
    return groups[::-1] if turned else groups


@each_of_five
def test_groups_in_another_order_are_refused_or_put_in_order_by_a_hook(System: Any) -> None:
    """By their names, as torch asks; before the names meant nothing, and shapes may agree."""
    model, twin = MLP.model(), MLP.model()
    sgd = BASES["SGD"][1]
    theirs = make(System, groups_of(model, turned=True), model=model, **sgd)
    ours = make(System, groups_of(twin, turned=False), model=twin, **sgd)
    train(model, theirs)
    saved = copy.deepcopy(theirs.state_dict())
    with pytest.raises(ValueError, match=r"'4.weight' in 'param_names' where .* has '0.weight'"):
        ours.load_state_dict(saved)
    assert not ours.state

    def turn(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": state["param_groups"][::-1]}

    ours.register_load_state_dict_pre_hook(turn)
    ours.load_state_dict(saved)
    twin.load_state_dict(model.state_dict())
    if System not in EIGENPAIRS:  # whose vectors follow the groups' order
        assert_same_curvature(curvature_of(ours), curvature_of(theirs))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert alike(theirs.state[p]["base"], ours.state[q]["base"])


@each_of_five
def test_a_checkpoint_of_another_system_is_refused_with_a_way(System: Any) -> None:
    other = KAISA if issubclass(System, EIGENPAIRS) else DHO2
    _, theirs = trained(other)
    model, optimizer = trained(System)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"is not known here.*export_base_state\(checkpoint\)"):
        optimizer.load_state_dict(theirs.state_dict())
    assert alike(snapshot(model, optimizer), before)
    optimizer.load_state_dict(export_base_state(theirs.state_dict()))
    parts = [entry["curvature"] for entry in optimizer.state_dict()["state"].values()]
    assert not any(float(part.get("average_weight", 0)) for part in parts)
    assert not any("eigenvectors" in part for part in parts)


@each_kronecker
def test_a_parameter_that_the_checkpoint_lacks_is_named(System: Any) -> None:
    _, optimizer = trained(System)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][2]
    with pytest.warns(SecondOrderWarning, match=r"has nothing of 2\.weight: their state begins"):
        optimizer.load_state_dict(saved)

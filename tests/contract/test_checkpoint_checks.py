"""Checkpoints that are invalid, of another optimizer, or of the base alone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from combinations import fractional_product
from models import ZOO
from optimizer_cases import (
    BASES,
    EIGENPAIRS,
    SYSTEMS,
    assert_same_curvature,
    base_only,
    curvature_of,
    each_kronecker,
    each_of_five,
    make,
    noted,
    same,
    take,
)
from saved_states import PLAIN, are_equal, containers, plain, snapshot, train, trained
from torch import Tensor, nn

import second_order
from second_order import (
    DHO2,
    KAISA,
    MRDHO2,
    CheckpointError,
    DistKFAC,
    SecondOrderWarning,
    TraceRule,
    export_base_state,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
Path = tuple[Any, ...]


def at_path(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def invalid_values(value: Any) -> Iterator[Any]:
    """Values of an entry after a run that diverged, or from another model."""
    if isinstance(value, Tensor):
        wrong = value.clone()
        wrong.view(-1)[-1:] = torch.nan
        yield from (wrong, torch.full_like(value, torch.inf), torch.zeros(2, 9, 1, 3))
    elif isinstance(value, (int, float)):
        yield from (torch.nan, -torch.inf)


@pytest.mark.parametrize(
    ("System", "base"), fractional_product([*SYSTEMS, MRDHO2], ["SGD", "AdamW"], part=2)
)
def test_invalid_shapes_and_numbers_raise_before_anything_changes(System: Any, base: str) -> None:
    """An error names the entry and its parameter, whichever of all entries it is."""
    model, optimizer = trained(System, base)
    saved = copy.deepcopy(optimizer.state_dict())
    before = snapshot(model, optimizer)
    refused = 0
    for key, entry in saved["state"].items():
        for part, entries in entry.items():
            for name, value in entries.items():
                for wrong in invalid_values(value):
                    if name == "batch_loss" or key not in (0, 5):
                        continue  # it may be infinite
                    state = containers(saved)
                    state["state"][key][part][name] = wrong
                    with pytest.raises(ValueError, match=rf"'{name}'\]"):
                        optimizer.load_state_dict(state)
                    assert are_equal(snapshot(model, optimizer), before), (key, part, name)
                    refused += 1
    assert refused > 10


@each_of_five
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("curvature", "steps"), 2, r"\['steps'\], of parameter '4.bias', is 2, and 3"),
        (
            ("curvature", "steps"),
            -1,
            r"\['steps'\], of parameter '4.bias', is -1, which is not an integer",
        ),
        (("curvature", "version"), 99, r"'version'\].*is 99, and this version"),
        (("curvature", "surprise"), 1, r"'surprise'\].*'4.bias', is unknown"),
        (("base", "momentum_buffer"), torch.zeros(2), r"shape \(2,\), where \(3,\) is needed"),
    ],
)
def test_errors_give_the_entry_the_parameter_and_the_bound(
    System: Any, path: Path, value: Any, message: str
) -> None:
    _, optimizer = trained(System)
    saved = copy.deepcopy(optimizer.state_dict())
    at_path(saved["state"][5], path[:-1])[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


def groups_of(model: nn.Module, is_reversed: bool) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    groups = [{"params": named[i : i + 2]} for i in range(0, len(named), 2)]
    return groups[::-1] if is_reversed else groups


@each_of_five
def test_groups_in_another_order_raise_unless_a_hook_reorders_them(System: Any) -> None:
    """torch matches parameters by name. Without names, equal shapes could be confused."""
    model = MLP.model()
    twin = MLP.model()
    sgd = BASES["SGD"][1]
    saving = make(System, groups_of(model, is_reversed=True), model=model, **sgd)
    loading = make(System, groups_of(twin, is_reversed=False), model=twin, **sgd)
    train(model, saving)
    saved = copy.deepcopy(saving.state_dict())
    with pytest.raises(ValueError, match=r"'4.weight' in 'param_names' where .* has '0.weight'"):
        loading.load_state_dict(saved)
    assert not loading.state

    def turn(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": state["param_groups"][::-1]}

    loading.register_load_state_dict_pre_hook(turn)
    loading.load_state_dict(saved)
    twin.load_state_dict(model.state_dict())
    if System not in EIGENPAIRS:  # whose vectors follow the groups' order
        assert_same_curvature(curvature_of(loading), curvature_of(saving))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert are_equal(saving.state[p]["base"], loading.state[q]["base"])


@each_of_five
def test_a_checkpoint_of_another_optimizer_raises_with_a_remedy(System: Any) -> None:
    other = KAISA if issubclass(System, EIGENPAIRS) else DHO2
    _, saving = trained(other)
    model, optimizer = trained(System)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"is unknown.*export_base_state\(checkpoint\)"):
        optimizer.load_state_dict(saving.state_dict())
    assert are_equal(snapshot(model, optimizer), before)
    optimizer.load_state_dict(export_base_state(saving.state_dict()))
    parts = [entry["curvature"] for entry in optimizer.state_dict()["state"].values()]
    assert not any(float(part.get("average_weight", 0)) for part in parts)
    assert not any("eigenvectors" in part for part in parts)


@each_kronecker
def test_a_parameter_that_the_checkpoint_lacks_is_named(System: Any) -> None:
    _, optimizer = trained(System)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][2]
    with pytest.warns(SecondOrderWarning, match=r"lacks 2\.weight: their state starts"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("A", 1.0),
        ("average_weight", None),
        ("examples", None),
        ("pass_history", 1.0),
        ("failures", 0.5),
        ("inverse_step", torch.zeros(2)),
        ("inverse_delay", None),
        ("inverse_requested", None),
        ("inverse_G", 1.0),
        ("inverse_damping", torch.zeros(3)),
        ("snapshot_damping", None),
        ("snapshot_A", 1.0),
        ("stopped", 2),
        ("mean_curvature", torch.zeros(2)),
        ("updated_at", -1),
        ("newly_trainable_at", 0.5),
        ("damping", torch.zeros(1, 2)),
        ("last_step", 1.0),
    ],
)
def test_entries_of_another_kind_raise_before_anything_changes(key: str, value: Any) -> None:
    """None stands for an entry that is missing."""
    model, optimizer = trained(
        DistKFAC,
        deterministic=True,
        max_staleness=2,
        inv_update_steps=TraceRule(upper=0.0, every=2),
        solver="inverse",
        step_scale=True,
    )
    saved = copy.deepcopy(optimizer.state_dict())
    before = snapshot(model, optimizer)
    entries = saved["state"][2]["curvature"]
    assert key in entries
    entries[key] = value
    if value is None:
        del entries[key]
    with pytest.raises(CheckpointError, match=rf"\['{key}'\], of parameter '2.weight'"):
        optimizer.load_state_dict(saved)
    assert are_equal(snapshot(model, optimizer), before)


@each_kronecker
def test_parameters_that_only_one_side_has_are_named(System: Any) -> None:
    """A model's frozen parameters are left out."""
    model = MLP.model()
    whole = make(System, model)
    train(model, whole)
    model[2].bias.requires_grad_(False)
    part = make(System, model)
    train(model, part)
    with pytest.raises(ValueError, match=r"only the checkpoint has '2.bias': if they are frozen"):
        part.load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match=r"only the optimizer has '2.bias': if they were frozen"):
        whole.load_state_dict(part.state_dict())


@each_kronecker
def test_factors_of_a_frozen_layer_with_another_size_are_not_loaded(System: Any) -> None:
    """If a layer is frozen from the start, its A has no row for the bias."""
    _, saving = trained(System)
    model = MLP.model()
    model[2].requires_grad_(False)
    loading = make(System, model.parameters(), model=model, momentum=0.9)
    loading.load_state_dict(saving.state_dict())
    with pytest.warns(SecondOrderWarning, match="factor of layer '2' is not loaded"):
        train(model, loading, 1)


@pytest.mark.parametrize(
    ("loading", "saving"), [("SGD", "AdamW"), ("AdamW", "SGD"), ("RMSprop", "Adam")]
)
def test_a_base_state_without_the_bases_options_raises(loading: str, saving: str) -> None:
    """It would end in `KeyError: 'step'` at the next step."""
    model = MLP.model()
    optimizer = make(KAISA, model, base=getattr(torch.optim, loading), **PLAIN[loading])
    train(model, optimizer, 1)
    optimizer.load_state_dict(plain(loading, MLP.model()).state_dict())
    before = snapshot(model, optimizer)
    with pytest.raises(
        ValueError, match=rf"by an optimizer without.*and the base here is {loading}"
    ):
        optimizer.load_state_dict(plain(saving, MLP.model()).state_dict())
    assert are_equal(snapshot(model, optimizer), before)
    train(model, optimizer, 2)


@pytest.mark.parametrize("base", ["Adam", "AdamW"])
def test_a_base_state_of_an_older_torch_loads(base: str) -> None:
    """Up to torch 2.6, Adam and AdamW saved no `decoupled_weight_decay`."""
    saved = copy.deepcopy(plain(base, MLP.model()).state_dict())
    expected = saved["param_groups"][0].pop("decoupled_weight_decay")
    model = MLP.model()
    optimizer = make(KAISA, model, base=getattr(torch.optim, base), **PLAIN[base])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is expected
    train(model, optimizer, 1)


@each_of_five
def test_a_checkpoint_over_another_base_raises_with_its_name(System: Any) -> None:
    _, saving = trained(System, "SGD")
    model, optimizer = trained(System, "AdamW")
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="saved by SGD, and the base here is AdamW"):
        optimizer.load_state_dict(saving.state_dict())
    assert are_equal(snapshot(model, optimizer), before)


class ThirdPartySGD(torch.optim.SGD):
    """A base that torch does not know, with entries and settings of its own."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, taste: str = "good") -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["taste"] = taste
            for p in group["params"]:
                self.state[p]["best"] = float("inf")


@each_of_five
def test_third_party_bases_can_store_any_state(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, base=ThirdPartySGD)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    resumed = make(System, twin, base=ThirdPartySGD)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[twin[0].weight]["base"]["best"] == float("inf")
    alone = ThirdPartySGD(MLP.model().parameters(), lr=0.1)
    resumed.load_state_dict(alone.state_dict())
    with pytest.raises(ValueError, match=r"saved by an optimizer without.*here is ThirdPartySGD"):
        resumed.load_state_dict(plain("AdamW", MLP.model()).state_dict())


def test_export_returns_base_states_unchanged() -> None:
    saved = plain("AdamW", MLP.model()).state_dict()
    exported = export_base_state(saved)
    assert exported["param_groups"] == saved["param_groups"]
    assert are_equal(exported["state"], saved["state"])
    wrong: list[Any] = [None, {}, {"state": {0: None}, "param_groups": [{"params": [0]}]}]
    for value in wrong:
        with pytest.raises(ValueError, match="not the state of an optimizer"):
            export_base_state(value)
    fresh = make(DistKFAC, MLP.model())
    assert export_base_state(fresh.state_dict())["state"] == {}
    assert "export_base_state" in second_order.__all__


BATCHES = MLP.batches(6)


@each_of_five
@pytest.mark.parametrize("base", BASES)
def test_import_and_export_equal_the_base_bit_for_bit(System: Any, base: str) -> None:
    """Momentum and rates are loaded, and one warning says that the curvature starts from zero."""
    Base, options = BASES[base]
    model = MLP.model()
    twin = copy.deepcopy(model)
    plain = Base(model.parameters(), **options)
    alone = Base(twin.parameters(), **options)
    for batch in BATCHES[:2]:
        take(model, plain, batch)
        take(twin, alone, batch)
    plain.param_groups[0]["lr"] = alone.param_groups[0]["lr"] = 0.02
    with noted():
        optimizer = make(System, model, base=Base, **options, **base_only(System))
    with pytest.warns(SecondOrderWarning) as caught:
        optimizer.load_state_dict(plain.state_dict())
    messages = [str(w.message) for w in caught if "the curvature starts from" in str(w.message)]
    assert messages == [
        f"the checkpoint has the state of {Base.__name__} alone: it is loaded, and "
        f"the curvature starts from the beginning"
    ]
    assert optimizer.param_groups[0]["lr"] == 0.02
    for batch in BATCHES[2:4]:
        take(model, optimizer, batch)
        take(twin, alone, batch)
        assert same(model, twin)
    again = Base(model.parameters(), **options)
    again.load_state_dict(optimizer.export_base_state())
    (group,) = again.param_groups
    assert group["lr"] == 0.02
    assert "peak_lr" not in group
    assert again.state[model[0].weight].keys() == optimizer.state[model[0].weight]["base"].keys()
    for batch in BATCHES[4:]:
        take(model, again, batch)
        take(twin, alone, batch)
        assert same(model, twin)

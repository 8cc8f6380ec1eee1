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
from tampered import alike, containers, plain, snapshot, train, trained
from torch import Tensor, nn
from woven import THOROUGH

from second_order import DHO2, KAISA, MRDHO2, SecondOrderWarning, export_base_state

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
Path = tuple[Any, ...]


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place in nested state, of the first and the last parameter."""
    yield at
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        if at != ("state",) or key in (0, 5):
            yield from paths(inner, (*at, key))


def at_path(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def spoilt(value: Any) -> Iterator[tuple[str, Any]]:
    """What somebody, or a disk, may have made of an entry."""
    yield "text", "spoilt"
    yield "nothing", None
    yield "list", [1]
    if isinstance(value, Tensor):
        for name, number in (("nan", torch.nan), ("inf", torch.inf)):
            wrong = value.clone()
            wrong.view(-1)[-1:] = number
            yield name, wrong
        yield "shape", torch.zeros(2, 9, 1, 3)
        yield "negative", -value.abs() - 1
        yield "whole", torch.zeros_like(value, dtype=torch.int64)
        yield "complex", value + 1j
        yield "number", 3.0
    elif isinstance(value, bool):
        yield "number", 2.5
    elif isinstance(value, (int, float)):
        yield from {"nan": torch.nan, "inf": torch.inf, "negative": -5, "huge": 10**30}.items()
        yield "half", value + 0.5
        yield "flag", True
        yield "tensor", torch.zeros(3)
    elif isinstance(value, dict):
        yield "unknown", {**value, "unknown": 1.0}
        yield "unknown number", {**value, 99: 1.0}
        yield "empty", {}
    elif isinstance(value, (list, tuple)):
        yield "shorter", value[:-1]
        yield "longer", [*value, value[-1]]


def tamperings(saved: Any) -> Iterator[tuple[Path, str, Any]]:
    """(where, what, the state), two of them at each place, in turn; all if thorough."""
    for i, path in enumerate(paths(saved)):
        value = at_path(saved, path)
        choices = [*spoilt(value)] + ([("missing", None)] if path else [])
        for j, (what, wrong) in enumerate(choices):
            if not THOROUGH and (j - 2 * i) % len(choices) > 1:
                continue
            state = containers(saved)
            if not path:
                state = wrong
            elif what == "missing":
                del at_path(state, path[:-1])[path[-1]]
            else:
                at_path(state, path[:-1])[path[-1]] = wrong
            yield path, what, state


def whole_state(System: Any, model: nn.Module, optimizer: Any) -> Any:
    """In the middle of an epoch of MRDHO2, as a worker beside accelerators saves it."""
    saved = copy.deepcopy(optimizer.state_dict())
    for entry, p in zip(saved["state"].values(), model.parameters(), strict=True):
        if System is MRDHO2:
            ones = {"gradient_sum": torch.ones_like(p), "epoch_start": torch.ones_like(p)}
            entry["curvature"].update(epoch_step=1, epoch_sums=1.0, **ones)
    return saved


# What loads although it has been tampered with: it is sound, and means something.
SOUND = {
    ("base", "missing"),  # as that of a parameter without gradients
    ("base", "empty"),
    ("momentum_buffer", "missing"),
    ("momentum_buffer", "nothing"),
    ("step", "number"),
    ("step", "whole"),
    ("average_weight", "number"),
    ("average_weight", "whole"),
    ("examples", "missing"),  # as in older ones: they are counted at the next update
    ("examples", "number"),
    ("examples", "whole"),
    ("mean_eigenvalues", "missing"),  # as in older ones: they are computed
    ("curvature", "missing"),  # a warning names the parameter
    ("curvature", "empty"),
    (0, "missing"),
    (0, "empty"),
    (5, "missing"),
    (5, "empty"),
    ("state", "empty"),  # as that of an optimizer before its first step
    ("A", "missing"),  # the next refresh tells of it
    ("G", "missing"),
}
VECTORS = {
    *("exp_avg", "momentum_buffer", "eigenvalues", "subspace_momentum", "last_step", "epoch_start")
}


def may_load(path: Path, what: str) -> bool:
    if not path or path[0] == "param_groups":
        # More entries are the user's; of settings that are missing there are defaults.
        tail = path[-1] if path else None
        return (
            (what.startswith("unknown") and len(path) in (0, 2))
            or (what == "missing" and len(path) == 3 and tail not in ("lr", "params"))
            or (what in ("half", "huge"))
            or (what == "nothing")
            or (what == "negative" and tail == "dampening")  # torch takes any
            or (len(path) > 2 and path[2] == "param_names" and what in ("text", "missing"))
        )
    if what == "negative":
        return path[-1] in VECTORS | {"gradient_sum"}
    return (path[-1], what) in SOUND


@each_of_five
@pytest.mark.parametrize("base", ["SGD", "AdamW"])
def test_a_tampered_checkpoint_is_refused_whole_or_sound(System: Any, base: str) -> None:
    """An error names the entry, and nothing has changed; or what has loaded is as good as any."""
    model, optimizer = trained(System, base)
    saved = whole_state(System, model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(saved))
    before, refused = snapshot(model, optimizer), 0
    for path, what, state in tamperings(saved):
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            text = str(error)
            named = [key for key in path if isinstance(key, str)]
            entry = named[-1] if named else "state"
            known = entry in text or "checkpoint" in text
            assert known, (path, what, text)
            if len(path) == 4 and path[0] == "state":
                assert repr(path[-1]) in text or "shape" in text or base in text, (path, what, text)
            assert alike(snapshot(model, optimizer), before), (path, what)
            refused += 1
            continue
        assert may_load(path, what), (path, what)
        optimizer.load_state_dict(copy.deepcopy(saved))
        before = snapshot(model, optimizer)
    assert refused > (300 if THOROUGH else 60)
    train(model, optimizer, 2, start=3)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@each_of_five
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("curvature", "steps"), 2, r"\['steps'\], of parameter '4.bias', is 2, and 3"),
        (("curvature", "steps"), -1, r"\['steps'\], of parameter '4.bias', is -1, outside"),
        (("curvature", "version"), 99, r"'version'\].*is 99: a newer second_order wrote it"),
        (("curvature", "version"), 0, r"'version'\].*is 0, outside \[1, 1\]"),
        (("curvature", "surprise"), 1, r"'surprise'\].*'4.bias', is not known here"),
        (("base", "momentum_buffer"), torch.zeros(2), r"shape \(2,\), where \(3,\) is needed"),
        (("base", "surprise"), 1, r"'surprise'\].*is not known here: SGD keeps momentum_buffer"),
        (("else",), {}, r"state\[5\]\['else'\] is not known here"),
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


def strange(value: Tensor) -> Iterator[tuple[str, Any]]:
    """Tensors of the right shape that cannot be read or written one number at a time."""
    yield "meta", value.to("meta")
    yield "sparse", value.to_sparse()
    yield "nested", torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])
    yield "eight bits", value.to(torch.float8_e4m3fn)
    with torch.inference_mode():
        yield "inference", value.clone()
    if value.numel() > 1:
        yield "expanded", value.flatten()[:1].expand(value.numel()).view(value.shape)
    yield "huge", 10**400
    yield "more than text can hold", 10**5000


@each_of_five
@pytest.mark.parametrize("base", ["SGD", "AdamW"])
def test_tensors_that_no_optimizer_keeps_are_refused_by_their_entry(System: Any, base: str) -> None:
    model, optimizer = trained(System, base)
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(model, optimizer)
    for path in paths(saved):
        value = at_path(saved, path)
        if path[0:1] != ("state",) or not isinstance(value, (Tensor, float)):
            continue
        for what, wrong in strange(torch.as_tensor(value)):
            state = containers(saved)
            at_path(state, path[:-1])[path[-1]] = wrong
            with pytest.raises(ValueError, match=rf"\['{path[-1]}'\], of parameter"):
                optimizer.load_state_dict(state)
            assert alike(snapshot(model, optimizer), before), (path, what)


@each_kronecker
def test_a_number_is_no_vector_of_one(System: Any) -> None:
    """It would fail halfway."""
    model, optimizer = trained(System)
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(model, optimizer)
    saved["state"][4]["curvature"]["average_weight"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"'average_weight'\].* shape \(1,\), not a number"):
        optimizer.load_state_dict(saved)
    assert alike(snapshot(model, optimizer), before)


@pytest.mark.parametrize(
    ("base", "path", "value", "message"),
    [
        ("RMSprop", ("state", 0, "base", "momentum_buffer"), None, "of type NoneType"),
        ("RMSprop", ("state", 0, "base", "step"), 1e300, "outside"),
        ("RMSprop", ("param_groups", 0, "alpha"), -5.0, "outside"),
        ("AdamW", ("state", 0, "base", "step"), torch.tensor(1e30), "outside"),
        ("AdamW", ("param_groups", 0, "betas"), (0.9, 10**400), "more than 64 bits"),
    ],
)
def test_what_a_base_cannot_go_on_with_is_refused(
    base: str, path: Path, value: Any, message: str
) -> None:
    model, optimizer = trained(KAISA, base)
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(model, optimizer)
    at_path(saved, path[:-1])[path[-1]] = value
    with pytest.raises(ValueError, match=rf"'{path[-1]}'\].* {message}"):
        optimizer.load_state_dict(saved)
    assert alike(snapshot(model, optimizer), before)


@pytest.mark.parametrize("key", ["row_var", "col_var", "variance"])
def test_the_vectors_of_adafactor_have_their_shapes(key: str) -> None:
    saved = plain("Adafactor", MLP.model()).state_dict()
    index = 1 if key == "variance" else 0
    optimizer = KAISA(MLP.model(), base=torch.optim.Adafactor, lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(saved))
    saved["state"][index][key] = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"'{key}'\].* shape \(2, 2\), where"):
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


@pytest.mark.parametrize("System", EIGENPAIRS)
def test_eigenvectors_of_another_length_are_refused(System: Any) -> None:
    """They would make steps as much longer."""
    _, optimizer = trained(System)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["curvature"]["eigenvectors"] *= 3.0
    with pytest.raises(
        ValueError, match=r"eigenvectors of lengths \[3, 3, 3, 3\], where 1 is needed"
    ):
        optimizer.load_state_dict(saved)


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


@pytest.mark.parametrize("System", EIGENPAIRS)
def test_what_froze_before_saving_hides_no_counts(System: Any) -> None:
    """The last parameter has none; the next refresh is due where it was all the same."""
    model = MLP.model()
    for p in model[4].parameters():
        p.requires_grad_(False)
    optimizer = make(System, model.parameters(), model=model)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = make(System, model.parameters(), model=model)
    resumed.load_state_dict(saved)
    assert resumed.curvature.step == optimizer.curvature.step >= 0
    assert_same_curvature(curvature_of(resumed), curvature_of(optimizer), rtol=0)
    for p in model.parameters():
        p.requires_grad_(True)
    with pytest.warns(SecondOrderWarning, match="eigenpairs of the checkpoint are not taken over"):
        make(System, model.parameters(), model=model).load_state_dict(saved)


@each_kronecker
def test_a_parameter_that_the_checkpoint_lacks_is_named(System: Any) -> None:
    _, optimizer = trained(System)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][2]
    with pytest.warns(SecondOrderWarning, match=r"has nothing of 2\.weight: their state begins"):
        optimizer.load_state_dict(saved)

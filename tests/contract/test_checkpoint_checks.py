"""What a checkpoint may be: tampered, older, another base's. All or nothing of it is taken over."""

from __future__ import annotations

import copy
import io
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    BASES,
    EIGENPAIRS,
    assert_same_curvature,
    base_only,
    curvature_of,
    each_kronecker,
    each_of_five,
    make,
    same,
    take,
)
from models import ZOO
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import second_order
from second_order import DHO2, KAISA, MRDHO2, DistKFAC, SecondOrderWarning, export_base_state

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(6)
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
Path = tuple[Any, ...]


def train(model: nn.Module, optimizer: Any, steps: int = 3, start: int = 0) -> None:
    for batch in BATCHES[start : start + steps]:
        take(model, optimizer, batch)


def trained(System: Any, base: str = "SGD", **options: Any) -> tuple[nn.Module, Any]:
    Base, given = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **given, **options)
    train(model, optimizer)
    return model, optimizer


# Tampering.


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


def containers(value: Any) -> Any:
    """A copy whose tensors are the same."""
    if isinstance(value, dict):
        return {key: containers(inner) for key, inner in value.items()}
    return [containers(inner) for inner in value] if isinstance(value, list) else value


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


def snapshot(model: nn.Module, optimizer: Any) -> Any:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return copy.deepcopy(
        (model.state_dict(), optimizer.state_dict(), groups, curvature_of(optimizer))
    )


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


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
VECTORS = {"exp_avg", "momentum_buffer", "eigenvalues", "subspace_momentum", "epoch_start"}


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


# Versions.


def as_version_0(saved: Any) -> Any:
    """As the package wrote it before there was a version."""
    saved = copy.deepcopy(saved)
    for entry in saved["state"].values():
        for key in ("version", "base_class"):
            del entry["curvature"][key]
    for group in saved["param_groups"]:
        group.pop("param_names", None)
    return saved


@each_of_five
@pytest.mark.parametrize("base", BASES)
def test_checkpoints_without_a_version_load_as_ever(System: Any, base: str) -> None:
    Base, options = BASES[base]
    model, optimizer = trained(System, base)
    saved = as_version_0(optimizer.state_dict())
    twin = copy.deepcopy(model)
    resumed = make(System, twin, base=Base, **options)
    resumed.load_state_dict(saved)
    train(model, optimizer, 2, start=3)
    train(twin, resumed, 2, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    part = resumed.state_dict()["state"][0]["curvature"]
    assert part["version"] == 1
    assert part["base_class"] == {base: 1}


@each_of_five
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_the_version_survives_every_way_of_saving(System: Any, flat: bool) -> None:
    model, optimizer = trained(System)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    buffer = io.BytesIO()
    torch.save(get_optimizer_state_dict(model, optimizer, options=options), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    twin = MLP.model()
    resumed = make(System, twin, base=torch.optim.AdamW)
    with pytest.raises((ValueError, KeyError), match=r"saved by SGD.*is AdamW|momentum|betas"):
        set_optimizer_state_dict(twin, resumed, copy.deepcopy(loaded), options=options)
    resumed = make(System, twin, momentum=0.9)
    set_optimizer_state_dict(twin, resumed, loaded, options=options)
    assert resumed.state_dict()["state"][0]["curvature"]["version"] == 1
    for key in ("0.weight", "4.bias"):
        if flat:
            assert loaded[f"state.{key}.curvature.version"] == 1
        else:
            assert loaded["state"][key]["curvature"]["version"] == 1


# Of which base.

PLAIN: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    **{n: {"lr": 0.1} for n in ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"]},
    **{n: {"lr": 0.1} for n in ["Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor"]},
}


def plain(name: str, model: nn.Module, steps: int = 2) -> Any:
    optimizer = getattr(torch.optim, name)(model.parameters(), **PLAIN[name])
    train(model, optimizer, steps)
    return optimizer


@pytest.mark.parametrize("ours", PLAIN)
def test_a_plain_state_of_another_base_is_refused_naming_it(ours: str) -> None:
    """It would end in `KeyError: 'step'` at the next step."""
    model = MLP.model()
    optimizer = make(KAISA, model, base=getattr(torch.optim, ours), **PLAIN[ours])
    train(model, optimizer, 1)
    for theirs in PLAIN:
        saved = plain(theirs, MLP.model()).state_dict()
        if theirs == ours:
            optimizer.load_state_dict(saved)
            continue
        before = snapshot(model, optimizer)
        with pytest.raises(ValueError, match=rf"saved by {theirs}, and the base here is {ours}"):
            optimizer.load_state_dict(saved)
        assert alike(snapshot(model, optimizer), before)
    train(model, optimizer, 2)


@each_of_five
def test_a_plain_sgd_state_does_not_load_over_adamw(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, base=torch.optim.AdamW)
    for steps in (0, 2):  # a fresh one, too: its settings tell
        with pytest.raises(ValueError, match=r"saved by SGD.*base here is AdamW.*base=SGD"):
            optimizer.load_state_dict(plain("SGD", MLP.model(), steps).state_dict())
    train(model, optimizer, 2)


@each_of_five
@pytest.mark.parametrize("version", [0, 1])
def test_ours_over_another_base_is_refused_naming_it(System: Any, version: int) -> None:
    _, theirs = trained(System, "SGD")
    model, optimizer = trained(System, "AdamW")
    saved = theirs.state_dict() if version else as_version_0(theirs.state_dict())
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="saved by SGD, and the base here is AdamW"):
        optimizer.load_state_dict(saved)
    assert alike(snapshot(model, optimizer), before)


class OfSomebody(torch.optim.SGD):
    """A base that torch does not know, with entries and settings of its own."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, taste: str = "good") -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["taste"] = taste
            for p in group["params"]:
                self.state[p]["best"] = float("inf")


@each_of_five
def test_a_base_of_somebody_keeps_what_it_likes(System: Any) -> None:
    model = MLP.model()
    optimizer = make(System, model, base=OfSomebody)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    resumed = make(System, twin, base=OfSomebody)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[twin[0].weight]["base"]["best"] == float("inf")
    alone = OfSomebody(MLP.model().parameters(), lr=0.1)
    resumed.load_state_dict(alone.state_dict())
    with pytest.raises(ValueError, match="saved by AdamW, and the base here is OfSomebody"):
        resumed.load_state_dict(plain("AdamW", MLP.model()).state_dict())


@pytest.mark.parametrize("name", PLAIN)
def test_every_entry_that_torch_keeps_is_known(name: str) -> None:
    """Spoil each of them: a newer torch with another one shows here."""
    optimizer = make(KAISA, MLP.model(), base=getattr(torch.optim, name), **PLAIN[name])
    saved = plain(name, MLP.model()).state_dict()
    for key, value in saved["state"][0].items():
        state = containers(saved)
        state["state"][0][key] = torch.full_like(torch.as_tensor(value), torch.nan)
        with pytest.raises(ValueError, match=rf"'{key}'\], of parameter '0.weight', is.*finite"):
            optimizer.load_state_dict(state)


def test_a_learning_rate_a_little_below_zero_loads() -> None:
    """As schedulers leave it by rounding."""
    model, optimizer = trained(KAISA)
    optimizer.param_groups[0]["lr"] = -1e-19
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = -0.1
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['lr'\] is -0.1, outside"):
        make(KAISA, model, momentum=0.9).load_state_dict(saved)


# And back to the base alone.


@each_of_five
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("version", [0, 1])
def test_the_base_goes_on_alone_with_what_is_exported(System: Any, base: str, version: int) -> None:
    """Momentum and hyperparameters go on: as if the wrapper had done nothing from there on."""
    Base, options = BASES[base]
    model = MLP.model()
    optimizer = make(System, model, base=Base, **options, **base_only(System))
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.03
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    alone = Base(twin.parameters(), **options)
    alone.load_state_dict(export_base_state(saved if version else as_version_0(saved)))
    assert alone.param_groups[0]["lr"] == 0.03
    assert "peak_lr" not in alone.param_groups[0]
    assert alone.state[twin[0].weight].keys() == optimizer.state[model[0].weight]["base"].keys()
    train(model, optimizer, start=3)
    train(twin, alone, start=3)
    assert same(model, twin)


def test_export_takes_a_plain_state_as_it_is_and_nothing_else() -> None:
    saved = plain("AdamW", MLP.model()).state_dict()
    exported = export_base_state(saved)
    assert exported["param_groups"] == saved["param_groups"]
    assert alike(exported["state"], saved["state"])
    wrong: list[Any] = [None, [], {}, {"state": {}}, {"state.0.weight.base.exp_avg": 1}]
    for value in wrong:
        with pytest.raises(ValueError, match="no state of an optimizer"):
            export_base_state(value)
    broken: list[Any] = [
        ({"state": 3, "param_groups": []}, "'state' is 3"),
        ({"state": {0: None}, "param_groups": []}, r"state\[0\] is of type NoneType"),
        ({"state": {}, "param_groups": [3]}, "'param_groups' is not a list"),
    ]
    for value, message in broken:
        with pytest.raises(ValueError, match=message):
            export_base_state(value)
    fresh = make(DistKFAC, MLP.model())
    assert export_base_state(fresh.state_dict())["state"] == {}
    assert "export_base_state" in second_order.__all__

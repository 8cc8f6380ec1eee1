"""Two bases in one object: hidden weights with one, the rest with the other."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from aux_base_cases import (
    BATCHES,
    CASE,
    HIDDEN,
    SGD,
    AdamW,
    ByHand,
    Muon,
    Speaker,
    backward,
    each_pair,
    optim,
    trained_by,
    two,
)
from hypothesis import given
from hypothesis import strategies as st
from models import ZOO
from optimizer_cases import KAISA, each_kronecker, make, same, take
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

from second_order import (
    AuxBase,
    SecondOrderWarning,
)

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


@each_kronecker
@each_pair
def test_without_curvature_two_bases_equal_two_separate_optimizers(System: Any, pair: str) -> None:
    """Bit for bit."""
    model = CASE.model()
    twin = CASE.model()
    optimizer = two(System, pair, model, skip_layers=["*"])
    plain = ByHand(pair, twin)
    for batch in BATCHES[:5]:
        take(model, optimizer, batch)
        backward(twin, batch)
        plain.step()
        assert same(model, twin)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.memory = nn.LSTM(4, 3)
        self.bags = nn.EmbeddingBag(5, 4)
        self.places = OwnEmbedding()
        self.patches = nn.Conv2d(2, 3, 2)
        self.tied = Words(7, 4)
        self.first = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.tied.weight
        self.last = nn.Linear(4, 2)


class Words(nn.Embedding):
    pass


class OwnEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))


ATTENTION = {
    *("attention.in_proj_weight", "attention.out_proj.weight"),
    *("memory.weight_ih_l0", "memory.weight_hh_l0", "first.weight"),
}


class Scale(nn.Module):
    """A parametrization with a parameter of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, 1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


def scaled() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    parametrize.register_parametrization(model[0], "weight", Scale())
    return model


def in_windows() -> nn.Module:
    """A LayerNorm over two dimensions between two Linears."""
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm([4, 6]), nn.Linear(6, 3))


def reparametrized() -> nn.Module:
    """The hidden weights are three, and there are two gains."""
    return nn.Sequential(
        weight_norm(nn.Linear(6, 6)),
        parametrizations.weight_norm(nn.Linear(6, 6)),
        parametrizations.spectral_norm(nn.Linear(6, 6)),
        parametrizations.spectral_norm(nn.Linear(6, 3)),
    )


REPARAMETRIZED = {
    *("0.weight_v", "1.parametrizations.weight.original1"),
    "2.parametrizations.weight.original",
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("build", "base", "layers", "hidden"),
    [
        (Speaker, Muon, (), HIDDEN),
        (Speaker, SGD, (), HIDDEN),
        (Speaker, Muon, ["down"], {"up.weight"}),
        (Attention, Muon, (), ATTENTION),
        (Attention, SGD, (), {*ATTENTION, "patches.weight"}),
        (Attention, SGD, ["Conv*", "attention"], {n for n in ATTENTION if n[:2] != "at"}),
        (ZOO["tied"].build, Muon, (), {"hidden.weight"}),
        (ZOO["mlp"].build, Muon, (), {"0.weight", "2.weight"}),
        (reparametrized, Muon, (), REPARAMETRIZED),
        (reparametrized, SGD, ["1"], {n for n in REPARAMETRIZED if n[0] != "1"}),
        (scaled, Muon, (), {"0.parametrizations.weight.original"}),
        (in_windows, Muon, (), {"0.weight"}),  # a two-dimensional gain is not a hidden weight
    ],
)
def test_hidden_weights_use_the_base_and_others_use_aux_base(
    build: Any, base: Any, layers: Any, hidden: Any
) -> None:
    model = build()
    optimizer = KAISA(model, lr=0.1, base=base, aux_base=AuxBase(AdamW, layers=layers))
    found = trained_by(optimizer)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert {name for name, base in found.items() if base != "AdamW"} == set(hidden)


@given(data=st.data())
def test_groups_are_split_and_keep_their_options(data: st.DataObject) -> None:
    """Whatever groups there are: each parameter once, by its name, in order, with its entries."""
    model = Speaker()
    named = data.draw(st.permutations(list(model.named_parameters())))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(named) - 1), max_size=4)))
    parts = [named[i:j] for i, j in zip([0, *cuts], [*cuts, len(named)], strict=True)]
    with_names = data.draw(st.booleans())
    groups = [
        {"params": part if with_names else [p for _, p in part], "lr": 0.1 + i, "mine": i}
        for i, part in enumerate(parts)
    ]
    optimizer = KAISA(groups, model=model, lr=0.5, base=Muon, aux_base=AdamW)
    names = {id(p): name for name, p in named}
    found: dict[int, list[str]] = {}
    for group in optimizer.param_groups:
        members = [names[id(p)] for p in group["params"]]
        assert members
        assert {name in HIDDEN for name in members} == {not group["aux_base"]}
        assert group["lr"] == 0.1 + group["mine"]
        assert ("betas" in group) is group["aux_base"]
        assert ("ns_steps" in group) is not group["aux_base"]
        assert group.get("param_names", members) == members
        assert ("param_names" in group) is with_names
        found.setdefault(group["mine"], []).extend(members)
    for i, part in enumerate(parts):
        assert Counter(found[i]) == Counter(name for name, _ in part)
        for hidden in (True, False):
            order = [name for name, _ in part if (name in HIDDEN) is hidden]
            assert [name for name in found[i] if (name in HIDDEN) is hidden] == order
    assert all(group.keys() == {"params", "lr", "mine"} for group in groups)


def test_an_added_group_is_split_unless_it_names_its_base() -> None:
    model = CASE.model()
    optimizer = two(KAISA, "Muon AdamW", [model.up.weight, model.up.bias], model=model)
    take(model, optimizer, BATCHES[0])
    optimizer.add_param_group({"params": model.down.parameters(), "lr": 0.3})
    optimizer.add_param_group({"params": model.head.weight, "aux_base": False})
    marks = [
        (group["aux_base"], group["lr"], len(group["params"])) for group in optimizer.param_groups
    ]
    expected_groups = [
        (False, 0.02, 1),
        (True, 0.02, 1),
        (False, 0.3, 1),
        (True, 0.3, 1),
        (False, 0.02, 1),
    ]
    assert marks == expected_groups
    before = model.head.weight.detach().clone()
    for batch in BATCHES[1:3]:
        take(model, optimizer, batch)
    assert not torch.equal(model.head.weight, before)
    assert "momentum_buffer" in optimizer.state[model.head.weight]["base"]
    assert "exp_avg" in optimizer.state[model.down.bias]["base"]


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        (
            lambda m: {"params": m.head.parameters(), "aux_base": "no"},
            TypeError,
            r"group\['aux_base'\]='no'",
        ),
        (
            lambda m: {"params": m.head.bias, "aux_base": False},
            ValueError,
            r"\(3,\), but Muon only trains matrices",
        ),
        (lambda m: {"params": [m.down.weight, m.up.bias]}, ValueError, "more than one"),
        (lambda m: {"params": [m.down.weight, 3]}, TypeError, "Tensors"),
        (lambda m: [m.head.weight], TypeError, None),
        (
            lambda m: {"params": m.head.parameters(), "param_names": ["w"]},
            ValueError,
            "a group has 2 parameters and 1 'param_names'; name every parameter",
        ),
    ],
)
def test_an_invalid_group_changes_nothing(group: Any, error: Any, message: str | None) -> None:
    model = CASE.model()
    optimizer = two(KAISA, "Muon AdamW", model.up.parameters(), model=model)
    before = [dict(each) for each in optimizer.param_groups]
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group(model))
    assert [dict(each) for each in optimizer.param_groups] == before
    take(model, optimizer, BATCHES[0])


class Free(SGD):
    """Takes whatever there is."""

    def __init__(self, params: Any, **keywords: Any) -> None:
        self.flavour = keywords.pop("flavour", None)
        super().__init__(params, **keywords)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"aux_base": "AdamW"},
        TypeError,
        "aux_base='AdamW' is not an optimizer class; pass the class itself",
    ),
    ({"aux_base": optim.LBFGS}, TypeError, "aux_base=LBFGS evaluates its closure many times"),
    (
        {"aux_base": AuxBase(AdamW, kwargs={"beta": 1})},
        TypeError,
        "aux_base: unknown keyword 'beta'.*AdamW.*'betas'",
    ),
    ({"aux_base": AuxBase(AdamW, kwargs={"differentiable": True})}, ValueError, "differentiable"),
    ({"beta": 1}, TypeError, "'beta': neither an option here nor one of Muon or AdamW.*'betas'"),
    ({"aux_bases": []}, TypeError, "unknown keyword 'aux_bases'.*did you mean 'aux_base'"),
    (
        {"aux_base": AuxBase(AdamW, layers=["*"])},
        ValueError,
        r"none of the 10 parameters is.*use base=AdamW without",
    ),
]


@each_kronecker
@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=str)
def test_invalid_options_raise_before_anything_changes(
    System: Any, options: Any, error: Any, message: str
) -> None:
    model = CASE.model()
    twin = CASE.model()
    with pytest.raises(error, match=message):
        System(model, **{"lr": 0.1, "base": Muon, "aux_base": AdamW, **options})
    assert same(model, twin)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": "up"}, r"layers='up' is not a sequence.*write layers="),
        ({"layers": {"up"}}, r"layers=\{'up'\} is not a sequence.*write layers="),
        ({"kwargs": 3}, "kwargs=3 is not a mapping"),
    ],
)
def test_a_second_base_checks_its_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        AuxBase(AdamW, **arguments)


def test_keywords_reach_the_base_that_accepts_them() -> None:
    model = CASE.model()
    hidden, others = KAISA(
        model, lr=0.1, base=Muon, aux_base=AdamW, eps=1e-3, ns_steps=3, amsgrad=True
    ).param_groups
    assert (hidden["lr"], hidden["eps"], hidden["ns_steps"]) == (0.1, 1e-3, 3)
    assert (others["lr"], others["eps"], others["amsgrad"]) == (0.1, 1e-3, True)
    assert (hidden["weight_decay"], others["weight_decay"]) == (0.1, 0.01)  # each one's own
    assert "amsgrad" not in hidden
    assert "ns_steps" not in others
    free = KAISA(
        model,
        lr=0.1,
        base=Free,
        aux_base=AuxBase(AdamW, kwargs={"betas": (0.5, 0.5)}),
        flavour="x",
    )
    assert "betas" not in free.param_groups[0]


class WithFunction(SGD):
    def __init__(self, params: Any, lr: float, rule: Any = None) -> None:
        super().__init__(params, lr)
        self.defaults["rule"] = rule


def test_ranks_do_not_compare_the_address_of_a_function() -> None:
    """It differs between processes."""
    described = []
    for rule in (lambda x: x, lambda x: x):
        optimizer = KAISA(
            CASE.model(), lr=0.1, base=WithFunction, aux_base=AdamW, rule=rule, eps=1e-3
        )
        described.append(optimizer._base.description())
    assert described[0] == described[1]
    assert any("'eps': 0.001" in line for line in described[0])


def test_a_pattern_without_a_match_raises() -> None:
    with pytest.warns(SecondOrderWarning, match="aux_base: the pattern 'haed' matches no module"):
        KAISA(CASE.model(), lr=0.1, base=Muon, aux_base=AuxBase(AdamW, layers=["haed"]))


@each_kronecker
def test_the_summary_shows_the_base_of_each_parameter(System: Any) -> None:
    optimizer = two(System, "Muon AdamW apart", CASE.model())
    lines = [line for line in optimizer.summary().lines if line.startswith("group ")]
    assert len(lines) == len(optimizer.param_groups)
    assert [line for line in lines if "Muon, lr 0.02, weight_decay 0.1: " in line]
    for name, base in trained_by(optimizer).items():
        (line,) = [line for line in lines if name in re.split(r"[ ,]+", line)]
        assert f": {base}, lr " in line
    assert str(optimizer.summary()).endswith("\n".join(lines))
    alone = make(System, ZOO["mlp"].model())
    assert "group 0" not in str(alone.summary())

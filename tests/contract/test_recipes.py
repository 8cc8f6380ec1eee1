"""Groups as recipes have them: `parameter_groups`, and those that other packages make."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import make
from stacks import CASE
from torch import nn

from second_order import KAISA, SecondOrderWarning, parameter_groups

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """A model as language models are: embeddings, blocks, a norm, a head that may be tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def settings(groups: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """What is said of a parameter, which is in one group only."""
    (group,) = [g for g in groups if name in g["param_names"]]
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def assert_complete(groups: list[dict[str, Any]], model: nn.Module) -> None:
    """Every parameter that trains, once, by its name."""
    named = dict(model.named_parameters())
    pairs = [pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True)]
    assert sorted(name for name, _ in pairs) == sorted(n for n in named if named[n].requires_grad)
    assert all(named[name] is p for name, p in pairs)


def test_vectors_and_norms_do_not_decay() -> None:
    model = Words()
    model.blocks[0].norm = nn.LayerNorm((2, 4))  # its gain is a matrix
    groups = parameter_groups(model, weight_decay=0.1)
    assert_complete(groups, model)
    assert len(groups) == 2
    for name in ("blocks.0.norm.weight", "blocks.0.up.bias", "norm.weight", "head.bias"):
        assert settings(groups, name) == {"weight_decay": 0.0}
    for name in ("words.weight", "blocks.1.up.weight", "head.weight"):
        assert settings(groups, name) == {"weight_decay": 0.1}


def test_rules_override_by_name_and_the_first_counts() -> None:
    model = Words()
    rules = {r"blocks\.0\.": {"lr": 0.01}, r"up\.weight$": {"lr": 0.02, "weight_decay": 0.7}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = parameter_groups(model, weight_decay=0.2, rules=rules)
    assert_complete(groups, model)
    assert settings(groups, "blocks.0.up.weight") == {"lr": 0.01, "weight_decay": 0.2}
    assert settings(groups, "blocks.1.up.weight") == {"lr": 0.02, "weight_decay": 0.7}
    assert settings(groups, "head.bias") == {"weight_decay": 0.0}


def test_what_matches_nothing_is_told() -> None:
    with pytest.warns(SecondOrderWarning, match=r"rules: 'decoder' is in no parameter's name"):
        parameter_groups(Words(), rules={"decoder": {"lr": 1.0}})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"weight_decay": -0.1}, ValueError, r"weight_decay=-0.1 is outside \[0, inf\]"),
        ({"weight_decay": "high"}, TypeError, "weight_decay='high' is not a number"),
    ],
)
def test_errors_name_the_value_and_the_remedy(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parameter_groups(Words(), **given)
    with pytest.raises(TypeError, match=r"model=list is not a torch\.nn\.Module"):
        parameter_groups([])  # type: ignore[arg-type]


def test_two_bases_divide_them_further() -> None:
    model = Words()
    groups = parameter_groups(model, weight_decay=0.1, rules={"^head": {"lr": 0.3}})
    optimizer = KAISA(groups, model=model, lr=0.1, base=torch.optim.Muon, rest=torch.optim.AdamW)
    rows = {row.name: row for row in optimizer.recipe().rows}
    assert rows["blocks.0.up.weight"].base == "Muon"
    assert rows["head.weight"].base == rows["words.weight"].base == "AdamW"
    assert rows["head.weight"].lr == 0.3
    assert rows["blocks.0.up.bias"].weight_decay == 0.0


# As others make groups.


def test_groups_without_a_model_are_refused_with_the_line_to_write() -> None:
    model = CASE.model()
    with pytest.raises(TypeError, match=r"KAISA\(params, model=model"):
        make(KAISA, parameter_groups(model))

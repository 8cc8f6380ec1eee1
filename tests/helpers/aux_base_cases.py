"""What the tests of two bases share: a model, pairs of bases, and what a user writes by hand.

optimizer, plain = two(KAISA, "Muon AdamW", model), ByHand("Muon AdamW", twin)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import Case
from optimizer_cases import make
from reference import cross_entropy
from torch import Tensor, nn

from second_order import AuxBase
from second_order.optimizers.base_pair import base_of
from second_order.training.context import base_class_names

if TYPE_CHECKING:
    from reference import Batch

optim = torch.optim
Muon = optim.Muon
AdamW = optim.AdamW
SGD = optim.SGD


def trained_by(optimizer: Any) -> dict[str, str]:
    """The class of the base that trains each parameter, by the parameter's name."""
    names = optimizer.training.param_names()
    found = {}
    for group in optimizer.param_groups:
        base = base_class_names(base_of(optimizer.training.base, group))
        found |= {names[id(p)]: base for p in group["params"]}
    return found


class Speaker(nn.Module):
    """Something of everything that a transformer has outside of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.places = nn.Parameter(torch.randn(3, 4))
        self.up = nn.Linear(4, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.up(self.words(x) + self.places)))
        return self.head(torch.tanh(self.down(x)))


CASE = Case("speaker", Speaker, (3,), (3,), vocabulary=6, shared="expand")
BATCHES = CASE.batches(8)
HIDDEN = {"up.weight", "down.weight"}
DECAY = {"weight_decay": 0.1}

# (base, aux_base, keywords, what of them is whose, aux_kwargs)
PAIRS: dict[str, tuple[Any, Any, dict[str, Any], tuple[set[str], set[str]], dict[str, Any]]] = {
    "Muon AdamW": (
        Muon,
        AdamW,
        {"lr": 0.02, "betas": (0.9, 0.95), "adjust_lr_fn": "match_rms_adamw", **DECAY},
        ({"lr", "adjust_lr_fn", "weight_decay"}, {"lr", "betas", "weight_decay"}),
        {},
    ),
    "Muon AdamW apart": (
        Muon,
        AdamW,
        {"lr": 0.02, "momentum": 0.8, **DECAY},
        ({"lr", "momentum", "weight_decay"}, {"lr", "weight_decay"}),
        {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.0},
    ),
    "SGD AdamW": (
        SGD,
        AdamW,
        {"lr": 0.02, "momentum": 0.9, "betas": (0.9, 0.95), **DECAY},
        ({"lr", "momentum", "weight_decay"}, {"lr", "betas", "weight_decay"}),
        {},
    ),
    "AdamW Adagrad": (AdamW, optim.Adagrad, {"lr": 0.02}, ({"lr"}, {"lr"}), {}),
}
each_pair = pytest.mark.parametrize("pair", PAIRS)


def two(System: Any, pair: str, params_or_model: Any, **options: Any) -> Any:
    base, aux_base, keywords, _, special = PAIRS[pair]
    layers = options.pop("aux_layers", ())
    second = AuxBase(aux_base, layers=layers, kwargs=special)
    return make(System, params_or_model, base=base, aux_base=second, **keywords, **options)


class ByHand:
    """What a user writes without this: two optimizers on two lists."""

    def __init__(self, pair: str, model: nn.Module) -> None:
        base, aux_base, keywords, whose, special = PAIRS[pair]
        named = list(model.named_parameters())
        self.params = list(model.parameters())
        self.hidden = [p for name, p in named if name in HIDDEN]
        self.others = [p for name, p in named if name not in HIDDEN]
        own = [{k: v for k, v in keywords.items() if k in each} for each in whose]
        self.base = base(self.hidden, **own[0])
        self.aux_base = aux_base(self.others, **{**own[1], **special})

    def step(self) -> None:
        self.base.step()
        self.aux_base.step()


def backward(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()

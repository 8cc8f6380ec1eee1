"""Which parameters get which curvature block, and what the summary says of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import CLASSES, ZOO
from optimizer_cases import make
from torch import Tensor, nn

from second_order import KAISA, DistKFAC
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.exact import ExactBlock
from second_order.kronecker.model_blocks import BlockRules, find_blocks
from second_order.utils.modules import unmatched_patterns

if TYPE_CHECKING:
    from second_order.kronecker.model_blocks import LeftToBase

pytestmark = pytest.mark.filterwarnings("ignore:.*trained by SGD alone")
EXACT = BlockRules(max_exact_dim=256)


def find(
    model: nn.Module,
    rules: BlockRules | None = EXACT,
    only: list[Any] | None = None,
    known: dict[str, KroneckerBlock] | None = None,
) -> tuple[dict[str, KroneckerBlock], dict[str, LeftToBase]]:
    """Blocks and what is left to the base, by name; of all parameters, or of those in `only`."""
    params = model.parameters() if only is None else only
    owned = {id(p): p.numel() for p in params}
    earlier = {id(block.weight): block for block in (known or {}).values()}
    blocks, left = find_blocks(model, owned, (), earlier, torch.float32, rules)
    assert sum(row.parameters for row in left) + sum(
        p.numel() for block in blocks for p in block.all_params
    ) == sum(owned.values())
    assert len({block.name for block in blocks}) == len(blocks)
    return {block.name: block for block in blocks}, {row.name: row for row in left}


def kinds(blocks: dict[str, KroneckerBlock]) -> dict[str, type[KroneckerBlock]]:
    return {name: type(block) for name, block in blocks.items()}


def vgg() -> nn.Sequential:
    """A feature map of 6 channels of 2 x 2, flattened into wide Linears."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(24, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def distkfac(params_or_model: Any, **options: Any) -> Any:
    return make(
        DistKFAC, params_or_model, **{"async_inverse": False, "precondition_norms": True, **options}
    )


# Every parameter once.


MIXED = ["norms", "batch_norm", "transformer", "attention", "embedding", "tied", "lora", "conv3d"]


@pytest.mark.parametrize("name", MIXED)
def test_every_parameter_is_in_one_block_or_row(name: str) -> None:
    """`find` checks the sizes. No parameter is in two blocks."""
    model = ZOO[name].model()
    for rules in (None, EXACT, BlockRules(max_factor_dim=5, max_exact_dim=2)):
        blocks, _ = find(model, rules)
        held = [id(p) for block in blocks.values() for p in block.all_params]
        assert len(held) == len(set(held))


# Kinds.


def test_a_bias_without_its_weight_is_unowned() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, CLASSES))
    only = [model[0].bias, *model[1].parameters()]
    blocks, left = find(model, only=only)
    assert kinds(blocks) == {"1": KroneckerBlock}
    assert left["0"].parameters == 3
    assert "weight is not in the optimizer's groups" in left["0"].reason


def test_a_norm_whose_bias_was_replaced_gets_a_new_block() -> None:
    """Parameters are compared by identity: tensors with several elements have no truth value."""
    norm = nn.LayerNorm(4)
    model = nn.Sequential(nn.Linear(4, 4), norm)
    before = find(model)[0]
    assert find(model, known=before)[0]["1"] is before["1"]
    norm.bias = nn.Parameter(torch.ones(4))
    after = find(model, known=before)[0]
    assert after["0"] is before["0"]
    assert after["1"] is not before["1"]
    assert after["1"].all_params[1] is norm.bias


class Renormalised(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "norm", [Renormalised(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, affine=True)], ids=str
)
def test_norms_with_another_forward_fall_back_to_the_base(norm: nn.Module) -> None:
    blocks, left = find(nn.Sequential(nn.Linear(4, 4), norm))
    assert kinds(blocks) == {"0": KroneckerBlock}
    assert left["1"].parameters == 8
    assert type(norm).__name__ in left["1"].reason


class Sharing(nn.Module):
    """A norm that is used twice under two names, or two that share their gain."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.LayerNorm(4)
        self.head = nn.Linear(4, CLASSES)
        self.second = nn.LayerNorm(4) if tied else self.first
        self.second.weight = self.first.weight


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
def test_norms_that_share_a_gain_fall_back_to_the_base() -> None:
    """The block of one does not see what the other does with it, which its statistics show."""
    model = Sharing(tied=True)
    blocks, left = find(model)
    assert kinds(blocks) == {"first": ExactBlock, "head": KroneckerBlock}
    assert left.keys() == {"second"}
    optimizer = make(KAISA, model, precondition_norms=True)
    x = torch.randn(6, 4)
    y = torch.randint(CLASSES, (6,))
    nn.functional.cross_entropy(model.head(model.second(model.first(x).tanh())), y).backward()
    optimizer.step()
    rows = {row.name: row for row in optimizer.summary().rows}
    assert "unexplained" in rows["first"].detail


def test_embeddings_with_sparse_gradients_fall_back_to_the_base() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Flatten(), nn.Linear(12, CLASSES))
    optimizer = KAISA(model, lr=0.1)
    rows = {row.name: row for row in optimizer.summary().rows}
    assert (rows["0"].status, rows["0"].detail) == ("base", "its gradient is sparse")
    x = torch.randint(6, (5, 3))
    y = torch.randint(CLASSES, (5,))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# Patterns.


@pytest.mark.parametrize("pattern", ["first", "second", "sec*"])
def test_a_pattern_can_match_any_name_of_a_shared_module(pattern: str) -> None:
    model = nn.Module()
    model.first = nn.Linear(4, 4)
    model.second = model.first
    model.head = nn.Linear(4, CLASSES)
    owned = {id(p): p.numel() for p in model.parameters()}
    blocks, left = find_blocks(model, owned, [pattern], {}, torch.float32)
    assert [block.name for block in blocks] == ["head"]
    assert [(row.name, row.reason) for row in left] == [("first", f"skip_layers: {pattern!r}")]
    assert unmatched_patterns(model, [pattern, "none"]) == ["none"]


# max_factor_dim.


@pytest.mark.parametrize(("bound", "large"), [(37, set()), (36, {"4"}), (24, {"4", "8"})])
def test_layers_above_max_factor_dim_fall_back_to_the_base(bound: int, large: set[str]) -> None:
    """The convolution has 4 x 3 x 3 + 1 rows, and the Linear 24 + 1."""
    blocks, left = find(vgg(), BlockRules(max_factor_dim=bound, max_exact_dim=256))
    assert left.keys() == large
    assert not large & blocks.keys()
    for name, size in (("4", 37), ("8", 25)):
        if name in large:
            reason = f"a factor of {size} rows exceeds max_factor_dim={bound}"
            assert left[name].reason == reason


# Double factoring.


def test_auto_double_factoring_selects_the_first_wide_linear_after_a_convolution() -> None:
    blocks, left = find(vgg(), BlockRules(20, "auto", 256))
    assert left.keys() == {"4"}  # 37 rows
    assert kinds(blocks) == {
        "0": KroneckerBlock,
        "1": ExactBlock,
        "8.bias": ExactBlock,
        "8": KroneckerBlock,
        "11": KroneckerBlock,
    }
    assert [blocks["8"].shape.dims[k] for k in "AGL"] == [6, 8, 4]  # channels, out, locations
    assert blocks["8"].bias is None


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(nn.Sequential(nn.Linear(24, 3)), id="no convolution before it"),
        pytest.param(
            nn.Sequential(nn.Conv2d(2, 7, 2), nn.Flatten(), nn.Linear(24, 3)), id="no multiple"
        ),
        pytest.param(
            nn.Sequential(nn.Conv2d(2, 24, 2), nn.Flatten(), nn.Linear(24, 3)), id="one location"
        ),
        pytest.param(
            nn.Sequential(nn.Linear(24, 3), nn.Conv1d(2, 6, 1)), id="a convolution after it"
        ),
    ],
)
def test_auto_double_factoring_skips_unsuitable_layers(model: nn.Sequential) -> None:
    blocks, left = find(model, BlockRules(23, "auto", 256))
    assert not any(block.shape.locations for block in blocks.values())
    assert any("max_factor_dim=23" in row.reason for row in left.values())


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"nowhere": (4, 6)}, "'nowhere' is not in the model; name an nn.Linear"),
        ({"4": (4, 6)}, "'4' is a Conv2d; name an nn.Linear"),
        ({"8": (4, 5)}, "'8' has 24 inputs, not 4 locations x 5 channels; give (locations,"),
        ({"8": (0, 6)}, "'8' has 24 inputs, not 0 locations x 6 channels"),
        ({"8": (24,)}, "is not 'auto', None, or a dict of layer names"),
        ("all", "doubly_factored='all' is not 'auto', None, or a dict"),
    ],
)
def test_options_that_match_no_layer_raise_with_a_remedy(chosen: Any, message: str) -> None:
    with pytest.raises(ValueError, match="doubly_factored") as raised:
        distkfac(vgg(), doubly_factored=chosen)
    assert message in str(raised.value)

"""The share of well-known models that KAISA preconditions: the script, and its stored run."""

from __future__ import annotations

import copy
import math
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stored_runs import number, only, rows, stored, text_of

from second_order import KAISA, SecondOrderWarning

if TYPE_CHECKING:
    from torch import nn

pytest.importorskip("transformers")
import layer_coverage as coverage

PUBLISHED_PARAMETERS = {
    "ResNet-50": 25_557_032,
    "ViT-B/16": 86_567_656,
    "BERT-base": 109_514_298,
    "GPT-2": 124_439_808,
    "Llama-2-7B": 6_738_415_616,
    "Llama-3-8B": 8_030_261_248,
    "Mixtral-8x7B": 46_702_792_704,
}
each_model = pytest.mark.parametrize("name", coverage.ARCHITECTURES)


def batch(model: nn.Module) -> dict[str, Any]:
    """Random images or tokens with labels."""
    config: Any = model.config
    if hasattr(config, "vocab_size"):
        tokens = torch.randint(config.vocab_size, (8, 12))
        return {"input_ids": tokens, "labels": tokens}
    side = getattr(config, "image_size", 32)
    images = torch.randn(8, 3, side, side)
    return {"pixel_values": images, "labels": torch.randint(config.num_labels, (8,))}


@each_model
@pytest.mark.parametrize("setting", ["default", "all three"])
def test_training_a_small_copy_changes_neither_its_layers_nor_their_bytes(
    name: str, setting: str
) -> None:
    torch.manual_seed(0)
    model = coverage.ARCHITECTURES[name].build(small=True)
    predicted = coverage.cover(name, copy.deepcopy(model), "SGD", setting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = KAISA(model, lr=0.1, inv_update_steps=1, **coverage.SETTINGS[setting])
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch(model)).loss.backward()
            optimizer.step()
    summary = optimizer.summary()
    assert summary.preconditioned_share == predicted.share, str(summary)
    assert summary.factor_bytes == sum(layers.factor_bytes for layers in predicted.layers)
    assert summary.inverse_bytes == sum(layers.inverse_bytes for layers in predicted.layers)


@each_model
def test_fake_tensors_have_the_published_sizes_and_the_stored_coverage(name: str) -> None:
    model = coverage.build_fake(coverage.ARCHITECTURES[name])
    for base in coverage.BASES:
        found = coverage.cover(name, model, base, "default")
        assert found.parameters == PUBLISHED_PARAMETERS[name]
        records = stored("coverage")["records"]
        (record,) = only(records, model=name, base=base, setting="default")
        assert [vars(layers) for layers in found.layers] == record["layers"]


def test_the_stored_run_has_each_model_with_each_setting() -> None:
    keys = [(r["model"], r["base"], r["setting"]) for r in stored("coverage")["records"]]
    assert len(keys) == len(set(keys))
    assert set(keys) == {
        (name, base, setting)
        for name in coverage.ARCHITECTURES
        for base in coverage.BASES
        for setting in coverage.SETTINGS
    }
    for record in stored("coverage")["records"]:
        assert record["options"] == coverage.SETTINGS[record["setting"]]
        total = sum(layers["parameters"] for layers in record["layers"])
        assert total == PUBLISHED_PARAMETERS[record["model"]]


# ------------------------------------------------------------------------------------- the page

PAGE = "docs/reference/layers.md"
COLUMNS = {
    "over SGD": ("SGD", "default"),
    "over AdamW": ("AdamW", "default"),
    "norms": ("SGD", "norms"),
    "gradient factors": ("SGD", "gradient factors"),
    "16,384 rows": ("SGD", "16,384 rows"),
    "32,768 rows": ("SGD", "32,768 rows"),
}


def stored_layers(name: str, base: str, setting: str) -> Any:
    records = stored("coverage")["records"]
    (record,) = only(records, model=name, base=base, setting=setting)
    return record["layers"]


def share(name: str, base: str, setting: str, detail: str = "") -> float:
    """The share of preconditioned parameters in %, of layers whose detail begins so."""
    preconditioned = [
        layers["parameters"]
        for layers in stored_layers(name, base, setting)
        if layers["status"] == "preconditioned" and layers["detail"].startswith(detail)
    ]
    return 100 * sum(preconditioned) / PUBLISHED_PARAMETERS[name]


def rounded_down(percentage: float, digits: int) -> str:
    scale = 10**digits
    return f"{math.floor(scale * percentage) / scale:.{digits}f}"


def bytes_per_parameter(name: str, base: str, setting: str) -> float:
    layers = stored_layers(name, base, setting)
    total = sum(each["factor_bytes"] + each["inverse_bytes"] for each in layers)
    return total / PUBLISHED_PARAMETERS[name]


def test_the_table_of_the_page_has_the_stored_coverage() -> None:
    table = rows(PAGE, "model", "parameters", *COLUMNS)
    assert list(table) == list(coverage.ARCHITECTURES)
    units = {"M": 1e6, "B": 1e9}
    for name, (parameters, *cells) in table.items():
        size, unit = parameters.split()
        assert number(size) == pytest.approx(PUBLISHED_PARAMETERS[name] / units[unit], rel=0.02)
        for cell, column in zip(cells, COLUMNS.values(), strict=True):
            state = bytes_per_parameter(name, *column)
            assert cell == f"{rounded_down(share(name, *column), 2)} ({state:.1f})"


def test_the_text_of_the_page_has_the_stored_coverage() -> None:
    text = text_of(PAGE)
    *others, last = (
        f"{rounded_down(share(name, 'AdamW', 'default', 'of gradients'), 1)} %"
        for name in ("Llama-2-7B", "Llama-3-8B", "Mixtral-8x7B")
    )
    assert f"{', '.join(others)} and {last} of their parameters have gradient factors" in text
    lowered = rounded_down(share("Llama-2-7B", "AdamW", "16,384 rows"), 2)
    assert f"the share is {lowered} %" in text
    gained = share("Mixtral-8x7B", "SGD", "gradient factors", "of gradients: A 229376")
    assert gained / (100 - share("Mixtral-8x7B", "SGD", "default")) == pytest.approx(
        2 / 3, abs=0.01
    )
    assert "two thirds of Mixtral's experts" in text


def test_the_page_on_choosing_has_the_stored_shares() -> None:
    text = text_of("docs/start/choosing.md")
    small = ("ResNet-50", "ViT-B/16", "BERT-base", "GPT-2")
    lowest = min(share(name, base, "default") for name in small for base in coverage.BASES)
    sentence = f"at least {rounded_down(lowest, 1)} % of ResNet-50, ViT-B/16, BERT-base and GPT-2."
    assert sentence in text
    assert f"the share is {rounded_down(share('Llama-2-7B', 'SGD', 'default'), 1)} %" in text

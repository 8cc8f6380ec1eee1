"""The share of well-known models that KAISA preconditions: the script, and its stored run."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stored_runs import only, stored

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

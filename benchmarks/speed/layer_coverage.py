"""The share of well-known models' parameters that KAISA preconditions, and what raises it.

    make coverage

A model has the sizes that its authors published, and is made by transformers from a configuration.
Its parameters are fake tensors, which have shapes but no data. Nothing is downloaded, and 47
billion parameters take no memory. KAISA refuses models on the meta device. It accepts fake tensors,
because they name the device that they stand for. Its ``summary()`` then lists the layers as for any
model.

No pass runs. After its first statistics, KAISA may still find that the captured pairs of a layer
are unverified. ``tests/benchmarks/test_layer_coverage.py`` trains a small copy of each model to
rule this out.

The bytes of factors and inverses are those of one process, in float32. A factor is stored as a
triangle, its inverse as a square, and a diagonal as a vector.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import reporting
from second_order import KAISA, SecondOrderWarning
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.solvers import SOLVERS

FLOAT32_BYTES = 4
BASES: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "norms": {"precondition_norms": True},
    "16,384 rows": {"max_factor_dim": 16384},
    "32,768 rows": {"max_factor_dim": 32768},
    "gradient factors": {"unsupported_layers": "gradient_factors"},
    "all three": {
        "precondition_norms": True,
        "max_factor_dim": 32768,
        "unsupported_layers": "gradient_factors",
    },
}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, and the sizes of a published model.

    Attributes:
        model: Name of the model's class.
        config: Name of the configuration's class.
        sizes: Arguments of the configuration. Its defaults are the published sizes of ResNet-50,
            ViT-B/16, BERT-base, GPT-2 and Mixtral-8x7B.
        small: Sizes of a copy that trains in a test.
    """

    model: str
    config: str
    sizes: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)

    def build(self, *, small: bool = False) -> nn.Module:
        """Make the model, or the small copy, on the current device."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import transformers  # noqa: PLC0415

        sizes = self.sizes | self.small if small else self.sizes
        config = getattr(transformers, self.config)(**sizes)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model


SMALL_TEXT = {"vocab_size": 128, "max_position_embeddings": 16}
SMALL_TRANSFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SMALL_LLAMA = SMALL_TEXT | SMALL_TRANSFORMER | {"num_key_value_heads": 2}
ARCHITECTURES = {
    "ResNet-50": Architecture(
        model="ResNetForImageClassification",
        config="ResNetConfig",
        sizes={"num_labels": 1000},
        small={
            "num_labels": 10,
            "embedding_size": 8,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
        },
    ),
    "ViT-B/16": Architecture(
        model="ViTForImageClassification",
        config="ViTConfig",
        sizes={"num_labels": 1000},
        small=SMALL_TRANSFORMER | {"num_labels": 10, "image_size": 16, "patch_size": 8},
    ),
    "BERT-base": Architecture(
        model="BertForMaskedLM",
        config="BertConfig",
        small=SMALL_TEXT | SMALL_TRANSFORMER,
    ),
    "GPT-2": Architecture(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        small={"vocab_size": 128, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "Llama-2-7B": Architecture(
        model="LlamaForCausalLM",
        config="LlamaConfig",
        sizes={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        small=SMALL_LLAMA,
    ),
    "Llama-3-8B": Architecture(
        model="LlamaForCausalLM",
        config="LlamaConfig",
        sizes={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        small=SMALL_LLAMA,
    ),
    "Mixtral-8x7B": Architecture(
        model="MixtralForCausalLM",
        config="MixtralConfig",
        small=SMALL_LLAMA | {"num_local_experts": 4},
    ),
}


@dataclass
class Layers:
    """Layers of one class that KAISA treats alike.

    Attributes:
        type: The class of the modules.
        status: "preconditioned" or "base".
        detail: The sizes of the factors, or why the base optimizer trains the layers.
        number: Number of layers.
        parameters: Number of parameters of all of them.
        factor_bytes: Bytes of their factors.
        inverse_bytes: Bytes of their inverses.
    """

    type: str
    status: str
    detail: str
    number: int = 0
    parameters: int = 0
    factor_bytes: int = 0
    inverse_bytes: int = 0


@dataclass
class Coverage:
    """What KAISA preconditions of one model with one setting.

    Attributes:
        model: Name of the model.
        base: Name of the base optimizer.
        setting: Name of the setting.
        options: The options that are not the default.
        layers: All layers of the model, and parameters that belong to none.
    """

    model: str
    base: str
    setting: str
    options: dict[str, Any]
    layers: list[Layers]

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(each.parameters for each in self.layers)

    @property
    def share(self) -> float:
        """Share of the parameters that are preconditioned."""
        preconditioned = [each for each in self.layers if each.status == "preconditioned"]
        return sum(each.parameters for each in preconditioned) / self.parameters

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of factors and inverses, divided by all parameters of the model."""
        return sum(each.factor_bytes + each.inverse_bytes for each in self.layers) / self.parameters


def factor_bytes(shape: FactorShape) -> int:
    """Bytes of the running averages of a layer."""
    sizes = [math.prod(shape.stored_shape(name)) for name in shape.factor_names]
    return FLOAT32_BYTES * sum(sizes)


def inverse_bytes(shape: FactorShape) -> int:
    """Bytes of the inverse of a layer, with the default solver."""
    sizes = [math.prod(size) for size in SOLVERS["inverse"].saved_shapes(shape).values()]
    return FLOAT32_BYTES * sum(sizes)


def cover(name: str, model: nn.Module, base: str, setting: str) -> Coverage:
    """Create KAISA for a model, and group the layers of its summary by class and treatment."""
    options = SETTINGS[setting]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecondOrderWarning)
        optimizer = KAISA(model, lr=0.1, base=BASES[base], **options)
    curvature: Any = optimizer._curvature
    shapes = {block.name: block.shape for block in curvature.layers.blocks}

    found: dict[tuple[str, str, str], Layers] = {}
    for row in optimizer.summary().rows:
        key = (row.kind, row.status, row.detail)
        layers = found.setdefault(key, Layers(*key))
        layers.number += 1
        layers.parameters += row.parameters
        if row.status == "preconditioned":
            layers.factor_bytes += factor_bytes(shapes[row.name])
            layers.inverse_bytes += inverse_bytes(shapes[row.name])
    optimizer.close()
    return Coverage(
        model=name,
        base=base,
        setting=setting,
        options=options,
        layers=list(found.values()),
    )


def build_fake(architecture: Architecture) -> nn.Module:
    """Make a model whose parameters are fake tensors."""
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    # Initialization reads values, which fake tensors do not have. transformers ties weights there.
    with FakeTensorMode(), no_init_weights():
        model: Any = architecture.build()
    model.tie_weights()
    return cast(nn.Module, model)


def measure(names: Sequence[str]) -> Iterator[Coverage]:
    """Cover each model with each base optimizer and each setting."""
    for name in names:
        model = build_fake(ARCHITECTURES[name])
        for base in BASES:
            for setting in SETTINGS:
                yield cover(name, model, base, setting)


def table(title: str, coverages: list[Coverage], cell: Callable[[Coverage], str]) -> Table:
    """A row for each model and base optimizer, with a column for each setting."""
    columns = ["model", "base", "parameters", *SETTINGS]
    rows: dict[tuple[str, str], list[str]] = {}
    for each in coverages:
        start = [each.model, each.base, f"{each.parameters:,}"]
        rows.setdefault((each.model, each.base), start).append(cell(each))
    return reporting.table(title, columns, rows.values(), left=2)


def main() -> None:
    """Cover all models, print the tables, and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    coverages = list(measure(arguments.models))

    reporting.show(
        table("share preconditioned, %", coverages, lambda each: f"{100 * each.share:.2f}"),
        table(
            "bytes of factors and inverses per parameter of the model",
            coverages,
            lambda each: f"{each.bytes_per_parameter:.1f}",
        ),
    )
    reporting.store(arguments.json, records=[asdict(each) for each in coverages])


if __name__ == "__main__":
    main()

"""Bytes of optimizer state per parameter: KAISA next to AdamW, Muon, SOAP and Shampoo.

    make memory
    make memory ARGS="--models language"          some models

Each optimizer takes one step, in a process of its own. The state of AdamW, Muon, SOAP and Shampoo
is that of the tensors in ``optimizer.state``. The state of KAISA is that of its base optimizer, and
the factors and inverses that ``summary()`` reports. Before some refreshes, KAISA also keeps the
last step of the weights, from which it measures the step scale. ``summary()`` does not report these
bytes, so they have their own column.

To check this, the benchmark also counts all tensors that a step makes and that remain after
``zero_grad``. That count also has lookup tables that the process keeps, such as masks of triangles.

On four ranks, other ranks are simulated by torch's fake process group, and the row is that of the
rank with the most bytes. The decompositions of SOAP and Shampoo are replaced by identity matrices,
because only their sizes count here.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

import language_model
import reporting
import shampoo
import soap
import tasks
from many_ranks import TensorMemory, simulated_world
from second_order import KAISA, SecondOrderWarning
from workloads import resnet50

RANKS = 4
CONTEXT = 16
WIDE = language_model.Size(2, 768, 12, CONTEXT, 1, 1, 1)
WIDE_VOCABULARY = 8_000

# ------------------------------------------------------------------------------------- the models


def language_loss(model: nn.Module, vocabulary: int) -> Tensor:
    """The loss of one window."""
    return language_model.next_loss(model, torch.randint(vocabulary, (1, CONTEXT + 1)))


def image_loss(model: nn.Module) -> Tensor:
    """The loss of two small images, whose size does not change the state."""
    return cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([0, 1]))


def wide_transformer() -> nn.Module:
    """Two blocks of width 768, with the vocabulary of a small tokenizer."""
    model = language_model.Transformer(WIDE)
    model.characters = nn.Embedding(WIDE_VOCABULARY, WIDE.width)
    model.head = nn.Linear(WIDE.width, WIDE_VOCABULARY)
    return model


@dataclass(frozen=True)
class Model:
    """A model, and the loss of it on random data."""

    make: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module], Tensor]


MODELS = {
    "language": Model(
        partial(language_model.Transformer, language_model.SIZES["small"]),
        partial(language_loss, vocabulary=language_model.VOCABULARY),
    ),
    "resnet50": Model(resnet50, image_loss),
    "transformer-768": Model(wide_transformer, partial(language_loss, vocabulary=WIDE_VOCABULARY)),
}

# --------------------------------------------------------------------------------- the optimizers


@dataclass(frozen=True)
class Optimizer:
    """An optimizer with its options, on one rank or several."""

    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def build(self, model: nn.Module) -> Any:
        """The optimizer of a model."""
        if self.make in (KAISA, tasks.muon):
            return self.make(model, lr=1e-3, **self.options)
        return self.make(model.parameters(), lr=1e-3, **self.options)


OVER_ADAMW: dict[str, Any] = {"base": AdamW}
OPTIMIZERS = {
    "SGD": Optimizer(SGD, {"momentum": 0.9}),
    "AdamW": Optimizer(AdamW),
    "Muon": Optimizer(tasks.muon),
    "SOAP": Optimizer(soap.SOAP),
    "Shampoo": Optimizer(shampoo.Shampoo),
    "KAISA over SGD": Optimizer(KAISA, {"momentum": 0.9}),
    "KAISA over AdamW": Optimizer(KAISA, OVER_ADAMW),
    "KAISA over AdamW, bfloat16 factors": Optimizer(
        KAISA, {**OVER_ADAMW, "factor_dtype": torch.bfloat16}
    ),
    "KAISA over AdamW, without the head": Optimizer(KAISA, {**OVER_ADAMW, "skip_layers": ["head"]}),
    f"KAISA over AdamW, {RANKS} ranks": Optimizer(
        KAISA, {**OVER_ADAMW, "grad_worker_fraction": 0.0, "factor_exchange": "reduce"}, RANKS
    ),
}

# ------------------------------------------------------------------------------------ measurement


@dataclass
class Row:
    """The state after one step, in bytes.

    Attributes:
        model: Its name in :data:`MODELS`.
        optimizer: Its name in :data:`OPTIMIZERS`.
        rank: The rank that is measured.
        parameters: Number of the model's parameters.
        elementwise: Tensors of the shape of a parameter, such as momentum.
        factors: SOAP's, Shampoo's and KAISA's factors.
        inverses: KAISA's inverses, Shampoo's roots, SOAP's eigenvectors.
        last_step: KAISA's copy of the last step, which it keeps before some refreshes.
        allocated: All tensors that the step made and that remain.
    """

    model: str
    optimizer: str
    rank: int
    parameters: int
    elementwise: int
    factors: int
    inverses: int
    last_step: int
    allocated: int

    @property
    def state(self) -> int:
        """All bytes of state, without the last step."""
        return self.elementwise + self.factors + self.inverses

    def per_parameter(self) -> float:
        """Bytes of state per parameter."""
        return self.state / self.parameters


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a nested state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from tensors_in(each)


def bytes_in(value: Any) -> int:
    """The bytes of all tensors of a nested state."""
    return sum(tensor.nbytes for tensor in tensors_in(value))


def sizes_of(optimizer: Any) -> dict[str, int]:
    """The bytes of an optimizer's state by part."""
    if isinstance(optimizer, KAISA):
        summary = optimizer.summary()
        curvature: Any = optimizer._curvature
        step_scale = curvature.step_scale
        last_step = 0
        if step_scale is not None:
            last_step = sum(bytes_in(step_scale.saved_step(p, fill=False)) for p in optimizer.state)
        return {
            "elementwise": sum(bytes_in(state["base"]) for state in optimizer.state.values()),
            "factors": summary.factor_bytes,
            "inverses": summary.inverse_bytes,
            "last_step": last_step,
        }

    parts = [optimizer]
    if isinstance(optimizer, tasks.OptimizerPair):
        parts = [optimizer.first, optimizer.second]
    states = [state for part in parts for state in part.state.values()]
    factors = sum(bytes_in(state.get("factors")) for state in states)
    inverses = sum(bytes_in(state.get(key)) for state in states for key in ("bases", "roots"))
    return {
        "elementwise": sum(map(bytes_in, states)) - factors - inverses,
        "factors": factors,
        "inverses": inverses,
        "last_step": 0,
    }


def identity(factor: Tensor, eps: float = 0.0) -> Tensor:
    """What stands for a decomposition of a factor."""
    del eps
    return torch.eye(len(factor), dtype=factor.dtype)


def measure(model_name: str, name: str, rank: int) -> Row:
    """Take one step on a rank, and measure what remains."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", SecondOrderWarning)
    chosen = OPTIMIZERS[name]
    model = MODELS[model_name].make()
    with ExitStack() as stack:
        stack.enter_context(patch.object(soap, "eigenvectors", identity))
        stack.enter_context(patch.object(shampoo, "inverse_root", identity))
        if chosen.ranks > 1:
            stack.enter_context(simulated_world(chosen.ranks, rank))
        optimizer = chosen.build(model)
        allocated = stack.enter_context(TensorMemory())
        MODELS[model_name].loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        return Row(
            model=model_name,
            optimizer=name,
            rank=rank,
            parameters=sum(p.numel() for p in model.parameters()),
            allocated=allocated.current,
            **sizes_of(optimizer),
        )


def measure_alone(model_name: str, name: str) -> Row:
    """The same in a process of its own for each rank; the rank with the most bytes counts."""
    rows = []
    for rank in range(OPTIMIZERS[name].ranks):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (model_name, name, rank)))
    return max(rows, key=lambda row: row.state)


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()

    rows = []
    for model in arguments.models:
        shown = []
        for name in arguments.optimizers:
            row = measure_alone(model, name)
            rows.append(row)
            parts = (row.elementwise, row.factors, row.inverses, row.last_step, row.allocated)
            cells = [f"{part / row.parameters:.1f}" for part in parts]
            shown.append([name, f"{row.per_parameter():.1f}", *cells])
        columns = ["optimizer", "state", "elementwise", "factors", "inverses", "last step"]
        title = f"{model}, {rows[-1].parameters:,} parameters: bytes per parameter"
        reporting.show(reporting.table(title, [*columns, "allocated"], shown))
    reporting.store(arguments.json, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()

"""One forward and backward pass of a model: the rows of its layers' batches, and what it costs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.model_blocks import BlockRules, find_blocks
from second_order.optimizers.config import KFACOptions
from second_order.planning.cost import Layer
from second_order.planning.machine import seconds_of

__all__ = ["Passes", "run_model"]


@dataclass(frozen=True)
class Passes:
    """What a forward and a backward pass of the model show.

    Attributes:
        layers: The layers with factors.
        flops: Floating point operations of both passes.
        seconds: Measured seconds of both passes. None: not measured.
        activation_bytes: Bytes that the forward pass saves for the backward pass.
        parameter_bytes: Bytes of all parameters.
        trained_bytes: Bytes of those that require a gradient.
    """

    layers: list[Layer]
    flops: int
    seconds: float | None
    activation_bytes: int
    parameter_bytes: int
    trained_bytes: int


def run_model(
    model: nn.Module,
    batch: Any,
    device: torch.device,
    skip_layers: Sequence[str],
    *,
    is_timed: bool,
) -> Passes:
    """Run a copy of the model forward and backward; the generators' states stay as they are."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return _run(model, _forward(batch), device, skip_layers, is_timed=is_timed)


def _run(
    model: nn.Module,
    forward: Callable[[nn.Module], Any],
    device: torch.device,
    skip_layers: Sequence[str],
    *,
    is_timed: bool,
) -> Passes:
    twin = copy.deepcopy(model).train()
    sizes = {id(p): p.numel() for p in twin.parameters() if p.requires_grad}
    rules = BlockRules(max_factor_dim=KFACOptions.max_factor_dim)
    blocks, _ = find_blocks(twin, sizes, skip_layers, {}, torch.float32, rules)

    # Count the rows of each layer's batch, the bytes that the graph keeps, and the operations.
    rows = Counter[KroneckerBlock]()
    handles = [
        module.register_forward_hook(_row_counter(block, rows))
        for block in blocks
        for module in block.modules
    ]
    saved: dict[int, int] = {}
    owned = {p.untyped_storage()._cdata for p in twin.parameters()}

    def note_saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor):
        try:
            output = forward(twin)
        except Exception as error:
            raise ValueError(
                f"the model does not take sample_batch: {type(error).__name__}: {error}; pass the "
                f"arguments of its forward, without targets that it does not take"
            ) from error
        _mean_square(output).backward()
    for handle in handles:
        handle.remove()

    seconds = None
    if is_timed:
        seconds = seconds_of(lambda: _mean_square(forward(twin)).backward(), device)

    most = max(rows.values(), default=1)  # for layers whose own forward is not called
    trained = [p for p in twin.parameters() if p.requires_grad]
    return Passes(
        layers=[Layer(block.shape, rows.get(block, most)) for block in blocks],
        flops=counter.get_total_flops(),
        seconds=seconds,
        activation_bytes=sum(saved.values()),
        parameter_bytes=sum(p.nbytes for p in twin.parameters()),
        trained_bytes=sum(p.nbytes for p in trained),
    )


def _forward(batch: Any) -> Callable[[nn.Module], Any]:
    """A function that runs a model on the batch."""
    if isinstance(batch, Tensor):
        return lambda model: model(batch)
    if isinstance(batch, Mapping):
        return lambda model: model(**batch)
    if isinstance(batch, list | tuple):
        return lambda model: model(*batch)
    raise TypeError(
        f"sample_batch is a {type(batch).__name__}; pass the model's arguments: a tensor, a tuple "
        f"or list of them, or a dictionary by name"
    )


def _row_counter(block: KroneckerBlock, rows: Counter[KroneckerBlock]) -> Callable[..., None]:
    """A forward hook that counts the rows of a layer's output: examples times positions."""

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        rows[block] += first.numel() // (block.shape.groups * block.shape.out_dim)

    return count


def _mean_square(output: Any) -> Tensor:
    """The mean square of a model's outputs, in place of a loss; its cost is next to nothing."""
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs:
        raise ValueError("no output of the model depends on a parameter that requires a gradient")
    return torch.stack([t.float().square().mean() for t in outputs]).sum()

"""The layers and parameters of a model, as counts of work and messages need them.

Layers are found as training finds them, by the same rules. A model on the meta device will do: no
parameter is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from second_order.distributed.assignment import LayerDims
from second_order.kfac.options import KFACOptions
from second_order.kfac.plan import dims_of
from second_order.kronecker.attention import is_attention
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.exact import ExactBlock
from second_order.kronecker.gradient import GradientBlock
from second_order.kronecker.layers import FactorShape, is_convolution
from second_order.kronecker.model_blocks import BlockRules, LeftToBase, find_blocks

__all__ = ["Layer", "Network", "Parameter", "base_state_bytes", "examples_of", "network_of"]


@dataclass(frozen=True)
class Parameter:
    """A parameter that trains.

    Attributes:
        elements: Number of elements.
        dtype: Dtype of the parameter and its gradient.
    """

    elements: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Layer:
    """A layer with curvature.

    Attributes:
        name: Its name.
        shape: Sizes of its factors.
        dims: What a plan is made from.
        params: Indices of its parameters in the network's.
        work_dtype: Dtype in which its preconditioned gradient travels.
        hooked: Whether statistics come from its passes; from its mean gradient otherwise.
        homogeneous: Whether A has the coordinate of a bias.
        rows: Rows of statistics that an example gives; None if none has been passed through.
    """

    name: str
    shape: FactorShape
    dims: LayerDims
    params: tuple[int, ...]
    work_dtype: torch.dtype
    hooked: bool = True
    homogeneous: bool = False
    rows: float | None = None


@dataclass(frozen=True)
class Network:
    """Layers with curvature, and every parameter that trains.

    Attributes:
        layers: The layers, in the order of the model's modules.
        params: The parameters, in the model's order.
        base_bytes: Bytes of the base's state.
        left: What is left to the base, and why.
    """

    layers: tuple[Layer, ...]
    params: tuple[Parameter, ...]
    base_bytes: int = 0
    left: tuple[LeftToBase, ...] = ()

    @property
    def gradient_elements(self) -> int:
        """N_g: elements of all gradients."""
        return sum(p.elements for p in self.params)

    @property
    def factor_elements(self) -> int:
        """N_f: elements of all factors as whole matrices, a diagonal's its diagonal."""
        shapes = [layer.shape for layer in self.layers]
        return sum(
            torch.Size(shape.stored_shape(letter, False)).numel()
            for shape in shapes
            for letter in shape.letters
        )


def network_of(
    model: nn.Module,
    options: KFACOptions,
    *,
    rules: BlockRules | None = None,
    conv_approximation: str | None = None,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    base: type[torch.optim.Optimizer] | None = None,
    base_kwargs: Mapping[str, Any] | None = None,
) -> Network:
    """Find the layers of a model, as training does.

    Args:
        model: The model; on the meta device, too.
        options: Options of the K-FAC step, which decide what a layer is.
        rules: The system's rules for which modules become blocks; None for those of ``options``.
        conv_approximation: Approximation for convolutions; None for that of other layers.
        example: Arguments of the model, a batch on the model's device: one forward pass finds
            the rows of statistics of each layer. None: no rows are known.
        base: Class of the base, for the bytes of its state; None for a base without.
        base_kwargs: Its arguments.

    Raises:
        ValueError: If an example has no tensor, whose first dimension would be the batch.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    blocks, left = find_blocks(
        model,
        {id(p): p.numel() for p in params},
        options.skip_layers,
        {},
        options.factor_dtype,
        options.symmetry_aware,
        options.block_rules if rules is None else rules,
    )
    index = {id(p): i for i, p in enumerate(params)}
    outputs = {} if example is None else _outputs(model, blocks, example)
    layers = []
    for block in blocks:
        approximation: str = options.kfac_approx
        if conv_approximation is not None and is_convolution(block.modules[0]):
            approximation = conv_approximation
        rows = None if example is None else _rows(block, outputs, approximation)
        layers.append(
            Layer(
                block.name,
                block.shape,
                dims_of(block),
                tuple(index[id(p)] for p in block.params),
                block.work_dtype,
                not isinstance(block, GradientBlock),
                block.trains_bias,
                rows,
            )
        )
    state = 0 if base is None else base_state_bytes(base, params, **(base_kwargs or {}))
    found = tuple(Parameter(p.numel(), p.dtype) for p in params)
    return Network(tuple(layers), found, state, tuple(left))


def base_state_bytes(
    base: type[torch.optim.Optimizer], params: Iterable[Tensor], **keywords: Any
) -> int:
    """Bytes of a base's state after a step, which is taken on the meta device.

    Args:
        base: The base's class.
        params: The parameters.
        **keywords: The base's arguments.
    """
    copies = [torch.empty_like(p, device="meta").requires_grad_() for p in params]
    for copy in copies:
        copy.grad = torch.empty_like(copy)
    optimizer = base(copies, **keywords)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def examples_of(example: Sequence[Any] | Mapping[str, Any]) -> int:
    """The number of examples in a model's arguments: the first dimension of their first tensor.

    Raises:
        ValueError: If there is no such tensor, or none with an example in it.
    """
    values = example.values() if isinstance(example, Mapping) else example
    batch: int | None = next((v.shape[0] for v in values if isinstance(v, Tensor) and v.dim()), 0)
    if not batch:
        raise ValueError(
            f"the example {example!r} has no tensor with a batch dimension; give the model's "
            f"arguments, a batch of at least one example"
        )
    return batch


_Outputs = Mapping[nn.Module, Sequence[tuple[torch.Size, int]]]
"""By module, the shape of each output, and the number of examples in the pass."""


def _outputs(
    model: nn.Module,
    blocks: Iterable[KroneckerBlock],
    example: Sequence[Any] | Mapping[str, Any],
) -> _Outputs:
    """The shapes of the outputs of the layers' modules in one forward pass."""
    batch = examples_of(example)
    found: defaultdict[nn.Module, list[tuple[torch.Size, int]]] = defaultdict(list)

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            found[module].append((first.shape, batch))

    layers = dict.fromkeys(m for block in blocks for m in block.watched)
    inside = {m.out_proj: m for m in model.modules() if is_attention(m)}
    called = {layer: inside.get(layer, layer) for layer in layers}
    hooks = [host.register_forward_hook(note) for host in dict.fromkeys(called.values())]
    try:
        with torch.no_grad():
            _ = model(**example) if isinstance(example, Mapping) else model(*example)
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: found[host] for layer, host in called.items()}


def _rows(block: KroneckerBlock, outputs: _Outputs, approximation: str) -> float:
    """Rows of statistics that an example gives to a layer, over all calls of its modules."""
    total = 0.0
    for module in block.watched:
        for shape, batch in outputs.get(module, ()):
            maps = is_convolution(module) or isinstance(
                module, nn.GroupNorm | nn.modules.batchnorm._BatchNorm
            )
            if approximation == "reduce" or (maps and isinstance(block, ExactBlock)):
                total += 1
            elif maps:
                total += shape[2:].numel()
            else:
                width = block.params[0].shape if isinstance(block, ExactBlock) else shape[-1:]
                total += shape.numel() / width.numel() / batch
    return total

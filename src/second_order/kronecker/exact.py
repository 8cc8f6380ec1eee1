"""Exact blocks of gains and biases (Ba et al. 2017, appendix C).

Let ĝ be the gradient of one example's loss with respect to the gain and the bias of a
norm layer, or to the bias of any layer. The exact block is E[ĝ ĝᵀ], a matrix over all
their entries. If there are many entries, only its diagonal is stored.

    gain_of(module)    the rule of a norm layer: which tensor its gain multiplies
    ExactBlock         computes ĝ of each example from a captured pair, and sums ĝ ĝᵀ

The block is stored as the G of a layer whose A is 1. The shape of G is ``(1, d, d)``,
or ``(d, 1, 1)`` for a diagonal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, group_norm, layer_norm, rms_norm

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    Approximation,
    FactorShape,
    PairOptions,
    PairRows,
    PairStatistics,
    gram,
    image_rows,
    pair_rows,
)

__all__ = ["GAINS", "ExactBlock", "Gain", "gain_of"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CHANNELS_SECOND = (*CONVOLUTIONS, *BATCH_NORMS, nn.GroupNorm)
"""Layers with channels in dimension 1. The rows of their pairs are whole examples."""


@dataclass(frozen=True)
class Gain:
    """The rule of a class whose output is ``gain * factor(x)``, or that plus a bias.

    Attributes:
        factor: Computes the tensor that the gain multiplies, from the module and its
            input.
        weight: Name of the gain, which has the shape of the output's last dimensions.
        bias: Name of the bias, in the shape of the gain. None: there is none.
        same_shape: Input and output have the same shape.
    """

    factor: Callable[[Any, Tensor], Tensor]
    weight: str = "weight"
    bias: str | None = "bias"
    same_shape: bool = True


def _layer_normalized(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return layer_norm(x, module.normalized_shape, eps=module.eps)


def _rms_normalized(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, list(module.normalized_shape), eps=module.eps)


def _group_normalized(module: nn.GroupNorm, x: Tensor) -> Tensor:
    return group_norm(x, module.num_groups, eps=module.eps)


def _batch_normalized(module: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if module.training or module.running_mean is None:
        return batch_norm(x, None, None, training=True, eps=module.eps)
    mean = module.running_mean.to(x)
    variance = cast(Tensor, module.running_var).to(x)
    return batch_norm(x, mean, variance, eps=module.eps)


def _assumed_normalized(module: nn.Module, x: Tensor) -> Tensor:
    """Normalize as a LayerNorm if the module has a bias, or else as an RMSNorm."""
    eps = 1e-6
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            eps = value
            break
    if module._parameters.get("bias") is None:
        return rms_norm(x, x.shape[-1:], eps=eps)
    return layer_norm(x, x.shape[-1:], eps=eps)


ASSUMED_NORM = Gain(_assumed_normalized)

GAINS: dict[type[nn.Module], Gain | None] = {
    nn.LayerNorm: Gain(_layer_normalized),
    nn.RMSNorm: Gain(_rms_normalized),
    nn.GroupNorm: Gain(_group_normalized),
    **dict.fromkeys(BATCH_NORMS, Gain(_batch_normalized)),
    # SyncBatchNorm divides by the variance over all processes, unknown to a single one.
    nn.SyncBatchNorm: None,
    **dict.fromkeys(INSTANCE_NORMS),
}
"""The rules by class, also of classes that users register. None: a norm without one."""


def gain_of(module: nn.Module) -> Gain | None:
    """Find the rule of a module's gain and bias; None if they have no exact block.

    An unknown class with "norm" in its name is assumed to normalize the last dimension.
    Its first statistics verify this.
    """
    cls = type(module)
    for base in cls.__mro__:
        if base in GAINS:
            return GAINS[base] if cls.forward is base.forward else None

    if isinstance(module, torch.jit.ScriptModule) or "norm" not in cls.__name__.lower():
        return None
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    if weight is None or weight.dim() != 1 or len(weight) < 2:
        return None
    if bias is not None and bias.shape != weight.shape:
        return None
    return ASSUMED_NORM


class ExactBlock(KroneckerBlock):
    """The exact curvature of a norm layer's gain and bias, or of any layer's bias.

    Args:
        name: Name of the module.
        module: The module.
        params: The parameters of the module that belong to the block, the gain first.
        max_dim: With more entries than this, only the diagonal is stored.
        factor_dtype: Dtype of the factors.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        max_dim: int,
        factor_dtype: torch.dtype,
    ) -> None:
        self.max_dim = max_dim
        self.gain = gain_of(module)
        # Keep the parameters' names, because FSDP2 replaces the objects during a pass.
        name_of = {p: name for name, p in module._parameters.items()}
        self._param_names = [name_of[p] for p in params]
        super().__init__([name], [module], None, factor_dtype, params=params)
        # The weight of the module has a block with the module's name.
        if self.gain is None:
            self.name += ".bias"

    @property
    def bias(self) -> None:
        """None, because all parameters of the block are in ``all_params``."""
        return

    @property
    def trainable(self) -> bool:
        """Whether any of the parameters requires a gradient now."""
        return any(self.training)

    def reset_if_changed(self) -> None:
        """Reset the statistics if other parameters train now, even of the same size."""
        if self._staged_for != self.training:
            self._reset(self.staged.dropped)
        super().reset_if_changed()

    def _reset(self, dropped: Tensor | int) -> None:
        self._staged_for = self.training
        super()._reset(dropped)

    def verified_parameter(self, module: nn.Module) -> str:
        """The name of the parameter whose gradient verifies the pairs."""
        return self._param_names[self.training.index(True)]

    def weight_gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        """A pair's part of the gradient of :meth:`verified_parameter`."""
        p = self.params[0]
        rows = self._example_gradients(module, x, d, "expand")
        return rows[:, : p.numel()].sum(0).view(p.shape)

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        """Whether the shapes of a pair agree. A registered gain accepts all shapes."""
        if self.gain is ASSUMED_NORM:
            # It normalizes the last dimension.
            weight = cast(Tensor, module.weight)
            if x.shape[-1:] != weight.shape:
                return False
        if self.gain is None or not self.gain.same_shape:
            return True
        return x.shape == d.shape

    def _shape_if(self, training: Sequence[bool]) -> FactorShape:
        included = training if any(training) else [True] * len(training)
        size = sum(itertools.compress((p.numel() for p in self.all_params), included))
        if size > self.max_dim:
            return FactorShape(
                groups=size, in_dim=1, out_dim=1, diagonal_a=True, exact=True
            )
        return FactorShape(
            groups=1, in_dim=1, out_dim=size, diagonal_a=True, exact=True
        )

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Sum ĝ ĝᵀ over the examples of a pair.

        Positions of a sequence are examples with "expand", and parts of one example
        with "reduce". Locations of a feature map are always parts of one example.
        """
        rows = self._example_gradients(module, x, d, options.approximation)
        num_examples: int | Tensor = 0
        if d.numel():  # each row is the gradient of equally many rows of d
            num_examples = options.row_mask.to_examples(len(rows)).count
        if self.shape.groups > 1:
            g = rows.square().sum(0).view(-1, 1, 1)
        else:
            g = gram(rows.unsqueeze(0))
        a = d.new_empty(self.shape.groups, 1).fill_(num_examples)
        return PairStatistics({"A": a, "G": g}, num_examples)

    def gradient_rows(self, module: nn.Module, x: Tensor, d: Tensor) -> PairRows:
        """The rows of a pair. If the layer has channels, a row is a whole example."""
        if isinstance(module, CHANNELS_SECOND):
            return image_rows(d, _is_batched(module, d))
        num_leading = max(d.dim() - self.all_params[0].dim(), 0)
        return pair_rows(d.shape[:num_leading], d)

    def _example_gradients(
        self, module: nn.Module, x: Tensor, d: Tensor, approximation: Approximation
    ) -> Tensor:
        """Compute ĝ, ``(examples, entries)``, for the parameters that train now."""
        gain = self.gain
        gradients: list[Tensor] = []
        for name, trains in zip(self._param_names, self.training, strict=True):
            if not trains:
                continue
            if gain is not None and name == gain.weight:
                gradients.append(d * gain.factor(module, x))
            else:
                gradients.append(d)

        # With channels, sum over all locations. flatten also accepts an empty batch,
        # for which reshape could not infer the number of locations.
        if isinstance(module, CHANNELS_SECOND):
            if not _is_batched(module, d):
                gradients = [g.unsqueeze(0) for g in gradients]
            return torch.cat([g.unsqueeze(-1).flatten(2).sum(2) for g in gradients], 1)

        # Otherwise the parameters have the shape of the last dimensions.
        dims = self.params[0].dim()
        matrices = [g.reshape(-1, *g.shape[-dims:]).flatten(1) for g in gradients]
        rows = torch.cat(matrices, 1)
        positions = math.prod(d.shape[1 : d.dim() - dims])
        if approximation == "expand" or positions == 1:
            return rows
        summed: Tensor = rows.unflatten(0, (-1, positions)).sum(1)
        return summed


def _is_batched(module: nn.Module, d: Tensor) -> bool:
    """Whether a convolution was called with a batch, and not with one example."""
    return d.dim() > len(getattr(module, "kernel_size", ())) + 1

"""Exact blocks of gains and biases (Ba et al. 2017, appendix C).

With ĝ the gradient of one example's loss with respect to the gain and
the bias of a normalisation, or to a bias alone, the block is E[ĝ ĝᵀ], a matrix of all their
entries; or its diagonal alone where they are many. It is kept as the G of a layer whose A is 1:
(1, d, d), or d groups of (1, 1).
"""

from __future__ import annotations

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
    flatten_rows,
    gram,
    image_rows,
)

__all__ = ["GAINS", "ExactBlock", "Gain", "gain_of"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CHANNELS_SECOND = (*CONVOLUTIONS, *BATCH_NORMS, nn.GroupNorm)
"""Layers with channels in dimension 1. Their rows are whole examples."""


@dataclass(frozen=True)
class Gain:
    """The rule of a class whose output is a gain times a factor, and perhaps a bias more."""

    factor: Callable[[Any, Tensor], Tensor]  # from the module and its input
    weight: str = "weight"  # name of the gain, which is along the last dimensions of the output
    bias: str | None = "bias"  # name of the bias, of the gain's shape; None if there is none
    same_shape: bool = True  # input and output have one shape


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
    """As by a LayerNorm if the module has a bias, by an RMSNorm if it has none."""
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    eps = next((value for value in found if isinstance(value, float)), 1e-6)
    plain = module._parameters.get("bias") is None
    return (rms_norm if plain else layer_norm)(x, x.shape[-1:], eps=eps)


ASSUMED_NORM = Gain(_assumed_normalized)

GAINS: dict[type[nn.Module], Gain | None] = {
    nn.LayerNorm: Gain(_layer_normalized),
    nn.RMSNorm: Gain(_rms_normalized),
    nn.GroupNorm: Gain(_group_normalized),
    **dict.fromkeys(BATCH_NORMS, Gain(_batch_normalized)),
    # The variance that SyncBatchNorm divides by is known to all processes together only.
    **dict.fromkeys((nn.SyncBatchNorm, *INSTANCE_NORMS)),
}
"""The rules by class, those of users among them; None for a norm without one."""


def gain_of(module: nn.Module) -> Gain | None:
    """The rule by which the gain and the bias of a module can have an exact block, if any.

    A class that is not known is taken for a norm over the last dimension if it is called one, until
    its first statistics, which show whether it is.
    """
    kind = type(module)
    known = next((each for each in kind.__mro__ if each in GAINS), None)
    if known is not None:
        return GAINS[known] if kind.forward is known.forward else None
    if isinstance(module, torch.jit.ScriptModule):
        return None
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    if weight is None:
        return None
    vectors = weight.dim() == 1 and (bias is None or bias.shape == weight.shape)
    named_so = "norm" in kind.__name__.lower()
    return ASSUMED_NORM if named_so and vectors and len(weight) > 1 else None


class ExactBlock(KroneckerBlock):
    """Gain and bias of a normalisation, or the bias of any layer, and their exact curvature.

    ``owned`` are the optimizer's parameters of the module that belong to the block, gain first;
    beyond ``most`` entries the diagonal alone is kept.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        owned: Sequence[nn.Parameter],
        most: int,
        factor_dtype: torch.dtype,
    ) -> None:
        self.most = most
        self.gain = gain_of(module)
        own = module._parameters.items()
        # By name: during a pass FSDP2 puts others in their place.
        self._letters = [next(name for name, other in own if other is p) for p in owned]
        super().__init__([name], [module], None, factor_dtype, owned=owned)
        if self.gain is None:  # next to a Kronecker block
            self.name += ".bias"

    @property
    def bias(self) -> None:
        """None: all parameters are the block's own."""
        return

    @property
    def trainable(self) -> bool:
        """Whether any of the parameters asks for a gradient now."""
        return any(self.training)

    def reset_if_changed(self) -> None:
        """Start again if other parameters train now, also if as many entries as before."""
        if self.trainable and self._staged_for != self.training:
            self._reset(self.staged.dropped)
        super().reset_if_changed()

    def _reset(self, dropped: Tensor | int) -> None:
        self._staged_for = self.training
        super()._reset(dropped)

    def verified_parameter(self, module: nn.Module) -> str:
        """The name, in a module, of the parameter whose gradient is compared."""
        return self._letters[self.training.index(True)]

    def weight_gradient(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        """A pair's part of the gradient of :meth:`verified_parameter`."""
        p = self.params[0]
        rows = self._example_gradients(module, x, d, "expand")
        return rows[:, : p.numel()].sum(0).view(p.shape)

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        """Whether a pair's sizes can be those of the layer; a registered gain takes all."""
        if self.gain is ASSUMED_NORM and x.shape[-1:] != cast(Tensor, module.weight).shape:
            return False
        return self.gain is None or not self.gain.same_shape or x.shape == d.shape

    def _current_shape(self) -> FactorShape:
        size = sum(p.numel() for p in self.params or self.owned)
        if size > self.most:
            return FactorShape(size, 1, 1, diagonal_a=True, exact=True)
        return FactorShape(1, 1, size, diagonal_a=True, exact=True)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Sums of ĝ ĝᵀ over the examples of a pair.

        Positions of a sequence are examples with "expand", parts of one with "reduce"; locations of
        a feature map always are parts of one.
        """
        rows = self._example_gradients(module, x, d, options.approximation)
        # As many parts of d make an example as there are rows.
        examples = options.row_mask.to_examples(len(rows)).count if d.numel() else 0
        if self.shape.groups > 1:
            g = rows.square().sum(0).view(-1, 1, 1)
        else:
            g = gram(rows.unsqueeze(0))
        a = d.new_empty(self.shape.groups, 1).fill_(examples)
        return PairStatistics({"A": a, "G": g}, examples)

    def gradient_rows(self, module: nn.Module, x: Tensor, d: Tensor) -> PairRows:
        """The rows of a pair: whole examples if there are channels."""
        if isinstance(module, CHANNELS_SECOND):
            return image_rows(d, _is_batched(module, d))
        return flatten_rows(d.shape[: max(d.dim() - self.owned[0].dim(), 0)], d)

    def _example_gradients(
        self, module: nn.Module, x: Tensor, d: Tensor, approximation: Approximation
    ) -> Tensor:
        """ĝ of each example, ``(examples, entries)``, for the parameters that train now."""
        rule = self.gain
        parts: list[Tensor] = []
        for letter, trains in zip(self._letters, self.training, strict=True):
            if trains and rule is not None and letter == rule.weight:
                parts.append(d * rule.factor(module, x))
            elif trains:
                parts.append(d)

        # Of maps of channels the second dimension is the bias's; of all else the last ones are.
        if isinstance(module, CHANNELS_SECOND):
            if not _is_batched(module, d):
                parts = [part.unsqueeze(0) for part in parts]
            # flatten also takes an empty batch, of which reshape cannot tell the locations.
            return torch.cat([part.unsqueeze(-1).flatten(2).sum(2) for part in parts], 1)
        dims = self.params[0].dim()
        positions = math.prod(d.shape[1 : d.dim() - dims])
        rows = torch.cat([part.reshape(-1, *part.shape[-dims:]).flatten(1) for part in parts], 1)
        if approximation == "expand" or positions == 1:
            return rows
        summed: Tensor = rows.unflatten(0, (-1, positions)).sum(1)
        return summed


def _is_batched(module: nn.Module, d: Tensor) -> bool:
    """Whether a convolution was called with a batch, and not with one example."""
    return d.dim() > len(getattr(module, "kernel_size", ())) + 1

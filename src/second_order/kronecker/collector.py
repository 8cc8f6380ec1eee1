"""From captured pairs to the staged statistics of blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.factors import Reduction
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    Approximation,
    Form,
    PairStatistics,
    live_rows,
)
from second_order.sharded import FSDPParams
from second_order.stages import span

__all__ = ["GradientScale", "StatisticsCollector"]


class GradientScale:
    """The factor for captured gradients that undoes a GradScaler and accumulation."""

    def __init__(self, accumulation_steps: int, scaler: Any) -> None:
        self._accumulation_steps, self._scaler = accumulation_steps, scaler

    def __call__(self, gradient: Tensor) -> Tensor | float:
        """The factor, as a number or as a scalar on the gradient's device."""
        if self._scaler is None or not self._scaler.is_enabled():
            return float(self._accumulation_steps)
        # scale(1) is the scale as a tensor: get_scale() would wait for the device.
        one = torch.ones((), dtype=torch.float32, device=gradient.device)
        scale: Tensor = self._scaler.scale(one)
        return self._accumulation_steps / scale


@dataclass
class StatisticsCollector:
    """Turns captured pairs into staged statistics."""

    approximation: Approximation
    factor_dtype: torch.dtype  # in which statistics are formed, or float32 if that is wider
    reduction: Callable[[], Reduction]  # what the loss of a pass is
    gradient_scale: Callable[[Tensor], Tensor | float]  # a further factor of captured gradients
    conv_approximation: Approximation | None = None  # for convolutions; None for the same
    warn: Callable[[str], None] = warnings.warn
    blocks: dict[nn.Module, list[KroneckerBlock]] = field(default_factory=dict)  # of each module
    counted: KroneckerBlock | None = None  # whose terms are counted, whether it gets pairs or not
    fsdp: FSDPParams | None = None
    heard: Callable[[KroneckerBlock], None] = lambda block: None  # of statistics that have grown
    sampled: bool = False  # the pairs are of drawn labels, and say nothing of the gradient
    # Of one input and pass; to be let go when the step's statistics are taken.
    last_a: tuple[tuple[int, int, bool], KroneckerBlock, PairStatistics] | None = None

    def watch(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Set the blocks that get the pairs of their modules from now on."""
        self.blocks.clear()
        for block in blocks:
            for module in block.watched:
                self.blocks.setdefault(module, []).append(block)

    def _training(self, module: nn.Module) -> list[KroneckerBlock]:
        return [block for block in self.blocks.get(module, ()) if block.trainable]

    def _counted(self, module: nn.Module) -> list[KroneckerBlock]:
        """The block whose terms are counted, if it is a module's and trains."""
        block = self.counted
        if block is None or not block.trainable or module not in block.watched:
            return []
        return [block]

    def wants(self, module: nn.Module) -> bool:
        """Whether any block of a module trains now."""
        return bool(self._training(module) or self._counted(module))

    def looks(self, module: nn.Module) -> bool:
        """Whether the pairs of a module are compared with its gradient now."""
        return any(block.looks for block in self._training(module))

    def look(self, module: nn.Module, x: Tensor, d: Tensor) -> None:
        """Compare a pair of the user's own loss with the gradient, if that is due."""
        for block in self._training(module):
            if block.looks and block.fits_pair(module, x, d):
                with span("capture"), ieee_matmul(d.device):
                    block.look(module, x, d, self.fsdp)

    def consume(
        self,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        pass_id: int,
        source: int = -1,
        again: bool = False,
    ) -> None:
        """Add one pair to the staged statistics of its blocks.

        Args:
            module: The layer that was called.
            x: The layer's input.
            d: The gradient with respect to the layer's output.
            pass_id: A number of the backward pass, the same for all its pairs.
            source: A number of the input, the same for layers called in a row on the same tensor;
                -1 if that is not known.
            again: Whether a backward pass has come through this call of the layer before.
        """
        training, reduction = self._training(module), self.reduction()
        counted = self._counted(module) if reduction == "step_mean" else []
        for block in {*training, *counted}:
            if not block.staged.knows(pass_id):
                block.follow_requires_grad()
                unreduced = self.fsdp is not None and self.fsdp.unreduced(module)
                if block.starts_anew(unreduced):
                    block.staged.clear()
        for block in counted:
            block.staged.count(live_rows(d.reshape(-1, d.shape[-1])).count, pass_id)
        if not self.sampled:
            self.look(module, x, d)
        for block in training:
            if not block.fits_pair(module, x, d):
                block.judge(1.0)
            elif not block.state.unexplained:
                with span("capture"), ieee_matmul(d.device):
                    pair = self._statistics(block, module, x, d, (source, pass_id))
                    scale = self.gradient_scale(d)
                    block.staged.add(pair, scale, pass_id, again=again, reduction=reduction)
                inputs = 1 if block.shape.diagonal_a else block.shape.in_dim
                block.staged.work += 6 * d.numel() * inputs
                block.state.work = block.staged.work
                block.state.heard = True
                self.heard(block)

    def _statistics(
        self, block: KroneckerBlock, module: nn.Module, x: Tensor, d: Tensor, key: tuple[int, int]
    ) -> PairStatistics:
        approximation = self.approximation
        if self.conv_approximation is not None and isinstance(module, CONVOLUTIONS):
            approximation = self.conv_approximation
        # Layers fed by one tensor have one A: the last one's may serve (Ba et al. 2017, app. C).
        plain = isinstance(module, nn.Linear) and type(block) is KroneckerBlock and key[0] >= 0
        plain = plain and not block.shape.marginal
        mine, last, known = (*key, block.trains_bias), self.last_a, None
        if plain and last is not None and last[0] == mine and last[1] is not block:
            known = last[2]
        wide = torch.promote_types(self.factor_dtype, torch.float32)
        form = Form(block.trains_bias, approximation, block.staged.triangular, known)
        x = x.to(wide) if x.is_floating_point() else x
        pair = block.statistics(module, x, d.to(wide), form)
        if known is not None and pair.factors["A"] is known.factors["A"]:
            return replace(pair, factors={**pair.factors, "A": pair.factors["A"].clone()})
        if plain:
            self.last_a = (mine, block, pair)
        return pair

"""One preconditioned layer: where its statistics, factors and inverse live."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from second_order.errors import SecondOrderWarning
from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.factors import (
    KroneckerFactors,
    StagedStatistics,
    mean_eigenvalue,
)
from second_order.kronecker.layers import (
    Approximation,
    FactorShape,
    factor_shape,
    gradient_from_matrix,
    gradient_to_matrix,
    pair_statistics,
    unsupported_reason,
)
from second_order.kronecker.solvers import Inverse
from second_order.kronecker.triangles import packed_length, unpack_upper_triangular

__all__ = [
    "GradientScale",
    "KroneckerBlock",
    "LeftToBase",
    "StatisticsCollector",
    "find_blocks",
    "unmatched_patterns",
]


class KroneckerBlock:
    """A weight, the bias that goes with it, and the curvature of the two.

    Attributes:
        names: Names of the modules that share the weight, one for most layers.
        modules: Those modules.
        weight: The shared weight.
        bias: The bias in the optimizer's care, or None.
        factors: Running averages; None before the first statistic or checkpoint.
        held: Whether A and G are kept on this process.
        staged: Statistics since the last step.
        inverse: Held by the layer's gradient workers once it is solved.
        solved: Whether its gradient workers, whichever they are, hold an inverse.
        silent: Whether the last refresh found that no statistic had ever arrived.
        asked: Whether statistics have been due since there was a block.
        failures: Refreshes in a row that gave no sound decomposition.
    """

    def __init__(
        self,
        names: Sequence[str],
        modules: Sequence[nn.Module],
        bias: nn.Parameter | None,
        factor_dtype: torch.dtype,
        triangular: bool,
    ) -> None:
        self.names = list(names)
        self.modules = list(modules)
        self.weight = cast(nn.Parameter, modules[0].weight)
        self.bias = bias
        self.factor_dtype = factor_dtype
        self._triangular = triangular
        self.held = (True, True)
        self.inverse: Inverse | None = None
        self.solved = False
        self.silent = False
        self.asked = False
        self.failures = 0
        self._reset()

    def _reset(self) -> None:
        self.shape: FactorShape = factor_shape(self.modules[0], self.trains_bias)
        before = self.__dict__.get("staged")
        self.staged = StagedStatistics(
            self.shape, self.weight.device, self.factor_dtype, self._triangular
        )
        if before is not None:
            self.staged.dropped += before.dropped.to(self.weight.device)
        self.factors: KroneckerFactors | None = None
        self.drop_inverse()

    @property
    def name(self) -> str:
        """The layer's name, for messages."""
        return " = ".join(name or "(model)" for name in self.names)

    @property
    def work_dtype(self) -> torch.dtype:
        """Gradients are clipped and exchanged in it: float32 at least."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def trainable(self) -> bool:
        """Whether the weight asks for a gradient now."""
        return self.weight.requires_grad

    @property
    def params(self) -> list[nn.Parameter]:
        """The weight, and the bias if it trains with it."""
        return (
            [self.weight, self.bias]
            if self.trains_bias and self.bias is not None
            else [self.weight]
        )

    @property
    def trains_bias(self) -> bool:
        """Whether A has the homogeneous coordinate now."""
        return self.bias is not None and self.bias.requires_grad

    def follow_requires_grad(self) -> None:
        """Start anew if the bias was frozen or unfrozen, or the layer moved: A has another size.

        A layer that is frozen as a whole keeps what it has until it thaws.
        """
        if not self.trainable:
            return
        moved = self.weight.device != self.staged.device
        if moved or factor_shape(self.modules[0], self.trains_bias) != self.shape:
            self._reset()

    def ensure_factors(self) -> KroneckerFactors:
        """The running averages, made on first use."""
        if self.factors is None:
            self.factors = self._blank_factors()
        return self.factors

    def _blank_factors(self) -> KroneckerFactors:
        return KroneckerFactors(
            self.shape, self.weight.device, self.factor_dtype, self._triangular, self.held
        )

    def keep(self, held: tuple[bool, bool]) -> None:
        """Keep A, or G, or both, or neither from now on; what is not kept is let go."""
        self.held = held
        if self.factors is not None:
            self.factors.a = self.factors.a if held[0] else None
            self.factors.g = self.factors.g if held[1] else None

    def stored(self, which: str) -> Tensor | None:
        """Factor "A" or "G" as it is stored; None if it is not kept here, or is lost."""
        if self.factors is None:
            return None
        return self.factors.a if which == "A" else self.factors.g

    def stored_shape(self, which: str) -> tuple[int, ...]:
        """Its shape, wherever it is kept."""
        shape = self.shape
        dim = shape.in_dim if which == "A" else shape.out_dim
        if which == "A" and shape.diagonal_a:
            return shape.groups, dim
        return (shape.groups, *((packed_length(dim),) if self._triangular else (dim, dim)))

    @property
    def lost(self) -> bool:
        """Whether a factor that is kept here is missing, though there have been statistics."""
        if self.factors is None:
            return False
        pairs = zip("AG", self.held, strict=True)
        return any(held and self.stored(which) is None for which, held in pairs)

    def saved_factors(self) -> dict[str, Tensor]:
        """The running averages as a checkpoint has them, shared; what is kept elsewhere is not."""
        factors = self._blank_factors() if self.factors is None else self.factors
        parts = {"average_weight": factors.weight, "mean_eigenvalues": factors.means}
        kept = {"A": factors.a, "G": factors.g}
        return parts | {name: factor for name, factor in kept.items() if factor is not None}

    def load_factors(self, saved: Mapping[str, Any]) -> None:
        """Take over saved averages, stored as triangles or not, whatever their dtype.

        A factor that is to be kept here and is not among them is lost, and found to be so at the
        next refresh.

        Raises:
            ValueError: If their sizes are not this layer's.
        """
        self.check_factors(saved)
        factors = self._blank_factors()
        factors.weight.copy_(torch.as_tensor(saved["average_weight"]))
        matrices = {k: self._as_matrix(k, saved[k]) for k in ("A", "G") if k in saved}
        if "mean_eigenvalues" in saved:
            factors.means.copy_(saved["mean_eigenvalues"])
        elif len(matrices) == 2:
            means = [mean_eigenvalue(m, m.shape[-1]) for m in matrices.values()]
            factors.means.copy_(torch.stack(means))
        for name, held in zip(("a", "g"), self.held, strict=True):
            matrix = matrices.get(name.upper())
            stored = factors.store(matrix) if held and matrix is not None else None
            if stored is not None:
                stored = stored.to(self.weight.device, copy=True)
            setattr(factors, name, stored)
        self.factors = factors

    def _as_matrix(self, which: str, stored: Tensor) -> Tensor:
        """A saved factor as ``(groups, n, n)``, or as the diagonal it is."""
        dim = self.shape.in_dim if which == "A" else self.shape.out_dim
        if stored.dim() == 3 or (which == "A" and self.shape.diagonal_a):
            return stored
        return unpack_upper_triangular(stored, dim)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether saved factors have this layer's sizes as it is now."""
        try:
            self.check_factors(saved)
        except ValueError:
            return False
        return True

    def check_factors(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError unless saved factors have this layer's sizes."""
        for letter, dim in (("A", self.shape.in_dim), ("G", self.shape.out_dim)):
            if letter not in saved:
                continue
            full = (self.shape.groups, dim, dim)
            triangle = (self.shape.groups, packed_length(dim))
            allowed: set[tuple[int, ...]] = {full, triangle}
            if letter == "A" and self.shape.diagonal_a:
                allowed = {(self.shape.groups, dim)}
            if tuple(saved[letter].shape) not in allowed:
                raise ValueError(
                    f"the checkpoint's factor {letter} of layer {self.name!r} has shape "
                    f"{tuple(saved[letter].shape)}, the model needs {full} or, as a triangle, "
                    f"{triangle}; load it into the model that it was saved from"
                )

    def forget(self) -> None:
        """Start the running averages anew: the layer runs on its base gradient until then."""
        self.factors = None
        self.asked = False
        self.drop_inverse()

    def drop_inverse(self) -> None:
        """Forget the inverse: the layer runs on its base gradient until it is solved again."""
        self.inverse = None
        self.solved = False

    def gradient(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient as a matrix ``(groups, out, in)``; None if the weight has none.

        It may be a view of the gradient: not to be changed in place.
        """
        if self.weight.grad is None:
            return None
        bias = None
        if self.trains_bias:
            assert self.bias is not None
            bias = torch.zeros_like(self.bias) if self.bias.grad is None else self.bias.grad
        return gradient_to_matrix(self.weight.grad, bias, self.shape, dtype)

    def write_gradient(self, matrix: Tensor, coefficient: Tensor | float) -> None:
        """Put a preconditioned matrix, times a coefficient, where the gradient was."""
        assert self.weight.grad is not None
        bias = self.bias.grad if self.trains_bias and self.bias is not None else None
        if bias is None and self.trains_bias:
            matrix = matrix[..., :-1]
        gradient_from_matrix(matrix, coefficient, self.weight.grad, bias, self.shape)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the running averages on this process."""
        return 0 if self.factors is None else self.factors.nbytes

    @property
    def inverse_bytes(self) -> int:
        """Bytes of the inverse on this process."""
        return 0 if self.inverse is None else self.inverse.nbytes


@dataclass(frozen=True)
class LeftToBase:
    """Parameters that the base optimizer trains alone, and why."""

    name: str
    kind: str
    reason: str
    parameters: int


class GradientScale:
    """What captured gradients are multiplied by, besides the number of the loss's terms."""

    def __init__(self, accumulation_steps: int, scaler: Any) -> None:
        self._accumulation_steps = accumulation_steps
        self._scaler = scaler

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
    """Turns captured pairs into staged statistics.

    Attributes:
        approximation: "expand" or "reduce".
        factor_dtype: Statistics are formed in this dtype, or float32 if that is wider.
        mean_reduction: Whether the captured gradients are of a mean over the loss's terms.
        gradient_scale: A further factor of the captured gradients, asked for at every pair.
    """

    approximation: Approximation
    factor_dtype: torch.dtype
    mean_reduction: bool
    gradient_scale: Callable[[Tensor], Tensor | float]
    blocks: dict[nn.Module, KroneckerBlock] = field(default_factory=dict)

    def lose(self, module: nn.Module, reason: str) -> None:
        """Count a pair that cannot be had, and name its layer once."""
        block = self.blocks.get(module)
        if block is None:
            return
        if not bool(block.staged.dropped):
            warnings.warn(
                f"a statistic of layer {block.name!r} is dropped: {reason}",
                SecondOrderWarning,
                stacklevel=2,
            )
        block.staged.dropped += 1

    def consume(self, module: nn.Module, x: Tensor, d: Tensor, pass_id: int) -> None:
        """Add one pair to its layer's staged statistics."""
        block = self.blocks.get(module)
        if block is None:
            return
        block.follow_requires_grad()
        with record_function("second_order.capture"), ieee_matmul(d.device):
            self._stage(block, module, x, d, pass_id)

    def _stage(
        self, block: KroneckerBlock, module: nn.Module, x: Tensor, d: Tensor, pass_id: int
    ) -> None:
        pair = pair_statistics(
            module,
            x,
            d,
            bias=block.trains_bias,
            approximation=self.approximation,
            dtype=self.factor_dtype,
            triangular=block.staged.triangular,
        )
        terms = pair.terms if self.mean_reduction else 1
        block.staged.add(pair, self.gradient_scale(d) * terms, pass_id)


def find_blocks(
    model: nn.Module,
    owned: Mapping[int, int],
    skip: Iterable[str],
    known: dict[int, KroneckerBlock],
    factor_dtype: torch.dtype,
    triangular: bool,
) -> tuple[list[KroneckerBlock], list[LeftToBase]]:
    """Sort the model's modules into blocks and what is left to the base.

    Args:
        model: The user's module, unwrapped.
        owned: Sizes of the parameters in the optimizer's groups by their ``id``.
        skip: Patterns (shell style) of module names or class names to leave to the base, with all
            that is inside them.
        known: Blocks of an earlier call by ``id`` of their weight, kept as they are.
        factor_dtype: For new blocks.
        triangular: For new blocks.

    Returns:
        The blocks in the order of the model's modules, and the rest.
    """
    patterns = list(skip)
    sharing: dict[int, list[tuple[str, nn.Module]]] = {}
    left: list[LeftToBase] = []
    counted: set[int] = set()

    def leave(name: str, module: nn.Module, reason: str) -> None:
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) in owned}
        count = sum(size for key, size in own.items() if key not in counted)
        counted.update(own)
        left.append(LeftToBase(name or "(model)", type(module).__name__, reason, count))

    for name, module in model.named_modules():
        if not any(id(p) in owned for p in module.parameters(recurse=False)):
            continue
        pattern = _skipping(patterns, model, name)
        reason = f"skip_layers: {pattern!r}" if pattern else unsupported_reason(module)
        weight = module._parameters.get("weight")
        if reason is None and (weight is None or id(weight) not in owned):
            reason = "its weight is not in the optimizer's groups"
        if reason is not None:
            leave(name, module, reason)
        if weight is not None and id(weight) in owned:
            sharing.setdefault(id(weight), []).append((name, module))

    rejected = {row.name for row in left}
    blocks: list[KroneckerBlock] = []
    for key, members in sharing.items():
        names = [name for name, _ in members]
        modules = [module for _, module in members]
        if any((name or "(model)") in rejected for name in names):
            if len(members) > 1:
                for name, module in members:
                    if (name or "(model)") not in rejected:
                        leave(name, module, "its weight is tied to a module left to the base")
            continue
        biases = [module._parameters.get("bias") for module in modules]
        shapes = {(type(m), cast(Tensor, m.weight).shape) for m in modules}
        if len({id(b) for b in biases}) > 1 or len(shapes) > 1:
            for name, module in members:
                leave(name, module, "tied weights with separate biases or types")
            continue
        bias = biases[0] if biases[0] is not None and id(biases[0]) in owned else None
        block = known.get(key)
        if block is None or block.modules != modules or block.bias is not bias:
            block = KroneckerBlock(names, modules, bias, factor_dtype, triangular)
        blocks.append(block)
    ours = {id(p) for block in blocks for p in (block.weight, block.bias) if p is not None}
    strays = sum(size for key, size in owned.items() if key not in counted | ours)
    if strays:
        left.append(LeftToBase("(no module)", "Parameter", "not in a module of the model", strays))
    return blocks, left


def unmatched_patterns(model: nn.Module, skip: Iterable[str]) -> list[str]:
    """The patterns that match no module at all."""
    modules = list(model.named_modules())
    return [p for p in skip if not any(_matches(p, name, module) for name, module in modules)]


def _skipping(patterns: Iterable[str], model: nn.Module, name: str) -> str | None:
    """The first pattern that matches a module or one that it is inside of."""
    parts = name.split(".") if name else []
    chain = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    lineage = [(each, model.get_submodule(each)) for each in chain]
    return next((p for p in patterns if any(_matches(p, *member) for member in lineage)), None)


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)

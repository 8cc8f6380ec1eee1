"""Division of a model's modules into blocks with curvature, and the base optimizer's rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.doubly_factored import DoublyFactoredBlock
from second_order.kronecker.exact import ExactBlock, is_normalisation
from second_order.kronecker.layers import factor_shape, is_convolution, unsupported_reason
from second_order.patterns import first_match
from second_order.sharded import plain_type

__all__ = ["BlockRules", "LeftToBase", "find_blocks"]


@dataclass(frozen=True)
class LeftToBase:
    """Parameters that the base optimizer trains alone, and why.

    Attributes:
        name: Name of the parameters' module.
        kind: Class of the module.
        reason: Why the module has no block.
        parameters: Number of scalar parameters.
        unexpected: Whether the module would have a block, but for its size or its state.
    """

    name: str
    kind: str
    reason: str
    parameters: int
    unexpected: bool = False

    def __str__(self) -> str:
        why = f": {self.reason}" if self.unexpected else ""
        return f"{self.name} ({self.kind}{why})"


@dataclass(frozen=True)
class BlockRules:
    """Rules for layers that are not plain Kronecker blocks.

    Attributes:
        max_factor_dim: Layers with a larger factor are left to the base; None for no bound.
        doubly_factored: (locations, channels) of the inputs of Linears, by their names; "auto" for
            those whose A would be too large, from the channels of the convolution before them.
        max_exact_dim: Normalisations and lone biases have exact blocks, up to so many entries, and
            diagonals above; None leaves them to the base.
    """

    max_factor_dim: int | None = None
    doubly_factored: Mapping[str, tuple[int, int]] | str = field(default_factory=dict)
    max_exact_dim: int | None = None

    def locations(self, name: str, module: nn.Module, channels: int | None) -> int:
        """Number T of locations of a Linear to be doubly factored; 0 for any other module.

        Args:
            name: Name of the module.
            module: The module.
            channels: Output channels of the last convolution before the module, or None.
        """
        if not isinstance(module, nn.Linear):
            return 0
        if isinstance(self.doubly_factored, str):
            bound, size = self.max_factor_dim, module.in_features
            wide = bound is not None and size + (module.bias is not None) > bound
            fits = wide and channels and size % channels == 0 and size > channels
            return size // channels if fits and channels else 0
        return self.doubly_factored.get(name, (0, 0))[0]

    def check(self, model: nn.Module) -> None:
        """Raise ValueError unless the doubly factored layers are Linears of those sizes."""
        if isinstance(self.doubly_factored, str):
            return
        modules = dict(model.named_modules())
        for name, (locations, channels) in self.doubly_factored.items():
            module = modules.get(name)
            if not isinstance(module, nn.Linear):
                kind = "not in the model" if module is None else f"a {type(module).__name__}"
                raise ValueError(f"doubly_factored: {name!r} is {kind}; name an nn.Linear")
            if locations < 1 or channels < 1 or locations * channels != module.in_features:
                raise ValueError(
                    f"doubly_factored: {name!r} has {module.in_features} inputs, not {locations} "
                    f"locations x {channels} channels; give (locations, channels) of its input"
                )


def find_blocks(
    model: nn.Module,
    owned: Mapping[int, int],
    skip: Iterable[str],
    known: Mapping[int, KroneckerBlock],
    factor_dtype: torch.dtype,
    triangular: bool,
    rules: BlockRules | None = None,
) -> tuple[list[KroneckerBlock], list[LeftToBase]]:
    """Sort the model's modules into blocks and what is left to the base.

    Args:
        model: The user's module, unwrapped.
        owned: Sizes of the parameters in the optimizer's groups by their ``id``.
        skip: Patterns (shell style) of module names or class names to leave to the base, with all
            that is inside them.
        known: Blocks of an earlier call by ``id`` of their weight, kept as they are.
        factor_dtype: Dtype of the factors of new blocks.
        triangular: Whether new blocks keep upper triangles.
        rules: Rules for layers that are not plain Kronecker blocks; None for none.

    Returns:
        The blocks in the order of the model's modules, and the parameters left to the base.

    Raises:
        ValueError: If the rules do not fit the model.
    """
    rules = BlockRules() if rules is None else rules
    rules.check(model)
    patterns, everything = list(skip), dict(model.named_modules(remove_duplicate=False))
    sharing: dict[int, list[tuple[str, nn.Module]]] = {}
    left: list[LeftToBase] = []
    unexpected: set[str] = set()  # reasons that make a row an unexpected one
    counted: set[int] = set()
    locations: dict[nn.Module, int] = {}
    exact: dict[int, ExactBlock] = {}  # by what they come after
    channels: int | None = None

    def leave(name: str, module: nn.Module, reason: str) -> None:
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) in owned}
        count = sum(size for key, size in own.items() if key not in counted)
        counted.update(own)
        kind, odd = plain_type(module).__name__, reason in unexpected
        left.append(LeftToBase(name or "(model)", kind, reason, count, odd))

    def add_exact(name: str, module: nn.Module, after: int, letters: Sequence[str]) -> bool:
        """Add an exact block of some of a module's parameters, if the rules ask for one."""
        named = [module._parameters.get(letter) for letter in letters]
        params = [p for p in named if p is not None and id(p) in owned and id(p) not in counted]
        if rules.max_exact_dim is None or not params:
            return False
        block = known.get(id(params[0]))
        if not isinstance(block, ExactBlock) or block.owned != params:
            block = ExactBlock(name, module, params, rules.max_exact_dim, factor_dtype, triangular)
        exact[after] = block
        counted.update(map(id, params))
        return True

    for name, module in model.named_modules():
        if is_convolution(module):
            channels = cast(Tensor, module.weight).shape[0]
        fed_by, channels = channels, None if isinstance(module, nn.Linear) else channels
        own = dict(module.named_parameters(recurse=False))
        if not any(id(p) in owned for p in own.values()):
            continue
        pattern, weight = first_match(patterns, everything, name), own.get("weight")
        barred = _barred(module, weight)
        unexpected |= {barred} if barred else set()
        barred = f"skip_layers: {pattern!r}" if pattern else barred
        reason = barred or unsupported_reason(module)
        if not barred and is_normalisation(module):
            key = id(weight)
            if key not in exact and add_exact(name, module, key, ("weight", "bias")):
                sharing.setdefault(key, [])
                continue
        if reason is None and (weight is None or id(weight) not in owned):
            if add_exact(name, module, id(module), ("bias",)):
                sharing.setdefault(id(module), [])
                continue
            reason = "its weight is not in the optimizer's groups"
        if reason is None:
            locations[module] = rules.locations(name, module, fed_by)
            reason = _too_large(module, locations[module], rules)
            unexpected |= {reason} if reason else set()
        if reason is not None:
            leave(name, module, reason)
        # What a compiled module does with its parameters is not known.
        keys = own.values() if isinstance(module, torch.jit.ScriptModule) else [weight]
        for p in keys:
            if p is not None and id(p) in owned:
                sharing.setdefault(id(p), []).append((name, module))

    rejected = {row.name for row in left}
    blocks: list[KroneckerBlock] = []
    for key, members in sharing.items():
        if not members:
            blocks.append(exact[key])
            continue
        if key in exact:  # an exact block would not see what the other module does with the gain
            tied, reason = exact[key], "its weight is tied to a module left to the base"
            count = sum(p.numel() for p in tied.owned)
            left.append(LeftToBase(tied.name, type(tied.modules[0]).__name__, reason, count))
            continue
        names = [name for name, _ in members]
        modules = [module for _, module in members]
        if any((name or "(model)") in rejected for name in names):
            if len(members) > 1:
                for name, module in members:
                    if (name or "(model)") not in rejected:
                        leave(name, module, "its weight is tied to a module left to the base")
            continue
        biases = [module._parameters.get("bias") for module in modules]
        shapes = {(plain_type(m), cast(Tensor, m.weight).shape) for m in modules}
        if len({id(b) for b in biases}) > 1 or len(shapes) > 1:
            for name, module in members:
                leave(name, module, "tied weights with separate biases or types")
            continue
        bias = biases[0] if biases[0] is not None and id(biases[0]) in owned else None
        frozen = bias is not None and bias.requires_grad and not modules[0].weight.requires_grad
        apart = locations[modules[0]] > 0 or frozen
        if apart and add_exact(names[0], modules[0], key, ("bias",)):
            blocks.append(exact[key])
            bias = None  # also once the weight thaws
        elif locations[modules[0]] and bias is not None:
            reason = "its weight is doubly factored, and there are no exact blocks"
            left.append(LeftToBase(f"{names[0]}.bias", "Linear", reason, bias.numel()))
            counted.add(id(bias))
        block = known.get(key)
        if locations[modules[0]]:
            if not isinstance(block, DoublyFactoredBlock) or block.modules != modules:
                count = locations[modules[0]]
                block = DoublyFactoredBlock(names, modules, count, factor_dtype, triangular)
        elif block is None or block.modules != modules or block.bias is not bias:
            block = KroneckerBlock(names, modules, bias, factor_dtype, triangular)
        blocks.append(block)
    ours = {id(p) for block in blocks for p in (block.weight, block.bias) if p is not None}
    strays = sum(size for key, size in owned.items() if key not in counted | ours)
    if strays:
        left.append(LeftToBase("(no module)", "Parameter", "not in a module of the model", strays))
    return blocks, left


def _too_large(module: nn.Module, locations: int, rules: BlockRules) -> str | None:
    """Why a layer's factors are too large to be kept; None if they are not."""
    if rules.max_factor_dim is None:
        return None
    shape = factor_shape(module, module._parameters.get("bias") is not None)
    sizes = [shape.out_dim]
    if locations:
        sizes += [locations, shape.in_dim // locations]
    elif not shape.diagonal_a:
        sizes.append(shape.in_dim)
    if max(sizes) <= rules.max_factor_dim:
        return None
    return f"a factor of {max(sizes)} rows exceeds max_factor_dim={rules.max_factor_dim}"


def _barred(module: nn.Module, weight: Tensor | None) -> str | None:
    """Why a module is left to the base, whatever its type; None if there is no reason."""
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit has compiled it and runs no hooks; train the plain module"
    if weight is not None and weight.numel() == 0:
        return f"its weight is empty: {tuple(weight.shape)}"
    return None

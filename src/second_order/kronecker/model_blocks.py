"""Division of a model's modules into blocks with curvature, and the base optimizer's rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from second_order.kronecker.attention import is_attention
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.doubly_factored import DoublyFactoredBlock
from second_order.kronecker.exact import ExactBlock, is_normalisation, names_of_gain
from second_order.kronecker.gradient import GradientBlock, is_matrix
from second_order.kronecker.kinds import found_kind, ties_of
from second_order.kronecker.layers import (
    KINDS,
    FactorShape,
    Key,
    LayerKind,
    factor_shape,
    is_convolution,
)
from second_order.patterns import first_match
from second_order.sharded import plain_type

__all__ = ["BlockRules", "LeftToBase", "find_blocks"]

LONE = "Parameter"  # in the place of a class, of what no layer has
MUCH = 0.1  # of the parameters: the share of matrices without a rule that "auto" does not leave


@dataclass(frozen=True)
class LeftToBase:
    """Parameters that the base optimizer trains alone, and why.

    Attributes:
        name: Name of the parameters' module; of a lone parameter its own.
        kind: Class of the module; "Parameter" for a lone one.
        reason: Why the module has no block.
        parameters: Number of scalar parameters.
        unexpected: Whether the module would have a block, but for its size or its state.
        norm: Whether the module is a norm layer.
    """

    name: str
    kind: str
    reason: str
    parameters: int
    unexpected: bool = False
    norm: bool = False

    def __str__(self) -> str:
        if self.kind == LONE:
            return self.name
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
        other_matrices: Whether matrices without a block, also those of layers that are too large,
            get factors from their "gradient"; "base" leaves them to the base; "auto": only where
            they are a tenth of the parameters or more.
    """

    max_factor_dim: int | None = None
    doubly_factored: Mapping[str, tuple[int, int]] | str = field(default_factory=dict)
    max_exact_dim: int | None = None
    other_matrices: str = "base"

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
    keys: dict[nn.Module, Key | None] = {}
    ties = ties_of(model)
    kinds_found = {module: found_kind(module) for module in model.modules()}
    layers_own = _owned_by_layers(kinds_found)
    barred_modules: set[nn.Module] = set()  # whose parameters are the base's, whatever the rules
    counted_in: dict[int, int] = {}  # by parameter, the row that counts it

    def leave(name: str, module: nn.Module, reason: str) -> None:
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) in owned}
        count = sum(size for key, size in own.items() if key not in counted)
        counted_in.update({key: len(left) for key in own if key not in counted})
        counted.update(own)
        kind, odd = plain_type(module).__name__, reason in unexpected
        norm = _is_norm(module)
        left.append(LeftToBase(name or "(model)", kind, reason, count, odd, norm))

    def leave_alone(name: str, module: nn.Module, reason: str) -> None:
        """Leave each parameter of a module to the base by its own name."""
        for letter, p in module.named_parameters(recurse=False):
            if id(p) in owned and id(p) not in counted:
                counted_in[id(p)] = len(left)
                counted.add(id(p))
                full = f"{name}.{letter}".lstrip(".")
                left.append(LeftToBase(full, LONE, reason, p.numel()))

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
            channels = cast(int, module.out_channels)
        fed_by, channels = channels, None if isinstance(module, nn.Linear) else channels
        own = dict(module.named_parameters(recurse=False))
        if not any(id(p) in owned for p in own.values()):
            continue
        pattern = first_match(patterns, everything, name)
        known_as: Key | None = None
        reason: str | None = None
        barred = _barred(module, own.get("weight"))
        unexpected |= {barred} if barred else set()
        barred = f"skip_layers: {pattern!r}" if pattern else barred
        if barred is None:
            known_as, reason = kinds_found[module]
            if known_as is None and all(id(p) in layers_own for p in own.values()):
                continue  # another name of a layer's bias, as BERT's head has it
        keys[module] = known_as = ties.get(module, known_as)
        kind = KINDS[nn.Linear if known_as is None else known_as]
        weight, reason = own.get(kind.weight), barred or reason
        if pattern or getattr(module, "sparse", False):
            barred_modules.add(module)
        if not barred and rules.max_exact_dim is not None and is_normalisation(module):
            letters = names_of_gain(module)
            after = id(own.get(letters[0]))
            if after not in exact and add_exact(name, module, after, letters):
                sharing.setdefault(after, [])
                continue
        if reason is None and (weight is None or id(weight) not in owned):
            if not is_attention(module) and add_exact(name, module, id(module), (kind.bias,)):
                sharing.setdefault(id(module), [])
                continue
            reason = "its weight is not in the optimizer's groups"
        if reason is None:
            locations[module] = rules.locations(name, module, fed_by)
            wider = kind.with_bias and own.get(kind.bias) is not None and not locations[module]
            shape = factor_shape(module, wider, known_as)
            shape = replace(shape, locations=locations[module])
            reason = _too_large(shape, rules)
            unexpected |= {reason} if reason else set()
        if reason is not None:
            unknown = not barred and known_as is None
            (leave_alone if unknown and _has_lone(module) else leave)(name, module, reason)
        # What a compiled module does with its parameters is not known.
        shared = own.values() if isinstance(module, torch.jit.ScriptModule) else [weight]
        for p in shared:
            if p is not None and id(p) in owned:
                sharing.setdefault(id(p), []).append((name, module))

    rejected = {row.name for row in left}
    blocks: list[KroneckerBlock] = []
    for key, members in sharing.items():
        if not members:
            blocks.append(exact[key])
            continue
        if key in exact:  # an exact block would not see what the other module does with the gain
            norm, reason = exact[key], "its weight is tied to a module left to the base"
            count = sum(p.numel() for p in norm.owned)
            left.append(LeftToBase(norm.name, type(norm.modules[0]).__name__, reason, count))
            continue
        names = [name for name, _ in members]
        modules = [module for _, module in members]
        if any((name or "(model)") in rejected for name in names):
            if len(members) > 1:
                for name, module in members:
                    if (name or "(model)") not in rejected:
                        leave(name, module, "its weight is tied to a module left to the base")
            continue
        kinds = [KINDS[k] for m in modules if (k := keys[m]) is not None]
        biases = [m._parameters.get(k.bias) for m, k in zip(modules, kinds, strict=True)]
        tied = all(module in ties for module in modules)
        shapes = {(plain_type(m), cast(Tensor, getattr(m, kinds[0].weight)).shape) for m in modules}
        if not tied and (len({id(b) for b in biases}) > 1 or len(shapes) > 1):
            for name, module in members:
                leave(name, module, "tied weights with separate biases or types")
            continue
        biases = [b if b is not None and id(b) in owned else None for b in biases]
        bias = None if tied else biases[0]
        frozen = bias is not None and bias.requires_grad and not _trains(modules[0], kinds[0])
        apart = "doubly factored" if locations[modules[0]] else ""
        if not kinds[0].with_bias:
            apart = "tied to an embedding" if tied else "multiplied at other positions"
        if apart or (frozen and not is_attention(modules[0])):
            count = len(members) if tied else 1
            for (name, module), each in list(zip(members, biases, strict=True))[:count]:
                letter = kinds[0].bias
                if each is None or id(each) in counted:
                    continue
                if add_exact(name, module, id(each), (letter,)):
                    blocks.append(exact[id(each)])
                    bias = None  # also once the weight thaws
                elif apart:
                    reason = f"its weight is {apart}, and there are no exact blocks"
                    lone, kind_name = f"{name}.{letter}", type(module).__name__
                    left.append(LeftToBase(lone, kind_name, reason, each.numel()))
                    counted.add(id(each))
            bias = None if apart else bias
        block = known.get(key)
        if locations[modules[0]]:
            if not isinstance(block, DoublyFactoredBlock) or block.modules != modules:
                count = locations[modules[0]]
                block = DoublyFactoredBlock(names, modules, count, factor_dtype, triangular)
        else:
            found = [keys[module] for module in modules]
            fits = block is not None and block.modules == modules and block.keys == found
            if block is None or not fits or block.bias is not bias:
                block = KroneckerBlock(names, modules, bias, factor_dtype, triangular, found)
        blocks.append(block)
    ours = {id(p) for block in blocks for p in (block.weight, block.bias) if p is not None}
    others: list[GradientBlock] = []
    if rules.other_matrices != "base":
        for name, module, p in _matrices(model, set(owned) - ours, barred_modules):
            made = known.get(id(p))
            if not isinstance(made, GradientBlock) or made.modules != [module]:
                most = rules.max_factor_dim
                made = GradientBlock(name, module, p, most, factor_dtype, triangular)
            if not _too_large(made.shape, rules):
                others.append(made)
    least = MUCH * sum(owned.values()) if rules.other_matrices == "auto" else 0.0
    if others and sum(block.weight.numel() for block in others) >= least:
        blocks += others
        ours |= {id(block.weight) for block in others}
        for key in ours & counted_in.keys():
            row = left[counted_in[key]]
            left[counted_in[key]] = replace(row, parameters=row.parameters - owned[key])
        left = [row for row in left if row.parameters]
    strays = sum(size for key, size in owned.items() if key not in counted | ours)
    if strays:
        left.append(LeftToBase("(no module)", LONE, "not in a module of the model", strays))
    return blocks, left


def _matrices(
    model: nn.Module, wanted: set[int], barred: Iterable[nn.Module]
) -> list[tuple[str, nn.Module, nn.Parameter]]:
    """The matrices that have no block, by name, but for those of which a barred module has one."""
    taken = {id(p) for module in barred for p in module.parameters(recurse=False)}
    found = []
    for name, module in model.named_modules():
        for letter, p in module.named_parameters(recurse=False):
            if id(p) in wanted - taken and is_matrix(p):
                taken.add(id(p))
                found.append((f"{name}.{letter}".lstrip("."), module, p))
    return found


def _owned_by_layers(found: Mapping[nn.Module, tuple[Key | None, str | None]]) -> set[int]:
    """The weights and biases of modules whose kind is known."""
    named = [(m, KINDS[key]) for m, (key, _) in found.items() if key is not None]
    tensors = (m._parameters.get(name) for m, kind in named for name in (kind.weight, kind.bias))
    return {id(p) for p in tensors if p is not None}


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer of any class, by its class's name and parameters."""
    named = any("norm" in kind.__name__.lower() for kind in type(module).__mro__)
    vectors = all(p.dim() < 2 for p in module.parameters(recurse=False))
    return named and vectors and next(module.children(), None) is None


def _has_lone(module: nn.Module) -> bool:
    """Whether a module of unknown kind has parameters of its own beside layers, as GPT has."""
    letters = [letter for letter, _ in module.named_parameters(recurse=False)]
    like_layers = any(letter.startswith(("weight", "bias")) for letter in letters)
    return not (like_layers or is_attention(module) or _is_norm(module))


def _trains(module: nn.Module, kind: LayerKind) -> bool:
    """Whether a module's weight asks for a gradient now."""
    return cast(Tensor, getattr(module, kind.weight)).requires_grad


def _too_large(shape: FactorShape, rules: BlockRules) -> str | None:
    """Why a layer's factors are too large to be kept; None if they are not."""
    if rules.max_factor_dim is None:
        return None
    largest = max(shape.dim(k) for k in shape.letters if not shape.is_diagonal(k))
    if largest <= rules.max_factor_dim:
        return None
    return f"a factor of {largest} rows exceeds max_factor_dim={rules.max_factor_dim}"


def _barred(module: nn.Module, weight: Tensor | None) -> str | None:
    """Why a module is left to the base, whatever its type; None if there is no reason."""
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit has compiled it and runs no hooks; train the plain module"
    if weight is not None and weight.numel() == 0:
        return f"its weight is empty: {tuple(weight.shape)}"
    return None

"""Division of a model's modules into blocks with curvature, and the base optimizer's rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.autograd import is_attention
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.exact import DoublyFactoredBlock, ExactBlock, gain_of
from second_order.kronecker.experts import EXPERTS, is_experts
from second_order.kronecker.gradient import GradientBlock, folded
from second_order.kronecker.kinds import found_kind, ties_of
from second_order.kronecker.layers import CONVOLUTIONS, KINDS, Approximation, FactorShape, Key
from second_order.kronecker.standardised import is_standardised
from second_order.patterns import first_match
from second_order.sharded import plain_type

__all__ = ["BlockRules", "LeftToBase", "find_blocks"]

LONE = "Parameter"  # in the place of a class, of what no layer has
MUCH = 0.1  # of the parameters: the share of matrices without a rule that "auto" does not leave
EXCLUDED = "precondition=False in its parameter group"
TIED = "its weight is tied to a module left to the base"
UNTOLD = (
    "kfac_approx='reduce' needs the sequence of each token, which experts are not told; 'expand' "
    "does not"
)


VECTORS_LEFT = "no factors are made of the gradients of its vectors"


@dataclass(frozen=True)
class LeftToBase:
    """Parameters that the base optimizer trains alone, and why."""

    name: str  # of the parameters' module; of a lone parameter its own
    kind: str  # class of the module; "Parameter" for a lone one
    reason: str
    parameters: int  # number of scalars
    unexpected: bool = False  # it would have a block, but for its size or its state
    norm: bool = False  # a norm layer
    in_part: bool = False  # the module's matrices have factors made of their gradients

    def __str__(self) -> str:
        kind = [] if self.kind == LONE else [self.kind]
        said = ": ".join(kind + [self.reason] * self.unexpected)
        name = f"vectors of {self.name}" if self.in_part else self.name
        return f"{name} ({said})" if said else name


@dataclass(frozen=True)
class BlockRules:
    """Rules for layers that are not plain Kronecker blocks."""

    # Layers with a larger factor are left to the base; None for no bound.
    max_factor_dim: int | None = None
    # (locations, channels) of the inputs of Linears, by their names; "auto" for those whose A would
    # be too large, from the channels of the convolution before them.
    doubly_factored: Mapping[str, tuple[int, int]] | str = field(default_factory=dict)
    # Normalisations and lone biases have exact blocks, up to so many entries, and diagonals above;
    # None leaves them to the base.
    max_exact_dim: int | None = None
    # Matrices without a block, also those of layers that are too large, get factors from their
    # "gradient"; "base": none do; "auto": where they are a tenth of the parameters or more.
    other_matrices: str = "base"
    approximation: Approximation = "expand"  # of dimensions that share the weight

    def locations(self, name: str, module: nn.Module, channels: int | None) -> int:
        """Number T of locations of a Linear to be doubly factored; 0 for any other module.

        ``channels`` are the output channels of the last convolution before it.
        """
        if not isinstance(module, nn.Linear):
            return 0
        if not isinstance(self.doubly_factored, str):
            return self.doubly_factored.get(name, (0, 0))[0]
        bound, size = self.max_factor_dim, module.in_features
        if bound is None or size + (module.bias is not None) <= bound or not channels:
            return 0
        return size // channels if size % channels == 0 and size > channels else 0

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

    def too_large(self, shape: FactorShape) -> str | None:
        """Why a layer's factors are too large to be kept; None if they are not."""
        largest = max(shape.dims[k] for k in shape.letters if k not in shape.diagonals)
        if self.max_factor_dim is None or largest <= self.max_factor_dim:
            return None
        return f"a factor of {largest} rows exceeds max_factor_dim={self.max_factor_dim}"


def find_blocks(
    model: nn.Module,
    owned: Mapping[int, int],
    skip: Iterable[str],
    known: Mapping[int, KroneckerBlock],
    factor_dtype: torch.dtype,
    triangular: bool,
    rules: BlockRules | None = None,
    excluded: Set[int] = frozenset(),
) -> tuple[list[KroneckerBlock], list[LeftToBase]]:
    """Sort a model's modules into blocks, in their order, and what is left to the base.

    Args:
        model: The user's module, unwrapped.
        owned: Sizes of the parameters in the optimizer's groups by their ``id``.
        skip: Patterns (shell style) of names of modules or classes to leave to the base, with all
            that is inside them.
        known: Blocks of an earlier call by ``id`` of their weight, kept as they are.
        factor_dtype: Dtype of the factors of new blocks.
        triangular: Whether new blocks keep upper triangles.
        rules: Rules for layers that are not plain Kronecker blocks; None for none.
        excluded: The ``id`` of parameters whose groups leave them to the base. A module with some
            of them and others is sorted as if there were none.

    Raises:
        ValueError: If the rules do not fit the model.
    """
    rules = BlockRules() if rules is None else rules
    rules.check(model)
    search = _Search(model, owned, known, (factor_dtype, triangular), rules)
    search.barred.update(excluded)
    patterns, everything = list(skip), dict(model.named_modules(remove_duplicate=False))
    channels: int | None = None
    for name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS):
            channels = module.out_channels
        fed_by, channels = channels, None if isinstance(module, nn.Linear) else channels
        own = {id(p) for p in module.parameters(recurse=False)} & owned.keys()
        if own:
            pattern = first_match(patterns, everything, name)
            skipped = EXCLUDED if own <= excluded else ""
            skipped = f"skip_layers: {pattern!r}" if pattern else skipped
            search.sort(name, module, skipped, fed_by)
    blocks = [block for key in search.sharing for block in search.blocks_of(key)]
    blocks += search.others(blocks)
    return blocks, search.left_by(blocks)


class _Search:
    """What is found of a model's modules, one after the other."""

    def __init__(
        self,
        model: nn.Module,
        owned: Mapping[int, int],
        known: Mapping[int, KroneckerBlock],
        stored: tuple[torch.dtype, bool],
        rules: BlockRules,
    ) -> None:
        self.model, self.owned, self.known = model, owned, known
        self.stored, self.rules = stored, rules
        # By weight, the modules that have it; nothing in the place of exact blocks.
        self.sharing: dict[int, list[tuple[str, nn.Module]]] = {}
        self.exact: dict[int, ExactBlock] = {}  # by what they come after
        self.experts: dict[int, KroneckerBlock] = {}  # by their weight
        self.in_exact: set[int] = set()
        self.rows: list[tuple[LeftToBase, list[int]]] = []  # and the parameters that each may have
        self.left: set[nn.Module] = set()
        self.barred: set[int] = set()  # parameters that are the base's, whatever the rules
        self.locations: dict[nn.Module, int] = {}
        found = {module: found_kind(module) for module in model.modules()}
        self.reasons = {module: reason for module, (_, reason) in found.items()}
        self.keys = {module: key for module, (key, _) in found.items()}
        self.ties = ties_of(self.keys)
        self.keys.update(self.ties)
        named = [(module, KINDS[key]) for module, key in self.keys.items() if key is not None]
        tensors = [m._parameters.get(n) for m, kind in named for n in (kind.weight, kind.bias)]
        self.layers_own = {id(p) for p in tensors if p is not None}

    def leave(self, name: str, module: nn.Module, reason: str, **more: Any) -> None:
        """Leave a module's parameters to the base, or some ``alone``, of another ``kind``."""
        alone, unexpected = more.get("alone"), more.get("unexpected", False)
        kind = more.get("kind", plain_type(module).__name__)
        norm = alone is None and _is_norm(module)
        row = LeftToBase(name.lstrip(".") or "(model)", kind, reason, 0, unexpected, norm)
        params = module.parameters(recurse=False) if alone is None else alone
        self.rows.append((row, list(map(id, params))))
        if alone is None:
            self.left.add(module)

    def add_exact(self, name: str, module: nn.Module, after: int, letters: Sequence[str]) -> bool:
        """Add an exact block of some of a module's parameters, if the rules ask for one."""
        named = [module._parameters.get(letter) for letter in letters]
        params = [p for p in named if p is not None and id(p) in self.owned.keys() - self.in_exact]
        if self.rules.max_exact_dim is None or not params:
            return False
        block = self.known.get(id(params[0]))
        if not isinstance(block, ExactBlock) or block.owned != params:
            block = ExactBlock(name, module, params, self.rules.max_exact_dim, *self.stored)
        self.exact[after] = block
        self.in_exact.update(map(id, params))
        return True

    def add_experts(self, name: str, module: nn.Module) -> None:
        """Add the blocks of fused experts, one for each of their weights."""
        own = module._parameters
        for letter in (each for each in EXPERTS if own.get(each) is not None):
            key, weight = EXPERTS[letter], cast(nn.Parameter, own[letter])
            full, kind, bias = f"{name}.{letter}".lstrip("."), KINDS[key], own.get(f"{letter}_bias")
            reason = self.rules.too_large(kind.shape(module, bias is not None))
            if self.rules.approximation == "reduce":
                reason = UNTOLD
            if id(weight) in self.barred:
                reason = EXCLUDED
            if reason is not None:
                alone = [p for p in (weight, bias) if p is not None]
                self.leave(full, module, reason, alone=alone, kind=LONE, unexpected=True)
            elif id(weight) in self.owned:
                block = self.known.get(id(weight))
                bias = bias if id(bias) in self.owned else None
                if block is None or block.keys != [key] or block.bias is not bias:
                    block = KroneckerBlock([full], [module], bias, *self.stored, [key])
                self.experts[id(weight)] = block
                self.sharing.setdefault(id(weight), [])

    def sort(self, name: str, module: nn.Module, skipped: str, fed_by: int | None) -> None:
        """Find out what a module is: a layer, the place of an exact block, or the base's.

        ``skipped`` is why the user leaves it to the base; "" if not.
        """
        own, rules = dict(module.named_parameters(recurse=False)), self.rules
        if is_experts(module) and not skipped:
            self.add_experts(name, module)
            return
        key, weight, bar = self.keys[module], own.get("weight"), ""
        if skipped:
            bar = skipped
        elif isinstance(module, torch.jit.ScriptModule):
            bar = "torch.jit has compiled it and runs no hooks; train the plain module"
        elif weight is not None and weight.numel() == 0:
            bar = f"its weight is empty: {tuple(weight.shape)}"
        elif key is None and all(id(p) in self.layers_own for p in own.values()):
            return  # another name of a layer's bias, as BERT's head has it
        reason, unexpected = bar or self.reasons[module], bool(bar and not skipped)
        kind, gain = KINDS[nn.Linear if key is None else key], gain_of(module)
        weight = own.get(kind.weight)
        if skipped or getattr(module, "sparse", False):
            self.barred.update(map(id, own.values()))
        if not bar and gain is not None:
            after = id(own.get(gain.weight))
            letters = [letter for letter in (gain.weight, gain.bias) if letter]
            if after not in self.exact and self.add_exact(name, module, after, letters):
                self.sharing.setdefault(after, [])
                return
        if reason is None and (weight is None or id(weight) not in self.owned):
            if not is_attention(module) and self.add_exact(name, module, id(module), (kind.bias,)):
                self.sharing.setdefault(id(module), [])
                return
            reason = "its weight is not in the optimizer's groups"
        if reason is None:
            locations = self.locations[module] = rules.locations(name, module, fed_by)
            wider = kind.with_bias and own.get(kind.bias) is not None and not locations
            reason = rules.too_large(replace(kind.shape(module, wider), locations=locations))
            unexpected = reason is not None
        if reason is not None and not bar and key is None and _has_lone(module):
            for letter, p in own.items():
                self.leave(f"{name}.{letter}", module, reason, alone=[p], kind=LONE)
            self.left.add(module)
        elif reason is not None:
            self.leave(name, module, reason, unexpected=unexpected)
        if weight is not None and id(weight) in self.owned:
            self.sharing.setdefault(id(weight), []).append((name, module))
        if is_standardised(module) and reason is None and own.get("gain") is not None:
            self.leave(f"{name}.gain", module, "a lone gain", alone=[own["gain"]], kind=LONE)

    def blocks_of(self, key: int) -> list[KroneckerBlock]:
        """The blocks in the place of a weight: its own, and those of biases that are apart."""
        members = self.sharing[key]
        if not members:
            return [self.experts[key] if key in self.experts else self.exact[key]]
        if key in self.exact:  # an exact block would not see what the other module does with it
            norm = self.exact[key]
            self.in_exact.difference_update(map(id, norm.owned))
            self.leave(norm.name, norm.modules[0], TIED, alone=norm.owned)
            return []
        names, modules = [name for name, _ in members], [module for _, module in members]
        keys, tied = [self.keys[m] for m in modules], all(m in self.ties for m in modules)
        reason = None if self.left.isdisjoint(modules) else TIED
        if reason is None:
            kinds = [KINDS[cast(Key, key)] for key in keys]
            first, own = modules[0], kinds[0]
            found = [m._parameters.get(k.bias) for m, k in zip(modules, kinds, strict=True)]
            shapes = {(plain_type(m), cast(Tensor, getattr(m, own.weight)).shape) for m in modules}
            if not tied and (len(set(map(id, found))) > 1 or len(shapes) > 1):
                reason = "tied weights with separate biases or types"
        if reason is not None:
            for name, module in members:
                if module not in self.left:
                    self.leave(name, module, reason)
            return []
        biases = [b if b is not None and id(b) in self.owned else None for b in found]
        bias, locations = None if tied else biases[0], self.locations[first]
        thawed = cast(Tensor, getattr(first, own.weight)).requires_grad
        frozen = bias is not None and bias.requires_grad and not thawed
        apart = "doubly factored" if locations else ""
        if not own.with_bias:
            apart = "standardised" if is_standardised(first) else "multiplied at other positions"
            apart = "tied to an embedding" if tied else apart
        blocks: list[KroneckerBlock] = []
        if apart or (frozen and not is_attention(first)):
            count = len(members) if tied else 1
            for (name, module), each in list(zip(members, biases, strict=True))[:count]:
                if each is None or id(each) in self.in_exact:
                    continue
                if self.add_exact(name, module, id(each), (own.bias,)):
                    blocks.append(self.exact[id(each)])
                    bias = None  # also once the weight thaws
                elif apart:
                    reason = f"its weight is {apart}, and there are no exact blocks"
                    self.leave(f"{name}.{own.bias}", module, reason, alone=[each])
            bias = None if apart else bias
        block = self.known.get(key)
        same = block is not None and block.modules == modules and block.bias is bias
        if locations and not (same and isinstance(block, DoublyFactoredBlock)):
            block = DoublyFactoredBlock(names, modules, locations, *self.stored)
        elif not locations and not (same and block is not None and block.keys == keys):
            block = KroneckerBlock(names, modules, bias, *self.stored, keys)
        return [*blocks, cast(KroneckerBlock, block)]

    def others(self, blocks: Sequence[KroneckerBlock]) -> list[KroneckerBlock]:
        """The blocks of matrices that no rule knows."""
        rules = self.rules
        found: list[KroneckerBlock] = []
        if rules.other_matrices == "base":
            return []
        taken = self.barred | self.taken_by(blocks)
        for name, module in self.model.named_modules():
            for letter, p in module.named_parameters(recurse=False):
                vector = p.dim() < 2 or p.numel() == 0 or min(folded(p.shape)) == 1
                if id(p) not in self.owned or id(p) in taken or vector:
                    continue
                taken.add(id(p))
                block = self.known.get(id(p))
                if not isinstance(block, GradientBlock) or block.modules != [module]:
                    full = f"{name}.{letter}".lstrip(".")
                    block = GradientBlock(full, module, p, rules.max_factor_dim, *self.stored)
                found += [] if rules.too_large(block.shape) else [block]
        least = MUCH * sum(self.owned.values()) if rules.other_matrices == "auto" else 0.0
        return found if sum(block.weight.numel() for block in found) >= least else []

    def taken_by(self, blocks: Sequence[KroneckerBlock]) -> set[int]:
        """The ids of the parameters in blocks."""
        return {id(p) for b in blocks for p in (b.weight, b.bias) if p is not None} | self.in_exact

    def left_by(self, blocks: Sequence[KroneckerBlock]) -> list[LeftToBase]:
        """What is left to the base, each parameter counted once."""
        theirs = {id(block.weight) for block in blocks if isinstance(block, GradientBlock)}
        counted, left = self.taken_by(blocks), []
        for row, params in self.rows:
            mine = [key for key in dict.fromkeys(params) if key in self.owned]
            size = sum(self.owned[key] for key in mine if key not in counted)
            counted.update(mine)
            if theirs.isdisjoint(mine):
                left.append(replace(row, parameters=size))
            elif size:
                left.append(replace(row, parameters=size, reason=VECTORS_LEFT, in_part=True))
        strays = sum(size for key, size in self.owned.items() if key not in counted)
        if strays:
            left.append(LeftToBase("(no module)", LONE, "not in a module of the model", strays))
        return left


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

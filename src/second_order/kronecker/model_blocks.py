"""Division of a model's modules into blocks with curvature, and the base optimizer's rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from second_order.kronecker.autograd import is_attention
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.doubly_factored import DoublyFactored
from second_order.kronecker.exact import ExactBlock, gain_of
from second_order.kronecker.experts import EXPERTS, is_experts
from second_order.kronecker.gradient import GradientBlock, matrix_shape
from second_order.kronecker.kinds import match, tied_kinds
from second_order.kronecker.layers import CONVOLUTIONS, Approximation, FactorShape, LayerKind
from second_order.utils.modules import first_match, plain_type

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
    # "gradient_factors": matrices without a block, and those of layers that are too large, get
    # factors from their gradients. "base_optimizer": they get none. "auto": "gradient_factors" if
    # they make up a tenth of the parameters or more.
    unsupported_layers: str = "base_optimizer"
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
        largest = max(shape.dims[k] for k in shape.factor_names if k not in shape.diagonals)
        if self.max_factor_dim is None or largest <= self.max_factor_dim:
            return None
        return f"a factor of {largest} rows exceeds max_factor_dim={self.max_factor_dim}"


def find_blocks(
    model: nn.Module,
    owned: Mapping[int, int],
    skip: Iterable[str],
    known: Mapping[int, KroneckerBlock],
    factor_dtype: torch.dtype,
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
        rules: Rules for layers that are not plain Kronecker blocks; None for none.
        excluded: The ``id`` of parameters whose groups leave them to the base. A module with some
            of them and others is sorted as if there were none.

    Raises:
        ValueError: If the rules do not fit the model.
    """
    rules = BlockRules() if rules is None else rules
    rules.check(model)
    search = _Search(model, owned, known, factor_dtype, rules, excluded)
    patterns = list(skip)
    everything = dict(model.named_modules(remove_duplicate=False))
    channels: int | None = None
    for name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS):
            channels = module.out_channels
        fed_by = channels
        if isinstance(module, nn.Linear):
            channels = None
        own = {id(p) for p in module.parameters(recurse=False)} & owned.keys()
        if not own:
            continue
        pattern = first_match(patterns, everything, name)
        if pattern:
            search.leave_out(name, module, f"skip_layers: {pattern!r}")
        elif own <= excluded:
            search.leave_out(name, module, EXCLUDED)
        else:
            search.sort(name, module, fed_by)
    blocks = search.blocks()
    blocks += search.others(blocks)
    return blocks, search.left_by(blocks)


class _Search:
    """What is found of a model's modules, one after the other."""

    def __init__(
        self,
        model: nn.Module,
        owned: Mapping[int, int],
        known: Mapping[int, KroneckerBlock],
        factor_dtype: torch.dtype,
        rules: BlockRules,
        excluded: Set[int],
    ) -> None:
        self._model, self._owned, self._known = model, owned, known
        self._factor_dtype, self._rules = factor_dtype, rules
        # By weight, in the order of the modules: a block, or the names of the modules that have it.
        self._places: dict[int, KroneckerBlock | dict[nn.Module, str]] = {}
        self._in_exact: set[int] = set()
        self._rows: list[tuple[LeftToBase, list[int]]] = []  # and the parameters each may have
        self._left: set[nn.Module] = set()
        self._barred = set(excluded)  # parameters that are the base's, whatever the rules
        self._matches = {module: match(module) for module in model.modules()}
        self._kinds: dict[nn.Module, LayerKind] = {}
        for module, found in self._matches.items():
            if found.kind is not None:
                self._kinds[module] = found.kind
        self._ties = tied_kinds(self._kinds)
        self._kinds.update(self._ties)
        self._layers_own: set[int] = set()
        for module, kind in self._kinds.items():
            params = (module._parameters.get(name) for name in (kind.weight, kind.bias))
            self._layers_own.update(id(p) for p in params if p is not None)

    # -------------------------------------------------------------------------- module by module

    def leave(self, name: str, module: nn.Module, reason: str, *, unexpected: bool = False) -> None:
        """Leave a module's parameters to the base."""
        kind, norm = plain_type(module).__name__, _is_norm(module)
        row = LeftToBase(name or "(model)", kind, reason, 0, unexpected, norm)
        self._rows.append((row, [id(p) for p in module.parameters(recurse=False)]))
        self._left.add(module)

    def leave_alone(
        self, name: str, params: Iterable[Tensor | None], reason: str, *, unexpected: bool = False
    ) -> None:
        """Leave some parameters of a module to the base."""
        row = LeftToBase(name.lstrip("."), LONE, reason, 0, unexpected)
        self._rows.append((row, [id(p) for p in params if p is not None]))

    def leave_out(self, name: str, module: nn.Module, reason: str) -> None:
        """Leave a module to the base, as the user asks for."""
        self._barred.update(id(p) for p in module.parameters(recurse=False))
        self.leave(name, module, reason)
        self._join(name, module)

    def _join(self, name: str, module: nn.Module) -> None:
        """Put a module in the place of its weight, if it is the optimizer's."""
        letter = self._kinds[module].weight if module in self._kinds else "weight"
        weight = dict(module.named_parameters(recurse=False)).get(letter)  # TorchScript's, too
        if weight is not None and id(weight) in self._owned:
            place = self._places.setdefault(id(weight), {})
            if isinstance(place, dict):
                place[module] = name

    def sort(self, name: str, module: nn.Module, fed_by: int | None) -> None:
        """Find out what a module is: a layer, the place of an exact block, or the base's."""
        own = dict(module.named_parameters(recurse=False))
        kind = self._kinds.get(module)
        gain = gain_of(module)
        if is_experts(module):
            self._add_experts(name, module)
            return
        if kind is None and all(id(p) in self._layers_own for p in own.values()):
            return  # another name of a layer's bias, as BERT's head has it
        if gain is not None and id(own.get(gain.weight)) not in self._in_exact:
            block = self._exact_block(name, module, [gain.weight, gain.bias or ""])
            if block is not None:
                self._places.setdefault(id(block.weight), block)
                return
        reason = self._matches[module].reason
        unexpected = isinstance(module, torch.jit.ScriptModule)
        if kind is not None:
            weight = own.get(kind.weight)
            if weight is None or id(weight) not in self._owned:
                reason = "its weight is not in the optimizer's groups"
            else:
                locations = self._rules.locations(name, module, fed_by)
                if locations:
                    kind = self._kinds[module] = DoublyFactored(locations=locations)
                wider = not kind.separate_bias_reason and own.get(kind.bias) is not None
                reason = self._rules.too_large(kind.shape(module, wider))
                unexpected = reason is not None
        if getattr(module, "sparse", False):
            self._barred.update(map(id, own.values()))
        if reason is not None and kind is None and _has_lone(module):
            for letter, p in own.items():
                self.leave_alone(f"{name}.{letter}", [p], reason)
            self._left.add(module)
        elif reason is not None:
            self.leave(name, module, reason, unexpected=unexpected)
        self._join(name, module)

    def _add_experts(self, name: str, module: nn.Module) -> None:
        """Add the blocks of fused experts, one for each of their weights."""
        own = module._parameters
        for letter, kind in EXPERTS.items():
            weight, bias = own.get(letter), own.get(f"{letter}_bias")
            if weight is None:
                continue
            full = f"{name}.{letter}".lstrip(".")
            reason = self._rules.too_large(kind.shape(module, bias is not None))
            if self._rules.approximation == "reduce":
                reason = UNTOLD
            if id(weight) in self._barred:
                reason = EXCLUDED
            if reason is not None:
                self.leave_alone(full, [weight, bias], reason, unexpected=True)
            elif id(weight) in self._owned:
                bias = bias if id(bias) in self._owned else None
                block = self._known.get(id(weight))
                if block is None or block.bias is not bias:
                    block = KroneckerBlock([full], [module], bias, self._factor_dtype, [kind])
                self._places[id(weight)] = block

    def _exact_block(
        self, name: str, module: nn.Module, letters: Sequence[str]
    ) -> ExactBlock | None:
        """An exact block of some of a module's parameters, if the rules ask for one."""
        named = [module._parameters.get(letter) for letter in letters]
        ours = self._owned.keys() - self._in_exact
        params = [p for p in named if p is not None and id(p) in ours]
        if self._rules.max_exact_dim is None or not params:
            return None
        block = self._known.get(id(params[0]))
        if not isinstance(block, ExactBlock) or block.owned != params:
            block = ExactBlock(name, module, params, self._rules.max_exact_dim, self._factor_dtype)
        self._in_exact.update(map(id, params))
        return block

    # -------------------------------------------------------------------------- weight by weight

    def blocks(self) -> list[KroneckerBlock]:
        """The blocks of all weights, and of biases that are apart."""
        found: list[KroneckerBlock] = []
        for key, place in self._places.items():
            if isinstance(place, KroneckerBlock):
                found.append(place)
            else:
                found += self._blocks_of(key, place)
        return found

    def _blocks_of(self, key: int, members: Mapping[nn.Module, str]) -> list[KroneckerBlock]:
        """The blocks of a weight and its bias."""
        modules = list(members)
        reason = None if self._left.isdisjoint(modules) else TIED
        if reason is None and not self._alike(modules):
            reason = "tied weights with separate biases or types"
        if reason is not None:
            for module, name in members.items():
                if module not in self._left:
                    self.leave(name, module, reason)
            return []
        kinds = [self._kinds[module] for module in modules]
        blocks: list[KroneckerBlock] = []
        bias: nn.Parameter | None = None
        for (module, name), kind in zip(members.items(), kinds, strict=True):
            own = module._parameters.get(kind.bias)
            if not kind.separate_bias_reason:
                bias = own if id(own) in self._owned else None
                continue
            # Their biases have blocks of their own.
            exact = self._exact_block(name, module, [kind.bias])
            if exact is not None:
                blocks.append(exact)
            elif id(own) in self._owned.keys() - self._in_exact:
                reason = f"its weight is {kind.separate_bias_reason}, and there are no exact blocks"
                self.leave_alone(f"{name}.{kind.bias}", [own], reason)
        block = self._known.get(key)
        if block is not None and (block.modules != modules or block.bias is not bias):
            block = None
        if block is None or [*block.kinds.values()] != kinds:
            block = KroneckerBlock([*members.values()], modules, bias, self._factor_dtype, kinds)
        return [*blocks, block]

    def _alike(self, modules: Sequence[nn.Module]) -> bool:
        """Whether modules that share a weight are of one class, and share their bias, too.

        Or if they are an embedding and an output layer.
        """
        if self._ties.keys() >= {*modules}:
            return True
        biases = {id(module._parameters.get(self._kinds[module].bias)) for module in modules}
        return len(biases) == len({plain_type(module) for module in modules}) == 1

    def others(self, blocks: Sequence[KroneckerBlock]) -> list[KroneckerBlock]:
        """The blocks of matrices that no rule knows."""
        rules = self._rules
        found: list[KroneckerBlock] = []
        if rules.unsupported_layers == "base_optimizer":
            return []
        taken = self._barred | self._taken_by(blocks)
        for name, module in self._model.named_modules():
            for letter, p in module.named_parameters(recurse=False):
                vector = p.dim() < 2 or p.numel() == 0 or min(matrix_shape(p.shape)) == 1
                if id(p) not in self._owned or id(p) in taken or vector:
                    continue
                taken.add(id(p))
                block = self._known.get(id(p))
                if not isinstance(block, GradientBlock) or block.modules != [module]:
                    full = f"{name}.{letter}".lstrip(".")
                    block = GradientBlock(full, module, p, rules.max_factor_dim, self._factor_dtype)
                if not rules.too_large(block.shape):
                    found.append(block)
        least = MUCH * sum(self._owned.values()) if rules.unsupported_layers == "auto" else 0.0
        return found if sum(block.weight.numel() for block in found) >= least else []

    def _taken_by(self, blocks: Sequence[KroneckerBlock]) -> set[int]:
        """The ids of the parameters in blocks."""
        params = [p for block in blocks for p in (block.weight, block.bias) if p is not None]
        return {id(p) for p in params} | self._in_exact

    def left_by(self, blocks: Sequence[KroneckerBlock]) -> list[LeftToBase]:
        """What is left to the base, each parameter counted once."""
        by_gradient = {id(block.weight) for block in blocks if isinstance(block, GradientBlock)}
        counted = self._taken_by(blocks)
        left: list[LeftToBase] = []
        for row, params in self._rows:
            mine = [key for key in dict.fromkeys(params) if key in self._owned]
            size = sum(self._owned[key] for key in mine if key not in counted)
            counted.update(mine)
            if by_gradient.isdisjoint(mine):
                left.append(replace(row, parameters=size))
            elif size:
                left.append(replace(row, parameters=size, reason=VECTORS_LEFT, in_part=True))
        strays = sum(size for key, size in self._owned.items() if key not in counted)
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

"""Divide a model into blocks with curvature, and parameters left to the base optimizer.

    BlockRules     the options that decide which modules become blocks
    find_blocks    visits and classifies the modules, then makes one block per weight
    LeftToBase     parameters without a block, and why, for the summary and the warnings

A module can be a layer with a kind (:mod:`second_order.kronecker.kinds`), fused
experts, or a norm layer with an exact block. Modules that share a weight share a block,
but only if all of them can have it. If ``unsupported_layers`` allows it, the remaining
matrices get gradient-factored blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from second_order.kronecker.autograd import is_attention
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.doubly_factored import DoublyFactored
from second_order.kronecker.exact import ExactBlock, Gain, gain_of
from second_order.kronecker.experts import EXPERTS, is_experts
from second_order.kronecker.gradient import GradientBlock, matrix_shape
from second_order.kronecker.kinds import match, tied_kinds
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    Approximation,
    FactorShape,
    LayerKind,
)
from second_order.utils.modules import modules_inside, plain_type

__all__ = ["PARAMETER", "BlockRules", "LeftToBase", "find_blocks"]

PARAMETER = "Parameter"
"""Stands for the class of a module, for a parameter that belongs to no layer."""

AUTO_SHARE = 0.1
"""unsupported_layers="auto" makes gradient-factored blocks if they have this share of
all parameters."""

# Reasons in `LeftToBase`.
EXCLUDED = "precondition=False in its parameter group"
TIED = "its weight is tied to a module left to the base"
TIED_DIFFERENTLY = "tied weights with separate biases or types"
NOT_OWNED = "its weight is not in the optimizer's groups"
REDUCED_EXPERTS = (
    "kfac_approx='reduce' needs the sequence of each token, which experts do not receive; use "
    "kfac_approx='expand'"
)
OUTSIDE_MODEL = "not in a module of the model"
VECTORS_LEFT = "no factors are made of the gradients of its vectors"


@dataclass(frozen=True)
class LeftToBase:
    """Parameters that the base optimizer trains alone, and why.

    Attributes:
        name: Name of the module, or of a single parameter.
        kind: Class of the module. "Parameter" for a single parameter.
        reason: Why it has no block.
        parameters: Number of scalars.
        unexpected: It would have a block, but for its size or its state.
        norm: It is a norm layer.
        in_part: Only its vectors are left. Its matrices have gradient-factored blocks.
        exact_if_allowed: It would have an exact block, but ``max_exact_dim`` is None.
        by_option: The user left it out, by ``skip_layers`` or ``precondition=False``.
    """

    name: str
    kind: str
    reason: str
    parameters: int
    unexpected: bool = False
    norm: bool = False
    in_part: bool = False
    exact_if_allowed: bool = False
    by_option: bool = False

    def __str__(self) -> str:
        details = []
        if self.kind != PARAMETER:
            details.append(self.kind)
        if self.unexpected:
            details.append(self.reason)
        name = f"vectors of {self.name}" if self.in_part else self.name
        if not details:
            return name
        return f"{name} ({': '.join(details)})"


@dataclass(frozen=True)
class BlockRules:
    """Options that decide which modules become blocks.

    Attributes:
        max_factor_dim: Layers with larger factors are left to the base. None: no limit.
        doubly_factored: (locations, channels) of the inputs of Linears, by name.
            "auto": double factoring for each Linear whose A would be too large, with
            the channels of the convolution before it.
        max_exact_dim: Norm layers and separate biases have exact blocks with up to this
            many entries, and diagonals beyond it. None: they are left to the base.
        unsupported_layers: Whether matrices without a block, including those of layers
            that are too large, get gradient-factored blocks: "gradient_factors",
            "base_optimizer", or "auto", which decides by their share of the parameters.
        approximation: How to treat dimensions that share the weight.
    """

    max_factor_dim: int | None = None
    doubly_factored: Mapping[str, tuple[int, int]] | str = field(default_factory=dict)
    max_exact_dim: int | None = None
    unsupported_layers: str = "base_optimizer"
    approximation: Approximation = "expand"

    def locations(self, name: str, module: nn.Module, channels: int | None) -> int:
        """Number of locations of a doubly factored Linear; 0 for any other module.

        ``channels``: the output channels of the last convolution before the module.
        """
        if not isinstance(module, nn.Linear):
            return 0
        if not isinstance(self.doubly_factored, str):
            locations, _ = self.doubly_factored.get(name, (0, 0))
            return locations

        # "auto": only if A would be too large, and the input has whole feature maps.
        in_features = module.in_features
        a_dim = in_features + (module.bias is not None)
        if self.max_factor_dim is None or a_dim <= self.max_factor_dim or not channels:
            return 0
        if in_features % channels != 0 or in_features <= channels:
            return 0
        return in_features // channels

    def check(self, model: nn.Module) -> None:
        """Check that the doubly factored layers are Linears of the given sizes.

        Raises:
            ValueError: If a layer is not.
        """
        if isinstance(self.doubly_factored, str):
            return
        modules = dict(model.named_modules())
        for name, (locations, channels) in self.doubly_factored.items():
            module = modules.get(name)
            if not isinstance(module, nn.Linear):
                kind = "not in the model"
                if module is not None:
                    kind = f"a {type(module).__name__}"
                raise ValueError(
                    f"doubly_factored: {name!r} is {kind}; name an nn.Linear"
                )
            fits = locations * channels == module.in_features
            if locations < 1 or channels < 1 or not fits:
                raise ValueError(
                    f"doubly_factored: {name!r} has {module.in_features} inputs, not {locations} "
                    f"locations x {channels} channels; give (locations, channels) of its input"
                )

    def too_large(self, shape: FactorShape) -> str | None:
        """Why the factors of a layer are too large; None if they are not."""
        dims = shape.dims
        largest = max(dims[name] for name in dims if name not in shape.diagonals)
        if self.max_factor_dim is None or largest <= self.max_factor_dim:
            return None
        limit = f"max_factor_dim={self.max_factor_dim}"
        return f"a factor of {largest} rows exceeds {limit}"


def find_blocks(
    model: nn.Module,
    owned: Mapping[int, int],
    skip: Iterable[str],
    known: Mapping[int, KroneckerBlock],
    factor_dtype: torch.dtype,
    rules: BlockRules | None = None,
    excluded: Set[int] = frozenset(),
) -> tuple[list[KroneckerBlock], list[LeftToBase]]:
    """Find a model's blocks, in the order of the modules, and what has no block.

    Args:
        model: The user's module, unwrapped.
        owned: Sizes of the parameters in the optimizer's groups, by ``id``.
        skip: Shell-style patterns of names or classes of modules to leave to the base,
            with all modules inside them.
        known: Blocks of an earlier call by ``id`` of their weight, reused if they fit.
        factor_dtype: Dtype of the factors of new blocks.
        rules: Options that decide which modules become blocks. None: the defaults.
        excluded: The ``id`` of parameters in groups with ``precondition=False``. They
            exclude a module if all its parameters are among them, and a weight of fused
            experts or a gradient-factored matrix on its own.

    Raises:
        ValueError: If the rules do not fit the model.
    """
    if rules is None:
        rules = BlockRules()
    rules.check(model)
    search = _BlockSearch(
        model=model,
        owned=owned,
        known=known,
        factor_dtype=factor_dtype,
        rules=rules,
        excluded=excluded,
    )
    skip_patterns = modules_inside(model, skip)

    # Go through the modules, and note the channels of a Linear's flattened input.
    channels: int | None = None  # of the last convolution, if no Linear came after it
    for name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS):
            channels = module.out_channels
        input_channels = channels
        if isinstance(module, nn.Linear):
            channels = None

        # Leave out the modules that the options exclude.
        params = {id(p) for p in module.parameters(recurse=False)} & owned.keys()
        if not params:
            continue
        if module in skip_patterns:
            reason = f"skip_layers: {skip_patterns[module]!r}"
            search.exclude(name, module, reason)
        elif params <= excluded:
            search.exclude(name, module, EXCLUDED)
        else:
            search.add(name, module, input_channels)

    # Parameters without a layer of a known class may get factors of their gradients.
    blocks = search.make_blocks()
    blocks += search.make_gradient_blocks(blocks)
    return blocks, search.rows_without_block(blocks)


class _Row(NamedTuple):
    """A row for the summary, and the ids of the parameters that it may count."""

    row: LeftToBase
    params: list[int]


class _BlockSearch:
    """Classifies the modules of a model one by one, then makes their blocks."""

    def __init__(
        self,
        model: nn.Module,
        owned: Mapping[int, int],
        known: Mapping[int, KroneckerBlock],
        factor_dtype: torch.dtype,
        rules: BlockRules,
        excluded: Set[int],
    ) -> None:
        self._model = model
        self._owned = owned
        self._known = known
        self._factor_dtype = factor_dtype
        self._rules = rules

        # By id of a weight, in the order of the modules: its block, or the modules that
        # share it.
        self._by_weight: dict[int, KroneckerBlock | dict[nn.Module, str]] = {}
        self._in_exact: set[int] = set()  # ids of the parameters in exact blocks
        self._excluded = set(excluded)  # ids of the parameters that get no block
        self._rows: list[_Row] = []
        self._skipped: set[nn.Module] = set()

        # The kinds of all modules. Those of tied weights replace those of the classes.
        self._matches = {module: match(module) for module in model.modules()}
        self._kinds: dict[nn.Module, LayerKind] = {}
        for module, matched in self._matches.items():
            if matched.kind is not None:
                self._kinds[module] = matched.kind
        self._tied_kinds = tied_kinds(self._kinds)
        self._kinds.update(self._tied_kinds)

        self._layer_params: set[int] = set()
        for module, kind in self._kinds.items():
            for name in (kind.weight, kind.bias):
                p = module._parameters.get(name)
                if p is not None:
                    self._layer_params.add(id(p))

    # ----------------------------------------------------------------------- one module

    def exclude(self, name: str, module: nn.Module, reason: str) -> None:
        """Leave a module to the base, as an option says."""
        self._excluded.update(id(p) for p in module.parameters(recurse=False))
        self._skip(name, module, reason, by_option=True)
        self._add_use_of_weight(name, module)

    def add(self, name: str, module: nn.Module, input_channels: int | None) -> None:
        """Classify a module: experts, norm, layer with a kind, or left to the base."""
        if is_experts(module):
            self._add_experts(name, module)
            return
        params = dict(module.named_parameters(recurse=False))
        kind = self._kinds.get(module)
        if kind is None and all(id(p) in self._layer_params for p in params.values()):
            return  # it shares the parameters of layers, as BERT's head shares a bias

        # A norm layer has an exact block.
        gain = gain_of(module)
        if gain is not None and id(params.get(gain.weight)) not in self._in_exact:
            block = self._make_exact_block(name, module, [gain.weight, gain.bias or ""])
            if block is not None:
                self._by_weight.setdefault(id(block.weight), block)
                return

        # The sparse gradients of an embedding give no gradient factors.
        if getattr(module, "sparse", False):
            self._excluded.update(map(id, params.values()))

        # A layer with a kind has a Kronecker block, unless something prevents it.
        # A module without one is left to the base.
        if kind is None:
            self._leave_to_base(name, module, params, gain)
        elif id(params.get(kind.weight)) not in self._owned:
            self._skip(name, module, NOT_OWNED)
        else:
            locations = self._rules.locations(name, module, input_channels)
            if locations:
                kind = DoublyFactored(locations=locations)
                self._kinds[module] = kind
            has_bias = params.get(kind.bias) is not None
            in_a = has_bias and not kind.separate_bias_reason
            reason = self._rules.too_large(kind.shape(module, in_a))
            if reason is not None:
                self._skip(name, module, reason, unexpected=True)
        self._add_use_of_weight(name, module)

    def _leave_to_base(
        self,
        name: str,
        module: nn.Module,
        params: Mapping[str, nn.Parameter],
        gain: Gain | None,
    ) -> None:
        """Leave a module of no kind to the base, and its own parameters one by one."""
        reason = self._matches[module].reason
        if reason is None:
            return
        # An option would give a norm layer's gain and bias an exact block.
        allowed: tuple[str | None, ...] = ()
        if gain is not None and self._rules.max_exact_dim is None:
            allowed = (gain.weight, gain.bias)

        if not _has_own_parameters(module):
            is_script = isinstance(module, torch.jit.ScriptModule)
            self._skip(
                name,
                module,
                reason,
                unexpected=is_script,
                exact_if_allowed=bool(allowed),
            )
            return
        for param_name, p in params.items():
            self._skip_params(
                f"{name}.{param_name}",
                [p],
                reason,
                exact_if_allowed=param_name in allowed,
            )
        self._skipped.add(module)

    def _add_use_of_weight(self, name: str, module: nn.Module) -> None:
        """Record that a module uses its weight, if the optimizer owns the weight."""
        kind = self._kinds.get(module)
        weight_name = "weight" if kind is None else kind.weight
        # named_parameters also has the parameters of a TorchScript module.
        weight = dict(module.named_parameters(recurse=False)).get(weight_name)
        if weight is None or id(weight) not in self._owned:
            return
        modules = self._by_weight.setdefault(id(weight), {})
        if isinstance(modules, dict):
            modules[module] = name

    def _add_experts(self, name: str, module: nn.Module) -> None:
        """Make the blocks of fused experts, one for each of their weights."""
        params = module._parameters
        for weight_name, kind in EXPERTS.items():
            weight = params.get(weight_name)
            bias = params.get(f"{weight_name}_bias")
            if weight is None:
                continue

            # Leave a weight to the base if the optimizer does not train it, if an
            # option excludes it, or if its factors would be too large.
            full_name = f"{name}.{weight_name}".lstrip(".")
            if id(weight) not in self._owned:
                if id(bias) in self._owned:
                    self._skip_params(f"{full_name}_bias", [bias], NOT_OWNED)
                continue
            if id(weight) in self._excluded:
                self._skip_params(full_name, [weight, bias], EXCLUDED, by_option=True)
                continue
            reason = self._rules.too_large(kind.shape(module, bias is not None))
            if self._rules.approximation == "reduce":
                reason = REDUCED_EXPERTS
            if reason is not None:
                self._skip_params(full_name, [weight, bias], reason, unexpected=True)
                continue

            # Reuse the block of an earlier search if it still fits.
            if id(bias) not in self._owned:
                bias = None
            block = self._known.get(id(weight))
            if block is None or block.bias is not bias:
                block = KroneckerBlock(
                    names=[full_name],
                    modules=[module],
                    bias=bias,
                    factor_dtype=self._factor_dtype,
                    kinds=[kind],
                )
            self._by_weight[id(weight)] = block

    def _make_exact_block(
        self, name: str, module: nn.Module, param_names: Sequence[str]
    ) -> ExactBlock | None:
        """Make an exact block of some parameters of a module, if the rules allow it."""
        # Take the parameters that belong to the optimizer and to no other exact block.
        available = self._owned.keys() - self._in_exact
        params: list[nn.Parameter] = []
        for param_name in param_names:
            p = module._parameters.get(param_name)
            if p is not None and id(p) in available:
                params.append(p)
        if self._rules.max_exact_dim is None or not params:
            return None

        # Reuse the block of an earlier search if it has the same parameters.
        ids = [id(p) for p in params]
        self._in_exact.update(ids)
        block = self._known.get(ids[0])
        if isinstance(block, ExactBlock) and [id(p) for p in block.all_params] == ids:
            return block
        return ExactBlock(
            name=name,
            module=module,
            params=params,
            max_dim=self._rules.max_exact_dim,
            factor_dtype=self._factor_dtype,
        )

    # ----------------------------------------------------------------------- all blocks

    def make_blocks(self) -> list[KroneckerBlock]:
        """Make the blocks of all weights, and of separate biases."""
        blocks: list[KroneckerBlock] = []
        for weight, place in self._by_weight.items():
            if isinstance(place, KroneckerBlock):
                blocks.append(place)
            else:
                blocks += self._make_shared_block(weight, place)
        return blocks

    def _make_shared_block(
        self, weight: int, names: Mapping[nn.Module, str]
    ) -> list[KroneckerBlock]:
        """Make the block of a weight and its bias, and exact blocks of separate biases.

        ``names``: the modules that use the weight, and their names.
        """
        modules = list(names)

        # All of the modules must be able to share the block.
        reason = None
        if not self._skipped.isdisjoint(modules):
            reason = TIED
        elif not self._can_share(modules):
            reason = TIED_DIFFERENTLY
        if reason is not None:
            for module, name in names.items():
                if module not in self._skipped:
                    self._skip(name, module, reason)
            return []

        # The bias belongs to the block, or has an exact block.
        kinds = [self._kinds[module] for module in modules]
        blocks: list[KroneckerBlock] = []
        bias: nn.Parameter | None = None
        for (module, name), kind in zip(names.items(), kinds, strict=True):
            own_bias = module._parameters.get(kind.bias)
            if not kind.separate_bias_reason:
                bias = own_bias if id(own_bias) in self._owned else None
                continue
            exact = self._make_exact_block(name, module, [kind.bias])
            if exact is not None:
                blocks.append(exact)
            elif id(own_bias) in self._owned.keys() - self._in_exact:
                reason = f"its weight is {kind.separate_bias_reason}, and there are no exact blocks"
                self._skip_params(
                    f"{name}.{kind.bias}", [own_bias], reason, exact_if_allowed=True
                )

        # Reuse the block of an earlier call if it is the same.
        block = self._known.get(weight)
        is_same = block is not None and block.modules == modules and block.bias is bias
        if block is None or not is_same or list(block.kinds.values()) != kinds:
            block = KroneckerBlock(
                names=list(names.values()),
                modules=modules,
                bias=bias,
                factor_dtype=self._factor_dtype,
                kinds=kinds,
            )
        return [*blocks, block]

    def _can_share(self, modules: Sequence[nn.Module]) -> bool:
        """Whether modules with one weight can have one block.

        They can if they are an embedding and an output layer, or if they have one class
        and one bias.
        """
        if self._tied_kinds.keys() >= {*modules}:
            return True
        classes = {plain_type(module) for module in modules}
        biases: set[int] = set()
        for module in modules:
            bias_name = self._kinds[module].bias
            biases.add(id(module._parameters.get(bias_name)))
        return len(biases) == 1 and len(classes) == 1

    def make_gradient_blocks(
        self, blocks: Sequence[KroneckerBlock]
    ) -> list[KroneckerBlock]:
        """Make gradient-factored blocks of the matrices without another block."""
        rules = self._rules
        if rules.unsupported_layers == "base_optimizer":
            return []
        # Each matrix gets one block, even if several modules share it.
        unavailable = self._excluded | self._params_in(blocks)
        gradient_blocks: list[KroneckerBlock] = []
        for name, module in self._model.named_modules():
            for param_name, p in module.named_parameters(recurse=False):
                if id(p) not in self._owned or id(p) in unavailable:
                    continue
                if _is_vector(p) or p.is_complex():
                    continue
                unavailable.add(id(p))
                block = self._known.get(id(p))
                if not isinstance(block, GradientBlock) or block.modules != [module]:
                    block = GradientBlock(
                        name=f"{name}.{param_name}".lstrip("."),
                        module=module,
                        parameter=p,
                        max_dim=rules.max_factor_dim,
                        factor_dtype=self._factor_dtype,
                    )
                if not rules.too_large(block.shape):
                    gradient_blocks.append(block)

        # "auto" uses these blocks only if they are a large share of the model.
        if rules.unsupported_layers == "auto":
            size = sum(block.weight.numel() for block in gradient_blocks)
            if size < AUTO_SHARE * sum(self._owned.values()):
                return []
        return gradient_blocks

    def _params_in(self, blocks: Sequence[KroneckerBlock]) -> set[int]:
        """The ids of the parameters that have a block."""
        params = set(self._in_exact)
        for block in blocks:
            params.add(id(block.weight))
            if block.bias is not None:
                params.add(id(block.bias))
        return params

    # ------------------------------------------------------- parameters without a block

    def _skip(
        self,
        name: str,
        module: nn.Module,
        reason: str,
        *,
        unexpected: bool = False,
        exact_if_allowed: bool = False,
        by_option: bool = False,
    ) -> None:
        """Leave the parameters of a module to the base."""
        row = LeftToBase(
            name=name or "(model)",
            kind=plain_type(module).__name__,
            reason=reason,
            parameters=0,
            unexpected=unexpected,
            norm=_is_norm(module),
            exact_if_allowed=exact_if_allowed,
            by_option=by_option,
        )
        self._rows.append(_Row(row, [id(p) for p in module.parameters(recurse=False)]))
        self._skipped.add(module)

    def _skip_params(
        self,
        name: str,
        params: Iterable[Tensor | None],
        reason: str,
        *,
        unexpected: bool = False,
        exact_if_allowed: bool = False,
        by_option: bool = False,
    ) -> None:
        """Leave some parameters of a module to the base."""
        row = LeftToBase(
            name=name.lstrip("."),
            kind=PARAMETER,
            reason=reason,
            parameters=0,
            unexpected=unexpected,
            exact_if_allowed=exact_if_allowed,
            by_option=by_option,
        )
        self._rows.append(_Row(row, [id(p) for p in params if p is not None]))

    def rows_without_block(self, blocks: Sequence[KroneckerBlock]) -> list[LeftToBase]:
        """The parameters without a block, each of which is counted once."""
        gradient_blocks = [b for b in blocks if isinstance(b, GradientBlock)]
        gradient_factored = {id(block.weight) for block in gradient_blocks}
        counted = self._params_in(blocks)
        rows: list[LeftToBase] = []
        for row, params in self._rows:
            owned = [p for p in dict.fromkeys(params) if p in self._owned]
            size = sum(self._owned[p] for p in owned if p not in counted)
            counted.update(owned)
            counted_row = replace(row, parameters=size)
            if gradient_factored.isdisjoint(owned):
                rows.append(counted_row)
            elif size:
                rows.append(replace(counted_row, reason=VECTORS_LEFT, in_part=True))

        outside = sum(size for p, size in self._owned.items() if p not in counted)
        if outside:
            rows.append(LeftToBase("(no module)", PARAMETER, OUTSIDE_MODEL, outside))
        return rows


def _is_vector(p: Tensor) -> bool:
    """Whether a parameter is empty, or has no more than one row or one column."""
    return p.dim() < 2 or p.numel() == 0 or min(matrix_shape(p.shape)) == 1


def _is_norm(module: nn.Module) -> bool:
    """Whether a module of any class is a norm layer, by class name and parameters."""
    has_name = any("norm" in cls.__name__.lower() for cls in type(module).__mro__)
    only_vectors = all(p.dim() < 2 for p in module.parameters(recurse=False))
    has_children = next(module.children(), None) is not None
    return has_name and only_vectors and not has_children


def _has_own_parameters(module: nn.Module) -> bool:
    """Whether a module of no kind is a container with parameters of its own.

    GPT is, with its position embedding. Modules whose parameters are called weight and
    bias, such as an LSTM, are layers that we do not support.
    """
    for name, _ in module.named_parameters(recurse=False):
        if name.startswith(("weight", "bias")):
            return False
    return not is_attention(module) and not _is_norm(module)

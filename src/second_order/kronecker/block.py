"""One preconditioned layer, and batches of equal layers.

A :class:`KroneckerBlock` has the state of one layer: its staged statistics, running
averages, inverse and status. A :class:`LayerBatch` has layers whose gradients are
matrices of one shape, so that the number of kernel launches does not grow with the
number of layers:

    gradient            the layers' gradients, concatenated to one stack of matrices
    precondition        their inverses, as one stack, applied to it
    parameter_parts     the parts of the results by parameter, for the gradients
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import FSDPParams
from second_order.kronecker.autograd import params_in_pass
from second_order.kronecker.factors import (
    ALL_FACTORS,
    KroneckerFactors,
    StagedStatistics,
)
from second_order.kronecker.layers import (
    FactorShape,
    LayerKind,
    Layout,
    PairOptions,
    PairRows,
    PairStatistics,
    matrix_layout,
)
from second_order.kronecker.solvers import Inverse
from second_order.kronecker.storage import (
    group_equal,
    join_groups,
    merge_numbers,
    stack_in_place,
)
from second_order.kronecker.verification import TOLERANCE

__all__ = [
    "AGREED_STATE",
    "CPU_LAYER_BATCH_BYTES",
    "PASS_HISTORY",
    "Gradients",
    "KroneckerBlock",
    "LayerBatch",
    "LayerStatus",
    "batch_layers",
    "per_group",
    "split_by_parameter",
    "stack_inverses",
    "to_matrices",
]

# Checkpoint entries of a layer's state. The first has four numbers, on the ranks whose
# passes give the layer's statistics. The others are integers, equal on all ranks.
PASS_HISTORY = "pass_history"
AGREED_STATE = ("no_statistics", "statistics_due", "failures")


class LayerStatus(Enum):
    """What this rank knows about a layer's statistics.

        WAITING       -> NOT_CAPTURED   ensure_factors(statistics_due=True)
        NOT_CAPTURED  -> WAITING        restart_averages()
        any but UNVERIFIED -> CAPTURED  a captured pair
        any           -> UNVERIFIED     a comparison with a large residual
        UNVERIFIED    -> NOT_CAPTURED   a comparison with a small one

    Pairs of an UNVERIFIED layer are not kept.
    """

    WAITING = 0  # none have been due
    NOT_CAPTURED = 1  # they were due, and the layer's hooks captured no pair
    CAPTURED = 2  # a pair was captured, even if none of its rows take part
    UNVERIFIED = 3  # the captured pairs do not reproduce the weight's gradient


# ---------------------------------------------------------------------------- one layer


class KroneckerBlock:
    """A weight, the bias that goes with it, and the curvature of the two.

    Args:
        names: Names of the modules that share the weight; one for most layers.
        modules: These modules.
        bias: The bias that goes with the weight, if any.
        factor_dtype: The dtype in which the factors are stored.
        kinds: The kind of each module.
        params: The parameters of the block, the weight first, if they are not the
            weight and bias of the first module.

    :meth:`_reset` creates the attributes that depend on which parameters are trainable.

    Attributes:
        names: Names of the modules.
        name: The layer's name in messages.
        kinds: The kind of each module that has one.
        hooked_modules: The modules whose hooks capture the layer's pairs.
        all_params: The weight, and the bias if the optimizer trains it.
        shape: The sizes of the factors, for the parameters that are trainable now.
        trains_bias: Whether A has a last row and column for the bias.
        work_dtype: The dtype of clipping and communication: float32 at least.
        staged: Statistics since the last step.
        factors: Running averages; None before the first statistics or checkpoint.
        owned_factors: The names of factors that this rank owns, and therefore stores.
        inverse: The damped inverse, on ranks that precondition the layer's gradient.
        solved: Whether these ranks have an inverse.
        status: What this rank knows about the layer's statistics.
        no_statistics: Whether no rank had statistics at the last refresh.
        failures: Number of successive refreshes that gave no valid decomposition.
        comparisons: Number of steps at which the pairs were compared with the gradient.
        residual: The share of the gradient that the pairs did not reproduce, at the
            last of these steps.
        work: Operations of the layer in this rank's passes of the last step with
            statistics.
    """

    def __init__(
        self,
        names: Sequence[str],
        modules: Sequence[nn.Module],
        bias: nn.Parameter | None,
        factor_dtype: torch.dtype,
        kinds: Sequence[LayerKind] = (),
        params: Sequence[nn.Parameter] = (),
    ) -> None:
        # Modules and parameters.
        self.names = list(names)
        self.modules = list(modules)
        self.name = " = ".join(name or "(model)" for name in names)
        self.hooked_modules = self.modules
        self.kinds = dict(zip(modules, kinds, strict=False))
        self.all_params = list(params)
        if not params:
            first = self.modules[0]
            weight = getattr(first, self.kinds[first].weight)
            self.all_params.append(cast(nn.Parameter, weight))
            if bias is not None:
                self.all_params.append(bias)

        # Curvature.
        self.factor_dtype = factor_dtype
        self.owned_factors: Collection[str] = ALL_FACTORS
        self.inverse: Inverse | None = None
        self.status = LayerStatus.WAITING
        self.no_statistics = False
        self.failures = 0

        # Captured passes.
        self.comparisons = 0
        self.residual = 0.0
        self.work = 0
        self._last_backward = -1  # the pass that delivered the last pair
        self._reset(dropped=0)

    def _reset(self, dropped: Tensor | int) -> None:
        """Drop statistics, averages and inverse, and adopt the trainable parameters."""
        device = self.weight.device
        self.shape: FactorShape = self._shape_if(self.training)
        self.trains_bias = self._bias_is_trainable()
        self.work_dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self.staged = StagedStatistics(self.shape, device, self.factor_dtype)
        self.staged.dropped.add_(dropped)
        self.factors: KroneckerFactors | None = None
        self.drop_inverse()

    @property
    def weight(self) -> nn.Parameter:
        """The weight, or the parameter that stands for the layer in a checkpoint."""
        return self.all_params[0]

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias that goes with the weight, or None."""
        return self.all_params[1] if len(self.all_params) > 1 else None

    @property
    def training(self) -> tuple[bool, ...]:
        """Whether each parameter of the block is trainable now."""
        return tuple(p.requires_grad for p in self.all_params)

    @property
    def trainable(self) -> bool:
        """Whether the weight is trainable now."""
        return self.weight.requires_grad

    @property
    def params(self) -> list[nn.Parameter]:
        """The block's parameters that are trainable now."""
        return [p for p in self.all_params if p.requires_grad]

    @property
    def has_gradient(self) -> bool:
        """Whether any of the parameters has a gradient."""
        return any(p.requires_grad and p.grad is not None for p in self.all_params)

    @property
    def size(self) -> int:
        """Number of elements of the trainable parameters."""
        return sum(p.numel() for p in self.params)

    @property
    def layout(self) -> Layout:
        """Where the gradients of :attr:`params` are in the layer's matrix."""
        return matrix_layout(self.shape, [p.numel() for p in self.params])

    def replace_params(self, replacements: Mapping[Tensor, Tensor]) -> None:
        """Replace some of the block's parameters by others of the same shapes."""
        self.all_params = [
            cast(nn.Parameter, replacements.get(p, p)) for p in self.all_params
        ]

    def reset_if_changed(self) -> None:
        """Reset a layer that was moved, or whose bias was frozen or unfrozen.

        The layer must be trainable.
        """
        device = self.weight.device
        was_moved = device != self.staged.device
        if was_moved or self._bias_is_trainable() != self.trains_bias:
            self._reset(self.staged.dropped.to(device))

    def _bias_is_trainable(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    def _shape_if(self, training: Sequence[bool]) -> FactorShape:
        """The sizes of the factors, given whether each parameter is trainable."""
        module = self.modules[0]
        return self.kinds[module].shape(module, any(training[1:]))

    def possible_shapes(self) -> list[FactorShape]:
        """All sizes that the factors may have, depending on the frozen parameters."""
        cases = itertools.product((True, False), repeat=len(self.all_params))
        return [self._shape_if(training) for training in cases]

    # ----------------------------------------------------------------------- statistics

    def begin_pass(self, running_pass: int, pass_id: int) -> bool:
        """Begin a pass at its first pair; do nothing at its other pairs.

        Args:
            running_pass: The number of the backward pass that autograd is running.
            pass_id: The number that its pairs have. With sampled labels the two differ.

        Returns:
            Whether the parameters have no gradients although the layer has statistics.
            The user has then set the gradients to None, unless FSDP2 has not averaged
            them yet.
        """
        same_pass = self._last_backward == running_pass
        self._last_backward = running_pass
        if same_pass or self.staged.has_pass(pass_id):
            return False
        self.reset_if_changed()
        return not self.staged.empty and not self.has_gradient

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Form the statistics of a module's captured pair, in the dtype of the pair."""
        return self.kinds[module].statistics(module, x, d, options)

    def gradient_rows(self, module: nn.Module, x: Any, d: Tensor) -> PairRows:
        """The rows of a captured pair."""
        return self.kinds[module].gradient_rows(module, x, d)

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        """Whether a pair has sizes that the layer can have."""
        return self.kinds[module].fits_pair(module, x, d)

    # --------------------------------------------------------------------- verification

    def verified_parameter(self, module: nn.Module) -> str:
        """The name, in a module, of the parameter whose gradient is compared."""
        return self.kinds[module].weight

    def weight_gradient(self, module: nn.Module, x: Any, d: Tensor) -> Tensor:
        """A pair's part of the gradient of :meth:`verified_parameter`."""
        return self.kinds[module].weight_gradient(module, x, d)

    def verify_pair(
        self, module: nn.Module, x: Any, d: Tensor, fsdp: FSDPParams | None
    ) -> None:
        """Add a pair to the comparison with the gradient, in float32 at least.

        The gradient arrives at the weight after the pair, in the same pass.
        """
        weight = params_in_pass(module, fsdp).get(self.verified_parameter(module))
        if weight is None:
            return
        dtype = torch.promote_types(d.dtype, torch.float32)
        # The x of fused experts has the hidden states, and the expert of each.
        rows = x if isinstance(x, Tensor) else x.hidden
        inputs = x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        product = self.weight_gradient(module, inputs, d.to(dtype))
        self.staged.ensure_verification().add(product, rows, d, weight)

    def record_capture(self, work: int) -> None:
        """Record that a pair was captured, and the step's operations so far."""
        self.status = LayerStatus.CAPTURED
        self.work = work

    @property
    def unverified(self) -> bool:
        """Whether the last comparison failed. The pairs are then not used."""
        return self.status is LayerStatus.UNVERIFIED

    def record_residual(self, residual: float | None) -> None:
        """Record a comparison, and drop pairs that do not reproduce the gradient.

        Args:
            residual: The share of the gradient that the step's pairs do not reproduce.
                None if a hook of the user on the weight makes comparison impossible.
        """
        self.comparisons += 1
        if residual is not None:
            self.residual = residual
            if residual > TOLERANCE:
                self.status = LayerStatus.UNVERIFIED
            elif self.unverified:
                # The pairs are right again. Those of the unverified time were not kept.
                self.status = LayerStatus.NOT_CAPTURED
        if self.unverified:
            self.staged.clear()

    # -------------------------------------------------------------------------- factors

    def ensure_factors(self, statistics_due: bool = False) -> KroneckerFactors:
        """Return the running averages, and create them on first use.

        Args:
            statistics_due: Whether statistics are due at this step.
        """
        if statistics_due and self.status is LayerStatus.WAITING:
            self.status = LayerStatus.NOT_CAPTURED
        if self.factors is None:
            self.factors = self._new_factors()
        return self.factors

    def _new_factors(self) -> KroneckerFactors:
        return KroneckerFactors(
            shape=self.shape,
            device=self.weight.device,
            dtype=self.factor_dtype,
            owned=self.owned_factors,
        )

    def set_owned_factors(self, owned: Collection[str]) -> None:
        """Set the factors that this rank owns, and free the others.

        An owned factor is copied if it is a slice, which would keep its stack alive.
        """
        self.owned_factors = owned
        if self.factors is None:
            return
        for name, factor in self.factors.stored.items():
            if name not in owned:
                del self.factors.entries[name]
            elif factor.untyped_storage().nbytes() > factor.nbytes:
                self.factors.entries[name] = factor.clone()

    def stored(self, name: str) -> Tensor | None:
        """A factor as stored; None if this rank does not own it or has lost it."""
        return None if self.factors is None else self.factors.entries.get(name)

    @property
    def has_lost_factor(self) -> bool:
        """Whether this rank's averages lack a factor that it owns."""
        if self.factors is None:
            return False
        owned = set(self.shape.factor_names).intersection(self.owned_factors)
        return not owned <= self.factors.entries.keys()

    @property
    def factor_bytes(self) -> int:
        """Bytes of the running averages on this rank."""
        if self.factors is None:
            return 0
        return sum(factor.nbytes for factor in self.factors.stored.values())

    def restart_averages(self) -> None:
        """Start the running averages again, and drop the inverse."""
        self.factors = None
        self.failures = 0
        if self.status is LayerStatus.NOT_CAPTURED:
            self.status = LayerStatus.WAITING
        self.drop_inverse()

    # ---------------------------------------------------------------------- checkpoints

    def to_checkpoint_tensor(self, values: Sequence[float]) -> Tensor:
        """Return numbers as a tensor on the weight's device, like the other entries."""
        device = self.weight.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor(values, dtype=dtype, device=device)

    def agreed_entries(self) -> dict[str, int]:
        """The entries of a checkpoint that are equal on all ranks."""
        statistics_due = self.status is not LayerStatus.WAITING
        values = (int(self.no_statistics), int(statistics_due), self.failures)
        return dict(zip(AGREED_STATE, values, strict=True))

    def pass_history(self, ranks: int) -> Tensor:
        """The entry of the captured passes.

        Args:
            ranks: Number of ranks that share the layer's passes. The entry has their
                total work.
        """
        work = self.work * ranks
        history = [self.status.value, self.comparisons, self.residual, work]
        return self.to_checkpoint_tensor(history)

    def load_history(self, saved: Mapping[str, Any], ranks: int) -> None:
        """Load :meth:`agreed_entries` and :meth:`pass_history`."""
        if saved.keys() >= set(AGREED_STATE):
            self.no_statistics = bool(saved["no_statistics"])
            self.status = LayerStatus.WAITING
            if saved["statistics_due"]:
                self.status = LayerStatus.NOT_CAPTURED
            self.failures = saved["failures"]
        if PASS_HISTORY in saved:
            status, comparisons, residual, work = saved[PASS_HISTORY].tolist()
            self.status = LayerStatus(int(status))
            self.comparisons = int(comparisons)
            self.residual = residual
            self.work = int(work / ranks)

    def saved_factors(self) -> dict[str, Tensor]:
        """The factors of this rank by checkpoint entry. They are shared, not copied.

        They are zeros before the first statistics; saving does not create averages.
        """
        factors = self.factors or self._new_factors()
        return dict(factors.entries)

    def load_factors(self, saved: Mapping[str, Any]) -> None:
        """Load averages, if they were saved and the layer has none.

        A factor that is missing in ``saved``, or has another size, counts as lost.
        """
        were_saved = "average_weight" in saved or bool(saved.get("statistics_due"))
        if were_saved and self.factors is None:
            self.factors = self.read_factors(saved)

    def read_factors(self, saved: Mapping[str, Any]) -> KroneckerFactors:
        """Return a copy of saved averages, with the factors that this rank owns."""
        factors = self._new_factors()
        for name, entry in list(factors.entries.items()):
            if name in saved and saved[name].shape == entry.shape:
                entry.copy_(saved[name])
            elif name in self.shape.factor_names:
                del factors.entries[name]
        return factors

    def receive_factors(self, entries: Mapping[str, Tensor | None]) -> None:
        """Replace entries by those of another rank; None stands for a lost one."""
        factors = self.ensure_factors()
        for name, value in entries.items():
            if value is not None:
                factors.entries[name] = value
            else:
                factors.entries.pop(name, None)

    # -------------------------------------------------------------------------- inverse

    def install_inverse(self, inverse: Inverse) -> None:
        """Precondition with this inverse from now on."""
        self.inverse = inverse

    def mark_solved(self) -> None:
        """Record that all ranks that precondition the layer have an inverse."""
        self.solved = True
        self.no_statistics = False
        self.failures = 0

    def count_failed_refresh(self) -> None:
        """Count a refresh without a valid decomposition; the last inverse stays."""
        self.no_statistics = False
        self.failures += 1

    def drop_inverse_at_refresh(self, no_statistics: bool) -> None:
        """Drop the inverse at a refresh. ``no_statistics``: no rank captured a pair."""
        self.no_statistics = no_statistics
        self.drop_inverse()

    def drop_inverse(self) -> None:
        """Drop the inverse. The layer has its plain gradient until the next refresh."""
        self.inverse = None
        self.solved = False

    @property
    def inverse_bytes(self) -> int:
        """Bytes of the inverse on this rank."""
        if self.inverse is None:
            return 0
        return sum(tensor.nbytes for tensor in self.inverse.tensors)


# ---------------------------------------------------------------- gradients as matrices


Gradients: TypeAlias = Callable[[Tensor], Tensor | None]
"""Returns the gradient of a parameter, or None."""


def to_matrices(gradients: list[Tensor], layout: Layout) -> Tensor:
    """Concatenate the gradients of equal layers to ``(layers x groups, out, in)``.

    For two Linears with a weight (out, in) and a bias (out,), the views of the
    gradients are (1, out, in) and (1, out, 1), the axis is 2, and the result is
    (2, out, in + 1).

    Args:
        gradients: The gradients of all parameters of the first layer, then the next.
        layout: The layout of the layers.

    Returns:
        The matrices. For a layer with one parameter they are a view where possible.
    """
    num_params = len(layout.views)
    layers = len(gradients) // num_params
    shapes = layout.views * layers
    views = [g.reshape(shape) for g, shape in zip(gradients, shapes, strict=True)]
    if layers > 1 and gradients[0].is_cpu:
        # Stacked first: products of matrices with distant rows take twice as long.
        views = [torch.cat(views[i::num_params]) for i in range(num_params)]
    matrices = views[0] if len(views) == 1 else torch.cat(views, layout.axis)
    if len(views) > num_params:
        # The layers are along the axis, e.g. (1, out, 2 (in + 1)).
        by_layer = matrices.unflatten(layout.axis, (layers, -1))
        matrices = by_layer.movedim(layout.axis, 0).squeeze(1)
    if layout.has_groups:
        matrices = matrices.flatten(0, 1)
    return matrices.mT if layout.transposed else matrices


def split_by_parameter(
    matrices: Tensor, layout: Layout, layers: int = 1
) -> Sequence[Tensor]:
    """Split the matrices of equal layers, ``(layers x groups, out, in)``, by parameter.

    Returns:
        Views ``(layers, ...)``, one per parameter of a layer, in its order of elements.
    """
    stacked = matrices.mT if layout.transposed else matrices
    if layout.has_groups:
        stacked = stacked.unflatten(0, (layers, -1))
    parts: Sequence[Tensor] = stacked.split_with_sizes(layout.sizes, layout.axis)
    return parts


# ------------------------------------------------------------------------ layer batches


def stack_inverses(inverses: Sequence[Inverse]) -> Inverse:
    """Stack the inverses of equal layers into one, ``(layers x groups, ...)``."""
    if len(inverses) == 1:
        return inverses[0]
    stacks: dict[str, Tensor] = {}
    for name in inverses[0].entries:
        column = [inverse.entries[name] for inverse in inverses]
        stacks[name] = join_groups(column)
    return replace(inverses[0], entries=stacks)


class LayerBatch:
    """Layers whose gradients are matrices of one shape, dtype, device and layout.

    Args:
        blocks: The layers.
        inverse: The inverses of all layers as one, ``(layers x groups, ...)``. None:
            those of the layers are stacked when they are needed.
    """

    def __init__(
        self, blocks: Sequence[KroneckerBlock], inverse: Inverse | None = None
    ) -> None:
        self.blocks = list(blocks)
        self.params = [p for block in self.blocks for p in block.params]
        self._dtype = self.blocks[0].work_dtype
        self._layout = self.blocks[0].layout
        self._inverse = inverse
        # The layers' inverses that `_inverse` replaces. They are compared by identity.
        self._layer_inverses: list[Inverse | None] = []
        if inverse is not None:
            self._layer_inverses = [block.inverse for block in self.blocks]

    @property
    def inverse(self) -> Inverse:
        """The inverses of all layers as one. Each layer's own becomes a slice of it.

        All layers must have an inverse.
        """
        layer_inverses = [block.inverse for block in self.blocks]
        if self._inverse is None or layer_inverses != self._layer_inverses:
            inverses = [inverse for inverse in layer_inverses if inverse is not None]
            self._inverse = inverses[0]
            self._layer_inverses = layer_inverses
            if len(inverses) > 1:
                entries = [inverse.entries for inverse in inverses]
                stacks: dict[str, Tensor] = {}
                for name in inverses[0].entries:
                    stacks[name] = stack_in_place(entries, name).flatten(0, 1)
                self._inverse = replace(inverses[0], entries=stacks)
        return self._inverse

    def gradient(self, gradient_of: Gradients | None = None) -> Tensor:
        """The layers' gradients, ``(layers x groups, out, in)``, in the work dtype.

        Args:
            gradient_of: Returns a parameter's gradient; None for ``.grad``. A parameter
                without a gradient has zeros.
        """
        gradients: list[Tensor] = []
        for p in self.params:
            gradient = p.grad if gradient_of is None else gradient_of(p)
            if gradient is None:
                gradient = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
            gradients.append(gradient)
        return to_matrices(gradients, self._layout).to(self._dtype)

    def precondition(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply the inverses, of a dtype, to the result of :meth:`gradient`."""
        return self.inverse.precondition(gradient.to(dtype)).to(gradient.dtype)

    def select(self, matrices: Tensor, indices: Sequence[int]) -> Tensor:
        """Select the matrices of some layers. Adjacent layers need no copy."""
        if len(indices) == len(self.blocks):
            return matrices
        by_layer = matrices.unflatten(0, (len(self.blocks), -1)).unbind()
        return join_groups([by_layer[i] for i in indices])

    def parameter_parts(self, results: Tensor) -> list[Tensor]:
        """Split results by the entries of :attr:`params`.

        The shape of a part may differ from that of its parameter. On a GPU, the parts
        are contiguous, as most gradients are: a foreach kernel copies all tensors only
        if source and target have equal strides.
        """
        stacks = split_by_parameter(results, self._layout, len(self.blocks))
        if not results.is_cpu:
            stacks = [stack.contiguous() for stack in stacks]
        if len(self.blocks) == 1:
            return list(stacks)
        parts: list[Tensor] = []
        for layer_parts in zip(*map(torch.unbind, stacks), strict=True):
            parts += layer_parts
        return parts


def per_group(numbers: Sequence[float | Tensor], groups: int, like: Tensor) -> Any:
    """The number that all layers share, or each layer's number, once for each group.

    Layers have different damping if threads began their inversions at different steps.
    """
    number = merge_numbers(numbers, like)
    if groups > 1 and isinstance(number, Tensor) and number.dim() > 0:
        return number.repeat_interleave(groups)
    return number


# Bytes of gradients in one batch, unless a single layer has more. On a CPU a batch only
# saves calls, and its results should stay in the cache for the next operation.
CPU_LAYER_BATCH_BYTES = 2**20
LAYER_BATCH_BYTES = 64 * 2**20


def batch_layers(blocks: Iterable[KroneckerBlock]) -> list[LayerBatch]:
    """Group layers into batches, in the order in which their first layers come."""
    blocks = list(blocks)
    keys: list[object] = []
    shares: list[float] = []
    for block in blocks:
        weight = block.weight
        shape = block.shape
        # Doubly factored layers, which have locations, are few and wide. Each is alone.
        own_batch = block if shape.locations else None
        dtypes = (block.work_dtype, weight.dtype)
        keys.append((shape, dtypes, weight.device, block.layout, own_batch))
        is_cpu = weight.device.type == "cpu"
        max_bytes = CPU_LAYER_BATCH_BYTES if is_cpu else LAYER_BATCH_BYTES
        nbytes = block.work_dtype.itemsize * math.prod(shape.gradient_shape)
        shares.append(nbytes / max_bytes)
    groups = group_equal(keys, shares, max_size=1)
    return [LayerBatch([blocks[i] for i in group]) for group in groups]

"""One preconditioned layer, and layers of one shape, whose gradients are preconditioned together.

gradient   the layers' gradients as one stack of matrices, by one concatenation
inverse    their inverses, stacked alike; a layer has a view
write      the layers' parts of a stack of results, into their gradients

What a device is statistics_due to do then does not grow with the number of layers that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import FSDPParams
from second_order.kronecker.autograd import params_in_pass
from second_order.kronecker.factors import (
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
from second_order.kronecker.storage import as_stack, group_equal, merge_numbers, stack_in_place
from second_order.kronecker.verification import TOLERANCE

__all__ = [
    "AGREED_STATE",
    "CPU_BATCH_BYTES",
    "PASS_HISTORY",
    "Gradients",
    "KroneckerBlock",
    "LayerBatch",
    "LayerStatus",
    "batch_layers",
    "per_group",
    "split_by_parameter",
    "to_matrices",
]

VERIFIED_STEPS = 2
"""Steps with statistics at which a layer's pairs are compared with its weight's gradient."""

PASS_HISTORY = "pass_history"
AGREED_STATE = ("no_statistics", "statistics_due", "failures")
"""The entries of a layer's state in a checkpoint: four numbers on the ranks whose passes make the
statistics, and whole numbers that all ranks have."""


class LayerStatus(Enum):
    """What this process knows of a layer's statistics."""

    WAITING = 0  # none have been due
    NOT_CAPTURED = 1  # they were due, and the layer's hooks captured no pair
    CAPTURED = 2  # a pair has been captured, perhaps one without an example
    UNVERIFIED = 3  # the captured pairs do not reproduce the weight's gradient


class KroneckerBlock:
    """A weight, the bias that goes with it, and the curvature of the two.

    Attributes:
        names: Names of the modules that share the weight, one for most layers.
        name: The layer's name, for messages.
        kinds: The kind of each of these modules that has one.
        hooked_modules: The modules whose passes make the statistics.
        owned: The weight, and the bias in the optimizer's care, if any.
        factors: Running averages; None before the first statistic or checkpoint.
        held: Whether A and G are kept on this process.
        staged: Statistics since the last step.
        inverse: The damped inverse, on the layer's gradient workers once it is solved.
        solved: Whether the layer's gradient workers, whichever ranks, hold an inverse.
        shape: The sizes of the factors, by which parameters train.
        trains_bias: Whether A has the homogeneous coordinate.
        work_dtype: The dtype in which gradients are clipped and exchanged: float32 at least.
        status: What this process knows of the statistics.
        no_statistics: Whether the last refresh found no statistics, on any process.
        failures: Refreshes in a row that gave no valid decomposition.
        comparisons: Steps at which pairs were compared with the gradient.
        residual: Share of the gradient that the pairs left over at the last of these.
        work: Operations of the passes in the last step with statistics, on this process.
    """

    def __init__(
        self,
        names: Sequence[str],
        modules: Sequence[nn.Module],
        bias: nn.Parameter | None,
        factor_dtype: torch.dtype,
        kinds: Sequence[LayerKind] = (),
        owned: Sequence[nn.Parameter] = (),
    ) -> None:
        self.names = list(names)
        self.modules = list(modules)
        self.name = " = ".join(name or "(model)" for name in names)
        self.hooked_modules = self.modules
        self.kinds = dict(zip(modules, kinds, strict=False))
        self.owned = list(owned)
        if not owned:
            first = self.modules[0]
            self.owned.append(cast(nn.Parameter, getattr(first, self.kinds[first].weight)))
            if bias is not None:
                self.owned.append(bias)
        self.factor_dtype = factor_dtype
        self.held = (True, True)
        self.inverse: Inverse | None = None
        self.status = LayerStatus.WAITING
        self.no_statistics = False
        self.failures = 0
        self.comparisons = 0
        self.residual = 0.0
        self.work = 0
        self._last_backward = -1  # the number of the pass that brought the last pair
        self._reset(dropped=0)

    def _reset(self, dropped: Tensor | int) -> None:
        """Start without statistics, for the parameters that train now."""
        device = self.weight.device
        self.shape: FactorShape = self._current_shape()
        self.trains_bias = self.bias is not None and self.bias.requires_grad
        self.work_dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self.staged = StagedStatistics(self.shape, device, self.factor_dtype)
        self.staged.dropped.add_(dropped)
        self.factors: KroneckerFactors | None = None
        self.drop_inverse()

    @property
    def weight(self) -> nn.Parameter:
        """The weight, or what else names the layer in a checkpoint."""
        return self.owned[0]

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias that goes with the weight, or None."""
        return self.owned[1] if len(self.owned) > 1 else None

    @property
    def training(self) -> tuple[bool, ...]:
        """Whether each parameter of the block trains now."""
        return tuple(p.requires_grad for p in self.owned)

    @property
    def trainable(self) -> bool:
        """Whether the weight asks for a gradient now."""
        return self.weight.requires_grad

    @property
    def params(self) -> list[nn.Parameter]:
        """The block's parameters that train now."""
        return [p for p in self.owned if p.requires_grad]

    @property
    def has_gradient(self) -> bool:
        """Whether any of the parameters has a gradient."""
        return any(p.grad is not None for p in self.params)

    @property
    def size(self) -> int:
        """Number of scalar parameters that train."""
        return sum(p.numel() for p in self.params)

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """By letter, the shape of a factor as stored here or on another process."""
        return {letter: self.shape.stored_shape(letter) for letter in self.shape.factor_names}

    @property
    def layout(self) -> Layout:
        """The places of the gradients of :attr:`params` in the layer's matrix."""
        return matrix_layout(self.shape, [p.numel() for p in self.params])

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Put other parameters of the same shapes in the place of some of the block's."""
        self.owned = [cast(nn.Parameter, others.get(p, p)) for p in self.owned]

    def reset_if_changed(self) -> None:
        """Start again where the bias was frozen or unfrozen, or the layer moved, if it trains."""
        moved = self.weight.device != self.staged.device
        if self.trainable and (moved or self._current_shape() != self.shape):
            self._reset(self.staged.dropped.to(self.weight.device))

    def _current_shape(self) -> FactorShape:
        module = self.modules[0]
        return self.kinds[module].shape(module, self.bias is not None and self.bias.requires_grad)

    # --------------------------------------------------------------------------------- statistics

    def begin_pass(self, backward: int, pass_id: int, unreduced: bool) -> None:
        """Drop statistics whose gradients have been dropped, as the first pair of a pass comes.

        ``unreduced``: FSDP2 has yet to average earlier passes' gradients.
        """
        begins = self._last_backward != backward and not self.staged.has_pass(pass_id)
        self._last_backward = backward
        if begins:
            self.reset_if_changed()
            if self.gradients_were_dropped(unreduced):
                self.staged.clear()

    def gradients_were_dropped(self, unreduced: bool = False) -> bool:
        """Whether gradients of staged statistics have been set to None since; ask at each pass.

        ``unreduced``: FSDP2 has yet to average earlier passes' gradients.
        """
        return not (self.staged.empty or self.has_gradient or unreduced)

    def statistics(
        self, module: nn.Module, x: Tensor, d: Tensor, options: PairOptions
    ) -> PairStatistics:
        """Statistics of a captured pair of one of the modules, in the dtype of the pair."""
        return self.kinds[module].statistics(module, x, d, options)

    def gradient_rows(self, module: nn.Module, x: Any, d: Tensor) -> PairRows:
        """The rows of a captured pair."""
        return self.kinds[module].gradient_rows(module, x, d)

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        """Whether a pair's sizes can be those of the layer."""
        return self.kinds[module].fits_pair(module, x, d)

    @property
    def needs_verification(self) -> bool:
        """Whether the pairs of these passes are compared with the gradient."""
        return self.comparisons < VERIFIED_STEPS

    def verified_parameter(self, module: nn.Module) -> str:
        """The name, in a module, of the parameter whose gradient is compared."""
        return self.kinds[module].weight

    def weight_gradient(self, module: nn.Module, x: Any, d: Tensor) -> Tensor:
        """A pair's part of the gradient of :meth:`verified_parameter`."""
        return self.kinds[module].weight_gradient(module, x, d)

    def verify_pair(self, module: nn.Module, x: Any, d: Tensor, fsdp: FSDPParams | None) -> None:
        """Compare a pair with the gradient that is about to arrive, in float32 at least."""
        weight = params_in_pass(module, fsdp).get(self.verified_parameter(module))
        if weight is None:
            return
        wide = torch.promote_types(d.dtype, torch.float32)
        rows = x if isinstance(x, Tensor) else x.hidden
        inputs = x.to(wide) if isinstance(x, Tensor) and x.is_floating_point() else x
        product = self.weight_gradient(module, inputs, d.to(wide))
        self.staged.ensure_verification().add(product, rows, d, weight)

    def record_capture(self, work: int) -> None:
        """Note a captured pair, and the operations of the step's passes so far."""
        self.status = LayerStatus.CAPTURED
        self.work = work

    @property
    def unverified(self) -> bool:
        """Whether the pairs do not reproduce the gradient, so that they are not used."""
        return self.status is LayerStatus.UNVERIFIED

    def record_residual(self, residual: float | None) -> None:
        """Note how much of the gradient the step's pairs leave over; drop pairs that leave much.

        None: a hook of the user's on the weight makes the comparison impossible.
        """
        self.comparisons += 1
        if residual is not None:
            self.residual = residual
            if residual > TOLERANCE:
                self.status = LayerStatus.UNVERIFIED
            elif self.unverified:
                self.status = LayerStatus.NOT_CAPTURED
        if self.unverified:
            self.staged.clear()

    # ------------------------------------------------------------------------------------ factors

    def ensure_factors(self, statistics_due: bool = False) -> KroneckerFactors:
        """The running averages, made on first use; ``statistics_due``: as statistics are due."""
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
            held=self.held,
        )

    def set_held(self, held: tuple[bool, bool]) -> None:
        """Keep A, or G, or both, or neither from now on; factors that are not kept are freed.

        Those that are get a place of their own: a slice would keep the memory of all its stack.
        """
        self.held = held
        if self.factors is None:
            return
        for letter, factor in self.factors.stored.items():
            if not held[letter == "G"]:
                del self.factors.entries[letter]
            elif factor.untyped_storage().nbytes() > factor.nbytes:
                self.factors.entries[letter] = factor.clone()

    def stored(self, letter: str) -> Tensor | None:
        """The factor of a letter, as stored; None if it is not kept here, or is lost."""
        return None if self.factors is None else self.factors.entries.get(letter)

    @property
    def has_lost_factor(self) -> bool:
        """Whether a factor that is kept here is missing, though there have been statistics."""
        held = sum(self.held[letter == "G"] for letter in self.shape.factor_names)
        return self.factors is not None and len(self.factors.stored) < held

    def restart_averages(self) -> None:
        """Start the running averages again: the layer runs on its base gradient until then."""
        self.factors = None
        self.failures = 0
        if self.status is LayerStatus.NOT_CAPTURED:
            self.status = LayerStatus.WAITING
        self.drop_inverse()

    # -------------------------------------------------------------------------------- checkpoints

    def to_checkpoint_tensor(self, values: Sequence[float]) -> Tensor:
        """Numbers as a tensor of a checkpoint, which has all of its tensors on one device."""
        device = self.weight.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor(values, dtype=wide, device=device)

    def agreed_entries(self) -> dict[str, int]:
        """The entries of a checkpoint that are the same on all ranks."""
        due = self.status is not LayerStatus.WAITING
        return dict(
            zip(AGREED_STATE, (int(self.no_statistics), int(due), self.failures), strict=True)
        )

    def pass_history(self, ranks: int) -> Tensor:
        """The entry of the captured passes; its work is that of all ``ranks``."""
        return self.to_checkpoint_tensor(
            [self.status.value, self.comparisons, self.residual, self.work * ranks]
        )

    def load_history(self, saved: Mapping[str, Any], ranks: int) -> None:
        """Take over these entries of a checkpoint; work is shared by so many ``ranks``."""
        if saved.keys() >= {*AGREED_STATE}:
            no_statistics, due, self.failures = (saved[name] for name in AGREED_STATE)
            self.no_statistics = bool(no_statistics)
            self.status = LayerStatus.NOT_CAPTURED if due else LayerStatus.WAITING
        if PASS_HISTORY in saved:
            status, comparisons, self.residual, work = saved[PASS_HISTORY].tolist()
            self.status = LayerStatus(int(status))
            self.comparisons = int(comparisons)
            self.work = int(work / ranks)

    def saved_factors(self) -> dict[str, Tensor]:
        """The factors kept here, as a checkpoint has them; tensors are shared, not copied.

        Zeros before the first statistic: a checkpoint does not make the running averages.
        """
        return dict((self.factors or self._new_factors()).entries)

    def load_factors(self, saved: Mapping[str, Any]) -> None:
        """Take over saved averages that fit; a missing one counts as lost."""
        self.factors = self.read_factors(saved)

    def read_factors(self, saved: Mapping[str, Any]) -> KroneckerFactors:
        """Copy saved averages that fit, as they are kept on this process."""
        factors = self._new_factors()
        for name, entry in [*factors.entries.items()]:
            if name in saved:
                entry.copy_(torch.as_tensor(saved[name], device=entry.device))
            elif name in self.shape.factor_names:
                del factors.entries[name]
        return factors

    def receive_factors(self, entries: Mapping[str, Tensor | None]) -> None:
        """Put factors of another process in place, and what goes with them; None is a lost one."""
        factors = self.ensure_factors()
        for name, value in entries.items():
            if value is not None:
                factors.entries[name] = value
            else:
                factors.entries.pop(name, None)

    def size_mismatch(self, saved: Mapping[str, Any]) -> str:
        """Why saved factors have not this layer's sizes as it is now; "" if they have."""
        for letter, needed in self.stored_shapes.items():
            if letter in saved and tuple(saved[letter].shape) != needed:
                return (
                    f"the checkpoint's factor {letter} of layer {self.name!r} has shape "
                    f"{tuple(saved[letter].shape)}, the model needs {needed}; load it into the "
                    f"model that it was saved from"
                )
        return ""

    @property
    def factor_bytes(self) -> int:
        """Bytes of the running averages here."""
        return 0 if self.factors is None else sum(t.nbytes for t in self.factors.stored.values())

    # ------------------------------------------------------------------------------------ inverse

    def install_inverse(self, inverse: Inverse) -> None:
        """Precondition with an inverse from now on."""
        self.inverse = inverse

    def mark_solved(self) -> None:
        """Mark the layer as solved by its gradient workers, this process or others."""
        self.solved = True
        self.no_statistics = False
        self.failures = 0

    def count_failed_refresh(self) -> None:
        """Count a refresh without a valid decomposition; a last inverse stays."""
        self.no_statistics = False
        self.failures += 1

    def drop_inverse_at_refresh(self, no_statistics: bool) -> None:
        """Drop the inverse at a refresh. ``no_statistics``: no process captured a pair."""
        self.no_statistics = no_statistics
        self.drop_inverse()

    def drop_inverse(self) -> None:
        """Forget the inverse: the layer runs on its base gradient until it is solved again."""
        self.inverse = None
        self.solved = False

    @property
    def inverse_bytes(self) -> int:
        """Bytes of the inverse here."""
        return 0 if self.inverse is None else sum(t.nbytes for t in self.inverse.tensors)


# Bytes of gradients that are preconditioned together, unless one layer alone has more. On a CPU a
# batch saves calls alone, and what has been computed is to be found in its cache.
CPU_BATCH_BYTES, BATCH_BYTES = 2**20, 64 * 2**20

Gradients: TypeAlias = Callable[[Tensor], Tensor | None]
"""The gradient of a parameter, if it has one."""


def to_matrices(gradients: list[Tensor], layout: Layout) -> Tensor:
    """The gradients of equal layers, one after the other, as ``(layers x groups, out, in)``.

    It is a view of a single one wherever that is possible.
    """
    number = len(layout.views)
    grouped = len(layout.views[0]) > 2
    layers = len(gradients) // number
    views = [g.reshape(view) for g, view in zip(gradients, layout.views * layers, strict=True)]
    if layers > 1 and gradients[0].device.type == "cpu":
        # Products of matrices whose rows lie apart take twice as long.
        columns = [torch.stack(views[i::number]) for i in range(number)]
        whole = columns[0] if number == 1 else torch.cat(columns, layout.axis + 1)
    else:
        whole = views[0] if len(views) == 1 else torch.cat(views, layout.axis)
        whole = whole.unflatten(layout.axis, (layers, -1)).movedim(layout.axis, 0)
    if grouped:
        whole = whole.flatten(0, 1)
    return whole.mT if layout.transposed else whole


def split_by_parameter(matrices: Tensor, layout: Layout, layers: int = 1) -> Sequence[Tensor]:
    """The parts of equal layers' ``(layers x groups, out, in)`` by parameter, stacked.

    Each is ``(layers, ...)``, a view; the rest of its shape has the order of the parameter's.
    """
    stacked = matrices.mT if layout.transposed else matrices
    if len(layout.views[0]) > 2:
        stacked = stacked.unflatten(0, (layers, -1))
    sizes = [view[layout.axis] for view in layout.views]
    parts: Sequence[Tensor] = stacked.split_with_sizes(sizes, layout.axis + 1)
    return parts


class LayerBatch:
    """Layers whose gradients are matrices of one shape, dtype and device, laid out alike."""

    def __init__(self, blocks: Sequence[KroneckerBlock], inverse: Inverse | None = None) -> None:
        self.blocks = list(blocks)
        self.params = [p for block in self.blocks for p in block.params]
        self._dtype = self.blocks[0].work_dtype
        self._layout = self.blocks[0].layout
        self._inverse = inverse  # of all layers, ``(layers x groups, ...)``
        self._parts = None if inverse is None else self._inverses()  # it stands for

    def _inverses(self) -> list[Inverse]:
        return [block.inverse for block in self.blocks if block.inverse is not None]

    @property
    def inverse(self) -> Inverse:
        """The inverses of all layers, which have one, as one; each layer's is then a part of it."""
        parts = self._inverses()
        if self._inverse is None or parts != self._parts:
            entries = [part.entries for part in parts]
            stacks = [stack_in_place(entries, name).flatten(0, 1) for name in entries[0]]
            self._inverse = parts[0].with_tensors(stacks)
            self._parts = parts
        return self._inverse

    def select(
        self, blocks: Sequence[KroneckerBlock], inverses: Sequence[Inverse] | None = None
    ) -> LayerBatch:
        """The bank of some of the layers, with their own inverses or with others."""
        if inverses is None:
            if len(blocks) == len(self.blocks):
                return self
            inverses = [block.inverse for block in blocks if block.inverse is not None]
        columns = zip(*(inverse.tensors for inverse in inverses), strict=True)
        stacks = [as_stack(column).flatten(0, 1) for column in columns]
        return LayerBatch(blocks, inverses[0].with_tensors(stacks))

    def gradient(self, gradient_of: Gradients | None = None) -> Tensor:
        """The gradients, ``(layers x groups, out, in)``; a view of a single one where it can be.

        A bias without a gradient has zeros.
        """
        found: list[Tensor] = []
        for p in self.params:
            g = p.grad if gradient_of is None else gradient_of(p)
            found.append(torch.zeros(p.shape, dtype=p.dtype, device=p.device) if g is None else g)
        whole = to_matrices(found, self._layout)
        return whole.to(self._dtype)

    def precondition(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverses, of a dtype, applied to :meth:`gradient`."""
        return self.inverse.precondition(gradient.to(dtype)).to(gradient.dtype)

    def split_layers(self, results: Tensor) -> Sequence[Tensor]:
        """The layers' parts, ``(groups, out, in)`` each."""
        layers: Sequence[Tensor] = results.unflatten(0, (len(self.blocks), -1)).unbind()
        return layers

    def parameter_parts(self, results: Tensor) -> list[Tensor]:
        """The parts of :attr:`params` in results.

        On a device they are contiguous, as most gradients are: one kernel writes those of one
        stride.
        """
        parts = split_by_parameter(results, self._layout, len(self.blocks))
        if results.device.type != "cpu":
            parts = [part.contiguous() for part in parts]
        return list(chain(*zip(*(part.unbind() for part in parts), strict=True)))


def per_group(numbers: Sequence[float | Tensor], groups: int, like: Tensor) -> Any:
    """The number that all layers have, or each one's for each of its groups.

    Layers that are solved beside training may have been begun at steps of different γ.
    """
    number = merge_numbers(numbers, like)
    if isinstance(number, Tensor) and number.dim() > 0:
        return number.repeat_interleave(groups)
    return number


def batch_layers(blocks: Iterable[KroneckerBlock]) -> list[LayerBatch]:
    """Banks of layers, in their order."""
    blocks = list(blocks)
    keys: list[object] = []
    shares: list[float] = []
    for block in blocks:
        weight, shape = block.weight, block.shape
        # An L's factors are not multiplied in stacks: such layers are few, and wide.
        alone = block if shape.locations else None
        keys.append((shape, block.work_dtype, weight.dtype, weight.device, block.layout, alone))
        most = CPU_BATCH_BYTES if weight.device.type == "cpu" else BATCH_BYTES
        shares.append(block.work_dtype.itemsize * math.prod(shape.gradient_shape) / most)
    return [LayerBatch([blocks[i] for i in group]) for group in group_equal(keys, shares, 1)]

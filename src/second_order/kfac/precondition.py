"""Precondition the gradients, clip and exchange the results, and write ``p.grad``.

    P          (A ⊗ G + γ)⁻¹ ∇ of the layers that this rank preconditions
    change     Σ P·∇ over these layers: the sum of the products of P's and ∇'s elements
    clip       ν, from the change of all layers, equal on all ranks
    p.grad     <- ν P
    exchange   ν P, to the ranks that do not have it

The change estimates how much a step along P changes the predictions. A step along ν P
changes them ν² times as much, so ν is the square root of a bound divided by the change:

- By default (``kl_clip="auto"``), the bound is four times the running average of the
  change, so that a batch of outliers cannot undo progress.
- If ``kl_clip`` is a number κ or a function of the step, the change is Σ lr² |P·∇| and
  the bound is κ: ν = min(1, sqrt(κ / Σ lr² |P·∇|)). The learning rates are those of the
  step if κ is a function, and the largest ones of the schedule if κ is a number.

The ranks form a grid. The ranks of a row are the gradient workers of the same layers,
so they have the same P. A column has one rank of each row, so its ranks together have
the P of every layer. For 4 ranks and 2 gradient workers per layer, ranks 0 and 1 have
the first half of the layers:

                column 0   column 1
    row 0       rank 0     rank 1       layers a, b
    row 1       rank 2     rank 3       layers c, d

A sum over a column is therefore a sum over all layers. Each column exchanges its ν P.

Sources: Pauloski et al. 2022, section 5.1; Ba et al. 2017, eq. 14.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.world import World
from second_order.kfac.plan import LayerPlan, StepPlan, assign_gradient_owners
from second_order.kronecker.block import (
    Gradients,
    KroneckerBlock,
    LayerBatch,
    stack_inverses,
)
from second_order.kronecker.solvers import Inverse
from second_order.optimizers.config import KFACOptions, check_clip
from second_order.training.context import Training
from second_order.utils.checks import AUTO, PEAK_LR, Scalar
from second_order.utils.stages import stage

__all__ = [
    "USUAL_CHANGE",
    "Clip",
    "PreconditionResult",
    "PreconditionedBatch",
    "UsualChange",
    "assign_param_owners",
    "compare_inverses",
    "kl_change",
    "kl_clip_factor",
    "precondition_batches",
    "precondition_gradients",
    "scale_tensors",
    "write_gradients",
]

USUAL_CHANGE = ("usual_change_bound", "usual_change_steps")
"""Checkpoint entries, shared numbers: ``bound`` and ``steps`` of UsualChange."""

# The bound, in average changes: a step may be twice as long as usual.
MAX_RATIO = 4.0
WINDOW = 20  # steps that the running average remembers
WARMUP_STEPS = 5  # first steps, which are not clipped
MIN_RATIO = 4e-4  # of the bound to a change; its square root, 1/50, is the least ν


# ----------------------------------------------------------------------------- the clip


def kl_change(products: Tensor, learning_rates: Sequence[Scalar]) -> Tensor:
    """Return Σ lr² |P·∇| over layers, an estimate of the change of predictions.

    lr² Σ P·∇ estimates twice the KL divergence between the model before and after the
    step. κ bounds this number, not its half. A layer whose product is not finite does
    not count.

    Args:
        products: P·∇ of each layer, ``(layers,)``; at least one.
        learning_rates: One rate per layer. This is faster if layers of one parameter
            group share the object.
    """
    # Square each distinct rate once. On a device, every square is a kernel launch.
    squares: dict[int, Tensor] = {}
    for rate in learning_rates:
        if id(rate) not in squares:
            squares[id(rate)] = products.new_ones(()) * rate**2
    weights = torch.stack([squares[id(rate)] for rate in learning_rates])
    weighted = products.abs() * weights
    return weighted.nan_to_num(0.0, posinf=0.0).sum()


def kl_clip_factor(change: Tensor, kl_clip: Scalar) -> Tensor:
    """Return ν = min(1, sqrt(κ / Σ lr² |P·∇|)), so that ν² Σ lr² |P·∇| <= κ."""
    return torch.sqrt(kl_clip / change).clamp(max=1.0)


class UsualChange:
    """The running average of the steps' changes Σ P·∇, and the bound that it sets.

    The bound is four times the average. With the weight w of a new step, which is 1/20
    (and 1/n at the n-th of the first 20 steps),

        bound <- (1 - w) bound + 4 w max(min(change, bound), change / 2500)

    A change above the bound counts as the bound, so that outliers move the average
    little. If changes stay large, the bound is multiplied by 0.95 + 0.2 = 1.15 per step
    until it has caught up. The last term lets a bound of 0 grow: the step keeps at
    least 1/50 of its length. The first five changes count in full, and are not clipped.

    The bound is on the device of the changes. The host reads it only for checkpoints.

    Attributes:
        bound: Four times the average; a float before the first change.
        steps: Steps in the average, at most :data:`WINDOW`.
    """

    def __init__(self) -> None:
        self.bound: Tensor | float = 0.0
        self.steps = 0

    def update(self, change: Tensor) -> Tensor | None:
        """Add a step's change to the average, and return its ν; None in the warmup."""
        weight = max(1 / WINDOW, 1 / (self.steps + 1))
        is_warm = self.steps >= WARMUP_STEPS
        self.steps = min(self.steps + 1, WINDOW)
        if not isinstance(self.bound, Tensor):
            self.bound = change.new_full((), self.bound)
        if not is_warm:
            self.bound.mul_(1 - weight).add_(change, alpha=MAX_RATIO * weight)
            return None
        # ν² = bound / change, and ν² change is the change that counts. ``tiny`` avoids
        # 0 / 0. A change that rounding made negative is not large.
        tiny = torch.finfo(change.dtype).tiny
        ratio = ((self.bound + tiny) / change.clamp_min(tiny)).clamp(MIN_RATIO, 1.0)
        self.bound.mul_(1 - weight).addcmul_(change, ratio, value=MAX_RATIO * weight)
        return torch.sqrt(ratio)

    def saved(self) -> dict[str, float]:
        """Return the shared numbers of a checkpoint."""
        bound_name, steps_name = USUAL_CHANGE
        return {bound_name: float(self.bound), steps_name: float(self.steps)}

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load the average of a checkpoint. Without one, start an empty average."""
        bound_name, steps_name = USUAL_CHANGE
        self.bound = 0.0
        self.steps = 0
        for part in saved.values():
            if bound_name in part and steps_name in part:
                self.bound = part.number(bound_name)
                self.steps = int(part.number(steps_name))
                return


class Clip:
    """Computes ν of a step from the change of all layers."""

    def __init__(self, training: Training, options: KFACOptions) -> None:
        self._training = training
        self._kl_clip: Any = options.kl_clip
        self.usual: UsualChange | None = None
        if options.kl_clip == AUTO:
            self.usual = UsualChange()
        # A constant κ goes with the largest lr of a schedule. While the clip is active,
        # the step is then lr ν P = (lr / lr_peak) sqrt(κ / Σ |P·∇|) P, which follows
        # the schedule. With the lr of the step, lr would cancel out.
        self._rate = "lr" if callable(options.kl_clip) else PEAK_LR
        self._message_dtype = torch.promote_types(options.inv_dtype, torch.float32)

    def change(self, batches: Sequence[PreconditionedBatch]) -> Tensor:
        """Return Σ lr² |P·∇| over the batches' layers; Σ P·∇ if κ is "auto"."""
        if not batches:
            return torch.zeros((), dtype=torch.float32, device=self._training.device)
        stacks = [preconditioned.products() for preconditioned in batches]
        products = torch.cat([stack.to(stacks[0]) for stack in stacks])
        if self.usual is not None:
            # Inverses are positive definite, so only rounding can make P·∇ negative.
            return products.nan_to_num(0.0, posinf=0.0, neginf=0.0).sum()

        rates: dict[int, Scalar] = {}
        for group in self._training.groups:
            for p in group["params"]:
                rates[id(p)] = group[self._rate]
        layer_rates: list[Scalar] = []
        for preconditioned in batches:
            blocks = preconditioned.batch.blocks
            layer_rates.extend(rates[id(block.weight)] for block in blocks)
        return kl_change(products, layer_rates)

    def compute_factor(self, change: Tensor, world: World) -> Tensor | None:
        """Return ν from the change of each rank's layers; None if nothing is clipped.

        Collective over ``world``.

        Raises:
            ValueError: If a callable κ is not positive.
        """
        if world.size > 1:
            change = change.to(self._message_dtype)
            with stage("precondition_exchange"):
                world.all_reduce([change]).wait()
        if self.usual is not None:
            return self.usual.update(change)
        kl_clip = self._kl_clip
        if callable(kl_clip):
            kl_clip = kl_clip(self._training.steps)
            if kl_clip is None:
                return None
            check_clip(kl_clip)
        return kl_clip_factor(change, kl_clip)


# ----------------------------------------------------------------------- P of this rank


class PreconditionResult(NamedTuple):
    """The result of preconditioning a step's gradients.

    Attributes:
        clip_factor: ν, a scalar; None if nothing was clipped.
        cosines: Between P by the old and by the new inverse, of the refreshed layers
            that this rank preconditions. Scalars on the device.
    """

    clip_factor: Scalar | None
    cosines: dict[KroneckerBlock, Tensor]


class PreconditionedBatch(NamedTuple):
    """Layers of equal shape that have an inverse and a gradient.

    Attributes:
        batch: The layers.
        gradient: ∇, ``(layers x groups, out, in)``.
        result: P, of the same shape.
    """

    batch: LayerBatch
    gradient: Tensor
    result: Tensor

    def products(self) -> Tensor:
        """Return P·∇ of each layer, ``(layers,)``."""
        num_layers = len(self.batch.blocks)
        if num_layers == 1 and self.result.is_cpu:
            # A dot product needs no full-size temporary.
            product = torch.dot(self.result.flatten(), self.gradient.flatten())
            return product.unsqueeze(0)
        products = (self.result * self.gradient).sum((1, 2))
        if len(products) == num_layers:
            return products
        return products.view(num_layers, -1).sum(1)  # over the groups of each layer


def precondition_batches(
    batches: Iterable[LayerBatch],
    dtype: torch.dtype,
    gradient_of: Gradients | None = None,
    among: Container[KroneckerBlock] | None = None,
) -> list[PreconditionedBatch]:
    """Precondition the layers that have an inverse and a gradient.

    Args:
        batches: The layers that this rank preconditions.
        dtype: Dtype of the inverses.
        gradient_of: Returns the gradient of a parameter; None for ``p.grad``.
        among: The layers to precondition; None for all.
    """
    preconditioned: list[PreconditionedBatch] = []
    for batch in batches:
        ready: list[KroneckerBlock] = []
        for block in batch.blocks:
            is_selected = among is None or block in among
            if is_selected and block.inverse is not None and block.has_gradient:
                ready.append(block)
        if not ready:
            continue
        ready_batch = batch
        if len(ready) < len(batch.blocks):
            inverses = [block.inverse for block in ready if block.inverse is not None]
            ready_batch = LayerBatch(ready, stack_inverses(inverses))
        gradient = ready_batch.gradient(gradient_of)
        result = ready_batch.precondition(gradient, dtype)
        preconditioned.append(PreconditionedBatch(ready_batch, gradient, result))
    return preconditioned


def compare_inverses(
    batches: Iterable[PreconditionedBatch],
    previous: Mapping[KroneckerBlock, Inverse],
    dtype: torch.dtype,
) -> dict[KroneckerBlock, Tensor]:
    """Return the cosine between P by the previous and by the new inverse of each layer.

    It is NaN if the layer's gradient is zero.

    Args:
        batches: The layers, preconditioned by their new inverses.
        previous: The previous inverses of some of them.
        dtype: Dtype of the inverses.
    """
    cosines: dict[KroneckerBlock, Tensor] = {}
    for preconditioned in batches:
        batch = preconditioned.batch
        blocks = batch.blocks
        refreshed = [i for i, block in enumerate(blocks) if block in previous]
        if not refreshed:
            continue

        # P with the previous inverses and with the new ones, (layers, elements).
        gradient = batch.select(preconditioned.gradient, refreshed)
        old_inverse = stack_inverses([previous[blocks[i]] for i in refreshed])
        old_result = old_inverse.precondition(gradient.to(dtype)).to(gradient.dtype)
        new_result = batch.select(preconditioned.result, refreshed)
        old_rows = old_result.reshape(len(refreshed), -1)
        new_rows = new_result.reshape(len(refreshed), -1)

        # The cosines.
        old_lengths = torch.linalg.vector_norm(old_rows, dim=1)
        new_lengths = torch.linalg.vector_norm(new_rows, dim=1)
        products = torch.linalg.vecdot(old_rows, new_rows)
        batch_cosines = (products / (old_lengths * new_lengths)).unbind()
        for i, cosine in zip(refreshed, batch_cosines, strict=True):
            cosines[blocks[i]] = cosine
    return cosines


def write_gradients(
    batches: Sequence[PreconditionedBatch],
    clip_factor: Scalar | None,
    gradient_of: Gradients | None = None,
) -> None:
    """Write ν P into the gradients.

    P is scaled before it is copied, so that a gradient of a narrow dtype is rounded
    once. It is scaled in place: do not use the batches' results afterwards.

    Args:
        batches: The preconditioned layers.
        clip_factor: ν; None for 1.
        gradient_of: Returns the gradient of a parameter; None for ``p.grad``.
    """
    if clip_factor is not None:
        results = [preconditioned.result for preconditioned in batches]
        scale_tensors(results, clip_factor)
    gradients: list[Tensor] = []
    values: list[Tensor] = []
    for preconditioned in batches:
        batch = preconditioned.batch
        parts = batch.parameter_parts(preconditioned.result)
        for p, part in zip(batch.params, parts, strict=True):
            gradient = p.grad if gradient_of is None else gradient_of(p)
            if gradient is not None:
                gradients.append(gradient)
                values.append(part.reshape_as(gradient))
    if gradients:
        torch._foreach_copy_(gradients, values)


def scale_tensors(tensors: Iterable[Tensor], factor: Scalar) -> None:
    """Multiply tensors by a scalar in place, with one kernel per device and dtype."""
    same_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        same_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), members in same_kind.items():
        scalar = torch.as_tensor(factor, dtype=dtype, device=device)
        torch._foreach_mul_(members, scalar)


# ----------------------------------------------------------------------- P on all ranks


def precondition_gradients(
    step_plan: StepPlan,
    clip: Clip | None,
    dtype: torch.dtype,
    previous: Mapping[KroneckerBlock, Inverse],
    owners: Mapping[Tensor, int] | None = None,
) -> PreconditionResult:
    """Precondition this rank's layers, write ν P, and exchange it with other ranks.

    Args:
        step_plan: The layers of this rank, and the ranks that it exchanges ν P with.
        clip: Computes ν; None for no clip.
        dtype: Dtype of the inverses.
        previous: The previous inverses of refreshed layers.
        owners: If each mean gradient is only at its owner: the owner's position in the
            column, for the parameters of layers and all others. None if all ranks have
            the mean gradients. Then only the gradients of layers are exchanged.
    """
    # Precondition, and compare the old and the new inverses.
    batches = precondition_batches(step_plan.batches, dtype)
    cosines: dict[KroneckerBlock, Tensor] = {}
    if previous:
        cosines = compare_inverses(batches, previous, dtype)

    # Clip by the change of all layers. If no layer has an inverse, there is no P, and
    # the usual change does not count this step.
    solved = [block for block in step_plan.layers if block.solved]
    clip_factor: Scalar | None = None
    if clip is not None and solved:
        clip_factor = clip.compute_factor(clip.change(batches), step_plan.column)
    write_gradients(batches, clip_factor)

    # Broadcast ν P within the column. The position of a rank in the column is its row.
    if step_plan.column.size > 1:
        if owners is None:
            owners = {
                p: step_plan.layers[block].row for block in solved for p in block.params
            }
        # The broadcast is in place, so p.grad receives ν P. If a parameter has no
        # gradient, it has none on any rank. Zeros then replace it in the messages.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in owners]
        with stage("precondition_exchange"):
            step_plan.column.broadcast(gradients, owners.values())
    return PreconditionResult(clip_factor, cosines)


def assign_param_owners(
    layers: Mapping[KroneckerBlock, LayerPlan], params: Sequence[Tensor], num_ranks: int
) -> dict[Tensor, int]:
    """Return the owner of each parameter's gradient, for layers and other parameters.

    A layer has one gradient worker here, which owns its gradients. The grid of ranks
    therefore has one column, and the position of a rank in the column is its rank.
    """
    layer_owners: dict[int, int] = {}
    for block, layer in layers.items():
        for p in block.params:
            layer_owners[id(p)] = layer.workers[0]
    sizes = [p.numel() for p in params]
    fixed_owners = [layer_owners.get(id(p)) for p in params]  # None outside of layers
    owners = assign_gradient_owners(sizes, fixed_owners, num_ranks)
    return dict(zip(params, owners, strict=True))

"""Preconditioned gradients: P by each layer's gradient workers, sent to all, clipped, in p.grad.

found     P = (A ⊗ G + γ)⁻¹ ∇ of the layers that this rank preconditions
change    Σ |P·∇| over its layers, with the squares of their learning rates
exchange  P, and each part of the change, to the ranks that do not have them
clip      ν from the whole change, the same on every rank
p.grad    <- ν P

ν = min(1, sqrt(κ / Σ lr² |P·∇|)) bounds a step, at the learning rates and the bound of that step.
By default κ is not given: Σ P·∇, without learning rates, may be at most four times its running
average, so that a batch of outliers cannot throw the model back.

Sources: Pauloski et al. 2022, section 5.1; Ba et al. 2017, eq. 14.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.world import World
from second_order.kfac.plan import LayerPlan, StepPlan, gradient_owners
from second_order.kronecker.block import Gradients, KroneckerBlock, LayerBatch
from second_order.kronecker.solvers import Inverse
from second_order.kronecker.storage import as_stack
from second_order.optimizers.config import KFACOptions, check_clip
from second_order.training.context import Training
from second_order.utils.checks import AUTO, PEAK_LR, Scalar
from second_order.utils.stages import stage

__all__ = [
    "USUAL_CHANGE",
    "Clip",
    "Preconditioned",
    "Preconditioning",
    "UsualChange",
    "compare",
    "kl_change",
    "kl_clip_coefficient",
    "owners_of",
    "precondition",
    "precondition_gradients",
    "scale",
    "write",
]

USUAL_CHANGE = "usual_change_bound", "usual_change_steps"
"""The entries of a checkpoint, in the part of every layer."""

MOST_CHANGE = 4.0  # times the usual change: steps twice as long
REMEMBERED = 20  # steps in the usual change
UNBOUNDED = 5  # first steps, which are not bounded
LEAST_PART = 4e-4  # least share of a change to keep: steps keep at least 1/50 of their length


# ---------------------------------------------------------------------------------------- the clip


def kl_change(products: Sequence[Tensor], learning_rates: Sequence[Scalar]) -> Tensor:
    """Σ lr² |P·∇| over layers, which estimates how far a step moves the model's predictions.

    lr² Σ P·∇ estimates twice the KL divergence between the model before and after the step. A layer
    whose product is not finite is left out, so that it cannot spoil the sum.

    Args:
        products: Stacks of P·∇ of one or more layers each; at least one stack.
        learning_rates: One rate per layer; layers of one group have the same object.
    """
    stack = torch.cat([each.to(products[0]) for each in products]).abs()
    distinct = {id(rate): rate for rate in learning_rates}
    squares = {key: stack.new_ones(()) * rate**2 for key, rate in distinct.items()}
    weighted = stack * torch.stack([squares[id(rate)] for rate in learning_rates])
    return weighted.nan_to_num(0.0, posinf=0.0).sum()


def kl_clip_coefficient(change: Tensor, kl_clip: Scalar) -> Tensor:
    """ν = min(1, sqrt(κ / Σ lr² |P·∇|)), which bounds the change by κ."""
    return torch.sqrt(kl_clip / change).clamp(max=1.0)


class UsualChange:
    """The running average of the steps' changes Σ P·∇, and the bound that follows from it.

    A change above the bound counts as the bound, so that outliers move the average little. If
    changes stay large, the average grows by about 15% per step until it has caught up. The bound
    is a scalar on the changes' device; the host reads it only for checkpoints.
    """

    def __init__(self) -> None:
        self.bound: Tensor | float = 0.0  # four times the average; a float before the first change
        self.steps = 0  # in the average, counted up to those that it remembers

    def coefficient(self, change: Tensor) -> Tensor | None:
        """ν for the change of a step, which the average takes in; None in the first steps."""
        share = max(1 / REMEMBERED, 1 / (self.steps + 1))
        bounded = self.steps >= UNBOUNDED
        self.steps = min(self.steps + 1, REMEMBERED)
        if not isinstance(self.bound, Tensor):
            self.bound = change.new_full((), self.bound)
        if not bounded:
            self.bound.mul_(1 - share).add_(change, alpha=MOST_CHANGE * share)
            return None
        tiny = torch.finfo(change.dtype).tiny  # a change of 0 is not divided by
        part = ((self.bound + tiny) / (change + tiny)).clamp(LEAST_PART, 1.0)
        self.bound.mul_(1 - share).addcmul_(change, part, value=MOST_CHANGE * share)
        return torch.sqrt(part)

    def saved(self) -> dict[str, float]:
        """What a checkpoint has with every layer."""
        return dict(zip(USUAL_CHANGE, (float(self.bound), float(self.steps)), strict=True))

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over what a checkpoint has; without an entry the average starts empty."""
        names = set(USUAL_CHANGE)
        self.bound = 0.0
        self.steps = 0
        part = next((part for part in saved.values() if part.keys() >= names), None)
        if part is not None:
            self.bound = part.number(USUAL_CHANGE[0])
            self.steps = int(part.number(USUAL_CHANGE[1]))


class Clip:
    """ν of a step, from the change Σ |P·∇| of all layers."""

    def __init__(self, training: Training, options: KFACOptions) -> None:
        self._training = training
        self._kl_clip: Any = options.kl_clip
        self.usual = UsualChange() if options.kl_clip == AUTO else None
        # A constant bound is the bound at the schedule's largest lr and shrinks with lr² below it:
        # ν lr P would otherwise not depend on lr at all while the clip is active.
        self._rate = "lr" if callable(options.kl_clip) else PEAK_LR
        self._dtype = torch.promote_types(options.inv_dtype, torch.float32)  # of messages

    def change(self, found: Sequence[Preconditioned]) -> Tensor:
        """Σ lr² |P·∇| over the layers that were preconditioned; without lr for the usual change."""
        if not found:
            return torch.zeros((), dtype=torch.float32, device=self._training.device)
        products = [each.products() for each in found]
        if self.usual is not None:
            # Inverses are positive: P·∇ can be negative only by rounding.
            stack = torch.cat([each.to(products[0]) for each in products])
            return stack.nan_to_num(0.0, posinf=0.0, neginf=0.0).sum()
        rates: dict[int, Scalar] = {}
        for group in self._training.groups:
            for p in group["params"]:
                rates[id(p)] = group[self._rate]
        blocks = [block for each in found for block in each.bank.blocks]
        return kl_change(products, [rates[id(block.weight)] for block in blocks])

    def coefficient(self, change: Tensor, ranks: World) -> Tensor | None:
        """ν, from the change of each rank's layers; None if this step is not clipped."""
        if ranks.size > 1:
            change = change.to(self._dtype)
            with stage("precondition_exchange"):
                ranks.all_reduce([change]).wait()
        if self.usual is not None:
            return self.usual.coefficient(change)
        bound = self._kl_clip
        if callable(bound):
            bound = bound(self._training.steps)
            if bound is None:
                return None
            check_clip(bound)
        return kl_clip_coefficient(change, bound)


# ------------------------------------------------------------------------------- P of this rank


@dataclass(frozen=True)
class Preconditioning:
    """What preconditioning a step's gradients has come to.

    Attributes:
        clip: ν, a scalar; None where nothing is clipped.
        cosines: Of P by the last and by the new inverse, of layers of this rank that were
            refreshed.
    """

    clip: Scalar | None
    cosines: dict[KroneckerBlock, Tensor]


class Preconditioned(NamedTuple):
    """Layers of a bank that have a gradient, ∇ and P, ``(layers x groups, out, in)``."""

    bank: LayerBatch
    gradient: Tensor
    results: Tensor

    def products(self) -> Tensor:
        """P·∇ of each layer, ``(layers,)``."""
        layers = len(self.bank.blocks)
        if layers == 1 and self.results.device.type == "cpu":  # no full-size temporary
            return torch.dot(self.results.flatten(), self.gradient.flatten()).unsqueeze(0)
        product = (self.results * self.gradient).sum((1, 2))
        return product if len(product) == layers else product.view(layers, -1).sum(1)


def precondition(
    banks: Iterable[LayerBatch],
    dtype: torch.dtype,
    gradient_of: Gradients | None = None,
    among: Container[KroneckerBlock] | None = None,
) -> list[Preconditioned]:
    """Precondition the layers ``among`` those of banks that have an inverse and a gradient."""
    found: list[Preconditioned] = []
    for bank in banks:
        ready: list[KroneckerBlock] = []
        for block in bank.blocks:
            chosen = among is None or block in among
            if chosen and block.inverse is not None and block.has_gradient:
                ready.append(block)
        if ready:
            some = bank if len(ready) == len(bank.blocks) else bank.select(ready)
            gradient = some.gradient(gradient_of)
            results = some.precondition(gradient, dtype)
            found.append(Preconditioned(some, gradient, results))
    return found


def compare(
    found: Iterable[Preconditioned],
    previous: Mapping[KroneckerBlock, Inverse],
    dtype: torch.dtype,
) -> dict[KroneckerBlock, Tensor]:
    """The cosine of P by the last and by the new inverse, of layers whose last inverse is given."""
    cosines: dict[KroneckerBlock, Tensor] = {}
    for bank, gradient, results in found:
        refreshed = [i for i, block in enumerate(bank.blocks) if block in previous]
        if not refreshed:
            continue
        gradients = bank.split_layers(gradient)
        layers = bank.split_layers(results)
        last = bank.select(
            [bank.blocks[i] for i in refreshed],
            [previous[bank.blocks[i]] for i in refreshed],
        )
        stack = as_stack([gradients[i] for i in refreshed]).flatten(0, 1)
        old = last.precondition(stack, dtype).view(len(refreshed), -1)
        new = torch.stack([layers[i] for i in refreshed]).flatten(1)
        lengths = torch.linalg.vector_norm(old, dim=1) * torch.linalg.vector_norm(new, dim=1)
        cosine = torch.linalg.vecdot(old, new) / lengths
        cosines |= zip(last.blocks, cosine.unbind(), strict=True)
    return cosines


def write(
    found: Sequence[Preconditioned],
    coefficient: Scalar | None,
    gradient_of: Gradients | None = None,
) -> None:
    """Write ν P into the gradients. P is clipped first: a narrow dtype rounds once."""
    targets: list[Tensor] = []
    values: list[Tensor] = []
    for bank, _, results in found:
        for p, piece in zip(bank.params, bank.parameter_parts(results), strict=True):
            gradient = p.grad if gradient_of is None else gradient_of(p)
            if gradient is None:
                continue
            value = piece.reshape(gradient.shape)
            if coefficient is not None and gradient.device.type == "cpu":
                torch.mul(value, coefficient, out=gradient)  # one pass over memory instead of two
                continue
            targets.append(gradient)
            values.append(value)
    if targets:
        if coefficient is not None:
            scale(values, coefficient)
        torch._foreach_copy_(targets, values)


def scale(tensors: Iterable[Tensor], coefficient: Scalar) -> None:
    """Multiply tensors by a scalar, in place: one kernel for those of a device and dtype."""
    same_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        same_kind.setdefault((each.device, each.dtype), []).append(each)
    for (device, dtype), members in same_kind.items():
        factor = torch.as_tensor(coefficient, dtype=dtype, device=device)
        torch._foreach_mul_(members, factor)


# ------------------------------------------------------------------------------- P on all ranks


def precondition_gradients(
    step: StepPlan,
    clip: Clip | None,
    dtype: torch.dtype,
    previous: Mapping[KroneckerBlock, Inverse],
    owners: Mapping[Tensor, int] | None = None,
) -> Preconditioning:
    """Precondition the layers of this rank, exchange P with the other ranks, and write ν P.

    Args:
        step: The layers of this rank, and the ranks that it exchanges P with.
        clip: The bound on the change, if there is one.
        dtype: Dtype of the inverses.
        previous: The last inverses of layers that have been refreshed.
        owners: The owner of each gradient, where those that no layer has are at their owners alone
            too; None where they are everywhere.
    """
    ranks = step.column
    found = precondition(step.banks, dtype)
    cosines = compare(found, previous, dtype) if previous else {}

    # Clip by the change of all layers. A step without P is no usual change.
    coefficient: Scalar | None = None
    solved = [block for block in step.layers if block.solved]
    if clip is not None and solved:
        coefficient = clip.coefficient(clip.change(found), ranks)
    write(found, coefficient)

    # Give the results to the ranks that do not have them.
    if ranks.size > 1:
        if owners is None:
            owners = {p: step.layers[block].row for block in solved for p in block.params}
        # Every rank expects a message, also where a parameter has no gradient.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in owners]
        with stage("precondition_exchange"):
            ranks.broadcast(gradients, owners.values())
    return Preconditioning(coefficient, cosines)


def owners_of(
    layers: Mapping[KroneckerBlock, LayerPlan], params: Sequence[Tensor], ranks: int
) -> dict[Tensor, int]:
    """The owner of each parameter's gradient, in a layer or not."""
    owner_of = {id(p): layer.workers[0] for b, layer in layers.items() for p in b.params}
    owners = [owner_of.get(id(p)) for p in params]
    found = gradient_owners([p.numel() for p in params], owners, ranks)
    return dict(zip(params, found, strict=True))

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

import math
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.fsdp import is_dtensor
from second_order.distributed.world import World
from second_order.kfac.plan import LayerPlan, StepPlan, gradient_owners
from second_order.kronecker.block import Bank, Gradients, KroneckerBlock
from second_order.kronecker.solvers import Inverse
from second_order.optimizers.config import KFACOptions, check_clip
from second_order.training.context import Training
from second_order.utils.checks import AUTO, PEAK_LR, Scalar
from second_order.utils.stages import stage

__all__ = [
    "USUAL_CHANGE",
    "Clip",
    "OwnerHook",
    "Preconditioned",
    "Preconditioning",
    "UsualChange",
    "compare",
    "kl_change",
    "kl_clip_coefficient",
    "last_results",
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
    squares: dict[int, Tensor] = {}
    for rate in learning_rates:
        if id(rate) not in squares:
            squares[id(rate)] = stack.new_ones(()) * rate**2
    if len(squares) == 1:
        stack = stack * squares[id(learning_rates[0])]
    else:
        stack = stack * torch.stack([squares[id(rate)] for rate in learning_rates])
    return stack.nan_to_num(0.0, posinf=0.0).sum()


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

    def bound(self) -> float | None:
        """κ, the bound on the change at this step; None for no clip.

        It is infinite if the usual change bounds steps: :meth:`coefficient` has that bound.
        """
        if self.usual is not None:
            return math.inf
        kl_clip = self._kl_clip
        if callable(kl_clip):
            kl_clip = kl_clip(self._training.steps)
            if kl_clip is not None:
                check_clip(kl_clip)
        return cast("float | None", kl_clip)

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

    def coefficient(self, change: Tensor, bound: float) -> Tensor | None:
        """ν for the change of all layers; None where nothing is to be scaled."""
        if self.usual is not None:
            return self.usual.coefficient(change)
        return kl_clip_coefficient(change, bound)


# ------------------------------------------------------------------------------- P of this rank


@dataclass(frozen=True)
class Preconditioning:
    """What preconditioning a step's gradients has come to.

    Attributes:
        clip: ν, a scalar; None where nothing is clipped.
        changes: P₀ · P, |P₀|² and |P|², ``(3,)``, of layers of this rank that were refreshed.
    """

    clip: Scalar | None
    changes: dict[KroneckerBlock, Tensor]


class Preconditioned(NamedTuple):
    """Layers of a bank that have a gradient, ∇ and P, ``(layers x groups, out, in)``."""

    bank: Bank
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
    banks: Iterable[Bank],
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
            some = bank if len(ready) == len(bank.blocks) else bank.some(ready)
            gradient = some.gradient(gradient_of)
            results = some.precondition(gradient, dtype)
            found.append(Preconditioned(some, gradient, results))
    return found


# ------------------------------------------------------------------ what a refresh changes in P


def last_results(
    bank: Bank, blocks: Iterable[KroneckerBlock], dtype: torch.dtype
) -> dict[KroneckerBlock, Tensor | Inverse]:
    """P by the inverses in use of some layers; the inverses where gradients are sharded.

    They are to be compared with what the next inverses give, by :func:`compare`.
    """
    found: dict[KroneckerBlock, Tensor | Inverse] = {}
    whole: list[KroneckerBlock] = []
    for block in blocks:
        if block.inverse is not None and is_dtensor(block.weight):
            found[block] = block.inverse
        elif block.inverse is not None and block.has_gradient:
            whole.append(block)
    if whole:
        some = bank.some(whole)
        results = some.by_layer(some.precondition(some.gradient(), dtype))
        found |= zip(whole, results, strict=True)
    return found


def compare(
    found: Iterable[Preconditioned],
    previous: Mapping[KroneckerBlock, Tensor | Inverse],
    dtype: torch.dtype,
) -> dict[KroneckerBlock, Tensor]:
    """P₀ · P, |P₀|² and |P|², ``(3,)``, of the layers of which P₀, or its inverse, is kept."""
    changes: dict[KroneckerBlock, Tensor] = {}
    for bank, gradient, results in found:
        compared: list[KroneckerBlock] = []
        before: list[Tensor] = []
        after: list[Tensor] = []
        gradients, parts = bank.by_layer(gradient), bank.by_layer(results)
        for block, part, result in zip(bank.blocks, gradients, parts, strict=True):
            last = previous.get(block)
            if last is not None:
                if not isinstance(last, Tensor):
                    last = last.precondition(part.to(dtype)).to(gradient.dtype)
                compared.append(block)
                before.append(last)
                after.append(result)
        if compared:
            old = torch.stack(before).flatten(1)
            new = torch.stack(after).flatten(1)
            pairs = (old, new), (old, old), (new, new)
            rows = torch.stack([torch.linalg.vecdot(*pair) for pair in pairs], 1).unbind()
            changes |= zip(compared, rows, strict=True)
    return changes


def write(
    found: Iterable[Preconditioned],
    coefficient: Scalar | None = None,
    gradient_of: Gradients | None = None,
) -> None:
    """Write P, times a scalar, into the gradients."""
    targets: list[Tensor] = []
    values: list[Tensor] = []
    for bank, _, results in found:
        for p, piece in zip(bank.params, bank.pieces(results), strict=True):
            gradient = p.grad if gradient_of is None else gradient_of(p)
            if gradient is not None:
                targets.append(gradient)
                values.append(piece.reshape(gradient.shape))
    if targets:
        torch._foreach_copy_(targets, values)
    if coefficient is not None:
        scale(targets, coefficient)


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
    training: Training,
    clip: Clip,
    dtype: torch.dtype,
    previous: Mapping[KroneckerBlock, Tensor | Inverse],
    owners: Mapping[Tensor, int] | None = None,
) -> Preconditioning:
    """Precondition the layers of this rank, exchange P with the other ranks, and write ν P.

    Args:
        step: The layers of this rank, and the ranks that it exchanges P with.
        training: The gradients; on all ranks that precondition a layer they are the mean.
        clip: The bound on the change.
        dtype: Dtype of the inverses.
        previous: P by the last inverses, of layers that have been refreshed.
        owners: The owner of each gradient, where those that no layer has are at their owners alone
            too; None where they are everywhere.
    """
    ranks, bound = step.column, clip.bound()
    found = precondition(step.banks, dtype)
    changes = compare(found, previous, dtype) if previous else {}

    # A rank that preconditions everything clips by itself.
    if ranks.size == 1:
        coefficient: Scalar | None = None
        if found and bound is not None:
            coefficient = clip.coefficient(clip.change(found), bound)
        write(found, coefficient)
        return Preconditioning(coefficient, changes)

    # The others get P before it is clipped, with the part that it has in the change.
    wide = torch.promote_types(dtype, torch.float32)
    parts = [*torch.zeros(ranks.size, dtype=wide, device=training.device).unbind()]
    if bound is not None:  # before gradients, of which some are views, are overwritten
        parts[ranks.rank].copy_(clip.change(found))
    write(found)
    solved = [block for block in step.layers if block.solved]
    with stage("precondition_exchange"):
        sent: list[tuple[Tensor, int]] = []
        if owners is None:
            for block in solved:
                for p in block.params:  # zeros where there is none: the others expect a message
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad
                    sent.append((gradient, step.rows[block]))
        else:
            sent += [(p.grad, rank) for p, rank in owners.items() if p.grad is not None]
        if bound is not None:
            sent += zip(parts, range(ranks.size), strict=True)
        _share(ranks, sent)

    if bound is None or not solved:  # a step without P is no usual change
        return Preconditioning(None, changes)
    coefficient = clip.coefficient(torch.stack(parts).sum(), bound)
    if coefficient is not None:
        gradients = [p.grad for block in solved for p in block.params]
        scale([gradient for gradient in gradients if gradient is not None], coefficient)
    return Preconditioning(coefficient, changes)


def owners_of(
    layers: Mapping[KroneckerBlock, LayerPlan], params: Sequence[Tensor], ranks: int
) -> dict[Tensor, int]:
    """The owner of each parameter's gradient, in a layer or not."""
    owner_of = {id(p): layer.workers[0] for b, layer in layers.items() for p in b.params}
    owners = [owner_of.get(id(p)) for p in params]
    found = gradient_owners([p.numel() for p in params], owners, ranks)
    return dict(zip(params, found, strict=True))


def _share(world: World, owned: Sequence[tuple[Tensor, int]]) -> None:
    """Give all ranks tensors that one has."""
    if owned and world.size > 1:
        tensors, owners = zip(*owned, strict=True)
        world.broadcast(tensors, owners)


class OwnerHook:
    """DPKFAC's hook of DistributedDataParallel: gradients go to their owners during the passes.

    ``owners`` is a bound method that gives the owner of each gradient; it is not kept alive.
    """

    def __init__(
        self,
        world: World,
        owners: Callable[[], Mapping[Tensor, int]],
        ddp: DistributedDataParallel,
    ) -> None:
        self._world, self._owners = world, weakref.WeakMethod(owners)
        self._summed_to: dict[Tensor, int] = {}  # since the last step

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants true classes, or nothing
            return self._start(bucket)

        ddp.register_comm_hook(None, hook)

    def _start(self, bucket: Any) -> torch.futures.Future[Any]:
        """Let the means of a bucket come together on their owners."""
        owners = self._owners()
        if owners is None:
            raise RuntimeError("the DPKFAC optimizer of this model's owner hook is gone")
        known, gradients = owners(), bucket.gradients()
        torch._foreach_div_(gradients, float(self._world.size))
        to = {p: known.get(p, 0) for p in bucket.parameters()}  # 0: frozen since DDP was made
        self._summed_to |= to
        summed = self._world.reduce(gradients, list(to.values()))
        if self._world.size == 1:
            done = torch.futures.Future[Any]()
            done.set_result(bucket.buffer())
            return done
        return summed.future().then(lambda _: bucket.buffer())

    def share_moved(self, owners: Mapping[Tensor, int]) -> None:
        """Give all ranks the means that have come to ranks that own them no more."""
        summed, self._summed_to = self._summed_to, {}
        moved = [(p.grad, rank) for p, rank in summed.items() if owners.get(p, rank) != rank]
        _share(self._world, [(grad, rank) for grad, rank in moved if grad is not None])

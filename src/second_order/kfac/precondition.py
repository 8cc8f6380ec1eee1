"""Preconditioned gradients: P by each layer's gradient workers, sent to all, clipped, in p.grad.

ν = min(1, sqrt(κ / Σ lr² |P·∇|)) bounds a step, at the learning rates and the bound of that step.
By default κ is not given: Σ |P·∇|, without learning rates, may be at most four times its running
average, so that a batch of outliers cannot throw the model back.

Sources: Pauloski et al. 2022, section 5.1; Ba et al. 2017, eq. 14.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.distributed.world import World, deliver_parts
from second_order.kfac.layers import Layers
from second_order.kfac.plan import LayerPlan, StepPlan, gradient_owners
from second_order.kronecker.bank import CPU_BANK_BYTES, Bank, Gradients
from second_order.kronecker.block import KroneckerBlock
from second_order.optimizers.config import KFACOptions, check_clip
from second_order.options import AUTO, PEAK_LR, Scalar
from second_order.stages import stage

__all__ = [
    "USUAL_CHANGE",
    "Clip",
    "OwnerHook",
    "Preconditioned",
    "UsualChange",
    "kl_change",
    "kl_clip_coefficient",
    "owners_of",
    "precondition",
    "precondition_by_owners",
    "precondition_by_workers",
    "scale",
    "sum_of_changes",
    "write",
]

USUAL_CHANGE = "usual_change_bound", "usual_change_steps"
"""The entries of a checkpoint, in the part of every layer."""

MOST_CHANGE = 4.0  # times the usual change: steps twice as long
REMEMBERED = 20  # steps in the usual change
UNBOUNDED = 5  # first steps, which are not bounded
LEAST_PART = 4e-4  # least share of a change to keep: steps keep at least 1/50 of their length


def kl_change(products: Sequence[Tensor], learning_rates: Sequence[Scalar]) -> Scalar:
    """Σ lr² |P·∇| over layers, which estimates how far a step moves the model's predictions.

    lr² Σ P·∇ estimates twice the KL divergence between the model before and after the step. A layer
    whose product is not finite is left out, so that it cannot spoil the sum. ``products`` has at
    least one stack, each with the P·∇ of one or more layers; ``learning_rates`` has one rate per
    layer. The sum is a float if the first stack is on the CPU; otherwise it is a scalar on that
    stack's device, and the host does not wait for it.
    """
    if products[0].device.type == "cpu":
        numbers = chain.from_iterable(map(Tensor.tolist, products))
        change = 0.0
        for x, rate in zip(numbers, map(float, learning_rates), strict=True):
            if math.isfinite(x):
                change += abs(x) * rate**2
        return change
    stack = products[0]
    if len(products) > 1:
        stack = torch.cat([each.to(stack) for each in products])
    stack, rates = stack.abs(), {id(rate): rate for rate in learning_rates}
    squares: dict[int, Any] = {key: rate**2 for key, rate in rates.items()}
    if len(squares) == 1:
        stack = stack * squares.popitem()[1]
    else:
        if any(isinstance(rate, Tensor) for rate in rates.values()):
            for key, square in squares.items():  # filled: an upload would be waited for
                squares[key] = stack.new_ones(()) * square
        weights = [squares[id(rate)] for rate in learning_rates]
        stack = torch.stack(torch._foreach_mul(stack.unbind(), weights))
    return stack.nan_to_num(0.0, posinf=0.0).sum()


def sum_of_changes(products: Sequence[Tensor]) -> Scalar:
    """Σ |P·∇| over layers, as :func:`kl_change` with rates of 1, in fewer operations.

    On a device the absolute value is skipped: inverses are positive, so that P·∇ can be negative
    only by rounding.
    """
    if products[0].device.type == "cpu":
        return kl_change(products, [1.0] * sum(map(len, products)))
    stack = products[0]
    if len(products) > 1:
        stack = torch.cat([each.to(stack) for each in products])
    return stack.nan_to_num(0.0, posinf=0.0, neginf=0.0).sum()


def kl_clip_coefficient(change: Scalar, kl_clip: Scalar) -> Scalar:
    """ν = min(1, sqrt(κ / Σ lr² |P·∇|)), which bounds the change by κ."""
    if isinstance(change, Tensor):
        return torch.sqrt(kl_clip / change).clamp(max=1.0)
    return min(1.0, math.sqrt(float(kl_clip) / change)) if change > 0.0 else 1.0


def _identity(group: Mapping[str, Any]) -> tuple[int, int]:
    return id(group), len(group["params"])


class Preconditioned(NamedTuple):
    """Layers of a bank that have a gradient, and P, ``(layers x groups, out, in)``.

    ``products`` are their P·∇, ``(layers,)``, which the clip needs; None if there is no clip.
    """

    bank: Bank
    results: Tensor
    products: Tensor | None


def _product(bank: Bank, gradient: Tensor, results: Tensor) -> Tensor:
    """P·∇ of each layer, ``(layers,)``."""
    if len(bank.blocks) == 1 and results.device.type == "cpu":  # no full-size temporary
        return torch.dot(results.flatten(), gradient.flatten()).unsqueeze(0)
    product = (results * gradient).sum((1, 2))
    if len(product) > len(bank.blocks):
        product = product.view(len(bank.blocks), -1).sum(1)
    return product


class UsualChange:
    """The running average of the steps' changes Σ |P·∇|, and the bound that follows from it.

    A change above the bound counts as the bound, so that outliers move the average little. If
    changes stay large, the average grows by about 15% per step until it has caught up. The bound
    is a float if changes are floats. Otherwise it is a scalar on their device, which is updated in
    place; the host reads it only for checkpoints.
    """

    def __init__(self) -> None:
        self.bound: Scalar = 0.0  # four times the average
        self.steps = 0  # in the average, counted up to those that it remembers

    def coefficient(self, change: Scalar) -> Scalar:
        """ν for the change of a step, which the average takes in; 1 in the first steps."""
        share = max(1 / REMEMBERED, 1 / (self.steps + 1))
        bounded = self.steps >= UNBOUNDED
        self.steps = min(self.steps + 1, REMEMBERED)
        if isinstance(change, Tensor):
            return self._coefficient_on_device(change, share, bounded)
        bound = float(self.bound)
        part = 1.0
        if bounded and change > 0:
            part = min(max(bound / change, LEAST_PART), 1.0)
        self.bound = bound * (1 - share) + MOST_CHANGE * share * part * change
        return math.sqrt(part)

    def _coefficient_on_device(self, change: Tensor, share: float, bounded: bool) -> Tensor:
        if not isinstance(self.bound, Tensor):
            self.bound = change.new_full((), self.bound)
        if not bounded:
            self.bound.mul_(1 - share).add_(change, alpha=MOST_CHANGE * share)
            return torch.ones_like(change)
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
        part = next((part for part in saved.values() if part.keys() >= names), None)
        bound, steps = (0.0, 0.0) if part is None else map(part.number, USUAL_CHANGE)
        self.bound = bound
        self.steps = int(steps)


class Clip:
    """The parts of ν at a step: κ, and the change."""

    def __init__(self, training: Training, options: KFACOptions, layers: Layers) -> None:
        self._training, self._options, self._layers = training, options, layers
        self.usual = UsualChange() if options.kl_clip == AUTO else None
        self._group_of: dict[KroneckerBlock, int] = {}
        self._groups: list[tuple[int, int]] = []  # ids and sizes of the groups indexed above

    def follow(self) -> None:
        """Look up the layers' groups again, as the layers have changed."""
        self._group_of, self._groups = {}, []

    def bound(self) -> float | None:
        """κ, the bound on the change at this step; None for no clip.

        It is infinite if the usual change bounds steps: :meth:`coefficient` has that bound.
        """
        if self.usual is not None:
            return math.inf
        kl_clip: Any = self._options.kl_clip
        if callable(kl_clip):
            kl_clip = kl_clip(self._training.steps)
            if kl_clip is not None:
                check_clip(kl_clip)
        return cast("float | None", kl_clip)

    def _rates(self, blocks: Sequence[KroneckerBlock]) -> list[float | Tensor]:
        """The learning rates of layers by which the change is bounded."""
        # A constant bound is the bound at the schedule's largest lr and shrinks with lr² below it:
        # ν lr P would otherwise not depend on lr at all while the clip is active.
        which = "lr" if callable(self._options.kl_clip) else PEAK_LR
        groups, rates = self._training.groups, list[float | Tensor]()
        now = list(map(_identity, groups))
        if self._groups != now:
            found = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
            self._group_of = {b: found[id(b.weight)] for b in self._layers.active}
            self._groups = now
        by_group: dict[int, float | Tensor] = {}
        for block in blocks:
            number = self._group_of[block]
            if number not in by_group:
                by_group[number] = groups[number][which]
            rates.append(by_group[number])
        return rates

    def coefficient(self, change: Scalar, bound: float) -> Scalar:
        """ν for the change of all layers."""
        if self.usual is not None:
            return self.usual.coefficient(change)
        return kl_clip_coefficient(change, bound)

    def change(self, found: Iterable[Preconditioned]) -> Scalar:
        """Σ lr² |P·∇| over the layers that were preconditioned; without lr for the usual change."""
        blocks, products = list[KroneckerBlock](), list[Tensor]()
        for bank, _, product in found:
            assert product is not None
            products.append(product)
            blocks += bank.blocks
        if not products:
            return 0.0
        if self.usual is not None:
            return sum_of_changes(products)
        return kl_change(products, self._rates(blocks))


def precondition(
    banks: Iterable[Bank],
    dtype: torch.dtype,
    gradient_of: Gradients | None = None,
    among: Container[KroneckerBlock] | None = None,
    *,
    clipped: bool,
) -> list[Preconditioned]:
    """Precondition the layers ``among`` those of banks that have an inverse and a gradient."""
    found: list[Preconditioned] = []
    for bank in banks:
        mine: list[KroneckerBlock] = []
        for block in bank.blocks:
            known = among is None or block in among
            if known and block.inverse is not None and block.has_gradient:
                mine.append(block)
        if mine:
            some = bank if len(mine) == len(bank.blocks) else bank.some(mine)
            gradient = some.gradient(gradient_of)
            results = some.precondition(gradient, dtype)
            if bank.before:
                bank.note_change(some, gradient, results, dtype)
            product = _product(some, gradient, results) if clipped else None
            found.append(Preconditioned(some, results, product))
    return found


def write(
    found: Iterable[Preconditioned],
    scale: Scalar | None = None,
    gradient_of: Gradients | None = None,
) -> None:
    """Write P, times a scale, into the gradients."""
    found = list(found)
    if isinstance(scale, Tensor):
        _scale_on_device([results for _, results, _ in found], scale)
        scale = None
    to, written = list[Tensor](), list[Tensor]()
    for bank, results, _ in found:
        # What no cache holds is scaled as it is written.
        wide = isinstance(scale, float) and results.nbytes > CPU_BANK_BYTES
        pieces = bank.pieces(results, None if wide else scale)
        for p, piece in zip(bank.params, pieces, strict=True):
            gradient = p.grad if gradient_of is None else gradient_of(p)
            if gradient is None:
                continue
            shaped = piece if piece.shape == gradient.shape else piece.reshape(gradient.shape)
            if wide:
                torch.mul(shaped, cast(float, scale), out=gradient)
            else:
                to.append(gradient)
                written.append(shaped)
    if to:
        torch._foreach_copy_(to, written)


def _scale_on_device(results: Iterable[Tensor], scale: Tensor) -> None:
    """Scale tensors in place by a scalar: one kernel for those of a device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in results:
        alike.setdefault((each.device, each.dtype), []).append(each)
    for (device, dtype), tensors in alike.items():
        torch._foreach_mul_(tensors, scale.to(device, dtype))


def precondition_by_workers(
    step: StepPlan, training: Training, clip: Clip, dtype: torch.dtype
) -> Scalar | None:
    """Precondition by gradient workers, which send P to the other ranks; write ν P.

    Every rank has the mean gradients, gets all results, and clips by itself. Returns ν, a scalar;
    None where nothing is clipped.
    """
    bound = clip.bound()
    alone = step.column.size == 1
    found = precondition(step.banks, dtype, clipped=alone and bound is not None)
    if not alone:
        with stage("precondition_exchange"):
            given = _given_to_all(step, found, training.device)
        found = []  # ν is to be alike everywhere, bit for bit: of the same stacks
        for bank in step.everywhere:
            blocks = [block for block in bank.blocks if block.solved and block.has_gradient]
            if blocks:
                some = Bank(blocks)
                results = torch.cat([given[block] for block in blocks])
                product = None if bound is None else _product(some, some.gradient(), results)
                found.append(Preconditioned(some, results, product))
    if not found:
        return None
    with stage("precondition"):
        coefficient = None if bound is None else clip.coefficient(clip.change(found), bound)
        write(found, coefficient)
    return coefficient


def _given_to_all(
    step: StepPlan, found: Iterable[Preconditioned], device: torch.device
) -> dict[KroneckerBlock, Tensor]:
    """P of all solved layers, from the rank of the column that has it; zeros without a gradient."""
    results: dict[KroneckerBlock, Tensor] = {}
    mine: dict[KroneckerBlock, Tensor] = {}
    for bank, stacked, _ in found:
        mine.update(zip(bank.blocks, bank.by_layer(stacked), strict=True))
    everybody = range(step.column.size)
    rows = {block: row for block, row in step.rows.items() if block.solved}
    for dtype in dict.fromkeys(block.work_dtype for block in rows):
        routes = {b: (row, everybody) for b, row in rows.items() if b.work_dtype == dtype}
        shapes = {block: (block.shape.gradient_size,) for block in routes}
        ours: dict[KroneckerBlock, tuple[Tensor]] = {}
        for block in routes:
            if block in mine:
                ours[block] = (mine[block],)
            elif block.inverse is not None:  # without a gradient, too: others expect a message
                size, at = block.shape.gradient_size, block.weight.device
                ours[block] = (torch.zeros(size, dtype=dtype, device=at),)
        received = deliver_parts(step.column, shapes, routes, ours, dtype, device)
        results.update({block: parts[0] for block, parts in received.items()})
    return results


def owners_of(
    layers: Mapping[KroneckerBlock, LayerPlan], params: Sequence[Tensor], ranks: int
) -> dict[Tensor, int]:
    """The owner of each parameter's gradient, in a layer or not."""
    owner_of = {id(p): layer.workers[0] for b, layer in layers.items() for p in b.params}
    owners = [owner_of.get(id(p)) for p in params]
    found = gradient_owners([p.numel() for p in params], owners, ranks)
    return dict(zip(params, found, strict=True))


def precondition_by_owners(
    step: StepPlan,
    training: Training,
    clip: Clip,
    dtype: torch.dtype,
    owners: Mapping[Tensor, int] | None,
) -> Scalar | None:
    """Precondition by owners, which send P to all with their part of the clip's sum; write ν P.

    ``owners`` has the owner of each gradient, where those that nobody preconditions are at their
    owners alone, too; None where they are everywhere. Returns ν, a scalar; None without a clip.
    """
    world, bound = training.world, clip.bound()
    solved = [block for block in step.layers if block.solved]
    found = precondition(step.banks, dtype, clipped=bound is not None)
    changes: list[Tensor] = []
    with stage("precondition"):
        if bound is not None:
            wide = torch.promote_types(dtype, torch.float32)
            changes = [*torch.zeros(world.size, dtype=wide, device=training.device).unbind()]
            change = torch.as_tensor(clip.change(found), dtype=wide, device=training.device)
            changes[world.rank].copy_(change)
        write(found)  # not yet clipped: the whole sum comes with it
    if world.size > 1:
        with stage("precondition_exchange"):
            if owners is None:  # means already, wherever nobody has preconditioned them
                ranks = {p: step.layers[block].workers[0] for block in solved for p in block.params}
                sent = [
                    (torch.zeros_like(p) if p.grad is None else p.grad, ranks[p]) for p in ranks
                ]
            else:
                sent = [(p.grad, rank) for p, rank in owners.items() if p.grad is not None]
            _share(world, [*sent, *zip(changes, range(world.size), strict=False)])
    if bound is None or not solved:  # a step without P is no usual change
        return None
    with stage("precondition"):
        coefficient = clip.coefficient(torch.stack(changes).sum(), bound)
        scale([p.grad for block in solved for p in block.params if p.grad is not None], coefficient)
    return coefficient


def scale(gradients: Sequence[Tensor], coefficient: Scalar) -> None:
    """Multiply gradients by a scalar, in place."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), some in alike.items():
        torch._foreach_mul_(some, torch.as_tensor(coefficient, dtype=dtype, device=device))


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

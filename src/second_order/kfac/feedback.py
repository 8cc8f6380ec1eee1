"""What a refresh tells about the training, and the step scale τ that follows from it.

before preconditioning   s, of the gradient and the last step; the layers' mean curvatures
after preconditioning    one sum over the ranks: s, mean curvatures, what the refresh has changed,
                         and the work of the passes. From it follow τ, the refresh intervals, and
                         the mean curvature of all layers, which sets the floor of γ

Steps of preconditioned weights are τ times as long as the base's. The last step's effect sets τ:

after a step Δ          s = -∇·Δ at the next step, whose mean gradient ∇ is not preconditioned yet:
                        the loss still falls along Δ where s > 0, and rises where the step was too
                        long
S, Z                    <- running averages of the sign of s and of |s|, debiased
τ                       <- τ exp(a (S - b)); in the same step times exp(s / 2 Z) if -s > 2 Z
w                       <- w + (τ - 1) Δ₀               after the base's own step Δ₀: so Δ = τ Δ₀

If τ > 1, b is 0.3: longer steps need more evidence. If τ <= 1, b is -0.3, because s is mostly
noise when the loss falls slowly. While a schedule moves the learning rate, b is -0.3 for every τ,
because the noise falls with the rate. τ is at most 5. Over a base that scales its steps itself, or
while a schedule moves the rate, it is at most 2; if both hold, it is exactly 2. S and τ are updated
when layers are refreshed: at every step at first, rarely later. If τ grows, a is multiplied by the
steps since the last update, at most 4. While τ is 1, only the step before an update costs anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.fsdp import is_dtensor, like, local, sharded_like
from second_order.kfac.plan import StepPlan
from second_order.kfac.solve import stacked_means
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.storage import in_groups, numbers_of
from second_order.training.context import Training
from second_order.utils.checks import Scalar, as_scalar

__all__ = [
    "ADAPTIVE",
    "LAST_STEP",
    "LAST_STEP_KNOWN",
    "PLAIN",
    "STEP_LENGTH",
    "STEP_SIGN",
    "Feedback",
    "Lengths",
    "Observation",
    "StepLength",
    "observe",
    "share_feedback",
]

STEP_SIGN = "step_sign"
STEP_LENGTH = (
    *("step_length", STEP_SIGN, "step_size", "step_weight"),
    *("step_looked_at", "step_rate", "step_rate_changed"),
)
"""The entries of a checkpoint, in the part of every layer: τ, S, Z and the weight of these two;
when τ was last looked at, the rate at the last refresh, and when that last moved. Step numbers are
saved plus one, so that 0 means never."""

LAST_STEP, LAST_STEP_KNOWN = "last_step", "last_step_known"
"""The entries of a checkpoint, in the part of each parameter: the last step as scaled by τ, negated
(-Δ), and 1 if the next refresh may look at it, otherwise 0."""

JOINED_BYTES = 64 * 2**20  # of gradients and steps whose products are taken together

PAST = 0.9  # weight of the past in S and Z
LONGER, SHORTER = 0.2, 1.0  # a, for each step where τ grows, and where it falls
COUNTED = 4  # steps between two looks that count where τ grows, at most
LEVEL = 0.3  # b where τ > 1 and the rate is constant, and -b elsewhere
SCHEDULED = 2.0  # τ at most, while a schedule moves the rate
RISES = 2.0  # times Z: a rise that shortens steps at once
RECENT = 0.1  # of the steps so far, within which a rate that moves follows a schedule


class Lengths(NamedTuple):
    """The bounds of τ."""

    least: float
    most: float
    least_scheduled: float  # while a schedule moves the rate; SCHEDULED is the upper bound then


# Chosen as the bounds of drift are.
PLAIN = Lengths(least=0.02, most=5.0, least_scheduled=0.02)
ADAPTIVE = Lengths(least=0.02, most=2.0, least_scheduled=2.0)


def _product(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Σ x · y over pairs, a scalar in float32; None of none. On a device many are joined."""
    keys: list[object] = []
    for i, (x, y) in enumerate(pairs):
        alone = i if x.device.type == "cpu" else None  # there a copy costs more than a call
        keys.append((x.device, x.dtype, y.dtype, alone))
    sizes = [x.nbytes + y.nbytes for x, y in pairs]
    found: list[Tensor] = []
    for group in in_groups(keys, sizes, JOINED_BYTES):
        x, y = pairs[group[0]][0].flatten(), pairs[group[0]][1].flatten()
        if len(group) > 1:
            x = torch.cat([pairs[i][0].flatten() for i in group])
            y = torch.cat([pairs[i][1].flatten() for i in group])
        product = torch.vdot(x, y.to(x.dtype)).float()
        found.append(product.to(found[0].device) if found else product)
    return torch.stack(found).sum() if found else None


class StepLength:
    """The factor τ of the steps of preconditioned weights; the same on every rank."""

    def __init__(self, lengths: Lengths | None = None) -> None:
        self._lengths = lengths
        self.factor = 1.0  # τ
        self._sign = 0.0  # S
        self._size = 0.0  # Z
        self._weight = 0.0
        self._looked_at = -1
        self._rate = math.nan
        self._rate_changed = -1
        self._before: dict[Tensor, Tensor] = {}  # weights before the base's step
        self._step: dict[Tensor, Tensor] = {}  # -Δ

    def measure(
        self, step: StepPlan, rows: bool, groups: Iterable[Mapping[str, Any]]
    ) -> Tensor | None:
        """The number s of this rank's parameters, before gradients are preconditioned.

        None if the last step was not kept; it is dropped.

        Args:
            step: The layers, and those that this rank reports.
            rows: Whether FSDP2 has sharded gradients: then each rank reports its rows.
            groups: The parameter groups; some of them may maximize.
        """
        last, self._step = self._step, {}
        if not last:
            return None
        ascending = {p for group in groups if group.get("maximize") for p in group["params"]}
        reporting = {*step.reporting}
        pairs: list[tuple[Tensor, Tensor]] = []
        for block in step.layers:
            valid = block.solved and not block.lost and not block.state.unverified
            if valid and (block in reporting or (rows and is_dtensor(block.weight))):
                for p in block.params:
                    if p.grad is not None and p in last:
                        gradient = -local(p.grad) if p in ascending else local(p.grad)
                        pairs.append((gradient, last[p].to(p.device)))
        return _product(pairs)

    def keep(self, blocks: Iterable[KroneckerBlock], wanted: bool) -> bool:
        """Keep weights before the base's step, to scale it, or if :meth:`measure` may want it.

        The step before is dropped. Returns whether any weights are kept.
        """
        self._step, self._before = {}, {}
        if (self._lengths is not None and wanted) or self.factor != 1.0:
            params = [p for block in blocks if block.solved for p in block.params]
            copies = torch._foreach_mul([local(p).detach() for p in params], 1.0) if params else ()
            self._before = dict(zip(params, copies, strict=True))
        return bool(self._before)

    def scale(self, wanted: bool) -> None:
        """Scale the base's step by τ, if it is kept; it is kept on if it is ``wanted``."""
        before, self._before = self._before, {}
        now, old = list(map(local, before)), list(before.values())
        if self.factor != 1.0:
            torch._foreach_lerp_(now, old, 1.0 - self.factor)
        if wanted and self._lengths is not None:
            torch._foreach_sub_(old, now)
            self._step = before

    def follow(self, s: float, rate: float, step: int) -> None:
        """Change τ at a refresh; ``s`` is NaN where the last step was not kept."""
        bounds = self._lengths
        if bounds is None:
            return
        if rate != self._rate and not math.isnan(self._rate):
            self._rate_changed = step
        self._rate = rate
        moves = self._rate_changed >= 0 and step - self._rate_changed <= RECENT * step
        least, most = bounds.least, bounds.most
        if moves:
            least, most = bounds.least_scheduled, SCHEDULED
        change = self._change(s, step, moves) if math.isfinite(s) else 0.0
        self.factor = min(max(self.factor * math.exp(change), least), most)

    def _change(self, s: float, step: int, moves: bool) -> float:
        """The change of log τ that follows from s."""
        rises = -s > RISES * self._size > 0
        change = max(s / self._size, -4.0) / 2 if rises else 0.0
        self._weight = PAST * self._weight + 1
        self._sign += ((s > 0) - (s < 0) - self._sign) / self._weight
        self._size += (abs(s) - self._size) / self._weight
        evidence = self._sign + (LEVEL if moves or self.factor <= 1.0 else -LEVEL)
        if evidence < 0:
            change += SHORTER * evidence
        elif not rises:
            since = 1 if self._looked_at < 0 else step - self._looked_at
            change += LONGER * evidence * min(max(since, 1), COUNTED)
        self._looked_at = step
        return change

    def saved(self) -> dict[str, float]:
        """What a checkpoint has with every layer."""
        if self._lengths is None:
            return {}
        rate = 0.0 if math.isnan(self._rate) else self._rate
        steps = self._looked_at + 1, rate, self._rate_changed + 1
        numbers = self.factor, self._sign, self._size, self._weight, *steps
        return dict(zip(STEP_LENGTH, numbers, strict=True))

    def saved_step(self, p: Tensor, room: bool) -> dict[str, Any]:
        """What a checkpoint has of the last step of a parameter, as it is sharded.

        ``room`` asks for zeros where there is nothing.
        """
        if self._lengths is None:
            return {}
        step = self._step.get(p)
        found: dict[str, Any] = {LAST_STEP_KNOWN: int(step is not None)}
        if step is None and room:
            step = torch.zeros_like(local(p))
        if step is not None:
            found[LAST_STEP] = sharded_like(p, step)
        return found

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over what a checkpoint has."""
        self._step, self._before = {}, {}
        wanted = set(STEP_LENGTH)
        found = next((part for part in saved.values() if part.keys() >= wanted), None)
        if self._lengths is None or found is None:
            return
        factor, *averages, looked_at, rate, changed = (found.number(n) for n in STEP_LENGTH)
        self.factor = min(max(factor, self._lengths.least), self._lengths.most)
        self._sign, self._size, self._weight = averages
        self._rate = rate or math.nan
        self._looked_at = int(looked_at) - 1
        self._rate_changed = int(changed) - 1
        for p, part in saved.items():
            if part.get(LAST_STEP_KNOWN, 0) and LAST_STEP in part:
                step = local(like(p, part[LAST_STEP]))
                self._step[p] = step.to(p.device, p.dtype, copy=True)


@dataclass(frozen=True)
class Observation:
    """Numbers on the device that a refresh does not change.

    Attributes:
        rates: The learning rates that are tensors.
        slope: s of the parameters that this rank reports, if there is any.
        curvatures: Stacks of the mean curvatures of ``blocks``.
        blocks: The layers that this rank reports.
    """

    rates: Sequence[Tensor]
    slope: Sequence[Tensor]
    curvatures: Sequence[Tensor]
    blocks: Sequence[KroneckerBlock]

    @property
    def groups(self) -> tuple[Sequence[Tensor], ...]:
        """The tensors to read, in three groups."""
        return self.rates, self.slope, self.curvatures


@dataclass(frozen=True)
class Feedback:
    """What all ranks know after a refresh.

    Attributes:
        slope: s; NaN where the last step was not kept.
        rate: The largest learning rate of a preconditioned group.
        mean_curvature: The mean curvature of all layers; None where none is known.
        work: Operations of the passes since the last step, of all ranks.
        changes: P₀ · P, |P₀|² and |P|² of each layer in turn; zeros of what is not known.
    """

    slope: float
    rate: float
    mean_curvature: float | None
    work: float
    changes: Sequence[float]


def observe(
    training: Training, step: StepPlan, slope: Tensor | None, follows_steps: bool
) -> Observation:
    """Collect what is to be read of the device: learning rates, s, layers' mean curvature."""
    rates = _rates_of(training, step.layers) if follows_steps else []
    curvatures: list[Tensor] = []
    blocks: list[KroneckerBlock] = []
    known = {b: b.factors for b in step.reporting if b.factors is not None}
    for same_shape, means in stacked_means(known):
        curvatures.append(means.prod(0).mean(-1))
        blocks += same_shape
    return Observation(
        rates=[rate for rate in rates if isinstance(rate, Tensor)],
        slope=[] if slope is None else [slope],
        curvatures=curvatures,
        blocks=blocks,
    )


def share_feedback(
    training: Training,
    step: StepPlan,
    observed: Observation,
    numbers: Sequence[Sequence[float]] | None,
    changes: Mapping[KroneckerBlock, Tensor],
    follows_steps: bool,
    compares: bool,
) -> Feedback:
    """Sum over the ranks what each reports after a refresh; a collective.

    Args:
        training: The ranks, and the learning rates.
        step: All layers, and those that this rank reports.
        observed: What is on the device.
        numbers: The numbers of ``observed``, if the device has been read.
        changes: P₀ · P, |P₀|² and |P|² of layers, on the device.
        follows_steps: Whether τ follows what steps do to the loss.
        compares: Whether refresh intervals follow what refreshes change.
    """
    blocks = list(step.layers)
    known: Mapping[KroneckerBlock, Sequence[float]] = {}
    if numbers is None or changes:
        *read, changed = numbers_of(*observed.groups, list(changes.values()))
        numbers = read if numbers is None else numbers
        triples = zip(changed[0::3], changed[1::3], changed[2::3], strict=True)
        known = dict(zip(changes, triples, strict=True))
    on_device, slope, curvatures = numbers
    rates = _rates_of(training, blocks) if follows_steps else []
    rate = max([0.0, *on_device, *(rate for rate in rates if not isinstance(rate, Tensor))])

    reporting = [block for block in step.reporting if block.solved]
    local_blocks = set(reporting)
    roots: list[float] = []
    for block, curvature in zip(observed.blocks, curvatures, strict=True):
        if block in local_blocks:
            roots.append(math.sqrt(max(curvature, 0.0)))
    sums = [float(len(slope)), float(len(roots)), float(sum(b.state.work for b in reporting))]
    sums += [sum(slope), sum(roots)]
    for block in blocks if compares else ():
        sums += known.get(block, (0.0,) * 3) if block in local_blocks else (0.0,) * 3
    if training.world.size > 1:
        message = torch.tensor(sums, dtype=torch.float64, device="cpu")
        training.world.on_cpu().all_reduce([message]).wait()
        sums = message.tolist()

    slopes, layers, work, total_slope, sum_of_roots, *all_changes = sums
    # A mean of square roots: one layer of huge curvature raises the others' floor less.
    finite = bool(layers) and math.isfinite(sum_of_roots)
    return Feedback(
        slope=total_slope if slopes else math.nan,
        rate=rate,
        mean_curvature=(sum_of_roots / layers) ** 2 if finite else None,
        work=work,
        changes=all_changes,
    )


def _rates_of(training: Training, blocks: Iterable[KroneckerBlock]) -> list[Scalar]:
    """The learning rates of the groups with parameters of any block."""
    params: set[Tensor] = set()
    for block in blocks:
        params.update(block.params)
    groups = [group for group in training.groups if not params.isdisjoint(group["params"])]
    return [as_scalar(group["lr"]) for group in groups]

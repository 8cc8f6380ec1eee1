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
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.fsdp import dtensor_from_rows, is_dtensor, local_tensor, shard_like
from second_order.distributed.world import flatten, split_into_buckets
from second_order.kfac.inversion import stack_means
from second_order.kfac.plan import StepPlan
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.storage import DeviceRead, Numbers
from second_order.training.context import Training
from second_order.utils.checks import as_scalar

__all__ = [
    "ADAPTIVE",
    "LAST_STEP",
    "LAST_STEP_KNOWN",
    "PLAIN",
    "STEP_LENGTH",
    "Feedback",
    "Lengths",
    "Report",
    "ScaleState",
    "StepLength",
    "report_refresh",
    "share_feedback",
]

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


@dataclass(frozen=True)
class ScaleState:
    """τ, and what its next value depends on. A checkpoint has these entries, in every layer's part.

    Step numbers are plus one, so that 0 means never.
    """

    step_length: float = 1.0  # τ
    step_sign: float = 0.0  # S
    step_size: float = 0.0  # Z
    step_weight: float = 0.0  # of S and Z
    step_looked_at: float = 0.0  # when S and Z were last updated
    step_rate: float = 0.0  # the learning rate at the last refresh
    step_rate_changed: float = 0.0  # when that last moved

    def after(self, s: float, rate: float, step: int, bounds: Lengths) -> ScaleState:
        """The state after a refresh; ``s`` is NaN if the last step was not kept."""
        changed = self.step_rate_changed
        if self.step_rate not in (rate, 0.0):
            changed = step + 1.0
        moves = changed > 0 and step + 1 - changed <= RECENT * step
        least, most = bounds.least, bounds.most
        if moves:
            least, most = bounds.least_scheduled, SCHEDULED

        # Update S and Z, and the logarithm of τ.
        state = replace(self, step_rate=rate, step_rate_changed=changed)
        change = 0.0
        if math.isfinite(s):
            state = state._averaged(s, step)
            change = state._log_change(s, moves, before=self)
        scale = min(max(self.step_length * math.exp(change), least), most)
        return replace(state, step_length=scale)

    def _averaged(self, s: float, step: int) -> ScaleState:
        """The state with s in the running averages S and Z."""
        weight = PAST * self.step_weight + 1
        sign = (s > 0) - (s < 0)
        return replace(
            self,
            step_sign=self.step_sign + (sign - self.step_sign) / weight,
            step_size=self.step_size + (abs(s) - self.step_size) / weight,
            step_weight=weight,
            step_looked_at=step + 1.0,
        )

    def _log_change(self, s: float, moves: bool, before: ScaleState) -> float:
        """The change of log τ that follows from s, with the averages ``before`` it."""
        rises = -s > RISES * before.step_size > 0
        change = max(s / before.step_size, -4.0) / 2 if rises else 0.0
        evidence = self.step_sign + (LEVEL if moves or self.step_length <= 1.0 else -LEVEL)
        if evidence < 0:
            return change + SHORTER * evidence
        if rises:
            return change
        since = 1.0
        if before.step_looked_at > 0:
            since = min(max(self.step_looked_at - before.step_looked_at, 1.0), COUNTED)
        return LONGER * evidence * since


STEP_LENGTH = tuple(each.name for each in fields(ScaleState))


class StepLength:
    """The factor τ of the steps of preconditioned weights; the same on every rank."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self.state = ScaleState()
        self._before: dict[Tensor, Tensor] = {}  # weights before the base's step
        self._step: dict[Tensor, Tensor] = {}  # -Δ

    @property
    def factor(self) -> float:
        """τ."""
        return self.state.step_length

    def measure(
        self, step: StepPlan, rows: bool, groups: Iterable[Mapping[str, Any]]
    ) -> list[Tensor]:
        """The number s of this rank's parameters, before gradients are preconditioned.

        The list is empty if the last step was not kept; it is dropped.

        Args:
            step: The layers, and those that this rank reports.
            rows: Whether FSDP2 has sharded gradients: then each rank reports its rows.
            groups: The parameter groups; some of them may maximize.
        """
        last = self._step
        self._step = {}
        if not last:
            return []
        ascending = {p for group in groups if group.get("maximize") for p in group["params"]}
        reporting = set(step.reporting)
        pairs: list[tuple[Tensor, Tensor]] = []
        for block in step.layers:
            valid = not block.has_lost_factor and not block.unverified
            if valid and (block in reporting or (rows and is_dtensor(block.weight))):
                for p in block.params:
                    if p.grad is not None and p in last:
                        gradient = -local_tensor(p.grad) if p in ascending else local_tensor(p.grad)
                        pairs.append((gradient, last[p].to(p.device)))
        return _product(pairs)

    def keep(self, blocks: Iterable[KroneckerBlock], wanted: bool) -> None:
        """Keep weights before the base's step, to scale it, or if :meth:`measure` may want it.

        The step before is dropped.
        """
        self._step = {}
        self._before = {}
        params = [p for block in blocks if block.solved for p in block.params]
        if params and (wanted or self.factor != 1.0):
            copies = torch._foreach_mul([local_tensor(p).detach() for p in params], 1.0)
            self._before = dict(zip(params, copies, strict=True))

    def scale(self, wanted: bool) -> None:
        """Scale the base's step by τ, if it is kept; it is kept on if it is ``wanted``."""
        before = self._before
        self._before = {}
        now = [local_tensor(p) for p in before]
        old = list(before.values())
        if now and self.factor != 1.0:
            torch._foreach_lerp_(now, old, 1.0 - self.factor)
        if now and wanted:
            torch._foreach_sub_(old, now)
            self._step = before

    def follow(self, s: float, rate: float, step: int) -> None:
        """Change τ at a refresh; ``s`` is NaN where the last step was not kept."""
        self.state = self.state.after(s, rate, step, self._lengths)

    def saved(self) -> dict[str, float]:
        """What a checkpoint has with every layer."""
        return asdict(self.state)

    def saved_step(self, p: Tensor, room: bool) -> dict[str, Any]:
        """What a checkpoint has of the last step of a parameter, as it is sharded.

        ``room`` asks for zeros where there is nothing.
        """
        step = self._step.get(p)
        found: dict[str, Any] = {LAST_STEP_KNOWN: int(step is not None)}
        if step is None and room:
            step = torch.zeros_like(local_tensor(p))
        if step is not None:
            found[LAST_STEP] = dtensor_from_rows(p, step)
        return found

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over what a checkpoint has."""
        self._step = {}
        self._before = {}
        found = next((part for part in saved.values() if part.keys() >= set(STEP_LENGTH)), None)
        if found is None:
            return
        state = ScaleState(**{name: found.number(name) for name in STEP_LENGTH})
        scale = min(max(state.step_length, self._lengths.least), self._lengths.most)
        self.state = replace(state, step_length=scale)
        for p, part in saved.items():
            if part.get(LAST_STEP_KNOWN, 0) and LAST_STEP in part:
                step = local_tensor(shard_like(p, part[LAST_STEP]))
                self._step[p] = step.to(p.device, p.dtype, copy=True)


def _product(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Σ x · y over pairs, a scalar in float32; an empty list if there are no pairs."""
    buckets = split_into_buckets(
        pairs,
        kind=lambda pair: (pair[0].device, pair[0].dtype, pair[1].dtype),
        # On the CPU a copy costs more than a call, so that each pair is a bucket.
        nbytes=lambda pair: JOINED_BYTES if pair[0].is_cpu else pair[0].nbytes + pair[1].nbytes,
        max_bytes=JOINED_BYTES,
    )
    products: list[Tensor] = []
    for bucket in buckets:
        x = flatten([x for x, _ in bucket]) if len(bucket) > 1 else bucket[0][0].flatten()
        y = flatten([y for _, y in bucket]) if len(bucket) > 1 else bucket[0][1].flatten()
        product = torch.vdot(x, y.to(x.dtype)).float()
        products.append(product.to(products[0].device) if products else product)
    return [torch.stack(products).sum()] if products else []


# ------------------------------------------------------------------- what ranks report and receive


@dataclass(frozen=True)
class Report:
    """What this rank reports of a refresh. The numbers may not have been read from the device yet.

    Attributes:
        slopes: s of the parameters that this rank reports; no number if the last step was not kept.
        layers: The layers whose mean curvature this rank reports.
        curvatures: The mean curvature of each.
        rates: The learning rates of the groups with parameters of any layer.
    """

    slopes: Numbers
    layers: Sequence[KroneckerBlock]
    curvatures: Numbers
    rates: Numbers


@dataclass(frozen=True)
class Feedback:
    """What all ranks know after a refresh.

    Attributes:
        slope: s; NaN if the last step was not kept.
        learning_rate: The largest learning rate of the groups with parameters of any layer.
        mean_curvature: The mean curvature of all layers; None if none is known.
        work: Operations of the passes since the last step, of all ranks.
        cosines: Of P by the last and by the new inverse, for each layer in turn; NaN if there was
            no last inverse, or no gradient.
    """

    slope: float
    learning_rate: float
    mean_curvature: float | None
    work: float
    cosines: Sequence[float]


def report_refresh(
    training: Training,
    step: StepPlan,
    layers: Sequence[KroneckerBlock],
    slopes: Sequence[Tensor],
    read: DeviceRead,
) -> Report:
    """Add what this rank reports of a refresh to a read of the device.

    Args:
        training: The parameter groups.
        step: All layers.
        layers: The layers whose mean curvature this rank reports.
        slopes: s of the parameters that this rank reports, if the last step was kept.
        read: The read of the device.
    """
    factors = {block: block.factors for block in layers if block.factors is not None}
    ordered: list[KroneckerBlock] = []
    curvatures: list[Tensor] = []
    for blocks, means in stack_means(factors):
        ordered += blocks
        curvatures.append(means.prod(0).mean(-1))
    return Report(
        slopes=read.add(slopes),
        layers=ordered,
        curvatures=read.add(curvatures),
        rates=_learning_rates(training, step.layers, read),
    )


def _learning_rates(
    training: Training, layers: Iterable[KroneckerBlock], read: DeviceRead
) -> Numbers:
    """The learning rates of the groups with parameters of any layer."""
    params: set[Tensor] = set()
    for block in layers:
        params.update(block.params)
    rates: list[float] = []
    on_device: list[Tensor] = []
    for group in training.groups:
        if not params.isdisjoint(group["params"]):
            rate = as_scalar(group["lr"])
            if isinstance(rate, Tensor):
                on_device.append(rate)
            else:
                rates.append(rate)
    numbers = read.add(on_device)
    return lambda: rates + numbers()


def share_feedback(
    training: Training,
    step: StepPlan,
    report: Report,
    known: Mapping[KroneckerBlock, float],
    cosines: Mapping[KroneckerBlock, Tensor],
    read: DeviceRead,
) -> Feedback:
    """Sum over the ranks what each reports after a refresh; a collective.

    Args:
        training: The ranks.
        step: All layers, and those that this rank reports.
        report: What this rank reports.
        known: Cosines of P by the last and the new inverse, of some layers.
        cosines: The cosines of other layers, on the device.
        read: The read of the device that ``report`` belongs to.
    """
    reporting = [block for block in step.reporting if block.solved]
    compared = [block for block in reporting if block in cosines]
    numbers = read.add([cosines[block] for block in compared])
    measured = {**known, **dict(zip(compared, numbers(), strict=True))}

    # A layer may have failed since its curvature was reported.
    roots: list[float] = []
    for block, curvature in zip(report.layers, report.curvatures(), strict=True):
        if block.solved:
            roots.append(math.sqrt(max(curvature, 0.0)))

    # Sum over the ranks. Each layer has one rank that reports it.
    slope = report.slopes()
    sums = [float(len(slope)), float(len(roots)), sum(slope), sum(roots)]
    sums.append(float(sum(block.work for block in reporting)))
    reported = set(reporting)
    sums += [measured.get(b, math.nan) if b in reported else 0.0 for b in step.layers]
    message = torch.tensor(sums, dtype=torch.float64, device="cpu")
    training.world.on_cpu().all_reduce([message]).wait()

    slopes_known, layers, total_slope, sum_of_roots, work, *all_cosines = message.tolist()
    # A mean of square roots: one layer of huge curvature raises the others' floor less.
    finite = layers > 0 and math.isfinite(sum_of_roots)
    return Feedback(
        slope=total_slope if slopes_known else math.nan,
        learning_rate=max(report.rates(), default=0.0),
        mean_curvature=(sum_of_roots / layers) ** 2 if finite else None,
        work=work,
        cosines=all_cosines,
    )

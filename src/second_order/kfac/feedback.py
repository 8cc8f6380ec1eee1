"""What all ranks learn from a refresh, and the length of steps that follows it.

before preconditioning   s, of the gradient and the last step
after the base's step    one sum over the ranks: s, mean curvatures, what the refresh has changed,
                         and the work of the passes. From it follow τ, the intervals, and the mean
                         curvature of all layers, which sets the floor of γ

Steps of preconditioned weights are τ times as long as the base's. The last step's effect sets τ:

after a step Δ          s = -∇·Δ at the next step, whose mean gradient ∇ is not preconditioned yet:
                        the loss still falls along Δ where s > 0, and rises where the step was too
                        long
S, Z                    <- running averages of the sign of s and of |s|, debiased
τ                       <- τ exp(a (S - b)); in the same step times exp(s / 2 Z) if -s > 2 Z
w                       <- w + (τ - 1) Δ₀               after the base's own step Δ₀: so Δ = τ Δ₀

Steps longer than the base's have to be earned: if τ > 1, b is 0.3. If τ <= 1, b is -0.3, because
s is mostly noise when the loss falls slowly. While a schedule moves the learning rate, b is -0.3
for every τ, because the noise falls with the rate. τ is at most 5. Over a base that scales its
steps itself, or while a schedule moves the rate, it is at most 2; if both hold, it is exactly 2.
S and τ are updated when layers are refreshed: at every step at first, rarely later. If τ grows, a
is multiplied by the steps since the last update, at most 4. While τ is 1, only the step before an
update costs anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.kfac.plan import StepPlan
from second_order.kfac.schedule import Drift
from second_order.kfac.solve import Asked, Solves, stacked_means
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.stacks import in_groups, numbers_of
from second_order.optimizers.config import KFACOptions
from second_order.options import Scalar, as_scalar
from second_order.sharded import is_dtensor, like, local, sharded_like
from second_order.stages import stage

__all__ = [
    "ADAPTIVE",
    "LAST_STEP",
    "LAST_STEP_KNOWN",
    "PLAIN",
    "STEP_LENGTH",
    "STEP_SIGN",
    "Lengths",
    "StepLength",
    "ascending_params",
    "before_refresh",
    "follow_refresh",
    "rates_of",
]

PRICE = {"inverse": 4.0, "eigen": 15.0}  # operations of a solve over n³ of its factors

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
    apart = (x.device.type == "cpu" and i for i, (x, _) in enumerate(pairs))
    keys = [(x.device, x.dtype, y.dtype, a) for (x, y), a in zip(pairs, apart, strict=True)]
    sizes = [x.nbytes + y.nbytes for x, y in pairs]
    found: list[Tensor] = []
    for group in in_groups(keys, sizes, JOINED_BYTES):
        both = ([pairs[i][side].flatten() for i in group] for side in (0, 1))
        x, y = (each[0] if len(each) == 1 else torch.cat(each) for each in both)
        product = torch.vdot(x, y.to(x.dtype)).float()
        found.append(product.to(found[0].device) if found else product)
    return torch.stack(found).sum() if found else None


class StepLength:
    """The factor of the steps of preconditioned weights; the same on every rank."""

    def __init__(self, lengths: Lengths | None = None) -> None:
        self._lengths = lengths
        self.factor = 1.0  # τ
        self.kept = False  # a step is kept, the last or the coming one, to be scaled or looked at
        self.measured: Tensor | None = None  # s at a step with a refresh, of this rank's parameters
        self._sign, self._size, self._weight = 0.0, 0.0, 0.0
        self._looked_at, self._rate, self._rate_changed = -1, math.nan, -1
        self._before: dict[Tensor, Tensor] = {}
        self._step: dict[Tensor, Tensor] = {}  # -Δ

    def measure(
        self, step: StepPlan, refreshed: bool, rows: bool, ascending: Collection[Tensor] = ()
    ) -> None:
        """Look at the last step, at a refresh, before gradients are preconditioned.

        ``ascending``: parameters that climb along their gradients, as the base maximizes.
        """
        last, self._step, self.kept, self.measured = self._step, {}, False, None
        told, pairs = {*step.told}, list[tuple[Tensor, Tensor]]()
        climbing: list[tuple[Tensor, Tensor]] = []
        for block in step.layers if last and refreshed else ():
            sound = block.solved and not block.lost and not block.state.unverified
            if sound and (block in told or (rows and is_dtensor(block.weight))):
                for p in block.params:
                    if p.grad is not None and p in last:
                        ours = climbing if p in ascending else pairs
                        ours.append((local(p.grad), last[p].to(p.device)))
        self.measured = _product(pairs)
        climbed = _product(climbing)
        if climbed is not None:
            self.measured = -climbed if self.measured is None else self.measured - climbed

    def keep(self, solved: Iterable[KroneckerBlock], asked: bool) -> None:
        """Keep the weights before the base's step, to scale it, and to measure it if ``asked``."""
        self._step, self._before = {}, {}
        if (self._lengths is not None and asked) or self.factor != 1.0:
            params = [p for block in solved if block.solved for p in block.params]
            copies = torch._foreach_mul([local(p).detach() for p in params], 1.0) if params else ()
            self._before = dict(zip(params, copies, strict=True))
        self.kept = bool(self._before)

    def follow(self, s: float, rate: float, step: int) -> None:
        """Change τ at a refresh."""
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
        if not math.isfinite(s):
            self.factor = min(max(self.factor, least), most)
            return
        rises = -s > RISES * self._size > 0
        change = max(s / self._size, -4.0) / 2 if rises else 0.0
        self._weight = PAST * self._weight + 1
        self._sign += ((s > 0) - (s < 0) - self._sign) / self._weight
        self._size += (abs(s) - self._size) / self._weight
        earned = self._sign + (LEVEL if moves or self.factor <= 1.0 else -LEVEL)
        if earned < 0:
            change += SHORTER * earned
        elif not rises:
            since = 1 if self._looked_at < 0 else step - self._looked_at
            change += LONGER * earned * min(max(since, 1), COUNTED)
        self._looked_at = step
        self.factor = min(max(self.factor * math.exp(change), least), most)

    def scale(self, asked: bool) -> None:
        """Scale the base's step by τ, if it is kept; it may be ``asked`` about at the next one."""
        before, self._before, self.kept = self._before, {}, asked and self._lengths is not None
        now, old = list(map(local, before)), list(before.values())
        if self.factor != 1.0:
            torch._foreach_lerp_(now, old, 1.0 - self.factor)
        if self.kept:
            torch._foreach_sub_(old, now)
            self._step = before

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
        self._step, self._before, self.kept = {}, {}, False
        wanted = set(STEP_LENGTH)
        found = next((part for part in saved.values() if part.keys() >= wanted), None)
        if self._lengths is None or found is None:
            return
        factor, *averages, looked_at, rate, changed = (found.number(n) for n in STEP_LENGTH)
        self.factor = min(max(factor, self._lengths.least), self._lengths.most)
        self._sign, self._size, self._weight = averages
        self._rate = rate or math.nan
        self._looked_at, self._rate_changed = int(looked_at) - 1, int(changed) - 1
        for p, part in saved.items():
            if part.get(LAST_STEP_KNOWN, 0) and LAST_STEP in part:
                step = local(like(p, part[LAST_STEP]))
                self._step[p] = step.to(p.device, p.dtype, copy=True)
        self.kept = bool(self._step)


def ascending_params(training: Training) -> set[Tensor]:
    """The parameters of groups whose base maximizes."""
    groups = [group for group in training.groups if group.get("maximize")]
    return {p for group in groups for p in group["params"]}


def before_refresh(
    training: Training, options: KFACOptions, length: StepLength, step: StepPlan
) -> Asked:
    """Ask for what a refresh does not change: rates on a device, s, layers' mean curvature."""
    rates = rates_of(training, step.layers) if options.follows_steps else []
    on_device = [rate for rate in rates if isinstance(rate, Tensor)]
    asked = Asked((on_device, [] if length.measured is None else [length.measured], []))
    for alike, means in stacked_means(b for b in step.told if b.factors is not None):
        asked.groups[2].append(means.prod(0).mean(-1))
        asked.blocks += alike
    return asked


def follow_refresh(
    training: Training,
    options: KFACOptions,
    solves: Solves,
    drift: Drift | None,
    length: StepLength,
    step: StepPlan,
) -> None:
    """Let γ, intervals and the length of steps follow a refresh, alike on all ranks; a collective.

    They hear s, square roots of the layers' mean curvatures, P₀ · P, |P₀|², |P|² of each layer,
    and how many of these are known: of each layer from one rank.
    """
    if drift is None and not options.follows_steps and options.floor == 0:
        return
    blocks, tellers = [*step.layers], {*step.told}
    with stage("solve_exchange"):
        mine = dict.fromkeys(block for block in blocks if block.solved and block in tellers)
        rates = rates_of(training, blocks) if options.follows_steps else []
        asked, changes = solves.asked, solves.changes
        taken: dict[KroneckerBlock, Tensor] = {}
        for bank in step.banks:
            taken, bank.changes = taken | bank.changes, {}
        if asked is None or asked.told is None:
            asked = before_refresh(training, options, length, step)
        if asked.told is None or taken:
            *asked.told, read = numbers_of(*asked.groups, [*taken.values()])
            each = iter(read)
            changes = changes | dict(zip(taken, zip(each, each, each, strict=True), strict=True))
        lrs, s, curvature = asked.told
        rate = max([0.0, *lrs, *(rate for rate in rates if isinstance(rate, float))])
        roots: list[float] = []
        for block, x in zip(asked.blocks, curvature, strict=True):
            if block in mine:
                roots.append(math.sqrt(max(x, 0.0)))
        counts = len(s), len(roots), sum(block.state.work for block in mine)
        heard, nothing = [*map(float, counts), sum(s), sum(roots)], (0.0, 0.0, 0.0)
        for b in blocks if drift is not None else ():
            heard += changes.get(b, nothing) if b in mine else nothing
        if training.world.size > 1:
            message = torch.tensor(heard, dtype=torch.float64, device="cpu")
            training.world.on_cpu().all_reduce([message]).wait()
            heard = message.tolist()
    looked, layers, passes, moved, sum_of_roots, *changed = heard
    length.follow(moved if looked else math.nan, rate, training.steps)
    if layers and math.isfinite(sum_of_roots):
        # A mean of square roots: one layer of huge curvature raises the others' floor less.
        solves.mean_curvature = (sum_of_roots / layers) ** 2
    if drift is not None:
        price = PRICE[options.solver] / training.world.size
        drift.hear(blocks, changed, passes, [price * step.costs[b] for b in blocks])


def rates_of(training: Training, blocks: Iterable[KroneckerBlock]) -> list[Scalar]:
    """The learning rates of the groups with parameters of any block."""
    ours: set[Tensor] = set()
    for block in blocks:
        ours.update(block.params)
    groups = [group for group in training.groups if not ours.isdisjoint(group["params"])]
    return [as_scalar(group["lr"]) for group in groups]

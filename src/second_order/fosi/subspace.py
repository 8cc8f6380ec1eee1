"""The span of the eigenvectors V̂, and the bounded Newton steps in it.

A :class:`Basis` stores V̂ in one of two layouts, behind the same methods:

    row     V̂_p ∈ R^{n/P × r}: a process's rows. Processes sum V̂ᵀx (r elements).
    column  V̂^{(p)} ∈ R^{n × r/P}: a process's vectors. They sum V̂c (n elements).

V̂ is finite, because a refresh rejects non-finite eigenvectors. If c = V̂ᵀg is not
finite on some process, no process takes a Newton step. The Newton step is −α τ
|û|⁻¹n, where n is c with momentum. The trust region of DHO2 bounds steps that the
eigenpairs predict wrongly:

    predicted decrease  q = nᵀ|û|⁻¹n, a full step's squared length in units of loss
    radius              τ <= Δ / √q, where Δ² is 100 times the typical q of taken steps
    curvature           α κ = Σ τ nᵀ|û|⁻¹(c − c₊) / Σ τ² q, over the previous steps
    scale               if α τ κ comes near the limit of stability, τ is cut to half of
                        that limit; otherwise it grows again

c₊ is the c of the next step. κ is the curvature measured along the steps, relative to
the curvature that the eigenvalues predict. On a quadratic with exact eigenpairs it is
at most 1. A step is rejected, and the next step reverts it, if κ shows that c has
exploded or if the gradient after the step is not finite.

The rule works with single numbers. On the CPU they are Python floats, which are ten
times as fast as tensors of one element. On a device they are tensors, so the host does
not synchronize with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.distributed.world import World
from second_order.lanczos.hvp import row_counts, row_slice

__all__ = [
    "Basis",
    "MomentumRule",
    "NewtonStep",
    "Proposal",
    "Subspace",
    "TrustState",
    "bound_step",
    "compiled_on_devices",
    "exchange_rows_for_vectors",
    "inverse_magnitudes",
    "larger",
    "momentum_rule",
    "propose_step",
    "trust_after_refresh",
]

T = TypeVar("T")
Number: TypeAlias = Any  # a float, or a tensor of one element
Flag: TypeAlias = Any  # a bool, or a tensor of one

# Δ² in typical predicted decreases: a step is at most ten times its typical length.
RADIUS = 100.0
# Decay of the running mean of q; with it, Δ doubles in two steps at most.
TYPICAL_DECAY = 0.99
# Decay of the sums of κ, so that one step of triple length outweighs the others.
SUMS_DECAY = 0.8
NEAR_LIMIT = 0.75  # τ is cut above this fraction of the limit of stability
TARGET = 0.5  # and it is cut to this fraction
TAU_GROWTH = 1.05  # factor on τ at every step below the limit
EXPLOSION = 100.0  # a step is rejected above this multiple of the limit of stability
# Factor on τ: the rule cannot know by how much the step was too long.
CUT_AFTER_REJECTION = 0.1
GROWTH_AT_REFRESH = 2.0  # factor on τ when new eigenpairs arrive
TINY = 1e-300  # avoids a division by 0, which raises an error in Python


# --------------------------------------------------------------------- the eigenvectors


@dataclass(frozen=True)
class Basis:
    """The eigenvectors V̂, distributed over the processes.

    Attributes:
        vectors: This process's part of V̂ᵀ, ``(local vectors, local elements)``.
        count: r, the number of vectors on all processes.
        by_rows: Whether a process has some rows of all vectors, not all rows of some.
        world: The processes.
        group_spans: Each parameter group's slice of the local elements.
    """

    vectors: Tensor
    count: int
    by_rows: bool
    world: World
    group_spans: Sequence[slice]

    @property
    def local_slice(self) -> slice:
        """The slice of the r vectors whose coefficients this process has."""
        if self.by_rows:
            return slice(0, self.count)
        return row_slice(self.count, self.world.size, self.world.rank)

    def coefficients(self, x: Tensor) -> Tensor:
        """Return V̂ᵀx for the vectors in ``local_slice``; x has its local elements."""
        c = torch.mv(self.vectors, x)
        if self.by_rows:
            self.world.all_reduce([c]).wait()
        return c

    def sum_over_vectors(self, sums: Tensor) -> Tensor:
        """Complete sums over ``local_slice`` to sums over all vectors, in place."""
        if not self.by_rows:
            self.world.all_reduce([sums]).wait()
        return sums

    def add_combination(self, x: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """Add V̂c to the local elements of x, in place, and return x.

        ``coefficients`` has one c for all parameter groups, or one for each.
        """
        spans: Sequence[slice] = [slice(None)]
        if len(coefficients) > 1:
            spans = self.group_spans
        if self.by_rows:
            for span, c in zip(spans, coefficients, strict=True):
                x[span].addmv_(self.vectors[:, span].t(), c)
            return x

        change = torch.zeros_like(x)
        for span, c in zip(spans, coefficients, strict=True):
            torch.mv(self.vectors[:, span].t(), c, out=change[span])
        self.world.all_reduce([change]).wait()
        return x.add_(change)

    def fraction_inside(self, c: Tensor, x: Tensor) -> Tensor:
        """Return ‖V̂ᵀx‖² / ‖x‖², the fraction of x in the span, on the device.

        Args:
            c: V̂ᵀx for the vectors in ``local_slice``.
            x: The local elements of the vector.
        """
        squared_norm = torch.linalg.vector_norm(x, dtype=torch.float64).square()
        sums = torch.stack([c.double().square().sum(), squared_norm])
        # Every process has all coefficients (by rows) or all elements of x, so one of
        # the two sums is complete before the all-reduce.
        complete = 0 if self.by_rows else 1
        sums[complete] /= self.world.size
        self.world.all_reduce([sums]).wait()
        return sums[0] / sums[1].clamp(min=torch.finfo(sums.dtype).tiny)

    def sum_of_vectors(self, rows: slice) -> Tensor:
        """Return the sum of all vectors, at this process's rows in Lanczos."""
        total = self.vectors.sum(0)
        if self.by_rows:
            return total
        self.world.all_reduce([total]).wait()
        return total[rows]


def exchange_rows_for_vectors(rows: Tensor, size: int, world: World) -> Tensor:
    """Exchange this process's rows of all r vectors for all n rows of its own vectors.

    A process sends about n r (P − 1)/P² elements.

    Args:
        rows: ``(r, rows of this process)``.
        size: n, the number of rows of all processes.
        world: The processes.

    Returns:
        ``(vectors of this process, n)``.
    """
    num_rows = row_counts(size, world.size)
    num_vectors = row_counts(len(rows), world.size)
    num_local = num_vectors[world.rank]

    messages = [part.reshape(-1) for part in rows.split(num_vectors)]
    received = world.all_to_all(messages, [num_local * count for count in num_rows])
    blocks = []
    for block, count in zip(received, num_rows, strict=True):
        blocks.append(block.view(num_local, count))
    return torch.cat(blocks, 1)


def inverse_magnitudes(values: Tensor, floor: float) -> Tensor:
    """Return ``1 / max(|û|, floor · max|û|)``, ``(r,)``.

    The floor bounds Newton steps along eigenvectors whose eigenvalue is near 0.
    """
    magnitudes = values.abs()
    largest = magnitudes.new_zeros(())
    if len(magnitudes):
        largest = magnitudes.max()
    inverses = 1.0 / torch.maximum(magnitudes, floor * largest)
    return torch.where(torch.isfinite(inverses), inverses, 0.0)


# --------------------------------------------------------------------- the trust region


class MomentumRule(NamedTuple):
    """The rule m <- decay m + gain V̂ᵀg of the momentum in the subspace.

    With ``nesterov``, the step applies the rule once more to the new momentum.
    """

    decay: float
    gain: float
    nesterov: bool

    @property
    def stability_limit(self) -> float:
        """The bound on α τ κ below which the steps converge on a quadratic."""
        lookahead = 1.0
        if self.nesterov:
            lookahead = 1.0 + 2.0 * self.decay
        return 2.0 * (1.0 + self.decay) / (self.gain * lookahead)


def momentum_rule(momentum: float | str, group: Mapping[str, Any]) -> MomentumRule:
    """Return the rule of the momentum in the subspace.

    Args:
        momentum: The option ``subspace_momentum``: a number, or "average" or "base" for
            the momentum of the base.
        group: The base's parameter group, with the base's momentum.

    Raises:
        ValueError: If the gain is not positive.
    """
    if not isinstance(momentum, str):
        return MomentumRule(decay=float(momentum), gain=1.0 - momentum, nesterov=False)
    if "betas" in group:
        beta = float(group["betas"][0])
        return MomentumRule(decay=beta, gain=1.0 - beta, nesterov=False)

    decay = float(group.get("momentum") or 0.0)
    gain = 1.0 - decay
    if momentum == "base":
        gain = 1.0
        if decay:
            gain = 1.0 - float(group.get("dampening") or 0.0)
    if gain <= 0.0:
        raise ValueError(
            f"the base has momentum={decay:g}, with which the gradient has the weight {gain:g} in "
            f"the span of the eigenvectors; it must be above 0: use a momentum and a dampening "
            f"below 1"
        )
    return MomentumRule(decay=decay, gain=gain, nesterov=bool(group.get("nesterov")))


class TrustState(NamedTuple):
    """What the previous steps say about the quadratic model.

    Checkpoints store it as one tensor.
    """

    typical_decrease: Number = 0.0  # running mean of q; 0 before the first step
    scale: Number = 1.0  # bound on τ from the curvature along the steps
    observed: Number = 0.0  # numerator of α κ; the next step subtracts its part with c₊
    predicted: Number = 0.0  # denominator of α κ
    tau: Number = 0.0  # τ of the previous step
    alpha: Number = 0.0  # α of the previous step
    rejected: Number = 0.0  # number of rejected steps

    def to_tensor(self, like: Tensor) -> Tensor:
        """Return all numbers in one tensor, with the dtype and device of ``like``."""
        if like.device.type == "cpu":
            return like.new_tensor(self)
        return torch.stack([like.new_zeros(()) + number for number in self])


class NewtonStep(NamedTuple):
    """A Newton step, and the state that the next step needs."""

    step: Tensor  # (r,) coefficients, to be multiplied by −α; 0 if the step is left out
    gradient_change: Tensor  # (r,) −V̂ᵀg, added to the gradient; 0 without a new step
    momentum: Tensor  # (r,)
    full_step: Tensor  # (r,) |û|⁻¹n of this step, before τ
    trust: Tensor  # the TrustState


class Proposal(NamedTuple):
    """A full Newton step, before the trust region bounds it."""

    c: Tensor  # (r,) V̂ᵀg
    momentum: Tensor  # (r,) updated with c
    full_step: Tensor  # (r,) |û|⁻¹n
    products: Tensor  # (3,) the full step times n and times c, the previous one times c


# ----------------------------------------------------------------------- single numbers


def to_numbers(tensor: Tensor) -> Sequence[Number]:
    """Return the elements of a small tensor: floats on the CPU, tensors on a device."""
    if tensor.device.type != "cpu":
        return tensor.unbind()
    numbers: Sequence[Number] = tensor.tolist()
    return numbers


def select(condition: Flag, value: T, other: T) -> T:
    """Return ``value`` if the condition holds, otherwise ``other``."""
    if isinstance(condition, Tensor):
        selected: Any = torch.where(condition, value, other)  # type: ignore[call-overload]
        return selected  # type: ignore[no-any-return]
    return value if condition else other


def larger(a: Number, b: Number) -> Any:
    """Return the larger of two numbers, and the second one if the first is NaN."""
    return select(a > b, a, b)


def smaller(a: Number, b: Number) -> Any:
    """Return the smaller of two numbers, and the second one if the first is NaN."""
    return select(a < b, a, b)


def compiled_on_devices(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function of small tensors, for calls with tensors on a device.

    The fifty operations of the rule would be fifty kernel launches there (see ``make
    launches``). If ``torch.compile`` fails, for example because there is no C++
    compiler, the function runs uncompiled.
    """
    compiled: Callable[..., T] | None = None

    def call(*args: Any) -> T:
        nonlocal compiled
        if args[0].device.type == "cpu":
            return function(*args)
        if compiled is None:
            compiled = torch.compile(function)
        try:
            return compiled(*args)
        except Exception:
            compiled = function
            # If the function itself is at fault, this raises its error.
            return function(*args)

    return call


# ----------------------------------------------------------------------------- the rule


@compiled_on_devices
def propose_step(
    c: Tensor, previous: NewtonStep, inverse_eigenvalues: Tensor, rule: MomentumRule
) -> Proposal:
    """Add c = V̂ᵀg to the momentum, and return the resulting full Newton step."""
    momentum = torch.add(previous.momentum * rule.decay, c, alpha=rule.gain)
    n = momentum
    if rule.nesterov:
        n = momentum * rule.decay + rule.gain * c
    full_step = n * inverse_eigenvalues
    products = torch.stack([full_step @ n, full_step @ c, previous.full_step @ c])
    return Proposal(c, momentum, full_step, products)


@compiled_on_devices
def bound_step(
    products: Tensor,
    proposal: Proposal,
    previous: NewtonStep,
    alpha: Number,
    limit: float,
) -> tuple[NewtonStep, Flag]:
    """Return the bounded Newton step, and whether it reverts the previous one.

    Args:
        products: The products of the proposal, ``(3,)``, summed over all vectors. They
            are not finite if V̂ᵀg is not finite on any process.
        proposal: The step to bound.
        previous: The previous step.
        alpha: The largest |α| of the groups.
        limit: The limit of stability. Infinite: no trust region.
    """
    predicted_decrease, along_c, previous_along_c = to_numbers(products)
    total = predicted_decrease + along_c + previous_along_c
    non_finite = total - total != 0.0  # infinite or NaN
    c, momentum, full_step, _ = proposal
    zeros = torch.zeros_like(full_step)
    no_step = previous._replace(step=zeros, gradient_change=zeros)
    if limit == math.inf:
        accepted = NewtonStep(full_step, -c, momentum, full_step, previous.trust)
        return _select_step(non_finite, no_step, accepted), False

    # Compare the curvature along the previous steps with the limit of stability.
    state = TrustState(*to_numbers(previous.trust))
    observed = state.observed - state.tau * previous_along_c
    predicted = state.predicted * limit
    ratio = state.scale * observed / select(predicted > 0.0, predicted, math.inf)
    previous_length = state.tau * state.alpha
    exploded = non_finite | (ratio > EXPLOSION)
    reject_previous = exploded & (previous_length > 0.0) & (alpha > 0.0)

    # Bound τ by that curvature.
    grown = smaller(state.scale * TAU_GROWTH, 1.0)
    cut = state.scale * TARGET / larger(ratio, NEAR_LIMIT)
    scale = select(ratio > NEAR_LIMIT, cut, grown)

    # Bound τ by the radius.
    scaled_decrease = scale * scale * predicted_decrease
    has_typical = state.typical_decrease > 0.0
    max_decrease = select(has_typical, RADIUS * state.typical_decrease, math.inf)
    tau = scale * smaller(max_decrease / larger(scaled_decrease, TINY), 1.0) ** 0.5
    decrease = smaller(scaled_decrease, max_decrease)

    # The step, if it is taken.
    change = decrease - state.typical_decrease
    typical = state.typical_decrease + (1.0 - TYPICAL_DECAY) * change
    state_after_step = state._replace(
        typical_decrease=select(has_typical, typical, decrease),
        scale=scale,
        observed=SUMS_DECAY * observed + tau * along_c,
        predicted=SUMS_DECAY * state.predicted + tau * tau * predicted_decrease,
        tau=tau,
        alpha=alpha,
    )
    trust = state_after_step.to_tensor(previous.trust)
    accepted = NewtonStep(full_step * tau, -c, momentum, full_step, trust)

    # The step that reverts the previous one.
    state_after_rejection = TrustState(
        typical_decrease=state.typical_decrease * CUT_AFTER_REJECTION**2,
        scale=state.scale * CUT_AFTER_REJECTION,
        rejected=state.rejected + 1.0,
    )
    trust = state_after_rejection.to_tensor(previous.trust)
    way_back = -previous_length / select(alpha > 0.0, alpha, 1.0) * previous.full_step
    reverted = NewtonStep(way_back, zeros, zeros, zeros, trust)

    # Choose one of them, or no step.
    forward = _select_step(non_finite, no_step, accepted)
    return _select_step(reject_previous, reverted, forward), reject_previous


def _select_step(condition: Flag, step: NewtonStep, other: NewtonStep) -> NewtonStep:
    """Return one of two steps, by a condition that may be on a device."""
    pairs = zip(step, other, strict=True)
    return NewtonStep._make([select(condition, value, rest) for value, rest in pairs])


def trust_after_refresh(trust: Tensor, *, loss_has_risen: bool) -> Tensor:
    """Return the trust state for new eigenpairs, with twice the last scale, at most 1.

    If the loss of the curvature batch has risen by more than a tolerance since the last
    refresh, the scale stays as it is, because every step predicted that the loss would
    fall.
    """
    state = TrustState(*to_numbers(trust))
    scale = state.scale
    if not loss_has_risen:
        scale = smaller(GROWTH_AT_REFRESH * state.scale, 1.0)
    new_state = TrustState(
        typical_decrease=state.typical_decrease, scale=scale, rejected=state.rejected
    )
    return new_state.to_tensor(trust)


# ------------------------------------------------------------------------- the subspace


@dataclass
class Subspace:
    """The eigenpairs of the last refresh, and the gradient's momentum in their span.

    The momentum of g₁ is a vector in R^n that outlasts refreshes. It is V̂ m +
    ``outside_decay`` · ``outside_momentum``, where m is the momentum of :attr:`newton`,
    and the second part comes from earlier subspaces and is orthogonal to V̂.
    """

    basis: Basis  # V̂
    values: Tensor  # (r,) û, the largest first; float64 on the CPU
    residuals: Tensor  # (r,) of the eigenpairs; float64 on the CPU
    num_largest: int  # k, how many of the eigenvalues are the largest ones
    inverse_eigenvalues: Tensor  # |û|⁻¹ of the vectors in ``basis.local_slice``
    base_scale: float  # s, the factor on the base's step outside of the span
    newton: NewtonStep = field(init=False)  # the last Newton step
    outside_momentum: Tensor = field(init=False)  # at the local elements
    outside_decay: float = 1.0  # the product of β over the steps since the last refresh

    def __post_init__(self) -> None:
        zeros = torch.zeros_like(self.inverse_eigenvalues)
        trust = TrustState().to_tensor(zeros)
        self.newton = NewtonStep(
            step=zeros,
            gradient_change=zeros,
            momentum=zeros,
            full_step=zeros,
            trust=trust,
        )
        self.outside_momentum = zeros.new_zeros(self.basis.vectors.shape[1])

    def compute_newton_step(
        self,
        c: Tensor,
        rule: MomentumRule,
        alphas: Sequence[float | Tensor],
        *,
        bounded: bool,
    ) -> Flag:
        """Compute the next Newton step from c, the coefficients of the gradient.

        Args:
            c: V̂ᵀg for the vectors in ``basis.local_slice``.
            rule: The rule of the momentum.
            alphas: α of each parameter group.
            bounded: Whether the trust region bounds the step.

        Returns:
            Whether the previous step is rejected, and the new one reverts it. A tensor
            if the trust region bounds a step on a device, or if α is a tensor.
        """
        # The trust region bounds the step of the group with the largest α.
        largest_alpha: Any = abs(alphas[0])
        for alpha in alphas[1:]:
            largest_alpha = larger(largest_alpha, abs(alpha))
        if c.device.type != "cpu" and not isinstance(largest_alpha, Tensor):
            # torch.compile would compile again for each value of a Python number.
            largest_alpha = c.new_full((), largest_alpha)

        proposal = propose_step(c, self.newton, self.inverse_eigenvalues, rule)
        products = self.basis.sum_over_vectors(proposal.products)
        limit = rule.stability_limit if bounded else math.inf
        self.newton, reverts_previous = bound_step(
            products, proposal, self.newton, largest_alpha, limit
        )
        self.outside_decay *= rule.decay
        return reverts_previous

    def momentum_vector(self) -> Tensor:
        """Return the momentum in R^n, at the local elements."""
        outside = self.outside_momentum * self.outside_decay
        return self.basis.add_combination(outside, [self.newton.momentum])

    def inherit(self, momentum: Tensor | None, trust: Tensor) -> None:
        """Continue with the momentum and the trust state of the previous subspace.

        The momentum, a vector in R^n or None, is split into its part in the new span
        and the rest.
        """
        self.newton = self.newton._replace(trust=trust)
        if momentum is not None:
            inside = self.basis.coefficients(momentum)
            self.newton = self.newton._replace(momentum=inside)
            self.outside_momentum = self.basis.add_combination(momentum, [-inside])

    def load(
        self,
        *,
        momentum: Tensor,
        full_step: Tensor,
        trust: Tensor,
        outside_momentum: Tensor,
        outside_decay: float,
    ) -> None:
        """Load a checkpoint's previous step.

        ``momentum`` and ``full_step`` are ``(r,)``, for all vectors.
        """
        like = self.inverse_eigenvalues
        local = self.basis.local_slice
        self.newton = self.newton._replace(
            momentum=momentum[local].to(like),
            full_step=full_step[local].to(like),
            trust=trust.to(like),
        )
        self.outside_momentum = outside_momentum.to(like)
        self.outside_decay = outside_decay

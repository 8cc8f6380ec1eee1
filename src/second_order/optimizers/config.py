"""Every keyword of the optimizers: its default, its meaning and its check.

    CommonOptions     the keywords of all optimizers: the base, the model, the ranks
    KFACOptions       the keywords that KAISA, DPKFAC and DistKFAC share
    KAISAOptions, DPKFACOptions, DistKFACOptions
                      the keywords that only one of them has
    FOSIOptions       the keywords that DHO2 and MRDHO2 share
    EpochOptions      the keywords of MRDHO2

Each optimizer repeats its keywords in the signature of its own ``__init__``, so that
editors and ``help()`` show them. A test checks that both places agree. The decorator
``documented`` in ``keywords.py`` copies the descriptions under "Attributes:" into the
docstrings of the optimizers. This module imports no other folder of the package except
``utils``, so every folder may import it.

In the descriptions, "the base" is the first-order optimizer ``base``, and "number or
callable" means a constant or a function of the step. A and G are the Kronecker factors
of a layer: the second moments of its inputs and of its output gradients. ∇ is the
layer's gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from second_order.utils.checks import (
    AUTO,
    Interval,
    Scalar,
    Schedule,
    check_choice,
    check_count,
    check_flag,
    check_interval,
    check_number,
    check_patterns,
    check_scalar,
    check_seed,
    check_timeout,
    check_whole,
    is_adaptive,
    python_number,
)

__all__ = [
    "DAMPING",
    "SCHEDULES",
    "AuxBase",
    "CommonOptions",
    "DPKFACOptions",
    "DecayingClip",
    "DistKFACOptions",
    "DoublyFactored",
    "EpochOptions",
    "FOSIOptions",
    "KAISAOptions",
    "KFACOptions",
    "PerStep",
    "TraceRule",
    "check_clip",
    "check_damping",
    "check_decay",
    "check_newton_scale",
    "options_from",
]

T = TypeVar("T")
Likelihood: TypeAlias = (
    Literal["categorical", "bernoulli", "gaussian"] | Callable[[Any], Tensor]
)
Fisher: TypeAlias = Literal["empirical"] | Likelihood
AutoScalar: TypeAlias = Scalar | Callable[[int], Scalar] | Literal["auto"]
DoublyFactored: TypeAlias = Mapping[str, tuple[int, int]] | Literal["auto"] | None

# Chosen by benchmarks/progress/defaults.py.
DAMPING = 0.1  # share of a layer's mean curvature
DAMPING_FLOOR = 0.25  # share of the mean curvature over all layers

DEFAULT_INTERVAL = 10
"""Steps between two checks of a TraceRule, and two updates of the statistics."""


# ------------------------------------------------------------------- values of keywords


@dataclass(frozen=True)
class PerStep:
    """A ``factor_decay`` that counts steps, whatever the interval between updates is.

        KAISA(model, lr=0.1, factor_decay=PerStep(0.99))

    Attributes:
        decay: Weight of the past per step, in [0, 1). The average covers about
            1 / (1 - decay) steps.
        share: Early in training, the average covers at most this share of the steps
            taken so far, or two if that is more. Curvature changes fastest then, and
            old statistics soon mislead. None: no such limit.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is out of bounds.
    """

    decay: float
    share: float | None = None

    def __post_init__(self) -> None:
        check_decay(self.decay)
        if self.share is not None:
            remedy = "1 / 3, say, or None"
            check_number(
                "share", self.share, low=0.0, open_low=True, high=1.0, remedy=remedy
            )


@dataclass(frozen=True)
class DecayingClip:
    """A ``kl_clip`` that shrinks: c₀ ζᵏ after k decays (Ba et al. 2017, section 5).

        clip = DecayingClip(every=len(loader) // 2)
        DistKFAC(model, lr=0.1, grafting="none", kl_clip=clip)

    Attributes:
        start: c₀, the bound κ of ``kl_clip`` until the first decay.
        decay: ζ, the factor by which the bound shrinks every ``every`` steps.
        every: Number of steps between two decays. The paper uses half an epoch.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is out of bounds.
    """

    start: float = 0.01
    decay: float = 0.96
    every: int = 100

    def __post_init__(self) -> None:
        check_number(
            "start", self.start, low=0.0, open_low=True, open_high=True, remedy="0.01"
        )
        check_number(
            "decay", self.decay, low=0.0, open_low=True, high=1.0, remedy="0.96"
        )
        check_count("every", self.every, "steps")

    def __call__(self, step: int) -> float:
        """Return κ, the bound of ``kl_clip``, at a step."""
        return max(self.start * self.decay ** (step // self.every), sys.float_info.min)


@dataclass(frozen=True)
class TraceRule:
    """An ``inv_update_steps`` that skips unchanged layers (THOR, Chen et al. 2021).

        KAISA(model, lr=0.1, inv_update_steps=TraceRule(upper=0.05, every=20))

    The rule compares the trace of a layer's damped curvature A ⊗ G + γ I with the trace
    at the layer's last refresh.

    Attributes:
        upper: A layer is refreshed if its trace or γ changed by more than this share.
        lower: If the trace of a layer changed by less than this share, it is no longer
            compared. The layer is then refreshed only if γ changes by more than
            ``upper``, or if the layer has lost its inverse. If 0, traces are always
            compared.
        every: Number of steps between two checks; number or callable.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is out of bounds, or ``lower`` is above ``upper``.
    """

    upper: float = 0.1  # chosen on small tasks
    lower: float = 0.0
    every: Interval = DEFAULT_INTERVAL

    def __post_init__(self) -> None:
        remedy = "TraceRule() has 0.1 and 0"
        for name in ("upper", "lower"):
            number = getattr(self, name)
            check_number(name, number, low=0.0, open_high=True, remedy=remedy)
        if self.lower > self.upper:
            raise ValueError(
                f"TraceRule(upper={self.upper}, lower={self.lower}): swap the two"
            )
        check_interval("every", self.every)


@dataclass(frozen=True)
class AuxBase:
    """A second base optimizer with options; a value of ``aux_base``.

        KAISA(
            model,
            lr=0.02,
            base=torch.optim.Muon,
            aux_base=AuxBase(torch.optim.AdamW, layers=["head"], kwargs={"lr": 1e-3}),
        )

    Attributes:
        optimizer_class: Class of the optimizer.
        layers: Patterns of further modules that this optimizer trains, with all modules
            inside them. They have the same form as in ``skip_layers``.
        kwargs: Keyword arguments of this optimizer only. They override the keywords
            that you pass for both optimizers.

    Raises:
        TypeError: If ``layers`` or ``kwargs`` have the wrong type.
    """

    optimizer_class: type[torch.optim.Optimizer]
    layers: Sequence[str] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_patterns(self.layers, "layers")
        if not isinstance(self.kwargs, Mapping):
            raise TypeError(
                f"kwargs={self.kwargs!r} is not a mapping; write kwargs={{'lr': 1e-3}}"
            )


# ------------------------------------------------------------------------------- checks


def check_damping(value: Any) -> None:
    """Raise unless a damping is a finite number >= 0, or a tensor with such a value."""
    remedy = "'auto' is 0.1 of the mean curvature"
    check_scalar("damping", value, low=0.0, open_high=True, remedy=remedy)


def check_decay(value: Any) -> None:
    """Raise unless a factor_decay is a PerStep, or lies in [0, 1)."""
    if not isinstance(value, PerStep):
        remedy = "'auto' counts steps"
        check_number(
            "factor_decay", value, low=0.0, high=1.0, open_high=True, remedy=remedy
        )


def check_clip(value: Any) -> None:
    """Raise unless a kl_clip is a positive number, or a tensor with such a value."""
    remedy = "use a positive number, 'auto', or None for no clip"
    check_scalar("kl_clip", value, low=0.0, open_low=True, remedy=remedy)


def check_newton_scale(value: Any) -> None:
    """Raise unless a newton_scale is a finite number >= 0."""
    remedy = "0.1 is the default, 1.0 a full step"
    check_number("newton_scale", value, low=0.0, open_high=True, remedy=remedy)


def check_dtype(name: str, value: Any) -> None:
    """Raise unless ``value`` is a dtype in which factors can be stored and sent."""
    if value not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(
            f"{name}={value} is not one of float32, float64 and bfloat16 "
            f"(float16 overflows at 65504); use torch.float32"
        )


def is_auto(value: Any) -> TypeGuard[str]:
    """Whether a keyword is "auto", so that the optimizer chooses its value."""
    return isinstance(value, str) and value == AUTO


# ----------------------------------------------------------------------------- keywords


def options_from(option_class: type[T], arguments: Mapping[str, Any]) -> T:
    """Build an option dataclass from the optimizer's arguments that it declares."""
    names = {field.name for field in fields(option_class)}  # type: ignore[arg-type]
    own = {}
    for name, value in arguments.items():
        if name in names:
            own[name] = python_number(value)
    return option_class(**own)


# Chosen by benchmarks/progress/defaults.py. Adaptive bases need a shorter average.
STEP_DECAY = PerStep(0.995)
ADAPTIVE_STEP_DECAY = PerStep(0.978, share=1 / 3)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """The keywords that all optimizers share.

    Attributes:
        base: Class of the first-order optimizer that takes the step. It receives the
            preconditioned gradients.
        aux_base: Class of a second base optimizer, or an
            :class:`~second_order.AuxBase`. It trains embeddings, the output head (the
            last Linear), norms, biases and parameters outside of modules. ``base`` then
            only trains hidden weights: the other weights of modules, if they have at
            least two dimensions (exactly two with ``torch.optim.Muon``). None: ``base``
            trains everything.
        model: The model, if you pass parameters. None: the smallest module that
            contains all of them, widened to the whole network if all other parts of it
            are frozen. Wrappers (DistributedDataParallel, ``torch.compile``) are
            removed.
        grad_scaler: The ``GradScaler`` that scales the loss, if you use one.
        gradient_averaging: Whether the optimizer averages gradients over the ranks that
            train. "auto": yes, unless DistributedDataParallel or FSDP2 averages them.
            If the optimizer averages, all ranks start from the parameters of the first
            rank.
        process_group: The ranks that train together. None: the default group, if any.
        debug: Whether to check that all ranks have the same parameters. They must be
            equal bit for bit. True: before the first step and every 100 steps. A
            number: this many steps between two checks. If they differ, every rank
            raises :class:`~second_order.RankMismatchError` with the name of the
            parameter and the ranks. KAISA, DPKFAC and DistKFAC also verify every layer
            at each step with statistics, on one rank as well. Checkpoints do not save
            this option.
    """

    base: type[torch.optim.Optimizer] = torch.optim.SGD
    aux_base: type[torch.optim.Optimizer] | AuxBase | None = None
    model: nn.Module | None = None
    grad_scaler: Any = None
    gradient_averaging: str | bool = AUTO
    process_group: Any = None
    debug: bool | int = False

    @property
    def aux(self) -> AuxBase | None:
        """The second base optimizer with its options, or None."""
        if self.aux_base is None or isinstance(self.aux_base, AuxBase):
            return self.aux_base
        return AuxBase(self.aux_base)


@dataclass(frozen=True, kw_only=True)
class KFACOptions:
    """The keywords that KAISA, DPKFAC and DistKFAC share.

    Attributes:
        damping: γ, added to the curvature before it is inverted. Number or callable, at
            least 0. Raise it if the loss jumps: the larger γ is, the closer the step is
            to the plain gradient. "auto": 0.1. A number may be a tensor that a schedule
            changes in place. If the tensor is on a device, its value is not checked.
        damping_floor: Lower bound on the mean curvature from which γ of a layer is
            computed. With ``relative_damping``, it is a share of the mean curvature of
            all layers, which is the square of the mean of their square roots. "auto":
            0.25 with ``relative_damping``, otherwise 0, which means no bound.
        relative_damping: Whether ``damping`` is a multiple of the layer's mean
            curvature. True: γ of a layer is ``damping`` times the layer's mean
            curvature, tr A tr G / (dim A dim G), so it does not depend on the scale of
            the loss. False: γ is ``damping``, as in the papers. KAISA's published code
            scales factors differently, and needs another γ for the same step: see
            "Where it differs from the paper" in its docs.
        grafting: Scale of the preconditioned gradient P = (A ⊗ G + γ)⁻¹ ∇. "gradient":
            P is multiplied by c + γ, where c is the layer's mean curvature, which gives
            it the scale of the gradient. If the curvature is the same in all
            directions, the gradient does not change. "none": P has the length of an
            approximate Newton step, as in the papers. Such a step grows as gradients
            shrink, so also set ``kl_clip``. Adaptive bases normalize by past gradients
            (Adam by the last thousand steps) and need "gradient".
        kl_clip: κ, the bound on the change of the model's predictions in one step. The
            change is lr² Σ |P·∇| (Pauloski et al. 2022, section 5.1). Number, tensor,
            callable, or None for no bound. A number is the bound at the largest
            learning rate, and shrinks with lr² when a schedule lowers it. A callable is
            used as it is. "auto": Σ P·∇, without lr, may be at most four times its
            running average over about twenty steps, so that a batch of outliers cannot
            undo many steps. With ``grafting="none"``, "auto" is no bound.
        step_scale: Whether to multiply steps by a factor τ that adapts to the changes
            of the loss. Only the steps of preconditioned weights are multiplied.
            "auto": yes if ``grafting`` is "gradient", unless the base is schedule-free.
        factor_decay: Weight of the old values when the running averages of A and G are
            updated. A number in [0, 1), a callable or a :class:`~second_order.PerStep`.
            "auto": the averages cover about 45 steps (0.978 per step) with an adaptive
            base such as Adam, and about 200 steps (0.995 per step) with others,
            whatever the intervals are.
        solver: How A ⊗ G + γ is inverted. "inverse": A and G are damped separately and
            inverted by Cholesky decompositions. "eigen": (A ⊗ G + γ I)⁻¹ is exact. This
            costs several times as much, and gained nothing on most of the tasks on
            which the defaults were chosen.
        inv_update_steps: Steps between two refreshes of the inverses. Number or
            callable. "auto": each layer has its own interval of 1 to 32 steps, or more
            if its refresh is expensive. It is halved if the old and the new inverse
            give the gradient different directions, and doubled if they agree. Layers
            that had no statistics at eight refreshes in a row are tried less and less
            often, down to every 64 steps. A :class:`~second_order.TraceRule` only
            refreshes layers whose curvature changed.
        factor_update_steps: Steps between two updates of the statistics. Number or
            callable. "auto": at each refresh if ``inv_update_steps`` is "auto",
            otherwise every 10 steps, or at each refresh if that is more often. If
            ``inv_update_steps`` is a callable, also set this option.
        overhead: Limit on the time of refreshes, as a share of the time of other steps.
            Above 0 and up to 10; needs ``inv_update_steps="auto"``. The first five
            refreshes are timed and set the minimum number of steps between later ones,
            which checkpoints save. If layers drift faster than that, a warning says so.
            None: no limit.
        fisher: The labels of the loss whose gradients enter the factors. "empirical":
            the labels in the data, so your own backward pass is used. Otherwise labels
            are sampled from the distribution that the model's outputs describe, which
            costs one more backward pass when statistics are due: "categorical" (logits,
            classes in the last dimension), "bernoulli" (logits), "gaussian" (means), or
            a callable ``output -> loss`` that samples labels and returns their summed
            negative log-likelihood.
        kfac_approx: How to treat layers that are applied at many positions. "expand":
            each position has a loss term, as in language models. "reduce": positions
            are pooled (Eschenhagen et al. 2023). Fused experts then count as
            unsupported layers.
        loss_reduction: How your loss is reduced over examples and passes. "mean": the
            mean over the loss terms of a pass, divided by the number of passes per
            step, which is counted. "pass_mean": the mean over the terms of a pass; the
            losses of several passes are added. "sum": the sum over the terms of a pass.
            "step_mean": the sum of a pass, divided by the number of terms in all passes
            of the step on all ranks, and multiplied by the number of ranks that average
            gradients. "auto": "step_mean" if the model's forward receives
            ``num_items_in_batch``, as from transformers' Trainer; otherwise "mean".
        precondition_norms: Whether to precondition norm layers, and biases that train
            without their weight. Their gains and biases get exact Fisher blocks
            (diagonal ones above 256 entries). False: the base trains them with their
            plain gradients. Norm layers of unknown classes are recognized by what they
            compute.
        unsupported_layers: What trains weights that no rule supports. Such weights are
            those of recurrent layers, of layers larger than ``max_factor_dim``, and
            parameters outside of modules. "gradient_factors": factors are computed from
            the weight's gradient, as in Shampoo. A side longer than ``max_factor_dim``
            gets a diagonal factor. "base_optimizer": the base trains them with their
            plain gradients. "auto": "gradient_factors" if the base is adaptive, FSDP2
            has not sharded these weights, and they make up at least a tenth of the
            parameters; otherwise "base_optimizer".
        skip_layers: Patterns of modules that the base trains with their plain
            gradients. They match module names or class names, as in ``["head",
            "blocks.*.mlp"]``, and include all modules inside.
        max_factor_dim: Maximum number of rows of a factor. Layers with a larger A or G
            count as unsupported layers, and a warning names those that fall back to the
            base. Memory grows with the
            square of this number, and the time of a refresh with its cube. The A of an
            embedding is diagonal and may be larger.
        factor_dtype: Dtype in which factors are stored and sent. One of float32,
            float64 and bfloat16. Inverses have at least float32.
        adaptive: Whether the base is adaptive. :meth:`resolve` sets this; it is not a
            keyword of the optimizers.
    """

    damping: AutoScalar = AUTO
    damping_floor: float | Literal["auto"] = AUTO
    relative_damping: bool = True
    grafting: Literal["gradient", "none"] = "gradient"
    kl_clip: AutoScalar | None = AUTO
    step_scale: bool | Literal["auto"] = AUTO
    factor_decay: Schedule | PerStep | Literal["auto"] = AUTO
    solver: Literal["inverse", "eigen"] = "inverse"
    inv_update_steps: Interval | TraceRule | Literal["auto"] = AUTO
    factor_update_steps: Interval | Literal["auto"] = AUTO
    overhead: float | None = None
    fisher: Fisher = "empirical"
    kfac_approx: Literal["expand", "reduce"] = "expand"
    loss_reduction: str = AUTO
    precondition_norms: bool = False
    unsupported_layers: str = AUTO
    skip_layers: Sequence[str] = ()
    max_factor_dim: int = 8192
    factor_dtype: torch.dtype = torch.float32
    adaptive: bool = False

    def __post_init__(self) -> None:
        check_flag("relative_damping", self.relative_damping)
        self._check_numbers()
        self._check_intervals()

        # Flags and choices.
        check_flag("precondition_norms", self.precondition_norms)
        check_choice("grafting", self.grafting, ("gradient", "none"))
        check_choice("step_scale", self.step_scale, (AUTO, True, False))
        check_choice("solver", self.solver, ("inverse", "eigen"))
        if not callable(self.fisher):
            kinds = ("empirical", "categorical", "bernoulli", "gaussian")
            check_choice("fisher", self.fisher, kinds)
        check_choice("kfac_approx", self.kfac_approx, ("expand", "reduce"))
        reductions = (AUTO, "mean", "pass_mean", "sum", "step_mean")
        check_choice("loss_reduction", self.loss_reduction, reductions)
        unsupported_choices = (AUTO, "base_optimizer", "gradient_factors")
        check_choice("unsupported_layers", self.unsupported_layers, unsupported_choices)

        # Layers and their factors.
        check_patterns(self.skip_layers)
        check_count("max_factor_dim", self.max_factor_dim, "rows")
        check_dtype("factor_dtype", self.factor_dtype)

    def _check_numbers(self) -> None:
        """Check the damping and its floor, the clip and the decay."""
        if not is_auto(self.damping) and not callable(self.damping):
            check_damping(self.damping)
        if is_auto(self.damping) and not self.relative_damping:
            raise ValueError(
                "damping='auto' is relative to the layer's mean curvature; with "
                "relative_damping=False give a number, 1e-3 perhaps"
            )
        if not is_auto(self.damping_floor):
            remedy = "0 for no floor; 'auto' is 0.25"
            check_number(
                "damping_floor", self.damping_floor, low=0.0, high=1.0, remedy=remedy
            )
        clip = self.kl_clip
        if clip is not None and not is_auto(clip) and not callable(clip):
            check_clip(clip)
        if not is_auto(self.factor_decay) and not callable(self.factor_decay):
            check_decay(self.factor_decay)

    def _check_intervals(self) -> None:
        """Check intervals and the limit of the overhead."""
        # Intervals. A TraceRule has checked its own.
        by_rule = isinstance(self.inv_update_steps, TraceRule)
        if not by_rule and not is_auto(self.inv_update_steps):
            check_interval("inv_update_steps", self.inv_update_steps)
        if not is_auto(self.factor_update_steps):
            check_interval("factor_update_steps", self.factor_update_steps)

        # The limit, which only drift can keep.
        if self.overhead is None:
            return
        remedy = "0.15, say"
        check_number(
            "overhead", self.overhead, low=0.0, open_low=True, high=10.0, remedy=remedy
        )
        if not is_auto(self.inv_update_steps):
            raise ValueError(
                f"overhead={self.overhead} with inv_update_steps={self.inv_update_steps!r} would "
                f"do nothing; leave one of them out"
            )

    def resolve(self, base: Any) -> KFACOptions:
        """Return a copy in which values replace "auto" where the base determines them.

        Some keywords may remain "auto", such as ``kl_clip`` and ``inv_update_steps``.
        """
        adaptive = is_adaptive(base)
        # A schedule-free base has train() and eval(). Its step does not start from the
        # parameters, so the change of the parameters cannot be scaled.
        schedule_free = all(
            callable(getattr(base, name, None)) for name in ("train", "eval")
        )
        grafted = self.grafting == "gradient"

        values: dict[str, Any] = {
            "adaptive": adaptive,
            "skip_layers": tuple(self.skip_layers),
        }
        if is_auto(self.damping):
            values["damping"] = DAMPING
        if is_auto(self.damping_floor):
            values["damping_floor"] = DAMPING_FLOOR if self.relative_damping else 0.0
        if is_auto(self.kl_clip) and not grafted:
            values["kl_clip"] = None
        if is_auto(self.step_scale):
            values["step_scale"] = grafted and not schedule_free
        if is_auto(self.factor_decay):
            values["factor_decay"] = ADAPTIVE_STEP_DECAY if adaptive else STEP_DECAY
        if is_auto(self.factor_update_steps) and not self.by_drift:
            values["factor_update_steps"] = self._default_update_steps()
        if is_auto(self.unsupported_layers) and not adaptive:
            values["unsupported_layers"] = "base_optimizer"
        return replace(self, **values)

    def _default_update_steps(self) -> int:
        """Return the interval of the statistics if refreshes have a fixed interval."""
        every = self.refresh_interval
        if isinstance(every, int):
            return min(every, DEFAULT_INTERVAL)
        return DEFAULT_INTERVAL

    @property
    def by_drift(self) -> bool:
        """Whether each layer's refresh interval depends on its drift.

        Drift is the change of the preconditioned gradient by the new inverse.
        """
        return is_auto(self.inv_update_steps)

    @property
    def trace_rule(self) -> TraceRule | None:
        """The rule that skips refreshes of unchanged layers, or None."""
        rule = self.inv_update_steps
        return rule if isinstance(rule, TraceRule) else None

    @property
    def refresh_interval(self) -> Interval | None:
        """Steps between two refreshes.

        None: the drift of each layer determines them.
        """
        every = self.inv_update_steps
        if isinstance(every, TraceRule):
            return every.every
        if isinstance(every, str):
            return None
        return every

    @property
    def statistics_interval(self) -> Interval | None:
        """Steps between two updates of the statistics.

        None: one update at each refresh.
        """
        every = self.factor_update_steps
        if isinstance(every, str):
            return None
        return every

    @property
    def likelihood(self) -> Likelihood | None:
        """The distribution that labels are sampled from.

        None: the data's labels are used.
        """
        return None if self.fisher == "empirical" else self.fisher

    @property
    def samples(self) -> bool:
        """Whether labels are sampled from the model's outputs."""
        return self.fisher != "empirical"

    @property
    def follows_steps(self) -> bool:
        """Whether the step scale adapts to the changes of the loss.

        Call :meth:`resolve` first.
        """
        return self.step_scale is True

    @property
    def floor(self) -> float:
        """``damping_floor`` as a number.

        Call :meth:`resolve` first: "auto" counts as 0 here.
        """
        if isinstance(self.damping_floor, str):
            return 0.0
        return self.damping_floor

    @property
    def inv_dtype(self) -> torch.dtype:
        """The dtype in which inverses are computed, stored, sent and applied."""
        return torch.promote_types(self.factor_dtype, torch.float32)

    def describe(self) -> str:
        """Return damping, clip and decay for the summary.

        Call :meth:`resolve` first.
        """
        # Damping.
        relative = " of the mean curvature" if self.relative_damping else ""
        damping = "by a schedule"
        if not callable(self.damping):
            damping = f"{float(self.damping):g}{relative}"

        # KL clip.
        clip = f"{self.kl_clip}"
        if self.kl_clip is None:
            clip = "none"
        elif is_auto(self.kl_clip):
            clip = "four times the usual change"
        elif callable(self.kl_clip):
            clip = "by a schedule"
        elif isinstance(self.kl_clip, Tensor):
            clip = f"{self.kl_clip.item()}"

        # Decay of the running averages.
        memory = f"weight of the past {self.factor_decay} per update"
        if isinstance(self.factor_decay, PerStep):
            memory = f"factors remember {1 / (1 - self.factor_decay.decay):.0f} steps"
        elif callable(self.factor_decay):
            memory = "weight of the past by a schedule"
        return f"damping {damping}; clip {clip}; {memory}"


SCHEDULES = (
    "damping",
    "factor_decay",
    "kl_clip",
    "factor_update_steps",
    "inv_update_steps",
)
"""The keywords of KFACOptions that can be functions of the step."""


@dataclass(frozen=True, kw_only=True)
class KAISAOptions:
    """The keywords that only KAISA has.

    Attributes:
        grad_worker_fraction: Share of the ranks that precondition a layer's gradient.
            1.0: all ranks, the least communication per step (COMM-OPT). 1 / ranks, or
            0: one rank, the least memory (MEM-OPT). "auto": the share that
            :func:`second_order.plan` predicts to be fastest. Checkpoints save it. If
            FSDP2 has sharded the model, one rank preconditions each layer, because it
            gathers the rows of the gradient. Below 1.0, not all ranks have a layer's
            inverse, so call :meth:`consolidate` before you save.
        factor_exchange: How ranks exchange and store factors. "all_reduce": every rank
            stores all factors. "reduce": only the rank that decomposes a factor
            receives its statistics and stores it. This halves the traffic, and memory
            shrinks with the number of ranks. A checkpoint then needs
            :meth:`consolidate` or ``torch.distributed.checkpoint``. "pipelined":
            "all_reduce" in buckets that are sent during the backward pass (Shi et al.
            2021), with the same results.
        exchange_dtype: Dtype in which statistics and decompositions are sent. None: the
            dtype in which they are stored. ``torch.bfloat16`` halves the bytes of
            float32, and rounds to 8 bits; all ranks receive the same numbers.
            Gradients, and statistics of the first 20 steps, are sent without
            conversion.
        colocate_factors: Whether one rank decomposes a layer's factors. False: two do.
    """

    grad_worker_fraction: float | Literal["auto"] = 1.0
    factor_exchange: str = "all_reduce"
    exchange_dtype: torch.dtype | None = None
    colocate_factors: bool = True

    def __post_init__(self) -> None:
        if not is_auto(self.grad_worker_fraction):
            check_number(
                "grad_worker_fraction",
                self.grad_worker_fraction,
                low=0.0,
                high=1.0,
                remedy="1.0 is the default, and 'auto' chooses",
            )
        choices = ("all_reduce", "reduce", "pipelined")
        check_choice("factor_exchange", self.factor_exchange, choices)
        if self.exchange_dtype is not None:
            check_dtype("exchange_dtype", self.exchange_dtype)
        check_flag("colocate_factors", self.colocate_factors)

    def check_with(self, options: KFACOptions) -> None:
        """Raise ValueError if factors would be sent in a wider dtype than stored."""
        sent = self.exchange_dtype
        stored = options.factor_dtype
        if sent is not None and sent.itemsize > stored.itemsize:
            raise ValueError(
                f"exchange_dtype={sent} is wider than factor_dtype={stored}: more would be sent "
                f"than is stored; use exchange_dtype=None"
            )


@dataclass(frozen=True, kw_only=True)
class DPKFACOptions:
    """The keywords that only DPKFAC has.

    Attributes:
        assignment: Which rank owns which layer. "balanced": the next largest layer goes
            to the rank with the least memory in use. "round_robin": layer i goes to
            rank i mod P, as in the paper.
        gradient_exchange: How gradients reach the owner of a layer. "owner": the
            gradients of a layer are summed at its owner, which sends them back
            preconditioned. The volume is that of one all-reduce. "all_reduce": all
            gradients are averaged on all ranks first, which sends 1.5 times as much.
            DistributedDataParallel always does this.
    """

    assignment: Literal["balanced", "round_robin"] = "balanced"
    gradient_exchange: str = "owner"

    def __post_init__(self) -> None:
        check_choice("assignment", self.assignment, ("balanced", "round_robin"))
        check_choice(
            "gradient_exchange", self.gradient_exchange, ("owner", "all_reduce")
        )


@dataclass(frozen=True, kw_only=True)
class DistKFACOptions:
    """The keywords that only DistKFAC has.

    Attributes:
        stats_workers: Number of ranks that compute statistics instead of training. If
            all of them are lost, the other ranks compute statistics from their own
            passes.
        helper_timeout: Seconds without a message until a stats worker counts as lost.
        inverse_threads: Number of threads of this process that compute inverses. None:
            half of the process's share of the cores, at least 1 and at most 4. The
            processes that ``torchrun`` starts on a host share its cores equally.
        inverse_device: Where inverses are computed: "cpu", or "cuda" in its own stream.
        async_inverse: Whether inverses are computed on threads while training
            continues. False: training waits for every inverse, as with
            ``max_staleness=0``.
        max_staleness: Maximum number of steps before training waits for an inverse.
            None: no maximum, but with ``inv_update_steps="auto"`` training waits before
            the layer's next refresh. 0: the synchronous algorithm.
        deterministic: Whether to use each inverse after a fixed number of steps. This
            is ``max_staleness`` steps after the snapshot of its factors (with
            ``inv_update_steps="auto"`` at most the layer's interval minus one), even if
            it is ready earlier. Runs are then repeatable bit for bit.
        conv_factors: How the factors of a convolution are computed. "kfc": from all its
            locations. "cheap": inputs are averaged over locations, and gradients are
            summed over them, before their second moments are computed (Ba et al. 2017,
            appendix A).
        doubly_factored: The wide Linears that get three small factors instead of A and
            G. Their inputs are flattened feature maps (Ba et al. 2017, section 4). A
            dictionary from layer names to (locations, channels). "auto": the layers
            with more than ``max_factor_dim`` inputs, with the channels of the preceding
            convolution. None: no layer.
    """

    stats_workers: int = 0
    helper_timeout: float = 60.0
    inverse_threads: int | None = None
    inverse_device: str = "cpu"
    async_inverse: bool = True
    max_staleness: int | None = None
    deterministic: bool = False
    conv_factors: str = "kfc"
    doubly_factored: DoublyFactored = AUTO

    def __post_init__(self) -> None:
        # Each option by itself.
        check_whole("stats_workers", self.stats_workers, 0, "0 for none")
        check_timeout("helper_timeout", self.helper_timeout)
        if self.inverse_threads is not None:
            check_count("inverse_threads", self.inverse_threads, "threads")
        check_choice("inverse_device", self.inverse_device, ("cpu", "cuda"))
        check_flag("async_inverse", self.async_inverse)
        check_flag("deterministic", self.deterministic)
        check_choice("conv_factors", self.conv_factors, ("kfc", "cheap"))
        self._check_doubly_factored()
        if self.max_staleness is not None:
            check_whole("max_staleness", self.max_staleness, 0, "None for no bound")

        # Options that exclude each other.
        if not self.async_inverse and self.max_staleness:
            raise ValueError(
                f"async_inverse=False waits for every inverse, so that max_staleness="
                f"{self.max_staleness} has no meaning; leave it out"
            )
        if not self.deterministic or not self.async_inverse:
            return
        if self.max_staleness is None:
            raise ValueError(
                "deterministic=True uses inverses after exactly max_staleness steps; give "
                "max_staleness, 10 perhaps"
            )
        if self.stats_workers:
            raise ValueError(
                f"deterministic=True does not work with stats_workers={self.stats_workers}: when "
                f"their statistics arrive depends on the machine; use stats_workers=0"
            )

    def _check_doubly_factored(self) -> None:
        chosen = self.doubly_factored
        if chosen is None or is_auto(chosen):
            return
        # Every entry must be a name with a pair of integers.
        is_valid = isinstance(chosen, Mapping)
        entries: Any = chosen.items() if isinstance(chosen, Mapping) else ()
        for name, sizes in entries:
            is_pair = isinstance(sizes, tuple | list) and len(sizes) == 2
            has_integers = is_pair and all(type(size) is int for size in sizes)
            if not isinstance(name, str) or not has_integers:
                is_valid = False
        if not is_valid:
            raise ValueError(
                f"doubly_factored={chosen!r} is not 'auto', None, or a dict of layer names and "
                f"(locations, channels), both integers"
            )

    @property
    def staleness(self) -> int | None:
        """Maximum steps before training waits for an inverse; 0 if synchronous."""
        if not self.async_inverse:
            return 0
        return self.max_staleness

    @property
    def wide_layers(self) -> Mapping[str, tuple[int, int]] | str:
        """The value of ``doubly_factored``, with None as an empty dictionary."""
        chosen = self.doubly_factored
        if chosen is None:
            return {}
        if isinstance(chosen, str):
            return chosen
        return {name: (pair[0], pair[1]) for name, pair in chosen.items()}


@dataclass(frozen=True, kw_only=True)
class FOSIOptions:
    """The keywords that DHO2 and MRDHO2 share.

    Attributes:
        num_largest: k, the number of largest eigenpairs. Newton steps go along them.
        num_smallest: l, the number of smallest (most negative) eigenpairs. Steps along
            negative ones lead away from saddle points.
        curvature_interval: T, steps between two refreshes of the eigenpairs. Number or
            callable. "auto": as often as ``overhead`` allows.
        overhead: Limit on the time of refreshes, as a share of the time of the base
            alone. Above 0 and up to 10; needs ``curvature_interval="auto"``. The first
            five refreshes are timed and set the number of steps to the next one, which
            checkpoints save. Before the first refresh, a Hessian-vector product counts
            as one step.
        warmup_steps: W, steps of the base before the first refresh. None:
            ``curvature_interval``, or with "auto" as many as ``overhead`` requires.
        newton_scale: α, the length of a Newton step; 1.0 is a full step. A number is α
            at the largest learning rate, and shrinks and grows with the learning rate.
            A callable of the step is used as it is.
        lr_scale_clip: Upper bound on s, the factor that multiplies the steps of the
            base. s = |λ₁| / |λ_k| is the ratio of the largest and the k-th largest
            eigenvalue. The steps may be longer because the k steepest directions no
            longer limit them. None: the published values, 3 for SGD, and 1 for other
            bases, which scale their steps themselves.
        lr_scale_guard: Whether s starts at 1 and grows only while the loss does not
            rise. s then grows by half at each further refresh, and is halved if the
            loss of the curvature batch rose by more than 10 % since the last one. The
            guard exists because three times the learning rate of the base alone may be
            too large. False: s as published.
        lanczos_iterations: m, the maximum number of Hessian-vector products per
            refresh. None: max(4(k + l), 2 ln n), or max(2k, 20) if that is less, l is
            0, and the refresh starts from the last eigenvectors.
        lanczos_tol: Relative residual of the eigenpairs at which a refresh ends. Every
            eigenpair then has ‖Hv − θv‖ <= ``lanczos_tol`` · |θ|.
        lanczos_dtype: Dtype of the eigenvectors. None: float64 if a parameter has it,
            otherwise float32.
        eigenvalue_floor: Lower bound on eigenvalues, as a share of the largest one. It
            bounds the absolute values that steps are divided by.
        subspace_momentum: Momentum in the span of the eigenvectors. "average": a
            running average with the β of the base, so that α has the same meaning for
            every momentum. "base": as the base does it. SGD with momentum β sums
            1 / (1 − β) times as much, so FOSI with α = 0.01 and β = 0.9 corresponds to
            "average" with α = 0.1. A number: a running average with this β.
        warm_start: Whether a refresh starts from the last eigenvectors.
        trust_region: Whether to shorten Newton steps if the eigenpairs are wrong. A
            step is at most ten times as long as usual, in units of the loss. If V̂ᵀg
            changes faster along the steps than the eigenvalues predict, steps are cut
            to half of what is stable, and grow again later. V̂ are the eigenvectors,
            and g is the gradient. A step that leads to a gradient that is not finite is
            reverted. As long as the eigenpairs are right, steps equal those of False
            bit for bit.
        hvp: How Hessian-vector products are computed. "retained": from one graph of the
            curvature batch, which is kept for the whole refresh. "recomputed": the
            closure is called again for each product, which needs the memory of one
            graph at a time. "differences": finite differences of gradients, for models
            that cannot be differentiated twice. "auto": "differences" if FSDP2 has
            sharded the model, "recomputed" if you pass several closures, otherwise
            "retained". With "recomputed" and "differences", the closure must use the
            same batch during a refresh.
        curvature: The matrix of the eigenpairs. "hessian": the Hessian. "gauss-newton":
            the Hessian of the loss with outputs that are linear in the weights, which
            has no negative eigenvalues if the loss is convex in the outputs.
            "empirical-fisher": the mean of ggᵀ over the gradients g of the examples.
            For "gauss-newton" and "empirical-fisher", the closure returns
            :class:`second_order.lanczos.Outputs`.
        layout: How r eigenvectors of n elements are stored on P ranks. "row": n/P rows
            of them, and of the state of the base, on each rank. This works for
            elementwise bases, which are all of torch's except Adafactor, Muon and
            SparseAdam. "column": r/P eigenvectors and
            the whole state of the base, for every base.
        seed: Seed of the random numbers in the start vectors of refreshes. Each refresh
            adds its step, or its epoch if helper ranks compute it.
    """

    num_largest: int = 10
    num_smallest: int = 0
    curvature_interval: Interval | Literal["auto"] = AUTO
    overhead: float = 0.2
    warmup_steps: int | None = None
    newton_scale: Schedule = 0.1
    lr_scale_clip: float | None = None
    lr_scale_guard: bool = True
    lanczos_iterations: int | None = None
    lanczos_tol: float = 1e-2
    lanczos_dtype: torch.dtype | None = None
    eigenvalue_floor: float = 1e-2
    subspace_momentum: float | Literal["average", "base"] = "average"
    warm_start: bool = True
    trust_region: bool = True
    hvp: Literal["auto", "retained", "recomputed", "differences"] = "auto"
    curvature: Literal["hessian", "gauss-newton", "empirical-fisher"] = "hessian"
    layout: Literal["row", "column"] = "row"
    seed: int = 0

    def __post_init__(self) -> None:
        # Refreshes.
        check_whole("num_largest", self.num_largest, 0, "0 for none of them")
        check_whole("num_smallest", self.num_smallest, 0, "0 for none of them")
        if not is_auto(self.curvature_interval):
            check_interval("curvature_interval", self.curvature_interval)
        check_number(
            "overhead",
            self.overhead,
            low=0.0,
            open_low=True,
            high=10.0,
            remedy="0.2 is the default",
        )
        if self.warmup_steps is not None:
            check_whole(
                "warmup_steps", self.warmup_steps, 0, "0 to begin with a refresh"
            )

        # Newton steps, and the scale of the base's step.
        if not callable(self.newton_scale):
            check_newton_scale(self.newton_scale)
        if self.lr_scale_clip is not None:
            check_number(
                "lr_scale_clip",
                self.lr_scale_clip,
                low=1.0,
                remedy="1.0 for no scaling",
            )
        self._check_lanczos()
        momentum = self.subspace_momentum
        if isinstance(momentum, str):
            check_choice("subspace_momentum", momentum, ("average", "base"))
        else:
            check_number(
                "subspace_momentum",
                momentum,
                low=0.0,
                high=1.0,
                open_high=True,
                remedy="use 'average' for that of the base",
            )

        # Flags and choices.
        for name in ("lr_scale_guard", "warm_start", "trust_region"):
            check_flag(name, getattr(self, name))
        check_choice("layout", self.layout, ("row", "column"))
        check_seed("seed", self.seed)

    def _check_lanczos(self) -> None:
        """Check the options of the Lanczos algorithm."""
        most = self.lanczos_iterations
        if most is not None:
            check_whole(
                "lanczos_iterations",
                most,
                max(self.num_pairs, 1),
                "4 (num_largest + num_smallest)",
            )
        check_number(
            "lanczos_tol",
            self.lanczos_tol,
            low=0.0,
            open_high=True,
            remedy="1e-2 is the default",
        )
        if self.lanczos_dtype is not None:
            check_choice(
                "lanczos_dtype", self.lanczos_dtype, (torch.float32, torch.float64)
            )
        check_number(
            "eigenvalue_floor",
            self.eigenvalue_floor,
            low=0.0,
            high=1.0,
            remedy="0.01 is usual",
        )
        check_choice("hvp", self.hvp, ("auto", "retained", "recomputed", "differences"))
        if self.num_smallest > 0 and self.curvature != "hessian":
            raise ValueError(
                f"num_smallest={self.num_smallest} with curvature={self.curvature!r}: it has no "
                f"negative eigenvalues to find; use num_smallest=0, or curvature='hessian'"
            )

    @cached_property
    def num_pairs(self) -> int:
        """Number of eigenpairs that a refresh computes, k + l."""
        return self.num_largest + self.num_smallest


@dataclass(frozen=True, kw_only=True)
class EpochOptions(FOSIOptions):
    """The keywords of MRDHO2.

    Without helper ranks, MRDHO2 refreshes the eigenpairs every ``epoch_steps`` steps,
    as DHO2 does. The descriptions here replace those in FOSIOptions.

    Attributes:
        helper_ranks: A, the number of ranks that compute eigenpairs and do not train.
        epoch_steps: E, the number of steps between two final updates.
        final_update: When to apply equation 17 of the paper. "paper": after every
            epoch. "guarded": only if it reduces the loss on the helpers' batches by at
            least half.
        helper_timeout: Seconds without a message after which helpers count as lost.
            Workers also wait at most this long at the end of an epoch for eigenpairs,
            and again for the losses of "guarded".
        warmup_steps: W, steps of the base alone before the first epoch with helpers.
            None: 0. Without helper ranks: steps before the first eigenpairs; None:
            ``epoch_steps``.
        lanczos_iterations: m, the maximum number of Hessian-vector products per epoch.
            None: max(4(k + l), 2 ln n). Without helper ranks, refreshes after the first
            start from the last eigenvectors, and None is max(2k, 20) for them if that
            is less and l is 0.
    """

    helper_ranks: int = 1
    epoch_steps: int = 100
    final_update: Literal["guarded", "paper"] = "guarded"
    helper_timeout: float = 60.0
    layout: Literal["row", "column"] = "column"

    def __post_init__(self) -> None:
        check_whole("helper_ranks", self.helper_ranks, 0, "0 for none")
        check_count("epoch_steps", self.epoch_steps, meaning="steps")
        check_choice("final_update", self.final_update, ("guarded", "paper"))
        check_timeout("helper_timeout", self.helper_timeout)
        super().__post_init__()

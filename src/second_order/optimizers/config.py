"""Every keyword of the optimizers: its default, its meaning and its check.

    CommonOptions     the base optimizer, and what describes the script
    KFACOptions       the keywords that KAISA, DPKFAC and DistKFAC share
    KAISAOptions, DPKFACOptions, DistKFACOptions     the keywords that only one of them has
    FOSIOptions       the keywords that DHO2 and MRDHO2 share
    EpochOptions      these, and those of MRDHO2

Each optimizer repeats its keywords in a signature of its own, so that editors and ``help()`` show
them. A test compares the two. This module imports no other folder, and every folder may read it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
)

__all__ = [
    "DAMPING",
    "INTERVALS",
    "SCHEDULES",
    "AuxBase",
    "CommonOptions",
    "DPKFACOptions",
    "DecayingClip",
    "DistKFACOptions",
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
Likelihood: TypeAlias = Literal["categorical", "bernoulli", "gaussian"] | Callable[[Any], Tensor]
Fisher: TypeAlias = Literal["empirical"] | Likelihood
AutoScalar: TypeAlias = Scalar | Callable[[int], Scalar] | Literal["auto"]

# Chosen by benchmarks/progress/defaults.py.
DAMPING = 0.1  # of a layer's mean curvature
FLOOR = 0.25  # of the mean curvature of all layers

INTERVALS = ("factor_update_steps", "inv_update_steps")
INTERVAL = 10
"""Steps between two refreshes under a TraceRule, and between two updates of the statistics."""


# ------------------------------------------------------------------------------ values of keywords


@dataclass(frozen=True)
class PerStep:
    """A weight of the past that counts steps, however rare updates are; a ``factor_decay``.

    Attributes:
        decay: Weight of the past per step, in [0, 1). About 1 / (1 - decay) steps are remembered.
        share: The share of the steps taken so far that is remembered while that is fewer, at least
            two steps. None: the number of steps taken does not count. Curvature changes fastest
            early in training, so that old statistics soon mislead.

    Raises:
        TypeError: For a value that is no number.
        ValueError: For a value outside its bounds.
    """

    decay: float
    share: float | None = None

    def __post_init__(self) -> None:
        check_decay(self.decay)
        if self.share is not None:
            remedy = "1 / 3, say, or None"
            check_number("share", self.share, low=0.0, open_low=True, high=1.0, remedy=remedy)


@dataclass(frozen=True)
class DecayingClip:
    """The bound on a step's squared Fisher norm, c₀ ζᵏ (Ba et al. 2017, section 5); a ``kl_clip``.

    Attributes:
        start: c₀, the bound at the first step.
        decay: ζ, the factor by which the bound shrinks every ``every`` steps.
        every: Number of steps between two decays. The paper uses half an epoch.

    Raises:
        TypeError: For a value that is no number.
        ValueError: For a value outside its bounds.
    """

    start: float = 0.01
    decay: float = 0.96
    every: int = 100

    def __post_init__(self) -> None:
        check_number("start", self.start, low=0.0, open_low=True, open_high=True, remedy="0.01")
        check_number("decay", self.decay, low=0.0, open_low=True, high=1.0, remedy="0.96")
        check_count("every", self.every, "steps")

    def __call__(self, step: int) -> float:
        """The bound κ at a step."""
        return max(self.start * self.decay ** (step // self.every), sys.float_info.min)


@dataclass(frozen=True)
class TraceRule:
    """Refresh a layer only if its curvature has moved; an ``inv_update_steps`` (THOR, Chen 2021).

    The measure is the trace of A ⊗ G + γ, compared with its value at the layer's last refresh.

    Attributes:
        upper: A layer is refreshed if its trace has changed by more than this share, or γ has.
        lower: A layer whose trace has changed by less than this share is never looked at again.
            0: every layer is looked at each time.
        every: Steps from one look at the traces to the next; number or callable.

    Raises:
        TypeError: For a value that is no number.
        ValueError: For a value outside its bounds, or ``lower`` above ``upper``.
    """

    upper: float = 0.1  # chosen on small tasks at commit 750a6e5
    lower: float = 0.0
    every: Interval = INTERVAL

    def __post_init__(self) -> None:
        for name in ("upper", "lower"):
            number = getattr(self, name)
            check_number(name, number, low=0.0, open_high=True, remedy="TraceRule() has 0.1 and 0")
        if self.lower > self.upper:
            raise ValueError(f"TraceRule(upper={self.upper}, lower={self.lower}): swap the two")
        check_interval("every", self.every)


@dataclass(frozen=True)
class AuxBase:
    """A second base optimizer, with options; a value of ``aux_base``.

        aux_base=AuxBase(torch.optim.AdamW, layers=["head"], kwargs={"lr": 1e-3})

    Attributes:
        optimizer_class: Class of the optimizer.
        layers: Patterns of modules, as for ``skip_layers``, that it also trains, with all that is
            inside them.
        kwargs: Its arguments where they differ from those of ``base``.

    Raises:
        TypeError: If ``layers`` or ``kwargs`` have the wrong type.
    """

    optimizer_class: type[torch.optim.Optimizer]
    layers: Sequence[str] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_patterns(self.layers, "layers")
        if not isinstance(self.kwargs, Mapping):
            raise TypeError(f"kwargs={self.kwargs!r} is not a mapping; write kwargs={{'lr': 1e-3}}")


# --------------------------------------------------------------------------------------- checks


def check_damping(value: Any) -> None:
    """Raise unless a damping is a finite number of at least 0, or a tensor of one."""
    remedy = "'auto' is 0.1 of the mean curvature"
    check_scalar("damping", value, low=0.0, open_high=True, remedy=remedy)


def check_decay(value: Any) -> None:
    """Raise unless a factor_decay is a PerStep, or lies in [0, 1)."""
    if not isinstance(value, PerStep):
        remedy = "'auto' counts steps"
        check_number("factor_decay", value, low=0.0, high=1.0, open_high=True, remedy=remedy)


def check_clip(value: Any) -> None:
    """Raise unless a kl_clip is a positive number, or a tensor of one."""
    remedy = "use a positive number, 'auto', or None for no clip"
    check_scalar("kl_clip", value, low=0.0, open_low=True, remedy=remedy)


def check_newton_scale(value: Any) -> None:
    """Raise unless a newton_scale is a finite number of at least 0."""
    remedy = "0.1 is the default, 1.0 a full step"
    check_number("newton_scale", value, low=0.0, open_high=True, remedy=remedy)


def check_dtype(name: str, value: Any) -> None:
    """Raise unless factors can be stored and sent in a dtype."""
    if value not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(
            f"{name}={value} is not one of float32, float64 and bfloat16 "
            f"(float16 overflows at 65504); use torch.float32"
        )


def is_auto(value: Any) -> TypeGuard[str]:
    """Whether a keyword is left to the optimizer."""
    return isinstance(value, str) and value == AUTO


# ------------------------------------------------------------------------------------- keywords


def options_from(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """Make the options of a dataclass from the arguments of an optimizer, by their names."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in arguments.items() if name in names})


STEP_DECAY = PerStep(0.995)
ADAPTIVE_STEP_DECAY = PerStep(0.978, share=1 / 3)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """The base optimizer, and the keywords that describe the script.

    Attributes:
        base: Class of the first-order optimizer that takes the step with the preconditioned
            gradients.
        aux_base: Class of a second base optimizer, or a :class:`~second_order.AuxBase`, for
            embeddings, the output head (the last Linear), norms, biases and parameters outside of
            modules. ``base`` then only trains hidden weights: weights of modules with at least two
            dimensions (exactly two with ``torch.optim.Muon``). None: ``base`` trains everything.
        model: The model, if you pass parameters and choose the model yourself. None: the smallest
            module that contains all of them, and the frozen network around it. Wrappers
            (DistributedDataParallel, ``torch.compile``) are removed.
        grad_scaler: The ``GradScaler`` that scales the loss, if there is one.
        gradient_averaging: "auto" averages gradients over the processes that train, after all of
            them have received the first one's parameters, unless DistributedDataParallel does. True
            or False: always or never.
        process_group: The processes to work with. None: the default group, if there is one.
        debug: Compare the processes' parameters bit for bit: before the first step and every 100
            steps for True, or every so many steps. If they differ, every process raises
            :class:`~second_order.RankMismatchError` with the name of the parameter and the ranks.
            Not saved in checkpoints.
    """

    base: type[torch.optim.Optimizer] = torch.optim.SGD
    aux_base: type[torch.optim.Optimizer] | AuxBase | None = None
    model: nn.Module | Sequence[nn.Module] | None = None
    grad_scaler: Any = None
    gradient_averaging: str | bool = AUTO
    process_group: Any = None
    debug: bool | int = False

    @property
    def aux(self) -> AuxBase | None:
        """The second base optimizer, if there is one."""
        if self.aux_base is None or isinstance(self.aux_base, AuxBase):
            return self.aux_base
        return AuxBase(self.aux_base)


@dataclass(frozen=True, kw_only=True)
class KFACOptions:
    """The keywords that systems with Kronecker factors share.

    Attributes:
        damping: γ, added to the curvature before it is inverted; number or callable, at least 0. A
            larger γ is more cautious: the step turns from the natural to the plain gradient.
            "auto": 0.1. A number may be a tensor, which a schedule fills in place. If it is on a
            device, the host does not read it, so its value is not checked.
        damping_floor: The share of the mean curvature over all layers to which a layer's mean
            curvature is raised in its γ. The mean over layers is the square of the mean square
            root. "auto": 0.25 with ``relative_damping``, otherwise 0, which is no floor.
        relative_damping: γ of a layer is ``damping`` times the layer's mean curvature, tr A tr G /
            (dim A dim G), so it does not depend on the scale of the loss. False: γ is ``damping``,
            as in the papers. KAISA's published code has smaller factors, and so another γ for the
            same step: see "Where it differs from the paper" in its docs.
        grafting: Scale of the preconditioned gradient P = (A ⊗ G + γ)⁻¹ ∇. "gradient": P is
            multiplied by c + γ, where c is the layer's mean curvature, which gives it the scale of
            the gradient. If the curvature is the same in all directions, the gradient does not
            change. "none": P has the length of an approximate Newton step, as in the papers. Such a
            step grows as gradients shrink, so also set ``kl_clip``. Adaptive bases normalize by
            past gradients (Adam by the last thousand steps) and need "gradient".
        kl_clip: κ, the bound on the change lr² Σ P·∇ that one step makes to the model's predictions
            (Pauloski et al. 2022, 5.1); number, tensor of one, callable or None for no bound. A
            number is the bound at the learning rate's peak and shrinks with lr² when a schedule
            lowers it; a callable is used as it is. "auto": Σ |P·∇|, without lr, may be at most four
            times its running average over some twenty steps, so that a batch of outliers cannot
            undo many steps. With ``grafting="none"``, "auto" is no bound.
        step_scale: Whether to multiply the steps of preconditioned weights by a factor τ that
            follows what the steps do to the loss. "auto": if ``grafting`` is "gradient", unless the
            base is schedule-free.
        factor_decay: Weight of the past in the running averages of A and G at an update, in [0, 1);
            number, callable or :class:`~second_order.PerStep`. "auto": the number of steps
            remembered does not depend on the intervals: some 45 (0.978 to the power of the steps
            since the last update) under an adaptive base such as Adam, and two hundred (0.995)
            under others.
        solver: "inverse" damps A and G separately and computes their Cholesky inverses. "eigen"
            applies (A ⊗ G + γ I)⁻¹ exactly, which costs several times as much and gains nothing on
            most of the tasks that the defaults were chosen on.
        inv_update_steps: Steps from one refresh of the inverses to the next; number or callable.
            "auto": each layer has its own interval, 1 to 32 steps. It is halved if the old and the
            new inverse give the gradient different directions, and doubled if they agree. A
            :class:`~second_order.TraceRule` refreshes layers whose curvature has moved.
        factor_update_steps: Steps from one update of the statistics to the next; number or
            callable. "auto": at each refresh if these are "auto", otherwise every 10 steps, or as
            often as refreshes if a number makes these more frequent. If ``inv_update_steps`` is a
            callable, give one here too.
        overhead: With ``inv_update_steps="auto"``: the largest share of the time of ordinary steps
            that refreshes may take, above 0 and up to 10. The first five refreshes are timed. They
            set the least number of steps between two later ones, which checkpoints keep. If layers
            drift faster than that allows, a warning says so. None: no limit.
        fisher: Whose gradients the factors are made of. "empirical": those of your own backward
            pass. Otherwise labels are sampled from the distribution that the model's outputs give,
            at the price of a further backward pass to the layers' outputs whenever statistics are
            due: "categorical" (logits, classes on the last dimension), "bernoulli" (logits),
            "gaussian" (means), or a callable ``output -> summed negative log-likelihood of labels
            that it has sampled``.
        kfac_approx: For layers applied at many positions: "expand" if each position has a loss term
            (language models), "reduce" if positions are pooled (Eschenhagen et al. 2023). Fused
            experts then count as unsupported layers.
        loss_reduction: What the loss of a backward pass is. "mean": the mean over the terms of the
            pass, divided by the number of passes per step, which is counted. "pass_mean": the mean
            over the terms of the pass; losses of several passes are added up. "sum": the sum over
            the terms of the pass. "step_mean": their sum divided by the number of terms in all
            passes of the step, on all processes, and times the number of processes, over which
            gradients are averaged. "auto": "step_mean" if the model's forward is given
            ``num_items_in_batch``, as by transformers' Trainer; otherwise "mean".
        precondition_norms: Whether to precondition the gains and biases of norm layers, and biases
            that train without their weight, by exact Fisher blocks (diagonal ones above 256
            entries). False: the base trains them with their plain gradients. Norm layers of unknown
            classes are recognized by what they compute.
        unsupported_layers: What trains weights that no rule supports, such as those of recurrent
            layers, parameters outside of modules, and layers larger than ``max_factor_dim``.
            "gradient_factors": factors are computed from the weight's gradient, as in Shampoo. A
            side longer than ``max_factor_dim`` gets a diagonal factor. "base_optimizer": the base
            trains them with their plain gradients. "auto": "gradient_factors" if the base is
            adaptive, FSDP2 has not sharded these weights, and they make up at least a tenth of the
            parameters; otherwise "base_optimizer".
        skip_layers: Patterns of module names or class names, such as ``["head", "blocks.*.mlp"]``,
            that only the base trains, with all that is inside them.
        max_factor_dim: Largest size of a factor. Layers with a larger one, A of the inputs or G of
            the outputs, fall back to the base, and a warning names them: memory grows with its
            square, a decomposition with its cube. The A of an embedding is diagonal, of any size.
        factor_dtype: Dtype in which factors are stored and sent: float32, float64 or bfloat16.
            Inverses are in float32 at least.
        adaptive: Whether the base is adaptive; not a keyword.
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
        check_patterns(self.skip_layers)
        check_count("max_factor_dim", self.max_factor_dim, "rows")
        check_dtype("factor_dtype", self.factor_dtype)

    def _check_numbers(self) -> None:
        """Check damping, clip and memory."""
        if not is_auto(self.damping) and not callable(self.damping):
            check_damping(self.damping)
        if is_auto(self.damping) and not self.relative_damping:
            raise ValueError(
                "damping='auto' is relative to the layer's mean curvature; with "
                "relative_damping=False give a number, 1e-3 perhaps"
            )
        if not is_auto(self.damping_floor):
            remedy = "0 for no floor; 'auto' is 0.25"
            check_number("damping_floor", self.damping_floor, low=0.0, high=1.0, remedy=remedy)
        if self.kl_clip is not None and not is_auto(self.kl_clip) and not callable(self.kl_clip):
            check_clip(self.kl_clip)
        if not is_auto(self.factor_decay) and not callable(self.factor_decay):
            check_decay(self.factor_decay)

    def _check_intervals(self) -> None:
        """Check intervals and the limit of the overhead."""
        by_rule = isinstance(self.inv_update_steps, TraceRule)
        if not by_rule and not is_auto(self.inv_update_steps):
            check_interval("inv_update_steps", self.inv_update_steps)
        if not is_auto(self.factor_update_steps):
            check_interval("factor_update_steps", self.factor_update_steps)
        if self.overhead is None:
            return
        remedy = "0.15, say"
        check_number("overhead", self.overhead, low=0.0, open_low=True, high=10.0, remedy=remedy)
        if not is_auto(self.inv_update_steps):
            raise ValueError(
                f"overhead={self.overhead} with inv_update_steps={self.inv_update_steps!r} would "
                f"do nothing; leave one of them out"
            )

    def resolved(self, base: Any) -> KFACOptions:
        """The same options with a value for each "auto", as the base and the others ask for."""
        adaptive = is_adaptive(base)
        # A schedule-free base keeps other points than the weights, which would not be scaled.
        schedule_free = all(callable(getattr(base, name, None)) for name in ("train", "eval"))
        grafted = self.grafting == "gradient"
        found: dict[str, Any] = {"adaptive": adaptive, "skip_layers": tuple(self.skip_layers)}
        if is_auto(self.damping):
            found["damping"] = DAMPING
        if is_auto(self.damping_floor):
            found["damping_floor"] = FLOOR if self.relative_damping else 0.0
        if is_auto(self.kl_clip) and not grafted:
            found["kl_clip"] = None
        if is_auto(self.step_scale):
            found["step_scale"] = grafted and not schedule_free
        if is_auto(self.factor_decay):
            found["factor_decay"] = ADAPTIVE_STEP_DECAY if adaptive else STEP_DECAY
        if is_auto(self.factor_update_steps) and not self.by_drift:
            found["factor_update_steps"] = self._usual_update_steps()
        if is_auto(self.unsupported_layers) and not adaptive:
            found["unsupported_layers"] = "base_optimizer"
        return replace(self, **found)

    def _usual_update_steps(self) -> int:
        """The interval of the statistics if refreshes have an interval: that one, at most 10."""
        every = self.refresh_interval
        return min(every, INTERVAL) if isinstance(every, int) else INTERVAL

    @property
    def by_drift(self) -> bool:
        """Whether refreshes follow what they change."""
        return is_auto(self.inv_update_steps)

    @property
    def trace_rule(self) -> TraceRule | None:
        """The rule that keeps the inverses of layers whose curvature has not moved."""
        return self.inv_update_steps if isinstance(self.inv_update_steps, TraceRule) else None

    @property
    def refresh_interval(self) -> Interval | None:
        """Steps from one refresh to the next; None if refreshes follow what they change."""
        every = self.inv_update_steps
        if isinstance(every, TraceRule):
            return every.every
        return None if isinstance(every, str) else every

    @property
    def statistics_interval(self) -> Interval | None:
        """Steps from one update of the statistics to the next; None for one at each refresh."""
        every = self.factor_update_steps
        return None if isinstance(every, str) else every

    @property
    def likelihood(self) -> Likelihood | None:
        """The distribution that labels are sampled from; None if they are the data's."""
        return None if self.fisher == "empirical" else self.fisher

    @property
    def samples(self) -> bool:
        """Whether labels are sampled from the model's outputs."""
        return self.fisher != "empirical"

    @property
    def follows_steps(self) -> bool:
        """Whether the step scale follows what steps do to the loss, once resolved."""
        return self.step_scale is True

    @property
    def floor(self) -> float:
        """The floor of the mean curvature in γ, once resolved."""
        return 0.0 if isinstance(self.damping_floor, str) else self.damping_floor

    @property
    def inv_dtype(self) -> torch.dtype:
        """The dtype in which inverses are computed, stored, sent and applied."""
        return torch.promote_types(self.factor_dtype, torch.float32)

    def describe(self) -> str:
        """Damping, clip and memory for the summary: the values that "auto" has led to."""
        relative = " of the mean curvature" if self.relative_damping else ""
        damping = "by a schedule"
        if not callable(self.damping):
            damping = f"{float(self.damping):g}{relative}"

        clip = f"{self.kl_clip}"
        if self.kl_clip is None:
            clip = "none"
        elif is_auto(self.kl_clip):
            clip = "four times the usual change"
        elif callable(self.kl_clip):
            clip = "by a schedule"
        elif isinstance(self.kl_clip, Tensor):
            clip = f"{self.kl_clip.item()}"

        memory = f"weight of the past {self.factor_decay} per update"
        if isinstance(self.factor_decay, PerStep):
            memory = f"factors remember {1 / (1 - self.factor_decay.decay):.0f} steps"
        elif callable(self.factor_decay):
            memory = "weight of the past by a schedule"
        return f"damping {damping}; clip {clip}; {memory}"


SCHEDULES = "damping", "factor_decay", "kl_clip", "factor_update_steps", "inv_update_steps"
"""The shared keywords that can be callables of the step."""


@dataclass(frozen=True, kw_only=True)
class KAISAOptions:
    """The keywords that only KAISA has.

    Attributes:
        grad_worker_fraction: Share of the processes that precondition a layer. 1.0: all, least
            communication per step (COMM-OPT). 1 / processes, or 0: one, least memory (MEM-OPT).
            "auto" takes the share that :func:`second_order.plan` predicts to be fastest. A
            checkpoint remembers it. If FSDP2 has sharded the model, it is always one process,
            because a gradient's rows meet there. Below 1.0 only some processes have a layer's
            inverse: call :meth:`consolidate` before you save.
        factor_exchange: "all_reduce" gives every process every factor's running average. "reduce"
            sends statistics to the process that decomposes the factor, and no other keeps it: half
            the traffic, and memory that falls with the number of processes. A checkpoint then needs
            :meth:`consolidate`, or ``torch.distributed.checkpoint``. "pipelined" is "all_reduce" in
            buckets that leave while the backward pass still runs (Shi et al. 2021): the same
            training.
        exchange_dtype: Dtype in which statistics and decompositions are sent; None: that in which
            they are stored. ``torch.bfloat16`` halves the bytes of float32, and rounds to 8 bits;
            all processes get the same numbers. Statistics of the first 20 steps, and gradients, are
            sent as they are.
        colocate_factors: One process decomposes both factors of a layer; False: two processes.
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
        """Raise ValueError if more would be sent than is stored."""
        sent, stored = self.exchange_dtype, options.factor_dtype
        if sent is not None and sent.itemsize > stored.itemsize:
            raise ValueError(
                f"exchange_dtype={sent} is wider than factor_dtype={stored}: more would be sent "
                f"than is stored; use exchange_dtype=None"
            )


@dataclass(frozen=True, kw_only=True)
class DPKFACOptions:
    """The keywords that only DPKFAC has.

    Attributes:
        assignment: Which process owns which layer. "balanced" gives the next largest layer to the
            process with the least memory taken, "round_robin" layer i to process i mod P, as in the
            paper.
        gradient_exchange: "owner" sums a layer's gradients at its owner alone and sends them back
            preconditioned: the volume of an all-reduce in all. "all_reduce" averages all gradients
            everywhere first, which is half as much again. DistributedDataParallel does so in any
            case.
    """

    assignment: Literal["balanced", "round_robin"] = "balanced"
    gradient_exchange: str = "owner"

    def __post_init__(self) -> None:
        check_choice("assignment", self.assignment, ("balanced", "round_robin"))
        check_choice("gradient_exchange", self.gradient_exchange, ("owner", "all_reduce"))


@dataclass(frozen=True, kw_only=True)
class DistKFACOptions:
    """The keywords that only DistKFAC has.

    Attributes:
        stats_workers: Number of ranks that compute statistics instead of training. If all of them
            are lost, the others take statistics from their own passes again.
        helper_timeout: Seconds without a message after which a stats worker counts as lost.
        inverse_threads: Threads of this process that compute inverses. None: half the cores that
            the process has, at least 1 and at most 4.
        inverse_device: Device that computes inverses: "cpu", or "cuda" on a stream of their own.
        async_inverse: False waits for every inverse, as ``max_staleness=0`` does.
        max_staleness: Steps after which a step waits for an inverse. None: never, except that with
            ``inv_update_steps="auto"`` the step before the layer's next refresh waits. 0 is the
            synchronous algorithm.
        deterministic: Use inverses exactly ``max_staleness`` steps after the snapshot of factors
            that they are computed from (with ``inv_update_steps="auto"`` at most the layer's
            interval less one), even if they are ready earlier: runs can be repeated bit for bit.
        conv_factors: "kfc", or "cheap": the inputs of a convolution are averaged over locations,
            and its gradients summed, before they are squared (Ba et al. 2017, appendix A).
        doubly_factored: (locations, channels) of the inputs of wide Linears that receive a
            flattened feature map, by the layers' names. Three small factors take the place of A and
            G (Ba et al. 2017, section 4). "auto": layers with more than ``max_factor_dim`` inputs,
            with the channels of the convolution before them. None: no layer.
    """

    stats_workers: int = 0
    helper_timeout: float = 60.0
    inverse_threads: int | None = None
    inverse_device: str = "cpu"
    async_inverse: bool = True
    max_staleness: int | None = None
    deterministic: bool = False
    conv_factors: str = "kfc"
    doubly_factored: Mapping[str, tuple[int, int]] | Literal["auto"] | None = AUTO

    def __post_init__(self) -> None:
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
        valid = isinstance(chosen, Mapping)
        entries: Any = chosen.items() if isinstance(chosen, Mapping) else ()
        for name, pair in entries:
            is_pair = isinstance(pair, tuple | list) and len(pair) == 2
            whole = is_pair and all(type(number) is int for number in pair)
            valid = valid and isinstance(name, str) and whole
        if not valid:
            raise ValueError(
                f"doubly_factored={chosen!r} is not 'auto', None, or a dict of layer names and "
                f"(locations, channels), both whole numbers"
            )

    @property
    def staleness(self) -> int | None:
        """Steps after which a step waits for an inverse; 0 for the synchronous algorithm."""
        return self.max_staleness if self.async_inverse else 0

    @property
    def wide_layers(self) -> Mapping[str, tuple[int, int]] | str:
        """The doubly factored layers, or "auto"."""
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
        num_largest: k, how many of the largest eigenpairs get Newton steps.
        num_smallest: l, how many of the smallest (most negative) eigenpairs; steps lead away from
            them.
        curvature_interval: T, steps from one computation of the eigenpairs to the next, or a
            callable of the step; "auto": as often as ``overhead`` allows.
        overhead: With "auto": the share of the time of the base alone that all computations of
            eigenpairs may take, above 0 and up to 10. The first five are timed. They set the number
            of steps to the next one, which checkpoints keep. Before the first, a product counts as
            one step.
        warmup_steps: W, steps of the base before the first pairs; None for ``curvature_interval``,
            or with "auto" until they are paid for.
        newton_scale: α, the length of a Newton step; 1.0 is a full one. A number is α at the
            largest learning rate of the schedule and follows it from there; a callable of the step
            is taken as it is.
        lr_scale_clip: Bound on s = |λ₁| / |λ_k|, by which the base's steps are stretched once the k
            steepest directions are out of their way. None for the published values: 3 for SGD, 1
            for other bases, which scale their steps themselves.
        lr_scale_guard: Begin with s = 1, and let it grow by half at each further refresh while the
            loss of the curvature batch does not rise; halve it where that has risen. A learning
            rate that the base bears alone may be too long times 3. False for s as published.
        lanczos_iterations: m, Hessian-vector products of a refresh at most; None for max(4(k + l),
            2 ln n). Where none is set, and l is 0, a warm start takes max(2k, 20) of these at most.
        lanczos_tol: A refresh ends once every eigenpair has ‖Hv − θv‖ <= tol |θ|.
        lanczos_dtype: Dtype of eigenvectors; None for float64 where a parameter is, else float32.
        eigenvalue_floor: Eigenvalues count as at least this share of the largest in size when steps
            are divided by them.
        subspace_momentum: Momentum inside the eigenvectors' span. "average": the base's β, as a
            running average, so that α means the same whatever the base's momentum. "base": just as
            the base does it, which for SGD with β sums up 1 / (1 − β) as much (FOSI with α = 0.01
            and β = 0.9 is "average" with α = 0.1). A number: a running average with that β.
        warm_start: Start a refresh from the last eigenvectors.
        trust_region: Shorten Newton steps where the eigenpairs are wrong about them: one is at most
            ten times as long as usual, in units of the loss; where V̂ᵀg changes along the steps
            faster than û tells, they are cut to half of what could be borne, and grow again; one
            after which the gradient is not finite is taken back. Where the model holds, steps are
            those of False bit for bit.
        hvp: How Hessian-vector products are made: "retained" keeps the graph of the curvature batch
            for a refresh; "recomputed" evaluates the closure again for each product, one graph at a
            time in memory; "differences" takes finite differences of gradients, for what cannot be
            differentiated twice. "auto": retained, or recomputed for several closures, or
            differences where FSDP2 has sharded the model. The last two need a closure that takes
            the same batch each time within a refresh.
        curvature: Whose eigenpairs: "hessian"; "gauss-newton", the Hessian of the loss with the
            model's outputs linear in the weights, which has no negative eigenvalues where the loss
            is convex in the outputs; "empirical-fisher", the mean of ggᵀ over examples' gradients.
            For the last two the closure returns :class:`second_order.lanczos.Outputs`.
        layout: "row" keeps n/P rows of the eigenvectors and of the base's state on each process,
            and suits bases that work element by element: SGD, Adam, AdamW, RMSprop. "column" keeps
            r/P of the eigenvectors and all of the base's state, and suits every base.
        seed: Seed of the first start vector.
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
        check_whole("num_largest", self.num_largest, 0, "0 for none of them")
        check_whole("num_smallest", self.num_smallest, 0, "0 for none of them")
        if not is_auto(self.curvature_interval):
            check_interval("curvature_interval", self.curvature_interval)
        remedy = "0.2 is the default"
        check_number("overhead", self.overhead, low=0.0, open_low=True, high=10.0, remedy=remedy)
        if self.warmup_steps is not None:
            check_whole("warmup_steps", self.warmup_steps, 0, "0 to begin with a refresh")
        if not callable(self.newton_scale):
            check_newton_scale(self.newton_scale)
        if self.lr_scale_clip is not None:
            check_number("lr_scale_clip", self.lr_scale_clip, low=1.0, remedy="1.0 for no scaling")
        self._check_lanczos()
        if isinstance(self.subspace_momentum, str):
            check_choice("subspace_momentum", self.subspace_momentum, ("average", "base"))
        else:
            check_number(
                "subspace_momentum",
                self.subspace_momentum,
                low=0.0,
                high=1.0,
                open_high=True,
                remedy="use 'average' for that of the base",
            )
        for name in ("lr_scale_guard", "warm_start", "trust_region"):
            check_flag(name, getattr(self, name))
        check_choice("layout", self.layout, ("row", "column"))
        check_seed("seed", self.seed)

    def _check_lanczos(self) -> None:
        """Check what decides the eigenpairs."""
        most = self.lanczos_iterations
        if most is not None:
            check_whole(
                "lanczos_iterations", most, max(self.wanted, 1), "4 (num_largest + num_smallest)"
            )
        remedy = "1e-2 is the default"
        check_number("lanczos_tol", self.lanczos_tol, low=0.0, open_high=True, remedy=remedy)
        if self.lanczos_dtype is not None:
            check_choice("lanczos_dtype", self.lanczos_dtype, (torch.float32, torch.float64))
        floor = self.eigenvalue_floor
        check_number("eigenvalue_floor", floor, low=0.0, high=1.0, remedy="0.01 is usual")
        check_choice("hvp", self.hvp, ("auto", "retained", "recomputed", "differences"))
        if self.num_smallest > 0 and self.curvature != "hessian":
            raise ValueError(
                f"num_smallest={self.num_smallest} with curvature={self.curvature!r}: it has no "
                f"negative eigenvalues to find; use num_smallest=0, or curvature='hessian'"
            )

    @property
    def wanted(self) -> int:
        """Number of eigenpairs asked for, k + l."""
        return self.num_largest + self.num_smallest


@dataclass(frozen=True, kw_only=True)
class EpochOptions(FOSIOptions):
    """The keywords of MRDHO2. Without accelerators, an epoch is the interval of DHO2.

    Attributes:
        helper_ranks: A, how many ranks compute eigenpairs.
        epoch_steps: E, steps between two final updates.
        final_update: "paper" is equation 17. "guarded" does it where the loss on the accelerators'
            batches falls by at least half with it.
        helper_timeout: Seconds without a sign of life, or of waiting at the end of an epoch (for
            eigenpairs, and again for the verdict of "guarded"), after which accelerators are given
            up.
        warmup_steps: W, steps of the base alone before the first epoch that accelerators help in;
            None for 0. Without accelerators: steps before the first eigenpairs, None for
            ``epoch_steps``.
        num_largest: k, how many of the largest eigenpairs get Newton steps.
        newton_scale: α, the length of a Newton step; 1.0 is a full one. A number is α at the
            largest learning rate of the schedule and follows it from there; a callable of the step
            is taken as it is.
        lanczos_iterations: m, Hessian-vector products at most; None for max(4(k + l), 2 ln n).
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

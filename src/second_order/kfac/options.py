"""The options that every system with Kronecker factors shares, and those of DistKFAC; checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from second_order.kronecker.fisher import LIKELIHOODS, Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import BlockRules
from second_order.kronecker.solvers import SOLVERS, SolverName
from second_order.options import (
    AUTO,
    AutoInterval,
    Scalar,
    Schedule,
    check_count,
    check_flag,
    check_interval,
    check_keywords,
    check_number,
    check_patterns,
    check_scalar,
    check_timeout,
    check_whole,
    is_adaptive,
    keyword,
    one_of,
)

__all__ = [
    "ADAPTIVE_STEP_DECAY",
    "AUTO",
    "BUDGETED",
    "FORGETFUL",
    "SCHEDULES",
    "USUAL_OVERHEAD",
    "AutoScalar",
    "AutoSchedule",
    "DecayingClip",
    "DistKFACOptions",
    "DoublyFactored",
    "KFACOptions",
    "PerStep",
    "PreconditionerScale",
    "check_clip",
    "check_damping",
    "check_decay",
    "check_dtype",
    "checked_doubly_factored",
    "half_the_cores",
    "own_cores",
]


def check_damping(value: Any) -> None:
    """Raise ValueError unless a damping is at least 0 and finite."""
    check_scalar(
        "damping", value, low=0.0, open_high=True, remedy="'auto' is 0.1 of the mean curvature"
    )


def check_decay(value: Any) -> None:
    """Raise ValueError unless a factor_decay is a PerStep or lies in 0..1, 1 excluded."""
    remedy = "'auto' counts steps"
    if not isinstance(value, PerStep):
        check_number("factor_decay", value, low=0.0, high=1.0, open_high=True, remedy=remedy)


def check_clip(value: Any) -> None:
    """Raise ValueError unless a kl_clip is positive."""
    remedy = "use a positive number, 'auto', or None for no clip"
    check_scalar("kl_clip", value, low=0.0, open_low=True, remedy=remedy)


def check_trace_bounds(name: str, pair: Any) -> None:
    """Raise unless the option is a pair of numbers, the lower one last."""
    remedy = f"{TRACE_BOUNDS} is the default"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{name}={pair!r} is not a pair (upper, lower); {remedy}")
    for each, bound in zip(("upper", "lower"), pair, strict=True):
        check_number(f"{name}' {each}", bound, low=0.0, open_high=True, remedy=remedy)
    if pair[1] > pair[0]:
        raise ValueError(f"{name}={pair!r}: lower is above upper; swap them, as in {TRACE_BOUNDS}")


def check_dtype(name: str, value: Any) -> None:
    """Raise ValueError unless factors can be kept, and sent, in a dtype."""
    if value not in FACTOR_DTYPES:
        raise ValueError(
            f"{name}={value} is not one of float32, float64 and bfloat16 "
            f"(float16 overflows at 65504); use torch.float32"
        )


@dataclass(frozen=True)
class PerStep:
    """A weight of the past that counts steps, however rare updates are; a ``factor_decay``.

    Attributes:
        decay: Weight of the past per step, in [0, 1); some 1 / (1 - decay) steps are remembered.
        share: The part of the steps taken so far that is remembered while that is less, two
            steps at least; None: training's age does not count. Curvature changes fastest at
            the start, and what it was then is soon no guide.

    Raises:
        ValueError: For a value outside its bounds; TypeError for one that is no number.
    """

    decay: float
    share: float | None = None

    def __post_init__(self) -> None:
        check_decay(self.decay)
        if self.share is not None:
            remedy = "1 / 3, say, or None"
            check_number("share", self.share, low=0.0, open_low=True, high=1.0, remedy=remedy)


STEP_DECAY, ADAPTIVE_STEP_DECAY = PerStep(0.995), PerStep(0.978, share=1 / 3)

SCHEDULES = "damping", "factor_decay", "kl_clip", "factor_update_steps", "inv_update_steps"
AutoSchedule: TypeAlias = Schedule | Literal["auto"]
AutoScalar: TypeAlias = Scalar | Callable[[int], Scalar] | Literal["auto"]
PreconditionerScale: TypeAlias = Literal["gradient", "newton"]
# Chosen by benchmarks/progress/defaults.py.
DAMPING = 0.1  # of the layer's mean curvature
FLOOR = 0.25  # of the mean curvature of all layers
BUDGETED = ("factor_update_steps", "inv_update_steps")
"""The intervals that can be "auto"."""

USUAL_INTERVAL, USUAL_OVERHEAD = 10, 0.15
TRACE_BOUNDS = (0.1, 0.0)  # chosen on small tasks at commit 750a6e5

FACTOR_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class KFACOptions:
    """The options that systems with Kronecker factors share, checked, with their usual defaults.

    Attributes:
        damping: γ, added to the curvature before it is inverted; number or callable, at least 0. A
            larger γ is more cautious: the step turns from the natural to the plain gradient.
            "auto": 0.1 times the layer's mean curvature, which counts as at least a quarter of the
            mean over all layers (the square of the mean square root). With
            ``relative_damping=False``, give a number. A number may be a tensor, which a schedule
            fills in place. If it is on a device, the host does not read it, so its value is not
            checked.
        relative_damping: γ of a layer is ``damping`` times the layer's mean curvature, tr A tr G /
            (dim A dim G), so it does not depend on the scale of the loss. False: γ is ``damping``,
            as in the papers. KAISA's published code has smaller factors, and so another γ for the
            same step: see "Where it differs from the paper" in its docs.
        preconditioner_scale: "gradient": P = (A ⊗ G + γ)⁻¹ ∇ is multiplied by c + γ, where c is
            the layer's mean curvature, so that it has the gradient's scale. If the curvature is the
            same in all directions, the gradient stays as it is. "newton": P itself, which is as
            long as an approximate Newton step. A Newton step grows as gradients shrink, so give it
            a ``kl_clip``. Adaptive bases remember the size of past gradients, Adam for a thousand
            steps, and need "gradient".
        factor_decay: Weight of the past in the running averages of A and G at an update, in [0, 1);
            number, callable or ``PerStep``. "auto": the number of steps remembered does not depend
            on the intervals: some 45 (0.978 to the power of the steps since the last update) under
            a base that scales its steps itself, as Adam does, and two hundred (0.995) under others.
        kl_clip: κ, the bound on the change lr² Σ P·∇ that one step makes to the model's predictions
            (Pauloski et al. 2022, 5.1); number, tensor of one, callable or None for no bound. A
            number is the bound at the learning rate's peak and shrinks with lr² when a schedule
            lowers it; a callable is taken as it is. Either switches the step scale off. "auto":
            Σ |P·∇|, without lr, may be at most four times its running average over some twenty
            steps, so that a batch of outliers cannot undo many steps. With "newton", "auto" is no
            bound.
        solver: "inverse" damps A and G apart and takes their Cholesky inverses; "eigen" applies (A
            ⊗ G + γ I)⁻¹ exactly, which costs several times as much and gains nothing on most of the
            tasks that the defaults were chosen on.
        inv_update_steps: Steps from one refresh of the inverses to the next; number or callable, or
            "auto": as often as ``overhead`` allows. None: as ``refresh`` says.
        factor_update_steps: Steps from one update of statistics to the next; number or callable, or
            "auto": at each refresh. None: at each refresh by drift; otherwise every 10 steps, or as
            often as refreshes where a smaller number is given for these.
        overhead: The share of the time of the other steps that refreshes may take, above 0 and up
            to 10. The first five refreshes are timed, every other step. They set the least number
            of steps between two later ones, which checkpoints keep. If layers drift faster than
            that allows, a warning says so. None: no bound, or 0.15 if an interval is "auto".
        fisher: "empirical" takes the gradients of your own backward; "sampled" draws labels from
            the model's predictions and takes the gradients of those, at the price of a further
            backward pass to the layers' outputs whenever statistics are due.
        likelihood: Distribution that the outputs give the sampled Fisher: "categorical" (logits,
            classes on the last dimension), "bernoulli" (logits), "gaussian" (means), or a callable
            ``output -> summed negative log-likelihood of labels it has drawn``.
        kfac_approx: For layers applied at many positions: "expand" if each position has a loss term
            (language models), "reduce" if positions are pooled (Eschenhagen et al. 2023);
            fused experts count as other matrices then.
        refresh: "drift": each layer has its own interval, 1 to 32 steps. It is halved if the old
            and the new inverse give the gradient different directions, and doubled if they agree.
            A number for ``inv_update_steps`` replaces these intervals.
            "interval" solves every layer every ``inv_update_steps``, 10 if None. "trace" keeps the
            inverses of layers whose curvature has hardly moved since their last solve, by its trace
            (THOR, Chen et al. 2021).
        trace_bounds: With ``refresh="trace"``: (upper, lower). A layer is solved if the trace of A
            ⊗ G + γ has moved by more than ``upper`` times its value at the last solve, or the
            option's γ has. One that moved by less than ``lower`` is not looked at again; 0: no
            layer is let go. Not used with "interval".
        symmetry_aware: Whether to keep and send symmetric matrices as upper triangles.
        max_factor_dim: Largest size of a factor. Layers with a larger one, A of the inputs or G of
            the outputs, are left to the base, and named: memory grows with its square, a solve with
            its cube. The A of an embedding is diagonal, of any size.
        exact_blocks: Gains and biases of normalisations have exact blocks, and biases that train
            alone; False leaves them to the base. Norms of other classes are found by what they
            compute.
        max_exact_dim: Entries up to which such a block is a full matrix; above, its diagonal.
        other_matrices: "gradient": matrices of which no rule is known, those of recurrent layers or
            lone parameters for example, and of layers that are too large, get factors from the
            gradient itself, as in Shampoo; a side longer than ``max_factor_dim`` its diagonal.
            "base" leaves them to the base. "auto": "gradient" under a base that scales its steps
            itself, where such matrices are a tenth of the parameters or more and FSDP2 has not
            sharded them; "base" otherwise.
        skip_layers: Patterns of module names or class names, such as ``["head", "blocks.*.mlp"]``,
            that the base trains alone, with all that is inside them.
        accumulation_steps: Micro-batches to a step, if the loss is divided by their number; 1 if
            the losses of several passes are added up. "auto": the passes of each step are counted,
            and their losses taken to be divided by their number.
        loss_reduction: What the loss of a backward pass is. "mean": over the terms of the pass,
            divided by the passes of a step as ``accumulation_steps`` says. "sum": over them.
            "step_mean": their sum divided by the number of terms in all passes of the step, on all
            processes, and times the number of processes, over which gradients are averaged. "auto":
            "step_mean" if the model's forward is given ``num_items_in_batch``, as by transformers'
            Trainer, and ``accumulation_steps`` is "auto"; "mean" otherwise.
        factor_dtype: Dtype in which factors are kept and sent: float32, float64 or bfloat16.
        inv_dtype: Dtype in which inverses are kept, sent and applied; solves use float32 or more.
        max_consecutive_failures: Number of refreshes in a row without a sound decomposition of a
            layer that raise :class:`~second_order.DecompositionError` on every process.
        save_inverses: Whether ``state_dict()`` has the inverses, so that a resumed run takes the
            steps that the run itself would have taken. ``summary()`` says how many bytes they add.
            False: checkpoints are smaller, and the first step after loading refreshes all layers.
        adaptive: Whether the base scales its steps itself; no keyword.
        damping_floor: Share of the mean curvature of all layers to which that of a layer is raised
            in its γ; no keyword.
        follows_steps: Whether the step scale follows what steps do to the loss; no keyword.
    """

    damping: AutoScalar = keyword(AUTO, lambda _, value: check_damping(value), AUTO, callable)
    relative_damping: bool = keyword(True, check_flag)
    preconditioner_scale: PreconditionerScale = keyword("gradient", one_of("gradient", "newton"))
    factor_decay: AutoSchedule | PerStep = keyword(
        AUTO, lambda _, value: check_decay(value), AUTO, callable
    )
    kl_clip: AutoScalar | None = keyword(
        AUTO, lambda _, value: check_clip(value), None, AUTO, callable
    )
    solver: SolverName = keyword("inverse", one_of(*SOLVERS))
    inv_update_steps: AutoInterval | None = keyword(None, check_interval, None, AUTO)
    factor_update_steps: AutoInterval | None = keyword(None, check_interval, None, AUTO)
    overhead: float | None = keyword(
        None, partial(check_number, low=0.0, open_low=True, high=10.0, remedy="0.15, say"), None
    )
    fisher: str = keyword("empirical", one_of("empirical", "sampled"))
    likelihood: Likelihood = keyword("categorical", one_of(*LIKELIHOODS), callable)
    kfac_approx: Approximation = keyword("expand", one_of("expand", "reduce"))
    refresh: str = keyword("drift", one_of("drift", "interval", "trace"))
    trace_bounds: tuple[float, float] = keyword(TRACE_BOUNDS, check_trace_bounds)
    symmetry_aware: bool = keyword(True, check_flag)
    max_factor_dim: int = keyword(8192, partial(check_count, meaning="rows"))
    exact_blocks: bool = keyword(False, check_flag)
    max_exact_dim: int = keyword(256, partial(check_count, meaning="rows"))
    other_matrices: str = keyword(AUTO, one_of(AUTO, "base", "gradient"))
    skip_layers: Sequence[str] = keyword(())
    accumulation_steps: int | Literal["auto"] = keyword(
        AUTO, partial(check_count, meaning="micro-batches to a step, or 'auto'"), AUTO
    )
    loss_reduction: str = keyword(AUTO, one_of(AUTO, "mean", "sum", "step_mean"))
    factor_dtype: torch.dtype = keyword(torch.float32, check_dtype)
    inv_dtype: torch.dtype = keyword(torch.float32, check_dtype)
    max_consecutive_failures: int = keyword(
        3, partial(check_count, meaning="refreshes that may fail")
    )
    save_inverses: bool = keyword(True, check_flag)
    adaptive: bool = False
    damping_floor: float = 0.0
    follows_steps: bool = False

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> KFACOptions:
        """Take the shared options from an optimizer's keywords, and check them."""
        adaptive = is_adaptive(keywords["base"])
        ours = {f.name: keywords.get(f.name, f.default) for f in fields(cls)}
        # A schedule-free base keeps other points than the weights, which would not be scaled.
        averages = all(callable(getattr(keywords["base"], n, None)) for n in ("train", "eval"))
        scaled = ours["preconditioner_scale"] == "gradient" and ours["kl_clip"] in (AUTO, None)
        follows = scaled and not averages
        ours |= {"adaptive": adaptive, "damping_floor": 0.0, "follows_steps": follows}
        if ours["damping"] == AUTO:
            if ours["relative_damping"] is False:
                raise ValueError(
                    "damping='auto' is relative to the layer's mean curvature; with "
                    "relative_damping=False give a number, 1e-3 perhaps"
                )
            ours["damping"] = DAMPING
            ours["damping_floor"] = FLOOR
        if ours["kl_clip"] == AUTO and ours["preconditioner_scale"] == "newton":
            ours["kl_clip"] = None
        if ours["factor_decay"] == AUTO:
            ours["factor_decay"] = ADAPTIVE_STEP_DECAY if adaptive else STEP_DECAY
        _settle_intervals(ours)
        if isinstance(ours["trace_bounds"], list):
            ours["trace_bounds"] = tuple(ours["trace_bounds"])
        return cls(**{**ours, "skip_layers": check_patterns(ours["skip_layers"])})

    @property
    def by_drift(self) -> bool:
        """Whether refreshes follow what they change."""
        return self.inv_update_steps is None

    @property
    def said(self) -> str:
        """Damping, clip and memory, for the summary: what "auto" has come to."""
        number, bound = self.damping, self.kl_clip
        relative = " of the mean curvature" if self.relative_damping else ""
        damping = "by a schedule" if callable(number) else f"{float(number):g}{relative}"
        clip = "by a schedule" if callable(bound) else f"{bound}"
        clip = f"{bound.item()}" if isinstance(bound, Tensor) else clip
        clip = {"None": "none", AUTO: "four times the usual change"}.get(clip, clip)
        memory = f"weight of the past {self.factor_decay} an update"
        if isinstance(self.factor_decay, PerStep):
            memory = f"factors remember {1 / (1 - self.factor_decay.decay):.0f} steps"
        elif callable(self.factor_decay):
            memory = "weight of the past by a schedule"
        return f"damping {damping}; clip {clip}; {memory}"

    @property
    def block_rules(self) -> BlockRules:
        """The rules for which modules become blocks."""
        others = self.other_matrices
        if others == AUTO and not self.adaptive:
            others = "base"
        return BlockRules(
            max_factor_dim=self.max_factor_dim,
            max_exact_dim=self.max_exact_dim if self.exact_blocks else None,
            other_matrices=others,
            approximation=self.kfac_approx,
        )

    @property
    def solve_dtype(self) -> torch.dtype:
        """The dtype in which factors are decomposed."""
        dtype = torch.promote_types(self.factor_dtype, self.inv_dtype)
        return torch.promote_types(dtype, torch.float32)

    def __post_init__(self) -> None:
        check_keywords(self)
        if self.refresh != "trace" and tuple(self.trace_bounds) != TRACE_BOUNDS:
            raise ValueError(
                f"trace_bounds={self.trace_bounds!r} with refresh={self.refresh!r} would do "
                f"nothing; give refresh='trace', or leave trace_bounds out"
            )
        if self.loss_reduction == "step_mean" and self.accumulation_steps != "auto":
            raise ValueError(
                f"accumulation_steps={self.accumulation_steps} with loss_reduction='step_mean' "
                f"would do nothing: each loss is divided by the terms of all passes, however many; "
                f"leave accumulation_steps out"
            )


def _settle_intervals(ours: dict[str, Any]) -> None:
    """Replace intervals of None by what they come to, but that of refreshes by drift."""
    factors, inverses = (ours[name] for name in BUDGETED)
    if inverses is None and ours["refresh"] != "drift":
        inverses = USUAL_INTERVAL
    if factors is None and inverses is not None:
        oftener = type(inverses) is int and 0 < inverses < USUAL_INTERVAL
        factors = inverses if oftener else USUAL_INTERVAL
    if inverses is not None and ours["refresh"] == "drift":
        ours["refresh"] = "interval"
    if AUTO in (factors, inverses) and ours["overhead"] is None:
        ours["overhead"] = USUAL_OVERHEAD
    if factors == AUTO:  # at each refresh
        factors = None
    ours.update(zip(BUDGETED, (factors, inverses), strict=True))


FORGETFUL = PerStep(0.95)
"""What ``factor_decay=None`` means: some twenty steps are remembered."""

DoublyFactored: TypeAlias = Mapping[str, tuple[int, int]] | Literal["auto"] | None


@dataclass(frozen=True)
class DecayingClip:
    """The paper's bound on a step's squared Fisher norm, c₀ ζᵏ (Ba et al. 2017, section 5).

    Attributes:
        start: c₀, the bound at the first step.
        decay: ζ, the factor by which the bound shrinks every ``every`` steps.
        every: Number of steps between two decays; the paper takes half an epoch.

    Raises:
        ValueError: For a value outside its bounds; TypeError for one that is no number.
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


def own_cores() -> int:
    """This process's share of the cores."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return cores // max(int(local) if local.isdigit() else 1, 1)


def half_the_cores() -> int:
    """Number of threads that leave half of this process's share of the cores to others; 1 to 4."""
    return min(max(own_cores() // 2, 1), 4)


@dataclass(frozen=True, kw_only=True)
class DistKFACOptions:
    """The keywords that DistKFAC alone has.

    Attributes:
        stats_workers: How many ranks compute statistics instead of training. If all of them are
            gone, the others take statistics from their own passes again.
        helper_timeout: Seconds without a sign of life after which a stats worker is given up.
        inverse_threads: Threads of this process that solve; None for half the cores that it has for
            itself, at least 1 and at most 4.
        inverse_device: Device of the solves: "cpu", or "cuda" on a stream of their own.
        async_inverse: False waits for every solve, as ``max_staleness=0`` does.
        max_staleness: Steps after which a solve is waited for; None: never, but by drift at the
            step before the layer's next solve. 0 is the synchronous algorithm.
        deterministic: Put inverses to use exactly ``max_staleness`` steps, by drift at most the
            layer's interval less one, after the snapshot that they are solved from, be they ready
            sooner or not: runs can be repeated bit for bit.
        conv_factors: "kfc", or "cheap": the inputs of a convolution are averaged over locations,
            and its gradients summed, before they are squared (Ba et al. 2017, appendix A).
        doubly_factored: (locations, channels) of the inputs of wide Linears that are fed by a
            flattened feature map, by the layers' names. Three small factors take the place of A and
            G (Ba et al. 2017, section 4). "auto": layers with more than ``max_factor_dim`` inputs,
            with the channels of the convolution before them. None: no layer.
    """

    stats_workers: int = keyword(0, partial(check_whole, low=0, remedy="0 for none"))
    helper_timeout: float = keyword(60.0, check_timeout)
    inverse_threads: int | None = keyword(None, partial(check_count, meaning="threads"), None)
    inverse_device: str = keyword("cpu", one_of("cpu", "cuda"))
    async_inverse: bool = keyword(True, check_flag)
    max_staleness: int | None = keyword(
        None, partial(check_whole, low=0, remedy="None for no bound"), None
    )
    deterministic: bool = keyword(False, check_flag)
    conv_factors: str = keyword("kfc", one_of("kfc", "cheap"))
    doubly_factored: DoublyFactored = keyword("auto")

    def __post_init__(self) -> None:
        check_keywords(self)
        if not self.async_inverse and self.max_staleness:
            raise ValueError(
                f"async_inverse=False waits for every solve, so that max_staleness="
                f"{self.max_staleness} has no meaning; leave it out"
            )
        if self.deterministic and self.async_inverse and self.max_staleness is None:
            raise ValueError(
                "deterministic=True puts inverses to use after exactly max_staleness steps; give "
                "max_staleness, 10 perhaps"
            )
        if self.deterministic and self.async_inverse and self.stats_workers:
            raise ValueError(
                f"deterministic=True cannot be had with stats_workers={self.stats_workers}: when "
                f"their statistics arrive depends on the machine; use stats_workers=0"
            )

    @property
    def staleness(self) -> int | None:
        """Steps after which a solve is waited for; 0 for the synchronous algorithm."""
        return self.max_staleness if self.async_inverse else 0


def checked_doubly_factored(chosen: Any) -> Mapping[str, tuple[int, int]] | str:
    """Check ``doubly_factored`` and return it, a mapping or "auto"."""
    if chosen is None or chosen == AUTO:
        return AUTO if chosen else {}
    sound = isinstance(chosen, Mapping)
    for name, pair in chosen.items() if sound else ():
        two = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(name, str)
        sound = sound and two and all(type(n) is int for n in pair)
    if not sound:
        raise ValueError(
            f"doubly_factored={chosen!r} is not 'auto', None, or a dict of layer names and "
            f"(locations, channels), both whole numbers"
        )
    return {name: (pair[0], pair[1]) for name, pair in chosen.items()}

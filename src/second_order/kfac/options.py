"""The options that every system with Kronecker factors shares, checked."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from second_order.kronecker.fisher import LIKELIHOODS, Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import BlockRules
from second_order.kronecker.solvers import SOLVERS, SolverName
from second_order.options import (
    AUTO,
    AutoInterval,
    Schedule,
    check_choice,
    check_count,
    check_flag,
    check_interval,
    check_number,
    check_patterns,
    is_adaptive,
    scheduled,
)

__all__ = [
    "ADAPTIVE_STEP_DECAY",
    "AUTO",
    "BUDGETED",
    "DOCS",
    "USUAL_OVERHEAD",
    "AutoSchedule",
    "KFACOptions",
    "PerStep",
    "PreconditionerScale",
    "check_clip",
    "check_damping",
    "check_decay",
    "check_exchange_dtype",
    "documented",
]

T = TypeVar("T")


def check_damping(value: Any) -> None:
    """Raise ValueError unless a damping is at least 0 and finite."""
    check_number("damping", value, low=0.0, open_high=True, remedy="'auto' follows the base")


def check_decay(value: Any) -> None:
    """Raise ValueError unless a factor_decay lies in 0..1, 1 excluded."""
    check_number(
        "factor_decay", value, low=0.0, high=1.0, open_high=True, remedy="'auto' counts steps"
    )


def check_clip(value: Any) -> None:
    """Raise ValueError unless a kl_clip is positive."""
    remedy = "use a positive number, 'auto', or None for no clip"
    check_number("kl_clip", value, low=0.0, open_low=True, remedy=remedy)


def check_exchange_dtype(value: Any, options: KFACOptions) -> None:
    """Raise ValueError unless an exchange_dtype is None, or no wider than what it carries."""
    if value is None:
        return
    if value not in FACTOR_DTYPES:
        raise ValueError(
            f"exchange_dtype={value} is not None, nor one of float32, float64 and bfloat16 "
            f"(float16 overflows at 65504); use torch.bfloat16"
        )
    for name in ("factor_dtype", "inv_dtype"):
        kept = getattr(options, name)
        if value.itemsize > kept.itemsize:
            raise ValueError(
                f"exchange_dtype={value} is wider than {name}={kept}: more would travel than is "
                f"kept; use exchange_dtype=None"
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

    def after(self, steps: int, step: int) -> float:
        """The weight of the past at an update at ``step``, ``steps`` after the last one."""
        decay = self.decay
        if self.share is not None:
            decay = min(decay, 1 - 1 / max(2.0, self.share * step))
        return decay ** max(steps, 1)


STEP_DECAY, ADAPTIVE_STEP_DECAY = PerStep(0.995), PerStep(0.978, share=1 / 3)

SCHEDULES = "damping", "factor_decay", "kl_clip", "factor_update_steps", "inv_update_steps"
AutoSchedule: TypeAlias = Schedule | Literal["auto"]
PreconditionerScale: TypeAlias = Literal["auto", "newton", "gradient"]
# Chosen by benchmarks/progress/defaults.py; dampings are relative.
DAMPING, ADAPTIVE_DAMPING = 0.5, 0.1
FLOOR, ADAPTIVE_FLOOR = 0.01, 0.25  # of the layers' mean
BUDGETED = ("factor_update_steps", "inv_update_steps")
"""The intervals that can be "auto"."""

USUAL_INTERVAL, USUAL_OVERHEAD = 10, 0.15
TRACE_BOUNDS = (0.1, 0.0)  # by benchmarks/progress/trace_refresh.py

FACTOR_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


DOCS = {
    "params_or_model": """\
The model, whose trainable parameters are optimized; or parameters, or parameter
groups as for any ``torch.optim`` optimizer, with ``model=``.""",
    "model": """\
The model, where the first argument is not one. Wrappers (DistributedDataParallel,
``torch.compile``) are looked through.""",
    "lr": "The base's learning rate, a float or a tensor; schedulers reach it as always.",
    "base": "Class of the optimizer that takes the preconditioned gradients.",
    "rest": """\
Class of a second base. ``base`` then trains hidden weights alone: weights of modules, of two
dimensions or more (of two exactly with ``torch.optim.Muon``). ``rest`` trains embeddings, the
output head (the last Linear), norms, biases and lone parameters. None: one base for all.""",
    "rest_layers": """\
Patterns of modules, as for ``skip_layers``, that ``rest`` trains besides, with all that is
inside them.""",
    "rest_kwargs": """\
Arguments of ``rest`` where the two are to differ, as ``{"lr": 1e-3}``.""",
    "damping": """\
γ, added to the curvature before it is inverted; number or callable, at least 0.
A larger γ is more cautious: the step turns from the natural to the plain gradient. "auto":
0.1 under a base that scales its steps itself, as Adam does, and 0.5 under others; without
``relative_damping`` a value has to be given.""",
    "relative_damping": """\
γ of a layer is ``damping`` times the layer's mean curvature, tr A tr G / (dim A dim
G), which frees it of the scale of the loss. False: γ is ``damping`` itself, as in the
papers. KAISA's published code has smaller factors, and so another γ for the same
step: see "Where it differs from the paper" in its docs.""",
    "preconditioner_scale": """\
"newton": P = (A ⊗ G + γ)⁻¹ ∇, as long as an approximate Newton step. "gradient": P times the
layer's mean curvature and γ, so that it is to the gradient's scale: a curvature that is the same in
all directions leaves the gradient as it is. That is for bases that scale their steps themselves.
They remember how long gradients were, Adam for a thousand steps, while a Newton step is the longer,
the smaller the gradients are. "auto": "gradient" under such a base, "newton" under others.""",
    "factor_decay": """\
Weight of the past in the running averages of A and G at an update, in [0, 1); number,
callable or ``PerStep``. "auto": the number of steps remembered does not depend on the
intervals: some 45 (0.978 to the power of the steps since the last update) under a base that scales
its steps itself, as Adam does, and two hundred (0.995) under others.""",
    "kl_clip": """\
κ, the bound on the change lr² Σ P·∇ that one step makes to the model's predictions
(Pauloski et al. 2022, 5.1); number, callable or None for no bound. A number is the
bound at the learning rate's peak and shrinks with lr² when a schedule lowers it; a
callable is taken as it is. "auto": none under a base that scales its steps itself, as
Adam does, and 1e-4 (N / 64)^1.5 under others, for N examples in a step, over all
processes and micro-batches: the best bound grows with the batch. A layer that is applied
at many positions has as many examples; the layer with most counts. With stats workers,
who do not see the training's batches, it is 1e-4.""",
    "solver": """\
"inverse" damps A and G apart and takes their Cholesky inverses; "eigen" applies
(A ⊗ G + γ I)⁻¹ exactly, which costs several times as much and gains nothing on most of
the tasks that the defaults were chosen on.""",
    "factor_update_steps": """\
Steps from one update of statistics to the next; number or callable, or "auto": as often as
``overhead`` allows. None: at each refresh by drift; otherwise every 10 steps, or as often as
refreshes where a smaller number is given for these.""",
    "inv_update_steps": """\
Steps from one refresh of the inverses to the next; number or callable, or "auto": as often as
``overhead`` allows. None: as ``refresh`` says.""",
    "overhead": """\
The share of a step of the base alone that statistics and refreshes may cost together, on average,
above 0 and up to 10; their cost is measured in the first 20 steps, five by drift, and what is
chosen then is kept, in checkpoints, too. With refreshes by drift none comes oftener than that
allows, where the two are in conflict a warning says so; None: by drift alone. With an interval that
is "auto" it chooses the interval; None: 0.15.""",
    "fisher": """\
"empirical" takes the gradients of your own backward; "sampled" draws labels from the
model's predictions and takes the gradients of those, at the price of a further
backward pass to the layers' outputs whenever statistics are due.""",
    "likelihood": """\
Distribution that the outputs give the sampled Fisher: "categorical" (logits, classes on
the last dimension), "bernoulli" (logits), "gaussian" (means), or a callable ``output ->
summed negative log-likelihood of labels it has drawn``.""",
    "kfac_approx": """\
For layers applied at many positions: "expand" if each position has a loss term
(language models), "reduce" if positions are pooled (Eschenhagen et al. 2023).""",
    "eigen_refresh": """\
"full" computes eigenvectors anew at each refresh. "warm" takes one step of orthogonal
iteration from the last ones where that is accurate.""",
    "refresh": """\
"drift": each layer is solved as often as that changes its preconditioned gradient: its interval is
halved where the old and the new one point apart, and doubled where they agree, 1 to 32 steps. With
a number for ``inv_update_steps`` that is the interval. "interval" solves every layer every
``inv_update_steps``, 10 if None. "trace" keeps the inverses of layers whose curvature
has hardly moved since their last solve, by its trace (THOR, Chen et al. 2021).""",
    "trace_bounds": """\
With ``refresh="trace"``: (upper, lower). A layer is solved if the trace of A ⊗ G + γ has moved by
more than ``upper`` times its value at the last solve, or the option's γ has. One that moved by less
than ``lower`` is not looked at again; 0: no layer is let go. Not used with "interval".""",
    "symmetry_aware": "Whether to keep and send symmetric matrices as upper triangles.",
    "max_factor_dim": """\
Largest size of a factor. Layers with a larger one, A of the inputs or G of the outputs,
are left to the base, and named: memory grows with its square, a solve with its cube. The A of an
embedding is diagonal, of any size.""",
    "exact_blocks": """\
Gains and biases of normalisations have exact blocks, and biases that train alone; False leaves them
to the base. Norms of other classes are found by what they compute.""",
    "max_exact_dim": "Entries up to which such a block is a full matrix; above, its diagonal.",
    "other_matrices": """\
"gradient": matrices of which no rule is known, those of recurrent layers or lone parameters for
example, and of layers that are too large, get factors from the gradient itself, as in Shampoo; a
side longer than ``max_factor_dim`` its diagonal. "base" leaves them to the base. "auto": "gradient"
under a base that scales its steps itself, where such matrices are a tenth of the parameters or more
and FSDP2 has not sharded them; "base" otherwise.""",
    "skip_layers": """\
Patterns of module names or class names, such as ``["head", "blocks.*.mlp"]``, that
the base trains alone, with all that is inside them.""",
    "accumulation_steps": """\
Micro-batches to a step, if the loss is divided by their number; 1 if the losses of
several passes are added up. "auto": the passes of each step are counted, and their
losses taken to be divided by their number.""",
    "loss_reduction": """\
What the loss of a backward pass is. "mean": over the terms of the pass, divided by the passes of a
step as ``accumulation_steps`` says. "sum": over them. "step_mean": their sum divided by the number
of terms in all passes of the step, on all processes, and times the number of processes, over which
gradients are averaged. "auto": "step_mean" if the model's forward is given ``num_items_in_batch``,
as by transformers' Trainer, and ``accumulation_steps`` is "auto"; "mean" otherwise.""",
    "grad_scaler": "The ``GradScaler`` that scales the loss, if there is one.",
    "factor_dtype": "Dtype in which factors are kept and sent: float32, float64 or bfloat16.",
    "inv_dtype": "Dtype in which inverses are kept, sent and applied; solves use float32 or more.",
    "max_consecutive_failures": """\
Number of refreshes in a row without a sound decomposition of a layer that raise
:class:`~second_order.DecompositionError` on every process.""",
    "gradient_averaging": """\
"auto" averages gradients over the processes, after giving all of them the first one's
parameters, unless DistributedDataParallel does; True or False: always or never.""",
    "process_group": "The processes to work with; None for the default group, if there is one.",
    "debug": """\
Compare the processes' parameters, the base's state, and factors and inverses that all keep, bit
for bit: before the first step and every 100 steps for True, or every so many steps. Where they have
parted, every process raises :class:`~second_order.RankMismatchError` with the name of the tensor
and the ranks. Not saved in checkpoints.""",
    "**base_kwargs": """\
Arguments of ``base``: ``momentum``, ``weight_decay``, ``betas`` and so on; with ``rest``, of
whichever of the two has them, or of both.""",
}
"""The meanings of the keywords that all systems share, by name."""


@dataclass(frozen=True)
class KFACOptions:
    """The options that systems with Kronecker factors share, checked, with their usual defaults.

    Attributes:
        adaptive: Whether the base scales its steps itself; no keyword.
        damping_floor: Share of the mean curvature of all layers to which that of a layer is raised
            in its γ; no keyword.
        follows_steps: Whether the length of steps follows what they do; no keyword.
    """

    damping: AutoSchedule = AUTO
    relative_damping: bool = True
    preconditioner_scale: PreconditionerScale = AUTO
    factor_decay: AutoSchedule | PerStep = AUTO
    kl_clip: AutoSchedule | None = AUTO
    solver: SolverName = "inverse"
    factor_update_steps: AutoInterval | None = None
    inv_update_steps: AutoInterval | None = None
    overhead: float | None = None
    fisher: str = "empirical"
    likelihood: Likelihood = "categorical"
    kfac_approx: Approximation = "expand"
    eigen_refresh: str = "full"
    refresh: str = "drift"
    trace_bounds: tuple[float, float] = TRACE_BOUNDS
    symmetry_aware: bool = True
    skip_layers: tuple[str, ...] = ()
    accumulation_steps: int | Literal["auto"] = "auto"
    loss_reduction: str = AUTO
    factor_dtype: torch.dtype = torch.float32
    inv_dtype: torch.dtype = torch.float32
    max_consecutive_failures: int = 3
    max_factor_dim: int = 8192
    exact_blocks: bool = False
    max_exact_dim: int = 256
    other_matrices: str = AUTO
    adaptive: bool = False
    damping_floor: float = 0.0
    follows_steps: bool = False

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> KFACOptions:
        """Take the shared options from an optimizer's keywords, and check them.

        Raises:
            TypeError: For a value of the wrong type.
            ValueError: For a value outside its bounds, with the bound and the remedy.
        """
        adaptive = is_adaptive(keywords["base"])
        told: dict[str, Any] = {
            "adaptive": adaptive,
            "damping_floor": 0.0,
            # A schedule-free base keeps other points than the weights, which would not be scaled.
            "follows_steps": keywords["kl_clip"] == AUTO and not _averages(keywords["base"]),
        }
        ours = {field.name: keywords[field.name] for field in fields(cls) if field.name not in told}
        ours |= told
        if ours["damping"] == AUTO:
            if ours["relative_damping"] is False:
                raise ValueError(
                    "damping='auto' is relative to the layer's mean curvature; with "
                    "relative_damping=False give a number, 1e-3 perhaps"
                )
            ours["damping"] = ADAPTIVE_DAMPING if adaptive else DAMPING
            ours["damping_floor"] = ADAPTIVE_FLOOR if adaptive else FLOOR
        if ours["preconditioner_scale"] == AUTO:
            ours["preconditioner_scale"] = "gradient" if adaptive else "newton"
        if ours["kl_clip"] == AUTO and adaptive:
            ours["kl_clip"] = None
        if ours["factor_decay"] == AUTO:
            ours["factor_decay"] = ADAPTIVE_STEP_DECAY if adaptive else STEP_DECAY
        _settle_intervals(ours)
        for name in ("relative_damping", "symmetry_aware"):
            check_flag(name, ours[name])
        if isinstance(ours["trace_bounds"], list):
            ours["trace_bounds"] = tuple(ours["trace_bounds"])
        return cls(**{**ours, "skip_layers": check_patterns(ours["skip_layers"])})

    def scheduled(self, step: int) -> list[tuple[str, Any]]:
        """The values at a step of options given as callables, by name; for comparison."""
        return scheduled(self, SCHEDULES, step)

    @property
    def by_drift(self) -> bool:
        """Whether refreshes follow what they change."""
        return self.inv_update_steps is None

    @property
    def said(self) -> str:
        """Damping, clip and memory, for the summary: what "auto" has come to."""
        relative = " of the mean curvature" if self.relative_damping else ""
        damping = "by a schedule" if callable(self.damping) else f"{self.damping:g}{relative}"
        clip = "by a schedule" if callable(self.kl_clip) else f"{self.kl_clip}"
        clip = {"None": "none", AUTO: "by the batch"}.get(clip, clip)
        memory = f"weight of the past {self.factor_decay} an update"
        if isinstance(self.factor_decay, PerStep):
            memory = f"factors remember {1 / (1 - self.factor_decay.decay):.0f} steps"
        elif callable(self.factor_decay):
            memory = "weight of the past by a schedule"
        return f"damping {damping}; clip {clip}; {memory}"

    def _check_refresh(self) -> None:
        check_choice("refresh", self.refresh, ("drift", "interval", "trace"))
        pair: Any = self.trace_bounds
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"trace_bounds={pair!r} is not a pair (upper, lower); {TRACE_BOUNDS} is the default"
            )
        for name, bound in zip(("upper", "lower"), pair, strict=True):
            remedy = f"{TRACE_BOUNDS} is the default"
            check_number(f"trace_bounds' {name}", bound, low=0.0, open_high=True, remedy=remedy)
        if pair[1] > pair[0]:
            raise ValueError(
                f"trace_bounds={pair!r}: lower is above upper, so that a layer to be solved would "
                f"have settled; swap them, as in {TRACE_BOUNDS}"
            )
        if self.refresh != "trace" and tuple(pair) != TRACE_BOUNDS:
            raise ValueError(
                f"trace_bounds={pair!r} with refresh={self.refresh!r} would do nothing; give "
                f"refresh='trace', or leave trace_bounds out"
            )

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
        )

    @property
    def solve_dtype(self) -> torch.dtype:
        """The dtype in which factors are decomposed."""
        dtype = torch.promote_types(self.factor_dtype, self.inv_dtype)
        return torch.promote_types(dtype, torch.float32)

    def __post_init__(self) -> None:
        if not callable(self.damping):
            check_damping(self.damping)
        if not isinstance(self.factor_decay, PerStep) and not callable(self.factor_decay):
            check_decay(self.factor_decay)
        if self.kl_clip not in (None, AUTO) and not callable(self.kl_clip):
            check_clip(self.kl_clip)
        scales = "auto", "newton", "gradient"
        check_choice("preconditioner_scale", self.preconditioner_scale, scales)
        check_choice("solver", self.solver, SOLVERS)
        for name in reversed(BUDGETED):  # statistics may have got the interval of refreshes
            if getattr(self, name) not in (None, AUTO):
                check_interval(name, getattr(self, name))
        if self.overhead is not None:
            remedy = "0.15, say: 15 % of a step of the base"
            check_number(
                "overhead", self.overhead, low=0.0, open_low=True, high=10.0, remedy=remedy
            )
        check_choice("fisher", self.fisher, ("empirical", "sampled"))
        if not callable(self.likelihood):
            check_choice("likelihood", self.likelihood, LIKELIHOODS)
        check_choice("kfac_approx", self.kfac_approx, ("expand", "reduce"))
        check_choice("eigen_refresh", self.eigen_refresh, ("full", "warm"))
        if self.eigen_refresh == "warm" and self.solver != "eigen":
            raise ValueError(
                f"eigen_refresh='warm' starts from eigenvectors, and solver={self.solver!r} has "
                f"none; use solver='eigen', or leave eigen_refresh at 'full'"
            )
        self._check_refresh()
        if self.accumulation_steps != "auto":
            meaning = "micro-batches to a step, or 'auto'"
            check_count("accumulation_steps", self.accumulation_steps, meaning)
        check_choice("loss_reduction", self.loss_reduction, (AUTO, "mean", "sum", "step_mean"))
        if self.loss_reduction == "step_mean" and self.accumulation_steps != "auto":
            raise ValueError(
                f"accumulation_steps={self.accumulation_steps} with loss_reduction='step_mean' "
                f"would do nothing: each loss is divided by the terms of all passes, however many; "
                f"leave accumulation_steps out"
            )
        for name in ("factor_dtype", "inv_dtype"):
            if getattr(self, name) not in FACTOR_DTYPES:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not one of float32, float64 and bfloat16 "
                    f"(float16 overflows at 65504); use torch.float32"
                )
        check_count("max_factor_dim", self.max_factor_dim, "rows")
        check_count("max_exact_dim", self.max_exact_dim, "rows")
        check_flag("exact_blocks", self.exact_blocks)
        check_choice("other_matrices", self.other_matrices, (AUTO, "base", "gradient"))
        check_count(
            "max_consecutive_failures", self.max_consecutive_failures, "refreshes that may fail"
        )


def _averages(base: Any) -> bool:
    """Whether a base trains at points of its own, between which ``train`` and ``eval`` switch."""
    return all(callable(getattr(base, name, None)) for name in ("train", "eval"))


def _settle_intervals(ours: dict[str, Any]) -> None:
    """Replace intervals of None by what they come to, but that of refreshes by drift."""
    factors, inverses = (ours[name] for name in BUDGETED)
    if inverses is None and ours["refresh"] != "drift":
        inverses = USUAL_INTERVAL
    if factors is None and inverses is not None:
        oftener = isinstance(inverses, int) and inverses < USUAL_INTERVAL
        factors = inverses if oftener else USUAL_INTERVAL
    if inverses is not None and ours["refresh"] == "drift":
        ours["refresh"] = "interval"
    if inverses is None and factors == AUTO:  # at each refresh, and these by drift and budget
        factors, ours["overhead"] = None, ours["overhead"] or USUAL_OVERHEAD
    if AUTO in (factors, inverses) and ours["overhead"] is None:
        ours["overhead"] = USUAL_OVERHEAD
    ours.update(zip(BUDGETED, (factors, inverses), strict=True))


def documented(optimizer: type[T]) -> type[T]:
    """Replace names of shared keywords in braces, in a class's docstring, by their meanings."""
    if optimizer.__doc__ is None:  # python -OO
        return optimizer
    lines = []
    for line in optimizer.__doc__.splitlines():
        name = line.strip().removeprefix("{").removesuffix("}")
        if line.strip() == f"{{{name}}}":
            text = f"{name}: {' '.join(DOCS[name].split())}"
            first, rest = " " * 8, " " * 12
            lines += textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=rest)
        else:
            lines.append(line)
    optimizer.__doc__ = "\n".join(lines)
    return optimizer

"""The options of the FOSI step, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from second_order.contract.training import Training
from second_order.distributed.roles import whole_models
from second_order.lanczos.closure import CurvatureKind, LossFn, check_curvature
from second_order.lanczos.hvp import ProductMode
from second_order.lanczos.spectrum import check_one_device, default_iterations
from second_order.options import (
    AUTO,
    PEAK_LR,
    AutoInterval,
    Schedule,
    check_choice,
    check_count,
    check_flag,
    check_interval,
    check_keywords,
    check_number,
    check_seed,
    check_timeout,
    check_whole,
    keyword,
    one_of,
    value_at,
)
from second_order.sharded import is_dtensor

__all__ = [
    "EpochOptions",
    "FOSIOptions",
    "FinalUpdate",
    "Layout",
    "PairOptions",
    "check_one_vector",
    "check_shards",
    "newton_scales",
]

Layout: TypeAlias = Literal["row", "column"]

WARM_PRODUCTS = 20
"""Products that a warm start may take whatever the number of pairs."""

FinalUpdate: TypeAlias = Literal["guarded", "paper"]


def check_momentum(name: str, value: Any) -> None:
    """Raise unless the momentum in the span is a number below 1, or named."""
    if isinstance(value, str):
        check_choice(name, value, ("average", "base"))
    else:
        remedy = "use 'average' for that of the base"
        check_number(name, value, low=0.0, high=1.0, open_high=True, remedy=remedy)


COUNT = partial(check_whole, low=0, remedy="0 for none of them")
WARMUP = partial(check_whole, low=0, remedy="0 to begin with a refresh")
CLIP = partial(check_number, low=1.0, remedy="1.0 for no scaling")
TOLERANCE = partial(check_number, low=0.0, open_high=True, remedy="1e-2 is the default")
FLOOR = partial(check_number, low=0.0, high=1.0, remedy="0.01 is usual")
SCALE = partial(check_number, low=0.0, open_high=True, remedy="0.1 is the default, 1.0 a full step")
SHARE = partial(check_number, low=0.0, open_low=True, high=10.0, remedy="0.2 is the default")


@dataclass(frozen=True, kw_only=True)
class FOSIOptions:
    """The options of the FOSI step, and DHO2's keywords, checked.

    Attributes:
        largest: k, how many of the largest eigenpairs get Newton steps.
        smallest: l, how many of the smallest (most negative) eigenpairs; steps lead away from them.
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

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value outside its bounds.
    """

    largest: int = keyword(10, COUNT)
    smallest: int = keyword(0, COUNT)
    curvature_interval: AutoInterval = keyword(AUTO, check_interval, AUTO)
    overhead: float = keyword(0.2, SHARE)
    warmup_steps: int | None = keyword(None, WARMUP, None)
    newton_scale: Schedule = keyword(0.1, SCALE, callable)
    lr_scale_clip: float | None = keyword(None, CLIP, None)
    lr_scale_guard: bool = keyword(True, check_flag)
    lanczos_iterations: int | None = keyword(None)
    lanczos_tol: float = keyword(1e-2, TOLERANCE)
    lanczos_dtype: torch.dtype | None = keyword(None, one_of(torch.float32, torch.float64), None)
    eigenvalue_floor: float = keyword(1e-2, FLOOR)
    subspace_momentum: float | Literal["average", "base"] = keyword("average", check_momentum)
    warm_start: bool = keyword(True, check_flag)
    trust_region: bool = keyword(True, check_flag)
    hvp: ProductMode = keyword("auto", one_of("auto", "retained", "recomputed", "differences"))
    curvature: CurvatureKind = keyword("hessian", lambda _, kind: check_curvature(kind))
    layout: Layout = keyword("row", one_of("row", "column"))
    seed: int = keyword(0, check_seed)

    def __post_init__(self) -> None:
        check_keywords(self)
        check_curvature(self.curvature, self.hvp)
        if (most := self.lanczos_iterations) is not None:
            check_whole("lanczos_iterations", most, max(self.wanted, 1), "4 (largest + smallest)")
        if self.smallest > 0 and self.curvature != "hessian":
            raise ValueError(
                f"smallest={self.smallest} with curvature={self.curvature!r}: it has no negative "
                f"eigenvalues to find; use smallest=0, or curvature='hessian'"
            )

    @property
    def wanted(self) -> int:
        """Number of eigenpairs asked for, k + l."""
        return self.largest + self.smallest

    def most_products(self, size: int, *, warm: bool) -> int:
        """Products of a refresh at most, m, for n parameters; ``warm`` from the last eigenvectors.

        Between refreshes the steep directions turn further than what the second half of the
        products would still correct, so a warm start takes half of them. The smallest eigenvalues,
        among many others, need all.
        """
        wanted = min(self.wanted, size)
        if self.lanczos_iterations is not None:
            return min(size, max(self.lanczos_iterations, wanted))
        usual = default_iterations(size, wanted)
        if not warm or self.smallest:
            return usual
        return min(usual, max(2 * wanted, WARM_PRODUCTS))


@dataclass(frozen=True, kw_only=True)
class EpochOptions(FOSIOptions):
    """The options of MRDHO2; without accelerators, an epoch is the interval of DHO2.

    Attributes:
        accelerators: A, how many ranks compute eigenpairs.
        epoch_steps: E, steps between two final updates.
        final_update: "paper" is equation 17. "guarded" does it where the loss on the accelerators'
            batches falls by at least half with it.
        helper_timeout: Seconds without a sign of life, or of waiting at the end of an epoch (for
            eigenpairs, and again for the verdict of "guarded"), after which accelerators are given
            up.
        warmup_steps: W, steps of the base alone before the first epoch that accelerators help in;
            None for 0. Without accelerators: steps before the first eigenpairs, None for
            ``epoch_steps``.
        largest: k, how many of the largest eigenpairs get Newton steps.
        newton_scale: α, the length of a Newton step; 1.0 is a full one. A number is α at the
            largest learning rate of the schedule and follows it from there; a callable of the step
            is taken as it is.
        lanczos_iterations: m, Hessian-vector products at most; None for max(4(k + l), 2 ln n).

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value outside its bounds.
    """

    accelerators: int = keyword(1, partial(check_whole, low=0, remedy="0 for none"))
    epoch_steps: int = keyword(100)
    final_update: FinalUpdate = keyword("guarded", one_of(*get_args(FinalUpdate)))
    helper_timeout: float = keyword(60.0, check_timeout)
    warmup_steps: int | None = keyword(None, WARMUP, None)
    layout: Layout = "column"

    def __post_init__(self) -> None:
        check_count("epoch_steps", self.epoch_steps, meaning="steps")  # before it is an interval
        super().__post_init__()


def newton_scales(option: Schedule, training: Training) -> list[float | Tensor]:
    """α of each group of parameters at a step, negative where the loss is maximized."""
    given, scales = value_at(option, training.steps), list[float | Tensor]()
    if callable(option):  # a number has been checked
        SCALE("newton_scale", given)
    for group in training.groups:
        scale = -float(given) if group.get("maximize") else float(given)
        lr, peak = group["lr"], group[PEAK_LR]
        if callable(option):
            scales.append(scale)
        # A constant is α at the schedule's largest lr: a schedule that ends at 0 ends these steps.
        elif isinstance(lr, Tensor) or isinstance(peak, Tensor):
            scales.append(scale * torch.nan_to_num(lr / peak, 0.0))
        else:
            scales.append(scale * (lr / peak) if peak > 0.0 else 0.0)
    return scales


def check_shards(
    name: str, params: Sequence[Tensor], options: FOSIOptions, *, helped: bool
) -> None:
    """Raise TypeError unless parameters that FSDP2 has sharded make one vector in rows.

    Its products are by differences then. Where workers are ``helped``, raise ValueError for any.
    """
    shards = [p for p in params if is_dtensor(p)]
    if shards and helped:
        raise ValueError(whole_models(name, "accelerator"))
    column = options.layout == "column" and not isinstance(options, EpochOptions)
    for wrong, why in (
        (
            len(shards) < len(params),
            f"fully_shard has sharded {len(shards)} of {len(params)} parameters, and one vector "
            f"spans all; shard the rest, too, without ignored_params",
        ),
        (
            any(cast(Any, p).device_mesh.ndim > 1 for p in shards),
            "the parameters are sharded over a mesh with replicas (HSDP), and each process is to "
            "have rows of its own; shard over a mesh of one dimension",
        ),
        (column, "layout='column' keeps whole vectors, and FSDP2 leaves rows; use layout='row'"),
        (
            options.hvp not in ("auto", "differences"),
            f"hvp={options.hvp!r} takes second derivatives, and FSDP2 has first ones only; use "
            f"hvp='differences'",
        ),
        (
            options.curvature != "hessian",
            f"curvature={options.curvature!r} takes derivatives of outputs, and FSDP2 has those of "
            f"a loss only; use curvature='hessian', or DistributedDataParallel",
        ),
    ):
        if shards and wrong:
            raise TypeError(f"{name}: {why}")


def check_one_vector(training: Training) -> None:
    """Raise unless the parameters can be one vector with a Hessian, whose steps are corrected."""
    groups, base = training.groups, training.base
    check_one_device([p for group in groups for p in group["params"]])
    if len({bool(group.get("maximize")) for group in groups}) > 1:
        raise ValueError("maximize differs between the groups; eigenvectors span all of them")
    if all(callable(getattr(base, name, None)) for name in ("train", "eval")):
        raise TypeError(
            f"{training.name} corrects the parameters after its base's step, and "
            f"{training.base_name}, which has train() and eval(), keeps averages of them that "
            f"the correction does not reach; use another base, or KAISA, DPKFAC or DistKFAC"
        )


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """The closure that DHO2 and MRDHO2 evaluate.

    Attributes:
        curvature_closure: Returns the loss of the curvature batch, or (loss, number of examples) if
            processes have unequal batches; or a sequence of such functions, one a micro-batch. May
            be assigned later, or given to :meth:`step`.
    """

    curvature_closure: LossFn | Sequence[LossFn] | None = keyword(None)

"""The options of the FOSI step, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, cast, get_args

import torch
from torch import Tensor

from second_order.errors import CurvatureError
from second_order.lanczos.closure import CurvatureKind, check_curvature
from second_order.lanczos.hvp import ProductMode
from second_order.lanczos.spectrum import default_iterations
from second_order.options import (
    AUTO,
    PEAK_LR,
    AutoInterval,
    Schedule,
    check_choice,
    check_count,
    check_flag,
    check_interval,
    check_number,
    check_seed,
    check_timeout,
    check_whole,
    value_at,
)
from second_order.sharded import is_dtensor

__all__ = [
    "EpochOptions",
    "FOSIOptions",
    "FinalUpdate",
    "Layout",
    "check_differences",
    "check_newton_scale",
    "check_one_vector",
    "check_row_layout",
    "check_shards",
    "newton_scale_at",
    "refuse_no_closure",
]

Options = TypeVar("Options", bound="FOSIOptions")
Layout: TypeAlias = Literal["row", "column"]

WARM_PRODUCTS = 20
"""Products that a warm start may take whatever the number of pairs."""

REST_CLIP = 3.0
"""FOSI's bound on s for SGD; adaptive bases, which scale their steps themselves, have 1."""


FinalUpdate: TypeAlias = Literal["within", "guarded", "paper", "additive"]


@dataclass(frozen=True, kw_only=True)
class FOSIOptions:
    """The options of the FOSI step; :class:`~second_order.DHO2` says what each means.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value outside its bounds.
    """

    largest: int
    smallest: int
    curvature_interval: AutoInterval
    overhead: float
    warmup_steps: int | None
    newton_scale: Schedule
    lr_scale_clip: float | None
    lr_scale_guard: bool
    lanczos_iterations: int | None
    lanczos_tol: float
    lanczos_dtype: torch.dtype | None
    eigenvalue_floor: float
    subspace_momentum: float | Literal["average", "base"]
    warm_start: bool
    trust_region: bool
    hvp: ProductMode
    curvature: CurvatureKind
    layout: Layout
    seed: int

    @classmethod
    def of(cls: type[Options], values: Mapping[str, Any]) -> Options:
        """Take the options from a mapping that has others, too, such as ``locals()``."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def __post_init__(self) -> None:
        check_whole("largest", self.largest, 0, "0 for none of them")
        check_whole("smallest", self.smallest, 0, "0 for none of them")
        if self.curvature_interval != AUTO:
            check_interval("curvature_interval", self.curvature_interval)
        remedy = "0.2 is the default: 20 % of a step of the base"
        check_number("overhead", self.overhead, low=0.0, open_low=True, high=10.0, remedy=remedy)
        if self.warmup_steps is not None:
            check_whole("warmup_steps", self.warmup_steps, 0, "0 to begin with a refresh")
        if self.lanczos_iterations is not None:
            least = max(self.wanted, 1)
            check_whole(
                "lanczos_iterations", self.lanczos_iterations, least, "4 (largest + smallest)"
            )
        if not callable(self.newton_scale):
            check_newton_scale(self.newton_scale)
        if self.lr_scale_clip is not None:
            check_number("lr_scale_clip", self.lr_scale_clip, low=1.0, remedy="1.0 for no scaling")
        remedy = "1e-2 is the default"
        check_number("lanczos_tol", self.lanczos_tol, low=0.0, open_high=True, remedy=remedy)
        check_number(
            "eigenvalue_floor", self.eigenvalue_floor, low=0.0, high=1.0, remedy="0.01 is usual"
        )
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
        check_flag("lr_scale_guard", self.lr_scale_guard)
        check_flag("warm_start", self.warm_start)
        check_flag("trust_region", self.trust_region)
        check_choice("hvp", self.hvp, ("auto", "retained", "recomputed", "differences"))
        named: Any = self.curvature
        if named != "fisher":  # which may mean two, as is said next
            check_choice("curvature", named, get_args(CurvatureKind))
        check_curvature(named)
        if self.smallest > 0 and self.curvature != "hessian":
            raise ValueError(
                f"smallest={self.smallest} with curvature={self.curvature!r}: it has no negative "
                f"eigenvalues to find; use smallest=0, or curvature='hessian'"
            )
        check_choice("layout", self.layout, ("row", "column"))
        check_seed("seed", self.seed)
        if self.lanczos_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"lanczos_dtype={self.lanczos_dtype} loses orthogonality; use torch.float32 or "
                f"torch.float64"
            )

    @property
    def wanted(self) -> int:
        """Number of eigenpairs asked for, k + l."""
        return self.largest + self.smallest

    def most_products(self, size: int, *, warm: bool) -> int:
        """Products of a refresh at most, m.

        Between refreshes the steep directions turn further than what the second half of the
        products would still correct, so a warm start takes half of them. The smallest eigenvalues,
        among many others, need all.

        Args:
            size: Number n of parameters.
            warm: Whether the refresh starts from the last eigenvectors.
        """
        wanted = min(self.wanted, size)
        if self.lanczos_iterations is not None:
            return min(size, max(self.lanczos_iterations, wanted))
        usual = default_iterations(size, wanted)
        if not warm or self.smallest:
            return usual
        return min(usual, max(2 * wanted, WARM_PRODUCTS))

    @property
    def first_refresh(self) -> int:
        """The step of the first refresh: W, the steps of the base alone; not for "auto"."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return int(value_at(self.curvature_interval, 0))

    def rest_clip(self, base: type[torch.optim.Optimizer]) -> float:
        """The bound on s for a base."""
        if self.lr_scale_clip is not None:
            return self.lr_scale_clip
        return REST_CLIP if base is torch.optim.SGD else 1.0


@dataclass(frozen=True, kw_only=True)
class EpochOptions(FOSIOptions):
    """The options of MRDHO2; without accelerators, an epoch is the interval of DHO2.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value outside its bounds.
    """

    accelerators: int
    epoch_steps: int
    final_update: FinalUpdate
    helper_timeout: float
    overhead: float = 0.2
    warmup_steps: int | None = None
    lr_scale_clip: float | None = None
    lr_scale_guard: bool = True
    subspace_momentum: float | Literal["average", "base"] = "average"
    warm_start: bool = True
    trust_region: bool = True
    layout: Layout = "column"

    def __post_init__(self) -> None:
        check_count("epoch_steps", self.epoch_steps, "steps")
        check_choice("final_update", self.final_update, get_args(FinalUpdate))
        check_timeout("helper_timeout", self.helper_timeout)
        check_whole("accelerators", self.accelerators, 0, "0 for none")
        super().__post_init__()

    @property
    def within(self) -> bool:
        """Whether the next epoch's steps use the eigenpairs, in place of one update."""
        return self.final_update == "within"

    @property
    def first_epoch(self) -> int:
        """The step of the first epoch that accelerators help in: W, 0 if it is not given."""
        return self.warmup_steps or 0


def check_newton_scale(value: Any) -> None:
    """Raise unless α is a finite number of at least 0."""
    remedy = "0.1 is the default, 1.0 a full step"
    check_number("newton_scale", value, low=0.0, open_high=True, remedy=remedy)


def newton_scale_at(option: Schedule, step: int, group: Mapping[str, Any]) -> float | Tensor:
    """α of a group of parameters at a step, negative where the loss is maximized."""
    scale = value_at(option, step)
    if callable(option):  # a number has been checked
        check_newton_scale(scale)
    scale = -float(scale) if group.get("maximize") else float(scale)
    if callable(option):
        return scale
    # A constant is α at the schedule's largest lr: a schedule that ends at 0 ends these steps.
    lr, peak = group["lr"], group[PEAK_LR]
    if isinstance(lr, Tensor) or isinstance(peak, Tensor):
        ratio: Tensor = lr / peak
        return scale * torch.nan_to_num(ratio, 0.0)
    return scale * (lr / peak) if peak > 0.0 else 0.0


def check_shards(name: str, params: Sequence[Tensor]) -> None:
    """Raise TypeError unless parameters that FSDP2 has sharded make one vector in rows.

    Args:
        name: Name of the optimizer.
        params: The parameters, sharded or not.
    """
    shards = [p for p in params if is_dtensor(p)]
    if not shards:
        return
    if len(shards) < len(params):
        raise TypeError(
            f"{name}: fully_shard has sharded {len(shards)} of {len(params)} parameters, and one "
            f"vector spans all; shard the rest, too, without ignored_params"
        )
    if any(cast(Any, p).device_mesh.ndim > 1 for p in shards):
        raise TypeError(
            f"{name}: the parameters are sharded over a mesh with replicas (HSDP), and each "
            f"process is to have rows of its own; shard over a mesh of one dimension"
        )


def check_row_layout(params: Sequence[Tensor], options: FOSIOptions) -> None:
    """Raise TypeError where sharded parameters come with a chosen layout="column"."""
    if options.layout == "column" and any(map(is_dtensor, params)):
        raise TypeError(
            "DHO2: layout='column' keeps whole vectors on each process, and fully_shard (FSDP2) "
            "leaves it rows; use layout='row'"
        )


def check_differences(name: str, params: Sequence[Tensor], options: FOSIOptions) -> None:
    """Raise TypeError unless products by differences will do where parameters are sharded."""
    if not any(map(is_dtensor, params)):
        return
    if options.hvp not in ("auto", "differences"):
        raise TypeError(
            f"{name}: hvp={options.hvp!r} takes second derivatives, and fully_shard (FSDP2) has "
            f"first ones only; use hvp='differences'"
        )
    if options.curvature != "hessian":
        raise TypeError(
            f"{name}: curvature={options.curvature!r} takes derivatives of outputs, and "
            f"fully_shard (FSDP2) has those of a loss only; use curvature='hessian', or "
            f"DistributedDataParallel"
        )


def check_one_vector(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError unless the groups' parameters can be one vector with a Hessian."""
    groups = list(groups)
    params = [p for group in groups for p in group["params"]]
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on {sorted(map(str, devices))}: eigenvectors span all of them; "
            f"put them on one device"
        )
    strange = [p.dtype for p in params if not p.is_floating_point()]
    if strange:
        raise ValueError(f"a parameter of {strange[0]} has no real Hessian; use a real dtype")
    if len({bool(group.get("maximize")) for group in groups}) > 1:
        raise ValueError("maximize differs between the groups; eigenvectors span all of them")


def refuse_no_closure(name: str, step: int) -> NoReturn:
    """Raise CurvatureError, as there is no curvature closure."""
    raise CurvatureError(
        f"the curvature is due at step {step}, and there is no curvature closure: give "
        f"{name}(..., curvature_closure=f), assign optimizer.curvature_closure = f, or call "
        f"step(curvature_closure=f), with f a function that evaluates the loss on the curvature "
        f"batch and returns it without calling backward()"
    )

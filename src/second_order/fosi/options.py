"""What the options of the FOSI step come to for the parameters of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from second_order.distributed.fsdp import is_dtensor
from second_order.distributed.roles import whole_models
from second_order.lanczos.spectrum import check_one_device, default_iterations
from second_order.optimizers.config import EpochOptions, FOSIOptions, check_newton_scale
from second_order.training.context import Training
from second_order.utils.checks import PEAK_LR, Schedule, value_at

__all__ = ["check_one_vector", "check_shards", "most_products", "newton_scales"]

WARM_PRODUCTS = 20
"""Products that a warm start may take whatever the number of pairs."""


def most_products(options: FOSIOptions, size: int, *, warm: bool) -> int:
    """Products of a refresh at most, m, for n parameters; ``warm`` from the last eigenvectors.

    Between refreshes the steep directions turn further than what the second half of the products
    would still correct, so a warm start takes half of them. The smallest eigenvalues, among many
    others, need all.
    """
    wanted = min(options.wanted, size)
    if options.lanczos_iterations is not None:
        return min(size, max(options.lanczos_iterations, wanted))
    usual = default_iterations(size, wanted)
    if not warm or options.smallest:
        return usual
    return min(usual, max(2 * wanted, WARM_PRODUCTS))


def newton_scales(option: Schedule, training: Training) -> list[float | Tensor]:
    """α of each group of parameters at a step, negative where the loss is maximized."""
    given, scales = value_at(option, training.steps), list[float | Tensor]()
    if callable(option):  # a number has been checked
        check_newton_scale(given)
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

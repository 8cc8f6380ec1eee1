"""The systems with Kronecker factors, as far as their choices decide work and messages.

Keywords and their defaults are those of the optimizers of the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from second_order.distributed.assignment import AssignmentCost, OwnerAssignment
from second_order.kfac.options import DoublyFactored, KFACOptions, checked_doubly_factored
from second_order.kfac.plan import Planner, distkfac_plan, dpkfac_plan, kaisa_plan
from second_order.kronecker.model_blocks import BlockRules
from second_order.options import check_choice, check_flag, check_number
from second_order.planning.network import Network, network_of

__all__ = ["PLANNED", "Planned", "distkfac", "dpkfac", "kaisa", "workers_of"]


@dataclass(frozen=True)
class Planned:
    """A system and its options, before there is an optimizer.

    Attributes:
        name: The optimizer's class.
        planner: Makes the plan: which rank does what.
        options: The options that all systems share.
        rules: Rules for which modules become layers.
        base: Class of the base.
        owners: "owner" or "all_reduce" where layers have owners; None otherwise.
        averages: Whether the optimizer averages gradients, not DistributedDataParallel.
        background: Whether solves run on threads beside training.
        conv_approximation: Approximation for convolutions; None for that of other layers.
    """

    name: str
    planner: Planner
    options: KFACOptions
    rules: BlockRules
    base: type[torch.optim.Optimizer] = torch.optim.SGD
    owners: str | None = None
    averages: bool = True
    background: bool = False
    conv_approximation: str | None = None

    def network(self, model: nn.Module, example: Any = None, **base_kwargs: Any) -> Network:
        """The layers and parameters of a model, as this system finds them.

        Args:
            model: The model; on the meta device, too.
            example: Arguments of the model, as for :func:`~.network_of`, or None.
            **base_kwargs: Arguments of the base, for the bytes of its state.
        """
        return network_of(
            model,
            self.options,
            rules=self.rules,
            conv_approximation=self.conv_approximation,
            example=example,
            base=self.base,
            base_kwargs=base_kwargs,
        )


def kaisa(
    *,
    base: type[torch.optim.Optimizer] = torch.optim.SGD,
    grad_worker_fraction: float = 1.0,
    factor_exchange: str = "all_reduce",
    assignment: AssignmentCost = "compute",
    colocate_factors: bool = True,
    gradient_averaging: bool = True,
    **options: Any,
) -> Planned:
    """Describe KAISA with its keywords.

    Raises:
        TypeError: For an unknown keyword, or a value of the wrong type.
        ValueError: For a value outside its bounds.
    """
    check_number("grad_worker_fraction", grad_worker_fraction, low=0.0, high=1.0, remedy="1.0")
    check_choice("assignment", assignment, ("compute", "memory"))
    check_choice("factor_exchange", factor_exchange, ("all_reduce", "reduce"))
    planner = partial(
        kaisa_plan,
        fraction=float(grad_worker_fraction),
        cost=assignment,
        colocate=check_flag("colocate_factors", colocate_factors),
        keeps_all=factor_exchange == "all_reduce",
    )
    shared = _options(base, options)
    averages = check_flag("gradient_averaging", gradient_averaging)
    return Planned("KAISA", planner, shared, shared.block_rules, base, averages=averages)


def dpkfac(
    *,
    base: type[torch.optim.Optimizer] = torch.optim.SGD,
    assignment: OwnerAssignment = "balanced",
    gradient_exchange: str = "owner",
    gradient_averaging: bool = True,
    **options: Any,
) -> Planned:
    """Describe DPKFAC with its keywords.

    Raises:
        TypeError: For an unknown keyword, or a value of the wrong type.
        ValueError: For a value outside its bounds.
    """
    check_choice("assignment", assignment, ("balanced", "round_robin"))
    check_choice("gradient_exchange", gradient_exchange, ("owner", "all_reduce"))
    planner, shared = partial(dpkfac_plan, assignment=assignment), _options(base, options)
    averages = check_flag("gradient_averaging", gradient_averaging)
    return Planned("DPKFAC", planner, shared, shared.block_rules, base, gradient_exchange, averages)


def distkfac(
    *,
    base: type[torch.optim.Optimizer] = torch.optim.SGD,
    conv_factors: str = "kfc",
    doubly_factored: DoublyFactored = "auto",
    gradient_averaging: bool = True,
    **options: Any,
) -> Planned:
    """Describe DistKFAC with its keywords, without stats workers.

    Statistics of stats workers come when they come, in messages that no step waits for: they are
    not counted, and there is no keyword for them.

    Raises:
        TypeError: For an unknown keyword, or a value of the wrong type.
        ValueError: For a value outside its bounds.
    """
    check_choice("conv_factors", conv_factors, ("kfc", "cheap"))
    shared = _options(base, {"exact_blocks": True, **options})
    rules = replace(shared.block_rules, doubly_factored=checked_doubly_factored(doubly_factored))
    return Planned(
        "DistKFAC",
        partial(distkfac_plan, keeps_all=True),
        shared,
        rules,
        base,
        averages=check_flag("gradient_averaging", gradient_averaging),
        background=True,
        conv_approximation="reduce" if conv_factors == "cheap" else None,
    )


PLANNED: dict[str, Callable[..., Planned]] = {
    "KAISA": kaisa,
    "DPKFAC": dpkfac,
    "DistKFAC": distkfac,
}
"""By the optimizer's name, the function that describes it."""


def workers_of(world_size: int, most: int = 8) -> list[int]:
    """Numbers of gradient workers that are compared: divisors of the number of ranks.

    All of them if they are few; else the largest and the smallest, and some evenly between.
    """
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if len(divisors) <= most:
        return divisors[::-1]
    last = len(divisors) - 1
    return [divisors[round(k * last / (most - 1))] for k in range(most)][::-1]


def _options(base: type[torch.optim.Optimizer], given: dict[str, Any]) -> KFACOptions:
    """The shared options with their defaults; those that are "auto" as the base has them."""
    defaults = {field.name: field.default for field in fields(KFACOptions)}
    unknown = given.keys() - defaults.keys()
    if unknown:
        raise TypeError(
            f"unknown options {sorted(unknown)}; known are {sorted(defaults)}, and the system's own"
        )
    return KFACOptions.of({**defaults, **given, "base": base})

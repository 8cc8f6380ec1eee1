"""KAISA: K-FAC with an adaptable split of memory and communication (Pauloski et al., 2022).

every factor_update_steps:  A, G of this rank's batch, summed over all ranks, into running averages
every inv_update_steps:     decompositions, one rank a factor, longest processing time first;
                            gathered among the layer's gradient workers, max(1, fP) of P ranks
every step:                 the layer's gradient workers precondition its gradient;
                            receivers get it from the worker in their own column of the grid;
                            all clip, and step the base
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from second_order.contract.training import Curvature
from second_order.distributed.assignment import AssignmentCost
from second_order.errors import SecondOrderError
from second_order.kfac.curvature import KFAC
from second_order.kfac.options import AUTO, KFACOptions, check_dtype
from second_order.kfac.plan import System, kaisa_plan
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.optimizers.base import ParamsOrModel, SecondOrderOptimizer
from second_order.optimizers.keywords import RestOptions, settled, signed, typed
from second_order.options import (
    check_flag,
    check_keywords,
    check_number,
    keyword,
    one_of,
    picked,
)
from second_order.planning.machine import AutoFraction

__all__ = ["KAISA", "KroneckerOptimizer"]


class KroneckerOptimizer(SecondOrderOptimizer):
    """A base optimizer and the Kronecker factors of a model's layers."""

    options_by_layer = True
    _curvature: Curvature

    def curvature(
        self, *, dtype: torch.dtype = torch.float32, gather: bool = False
    ) -> KroneckerCurvature:
        """The factors as a matrix to apply, solve with and sample from, once the model has trained.

        They are copied, and training may go on. With several processes each keeps the copies of
        some layers, which are fetched when they are asked for, as
        :class:`~second_order.KroneckerCurvature` tells. A collective where other processes keep
        some factors, as with DPKFAC and ``factor_exchange="reduce"``. DPKFAC's factors are of the
        batches of their owner.

        Args:
            dtype: Dtype of the copies, and of all that is computed with them, float32 at least.
            gather: True to give every process all copies, so that each can ask for itself.

        Raises:
            SecondOrderError: Before the first statistics, and on a process that does not train.
        """
        curvature = self._curvature
        if not isinstance(curvature, KFAC):
            raise SecondOrderError(
                f"rank {self.training.world.rank} computes statistics for others, and keeps no "
                f"factors: call curvature() on the ranks whose optimizer.role is 'worker'"
            )
        if curvature.factors_elsewhere:
            self.agree("curvature()")
        return curvature.fitted(dtype, gather)


@dataclass(frozen=True, kw_only=True)
class KAISAOptions:
    """The keywords that KAISA alone has.

    Attributes:
        grad_worker_fraction: Share of the processes that precondition a layer. 1.0: all, least
            communication in a step (COMM-OPT). 1 / processes, or 0: one, least memory (MEM-OPT).
            "auto" measures the network and a few matrix products at construction, and takes what
            :func:`second_order.plan` would predict to be fastest; a checkpoint remembers it. Where
            FSDP2 has sharded the model it is always one: a gradient's rows meet there. Below 1.0 a
            layer's inverse is on some processes alone: call :meth:`consolidate` before you save.
        factor_exchange: "all_reduce" gives every process every factor's running average. "reduce"
            sends statistics to the process that decomposes the factor, and nobody else keeps it:
            half the traffic, and memory that falls with the number of processes; a checkpoint then
            needs :meth:`consolidate`, or ``torch.distributed.checkpoint``. "pipelined" is
            "all_reduce" in buckets that leave while the backward pass still runs (Shi et al. 2021):
            the same training.
        exchange_dtype: Dtype in which statistics and decompositions travel, where they do; None:
            that in which they are kept. ``torch.bfloat16`` halves the bytes of float32, and rounds
            to 8 bits; all processes get the same numbers. Statistics of the first 20 steps, and
            gradients, travel as they are.
        assignment: Balance the "compute" (n³) or the "memory" (n²) of factors over processes.
        colocate_factors: One process decomposes both factors of a layer; False spreads them.
    """

    grad_worker_fraction: float | Literal["auto"] = keyword(
        1.0,
        partial(check_number, low=0.0, high=1.0, remedy="1.0 is the default, and 'auto' measures"),
        AUTO,
    )
    factor_exchange: str = keyword("all_reduce", one_of("all_reduce", "reduce", "pipelined"))
    exchange_dtype: torch.dtype | None = keyword(None, check_dtype, None)
    assignment: AssignmentCost = keyword("compute", one_of("compute", "memory"))
    colocate_factors: bool = keyword(True, check_flag)

    def __post_init__(self) -> None:
        check_keywords(self)


@dataclass(frozen=True, kw_only=True)
class KAISAKeywords(KAISAOptions, KFACOptions, RestOptions):
    """The keywords of KAISA."""


@signed(KAISAKeywords)
class KAISA(KroneckerOptimizer):
    """K-FAC on one process or many, around any first-order optimizer.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = KAISA(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.

    Every "number or callable" is a constant or a function of the step (0, 1, ...) that returns one.
    """

    @typed(KAISAKeywords)
    def __init__(self, params: ParamsOrModel, lr: Any = None, **keywords: Any) -> None:
        values, common = settled(KAISA, lr, keywords)
        options, own = KFACOptions.of(values), picked(KAISAOptions, values)
        for name in ("factor_dtype", "inv_dtype"):
            kept, sent = getattr(options, name), own.exchange_dtype
            if sent is not None and sent.itemsize > kept.itemsize:
                raise ValueError(
                    f"exchange_dtype={sent} is wider than {name}={kept}: more would travel than is "
                    f"kept; use exchange_dtype=None"
                )
        fraction = own.grad_worker_fraction
        plan = partial(
            kaisa_plan,
            cost=own.assignment,
            colocate=own.colocate_factors,
            keeps_all=own.factor_exchange != "reduce",
        )
        system = System(
            partial(plan, fraction=1.0 if fraction == AUTO else float(fraction)),
            options.block_rules,
            str(own),
            pipelined=own.factor_exchange == "pipelined",
            exchange_dtype=own.exchange_dtype,
            chooser=AutoFraction(options, plan) if fraction == AUTO else None,
        )
        super().__init__(
            params,
            curvature=lambda training: KFAC(training, options, system),
            **common,
        )

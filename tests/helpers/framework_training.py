"""What the tests of training stacks share: a training run by the usual loop, to compare with.

model = CASE.model()
...                                     # a framework trains it with optimizer_of(System, model)
assert_as_usual(model, System, accumulate=2)

`assert_as_usual` also requires that the base alone ends far away, because equal parameters would
prove little if the curvature had no effect.
"""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from models import ZOO
from optimizer_cases import EIGENPAIRS, base_only, make
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reference import Batch

CASE = ZOO["mlp"]
BATCHES = CASE.batches(6)
CURVED = CASE.batch(20, seed=99)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Of a batch, in the model's precision."""
    inputs = batch[0].to(next(model.parameters()).dtype)
    return cross_entropy(model(inputs), batch[1])


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """The variables that torchrun sets, by which frameworks know how many processes there are."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    variables |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        yield


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Make two parameter groups: matrices decay; biases, gains and other vectors do not."""
    named = list(model.named_parameters())
    groups = []
    for decay, chosen in (
        (weight_decay, [(name, p) for name, p in named if p.ndim > 1]),
        (0.0, [(name, p) for name, p in named if p.ndim <= 1]),
    ):
        group: dict[str, Any] = {"weight_decay": decay}
        group["params"] = [p for _, p in chosen]
        group["param_names"] = [name for name, _ in chosen]
        groups.append(group)
    return groups


def optimizer_of(
    System: Any,
    model: nn.Module,
    params: Any = None,
    loss: Any = loss_of,
    curved: Any = CURVED,
    **options: Any,
) -> Any:
    """A system over a model, with the curvature closure that one of eigenpairs needs."""
    optimizer = make(System, model if params is None else params, **options)
    if isinstance(optimizer, EIGENPAIRS):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        optimizer.curvature_closure = lambda: loss(inner, curved)
    return optimizer


def usual_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    *,
    loss: Any = loss_of,
    accumulate: int = 1,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    scheduler: Any = None,
) -> None:
    """Train as a script without a framework does."""
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for batch in batches[start : start + accumulate]:
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                value = loss(model, batch)
            (value / accumulate).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_as_usual(
    model: nn.Module,
    System: Any,
    *,
    start: nn.Module | None = None,
    batches: Sequence[Any] = BATCHES,
    rtol: float = 1e-10,
    schedule: Callable[[Any], Any] = lambda _: None,
    loss: Any = loss_of,
    params: Callable[[nn.Module], Any] = lambda _: None,
    curved: Any = CURVED,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> None:
    """Raise unless a model was trained as by the usual loop, and not as by the base alone.

    Args:
        model: what a framework has trained.
        start: what it was before.
        rtol: the allowed difference, of the largest parameter.
        schedule: makes a scheduler of an optimizer.
        params: the groups of a model, None for the model itself.
        curved: the batch of the curvature closure.
        options: of the optimizer.
        how: of the usual loop.
    """
    start = CASE.model() if start is None else start
    ends = []
    for more in ({}, base_only(System)):
        twin = copy.deepcopy(start)
        chosen = {**(options or {}), **more}
        optimizer = optimizer_of(System, twin, params(twin), loss, curved, **chosen)
        usual_loop(twin, optimizer, batches, loss=loss, scheduler=schedule(optimizer), **how)
        ends.append(trainable(twin))
    assert_trained(trainable(model), *ends, start=trainable(start), rtol=rtol)


def assert_trained(
    found: Tensor, usual: Tensor, alone: Tensor, *, start: Tensor, rtol: float
) -> None:
    """Raise unless parameters are those of the usual loop, and not those of the base alone."""
    bound = rtol * float(usual.abs().max())
    difference = float((found - usual).abs().max())
    assert difference <= bound, (
        f"apart by {difference:.3g} from the usual loop, {bound:.3g} allowed"
    )
    assert float((usual - alone).abs().max()) > 10 * bound, "no more than the base alone"
    assert float((usual - alone).norm()) > 1e-2 * float((alone - start).norm())


def trainable(model: nn.Module) -> Tensor:
    """A copy of all parameters that train."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def trained(System: Any, model: nn.Module, batches: Any = BATCHES, **how: Any) -> Tensor:
    """The parameters after training by the usual loop; `options` are the optimizer's."""
    options = how.pop("options", {})
    schedule = how.pop("schedule", lambda _: None)
    optimizer = optimizer_of(System, model, **options)
    usual_loop(model, optimizer, batches, scheduler=schedule(optimizer), **how)
    return trainable(model)


def trained_by_base(System: Any, model: nn.Module, batches: Any = BATCHES, **how: Any) -> Tensor:
    """As `trained`, without curvature."""
    options = {**how.pop("options", {}), **base_only(System)}
    return trained(System, model, batches, options=options, **how)

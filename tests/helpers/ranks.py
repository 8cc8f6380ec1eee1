"""What the tests of many processes share: shards of batches, training on them, and comparisons.

Functions of the tests that take (rank, world_size, ...) run on the pool's ranks.

parallel = world.run(train, 4, case, batches, {"grad_worker_fraction": 0.5})
assert_same_trajectory(agreed(parallel), train(0, 1, case, batches))
"""

from __future__ import annotations

import importlib
import io
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager, redirect_stdout
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from optimizer_cases import EXACT, take
from reference import ReferenceKFAC, at
from torch import Tensor, nn

from second_order import KAISA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from models import Case
    from reference import Batch

# Nothing is left to the defaults, which are chosen to train well.
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "damping": 0.1,
    "relative_damping": False,
    "factor_decay": 0.95,
    "solver": "eigen",
    "kl_clip": 2.5e-3,  # active at some steps of `mlp`: always, it would hide a gradient's scale
    "grafting": "none",
    "factor_update_steps": 1,
    "inv_update_steps": 1,
    **EXACT,
}


def kaisa(params_or_model: Any, **options: Any) -> KAISA:
    return KAISA(params_or_model, **{**OPTIONS, **options})


def shard(batch: Batch, rank: int, world_size: int) -> Batch:
    """A rank's equal share of a batch."""
    x, y = batch
    n, rest = divmod(len(x), world_size)
    assert rest == 0
    return x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]


def vector(model: nn.Module) -> Tensor:
    """A copy of all parameters, of any memory format."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def go(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, batches: Sequence[Batch]
) -> list[Tensor]:
    """The parameters after each step."""
    trajectory = []
    for batch in batches:
        take(model, optimizer, batch, case.loss)
        trajectory.append(vector(model))
    return trajectory


def train(
    rank: int,
    world_size: int,
    case: Case,
    batches: Sequence[Batch],
    options: dict[str, Any] | None = None,
) -> list[Tensor]:
    """The parameters after each step on this rank's shards of the batches."""
    model = case.model()
    return follow(rank, world_size, model, kaisa(model, **(options or {})), case, batches)


def follow(
    rank: int,
    world_size: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    batches: Sequence[Batch],
) -> list[Tensor]:
    """As `train`, with a model and an optimizer that there are."""
    return go(model, optimizer, case, [shard(batch, rank, world_size) for batch in batches])


def train_each(
    rank: int,
    world_size: int,
    case: Case,
    batches: Sequence[Batch],
    choices: Sequence[dict[str, Any]],
) -> list[list[Tensor]]:
    """`train` with each of several choices of options."""
    return [train(rank, world_size, case, batches, options) for options in choices]


def by_reference(
    case: Case, batches: Sequence[Batch], options: dict[str, Any], refresh_at: int | None = None
) -> list[Tensor]:
    """The trajectory that `train` on one process is to have, every solve dense.

    `refresh_at`: inverses are solved at that step as well, as after a checkpoint was loaded.
    """
    chosen = {**OPTIONS, **options}
    lr = float(chosen["lr"])

    def every(name: str) -> Callable[[int], int]:
        extra = refresh_at if name == "inv_update_steps" else None
        return lambda step: 1 if step == extra else at(chosen[name], step)

    same = ("damping", "factor_decay", "kl_clip", "momentum", "relative_damping", "solver")
    model = case.model()
    patterns = chosen.get("skip_layers", ())
    skipped = [n for n, _ in model.named_modules() if any(fnmatchcase(n, p) for p in patterns)]
    reference = ReferenceKFAC(
        model,
        lr=lr,
        base=partial(chosen["base"], lr=lr) if "base" in chosen else None,
        factor_update_steps=every("factor_update_steps"),
        inv_update_steps=every("inv_update_steps"),
        approx=chosen.get("kfac_approx", "expand"),
        loss=case.loss,
        skip=skipped,
        weight_decay=chosen.get("weight_decay", 0.0),
        gradient_scale=chosen["grafting"] == "gradient",
        **{name: chosen[name] for name in same if name in chosen},
    )
    return reference.trajectory(batches)


def agreed(results: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """The trajectory that all ranks have, bit for bit."""
    for rank, result in enumerate(results):
        for step, (own, first) in enumerate(zip(result, results[0], strict=True)):
            assert torch.equal(own, first), f"rank {rank} differs from rank 0 after step {step}"
    return results[0]


def assert_same_trajectory(
    actual: Sequence[Tensor], expected: Sequence[Tensor], rtol: float = 1e-8, hint: Any = ""
) -> None:
    """Raise unless two trajectories agree up to rounding."""
    assert len(actual) == len(expected)
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        bound = rtol * float(b.abs().max())
        difference = float((a - b).abs().max())
        assert difference <= bound, f"apart by {difference:.3g} after step {step} {hint}"


@contextmanager
def replaced(owner: Any, replacements: dict[str, Any]) -> Iterator[None]:
    """Attributes of a module or an object; the pool's ranks outlive a test's monkeypatch."""
    with ExitStack() as stack:
        for name, value in replacements.items():
            stack.enter_context(patch.object(owner, name, value))
        yield


def script(rank: int, world_size: int, name: str, *arguments: object) -> str:
    """What a script prints on this rank, whose process group is there before and after it."""
    main = importlib.import_module(name).main
    groups = dict.fromkeys(("init_process_group", "destroy_process_group"), lambda *_, **__: None)
    argv = {"argv": [name, *map(str, arguments)]}
    with replaced(dist, groups), replaced(sys, argv), redirect_stdout(io.StringIO()) as output:
        main()
    return output.getvalue()


KINDS = ("all_gather", "all_reduce", "all_to_all", "barrier", "batch_isend_irecv", "broadcast")
KINDS += ("gather", "irecv", "isend", "monitored_barrier", "recv", "reduce", "scatter", "send")
COLLECTIVES = [name for name in dir(dist) if name.startswith(KINDS) and name != "reduce_op"]


@contextmanager
def counted(*names: str) -> Iterator[Counter[str]]:
    """How often each function of torch.distributed is called; all collectives, unless named."""
    counts: Counter[str] = Counter()

    def call(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    wrapped = {n: partial(call, n, getattr(dist, n)) for n in names or COLLECTIVES}
    with replaced(dist, wrapped):
        yield counts


@contextmanager
def elements_sent(rank: int, world_size: int) -> Iterator[Counter[str]]:
    """Elements that leave this rank, by collective; an all-reduce counted P times over."""
    elements: Counter[str] = Counter()
    all_reduce = dist.all_reduce
    all_to_all = dist.all_to_all_single
    reduce = dist.reduce
    broadcast = dist.broadcast

    def reducing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        elements["all_reduce"] += 2 * (world_size - 1) * tensor.numel()
        return all_reduce(tensor, *args, **kwargs)

    def sending(
        output: Tensor, tensor: Tensor, got: Sequence[int], gone: Sequence[int], **kwargs: Any
    ) -> Any:
        elements["all_to_all_single"] += sum(n for to, n in enumerate(gone) if to != rank)
        return all_to_all(output, tensor, got, gone, **kwargs)

    def reducing_to(tensor: Tensor, *args: Any, group_dst: int, **kwargs: Any) -> Any:
        elements["reduce"] += tensor.numel() * (rank != group_dst)
        return reduce(tensor, *args, group_dst=group_dst, **kwargs)

    def broadcasting(tensor: Tensor, *args: Any, group_src: int, **kwargs: Any) -> Any:
        elements["broadcast"] += (world_size - 1) * tensor.numel() * (rank == group_src)
        return broadcast(tensor, *args, group_src=group_src, **kwargs)

    verbs = {
        "all_reduce": reducing,
        "all_to_all_single": sending,
        "reduce": reducing_to,
        "broadcast": broadcasting,
    }
    with replaced(dist, verbs):
        yield elements

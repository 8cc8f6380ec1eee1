"""Lanczos over processes: what one process finds on the union of their batches.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from models import ZOO
from ranks import counted, replaced
from reference import cross_entropy
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from second_order.distributed.world import World as Processes
from second_order.errors import CurvatureError
from second_order.lanczos import (
    Eigenpairs,
    Outputs,
    SpectralDensity,
    diagonal,
    eigenpairs,
    spectral_density,
    trace,
)
from second_order.lanczos.hvp import row_counts
from second_order.lanczos.spectrum import weighted_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pool import World

MLP = ZOO["mlp"]
ESTIMATES = {"pairs": eigenpairs, "density": spectral_density}
PAIRS = {"largest": 3, "smallest": 2, "iterations": 40, "tol": 1e-9}


def closure_of(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """Of a batch, which counts for its examples."""
    each = lambda z: functional.cross_entropy(z, y, reduction="none")  # noqa: E731
    return lambda: Outputs(model(x), each)


def on_shards(
    rank: int, world_size: int, sizes: Sequence[Sequence[int]], options: dict[str, Any]
) -> Eigenpairs:
    """Eigenpairs of the union of the ranks' micro-batches, of these sizes."""
    model = MLP.model()
    (x, y) = MLP.batch(sum(map(sum, sizes)))
    flat = [size for own in sizes for size in own]
    before = sum(map(len, sizes[:rank]))
    parts = list(zip(x.split(flat), y.split(flat), strict=True))
    losses = [closure_of(model, *part) for part in parts[before : before + len(sizes[rank])]]
    group = dist.group.WORLD if world_size > 1 else None
    with counted() as collectives:
        pairs = eigenpairs(losses, model, process_group=group, **{**PAIRS, **options})
    assert collectives.total() <= 6 * pairs.products + 15
    return pairs


def assert_same_pairs(a: Eigenpairs, b: Eigenpairs, tol: float = 1e-9) -> None:
    """Up to rounding; vectors up to their signs."""
    scale = float(b.eigenvalues.abs().max())
    torch.testing.assert_close(a.eigenvalues, b.eigenvalues, rtol=0, atol=tol * scale)
    torch.testing.assert_close(a.residuals, b.residuals, rtol=0, atol=tol * scale)
    signs = (a.eigenvectors * b.eigenvectors).sum(1, keepdim=True).sign()
    torch.testing.assert_close(a.eigenvectors * signs, b.eigenvectors, rtol=0, atol=tol**0.5)
    assert a.products == b.products


def bitwise(results: Sequence[Any]) -> Any:
    """What all ranks have, bit for bit."""
    for result in results:
        for name, value in vars(results[0]).items():
            own_rows = getattr(result, name)
            assert (
                torch.equal(own_rows, value) if isinstance(value, Tensor) else own_rows == value
            ), name
    return results[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hvp": "recomputed"},
        {"iterations": 9},
        {"curvature": "gauss-newton", "smallest": 0},
        {"curvature": "empirical-fisher", "smallest": 0},
    ],
    ids=["retained", "recomputed", "not converged", "Gauss-Newton", "Fisher"],
)
@pytest.mark.parametrize("sizes", [[[1], [12]], [[1], [3], [9]], [[2, 3, 1], [7]]], ids=str)
def test_eigenpairs_equal_those_of_the_union_of_batches(
    world: World, sizes: list[list[int]], options: dict[str, Any]
) -> None:
    """111 unknowns, which no two processes share evenly, and ragged micro-batches."""
    found = bitwise(world.run(on_shards, len(sizes), sizes, options))
    assert found.eigenvectors.shape[1] == 111
    assert_same_pairs(found, on_shards(0, 1, [[13]], options))


def of_few_unknowns(rank: int, world_size: int, size: int) -> Eigenpairs:
    w = nn.Parameter(torch.ones(size).double())
    weights = torch.arange(1.0, size + 1).double() * (rank + 1)
    return eigenpairs(
        lambda: (0.5 * (weights * w * w).sum(), rank + 1), [w], largest=size,
        process_group=dist.group.WORLD,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4])
def test_there_can_be_fewer_parameters_than_processes(world: World, size: int) -> None:
    """Some have no row at all."""
    found = bitwise(world.run(of_few_unknowns, 3, size))
    mean = (1 + 4 + 9) / (1 + 2 + 3)
    expected = mean * torch.arange(size, 0, -1.0).double()
    torch.testing.assert_close(found.eigenvalues, expected)
    assert row_counts(size, 3) == {1: [0, 0, 1], 2: [0, 1, 1], 4: [1, 1, 2]}[size]


def with_other_rounding(rank: int, world_size: int) -> Eigenpairs:
    """Rank 1's decompositions are its own, and far off, which shows more than rounding would."""
    native = torch.linalg.eigh

    def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = native(matrix)
        return (values, vectors) if rank != 1 else (2 * values, -1e3 * vectors)

    with replaced(torch.linalg, {"eigh": eigh}):
        return on_shards(rank, world_size, [[5], [7]], {"tol": 1e-3})


def test_one_process_decides(world: World) -> None:
    """When to stop, and about the signs and values of all."""
    found = bitwise(world.run(with_other_rounding, 2, timeout=20))
    assert_same_pairs(found, on_shards(0, 1, [[12]], {"tol": 1e-3}))


def density(rank: int, world_size: int, sizes: Sequence[int]) -> SpectralDensity:
    model = MLP.model()
    (x, y) = MLP.batch(sum(sizes))
    own_rows = x.split(list(sizes))[rank]
    labels = y.split(list(sizes))[rank]
    return spectral_density(
        lambda: (cross_entropy(model(own_rows), labels), len(own_rows)), model,
        probes=2, iterations=15, process_group=dist.group.WORLD,
    )  # fmt: skip


def test_the_density_equals_that_of_the_union_of_batches(world: World) -> None:
    found = bitwise(world.run(density, 3, [1, 3, 9]))
    model = MLP.model()
    (x, y) = MLP.batch(13)
    loss = lambda: cross_entropy(model(x), y)  # noqa: E731
    expected = spectral_density(loss, model, probes=2, iterations=15)
    for function in (lambda x: x, torch.square, torch.exp):
        assert found.expectation(function) == pytest.approx(expected.expectation(function))
    assert found.products == expected.products == 30


# A failure on one process.


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def failing(rank: int, world_size: int, where: int, fault: str, hvp: Any, estimate: str) -> None:
    """Raises; with the model as it was, and the ranks in step."""
    model = MLP.model()
    (x, y) = MLP.batch(6)
    calls = 0
    faults: dict[str, Callable[[Tensor], Any]] = {
        "raises": lambda loss: 1 / 0,
        "returns nonsense": lambda loss: "loss",
        "no examples": lambda loss: (loss, 0),
        "not twice": Square.apply,
        "nan": lambda loss: loss * math.nan,
        "freed": lambda loss: (loss.backward(), loss)[1],
    }

    def loss() -> Any:
        nonlocal calls
        calls += 1
        value = cross_entropy(model(x), y)
        if rank != where:
            return value
        if fault == "raises later":
            return value if calls < 3 else 1 / 0
        return faults[fault](value)

    own_rows: Any = [] if fault == "no micro-batch" and rank == where else [loss]
    try:
        ESTIMATES[estimate](own_rows, model, hvp=hvp, process_group=dist.group.WORLD)
    finally:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == world_size
        assert all(p.grad is None for p in model.parameters())


FAULTS = ["raises", "returns nonsense", "no examples", "not twice", "nan", "freed"]


@pytest.mark.parametrize(
    ("fault", "hvp", "estimate"),
    [
        *((fault, "retained", "pairs") for fault in [*FAULTS, "no micro-batch"]),
        *((fault, "recomputed", "pairs") for fault in [*FAULTS, "raises later"]),
        ("raises later", "differences", "pairs"),
        ("raises", "retained", "density"),
        ("raises later", "recomputed", "density"),
        ("nan", "recomputed", "density"),
    ],
)
def test_a_failure_on_one_process_raises_on_all(
    world: World, fault: str, hvp: str, estimate: str
) -> None:
    """The rank raises its own error, the others one that names that rank, without waiting."""
    errors = world.run(failing, 3, 1, fault, hvp, estimate, expect_errors=True, timeout=20)
    own = {"raises": ZeroDivisionError, "raises later": ZeroDivisionError,
           "no micro-batch": ValueError}.get(fault, CurvatureError)  # fmt: skip
    for rank, error in enumerate(errors):
        assert type(error) is (own if rank == 1 else CurvatureError), f"rank {rank}: {error!r}"
        if fault == "nan":
            assert "not finite" in str(error)
        elif rank != 1:
            assert "failed on rank 1" in str(error)


def refused_on_shards(rank: int, world_size: int) -> None:
    """Between passes, and after a forward pass that leaves the root's parameters whole."""
    model = fully_shard(MLP.model())
    (x, y) = MLP.batch(6)
    calls = 0

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(model(x), y)

    for is_whole in (False, True):
        if is_whole:
            model(x)
        for estimate in (eigenpairs, trace, diagonal, spectral_density):
            for params in (model, model.parameters()) if not is_whole else (model,):
                with pytest.raises(ValueError, match=r"sharded by fully_shard.*full_state_dict"):
                    estimate(loss, params, hvp="differences", process_group=dist.group.WORLD)  # type: ignore[operator]
    assert calls == 0
    loss().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_sharded_models_are_refused_before_anything_changes(world: World) -> None:
    world.run(refused_on_shards, 2, timeout=30)


def judged(rank: int, world_size: int) -> float:
    """Two micro-batches of 1 and 4 examples on the first process, one of 7 on the second."""
    model = MLP.model()
    (x, y) = MLP.batch(12)
    cuts = [0, 1, 5, 12]
    own_rows = [(0, 1), (2,)][rank] if world_size > 1 else range(3)
    losses = [
        lambda a=cuts[i], b=cuts[i + 1]: (cross_entropy(model(x[a:b]), y[a:b]), b - a)
        for i in own_rows
    ]
    sums = weighted_loss(losses, list(model.parameters()), model)
    Processes().all_reduce([sums]).wait()
    return float(sums[0] / sums[1])


def test_a_mean_loss_is_weighted_by_examples(world: World) -> None:
    model = MLP.model()
    (x, y) = MLP.batch(12)
    expected = float(cross_entropy(model(x), y).detach())
    for losses in ([judged(0, 1)], world.run(judged, 2)):
        assert losses == pytest.approx([expected] * len(losses))


def undecomposed(rank: int, world_size: int, where: int | None, estimate: str) -> Any:
    """Of the rank's own batch; `where` cannot decompose the tridiagonal matrix."""
    model = MLP.model()
    (x, y) = MLP.batch(4 * world_size)
    own_rows = x.split(4)[rank]
    labels = y.split(4)[rank]

    def broken(*_: Any) -> Any:
        raise torch.linalg.LinAlgError("failed to converge")

    options: dict[str, Any] = {"iterations": 6}
    if estimate == "pairs":
        options |= {"largest": 2}
    with replaced(torch.linalg, {"eigh": broken} if rank == where else {}):
        found = ESTIMATES[estimate](
            lambda: cross_entropy(model(own_rows), labels),
            model,
            process_group=dist.group.WORLD,
            **options,
        )
    return found.eigenvalues if isinstance(found, Eigenpairs) else found.nodes


@pytest.mark.parametrize("estimate", ["pairs", "density"])
def test_a_failed_decomposition_on_one_process_raises_on_all(world: World, estimate: str) -> None:
    """Nobody waits: it is the first process's that counts, for better and for worse."""
    undisturbed = world.run(undecomposed, 3, None, estimate)
    for result in world.run(undecomposed, 3, 1, estimate, timeout=20):
        assert torch.equal(result, undisturbed[0])
    for error in world.run(undecomposed, 3, 0, estimate, expect_errors=True, timeout=20):
        assert type(error) is CurvatureError
        assert "could not be decomposed on the first process" in str(error)

"""What is not finite or wrong on one process reaches the parameters of none, and all say so.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dho2_training import BATCHES, LAYOUTS, go, network, shards, spread
from mrdho2_training import CASE, CURVED, EPOCH, loss_of, mrdho2, noted, worker
from ranks import agreed, replaced
from torch import Tensor

from second_order import SecondOrderWarning
from second_order.lanczos.lanczos import Pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pool import World

NAN = float("nan")
# refreshes are at steps 2, 6 and 10
STEPS = 11
REFRESH = 6
EIGH = torch.linalg.eigh
VECTORS = Pairs.vectors
NOT_FINITE = "the refresh at step 6 failed, because the curvature is not finite"
FAULTS: dict[str, tuple[int, str]] = {  # the step before which it happens, and what is said
    "eigh": (REFRESH, NOT_FINITE),
    "eigenvectors": (REFRESH, NOT_FINITE),
}


@contextmanager
def fault(optimizer: Any, name: str) -> Iterator[None]:
    """During one step, on this rank."""
    # Finite numbers: a Newton step along these vectors would be 1e6 times too long.
    spoilt = lambda matrix: tuple(part * 1e3 for part in EIGH(matrix))  # noqa: E731
    nan_vectors = lambda pairs: VECTORS(pairs) * NAN  # noqa: E731
    if name == "eigh":
        replacement = replaced(torch.linalg, {"eigh": spoilt})
    else:
        replacement = replaced(Pairs, {"vectors": nan_vectors})
    with replacement:
        yield


Result = tuple[list[Tensor], list[str], list[bool]]


def spoilt(
    rank: int, world_size: int, name: str, on: int, options: dict[str, Any], faulty: bool = True
) -> Result:
    """The trajectory, what was said, and whether there were eigenpairs after each step."""
    model = network()
    found = []
    having = []
    optimizer = spread(model, rank, world_size, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, batch in enumerate(shards(BATCHES[:STEPS], rank, world_size)):
            if faulty and rank == on and step == FAULTS[name][0]:
                with fault(optimizer, name):
                    found += go(model, optimizer, [batch])
            else:
                found += go(model, optimizer, [batch])
            having.append(len(optimizer.curvature.eigenvalues) > 0)
    messages = [str(w.message) for w in caught if issubclass(w.category, SecondOrderWarning)]
    return found, messages, having


def judge(results: list[Result], name: str, undisturbed: list[Tensor]) -> None:
    found = agreed([each for each, _, _ in results])
    at, message = FAULTS[name]
    assert all(bool(each.isfinite().all()) for each in found)
    assert all(torch.equal(a, b) for a, b in zip(found[:at], undisturbed[:at], strict=True))
    for _, messages, having in results:
        assert having == results[0][2]
        assert having[-1], "no eigenpairs any more"
        assert messages == results[0][1]
        assert any(message in line for line in messages) or not message


_undisturbed: dict[str, list[Tensor]] = {}  # by layout, the trajectory without a fault


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAULTS)
def test_non_finite_values_on_one_rank_do_not_reach_the_parameters(
    world: World, name: str, layout: str
) -> None:
    options = {"layout": layout, "momentum": 0.9}
    if layout not in _undisturbed:
        _undisturbed[layout] = world.run(spoilt, 2, name, 0, options, False)[0][0]
    on = 0 if name == "eigh" else 1  # all ranks have the first rank's pairs
    judge(world.run(spoilt, 2, name, on, options), name, _undisturbed[layout])


def test_non_finite_eigenvectors_do_not_reach_the_parameters_of_one_process() -> None:
    options = {"layout": "row", "momentum": 0.9}
    undisturbed = spoilt(0, 1, "eigenvectors", 0, options, faulty=False)[0]
    judge([spoilt(0, 1, "eigenvectors", 0, options)], "eigenvectors", undisturbed)


# MRDHO2.


def spoilt_epoch(rank: int, world_size: int) -> Any:
    """One worker's sum of gradients is not finite in the second of three epochs."""
    model = CASE.model()

    def before(step: int) -> None:
        if rank == 1 and step == EPOCH + 2:
            optimizer._curvature.sums.gradient_sum[0] = NAN

    with noted() as warned, mrdho2(model) as optimizer:
        if optimizer.role == "accelerator":
            optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
            return None
        trajectory = worker(model, optimizer, rank, world_size - 1, before=before)
        return trajectory, [report.applied for report in optimizer.epochs], warned


def test_a_non_finite_final_update_is_skipped_by_all_workers(
    world: World,
) -> None:
    results = world.run(spoilt_epoch, 3)[:2]
    assert all(bool(each.isfinite().all()) for each in agreed([r[0] for r in results]))
    for _, applied, warned in results:
        assert applied == [True, False, True]
        (message,) = warned
        assert message == "epoch 1 has no final update: the final update is not finite"

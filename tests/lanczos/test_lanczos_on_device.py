"""A run on a device reads its coefficients once, and equals a run on the CPU.

The pretended device exists once in a process, so that another one has it.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_device import NAME, Seen, pretend_device
from lanczos_spaces import space_of
from separate_process import found_by
from torch import Tensor

from second_order.lanczos.lanczos import Ritz, Tridiagonal, tridiagonalize

if TYPE_CHECKING:
    from pool import Forks

SIZE = 40
AT_LEAST = 3
PRODUCT = 2  # launches of one below


def matrix(rank: int) -> Tensor:
    torch.manual_seed(rank)
    Q = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64))[0]
    values = torch.cat([2.0 ** -torch.arange(rank), torch.zeros(SIZE - rank)]).double()
    return Q @ values.diag() @ Q.t()


def converged(ritz: Ritz) -> bool:
    found = ritz.residuals[-AT_LEAST:] <= 1e-3 * ritz.values[-AT_LEAST:].abs()
    return bool(found.all())


def runs(A: Tensor, start: Tensor, device: str, **options: Any) -> Tridiagonal:
    A = A.to(device)
    space = space_of(lambda d: A @ d, SIZE, torch.float64, device)
    return tridiagonalize(space, start.to(device), 30, at_least=AT_LEAST, seed=1, **options)


def compared(seen: Seen, rank: int, expected: int, ends: bool) -> dict[str, Any]:
    A = matrix(rank)
    start = torch.randn(SIZE, dtype=torch.float64)
    options: dict[str, Any] = {"finished": converged if ends else None, "expected": expected}
    here = runs(A, start, "cpu", **options)
    seen.clear()
    there = runs(A, start, NAME, **options)
    # type: ignore[attr-defined]
    count = len(here.diagonal)
    basis = torch.as_tensor(there.basis.inner)
    for one, other in (
        (there.diagonal, here.diagonal),
        (there.off_diagonal, here.off_diagonal),
        (basis[: min(count, 8)], here.basis[:8]),
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    assert here.finite == there.finite
    return {
        "waits": seen.syncs.total(),
        "uploads": seen.uploads.total(),
        "launches": seen.kernels.total() / there.products,
        "made": there.products,
        "needed": count,
    }


CASES = {
    "known": (20, 12, True),
    "unknown": (20, 0, True),
    "too few": (20, 4, True),
    "to the end": (20, 0, False),
    "exhausted": (6, 0, True),
    "exhausted early": (2, 0, True),
}


def all_cases() -> dict[str, dict[str, Any]]:
    with pretend_device() as seen:
        return {name: compared(seen, *case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found(forks: Forks) -> Any:
    return found_by(forks, __file__)


def test_a_run_of_known_length_synchronizes_once(found: Any) -> None:
    for name in ("known", "unknown", "to the end", "exhausted"):
        assert found[name]["waits"] == 1, name
    few = found["too few"]
    assert 1 < few["waits"] <= 1 + -(-(few["needed"] - 4) // 4)
    assert few["made"] < few["needed"] + 4


def test_an_iteration_takes_nine_launches_and_no_uploads(found: Any) -> None:
    end = found["to the end"]
    assert end["made"] == 30
    assert end["launches"] <= 9 + PRODUCT + 1  # and one to begin with and to read, of each
    for name in CASES:  # the matrix and the start
        assert found[name]["uploads"] == 2, name


if __name__ == "__main__":
    sys.stdout.write(json.dumps(all_cases()))

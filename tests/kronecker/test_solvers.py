"""Damped solves against dense ones, by shape and as triangles."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import damped_dense_solve, damped_factored_solve
from solver_problems import (
    assert_solved,
    decompose,
    factor,
    mean_eigenvalue,
    restored,
    solve,
)
from torch import Tensor

from second_order.kfac.precondition import kl_change, kl_clip_factor
from second_order.kronecker import solvers
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.solvers import SOLVERS

DENSE = {"eigen": damped_dense_solve, "inverse": damped_factored_solve}
each_solver = pytest.mark.parametrize("name", ["eigen", "inverse"])
DAMPINGS = st.floats(1e-4, 10.0)
GROUPS = st.integers(1, 3)
DIMS = st.integers(1, 7)
F32 = torch.float32
F64 = torch.float64


# Dense references.


@each_solver
@given(groups=GROUPS, d_in=DIMS, d_out=DIMS, damping=DAMPINGS, diagonal=st.booleans())
def test_solves_equal_the_dense_solve(
    name: str, groups: int, d_in: int, d_out: int, damping: float, diagonal: bool
) -> None:
    A = factor(groups, d_in)
    G = factor(groups, d_out)
    if diagonal:
        storage = torch.rand(groups, d_in, dtype=torch.float64)
        storage[:, 0] = 0
        A = torch.diag_embed(storage)
    gradient = torch.randn(groups, d_out, d_in, dtype=torch.float64)
    expected = torch.stack(
        [DENSE[name](A[i, None], G[i, None], gradient[i], damping) for i in range(groups)]
    )
    argument_a = storage if diagonal else A
    assert_solved(solve(name, argument_a, G, gradient, damping), expected)
    assert_solved(solve(name, argument_a, G, gradient, torch.tensor(damping, dtype=F64)), expected)


# π.


@given(d_in=DIMS, d_out=DIMS, damping=DAMPINGS, stretch=st.floats(0.1, 10.0))
def test_pi_minimizes_its_bound(d_in: int, d_out: int, damping: float, stretch: float) -> None:
    """The trace norm of what F̃_A ⊗ F̃_G adds to A ⊗ G + γI: no other split has less of it."""
    A = factor(1, d_in)
    G = factor(1, d_out)
    means = torch.stack([mean_eigenvalue(A), mean_eigenvalue(G)])
    on_a, on_g = SOLVERS["inverse"].split_damping(means, damping)
    assert on_a is not None
    assert on_g is not None

    def bound(a: Tensor, g: Tensor) -> float:
        return float(a * d_in * G[0].trace() + g * d_out * A[0].trace())

    assert bound(on_a, on_g) <= bound(on_a * stretch, on_g / stretch) * (1 + 1e-12)


# Batches.


@each_solver
@given(
    shapes=st.lists(
        st.tuples(GROUPS, DIMS, st.sampled_from([torch.float32, torch.float64])), max_size=8
    ),
    storage=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    batch_bytes=st.sampled_from([1, 500, 2**20]),
)
def test_batched_by_shape_equals_one_at_a_time(
    name: str,
    shapes: list[tuple[int, int, torch.dtype]],
    storage: torch.dtype,
    batch_bytes: int,
) -> None:
    matrices = [
        (factor(groups, dim) + 0.1 * torch.eye(dim, dtype=torch.float64)).to(dtype)
        for groups, dim, dtype in shapes
    ]
    with patch.object(solvers, "CPU_BATCH_BYTES", batch_bytes):
        together = decompose(name, *matrices, dtype=storage)
        alone = [decompose(name, each, dtype=storage)[0] for each in matrices]
    sizes = [FactorShape(matrix.shape[0], 1, matrix.shape[1]) for matrix in matrices]
    shapes_sent = [SOLVERS[name].message_shapes(shape, "G") for shape in sizes]
    for i, (batched, single) in enumerate(zip(together, alone, strict=True)):
        assert tuple(tuple(part.shape) for part in batched) == shapes_sent[i]
        coarser = max(storage, matrices[i].dtype, key=lambda dtype: torch.finfo(dtype).eps)
        assert {part.dtype for part in (*batched, *single)} == {storage}
        pairs = list(zip(batched, single, strict=True))
        if name == "eigen":  # its vectors may differ by a sign
            pairs[0] = restored(name, batched), restored(name, single)
        for part, other in pairs:
            torch.testing.assert_close(part.to(coarser), other.to(coarser))


# Triangles.


@given(groups=GROUPS, dim=DIMS, rounded=st.booleans())
def test_inverses_are_sent_as_triangles(groups: int, dim: int, rounded: bool) -> None:
    solver = SOLVERS["inverse"]
    dtype = torch.bfloat16 if rounded else None
    inverse = torch.linalg.inv(factor(groups, dim) + torch.eye(dim))
    inverse = (inverse + inverse.mT) / 2
    for parts in ((inverse,), (inverse.diagonal(dim1=-2, dim2=-1).contiguous(),)):
        shape = FactorShape(groups, dim, 1, diagonal_a=parts[0].dim() == 2)
        with patch.object(solvers, "MIN_TRIANGLE_DIM", 2):
            sent = solver.pack_message(parts, dtype)
            assert tuple(sent[0].shape) == solver.message_shapes(shape, "A")[0]
        (expected,) = solver.pack_message(parts, dtype)
        assert torch.equal(solver.unpack_message(sent, dim)[0], expected)


# The clip.


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_layer_does_not_count_in_the_clip(bad: float) -> None:
    """The others' lr² |P·∇| is 4, by which κ = 1 gives ν = 1/2."""
    products = torch.tensor([4.0, bad])
    assert float(kl_clip_factor(kl_change(products, [1.0, 1.0]), 1.0)) == 0.5
    assert float(kl_clip_factor(kl_change(products[1:], [1.0]), 1.0)) == 1.0

"""Extreme eigenpairs of a curvature matrix, by the Lanczos recurrence.

m = max(4(k + l), 2 ln n) iterations at most, fewer once every wanted Ritz pair has
β_m |s_{mi}| <= tol |θᵢ|;  V̂ = D U[:, last k ∪ first l]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from second_order.distributed.world import World
from second_order.errors import CurvatureError
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import Hessian, ProductMode
from second_order.lanczos.lanczos import Ritz, Tridiagonal, ritz_pairs, tridiagonalise
from second_order.lanczos.vector_space import RowSpace
from second_order.utils.checks import check_number, check_seed, check_whole

__all__ = [
    "Eigenpairs",
    "Pairs",
    "ParamsOrModel",
    "check_one_device",
    "default_iterations",
    "eigenpairs",
    "everybodys_ritz",
    "extreme_pairs",
    "lanczos_dtype",
    "mean_loss",
    "measurement",
]

UNDECOMPOSED = (
    "the tridiagonal matrix of the recurrence could not be decomposed on the first process; use "
    "another batch, or a wider dtype"
)
ROUNDING = 4.0  # times eps ‖H‖: rounding of a product and its reorthogonalisation

ParamsOrModel: TypeAlias = nn.Module | Iterable[Tensor]


@dataclass(frozen=True)
class Pairs:
    """Ritz pairs as the recurrence leaves them, the largest first, then the smallest, ascending."""

    values: Tensor  # (r,) float64 on the CPU
    residuals: Tensor  # (r,) ‖Hv − θv‖ by the recurrence, without rounding; alike
    num_largest: int  # the first pairs are the largest ones, the others the smallest
    iterations: int  # number of products the run took
    norm: float  # the largest |θ| of the whole run, which ‖H‖ is at least
    basis: Tensor  # (m, rows) D, transposed
    combination: Tensor  # (m, r) the columns of U that are wanted
    trouble: str = ""  # why there are none: a number not finite, or B not decomposed

    def bounds(self) -> Tensor:
        """Bounds on ‖Hv − θv‖, ``(r,)``: the residuals, or rounding if that is larger."""
        least = ROUNDING * torch.finfo(self.basis.dtype).eps * self.norm
        return self.residuals.clamp(min=least)

    def vectors(self) -> Tensor:
        """V̂ transposed, ``(r, rows)``: this process's rows of the orthonormal vectors."""
        # One at a time: a product of matrices may be rounded to TF32 on a GPU.
        each = [self.basis.t().mv(column) for column in self.combination.t()]
        return torch.stack(each) if each else self.basis.new_empty((0, self.basis.shape[1]))


def default_iterations(size: int, wanted: int) -> int:
    """The paper's m = max(4(k + l), 2 ln n), at most n."""
    return min(size, max(4 * wanted, math.ceil(2 * math.log(max(size, 2)))))


def extreme_pairs(
    space: RowSpace,
    start: Tensor,
    largest: int,
    smallest: int,
    *,
    iterations: int | None = None,
    tol: float = 1e-2,
    seed: int = 0,
    expected: int = 0,
) -> Pairs:
    """The algebraically largest and smallest eigenpairs, by one recurrence from ``(rows,)``.

    It ends once every wanted pair has a residual of at most tol |θ|; ``expected`` after about so
    many iterations. The seed is of random vectors where the Krylov space is exhausted early.
    """
    wanted = min(largest + smallest, space.size)
    largest = min(largest, wanted)
    smallest = wanted - largest
    if iterations is None:
        iterations = default_iterations(space.size, wanted)

    def chosen(count: int) -> list[int]:
        return [*range(count - 1, count - 1 - largest, -1), *range(smallest)]

    def finished(ritz: Ritz) -> bool:
        picked = chosen(len(ritz.values))
        return bool((ritz.residuals[picked] <= tol * ritz.values[picked].abs()).all())

    run = tridiagonalise(
        space,
        start,
        max(iterations, wanted),
        at_least=wanted,
        finished=finished if tol > 0 else None,
        seed=seed,
        expected=expected,
    )
    done = len(run.diagonal)
    picked = chosen(done)
    ritz = None
    trouble = UNDECOMPOSED
    if run.finite and done >= wanted:
        ritz = everybodys_ritz(space, run)
    else:
        trouble = (
            f"Hessian-vector product {done + 1} is not finite; look at the loss of the batch, or "
            f"use a wider dtype for the model"
        )
    if ritz is None or not bool(ritz.vectors.isfinite().all() & ritz.values.isfinite().all()):
        nothing = torch.empty(0, dtype=torch.float64, device="cpu")
        none = run.basis.new_empty((done, 0))
        return Pairs(nothing, nothing, 0, done, 0.0, run.basis, none, trouble)
    return Pairs(
        values=ritz.values[picked],
        residuals=ritz.residuals[picked],
        num_largest=largest,
        iterations=run.products,
        norm=float(ritz.values.abs().max()),
        basis=run.basis,
        combination=ritz.vectors[:, picked].to(start.device, start.dtype),
    )


def everybodys_ritz(space: RowSpace, run: Tridiagonal) -> Ritz:
    """The first process's Ritz pairs, so that signs, degenerate vectors and failures agree."""
    ritz = ritz_pairs(run.diagonal, run.off_diagonal)
    packed = torch.cat([ritz.values[None], ritz.residuals[None], ritz.vectors.t()])
    packed = space.first(packed)
    return Ritz(packed[0], packed[2:].t(), packed[1])


@dataclass(frozen=True)
class Eigenpairs:
    """Extreme eigenpairs of a Hessian.

    Attributes:
        eigenvalues: ``(k + l,)`` the k largest in descending order, then the l smallest in
            ascending order; float64 on the CPU.
        eigenvectors: ``(k + l, n)`` orthonormal rows over the flattened parameters, in their order.
        residuals: ``(k + l,)`` ‖Hv − θv‖ of each pair by the recurrence, at least 4 eps ‖H‖. There
            is an eigenvalue within it of θ if products are exact to that, which they are not in
            narrower arithmetic than ``dtype``, nor by differences.
        converged: ``(k + l,)`` whether the residual is at most ``tol`` |θ|.
        products: Number of Hessian-vector products taken.
        largest: Number k of largest pairs.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    residuals: Tensor
    converged: Tensor
    products: int
    largest: int

    def parts(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The eigenvectors a parameter at a time: ``(k + l, *p.shape)`` for each."""
        shapes = [p.shape for p in params]
        pieces = self.eigenvectors.split([shape.numel() for shape in shapes], dim=1)
        return [v.reshape(len(v), *shape) for v, shape in zip(pieces, shapes, strict=True)]


def eigenpairs(
    loss_fn: LossFn | Sequence[LossFn],
    params: ParamsOrModel,
    *,
    largest: int = 5,
    smallest: int = 0,
    iterations: int | None = None,
    tol: float = 1e-3,
    start: Tensor | None = None,
    seed: int = 0,
    hvp: ProductMode = "auto",
    process_group: dist.ProcessGroup | None = None,
    curvature: CurvatureKind = "hessian",
) -> Eigenpairs:
    """The largest and smallest eigenvalues of the Hessian of a loss, with their eigenvectors.

    The model is left as it was: random state, buffers, ``.grad``, train/eval mode.

        pairs = eigenpairs(lambda: criterion(model(x), y), model, largest=10)
        print(pairs.eigenvalues, pairs.residuals)

    Args:
        loss_fn: Evaluates the loss of a batch and returns it, without calling ``backward``; or a
            sequence of such functions, one a micro-batch, of which only one graph at a time is in
            memory. A function may return (loss, number of examples), by which micro-batches and
            processes are weighted; they weigh the same otherwise. In place of a loss it may return
            :class:`Outputs`. :func:`losses_over` makes such functions of a data loader.
        params: A module, for its trainable parameters, or any of its parameters: the eigenpairs are
            then those of that block of the Hessian, with all other parameters held fixed.
        largest: Number k of algebraically largest pairs.
        smallest: Number l of algebraically smallest (most negative) pairs.
        iterations: Hessian-vector products at most; None for max(4(k + l), 2 ln n). Pairs that have
            not converged by then are False in ``converged``.
        tol: Stop once ‖Hv − θv‖ <= tol |θ| for every pair asked for.
        start: ``(n,)`` to start from, the sum of eigenvectors known from before, for instance; None
            for a seeded random vector.
        seed: Seed of the start vector.
        hvp: How to multiply, as :class:`Hessian` has it. "auto": "retained" for one function,
            "recomputed" for several.
        process_group: Processes that call this together, each with its own batch: the Hessian is
            that of the union, and vectors are kept in parts. None: this process alone.
        curvature: Whose eigenpairs, as :class:`Hessian` has it: "hessian", "gauss-newton" or
            "empirical-fisher".

    Raises:
        CurvatureError: If the loss is no scalar, cannot be differentiated twice, or gives numbers
            that are not finite, or if no loss depends on the parameters.
        TypeError: If a count or a seed is no whole number, or ``tol`` is no number.
        ValueError: For numbers outside their bounds.
    """
    check_seed("seed", seed)
    check_number("tol", tol, low=0.0, open_high=True, remedy="1e-3 is the default")
    check_whole("largest", largest, 0, "a number of pairs, or 0 for none")
    check_whole("smallest", smallest, 0, "a number of pairs, or 0 for none")
    wanted = largest + smallest
    if iterations is not None:
        remedy = f"about four times largest + smallest = {wanted}, or None"
        check_whole("iterations", iterations, wanted, remedy)
    measured = measurement(loss_fn, params, curvature, hvp, process_group)
    if not 1 <= wanted <= measured.size:
        raise ValueError(
            f"largest={largest}, smallest={smallest}: they are together between 1 and the number "
            f"of unknowns, {measured.size}"
        )
    if start is not None and start.shape != (measured.size,):
        raise ValueError(
            f"start has shape {tuple(start.shape)}; there are n = {measured.size} unknowns"
        )
    with measured as space:
        rows = space.random(seed, 1.0)
        if start is not None:
            rows = start.to(rows.device, rows.dtype)[space.rows].clone()
        pairs = extreme_pairs(
            space,
            rows,
            largest,
            smallest,
            iterations=iterations,
            tol=tol,
            seed=seed,
            expected=2 * wanted,  # a product costs more than to synchronize with a device
        )
        space.raise_together()
        if pairs.trouble:
            raise CurvatureError(pairs.trouble)
        vectors = pairs.vectors()
        if process_group is not None:
            vectors = torch.stack([space.gathered(v) for v in vectors])
    return Eigenpairs(
        eigenvalues=pairs.values,
        eigenvectors=vectors,
        residuals=pairs.bounds(),
        converged=pairs.residuals <= tol * pairs.values.abs(),
        products=pairs.iterations,
        largest=pairs.num_largest,
    )


def mean_loss(
    loss_fn: LossFn | Sequence[LossFn],
    params: Sequence[Tensor],
    world: World,
    model: nn.Module | None,
) -> float:
    """The mean loss of every process's batch; NaN if one cannot be evaluated. A collective."""
    hessian = Hessian(loss_fn, params, mode="differences", model=model)
    sums = torch.full((2,), torch.nan, dtype=torch.float64, device=params[0].device)
    try:
        with hessian:
            hessian.evaluate()
        sums[0], sums[1] = hessian.loss, hessian.examples
    except Exception:  # the others sum next, and would wait in vain
        pass
    world.all_reduce([sums]).wait()
    loss, examples = sums.tolist()
    return float(loss) / float(examples)


def lanczos_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """The dtype of Lanczos vectors: float64 where a parameter is, float32 otherwise."""
    return torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32


def measurement(
    loss_fn: LossFn | Sequence[LossFn],
    params: ParamsOrModel,
    curvature: CurvatureKind,
    hvp: ProductMode,
    process_group: dist.ProcessGroup | None,
) -> RowSpace:
    """Check the loss and the parameters of an estimate, and make its context.

    Raises:
        ValueError: If no parameter is left, or they are no vector with a Hessian.
    """
    model = params if isinstance(params, nn.Module) else None
    given = [params] if isinstance(params, Tensor) else params
    if isinstance(given, nn.Module):
        given = given.parameters()
    chosen = [p for p in dict.fromkeys(given) if p.requires_grad]
    if not chosen:
        raise ValueError("there is no parameter that requires a gradient")
    if not all(p.is_leaf for p in chosen):
        raise ValueError("a parameter is the result of a computation; give the leaves themselves")
    check_one_device(chosen)
    world = World.alone() if process_group is None else World(process_group)
    hessian = Hessian(loss_fn, chosen, mode=hvp, model=model, curvature=curvature)
    return RowSpace(hessian, world, lanczos_dtype(chosen))


def check_one_device(params: Sequence[Tensor]) -> None:
    """Raise ValueError unless parameters are real, and on one device: vectors span all of them."""
    strange = [p.dtype for p in params if not p.is_floating_point()]
    if strange:
        raise ValueError(f"a parameter of {strange[0]} has no real Hessian; use a real dtype")
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on {devices}: eigenvectors span all of them; use one device"
        )

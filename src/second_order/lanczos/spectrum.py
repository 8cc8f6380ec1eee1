"""Extreme eigenpairs and the spectral density of a Hessian, by the Lanczos recurrence.

    m = max(4(k + l), 2 ln n) iterations at most, fewer once every wanted Ritz pair has
    β_m |s_{mi}| <= tol |θᵢ|;  V̂ = D U[:, last k ∪ first l]

The density is stochastic Lanczos quadrature: tr f(H)/n ≈ mean over random probes of
Σᵢ s_{1i}² f(θᵢ) (Ghorbani, Krishnan, Xiao, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from second_order.distributed.collectives import World
from second_order.errors import CurvatureError
from second_order.lanczos.hvp import Hessian, LossFn, ProductMode, ShardedHessian
from second_order.lanczos.lanczos import Ritz, Space, Tridiagonal, tridiagonalise
from second_order.lanczos.vector_space import RowSpace, ShardSpace

__all__ = [
    "Eigenpairs",
    "Pairs",
    "SpectralDensity",
    "default_iterations",
    "eigenpairs",
    "extreme_pairs",
    "mean_loss",
    "spectral_density",
]

UNDECOMPOSED = (
    "the tridiagonal matrix of the recurrence could not be decomposed on the first process; use "
    "another batch, or a wider dtype"
)
ROUNDING = 4.0  # times eps ‖H‖: rounding of a product and its reorthogonalisation

ParamsOrModel: TypeAlias = nn.Module | Iterable[Tensor]


@dataclass(frozen=True)
class Pairs:
    """Ritz pairs as the recurrence leaves them.

    Attributes:
        values: ``(r,)`` the largest in descending order, then the smallest in ascending order;
            float64 on the CPU.
        residuals: ``(r,)`` ‖Hv − θv‖ by the recurrence, without rounding; float64 on the CPU.
        largest: Number of pairs that are the largest ones.
        iterations: Number of products the run took.
        finite: False if a number was not finite, or B could not be decomposed; there are no pairs
            then.
        norm: The largest |θ| of the whole run, which ‖H‖ is at least.
        basis: ``(m, rows)`` D, transposed.
        combination: ``(m, r)`` the columns of U that are wanted.
        trouble: Why there are no pairs.
    """

    values: Tensor
    residuals: Tensor
    largest: int
    iterations: int
    finite: bool
    norm: float
    basis: Tensor
    combination: Tensor
    trouble: str = ""

    def bounds(self) -> Tensor:
        """Bounds on ‖Hv − θv‖, ``(r,)``: the residuals, or rounding if that is larger."""
        least = ROUNDING * torch.finfo(self.basis.dtype).eps * self.norm
        return self.residuals.clamp(min=least)

    def vectors(self) -> Tensor:
        """V̂ transposed, ``(r, rows)``: this process's rows of the orthonormal vectors."""
        if not self.basis.is_cuda:
            return self.combination.t() @ self.basis
        # One at a time: a product of matrices may be rounded to TF32 there, whatever we ask for.
        each = [self.basis.t().mv(column) for column in self.combination.t()]
        return torch.stack(each) if each else self.basis.new_empty((0, self.basis.shape[1]))


def default_iterations(size: int, wanted: int) -> int:
    """The paper's m = max(4(k + l), 2 ln n), at most n."""
    return min(size, max(4 * wanted, math.ceil(2 * math.log(max(size, 2)))))


def extreme_pairs(
    space: Space,
    start: Tensor,
    largest: int,
    smallest: int,
    *,
    iterations: int | None = None,
    tol: float = 1e-2,
    seed: int = 0,
) -> Pairs:
    """The algebraically largest and smallest eigenpairs, by one recurrence.

    Args:
        space: The product and the sums.
        start: ``(rows,)``, this process's rows of the start vector.
        largest: Number k of largest pairs.
        smallest: Number l of smallest pairs.
        iterations: Number m of iterations at most; None for :func:`default_iterations`.
        tol: The run ends once every wanted pair has a residual of at most tol |θ|.
        seed: Seed of random vectors where the Krylov space is exhausted early.
    """
    wanted = min(largest + smallest, space.size)
    largest = min(largest, wanted)
    smallest = wanted - largest
    iterations = default_iterations(space.size, wanted) if iterations is None else iterations

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
    )
    done = len(run.diagonal)
    if not run.finite or done < wanted:
        return _no_pairs(
            run,
            start,
            f"Hessian-vector product {done + 1} is not finite; look at the loss of the batch, or "
            f"use a wider dtype",
        )
    ritz, picked = _everybodys_ritz(space, run, start.device), chosen(done)
    if not bool(torch.cat([ritz.values, ritz.vectors.flatten()]).isfinite().all()):
        return _no_pairs(run, start, UNDECOMPOSED)
    values, residuals = ritz.values, ritz.residuals
    norm = float(values.abs().max())
    S = ritz.vectors[:, picked].to(start.device, start.dtype)
    return Pairs(values[picked], residuals[picked], largest, done, True, norm, run.basis, S)


def _no_pairs(run: Tridiagonal, start: Tensor, why: str) -> Pairs:
    done, nothing = len(run.diagonal), torch.empty(0, dtype=torch.float64)
    none = start.new_empty((done, 0))
    return Pairs(nothing, nothing, 0, done, False, 0.0, run.basis, none, why)


def _everybodys_ritz(space: Space, run: Tridiagonal, device: torch.device) -> Ritz:
    """The first process's Ritz pairs, so that signs, degenerate vectors and failures agree."""
    ritz = run.ritz()
    packed = torch.cat([ritz.values[None], ritz.residuals[None], ritz.vectors.t()])
    packed = space.first(packed.to(device)).cpu()
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
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Eigenpairs:
    """The largest and smallest eigenvalues of the Hessian of a loss, with their eigenvectors.

    The model is left as it was: random state, buffers, ``.grad``, train/eval mode.

        pairs = eigenpairs(lambda: criterion(model(x), y), model, largest=10)
        print(pairs.eigenvalues, pairs.residuals)

    Args:
        loss_fn: Evaluates the loss of a batch and returns it, without calling ``backward``; or a
            sequence of such functions, one a micro-batch, of which only one graph at a time is in
            memory. A function may return (loss, number of examples), by which micro-batches and
            processes are weighted; they weigh the same otherwise.
        params: A module, for its trainable parameters, or any of its parameters: the eigenpairs are
            then those of that block of the Hessian.
        largest: Number k of algebraically largest pairs.
        smallest: Number l of algebraically smallest (most negative) pairs.
        iterations: Hessian-vector products at most; None for max(4(k + l), 2 ln n). Pairs that have
            not converged by then are False in ``converged``.
        tol: Stop once ‖Hv − θv‖ <= tol |θ| for every pair asked for.
        start: ``(n,)`` to start from, the sum of eigenvectors known from before, for instance; None
            for a seeded random vector.
        seed: Seed of the start vector.
        hvp: "retained" keeps one graph and multiplies through it, "recomputed" evaluates every
            function again at each product, "differences" takes finite differences of gradients,
            for what cannot be differentiated twice. "auto": retained for one function, recomputed
            for several.
        dtype: Dtype of the Lanczos vectors; None for float64 where a parameter is, else float32.
        process_group: Processes that call this together, each with its own batch: the Hessian is
            that of the union, and vectors are kept in parts. None: this process alone.

    Returns:
        The pairs, on every process.

    Raises:
        CurvatureError: If the loss is no scalar, cannot be differentiated twice, or gives numbers
            that are not finite.
        ValueError: For counts outside their bounds.
    """
    params, model = _parameters(params)
    size = sum(p.numel() for p in params)
    _check_counts(largest, smallest, size, iterations)
    world = _world(process_group)
    dtype = dtype or lanczos_dtype(params)
    if start is not None and start.shape != (size,):
        raise ValueError(f"start has shape {tuple(start.shape)}; there are n = {size} unknowns")
    with Measured(loss_fn, params, world, dtype, hvp, model) as space:
        rows = (
            space.random(seed, 1.0)
            if start is None
            else start.to(params[0].device, dtype)[space.rows].clone()
        )
        pairs = extreme_pairs(
            space, rows, largest, smallest, iterations=iterations, tol=tol, seed=seed
        )
        space.raise_together()
        vectors = None
        if pairs.finite:
            rows = pairs.vectors()
            alone = world.size == 1
            vectors = rows if alone else torch.stack([space.gathered(v) for v in rows])
    if vectors is None:
        raise CurvatureError(pairs.trouble)
    converged = pairs.residuals <= tol * pairs.values.abs()
    return Eigenpairs(
        pairs.values, vectors, pairs.bounds(), converged, pairs.iterations, pairs.largest
    )


@dataclass(frozen=True)
class SpectralDensity:
    """A quadrature of the density of a Hessian's eigenvalues.

    Attributes:
        nodes: ``(probes, m)`` Ritz values; float64 on the CPU. A probe that ended early is padded
            with nodes of weight 0.
        weights: ``(probes, m)`` weights of the nodes; those of each probe sum to 1.
        size: n, the number of eigenvalues.
        products: Number of Hessian-vector products taken.
    """

    nodes: Tensor
    weights: Tensor
    size: int
    products: int

    def expectation(self, function: Any) -> float:
        """The value of tr f(H) / n; ``lambda x: x`` gives the mean eigenvalue."""
        return float((self.weights * function(self.nodes)).sum() / len(self.nodes))

    def on(self, grid: Tensor, width: float) -> Tensor:
        """The density on a grid, each node a Gaussian of a standard deviation of ``width``.

        Args:
            grid: Points to evaluate at, ``(g,)``, in units of eigenvalues.
            width: Standard deviation, in units of eigenvalues.

        Returns:
            The density, ``(g,)``, with an integral of 1.
        """
        grid = grid.to("cpu", torch.float64)
        distance = (grid[:, None, None] - self.nodes[None]) / width
        bumps = torch.exp(-0.5 * distance.square()) / (width * math.sqrt(2 * math.pi))
        return (bumps * self.weights).sum(dim=(1, 2)) / len(self.nodes)


def spectral_density(
    loss_fn: LossFn | Sequence[LossFn],
    params: ParamsOrModel,
    *,
    probes: int = 4,
    iterations: int = 64,
    seed: int = 0,
    hvp: ProductMode = "auto",
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SpectralDensity:
    """Estimate the density of all eigenvalues of the Hessian of a loss.

    Args:
        loss_fn: Evaluates the loss, as for :func:`eigenpairs`.
        params: A module or its parameters, as for :func:`eigenpairs`.
        probes: Random vectors to average over.
        iterations: Products for each; details finer than the spectrum's width divided by it blur.
        seed: Seed of the random vectors.
        hvp: How products are made, as for :func:`eigenpairs`.
        dtype: Dtype of the Lanczos vectors, as for :func:`eigenpairs`.
        process_group: Processes that call together, as for :func:`eigenpairs`.

    Raises:
        CurvatureError: As :func:`eigenpairs` does.
        ValueError: For counts outside their bounds.
    """
    params, model = _parameters(params)
    if probes < 1 or iterations < 1:
        raise ValueError(f"probes={probes}, iterations={iterations}: both are at least 1")
    dtype = dtype or lanczos_dtype(params)
    nodes, weights, products = [], [], 0
    with Measured(loss_fn, params, _world(process_group), dtype, hvp, model) as space:
        length = min(iterations, space.size)
        for probe in range(probes):
            run = tridiagonalise(space, space.random(seed + probe, 1.0), length)
            space.raise_together()
            if not run.finite:
                raise CurvatureError("a Hessian-vector product is not finite; look at the loss")
            ritz = _everybodys_ritz(space, run, params[0].device)
            if not bool(ritz.vectors.isfinite().all()):
                raise CurvatureError(UNDECOMPOSED)
            products += len(ritz.values)
            padding = (0, length - len(ritz.values))
            nodes.append(nn.functional.pad(ritz.values, padding))
            weights.append(nn.functional.pad(ritz.vectors[0].square(), padding))
        size = space.size
    return SpectralDensity(torch.stack(nodes), torch.stack(weights), size, products)


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


class Measured:
    """A context with the Hessian of all processes' batches as a :class:`RowSpace`.

    Inside, autocast is off for all but the loss. A process whose loss cannot be evaluated raises
    its error, and so do all the others with it.

    Raises:
        CurvatureError: On every process, if the loss of one cannot be evaluated.
    """

    def __init__(
        self,
        loss_fn: LossFn | Sequence[LossFn],
        params: Sequence[Tensor],
        world: World,
        dtype: torch.dtype,
        hvp: ProductMode,
        model: nn.Module | None,
        sign: float = 1.0,
    ) -> None:
        self._world = world
        self._sign = sign
        self._hessian = Hessian(loss_fn, params, mode=hvp, model=model)
        self._dtype = dtype

    def _space(self) -> RowSpace:
        return RowSpace(self._hessian, self._world, self._dtype, self._sign)

    def __enter__(self) -> RowSpace:
        error: Exception | None = None
        try:
            self._hessian.__enter__()
        except Exception as caught:
            error = caught
        space = self._space()
        space.error = error
        self._plain = torch.autocast(self._hessian.params[0].device.type, enabled=False)
        try:
            space.raise_together()
        except BaseException:
            if error is None:
                self._hessian.__exit__()
            raise
        self._plain.__enter__()
        return space

    def __exit__(self, *_: object) -> None:
        self._plain.__exit__(None, None, None)
        self._hessian.__exit__()


class MeasuredShards(Measured):
    """A context as :class:`Measured`, at parameters that FSDP2 has sharded.

    Args:
        loss_fn: Evaluates the loss of this process's batch; every process calls it as often.
        params: The sharded parameters.
        world: The processes.
        dtype: Dtype of the vectors.
        model: The module whose train/eval mode is kept.
        sign: 1, or −1 for the Hessian of the negative loss.
        mine: Takes this process's rows out of a whole vector.
    """

    def __init__(
        self,
        loss_fn: LossFn | Sequence[LossFn],
        params: Sequence[Tensor],
        world: World,
        dtype: torch.dtype,
        model: nn.Module | None,
        sign: float,
        mine: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(loss_fn, params, world, dtype, "differences", model, sign)
        self._mine = mine
        self._hessian = self._sharded = ShardedHessian(loss_fn, params, world, model)

    def _space(self) -> RowSpace:
        return ShardSpace(self._sharded, self._world, self._dtype, self._sign, self._mine)


def lanczos_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """The dtype of Lanczos vectors: float64 where a parameter is, float32 otherwise."""
    return torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32


def _world(group: dist.ProcessGroup | None) -> World:
    return World.alone() if group is None else World(group)


def _parameters(given: ParamsOrModel) -> tuple[list[Tensor], nn.Module | None]:
    model = given if isinstance(given, nn.Module) else None
    each: Iterable[Any] = given.parameters() if isinstance(given, nn.Module) else given
    if isinstance(given, Tensor):
        each = [given]
    named = (p[1] if isinstance(p, tuple) else p for p in each)
    params = [p for p in dict.fromkeys(named) if p.requires_grad]
    if not params:
        raise ValueError("there is no parameter that requires a gradient")
    if not all(p.is_leaf for p in params):
        raise ValueError("a parameter is the result of a computation; give the leaves themselves")
    strange = [p.dtype for p in params if not p.is_floating_point()]
    if strange:
        raise ValueError(f"a parameter of {strange[0]} has no real Hessian; use a real dtype")
    if len({p.device for p in params}) > 1:
        raise ValueError(
            f"the parameters are on {sorted({str(p.device) for p in params})}; give those of one "
            f"device"
        )
    return params, model


def _check_counts(largest: int, smallest: int, size: int, iterations: int | None) -> None:
    if largest < 0 or smallest < 0 or not 1 <= largest + smallest <= size:
        raise ValueError(
            f"largest={largest}, smallest={smallest}: both are at least 0, and together between 1 "
            f"and the number of unknowns, {size}"
        )
    if iterations is not None and iterations < largest + smallest:
        raise ValueError(
            f"iterations={iterations} is below largest + smallest = {largest + smallest}; use "
            f"about four times as many, or None"
        )

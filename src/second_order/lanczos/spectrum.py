"""Extreme eigenpairs of a curvature matrix, by the Lanczos recurrence.

m = max(4(k + l), 2 ln n) iterations at most, fewer once every wanted Ritz pair has
β_m |s_{mi}| <= tol |θᵢ|;  V̂ = D U[:, last k ∪ first l]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from second_order.distributed.world import World
from second_order.errors import CurvatureError
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import Hessian, ProductMode, ShardedHessian
from second_order.lanczos.lanczos import Ritz, Space, Tridiagonal, tridiagonalise
from second_order.lanczos.vector_space import RowSpace, ShardSpace
from second_order.options import check_number, check_seed, check_whole
from second_order.patterns import first_match

__all__ = [
    "Eigenpairs",
    "Pairs",
    "default_iterations",
    "eigenpairs",
    "everybodys_ritz",
    "extreme_pairs",
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
    ritz, picked = everybodys_ritz(space, run, start.device), chosen(done)
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


def everybodys_ritz(space: Space, run: Tridiagonal, device: torch.device) -> Ritz:
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
    curvature: CurvatureKind = "hessian",
    layers: str | Iterable[str] = (),
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
        curvature: "hessian"; "gauss-newton", the Hessian with the outputs linear in the parameters,
            which has no negative eigenvalues where the loss is convex in the outputs;
            "empirical-fisher", the mean of ggᵀ over examples' gradients. The last two need
            :class:`Outputs`.
        layers: Patterns of the names or classes of layers of a module given as ``params``, such as
            "head", "blocks.*.mlp" or "Conv*": their block of the Hessian alone, the other layers
            held fixed. None given: all layers.

    Returns:
        The pairs, on every process.

    Raises:
        CurvatureError: If the loss is no scalar, cannot be differentiated twice, or gives numbers
            that are not finite, or if no loss depends on the parameters.
        TypeError: If a count or a seed is no whole number, or ``tol`` is no number.
        ValueError: For numbers outside their bounds, or a pattern that matches no layer.
    """
    check_seed("seed", seed)
    check_number("tol", tol, low=0.0, open_high=True, remedy="1e-3 is the default")
    measured = measurement(loss_fn, params, layers, curvature, hvp, dtype, process_group)
    size = measured.size
    _check_counts(largest, smallest, size, iterations)
    if start is not None and start.shape != (size,):
        raise ValueError(f"start has shape {tuple(start.shape)}; there are n = {size} unknowns")
    with closing(measured), measured as space:
        rows = space.random(seed, 1.0)
        if start is not None:
            rows = start.to(rows.device, rows.dtype)[space.rows].clone()
        pairs = extreme_pairs(
            space, rows, largest, smallest, iterations=iterations, tol=tol, seed=seed
        )
        space.raise_together()
        vectors = None
        if pairs.finite:
            rows = pairs.vectors()
            alone = process_group is None
            vectors = rows if alone else torch.stack([space.gathered(v) for v in rows])
    if vectors is None:
        raise CurvatureError(pairs.trouble)
    converged = pairs.residuals <= tol * pairs.values.abs()
    return Eigenpairs(
        pairs.values, vectors, pairs.bounds(), converged, pairs.iterations, pairs.largest
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
        with closing(hessian), hessian:
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
        curvature: CurvatureKind = "hessian",
    ) -> None:
        self._world = world
        self._sign = sign
        self._hessian = Hessian(loss_fn, params, mode=hvp, model=model, curvature=curvature)
        self._dtype = dtype

    @property
    def size(self) -> int:
        """The number n of unknowns, on all processes together."""
        return self._hessian.size

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
        try:
            space.raise_together()
            torch.set_autocast_enabled(self._hessian.params[0].device.type, False)
            self._entered = space
            return space
        except BaseException:
            if error is None:
                self._hessian.__exit__()
            raise

    def close(self) -> None:
        """Find everything as it was, if that is not so yet: after an interrupt (Ctrl-C)."""
        self._hessian.close()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()
        failed = self._entered.error
        if error is not None and failed is not None and error is not failed:
            raise failed from error  # what has failed here is why others do not answer


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


def measurement(
    loss_fn: LossFn | Sequence[LossFn],
    params: ParamsOrModel,
    layers: str | Iterable[str],
    curvature: CurvatureKind,
    hvp: ProductMode,
    dtype: torch.dtype | None,
    process_group: dist.ProcessGroup | None,
) -> Measured:
    """Check what :func:`eigenpairs` and its kin are given, and make their context.

    Raises:
        ValueError: If no parameter is left, or they are no vector with a Hessian.
    """
    chosen, model = _parameters(params, layers)
    world = World.alone() if process_group is None else World(process_group)
    dtype = dtype or lanczos_dtype(chosen)
    return Measured(loss_fn, chosen, world, dtype, hvp, model, curvature=curvature)


def _parameters(
    given: ParamsOrModel, layers: str | Iterable[str]
) -> tuple[list[Tensor], nn.Module | None]:
    patterns = [layers] if isinstance(layers, str) else list(layers)
    model = given if isinstance(given, nn.Module) else None
    if patterns and model is None:
        raise ValueError(f"layers={layers!r} are names in a module; give it in place of parameters")
    each: Iterable[Any] = given.parameters() if isinstance(given, nn.Module) else given
    if isinstance(given, Tensor):
        each = [given]
    if model is not None and patterns:
        each = _parameters_of(model, patterns)
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


def _parameters_of(model: nn.Module, patterns: list[str]) -> list[Tensor]:
    everything = dict(model.named_modules(remove_duplicate=False))
    for pattern in patterns:
        if all(first_match([pattern], everything, name) is None for name in everything):
            names = ", ".join(filter(None, everything))
            raise ValueError(f"layers={pattern!r} matches no layer of the model; it has {names}")
    return [
        p
        for name, module in everything.items()
        if first_match(patterns, everything, name) is not None
        for p in module.parameters(recurse=False)
    ]


def _check_counts(largest: int, smallest: int, size: int, iterations: int | None) -> None:
    for name, count in (("largest", largest), ("smallest", smallest)):
        check_whole(name, count, 0, "a number of pairs, or 0 for none")
    if not 1 <= largest + smallest <= size:
        raise ValueError(
            f"largest={largest}, smallest={smallest}: they are together between 1 and the number "
            f"of unknowns, {size}"
        )
    if iterations is None:
        return
    check_whole("iterations", iterations, 1, "None for the default")
    if iterations < largest + smallest:
        raise ValueError(
            f"iterations={iterations} is below largest + smallest = {largest + smallest}; use "
            f"about four times as many, or None"
        )

"""Extreme eigenpairs of a loss's curvature, and checks of a loss and its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from second_order.distributed.fsdp import is_dtensor, sharded_params
from second_order.distributed.world import World
from second_order.errors import CurvatureError
from second_order.lanczos.closure import Closures, CurvatureKind
from second_order.lanczos.hvp import Hessian, ProductMode, RowSpace, lanczos_dtype
from second_order.lanczos.lanczos import default_iterations, extreme_pairs
from second_order.utils.checks import check_number, check_seed, check_whole

__all__ = [
    "Eigenpairs",
    "ParamsOrModel",
    "check_one_device",
    "curvature_space",
    "eigenpairs",
    "split_by_parameter",
    "weighted_loss",
]

ParamsOrModel: TypeAlias = nn.Module | Iterable[Tensor]


@dataclass(frozen=True)
class Eigenpairs:
    """Extreme eigenpairs of a Hessian.

    Attributes:
        eigenvalues: ``(k + l,)`` the k largest in descending order, then the l smallest
            in ascending order; float64 on the CPU.
        eigenvectors: ``(k + l, n)`` orthonormal rows over the flattened
            parameters, in their order.
        residuals: ``(k + l,)`` ‖Hv − θv‖ of each pair as computed by the recurrence, at
            least 4 eps ‖H‖. If products are that accurate, H has an eigenvalue within
            this distance of θ. Products in lower precision than ``eigenvectors.dtype``,
            and those by differences, are not.
        converged: ``(k + l,)`` whether the residual is at most ``tol`` |θ|.
        products: Number of Hessian-vector products.
        largest: k, the number of largest pairs.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    residuals: Tensor
    converged: Tensor
    products: int
    largest: int

    def parts(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Split the eigenvectors by parameter: ``(k + l, *p.shape)`` for each.

        Args:
            params: The parameters that :func:`eigenpairs` used: of a model, those that
                require a gradient.

        Raises:
            ValueError: If their elements are not as many as those of an eigenvector.
        """
        return split_by_parameter(self.eigenvectors, params)


def split_by_parameter(vectors: Tensor, params: Iterable[Tensor]) -> list[Tensor]:
    """Split ``(..., n)`` vectors by parameter: ``(..., *p.shape)`` for each.

    Raises:
        ValueError: If the parameters do not have n elements.
    """
    shapes = [p.shape for p in params]
    sizes = [shape.numel() for shape in shapes]
    n = vectors.shape[-1]
    if sum(sizes) != n:
        raise ValueError(
            f"the parameters have {sum(sizes)} elements, but the vectors have {n}; pass the "
            f"parameters of the estimate: those that require a gradient, each once"
        )
    parts = []
    for part, shape in zip(vectors.split(sizes, dim=-1), shapes, strict=True):
        parts.append(part.reshape(*vectors.shape[:-1], *shape))
    return parts


def eigenpairs(
    loss_fn: Closures,
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
    """Compute the largest and smallest eigenpairs of the Hessian of a loss.

        pairs = eigenpairs(lambda: criterion(model(x), y), model, largest=10)
        print(pairs.eigenvalues, pairs.residuals)

    Random state, buffers, ``.grad`` and the model's train/eval mode are restored.

    Args:
        loss_fn: Returns the loss of a batch without calling ``backward``. It may return
            (loss, number of examples), by which micro-batches and processes are
            weighted; otherwise they have equal weights. Instead of a loss it may return
            :class:`Outputs`. For micro-batches pass a sequence of such functions; one
            graph at a time is then in memory. :func:`losses_over` makes the functions
            from a data loader.
        params: A module, to use its trainable parameters, or some of its parameters.
            Eigenpairs are those of the Hessian with respect to these parameters, with
            all others held fixed. Models that FSDP2 shards are not supported.
        largest: k, the number of algebraically largest pairs.
        smallest: l, the number of algebraically smallest (most negative) pairs.
        iterations: Maximum number of Hessian-vector products. None:
            max(4(k + l), 2 ln n). Pairs that have not converged by then are False in
            ``converged``.
        tol: Stop once ‖Hv − θv‖ <= tol |θ| for every requested pair.
        start: Start vector, ``(n,)``, such as the sum of known eigenvectors. None: a
            seeded random vector.
        seed: Seed of the start vector.
        hvp: How to compute products, as for :class:`Hessian`. "auto": "retained" for
            one function, "recomputed" for several.
        process_group: Processes that call this together, each with its own batch. The
            Hessian is that of the union of the batches. None: this process alone.
        curvature: The matrix, as for :class:`Hessian`: "hessian", "gauss-newton" or
            "empirical-fisher".

    Raises:
        CurvatureError: If the loss is not a scalar, cannot be differentiated twice,
            gives non-finite numbers, or does not depend on the parameters.
        TypeError: If a count or a seed is not an integer, or ``tol`` is not a number.
        ValueError: For numbers outside their bounds, and for sharded parameters.
    """
    # Check the arguments.
    check_seed("seed", seed)
    check_number("tol", tol, low=0.0, open_high=True, remedy="1e-3 is the default")
    check_whole("largest", largest, 0, "a number of pairs, or 0 for none")
    check_whole("smallest", smallest, 0, "a number of pairs, or 0 for none")
    num_pairs = largest + smallest
    if iterations is not None:
        remedy = f"about four times largest + smallest = {num_pairs}, or None"
        check_whole("iterations", iterations, num_pairs, remedy)
    hessian_space = curvature_space(loss_fn, params, curvature, hvp, process_group)
    n = hessian_space.size
    if not 1 <= num_pairs <= n:
        raise ValueError(
            f"largest={largest}, smallest={smallest}: their sum must be between 1 and the number "
            f"of parameters, {n}"
        )
    if iterations is None:
        iterations = default_iterations(n, num_pairs)
    if start is not None and start.shape != (n,):
        raise ValueError(f"start has shape {tuple(start.shape)}; it must be ({n},)")
    if start is not None and not 0 < float(start.detach().double().norm()) < math.inf:
        raise ValueError("start is zero or not finite; pass another vector, or None")

    # Run Lanczos.
    with hessian_space as space:
        rows = space.random(seed, 1.0)
        if start is not None:
            rows = start.detach().to(rows.device, rows.dtype)[space.rows].clone()
        pairs = extreme_pairs(
            space,
            rows,
            largest,
            smallest,
            iterations=iterations,
            tol=tol,
            seed=seed,
            # A product takes longer than synchronizing with a device.
            expected=2 * num_pairs,
        )
        space.raise_together()
        if pairs.trouble:
            raise CurvatureError(pairs.trouble)
        vectors = pairs.vectors()
        if process_group is not None:
            vectors = torch.stack([space.gather(v) for v in vectors])
    return Eigenpairs(
        eigenvalues=pairs.values,
        eigenvectors=vectors,
        residuals=pairs.bounds,
        converged=pairs.residuals <= tol * pairs.values.abs(),
        products=pairs.products,
        largest=pairs.num_largest,
    )


def weighted_loss(
    loss_fn: Closures, params: Sequence[Tensor], model: nn.Module | None
) -> Tensor:
    """Return this process's loss times its number of examples, and this number.

    The sum of these pairs over processes, ``(2,)`` in float64, gives their mean loss.
    """
    # Differences retain no graph, and evaluate nothing on entry.
    with Hessian(loss_fn, params, mode="differences", model=model) as hessian:
        hessian.evaluate()
    sums = torch.zeros(2, dtype=torch.float64, device=params[0].device)
    sums[0] = hessian.loss
    sums[1] = hessian.examples
    return sums


def curvature_space(
    loss_fn: Closures,
    params: ParamsOrModel,
    curvature: CurvatureKind,
    hvp: ProductMode,
    process_group: dist.ProcessGroup | None,
) -> RowSpace:
    """Check a loss and its parameters, and return the space to multiply in.

    Raises:
        TypeError: If an element of ``params`` is not a tensor.
        ValueError: If no parameter is trainable, they do not make one vector, or they
            are sharded.
    """
    # List the parameters, each once.
    model = params if isinstance(params, nn.Module) else None
    candidates: list[Any]
    if isinstance(params, nn.Module):
        candidates = list(params.parameters())
    elif isinstance(params, Tensor):
        candidates = [params]
    else:
        candidates = list(params)
    for p in candidates:
        if not isinstance(p, Tensor):
            raise TypeError(
                f"params has a {type(p).__name__}, which is not a parameter; pass the model, or "
                f"its parameters, as in model.parameters()"
            )
    trainable = [p for p in dict.fromkeys(candidates) if p.requires_grad]
    if not trainable:
        raise ValueError(
            "no parameter requires a gradient; pass a model or parameters with requires_grad=True"
        )
    # Products need whole parameters. FSDP2's may be whole between a forward and the
    # next, but their memory is freed then.
    is_sharded = model is not None and bool(sharded_params(model))
    if is_sharded or any(map(is_dtensor, trainable)):
        raise ValueError(
            "the parameters are sharded by fully_shard or tensor parallelism; gather them with "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), and load them into a model that is "
            "not sharded"
        )
    # They have to be leaves on one device.
    if not all(p.is_leaf for p in trainable):
        raise ValueError(
            "a parameter is the result of a computation; pass leaf tensors"
        )
    check_one_device(trainable)
    world = World.alone() if process_group is None else World(process_group)
    hessian = Hessian(loss_fn, trainable, mode=hvp, model=model, curvature=curvature)
    return RowSpace(hessian, world, lanczos_dtype(trainable))


def check_one_device(params: Sequence[Tensor]) -> None:
    """Check that parameters are real and on one device, so that one vector spans them.

    Raises:
        ValueError: If they are not.
    """
    for p in params:
        if not p.is_floating_point():
            raise ValueError(
                f"a parameter of {p.dtype} has no real Hessian; use a real dtype"
            )
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on {devices}, but eigenvectors span all of them; use one device"
        )

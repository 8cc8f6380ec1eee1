"""Products of the curvature of a loss with vectors, without forming it (Pearlmutter, 1994).

    retained     one forward, g = ∇L with its graph; then H v = ∇(gᵀv), one backward a product
    recomputed   the same for each micro-batch, forward and all, at every product: one graph at a
                 time in memory
    differences  H v ≈ (∇L(w + εv) − ∇L(w − εv)) / 2ε, for what cannot be differentiated twice;
                 Gauss-Newton: J v alike, from outputs, then J'H as it is

What curvature there is beside the Hessian, `linearised.py` tells.
Vectors are flat: the parameters in their order, each in the order of ``p.reshape(-1)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from second_order.distributed.world import World
from second_order.lanczos.closure import (
    CurvatureKind,
    Evaluation,
    LossFn,
    check_closure,
    check_curvature,
    evaluated,
)
from second_order.lanczos.differentiable import derivatives, explained
from second_order.lanczos.linearised import Graph, Parts, linearised, outputs_curvature
from second_order.lanczos.undisturbed import Undisturbed
from second_order.sharded import dtypes_of_passes, local

__all__ = ["Hessian", "LossFn", "ProductMode", "ShardedHessian", "check_closure"]

ProductMode: TypeAlias = Literal["auto", "retained", "recomputed", "differences"]


class Hessian:
    """The Hessian of a mean loss at the parameters as they are: a context to multiply in.

    Or a curvature matrix in its place, as ``curvature`` says.

        with Hessian(lambda: criterion(model(x), y), params) as H:
            h = H.product(v)

    Args:
        loss_fns: Evaluates the loss of a batch, and does not call ``backward``; or a sequence of
            such functions, one a micro-batch. Each returns a scalar, or a pair of it and the number
            of examples it is the mean over, by which micro-batches (and processes) are weighted.
            In place of the loss it may return :class:`~second_order.lanczos.Outputs`.
        params: The parameters to differentiate with respect to, any of the model.
        mode: How to multiply, see above. "auto": "retained" for one function, "recomputed" for
            several. "recomputed" and "differences" evaluate every function again at each product,
            with the random numbers of the first time: the batch must be the same.
        model: The module whose train/eval mode is kept as it is.
        curvature: "hessian"; "gauss-newton" for J'HJ, with J the Jacobian of the outputs and H the
            Hessian of the loss with respect to them; "empirical-fisher" for the mean of ggᵀ over
            the examples' gradients. The last two need closures that return Outputs; they have no
            negative eigenvalue, "gauss-newton" where the loss is convex in the outputs.

    Attributes:
        size: n, the number of unknowns.
        examples: The weight of this process's batch, once it has been evaluated.
        loss: The loss of this process's batch times its weight.
        products: Number of products made so far.
        constant: Whether no loss so far depends on the parameters; None before the first.

    Raises:
        CurvatureError: On entering or at a product, if the loss is no scalar, its graph is gone,
            or it cannot be differentiated twice; with the operation and the remedy.
    """

    def __init__(
        self,
        loss_fns: LossFn | Sequence[LossFn],
        params: Sequence[Tensor],
        *,
        mode: ProductMode = "auto",
        model: nn.Module | None = None,
        curvature: CurvatureKind = "hessian",
    ) -> None:
        check_curvature(curvature)
        self._curvature = curvature
        self._loss_fns: list[LossFn] = (
            list(loss_fns) if isinstance(loss_fns, Sequence) else [loss_fns]
        )
        if mode not in get_args(ProductMode):
            raise ValueError(f"hvp={mode!r} is not one of {', '.join(get_args(ProductMode))}")
        if mode == "auto":
            mode = "retained" if len(self._loss_fns) == 1 else "recomputed"
        self._mode = mode
        self._model = model
        self.params = list(params)
        device = self.params[0].device.type if self.params else "cpu"
        self._autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._dtypes = {p.dtype for p in self.params}  # of parameters and passes
        self._sizes = [p.numel() for p in self.params]
        self.size = sum(self._sizes)
        self.examples = 0.0
        self.loss: Tensor | float = 0.0
        self.products = 0
        self.constant: bool | None = None
        self._graphs: list[tuple[float, Graph]] = []
        self._aside: Undisturbed | None = None

    def __enter__(self) -> Hessian:
        check_closure(self._loss_fns)  # here, where all processes hear of it
        self._aside = aside = Undisturbed(self.params, self._model)
        try:
            aside.__enter__()
            self.examples = self.loss = 0.0
            if self._mode == "retained":
                self._graphs = [self._linearised(f) for f in self._loss_fns]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Find everything as it was, if that is not so yet: ``with closing(H), H`` is sure to."""
        self._graphs = []
        if self._aside is not None:
            self._aside.__exit__()

    def product(self, v: Tensor) -> Tensor:
        """H v times :attr:`examples`: sums over batches, micro-batches and processes add up.

        Args:
            v: The vector, ``(n,)``, in any floating dtype.

        Returns:
            The product, ``(n,)``, in the dtype of v.
        """
        self.products += 1
        directions = [
            part.view(p.shape).to(p.dtype)
            for part, p in zip(v.split(self._sizes), self.params, strict=True)
        ]
        total: Tensor | None = None
        with torch.enable_grad(), self._outside_autocast():
            if self._mode == "differences":
                whole = self._curvature == "hessian"
                differences = self._differences if whole else self._output_differences
                total = differences(directions, v.dtype)
            elif self._mode == "retained":
                for examples, graph in self._graphs:
                    parts = graph.product(directions, retain=True)
                    total = self._add(total, parts, examples, v.dtype)
            else:
                self.examples = self.loss = 0.0
                for loss_fn in self._loss_fns:
                    self._rewind()
                    examples, graph = self._linearised(loss_fn)
                    parts = graph.product(directions, retain=False)
                    total = self._add(total, parts, examples, v.dtype)
        return torch.zeros_like(v) if total is None else total

    def _outside_autocast(self) -> torch.autocast:
        return torch.autocast(self.params[0].device.type, enabled=False)

    def _add(self, total: Tensor | None, parts: Parts, factor: float, dtype: torch.dtype) -> Tensor:
        """The sum total + factor · parts, as one flat vector."""
        pairs = list(zip(parts, self.params, strict=True))
        present = [p if part is None else part for part, p in pairs]
        flat = torch.cat([part.detach().reshape(-1) for part in present]).to(dtype)
        for target, part in zip(flat.split(self._sizes), parts, strict=True):
            if part is None:
                target.zero_()
        if factor != 1.0:
            flat.mul_(factor)
        return flat if total is None else total.add_(flat)

    def _differences(self, directions: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
        """H v from the gradients at w ± εv."""
        step = self._step_along(directions)
        total: Tensor | None = None
        with self._movable() as move:
            for sign in (1.0, -1.0) if step else ():
                move(directions, sign * step)
                self.examples = self.loss = 0.0
                for loss_fn in self._loss_fns:
                    self._rewind()
                    found = self._evaluate(loss_fn)
                    gradients = self._reached(derivatives([found.loss], self.params, twice=False))
                    factor = sign * found.examples / (2 * step)
                    total = self._add(total, gradients, factor, dtype)
        return total

    def _output_differences(
        self, directions: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor | None:
        """J'HJ v, with J v from the outputs at w ± εv."""
        step = self._step_along(directions)
        if not step:
            return None
        pushed: list[list[Tensor]] = [[] for _ in self._loss_fns]
        with self._movable() as move:
            for sign in (1.0, -1.0):
                move(directions, sign * step)
                for terms, loss_fn in zip(pushed, self._loss_fns, strict=True):
                    self._rewind()
                    outputs = [z.detach() for z in self._called(loss_fn).roots]
                    pairs = zip(terms, outputs, strict=bool(terms))
                    terms[:] = [(a - b) / (2 * step) for a, b in pairs] or outputs
        total: Tensor | None = None
        self.examples = self.loss = 0.0
        for terms, loss_fn in zip(pushed, self._loss_fns, strict=True):
            self._rewind()
            found = self._evaluate(loss_fn)
            bent = outputs_curvature(found)(terms)
            parts = self._reached(derivatives(found.roots, self.params, bent, twice=False))
            total = self._add(total, parts, found.examples, dtype)
        return total

    @contextmanager
    def _movable(self) -> Iterator[Callable[[Sequence[Tensor], float], None]]:
        """Yield a function that sets the parameters w to w + εv; they are w again at the end."""
        before = [p.detach().clone() for p in self.params]

        def move(directions: Sequence[Tensor], step: float) -> None:
            for p, w, v in zip(self.params, before, directions, strict=True):
                p.data.copy_(w).add_(v, alpha=step)

        def put_back() -> None:
            for p, w in zip(self.params, before, strict=True):
                p.data.copy_(w)

        try:
            try:
                yield move
            finally:
                put_back()
        finally:  # an interrupt may have cut it short
            put_back()

    def _step_along(self, directions: Sequence[Tensor]) -> float:
        """ε for a direction; 0 for one of length 0."""
        norm = float(torch.stack([v.double().norm() for v in directions]).norm())
        if norm == 0.0:
            return 0.0
        size = float(torch.stack([p.detach().double().norm() for p in self.params]).norm())
        return self._step(norm, size)

    def _step(self, norm: float, size: float) -> float:
        """ε for a direction and parameters of these lengths."""
        # Central differences: the cube root balances rounding and curvature's own change. An
        # element of the direction moves by its length over the root of n.
        eps = max(torch.finfo(dtype).eps for dtype in self._dtypes)
        step: float = 0.25 * eps ** (1 / 3) * (1.0 + size / math.sqrt(self.size)) / norm
        return step

    def evaluate(self) -> None:
        """Evaluate the loss alone, into :attr:`loss` and :attr:`examples`."""
        self.examples = self.loss = 0.0
        for loss_fn in self._loss_fns:
            self._rewind()
            self._evaluate(loss_fn)

    def _called(self, loss_fn: LossFn) -> Evaluation:
        """The loss, evaluated under the autocast that was on where this object was made."""
        device, (enabled, dtype) = self.params[0].device.type, self._autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return evaluated(loss_fn(), self._curvature)

    def _evaluate(self, loss_fn: LossFn) -> Evaluation:
        """The loss, which counts in :attr:`loss` and :attr:`examples`."""
        found = self._called(loss_fn)
        loss, examples = found.loss, found.examples
        self.examples += examples
        self.loss += examples * loss.detach().double()
        return found

    def _rewind(self) -> None:
        """Set random state and buffers back to those of the first evaluation."""
        assert self._aside is not None
        self._aside.rewind()

    def _linearised(self, loss_fn: LossFn) -> tuple[float, Graph]:
        """The number of examples of a batch, and what multiplies by its curvature."""
        found = self._evaluate(loss_fn)
        with self._outside_autocast():
            graph = linearised(found, self.params)
        self._reached(graph.gradients)
        return found.examples, graph

    def _reached(self, gradients: Parts) -> Parts:
        """First derivatives as they are, of which is noted whether there is any."""
        self.constant = self.constant is not False and all(g is None for g in gradients)
        return gradients


class ShardedHessian(Hessian):
    """The Hessian of all processes' mean loss at parameters that FSDP2 has sharded, by differences.

    FSDP2 has first derivatives only, by ``backward``; it averages them, and leaves the rows of this
    process. So products are of vectors with these rows, and need no further exchange.

    Args:
        loss_fns: As for :class:`Hessian`; every process evaluates as many.
        params: The sharded parameters.
        world: The processes.
        model: The module whose train/eval mode is kept as it is.
    """

    def __init__(
        self,
        loss_fns: LossFn | Sequence[LossFn],
        params: Sequence[Tensor],
        world: World,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__(loss_fns, params, mode="differences", model=model)
        self._dtypes |= set() if model is None else dtypes_of_passes(model)
        self._world = world
        self._shards = [local(p).detach() for p in self.params]
        self._sizes = [shard.numel() for shard in self._shards]

    def product(self, v: Tensor) -> Tensor:
        """This process's rows of H v, H being that of the mean over all processes' examples.

        Args:
            v: This process's rows of the vector.
        """
        self.products += 1
        directions = [
            part.view(shard.shape).to(shard.dtype)
            for part, shard in zip(v.split(self._sizes), self._shards, strict=True)
        ]
        norm, size = self._lengths(directions), self._lengths(self._shards)
        if norm == 0.0:
            return torch.zeros_like(v)
        step = self._step(norm, size)
        before = [shard.clone() for shard in self._shards]
        total = torch.zeros_like(v)
        try:
            try:
                for sign in (1.0, -1.0):
                    for shard, w, each in zip(self._shards, before, directions, strict=True):
                        shard.copy_(w).add_(each, alpha=sign * step)
                    total.add_(self._mean_gradient(v.dtype), alpha=sign / (2 * step))
            finally:
                self._move_to(before)
        finally:  # an interrupt may have cut it short
            self._move_to(before)
        return total

    def _move_to(self, shards: Sequence[Tensor]) -> None:
        for shard, w in zip(self._shards, shards, strict=True):
            shard.copy_(w)

    def _lengths(self, parts: Sequence[Tensor]) -> float:
        """The length of a vector of which this process has some rows."""
        squares = torch.zeros((), dtype=torch.float64, device=self.params[0].device)
        for part in parts:
            squares += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        self._world.all_reduce([squares]).wait()
        return math.sqrt(float(squares))

    def _mean_gradient(self, dtype: torch.dtype) -> Tensor:
        """This process's rows of the mean gradient over all processes' examples."""
        self.examples = self.loss = 0.0
        with torch.enable_grad(), self._outside_autocast():
            for loss_fn in self._loss_fns:
                self._rewind()
                found = self._evaluate(loss_fn)
                with explained():
                    (found.loss * found.examples).backward()
        everyone = torch.tensor(self.examples, dtype=torch.float64, device=self.params[0].device)
        self._world.all_reduce([everyone]).wait()
        self._reached([p.grad for p in self.params])
        rows = [
            torch.zeros_like(shard) if p.grad is None else local(p.grad)
            for p, shard in zip(self.params, self._shards, strict=True)
        ]
        flat = torch.cat([part.reshape(-1) for part in rows]).to(dtype)
        for p in self.params:
            p.grad = None
        return flat.mul_(self._world.size / float(everyone))  # FSDP2 has divided by the processes

"""Products of the Hessian of a loss with vectors, without forming it (Pearlmutter, 1994).

    retained     one forward, g = ∇L with its graph; then H v = ∇(gᵀv), one backward a product
    recomputed   the same for each micro-batch, forward and all, at every product: one graph at a
                 time in memory
    differences  H v ≈ (∇L(w + εv) − ∇L(w − εv)) / 2ε, for what cannot be differentiated twice

Vectors are flat: the parameters in their order, each in the order of ``p.reshape(-1)``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction

from second_order.distributed.collectives import World
from second_order.errors import CurvatureError
from second_order.lanczos.undisturbed import RandomState, undisturbed
from second_order.sharded import local

__all__ = ["Hessian", "LossFn", "ProductMode", "ShardedHessian", "check_closure"]

LossFn: TypeAlias = Callable[[], Any]
Parts: TypeAlias = Sequence[Tensor | None]
"""A part for each parameter; None for zeros."""
ProductMode: TypeAlias = Literal["auto", "retained", "recomputed", "differences"]


class Hessian:
    """The Hessian of a mean loss at the parameters as they are: a context to multiply in.

        with Hessian(lambda: criterion(model(x), y), params) as H:
            h = H.product(v)

    Args:
        loss_fns: Evaluates the loss of a batch, and does not call ``backward``; or a sequence of
            such functions, one a micro-batch. Each returns a scalar, or a pair of it and the number
            of examples it is the mean over, by which micro-batches (and processes) are weighted.
        params: The parameters to differentiate with respect to, any of the model.
        mode: How to multiply, see above. "auto": "retained" for one function, "recomputed" for
            several. "recomputed" and "differences" evaluate every function again at each product,
            with the random numbers of the first time: the batch must be the same.
        model: The module whose train/eval mode is kept as it is.

    Attributes:
        size: n, the number of unknowns.
        examples: The weight of this process's batch, once it has been evaluated.
        loss: The loss of this process's batch times its weight.
        products: Number of products made so far.

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
    ) -> None:
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
        self._sizes = [p.numel() for p in self.params]
        self.size = sum(self._sizes)
        self.examples = 0.0
        self.loss: Tensor | float = 0.0
        self.products = 0
        self._graphs: list[tuple[float, list[Tensor | None]]] = []

    def __enter__(self) -> Hessian:
        check_closure(self._loss_fns)  # here, where all processes hear of it
        self._aside = undisturbed(self.params, self._model)
        self._modules = self._aside.__enter__()
        self.examples = self.loss = 0.0
        try:
            self._random = RandomState(self.params)
            if self._mode == "retained":
                self._graphs = [self._gradient(f, twice=True) for f in self._loss_fns]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._graphs = []
        self._aside.__exit__(None, None, None)

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
                total = self._differences(directions, v.dtype)
            elif self._mode == "retained":
                for examples, gradients in self._graphs:
                    parts = self._product(gradients, directions, retain=True)
                    total = self._add(total, parts, examples, v.dtype)
            else:
                self.examples = self.loss = 0.0
                for loss_fn in self._loss_fns:
                    self._rewind()
                    examples, gradients = self._gradient(loss_fn, twice=True)
                    parts = self._product(gradients, directions, retain=False)
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

    def _product(self, gradients: Parts, directions: Sequence[Tensor], *, retain: bool) -> Parts:
        """Compute ∇(gᵀv); a gradient without a graph counts as constant."""
        pairs = zip(gradients, directions, strict=True)
        curved = [(g, v) for g, v in pairs if g is not None and g.requires_grad]
        if not curved:
            return [None] * len(self.params)
        with _explained():
            return torch.autograd.grad(
                [g for g, _ in curved],
                self.params,
                [v for _, v in curved],
                retain_graph=retain,
                allow_unused=True,
            )

    def _differences(self, directions: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
        norm = float(torch.stack([v.double().norm() for v in directions]).norm())
        if norm == 0.0:
            return None
        size = float(torch.stack([p.detach().double().norm() for p in self.params]).norm())
        step = self._step(norm, size)
        before = [p.detach().clone() for p in self.params]
        total: Tensor | None = None
        try:
            for sign in (1.0, -1.0):
                for p, w, v in zip(self.params, before, directions, strict=True):
                    p.data.copy_(w).add_(v, alpha=sign * step)
                self.examples = self.loss = 0.0
                for loss_fn in self._loss_fns:
                    self._rewind()
                    examples, gradients = self._gradient(loss_fn, twice=False)
                    total = self._add(total, gradients, sign * examples / (2 * step), dtype)
        finally:
            for p, w in zip(self.params, before, strict=True):
                p.data.copy_(w)
        return total

    def _step(self, norm: float, size: float) -> float:
        """ε for a direction and parameters of these lengths."""
        # Central differences: the cube root balances rounding and curvature's own change. An
        # element of the direction moves by its length over the root of n.
        eps = max(torch.finfo(p.dtype).eps for p in self.params)
        step: float = 0.25 * eps ** (1 / 3) * (1.0 + size / math.sqrt(self.size)) / norm
        return step

    def evaluate(self) -> None:
        """Evaluate the loss alone, into :attr:`loss` and :attr:`examples`."""
        self.examples = self.loss = 0.0
        for loss_fn in self._loss_fns:
            self._rewind()
            self._evaluate(loss_fn)

    def _evaluate(self, loss_fn: LossFn) -> tuple[Tensor, float]:
        """The loss and its examples, under the autocast that was on where this object was made."""
        device, (enabled, dtype) = self.params[0].device.type, self._autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            loss, examples = _checked(loss_fn())
        self.examples += examples
        self.loss += examples * loss.detach().double()
        return loss, examples

    def _rewind(self) -> None:
        """Set random state and buffers back to those of the first evaluation."""
        self._random.restore()
        self._modules.rewind()

    def _gradient(self, loss_fn: LossFn, *, twice: bool) -> tuple[float, list[Tensor | None]]:
        """The pair (examples, ∇L), with the graph of ∇L if it is to be differentiated again."""
        loss, examples = self._evaluate(loss_fn)
        custom = _custom_functions(loss)
        used: list[Any] = []
        hooks = [node.register_prehook(partial(_note, used, f)) for node, f in custom]
        try:
            with _explained(), self._outside_autocast():
                gradients = torch.autograd.grad(
                    loss, self.params, create_graph=twice, allow_unused=True
                )
        finally:
            for hook in hooks:
                hook.remove()
        if twice:
            _require_second_derivatives(used)
        if any(g is None for g in gradients) and any(f is CheckpointFunction for _, f in custom):
            raise CurvatureError(_REENTRANT)
        return examples, list(gradients)


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
            for sign in (1.0, -1.0):
                for shard, w, each in zip(self._shards, before, directions, strict=True):
                    shard.copy_(w).add_(each, alpha=sign * step)
                total.add_(self._mean_gradient(v.dtype), alpha=sign / (2 * step))
        finally:
            for shard, w in zip(self._shards, before, strict=True):
                shard.copy_(w)
        return total

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
                loss, examples = self._evaluate(loss_fn)
                with _explained():
                    (loss * examples).backward()
        everyone = torch.tensor(self.examples, dtype=torch.float64, device=self.params[0].device)
        self._world.all_reduce([everyone]).wait()
        rows = [
            torch.zeros_like(shard) if p.grad is None else local(p.grad)
            for p, shard in zip(self.params, self._shards, strict=True)
        ]
        flat = torch.cat([part.reshape(-1) for part in rows]).to(dtype)
        for p in self.params:
            p.grad = None
        return flat.mul_(self._world.size / float(everyone))  # FSDP2 has divided by the processes


def check_closure(given: Any) -> None:
    """Raise unless ``given`` is a function that evaluates a loss, or a sequence of some.

    Raises:
        TypeError: If an element is no function.
        ValueError: If the sequence is empty.
    """
    several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    for each in given if several else [given]:
        if not callable(each):
            raise TypeError(
                f"the curvature closure is {each!r}; give a function that returns the loss of the "
                f"curvature batch, or a sequence of such functions"
            )
    if several and not given:
        raise ValueError(
            "the curvature closure is an empty sequence; give a function that returns the loss of "
            "the curvature batch, or one a micro-batch"
        )


def _checked(value: Any) -> tuple[Tensor, float]:
    """The loss and its number of examples, from what a loss function has returned."""
    examples: Any = 1.0
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value, examples = value
    if not isinstance(value, Tensor):
        raise CurvatureError(
            f"the curvature closure returned {type(value).__name__}, not the loss; return the "
            f"scalar tensor, or (loss, number of examples)"
        )
    if value.numel() != 1:
        raise CurvatureError(
            f"the curvature closure returned a tensor of shape {tuple(value.shape)}, not a scalar; "
            f"return its mean or its sum"
        )
    if not value.requires_grad:
        raise CurvatureError(
            "the curvature closure returned a loss without a graph; do not detach it, and do not "
            "evaluate it under torch.no_grad()"
        )
    try:
        examples = float(examples)
    except (TypeError, ValueError, RuntimeError):
        raise CurvatureError(
            f"the curvature closure returned (loss, {type(examples).__name__}); return the loss "
            f"alone, or (loss, number of examples)"
        ) from None
    if not 0.0 < examples < float("inf"):
        raise CurvatureError(
            f"the curvature closure returned {examples:g} examples; return (loss, number of "
            f"examples), at least one"
        )
    return value.reshape(()), examples


_DIFFERENCES = 'or use hvp="differences"'
_REENTRANT = (
    "reentrant checkpointing cannot be differentiated by torch.autograd.grad; use "
    "checkpoint(..., use_reentrant=False)"
)
_COMPILED = (
    "a torch.compile-d function cannot be differentiated twice; evaluate the module that is not "
    f"compiled in the curvature closure, {_DIFFERENCES}"
)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn autograd's errors on second derivatives into CurvatureErrors with a remedy."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if "modified by an inplace operation" in text:
            raise CurvatureError(
                "the loss was evaluated before the parameters were last changed; let the curvature "
                "closure evaluate it anew each time it is called"
            ) from error
        if "a second time" in text:
            raise CurvatureError(
                "the graph of the curvature closure's loss is already freed; let the closure "
                "evaluate the loss and return it, without calling backward()"
            ) from error
        if "rnn" in text.lower() and "cudnn" in text.lower():
            raise CurvatureError(
                "cuDNN's recurrent layers cannot be differentiated twice; set "
                f"torch.backends.cudnn.enabled = False in the curvature closure, {_DIFFERENCES}"
            ) from error
        if "donated buffer" in text:
            raise CurvatureError(_COMPILED) from error
        if "use_reentrant=True" in text:
            raise CurvatureError(_REENTRANT) from error
        missing = re.search(r"derivative for '?([\w:.]+)'? is not implemented", text)
        if missing:
            raise CurvatureError(
                f"{missing[1]} has no derivative in torch, so that the loss cannot be "
                f"differentiated twice; replace the operation in the curvature closure, "
                f"{_DIFFERENCES}"
            ) from error
        raise CurvatureError(f"the loss could not be differentiated: {text}") from error


_ONCE = once_differentiable(lambda ctx: None).__code__


def _custom_functions(loss: Tensor) -> list[tuple[Any, Any]]:
    """The nodes of a graph that are custom autograd functions, each with its function."""
    found = []
    stack: list[Any] = [loss.grad_fn]
    seen = set(stack)
    while stack:
        node = stack.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None:
            found.append((node, function))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def _note(used: list[Any], function: Any, _: Any) -> None:
    used.append(function)


def _require_second_derivatives(functions: Sequence[Any]) -> None:
    """Raise if a function has none: torch takes it for constant if the loss is linear in it."""
    for function in functions:
        if function.__name__ == "CompiledFunction":
            raise CurvatureError(_COMPILED)
        if _ONCE in (getattr(f, "__code__", None) for f in (function.backward, function.vjp)):
            raise CurvatureError(
                f"the autograd.Function {function.__name__} cannot be differentiated twice: it is "
                f"marked with @once_differentiable; write its backward in differentiable "
                f"operations, {_DIFFERENCES}"
            )

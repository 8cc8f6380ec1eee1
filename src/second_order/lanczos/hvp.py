"""Products of the curvature of a loss with vectors, without forming it (Pearlmutter, 1994).

    retained     one forward, g = ∇L with its graph; then H v = ∇(gᵀv), one backward a product
    recomputed   the same for each micro-batch, forward and all, at every product: one graph at a
                 time in memory
    differences  H v ≈ (∇L(w + εv) − ∇L(w − εv)) / 2ε, for what cannot be differentiated twice

What curvature there is beside the Hessian, `differentiable.py` tells.
Vectors are flat: the parameters in their order, each in the order of ``p.reshape(-1)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.fsdp import compute_dtypes, local_tensor
from second_order.distributed.world import World
from second_order.lanczos.closure import (
    CurvatureKind,
    Evaluation,
    LossFn,
    check_closure,
    check_curvature,
    evaluated,
)
from second_order.lanczos.differentiable import Graph, Parts, derivatives, remedied
from second_order.utils.checks import check_choice

__all__ = ["Hessian", "ProductMode", "ShardedHessian"]

ProductMode: TypeAlias = Literal["auto", "retained", "recomputed", "differences"]

# Otherwise its reducer would wait for a backward pass that never comes.
_DDP_FLAGS = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}


@contextmanager
def undisturbed(
    params: Sequence[Tensor], model: nn.Module | None = None
) -> Iterator[Callable[[], None]]:
    """Evaluate and differentiate inside, and find everything as before outside.

    Restores torch's random state and settings, every buffer of every module that is called,
    ``.grad`` of the parameters, the state of DistributedDataParallel's reducer, and ``training`` of
    ``model`` and its parts. Inside, attention runs without fused kernels, which have no second
    derivative, and autocast is off. Yields a function that sets random state and buffers back to
    those of the first evaluation.
    """
    random = torch.get_rng_state()
    on_devices = {p.device: torch.cuda.get_rng_state(p.device) for p in params if p.is_cuda}
    seen: set[nn.Module] = set()
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def rewind() -> None:
        torch.set_rng_state(random)
        for device, state in on_devices.items():
            torch.cuda.set_rng_state(state, device)
        for module, name, buffer, value in buffers:
            buffer.data.copy_(value)  # unseen by version counters: a graph outside may hold it
            setattr(module, name, buffer)

    def about_to_call(module: nn.Module, _: Any = None) -> None:
        """Note the state of a module and its parts, once."""
        if torch.compiler.is_compiling() or module in seen:
            return
        for part in set(module.modules()) - seen:
            seen.add(part)
            for name, buffer in part.named_buffers(recurse=False):
                buffers.append((part, name, buffer, buffer.detach().clone()))
            if isinstance(part, nn.RNNBase):  # cuDNN has no second derivative of them
                torch.backends.cudnn.enabled = False
            if isinstance(part, DistributedDataParallel):
                for flag in _DDP_FLAGS.keys() & vars(part).keys():
                    stack.callback(setattr, part, flag, getattr(part, flag))
                    setattr(part, flag, _DDP_FLAGS[flag])

    with ExitStack() as stack:
        for module in () if model is None else model.modules():
            stack.callback(setattr, module, "training", module.training)
        for p in params:
            stack.callback(setattr, p, "grad", p.grad)
            p.grad = None
        stack.callback(rewind)
        cudnn = torch.backends.cudnn
        stack.callback(setattr, cudnn, "enabled", cudnn.enabled)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for kind in {p.device.type for p in params}:
            # Without a cache: its casts of weights would outlive what differences move.
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        if model is not None:  # compiled code may call it unseen
            about_to_call(model)
        stack.callback(register_module_forward_pre_hook(about_to_call).remove)
        yield rewind


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
        mode: "retained" keeps one graph and multiplies through it; "recomputed" evaluates every
            function again at each product; "differences" takes finite differences of gradients, for
            what cannot be differentiated twice, and of the Hessian alone. The last two have the
            random numbers of the first time: the batch must be the same, too. "auto": "retained"
            for one function, "recomputed" for several.
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
        check_curvature(curvature, mode)
        check_choice("hvp", mode, get_args(ProductMode))
        self._loss_fns = list(loss_fns) if isinstance(loss_fns, Sequence) else [loss_fns]
        if mode == "auto":
            mode = "retained" if len(self._loss_fns) == 1 else "recomputed"
        self._mode = mode
        self._model = model
        self._curvature = curvature
        self.params = list(params)
        self._dtypes = {p.dtype for p in self.params}
        self._device = self.params[0].device if self.params else torch.device("cpu")
        kind = self._device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._shapes = [local_tensor(p).shape for p in self.params]  # of what is here of each
        self._sizes = [shape.numel() for shape in self._shapes]
        self.size = sum(p.numel() for p in self.params)
        self.examples = 0.0
        self.loss: Tensor | float = 0.0
        self.products = 0
        self.constant: bool | None = None
        self._graphs: list[tuple[float, Graph]] = []
        self._world = World.alone()  # the processes that have parts of the parameters
        self._rewind: Callable[[], None]
        self._inside = ExitStack()

    def __enter__(self) -> Hessian:
        check_closure(self._loss_fns)  # here, where all processes learn of it
        with ExitStack() as stack:
            self._rewind = stack.enter_context(undisturbed(self.params, self._model))
            self.examples = self.loss = 0.0
            if self._mode == "retained":
                self._graphs = [self._linearised(f) for f in self._loss_fns]
            self._inside = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._graphs = []
        self._inside.close()

    def product(self, v: Tensor) -> Tensor:
        """H v times :attr:`examples`: sums over batches, micro-batches and processes add up.

        Of a vector ``(n,)`` in any floating dtype, and in that dtype.
        """
        self.products += 1
        directions = [
            part.view(shape).to(p.dtype)
            for part, shape, p in zip(v.split(self._sizes), self._shapes, self.params, strict=True)
        ]
        if self._mode == "differences":
            return self._differences(directions, v)
        retain = self._mode == "retained"
        total: Tensor | None = None
        for examples, graph in self._graphs if retain else map(self._linearised, self._again()):
            parts = graph.product(directions, retain=retain)
            total = self._add(total, parts, examples, v.dtype)
        assert total is not None
        return total

    def _again(self) -> Iterator[LossFn]:
        """Each function, to be evaluated anew with the random numbers and buffers of before."""
        self.examples = self.loss = 0.0
        for loss_fn in self._loss_fns:
            self._rewind()
            yield loss_fn

    def _add(self, total: Tensor | None, parts: Parts, factor: float, dtype: torch.dtype) -> Tensor:
        """The sum total + factor · parts, as one flat vector."""
        whole = [
            local_tensor(torch.zeros_like(p) if part is None else part).detach().reshape(-1)
            for part, p in zip(parts, self.params, strict=True)
        ]
        flat = torch.cat(whole).to(dtype)
        if factor != 1.0:
            flat.mul_(factor)
        return flat if total is None else total.add_(flat)

    def _differences(self, directions: Sequence[Tensor], v: Tensor) -> Tensor:
        """H v from the gradients at w ± εv; the parameters are w again at the end."""
        step = self._step_along(directions)
        if step == 0.0:
            return torch.zeros_like(v)
        here = [local_tensor(p).data for p in self.params]
        before = [w.clone() for w in here]
        total: Tensor | None = None
        try:
            for sign in (1.0, -1.0):
                for p, w, direction in zip(here, before, directions, strict=True):
                    p.copy_(w).add_(direction, alpha=sign * step)
                total = self._add_gradients(total, sign / (2 * step), v.dtype)
        finally:
            torch._foreach_copy_(here, before)
        assert total is not None
        return total

    def _add_gradients(self, total: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
        """The sum total + factor · the gradients of all functions, each times its examples."""
        for loss_fn in self._again():
            found = self._evaluate(loss_fn)
            gradients = self._reached(derivatives([found.loss], self.params, twice=False))
            total = self._add(total, gradients, factor * found.examples, dtype)
        assert total is not None
        return total

    def _step_along(self, directions: Sequence[Tensor]) -> float:
        """ε for a direction; 0 for one of length 0."""
        norm = self._length(directions)
        size = self._length([local_tensor(p).detach() for p in self.params])
        if norm == 0.0:
            return 0.0
        # Central differences: the cube root balances rounding and curvature's own change. An
        # element of the direction moves by its length over the root of n.
        eps = max(torch.finfo(dtype).eps for dtype in self._dtypes)
        step: float = 0.25 * eps ** (1 / 3) * (1.0 + size / math.sqrt(self.size)) / norm
        return step

    def _length(self, parts: Sequence[Tensor]) -> float:
        """The length of a whole vector, of which these are the parts here."""
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        square = torch.stack(norms).square().sum()
        self._world.all_reduce([square]).wait()
        return math.sqrt(float(square))

    def evaluate(self) -> None:
        """Evaluate the loss alone, into :attr:`loss` and :attr:`examples`."""
        for loss_fn in self._again():
            self._evaluate(loss_fn)

    def _evaluate(self, loss_fn: LossFn) -> Evaluation:
        """The loss under the autocast that was on where this object was made; it counts in them."""
        enabled, dtype = self._autocast
        with torch.autocast(self._device.type, dtype=dtype, enabled=enabled):
            found = evaluated(loss_fn(), self._curvature)
        loss, examples = found.loss, found.examples
        self.examples += examples
        self.loss += examples * loss.detach().double()
        return found

    def _linearised(self, loss_fn: LossFn) -> tuple[float, Graph]:
        """The number of examples of a batch, and what multiplies by its curvature."""
        found = self._evaluate(loss_fn)
        graph = Graph(found, self.params)
        self._reached(graph.gradients)
        return found.examples, graph

    def _reached(self, gradients: Parts) -> Parts:
        """First derivatives as they are, of which is noted whether there is any."""
        self.constant = self.constant is not False and all(g is None for g in gradients)
        return gradients


class ShardedHessian(Hessian):
    """The Hessian of all processes' mean loss at parameters that FSDP2 has sharded, by differences.

    FSDP2 has first derivatives only, by ``backward``; it averages them, and leaves the rows of this
    process. So products are of the rows here, and of the mean over all processes' examples: they
    need no further exchange. Every process evaluates as many functions.
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

    def __enter__(self) -> ShardedHessian:
        if self._model is not None:
            self._dtypes |= compute_dtypes(self._model)
        super().__enter__()
        return self

    def _add_gradients(self, total: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
        """The sum total + factor · the mean gradient over all processes' examples."""
        for loss_fn in self._again():
            found = self._evaluate(loss_fn)
            with remedied():
                (found.loss * found.examples).backward()
        everyone = torch.tensor(self.examples, dtype=torch.float64, device=self._device)
        self._world.all_reduce([everyone]).wait()
        gradients = self._reached([p.grad for p in self.params])
        for p in self.params:
            p.grad = None
        # FSDP2 has divided by the processes.
        return self._add(total, gradients, factor * self._world.size / float(everyone), dtype)

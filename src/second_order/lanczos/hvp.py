"""Products of a loss's curvature with vectors, without the matrix (Pearlmutter, 1994).

    retained     one forward, g = ∇L with its graph; H v = ∇(gᵀv) is then one backward
    recomputed   at every product, forward and backward for each micro-batch: one graph
                 at a time is in memory
    differences  H v ≈ (∇L(w + εv) − ∇L(w − εv)) / 2ε, for losses that cannot be
                 differentiated twice

`closure.py` multiplies by the Gauss-Newton matrix and the empirical Fisher as well.
Vectors are flat: the parameters in their order, each in the order of ``p.reshape(-1)``.

A :class:`RowSpace` distributes the rows of vectors over processes (DHO2, algorithm 2).
Rank p stores the rows D_p of every vector. To multiply, it gathers d, multiplies d by
the Hessian of its own batch, and receives the sum of all results for its rows, weighted
by examples. The result is therefore that of one process on the union of all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.fsdp import compute_dtypes, local_tensor
from second_order.distributed.world import World
from second_order.errors import CurvatureError
from second_order.lanczos.closure import (
    Closures,
    CurvatureKind,
    Derivatives,
    DifferentiableLoss,
    Evaluation,
    LossFn,
    check_closure,
    check_curvature,
    derivatives,
    evaluate_closure,
    explain_errors,
)
from second_order.utils.checks import check_choice

__all__ = [
    "Hessian",
    "ProductMode",
    "RowSpace",
    "ShardedHessian",
    "lanczos_dtype",
    "row_counts",
    "row_slice",
]

ProductMode: TypeAlias = Literal["auto", "retained", "recomputed", "differences"]

# With other values, DistributedDataParallel's reducer would wait for a backward pass.
_DDP_FLAGS = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}


@dataclass(frozen=True, eq=False)
class _SavedBuffer:
    """A module's buffer, and its value at the first evaluation."""

    module: nn.Module
    name: str
    buffer: Tensor
    value: Tensor

    def restore(self) -> None:
        """Put the buffer and its value back."""
        # .data hides the change from autograd's version counter: a graph that was made
        # before may have saved the buffer.
        self.buffer.data.copy_(self.value)
        setattr(self.module, self.name, self.buffer)


@contextmanager
def preserved_state(
    params: Sequence[Tensor], device: torch.device, model: nn.Module | None = None
) -> Iterator[Callable[[], None]]:
    """Evaluate and differentiate inside, and restore the state of model and torch.

    This covers torch's random state and settings, every buffer of every module that is
    called, ``.grad`` of the parameters, the state of DistributedDataParallel's reducer,
    and ``training`` of the model's modules. Inside, autocast is off, and attention runs
    without fused kernels, which have no second derivative.

    Args:
        params: The parameters whose ``.grad`` is restored.
        device: The one device of all parameters.
        model: The model whose modules' ``training`` is restored, if there is one.

    Yields:
        A function that restores the random state and buffers of the first evaluation.
    """
    cpu_random_state = torch.get_rng_state()
    cuda_random_state: Tensor | None = None
    if device.type == "cuda":
        cuda_random_state = torch.cuda.get_rng_state(device)
    seen_modules: set[nn.Module] = set()
    saved_buffers: list[_SavedBuffer] = []

    def rewind() -> None:
        torch.set_rng_state(cpu_random_state)
        if cuda_random_state is not None:
            torch.cuda.set_rng_state(cuda_random_state, device)
        for saved in saved_buffers:
            saved.restore()

    def save_modules(module: nn.Module, _: Any = None) -> None:
        """Save the state of a module and its submodules, before their first call."""
        if torch.compiler.is_compiling() or module in seen_modules:
            return
        for part in set(module.modules()) - seen_modules:
            seen_modules.add(part)
            for name, buffer in part.named_buffers(recurse=False):
                value = buffer.detach().clone()
                saved_buffers.append(_SavedBuffer(part, name, buffer, value))
            if isinstance(part, nn.RNNBase):  # cuDNN has no second derivative of RNNs
                torch.backends.cudnn.enabled = False
            if isinstance(part, DistributedDataParallel):
                for flag in _DDP_FLAGS.keys() & vars(part).keys():
                    stack.callback(setattr, part, flag, getattr(part, flag))
                    setattr(part, flag, _DDP_FLAGS[flag])

    with ExitStack() as stack:
        # Restore at exit, in reverse order.
        if model is not None:
            for module in model.modules():
                stack.callback(setattr, module, "training", module.training)
        for p in params:
            stack.callback(setattr, p, "grad", p.grad)
            p.grad = None
        stack.callback(rewind)
        cudnn = torch.backends.cudnn
        stack.callback(setattr, cudnn, "enabled", cudnn.enabled)

        # The settings inside.
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # Autocast's cache of weights would outlive the changes that differences make.
        no_autocast = torch.autocast(device.type, enabled=False, cache_enabled=False)
        stack.enter_context(no_autocast)
        if model is not None:  # compiled code may call it without hooks
            save_modules(model)
        stack.callback(register_module_forward_pre_hook(save_modules).remove)
        yield rewind


class Hessian:
    """The Hessian of a mean loss at the current parameters; multiply in its context.

        with Hessian(lambda: criterion(model(x), y), params) as H:
            h = H.product(v)

    Args:
        loss_fns: Returns the loss of a batch without calling ``backward``; or a
            sequence of such functions, one per micro-batch. Each returns a scalar, or a
            pair of the scalar and the number of examples that it is the mean of, by
            which micro-batches (and processes) are weighted. Instead of the loss it may
            return :class:`~second_order.lanczos.Outputs`.
        params: The parameters to differentiate with respect to, any of the model's.
        mode: "retained" stores the graph of each function, and multiplies through it.
            "recomputed" evaluates every function again at each product, with one graph
            at a time in memory. "differences" takes finite
            differences of gradients. It supports losses that cannot be differentiated
            twice, but only the Hessian. The last two reuse the random numbers of the
            first evaluation; the functions must use the same batch each time. "auto":
            "retained" for one function, "recomputed" for several.
        model: The module whose train/eval mode is restored.
        curvature: The matrix: "hessian"; "gauss-newton" for J'HJ, where J is the
            Jacobian of the outputs and H the Hessian of the loss with respect to them;
            "empirical-fisher" for the mean of ggᵀ over the examples' gradients. The
            last two need functions that return Outputs. They have no negative
            eigenvalues ("gauss-newton" if the loss is convex in the outputs).

    Attributes:
        size: n, the number of elements of the parameters.
        examples: The weight of this process's batch, once it has been evaluated.
        loss: The loss of this process's batch times its weight.
        constant: Whether no loss yet depends on the parameters; None before the first.

    Raises:
        CurvatureError: On entry or at a product, if the loss is not a scalar, its graph
            has been freed, or it cannot be differentiated twice. The message names the
            operation and the remedy.
        RuntimeError: At a product outside of the context.
    """

    def __init__(
        self,
        loss_fns: Closures,
        params: Sequence[Tensor],
        *,
        mode: ProductMode = "auto",
        model: nn.Module | None = None,
        curvature: CurvatureKind = "hessian",
    ) -> None:
        check_curvature(curvature, mode)
        check_choice("hvp", mode, get_args(ProductMode))
        if isinstance(loss_fns, Sequence):
            self._loss_fns = list(loss_fns)
        else:
            self._loss_fns = [loss_fns]
        self._mode = mode
        if mode == "auto":
            self._mode = "retained" if len(self._loss_fns) == 1 else "recomputed"
        self._model = model
        self._curvature = curvature

        self.params = list(params)
        self._device = self.params[0].device if self.params else torch.device("cpu")
        # The losses are evaluated under the autocast of the caller.
        self._autocast_enabled = torch.is_autocast_enabled(self._device.type)
        self._autocast_dtype = torch.get_autocast_dtype(self._device.type)
        self._local_shapes: list[torch.Size] = []
        self._local_sizes: list[int] = []
        self.size = 0
        for p in self.params:
            shape = local_tensor(p).shape
            self._local_shapes.append(shape)
            self._local_sizes.append(shape.numel())
            self.size += p.numel()

        self.examples = 0.0
        self.loss: Tensor | float = 0.0
        self.constant: bool | None = None
        self._retained: list[DifferentiableLoss] = []
        self._rewind: Callable[[], None] | None = None  # None outside of the context
        self._stack = ExitStack()

    def __enter__(self) -> Hessian:
        check_closure(self._loss_fns)  # here, so that all processes raise together
        with ExitStack() as stack:
            state = preserved_state(self.params, self._device, self._model)
            self._rewind = stack.enter_context(state)
            self.examples = 0.0
            self.loss = 0.0
            if self._mode == "retained":
                self._retained = [self._differentiate(f) for f in self._loss_fns]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._retained = []
        self._rewind = None
        self._stack.close()

    def product(self, v: Tensor) -> Tensor:
        """Return H v times :attr:`examples`, so that batches and processes add up.

        Args:
            v: ``(n,)`` in any floating dtype, which is also that of the result.
        """
        if self._rewind is None:
            raise RuntimeError(
                "Hessian.product was called outside of its context; write: with hessian: "
                "hessian.product(v)"
            )
        # Split the vector into a direction for each parameter.
        directions = []
        parts = v.split(self._local_sizes)
        for p, part, shape in zip(self.params, parts, self._local_shapes, strict=True):
            directions.append(part.view(shape).to(p.dtype))
        if self._mode == "differences":
            return self._difference_product(directions, v)

        # Multiply by the curvature of each loss, and sum up.
        retain = self._mode == "retained"
        losses: Iterable[DifferentiableLoss] = self._retained
        if not retain:
            losses = map(self._differentiate, self._rewound_loss_fns())
        total: Tensor | None = None
        for loss in losses:
            product = loss.product(directions, retain=retain)
            total = self._add(total, product, loss.examples, v.dtype)
        assert total is not None
        return total

    def _rewound_loss_fns(self) -> Iterator[LossFn]:
        """Yield each function after a rewind of the random state and the buffers."""
        assert self._rewind is not None
        self.examples = 0.0
        self.loss = 0.0
        for loss_fn in self._loss_fns:
            self._rewind()
            yield loss_fn

    def _add(
        self,
        total: Tensor | None,
        parts: Derivatives,
        factor: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return total + factor · parts, as one flat vector.

        ``total`` is changed in place.
        """
        flat_parts = []
        for p, part in zip(self.params, parts, strict=True):
            # A parameter outside of the graph has a zero derivative.
            tensor = torch.zeros_like(p) if part is None else part
            flat_parts.append(local_tensor(tensor).detach().reshape(-1))
        flat = torch.cat(flat_parts).to(dtype)
        if factor != 1.0:
            flat.mul_(factor)
        return flat if total is None else total.add_(flat)

    def _difference_product(self, directions: Sequence[Tensor], v: Tensor) -> Tensor:
        """Return H v from the gradients at w ± εv, and restore the parameters."""
        epsilon = self._step_size(directions)
        if epsilon == 0.0:
            return torch.zeros_like(v)
        # Move the parameters forth and back, and restore them in any case.
        params = [local_tensor(p).data for p in self.params]
        params_before = [p.clone() for p in params]
        moves = list(zip(params, params_before, directions, strict=True))
        total: Tensor | None = None
        try:
            for sign in (1.0, -1.0):
                for p, before, direction in moves:
                    p.copy_(before).add_(direction, alpha=sign * epsilon)
                total = self._add_gradients(total, sign / (2 * epsilon), v.dtype)
        finally:
            torch._foreach_copy_(params, params_before)
        assert total is not None
        return total

    def _add_gradients(
        self, total: Tensor | None, factor: float, dtype: torch.dtype
    ) -> Tensor:
        """Return total + factor · Σ examples · gradient, summed over functions."""
        for loss_fn in self._rewound_loss_fns():
            evaluation = self._evaluate(loss_fn)
            gradients = derivatives([evaluation.loss], self.params, twice=False)
            self._update_constant(gradients)
            total = self._add(total, gradients, factor * evaluation.examples, dtype)
        assert total is not None
        return total

    def _step_size(self, directions: Sequence[Tensor]) -> float:
        """Return ε for a direction, and 0 if the direction is zero."""
        direction_norm = math.sqrt(self._squared_norm(directions))
        params = [local_tensor(p).detach() for p in self.params]
        params_norm = math.sqrt(self._squared_norm(params))
        if direction_norm == 0.0:
            return 0.0
        # For central differences the cube root of eps balances rounding against the
        # change of the curvature. An element of the direction is about its norm / √n.
        eps = max(torch.finfo(dtype).eps for dtype in self._dtypes())
        scale = 1.0 + params_norm / math.sqrt(self.size)
        epsilon: float = 0.25 * eps ** (1 / 3) * scale / direction_norm
        return epsilon

    def _dtypes(self) -> set[torch.dtype]:
        """Return the dtypes in which gradients are computed, also by autocast."""
        dtypes = {p.dtype for p in self.params}
        if self._autocast_enabled:
            dtypes.add(self._autocast_dtype)
        return dtypes

    def _squared_norm(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of a vector, given its part for each parameter."""
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return torch.stack(norms).square().sum()

    def evaluate(self) -> None:
        """Evaluate :attr:`loss` and :attr:`examples`, without derivatives."""
        for loss_fn in self._rewound_loss_fns():
            self._evaluate(loss_fn)

    def _evaluate(self, loss_fn: LossFn) -> Evaluation:
        """Evaluate a loss under the constructor's autocast, and add it up."""
        with torch.autocast(
            self._device.type,
            dtype=self._autocast_dtype,
            enabled=self._autocast_enabled,
        ):
            evaluation = evaluate_closure(loss_fn(), self._curvature)
        examples = evaluation.examples
        self.examples += examples
        self.loss += examples * evaluation.loss.detach().double()
        return evaluation

    def _differentiate(self, loss_fn: LossFn) -> DifferentiableLoss:
        """Evaluate a loss, and differentiate it once."""
        loss = DifferentiableLoss(self._evaluate(loss_fn), self.params)
        self._update_constant(loss.gradients)
        return loss

    def _update_constant(self, gradients: Derivatives) -> None:
        """Update :attr:`constant` with the gradients of a loss."""
        has_no_gradient = all(g is None for g in gradients)
        self.constant = self.constant is not False and has_no_gradient


class ShardedHessian(Hessian):
    """The Hessian of all processes' mean loss for FSDP2's shards, by differences.

    FSDP2 supports first derivatives only, by ``backward``. It averages them over
    processes, and leaves this process's rows. Products therefore are those of this
    process's rows with the mean Hessian of all examples, and need no further
    communication. Every process must evaluate the same number of functions.
    """

    def __init__(
        self,
        loss_fns: Closures,
        params: Sequence[Tensor],
        world: World,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__(loss_fns, params, mode="differences", model=model)
        self._world = world

    def _dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of gradient computations, also by mixed precision."""
        dtypes = super()._dtypes()
        if self._model is not None:
            dtypes |= compute_dtypes(self._model)
        return dtypes

    def _squared_norm(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of a sharded vector. Collective."""
        squared_norm = super()._squared_norm(parts)
        self._world.all_reduce([squared_norm]).wait()
        return squared_norm

    def _add_gradients(
        self, total: Tensor | None, factor: float, dtype: torch.dtype
    ) -> Tensor:
        """Return total + factor · the mean gradient of all examples. Collective."""
        # FSDP2 averages the gradients of all processes in backward().
        for loss_fn in self._rewound_loss_fns():
            evaluation = self._evaluate(loss_fn)
            with explain_errors():
                (evaluation.loss * evaluation.examples).backward()
        all_examples = torch.tensor(
            self.examples, dtype=torch.float64, device=self._device
        )
        self._world.all_reduce([all_examples]).wait()
        gradients = [p.grad for p in self.params]
        self._update_constant(gradients)
        for p in self.params:
            p.grad = None
        # Divide the sum of gradients by all examples, not by the number of processes.
        factor = factor * self._world.size / float(all_examples)
        return self._add(total, gradients, factor, dtype)


# ------------------------------------------------------------ vectors on many processes


def row_slice(size: int, processes: int, rank: int) -> slice:
    """Return the slice of the rows that a process has.

    Counts differ by at most one row.
    """
    return slice(size * rank // processes, size * (rank + 1) // processes)


def row_counts(size: int, processes: int) -> list[int]:
    """Return the number of rows of each process."""
    counts = []
    for rank in range(processes):
        rows = row_slice(size, processes, rank)
        counts.append(rows.stop - rows.start)
    return counts


def lanczos_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """Return float64 for Lanczos vectors if a parameter has it, else float32."""
    for p in params:
        if p.dtype == torch.float64:
            return torch.float64
    return torch.float32


class RowSpace:
    """This process's rows of vectors in R^n, and the Hessian of all processes' batches.

    Use it as a context manager, in which autocast is off except in the loss. If one
    process fails on entry, every process raises an error there. Only "retained" products
    evaluate the loss on entry. If a product fails later on one process, all processes
    get NaN, so that no process waits for it in a collective.

    Args:
        hessian: The Hessian of this process's batch.
        world: The processes.
        dtype: The dtype of vectors.
        sign: −1.0 for the Hessian of the negative loss.
        local_rows: With a :class:`ShardedHessian`, a function that returns this
            process's elements of a complete vector. FSDP2 decides which these are.

    Attributes:
        size: n.
        dtype: The dtype of vectors.
        device: The device of vectors.
        rows: The slice of the n rows that this process has, unless FSDP2 decides.
        error: The error of a product that failed on this process.
    """

    def __init__(
        self,
        hessian: Hessian,
        world: World,
        dtype: torch.dtype,
        sign: float = 1.0,
        local_rows: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.size = hessian.size
        self.dtype = dtype
        self.device = hessian.params[0].device
        self.rows = row_slice(hessian.size, world.size, world.rank)
        self.error: Exception | None = None

        self._hessian = hessian
        self._world = world
        self._sign = sign
        self._local_rows = local_rows
        self._row_counts = row_counts(hessian.size, world.size)
        self._loss_sums: Sequence[float] = ()  # of losses and examples, if already read

    def __enter__(self) -> RowSpace:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._hessian)
            except Exception as error:  # raised next, on all processes together
                self.error = error
            self.raise_together()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._hessian.__exit__()

    def random(self, seed: int, scale: float) -> Tensor:
        """Return this process's rows of scale times a seeded standard normal vector.

        The vector depends neither on the device nor on the number of processes.
        """
        generator = torch.Generator().manual_seed(int(seed))  # may be a NumPy integer
        vector = torch.randn(
            self.size, generator=generator, dtype=torch.float32, device="cpu"
        )
        vector.mul_(scale)
        rows = vector[self.rows]
        if self._local_rows is not None:
            rows = self._local_rows(vector)
        return rows.to(self.device, self.dtype)

    def gather(self, rows: Tensor) -> Tensor:
        """Gather a complete vector from all processes' rows. Collective."""
        if self._world.size == 1:
            return rows
        copies = [rows] * self._world.size
        return torch.cat(self._world.all_to_all(copies, self._row_counts))

    def apply(self, d: Tensor) -> Tensor:
        """Return the local rows of H d, where H is that of all batches. Collective.

        If FSDP2 has sharded the parameters, errors are raised immediately, because the
        other processes then wait in the collectives of FSDP2.
        """
        if self._local_rows is not None:
            return self._hessian.product(d).mul_(self._sign)

        # Multiply by the Hessian of the local batch. After an error, send NaN instead.
        d = self.gather(d)
        h = None
        if self.error is None:
            try:
                h = self._hessian.product(d)
            except Exception as error:  # the other processes wait for the sum below
                self.error = error
        if h is None:
            h = torch.full_like(d, torch.nan)

        weight = self._sign * self._hessian.examples
        if self._world.size == 1:
            return h if weight == 1.0 else h.div_(weight)

        # Send each process its rows and the weight, and sum up what arrives.
        weight_element = h.new_full((1,), weight)
        blocks = h.split(self._row_counts)
        messages = [torch.cat([rows, weight_element]) for rows in blocks]
        message_size = len(messages[self._world.rank])
        received = self._world.all_to_all(messages, [message_size] * self._world.size)
        total = torch.stack(received).sum(0)
        return total[:-1] / total[-1]

    def read(self, numbers: Sequence[Tensor]) -> list[float]:
        """Return the values of flat tensors in float64.

        On a device this synchronizes once. The loss is read in the same copy, because a
        refresh needs it next.
        """
        tensors = list(numbers)
        on_device = self.device.type != "cpu"
        if on_device:
            tensors.append(self._sum_losses())
        # Copy all numbers to the host together.
        values: list[float] = torch.cat(tensors).tolist()
        if on_device:
            self._loss_sums = values[-2:]
            values = values[:-2]
        return values

    def _sum_losses(self) -> Tensor:
        """Sum the losses and examples of the last product, ``(2,)``. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums[0] += self._hessian.loss
        sums[1] += self._hessian.examples
        return self.total(sums)

    def loss(self) -> float:
        """Return the mean loss of all processes' batches at the last product."""
        loss, examples = self._loss_sums or self._sum_losses().tolist()
        return self._sign * float(loss) / float(examples)

    def total(self, x: Tensor) -> Tensor:
        """Sum a small tensor over several processes, in float64. Collective."""
        if self._world.size > 1:
            x = x.double()
            self._world.all_reduce([x]).wait()
        return x

    def broadcast_from_first(self, x: Tensor) -> Tensor:
        """Return the first process's small tensor, on the CPU. Collective."""
        if self._world.size > 1:
            x = x.to(self.device)
            self._world.broadcast_from_first([x])
        return x.cpu()

    def raise_together(self) -> None:
        """Raise on every process if a product has failed on one of them. Collective.

        Raises:
            CurvatureError: On a process whose product did not fail, naming the one that
                failed; and on all, if no process's loss depends on the parameters.
            Exception: The error of the product, on the process where it failed.
        """
        # Each process reports its error, and whether its loss depends on parameters.
        device = "cpu" if self._world.size == 1 else self.device
        flags = torch.zeros(self._world.size + 1, dtype=torch.float32, device=device)
        flags[self._world.rank] = float(self.error is not None)
        flags[-1] = float(self._hessian.constant is not True)
        self._world.all_reduce([flags]).wait()
        *failed, depends = flags.tolist()
        if self.error is not None:
            raise self.error
        if any(failed):
            raise CurvatureError(
                f"the curvature closure failed on rank {failed.index(1.0)}; see its log for the "
                f"error"
            )
        if not depends:
            raise CurvatureError(
                "the loss of the curvature closure does not depend on any of the parameters; "
                "evaluate the model that has these parameters"
            )

"""Watching a model for a while, and leaving it as it was.

Inputs are seen by hooks on layers, in forward passes without a graph. Pairs of inputs and gradients
come from :class:`~second_order.kronecker.capture.Capture`, in passes of which no parameter is a
part: all are frozen, and the graph begins at the first layers that are watched, whose outputs are
made to depend on an anchor. So no gradient of a weight is computed, and no ``.grad`` is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderError
from second_order.kronecker.autograd import (
    NO_PASS,
    current_pass,
    input_of,
    is_attention,
    projections,
)
from second_order.kronecker.capture import Capture
from second_order.kronecker.experts import Routed, is_experts
from second_order.kronecker.hooks import input_in
from second_order.sharded import FSDPParams, reshard

__all__ = [
    "Stop",
    "Stopping",
    "asking",
    "compared",
    "trainable",
    "undisturbed",
    "unwrapped",
    "watching_inputs",
    "watching_pairs",
]


ROWS = 8  # that are compared

REENTRANT = (
    "measure: the model runs layers in checkpoint(..., use_reentrant=True), which can only be "
    "differentiated with gradients of all weights; use checkpoint(..., use_reentrant=False), or no "
    "checkpoint"
)


class Stop(BaseException):
    """Ends a forward pass after the last layer that is asked for."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module, of a compiled or a DistributedDataParallel one."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextmanager
def trainable(model: nn.Module, which: bool = True) -> Iterator[None]:
    """A block in which all parameters of floating point ask for gradients, or none does."""
    before = [(p, p.requires_grad) for p in model.parameters() if p.is_floating_point()]
    try:
        for p, _ in before:
            p.requires_grad_(which)
        yield
    finally:
        for p, asked in before:
            p.requires_grad_(asked)


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A block in which a model is in evaluation mode, and after which it is as it was.

    So are modes, buffers, ``requires_grad``, ``.grad`` and the state of random numbers.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    gradients = [(p, p.grad) for p in model.parameters()]
    attention = torch.backends.mha.get_fastpath_enabled()
    here = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))  # an outer one's have no graph
            stack.enter_context(torch.random.fork_rng(here, device_type=kind))
            stack.enter_context(trainable(model, False))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            torch.backends.mha.set_fastpath_enabled(False)  # it calls no modules
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(attention)
        reshard(model)
        for module, training in modes:
            module.training = training
        for module, name, buffer, value in buffers:
            setattr(module, name, buffer)
            with torch.no_grad():
                buffer.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient


# ------------------------------------------------------------------------------------------ inputs

Take = Callable[[nn.Module, Any, Any], None]


class Stopping:
    """Ends forward passes once all modules that are asked for have been called.

    The first batch runs whole. If it has called each of them once, later passes end after the last;
    one that has not called all of them by then goes on. Else none is ended: what is called more
    than once, or by some batches alone, may be called again.
    """

    def __init__(self, modules: Iterable[nn.Module], take: Take) -> None:
        self._modules, self._take = set(modules), take
        self._calls: Counter[nn.Module] = Counter()
        self._batches, self._once = 0, False

    def begin(self) -> None:
        """Begin a batch."""
        if self._batches == 1:
            self._once = all(self._calls[module] == 1 for module in self._modules)
        self._batches += 1
        self._calls.clear()

    def take(self, module: nn.Module, x: Any, output: Any) -> None:
        """Take in a call; raise :class:`Stop` if it is the last."""
        self._take(module, x, output)
        self._calls[module] += 1
        if self._once and len(self._calls) == len(self._modules):
            raise Stop


@contextmanager
def watching_inputs(
    model: nn.Module,
    before: Iterable[nn.Module],
    after: Iterable[nn.Module],
    take: Take,
    stopping: Stopping | None = None,
) -> Iterator[Callable[[], None]]:
    """A block in which ``take(module, input, output)`` hears of calls of modules.

    ``before``: those that it hears of before they are called, without an output; ``after``:
    thereafter. Of an ``nn.MultiheadAttention`` the input is those of queries, keys and values, of
    fused experts the whole call. What it gives is to be called before each batch.
    """
    take = take if stopping is None else stopping.take
    # What is inside of an attention is never called.
    within = {cast(nn.Module, m.out_proj): m for m in model.modules() if is_attention(m)}
    attentions: dict[nn.Module, set[nn.Module]] = {}

    def early(module: nn.Module, args: Any, kwargs: Any) -> None:
        routed = Routed.of_call(args, kwargs) if is_experts(module) else None
        take(module, input_in(args, kwargs) if routed is None else routed, None)

    def late(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        take(module, input_in(args, kwargs), output)

    def begin(module: nn.Module, args: Any) -> None:
        torch.set_grad_enabled(True)  # autograd alone sees the input of the output's projection

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        torch.set_grad_enabled(False)
        inputs, products = projections(module, args, kwargs, output[0], None)
        wanted = attentions[module]
        if module in wanted:
            take(module, inputs, output)
        for owner, node, _ in products:
            if owner is not module and owner in wanted:
                x = input_of(node).unflatten(0, (-1, len(inputs[0]))).transpose(0, 1)
                take(owner, x, None)
        return tuple(t.detach() if isinstance(t, Tensor) else t for t in output)

    with ExitStack() as stack:
        for modules, hook in ((before, early), (after, late)):
            for module in modules:
                attention = within.get(module, module if is_attention(module) else None)
                if attention is not None:
                    attentions.setdefault(attention, set()).add(module)
                elif hook is early:
                    handle = module.register_forward_pre_hook(early, with_kwargs=True)
                    stack.callback(handle.remove)
                else:
                    handle = module.register_forward_hook(late, with_kwargs=True)
                    stack.callback(handle.remove)
        for attention in attentions:
            _ask_of_weights(attention)
            stack.callback(attention.register_forward_pre_hook(begin).remove)
            stack.callback(attention.register_forward_hook(end, with_kwargs=True).remove)
        yield (lambda: None) if stopping is None else stopping.begin


def _ask_of_weights(attention: nn.Module) -> None:
    """Let an attention's weights ask for gradients: its products are known by them."""
    for module in (attention, cast(nn.Module, attention.out_proj)):
        for name, p in module._parameters.items():
            if p is not None and name.endswith("weight"):
                p.requires_grad_(True)


# ------------------------------------------------------------------------------------------- pairs


class _Rooted(torch.autograd.Function):
    """A tensor that depends on an anchor, by which a graph begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


@contextmanager
def asking(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """A block in which weights get gradients, which hooks may see, and which are not kept.

    Weights that have hooks of the user's get none, as such a hook may take a step.
    """
    wanted = [
        weight
        for weight in dict.fromkeys(weights)
        if weight.is_floating_point()
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
    ]
    before = [(weight, weight.requires_grad, weight.grad) for weight in wanted]
    handles = []
    try:
        for weight in wanted:
            weight.requires_grad_(True)
            weight.grad = None
            handles.append(weight.register_post_accumulate_grad_hook(_forget))
        yield wanted
    finally:
        for handle in handles:
            handle.remove()
        for weight, asked, gradient in before:
            weight.requires_grad_(asked)
            weight.grad = gradient


def _forget(weight: Tensor) -> None:
    weight.grad = None


@contextmanager
def watching_pairs(
    model: nn.Module, modules: Sequence[nn.Module], consumer: Any
) -> Iterator[Callable[[Tensor, Sequence[Tensor]], None]]:
    """A block in which a consumer gets the pairs of modules; what it gives runs a backward pass.

    The backward pass also goes to the weights that it is called with. The consumer's ``missed``
    has, by module, why a pair was lost; its ``see_call`` is called at each call of a module.
    """
    anchor = torch.zeros((), requires_grad=True, device="cpu")
    capture = Capture(consumer, fsdp=FSDPParams(model), accumulated=False)
    consumer.missed = capture.missed

    def root(x: Any) -> Any:
        asks = isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad
        return _Rooted.apply(x, anchor) if asks else x  # type: ignore[no-untyped-call]

    def rooted(module: nn.Module, args: Any, output: Any) -> Any:
        see_call(module)
        return root(output) if torch.is_grad_enabled() else None

    def rooted_inputs(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        see_call(module)
        see_call(cast(nn.Module, module.out_proj))
        found = {id(x): root(x) for x in (*args, *kwargs.values())}  # one stays one
        return tuple(found[id(x)] for x in args), {k: found[id(x)] for k, x in kwargs.items()}

    def see_call(module: nn.Module) -> None:
        if current_pass() == NO_PASS:  # a checkpoint repeats calls in a backward pass
            consumer.see_call(module)

    def see_positions_first(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        first = args[0] if args else kwargs.get("query", kwargs.get("input"))
        if isinstance(first, Tensor) and first.dim() == 3:
            consumer.see_positions_first(first.shape[0], first.shape[1])

    def backward(loss: Tensor, weights: Sequence[Tensor]) -> None:
        if not loss.requires_grad:
            return
        try:
            torch.autograd.backward(loss, inputs=[anchor, *weights])
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise SecondOrderError(REENTRANT) from error

    attentions = {cast(nn.Module, m.out_proj): m for m in model.modules() if is_attention(m)}
    with ExitStack() as stack:
        stack.callback(capture.detach)
        capture.attach(model, modules)
        capture.missed.clear()  # of layers that may not be seen: their rows will tell
        for module in dict.fromkeys(attentions.get(module, module) for module in modules):
            if is_attention(module):
                _ask_of_weights(module)
                hook = module.register_forward_pre_hook(rooted_inputs, with_kwargs=True)
            else:
                hook = module.register_forward_hook(rooted, prepend=True)
            stack.callback(hook.remove)
        for module in filter(_reads_positions_first, model.modules()):
            hook = module.register_forward_pre_hook(see_positions_first, with_kwargs=True)
            stack.callback(hook.remove)
        with torch.enable_grad():
            yield backward


def _reads_positions_first(module: nn.Module) -> bool:
    """Whether a module takes ``(positions, entries, ...)``."""
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and not module.batch_first


# ------------------------------------------------------------------------- what is taken for one


@contextmanager
def compared(guessed: Mapping[nn.Module, bool]) -> Iterator[dict[nn.Module, Tensor]]:
    """A block in which modules that are taken for Linears are compared with one, at a first call.

    ``guessed``: whether they are transposed. It gives, by module, ‖y - (W x + b)‖ / ‖y‖ of some
    rows.
    """
    found: dict[nn.Module, Tensor] = {}
    handles: dict[nn.Module, Any] = {}

    def compare(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        handles.pop(module).remove()
        x, weight = input_in(args, kwargs), cast(Tensor, module.weight)
        output = output[0] if isinstance(output, tuple) else output  # a router's logits
        with torch.no_grad():
            x, y = x.reshape(-1, x.shape[-1])[:ROWS], output.reshape(-1, output.shape[-1])[:ROWS]
            weight = weight.T if guessed[module] else weight
            bias = getattr(module, "bias", None)
            expected = nn.functional.linear(x.to(weight.dtype), weight, bias)
            size = y.float().norm().clamp_min(torch.finfo(torch.float32).tiny)
            found[module] = (y.float() - expected.float()).norm() / size

    try:
        for module in guessed:
            handles[module] = module.register_forward_hook(compare, with_kwargs=True)
        yield found
    finally:
        for handle in handles.values():
            handle.remove()

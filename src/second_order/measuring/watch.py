"""Watching a model for a while, and leaving it as it was.

Inputs are seen by hooks on layers, in forward passes without a graph. Pairs of inputs and gradients
come from :class:`~second_order.kronecker.capture.Capture`, in passes of which no parameter is a
part: all are frozen, and the graph begins at the first layers that are watched, whose outputs are
made to depend on an anchor. So no gradient of a weight is computed, and no ``.grad`` is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.autograd import input_of, is_attention, projections
from second_order.kronecker.capture import Capture
from second_order.kronecker.experts import Routed, is_experts
from second_order.kronecker.hooks import input_in
from second_order.sharded import FSDPParams, reshard

__all__ = [
    "Stop",
    "Stopping",
    "trainable",
    "undisturbed",
    "unwrapped",
    "watching_inputs",
    "watching_pairs",
]


class Stop(Exception):  # noqa: N818 - no error
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
    """Ends forward passes once all layers that are asked for have been called.

    The first batch tells which is called last. A pass ends after the whole block that this layer is
    in, an element of the outermost list of modules, as other layers of the block may be called or
    not, as experts are; the second batch tells how often the block is called.
    """

    def __init__(self, model: nn.Module, take: Take) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._model, self._take = model, take
        self._last: nn.Module | None = None
        self._block: nn.Module | None = None
        self._hook: Any = None
        self._batches = -1
        self._calls = self._expected = 0

    def begin(self) -> None:
        """Begin a batch."""
        self._batches += 1
        if self._batches == 1 and self._last is not None:
            self._block = self._block_of(self._last)
            if self._block is not self._last:
                self._hook = self._block.register_forward_hook(self._called)
        elif self._batches == 2 and self._hook is not None:
            self._expected = self._calls
        self._calls = 0

    def take(self, module: nn.Module, x: Any, output: Any) -> None:
        """Take in a call; raise :class:`Stop` if it is the last."""
        self._take(module, x, output)
        if self._batches == 0:
            if module is not self._last:
                self._last, self._expected = module, 0
            self._expected += 1
        elif module is self._block:
            self._called(module, None, None)

    def _called(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls += 1
        known = self._hook is None or self._batches > 1
        if known and self._calls == self._expected:
            raise Stop

    def _block_of(self, layer: nn.Module) -> nn.Module:
        module, path = self._model, self._names[layer].split(".")
        for part in path:
            inside = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
            module = module.get_submodule(part)
            if inside:
                return module
        return layer

    def close(self) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()


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
        if stopping is not None:
            stack.callback(stopping.close)
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
def watching_pairs(
    model: nn.Module, modules: Sequence[nn.Module], consumer: Any
) -> Iterator[Callable[[Tensor], None]]:
    """A block in which a consumer gets the pairs of modules; what it gives runs a backward pass."""
    anchor = torch.zeros((), requires_grad=True)
    capture = Capture(consumer, fsdp=FSDPParams(model), accumulated=False)

    def root(x: Any) -> Any:
        asks = isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad
        return _Rooted.apply(x, anchor) if asks else x  # type: ignore[no-untyped-call]

    def rooted(module: nn.Module, args: Any, output: Any) -> Any:
        return root(output) if torch.is_grad_enabled() else None

    def rooted_inputs(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        found = {id(x): root(x) for x in (*args, *kwargs.values())}  # one stays one
        return tuple(found[id(x)] for x in args), {k: found[id(x)] for k, x in kwargs.items()}

    def backward(loss: Tensor) -> None:
        if loss.requires_grad:
            torch.autograd.backward(loss, inputs=[anchor])

    attentions = {cast(nn.Module, m.out_proj): m for m in model.modules() if is_attention(m)}
    with ExitStack() as stack:
        stack.callback(capture.detach)
        capture.attach(model, modules)
        for module in dict.fromkeys(attentions.get(module, module) for module in modules):
            if is_attention(module):
                _ask_of_weights(module)
                hook = module.register_forward_pre_hook(rooted_inputs, with_kwargs=True)
            else:
                hook = module.register_forward_hook(rooted, prepend=True)
            stack.callback(hook.remove)
        with torch.enable_grad():
            yield backward

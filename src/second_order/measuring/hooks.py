"""Hooks that see the calls of layers, on a model that is left as it was.

Inputs are seen by forward pre-hooks, in passes without a graph. Pairs of inputs and output
gradients come from :class:`~second_order.kronecker.capture.Capture`. No parameter requires a
gradient meanwhile: the graph begins at the first layers, whose outputs are made to depend on an
anchor. So no gradient of a weight is computed, and no ``.grad`` is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import FSDPParams, reshard
from second_order.errors import SecondOrderError
from second_order.kronecker.autograd import NO_PASS, current_pass, is_attention
from second_order.kronecker.capture import Capture, input_in
from second_order.kronecker.experts import Routed, is_experts

__all__ = [
    "capturing_inputs",
    "capturing_pairs",
    "requires_grad",
    "undisturbed",
    "unwrapped",
]

REENTRANT = (
    "measure: the model runs layers in checkpoint(..., use_reentrant=True), which can only be "
    "differentiated with gradients of all weights; use checkpoint(..., use_reentrant=False), or no "
    "checkpoint"
)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside a compiled or a DistributedDataParallel one."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextmanager
def requires_grad(model: nn.Module, value: bool) -> Iterator[None]:
    """Set ``requires_grad`` of all floating-point parameters for a block."""
    before = [(p, p.requires_grad) for p in model.parameters() if p.is_floating_point()]
    try:
        for p, _ in before:
            p.requires_grad_(value)
        yield
    finally:
        for p, original in before:
            p.requires_grad_(original)


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put a model in evaluation mode for a block, and leave it as it was.

    Restores modes, buffers, ``requires_grad`` and the states of random number generators.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))  # inference tensors have no graph
            stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            stack.enter_context(requires_grad(model, False))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            torch.backends.mha.set_fastpath_enabled(False)  # it does not call modules
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        reshard(model)
        for module, training in modes:
            module.training = training
        for module, name, buffer, value in buffers:
            setattr(module, name, buffer)
            with torch.no_grad():
                buffer.copy_(value)


# ------------------------------------------------------------------------------------------ inputs


@contextmanager
def capturing_inputs(
    modules: Iterable[nn.Module], take: Callable[[nn.Module, Any], None]
) -> Iterator[None]:
    """Call ``take(module, input)`` before each call of modules.

    The input of fused experts is a :class:`~second_order.kronecker.experts.Routed`.
    """

    def take_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        routed = Routed.of_call(args, kwargs) if is_experts(module) else None
        take(module, input_in(args, kwargs) if routed is None else routed)

    with ExitStack() as stack, torch.no_grad():
        for module in modules:
            handle = module.register_forward_pre_hook(take_input, with_kwargs=True)
            stack.callback(handle.remove)
        yield


# ------------------------------------------------------------------------------------------- pairs


class _Rooted(torch.autograd.Function):
    """A tensor that depends on an anchor, at which the graph begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


@contextmanager
def capturing_pairs(
    model: nn.Module, is_sharded: bool, modules: Sequence[nn.Module], consumer: Any
) -> Iterator[tuple[Callable[[Tensor], None], Mapping[nn.Module, str]]]:
    """Give a consumer the pairs of modules in a block.

    Yields the function that runs a backward pass, and a mapping that says, by module, why pairs
    were lost. ``consumer.count_call`` is called at each call of a module.
    """
    anchor = torch.zeros((), requires_grad=True, device="cpu")
    capture = Capture(consumer, fsdp=FSDPParams(model) if is_sharded else None, accumulated=False)

    def rooted(x: Any) -> Any:
        needs_root = isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad
        return _Rooted.apply(x, anchor) if needs_root else x  # type: ignore[no-untyped-call]

    def count(module: nn.Module) -> None:
        if current_pass() == NO_PASS:  # a checkpoint repeats calls in a backward pass
            consumer.count_call(module)

    def root_output(module: nn.Module, args: Any, output: Any) -> Any:
        count(module)
        return rooted(output) if torch.is_grad_enabled() else None

    def root_inputs(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        count(module)
        count(cast(nn.Module, module.out_proj))
        # A tensor that is given twice stays one tensor.
        roots = {id(x): rooted(x) for x in (*args, *kwargs.values())}
        return tuple(roots[id(x)] for x in args), {k: roots[id(x)] for k, x in kwargs.items()}

    def backward(loss: Tensor) -> None:
        if not loss.requires_grad:
            return
        try:
            torch.autograd.backward(loss, inputs=[anchor])
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise SecondOrderError(REENTRANT) from error

    attentions = {cast(nn.Module, m.out_proj): m for m in model.modules() if is_attention(m)}
    with ExitStack() as stack:
        stack.callback(capture.detach)
        capture.attach(model, modules)
        capture.missed.clear()  # layers that cannot be seen have no rows in the end
        for module in dict.fromkeys(attentions.get(module, module) for module in modules):
            if is_attention(module):
                # Capture recognizes an attention's products by weights that require a gradient.
                for part in (module, cast(nn.Module, module.out_proj)):
                    for name, p in part.named_parameters(recurse=False):
                        p.requires_grad_(name.endswith("weight"))
                handle = module.register_forward_pre_hook(root_inputs, with_kwargs=True)
            else:
                handle = module.register_forward_hook(root_output, prepend=True)
            stack.callback(handle.remove)
        with torch.enable_grad():
            yield backward, capture.missed

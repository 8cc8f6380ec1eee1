"""Hooks on the layers of a model that is left as it was.

Inputs are captured by forward pre-hooks, in passes without autograd. Pairs of inputs
and output gradients are captured by :class:`~second_order.kronecker.capture.Capture`.

While pairs are captured, no parameter requires a gradient. Autograd's graph begins at
the outputs of the first layers instead, which hooks make depend on an *anchor*, a
scalar that requires a gradient. If a model's inputs require a gradient, it begins at
them. The backward pass ends there. It computes no weight gradient and touches no
``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import FSDPParams, reshard
from second_order.errors import SecondOrderError
from second_order.kronecker.autograd import (
    NO_PASS,
    attention_by_out_proj,
    current_pass,
    is_attention,
)
from second_order.kronecker.capture import Capture, input_in
from second_order.kronecker.experts import Routed, is_experts

__all__ = [
    "PairCapture",
    "PairConsumer",
    "capture_inputs",
    "capture_pairs",
    "evaluation_mode",
    "set_requires_grad",
]

REENTRANT = (
    "measure: the model runs layers in checkpoint(..., use_reentrant=True), which computes "
    "gradients of all weights in its backward pass; use checkpoint(..., use_reentrant=False), or "
    "no checkpoint"
)


@contextmanager
def set_requires_grad(model: nn.Module, value: bool) -> Iterator[None]:
    """Set ``requires_grad`` of all floating-point parameters within the block."""
    params = [p for p in model.parameters() if p.is_floating_point()]
    previous = [(p, p.requires_grad) for p in params]
    try:
        for p, _ in previous:
            p.requires_grad_(value)
        yield
    finally:
        for p, requires_grad in previous:
            p.requires_grad_(requires_grad)


@contextmanager
def evaluation_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a model in evaluation mode, eagerly and without weight gradients.

    Afterwards, modes, buffers, ``requires_grad`` and the states of the random number
    generators are restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = []
    for module, _ in modes:
        for name, buffer in module.named_buffers(recurse=False):
            buffers.append((module, name, buffer, buffer.clone()))
    fastpath_enabled = torch.backends.mha.get_fastpath_enabled()
    fork_rng = torch.random.fork_rng([])
    if device.type != "cpu":
        fork_rng = torch.random.fork_rng([device], device_type=device.type)
    try:
        with ExitStack() as stack:
            # Tensors of inference mode record no graph.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(fork_rng)
            stack.enter_context(set_requires_grad(model, False))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # The fast path does not call modules.
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath_enabled)
        reshard(model)
        for module, training in modes:
            module.training = training
        for module, name, buffer, value in buffers:
            # A forward pass may write into a buffer, or replace it by another tensor.
            # Through .data, because a graph from before may have saved the buffer.
            setattr(module, name, buffer)
            buffer.data.copy_(value)


# ------------------------------------------------------------------------------- inputs


@contextmanager
def capture_inputs(
    modules: Iterable[nn.Module], receive: Callable[[nn.Module, Any], None]
) -> Iterator[None]:
    """Call ``receive(module, input)`` before each call of the modules within the block.

    The input of fused experts is a :class:`~second_order.kronecker.experts.Routed`.
    """

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = None
        if is_experts(module):
            x = Routed.from_call(args, kwargs)
        if x is None:
            x = input_in(args, kwargs)
        receive(module, x)

    with ExitStack() as stack, torch.no_grad():
        for module in modules:
            handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
            stack.callback(handle.remove)
        yield


# -------------------------------------------------------------------------------- pairs


class PairConsumer(Protocol):
    """What ``capture_pairs`` needs of the object that receives the pairs."""

    def wants(self, module: nn.Module) -> bool:
        """Whether to capture pairs of a module in this forward pass."""

    def consume(
        self, module: nn.Module, x: Any, d: Tensor, pass_id: int, again: bool
    ) -> None:
        """Receive a pair."""

    def count_call(self, module: nn.Module) -> None:
        """Count a call of a module in a forward pass."""


class PairCapture(NamedTuple):
    """A capture of pairs.

    Attributes:
        backward: Runs the backward pass of a loss.
        missed: By module, why it has no pairs. Complete only at the end of the block.
    """

    backward: Callable[[Tensor], None]
    missed: Mapping[nn.Module, str]


class _DependOnAnchor(torch.autograd.Function):
    """The identity, with an output that depends on an anchor. The graph begins here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()  # autograd does not allow to modify a view in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def _find_leaves(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Return the leaves of a loss's graph that are not parameters of the model."""
    if loss.grad_fn is None:
        return []
    params = set(model.parameters())
    leaves: list[Tensor] = []
    stack = [loss.grad_fn]
    visited = set(stack)
    while stack:
        node: Any = stack.pop()
        # The nodes of custom functions may have any attributes, such as `variable`.
        if type(node).__name__ == "AccumulateGrad" and node.variable not in params:
            leaves.append(node.variable)
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in visited:
                visited.add(next_node)
                stack.append(next_node)
    return leaves


@contextmanager
def capture_pairs(
    model: nn.Module,
    is_sharded: bool,
    modules: Sequence[nn.Module],
    consumer: PairConsumer,
) -> Iterator[PairCapture]:
    """Hand the pairs of the modules to the consumer within the block.

    Run the backward pass with ``PairCapture.backward``. ``consumer.count_call`` is
    called at each call of a module.
    """
    anchor = torch.zeros((), requires_grad=True, device="cpu")
    fsdp = FSDPParams(model) if is_sharded else None
    runs_backward = False
    capture = Capture(cast(Any, consumer), fsdp=fsdp, counts_pass=lambda: runs_backward)

    def depend_on_anchor(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.requires_grad:
            return x
        return _DependOnAnchor.apply(x, anchor)  # type: ignore[no-untyped-call]

    def count_call(module: nn.Module) -> None:
        # A checkpoint repeats calls in the backward pass.
        if current_pass() == NO_PASS:
            consumer.count_call(module)

    def after_layer(module: nn.Module, args: Any, output: Any) -> Any:
        count_call(module)
        if not torch.is_grad_enabled():
            return None
        return depend_on_anchor(output)

    def before_attention(
        module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        count_call(module)
        count_call(cast(nn.Module, module.out_proj))
        # If query, key and value are one tensor, they must stay one, because attention
        # checks it.
        inputs = {id(x): depend_on_anchor(x) for x in (*args, *kwargs.values())}
        new_args = tuple(inputs[id(x)] for x in args)
        new_kwargs = {name: inputs[id(x)] for name, x in kwargs.items()}
        return new_args, new_kwargs

    def backward(loss: Tensor) -> None:
        nonlocal runs_backward
        leaves = _find_leaves(loss, model)
        if not leaves:
            return
        runs_backward = True
        try:
            torch.autograd.grad(loss, leaves, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise SecondOrderError(REENTRANT) from error
        finally:
            runs_backward = False

    # An attention does not call its out_proj, so the hook on the attention serves both.
    attention_of = attention_by_out_proj(model)
    hooked_modules = {attention_of.get(module, module): None for module in modules}
    with ExitStack() as stack:
        stack.callback(capture.detach)
        capture.attach(model, modules)
        # attach() notes the layers that torch.compile would hide, but here they run
        # eagerly.
        capture.missed.clear()
        for module in hooked_modules:
            if is_attention(module):
                # Capture recognizes an attention's products by weights that require a
                # gradient.
                for part in (module, cast(nn.Module, module.out_proj)):
                    for name, p in part.named_parameters(recurse=False):
                        p.requires_grad_(name.endswith("weight"))
                handle = module.register_forward_pre_hook(
                    before_attention, with_kwargs=True
                )
            else:
                handle = module.register_forward_hook(after_layer, prepend=True)
            stack.callback(handle.remove)
        with torch.enable_grad():
            yield PairCapture(backward, capture.missed)

"""What autograd keeps of a layer's call, and what the backward pass that is running will reach.

The private names of torch that the Kronecker factors use are those below, as torch 2.6 to 2.13 have
them; there is no public way to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.autograd.graph import get_gradient_edge

from second_order.sharded import FSDPParams

__all__ = ["as_used", "drawing_from", "is_reached", "keep", "set_eval_frame", "skip_code"]

NO_PASS = -1
"""The number of the running backward pass, where none is running."""

current_pass = torch._C._current_graph_task_id  # which passes' gradients add up to one statistic
current_node = torch._C._current_autograd_node  # whose saved input is read, and for the first time
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # whether inputs may go
will_execute = torch._C._will_engine_execute_node  # autograd.grad's gradients are no loss's
saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # a checkpoint saves nothing
transformed = torch._C._are_functorch_transforms_active  # torch.func hides gradients
# set_eval_frame and skip_code (above): a hook ends a graph, and the model runs without a compiler.

_drawing: set[int] = set()


class _SavedInput(torch.autograd.Function):
    """A node beside the graph whose only purpose is to hold one saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("this node is not part of any graph")


def keep(x: Tensor) -> Callable[[], Tensor]:
    """Keep an input as autograd keeps its own; what is returned reads it."""
    anchor = torch.empty(0, requires_grad=True)
    node: Any = _SavedInput.apply(x.detach(), anchor).grad_fn  # type: ignore[no-untyped-call]
    return lambda: node.saved_tensors[0]


@contextmanager
def drawing_from(loss: Tensor) -> Iterator[None]:
    """A block whose backward passes from a loss are those of drawn labels.

    They are known by their numbers: other passes may run beside them, in other threads.
    """
    begun: list[int] = []

    def begin(_: Tensor) -> None:
        begun.append(current_pass())
        _drawing.update(begun)

    hook = loss.register_hook(begin)
    try:
        yield
    finally:
        hook.remove()
        _drawing.difference_update(begun)


def is_drawing() -> bool:
    """Whether the pass that calls is one of drawn labels, whose gradients are nobody else's."""
    return current_pass() in _drawing


def reaches_parameters(module: nn.Module, fsdp: FSDPParams | None) -> bool:
    """Whether the backward pass that is running accumulates into a parameter of the module."""
    return any(map(is_reached, params_in_pass(module, fsdp).values()))


def params_in_pass(module: nn.Module, fsdp: FSDPParams | None) -> dict[str, Tensor]:
    """A module's own parameters that the graph of a pass ends in; with FSDP2 the whole ones."""
    own: dict[str, Tensor] = {k: p for k, p in module._parameters.items() if p is not None}
    return own if fsdp is None else fsdp.in_pass(module)


def is_reached(p: Tensor) -> bool:
    """Whether the backward pass that is running accumulates into a leaf."""
    if not p.requires_grad:
        return False
    try:
        return bool(will_execute(get_gradient_edge(p).node))
    except RuntimeError:  # torch's answer for what autograd.grad gives back without accumulating
        return False


def differentiable_tensors(output: Any) -> list[Tensor]:
    """The tensors of a model's output that a backward can start from."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if not isinstance(output, (list, tuple)):
        parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        output = list(parts.values())
    return [tensor for part in output for tensor in differentiable_tensors(part)]


def as_used(x: Tensor) -> Tensor:
    """The layer's input in the precision that the layer computes with.

    Under autocast autograd keeps a copy in that precision too: the tensor itself may be changed in
    place, or be freed, before the backward.
    """
    device = x.device.type
    if x.dtype is torch.float32 and torch.is_autocast_enabled(device):
        return x.detach().to(torch.get_autocast_dtype(device))
    return x

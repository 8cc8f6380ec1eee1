"""What autograd keeps of a layer's call, and what the backward pass that is running will reach.

The private names of torch that the Kronecker factors use are those below, as torch 2.6 to 2.13 have
them; there is no public way to ask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from second_order.sharded import FSDPParams

__all__ = [
    "NO_PASS",
    "Kept",
    "Passes",
    "as_used",
    "current_node",
    "current_pass",
    "device_type",
    "differentiable_tensors",
    "is_reached",
    "keeps_graph",
    "params_in_pass",
    "reaches_parameters",
    "repeating_checkpoints",
    "save",
    "saving_hooks",
    "set_eval_frame",
    "skip_code",
    "transformed",
]

NO_PASS = -1
"""The number of the running backward pass, where none is running."""

current_pass = torch._C._current_graph_task_id  # which passes' gradients add up to one statistic
current_node = torch._C._current_autograd_node  # whose saved input is read, and for the first time
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # whether inputs may go
will_execute = torch._C._will_engine_execute_node  # autograd.grad's gradients are no loss's
saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # a checkpoint saves nothing
transformed = torch._C._are_functorch_transforms_active  # torch.func hides gradients
# set_eval_frame and skip_code (above): a hook ends a graph, and the model runs without a compiler.

_REPEAT = CheckpointFunction.backward.__code__


class _SavedInput(torch.autograd.Function):
    """A node beside the graph whose only purpose is to hold one saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("this node is not part of any graph")


@dataclass
class Kept:
    """An input that is kept for a moment, in the manner of a node that saves it."""

    x: Tensor

    @property
    def saved_tensors(self) -> tuple[Tensor]:
        """The input."""
        return (self.x,)


class Passes:
    """Backward passes of one kind, known by the numbers that autograd gives them.

    A backward pass runs in the thread that asks for it, and in one for each device; others may run
    beside it in other threads, which a flag would take for it.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()

    @contextmanager
    def beginning_at(self, root: Tensor) -> Iterator[None]:
        """A block whose backward passes from a tensor are of this kind."""
        begun: list[int] = []

        def begin(_: Tensor) -> None:
            begun.append(current_pass())
            self._numbers.update(begun)

        hook = root.register_hook(begin)
        try:
            yield
        finally:
            hook.remove()
            self._numbers.difference_update(begun)

    @property
    def running(self) -> bool:
        """Whether the pass that calls is one of them."""
        return current_pass() in self._numbers


def save(x: Tensor) -> Any:
    """A node beside the graph that keeps an input as autograd keeps its own."""
    anchor = torch.empty(0, requires_grad=True)
    return _SavedInput.apply(x.detach(), anchor).grad_fn  # type: ignore[no-untyped-call]


def repeating_checkpoints() -> list[Any]:
    """The nodes of the reentrant checkpoints now repeating a forward, the outermost last."""
    frame: FrameType | None = sys._getframe(1)
    found: list[Any] = []
    while frame is not None:
        if frame.f_code is _REPEAT:
            found.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return found or [current_node()]  # of another library's checkpoint


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


def device_type(tensor: Tensor) -> str:
    """The kind of device that a tensor is on."""
    return tensor.device.type


def differentiable_tensors(output: Any) -> list[Tensor]:
    """The tensors of a model's output that a backward can start from."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (list, tuple)):
        parts = list(output)
    else:
        parts = list(getattr(output, "__dict__", {}).values())
    return [tensor for part in parts for tensor in differentiable_tensors(part)]


def as_used(x: Tensor) -> Tensor:
    """The layer's input in the precision that the layer computes with.

    Under autocast autograd keeps a copy in that precision too: the tensor itself may be changed in
    place, or be freed, before the backward.
    """
    device = device_type(x)
    if x.dtype is torch.float32 and torch.is_autocast_enabled(device):
        return x.detach().to(torch.get_autocast_dtype(device))
    return x

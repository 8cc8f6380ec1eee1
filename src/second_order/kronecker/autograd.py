"""What autograd keeps of a layer's call, and what the backward pass that is running will reach.

The private names of torch that the Kronecker factors use are those below, as torch 2.6 to 2.13 have
them; there is no public way to ask.

``nn.MultiheadAttention`` multiplies by weights and calls no modules: its in-projection is one
matrix, of queries, keys and values below each other, and ``out_proj`` is a Linear that is never
called. So no forward hook sees their inputs. What does is the graph that autograd has recorded of
the call: the node of each product with one of these weights has the product's input, as autograd
needs it too, and gets the gradient of its output. The in-projection is a grouped layer of three
groups: A and G of queries, of keys, of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.autograd.graph import get_gradient_edge

from second_order.distributed.fsdp import FSDPParams

__all__ = ["find_projections", "is_attention", "is_reached", "set_eval_frame", "skip_code"]

NO_PASS = -1
"""The number of the running backward pass, where none is running."""

_FIRST_PASS = "second_order: the first backward pass that came through"

current_pass = torch._C._current_graph_task_id  # which passes' gradients add up to one statistic
current_node = torch._C._current_autograd_node  # whose saved input is read, and for the first time
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # whether inputs may go
will_execute = torch._C._will_engine_execute_node  # autograd.grad's gradients are no loss's
top_saved_tensor_hooks = (
    torch._C._autograd._top_saved_tensors_default_hooks
)  # a checkpoint saves nothing
inside_functorch = torch._C._are_functorch_transforms_active  # torch.func hides gradients
# set_eval_frame and skip_code (above): a hook ends a graph, and the model runs without a compiler.


class _SavedInput(torch.autograd.Function):
    """A node beside the graph whose only purpose is to hold one saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("this node is not part of any graph")


def mark_pass(pass_id: int) -> bool:
    """Whether another backward pass has come through the node that runs now, which gets a mark."""
    metadata: Any = current_node().metadata
    return bool(metadata.setdefault(_FIRST_PASS, pass_id) != pass_id)


def call_after_pass(work: Callable[[], None]) -> None:
    """Have something done as the running backward pass ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(work)


def save_input(x: Tensor) -> Callable[[], Tensor]:
    """Keep an input as autograd keeps its own; what is returned reads it."""
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    # The result, and not its node: before torch 2.13 a node frees what it holds with its result.
    result = cast(Any, _SavedInput.apply(x.detach(), anchor))  # type: ignore[no-untyped-call]
    return lambda: result.grad_fn.saved_tensors[0]


def reaches_parameters(module: nn.Module, fsdp: FSDPParams | None) -> bool:
    """Whether the backward pass that is running accumulates into a parameter of the module."""
    return any(map(is_reached, params_in_pass(module, fsdp).values()))


def params_in_pass(module: nn.Module, fsdp: FSDPParams | None) -> dict[str, Tensor]:
    """A module's own parameters that the graph of a pass ends in; with FSDP2 the whole ones."""
    own: dict[str, Tensor] = {k: p for k, p in module._parameters.items() if p is not None}
    return own if fsdp is None else fsdp.unsharded_params(module)


def is_reached(p: Tensor) -> bool:
    """Whether the backward pass that is running accumulates into a leaf."""
    if not p.requires_grad:
        return False
    try:
        return bool(will_execute(get_gradient_edge(p).node))
    except RuntimeError:  # torch's answer for what autograd.grad gives back without accumulating
        return False


def to_compute_dtype(x: Tensor) -> Tensor:
    """The layer's input in the precision that the layer computes with.

    Under autocast autograd keeps a copy in that precision too: the tensor itself may be changed in
    place, or be freed, before the backward.
    """
    device = x.device.type
    if x.dtype is torch.float32 and torch.is_autocast_enabled(device):
        return x.detach().to(torch.get_autocast_dtype(device))
    return x


# --------------------------------------------------------------------------------------- attention


PRODUCTS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
"""Nodes of a product with a weight, whose edge is the last one, and their names of the input."""

LONGEST_PATH = 8  # nodes between a product and its weight: transpose, split, a cast by autocast


class Projection(NamedTuple):
    """A product with a weight of an attention, in a call."""

    owner: nn.Module  # the module whose weight it is: the attention, or its `out_proj`
    node: Any  # in autograd's graph
    qkv: tuple[int, ...]  # of the in-projection, which of queries, keys, values: 0, 1 or 2


def is_attention(module: nn.Module) -> bool:
    """Whether a module projects as ``nn.MultiheadAttention`` does."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    )


def find_projections(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Tensor,
    fsdp: FSDPParams | None,
) -> tuple[list[Tensor], list[Projection]]:
    """Queries, keys and values of an attention's call, and the products with its weights.

    Each input is ``(batch, positions, in)``, a view of the one given. The search for products does
    not go beyond the arguments of the call.
    """
    given = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
    inputs = [given[name] for name in ("query", "key", "value")]
    if inputs[0].dim() == 2:
        inputs = [x.unsqueeze(0) for x in inputs]
    elif not module.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    both = (module, cast(nn.Module, module.out_proj))
    owners = {p: owner for owner in both for p in params_in_pass(owner, fsdp).values()}
    width, found = cast(int, module.embed_dim), []
    todo = [output.grad_fn]
    seen = {t.grad_fn for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
    while todo:
        node = cast(Any, todo.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        weight, piece = _weight_of(node) if node.name() in PRODUCTS else (None, 0)
        owner = None if weight is None else owners.get(weight)
        if owner is not None:
            count = node._input_metadata[0].shape[-1] // width
            qkv = (0, 1, 2)[piece : piece + count] if owner is module else ()
            found.append(Projection(owner, node, qkv))
    return inputs, found


def _weight_of(product: Any) -> tuple[Tensor | None, int]:
    """The parameter that a product multiplies by, and the number of the piece, if it was cut."""
    (node, output), piece = product.next_functions[-1], 0
    for _ in range(LONGEST_PATH):
        if node is None or hasattr(node, "variable"):
            return getattr(node, "variable", None), piece
        if node.name().startswith("Split"):
            piece = output
        if len(node.next_functions) != 1:
            break
        node, output = node.next_functions[0]
    return None, 0


def read_product_input() -> Tensor:
    """The input of the product whose node's hook is running, as long as autograd has it.

    A hook of a node must not hold it: nothing would free the two.
    """
    node = current_node()
    return cast(Tensor, getattr(node, PRODUCTS[node.name()]))


@dataclass
class Assembly:
    """A call's pair, made of those of its products."""

    batch: int  # the number of sequences
    parts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by qkv

    def add(self, qkv: tuple[int, ...], x: Tensor, d: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take a product's pair; returns the call's pair once it is complete.

        x is ``(batch, positions, in)``, or ``(positions batch, in)``, d ``(positions batch, out)``;
        the call's are ``(batch, positions, ...)``, and with unlike inputs of queries, keys and
        values ``(3, batch, positions, ...)``, filled up by zeros.
        """
        d = d.unflatten(0, (-1, self.batch)).transpose(0, 1)
        x = x if x.dim() == 3 else x.unflatten(0, (-1, self.batch)).transpose(0, 1)
        if len(qkv) in (0, 3):
            return x, d
        for third, each in zip(qkv, d.chunk(len(qkv), -1), strict=True):
            self.parts[third] = x, each
        if len(self.parts) < 3:
            return None
        parts, self.parts = [self.parts[third] for third in range(3)], {}
        longest, pad = max(x.shape[1] for x, _ in parts), nn.functional.pad
        xs, ds = (
            torch.stack([pad(t, (0, 0, 0, longest - t.shape[1])) for t in each])
            for each in zip(*parts, strict=True)
        )
        return xs, ds

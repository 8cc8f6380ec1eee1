"""Read autograd's graph: the saved inputs of a layer, and what a backward pass reaches.

All private names of torch that the Kronecker factors use are in this file. They exist
in torch 2.6 to 2.13, and no public function replaces them.

``nn.MultiheadAttention`` multiplies by its weights without calling a module. Its
in-projection is one matrix with the rows of q, k and v, and ``out_proj`` is a Linear
that is never called. A forward hook therefore does not see the inputs of these
products. But autograd's graph has a node for each product. The node has saved the
product's input, and receives the gradient of its output. :func:`find_projections` finds
these nodes. The in-projection is a layer of three groups, with A and G of q, of k and
of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.autograd.graph import get_gradient_edge

from second_order.distributed.fsdp import FSDPParams

__all__ = [
    "attention_by_out_proj",
    "find_projections",
    "is_attention",
    "is_reached",
    "set_eval_frame",
    "skip_code",
]

# set_eval_frame sets the callback with which Dynamo compiles frames. skip_code excludes
# a function from that.

# The number of the running backward pass, or NO_PASS. Gradients of one pass add up.
current_pass = torch._C._current_graph_task_id
NO_PASS = -1

# The node that runs now.
current_node = torch._C._current_autograd_node

# Whether the running pass keeps the graph and its saved inputs (retain_graph=True).
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

# Whether the running pass will run a node.
will_execute = torch._C._will_engine_execute_node

# The innermost saved-tensor hooks, such as those of a checkpoint.
top_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# Whether a torch.func transform is active, which hides gradients from hooks.
inside_functorch = torch._C._are_functorch_transforms_active

# An entry of a node's metadata: the number of the first pass that ran the node.
_FIRST_PASS = "second_order: the first backward pass that came through"


# ------------------------------------------------------------------------------- passes


def has_earlier_pass(pass_id: int) -> bool:
    """Whether a backward pass other than ``pass_id`` ran the current node first.

    The first call for a node marks it with ``pass_id``, so call it in every pass.
    """
    metadata: Any = current_node().metadata
    return bool(metadata.setdefault(_FIRST_PASS, pass_id) != pass_id)


def call_after_pass(function: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def reaches_parameters(module: nn.Module, fsdp: FSDPParams | None) -> bool:
    """Whether the running pass accumulates into a parameter of the module itself."""
    return any(map(is_reached, params_in_pass(module, fsdp).values()))


def params_in_pass(module: nn.Module, fsdp: FSDPParams | None) -> dict[str, Tensor]:
    """The module's own parameters by name, as leaves of a pass's graph.

    With FSDP2 these are the unsharded parameters.
    """
    if fsdp is not None:
        return fsdp.unsharded_params(module)
    return {name: p for name, p in module._parameters.items() if p is not None}


def is_reached(p: Tensor) -> bool:
    """Whether the running backward pass accumulates into a leaf."""
    if not p.requires_grad:
        return False
    try:
        return bool(will_execute(get_gradient_edge(p).node))
    except RuntimeError:
        # Raised for the inputs of torch.autograd.grad, which does not accumulate.
        return False


def without_modes(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that disables gradients and autocast."""
    # Entering it is slow. In most backward passes, both are disabled already.
    if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
        return _without_modes(device)
    return nullcontext()


@contextmanager
def _without_modes(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


# ------------------------------------------------------------------------- saved inputs


class _SavedInput(torch.autograd.Function):
    """A node outside of the graph that saves one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("this node is not part of any graph")


def save_input(x: Tensor) -> Callable[[], Tensor]:
    """Save an input as autograd saves its own, through the active saved-tensor hooks.

    Returns:
        A function that returns the input. It raises RuntimeError if the input has been
        changed in place since.
    """
    # A node is made only if some argument requires a gradient, hence the anchor. The
    # returned function holds the result and not its node, because before torch 2.13 a
    # node frees its saved tensors when its result is freed.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    result = cast(Any, _SavedInput.apply(x.detach(), anchor))  # type: ignore[no-untyped-call]

    def read() -> Tensor:
        return cast(Tensor, result.grad_fn.saved_tensors[0].detach())

    return read


def hold_input(x: Tensor) -> Callable[[], Tensor]:
    """Hold an input itself. Returns a function as :func:`save_input` does.

    If no hook packs saved tensors, this is equivalent, and takes much less time.
    """
    # An x that is changed in place has the layer's node in its history.
    held = x.detach()
    version = x._version

    def read() -> Tensor:
        if held._version != version:
            raise RuntimeError(
                "the input of a layer has been changed by an inplace operation"
            )
        return held

    return read


def to_compute_dtype(x: Tensor) -> Tensor:
    """Return a layer's input in the dtype in which the layer computes.

    Under autocast, autograd also saves a copy in that dtype. ``x`` itself may be
    changed in place, or freed, before the backward pass.
    """
    device = x.device.type
    if x.dtype is torch.float32 and torch.is_autocast_enabled(device):
        return x.detach().to(torch.get_autocast_dtype(device))
    return x


# ---------------------------------------------------------------------------- attention


# Nodes of a product with a weight, and the attribute that has the product's input. The
# weight is the node's last input.
PRODUCTS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}

# Nodes between a product and its weight, at most: transpose, split, a cast by autocast.
LONGEST_PATH = 8


class Projection(NamedTuple):
    """A product with a weight of an attention, in one call."""

    owner: nn.Module  # the module that has the weight: the attention, or its `out_proj`
    node: Any  # of autograd's graph
    qkv: tuple[int, ...]  # for the in-projection: which of q, k and v, as 0, 1 and 2


class QKVInputs(NamedTuple):
    """The inputs of an attention's in-projection, ``(batch, positions, in)`` each."""

    q: Tensor
    k: Tensor
    v: Tensor


def is_attention(module: nn.Module) -> bool:
    """Whether a module has the class and the forward of ``nn.MultiheadAttention``."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    )


def attention_by_out_proj(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map the out_proj of each attention to the attention, which computes its product."""
    attentions: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if is_attention(module):
            attentions[cast(nn.Module, module.out_proj)] = module
    return attentions


def find_projections(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Tensor,
    fsdp: FSDPParams | None,
) -> tuple[QKVInputs, list[Projection]]:
    """Find the products of an attention's call with its weights.

    Returns:
        The inputs of the in-projection, as views of the arguments, and the products.
    """
    inputs = _qkv_inputs(module, args, kwargs)
    attention_and_out_proj = (module, cast(nn.Module, module.out_proj))
    owners: dict[Tensor, nn.Module] = {}
    for owner in attention_and_out_proj:
        for p in params_in_pass(owner, fsdp).values():
            owners[p] = owner

    # Search the graph from the output to the arguments of the call.
    projections: list[Projection] = []
    width = cast(int, module.embed_dim)
    pending = [output.grad_fn]
    seen = {t.grad_fn for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
    while pending:
        node = cast(Any, pending.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [next_node for next_node, _ in node.next_functions]
        if node.name() not in PRODUCTS:
            continue
        weight, piece = _find_weight(node)
        product_owner = None if weight is None else owners.get(weight)
        if product_owner is None:
            continue
        # A piece of the in-projection has the rows of one or more of q, k and v:
        #   one input      no split             (q, k, v)
        #   k and v equal  pieces 0 and 1       (q) and (k, v)
        #   all different  pieces 0, 1 and 2    (q), (k) and (v)
        qkv: tuple[int, ...] = ()
        if product_owner is module:
            count = node._input_metadata[0].shape[-1] // width
            qkv = (0, 1, 2)[piece : piece + count]
        projections.append(Projection(product_owner, node, qkv))
    return inputs, projections


def _qkv_inputs(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> QKVInputs:
    names = ("query", "key", "value")
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    inputs = [arguments[name] for name in names]
    if inputs[0].dim() == 2:
        inputs = [x.unsqueeze(0) for x in inputs]
    elif not module.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    return QKVInputs(*inputs)


def _find_weight(product: Any) -> tuple[Tensor | None, int]:
    """Find the parameter that a product multiplies by.

    Returns:
        The parameter, or None; and the number of its piece, if it was split.
    """
    node, output_index = product.next_functions[-1]
    piece = 0
    for _ in range(LONGEST_PATH):
        if node is None or hasattr(node, "variable"):
            return getattr(node, "variable", None), piece
        if node.name().startswith("Split"):
            piece = output_index
        if len(node.next_functions) != 1:
            break
        node, output_index = node.next_functions[0]
    return None, 0


def read_product_input() -> Tensor:
    """Return the detached input of the product whose node's hook is running.

    A hook that held the input instead could keep the node, and so itself, alive: the
    history of an input that was changed in place contains the node.
    """
    node = current_node()
    return cast(Tensor, getattr(node, PRODUCTS[node.name()])).detach()


class QKVPart(NamedTuple):
    """The pair of q, k or v."""

    x: Tensor
    d: Tensor


@dataclass
class Assembly:
    """Joins the pairs of an attention call's products to the pair of the call.

    Attributes:
        batch: Number of sequences.
        parts: The pairs that have arrived: q, k and v as 0, 1 and 2.
    """

    batch: int
    parts: dict[int, QKVPart] = field(default_factory=dict)

    def add(
        self, qkv: tuple[int, ...], x: Tensor, d: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Add the pair of a product.

        Args:
            qkv: Which of q, k and v the product has. Empty for ``out_proj``.
            x: The input, ``(batch, positions, in)`` or ``(positions x batch, in)``.
            d: The gradient of the output, ``(positions x batch, out)``.

        Returns:
            The pair of the call, ``(batch, positions, ...)``, once it is complete. If
            q, k and v have different inputs, it is ``(3, batch, positions, ...)``,
            padded with zeros.
        """
        d = d.unflatten(0, (-1, self.batch)).transpose(0, 1)
        if x.dim() != 3:
            x = x.unflatten(0, (-1, self.batch)).transpose(0, 1)
        if len(qkv) in (0, 3):
            return x, d

        for index, part in zip(qkv, d.chunk(len(qkv), -1), strict=True):
            self.parts[index] = QKVPart(x, part)
        if len(self.parts) < 3:
            return None
        parts = [self.parts[index] for index in range(3)]
        self.parts = {}
        length = max(part.x.shape[1] for part in parts)
        xs = torch.stack([_pad_positions(part.x, length) for part in parts])
        ds = torch.stack([_pad_positions(part.d, length) for part in parts])
        return xs, ds


def _pad_positions(tensor: Tensor, length: int) -> Tensor:
    """Pad ``(batch, positions, n)`` with zeros to a number of positions."""
    return nn.functional.pad(tensor, (0, 0, 0, length - tensor.shape[1]))

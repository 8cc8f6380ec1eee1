"""Capture pairs, a layer's input x and its output's gradient d, in training passes.

    forward     ``Capture.observe``, called by a forward hook on the layer, finds the
                autograd node of the layer's product and registers a ``_NodeHook``,
                which keeps x.
    backward    The node runs its ``_NodeHook``, which passes d to ``Capture.take``.
                ``Capture.take`` hands the pair to the consumer, which adds it to A and
                G. From a compiled graph, pairs come to ``Capture.receive`` instead.

The gradient is read on the node and not by a backward hook on the module, because
such a hook wraps the output in a view, which in-place activations cannot modify.
The node's hook sees the gradient with respect to the value that the layer returned,
even if that tensor is changed in place later. It fires once, however often a
checkpoint repeats the forward.

A pair exists only once its gradient arrives, in a backward pass that accumulates into
the ``.grad`` of the layer's own parameters. A forward without a backward (validation,
batch-norm updates) leaves no pair. ``torch.autograd.grad`` leaves none either: it
computes gradient penalties, derivatives inside a loss or attacks on inputs, and these
are not gradients of the training loss.

The input is kept as autograd keeps its own inputs, through the saved-tensor hooks that
are active. Activation checkpointing and offloading therefore keep their memory savings
(but not with sampled labels, which need the input in two passes).

If the model is compiled with ``torch.compile``, the hooks are traced with it, and the
backward of the compiled graph delivers the pairs
(:mod:`second_order.kronecker.compiled_capture`).

The sampled Fisher needs its own backward pass before the user's. A node's hook then
fires twice: in the pass of the sampled labels, which accumulates into no parameter and
so does not count, and in the user's pass, which delivers the pair with the gradient of
the sampled labels. A compiled graph does not allow the additional pass. If statistics
are due, the hooks break the graph before the model, and the model runs eagerly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from second_order.distributed.fsdp import FSDPParams
from second_order.errors import SecondOrderError, warn
from second_order.kronecker import autograd, compiled_capture
from second_order.kronecker.autograd import (
    Assembly,
    attention_by_out_proj,
    find_projections,
    is_attention,
)
from second_order.kronecker.compiled_capture import hides_products, is_exporting
from second_order.kronecker.experts import Routed, is_experts
from second_order.utils.modules import remove_handles
from second_order.utils.stages import stage

__all__ = ["Capture", "Gate", "input_in"]

Sampler = Callable[[Any, int], Tensor]
"""Samples labels from a model's output, and returns the sum of their negative
log-likelihoods."""

# Errors and warnings.
SCRIPTED = (
    "torch.jit.script cannot compile the hooks that an optimizer of second_order registered on "
    "this model; script the model inside `with optimizer.hooks_removed():`, or after "
    "optimizer.close()"
)
REENTRANT = (
    "the sampled Fisher cannot differentiate through a reentrant checkpoint; use "
    "checkpoint(..., use_reentrant=False), or fisher='empirical'"
)
RUNS_EAGERLY = (
    "the sampled Fisher runs the model without torch.compile at steps with statistics; with "
    "fisher='empirical' the compiled graph computes the statistics"
)
FULL_GRAPH = (
    "the sampled Fisher runs the model without torch.compile at steps with statistics, which "
    "breaks the graph before the model; leave fullgraph off, or use fisher='empirical'"
)
COMPILED_PART = (
    "the sampled Fisher runs the model without torch.compile at steps with statistics, but a part "
    "of the model was compiled separately, as by block.compile(), or called separately; compile "
    "the whole model that you passed to the optimizer and call that, or use fisher='empirical'"
)
DERIVATIVES = (
    "the loss contains derivatives by torch.autograd.grad(create_graph=True), as in gradient "
    "penalties and PINNs. The gradients are complete, but the factors miss the part that passes "
    "through these derivatives, at {names}. If training is not better than with the base "
    "optimizer, compute the derivatives in the forward pass, as docs/how-to/pinns.md shows, or use "
    "DHO2"
)
MAX_NAMES = 10  # in a warning

# Reasons in `Capture.missed`. The warning that shows one begins with the layer's name.
TRANSFORMED = (
    "torch.func transforms (vmap, grad) hide gradients from layers' hooks; call the model outside "
    "of the transform, and call backward() on its loss"
)
NOT_ACCUMULATED = (
    "its output received gradients from torch.autograd.grad, which do not accumulate into any "
    "parameter's .grad, and none from backward()"
)
NOT_TENSORS = (
    "its input is not a tensor (for fused experts: hidden states, expert indices and weights), or "
    "it returns neither a tensor nor a tuple that starts with one"
)
CHANGED = "its input was changed in place after its forward"
CHECKPOINTED = (
    "inside checkpoint(..., use_reentrant=False) only autograd can read the input of an "
    "attention's out_proj; use use_reentrant=True, or leave the attention out of the checkpoint"
)
COMPILED = (
    "it is not called, or torch.compile hides its matrix products (such as those of attention, "
    "fused experts and their router); keep it out of the graph with "
    "module.forward = torch.compiler.disable(module.forward), or name it in skip_layers"
)


class Consumer(Protocol):
    """What a capture needs of the object that receives its pairs."""

    def wants(self, module: nn.Module) -> bool:
        """Whether to capture pairs of a module in this forward pass."""

    def consume(
        self, module: nn.Module, x: Any, d: Tensor, pass_id: int, again: bool
    ) -> None:
        """Receive a pair.

        Args:
            module: The layer.
            x: Its input.
            d: The gradient of its output.
            pass_id: The number of the backward pass. With sampled labels, the number
                of the call of the model, because one backward pass may deliver the
                pairs of several calls.
            again: Whether an earlier backward pass came through the same forward.
        """

    def verify(self, module: nn.Module, x: Any, d: Tensor) -> None:
        """Verify a layer by a pair of the user's own loss, if labels are sampled."""


@dataclass
class Gate:
    """Whether pairs are captured now. Compiled graphs with hooks guard on it."""

    open: bool = True

    def set(self, is_open: bool) -> None:
        """Open or close the gate for the passes that follow."""
        self.open = is_open


# --------------------------------------------------------------------- hooks on modules


def _no_reference() -> None:
    """Stands for a weak reference whose object is gone, in copies of a hook."""


class CaptureHook:
    """A hook that a capture registers on a module.

    It holds weak references, and its copies (pickled ones as well) do nothing: a
    pickled or deep-copied model does not include the optimizer.
    """

    def __init__(
        self, capture: Capture | None = None, module: nn.Module | None = None
    ) -> None:
        self.capture_ref = _no_reference if capture is None else weakref.ref(capture)
        self.module_ref = _no_reference if module is None else weakref.ref(module)
        self.gate = Gate(False) if capture is None else capture.gate

    @property
    def __name__(self) -> str:
        """Raise. torch.jit.script reads a hook's name first, and shows the error."""
        raise AttributeError(SCRIPTED)

    def __reduce__(self) -> Any:
        return type(self), ()


class LayerHook(CaptureHook):
    """The forward hook on a layer.

    ``nn.MultiheadAttention`` does not call its ``out_proj``, so the hook on the
    attention serves both modules.
    """

    def __init__(
        self, capture: Capture | None = None, module: nn.Module | None = None
    ) -> None:
        super().__init__(capture, module)
        self.sampled = capture is not None and capture.sampled
        self.is_attention = module is not None and is_attention(module)
        self.is_experts = module is not None and is_experts(module)
        self.hides_products = module is not None and hides_products(module)
        # Compiled graphs take this tensor as an input, and find the hook by it.
        self.anchor = compiled_capture.anchor_of(self)

    def __call__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Observe a call. Inside a graph, return an output that delivers the pair."""
        if is_exporting() or not self.gate.open:
            return None
        if not torch.compiler.is_dynamo_compiling():
            capture = self.capture_ref()
            if capture is not None:
                capture.observe(self, module, args, kwargs, output)
            return None

        # From here on, Dynamo traces this hook into a graph.
        if self.hides_products:
            # torch.compiler.disable(module.forward) sets an attribute of the instance.
            # Such a module runs outside of the graph, where its products are visible.
            if "forward" in vars(module):
                _observe_outside_graph(self, module, args, kwargs, output)
            return None
        x = input_in(args, kwargs)
        if not compiled_capture.has_pair(module, x, output):
            return None
        if self.sampled:
            # BeforeModelHook keeps the model out of graphs, but not a compiled part.
            _refuse_compiled_part()
        return compiled_capture.capture_output(x, output, self.anchor)

    def receive(self, x: Tensor, gradient: Tensor) -> None:
        """Receive a pair from the backward of a compiled graph."""
        capture = self.capture_ref()
        module = self.module_ref()
        if capture is not None and module is not None:
            capture.receive(module, x, gradient)


class BeforeModelHook(CaptureHook):
    """The forward pre-hook on the whole model, for sampled labels."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Start a call of the model, or break the graph so that Python calls it."""
        if is_exporting():
            return
        if torch.compiler.is_dynamo_compiling():
            if torch.is_grad_enabled() and self.gate.open:
                _break_graph()
            return
        capture = self.capture_ref()
        if capture is not None:
            capture.enter_model()


class AfterModelHook(CaptureHook):
    """The forward hook on the whole model, for sampled labels."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End a call of the model, and sample labels from its output."""
        if is_exporting() or torch.compiler.is_dynamo_compiling():
            return
        capture = self.capture_ref()
        if capture is not None:
            capture.leave_model(module, output)


# Dynamo breaks the graph at a call of a disabled function. With fullgraph=True it
# raises instead, and the error shows the reason.


@partial(torch.compiler.disable, reason="the module's forward is kept out of the graph")
def _observe_outside_graph(
    hook: LayerHook,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Run a hook eagerly."""
    hook(module, args, kwargs, output)


@partial(torch.compiler.disable, reason=FULL_GRAPH)
def _break_graph() -> None:
    """Do nothing: the call itself breaks the graph."""


@partial(torch.compiler.disable, reason=COMPILED_PART)
def _refuse_compiled_part() -> None:
    raise SecondOrderError(COMPILED_PART)


def input_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A layer's input: the first positional argument, or else the first keyword tensor.

    The keyword may have any name.
    """
    if args:
        return args[0]
    return next((value for value in kwargs.values() if isinstance(value, Tensor)), None)


# ----------------------------------------------------------------------- hooks on nodes


class _Product(NamedTuple):
    """One multiplication by a weight, in a call of a layer."""

    module: nn.Module
    edge: GradientEdge  # the product's output in autograd's graph
    x: Any = None  # the input; None if it must be read from autograd's node
    shape: torch.Size | None = None  # of the output; the node may have flattened it
    qkv: tuple[int, ...] = ()  # for an in-projection: q, k and v as 0, 1 and 2
    assembly: Assembly | None = None  # joins the pairs of an attention call


class _Pass(NamedTuple):
    """A backward pass, from the point of view of one forward call."""

    number: int  # ``pass_id`` of :meth:`Consumer.consume`
    again: bool  # an earlier backward pass came through the same call


class _SampledGradient(NamedTuple):
    gradient: Tensor
    model_call: int  # the number of the model's call that the labels were sampled for


class _ChangedInputError(RuntimeError):
    """A layer's input was changed in place before it was read."""


class _NodeHook:
    """A hook on a product's autograd node: keeps the input, and receives the gradient.

    Autograd's node holds the hook. The hook must not hold the node, because nothing
    would free the two; so it copies what it needs of the product.
    """

    def __init__(self, capture: Capture, product: _Product) -> None:
        self._capture_ref = weakref.ref(capture)
        self._output_index = product.edge.output_nr
        self.module = product.module
        self._shape = product.shape
        self._qkv = product.qkv
        self._assembly = product.assembly
        self.is_part_of_attention = product.assembly is not None
        self._sampled: _SampledGradient | None = None

        # A reentrant checkpoint repeats its forward in each backward pass, and calls
        # backward() inside of it. The pair then belongs to the outer pass, which is
        # running now.
        self._outer_pass = autograd.current_pass()
        self._again = False
        if self._outer_pass != autograd.NO_PASS:
            self._again = autograd.has_earlier_pass(self._outer_pass)

        # How the backward pass reads the input: without an x, from the running node.
        self._read_input: Callable[[], Any] = autograd.read_product_input
        self._is_freed = False
        x = product.x
        if x is not None:
            # A checkpoint can unpack a saved tensor in one of two passes only, so with
            # sampled labels the input is held itself.
            save = autograd.hold_input
            if not capture.sampled and autograd.top_saved_tensor_hooks(False):
                save = autograd.save_input
            self._read_input = x.save(save) if isinstance(x, Routed) else save(x)

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        """Receive the gradients of the node's outputs, before the node runs."""
        capture = self._capture_ref()
        gradient = gradients[self._output_index]
        if capture is None or gradient is None or self._is_freed:
            return
        with stage("statistics"):
            capture.take(self, gradient)
        if not autograd.keeps_graph():
            # Free the input when autograd frees its own, even if the user keeps the
            # loss. The function that is set here holds no tensor, and is not called.
            self._is_freed = True
            self._read_input = autograd.read_product_input

    def pair(self, gradient: Tensor) -> tuple[Any, Tensor] | None:
        """The pair of the layer's call; None until q, k and v all have their pairs.

        Raises:
            _ChangedInputError: If the input has been changed in place.
        """
        try:
            x = self._read_input()
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise _ChangedInputError from error
        d = gradient.detach()
        if self._assembly is not None:
            return self._assembly.add(self._qkv, x, d)
        if self._shape is not None and d.shape != self._shape:
            d = d.reshape(*self._shape)
        return x, d

    def running_pass(self) -> _Pass:
        """The running backward pass; with a reentrant checkpoint, the outer one."""
        if self._outer_pass != autograd.NO_PASS:
            return _Pass(self._outer_pass, self._again)
        number = autograd.current_pass()
        return _Pass(number, autograd.has_earlier_pass(number))

    def note_derivative(self, _: Tensor) -> None:
        """Note that the gradient of the product's output is itself differentiated."""
        capture = self._capture_ref()
        if capture is not None:
            capture.note_derivative(self.module)

    def keep_sampled(self, sampled: _SampledGradient) -> None:
        """Keep the gradient for sampled labels until the user's backward pass."""
        self._sampled = sampled

    def pop_sampled(self) -> _SampledGradient | None:
        """Return and forget the gradient for sampled labels, so that it counts once."""
        sampled = self._sampled
        self._sampled = None
        return sampled


def _edge_of(output: Tensor) -> GradientEdge:
    """The graph edge of a layer's result, which in-place operations do not replace.

    With a bias and an input of three or more dimensions, ``nn.Linear`` returns a view
    of its product. An in-place operation on the view gives the view a new node, on
    which a hook set before does not fire. So the edge is that of the product.
    """
    edge = get_gradient_edge(output)
    if edge.node.name() != "ViewBackward0":
        return edge
    node, output_index = edge.node.next_functions[0]
    # A hook on a leaf's node would outlive the graph.
    is_leaf = hasattr(node, "variable")
    if node is None or is_leaf:
        return edge
    return GradientEdge(node, output_index)


# ----------------------------------------------------------------------------- captures


class Capture:
    """Captures the pairs of a set of layers and hands them to a consumer.

    With a ``sampler`` the pairs carry the gradients of the loss on sampled labels.
    These gradients are computed as soon as the forward of the root module returns, and
    do not touch any parameter's ``.grad``. The pairs are delivered during the user's
    backward pass.

    Args:
        consumer: Receives the pairs of the layers that it wants, under ``no_grad`` and
            without autocast.
        sampler: For the sampled Fisher. ``sampler(model_output, call)`` samples labels
            from the model's output and returns their summed negative log-likelihood.
            ``call`` is the value of ``root_calls``.
        fsdp: The parameters of a model that FSDP2 shards.
        counts_pass: Returns whether the running backward pass counts. None counts
            passes that accumulate into a layer's own parameters.

    Attributes:
        gate: Whether pairs are captured from now on, in compiled graphs as well.
        missed: By layer, why one of its pairs did not count, or why it may have none.
        sampled: Whether the pairs are those of sampled labels.
        root_calls: The number of model calls for which labels have been sampled.
    """

    def __init__(
        self,
        consumer: Consumer,
        sampler: Sampler | None = None,
        fsdp: FSDPParams | None = None,
        counts_pass: Callable[[], bool] | None = None,
    ) -> None:
        self.gate = Gate()
        self.fsdp = fsdp
        self._counts_pass = counts_pass
        self._consumer = consumer
        self.missed: weakref.WeakKeyDictionary[nn.Module, str] = (
            weakref.WeakKeyDictionary()
        )
        self._differentiated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._root: weakref.ref[nn.Module] | None = None

        # Hooks on modules.
        self._observed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: list[CaptureHook] = []
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, remove_handles, self._handles)

        # Sampled labels.
        self._sampler = sampler
        self.sampled = sampler is not None
        self.root_calls = 0
        self._inside_model = False
        # The hooks of the model's running call.
        self._pending: list[tuple[_NodeHook, GradientEdge]] = []
        # Dynamo's callback (a function, False or None), while the model runs eagerly.
        self._compiler: Any = None

    def attach(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Capture the pairs of exactly these layers.

        A compiled graph contains the hooks that were there when it was compiled, and
        does not look for others. Hooks on other layers therefore stay, and ignore the
        calls of these layers.
        """
        layers = list(layers)
        self._root = weakref.ref(root)
        self._observed = weakref.WeakSet(layers)
        self._pending.clear()

        # An attention computes the product of its out_proj. Its hook serves both.
        attention_of = attention_by_out_proj(root)

        # A compiled graph does not call the hooks of these layers: give the reason now.
        hidden = [*attention_of, *attention_of.values()]
        hidden += [layer for layer in layers if hides_products(layer)]
        for layer in hidden:
            self.missed.setdefault(layer, COMPILED)

        # Register the hooks that are not there yet, one for each layer.
        hooked_layers = {attention_of.get(layer, layer): None for layer in layers}
        required: list[tuple[nn.Module, type[CaptureHook]]] = []
        required += [(layer, LayerHook) for layer in hooked_layers]
        if self.sampled and layers:
            required += [(root, BeforeModelHook), (root, AfterModelHook)]
        existing = {(hook.module_ref(), type(hook)) for hook in self._hooks}
        missing = [each for each in required if each not in existing]
        new_hooks = [hook_type(self, module) for module, hook_type in missing]
        self._register(new_hooks)
        self._hooks += new_hooks

    def _register(self, hooks: Iterable[CaptureHook]) -> None:
        """Register hooks on those of their modules that still exist."""
        for hook in hooks:
            module = hook.module_ref()
            if module is None:
                continue
            function: Any = hook
            if isinstance(hook, BeforeModelHook):
                handle = module.register_forward_pre_hook(function)
            else:
                with_kwargs = isinstance(hook, LayerHook)
                handle = module.register_forward_hook(function, with_kwargs=with_kwargs)
            self._handles.append(handle)

    def detach(self) -> None:
        """Remove every hook, and forget the pairs that await their gradients."""
        remove_handles(self._handles)
        self._hooks.clear()
        self._observed = weakref.WeakSet()
        self._pending.clear()

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Remove the hooks from the modules inside a ``with`` block."""
        remove_handles(self._handles)
        try:
            yield
        finally:
            remove_handles(self._handles)  # those of an attach() inside the block
            self._register(self._hooks)

    # ------------------------------------------------------------------- forward passes

    def observe(
        self,
        hook: LayerHook,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        """Observe a call of a layer: in training passes, hook its products' nodes."""
        if cast(Any, torch.jit).is_tracing():
            return

        # The layers whose pairs this call can give.
        candidates = [module]
        if hook.is_attention:
            candidates.append(cast(nn.Module, module.out_proj))
        layers = [
            layer
            for layer in candidates
            if layer in self._observed and self._consumer.wants(layer)
        ]
        if autograd.inside_functorch():
            self.missed.update(dict.fromkeys(layers, TRANSFORMED))
            return
        if not layers or not torch.is_grad_enabled():
            return
        if self.sampled and not self._inside_model:
            return  # no labels will be sampled for a layer that is called on its own

        # Hook the nodes of the products. A router's logits and an attention's output
        # come first in a tuple.
        if isinstance(output, tuple) and output:
            output = output[0]
        with stage("statistics"):
            if hook.is_attention:
                products = self._find_attention_products(module, args, kwargs, output)
            else:
                find_input = Routed.from_call if hook.is_experts else input_in
                x = find_input(args, kwargs)
                products = self._find_layer_product(module, x, output)
            for product in products:
                if product.module not in layers:
                    continue
                node_hook = _NodeHook(self, product)
                if self.sampled:
                    self._pending.append((node_hook, product.edge))
                cast(Any, product.edge.node).register_prehook(node_hook)

    def _find_layer_product(
        self, module: nn.Module, x: Any, output: Any
    ) -> list[_Product]:
        """The product of any layer but an attention; empty if the call has no pair."""
        if not isinstance(x, (Tensor, Routed)) or not isinstance(output, Tensor):
            self.missed[module] = NOT_TENSORS
            return []
        if not output.requires_grad:
            return []
        shape = output.shape
        if isinstance(x, Tensor):
            # A router flattens its input (batch, positions, in). The gradient gets
            # this shape.
            is_flattened = output.dim() == 2 and x.dim() > 2
            if is_flattened and x.shape[:-1].numel() == len(output):
                shape = torch.Size([*x.shape[:-1], shape[-1]])
            x = autograd.to_compute_dtype(x)
        return [_Product(module, _edge_of(output), x, shape)]

    def _find_attention_products(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Tensor,
    ) -> list[_Product]:
        """The products of an attention with its in-projection and its ``out_proj``."""
        if not output.requires_grad:
            return []
        qkv_inputs, found = find_projections(module, args, kwargs, output, self.fsdp)
        assembly = Assembly(batch=len(qkv_inputs[0]))

        # A non-reentrant checkpoint recomputes saved tensors, for autograd alone.
        saved_tensor_hooks: Any = autograd.top_saved_tensor_hooks(True)
        is_checkpointed = False
        if saved_tensor_hooks:
            pack_hook = saved_tensor_hooks[0]
            is_checkpointed = pack_hook.__module__ == "torch.utils.checkpoint"

        products = []
        for projection in found:
            owner = projection.owner
            edge = GradientEdge(projection.node, 0)
            if owner is module:
                qkv = projection.qkv
                x = autograd.to_compute_dtype(qkv_inputs[qkv[0]])
                products.append(_Product(owner, edge, x, qkv=qkv, assembly=assembly))
            elif is_checkpointed:
                self.missed[owner] = CHECKPOINTED
            else:
                # Only autograd's node has the input of out_proj.
                products.append(_Product(owner, edge, assembly=assembly))
        return products

    # ------------------------------------------------------------------ backward passes

    def take(self, hook: _NodeHook, gradient: Tensor) -> None:
        """Pair the gradient that a node received with the node's input."""
        module = hook.module
        if torch.is_grad_enabled() and gradient.requires_grad:  # with create_graph=True
            gradient.register_hook(hook.note_derivative)
        if not self._counts(module):
            # With sampled labels this may be their own pass, which accumulates nowhere.
            if not self.sampled:
                self.missed[module] = NOT_ACCUMULATED
            return
        try:
            if self.sampled:
                self._take_sampled(hook, gradient)
            else:
                self._emit(module, hook.pair(gradient), hook.running_pass())
        except _ChangedInputError:
            # Autograd allows the change if the layer multiplied a copy of its input,
            # for example of a transposed one.
            self.missed[module] = CHANGED

    def _counts(self, module: nn.Module) -> bool:
        """Whether the pairs of the running backward pass count for a layer."""
        if self._counts_pass is not None:
            return self._counts_pass()
        return autograd.reaches_parameters(module, self.fsdp)

    def _take_sampled(self, hook: _NodeHook, gradient: Tensor) -> None:
        """Deliver the pair with the gradient of the sampled labels, in the user's pass.

        The user's own gradient serves to verify the layer, unless this is one of
        several products of an attention, whose pairs only come together.
        """
        sampled = hook.pop_sampled()
        if sampled is not None:
            pair = hook.pair(sampled.gradient)
            self._emit(hook.module, pair, _Pass(sampled.model_call, again=False))
        if not hook.is_part_of_attention:
            with autograd.without_modes(gradient.device):
                x, d = cast(tuple[Any, Tensor], hook.pair(gradient))
                self._consumer.verify(hook.module, x, d)

    def note_derivative(self, module: nn.Module) -> None:
        """Note that a loss depends on the gradient of a layer's output; warn later."""
        if module in self._differentiated:
            return
        if not self._counts(module):
            return
        if not self._differentiated:
            autograd.call_after_pass(self._warn_about_derivatives)
        self._differentiated.add(module)

    def _warn_about_derivatives(self) -> None:
        root = None if self._root is None else self._root()
        if root is None:
            return
        names = []
        for name, module in root.named_modules():
            if module in self._differentiated:
                names.append(repr(name or "(model)"))
        warn(DERIVATIVES.format(names=", ".join(names[:MAX_NAMES])))

    def receive(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        """Receive a pair from a compiled graph, which will reuse its memory."""
        if not self._counts(module):
            self.missed[module] = NOT_ACCUMULATED
            return
        # The running node stands for the whole graph. Each forward makes a new node, so
        # an earlier pass through this one came through the same forward.
        number = autograd.current_pass()
        with stage("statistics"):
            backward_pass = _Pass(number, autograd.has_earlier_pass(number))
            pair = (x.clone(), gradient.detach().clone())
            self._emit(module, pair, backward_pass)

    def _emit(
        self, module: nn.Module, pair: tuple[Any, Tensor] | None, backward_pass: _Pass
    ) -> None:
        """Hand a complete pair to the consumer, if its layer is still observed."""
        if pair is None or module not in self._observed:
            return
        x, d = pair
        number, again = backward_pass
        with autograd.without_modes(d.device):
            self._consumer.consume(module, x, d, number, again=again)

    # ------------------------------------------------------------------- sampled labels

    def enter_model(self) -> None:
        """Start a call of the model, without torch.compile if pairs are captured."""
        self._pending.clear()
        self._inside_model = True
        self._compiler = None
        if self.gate.open and torch.is_grad_enabled():
            # If the forward raises, Dynamo restores its callback itself.
            self._compiler = autograd.set_eval_frame(None)
            if self._compiler:
                warn(RUNS_EAGERLY)

    def leave_model(self, model: nn.Module, output: Any) -> None:
        """End a call of the model, and compute the gradients for sampled labels."""
        self._inside_model = False
        pending = self._pending
        self._pending = []
        if self._sampler is not None and pending:
            with stage("statistics"):
                self._sample(self._sampler, model, pending, output)
        if self._compiler is not None:
            autograd.set_eval_frame(self._compiler)
            self._compiler = None

    def _sample(
        self,
        sampler: Sampler,
        model: nn.Module,
        pending: Sequence[tuple[_NodeHook, GradientEdge]],
        output: Any,
    ) -> None:
        """Sample labels from the output, and keep the gradients of their loss."""
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            loss = sampler(output, self.root_calls)
        if not loss.requires_grad:
            return

        edges = [edge for _, edge in pending]
        try:
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                loss, edges, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            raise RuntimeError(REENTRANT) from error

        # The pairs count only when the user's own backward pass comes.
        for (hook, _), gradient in zip(pending, gradients, strict=True):
            if gradient is not None:
                hook.keep_sampled(_SampledGradient(gradient, self.root_calls))
        self.root_calls += 1


# Dynamo must not compile these functions as frames of their own. They set Dynamo's
# callback, which a compiled frame would restore when it returns. While Dynamo traces
# the model, it still inlines them, and BeforeModelHook breaks the graph then.
for _function in (
    BeforeModelHook.__call__,
    AfterModelHook.__call__,
    Capture.enter_model,
    Capture.leave_model,
):
    autograd.skip_code(_function.__code__)

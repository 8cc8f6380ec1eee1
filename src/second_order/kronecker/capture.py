"""Pairs of (layer input, gradient of the layer's output), captured during training passes.

A forward hook on the layer registers a hook on the *node* that makes the output. A hook on the
module's backward would wrap the output in a view and break in-place activations. The node's hook
sees the gradient with respect to the value that the layer produced, whatever happens to that tensor
afterwards, and it fires once however often a checkpointed forward is repeated.

A pair exists only when its gradient arrives, in a backward pass that accumulates into the ``.grad``
of the layer's own parameters. A forward without a backward (validation, batch-norm updates) leaves
nothing, and neither does ``torch.autograd.grad`` (gradient penalties, derivatives in a loss,
attacks on inputs), whose gradients are no loss's.

The input is kept the way autograd keeps its own inputs, through the saved-tensor hooks in force, so
activation checkpointing and offloading keep their memory savings.

In a model under ``torch.compile`` the hooks are traced with it, and the graph's backward delivers
the pairs (:mod:`second_order.kronecker.compiled_capture`).

The sampled Fisher needs another backward pass before the user's, which graphs do not allow. When
its statistics are due, the graph ends before the model, and the model runs without the compiler.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from second_order.distributed.fsdp import FSDPParams
from second_order.errors import SecondOrderError, SecondOrderWarning
from second_order.kronecker import autograd, compiled_capture
from second_order.kronecker.autograd import Assembly, is_attention, projections
from second_order.kronecker.compiled_capture import is_exporting, is_hidden
from second_order.kronecker.experts import Routed, is_experts
from second_order.utils.stages import stage

__all__ = ["Capture", "Gate", "input_in"]

Sampler = Callable[[Any, int], Tensor]

SCRIPTED = (
    "torch.jit.script cannot compile the hooks by which an optimizer of second_order watches this "
    "model; script it inside `with optimizer.hooks_removed():`, or after optimizer.close()"
)
TRANSFORMED = (
    "torch.func transforms (vmap, grad) show a layer's hooks no gradients; call the module outside "
    "of them, and backward() on its loss"
)
NOT_ACCUMULATED = (
    "gradients that torch.autograd.grad gives back end in no parameter's .grad and count for "
    "nothing, and backward() sends none through their outputs"
)
NOT_TENSORS = "it is not called with one tensor, or does not return one, alone or first of all"
CHANGED = "its input was changed in place after its forward"
CHECKPOINTED = (
    "inside checkpoint(..., use_reentrant=False) the input of an attention's out_proj cannot be "
    "read beside autograd; use use_reentrant=True, or leave the attention out of the checkpoint"
)
NOT_DRAWN = (
    "a fisher that samples labels cannot differentiate through a reentrant checkpoint; use "
    "checkpoint(..., use_reentrant=False), or fisher='empirical'"
)
RUNS_EAGERLY = (
    "fisher samples labels, for which the model runs without torch.compile at steps with "
    "statistics; fisher='empirical' has them from the compiled graph"
)
COMPILED = (
    "it is not called, or within torch.compile, which leaves nothing of the products of an "
    "attention, of fused experts or of their router to be seen: keep it out of the graph, "
    "module.forward = torch.compiler.disable(module.forward), or name it in skip_layers"
)
FULL_GRAPH = (
    "a fisher that samples labels runs the model without torch.compile at steps with statistics, "
    "where its graph ends: leave fullgraph off, or use fisher='empirical'"
)
COMPILED_PART = (
    "a fisher that samples labels runs the model without torch.compile at steps with statistics, "
    "and does not know of parts compiled by themselves, as by block.compile(), or called by "
    "themselves: compile the whole model that the optimizer was given, and call that, or use "
    "fisher='empirical'"
)


@dataclass
class Gate:
    """Whether pairs are wanted now; a condition of every graph that has the hooks in it."""

    open: bool = True

    def set(self, is_open: bool) -> None:
        """Open or close it for the passes to come."""
        self.open = is_open


# ------------------------------------------------------------------------------ hooks on modules


def _none() -> None:
    """What a copy of a hook has in place of weak references."""


class CaptureHook:
    """A hook of a capture on a module.

    It holds weak references, and its copies, pickled ones too, do nothing: a pickled or
    deep-copied model takes no optimizer along.
    """

    def __init__(self, capture: Capture | None = None, module: nn.Module | None = None) -> None:
        self.capture = _none if capture is None else weakref.ref(capture)
        self.module = _none if module is None else weakref.ref(module)
        self.gate = Gate(False) if capture is None else capture.gate

    @property
    def __name__(self) -> str:
        """Not there: torch.jit.script asks for it first, and shows this message."""
        raise AttributeError(SCRIPTED)

    def __reduce__(self) -> Any:
        return type(self), ()


class LayerHook(CaptureHook):
    """The hook on a layer, or on an ``nn.MultiheadAttention``, which calls none of its layers."""

    def __init__(self, capture: Capture | None = None, module: nn.Module | None = None) -> None:
        super().__init__(capture, module)
        self.sampled = capture is not None and capture.sampled
        self.anchor = compiled_capture.anchor_of(self)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """See a call; inside a graph, return the output as a watched one."""
        if is_exporting():
            return None
        if torch.compiler.is_dynamo_compiling():
            if not self.gate.open:
                return None
            if not is_hidden(module):
                x = input_in(args, kwargs)
                if not compiled_capture.is_watchable(module, x, output):
                    return None
                if self.sampled:
                    _refuse()
                return compiled_capture.watched(x, output, self.anchor)
            if "forward" in vars(module):  # a disabled forward, whose products can be seen
                _outside(self, module, args, kwargs, output)
            return None
        capture = self.capture()
        if capture is not None:
            capture.observe(module, args, kwargs, output)
        return None

    def receive(self, x: Tensor, gradient: Tensor) -> None:
        """Take a pair that the backward of a compiled graph delivers."""
        capture = self.capture()
        module = self.module()
        if capture is not None and module is not None:
            capture.receive(module, x, gradient)


class BeforeModelHook(CaptureHook):
    """The hook before the model's forward, for sampled labels."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """See the beginning; a graph ends here, so that Python calls the model."""
        if is_exporting():
            return
        if torch.compiler.is_dynamo_compiling():
            if torch.is_grad_enabled() and self.gate.open:
                _end_graph()
            return
        capture = self.capture()
        if capture is not None:
            capture.enter_model()


class AfterModelHook(CaptureHook):
    """The hook on the model's output, for sampled labels."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """See the output."""
        if is_exporting() or torch.compiler.is_dynamo_compiling():
            return
        capture = self.capture()
        if capture is not None:
            capture.leave_model(module, output)


@partial(torch.compiler.disable, reason="the attention's forward is kept out of the graph")
def _outside(hook: LayerHook, *call: Any) -> None:
    """See a call outside of the graph, where a disabled forward has been, too."""
    hook(*call)


@partial(torch.compiler.disable, reason=FULL_GRAPH)
def _end_graph() -> None:
    pass


@partial(torch.compiler.disable, reason=COMPILED_PART)
def _refuse() -> None:
    raise SecondOrderError(COMPILED_PART)


def input_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A layer's input among the arguments of its call, by keyword whatever its name is."""
    return args[0] if args else next((t for t in kwargs.values() if isinstance(t, Tensor)), None)


# ------------------------------------------------------------------------------- hooks on nodes


class _Product(NamedTuple):
    """A product with a weight in a layer's call."""

    module: nn.Module
    edge: GradientEdge  # of its output
    x: Any = None  # the input; None if autograd alone has it
    shape: torch.Size | None = None  # of the output; the gradient of its node need not have it
    thirds: tuple[int, ...] = ()  # of an attention, which of queries, keys and values
    assembly: Assembly | None = None  # puts an attention's pair together


class _Call:
    """Waits for the gradient of a product: a hook of its node, which must not hold the node.

    It keeps the input as autograd keeps its own.
    """

    def __init__(self, capture: Capture, product: _Product) -> None:
        self._capture = weakref.ref(capture)
        self._output = product.edge.output_nr
        # A reentrant checkpoint repeats its forward in every backward pass that comes through.
        self._outer_pass = autograd.current_pass()
        self._repeated = self._outer_pass != autograd.NO_PASS and autograd.passed_before(
            self._outer_pass
        )
        self._sampled: tuple[Tensor, int] | None = None
        self._read: Callable[[], Any] = autograd.input_of
        x = product.x
        if capture.sampled and x is not None:
            # Detached, as x may be changed in place and have the node behind it.
            self._read = x.detach().detach
        elif x is not None:
            self._read = x.kept() if isinstance(x, Routed) else autograd.keep(x)
        self.module = product.module
        self._shape = product.shape
        self._thirds = product.thirds
        self._assembly = product.assembly
        self.is_whole = product.assembly is None  # the call has no other product
        self._freed = False

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        """Take the gradients of the node's outputs."""
        capture = self._capture()
        gradient = gradients[self._output]
        if capture is None or gradient is None or self._freed:
            return
        with stage("statistics"):
            capture.take(self, gradient)
        if not autograd.keeps_graph():
            # Autograd frees its own inputs now, however long the loss is kept.
            self._freed = True
            self._read = autograd.input_of

    def pair(self, gradient: Tensor) -> tuple[Any, Tensor] | None:
        """The pair of the call; None if others of its products are awaited."""
        x = self._read().detach()
        d = gradient.detach()
        if self._assembly is not None:
            return self._assembly.add(self._thirds, x, d)
        return x, d if self._shape is None else d.reshape(self._shape)

    def number_of_pass(self) -> tuple[int, bool]:
        """The number of the pass that has come, and whether another came through before.

        A reentrant checkpoint runs a backward pass inside another, in which the forward was
        repeated: the outer one is meant.
        """
        if self._outer_pass != autograd.NO_PASS:
            return self._outer_pass, self._repeated
        number = autograd.current_pass()
        return number, autograd.passed_before(number)

    def keep_sampled(self, gradient: Tensor, number: int) -> None:
        """Keep the gradient for sampled labels until the user's own pass comes by."""
        self._sampled = (gradient, number)

    def pop_sampled(self) -> tuple[Tensor, int] | None:
        """That gradient, and the number of its pass; once."""
        sampled = self._sampled
        self._sampled = None
        return sampled


def _edge_of(output: Tensor) -> GradientEdge:
    """The edge to an output's values, which operations in place leave in the graph.

    A biased Linear's output on three or more dimensions is a view of a product. An operation in
    place changes the product's history and gives the view another node.
    """
    edge = get_gradient_edge(output)
    if edge.node.name() != "ViewBackward0":
        return edge
    node, number = edge.node.next_functions[0]
    if node is None or hasattr(node, "variable"):  # a leaf's, which would keep the hook
        return edge
    return GradientEdge(node, number)


# ------------------------------------------------------------------------------------- captures


class Capture:
    """Watches a set of layers and hands their pairs to a consumer.

    ``consumer`` receives the pairs it wants, under ``no_grad`` and without autocast; ``fsdp`` is
    what FSDP2 does with parameters; ``accumulated``: passes count that accumulate into the layer's
    parameters, and no others.

    ``sampler(model_output, call)`` is the sampled Fisher's: it samples labels from the model's
    output and returns the summed negative log-likelihood. The pairs then carry that loss's
    gradients, taken as soon as the root module's forward returns and delivered when the user's
    backward comes by; no parameter's ``.grad`` is touched.

    Attributes:
        gate: Whether pairs of the passes to come are captured, by compiled graphs, too.
        missed: By layer, why its last lost pair did not count.
        root_calls: The calls of the model for which labels were sampled.
    """

    def __init__(
        self,
        consumer: Any,
        sampler: Sampler | None = None,
        fsdp: FSDPParams | None = None,
        accumulated: bool = True,
    ) -> None:
        self.gate = Gate()
        self.fsdp = fsdp
        self._accumulated = accumulated
        self._consumer = consumer
        self._sampler = sampler
        self.missed: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.root_calls = 0
        self._observed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: list[CaptureHook] = []
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)
        # For sampled labels:
        self._inside_model = False
        self._pending: list[tuple[_Call, GradientEdge]] = []
        self._compiler: Any = None  # what compiles where the model is called, while it runs eagerly

    @property
    def sampled(self) -> bool:
        """Whether the pairs are those of sampled labels."""
        return self._sampler is not None

    def attach(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Watch exactly these layers. The hooks on others stay, because compiled graphs have them.

        A graph that has been compiled does not look for new hooks.
        """
        layers = list(layers)
        self._observed = weakref.WeakSet(layers)
        self._pending.clear()
        # The calls of an attention are those of its `out_proj`, too.
        attention = filter(is_attention, root.modules())
        within = {cast(nn.Module, module.out_proj): module for module in attention}
        for layer in (*within, *within.values(), *filter(is_hidden, layers)):
            self.missed.setdefault(layer, COMPILED)
        called = dict.fromkeys(within.get(layer, layer) for layer in layers)
        wanted: list[tuple[nn.Module, type[CaptureHook]]] = [(m, LayerHook) for m in called]
        if self.sampled and layers:
            wanted += [(root, BeforeModelHook), (root, AfterModelHook)]
        hooked = {(hook.module(), type(hook)) for hook in self._hooks}
        hooks = [kind(self, module) for module, kind in wanted if (module, kind) not in hooked]
        self._register(hooks)
        self._hooks += hooks

    def _register(self, hooks: Iterable[CaptureHook]) -> None:
        for hook in hooks:
            module = hook.module()
            function: Any = hook
            if module is None:
                continue
            if isinstance(hook, BeforeModelHook):
                handle = module.register_forward_pre_hook(function)
            else:
                with_kwargs = isinstance(hook, LayerHook)
                handle = module.register_forward_hook(function, with_kwargs=with_kwargs)
            self._handles.append(handle)

    def detach(self) -> None:
        """Watch nothing any more, forget pairs in flight, and remove every hook."""
        _remove(self._handles)
        self._hooks.clear()
        self._observed = weakref.WeakSet()
        self._pending.clear()

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Take the hooks off the watched modules for a block."""
        _remove(self._handles)
        try:
            yield
        finally:
            _remove(self._handles)
            self._register(self._hooks)

    # --------------------------------------------------------------------------- what hooks see

    def observe(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """See a call of a layer; in a training pass, wait for the gradient of its output."""
        if not self.gate.open or cast(Any, torch.jit).is_tracing():
            return
        attention = is_attention(module)
        both = (module, cast(nn.Module, module.out_proj)) if attention else (module,)
        layers = [each for each in both if each in self._observed and self._consumer.wants(each)]
        if autograd.transformed():
            self.missed.update(dict.fromkeys(layers, TRANSFORMED))
            return
        unseen = self.sampled and not self._inside_model
        if not layers or unseen or not torch.is_grad_enabled():
            return
        if isinstance(output, tuple) and output:  # a router's logits, an attention's output
            output = output[0]
        with stage("statistics"):
            if attention:
                products = self._of_attention(module, args, kwargs, output)
            else:
                products = self._of_layer(module, args, kwargs, output)
            for product in products:
                if product.module not in layers:
                    continue
                call = _Call(self, product)
                if self.sampled:
                    self._pending.append((call, product.edge))
                cast(Any, product.edge.node).register_prehook(call)

    def _of_layer(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[_Product]:
        """The product of a layer whose output is that of its product."""
        x: Any = Routed.of_call(args, kwargs) if is_experts(module) else input_in(args, kwargs)
        if not isinstance(x, (Tensor, Routed)) or not isinstance(output, Tensor):
            self.missed[module] = NOT_TENSORS
            return []
        if not output.requires_grad:
            return []
        shape = output.shape
        if isinstance(x, Tensor):
            if len(shape) == 2 < x.dim() and x.shape[:-1].numel() == len(output):
                # A router's input is of shape (batch, positions, in).
                shape = torch.Size([*x.shape[:-1], shape[-1]])
            x = autograd.as_used(x)
        return [_Product(module, _edge_of(output), x, shape)]

    def _of_attention(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
    ) -> list[_Product]:
        """The products of an attention."""
        if not output.requires_grad:
            return []
        inputs, found = projections(module, args, kwargs, output, self.fsdp)
        assembly = Assembly(len(inputs[0]))
        saving: Any = autograd.saving_hooks(True)  # a checkpoint's save nothing
        checkpointed = bool(saving) and saving[0].__module__ == "torch.utils.checkpoint"
        products = []
        for owner, node, thirds in found:
            edge = GradientEdge(node, 0)
            if owner is module:
                x = autograd.as_used(inputs[thirds[0]])
                product = _Product(owner, edge, x, thirds=thirds, assembly=assembly)
                products.append(product)
            elif checkpointed:
                # Of the output's projection autograd alone has the input.
                self.missed[owner] = CHECKPOINTED
            else:
                products.append(_Product(owner, edge, assembly=assembly))
        return products

    # --------------------------------------------------------------------------------- gradients

    def take(self, call: _Call, gradient: Tensor) -> None:
        """Take the gradient that a call has waited for; with sampled labels, deliver their pair."""
        module = call.module
        if self._accumulated and not autograd.reaches_parameters(module, self.fsdp):
            if not self.sampled:  # else it may be the pass of sampled labels
                self.missed[module] = NOT_ACCUMULATED
            return
        if self.sampled:
            sampled = call.pop_sampled()
            if sampled is not None:
                self._emit(module, call.pair(sampled[0]), sampled[1], False)
            if call.is_whole:
                with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                    self._consumer.look(module, *cast(Any, call.pair(gradient)))
            return
        try:
            pair = call.pair(gradient)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            # Legal where the layer worked on a copy, as of a transposed input; ours is gone.
            self.missed[module] = CHANGED
            return
        self._emit(module, pair, *call.number_of_pass())

    def receive(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        """Take a pair that the backward of a compiled graph delivers; its memory is the graph's."""
        if not autograd.reaches_parameters(module, self.fsdp):
            self.missed[module] = NOT_ACCUMULATED
            return
        # The node is the whole graph's; a forward makes a new one, a second backward does not.
        number = autograd.current_pass()
        with stage("statistics"):
            again = autograd.passed_before(number)
            self._emit(module, (x.clone(), gradient.clone()), number, again)

    def _emit(
        self, module: nn.Module, pair: tuple[Any, Tensor] | None, pass_id: int, again: bool
    ) -> None:
        """Hand a pair to the consumer, unless its layer was let go while it was in flight."""
        if pair is not None and module in self._observed:
            x, d = pair
            with torch.no_grad(), torch.autocast(d.device.type, enabled=False):
                self._consumer.consume(module, x, d.detach(), pass_id, again=again)

    # ---------------------------------------------------------------------------- sampled labels

    def enter_model(self) -> None:
        """See the beginning of the model's forward, and let it run without a compiler."""
        self._pending.clear()
        self._inside_model = True
        self._compiler = None
        if self.gate.open and torch.is_grad_enabled():
            # A compiler puts itself back, too, where the forward raises.
            self._compiler = autograd.set_eval_frame(None)
            if self._compiler:
                warnings.warn(RUNS_EAGERLY, SecondOrderWarning, stacklevel=2)

    def leave_model(self, model: nn.Module, output: Any) -> None:
        """See the model's output: sample labels from it, and take the gradients of their loss."""
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
        pending: Sequence[tuple[_Call, GradientEdge]],
        output: Any,
    ) -> None:
        """Take the gradients of the loss on labels sampled from the model's output."""
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
            raise RuntimeError(NOT_DRAWN) from error
        # These pairs count once the user's own backward comes by, and not before.
        for (call, _), gradient in zip(pending, gradients, strict=True):
            if gradient is not None:
                call.keep_sampled(gradient, self.root_calls)
        self.root_calls += 1


def _remove(handles: list[RemovableHandle]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()
    handles.clear()


# Python runs them, as what they do to the compiler is to last beyond their calls.
for _function in (
    BeforeModelHook.__call__,
    AfterModelHook.__call__,
    Capture.enter_model,
    Capture.leave_model,
):
    autograd.skip_code(_function.__code__)

"""Pairs of (layer input, gradient of the layer's output), caught as they come into being.

The gradient is taken by a hook on the *node* that makes the output. A hook on the module's backward
would wrap the output in a view and break in-place activations; the node's hook sees the gradient
with respect to the value the layer produced, whatever happens to that tensor afterwards, and it
fires once however often a checkpointed forward is repeated. A pair exists only when its gradient
arrives, in a backward pass that goes on to accumulate into the ``.grad`` of the layer's own
parameters: a forward that never sees a backward (validation, batch-norm updates) leaves nothing,
and neither does ``torch.autograd.grad`` (gradient penalties, derivatives in a loss, attacks on
inputs), whose gradients are no loss's.

The input is kept the way autograd keeps its own inputs, through the saved-tensor hooks in force, so
activation checkpointing and offloading keep their memory savings.

In a model under ``torch.compile`` the hooks are traced with it, and the graph's backward hands the
pairs over (:mod:`second_order.kronecker.hooks`). Drawn labels need another backward pass before the
user's, which graphs do not allow: where they are due, the model runs without the compiler.

Hooks find their :class:`Capture` through weak references. A model that is exported or traced is not
watched meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from second_order.kronecker import autograd, hooks
from second_order.kronecker.attention import Assembly, input_of, is_attention, projections
from second_order.kronecker.hooks import Gate, Watch, WatchHook, hook_of, input_in, release
from second_order.sharded import FSDPParams

__all__ = ["Capture"]

Sampler = Callable[[Any, int], Tensor]
ALONE = -1  # the number of an input of which it is not known what else is called on it
TRANSFORMED = (
    "torch.func transforms (vmap, grad) show a layer's hooks no gradients; call the module outside "
    "of them, and backward() on its loss"
)
NOT_ACCUMULATED = (
    "gradients that torch.autograd.grad gives back end in no parameter's .grad and count for "
    "nothing, and backward() sends none through their outputs"
)
NOT_TENSORS = "it is not called with one tensor, or does not return one"
CHANGED = "its input was changed in place after its forward"
CHECKPOINTED = (
    "inside checkpoint(..., use_reentrant=False) the input of an attention's out_proj cannot be "
    "read beside autograd; use use_reentrant=True, or leave the attention out of the checkpoint"
)
RUNS_EAGERLY = (
    "fisher='sampled' draws labels, for which the model runs without torch.compile at steps with "
    "statistics; fisher='empirical' has them from the compiled graph"
)
COMPILED = (
    "torch.compile leaves nothing of an attention's products to be seen; keep it out of the graph, "
    "attention.forward = torch.compiler.disable(attention.forward), or name it in skip_layers"
)

_FIRST_REPEATED = "second_order: the first backward pass that repeated a forward"
_FIRST_PASS = "second_order: the first backward pass through a compiled graph"


@dataclass
class _Call:
    """A call of a layer whose output's gradient is awaited."""

    module: nn.Module
    read: Callable[[], Tensor] | None  # the input; None once autograd has freed its own
    source: int  # a number of the input, as in `StatisticsCollector.consume`
    outer: int = autograd.NO_PASS  # the backward pass in which the layer was called, if any
    used: bool = False  # a backward pass has come through this call
    looks: bool = False  # the pair is one beside those of drawn labels
    shape: torch.Size | None = None  # of the output; the gradient of its node need not have it
    thirds: tuple[int, ...] = ()  # of an attention, the product whose gradient is awaited
    assembly: Assembly | None = None  # puts an attention's pair together

    def pair(self, gradient: Tensor) -> tuple[Tensor, Tensor] | None:
        """The pair of the call; None if others of its products are awaited."""
        assert self.read is not None
        x, d = self.read().detach(), gradient.detach()
        if self.assembly is not None:
            return self.assembly.add(self.thirds, x, d)
        return x, d if self.shape is None else d.reshape(self.shape)


def _node_hook(
    capture: weakref.ref[Capture], call: _Call, output: int, gradients: tuple[Any, ...]
) -> None:
    alive, gradient = capture(), gradients[output]
    if alive is None or call.read is None or gradient is None or autograd.is_drawing():
        return
    with alive.timed():
        alive.take(call, gradient)


def _node_of(output: Tensor) -> GradientEdge:
    """The node that makes an output's values, which operations in place leave in the graph.

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


def _delivery_hook(
    capture: weakref.ref[Capture],
    pairs: list[tuple[nn.Module, Tensor, int, Tensor]],
    pass_id: int,
    gradient: Tensor,
) -> None:
    alive = capture()
    if alive is None or autograd.is_drawing():
        return
    with alive.timed():
        reached = {module: autograd.reaches_parameters(module, alive.fsdp) for module, *_ in pairs}
        delivered = [pair for pair in pairs if reached[pair[0]]]
        pairs[:] = [pair for pair in pairs if not reached[pair[0]]]
        for module, x, source, d in delivered:
            alive.emit(module, x, d, pass_id, source, False)


def _repeated_in() -> tuple[int, bool]:
    """The id of the backward pass that repeats this forward, and if an earlier pass has.

    A reentrant checkpoint repeats its forward in each pass that comes through; its node is the
    same.
    """
    outer = autograd.current_pass()
    if outer == autograd.NO_PASS:
        return outer, False
    metadata = getattr(autograd.current_node(), "metadata", {})
    return outer, bool(metadata.setdefault(_FIRST_REPEATED, outer) != outer)


class Capture:
    """Watches a set of layers and hands their pairs to a consumer.

    ``consumer`` receives every pair, under ``no_grad`` and without autocast: a
    :class:`~second_order.kronecker.collector.StatisticsCollector`. ``wanted`` tells whether a
    module's pairs are wanted now, if None where its weight trains; ``timed`` makes a context
    manager that measures the work of a hook; ``fsdp`` knows what FSDP2 does with the parameters.

    ``sampler(model_output, call)`` is the sampled Fisher's: it draws labels from the model's output
    and returns the summed negative log-likelihood. The pairs then carry that loss's gradients,
    taken as soon as the root module's forward returns and delivered when the user's backward
    reaches its output; no parameter's ``.grad`` is touched.

    ``gate.open`` tells whether pairs of the passes to come are captured, by compiled graphs, too;
    ``missed`` has, by layer, why its last lost pair did not count.
    """

    def __init__(
        self,
        consumer: Any,
        sampler: Sampler | None = None,
        wanted: Callable[[nn.Module], bool] | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
        fsdp: FSDPParams | None = None,
    ) -> None:
        self.gate, self.timed, self.fsdp = Gate(), timed, fsdp
        self._wanted = wanted or (lambda module: cast(Tensor, module.weight).requires_grad)
        self._consumer, self._sampler = consumer, sampler
        self.missed: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._observed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._model: weakref.ref[nn.Module] | None = None  # whose layers are observed
        self.root_calls = 0
        self._inside_root = self._told = False
        self._pending: list[tuple[_Call, GradientEdge]] = []
        self._compiler: Any = None  # what compiles where the model is called, while it runs eagerly
        self._last_input: tuple[weakref.ref[Tensor], int] | None = None
        self._sources = self._last_version = 0
        self._watches: list[Watch] = []
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        weakref.finalize(self, release, self._hooked)

    def attach(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Watch exactly these layers, and no longer those from before, whose hooks stay.

        A graph that has been compiled meets no new hooks, but looks who watches by those it has.
        """
        layers = list(layers)
        if layers and set(layers) == set(self._observed):
            return
        self._dismiss()
        self._observed, self._model = weakref.WeakSet(layers), weakref.ref(root)
        # The calls of an attention are those of its `out_proj`, too.
        within = {module.out_proj: module for module in root.modules() if is_attention(module)}
        called = dict.fromkeys(within.get(layer, layer) for layer in layers)
        kinds: list[tuple[nn.Module, type[WatchHook]]] = [(m, hooks.LayerHook) for m in called]
        if self._sampler is not None and layers:
            kinds += [(root, hooks.RootPreHook), (root, hooks.RootHook)]
        for module, kind in kinds:
            watch = Watch(self, module, self.gate, self._sampler is not None)
            hook_of(module, kind).watches.append(watch)
            self._watches.append(watch)
            self._hooked.add(module)

    def detach(self) -> None:
        """Remove every hook and forget pairs in flight."""
        self._dismiss()
        release(self._hooked)
        self._hooked.clear()
        self._model = None

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Take the hooks off the watched modules for a block."""
        model, layers = self._model, list(self._observed)
        self.detach()
        self._model = model
        try:
            yield
        finally:
            # Unless it was detached, or attached to others, meanwhile.
            if self._model is model and not self._observed and model is not None:
                self.attach(cast(nn.Module, model()), layers)

    def _dismiss(self) -> None:
        """Watch nothing any more; the hooks stay."""
        for watch in self._watches:
            watch.gone = True
        self._watches.clear()
        release(self._hooked, keep=True)
        self._observed = weakref.WeakSet()
        self._pending.clear()

    # --------------------------------------------------------------------------- what hooks see

    def observe(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """See a call of a layer; in a training pass, wait for the gradient of its output."""
        if not self.gate.open or cast(Any, torch.jit).is_tracing():
            return
        attention = is_attention(module)
        both = (module, cast(nn.Module, module.out_proj)) if attention else (module,)
        layers = [layer for layer in both if layer in self._observed]
        if autograd.transformed():
            self.missed.update(dict.fromkeys(layers, TRANSFORMED))
            return
        wanted = [layer for layer in layers if self._wanted(layer)]
        if not (wanted and torch.is_grad_enabled()):
            return
        x = None if attention else input_in(args, kwargs)
        if not attention and not (isinstance(x, Tensor) and isinstance(output, Tensor)):
            self.missed[module] = NOT_TENSORS
        elif (output[0] if attention else output).requires_grad:
            with self.timed():
                if x is None:
                    self._observe_attention(module, args, kwargs, output[0], wanted)
                    return
                source, shape = self._source_of(x), output.shape
                self._remember(module, _node_of(output), autograd.as_used(x), source, shape=shape)

    def _observe_attention(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Tensor,
        wanted: Sequence[nn.Module],
    ) -> None:
        """Wait for the gradients of an attention's products."""
        inputs, products = projections(module, args, kwargs, output, self.fsdp)
        whole, apart = Assembly(len(inputs[0])), Assembly(len(inputs[0]))
        unseen = set(wanted).difference(product.owner for product in products)
        self.missed.update(dict.fromkeys(unseen, COMPILED))
        saving: Any = autograd.saving_hooks(True)  # a checkpoint's save nothing
        checkpointed = bool(saving) and saving[0].__module__ == "torch.utils.checkpoint"
        for owner, node, thirds in products:
            if owner not in wanted:
                continue
            if owner is not module and checkpointed:
                self.missed[owner] = CHECKPOINTED
                continue
            # Of the output's projection autograd alone has the input.
            x = autograd.as_used(inputs[thirds[0]]) if owner is module else None
            assembly, edge = whole if owner is module else apart, GradientEdge(node, 0)
            self._sources += 1
            self._remember(owner, edge, x, self._sources, thirds=thirds, assembly=assembly)

    def miss_attention(self, module: nn.Module) -> None:
        """Note a call of an attention inside a graph, where nobody sees its products."""
        layers = module, cast(nn.Module, module.out_proj)
        self.missed.update(dict.fromkeys(layers, COMPILED))

    def _remember(
        self, module: nn.Module, edge: GradientEdge, x: Tensor | None, source: int, **more: Any
    ) -> None:
        """Wait for the gradient that comes to a node; with drawn labels, until they are drawn."""
        if self._sampler is None:
            read = input_of if x is None else autograd.keep(x)  # a hook of a node must not hold it
            call = _Call(module, read, source, *_repeated_in(), **more)
        elif self._inside_root:
            read = partial(input_of, edge.node) if x is None else x.detach
            self._pending.append((_Call(module, read, source, **more), edge))
            if "assembly" in more or not self._consumer.looks(module):
                return
            call = _Call(module, read, source, *_repeated_in(), looks=True, **more)
        else:
            return
        hook = partial(_node_hook, weakref.ref(self), call, edge.output_nr)
        cast(Any, edge.node).register_prehook(hook)

    def _source_of(self, x: Tensor) -> int:
        """A number for an input as it is now, the same if the last layer had the same input."""
        last = self._last_input
        if last is None or last[0]() is not x or self._last_version != x._version:
            self._sources += 1
            self._last_input, self._last_version = (weakref.ref(x), self._sources), x._version
        return self._sources

    # --------------------------------------------------------------------------------- gradients

    def take(self, call: _Call, gradient: Tensor) -> None:
        """Take the gradient that a call has waited for."""
        if autograd.reaches_parameters(call.module, self.fsdp):
            # A reentrant checkpoint runs a backward pass inside another, in which the forward was
            # repeated: the outer one is meant.
            pass_id = autograd.current_pass() if call.outer == autograd.NO_PASS else call.outer
            try:
                pair = call.pair(gradient)
            except RuntimeError as error:
                if "inplace operation" not in str(error):
                    raise
                # Legal where the layer worked on a copy, as of a transposed input; ours is gone.
                self.missed[call.module] = CHANGED
                return
            again, call.used = call.used, True
            if pair is not None and call.looks:
                with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                    self._consumer.look(call.module, *pair)
            elif pair is not None:
                self.emit(call.module, *pair, pass_id, call.source, again)
        else:
            self.missed[call.module] = NOT_ACCUMULATED
        if not autograd.keeps_graph():
            call.read = None  # autograd frees its own inputs now, however long the loss is kept

    def receive(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        """Take a pair that the backward of a compiled graph delivers; its memory is the graph's."""
        if autograd.is_drawing():
            return
        with self.timed():
            if not autograd.reaches_parameters(module, self.fsdp):
                self.missed[module] = NOT_ACCUMULATED
                return
            # The node is the whole graph's; a forward makes a new one, a second backward does not.
            # A backward that is compiled as a whole has no nodes, and runs once.
            pass_id = autograd.current_pass()
            metadata = getattr(autograd.current_node(), "metadata", {})
            again = bool(metadata.setdefault(_FIRST_PASS, pass_id) != pass_id)
            self.emit(module, x, gradient, pass_id, ALONE, again)

    def emit(
        self, module: nn.Module, x: Tensor, d: Tensor, pass_id: int, source: int, again: bool
    ) -> None:
        """Hand a pair to the consumer, unless its layer was let go while it was in flight."""
        if module in self._observed:
            with torch.no_grad(), torch.autocast(d.device.type, enabled=False):
                self._consumer.consume(module, x, d.detach(), pass_id, source, again)

    # ------------------------------------------------------------------------------ drawn labels

    def enter_root(self, module: nn.Module) -> None:
        """See the beginning of the model's forward, and let it run without a compiler."""
        self._pending.clear()
        self._inside_root, self._compiler = True, None
        if self.gate.open and torch.is_grad_enabled():
            # A compiler puts itself back, too, where the forward raises.
            self._compiler = autograd.set_eval_frame(None)
            if self._compiler and not self._told:
                self._told = True
                self._consumer.warn(RUNS_EAGERLY)

    def leave_root(self, module: nn.Module, output: Any) -> None:
        """See the model's output: draw labels from it, and take the gradients of their loss."""
        self._inside_root = False
        pending, self._pending = self._pending, []
        if self._sampler is not None and pending:
            with self.timed():
                self._draw(self._sampler, module, pending, output)
        if self._compiler is not None:
            autograd.set_eval_frame(self._compiler)
            self._compiler = None

    def _draw(
        self,
        sampler: Sampler,
        root: nn.Module,
        pending: Sequence[tuple[_Call, GradientEdge]],
        output: Any,
    ) -> None:
        """Take the gradients of the loss on labels drawn from the root's output."""
        with torch.autocast(next(root.parameters()).device.type, enabled=False):
            loss = sampler(output, self.root_calls)
        if not loss.requires_grad:
            return
        ends = [edge for *_, edge in pending]
        try:
            with autograd.drawing_from(loss):
                gradients: Sequence[Tensor | None] = torch.autograd.grad(
                    loss, ends, retain_graph=True, allow_unused=True
                )
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            raise RuntimeError(
                "fisher='sampled' cannot differentiate through a reentrant checkpoint; use "
                "checkpoint(..., use_reentrant=False), or fisher='empirical'"
            ) from error
        pairs = []
        for (call, _), gradient in zip(pending, gradients, strict=True):
            if gradient is not None and (pair := call.pair(gradient)) is not None:
                pairs.append((call.module, pair[0], call.source, pair[1]))
        # These pairs count once the user's own backward reaches the output, and not before.
        deliver = partial(_delivery_hook, weakref.ref(self), pairs, self.root_calls)
        for tensor in autograd.differentiable_tensors(output):
            tensor.register_hook(deliver)
        self.root_calls += 1


for _function in (Capture.enter_root, Capture.leave_root):
    autograd.skip_code(_function.__code__)

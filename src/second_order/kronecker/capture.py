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

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from second_order.kronecker import autograd, hooks
from second_order.kronecker.autograd import Assembly, input_of, is_attention, projections
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.experts import Routed, is_experts
from second_order.kronecker.factors import Reduction, StagedStatistics, end_pass
from second_order.kronecker.hooks import Gate, Watch, WatchHook, hook_of, input_in, release
from second_order.kronecker.layers import (
    CONVOLUTIONS,
    Approximation,
    Form,
    LiveRows,
    PairStatistics,
    all_rows,
    linear_statistics,
)
from second_order.kronecker.queued import PairQueue, QueuedPair, Rows, SeenRows, WaitingPair
from second_order.kronecker.rows import (
    BackwardPass,
    LateCount,
    LatePair,
    LateRows,
    Ledger,
    Terms,
    rows_of,
)
from second_order.sharded import FSDPParams
from second_order.stages import span

__all__ = ["Capture", "GradientScale", "StatisticsCollector"]

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
NOT_TENSORS = "it is not called with one tensor, or does not return one, alone or first of all"
CHANGED = "its input was changed in place after its forward"
CHECKPOINTED = (
    "inside checkpoint(..., use_reentrant=False) the input of an attention's out_proj cannot be "
    "read beside autograd; use use_reentrant=True, or leave the attention out of the checkpoint"
)
NOT_DRAWN = (
    "fisher='sampled' cannot differentiate through a reentrant checkpoint; use "
    "checkpoint(..., use_reentrant=False), or fisher='empirical'"
)
LOSSES_APART = (
    "several backward passes of a step come through one forward pass: curvature is that of each "
    "loss alone, without what the losses have in common; add the losses up, and call backward() "
    "on their sum"
)
RUNS_EAGERLY = (
    "fisher='sampled' draws labels, for which the model runs without torch.compile at steps with "
    "statistics; fisher='empirical' has them from the compiled graph"
)
COMPILED = (
    "it is not called, or within torch.compile, which leaves nothing of the products of an "
    "attention, of fused experts or of their router to be seen: keep it out of the graph, "
    "module.forward = torch.compiler.disable(module.forward), or name it in skip_layers"
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
    shape: torch.Size | None = None  # of the output; the gradient of its node need not have it
    thirds: tuple[int, ...] = ()  # of an attention, the product whose gradient is awaited
    assembly: Assembly | None = None  # puts an attention's pair together
    drawn: tuple[Tensor, Tensor, int] | None = None  # the pair of drawn labels, and their number

    def pair(self, gradient: Tensor, node: Any = None) -> tuple[Tensor, Tensor] | None:
        """The pair of the call; None if others of its products are awaited."""
        assert self.read is not None
        x = input_of(node) if self.read is input_of else self.read()
        x, d = x.detach(), gradient.detach()
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

    ``consumer`` receives the pairs it wants, under ``no_grad`` and without autocast; ``timed``
    makes a context manager that measures a hook; ``fsdp`` is what FSDP2 does with parameters;
    ``accumulated``: passes count that accumulate into the layer's parameters, and no others.

    ``sampler(model_output, call)`` is the sampled Fisher's: it draws labels from the model's output
    and returns the summed negative log-likelihood. The pairs then carry that loss's gradients,
    taken as soon as the root module's forward returns and delivered when the user's backward comes
    by; no parameter's ``.grad`` is touched.

    ``gate.open`` tells whether pairs of the passes to come are captured, by compiled graphs, too;
    ``missed`` has, by layer, why its last lost pair did not count.
    """

    def __init__(
        self,
        consumer: Any,
        sampler: Sampler | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
        fsdp: FSDPParams | None = None,
        accumulated: bool = True,
    ) -> None:
        self.gate, self.timed, self.fsdp = Gate(), timed, fsdp
        self._accumulated = accumulated
        self._consumer, self._sampler = consumer, sampler
        self.missed: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._observed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._model: weakref.ref[nn.Module] | None = None  # whose layers are observed
        self.root_calls = 0
        self._inside_root = self._told = False
        self._pending: list[tuple[_Call, GradientEdge]] = []
        self._compiler: Any = None  # what compiles where the model is called, while it runs eagerly
        self._last_input: tuple[weakref.ref[Tensor], int] | None = None
        self._sources = 0  # numbers of inputs
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
        self.detach(keep=True)
        self._observed, self._model = weakref.WeakSet(layers), weakref.ref(root)
        # The calls of an attention are those of its `out_proj`, too.
        attention = filter(is_attention, root.modules())
        within = {cast(nn.Module, module.out_proj): module for module in attention}
        for layer in (*within, *within.values(), *filter(hooks.is_hidden, layers)):
            self.missed.setdefault(layer, COMPILED)
        called = dict.fromkeys(within.get(layer, layer) for layer in layers)
        kinds: list[tuple[nn.Module, type[WatchHook]]] = [(m, hooks.LayerHook) for m in called]
        if self._sampler is not None and layers:
            kinds += [(root, hooks.RootPreHook), (root, hooks.RootHook)]
        for module, kind in kinds:
            watch = Watch(self, module, self.gate, self._sampler is not None)
            hook_of(module, kind).watches.append(watch)
            self._watches.append(watch)
            self._hooked.add(module)

    def detach(self, keep: bool = False) -> None:
        """Watch nothing any more, forget pairs in flight, and remove every hook, or keep them."""
        for watch in self._watches:
            watch.gone = True
        self._watches.clear()
        release(self._hooked, keep=keep)
        self._observed = weakref.WeakSet()
        self._pending.clear()
        if not keep:
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
        wanted = [layer for layer in layers if self._consumer.wants(layer)]
        if not (wanted and torch.is_grad_enabled()):
            return
        x: Any = input_in(args, kwargs)
        if is_experts(module):
            x = Routed.of_call(args, kwargs)
        if isinstance(output, tuple) and output:  # a router's logits, an attention's output
            output = output[0]
        if not attention and not (isinstance(x, (Tensor, Routed)) and isinstance(output, Tensor)):
            self.missed[module] = NOT_TENSORS
        elif output.requires_grad:
            with self.timed():
                if attention:
                    self._observe_attention(module, args, kwargs, output, wanted)
                    return
                last, node, shape = self._last_input, _node_of(output), output.shape
                if isinstance(x, Routed):
                    self._remember(module, node, x, ALONE, shape=shape)
                    return
                rows, flat = x.shape[:-1], len(shape) == 2 < x.dim()
                if flat and rows.numel() == len(output):  # a router's, of (batch, positions, in)
                    shape = torch.Size((*rows, shape[-1]))
                if last is None or last[1] != x._version or last[0]() is not x:
                    self._sources += 1
                    self._last_input = weakref.ref(x), x._version
                self._remember(module, node, autograd.as_used(x), self._sources, shape=shape)

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

    def _remember(
        self, module: nn.Module, edge: GradientEdge, x: Any, source: int, **more: Any
    ) -> None:
        """Wait for the gradient that comes to a node; no hook of the node may hold it."""
        sampled = self._sampler is not None
        if sampled and not self._inside_root:
            return
        read: Any = input_of
        if x is not None:
            # Detached, as x may be changed in place and have the node behind it.
            keep = x.kept if isinstance(x, Routed) else partial(autograd.keep, x)
            read = x.detach().detach if sampled else keep()
        call = _Call(module, read, source, *_repeated_in(), **more)
        if sampled:
            self._pending.append((call, edge))
        hook = partial(_node_hook, weakref.ref(self), call, edge.output_nr)
        cast(Any, edge.node).register_prehook(hook)

    # --------------------------------------------------------------------------------- gradients

    def take(self, call: _Call, gradient: Tensor) -> None:
        """Take the gradient that a call has waited for; with drawn labels, deliver their pair."""
        if self._accumulated and not autograd.reaches_parameters(call.module, self.fsdp):
            self.missed[call.module] = NOT_ACCUMULATED
        elif self._sampler is not None:
            drawn, call.drawn = call.drawn, None
            if drawn is not None:
                x, d, number = drawn
                self.emit(call.module, x, d, number, call.source, False)
            if call.assembly is None:
                with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                    self._consumer.look(call.module, *cast(Any, call.pair(gradient)))
        else:
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
            if pair is not None:
                self.emit(call.module, *pair, pass_id, call.source, again)
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
        edges = [edge for _, edge in pending]
        try:
            with autograd.drawing_from(loss):
                gradients: Sequence[Tensor | None] = torch.autograd.grad(
                    loss, edges, retain_graph=True, allow_unused=True
                )
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            raise RuntimeError(NOT_DRAWN) from error
        # These pairs count once the user's own backward comes by, and not before.
        for (call, edge), gradient in zip(pending, gradients, strict=True):
            if gradient is not None and (pair := call.pair(gradient, edge.node)) is not None:
                call.drawn = (*pair, self.root_calls)
        self.root_calls += 1


for _function in (Capture.enter_root, Capture.leave_root):
    autograd.skip_code(_function.__code__)


# ------------------------------------------------------------------------ from pairs to statistics


@dataclass(frozen=True)
class GradientScale:
    """The factor for captured gradients that undoes a GradScaler."""

    scaler: Any

    def __call__(self, gradient: Tensor) -> Tensor | float:
        """The factor, as a number or as a scalar on the gradient's device."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        # scale(1) is the scale as a tensor: get_scale() would wait for the device.
        one = torch.ones((), dtype=torch.float32, device=gradient.device)
        scale: Tensor = self.scaler.scale(one)
        return 1.0 / scale


@dataclass
class StatisticsCollector:
    """Turns captured pairs into staged statistics."""

    approximation: Approximation
    factor_dtype: torch.dtype  # in which statistics are formed, or float32 if that is wider
    reduction: Callable[[], Reduction]  # what the loss of a pass is
    gradient_scale: Callable[[Tensor], Tensor | float]  # a further factor of captured gradients
    conv_approximation: Approximation | None = None  # for convolutions; None for the same
    warn: Callable[[str], None] = warnings.warn
    blocks: dict[nn.Module, list[KroneckerBlock]] = field(default_factory=dict)  # of each module
    counted: KroneckerBlock | None = None  # whose rows are seen, whether it gets pairs or not
    fsdp: FSDPParams | None = None
    heard: Callable[[KroneckerBlock], None] = lambda block: None  # of statistics that have grown
    sampled: bool = False  # the pairs are of drawn labels, and say nothing of the gradient
    drawn_rows: bool = False  # a label is drawn for each row of the layer called last
    # Statistics leave during the passes, so the host reads from the device which rows count.
    asks: bool = False
    # Of one input and pass; to be let go when the step's statistics are taken.
    last_a: tuple[tuple[int, int, bool], KroneckerBlock, PairStatistics] | None = None
    queue: PairQueue = field(default_factory=PairQueue)  # of pairs on devices
    ledger: Ledger = field(default_factory=Ledger)  # of the passes since the last step
    _places: dict[KroneckerBlock, int] = field(default_factory=dict)  # in the model
    _told: bool = False  # of losses that go back apart
    _unheard: list[KroneckerBlock] = field(default_factory=list)  # whose passes are still running

    def watch(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Set the blocks that get the pairs of their modules from now on."""
        self.blocks.clear()
        self._places.clear()
        for place, block in enumerate(blocks):
            self._places[block] = place
            for module in block.watched:
                self.blocks.setdefault(module, []).append(block)

    def _training(self, module: nn.Module) -> list[KroneckerBlock]:
        return [block for block in self.blocks.get(module, ()) if block.trainable]

    def _counted(self, module: nn.Module) -> list[KroneckerBlock]:
        """The block whose rows are looked at, if it is a module's and trains."""
        block = self.counted
        if block is None or not block.trainable or module not in block.watched:
            return []
        return [block]

    def wants(self, module: nn.Module) -> bool:
        """Whether any block of a module trains now."""
        return bool(self._training(module) or self._counted(module))

    def look(self, module: nn.Module, x: Tensor, d: Tensor) -> None:
        """Compare a pair of the user's own loss with the gradient, if that is due."""
        for block in self._training(module):
            if block.looks and block.fits_pair(module, x, d):
                with span("capture"), ieee_matmul(d.device):
                    block.look(module, x, d, self.fsdp)

    def consume(
        self,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        pass_id: int,
        source: int = -1,
        again: bool = False,
    ) -> None:
        """Add one pair to the staged statistics of its blocks.

        ``pass_id`` is one number for all pairs of a backward pass, ``source`` one for layers called
        in a row on one tensor, -1 if that is not known; ``again``: a backward pass has come through
        this call of the layer before.
        """
        training, counted = self._training(module), self._counted(module)
        # With drawn labels one backward pass brings pairs of several calls of the model.
        backward = autograd.current_pass() if self.sampled else pass_id
        for block in {*training, *counted}:
            begins = block.last_backward != backward and not block.staged.knows(pass_id)
            block.last_backward = backward
            if begins:
                block.follow_requires_grad()
                unreduced = self.fsdp is not None and self.fsdp.unreduced(module)
                if block.starts_anew(unreduced):
                    block.staged.clear()
        if not self.sampled:
            self.look(module, x, d)
        fitting = [block for block in training if block.fits_pair(module, x, d)]
        for block in training:
            if block not in fitting:
                block.judge(1.0)
        if not (fitting or counted):
            return

        # The rows of the pair, among those of the whole pass.
        current = self._pass_of(pass_id, module)
        if again and any(block.staged.knows_others(pass_id) for block in fitting):
            current.again = True
            if not self._told:
                self._told = True
                self.warn(LOSSES_APART)
        kind = (fitting or counted)[0].kinds.get(module)
        rows = rows_of(module, kind, x, d)
        groups = current.groups_of(rows)
        on_host = d.device.type == "cpu"
        live: LiveRows | None = None
        if on_host or self.asks:
            live = current.see(rows, groups, module, x, self.drawn_rows)
        else:
            current.begin(rows, groups[0], module, x, self.drawn_rows)
            if source == ALONE:  # the memory of a graph's pairs is the graph's
                current.read_labels()
        seen = SeenRows(current, groups, rows.gradient)
        for block in counted:
            block.staged.note(pass_id)
            current.layers[id(block.staged)] = block.staged

        pair = _Pair(module, x, d, source, seen)
        for block in fitting:
            if block.state.unexplained:
                continue
            current.layers[id(block.staged)] = block.staged
            block.staged.settle = self.settle
            block.staged.expect(current.number, again=again)
            if on_host:
                assert live is not None
                self._add(block, pair, live)
            else:
                self._keep(block, pair, live)
            inputs = 1 if block.shape.diagonal_a else block.shape.in_dim
            block.staged.work += 6 * d.numel() * inputs
            block.state.work = block.staged.work
            block.state.heard = True
            self._unheard.append(block)
        if self.asks and current.decided:
            self._tell()

    # ------------------------------------------------------------------- passes begin and end

    def _pass_of(self, pass_id: int, module: nn.Module) -> BackwardPass:
        """The pass of a number, which is settled as it ends."""
        passes, now = self.ledger.passes, autograd.current_pass()
        found = passes.get(pass_id)
        if found is not None and pass_id == autograd.NO_PASS and found.first is module:
            # Without numbers, the layer called last begins another pass.
            self._end(found)
            found.number = -found.serial - 1
            passes[found.number] = passes.pop(pass_id)
            found = None
        if found is None:
            self.ledger.prune(block.staged for block in self._places)
            reduce = self.approximation == "reduce"
            found = passes[pass_id] = BackwardPass(pass_id, reduce, self.gradient_scale)
        # Within a reentrant checkpoint another pass runs.
        runs = now == pass_id or (self.sampled and now != autograd.NO_PASS)
        if runs and not found.ending:
            found.ending = True
            autograd.after_pass(partial(self._end_timed, found))
        return found

    def _end_timed(self, ended: BackwardPass) -> None:
        with self.queue.timed():
            self._end(ended)

    def _end(self, ended: BackwardPass) -> None:
        """Settle a pass: all its layers have been seen."""
        ended.ending = False
        devices = {staged.device for staged in ended.layers.values()}
        with torch.no_grad(), ExitStack() as plainly:
            for kind in {device.type for device in devices}:
                plainly.enter_context(torch.autocast(kind, enabled=False))
            for device in devices:
                plainly.enter_context(ieee_matmul(device))
            ended.read_labels()
            self.queue.flush()
            for late in ended.late:
                late.settle(ended)
            terms = ended.count_terms()
            mean = self.reduction() == "mean"
            end_pass(ended.layers.values(), ended.number, terms if mean else None)
        ended.forget()
        for block in self._places:
            if id(block.staged) in ended.layers:
                block.end_pass()
        self._tell()

    def settle(self) -> None:
        """Add the pending pairs of passes that are still running or that nothing has ended."""
        for each in [*self.ledger.passes.values()]:
            if each.unsettled:
                self._end(each)

    def terms(self, layers: Iterable[StagedStatistics]) -> list[Terms]:
        """N of the passes since the last step, by layer."""
        self.settle()
        return self.ledger.terms(layers)

    def _tell(self) -> None:
        """Tell of layers whose statistics have grown, and are sums that only grow."""
        blocks, self._unheard = self._unheard, []
        for block in blocks:
            self.heard(block)

    # --------------------------------------------------------------------- from pairs to sums

    def _add(self, block: KroneckerBlock, pair: _Pair, live: LiveRows) -> None:
        """Add a pair while its pass goes on; rows without a gradient so far are left to the end."""
        d, current, number = pair.d, pair.seen.of, pair.seen.of.number
        scale = self.gradient_scale(d)
        undecided = live.mask is not None and not self._final(block, pair.seen)
        positions = len(pair.seen.groups[0].shape) > 1
        counted = block.shape.exact and not (self.approximation == "reduce" and positions)
        whole = undecided and not counted and not _is_rows(block, pair, self.approximation)

        def add(rows: LiveRows) -> None:
            with span("capture"), ieee_matmul(d.device):
                key = (pair.source, number)
                found = self._statistics(block, pair.module, pair.x, d, key, rows)
                block.staged.bring(found, scale, number)

        if whole:
            current.late.append(LatePair(pair.seen.groups, block.staged, add))
            return
        add(live)
        if undecided:
            assert live.mask is not None
            index = (~live.mask).nonzero().squeeze(1)
            add_inputs = partial(block.staged.bring_inputs, pass_id=number)
            if counted:
                ones = d.new_ones(block.shape.groups, 1)
                current.late.append(LateCount(pair.seen.groups[0], index, ones, add_inputs))
                return
            wide = torch.promote_types(self.factor_dtype, torch.float32)
            x = pair.linear_rows(block)[index].to(wide)
            shape, packed = block.shape, block.staged.triangular and d.device.type == "cpu"
            current.late.append(
                LateRows(
                    pair.seen.groups[0],
                    index,
                    x,
                    block.trains_bias,
                    packed,
                    shape.groups,
                    add_inputs,
                )
            )

    @staticmethod
    def _final(block: KroneckerBlock, seen: SeenRows) -> bool:
        """Whether it does not matter which rows turn out to take part."""
        if all(g.examples or g.everything for g in seen.groups):
            return True
        return all(group.selected for group in seen.groups)

    def _keep(self, block: KroneckerBlock, pair: _Pair, live: LiveRows | None) -> None:
        """Keep a pair on a device until its pass ends, or many have come."""
        staged, number = block.staged, pair.seen.of.number
        what = self._queued(block, pair, live)
        certain = isinstance(what, PairStatistics) or all(g.examples for g in pair.seen.groups)
        rows = None if certain else pair.seen
        partly = partial(self._add, block, pair)
        queued = QueuedPair(
            what, staged, number, self.gradient_scale, self._places[block], rows, partly
        )
        # The memory of a graph's pairs, which have no source, is the graph's.
        self.queue.add(queued, keep=pair.source >= 0 and staged.keeps)

    def _queued(
        self, block: KroneckerBlock, pair: _Pair, live: LiveRows | None
    ) -> Rows | PairStatistics | WaitingPair:
        """What is kept of a pair on a device."""
        module, x, d = pair.module, pair.x, pair.d
        if type(block) is KroneckerBlock and block.kinds[module].statistics is linear_statistics:
            return Rows(x, d, block.trains_bias, self.approximation)

        def form(rows: LiveRows) -> PairStatistics:
            with span("capture"), ieee_matmul(d.device):
                return self._statistics(block, module, x, d, (ALONE, ALONE), rows)

        groups = pair.seen.groups
        if all(g.examples or g.everything for g in groups):
            return form(all_rows(sum(group.number for group in groups)))
        held = (x, d) if isinstance(x, Tensor) else (x.hidden, x.index, x.weights, d)
        return WaitingPair(held, d, form)

    def _statistics(
        self,
        block: KroneckerBlock,
        module: nn.Module,
        x: Any,
        d: Tensor,
        key: tuple[int, int],
        rows: LiveRows,
    ) -> PairStatistics:
        approximation = self.approximation
        if self.conv_approximation is not None and isinstance(module, CONVOLUTIONS):
            approximation = self.conv_approximation
        # Layers fed by one tensor have one A: the last one's may serve (Ba et al. 2017, app. C).
        plain = isinstance(module, nn.Linear) and type(block) is KroneckerBlock and key[0] >= 0
        plain = plain and not block.shape.marginal
        mine, last, known = (*key, block.trains_bias), self.last_a, None
        if plain and last is not None and last[0] == mine and last[1] is not block:
            known = last[2]
        wide = torch.promote_types(self.factor_dtype, torch.float32)
        packed = block.staged.triangular and d.device.type == "cpu"  # else all layers' at once
        form = Form(block.trains_bias, approximation, packed, known, rows)
        x = x.to(wide) if isinstance(x, Tensor) and x.is_floating_point() else x
        pair = block.statistics(module, x, d.to(wide), form)
        if known is not None and pair.factors["A"] is known.factors["A"]:
            return replace(pair, factors={**pair.factors, "A": pair.factors["A"].clone()})
        if plain:
            self.last_a = (mine, block, pair)
        return pair


@dataclass(frozen=True)
class _Pair:
    """A captured pair, and its rows."""

    module: nn.Module
    x: Any
    d: Tensor
    source: int
    seen: SeenRows

    def linear_rows(self, block: KroneckerBlock) -> Tensor:
        """The rows of the input, ``(rows, in)``."""
        rows = block.kinds[self.module].rows
        x = self.x if rows is None else rows(self.module, self.x, self.d)[0]
        return cast(Tensor, x).reshape(-1, x.shape[-1])


def _is_rows(block: KroneckerBlock, pair: _Pair, approximation: Approximation) -> bool:
    """Whether A is a sum over rows of the input, one by one."""
    kind, shape = block.kinds.get(pair.module), block.shape
    if kind is None or type(block) is not KroneckerBlock or not isinstance(pair.x, Tensor):
        return False
    if approximation == "reduce" and len(pair.seen.groups[0].shape) > 1:
        return False
    if shape.marginal or shape.diagonal_a or len(pair.seen.groups) > 1:
        return False
    linear = kind.statistics is linear_statistics or kind.rows is not None
    return linear or is_attention(pair.module)

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from second_order.distributed.fsdp import FSDPParams
from second_order.kronecker import autograd, hooks
from second_order.kronecker.autograd import Assembly, input_of, is_attention, projections
from second_order.kronecker.block import KroneckerBlock
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
)
from second_order.kronecker.queued import LinearPair, PairQueue, QueuedPair, SeenRows
from second_order.kronecker.rows import BackwardPass, LateRows, Ledger, Terms
from second_order.kronecker.solvers import ieee_matmul
from second_order.utils.stages import stage

__all__ = ["Capture", "GradientScale", "StatisticsCollector"]

Sampler = Callable[[Any, int], Tensor]
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
LOSSES_APART = (
    "several backward passes of a step come through one forward pass: curvature is that of each "
    "loss alone, without what the losses have in common; add the losses up, and call backward() "
    "on their sum"
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

_FIRST_REPEATED = "second_order: the first backward pass that repeated a forward"
_FIRST_PASS = "second_order: the first backward pass through a compiled graph"


class _Product(NamedTuple):
    """A product of a layer's call."""

    module: nn.Module
    x: Any = None  # the input; None where autograd alone has it
    shape: torch.Size | None = None  # of the output; the gradient of its node need not have it
    thirds: tuple[int, ...] = ()  # of an attention, which of queries, keys and values
    assembly: Assembly | None = None  # puts an attention's pair together


class _Call:
    """What waits for the gradient of a product: a hook of its node, which must not hold the node.

    It keeps the input as autograd keeps its own.
    """

    def __init__(self, capture: Capture, product: _Product, output: int, sampled: bool) -> None:
        self._capture = weakref.ref(capture)
        self._output = output  # of the node
        self._outer, self._repeated = _repeated_in()
        self._drawn: tuple[Tensor, Tensor, int] | None = None  # pair of drawn labels, its number
        self._read: Callable[[], Any] | None = None  # the input; None: autograd alone has it
        x = product.x
        if x is not None:
            # Detached, as x may be changed in place and have the node behind it.
            keep = x.kept if isinstance(x, Routed) else partial(autograd.keep, x)
            self._read = x.detach().detach if sampled else keep()
        self._product: _Product | None = product._replace(x=None)

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        """Take the gradients of the node's outputs."""
        capture, gradient = self._capture(), gradients[self._output]
        product = self._product
        if capture is None or product is None or gradient is None:
            return
        with stage("statistics"):
            capture.take(self, product.module, gradient)
            if not autograd.keeps_graph():
                # Autograd frees its own inputs now, however long the loss is kept.
                self._product = self._read = None

    def pair(self, gradient: Tensor, node: Any = None) -> tuple[Any, Tensor] | None:
        """The pair of the call; None if others of its products are awaited."""
        assert self._product is not None
        _, _, shape, thirds, assembly = self._product
        x = (input_of(node) if self._read is None else self._read()).detach()
        d = gradient.detach()
        if assembly is not None:
            return assembly.add(thirds, x, d)
        return x, d if shape is None else d.reshape(shape)

    def begin_pass(self) -> tuple[int, bool]:
        """The number of the pass that has come, and whether another came through before.

        A reentrant checkpoint runs a backward pass inside another, in which the forward was
        repeated: the outer one is meant.
        """
        again, self._repeated = self._repeated, True
        inner = self._outer == autograd.NO_PASS
        return (autograd.current_pass() if inner else self._outer), again

    @property
    def is_whole(self) -> bool:
        """Whether the call has no other product."""
        return self._product is not None and self._product.assembly is None

    def keep_drawn(self, gradient: Tensor, node: Any, number: int) -> None:
        """Keep the pair of drawn labels until the user's own pass comes by."""
        pair = self.pair(gradient, node)
        self._drawn = None if pair is None else (*pair, number)

    def pop_drawn(self) -> tuple[Tensor, Tensor, int] | None:
        """The pair of drawn labels, and the number of their pass; once."""
        drawn, self._drawn = self._drawn, None
        return drawn


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
    return outer, _seen_before(_FIRST_REPEATED, outer)


def _seen_before(mark: str, pass_id: int) -> bool:
    """Whether another backward pass has come through the node that runs now, which gets a mark."""
    metadata = getattr(autograd.current_node(), "metadata", {})
    return bool(metadata.setdefault(mark, pass_id) != pass_id)


class Capture:
    """Watches a set of layers and hands their pairs to a consumer.

    ``consumer`` receives the pairs it wants, under ``no_grad`` and without autocast; ``fsdp`` is
    what FSDP2 does with parameters; ``accumulated``: passes count that accumulate into the layer's
    parameters, and no others.

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
        fsdp: FSDPParams | None = None,
        accumulated: bool = True,
    ) -> None:
        self.gate, self.fsdp = Gate(), fsdp
        self._accumulated = accumulated
        self._consumer, self._sampler = consumer, sampler
        self.missed: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._observed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._model: weakref.ref[nn.Module] | None = None  # whose layers are observed
        self.root_calls = 0
        self._inside_root = self._told = False
        self._pending: list[tuple[_Call, GradientEdge]] = []
        self._compiler: Any = None  # what compiles where the model is called, while it runs eagerly
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
            self._hooked.add(module)

    def detach(self, keep: bool = False) -> None:
        """Watch nothing any more, forget pairs in flight, and remove every hook, or keep them."""
        release(self._hooked, self, keep=keep)
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
        layers = [each for each in both if each in self._observed and self._consumer.wants(each)]
        if autograd.transformed():
            self.missed.update(dict.fromkeys(layers, TRANSFORMED))
            return
        if self._sampler is not None and not self._inside_root:
            return
        if not layers or not torch.is_grad_enabled():
            return
        if isinstance(output, tuple) and output:  # a router's logits, an attention's output
            output = output[0]
        with stage("statistics"):
            if attention:
                products = self._of_attention(module, args, kwargs, output)
            else:
                products = self._of_layer(module, args, kwargs, output)
            for product, edge in products:
                if product.module not in layers:
                    continue
                sampled = self._sampler is not None
                call = _Call(self, product, edge.output_nr, sampled)
                if sampled:
                    self._pending.append((call, edge))
                cast(Any, edge.node).register_prehook(call)

    def _of_layer(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[tuple[_Product, GradientEdge]]:
        """The product of a layer whose output is that of its product, and its node."""
        x: Any = input_in(args, kwargs)
        if is_experts(module):
            x = Routed.of_call(args, kwargs)
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
        return [(_Product(module, x, shape), _node_of(output))]

    def _of_attention(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
    ) -> list[tuple[_Product, GradientEdge]]:
        """The products of an attention, and their nodes."""
        if not output.requires_grad:
            return []
        inputs, found = projections(module, args, kwargs, output, self.fsdp)
        whole, apart = Assembly(len(inputs[0])), Assembly(len(inputs[0]))
        saving: Any = autograd.saving_hooks(True)  # a checkpoint's save nothing
        checkpointed = bool(saving) and saving[0].__module__ == "torch.utils.checkpoint"
        products = []
        for owner, node, thirds in found:
            product = _Product(owner, None, None, thirds, apart)
            if owner is module:
                x = autograd.as_used(inputs[thirds[0]])
                product = product._replace(x=x, assembly=whole)
            elif checkpointed:
                # Of the output's projection autograd alone has the input.
                self.missed[owner] = CHECKPOINTED
                continue
            products.append((product, GradientEdge(node, 0)))
        return products

    # --------------------------------------------------------------------------------- gradients

    def take(self, call: _Call, module: nn.Module, gradient: Tensor) -> None:
        """Take the gradient that a call has waited for; with drawn labels, deliver their pair."""
        if self._accumulated and not autograd.reaches_parameters(module, self.fsdp):
            if self._sampler is None:  # else it may be the pass of drawn labels
                self.missed[module] = NOT_ACCUMULATED
            return
        if self._sampler is not None:
            drawn = call.pop_drawn()
            if drawn is not None:
                self.emit(module, *drawn, False)
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
        pass_id, again = call.begin_pass()
        if pair is not None:
            self.emit(module, *pair, pass_id, again)

    def receive(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        """Take a pair that the backward of a compiled graph delivers; its memory is the graph's."""
        with stage("statistics"):
            if not autograd.reaches_parameters(module, self.fsdp):
                self.missed[module] = NOT_ACCUMULATED
                return
            # The node is the whole graph's; a forward makes a new one, a second backward does not.
            pass_id = autograd.current_pass()
            again = _seen_before(_FIRST_PASS, pass_id)
            self.emit(module, x.clone(), gradient.clone(), pass_id, again)

    def emit(self, module: nn.Module, x: Tensor, d: Tensor, pass_id: int, again: bool) -> None:
        """Hand a pair to the consumer, unless its layer was let go while it was in flight."""
        if module in self._observed:
            with torch.no_grad(), torch.autocast(d.device.type, enabled=False):
                self._consumer.consume(module, x, d.detach(), pass_id, again=again)

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
            with stage("statistics"):
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
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                loss, edges, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            raise RuntimeError(NOT_DRAWN) from error
        # These pairs count once the user's own backward comes by, and not before.
        for (call, edge), gradient in zip(pending, gradients, strict=True):
            if gradient is not None:
                call.keep_drawn(gradient, edge.node, self.root_calls)
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
    """Turns captured pairs into staged statistics.

    A pair's sums are made at once on the CPU, and at the end of its pass on a device. Rows without
    a gradient so far wait for the end: another layer may have one for them.

    Attributes:
        approximation: Of dimensions that share a weight.
        factor_dtype: In which statistics are formed, or float32 if that is wider.
        reduction: What the loss of a pass is.
        gradient_scale: A further factor of captured gradients.
        conv_approximation: For convolutions; None for the same.
        heard: Called as the statistics of a layer have grown, in passes: so the host reads from
            the device which rows count.
        sampled: The pairs are of drawn labels, and say nothing of the gradient.
        drawn_rows: A label is drawn for each row of the layer called last.
        queue: Pairs on devices.
        ledger: The passes since the last step.
    """

    approximation: Approximation
    factor_dtype: torch.dtype
    reduction: Callable[[], Reduction]
    gradient_scale: Callable[[Tensor], Tensor | float]
    conv_approximation: Approximation | None = None
    warn: Callable[[str], None] = warnings.warn
    fsdp: FSDPParams | None = None
    heard: Callable[[KroneckerBlock], None] | None = None
    verifies_always: bool = False  # compares the pairs of all steps with the gradient
    sampled: bool = False
    drawn_rows: bool = False
    queue: PairQueue = field(default_factory=PairQueue)
    ledger: Ledger = field(default_factory=Ledger)
    _blocks: dict[nn.Module, list[KroneckerBlock]] = field(default_factory=dict)
    _rows_only: KroneckerBlock | None = None  # whose rows are seen, and no statistics taken
    _places: dict[KroneckerBlock, int] = field(default_factory=dict)  # in the model
    _told: bool = False  # of losses that go back apart
    _unheard: list[KroneckerBlock] = field(default_factory=list)  # whose passes are still running

    def watch(
        self, blocks: Iterable[KroneckerBlock], rows_only: KroneckerBlock | None = None
    ) -> None:
        """Set the blocks that get the pairs of their modules from now on.

        ``rows_only`` is one of them whose statistics another process takes.
        """
        self._rows_only = rows_only
        self._blocks.clear()
        self._places.clear()
        for place, block in enumerate(blocks):
            self._places[block] = place
            for module in block.watched:
                self._blocks.setdefault(module, []).append(block)

    def _training(self, module: nn.Module) -> list[KroneckerBlock]:
        return [block for block in self._blocks.get(module, ()) if block.trainable]

    def wants(self, module: nn.Module) -> bool:
        """Whether any block of a module trains now."""
        return bool(self._training(module))

    def look(self, module: nn.Module, x: Tensor, d: Tensor) -> None:
        """Compare a pair of the user's own loss with the gradient, if that is due."""
        for block in self._training(module):
            if (self.verifies_always or block.looks) and block.fits_pair(module, x, d):
                with ieee_matmul(d.device):
                    block.look(module, x, d, self.fsdp)

    def consume(
        self,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        pass_id: int,
        again: bool = False,
    ) -> None:
        """Add one pair to the staged statistics of its blocks.

        ``pass_id`` is one number for all pairs of a backward pass. ``again``: a backward pass has
        come through this call of the layer before.
        """
        blocks = self._training(module)

        # Statistics go where gradients have been set to zero.
        # With drawn labels one backward pass brings pairs of several calls of the model.
        backward = autograd.current_pass() if self.sampled else pass_id
        unreduced = self.fsdp is not None and self.fsdp.unreduced(module)
        for block in blocks:
            block.begin_pass(backward, pass_id, unreduced)

        # Whether the pair can be the layer's.
        if not self.sampled:
            self.look(module, x, d)
        fitting = []
        for block in blocks:
            if block.fits_pair(module, x, d):
                fitting.append(block)
            else:
                block.judge(1.0)
        if not fitting:
            return

        # The rows of the pair, among those of the whole pass.
        current = self._pass_of(pass_id)
        repeats = again and any(block.staged.knows_others(pass_id) for block in fitting)
        if repeats and current.repeat() and not self._told:
            self._told = True
            self.warn(LOSSES_APART)
        rows = fitting[0].rows_of(module, x, d)
        group = current.group_of(rows)
        on_host = d.device.type == "cpu"
        reads = on_host or self.heard is not None
        current.see(rows, group, module, drawn=self.drawn_rows, reads=reads)

        # Its sums, now or at the end of the pass.
        pair = _Pair(module, x, d, SeenRows(current, group, rows.gradient))
        for block in fitting:
            if block.unverified:
                continue
            current.layers[id(block.staged)] = block.staged
            inputs = 1 if block.shape.diagonal_a else block.shape.in_dim
            block.staged.expect(current.number, again=again, work=6 * d.numel() * inputs)
            if block is self._rows_only:
                continue
            block.note_pair(block.staged.work)
            if on_host:
                self._add(block, pair, current.alive(group))
            else:
                self._keep(block, pair)
            self._unheard.append(block)
        if self.heard is not None and current.decided:
            self._tell()

    # ------------------------------------------------------------------- passes begin and end

    def _pass_of(self, pass_id: int) -> BackwardPass:
        """The pass of a number, which is settled as it ends."""
        passes = self.ledger.passes
        found = passes.get(pass_id)
        if found is None:
            found = passes[pass_id] = BackwardPass(pass_id, self.approximation == "reduce")
        # Within a reentrant checkpoint another pass runs.
        runs = self.sampled or autograd.current_pass() == pass_id
        if runs and found.will_end():
            autograd.after_pass(partial(self._end, found))
        return found

    def _end(self, ended: BackwardPass) -> None:
        """Settle a pass: all its layers have been seen."""
        with torch.no_grad(), stage("statistics"):
            self.queue.flush()
            for late in ended.late:
                late.settle(ended)
            terms = ended.terms()
            mean = self.reduction() == "mean"
            end_pass(ended.layers.values(), ended.number, terms if mean else None)
        ended.end()
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
        if self.heard is not None:
            for block in blocks:
                self.heard(block)

    # --------------------------------------------------------------------- from pairs to sums

    def _add(self, block: KroneckerBlock, pair: _Pair, live: LiveRows) -> None:
        """Add a pair while its pass goes on; rows without a gradient so far are left to the end."""
        current, group = pair.seen.of, pair.seen.group
        scale, staged = self.gradient_scale(pair.d), block.staged
        cleared = staged.since

        def add(x: Any, d: Tensor, rows: LiveRows) -> None:
            if staged.since == cleared:
                staged.bring(
                    self._statistics(block, pair.module, x, d, rows), scale, current.number
                )

        if live.mask is None or group.selected:
            add(pair.x, pair.d, live)
        elif not self._has_single_rows(block, pair):
            current.late.append(LateRows(group, None, partial(add, pair.x, pair.d)))
        else:
            add(pair.x, pair.d, live)
            index = (~live.mask).nonzero().squeeze(1)
            leading = len(group.shape)
            x = pair.x.reshape(group.number, *pair.x.shape[leading:])[index]
            zeros = pair.d.new_zeros(()).expand(len(index), *pair.d.shape[leading:])
            current.late.append(LateRows(group, index, partial(add, x, zeros)))

    def _has_single_rows(self, block: KroneckerBlock, pair: _Pair) -> bool:
        """Whether some rows of a pair are a pair of the layer."""
        rows = pair.seen.group.shape
        if not isinstance(pair.x, Tensor) or is_attention(pair.module):
            return False
        if self.approximation == "reduce" and len(rows) > 1:
            return False
        kind = block.kinds.get(pair.module)
        fits = pair.x.shape[: len(rows)] == pair.d.shape[: len(rows)] == rows
        return fits and (kind is None or kind.rows is None)

    def _keep(self, block: KroneckerBlock, pair: _Pair) -> None:
        """Keep a pair on a device until its pass ends, or many have come."""
        x, d, group = pair.x, pair.d, pair.seen.group
        rows = None if group.certain else pair.seen
        form = partial(self._statistics, block, pair.module, x, d)
        plain = type(block) is KroneckerBlock
        what: Any = form
        tensors = (x, d) if isinstance(x, Tensor) else (x.hidden, x.index, x.weights, d)
        if plain and block.kinds[pair.module].multiplies_rows:
            what = LinearPair(x, d, block.trains_bias, self.approximation)
        elif group.certain:
            what = form(all_rows(group.number))
            tensors = tuple(what.factors.values())
        staged, number = block.staged, pair.seen.of.number
        place, partly = self._places[block], partial(self._add, block, pair)
        queued = QueuedPair(what, tensors, staged, number, self.gradient_scale, place, rows, partly)
        self.queue.add(queued, keep=staged.keeps)

    def _statistics(
        self, block: KroneckerBlock, module: nn.Module, x: Any, d: Tensor, rows: LiveRows
    ) -> PairStatistics:
        """The sums of a pair, of the rows that take part."""
        approximation = self.approximation
        if self.conv_approximation is not None and isinstance(module, CONVOLUTIONS):
            approximation = self.conv_approximation
        wide = torch.promote_types(self.factor_dtype, torch.float32)
        form = Form(block.trains_bias, approximation, rows)
        x = x.to(wide) if isinstance(x, Tensor) and x.is_floating_point() else x
        plain = torch.autocast(d.device.type, enabled=False)
        with torch.no_grad(), plain, ieee_matmul(d.device):
            return block.statistics(module, x, d.to(wide), form)


class _Pair(NamedTuple):
    """A captured pair, and its rows."""

    module: nn.Module
    x: Any
    d: Tensor
    seen: SeenRows

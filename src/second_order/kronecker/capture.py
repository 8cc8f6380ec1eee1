"""Pairs of (layer input, gradient of the layer's output), caught as they come into being.

The gradient is taken by a hook on the output *tensor*. A hook on the module's backward would wrap
the output in a view and break in-place activations; the tensor hook sees the gradient with respect
to the value the layer produced, whatever happens to that tensor afterwards, and it fires once
however often a checkpointed forward is repeated. A pair exists only when its gradient arrives, in
a backward pass that goes on to accumulate into the ``.grad`` of the layer's own parameters: a
forward that never sees a backward (validation, batch-norm updates, averaged copies) leaves nothing,
and neither does ``torch.autograd.grad`` (gradient penalties, derivatives in a loss, attacks on
inputs), whose gradients are no loss's.

The input is kept the way autograd keeps its own inputs, through the saved-tensor hooks in force, so
activation checkpointing and offloading keep their memory savings.

In a model under ``torch.compile`` the hooks are traced with it, and the graph's backward hands the
pairs over (:mod:`second_order.kronecker.compiled`). Only drawn labels need Python in mid-model, and
so break graphs.

Hooks find their :class:`Capture` through weak references, and copies of a hook are idle: a pickled
or deep-copied model takes no optimizer along, and its copies capture nothing. A model that is
exported or traced is not watched meanwhile.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from second_order.kronecker.compiled import forget_graphs, frames_compiled
from second_order.kronecker.hooks import (
    Gate,
    LayerHook,
    RootHook,
    RootPreHook,
    Watch,
    WatchHook,
    as_used,
    device_type,
    hook_of,
    put_back,
    release,
    take_off,
)

__all__ = ["Capture", "PairConsumer"]

Sampler = Callable[[Any, int], Tensor]
NO_BACKWARD = -1
ALONE = -1  # the number of an input of which it is not known what else is called on it
TRANSFORMED = (
    "torch.func transforms (vmap, grad) show a layer's hooks no gradients; call the module outside "
    "of them, and backward() on its loss"
)
NOT_ACCUMULATED = (
    "gradients that torch.autograd.grad gives back end in no parameter's .grad and count for "
    "nothing, and backward() sends none through their outputs"
)


class PairConsumer(Protocol):
    """The receiver of pairs, which turns them into statistics."""

    def consume(
        self, module: nn.Module, x: Tensor, d: Tensor, pass_id: int, source: int, again: bool
    ) -> None:
        """Take one pair.

        Args:
            module: The layer that was called.
            x: The layer's input.
            d: The gradient with respect to the layer's output.
            pass_id: A number of the backward pass, the same for all its pairs.
            source: A number of the input, the same for layers called in a row on the same tensor;
                -1 if that is not known.
            again: Whether a backward pass has come through this call of the layer before.
        """

    def lose(self, module: nn.Module, reason: str) -> None:
        """Note that a pair of a module cannot be had, for a reason."""


class _SavedInput(torch.autograd.Function):
    """A node beside the graph whose only purpose is to hold one saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("this node is not part of any graph")


def _save(x: Tensor) -> Any:
    anchor = torch.empty(0, requires_grad=True)
    return _SavedInput.apply(x.detach(), anchor).grad_fn  # type: ignore[no-untyped-call]


_REPEAT = CheckpointFunction.backward.__code__
_FIRST_REPEATED = "second_order: the first backward pass that repeated a forward"
_FIRST_PASS = "second_order: the first backward pass through a compiled graph"


@dataclass
class _Call:
    """A call of a layer whose output's gradient is awaited.

    Attributes:
        module: The layer that was called.
        saved: The node that holds the input; empty once autograd has freed its own.
        source: A number of the input, as for :meth:`PairConsumer.consume`.
        outer: The id of the backward pass in which the layer was called, if any.
        used: Whether a backward pass has come through this call.
    """

    module: nn.Module
    saved: list[Any]
    source: int
    outer: int
    used: bool = False


def _gradient_hook(capture: weakref.ref[Capture], call: _Call, gradient: Tensor) -> None:
    alive = capture()
    if alive is None or Capture.sampling or not call.saved:
        return
    with alive.timed():
        _take_gradient(alive, call, gradient)


def _take_gradient(alive: Capture, call: _Call, gradient: Tensor) -> None:
    if _reaches_parameters(call.module):
        # The id names the backward pass that is running. A reentrant checkpoint runs one inside
        # another, in which the forward was repeated: the outer one is meant.
        if call.outer == NO_BACKWARD:
            alive._pass = torch._C._current_graph_task_id()
        pass_id = alive._pass if call.outer == NO_BACKWARD else call.outer
        try:
            x = call.saved[0].saved_tensors[0]
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            # Legal where the layer worked on a copy, as of a transposed input; our input is gone.
            alive._consumer.lose(call.module, "its input was changed in place after its forward")
            return
        again, call.used = call.used, True
        alive._emit(call.module, x, gradient, pass_id, call.source, again)
    else:
        alive.missed[call.module] = NOT_ACCUMULATED
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        call.saved.clear()  # autograd frees its own inputs now, however long the loss is kept


def _repeating_checkpoints() -> list[Any]:
    """The nodes of the reentrant checkpoints now repeating a forward, the outermost last."""
    frame: FrameType | None = sys._getframe(1)
    found: list[Any] = []
    while frame is not None:
        if frame.f_code is _REPEAT:
            found.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return found or [torch._C._current_autograd_node()]  # of another library's checkpoint


def _reaches_parameters(module: nn.Module) -> bool:
    """Whether the backward pass that is running accumulates into a parameter of the module."""
    return any(map(_is_reached, module._parameters.values()))


def _is_reached(p: Tensor | None) -> bool:
    if p is None or not p.requires_grad:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(p).node))
    except RuntimeError:  # torch's answer for what autograd.grad gives back without accumulating
        return False


def _delivery_hook(
    capture: weakref.ref[Capture],
    pairs: list[tuple[nn.Module, Tensor, int, Tensor]],
    pass_id: int,
    gradient: Tensor,
) -> None:
    alive = capture()
    if alive is None or Capture.sampling:
        return
    with alive.timed():
        reached = {module: _reaches_parameters(module) for module, *_ in pairs}
        delivered = [pair for pair in pairs if reached[pair[0]]]
        pairs[:] = [pair for pair in pairs if not reached[pair[0]]]
        for module, x, source, d in delivered:
            alive._emit(module, x, d, pass_id, source, False)


class Capture:
    """Watches a set of layers and hands their pairs to a consumer.

    Args:
        consumer: Receives every pair, under ``no_grad`` and without autocast.
        sampler: The sampled Fisher's: ``sampler(model_output, call)`` draws labels from the
            model's output and returns the summed negative log-likelihood. The pairs then carry that
            loss's gradients, taken as soon as the root module's forward returns and delivered when
            the user's backward reaches its output; no parameter's ``.grad`` is touched. None: the
            gradients of the user's own backward.
        wanted: Tells whether a module's pairs are wanted now; None: if its weight trains.
        timed: Makes a context manager around the work of a hook, to measure it.

    Attributes:
        sampling: Whether a backward pass for the sampled Fisher is running, whoever runs it: the
            gradients in it are nobody else's.
        timed: Makes the context manager around the work of a hook.
        root_calls: Number of outputs of the root that labels were drawn from.
        missed: By layer, why its last lost pair did not count.
    """

    sampling: ClassVar[bool] = False

    def __init__(
        self,
        consumer: PairConsumer,
        sampler: Sampler | None = None,
        wanted: Callable[[nn.Module], bool] | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._gate = Gate()
        self.timed = timed
        self._wanted = _weight_trains if wanted is None else wanted
        self.root_calls = 0
        self.missed: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._consumer = consumer
        self._sampler = sampler
        self._observed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._root: weakref.ref[nn.Module] | None = None
        self._inside_root = False
        self._pending: list[tuple[nn.Module, Tensor, int, GradientEdge]] = []
        self._last_input: tuple[weakref.ref[Tensor], int] | None = None
        self._sources = self._last_version = 0
        self._pass = NO_BACKWARD  # the last that was seen from outside of nested checkpoints
        self._watches: list[Watch] = []
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        weakref.finalize(self, _let_go, self._watches, self._watched)

    @property
    def enabled(self) -> bool:
        """Whether pairs are captured now; compiled graphs follow."""
        return self._gate.open

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        """Open or close the gate for the passes to come."""
        self._gate.open = enabled

    def attach(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Watch exactly these layers, and no longer those from before."""
        layers = list(layers)
        if layers and set(layers) == set(self._observed):
            return
        before = weakref.WeakSet(self._watched)
        self._dismiss()
        new = [self._watch(module, LayerHook) for module in layers]
        self._observed = weakref.WeakSet(layers)
        if self._sampler is not None and layers:
            self._root = weakref.ref(root)
            new += [self._watch(root, kind) for kind in (RootPreHook, RootHook)]
        release(before)
        if any(new):
            forget_graphs()

    def _watch(self, module: nn.Module, kind: type[WatchHook]) -> bool:
        """Watch a module by its hook of a kind; returns whether the hook is new."""
        hook, new = hook_of(module, kind)
        watch = Watch(self, module, self._gate, drawn=self._sampler is not None)
        hook.watches.append(watch)
        self._watches.append(watch)
        self._watched.add(module)
        return new

    def detach(self) -> None:
        """Remove every hook and forget pairs in flight."""
        before = weakref.WeakSet(self._watched)
        self._dismiss()
        release(before)

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Take the hooks off the watched modules for a block, those of other captures too."""
        away, compiled = take_off(self._watched), frames_compiled()
        try:
            yield
        finally:
            put_back(away)
            if frames_compiled() != compiled:  # graphs from within the block know of no hooks
                forget_graphs()

    def _dismiss(self) -> None:
        """Watch nothing any more; hooks that serve nobody remain until they are released."""
        for watch in self._watches:
            watch.gone = True
        self._watches.clear()
        self._watched.clear()
        self._observed = weakref.WeakSet()
        self._root = None
        self._pending.clear()

    def observe(self, module: nn.Module, x: Any, output: Any) -> None:
        """See a call of a layer; in a training pass, wait for the gradient of its output."""
        if torch._C._get_tracing_state() is not None:  # torch.jit traces the model
            return
        if torch._C._are_functorch_transforms_active():
            if self.enabled and module in self._observed:
                self.missed[module] = TRANSFORMED
            return
        if not (
            self.enabled
            and module in self._observed
            and torch.is_grad_enabled()
            and isinstance(x, Tensor)
            and isinstance(output, Tensor)
            and output.requires_grad
            and self._wanted(module)
        ):
            return
        with self.timed():
            self._remember(module, x, output)

    def _remember(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        source, x = self._source_of(x), as_used(x)
        if self._sampler is None:
            outer, again = self._repeated_in()
            call = _Call(module, [_save(x)], source, outer, again)
            output.register_hook(partial(_gradient_hook, weakref.ref(self), call))
        elif self._inside_root:
            # The edge, not the tensor: an in-place activation moves the tensor to a later node.
            self._pending.append((module, x.detach(), source, get_gradient_edge(output)))

    def _repeated_in(self) -> tuple[int, bool]:
        """The id of the backward pass that repeats this forward, and if an earlier pass has.

        A reentrant checkpoint repeats its forward in each pass that comes through; its node is the
        same. A nested checkpoint runs in a pass of its own, inside the pass that is meant: the one
        last seen at a layer outside of all checkpoints, such as a head.
        """
        outer = torch._C._current_graph_task_id()
        if outer == NO_BACKWARD:
            return outer, False
        nodes = _repeating_checkpoints()
        if len(nodes) > 1 and self._pass != NO_BACKWARD:
            outer = self._pass
        self._pass = outer
        metadata = getattr(nodes[-1], "metadata", {})
        return outer, bool(metadata.setdefault(_FIRST_REPEATED, outer) != outer)

    def _source_of(self, x: Tensor) -> int:
        """A number for an input as it is now, the same if the last layer had the same input."""
        last = self._last_input
        if last is None or last[0]() is not x or self._last_version != x._version:
            self._sources += 1
            self._last_input, self._last_version = (weakref.ref(x), self._sources), x._version
        return self._sources

    def enter_root(self, module: nn.Module) -> None:
        """See the beginning of the model's forward."""
        if self._root is not None and module is self._root():
            self._pending.clear()
            self._inside_root = True

    def leave_root(self, module: nn.Module, output: Any) -> None:
        """See the model's output, and draw labels from it."""
        if self._root is None or module is not self._root():
            return
        self._inside_root = False
        pending, self._pending = self._pending, []
        if pending and self._sampler is not None:
            with self.timed():
                self._draw(self._sampler, pending, output)

    def _draw(
        self,
        sampler: Sampler,
        pending: Sequence[tuple[nn.Module, Tensor, int, GradientEdge]],
        output: Any,
    ) -> None:
        """Take the gradients of the loss on labels drawn from the root's output."""
        with torch.autocast(device_type(pending[0][1]), enabled=False):
            loss = sampler(output, self.root_calls)
        if not loss.requires_grad:
            return
        Capture.sampling = True
        try:
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                loss, [edge for *_, edge in pending], retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            raise RuntimeError(
                "fisher='sampled' cannot differentiate through a reentrant checkpoint; use "
                "checkpoint(..., use_reentrant=False), or fisher='empirical'"
            ) from error
        finally:
            Capture.sampling = False
        pairs = [
            (layer, x, source, gradient)
            for (layer, x, source, _), gradient in zip(pending, gradients, strict=True)
            if gradient is not None
        ]
        # These pairs count once the user's own backward reaches the output, and not before.
        deliver = partial(_delivery_hook, weakref.ref(self), pairs, self.root_calls)
        for tensor in _differentiable_tensors(output):
            tensor.register_hook(deliver)
        self.root_calls += 1

    def receive(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        """Take a pair that the backward of a compiled graph delivers."""
        if Capture.sampling:
            return
        with self.timed():
            if not _reaches_parameters(module):
                self.missed[module] = NOT_ACCUMULATED
                return
            # The node is the whole graph's; a forward makes a new one, a second backward does not.
            # A backward that is compiled as a whole has no nodes, and runs once.
            pass_id = torch._C._current_graph_task_id()
            metadata = getattr(torch._C._current_autograd_node(), "metadata", {})
            again = bool(metadata.setdefault(_FIRST_PASS, pass_id) != pass_id)
            self._emit(module, x, gradient, pass_id, ALONE, again)

    def _emit(
        self, module: nn.Module, x: Tensor, d: Tensor, pass_id: int, source: int, again: bool
    ) -> None:
        if module not in self._observed:  # let go while its pair was in flight
            return
        with torch.no_grad(), torch.autocast(device_type(d), enabled=False):
            self._consumer.consume(module, x, d.detach(), pass_id, source, again)


def _let_go(watches: list[Watch], modules: weakref.WeakSet[nn.Module]) -> None:
    """Release the modules of a capture that is no more."""
    for watch in watches:
        watch.gone = True
    release(modules)


def _weight_trains(module: nn.Module) -> bool:
    return cast(Tensor, module.weight).requires_grad


def _differentiable_tensors(output: Any) -> list[Tensor]:
    """The tensors of a model's output that a backward can start from."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (list, tuple)):
        parts = list(output)
    else:
        parts = list(getattr(output, "__dict__", {}).values())
    return [tensor for part in parts for tensor in _differentiable_tensors(part)]

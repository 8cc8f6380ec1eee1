"""A CUDA graph, pretended: what a thread asks for is recorded, and asked for again.

    graph = Graph()
    with graph.recording():            step() is told that it is recorded; nothing is computed
        optimizer.step()
    graph.replay()                     the same operations on the same memory; no Python runs

An operation's results go where they were when it was recorded, as in the private memory of a graph.
``graph.asked`` are the operations, each operand by the address of its memory, or, where that was
made while the graph was recorded, by the number of the operation that has made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from pretended import Pretended
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _bare(t: Tensor) -> Tensor:
    return t.inner if isinstance(t, Pretended) else t


def _memory(t: Tensor) -> int:
    return _bare(t).untyped_storage().data_ptr()


def _tensors(*values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


class Graph(TorchDispatchMode):
    """Operations, with their operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: dict[int, int] = {}  # number of the operation by the memory it has made
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = _tensors(args, kwargs)
        for t in operands:
            if _memory(t) not in self._made and _memory(t) not in self._before:
                whole = torch.empty(0, dtype=torch.uint8)
                whole.set_(_bare(t).untyped_storage())
                self._before[_memory(t)] = whole, whole.clone()
        result = op(*args, **kwargs)
        at = [self._made.get(_memory(t), _memory(t)) for t in operands]
        places = [(_bare(t).storage_offset(), tuple(t.shape), t.stride()) for t in operands]
        self.asked.append((str(op), *zip(at, places, strict=True)))
        for t in _tensors(result):
            if _memory(t) not in self._before:
                self._made.setdefault(_memory(t), len(self.asked))
        self._calls.append((op, args, kwargs, _tensors(result)))
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record a block, and put all memory back as it was before it."""
        with mock.patch("second_order.optimizers.base.capturing", return_value=True), self:
            yield
        for whole, before in self._before.values():
            whole.copy_(before)

    def replay(self) -> None:
        """Ask for the same again."""
        with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
            for op, args, kwargs, results in self._calls:
                for before, now in zip(results, _tensors(op(*args, **kwargs)), strict=True):
                    if before is not now and _memory(before) != _memory(now):
                        _bare(before).copy_(_bare(now))

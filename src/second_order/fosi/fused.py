"""A function of small tensors as one operation of a device.

A rule of a hundred operations on single numbers costs a device a hundred launches. There it is one
operation of torch, second_order::NAME, whose function torch.compile fuses; what it cannot compile,
as without a compiler, runs as it is. On the CPU the function is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["fused"]

Small: TypeAlias = Callable[..., Sequence[Tensor]]

LIBRARY = torch.library.Library("second_order", "FRAGMENT")


def fused(function: Small) -> Small:
    """Make a function of tensors and numbers one operation, off the CPU.

    It returns tensors of its own, and changes none that it is given.
    """
    name, compiled = function.__name__, list[Small]()  # torch.compile takes seconds to import
    LIBRARY.define(f"{name}(Tensor[] tensors, float[] numbers, str order) -> Tensor[]")

    def run(tensors: list[Tensor], numbers: list[float], order: str) -> list[Tensor]:
        given = {"t": iter(tensors), "n": iter(numbers)}
        args = [next(given[kind]) for kind in order]
        if tensors[0].device.type == "cpu":
            return list(function(*args))
        if not compiled:
            compiled.append(torch.compile(function))
        try:
            return list(compiled[0](*args))
        except Exception:  # no compiler here, perhaps; an error of the function comes again
            compiled[0] = function
            return list(function(*args))

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")

    def call(*args: Any) -> Sequence[Tensor]:
        if args[0].device.type == "cpu" or torch.compiler.is_compiling():
            return function(*args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        numbers = [float(arg) for arg in args if not isinstance(arg, Tensor)]
        order = "".join("t" if isinstance(arg, Tensor) else "n" for arg in args)
        found: Sequence[Tensor] = getattr(torch.ops.second_order, name)(tensors, numbers, order)
        return found

    return call

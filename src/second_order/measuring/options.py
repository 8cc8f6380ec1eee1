"""What a measurement is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from second_order.distributed.world import World
from second_order.kronecker.fisher import LIKELIHOODS, Likelihood
from second_order.measuring.batches import Call, Loss, Mask
from second_order.measuring.statistics import Layer, read
from second_order.measuring.sums import Keep
from second_order.sharded import local

__all__ = ["Factors", "Options"]

Factors: TypeAlias = Literal["inputs", "kfac", "ekfac"]


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    factors: Factors
    loss: Loss | None
    likelihood: Likelihood | None
    mask: Mask | None
    call: Call
    keep: Keep
    memory: int | None
    seed: int
    shown: bool

    def check(self) -> None:
        """Raise unless the options are sound, and belong together."""
        for name, kind in (("factors", Factors), ("keep", Keep)):
            if (value := getattr(self, name)) not in get_args(kind):
                known = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name}={value!r} is not one of {known}")
        named = self.likelihood is not None and not callable(self.likelihood)
        if named and self.likelihood not in LIKELIHOODS:
            known = ", ".join(map(repr, LIKELIHOODS))
            raise ValueError(f"likelihood={self.likelihood!r} is not one of {known}, or a function")
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"loss={self.loss!r} is not a function of (output, batch)")
        if self.loss is not None and self.factors == "inputs":
            raise ValueError('factors="inputs" takes no loss=: A is of inputs alone; use "kfac"')
        if self.memory is not None and self.memory <= 0:
            raise ValueError(f"memory={self.memory} bytes must be positive")

    def identity(
        self, layers: Sequence[Layer], passes: Sequence[Sequence[Layer]], world: World, dtype: Any
    ) -> dict[str, Any]:
        """What tells this measurement from another one, in this process's saves."""
        named = {"likelihood": self.likelihood, "loss": self.loss}
        functions = {
            name: getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
            for name, value in named.items()
        }
        weights = [local(layer.block.weight).detach() for layer in layers]
        norms = [torch.linalg.vector_norm(w, dtype=torch.float64) for w in weights]
        sizes = {layer.name: list(map(int, layer.shape.gradient_size)) for layer in layers}
        return {
            "factors": self.factors,
            "keep": self.keep,
            "memory": [[layer.name for layer in each] for each in passes],
            "seed": self.seed,
            **functions,
            "processes": world.size,
            "layers": sizes,
            "dtype": str(dtype),
            "weights": [f"{norm:.9e}" for (norm,) in read(norms)],
        }

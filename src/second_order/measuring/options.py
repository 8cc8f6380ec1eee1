"""What a measurement is asked for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from second_order.distributed.world import World
from second_order.kronecker.fisher import LIKELIHOODS, Likelihood
from second_order.measuring.batches import Call, Loss, Mask
from second_order.measuring.fingerprint import fingerprint
from second_order.measuring.statistics import Layer, read
from second_order.measuring.sums import Keep
from second_order.measuring.watch import unwrapped
from second_order.sharded import local

__all__ = ["Factors", "Options", "check_arguments", "patterns_of"]

Factors: TypeAlias = Literal["inputs", "kfac", "ekfac"]


def patterns_of(layers: Any) -> list[Any] | None:
    """The elements of ``layers=``, of which there may be just one; None for all layers."""
    if layers is None:
        return None
    # Some modules are iterable.
    single = isinstance(layers, (str, type, nn.Module)) or not isinstance(layers, Iterable)
    return [layers] if single else list(layers)


def check_arguments(model: Any, loader: Any, patterns: Sequence[Any] | None) -> None:
    """Raise unless model, loader and patterns of layers are what their names say.

    Raises:
        TypeError: If one is something else, with what to write.
    """
    if not isinstance(model, nn.Module):
        remedy = ""
        if isinstance(loader, nn.Module):
            remedy = "; write measure(model, loader)"
        elif isinstance(model, type):
            remedy = ", but a class; pass a module, as measure(model, loader)"
        raise TypeError(f"model={_short(model)} is not a torch.nn.Module{remedy}")
    if isinstance(loader, nn.Module):
        raise TypeError(f"loader={_short(loader)} is a module; write measure(model, loader)")
    if isinstance(loader, Mapping):
        raise TypeError(f"loader={_short(loader)} looks like a single batch; write [batch]")
    if not (isinstance(loader, Iterable) or hasattr(loader, "__getitem__")):
        raise TypeError(
            f"loader={_short(loader)} cannot be iterated over; pass a DataLoader, or a list of "
            f"batches"
        )
    if isinstance(loader, (tuple, list)) and _is_a_pair(loader):
        x, y = (tuple(tensor.shape) for tensor in loader)
        raise TypeError(
            f"loader={type(loader).__name__} of tensors {x} and {y} looks like inputs and targets, "
            f"but would be two batches; write [(x, y)], or "
            f"DataLoader(TensorDataset(x, y), batch_size=64)"
        )
    for layer in patterns or ():
        if isinstance(layer, str):
            continue
        if isinstance(layer, type):
            pattern = layer.__name__
        else:
            names = unwrapped(model).named_modules()
            pattern = next((name for name, each in names if each is layer), "")
        remedy = f'write layers=["{pattern}"]' if pattern else "pass names of the model's modules"
        raise TypeError(
            f"layers= takes names of modules or of their classes, as strings, and not "
            f"{_short(layer)}; {remedy}"
        )


def _short(value: Any) -> str:
    """A class's or a value's own name, on one line."""
    return value.__name__ if isinstance(value, type) else f"{type(value).__name__}(...)"


def _is_a_pair(loader: Sequence[Any]) -> bool:
    """Whether two tensors are a batch's inputs and targets, and not two batches of inputs."""
    if len(loader) != 2 or not all(isinstance(each, Tensor) and each.dim() for each in loader):
        return False
    x, y = loader
    if len(x) != len(y):
        return False
    if x.dtype != y.dtype or x.dim() != y.dim():
        return True
    return bool(x.dim() == 2 and x.is_floating_point() and x.shape != y.shape)


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
        """Raise unless the options are valid, and fit each other."""
        for name, kind in (("factors", Factors), ("keep", Keep)):
            if (value := getattr(self, name)) not in get_args(kind):
                known = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name}={value!r} is not one of {known}")
        named = self.likelihood is not None and not callable(self.likelihood)
        if named and self.likelihood not in LIKELIHOODS:
            known = ", ".join(map(repr, LIKELIHOODS))
            raise ValueError(f"likelihood={self.likelihood!r} is not one of {known}, or a function")
        self._check_loss()
        for name, arguments in (("mask", "batch"), ("call", "model, batch")):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TypeError(
                    f"{name}={_short(getattr(self, name))} is not a function; write "
                    f"{name}=lambda {arguments}: ..."
                )
        if self.loss is not None and self.factors == "inputs":
            raise ValueError('factors="inputs" takes no loss=: A is of inputs alone; use "kfac"')
        if self.memory is not None and not isinstance(self.memory, (int, float)):
            raise TypeError(
                f"memory={self.memory!r} is not a number of bytes; write memory=2 * 2**30 for 2 GiB"
            )
        if self.memory is not None and self.memory <= 0:
            raise ValueError(f"memory={self.memory} bytes must be positive")

    def _check_loss(self) -> None:
        if self.loss is None:
            return
        if not callable(self.loss):
            raise TypeError(
                f"loss={self.loss!r} is not a function; write loss=lambda output, batch: ..."
            )
        function = self.loss.func if isinstance(self.loss, functools.partial) else self.loss
        of_torch = isinstance(function, _Loss) and type(function).__module__.startswith("torch.")
        if of_torch or function in vars(nn.functional).values():
            named = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"loss={named} takes (output, target), and measure calls loss(output, batch); "
                f'write loss=lambda output, batch: criterion(output, batch[1]), or batch["labels"] '
                f'of a mapping, with the criterion\'s reduction="none"'
            )

    def identity(
        self,
        layers: Sequence[Layer],
        passes: Sequence[Sequence[Layer]],
        world: World,
        dtype: Any,
        batches: int | None,
    ) -> dict[str, Any]:
        """What identifies this measurement in this process's saves.

        ``batches``: the loader's length; None if it is not known, which fits any other.
        """
        weights = [local(layer.block.weight).detach() for layer in layers]
        norms = [torch.linalg.vector_norm(w, dtype=torch.float64) for w in weights]
        sizes = {layer.name: list(map(int, layer.shape.gradient_size)) for layer in layers}
        return {
            "factors": self.factors,
            "keep": self.keep,
            "memory": [[layer.name for layer in each] for each in passes],
            "seed": self.seed,
            "likelihood": fingerprint(self.likelihood),
            "loss": fingerprint(self.loss),
            "mask": fingerprint(self.mask),
            "call": fingerprint(self.call),
            "number of batches": batches,
            "processes": world.size,
            "layers": sizes,
            "dtype": str(dtype),
            "weights": [f"{norm:.9e}" for (norm,) in read(norms)],
        }

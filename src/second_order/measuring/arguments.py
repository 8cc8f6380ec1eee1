"""Checks of the arguments of ``measure``, each with what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from second_order.kronecker.fisher import LIKELIHOODS
from second_order.measuring.hooks import unwrapped
from second_order.measuring.sums import Keep

__all__ = ["Factors", "check_arguments", "patterns_of"]

Factors: TypeAlias = Literal["inputs", "kfac", "ekfac"]

POSITIONS_FIRST = (
    'factors="ekfac" needs the gradients of single examples, and layer {name!r} has positions '
    'before examples; make it with batch_first=True, or use factors="kfac"'
)


def patterns_of(layers: Any) -> list[str] | None:
    """The patterns in ``layers=``, of which there may be just one; None for all layers.

    Raises:
        TypeError: For modules and classes.
    """
    if layers is None:
        return None
    # Some modules are iterable.
    is_single = isinstance(layers, (str, type, nn.Module)) or not isinstance(layers, Iterable)
    patterns = [layers] if is_single else list(layers)
    for pattern in patterns:
        if not isinstance(pattern, str):
            kind = pattern if isinstance(pattern, type) else type(pattern)
            raise TypeError(
                f"layers= takes names of modules or of their classes, as strings, and not "
                f'{_short(pattern)}; write layers=["{kind.__name__}"], or names of the model\'s '
                f"modules"
            )
    return patterns


def check_arguments(
    model: Any,
    loader: Any,
    factors: str,
    loss: Any,
    likelihood: Any,
    mask: Any,
    call: Any,
    keep: str,
) -> None:
    """Raise unless the arguments are what their names say, and fit each other.

    Raises:
        TypeError: If one is something else.
        ValueError: If a value is not one of those that there are.
    """
    _check_model_and_loader(model, loader)
    for name, value, kind in (("factors", factors, Factors), ("keep", keep, Keep)):
        if value not in get_args(kind):
            known = ", ".join(map(repr, get_args(kind)))
            raise ValueError(f"{name}={value!r} is not one of {known}")
    if not (likelihood is None or callable(likelihood) or likelihood in LIKELIHOODS):
        known = ", ".join(map(repr, LIKELIHOODS))
        raise ValueError(f"likelihood={likelihood!r} is not one of {known}, or a function")
    functions = (
        ("loss", loss, "output, batch"),
        ("mask", mask, "batch"),
        ("call", call, "model, batch"),
    )
    for name, function, parameters in functions:
        if not (function is None or callable(function)):
            raise TypeError(
                f"{name}={_short(function)} is not a function; write {name}=lambda {parameters}: "
                f"..."
            )
    if loss is not None:
        if factors == "inputs":
            raise ValueError('factors="inputs" takes no loss=: A is of inputs alone; use "kfac"')
        _check_loss(loss)
    if factors == "ekfac":
        if hasattr(loader, "__next__"):
            raise ValueError(
                'the loader can be iterated over only once, and factors="ekfac" takes a second '
                "pass: give a list of batches, or a DataLoader"
            )
        for name, module in unwrapped(model).named_modules():
            if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and not module.batch_first:
                raise ValueError(POSITIONS_FIRST.format(name=name))


def _check_model_and_loader(model: Any, loader: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={_short(model)} is not a torch.nn.Module; write measure(model, loader)"
        )
    if isinstance(loader, Mapping):
        raise TypeError(f"loader={_short(loader)} looks like a single batch; write [batch]")
    if isinstance(loader, nn.Module) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"loader={_short(loader)} cannot be iterated over; pass a DataLoader, or a list of "
            f"batches"
        )
    if isinstance(loader, (tuple, list)) and _is_inputs_and_targets(loader):
        x, y = (tuple(tensor.shape) for tensor in loader)
        raise TypeError(
            f"loader={_short(loader)} of tensors {x} and {y} looks like inputs and targets, but "
            f"would be two batches; write [(x, y)], or DataLoader(TensorDataset(x, y), "
            f"batch_size=64)"
        )


def _is_inputs_and_targets(loader: Sequence[Any]) -> bool:
    """Whether two tensors are a batch's inputs and targets, and not two batches of inputs."""
    if len(loader) != 2 or not all(isinstance(each, Tensor) and each.dim() for each in loader):
        return False
    x, y = loader
    return len(x) == len(y) and (x.dtype, x.shape) != (y.dtype, y.shape)


def _check_loss(loss: Any) -> None:
    """Raise for torch's own losses, which take the target instead of the batch."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    is_module = isinstance(function, _Loss) and type(function).__module__.startswith("torch.")
    if is_module or function in vars(nn.functional).values():
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"loss={name} takes (output, target), and measure calls loss(output, batch); write "
            f'loss=lambda output, batch: criterion(output, batch[1]), or batch["labels"] of a '
            f'mapping, with the criterion\'s reduction="none"'
        )


def _short(value: Any) -> str:
    """The name of a class, or of a value's class, on one line."""
    return value.__name__ if isinstance(value, type) else f"{type(value).__name__}(...)"

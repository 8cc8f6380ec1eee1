"""Checks of the arguments of ``measure``, each with what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from second_order.measuring.batches import Likelihood
from second_order.measuring.hooks import unwrapped
from second_order.measuring.sums import Keep
from second_order.utils.checks import check_choice

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
    is_iterable = isinstance(layers, Iterable) and not isinstance(layers, (str, type, nn.Module))
    patterns = list(layers) if is_iterable else [layers]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"layers= takes names of modules or of their classes, as strings, and not "
                f'{_short(pattern)}; write layers=["Linear"], or names of modules'
            )
    return patterns


def check_arguments(
    model: Any, loader: Any, factors: str, loss: Any, likelihood: Any, keep: str
) -> None:
    """Raise unless the arguments are what their names say, and fit each other.

    Raises:
        TypeError: If one is something else.
        ValueError: If a value is not one of those that there are.
    """
    _check_model_and_loader(model, loader)
    check_choice("factors", factors, get_args(Factors))
    check_choice("keep", keep, get_args(Keep))
    if likelihood is not None:
        check_choice("likelihood", likelihood, get_args(Likelihood))
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
    if isinstance(loader, (tuple, list)) and len(loader) == 2:
        x, y = loader
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() and y.dim()):
            return
        if len(x) == len(y) and (x.dtype, x.shape) != (y.dtype, y.shape):
            raise TypeError(
                f"loader={_short(loader)} of tensors {tuple(x.shape)} and {tuple(y.shape)} looks "
                f"like inputs and targets, but would be two batches; write [(x, y)], or "
                f"DataLoader(TensorDataset(x, y), batch_size=64)"
            )


def _check_loss(loss: Any) -> None:
    """Raise for torch's own losses, which take the target instead of the batch."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    if isinstance(function, _Loss) or function in vars(nn.functional).values():
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"loss={name} takes (output, target), and measure calls loss(output, batch); write "
            f'loss=lambda output, batch: criterion(output, batch[1]), or batch["labels"] of a '
            f'mapping, with the criterion\'s reduction="none"'
        )


def _short(value: Any) -> str:
    """The name of a class, or of a value's class, on one line."""
    return value.__name__ if isinstance(value, type) else f"{type(value).__name__}(...)"

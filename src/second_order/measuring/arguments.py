"""Check the arguments of ``measure``. Each error says what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from second_order.measuring.batches import Likelihood
from second_order.measuring.sums import Keep
from second_order.utils.checks import check_choice, check_seed
from second_order.utils.modules import unwrapping_chain

__all__ = ["Factors", "check_arguments", "parse_patterns"]

Factors: TypeAlias = Literal["inputs", "kfac", "ekfac"]

POSITIONS_FIRST = (
    'factors="ekfac" needs the gradients of single examples, but layer {name!r} has positions '
    'before examples; make it with batch_first=True, or use factors="kfac"'
)

SIGNATURES = {
    "loss": "loss=lambda output, batch: ..., which returns the terms of the loss",
    "mask": "mask=lambda batch: ..., which returns a tensor of shape (examples, ...)",
    "call": "call=lambda model, batch: ..., which returns the model's output",
}


def parse_patterns(layers: Any) -> list[str] | None:
    """Return the patterns of ``layers=``, which may be a single one; None for all.

    Raises:
        TypeError: If there are modules or classes instead of names.
    """
    if layers is None:
        return None
    if isinstance(layers, (str, type, nn.Module)) or not isinstance(layers, Iterable):
        layers = [layers]  # a Sequential is iterable, but its layers are not patterns
    patterns = list(layers)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"layers= takes names of modules or classes as strings, not "
                f'{_describe(pattern)}; write layers=["Linear"], or names of modules'
            )
    return patterns


def check_arguments(
    model: Any,
    loader: Any,
    *,
    factors: str,
    loss: Any,
    likelihood: Any,
    mask: Any,
    call: Any,
    keep: str,
    seed: Any,
) -> None:
    """Check that the arguments have the right types and fit each other.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is not among the choices, or if two arguments exclude
            each other.
    """
    _check_model_and_loader(model, loader)
    check_choice("factors", factors, get_args(Factors))
    check_choice("keep", keep, get_args(Keep))
    check_seed("seed", seed)
    if likelihood is not None:
        check_choice("likelihood", likelihood, get_args(Likelihood))
    for name, function in (("loss", loss), ("mask", mask), ("call", call)):
        if function is not None and not callable(function):
            raise TypeError(
                f"{name}={_describe(function)} is not a function; write {SIGNATURES[name]}"
            )

    # Check that the options do not exclude each other.
    for name, value in (("loss", loss), ("likelihood", likelihood)):
        if value is not None and factors == "inputs":
            raise ValueError(
                f'factors="inputs" takes no {name}=, because A depends on inputs only; use "kfac" '
                f"for G, or leave {name} out"
            )
    if loss is not None:
        if likelihood is not None:
            raise ValueError(
                f"likelihood={likelihood!r} is for sampled labels, but loss= replaces them; leave "
                f"one of them out"
            )
        _check_loss(loss)
    if factors == "ekfac":
        _check_ekfac(model, loader)


def _check_ekfac(model: nn.Module, loader: Any) -> None:
    """Check that a second pass is possible, and that examples come first in tensors."""
    if hasattr(loader, "__next__"):
        raise ValueError(
            'the loader can be iterated over only once, but factors="ekfac" needs a second pass; '
            "pass a list of batches, or a DataLoader"
        )
    for name, module in unwrapping_chain(model)[-1].named_modules():
        has_order = isinstance(module, (nn.MultiheadAttention, nn.RNNBase))
        if has_order and not module.batch_first:
            raise ValueError(POSITIONS_FIRST.format(name=name))


def _check_model_and_loader(model: Any, loader: Any) -> None:
    """Check the types, and catch a single batch that was passed as a loader."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={_describe(model)} is not a torch.nn.Module; write measure(model, loader)"
        )
    if isinstance(loader, Mapping):
        raise TypeError(
            f"loader={_describe(loader)} looks like a single batch; write [batch]"
        )
    if isinstance(loader, nn.Module) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"loader={_describe(loader)} cannot be iterated over; pass a DataLoader, or a list of "
            f"batches"
        )
    if not isinstance(loader, (tuple, list)) or len(loader) != 2:
        return

    # Two batches of inputs have the same dtype and number of dimensions. If they are
    # matrices of floats, they also have the same width. Other sizes may differ, such as
    # the lengths of padded sequences.
    x, y = loader
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return
    if x.dim() == 0 or y.dim() == 0:
        return
    same_layout = x.dtype == y.dtype and x.dim() == y.dim()
    if x.is_floating_point() and x.dim() == 2:
        same_layout = same_layout and x.shape == y.shape
    if len(x) == len(y) and not same_layout:
        raise TypeError(
            f"loader={_describe(loader)} of tensors {tuple(x.shape)} and {tuple(y.shape)} looks "
            f"like inputs and targets, but would be two batches; write [(x, y)], or "
            f"DataLoader(TensorDataset(x, y), batch_size=64)"
        )


def _check_loss(loss: Any) -> None:
    """Refuse the losses of torch, which take the target instead of the batch."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    if isinstance(function, _Loss) or function in vars(nn.functional).values():
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"loss={name} takes (output, target), but measure calls loss(output, batch); write "
            f'loss=lambda output, batch: criterion(output, batch[1]), or batch["labels"] if the '
            f'batch is a mapping, with reduction="none" for the criterion'
        )


def _describe(value: Any) -> str:
    """Return the name of a class, or "Class(...)" for another value."""
    if isinstance(value, type):
        return value.__name__
    return f"{type(value).__name__}(...)"

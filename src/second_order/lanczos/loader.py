"""A data loader in place of a curvature closure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from second_order.lanczos.closure import LossFn, Outputs

__all__ = ["losses_over"]


def losses_over(
    model: nn.Module, batches: Iterable[Any], criterion: Callable[[Any, Any], Tensor]
) -> list[LossFn]:
    """Make the curvature closures of all batches of a loader, whose loss is the mean over examples.

        losses = losses_over(model, loader, torch.nn.functional.cross_entropy)
        eigenpairs(losses, model, largest=10)

    Batches weigh by their examples, so that a shorter last one counts for what it is. They are read
    once, and stay where they are: every product has the same ones, whatever the loader shuffles or
    augments. One batch at a time is moved to the model's device, and has its graph in memory.

    Args:
        model: Evaluates the outputs, in the train/eval mode that it is in then.
        batches: Pairs (inputs, targets), as a ``DataLoader`` gives them. Inputs are a tensor,
            a tuple or list of positional arguments, or a mapping of keyword arguments.
        criterion: The loss of (outputs, targets): its mean over the batch's examples, or a loss an
            example.

    Returns:
        A function for each batch, which returns (:class:`Outputs`, number of examples).

    Raises:
        ValueError: If there is no batch, or one is no such pair, or the criterion sums.
    """
    if getattr(criterion, "reduction", "mean") == "sum":
        raise ValueError(
            f"{type(criterion).__name__} has reduction='sum', and batches are weighted by their "
            f"examples; use reduction='mean'"
        )
    found: list[LossFn] = []
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"batch {len(found)} is {_described(batch)}, not a pair (inputs, targets); give "
                f"such pairs, or write a closure a batch"
            )
        if _count(batch[1]) == 0:
            raise ValueError(f"batch {len(found)} has no targets; leave it out")
        found.append(partial(_loss, model, criterion, *batch))
    if not found:
        raise ValueError("there is no batch; give a loader, or a list of (inputs, targets)")
    return found


def _loss(
    model: nn.Module, criterion: Callable[[Any, Any], Tensor], inputs: Any, targets: Any
) -> tuple[Outputs, int]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, targets = _moved(inputs, device), _moved(targets, device)
    if isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, (tuple, list)):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    return Outputs(outputs, lambda z: criterion(z, targets)), _count(targets)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_moved(each, device) for each in value]
    return value


def _count(targets: Any) -> int:
    """Number of examples: the length of the targets, or of the first of several."""
    if isinstance(targets, Mapping):
        targets = list(targets.values())
    if isinstance(targets, (tuple, list)) and targets and isinstance(targets[0], Tensor):
        targets = targets[0]
    try:
        return len(targets)
    except TypeError:
        raise ValueError(
            f"targets are {_described(targets)}; give a tensor, an example a row"
        ) from None


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"

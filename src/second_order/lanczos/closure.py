"""What a curvature closure returns: a loss, or outputs of the model and their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from second_order.errors import CurvatureError
from second_order.utils.checks import check_choice

__all__ = [
    "CurvatureKind",
    "Evaluation",
    "LossFn",
    "Outputs",
    "check_closure",
    "check_curvature",
    "evaluated",
    "losses_over",
]

LossFn: TypeAlias = Callable[[], Any]
CurvatureKind: TypeAlias = Literal["hessian", "gauss-newton", "empirical-fisher"]


@dataclass(frozen=True)
class Outputs:
    """A model's outputs and the function that makes their loss, for a curvature closure to return.

        closure = lambda: Outputs(model(x), lambda z: cross_entropy(z, y))

    A Gauss-Newton matrix J'HJ cuts the loss in two here: J is the Jacobian of the outputs with
    respect to the parameters, H the Hessian of the loss with respect to the outputs.

    Attributes:
        outputs: A tensor, or a tuple or list of tensors, of any shapes.
        loss: Evaluates the loss of the outputs, which it is given as they are here: a scalar, the
            mean over examples; or ``(N,)``, a loss an example (``reduction="none"``), of which the
            mean is taken, and which count as N examples. The latter is what an empirical Fisher
            needs. It must not change the outputs in place.
    """

    outputs: Any
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """A closure's loss at the parameters as they are.

    The roots are the tensors whose Jacobian makes the curvature: the outputs for "gauss-newton",
    the examples' losses ``(N,)`` for "empirical-fisher", none for "hessian".
    """

    loss: Tensor  # the mean, a scalar; with "gauss-newton" its graph ends at the leaves
    examples: float  # the weight of that mean
    roots: list[Tensor]
    leaves: list[Tensor]  # the detached outputs that it was evaluated at, with "gauss-newton"


def check_curvature(value: Any, hvp: str = "auto") -> None:
    """Raise ValueError unless ``value`` names a curvature matrix that has such products."""
    if value == "fisher":
        raise ValueError(
            "curvature='fisher' may mean two matrices: the Fisher information of a softmax with "
            "cross-entropy, or of a squared error, is 'gauss-newton'; that of the labels in the "
            "data is 'empirical-fisher'"
        )
    check_choice("curvature", value, get_args(CurvatureKind))
    if value != "hessian" and hvp == "differences":
        raise ValueError(
            f"hvp='differences' with curvature={value!r}: it is multiplied by derivatives alone; "
            f"use hvp='auto', or curvature='hessian'"
        )


def check_closure(given: Any) -> None:
    """Raise unless ``given`` is a function that evaluates a loss, or a sequence of some.

    Raises:
        TypeError: If an element is not a function.
        ValueError: If the sequence is empty.
    """
    closures = given if isinstance(given, (tuple, list)) else [given]
    if closures and all(map(callable, closures)):
        return
    error = TypeError if closures else ValueError
    raise error(
        f"the curvature closure is {given!r}; give a function that returns the loss of the "
        f"curvature batch, or a sequence of such functions, one for each micro-batch"
    )


def evaluated(value: Any, curvature: CurvatureKind) -> Evaluation:
    """Check what a closure has returned, and evaluate the loss of :class:`Outputs`.

    Raises:
        CurvatureError: If it is no loss with a graph, or not what the curvature needs.
    """
    examples = None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value, examples = value
    if not isinstance(value, Outputs):
        if curvature != "hessian":
            is_fisher = curvature == "empirical-fisher"
            example = 'cross_entropy(z, y, reduction="none")' if is_fisher else "criterion(z, y)"
            raise CurvatureError(
                f"curvature={curvature!r} needs the model's outputs and their loss, and the "
                f"curvature closure returned {_described(value)}; return "
                f"second_order.lanczos.Outputs(model(x), lambda z: {example}), or use "
                f"curvature='hessian'"
            )
        return Evaluation(_scalar(value), _weight(examples), [], [])
    outputs = value.outputs
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(z, Tensor) for z in tensors):
        raise CurvatureError(
            f"the curvature closure returned Outputs of {_described(outputs)}; give the tensor "
            f"that the loss is a function of, or a tuple of tensors"
        )

    # Cut the loss in two at the outputs.
    roots: list[Tensor] = []
    leaves: list[Tensor] = []
    if curvature == "gauss-newton":
        copies = [z.detach().requires_grad_(z.requires_grad) for z in tensors]
        if isinstance(outputs, Tensor):
            outputs = copies[0]
        else:
            outputs = copies if isinstance(outputs, list) else tuple(copies)
        roots = [z for z in tensors if z.requires_grad]
        leaves = [z for z in copies if z.requires_grad]
        if not roots:
            raise CurvatureError(
                "the curvature closure returned Outputs without a graph; do not detach them, and "
                "do not evaluate them under torch.no_grad()"
            )

    # Evaluate the loss, or the loss of each example.
    loss: Any = value.loss(outputs)
    by_example = isinstance(loss, Tensor) and loss.dim() == 1 and len(loss) > 0
    if curvature == "empirical-fisher":
        if not by_example:
            raise CurvatureError(
                f"curvature='empirical-fisher' needs a loss for each example, and the loss of the "
                f"curvature closure's Outputs is {_described(loss)}; let it return a vector of "
                f'them, as with reduction="none"'
            )
        roots = [loss]
    if by_example:
        examples = len(loss) if examples is None else examples
        loss = loss.mean()
    return Evaluation(_scalar(loss), _weight(examples), roots, leaves)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (tuple, list)) else f"a {kind}"


def _scalar(value: Any) -> Tensor:
    said = f"the curvature closure returned {_described(value)}"
    if not isinstance(value, Tensor):
        raise CurvatureError(
            f"{said}, not the loss; return the scalar tensor, or (loss, number of examples)"
        )
    if value.numel() != 1:
        raise CurvatureError(f"{said}, not a scalar; return its mean or its sum")
    if not value.requires_grad:
        raise CurvatureError(
            "the curvature closure returned a loss without a graph; do not detach it, and do not "
            "evaluate it under torch.no_grad()"
        )
    return value.reshape(())


def _weight(examples: Any) -> float:
    """The number of examples that a loss is the mean of; None counts as one."""
    weight = math.nan
    with suppress(TypeError, ValueError, RuntimeError):
        weight = 1.0 if examples is None else float(examples)
    if not 0.0 < weight < math.inf:
        raise CurvatureError(
            f"the curvature closure returned (loss, {type(examples).__name__}) of {weight:g} "
            f"examples; return the loss alone, or (loss, number of examples), at least one"
        )
    return weight


# A data loader in place of a closure.


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
            a tuple or list of positional arguments, or a mapping of keyword arguments; targets a
            tensor with a row for each example.
        criterion: The loss of (outputs, targets): its mean over the batch's examples, or a loss for
            each example.

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
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise ValueError(
                f"batch {len(found)} is {_described(batch)}, not a pair (inputs, targets); give "
                f"such pairs, or write a closure for each batch"
            )
        found.append(partial(_loss, model, criterion, *batch))
    if not found:
        raise ValueError("there is no batch; give a loader, or a list of (inputs, targets)")
    return found


def _loss(
    model: nn.Module, criterion: Callable[[Any, Any], Tensor], inputs: Any, targets: Tensor
) -> tuple[Outputs, int]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    targets = targets.to(device)
    if isinstance(inputs, Mapping):
        outputs = model(**{name: _moved(x, device) for name, x in inputs.items()})
    elif isinstance(inputs, (tuple, list)):
        outputs = model(*(_moved(x, device) for x in inputs))
    else:
        outputs = model(_moved(inputs, device))
    return Outputs(outputs, lambda z: criterion(z, targets)), len(targets)


def _moved(value: Any, device: torch.device) -> Any:
    """A batch with all of its tensors on a device, nested ones included."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

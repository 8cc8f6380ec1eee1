"""What a curvature closure returns: a loss, or outputs of the model and their loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from second_order.errors import CurvatureError

__all__ = [
    "CurvatureKind",
    "Evaluation",
    "LossFn",
    "Outputs",
    "check_closure",
    "check_curvature",
    "evaluated",
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

    Attributes:
        loss: The mean loss, a scalar. Its graph reaches the parameters; with "gauss-newton" it
            ends at ``leaves``.
        examples: The weight of that mean.
        roots: The tensors whose Jacobian makes the curvature: the outputs for "gauss-newton", the
            examples' losses ``(N,)`` for "empirical-fisher", none for "hessian".
        leaves: The detached outputs that the loss was evaluated at, one a root, for "gauss-newton".
    """

    loss: Tensor
    examples: float
    roots: list[Tensor]
    leaves: list[Tensor]


def check_curvature(value: Any) -> None:
    """Raise ValueError unless ``value`` names a curvature matrix."""
    if value in get_args(CurvatureKind):
        return
    if value == "fisher":
        raise ValueError(
            "curvature='fisher' may mean two matrices: the Fisher information of a softmax with "
            "cross-entropy, or of a squared error, is 'gauss-newton'; that of the labels in the "
            "data is 'empirical-fisher'"
        )
    raise ValueError(
        f"curvature={value!r} is not one of {', '.join(map(repr, get_args(CurvatureKind)))}"
    )


def check_closure(given: Any) -> None:
    """Raise unless ``given`` is a function that evaluates a loss, or a sequence of some.

    Raises:
        TypeError: If an element is no function.
        ValueError: If the sequence is empty.
    """
    several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    for each in given if several else [given]:
        if not callable(each):
            raise TypeError(
                f"the curvature closure is {each!r}; give a function that returns the loss of the "
                f"curvature batch, or a sequence of such functions"
            )
    if several and not given:
        raise ValueError(
            "the curvature closure is an empty sequence; give a function that returns the loss of "
            "the curvature batch, or one a micro-batch"
        )


def evaluated(value: Any, curvature: CurvatureKind) -> Evaluation:
    """Check what a closure has returned, and evaluate the loss of :class:`Outputs`.

    Raises:
        CurvatureError: If it is no loss with a graph, or not what the curvature needs.
    """
    counted = isinstance(value, (tuple, list)) and len(value) == 2
    value, examples = value if counted else (value, 1.0)
    if not isinstance(value, Outputs):
        if curvature != "hessian":
            raise CurvatureError(_needs_outputs(curvature, value))
        return Evaluation(_scalar(value), _weight(examples), [], [])
    outputs, leaves = _tensors(value.outputs), []
    losses: Any
    if curvature == "gauss-newton":
        roots = [z for z in outputs if z.requires_grad]
        if not roots:
            raise CurvatureError(
                "the curvature closure returned Outputs without a graph; do not detach them, and "
                "do not evaluate them under torch.no_grad()"
            )
        copies = [z.detach().requires_grad_(z.requires_grad) for z in outputs]
        leaves = [z for z in copies if z.requires_grad]
        losses = value.loss(_like(value.outputs, copies))
    else:
        losses = value.loss(value.outputs)
    each = isinstance(losses, Tensor) and losses.dim() == 1 and len(losses) > 0
    if curvature == "empirical-fisher":
        if not each:
            raise CurvatureError(
                f"curvature='empirical-fisher' needs a loss an example, and the loss of the "
                f"curvature closure's Outputs is {_described(losses)}; let it return a vector of "
                f'them, as with reduction="none"'
            )
        roots = [losses]
    elif curvature == "hessian":
        roots = []
    if each and not counted:
        examples = len(losses)
    return Evaluation(_scalar(losses.mean() if each else losses), _weight(examples), roots, leaves)


def _tensors(outputs: Any) -> list[Tensor]:
    found = [outputs] if isinstance(outputs, Tensor) else outputs
    if not isinstance(found, (tuple, list)) or not all(isinstance(z, Tensor) for z in found):
        raise CurvatureError(
            f"the curvature closure returned Outputs of {type(outputs).__name__}; give the tensor "
            f"that the loss is a function of, or a tuple of tensors"
        )
    return list(found)


def _like(outputs: Any, copies: list[Tensor]) -> Any:
    if isinstance(outputs, Tensor):
        return copies[0]
    return copies if isinstance(outputs, list) else tuple(copies)


def _described(value: Any) -> str:
    shaped = isinstance(value, Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if shaped else type(value).__name__


def _needs_outputs(curvature: str, value: Any) -> str:
    loss = 'cross_entropy(z, y, reduction="none")'
    loss = loss if curvature == "empirical-fisher" else "criterion(z, y)"
    return (
        f"curvature={curvature!r} needs the model's outputs and their loss, and the curvature "
        f"closure returned {_described(value)}; return second_order.lanczos.Outputs(model(x), "
        f"lambda z: {loss}), or use curvature='hessian'"
    )


def _scalar(value: Any) -> Tensor:
    """The loss as a scalar with a graph."""
    if not isinstance(value, Tensor):
        raise CurvatureError(
            f"the curvature closure returned {type(value).__name__}, not the loss; return the "
            f"scalar tensor, or (loss, number of examples)"
        )
    if value.numel() != 1:
        raise CurvatureError(
            f"the curvature closure returned a tensor of shape {tuple(value.shape)}, not a scalar; "
            f"return its mean or its sum"
        )
    if not value.requires_grad:
        raise CurvatureError(
            "the curvature closure returned a loss without a graph; do not detach it, and do not "
            "evaluate it under torch.no_grad()"
        )
    return value.reshape(())


def _weight(examples: Any) -> float:
    try:
        weight = float(examples)
    except (TypeError, ValueError, RuntimeError):
        raise CurvatureError(
            f"the curvature closure returned (loss, {type(examples).__name__}); return the loss "
            f"alone, or (loss, number of examples)"
        ) from None
    if not 0.0 < weight < float("inf"):
        raise CurvatureError(
            f"the curvature closure returned {weight:g} examples; return (loss, number of "
            f"examples), at least one"
        )
    return weight

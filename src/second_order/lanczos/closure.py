"""The loss of a curvature closure, and products with its curvature.

A closure returns a loss, or the outputs of the model and their loss.

    Hessian            H v = ∇(gᵀv), where g = ∇L has a graph
    Gauss-Newton       J'HJ v. c -> J'c is linear in c, and its derivative in direction
                       v is J v (a backward through a backward). Then multiply by H, the
                       Hessian of the loss with respect to the outputs, and by J'
                       (Schraudolph, 2002)
    empirical Fisher   the same with the examples' losses as outputs and 1/N as H:
                       J'J/N = (1/N) Σ gᵢgᵢᵀ

If a loss cannot be differentiated twice, the error names the operation and the remedy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from second_order.errors import CurvatureError
from second_order.utils.checks import brief, check_choice

__all__ = [
    "Closures",
    "CurvatureKind",
    "Derivatives",
    "DifferentiableLoss",
    "Evaluation",
    "LossFn",
    "Outputs",
    "check_closure",
    "check_curvature",
    "derivatives",
    "evaluate_closure",
    "explain_errors",
    "losses_over",
]

LossFn: TypeAlias = Callable[[], Any]
Closures: TypeAlias = LossFn | Sequence[LossFn]
# None: the parameter is not in the graph.
Derivatives: TypeAlias = Sequence[Tensor | None]
CurvatureKind: TypeAlias = Literal["hessian", "gauss-newton", "empirical-fisher"]


@dataclass(frozen=True)
class Outputs:
    """A model's outputs and the function that computes their loss.

    Curvature closures return it:

        closure = lambda: Outputs(model(x), lambda z: cross_entropy(z, y))

    The Gauss-Newton matrix J'HJ divides the loss at the outputs: J is the Jacobian of
    the outputs with respect to the parameters, and H the Hessian of the loss with
    respect to the outputs.

    Attributes:
        outputs: A tensor, or a tuple or list of tensors, of any shapes.
        loss: A function of ``outputs`` that returns their loss: a scalar, the mean over
            examples; or ``(N,)``, one loss per example (``reduction="none"``). The mean
            of the latter is taken, and its N examples are the weight of the batch. The
            empirical Fisher needs one loss per example. The function must not change
            the outputs in place.
    """

    outputs: Any
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """The loss of a closure at the current parameters.

    ``roots`` are the tensors whose Jacobian makes the curvature: the outputs for
    "gauss-newton", the examples' losses ``(N,)`` for "empirical-fisher", none for
    "hessian".
    """

    loss: Tensor  # the mean, a scalar. With "gauss-newton" its graph ends at the leaves
    examples: float  # the weight of that mean
    roots: list[Tensor]
    # With "gauss-newton", the detached outputs that the loss is a function of.
    leaves: list[Tensor]


def check_curvature(value: Any, hvp: str = "auto") -> None:
    """Check that ``value`` names a curvature matrix that ``hvp`` supports.

    Raises:
        ValueError: If not.
    """
    if value == "fisher":
        raise ValueError(
            "curvature='fisher' is ambiguous; use 'gauss-newton' for the Fisher information of a "
            "softmax with cross-entropy or of a squared error, and 'empirical-fisher' for the "
            "Fisher with the labels of the data"
        )
    check_choice("curvature", value, get_args(CurvatureKind))
    if value != "hessian" and hvp == "differences":
        raise ValueError(
            f"hvp='differences' does not support curvature={value!r}; use hvp='auto', or "
            f"curvature='hessian'"
        )


def check_closure(value: Any) -> None:
    """Check that ``value`` is a function, or a sequence of functions.

    Raises:
        TypeError: If an element is not a function.
        ValueError: If the sequence is empty.
    """
    closures = value if isinstance(value, (tuple, list)) else [value]
    if closures and all(map(callable, closures)):
        return
    error = TypeError if closures else ValueError
    raise error(
        f"the curvature closure is {value!r}; pass a function that returns the loss of the "
        f"curvature batch, or a sequence of such functions, one per micro-batch"
    )


def evaluate_closure(value: Any, curvature: CurvatureKind) -> Evaluation:
    """Check what a closure returned, and evaluate the loss of :class:`Outputs`.

    Raises:
        CurvatureError: If it has no graph, or is not what the curvature needs.
    """
    # The closure returned a loss, or Outputs; perhaps with a number of examples.
    examples = None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value, examples = value
    if not isinstance(value, Outputs):
        if curvature != "hessian":
            raise CurvatureError(_needs_outputs(value, curvature))
        return Evaluation(
            loss=_check_loss(value),
            examples=_check_examples(examples),
            roots=[],
            leaves=[],
        )

    outputs = value.outputs
    tensors = _check_outputs(outputs)
    roots: list[Tensor] = []
    leaves: list[Tensor] = []
    if curvature == "gauss-newton":
        roots = [z for z in tensors if z.requires_grad]
        if not roots:
            raise CurvatureError(
                "the curvature closure returned Outputs without a graph; do not detach them, and "
                "do not evaluate them under torch.no_grad()"
            )
        # Detach the outputs, so that the graph of their loss ends at them.
        copies = [z.detach().requires_grad_(z.requires_grad) for z in tensors]
        leaves = [z for z in copies if z.requires_grad]
        if isinstance(outputs, Tensor):
            outputs = copies[0]
        elif hasattr(outputs, "_make"):  # a named tuple
            outputs = outputs._make(copies)
        else:
            outputs = copies if isinstance(outputs, list) else tuple(copies)

    # Evaluate the loss, or the loss of each example.
    loss: Any = value.loss(outputs)
    is_per_example = isinstance(loss, Tensor) and loss.dim() == 1 and len(loss) > 0
    if curvature == "empirical-fisher":
        if not is_per_example:
            raise CurvatureError(
                f"curvature='empirical-fisher' needs one loss per example, but the loss of the "
                f"curvature closure's Outputs is {_describe(loss)}; return a vector of losses, as "
                f'with reduction="none"'
            )
        roots = [loss]
    if is_per_example:
        examples = len(loss) if examples is None else examples
        loss = loss.mean()
    return Evaluation(_check_loss(loss), _check_examples(examples), roots, leaves)


def _check_outputs(outputs: Any) -> Sequence[Tensor]:
    """Return the tensors of Outputs, or raise CurvatureError."""
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    is_sequence = isinstance(tensors, (tuple, list))
    if not is_sequence or not all(isinstance(z, Tensor) for z in tensors):
        raise CurvatureError(
            f"the curvature closure returned Outputs of {_describe(outputs)}; pass the tensor that "
            f"the loss is a function of, or a tuple of tensors"
        )
    return tensors


def _needs_outputs(value: Any, curvature: CurvatureKind) -> str:
    """Return the error's message for a closure that did not return Outputs."""
    loss = "criterion(z, y)"
    if curvature == "empirical-fisher":
        loss = 'cross_entropy(z, y, reduction="none")'
    return (
        f"curvature={curvature!r} needs the model's outputs and their loss, but the curvature "
        f"closure returned {_describe(value)}; return second_order.lanczos.Outputs(model(x), "
        f"lambda z: {loss}), or use curvature='hessian'"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, (tuple, list)):
        return f"a {kind} of {len(value)}"
    return f"a {kind}"


def _check_loss(value: Any) -> Tensor:
    """Return a loss as a tensor without dimensions, or raise CurvatureError."""
    if not isinstance(value, Tensor):
        raise CurvatureError(
            f"the curvature closure returned {_describe(value)}, not the loss; return the scalar "
            f"tensor, or (loss, number of examples)"
        )
    if value.numel() != 1:
        raise CurvatureError(
            f"the curvature closure returned {_describe(value)}, not a scalar; return its mean or "
            f"its sum"
        )
    if not value.requires_grad:
        raise CurvatureError(
            "the curvature closure returned a loss without a graph; do not detach it, and do not "
            "evaluate it under torch.no_grad()"
        )
    return value.reshape(())


def _check_examples(examples: Any) -> float:
    """Return a loss's number of examples, 1 for None, or raise CurvatureError."""
    weight = math.nan
    with suppress(TypeError, ValueError, RuntimeError):
        weight = 1.0 if examples is None else float(examples)
    if not 0.0 < weight < math.inf:
        raise CurvatureError(
            f"the curvature closure returned the pair (loss, {brief(examples)}); return the loss "
            f"alone, or (loss, number of examples), at least one"
        )
    return weight


# -------------------------------------------------------------------------- derivatives


class DifferentiableLoss:
    """The loss of a batch, with a graph of its first derivatives.

    Attributes:
        examples: The number of examples.
        gradients: g, or J'c for "gauss-newton" and "empirical-fisher", with a graph.

    Raises:
        CurvatureError: If the loss cannot be differentiated twice.
    """

    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None:
        self.examples = evaluation.examples
        self._params = params
        self._roots = evaluation.roots
        self._leaves = evaluation.leaves

        # The derivatives of the loss with respect to the outputs.
        loss = evaluation.loss
        self._output_gradients: Derivatives = []
        if self._leaves:
            self._output_gradients = derivatives([loss], self._leaves, twice=True)

        # g, or J'c. The values of c do not matter.
        self._cotangents: list[Tensor] = []
        for z in self._roots:
            self._cotangents.append(torch.zeros_like(z, requires_grad=True))
        roots = self._roots or [loss]
        cotangents = self._cotangents or None
        self.gradients = derivatives(roots, params, cotangents, twice=True)

    def product(
        self, directions: Sequence[Tensor], *, retain: bool
    ) -> Sequence[Tensor]:
        """Multiply the curvature by a vector.

        Args:
            directions: The vector's part for each parameter, in the parameter's shape.
            retain: Whether to retain the graph for another product.
        """
        gradients = self.gradients
        if not self._roots:
            return _vector_products(gradients, self._params, directions, retain=retain)

        # J v
        pushed = _vector_products(gradients, self._cotangents, directions, retain=True)

        # H J v
        if self._leaves:
            pushed = _vector_products(
                self._output_gradients, self._leaves, pushed, retain=True
            )
        else:
            pushed = [u / len(u) for u in pushed]

        # J' H J v
        return _vector_products(self._roots, self._params, pushed, retain=retain)


def _vector_products(
    functions: Derivatives,
    inputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    *,
    retain: bool,
) -> Sequence[Tensor]:
    """Return the derivatives of Σ fᵢᵀvᵢ with respect to the inputs, for constant v.

    Functions that are None or without a graph are constant as well, and are left out.
    """
    outputs = []
    grad_outputs = []
    for function, vector in zip(functions, vectors, strict=True):
        if function is not None and function.requires_grad:
            outputs.append(function)
            grad_outputs.append(vector)
    if not outputs:
        return [torch.zeros_like(x) for x in inputs]
    with explain_errors():
        return torch.autograd.grad(
            outputs, inputs, grad_outputs, retain_graph=retain, materialize_grads=True
        )


def derivatives(
    roots: Sequence[Tensor],
    params: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    *,
    twice: bool,
) -> list[Tensor | None]:
    """Compute the derivatives of roots with respect to parameters.

    Args:
        roots: The tensors to differentiate.
        params: The parameters.
        cotangents: The factors of the roots' elements, if the roots are not scalars.
        twice: Whether the result gets a graph, to be differentiated again.

    Raises:
        CurvatureError: If the roots cannot be differentiated as often as needed.
    """
    with explain_errors():
        gradients: Derivatives = torch.autograd.grad(
            roots, params, cotangents, create_graph=twice, allow_unused=True
        )
    is_incomplete = False
    for gradient in gradients:
        if gradient is None:
            is_incomplete = True
        elif gradient.is_sparse:
            raise CurvatureError(
                "an embedding has a sparse gradient, but vectors span all its rows; use "
                "sparse=False"
            )

    # Some custom functions cannot be differentiated like this.
    if twice or is_incomplete:
        functions = _custom_functions(roots)
        if twice:
            # torch would silently return zeros for the second derivatives.
            for function in functions:
                _check_twice_differentiable(function)
        if is_incomplete and CheckpointFunction in functions:
            raise CurvatureError(_REENTRANT)
    return list(gradients)


_USE_DIFFERENCES = 'or use hvp="differences", which supports the Hessian'
_REENTRANT = (
    "torch.autograd.grad cannot differentiate a reentrant checkpoint; use "
    "checkpoint(..., use_reentrant=False)"
)
_COMPILED = (
    "a function compiled by torch.compile cannot be differentiated twice; evaluate the uncompiled "
    f"module in the curvature closure, {_USE_DIFFERENCES}"
)
_REMEDIES = {  # by a part of autograd's message
    "modified by an inplace operation": (
        "the loss was evaluated before the parameters were last changed; evaluate it in every "
        "call of the curvature closure"
    ),
    "a second time": (
        "the graph of the curvature closure's loss has already been freed; evaluate the loss in "
        "the closure and return it, without calling backward()"
    ),
    "donated buffer": _COMPILED,
    "use_reentrant=true": _REENTRANT,
}


@contextmanager
def explain_errors() -> Iterator[None]:
    """Replace autograd's errors by CurvatureErrors that name a remedy."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        message = str(error)
        for part, remedy in _REMEDIES.items():
            if part in message.lower():
                raise CurvatureError(remedy) from error
        missing = re.search(r"derivative for '?([\w:.]+)'? is not implemented", message)
        if missing:
            raise CurvatureError(
                f"torch has no derivative of {missing[1]}, so the loss cannot be differentiated "
                f"twice; replace the operation in the curvature closure, {_USE_DIFFERENCES}"
            ) from error
        raise CurvatureError(
            f"the loss could not be differentiated: {message}"
        ) from error


# The code that @once_differentiable wraps around a backward.
_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__


def _check_twice_differentiable(function: Any) -> None:
    """Raise CurvatureError if an autograd function has no second derivative."""
    if function.__name__ == "CompiledFunction":
        raise CurvatureError(_COMPILED)
    for method in (function.backward, function.vjp):
        if getattr(method, "__code__", None) == _ONCE_DIFFERENTIABLE:
            raise CurvatureError(
                f"the autograd.Function {function.__name__} cannot be differentiated twice, "
                f"because it is marked with @once_differentiable; write its backward in "
                f"differentiable operations, {_USE_DIFFERENCES}"
            )


def _custom_functions(roots: Sequence[Tensor]) -> list[Any]:
    """Return the custom autograd functions in a graph."""
    functions: list[Any] = []
    # A root that is a parameter itself has no function.
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None:
            functions.append(function)
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                stack.append(next_node)
    return functions


# --------------------------------------------------- a data loader instead of a closure


def losses_over(
    model: nn.Module, batches: Iterable[Any], criterion: Callable[[Any, Any], Tensor]
) -> list[LossFn]:
    """Make curvature closures for all batches of a data loader.

        losses = losses_over(model, loader, torch.nn.functional.cross_entropy)
        eigenpairs(losses, model, largest=10)

    The loss is the mean over all examples: batches are weighted by their numbers of
    examples, which matters if the last batch is smaller. The loader is read once, so
    every product uses the same batches even if the loader shuffles or augments. One
    batch at a time is moved to the model's device, and has its graph in memory.

    Args:
        model: Computes the outputs, in its current train/eval mode.
        batches: Pairs (inputs, targets), such as a ``DataLoader``. Inputs are a tensor,
            a tuple or list of positional arguments, or a mapping of keyword arguments.
            Targets are a tensor with one row per example.
        criterion: The loss of (outputs, targets): the mean over the batch's examples,
            or one loss per example. A sum over examples makes the curvature too large.
            Only if it is set as ``reduction`` of a module or a ``functools.partial``,
            it raises an error.

    Returns:
        One function per batch, which returns (:class:`Outputs`, number of examples).

    Raises:
        ValueError: If there is no batch, a batch is not a pair, or the criterion has
            ``reduction="sum"``.
    """
    reduction = getattr(criterion, "reduction", "mean")
    if isinstance(criterion, partial):
        reduction = criterion.keywords.get("reduction", "mean")
    if reduction == "sum":
        raise ValueError(
            "the criterion has reduction='sum', but batches are weighted by their numbers of "
            "examples; use reduction='mean'"
        )
    closures: list[LossFn] = []
    for batch in batches:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise ValueError(
                f"batch {len(closures)} is {_describe(batch)}, not a pair (inputs, targets); "
                f"yield pairs, or write a closure for each batch"
            )
        inputs, targets = batch
        closures.append(partial(_evaluate_batch, model, criterion, inputs, targets))
    if not closures:
        raise ValueError(
            "there is no batch; pass a loader, or a list of (inputs, targets)"
        )
    return closures


def _evaluate_batch(
    model: nn.Module,
    criterion: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Tensor,
) -> tuple[Outputs, int]:
    """Return a batch's outputs on the model's device, and its number of examples."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    targets = targets.to(device)
    if isinstance(inputs, Mapping):
        keywords = {name: _move(x, device) for name, x in inputs.items()}
        outputs = model(**keywords)
    elif isinstance(inputs, (tuple, list)):
        arguments = [_move(x, device) for x in inputs]
        outputs = model(*arguments)
    else:
        outputs = model(_move(inputs, device))
    return Outputs(outputs, lambda z: criterion(z, targets)), len(targets)


def _move(value: Any, device: torch.device) -> Any:
    """Move all tensors of a nested value to a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

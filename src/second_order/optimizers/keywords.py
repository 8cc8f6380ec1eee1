"""Keywords of the optimizers: their descriptions, and their division between bases.

documented            adds a description of every keyword to an optimizer's docstring
check_base            checks the class that the user passed as base
split_base_keywords   gives each base the arguments that its signature has
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.optimizers.config import AuxBase
from second_order.utils.checks import closest

__all__ = ["Rate", "check_base", "documented", "keywords_of", "split_base_keywords"]

T = TypeVar("T")
Rate: TypeAlias = float | Tensor

# Descriptions of the arguments that are not in the dataclasses of config.py.
PARAMS = (
    "Parameters or parameter groups, as for any ``torch.optim`` optimizer. The modules that own "
    "them are found automatically. Or the model, or an ``nn.ModuleList`` of models, to train all "
    "parameters that require a gradient."
)
LR = (
    "Learning rate of the base, a float or a tensor. Schedulers work as usual. You can leave it "
    "out if every parameter group has its own. If you then add a group without one, it gets that "
    "of the first group."
)
CLOSURE = (
    "Returns the loss of the curvature batch, without calling ``backward``. If ranks have batches "
    "of different sizes, it returns (loss, number of examples). You can pass a sequence of such "
    "functions, one per micro-batch, assign the closure later, or pass it to :meth:`step`."
)
BASE_KWARGS = (
    "Arguments of ``base``: ``momentum``, ``weight_decay``, ``betas`` and so on."
)
FOR_BOTH = " With ``aux_base`` an argument goes to each of the two that takes it."
RAISES = """\
Raises:
    TypeError: For an unknown keyword (naming the closest known one) or a missing
        learning rate.
    ValueError: For a value outside its bounds, with the bound and the remedy; if no
        parameter requires a gradient, or none belongs to ``model``.
    RankMismatchError: If the processes built different models or options.
"""


def documented(*option_classes: type) -> Callable[[type[T]], type[T]]:
    """Decorate an optimizer: add the description of every keyword to its docstring.

    The descriptions are those in the docstrings of the dataclasses in config.py.
    """
    descriptions = {"params": PARAMS, "lr": LR, "curvature_closure": CLOSURE}
    descriptions["**base_kwargs"] = BASE_KWARGS
    for option_class in option_classes:
        descriptions.update(_attribute_descriptions(option_class))

    # Append the descriptions in the order of the signature.
    def document(optimizer: type[T]) -> type[T]:
        if optimizer.__doc__ is None:  # python -OO removes docstrings
            return optimizer
        wrapper = textwrap.TextWrapper(
            width=88,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
        text = inspect.getdoc(optimizer) or ""
        names = ["params", *keywords_of(optimizer), "**base_kwargs"]
        described = dict(descriptions)
        if "aux_base" in names:
            described["**base_kwargs"] += FOR_BOTH
        arguments = [wrapper.fill(f"{name}: {described[name]}") for name in names]
        optimizer.__doc__ = "\n".join([text, "\nArgs:", *arguments, "", RAISES])
        return optimizer

    return document


def keywords_of(optimizer: type) -> list[str]:
    """Return the names of an optimizer's own keywords, without those of its base.

    Those of a user's subclass are those of the class of this package that it extends.
    """
    classes = optimizer.__mro__
    own_class = next(c for c in classes if c.__module__.startswith("second_order."))
    parameters = inspect.signature(own_class).parameters.values()
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    return [p.name for p in named if p.name != "params"]


def _attribute_descriptions(option_class: type) -> dict[str, str]:
    """Return the descriptions under "Attributes:" in the docstring of a dataclass.

    A class that extends another one may describe some of the attributes again.
    """
    descriptions: dict[str, str] = {}
    classes = option_class.__mro__[:-1]  # without `object`
    for each_class in reversed(classes):
        _, _, section = (inspect.getdoc(each_class) or "").partition("Attributes:\n")
        entries = "\n" + section.split("\n\n")[0]
        # Deeper lines continue an entry.
        for entry in re.split(r"\n    (?=\S)", entries):
            name, _, description = entry.partition(": ")
            descriptions[name] = " ".join(description.split())
    return descriptions


# ----------------------------------------------------------------- keywords of the base


def check_base(base: Any, own_class: type, option: str = "base") -> None:
    """Raise TypeError unless ``base`` is a class of first-order optimizers.

    Args:
        base: The value that the user passed.
        own_class: The class of second-order optimizers, which cannot be a base.
        option: The keyword that the user passed it by, for messages.
    """
    if not (isinstance(base, type) and issubclass(base, torch.optim.Optimizer)):
        raise TypeError(
            f"{option}={base!r} is not an optimizer class; pass the class itself, "
            f"as in {option}=torch.optim.SGD, and its arguments as keywords"
        )
    # Refuse classes whose step() cannot be preconditioned.
    if base.step is torch.optim.Optimizer.step:
        raise TypeError(
            f"{option}={base.__name__} has no step() of its own: it is the base class of "
            f"optimizers; pass one of them, as in {option}=torch.optim.SGD"
        )
    if issubclass(base, own_class):
        raise TypeError(
            f"{option}={base.__name__} is a second-order optimizer; use a first-order one"
        )
    if issubclass(base, torch.optim.LBFGS):
        raise TypeError(
            f"{option}=LBFGS evaluates its closure many times per step; use SGD or Adam"
        )


def split_base_keywords(
    base: type,
    kwargs: Mapping[str, Any],
    aux: AuxBase | None,
    own_keywords: Iterable[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keywords between ``base`` and ``aux_base``, by their signatures.

    Args:
        base: Class of the base.
        kwargs: The keywords that the user passed for the two.
        aux: The second base. Its own keywords replace those in ``kwargs``. If it is
            None, both results are those of the base.
        own_keywords: The optimizer's own keywords, from which errors suggest one.

    Raises:
        TypeError: For a keyword that neither base has, or ``lr`` if a base has none.
        ValueError: For ``differentiable=True``.
    """
    aux_class = base
    aux_kwargs: Mapping[str, Any] = {}
    if aux is not None:
        aux_class = aux.optimizer_class
        aux_kwargs = aux.kwargs
    classes = [base] if aux is None else [base, aux_class]
    if kwargs.get("differentiable") or aux_kwargs.get("differentiable"):
        raise ValueError(
            "differentiable=True is not supported: the preconditioner is not differentiated "
            "through; leave it out"
        )

    # Refuse unknown keywords.
    for each_class in classes:
        if "lr" in kwargs and not _takes(each_class, "lr"):
            raise TypeError(
                f"{each_class.__name__} has no keyword 'lr'; use an optimizer that has one"
            )
    for name in kwargs:
        if not any(_takes(each_class, name) for each_class in classes):
            class_names = " or ".join(each_class.__name__ for each_class in classes)
            known = list(own_keywords)
            for each_class in classes:
                known += inspect.signature(each_class).parameters
            hint = closest(name, known)
            # A keyword such as `betas` is not misspelled.
            if _takes(torch.optim.AdamW, name):
                hint = "; AdamW has it: pass base=torch.optim.AdamW"
            raise TypeError(
                f"unknown keyword {name!r}: neither an option here nor one of {class_names}{hint}"
            )
    for name in aux_kwargs:
        if not _takes(aux_class, name):
            known = list(inspect.signature(aux_class).parameters)
            raise TypeError(
                f"aux_base: unknown keyword {name!r}: {aux_class.__name__} does not have it"
                f"{closest(name, known)}"
            )

    # Give each base the keywords that it has.
    base_result = {name: value for name, value in kwargs.items() if _takes(base, name)}
    aux_result = {
        name: value for name, value in kwargs.items() if _takes(aux_class, name)
    }
    aux_result.update(aux_kwargs)
    return base_result, aux_result


def _takes(optimizer_class: type, name: str) -> bool:
    """Whether an optimizer class accepts a keyword."""
    parameters = inspect.signature(optimizer_class).parameters
    for parameter in parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return True
    return name in parameters and name not in ("self", "params")

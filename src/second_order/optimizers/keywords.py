"""How signatures and docstrings of optimizers come to have the keywords of the configuration."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from second_order.optimizers.config import AuxBase
from second_order.utils.checks import closest

__all__ = ["Rate", "check_base", "documented", "keywords_of", "split_base_keywords"]

P = ParamSpec("P")
T = TypeVar("T")
Rate: TypeAlias = float | Tensor

PARAMS = (
    "Parameters or parameter groups, as for any ``torch.optim`` optimizer, which then finds the "
    "modules that own them. Or the model, or a list of models, to train all parameters that "
    "require a gradient."
)
BASE_KWARGS = (
    "Arguments of ``base``: ``momentum``, ``weight_decay``, ``betas`` and so on. With ``aux_base`` "
    "an argument goes to each of the two that takes it."
)
RAISES = """\
Raises:
    TypeError: For an unknown keyword (naming the closest known one) or a missing learning rate.
    ValueError: For a value outside its bounds, with the bound and the remedy; if no parameter
        requires a gradient, or none belongs to ``model``.
    RankMismatchError: If the processes built different models or options.
"""


LR = (
    "The base's learning rate, a float or a tensor; schedulers work as usual. You can leave it out "
    "if every parameter group has its own. A group that you add without one later then gets the "
    "first group's."
)


CLOSURE = (
    "Returns the loss of the curvature batch, or (loss, number of examples) if processes have "
    "unequal batches; or a sequence of such functions, one per micro-batch. You can also assign it "
    "later, or pass it to :meth:`step`."
)


def documented(*kinds: type) -> Callable[[type[T]], type[T]]:
    """Add the meaning of each keyword, as the options' dataclasses have it, to a docstring."""
    meanings = {"params": PARAMS, "lr": LR, "curvature_closure": CLOSURE}
    meanings["**base_kwargs"] = BASE_KWARGS
    for kind in kinds:
        meanings |= _meanings(kind)

    def document(optimizer: type[T]) -> type[T]:
        wrap = textwrap.TextWrapper(
            100, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
        )
        names = ["params", *keywords_of(optimizer), "**base_kwargs"]
        args = [wrap.fill(f"{name}: {meanings[name]}") for name in names]
        text = inspect.getdoc(optimizer) or ""
        optimizer.__doc__ = "\n".join([text, "\nArgs:", *args, "", RAISES])
        return optimizer

    return document


def keywords_of(optimizer: type) -> list[str]:
    """The names of an optimizer's own keywords, without those of its base."""
    parameters = inspect.signature(optimizer).parameters.values()
    return [p.name for p in parameters if p.name != "params" and p.kind is not p.VAR_KEYWORD]


def _meanings(kind: type) -> dict[str, str]:
    """The texts under "Attributes:" in the docstring of a dataclass, or else of what it extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        _, _, listed = (inspect.getdoc(each) or "").partition("Attributes:\n")
        for text in re.split(r"\n    (?=\S)", "\n" + listed.split("\n\n")[0]):
            name, _, meaning = text.partition(": ")
            found[name] = " ".join(meaning.split())
    return found


# --------------------------------------------------------------------- keywords of the base


def check_base(base: Any, own_class: type, option: str = "base") -> None:
    """Raise unless ``base`` is a class of optimizers, but ``own_class``, that can be a base."""
    if not (isinstance(base, type) and issubclass(base, torch.optim.Optimizer)):
        raise TypeError(
            f"{option}={base!r} is not an optimizer class; pass the class itself, "
            f"as in {option}=torch.optim.SGD, and its arguments as keywords"
        )
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
        raise TypeError(f"{option}=LBFGS evaluates its closure many times a step; use SGD or Adam")


def split_base_keywords(
    base: type, given: Mapping[str, Any], second: AuxBase | None, own: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keywords ``given``: each base gets those that its signature has.

    The second base gets its own keywords in place of those that are given. ``own`` are the names of
    the wrapper's keywords, for the error about an unknown one, which names the closest.

    Raises:
        TypeError: For a keyword that neither base has, or ``lr`` with a base that has none.
        ValueError: For ``differentiable=True``.
    """
    kinds = [base]
    special: Mapping[str, Any] = {}
    if second is not None:
        kinds.append(second.optimizer_class)
        special = second.kwargs
    if given.get("differentiable") or special.get("differentiable"):
        raise ValueError(
            "differentiable=True is not supported: the preconditioner is not differentiated "
            "through; leave it out"
        )
    for kind in kinds:
        if "lr" in given and not _takes(kind, "lr"):
            raise TypeError(f"{kind.__name__} has no keyword 'lr'; use an optimizer that has one")
    for name in given:
        if not any(_takes(kind, name) for kind in kinds):
            owners = " or ".join(kind.__name__ for kind in kinds)
            known = [*own, *(each for kind in kinds for each in inspect.signature(kind).parameters)]
            raise TypeError(
                f"unknown keyword {name!r}: neither an option here nor one of {owners}"
                f"{closest(name, known)}"
            )
    for name in special:
        if not _takes(kinds[-1], name):
            known = list(inspect.signature(kinds[-1]).parameters)
            raise TypeError(
                f"aux_base: unknown keyword {name!r}: it is none of {kinds[-1].__name__}"
                f"{closest(name, known)}"
            )
    first, last = (
        {name: value for name, value in given.items() if _takes(kind, name)}
        for kind in (kinds[0], kinds[-1])
    )
    return first, {**last, **special}


def _takes(base: type, name: str) -> bool:
    """Whether an optimizer takes a keyword."""
    parameters = inspect.signature(base).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or (name in parameters and name not in ("self", "params"))

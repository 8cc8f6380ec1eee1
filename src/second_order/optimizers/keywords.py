"""The keywords that all optimizers share, and how a signature is made of keywords.

A keyword has its type, default, meaning and check in one place: a dataclass, with a field made by
:func:`~second_order.options.keyword`. An optimizer's dataclass puts those of its kind together, and
:func:`signed` makes its signature and docstring of them. Type checkers and editors, who do not run
it, find the same fields by :func:`typed`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from second_order.optimizers.base import ParamsOrModel
from second_order.options import keyword

__all__ = [
    "BaseOptions",
    "CommonOptions",
    "Rate",
    "documented",
    "keywords_of",
    "settled",
    "signed",
    "typed",
    "with_rate",
]

P = ParamSpec("P")
T = TypeVar("T")
Rate: TypeAlias = float | Tensor

PARAMS = (
    "Parameters or parameter groups, as for any ``torch.optim`` optimizer, which then finds the "
    "modules that own them. Or the model, or a list of models, to train all parameters that "
    "require a gradient."
)
BASE_KWARGS = (
    "Arguments of ``base``: ``momentum``, ``weight_decay``, ``betas`` and so on; with ``rest``, of "
    "whichever of the two has them, or of both."
)
RAISES = """\
Raises:
    TypeError: For an unknown keyword (naming the closest known one) or a missing learning rate.
    ValueError: For a value outside its bounds, with the bound and the remedy; if no parameter
        requires a gradient, or none belongs to ``model``.
    RankMismatchError: If the processes built different models or options.
"""


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """The keywords of torch's own optimizers, for type checkers alone."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999)
    eps: float = 1e-8
    alpha: float = 0.99
    centered: bool = False
    amsgrad: bool = False
    rho: float = 0.9
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    capturable: bool = False


@dataclass(frozen=True, kw_only=True)
class CommonOptions(BaseOptions):
    """The keywords of every optimizer, which ``SecondOrderOptimizer`` checks.

    Attributes:
        lr: The base's learning rate, a float or a tensor; schedulers work as usual. You can leave
            it out if every parameter group has its own. A group that you add without one later
            then gets the first group's.
        model: The model, if you pass parameters and choose the model yourself. None: the smallest
            module that contains all of them, and the frozen network around it. Wrappers
            (DistributedDataParallel, ``torch.compile``) are removed.
        base: Class of the first-order optimizer that makes the step, with the gradients that it
            gets.
        grad_scaler: The ``GradScaler`` that scales the loss, if there is one.
        gradient_averaging: "auto" averages gradients over the processes that train, after giving
            all of them the first one's parameters, unless DistributedDataParallel does; True or
            False: always or never.
        process_group: The processes to work with; None for the default group, if there is one.
        debug: Compare the processes' parameters, and what else all of them keep, bit for bit:
            before the first step and every 100 steps for True, or every so many steps. Where they
            have parted, every process raises :class:`~second_order.RankMismatchError` with the name
            of the tensor and the ranks. Not saved in checkpoints.
    """

    lr: Rate | None = field(default=None, kw_only=False, metadata={"check": None})
    model: nn.Module | Sequence[nn.Module] | None = keyword(None)
    base: type[torch.optim.Optimizer] = keyword(torch.optim.SGD)
    grad_scaler: Any = keyword(None)
    gradient_averaging: str | bool = keyword("auto")
    process_group: Any = keyword(None)
    debug: bool | int = keyword(False)


def typed(
    kind: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, ParamsOrModel, P], None]]:
    """Tell type checkers that ``__init__`` has the keywords of a dataclass."""
    return lambda init: init


def signed(
    kind: type, without: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[type[T]], type[T]]:
    """Give an optimizer the keywords of a dataclass, in its signature and its docstring."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters, texts = [own, own.replace(name="params")], {"params": PARAMS}
    hints, meanings = get_type_hints(kind), _meanings(kind)
    for each in sorted(fields(kind), key=lambda each: bool(each.kw_only)):
        if "check" in each.metadata and each.name not in without:
            default = (defaults or {}).get(each.name, each.default)
            default = inspect.Parameter.empty if default is MISSING else default
            only = inspect.Parameter.KEYWORD_ONLY if each.kw_only else own.kind
            hint = hints[each.name]
            parameters.append(inspect.Parameter(each.name, only, default=default, annotation=hint))
            texts[each.name] = meanings.get(each.name, "")
    several = inspect.Parameter.VAR_KEYWORD
    parameters.append(inspect.Parameter("base_kwargs", several, annotation=Any))
    texts["**base_kwargs"] = BASE_KWARGS
    wrap = textwrap.TextWrapper(
        100, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
    )
    args = [wrap.fill(f"{name}: {text}") for name, text in texts.items()]

    def sign(optimizer: type[T]) -> type[T]:
        init: Any = optimizer.__init__
        init.__annotations__ = {p.name: p.annotation for p in parameters[2:]} | {"return": None}
        init.__signature__ = inspect.Signature(parameters, return_annotation=None)
        told = inspect.getdoc(optimizer) or ""
        optimizer.__doc__ = "\n".join([told, "\nArgs:", *args, "", RAISES])
        return optimizer

    return sign


LR = (
    "The base's learning rate, a float or a tensor; schedulers work as usual. You can leave it out "
    "if every parameter group has its own. A group that you add without one later then gets the "
    "first group's."
)


def documented(*kinds: type) -> Callable[[type[T]], type[T]]:
    """Add the meaning of each keyword, as the options' dataclasses have it, to a docstring."""
    meanings = {"params": PARAMS, "lr": LR, "**base_kwargs": BASE_KWARGS}
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


def with_rate(lr: Rate | None, base_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the base optimizer, with the learning rate if one is given."""
    return dict(base_kwargs) if lr is None else {"lr": lr, **base_kwargs}


def _meanings(kind: type) -> dict[str, str]:
    """The texts under "Attributes:" in the docstring of a dataclass, or else of what it extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        _, _, listed = (inspect.getdoc(each) or "").partition("Attributes:\n")
        for text in re.split(r"\n    (?=\S)", "\n" + listed.split("\n\n")[0]):
            name, _, meaning = text.partition(": ")
            found[name] = " ".join(meaning.split())
    return found


def settled(
    optimizer: type, lr: Any, keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all keywords of a signed class, and what ``SecondOrderOptimizer`` takes."""
    bound = inspect.signature(optimizer).bind(None, lr, **keywords)
    bound.apply_defaults()
    values = bound.arguments
    rate = values.pop("lr")
    base_kwargs = values.pop("base_kwargs")
    if rate is not None:
        base_kwargs = {"lr": rate, **base_kwargs}
    del values["params"]
    common = {name: values[name] for name in TAKEN if name in values}
    return values, {**common, "base_kwargs": base_kwargs, "own_keywords": [*values, "lr"]}


TAKEN = {each.name for each in fields(CommonOptions) if "check" in each.metadata}

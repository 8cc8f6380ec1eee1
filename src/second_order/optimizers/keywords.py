"""How signatures and docstrings of optimizers come to have the keywords of the configuration."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

from torch import Tensor

__all__ = ["Rate", "documented", "keywords_of", "with_rate"]

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

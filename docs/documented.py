"""What the API page needs to know that is known once the package is imported.

`second_order.optimizers.keywords.signed` makes the signatures and docstrings of optimizers.
mkdocstrings reads the source, where they are not.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

ANNOTATED = {"params": "ParamsT | nn.Module"}  # where the signature has nothing


class Documented(griffe.Extension):
    """Give classes with the decorator `signed` their real docstrings and signatures."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Look at a class whose members are known."""
        if not any(str(d.value).startswith("signed(") for d in cls.decorators):
            return
        real = getattr(importlib.import_module(cls.module.path), cls.name)
        assert cls.docstring is not None
        cls.docstring.value = inspect.getdoc(real) or ""
        init: Any = cls.members["__init__"]
        init.overloads, cls.overloads = None, {}
        init.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    p.name,
                    annotation=(
                        ANNOTATED.get(p.name) if p.annotation is p.empty else named(p.annotation)
                    ),
                    kind=griffe.ParameterKind(p.kind.description),
                    default=None if p.default is p.empty else named(p.default),
                )
                for p in inspect.signature(real.__init__).parameters.values()
            )
        )


def named(value: Any) -> str:
    """A type or a default as a line shows it, without the modules of names."""
    if isinstance(value, type) and not hasattr(value, "__args__"):
        return value.__name__
    shown = str(value) if hasattr(value, "__args__") else repr(value)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", shown)

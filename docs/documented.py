"""What the API page needs to know that is known once the package is imported.

`second_order.optimizers.keywords.documented` adds the meanings of keywords to the docstrings of
optimizers. mkdocstrings reads the source, where they are not.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class Documented(griffe.Extension):
    """Give classes with the decorator `documented` their real docstrings."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Look at a class whose members are known."""
        if not any(str(d.value).startswith("documented(") for d in cls.decorators):
            return
        real = getattr(importlib.import_module(cls.module.path), cls.name)
        assert cls.docstring is not None
        cls.docstring.value = inspect.getdoc(real) or ""

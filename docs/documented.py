"""What the API page needs to know that is known once the package is imported.

Keywords that all systems with Kronecker factors share are documented and have their defaults in
one place, `second_order.kfac.options`. mkdocstrings reads the source, where their names stand.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class Documented(griffe.Extension):
    """Give classes with the decorator `documented` their real docstrings and defaults."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Look at a class whose members are known."""
        if not any(str(d.value) == "documented" for d in cls.decorators):
            return
        real = getattr(importlib.import_module(cls.module.path), cls.name)
        assert cls.docstring is not None
        cls.docstring.value = inspect.getdoc(real) or ""
        parameters = inspect.signature(real).parameters
        for parameter in cls.members["__init__"].parameters:  # type: ignore[union-attr]
            if str(parameter.default).startswith("KFACOptions."):
                parameter.default = repr(parameters[parameter.name].default)

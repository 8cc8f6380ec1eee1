"""What the tests of options share: a model, and rows of tables for the systems that take them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from optimizer_cases import SYSTEMS
from torch import nn

from second_order import MRDHO2

if TYPE_CHECKING:
    from collections.abc import Sequence

SGD = torch.optim.SGD
Adam = torch.optim.Adam


def mlp() -> nn.Module:
    return ZOO["mlp"].model()


def keywords_of(System: Any) -> set[str]:
    """Those that are not the base's."""
    found = inspect.signature(System).parameters.values()
    return {p.name for p in found if p.kind is p.KEYWORD_ONLY}


def takes(System: Any, option: str) -> bool:
    return option in keywords_of(System)


ALL = (*SYSTEMS, MRDHO2)


def rows(table: Sequence[tuple[Any, ...]], systems: Sequence[Any] = ALL) -> list[Any]:
    """The rows of a table, by option, each with every system whose or whose base's option it is."""
    return [
        pytest.param(System, *row, id=f"{System.__name__}-{row[0]}-{_shown(row[1])}")
        for row in table
        for System in systems
        if takes(System, row[0]) or takes(SGD, row[0]) or takes(Adam, row[0])
    ]


def _shown(value: Any) -> str:
    return str(getattr(value, "__name__", value))

"""Fractions of all combinations of options; all combinations in a thorough run."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def fractional_product(*factors: Sequence[Any], part: int, first: int = 0) -> list[tuple[Any, ...]]:
    """The combinations whose indices add up, from `first` on, to a multiple of `part`.

    If you ignore one factor with at least `part` values, all combinations of the others occur.
    """
    places = itertools.product(*(range(len(values)) for values in factors))
    return [
        tuple(values[place] for values, place in zip(factors, each, strict=True))
        for each in places
        if THOROUGH or (first + sum(each)) % part == 0
    ]

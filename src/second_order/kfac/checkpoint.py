"""Factors in checkpoints: how they are saved, checked and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.budget import OVERHEAD
from second_order.contract.checkpoint import ELSEWHERE, HEADER
from second_order.contract.saved import COUNTABLE, SavedPart
from second_order.contract.training import Training
from second_order.kfac.drift import DRIFT, DRIFT_ALIKE, DRIFT_INTERVAL
from second_order.kfac.layers import Layers
from second_order.kfac.options import BUDGETED
from second_order.kfac.step_length import STEP_LENGTH, STEP_SIGN
from second_order.kfac.trace_refresh import SETTLED
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.triangles import packed_diagonal

__all__ = [
    "MEAN_CURVATURE",
    "READ_BY_ALL",
    "check_saved_factors",
    "load_factors",
    "loaded_mean_curvature",
    "loaded_workers",
    "saved_factors",
    "saved_workers",
]

LETTERS = ("A", "G", "L")
WEIGHT, MEANS, EXAMPLES = "average_weight", "mean_eigenvalues", "examples"
CHOSEN = ("gradient_workers", "gradient_workers_of")
MEAN_CURVATURE = "mean_curvature"
ALIKE = (MEAN_CURVATURE, *STEP_LENGTH, OVERHEAD, *BUDGETED)
"""Entries that are the same in the parts of all layers."""

READ_BY_ALL = (
    WEIGHT,
    MEANS,
    EXAMPLES,
    SETTLED,
    *DRIFT,
    *ALIKE,
    *CHOSEN,
)
"""What each process reads of a checkpoint, whoever keeps the factors."""


def saved_factors(
    layers: Layers,
    taken: Callable[[KroneckerBlock], bool],
    common: Mapping[str, Any],
    of_layer: Callable[[KroneckerBlock], Mapping[str, Any]],
) -> dict[Tensor, dict[str, Any]]:
    """The factors that this process keeps, by the layers' weights; shared, not copied.

    Args:
        layers: The layers of the model.
        taken: Tells whether this process has any statistics of a layer.
        common: Entries that are saved with every layer.
        of_layer: Makes further entries of a layer, which every process has.
    """
    active = set(layers.active)
    return {
        block.weight: {
            **(block.saved_factors() if taken(block) else {}),
            **common,
            **of_layer(block),
        }
        for block in layers.blocks
        if block in active or block.factors is not None
    }


def saved_workers(workers: int, ranks: int) -> dict[str, int]:
    """The chosen number of gradient workers as a checkpoint has it.

    Args:
        workers: The number that was chosen, or 0 where FSDP2 leaves no choice.
        ranks: The number of ranks that it was chosen for.
    """
    return dict(zip(CHOSEN, (workers, ranks), strict=True))


def loaded_workers(saved: Mapping[Tensor, SavedPart], ranks: int) -> int:
    """The number of gradient workers that was chosen for so many ranks, or 0."""
    found = next((part for part in saved.values() if part.keys() >= set(CHOSEN)), None)
    if found is None or found.whole(CHOSEN[1], 0) != ranks:
        return 0
    return int(found.whole(CHOSEN[0], 0))


def loaded_mean_curvature(saved: Mapping[Tensor, SavedPart]) -> float:
    """The mean curvature of all layers at the last refresh before saving; 0 if it is not there."""
    parts = (part for part in saved.values() if MEAN_CURVATURE in part)
    return next((part.number(MEAN_CURVATURE, 0.0) for part in parts), 0.0)


def load_factors(
    saved: Mapping[Tensor, SavedPart], blocks: Sequence[KroneckerBlock], training: Training
) -> None:
    """Take over the factors of layers, in the dtypes they were saved in."""
    for block in blocks:
        part: Mapping[str, Any] = saved.get(block.weight, {})
        block.staged.clear()
        block.forget()
        if WEIGHT in part and (block.trainable or block.fits(part)):
            block.load_factors(part)
        elif WEIGHT in part:
            training.warn(
                f"the factors of layer {block.name!r} are not taken over: it is frozen, and "
                f"saved with another size, with its bias perhaps; once it trains they are "
                f"taken anew"
            )


def check_saved_factors(
    saved: Mapping[Tensor, SavedPart], blocks: Sequence[KroneckerBlock]
) -> None:
    """Raise ValueError unless every part is sound, and those of layers that train fit them.

    A layer that is frozen may have been saved with its bias, and one that has no block here with
    any sizes: of such layers, factors that do not fit are not loaded.

    Args:
        saved: The ``"curvature"`` parts of a checkpoint.
        blocks: The layers to be loaded.
    """
    of: dict[Tensor, KroneckerBlock] = {block.weight: block for block in blocks}
    _check_alike(saved)
    _check_workers(saved)
    for p, part in saved.items():
        known = (*HEADER, *LETTERS, *READ_BY_ALL)
        part.check_known(known, ELSEWHERE)
        if SETTLED in part:
            part.whole(SETTLED, 0, 1)
        for name, least in ((DRIFT_INTERVAL, 1), (DRIFT_ALIKE, 0)):
            if name in part:
                part.whole(name, least)
        there = [letter for letter in LETTERS if letter in part]
        if there or MEANS in part or EXAMPLES in part:
            part.require([WEIGHT])
        if WEIGHT in part:
            part.number(WEIGHT, 0.0, COUNTABLE)
        if EXAMPLES in part:
            part.number(EXAMPLES, 0.0, COUNTABLE)
        for key in (*there, *([MEANS] if MEANS in part else [])):
            part.tensor(key)
        block = of.get(p)
        # A frozen layer's bias is not in its A yet: factors that do not fit are not loaded.
        if block is not None and (block.trainable or block.fits(part)):
            _check_fit(part, block, there)
        elif MEANS in part:
            part.not_below(MEANS, 0.0, part[MEANS])


def _check_alike(saved: Mapping[Tensor, SavedPart]) -> None:
    """Raise ValueError unless what is saved with every layer is sound, and the same with each."""
    known: dict[str, float] = {}
    for part in saved.values():
        for name in part.keys() & set(ALIKE):
            least = -math.inf if name == STEP_SIGN else 0.0
            value = part.whole(name, 0) if name in BUDGETED else part.number(name, least)
            if known.setdefault(name, value) != value:
                raise part.wrong(name, f"is {value}, and {known[name]} for another parameter")


def _check_workers(saved: Mapping[Tensor, SavedPart]) -> None:
    """Raise ValueError unless chosen gradient workers divide their ranks, alike in all parts."""
    known: tuple[int, int] | None = None
    for part in saved.values():
        if not set(CHOSEN) <= part.keys():
            continue
        workers, ranks = (int(part.whole(name, 0)) for name in CHOSEN)
        if workers and not (workers <= ranks and ranks % workers == 0):
            raise part.wrong(CHOSEN[0], f"is {workers}, which does not divide {ranks} ranks")
        if known not in (None, (workers, ranks)):
            raise part.wrong(CHOSEN[0], f"is {workers} of {ranks}, and {known} elsewhere")
        known = workers, ranks


def _check_fit(part: SavedPart, block: KroneckerBlock, there: Sequence[str]) -> None:
    shape = block.shape
    block.check_factors(part)
    for letter in there:
        if letter not in shape.letters:
            raise part.wrong(letter, f"is no factor of layer {block.name!r}")
        factor = part[letter]
        if shape.is_diagonal(letter):
            diagonal = factor
        elif factor.dim() == 3:
            diagonal = factor.diagonal(dim1=-2, dim2=-1)
        else:
            diagonal = packed_diagonal(factor, shape.dim(letter))
        part.not_below(letter, 0.0, diagonal)
    if MEANS in part:
        part.tensor(MEANS, (len(shape.letters), shape.groups))
        part.not_below(MEANS, 0.0, part[MEANS])

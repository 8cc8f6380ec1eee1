"""Factors in checkpoints: how they are saved, checked and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from second_order.contract.checkpoint import HEADER
from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.kfac.budget import SAVED
from second_order.kfac.drift import DRIFT
from second_order.kfac.layers import Layers
from second_order.kfac.step_length import STEP_LENGTH, STEP_SIGN
from second_order.kfac.trace_refresh import SETTLED
from second_order.kronecker.block import KroneckerBlock

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
ALIKE = (MEAN_CURVATURE, *STEP_LENGTH)
"""Entries that are the same in the parts of all layers."""

READ_BY_ALL = (
    WEIGHT,
    MEANS,
    EXAMPLES,
    SETTLED,
    *DRIFT,
    *ALIKE,
    *sorted(SAVED),
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
    tensors, alike = {*LETTERS, MEANS}, {*ALIKE, *SAVED, *CHOSEN}
    known: dict[str, float] = {}
    for p, part in saved.items():
        part.check_known((*HEADER, *LETTERS, *READ_BY_ALL))
        if part.keys() & {*tensors, EXAMPLES}:
            part.require([WEIGHT])
        for key in part.keys() - set(HEADER):
            if key in tensors:
                part.tensor(key)
                continue
            value = part.number(key, -math.inf if key == STEP_SIGN else 0.0)
            if key in alike and known.setdefault(key, value) != value:
                raise part.wrong(key, f"is {value:g}, and {known[key]:g} for another parameter")
        block = of.get(p)
        # A frozen layer's bias is not in its A yet: factors that do not fit are not loaded.
        if block is not None and (block.trainable or block.fits(part)):
            block.check_factors(part)
            if MEANS in part:
                part.tensor(MEANS, (len(block.shape.letters), block.shape.groups))

"""Factors in checkpoints: whether they can be a layer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from second_order.contract.checkpoint import ELSEWHERE, HEADER
from second_order.contract.saved import COUNTABLE, SavedPart
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.triangles import packed_diagonal

__all__ = ["READ_BY_ALL", "check_saved_factors"]

LETTERS = ("A", "G", "L")
WEIGHT, MEANS = "average_weight", "mean_eigenvalues"
READ_BY_ALL = (WEIGHT, MEANS)
"""What each process reads of a checkpoint, whoever keeps the factors."""


def check_saved_factors(
    saved: Mapping[Tensor, SavedPart], blocks: Sequence[KroneckerBlock]
) -> None:
    """Raise ValueError unless every part is sound, and those of layers that train fit them.

    A layer that is frozen may have been saved with its bias, and one that has no block here with
    any sizes: of these nothing is taken over that does not fit.

    Args:
        saved: The ``"curvature"`` parts of a checkpoint.
        blocks: The layers.
    """
    of: dict[Tensor, KroneckerBlock] = {block.weight: block for block in blocks}
    for p, part in saved.items():
        part.check_known((*HEADER, WEIGHT, MEANS, *LETTERS), ELSEWHERE)
        there = [letter for letter in LETTERS if letter in part]
        if there or MEANS in part:
            part.require([WEIGHT])
        if WEIGHT in part:
            part.number(WEIGHT, 0.0, COUNTABLE)
        for key in (*there, *([MEANS] if MEANS in part else [])):
            part.tensor(key)
        block = of.get(p)
        if block is not None and block.trainable:  # a frozen layer's bias is not in its A yet
            _check_fit(part, block, there)
        elif MEANS in part:
            part.not_below(MEANS, 0.0, part[MEANS])


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

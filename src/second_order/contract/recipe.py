"""The lines of ``recipe()``: a parameter each, with its base and that base's settings."""

from __future__ import annotations

from collections.abc import Collection

from second_order.contract.groups import NAMES
from second_order.contract.training import Training
from second_order.contract.two_bases import base_of, name_of
from second_order.report import Recipe, RecipeRow

__all__ = ["recipe_of"]


def recipe_of(training: Training, preconditioned: Collection[int]) -> Recipe:
    """A table of how each parameter in the groups is trained.

    Args:
        training: The training that has the groups.
        preconditioned: Ids of the parameters that the curvature preconditions.
    """
    names, rows = training.names(), []
    for group in training.groups:
        base, decay = name_of(base_of(training.base, group)), group.get("weight_decay")
        called = group.get(NAMES) or [""] * len(group["params"])
        for p, name in zip(group["params"], called, strict=True):
            status = "preconditioned" if id(p) in preconditioned else "plain gradient"
            rows.append(
                RecipeRow(
                    name=name or names.get(id(p), "(not in the model)"),
                    shape=tuple(p.shape),
                    base=base,
                    lr=float(group["lr"]),
                    weight_decay=None if decay is None else float(decay),
                    status=status if p.requires_grad else "frozen",
                )
            )
    return Recipe(f"{training.name} over {training.base_name}, step {training.steps}", rows)

"""Eigenpairs in checkpoints: whole vectors, with the first parameter that trains.

They are state, not something to compute again: the batch they were computed from is gone. Every
parameter that trains has the counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.saved import HEADER, SavedPart
from second_order.fosi.flat_params import FlatParams, all_gather_on_cpu
from second_order.fosi.subspace import Subspace
from second_order.fosi.trust import TrustState
from second_order.training.throttle import THROTTLE_ENTRIES

__all__ = [
    "START",
    "SUM",
    "SavedPairs",
    "check_saved_pairs",
    "counts_of",
    "empty_pairs",
    "gather_pairs",
    "read_pairs",
]

SUM, START = "gradient_sum", "epoch_start"  # of an epoch under way: (n,) each, as the pairs
EPOCH = ("epoch", "epoch_step", "epoch_sums")
COUNTS = ("refreshed_at", "batch_loss", "rest_scale_bound", *THROTTLE_ENTRIES, *EPOCH)


@dataclass(frozen=True)
class SavedPairs:
    """Eigenpairs with their momentum and trust region, of all processes; entries of a checkpoint.

    Without eigenpairs ``num_largest`` is below 0: some checkpoints are read into existing tensors.
    """

    eigenvectors: Tensor  # (r, n)
    carried_momentum: Tensor  # (n,)
    eigenvalues: Tensor  # (r,), as the next three
    residuals: Tensor
    subspace_momentum: Tensor
    last_step: Tensor
    trust_region: Tensor
    num_largest: int
    carried_decay: float

    def entries(self, device: torch.device) -> dict[str, Any]:
        """The entries by name, on one device: torch loads whole states only if they share one."""
        return {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }


PAIRS = tuple(field.name for field in fields(SavedPairs))


def gather_pairs(subspace: Subspace, vector: FlatParams) -> SavedPairs:
    """All processes' eigenpairs; a collective. Tensors are shared where all is here."""
    basis = subspace.basis
    newton = subspace.newton
    vectors = basis.vectors
    carried = subspace.carried_momentum
    momentum = newton.momentum
    last = newton.full_step
    if basis.by_rows:
        vectors = vector.gather(vectors)
        carried = vector.gather(carried)
    else:
        everybody = all_gather_on_cpu(basis.world, [vectors, momentum, last])
        vectors, momentum, last = (torch.cat(each) for each in zip(*everybody, strict=True))
    return SavedPairs(
        eigenvectors=vectors,
        carried_momentum=carried,
        eigenvalues=subspace.values,
        residuals=subspace.residuals,
        subspace_momentum=momentum,
        last_step=last,
        trust_region=newton.trust,
        num_largest=subspace.num_largest,
        carried_decay=subspace.carried_decay,
    )


def empty_pairs(count: int, vector: FlatParams) -> SavedPairs:
    """Zeros of the shape of so many eigenpairs."""
    r = min(count, vector.size)
    vectors = torch.zeros((r, vector.size), dtype=vector.dtype, device=vector.params[0].device)
    return SavedPairs(
        eigenvectors=vectors,
        carried_momentum=vectors.new_zeros(vector.size),
        eigenvalues=torch.zeros(r, dtype=torch.float64, device="cpu"),
        residuals=torch.zeros(r, dtype=torch.float64, device="cpu"),
        subspace_momentum=vectors.new_zeros(r),
        last_step=vectors.new_zeros(r),
        trust_region=vectors.new_zeros(len(TrustState._fields)),
        num_largest=-1,
        carried_decay=1.0,
    )


def counts_of(saved: Mapping[Tensor, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The counts of a checkpoint: parameters that did not train have none."""
    return next((part for part in saved.values() if "refreshed_at" in part), {})


def with_vectors(saved: Mapping[Tensor, SavedPart], key: str) -> SavedPart | None:
    """The part of a checkpoint that has an entry of whole vectors; None if there is none."""
    return next((part for part in saved.values() if key in part), None)


def same_params(saved: Mapping[Tensor, SavedPart], params: Sequence[Tensor]) -> bool:
    """Whether the parameters trained, when a checkpoint was made, that train now."""
    return {p for p, part in saved.items() if "refreshed_at" in part} == set(params)


def read_pairs(saved: Mapping[Tensor, SavedPart]) -> SavedPairs | None:
    """The eigenpairs of a checkpoint; None if it has none."""
    part = with_vectors(saved, "eigenvectors")
    if part is None or part["num_largest"] < 0:
        return None
    return SavedPairs(**{name: part[name] for name in PAIRS})


def check_saved_pairs(saved: Mapping[Tensor, SavedPart]) -> None:
    """Raise ValueError unless counts and eigenpairs are finite, and fit the parameters."""
    trained = {p: part for p, part in saved.items() if "refreshed_at" in part}
    for part in saved.values():
        part.check_known((*HEADER, *COUNTS, *PAIRS, START, SUM))
    for part in trained.values():
        part.require(["batch_loss", "rest_scale_bound"])
        part.whole("refreshed_at", -1, part["steps"])
        if not isinstance(part["batch_loss"], float):  # infinite before the first refresh
            raise part.wrong("batch_loss", "is no number")
        for key in part.keys() & set(COUNTS) - {"refreshed_at", "batch_loss"}:
            part.number(key, 0.0)

    # Vectors are of all parameters that trained.
    n = sum(p.numel() for p in trained)
    for part in trained.values():
        shapes: dict[str, tuple[int, ...]] = {START: (n,), SUM: (n,)}
        if not part.keys().isdisjoint(PAIRS):
            part.require(PAIRS)
            # The eigenvalues tell how many pairs there are, so they are checked before the others.
            counted = tuple(part.tensor("eigenvalues").shape[:1])
            part.tensor("eigenvalues", counted or (1,))
            part.whole("num_largest", -1, *counted)
            part.number("carried_decay", 0.0, 1.0)
            each = ("residuals", "subspace_momentum", "last_step")
            shapes |= dict.fromkeys(each, counted)
            shapes["eigenvectors"] = (*counted, n)
            shapes["carried_momentum"] = (n,)
            shapes["trust_region"] = (len(TrustState._fields),)
        for key in part.keys() & shapes.keys():
            part.tensor(key, shapes[key])
